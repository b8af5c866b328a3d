"""Federations under differential privacy: what is sent, what it costs, and where the account stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, MessageType, RecordDict
from torch import Tensor

from client_app.algorithms import client_half
from client_app.private_training import PrivateStep
from client_app.site import Site
from client_app.training import FusedStep
from protofl_common.catalog import CATALOG
from protofl_common.config.options import SettingsError
from protofl_common.privacy.plan import NOT_COVERED
from protofl_common.privacy.words import protections
from protofl_common.report.figures.privacy import spent as spent_on_page
from protofl_common.report.reading import read_run
from protofl_common.settings import Settings
from tests.harness import CACHE, Outcome, rows_without_a_reply, run_config, run_federation
from tests.test_resume import Killed, on_message

TABLE: dict[str, Any] = {"dataset": "breast-cancer", "models": "mlp-1", "partition": "iid", "feature_dim": 8}
SMALL = TABLE | {"train_samples": 20, "test_samples": 10, "batch_size": 10, "dp": "sample", "norm": "group"}
HELD = [algo for algo in CATALOG if algo not in NOT_COVERED]
FROZEN = {"fedpcl": {"dataset": "digits", "backbones": "glyphs"}}


def private(folder: Path, algo: str, clients: int = 2, **changes: Any) -> Outcome:
    small = SMALL | {"fedgen__server_steps": 2, "fedsa__contrast": 0.0} | FROZEN.get(algo, {})
    return run_federation(run_config(folder, algo=algo, **small | changes), clients)


def compared(step: PrivateStep, weights: dict[str, Tensor], samples: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """What `of_each` finds, after the first sample's has been compared with what `backward` finds for it alone."""
    found = of_each(step, weights, samples)
    step.gradients(step.terms(step.model, *(one[:1] for one in samples)))
    for name, one in weights.items():
        torch.testing.assert_close(found[name][0], torch.zeros_like(one) if one.grad is None else one.grad)
    return found


of_each = PrivateStep._of_each


@pytest.mark.parametrize("algo", HELD)
def test_an_algorithm_trains_privately_and_tells_no_losses_and_no_classes(
    algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second round with the prototypes of the first, which some classes lack."""
    if algo != "fedgen":  # whose loss draws samples anew
        monkeypatch.setattr(PrivateStep, "_of_each", compared)
    outcome = private(tmp_path, algo, rounds=2, evaluate_every=2)
    assert not any(outcome.summary["trouble"].values())
    sends = bool(CATALOG[algo].exchange.up)
    assert ("epsilon" in outcome.summary) == sends
    if sends:
        assert 7.8 < outcome.summary["epsilon"] == outcome.rows[-1]["epsilon"] <= 8
    for message, reply in outcome.grid.log:
        if message.metadata.message_type == MessageType.TRAIN:
            assert not [name for name in reply.content["report"] if name.startswith("losses")]
        if message.metadata.message_type == MessageType.QUERY:
            every = list(range(len(reply.content["site"]["classes"])))
            assert list(reply.content["site"]["holds"]) == (every if CATALOG[algo].tells_classes else [])


@pytest.mark.parametrize("algo", NOT_COVERED)
def test_an_algorithm_that_it_cannot_cover_is_refused_by_name(algo: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"dp = 'sample': {algo} sends {NOT_COVERED[algo]}"):
        Settings.from_run_config(run_config(tmp_path, algo=algo, dp="sample"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algo": "fedpcl", "fedpcl__loss": "supcon"}, "fedpcl.loss = 'supcon' compares samples"),
        ({"positive_rate": 0.5}, "positive-rate below 1 compares samples"),
        ({"insight": "summary"}, "insight = 'summary' tells exact numbers"),
    ],
)
def test_what_it_cannot_hold_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=said):
        Settings.from_run_config(run_config(tmp_path, dp="sample", **changes))


def test_batch_normalisation_is_refused_when_a_client_introduces_itself(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="2 clients cannot take part: norm = 'batch': this network has batch norm"):
        private(tmp_path, "fedpcl", norm="batch")


@pytest.mark.parametrize(("dp", "kind"), [("none", FusedStep), ("sample", PrivateStep), ("weights", PrivateStep)])
def test_no_fused_step_where_gradients_of_single_samples_are_needed(dp: str, kind: type, tmp_path: Path) -> None:
    for algo in ("fedavg", "fedproto"):
        site = Site(Context(1, 1, {"partition-id": 0, "num-partitions": 2}, RecordDict(), _config(tmp_path, algo, dp)))
        assert type(client_half(site.settings.row)(site, 1).step()) is kind


def _config(folder: Path, algo: str, dp: str) -> dict[str, Any]:
    return run_config(folder, **SMALL | {"algo": algo, "dp": dp})


def test_the_weights_alone_may_be_private(tmp_path: Path) -> None:
    """FedPLVM, Table 11: its clusters cannot be, so all that names ε says that they are not."""
    outcome = private(tmp_path, "fedplvm", dp="weights", rounds=1)
    assert 7.8 < outcome.summary["epsilon"] <= 8
    assert "of weights alone, and not prototypes" in _printed(outcome)
    assert "ε in a line is that of the client with the fewest training samples" in _printed(outcome)


def _printed(outcome: Outcome) -> str:
    return " ".join(protections(outcome.summary["settings"]))


def test_two_runs_of_one_seed_have_other_noise(tmp_path: Path) -> None:
    first, second = (private(tmp_path / name, "fedproto", rounds=1) for name in "ab")
    sent = [one.grid.log[2][1].content["prototypes"]["means"].data for one in (first, second)]
    assert sent[0] != sent[1]


BOUNDED: dict[str, Any] = {"dp_noise": 4.0, "dp_epsilon": 2.5, "rounds": 20, "evaluate_every": 9}


def test_a_budget_ends_the_run_before_the_round_that_would_overspend_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = private(tmp_path, "fedproto", **BOUNDED)
    rounds = outcome.summary["rounds"]
    spent = [row["epsilon"] for row in outcome.rows]
    assert 1 < rounds < 20
    assert spent[:-1] == sorted(spent[:-1])
    assert spent[-1] == spent[-2] <= 2.5
    said = capsys.readouterr().out
    assert f"the privacy budget is spent: round {rounds + 1} would bring ε to" in said
    (figure,) = spent_on_page(read_run(outcome.folder))
    assert "ε of the client with the fewest training samples" in figure.caption
    assert "<path" in figure.svg
    accounts = list(outcome.folder.glob("clients/*/privacy.json"))
    assert len(accounts) == 2
    assert all(sum(times for _, _, times in next(iter(json.loads(one.read_text()).values()))) for one in accounts)


def test_a_run_that_was_resumed_counts_the_round_that_it_repeats(tmp_path: Path) -> None:
    undisturbed = private(tmp_path / "one", "fedproto", **BOUNDED).summary["rounds"]
    config = run_config(tmp_path / "two", algo="fedproto", run_name="r", **SMALL | BOUNDED)
    with pytest.raises(Killed):
        run_federation(config, 2, tamper=on_message(MessageType.TRAIN, 2))
    resumed = run_federation(config | {"resume": True}, 2, run_id=2)
    assert resumed.summary["rounds"] == undisturbed - 1
    assert not any(resumed.summary["trouble"].values())
    assert resumed.summary["epsilon"] <= 2.5


def test_a_budget_for_no_round_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"dp-epsilon = 0\.1: the first round would cost ε = "):
        private(tmp_path, "fedproto", dp_noise=1.0, dp_epsilon=0.1)


def nodes(folder: Path, **facts: Any) -> dict[int, dict[str, Any]]:
    return {
        1000 + i: {"partition-id": i, "num-partitions": 2, "state-dir": str(folder / f"disk-{i}"), **CACHE, **facts}
        for i in range(2)
    }


def test_a_site_keeps_one_account_over_all_runs_and_takes_part_in_nothing_beyond_it(tmp_path: Path) -> None:
    demand = {"require-dp": "epsilon<=3.3 delta<=1e-4"}
    first, second = (
        run_config(tmp_path / name, algo="fedproto", run_name=name, **SMALL | {"dp_epsilon": 3.0, "rounds": 1})
        for name in ("first", "second")
    )
    assert not any(run_federation(first, nodes=nodes(tmp_path, **demand)).summary["trouble"].values())
    (row,) = rows_without_a_reply(second, nodes=nodes(tmp_path, **demand))
    assert "require-dp, over all runs, = 3.3: this round would bring" in str(row["failed"])
    (account,) = (tmp_path / "disk-0").glob("privacy/*.json")
    assert list(json.loads(account.read_text())) == ["first"]


@pytest.mark.parametrize(
    ("demand", "changes", "said"),
    [
        ("epsilon<=8", {"dp": "none"}, "dp = 'none': this site takes part only with dp = 'sample'"),
        ("epsilon<=8", {"dp": "weights"}, "dp = 'weights': this site takes part only with dp = 'sample'"),
        ("epsilon<=2", {"dp": "sample"}, "dp-epsilon = 8.0: this site takes at most 2"),
        ("epsilon<=8", {"dp": "sample", "dp_delta": 0.01}, "dp-delta = 0.01: this site takes at most 1e-05"),
        ("little", {"dp": "sample"}, "node-config: require-dp = 'little': say 'epsilon<=8'"),
    ],
)
def test_a_site_takes_part_in_nothing_less_than_it_demands(
    demand: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    node = {"site-name": "north", "require-dp": demand}
    with pytest.raises(SettingsError, match=said):
        Settings.from_run_config(run_config(tmp_path, **changes), node)


def test_a_damaged_account_stops_the_client_and_says_why(tmp_path: Path) -> None:
    for i in range(2):
        (file := tmp_path / f"disk-{i}" / "privacy" / f"site-{i}.json").parent.mkdir(parents=True)
        file.write_text("{")
    config = run_config(tmp_path, algo="fedproto", **SMALL | {"rounds": 1})
    (row,) = rows_without_a_reply(config, nodes=nodes(tmp_path))
    assert "StateError: its model of this run cannot be read" in str(row["failed"])
