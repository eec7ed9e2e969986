"""What one user may ask for, and how the parameters of a run come together.

Invariant: a run that was accepted is within its user's limits, and its parameters are complete: the seed is drawn here and
reported, so every run can be repeated.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from chatpage.errors import InvalidParameterError
from chatpage.sampling_params import MAX_SAMPLES, SamplingParams
from chatpage.server.views import LimitsView, RunParams
from chatpage.store.records import Json

MAX_DRAWN_SEED = 2**53 - 1  # a browser keeps it exactly
_seeds = random.Random()  # one of its own: whoever seeds the shared one must not repeat everybody's runs


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Per user, and for all users together.

    Args:
        max_running_runs: Runs that compute at once; more wait.
        max_queued_runs: Runs that wait; more are refused with `OverloadedError`.
        max_samples: Most samples of one run.
        max_tokens: Most tokens of one sample; None: as many as fit the context.
        server_running_runs: Runs of all users that compute at once; more wait.
        server_queued_runs: Runs of all users that wait; more are refused with `OverloadedError`.
    """

    max_running_runs: int = 8
    max_queued_runs: int = 32
    max_samples: int = MAX_SAMPLES
    max_tokens: int | None = None
    server_running_runs: int = 64
    server_queued_runs: int = 128

    def view(self) -> LimitsView:
        return LimitsView(
            max_samples=self.max_samples,
            max_tokens=self.max_tokens,
            max_running_runs=self.max_running_runs,
            max_queued_runs=self.max_queued_runs,
        )

    def check_samples(self, n: int) -> None:
        """Raises `InvalidParameterError` for more samples than the user may have."""
        if n > self.max_samples:
            raise InvalidParameterError(f"n is {n}, but a user may have at most {self.max_samples} samples per run: lower n.")

    def checked_max_tokens(self, wanted: int | None) -> int | None:
        """Return the most tokens of a sample; None: the limit, if there is one. Raises `InvalidParameterError` above it."""
        if wanted is not None and self.max_tokens is not None and wanted > self.max_tokens:
            raise InvalidParameterError(
                f"max_tokens is {wanted}, but a user may have at most {self.max_tokens} tokens per sample: lower it."
            )
        return self.max_tokens if wanted is None else wanted


@dataclass(frozen=True, slots=True)
class FullParams:
    """The parameters of a run, complete: for the engine, for the chat template, and as they are stored."""

    sampling: SamplingParams
    template_variables: Mapping[str, Any]
    stored: Json

    @property
    def seed(self) -> int:
        assert self.sampling.seed is not None
        return self.sampling.seed


def merge_params(request: RunParams, stored: list[tuple[str, Json]], *, n: int, limits: SessionLimits) -> FullParams:
    """Complete the parameters of a run.

    Args:
        request: What the request says; it wins.
        stored: Names and contents of where else to look, the most important first; keys that are no parameters are passed
            over, since imported conversations carry those of their origin.
        n: Number of samples.
        limits: `max_tokens` is refused above, and filled in with, the user's limit.

    Raises:
        InvalidParameterError: A value is outside its range or its limit, or does not fit the others.
    """
    merged = request.model_dump(exclude_none=True)
    for place, params in stored:
        merged = _known(place, params) | merged
    if (max_tokens := limits.checked_max_tokens(merged.get("max_tokens"))) is not None:
        merged["max_tokens"] = max_tokens
    merged.setdefault("seed", _seeds.randint(0, MAX_DRAWN_SEED))
    stored_params = RunParams(**merged).model_dump(mode="json", exclude_none=True)
    variables = merged.pop("template_variables", {})
    return FullParams(SamplingParams(n=n, **merged), variables, stored_params)


def _known(place: str, params: Json) -> dict[str, Any]:
    known = {name: value for name, value in params.items() if name in RunParams.model_fields}
    if not known:
        return {}
    try:
        return RunParams.model_validate_json(json.dumps(known)).model_dump(exclude_none=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = ".".join(map(str, problem["loc"]))
        raise InvalidParameterError(f"The parameter {name} of the {place} is not usable: {problem['msg']}.") from error
