"""The page where everybody has to log in."""

from pathlib import Path

from playwright.sync_api import Browser, expect

from chatpage.server.passwords import hash_password
from chatpage.server.settings import ServeSettings
from tests.ui.pages import open_site


def test_nothing_of_the_page_is_served_before_the_login(browser: Browser, tmp_path: Path) -> None:
    with open_site(tmp_path, browser, serve=ServeSettings(require_login=True)) as site:
        site.served.desk.store.create_user("ann", hash_password("correct horse battery"))
        context = browser.new_context()
        page = context.new_page()
        for path in ("/canvas/main.js", "/canvas/render", "/config", "/gradio_api/info", "/api/conversations"):
            assert page.request.get(site.served.url + path, max_redirects=0).status in (302, 303, 307, 401)
        page.goto(site.served.url)
        expect(page.get_by_role("heading")).to_be_visible()
        assert page.url.startswith(site.served.url + "/login")
        page.locator("input[name=name]").fill("ann")
        page.locator("input[type=password]").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("input[type=password]")).to_be_visible()
        page.locator("input[name=name]").fill("ann")
        page.locator("input[type=password]").fill("correct horse battery")
        page.keyboard.press("Enter")
        expect(page.locator(".cp-dot.is-open")).to_be_attached()
        page.locator(".cp-composer textarea").fill("Hello")
        page.locator(".cp-composer textarea").press("Enter")
        expect(page.locator(".cp-message.is-assistant .cp-facts")).to_contain_text("tokens")
        assert site.served.desk.store.list_conversations("local") == ()  # type: ignore[arg-type]
        context.close()
