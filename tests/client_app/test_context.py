"""What is kept of each of ten thousand clients."""

import math
import pickle

from client_app.context import CommonSettings
from protofl_common.experiment.settings import default_run_config


def test_settings_that_come_from_many_clients_are_kept_once_with_their_types() -> None:
    config = default_run_config() | {"rounds": 1, "lr": 1.0, "resume": True, "test": math.inf, "name": "Ünï'\""}
    here, there = (pickle.loads(pickle.dumps(CommonSettings(config))) for _ in range(2))
    assert here is there
    assert {name: repr(value) for name, value in here.items()} == {name: repr(value) for name, value in config.items()}
    other = pickle.loads(pickle.dumps(CommonSettings(config | {"lr": 1})))
    assert other is not here
    assert type(other["lr"]) is int
