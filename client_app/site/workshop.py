"""A client's data, device and model, read when they are asked for."""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from client_app.learning.data import Samples, augment_of, split_unlabelled, to_device
from client_app.site.client import Client
from client_app.site.log import log
from protofl_common.backbones.features import cached_features, feature_widths
from protofl_common.basics.files import cache_folder
from protofl_common.config.datasets import is_own
from protofl_common.config.lists import as_setting
from protofl_common.config.options import SettingsError
from protofl_common.data import ClientData, open_client_data
from protofl_common.data.division import Share
from protofl_common.data.raw import StoredRows
from protofl_common.models.build import initial_model
from protofl_common.models.devices import open_device
from protofl_common.models.split import SplitModel
from protofl_common.privacy import release
from protofl_common.privacy.persons import Persons
from protofl_common.privacy.plan import Plan
from protofl_common.tasks import Task
from protofl_common.wire.schema import Limits, Template

FEWEST_CLIENTS = 10
"""A client assumes that at least so many take part: node config and run may not say how many."""
OWN_SEED = 0
"""The seed with which a site divides data of its own: no run draws another division."""


class Workshop:
    """What a client works with; its half of the algorithm sees it as a `ClientView`."""

    def __init__(self, client: Client, device: torch.device) -> None:
        self.client = client
        self.device = device
        self.settings = client.settings
        self.name = client.name
        self.arch = client.arch
        self.instructions = client.instructions
        self.reports_failed_training = client.reports_failed_training
        self.seed_for = client.seed_for
        self._samples: dict[str, Samples] = {}  # by part of the data, once it is loaded

    # -- data ----------------------------------------------------------------------------------
    @cached_property
    def data(self) -> ClientData:
        """This client's samples, read when they are first asked for.

        With ``image-noise`` the training images have that noise, and the test images do not.
        SettingsError where the data do not fit the settings.
        """
        settings = self.settings
        has_own_data = self.client.node.has_own_data
        data = open_client_data(
            settings.data,
            seed=OWN_SEED if has_own_data else settings.run.seed,
            partition=self.client.node.partition,
            num_partitions=max(1, self.client.node.num_partitions),
            domain=self.client.node.domain,
            # a mean and deviation of this client's samples alone would tell of them
            shared_scale=settings.privacy.dp != "none",
            key=self.client.division_key(),
        )
        if has_own_data:
            data = self._without_private_facts(data)
        if settings.takes_vectors:
            data = with_public_scale(data)
        data = self._with_persons_once(data)
        # only for its DataError where data that are no images shall be augmented
        augment_of(settings.training.augment, data, self.device)
        noise = settings.noise.image_noise
        if noise == "none":
            return data
        images = np.asarray(data.train_inputs)
        seed = self.seed_for("image-noise")
        return replace(data, train_inputs=release.noised_images(images, noise, seed))

    def _with_persons_once(self, data: ClientData) -> ClientData:
        """Under ``dp = "person"``, return the data with one test or validation sample of each.

        SettingsError for ``dp = "sample"`` where the data say whose each sample is, and for
        ``dp = "person"`` where they do not. Only the column ``client`` says it, which the owner of
        the data writes, so no run can choose a weaker protection.
        """
        dp = self.settings.privacy.dp
        if dp == "sample" and data.persons is not None:
            raise SettingsError(
                "dp = 'sample': this client's data say whose each sample is (column client), so"
                " what is protected is a person, not a sample; set dp = 'person'"
            )
        if dp != "person":
            return data
        if data.persons is None:
            raise SettingsError(
                "dp = 'person': this client's data do not say whose each sample is; who has them"
                " may add a column client, by which no partition or domain divides"
            )
        return with_persons_once(data, data.persons)

    def _without_private_facts(self, data: ClientData) -> ClientData:
        """Return a site's own data without what its messages must not show.

        Under ``dp`` that is the scale of its samples, else the test samples of small classes.
        SettingsError for classes that neither the node config nor the run names: they are names of
        folders or values of a column, which may be anything, so only this site's own log has them.
        """
        settings = self.settings
        has_dp = settings.privacy.dp != "none"
        least = settings.privacy.min_class_samples
        if is_own(settings.data.dataset) and not settings.data.classes:
            names = as_setting("classes", data.classes)
            log("WARNING", f"if these names may leave this site, add {names} to its node config")
            raise SettingsError(
                f"classes = '': this site's data have {len(data.classes)} classes that nobody"
                " named; set classes, in label order, in its node config, or in the run"
            )
        if has_dp and data.mean:  # tokens have no scale
            return with_public_scale(data)
        if least > 1 and not has_dp:  # noise would not cover which classes are small
            return without_rare_tests(data, least)
        return data

    def load_data(self) -> None:
        """Read the samples that the answer to this message uses."""
        if self.client.evaluates:
            self._load("test")
            self._load("validation")
        if self.client.trains_now:
            self._load("train")

    @property
    def train_set(self) -> Samples:
        """Training inputs, or their features, and labels on the device; so are the other sets."""
        return self._load("train")

    @property
    def test_set(self) -> Samples:
        return self._load("test")

    @property
    def validation_set(self) -> Samples:
        return self._load("validation")

    def _load(self, part: str) -> Samples:
        """Return the samples of "train", "test" or "validation", which are read once.

        Only those for training are augmented.
        """
        if part in self._samples:
            return self._samples[part]
        inputs = getattr(self.data, f"{part}_inputs")
        labels = getattr(self.data, f"{part}_labels")
        samples = self._on_device(inputs, labels)
        if part == "train":
            augment = augment_of(self.settings.training.augment, self.data, self.device)
            samples = replace(samples, augment=augment)
        self._samples[part] = samples
        return samples

    def _on_device(self, inputs: np.ndarray, labels: np.ndarray) -> Samples:
        """Return inputs, or what the frozen backbones make of them, and labels on the device."""
        backbones = self.settings.backbones
        if self.settings.takes_vectors:
            inputs = np.asarray(inputs)  # large inputs may still be on the disk
        if not backbones:
            return to_device(inputs, labels, self.data, self.device)
        cache = cache_folder(self.settings.data.cache_dir)
        key = f"{self.settings.data.dataset}-{self.name}"  # begins the name of the cached file
        features_NF = cached_features(np.asarray(inputs), backbones, self.device, cache, key)
        labels_N = self.task.tensor(labels).to(self.device)
        return split_unlabelled(self.task, features_NF.to(self.device), labels_N)

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
        """Return a model on the device whose first weights follow from the seed and ``owner``.

        That is a client's name, or "global" for first weights that all clients share.
        """
        settings = self.settings
        seed = settings.run.seed
        outputs = self.task.num_outputs
        model = initial_model(arch, self.input_shape, outputs, settings.model, seed, owner)
        return model if self.device.type == "cpu" else model.to(self.device)

    @property
    def is_new(self) -> bool:
        """True for a simulated client that trains in no round (``new-clients``, ``new-domain``)."""
        new_clients = self.settings.new_clients(self.client.node.num_partitions)
        if self.client.node.partition in new_clients:
            return True
        new_domain = self.settings.federation.new_domain  # "": there is none
        return bool(new_domain) and self.data.domain == new_domain

    @property
    def task(self) -> Task:
        return self.data.task

    @property
    def num_classes(self) -> int:
        return self.task.num_classes

    def limits(self, weights: Mapping[str, Template]) -> Limits:
        """Return the limits that a payload from the server must keep to.

        ``weights`` has the shapes of the arrays of each declared entry of weights.
        """
        settings = self.settings
        num_partitions = self.client.node.num_partitions
        clients = max(FEWEST_CLIENTS, num_partitions, settings.federation.num_clients)
        return Limits(
            self.num_classes,
            settings.model.feature_dim,
            weights=weights,
            # the server may hand on all prototypes of all clients
            max_per_class=clients * settings.bounds.max_prototypes_per_class,
            classes_of_a_sample=self.task.classes_of_a_sample,
        )

    @property
    def metrics(self) -> set[str]:
        return self.task.figure_names(self.settings.reported_metrics)

    # -- what may leave ------------------------------------------------------------------------
    @cached_property
    def plan(self) -> Plan | None:
        """The noise and the cost of this client's messages under ``dp``; None without it."""
        return self.settings.plan(self.counted_samples)

    @cached_property
    def persons(self) -> Persons:
        """The persons that the training samples are of.

        Unless ``dp = "person"``, each sample is taken for a person of its own.
        """
        owners = self.data.persons
        if self.settings.privacy.dp != "person" or owners is None:
            return Persons.one_per_sample(len(self.data.train_labels))
        return Persons(owners.train)

    @property
    def counted_samples(self) -> int:
        """The number of training samples, or under ``dp = "person"`` of the persons they are of.

        This client has so much weight in averages.
        """
        return len(self.persons)

    @property
    def stated_samples(self) -> int:
        """The number of training samples, or of persons, that this client tells the server.

        It is 0 where the server shall learn only the sum over clients. Without ``dp`` the samples
        of small classes (``min-class-samples``) are not counted.
        """
        if self.settings.hides_sample_counts:
            return 0
        if self.settings.privacy.dp == "person":
            return self.counted_samples
        return release.stated_samples(self.task, self.data.train_labels, self.settings.privacy)

    @property
    def found_samples(self) -> int:
        """The size of the data set that this client's samples are from, as it tells the server.

        Of the client's own training samples only those are counted that `stated_samples` counts.
        Under ``dp = "person"`` it is the number of persons in the training part, and of samples in
        the others, where each person has one at most.
        """
        data = self.data
        if self.settings.privacy.dp == "person":
            return len(self.persons) + len(data.test_labels) + len(data.validation_labels)
        return data.found - len(data.train_labels) + self.stated_samples

    @cached_property
    def large_classes(self) -> torch.Tensor:
        """The classes with ``min-class-samples`` training samples, on the CPU."""
        least = self.settings.privacy.min_class_samples
        return torch.from_numpy(self.task.large_classes(self.data.train_labels, least))

    def require_large_classes(self) -> None:
        """Raise SettingsError where no class has ``min-class-samples``, so that nothing may leave.

        Under ``dp`` nothing is checked, as noise hides which classes are small.
        """
        # the only upload of a one-shot method is made of large classes alone
        classes = self.large_classes if self.settings.row.one_shot else self.classes_present
        has_noise = self.plan is not None
        if not (has_noise or len(classes)):
            raise SettingsError(
                f"min-class-samples = {self.settings.privacy.min_class_samples}: this client has no"
                " class of as many training samples"
            )

    @property
    def classes_present(self) -> tuple[int, ...]:
        """Labels of the classes that this client says it has: all of which it may upload something.

        These are the classes of its training samples or, with ``min-class-samples``, the large ones
        of these. With several labels a sample, the samples without a label have a class even if no
        sample has the label. Under ``dp`` it names all classes, as nothing without noise may tell
        which it has.
        """
        if self.plan is not None:
            return tuple(range(self.num_classes))
        if self.settings.privacy.min_class_samples == 1:
            return tuple(self.task.present_classes(self.data.train_labels).tolist())
        return tuple(self.large_classes.tolist())


def open_workshop(client: Client) -> Workshop:
    """Return a client's workshop, and set the number of PyTorch's threads in this process.

    SettingsError where the device is not usable.
    """
    machine = client.settings.machine
    device = open_device(machine.device, machine.precision)
    if machine.threads:
        torch.set_num_threads(min(machine.threads, os.cpu_count() or 1))
    return Workshop(client, device)


def with_public_scale(data: ClientData) -> ClientData:
    """Return the data with a mean and deviation for standardising that do not depend on samples.

    With those of the data, one sample would change what the model sees of all others, which
    differential privacy does not cover; and clients could not add moments of vectors that each
    scales differently. Images in [0, 1] are centred. Numbers stay as they are: their owner scales
    them beforehand, by limits that are known without the data.
    """
    are_images = data.train_inputs.dtype == np.uint8
    mean, deviation = (0.5, 0.25) if are_images else (0.0, 1.0)
    width = len(data.mean)  # channels or features
    return replace(data, mean=(mean,) * width, std=(deviation,) * width)


def with_persons_once(data: ClientData, owners: Share) -> ClientData:
    """Return the data with a single test or validation sample of each person, the first.

    Persons with test samples have no validation sample. Which sample is kept depends on the
    person's own samples alone, as the privacy of persons needs it. ``owners`` has the number of
    the person of each sample, for every part of the data.
    """
    test_rows = Persons(owners.test).first_of_each()
    validation_rows = Persons(owners.validation).first_of_each()
    has_test_sample = np.isin(owners.validation[validation_rows], owners.test)
    validation_rows = validation_rows[~has_test_sample]
    inputs: dict[str, Any] = {
        "test_inputs": StoredRows(data.test_inputs, test_rows),
        "validation_inputs": StoredRows(data.validation_inputs, validation_rows),
    }
    return replace(
        data,
        test_labels=data.test_labels[test_rows],
        validation_labels=data.validation_labels[validation_rows],
        persons=Share(owners.train, owners.test[test_rows], owners.validation[validation_rows]),
        **inputs,
    )


def without_rare_tests(data: ClientData, least: int) -> ClientData:
    """Return the data without the test and validation samples of small classes.

    A class is small in a part of the data if it has fewer than ``least`` samples there, or fewer to
    train on. Otherwise a server could count them, as it chooses what is evaluated: for example
    weights that predict one such class for every sample.
    """
    task = data.task
    large_in_training = task.large_classes(data.train_labels, least)
    changes: dict[str, Any] = {}
    found = data.found
    for part in ("test", "validation"):
        inputs = getattr(data, f"{part}_inputs")
        labels = getattr(data, f"{part}_labels")
        kept_classes = np.intersect1d(large_in_training, task.large_classes(labels, least))
        kept_labels = task.only_of(labels, kept_classes)
        rows = np.flatnonzero(task.known(kept_labels))
        changes[f"{part}_labels"] = kept_labels[rows]
        if len(rows) < len(labels):
            changes[f"{part}_inputs"] = StoredRows(inputs, rows)
            found -= len(labels) - len(rows)
    return replace(data, found=found, **changes)
