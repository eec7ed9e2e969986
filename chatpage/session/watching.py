"""Who wants to know of every run: the log of the server, its metrics.

Invariant: a watcher is told on the event loop, once when a run was stored and once when it ended; it must not fail or wait.
"""

from typing import Protocol

from chatpage.runs import RunLog
from chatpage.server.views import RunRequest
from chatpage.store.records import RunStatus


class RunWatcher(Protocol):
    """Is told of runs."""

    def run_started(self, log: RunLog, request: RunRequest) -> None: ...

    def run_ended(self, log: RunLog, status: RunStatus) -> None: ...
