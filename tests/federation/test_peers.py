"""Whom a site is summed with: peers that it knows by their keys, over a year of runs."""

from contextlib import suppress

import pytest
from flwr.app import Message, MessageType, RecordDict

from protofl_common.experiment.node import problem_of_peers
from protofl_common.experiment.settings import digest_of
from protofl_common.experiment.study import Study
from protofl_common.runs.folder import RunFolder
from protofl_common.tools.site.approvals import decide, describe_requests
from protofl_common.wire.records import pack_settings
from server_app.network.membership import FederationError
from tests.support.attacks import silent, when
from tests.support.harness import (
    LocalGrid,
    refusal,
    run_config,
    run_federation,
    settings_of,
)
from tests.support.sites import EAST, NAMES, NORTH, SOUTH, Three, make_site_keys, signed

FOUR = (*NAMES, "west")
WEST = 4
FIFTH = 5
OWN = {
    "partition": "own",
    "image_size": 8,
    "train_samples": 0,
    "models": "cnn4",
    "secagg": True,
    "join_timeout": 1.0,
}


class Hospitals(Three):
    """Sites that know one another by their keys (``friends``), and ``strangers`` to all."""

    def __init__(self, folder, friends, strangers=()):
        super().__init__(folder, (*friends, *strangers))
        self.names = (*friends, *strangers)
        peers = self.keys(friends)
        for node in self.nodes.values():
            node["approve"] = False
            if node["site-name"] in friends:
                node |= {"peers": peers, "require-secagg": True}

    def keys(self, names):
        return make_site_keys(**{name: self.folder / name / "state/sites" / name for name in names})

    def without(self, *absent):
        return {n: node for n, node in self.nodes.items() if node["site-name"] not in absent}

    def study(self, *sites, **settings):
        """Return the settings of a signed study of these sites, or of all."""
        config = run_config(self.folder, **OWN | settings)
        return signed(config, sites=self.keys(sites or self.names))

    def decide(self, node, config, decision):
        """Let the operator of a site, which is asked first, decide about a run."""
        question = RecordDict({**pack_settings(digest_of(config))})
        grid = LocalGrid(config, self.nodes)
        grid.ask(Message(question, node, MessageType.QUERY, group_id="0"))
        decide(self.nodes[node], Study.of(config).id, decision, key_file=None)

    def federate(self, config, nodes, run_id, tamper=None):
        """Make one of several Flower runs; each has a folder of its own at the server."""
        folder = self.folder / f"runs-{run_id}"
        return run_federation(
            config | {"out-dir": str(folder)}, nodes=nodes, run_id=run_id, tamper=tamper
        )


def ends_with_a_result(outcome):
    """True if every round of a run, and the final evaluation, has a sum."""
    return not any(row["void"] for row in outcome.rows)


def test_a_year_of_hospitals_that_come_and_go_has_a_result_in_every_run(tmp_path, monkeypatch):
    """West's machine is away for a round, and comes back as another node; a fifth hospital joins.

    In the final evaluation of its second run the fifth gives no more and is lost. South leaves, and
    east denies a second study over the same data.
    """
    monkeypatch.setattr("server_app.network.exchange.LOOK_AROUND_SECONDS", 0.05)
    monkeypatch.setattr("server_app.network.exchange.RETURN_SECONDS", 0.5)
    hospitals = Hospitals(tmp_path, (*FOUR, "fifth"))
    heart = hospitals.study(*FOUR, rounds=3, min_clients=3)
    nodes = hospitals.without("fifth")
    west = dict(hospitals.nodes[WEST])

    def west_is_away(message, reply):
        if message.metadata.group_id == "2":
            nodes.pop(WEST, None)
        if message.metadata.group_id == "3":
            nodes[40] = west
        return reply

    first = hospitals.federate(heart, nodes, run_id=1, tamper=west_is_away)
    assert first.per_row("valid") == [4, 3, 4, 4]

    again = hospitals.federate(heart, hospitals.without("fifth"), run_id=2)
    assert again.per_row("valid") == [4, 4, 4, 4]

    larger = hospitals.study(rounds=3, min_clients=3, evaluate_every=3)  # two evaluations a run
    hospitals.nodes[FIFTH] |= {"approve": True, "min-class-samples": 2, "max-evaluations": 3}
    hospitals.decide(FIFTH, larger, "approved")
    joined = hospitals.federate(larger, hospitals.nodes, run_id=3)
    assert joined.per_row("valid") == [5, 5, 5, 5]

    lost = hospitals.federate(larger, hospitals.nodes, run_id=4)
    assert lost.per_row("valid") == [5, 5, 5, 4]
    assert "as often as max-evaluations" in lost.rows[-1]["failed"]["fifth"]

    hospitals.nodes[FIFTH]["approve"] = False
    smaller = hospitals.study(rounds=2, min_clients=3)
    left = hospitals.federate(smaller, hospitals.without("south"), run_id=5)
    assert left.per_row("valid") == [4, 4, 4]

    second_study = hospitals.study(*FOUR, rounds=2, min_clients=3, algo="fedavg", seed=7)
    hospitals.nodes[EAST]["approve"] = True
    hospitals.decide(EAST, second_study, "denied")
    denied = hospitals.federate(second_study, hospitals.without("fifth"), run_id=6)
    assert denied.per_row("valid") == [3, 3, 3]

    for outcome in (first, again, joined, lost, left, denied):
        assert ends_with_a_result(outcome)


def test_a_site_takes_part_in_no_study_whose_sites_it_does_not_know(tmp_path):
    """The study's signer has made up two hospitals, or has given known names other keys."""
    hospitals = Hospitals(tmp_path, NAMES, ("st-mary", "university"))
    north = hospitals.nodes[NORTH]
    invented = hospitals.study("north", "st-mary", "university")
    renamed = invented["study-sites"].replace("st-mary", "east").replace("university", "south")

    for sites in (invented["study-sites"], renamed, ""):
        assert "study-sites: this site knows 0 of" in problem_of_peers(
            north, invented | {"study-sites": sites}
        )
    assert not problem_of_peers(north, hospitals.study())

    _name, key_of_east = hospitals.keys(["east"]).split(":")
    doubled = refusal({}, north | {"peers": f"east:{key_of_east}, ost:{key_of_east}"})
    assert "node-config: peers: east, ost have the same key" in doubled

    with pytest.raises(FederationError, match="north cannot take part: study-sites: this site"):
        hospitals.federate(invented, {NORTH: north}, 1)


def test_without_peers_only_a_study_that_its_operator_approved_is_summed(tmp_path):
    """Where no peers are named, the operator must approve each study, whose keys are then shown."""
    hospitals = Hospitals(tmp_path, NAMES)
    for node in hospitals.nodes.values():
        del node["peers"]
    unasked = refusal({"secagg": True, "partition": "own"}, hospitals.nodes[EAST])

    assert "node-config: approve = false: with require-secagg and without peers" in unasked

    for node in hospitals.nodes.values():
        node["approve"] = True

    nobody = run_config(tmp_path, **OWN)
    with pytest.raises(FederationError, match="study-sites: missing"):
        hospitals.federate(nobody, hospitals.nodes, 1)

    study = hospitals.study(rounds=1, min_clients=3)
    with pytest.raises(FederationError, match="waiting for approval at north"):
        hospitals.federate(study, hospitals.nodes, 2)

    ((_, lines),) = describe_requests(hospitals.nodes[NORTH])
    assert "cannot know who the others are; compare the keys" in "\n".join(lines)

    for node in hospitals.nodes.values():
        decide(node, Study.of(study).id, "approved", key_file=None)
    assert ends_with_a_result(hospitals.federate(study, hospitals.nodes, 3))


def test_a_request_marks_the_keys_that_the_site_has_never_met(tmp_path):
    """Of a study's four sites st-mary is not among the peers of north, whose operator is asked."""
    hospitals = Hospitals(tmp_path, NAMES, ("st-mary",))
    north = hospitals.nodes[NORTH] | {"approve": True}
    study = hospitals.study()

    with pytest.raises(FederationError):
        hospitals.federate(study, {NORTH: north}, 1)

    ((_, lines),) = describe_requests(north)

    (marked,) = [line for line in lines if "NEW" in line]
    assert marked.endswith("not in peers, so nobody here knows these keys: st-mary")


def test_of_a_sum_two_peers_stay_to_its_end(tmp_path):
    """South is lost in a sum of five: of the others, north knows east alone, and does not unmask.

    The other two may be the server's own. South is lost in the last sum: in any other, a site would
    look at the next one's keys as well.
    """
    hospitals = Hospitals(tmp_path, NAMES, ("st-mary", "university"))
    config = hospitals.study(rounds=1, min_clients=3, run_name="year")

    assert ends_with_a_result(hospitals.federate(config, hospitals.nodes, run_id=1))

    south_is_lost = when(silent, MessageType.EVALUATE, node=SOUTH)
    said = "north: unmask: a sum with 1 sites that north knows, fewer than 2"
    with pytest.raises(FederationError, match=said):
        hospitals.federate(config, hospitals.nodes, run_id=2, tamper=south_is_lost)


def test_the_sites_that_nobody_knows_cannot_unmask(tmp_path):
    """Of seven sites nobody knows four: these and one more would hold enough shares to unmask."""
    hospitals = Hospitals(tmp_path, NAMES, ("a", "b", "c", "d"))
    config = hospitals.study(rounds=1, min_clients=3, run_name="year")

    with pytest.raises(FederationError):
        hospitals.federate(config, hospitals.nodes, run_id=1)

    row, *_ = RunFolder(tmp_path / "runs-1/year").rows()
    refused = "share: a sum with 4 sites that {} does not know, of 7"

    for name in NAMES:
        assert row["failed"][name] == refused.format(name)


def test_a_site_that_accepts_no_weights_takes_part_where_vectors_are_sent():
    """The site takes no part where the server sends weights, alone or beside vectors."""
    node = {"site-name": "north", "accept-weights": False}
    for algo in ("fedavg", "protofed", "scaffold", "fedkd"):
        refused = refusal({"algo": algo}, node)
        assert f"algo = '{algo}': its server sends " in refused
        assert "accepts no weights (node config: accept-weights)" in refused
        assert "fedproto, fedsa, fedtgp, gaussian" in refused
    for algo in ("fedproto", "fedtgp", "fedsa", "gaussian"):
        assert not settings_of({"algo": algo}, node).exchange.sends_weights


@pytest.mark.parametrize(
    ("friends", "strangers"), [(FOUR, ("st-mary",)), (NAMES, ("st-mary", "university"))]
)
def test_strangers_are_counted_on_for_no_noise(friends, strangers, tmp_path):
    """Strangers may be the server's own, which add no noise; three sites must (dp-honest-sites).

    Of five sites four must stay in a sum. With one stranger three of these are friends; with two
    strangers it may be two, and the friends refuse.
    """
    hospitals = Hospitals(tmp_path, friends, strangers)
    for node in hospitals.nodes.values():
        node["max-honest-sites"] = 3
    noise = {"dp": "sample", "dp_honest_sites": 3}
    gaussian = {"algo": "gaussian", "backbones": "glyphs"}
    config = hospitals.study(rounds=1, run_name="year", **noise, **gaussian)

    with suppress(FederationError):
        hospitals.federate(config, hospitals.nodes, run_id=1)

    row, *_ = RunFolder(tmp_path / "runs-1/year").rows()
    refused = "a sum may have 2 sites that this one knows (node config: peers)"
    refusing = {site for site, text in row["failed"].items() if refused in text}

    has_too_few_friends = len(strangers) == 2
    assert refusing == ({*friends} if has_too_few_friends else set())
    assert row["void"] == has_too_few_friends
