"""One server for the tests that leave nothing behind in it."""

from collections.abc import Iterator

import pytest

from tests.server.serving import Served, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("server")) as served:
        yield served
