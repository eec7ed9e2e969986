"""A crowd that asks for far more than there is: who is served is served whole, who is not is told when, and nothing stays."""

import asyncio
import json
import math
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from chatpage.chaos import overload
from chatpage.chaos.crowd import Account, Client, Crowd, Stream
from chatpage.chaos.overload import BY_THE_CLOCK, Overload, OverloadReport, Plan, judge, run
from tests.tiny_models import tiny_llama_folder

ARGUMENTS = ("--device", "cpu", "--dtype", "float32", "--kv-memory", "1MiB", "--kv-disk", "off")
MIB = 2**20


@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_crowd_is_refused_honestly_and_leaves_nothing(tmp_path: Path) -> None:
    plan = Plan(
        seconds=8.0,
        calm_s=2.0,
        num_sockets=40,
        num_polite=4,
        num_users=6,
        num_streams=4,
        num_queued=4,
        max_tokens=24,
        arguments=["--model", str(tiny_llama_folder()), *ARGUMENTS],
    )
    report = asyncio.run(run(tmp_path / "data", plan))
    wrong = [violation for violation in report.violations if violation.finding.kind not in BY_THE_CLOCK]
    assert not wrong, report.render()
    assert report.crowd.told_s, report.render()
    assert report.crowd.streams
    assert all(stream.num_tokens == plan.max_tokens for stream in report.crowd.streams)
    counted = len(report.crowd.streams) + len(report.crowd.told_s) + report.crowd.num_left
    assert counted <= report.crowd.num_asked


def a_report() -> OverloadReport:
    """A report of an overload in which all went well."""
    report = OverloadReport(Plan(num_sockets=10), calm_s=10.0, crowd_s=10.0)
    report.calm.streams += [Stream(0.0, 1.0, 2.0, 11)] * 20
    report.crowd = Account(num_asked=200, told_s=[1.0] * 180, tellings=[1], most_told=1, pongs_s=[0.01] * 10, num_pings=10)
    report.crowd.streams += [Stream(0.0, 1.0, 2.5, 11)] * 20
    report.ttft_before, report.normal_after_s = [0.1, 0.1], 0.2
    report.memory, report.calm_memory = {"server": [200 * MIB] * 8}, {"server": 190 * MIB}
    return report


def kinds(report: OverloadReport) -> set[str]:
    return {finding.kind for finding in judge(report)}


def test_what_went_well_is_not_complained_about() -> None:
    assert kinds(a_report()) == set()
    assert "0 violations" in a_report().render()


def test_streams_that_the_crowd_slowed_below_half_are_seen() -> None:
    report = a_report()
    report.crowd.streams[:] = [Stream(0.0, 1.0, 3.5, 11)] * 20
    assert kinds(report) == {"slow"}


def test_memory_that_grows_with_the_crowd_is_seen() -> None:
    report = a_report()
    report.memory["server"] = [200 * MIB + i * 10 * MIB for i in range(8)]
    assert kinds(report) == {"memory"}


def test_who_waits_as_told_for_nothing_is_seen() -> None:
    report = a_report()
    report.crowd.most_told = 30
    assert kinds(report) == {"starved"}


def test_a_server_that_stays_slow_is_seen() -> None:
    report = a_report()
    report.normal_after_s = None
    assert kinds(report) == {"latency"}


def test_pings_without_answers_are_seen() -> None:
    report = a_report()
    report.crowd.num_pings = 100
    assert kinds(report) == {"ping"}


def on_nobody(plan: Plan) -> Overload:
    """An overload of a server that is gone."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    victim: Any = SimpleNamespace(server=SimpleNamespace(url=url))
    return Overload(plan, victim, ["key"] * 10, ["chat"] * 10)


def test_a_question_alone_to_a_server_that_is_gone_is_given_up() -> None:
    """That the client had ended was noticed when everybody went home, and that waited for its answer."""
    trial = on_nobody(Plan())
    assert asyncio.run(asyncio.wait_for(trial._alone(1), 20)) == [math.inf]
    assert "a client ended by ConnectionRefusedError" in str(trial._findings.violations)


def test_a_calm_without_replies_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "PATIENCE_S", 0.2)
    trial = on_nobody(Plan(calm_s=0.1, num_streams=2))
    with pytest.raises(TimeoutError, match=r"4 calm replies .* ConnectionRefusedError"):
        asyncio.run(asyncio.wait_for(trial._calm(), 20))


def test_a_report_without_pongs_can_be_written() -> None:
    report = a_report()
    report.crowd.pongs_s.clear()
    report.calm_memory["engine"] = 0
    assert report.to_dict()["pings"]["most_s"] == 0.0


async def answer_nothing(connection: ServerConnection) -> None:
    """A server that begins each run, and ends it when it is stopped."""
    async for frame in connection:
        message = json.loads(frame)
        answers = {
            "hello": {"type": "welcome"},
            "run.create": {"type": "run.created", "client_msg_id": message.get("client_msg_id"), "run_id": "run"},
            "run.cancel": {"type": "run.done", "run_id": "run", "status": "aborted"},
        }
        if message["type"] in answers:
            await connection.send(json.dumps(answers[message["type"]]))


def test_a_question_that_is_stopped_to_go_home_is_counted_as_left() -> None:
    async def test() -> None:
        async with serve(answer_nothing, "127.0.0.1", 0, subprotocols=["chatpage.v1"]) as server:  # type: ignore[list-item]
            port = next(iter(server.sockets)).getsockname()[1]
            account = Account()
            crowd = Crowd(account)
            crowd.add(crowd.polite(Client(f"http://127.0.0.1:{port}", "key", "chat", 8)))
            while not account.num_asked:
                await asyncio.sleep(0.01)
            await crowd.go_home()
            assert (account.num_asked, account.num_left, account.problems) == (1, 1, {})

    asyncio.run(asyncio.wait_for(test(), 20))
