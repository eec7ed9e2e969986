"""Settings of the whole test run, made before anything else is imported.

Triton decides between compiling and interpreting when a kernel is decorated, and decorates its own library when it is
imported, so the choice must come before the first module that pulls it in. `TRITON_INTERPRET=0 pytest tests/kernels` tests the
compiled kernels on a machine with a GPU. Conversations of programs that the tests start lie in a folder of the test run, never
among those of whoever runs the tests.
"""

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from chatpage.chaos.disks import Disk

_DATA = tempfile.mkdtemp(prefix="chatpage-tests-")
atexit.register(shutil.rmtree, _DATA, ignore_errors=True)
os.environ["XDG_DATA_HOME"] = _DATA
os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def disk() -> Iterator["Disk"]:
    """A file system of its own, of 16 MiB."""
    from chatpage.chaos.disks import Disk, small_disk

    if sys.platform != "linux":
        pytest.skip("mounts as Linux does")
    with small_disk(2**24) as found:
        if not isinstance(found, Disk):
            pytest.skip(f"no file system can be mounted here: {found}")
        yield found
