"""Puts the page into the application of a server.

Invariant: Gradio is mounted last and at the root, where it takes every path that nobody else has; our files lie under
`/canvas`. Tokens never travel through Gradio: the canvas reads them from the socket of `chatpage.v1`.
"""

import os
from pathlib import Path

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when gradio is imported

import gradio as gr
from fastapi import FastAPI
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from chatpage.server.rest import current_user
from chatpage.session import Session
from chatpage_ui.headers import PageHeaders
from chatpage_ui.routes import router
from chatpage_ui.shell import build_shell

STATIC = Path(__file__).parent / "static"
STYLES = (
    "tokens",
    "gradio",
    "base",
    "thread",
    "composer",
    "columns",
    "sidebar",
    "sidebar_files",
    "menu",
    "drawer",
    "tree_map",
    "kv_map",
    "token_view",
)
HEAD = "\n".join(
    [
        '<meta name="color-scheme" content="light dark">',
        *(f'<link rel="stylesheet" href="/canvas/{name}.css">' for name in (*STYLES, "code")),
        '<script type="module" src="/canvas/main.js"></script>',
    ]
)


def mount_page(app: FastAPI) -> None:
    """Serve the page at `/`.

    Args:
        app: From `create_app`; everything else must have been added to it before.
    """
    session: Session = app.state.session
    app.add_middleware(PageHeaders, allows_eval=False)
    app.include_router(router(current_user))
    app.mount("/canvas", CanvasFiles(directory=STATIC))
    gr.mount_gradio_app(
        app,
        build_shell(session, app.state.auth),
        path="/",
        theme=_theme(),
        head=HEAD,
        favicon_path=str(STATIC / "favicon.svg"),
        footer_links=[],
        run_history=False,
        show_error=True,
        ssr_mode=False,
        pwa=False,
    )


class CanvasFiles(StaticFiles):
    """Our modules and styles; a browser asks each time whether they changed, so an update needs no cleared cache."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["Cache-Control"] = "no-cache"
        return response


def _theme() -> gr.themes.Base:
    """Return a theme whose fonts are the system's: nothing is fetched from elsewhere."""
    return gr.themes.Base(
        primary_hue=gr.themes.colors.teal,
        neutral_hue=gr.themes.colors.zinc,
        font=["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"],
        font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"],
        spacing_size=gr.themes.sizes.spacing_sm,
        text_size=gr.themes.sizes.text_sm,
    ).set(
        body_background_fill="#ffffff",
        body_background_fill_dark="#131417",
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_300",
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_300",
        block_label_text_color="*neutral_700",
        block_label_text_color_dark="*neutral_200",
        block_background_fill="transparent",
        block_background_fill_dark="transparent",
        block_border_width="0px",
        block_padding="*spacing_sm",
        input_placeholder_color="*neutral_500",
        input_placeholder_color_dark="*neutral_400",
    )
