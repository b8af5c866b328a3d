"""What a client may send, by algorithm: written a second time, by hand from the papers, to hold the catalog to it.

A row is all that the tests need to know of an algorithm.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Declared:
    """The upload after training, beside the report."""

    prototypes: tuple[str, ...] = ()
    """Arrays of the record of vectors of classes; () for no such record."""
    record: str = "prototypes"
    """Its name."""
    probabilities: bool = False
    """Its vectors are class probabilities, [P, C], where those of others are [P, D]."""
    weights: bool = False
    label_counts: bool = False
    """The record ``label_counts``: training samples of each class."""
    several: bool = False
    """A class may have several prototypes."""
    frozen: bool = False
    """Its prototypes are of the inputs of its model, which are features of frozen backbones."""
    trains: bool = True
    """Clients train a model, or have one to keep."""
    of: str = "model"
    """Whose weights: the attribute of the client's algorithm that is the module."""
    since: str = ""
    """What travels is the change of these weights since the round began, a matrix perhaps as two factors: the attribute
    that has them as they were."""
    keeps: tuple[str, ...] = ()
    """What else a client keeps for its next round, beside its model."""
    own: str = "model"
    """The client's own model, which is evaluated and kept: the attribute of its algorithm."""
    beside: dict[str, str] = field(default_factory=dict)
    """Further records of weights: the name of each, which is that of a part, and the attribute that is the module."""
    stays: tuple[str, ...] = ()
    """Prefixes of names of weights that never leave the client."""
    losses: tuple[str, ...] = ("cross-entropy",)
    minimised: tuple[str, ...] = ()
    """Those that the defaults minimise once there are prototypes; (): all."""
    acts: dict[str, Any] = field(default_factory=dict)
    """Another value for each setting that acts where all else is at its default (`test_settings_act.py`)."""

    @property
    def records(self) -> set[str]:
        """Names of the array records."""
        sent = {self.record: self.prototypes, "weights": self.weights, "label_counts": self.label_counts}
        return {name for name, there in sent.items() if there} | set(self.beside)

    @property
    def tells_classes(self) -> bool:
        """Its upload shows which classes a client has."""
        return bool(self.prototypes) or self.label_counts or "moments" in self.beside

    @property
    def averages_models(self) -> bool:
        """Clients must have one architecture."""
        return (self.weights or self.frozen) and self.of == "model" and "body." not in self.stays

    @property
    def keeps_model(self) -> bool:
        """The client's own model, or a part of it, comes from nobody else, so it must be kept."""
        if not self.trains:
            return False
        return not self.averages_models or self.own != self.of or bool(self.stays)

    @property
    def keeps_state(self) -> bool:
        """Whether a client stores anything for its next round."""
        return self.keeps_model or bool(self.keeps)


PLAIN, COUNTED = ("means", "labels"), ("means", "labels", "counts")
DECLARED: dict[str, Declared] = {
    "local": Declared(),
    "fedavg": Declared(weights=True),
    "fedproto": Declared(COUNTED, losses=("cross-entropy", "prototype")),
    "fedtgp": Declared(
        PLAIN,
        losses=("cross-entropy", "prototype"),
        acts={
            "lambda": 3.0,
            "distance": "l1",
            "granularity": "sample",
            "margin": "fixed",
            "margin-threshold": 0.001,
            "transform": False,
            "server-epochs": 3,
            "server-lr": 0.5,
            "server-batch-size": 4,
        },
    ),
    "fedpcl": Declared(
        COUNTED,
        losses=("contrast", "global", "local", "cross-entropy", "prototype"),
        minimised=("global", "local"),  # the others are ablations
        acts={"temperature": 0.5, "prototypes": "global", "loss": "ce-protodist", "denominator": "all"},
    ),
    "mpft": Declared(
        PLAIN, several=True, frozen=True, losses=(), acts={"server-epochs": 3, "server-lr": 0.1, "server-batch-size": 4}
    ),
    "gaussian": Declared(
        beside={"moments": "moments"}, trains=False, losses=(), acts={"head": "naive-bayes", "shrinkage": 1.0}
    ),
    "fedplvm": Declared(PLAIN, weights=True, several=True, losses=("cross-entropy", "contrast", "correction")),
    "fpl": Declared(
        PLAIN,
        weights=True,
        losses=("cross-entropy", "contrast", "consistency"),
        acts={"lambda": 3.0, "temperature": 0.5, "contrast": False, "consistency": "squared-l2"},
    ),
    "protofed": Declared(PLAIN, weights=True, acts={"prototypes": "every-round"}),
    "fedproto-avg": Declared(
        COUNTED,
        weights=True,
        losses=("cross-entropy", "prototype"),
        acts={"lambda": 3.0, "distance": "l1", "granularity": "class"},
    ),
    "fednh": Declared(COUNTED, weights=True, acts={"smoothing": 0.5, "scale": 5.0}),
    "fedorgp": Declared(
        PLAIN,
        losses=("cross-entropy", "prototype"),
        acts={"lambda": 9.0, "gamma": 0.0, "server-epochs": 3, "server-lr": 0.5, "server-batch-size": 4},
    ),
    "fedsa": Declared(
        PLAIN,
        keeps=("own_prototypes",),
        losses=("cross-entropy", "regularization", "contrast", "calibration"),
        acts={"regularization": 5.0, "contrast": 0.0, "calibration": 0.0, "smoothing": 0.5},
    ),
    "fedprox": Declared(weights=True, losses=("cross-entropy", "proximal"), acts={"mu": 1.0}),
    "scaffold": Declared(weights=True, beside={"control": "control"}, keeps=("own",), acts={"server-lr": 0.5}),
    "fedper": Declared(weights=True, stays=("head.",), acts={"personal-layers": 2}),
    "lg-fedavg": Declared(weights=True, stays=("body.",)),
    "fedrep": Declared(weights=True, stays=("head.",), acts={"head-epochs": 2}),
    "feddistill": Declared(
        PLAIN,
        record="outputs",
        probabilities=True,
        losses=("cross-entropy", "distillation"),
        acts={"gamma": 3.0, "outputs": "logits"},
    ),
    "fml": Declared(
        weights=True,
        of="meme",
        losses=("cross-entropy", "mutual", "meme-cross-entropy", "meme-mutual"),
        acts={"alpha": 0.9, "beta": 0.9, "meme": "htcnn-1", "mutual": "coupled"},
    ),
    "fedgh": Declared(PLAIN, acts={"server-epochs": 3, "server-lr": 0.5, "server-batch-size": 4}),
    "fedgen": Declared(
        weights=True,
        label_counts=True,
        stays=("body.",),
        losses=("cross-entropy", "generated"),
        acts={"lambda": 5.0, "noise-dim": 8, "server-steps": 5, "server-lr": 0.5, "server-batch-size": 4},
    ),
    "fesem": Declared(weights=True, acts={"centres": 1}),
    "fedkd": Declared(
        weights=True,
        of="student",
        since="received",
        keeps=("projection", "received"),
        losses=("cross-entropy", "mutual", "hidden", "student-cross-entropy", "student-mutual", "student-hidden"),
        acts={"student": "htcnn-1", "energy-start": 0.3, "energy-end": 0.3},
    ),
    "fedfa": Declared(weights=True, beside={"averages": "augmentation"}, acts={"probability": 0.9}),
    "per-fedavg": Declared(weights=True, acts={"alpha": 0.1}),
    "ditto": Declared(
        weights=True, own="personal", losses=("cross-entropy", "global-cross-entropy"), acts={"lambda": 9.0}
    ),
    "pfedme": Declared(
        weights=True, own="personal", acts={"lambda": 1.0, "personal-steps": 1, "eta": 0.01, "beta": 2.0}
    ),
}
MINIMISED = {algo: set(one.minimised or one.losses) for algo, one in DECLARED.items()}
REPORT = ("round", "train_samples", "test_samples", "validation_samples")
INFERENCES = ("head", "prototype")
PHASES = ("load", "evaluate", "train", "prototypes", "save")
SITE = {
    "name": str,
    "partition": int,
    "num_partitions": int,
    "domain": str,
    "arch": str,
    "input_shape": list,
    "parameters": int,
    "train_samples": int,
    "test_samples": int,
    "classes": list,
    "present": list,
    "weights": str,
    "device": str,
    "found": int,
    "validation_samples": int,
    "real": bool,
}

STATISTICS: dict[str, tuple[str, ...]] = {"none": (), "summary": ("counts",)}
"""Arrays of the record ``statistics`` of the final evaluation, by setting; with frozen backbones ``similarity`` too."""


def report_names(algo: str, training: bool, metrics: tuple[str, ...] = ()) -> set[str]:
    """The names that a report may have, in a run that asks for ``metrics``."""
    losses = ("total", "unlabelled", *DECLARED[algo].losses) if training else ()
    asked = tuple(f"{way}/{metric}" for way in INFERENCES for metric in metrics)
    groups = {"correct": INFERENCES, "seconds": PHASES, "losses": losses}
    groups |= {"validation": (*INFERENCES, *asked), "metrics": asked}
    return {*REPORT, *(f"{group}.{name}" for group, names in groups.items() for name in names)}
