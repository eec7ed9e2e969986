"""Code blocks."""

import html as entities
import re

import pytest

from chatpage_ui.rendering import code_css, render_blocks
from chatpage_ui.rendering.code import _KNOWN, MAX_CODE, MAX_LINE, code_html


def test_code_is_a_figure_with_its_language_and_a_button() -> None:
    html = _html("```python\nx = '<b>'\n```")
    assert html.startswith('<figure class="code" data-lang="python"><figcaption><span class="lang">python</span>')
    assert '<button type="button" class="copy" aria-label="Copy code">Copy</button>' in html
    assert '<span class="s1">&lt;b&gt;</span>' in html


@pytest.mark.parametrize("code", ["a\n\n\n", "\n\n a", "a", "", "a\r\nb", "\tif x:\n\t\ty\n"])
@pytest.mark.parametrize("language", ["python", "html", "", "no-such"])
def test_colours_lose_no_character_of_the_code(code: str, language: str) -> None:
    """Lexers like to strip blank lines and to add an end of line; what is copied must be what was written."""
    html = code_html(code, language)
    inner = html[html.index("<code>") + 6 : html.index("</code>")]
    assert _without_tags(inner) == code


@pytest.mark.parametrize("info", ['"><script>alert(1)</script>', "py'onclick=alert(1)", "<b>", "\u202epy", "a" * 10_000])
def test_a_language_cannot_break_out(info: str) -> None:
    html = _html(f"```{info}\nx\n```")
    assert "<script" not in html
    assert "onclick" not in html.split("<figcaption>")[0]
    assert len(html) < 1000


@pytest.mark.parametrize("language", sorted(_KNOWN))
def test_every_language_that_is_known_is_coloured_and_loses_nothing(language: str) -> None:
    code = '# h\n\ndef f(x):\r\n\treturn "<b>"  # 1\n\n$ a { b: 1; }\n<p class="c">\'\n>>> /* d */\n-- e\n'
    html = code_html(code, language)
    inner = html[html.index("<code>") + 6 : html.index("</code>")]
    assert _without_tags(inner) == code
    assert "<span" in inner


def test_indented_code_is_code_too() -> None:
    assert 'class="copy"' in _html("    x = 1\n")


@pytest.mark.parametrize("code", ["x = 1\n" * (MAX_CODE // 6 + 1), "x" * (MAX_LINE + 1), '"""' * 300, "/*" * 400])
def test_too_much_code_has_no_colours_but_is_whole(code: str) -> None:
    html = code_html(code, "python")
    assert _without_tags(html[html.index("<code>") + 6 : html.index("</code>")]) == code


def test_the_stylesheet_has_both_pages_and_no_address() -> None:
    css = code_css()
    assert "\nfigure.code .highlight .k " in css
    assert "\n.dark figure.code .highlight .k " in css
    assert "url(" not in css
    assert all(line.startswith(("figure.code .highlight", ".dark figure.code .highlight")) for line in css.splitlines())


def _html(text: str) -> str:
    return "".join(block.html for block in render_blocks(text, is_open=False))


def _without_tags(html: str) -> str:
    return entities.unescape(re.sub(r"<[^>]*>", "", html))
