"""FedPer, two rounds: base layers averaged, personal ones each client's own, and never on the wire."""

from pathlib import Path

import pytest
import torch
from flwr.app import MessageType
from safetensors.torch import load_file

from protofl_common.experiment.settings import Settings
from server_app.network.membership import FederationError
from tests.support.harness import run_config, run_federation
from tests.support.plain import CLIENTS, PlainClient, State, assert_close, averaged, copied, cross_entropy, model_left

PERSONAL = {1: ("head.weight", "head.bias"), 2: ("head.weight", "head.bias", "body.7.weight", "body.7.bias")}
"""Of htcnn-3, which is conv 32 | fc 512, D | fc C."""


class FedPerClient(PlainClient):
    def __init__(self, settings: Settings, index: int) -> None:
        super().__init__(settings, index, "htcnn-3")
        self.model = self.model_of("global")

    def train(self, number: int, base: State) -> State:
        self.model.load_state_dict(copied(self.model) | base)
        velocity = [torch.zeros_like(p) for p in self.model.parameters()]
        for batch in self.batches(number):
            loss = cross_entropy(self.model(self.x[batch]), [self.y[i] for i in batch])
            self.step(loss, self.model, velocity)
        return {name: value for name, value in copied(self.model).items() if name in base}


@pytest.mark.parametrize("layers", PERSONAL)
def test_two_rounds_equal_an_independent_script(layers: int, tmp_path: Path) -> None:
    config = run_config(tmp_path, algo="fedper", models="htcnn-3", fedper__personal_layers=layers, feature_dim=16)
    config |= {"partition": "label-shift", "alpha": 0.5, "test-samples": 20}
    outcome = run_federation(config, clients=CLIENTS)

    clients = [FedPerClient(Settings.from_run_config(config), index) for index in range(CLIENTS)]
    first = copied(clients[0].model_of("global"))
    base = {name: value for name, value in first.items() if name not in PERSONAL[layers]}
    for number in (1, 2):
        base = averaged([client.train(number, base) for client in clients], [len(one.y) for one in clients])
    assert_close(load_file(outcome.folder / "weights.safetensors"), base)
    for client in clients:
        assert_close(model_left(outcome.folder, client.name), copied(client.model) | base)
    for message, reply in outcome.grid.log:
        training = message.metadata.message_type == MessageType.TRAIN
        both = [message] * (message.metadata.message_type != MessageType.QUERY) + [reply] * training
        for content in (one.content for one in both):
            assert list(content.array_records) == ["weights"]
            assert set(content.array_records["weights"]) == base.keys()


def test_a_model_all_of_whose_layers_are_personal_is_refused(tmp_path: Path) -> None:
    config = run_config(tmp_path, algo="fedper", models="htcnn-3", fedper__personal_layers=4, join_timeout=5.0)
    with pytest.raises(FederationError, match="shares all but the last 4 layers of a model, and htcnn-3 has no more"):
        run_federation(config, clients=2)
