"""The page of `/login`.

Invariant: whatever was typed is shown as text.
"""

from collections.abc import Mapping
from html import escape

from starlette.responses import HTMLResponse

from chatpage.server.plain_page import plain_page


def login_page(
    *, next: str, name: str = "", problem: str = "", status: int = 200, headers: Mapping[str, str] | None = None
) -> HTMLResponse:
    """Return the page.

    Args:
        next: The path to go on to.
        name: What was typed as name before.
        problem: Why that did not work.
        status: HTTP status.
        headers: More of them.
    """
    alert = f'<p class="problem" role="alert">{escape(problem)}</p>' if problem else ""
    focus = ("", " autofocus") if name else (" autofocus", "")
    content = f"""<h1>chatpage<small>Log in to your conversations</small></h1>
{alert}
<form method="post" action="/login">
<input type="hidden" name="next" value="{escape(next)}">
<label>Name<input name="name" value="{escape(name)}" autocomplete="username" autocapitalize="none" required{focus[0]}></label>
<label>Password<input name="password" type="password" autocomplete="current-password" required{focus[1]}></label>
<button>Log in</button>
</form>"""
    return plain_page("Log in", content, status=status, headers=headers)
