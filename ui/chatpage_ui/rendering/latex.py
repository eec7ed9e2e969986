r"""LaTeX in markdown: `$...$` and `\(...\)` in a line, `$$...$$` and `\[...\]` in lines of their own, as MathML.

Invariants: what the converter cannot read is shown as it was written; a display that has begun on a line of its own is ended by
its closing mark or a blank line and by nothing else, so that it never takes back lines that were something else before.

    The sum is
    $$            <- begins; ends the paragraph above
    a
    + b           <- no list
    $$
"""

import html
import re
from xml.etree.ElementTree import tostring

from latex2mathml.converter import Converter
from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline

MAX_LATEX = 2_000  # characters
MAX_DEPTH = 40  # braces within braces

_MATH_CLOSE = {"$$": "$$", "\\[": "\\]", "\\(": "\\)"}
# No space before it and no digit after it: "$5 and $6" is money.
_DOLLAR_CLOSE = re.compile(r"(?<![\\\s])\$(?!\d)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_MACRO = re.compile(r"\\(?:(?:re)?new|provide|declare)|\\[egx]?def(?![a-z])|\\let(?![a-z])", re.IGNORECASE)


def latex_plugin(md: MarkdownIt) -> None:
    """Teach a parser to find LaTeX; tokens are `math_inline` and `math_block`, their content is the LaTeX."""
    md.inline.ruler.before("escape", "math_inline", _inline_rule)
    ends = ["paragraph", "reference", "blockquote", "list"]
    md.block.ruler.before("fence", "math_block", _block_rule, {"alt": ends})


def mathml(latex: str, *, is_display: bool) -> str | None:
    """Convert; None if it cannot be converted. The result still has to be sanitised."""
    if len(latex) > MAX_LATEX or not _is_balanced(latex) or _MACRO.search(latex):  # macros may expand without end
        return None
    try:
        # A converter of its own: it keeps macros and equation numbers.
        math = Converter(display="block" if is_display else "inline").convert_to_element(latex)
        for element in math.iter():
            # Its texts hold character references, meant for an output that is not escaped; ours is.
            element.text = html.unescape(element.text) if element.text else element.text
        return tostring(math, encoding="unicode")
    except Exception:  # noqa: BLE001 - it raises whatever its parser stumbles over, for text that a model wrote
        return None


def _is_balanced(latex: str) -> bool:
    """Whether each brace is closed, and none is too deep for a converter that calls itself."""
    depth = 0
    for brace in _BRACE.findall(latex):
        depth += {"{": 1, "}": -1}.get(brace, 0)  # else a character with a backslash before it
        if not 0 <= depth <= MAX_DEPTH:
            return False
    return depth == 0


def _inline_rule(state: StateInline, silent: bool) -> bool:
    src, pos = state.src, state.pos
    mark = src[pos : pos + 2]
    limit = min(state.posMax, pos + MAX_LATEX)
    if mark in _MATH_CLOSE:
        content_start, close = pos + 2, src.find(_MATH_CLOSE[mark], pos + 2, limit)
        after = close + 2
    elif src[pos] == "$" and mark[1:].strip():
        found = _DOLLAR_CLOSE.search(src, pos + 1, limit)
        content_start, close = pos + 1, found.start() if found else -1
        after = close + 1
    else:
        return False
    content = src[content_start:close].strip() if close >= 0 else ""
    if not content:
        return False
    if not silent:
        token = state.push("math_inline", "math", 0)
        token.content, token.markup = content, src[pos:after]
        token.meta = {"is_display": mark in ("$$", "\\[")}
    state.pos = after
    return True


def _block_rule(state: StateBlock, start_line: int, end_line: int, silent: bool) -> bool:
    first = _line(state, start_line)
    if state.is_code_block(start_line) or first[:2] not in ("$$", "\\["):
        return False
    close = _MATH_CLOSE[first[:2]]
    if close in first[2:] and (len(first) < 5 or first.find(close, 2) != len(first) - 2):
        return False  # it ends within the line, and the line goes on: a paragraph
    if silent:
        return True
    line, is_closed = start_line, first.endswith(close) and len(first) >= 4
    while not is_closed and line + 1 < end_line and not _ends_before(state, line + 1):
        line += 1
        is_closed = _line(state, line).endswith(close)
    content = state.getLines(start_line, line + 1, state.blkIndent, False).strip()
    state.line = line + 1
    inner = content[2:-2].strip() if is_closed else ""
    if inner and close not in inner:
        token = state.push("math_block", "math", 0)
        token.content, token.markup, token.block = inner, content, True
        token.map = [start_line, state.line]
        return True
    state.push("paragraph_open", "p", 1).map = [start_line, state.line]
    inline = state.push("inline", "", 0)
    inline.content, inline.map, inline.children = content, [start_line, state.line], []
    state.push("paragraph_close", "p", -1)
    return True


def _ends_before(state: StateBlock, line: int) -> bool:
    return state.isEmpty(line) or state.sCount[line] < state.blkIndent


def _line(state: StateBlock, line: int) -> str:
    return state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]].rstrip()
