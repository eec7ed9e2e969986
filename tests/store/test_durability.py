"""Whatever kills the process, what was written is there, and what was being written is there up to the last flush."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chatpage.store import LOCAL_USER, NodeStatus, RunStatus, Store

# Streams replies one after another, each of 20 flushes of one word, and says on a line what has been acknowledged.
WRITER = """
import sys
from pathlib import Path
from chatpage.store import *

store = Store(Path(sys.argv[1]))
conversation = store.create_conversation(LOCAL_USER)
parent = None
for reply in range(10_000):
    question = NewNode(role=Role.USER, text=f"question {reply}")
    run = store.start_run(LOCAL_USER, conversation.id, parent, kind=RunKind.REPLY, input=question).run
    parent = run.samples[0].node_id
    for word in range(20):
        store.append_partial(parent, f"w{word} ", [word])
        print("flushed", reply, word, flush=True)
    store.finish_node(parent, NodeStatus.COMPLETE, text="end", token_ids=[99])
    store.finish_run(run.id, RunStatus.COMPLETE)
    print("finished", reply, 0, flush=True)
"""
FULL_TEXT = "".join(f"w{word} " for word in range(20)) + "end"


def kill_while_streaming(path: Path, after_lines: int, delay_s: float) -> list[tuple[str, int, int]]:
    """Run the writer, kill it hard, and return what it had acknowledged."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(after_lines)]
    time.sleep(delay_s)  # so that the kill falls anywhere between two acknowledgements
    process.send_signal(signal.SIGKILL)
    lines += process.stdout.read().splitlines()
    process.stdout.close()
    process.wait()
    words = [line.split() for line in lines if line.count(" ") == 2]
    return [(kind, int(reply), int(word)) for kind, reply, word in words]


@pytest.mark.parametrize("attempt", range(5))
def test_a_killed_process_loses_no_completed_text_and_its_cut_reply_can_go_on(tmp_path: Path, attempt: int) -> None:
    path = tmp_path / "chatpage.db"
    acknowledged = kill_while_streaming(path, after_lines=25 + 9 * attempt, delay_s=0.003 * attempt)
    finished = {reply for kind, reply, _ in acknowledged if kind == "finished"}
    last_flush = {reply: word for kind, reply, word in acknowledged if kind == "flushed"}
    with Store(path) as store:
        (conversation,) = store.list_conversations(LOCAL_USER)
        nodes = store.get_tree(LOCAL_USER, conversation.id).tree.active_path()
        replies = dict(enumerate(nodes[1::2]))
        assert finished
        for reply in finished:
            assert (replies[reply].text, replies[reply].status) == (FULL_TEXT, NodeStatus.COMPLETE)
            assert replies[reply].token_ids == (*range(20), 99)
        for reply, word in last_flush.items():
            flushed = "".join(f"w{number} " for number in range(word + 1))
            assert replies[reply].text.startswith(flushed)
            assert replies[reply].num_tokens >= word + 1
        cut = [node for node in replies.values() if node.status is not NodeStatus.COMPLETE]
        assert len(cut) <= 1
        assert all(run.status is not RunStatus.RUNNING for run in store.list_runs(LOCAL_USER, conversation.id))
        for node in cut:
            assert node.status is NodeStatus.INTERRUPTED
            store.reopen_node(LOCAL_USER, conversation.id, node.id)
            store.finish_node(node.id, NodeStatus.COMPLETE, text="more")
            assert store.get_node(LOCAL_USER, conversation.id, node.id).text == node.text + "more"
        assert store.database.read(lambda db: db.execute("PRAGMA integrity_check").fetchone()[0]).result() == "ok"
