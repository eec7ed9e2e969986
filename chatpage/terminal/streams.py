"""Whether stdin and stdout are there: a shell can start a program with either closed (`<&-`, `>&-`); Python has None then."""

import sys

from chatpage.errors import InvalidRequestError


def check_stdin() -> None:
    """Refuse to read from nothing.

    Raises:
        InvalidRequestError: stdin is closed.
    """
    if sys.stdin is None:
        raise InvalidRequestError("stdin is closed, so there is nothing to read; leave out <&-, or give </dev/null.")


def check_stdout() -> None:
    """Refuse to compute what nobody can get.

    Raises:
        InvalidRequestError: stdout is closed.
    """
    if sys.stdout is None:
        raise InvalidRequestError("stdout is closed, so the output has nowhere to go; leave out >&-, or give >/dev/null.")
