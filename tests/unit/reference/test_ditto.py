"""Ditto, two rounds: FedAvg, and the personal model's step by hand."""

from typing import Any

import pytest

from client_app.algorithms.ditto import Ditto
from tests.support import plain
from tests.support.declaration import Declared
from tests.support.harness import run_config, run_federation

LOSSES = ("cross-entropy", "global-cross-entropy")
DECLARED = Declared(weights=True, own="personal", losses=LOSSES, acts={"lambda": 9.0})


class DittoClient(plain.PlainClient):
    def __init__(self, *facts: Any) -> None:
        super().__init__(*facts)
        self.personal = self.model_of("global")

    def train(self, number: int, weights: plain.State) -> plain.State:
        """w learns as in FedAvg; v <- v − η (∇F(v) + λ (v − w^t)) with momentum, on equal batches.

        v is the personal model, w^t the global weights that the round begins with.
        """
        self.model.load_state_dict(weights)
        start = weights.values()
        velocity = plain.zeros(self.model)
        own_velocity = plain.zeros(self.personal)
        for batch in self.batches(number):
            self.step(self.cross_entropy(batch), self.model, velocity)

            loss = self.cross_entropy(batch, self.personal)
            self.step(loss, self.personal, own_velocity, start, self.hparams.lambda_)
        return plain.copied(self.model)


@pytest.mark.parametrize("lambda_", [0.5, 4.0])
def test_two_rounds_equal_an_independent_script(lambda_, tmp_path):
    """The global weights are FedAvg's, the models left the personal ones; only w travels."""
    settings = {"lr": 0.02, "ditto__lambda": lambda_, **plain.UNEQUAL}
    outcome, clients = plain.side_by_side(tmp_path, DittoClient, algo="ditto", **settings)

    weights = plain.after_rounds(clients, plain.copied(clients[0].model))

    plain.assert_weights_left(outcome, weights)
    plain.assert_models_left(outcome, clients, own="personal")
    plain.assert_only_weights_travel(outcome, weights)


def test_a_client_that_joins_later_begins_with_the_global_model(tmp_path):
    """One client of three is asked a round, in two rounds: two begin, one after the other.

    The third, which never trains, is evaluated with the global model.
    """
    one_of_three = {"participation": 0.34}
    config = run_config(tmp_path, algo="ditto", models="htcnn-1", test_samples=20, **one_of_three)
    first_rounds = {}
    fit = Ditto.fit

    def noted(self):
        if self.client.name not in first_rounds:
            first_rounds[self.client.name] = self.round
            plain.assert_equal(self.personal.state_dict(), self.model.state_dict())
        return fit(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ditto, "fit", noted)
        outcome = run_federation(config, clients=plain.CLIENTS)

    assert sorted(first_rounds.values()) == [1, 2]
    (idle,) = {f"site-{index}" for index in range(plain.CLIENTS)} - first_rounds.keys()
    plain.assert_close(plain.model_left(outcome.folder, idle), plain.weights_left(outcome))
