"""The Gradio shell: two sidebars around the canvas.

Invariants: what Gradio holds is settings, never text of a conversation. The inputs of the right sidebar are read and written by
the canvas, which keeps them with the conversation; no event of theirs goes through the server, except those of presets. Nothing
here is given to the browser as code, so that the page needs no right to evaluate text.
"""

import gradio as gr

from chatpage.server.security import Auth
from chatpage.session import Session
from chatpage_ui.chat_api import add_chat_api
from chatpage_ui.parameters import make_inputs
from chatpage_ui.presets import add_presets


def build_shell(session: Session, auth: Auth) -> gr.Blocks:
    """Return the page of a session; `auth` says whose request it is."""
    shell: gr.Blocks
    with gr.Blocks(title="chatpage", fill_height=True, fill_width=True, analytics_enabled=False) as shell:
        with gr.Sidebar(label="Conversations", position="left", width=300, elem_id="cp-left"):
            _host("cp-sidebar")
        _host("cp-canvas")
        with gr.Sidebar(label="Settings", position="right", width=330, open=False, elem_id="cp-right"):
            gr.Markdown("### Settings")
            _host("cp-model")
            presets = add_presets(session, auth)
            inputs = make_inputs()
            gr.Button("Set all to neutral", size="sm", elem_id="cp-neutral")
            _host("cp-statistics")
        presets.connect(shell, inputs)
        add_chat_api(session, auth)
    return shell


def _host(name: str) -> None:
    """Leave a place that a module of the canvas fills. A column, since Gradio evaluates what `gr.HTML` is given as code."""
    with gr.Column(elem_id=name, elem_classes="cp-host", min_width=0):
        pass
