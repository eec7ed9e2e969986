"""Clients that are killed, and clients that start and stop without end: the run does not notice, and nothing is left.

`python -m chatpage.bench.wire` does the same at length, on a server of its own.
"""

import asyncio
import random
from pathlib import Path

from chatpage.server.protocol import RunCreated
from tests.engine.engines import tiny_engine
from tests.server.serving import LONG, Served, dial, with_server
from tests.sessions import Copy

NUM_KILLS = 100
PARAMS = LONG | {"max_tokens": 150, "temperature": 1.0, "seed": 12}


def test_a_client_killed_at_a_hundred_moments_has_exactly_the_undisturbed_run(tmp_path: Path) -> None:
    """Every connection is cut without a close, after some messages or in the middle of waiting; the next goes on from the last
    number that was seen. Two runs with one seed say the same, so the undisturbed one is known to the token.
    """

    async def test(served: Served) -> None:
        undisturbed, disturbed = served.conversation(), served.conversation()
        async with dial(served) as wire:
            calm = await wire.reply(undisturbed, n=8, params=PARAMS)
            expected = await wire.finish(calm)
            run = await wire.reply(disturbed, n=8, params=PARAMS)
        chance, copy, num_cut = random.Random(1), Copy(), 0
        for _ in range(NUM_KILLS):
            num_cut += copy.end is None
            await _read_a_little(served, run, copy, chance)
        async with dial(served) as wire:
            wire.copies[run.run_id] = copy
            await wire.send("subscribe", run_id=run.run_id, **_after(copy))
            await wire.finish(run)
        assert num_cut > 10, "it was hardly disturbed"
        assert copy.num_snapshots == 1
        assert copy.texts == expected.texts
        for mine, theirs in zip(run.node_ids, calm.node_ids, strict=True):
            node, other = served.node(disturbed.id, mine), served.node(undisturbed.id, theirs)
            assert node.token_ids == other.token_ids
            assert node.text == other.text == copy.texts[run.node_ids.index(mine)]

    with_server(tmp_path, test, engine=tiny_engine(max_num_seqs=8))


def _after(copy: Copy) -> dict[str, int]:
    return {} if copy.seq is None else {"after_seq": copy.seq}


async def _read_a_little(served: Served, run: RunCreated, copy: Copy, chance: random.Random) -> None:
    async with dial(served) as wire:
        wire.copies[run.run_id] = copy
        await wire.send("subscribe", run_id=run.run_id, **_after(copy))
        for _ in range(chance.randint(0, 2)):
            if copy.end is None:
                await wire.receive()
        await asyncio.sleep(chance.uniform(0, 0.005))
        wire.socket.transport.abort()


def test_a_storm_of_starts_and_stops_leaves_no_task_and_no_run(tmp_path: Path) -> None:
    """`serving` ends by checking that every block was given back."""

    async def count_tasks() -> int:
        return len(asyncio.all_tasks())

    def tasks(served: Served) -> int:
        return asyncio.run_coroutine_threadsafe(count_tasks(), served.loop).result(30)

    async def test(served: Served) -> None:
        chat = served.conversation()
        before = await asyncio.to_thread(tasks, served)
        async with dial(served) as wire:
            for number in range(120):
                run = await wire.reply(chat, f"{number}", n=1 + number % 4, params=LONG)
                await wire.send("run.cancel", run_id=run.run_id)
                if number % 8 == 7:
                    await wire.finish(run)
        while served.desk.session.counts().num_live_runs or (await asyncio.to_thread(tasks, served)) > before:
            await asyncio.sleep(0.02)
        assert served.desk.session.counts().num_live_runs == 0
        assert served.desk.session.admission.num_users == 0

    with_server(tmp_path, test, engine=tiny_engine(check_integrity=False))
