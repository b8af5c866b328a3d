"""The audit: its statistics by hand, and what it finds in small runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protofl_common.config.options import SettingsError
from protofl_common.report.page import write_report
from protofl_common.runs.folder import SITES, RunFolder
from protofl_common.tools.cli.audit import Candidates, audit, finding
from tests.support.commands import output
from tests.support.given import Patch, Printed
from tests.support.harness import run_config, run_federation
from tests.support.pages import Page

FEW: dict[str, Any] = {
    "dataset": "digits",
    "partition": "iid",
    "test_samples": 100,
    "train_samples": 10,
    "rounds": 1,
}
FEW |= {"models": "mlp-1", "local_epochs": 0, "initial_weights": "shared"}


def test_advantage_and_its_error_by_hand() -> None:
    groups = [
        Candidates(np.array([3.0]), np.array([1.0, 2.0, 4.0])),  # above 2 of 3: AUC 2/3
        Candidates(np.array([5.0, 1.0]), np.array([1.0])),  # above, and a tie: AUC 3/4
        Candidates(np.array([1.0]), np.array([])),
    ]
    found = finding(groups)
    assert found.advantage == pytest.approx((1 * (1 / 3) + 2 * (1 / 2)) / 3)
    variances = 4 * (1 + 3 + 1) / (12 * 3), 4 * (2 + 1 + 1) / (12 * 2)
    assert found.error == pytest.approx((variances[0] / 9 + 4 * variances[1] / 9) ** 0.5)
    assert (found.classes, found.named, found.by_chance) == (2, 1, pytest.approx(1 / 4 + 2 / 3))
    assert finding([]) is None


def test_guessing_is_above_chance_as_rarely_as_it_should_be() -> None:
    draw = np.random.default_rng(0)
    found = [
        finding(Candidates(draw.random(4), draw.random(9)) for _ in range(20)) for _ in range(300)
    ]
    advantages = [one.advantage for one in found if one]
    assert np.std(advantages) == pytest.approx(found[0].error, rel=0.15)  # type: ignore[union-attr]
    assert sum(one.above_chance for one in found if one) <= 3


def findings(
    folder: Path, algo: str, clients: int = 4, **changes: Any
) -> tuple[Path, dict[tuple[str, str], Any]]:
    """Of a run whose clients have joined in another order than that of their numbers, as they do in processes."""
    run = run_federation(run_config(folder, algo=algo, **FEW | changes), clients).folder
    facts = RunFolder(run).sites()
    RunFolder(run).write(SITES, {**facts, "sites": dict(reversed(facts["sites"].items()))})
    return run, {(one["attack"], one["samples"]): one for one in audit(run)}


def test_a_run_without_protection_names_members_in_red(
    tmp_path: Path, capsys: Printed, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("protofl_common.report.page.FIGURES", {})
    run, found = findings(tmp_path, "fedproto")
    small = found["prototypes", "1 to 3"]
    assert small["above_chance"]
    assert small["named"] == small["classes"] == 40
    assert small["by_chance"] < 10
    page = Page(write_report(run))
    assert any("name training samples above chance" in text for text in page.texts)
    assert any(attributes.get("class") == "note leak" for _, attributes in page.tags)
    assert "likeliest" in output(capsys, "audit", run).out


def test_the_class_means_of_gaussian_heads_name_members(tmp_path: Path) -> None:
    _, found = findings(tmp_path / "plain", algo="gaussian", backbones="glyphs", local_epochs=1)
    assert {attack for attack, _ in found} == {"prototypes"}
    assert found["prototypes", "1 to 3"]["above_chance"]
    assert found["prototypes", "1 to 3"]["named"] > 0.9 * found["prototypes", "1 to 3"]["classes"]


def test_the_moments_that_are_attacked_are_those_with_noise(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """At ε = 10⁶ there is as good as none, and members are named; at ε = 1 not; without what was sent it says so."""
    draw = np.random.default_rng(1)
    monkeypatch.setattr("client_app.protections.differential_privacy.fresh_draw", lambda: draw)
    noisy: dict[str, Any] = {
        "algo": "gaussian",
        "backbones": "glyphs",
        "dp": "sample",
        "gaussian__revocable": True,
    }
    noisy |= {"dp_feature_clip": 100.0}
    _, found = findings(tmp_path / "open", **noisy, dp_epsilon=1e6)
    assert found["prototypes", "all"]["above_chance"]
    _, found = findings(tmp_path / "closed", **noisy, dp_epsilon=1.0)
    assert not found["prototypes", "all"]["above_chance"]
    with pytest.raises(SettingsError, match="what site-0 sent, with noise, is not stored"):
        findings(tmp_path / "unknown", **noisy | {"gaussian__revocable": False})


def test_of_classes_below_the_least_number_there_is_nothing_to_name(tmp_path: Path) -> None:
    uneven = {"partition": "dirichlet", "alpha": 0.2, "train_samples": 60}
    _, found = findings(tmp_path, "fedproto", clients=2, min_class_samples=4, **uneven)
    assert ("prototypes", "1 to 3") not in found
    assert ("prototypes", "all") in found


def test_under_epsilon_1_it_falls_to_chance(tmp_path: Path, monkeypatch: Patch) -> None:
    """Prototypes of the same frozen features, with noise and without; of a seed, as an attack may win by chance."""
    draw = np.random.default_rng(1)
    monkeypatch.setattr("client_app.protections.differential_privacy.fresh_draw", lambda: draw)
    _, open_ = findings(tmp_path / "open", "fedproto", train_samples=20)
    _, closed = findings(
        tmp_path / "closed", "fedproto", train_samples=20, dp="sample", dp_epsilon=1.0
    )
    assert open_["prototypes", "all"]["above_chance"]
    assert not closed["prototypes", "all"]["above_chance"]


@pytest.mark.parametrize(("more", "said"), [
    ({"secagg": True}, "nothing to attack: with secure aggregation no message is that of one client"),
    ({"state_dir": "disk"}, "no model of the client; give a finished simulation"),
])  # fmt: skip
def test_where_there_is_nothing_to_attack_it_says_so(
    more: Any, said: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Sums over the clients are no message of one, and the models of machines are elsewhere."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=said):
        findings(tmp_path, "fedproto", **more)
