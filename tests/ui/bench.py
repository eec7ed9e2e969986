"""Figures of the page in a real browser: `python -m tests.ui.bench [--seconds 60]`.

The real server and the real page; a model on the same two cores would take the browser's time, so the words come from
`paced_engine.PacedEngine` on the server's process.

- stream: 8 samples of 100 tokens/s each into one page, of prose with lists, tables and code, then of one endless paragraph:
  long tasks, memory at the start and at the end, and whether every word is stored, in the page's copy, and shown.
- history: 300 messages with code and tables: time until they are shown, time per key while typing, and the time of the main
  thread for a token at their end, against a conversation of 2.
"""

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from chatpage.store import LOCAL_USER, ConversationId, NewNode, Role
from tests.ui.paced_engine import TEXTS, PacedEngine
from tests.ui.pages import ARGUMENTS, CHROMIUM, Site, Visit, open_site, wait_until

RATE = 100.0  # tokens per second and sample
NUM_SAMPLES = 8
NUM_MESSAGES = 300
REPLY_S = 10.0  # of the reply at the end of a history
REPLY = (
    "Some **words** first.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\ndef f(x):\n    return x + 1\n```\n\n- one\n- two\n"
)
WATCH_TASKS = """
window.tasks = []
const note = (list) => window.tasks.push(...list.getEntries().map((one) => one.duration))
new PerformanceObserver(note).observe({entryTypes: ["longtask"]})
"""
RUN = """([request, size]) => {
    const params = {ignore_eos: true, max_tokens: size, temperature: 1, seed: 1}
    chatpage.run({parent_id: chatpage.conversation.activeLeaf.id, ...request, params})
}"""
SHOWN = """(column) => {
    const walker = document.createTreeWalker(column.querySelector(".cp-body"), NodeFilter.SHOW_TEXT)
    const parts = []
    while (walker.nextNode()) if (!walker.currentNode.parentElement.closest("figcaption")) parts.push(walker.currentNode.data)
    return parts.join(" ")
}"""


def main() -> None:
    """Run all, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the samples stream")
    seconds = parser.parse_args().seconds
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=[*ARGUMENTS, "--enable-precise-memory-info", "--js-flags=--expose-gc"]
        )
        for text in TEXTS:
            figures = _with_site(Path(folder) / text, browser, text, lambda site, engine: stream(site, engine, seconds))
            print(json.dumps({"bench": "stream", "source": "scripted", "text": text, **figures}), flush=True)
        figures = _with_site(Path(folder) / "history", browser, "prose", history)
        print(json.dumps({"bench": "history", "source": "scripted", **figures}), flush=True)
        browser.close()


def _with_site(folder: Path, browser: Browser, text: str, measure: Any) -> dict[str, Any]:
    folder.mkdir()
    engine = PacedEngine(RATE, text)
    with open_site(folder, browser, engine=engine) as site:
        figures: dict[str, Any] = measure(site, engine)
        return figures


def stream(site: Site, engine: PacedEngine, seconds: float) -> dict[str, Any]:
    """Stream `NUM_SAMPLES` samples into one page."""
    num_tokens = int(RATE * seconds)
    with site.visit() as visit:
        page = visit.page
        visit.ask("Begin")
        page.evaluate(WATCH_TASKS)
        busy_s = _clock(visit)
        site.browser.start_tracing(page=page, categories=["toplevel"])
        started = time.monotonic()
        page.evaluate(RUN, [{"kind": "regenerate", "n": NUM_SAMPLES}, num_tokens])
        wait_until(page, "chatpage.conversation?.liveRuns.length === 1")
        page.wait_for_timeout(5000)
        heaps = [_heap(visit)]
        while page.evaluate("chatpage.conversation.liveRuns.length"):
            page.wait_for_timeout(500)
        elapsed = time.monotonic() - started
        busy = busy_s()
        visit.settle()
        page.wait_for_timeout(2000)  # the whole texts are rendered
        worked = _cpu_of_tasks(site.browser.stop_tracing())
        heaps.append(_heap(visit))
        tasks = page.evaluate("window.tasks")
        kept = _what_is_left(visit, engine, num_tokens)
    return {
        "tokens_per_s_and_sample": round(num_tokens / elapsed, 1),
        "main_thread_cpu_share": round(busy / elapsed, 2),
        "num_tasks_over_100_ms_of_cpu": sum(task > 100 for task in worked),
        "longest_task_cpu_ms": round(max(worked), 1),
        "num_tasks_over_100_ms": sum(task > 100 for task in tasks),
        "num_tasks_over_50_ms": len(tasks),
        "longest_task_ms": round(max(tasks, default=0.0), 1),
        "heap_mib_at_5_s": heaps[0],
        "heap_mib_at_the_end": heaps[1],
        **kept,
    }


def _what_is_left(visit: Visit, engine: PacedEngine, num_tokens: int) -> dict[str, int]:
    """Compare what was written with what the store, the page's copy and the columns have; counts are of samples."""
    columns = visit.columns.all()[1:]
    ids = [str(column.get_attribute("data-node")) for column in columns]
    nodes = [visit.site.served.node(visit.conversation_id, node_id) for node_id in ids]
    written = [engine.text_of(sample, num_tokens) for sample in range(NUM_SAMPLES)]
    copies = [visit.text_of(column) for column in columns]
    shown = [str(column.evaluate(SHOWN)) for column in columns]
    return {
        "num_tokens_written": num_tokens * NUM_SAMPLES,
        "num_tokens_stored": sum(node.num_tokens for node in nodes),
        "num_samples_stored_whole": sum(node.text == text for node, text in zip(nodes, written, strict=True)),
        "num_samples_in_the_page_whole": sum(copy == text for copy, text in zip(copies, written, strict=True)),
        "num_samples_shown_whole": sum(_plain(one) == _plain(text) for one, text in zip(shown, written, strict=True)),
    }


def _plain(text: str) -> list[str]:
    """Return the words of a text, without the name of the language of its code."""
    return re.findall("[A-Za-z]+", text.replace("```python", ""))


def history(site: Site, _: PacedEngine) -> dict[str, Any]:
    """Open a long conversation, type in it, and stream at its end and at that of a short one."""
    with site.visit() as visit:
        long, short = _conversation(site, NUM_MESSAGES), _conversation(site, 2)
        busy_s = _clock(visit)
        started = time.monotonic()
        _open(visit, long)
        visit.messages.nth(NUM_MESSAGES - 1).locator("figure.code").wait_for()
        opened, opened_cpu = time.monotonic() - started, busy_s()
        keys = [_time_of_a_key(visit) for _ in range(40)]
        visit.composer.fill("")
        costs: dict[ConversationId, float] = {}
        for conversation_id in (short, long, long, short):  # the less disturbed of two
            _open(visit, conversation_id)
            costs[conversation_id] = min(_time_of_a_token(visit), costs.get(conversation_id, 1.0))
    return {
        "num_messages": NUM_MESSAGES,
        "open_ms": round(1000 * opened),
        "open_main_thread_cpu_ms": round(1000 * opened_cpu),
        "key_ms_median": round(statistics.median(keys), 1),
        "key_ms_worst": round(max(keys), 1),
        "main_thread_cpu_us_per_token_of_2": round(1e6 * costs[short]),
        "main_thread_cpu_us_per_token_of_300": round(1e6 * costs[long]),
        "ratio": round(costs[long] / costs[short], 2),
    }


def _conversation(site: Site, num_messages: int) -> ConversationId:
    store = site.served.desk.store
    conversation = store.create_conversation(LOCAL_USER, title=f"{num_messages} messages")
    parent = None
    for i in range(num_messages):
        node = NewNode(role=Role.ASSISTANT if i % 2 else Role.USER, text=REPLY if i % 2 else f"Question {i}")
        parent = store.add_node(LOCAL_USER, conversation.id, parent, node).nodes[0].id
    return conversation.id


def _open(visit: Visit, conversation_id: ConversationId) -> None:
    visit.page.evaluate("(id) => { chatpage.openConversation(id) }", conversation_id)
    wait_until(visit.page, f"chatpage.conversation?.id === '{conversation_id}' && chatpage.conversation.nodes.size > 0")
    visit.messages.last.locator(".cp-block").first.wait_for()


def _time_of_a_token(visit: Visit) -> float:
    """Return the seconds the main thread works per token of a reply at the end of what is open."""
    num_tokens = int(RATE * REPLY_S)
    busy_s = _clock(visit)
    visit.page.evaluate(RUN, [{"kind": "reply", "input": "Go on", "n": 1}, num_tokens])
    wait_until(visit.page, "chatpage.conversation.liveRuns.length === 1")
    while visit.page.evaluate("chatpage.conversation.liveRuns.length"):
        visit.page.wait_for_timeout(500)
    return busy_s() / num_tokens


def _cpu_of_tasks(trace: bytes) -> list[float]:
    """Return the milliseconds of CPU of every task of the page's main thread: what others on the machine do is not in them."""
    events = json.loads(trace)["traceEvents"]
    mains = {(event["pid"], event["tid"]) for event in events if event.get("args", {}).get("name") == "CrRendererMain"}
    tasks: dict[tuple[int, int], list[float]] = {main: [] for main in mains}
    for event in events:
        if event["name"].endswith("RunTask") and (event["pid"], event["tid"]) in mains:
            tasks[event["pid"], event["tid"]].append(event.get("tdur", 0) / 1000)
    return max(tasks.values(), key=sum)


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


def _clock(visit: Visit) -> Callable[[], float]:
    """Return what tells how many seconds of CPU the page's main thread has taken since now."""
    session = visit.context.new_cdp_session(visit.page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def read() -> float:
        metrics = {one["name"]: float(one["value"]) for one in session.send("Performance.getMetrics")["metrics"]}
        return metrics["TaskDuration"]

    begun = read()
    return lambda: read() - begun


def _heap(visit: Visit) -> float:
    """Return the MiB of the page's heap after a collection."""
    session = visit.context.new_cdp_session(visit.page)
    session.send("HeapProfiler.collectGarbage")
    session.detach()
    return round(float(visit.page.evaluate("performance.memory.usedJSHeapSize")) / 2**20, 1)


if __name__ == "__main__":
    main()
