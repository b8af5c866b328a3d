"""Flower's private names: the versions that have them, and what is said where one is missing."""

from importlib.metadata import version

import pytest

from protofl_common.config.options import SettingsError
from protofl_common.flower import TRIED_ON, needing_flowers_names


def test_the_installed_version_is_one_that_was_tried() -> None:
    assert version("flwr").startswith(tuple(f"{tried}." for tried in TRIED_ON))


@pytest.mark.parametrize("statement", [
    "from flwr.supercore.run import NoSuchName",
    "import flwr.supercore.NoSuchName",
    "import flwr; flwr.NoSuchName",
])  # fmt: skip
def test_a_name_that_flower_lacks_is_named_with_the_versions(statement: str) -> None:
    expected = rf"^Flower {version('flwr')} lacks .*NoSuchName.* tried on, {' or '.join(TRIED_ON)}$"
    with pytest.raises(SettingsError, match=expected), needing_flowers_names():
        exec(statement)
