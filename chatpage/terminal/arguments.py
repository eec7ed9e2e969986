"""Reads the arguments of the slash commands.

Invariant: whatever a person types becomes a value or an `InvalidParameterError`; nothing here raises anything else.
"""

import json
import re

from chatpage.errors import InvalidParameterError

_MAX_DIGITS = 18  # far above every number a command takes; Python itself refuses thousands
_BOOLS = {"true": True, "false": False}


def number(text: str, usage: str) -> int:
    """Read a whole number that is not negative.

    Args:
        text: As a person typed it.
        usage: What to write, for the message.

    Raises:
        InvalidParameterError: It is none, or has more than 18 digits.
    """
    if not text.isascii() or not text.isdecimal():
        raise InvalidParameterError(f"{shorten(text)!r} is not a whole number; write {usage}.")
    if len(text) > _MAX_DIGITS:
        raise InvalidParameterError(f"{shorten(text)} is too large; write {usage}.")
    return int(text)


def shorten(text: str, max_characters: int = 40) -> str:
    """Cut a text to what fits into a message."""
    return text if len(text) <= max_characters else text[: max_characters - 1] + "…"


def split_setting(argument: str) -> tuple[str, str]:
    """Split `NAME VALUE` or `NAME=VALUE`; what is missing is empty."""
    if found := re.match(r"(\w+)=(.*)", argument, re.DOTALL):
        return found[1], found[2].strip()
    name, _, value = argument.partition(" ")
    return name, value.strip()


def parse_value(name: str, text: str) -> object:
    """Read the value of a sampling parameter as JSON, so that numbers, null and lists are what they look like; anything else
    is a string.

    Raises:
        InvalidParameterError: It cannot be read, or is of a kind that this parameter never has.
    """
    if name == "ignore_eos":
        return _parse_bool(name, text)
    value = _parse_json(name, text)
    if isinstance(value, dict) and name != "logit_bias":
        raise InvalidParameterError(f"{name} cannot be {shorten(text)}; only logit_bias takes names with values.")
    if name == "stop" and isinstance(value, str):
        return (value,)
    if isinstance(value, dict):
        return {number(token_id, '/set logit_bias {"TOKEN": BIAS}'): bias for token_id, bias in value.items()}
    return value


def _parse_bool(name: str, text: str) -> bool:
    value = _BOOLS.get(text.lower())
    if value is None:
        raise InvalidParameterError(f"{name} must be true or false, got {shorten(text)!r}.")
    return value


def _parse_json(name: str, text: str) -> object:
    try:
        return json.loads(text, parse_constant=lambda constant: constant)
    except json.JSONDecodeError:
        return text
    except (ValueError, RecursionError) as error:  # thousands of digits; thousands of brackets
        raise InvalidParameterError(f"The value of {name} is too long or too deep to read: {shorten(text)!r}.") from error
