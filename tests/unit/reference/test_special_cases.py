"""Where its own terms are off, an algorithm is a simpler one; tests/federation/test_identities.py has more of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import plain
from tests.support.harness import Outcome
from tests.support.results import Models, metrics, models_left

RESNET: dict[str, Any] = {"models": "resnet4-imagenet-stem", "test_samples": 20}
ABSENT: dict[str, Any] = {"models": "htcnn-1", "test_samples": 20, "feature_dim": 16, "participation": 0.5, "rounds": 3}
ABSENT |= {"train_samples": 20, "partition": "pathological"}
NO_TERMS: dict[str, Any] = {f"fedsa__{name}": 0.0 for name in ("regularization", "contrast", "calibration")}
ONE_HEAD: dict[str, Any] = {"head": "orthogonal-shared", "models": "cnn4,htcnn-3", "initial_weights": "own"}
WHOLE: dict[str, Any] = {"lr": 0.05, "pfedme__lambda": 20.0, "pfedme__personal_steps": 1, "pfedme__eta": 0.05}
WHOLE |= {"train_samples": 12, "weight_decay": 0.01}


def weights(outcome: Outcome) -> Models:
    return {"": plain.weights_left(outcome)}


CASES: dict[str, tuple[str, str, Callable[[Outcome], Models], bool, dict[str, Any]]] = {
    "Ditto's global model": ("ditto", "fedavg", weights, True, RESNET | {"ditto__lambda": 0.0}),
    "Ditto's own models begin with the common one": ("ditto", "local", models_left, True,
        RESNET | {"ditto__lambda": 0.0, "initial_weights": "shared"}),
    "FedGen's generator reaches heads alone; Local rounds in another order": ("fedgen", "local", models_left, False,
        ONE_HEAD | {"train_samples": 45}),
    "FedORGP": ("fedorgp", "local", models_left, True, plain.TINY | {"fedorgp__lambda": 0.0}),
    "FedSA, which takes no fused steps": ("fedsa", "local", models_left, False, plain.TINY | NO_TERMS),
    "FPL of absent clients and classes": ("fpl", "fedavg", weights, True, ABSENT | {"fpl__lambda": 0.0}),
    "FPL's terms by name": ("fpl", "fedavg", weights, True,
        ABSENT | {"fpl__contrast": False, "fpl__consistency": "none"}),
    "pFedMe: with K, η · λ and β of 1, w_i = θ": ("pfedme", "fedavg", weights, True, RESNET | WHOLE),
    "ProtoFed": ("protofed", "fedavg", weights, True, {"protofed__prototypes": "every-round"}),
}  # fmt: skip
"""What it is -> (algorithm, the simpler one, what is compared, whether to the last bit, settings)."""


@pytest.mark.parametrize("case", CASES)
def test_an_algorithm_without_its_own_terms_is_the_simpler_one(case: str, tmp_path: Path) -> None:
    algo, simpler, left, exact, settings = CASES[case]
    outcomes = plain.runs(tmp_path, (algo, simpler), **settings)
    found, wanted = map(left, outcomes)
    assert found.keys() == wanted.keys() != set()
    for site, one in wanted.items():
        (plain.assert_equal if exact else plain.assert_close)(found[site], one)
    if algo == "fedgen":
        assert outcomes[0].rows[1]["losses"]["generated"] > 0
    if (algo, simpler) == ("ditto", "local"):
        assert metrics(outcomes[0]) == metrics(outcomes[1])
    if (algo, simpler) == ("ditto", "fedavg"):
        name, losses = "global-cross-entropy", [run.rows[1]["losses"] for run in outcomes]
        assert losses[0][name] == losses[1]["cross-entropy"]
