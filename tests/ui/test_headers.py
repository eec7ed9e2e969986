"""Headers of pages, and what a real browser makes of them."""

import asyncio
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import gradio as gr
import pytest
import uvicorn
from fastapi import FastAPI
from playwright.sync_api import expect, sync_playwright
from starlette.responses import HTMLResponse, PlainTextResponse, StreamingResponse
from starlette.testclient import TestClient
from starlette.types import ASGIApp

from chatpage_ui.headers import HEADERS, PageHeaders, policy

PAGE = '<p>a</p><script>let a = 1</script><SCRIPT type="module">b()</SCRIPT><script src="/c.js"></script>'

OURS = """
let found = "may evaluate"
try { Function("") } catch { found = "may not evaluate" }
setInterval(() => {
  const host = document.querySelector("#host")
  if (host) host.textContent = found
}, 20)
"""


def test_only_the_scripts_a_page_was_sent_with_run() -> None:
    found = policy(PAGE.encode(), allows_eval=False)
    (scripts,) = re.findall(r"script-src ([^;]*)", found)
    assert scripts.split()[0] == "'self'"
    assert len(re.findall(r"'sha256-[A-Za-z0-9+/]{43}='", scripts)) == 2
    assert "unsafe" not in scripts
    assert "'unsafe-eval'" in policy(b"", allows_eval=True)


def test_a_page_gets_a_policy_and_other_answers_do_not() -> None:
    client = TestClient(_app())
    page = client.get("/page")
    assert page.text == PAGE
    assert page.headers["content-security-policy"] == policy(PAGE.encode(), allows_eval=False)
    other = client.get("/text")
    assert "content-security-policy" not in other.headers
    for name, value in HEADERS.items():
        assert page.headers[name] == other.headers[name] == value


def test_a_page_that_comes_in_pieces_is_hashed_as_a_whole() -> None:
    page = TestClient(_app()).get("/pieces")
    assert page.text == PAGE
    assert page.headers["content-security-policy"] == policy(PAGE.encode(), allows_eval=False)


def test_an_answer_that_is_no_page_is_not_held_back() -> None:
    """A stream of events that is collected before it is sent on would never arrive."""
    assert asyncio.run(_first_piece_of_endless(PageHeaders(_app_inner(), allows_eval=False))) == b"tick"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Gradio calls pandas on every event as pandas no longer likes
def test_gradio_works_under_the_policy_and_calls_nobody(page_address: str) -> None:
    """Gradio's fonts and its analytics would tell strangers who opens the page, and not work offline."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page()
        requests: list[str] = []
        problems: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.add_init_script(
            "window.violations = []; document.addEventListener('securitypolicyviolation',"
            " event => window.violations.push(`${event.violatedDirective} ${event.blockedURI} ${event.sourceFile}`))"
        )
        page.goto(page_address)
        page.wait_for_selector("#host >> text=may not evaluate")
        page.click("#ask")
        expect(page.locator("#answer").locator("input, textarea")).to_have_value("one is 1")
        violations = page.evaluate("window.violations")
        browser.close()
    assert len(violations) == 1
    assert violations[0].endswith("/ours.js")  # its own try
    assert problems == []
    assert {request for request in requests if not request.startswith((page_address, "data:", "blob:"))} == set()


@pytest.fixture
def page_address() -> Iterator[str]:
    app = asyncio.run(_gradio_app())  # outside a running loop, Gradio makes one and never closes it
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join(30)


async def _gradio_app() -> FastAPI:
    app = FastAPI()

    @app.get("/ours.js")
    async def ours() -> PlainTextResponse:
        return PlainTextResponse(OURS, media_type="text/javascript")

    with gr.Blocks(analytics_enabled=False) as blocks:
        with gr.Sidebar():
            number = gr.Slider(0, 2, value=1, label="number")
            gr.Dropdown(["a", "b"], label="choice")
            gr.Checkbox(label="yes")
        gr.Markdown("# title")
        with gr.Column(elem_id="host"):
            pass
        answer = gr.Textbox(label="answer", elem_id="answer")
        gr.Button("ask", elem_id="ask").click(lambda value: f"one is {value}", number, answer)
    theme = gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    head = '<script type="module" src="/ours.js"></script>'
    gr.mount_gradio_app(app, blocks, path="/", theme=theme, head=head, run_history=False, ssr_mode=False, footer_links=[])
    app.add_middleware(PageHeaders, allows_eval=False)
    return app


def _app_inner() -> FastAPI:
    app = FastAPI()

    @app.get("/page")
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE)

    @app.get("/text")
    async def text() -> PlainTextResponse:
        return PlainTextResponse("<script>not a page</script>")

    @app.get("/pieces")
    async def pieces() -> StreamingResponse:
        return StreamingResponse(iter([PAGE[:20], PAGE[20:]]), media_type="text/html")

    @app.get("/endless")
    async def endless() -> StreamingResponse:
        async def ticks() -> Any:
            while True:
                yield "tick"
                await asyncio.sleep(1)

        return StreamingResponse(ticks(), media_type="text/event-stream")

    return app


def _app() -> ASGIApp:
    return PageHeaders(_app_inner(), allows_eval=False)


async def _first_piece_of_endless(app: ASGIApp) -> bytes:
    found: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def receive() -> Any:
        await found
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message.get("body") and not found.done():
            found.set_result(message["body"])

    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": "/endless",
        "headers": [],
        "query_string": b"",
        "http_version": "1.1",
    }
    task = asyncio.ensure_future(app(scope, receive, send))
    try:
        return await asyncio.wait_for(found, 30)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
