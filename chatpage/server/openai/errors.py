"""Errors in the shape that clients of OpenAI know: `{"error": {"message", "type", "param", "code"}}`.

Invariant: nothing else is ever answered by a path of this surface, whatever went wrong and wherever it was noticed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import PydanticCustomError
from starlette.responses import JSONResponse

PATHS = ("/v1/", "/tokenize", "/detokenize", "/apply-template")
UNSUPPORTED_PARAMETER, UNSUPPORTED_VALUE = "unsupported_parameter", "unsupported_value"
_CODES = {"unauthorized": "invalid_api_key", "overloaded": "rate_limit_exceeded"}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_PROBLEMS = {  # of pydantic; what is not named here is an invalid value
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
    "json_invalid": "invalid_json",
    UNSUPPORTED_PARAMETER: UNSUPPORTED_PARAMETER,
    UNSUPPORTED_VALUE: UNSUPPORTED_VALUE,
}


def is_openai_path(path: str) -> bool:
    """Whether clients of OpenAI are served at a path."""
    return any(path == known.rstrip("/") or path.startswith(known) for known in PATHS)


def error_body(status: int, code: str, message: str, param: str | None = None) -> dict[str, str | None]:
    """Return what stands under `error`; `code` is ours, and becomes theirs where they have another word for it."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"message": message, "type": kind, "param": param, "code": _CODES.get(code, code)}


def openai_response(
    status: int, code: str, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return an error as an HTTP response."""
    return JSONResponse({"error": error_body(status, code, message, param)}, status, headers=headers)


def describe(problems: Sequence[Mapping[str, Any]]) -> tuple[str, str, str | None]:
    """Return code, message and parameter of what is wrong with a body, in the words of OpenAI.

    Of several problems the most telling one counts: a union complains for each of its branches.
    """
    problem = max(problems, key=lambda one: (one["type"] in _PROBLEMS and one["type"] != "missing", len(one["loc"])))
    param = None if problem["type"] == "json_invalid" else _param(problem["loc"])
    code = _PROBLEMS.get(problem["type"], "invalid_type" if problem["type"].endswith("_type") else "invalid_value")
    if code == "unknown_parameter":
        return code, f"Unknown parameter: {param!r}.", param
    if code == "missing_required_parameter":
        return code, f"Missing required parameter: {param!r}.", param
    if code in (UNSUPPORTED_PARAMETER, UNSUPPORTED_VALUE, "invalid_json") or param is None:
        return code, f"{problem['msg'].removeprefix('Value error, ').removesuffix('.')}.", param
    return code, f"Invalid value for {param!r}: {problem['msg']}.", param


def unsupported(name: str, why: str) -> PydanticCustomError:
    """Return the error about a parameter that this server does not have."""
    return PydanticCustomError(UNSUPPORTED_PARAMETER, "{why}", {"why": f"The parameter {name!r} is not supported: {why}."})


def _param(loc: Sequence[int | str]) -> str | None:
    """Return the parameter that a location means, such as `messages[0].content`; branches of unions are left out."""
    name = ""
    for step in loc:
        if isinstance(step, int):
            name += f"[{step}]"
        elif step not in ("body", "query", "path") and step.isidentifier() and step not in ("str", "int", "tuple", "bool"):
            name += f".{step}" if name else step
    return name or None
