"""A case for each setting: where it acts, and another value than its default."""

from pathlib import Path
from typing import Any

from tests.support.declared import DECLARED
from tests.support.harness import federate
from tests.support.results import left_by

SMALL: dict[str, Any] = {
    "models": "mnist-cnn",
    "image_size": 0,
    "train_samples": 10,
    "test_samples": 20,
    "clients": 2,
    "rounds": 1,
}
SHOTS = {"partition": "n-way-k-shot", "train_samples": 0, "shots": 6}
FEW_LABELS = {"positive_rate": 0.5, "train_samples": 20}
UNEQUAL = {
    "partition": "dirichlet",
    "alpha": 0.5,
    "train_samples": 0,
    "test_samples": 0,
    "total_samples": 200,
}
VALIDATED = {"validation_fraction": 0.3, "train_samples": 30}
CLUSTERS = {"algo": "fedplvm", "train_samples": 40}
NEED_AN_EARLIER_RUN = {"gaussian.revocable", "gaussian.start-from"}
"""They act in tests/federation/test_forget.py."""
ONE_DOMAIN = {"clients": 3, "clients_per_domain": "3,0,0,0,0"}
ALONE = {
    "algo": "fedavg",
    "rounds": 3,
    "seed": 7,
    "participation": 0.34,
    "drop-rate": 0.5,
    "slow-rate": 0.5,
    "new-clients": 1,
    "new-domain": "scanned",
    "evaluate-every": 2,
    "max-prototype-norm": 1.0,
    "image-size": 20,
    "partition": "label-shift",
    "clients-per-domain": "2,0,0,0,0",
    "total-samples": 200,
    "train-samples": 20,
    "test-samples": 30,
    "train-fraction": 0.3,
    "models": "htcnn-1",
    "arch": "htcnn-1",
    "feature-dim": 32,
    "head": "orthogonal-frozen",
    "initial-weights": "shared",
    "backbones": "glyphs",
    "local-epochs": 2,
    "local-steps": 2,
    "batch-size": 4,
    "augment": "flip",
    "optimizer": "adam",
    "lr": 0.02,
    "lr-schedule": "cosine",
    "weight-decay": 0.1,
    "keep-optimizer": True,
    "prototype-noise": "laplace 0.05 0.1",
    "image-noise": "gaussian 0.2 0.1",
    "fedproto.lambda": 3.0,
    "fedproto.distance": "l1",
    "fedproto.granularity": "class",
}
"""Key -> another value than its default, with which it acts in a run of `SMALL`."""
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "early-stopping": (VALIDATED | {"rounds": 4, "lr": 1e-9, "algo": "local"}, 1),
    "slow-factor": ({"slow_rate": 0.5, "late": "next-round", "rounds": 3}, 2),
    "late": ({"slow_rate": 0.5, "rounds": 2}, "next-round"),
    "staleness": ({"slow_rate": 0.5, "late": "next-round", "rounds": 2}, 0.0),
    "new-client-epochs": ({"new_clients": 1}, 1),
    "liars": ({"initial_weights": "shared", "clients": 3}, 1),
    "max-prototypes-per-class": (CLUSTERS, 1),
    "max-norm-ratio": ({"clients": 3}, 1.0001),
    "max-samples-ratio": (UNEQUAL | {"clients": 5}, 1.0),
    "max-samples-lead": (UNEQUAL | {"clients": 5, "alpha": 0.1}, 1.0),
    "max-update-ratio": ({"algo": "fedavg", "clients": 3}, 0.5),
    "merging": ({"clients": 3}, "median"),
    "trim-fraction": ({"merging": "trimmed-mean", "clients": 5}, 0.4),
    "dataset": ({"partition": "iid"}, "digits"),
    "alpha": (UNEQUAL, 9.0),
    "classes-per-client": ({"partition": "pathological"}, 4),
    "ways": (SHOTS, 5),
    "ways-stdev": (SHOTS, 0),
    "shots": (SHOTS, 9),
    "shots-stdev": (SHOTS, 3),
    "validation-fraction": ({"train_samples": 30}, 0.3),
    "positive-rate": ({"train_samples": 20}, 0.5),
    "norm": ({"models": "resnet4-imagenet-stem"}, "group"),
    "drop-last": ({"batch_size": 8}, True),
    "lr-step": ({"lr_schedule": "step"}, 1),
    "lr-decay": ({"lr_schedule": "step", "lr_step": 1}, 0.5),
    "momentum": ({"batch_size": 4}, 0.9),
    "predict-among": (UNEQUAL | {"partition": "pathological", "clients": 5, "rounds": 3}, "own"),
    "pu-weight": (FEW_LABELS, 1.0),
    "pu-risk": (FEW_LABELS | {"pu_weight": 1.0, "local_epochs": 10}, "non-negative"),
    "min-class-samples": (UNEQUAL, 9),
    "gaussian.priors": (UNEQUAL | {"algo": "gaussian"}, "personal"),
    "mpft.sample-ratio": ({"algo": "mpft", "train_samples": 30}, 0.9),
    "fedproto.weighting": (UNEQUAL, "uniform"),
    "fedproto-avg.weighting": (UNEQUAL | {"algo": "fedproto-avg"}, "uniform"),
    "fedplvm.lambda": (CLUSTERS, 9.0),
    "fedplvm.alpha": (CLUSTERS, 0.9),
    "fedplvm.temperature": (CLUSTERS, 0.5),
    "fedplvm.contrast": (CLUSTERS, False),
    "fedplvm.correction": (CLUSTERS, "none"),
    "fedplvm.similarity-floor": (CLUSTERS, 0.9),
    "fedplvm.local-clusters": (CLUSTERS, "average"),
    "fedplvm.global-clusters": (CLUSTERS, "none"),
    "feddap.fusion-temperature": (ONE_DOMAIN | {"algo": "feddap"}, 5.0),
    "fedplvm.kmeans-clusters": (CLUSTERS | {"fedplvm__local_clusters": "kmeans"}, 3),
}
"""Key -> (the settings under which it acts, another value than its default)."""
CASES |= {key: ({}, other) for key, other in ALONE.items()}

for _algo, _declared in DECLARED.items():
    _settings = {"algo": _algo, "local_epochs": 2, "clients": 2, "train_samples": 20}
    for _key, _other in _declared.acts.items():
        CASES[f"{_algo}.{_key}"] = (_settings, _other)


def left_behind(folder: Path, changes: dict[str, Any]) -> object:
    """Make a run of `SMALL` with these settings, and return all that must repeat in another.

    These are its rows of metrics without times, and digests of the tensors that it leaves.
    """
    settings = SMALL | changes
    clients = settings.pop("clients")
    return left_by(federate(folder, clients, **settings).folder)
