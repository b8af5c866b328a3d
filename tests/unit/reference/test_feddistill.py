"""FedDistill, two rounds, over several bodies.

Mean outputs by class, and distances sample by sample, in float64.
"""

import numpy as np
import pytest
import torch
from flwr.app import MessageType, RecordDict

from client_app.algorithms.feddistill import FedDistill
from client_app.learning.training import Batch
from tests.support import plain
from tests.support.declaration import PLAIN, Declared
from tests.support.harness import client_of, run_config

DECLARED = Declared(
    PLAIN,
    record="outputs",
    probabilities=True,
    losses=("cross-entropy", "distillation"),
    acts={"gamma": 3.0, "outputs": "logits"},
)

Outputs = dict[int, torch.Tensor]
"""Class -> mean output [C]."""


class FDClient(plain.PlainClient):
    starts_alike = False

    def train(self, number: int, teacher: Outputs) -> Outputs:
        """Train on CE + γ times the distance to the teacher's output, if it has one of the class.

        Return the mean output of each class over the round's batches.
        """
        outputs: dict[int, list[torch.Tensor]] = {}

        def loss(batch: list[int]) -> torch.Tensor:
            """Return the mean over the batch, and note each sample's output under its class."""
            total = torch.zeros((), dtype=torch.float64)
            for i, logits in zip(batch, self.model(self.x[batch]).double(), strict=True):
                label = self.y[i]
                probabilities = torch.exp(logits) / torch.exp(logits).sum()
                own = logits if self.hparams.outputs == "logits" else probabilities
                outputs.setdefault(label, []).append(own.detach())
                total = total - torch.log(probabilities[label])
                if label in teacher:
                    total = total + self.hparams.gamma * self.distance(own, teacher[label])
            return total / len(batch)

        self.sgd(number, loss=loss)
        return {label: sum(rows) / len(rows) for label, rows in outputs.items()}

    def distance(self, own: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.hparams.outputs == "logits":
            return ((own - target) ** 2).sum() / len(own)
        return -sum(target[c] * torch.log(own[c]) for c in range(len(own)))


def merged(sent: list[Outputs], merging: str) -> Outputs:
    """Return for each class the mean, or median, of the outputs of those who hold it."""
    outputs = {}
    for label, held in plain.by_class(sent).items():
        rows = torch.stack(held)
        if merging == "mean":
            outputs[label] = rows.mean(0)
        else:
            outputs[label] = torch.from_numpy(np.median(rows.numpy(), axis=0))
    return outputs


def received(content: RecordDict) -> Outputs:
    """Return the outputs by class that a message has."""
    record = plain.tensors(content.array_records["outputs"])
    return dict(zip(record["labels"].tolist(), record["means"], strict=True))


@pytest.mark.parametrize(("outputs", "merging", "gamma"), [
    ("probabilities", "mean", 1.0),
    ("probabilities", "mean", 2.5),
    ("logits", "median", 0.5),
])  # fmt: skip
def test_two_rounds_equal_an_independent_script(outputs, merging, gamma, tmp_path):
    """What travels in both directions, and the models, are the script's.

    The teacher of probabilities is the merge of the others, that of logits of all.
    """
    settings = plain.UNEQUAL | {
        "alpha": 0.3,
        "liars": 0,
        "merging": merging,
        "feddistill__outputs": outputs,
        "feddistill__gamma": gamma,
    }
    outcome, clients = plain.side_by_side(
        tmp_path, FDClient, plain.HETEROGENEOUS, algo="feddistill", **settings
    )

    sent = [client.train(1, {}) for client in clients]
    teachers = []
    for own in sent:
        others = [one for one in sent if one is not own]
        teachers.append(merged(sent if outputs == "logits" else others, merging))
    again = [client.train(2, teacher) for client, teacher in zip(clients, teachers, strict=True)]

    # a client is taught classes that it lacks, or the reverse
    assert any(teacher.keys() != own.keys() for teacher, own in zip(teachers, sent, strict=True))
    plain.assert_models_left(outcome, clients)

    # outputs are all that goes down, and nothing goes down before there are any
    for message, _ in outcome.grid.log:
        kind = message.metadata.message_type
        number = message.metadata.group_id
        without_outputs = (kind, number) in BEFORE_THE_FIRST_OUTPUTS
        assert list(message.content.array_records) == ([] if without_outputs else ["outputs"])
    for number, wanted in ((1, sent), (2, again)):
        for message, reply in outcome.exchanged(number=number):
            site = message.metadata.dst_node_id - FIRST_NODE
            assert list(reply.content.array_records) == ["outputs"]
            assert_equal(received(reply.content), wanted[site])
            if number == 2:
                assert_equal(received(message.content), teachers[site])


FIRST_NODE = 50
"""The node of client 0 where a script runs beside the system; client 1 has the next one."""
BEFORE_THE_FIRST_OUTPUTS = {(MessageType.QUERY, "0"), (MessageType.TRAIN, "1")}
"""Introductions, and the training of round 1."""


def assert_equal(found: Outputs, wanted: Outputs) -> None:
    rows = {label: row.float() for label, row in wanted.items()}
    torch.testing.assert_close(found, rows, rtol=1e-4, atol=1e-5)


def test_outputs_are_summed_up_without_their_graphs(tmp_path):
    """The graphs would hold every batch of the round in memory."""
    site = client_of(run_config(tmp_path, liars=0, algo="feddistill", models="htcnn-1"), 1, 5)
    data = site.train_set
    client = FedDistill(site, 1)
    features = client.model.body(data.inputs)
    logits = client.model.head(features)

    client.loss(Batch(data.inputs, data.labels, torch.arange(len(data)), features, logits))

    assert client.sums_CC.sum().item() == pytest.approx(len(data))  # a sample's output adds up to 1
    assert not client.sums_CC.requires_grad
