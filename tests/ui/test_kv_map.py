"""The memory map: what it counts is what the server counts, and messages and blocks light each other."""

from typing import Any

from playwright.sync_api import Locator, expect

from tests.ui.pages import Site, Visit


def open_map(visit: Visit) -> None:
    visit.page.locator(".cp-bar").get_by_role("button", name="Memory").click()
    expect(visit.page.locator(".cp-kv-facts b").first).to_be_visible()


def fact(visit: Visit, name: str) -> Locator:
    return visit.page.locator(".cp-kv-facts > div").filter(has=visit.page.get_by_text(name, exact=True)).locator("b")


def legend(visit: Visit, name: str) -> Locator:
    return visit.page.locator(".cp-kv-legend li").filter(has=visit.page.get_by_text(name, exact=True)).locator("b")


def memory(visit: Visit) -> dict[str, Any]:
    answer: dict[str, Any] = visit.page.request.get(f"{visit.site.served.url}/api/kv").json()
    return answer


def locations(visit: Visit, leaf_ids: list[str]) -> list[dict[str, Any]]:
    url = f"{visit.site.served.url}/api/conversations/{visit.conversation_id}/kv"
    paths: list[dict[str, Any]] = visit.page.request.post(url, data={"leaf_ids": leaf_ids}).json()["paths"]
    return paths


def leaf(visit: Visit) -> str:
    return str(visit.page.evaluate("chatpage.conversation.activeLeaf.id"))


def test_the_numbers_are_the_servers(visit: Visit) -> None:
    open_map(visit)
    visit.ask("Hello")
    visit.ask("And on")
    expect_given_back(visit.site)
    stats = memory(visit)["stats"]
    expect(fact(visit, "Cached, evictable")).to_have_text(f"{stats['blocks_cached']:,}")
    expect(fact(visit, "Free")).to_have_text(f"{stats['blocks_blank']:,}")
    expect(fact(visit, "Copies")).to_have_text(f"{stats['num_block_copies']:,}")
    rate = int(100 * stats["cached_tokens"] / stats["prompt_tokens"] + 0.5)  # as JavaScript rounds
    expect(fact(visit, "Hit rate")).to_have_text(f"{rate} %")
    expect(legend(visit, "Free")).to_have_text(f"{stats['blocks_blank']:,}")


def test_samples_that_write_share_their_prompt_and_the_bar_says_what_it_saves(site: Site) -> None:
    with site.visit() as visit:
        open_map(visit)
        visit.ask("A prompt that fills several blocks of four tokens, so that there is something to share")
        site.engine.hold(after=10)
        visit.page.evaluate("chatpage.regenerate(chatpage.conversation.activeLeaf.id, 8)")
        expect(legend(visit, "Shared by 3 or more")).not_to_have_text("0")
        meter = visit.page.locator(".cp-kv-meter").first
        expect(meter.locator(".cp-kv-meter-text")).to_contain_text("without sharing: saved")
        width = float(meter.locator("i").evaluate("bar => bar.style.width.replace('%', '')"))
        assert 0 < width < 100
        visit.page.evaluate("chatpage.stopAll()")
        visit.settle()
    expect_given_back(site)


def expect_given_back(site: Site) -> None:
    with site.visit() as visit:
        open_map(visit)
        expect(legend(visit, "Used by 1")).to_have_text("0")
        expect(legend(visit, "Shared by 3 or more")).to_have_text("0")


def test_branches_of_a_conversation_are_counted_once(visit: Visit) -> None:
    open_map(visit)
    visit.ask("A prompt that fills several blocks of four tokens, so that there is something to share")
    visit.page.evaluate("chatpage.regenerate(chatpage.conversation.activeLeaf.id, 2)")
    expect(visit.columns).to_have_count(3)
    visit.settle()
    while memory(visit)["stats"]["blocks_used"]:  # the last block of a reply is kept after its end was told
        visit.page.wait_for_timeout(30)
    leaves: list[str] = visit.page.evaluate("chatpage.conversation.leaves()")
    paths = locations(visit, leaves)
    num_blocks = len({block for path in paths for block in path["block_ids"]})
    own = visit.page.locator(".cp-kv-meter").nth(1)
    expect(own.locator(".cp-kv-meter-head")).to_contain_text("This conversation, 3 branches")
    expect(legend(visit, "This conversation")).to_have_text(str(num_blocks))
    expect(own.locator(".cp-kv-meter-text")).to_contain_text("saved")


def test_branches_that_are_not_in_memory_save_nothing(visit: Visit) -> None:
    """After a restart fifty branches that began alike were said to save 98 % with the one block that was there."""
    path = {
        "num_tokens": 20,
        "block_ids": [7],
        "nodes": [{"node_id": "q", "start": 0, "end": 4}, {"node_id": "r", "start": 4, "end": 20}],
    }
    paths = [{**path, "leaf_id": str(i), "num_cached": 4} for i in range(50)]
    held = {**path, "leaf_id": "held", "num_cached": 20, "block_ids": [7, 8, 9]}
    counted = visit.page.evaluate(
        """async ([paths, held]) => {
            const { KvPaths } = await import("/canvas/kv_paths.js")
            return [paths, [...paths, held], [held, { ...held, block_ids: [7, 8, 10] }]].map((some) => {
                const found = new KvPaths({ block_size: 4, paths: some })
                return [found.numHeld, found.numBlocks, found.numEntries]
            })
        }""",
        [paths, held],
    )
    assert counted == [[0, 1, 1], [1, 3, 3], [2, 4, 6]]


def test_a_message_that_is_pointed_at_lights_its_blocks(visit: Visit) -> None:
    visit.ask("A prompt that fills several blocks of four tokens, so that there is something to light")
    open_map(visit)
    expect(legend(visit, "This conversation")).not_to_have_text("0")
    before = settled_picture(visit)
    visit.messages.first.hover()
    expect_picture(visit, before, is_same=False)
    visit.page.locator(".cp-bar").hover()
    expect_picture(visit, before, is_same=True)


def picture(visit: Visit) -> str:
    return str(visit.page.evaluate("document.querySelector('.cp-kv-canvas').toDataURL()"))


def settled_picture(visit: Visit) -> str:
    """Return the picture once it has stayed the same for longer than the map takes to ask again."""
    last, since = picture(visit), 0
    for _ in range(200):
        visit.page.wait_for_timeout(100)
        now = picture(visit)
        last, since = now, since + 1 if now == last else 0
        if since == 20:
            return last
    raise AssertionError("the picture never settled")


def expect_picture(visit: Visit, before: str, *, is_same: bool) -> None:
    for _ in range(100):
        if (picture(visit) == before) is is_same:
            return
        visit.page.wait_for_timeout(50)
    raise AssertionError("the picture stayed as it was" if not is_same else "the picture did not come back")


def test_a_block_names_the_messages_it_holds_and_lights_them(visit: Visit) -> None:
    visit.ask("A prompt that fills several blocks of four tokens, so that there is something to light")
    open_map(visit)
    expect(legend(visit, "This conversation")).not_to_have_text("0")
    question = visit.messages.first.get_attribute("data-node")
    [path] = locations(visit, [leaf(visit)])
    span = next(node for node in path["nodes"] if node["node_id"] == question)
    block = path["block_ids"][span["start"] // 4 + 1]
    canvas = visit.page.locator(".cp-kv-canvas")
    canvas.focus()
    canvas.press("Home")
    for _ in range(block):
        canvas.press("ArrowRight")
    tip = visit.page.locator(".cp-kv-tip")
    expect(tip).to_contain_text(f"Block {block}: cached")
    expect(tip).to_contain_text("You: “A prompt that fills")
    expect(visit.messages.first).to_have_class("cp-message is-user is-lit")
    expect(visit.page.locator(".cp-kv [role=status]").last).to_contain_text(f"Block {block}: cached. Rows 4 of 4.")
    canvas.press("Escape")
    expect(tip).to_be_hidden()
    expect(visit.page.locator(".is-lit")).to_have_count(0)


def test_nothing_is_asked_while_the_map_is_closed(visit: Visit) -> None:
    """A panel that polls behind a closed drawer keeps the engine busy for nobody."""
    open_map(visit)
    visit.page.get_by_role("button", name="Close the drawer").click()
    expect(visit.page.locator(".cp-kv")).to_be_hidden()
    visit.page.wait_for_timeout(300)
    visit.site.requests.clear()
    visit.ask("Hello")
    visit.ask("And on")
    assert [url for url in visit.site.requests if url.endswith("/kv")] == []


def test_a_server_that_does_not_answer_leaves_the_picture_standing(site: Site) -> None:
    with site.visit(allowed=("503",)) as visit:
        visit.ask("Hello")
        open_map(visit)
        expect(legend(visit, "This conversation")).not_to_have_text("0")
        counted = legend(visit, "This conversation").inner_text()
        problem = {"error": {"code": "engine_down", "message": "The engine is started again."}}
        visit.page.route("**/api/kv", lambda route: route.fulfill(status=503, json=problem))
        visit.page.evaluate("chatpage.connection.dispatchEvent(new CustomEvent('message', {detail: {type: 'kv.stats'}}))")
        expect(visit.page.locator(".cp-kv-note")).to_have_text("The engine is started again.")
        expect(legend(visit, "This conversation")).to_have_text(counted)
        visit.page.unroute("**/api/kv")
        visit.page.evaluate("chatpage.connection.dispatchEvent(new CustomEvent('message', {detail: {type: 'kv.stats'}}))")
        expect(visit.page.locator(".cp-kv-note")).to_be_hidden()
