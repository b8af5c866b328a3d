"""FedFA, two rounds: the layers written into the network's forward pass, channel by channel."""

import numpy as np
import pytest
import torch
from flwr.app import MessageType

from protofl_common.basics.seeding import derive_seed
from tests.support import plain
from tests.support.attacks import raw, when
from tests.support.declaration import Declared
from tests.support.harness import run_config, run_federation

DECLARED = Declared(weights=True, beside={"averages": "augmentation"}, acts={"probability": 0.9})

STAGES = {3: 32, 6: 64}
"""Of cnn4, conv 32, pool, ReLU, conv 64, pool, ReLU: where a stage ends, and its channels."""
EPS = 1e-6
Table = dict[str, torch.Tensor]


def table(mean: float, std: float) -> Table:
    """Return for each stage a number a channel: for means, and for standard deviations."""
    found = {}
    for stage, channels in enumerate(STAGES.values()):
        found[f"{stage}.mean"] = torch.full((channels,), mean)
        found[f"{stage}.std"] = torch.full((channels,), std)
    return found


class FedFAClient(plain.PlainClient):
    def train(self, number: int, weights: plain.State, gamma: Table) -> plain.State:
        """Train the model; the running averages of each channel's moments begin at N(0, 1)."""
        self.model.load_state_dict(weights)
        self.gamma = gamma
        self.averages = table(mean=0.0, std=1.0)

        torch.manual_seed(derive_seed(self.seed, "train", self.name, number))
        self.sgd(number, loss=self.loss)
        return plain.copied(self.model)

    def loss(self, batch: list[int]) -> torch.Tensor:
        """Return CE of a forward pass; each stage's output is augmented with probability p."""
        x = self.x[batch]
        stage = 0
        for place, layer in enumerate(self.model.body):
            x = layer(x)
            if place not in STAGES:
                continue
            if float(torch.rand(())) < self.hparams.probability:
                x = self.augment(stage, x)
            stage += 1
        return plain.cross_entropy(self.model.head(x), self.labels(batch))

    def augment(self, stage: int, x: torch.Tensor) -> torch.Tensor:
        """Return σ̂ (x − μ) / σ + μ̂, with μ̂ and σ̂ drawn around each channel's own μ and σ.

        They are drawn with the variance of these in the batch, plus γ times it.
        """
        batch, channels, *_ = x.shape
        pixels = x.flatten(start_dim=2)
        mean = pixels.mean(dim=2, keepdim=True)
        squares = (pixels - mean) ** 2
        std = torch.sqrt(squares.mean(dim=2, keepdim=True) + EPS)

        drawn = []
        for kind, moment in (("mean", mean), ("std", std)):
            key = f"{stage}.{kind}"
            middle = moment.mean(dim=0)
            before = self.averages[key]
            self.averages[key] = 0.99 * before + 0.01 * middle.detach()[:, 0]

            variance = ((moment - middle) ** 2).mean(dim=0) + EPS
            wider = variance + self.gamma[key][:, None] * variance
            noise = torch.randn(batch, channels, 1)
            drawn.append(moment + torch.sqrt(wider) * noise)

        new_mean, new_std = drawn
        unit = (pixels - mean) / std
        return (new_std * unit + new_mean).reshape(x.shape)


def coefficients(sent: list[Table]) -> Table:
    """Return γ of each channel: 1 / (1 + 1 / variance over the clients), scaled to a mean of 1."""
    gamma = {}
    for key in sent[0]:
        of_clients = torch.stack([averages[key] for averages in sent]).double()
        apart = of_clients - of_clients.mean(dim=0)
        variance = (apart**2).mean(dim=0) + EPS
        parts = 1 / (1 + 1 / variance)
        gamma[key] = (parts / parts.mean()).float()
    return gamma


@pytest.mark.parametrize("probability", [0.5, 1.0])
def test_two_rounds_equal_an_independent_script(probability, tmp_path):
    """The weights, and each round's γ on its way down, are the script's."""
    settings = plain.UNEQUAL | {
        "image_size": 0,  # else spreads are near EPS
        "fedfa__probability": probability,
        "total_samples": 90,
    }
    outcome, clients = plain.side_by_side(tmp_path, FedFAClient, "cnn4", algo="fedfa", **settings)

    weights = plain.copied(clients[0].model)
    gamma = table(mean=1.0, std=1.0)
    for number in (1, 2):
        exchanged = outcome.exchanged(number=number)
        assert len(exchanged) == plain.CLIENTS
        check_wire(exchanged, gamma)
        states = [client.train(number, weights, gamma) for client in clients]
        weights = plain.mean_by_samples(clients, states)
        gamma = coefficients([client.averages for client in clients])

    assert max(float(one.max() / one.min()) for one in gamma.values()) > 2  # channels do differ
    plain.assert_weights_left(outcome, weights)
    plain.assert_models_left(outcome, clients, weights)

    weights_and_averages = sum(value.numel() for value in weights.values())
    weights_and_averages += 2 * sum(STAGES.values())  # a mean and a deviation of each channel
    all_bytes = 4 * plain.CLIENTS * weights_and_averages  # float32
    assert outcome.rows[1]["bytes"] == {"up": all_bytes, "down": all_bytes}


def test_with_liars_no_site_alone_says_where_to_shift(tmp_path):
    """One of five clients makes one channel differ from the others' by 1.

    With one liar expected, the largest and the smallest value of each channel are left out.
    """
    liar = 1004

    def lie(message, reply):
        """Write averages near 0, different for each client, over those of the reply."""
        node = message.metadata.dst_node_id
        for name, array in reply.content["averages"].items():
            averages = np.random.default_rng(node).normal(0, 0.1, array.shape)
            if node == liar:
                averages[0] += 1
            reply.content["averages"][name] = raw(averages.astype(np.float32))
        return reply

    config = run_config(tmp_path, algo="fedfa", models="cnn4", feature_dim=16, liars=1)
    outcome = run_federation(config, 5, when(lie, MessageType.TRAIN, number=1))

    sent = [plain.tensors(reply.content["averages"]) for _, reply in outcome.exchanged(number=1)]
    of_middle_three = [{}, {}, {}]
    for name in sent[0]:
        ordered = torch.stack([averages[name] for averages in sent]).sort(dim=0).values
        _smallest, *middle, _largest = ordered
        for averages, row in zip(of_middle_three, middle, strict=True):
            averages[name.removeprefix("averages.")] = row
    check_wire(outcome.exchanged(number=2), coefficients(of_middle_three))


def check_wire(training: list, gamma: Table) -> None:
    """Check that γ goes down, and that nothing but weights and averages goes up."""
    for message, reply in training:
        assert list(reply.content.array_records) == ["weights", "averages"]
        found = plain.tensors(message.content.array_records["coefficients"])
        wanted = {f"coefficients.{key}": value for key, value in gamma.items()}
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
