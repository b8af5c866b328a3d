"""One client: its settings, its data, its model, and the folder of what never leaves it."""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message, MessageType, RecordDict

from client_app.answers import log
from client_app.consent import check_consent, site_key
from client_app.data import Samples, augment_of, split_unlabelled, to_device
from client_app.state import StateFolder
from protofl_common.backbones.features import cached_features, feature_widths
from protofl_common.basics.devices import open_device
from protofl_common.basics.files import cache_folder, digest
from protofl_common.basics.seeding import derive_seed
from protofl_common.basics.text import names_in
from protofl_common.config.datasets import is_own
from protofl_common.config.options import SettingsError
from protofl_common.config.python_names import allow
from protofl_common.data import ClientData, open_client_data
from protofl_common.data.raw import StoredRows
from protofl_common.experiment.node import NodeConfig, allow_named, is_site, site_folder
from protofl_common.experiment.settings import Settings, baseline_config, digest_of
from protofl_common.experiment.study import Study, about_site
from protofl_common.models.build import initial_model
from protofl_common.models.split import SplitModel
from protofl_common.privacy import release
from protofl_common.privacy.plan import Plan
from protofl_common.privacy.released import Released
from protofl_common.runs.evaluation_metrics import declared_metrics
from protofl_common.wire.records import Instructions, check_settings, unpack_baseline, unpack_instructions
from protofl_common.wire.schema import Limits, RefusedMessage, Template

CLIENTS = 10  # How many a site counts on at least, where neither its node config nor the run says how many take part
OWN_SEED = 0  # The seed with which a site with data of its own divides them: no run draws another division


class Client:
    """Built anew for every message that it answers; nothing is read before it is needed."""

    def __init__(self, context: Context, message: Message | None = None) -> None:
        node, self.content = context.node_config, message.content if message else RecordDict()
        kind = message.metadata.message_type if message else ""
        if kind.endswith(".default"):  # Flower gives it to the same handler; no check below knows it
            raise RefusedMessage(f"a message of the kind {kind!r}")
        self.trains_now = kind == MessageType.TRAIN
        baseline = unpack_baseline(self.content)
        allow_named(node if is_site(node) else context.run_config)
        allow(names_in(node.get("allow-python")))
        self.settings = Settings.from_run_config(context.run_config, node)
        if baseline:
            if baseline not in self.settings.baselines:
                raise RefusedMessage(f"baseline is {baseline!r}, which the run's settings do not name")
            self.settings = Settings.from_run_config(baseline_config(context.run_config, baseline), node)
        self.node, self.run_id = NodeConfig.of(node), context.run_id
        self.name, self.site_folder = self.node.name, site_folder(node)
        self.tells_errors = not (self.settings.privacy.sums_only and self.node.is_site)  # of training; a sum hides them
        self.study: Study | None = None  # in which this site takes part now; None for a simulated client
        if kind == MessageType.QUERY:  # before its operator is asked about settings that the server does not have
            check_settings(self.content, digest_of(self.settings.given))
        if message and self.node.is_site:
            how = {"approves": self.node.approves, "counts": kind != MessageType.QUERY}
            self.study = check_consent(context.run_config, self.run_id, node, **how)
        alike = self.settings.exchange.needs_one_architecture
        self.arch = self.settings.architecture(0 if alike else self.node.partition, self.settings.model.arch)
        machine = self.settings.machine
        self.device = open_device(machine.device, machine.precision)
        if machine.threads:
            torch.set_num_threads(min(machine.threads, os.cpu_count() or 1))

    def seed_for(self, purpose: str, *more: str | int) -> int:
        """Return the seed of this client's draws for one purpose, such as ``"train"`` and a round."""
        return derive_seed(self.settings.run.seed, purpose, self.name, *more)

    def signature(self, purpose: str) -> bytes:
        """Return the signature with this site's key, where the study names it; else b""."""
        if self.study is None or not self.settings.named_sites:
            return b""
        return site_key(self.site_folder).sign(about_site(self.settings.study, self.name, self.run_id, purpose))

    @cached_property
    def data(self) -> ClientData:
        """This site's share of the data, as it is stored; with ``image-noise``, its training images with noise.

        SettingsError for classes of a site's own data that neither the node config nor the run names: names of folders
        or the values of a column may be anything, so only this site's own log has them.
        """
        settings, own = self.settings, self.node.has_own_data
        private, least = settings.privacy.dp != "none", settings.privacy.min_class_samples
        data = open_client_data(
            settings.data,
            seed=OWN_SEED if own else settings.run.seed,
            partition=self.node.partition,
            num_partitions=max(1, self.node.num_partitions),
            domain=self.node.domain,
            shared_scale=private,  # a scale of one's own would tell of one's samples
        )
        if own and is_own(settings.data.dataset) and not settings.data.classes:
            names = f'classes="{",".join(data.classes)}"'
            log("WARNING", f"if these names may leave this site, add {names} to its node config")
            many = f"this site's data have {len(data.classes)} classes that nobody named"
            raise SettingsError(f"classes = '': {many}; set classes, in label order, in its node config, or in the run")
        if own and private and data.mean:
            data = with_public_scale(data)
        if own and least > 1 and not private:  # noise would not cover which classes are small
            data = without_rare_tests(data, least)
        augment_of(settings.training.augment, data, self.device)  # refuses what are no images
        if (noise := settings.noise.image_noise) == "none":
            return data
        images = release.noised_images(np.asarray(data.train_inputs), noise, self.seed_for("image-noise"))
        return replace(data, train_inputs=images)

    @cached_property
    def train_set(self) -> Samples:
        """Training inputs, or their features, and labels on the device; so are the other sets."""
        samples = self._on_device(self.data.train_inputs, self.data.train_labels)
        return replace(samples, augment=augment_of(self.settings.training.augment, self.data, self.device))

    @cached_property
    def test_set(self) -> Samples:
        return self._on_device(self.data.test_inputs, self.data.test_labels)

    @cached_property
    def validation_set(self) -> Samples:
        return self._on_device(self.data.validation_inputs, self.data.validation_labels)

    def _on_device(self, inputs: np.ndarray, labels: np.ndarray) -> Samples:
        if not (names := self.settings.backbones):
            return to_device(inputs, labels, self.data, self.device)
        cache, key = cache_folder(self.settings.data.cache_dir), f"{self.settings.data.dataset}-{self.name}"
        features_NF = cached_features(np.asarray(inputs), names, self.device, cache, key)
        return split_unlabelled(features_NF.to(self.device), torch.from_numpy(labels.astype(np.int64)).to(self.device))

    @cached_property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of a sample of `train_set`: the input's own, or the number of backbone features."""
        if self.settings.backbones:
            return (sum(feature_widths(self.settings.backbones)),)
        return tuple(self.data.train_inputs.shape[1:])

    @cached_property
    def model(self) -> SplitModel:
        return self.new_model(self.arch, "global" if self.settings.starts_alike else self.name)

    def new_model(self, arch: str, owner: str) -> SplitModel:
        """Return a model with the first weights of ``owner``: everybody's are ``"global"``."""
        settings, shape = self.settings, (self.input_shape, self.num_classes)
        model = initial_model(arch, *shape, settings.model, settings.run.seed, owner)
        return model if self.device.type == "cpu" else model.to(self.device)

    @property
    def root(self) -> Path:
        """``state-dir``, the folder of what never leaves, which no server chooses; in simulation, ``out-dir``."""
        return Path(self.settings.machine.state_dir or self.settings.run.out_dir).expanduser()

    def own_file(self, run_name: str, name: str) -> Path:
        """Return a file of this client in the run that the server calls so; a site's may need a safer name."""
        return self.root / run_name / "clients" / self.name / name

    @cached_property
    def instructions(self) -> Instructions:
        """Read what the message asks for; RefusedMessage for another Flower run, or a round that it has not."""
        instructions, rounds = unpack_instructions(self.content), self.settings.run.rounds
        run_history = instructions.run_history
        if not 1 <= instructions.round <= rounds:
            raise RefusedMessage(f"round.round is {instructions.round} in a run of {rounds} rounds")
        if run_history.run_id != self.run_id:
            raise RefusedMessage(f"round.run_history is {run_history.text!r} in the Flower run {self.run_id}")
        return instructions

    @property
    def evaluates(self) -> bool:
        """True where the run's settings plan an evaluation for this message; no server may ask for another."""
        return not self.trains_now or self.settings.evaluates(self.instructions.round)

    @cached_property
    def states(self) -> StateFolder:
        """The folder of this client's state: at a real site, every study has one of its own."""
        private = "" if self.settings.privacy.dp == "none" else ", with differential privacy"
        study = f", in the {self.study}" if self.study and self.study.name else ""
        use = f"{self.settings.run.algo} ({digest(repr(self.settings.exchange))}){private}{study}"
        name, run_history, wary = self.instructions.run_name, self.instructions.run_history, self.node.is_site
        folder = self.root / (f"{name}-{run_history.first}" if wary else name) / "clients"  # names may meet
        return StateFolder(folder, self.name, run_history, wary=wary, use=use)

    @cached_property
    def plan(self) -> Plan | None:
        """How what this site sends is made private; None where it is not."""
        return self.settings.plan(len(self.data.train_labels))

    @cached_property
    def released(self) -> Released | None:
        """What may leave in the answer to this message under differential privacy; None without it."""
        if self.settings.privacy.dp == "none":
            return None
        return Released(self.settings.run.algo)

    @property
    def is_new(self) -> bool:
        """True for a simulated client that never trains in a round (``new-clients``, ``new-domain``)."""
        drawn, domain = self.settings.new_clients(self.node.num_partitions), self.settings.federation.new_domain
        return self.node.partition in drawn or self.data.domain == (domain or None)

    @property
    def num_classes(self) -> int:
        return len(self.data.classes)

    @property
    def metrics(self) -> set[str]:
        return declared_metrics(self.settings.reported_metrics, self.num_classes)

    def limits(self, weights: Mapping[str, Template]) -> Limits:
        """Return the limits of a payload from the server; ``weights``: the arrays of each declared entry of weights."""
        clients = max(CLIENTS, self.node.num_partitions, self.settings.federation.num_clients)
        many = clients * self.settings.bounds.max_prototypes_per_class  # the server may hand on all that clients sent
        return Limits(self.num_classes, self.settings.model.feature_dim, weights=weights, max_per_class=many)

    @property
    def stated_samples(self) -> int:
        """Its training samples, as it tells them: 0 if they are only in a sum."""
        stated = release.stated_samples(self.data.train_labels, self.settings.privacy)
        return 0 if self.settings.hides_samples else stated

    @cached_property
    def large_classes(self) -> torch.Tensor:
        """Labels of the classes with ``min-class-samples`` training samples, on the CPU."""
        return torch.from_numpy(release.large_classes(self.data.train_labels, self.settings.privacy.min_class_samples))

    @property
    def classes_present(self) -> tuple[int, ...]:
        """Labels of its large classes, as prototypes or label counts will show them; SettingsError for none."""
        if self.plan is not None:
            return tuple(range(self.num_classes))  # which of them it has shows with noise only
        if not len(large := self.large_classes):
            least = self.settings.privacy.min_class_samples
            raise SettingsError(f"min-class-samples = {least}: this client has no class of as many training samples")
        return tuple(large.tolist())


def with_public_scale(data: ClientData) -> ClientData:
    """Return the data with a mean and deviation for each channel or feature that no sample has a part in.

    The data's own are made of every sample: whoever changes one changes what the model is given of all others, which
    differential privacy does not cover. Images are centred; numbers stay as they are, so their owner scales them by
    limits that are known without the data.
    """
    middle, spread = (0.5, 0.25) if data.train_inputs.dtype == np.uint8 else (0.0, 1.0)
    return replace(data, mean=(middle,) * len(data.mean), std=(spread,) * len(data.mean))


def without_rare_tests(data: ClientData, least: int) -> ClientData:
    """Return the data without test and validation samples of classes with fewer than ``least`` of them, or to train on.

    A server could else count them: it chooses what is evaluated, such as weights that take each sample for one of them.
    """
    large, changes = release.large_classes(data.train_labels, least), dict[str, Any](found=data.found)
    for part in ("test", "validation"):
        inputs, labels = getattr(data, f"{part}_inputs"), getattr(data, f"{part}_labels")
        rows = np.flatnonzero(np.isin(labels, np.intersect1d(large, release.large_classes(labels, least))))
        if len(rows) < len(labels):
            changes |= {f"{part}_inputs": StoredRows(inputs, rows), f"{part}_labels": labels[rows]}
            changes["found"] -= len(labels) - len(rows)
    return replace(data, **changes)
