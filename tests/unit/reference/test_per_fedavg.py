"""Per-FedAvg, two rounds: w~ and the outer step by hand; evaluated after one inner step."""

import pytest
import torch
from torch.func import functional_call

from client_app.algorithms.per_fedavg import MetaStep
from tests.support import plain
from tests.support.declaration import Declared
from tests.support.harness import run_config, run_federation

DECLARED = Declared(weights=True, acts={"alpha": 0.1})


class PerFedAvgClient(plain.PlainClient):
    def gradient(self, w: plain.State, rows: list[int]) -> plain.State:
        """Return ∇f(w; D) of the samples D in these rows."""
        w = {name: value.detach().requires_grad_() for name, value in w.items()}
        logits = functional_call(self.model, w, self.x[rows])
        loss = plain.cross_entropy(logits, self.labels(rows))
        return dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))

    def adapted(self, w: plain.State, rows: list[int]) -> plain.State:
        """Return w~ = w − α ∇f(w; D)."""
        gradient = self.gradient(w, rows)
        return {name: value - self.hparams.alpha * gradient[name] for name, value in w.items()}

    def train(self, number: int, w: plain.State) -> plain.State:
        """Take the steps v ← μ v + ∇f(w~; D');  w ← w − β v of a round; return w.

        D, of w~, and D' are the halves of a batch of twice the size, or both all of it if it has 3
        samples or fewer. β is the learning rate.
        """
        velocity = {name: torch.zeros_like(value) for name, value in w.items()}
        for rows in self.batches(number, 2 * plain.BATCH, passes=2):
            first = rows
            second = rows
            if len(rows) > 3:
                middle = (len(rows) + 1) // 2
                first = rows[:middle]
                second = rows[middle:]
            gradient = self.gradient(self.adapted(w, first), second)
            velocity = {name: self.momentum * v + gradient[name] for name, v in velocity.items()}
            w = {name: value - self.lr * velocity[name] for name, value in w.items()}
        return w

    def evaluated(self, number: int, w: plain.State) -> tuple[plain.State, float]:
        """Return the weights after one inner step on a training batch, and their accuracy."""
        first_batch = next(self.batches(number, what="adapt"))
        w = self.adapted(w, first_batch)
        with torch.no_grad():
            logits = functional_call(self.model, w, self.x_test)
        return w, self.accuracy(logits)


@pytest.mark.parametrize(("local_steps", "sizes"), [
    pytest.param(0, 2 * [20, 20] * 2, id="two epochs of two passes over 40 samples"),
    pytest.param(3, [20, 20, 20], id="three steps"),
])  # fmt: skip
def test_it_takes_as_many_steps_as_fedavg(local_steps, sizes, tmp_path, monkeypatch):
    """An epoch is two passes in batches of twice the size; with local-steps, each step counts once.

    Batch normalisation counts both halves of each batch, and the one to which it adapts at the end.
    """
    sizes_of_batches = []
    step = MetaStep.__call__

    def noted(self, inputs, labels, index):
        sizes_of_batches.append(len(labels))
        return step(self, inputs, labels, index)

    monkeypatch.setattr(MetaStep, "__call__", noted)
    settings = {
        "models": "resnet4-imagenet-stem",
        "rounds": 1,
        "train_samples": 40,
        "local_epochs": 2,
        "local_steps": local_steps,
    }
    run = run_federation(run_config(tmp_path, algo="per-fedavg", **settings), clients=1)

    assert sizes_of_batches == sizes
    batches = set()
    for name, value in plain.model_left(run.folder, "site-0").items():
        if name.endswith("num_batches_tracked"):
            batches.add(int(value))
    both_halves_and_the_adaptation = 2 * len(sizes) + 1
    assert batches == {both_halves_and_the_adaptation}


@pytest.mark.parametrize("samples", [45, 22])
def test_two_rounds_equal_an_independent_script(samples, tmp_path):
    """The global weights, the adapted models and their accuracies are the script's.

    Of 22 samples, the rest of a batch is too small to be divided.
    """
    settings = {
        "train_samples": samples,
        "test_samples": 30,
        "lr": 0.02,
        "per_fedavg__alpha": 0.1,
    }
    outcome, clients = plain.side_by_side(tmp_path, PerFedAvgClient, algo="per-fedavg", **settings)
    for client in clients:
        assert len(client.y) == samples

    weights = plain.after_rounds(clients, plain.copied(clients[0].model))

    plain.assert_weights_left(outcome, weights)
    for client in clients:
        adapted, accuracy = client.evaluated(2, weights)
        plain.assert_models_left(outcome, [client], adapted)
        plain.assert_accuracy(outcome, client, head=accuracy)
