"""A client's hooks: their order, what lives on, which step trains, what stays off the disk.

And how a client is evaluated.
"""

import pytest
import torch
from safetensors.torch import load_file

from client_app.algorithms.base import ClientAlgorithm, client_half
from client_app.learning.data import Samples
from client_app.learning.evaluation import evaluate
from client_app.learning.training import FusedStep, Step
from protofl_common.experiment.catalog import CATALOG
from protofl_common.maths.prototypes import Prototypes
from protofl_common.models.build import build_model
from protofl_common.tasks import task_of
from tests.support.harness import client_of, run_config, run_federation

SMALL = {"train_samples": 20, "test_samples": 20}


def algorithm(tmp_path, algo="local", client=1, **changes):
    """Return one client's half, of five clients, in round 2."""
    config = run_config(tmp_path, algo=algo, **changes)
    return client_half(CATALOG[algo])(client_of(config, client, 5), 2)


# -- hooks -------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("algo", ["local", "fedproto"])
def test_hooks_come_in_their_order_and_a_newcomer_has_no_round(algo, tmp_path, monkeypatch):
    """`restore` comes before `receive`, and is left out where there is nothing to restore.

    After two rounds the final evaluation restores and receives once more; what follows evaluates.
    """
    calls = []  # of one client: hook, round, its last round

    def watch(name):
        """Note the rounds at every call of this method on site-1."""
        original = getattr(ClientAlgorithm, name)

        def noted(self, *rest):
            if self.client.name == "site-1":
                calls.append((name, self.round, self.last_round))
            return original(self, *rest)

        monkeypatch.setattr(ClientAlgorithm, name, noted)

    of_a_round = ("receive", "evaluation_model", "fit", "packed_state")
    for name in ("restore", *of_a_round):
        watch(name)
    run_federation(run_config(tmp_path, algo=algo, rounds=2, **SMALL), clients=2)

    first = [(name, 1, None) for name in of_a_round]
    second = [("restore", 2, None), *((name, 2, 1) for name in of_a_round)]
    final_evaluation = [("restore", 2, None), ("receive", 2, 2)]

    expected = [*first, *second, *final_evaluation]
    assert calls[: len(expected)] == expected
    assert {name for name, _, _ in calls[len(expected) :]} == {"evaluation_model"}


@pytest.mark.parametrize("algo", CATALOG)
def test_evaluation_trains_nothing(algo, tmp_path):
    """What lives on, goes up or trains next is the same afterwards; Per-FedAvg adapts a copy."""
    found = algorithm(tmp_path, algo, models="resnet4-imagenet-stem", **SMALL)

    def tensors():
        """Return copies of all that the algorithm would keep."""
        kept = {}
        for number, module in enumerate((found.model, *found.modules)):
            for name, value in module.state_dict().items():
                kept[f"{number}/{name}"] = value
        kept |= found.packed_state()
        return {name: value.clone() for name, value in kept.items()}

    before = tensors()
    found.evaluation_model()
    after = tensors()

    assert after.keys() == before.keys()
    assert [name for name, value in before.items() if not torch.equal(after[name], value)] == []


@pytest.mark.slow
def test_with_few_clients_a_round_the_last_round_is_the_clients_own(tmp_path, monkeypatch):
    """`last_round` is the one in which the client trained before, however long ago that was."""
    rounds_trained = {}  # client -> (round, its last round)
    fit = ClientAlgorithm.fit

    def noted(self):
        rounds_trained.setdefault(self.client.name, []).append((self.round, self.last_round))
        return fit(self)

    monkeypatch.setattr(ClientAlgorithm, "fit", noted)
    run_federation(run_config(tmp_path, rounds=5, participation=0.5, **SMALL), clients=4)

    assert len(rounds_trained) > 2

    rounds_of = {
        name: [number for number, _ in of_client] for name, of_client in rounds_trained.items()
    }

    for name, of_client in rounds_trained.items():
        *earlier_rounds, _last = rounds_of[name]
        assert [last for _, last in of_client] == [None, *earlier_rounds]
    assert any(rounds != [1, 2, 3, 4, 5] for rounds in rounds_of.values())


@pytest.mark.parametrize("algo", ["fedproto", "fedrep", "ditto", "pfedme"])
def test_every_optimizer_has_the_learning_rate_of_its_round(algo, tmp_path):
    """In round 2 it is half of round 1's, also in an optimizer that lives on over rounds."""
    settings = {
        "lr_schedule": "step",
        "lr_step": 1,
        "lr_decay": 0.5,
        "lr": 0.3,
        "keep_optimizer": True,
        "momentum": 0.9,
        **SMALL,
    }
    second = algorithm(tmp_path, algo, **settings)

    assert second.training.lr == 0.15
    assert second.settings is second.client.settings

    first = client_half(CATALOG[algo])(second.client, 1)
    for parameter in first.optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    first.optimizer.step()
    second.restore(first.packed_state(), 1)

    assert second.optimizer.state
    assert [group["lr"] for group in second.optimizer.param_groups] == [0.15]


# -- what lives on -----------------------------------------------------------------------
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedavg_keeps_an_optimizer_when_asked_and_nothing_else(momentum, tmp_path):
    """Plain SGD, without momentum, has nothing to remember: its file is there and empty."""
    settings = {
        "algo": "fedavg",
        "keep_optimizer": True,
        "optimizer": "sgd",
        "momentum": momentum,
        **SMALL,
    }
    outcome = run_federation(run_config(tmp_path, **settings), clients=2)

    assert not any(outcome.summary["trouble"].values())

    files = sorted(outcome.folder.rglob("clients/*/0*.safetensors"))

    assert len(files) == 2

    for path in files:
        names = list(load_file(path))
        assert bool(names) == bool(momentum)
        assert all(name.startswith("optimizer/") for name in names)


def test_a_client_goes_on_as_it_was(tmp_path):
    """One that was restored from its packed state trains to the same weights, to the bit."""
    lived = algorithm(tmp_path, momentum=0.9, keep_optimizer=True)
    fresh = algorithm(tmp_path, momentum=0.9, keep_optimizer=True)
    lived.fit()
    fresh.restore(lived.packed_state(), 1)

    assert fresh.last_round == 1

    for one in (lived, fresh):
        one.round = 3
        one.fit()

    torch.testing.assert_close(fresh.model.state_dict(), lived.model.state_dict(), rtol=0, atol=0)


# -- what trains -------------------------------------------------------------------------
@pytest.mark.parametrize("algo", [algo for algo, row in CATALOG.items() if not row.one_shot])
def test_the_algorithms_of_the_catalog_train_by_the_fused_step(algo, tmp_path):
    """Four do not: their loss looks at the weights, or uses the head twice."""
    plain = {"fedprox", "fedgen", "fedsa", "feddbe"}
    kind = Step if algo in plain else FusedStep

    assert type(algorithm(tmp_path, algo).step()) is kind


def test_a_loss_that_needs_gradients_gets_the_plain_step_with_all_of_them(tmp_path):
    """A fused step uses up the gradients of wide layers inside backward; a plain one keeps them."""
    site = algorithm(tmp_path, models="htcnn-1", feature_dim=512).client
    plain = ClientAlgorithm(site, 1)
    plain.needs_gradients = True
    step = plain.step()

    assert type(step) is Step
    assert step.modules == plain.modules == (site.model,)
    assert step.optimizer is plain.optimizer

    linear = [layer for layer in site.model.modules() if isinstance(layer, torch.nn.Linear)]

    # so wide that a fused step would update it inside backward
    assert max(layer.weight.numel() for layer in linear) > 2**17

    data = site.train_set
    with step.session():
        step(data.inputs[:4], data.labels[:4], torch.arange(4))

    assert all(parameter.grad is not None for parameter in site.model.parameters())


@pytest.mark.parametrize("arch", ["somebodys.module:Net", "cnn5"])
def test_an_architecture_that_is_not_of_the_catalog_gets_the_plain_step(arch, tmp_path):
    found = algorithm(tmp_path)
    found.client.arch = arch

    assert type(type(found)(found.client, 1).step()) is Step


def test_both_accuracies_equal_plain_code_at_any_batch_size():
    """How many samples the head, and the nearest of three prototypes, predict right."""
    model = build_model("mnist-cnn", input_shape=(1, 28, 28), num_classes=5, feature_dim=8, seed=1)
    data = Samples(torch.randn(57, 1, 28, 28), torch.randint(0, 5, (57,)))
    task = task_of("abcde")
    known = Prototypes(torch.randn(3, 8), torch.tensor([0, 2, 4]))
    model.eval()

    with torch.no_grad():
        z_BD = model.body(data.inputs)
        by_head = model.head(z_BD).argmax(1)
    squares_BK = ((z_BD[:, None] - known.means[None]) ** 2).sum(-1)
    by_prototype = known.labels[squares_BK.argmin(1)]
    right = {
        "head": int((by_head == data.labels).sum()),
        "prototype": int((by_prototype == data.labels).sum()),
    }

    for batch_size in (7, 57, 500):
        assert evaluate(model, data, batch_size, task, known).correct == right
    assert evaluate(model, data, 10, task).correct == {"head": right["head"]}


def test_own_prototypes_are_those_of_the_training_classes(tmp_path, monkeypatch):
    """A class without a test sample has one too: who predicts does not know what is tested.

    Each of three clients has four classes, and two test samples.
    """
    evaluations = []  # samples and prototypes of each

    def noted(model, data, batch_size, task, known, **how):
        evaluations.append((data, known))
        return evaluate(model, data, batch_size, task, known, **how)

    monkeypatch.setattr("client_app.app.evaluate", noted)
    few = {
        "partition": "pathological",
        "classes_per_client": 4,
        "test_samples": 2,
        "models": "mnist-cnn",
    }
    run_federation(run_config(tmp_path, predict_among="own", **few), clients=3)
    final_evaluations = evaluations[-3:]  # the last one of each of the three clients

    assert len(final_evaluations) == 3
    for tested, known in final_evaluations:
        assert known is not None
        assert len(known.labels) == 4
        assert len(tested.labels.unique()) < 4
