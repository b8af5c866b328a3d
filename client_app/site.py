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

from client_app.augment import Augment, augment_of
from client_app.data import Samples, to_device, unlabelled_apart
from client_app.state import StateError, StateFolder
from protofl_common.backbones.cache import cached_features
from protofl_common.backbones.extract import check_images, feature_widths
from protofl_common.config.options import SettingsError
from protofl_common.config.sections import MachineSettings
from protofl_common.datasets import UNLABELLED, ClientData, open_client_data
from protofl_common.datasets.inputs import normalised
from protofl_common.datasets.store import cache_root, digest
from protofl_common.devices import open_device
from protofl_common.evaluation_metrics import declared_metrics
from protofl_common.files import make_private
from protofl_common.models.build import check_model
from protofl_common.models.initial import initial_model
from protofl_common.models.split import SplitModel
from protofl_common.permissions import required_dp
from protofl_common.privacy.plan import Plan
from protofl_common.privacy.release import noised_images
from protofl_common.seeding import derive_seed
from protofl_common.settings import Settings, baseline_config, is_site
from protofl_common.text import is_site_name
from protofl_common.wire.limits import Limits, RefusedMessage, Template
from protofl_common.wire.records import Instructions, SiteCard


class Site:
    """Built anew for every message from Flower's context; nothing is read before it is needed.

    Raises
    ------
    SettingsError
        If the run configuration or this node's ``--node-config`` is wrong.
    RefusedMessage
        For a ``baseline`` that the run configuration does not name.
    """

    def __init__(self, context: Context, baseline: str = "") -> None:
        node = context.node_config
        self.settings = Settings.from_run_config(context.run_config, node)
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
        self.run_id, self.real = context.run_id, is_site(node)
        self.required_dp = required_dp(node)
        self.wanted_domain = str(node.get("domain", ""))
        self.insight = self._insight(node)
        alike = self.settings.exchange.needs_one_architecture
        self.arch = self.settings.architecture(0 if alike else self.partition, self.settings.model.arch)
        self.device = _device(self.settings.machine)
        if self.settings.machine.threads:
            torch.set_num_threads(min(self.settings.machine.threads, os.cpu_count() or 1))

    def _insight(self, node: Mapping[str, object]) -> str:
        """What this site tells for the report, of what the run asks for (`protofl_common.insight`).

        A site with data of its own (a ``data-dir`` in its node config, no partition of a common data set) tells
        nothing unless its node config says ``insight=true``; with ``insight=false`` no site does. Features are of
        single samples: none with ``min-class-samples``.
        """
        own = "data-dir" in node or "partition-id" not in node or self.settings.data.partition == "own"
        willing = node.get("insight", not own)
        if not isinstance(willing, bool):
            raise SettingsError(f"node-config: insight = {willing!r} must be true or false")
        level = self.settings.run.insight if willing else "none"
        single = level == "features" and self.settings.privacy.min_class_samples > 1
        return "none" if single else level

    @cached_property
    def data(self) -> ClientData:
        """This site's share of the data, as it is stored; with ``image-noise``, its training images with noise."""
        data = open_client_data(
            self.settings.data,
            seed=self.settings.run.seed,
            partition=self.partition,
            num_partitions=max(1, self.num_partitions),
            domain=self.wanted_domain,
        )
        self._augment(data)  # refuses what are no images
        noise, seed = self.settings.privacy.image_noise, derive_seed(self.settings.run.seed, "image-noise", self.name)
        if noise == "none":
            return data
        return replace(data, train_inputs=noised_images(np.asarray(data.train_inputs), noise, seed))

    def _augment(self, data: ClientData) -> Augment | None:
        return augment_of(self.settings.training.augment, data, self.device)

    def load_data(self) -> None:
        """Read all sets now."""
        _ = self.train_set, self.test_set, self.validation_set

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
        return unlabelled_apart(features_NF.to(self.device), labels_N)

    @cached_property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of a sample of `train_set`: the input's own, or the number of backbone features."""
        if self.settings.backbones:
            return (sum(feature_widths(self.settings.backbones)),)
        return tuple(self.data.train_inputs.shape[1:])

    @cached_property
    def model(self) -> SplitModel:
        """A freshly initialised model: the site's own weights, or, ``initial-weights = "shared"``, everybody's."""
        owner = self.name if self.settings.model.initial_weights == "own" else "global"
        model = initial_model(
            self.arch, self.input_shape, self.num_classes, self.settings.model, self.settings.run.seed, owner
        )
        return model.to(self.device)

    @cached_property
    def plan(self) -> Plan | None:
        """How what this site sends is made private; None where it is not."""
        return self.settings.plan(len(self.data.train_labels))

    @property
    def num_classes(self) -> int:
        """C, of the whole data set."""
        return len(self.data.classes)

    @property
    def metrics(self) -> set[str]:
        """What a report may hold beside accuracy."""
        return declared_metrics(self.settings.metrics, self.num_classes)

    def limits(self, weights: Mapping[str, Template]) -> Limits:
        """What this site accepts from the server; ``weights``: the arrays of each declared entry of weights."""
        federation = self.settings.federation
        clients = max(10, self.num_partitions, federation.num_clients)
        many = clients * federation.max_prototypes_per_class  # the server may hand on all that clients sent
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
        """Where this site keeps its state in the run; RefusedMessage for another Flower run, or a round too many."""
        lineage, rounds = instructions.lineage, self.settings.run.rounds
        if instructions.round > rounds:
            raise RefusedMessage(f"round.round is {instructions.round} in a run of {rounds} rounds")
        if lineage.run_id != self.run_id:
            raise RefusedMessage(f"round.lineage is {lineage.text!r} in the Flower run {self.run_id}")
        use = f"{self.settings.run.algo} ({digest(repr(self.settings.exchange))})"
        folder = self._state_root / instructions.run_name / "clients"
        return StateFolder(folder, self.name, lineage, wary=self.real, use=use)

    def account_file(self, run_name: str) -> Path:
        """Where this site notes what its privacy has cost: one file for all runs; in a simulation, one for each."""
        if self.real:
            return self._state_root / "privacy" / f"{self.name}.json"
        return self._state_root / run_name / "clients" / self.name / "privacy.json"

    def secret_file(self, run_name: str) -> Path:
        """Where the secret of a round of secure aggregation lies; at a site, whatever the server calls the run."""
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
        two = normalised(self.data.train_inputs[:2], self.data.mean, self.data.std, self.device)
        check_model(self.model, self.arch, two, self.settings.model.feature_dim)

    def check_batches(self) -> None:
        """SettingsError where a batch is of one sample, and the model's batch normalisation cannot train on it."""
        size, samples = self.settings.training.batch_size, len(self.data.train_labels)
        if min(size, samples) > 1:
            return
        one = torch.zeros(1, *self.input_shape, device=self.device)
        if not self.settings.backbones:
            one = normalised(self.data.train_inputs[:1], self.data.mean, self.data.std, self.device)
        try:
            with torch.no_grad():
                copy.deepcopy(self.model).train().body(one)
        except ValueError as error:
            why = "batch normalisation cannot train on a batch of one sample; set norm = 'group', or bring more samples"
            raise SettingsError(f"batch-size = {size}, and there are {samples} training samples: {why}") from error

    def card(self, parameters: int, weights: str) -> SiteCard:
        """How this site introduces itself; ``weights``: a digest of all weights that it exchanges, "" for none."""
        return SiteCard(
            name=self.name,
            partition=self.partition,
            num_partitions=self.num_partitions,
            domain=self.data.domain,
            arch=self.arch,
            input_shape=self.input_shape,
            parameters=parameters,
            train_samples=self.told_samples,
            test_samples=len(self.data.test_labels),
            classes=self.data.classes,
            holds=self._held() if self.settings.row.tells_classes and not self.settings.privacy.secagg else (),
            weights=weights,
            device=str(self.device),
            found=0 if self.settings.hides_samples else self.data.found,
            validation_samples=len(self.data.validation_labels),
        )

    @property
    def told_samples(self) -> int:
        """Its training samples, as it tells them: 0 where they are only in a sum."""
        return 0 if self.settings.hides_samples else len(self.data.train_labels)

    def _held(self) -> tuple[int, ...]:
        """Labels of the training samples, as its prototypes or label counts will tell them; SettingsError for none."""
        if self.settings.privacy.dp == "sample":
            return tuple(range(self.num_classes))  # which of them it has is told with noise only
        least, labels_N = self.settings.privacy.min_class_samples, self.data.train_labels
        labels, counts = np.unique(labels_N[labels_N != UNLABELLED], return_counts=True)
        if not len(found := labels[counts >= least].tolist()):
            raise SettingsError(f"min-class-samples = {least}: this client has no class of as many training samples")
        return tuple(found)


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
