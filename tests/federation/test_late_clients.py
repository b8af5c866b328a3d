"""Clients that never train (``new-clients``), and that drop out of rounds (``drop-rate``)."""

import re

import pytest
from flwr.app import MessageType

from protofl_common.tools.tables.figure import Figure
from server_app.network.membership import FederationError
from tests.support.harness import federate, refusal
from tests.support.results import digests, left_by, without_times

SMALL = {"models": "htcnn-1", "train_samples": 20, "test_samples": 20}


def sites_asked(outcome, kind):
    """Return the sites that got a message of this kind, one set for each round."""
    rounds = {}
    for message, _ in outcome.exchanged(kind):
        site = f"site-{message.metadata.dst_node_id - 1000}"
        rounds.setdefault(message.metadata.group_id, set()).add(site)
    return list(rounds.values())


FIVE_SITES = {f"site-{i}" for i in range(5)}


@pytest.mark.parametrize("algo", ["fedavg", "fedproto", "fedrep", "scaffold", "ditto", "gaussian"])
def test_new_clients_are_asked_last_and_their_figures_stand_apart(algo, tmp_path, capsys):
    """Two of five clients never train: accuracies are over the other three.

    Those of the two are a metric of their own.
    """
    outcome = federate(tmp_path, clients=5, algo=algo, new_clients=2, new_client_epochs=2, **SMALL)

    trained, trained_again = sites_asked(outcome, MessageType.TRAIN)
    assert len(trained) == len(trained_again) == 3
    assert sites_asked(outcome, MessageType.EVALUATE) == [FIVE_SITES]

    summary = outcome.summary
    kind, *_ = summary["accuracy"]  # the first way to predict that the algorithm has
    mean = summary["accuracy"][kind]["mean"]
    clients = summary["accuracy-of-clients"]

    assert {site for site, figures in clients.items() if figures} == trained
    assert mean == pytest.approx(sum(clients[site][kind] for site in trained) / 3)
    assert Figure(what=kind).read(outcome.folder) == pytest.approx(100 * mean)
    assert summary["best-accuracy"][kind]["after-round"] <= 2  # of two rounds

    final = outcome.rows[-1]
    name = f"{kind}/new-clients"
    new_clients = FIVE_SITES - trained
    new_mean = sum(final["clients"][site]["metrics"][name] for site in new_clients) / 2

    assert final["asked"] == 3
    assert final["valid"] == 3
    assert "no accuracy" not in str(summary["warnings"])
    assert summary["metrics"][name]["mean"] == pytest.approx(new_mean)
    assert Figure(what=name).read(outcome.folder) == pytest.approx(100 * new_mean)
    assert f"│ {name} │ {100 * new_mean:>5.2f} │" in capsys.readouterr().out


def test_new_clients_change_nothing_of_the_others_and_train_as_they_are_told(tmp_path):
    """New clients train for themselves before the final evaluation (new-client-epochs), or not.

    The global model and all rounds are the same in both cases.
    """
    results_of_others = []
    figures_of_new_clients = []
    for epochs in (0, 3):
        folder = tmp_path / str(epochs)
        settings = {"algo": "fedavg", "new_clients": 2, "new_client_epochs": epochs}
        outcome = federate(folder, clients=4, **settings, **SMALL)
        found = digests(outcome.folder)
        # the folder "clients" has the new clients' own models, too
        global_tensors = {name: found[name] for name in found if "clients" not in name}
        rounds = without_times(outcome.rows[:-1])  # without the final evaluation
        results_of_others.append((global_tensors, rounds))
        figures_of_new_clients.append(outcome.summary["metrics"])

    untrained, trained = results_of_others
    assert untrained == trained
    of_untrained, of_trained = figures_of_new_clients
    assert of_untrained != of_trained


def test_a_client_that_drops_out_is_not_heard_in_that_round_and_again_alike(tmp_path):
    """With drop-rate other clients drop out in each round, in two equal runs the same ones."""
    settings = {"algo": "fedavg", "rounds": 4, "drop_rate": 0.4, **SMALL}
    first = federate(tmp_path / "first", clients=5, **settings)
    again = federate(tmp_path / "again", clients=5, **settings)

    assert left_by(first.folder) == left_by(again.folder)
    assert first.per_row("asked") == [5, 5, 5, 5, 5]

    *rounds, final = first.per_row("failed")
    assert final == {}
    for failed, asked in zip(rounds, sites_asked(first, MessageType.TRAIN), strict=True):
        assert set(failed.values()) <= {"dropped out (drop-rate)"}
        assert FIVE_SITES - failed.keys() == asked
    assert len({tuple(failed) for failed in rounds}) > 1


def test_clients_of_a_new_domain_never_train(tmp_path):
    outcome = federate(tmp_path, clients=7, algo="fedavg", new_domain="scanned", rounds=1, **SMALL)

    clients = outcome.summary["clients"]
    held_out = {site for site, facts in clients.items() if facts["domain"] == "scanned"}

    assert len(held_out) == 2  # of seven clients, each of one of five domains in turn
    assert sites_asked(outcome, MessageType.TRAIN) == [clients.keys() - held_out]
    for site, row in outcome.rows[-1]["clients"].items():
        assert ("head/new-clients" in row.get("metrics", {})) == (site in held_out)


@pytest.mark.parametrize(
    ("held_out", "said"),
    [
        (
            {"new_domain": "scan"},
            r"new-domain = 'scan': no client is of it; choose one of .*scanned",
        ),
        ({"new_clients": 3}, "new-clients = 3: no client is left to train"),
    ],
)
def test_new_clients_that_are_nobody_or_everybody_are_refused(held_out, said, tmp_path):
    with pytest.raises(FederationError, match=said):
        federate(tmp_path, clients=3, join_timeout=5.0, **held_out, **SMALL)


OWN = {"site-name": "north", "data-dir": "/data", "dataset": "arrays", "classes": "0,1"}
SHARE = {"partition-id": 0, "num-partitions": 3, "state-dir": "/state", "max-epochs": 5}
NOT_OWN = "only for clients that divide a data set"


@pytest.mark.parametrize(("settings", "node", "said"), [
    ({"secagg": True, "drop-rate": 0.1}, None,
     "drop-rate = 0.1: secagg = true forbids sums over different clients"),
    ({"secagg": True, "new-clients": 1}, None,
     "new-clients = 1: secagg = true hides the single figures"),
    ({"dp": "sample", "norm": "group", "new-clients": 1}, None,
     "new-clients = 1: the privacy ledger counts rounds"),
    ({"partition": "own", "drop-rate": 0.2}, OWN, f"^drop-rate = 0.2: {NOT_OWN}"),
    ({"partition": "own", "new-clients": 1}, OWN, f"^new-clients = 1: {NOT_OWN}"),
    ({"partition": "own", "new-domain": "ward"}, OWN, f"^new-domain = 'ward': {NOT_OWN}"),
    ({"new-clients": 1, "new-client-epochs": 6}, SHARE,
     "new-client-epochs = 6: this site takes at most 5"),
])  # fmt: skip
def test_new_clients_and_drop_outs_are_refused_where_they_cannot_be(settings, node, said):
    assert re.search(said, refusal({"algo": "fedavg"} | settings, node))
