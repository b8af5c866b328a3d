"""A server that asks a strict site a thousand questions, and what it can learn of one patient.

The server is hostile and its messages are well formed: valid settings, and weights that make the model an indicator of
one record. Two data sets differ in one number of that record. Whatever the server asks, it must not tell the two apart
better than the site's ``require-dp`` allows; the same attack on a site whose protection is broken on purpose must
succeed, or this test could not fail.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from client_app.protections import private_step
from protofl_common.experiment.settings import default_run_config
from protofl_common.privacy import release
from tests.support.attacks import raw, values_of
from tests.support.harness import RUN_ID, LocalGrid

EPSILON, DELTA = 0.2, 1e-5
QUESTIONS = 1000
ROUNDS = 4
TRIALS = 24
"""Of each data set. The half of them chooses how to attack, the other half is attacked."""
PATIENTS, NUMBERS = 120, 6
TARGET = 17
"""The row that differs: a ``sick`` patient's first number is one that no other row has."""
FEATURES = 4

CONFIG: dict[str, Any] = default_run_config() | {"algo": "fedavg", "dataset": "arrays", "partition": "own",
    "classes": "0,1", "models": "mlp-1", "feature-dim": FEATURES, "rounds": ROUNDS, "num-clients": 1, "local-epochs": 1,
    "batch-size": 64, "norm": "group", "dp": "sample", "dp-epsilon": EPSILON, "threads": 1}  # fmt: skip


def patients(folder: Path, sick: bool, official: int) -> Path:
    """A table of which one patient is ``sick`` or not, in the part 0 (training) or 1 (test)."""
    draw = np.random.default_rng(5)
    inputs = draw.normal(size=(PATIENTS, NUMBERS)).astype(np.float32)
    labels = (np.arange(PATIENTS) % 2).astype(np.int64)
    split = np.array(["train", "test"])[(np.arange(PATIENTS) // 2) % 2]
    inputs[TARGET, 0], labels[TARGET], split[TARGET] = 8.0 if sick else 0.0, 1, ("train", "test")[official]
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "data.npz", inputs=inputs, labels=labels, split=split)
    return folder / "data.npz"


def strict(data: Path, folder: Path) -> dict[str, Any]:
    """The node config of a site that trusts nobody."""
    return {"site-name": "north", "data-dir": str(data), "dataset": "arrays", "classes": "0,1",
        "test-from": "official-own", "state-dir": str(folder / "state"), "cache-dir": str(data.parent / "cache"),
        "require-dp": f"epsilon<={EPSILON}"}  # fmt: skip


def indicator(slope: float) -> dict[str, torch.Tensor]:
    """Weights of ``mlp-1`` with which the head says class 1 only for records of which the first number is above 4.

    With a ``slope`` near the end of float32, the features of such a record overflow.
    """
    weights = {"body.1.weight": torch.zeros(64, NUMBERS), "body.1.bias": torch.zeros(64),
        "body.3.weight": torch.zeros(FEATURES, 64), "body.3.bias": torch.zeros(FEATURES),
        "head.weight": torch.zeros(2, FEATURES), "head.bias": torch.tensor([1.0, 0.0])}  # fmt: skip
    weights["body.1.weight"][0, 0], weights["body.1.bias"][0] = slope, -4.0 * slope
    weights["body.3.weight"][0, 0], weights["head.weight"][1, 0] = 1.0, 100.0
    return weights


class HostileServer:
    """It asks one site, and notes of every reply what it says of the record."""

    def __init__(self, node: dict[str, Any], config: dict[str, Any]) -> None:
        self.grid = LocalGrid(config, {7: node})
        self.answers: dict[str, list[float]] = {}

    def ask(self, kind: str, number: int, name: str, slope: float) -> None:
        record = {"round": number, "run_name": name, "run_history": str(RUN_ID)}
        content = RecordDict({"round": ConfigRecord(record)})
        content["weights"] = ArrayRecord({key: raw(value.numpy()) for key, value in indicator(slope).items()})
        self.grid.push_messages([Message(content, 7, kind, group_id=str(number))])
        reply = self.grid.log.pop()[1]
        self.answers.setdefault("refused", []).append(float(reply.has_error()))
        if reply.has_error():
            return
        for name, value in reply.content["report"].items():
            if name.partition(".")[0] in ("correct", "metrics", "validation", "losses"):
                self.answers.setdefault(name, []).append(float(value))
        if "weights" in reply.content:
            sent = {key: values_of(array) for key, array in reply.content["weights"].items()}
            self.answers.setdefault("bias", []).append(float(sent["head.bias"][1] - sent["head.bias"][0]))
            finite = all(np.isfinite(value).all() for value in sent.values())
            self.answers.setdefault("finite", []).append(float(finite))

    def learnt(self) -> dict[str, float]:
        """The mean of all answers of a kind: who may ask again averages the noise away."""
        return {name: float(np.mean(values)) for name, values in self.answers.items()}


def interrogate(node: dict[str, Any], questions: int) -> HostileServer:
    """Ask for rounds in order and again, for final evaluations, under other names, and with weights that overflow."""
    server = HostileServer(node, CONFIG)
    for number in range(questions):
        turn, step = divmod(number, 2 * ROUNDS)
        kind = MessageType.TRAIN if step % 2 == 0 else MessageType.EVALUATE
        name = "study" if turn % 2 == 0 else f"study-{turn}"
        server.ask(kind, 1 + step // 2 % ROUNDS, name, 5e37 if number % 4 >= 2 else 1.0)
    return server


def advantage(first: list[dict[str, float]], second: list[dict[str, float]]) -> tuple[float, str]:
    """How much better than guessing a threshold chosen on the first half tells the second half apart, and of what."""
    half, best = len(first) // 2, (0.0, "nothing")
    for name in first[0].keys() & second[0].keys():
        low, high = (np.array([one[name] for one in worlds]) for worlds in (first, second))
        chosen, sign = _threshold(low[:half], high[:half])
        gained = float(np.mean(sign * high[half:] > sign * chosen) - np.mean(sign * low[half:] > sign * chosen))
        best = max(best, (gained, name))
    return best


def _threshold(low: np.ndarray, high: np.ndarray) -> tuple[float, int]:
    candidates = [
        (np.mean(sign * high > sign * cut) - np.mean(sign * low > sign * cut), cut, sign)
        for cut in np.concatenate([low, high]) + 1e-9
        for sign in (1, -1)
    ]
    _, cut, sign = max(candidates)
    return float(cut), sign


def bound() -> float:
    """What (ε, δ) allows between data sets that differ in a record: two neighbours apart, so 2 ε and (1 + e^ε) δ.

    Each is a neighbour of the data set without the record. True minus false positives of any test are at most
    (e^ε − 1 + 2 δ) / (e^ε + 1) (Kairouz, Oh and Viswanath, "The Composition Theorem for Differential Privacy", 2015).
    """
    epsilon, delta = 2 * EPSILON, (1 + math.exp(EPSILON)) * DELTA
    return (math.exp(epsilon) - 1 + 2 * delta) / (math.exp(epsilon) + 1)


def chance() -> float:
    """What luck adds to an advantage measured on half the trials: three standard deviations."""
    return 3 * math.sqrt(2 * 0.25 / (TRIALS // 2))


def attacked(folder: Path, official: int, questions: int) -> tuple[float, str]:
    """The advantage of the hostile server over sites whose patient is in the part 0 (training) or 1 (test)."""
    worlds = []
    for sick in (False, True):
        data = patients(folder / f"data-{sick}", sick, official)
        nodes = [strict(data, folder / f"{sick}-{trial}") for trial in range(TRIALS)]
        worlds.append([interrogate(node, questions).learnt() for node in nodes])
    return advantage(*worlds)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(100, "protofl"):
        yield


@pytest.mark.parametrize("official", [0, 1], ids=["trained on", "tested with"])
def test_a_patient_is_told_apart_no_better_than_epsilon_allows(official: int, tmp_path: Path) -> None:
    assert attacked(tmp_path, official, 2 * ROUNDS)[0] <= bound() + chance()


def test_a_thousand_questions_get_no_more_answers_than_the_ledger_pays(tmp_path: Path) -> None:
    server = interrogate(strict(patients(tmp_path / "data", True, 1), tmp_path), QUESTIONS)
    answered = QUESTIONS - int(sum(server.answers["refused"]))
    assert 0 < answered < QUESTIONS / 20
    assert sum(server.answers["refused"][-QUESTIONS // 2 :]) == QUESTIONS // 2


def exact_hits(correct: dict[str, int], *_: Any) -> dict[str, int]:
    return dict(correct)


class Noiseless:
    """A draw whose noise is none."""

    def __init__(self) -> None:
        self.random = np.random.default_rng().random

    def standard_normal(self, shape: tuple[int, ...] = (), dtype: Any = np.float64) -> Any:
        return np.zeros(shape, dtype)


PLANTED: dict[str, tuple[int, Any, str, Any]] = {
    "right predictions without noise": (1, release, "private_hits", exact_hits),
    "gradients without noise": (0, private_step, "fresh_draw", Noiseless),
}
"""A failure -> (the part that the patient is in, the object to patch, its attribute, the value to put there)."""


@pytest.mark.parametrize("failure", PLANTED)
def test_a_planted_failure_is_noticed(failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the attack missed it, the test above would prove nothing."""
    official, *patched = PLANTED[failure]
    monkeypatch.setattr(*patched)
    assert attacked(tmp_path, official, 2 * ROUNDS)[0] > bound() + chance()
