"""One browser and one server for the tests of a module; each test has a browser context of its own.

The browser must not outlive its module: as long as Playwright runs, no other test of the process can start an event loop.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.ui.pages import ARGUMENTS, CHROMIUM, Site, Visit, open_site


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def site(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder: Path = tmp_path_factory.mktemp("site")
    with open_site(folder, browser) as site:
        yield site


@pytest.fixture
def visit(site: Site) -> Iterator[Visit]:
    with site.visit() as visit:
        yield visit
