"""LaTeX as MathML, and as text where it is not LaTeX."""

import pytest

from chatpage_ui.rendering import render_blocks
from chatpage_ui.rendering.latex import MAX_LATEX, mathml


@pytest.mark.parametrize(("text", "display"), [("$x^2$", "inline"), (r"\(x^2\)", "inline"), ("$$x^2$$", "block")])
def test_latex_in_a_line_becomes_mathml(text: str, display: str) -> None:
    assert _html(f"so {text} is") == (
        f'<p>so <math display="{display}"><mrow><msup><mi>x</mi><mn>2</mn></msup></mrow></math> is</p>\n'
    )


@pytest.mark.parametrize("text", ["$$\na\n+ b\n= c\n$$", "\\[\na\n+ b\n= c\n\\]", "$$ a + b\n= c $$", "\\[a + b = c\\]"])
def test_latex_on_lines_of_its_own_is_a_display(text: str) -> None:
    """`+ b` in a formula was a list, and a line with `=` under another a heading."""
    html = _html(f"The sum\n{text}\nis c.")
    assert html.startswith('<p>The sum</p>\n<div class="math"><math display="block"><mrow><mi>a</mi><mo>+</mo>')
    assert html.endswith("</math></div><p>is c.</p>\n")


def test_a_display_in_an_item_stays_in_it() -> None:
    html = _html("- one\n  $$\n  a\n  $$\n- two")
    assert html.count("<li>") == 2
    assert '<div class="math"><math display="block"><mrow><mi>a</mi></mrow></math></div>' in html


@pytest.mark.parametrize(
    "text",
    [
        *("$5 and $6", r"\$a\$", "a $ b $ c", "${alert(1)}", "$$", "$", "$ $", r"\(", r"\)", r"\(\)"),
        *("$$\nnever closed", "\\[\nnever closed\n\n# x", "`$a$`", "$$$", "$$$$", "    $$a$$"),
    ],
)
def test_what_is_no_latex_stays_text(text: str) -> None:
    assert "<math" not in _html(text)


@pytest.mark.parametrize(
    "latex",
    [
        *(r"\frac{1", r"\frac}1{", r"a_", "^", r"\left(", r"\begin{matrix}", "{" * 1000, r"\frac" * 400, "a_{" * 60 + "}" * 60),
        *("x" * (MAX_LATEX + 1), r"\newcommand{\a}{\a\a}\a", r"\def\a{\a\a}\a", r"\DeclareMathOperator{\a}{b}"),
        r"\newenvironment{a}{\begin{a}}{\end{a}}\begin{a}\end{a}",
    ],
)
def test_bad_or_endless_latex_is_not_converted(latex: str) -> None:
    """A macro that doubles itself would fill the memory."""
    assert mathml(latex, is_display=False) is None


def test_bad_latex_is_shown_as_it_was_written() -> None:
    assert _html(r"so $\frac{1$ is") == '<p>so <code class="latex">$\\frac{1$</code> is</p>\n'
    assert _html("$$\n\\frac{<b>\n$$") == '<div class="plain latex">$$\n\\frac{&lt;b&gt;\n$$</div>'


def test_one_formula_leaves_nothing_to_the_next() -> None:
    """The converter's own function keeps macros and equation numbers for whoever comes next."""
    numbered = r"\begin{align}a&=b\\c&=d\end{align}"
    assert mathml(numbered, is_display=True) == mathml(numbered, is_display=True)


@pytest.mark.parametrize(
    "latex",
    [
        *(
            r"\text{<img src=x onerror=alert(1)>}",
            r"\text{</mtext></math><script>alert(1)</script>}",
            r"a < b",
            r"\text{&lt;b&gt;}",
        ),
        *(
            r"\href{javascript:alert(1)}{x}",
            r"\style{background:url(http://a.b)}{x}",
            r"\class{a}{x}",
            r"\mathrm{<svg onload=a>}",
        ),
    ],
)
def test_latex_writes_no_html(latex: str) -> None:
    r"""The converter writes what stands in `\text` into the page as it is."""
    html = _html(f"${latex}$")
    for word in ("<img", "<script", "<svg", "<b", "href", "style", 'onerror=a"'):
        assert word not in html.replace("<mstyle", "")


def _html(text: str) -> str:
    return "".join(block.html for block in render_blocks(text, is_open=False))
