"""The map of the tree: it grows with the samples, and one walks in it with pointer and keys."""

import json
import re
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, expect

from tests.ui.pages import LONG, Site, Visit

SCRIPT = "<img src=x onerror=\"document.title='taken over'\">"

WATCH_PLACES = """() => {
    globalThis.moved = [];
    const note = (records) => moved.push(...records.map((record) => record.attributeName ?? record.type));
    const options = { subtree: true, childList: true, attributeFilter: ["d", "transform"] };
    new MutationObserver(note).observe(document.querySelector(".cp-map-picture"), options);
}"""


def open_map(visit: Visit) -> Locator:
    visit.page.locator(".cp-bar").get_by_role("button", name="Tree of the conversation").click()
    expect(visit.page.locator(".cp-map")).to_be_visible()
    return visit.page.locator(".cp-map-item")


def mark(visit: Visit, node_id: str) -> Locator:
    return visit.page.locator(f'.cp-map-item[data-key="{node_id}"]')


def add(visit: Visit, conversation_id: str, role: str, text: str, parent_id: str | None = None) -> str:
    """Add a message over the API and return its id."""
    body = {"role": role, "text": text, **({"parent_id": parent_id} if parent_id else {})}
    answer = visit.page.request.post(f"{visit.site.served.url}/api/conversations/{conversation_id}/nodes", data=body)
    assert answer.ok, answer.text()
    return str(answer.json()["id"])


def chain(visit: Visit, conversation_id: str, length: int, parent_id: str | None = None) -> list[str]:
    """Add messages one below the other and return their ids."""
    ids: list[str] = []
    for i in range(length):
        ids.append(add(visit, conversation_id, "assistant" if i % 2 else "user", f"Message {i}", ids[-1] if ids else parent_id))
    return ids


def show(visit: Visit, conversation_id: str) -> None:
    visit.page.evaluate("id => chatpage.openConversation(id)", conversation_id)
    expect(visit.messages.first).to_be_attached()


def active(visit: Visit) -> list[str]:
    ids: list[str] = visit.page.evaluate("chatpage.conversation.activePath().map(node => node.id)")
    return ids


def test_the_map_grows_with_the_samples_and_shows_who_writes(site: Site) -> None:
    with site.visit() as visit:
        items = open_map(visit)
        visit.ask("Hello")
        expect(items).to_have_count(2)
        site.engine.hold(after=10)
        visit.page.evaluate("chatpage.regenerate(chatpage.conversation.activeLeaf.id, 8)")
        expect(items).to_have_count(10)
        expect(visit.page.locator(".cp-map-item.is-writing")).to_have_count(8)
        site.engine.release()
        visit.settle()
        expect(visit.page.locator(".cp-map-item.is-writing")).to_have_count(0)
        expect(visit.page.locator(".cp-map-facts")).to_have_text("10 messages, 9 branches")


def test_tokens_that_arrive_move_nothing_on_the_map(site: Site) -> None:
    """A map that is laid out anew for each token stutters as soon as eight samples write."""
    site.engine.hold(after=5)
    with site.visit(params=LONG) as visit:
        items = open_map(visit)
        visit.send("Hello")
        expect(items).to_have_count(2)
        visit.wait_for_text(1)
        visit.page.evaluate(WATCH_PLACES)
        site.engine.hold(after=150)
        expect(visit.messages.last).to_contain_text(re.compile(".{80}", re.DOTALL))
        assert visit.page.evaluate("moved") == []
        visit.composer.press("Escape")
        visit.settle()


def test_a_click_goes_there(visit: Visit) -> None:
    conversation = visit.site.served.conversation(title="Two ways")
    question = add(visit, conversation.id, "user", "Which way?")
    left = add(visit, conversation.id, "assistant", "To the left", question)
    right = add(visit, conversation.id, "assistant", "To the right", question)
    show(visit, conversation.id)
    open_map(visit)
    assert active(visit) == [question, right]
    mark(visit, left).click()
    expect(visit.messages.last).to_contain_text("To the left")
    expect(mark(visit, left)).to_have_attribute("aria-selected", "true")
    expect(mark(visit, right)).to_have_attribute("aria-selected", "false")
    visit.page.reload()
    visit.ready()
    expect(visit.messages.last).to_contain_text("To the left")


def test_arrow_keys_walk_the_tree(visit: Visit) -> None:
    conversation = visit.site.served.conversation(title="A walk")
    question = add(visit, conversation.id, "user", "Which way?")
    left = add(visit, conversation.id, "assistant", "To the left", question)
    right = add(visit, conversation.id, "assistant", "To the right", question)
    show(visit, conversation.id)
    open_map(visit)
    mark(visit, right).focus()
    for key, there in (
        ("ArrowLeft", left),
        ("ArrowRight", right),
        ("ArrowUp", question),
        ("ArrowDown", right),
        ("Home", question),
    ):
        visit.page.keyboard.press(key)
        expect(mark(visit, there)).to_be_focused()
    expect(visit.page.locator('.cp-map-item[tabindex="0"]')).to_have_count(1)
    visit.page.keyboard.press("End")
    visit.page.keyboard.press("ArrowLeft")
    visit.page.keyboard.press("Enter")
    expect(visit.messages.last).to_contain_text("To the left")


def test_a_long_chain_is_one_pill_that_opens(visit: Visit) -> None:
    conversation = visit.site.served.conversation(title="A long talk")
    ids = chain(visit, conversation.id, 14)
    show(visit, conversation.id)
    items = open_map(visit)
    expect(items).to_have_count(3)
    pill = visit.page.locator(".cp-map-item.is-pill")
    expect(pill).to_have_text("+12")
    expect(pill).to_have_attribute("aria-label", "12 messages in a row")
    pill.focus()
    visit.page.keyboard.press("Enter")
    expect(items).to_have_count(14)
    expect(mark(visit, ids[1])).to_be_focused()
    visit.page.get_by_role("button", name="Collapse long chains again").click()
    expect(items).to_have_count(3)


def test_hits_of_a_search_are_lit_and_not_hidden_in_a_pill(visit: Visit) -> None:
    conversation = visit.site.served.conversation(title="Looked into")
    ids = chain(visit, conversation.id, 8)
    found = add(visit, conversation.id, "user", "The kingfisher waits", ids[-1])
    chain(visit, conversation.id, 9, found)
    open_map(visit)
    visit.page.get_by_label("Search all messages").fill("kingfisher")
    visit.page.locator(".cp-hit").click()
    expect(mark(visit, found)).to_have_class("cp-map-item is-user is-active is-hit")
    expect(visit.page.locator(".cp-map-item.is-hit")).to_have_count(1)


def test_the_preview_tells_what_a_node_says_as_text(visit: Visit) -> None:
    conversation = visit.site.served.conversation(title="Markup")
    node = add(visit, conversation.id, "user", SCRIPT)
    show(visit, conversation.id)
    open_map(visit)
    mark(visit, node).hover()
    expect(visit.page.locator(".cp-map-tip")).to_contain_text(SCRIPT)
    assert visit.page.locator(".cp-map img").count() == 0
    assert visit.page.title() != "taken over"


def test_who_wants_no_motion_sees_none(site: Site) -> None:
    site.engine.hold(after=10)
    with site.visit(reduced_motion="reduce") as visit:
        open_map(visit)
        visit.send("Hello")
        writing = visit.page.locator(".cp-map-item.is-writing .cp-map-halo")
        expect(writing).to_be_attached()
        assert writing.evaluate("halo => getComputedStyle(halo).animationName") == "none"


def test_fit_shows_the_whole_tree(visit: Visit) -> None:
    conversation = visit.site.served.conversation(title="Wide")
    question = add(visit, conversation.id, "user", "Which way?")
    for i in range(30):
        add(visit, conversation.id, "assistant", f"Way {i}", question)
    show(visit, conversation.id)
    items = open_map(visit)
    expect(items).to_have_count(31)
    sizes = "scroller => [scroller.scrollWidth - scroller.clientWidth, scroller.scrollHeight - scroller.clientHeight]"
    scroller = visit.page.locator(".cp-map-scroll")
    assert scroller.evaluate(sizes)[0] > 0
    visit.page.get_by_role("button", name="Fit the whole tree").click()
    assert max(scroller.evaluate(sizes)) <= 1
    visit.page.get_by_role("button", name="Zoom in").click()
    assert scroller.evaluate(sizes)[0] > 0


def test_two_thousand_nodes_are_all_on_the_map_and_none_on_another(visit: Visit, tmp_path: Path) -> None:
    mapping: dict[str, dict[str, Any]] = {"n0": {"id": "n0", "message": None, "parent": None, "children": []}}
    for i in range(1, 2001):
        parent = f"n{i // 2 if i % 3 else i - 1}"
        content = {"content_type": "text", "parts": [f"Node {i}"]}
        author = {"role": "assistant" if i % 2 else "user"}
        message = {"id": f"n{i}", "author": author, "create_time": float(i), "content": content}
        mapping[f"n{i}"] = {"id": f"n{i}", "message": message, "parent": parent, "children": []}
        mapping[parent]["children"].append(f"n{i}")
    path = tmp_path / "large.json"
    path.write_text(json.dumps([{"id": "large", "title": "Large", "mapping": mapping, "current_node": "n2000"}]))
    visit.page.set_input_files("#cp-sidebar input[type=file]", path)
    visit.page.get_by_role("button", name="Open the conversation").click()
    open_map(visit)
    expect(visit.page.locator(".cp-map-facts")).to_contain_text("2,000 messages")
    places = visit.page.eval_on_selector_all(".cp-map-item", "items => items.map(item => item.getAttribute('transform'))")
    pills = visit.page.eval_on_selector_all(".cp-map-count", "counts => counts.map(count => Number(count.textContent))")
    assert len(places) - len(pills) + sum(pills) == 2000
    assert len(set(places)) == len(places)
