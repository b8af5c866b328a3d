"""Algorithms at their limits.

One without its own terms is a simpler one, as in tests/federation/test_identities.py; what one
cannot serve is refused before the first round; few labels, or a last batch of one, stop none.
"""

from collections.abc import Callable
from typing import Any

import pytest
from safetensors.torch import load_file

from server_app.network.membership import FederationError
from tests.support import plain
from tests.support.harness import Outcome, run_config, run_federation
from tests.support.results import Models, metrics, models_left

RESNET: dict[str, Any] = {"models": "resnet4-imagenet-stem", "test_samples": 20}
ABSENT: dict[str, Any] = {
    "models": "htcnn-1",
    "test_samples": 20,
    "feature_dim": 16,
    "participation": 0.5,
    "rounds": 3,
}
ABSENT |= {"train_samples": 20, "partition": "pathological"}
FPL_WITHOUT_TERMS = {"fpl__contrast": False, "fpl__consistency": "none"}
NO_TERMS: dict[str, Any] = {
    f"fedsa__{name}": 0.0 for name in ("regularization", "contrast", "calibration")
}
ONE_HEAD: dict[str, Any] = {
    "head": "orthogonal-shared",
    "models": "cnn4,htcnn-3",
    "initial_weights": "own",
}
PFEDME_AS_FEDAVG: dict[str, Any] = {
    "lr": 0.05,
    "pfedme__lambda": 20.0,
    "pfedme__personal_steps": 1,
    "pfedme__eta": 0.05,
}
PFEDME_AS_FEDAVG |= {"train_samples": 12, "weight_decay": 0.01}


def weights(outcome: Outcome) -> Models:
    return {"": plain.weights_left(outcome)}


CASES: dict[str, tuple[str, str, Callable[[Outcome], Models], bool, dict[str, Any]]] = {
    "Ditto's global model": ("ditto", "fedavg", weights, True, RESNET | {"ditto__lambda": 0.0}),
    "Ditto's own models begin with the common one": (
        "ditto",
        "local",
        models_left,
        True,
        RESNET | {"ditto__lambda": 0.0, "initial_weights": "shared"},
    ),
    "FedGen's generator reaches heads alone; Local rounds in another order": (
        "fedgen",
        "local",
        models_left,
        False,
        ONE_HEAD | {"train_samples": 45},
    ),
    "FedORGP": ("fedorgp", "local", models_left, True, plain.TINY | {"fedorgp__lambda": 0.0}),
    "FedSA, no fused steps": ("fedsa", "local", models_left, False, plain.TINY | NO_TERMS),
    "FPL, some absent": ("fpl", "fedavg", weights, True, ABSENT | {"fpl__lambda": 0.0}),
    "FPL's terms by name": ("fpl", "fedavg", weights, True, ABSENT | FPL_WITHOUT_TERMS),
    "pFedMe: K, η · λ and β are 1, w_i = θ": (
        "pfedme",
        "fedavg",
        weights,
        True,
        RESNET | PFEDME_AS_FEDAVG,
    ),
    "ProtoFed": ("protofed", "fedavg", weights, True, {"protofed__prototypes": "every-round"}),
}
"""What it is -> (algorithm, simpler one, what is compared, to the last bit or not, settings)."""


@pytest.mark.parametrize("case", CASES)
def test_an_algorithm_without_its_own_terms_is_the_simpler_one(case, tmp_path):
    """Both algorithms leave the same weights or models, to the last bit or up to rounding."""
    algo, simpler, compared, to_the_last_bit, settings = CASES[case]

    run, run_of_simpler = plain.runs(tmp_path, (algo, simpler), **settings)

    found = compared(run)
    wanted = compared(run_of_simpler)
    assert found.keys() == wanted.keys() != set()
    assert_alike = plain.assert_equal if to_the_last_bit else plain.assert_close
    for site, model in wanted.items():
        assert_alike(found[site], model)

    losses = run.rows[1]["losses"]
    if algo == "fedgen":
        assert losses["generated"] > 0
    if (algo, simpler) == ("ditto", "local"):
        assert metrics(run) == metrics(run_of_simpler)
    if (algo, simpler) == ("ditto", "fedavg"):
        losses_of_simpler = run_of_simpler.rows[1]["losses"]
        assert losses["global-cross-entropy"] == losses_of_simpler["cross-entropy"]


NO_MAPS = "has no convolution with maps of several pixels, whose statistics"
LARGE: dict[str, Any] = {
    "dataset": "digits",
    "partition": "iid",
    "backbones": "glyphs",
    "min_class_samples": 999,
}
HEADS = ("cnn4", "mobilenet-v2+fc256", "htcnn-1")
FEW_SAMPLES = "min-class-samples = 999: this client has no class of as many"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("fedfa", {"models": "mlp-2"}, NO_MAPS),
    ("fedfa", {"backbones": "glyphs"}, NO_MAPS),
    ("fedgh", {}, "differ in weights; fedgh needs one shape of what it shares(.|\n)*fc256: site-1"),
    (
        "fednh",
        {"arch": HEADS[1]},
        r"fednh needs heads of one layer, and that of mobilenet-v2\+fc256",
    ),
    (
        "fedper",
        {"models": "htcnn-3", "fedper__personal_layers": 4},
        "shares all but the last 4 layers of a model, and htcnn-3 has no more",
    ),
    ("gaussian", LARGE, FEW_SAMPLES),
    ("gaussian", LARGE | {"secagg": True}, FEW_SAMPLES),
    (
        "lg-fedavg",
        {},
        "differ in weights; lg-fedavg needs one shape of(.|\n)*mobilenet-v2\\+fc256: site-1",
    ),
]


@pytest.mark.parametrize(("algo", "settings", "said"), REFUSED)
def test_models_and_data_that_an_algorithm_cannot_serve_are_refused(algo, settings, said, tmp_path):
    """It is refused before round 1. Without settings the three clients have different heads."""
    nodes = None if settings else plain.on_sites(tmp_path, HEADS)
    federation = {"rounds": 1, "liars": 0, "join_timeout": 5.0}
    config = run_config(tmp_path, algo=algo, **federation | settings)
    with pytest.raises(FederationError, match=said):
        run_federation(config, 3, nodes=nodes)


LIVES_ON: dict[str, Any] = {"keep_optimizer": True, "momentum": 0.9, "head": "orthogonal-shared"}
FEW_LABELS: dict[str, dict[str, Any]] = {
    "ditto": LIVES_ON,
    "pfedme": LIVES_ON | {"momentum": 0.5, "participation": 0.67, "rounds": 3, "lr": 0.01},
    "fml": {},
    "fedkd": {},
    "fpl": {},
    "fedpcl": {},
    "fedproto": {"pu_weight": 0.0},
    "fedrep": {"keep_optimizer": True},
}
"""Algorithm -> what else.

A client of pFedMe joins later; FML and FedKD have a second network with normalisation.
"""


@pytest.mark.parametrize("algo", FEW_LABELS)
def test_a_client_of_few_labels_trains(algo, tmp_path):
    """Every tenth of 21 samples is labelled; every reply of every round counts."""
    few = {
        "positive_rate": 0.1,
        "pu_weight": 1.0,
        "train_samples": 21,
        "test_samples": 20,
        "batch_size": 5,
    }
    settings = few | FEW_LABELS[algo]
    config = run_config(tmp_path, liars=0, algo=algo, backbones="glyphs", **settings)

    outcome = run_federation(config, 3)

    for row in outcome.rows:
        assert row["valid"] == row["asked"]
    assert outcome.rows[-1]["valid"] == 3
    losses = outcome.rows[1]["losses"]
    has_unlabelled_term = losses.get("unlabelled", 0) != 0
    assert has_unlabelled_term == (settings["pu_weight"] != 0)

    if algo == "fpl":
        assert {"contrast", "consistency"} <= losses.keys()
    if algo == "fedrep":
        files = list(outcome.folder.glob("clients/*/0*"))
        assert files
        for file in files:
            stored = {name.partition("/")[0] for name in load_file(file)}
            assert stored == {"model", "optimizer", "head_optimizer"}
