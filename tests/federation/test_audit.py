"""The audit: its statistics by hand, and what it finds in small runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protofl_common.config.options import SettingsError
from protofl_common.report.page import write_report
from protofl_common.report.reading import INVERSION, Run
from protofl_common.runs.folder import SITES, RunFolder
from protofl_common.tools.attacks import inversion
from protofl_common.tools.attacks.audit import Candidates, audit, finding
from protofl_common.tools.cli import main
from tests.support.harness import run_config, run_federation
from tests.support.pages import Page

FEW: dict[str, Any] = {"dataset": "digits", "partition": "iid", "test_samples": 100, "train_samples": 10, "rounds": 1}
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
    found = [finding(Candidates(draw.random(4), draw.random(9)) for _ in range(20)) for _ in range(300)]
    advantages = [one.advantage for one in found if one]
    assert np.std(advantages) == pytest.approx(found[0].error, rel=0.15)  # type: ignore[union-attr]
    assert sum(one.above_chance for one in found if one) <= 3


def findings(
    folder: Path, algo: str, clients: int = 4, invert: bool = False, **changes: Any
) -> tuple[Path, dict[tuple[str, str], Any]]:
    """Of a run whose clients have joined in another order than that of their numbers, as they do in processes."""
    run = run_federation(run_config(folder, algo=algo, **FEW | changes), clients).folder
    facts = RunFolder(run).sites()
    RunFolder(run).write(SITES, {**facts, "sites": dict(reversed(facts["sites"].items()))})
    return run, {(one["attack"], one["samples"]): one for one in audit(run, invert)}


def test_a_run_without_protection_names_members_and_says_so_in_red(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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
    assert main(["audit", str(run)]) == 0
    assert "likeliest" in capsys.readouterr().out


def test_the_class_means_of_gaussian_heads_name_members(tmp_path: Path) -> None:
    _, found = findings(tmp_path / "plain", algo="gaussian", backbones="glyphs", local_epochs=1)
    assert {attack for attack, _ in found} == {"prototypes"}
    assert found["prototypes", "1 to 3"]["above_chance"]
    assert found["prototypes", "1 to 3"]["named"] > 0.9 * found["prototypes", "1 to 3"]["classes"]


def test_of_classes_below_the_least_number_there_is_nothing_to_name(tmp_path: Path) -> None:
    _, found = findings(
        tmp_path, "fedproto", clients=2, partition="dirichlet", alpha=1.0, train_samples=0, min_class_samples=4
    )
    assert ("prototypes", "1 to 3") not in found
    assert ("prototypes", "all") in found


def test_under_epsilon_1_it_falls_to_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prototypes of the same frozen features, with noise and without; of a seed, as an attack may win by chance."""
    draw = np.random.default_rng(1)
    monkeypatch.setattr("client_app.protections.differential_privacy.fresh_draw", lambda: draw)
    _, open_ = findings(tmp_path / "open", "fedproto", train_samples=20)
    _, closed = findings(tmp_path / "closed", "fedproto", train_samples=20, dp="sample", dp_epsilon=1.0)
    assert open_["prototypes", "all"]["above_chance"]
    assert not closed["prototypes", "all"]["above_chance"]


def test_a_run_whose_models_are_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = run_federation(run_config(tmp_path, **FEW | {"rounds": 1, "state_dir": str(tmp_path / "disk")}), 2).folder
    with pytest.raises(SettingsError, match="no model of the client; give a finished simulation"):
        audit(folder)


# -- inversion ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inversion, "BEGINNINGS", 1)
    monkeypatch.setattr(inversion, "STEPS", 120)


def test_sums_over_the_clients_are_no_message_of_one(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="nothing to attack: with secure aggregation no message is that of one cli"):
        findings(tmp_path, "fedproto", secagg=True)


def test_correlation_by_hand() -> None:
    image = torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]])
    others = torch.stack([image[0] * 0.2 + 0.5, 1 - image[0], torch.tensor([[[0.0, 0.0], [1.0, 1.0]]])])
    assert inversion.correlations(image, others)[0].tolist() == pytest.approx([1.0, -1.0, 0.0], abs=1e-6)


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("similarity", ["l2", "cosine"])
def test_features_that_tell_all_give_the_image_back(similarity: str) -> None:
    """Pixels themselves as features; the smoothness costs a little, and of a direction the brightness is not known."""
    images = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    found = inversion.inverted(lambda one: one.flatten(1), images.flatten(1), (1, 6, 6), similarity)
    assert inversion.correlations(found, images).diagonal().min() > 0.95
    assert inversion.correlations(found, images.flip(0)).diagonal().max() < 0.5


@pytest.mark.usefixtures("_short")
def test_images_made_from_classes_of_one_sample_look_like_it_and_stand_on_the_page(tmp_path: Path) -> None:
    run, found = findings(tmp_path, "fedproto", 2, invert=True)
    small = found["inversion", "1 to 3"]
    assert small["classes"] == 20
    assert small["above_chance"]
    assert small["similarity"] > small["similarity_of_others"] + 0.05
    page = Page(write_report(run))
    assert any(attributes.get("id") == "inversions" for _, attributes in page.tags)
    assert any("test sample, which the client has not trained with" in text for text in page.texts)
    audit(run)
    assert not (run / INVERSION).exists()  # no images of another audit than the table's


PROTECTED: dict[str, dict[str, Any]] = {
    "noise": {"dp": "sample", "dp_epsilon": 1.0},
    "small classes": {"min_class_samples": 4, "partition": "dirichlet", "alpha": 1.0, "train_samples": 0},
}


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("what", PROTECTED)
def test_under_a_protection_they_show_no_training_sample(what: str, tmp_path: Path) -> None:
    _, found = findings(tmp_path, "fedproto", 2, invert=True, **PROTECTED[what])
    assert not any(one["above_chance"] for (attack, _), one in found.items() if attack == "inversion")
    assert ("inversion", "all") in found
    assert (("inversion", "1 to 3") in found) == (what == "noise")


def test_images_are_made_through_frozen_backbones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps, but in the right direction: pixels far from those of the beginning, which is nearly grey."""
    monkeypatch.setattr(inversion, "BEGINNINGS", 1)
    monkeypatch.setattr(inversion, "STEPS", 15)
    shift: dict[str, Any] = {"partition": "pathological", "classes_per_client": 1, "train_samples": 2}
    run, found = findings(tmp_path, "fedpcl", 1, invert=True, backbones="glyphs", **shift)
    assert found["inversion", "all"]["classes"] == 1
    kept = Run(run).inversions
    assert np.ptp(kept[1][0, 0]) > 100


@pytest.mark.parametrize(
    ("algo", "changes", "said"),
    [
        ("fedavg", {}, "nothing to invert: the server has received no client's prototypes"),
        ("fedproto", {"dataset": "breast-cancer"}, r"only images .* a sample of site-0 is float32 \[30\]"),
    ],
)
def test_what_cannot_be_inverted_is_refused(algo: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=said):
        findings(tmp_path, algo, 2, invert=True, **changes)
