"""Figures of the page in a real browser: `python -m tests.ui.bench [--seconds 60]`.

- stream: 8 samples of 100 tokens/s each into one page: the longest task, memory at the start and at the end, and whether every
  character arrived.
- history: 300 messages with code and tables: time until they are shown, time per key while typing, and what a delta costs
  compared with an empty conversation.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from chatpage.store import LOCAL_USER, NewNode, Role
from tests.tiny_models import save_tiny_llama
from tests.ui.pages import ARGUMENTS, CHROMIUM, Site, Visit, open_site, wait_until

RATE = 100.0  # tokens per second and sample
NUM_SAMPLES = 8
NUM_MESSAGES = 300
REPLY = (
    "Some **words** first.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\ndef f(x):\n    return x + 1\n```\n\n- one\n- two\n"
)
WATCH_TASKS = """
window.tasks = []
const note = (list) => window.tasks.push(...list.getEntries().map((one) => one.duration))
new PerformanceObserver(note).observe({entryTypes: ["longtask"]})
"""


def main() -> None:
    """Run both, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the samples stream")
    seconds = parser.parse_args().seconds
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=[*ARGUMENTS, "--enable-precise-memory-info", "--js-flags=--expose-gc"]
        )
        model = save_tiny_llama(Path(folder) / "model", max_position_embeddings=65_536)
        with _site(Path(folder), browser, model) as site:
            print(json.dumps({"bench": "stream", **stream(site, seconds)}), flush=True)
            print(json.dumps({"bench": "history", **history(site)}), flush=True)
        browser.close()


def _site(folder: Path, browser: Browser, model: Path) -> Any:
    (folder / "data").mkdir()
    return open_site(folder / "data", browser, model=str(model), kv_memory=2**28)


def stream(site: Site, seconds: float) -> dict[str, Any]:
    """Stream `NUM_SAMPLES` samples into one page."""
    num_tokens = int(RATE * seconds)
    site.engine.step_s = 1 / RATE
    with site.visit() as visit:
        page = visit.page
        visit.ask("Begin")
        page.evaluate(WATCH_TASKS)
        started = time.monotonic()
        page.evaluate(
            """([n, size]) => {
                const params = {ignore_eos: true, max_tokens: size, temperature: 1, seed: 1}
                chatpage.run({kind: "regenerate", parent_id: chatpage.conversation.activeLeaf.id, n, params})
            }""",
            [NUM_SAMPLES, num_tokens],
        )
        wait_until(page, "chatpage.conversation?.liveRuns.length === 1")
        page.wait_for_timeout(5000)
        heaps = [_heap(visit)]
        while page.evaluate("chatpage.conversation.liveRuns.length"):
            page.wait_for_timeout(1000)
        elapsed = time.monotonic() - started
        heaps.append(_heap(visit))
        texts = page.evaluate(
            """() => {
                const talk = chatpage.conversation
                return talk.childrenOf(talk.chosen(null)).slice(1).map((id) => [id, talk.textOf(id)])
            }"""
        )
        shown = page.locator(".cp-column .cp-body").all_inner_texts()
        stored = {node_id: site.served.node(visit.conversation_id, node_id).text for node_id, _ in texts}
        sizes = [site.served.node(visit.conversation_id, node_id).num_tokens for node_id, _ in texts]
        tasks = page.evaluate("window.tasks")
    return {
        "tokens_per_sample": min(sizes),
        "tokens_per_s_and_sample": round(min(sizes) / elapsed, 1),
        "longest_task_ms": round(max(tasks, default=0.0), 1),
        "num_tasks_over_100_ms": sum(task > 100 for task in tasks),
        "heap_mib_at_5_s": heaps[0],
        "heap_mib_at_the_end": heaps[1],
        "samples_with_every_character": sum(stored[node_id] == text for node_id, text in texts),
        "columns_with_text": sum(bool(text.strip()) for text in shown),
    }


def history(site: Site) -> dict[str, Any]:
    """Open a long conversation, type in it, and stream at its end."""
    store = site.served.desk.store
    conversation = store.create_conversation(LOCAL_USER, title="Long")
    parent = None
    for i in range(NUM_MESSAGES):
        node = NewNode(role=Role.ASSISTANT if i % 2 else Role.USER, text=REPLY if i % 2 else f"Question {i}")
        parent = store.add_node(LOCAL_USER, conversation.id, parent, node).nodes[0].id
    with site.visit() as visit:
        page = visit.page
        started = time.monotonic()
        page.evaluate("(id) => { chatpage.openConversation(id) }", conversation.id)
        page.locator(".cp-message").nth(NUM_MESSAGES - 1).locator("figure.code").wait_for()
        opened = time.monotonic() - started
        keys = [_time_of_a_key(visit) for _ in range(40)]
        page.evaluate(WATCH_TASKS)
    return {
        "num_messages": NUM_MESSAGES,
        "open_ms": round(1000 * opened),
        "key_ms_median": round(statistics.median(keys), 1),
        "key_ms_worst": round(max(keys), 1),
    }


def _time_of_a_key(visit: Visit) -> float:
    """Return the milliseconds from a key to the frame that shows it."""
    visit.page.evaluate(
        """() => {
            const area = document.querySelector('.cp-composer textarea')
            area.addEventListener('keydown', () => {
                const at = performance.now()
                requestAnimationFrame(() => setTimeout(() => (window.keyTime = performance.now() - at)))
            }, {once: true})
        }"""
    )
    visit.composer.press("x")
    wait_until(visit.page, "window.keyTime !== undefined")
    return float(visit.page.evaluate("(() => { const time = window.keyTime; delete window.keyTime; return time })()"))


def _heap(visit: Visit) -> float:
    """Return the MiB of the page's heap after a collection."""
    session = visit.context.new_cdp_session(visit.page)
    session.send("HeapProfiler.collectGarbage")
    session.detach()
    return round(float(visit.page.evaluate("performance.memory.usedJSHeapSize")) / 2**20, 1)


if __name__ == "__main__":
    main()
