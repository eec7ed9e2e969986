"""The terminal chat: reads lines, has them answered, shows the tree that the server keeps.

The server is another process, or this one: `client` is a `Client` or a `LocalClient`.

Invariants: every reply that said something is kept, however it ended, and the conversation can be gone on with later; a request
that is refused leaves it as it was; no line that a person types, no Ctrl-C and no fault of ours ends the chat.
"""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.text import Text

from chatpage.client import Client
from chatpage.errors import ChatpageError, EngineStepError, InvalidParameterError, InvalidRequestError, NotFoundError
from chatpage.sampling_params import SamplingParams
from chatpage.server.bodies import ConversationKv
from chatpage.server.protocol import RunCreated, RunMessage
from chatpage.server.views import RunParams, RunRequest
from chatpage.store import Role, RunKind
from chatpage.terminal import commands
from chatpage.terminal.answer import Answer, run_answer
from chatpage.terminal.arguments import number, shorten
from chatpage.terminal.columns import LiveColumns
from chatpage.terminal.conversation import Conversation, Node, NodeId
from chatpage.terminal.input import LineReader
from chatpage.terminal.interrupt import InterruptFlag
from chatpage.terminal.text import WordWriter, clean, count, format_bytes

log = logging.getLogger(__name__)

_PROMPT = "› "


class Chat:
    """One conversation in a terminal.

    Args:
        client: Of the server that keeps and answers it.
        console: Where it is shown.
        params: How to sample; `n` is the number of samples of every answer.
        model_name: Shown to people and written into saved files.
        system: System prompt of a new conversation.
        conversation_id: Goes on with this one; None: a new one is made by the first message.
        hint: A line below the greeting.
    """

    def __init__(
        self,
        client: Client,
        console: Console,
        *,
        params: SamplingParams,
        model_name: str,
        system: str | None = None,
        conversation_id: str | None = None,
        hint: str = "",
    ) -> None:
        self.client = client
        self.console = console
        self.params = params
        self.model_name = model_name
        self.conversation = Conversation()
        self.conversation_id = conversation_id
        self.reader = LineReader(console)
        self.is_over = False
        self.saved_files: set[Path] = set()
        self._choices: tuple[Node, ...] = ()
        self._hint = hint
        if conversation_id is not None:
            self._refresh(conversation_id)
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
        except ConnectionError as error:
            self.complain(f"{error} What was written is on the server.")
        except Exception as error:  # the last net: no fault is worth losing the place in a conversation
            log.debug("A line failed.", exc_info=True)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self.complain(f"Something went wrong: {shorten(reason, 200)}; the conversation is kept.")

    def say(self, text: str, *, parent_id: NodeId | None = None, is_first: bool = False) -> None:
        """Add a message of the user below `parent_id` (default: the tip) and answer it."""
        parent_id = parent_id if is_first or parent_id is not None else self.conversation.tip
        self._answer(RunKind.REPLY, self._key(parent_id), input=text)

    def answer(self, question: Node, *, n: int | None = None) -> None:
        """Generate another reply, or n of them, to a message of the user."""
        self._answer(RunKind.REGENERATE, question.key, n=n)

    def extend(self, reply: Node, num_kept: int | None = None, kept: str = "") -> None:
        """Go on with a reply, or with a sibling of it that begins with its first `num_kept` tokens (their text is `kept`)."""
        kind = RunKind.CONTINUE if num_kept is None else RunKind.FORK
        self._answer(kind, reply.key, begun=reply.text if num_kept is None else kept, branch_at_token=num_kept)

    def set_system(self, text: str) -> None:
        """Start a branch with another system prompt at the start of the conversation."""
        made = self.client.add_message(self._existing_id(), Role.SYSTEM, text)
        self._refresh(self._existing_id(), tip=made.id)

    def put_beside(self, node: Node, text: str) -> None:
        """Put another version beside a message, and go there."""
        made = self.client.edit(self._existing_id(), node.key, text)
        self._refresh(self._existing_id(), tip=made.id)

    def go(self, node_id: NodeId | None) -> None:
        """Move the tip to a node, and show the branch it is on."""
        if node_id is not None:
            self.client.select(self._existing_id(), self.conversation.node(node_id).key)
            self._refresh(self._existing_id())
        self.conversation.tip = node_id

    # -- asking the server -----------------------------------------------------------------------------------------

    def token_ends(self, reply: Node) -> Sequence[int]:
        """Return where in its text each token of a reply ends."""
        return self.client.tokens(self._existing_id(), reply.key).ends

    def kv(self) -> ConversationKv:
        """Return the block map while the branches of the conversation are held."""
        return self.client.conversation_kv(self._existing_id())

    def _existing_id(self) -> str:
        """Return the id of the conversation, which is made if there is none yet."""
        if self.conversation_id is None:
            self.conversation_id = self.client.create_conversation().id
        return self.conversation_id

    def _refresh(self, conversation_id: str, *, tip: str | None = None) -> None:
        """Read the tree anew; the tip moves to the message `tip` if that is given."""
        self.conversation.take(self.client.tree(conversation_id))
        if tip is not None and (node := self.conversation.find(tip)) is not None:
            self.conversation.tip = node.id

    def _key(self, node_id: NodeId | None) -> str | None:
        return None if node_id is None else self.conversation.node(node_id).key

    # -- answering -------------------------------------------------------------------------------------------------

    def _answer(
        self,
        kind: RunKind,
        parent: str | None,
        *,
        input: str | None = None,
        n: int | None = None,
        begun: str = "",
        branch_at_token: int | None = None,
    ) -> None:
        """Run; `begun` is what every sample begins with."""
        request = self._request(kind, parent, input=input, n=n, branch_at_token=branch_at_token)
        with InterruptFlag() as late:  # Ctrl-C must not come between a reply and the tree
            answer = self._show(request, begun)
            self._keep(answer)
        if late.is_set and not answer.was_interrupted:
            raise KeyboardInterrupt

    def _request(
        self, kind: RunKind, parent: str | None, *, input: str | None, n: int | None, branch_at_token: int | None
    ) -> RunRequest:
        num_samples = dataclasses.replace(self.params, n=self.params.n if n is None else n).n
        try:
            return RunRequest(
                conversation_id=self._existing_id(),
                kind=kind,
                parent_id=parent,
                input=input,
                n=num_samples,
                params=_run_params(self.params),
                branch_at_token=branch_at_token,
            )
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            raise InvalidRequestError(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}.") from error

    def _keep(self, answer: Answer) -> None:
        """Show what became of the tree."""
        assert answer.created is not None, "a run that is not refused is announced"
        self._refresh(self._existing_id(), tip=answer.created.node_ids[0])
        found = (self.conversation.find(key) for key in answer.created.node_ids)
        nodes = [node for node in found if node is not None]
        if answer.failure is not None and not nodes:
            raise EngineStepError(answer.failure)
        self._choices = tuple(nodes) if len(nodes) > 1 else ()
        self.note(answer.summary())
        if answer.failure is not None:
            self.complain(answer.failure)
        self.console.print()

    def _show(self, request: RunRequest, begun: str) -> Answer:
        if request.n == 1:
            return self._show_one(request, begun)
        columns: LiveColumns | None = None

        def show(message: RunCreated | RunMessage, answer: Answer) -> None:
            nonlocal columns
            if columns is None:  # not before the server has accepted it
                self._warn_of_break(message)
                columns = LiveColumns(self.console, request.n)
                columns.__enter__()
            columns.update(answer)

        try:
            answer = run_answer(self.client, request, show)
            if columns is not None:
                columns.print_all(answer)
        finally:
            if columns is not None:
                columns.__exit__(None, None, None)
        return answer

    def _show_one(self, request: RunRequest, begun: str) -> Answer:
        writer = WordWriter(self.console.width) if self.console.is_terminal else None
        num_shown = 0

        def write(text: str, style: str = "") -> None:
            text = clean(text)
            self.console.print(Text(writer.append(text) if writer else text, style), end="", soft_wrap=True)

        def show(message: RunCreated | RunMessage, answer: Answer) -> None:
            nonlocal num_shown
            self._warn_of_break(message)
            text = answer.samples[0].text
            if num_shown < len(begun) <= len(text):
                write(text[: len(begun)], "dim")
                num_shown = len(begun)
            if num_shown < len(text):
                write(text[num_shown:])
                num_shown = len(text)

        answer = run_answer(self.client, request, show)
        self.console.print(Text(writer.finish() if writer else ""), soft_wrap=True)
        return answer

    def _choose(self, choices: Sequence[Node], number: int) -> None:
        if not 1 <= number <= len(choices):
            self._choices = tuple(choices)
            raise InvalidRequestError(f"There is no sample {number}; choose 1 to {len(choices)}, or write a message.")
        self.go(choices[number - 1].id)
        self.note(f"Goes on from sample {number}, #{choices[number - 1].id}; the others stay in the tree.")

    def _warn_of_break(self, message: RunCreated | RunMessage) -> None:
        if isinstance(message, RunCreated) and (found := message.prefix_break) is not None:
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

    def _greet(self) -> None:
        limits, memory = self.client.welcome().model, self.client.kv().stats
        tokens, size = memory.num_blocks * memory.block_size, memory.num_blocks * memory.bytes_per_block
        self.put(Text.assemble(("chatpage", "bold cyan"), f"  {self.model_name}"))
        self.note(
            f"context {count(limits.max_model_len, 'token')} · KV cache {count(tokens, 'token')} in "
            f"{count(memory.num_blocks, 'block')}, {format_bytes(size)} · /help shows the commands"
        )
        if self._hint:
            self.note(self._hint)
        for node in self.conversation.active_path[-2:]:
            self.put(Text.assemble((f"#{node.id} {node.role}  ", "bold"), clean(node.text)))

    def _prompt_text(self) -> str:
        return f"1-{len(self._choices)} {_PROMPT}" if self._choices else _PROMPT


def last_conversation(client: Client) -> str:
    """Return the id of the conversation that was changed last.

    Raises:
        NotFoundError: There is none.
    """
    found = client.list_conversations(limit=1000)
    if not found:
        raise NotFoundError("There is no conversation to go on with; leave out --continue to begin one.")
    return max(found, key=lambda conversation: conversation.updated_at).id


def _run_params(params: SamplingParams) -> RunParams:
    """Return what a run is asked for with; every value is said, so that none comes from elsewhere."""
    values = {field.name: getattr(params, field.name) for field in dataclasses.fields(params) if field.name != "n"}
    values["logit_bias"] = dict(params.logit_bias)
    if not params.stop:
        del values["stop"]  # the server knows what a model without a chat template needs
    try:
        return RunParams(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise InvalidParameterError(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}.") from error
