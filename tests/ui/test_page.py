"""The page as a whole: what it lets in and out, what it does on other screens, with a keyboard alone, and for everyone."""

import json
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from gradio_client import Client
from playwright.sync_api import expect

from chatpage.store import LOCAL_USER, ConversationId, NewNode, Role
from tests.ui.pages import LONG, PHONE, Site, Visit, wait_until

HOSTILE = [
    "${alert(1)} {{constructor.constructor('alert(1)')()}}",
    "<img src=x onerror=\"window.attacked = 'image'\">",
    "</script><script>window.attacked = 'script'</script>",
    "[link](javascript:window.attacked='link') ![image](https://example.com/spy.png)",
    '<svg onload="window.attacked = \'svg\'"><style>@import "https://example.com/x.css";</style>',
    "<details open ontoggle=\"window.attacked = 'toggle'\">",
    "$\\href{javascript:window.attacked='math'}{x}$",
]

BREAK_AN_IMAGE = """() => new Promise((resolve) => {
    const image = new Image()
    image.onerror = () => setTimeout(resolve, 50)
    image.src = "data:image/png,nothing"
})"""

SCROLL_UP = """async () => {
    const scroll = document.querySelector(".cp-scroll")
    while (scroll.scrollTop > 0) {
        scroll.scrollTop -= 100  // so that every message has been laid out
        await new Promise(requestAnimationFrame)
    }
}"""
JUMP_AND_GROW = """async () => {
    const frame = () => new Promise(requestAnimationFrame)
    const scroll = document.querySelector(".cp-scroll")
    document.querySelector(".cp-latest").click()
    while (scroll.scrollTop < 50) await frame()
    await frame()
    const last = [...document.querySelectorAll(".cp-message")].at(-1)
    for (let i = 1; i < 6; i++) {
        last.style.paddingBottom = `${200 * i}px`
        await frame()
    }
}"""
AT_END = "((scroll) => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 2)(document.querySelector('.cp-scroll'))"

GROW_A_TAIL = """async () => {
    const { Tail } = await import("/canvas/tail.js")
    const tail = new Tail()
    const plain = document.createElement("div")
    plain.className = "cp-tail"
    const host = document.createElement("div")
    Object.assign(host.style, { position: "fixed", inset: "0 auto auto 0", width: "260px", font: "4px/6px serif", zIndex: 9 })
    host.append(tail.element, plain)
    document.querySelector(".cp-thread").append(host)
    let written = ""
    for (let i = 0; i < 1500; i++) {
        const word = "word".slice(i % 4) + i + (i > 700 && i % 50 === 0 ? "\\n" : " ")
        written += word
        tail.append(word)
    }
    plain.append(written)
    getSelection().selectAllChildren(tail.element)
    const heights = [tail.element, plain].map((element) => element.getBoundingClientRect().height)
    const copied = getSelection().toString()
    getSelection().removeAllRanges()
    host.remove()
    return { pieces: tail.element.childElementCount, text: tail.element.textContent, copied, written,
             height: heights[0], plain: heights[1], cost: tail.cost }
}"""


def stored(site: Site, *texts: str, title: str = "Stored") -> ConversationId:
    """Make a conversation of messages, by turns the user's and the model's, and return its id."""
    store = site.served.desk.store
    conversation = store.create_conversation(LOCAL_USER, title=title)
    parent = None
    for i, text in enumerate(texts):
        node = NewNode(role=Role.ASSISTANT if i % 2 else Role.USER, text=text)
        change = store.add_node(LOCAL_USER, conversation.id, parent, node)
        parent = change.nodes[0].id
    return conversation.id


def show(visit: Visit, conversation_id: str) -> None:
    visit.page.evaluate("id => { chatpage.openConversation(id) }", conversation_id)
    expect(visit.messages.first).to_be_attached()


def test_hostile_text_runs_nothing_and_calls_nobody(site: Site) -> None:
    """Model text has run as code in other pages, in titles as well as in messages."""
    with site.visit() as visit:
        site.requests.clear()
        violations = "document.addEventListener('securitypolicyviolation', (event) => (window.violated = event.blockedURI))"
        visit.page.evaluate(violations)
        texts = [text for one in HOSTILE for text in (one, one)]
        show(visit, stored(site, *texts, title="<img src=x onerror=\"window.attacked = 'title'\">"))
        expect(visit.messages).to_have_count(len(texts))
        expect(visit.page.locator(".cp-block").last).to_be_visible()
        visit.page.get_by_role("button", name="Tree of the conversation").click()
        expect(visit.page.locator(".cp-map-item").first).to_be_visible()
        visit.page.evaluate(BREAK_AN_IMAGE)  # what would have run because an image is broken has run before this
        assert visit.page.evaluate("window.attacked") is None
        assert visit.page.evaluate("window.violated") is None
        expect(visit.messages.nth(1)).to_contain_text("${alert(1)}")
        assert {request for request in site.requests if not request.startswith(site.served.url)} == set()


def test_no_request_of_the_page_leaves_the_machine(site: Site) -> None:
    site.requests.clear()
    with site.visit() as visit:
        visit.ask("Hello")
        visit.page.reload()
        visit.ready()
    assert site.requests
    assert {one for one in site.requests if not one.startswith((site.served.url, "data:", "blob:"))} == set()


def test_markdown_settles_into_what_it_means(site: Site) -> None:
    text = "# Title\n\nA **bold** word and $x^2$.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint(1)\n```"
    with site.visit() as visit:
        show(visit, stored(site, "Show", text))
        reply = visit.messages.last
        expect(reply.locator("h1")).to_have_text("Title")
        expect(reply.locator("strong")).to_have_text("bold")
        expect(reply.locator("math")).to_be_visible()
        expect(reply.locator("td").last).to_have_text("2")
        expect(reply.locator("figure.code pre")).to_contain_text("print(1)")
        expect(reply.get_by_role("button", name="Copy").first).to_be_visible()


def test_enter_does_not_send_while_an_input_method_composes(visit: Visit) -> None:
    visit.composer.fill("にほ")
    visit.composer.evaluate(
        "area => area.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true}))"
    )
    visit.composer.press("Shift+Enter")
    expect(visit.composer).to_have_value("にほ\n")
    expect(visit.messages).to_have_count(0)


def test_a_draft_is_kept_with_its_conversation(visit: Visit) -> None:
    visit.ask("Hello")
    visit.composer.fill("Not sent yet")
    visit.page.reload()
    visit.ready()
    expect(visit.composer).to_have_value("Not sent yet")
    visit.page.get_by_role("button", name="New conversation", exact=True).click()
    expect(visit.composer).to_have_value("")


def test_a_text_that_is_too_long_is_told_once_and_stays(visit: Visit) -> None:
    """What was computed ahead while typing failed with words of its own, and sending failed with others."""
    visit.ask("Hello")
    toasts = visit.page.locator(".cp-toast")
    for size, words in ((20_000, "the context of the model holds 2048"), (500_000, "too long for one message")):
        visit.composer.fill("x" * size)
        visit.page.evaluate("chatpage.composer.warm.flush()")
        visit.composer.press("Enter")
        expect(toasts).to_have_count(1)
        expect(toasts).to_contain_text(words)
        expect(visit.composer).to_have_value("x" * size)
        toasts.get_by_role("button", name="Dismiss").click()
    visit.composer.fill("")
    expect(visit.messages).to_have_count(2)


def test_the_number_of_answers_is_remembered(visit: Visit) -> None:
    visit.page.locator('.cp-composer [data-n="4"]').click()
    visit.page.reload()
    visit.ready()
    expect(visit.page.locator('.cp-composer [data-n="4"]')).to_have_attribute("aria-checked", "true")
    visit.send("Hello")
    expect(visit.columns).to_have_count(4)
    visit.settle()


def test_an_empty_draft_is_no_part_of_the_context(visit: Visit) -> None:
    """The meter counted a message of one character that nobody had written."""
    visit.ask("Hello")
    used = "chatpage.conversation.activeLeaf.usage.prompt_tokens + chatpage.conversation.activeLeaf.num_tokens"
    expect(visit.page.locator(".cp-meter-text")).to_have_text(f"{visit.page.evaluate(used)} / 2,048")


def test_a_growing_text_is_cut_where_nobody_sees_it(visit: Visit) -> None:
    """One long paragraph was laid out again for every token, by eight columns at once."""
    found = visit.page.evaluate(GROW_A_TAIL)
    assert found["pieces"] > 4
    assert found["text"] == found["copied"] == found["written"]
    assert found["height"] == found["plain"]
    assert found["cost"] < 2_000


def test_who_reads_above_is_not_pulled_down(site: Site) -> None:
    site.engine.hold(after=20)
    with site.visit(params=LONG, viewport={"width": 700, "height": 420}) as visit:
        show(visit, stored(site, *["A line of text.\n\n" * 8] * 6))
        visit.send("More")
        visit.wait_for_text(1)
        visit.page.locator(".cp-scroll").evaluate("(scroll) => { scroll.scrollTop = 100 }")
        expect(visit.page.locator(".cp-latest")).to_be_visible()
        before = visit.page.locator(".cp-scroll").evaluate("(scroll) => scroll.scrollTop")
        length = visit.num_characters
        site.engine.hold(after=300)
        visit.wait_for_text(length + 100)
        assert abs(visit.page.locator(".cp-scroll").evaluate("(scroll) => scroll.scrollTop") - before) < 5
        visit.page.locator(".cp-latest").click()
        expect(visit.page.locator(".cp-latest")).to_be_hidden()
        visit.page.locator(".cp-stop").click()
        visit.settle()


def test_jumping_to_the_latest_ends_at_the_end_of_what_grows_meanwhile(site: Site) -> None:
    """The way there was smooth and led to where the end had been: whoever jumped into a growing reply was left above it."""
    with site.visit(viewport={"width": 700, "height": 420}) as visit:
        show(visit, stored(site, *["A line of text.\n\n" * 8] * 6))
        expect(visit.messages.last.locator(".cp-block").last).to_be_visible()
        visit.page.evaluate(SCROLL_UP)
        expect(visit.page.locator(".cp-latest")).to_be_visible()
        visit.page.evaluate(JUMP_AND_GROW)
        wait_until(visit.page, AT_END)
        expect(visit.page.locator(".cp-latest")).to_be_hidden()


def test_selected_text_stays_selected_while_the_reply_grows(site: Site) -> None:
    site.engine.hold(after=40)
    with site.visit(params=LONG) as visit:
        visit.send("More")
        wait_until(visit.page, "(document.querySelector('.is-writing .cp-tail')?.textContent.length ?? 0) > 12")
        selected = visit.page.evaluate(
            """() => {
                const text = document.querySelector('.is-writing .cp-piece').firstChild
                getSelection().setBaseAndExtent(text, 2, text, 9)
                return getSelection().toString()
            }"""
        )
        before = visit.num_characters
        site.engine.hold(after=300)
        visit.wait_for_text(before + 100)
        assert visit.page.evaluate("getSelection().toString()") == selected != ""
        visit.page.locator(".cp-stop").click()
        visit.settle()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(site: Site, scheme: str) -> None:
    with site.visit(color_scheme=scheme, reduced_motion="reduce") as visit:
        assert _faults(visit) == [], "first run"
        visit.ask("Hello")
        assert _faults(visit) == [], "chat"
        visit.page.get_by_role("button", name="Tree of the conversation").click()
        expect(visit.page.locator(".cp-map-item").first).to_be_visible()
        assert _faults(visit) == [], "tree"
        visit.page.get_by_role("tab", name="Memory").click()
        expect(visit.page.locator(".cp-kv-facts b").first).to_be_visible()
        assert _faults(visit) == [], "memory"
        visit.page.get_by_role("button", name="Close the drawer").click()
        visit.act("Words: alternatives, and branching at any of them")
        expect(visit.page.locator(".cp-words")).not_to_be_empty()
        assert _faults(visit) == [], "words"
        visit.messages.last.locator('[data-n="2"]').click()
        expect(visit.columns).to_have_count(3)
        visit.settle()
        assert _faults(visit) == [], "columns"


def _faults(visit: Visit) -> list[str]:
    found = Axe().run(visit.page).response["violations"]
    return [_summary(one) for one in found if one["impact"] in ("serious", "critical")]


def _summary(violation: dict[str, Any]) -> str:
    return f"{violation['id']}: {json.dumps([node['target'] for node in violation['nodes']][:4])}"


def test_a_phone_shows_no_more_than_its_width(site: Site) -> None:
    with site.visit(viewport=PHONE, has_touch=True, is_mobile=True) as visit:
        visit.ask("Hello")
        visit.messages.last.locator('[data-n="4"]').click()
        expect(visit.columns).to_have_count(5)
        visit.settle()
        assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        visit.page.locator(".cp-column-tabs").get_by_role("tab", name="3").click()
        expect(visit.columns.nth(2)).to_be_in_viewport(ratio=0.5)


def test_an_open_sidebar_has_room_and_no_style_looks_for_it_in_the_conversation(visit: Visit) -> None:
    """Gradio's styles asked by `:has()` for an open sidebar, and a token at the end of 300 messages cost half as much again."""
    visit.page.get_by_role("button", name="Settings", exact=True).click()
    wait_until(visit.page, "document.querySelector('#cp-canvas').getBoundingClientRect().right <= innerWidth - 330")
    visit.page.get_by_role("button", name="Settings", exact=True).click()
    wait_until(visit.page, "document.querySelector('#cp-canvas').getBoundingClientRect().right === innerWidth")
    wait_until(visit.page, "document.querySelector('#cp-canvas').getBoundingClientRect().left === 300")
    expect(visit.page.locator(".sidebar-parent")).to_have_count(0)


def test_everything_of_use_is_done_with_keys_alone(visit: Visit) -> None:
    press = visit.page.keyboard.press
    expect(visit.composer).to_be_focused()
    visit.page.keyboard.type("Typed")
    press("Enter")
    expect(visit.page.locator(".cp-message.is-last.is-assistant")).to_be_attached()
    visit.settle()
    press("Escape")
    visit.page.evaluate("document.activeElement.blur()")
    press("Shift+R")
    expect(visit.columns).to_have_count(9)
    visit.settle()
    press("3")
    expect(visit.messages.last.locator(".cp-pager-count")).to_have_text("3/9")
    visit.messages.last.focus()
    press("ArrowLeft")
    expect(visit.messages.last.locator(".cp-pager-count")).to_have_text("2/9")
    press("s")
    expect(visit.messages.last.locator(".cp-kept")).to_be_visible()
    press("k")
    expect(visit.messages.first).to_be_focused()
    press("e")
    expect(visit.page.get_by_label("Edit the message")).to_be_focused()
    press("Escape")
    press("t")
    expect(visit.page.get_by_role("tab", name="Tree")).to_be_visible()
    visit.page.evaluate("document.activeElement.blur()")
    press("?")
    expect(visit.page.get_by_role("dialog", name="Keys")).to_be_visible()
    press("Escape")
    press("n")
    expect(visit.messages).to_have_count(0)
    expect(visit.composer).to_be_focused()


def test_parameters_of_the_sidebar_are_those_of_the_run(visit: Visit) -> None:
    visit.page.locator("#cp-right > .toggle-button").click()
    field = visit.page.locator("#cp-param-temperature input[type=number]")
    field.fill("0")
    field.press("Tab")
    visit.page.locator("#cp-param-max_tokens input[type=number]").fill("5")
    visit.ask("Hello")
    params = visit.page.evaluate("chatpage.conversation.activeLeaf.params")
    assert (params["temperature"], params["max_tokens"]) == (0, 5)
    visit.page.locator("#cp-neutral").click()
    expect(field).to_have_value("1")
    visit.page.reload()
    visit.ready()
    expect(field).to_have_value("1")


def test_a_preset_brings_its_system_prompt_and_parameters(visit: Visit) -> None:
    visit.page.locator("#cp-right > .toggle-button").click()
    visit.page.locator("#cp-system textarea").fill("You are a pirate.")
    field = visit.page.locator("#cp-param-top_k input[type=number]")
    field.fill("40")
    field.press("Tab")
    visit.page.get_by_placeholder("name").fill("<a href=x>Not a link</a>")
    visit.page.get_by_role("button", name="Save", exact=True).click()
    expect(visit.page.get_by_text("<a href=x>Not a link</a>").first).to_be_visible()  # Gradio shows messages as HTML
    visit.page.get_by_placeholder("name").fill("Pirate")
    visit.page.get_by_role("button", name="Save", exact=True).click()
    expect(visit.page.locator("#cp-preset input")).to_have_value("Pirate")
    visit.page.locator("#cp-system textarea").fill("")
    visit.page.locator("#cp-neutral").click()
    visit.page.reload()
    visit.ready()
    visit.page.locator("#cp-right > .toggle-button").click()
    visit.page.locator("#cp-preset input").click()
    visit.page.get_by_role("option", name="Pirate").click()
    expect(visit.page.locator("#cp-system textarea")).to_have_value("You are a pirate.")
    expect(field).to_have_value("40")
    visit.ask("Hello")
    expect(visit.page.locator(".cp-message.is-system")).to_contain_text("You are a pirate.")
    assert visit.page.evaluate("chatpage.conversation.activeLeaf.params.top_k") == 40


def test_gradio_clients_chat_in_the_same_conversations(site: Site, tmp_path: Path) -> None:
    client = Client(site.served.url, verbose=False, download_files=str(tmp_path))
    text, conversation_id = client.predict("Hello", "", 1.0, 8, api_name="/chat")
    assert text
    again, same = client.predict("And again", conversation_id, 1.0, 8, api_name="/chat")
    assert (same, bool(again)) == (conversation_id, True)
    with site.visit() as visit:
        show(visit, conversation_id)
        expect(visit.messages).to_have_count(4)
        assert visit.text_of(visit.messages.nth(1)) == text


def test_a_fork_shares_its_messages_and_computes_nothing(visit: Visit) -> None:
    visit.ask("Hello")
    before = visit.conversation_id
    visit.act("Fork to a new conversation")
    visit.page.get_by_role("button", name="This path, up to here").click()
    wait_until(visit.page, f"chatpage.conversation?.id !== '{before}' && chatpage.conversation?.nodes.size === 2")
    visit.act("Regenerate")
    expect(visit.messages.last.locator(".cp-pager-count")).to_have_text("2/2")
    visit.settle()
    usage = visit.page.evaluate("chatpage.conversation.activeLeaf.usage")
    assert usage["cached_tokens"] == usage["prompt_tokens"]


def test_a_cost_is_told_before_the_click_and_after(visit: Visit) -> None:
    visit.ask("Hello")
    visit.settle()
    visit.messages.last.get_by_role("button", name="Regenerate", exact=True).hover()
    chip = visit.messages.last.locator(".cp-cost")
    expect(chip).to_contain_text("0 to compute")
    visit.messages.last.get_by_role("button", name="Regenerate", exact=True).click()
    expect(visit.messages.last.locator(".cp-pager-count")).to_have_text("2/2")
    visit.settle()
    expect(visit.messages.last.locator(".cp-facts")).to_contain_text(" 0 computed")
    visit.composer.fill("And now")
    expect(visit.page.locator(".cp-composer .cp-cost")).to_contain_text("to compute")
