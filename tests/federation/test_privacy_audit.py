"""An attack on all that leaves a client under differential privacy, and whether it finds a fault.

Two data sets are neighbours: in one of them a sample counts nothing, because its features are not a
number. The attacker is the server. It chooses the weights and prototypes that it sends, knows all
other samples, and what would leave without noise in either case; it has the whole reply to a round
and to the final evaluation: weights, prototypes, counts, figures, and whether there is a reply at
all. By (ε, δ) its advantage (true positives less false ones) is at most (e^ε − 1 + 2 δ) / (e^ε + 1)
(Kairouz, Oh and Viswanath, "The Composition Theorem for Differential Privacy", 2015).
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from client_app.algorithms.base import client_half
from client_app.app import app as client_app
from client_app.protections.private_step import PrivateStep
from client_app.site.client import open_client
from client_app.site.workshop import open_workshop
from protofl_common.basics.run_history import RunHistory
from protofl_common.data import ClientData
from protofl_common.experiment.settings import Settings
from protofl_common.maths.prototypes import Prototypes
from protofl_common.privacy import grid, release
from protofl_common.wire.payloads import Payload, pack_payload
from protofl_common.wire.records import Instructions, pack_instructions
from tests.support.attacks import values_of
from tests.support.harness import run_config

EPSILON = 1.0
DELTA = 1e-5
BOUND = (math.exp(EPSILON) - 1 + 2 * DELTA) / (math.exp(EPSILON) + 1)
CANARY = [5.0, 0.0, 0.0, 0.0]


class Victim:
    """A client of 90 training and 90 test samples of two classes, one of which is attacked."""

    def __init__(self, folder, part, monkeypatch):
        """Attack the first sample of a ``part`` of the data, ``"train"`` or ``"test"``."""
        # Flower's contexts need the numbers of a task
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
        self.config = run_config(
            folder,
            algo="fedproto-avg",
            dataset="breast-cancer",
            models="mlp-1",
            feature_dim=2,
            rounds=1,
            local_epochs=3,
            batch_size=128,
            lr=0.1,
            momentum=0.0,
            norm="group",
            dp="sample",
            dp_epsilon=EPSILON,
            dp_delta=DELTA,
        )
        self.part = part
        self.run_number = 0
        self.errors = 0
        self.data = data_with(part, CANARY)
        monkeypatch.setattr("client_app.site.workshop.open_client_data", lambda *_, **__: self.data)
        self.sent = self._chosen_by_the_attacker()

    def _chosen_by_the_attacker(self):
        """Return what a hostile server sends, so that the sample changes what leaves by much.

        Its weights are three times as large. They predict the sample's label right if it is a test
        sample, and wrong if it is a training sample, whose gradient is large then. Its features are
        the prototype of its class.
        """
        torch.manual_seed(1)
        model = client_half(self.client.settings.row)(self.client, 1).model
        canary = torch.tensor([CANARY])
        with torch.no_grad():
            for weight in model.parameters():
                weight *= 3
            predicted_label = int(model.head(model.body(canary)).argmax())
            wanted_label = 1 if self.part == "test" else 0  # the sample's own is 1
            if predicted_label != wanted_label:
                model.head.weight *= -1
                model.head.bias *= -1
            features = model.body(canary)
            prototypes = Prototypes(torch.cat([features + 9, features]), torch.tensor([0, 1]))
        down = Payload(weights=model.state_dict(), prototypes=prototypes)
        return pack_payload(down, self.client.settings.exchange.down)

    @property
    def client(self):
        return open_workshop(open_client(self._context()))

    def _context(self):
        return Context(1, 7, {"partition-id": 0, "num-partitions": 2}, RecordDict(), self.config)

    def reply(self, present):
        """Return all that leaves in a run of its own, as numbers; with the sample, or without.

        A sample that is not ``present`` has features that are not a number, so that it counts
        nothing.
        """
        self.data = data_with(self.part, CANARY if present else [math.nan] * 4)
        self.run_number += 1
        return np.concatenate([self._answer(MessageType.TRAIN), self._answer(MessageType.EVALUATE)])

    def _answer(self, kind):
        """Return the reply to a message of this kind as a vector with a place for all it may have.

        Numbers that are not finite become 10⁶.
        """
        asked = pack_instructions(Instructions(1, f"run-{self.run_number}", RunHistory(1)))
        message = Message(RecordDict({**self.sent, "round": asked}), 7, kind)
        reply = client_app(message, self._context())
        self.errors += reply.has_error()

        weights = np.zeros(PARAMETERS)
        table = np.zeros((2, 4))  # for each class: the two numbers of its mean, its count, a 1
        figures = np.zeros(2)
        if reply.has_content():
            report = reply.content["report"]
            figures[:] = report["correct.head"], report["correct.prototype"]
            if kind == MessageType.TRAIN:
                arrays = reply.content["weights"].values()
                weights = np.concatenate([values_of(array).ravel() for array in arrays])
                record = reply.content["prototypes"]
                labels = values_of(record["labels"])
                means, counts = values_of(record["means"]), values_of(record["counts"])
                table[labels] = np.c_[means, counts, np.ones(len(labels))]
        numbers = np.concatenate([weights, table.ravel(), figures, [reply.has_error()]])
        return np.where(np.isfinite(numbers), numbers, 1e6)


PARAMETERS = 4 * 64 + 64 + 64 * 2 + 2 + 2 * 2 + 2
"""Of layers of 64 and 2 numbers, and the head of 2: weights and biases."""


def data_with(part, sample):
    """Return the client's data with this sample, of class 1, in the first place of a part."""
    draw = np.random.default_rng(0)
    inputs = {name: draw.normal(size=(90, 4)).astype(np.float32) for name in ("train", "test")}
    labels = {name: np.arange(90) % 2 for name in ("train", "test")}
    inputs[part][0] = sample
    labels[part][0] = 1
    return ClientData(
        train_inputs=inputs["train"],
        train_labels=labels["train"],
        test_inputs=inputs["test"],
        test_labels=labels["test"],
        validation_inputs=np.zeros((0, 4), np.float32),
        validation_labels=np.zeros(0, np.int64),
        classes=("no", "yes"),
        domain="",
        mean=(0.0,) * 4,
        std=(1.0,) * 4,
        fill=(),
        columns=(),
        found=180,
    )


def advantage(victim, runs, monkeypatch):
    """Return a 99 % interval of the advantage of a likelihood-ratio test.

    It guesses of ``runs`` runs with the sample, and as many without, which kind each is. It knows
    what would leave without noise in either case.
    """
    with monkeypatch.context() as quiet:
        multiply_noise(quiet, 1e-9)
        present = victim.reply(True)
        absent = victim.reply(False)
    noisy_present = np.stack([victim.reply(True) for _ in range(runs)])
    noisy_absent = np.stack([victim.reply(False) for _ in range(runs)])

    # of Gaussians with one covariance: project on Σ^-1 (μ1 − μ0), and compare with the middle
    spread = np.maximum((noisy_present.std(0) + noisy_absent.std(0)) / 2, 1e-6)
    direction = (present - absent) / spread**2
    middle = (present + absent) / 2
    true_positives = float(((noisy_present - middle) @ direction > 0).mean())
    false_positives = float(((noisy_absent - middle) @ direction > 0).mean())

    variance = 0.0
    for rate in (true_positives, false_positives):
        variance += max(rate * (1 - rate), 1 / runs) / runs  # not 0 at a rate of 0 or 1
    error = 2.58 * math.sqrt(variance)  # of 99 % of normal numbers
    found = true_positives - false_positives
    return found - error, found + error


@pytest.mark.parametrize(("part", "runs"), [("train", 100), ("test", 200)])
def test_nothing_that_leaves_says_more_than_epsilon_allows(part, runs, tmp_path, monkeypatch):
    """With ε = 1 the advantage is at most 0.462, in so many runs measured to 0.6 at most."""
    victim = Victim(tmp_path, part, monkeypatch)
    least, most = advantage(victim, runs, monkeypatch)

    assert not victim.errors
    assert least <= BOUND < 0.47
    assert most < 0.6  # a wider interval would show nothing


def multiply_noise(monkeypatch, factor):
    """Make all noise ``factor`` times as large, and let the ledger accept it."""
    monkeypatch.setattr(
        "client_app.protections.differential_privacy.charge_ledgers", lambda *costs, **kinds: 0.0
    )
    planned = Settings.plan

    def plan(settings, samples):
        original = planned(settings, samples)
        if original is None:
            return None
        scaled = replace(original)
        for name in ("noise", "table_noise", "figure_noise"):
            # in the place of the cached property
            scaled.__dict__[name] = factor * getattr(original, name)
        return scaled

    monkeypatch.setattr(Settings, "plan", plan)


def a_tenth(monkeypatch):
    """Let all noise be a tenth of what is planned: that keeps ten times ε and more."""
    multiply_noise(monkeypatch, 0.1)


def exact_figures(monkeypatch):
    """Let numbers of right predictions leave without noise."""
    monkeypatch.setattr(release, "private_correct", lambda correct, *noise: correct)


def no_guard_of_tables(monkeypatch):
    """Let features that are not finite pass the cut to a length."""

    def cut(rows, longest=1.0):
        lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        return rows / (lengths / longest).clamp(min=1)

    for module in (grid, release):
        monkeypatch.setattr(module, "cut", cut)


def no_guard_of_gradients(monkeypatch):
    """Let gradients pass uncut, also one that is not finite."""

    def cut(_, gradients):
        return {name: gradient.sum(0) for name, gradient in gradients.items()}

    monkeypatch.setattr(PrivateStep, "_cut", cut)


FAULTS = [  # the part of the data in which the sample is -> the fault that tells it
    ("train", a_tenth),
    ("test", exact_figures),
    ("train", no_guard_of_tables),
    ("train", no_guard_of_gradients),
]


@pytest.mark.parametrize(("part", "fault"), FAULTS)
def test_the_attack_finds_a_fault_that_is_planted(part, fault, tmp_path, monkeypatch):
    """So the attack is strong enough; a tenth of the noise is harder to tell than no noise.

    The noise is the same in every run of this test, or the attack would at times miss by chance.
    """
    draw = np.random.default_rng(0)
    for module in ("differential_privacy", "private_step"):
        monkeypatch.setattr(f"client_app.protections.{module}.fresh_draw", lambda: draw)
    victim = Victim(tmp_path, part, monkeypatch)
    fault(monkeypatch)
    runs = 120 if fault is a_tenth else 30
    least, _ = advantage(victim, runs, monkeypatch)

    assert least > BOUND
