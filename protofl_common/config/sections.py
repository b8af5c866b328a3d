"""The settings of a run that no algorithm owns: a frozen dataclass per section.

Each field has the legal values of its key.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import get_type_hints

from protofl_common.config.architectures import (
    ARCHITECTURES,
    GROUPS,
    HEADS,
    ORTHOGONAL_SHARED,
    OTHER_NETWORKS,
    OTHER_NETWORKS_IN_WORDS,
)
from protofl_common.config.datasets import DATASETS, OTHER_DATASETS, PARTITIONS
from protofl_common.config.options import Affects, Scalar, Table, key_of, option

TRACKERS = ("mlflow", "tensorboard", "trackio", "wandb")
"""Experiment trackers (`server_app/callbacks/trackers.py`)."""
FEWEST_TESTED = 20
"""Samples of a figure under ``min-class-samples``, at least: a figure of few says which of them are
right."""
DEVICE = re.compile(r"cuda:\d+|xpu(:\d+)?")
NOISE = re.compile(r"(gaussian|laplace) (\d+|\d*\.\d+) (\d+|0*\.\d+)")
"""No part of it can be read in two ways."""


class RunSettings(Table):
    """The run itself."""

    algo: str = option()
    hparams: str = option()
    baselines: str = option(affects="display")
    rounds: int = option(minimum=1)
    early_stopping: int = option(minimum=0)
    early_stopping_metric: str = option()
    keep_best: bool = option(affects="display")
    seed: int = option(minimum=0)
    run_name: str = option(affects="name")
    out_dir: str = option(affects="name")
    resume: bool = option(affects="name")
    report: bool = option(affects="display")
    metrics: str = option(affects="display")
    callback: str = option(affects="display")


class FederationSettings(Table):
    """Who takes part, and how long the server waits."""

    num_clients: int = option(minimum=0, affects="waiting")
    min_clients: int = option(minimum=0, affects="waiting")
    participation: float = option(above=0, maximum=1)
    drop_rate: float = option(minimum=0, maximum=0.99)
    new_clients: int = option(minimum=0)
    new_domain: str = option()
    new_client_epochs: int = option(minimum=0)
    min_replies: int = option(minimum=1, affects="waiting")
    join_timeout: float = option(above=0, affects="waiting")
    round_timeout: float = option(above=0, affects="waiting")
    grace: float = option(minimum=0, affects="waiting")
    max_silent_rounds: int = option(minimum=0, affects="waiting")
    evaluate_every: int = option(minimum=1)
    liars: int = option(minimum=-1, maximum=2)


class BoundsSettings(Table):
    """For experts: the bounds on single clients, where they shall not follow from `liars`."""

    max_prototype_norm: float = option(above=0)
    max_prototypes_per_class: int = option(minimum=1)
    max_norm_ratio: float = option(minimum=1, or_zero=True)
    max_samples_ratio: float = option(minimum=1, or_zero=True)
    max_samples_lead: float = option(minimum=1, or_zero=True)
    max_update_ratio: float = option(minimum=0)
    merging: str = option(choices=("auto", "mean", "median", "trimmed-mean"))
    trim_fraction: float = option(minimum=0, maximum=0.49)


class DataSettings(Table):
    """The data, and their division among the clients."""

    dataset: str = option(
        choices=DATASETS,
        or_like=OTHER_DATASETS,
        or_words="MODULE:FUNCTION of your own",
        affects="data",
    )
    data_dir: str = option(affects="machine")
    download: bool = option(affects="machine")
    cache_dir: str = option(affects="machine")
    image_size: int = option(minimum=0, affects="data")
    text_length: int = option(minimum=1, maximum=65536, affects="data")
    classes: str = option(affects="data")
    columns: str = option(affects="data")
    drop: str = option(affects="data")
    one_hot: str = option(affects="data")
    impute: str = option(choices=("none", "mean", "median"), affects="data")
    standardise: str = option(choices=("auto", "client", "pooled"), affects="data")
    partition: str = option(choices=PARTITIONS)
    alpha: float = option(above=0)
    classes_per_client: int = option(minimum=1)
    ways: int = option(minimum=1)
    ways_stdev: int = option(minimum=0)
    shots: int = option(minimum=1)
    shots_stdev: int = option(minimum=0)
    clients_per_domain: str = option()
    total_samples: int = option(minimum=0)
    train_samples: int = option(minimum=0)
    test_samples: int = option(minimum=0)
    test_from: str = option(
        choices=("split", "balanced", "official", "official-own", "official-all")
    )
    train_fraction: float = option(above=0, maximum=0.99)
    validation_fraction: float = option(minimum=0, maximum=0.9)
    positive_rate: float = option(above=0, maximum=1, affects="data")


class ModelSettings(Table):
    """The networks."""

    models: str = option(
        choices=GROUPS,
        several=True,
        or_like=OTHER_NETWORKS,
        or_words=OTHER_NETWORKS_IN_WORDS,
    )
    arch: str = option(
        choices=("", *ARCHITECTURES),
        or_like=OTHER_NETWORKS,
        or_words=OTHER_NETWORKS_IN_WORDS,
    )
    feature_dim: int = option(minimum=1, maximum=16384)
    head: str = option(choices=(*HEADS, ORTHOGONAL_SHARED))
    initial_weights: str = option(choices=("auto", "own", "shared"))
    backbones: str = option()
    norm: str = option(choices=("batch", "group"))


class TrainingSettings(Table):
    """Local training and evaluation."""

    local_epochs: int = option(minimum=0)
    local_steps: int = option(minimum=0)
    batch_size: int = option(minimum=1)
    drop_last: bool = option()
    augment: str = option(choices=("none", "flip", "rotate"), several=True)
    optimizer: str = option(choices=("sgd", "adam"))
    lr: float = option(above=0)
    lr_schedule: str = option(choices=("constant", "cosine", "step"))
    lr_step: int = option(minimum=1)
    lr_decay: float = option(above=0, maximum=1)
    momentum: float = option(minimum=0, maximum=0.9999)
    weight_decay: float = option(minimum=0)
    keep_optimizer: bool = option()
    eval_batch_size: int = option(minimum=1)
    predict_among: str = option(choices=("all", "own"))
    pu_weight: float = option(minimum=0)
    pu_risk: str = option(choices=("unbiased", "non-negative"))


class PrivacySettings(Table):
    """The protection of a client's data, beside that they stay where they are (`privacy`)."""

    min_class_samples: int = option(minimum=1)
    dp: str = option(choices=("none", "sample"))
    dp_epsilon: float = option(above=0)
    dp_delta: float = option(above=0, maximum=0.1)
    dp_clip: float = option(minimum=1e-6, maximum=1e6)
    dp_feature_clip: float = option(minimum=1e-6, maximum=1e6)
    secagg: bool = option()
    secagg_threshold: float = option(above=0.5, maximum=1, affects="waiting")

    @property
    def sums_only(self) -> bool:
        """True where the server learns sums over the clients, and of no single client.

        It then sees no client's upload, figures or classes.
        """
        return self.secagg


class NoiseSettings(Table):
    """Noise of papers' experiments, which guarantees nothing (`privacy/release.py`)."""

    prototype_noise: str = option(
        choices=("none",), or_like=NOISE, or_words="gaussian S P, laplace S P"
    )
    image_noise: str = option(
        choices=("none",), or_like=NOISE, or_words="gaussian S P, laplace S P"
    )
    gradient_noise: float = option(minimum=0)


class MachineSettings(Table):
    """The machine a client runs on."""

    device: str = option(
        choices=("auto", "cpu", "cuda", "mps"),
        or_like=DEVICE,
        or_words="cuda:N, xpu",
        affects="machine",
    )
    precision: str = option(choices=("fp32", "tf32"), affects="machine")
    threads: int = option(minimum=0, affects="machine")
    state_dir: str = option(affects="machine")


class StudySettings(Table):
    """The study that a run belongs to (`experiment/study.py`)."""

    study: str = option(affects="waiting")
    study_sites: str = option(affects="waiting")
    study_until: str = option(affects="waiting")
    study_runs: int = option(minimum=0, affects="waiting")
    study_purpose: str = option(affects="waiting")
    study_by: str = option(affects="waiting")
    study_signature: str = option(affects="waiting")


@dataclass(frozen=True)
class Sections:
    """The settings of a run that no algorithm owns."""

    run: RunSettings
    federation: FederationSettings
    bounds: BoundsSettings
    data: DataSettings
    model: ModelSettings
    training: TrainingSettings
    privacy: PrivacySettings
    noise: NoiseSettings
    machine: MachineSettings
    study: StudySettings


SECTIONS: dict[str, type] = get_type_hints(Sections)


def keys_that_change(*kinds: Affects) -> frozenset[str]:
    """The keys of the general settings that change one of these.

    Those of algorithms change the result.
    """
    keys = set()
    for section in SECTIONS.values():
        for field in fields(section):
            if field.metadata["affects"] in kinds:
                keys.add(key_of(field.name))
    return frozenset(keys)


def protections(settings: Mapping[str, Scalar]) -> list[str]:
    """A line for people on each protection that the settings ask for; a site may add to them."""
    lines = []
    least = settings.get("min-class-samples", 1)
    if least != 1:
        fewest_tested = max(FEWEST_TESTED, int(least))
        lines.append(
            "small classes: nothing is sent of classes and clusters of fewer than"
            f" {least} training samples, nor figures of fewer than {fewest_tested} test samples;"
            " metrics are of classes of as many"
        )
    if settings.get("secagg", False):
        lines.append(
            "secure aggregation: the server learns sums over the clients, not one client's upload,"
            " figures or classes; no bound on single sites (liars) can act"
        )
    if settings.get("dp", "none") != "none":
        lines.append(
            f"differential privacy: at most ε = {settings['dp-epsilon']},"
            f" δ = {settings['dp-delta']} for each sample of a client, of all that it sends,"
            " with noise: weights, prototypes, class moments, numbers of right predictions;"
            " not covered: numbers of samples, times of replies;"
            " ε ≤ in a line is planned, of the client that the run costs most; where clients tell"
            " what their own ledgers count for this run, the largest stands beside it"
        )
    return lines
