"""FedRep, two rounds: evaluated under the last round's head, which is then fitted to the body.

Bodies are averaged.
"""

import pytest
import torch
from safetensors.torch import load_file

from protofl_common.models.build import build_model
from protofl_common.wire.payloads import declared_part
from protofl_common.wire.schema import Weights
from tests.support import plain
from tests.support.declaration import Declared
from tests.support.harness import run_config, run_federation

DECLARED = Declared(weights=True, stays=("head.",), acts={"head-epochs": 2})

EPOCHS = 3


class FedRepClient(plain.SharingClient):
    def train(self, number: int, body: plain.State) -> plain.State:
        """Train first the head alone, for EPOCHS passes, then the body alone."""
        head = self.model.head
        velocity = plain.zeros(head)
        for batch in self.batches(number, passes=EPOCHS, what="head"):
            self.step(self.cross_entropy(batch), head, velocity)
        self.sgd(number, self.model.body)
        return self.part(body)


def test_two_rounds_equal_an_independent_script(tmp_path):
    """A client is evaluated with its last head under the new body; only the body travels."""
    settings = {"fedrep__head_epochs": EPOCHS, **plain.UNEQUAL}
    outcome, clients = plain.side_by_side(tmp_path, FedRepClient, algo="fedrep", **settings)

    body = {f"body.{name}": value for name, value in plain.copied(clients[0].model.body).items()}
    for number in (1, 2):
        for client in clients:
            client.receive(body)
            accuracy = client.accuracy(client.model(client.x_test))
            reported = outcome.rows[number - 1]["clients"][client.name]["accuracy"]
            assert reported == {"head": pytest.approx(accuracy)}
        states = [client.train(number, body) for client in clients]
        body = plain.mean_by_samples(clients, states)

    plain.assert_weights_left(outcome, body)
    plain.assert_models_left(outcome, clients, body)
    plain.assert_only_weights_travel(outcome, body)


@pytest.mark.parametrize("models", ["resnet4-imagenet-stem", "htcnn-3"])
def test_that_clients_evaluate_changes_nothing(models, tmp_path):
    """The head trains before the body, whether the client is evaluated or not.

    So it leaves the same models if only every third round is evaluated. The body left is the one
    that the client received last.
    """
    folders = []
    for every in (1, 3):
        config = run_config(
            tmp_path / str(every),
            algo="fedrep",
            models=models,
            rounds=3,
            evaluate_every=every,
            train_samples=11,
            test_samples=10,
            fedrep__head_epochs=2,
        )
        folders.append(run_federation(config, clients=2).folder)

    for name in ("weights.safetensors", "clients/site-1/model.safetensors"):
        plain.assert_equal(*(load_file(folder / name) for folder in folders))

    left = plain.model_left(folders[0], "site-1")
    for name, value in load_file(folders[0] / "weights.safetensors").items():
        assert torch.equal(left[name], value)


@pytest.mark.parametrize(("backbones", "numbers"), [(1, 131_072), (3, 393_216)])
def test_its_wire_volume_is_fedpcls(backbones, numbers):
    """FedPCL's Table 2 counts the first layer of the projection alone.

    Its bias and batch normalisation, five numbers a unit and a counter, travel as well.
    """
    model = build_model(
        "projection", input_shape=(512 * backbones,), num_classes=10, feature_dim=256, seed=1
    )
    body = declared_part(model, Weights(parts=("body.",)))

    assert sum(value.numel() for value in body.values() if value.ndim == 2) == numbers
    bias_and_normalisation = 5 * 256 + 1
    assert sum(value.numel() for value in body.values()) == numbers + bias_and_normalisation
