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
        """The model, and the averages of each channel's moments."""
        model = self.model_of("global").train()
        model.load_state_dict(weights)
        self.gamma = gamma
        self.seen = {f"{k}.mean": torch.zeros(c) for k, c in enumerate(STAGES.values())}
        self.seen |= {f"{k}.std": torch.ones(c) for k, c in enumerate(STAGES.values())}
        torch.manual_seed(derive_seed(self.seed, "train", self.name, number))
        self.sgd(
            number,
            model,
            lambda b: plain.cross_entropy(self.logits(model, self.x[b]), [self.y[i] for i in b]),
        )
        return plain.copied(model), self.seen

    def logits(self, model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        stage = 0
        for place, layer in enumerate(model.body):
            x = layer(x)
            if place in STAGES:
                x = (
                    self.augment(stage, x)
                    if float(torch.rand(())) < self.hparams.probability
                    else x
                )
                stage += 1
        return model.head(x)

    def augment(self, stage: int, x: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = x.shape
        mean = x.sum(dim=(2, 3)) / (height * width)
        std = torch.sqrt(
            ((x - mean[:, :, None, None]) ** 2).sum(dim=(2, 3)) / (height * width) + EPS
        )
        drawn = []
        for kind, moment in (("mean", mean), ("std", std)):
            key = f"{stage}.{kind}"
            middle = moment.sum(dim=0) / batch
            self.seen[key] = 0.99 * self.seen[key] + 0.01 * middle.detach()
            spread = ((moment - middle) ** 2).sum(dim=0) / batch + EPS
            scope = torch.sqrt(spread + self.gamma[key] * spread)
            drawn.append(moment + scope * torch.randn(batch, channels))
        unit = (x - mean[:, :, None, None]) / std[:, :, None, None]
        return drawn[1][:, :, None, None] * unit + drawn[0][:, :, None, None]


def coefficients(sent: list[Table]) -> Table:
    """γ of each channel."""
    found = {}
    for key in sent[0]:
        columns = torch.stack([one[key] for one in sent]).double().T
        spread = [float(((column - column.mean()) ** 2).mean()) + EPS for column in columns]
        parts = [1 / (1 + 1 / one) for one in spread]
        found[key] = torch.tensor([len(parts) * part / sum(parts) for part in parts])
    return found


@pytest.mark.parametrize("probability", [0.5, 1.0])
def test_two_rounds_equal_an_independent_script(probability: float, tmp_path: Path) -> None:
    more = {
        "feature_dim": 16,
        "image_size": 0,
        "fedfa__probability": probability,
    }  # else spreads are near EPS
    outcome, clients = plain.side_by_side(
        tmp_path, FedFAClient, "cnn4", algo="fedfa", **more, **plain.UNEQUAL | {"total_samples": 90}
    )
    weights = plain.copied(clients[0].model_of("global"))
    gamma = {
        f"{k}.{kind}": torch.ones(c)
        for k, c in enumerate(STAGES.values())
        for kind in ("mean", "std")
    }
    for number in (1, 2):
        assert len(outcome.exchanged(number=number)) == plain.CLIENTS
        check_wire(outcome.exchanged(number=number), gamma)
        states, seen = zip(
            *(client.train(number, weights, gamma) for client in clients), strict=True
        )
        weights = plain.averaged(list(states), [len(one.y) for one in clients])
        gamma = coefficients(list(seen))
    assert max(float(one.max() / one.min()) for one in gamma.values()) > 2  # channels do differ
    plain.assert_close(plain.weights_left(outcome), weights)
    plain.assert_models_left(outcome.folder, {client.name: weights for client in clients})
    numbers = sum(value.numel() for value in weights.values()) + 2 * sum(STAGES.values())
    assert outcome.rows[1]["bytes"] == {
        "up": 4 * plain.CLIENTS * numbers,
        "down": 4 * plain.CLIENTS * numbers,
    }


def test_with_liars_no_site_alone_says_where_to_shift(tmp_path: Path) -> None:
    """One of five puts all the spread into one channel: of each, both extremes are left out."""

    def lie(message: Message, reply: Message) -> Message:
        for name, array in reply.content["averages"].items():
            spread = np.random.default_rng(message.metadata.dst_node_id).normal(0, 0.1, array.shape)
            spread[0] += message.metadata.dst_node_id == 1004
            reply.content["averages"][name] = raw(spread.astype(np.float32))
        return reply

    config = run_config(tmp_path, algo="fedfa", models="cnn4", feature_dim=16, liars=1)
    outcome = run_federation(config, 5, when(lie, MessageType.TRAIN, number=1))
    sent = [plain.tensors(reply.content["averages"]) for _, reply in outcome.exchanged(number=1)]
    middle = {
        name[9:]: torch.stack([one[name] for one in sent]).sort(dim=0).values[1:-1]
        for name in sent[0]
    }
    check_wire(
        outcome.exchanged(number=2),
        coefficients([{n: row[i] for n, row in middle.items()} for i in range(3)]),
    )


def check_wire(training: list, gamma: Table) -> None:
    """γ is what goes down, and beside the weights nothing but the averages goes up."""
    for message, reply in training:
        assert list(reply.content.array_records) == ["weights", "averages"]
        found = plain.tensors(message.content.array_records["coefficients"])
        wanted = {f"coefficients.{key}": value.float() for key, value in gamma.items()}
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
