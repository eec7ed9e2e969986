"""Code in colour, by classes; the colours are in one stylesheet.

Invariant: colouring a block takes bounded time, whatever the code is: languages of a known list only, not too much of it, no
endless lines, and a budget after which the rest stays uncoloured.
"""

import functools
import html
import re
import time

from pygments.formatters import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import STANDARD_TYPES
from pygments.util import ClassNotFound

MAX_CODE = 20_000  # characters that are coloured
MAX_LINE = 1_000
BUDGET_S = 0.25  # of processor time
LIGHT_STYLE, DARK_STYLE = "xcode", "monokai"  # every colour has a contrast of 4.5 or more

_SCOPE = "figure.code .highlight"
_LANGUAGE = re.compile(r"[A-Za-z0-9+#_.-]{1,30}")
_KNOWN = frozenset(
    """
    bash c c++ cpp cs csharp c# css cuda diff docker dockerfile elixir ex erlang fortran go golang graphql haskell hs
    html http ini java javascript js json jsx julia jl kotlin latex tex lua make makefile markdown md nginx
    nix ocaml objc perl pl php powershell ps1 proto protobuf py py3 python python3 pycon console r rb ruby rs rust scala
    scss sh shell shell-session sql swift toml ts tsx typescript vim xml yaml yml zig zsh
    """.split()  # noqa: SIM905 - as a list it would be ninety lines
)


def code_html(code: str, info: str) -> str:
    """Return a code block: a figure with its language, a button to copy it, and the code. Still to be sanitised.

    Args:
        code: The code.
        info: What the writer said about it, such as `python`.
    """
    language = (_LANGUAGE.match(info.strip()) or [""])[0].lower()
    name = html.escape(language)
    body = _coloured(code, language) if language in _KNOWN else html.escape(code)
    return (
        f'<figure class="code" data-lang="{name}"><figcaption><span class="lang">{name or "text"}</span>'
        '<button type="button" class="copy" aria-label="Copy code">Copy</button></figcaption>'
        f'<pre class="highlight" tabindex="0"><code>{body}</code></pre></figure>'
    )


@functools.cache
def code_css() -> str:
    """Return the stylesheet of coloured code, for a light page and for one whose body has the class `dark`."""
    # A colour of the light style must not shine through where the dark one has none.
    undo = f".dark {_SCOPE} span {{ color: inherit; background: none; font-weight: inherit; font-style: inherit }}"
    return "\n".join([*_rules(LIGHT_STYLE, _SCOPE), undo, *_rules(DARK_STYLE, f".dark {_SCOPE}")]) + "\n"


def _rules(style: str, scope: str) -> list[str]:
    return [line for line in HtmlFormatter(style=style).get_style_defs(scope).splitlines() if line.startswith(scope)]


@functools.cache
def _lexer(language: str) -> Lexer | None:
    try:
        return get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return None


def _coloured(code: str, language: str) -> str:
    lexer = _lexer(language)
    if lexer is None or len(code) > MAX_CODE or max(map(len, code.split("\n"))) > MAX_LINE:
        return html.escape(code)
    parts: list[str] = []
    done = 0
    deadline = time.thread_time() + BUDGET_S
    for _, kind, value in lexer.get_tokens_unprocessed(code):
        name = next((STANDARD_TYPES[k] for k in reversed(kind.split()) if k in STANDARD_TYPES), "")
        text = html.escape(value)
        parts.append(f'<span class="{name}">{text}</span>' if name and value.strip() else text)
        done += len(value)
        if time.thread_time() > deadline:
            break
    return "".join(parts) + html.escape(code[done:])
