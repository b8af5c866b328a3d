"""Identities: an algorithm whose own term is switched off is a simpler one, to the last bit.

Of the rows of metrics what both have is compared, and the models that the clients leave. FML's meme model must not use
random numbers (dropout), or the private model draws others than it does alone.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from client_app.data import to_device
from protofl_common.basics.seeding import derive_seed
from protofl_common.experiment.settings import Settings
from tests.support.harness import Outcome, run_config, run_federation
from tests.support.plain import CLIENTS, PlainClient
from tests.support.results import assert_same_models, metrics, models_left

MODELS = ("small3", "resnet4-imagenet-stem", "htcnn-3")
"""Several architectures where an algorithm allows it, batch normalisation, and layers for the fused step."""
IDENTITIES: dict[str, tuple[str, dict[str, Any]]] = {
    "fedprox": ("fedavg", {"fedprox__mu": 0.0}),
    "fedper": ("fedavg", {"fedper__personal_layers": 0}),
    "fedgen": ("lg-fedavg", {"fedgen__lambda": 0.0}),
    "fesem": ("fedavg", {"fesem__centres": 1}),
    "feddistill": ("local", {"feddistill__gamma": 0.0}),
    "fedfa": ("fedavg", {"fedfa__probability": 0.0}),
    "fml": ("local", {"fml__alpha": 1.0, "fml__beta": 1.0}),
}
"""Algorithm -> (the simpler one, the settings that make it that)."""
SMALL = {"train_samples": 45, "test_samples": 30}
Run = Callable[[str, str, dict[str, Any]], Outcome]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """(algorithm, models, further settings) -> a small run, each once."""
    known: dict[str, Outcome] = {}

    def once(algo: str, models: str, more: dict[str, Any]) -> Outcome:
        if (name := f"{algo} {models} {more}") not in known:
            config = run_config(tmp_path_factory.mktemp("run"), algo=algo, models=models, **SMALL, **more)
            known[name] = run_federation(config, CLIENTS)
        return known[name]

    return once


@pytest.mark.parametrize("models", MODELS)
@pytest.mark.parametrize("algo", IDENTITIES)
def test_an_algorithm_without_its_own_term_is_the_simpler_one(algo: str, models: str, run: Run) -> None:
    simpler, settings = IDENTITIES[algo]
    found, wanted = run(algo, models, settings), run(simpler, models, {})
    assert metrics(found) == metrics(wanted)
    assert_same_models(models_left(found), models_left(wanted))


FROZEN = {
    "lg-fedavg": ("local", "orthogonal-shared"),
    "fedgh": ("local", "orthogonal-shared"),
    "fedrep": ("fedper", "orthogonal-frozen"),
}
"""Algorithm -> (what it is where heads do not train, the kind of such heads)."""


@pytest.mark.parametrize("models", MODELS)
@pytest.mark.parametrize("algo", FROZEN)
def test_an_algorithm_of_heads_that_do_not_train_is_a_simpler_one(algo: str, models: str, run: Run) -> None:
    simpler, head = FROZEN[algo]
    found, wanted = (run(one, models, {"head": head, "initial_weights": "own"}) for one in (algo, simpler))
    assert "server" not in found.rows[0]
    assert metrics(found) == metrics(wanted)
    assert_same_models(models_left(found), models_left(wanted))


@pytest.mark.parametrize("algo", [*IDENTITIES, *FROZEN, "per-fedavg"])
def test_with_its_own_term_it_is_not(algo: str, run: Run) -> None:
    """So the test above can fail."""
    simpler, _ = (IDENTITIES | FROZEN).get(algo, ("fedavg", {}))
    found, wanted = (models_left(run(one, "htcnn-3", {})) for one in (algo, simpler))
    assert any(not torch.equal(found[site][name], value) for site, one in wanted.items() for name, value in one.items())


# -- Per-FedAvg without an inner step --------------------------------------------------------------------------------


class SecondHalves(PlainClient):
    """Plain SGD on the second half of every batch of twice the size; batch normalisation sees the first one too."""

    def __init__(self, settings: Settings, index: int, arch: str) -> None:
        super().__init__(settings, index, arch)
        data, cpu = self.data, torch.device("cpu")
        self.train_set = to_device(data.train_inputs, data.train_labels, data, cpu)
        self.test_set = to_device(data.test_inputs, data.test_labels, data, cpu)

    def halves(self, number: int) -> Iterator[tuple[list[int], list[int]]]:
        """A rest of fewer than four samples is not divided."""
        for rows in self.batches(number, 20, passes=2):
            middle = (len(rows) + 1) // 2
            yield (rows[:middle], rows[middle:]) if len(rows) > 3 else (rows, rows)

    def train(self, number: int, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        model = self.model_of("global").train()
        model.load_state_dict(weights)
        velocity = [torch.zeros_like(p) for p in model.parameters()]
        for first, second in self.halves(number):
            model(self.train_set.inputs[first])
            loss = cross_entropy(model(self.train_set.inputs[second]), self.train_set.labels[second])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, g, v in zip(model.parameters(), gradients, velocity, strict=True):
                    p.add_(v.mul_(self.momentum).add_(g), alpha=-self.lr)
        return dict(model.state_dict())

    def adapted(self, number: int, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
        """The global model, whose batch normalisation has seen one more batch."""
        model = self.model_of("global").train()
        model.load_state_dict(weights)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "adapt", self.name, number))
        model(self.train_set.inputs[torch.randperm(len(self.y), generator=generator)[:10]])
        return model


def mean_of(states: list[dict[str, torch.Tensor]], sizes: list[int]) -> dict[str, torch.Tensor]:
    """By samples, in float64, in the order of the clients; counters are rounded."""
    merged = {}
    for name, like in states[0].items():
        total = torch.zeros(like.shape, dtype=torch.float64)
        for state, size in zip(states, sizes, strict=True):
            total += state[name].double() * (size / sum(sizes))
        merged[name] = total.to(like.dtype) if like.is_floating_point() else total.round().to(like.dtype)
    return merged


@pytest.mark.parametrize("samples", [43, 45])
@pytest.mark.parametrize("arch", ["resnet4-imagenet-stem", "htcnn-3"])
def test_per_fedavg_without_an_inner_step_is_sgd_on_its_second_batches(arch: str, samples: int, tmp_path: Path) -> None:
    small = SMALL | {"train_samples": samples, "per_fedavg__alpha": 0.0}
    config = run_config(tmp_path, algo="per-fedavg", models=arch, **small)
    outcome = run_federation(config, CLIENTS)
    clients = [SecondHalves(Settings.from_run_config(config), index, arch) for index in range(CLIENTS)]
    weights = dict(clients[0].model_of("global").state_dict())
    for number in (1, 2):
        states = [client.train(number, weights) for client in clients]
        weights = mean_of(states, [len(client.y) for client in clients])
    models = {client.name: client.adapted(2, weights) for client in clients}
    assert_same_models(models_left(outcome), {site: dict(model.state_dict()) for site, model in models.items()})
    for client in clients:
        with torch.no_grad():
            right = models[client.name].eval()(client.test_set.inputs).argmax(1) == client.test_set.labels
        assert outcome.rows[-1]["clients"][client.name]["accuracy"] == {"head": right.double().mean().item()}
