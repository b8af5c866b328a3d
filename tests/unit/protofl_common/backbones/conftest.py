"""A few of the embedded digit-domains' images."""

import pytest

from protofl_common.data.raw import RawData
from protofl_common.data.sources import SOURCES
from protofl_common.experiment.settings import Settings, default_run_config

NAMES = ("glyphs", "fractals", "scenes")


@pytest.fixture(scope="session")
def digit_domains() -> RawData:
    return SOURCES["digit-domains"].read(Settings.from_run_config(default_run_config()).data)
