"""Per-FedAvg, two rounds: w~ and the outer step by hand; evaluated after one inner step."""

from pathlib import Path

import pytest
import torch
from torch.func import functional_call

from client_app.algorithms.per_fedavg import MetaStep
from protofl_common.basics.seeding import derive_seed
from tests.support import plain
from tests.support.declaration import Declared
from tests.support.harness import run_config, run_federation

DECLARED = Declared(weights=True, acts={"alpha": 0.1})


class PerFedAvgClient(plain.PlainClient):
    def gradient(self, w: plain.State, rows: list[int]) -> plain.State:
        """∇f(w; D)."""
        w = {name: value.detach().requires_grad_() for name, value in w.items()}
        loss = plain.cross_entropy(
            functional_call(self.model, w, self.x[rows]), [self.y[i] for i in rows]
        )
        return dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))

    def adapted(self, w: plain.State, rows: list[int]) -> plain.State:
        """w~ = w − α ∇f(w; D)."""
        gradient = self.gradient(w, rows)
        return {name: value - self.hparams.alpha * gradient[name] for name, value in w.items()}

    def train(self, number: int, w: plain.State) -> plain.State:
        """v ← μ v + ∇f(w~; D');  w ← w − β v."""
        velocity = {name: torch.zeros_like(value) for name, value in w.items()}
        for rows in self.batches(number, 2 * plain.BATCH, passes=2):
            middle = (len(rows) + 1) // 2
            first, second = (rows[:middle], rows[middle:]) if len(rows) > 3 else (rows, rows)
            gradient = self.gradient(self.adapted(w, first), second)
            velocity = {name: self.momentum * v + gradient[name] for name, v in velocity.items()}
            w = {name: value - self.lr * velocity[name] for name, value in w.items()}
        return w

    def evaluated(self, number: int, w: plain.State) -> tuple[plain.State, float]:
        """After one inner step on a batch of training data; with its accuracy."""
        generator = torch.Generator().manual_seed(
            derive_seed(self.seed, "adapt", self.name, number)
        )
        w = self.adapted(
            w, torch.randperm(len(self.y), generator=generator).tolist()[: plain.BATCH]
        )
        with torch.no_grad():
            found = functional_call(self.model, w, self.x_test).argmax(1).tolist()
        return w, sum(a == b for a, b in zip(found, self.y_test, strict=True)) / len(self.y_test)


def test_it_takes_as_many_steps_as_fedavg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch is two passes in batches of twice the size; with local-steps, each step counts once.

    Batch normalisation counts both halves of each batch, and the one to which it adapts at the end.
    """
    steps: list[int] = []
    step = MetaStep.__call__

    def counted(
        self: MetaStep, inputs: torch.Tensor, labels: torch.Tensor, index: torch.Tensor
    ) -> object:
        steps.append(len(labels))
        return step(self, inputs, labels, index)

    monkeypatch.setattr(MetaStep, "__call__", counted)
    small = {"models": "resnet4-imagenet-stem", "rounds": 1, "train_samples": 40, "local_epochs": 2}
    config = run_config(tmp_path, algo="per-fedavg", **small)
    for settings, expected in (({}, 2 * [20, 20] * 2), ({"local-steps": 3}, [20, 20, 20])):
        steps.clear()
        run = run_federation(
            config | settings | {"out-dir": str(tmp_path / str(settings))}, clients=1
        )
        assert steps == expected
        left = plain.model_left(run.folder, "site-0")
        seen = {int(value) for name, value in left.items() if name.endswith("num_batches_tracked")}
        assert seen == {2 * len(expected) + 1}


@pytest.mark.parametrize("samples", [45, 22])
def test_two_rounds_equal_an_independent_script(samples: int, tmp_path: Path) -> None:
    """Of 22 samples, the rest of a batch is too small to be divided."""
    more = {
        "feature_dim": 16,
        "train_samples": samples,
        "test_samples": 30,
        "lr": 0.02,
        "per_fedavg__alpha": 0.1,
    }
    outcome, clients = plain.side_by_side(tmp_path, PerFedAvgClient, algo="per-fedavg", **more)

    assert [len(client.y) for client in clients] == plain.CLIENTS * [samples]

    weights = plain.two_rounds(clients, plain.copied(clients[0].model))
    plain.assert_close(plain.weights_left(outcome), weights)

    for client in clients:
        adapted, accuracy = client.evaluated(2, weights)
        plain.assert_close(plain.model_left(outcome.folder, client.name), adapted)
        reported = outcome.summary["accuracy-of-clients"][client.name]["head"]
        assert reported == pytest.approx(
            accuracy, abs=1.01 / len(client.y_test)
        )  # a borderline sample
