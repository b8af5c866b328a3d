"""One client: its settings, its data, its model, and the folder of what never leaves it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from protofl_common.config.sections import MachineSettings
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
from protofl_common.wire.records import (
    Instructions,
    check_settings,
    unpack_baseline,
    unpack_counted,
    unpack_instructions,
)
from protofl_common.wire.schema import Limits, RefusedMessage, Template

FEWEST_CLIENTS = 10
"""A site assumes so many at least: node config and run may leave open how many there are."""
OWN_SEED = 0
"""The seed with which a site divides data of its own: no run draws another division."""


@dataclass(eq=False, repr=False)
class Client:
    """One client, for the message that it answers: `open_client` makes one for each.

    Its data and its model are read when they are asked for.
    """

    settings: Settings  # the run's, or those of the baseline that the message is about
    node: NodeConfig
    run_id: int
    site_folder: Path  # of its key, its approvals and its audit log
    arch: str
    device: torch.device
    content: RecordDict  # of the message
    trains_now: bool  # the message asks for training
    study: Study | None = None  # in which this site takes part now; None for a simulated client

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def tells_errors(self) -> bool:
        """True where the server may know that a training failed; in a sum, a site hides it."""
        return not (self.settings.privacy.sums_only and self.node.is_site)

    def seed_for(self, purpose: str, *more: str | int) -> int:
        """Return the seed of its draws for one purpose, such as ``"train"`` and a round."""
        return derive_seed(self.settings.run.seed, purpose, self.name, *more)

    # -- data and model ------------------------------------------------------------------------
    @cached_property
    def data(self) -> ClientData:
        """This client's share of the data, as it is stored; ``image-noise`` is in its images.

        The noise is in training images alone. SettingsError for data that do not fit the settings.
        """
        settings = self.settings
        has_own_data = self.node.has_own_data
        data = open_client_data(
            settings.data,
            seed=OWN_SEED if has_own_data else settings.run.seed,
            partition=self.node.partition,
            num_partitions=max(1, self.node.num_partitions),
            domain=self.node.domain,
            # a scale of one's own would tell of one's samples
            shared_scale=settings.privacy.dp != "none",
        )
        if has_own_data:
            data = self._protected(data)
        augment_of(settings.training.augment, data, self.device)  # refuses what are no images
        noise = settings.noise.image_noise
        if noise == "none":
            return data
        images = np.asarray(data.train_inputs)
        seed = self.seed_for("image-noise")
        return replace(data, train_inputs=release.noised_images(images, noise, seed))

    def _protected(self, data: ClientData) -> ClientData:
        """Return a site's own data as messages may tell of them.

        SettingsError for classes that neither the node config nor the run names: names of folders
        or the values of a column may be anything, so only this site's own log has them.
        """
        settings = self.settings
        has_dp = settings.privacy.dp != "none"
        least = settings.privacy.min_class_samples
        if is_own(settings.data.dataset) and not settings.data.classes:
            names = f'classes="{",".join(data.classes)}"'
            log("WARNING", f"if these names may leave this site, add {names} to its node config")
            many = f"this site's data have {len(data.classes)} classes that nobody named"
            cure = "set classes, in label order, in its node config, or in the run"
            raise SettingsError(f"classes = '': {many}; {cure}")
        if has_dp and data.mean:
            return with_public_scale(data)
        if least > 1 and not has_dp:  # noise would not cover which classes are small
            return without_rare_tests(data, least)
        return data

    def load_data(self) -> None:
        """Read the sets of samples that the answer to this message uses."""
        if self.evaluates:
            _ = self.test_set, self.validation_set
        if self.trains_now:
            _ = self.train_set

    @cached_property
    def train_set(self) -> Samples:
        """Training inputs, or their features, and labels on the device; so are the other sets."""
        samples = self._on_device(self.data.train_inputs, self.data.train_labels)
        augment = augment_of(self.settings.training.augment, self.data, self.device)
        return replace(samples, augment=augment)

    @cached_property
    def test_set(self) -> Samples:
        return self._on_device(self.data.test_inputs, self.data.test_labels)

    @cached_property
    def validation_set(self) -> Samples:
        return self._on_device(self.data.validation_inputs, self.data.validation_labels)

    def _on_device(self, inputs: np.ndarray, labels: np.ndarray) -> Samples:
        backbones = self.settings.backbones
        if not backbones:
            return to_device(inputs, labels, self.data, self.device)
        cache = cache_folder(self.settings.data.cache_dir)
        key = f"{self.settings.data.dataset}-{self.name}"
        features_NF = cached_features(np.asarray(inputs), backbones, self.device, cache, key)
        labels_N = torch.from_numpy(labels.astype(np.int64))
        return split_unlabelled(features_NF.to(self.device), labels_N.to(self.device))

    @cached_property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of a sample of `train_set`: the input's own, or the number of features.

        Features are those of the frozen backbones.
        """
        if self.settings.backbones:
            return (sum(feature_widths(self.settings.backbones)),)
        return tuple(self.data.train_inputs.shape[1:])

    @cached_property
    def model(self) -> SplitModel:
        owner = "global" if self.settings.starts_alike else self.name
        return self.new_model(self.arch, owner)

    def new_model(self, arch: str, owner: str) -> SplitModel:
        """Return a model with the first weights of ``owner``: everybody's are ``"global"``."""
        settings = self.settings
        seed = settings.run.seed
        model = initial_model(arch, self.input_shape, self.num_classes, settings.model, seed, owner)
        return model if self.device.type == "cpu" else model.to(self.device)

    @property
    def is_new(self) -> bool:
        """True for a simulated client that trains in no round (``new-clients``, ``new-domain``)."""
        drawn = self.settings.new_clients(self.node.num_partitions)
        new_domain = self.settings.federation.new_domain or None
        return self.node.partition in drawn or self.data.domain == new_domain

    @property
    def num_classes(self) -> int:
        return len(self.data.classes)

    # -- its files -----------------------------------------------------------------------------
    @property
    def root(self) -> Path:
        """``state-dir``, the folder of what never leaves; no server chooses it.

        In simulation it is ``out-dir``.
        """
        return Path(self.settings.machine.state_dir or self.settings.run.out_dir).expanduser()

    def own_file(self, run_name: str, name: str) -> Path:
        """Return a file of this client in the run that the server calls so.

        A site's may need a safer name.
        """
        return self.root / run_name / "clients" / self.name / name

    @cached_property
    def states(self) -> StateFolder:
        """The folder of this client's state: at a real site, every study has one of its own."""
        settings = self.settings
        use = f"{settings.run.algo} ({digest(repr(settings.exchange))})"
        if settings.privacy.dp != "none":
            use += ", with differential privacy"
        if self.study and self.study.name:
            use += f", in the {self.study}"

        run_history = self.instructions.run_history
        run_folder = self.instructions.run_name
        if self.node.is_site:  # names of runs may meet
            run_folder += f"-{run_history.first}"
        folder = self.root / run_folder / "clients"
        return StateFolder(folder, self.name, run_history, is_site=self.node.is_site, use=use)

    def signature(self, purpose: str) -> bytes:
        """Return the signature with this site's key, where the study names it; else b""."""
        if self.study is None or not self.settings.named_sites:
            return b""
        about = about_site(self.settings.study, self.name, self.run_id, purpose)
        return site_key(self.site_folder).sign(about)

    # -- the message ---------------------------------------------------------------------------
    @cached_property
    def instructions(self) -> Instructions:
        """What the message asks for.

        RefusedMessage for another Flower run, and for a round that it does not have.
        """
        instructions = unpack_instructions(self.content)
        number = instructions.round
        rounds = self.settings.run.rounds
        if not 1 <= number <= rounds:
            raise RefusedMessage(f"round.round is {number} in a run of {rounds} rounds")
        run_history = instructions.run_history
        if run_history.run_id != self.run_id:
            other = f"round.run_history is {run_history.text!r}"
            raise RefusedMessage(f"{other} in the Flower run {self.run_id}")
        if self.settings.privacy.secagg:
            return replace(instructions, counted=unpack_counted(self.content, self.name))
        return instructions

    @property
    def evaluates(self) -> bool:
        """True where the run's settings plan an evaluation for this message.

        No server may ask for another.
        """
        return not self.trains_now or self.settings.evaluates(self.instructions.round)

    def limits(self, weights: Mapping[str, Template]) -> Limits:
        """Return the limits of a payload from the server.

        ``weights`` has the arrays of each declared entry of weights. The server may hand on all
        prototypes that clients sent.
        """
        settings = self.settings
        clients = max(FEWEST_CLIENTS, self.node.num_partitions, settings.federation.num_clients)
        return Limits(
            self.num_classes,
            settings.model.feature_dim,
            weights=weights,
            max_per_class=clients * settings.bounds.max_prototypes_per_class,
        )

    @property
    def metrics(self) -> set[str]:
        return declared_metrics(self.settings.reported_metrics, self.num_classes)

    # -- what may leave ------------------------------------------------------------------------
    @cached_property
    def plan(self) -> Plan | None:
        """How what this site sends is made private; None where it is not."""
        return self.settings.plan(len(self.data.train_labels))

    @cached_property
    def released(self) -> Released | None:
        """What may leave in the answer to this message under differential privacy, else None."""
        if self.settings.privacy.dp == "none":
            return None
        return Released(self.settings.run.algo)

    @property
    def stated_samples(self) -> int:
        """Its training samples, as it tells them: 0 if they are only in a sum."""
        stated = release.stated_samples(self.data.train_labels, self.settings.privacy)
        return 0 if self.settings.hides_samples else stated

    @cached_property
    def large_classes(self) -> torch.Tensor:
        """Labels of the classes with ``min-class-samples`` training samples, on the CPU."""
        least = self.settings.privacy.min_class_samples
        return torch.from_numpy(release.large_classes(self.data.train_labels, least))

    def require_large_classes(self) -> None:
        """SettingsError where no class is large; noise hides which classes this client has."""
        if self.plan is None and not len(self.large_classes):
            least = self.settings.privacy.min_class_samples
            lacks = "this client has no class of as many training samples"
            raise SettingsError(f"min-class-samples = {least}: {lacks}")

    @property
    def classes_present(self) -> tuple[int, ...]:
        """Labels of its large classes, as prototypes or label counts will show them."""
        if self.plan is not None:
            return tuple(range(self.num_classes))  # which of them it has shows with noise only
        return tuple(self.large_classes.tolist())


def open_client(context: Context, message: Message | None = None) -> Client:
    """Return the client that answers a message, once its operator has agreed to the run.

    RefusedMessage, SettingsError or StateError where it does not answer. Without a message nobody
    is asked.
    """
    kind = message.metadata.message_type if message else ""
    content = message.content if message else RecordDict()
    if kind.endswith(".default"):  # Flower gives it to the same handler; no check below knows it
        raise RefusedMessage(f"a message of the kind {kind!r}")
    settings = _read_settings(context, content)
    node = NodeConfig.of(context.node_config)
    is_query = kind == MessageType.QUERY
    if is_query:  # before its operator is asked about settings that the server does not have
        check_settings(content, digest_of(settings.given))
    study = None
    if message and node.is_site:
        study = check_consent(
            context.run_config,
            context.run_id,
            context.node_config,
            approves=node.approves,
            counts=not is_query,
        )
    arch = _architecture(settings, node)
    device = _open_machine(settings.machine)
    return Client(
        settings=settings,
        node=node,
        run_id=context.run_id,
        site_folder=site_folder(context.node_config),
        arch=arch,
        device=device,
        content=content,
        trains_now=kind == MessageType.TRAIN,
        study=study,
    )


def _read_settings(context: Context, content: RecordDict) -> Settings:
    """Read the settings of the run, or of the baseline that a message is about.

    The modules that they name may be imported then; at a site, those that its node config names.
    """
    run_config = context.run_config
    node = context.node_config
    baseline = unpack_baseline(content)
    allow_named(node if is_site(node) else run_config)
    allow(names_in(node.get("allow-python")))
    settings = Settings.from_run_config(run_config, node)
    if not baseline:
        return settings
    if baseline not in settings.baselines:
        raise RefusedMessage(f"baseline is {baseline!r}, which the run's settings do not name")
    return Settings.from_run_config(baseline_config(run_config, baseline), node)


def _architecture(settings: Settings, node: NodeConfig) -> str:
    are_alike = settings.exchange.needs_one_architecture
    return settings.architecture(0 if are_alike else node.partition, settings.model.arch)


def _open_machine(machine: MachineSettings) -> torch.device:
    """Open the device, and set the number of PyTorch's threads in this process."""
    device = open_device(machine.device, machine.precision)
    if machine.threads:
        torch.set_num_threads(min(machine.threads, os.cpu_count() or 1))
    return device


def with_public_scale(data: ClientData) -> ClientData:
    """Return the data with a mean and deviation by channel or feature that no sample changes.

    The data's own are made of every sample: whoever changes one changes what the model is given of
    all others, which differential privacy does not cover. Images are centred; numbers stay as they
    are, so their owner scales them by limits that are known without the data.
    """
    are_images = data.train_inputs.dtype == np.uint8
    mean, deviation = (0.5, 0.25) if are_images else (0.0, 1.0)
    width = len(data.mean)
    return replace(data, mean=(mean,) * width, std=(deviation,) * width)


def without_rare_tests(data: ClientData, least: int) -> ClientData:
    """Return the data without test and validation samples of small classes.

    A class is small with fewer than ``least`` samples there, or to train on. A server could else
    count them: it chooses what is evaluated, such as weights that take each sample for one of them.
    """
    large = release.large_classes(data.train_labels, least)
    changes: dict[str, Any] = {}
    found = data.found
    for part in ("test", "validation"):
        inputs = getattr(data, f"{part}_inputs")
        labels = getattr(data, f"{part}_labels")
        kept_classes = np.intersect1d(large, release.large_classes(labels, least))
        rows = np.flatnonzero(np.isin(labels, kept_classes))
        if len(rows) < len(labels):
            changes[f"{part}_inputs"] = StoredRows(inputs, rows)
            changes[f"{part}_labels"] = labels[rows]
            found -= len(labels) - len(rows)
    return replace(data, found=found, **changes)
