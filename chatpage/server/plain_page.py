"""A page of plain HTML and CSS, in the colours that the system prefers: for what must work without the page itself.

Invariant: it runs no script and loads nothing.
"""

import base64
import hashlib
from collections.abc import Mapping

from starlette.responses import HTMLResponse

_STYLE = """
:root { color-scheme: light dark; --page: #f6f6f4; --card: #fff; --ink: #1d1d1b; --dim: #6a6a66; --line: #d9d9d4;
        --accent: #1f6f5c; --on-accent: #fff; --bad: #a3241c; --bad-page: #fbeae8; }
@media (prefers-color-scheme: dark) {
  :root { --page: #161715; --card: #1f211e; --ink: #ecece7; --dim: #a0a19a; --line: #383a35; --accent: #5fc3a6;
          --on-accent: #0d1f19; --bad: #ffb4ab; --bad-page: #3b1d1a; }
}
* { box-sizing: border-box; }
body { margin: 0; min-height: 100vh; display: grid; place-items: center; padding: 1.5rem; background: var(--page);
       color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; }
main { width: 100%; max-width: 23rem; padding: 2rem; background: var(--card); border: 1px solid var(--line);
       border-radius: 14px; box-shadow: 0 8px 30px rgb(0 0 0 / 8%); }
svg { display: block; width: 44px; height: 44px; margin-bottom: .75rem; color: var(--accent); }
h1 { margin: 0 0 1.5rem; font-size: 1.35rem; line-height: 1.2; }
h1 small { display: block; margin-top: .3rem; color: var(--dim); font-size: .95rem; font-weight: 400; }
label { display: block; margin-bottom: 1rem; font-size: .9rem; font-weight: 600; }
input { display: block; width: 100%; margin-top: .35rem; padding: .65rem .8rem; font: inherit; font-weight: 400;
        color: inherit; background: var(--page); border: 1px solid var(--line); border-radius: 8px; }
input:focus-visible, button:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
button { width: 100%; margin-top: .5rem; padding: .7rem; font: inherit; font-weight: 600; color: var(--on-accent);
         background: var(--accent); border: 0; border-radius: 8px; cursor: pointer; }
button:hover { filter: brightness(1.08); }
progress { width: 100%; height: .6rem; accent-color: var(--accent); }
p { margin: 0 0 .6rem; }
p span, .hint { color: var(--dim); }
.hint { margin: .8rem 0 0; font-size: .9rem; }
.problem { margin: 0 0 1rem; padding: .65rem .8rem; color: var(--bad); background: var(--bad-page); border-radius: 8px; }
"""
_TREE = (
    '<svg viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="1.8" stroke-linecap="round" aria-hidden="true">'
    '<path d="M12 20v-6M12 14C12 10 6 11 6 7M12 14c0-4 6-3 6-7M12 14V7"/><circle cx="6" cy="5" r="1.8"/>'
    '<circle cx="12" cy="5" r="1.8"/><circle cx="18" cy="5" r="1.8"/><circle cx="12" cy="21" r="1.4"/></svg>'
)
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "Cache-Control": "no-store",
    "Referrer-Policy": "same-origin",  # with no-referrer a form is sent with the origin "null"
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def plain_page(title: str, content: str, *, status: int = 200, headers: Mapping[str, str] | None = None) -> HTMLResponse:
    """Return a page with one card.

    Args:
        title: Of the window.
        content: HTML of the card; whatever others wrote in it has been escaped.
        status: HTTP status.
        headers: More of them.
    """
    return HTMLResponse(
        f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · chatpage</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
{_TREE}
{content}
</main>
</body>
</html>
""",
        status,
        headers={**_HEADERS, **(headers or {})},
    )
