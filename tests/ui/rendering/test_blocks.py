"""Blocks: their places, and when they are settled."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chatpage_ui.rendering import Block, render_blocks
from chatpage_ui.rendering.blocks import MAX_BLOCK, MAX_TEXT
from chatpage_ui.rendering.parser import MAX_NESTING

# Pieces whose meaning depends on what comes before or after them.
PIECES = [
    *("a", "b c", "1", " ", "  ", "    ", "\t", "\n", "\n", "\n\n", "\r", "\r\n", "\0", "😀", "é"),
    *("#", "# ", "=", "===", "-", "---", "- ", "* ", "1. ", "2) ", "> ", ">", "***", "- [ ] ", "- [x] "),
    *("```", "```py", "~~~", "`", "|", "a|b", "-|-", "|-", "*", "**", "_", "~~", "\\", "<b>", "&amp;", "www.a.de "),
    *("$", "$$", "$$\n", "\\[", "\\]", "\\(", "\\)", "x^2", "{", "}"),
    *("[a]", "[a]: /b", "[a]:", "[b](http://c.d)", "![", "](", ")", "'t", "<think>", "<think>\n", "</think> and "),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=24).map("".join)


def test_a_block_has_its_place_in_the_text_and_its_html() -> None:
    text = "# Title\n\nSome *text*\nmore\n\n\n- one\n- two\n"
    blocks = render_blocks(text, is_open=False)
    assert [text[block.start : block.end] for block in blocks] == ["# Title", "Some *text*\nmore", "- one\n- two"]
    assert [block.html for block in blocks] == [
        "<h1>Title</h1>\n",
        "<p>Some <em>text</em><br>\nmore</p>\n",
        "<ul>\n<li>one</li>\n<li>two</li>\n</ul>\n",
    ]
    assert all(block.is_settled for block in blocks)


def test_places_count_as_a_browser_counts() -> None:
    """A browser's strings count an emoji as two."""
    text = "😀😀\n\nafter 😀\n\nlast"
    units = text.encode("utf-16-le")
    blocks = render_blocks(text, is_open=False)
    assert [units[2 * block.start : 2 * block.end].decode("utf-16-le") for block in blocks] == ["😀😀", "after 😀", "last"]


def test_what_is_being_written_is_not_settled() -> None:
    assert _settled("# Title\n\n- one\n\nThen I th") == ["# Title"]
    assert _settled("# Title\n\n- one\n\nThen I think.\n") == ["# Title", "- one"]


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("above\n#", "1 is no heading"),
        ("above\n***", "bold and italic***"),
        ("above\n``` a", "`` is code in the line"),
        ("1. a\n\n2", ". b"),
        ("above\n\na|b\n-|", "-\n"),
        ("- a\n\nb", ""),
        ("above\n$$ a", "$$ goes on"),
    ],
)
def test_half_a_line_settles_nothing_that_it_may_yet_belong_to(text: str, more: str) -> None:
    """A streamed `1. a`, blank line, `2` was taken for a list and a paragraph, until the dot came."""
    before = [block for block in render_blocks(text, is_open=True) if block.is_settled]
    assert before == render_blocks(text + more, is_open=True)[: len(before)]


@settings(max_examples=400, deadline=None)
@given(TEXTS)
@example("a\n\n[a]: /b\n\n[a]\n")
@example("<think>a\n\nb</think>\n\nc\n\nd\n")
@example("a\nb|c\n-|-\n1|2\n\nd\n")
@example("a\n$$\n# b\n$$\n\nc\n")
def test_a_settled_block_stays_as_it_is(text: str) -> None:
    """Whatever text follows; else the page would show a stale block, or have to render everything again."""
    whole = render_blocks(text, is_open=True)
    for end in range(len(text) + 1):
        settled = [block for block in render_blocks(text[:end], is_open=True) if block.is_settled]
        assert settled == [Block(block.start, block.end, block.html, is_settled=True) for block in whole[: len(settled)]]


@settings(max_examples=200, deadline=None)
@given(TEXTS.filter(lambda text: "]:" not in text and "[a]" not in text))
def test_the_end_of_a_text_changes_only_what_was_not_settled(text: str) -> None:
    """But for references, which are found only now."""
    settled = [block for block in render_blocks(text, is_open=True) if block.is_settled]
    assert settled == render_blocks(text, is_open=False)[: len(settled)]


@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_blocks_follow_each_other_and_leave_out_only_blank_lines_and_references(text: str) -> None:
    blocks = render_blocks(text, is_open=False)
    units = text.encode("utf-16-le")
    end = 0
    for block in [*blocks, Block(len(units) // 2, len(units) // 2, "", is_settled=True)]:
        assert end <= block.start
        gap = units[2 * end : 2 * block.start].decode("utf-16-le")
        assert not gap.strip() or "]:" in gap
        end = block.end
        assert block.start < end or block.html == ""


def test_references_take_effect_when_the_text_is_whole() -> None:
    text = "See [here].\n\nMore.\n\n[here]: http://example.org\n"
    assert render_blocks(text, is_open=True)[0].html == "<p>See [here].</p>\n"
    assert 'href="http://example.org"' in render_blocks(text, is_open=False)[0].html


def test_html_is_text() -> None:
    assert _html("<b>x</b> <!-- y -->") == "<p>&lt;b&gt;x&lt;/b&gt; &lt;!-- y --&gt;</p>\n"


def test_an_image_is_a_link_to_it() -> None:
    """An image that is loaded tells a stranger's server what is read here, and when."""
    html = _html('![a cat](https://example.org/cat.png "big")')
    assert "<img" not in html
    assert '<a href="https://example.org/cat.png" class="image" title="big"' in html
    assert ">a cat</a>" in html


def test_an_image_in_a_link_is_its_description() -> None:
    html = _html("[![a *fat* cat](http://a.b/c.png)](http://a.b/)")
    assert html.count("<a ") == 1
    assert "fat" in html


def test_links_leave_in_a_new_tab_and_tell_nothing() -> None:
    html = _html("[x](https://example.org) and https://www.example.org")
    assert html.count('target="_blank" rel="noopener noreferrer nofollow"') == 2


def test_words_with_a_dot_are_no_links() -> None:
    """`readme.md` and `done.It` once led to strangers, because .md and .it are countries."""
    assert "<a" not in _html("See readme.md and main.py, e.g.it is done.It was me@home.it")


@pytest.mark.parametrize(
    "address",
    [
        "javascript:alert(1)",
        "JaVaScRiPt:alert(1)",
        "data:text/html,x",
        "vbscript:x",
        "file:///etc/passwd",
        "/api/export",
        "//a.b",
    ],
)
def test_a_link_leads_to_the_web_or_to_a_mailbox(address: str) -> None:
    """One that leads to this server could do something in the reader's name; one that is a script could do anything."""
    for text in (f"[x]({address})", f"<{address}>", f"![x]({address})", f"[x]\n\n[x]: {address}"):
        assert "href" not in _html(text)


def test_tables_tasks_and_strikes() -> None:
    html = _html("|a|b|\n|:-:|-|\n|~~1~~|2|\n\n- [x] done\n- [ ] not\n")
    assert '<th class="center">a</th>' in html
    assert "<s>1</s>" in html
    assert html.count('type="checkbox" disabled="disabled"') == 2
    assert html.count('checked="checked"') == 1


@pytest.mark.parametrize(
    "text",
    [
        *(">" * 10_000, "> " * 10_000, "[" * 10_000, "![" * 10_000, "- " * 10_000, "*" * 2**20, "*a" * 10_000, "[](" * 5_000),
        *("`" * 9_999 + "a", "$a " * 9_000, "\\(" * 9_000, "\\[\n" * 9_000, "[a]:\n" * 9_000, "|" * 9_000, "<" * 9_000),
        *("&" * 9_000, "http://" * 3_000, "a@" * 9_000, "_a__" * 5_000, "\n" * 9_000, "a\n=\n" * 3_000, "$$\n" * 3_001),
    ],
    ids=repr,
)
def test_a_hostile_text_is_rendered_all_the_same(text: str) -> None:
    """The test is that this ends, with whatever was written still there."""
    blocks = render_blocks(text, is_open=False)
    assert all(len(block.html) < 40 * len(text) + 1000 for block in blocks)
    if text.strip():
        assert blocks[-1].end >= len(text.rstrip()) - 1


def test_what_is_nested_too_deep_is_shown_as_it_was_written() -> None:
    text = ">" * (MAX_NESTING + 10) + " deep"
    assert _html(text) == f'<div class="plain">{text.replace(">", "&gt;")}</div>'
    assert "<blockquote>" in _html("> > > not so deep")


def test_what_is_too_long_is_shown_as_it_was_written() -> None:
    assert _html("*a* " * (MAX_BLOCK // 4 + 1)).startswith('<div class="plain">*a* *a*')


@pytest.mark.parametrize("end", [MAX_TEXT - 1, MAX_TEXT, MAX_TEXT + 1, MAX_TEXT + 5_000])
def test_beyond_the_limit_what_was_settled_stays(end: int) -> None:
    text = ("*word* " * 100 + "\n\n") * (MAX_TEXT // 500)
    early = [block for block in render_blocks(text[: MAX_TEXT - 2000], is_open=True) if block.is_settled]
    blocks = render_blocks(text[:end], is_open=True)
    assert blocks[: len(early)] == early
    assert text[blocks[-1].start : blocks[-1].end].strip() == text[blocks[-1].start : end].strip()


def _settled(text: str) -> list[str]:
    return [text[block.start : block.end] for block in render_blocks(text, is_open=True) if block.is_settled]


def _html(text: str) -> str:
    return "".join(block.html for block in render_blocks(text, is_open=False))
