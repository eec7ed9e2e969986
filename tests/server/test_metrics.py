"""`/metrics`: what was computed, in numbers that agree with what happened, for whoever may see them."""

import asyncio
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from chatpage.server import metrics
from chatpage.server.settings import ServeSettings
from tests.engine.kv_disk.engines import PROMPT, ask, on_disk, started
from tests.server.serving import Served, dial, serving, with_server

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def _read(served: Served) -> Samples:
    answer = httpx.get(f"{served.url}/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(answer.text)
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for f in families for sample in f.samples}


def test_a_run_shows_in_every_number_it_changes(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        chat = served.conversation()
        async with dial(served) as wire:
            assert (await asyncio.to_thread(_read, served))["chatpage_sockets", ()] == 1
            run = await wire.reply(chat, "Hello!", n=4)
            await wire.finish(run)
            again = await wire.reply(chat, kind="regenerate", parent_id=run.node_ids[0], input=None)
            await wire.finish(again)
        while (now := await asyncio.to_thread(_read, served))["chatpage_sockets", ()]:
            await asyncio.sleep(0.01)
        assert now["chatpage_generated_tokens_total", ()] == 5 * 8
        assert now["chatpage_runs_total", (("kind", "reply"), ("status", "complete"))] == 1
        assert now["chatpage_runs_total", (("kind", "regenerate"), ("status", "complete"))] == 1
        assert now["chatpage_ttft_seconds_count", ()] == now["chatpage_tpot_seconds_count", ()] == 5
        prompt, cached = now["chatpage_prompt_tokens_total", ()], now["chatpage_cached_prompt_tokens_total", ()]
        assert 0 < cached <= prompt
        assert now["chatpage_hit_rate", ()] == cached / prompt
        blocks = [now["chatpage_blocks", (("state", state),)] for state in ("used", "cached", "blank")]
        assert sum(blocks) == served.desk.engine.memory().num_blocks
        assert blocks[0] == 0
        assert blocks[1] > 0
        assert now["chatpage_block_copies_total", ()] == served.desk.engine.stats().num_block_copies > 0
        assert now["chatpage_sequences", (("state", "running"),)] == now["chatpage_runs_live", ()] == 0
        assert now["chatpage_engine_up", ()] == 1
        assert now["chatpage_preemptions_total", ()] == 0

    with_server(tmp_path, test)


def test_requests_are_counted_by_route_and_never_by_what_a_client_wrote(server: Served) -> None:
    for path in ("/api/conversations/none", "/api/conversations/other", "/guess/1", "/guess/2"):
        httpx.get(server.url + path)
    httpx.request("BREW", f"{server.url}/guess")
    text = httpx.get(f"{server.url}/metrics").text
    assert 'chatpage_requests_total{method="GET",route="/api/conversations/{conversation_id}",status="404"} 2.0' in text
    assert 'chatpage_requests_total{method="GET",route="other",status="404"} 2.0' in text
    assert "guess" not in text
    assert "BREW" not in text


def test_where_users_are_needed_metrics_are_for_users(tmp_path: Path) -> None:
    with serving(tmp_path, settings=ServeSettings(host="0.0.0.0")) as served:
        _, key = served.desk.store.create_api_key(served.desk.store.create_user("ann").id, "scraper")
        assert httpx.get(f"{served.url}/metrics").status_code == 401
        assert httpx.get(f"{served.url}/metrics", headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_without_an_engine_the_rest_is_served(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        asyncio.run_coroutine_threadsafe(served.desk.running.close(), served.loop).result(30)
        now = await asyncio.to_thread(_read, served)
        assert now["chatpage_engine_up", ()] == 0
        assert ("chatpage_generated_tokens_total", ()) not in now

    with_server(tmp_path, test)


def test_what_lies_on_disk_is_counted(tmp_path: Path) -> None:
    with started(tmp_path) as engine:
        ask(engine, PROMPT)
        on_disk(engine)
        now = {metric.name: metric.samples[0].value for metric in metrics._of_engine(engine.stats())}
    assert now["chatpage_kv_disk_blocks"] == now["chatpage_kv_disk_saved_blocks"] == 13
    assert now["chatpage_kv_disk_bytes"] > 13 * 2048
    assert (now["chatpage_kv_disk_saving"], now["chatpage_kv_disk_damaged_files"]) == (1, 0)
