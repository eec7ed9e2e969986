"""The sidebar: conversations by age, what is done with them, search, and files."""

import json
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from tests.ui.pages import PHONE, Site, Visit

SCRIPT = "<img src=x onerror=\"document.title='taken over'\">"


def row(page: Page, title: str) -> Locator:
    return page.locator(".cp-row").filter(has=page.locator(".cp-row-title").get_by_text(title, exact=True))


def group_of(page: Page, title: str) -> str:
    return str(row(page, title).evaluate("row => row.closest('section').getAttribute('aria-label')"))


def choose(page: Page, title: str, item: str) -> None:
    """Open the menu of a conversation and choose from it."""
    row(page, title).hover()
    row(page, title).locator(".cp-row-more").click()
    page.get_by_role("menuitem", name=item, exact=True).click()


def rename(page: Page, title: str) -> Locator:
    """Begin to rename a conversation, and return the field."""
    choose(page, title, "Rename")
    field = page.get_by_label("Title", exact=True)
    expect(field).to_be_focused()
    return field


def add(visit: Visit, conversation_id: str, role: str, text: str, parent_id: str | None = None) -> str:
    """Add a message over the API and return its id."""
    body = {"role": role, "text": text, **({"parent_id": parent_id} if parent_id else {})}
    answer = visit.page.request.post(f"{visit.site.served.url}/api/conversations/{conversation_id}/nodes", data=body)
    assert answer.ok, answer.text()
    return str(answer.json()["id"])


def list_again(visit: Visit) -> None:
    """Have the list asked for anew, after something was put into the store behind the server's back."""
    visit.page.evaluate("chatpage.listChanged()")


def record(key: str, title: str, when: datetime, text: str = "Hello") -> dict[str, Any]:
    """Return a conversation of one message as ChatGPT exports it."""
    message = {
        "id": f"{key}-1",
        "author": {"role": "user"},
        "create_time": when.timestamp(),
        "content": {"content_type": "text", "parts": [text]},
    }
    return {
        "id": key,
        "title": title,
        "create_time": when.timestamp(),
        "update_time": when.timestamp(),
        "current_node": f"{key}-1",
        "mapping": {
            "root": {"id": "root", "message": None, "parent": None, "children": [f"{key}-1"]},
            f"{key}-1": {"id": f"{key}-1", "message": message, "parent": "root", "children": []},
        },
    }


def give(visit: Visit, path: Path) -> None:
    visit.page.set_input_files("#cp-sidebar input[type=file]", path)
    expect(visit.page.locator(".cp-import-numbers")).to_be_visible()


def numbers_of_import(visit: Visit) -> dict[str, int]:
    shown = visit.page.locator(".cp-import-number").all()
    return {number.locator("span").inner_text(): int(number.locator("b").inner_text()) for number in shown}


def test_conversations_stand_under_their_age(visit: Visit, tmp_path: Path) -> None:
    noon = datetime.combine(datetime.now().date(), time(12))
    long_ago = datetime(2021, 3, 5, 12)
    ages = {"Just now": datetime.now(), "A day old": noon - timedelta(days=1), "Some days old": noon - timedelta(days=5)}
    records = [record(f"age-{i}", title, when) for i, (title, when) in enumerate({**ages, "Ancient": long_ago}.items())]
    path = tmp_path / "ages.json"
    path.write_text(json.dumps(records))
    give(visit, path)
    expect(row(visit.page, "Ancient")).to_be_attached()
    groups = {title: group_of(visit.page, title) for title in (*ages, "Ancient")}
    assert groups == {
        "Just now": "Today",
        "A day old": "Yesterday",
        "Some days old": "Previous 7 days",
        "Ancient": "March 2021",
    }


def test_an_import_says_what_it_added_and_what_it_skipped_and_why(visit: Visit, tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_text(json.dumps([record("twice", "Once and only once", datetime.now()), {"title": "Broken", "mapping": 5}]))
    give(visit, path)
    assert numbers_of_import(visit) == {"added": 1, "grown": 0, "unchanged": 0, "skipped": 1}
    visit.page.get_by_text("What was skipped, and why").click()
    expect(visit.page.locator(".cp-import-skips li")).to_contain_text("record 2")
    visit.page.get_by_role("button", name="Close the report").click()
    give(visit, path)
    assert numbers_of_import(visit) == {"added": 0, "grown": 0, "unchanged": 1, "skipped": 1}
    expect(row(visit.page, "Once and only once")).to_have_count(1)


def test_a_file_that_is_dropped_is_imported_and_one_that_is_no_chat_is_named(visit: Visit) -> None:
    files = {"dropped.json": json.dumps([record("dropped", "Dropped", datetime.now())]), "notes.txt": "no chat at all"}
    transfer = visit.page.evaluate_handle(
        """files => {
            const transfer = new DataTransfer();
            for (const [name, text] of Object.entries(files)) transfer.items.add(new File([text], name));
            return transfer;
        }""",
        files,
    )
    visit.page.dispatch_event("#cp-sidebar", "dragenter", {"dataTransfer": transfer})
    expect(visit.page.locator(".cp-drop-hint")).to_be_visible()
    visit.page.dispatch_event("#cp-sidebar", "drop", {"dataTransfer": transfer})
    expect(visit.page.locator(".cp-import-numbers")).to_be_visible()
    assert numbers_of_import(visit)["added"] == 1
    assert numbers_of_import(visit)["skipped"] == 1
    expect(visit.page.locator(".cp-import-skips")).to_contain_text("notes.txt")
    expect(row(visit.page, "Dropped")).to_be_attached()
    visit.problems[:] = [problem for problem in visit.problems if "400" not in problem and "422" not in problem]


def test_f2_renames_and_escape_does_not(visit: Visit) -> None:
    visit.site.served.conversation(title="Old name")
    list_again(visit)
    row(visit.page, "Old name").locator(".cp-row-open").focus()
    visit.page.keyboard.press("F2")
    visit.page.keyboard.type("Nothing of this")
    visit.page.keyboard.press("Escape")
    expect(row(visit.page, "Old name").locator(".cp-row-open")).to_be_focused()
    visit.page.keyboard.press("F2")
    visit.page.keyboard.type("New name")
    visit.page.keyboard.press("Enter")
    expect(row(visit.page, "New name").locator(".cp-row-open")).to_be_focused()
    visit.page.reload()
    visit.ready()
    expect(row(visit.page, "New name")).to_be_attached()
    expect(row(visit.page, "Old name")).to_have_count(0)


def test_a_half_written_title_survives_a_refresh_of_the_list(visit: Visit) -> None:
    """Lists that are drawn anew on every message of the server took the field away from whoever typed in it."""
    visit.site.served.conversation(title="Being renamed")
    list_again(visit)
    rename(visit.page, "Being renamed")
    visit.page.keyboard.type("Half a ti")
    visit.site.served.conversation(title="Came meanwhile")
    visit.page.evaluate("chatpage.listChanged()")
    expect(row(visit.page, "Came meanwhile")).to_be_attached()
    expect(visit.page.get_by_label("Title", exact=True)).to_be_focused()
    visit.page.keyboard.type("tle")
    visit.page.keyboard.press("Enter")
    expect(row(visit.page, "Half a title")).to_be_attached()


def refuse_changes(route: Route) -> None:
    if route.request.method == "PATCH":
        route.fulfill(status=500, json={"error": {"code": "internal", "message": "The disk is full."}})
    else:
        route.fallback()


def test_a_title_that_the_server_refuses_falls_back(site: Site) -> None:
    """A page that trusts itself shows a name that nobody has stored, until the next reload."""
    site.served.conversation(title="The stored name")
    with site.visit(allowed=("500",)) as visit:
        visit.page.route("**/api/conversations/*", refuse_changes)
        rename(visit.page, "The stored name")
        visit.page.keyboard.type("A wish")
        visit.page.keyboard.press("Enter")
        expect(visit.page.locator(".cp-toast")).to_contain_text("The disk is full.")
        expect(row(visit.page, "The stored name")).to_be_attached()
        expect(row(visit.page, "A wish")).to_have_count(0)


def test_delete_can_be_undone(visit: Visit) -> None:
    """One wrong key deleted a conversation for good."""
    visit.site.served.conversation(title="Its neighbour")
    visit.site.served.conversation(title="Precious")
    list_again(visit)
    row(visit.page, "Precious").locator(".cp-row-open").click()
    row(visit.page, "Precious").locator(".cp-row-open").press("Delete")
    expect(row(visit.page, "Precious")).to_have_count(0)
    expect(row(visit.page, "Its neighbour")).to_be_visible()
    visit.page.locator(".cp-toast").filter(has_text="Precious").get_by_role("button", name="Undo").click()
    expect(row(visit.page, "Precious").locator(".cp-row-open")).to_have_attribute("aria-current", "page")


def test_what_was_deleted_long_ago_is_found_and_restored(visit: Visit) -> None:
    visit.site.served.conversation(title="Thrown away")
    list_again(visit)
    choose(visit.page, "Thrown away", "Delete")
    expect(row(visit.page, "Thrown away")).to_have_count(0)
    visit.page.reload()
    visit.ready()
    visit.page.get_by_role("button", name="Deleted conversations").click()
    expect(visit.page.get_by_role("button", name="Deleted conversations")).to_have_attribute("aria-pressed", "true")
    choose(visit.page, "Thrown away", "Restore")
    expect(row(visit.page, "Thrown away")).to_have_count(0)
    visit.page.get_by_role("button", name="Deleted conversations").click()
    expect(row(visit.page, "Thrown away")).to_be_attached()


def test_what_is_pinned_stands_at_the_top(visit: Visit) -> None:
    visit.site.served.conversation(title="To the top")
    list_again(visit)
    choose(visit.page, "To the top", "Pin")
    expect(visit.page.locator("section[aria-label='Pinned']")).to_contain_text("To the top")
    choose(visit.page, "To the top", "Unpin")
    expect(visit.page.locator("section[aria-label='Pinned']")).to_have_count(0)


def test_tags_are_edited_and_filter_the_list(visit: Visit) -> None:
    for title in ("With a tag", "Without a tag"):
        visit.site.served.conversation(title=title)
    list_again(visit)
    choose(visit.page, "With a tag", "Tags")
    visit.page.get_by_label("Add a tag").fill("harbour, ships")
    visit.page.get_by_label("Add a tag").press("Enter")
    visit.page.get_by_role("button", name="Remove the tag ships").click()
    visit.page.keyboard.press("Escape")
    chip = visit.page.locator(".cp-tag-filter .cp-chip").filter(has_text="harbour")
    chip.click()
    expect(row(visit.page, "Without a tag")).to_have_count(0)
    expect(row(visit.page, "With a tag")).to_be_attached()
    expect(visit.page.locator(".cp-tag-filter .cp-chip").filter(has_text="ships")).to_have_count(0)
    chip.click()
    expect(row(visit.page, "Without a tag")).to_be_attached()


def test_a_tag_that_the_server_refuses_is_told_once_and_not_sent_again(site: Site) -> None:
    """The refused tag stayed in the editor, so the next change was refused too, with the same words."""
    site.served.conversation(title="Tagged")
    with site.visit(allowed=("422",)) as visit:
        choose(visit.page, "Tagged", "Tags")
        field = visit.page.get_by_label("Add a tag")
        field.evaluate("(field, tag) => { field.value = tag }", "x" * 150)  # as a script could, past the field's own limit
        field.press("Enter")
        toasts = visit.page.locator(".cp-toast")
        expect(toasts).to_have_count(1)
        expect(visit.page.locator(".cp-tag-chips .cp-chip")).to_have_count(0)
        field.fill("harbour")
        field.press("Enter")
        expect(row(visit.page, "Tagged").locator(".cp-row-tag")).to_have_text("harbour")
        expect(toasts).to_have_count(1)


def test_search_opens_the_branch_that_holds_the_hit(visit: Visit) -> None:
    """A search that opens only the conversation leaves its reader on a branch where the words do not stand."""
    conversation = visit.site.served.conversation(title="Two branches")
    question = add(visit, conversation.id, "user", "Tell me of birds")
    hidden = add(visit, conversation.id, "assistant", "The albatross sleeps in the air", question)
    add(visit, conversation.id, "assistant", "The wren is small", question)
    list_again(visit)
    row(visit.page, "Two branches").locator(".cp-row-open").click()
    expect(visit.messages.last).to_contain_text("wren")
    field = visit.page.get_by_label("Search all messages")
    field.fill("albatr")
    expect(visit.page.locator(".cp-hit mark")).to_have_text("albatross")
    field.press("Enter")
    expect(visit.messages.last).to_contain_text("albatross")
    assert visit.page.evaluate("[...chatpage.highlights]") == [hidden]
    field.press("Escape")
    expect(field).to_have_value("")
    expect(row(visit.page, "Two branches")).to_be_visible()


def test_markup_in_titles_and_hits_is_text(visit: Visit) -> None:
    conversation = visit.site.served.conversation(title=SCRIPT)
    add(visit, conversation.id, "user", f"zebra {SCRIPT}")
    list_again(visit)
    expect(visit.page.locator(".cp-row-title").get_by_text("<img src=x")).to_be_visible()
    visit.page.get_by_label("Search all messages").fill("zebra")
    expect(visit.page.locator(".cp-hit-snippet").first).to_contain_text("<img src=x")
    assert visit.page.locator("#cp-sidebar img").count() == 0
    assert visit.page.title() != "taken over"


def test_arrow_keys_walk_the_list_and_enter_opens(visit: Visit) -> None:
    for title in ("Second of two", "First of two"):
        visit.site.served.conversation(title=title)
    list_again(visit)
    row(visit.page, "First of two").locator(".cp-row-open").focus()
    visit.page.keyboard.press("ArrowDown")
    expect(row(visit.page, "Second of two").locator(".cp-row-open")).to_be_focused()
    visit.page.keyboard.press("Enter")
    expect(row(visit.page, "Second of two").locator(".cp-row-open")).to_have_attribute("aria-current", "page")
    visit.page.keyboard.press("ArrowRight")
    visit.page.keyboard.press("Enter")
    expect(visit.page.get_by_role("menuitem", name="Rename")).to_be_focused()
    visit.page.keyboard.press("Escape")
    expect(row(visit.page, "Second of two").locator(".cp-row-more")).to_be_focused()


def test_two_tabs_stay_in_step(visit: Visit) -> None:
    visit.site.served.conversation(title="Seen by both")
    list_again(visit)
    other = visit.tab()
    other.goto(visit.site.served.url)
    visit.ready(other)
    rename(other, "Seen by both")
    other.keyboard.type("Renamed elsewhere")
    other.keyboard.press("Enter")
    expect(row(visit.page, "Renamed elsewhere")).to_be_attached()


def test_hundreds_of_conversations_come_page_by_page(visit: Visit) -> None:
    for i in range(150):
        visit.site.served.conversation(title=f"Number {i}")
    visit.page.reload()
    visit.ready()
    expect(row(visit.page, "Number 149")).to_be_attached()
    assert visit.page.locator(".cp-row").count() < 150
    visit.page.locator(".cp-side-scroll").hover()
    for _ in range(100):
        if row(visit.page, "Number 0").count():
            break
        visit.page.mouse.wheel(0, 4000)
        visit.page.wait_for_timeout(50)
    expect(row(visit.page, "Number 0")).to_be_attached()
    ids = visit.page.eval_on_selector_all(".cp-row", "rows => rows.map(row => row.dataset.id)")
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(("item", "suffix"), [("Export as chatpage", ".json"), ("Export as Markdown", ".md")])
def test_a_conversation_is_saved_as_a_file_with_its_title(visit: Visit, item: str, suffix: str) -> None:
    conversation = visit.site.served.conversation(title=f"Save: me/now {suffix}")
    add(visit, conversation.id, "user", "Words to keep")
    list_again(visit)
    with visit.page.expect_download() as download:
        choose(visit.page, f"Save: me/now {suffix}", item)
    assert download.value.suggested_filename == f"Save me now {suffix}{suffix}"
    assert "Words to keep" in Path(download.value.path()).read_text()


def test_on_a_phone_the_list_makes_room_for_what_is_opened(site: Site) -> None:
    site.served.conversation(title="Opened on a phone")
    with site.visit(viewport=PHONE, has_touch=True) as visit:
        expect(visit.page.locator("#cp-left.open")).to_have_count(0)
        visit.page.locator("#cp-left .toggle-button").click()
        row(visit.page, "Opened on a phone").locator(".cp-row-open").click()
        expect(visit.page.locator("#cp-left.open")).to_have_count(0)
        expect(visit.page.locator(".cp-title")).to_have_value("Opened on a phone")
