"""``key=value`` without further quotes."""

from typing import get_type_hints

import pytest

from protofl_common.config.options import SettingsError, key_of
from protofl_common.config.sections import SECTIONS
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import Settings, default_run_config, known_keys
from protofl_common.tools.cli.arguments import read_assignments


def test_every_key_has_the_type_that_its_field_declares() -> None:
    types = {key: type(value) for key, value in default_run_config().items()}
    assert set(types) == set(known_keys())
    for prefix, section in [
        *(("", one) for one in SECTIONS.values()),
        *((f"{k}.", v.hparams) for k, v in CATALOG.items()),
    ]:
        for field, wanted in get_type_hints(section).items():
            assert types[prefix + key_of(field)] is wanted


def test_the_declared_type_decides_how_a_value_is_read() -> None:
    words = ["algo=fedplvm", "rounds=20", "lr=1", "fedplvm.contrast=False", 'run-name="a b"', "data-dir=/x=y",
        "classes=7"]  # fmt: skip
    read = read_assignments(words)
    wanted = {"algo": "fedplvm", "rounds": 20, "lr": 1.0, "fedplvm.contrast": False, "run-name": "a b"}
    assert read == wanted | {"data-dir": "/x=y", "classes": "7"}
    assert isinstance(read["lr"], float)


def test_what_does_not_fit_stays_text_and_is_named_with_the_choices() -> None:
    read = read_assignments(["rounds=many", "algo=fedplvn", "keep-optimizer=2", "momentim=0.5"])
    with pytest.raises(SettingsError) as error:
        Settings.from_run_config(default_run_config() | read)
    lines = str(error.value).splitlines()
    assert lines[0] == "momentim: unknown key; did you mean momentum?"
    assert lines[1].startswith("algo = 'fedplvn': choose one of local, fedavg")
    assert lines[2] == "rounds = 'many': must be a whole number at least 1"
    assert lines[3] == "keep-optimizer = '2': must be true or false"
    said = r"clients=20: the number of simulated .* --clients 20\nfedproto: must be key=value, such as algo=fedproto"
    with pytest.raises(SettingsError, match=said):
        read_assignments(["clients=20", "fedproto"])
