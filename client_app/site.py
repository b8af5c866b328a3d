"""One site: who it is, its settings, its data, its model and the file that keeps it."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import torch
from flwr.app import Context
from torch import Tensor

from client_app.augment import Augment, augment_of
from client_app.data import Samples, split_unlabelled, to_device
from client_app.failures import log
from client_app.state import StateError, StateFolder
from protofl_common.backbones.cache import cached_features
from protofl_common.backbones.extract import check_images, feature_widths
from protofl_common.basics.devices import open_device
from protofl_common.basics.files import digest, make_private
from protofl_common.basics.seeding import derive_seed
from protofl_common.basics.text import is_site_name, names_in
from protofl_common.config.datasets import is_own
from protofl_common.config.options import SettingsError
from protofl_common.config.python_names import allow
from protofl_common.config.sections import MachineSettings
from protofl_common.data import UNLABELLED, ClientData, open_client_data
from protofl_common.data.raw import Ints
from protofl_common.data.store import cache_root
from protofl_common.experiment.permissions import allow_named, has_own_data, required_dp
from protofl_common.experiment.settings import Settings, baseline_config, is_site, own_division
from protofl_common.models.build import check_model
from protofl_common.models.initial import initial_model
from protofl_common.models.split import SplitModel
from protofl_common.privacy.plan import Plan
from protofl_common.privacy.release import noised_images
from protofl_common.runs.evaluation_metrics import declared_metrics
from protofl_common.wire.limits import Limits, RefusedMessage, Template
from protofl_common.wire.records import Instructions, SiteCard

OWN_SEED = 0
"""The seed with which a site with data of its own divides them: no run draws another division."""


class Site:
    """Built anew for every message from Flower's context; nothing is read before it is needed.

    SettingsError if the run configuration or this node's ``--node-config`` is wrong. RefusedMessage for a ``baseline``
    that the run configuration does not name.
    """

    def __init__(self, context: Context, baseline: str = "") -> None:
        node = context.node_config
        self.settings = Settings.from_run_config(context.run_config, node)
        allow_named(node if is_site(node) else context.run_config)
        allow(names_in(node.get("allow-python")))
        if baseline:
            if baseline not in self.settings.baselines:
                raise RefusedMessage(f"baseline is {baseline!r}, which the run's settings do not name")
            self.settings = Settings.from_run_config(baseline_config(context.run_config, baseline), node)
        self.partition = _whole(node, "partition-id")
        self.num_partitions = _whole(node, "num-partitions")
        if "site-name" not in node and "partition-id" not in node:
            raise SettingsError("node-config: give partition-id and num-partitions, or a site-name")
        self.name = str(node.get("site-name", f"site-{self.partition}"))
        if not is_site_name(self.name):
            made_of = "ASCII letters, digits, '.', '_' and '-', and begin with a letter or digit"
            raise SettingsError(f"node-config: site-name = {self.name!r} must be made of at most 100 {made_of}")
        self.run_id, self.real, self.has_own_data = context.run_id, is_site(node), has_own_data(node)
        self.ignored = [key for key, value in own_division(node).items() if context.run_config.get(key) != value]
        """Settings of the run about the division of the data that do not hold here."""
        self.required_dp = required_dp(node)
        self.wanted_domain = str(node.get("domain", ""))
        self.statistics = self._statistics(node)
        alike = self.settings.exchange.needs_one_architecture
        self.arch = self.settings.architecture(0 if alike else self.partition, self.settings.model.arch)
        self.device = _device(self.settings.machine)
        if self.settings.machine.threads:
            torch.set_num_threads(min(self.settings.machine.threads, os.cpu_count() or 1))

    def _statistics(self, node: Mapping[str, object]) -> str:
        """The level of statistics that this client sends, of what the run asks for (`protofl_common.wire.statistics`).

        A site with data of its own (a ``data-dir`` in its node config, no partition of a common data set) tells
        nothing unless its node config says ``statistics=true``; with ``statistics=false`` no site does. Features are of
        single samples: none with ``min-class-samples``.
        """
        own = "data-dir" in node or "partition-id" not in node or self.settings.data.partition == "own"
        willing = node.get("statistics", not own)
        if not isinstance(willing, bool):
            raise SettingsError(f"node-config: statistics = {willing!r} must be true or false")
        level = self.settings.run.statistics if willing else "none"
        single = level == "features" and self.settings.privacy.min_class_samples > 1
        return "none" if single else level

    @cached_property
    def data(self) -> ClientData:
        """This site's share of the data, as it is stored; with ``image-noise``, its training images with noise.

        SettingsError for classes of a site's own data that neither the node config nor the run names: names of folders
        or the values of a column may be anything, so only this site's own log has them.
        """
        data = open_client_data(
            self.settings.data,
            seed=OWN_SEED if self.has_own_data else self.settings.run.seed,
            partition=self.partition,
            num_partitions=max(1, self.num_partitions),
            domain=self.wanted_domain,
        )
        if self.has_own_data and is_own(self.settings.data.dataset) and not self.settings.data.classes:
            names = f'classes="{",".join(data.classes)}"'
            log("WARNING", f"if these names may leave this site, add {names} to its node config")
            many = f"this site's data have {len(data.classes)} classes that nobody named"
            raise SettingsError(f"classes = '': {many}; set classes, in label order, in its node config, or in the run")
        if self.has_own_data and self.settings.privacy.dp != "none" and data.mean:
            data = with_public_scale(data)
        self._augment(data)  # refuses what are no images
        noise, seed = self.settings.noise.image_noise, derive_seed(self.settings.run.seed, "image-noise", self.name)
        if noise == "none":
            return data
        return replace(data, train_inputs=noised_images(np.asarray(data.train_inputs), noise, seed))

    def _augment(self, data: ClientData) -> Augment | None:
        return augment_of(self.settings.training.augment, data, self.device)

    @cached_property
    def train_set(self) -> Samples:
        """Training inputs, or their features, and labels on the device."""
        samples = self._on_device(self.data.train_inputs, self.data.train_labels)
        return replace(samples, augment=self._augment(self.data))

    @cached_property
    def test_set(self) -> Samples:
        """Test inputs, or their features, and labels on the device."""
        return self._on_device(self.data.test_inputs, self.data.test_labels)

    @cached_property
    def validation_set(self) -> Samples:
        """Validation inputs, or their features, and labels on the device; there may be none."""
        return self._on_device(self.data.validation_inputs, self.data.validation_labels)

    def _on_device(self, inputs: np.ndarray, labels: np.ndarray) -> Samples:
        names = self.settings.backbones
        if not names:
            return to_device(inputs, labels, self.data, self.device)
        key = f"{self.settings.data.dataset}-{self.name}"
        features_NF = cached_features(np.asarray(inputs), names, self.device, cache_root(self.settings.data), key)
        labels_N = torch.from_numpy(labels.astype(np.int64)).to(self.device)
        return split_unlabelled(features_NF.to(self.device), labels_N)

    @cached_property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of a sample of `train_set`: the input's own, or the number of backbone features."""
        if self.settings.backbones:
            return (sum(feature_widths(self.settings.backbones)),)
        return tuple(self.data.train_inputs.shape[1:])

    @cached_property
    def model(self) -> SplitModel:
        """A freshly initialised model: everybody's first weights or this site's own (``initial-weights``)."""
        owner = "global" if self.settings.starts_alike else self.name
        model = initial_model(
            self.arch, self.input_shape, self.num_classes, self.settings.model, self.settings.run.seed, owner
        )
        return model.to(self.device)

    @cached_property
    def plan(self) -> Plan | None:
        """How what this site sends is made private; None where it is not."""
        return self.settings.plan(len(self.data.train_labels))

    @cached_property
    def step_plan(self) -> Plan | None:
        """The noise of training steps: the plan's, or a paper's, which protects nothing; None for neither."""
        return self.plan or self.settings.plan_of_paper(len(self.data.train_labels))

    @property
    def num_classes(self) -> int:
        """C, of the whole data set."""
        return len(self.data.classes)

    @property
    def metrics(self) -> set[str]:
        """Names of the metrics that a report may carry beside accuracy."""
        return declared_metrics(self.settings.metrics, self.num_classes)

    def limits(self, weights: Mapping[str, Template]) -> Limits:
        """Return the limits of a payload from the server; ``weights``: the arrays of each declared entry of weights."""
        federation = self.settings.federation
        clients = max(10, self.num_partitions, federation.num_clients)
        many = clients * self.settings.bounds.max_prototypes_per_class  # the server may hand on all that clients sent
        return Limits(self.num_classes, self.settings.model.feature_dim, weights=weights, max_per_class=many)

    @property
    def _state_root(self) -> Path:
        return Path(self.settings.machine.state_dir or self.settings.run.out_dir)

    def check_state_folder(self) -> None:
        """StateError if a site could not keep a model: it must show before the first round, not after its training."""
        if not self.real:
            return
        try:
            make_private(self._state_root)
            with TemporaryFile(dir=self._state_root) as probe:
                probe.write(bytes(2**16))  # a full disk takes the name of a file, and nothing in it
        except OSError as error:
            raise StateError(f"state-dir: {self._state_root.absolute()} cannot be written ({error})") from error

    def states(self, instructions: Instructions) -> StateFolder:
        """Return the folder of this client's state: at a real site, every study has one of its own.

        RefusedMessage for another Flower run, or a round too many.
        """
        run_history, rounds = instructions.run_history, self.settings.run.rounds
        if instructions.round > rounds:
            raise RefusedMessage(f"round.round is {instructions.round} in a run of {rounds} rounds")
        if run_history.run_id != self.run_id:
            raise RefusedMessage(f"round.run_history is {run_history.text!r} in the Flower run {self.run_id}")
        private = "" if self.settings.privacy.dp == "none" else ", with differential privacy"
        use = f"{self.settings.run.algo} ({digest(repr(self.settings.exchange))}){private}"
        run = f"{instructions.run_name}-{run_history.first}" if self.real else instructions.run_name  # names may meet
        folder = self._state_root / run / "clients"
        return StateFolder(folder, self.name, run_history, wary=self.real, use=use)

    def account_file(self, run_name: str) -> Path:
        """Return the file of the privacy ledger: one for all runs; in a simulation, one for each.

        At a site it is the data's, not the name's: a site with a new name has spent what it had spent.
        """
        if self.real:
            folder = self.settings.data.data_dir and str(Path(self.settings.data.data_dir).expanduser().resolve())
            key = digest(folder, self.wanted_domain, self.partition)
            return self._state_root / "privacy" / f"{key}.json"
        return self._state_root / run_name / "clients" / self.name / "privacy.json"

    @property
    def answers_file(self) -> Path:
        """Return the file in which a real site notes the questions that it has answered."""
        return self._state_root / "privacy" / f"{self.name}.answered"

    def secret_file(self, run_name: str) -> Path:
        """Return the file of the secret of a sum; at a site it does not depend on the server's name for the run."""
        if self.real:
            return self._state_root / "privacy" / f"{self.name}-{self.run_id}-{self.settings.run.algo}.secagg"
        return self._state_root / run_name / "clients" / self.name / "secagg.json"

    def check_model(self) -> None:
        """SettingsError where this site's model, or a frozen backbone before it, does not take its data."""
        if self.settings.backbones:
            check_images(self.data.train_inputs, self.settings.backbones)
            return
        try:
            _ = self.model
        except ValueError as error:
            raise SettingsError(str(error)) from error
        check_model(self.model, self.arch, self._zeros(2), self.settings.model.feature_dim)

    def check_batches(self) -> None:
        """SettingsError where a batch is of one sample, and the model's batch normalisation cannot train on it."""
        size, samples = self.settings.training.batch_size, len(self.data.train_labels)
        if min(size, samples) > 1:
            return
        try:
            with torch.no_grad():
                copy.deepcopy(self.model).train().body(self._zeros(1))
        except ValueError as error:
            why = "batch normalisation cannot train on a batch of one sample; set norm = 'group', or bring more samples"
            raise SettingsError(f"batch-size = {size}, and there are {samples} training samples: {why}") from error

    def _zeros(self, number: int) -> Tensor:
        """Return inputs to try a network on: its error goes to the server, and may quote what it was given."""
        dtype = torch.float32 if self.data.mean or self.settings.backbones else torch.int64
        return torch.zeros(number, *self.input_shape, dtype=dtype, device=self.device)

    def card(self, parameters: int, weights: str) -> SiteCard:
        """How this site introduces itself; ``weights``: a digest of all weights that it exchanges, "" for none."""
        hidden = self.settings.privacy.secagg
        return SiteCard(
            name=self.name,
            partition=self.partition,
            num_partitions=self.num_partitions,
            domain=self.wanted_domain if self.has_own_data else self.data.domain,
            arch=self.arch,
            input_shape=self.input_shape,
            parameters=parameters,
            train_samples=self.stated_samples,
            test_samples=0 if hidden else len(self.data.test_labels),
            classes=self.data.classes,
            holds=self._classes_present() if self.settings.row.tells_classes and not hidden else (),
            weights=weights,
            device=str(self.device),
            found=0 if hidden else self.data.found,
            validation_samples=0 if hidden else len(self.data.validation_labels),
            real=self.real,
        )

    @property
    def stated_samples(self) -> int:
        """Its training samples, as it tells them: 0 where they are only in a sum."""
        return 0 if self.settings.hides_samples else len(self.data.train_labels)

    def _classes_present(self) -> tuple[int, ...]:
        """Labels of the training samples, as its prototypes or label counts will tell them; SettingsError for none."""
        if self.plan is not None:
            return tuple(range(self.num_classes))  # which of them it has is told with noise only
        if not len(found := self.large_classes):
            least = self.settings.privacy.min_class_samples
            raise SettingsError(f"min-class-samples = {least}: this client has no class of as many training samples")
        return tuple(found.tolist())

    @property
    def large_classes(self) -> Ints:
        """Labels of the classes with ``min-class-samples`` training samples: nothing that leaves may name others."""
        labels_N = self.data.train_labels
        labels, counts = np.unique(labels_N[labels_N != UNLABELLED], return_counts=True)
        return np.asarray(labels[counts >= self.settings.privacy.min_class_samples])


def with_public_scale(data: ClientData) -> ClientData:
    """Return the data with a mean and deviation for each channel or feature that no sample has a part in.

    The data's own are made of every sample: whoever changes one changes what the model is given of all others, which
    differential privacy does not cover. Images are centred; numbers stay as they are, so their owner scales them by
    limits that are known without the data.
    """
    middle, spread = (0.5, 0.25) if data.train_inputs.dtype == np.uint8 else (0.0, 1.0)
    channels = len(data.mean)
    return replace(data, mean=(middle,) * channels, std=(spread,) * channels)


def _whole(node: Mapping[str, object], key: str) -> int:
    value = node.get(key, 0)
    if not isinstance(value, int) or value < 0:
        raise SettingsError(f"node-config: {key} = {value!r} must be a whole number at least 0")
    return value


def _device(machine: MachineSettings) -> torch.device:
    try:
        return open_device(machine.device, machine.precision)
    except (RuntimeError, AssertionError) as error:
        name, reason = machine.device, str(error).splitlines()[0]
        hint = "; a simulated client sees a GPU only if it asks for a part of one: client-resources-num-gpus=0.25"
        raise SettingsError(
            f"device = {name!r}: not usable here ({reason}){hint if name.startswith('cuda') else ''}"
        ) from error
