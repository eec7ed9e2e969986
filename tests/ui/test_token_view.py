"""A reply as tokens: the exact text, what else could stand there, and branching at any of them."""

from typing import Any

from playwright.sync_api import Locator, expect

from tests.ui.pages import Site, Visit

WORDS = "Words: alternatives, and branching at any of them"


def open_tokens(visit: Visit) -> Locator:
    visit.act(WORDS)
    tokens = visit.page.locator(".cp-token")
    expect(tokens.first).to_be_visible()
    return tokens


def leaf(visit: Visit) -> str:
    return str(visit.page.evaluate("chatpage.conversation.activeLeaf.id"))


def tokens_of(visit: Visit, node_id: str) -> list[dict[str, Any]]:
    """Return the tokens of a reply as the server has them."""
    url = f"{visit.site.served.url}/api/conversations/{visit.conversation_id}/nodes/{node_id}/tokens"
    tokens: list[dict[str, Any]] = visit.page.request.get(url).json()["tokens"]
    return tokens


def test_the_tokens_are_the_text_to_the_character(visit: Visit) -> None:
    visit.ask("Hello")
    text = visit.text_of(visit.messages.last)
    tokens = open_tokens(visit)
    expect(tokens).to_have_count(len(tokens_of(visit, leaf(visit))))
    assert visit.page.locator(".cp-tokens-text").evaluate("element => element.textContent") == text
    visit.act(WORDS)
    expect(tokens).to_have_count(0)
    expect(visit.messages.last.locator(".cp-body")).to_be_visible()


def test_another_token_makes_a_branch_that_begins_the_same(visit: Visit) -> None:
    visit.ask("Hello")
    original = leaf(visit)
    before = tokens_of(visit, original)
    open_tokens(visit).nth(3).click()
    rows = visit.page.locator(".cp-alternative")
    expect(rows.first).to_be_visible()
    expect(visit.page.locator(".cp-alternative.is-chosen")).to_have_count(1)
    expect(visit.page.locator(".cp-tokens-cost")).to_contain_text("tokens were in memory")
    visit.page.locator(".cp-alternative:not(.is-chosen)").nth(1).click()
    expect(visit.messages.last.locator(".cp-pager-count")).to_have_text("2/2")
    visit.settle()
    after = tokens_of(visit, leaf(visit))
    assert leaf(visit) != original
    assert [token["id"] for token in after[:3]] == [token["id"] for token in before[:3]]
    assert after[3]["id"] != before[3]["id"]
    assert tokens_of(visit, original) == before


def test_several_branches_at_one_token_stand_side_by_side(visit: Visit) -> None:
    visit.ask("Hello")
    open_tokens(visit).nth(2).click()
    visit.page.get_by_role("radio", name="4 branches").click()
    visit.page.get_by_role("button", name="Write on from here").click()
    expect(visit.columns).to_have_count(5)
    visit.settle()


def test_alternatives_are_sorted_and_their_shares_add_up(visit: Visit) -> None:
    visit.ask("Hello")
    open_tokens(visit).nth(1).click()
    shares = visit.page.locator(".cp-alternative-share")
    expect(shares.nth(9)).to_be_visible()
    listed = [float(share.removesuffix(" %").removeprefix("<")) for share in shares.all_inner_texts()]
    assert listed[:10] == sorted(listed[:10], reverse=True)
    rest = visit.page.locator(".cp-alternative-rest span").last.inner_text()
    assert abs(sum(listed) + float(rest.removesuffix(" %")) - 100) < 5


def test_keys_walk_the_tokens_and_give_the_focus_back(visit: Visit) -> None:
    visit.ask("Hello")
    tokens = open_tokens(visit)
    tokens.first.focus()
    visit.page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(visit.page.locator('.cp-token[tabindex="0"]')).to_have_count(1)
    visit.page.keyboard.press("Enter")
    expect(visit.page.locator(".cp-alternative").first).to_be_visible()
    expect(visit.page.locator('.cp-alternative[aria-current="true"]')).to_be_focused()
    visit.page.keyboard.press("Escape")
    expect(tokens.nth(1)).to_be_focused()
    tokens.nth(1).press("End")
    expect(tokens.last).to_be_focused()
    tokens.last.press("Escape")
    expect(tokens).to_have_count(0)


def test_what_goes_on_is_taken_apart_again_when_it_is_complete(visit: Visit) -> None:
    visit.ask("Hello")
    tokens = open_tokens(visit)
    expect(tokens).to_have_count(24)
    visit.page.evaluate("chatpage.continue(chatpage.conversation.activeLeaf.id)")
    expect(tokens).to_have_count(48)
    text = visit.page.evaluate("chatpage.conversation.textOf(chatpage.conversation.activeLeaf.id)")
    assert visit.page.locator(".cp-tokens-text").evaluate("element => element.textContent") == text


def test_an_error_is_said_where_it_happened_and_can_be_tried_again(site: Site) -> None:
    with site.visit(allowed=("503",)) as visit:
        visit.ask("Hello")
        tokens = open_tokens(visit)
        problem = {"error": {"code": "engine_down", "message": "The engine is started again."}}
        visit.page.route("**/alternatives?*", lambda route: route.fulfill(status=503, json=problem))
        tokens.nth(2).click()
        expect(visit.page.locator(".cp-alternatives")).to_have_text("The engine is started again.")
        visit.page.unroute("**/alternatives?*")
        visit.page.keyboard.press("Escape")
        tokens.nth(2).click()
        expect(visit.page.locator(".cp-alternative").first).to_be_visible()
