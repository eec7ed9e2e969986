"""Kills a server again and again while it streams, and looks at what is left: `python -m chatpage.bench.kills --times 50`.

Held after every kill: the database opens; a reply whose end a client saw is there, whole; a reply that was cut is marked as
interrupted, has no text that was never generated, and goes on from where it was cut.
"""

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chatpage.bench.serving import Serving, serving
from chatpage.client import AsyncClient
from chatpage.server.protocol import RunCreated, RunDelta, RunDone, RunSnapshot
from chatpage.server.views import RunParams, RunRequest
from chatpage.store import LOCAL_USER, ConversationId, NodeId, NodeStatus, RunKind, RunStatus, Store, database_path

MAX_DELAY_S = 2.0
CUT = RunParams(max_tokens=1500, ignore_eos=True)
WHOLE = RunParams(max_tokens=12, ignore_eos=True)


@dataclass(slots=True)
class Seen:
    """What a client saw of one reply."""

    conversation_id: str
    node_id: str
    text: str = ""
    is_whole: bool = False


@dataclass(slots=True)
class Trial:
    """Kills in one data folder, one after the other.

    Args:
        data: The folder.
        arguments: For `chatpage serve`.
        chance: Says when.
    """

    data: Path
    arguments: Sequence[str]
    chance: random.Random
    seen: list[Seen] = field(default_factory=list)
    num_cut: int = 0

    def kill(self) -> None:
        """Start a server, let it go on with what was cut, kill it while it streams, and check.

        Raises:
            AssertionError: Something is missing or wrong.
        """
        before = [reply for reply in self.seen if not reply.is_whole]
        with serving(self.data, self.arguments) as server:
            asyncio.run(self._talk(server, before))
        self._check()

    async def _talk(self, server: Serving, cut: Sequence[Seen]) -> None:
        client = AsyncClient(server.url, patience_s=1)
        for reply in cut[-2:]:
            await self._go_on(client, reply)
        tasks = [asyncio.create_task(self._stream(client, params)) for params in (CUT, CUT, WHOLE)]
        begun = asyncio.get_running_loop().time()
        num_before = len(self.seen)
        while not any(reply.text for reply in self.seen[num_before:]):
            await asyncio.sleep(0.01)
            assert asyncio.get_running_loop().time() - begun < 60, "nothing streams"
        await asyncio.sleep(self.chance.uniform(0, MAX_DELAY_S))
        await asyncio.to_thread(server.kill)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _go_on(self, client: AsyncClient, reply: Seen) -> None:
        [before] = [node for node in (await client.tree(reply.conversation_id)).nodes if node.id == reply.node_id]
        request = RunRequest(
            conversation_id=reply.conversation_id, parent_id=reply.node_id, kind=RunKind.CONTINUE, params=WHOLE
        )
        async with contextlib.aclosing(client.run(request)) as messages:
            async for message in messages:
                if isinstance(message, RunDone):
                    assert message.status is RunStatus.COMPLETE, message
        [after] = [node for node in (await client.tree(reply.conversation_id)).nodes if node.id == reply.node_id]
        assert after.text.startswith(before.text), "a reply that goes on begins with what it had"
        assert after.num_tokens == before.num_tokens + 12
        reply.text, reply.is_whole = after.text, True

    async def _stream(self, client: AsyncClient, params: RunParams) -> None:
        chat = await client.create_conversation()
        request = RunRequest(conversation_id=chat.id, kind=RunKind.REPLY, input="Tell me a story.", params=params)
        async with contextlib.aclosing(client.run(request)) as messages:
            async for message in messages:
                match message:
                    case RunCreated():
                        reply = Seen(chat.id, message.node_ids[0])
                        self.seen.append(reply)
                    case RunSnapshot():
                        reply.text = message.samples[0].text
                    case RunDelta():
                        reply.text += "".join(text for _, text, *_ in message.d)
                    case RunDone():
                        reply.is_whole = True

    def _check(self) -> None:
        with Store(database_path(self.data)) as store:
            for reply in self.seen:
                node = store.get_node(LOCAL_USER, ConversationId(reply.conversation_id), NodeId(reply.node_id))
                if reply.is_whole:
                    assert node.status is NodeStatus.COMPLETE, (node.status, reply)
                    assert node.text == reply.text, "a text that was complete is there as it was"
                elif node.status is NodeStatus.INTERRUPTED:
                    self.num_cut += 1
                    assert node.text.startswith(reply.text) or reply.text.startswith(node.text), (node.text, reply.text)
                else:  # its end was stored, and the client was killed before it heard of it
                    assert node.status is NodeStatus.COMPLETE
                    assert node.text.startswith(reply.text)
                    reply.text, reply.is_whole = node.text, True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder), arguments, random.Random(options.seed))
        for number in range(options.times):
            trial.kill()
            print(f"\r{number + 1} kills, {trial.num_cut} replies cut", end="", flush=True, file=sys.stderr)
    print(f"\n{options.times} kills: {len(trial.seen)} replies, {trial.num_cut} cut, nothing missing", file=sys.stderr)


if __name__ == "__main__":
    main()
