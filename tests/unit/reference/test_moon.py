"""MOON, three rounds: the contrast of each sample by hand, the models' mean by samples."""

import copy
import math

import pytest
import torch

from tests.support import plain
from tests.support.declaration import Declared

DECLARED = Declared(
    weights=True,
    keeps=("previous",),
    losses=("cross-entropy", "contrast"),
    acts={"mu": 5.0, "temperature": 0.1},
)


class MOONClient(plain.PlainClient):
    previous: torch.nn.Module | None = None

    def train(self, number: int, weights: plain.State) -> plain.State:
        """Train on L_CE + μ L_con; there is a previous model to contrast with from round 2 on."""
        self.model.load_state_dict(weights)
        self.received = copy.deepcopy(self.model)
        self.contrasts: list[float] = []
        self.sgd(number, loss=self.whole_loss)
        self.previous = copy.deepcopy(self.model)
        return plain.copied(self.model)

    def whole_loss(self, batch: list[int]) -> torch.Tensor:
        """Return the cross-entropy plus μ times the mean contrast, if there is a previous model."""
        loss = self.cross_entropy(batch)
        if self.previous is None:
            return loss

        x = self.x[batch]
        z_BD = self.model.body(x)
        z_glob_BD = self.received.body(x).detach()
        z_prev_BD = self.previous.body(x).detach()
        tau = self.hparams.temperature
        terms = []
        for z, z_glob, z_prev in zip(z_BD, z_glob_BD, z_prev_BD, strict=True):
            like = torch.exp(plain.cosine(z, z_glob) / tau)
            unlike = torch.exp(plain.cosine(z, z_prev) / tau)
            term = -torch.log(like / (like + unlike))
            terms.append(self.hparams.mu * term)

        self.contrasts += [float(term.detach()) for term in terms]
        return loss + sum(terms) / len(batch)


@pytest.mark.parametrize(("mu", "tau"), [(1.0, 0.5), (5.0, 0.1)])
def test_three_rounds_equal_an_independent_script(mu, tau, tmp_path):
    """The weights, and the contrast that each client reports from round 2 on, are the script's.

    The contrast is not that of two equal models, μ log 2.
    """
    settings = {"moon__mu": mu, "moon__temperature": tau, "rounds": 3, **plain.UNEQUAL}
    outcome, clients = plain.side_by_side(tmp_path, MOONClient, algo="moon", **settings)

    weights = plain.after_rounds(clients, plain.copied(clients[0].model), rounds=3)

    plain.assert_weights_left(outcome, weights)
    assert "contrast" not in outcome.rows[0]["clients"]["site-0"]["losses"]
    for client in clients:
        reported = outcome.rows[2]["clients"][client.name]["losses"]["contrast"]
        mean = sum(client.contrasts) / len(client.contrasts)
        assert reported == pytest.approx(mean, rel=1e-3)
        assert reported != pytest.approx(mu * math.log(2), rel=1e-3)
