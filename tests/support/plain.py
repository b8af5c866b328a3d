"""A client of the independent scripts.

It shares with the system only what is not the algorithm: the clients' data, their initial weights
and the seeds of the batch orders.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, MessageType
from safetensors.torch import load_file
from torch import Tensor, nn

from protofl_common.basics.seeding import derive_seed
from protofl_common.data import open_client_data
from protofl_common.experiment.settings import Settings
from protofl_common.models.build import build_model
from tests.support.attacks import values_of
from tests.support.harness import Outcome, federate, run_config, run_federation

BATCH, CLIENTS = 10, 3
State = dict[str, Tensor]
Loss = Callable[[list[int]], Tensor]


class PlainClient:
    """Data, model and momentum SGD; the losses and prototypes are each script's own."""

    starts_alike = True
    """All clients have the same first model."""

    def __init__(self, settings: Settings, index: int, arch: str, clients: int = CLIENTS) -> None:
        self.data = open_client_data(
            settings.data, seed=settings.run.seed, partition=index, num_partitions=clients
        )
        self.x = self.standardised(self.data.train_inputs)
        self.x_test = self.standardised(self.data.test_inputs)
        self.y = self.data.train_labels.tolist()
        self.y_test = self.data.test_labels.tolist()

        self.name = f"site-{index}"
        self.seed = settings.run.seed
        self.arch = arch
        self.dim = settings.model.feature_dim
        self.lr = settings.training.lr
        self.momentum = settings.training.momentum
        self.hparams = settings.hparams

    def standardised(self, images: np.ndarray) -> Tensor:
        """(x / 255 − mean) / std of each channel, float32 [N, C, H, W]."""
        mean = np.array(self.data.mean, np.float32).reshape(1, -1, 1, 1)
        std = np.array(self.data.std, np.float32).reshape(1, -1, 1, 1)
        return torch.from_numpy((images.astype(np.float32) / 255 - mean) / std)

    @cached_property
    def model(self) -> nn.Module:
        return self.model_of("global" if self.starts_alike else self.name)

    def model_of(self, owner: str) -> nn.Module:
        return build_model(
            self.arch,
            input_shape=self.data.train_inputs.shape[1:],
            num_classes=10,
            feature_dim=self.dim,
            seed=derive_seed(self.seed, "model", owner),
        )

    def receive(self, shared: State) -> None:
        self.model.load_state_dict(copied(self.model) | shared)

    def part(self, shared: Collection[str]) -> State:
        """The weights that have these names."""
        return {name: value for name, value in copied(self.model).items() if name in shared}

    def batches(
        self, number: int, size: int = BATCH, passes: int = 1, what: str = "train"
    ) -> Iterator[list[int]]:
        """Yield rows of the training data, in the order in which round ``number`` sees them.

        ``what`` is the purpose that the system names when it seeds this order.
        """
        generator = torch.Generator().manual_seed(derive_seed(self.seed, what, self.name, number))
        yield from minibatches(len(self.y), size, passes, generator)

    def sgd(self, number: int, module: nn.Module | None = None, loss: Loss | None = None) -> None:
        """Take a round's steps of SGD on the loss of each batch.

        Without ``module`` and ``loss`` it trains the client's model by cross-entropy.
        """
        module = (module or self.model).train()
        loss = loss or self.cross_entropy
        velocity = zeros(module)
        for batch in self.batches(number):
            self.step(loss(batch), module, velocity)

    def labels(self, batch: list[int]) -> list[int]:
        return [self.y[i] for i in batch]

    def cross_entropy(self, batch: list[int], model: nn.Module | None = None) -> Tensor:
        model = model or self.model
        return cross_entropy(model(self.x[batch]), self.labels(batch))

    def cross_entropy_and(
        self, batch: list[int], term: Callable[[Tensor, int], Tensor | float]
    ) -> Tensor:
        """Return the cross-entropy plus the mean over the batch of ``term(features, label)``."""
        labels = self.labels(batch)
        z = self.model.body(self.x[batch])
        terms = [term(features, label) for features, label in zip(z, labels, strict=True)]
        return cross_entropy(self.model.head(z), labels) + sum(terms) / len(batch)

    def rows_of(self) -> dict[int, list[int]]:
        """Class -> the rows of its training samples."""
        rows: dict[int, list[int]] = {label: [] for label in sorted(set(self.y))}
        for i, label in enumerate(self.y):
            rows[label].append(i)
        return rows

    def class_means(self) -> dict[int, Tensor]:
        """Class -> the mean of its training features in evaluation mode, float64 [D]."""
        with torch.no_grad():
            z = self.model.eval().body(self.x).double()
        return {label: z[rows].mean(0) for label, rows in self.rows_of().items()}

    def accuracy(self, logits: Tensor) -> float:
        """Return the share of test samples whose largest logit is that of their label."""
        hits = [row == label for row, label in zip(logits.argmax(1), self.y_test, strict=True)]
        return float(sum(hits)) / len(hits)

    def step(
        self,
        loss: Tensor,
        model: nn.Module,
        velocity: list[Tensor],
        towards: Iterable[Tensor] = (),
        pull: float = 0,
    ) -> None:
        """One step of SGD with momentum: v ← μ v + ∇ + λ (θ − w); θ ← θ − η v.

        θ are the model's parameters, ∇ the gradient of the loss, v the ``velocity``, μ the momentum
        and η the learning rate. The weights w are those ``towards`` which θ is pulled, if any, and
        λ is ``pull``.
        """
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss, parameters)
        anchors = list(towards) or [None] * len(parameters)
        with torch.no_grad():
            for p, g, v, w in zip(parameters, gradients, velocity, anchors, strict=True):
                if w is not None:
                    g = g + pull * (p - w)
                v.mul_(self.momentum).add_(g)
                p.sub_(self.lr * v)


class SharingClient(PlainClient):
    """One whose model has a part that is common to all."""

    def train(self, number: int, shared: State) -> State:
        """Take in the common part, learn, and send it."""
        self.receive(shared)
        self.sgd(number)
        return self.part(shared)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of two vectors, 0 for features ``a`` that are all zero."""
    lengths = a.norm().clamp(min=1e-12) * b.norm()
    return (a * b).sum() / lengths


def zeros(model: nn.Module) -> list[Tensor]:
    """Return a tensor of zeros for each parameter: the velocity of SGD at its start."""
    return [torch.zeros_like(p) for p in model.parameters()]


def cross_entropy(logits: Tensor, labels: list[int]) -> Tensor:
    """Return −log softmax at the label, averaged over the rows of ``logits`` [N, C]."""
    logp = torch.log_softmax(logits, dim=1)
    return -sum(logp[row, label] for row, label in enumerate(labels)) / len(labels)


def minibatches(
    count: int, size: int, epochs: int, generator: torch.Generator
) -> Iterator[list[int]]:
    """Yield batches of row numbers below ``count``, which are shuffled anew in every epoch."""
    for _ in range(epochs):
        order = torch.randperm(count, generator=generator).tolist()
        for start in range(0, count, size):
            yield order[start : start + size]


def descend(loss: Tensor, parameters: Sequence[Tensor], lr: float) -> None:
    """One step of plain SGD: θ ← θ − η ∇, with the learning rate η."""
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for p, g in zip(parameters, gradients, strict=True):
            p.sub_(lr * g)


class Adam:
    """m ← β1 m + (1 − β1) g; v ← β2 v + (1 − β2) g²; w ← w − η λ w − η m̂ / (√v̂ + ε).

    η is ``lr`` and λ ``decay``; β1 = 0.9, β2 = 0.999, ε = 1e-8.
    """

    def __init__(self, lr: float, decay: float = 0.0) -> None:
        self.lr = lr
        self.decay = decay
        self.moments: dict[str, tuple[Any, Any]] = {}
        self.steps = 0

    def step(self, weights: State, gradients: State) -> State:
        """Return the weights after a step."""
        self.steps += 1
        after = {}
        for name, g in gradients.items():
            m, v = self.moments.get(name, (0.0, 0.0))
            m = 0.9 * m + 0.1 * g
            v = 0.999 * v + 0.001 * g * g
            self.moments[name] = (m, v)

            m_hat = m / (1 - 0.9**self.steps)
            v_hat = v / (1 - 0.999**self.steps)
            w = weights[name] - self.lr * self.decay * weights[name]
            after[name] = w - self.lr * m_hat / (v_hat.sqrt() + 1e-8)
        return after


def averaged(states: list[State], sizes: list[int]) -> State:
    """Return the mean of weights w_i by sizes n_i, Σ n_i w_i / Σ n_i."""
    shares = [n / sum(sizes) for n in sizes]
    mean = {}
    for name in states[0]:
        mean[name] = sum(share * w[name] for share, w in zip(shares, states, strict=True))
    return mean


def mean_by_samples(clients: Sequence[PlainClient], states: list[State]) -> State:
    return averaged(states, [len(client.y) for client in clients])


def by_class(sets: Iterable[Mapping[Any, Any]]) -> dict[Any, list[Any]]:
    """Return class -> what each client that holds it has sent, in ascending order of classes.

    ``sets``: for each client, class -> what it sends of it.
    """
    pairs = chain.from_iterable(sent.items() for sent in sets)
    held: dict[Any, list[Any]] = {}
    for label, value in sorted(pairs, key=lambda pair: pair[0]):
        held.setdefault(label, []).append(value)
    return held


def class_averages(sets: Iterable[Mapping[Any, tuple[Any, int]]]) -> dict[Any, Any]:
    """Return the mean of each class over the clients that hold it, Σ n_i C_i / Σ n_i.

    ``sets``: for each client, class -> (its prototype C_i, its number of samples n_i).
    """
    averages = {}
    for label, held in by_class(sets).items():
        total = sum(n for _, n in held)
        averages[label] = sum(n * mean for mean, n in held) / total
    return averages


def after_rounds(clients: Sequence[Any], weights: State, rounds: int = 2) -> State:
    """Return the global weights after so many rounds of averaging.

    In each, every client trains from the global weights, and the mean of what they send, by
    samples, takes their place.
    """
    for number in range(1, rounds + 1):
        weights = mean_by_samples(clients, [client.train(number, weights) for client in clients])
    return weights


def copied(model: nn.Module) -> State:
    """Return a copy of the model's weights, which later training does not change."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def tensors(record: ArrayRecord) -> State:
    return {name: torch.from_numpy(values_of(array).copy()) for name, array in record.items()}


def assert_equal(found: State, wanted: State) -> None:
    """Both have the same tensors, to the last bit."""
    assert found.keys() == wanted.keys()
    different = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
    assert different == []


def assert_close(found: State, wanted: State) -> None:
    """Both have the same tensors, up to the rounding of float32."""
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def model_left(folder: Path, site: str) -> State:
    """Return the weights of the model that a client leaves after the run in ``folder``."""
    (path,) = folder.rglob(f"{site}/model.safetensors")
    weights = {}
    for name, value in load_file(path).items():
        if name.startswith("model."):  # the file has other state of the client beside it
            weights[name.removeprefix("model.")] = value
    return weights


def weights_left(outcome: Outcome) -> State:
    """The global weights after the run."""
    return load_file(outcome.folder / "weights.safetensors")


def server_state_left(outcome: Outcome) -> State:
    """Return the tensors of the server's last checkpoint, which has the highest number."""
    return load_file(max((outcome.folder / "checkpoints").glob("*.safetensors")))


def assert_weights_left(outcome: Outcome, wanted: State) -> None:
    assert_close(weights_left(outcome), wanted)


def assert_models_left(
    outcome: Outcome,
    clients: Sequence[PlainClient],
    common: State | None = None,
    own: str = "model",
) -> None:
    """Each client has left the script's model, except for the weights that are ``common``.

    These are what the last merge made of a part of all models. ``own`` is the attribute of the
    script's client that is its model.
    """
    _runs, folder, *_ = outcome.folder.parents  # in which sites have a folder of their own
    for client in clients:
        wanted = copied(getattr(client, own)) | (common or {})
        assert_close(model_left(folder, client.name), wanted)


def assert_accuracy(outcome: Outcome, client: PlainClient, **wanted: float) -> None:
    """A client's final accuracy by each way to predict (``head``, ``prototype``) is as wanted.

    It may differ by one test sample, since rounding can put one on the other side of a border.
    """
    one_sample = 1.01 / len(client.y_test)  # with a margin for the comparison of floats
    assert outcome.summary["accuracy-of-clients"][client.name] == pytest.approx(
        wanted, abs=one_sample
    )


def assert_prototypes_left(
    outcome: Outcome, wanted: Mapping[int, Any], rtol: float = 1e-3, atol: float = 1e-4
) -> None:
    """The run has left one global prototype of each class, and these are as wanted."""
    found = load_file(outcome.folder / "prototypes.safetensors")
    assert found["labels"].tolist() == sorted(wanted)
    means = np.stack([np.asarray(wanted[label]) for label in sorted(wanted)])
    np.testing.assert_allclose(found["means"].numpy(), means, rtol=rtol, atol=atol)


def side_by_side(
    folder: Path,
    kind: type[Any],
    archs: str | Sequence[str] = "htcnn-3",
    number: int = CLIENTS,
    **settings: Any,
) -> tuple[Outcome, list[Any]]:
    """Make a run, and return it with a script's clients of the same settings, not yet trained.

    Features have 16 numbers unless the settings say otherwise. ``kind`` is the class of the
    script's clients; ``archs`` is the architecture of all clients, or a list with one for each.
    """
    config = run_config(folder, **{"feature_dim": 16} | settings)
    if isinstance(archs, str):
        outcome = run_federation(config | {"models": archs}, number)
        archs = [archs] * number
    else:
        outcome = run_federation(config, nodes=on_sites(folder, archs))
    clients = []
    for index, arch in enumerate(archs):
        clients.append(kind(Settings.from_run_config(config), index, arch, number))
    return outcome, clients


def runs(
    folder: Path, algos: Sequence[str], number: int = CLIENTS, **settings: Any
) -> list[Outcome]:
    """Make one run of each algorithm, with the same settings."""
    outcomes = []
    for algo in algos:
        outcomes.append(federate(folder / algo, clients=number, algo=algo, **settings))
    return outcomes


UNEQUAL: dict[str, Any] = {
    "partition": "dirichlet",
    "alpha": 0.5,
    "total_samples": 150,
    "train_samples": 0,
}
"""Settings under which clients differ in their numbers of samples and in their classes."""
TINY: dict[str, Any] = {"train_samples": 25, "test_samples": 20, "feature_dim": 16, "lr": 0.02}
HETEROGENEOUS = ("cnn4", "htcnn-3", "htcnn-1")
"""Three architectures, none with dropout, so that script and system draw the same numbers."""


def on_sites(folder: Path, archs: Sequence[str]) -> dict[int, dict[str, Any]]:
    """Return the node configs of nodes 50, 51, …, each with its own architecture.

    Their states are in one folder beside the runs, where `assert_models_left` looks for them.
    """
    place = {"num-partitions": len(archs), "state-dir": f"{folder}/site"}
    return {50 + i: {"partition-id": i, "arch": arch, **place} for i, arch in enumerate(archs)}


def assert_only_weights_travel(outcome: Outcome, names: Collection[str]) -> None:
    """No arrays travel but weights of these names.

    The server sends them for training and for the final evaluation, and clients after training.
    """
    for message, reply in outcome.grid.log:
        kind = message.metadata.message_type
        down = [] if kind == MessageType.QUERY else ["weights"]
        up = ["weights"] if kind == MessageType.TRAIN else []
        for content, wanted in ((message.content, down), (reply.content, up)):
            assert list(content.array_records) == wanted
            for record in content.array_records.values():
                assert set(record) == set(names)
