"""The audit: its statistics by hand, and what it finds in small runs."""

import numpy as np
import pytest

from protofl_common.config.options import SettingsError
from protofl_common.report.page import write_report
from protofl_common.runs.folder import SITES, RunFolder
from protofl_common.tools.cli.audit import Candidates, audit, finding
from tests.support.commands import output
from tests.support.harness import federate
from tests.support.pages import Page

TINY_RUN = {
    "dataset": "digits",
    "partition": "iid",
    "test_samples": 100,
    "train_samples": 10,
    "rounds": 1,
    "models": "mlp-1",
    "local_epochs": 0,
    "initial_weights": "shared",
}


def test_advantage_and_its_error_by_hand():
    """Three classes: the two arrays of each are the scores of its members and of its others.

    A member scores above a share of the others, the AUC. The advantage is 2 AUC − 1, weighted over
    classes by their m members; the variance of that of a class with n others by chance is
    4 (m + n + 1) / (12 m n).
    """
    one_member = Candidates(np.array([3.0]), np.array([1.0, 2.0, 4.0]))  # above 2 of 3: AUC 2/3
    two_members = Candidates(np.array([5.0, 1.0]), np.array([1.0]))  # above, and a tie: AUC 3/4
    nobody_else = Candidates(np.array([1.0]), np.array([]))

    found = finding([one_member, two_members, nobody_else])

    weights = (1 / 3, 2 / 3)  # of the three members of classes with others, one is of the first
    advantages = (2 * 2 / 3 - 1, 2 * 3 / 4 - 1)
    wanted = weights[0] * advantages[0] + weights[1] * advantages[1]
    assert found.advantage == pytest.approx(wanted)

    variances = (4 * (1 + 3 + 1) / (12 * 1 * 3), 4 * (2 + 1 + 1) / (12 * 2 * 1))
    variance = weights[0] ** 2 * variances[0] + weights[1] ** 2 * variances[1]

    assert found.error == pytest.approx(variance**0.5)
    assert found.classes == 2  # the third has nobody to be told from
    assert found.named == 1  # the likeliest candidate is a member in the second class only
    assert found.by_chance == pytest.approx(1 / 4 + 2 / 3)  # members among the candidates


def test_without_candidates_nothing_is_found():
    assert finding([]) is None


def test_guessing_is_above_chance_as_rarely_as_it_should_be():
    """Random scores, 300 times: the errors are right, and 1 % at most are called above chance."""
    draw = np.random.default_rng(0)
    findings = []
    for _ in range(300):
        guesses = [Candidates(draw.random(4), draw.random(9)) for _ in range(20)]
        findings.append(finding(guesses))
    spread = np.std([each.advantage for each in findings])

    assert spread == pytest.approx(findings[0].error, rel=0.15)
    assert sum(each.above_chance for each in findings) <= 3  # 1 % of 300


def run_and_audit(folder, algo, clients=4, **changes):
    """Make a run, and return its folder and what the audit finds, by attack and samples of a class.

    Its clients have joined in another order than that of their numbers, as they do in processes.
    """
    run = federate(folder, clients=clients, algo=algo, **TINY_RUN | changes).folder
    facts = RunFolder(run).sites()
    RunFolder(run).write(SITES, {**facts, "sites": dict(reversed(facts["sites"].items()))})
    return run, {(found["attack"], found["samples"]): found for found in audit(run)}


def test_a_run_without_protection_names_members_in_red(tmp_path, capsys, monkeypatch):
    """Of classes with one to three samples the attack on prototypes names a member each time.

    The report and the command warn of it.
    """
    monkeypatch.setattr("protofl_common.report.page.FIGURES", {})
    run, findings = run_and_audit(tmp_path, "fedproto")

    small = findings["prototypes", "1 to 3"]
    assert small["above_chance"]
    assert small["named"] == small["classes"] == 40  # ten classes at each of four clients
    assert small["by_chance"] < 10

    page = Page(write_report(run))
    assert any("name training samples above chance" in text for text in page.texts)
    assert any(attributes.get("class") == "note leak" for _, attributes in page.tags)
    assert "likeliest" in output(capsys, "audit", run).out


def test_the_class_means_of_gaussian_heads_name_members(tmp_path):
    """They are attacked as prototypes are, and name a member of nine small classes in ten."""
    _, findings = run_and_audit(
        tmp_path / "plain", algo="gaussian", backbones="glyphs", local_epochs=1
    )
    assert {attack for attack, _ in findings} == {"prototypes"}

    small = findings["prototypes", "1 to 3"]
    assert small["above_chance"]
    assert small["named"] > 0.9 * small["classes"]


@pytest.fixture
def _noise_of_a_seed(monkeypatch):
    """Let the noise be the same in every run of a test: by chance an attack may win against it."""
    draw = np.random.default_rng(1)
    monkeypatch.setattr("client_app.protections.differential_privacy.fresh_draw", lambda: draw)


@pytest.mark.usefixtures("_noise_of_a_seed")
def test_the_moments_that_are_attacked_are_those_with_noise(tmp_path):
    """The audit finds members with an ε as good as no noise, and none with ε = 1.

    It needs what clients sent, which a run stores only if it is revocable.
    """
    noisy = {
        "algo": "gaussian",
        "backbones": "glyphs",
        "dp": "sample",
        "dp_feature_clip": 100.0,
    }
    stored = noisy | {"gaussian__revocable": True}

    _, findings = run_and_audit(tmp_path / "open", **stored, dp_epsilon=1e6)
    assert findings["prototypes", "all"]["above_chance"]

    _, findings = run_and_audit(tmp_path / "closed", **stored, dp_epsilon=1.0)
    assert not findings["prototypes", "all"]["above_chance"]
    with pytest.raises(SettingsError, match="what site-0 sent, with noise, is not stored"):
        run_and_audit(tmp_path / "unknown", **noisy, gaussian__revocable=False)


def test_of_classes_below_the_least_number_there_is_nothing_to_name(tmp_path):
    """With min-class-samples = 4 no prototype is of one to three samples, so none is attacked."""
    uneven = {"partition": "dirichlet", "alpha": 0.2, "train_samples": 60}
    _, findings = run_and_audit(tmp_path, "fedproto", clients=2, min_class_samples=4, **uneven)

    assert ("prototypes", "1 to 3") not in findings
    assert ("prototypes", "all") in findings


@pytest.mark.usefixtures("_noise_of_a_seed")
def test_under_epsilon_1_the_attack_on_prototypes_falls_to_chance(tmp_path):
    """The prototypes are of the same features, of a model that does not train, in both runs."""
    settings = {"algo": "fedproto", "train_samples": 20}
    _, plain = run_and_audit(tmp_path / "open", **settings)
    _, noisy = run_and_audit(tmp_path / "closed", **settings, dp="sample", dp_epsilon=1.0)

    assert plain["prototypes", "all"]["above_chance"]
    assert not noisy["prototypes", "all"]["above_chance"]


def test_sums_over_the_clients_cannot_be_audited(tmp_path):
    said = "nothing to attack: with secure aggregation no message is that of one client"
    with pytest.raises(SettingsError, match=said):
        run_and_audit(tmp_path, "fedproto", secagg=True)


def test_a_run_whose_models_are_elsewhere_cannot_be_audited(tmp_path, monkeypatch):
    """Clients with a state-dir of their own keep their models there, as sites do."""
    monkeypatch.chdir(tmp_path)
    said = "no model of the client; give a finished simulation"
    with pytest.raises(SettingsError, match=said):
        run_and_audit(tmp_path, "fedproto", state_dir="disk")
