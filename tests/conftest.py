"""What holds for every test: one thread, no waiting for the disk, and nothing left behind."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

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
    """The models are small, and several threads wait for one another on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_the_disk() -> Iterator[None]:
    """No test is about a power cut; tests of a failing fsync put their own in its place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        patch.setattr("server_app.callbacks.checkpoints.sync_disk_of", lambda path: None)
        yield


@pytest.fixture(autouse=True)
def _the_same_draws_in_any_order() -> None:
    """A test that seeds nothing draws the same numbers, whichever tests ran before it."""
    torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _nobody_has_named_a_module() -> None:
    """A test that loads code by name must have it allowed as a person would."""
    python_names._ALLOWED.set(frozenset())


SET_BY_LIBRARIES = {
    "BROWSER_USE_SETUP_LOGGING",
    "CUBLAS_WORKSPACE_CONFIG",
    "FLWR_DISABLE_UPDATE_CHECK",
    "FLWR_TELEMETRY_ENABLED",
    "GRPC_VERBOSITY",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
}
"""Variables that a library, or `protofl` for its sake, sets when it is first imported or used."""


def state_of_the_process() -> dict[str, object]:
    """What one test could leave behind for the next, in any order of tests."""
    umask = os.umask(0o022)
    os.umask(umask)
    state = {
        "umask": oct(umask),
        "working directory": Path.cwd(),
        "import path": list(sys.path),
        "threads": sorted(each.name for each in threading.enumerate() if is_a_tests_own(each)),
        "torch's threads": torch.get_num_threads(),
        "torch's default type": torch.get_default_dtype(),
        "signal handlers": [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)],
        "standard output": sys.stdout,
    }
    environment = {
        f"variable {name}": value
        for name, value in os.environ.items()
        if name not in SET_BY_LIBRARIES
    }
    return state | environment


def is_a_tests_own(thread: threading.Thread) -> bool:
    """False for the threads of the process pool, which serves all simulations of a process."""
    return not thread.daemon and type(thread).__name__ != "_ExecutorManagerThread"


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Autouse fixtures end last, so a test's own `monkeypatch` has undone its work by then."""
    before = state_of_the_process()
    yield
    after = state_of_the_process()
    changed = {
        name: f"{before.get(name)} -> {after.get(name)}"
        for name in before | after
        if before.get(name) != after.get(name)
    }
    assert not changed, f"this test leaves the process in another state: {changed}"
