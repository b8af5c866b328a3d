"""Gaussian heads: of many clients' moments, the head equals that of all features in one place."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protofl_common.maths.gaussian import ClassMoments
from protofl_common.privacy.release import STEPS_OF_FEATURES, private_moments
from protofl_common.wire.payloads import array_record
from tests.support.attacks import values_of
from tests.support.declaration import Declared
from tests.support.harness import Outcome, client_of, run_config, run_federation
from tests.support.plain import tensors
from tests.support.plain_gaussian import Numbers, assert_within, head_left, moments_of, oas

ACTS = {"shrinkage": 1.0}
DECLARED = Declared(beside={"moments": "moments"}, trains=False, losses=(), acts=ACTS)

C = 10
SMALL = {
    "algo": "gaussian",
    "rounds": 1,
    "dataset": "digits",
    "backbones": "glyphs",
    "train_samples": 0,
}
DIVISIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "iid": (3, {"partition": "iid"}),
    "Dirichlet": (4, {"partition": "dirichlet", "alpha": 0.05}),
    "one class each": (10, {"partition": "pathological", "classes_per_client": 1}),
    "many clients": (40, {"partition": "iid"}),
}


def federation(folder: Path, clients: int, **settings: Any) -> tuple[Outcome, Numbers, Numbers]:
    """Run a federation; return it, and all training features [N, F] with their labels [N]."""
    config = run_config(folder, **SMALL | settings)
    outcome = run_federation(config, clients)
    x = []
    y = []
    for client in range(clients):
        train_set = client_of(config, client, clients).train_set
        x.append(train_set.in_memory.numpy())
        y.append(train_set.labels.numpy())
    return outcome, np.concatenate(x).astype(np.float64), np.concatenate(y)


def by_hand(x: Numbers, y: Numbers, at: Numbers) -> Numbers:
    """Return log π − ½ (x − μ)ᵀ Σ⁻¹ (x − μ) of the points ``at`` [M, F], as [M, C].

    π is a class's share of the samples, μ its mean, Σ the shrunk covariance within the classes
    (`oas`); an absent class has −∞.
    """
    present = [c for c in range(C) if (y == c).any()]
    within = sum((y == c).mean() * np.cov(x[y == c].T, bias=True) for c in present)
    inverse = np.linalg.inv(oas(within, len(y)))

    logits = np.full((len(at), C), -np.inf)
    for c in present:
        away = at - x[y == c].mean(0)
        distance = np.einsum("mf,mf->m", away @ inverse, away)
        logits[:, c] = np.log((y == c).mean()) - distance / 2
    return logits


@pytest.mark.parametrize("division", DIVISIONS)
def test_the_moments_are_those_of_all_features_in_one_place(division: str, tmp_path: Path) -> None:
    """Shares, sums and second moments of the classes; of matrices the upper triangle is sent."""
    clients, settings = DIVISIONS[division]
    outcome, x, y = federation(tmp_path, clients, **settings)
    moments = moments_of(outcome)

    one_hot = np.eye(C)[y]
    upper = np.triu_indices(x.shape[1])
    sums = {"shares": one_hot.sum(0), "first": one_hot.T @ x, "second": (x.T @ x)[upper]}
    for name, wanted in sums.items():
        assert_within(moments[name], wanted / len(y), 1e-9)


def test_the_head_is_the_one_of_the_formula(tmp_path: Path) -> None:
    """Logits are compared by differences between classes, as backbone features are much alike."""
    outcome, x, y = federation(tmp_path, 4, partition="dirichlet", alpha=0.3)
    at = x[:: len(x) // 50]  # some fifty points

    found = head_left(outcome)(torch.from_numpy(at)).numpy()

    wanted = by_hand(x, y, at)
    found = found - found.max(1, keepdims=True)
    wanted = wanted - wanted.max(1, keepdims=True)
    assert_within(found, wanted, 1e-4)
    assert (found.argmax(1) == wanted.argmax(1)).mean() > 0.97


def divisions() -> list[Any]:
    """Return the name of each division, marked as long where it has many clients."""
    found = []
    for name, (clients, _) in DIVISIONS.items():
        marks = [pytest.mark.long] if clients > 30 else []
        found.append(pytest.param(name, marks=marks))
    return found


@pytest.mark.parametrize("division", divisions())
def test_sums_under_secure_aggregation_are_the_same(division, tmp_path):
    """The moments agree to a millionth of the largest, and with them the accuracy."""
    clients, settings = DIVISIONS[division]
    settings = settings | {"total_samples": 600}

    plain, *_ = federation(tmp_path / "plain", clients, **settings)
    secure, *_ = federation(tmp_path / "secure", clients, **settings, secagg=True)

    of_secure = moments_of(secure)
    for name, wanted in moments_of(plain).items():
        assert_within(of_secure[name], wanted, 1e-6)
    found, wanted = (run.summary["accuracy"]["head"]["weighted"] for run in (secure, plain))
    assert found == pytest.approx(wanted, abs=1e-6)


def test_a_clients_own_priors_and_a_fixed_shrinkage(tmp_path):
    """With its own priors a client of one class of ten predicts that class only.

    Nothing is trained, so that ``keep-optimizer`` has nothing to keep.
    """
    settings = {
        "partition": "pathological",
        "classes_per_client": 1,
        "total_samples": 500,
        "keep_optimizer": True,
        "optimizer": "adam",
        "gaussian__priors": "personal",
        "gaussian__shrinkage": 0.5,
    }
    outcome, *_ = federation(tmp_path, 10, **settings)
    assert outcome.summary["accuracy"]["head"]["mean"] == 1


def test_moments_of_small_classes_do_not_leave_a_client(tmp_path):
    """Each client shares exactly its classes of five samples and more; some clients lack one."""
    settings = {
        "partition": "dirichlet",
        "alpha": 0.3,
        "total_samples": 600,
        "min_class_samples": 5,
    }
    outcome, *_ = federation(tmp_path, 3, **settings)

    left_out = 0
    for client, (_, reply) in enumerate(outcome.exchanged()):
        labels = client_of(outcome.grid.run_config, client).data.train_labels
        is_large = np.bincount(labels, minlength=C) >= 5
        is_sent = values_of(reply.content["moments"]["shares"]) > 0
        assert (is_sent == is_large).all()
        left_out += C - is_large.sum()
    assert left_out > 0


# -- differential privacy ----------------------------------------------------------------

PRIVATE = {"partition": "iid", "dp": "sample", "dp_epsilon": 8.0}


def test_noise_is_repaired_to_moments_that_samples_can_have() -> None:
    """Classes with a share below 0.3 go, except the largest; no mean is longer than 1.

    The noise is so large that 200 samples never have such moments.
    """
    torch.manual_seed(1)
    for trial in range(50):
        moments = ClassMoments(4, 6)
        draw = np.random.default_rng(trial)
        private_moments(moments, torch.randn(200, 6), torch.randint(4, (200,)), 1.0, 20.0, draw)
        is_clear_C = (moments.shares >= 0.3) | (moments.shares == moments.shares.max())
        assert moments.why_impossible()

        moments.repair(0.3, 1.0)

        assert not moments.why_impossible()
        assert torch.equal(moments.shares > 0, is_clear_C)
        assert float(moments.means().norm(dim=1).max()) < 1 + 1e-6


def test_moments_of_samples_need_no_repair() -> None:
    """Exact moments of 200 samples are not changed by the repair of noise."""
    torch.manual_seed(1)
    moments = ClassMoments(4, 6)
    moments.measure(torch.randn(200, 6), torch.arange(200) % 4)
    before = {name: value.clone() for name, value in moments.named_buffers()}

    moments.repair(0.1, 100.0)

    torch.testing.assert_close(dict(moments.named_buffers()), before)


@pytest.mark.parametrize("secagg", [False, True])
def test_the_head_of_moments_with_noise_still_predicts(secagg, tmp_path):
    """Nothing is refused, and no client sends a class's exact share.

    Inputs are cut to the length to which training samples were cut.
    """
    outcome, x, y = federation(tmp_path, 3, **PRIVATE, secagg=secagg)
    assert not any(outcome.summary["trouble"].values())
    assert outcome.summary["epsilon"] <= 8

    moments = {name: torch.from_numpy(value) for name, value in moments_of(outcome).items()}
    assert ClassMoments.of(moments).why_impossible() == ""

    head = head_left(outcome)
    logits = head(torch.from_numpy(x))
    assert (logits.argmax(1).numpy() == y).mean() > 0.6
    torch.testing.assert_close(head(torch.from_numpy(5 * x)), logits)

    if not secagg:
        replies = [reply for _, reply in outcome.exchanged()]
        shares = np.stack([values_of(reply.content["moments"]["shares"]) for reply in replies])
        samples = np.array([reply.content["report"]["train_samples"] for reply in replies])
        counts = shares * samples[:, None]
        steps = counts * STEPS_OF_FEATURES
        np.testing.assert_allclose(steps, steps.round(), rtol=0, atol=1e-6)
        # exact counts would add up to the client's samples
        assert (np.abs(counts.sum(1) - samples) > 0.5).mean() > 0.5


@pytest.mark.parametrize(("dp", "said"), [
    ("none", "the shares of the classes must be at least 0 and add up to 1"),
    ("sample", "moments beyond what samples and noise can bring"),
])  # fmt: skip
def test_moments_that_no_samples_and_no_noise_explain_are_refused(dp, said, tmp_path):
    """One client of three sends thirty times its moments."""

    def lie(message, reply):
        """Send moments 30 times as large from node 1000."""
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1000:
            sent = tensors(reply.content["moments"])
            larger = {name: 30 * value for name, value in sent.items()}
            reply.content["moments"] = array_record(larger)
        return reply

    config = run_config(tmp_path, **SMALL | PRIVATE | {"dp": dp})
    outcome = run_federation(config, 3, tamper=lie)

    (reason,) = outcome.rows[0]["refused"].values()
    assert reason == f"moments: {said}"
