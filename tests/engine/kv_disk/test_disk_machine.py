"""Random conversations over restarts, damage, evictions and other users: the answers never change.

What no single test had foreseen in other engines: a prefix evicted between a parent and its children, a chain that was loaded
in half and continued by another request, a file that changed under an engine which knew it as good.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from chatpage.engine import kv_cache
from chatpage.engine.core import Engine
from chatpage.events import Event, RequestId, RequestStarted
from tests.engine.engines import assert_whole, greedy, outputs, run_all
from tests.engine.kv_disk.engines import ask, disk_of, files_in, open_engine
from tests.engine.model_driving import reference_backend

TOKENS = st.lists(st.sampled_from([3, 4, 5]), min_size=1, max_size=9)
SALTS = st.sampled_from(["", "alice", "bob"])
Chat = tuple[str, tuple[int, ...]]


class DiskMachine(RuleBasedStateMachine):
    """One folder, one program after the other, and an engine without a disk that knows the right answers."""

    @initialize(limit=st.sampled_from([8_000, 40_000, 10**7]), num_blocks=st.integers(20, 60))
    def make(self, limit: int, num_blocks: int) -> None:
        self.backend, kv_cache.backend_for = kv_cache.backend_for, reference_backend
        self.folder = Path(tempfile.mkdtemp(prefix="chatpage-machine-"))
        self.settings: dict[str, Any] = {"kv_disk_size": limit, "kv_memory": num_blocks * 2048}
        self.right = open_engine(None)
        self.history: dict[str, list[tuple[int, ...]]] = {}
        self.open: dict[RequestId, Chat] = {}
        self.events: list[Event] = []
        self.said: dict[str, list[tuple[int, ...]]] = {}  # everything anybody asked under a salt, aborted or not
        self.engine = self._start()

    def _start(self) -> Engine:
        return open_engine(self.folder, **self.settings)

    @rule(salt=SALTS, pick=st.integers(0, 99), at=st.integers(0, 40), new=TOKENS, max_tokens=st.integers(1, 9))
    def ask(self, salt: str, pick: int, at: int, new: list[int], max_tokens: int) -> None:
        """Go on from somewhere in something that was said before."""
        known = self.history.get(salt, [()])
        prompt = (*known[pick % len(known)][:at], *new)
        request_id = self.engine.add_request(prompt, greedy(max_tokens=max_tokens), cache_salt=salt)
        self.open[request_id] = (salt, prompt)
        self.said.setdefault(salt, []).append(prompt)

    @rule(pick=st.integers(0, 99), at=st.integers(4, 40), new=TOKENS, ends=st.booleans())
    def converse(self, pick: int, at: int, new: list[int], ends: bool) -> None:
        """Say a thing, let it be answered, and perhaps start the program again."""
        self.ask("alice", pick, at, [*new, 3, 4, 5, 3, 4, 5], 5)
        self.finish()
        if ends:
            self.restart(5.0)

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.events += self.engine.step()

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0, 99))
    def abort(self, pick: int) -> None:
        request_id = list(self.open)[pick % len(self.open)]
        self.engine.abort(request_id)
        del self.open[request_id]

    @rule()
    def finish(self) -> None:
        """Let everything end, and compare it with what is right."""
        self.events += run_all(self.engine)
        for request_id, (salt, prompt) in self.open.items():
            (answer,) = outputs(self.events, request_id)
            assert answer == ask(self.right, prompt, max_tokens=len(answer))[0]
            self._check_salt(request_id, salt, prompt)
            self.history.setdefault(salt, []).append((*prompt, *answer))
        self.open.clear()
        self.events.clear()
        assert_whole(self.engine)

    def _check_salt(self, request_id: RequestId, salt: str, prompt: tuple[int, ...]) -> None:
        """What was found in memory or on disk was asked or answered under the same salt."""
        (started,) = [e for e in self.events if isinstance(e, RequestStarted) and e.request_id == request_id]
        found = prompt[: started.cached_tokens]
        known = [*self.history.get(salt, []), *self.said[salt]]
        assert any(text[: len(found)] == found for text in known)

    @rule()
    def clear(self) -> None:
        self.engine.clear_cache()

    @rule(save_s=st.sampled_from([0.0, 5.0]))
    def restart(self, save_s: float) -> None:
        self.finish()
        self.engine.close(save_s=save_s)
        self.engine = self._start()

    @rule(pick=st.integers(0, 999), position=st.floats(0, 1), is_cut=st.booleans())
    def damage(self, pick: int, position: float, is_cut: bool) -> None:
        if path := self._pick_file(pick):
            data = bytearray(path.read_bytes()) or bytearray(b"x")
            at = int(position * (len(data) - 1))
            data[at] ^= 1
            path.write_bytes(data[:at] if is_cut else data)

    @rule(pick=st.integers(0, 999))
    def lose(self, pick: int) -> None:
        if path := self._pick_file(pick):
            path.unlink()

    def _pick_file(self, pick: int) -> Path | None:
        disk_of(self.engine).flush()
        files = files_in(self.folder)
        return files[pick % len(files)] if files else None

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.finish()
            assert disk_of(self.engine).stats().is_saving
            self.engine.close()
            self.engine.close()
            assert not [path for path in files_in(self.folder) if path.suffix != ".safetensors"]
            assert sum(path.stat().st_size for path in files_in(self.folder)) <= self.settings["kv_disk_size"]
            shutil.rmtree(self.folder)
            kv_cache.backend_for = self.backend


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
