"""What several tests of real processes start."""

from collections.abc import Iterator

import pytest

from tests.support.processes import Connection, superlink


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    with superlink(tmp_path_factory.mktemp("simulation"), "--simulation") as connection:
        yield connection
