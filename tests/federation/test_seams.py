"""Attacks where two protections of a site meet: well-formed messages and settings of a hostile server or submitter."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from protofl_common.basics.run_history import RunHistory
from protofl_common.experiment.settings import Settings, digest_of
from protofl_common.maths.prototypes import Prototypes
from protofl_common.models.trained import TrainedModel
from protofl_common.wire.payloads import Payload, pack_payload
from protofl_common.wire.records import Instructions, pack_instructions, pack_settings
from tests.support.attacks import interrupted
from tests.support.given import Patch
from tests.support.harness import CACHE, RUN_ID, LocalGrid, refusal, run_config
from tests.support.sites import named

PATIENTS = 120


def records(folder: Path, rare: int = 0, tested: int | None = None, sign: int = 1) -> Path:
    """A table of which ``rare`` training and ``tested`` test samples are of the class 2, and all others of 0 and 1."""
    draw = np.random.default_rng(5)
    labels = (np.arange(PATIENTS) % 2).astype(np.int64)
    split = np.array(["train", "test"])[(np.arange(PATIENTS) // 2) % 2]
    labels[np.flatnonzero(split == "train")[:rare]] = 2
    labels[
        few := np.flatnonzero((split == "test") & (labels == 1))[
            : rare if tested is None else tested
        ]
    ] = 2
    inputs = draw.normal(size=(PATIENTS, 6)).astype(np.float32)
    inputs[few] *= sign
    np.savez(folder / "data.npz", inputs=inputs, labels=labels, split=split)
    return folder / "data.npz"


def site(folder: Path, rare: int = 0, *of_tests: int, **more: Any) -> dict[str, Any]:
    node = {"site-name": "north", "dataset": "arrays", "classes": "0,1,2"}
    node |= {"data-dir": str(records(folder, rare, *of_tests))}
    return node | {"test-from": "official-own", "state-dir": str(folder / "state"), **CACHE, **more}


def table(folder: Path, **settings: Any) -> dict[str, Any]:
    facts = {
        "dataset": "arrays",
        "partition": "own",
        "models": "mlp-1",
        "feature_dim": 4,
        "classes": "0,1,2",
    }
    return run_config(
        folder, **facts | {"train_samples": 0, "test_samples": 0, "rounds": 3} | settings
    )


def asked(
    node: Any, config: Any, kind: str, number: int = 1, history: str = "", run_id: int = RUN_ID, name: str = "study",
    **records: Any,
) -> Message:  # fmt: skip
    instructions = pack_instructions(
        Instructions(number, name, RunHistory.parse(history or str(run_id)))
    )
    content = RecordDict({"round": instructions, **pack_settings(digest_of(config)), **records})
    return LocalGrid(config, {7: node}, run_id=run_id).asked(
        Message(content, 7, kind, group_id=str(number))
    )


def prototypes_of(*labels: int) -> dict[str, Any]:
    """Prototypes of which the last is the nearest to every sample."""
    sent = Prototypes(
        torch.linspace(90, 0, len(labels) + 1)[1:, None].repeat(1, 4), torch.tensor(labels)
    )
    config = table(Path("."), algo="fedproto")
    return pack_payload(Payload(prototypes=sent), Settings.from_run_config(config).exchange.down)


@pytest.mark.parametrize(
    ("among", "sent", "right"), [("own", (0, 2), PATIENTS // 4), ("all", (0, 1, 2), 0)]
)
def test_figures_do_not_tell_a_small_class(
    among: str, sent: tuple[int, ...], right: int, tmp_path: Path
) -> None:
    """A server that sends the prototype of a class would see whether, or how often, the site has it."""
    replies = []
    for rare in (0, 1):
        (folder := tmp_path / str(rare)).mkdir()
        node = site(folder, rare, **{"min-class-samples": 5})
        config = table(folder, algo="fedproto", predict_among=among)
        replies.append(asked(node, config, MessageType.TRAIN, **prototypes_of(*sent)))
    assert not any(reply.has_error() for reply in replies)
    assert [reply.content["report"]["correct.prototype"] for reply in replies] == [right, right]


@pytest.mark.parametrize(("tested", "told", "shown"), [(3, 57, 5), (12, 60, 3)])
def test_no_metric_tells_a_small_class(tested: int, told: int, shown: int, tmp_path: Path) -> None:
    """Other samples of it make no difference; where there are 12, to the number of right predictions of all alone."""
    figures, telling = [], ("metrics", "test_samples", "correct")[: 3 - (tested > 5)]
    for sign in (1, -3):
        (folder := tmp_path / str(sign)).mkdir()
        node = site(folder, 9, tested, sign, **{"min-class-samples": 5})
        config = table(folder, algo="fedproto", metrics="balanced-accuracy,macro-f1,auc,recall")
        report = asked(node, config, MessageType.TRAIN, **prototypes_of(0, 1, 2)).content["report"]
        figures.append({name: report[name] for name in report if name.startswith(telling)})
    assert figures[0] == figures[1]
    assert figures[0]["test_samples"] == told
    assert len([name for name in figures[0] if name.startswith("metrics.head/")]) == shown


def test_exact_numbers_do_not_tell_a_small_class_under_dp(tmp_path: Path) -> None:
    """Both data sets have as many samples; whether a class is large enough depends on a single one."""
    stated = []
    for rare in (4, 5):
        (folder := tmp_path / str(rare)).mkdir()
        config = table(folder, algo="fedproto", norm="group", dp="sample", min_class_samples=5)
        reply = asked(site(folder, rare), config, MessageType.QUERY)
        stated.append(
            [
                reply.content["site"][name]
                for name in ("train_samples", "test_samples", "found", "present")
            ]
        )
    assert stated == 2 * [[PATIENTS // 2, PATIENTS // 2, PATIENTS, [0, 1, 2]]]


def test_no_loss_leaves_where_small_classes_must_not(tmp_path: Path) -> None:
    """The server's prototype of a class makes a loss term of the class's samples alone, however few they are."""
    node = site(tmp_path, 1, **{"min-class-samples": 5})
    config = table(tmp_path, algo="fedproto")
    reply = asked(node, config, MessageType.TRAIN, **prototypes_of(2))
    assert not [name for name in reply.content["report"] if name.startswith("losses.")]
    free = asked(site(tmp_path), config, MessageType.TRAIN, number=2, **prototypes_of(2))
    assert "losses.prototype" in free.content["report"]


def test_no_server_goes_around_the_introduction_which_refuses_small_classes_alone(
    tmp_path: Path,
) -> None:
    node, config = site(tmp_path, **{"min-class-samples": 31}), table(tmp_path, algo="fedavg")
    for kind in (MessageType.QUERY, MessageType.TRAIN, MessageType.EVALUATE):
        assert (
            "min-class-samples = 31: this client has no class of"
            in asked(node, config, kind).error.reason
        )


def test_a_private_run_does_not_go_on_from_a_model_trained_without_noise(tmp_path: Path) -> None:
    """The ledger was not charged for that model, which the uploads of the private run would tell."""
    node = site(tmp_path)
    free = table(tmp_path, algo="fedper", norm="group")
    assert not asked(node, free, MessageType.TRAIN).has_error()
    private = free | {"dp": "sample", "dp-epsilon": 8.0}
    reply = asked(
        node | {"require-dp": "epsilon<=8"}, private, MessageType.TRAIN, 2, f"{RUN_ID}:1,4712", 4712
    )
    assert "StateError" in reply.error.reason


def test_a_server_that_changes_the_name_of_a_run_has_no_new_budget(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """A round that was killed before its answer was ready may be asked for again, and is charged again."""
    config, node = table(tmp_path, algo="fedavg", norm="group", dp="sample"), site(tmp_path)
    monkeypatch.setattr("client_app.app.Visit._report", interrupted)
    replies = []
    for number in range(20):
        with suppress(KeyboardInterrupt):
            replies.append(asked(node, config, MessageType.TRAIN, name=f"study-{number}"))
    refused = [reply.error.reason for reply in replies]
    assert 0 < len(refused) < 20
    assert refused[0].startswith("dp-epsilon = 8: this message would bring this client to ε = 8")


def test_a_thousand_questions_get_no_more_answers_than_the_ledger_pays(tmp_path: Path) -> None:
    """Rounds and final evaluations, in their order and again, of a hundred Flower runs."""
    epsilon = 0.2
    config = table(tmp_path, algo="fedavg", norm="group", dp="sample", dp_epsilon=epsilon, rounds=4)
    node = site(tmp_path, **{"require-dp": f"epsilon<={epsilon}"})
    named(north=tmp_path / "state/sites/north")
    answered = []
    for number in range(1000):
        kind = MessageType.EVALUATE if number % 2 else MessageType.TRAIN
        reply = asked(node, config, kind, 1 + number // 2 % 4, run_id=RUN_ID + number // 10)
        answered += [] if reply.has_error() else [number]
    assert len(answered) < 50
    assert answered[-1] < 500


@pytest.mark.parametrize(
    "demand", [{"min-class-samples": 9}, {"require-dp": "epsilon<=8"}, {"require-secagg": True}]
)
def test_a_share_of_common_data_is_no_way_around_a_sites_own_division(
    demand: dict[str, Any], tmp_path: Path
) -> None:
    """With a ``partition-id`` the run would choose who is a test sample."""
    node = site(tmp_path, **demand, **{"partition-id": 0, "num-partitions": 1})
    del node["test-from"]
    config = table(tmp_path, dp="sample", norm="group") | {"secagg": "require-secagg" in demand}
    assert "node-config: partition-id: " in refusal(config, node)


NETWORK = """
import torch
class Talkative(torch.nn.Module):
    def __init__(self, input_shape, feature_dim):
        super().__init__()
        self.layer = torch.nn.Linear(input_shape[0], feature_dim)
    def forward(self, x):
        if len(x) == 2:
            raise ValueError(f"numbers {x.tolist()}")
        return self.layer(x)
"""


def test_the_first_look_at_a_network_shows_it_no_sample(tmp_path: Path, monkeypatch: Patch) -> None:
    """Its error goes to the server, and may quote what it was given."""
    (tmp_path / "talkative.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "talkative", raising=False)
    node = site(tmp_path, **{"allow-python": "talkative"})
    reply = asked(node, table(tmp_path, arch="talkative:Talkative"), MessageType.QUERY)
    assert (
        "numbers [[0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]"
        in reply.error.reason
    )


def test_another_run_does_not_replace_the_best_model_of_a_study(tmp_path: Path) -> None:
    """A hostile run may name any Flower run of before as its own beginning."""
    node, config = site(tmp_path), table(tmp_path, algo="fedproto", keep_best=True)
    best = {"best": ConfigRecord({"after": 1, "on": "test"})}
    asked(node, config, MessageType.TRAIN)
    asked(node, config, MessageType.EVALUATE)
    asked(node, config, "query.best", **best)
    (model,) = tmp_path.rglob("best.safetensors")
    before = model.read_bytes()
    thief = (3, f"{RUN_ID}:1,4712", 4712)
    asked(node, config, MessageType.EVALUATE, *thief)
    asked(node, config, "query.best", *thief, best=ConfigRecord({"after": 3, "on": "test"}))
    assert before in [file.read_bytes() for file in model.parent.glob("best*.safetensors")]


def test_another_run_does_not_remove_what_may_become_the_best_model_of_a_study(
    tmp_path: Path,
) -> None:
    """Both run at once."""
    node, config = site(tmp_path), table(tmp_path, algo="fedproto", keep_best=True)
    asked(node, config, MessageType.TRAIN)
    (candidate,) = tmp_path.rglob("evaluated-0*.safetensors")
    thief = (2, f"{RUN_ID}:1,4712", 4712)
    asked(node, config, MessageType.TRAIN, *thief)
    asked(node, config, "query.best", *thief, best=ConfigRecord({"after": 1, "on": "test"}))
    assert candidate.exists()
    asked(node, config, MessageType.TRAIN, 1, f"{RUN_ID}:0,4713", 4713)
    assert len(list(tmp_path.rglob("evaluated-0*.safetensors"))) == 2
    asked(node, config, "query.best", best=ConfigRecord({"after": 0, "on": "test"}))
    (model,) = tmp_path.rglob("best.safetensors")
    card = TrainedModel.read(model).card
    assert (card.round, card.flower_run) == (0, str(RUN_ID))
