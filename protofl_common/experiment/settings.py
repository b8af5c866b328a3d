"""The settings of a run: one frozen dataclass per section, built from Flower's flat ``run_config``.

A client's ``--node-config`` may override some of them (`NODE_OVERRIDES`): facts about its own site. On such a site the
run configuration chooses no folders, and nothing that its operator does not allow (`node.py`).
"""

import math
import pickle
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Self

import numpy as np

from protofl_common.basics.files import digest
from protofl_common.basics.seeding import derive_seed
from protofl_common.basics.text import composed, is_plain_name, names_in
from protofl_common.config.architectures import PROJECTION, architecture_of
from protofl_common.config.backbones import EMBEDDED, parse_backbones
from protofl_common.config.options import (
    Scalar,
    SettingsError,
    Values,
    did_you_mean,
    flatten,
    homeless,
    keys_of,
    read_section,
    unknown_keys,
)
from protofl_common.config.python_names import is_python_name
from protofl_common.config.sections import SECTIONS, TRACKERS, Sections
from protofl_common.experiment import study
from protofl_common.experiment.catalog import CATALOG, Algorithm, FedPCLHparams, Hparams, algorithm_named, read_hparams
from protofl_common.experiment.node import NODE_KEYS, REQUIRE_SECAGG, TABLE, instead, is_site, refusals, required_dp
from protofl_common.privacy.plan import Plan, plan_of
from protofl_common.runs.evaluation_metrics import BALANCED, metric_names
from protofl_common.runs.folder import KINDS
from protofl_common.wire.schema import Declared, Exchange, vectors_in, weights_in

OF_PARTITIONS = {  # setting -> the partitions that read it
    "alpha": ("dirichlet", "balanced-dirichlet", "label-shift", "feature-label-shift"),
    "classes-per-client": ("pathological",),
    "clients-per-domain": ("feature-shift", "feature-label-shift"),
    **dict.fromkeys(("ways", "ways-stdev", "shots", "shots-stdev"), ("n-way-k-shot",)),
}
WITH_SECAGG: dict[str, tuple[Scalar, str]] = {  # key -> what it must be unless it has its default, and why
    "liars": (0, "hides the single uploads that it needs"),
    "merging": ("mean", "hides the single uploads that it needs"),
    "max-update-ratio": (0.0, "hides the single uploads that it needs"),
    "gaussian.revocable": (False, "hides what single sites send; to take one out, make the run again without it"),
    "gaussian.start-from": ("", "hides what single sites send; to add one, make the run again with it"),
    "participation": (1.0, "forbids sums over different clients, whose difference shows single uploads"),
    "drop-rate": (0.0, "forbids sums over different clients, whose difference shows single uploads"),
    "new-clients": (0, "hides the single figures that it needs"),
    "new-domain": ("", "hides the single figures that it needs"),
}
WITH_DP: dict[str, tuple[Scalar, str]] = {  # what privacy cannot cover: key -> its value then, and why
    "positive-rate": (1.0, "terms of unlabelled samples compare samples"),
    "local-steps": (0, "the privacy ledger counts epochs"),
    "impute": ("none", "values in the place of missing ones are made of all samples; fill them in yourself"),
    "standardise": ("auto", "its mean and deviation are made of all samples"),
    "gradient-noise": (0.0, "the noise follows from dp-epsilon"),
    "metrics": ("", "only numbers of right predictions have noise"),
    "gaussian.priors": ("global", "the client's own class shares, without noise, would shape its predictions"),
    "new-clients": (0, "the privacy ledger counts rounds, and they train after the last one"),
    "new-domain": ("", "the privacy ledger counts rounds, and its clients train after the last one"),
    "predict-among": ("all", "predictions would show which classes a client has"),
    "baselines": ("", "each baseline would spend ε once more on the same samples; make it a run of its own"),
}


@dataclass(frozen=True)
class Settings(Sections):
    """Everything a run needs to know; ``hparams`` are those of the chosen algorithm."""

    hparams: Hparams
    given: Values = field(default_factory=dict, compare=False, repr=False)  # as the run gave it

    @property
    def row(self) -> Algorithm:
        return algorithm_named(self.run.algo)

    @property
    def exchange(self) -> Exchange:
        return self.hparams.exchange(self.row.exchange)

    def due_up(self, round_number: int) -> Declared:
        """Return the entries that a client sends after training in this round; both halves ask here."""
        due = self.hparams.due(round_number, self.run.rounds)
        return {name: entry for name, entry in self.exchange.up.items() if due or name != "prototypes"}

    def evaluates(self, round_number: int) -> bool:
        """Return whether clients evaluate before they train in this round; both halves ask here."""
        return (round_number - 1) % self.federation.evaluate_every == 0

    def lr_in(self, round_number: int) -> float:
        """Return the learning rate of a round, counted from 1 (``lr-schedule``)."""
        training, passed = self.training, max(0, round_number - 1)
        factors = {"cosine": (1 + math.cos(math.pi * passed / self.run.rounds)) / 2}
        factors["step"] = training.lr_decay ** (passed // training.lr_step)
        return training.lr * factors.get(training.lr_schedule, 1)

    @property
    def starts_alike(self) -> bool:
        """Return whether clients of one architecture begin with equal weights; by default where they receive some."""
        start, received = self.model.initial_weights, weights_in(self.exchange.down).values()
        return start == "shared" or (start == "auto" and any(entry.of == "model" for entry in received))

    @property
    def hides_samples(self) -> bool:
        """Return whether clients hide their numbers of training samples too; with `dp` the budget needs them."""
        return self.privacy.sums_only and self.privacy.dp == "none"

    @property
    def named_sites(self) -> dict[str, str]:
        """Return the sites that may take part, each with its key; {} where the run's study names none."""
        return study.keys_of_sites(self.study.study_sites)

    @property
    def baselines(self) -> tuple[str, ...]:
        return names_in(self.run.baselines)

    @property
    def metrics(self) -> tuple[str, ...]:
        return metric_names(self.run.metrics)

    @property
    def reported_metrics(self) -> tuple[str, ...]:
        """Return them with balanced accuracy, which simulated clients may add where the server sees their figures."""
        hidden = self.privacy.sums_only or self.privacy.dp != "none"
        return self.metrics if hidden or BALANCED in self.metrics else (*self.metrics, BALANCED)

    @property
    def backbones(self) -> tuple[str, ...]:
        """Names of the frozen backbones in front of every client's model; () for none."""
        if (named := self.model.backbones) == "auto":
            return tuple(EMBEDDED) if self.row.frozen_backbones else ()
        return () if named == "none" else parse_backbones(named)

    def new_clients(self, clients: int) -> set[int]:
        """Return the numbers of those, of so many that divide a data set, that never train (``new-clients``)."""
        generator = np.random.default_rng(derive_seed(self.run.seed, "new-clients"))
        return set(generator.choice(clients, min(self.federation.new_clients, clients), replace=False).tolist())

    def plan(self, samples: int) -> Plan | None:
        """How the messages of a client with so many training samples are made private; None where they are not."""
        if self.privacy.dp == "none":
            return None
        rounds, tables = self.run.rounds, sum(entry.of_classes for entry in self.exchange.up.values())
        of_rounds = tuple(tables * self.hparams.due(number, rounds) for number in range(1, rounds + 1))
        training, every = self.training, self.federation.evaluate_every
        epochs = 0 if self.row.one_shot else training.local_epochs
        return plan_of(self.privacy, samples, training.batch_size, epochs, of_rounds, every)

    def architecture(self, client: int, named: str = "") -> str:
        """Return the architecture: the projection behind frozen backbones, else the one ``named``, else the group's."""
        return PROJECTION if self.backbones else named or architecture_of(self.model.models, client)

    @classmethod
    def from_run_config(cls, run_config: Values, node_config: Values | None = None) -> Self:
        """Check every key of ``run_config`` (and a node's overrides of it) and build the settings, once per process.

        SettingsError has a line for each unknown key (of the node's, too), missing key, wrong type, and value out of
        range or not among its choices; and where there is none, for each value that does not fit the others.
        """
        node = node_config if node_config and is_site(node_config) else {}  # numbers of partitions change nothing
        if run_config.get("algo") not in CATALOG:  # a row of another package may change while it is developed
            return cls._read(run_config, node)
        return cls._read_once(pickle.dumps((dict(run_config), dict(node))))  # in which 1, 1.0 and True differ

    @classmethod
    @lru_cache(maxsize=16)
    def _read_once(cls, configs: bytes) -> Self:
        return cls._read(*pickle.loads(configs))

    @classmethod
    def _read(cls, given: Values, node: Values) -> Self:
        config = {**given, **instead(node, _defaults())}
        config |= {key: composed(of) for key in ("classes", "new-domain", *TABLE) if type(of := config.get(key)) is str}
        choices = f"choose from {', '.join(NODE_KEYS)}"
        problems = [f"node-config: {line}; {choices}" for line in unknown_keys(node, NODE_KEYS)]
        likely = [key for key in known_keys() if key.rpartition(".")[0] in ("", config.get("algo"))]
        problems += [*unknown_keys(config, known_keys(), likely), *homeless(config)]
        denied = refusals(node, config, given) if node else []
        late = list[str]()
        tables = {name: read_section(row.hparams, config, late, prefix=f"{name}.") for name, row in CATALOG.items()}
        hparams = None if denied else _hparams(config, tables, problems)  # the package of a denied run is not imported
        sections = {name: read_section(section, config, problems) for name, section in SECTIONS.items()}
        problems += late
        if hparams and not problems:
            settings = cls(**sections, hparams=hparams, given=given)  # type: ignore[arg-type]
            problems += [line for rule in RULES for line in rule(settings)]
        if problems or denied:
            raise SettingsError("\n".join(problems + denied))
        return settings


def check_chosen(chosen: Values, *runs: Settings) -> None:
    """SettingsError with a line for each ``chosen`` setting of an algorithm or a partition that no run has."""
    acting, reads = {""}, dict[str, str]()
    for settings in runs:
        algo, keys = settings.run.algo, keys_of(type(settings.hparams))
        own = [f"{algo}.{key}" if algo in CATALOG else f"{key} in hparams" for key in keys]
        reads[algo] = ", ".join(own) or "no settings of its own"
        acting |= {algo, *settings.baselines}
    why = f"has no effect on {'; on '.join(f'{algo}, which reads {own}' for algo, own in reads.items())}"
    problems = [f"{key} = {chosen[key]!r}: {why}" for key in chosen if key.rpartition(".")[0] not in acting]
    partitions = {settings.data.partition for settings in runs}
    for key, read_by in OF_PARTITIONS.items():
        if key in chosen and not partitions & {*read_by}:
            none = f"has no effect on partition = {', '.join(sorted(partitions))}; choose {' or '.join(read_by)}"
            problems.append(f"{key} = {chosen[key]!r}: {none}")
    if problems:
        raise SettingsError("\n".join(problems))


def digest_of(run_config: Values) -> str:
    """16 hexadecimal digits that stand for a run configuration, but for the server's folder, which is no site's."""
    return digest(*sorted(item for item in run_config.items() if item[0] != "out-dir"))


def baseline_config(run_config: Values, algo: str) -> dict[str, Scalar]:
    """The run configuration of a run's baseline: another algorithm, no ``callback``, all else that applies alike."""
    merging: dict[str, Scalar] = {} if CATALOG[algo].exchange.up else {"merging": "mean", "max-update-ratio": 0.0}
    return {**run_config, "algo": algo, "hparams": "", "baselines": "", "callback": "", **merging}


def baselines_of(settings: Settings, run_config: Values, node: Values | None = None) -> dict[str, Settings]:
    baselines = {}
    for algo in settings.baselines:
        try:
            baselines[algo] = Settings.from_run_config(baseline_config(run_config, algo), node)
        except SettingsError as error:
            lines = str(error).splitlines()
            raise SettingsError("\n".join(f"baselines = {algo!r}: {line}" for line in lines)) from error
    return baselines


def meeting_demands(node: Values) -> dict[str, Scalar]:
    """Return the settings with which a run meets what a site demands of its protections."""
    config: dict[str, Scalar] = {}
    if limits := required_dp(node):
        config |= {"dp": "sample", "dp-epsilon": limits[0], "dp-delta": limits[1]}
    if node.get(REQUIRE_SECAGG):
        config |= {key: only for key, (only, _) in WITH_SECAGG.items()} | {"secagg": True}
    return config


def _hparams(config: Values, tables: Mapping[str, Hparams | None], problems: list[str]) -> Hparams | None:
    algo, text = str(config.get("algo")), str(config.get("hparams", ""))
    try:
        row = algorithm_named(algo)
        if algo in CATALOG and text:
            raise SettingsError(f"hparams = {text!r}: only for algorithms of other packages; set {algo}.KEY instead")
        return tables[algo] if algo in CATALOG else read_hparams(row, text)
    except SettingsError as error:
        problems.append(str(error))
        return None


def _run_problems(settings: Settings) -> Iterator[str]:
    run = settings.run
    if run.run_name and not is_plain_name(run.run_name):
        yield f"run-name = {run.run_name!r}: must be a plain folder name, without slashes"
    if run.callback and run.callback not in TRACKERS and not is_python_name(run.callback):
        yield f"callback = {run.callback!r}: must be {', '.join(TRACKERS)}, or module:function"
    for name in settings.baselines:
        if name not in CATALOG:
            yield f"baselines = {name!r}: choose among {', '.join(CATALOG)}{did_you_mean(name, CATALOG)}"
    try:
        metric_names(run.metrics)
    except SettingsError as error:
        yield str(error)
    if run.resume and not run.run_name:
        yield "resume = true: run-name must name the run that shall go on"


def _stopping_problems(settings: Settings) -> Iterator[str]:
    run, last = settings.run, settings.hparams.needs_last_round
    kind, slash, metric = run.early_stopping_metric.partition("/")
    if kind and (kind not in KINDS or (slash and metric.partition("/")[0] not in names_in(run.metrics))):
        choices = "head, prototype, or one of the setting metrics, such as head/auc with metrics = 'auc'"
        yield f"early-stopping-metric = {run.early_stopping_metric!r}: choose {choices}"
    if run.early_stopping and last:
        asked = f"{run.algo} does a part of its work in the last round only; set {last}"
        yield f"early-stopping = {run.early_stopping}: {asked}"


def _upload_problems(settings: Settings) -> Iterator[str]:
    algo, row = settings.run.algo, settings.row
    why = f"the row of {algo} does not declare that its server merges by it"
    if not row.exchange.up:
        why = f"in {algo} clients send nothing that a server could merge"
    needed: dict[str, tuple[Scalar, str]] = {"merging": ("mean", why), "max-update-ratio": (0.0, why)}
    needed |= {} if algo in CATALOG else {"liars": (0, why)}  # what it bounds in one of these, its page says
    for setting, only, _ in () if "merging" in row.supports else _changed(settings, needed):
        yield f"{setting}: {why}; choose {only}"
    noise, sent = settings.noise.prototype_noise, vectors_in(settings.exchange.up).values()
    if noise != "none" and any(entry.probabilities for entry in sent):
        yield f"prototype-noise = {noise!r}: {algo} sends class probabilities, which noise would make none; choose none"


def _backbone_problems(settings: Settings) -> Iterator[str]:
    named, algo, augment = settings.model.backbones, settings.run.algo, settings.training.augment
    sent = [entry.words for entry in settings.exchange.up.values() if entry.of_frozen]
    try:
        frozen = settings.backbones
    except ValueError as error:
        yield f"backbones = {named!r}: {error}; or auto, or none"
        return
    if sent and named == "none":
        yield f"backbones = 'none': {algo} sends {sent[0]}; choose auto, or name backbones"
    if augment != "none" and frozen:
        yield f"augment = {augment!r}: frozen backbones see every image once, as it is; set augment to none"


def _dp_problems(settings: Settings) -> Iterator[str]:
    if settings.privacy.dp == "none":
        if (epsilon := settings.privacy.dp_epsilon) != _defaults()["dp-epsilon"]:
            yield f"dp-epsilon = {epsilon}: nothing is private with dp = 'none'; set dp = 'sample', or leave it out"
        return
    algo, able = settings.run.algo, ", ".join(_able(settings))
    for setting, only, why in _changed(settings, WITH_DP):
        yield f"dp = 'sample': {setting}: {why}; set {only!r}"
    if algo not in CATALOG:  # nobody here has read how it trains, and a row's word for it proves nothing
        yield f"dp = 'sample': {algo} is of another package, whose steps are not covered; choose among {able}"
    elif uncovered := [name for name in settings.exchange.up if name not in settings.row.private]:
        yield f"dp = 'sample': {algo} sends {', '.join(uncovered)}, which it does not cover; choose among {able}"
    if isinstance(settings.hparams, FedPCLHparams) and settings.hparams.loss == "supcon":
        yield "dp = 'sample': fedpcl.loss = 'supcon' compares samples, whose gradients are then no sample's own"
    least, whole = settings.privacy.min_class_samples, any(entry.of_all for entry in settings.exchange.up.values())
    if least > 1 and whole:
        yield f"dp = 'sample': min-class-samples = {least}: {algo} sends sums over all classes; choose 1"


def _secagg_problems(settings: Settings) -> Iterator[str]:
    if not settings.privacy.secagg:
        return
    algo, training, rounds = settings.run.algo, settings.training, settings.run.rounds
    for setting, only, why in _changed(settings, WITH_SECAGG):
        yield f"{setting}: secagg = true {why}; choose {only!r}"
    same = "the same in every round, and the sums' differences show single uploads"
    if training.local_epochs == training.local_steps == 0 and rounds != 1:
        yield f"local-epochs = 0: without training a client sends {same}; with secagg choose at least 1, or rounds = 1"
    if (last := settings.lr_in(rounds)) <= 1e-7 and rounds != 1:  # next to nothing in float32
        yield f"lr = {training.lr}: in steps of {last:g} a client sends {same}; with secagg end above 1e-7"
    if settings.row.one_shot and rounds != 1:
        yield f"rounds = {rounds}: {algo} sends {same}; with secagg = true choose 1"
    if "recall" in names_in(settings.run.metrics):
        yield "metrics = 'recall': it tells which classes a client has, and secagg = true hides that"
    if why := settings.row.needs_single_uploads(settings.exchange):
        choices = f"{', '.join(_able(settings))}, or fedpcl with fedpcl.prototypes = 'global'"
        own = "" if algo in CATALOG else "; or set averages_prototypes and supports in its row (docs/extend.md)"
        yield f"secagg = true: {algo} needs single uploads, for {why}; choose an algo of {choices}{own}"


RULES = (  # what values must mean together
    *(_upload_problems, _dp_problems, _run_problems, lambda settings: study.problems(settings.study)),
    *(_stopping_problems, _backbone_problems, _secagg_problems),
)


def _changed(settings: Settings, needed: Mapping[str, tuple[Scalar, str]]) -> Iterator[tuple[str, Scalar, str]]:
    """``key = value``, what is needed and why, of settings that have neither this value nor their default."""
    values = to_run_config(settings)
    for key, (only, why) in needed.items():
        if values.get(key, only) not in (only, _defaults()[key]):
            yield f"{key} = {values[key]!r}", only, why


def _able(settings: Settings) -> Iterator[str]:
    for name, row in CATALOG.items():
        covered = settings.privacy.dp == "none" or set(row.exchange.up) <= set(row.private)
        if covered and not (settings.privacy.secagg and row.needs_single_uploads(row.exchange)):
            yield name


@cache
def known_keys() -> list[str]:
    """Every key that the run configuration holds, algorithm tables included, in the order of ``pyproject.toml``."""
    general = [key for section in SECTIONS.values() for key in keys_of(section)]
    return general + [key for name, row in CATALOG.items() for key in keys_of(row.hparams, f"{name}.")]


def default_run_config() -> dict[str, Scalar]:
    """The defaults, read from ``[tool.flwr.app.config]`` and flattened as Flower does (``fedproto.lambda``)."""
    return dict(_defaults())


@cache
def _defaults() -> dict[str, Scalar]:
    pyproject = tomllib.loads((app_folder() / "pyproject.toml").read_text(encoding="utf-8"))
    return flatten(pyproject["tool"]["flwr"]["app"]["config"])


def app_folder() -> Path:
    """The Flower app: the folder of this package, in a checkout and in a bundle; in a wheel, the copy that it holds."""
    package = Path(__file__).resolve().parents[1]
    return package / "app" if (package / "app").is_dir() else package.parent


def with_halves() -> None:
    """Let Python find ``client_app`` and ``server_app``, which a wheel holds as data."""
    if (folder := str(app_folder())) not in sys.path:
        sys.path.append(folder)


def to_run_config(settings: Settings) -> dict[str, Scalar]:
    """The inverse of ``from_run_config``: the keys of the run, without those of algorithms not chosen."""
    parts = [("", getattr(settings, name)) for name in SECTIONS]
    if settings.run.algo in CATALOG:  # those of other packages stand in the setting hparams
        parts.append((f"{settings.run.algo}.", settings.hparams))
    keyed = (zip(keys_of(type(part), prefix), vars(part).values(), strict=True) for prefix, part in parts)
    return {key: value for pairs in keyed for key, value in pairs}
