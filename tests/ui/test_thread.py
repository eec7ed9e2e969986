"""A conversation on the page: send, answer again, go through versions, edit, continue, stop, delete."""

from playwright.sync_api import expect

from tests.ui.pages import LONG, Site, Visit


def test_a_message_is_answered_and_a_reload_shows_the_same(visit: Visit) -> None:
    visit.ask("Hello there")
    expect(visit.messages).to_have_count(2)
    text = visit.text_of(visit.messages.last)
    assert text
    visit.page.reload()
    visit.ready()
    expect(visit.messages).to_have_count(2)
    expect(visit.messages.first).to_contain_text("Hello there")
    assert visit.text_of(visit.messages.last) == text


def test_eight_versions_come_with_two_clicks_and_one_is_used(visit: Visit) -> None:
    visit.ask("Hello")
    visit.messages.last.hover()
    visit.messages.last.locator('[data-n="8"]').click()
    expect(visit.columns).to_have_count(9)
    visit.settle()
    texts = [visit.text_of(visit.columns.nth(i)) for i in range(9)]
    assert all(texts)
    assert len(set(texts)) > 1
    expect(visit.page.locator(".cp-columns-head")).to_contain_text("prompt of the last run: 0 computed")
    visit.columns.nth(4).get_by_role("button", name="Use this").click()
    expect(visit.columns).to_have_count(0)
    expect(visit.messages.last.locator(".cp-pager-count")).to_have_text("5/9")
    assert visit.text_of(visit.messages.last) == texts[4]
    visit.page.reload()
    visit.ready()
    expect(visit.messages.last.locator(".cp-pager-count")).to_have_text("5/9")
    assert visit.text_of(visit.messages.last) == texts[4]
    visit.page.locator(".cp-next").click()
    expect(visit.messages.last.locator(".cp-pager-count")).to_have_text("6/9")


def test_an_edited_message_is_a_version_beside_the_old_one(visit: Visit) -> None:
    visit.ask("First words")
    visit.act("Edit", visit.messages.first)
    visit.page.get_by_label("Edit the message").fill("Other words")
    visit.page.get_by_role("button", name="Send", exact=True).first.click()
    expect(visit.messages.first).to_contain_text("Other words")
    visit.settle()
    expect(visit.messages.first.locator(".cp-pager-count")).to_have_text("2/2")
    visit.messages.first.locator(".cp-prev").click()
    expect(visit.messages.first).to_contain_text("First words")
    expect(visit.messages).to_have_count(2)


def test_an_edited_reply_is_gone_on_with(visit: Visit) -> None:
    visit.ask("Hello")
    visit.act("Edit")
    visit.page.get_by_label("Edit the message").fill("It began like this")
    visit.page.get_by_role("button", name="Save and continue").click()
    expect(visit.messages.last.locator(".cp-pager-count")).to_have_text("2/2")
    visit.settle()
    text = visit.text_of(visit.messages.last)
    assert text.startswith("It began like this")
    assert len(text) > len("It began like this")


def test_what_was_stopped_keeps_its_text_and_goes_on(site: Site) -> None:
    site.engine.hold(after=20)
    with site.visit(params=LONG) as visit:
        visit.send("Tell me much")
        expect(visit.page.locator(".cp-message.is-writing .cp-tail")).not_to_be_empty()
        visit.page.locator(".cp-stop").click()
        expect(visit.messages.last.locator(".cp-note")).to_contain_text("Stopped.")
        cut = visit.text_of(visit.messages.last)
        assert cut
        visit.messages.last.get_by_role("button", name="Continue", exact=True).first.click()
        site.engine.hold(after=20)
        visit.wait_for_text(len(cut) + 5)
        assert visit.text_of(visit.messages.last).startswith(cut)
        visit.composer.press("Escape")
        visit.settle()


def test_why_a_reply_is_not_whole_is_said_in_the_same_words_after_a_reload(visit: Visit) -> None:
    visit.ask("Hello")
    note = visit.messages.last.locator(".cp-note")
    expect(note).to_contain_text("Cut off: it reached its limit of tokens.")
    visit.page.reload()
    visit.ready()
    expect(note).to_contain_text("Cut off: it reached its limit of tokens.")
    words = visit.page.evaluate(
        """async () => {
            const { whyCut } = await import("/canvas/words.js")
            const node = { status: "complete", finish_reason: "length", params: { max_tokens: 90 } }
            const after = (written) => whyCut({ ...node, usage: { prompt_tokens: 50, completion_tokens: written } }, 100)
            return [after(50), after(20), whyCut({ ...node, finish_reason: "stop" }, 100)]
        }"""
    )
    assert words == ["Cut off: the context is full.", "Cut off: there was no memory for more.", ""]


def test_more_like_a_version_is_brought_into_view(visit: Visit) -> None:
    visit.ask("Hello")
    visit.messages.last.locator('[data-n="8"]').click()
    expect(visit.columns).to_have_count(9)
    visit.settle()
    visit.columns.nth(1).get_by_role("button", name="4 more like this").click()
    expect(visit.columns).to_have_count(13)
    expect(visit.columns.nth(9)).to_be_in_viewport(ratio=0.9)
    visit.settle()


def test_a_deleted_message_comes_back_when_it_is_undone(visit: Visit) -> None:
    visit.ask("Hello")
    visit.act("Delete")
    expect(visit.messages).to_have_count(1)
    visit.page.locator(".cp-toast").get_by_role("button", name="Undo").click()
    expect(visit.messages).to_have_count(2)


def test_a_comparison_ends_with_the_last_of_its_versions(visit: Visit) -> None:
    """The first messages of the conversation were shown as columns instead, below the message that was asked."""
    visit.ask("two of these")
    visit.act("Regenerate")
    visit.settle()
    visit.act("Compare side by side")
    expect(visit.columns).to_have_count(2)
    for left in (1, 0):
        visit.columns.first.get_by_role("button", name="Discard", exact=True).click()
        expect(visit.columns).to_have_count(left)
    expect(visit.page.locator(".cp-columns")).to_have_count(0)
    expect(visit.messages).to_have_count(1)
    assert visit.page.evaluate("chatpage.comparing") is None


def test_a_comparison_ends_when_another_tab_shows_another_branch(visit: Visit) -> None:
    visit.ask("First words")
    visit.act("Edit", visit.messages.first)
    visit.page.get_by_label("Edit the message").fill("Other words")
    visit.page.get_by_role("button", name="Send", exact=True).first.click()
    expect(visit.messages.first).to_contain_text("Other words")
    visit.settle()
    visit.act("Regenerate")
    visit.settle()
    visit.act("Compare side by side")
    expect(visit.columns).to_have_count(2)
    other = visit.tab()
    other.goto(visit.page.url)
    visit.ready(other)
    expect(other.locator(".cp-column")).to_have_count(2)
    other.evaluate("chatpage.select(chatpage.conversation.childrenOf(null)[0])")
    expect(visit.messages.first).to_contain_text("First words")
    expect(visit.messages).to_have_count(2)
    expect(visit.page.locator(".cp-columns")).to_have_count(0)
    other.close()


def test_a_late_answer_to_an_older_click_turns_nothing_back(visit: Visit) -> None:
    """With a slow server, clicking through versions jumped back and forth, and took the focus with it."""
    visit.ask("Hello")
    visit.messages.last.locator('[data-n="2"]').click()
    expect(visit.columns).to_have_count(3)
    visit.settle()
    visit.columns.nth(2).get_by_role("button", name="Use this").click()
    ids = visit.page.evaluate("chatpage.conversation.siblingsOf(chatpage.conversation.activeLeaf.id)")
    shown = visit.page.evaluate(
        """async (ids) => {
            const talk = chatpage.conversation
            const patch = (version, child) => talk.take({
                type: "tree.patch", conversation_id: talk.id, version: talk.version + version,
                ops: [{op: "choose", parent_id: talk.parentOf(child), child_id: child}],
            })
            let answer
            talk.choose(ids[0], new Promise((resolve) => (answer = resolve)))
            const before = talk.version
            patch(1, ids[1])
            const early = talk.activeLeaf.id
            answer({version: before + 2})
            await new Promise((resolve) => setTimeout(resolve))
            const own = talk.activeLeaf.id
            patch(2, ids[2])
            return [early, own, talk.activeLeaf.id]
        }""",
        ids,
    )
    assert shown == [ids[0], ids[0], ids[2]]


def test_a_double_click_is_one_click(visit: Visit) -> None:
    visit.ask("Hello")
    visit.messages.last.hover()
    visit.messages.last.get_by_role("button", name="Regenerate", exact=True).dblclick()
    expect(visit.messages.last.locator(".cp-pager-count")).to_have_text("2/2")
    visit.settle()
    visit.page.reload()  # the server has seen both clicks by now, if there were two
    visit.ready()
    expect(visit.messages.last.locator(".cp-pager-count")).to_have_text("2/2")
