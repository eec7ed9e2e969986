"""Presets in the right sidebar: a system prompt and parameters under a name.

Invariant: presets belong to the user of the request; the list is read again whenever the page is loaded or a preset changes.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import gradio as gr

from chatpage.errors import ChatpageError
from chatpage.server.security import Auth
from chatpage.server.views import RunParams
from chatpage.session import Session
from chatpage.store import Preset, PresetId, UserId
from chatpage_ui.parameters import PARAMETERS

NONE = "–"


class Presets:
    """The inputs, and what they do."""

    def __init__(self, session: Session, auth: Auth) -> None:
        self._session = session
        self._auth = auth
        with gr.Accordion("System prompt", open=True):
            self.chosen = gr.Dropdown([NONE], value=NONE, label="Preset", elem_id="cp-preset", interactive=True)
            self.system = gr.Textbox(
                "", label="System prompt", info="begins new conversations", lines=3, max_lines=12, elem_id="cp-system"
            )
            with gr.Row():
                self.name = gr.Textbox(
                    "", show_label=False, label="Name of the preset", placeholder="name", scale=2, min_width=80
                )
                self.save = gr.Button("Save", size="sm", scale=1, min_width=60)
                self.delete = gr.Button("Delete", size="sm", scale=1, min_width=60)

    def connect(self, shell: gr.Blocks, inputs: Sequence[Any]) -> None:
        """Connect with the inputs of the parameters."""
        everything = [self.system, *inputs]
        private: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        self.chosen.input(self._load, [self.chosen, *everything], [self.name, *everything], **private)
        self.save.click(self._save, [self.name, *everything], [self.chosen], **private)
        self.delete.click(self._delete, [self.chosen], [self.chosen, self.name], **private)
        shell.load(self._list, None, [self.chosen], **private)

    async def _list(self, request: gr.Request) -> Any:
        user = await self._user(request)
        return gr.Dropdown(choices=await self._choices(user), value=NONE)

    async def _load(self, request: gr.Request, name: str, system: str, *values: Any) -> list[Any]:
        user = await self._user(request)
        preset = await self._find(user, name)
        if preset is None:
            return ["", system, *values]
        return [preset.name, preset.system_prompt, *_values(preset.params, values)]

    async def _save(self, request: gr.Request, name: str, system: str, *values: Any) -> Any:
        user = await self._user(request)
        if not name.strip() or name.strip() == NONE:
            raise gr.Error("Give the preset a name first.", duration=4)
        try:
            params = _params(values)
            known = await self._find(user, name.strip())
            if known is None:
                await self._session.create_preset(user, name.strip(), system_prompt=system, params=params)
            else:
                await self._session.update_preset(user, known.id, system_prompt=system, params=params)
        except (ChatpageError, ValueError) as error:
            raise gr.Error(escape(str(error)), duration=6) from error
        gr.Info(f"Saved the preset {escape(name.strip())}.", duration=3)  # Gradio shows it as HTML
        return gr.Dropdown(choices=await self._choices(user), value=name.strip())

    async def _delete(self, request: gr.Request, name: str) -> list[Any]:
        user = await self._user(request)
        preset = await self._find(user, name)
        if preset is None:
            raise gr.Error("Choose a preset first.", duration=4)
        await self._session.delete_preset(user, PresetId(preset.id))
        gr.Info(f"Deleted the preset {escape(name)}.", duration=3)
        return [gr.Dropdown(choices=await self._choices(user), value=NONE), ""]

    async def _user(self, request: gr.Request) -> UserId:
        assert request.request is not None
        return (await self._auth.require_user(request.request)).id

    async def _find(self, user: UserId, name: str) -> Preset | None:
        return next((preset for preset in await self._session.store.list_presets.aio(user) if preset.name == name), None)

    async def _choices(self, user: UserId) -> list[str]:
        return [NONE, *(preset.name for preset in await self._session.store.list_presets.aio(user))]


def add_presets(session: Session, auth: Auth) -> Presets:
    """Add the inputs here."""
    return Presets(session, auth)


def _values(params: Mapping[str, Any], before: Sequence[Any]) -> list[Any]:
    """Return the inputs of a preset's parameters; those it has not set become neutral, the number of samples stays."""
    values: list[Any] = []
    for parameter, old in zip(PARAMETERS, before, strict=True):
        if parameter.name == "n":
            values.append(old)
        elif parameter.name == "stop":
            values.append("\n".join(params.get("stop", ())))
        else:
            values.append(params.get(parameter.name, parameter.neutral))
    return values


def _params(values: Sequence[Any]) -> RunParams:
    """Return the parameters of the inputs; neutral ones are left out.

    Raises:
        ValueError: One is outside its range.
    """
    found: dict[str, Any] = {}
    for parameter, value in zip(PARAMETERS, values, strict=True):
        if parameter.name == "n" or value is None or value in (parameter.neutral, ""):
            continue
        if parameter.name == "stop":
            found["stop"] = tuple(line for line in str(value).split("\n") if line)
        elif parameter.name in ("top_k", "max_tokens", "seed"):
            found[parameter.name] = int(value)
        else:
            found[parameter.name] = float(value)
    return RunParams(**found)
