"""Settings of the whole test run, made before anything else is imported.

Triton decides between compiling and interpreting when a kernel is decorated, and decorates its own library when it is
imported, so the choice must come before the first module that pulls it in. `TRITON_INTERPRET=0 pytest tests/kernels` tests the
compiled kernels on a machine with a GPU.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
