"""The headers that tell a browser what a page of ours may do.

Invariant: every HTML page leaves with a content security policy under which only scripts of this server run, and the inline
scripts that the page was sent with, named by their hashes; nothing is loaded from another machine or sent to one.
"""

import base64
import hashlib
import re

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "camera=(), display-capture=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_DIRECTIVES = (
    "default-src 'none'",
    "style-src 'self' 'unsafe-inline'",  # Gradio sets style attributes
    "img-src 'self' data: blob:",
    "font-src 'self' data:",
    "connect-src 'self'",  # the socket of this server too
    "manifest-src 'self'",
    "object-src 'none'",
    "base-uri 'self'",  # Gradio writes <base href>
    "frame-ancestors 'none'",
    "form-action 'self'",
)
_INLINE_SCRIPT = re.compile(rb"<script(?![^>]*\ssrc=)[^>]*>(.*?)</script", re.DOTALL | re.IGNORECASE)


class PageHeaders:
    """Adds the headers to what the application answers; the policy to HTML alone.

    Args:
        app: The application.
        allows_eval: Whether scripts may evaluate strings. Gradio does so for every `gr.HTML`, and for every event with `js=`.
    """

    def __init__(self, app: ASGIApp, *, allows_eval: bool) -> None:
        self._app = app
        self._allows_eval = allows_eval

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        page: Message | None = None  # the beginning of an HTML answer, held back until its body is known
        body = bytearray()

        async def add_headers(message: Message) -> None:
            nonlocal page
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if not headers.get("content-type", "").startswith("text/html"):
                    await send(message)
                elif "content-encoding" in headers:  # not the page, which Gradio sends as it is; no inline script runs
                    headers["Content-Security-Policy"] = policy(b"", allows_eval=self._allows_eval)
                    await send(message)
                else:
                    page = message
            elif page is None:
                await send(message)
            else:
                body.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    MutableHeaders(scope=page)["Content-Security-Policy"] = policy(bytes(body), allows_eval=self._allows_eval)
                    await send(page)
                    await send({**message, "body": bytes(body)})

        await self._app(scope, receive, add_headers)


def policy(page: bytes, *, allows_eval: bool) -> str:
    """Return the content security policy of an HTML page."""
    hashes = {base64.b64encode(hashlib.sha256(script).digest()).decode() for script in _INLINE_SCRIPT.findall(page)}
    sources = ["'self'", *(f"'sha256-{found}'" for found in sorted(hashes)), *(["'unsafe-eval'"] if allows_eval else [])]
    return "; ".join([_DIRECTIVES[0], f"script-src {' '.join(sources)}", *_DIRECTIVES[1:]])
