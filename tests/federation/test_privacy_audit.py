"""An attack on everything that leaves a client under differential privacy, and whether it would find a fault.

Two data sets are neighbours: in one of them a sample counts nothing, because its features are not a number. The
attacker is the server. It chooses the weights and prototypes that it sends, knows all other samples, and what would
leave without noise in either case; it has the whole reply to a round and to the final evaluation: weights, prototypes,
counts, figures, and whether there is a reply at all. By (ε, δ) its advantage (true positives less false ones) is at
most (e^ε − 1 + 2 δ) / (e^ε + 1) (Kairouz, Oh and Viswanath, "The Composition Theorem for Differential Privacy", 2015).
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from client_app.algorithms.base import client_half
from client_app.app import app as client_app
from client_app.client import Client, open_client
from client_app.protections import differential_privacy
from client_app.protections.private_step import PrivateStep
from protofl_common.basics.run_history import RunHistory
from protofl_common.data import ClientData
from protofl_common.experiment.settings import Settings
from protofl_common.maths.prototypes import Prototypes
from protofl_common.privacy import release
from protofl_common.privacy.plan import Plan
from protofl_common.wire.payloads import Payload, pack_payload
from protofl_common.wire.records import Instructions, pack_instructions
from tests.support.attacks import values_of
from tests.support.given import Patch
from tests.support.harness import run_config

EPSILON, DELTA = 1.0, 1e-5
BOUND = (math.exp(EPSILON) - 1 + 2 * DELTA) / (math.exp(EPSILON) + 1)
CANARY = [5.0, 0.0, 0.0, 0.0]
Vector = np.ndarray[Any, np.dtype[np.float64]]


class Victim:
    """A client of 90 training and 90 test samples of two classes, one of which is attacked."""

    def __init__(self, folder: Path, part: str, monkeypatch: Patch) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        settings = {
            "algo": "fedproto-avg",
            "dataset": "breast-cancer",
            "models": "mlp-1",
            "feature_dim": 2,
        }
        training = {
            "rounds": 1,
            "local_epochs": 3,
            "batch_size": 128,
            "lr": 0.1,
            "momentum": 0.0,
            "norm": "group",
        }
        dp = {"dp": "sample", "dp_epsilon": EPSILON, "dp_delta": DELTA}
        self.config = run_config(folder, **settings, **training, **dp)
        self.part, self.number, self.errors, self.data = part, 0, 0, neighbours(part)[0]
        monkeypatch.setattr(
            "client_app.client.open_client_data", lambda settings, **of_client: self.data
        )
        torch.manual_seed(1)
        model, canary = (
            client_half(self.client.settings.row)(self.client, 1).model,
            torch.tensor([CANARY]),
        )
        with torch.no_grad():
            for weight in model.parameters():
                weight *= 3
            if bool(model.head(model.body(canary)).argmax() != (part == "test")):
                model.head.weight *= -1
                model.head.bias *= -1
            predicted = model.body(canary)
            prototypes = Prototypes(torch.cat([predicted + 9, predicted]), torch.tensor([0, 1]))
        down = Payload(weights=model.state_dict(), prototypes=prototypes)
        self.sent = pack_payload(down, self.client.settings.exchange.down)

    @property
    def client(self) -> Client:
        return open_client(self._context())

    def _context(self) -> Context:
        return Context(1, 7, {"partition-id": 0, "num-partitions": 2}, RecordDict(), self.config)

    def reply(self, present: bool) -> Vector:
        """Everything that leaves in a run of its own, as numbers; with the sample, or without."""
        self.data, self.number = neighbours(self.part)[not present], self.number + 1
        return np.concatenate([self._answer(MessageType.TRAIN), self._answer(MessageType.EVALUATE)])

    def _answer(self, kind: str) -> Vector:
        asked = pack_instructions(Instructions(1, f"run-{self.number}", RunHistory(1)))
        message = Message(RecordDict({**self.sent, "round": asked}), 7, kind)
        reply: Message = client_app(message, self._context())
        self.errors += reply.has_error()
        weights, table, figures = np.zeros(PARAMETERS), np.zeros((2, 4)), np.zeros(2)
        if reply.has_content():
            figures[:] = [
                reply.content["report"][f"correct.{kind}"] for kind in ("head", "prototype")
            ]
        if reply.has_content() and kind == MessageType.TRAIN:
            sent = [values_of(one).ravel() for one in reply.content["weights"].values()]
            weights = np.concatenate(sent).astype(float)
            its = {name: values_of(one) for name, one in reply.content["prototypes"].items()}
            table[its["labels"]] = np.c_[its["means"], its["counts"], np.ones(len(its["labels"]))]
        numbers = np.concatenate([weights, table.ravel(), figures, [reply.has_error()]])
        return np.where(np.isfinite(numbers), numbers, 1e6)


PARAMETERS = 4 * 64 + 64 + 64 * 2 + 2 + 2 * 2 + 2


def neighbours(part: str) -> tuple[ClientData, ClientData]:
    """With the attacked sample, and with one that counts nothing in its place: the first of the part."""
    draw = np.random.default_rng(0)
    inputs = {name: draw.normal(size=(90, 4)).astype(np.float32) for name in ("train", "test")}
    labels = {name: np.arange(90) % 2 for name in ("train", "test")}
    labels[part][0] = 1
    found = []
    for first in (CANARY, [math.nan] * 4):
        its = {name: one.copy() for name, one in inputs.items()}
        its[part][0] = first
        none = np.zeros((0, 4), np.float32), np.zeros(0, np.int64)
        of_parts = its["train"], labels["train"], its["test"], labels["test"], *none
        found.append(ClientData(*of_parts, ("no", "yes"), "", (0.0,) * 4, (1.0,) * 4, (), (), 180))
    return found[0], found[1]


def advantage(victim: Victim, runs: int, monkeypatch: Patch) -> tuple[float, float]:
    """A 99 % interval of the advantage of a likelihood-ratio test on ``runs`` runs of each kind."""
    with monkeypatch.context() as quiet:
        multiply_noise(quiet, 1e-9)
        present, absent = victim.reply(True), victim.reply(False)
    drawn = [np.stack([victim.reply(with_it) for _ in range(runs)]) for with_it in (True, False)]
    spread = np.stack([one.std(0) for one in drawn]).mean(0)
    direction, middle = (present - absent) / np.maximum(spread, 1e-6) ** 2, (present + absent) / 2
    rates = [((one - middle) @ direction > 0).mean() for one in drawn]
    error = 2.58 * math.sqrt(sum(max(rate * (1 - rate), 1 / runs) / runs for rate in rates))
    return rates[0] - rates[1] - error, rates[0] - rates[1] + error


@pytest.mark.parametrize("part", ["train", "test"])
def test_nothing_that_leaves_says_more_than_epsilon_allows(
    part: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    victim = Victim(tmp_path, part, monkeypatch)
    least, most = advantage(victim, 200, monkeypatch)
    assert not victim.errors
    assert least <= BOUND < 0.47
    assert most < 0.6  # else it would have shown nothing


def multiply_noise(monkeypatch: Patch, factor: float) -> None:
    """Make all noise ``factor`` times as large, and let the ledger accept it."""
    monkeypatch.setattr(
        "client_app.protections.differential_privacy.charge", lambda *costs, **kinds: None
    )
    planned = Settings.plan

    def plan(settings: Settings, samples: int) -> Plan | None:
        if (original := planned(settings, samples)) is None:
            return None
        found = replace(original)
        for name in ("noise", "table_noise", "figure_noise"):
            found.__dict__[name] = factor * getattr(
                original, name
            )  # in the place of the cached property
        return found

    monkeypatch.setattr(Settings, "plan", plan)


def a_tenth(monkeypatch: Patch) -> None:
    """Noise for ten times ε and more."""
    multiply_noise(monkeypatch, 0.1)


def exact_figures(monkeypatch: Patch) -> None:
    """Numbers of right predictions as they are."""
    monkeypatch.setattr(
        differential_privacy.release, "private_hits", lambda correct, *noise: correct
    )


def no_guard_of_tables(monkeypatch: Patch) -> None:
    """Features that are not finite pass the clip."""
    cut = lambda rows: rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=1)  # noqa: E731
    monkeypatch.setattr(release, "_cut", cut)


def no_guard_of_gradients(monkeypatch: Patch) -> None:
    """A gradient that is not finite passes the clip."""
    monkeypatch.setattr(
        PrivateStep,
        "_cut",
        lambda _, gradients: {name: one.sum(0) for name, one in gradients.items()},
    )


FAULTS = [
    ("train", a_tenth),
    ("test", exact_figures),
    ("train", no_guard_of_tables),
    ("train", no_guard_of_gradients),
]


@pytest.mark.parametrize(("part", "fault"), FAULTS)
def test_the_attack_finds_a_fault_that_is_planted(
    part: str, fault: Any, tmp_path: Path, monkeypatch: Patch
) -> None:
    victim = Victim(tmp_path, part, monkeypatch)
    fault(monkeypatch)
    least, _ = advantage(victim, 150 if fault is a_tenth else 30, monkeypatch)
    assert least > BOUND
