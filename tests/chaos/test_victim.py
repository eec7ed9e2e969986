"""Of a log, what tells of a bug is found."""

from chatpage.chaos.victim import tracebacks

LOG = """\
chatpage serves on http://127.0.0.1:1
ERROR GET /api/tags failed
Traceback (most recent call last):
  File "a.py", line 1, in f
    g()
ValueError: no
INFO all is well
""".splitlines(keepends=True)


def test_a_traceback_is_found_with_what_stands_before_it() -> None:
    [found] = tracebacks(LOG)
    assert found.startswith("ERROR GET /api/tags failed\n")
    assert found.endswith("ValueError: no")


def test_a_log_without_one_has_none() -> None:
    assert tracebacks(LOG[:2] + LOG[-1:]) == []
