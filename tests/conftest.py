"""One thread: these models are too small for more, and several wait for one another on a busy machine."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from protofl_common.config import python_names

PATIENT = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
}  # machines may be busy
settings.register_profile("quick", max_examples=150, **PATIENT)
settings.register_profile("few", max_examples=25, **PATIENT)  # make quick
settings.register_profile("fuzz", max_examples=10_000, **PATIENT)  # make fuzz
settings.load_profile("quick")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_the_disk() -> Iterator[None]:
    """What a power cut leaves is no test's subject; those of a failing fsync put their own in its place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        patch.setattr("os.sync", lambda: None)
        yield


@pytest.fixture(autouse=True)
def _nobody_has_named_a_module() -> None:
    """A test that loads code by name must have it allowed as a person would."""
    python_names._ALLOWED.set(frozenset())
