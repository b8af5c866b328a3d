"""The protections that act on a client's messages, and their order."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from client_app import protections
from client_app.protections import PROTECTIONS, names, protections_of
from client_app.protections.base import Protection
from protofl_common.experiment.settings import Settings
from tests.support.harness import client_of, run_config

SIMULATED = {"partition-id": 0, "num-partitions": 3}
SITE = SIMULATED | {"site-name": "north"}
PRIVATE = {"dp": "sample", "dp_epsilon": 8.0, "norm": "group"}


@pytest.mark.parametrize(
    ("node", "settings", "wanted"),
    [
        (SIMULATED, {}, []),
        (SITE, {}, ["one reply to each question"]),
        (SIMULATED, {"min_class_samples": 2}, ["small classes"]),
        (SITE | {"min-class-samples": 2}, {}, ["one reply to each question", "small classes"]),
        (SIMULATED, {"prototype_noise": "gaussian 0.1 0.1"}, ["a paper's noise"]),
        (SIMULATED, PRIVATE, ["differential privacy"]),
        (SIMULATED, PRIVATE | {"min_class_samples": 2}, ["small classes", "differential privacy"]),
    ],
)
def test_the_protections_of_a_client_follow_from_settings_and_node_config(
    node: dict[str, Any], settings: dict[str, Any], wanted: list[str], tmp_path: Path
) -> None:
    client = client_of(run_config(tmp_path, algo="fedproto", **settings), **node)
    assert [protection.name for protection in protections_of(client)] == wanted


def test_every_protection_has_its_place_and_says_what_it_is_called_and_when_it_acts() -> None:
    for path in Path(protections.__file__).parent.glob("*.py"):
        import_module(f"client_app.protections.{path.stem}")
    assert {kind for kind in Protection.__subclasses__() if kind.__module__.startswith("client_app.")} == {*PROTECTIONS}
    assert len({kind.name for kind in PROTECTIONS} - {""}) == len(PROTECTIONS)
    assert all(kind.acts is not Protection.acts for kind in PROTECTIONS)


def test_a_site_reads_that_secure_aggregation_acts_too(tmp_path: Path) -> None:
    settings = Settings.from_run_config(run_config(tmp_path, algo="fedproto", secagg=True))
    assert names(settings, is_site=True) == "one reply to each question, secure aggregation"
