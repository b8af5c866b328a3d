"""The settings of a run: one frozen dataclass per section, built from Flower's flat ``run_config``.

A client's ``--node-config`` may override some of them (`NODE_OVERRIDES`): facts about its own site.
On such a site the run configuration chooses no folders, and nothing that its operator does not
allow (`node.py`).
"""

import json
import math
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from protofl_common.algorithms.base import Algorithm, Hparams
from protofl_common.basics.files import digest
from protofl_common.basics.seeding import derive_seed
from protofl_common.basics.text import is_plain_name, with_composed_letters
from protofl_common.config.architectures import PROJECTION, architecture_of
from protofl_common.config.backbones import EMBEDDED, parse_backbones
from protofl_common.config.datasets import partitions_that_read
from protofl_common.config.lists import names_in
from protofl_common.config.options import (
    TYPES,
    Needed,
    Scalar,
    SettingsError,
    Values,
    did_you_mean,
    folders_of_unknown_users,
    keys_of,
    read_section,
    unknown_keys,
)
from protofl_common.config.python_names import allowing, is_python_name
from protofl_common.config.sections import SECTIONS, TRACKERS, Sections
from protofl_common.experiment import study
from protofl_common.experiment.catalog import (
    CATALOG,
    algorithm_named,
    options_of_a_run,
    read_hparams,
)
from protofl_common.experiment.node import (
    ACCEPT_WEIGHTS,
    NODE_KEYS,
    REQUIRE_SECAGG,
    TABLE,
    allowed_by,
    is_site,
    refusals,
    required_dp,
    settings_of_site,
)
from protofl_common.privacy.plan import Plan, plan_of
from protofl_common.tasks import TASKS, Task
from protofl_common.tasks.metrics import KINDS, metric_names
from protofl_common.wire.schema import Declared, Exchange, vectors_in, weights_in


def needed_with(protection: Literal["with_secagg", "with_dp"]) -> dict[str, Needed]:
    """Return, by key, the value that a setting must have under a protection, and why.

    Settings that may have any value under that protection are left out.
    """
    needed = {key: setting.metadata[protection] for key, setting in options_of_a_run().items()}
    return {key: value for key, value in needed.items() if value is not None}


@dataclass(frozen=True)
class Settings(Sections):
    """Everything a run needs to know; ``hparams`` are those of the chosen algorithm."""

    hparams: Hparams
    given: Values = field(default_factory=dict, compare=False, repr=False)  # as the run gave it

    @property
    def row(self) -> Algorithm:
        return algorithm_named(self.run.algo)

    @cached_property
    def exchange(self) -> Exchange:
        exchange = self.hparams.exchange(self.row.exchange)
        return exchange.with_vectors() if self.takes_vectors else exchange

    def due_up(self, round_number: int) -> Declared:
        """Return what a client uploads after training in this round: the entries by name.

        An algorithm may leave prototypes out of some rounds (`Hparams.due`). The client packs
        these entries, and the server accepts no others.
        """
        entries = self.exchange.up
        if self.hparams.due(round_number, self.run.rounds):
            return dict(entries)
        return {name: entry for name, entry in entries.items() if name != "prototypes"}

    def evaluates(self, round_number: int) -> bool:
        """True if clients evaluate before they train in this round; rounds count from 1.

        They do in the first round, and then every ``evaluate-every`` rounds.
        """
        return (round_number - 1) % self.federation.evaluate_every == 0

    def lr_in(self, round_number: int) -> float:
        """Return the learning rate of a round by ``lr-schedule``; rounds count from 1."""
        training = self.training
        # 0 also in "round 0", in which a site introduces itself
        rounds_before = max(0, round_number - 1)
        if training.lr_schedule == "cosine":  # half a wave: from lr in round 1 towards 0 at the end
            return training.lr * ((1 + math.cos(math.pi * rounds_before / self.run.rounds)) / 2)
        if training.lr_schedule == "step":
            return training.lr * training.lr_decay ** (rounds_before // training.lr_step)
        return training.lr

    @property
    def starts_alike(self) -> bool:
        """True if clients of one architecture begin with equal weights (``initial-weights``).

        With "auto" they do if the server sends them weights for their models.
        """
        start = self.model.initial_weights
        if start != "auto":
            return start == "shared"
        return any(entry.of == "model" for entry in weights_in(self.exchange.down).values())

    @property
    def hides_sample_counts(self) -> bool:
        """True if the server does not learn how many training samples each client has.

        Secure aggregation hides them, except with ``dp``, whose budget is computed from them.
        """
        return self.privacy.sums_only and self.privacy.dp == "none"

    @property
    def named_sites(self) -> dict[str, str]:
        """Return the public keys of the sites that may take part, by name; {} if any site may."""
        return study.keys_of_sites(self.study.study_sites)

    @property
    def baselines(self) -> tuple[str, ...]:
        return names_in(self.run.baselines)

    @property
    def metrics(self) -> tuple[str, ...]:
        return metric_names(self.run.metrics, self.task.metric_choices())

    @property
    def task(self) -> type[Task]:
        return TASKS[self.data.task]

    @property
    def reported_metrics(self) -> tuple[str, ...]:
        """Return the metrics that a client may report: `metrics`, and perhaps the task's usual one.

        The usual metric, for single labels balanced accuracy, need not be asked for: a client may
        add it, unless secure sums or noise protect its own figures.
        """
        has_protected_figures = self.privacy.sums_only or self.privacy.dp != "none"
        usual = self.task.usual_metric
        if has_protected_figures or usual in self.metrics:
            return self.metrics
        return (*self.metrics, usual)

    @property
    def backbones(self) -> tuple[str, ...]:
        """Return the names of the frozen backbones in front of every client's model.

        "auto" means the embedded ones for an algorithm of frozen features, and else none.
        """
        setting = self.model.backbones
        if setting == "auto" and self.row.frozen_backbones:
            return tuple(EMBEDDED)
        if setting in ("auto", "none"):
            return ()
        return parse_backbones(setting)

    @cached_property
    def takes_vectors(self) -> bool:
        """True if the samples are feature vectors that the clients have computed themselves.

        They are if ``backbones`` is "none" with an algorithm that works on frozen features.
        """
        is_of_features = any(entry.of_features for entry in self.row.exchange.up.values())
        return self.model.backbones == "none" and is_of_features

    def new_clients(self, num_partitions: int) -> set[int]:
        """Draw ``new-clients`` of the partitions: their clients never train.

        The draw depends on the run's seed alone, so server and clients draw the same.
        """
        generator = np.random.default_rng(derive_seed(self.run.seed, "new-clients"))
        count = min(self.federation.new_clients, num_partitions)
        return set(generator.choice(num_partitions, count, replace=False).tolist())

    def plan(self, samples: int) -> Plan | None:
        """Return the differential privacy plan of a client with so many training samples.

        It says how much noise each of the client's messages needs; None without ``dp``.
        """
        if self.privacy.dp == "none":
            return None
        rounds = self.run.rounds
        # entries of class sums or counts, each of which needs noise of its own
        tables = sum(entry.shows_classes for entry in self.exchange.up.values())
        tables_in_rounds = tuple(
            tables if self.hparams.due(number, rounds) else 0 for number in range(1, rounds + 1)
        )
        epochs = 0 if self.row.one_shot else self.training.local_epochs  # 0: it does not train
        return plan_of(
            self.privacy,
            samples,
            self.training.batch_size,
            epochs,
            tables_in_rounds,
            self.federation.evaluate_every,
        )

    def architecture(self, client: int, chosen: str = "") -> str:
        """Return the architecture of the client with this number.

        If it works on features of frozen backbones, or on vectors, that is the projection.
        Otherwise it is the ``chosen`` one, or without one what the setting ``models`` names for the
        number.
        """
        if self.backbones or self.takes_vectors:
            return PROJECTION
        return chosen or architecture_of(self.model.models, client)

    @classmethod
    def from_run_config(cls, run_config: Values, node_config: Values | None = None) -> Self:
        """Check a run's flat configuration, and a node's overrides of it; build the settings.

        SettingsError has a line for each unknown key (of the node's, too), missing key, wrong type,
        and value out of range or not among its choices. If there are none of these, it has a line
        for each value that does not fit the others. Settings of an algorithm that does not run may
        have any scalar value (`check_settings_act` tells of them). Settings are cached, as a
        process asks for the same ones with every message.
        """
        node: Values = {}  # as for a simulated client, whose node config overrides nothing
        if node_config and is_site(node_config):
            node = node_config
        # not cached: the row of another package may change while it is developed
        if str(run_config.get("algo")) not in CATALOG:
            return cls._read(run_config, node)
        try:
            configs = json.dumps([dict(run_config), dict(node)])  # in which 1, 1.0 and true differ
        except TypeError:
            return cls._read(run_config, node)  # which refuses values that are no JSON
        return cls._read_cached(configs)

    @classmethod
    @lru_cache(maxsize=16)
    def _read_cached(cls, configs: str) -> Self:
        run_config, node = json.loads(configs)
        return cls._read(run_config, node)

    @classmethod
    def _read(cls, given: Values, node: Values) -> Self:
        """Check the settings that a run has ``given``, and build `Settings` from them.

        ``node`` is a site's node config, whose settings replace the run's; {} for a simulated
        client. SettingsError with all problems at once.
        """
        config = {**given, **settings_of_site(node, given, default_run_config())}
        # names may be typed in two Unicode forms, of which data are read in one
        for key in ("classes", "new-domain", *TABLE):
            value = config.get(key)
            if isinstance(value, str):
                config[key] = with_composed_letters(value)

        problems = [
            f"node-config: {line}; choose from {', '.join(NODE_KEYS)}"
            for line in unknown_keys(node, NODE_KEYS)
        ]
        # what a misspelt key is likely to mean: a general setting, or one of the run's algorithm
        owners = ("", config.get("algo"))
        likely = [key for key in known_keys() if key.rpartition(".")[0] in owners]
        problems += unknown_keys(config, known_keys(), likely)
        problems += folders_of_unknown_users(config)
        problems += _problems_of_other_algorithms(config)
        denied = refusals(node, config, given) if node else []

        hparams = None
        if not denied:  # else an algorithm's package would be imported for a run that is refused
            with allowing(names_in(node.get("allow-python"))):
                hparams = _hparams(config, problems)
        sections = {
            name: read_section(section, config, problems) for name, section in SECTIONS.items()
        }

        # rules between settings need settings that are legal by themselves
        if hparams and not problems:
            settings = cls(**sections, hparams=hparams, given=given)  # type: ignore[arg-type]
            for rule in RULES:
                problems += rule(settings)
            problems += study.problems(settings.study)
            problems += _refused_weights(settings, node)
        if problems or denied:
            raise SettingsError("\n".join(problems + denied))
        return settings


def check_settings_act(chosen: Values, *runs: Settings) -> None:
    """Refuse settings that have an effect on none of these runs.

    SettingsError has a line for each ``chosen`` setting that belongs to an algorithm (its key is
    ``ALGO.KEY``) or to a partition that no run has.
    """
    algorithms = set()
    keys_read: dict[str, str] = {}  # algorithm -> its hyper-parameters, in words
    for settings in runs:
        algo = settings.run.algo
        algorithms |= {algo, *settings.baselines}
        keys = keys_of(type(settings.hparams), f"{algo}.")
        keys_read[algo] = ", ".join(keys) or "no settings of its own"

    problems = []
    algorithms_in_words = "; on ".join(
        f"{algo}, which reads {keys}" for algo, keys in keys_read.items()
    )
    partitions = {settings.data.partition for settings in runs}
    for key, value in chosen.items():
        owner = key.rpartition(".")[0]  # the algorithm of the setting; "" for a general one
        if owner and owner not in algorithms:
            problems.append(f"{key} = {value!r}: has no effect on {algorithms_in_words}")
        readers = partitions_that_read(key)
        if readers and partitions.isdisjoint(readers):
            problems.append(
                f"{key} = {value!r}: has no effect on partition ="
                f" {', '.join(sorted(partitions))}; choose {' or '.join(readers)}"
            )
    if problems:
        raise SettingsError("\n".join(problems))


def digest_of(run_config: Values) -> str:
    """Return 16 hexadecimal digits that stand for a run configuration.

    ``out-dir`` does not count: the server writes there, and no site does.
    """
    pairs = [(key, value) for key, value in run_config.items() if key != "out-dir"]
    return digest(*sorted(pairs))


def baseline_config(run_config: Values, algo: str) -> dict[str, Scalar]:
    """Return the configuration of a run's baseline: the same run with the algorithm ``algo``.

    A baseline has no baselines and no callback of its own. Settings that do not apply to its
    algorithm get values without effect, for they would be refused.
    """
    config = {**run_config, "algo": algo, "hparams": "", "baselines": "", "callback": ""}
    if not CATALOG[algo].exchange.up:  # then the server merges nothing
        config |= {"merging": "mean", "max-update-ratio": 0.0, "late": "discard"}
    return config


def baselines_of(
    settings: Settings, run_config: Values, node: Values | None = None
) -> dict[str, Settings]:
    """Return the settings of each of a run's baselines, by algorithm.

    SettingsError names the baseline in front of each line.
    """
    baselines = {}
    for algo in settings.baselines:
        try:
            baselines[algo] = Settings.from_run_config(baseline_config(run_config, algo), node)
        except SettingsError as error:
            lines = [f"baselines = {algo!r}: {line}" for line in str(error).splitlines()]
            raise SettingsError("\n".join(lines)) from error
    return baselines


def settings_that_meet_demands(node: Values) -> dict[str, Scalar]:
    """Return settings with which a run has the protections that a site's node config demands.

    ``min-class-samples`` need not be among them, as the site's own value counts if it is stricter.
    """
    config: dict[str, Scalar] = {}
    limits = required_dp(node)
    if limits:
        config |= {"dp": limits.unit, "dp-epsilon": limits.epsilon, "dp-delta": limits.delta}
    if node.get(REQUIRE_SECAGG):
        config |= {key: needed.value for key, needed in needed_with("with_secagg").items()}
        config["secagg"] = True
    return config


def _problems_of_other_algorithms(config: Values) -> Iterator[str]:
    """Yield a line for each setting of an algorithm that does not run whose value is no scalar.

    It has no effect, but a site stores it with the run's other settings, and shows it.
    """
    for key, setting in options_of_a_run().items():
        owner = key.rpartition(".")[0]
        value = config.get(key, setting.default)
        if owner not in ("", config.get("algo")) and not isinstance(value, Scalar):
            yield f"{key} = {value!r}: must be {TYPES[type(setting.default)]}"


def _hparams(config: Values, problems: list[str]) -> Hparams | None:
    """Return the hyper-parameters of the run's algorithm.

    Those of another package's algorithm are read from the setting ``hparams``. On any problem
    append to ``problems``, and return None.
    """
    algo = str(config.get("algo"))
    text = str(config.get("hparams", ""))
    try:
        row = algorithm_named(algo)
        if algo not in CATALOG:
            return read_hparams(row, text)
    except SettingsError as error:
        problems.append(str(error))
        return None
    if text:
        problems.append(
            f"hparams = {text!r}: only for algorithms of other packages; set {algo}.KEY instead"
        )
        return None
    return read_section(row.hparams, config, problems, prefix=f"{algo}.")


def _run_problems(settings: Settings) -> Iterator[str]:
    """Yield a line for each setting of the run itself that does not fit the others.

    That is a wrong name of the run, a callback, baseline or metric, and ``resume`` without the
    name of a run.
    """
    run = settings.run
    if run.run_name and not is_plain_name(run.run_name):
        yield f"run-name = {run.run_name!r}: must be a plain folder name, without slashes"
    if run.callback and run.callback not in TRACKERS and not is_python_name(run.callback):
        yield f"callback = {run.callback!r}: must be {', '.join(TRACKERS)}, or module:function"
    for name in settings.baselines:
        if name not in CATALOG:
            choices = f"{', '.join(CATALOG)}{did_you_mean(name, CATALOG)}"
            yield f"baselines = {name!r}: choose among {choices}"
    try:
        metric_names(run.metrics, settings.task.metric_choices())
    except SettingsError as error:
        yield str(error)
    if run.resume and not run.run_name:
        yield "resume = true: run-name must name the run that shall go on"


def _task_problems(settings: Settings) -> Iterator[str]:
    """Yield a line for each algorithm or setting that does not fit the setting ``task``."""
    task = settings.data.task
    for algo in (settings.run.algo, *settings.baselines):
        if algo in CATALOG and task not in CATALOG[algo].tasks:
            does_not = f"{algo} does not learn several labels a sample"
            able = _algos(lambda row: task in row.tasks)
            yield f"task = {task!r}: {does_not}; choose an algo of {able}"
    if task not in settings.row.tasks and settings.run.algo not in CATALOG:
        yield f"task = {task!r}: the row of {settings.run.algo} does not declare it (tasks)"
    fewest = settings.privacy.min_class_samples  # behind anything sent; 1: anything may be sent
    sends_clusters = any(entry.several for entry in vectors_in(settings.exchange.up).values())
    if fewest > 1 and task != "single-label" and sends_clusters:
        clusters = f"{settings.run.algo} sends clusters of samples, which overlap across labels"
        yield f"min-class-samples = {fewest}: {clusters}; choose 1, or one prototype a class"


def _stopping_problems(settings: Settings) -> Iterator[str]:
    """Yield a line for each reason why the run cannot stop early as its settings say."""
    run = settings.run
    if run.early_stopping_metric and not _is_figure(run.early_stopping_metric, run.metrics):
        yield (
            f"early-stopping-metric = {run.early_stopping_metric!r}: choose head, prototype, or one"
            " of the setting metrics, such as head/auc with metrics = 'auc'"
        )
    setting_to_stop_early = settings.hparams.needs_last_round  # "" if the run may stop early
    if run.early_stopping and setting_to_stop_early:
        yield (
            f"early-stopping = {run.early_stopping}: {run.algo} does a part of its work in the last"
            f" round only; set {setting_to_stop_early}"
        )


def _is_figure(name: str, metrics: str) -> bool:
    """True if a run reports a figure of this ``name``: ``head``, or ``head/auc`` of its metrics.

    What stands before the slash is a way to predict (`KINDS`); without one it is accuracy.
    """
    kind, slash, metric = name.partition("/")
    if kind not in KINDS:
        return False
    if not slash:
        return True
    metric_name = metric.partition("/")[0]  # of recall/3, the recall of class 3
    return metric_name in names_in(metrics)


def _upload_problems(settings: Settings) -> Iterator[str]:
    """Yield a line for each setting about uploads that does not fit what the algorithm sends."""
    algo = settings.run.algo
    row = settings.row
    if "merging" not in row.supports:
        why = f"the row of {algo} does not declare that its server merges by it"
        if not row.exchange.up:
            why = f"in {algo} clients send nothing that a server could merge"
        needed = {"merging": Needed("mean", why), "max-update-ratio": Needed(0.0, why)}
        if algo not in CATALOG:  # what liars bounds in ours stands on their pages
            needed["liars"] = Needed(0, why)
        for setting, cure, _ in _changed(settings, needed):
            yield f"{setting}: {why}; choose {cure}"

    late = settings.federation.late
    if late != "discard" and "late" not in row.supports:
        able = _algos(lambda row: "late" in row.supports)
        yield (
            f"late = {late!r}: the row of {algo} does not declare what its server does with a reply"
            f" to an earlier round; choose discard, or an algo of {able}"
        )

    noise = settings.noise.prototype_noise
    vectors = vectors_in(settings.exchange.up).values()
    if noise != "none" and any(entry.probabilities for entry in vectors):
        yield (
            f"prototype-noise = {noise!r}: {algo} sends class probabilities,"
            " which noise would make none; choose none"
        )


def _backbone_problems(settings: Settings) -> Iterator[str]:
    """Yield a line for a wrong name in ``backbones``, and each setting that does not fit them."""
    augment = settings.training.augment
    try:
        has_backbones = bool(settings.backbones)
    except ValueError as error:
        yield f"backbones = {settings.model.backbones!r}: {error}; or auto, or none"
        return
    if augment != "none" and has_backbones:
        yield (
            f"augment = {augment!r}: frozen backbones see every image once, as it is;"
            " set augment to none"
        )
    scale = settings.data.standardise
    if scale != "auto" and settings.takes_vectors:
        yield f"standardise = {scale!r}: vectors are taken as they are; choose auto"


def _dp_problems(settings: Settings) -> Iterator[str]:
    """Yield a line for each setting that does not go with ``dp``, or acts only with it."""
    privacy = settings.privacy
    private = f"dp = {privacy.dp!r}"
    yield from _honest_sites_problems(settings)
    if privacy.dp == "none":
        if privacy.dp_epsilon != default_run_config()["dp-epsilon"]:
            yield (
                f"dp-epsilon = {privacy.dp_epsilon}: nothing is private with dp = 'none';"
                " set dp = 'sample' or 'person', or leave it out"
            )
        return

    for setting, cure, why in _changed(settings, needed_with("with_dp")):
        yield f"{private}: {setting}: {why}; set {cure!r}"

    algo = settings.run.algo
    choices = _algos(lambda row: _runs_protected(row, settings))
    uncovered = [name for name in settings.exchange.up if name not in settings.row.private]
    if algo not in CATALOG:
        # nobody here has read how it trains, and a row's word for it proves nothing
        yield (
            f"{private}: {algo} is of another package, whose steps are not covered;"
            f" choose among {choices}"
        )
    elif uncovered:
        yield (
            f"{private}: {algo} sends {', '.join(uncovered)}, which it does not cover;"
            f" choose among {choices}"
        )
    if settings.hparams.uncovered_by_dp:
        yield f"{private}: {settings.hparams.uncovered_by_dp}"
    # a class of few samples cannot be left out of a sum over all of them
    fewest = privacy.min_class_samples
    if fewest > 1 and any(entry.joins_all_classes for entry in settings.exchange.up.values()):
        yield (
            f"{private}: min-class-samples = {fewest}: {algo} sends sums over all classes; choose 1"
        )


def _honest_sites_problems(settings: Settings) -> Iterator[str]:
    """Yield a line for each reason why sites may not share noise (``dp-honest-sites``).

    They may if the server sees only the sum of their uploads, and if no step uses one site's noisy
    values before they are summed: the site's part of the noise alone would be too small for that.
    """
    if settings.privacy.dp_honest_sites == 1:  # each site adds all the noise itself
        return
    shared = f"dp-honest-sites = {settings.privacy.dp_honest_sites}"
    if settings.privacy.dp == "none":
        yield (
            f"{shared}: with dp = 'none' there is no noise to share; set dp = 'sample', or leave it"
            " out"
        )
        return
    if not settings.privacy.secagg:
        yield f"{shared}: a server that sees single uploads sees a part of the noise; set secagg"
    if not _sends_only_sums_whose_noise_adds_up(settings.row):
        able = _algos(
            lambda row: _runs_protected(row, settings) and _sends_only_sums_whose_noise_adds_up(row)
        )
        yield (
            f"{shared}: {settings.run.algo} trains by private steps, or sends what is made of noisy"
            f" sums, and each site's noise must cover these; choose 1, or among {able}"
        )


def _sends_only_sums_whose_noise_adds_up(row: Algorithm) -> bool:
    """True if each site may add a part of the noise, as the sum of all uploads has the whole.

    A client then sends noisy sums only, and trains nothing (is one-shot): steps of a private
    training need the whole noise at each site.
    """
    return row.one_shot and all(entry.noise_adds_up for entry in row.exchange.up.values())


def _secagg_problems(settings: Settings) -> Iterator[str]:
    """Yield a line for each setting that would undo secure sums, or cannot work with them.

    A client must not send the same in every round: if one client more takes part in the second of
    two rounds, the difference of their sums would be its upload.
    """
    if not settings.privacy.secagg:
        return
    for setting, cure, why in _changed(settings, needed_with("with_secagg")):
        yield f"{setting}: secagg = true {why}; choose {cure!r}"

    algo = settings.run.algo
    rounds = settings.run.rounds
    training = settings.training
    if rounds != 1:  # the sum of a single round has no other to be compared with
        if training.local_epochs == 0 and training.local_steps == 0:
            yield (
                "local-epochs = 0: without training a client sends the same in every round, and"
                " the sums' differences show single uploads;"
                " with secagg choose at least 1, or rounds = 1"
            )
        last_lr = settings.lr_in(rounds)
        if last_lr <= 1e-7:  # a step changes next to nothing in float32
            yield (
                f"lr = {training.lr}: in steps of {last_lr:g} a client sends the same in every"
                " round, and the sums' differences show single uploads;"
                " with secagg end above 1e-7"
            )
        if settings.row.one_shot:
            yield (
                f"rounds = {rounds}: {algo} sends the same in every round, and the sums'"
                " differences show single uploads; with secagg = true choose 1"
            )
    if "recall" in names_in(settings.run.metrics):
        yield (
            "metrics = 'recall': it tells which classes a client has, and secagg = true hides that"
        )

    why = settings.row.needs_single_uploads(settings.exchange)
    if why:
        able = _algos(lambda row: _runs_protected(row, settings))  # by their default settings
        choices = f"{able}, or fedpcl with fedpcl.prototypes = 'global'"
        if algo not in CATALOG:
            choices += "; or set averages_prototypes and supports in its row (docs/extend.md)"
        yield f"secagg = true: {algo} needs single uploads, for {why}; choose an algo of {choices}"


def _refused_weights(settings: Settings, node: Values) -> Iterator[str]:
    """Yield a line if the server would send weights to a site that accepts none."""
    if settings.exchange.sends_weights and not allowed_by(node)[ACCEPT_WEIGHTS]:
        sent = [entry.words for entry in settings.exchange.down.values() if entry.are_parameters]
        yield (
            f"algo = {settings.run.algo!r}: its server sends {' and '.join(sent)}, and this site"
            f" accepts no weights (node config: {ACCEPT_WEIGHTS}); choose among"
            f" {_algos(lambda row: not row.exchange.sends_weights)}"
        )


RULES = (  # what values must mean together
    _upload_problems,
    _dp_problems,
    _run_problems,
    _task_problems,
    _stopping_problems,
    _backbone_problems,
    _secagg_problems,
)


def _changed(settings: Settings, needed: Mapping[str, Needed]) -> Iterator[tuple[str, Scalar, str]]:
    """Yield the settings that are neither as ``needed`` nor left at their default.

    For each yield the text ``key = value``, the value needed, and why it is.
    """
    values = to_run_config(settings)
    for key, (needed_value, why) in needed.items():
        if key not in values:  # of another algorithm
            continue
        if values[key] not in (needed_value, default_run_config()[key]):
            yield f"{key} = {values[key]!r}", needed_value, why


def _algos(is_able: Callable[[Algorithm], bool]) -> str:
    """Return the names of the catalog's algorithms that are able, with commas.

    ``is_able`` says so of an algorithm's row.
    """
    return ", ".join(name for name, row in CATALOG.items() if is_able(row))


def _runs_protected(row: Algorithm, settings: Settings) -> bool:
    """True if an algorithm can run with ``dp`` and ``secagg`` as in these ``settings``."""
    if settings.privacy.dp != "none" and not set(row.exchange.up) <= set(row.private):
        return False
    return not (settings.privacy.secagg and row.needs_single_uploads(row.exchange))


def known_keys() -> list[str]:
    """Return every key of a run configuration, algorithms' included."""
    return list(options_of_a_run())


def default_run_config() -> dict[str, Scalar]:
    """Return the default of every key, also of an algorithm's (``fedproto.lambda``)."""
    defaults: dict[str, Any] = {key: setting.default for key, setting in options_of_a_run().items()}
    return defaults


def app_folder() -> Path:
    """Return the folder of the Flower app, with its pyproject.toml.

    In a checkout and in a bundle it is the folder around this package; a wheel holds a copy of
    the app inside of this package.
    """
    package = Path(__file__).resolve().parents[1]  # protofl_common
    if (package / "app").is_dir():
        return package / "app"
    return package.parent


def release() -> str:
    """Return the version of ProtoFL that is installed here."""
    project = tomllib.loads((app_folder() / "pyproject.toml").read_text(encoding="utf-8"))
    return str(project["project"]["version"])


def with_halves() -> None:
    """Put `app_folder` on Python's path: a wheel holds ``client_app`` and ``server_app`` there."""
    folder = str(app_folder())
    if folder not in sys.path:
        sys.path.append(folder)


def to_run_config(settings: Settings) -> dict[str, Scalar]:
    """Return the run config from which `Settings.from_run_config` builds these settings.

    It has no keys of algorithms that are not chosen.
    """
    config: dict[str, Scalar] = {}
    for name in SECTIONS:
        config |= _as_keys(getattr(settings, name))
    if settings.run.algo in CATALOG:  # those of other packages stand in the setting hparams
        config |= hparams_by_key(settings)
    return config


def hparams_by_key(settings: Settings) -> dict[str, Scalar]:
    """Return the hyper-parameters of the run's algorithm by their keys, a package's too."""
    return _as_keys(settings.hparams, f"{settings.run.algo}.")


def _as_keys(table: object, prefix: str = "") -> dict[str, Scalar]:
    return dict(zip(keys_of(type(table), prefix), vars(table).values(), strict=True))
