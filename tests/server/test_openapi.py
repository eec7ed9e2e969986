"""Whatever is sent to an endpoint of `/openapi.json`, the server does not fail."""

from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis.core.result import Ok

from tests.server.serving import Served

NUM_EXAMPLES = 3


@pytest.mark.filterwarnings("default")  # those of the generator are about its own dependencies
def test_no_request_that_the_description_allows_or_almost_allows_ends_with_a_5xx(server: Served) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)]
    assert len(operations) > 20
    for operation in operations:
        strategies = [operation.as_strategy(generation_mode=mode) for mode in _modes(operation)]

        @hypothesis.seed(1)
        @hypothesis.settings(
            max_examples=NUM_EXAMPLES,
            deadline=None,
            database=None,
            derandomize=False,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(case=hypothesis.strategies.one_of(strategies))
        def no_failure(case: Any) -> None:
            answer = case.call()
            assert answer.status_code < 500, (case.method, answer.url, case.body, answer.text)

        no_failure()


def _modes(operation: Any) -> list[schemathesis.GenerationMode]:
    has_input = bool(operation.body or operation.query or operation.path_parameters)
    negative = [schemathesis.GenerationMode.NEGATIVE] if has_input else []
    return [schemathesis.GenerationMode.POSITIVE, *negative]
