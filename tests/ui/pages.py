"""The page in a real browser: Debian's Chromium, driven by Playwright, against a real server on a tiny model."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Locator, Page, ViewportSize, expect

from chatpage.engine.core import Engine
from chatpage.events import Event, RequestFinished, RequestId, TokenDelta
from chatpage.sampling_params import SamplingParams
from chatpage.server.settings import ServeSettings
from chatpage_ui import mount_page
from tests.engine.engines import tiny_engine
from tests.server.serving import Served, serving

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync")
DESKTOP: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 390, "height": 844}
TIMEOUT_MS = 40_000  # a machine with much else to do
HELD_S = 0.005
PARAMS = '{"max_tokens": 24, "temperature": 1, "seed": 7}'
LONG = '{"max_tokens": 1000, "temperature": 1, "seed": 3}'  # for what is stopped, or held, before it ends
LENGTH = "chatpage.conversation.textOf(chatpage.conversation.activeLeaf.id).length"
expect.set_options(timeout=TIMEOUT_MS)


class HeldEngine:
    """An engine that writes no further than it may, so that what a test needs unfinished is so on any machine.

    A reply ends at its limit of tokens or when it is stopped, never by a token that a random model happens to draw; and what is
    stopped while the engine is held ends nevertheless.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_written = 0  # steps that gave tokens
        self._most: int | None = None
        self._has_ended = False  # something was stopped, and has not been told yet
        self._requests: set[RequestId] = set()  # which have not finished
        self._left: set[RequestId] = set()  # of those, which nobody waits for

    def hold(self, after: int = 0) -> None:
        """Write `after` more tokens per sample, and nothing after that until `release`."""
        self._most = self._num_written + after

    def release(self) -> None:
        self._most = None

    def add_request(self, token_ids: Sequence[int], params: SamplingParams | None = None, **options: Any) -> RequestId:
        request_id = self._engine.add_request(token_ids, replace(params or SamplingParams(), ignore_eos=True), **options)
        self._requests.add(request_id)
        return request_id

    def abort(self, request_id: RequestId, sample: int | None = None) -> None:
        self._engine.abort(request_id, sample)
        self._has_ended = True

    def leave(self) -> None:
        """Have stopped what runs now: a test that failed must not write into the next one."""
        self._left = set(self._requests)

    def step(self) -> list[Event]:
        for request_id in self._left & self._requests:
            self.abort(request_id)
        self._left = set()
        most = self._most
        if most is not None and self._num_written >= most and not self._has_ended:
            time.sleep(HELD_S)
            return []
        self._has_ended = False
        events = self._engine.step()
        self._num_written += any(isinstance(event, TokenDelta) for event in events)
        self._requests -= {event.request_id for event in events if isinstance(event, RequestFinished)}
        return events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@dataclass(slots=True)
class Site:
    """A server with the page, and a browser."""

    served: Served
    browser: Browser
    engine: HeldEngine
    requests: list[str] = field(default_factory=list)
    _usual: BrowserContext | None = None  # has Gradio in its cache, which halves the time of a visit
    _is_usual_free: bool = True

    @contextlib.contextmanager
    def visit(
        self, *, address: str = "/", params: str = PARAMS, allowed: tuple[str, ...] = (), **options: Any
    ) -> Iterator["Visit"]:
        """Open the page in a browser that remembers nothing but `params`, and check at the end that nothing went wrong in it.

        Args:
            address: Where to go first.
            params: Sampling parameters that the browser remembers, as JSON.
            allowed: Parts of messages in the console that belong to the test.
            options: Of a browser context; then it is a new one, as it is for a second visit beside the first.
        """
        with self._browse(options) as context:
            yield from self._visit(Visit(self, context, params), address, allowed)

    @contextlib.contextmanager
    def _browse(self, options: dict[str, Any]) -> Iterator[BrowserContext]:
        if options or not self._is_usual_free:
            with contextlib.closing(self.browser.new_context(**{"viewport": DESKTOP, **options})) as context:
                context.set_default_timeout(TIMEOUT_MS)
                yield context
            return
        if self._usual is None:
            self._usual = self.browser.new_context(viewport=DESKTOP)
            self._usual.set_default_timeout(TIMEOUT_MS)
            self._usual.new_page()
        self._is_usual_free = False
        try:
            yield self._usual
        finally:
            blank, *used = self._usual.pages
            for page in used:
                page.close()
            self._usual.clear_cookies()
            session = self._usual.new_cdp_session(blank)
            session.send("Storage.clearDataForOrigin", {"origin": self.served.url, "storageTypes": "local_storage"})
            session.detach()
            self._is_usual_free = True

    def _visit(self, visit: "Visit", address: str, allowed: tuple[str, ...]) -> Iterator["Visit"]:
        try:
            visit.page.goto(self.served.url + address)
            visit.ready()
            yield visit
            wrong = [problem for problem in visit.problems if not any(part in problem for part in allowed)]
            assert not wrong, "\n".join(wrong)
        except BaseException:
            self.engine.leave()
            raise
        finally:
            self.engine.release()


class Visit:
    """One person in one browser."""

    def __init__(self, site: Site, context: BrowserContext, params: str = PARAMS) -> None:
        self.site = site
        self.context = context
        self._params = params
        self.problems: list[str] = []
        self.page = self.tab()

    def tab(self) -> Page:
        """Open a tab that notes what goes wrong, and where requests go."""
        page = self.context.new_page()
        page.add_init_script(f"localStorage['chatpage.params'] ??= {self._params!r}")
        page.on("pageerror", lambda error: self.problems.append(f"{error}\n{error.stack or ''}"))
        page.on("console", lambda message: self.problems.extend([message.text] if message.type == "error" else []))
        page.on("request", lambda request: self.site.requests.append(request.url))
        return page

    def ready(self, page: Page | None = None) -> None:
        """Wait until the page is connected."""
        expect((page or self.page).locator(".cp-dot.is-open")).to_be_attached()

    @property
    def messages(self) -> Locator:
        return self.page.locator(".cp-message")

    @property
    def columns(self) -> Locator:
        return self.page.locator(".cp-column")

    @property
    def composer(self) -> Locator:
        return self.page.locator(".cp-composer textarea")

    @property
    def num_characters(self) -> int:
        """How long the last message is as the conversation has it."""
        return int(self.page.evaluate(LENGTH))

    def wait_for_text(self, least: int = 1, page: Page | None = None) -> None:
        """Wait until the last message is a reply of some length."""
        wait_until(page or self.page, f"chatpage.conversation?.activeLeaf?.role === 'assistant' && {LENGTH} >= {least}")

    def send(self, text: str) -> None:
        """Write a message and press Enter."""
        self.composer.fill(text)
        self.composer.press("Enter")
        expect(self.composer).to_have_value("")

    def settle(self) -> None:
        """Wait until nothing is being written."""
        expect(self.page.locator(".is-writing")).to_have_count(0)
        wait_until(self.page, "!chatpage.conversation?.liveRuns.length")

    def ask(self, text: str) -> None:
        """Send, and wait for the whole answer."""
        self.send(text)
        expect(self.page.locator(".cp-message.is-last.is-assistant")).to_be_attached()
        self.settle()

    def act(self, label: str, message: Locator | None = None) -> None:
        """Press a button of a message, by default of the last one."""
        message = message or self.messages.last
        message.hover()
        message.get_by_role("button", name=label, exact=True).click()

    def text_of(self, message: Locator) -> str:
        """Return the text of a message as the conversation has it."""
        return str(message.evaluate("element => chatpage.conversation.textOf(element.dataset.node)"))

    @property
    def conversation_id(self) -> str:
        return str(self.page.evaluate("chatpage.conversation.id"))


def wait_until(page: Page, condition: str, *, timeout_ms: float = TIMEOUT_MS) -> None:
    """Wait until an expression holds. Playwright's own way evaluates text in the page, which our pages forbid."""
    deadline = time.monotonic() + timeout_ms / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"never true: {condition}"
        page.wait_for_timeout(30)


@contextlib.contextmanager
def open_site(
    folder: Path, browser: Browser, *, port: int = 0, serve: ServeSettings | None = None, engine: Any = None
) -> Iterator[Site]:
    """Serve the page on a tiny model with a context long enough to chat in.

    Args:
        port: 0 takes a free one.
        serve: Of the application.
        engine: Another one.
    """
    held = HeldEngine(engine or tiny_engine(kv_memory=2**24, check_integrity=False))
    with serving(folder, engine=held, extend=mount_page, port=port, settings=serve) as served:  # type: ignore[arg-type]
        yield Site(served, browser, held)
