"""What a person sees when the page is loaded again, the connection breaks, or the server goes and comes back."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser, WebSocketRoute, expect

from chatpage.store import LOCAL_USER
from tests.session.test_driver import break_step
from tests.ui.pages import Site, Visit, open_site

SOME = '{"max_tokens": 120, "temperature": 1, "seed": 3}'


def stored_text(site: Site, visit: Visit) -> str:
    """Return what the store has of the shown reply."""
    found = site.served.desk.store.get_path(LOCAL_USER, visit.conversation_id)  # type: ignore[arg-type]
    return found[-1].text


def test_a_reload_in_the_middle_of_a_reply_shows_all_of_it(site: Site) -> None:
    """Others begin at the token that comes next, or show nothing until the end."""
    site.engine.hold(after=40)
    with site.visit(params=SOME) as visit:
        visit.send("Tell me")
        visit.wait_for_text(20)
        visit.page.reload()
        visit.ready()
        visit.wait_for_text(20)
        expect(visit.page.locator(".cp-message.is-writing")).to_have_count(1)
        site.engine.release()
        visit.settle()
        assert visit.text_of(visit.messages.last) == stored_text(site, visit)


@pytest.mark.parametrize("after", [0, 5])
def test_why_a_reply_failed_is_there_after_a_reload_with_the_way_on(
    site: Site, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """What had failed stood there alone, and the reason was gone with the page that had heard it."""
    break_step(site.served.desk, monkeypatch, after=after)
    with site.visit() as visit:
        visit.send("Tell me")
        for is_loaded_again in (False, True):
            if is_loaded_again:
                visit.page.reload()
                visit.ready()
            note = visit.messages.last.locator(".cp-note")
            expect(note).to_contain_text("a kernel refused")
            expect(visit.messages).to_have_count(2 if after else 1)
        note.get_by_role("button", name="Try again" if after else "Answer").click()
        expect(visit.messages).to_have_count(2)
        expect(visit.messages.last.locator(".cp-pager-count")).to_have_count(1 if after else 0)
        visit.settle()
        assert visit.text_of(visit.messages.last) == stored_text(site, visit) != ""
        expect(visit.page.locator(".cp-note:visible")).to_contain_text("limit of tokens")


def test_columns_that_are_being_written_come_back_after_a_reload(site: Site) -> None:
    site.engine.hold(after=20)
    with site.visit(params=SOME) as visit:
        visit.page.locator('.cp-composer [data-n="4"]').click()
        visit.send("Tell me")
        expect(visit.columns).to_have_count(4)
        visit.wait_for_text(5)
        visit.page.reload()
        visit.ready()
        expect(visit.page.locator(".cp-column.is-writing")).to_have_count(4)
        site.engine.release()
        visit.settle()
        for column in visit.columns.all():
            node = site.served.node(visit.conversation_id, str(column.get_attribute("data-node")))
            assert visit.text_of(column) == node.text != ""


def test_a_cut_socket_loses_and_doubles_nothing(site: Site) -> None:
    with site.visit(params=SOME) as visit:
        sockets: list[WebSocketRoute] = []

        def pass_through(socket: WebSocketRoute) -> None:
            sockets.append(socket)
            socket.connect_to_server()

        visit.page.route_web_socket("**/ws", pass_through)
        visit.page.reload()
        visit.ready()
        visit.page.locator('.cp-composer [data-n="2"]').click()
        site.engine.hold()
        visit.send("Tell me")
        for num_cuts in (1, 2, 3):
            before = visit.num_characters if num_cuts > 1 else 0
            site.engine.hold(after=20)
            visit.wait_for_text(before + 5)
            sockets[-1].close(code=1011)
            site.engine.hold(after=15)  # while nobody listens
            while len(sockets) == num_cuts:
                visit.page.wait_for_timeout(20)
            visit.ready()
        site.engine.release()
        visit.settle()
        for column in visit.columns.all():
            node = site.served.node(visit.conversation_id, str(column.get_attribute("data-node")))
            assert visit.text_of(column) == node.text != ""


def test_two_tabs_of_one_conversation_stay_in_step(site: Site) -> None:
    with site.visit() as visit:
        visit.ask("From the first tab")
        other = visit.tab()
        other.goto(visit.page.url)
        visit.ready(other)
        expect(other.locator(".cp-message")).to_have_count(2)
        visit.send("Again")
        expect(other.locator(".cp-message.is-user").last).to_contain_text("Again")
        visit.settle()
        expect(other.locator(".is-writing")).to_have_count(0)
        last = "chatpage.conversation.textOf(chatpage.conversation.activeLeaf.id)"
        assert other.evaluate(last) == visit.page.evaluate(last)
        other.close()


def test_two_tabs_with_two_conversations_do_not_mix(site: Site) -> None:
    """Text of one conversation has appeared in another elsewhere."""
    site.engine.hold(after=10)
    with site.visit() as visit:
        other = visit.tab()
        other.goto(site.served.url)
        visit.ready(other)
        other.evaluate("chatpage.openConversation(null)")
        visit.send("One")
        other.locator(".cp-composer textarea").fill("Two")
        other.locator(".cp-composer textarea").press("Enter")
        expect(other.locator(".cp-message.is-writing")).to_be_attached()
        expect(visit.page.locator(".cp-message.is-writing")).to_be_attached()
        site.engine.release()
        visit.settle()
        expect(other.locator(".cp-message.is-user .cp-body")).to_have_text(["Two"])
        expect(other.locator(".cp-message")).to_have_count(2)
        expect(visit.messages).to_have_count(2)
        expect(visit.messages.first).to_contain_text("One")
        expect(other.locator(".is-writing")).to_have_count(0)
        other.close()


def test_who_joins_sees_the_columns_that_are_being_written(site: Site) -> None:
    """A second window showed one of the samples, as if there were no others."""
    with site.visit() as visit:
        visit.ask("Hello")
        before = visit.tab()
        before.goto(visit.page.url)
        visit.ready(before)
        site.engine.hold(after=10)
        visit.messages.last.locator('[data-n="4"]').click()
        expect(before.locator(".cp-column")).to_have_count(5)
        with site.visit(address="/" + visit.page.url.rpartition("/")[2]) as other:
            expect(other.columns).to_have_count(5)
        site.engine.release()
        visit.settle()
        before.close()


def test_another_conversation_may_be_opened_while_one_is_written(site: Site) -> None:
    site.engine.hold(after=20)
    with site.visit(params=SOME) as visit:
        visit.send("Long story")
        visit.wait_for_text(5)
        address = visit.page.url
        visit.page.get_by_role("button", name="New conversation", exact=True).click()
        expect(visit.messages).to_have_count(0)
        visit.page.goto(address)
        visit.ready()
        visit.wait_for_text(5)
        expect(visit.page.locator(".cp-message.is-writing")).to_be_attached()
        site.engine.release()
        visit.settle()
        assert visit.text_of(visit.messages.last) == stored_text(site, visit)


def test_the_page_goes_on_after_the_server_was_restarted(browser: Browser, tmp_path: Path) -> None:
    with open_site(tmp_path, browser) as site:
        port = int(site.served.url.rpartition(":")[2])
        visit_manager = site.visit(allowed=("WebSocket", "ERR_", "Failed to load"))
        visit = visit_manager.__enter__()
        visit.ask("Before")
    visit.composer.fill("Written while nobody was there")
    expect(visit.page.locator(".cp-banner")).to_be_visible()
    with open_site(tmp_path, browser, port=port):
        expect(visit.page.locator(".cp-banner")).to_be_hidden()
        visit.composer.press("Enter")
        expect(visit.messages).to_have_count(4)
        visit.settle()
        expect(visit.messages.nth(2)).to_contain_text("Written while nobody was there")
        visit_manager.__exit__(None, None, None)


@pytest.mark.parametrize("action", ["stop then send at once", "send during the reply"])
def test_a_message_sent_around_a_running_reply_follows_it(site: Site, action: str) -> None:
    """Elsewhere the message is put beside the reply, or the stopped text is lost from the context."""
    site.engine.hold(after=20)
    with site.visit(params='{"max_tokens": 60}') as visit:
        visit.send("First")
        visit.wait_for_text(5)
        if action.startswith("stop"):
            visit.page.locator(".cp-stop").click()
        visit.send("Second")
        expect(visit.messages.nth(2)).to_contain_text("Second")
        site.engine.release()
        expect(visit.messages).to_have_count(4)
        visit.settle()
        roles = visit.page.evaluate("chatpage.conversation.activePath().map((node) => node.role)")
        assert roles == ["user", "assistant", "user", "assistant"]
        assert visit.text_of(visit.messages.nth(1))
