"""The threads of the C++ kernels: work is done once, whoever comes, and whatever else holds the cores."""

import multiprocessing
import os
import subprocess
import sys
import threading

import pytest
import torch

from tests.kernels.cpu_libraries import best_kernels

NUM_VALUES = 1 << 20
ONES = torch.ones(NUM_VALUES)  # once: torch's own threads do not survive a fork


def read_sum(num_threads: int) -> float:
    """Sum a known array on the kernels' own threads."""
    best_kernels().library.use_own_threads()
    return float(best_kernels().library.read_memory(ONES.data_ptr(), NUM_VALUES, num_threads))


@pytest.mark.parametrize("num_threads", [1, 2, 3, 16])
def test_threads_of_torch_serve_who_has_not_chosen(num_threads: int) -> None:
    sums: list[float] = []
    library = best_kernels().library
    caller = threading.Thread(target=lambda: sums.append(library.read_memory(ONES.data_ptr(), NUM_VALUES, num_threads)))
    caller.start()
    caller.join()
    assert sums == [NUM_VALUES]


@pytest.mark.parametrize("num_threads", [1, 2, 3, 16, 300])
def test_every_piece_is_done_once(num_threads: int) -> None:
    for _ in range(50):
        assert read_sum(num_threads) == NUM_VALUES


def test_threads_of_the_program_may_use_the_team_at_once() -> None:
    sums: list[float] = []
    callers = [threading.Thread(target=lambda: sums.extend(read_sum(2) for _ in range(50))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert sums == [NUM_VALUES] * 200


def test_a_team_works_on_after_a_fork() -> None:
    """The child of a fork has the memory of the team, but none of its threads: it would wait for them for ever."""
    assert read_sum(2) == NUM_VALUES
    child = os.fork()
    if child == 0:
        os._exit(0 if all(read_sum(2) == NUM_VALUES for _ in range(20)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read_sum(2) == NUM_VALUES


def test_a_process_ends_while_its_team_sleeps() -> None:
    best_kernels()
    program = "from tests.kernels.test_cpu_team import read_sum, NUM_VALUES; assert read_sum(3) == NUM_VALUES"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=120, check=False).returncode == 0


def test_nobody_waits_for_threads_that_do_not_come() -> None:
    """More busy processes than cores: the threads of the team hardly run, and the caller does their part."""
    busy = [multiprocessing.get_context("spawn").Process(target=_spin, daemon=True) for _ in range(2 * (os.cpu_count() or 1))]
    for process in busy:
        process.start()
    try:
        assert all(read_sum(8) == NUM_VALUES for _ in range(50))
    finally:
        for process in busy:
            process.terminate()
            process.join()


WANDER = """
import os, threading
import chatpage_kernels.cpu.build as build

build.wait()
from tests.kernels.test_cpu_team import read_sum

cores, there = sorted(os.sched_getaffinity(0))[:2], set(os.listdir("/proc/self/task"))

def wander():
    team = None
    for i in range(400):
        os.sched_setaffinity(0, {cores[i % 2]})
        read_sum(2)
        if team is None:
            (team,) = set(os.listdir("/proc/self/task")) - there - {str(threading.get_native_id())}
        elif os.sched_getaffinity(int(team)) == {cores[i % 2]}:
            os._exit(3)

caller = threading.Thread(target=wander)
caller.start()
caller.join()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_thread_never_waits_on_the_core_of_a_caller_that_moved_there() -> None:
    """Sent away from the caller's first core, it may have had the second alone to run on, which the caller did not leave."""
    best_kernels()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", WANDER], env=environment, timeout=120, check=False).returncode == 0


def _spin() -> None:
    while True:
        pass
