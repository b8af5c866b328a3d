"""Settings: defaults complete, errors that name the key, the value and the choices."""

import tomllib

import pytest

from protofl_common.config.options import SettingsError, flatten
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import (
    Settings,
    baselines_of,
    check_settings_act,
    default_run_config,
    known_keys,
    to_run_config,
)
from tests.support import ROOT


def test_flower_reads_the_same_defaults():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for_flower = flatten(pyproject["tool"]["flwr"]["app"]["config"])

    assert for_flower == default_run_config()
    assert list(for_flower) == known_keys()


def test_defaults_are_those_of_the_papers():
    """These are the settings that no recipe repeats.

    Where a default is not the paper's, the algorithm's page says why.
    """
    papers = {
        "fedtgp": {
            "lambda": 0.1,
            "distance": "l2",
            "granularity": "class-mean",
            "margin": "adaptive",
            "transform": True,
            "server-epochs": 100,
        },
        "fedpcl": {
            "temperature": 0.07,
            "prototypes": "both",
            "loss": "contrast",
            "denominator": "others",
        },
        "fedplvm": {"alpha": 0.25, "temperature": 0.07, "contrast": True, "correction": "sum"},
        "protofed": {"prototypes": "last-round"},
        "fml": {"alpha": 0.5, "beta": 0.5, "mutual": "detached"},
        "fedkd": {"energy-start": 0.95, "energy-end": 0.98},
        "fedrep": {"head-epochs": 10},
        "fedfa": {"probability": 0.5},
        "pfedme": {"lambda": 15.0, "personal-steps": 5, "beta": 1.0},
    }
    defaults = default_run_config()
    for algo, wanted in papers.items():
        assert {key: defaults[f"{algo}.{key}"] for key in wanted} == wanted


@pytest.mark.parametrize("algo", CATALOG)
def test_defaults_suit_every_algorithm_and_survive_a_round_trip(algo):
    settings = Settings.from_run_config(default_run_config() | {"algo": algo})
    assert isinstance(settings.hparams, CATALOG[algo].hparams)
    assert Settings.from_run_config(default_run_config() | to_run_config(settings)) == settings


@pytest.mark.parametrize(("key", "value", "said"), [
    ("algo", "fedprot", "did you mean fedproto?"),
    ("dataset", "mnst", "did you mean mnist?"),
    ("dataset", "MNIST", "did you mean mnist?"),
    ("partition", "dirichlett", "did you mean dirichlet?"),
    ("models", "resnet", "choose one of small3, "),
    ("lr", "abc", "must be a number above 0"),
    ("lr", 0.0, "must be a number above 0"),
    ("lr", float("nan"), "must be a finite number above 0"),
    ("max-prototype-norm", float("inf"), "must be a finite number above 0"),
    ("ditto.lambda", 1e308, "must be a finite number at least 0 (in float32, up to 3.4e+38)"),
    ("arch", "cnn5", "choose one of '', mnist-cnn, "),
    ("device", "cuda:x", "choose one of auto, cpu, cuda, mps, or cuda:N, xpu"),
    ("device", "cpu:0", "choose one of auto, cpu, cuda, mps, or cuda:N, xpu"),
    ("run-name", "a/b", "must be a plain folder name"),
    ("resume", True, "run-name must name the run"),
    ("rounds", 0, "must be a whole number at least 1"),
    ("rounds", 2.5, "must be a whole number at least 1"),
    ("rounds", True, "must be a whole number at least 1"),
    ("batch-size", "10", "must be a whole number at least 1"),
    ("participation", 1.5, "must be a number above 0 and at most 1"),
    ("download", "yes", "must be true or false"),
    ("data-dir", 3, "must be a string"),
    ("optimizer", "adamw", "did you mean adam?"),
    ("fedproto.distance", "cosine", "choose one of l2, squared-l2, l1, mse"),
    ("fedproto.lambda", -1, "must be a number at least 0"),
    ("seed", 2**63, "must be a whole number at least 0 and at most 9223372036854775807"),
    ("positive-rate", "half", "must be a number above 0 and at most 1"),
    (
        "test-from",
        "official-al",
        "official, official-own, official-all, keyed (did you mean official-all?)",
    ),
    ("fedkd.student", "cnn5", "choose one of '', mnist-cnn, "),
])  # fmt: skip
def test_a_bad_value_is_named_with_what_would_be_right(key, value, said):
    """The error is one line with key, value and choices, or a like name."""
    algo = {"algo": key.partition(".")[0]} if "." in key else {}  # whose setting it is
    with pytest.raises(SettingsError) as caught:
        Settings.from_run_config(default_run_config() | algo | {key: value})

    (line,) = str(caught.value).splitlines()
    # a string stands there in quotes, True as true
    assert line.startswith((f"{key} = {value!r}: ", f"{key} = {str(value).lower()}: "))
    assert said in line


@pytest.mark.parametrize("value", [b"1", [1], None, {"a": 1}])
@pytest.mark.parametrize("algo", ["fedtgp", "fedavg"])
def test_a_value_that_is_no_scalar_is_refused_even_where_it_has_no_effect(algo, value):
    """A hostile server may send one, which a site would store with the settings that act."""
    config = default_run_config() | {"algo": algo, "fedtgp.server-epochs": value}
    with pytest.raises(SettingsError) as caught:
        Settings.from_run_config(config)

    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"fedtgp.server-epochs = {value!r}: must be a whole number")


def test_a_list_of_algorithms_is_refused_by_name():
    with pytest.raises(SettingsError, match=r"algo = \['fedavg'\]: "):
        Settings.from_run_config(default_run_config() | {"algo": ["fedavg"]})


def test_unknown_and_missing_keys_are_all_named_at_once():
    """Four mistakes give four lines."""
    config = default_run_config() | {"batchsize": 3, "data-dir": "~not-here/x"}
    del config["lr"]

    with pytest.raises(SettingsError) as caught:
        Settings.from_run_config(config | {"rounds": -1})

    lines = str(caught.value).splitlines()
    assert "batchsize: unknown key; did you mean batch-size?" in lines
    assert "lr: missing from the configuration" in lines
    assert "data-dir = '~not-here/x': this machine has no such user; write the whole path" in lines
    assert len(lines) == 4  # the fourth is on rounds = -1


@pytest.mark.parametrize(("algo", "key", "meant"), [
    ("fedproto", "lambda", "fedproto.lambda"),
    ("fedproto", "lamda", "fedproto.lambda"),
    ("fedtgp", "lambda", "fedtgp.lambda"),
    ("fedplvm", "temperatur", "fedplvm.temperature"),
    ("fedproto", "fedplvm.lamda", "fedplvm.lambda"),
    ("fedproto", "round", "rounds"),
    ("fedproto", "epochs", "local-epochs"),
    ("local", "lambda", "ditto.lambda"),
])  # fmt: skip
def test_an_unknown_key_was_rather_meant_for_the_chosen_algorithm(algo, key, meant):
    with pytest.raises(SettingsError, match=rf"^{key}: unknown key; did you mean {meant}\?$"):
        Settings.from_run_config(default_run_config() | {"algo": algo, key: 1})


def test_a_setting_of_an_algorithm_that_does_not_run_is_named_with_those_that_act():
    """The settings of a baseline, which runs beside the algorithm, act too."""

    def check(chosen, **config):
        check_settings_act(chosen, Settings.from_run_config(default_run_config() | config))

    with pytest.raises(SettingsError) as caught:
        check({"fedproto.lambda": 2.0, "lr": 0.1, "fedprox.mu": 1.0, "fedbn.x": 1}, algo="fedprox")
    assert str(caught.value).splitlines() == [
        "fedproto.lambda = 2.0: has no effect on fedprox, which reads fedprox.mu",
        "fedbn.x = 1: has no effect on fedprox, which reads fedprox.mu",
    ]
    with pytest.raises(
        SettingsError,
        match=r"^fedprox\.mu = 1\.0: has no effect on local, which reads no settings of",
    ):
        check({"fedprox.mu": 1.0}, algo="local")

    check({"fedprox.mu": 1.0}, algo="fedavg", baselines="local, fedprox")
    said = "^shots = 5: has no effect on partition = dirichlet; choose n-way-k-shot$"

    with pytest.raises(SettingsError, match=said):
        check({"shots": 5, "alpha": 0.1}, partition="dirichlet")


def test_a_baseline_differs_from_its_run_only_in_its_own_keys():
    """An operator who is shown the run's values and its baselines' own keys sees all.

    Besides, ``algo`` and ``baselines`` differ, and the settings of merging if a baseline sends
    nothing up: it has these by default.
    """
    chosen = {"lr": 0.3, "max-update-ratio": 2.0, "merging": "median"}
    baselines = "fedbn, fedprox, local"
    run = Settings.from_run_config(
        default_run_config() | chosen | {"algo": "fedavg", "baselines": baselines}
    )
    shown = to_run_config(run)

    for algo, baseline in baselines_of(run, run.given).items():
        values = to_run_config(baseline)
        added = values.keys() - shown.keys()
        differing = {key for key in values.keys() & shown.keys() if values[key] != shown[key]}
        assert all(key.startswith(f"{algo}.") for key in added)
        sends_nothing = not baseline.exchange.up
        settings_of_merging = {"merging", "max-update-ratio"} if sends_nothing else set()
        assert differing == {"algo", "baselines"} | settings_of_merging


def test_a_node_may_override_its_own_facts_only():
    """Architecture and device are a node's; the learning rate is the run's."""
    node = {"device": "cpu", "arch": "cnn4", "partition-id": 3}
    settings = Settings.from_run_config(default_run_config(), node)

    assert settings.model.arch == "cnn4"
    assert settings.machine.device == "cpu"
    with pytest.raises(SettingsError) as caught:
        Settings.from_run_config(default_run_config(), node | {"lr": 9.0, "domian": "photo"})

    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(
        "node-config: lr: unknown key; choose from site-name, partition-id, "
    )
    assert lines[1].startswith(
        "node-config: domian: unknown key; did you mean domain?; choose from "
    )


def test_a_configuration_is_read_once_and_no_value_is_taken_for_an_equal_one_of_another_type():
    """Settings are kept by their values, and 1, 1.0 and True are equal keys in Python."""
    whole = Settings.from_run_config(default_run_config() | {"lr": 1}).training.lr
    assert (whole, type(whole)) == (1.0, float)

    config = default_run_config() | {"rounds": 1}
    first_node = {"partition-id": 0, "num-partitions": 2}
    second_node = {"partition-id": 1, "num-partitions": 2}
    settings = Settings.from_run_config(config, first_node)

    assert Settings.from_run_config(dict(config), second_node) is settings
    for rounds in (True, 1.0):
        with pytest.raises(SettingsError, match="rounds = "):
            Settings.from_run_config(config | {"rounds": rounds})

    site = {"site-name": "north", "max-rounds": 1}
    assert Settings.from_run_config(config, site).run.rounds == 1
    with pytest.raises(SettingsError, match="rounds = 2"):
        Settings.from_run_config(config | {"rounds": 2}, site)
