"""FedGen, two rounds: bodies of different architectures.

Generator and ensemble of heads by hand, in float64.
"""

import itertools
from typing import Any

import pytest
import torch
from flwr.app import MessageType, RecordDict

from protofl_common.basics.seeding import derive_seed
from protofl_common.experiment.catalog import CATALOG
from protofl_common.models.split import Generator as TrainedGenerator
from protofl_common.models.split import LinearHead
from tests.support import plain
from tests.support.declaration import Declared
from tests.support.harness import run_config, run_federation

DECLARED = Declared(
    weights=True,
    label_counts=True,
    stays=("body.",),
    losses=("cross-entropy", "generated"),
    acts={
        "lambda": 5.0,
        "noise-dim": 8,
        "server-steps": 5,
        "server-lr": 0.5,
        "server-batch-size": 4,
    },
)

ARCHS = ("mnist-cnn", "htcnn-3", "mnist-cnn-18")
HEAD = ("head.weight", "head.bias")
CLASSES = 10
FIRST_NODE = 50
"""The node of client 0 where a script runs beside the system; client 1 has the next one."""
DIM = 16
"""Numbers of a feature, and of the generator's hidden layer."""
NOISE = 4
"""Numbers of ε."""
# The generator's training at the server, every round:
STEPS = 5
SIZE = 6
LR = 0.01


def drawn(
    totals: torch.Tensor, size: int, random: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw ``size`` labels [B], as frequent as all clients hold them, and noise [B, NOISE].

    ``totals``: the samples of each class. The order is that in which the system draws.
    """
    labels = torch.multinomial(totals.double(), size, replacement=True, generator=random)
    noise = torch.randn(size, NOISE, generator=random)
    return labels, noise


def generated(
    w: plain.State, labels: torch.Tensor, noise: torch.Tensor, mean: torch.Tensor, var: torch.Tensor
) -> torch.Tensor:
    """Return G(ε, y) of each row, with this mean and variance for its batch normalisation."""
    unit = (before_norm(w, labels, noise) - mean) / torch.sqrt(var + 1e-5)
    scaled = unit * w["norm.weight"] + w["norm.bias"]
    return scaled.clamp(min=0) @ w["out.weight"].T + w["out.bias"]


def before_norm(w: plain.State, labels: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return what the first layer makes of each row: W [ε; one-hot y] + b."""
    one_hot = torch.eye(CLASSES)[labels]
    rows = torch.cat([noise, one_hot], dim=1).double()
    return rows @ w["hidden.weight"].T + w["hidden.bias"]


class Generator:
    """The server's generator, its running statistics, and its optimizer, in float64."""

    def __init__(self, seed: int) -> None:
        self.w = {}
        for name, value in TrainedGenerator(CLASSES, DIM, NOISE, seed).state_dict().items():
            if value.ndim and "running" not in name:
                self.w[name] = value.double()
        self.mean = torch.zeros(DIM).double()
        self.var = torch.ones(DIM).double()
        self.adam = plain.Adam(LR)
        self.random = torch.Generator().manual_seed(seed)

    def train(self, heads: list[plain.State], sizes: list[int], totals: torch.Tensor) -> None:
        """Take STEPS of Adam on CE(Σ_k n_k/n θ_k(G(ε, y)), y), with the clients' heads θ_k."""
        for _ in range(STEPS):
            labels, noise = drawn(totals, SIZE, self.random)
            leaves = {name: value.clone().requires_grad_() for name, value in self.w.items()}

            hidden = before_norm(leaves, labels, noise)
            mean = hidden.mean(0)
            var = hidden.var(0, unbiased=False)
            z = generated(leaves, labels, noise, mean, var)

            logits = []
            for head in heads:
                weight, bias = (head[name].double() for name in HEAD)
                logits.append({"mean": z @ weight.T + bias})
            ensemble = plain.averaged(logits, sizes)["mean"]
            loss = plain.cross_entropy(ensemble, labels.tolist())
            gradients = torch.autograd.grad(loss, list(leaves.values()))

            self.mean = 0.9 * self.mean + 0.1 * mean.detach()
            self.var = 0.9 * self.var + 0.1 * var.detach() * SIZE / (SIZE - 1)  # unbiased
            self.w = self.adam.step(self.w, dict(zip(leaves, gradients, strict=True)))

    def features(self, labels: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return G(ε, y) as a client has it: normalised by the running statistics."""
        return generated(self.w, labels, noise, self.mean, self.var)


class FedGenClient(plain.PlainClient):
    def __init__(self, *facts: Any) -> None:
        super().__init__(*facts)
        self.counts = torch.tensor([self.y.count(label) for label in range(CLASSES)])

    def train(
        self, number: int, head: plain.State, generator: Generator | None, totals: torch.Tensor
    ) -> plain.State:
        """Train on CE of the samples, and λ times CE of the head on features that are generated."""
        self.receive(head)
        torch.manual_seed(derive_seed(self.seed, "train", self.name, number))

        def loss(batch: list[int]) -> torch.Tensor:
            """Return the batch's cross-entropy plus λ times that of as many generated features."""
            of_samples = self.cross_entropy(batch)
            if generator is None:
                return of_samples
            labels, noise = drawn(totals, plain.BATCH)
            z = generator.features(labels, noise).float()
            of_generated = plain.cross_entropy(self.model.head(z), labels.tolist())
            return of_samples + self.hparams.lambda_ * of_generated

        self.sgd(number, loss=loss)
        return self.part(HEAD)


@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_two_rounds_equal_an_independent_script(weight, tmp_path):
    """Heads, models, the generator's features and what travels are the script's."""
    settings = {
        "fedgen__lambda": weight,
        "fedgen__noise_dim": NOISE,
        "fedgen__server_steps": STEPS,
        "fedgen__server_lr": LR,
        "fedgen__server_batch_size": SIZE,
        "lr": 0.02,
        "total_samples": 150,
        "liars": 0,
        "partition": "label-shift",
        "alpha": 0.5,
        "test_samples": 20,
    }
    outcome, clients = plain.side_by_side(tmp_path, FedGenClient, ARCHS, algo="fedgen", **settings)
    first = [message.content for message, _ in outcome.exchanged(number=1)]
    later = []
    for kind in (MessageType.TRAIN, MessageType.EVALUATE):
        later += [message.content for message, _ in outcome.exchanged(kind, 2)]

    # the first round begins without a generator
    for content in first:
        assert set(content.array_records) == {"weights"}
    for content in later:
        assert list(content.array_records) == ["weights", "generator", "label_counts"]

    totals = sum(client.counts for client in clients)
    sizes = [len(client.y) for client in clients]
    generator = Generator(derive_seed(clients[0].seed, "fedgen"))
    head = plain.tensors(first[0]["weights"])
    assert head.keys() == set(HEAD)
    for number in (1, 2):
        sent_generator = generator if number > 1 and weight else None
        heads = [client.train(number, head, sent_generator, totals) for client in clients]
        head = plain.averaged(heads, sizes)
        generator.train(heads, sizes, totals)

    plain.assert_weights_left(outcome, head)
    plain.assert_models_left(outcome, clients, head)
    assert counts_in(later[-1]) == totals.tolist()

    final_message = later[-1]
    sent = plain.tensors(final_message["generator"])
    received = {name: value.double() for name, value in sent.items()}
    mean = received["norm.running_mean"]
    var = received["norm.running_var"]
    labels, noise = drawn(totals, 50, torch.Generator().manual_seed(0))
    found = generated(received, labels, noise, mean, var)
    torch.testing.assert_close(found, generator.features(labels, noise), rtol=1e-3, atol=1e-4)

    for message, reply in outcome.exchanged():
        client = clients[message.metadata.dst_node_id - FIRST_NODE]
        assert list(reply.content.array_records) == ["weights", "label_counts"]
        assert set(reply.content["weights"]) == set(HEAD)
        assert counts_in(reply.content) == client.counts.tolist()


def counts_in(content: RecordDict) -> list[int]:
    """Return how many samples of each class a message says there are."""
    return plain.tensors(content["label_counts"])["counts"].tolist()


def test_labels_are_those_of_the_clients_of_the_last_round(tmp_path):
    """The generator learns from the heads of these clients only."""
    settings = {
        "models": "htcnn-1",
        "participation": 0.25,  # one of four clients a round
        "rounds": 3,
        "dataset": "digits",
        "partition": "pathological",
        "classes_per_client": 2,
        "train_samples": 20,
        "test_samples": 20,
    }
    outcome = run_federation(run_config(tmp_path, liars=0, algo="fedgen", **settings), clients=4)

    training = outcome.exchanged()
    assert len(training) == 3
    for (_, reply), (next_message, _) in itertools.pairwise(training):
        assert counts_in(next_message.content) == counts_in(reply.content)
    assert not any(outcome.summary["trouble"].values())


def test_cifar100_costs_what_the_paper_says():
    """FedTGP's Table 5 has 8.69 million numbers: of 20 clients, Σ (2 |w| + |Θ|).

    w is the head, which goes up and down, and Θ the generator, which goes down. Left out are
    buffers and label counts, 0.3 %.
    """
    classes, dim, noise = 100, 512, 32
    head = LinearHead(dim, classes)
    generator = TrainedGenerator(classes, dim, noise, seed=0)
    numbers_of_head = sum(parameter.numel() for parameter in head.parameters())
    theta = sum(parameter.numel() for parameter in generator.parameters())

    first_layer = (noise + classes) * dim + dim
    normalisation = 2 * dim
    last_layer = dim * dim + dim
    assert theta == first_layer + normalisation + last_layer
    assert round(20 * (2 * numbers_of_head + theta) / 1e6, 2) == 8.69

    # what the paper leaves out: mean, variance and number of batches
    assert sum(buffer.numel() for buffer in generator.buffers()) == 2 * dim + 1
    exchange = CATALOG["fedgen"].exchange
    assert set(exchange.down) == {"weights", "generator", "label_counts"}
    assert set(exchange.up) == {"weights", "label_counts"}
