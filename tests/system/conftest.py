"""What several tests of real processes start."""

import tempfile

import pytest

from tests.support.processes import superlink


@pytest.fixture
def short():
    """A short temporary folder: Ray's sockets lie below it, and theirs may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="p-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.fixture(scope="module")
def simulation(tmp_path_factory):
    with superlink(tmp_path_factory.mktemp("simulation"), "--simulation") as connection:
        yield connection
