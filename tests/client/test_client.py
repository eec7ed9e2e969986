"""The client of the protocol: runs to their end through broken connections, stops, plans, and refusals."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from chatpage.client import AsyncClient, ServerError
from chatpage.server.protocol import RunCreated
from chatpage.server.settings import ServeSettings
from chatpage.server.views import RunParams, RunRequest
from chatpage.store import NodeStatus, RunKind
from tests.server.serving import Served, serving, with_server
from tests.sessions import Copy

PARAMS = RunParams(max_tokens=100, ignore_eos=True, seed=1)


def _request(served: Served, *, n: int = 1, params: RunParams = PARAMS) -> RunRequest:
    chat = served.conversation()
    return RunRequest(conversation_id=chat.id, kind=RunKind.REPLY, input="Hello", n=n, params=params)


def test_a_run_is_read_to_its_end_however_often_the_connection_breaks(tmp_path: Path) -> None:
    """The server cuts every socket again and again; the client goes on from where it stood."""

    async def cut(served: Served, cuts: list[int]) -> None:
        while True:
            await asyncio.sleep(0.15)
            for connection in list(served.server.server_state.connections):
                served.loop.call_soon_threadsafe(connection.transport.abort)
                cuts.append(1)

    async def test(served: Served) -> None:
        cuts: list[int] = []
        cutting = asyncio.create_task(cut(served, cuts))
        copy, created = Copy(), []
        params = RunParams(max_tokens=500, ignore_eos=True, seed=1)  # long enough to be cut on any machine
        async for message in AsyncClient(served.url).run(_request(served, n=4, params=params)):
            if isinstance(message, RunCreated):
                created.append(message)
            else:
                copy.take(message)
        cutting.cancel()
        [run] = created
        assert cuts, "nothing disturbed it, so this test said nothing"
        assert copy.end is not None
        assert [copy.texts[i] for i in range(4)] == [served.node(run.conversation_id, node).text for node in run.node_ids]

    with_server(tmp_path, test)


def test_a_run_and_a_sample_are_stopped(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        client = AsyncClient(served.url)
        request = _request(served, n=2, params=RunParams(max_tokens=400, ignore_eos=True))
        async with contextlib.aclosing(client.run(request)) as messages:
            run = await anext(messages)
            assert isinstance(run, RunCreated)
            await client.cancel(run.run_id, 1)
            await client.cancel(run.run_id)
            await client.cancel(run.run_id)
        nodes = [served.node(run.conversation_id, node_id) for node_id in run.node_ids]
        assert {node.status for node in nodes} == {NodeStatus.ABORTED}

    with_server(tmp_path, test)


def test_a_plan_and_a_refusal_come_back(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        client = AsyncClient(served.url)
        plan = await client.plan(_request(served))
        assert plan.prefix.tokens > 0
        with pytest.raises(ServerError) as caught:
            await client.plan(RunRequest(conversation_id="none", kind=RunKind.REPLY, input="Hi"))
        assert (caught.value.server_code, caught.value.retryable) == ("not_found", False)
        with pytest.raises(ServerError):
            await client.cancel("none")

    with_server(tmp_path, test)


def test_a_wrong_key_is_not_tried_again_and_a_dead_address_only_for_a_while(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        request = _request(served)
        for key in ("cp-wrong", None):
            with pytest.raises(ServerError):
                await AsyncClient(served.url, key=key).plan(request)

    with_server(tmp_path, test, settings=ServeSettings(host="0.0.0.0"))
    with serving(tmp_path / "other") as served:
        request, url = _request(served), served.url
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(AsyncClient(url, patience_s=0.2).plan(request))
