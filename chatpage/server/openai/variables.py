"""Variables that a client gives to the chat template.

Invariant: a variable is a variable; none reaches the machinery that renders, whose options have the same door.
"""

import inspect
from collections.abc import Mapping
from functools import cache

from chatpage.errors import InvalidParameterError


def check_variables(variables: Mapping[str, object]) -> None:
    """Raises `InvalidParameterError` for a name that means something else than a variable of the template."""
    if taken := sorted(variables.keys() & _reserved()):
        raise InvalidParameterError(f"chat_template_kwargs may not have {taken[0]!r}: it is no variable of the template.")


@cache
def _reserved() -> frozenset[str]:
    from transformers import PreTrainedTokenizerBase

    options = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset({*options, "messages", "self"})
