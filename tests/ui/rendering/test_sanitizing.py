"""What leaves is safe, whatever came in."""

from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pygments.token import STANDARD_TYPES

from chatpage_ui.rendering import render_blocks
from chatpage_ui.rendering.sanitizing import MATHML_TAGS, is_safe_address, sanitize

HOSTILE = [
    *(
        "${alert(1)}",
        "{{x}}",
        "<%= x %>",
        "<img src=x onerror=alert(1)>",
        "</script><script>alert(1)</script>",
        "<svg onload=a>",
    ),
    *("<iframe srcdoc='<script>alert(1)</script>'>", "<a href=javascript:alert(1)>x</a>", "<style>*{display:none}</style>"),
    *(
        "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror=alert(1)&gt;'>",
        "<form action=x>",
    ),
    *("<math><mi xlink:href='data:x,<script>alert(1)</script>'>", "<p style='position:fixed'>", "<input autofocus onfocus=a>"),
    *("<svg><style><img src=x onerror=alert(1)></style></svg>", "<noscript><p title='</noscript><img src=x onerror=a>'>"),
    *("<math><annotation-xml encoding='text/html'><script>alert(1)</script>", "<base href=//a.b>", "<meta http-equiv=refresh>"),
    *(
        "<details open ontoggle=alert(1)>",
        "<button formaction=javascript:alert(1)>",
        "<object data=x>",
        "<link rel=stylesheet>",
    ),
    *(
        "<a id=location name=location>",
        "<div class='cp-host'>",
        "<select><style></select><img src=x onerror=a>",
        "<template><b>",
    ),
]
PIECES = [
    *HOSTILE,
    "*",
    "`",
    "```\n",
    "$",
    "$$\n",
    "\\text{",
    "}",
    "[",
    "](",
    ")",
    "|",
    "\n",
    "- ",
    "> ",
    "&lt;",
    "\0",
    "<",
    ">",
    "'",
    '"',
]
TAGS = MATHML_TAGS | frozenset(
    """
    a blockquote br button code del details div em figcaption figure h1 h2 h3 h4 h5 h6 hr input li ol p pre s span strong
    summary table tbody td th thead tr ul
    """.split()  # noqa: SIM905 - a list would have forty lines
)
CLASSES = frozenset(
    """
    code lang copy highlight plain latex math reasoning image task-list-item contains-task-list task-list-item-checkbox left
    center right
    """.split()  # noqa: SIM905
)


class Reader(HTMLParser):
    """Notes what a browser would be given."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


@pytest.mark.parametrize("markup", HOSTILE)
def test_hostile_markup_loses_what_could_run(markup: str) -> None:
    """Even if the renderer let it pass as markup, which it does not."""
    _check(sanitize(markup))


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_shown_as_it_was_written(text: str) -> None:
    for shown in (text, f"a {text}", f"- {text}", f"> {text}", f"```\n{text}\n```"):
        html = "".join(block.html for block in render_blocks(shown, is_open=False))
        _check(html)
        assert "&lt;" in html or "<" not in text


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.booleans())
def test_no_text_becomes_anything_that_runs_or_loads(text: str, is_open: bool) -> None:
    for block in render_blocks(text, is_open=is_open):
        _check(block.html)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_what_leaves_means_the_same_when_it_is_read_again(text: str) -> None:
    """Markup that changes when it is read again is how filters are got around."""
    for block in render_blocks(text, is_open=False):
        assert sanitize(block.html) == block.html


def test_addresses_lead_out() -> None:
    assert all(map(is_safe_address, ("http://a.b", "HTTPS://a.b/?c#d", "mailto:a@b.c")))
    assert not any(
        map(is_safe_address, ("", "/a", "a", "//a.b", "#a", "javascript:a", " http://a", "http://", "data:,a", "ftp://a"))
    )


def _check(html: str) -> None:
    """Hold what the page relies on."""
    reader = Reader()
    reader.feed(html)
    for tag, attributes in reader.elements:
        assert tag in TAGS
        for name, value in attributes.items():
            assert not name.startswith("on")
            assert name not in (
                "style",
                "src",
                "srcset",
                "srcdoc",
                "action",
                "formaction",
                "id",
                "name",
                "background",
                "poster",
            )
            assert name not in ("href", "xlink:href") or (tag == "a" and is_safe_address(value or ""))
            assert name != "class" or set((value or "").split()) <= CLASSES | _token_classes(tag)
        assert tag != "a" or ("href" not in attributes or attributes["target"] == "_blank")
        assert tag != "input" or (attributes["type"] == "checkbox" and "disabled" in attributes)


def _token_classes(tag: str) -> set[str]:
    return set(STANDARD_TYPES.values()) if tag == "span" else set()
