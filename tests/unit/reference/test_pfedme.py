"""pFedMe, two rounds: K inner steps and the step of w_i by hand, and the server's β."""

from typing import Any

import pytest
import torch

from tests.support import plain
from tests.support.declaration import Declared
from tests.support.harness import run_config, run_federation

DECLARED = Declared(
    weights=True,
    own="personal",
    acts={"lambda": 1.0, "personal-steps": 1, "eta": 0.01, "beta": 2.0},
)


class PFedMeClient(plain.PlainClient):
    def __init__(self, *facts: Any) -> None:
        super().__init__(*facts)
        self.theta = self.model_of("global")

    def train(self, number: int, weights: plain.State) -> plain.State:
        """For each batch θ <- θ − η_p (∇f + λ (θ − w)) K times, then w <- w − η λ (w − θ).

        θ is the personalised model, whose steps have momentum, and w the local one.
        """
        hparams = self.hparams
        local = {name: value.clone() for name, value in weights.items()}
        self.theta.load_state_dict(weights)
        velocity = plain.zeros(self.theta)
        for batch in self.batches(number):
            for _ in range(hparams.personal_steps):
                loss = self.cross_entropy(batch, self.theta)
                self.step(loss, self.theta, velocity, local.values(), hparams.lambda_)
            for name, theta in plain.copied(self.theta).items():
                local[name] = local[name] - hparams.eta * hparams.lambda_ * (local[name] - theta)
        return local


@pytest.mark.parametrize(("steps", "beta"), [(3, 0.5), (2, 2.0)])
def test_two_rounds_equal_an_independent_script(steps, beta, tmp_path):
    """The global weights, and the personalised models that are left, are the script's."""
    settings = {
        "lr": 0.02,
        "momentum": 0.3,
        "pfedme__lambda": 5.0,
        "pfedme__eta": 0.03,
        "pfedme__beta": beta,
        "pfedme__personal_steps": steps,
    }
    outcome, clients = plain.side_by_side(
        tmp_path, PFedMeClient, algo="pfedme", **settings, **plain.UNEQUAL
    )

    weights = plain.copied(clients[0].theta)
    for number in (1, 2):
        mean = plain.mean_by_samples(clients, [client.train(number, weights) for client in clients])
        for name, before in weights.items():
            weights[name] = (1 - beta) * before + beta * mean[name]

    plain.assert_weights_left(outcome, weights)
    plain.assert_models_left(outcome, clients, own="theta")
    plain.assert_only_weights_travel(outcome, weights)


def test_under_adam_the_local_model_follows_the_personalised_one(tmp_path):
    """With η · λ = 1 and one batch a round w_i ← w_i − η λ (w_i − θ) is θ.

    Adam and its small learning rate act on the steps of θ alone.
    """
    settings = {
        "models": "htcnn-3",
        "train_samples": 20,
        "test_samples": 20,
        "rounds": 1,
        "optimizer": "adam",
        "lr": 0.001,
        "batch_size": 20,
        "pfedme__lambda": 15.0,
        "pfedme__eta": 1 / 15,
    }
    outcome = run_federation(run_config(tmp_path, algo="pfedme", **settings), clients=1)
    plain.assert_close(plain.weights_left(outcome), plain.model_left(outcome.folder, "site-0"))


@pytest.mark.parametrize(
    ("algo", "key"), [("pfedme", "pfedme__beta"), ("scaffold", "scaffold__server_lr")]
)
def test_a_large_step_leaves_batch_normalisation_a_mean(algo, key, tmp_path):
    """A step beyond the clients' mean could make a variance negative.

    So a server's step of 8 moves the weights further than one of 1, and the buffers as far.
    """
    settings = {
        "models": "resnet4-imagenet-stem",
        "train_samples": 12,
        "test_samples": 10,
        "rounds": 1,
        "lr": 0.01,
    }
    left = []
    for step in (1.0, 8.0):
        config = run_config(tmp_path / str(step), algo=algo, **settings, **{key: step})
        left.append(plain.weights_left(run_federation(config, plain.CLIENTS)))

    by_one, by_eight = left
    buffers = {name for name in by_one if "running" in name or "batches" in name}
    assert buffers
    assert {name for name in by_one if torch.equal(by_one[name], by_eight[name])} == buffers
