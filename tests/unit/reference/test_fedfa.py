"""FedFA, two rounds: the layers written into the network's forward pass, channel by channel."""

from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Message, MessageType

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


class FedFAClient(plain.PlainClient):
    def train(self, number: int, weights: plain.State, gamma: Table) -> tuple[plain.State, Table]:
        """The model, and the running averages of each channel's moments, which begin at N(0, 1)."""
        model = self.model_of("global").train()
        model.load_state_dict(weights)
        self.gamma = gamma
        self.averages = {}
        for stage, channels in enumerate(STAGES.values()):
            self.averages[f"{stage}.mean"] = torch.zeros(channels)
            self.averages[f"{stage}.std"] = torch.ones(channels)

        def loss(batch: list[int]) -> torch.Tensor:
            logits = self.logits(model, self.x[batch])
            return plain.cross_entropy(logits, [self.y[i] for i in batch])

        torch.manual_seed(derive_seed(self.seed, "train", self.name, number))
        self.sgd(number, model, loss)
        return plain.copied(model), self.averages

    def logits(self, model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """The forward pass, in which each stage's output is augmented with probability p."""
        stage = 0
        for place, layer in enumerate(model.body):
            x = layer(x)
            if place in STAGES:
                if float(torch.rand(())) < self.hparams.probability:
                    x = self.augment(stage, x)
                stage += 1
        return model.head(x)

    def augment(self, stage: int, x: torch.Tensor) -> torch.Tensor:
        """σ̂ (x − μ) / σ + μ̂, where μ̂ and σ̂ are drawn around each channel's own μ and σ.

        They are drawn with the variance in the batch, plus γ times it.
        """
        batch, channels, height, width = x.shape
        mean = x.sum(dim=(2, 3)) / (height * width)
        squares = ((x - mean[:, :, None, None]) ** 2).sum(dim=(2, 3))
        std = torch.sqrt(squares / (height * width) + EPS)

        drawn = []
        for kind, moment in (("mean", mean), ("std", std)):
            key = f"{stage}.{kind}"
            middle = moment.sum(dim=0) / batch
            self.averages[key] = 0.99 * self.averages[key] + 0.01 * middle.detach()
            variance = ((moment - middle) ** 2).sum(dim=0) / batch + EPS
            deviation = torch.sqrt(variance + self.gamma[key] * variance)
            drawn.append(moment + deviation * torch.randn(batch, channels))

        new_mean, new_std = drawn
        unit = (x - mean[:, :, None, None]) / std[:, :, None, None]
        return new_std[:, :, None, None] * unit + new_mean[:, :, None, None]


def coefficients(sent: list[Table]) -> Table:
    """γ of each channel: its part 1 / (1 + 1 / variance over the clients), with a mean of 1."""
    gamma = {}
    for key in sent[0]:
        parts = []
        for column in torch.stack([averages[key] for averages in sent]).double().T:
            variance = float(((column - column.mean()) ** 2).mean()) + EPS
            parts.append(1 / (1 + 1 / variance))
        gamma[key] = torch.tensor([len(parts) * part / sum(parts) for part in parts])
    return gamma


@pytest.mark.parametrize("probability", [0.5, 1.0])
def test_two_rounds_equal_an_independent_script(probability: float, tmp_path: Path) -> None:
    """The weights, and each round's γ on its way down, are the script's."""
    settings = {
        "feature_dim": 16,
        "image_size": 0,  # else spreads are near EPS
        "fedfa__probability": probability,
        **plain.UNEQUAL,
        "total_samples": 90,
    }
    outcome, clients = plain.side_by_side(tmp_path, FedFAClient, "cnn4", algo="fedfa", **settings)

    weights = plain.copied(clients[0].model_of("global"))
    sizes = [len(client.y) for client in clients]
    gamma = {}
    for stage, channels in enumerate(STAGES.values()):
        gamma[f"{stage}.mean"] = torch.ones(channels)
        gamma[f"{stage}.std"] = torch.ones(channels)
    for number in (1, 2):
        assert len(outcome.exchanged(number=number)) == plain.CLIENTS
        check_wire(outcome.exchanged(number=number), gamma)
        trained = [client.train(number, weights, gamma) for client in clients]
        weights = plain.averaged([state for state, _ in trained], sizes)
        gamma = coefficients([averages for _, averages in trained])

    assert max(float(one.max() / one.min()) for one in gamma.values()) > 2  # channels do differ
    plain.assert_close(plain.weights_left(outcome), weights)
    plain.assert_models_left(outcome.folder, {client.name: weights for client in clients})

    weights_and_averages = sum(value.numel() for value in weights.values())
    weights_and_averages += 2 * sum(STAGES.values())
    all_bytes = 4 * plain.CLIENTS * weights_and_averages
    assert outcome.rows[1]["bytes"] == {"up": all_bytes, "down": all_bytes}


def test_with_liars_no_site_alone_says_where_to_shift(tmp_path: Path) -> None:
    """One of five puts all the spread into one channel: of each, both extremes are left out."""
    liar = 1004

    def lie(message: Message, reply: Message) -> Message:
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
    of_middle_three: list[Table] = [{}, {}, {}]
    for name in sent[0]:
        ordered = torch.stack([averages[name] for averages in sent]).sort(dim=0).values
        for averages, row in zip(of_middle_three, ordered[1:-1], strict=True):
            averages[name.removeprefix("averages.")] = row
    check_wire(outcome.exchanged(number=2), coefficients(of_middle_three))


def check_wire(training: list, gamma: Table) -> None:
    """γ is what goes down, and beside the weights nothing but the averages goes up."""
    for message, reply in training:
        assert list(reply.content.array_records) == ["weights", "averages"]
        found = plain.tensors(message.content.array_records["coefficients"])
        wanted = {f"coefficients.{key}": value.float() for key, value in gamma.items()}
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
