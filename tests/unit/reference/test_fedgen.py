"""FedGen, two rounds: bodies of different architectures.

Generator, ensemble of heads and Adam by hand, in float64.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

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
CLASSES, DIM, NOISE, STEPS, SIZE, LR = 10, 16, 4, 5, 6, 0.01


def drawn(
    totals: torch.Tensor, size: int, random: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels and noise, in the order in which the system draws them."""
    labels = torch.multinomial(totals.double(), size, replacement=True, generator=random)
    return labels, torch.randn(size, NOISE, generator=random)


def made(
    w: plain.State, labels: torch.Tensor, noise: torch.Tensor, mean: torch.Tensor, var: torch.Tensor
) -> torch.Tensor:
    """G(ε, y), row by row, with these statistics for its normalisation."""
    hidden = before_norm(w, labels, noise)
    scaled = (hidden - mean) / torch.sqrt(var + 1e-5) * w["norm.weight"] + w["norm.bias"]
    return torch.stack([w["out.weight"] @ row.clamp(min=0) + w["out.bias"] for row in scaled])


def before_norm(w: plain.State, labels: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    inputs = [
        torch.cat([row, torch.eye(CLASSES)[label]]).double()
        for row, label in zip(noise, labels, strict=True)
    ]
    return torch.stack([w["hidden.weight"] @ row + w["hidden.bias"] for row in inputs])


class Generator:
    def __init__(self, seed: int) -> None:
        state = TrainedGenerator(CLASSES, DIM, NOISE, seed).state_dict()
        self.w = {
            name: value.double()
            for name, value in state.items()
            if value.ndim and "running" not in name
        }
        self.mean, self.var = torch.zeros(DIM).double(), torch.ones(DIM).double()
        self.m = {name: torch.zeros_like(value) for name, value in self.w.items()}
        self.v = {name: torch.zeros_like(value) for name, value in self.w.items()}
        self.steps, self.random = 0, torch.Generator().manual_seed(seed)

    def train(self, heads: list[plain.State], sizes: list[int], totals: torch.Tensor) -> None:
        """STEPS of Adam for CE(Σ_k n_k/n θ_k(G(ε, y)), y)."""
        for _ in range(STEPS):
            labels, noise = drawn(totals, SIZE, self.random)
            leaves = {name: value.clone().requires_grad_() for name, value in self.w.items()}
            hidden = before_norm(leaves, labels, noise)
            mean, var = hidden.mean(0), hidden.var(0, unbiased=False)
            z = made(leaves, labels, noise, mean, var)
            each = [z @ one["head.weight"].double().T + one["head.bias"].double() for one in heads]
            logits = sum(n / sum(sizes) * one for n, one in zip(sizes, each, strict=True))
            gradients = torch.autograd.grad(
                plain.cross_entropy(logits, labels.tolist()), list(leaves.values())
            )
            self.mean = 0.9 * self.mean + 0.1 * mean.detach()
            self.var = 0.9 * self.var + 0.1 * var.detach() * SIZE / (SIZE - 1)
            self.adam(dict(zip(leaves, gradients, strict=True)))

    def adam(self, gradients: plain.State) -> None:
        self.steps += 1
        for name, g in gradients.items():
            self.m[name] = 0.9 * self.m[name] + 0.1 * g
            self.v[name] = 0.999 * self.v[name] + 0.001 * g * g
            m, v = self.m[name] / (1 - 0.9**self.steps), self.v[name] / (1 - 0.999**self.steps)
            self.w[name] = self.w[name] - LR * m / (torch.sqrt(v) + 1e-8)

    def features(self, labels: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return made(self.w, labels, noise, self.mean, self.var)


class FedGenClient(plain.PlainClient):
    def __init__(self, *facts: Any) -> None:
        super().__init__(*facts)
        self.counts = torch.tensor([self.y.count(label) for label in range(CLASSES)])

    def train(
        self, number: int, head: plain.State, generator: Generator | None, totals: torch.Tensor
    ) -> plain.State:
        self.model.load_state_dict(plain.copied(self.model) | head)
        velocity = [torch.zeros_like(p) for p in self.model.parameters()]
        torch.manual_seed(derive_seed(self.seed, "train", self.name, number))
        for batch in self.batches(number):
            loss = plain.cross_entropy(self.model(self.x[batch]), [self.y[i] for i in batch])
            if generator is not None:
                labels, noise = drawn(totals, plain.BATCH)
                z = generator.features(labels, noise).float()
                loss = loss + self.hparams.lambda_ * plain.cross_entropy(
                    self.model.head(z), labels.tolist()
                )
            self.step(loss, self.model, velocity)
        return {name: value for name, value in plain.copied(self.model).items() if name in head}


@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_two_rounds_equal_an_independent_script(weight: float, tmp_path: Path) -> None:
    hparams = {"fedgen__lambda": weight, "fedgen__noise_dim": NOISE, "fedgen__server_steps": STEPS}
    hparams |= {"fedgen__server_lr": LR, "fedgen__server_batch_size": SIZE}
    small: dict[str, Any] = {
        "feature_dim": DIM,
        "test_samples": 20,
        "lr": 0.02,
        "total_samples": 150,
    }
    small |= {"liars": 0, "partition": "label-shift", "alpha": 0.5}
    outcome, clients = plain.side_by_side(
        tmp_path, FedGenClient, ARCHS, algo="fedgen", **small, **hparams
    )
    messages = [message for message, _ in outcome.grid.log]
    down = {
        n: [one.content.array_records for one in messages if one.metadata.group_id == str(n)]
        for n in (1, 2)
    }

    assert all(set(records) == {"weights"} for records in down[1][: plain.CLIENTS])
    assert all(list(records) == ["weights", "generator", "label_counts"] for records in down[2])

    totals, sizes = sum(client.counts for client in clients), [len(client.y) for client in clients]
    generator = Generator(derive_seed(clients[0].seed, "fedgen"))
    head = plain.tensors(down[1][0]["weights"])

    assert head.keys() == {"head.weight", "head.bias"}

    for number in (1, 2):
        learned = generator if number > 1 and weight else None
        heads = [client.train(number, head, learned, totals) for client in clients]
        head = plain.averaged(heads, sizes)
        generator.train(heads, sizes, totals)

    plain.assert_close(plain.weights_left(outcome), head)
    plain.assert_models_left(
        tmp_path, {client.name: plain.copied(client.model) | head for client in clients}
    )

    last = down[2][-1]
    assert plain.tensors(last["label_counts"])["counts"].tolist() == totals.tolist()

    labels, noise = drawn(totals, 50, torch.Generator().manual_seed(0))
    received = {name: value.double() for name, value in plain.tensors(last["generator"]).items()}
    found = made(
        received, labels, noise, received["norm.running_mean"], received["norm.running_var"]
    )

    torch.testing.assert_close(found, generator.features(labels, noise), rtol=1e-3, atol=1e-4)

    for message, reply in outcome.exchanged():
        client = clients[message.metadata.dst_node_id - 50]
        sent = reply.content.array_records
        assert list(sent) == ["weights", "label_counts"]
        assert set(sent["weights"]) == head.keys()
        assert plain.tensors(sent["label_counts"])["counts"].tolist() == client.counts.tolist()
    both_ways = plain.CLIENTS * (4 * (DIM + 1) * CLASSES + 8 * CLASSES)
    theta = 4 * ((NOISE + CLASSES) * DIM + DIM + 4 * DIM + DIM * DIM + DIM) + 8

    assert outcome.rows[1]["bytes"] == {"up": both_ways, "down": both_ways + plain.CLIENTS * theta}


def test_labels_are_those_of_the_clients_of_the_last_round(tmp_path: Path) -> None:
    """Not of the others: their heads are not among those that the generator learns from."""
    small: dict[str, Any] = {
        "models": "htcnn-1",
        "participation": 0.25,
        "rounds": 3,
        "dataset": "digits",
    }
    small |= {
        "partition": "pathological",
        "classes_per_client": 2,
        "train_samples": 20,
        "test_samples": 20,
    }
    outcome = run_federation(run_config(tmp_path, liars=0, algo="fedgen", **small), clients=4)
    training = outcome.exchanged()

    assert len(training) == 3

    for (_, reply), (message, _) in itertools.pairwise(training):
        sent, received = (
            one.content.array_records["label_counts"]["counts"].data for one in (reply, message)
        )
        assert sent == received

    assert not any(outcome.summary["trouble"].values())


def test_the_same_seed_gives_the_same_generator_and_leaves_the_global_one_alone() -> None:
    before = torch.random.get_rng_state()
    one, same, other = (TrainedGenerator(3, 4, 2, seed).hidden.weight for seed in (5, 5, 6))

    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.random.get_rng_state())


def test_cifar100_costs_what_the_paper_says() -> None:
    """FedTGP, Table 5: 20 clients, Σ (2 |w| + |Θ|) = 8.69 M.

    It leaves out buffers and label counts, 0.3 %.
    """
    head = sum(parameter.numel() for parameter in LinearHead(512, 100).parameters())
    made = TrainedGenerator(100, 512, 32, seed=0)
    theta = sum(parameter.numel() for parameter in made.parameters())

    assert theta == (32 + 100) * 512 + 512 + 2 * 512 + 512 * 512 + 512
    assert round(20 * (2 * head + theta) / 1e6, 2) == 8.69
    assert (sum(buffer.numel() for buffer in made.buffers()) + 2 * 100) == 2 * 512 + 1 + 2 * 100
    assert set(CATALOG["fedgen"].exchange.down) == {"weights", "generator", "label_counts"}
    assert set(CATALOG["fedgen"].exchange.up) == {"weights", "label_counts"}
