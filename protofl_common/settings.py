"""The settings of a run: one frozen dataclass per section, built from Flower's flat ``run_config``.

``Settings.from_run_config`` checks every key at once and raises one :class:`SettingsError` with a line per problem.
A client's ``--node-config`` may override some of them (`NODE_OVERRIDES`): facts about its own site.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protofl_common.backbones.names import EMBEDDED, parse_backbones
from protofl_common.catalog import CATALOG, MERGINGS, Algorithm
from protofl_common.datasets.names import DATASETS, OTHER_DATASETS, PARTITIONS
from protofl_common.insight import LEVELS
from protofl_common.models.groups import ARCHITECTURES, GROUPS, HEADS, ORTHOGONAL_SHARED
from protofl_common.options import Scalar, SettingsError, keys_of, option, read_section, unknown_keys
from protofl_common.python_names import PYTHON_NAME

NODE_OVERRIDES = ("data-dir", "arch", "device", "state-dir")
NODE_KEYS = ("site-name", "partition-id", "num-partitions", "domain", "insight", *NODE_OVERRIDES)
"""What a site may say of itself with ``--node-config``; ``insight`` is true or false there (`client_app/site.py`)."""
DEVICES = re.compile(r"auto|cpu|mps|(cuda|xpu)(:\d+)?")


@dataclass(frozen=True)
class RunSettings:
    """The run itself."""

    algo: str = option(choices=CATALOG)
    rounds: int = option(minimum=1)
    seed: int = option(minimum=0)
    run_name: str = option()
    out_dir: str = option()
    resume: bool = option()
    report: bool = option()
    insight: str = option(choices=LEVELS)
    tensorboard: bool = option()


@dataclass(frozen=True)
class FederationSettings:
    """Who takes part, and how long the server waits."""

    num_clients: int = option(minimum=0)
    participation: float = option(above=0, maximum=1)
    min_replies: int = option(minimum=1)
    join_timeout: float = option(above=0)
    round_timeout: float = option(above=0)
    evaluate_every: int = option(minimum=1)
    max_prototype_norm: float = option(above=0)
    max_prototypes_per_class: int = option(minimum=1)
    max_norm_ratio: float = option(above=1)
    merging: str = option(choices=MERGINGS)
    trim_fraction: float = option(minimum=0, maximum=0.49)


@dataclass(frozen=True)
class DataSettings:
    """Which data, and how they are divided among the clients."""

    dataset: str = option(choices=DATASETS, or_like=OTHER_DATASETS, or_words="MODULE:FUNCTION of your own")
    data_dir: str = option()
    download: bool = option()
    cache_dir: str = option()
    image_size: int = option(minimum=0)
    text_length: int = option(minimum=1)
    classes: str = option()
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
    test_from: str = option(choices=("split", "official", "official-own", "official-all"))
    train_fraction: float = option(above=0, maximum=0.99)
    positive_rate: float = option(above=0, maximum=1)


@dataclass(frozen=True)
class ModelSettings:
    """Which networks."""

    models: str = option(choices=GROUPS, or_like=PYTHON_NAME, or_words="MODULE:CLASS of your own", several=True)
    arch: str = option(choices=("", *ARCHITECTURES), or_like=PYTHON_NAME, or_words="MODULE:CLASS of your own")
    feature_dim: int = option(minimum=1)
    head: str = option(choices=(*HEADS, ORTHOGONAL_SHARED))
    initial_weights: str = option(choices=("own", "shared"))
    backbones: str = option()


@dataclass(frozen=True)
class TrainingSettings:
    """Local training and evaluation."""

    local_epochs: int = option(minimum=1)
    batch_size: int = option(minimum=1)
    drop_last: bool = option()
    optimizer: str = option(choices=("sgd", "adam"))
    lr: float = option(above=0)
    momentum: float = option(minimum=0, maximum=0.9999)
    weight_decay: float = option(minimum=0)
    keep_optimizer: bool = option()
    eval_batch_size: int = option(minimum=1)
    predict_among: str = option(choices=("all", "own"))
    pu_weight: float = option(minimum=0)
    pu_risk: str = option(choices=("unbiased", "non-negative"))


@dataclass(frozen=True)
class MachineSettings:
    """The machine a client runs on."""

    device: str = option()
    threads: int = option(minimum=0)
    state_dir: str = option()


@dataclass(frozen=True)
class Settings:
    """Everything a run needs to know; ``algorithm`` holds the settings of the chosen algorithm only."""

    run: RunSettings
    federation: FederationSettings
    data: DataSettings
    model: ModelSettings
    training: TrainingSettings
    machine: MachineSettings
    algorithm: Any

    @property
    def row(self) -> Algorithm:
        """The catalog's row of the chosen algorithm."""
        return CATALOG[self.run.algo]

    @property
    def backbones(self) -> tuple[str, ...]:
        """Names of the frozen backbones in front of every client's model; () for none."""
        named = self.model.backbones
        if named == "auto":
            return tuple(EMBEDDED) if self.row.frozen_backbones else ()
        return () if named == "none" else parse_backbones(named)

    @classmethod
    def from_run_config(
        cls, run_config: Mapping[str, Scalar], node_config: Mapping[str, Scalar] | None = None
    ) -> Settings:
        """Check every key of ``run_config`` (and a node's overrides of it) and build the settings.

        Raises
        ------
        SettingsError
            With one line for each unknown key (of the node's, too), missing key, wrong type, and value out of range
            or not among its choices.
        """
        config = dict(run_config)
        node = node_config or {}
        config |= {key: node[key] for key in NODE_OVERRIDES if key in node}
        choices = f"choose from {', '.join(NODE_KEYS)}"
        problems = [f"node-config: {line}; {choices}" for line in unknown_keys(node, NODE_KEYS)]
        problems += unknown_keys(config, _likely_first(str(config.get("algo"))))
        sections = {name: read_section(section, config, problems) for name, section in SECTIONS.items()}
        tables = {
            name: read_section(row.settings, config, problems, prefix=f"{name}.") for name, row in CATALOG.items()
        }
        problems += _run_problems(sections["run"])
        problems += _device_problems(sections["machine"])
        problems += _backbone_problems(sections["model"])
        problems += _merging_problems(config)
        if problems:
            raise SettingsError("\n".join(problems))
        return cls(**sections, algorithm=tables[str(config["algo"])])  # type: ignore[arg-type]


def _run_problems(run: RunSettings | None) -> list[str]:
    if run is None:
        return []
    if Path(run.run_name).name != run.run_name or run.run_name.startswith("."):
        return [f"run-name = {run.run_name!r}: must be a plain folder name, without slashes"]
    if run.resume and not run.run_name:
        return ["resume = true: run-name must name the run that shall go on"]
    return []


def _device_problems(machine: MachineSettings | None) -> list[str]:
    if machine is None or DEVICES.fullmatch(machine.device):
        return []
    return [f"device = {machine.device!r}: choose auto, cpu, cuda, cuda:N, or PyTorch's mps or xpu"]


def _backbone_problems(model: ModelSettings | None) -> list[str]:
    if model is None or model.backbones in ("auto", "none"):
        return []
    try:
        parse_backbones(model.backbones)
    except ValueError as error:
        return [f"backbones = {model.backbones!r}: {error}; or auto, or none"]
    return []


def _merging_problems(config: Mapping[str, Scalar]) -> list[str]:
    algo, merging = config.get("algo"), config.get("merging")
    if merging == "mean" or merging not in MERGINGS or algo not in CATALOG:
        return []
    if CATALOG[str(algo)].averages_prototypes:
        return []
    able = ", ".join(name for name, row in CATALOG.items() if row.averages_prototypes)
    return [f"merging = {merging!r}: {algo} does not average prototypes; choose mean, or an algo of {able}"]


SECTIONS: dict[str, type] = {
    "run": RunSettings,
    "federation": FederationSettings,
    "data": DataSettings,
    "model": ModelSettings,
    "training": TrainingSettings,
    "machine": MachineSettings,
}


def known_keys() -> list[str]:
    """Every key that the run configuration holds, algorithm tables included, in the order of ``pyproject.toml``."""
    general = [key for section in SECTIONS.values() for key in keys_of(section)]
    return general + [key for name, row in CATALOG.items() for key in keys_of(row.settings, f"{name}.")]


def _likely_first(algo: str) -> list[str]:
    """`known_keys`, those of other algorithms last: a key that nobody knows was rather meant for the chosen one."""
    return sorted(known_keys(), key=lambda key: "." in key and not key.startswith(f"{algo}."))


def default_run_config() -> dict[str, Scalar]:
    """The defaults, read from ``[tool.flwr.app.config]`` and flattened as Flower does (``fedproto.lambda``)."""
    pyproject = Path(__file__).resolve().parents[1] / "pyproject.toml"
    return flatten(tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"])


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """Nested TOML tables -> dotted keys."""
    flat: dict[str, Scalar] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def to_run_config(settings: Settings) -> dict[str, Scalar]:
    """The inverse of ``from_run_config``: the keys of the run, without those of algorithms not chosen."""
    flat: dict[str, Scalar] = {}
    for name, section in SECTIONS.items():
        flat |= dict(zip(keys_of(section), dataclasses.astuple(getattr(settings, name)), strict=True))
    prefix = f"{settings.run.algo}."
    keys = keys_of(type(settings.algorithm), prefix)
    return flat | dict(zip(keys, dataclasses.astuple(settings.algorithm), strict=True))
