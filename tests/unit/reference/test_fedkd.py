"""FedKD, two rounds: teachers of different architectures.

Each loss's gradient is asked for by itself; the SVD is NumPy's.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MessageType
from torch import nn

from client_app.algorithms.fedkd import FedKD
from protofl_common.basics.seeding import derive_seed
from tests.support import plain
from tests.support.attacks import values_of
from tests.support.declaration import Declared
from tests.support.given import Printed
from tests.support.harness import run_config, run_federation

DECLARED = Declared(
    weights=True,
    of="student",
    since="received",
    keeps=("projection", "received"),
    losses=(
        "cross-entropy",
        "mutual",
        "hidden",
        "student-cross-entropy",
        "student-mutual",
        "student-hidden",
    ),
    acts={"student": "htcnn-1", "energy-start": 0.3, "energy-end": 0.3},
)

PRIVATE = ("cnn4", "htcnn-3", "htcnn-1")
STUDENT = "htcnn-1"


class FedKDClient(plain.PlainClient):
    def __init__(self, *facts: Any) -> None:
        super().__init__(*facts)
        self.teacher = self.model_of(self.name)
        self.arch = STUDENT
        self.student = self.model_of("global")
        torch.manual_seed(derive_seed(self.seed, "fedkd", self.name))
        self.w_h = nn.Linear(self.dim, self.dim, bias=False)

    def train(self, number: int, weights: plain.State) -> plain.State:
        """Train teacher, student and projection, each on its own loss; return the student's update.

        The teacher's weights learn from L_t, the student's from L_s, the projection from both.
        """
        self.student.load_state_dict(weights)
        parts = [list(part.parameters()) for part in (self.teacher, self.student, self.w_h)]
        velocities = [[torch.zeros_like(p) for p in part] for part in parts]
        for batch in self.batches(number):
            teacher_loss, student_loss = self.losses(batch)
            losses = (teacher_loss, student_loss, teacher_loss + student_loss)
            for part, loss, velocity in zip(parts, losses, velocities, strict=True):
                gradients = torch.autograd.grad(loss, part, retain_graph=True)
                for v, g in zip(velocity, gradients, strict=True):
                    v.mul_(self.momentum).add_(g)

            # only now, as all gradients are of the weights before the step
            with torch.no_grad():
                for part, velocity in zip(parts, velocities, strict=True):
                    for p, v in zip(part, velocity, strict=True):
                        p.sub_(self.lr * v)
        return {name: value - weights[name] for name, value in plain.copied(self.student).items()}

    def losses(self, batch: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """L_t and L_s, sample by sample; nothing is detached.

        Each is the own cross-entropy, and the divergence and the distance of hidden features over
        the sum of both cross-entropies.
        """
        y = [self.y[i] for i in batch]
        size = len(y)
        h_t = self.teacher.body(self.x[batch])
        h_s = self.student.body(self.x[batch])
        logits_t = self.teacher.head(h_t)
        logits_s = self.student.head(h_s)
        ce_t = plain.cross_entropy(logits_t, y)
        ce_s = plain.cross_entropy(logits_s, y)

        squares = sum(((h_t[b] - self.w_h.weight @ h_s[b]) ** 2).sum() for b in range(size))
        hidden = squares / size / self.dim

        p_t = torch.softmax(logits_t.double(), 1)
        p_s = torch.softmax(logits_s.double(), 1)
        mutual_t = sum((p_s[b] * torch.log(p_s[b] / p_t[b])).sum() for b in range(size)) / size
        mutual_s = sum((p_t[b] * torch.log(p_t[b] / p_s[b])).sum() for b in range(size)) / size

        loss_t = ce_t + (mutual_t + hidden) / (ce_t + ce_s)
        loss_s = ce_s + (mutual_s + hidden) / (ce_t + ce_s)
        return loss_t, loss_s


def cut(update: plain.State, energy: float) -> tuple[plain.State, int]:
    """Each matrix with as few of its singular values as have the energy; the numbers sent."""
    found = {}
    numbers = 0
    for name, value in update.items():
        matrix = value.numpy().reshape(len(value), -1).astype(np.float64)
        u, sigma, v = np.linalg.svd(matrix, full_matrices=False)
        rank = 1
        while sum(s**2 for s in sigma[:rank]) < energy * sum(s**2 for s in sigma):
            rank += 1

        thin = rank * sum(matrix.shape)
        if value.dim() > 1 and thin < matrix.size:
            kept = sum(sigma[k] * np.outer(u[:, k], v[k]) for k in range(rank))
            found[name] = torch.from_numpy(kept.reshape(value.shape)).float()
            numbers += thin
        else:  # the factors would be larger than the whole
            found[name] = value
            numbers += value.numel()
    return found, numbers


@pytest.mark.parametrize(("start", "end"), [(1.0, 1.0), (0.3, 0.8)])
def test_two_rounds_equal_an_independent_script(start: float, end: float, tmp_path: Path) -> None:
    """With all of the energy the exchange is plain averaging of the students' weights."""
    settings = {
        "fedkd__energy_start": start,
        "fedkd__energy_end": end,
        "fedkd__student": STUDENT,
        "feature_dim": 16,
        "lr": 0.02,
        "test_samples": 20,
        "train_samples": 25,
        "liars": 0,
    }
    outcome, clients = plain.side_by_side(tmp_path, FedKDClient, PRIVATE, algo="fedkd", **settings)

    sizes = [len(client.y) for client in clients]
    weights = plain.copied(clients[0].student)
    whole = sum(value.numel() for value in weights.values())
    numbers_down = whole
    for number in (1, 2):
        updates = [client.train(number, weights) for client in clients]
        if start == 1:
            weights = plain.averaged([plain.copied(client.student) for client in clients], sizes)
            continue

        energy = start + (end - start) * number / 2
        sent = [cut(update, energy) for update in updates]
        numbers_up = sum(numbers for _, numbers in sent)
        row = outcome.rows[number - 1]
        assert row["bytes"] == {"up": 4 * numbers_up, "down": 4 * plain.CLIENTS * numbers_down}

        mean = plain.averaged([update for update, _ in sent], sizes)
        update, numbers_down = cut(mean, energy)
        weights = {name: value + update[name] for name, value in weights.items()}
        assert row["server"] == {"compression": pytest.approx(numbers_down / whole)}
        assert numbers_down < whole / 2

    plain.assert_close(plain.weights_left(outcome), weights)
    models = {client.name: plain.copied(client.teacher) for client in clients}
    plain.assert_models_left(tmp_path, models)


def test_all_that_take_part_start_from_one_student(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a client was sent the student or its update.

    And after a round that did not count, and a lost reply.
    """
    started: dict[int, dict[str, plain.State]] = {}
    fit = FedKD.fit

    def noted(self: FedKD) -> dict[str, float]:
        students = started.setdefault(self.round, {})
        students[self.client.name] = {name: value.clone() for name, value in self.received.items()}
        return fit(self)

    def tamper(message: Message, reply: Message) -> Message | None:
        number = int(message.metadata.group_id)
        lost = number == 3 or (number == 5 and message.metadata.dst_node_id == min(asked(5)))
        return None if message.metadata.message_type == MessageType.TRAIN and lost else reply

    def asked(number: int) -> dict[int, str]:
        """Node -> what it was sent."""
        training = [one for one, _ in log if one.metadata.message_type == MessageType.TRAIN]
        sent = [one for one in training if one.metadata.group_id == str(number)]
        return {one.metadata.dst_node_id: next(iter(one.content.array_records)) for one in sent}

    log: list[tuple[Message, Message]] = []
    monkeypatch.setattr(FedKD, "fit", noted)
    settings: dict[str, Any] = {
        "models": STUDENT,
        "participation": 0.67,
        "rounds": 7,
        "round_timeout": 1.0,
        "train_samples": 10,
        "test_samples": 10,
        "feature_dim": 8,
    }
    config = run_config(tmp_path, liars=0, algo="fedkd", **settings)

    outcome = run_federation(config, 6, tamper, on_grid=lambda grid: setattr(grid, "log", log))

    assert len(outcome.rows) == 8

    for number, clients in started.items():
        first, *others = clients.values()
        assert len(others) == 3
        for other in others:
            plain.assert_close(other, first)
        sent = {"weights"} if number in (1, 4) else {"weights", "update"}
        assert set(asked(number).values()) == sent, number
    student = {number: next(iter(clients.values())) for number, clients in started.items()}

    plain.assert_close(student[3], student[4])
    assert not torch.equal(student[4]["head.weight"], student[5]["head.weight"])


def test_a_site_that_lost_its_student_says_so_and_is_sent_it_again(
    tmp_path: Path, capsys: Printed
) -> None:
    """A simulated client that lost its state ends the run; a site begins anew."""

    def lose(message: Message, reply: Message) -> Message:
        if message.metadata.group_id == "1" and message.metadata.dst_node_id == 1000:
            for path in (tmp_path / "north").rglob("0*.safetensors"):
                path.unlink()
        return reply

    nodes = {
        1000 + number: {
            "partition-id": number,
            "num-partitions": 2,
            "site-name": name,
            "state-dir": str(tmp_path / name),
        }
        for number, name in enumerate(("north", "south"))
    }
    small = {"rounds": 3, "train_samples": 10, "test_samples": 10}
    config = run_config(tmp_path, liars=0, algo="fedkd", models=STUDENT, **small)

    outcome = run_federation(config, tamper=lose, nodes=nodes)

    assert "StateError" in outcome.rows[1]["failed"]["north"]
    assert "has lost the student itself" in capsys.readouterr().err
    assert outcome.rows[2]["valid"] == 2


def test_an_update_longer_than_the_median_is_cut_to_it(tmp_path: Path) -> None:
    """``max-update-ratio`` measures the update itself, not how far it is from the weights."""
    settings: dict[str, Any] = {
        "models": STUDENT,
        "rounds": 1,
        "max_update_ratio": 1.0,
        "fedkd__energy_start": 1.0,
        "fedkd__energy_end": 1.0,
        "partition": "iid",
        "train_samples": 0,
        "total_samples": 120,
        "feature_dim": 8,
        "local_epochs": 2,
    }
    config = run_config(tmp_path, liars=0, algo="fedkd", **settings)

    outcome = run_federation(config, plain.CLIENTS)

    names = plain.weights_left(outcome).keys()
    replies = [reply.content for _, reply in outcome.grid.log if "weights" in reply.content]
    sent = [reply.array_records["weights"] for reply in replies]
    asked = [message.content for message, _ in outcome.grid.log if "weights" in message.content]
    before = asked[0].array_records["weights"]
    wholes = [{name: whole(one, name) for name in names} for one in sent]
    lengths = [np.sqrt(sum(np.square(value).sum() for value in one.values())) for one in wholes]

    assert max(lengths) > 1.01 * min(lengths)

    parts = [min(1.0, sorted(lengths)[1] / length) for length in lengths]
    sizes = [reply.metric_records["report"]["train_samples"] for reply in replies]
    wanted = {}
    for name in names:
        updates = zip(sizes, parts, wholes, strict=True)
        moved = sum(n * part * one[name] for n, part, one in updates) / sum(sizes)
        start = values_of(before[name])
        wanted[name] = torch.from_numpy(start + moved.reshape(start.shape)).float()

    plain.assert_close(plain.weights_left(outcome), wanted)


def whole(record: ArrayRecord, name: str) -> np.ndarray:
    """A sent update, be it in factors."""
    if name in record:
        update = values_of(record[name]).astype(np.float64)
        return update.reshape(len(update), -1)
    left = values_of(record[f"{name}:left"]).astype(np.float64)
    right = values_of(record[f"{name}:right"]).astype(np.float64)
    return left @ right
