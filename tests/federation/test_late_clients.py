"""Clients that never train (``new-clients``), and clients that drop out of rounds (``drop-rate``)."""

import re
from pathlib import Path
from typing import Any

import pytest
from flwr.app import MessageType

from protofl_common.tools.tables.figure import Figure
from server_app.network.membership import FederationError
from tests.support.given import Printed
from tests.support.harness import refusal, run_config, run_federation
from tests.support.results import digests, without_times

SMALL: dict[str, Any] = {"models": "htcnn-1", "train_samples": 20, "test_samples": 20}


def sites_asked(outcome: Any, kind: str) -> list[set[str]]:
    """Of each round, the sites that got a message of this kind."""
    rounds: dict[int, set[str]] = {}
    for message, _ in outcome.exchanged(kind):
        rounds.setdefault(int(message.metadata.group_id), set()).add(
            f"site-{message.metadata.dst_node_id - 1000}"
        )
    return list(rounds.values())


@pytest.mark.parametrize("algo", ["fedavg", "fedproto", "fedrep", "scaffold", "ditto", "gaussian"])
def test_new_clients_are_asked_last_and_their_figures_stand_apart(
    algo: str, tmp_path: Path, capsys: Printed
) -> None:
    outcome = run_federation(
        run_config(tmp_path, algo=algo, new_clients=2, new_client_epochs=2, **SMALL), clients=5
    )
    trained, *_ = rounds = sites_asked(outcome, MessageType.TRAIN)
    assert [len(asked) for asked in rounds] == [3, 3]
    assert sites_asked(outcome, MessageType.EVALUATE) == [{f"site-{i}" for i in range(5)}]
    summary, final, clients = (
        outcome.summary,
        outcome.rows[-1],
        outcome.summary["accuracy-of-clients"],
    )
    kind = next(iter(summary["accuracy"]))
    assert {site for site in clients if clients[site]} == trained
    assert summary["accuracy"][kind]["mean"] == pytest.approx(
        sum(clients[site][kind] for site in trained) / 3
    )
    new = [
        final["clients"][site]["metrics"][f"{kind}/new-clients"]
        for site in clients.keys() - trained
    ]
    assert summary["metrics"][f"{kind}/new-clients"]["mean"] == pytest.approx(sum(new) / 2)
    assert (final["asked"], final["valid"], "no accuracy" in str(summary["warnings"])) == (
        3,
        3,
        False,
    )
    assert Figure(what=f"{kind}/new-clients").read(outcome.folder) == pytest.approx(50 * sum(new))
    assert Figure(what=kind).read(outcome.folder) == pytest.approx(
        100 * summary["accuracy"][kind]["mean"]
    )
    assert f"│ {kind}/new-clients │ {50 * sum(new):>5.2f} │" in capsys.readouterr().out
    assert summary["best-accuracy"][kind]["after-round"] <= 2


def test_new_clients_change_nothing_of_the_others_and_train_as_they_are_told(
    tmp_path: Path,
) -> None:
    learned, figures = [], []
    for epochs in (0, 3):
        config = run_config(
            tmp_path / str(epochs), algo="fedavg", new_clients=2, new_client_epochs=epochs, **SMALL
        )
        outcome = run_federation(config, clients=4)
        of_all = {
            name: one for name, one in digests(outcome.folder).items() if "clients" not in name
        }
        learned.append((of_all, without_times(outcome.rows[:-1])))
        figures.append(outcome.summary["metrics"])
    assert learned[0] == learned[1]
    assert figures[0] != figures[1]


def test_a_client_that_drops_out_is_not_heard_in_that_round_and_again_alike(tmp_path: Path) -> None:
    more = {"algo": "fedavg", "rounds": 4, "drop_rate": 0.4, **SMALL}
    outcomes = [
        run_federation(run_config(tmp_path / name, **more), clients=5)
        for name in ("first", "again")
    ]
    first, again = (without_times(outcome.rows) for outcome in outcomes)
    assert first == again
    failed = [row["failed"] for row in first]
    assert len({tuple(sites) for sites in failed[:-1]}) > 1
    assert {reason for sites in failed for reason in sites.values()} == {"dropped out (drop-rate)"}
    assert failed[-1] == {}
    assert [row["asked"] for row in first] == [5] * 5
    asked = sites_asked(outcomes[0], MessageType.TRAIN)
    assert [{f"site-{i}" for i in range(5)} - set(sites) for sites in failed[:-1]] == asked


def test_a_domain_is_held_out(tmp_path: Path) -> None:
    outcome = run_federation(
        run_config(tmp_path, algo="fedavg", new_domain="scanned", rounds=1, **SMALL), clients=7
    )
    clients = outcome.summary["clients"]
    held_out = {site for site, facts in clients.items() if facts["domain"] == "scanned"}
    assert len(held_out) == 2
    assert sites_asked(outcome, MessageType.TRAIN) == [clients.keys() - held_out]
    new = {
        site
        for site, row in outcome.rows[-1]["clients"].items()
        if "head/new-clients" in row.get("metrics", {})
    }
    assert new == held_out


@pytest.mark.parametrize(("held_out", "said"), [
    ({"new_domain": "scan"}, r"new-domain = 'scan': no client is of it; choose one of .*scanned"),
    ({"new_clients": 3}, "new-clients = 3: no client is left to train"),
])  # fmt: skip
def test_nobody_or_everybody_held_out_is_refused(
    held_out: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(FederationError, match=said):
        run_federation(run_config(tmp_path, join_timeout=5.0, **held_out, **SMALL), clients=3)


SHARE = {"partition-id": 0, "num-partitions": 3, "state-dir": "/state"}
OWN: dict[str, Any] = {"partition": "own",
    "node": {"site-name": "north", "data-dir": "/data", "dataset": "arrays", "classes": "0,1"}}  # fmt: skip


@pytest.mark.parametrize(("more", "said"), [
    ({"secagg": True, "drop-rate": 0.1}, "drop-rate = 0.1: secagg = true forbids sums over different clients"),
    ({"secagg": True, "new-clients": 1}, "new-clients = 1: secagg = true hides the single figures"),
    ({"dp": "sample", "norm": "group", "new-clients": 1}, "new-clients = 1: the privacy ledger counts rounds"),
    (OWN | {"drop-rate": 0.2}, "^drop-rate = 0.2: only for clients that divide a data set"),
    (OWN | {"new-clients": 1}, "^new-clients = 1: only for clients that divide a data set"),
    (OWN | {"new-domain": "ward"}, "^new-domain = 'ward': only for clients that divide a data set"),
    ({"node": {**SHARE, "max-epochs": 5}, "new-clients": 1, "new-client-epochs": 6},
     "new-client-epochs = 6: this site takes at most 5"),
])  # fmt: skip
def test_a_protection_that_cannot_hold_and_a_site_refuse_them(
    more: dict[str, Any], said: str
) -> None:
    config = {"algo": "fedavg"} | {key: more[key] for key in more if key != "node"}
    assert re.search(said, refusal(config, more.get("node")))
