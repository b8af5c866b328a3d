"""FedKD, two rounds: teachers of different architectures.

Each loss's gradient is asked for by itself; the SVD is NumPy's.
"""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import MessageType
from torch import nn

from client_app.algorithms.fedkd import FedKD
from protofl_common.basics.seeding import derive_seed
from tests.support import plain
from tests.support.attacks import when
from tests.support.declaration import Declared
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
        of_teacher, of_student, of_both = (
            list(part.parameters()) for part in (self.teacher, self.student, self.w_h)
        )
        parameters = [*of_teacher, *of_student, *of_both]
        velocity = [torch.zeros_like(p) for p in parameters]
        for batch in self.batches(number):
            teacher_loss, student_loss = self.losses(batch)
            gradients = [
                *torch.autograd.grad(teacher_loss, of_teacher, retain_graph=True),
                *torch.autograd.grad(student_loss, of_student, retain_graph=True),
                *torch.autograd.grad(teacher_loss + student_loss, of_both),
            ]
            with torch.no_grad():
                for p, v, g in zip(parameters, velocity, gradients, strict=True):
                    v.mul_(self.momentum).add_(g)
                    p.sub_(self.lr * v)
        return {name: value - weights[name] for name, value in plain.copied(self.student).items()}

    def losses(self, batch: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the teacher's loss L_t and the student's L_s; nothing is detached.

        Each is the own cross-entropy, plus the divergence from the other and the distance of hidden
        features, both divided by the sum of the two cross-entropies.
        """
        y = self.labels(batch)
        h_t = self.teacher.body(self.x[batch])
        h_s = self.student.body(self.x[batch])
        logits_t = self.teacher.head(h_t)
        logits_s = self.student.head(h_s)
        ce_t = plain.cross_entropy(logits_t, y)
        ce_s = plain.cross_entropy(logits_s, y)

        apart = h_t - h_s @ self.w_h.weight.T
        hidden = (apart**2).sum() / len(y) / self.dim

        p_t = torch.softmax(logits_t.double(), 1)
        p_s = torch.softmax(logits_s.double(), 1)
        mutual_t = (p_s * torch.log(p_s / p_t)).sum() / len(y)
        mutual_s = (p_t * torch.log(p_t / p_s)).sum() / len(y)

        loss_t = ce_t + (mutual_t + hidden) / (ce_t + ce_s)
        loss_s = ce_s + (mutual_s + hidden) / (ce_t + ce_s)
        return loss_t, loss_s


def cut(update: plain.State, energy: float) -> tuple[plain.State, int]:
    """Cut each matrix to as few singular values as have the energy, a part of all their squares.

    Return the update, and how many numbers are sent for it.
    """
    found = {}
    numbers = 0
    for name, value in update.items():
        matrix = value.numpy().reshape(len(value), -1).astype(np.float64)
        u, sigma, v = np.linalg.svd(matrix, full_matrices=False)
        squares = sigma**2
        rank = 1
        while squares[:rank].sum() < energy * squares.sum():
            rank += 1

        numbers_of_factors = rank * sum(matrix.shape)
        if value.dim() > 1 and numbers_of_factors < matrix.size:
            kept = u[:, :rank] * sigma[:rank] @ v[:rank]
            found[name] = torch.from_numpy(kept.reshape(value.shape)).float()
            numbers += numbers_of_factors
        else:  # the factors would be larger than the whole
            found[name] = value
            numbers += value.numel()
    return found, numbers


@pytest.mark.parametrize(("start", "end"), [(1.0, 1.0), (0.3, 0.8)])
def test_two_rounds_equal_an_independent_script(start, end, tmp_path):
    """With all of the energy the exchange is plain averaging of the students' weights.

    Otherwise the energy grows from ``start`` to ``end``, and updates are compressed by a singular
    value decomposition on the way up and on the way down.
    """
    settings = {
        "fedkd__energy_start": start,
        "fedkd__energy_end": end,
        "fedkd__student": STUDENT,
        "liars": 0,
        **plain.TINY,
    }
    outcome, clients = plain.side_by_side(
        tmp_path, FedKDClient, plain.HETEROGENEOUS, algo="fedkd", **settings
    )

    weights = plain.copied(clients[0].student)
    whole = sum(value.numel() for value in weights.values())
    numbers_down = whole  # in round 1 the server sends the weights themselves
    for number in (1, 2):
        updates = [client.train(number, weights) for client in clients]
        if start == 1:
            students = [plain.copied(client.student) for client in clients]
            weights = plain.mean_by_samples(clients, students)
            continue

        energy = start + (end - start) * number / 2  # of two rounds
        sent = [cut(update, energy) for update in updates]
        numbers_up = sum(numbers for _, numbers in sent)
        row = outcome.rows[number - 1]
        assert row["bytes"] == {"up": 4 * numbers_up, "down": 4 * plain.CLIENTS * numbers_down}

        mean = plain.mean_by_samples(clients, [update for update, _ in sent])
        update, numbers_down = cut(mean, energy)
        weights = {name: value + update[name] for name, value in weights.items()}
        assert row["server"] == {"compression": pytest.approx(numbers_down / whole)}
        assert numbers_down < whole / 2

    plain.assert_weights_left(outcome, weights)
    plain.assert_models_left(outcome, clients, own="teacher")


def test_all_that_take_part_start_from_one_student(tmp_path, monkeypatch):
    """It makes no difference whether a client was sent the student itself or its update.

    This also holds after a round that did not count (3), and after a lost reply (in 5). Four of six
    clients are asked in each of seven rounds.
    """
    students = {}  # round -> the student that each client starts from
    fit = FedKD.fit

    def noted(self):
        student = {name: value.clone() for name, value in self.received.items()}
        students.setdefault(self.round, []).append(student)
        return fit(self)

    def lose(message, reply):
        """Lose all replies of round 3, and the first of round 5."""
        number = int(message.metadata.group_id)
        is_lost = number == 3 or (number == 5 and len(students[5]) == 1)
        return None if is_lost else reply

    monkeypatch.setattr(FedKD, "fit", noted)
    settings = {
        "models": STUDENT,
        "participation": 0.67,
        "rounds": 7,
        "round_timeout": 1.0,
        "train_samples": 10,
        "test_samples": 10,
        "feature_dim": 8,
    }
    config = run_config(tmp_path, liars=0, algo="fedkd", **settings)

    outcome = run_federation(config, 6, when(lose, MessageType.TRAIN))

    assert len(outcome.rows) == 8

    for number, (first, *others) in students.items():
        assert len(others) == 3
        for other in others:
            plain.assert_close(other, first)
        sent = set()
        for message, _ in outcome.exchanged(number=number):
            sent |= {next(iter(message.content.array_records))}
        # there is no update before round 1, and none before 4, as round 3 did not count
        assert sent == ({"weights"} if number in (1, 4) else {"weights", "update"}), number

    in_round_3, in_round_4, in_round_5 = (students[number][0] for number in (3, 4, 5))
    plain.assert_close(in_round_3, in_round_4)
    assert not torch.equal(in_round_4["head.weight"], in_round_5["head.weight"])


def test_a_site_that_lost_its_student_says_so_and_is_sent_it_again(tmp_path, capsys):
    """A site that lost its state is sent the student again; a simulated client would end the run.

    North's state is removed after round 1: it fails in round 2, and takes part in round 3.
    """

    def lose(message, reply):
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


def test_an_update_longer_than_the_median_is_cut_to_it(tmp_path):
    """``max-update-ratio`` measures the update itself, not how far it is from the weights."""
    settings = {
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

    exchanged = outcome.exchanged()
    sizes = [reply.content["report"]["train_samples"] for _, reply in exchanged]
    first_message, _ = exchanged[0]
    before = plain.tensors(first_message.content["weights"])
    updates = []
    lengths = []
    for _, reply in exchanged:
        sent = plain.tensors(reply.content["weights"])
        update = {name: whole(sent, name).reshape(value.shape) for name, value in before.items()}
        updates.append(update)
        lengths.append(float(torch.cat([value.flatten() for value in update.values()]).norm()))
    median = sorted(lengths)[1]  # of three
    assert max(lengths) > 1.01 * min(lengths)  # so that something is cut

    bounded = []
    for update, length in zip(updates, lengths, strict=True):
        part = min(1.0, median / length)
        bounded.append({name: part * value for name, value in update.items()})
    moved = plain.averaged(bounded, sizes)
    plain.assert_weights_left(outcome, {name: before[name] + moved[name] for name in before})


def whole(sent: plain.State, name: str) -> torch.Tensor:
    """Return one matrix of an update, which may be sent in two factors."""
    if name in sent:
        return sent[name]
    return sent[f"{name}:left"] @ sent[f"{name}:right"]
