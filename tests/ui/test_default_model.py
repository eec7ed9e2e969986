"""One walk through the page with the default model and the real command, killed and started again on the way."""

import json
import socket
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, WebSocketRoute, expect

from chatpage.bench.serving import serving
from tests.ui.pages import DESKTOP, LENGTH, PHONE, TIMEOUT_MS, wait_until

PARAMS = '{"max_tokens": 12, "temperature": 0.8, "seed": 11}'
LAST = "chatpage.conversation.textOf(chatpage.conversation.activeLeaf.id)"
RUN = """([input, size]) => {
    const params = { ignore_eos: true, max_tokens: size }
    chatpage.run({ kind: "reply", input, parent_id: chatpage.parentForNext(), params })
}"""
SLOW_MS = 120_000  # the very first start computes without the kernels


@pytest.mark.skipif(sys.platform != "linux", reason="looks for child processes in /proc")
@pytest.mark.timeout(600)
def test_a_walk_through_the_page_on_the_default_model(browser: Browser, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = ["--kv-memory", "512MiB", "--port", str(port)]
    context = browser.new_context(viewport=DESKTOP, color_scheme="dark", accept_downloads=True)
    context.set_default_timeout(SLOW_MS)
    expect.set_options(timeout=SLOW_MS)
    context.add_init_script(f"localStorage['chatpage.params'] ??= {PARAMS!r}")
    page = context.new_page()
    with serving(tmp_path / "data", arguments) as served:
        page.goto(served.url)
        expect(page.locator(".cp-dot.is-open")).to_be_attached()
        assert "dark" in page.evaluate("document.body.className")
        _ask(page, "Name a colour.")
        _eight_versions_and_use_one(page)
        _branch_at_a_word(page)
        _edit(page)
        _fork(page)
        _reload_in_the_middle(page)
        _cut_the_socket(page)
        _two_tabs(page)
        page.locator(".cp-composer textarea").fill("After the restart")
        served.kill()
        expect(page.locator(".cp-banner")).to_be_visible()
    with serving(tmp_path / "data", arguments):
        expect(page.locator(".cp-banner")).to_be_hidden()
        page.locator(".cp-composer textarea").press("Enter")
        expect(page.locator(".cp-message.is-user").last).to_contain_text("After the restart")
        _settle(page)
        usage = page.evaluate("chatpage.conversation.activeLeaf.usage")
        assert usage["cached_tokens"] > 0  # the blocks came from the disk
        _search_export_import(page, tmp_path)
        page.set_viewport_size(PHONE)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    context.close()
    expect.set_options(timeout=TIMEOUT_MS)


def _last(page: Page) -> Locator:
    return page.locator(".cp-message").last


def _settle(page: Page) -> None:
    wait_until(page, "!chatpage.conversation?.liveRuns.length", timeout_ms=SLOW_MS)
    expect(page.locator(".is-writing")).to_have_count(0)


def _ask(page: Page, text: str) -> None:
    page.locator(".cp-composer textarea").fill(text)
    page.locator(".cp-composer textarea").press("Enter")
    expect(page.locator(".cp-composer textarea")).to_have_value("")
    _settle(page)


def _eight_versions_and_use_one(page: Page) -> None:
    _last(page).locator('[data-n="8"]').click()
    expect(page.locator(".cp-column")).to_have_count(9)
    _settle(page)
    expect(page.locator(".cp-columns-head")).to_contain_text(" 0 computed")
    page.locator(".cp-column").nth(5).get_by_role("button", name="Use this").click()
    expect(_last(page).locator(".cp-pager-count")).to_have_text("6/9")
    _last(page).locator(".cp-prev").click()
    expect(_last(page).locator(".cp-pager-count")).to_have_text("5/9")


def _branch_at_a_word(page: Page) -> None:
    _last(page).get_by_role("button", name="Words: alternatives, and branching at any of them").click()
    page.locator(".cp-words [role=button], .cp-words button").nth(2).click()
    page.locator(".cp-alternative:not(.is-chosen)").first.click()
    expect(_last(page).locator(".cp-pager-count")).to_have_text("10/10")
    _settle(page)


def _edit(page: Page) -> None:
    page.locator(".cp-message.is-user").first.hover()
    page.locator(".cp-message.is-user").first.get_by_role("button", name="Edit", exact=True).click()
    page.get_by_label("Edit the message").fill("Name an animal.")
    page.get_by_role("button", name="Send", exact=True).first.click()
    expect(page.locator(".cp-message.is-user").first).to_contain_text("Name an animal.")
    _settle(page)


def _fork(page: Page) -> None:
    _last(page).get_by_role("button", name="Fork to a new conversation").click()
    page.get_by_role("button", name="This path, up to here").click()
    expect(page.locator(".cp-title")).to_have_value("Name a colour. (fork)")
    expect(page.locator(".cp-message")).to_have_count(2)


def _reload_in_the_middle(page: Page) -> None:
    page.evaluate(RUN, ["Count.", 1500])
    wait_until(page, f"chatpage.conversation.activeLeaf?.role === 'assistant' && {LENGTH} > 20")
    page.reload()
    expect(page.locator(".cp-dot.is-open")).to_be_attached()
    expect(page.locator(".cp-message.is-writing")).to_be_attached()
    expect(page.locator(".cp-message")).to_have_count(4)
    page.locator(".cp-composer textarea").press("Escape")
    _settle(page)


def _cut_the_socket(page: Page) -> None:
    sockets: list[WebSocketRoute] = []

    def pass_through(route: WebSocketRoute) -> None:
        sockets.append(route)
        route.connect_to_server()

    cut = page.context.new_page()
    cut.route_web_socket("**/ws", pass_through)
    cut.goto(page.url)
    expect(cut.locator(".cp-message")).to_have_count(4)
    page.evaluate(RUN, ["Count on.", 1500])
    for least in (20, 60):
        wait_until(cut, f"chatpage.conversation.activePath().length === 6 && {LENGTH} > {least}")
        sockets[-1].close(code=1011)
        count = len(sockets)
        while len(sockets) == count:
            cut.wait_for_timeout(20)
    wait_until(cut, f"{LENGTH} > 100")
    page.locator(".cp-composer textarea").press("Escape")
    _settle(page)
    _settle(cut)
    assert cut.evaluate(LAST) == page.evaluate(LAST)
    cut.close()


def _two_tabs(page: Page) -> None:
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.locator(".cp-message")).to_have_count(6)
    _ask(page, "And a plant?")
    expect(other.locator(".cp-message")).to_have_count(8)
    _settle(other)
    assert other.evaluate(LAST) == page.evaluate(LAST)
    other.close()


def _search_export_import(page: Page, folder: Path) -> None:
    page.get_by_role("searchbox").fill("colour")
    expect(page.locator("#cp-sidebar mark").first).to_be_visible()
    page.keyboard.press("Escape")
    url = page.url.partition("#")[0]
    exported = page.request.get(url + "api/export").body()
    assert len(json.loads(exported)) >= 1
    (folder / "all.json").write_bytes(exported)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Import conversations").click()
    chooser.value.set_files(folder / "all.json")
    expect(page.locator("#cp-sidebar")).to_contain_text("unchanged")
