"""Studies: who may take part, which runs an operator has approved, and what the audit log proves."""

import errno
import json
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import date, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict

import server_app.protections.secure_sum as server_secagg
from client_app import audit, consent
from client_app.client import open_client
from client_app.state import StateError, StateFolder
from protofl_common.basics.run_history import RunHistory
from protofl_common.config.options import SettingsError
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.node import NodeConfig
from protofl_common.experiment.settings import Settings, digest_of
from protofl_common.experiment.study import Study, about_site, in_text, is_from_site
from protofl_common.privacy.masks import PUBLIC, introducing
from protofl_common.runs.folder import RunFolder
from protofl_common.tools.cli import main
from protofl_common.wire.records import (
    NEXT_SUM,
    SECAGG,
    Instructions,
    pack_instructions,
    pack_settings,
)
from protofl_common.wire.schema import Weights
from server_app.network.membership import FederationError
from tests.support.attacks import by, when
from tests.support.commands import output
from tests.support.given import Patch, Printed
from tests.support.harness import RUN_ID, LocalGrid, run_config, run_federation
from tests.support.sites import JANE, NAMES, Three, named, signed

OWN = {
    "partition": "own",
    "image_size": 8,
    "num_clients": 3,
    "train_samples": 0,
    "models": "cnn4",
    "rounds": 1,
}
OPENED: list[str] = []
"""Paths that this process has opened, by Python's own audit events; tests empty it."""
sys.addaudithook(lambda event, details: OPENED.append(str(details[0])) if event == "open" else None)
TODAY = date.today()
JANES = (
    "SHA256:pYg5bp6PIZ6ZlFg5lb6kFY3WQZisoGTA7FSkeU5bgAo"  # as `ssh-keygen -l` prints it for `JANE`
)


class Hospitals(Three):
    def __init__(self, folder: Path, capsys: Printed) -> None:
        super().__init__(folder)
        self.capsys = capsys
        self.nodes = {number: node | {"approve": True} for number, node in self.nodes.items()}

    def config(self, **settings: Any) -> dict[str, Any]:
        return run_config(self.folder, **OWN | {"join_timeout": 1.0} | settings)

    def state(self, site: str) -> Path:
        return self.folder / site / "state"

    def consent(self, site: str) -> Path:
        return self.state(site) / "sites" / site

    def request(self, config: dict[str, Any]) -> Path:
        """What north has noted of a run that asks to be approved."""
        return self.consent("north") / "studies" / f"{Study.of(config).id}.json"

    def lines(self) -> list[dict[str, Any]]:
        """The entries of the log of north."""
        return [entry for _, entry, _ in audit.entries(self.consent("north") / audit.FILE)]

    def rows(self, run: str) -> list[dict[str, Any]]:
        return RunFolder(self.folder / "runs" / run).rows()

    def keys(self, *sites: str) -> str:
        return named(**{site: self.consent(site) for site in sites})

    def operator(self, site: str, *words: str) -> int:
        (node,) = (node for node in self.nodes.values() if node["site-name"] == site)
        return main(
            [
                "site",
                *words,
                "--node-config",
                " ".join(f"{k}={json.dumps(v)}" for k, v in node.items()),
            ]
        )

    def shown(self, *words: str, status: int = 0) -> str:
        """What a command of the operator of north prints; its exit status is this."""
        self.capsys.readouterr()
        assert self.operator("north", *words) == status
        return self.capsys.readouterr().out

    def decide(
        self, config: dict[str, Any], *sites: str, words: tuple[str, ...] = ("approve",)
    ) -> None:
        for site in sites or NAMES:
            assert self.operator(site, words[0], Study.of(config).id, *words[1:]) == 0

    def ask_and_decide(
        self, config: dict[str, Any], *sites: str, words: tuple[str, ...] = ("approve",)
    ) -> None:
        """These sites, or all, hear of the run, and their operators decide."""
        for site in sites or NAMES:
            self.answer(site, config)
        self.decide(config, *sites, words=words)

    def answer(self, site: str, config: dict[str, Any], run_id: int = 5, digest: str = "") -> str:
        """The reason why a site does not introduce itself, or ""; ``digest``: the server's, if its defaults differ."""
        content = RecordDict({**pack_settings(digest or digest_of(config))})
        grid = LocalGrid(
            config, self.nodes, run_id=run_id
        )  # before the message, which is of its Flower run
        reply = grid.asked(Message(content, NAMES.index(site) + 1, MessageType.QUERY, group_id="0"))
        return str(reply.error.reason) if reply.has_error() else ""


def images_opened() -> int:
    return sum(path.endswith(".png") for path in OPENED)


@pytest.fixture
def hospitals(tmp_path: Path, capsys: Printed) -> Hospitals:
    return Hospitals(tmp_path, capsys)


# -- consent ----------------------------------------------------------------------------------------------------------
def test_a_run_that_nobody_has_approved_opens_no_file_and_then_takes_part(
    hospitals: Hospitals,
) -> None:
    """A line of the log about a baseline names the baseline."""
    config = hospitals.config(baselines="local", min_clients=3)
    OPENED.clear()
    with pytest.raises(FederationError) as refusal:
        run_federation(config, nodes=hospitals.nodes)
    assert images_opened() == 0
    assert any("/north/studies/" in path for path in OPENED)
    for site in NAMES:
        assert (
            f"waiting for approval at {site}: a run without a study ({Study.of(config).id})"
            in str(refusal.value)
        )
    shown = hospitals.shown("requests")
    where, setting = f"\nin {hospitals.consent('north')}\n", "    setting    partition=own\n"
    sends, with_whom = "leaves     FedProto: in each round ", "with       any sites"
    for line in (
        "WAITS since",
        "nobody has signed it",
        with_whom,
        "maybe of one sample",
        sends,
        setting,
        where,
    ):
        assert line in shown
    hospitals.decide(config)
    outcome = run_federation(config, nodes=hospitals.nodes, run_id=2)
    assert images_opened() >= 24
    assert set(outcome.summary["clients"]) == set(NAMES)
    assert [line["algo"] for line in hospitals.lines() if line.get("kind") == "train"] == [
        "fedproto",
        "local",
    ]


def test_the_server_asks_again_until_an_operator_has_approved(
    hospitals: Hospitals, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("server_app.network.membership.APPROVAL_EVERY", 0.2)
    config = hospitals.config(join_timeout=60.0)
    questions: list[float] = []

    def operators(message: Message, reply: Message) -> Message:
        questions.append(time.monotonic())
        if len(questions) == 12:
            hospitals.decide(config)
        return reply

    assert set(
        run_federation(config, nodes=hospitals.nodes, tamper=operators).summary["clients"]
    ) == set(NAMES)
    server, sites = hospitals.capsys.readouterr()
    assert server.count("waiting for approval at north") == 1
    assert (
        re.findall(r"(\S+) protofl: .* waiting for approval at north", sites) == ["INFO"] * 3
    )  # at times 1, 2, 4 …


def test_a_denial_in_round_three_acts_at_once_and_the_others_go_on(hospitals: Hospitals) -> None:
    """Once resumed, the run waits for a site of before that has not decided yet, and for none that denies."""
    config = hospitals.config(rounds=4, run_name="mine", num_clients=2)
    hospitals.ask_and_decide(config)
    denies = when(
        lambda _, reply: hospitals.decide(config, "south", words=("deny",)) or reply,
        node=3,
        number=2,
    )
    outcome = run_federation(config, nodes=hospitals.nodes, tamper=denies)
    denied = f"denied at south: a run without a study ({Study.of(config).id})"
    assert [(row["valid"], row["failed"].get("south")) for row in outcome.rows] == [
        (3, None)
    ] * 2 + [(2, denied)] * 3
    request = hospitals.consent("south") / "studies" / hospitals.request(config).name
    for run_id, decision in ((2, ""), (3, "denied")):
        consent.write(request, replace(consent.read(request), decision=decision))
        (outcome.folder / "summary.json").unlink()
        run_federation(config | {"resume": True}, nodes=hospitals.nodes, run_id=run_id)
        said = hospitals.capsys.readouterr().out
        assert ("going on without south: not there after join-timeout" in said) == (not decision)
    hospitals.nodes[3]["approve"] = (
        False  # such a site asks about no run, but its operator has denied this one
    )
    assert denied in hospitals.answer("south", config)
    assert hospitals.answer("south", config | {"lr": 0.02}) == ""


def test_new_settings_and_new_code_are_asked_for_anew(
    hospitals: Hospitals, tmp_path: Path, monkeypatch: Patch
) -> None:
    config = hospitals.config()
    hospitals.ask_and_decide(config, "north")
    assert hospitals.answer("north", config) == ""
    assert hospitals.answer("north", config | {"run-name": "another", "resume": True}) == ""
    assert "waiting for approval" in hospitals.answer("north", config | {"lr": 0.02})
    assert "waiting for approval" in hospitals.answer("north", config | {"metrics": "auc"})
    monkeypatch.setattr(
        consent, "CODE", "upgraded"
    )  # of this process; what is on the disk has changed, or is the same
    assert "changed since its start; its operator must stop protofl site run" in hospitals.answer(
        "north", config
    )
    assert consent.read(hospitals.request(config)).decision == "approved"
    monkeypatch.setattr(consent, "code_version", SimpleNamespace(__wrapped__=lambda: "upgraded"))
    assert f"protofl site approve {Study.of(config).id}" in hospitals.answer("north", config)
    hospitals.decide(config, "north")
    assert hospitals.answer("north", config) == ""
    monkeypatch.syspath_prepend(tmp_path)
    (package := tmp_path / "ours_of_studies.py").write_text(
        "def brier(scores, labels):\n    return 0.0\n"
    )
    hospitals.nodes[2]["allow-python"] = package.stem
    config |= {"metrics": f"{package.stem}:brier"}
    for version in ("first", "second"):
        with package.open("a") as code:
            code.write(f"# the {version}\n")
        assert "waiting for approval" in hospitals.answer("north", config)
        hospitals.decide(config, "north")
        assert hospitals.answer("north", config) == ""


def test_an_approval_ends_with_its_runs_and_its_days(
    hospitals: Hospitals, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(consent, "MOST_INTRODUCTIONS", 3)
    config = hospitals.config()
    for site in NAMES:
        hospitals.answer(site, config)
    assert hospitals.operator("north", "approve", "0" * 32) == 1
    assert (
        f"no such request; choose from {Study.of(config).id}" in hospitals.capsys.readouterr().err
    )
    yesterday = str(TODAY - timedelta(days=1))
    assert hospitals.operator("north", "approve", Study.of(config).id, "--until", yesterday) == 1
    hospitals.decide(config, words=("approve", "--runs", "1", "--until", str(TODAY)))
    assert (
        f", until {TODAY}, 1 runs, in {hospitals.consent('north')}/studies"
        in hospitals.capsys.readouterr().out
    )
    assert hospitals.answer("north", config, 1) == ""  # a run that only asks does not count
    assert set(run_federation(config, nodes=hospitals.nodes, run_id=2).summary["clients"]) == set(
        NAMES
    )
    assert hospitals.answer("north", config, 2) == ""
    assert "north has had 3 introductions of a run without a study" in hospitals.answer(
        "north", config, 2
    )
    assert "north takes part in 1 runs of a run without a study" in hospitals.answer(
        "north", config, 3
    )
    consent.write(path := hospitals.request(config), replace(consent.read(path), until=yesterday))
    assert f"at north ended on {yesterday}" in hospitals.answer("north", config, 2)


@pytest.mark.parametrize("words", [("--runs", "1"), ()], ids=["one run", "any number"])
def test_a_server_asks_no_more_than_it_needs(
    words: tuple[str, ...], hospitals: Hospitals, monkeypatch: Patch
) -> None:
    """Each reply costs a line of the log; whether it calls its messages one run's or many's makes no difference."""
    monkeypatch.setattr(consent, "MOST_RUNS", 3)
    most = 1 if words else 3
    config = hospitals.config(
        secagg=True, rounds=2, baselines="fedavg", keep_best=True, min_clients=3
    )
    hospitals.ask_and_decide(config, words=("approve", *words))
    outcome = run_federation(config, nodes=hospitals.nodes)  # honest, and the dearest
    assert outcome.summary["rounds"] == 2
    path = hospitals.request(config)
    before, limit = consent.read(path).messages, most * (2 + 1) * 2 * consent.MOST_MESSAGES
    assert (
        len([1 for sent, _ in outcome.grid.log if sent.metadata.dst_node_id == 2]) == before + 2
    )  # introductions
    assert before < limit / most / 2
    sent = {
        sent.metadata.message_type: sent
        for sent, _ in outcome.grid.log
        if sent.metadata.dst_node_id == 2
    }
    reasons = []
    for number in range(limit + 20):
        message = sent[("query.best", "query.advertise", MessageType.TRAIN)[number % 3]]
        run_id = RUN_ID if words else RUN_ID + number // 2
        message.content.config_records["round"]["run_history"] = str(run_id)
        grid = LocalGrid(config, hospitals.nodes, run_id=run_id)
        reply = grid.asked(message)
        reasons.append(str(reply.error.reason) if reply.has_error() else "")
    refusal = f"north has had {limit} messages of a run without a study ({Study.of(config).id}), more than an honest"
    answered = reasons[: limit - before]
    assert "" in answered
    assert not any(reason.startswith(refusal) for reason in answered)
    assert all(reason.startswith(refusal) for reason in reasons[len(answered) :])
    assert (consent.read(path).messages, len(consent.read(path).run_ids) <= limit) == (limit, True)
    assert (
        f"{refusal} server needs; its operator may approve it again (8 times that day)"
        in hospitals.shown("audit")
    )
    hospitals.decide(config, "north", words=("approve", *words))
    assert not grid.asked(sent["query.best"]).has_error()


def test_a_final_evaluation_alone_counts_as_a_run(hospitals: Hospitals) -> None:
    """A server could else ask for as many as it likes, with weights of its choice, in runs that train nothing."""
    config = hospitals.config()
    hospitals.ask_and_decide(config, words=("approve", "--runs", "2"))
    outcome = run_federation(config, nodes=hospitals.nodes)
    final, *_ = [
        sent for sent, _ in outcome.grid.log if sent.metadata.message_type == MessageType.EVALUATE
    ]
    replies = []
    for run_id in (RUN_ID + 1, RUN_ID + 2):
        final.content.config_records["round"]["run_history"] = str(run_id)
        replies.append(LocalGrid(config, hospitals.nodes, run_id=run_id).asked(final))
    assert not replies[0].has_error(), replies[0].error.reason
    assert "takes part in 2 runs" in replies[1].error.reason


def test_what_holds_of_an_approval_is_said_recorded_and_listed_for_programs(
    hospitals: Hospitals,
) -> None:
    limits = {"until": str(TODAY + timedelta(days=1)), "runs": 2}
    config = signed(
        hospitals.config(study_runs=2), until=limits["until"], purpose="which valves leak"
    )
    hospitals.nodes[2]["min-class-samples"] = 2
    hospitals.ask_and_decide(
        config, "north", words=("approve", "--runs", "9", "--until", "2099-01-01")
    )
    assert f", until {limits['until']}, 2 runs, in " in hospitals.capsys.readouterr().out
    *_, entry = hospitals.lines()
    assert (
        entry.items() >= {**limits, "decision": "approved", "purpose": "which valves leak"}.items()
    )
    assert (entry["signed"], entry["demands"]) == (config["study-by"], {"min-class-samples": 2})
    proof = f", code {entry['code']}, demands {{'min-class-samples': 2}}; signed by {config['study-by']}: which valves"
    assert proof in hospitals.shown("audit")
    content = json.loads(hospitals.shown("requests", "--json"))
    (row,) = content["requests"]
    assert (
        row.items()
        >= {**limits, "id": Study.of(config).id, "decision": "approved", "run_ids": []}.items()
    )
    told = [word in "\n".join(row["asks"]) for word in ("which valves leak", "losses", "seconds")]
    assert (content["unread"], row["settings"]["study-purpose"], told) == (
        0,
        "which valves leak",
        [True, False, True],
    )
    del hospitals.nodes[2]["min-class-samples"]
    hospitals.answer("north", hospitals.config(dp="sample", norm="group"))
    *_, private = json.loads(hospitals.shown("requests", "--json"))["requests"]
    assert not re.search("losses|seconds", "\n".join(private["asks"]))


def test_a_study_whose_sites_have_all_answered_does_not_wait(
    hospitals: Hospitals, monkeypatch: Patch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("server_app.network.membership.time.sleep", pauses.append)
    config = signed(
        hospitals.config(join_timeout=300.0, num_clients=0), sites=hospitals.keys(*NAMES)
    )
    hospitals.ask_and_decide(config, "east", "north")
    hospitals.ask_and_decide(config, "south", words=("deny",))
    assert set(run_federation(config, nodes=hospitals.nodes).summary["clients"]) == {
        "east",
        "north",
    }
    assert sum(pauses) < 30


def test_no_stranger_ends_the_wait_for_a_site(hospitals: Hospitals, monkeypatch: Patch) -> None:
    config, nodes = (
        signed(hospitals.config(num_clients=0), sites=hospitals.keys(*NAMES)),
        hospitals.nodes,
    )
    hospitals.ask_and_decide(config)
    nodes[8], nodes[9], south = nodes[1], nodes[1], nodes.pop(3)
    monkeypatch.setattr(
        "server_app.network.membership.time.sleep", lambda seconds: nodes.update({3: south})
    )
    sent = {
        8: RecordDict({"site": ConfigRecord({"name": "south"})}),
        9: Error(2, "site south: denied at south"),
    }
    said = by(
        {
            node: lambda message, _, of=of: Message(of, reply_to=message)
            for node, of in sent.items()
        },
        "query",
    )
    outcome = run_federation(config, nodes=nodes, tamper=said)
    assert {message.metadata.dst_node_id for message, _ in outcome.exchanged()} == {1, 2, 3}
    why = "1 client cannot take part: site south, not signed with its key: denied at south"
    assert why in hospitals.capsys.readouterr().out


def test_an_approval_for_what_the_site_refuses_and_a_changed_file_are_none(
    hospitals: Hospitals,
) -> None:
    config = hospitals.config(baselines="local")
    hospitals.answer("north", config)
    hospitals.nodes[2] |= {"max-rounds": 1, "allow-algorithms": "fedproto"}
    assert (
        "refuses a baseline: baselines = 'local': algo = 'local': not allowed"
        in hospitals.shown("requests")
    )
    assert "this site takes at most 1" in hospitals.answer("north", hospitals.config(rounds=2))
    hospitals.decide(config, "north")
    path = hospitals.request(config)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"settings": content["settings"] | {"lr": 1.0}}))
    assert "this request of a run cannot be read" in hospitals.answer("north", config)
    path.unlink()
    path.mkdir()
    assert "StateError (state-dir): its state" in hospitals.answer("north", config)


def test_requests_cannot_fill_a_disk_nor_come_of_other_defaults(
    hospitals: Hospitals, monkeypatch: Patch
) -> None:
    assert "'8584f680', and '" in hospitals.answer("north", hospitals.config(), digest="8584f680")
    assert not [*hospitals.consent("north").glob("studies/*.json")]
    large = signed(hospitals.config(), purpose="x" * 100_000)
    assert "more than 65536, for an operator to read" in hospitals.answer("north", large)
    monkeypatch.setattr(consent, "MOST_REQUESTS", 2)
    ours, others = (
        partial(signed, by=f"{name}:{in_text(JANE.public_key())}") for name in ("jane", "joan")
    )
    hospitals.ask_and_decide(ours(hospitals.config()), "north")
    for sign in (
        dict,
        others,
        ours,
    ):  # nobody's requests, and those of signers unknown here, keep out no others
        for seed in (1, 2):
            assert "waiting for approval" in hospitals.answer(
                "north", sign(hospitals.config(seed=seed))
            )
        assert "2 requests of other runs wait" in hospitals.answer(
            "north", sign(hospitals.config(seed=3))
        )
    assert len([*(hospitals.consent("north") / "studies").glob("*.json")]) == 1 + 3 * 2


def test_a_site_with_data_of_its_own_asks_its_operator_unless_told() -> None:
    own = {"site-name": "north", "data-dir": "scans", "dataset": "image-folder"}
    share = {"site-name": "north", "partition-id": 0, "num-partitions": 3}
    nodes = (own, own | {"approve": False}, share, share | {"approve": True})
    assert [NodeConfig.of(node).approves for node in nodes] == [True, False, False, True]
    with pytest.raises(SettingsError, match="approve = 1 must be true or false"):
        NodeConfig.of(own | {"approve": 1})


def test_nothing_hides_behind_a_long_value_and_a_new_key_is_said(
    hospitals: Hospitals, monkeypatch: Patch
) -> None:
    """Nor behind what a package's row says of its weights."""
    monkeypatch.setitem(
        CATALOG["lg-fedavg"].exchange.up, "weights", Weights(meaning="little\nprotected  all")
    )
    config = hospitals.config(metrics="auc", baselines="lg-fedavg")
    hospitals.answer(
        "north", config := signed(config, purpose="x" * 2000, sites=hospitals.keys(*NAMES))
    )
    wanted = (
        "site\n(.*\n)*.*: in each round little; protected  all\n(.*\n)*    setting    metrics=auc\n"
    )
    assert re.search(f"that key is new to this {wanted}", hospitals.shown("requests"))
    hospitals.decide(config, "north")
    hospitals.answer(
        "north", signed(hospitals.config(metrics="auc", lr=0.5), sites=hospitals.keys(*NAMES))
    )
    assert "that key has signed what was approved here" in hospitals.shown("requests")


def test_a_bad_file_hides_no_other_request(hospitals: Hospitals) -> None:
    config = hospitals.config(baselines="fedper", fedper__personal_layers=0)
    hospitals.answer("north", config)
    (hospitals.consent("north") / "studies" / "bad.json").write_text("{")
    shown = hospitals.shown("requests")
    assert "1 files in" in shown
    assert "leaves     FedPer: in each round all weights of the model\n" in shown
    assert "    setting    fedper.personal-layers=0\n" in shown
    hospitals.decide(config, "north", words=("deny",))
    assert "denied at north" in hospitals.answer("north", config)


# -- a study ----------------------------------------------------------------------------------------------------------
def test_a_study_of_two_opens_no_file_at_the_third_or_of_another_key(
    hospitals: Hospitals, tmp_path: Path
) -> None:
    """Each operator has approved it, and yet south is not in it; nor is a site of which it names another key."""
    config = signed(hospitals.config(num_clients=0), sites=hospitals.keys("east", "north"))
    hospitals.ask_and_decide(config, "east", "north")
    OPENED.clear()
    assert set(run_federation(config, nodes=hospitals.nodes).summary["clients"]) == {
        "east",
        "north",
    }
    assert ([path for path in OPENED if "/south/data" in path], images_opened() > 0) == ([], True)
    assert "does not name south" in hospitals.answer("south", config)
    (tmp_path / "heart.toml").write_text(
        "".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items())
    )
    assert hospitals.operator("south", "approve", str(tmp_path / "heart.toml")) == 1
    assert "does not name south" in hospitals.capsys.readouterr().err
    config = signed(
        hospitals.config(), sites=hospitals.keys("north", "south").replace("south:", "east:")
    )
    OPENED.clear()
    assert "does not name east, or names another key of it" in hospitals.answer("east", config)
    assert not [path for path in OPENED if "/east/data" in path]
    assert "waiting for approval" in hospitals.answer("north", config)


def test_a_study_ends_on_its_last_day(hospitals: Hospitals) -> None:
    config = signed(hospitals.config(), until=str(TODAY - timedelta(days=1)))
    with pytest.raises(SettingsError, match="the study is over"):
        run_federation(config, nodes=hospitals.nodes)
    assert "ended on" in hospitals.answer("north", config)
    assert "waiting for approval" in hospitals.answer(
        "north", signed(hospitals.config(), until=str(TODAY))
    )


@pytest.mark.parametrize(("wrong", "text"), [
    ({"study-sites": "north:x"}, "study-sites: 'north:x' must be NAME:KEY"),
    ({"study-until": "soon"}, "study-until = 'soon': must be a day"),
    ({"study": "a/b"}, "study = 'a/b': must be made of"),
    ({"study-by": "jane"}, "study-by: 'jane' must be NAME:KEY"),
    ({"study-by": f"jane:{'A' * 43}, mallory:{'B' * 43}"}, "study-by: 'jane:A+, mallory:B+' must be NAME:KEY"),
    ({"study": ""}, "only with a study"),
    ({"study-signature": ""}, "not signed; protofl study sign"),
    ({"study-signature": "00" * 64}, "study-signature: not jane:"),
    ({"study-signature": "no hex"}, "study-signature: not jane:"),
    ({"lr": 0.5}, "study-signature: not jane:"),
    ({"study-runs": 9}, "study-signature: not jane:"),
])  # fmt: skip
def test_a_wrong_study_or_signature_is_refused_on_both_sides(
    wrong: Any, text: str, hospitals: Hospitals
) -> None:
    config = signed(hospitals.config()) | wrong
    with pytest.raises(SettingsError, match=text):
        run_federation(config, nodes=hospitals.nodes)
    assert re.search(text, hospitals.answer("north", config))


def test_who_calls_itself_by_the_name_of_another_site_is_not_that_site(
    hospitals: Hospitals,
) -> None:
    """Its own SuperNode refuses; a thief with code of its own sends the site's introduction, signed as it can."""
    config = signed(hospitals.config(), sites=hospitals.keys(*NAMES))
    nodes = {number: node | {"approve": False} for number, node in hospitals.nodes.items()}
    thief = {9: nodes[2] | {"state-dir": str(hospitals.folder / "thief")}}
    with pytest.raises(FederationError, match="does not name north, or names another key of it"):
        run_federation(config, nodes=thief)
    cards: list[ConfigRecord] = []

    def forged(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == MessageType.QUERY:
            if message.metadata.dst_node_id == 2:
                cards.append(reply.content.config_records["site"])
            if message.metadata.dst_node_id == 9:
                card = ConfigRecord({**cards[0], "signature": JANE.sign(b"north").hex()})
                return Message(RecordDict({"site": card}), reply_to=message)
        return reply

    outcome = run_federation(config | {"run-name": "second"}, nodes=nodes | thief, tamper=forged)
    assert "north: not signed by a site of the study" in hospitals.capsys.readouterr().out
    assert {message.metadata.dst_node_id for message, _ in outcome.exchanged()} == {1, 2, 3}


@pytest.mark.parametrize(("stage", "record"), [("query.advertise", SECAGG), ("train", NEXT_SUM)])
@pytest.mark.parametrize("server", ["honest", "hostile"])
def test_a_sum_is_with_no_other(
    server: str, stage: str, record: str, hospitals: Hospitals, monkeypatch: Patch
) -> None:
    """A server that puts keys of its own in the place of north's gets no sum, whether or not it checks them itself."""
    if server == "hostile":
        monkeypatch.setattr(server_secagg, "is_from_site", lambda *facts: True)
    config = signed(
        hospitals.config(secagg=True, rounds=3, min_clients=3), sites=hospitals.keys(*NAMES)
    )
    hospitals.ask_and_decide(config)
    assert (
        run_federation(config | {"run-name": "true"}, nodes=hospitals.nodes).rows[0]["valid"] == 3
    )

    def invented(message: Message, reply: Message) -> Message:
        true = reply.content.config_records[record]["north"]
        reply.content.config_records[record]["north"] = true[32:PUBLIC] + true[:32] + true[PUBLIC:]
        return reply

    with pytest.raises(FederationError):
        run_federation(
            config | {"run-name": "false"},
            nodes=hospitals.nodes,
            tamper=when(invented, stage, 2),
            run_id=6,
        )
    rows = hospitals.rows("false")
    assert all(row["void"] for row in rows[(server, stage) == ("honest", "train") :])
    if server == "hostile":
        at = "unmask" if stage == "train" else "share"
        lie = f"{at}: keys of north for a sum, which the key that the study names has not signed"
        assert {rows[0]["failed"][site] for site in ("east", "south")} == {lie}
    else:
        assert "not signed with the site's key" in rows[0]["refused"]["north"]


def test_a_file_is_signed_by_ssh_key_and_shown_in_words(
    hospitals: Hospitals, tmp_path: Path, capsys: Printed
) -> None:
    key = JANE.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
    (tmp_path / "id").write_bytes(key)
    text = (
        f'study = "heart"\nalgo = "fedtgp"\nrounds = 3\nstudy-sites = "{hospitals.keys(*NAMES)}"\n'
    )
    (file := tmp_path / "study.toml").write_text(
        text + 'study-purpose = "which valves leak"\nstudy-runs = 2\n'
    )
    assert "not signed" in output(capsys, "study", "show", file, status=1).err
    for _ in range(2):  # the second signature takes the place of the first
        assert (
            main(["study", "sign", str(file), "--key", str(tmp_path / "id"), "--by", "jane"]) == 0
        )
    shown = capsys.readouterr().out
    for line in (
        "study heart",
        f"signed by jane, {JANES}",
        "which valves leak",
        ", north:",
        "2 runs of 3 rounds",
    ):
        assert line in shown
    assert file.read_text().count("study-signature") == 1
    file.write_text(file.read_text().replace("rounds = 3", "rounds = 4"))
    assert "study-signature: not jane:" in output(capsys, "study", "show", file, status=1).err
    assert "give --key" in output(capsys, "study", "sign", file, status=1).err
    assert (
        f"--key {file}:"
        in output(capsys, "study", "sign", file, "--key", file, "--by", "jane", status=1).err
    )


def test_a_signature_serves_one_study_one_run_and_one_algorithm_only(hospitals: Hospitals) -> None:
    sites = hospitals.keys(*NAMES)
    heart, other = (
        Settings.from_run_config(signed(hospitals.config(seed=seed), sites=sites)).study
        for seed in (1, 2)
    )
    key = consent.site_key(hospitals.consent("north"))
    keys = bytes(PUBLIC)
    purpose = introducing("fedproto", 2, keys)
    signature = key.sign(about_site(heart, "north", 7, purpose))
    assert is_from_site(heart, "north", 7, purpose, signature)
    assert not is_from_site(other, "north", 7, purpose, signature)
    assert not is_from_site(heart, "north", 8, purpose, signature)
    assert not is_from_site(heart, "south", 7, purpose, signature)
    for algo, number in (("fedavg", 2), ("fedproto", 3)):
        assert not is_from_site(heart, "north", 7, introducing(algo, number, keys), signature)
    (hospitals.consent("north") / "site.key").write_text("ab")  # a restored half
    assert hospitals.operator("north", "key") == 1
    assert (
        "site.key is damaged; restore it, or remove it for a new key"
        in hospitals.capsys.readouterr().err
    )


def test_a_study_does_not_go_on_from_another_studys_model(hospitals: Hospitals) -> None:
    """Its server says which Flower runs came before, and may name any."""
    node = hospitals.nodes[1] | {"approve": False}
    LocalGrid(hospitals.config(), hospitals.nodes)  # Flower's messages want a run
    asked = pack_instructions(Instructions(3, "run", RunHistory(8, ((7, 2),))))

    def states(seed: int) -> StateFolder:
        config = signed(hospitals.config(seed=seed, rounds=3), sites=hospitals.keys(*NAMES))
        message = Message(RecordDict({"round": asked}), 1, MessageType.TRAIN, group_id="3")
        return open_client(Context(8, 1, node, RecordDict(), config), message).states

    earlier = states(1)
    earlier.run_history = RunHistory(7)
    earlier.save(2, "cnn4", {"weight": torch.ones(1)})
    cpu = torch.device("cpu")
    assert states(1).load(3, "cnn4", cpu) is not None
    with pytest.raises(StateError, match=r"was stored under fedproto .* in the study"):
        states(2).load(3, "cnn4", cpu)


def test_a_server_that_shows_each_site_a_few_others_gets_no_sum(
    hospitals: Hospitals, monkeypatch: Patch
) -> None:
    """Of eight sites in a study it names three to each other, whose own threshold would be three: six must stay."""
    keys = {f"site-{n}": in_text(Ed25519PrivateKey.generate().public_key()) for n in range(5)}
    sites = ",".join([hospitals.keys(*NAMES), *(f"{name}:{key}" for name, key in keys.items())])
    monkeypatch.setattr(server_secagg.SecureSum, "_needed", lambda self, sites: 3)
    config = signed(hospitals.config(secagg=True, min_clients=3, join_timeout=2.0), sites=sites)
    hospitals.ask_and_decide(config)
    with pytest.raises(FederationError):
        run_federation(config | {"run-name": "few"}, nodes=hospitals.nodes)
    assert all(row["void"] for row in hospitals.rows("few"))
    assert "fewer than 6" in str(hospitals.rows("few")[0])


GAUSSIAN = {"algo": "gaussian", "backbones": "glyphs"}


@pytest.mark.parametrize(("first", "second", "refused"), [
    ({}, {}, True),
    ({}, {"seed": 7, "lr": 0.02}, True),  # a setting may act on nothing
    ({}, {"algo": "fedavg"}, False),  # other uploads
    ({"algo": "fedper"}, {"algo": "protofed"}, True),  # the same weights, less a layer in the first
    ({"algo": "lg-fedavg"}, {"algo": "fedper"}, True),  # weights, whatever a row calls them
    ({"local_epochs": 0}, {"local_epochs": 0, "lr": 0.02}, True),
    ({"dp": "sample", "norm": "group"}, {"dp": "sample", "norm": "group"}, False),
    (GAUSSIAN, {**GAUSSIAN, "seed": 7, "gaussian__head": "qda"}, True),
    (GAUSSIAN, {"algo": "fedproto"}, True),  # shares of classes are numbers of samples
])  # fmt: skip
def test_no_difference_of_two_sums_is_an_upload(
    first: Any, second: Any, refused: bool, hospitals: Hospitals, monkeypatch: Patch
) -> None:
    """Four sites in a sum, then three of them, in the same round of whatever run that sends the same kind of upload."""
    monkeypatch.setitem(
        CATALOG["lg-fedavg"].exchange.up, "weights", Weights(parts=("head.",), meaning="a layer")
    )
    nodes = {number: node | {"approve": False} for number, node in hospitals.nodes.items()}
    nodes[4] = nodes[3] | {"site-name": "west", "state-dir": str(hospitals.state("west"))}
    shared = {"secagg": True, "num_clients": 4, "min_clients": 3}
    assert run_federation(hospitals.config(**shared | first), nodes=nodes).rows[0]["valid"] == 4
    del nodes[4]
    config = hospitals.config(**shared | second) | {"out-dir": str(hospitals.folder / "again")}
    with suppress(FederationError):  # where the final evaluation is refused, too
        run_federation(config | {"run-name": "three"}, nodes=nodes, run_id=6)
    row = RunFolder(hospitals.folder / "again" / "three").rows()[0]
    assert row["void"] == refused
    shown = "unmask: a sum that would show what west sent, beside an earlier one of other sites"
    shown += "; see Two sums over different clients in docs/secure-aggregation.md"
    assert row["failed"] == (dict.fromkeys(NAMES, shown) if refused else {})


# -- the audit log ----------------------------------------------------------------------------------------------------
def log_with(folder: Path, lines: int) -> Path:
    for number in range(lines):
        audit.append(folder, study="s", kind="train", round=number, sent={"report": 8}, sha256="0")
    return folder / audit.FILE


def wrong_in(path: Path) -> list[str]:
    return [problem for _, _, problem in audit.entries(path) if problem]


TAMPERINGS: dict[str, Callable[[list[str]], list[str]]] = {
    "a line deleted": lambda lines: lines[:2] + lines[3:],
    "two lines swapped": lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]],
    "a line edited": lambda lines: [
        *lines[:2],
        lines[2].replace('"round": 2', '"round": 9'),
        *lines[3:],
    ],
    "the first line deleted": lambda lines: lines[1:],
    "a line that is no JSON": lambda lines: [*lines[:2], "none\n", *lines[3:]],
}


@pytest.mark.parametrize("tampering", TAMPERINGS)
def test_a_log_that_somebody_changed_says_where(tampering: str, tmp_path: Path) -> None:
    path = log_with(tmp_path, 6)
    assert not wrong_in(path)
    path.write_text("".join(TAMPERINGS[tampering](path.read_text().splitlines(keepends=True))))
    assert wrong_in(path)


def test_what_was_cut_off_is_found_by_comparison_with_the_servers_run(hospitals: Hospitals) -> None:
    config = hospitals.config(rounds=2)
    hospitals.ask_and_decide(config)
    outcome = run_federation(config, nodes=hospitals.nodes)
    assert [set(row["audit"]) for row in outcome.rows] == 3 * [set(NAMES)]
    against = ("--against", str(outcome.folder))
    assert "nothing was compared" in hospitals.shown(
        "audit", "--against", str(outcome.folder.parent), status=1
    )
    shown = hospitals.shown("audit", *against)
    same = f"and all 3 that {outcome.folder} has seen are there"
    assert all(text in shown for text in (same, "fedproto train round 2: sent {", "approved by")), (
        shown
    )
    path = hospitals.consent("north") / audit.FILE
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert hospitals.operator("north", "audit") == 0
    (wrong,) = json.loads(hospitals.shown("audit", *against, "--json", status=1))["wrong"]
    assert wrong.startswith("round 2: the server has seen a line that the log lacks")


@pytest.mark.parametrize("line", ["5", "", "no JSON", '{"time": "2026"}', '{"round": 1'])
def test_whatever_lines_somebody_writes_the_command_says_what_is_wrong(
    line: str, hospitals: Hospitals
) -> None:
    log = log_with(hospitals.consent("north"), 2)
    log.write_text(f"{log.read_text()}{line}\n")
    for options in ((), ("--json",)):
        assert "line 3" in hospitals.shown("audit", *options, status=1)


@pytest.mark.parametrize("number", ["9" * 300_000, b"bytes", -1, 2.5, [1, 2]])
def test_what_a_message_says_of_its_round_does_not_break_the_log(
    number: Any, hospitals: Hospitals
) -> None:
    grid = LocalGrid(hospitals.config(seed=number), hospitals.nodes, run_id=5)
    content = RecordDict({"round": ConfigRecord({"round": number, "run_name": "x" * 300_000})})
    for _ in range(2):
        grid.push_messages([Message(content, 2, MessageType.TRAIN, group_id="1")])
    log = hospitals.consent("north") / audit.FILE
    assert (len(log.read_bytes().splitlines()), log.stat().st_size < 10_000, wrong_in(log)) == (
        2,
        True,
        [],
    )


def test_refusals_do_not_fill_the_log_and_what_it_lacks_stays(
    hospitals: Hospitals, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(audit, "MOST_REFUSALS", 2)
    (first, *later), alike = (
        (hospitals.config(seed=seed) for seed in range(3)),
        {"waiting for approval at north": 1},
    )
    many, most = (hospitals.config(rounds=rounds) for rounds in (3000, 5000))
    reasons = [
        hospitals.answer("north", each)
        for each in (*11 * [first], many, first | alike, most, most, *later)
    ]
    assert all(
        "waiting for approval at north: a run" in reason
        for reason in (*reasons[:11], *reasons[-2:])
    )
    assert "rounds = 3000" in reasons[11]
    assert all(
        "more than 2 refusals today; the log of the site says more" in reason
        for reason in reasons[12:-2]
    )
    assert not wrong_in(hospitals.consent("north") / audit.FILE)
    lines = hospitals.lines()
    assert [entry["times"] for entry in lines] == [1, 2, 4, 8, 1, 1, 2, 1, 1]
    assert {reason.removeprefix("site north: ") for reason in reasons} == {
        entry["refused"] for entry in lines
    }
    assert "(8 times that day)" in hospitals.shown("audit")
    monkeypatch.setattr(audit, "date", SimpleNamespace(today=lambda: TODAY + timedelta(days=1)))
    assert "rounds = 5000" in hospitals.answer("north", most)
    monkeypatch.setattr(
        audit, "datetime", SimpleNamespace(now=lambda: datetime(2000, 1, 1))
    )  # the clock goes back
    assert "rounds = 4000" in hospitals.answer("north", hospitals.config(rounds=4000))
    since = [hospitals.shown("audit", "--since", str(TODAY + timedelta(days))) for days in (0, 1)]
    assert ["rounds = 4000" in shown for shown in since] == [True, "rounds = 5000" not in since[1]]


def test_a_log_survives_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = log_with(tmp_path, 3)
    path.write_text(path.read_text() + '{"time": "2026')
    assert (
        "line 4 is no whole line of the log: cut short by a full disk or a kill"
        in wrong_in(path)[0]
    )
    audit.append(tmp_path, study="s", decision="approved")
    assert (wrong_in(path), len(path.read_text().splitlines())) == ([], 4)


def test_what_cannot_be_recorded_does_not_leave(hospitals: Hospitals, monkeypatch: Patch) -> None:
    config = hospitals.config()
    hospitals.ask_and_decide(config, "north")
    assert hospitals.answer("north", config) == ""

    def full(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(audit.FILE):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(audit.os, "fsync", full)
        assert "AuditError (state-dir): its audit log cannot be written" in hospitals.answer(
            "north", config
        )
    assert hospitals.capsys.readouterr().err.count("sent site") == 1
    assert hospitals.answer("north", config) == ""


def test_a_log_of_a_hundred_thousand_lines_is_read_line_by_line(tmp_path: Path) -> None:
    before, path = audit.START, tmp_path / audit.FILE
    with path.open("wb") as log:
        for number in range(100_000):
            line = json.dumps(
                {"study": "s", "round": number, "sent": {"report": 9}, "before": before}
            ).encode()
            log.write(line + b"\n")
            before = audit.hash_of(line)
    assert not wrong_in(path)
    assert audit.append(tmp_path, study="s") == [head for head, _, _ in audit.entries(path)][-1]
