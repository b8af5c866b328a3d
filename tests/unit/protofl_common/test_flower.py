"""Flower's private names, and what is said where the installed version lacks one."""

from importlib.metadata import version

import pytest

from protofl_common.config.options import SettingsError
from protofl_common.flower import TRIED_ON, needing_flowers_names


@pytest.mark.parametrize("statement", [
    "from flwr.supercore.run import NoSuchName",
    "import flwr.supercore.NoSuchName",
    "import flwr; flwr.NoSuchName",
])  # fmt: skip
def test_a_name_that_flower_lacks_is_named_with_the_versions(statement):
    expected = rf"^Flower {version('flwr')} lacks .*NoSuchName.* tried on, {' or '.join(TRIED_ON)}$"
    with pytest.raises(SettingsError, match=expected), needing_flowers_names():
        exec(statement)
