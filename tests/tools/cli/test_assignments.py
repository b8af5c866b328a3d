"""``key=value`` without further quotes, and what Flower makes of it."""

from __future__ import annotations

import pytest
from flwr.common.config import parse_config_args
from hypothesis import given
from hypothesis import strategies as st

from protofl_common.config.options import Scalar, SettingsError
from protofl_common.experiment.settings import Settings, default_run_config, known_keys
from protofl_common.tools.cli.assignments import as_run_config, declared_types, read_assignments

TEXTS = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters="'"), max_size=12).filter(
    str.isprintable
)
NUMBERS = st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False)


def test_every_key_has_a_declared_type_that_its_default_has() -> None:
    types, defaults = declared_types(), default_run_config()
    assert list(types) == known_keys()
    assert {key: type(defaults[key]) for key in types} == types


def test_the_declared_type_decides_how_a_value_is_read() -> None:
    words = [
        "algo=fedplvm",
        "rounds=20",
        "lr=1",
        "fedplvm.contrast=False",
        'run-name="a b"',
        "data-dir=/x=y",
        "classes=7",
    ]
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


def test_a_word_without_equals_is_refused() -> None:
    with pytest.raises(SettingsError, match="fedproto: must be key=value, such as algo=fedproto"):
        read_assignments(["fedproto"])


def test_it_looks_as_a_person_would_type_it() -> None:
    said = {"algo": "fedplvm", "rounds": 20, "fedplvm.contrast": False, "lr": 0.1, "run-name": ""}
    assert as_run_config(said) == 'algo="fedplvm" rounds=20 fedplvm.contrast=false lr=0.1 run-name=""'


@given(st.dictionaries(st.sampled_from(known_keys()), TEXTS | NUMBERS | st.booleans(), min_size=1, max_size=8))
def test_flower_reads_what_we_write(values: dict[str, Scalar]) -> None:
    assert parse_config_args([as_run_config(values)]) == values


@pytest.mark.parametrize("text", ["both ' and \"", "two\nlines"])
def test_what_flower_cannot_take_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"run-name = .*both kinds of quotes or with line breaks"):
        as_run_config({"run-name": text})
