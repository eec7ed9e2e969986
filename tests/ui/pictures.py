"""Takes the pictures of the README: `python -m tests.ui.pictures URL FOLDER [VIEW ...]`, with the default model served at URL.

Every view is taken at desktop and phone width, light and dark. Look at each: no test tells an ugly page from a good one.
"""

import argparse
import io
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.ui.pages import ARGUMENTS, CHROMIUM, DESKTOP, PHONE

PARAMS = '{"max_tokens": %d, "temperature": 0.7, "top_p": 0.9}'
TIMEOUT_MS = 120_000
QUESTION = "Write a short poem about the sea."


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("views", nargs="*", default=list(VIEWS))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        for screen, size in (("", DESKTOP), ("-phone", PHONE)):
            for scheme in ("light", "dark"):
                for view in arguments.views:
                    path = arguments.folder / f"{view}{screen}-{scheme}.png"
                    take(browser, arguments.url, path, VIEWS[view], viewport=size, color_scheme=scheme)
        browser.close()


def take(browser: Browser, url: str, path: Path, prepare: Callable[[Page], None], **options: object) -> None:
    """Take one picture, in a browser that has never been there."""
    context = browser.new_context(**options)  # type: ignore[arg-type]
    context.set_default_timeout(TIMEOUT_MS)
    params = PARAMS % (400 if prepare is columns else 160)  # columns are taken while they are being written
    context.add_init_script(f"localStorage['chatpage.params'] ??= {params!r}")
    page = context.new_page()
    page.goto(url)
    expect(page.locator(".cp-dot.is-open")).to_be_attached(timeout=TIMEOUT_MS)
    prepare(page)
    page.wait_for_timeout(700)
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    context.close()
    print(path, path.stat().st_size, "bytes")


def first_run(page: Page) -> None:
    page.mouse.move(5, 5)


def chat(page: Page) -> None:
    _ask(page, QUESTION)
    _ask(page, "Now make it about the mountains.")


def columns(page: Page) -> None:
    """In the middle of being written."""
    _ask(page, QUESTION)
    page.locator('.cp-message.is-last [data-n="8"]').click()
    expect(page.locator(".cp-column")).to_have_count(9)
    page.wait_for_timeout(500)


def tree(page: Page) -> None:
    _ask(page, QUESTION)
    _versions(page, 4, use=2)
    _ask(page, "Now make it about the mountains.")
    _versions(page, 4, use=1)
    _ask(page, "And give it a title.")
    page.get_by_role("button", name="Tree of the conversation").click()


def memory(page: Page) -> None:
    _ask(page, QUESTION)
    _versions(page, 8, use=3)
    _ask(page, "Now make it about the mountains.")
    page.get_by_role("button", name="Memory").first.click()
    page.wait_for_timeout(1500)
    page.locator(".cp-message.is-assistant").first.hover()
    page.wait_for_timeout(1000)


def words(page: Page) -> None:
    _ask(page, QUESTION)
    page.locator(".cp-message.is-last").get_by_role("button", name="Words: alternatives, and branching at any of them").click()
    page.locator(".cp-words [data-token], .cp-words [role=button], .cp-words button").nth(6).click()
    page.wait_for_timeout(1200)


VIEWS = {"first-run": first_run, "chat": chat, "columns": columns, "tree": tree, "memory": memory, "words": words}


def _ask(page: Page, text: str) -> None:
    count = page.locator(".cp-message").count()
    page.locator(".cp-composer textarea").fill(text)
    page.locator(".cp-composer textarea").press("Enter")
    expect(page.locator(".cp-message")).to_have_count(count + 2)
    _settle(page)


def _versions(page: Page, n: int, *, use: int) -> None:
    page.locator(f'.cp-message.is-last [data-n="{n}"]').click()
    expect(page.locator(".cp-column")).to_have_count(n + 1)
    _settle(page)
    page.locator(".cp-column").nth(use).get_by_role("button", name="Use this").click()
    expect(page.locator(".cp-column")).to_have_count(0)


def _settle(page: Page) -> None:
    expect(page.locator(".is-writing")).to_have_count(0, timeout=TIMEOUT_MS)
    page.wait_for_timeout(300)


if __name__ == "__main__":
    main()
