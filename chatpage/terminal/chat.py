"""The terminal chat: reads lines, runs them on the engine, grows the tree.

Invariants: the tree changes only once a request was accepted, so an error leaves the conversation as it was; every reply that
said something is kept, however it ended; no line that a person types, no Ctrl-C and no fault of ours ends the chat.
"""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from chatpage.engine.core import Engine
from chatpage.errors import ChatpageError, EngineStepError, InvalidRequestError
from chatpage.events import Event, TokenDelta
from chatpage.prompt import Message, Prompt, PromptPrefix, render_prompt
from chatpage.sampling_params import SamplingParams
from chatpage.terminal import commands
from chatpage.terminal.arguments import number, shorten
from chatpage.terminal.columns import LiveColumns
from chatpage.terminal.conversation import Conversation, Node, NodeId
from chatpage.terminal.input import LineReader
from chatpage.terminal.interrupt import InterruptFlag
from chatpage.terminal.reply import Reply, for_chat, run_request
from chatpage.terminal.text import WordWriter, clean, count, format_bytes

log = logging.getLogger(__name__)

_PROMPT = "› "
_COMPILING = "kernels are being compiled"  # what a model that was left to transformers for that reason says


class Chat:
    """One conversation in a terminal.

    Args:
        params: How to sample; `n` is the number of samples of every answer.
        model_name: Shown to people and written into saved files.
    """

    def __init__(
        self, engine: Engine, console: Console, *, params: SamplingParams, model_name: str, system: str | None = None
    ) -> None:
        self.engine = engine
        self.console = console
        self.params = params
        self.model_name = model_name
        self.conversation = Conversation()
        self.reader = LineReader(console)
        self.is_over = False
        self.saved_files: set[Path] = set()
        self.computed: dict[NodeId, PromptPrefix] = {}  # of each reply, every token from the start of its conversation on
        self._choices: tuple[Node, ...] = ()
        self._num_saved = 0  # nodes of the tree when it was last saved
        if system:
            self.set_system(system)

    # -- the loop --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Talk until the input ends or a person quits."""
        self._greet()
        while not self.is_over:
            try:
                self.obey(self.reader.read(self._prompt_text()))
            except EOFError:
                break
            except KeyboardInterrupt:
                self.note("\nCtrl-C stops a reply; leave with /quit or Ctrl-D.")
            except ChatpageError as error:
                self.complain(error)
        if any(node.role != "system" for node in self.conversation.nodes[self._num_saved :]):
            self.note("This conversation was not saved; next time, /save FILE keeps it before you leave.")

    def obey(self, line: str) -> None:
        """Do what one line says: choose a sample, run a command, or answer a message.

        Raises:
            KeyboardInterrupt: Ctrl-C came while no reply was on its way.
            OSError: Nothing can be shown any more.
        """
        choices, self._choices = self._choices, ()
        try:
            if choices and line.strip().isascii() and line.strip().isdecimal():
                self._choose(choices, number(line.strip(), f"1 to {len(choices)}"))
            elif line.startswith("/") and not line.startswith("//"):
                commands.run(self, line)
            elif line.strip():
                self.say(line.removeprefix("/") if line.startswith("//") else line)
        except ChatpageError as error:
            self.complain(error)
        except Exception as error:  # the last net: the tree is only in memory, and no fault is worth losing it
            log.debug("A line failed.", exc_info=True)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self.complain(f"Something went wrong: {shorten(reason, 200)}; the conversation is kept.")

    def say(self, text: str, *, parent_id: NodeId | None = None, is_first: bool = False) -> None:
        """Add a message of the user below `parent_id` (default: the tip) and answer it."""
        parent_id = parent_id if is_first or parent_id is not None else self.conversation.tip
        self._answer([*self.conversation.path(parent_id)], question=(parent_id, text))

    def answer(self, question: Node, *, n: int | None = None) -> None:
        """Generate another reply, or n of them, to a message of the user."""
        self._answer([*self.conversation.path(question.id)], parent_id=question.id, n=n)

    def extend(self, reply: Node, token_ids: Sequence[int], text: str) -> None:
        """Generate siblings of a reply that start with `token_ids` (their text is `text`)."""
        start = dataclasses.replace(reply, token_ids=tuple(token_ids), text=text)
        before = self.conversation.path(reply.parent_id)
        self._answer([*before, start], parent_id=reply.parent_id, start=start)

    def set_system(self, text: str) -> None:
        """Start a branch with another system prompt at the start of the conversation."""
        self.conversation.go(self.conversation.add(None, "system", text).id)

    # -- answering -------------------------------------------------------------------------------------------------

    def _answer(
        self,
        path: list[Node],
        *,
        question: tuple[NodeId | None, str] | None = None,
        parent_id: NodeId | None = None,
        start: Node | None = None,
        n: int | None = None,
    ) -> None:
        """Generate replies to a path, after `question` was added to it, or as continuations of `start`."""
        messages = [Message(node.role, node.text, node.token_ids) for node in path]
        if question is not None:
            messages.append(Message("user", question[1]))
        earlier = [node.id for node in path if node is not start and node.id in self.computed]
        known = self.computed[earlier[-1]] if earlier else None
        prompt = render_prompt(self.engine.tokenizer, messages, continue_final=start is not None, known=known)
        self._warn_of_break(prompt)
        params = for_chat(self.engine, dataclasses.replace(self.params, n=self.params.n if n is None else n))
        with InterruptFlag() as late:  # Ctrl-C must not come between a reply and the tree
            reply = self._show(prompt, params, start)
            if reply.failure is not None and not reply.num_tokens:
                raise EngineStepError(reply.failure.message)
            if question is not None:
                parent_id = self.conversation.add(question[0], "user", question[1]).id
            self._keep(reply, prompt, parent_id, start)
        if late.is_set:
            raise KeyboardInterrupt

    def _keep(self, reply: Reply, prompt: Prompt, parent_id: NodeId | None, start: Node | None) -> None:
        before = prompt.token_ids[prompt.spans[-1][0] :] if start else ()
        nodes = []
        for sample in reply.samples:
            node = self.conversation.add(
                parent_id,
                "assistant",
                (start.text if start else "") + sample.text,
                token_ids=(*before, *sample.token_ids),
                finish_reason=sample.finish_reason,
            )
            self.computed[node.id] = prompt.followed_by(sample.token_ids)
            nodes.append(node)
        self.conversation.go(nodes[0].id)
        self._choices = tuple(nodes) if len(nodes) > 1 else ()
        self.note(reply.summary())
        if reply.failure is not None:
            self.complain(reply.failure.message)
        self.console.print()

    def _show(self, prompt: Prompt, params: SamplingParams, start: Node | None) -> Reply:
        if params.n == 1:
            return self._show_one(prompt, params, start)
        with LiveColumns(self.console, params.n) as columns:
            reply = run_request(self.engine, prompt.token_ids, params, lambda _, reply: columns.update(reply))
            columns.print_all(reply)
        return reply

    def _show_one(self, prompt: Prompt, params: SamplingParams, start: Node | None) -> Reply:
        writer = WordWriter(self.console.width) if self.console.is_terminal else None

        def write(text: str, style: str = "") -> None:
            text = clean(text)
            self.console.print(Text(writer.append(text) if writer else text, style), end="", soft_wrap=True)

        def show(event: Event, _: Reply) -> None:
            if isinstance(event, TokenDelta):
                write(event.text)

        if start is not None:
            write(start.text, "dim")
        reply = run_request(self.engine, prompt.token_ids, params, show)
        self.console.print(Text(writer.finish() if writer else ""), soft_wrap=True)
        return reply

    def _choose(self, choices: Sequence[Node], number: int) -> None:
        if not 1 <= number <= len(choices):
            self._choices = tuple(choices)
            raise InvalidRequestError(f"There is no sample {number}; choose 1 to {len(choices)}, or write a message.")
        self.conversation.go(choices[number - 1].id)
        self.note(f"Goes on from sample {number}, #{choices[number - 1].id}; the others stay in the tree.")

    def _warn_of_break(self, prompt: Prompt) -> None:
        if found := prompt.prefix_break:
            self.note(
                f"From token {found.token_index:,} on the prompt is not what was computed before: {found.reason}. "
                f"{count(found.num_tokens_lost, 'token')} must be computed again."
            )

    # -- talking ---------------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Print a dim line."""
        self.put(Text(clean(text), "dim"))

    def complain(self, error: ChatpageError | str) -> None:
        """Print what went wrong; the chat goes on."""
        self.put(Text(clean(str(error)), "red"))

    def put(self, text: Text) -> None:
        """Print a text, broken between words where a terminal is too narrow; a pipe gets its lines whole."""
        self.console.print(text, soft_wrap=not self.console.is_terminal)

    def has_saved(self, path: Path) -> None:
        """Remember that the tree as it is now lies in a file, which may be replaced later."""
        self.saved_files.add(path)
        self._num_saved = len(self.conversation)

    def _greet(self) -> None:
        memory = self.engine.memory()
        tokens = memory.num_blocks * memory.block_size
        self.put(Text.assemble(("chatpage", "bold cyan"), f"  {self.model_name}"))
        self.note(
            f"context {count(self.engine.max_model_len, 'token')} · KV cache {count(tokens, 'token')} in "
            f"{count(memory.num_blocks, 'block')}, {format_bytes(memory.bytes_total)} · /help shows the commands"
        )
        if _COMPILING in self.engine.model.computed_by:
            self.note("First start: C++ kernels are being compiled; the next start will be several times faster.")

    def _prompt_text(self) -> str:
        return f"1-{len(self._choices)} {_PROMPT}" if self._choices else _PROMPT
