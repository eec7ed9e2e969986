"""The markdown parser: CommonMark with tables, strikethrough, bare links, task lists, LaTeX and coloured code.

Invariants: HTML in a text is text; nothing is loaded, so an image is a link to it; a parser belongs to one thread, because the
finder of bare links keeps notes. What is nested deeper than `MAX_NESTING` is not read by the parser, and must be shown plain.
"""

import html
import threading
from collections.abc import Sequence
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from mdit_py_plugins.tasklists import tasklists_plugin

from chatpage_ui.rendering.code import code_html
from chatpage_ui.rendering.latex import latex_plugin, mathml
from chatpage_ui.rendering.sanitizing import is_safe_address

MAX_NESTING = 40
MAX_INLINE = 20_000  # characters of one paragraph, item or cell; a longer one is text without markup

_local = threading.local()


class Parser:
    """Markdown to tokens, tokens to HTML."""

    def __init__(self) -> None:
        self._md = _make()

    def tokens(self, text: str, *, with_references: bool) -> list[Token]:
        """Parse; without references, `[name]` is text even if the text says where it leads."""
        return self._md.parse(text, {"with_references": with_references})

    def block_tokens(self, text: str) -> list[Token]:
        """Parse blocks only, which costs a fraction."""
        state = StateCore(text, self._md, {})
        for name, rule in zip(self._md.core.ruler.get_active_rules(), self._md.core.ruler.getRules(""), strict=True):
            if name in ("normalize", "block"):
                rule(state)
        return state.tokens

    def html(self, tokens: Sequence[Token]) -> str:
        """Render the tokens of one block."""
        return str(self._md.renderer.render(tokens, self._md.options, {}))


def parser() -> Parser:
    """Return the parser of this thread."""
    if not hasattr(_local, "parser"):
        _local.parser = Parser()
    found: Parser = _local.parser
    return found


def is_too_deep(tokens: Sequence[Token]) -> bool:
    """Whether the parser may have left something out because it is nested too deep."""
    return any(token.level >= MAX_NESTING - 1 for token in tokens)


def _make() -> MarkdownIt:
    md = MarkdownIt("commonmark", {"maxNesting": MAX_NESTING, "html": False, "linkify": True, "breaks": True})
    md.enable(["table", "strikethrough", "linkify"])
    # Only what is written as an address is a link: "readme.md" and "done.It" are words.
    assert md.linkify is not None
    md.linkify.set({"fuzzy_link": False, "fuzzy_email": False, "fuzzy_ip": False})
    md.disable(["html_block", "html_inline"])
    md.use(latex_plugin)
    md.use(tasklists_plugin)
    md.core.ruler.before("inline", "references", _forget_references)
    md.core.ruler.before("inline", "long_text", _leave_long_text)
    md.core.ruler.after("linkify", "images", _flatten_images)
    md.validateLink = is_safe_address  # type: ignore[method-assign]
    for name, rule in _RENDER_RULES.items():
        md.add_render_rule(name, rule)
    return md


def _forget_references(state: StateCore) -> None:
    if not state.env["with_references"]:
        state.env["references"] = {}


def _leave_long_text(state: StateCore) -> None:
    """Take long paragraphs from the inline rules, some of which take quadratic time."""
    for token in state.tokens:
        if token.type == "inline" and len(token.content) > MAX_INLINE:
            token.type, token.children = "long_text", []


def _flatten_images(state: StateCore) -> None:
    """Make an image a link with its description, or just the description where a link is around it already."""
    for token in state.tokens:
        if token.type == "inline" and any(child.type == "image" for child in token.children or ()):
            token.children = list(_without_images(token.children or ()))


def _without_images(children: Sequence[Token]) -> list[Token]:
    links, flat = 0, []
    for child in children:
        links += child.nesting if child.type in ("link_open", "link_close") else 0
        if child.type != "image":
            flat.append(child)
            continue
        address = str(child.attrs.get("src", ""))
        text = Token("text", "", 0, content=child.content or address or "image", level=child.level)
        if links or not is_safe_address(address):
            flat.append(text)
            continue
        title = {"title": str(child.attrs["title"])} if "title" in child.attrs else {}
        attrs: dict[str, str | int | float] = {"href": address, "class": "image", **title}
        flat += [
            Token("link_open", "a", 1, attrs=attrs, level=child.level),
            text,
            Token("link_close", "a", -1, level=child.level),
        ]
    return flat


# -- rendering ------------------------------------------------------------------------------------------------------------


def _code(_: RendererHTML, tokens: Sequence[Token], index: int, _options: Any, _env: Any) -> str:
    return code_html(tokens[index].content, tokens[index].info)


def _math_inline(_: RendererHTML, tokens: Sequence[Token], index: int, _options: Any, _env: Any) -> str:
    token = tokens[index]
    found = mathml(token.content, is_display=token.meta["is_display"])
    return found or f'<code class="latex">{html.escape(token.markup)}</code>'


def _math_block(_: RendererHTML, tokens: Sequence[Token], index: int, _options: Any, _env: Any) -> str:
    token = tokens[index]
    found = mathml(token.content, is_display=True)
    return f'<div class="math">{found}</div>' if found else f'<div class="plain latex">{html.escape(token.markup)}</div>'


def _long_text(_: RendererHTML, tokens: Sequence[Token], index: int, _options: Any, _env: Any) -> str:
    return html.escape(tokens[index].content)


def _cell(renderer: RendererHTML, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
    """Say by a class how a cell is aligned; markdown-it says it by a style."""
    token = tokens[index]
    style = str(token.attrs.pop("style", ""))
    if style:
        token.attrs["class"] = style.removeprefix("text-align:")
    return renderer.renderToken(tokens, index, options, env)


_RENDER_RULES = {
    "fence": _code,
    "code_block": _code,
    "math_inline": _math_inline,
    "math_block": _math_block,
    "long_text": _long_text,
    "th_open": _cell,
    "td_open": _cell,
}
