"""The slash commands of the chat.

Invariant: a command either does all it says or raises a `ChatpageError` and changes nothing.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from chatpage.errors import InvalidParameterError, InvalidRequestError
from chatpage.sampling_params import SamplingParams
from chatpage.terminal import save, split
from chatpage.terminal.arguments import number, parse_value, split_setting
from chatpage.terminal.conversation import Node
from chatpage.terminal.kv_view import render_memory, render_stats
from chatpage.terminal.text import clean
from chatpage.terminal.tree_view import render_tree

if TYPE_CHECKING:
    from chatpage.terminal.chat import Chat


@dataclass(frozen=True, slots=True)
class Command:
    """How a command is written, what it does, and who does it."""

    usage: str
    help: str
    run: Callable[["Chat", str], None]


def run(chat: "Chat", line: str) -> None:
    """Run one line that starts with a slash.

    Raises:
        ChatpageError: There is no such command, or it cannot do what was asked.
    """
    name, _, argument = line[1:].partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise InvalidRequestError(f"There is no command /{name}; /help lists them. To send a line with a slash, write two.")
    command.run(chat, argument.strip())


# -- answers ---------------------------------------------------------------------------------------------------------


def _regenerate(chat: "Chat", argument: str) -> None:
    reply = _last(chat, "assistant", "There is no reply to regenerate yet; write a message first.")
    assert reply.parent_id is not None
    chat.answer(chat.conversation.node(reply.parent_id), n=number(argument, "/regenerate [N]") if argument else None)


def _samples(chat: "Chat", argument: str) -> None:
    _change_params(chat, "n", number(argument, "/samples N"))


def _continue(chat: "Chat", argument: str) -> None:
    _refuse_argument(argument, "/continue")
    chat.extend(_tip_reply(chat, "There is no reply to continue; write a message first."))


def _fork(chat: "Chat", argument: str) -> None:
    before, _, after = f" {argument} ".partition(" at ")
    has_place, target, place = " at " in f" {argument} ", before.strip(), after[:-1]
    if " " in target or (has_place and not place):
        raise InvalidRequestError("Write /fork [NODE] [at WORD or TOKEN], such as /fork 4 at 12 or /fork at however.")
    node = chat.conversation.node(_node_number(target)) if target else _tip_reply(chat, "There is nothing to fork yet.")
    if has_place:
        if node.role != "assistant":
            raise InvalidRequestError(f"#{node.id} is a {node.role} message; change it with /edit #{node.id}.")
        ends = chat.token_ends(node)
        num_kept = split.num_tokens_before(node, ends, place)
        chat.note(f"Branches off #{node.id} after {num_kept} of its tokens.")
        chat.extend(node, num_kept, node.text[: ends[num_kept - 1]])
    elif node.role == "user":
        chat.answer(node)
    else:
        chat.go(node.id)
        chat.note(f"The next message starts a branch at #{node.id}; what is there stays.")


def _edit(chat: "Chat", argument: str) -> None:
    first, _, rest = argument.partition(" ")
    node = _last(chat, "user", "There is no message to edit yet.")
    if first.startswith("#"):
        node, argument = chat.conversation.node(_node_number(first)), rest.strip()
    text = argument or _ask_for_edit(chat, node)
    if node.role == "user":
        chat.say(text, parent_id=node.parent_id, is_first=node.parent_id is None)
    else:
        chat.put_beside(node, text)
        chat.note(f"#{chat.conversation.tip} stands beside #{node.id}; the next message follows it.")


def _ask_for_edit(chat: "Chat", node: Node) -> str:
    if not chat.reader.can_prefill:
        raise InvalidRequestError("Write the new text: /edit [#NODE] TEXT.")
    try:
        text = chat.reader.read("edit › ", prefill=clean(node.text)).strip()
    except (EOFError, KeyboardInterrupt) as error:
        chat.console.print()  # off the line that was being edited
        raise InvalidRequestError("The edit was cancelled; nothing was changed.") from error
    if not text:
        raise InvalidRequestError("The new text is empty; nothing was changed.")
    return text


def _system(chat: "Chat", argument: str) -> None:
    if argument:
        chat.set_system(argument)
        chat.note("A new branch starts with this system prompt; earlier ones stay in the tree.")
        return
    path = chat.conversation.active_path
    has_system = bool(path) and path[0].role == "system"
    chat.note(path[0].text if has_system else "There is no system prompt here; set one with /system TEXT.")


# -- the tree --------------------------------------------------------------------------------------------------------


def _tree(chat: "Chat", argument: str) -> None:
    _refuse_argument(argument, "/tree")
    chat.console.print(render_tree(chat.conversation))


def _go(chat: "Chat", argument: str) -> None:
    if not argument:
        raise InvalidRequestError("Write /go NODE; /tree shows the numbers.")
    node = chat.conversation.node(_node_number(argument))
    chat.go(chat.conversation.latest_leaf(node.id))
    for shown in chat.conversation.active_path[-2:]:
        chat.put(Text.assemble((f"#{shown.id} {shown.role}  ", "bold"), clean(shown.text)))


def _save(chat: "Chat", argument: str) -> None:
    if not argument:
        raise InvalidRequestError("Write /save FILE.json for the whole tree, or /save FILE.md for the active branch.")
    path = save.read_path(argument)
    save.save(chat.conversation, chat.model_name, path, may_replace=path in chat.saved_files)
    chat.saved_files.add(path)
    chat.note(f"Saved to {path}.")


# -- numbers and settings --------------------------------------------------------------------------------------------


def _stats(chat: "Chat", argument: str) -> None:
    _refuse_argument(argument, "/stats")
    chat.console.print(render_stats(chat.client.kv().stats))


def _kv(chat: "Chat", argument: str) -> None:
    _refuse_argument(argument, "/kv")
    view = chat.kv()
    chat.console.print(render_memory(view.stats, view.blocks, view.num_branches, chat.console.width))


def _set(chat: "Chat", argument: str) -> None:
    name, value = split_setting(argument)
    if not name:
        table = Table.grid(padding=(0, 2))
        for field in dataclasses.fields(SamplingParams):
            table.add_row(field.name, _show_value(getattr(chat.params, field.name)))
        chat.console.print(table)
        return
    known = [field.name for field in dataclasses.fields(SamplingParams)]
    if name not in known:
        raise InvalidParameterError(f"There is no sampling parameter {name!r}; known are {', '.join(known)}.")
    if not value:
        raise InvalidParameterError(f"Write /set {name} VALUE; now it is {_show_value(getattr(chat.params, name))}.")
    _change_params(chat, name, parse_value(name, value))


def _show_value(value: object) -> str:
    if isinstance(value, str | int | float | None):
        return json.dumps(value)
    return json.dumps(dict(value) if hasattr(value, "keys") else list(value), ensure_ascii=False)  # type: ignore[call-overload]


def _change_params(chat: "Chat", name: str, value: object) -> None:
    try:
        chat.params = dataclasses.replace(chat.params, **{name: value})  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidParameterError(f"{name} cannot be {value!r}.") from error
    chat.note(f"{name} is {_show_value(getattr(chat.params, name))}.")


def _help(chat: "Chat", argument: str) -> None:
    _refuse_argument(argument, "/help")
    table = Table.grid(padding=(0, 2))
    for command in COMMANDS.values():
        table.add_row(Text(command.usage, "cyan"), command.help)
    chat.console.print(table)
    chat.note("A line that ends with \\ goes on in the next. After n samples, a number chooses one. Ctrl-C stops a reply.")


def _quit(chat: "Chat", argument: str) -> None:
    _refuse_argument(argument, "/quit")
    chat.is_over = True


# -- reading arguments -----------------------------------------------------------------------------------------------


def _last(chat: "Chat", role: str, problem: str) -> Node:
    """The last message of a role on the active path."""
    node = next((node for node in reversed(chat.conversation.active_path) if node.role == role), None)
    if node is None:
        raise InvalidRequestError(problem)
    return node


def _tip_reply(chat: "Chat", problem: str) -> Node:
    path = chat.conversation.active_path
    if not path or path[-1].role != "assistant":
        raise InvalidRequestError(problem)
    return path[-1]


def _node_number(text: str) -> int:
    return number(text.removeprefix("#"), "the number of a node, as /tree shows it")


def _refuse_argument(argument: str, usage: str) -> None:
    if argument:
        raise InvalidRequestError(f"{usage} takes nothing after it, but there is {argument!r}.")


COMMANDS = {
    "regenerate": Command("/regenerate [N]", "answer the last message again, N times side by side", _regenerate),
    "samples": Command("/samples N", "give N samples of every answer", _samples),
    "continue": Command("/continue", "go on with a reply that was stopped or cut off", _continue),
    "fork": Command("/fork [NODE] [at WORD|TOKEN]", "branch off a message, or inside a reply before a word or token", _fork),
    "edit": Command("/edit [#NODE] [TEXT]", "say the last message (or NODE) differently, beside the original", _edit),
    "tree": Command("/tree", "show every branch", _tree),
    "go": Command("/go NODE", "go to the branch of a node, at its end", _go),
    "system": Command("/system [TEXT]", "show the system prompt, or start a branch with another one", _system),
    "stats": Command("/stats", "show what the engine computed and reused", _stats),
    "kv": Command("/kv", "show the KV memory of this conversation and the map of all blocks", _kv),
    "set": Command("/set [NAME VALUE]", "show or change sampling parameters", _set),
    "save": Command("/save FILE", "write the tree (.json) or the active branch (.md)", _save),
    "help": Command("/help", "show this", _help),
    "quit": Command("/quit", "leave", _quit),
}
