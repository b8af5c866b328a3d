"""Studies: who may take part, which runs are approved, and what the audit log proves."""

import errno
import io
import json
import os
import re
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import replace
from datetime import date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict

import server_app.protections.secure_sum as server_secagg
from client_app.answers import ERROR_CODE
from client_app.site import audit, consent, hooks
from client_app.site.client import open_client
from client_app.site.record import StateError
from protofl_common.basics import code_version
from protofl_common.basics.run_history import RunHistory
from protofl_common.config.options import SettingsError
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.node import NodeConfig
from protofl_common.experiment.settings import Settings, digest_of
from protofl_common.experiment.study import Study, about_site, is_from_site, key_as_text
from protofl_common.privacy.masks import KEY, PUBLIC, text_to_sign
from protofl_common.runs.folder import HEADS, METRICS, RunFolder, heads_in
from protofl_common.tools.cli import main
from protofl_common.tools.site import approvals
from protofl_common.tools.ssh_key import private_key
from protofl_common.wire.records import (
    NEXT_SUM,
    SECAGG,
    SEEN,
    Instructions,
    pack_instructions,
    pack_settings,
)
from protofl_common.wire.refusal import Refusal, pack_refusal
from protofl_common.wire.schema import Weights
from server_app.network.membership import FederationError
from tests.support.attacks import by, failing, interrupted, when
from tests.support.commands import in_lines, in_one_line, output
from tests.support.harness import (
    RUN_ID,
    LocalGrid,
    reason_in,
    run_config,
    run_federation,
)
from tests.support.sites import EAST, JANE, NAMES, NORTH, SOUTH, Three, make_site_keys, signed

OWN = {
    "partition": "own",
    "image_size": 8,
    "num_clients": 3,
    "train_samples": 0,
    "models": "cnn4",
    "rounds": 1,
}
OPENED = []
"""Paths that this process has opened, by Python's own audit events; tests empty it."""
sys.addaudithook(lambda event, details: OPENED.append(str(details[0])) if event == "open" else None)
# such a hook cannot be removed again
TODAY = date.today()
YESTERDAY = str(TODAY - timedelta(days=1))
TOMORROW = str(TODAY + timedelta(days=1))
JANES = "SHA256:pYg5bp6PIZ6ZlFg5lb6kFY3WQZisoGTA7FSkeU5bgAo"
"""The key of `JANE`, as `ssh-keygen -l` prints it."""
WAITING = "waiting for approval"


class Hospitals(Three):
    """Three sites whose operators must approve each run; `north` is the one that is looked at."""

    def __init__(self, folder, capsys):
        super().__init__(folder)
        self.capsys = capsys
        self.nodes = {number: node | {"approve": True} for number, node in self.nodes.items()}

    @property
    def north(self):
        return self.nodes[NORTH]

    def config(self, **settings):
        return run_config(self.folder, **OWN | {"join_timeout": 1.0} | settings)

    def study(self, **settings):
        """A signed study of the three sites."""
        return signed(self.config(**settings), sites=self.keys(*NAMES))

    def federate(self, config, **options):
        return run_federation(config, nodes=self.nodes, **options)

    @staticmethod
    def node_of(site):
        """Return the number of a site's node: `EAST`, `NORTH` or `SOUTH`."""
        return NAMES.index(site) + 1

    def state(self, site):
        return self.folder / site / "state"

    def own_folder(self, site):
        """Return the folder of a site's key, its audit log, and the runs that it was asked for."""
        return self.state(site) / "sites" / site

    def request(self, config):
        """Return the file in which north notes a run that asks to be approved."""
        return self.own_folder("north") / "studies" / f"{Study.of(config).id}.json"

    def log(self):
        return self.own_folder("north") / audit.FILE

    def lines(self):
        """Return the entries of north's audit log."""
        return [entry for _, entry, _ in audit.entries(self.log())]

    def rows(self, run):
        return RunFolder(self.folder / "runs" / run).rows()

    def keys(self, *sites):
        return make_site_keys(**{site: self.own_folder(site) for site in sites})

    def site_command(self, words, status=0, site="north"):
        """Run ``protofl site`` with these words at a site; return what it prints, or its error.

        It must end with this status.
        """
        node_config = in_one_line(self.nodes[self.node_of(site)])
        self.capsys.readouterr()
        assert main(["site", *words.split(), "--node-config", node_config]) == status
        printed = self.capsys.readouterr()
        return printed.out or printed.err

    def decide(self, config, *sites, words="approve"):
        """Let the operators of these sites, or of all, decide about a run that has asked.

        ``words`` are the command (``approve`` or ``deny``) and its options. Return what it prints.
        """
        command, _, options = words.partition(" ")
        words = f"{command} {Study.of(config).id} {options}"
        return "".join(self.site_command(words, site=site) for site in sites or NAMES)

    def ask_and_decide(self, config, *sites, words="approve"):
        """Let these sites, or all, hear of a run, and let their operators decide about it."""
        for site in sites or NAMES:
            self.ask(config, site=site)
        return self.decide(config, *sites, words=words)

    def refusal_when_asked(self, config, run_id=5, digest="", site="north"):
        """Return the reason why a site refuses to introduce itself to a run, or ""; see `ask`."""
        return reason_in(self.ask(config, run_id, digest, site))

    def ask(self, config, run_id=5, digest="", site="north"):
        """Ask a site to introduce itself to a run, which it notes; return its reply.

        ``digest`` is that of a server whose default settings differ from the site's.
        """
        content = RecordDict({**pack_settings(digest or digest_of(config))})
        # the grid comes before the message, which is of its Flower run
        grid = LocalGrid(config, self.nodes, run_id=run_id)
        question = Message(content, self.node_of(site), MessageType.QUERY, group_id="0")
        return grid.ask(question)


def clients_of(outcome):
    return set(outcome.summary["clients"])


def trained_nodes(outcome):
    return {message.metadata.dst_node_id for message, _ in outcome.exchanged()}


def images_opened():
    return sum(path.endswith(".png") for path in OPENED)


@pytest.fixture
def hospitals(tmp_path, capsys):
    return Hospitals(tmp_path, capsys)


# -- consent ---------------------------------------------------------------------------------------
def test_a_run_that_nobody_has_approved_opens_no_file_and_then_takes_part(hospitals):
    """While it waits for approval no image is read; once approved it and its baseline train.

    A line of the log about a baseline names the baseline.
    """
    config = hospitals.config(baselines="local", min_clients=3)
    run = f"a run without a study ({Study.of(config).id})"

    OPENED.clear()
    with pytest.raises(FederationError) as refusal:
        hospitals.federate(config)
    assert images_opened() == 0
    assert any("/north/studies/" in path for path in OPENED)
    for site in NAMES:
        assert f"{WAITING} at {site}: {run}" in str(refusal.value)

    shown = hospitals.site_command("requests")
    assert "WAITS since" in shown
    assert "nobody has signed it" in shown
    assert "with       any sites" in shown
    assert "maybe of one sample" in shown
    assert "leaves     FedProto: in each round " in shown
    assert "    setting    partition=own\n" in shown
    assert f"\nin {hospitals.own_folder('north')}\n" in shown

    hospitals.decide(config)
    outcome = hospitals.federate(config, run_id=2)

    assert images_opened() >= 3 * 8  # eight at each of three sites
    assert clients_of(outcome) == set(NAMES)

    algos = [line["algo"] for line in hospitals.lines() if line.get("kind") == "train"]
    assert algos == ["fedproto", "local"]


def test_the_server_asks_again_until_an_operator_has_approved(hospitals, monkeypatch):
    """All three sites approve after the server's 12th question; it says once for whom it waits."""
    monkeypatch.setattr("server_app.network.membership.APPROVAL_POLL_SECONDS", 0.2)
    config = hospitals.config(join_timeout=60.0)
    questions = []

    def approve_after_twelve(message, reply):
        questions.append(time.monotonic())
        if len(questions) == 12:  # without a command, which would print
            for node in hospitals.nodes.values():
                approvals.decide(node, Study.of(config).id, "approved", key_file=None)
        return reply

    outcome = hospitals.federate(config, tamper=approve_after_twelve)

    assert clients_of(outcome) == set(NAMES)

    server, sites = hospitals.capsys.readouterr()
    assert server.count(f"{WAITING} at north") == 1

    # north was asked four times; a repeated refusal is logged at its times 1, 2, 4 …
    levels = re.findall(r"(\S+) protofl: .* waiting for approval at north", sites)
    assert levels == ["INFO"] * 3  # and so of four three times


def test_a_denial_in_round_three_acts_at_once_and_the_others_go_on(hospitals):
    """A resumed run waits for a site that has not decided yet, and for none that denies."""
    config = hospitals.config(rounds=4, run_name="mine", num_clients=2)
    hospitals.ask_and_decide(config)
    denied = f"denied at south: a run without a study ({Study.of(config).id})"

    def south_denies(message, reply):
        hospitals.decide(config, "south", words="deny")
        return reply

    outcome = hospitals.federate(config, tamper=when(south_denies, node=SOUTH, number=2))
    # south denies once it has answered round 2: rounds 3 and 4 and the final evaluation lack it
    assert outcome.per_row("valid") == [3, 3, 2, 2, 2]
    errors_of_south = [row["failed"].get("south") for row in outcome.rows]
    assert errors_of_south == [None, None, denied, denied, denied]

    request = hospitals.own_folder("south") / "studies" / hospitals.request(config).name
    for run_id, decision in ((2, ""), (3, "denied")):
        consent.write(request, replace(consent.read(request), decision=decision))
        (outcome.folder / "summary.json").unlink()
        hospitals.federate(config | {"resume": True}, run_id=run_id)
        printed = hospitals.capsys.readouterr().out
        waited = "going on without south: not there after join-timeout" in printed
        assert waited == (decision == "")

    # without approve a site asks its operator about no run, but this one has been denied
    hospitals.nodes[SOUTH]["approve"] = False
    assert denied in hospitals.refusal_when_asked(config, site="south")
    assert hospitals.refusal_when_asked(config | {"lr": 0.02}, site="south") == ""


def upgrade(monkeypatch, code, release="0.0.0"):
    """Let a site be started again with other code: that of the process, and that on the disk."""
    monkeypatch.setattr(consent, "CODE", code)
    monkeypatch.setattr(consent, "RELEASE", release)
    on_disk = SimpleNamespace(__wrapped__=lambda: code)  # the function without its cache
    monkeypatch.setattr(consent, "code_version_at_site", on_disk)


def test_new_settings_and_new_code_are_asked_for_anew(hospitals, tmp_path, monkeypatch):
    """An approval holds for the run's settings, but for its name, and for the code of the site.

    A process whose code has changed on the disk since its start must be started again.
    """
    config = hospitals.config()
    hospitals.ask_and_decide(config, "north")

    assert hospitals.refusal_when_asked(config) == ""
    assert hospitals.refusal_when_asked(config | {"run-name": "another", "resume": True}) == ""
    assert WAITING in hospitals.refusal_when_asked(config | {"lr": 0.02})
    assert WAITING in hospitals.refusal_when_asked(config | {"metrics": "auc"})

    # the code of this process is not the approved one: what is on the disk has changed …
    monkeypatch.setattr(consent, "CODE", "upgraded")
    stale = "changed since its start; its operator must stop protofl site run"

    assert stale in hospitals.refusal_when_asked(config)
    assert consent.read(hospitals.request(config)).decision == "approved"

    # … or is the same
    upgrade(monkeypatch, "upgraded")
    assert f"protofl site approve {Study.of(config).id}" in hospitals.refusal_when_asked(config)

    hospitals.decide(config, "north")
    assert hospitals.refusal_when_asked(config) == ""


def test_a_change_at_the_server_asks_nobody(tmp_path, monkeypatch):
    """The server's half and the report do not run at a site; all else is code of the site."""
    only_at_server = ("server_app/a", "protofl_common/report/a")
    at_sites = ("protofl_common/a", "client_app/a")
    files = only_at_server + at_sites
    versions = {}
    for changed in ("nothing", *files):
        for file in files:
            path = tmp_path / f"{file}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{file} {file == changed}")
        monkeypatch.setattr(code_version, "ROOT", tmp_path)
        versions[changed] = code_version.code_version_at_site.__wrapped__()

    for file in only_at_server:
        assert versions[file] == versions["nothing"]
    assert len({versions["nothing"], *(versions[file] for file in at_sites)}) == 3


@pytest.mark.parametrize("options", ["", " --code patch"], ids=["exact", "patch"])
def test_an_approval_may_cover_later_patch_releases(options, hospitals, monkeypatch):
    """Release 0.1.3 is approved: with ``--code patch`` its later patches are, too."""
    monkeypatch.setattr(consent, "RELEASE", "0.1.3")
    monkeypatch.setattr(approvals, "RELEASE", "0.1.3")
    config = hospitals.config()
    hospitals.ask_and_decide(config, "north", words=f"approve{options}")
    approved = consent.read(hospitals.request(config))

    def waits(code, release):
        upgrade(monkeypatch, code, release)
        return WAITING in hospitals.refusal_when_asked(config)

    if not options:
        assert waits("hotfix", "0.1.4")
        return

    for _ in range(2):
        assert not waits("hotfix", "0.1.4")

    log = (hospitals.own_folder("north") / "audit.jsonl").read_text()
    assert log.count('"decision": "covered"') == 1

    covered = consent.read(hospitals.request(config))
    for code, release in [
        ("edited", "0.1.4"),  # other code under the release that took part last
        ("another", "0.1.3"),
        ("another", "0.1.2"),
        ("another", "0.2.4"),
        ("another", "0.1.5rc1"),
        ("another", ""),
    ]:
        assert waits(code, release), (code, release)
        consent.write(hospitals.request(config), covered)

    assert not waits("another", "0.1.5")

    # the same approval without --code patch
    consent.write(hospitals.request(config), replace(approved, later=""))
    assert waits("hotfix", "0.1.4")


def test_who_decides_about_other_code_than_the_process_has_approves_nothing(hospitals, monkeypatch):
    """The program of ``on-request`` runs the code on the disk, which was pulled since the start."""
    config = hospitals.config()

    def decides(*_):
        with monkeypatch.context() as on_disk:
            upgrade(on_disk, "pulled")
            hospitals.decide(config, "north")

    monkeypatch.setattr(consent, "tell_of_request", decides)
    assert WAITING in hospitals.refusal_when_asked(config)


def write_program(folder, script):
    """Write a shell script that can be executed, and return its path."""
    file = folder / "tell me; exit"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o700)
    return str(file)


def test_an_operator_hears_of_a_request_once_and_again_after_an_upgrade(
    hospitals, tmp_path, monkeypatch
):
    """The program gets the id alone, whatever a run's settings have; no shell reads it."""
    told = tmp_path / "told"
    hospitals.north["on-request"] = write_program(tmp_path, f'echo "$#" "$@" >> {told}')
    config = hospitals.config(study_purpose="$(reboot); `reboot`")

    for _ in range(3):
        assert WAITING in hospitals.refusal_when_asked(config)

    line = f"1 {Study.of(config).id}\n"  # the number of arguments, and the only one
    assert told.read_text() == line

    hospitals.decide(config, "north")
    assert hospitals.refusal_when_asked(config) == ""

    upgrade(monkeypatch, "upgraded")
    assert WAITING in hospitals.refusal_when_asked(config)
    assert told.read_text() == 2 * line


def test_an_operator_hears_of_a_refusal_once_a_day(hospitals, tmp_path, monkeypatch):
    """The program of on-trouble gets the word ``refused``, however many runs are refused."""
    told = tmp_path / "told"
    hospitals.north["on-trouble"] = write_program(tmp_path, f'echo "$@" >> {told}')

    # a run that waits for approval is no refusal
    assert WAITING in hospitals.refusal_when_asked(hospitals.config(lr=0.1))
    assert not told.exists()

    for lr in (0.1, 0.2):
        hospitals.ask_and_decide(hospitals.config(lr=lr), "north", words="deny")
        assert "denied at north" in hospitals.refusal_when_asked(hospitals.config(lr=lr))
        assert told.read_text() == "refused\n"

    # the last was on another day
    (hospitals.own_folder("north") / hooks.FILE).write_text('{"refused": "2026-11-22"}')
    assert "denied at north" in hospitals.refusal_when_asked(hospitals.config(lr=0.1))
    assert told.read_text() == 2 * "refused\n"

    # where the day cannot be written, a server decides how often a message is refused
    (hospitals.own_folder("north") / hooks.FILE).write_text("[]")
    assert "denied at north" in hospitals.refusal_when_asked(hospitals.config(lr=0.1))
    assert told.read_text() == 2 * "refused\n"

    # an approval whose only run has begun is a refusal once another run asks
    (hospitals.own_folder("north") / hooks.FILE).unlink()
    config = hospitals.config(lr=0.3)
    hospitals.ask_and_decide(config, words="approve --runs 1")
    hospitals.federate(config, run_id=1)
    assert told.read_text() == 2 * "refused\n"
    assert WAITING in hospitals.refusal_when_asked(config, run_id=2)
    assert told.read_text() == 3 * "refused\n"

    # another kind of trouble is told on the same day
    hooks.tell_of_trouble(hospitals.north, hooks.DISK)
    assert told.read_text() == 3 * "refused\n" + "disk\n"


@pytest.mark.parametrize("script", ["", "exit 3", "sleep 60"])
def test_an_operator_who_cannot_be_told_is_waited_for_all_the_same(
    script, hospitals, tmp_path, monkeypatch
):
    """The program of on-request fails, as the log says; the request waits and can be approved.

    Without a ``script`` there is no such program.
    """
    monkeypatch.setattr(hooks, "HOOK_SECONDS", 0.3)
    on_request = write_program(tmp_path, script) if script else str(tmp_path / "tell")
    hospitals.north["on-request"] = on_request
    config = hospitals.config()

    assert WAITING in hospitals.refusal_when_asked(config)
    assert f"ERROR protofl: on-request = '{on_request}': " in hospitals.capsys.readouterr().err

    hospitals.decide(config, "north")
    assert hospitals.refusal_when_asked(config) == ""


def test_new_code_of_a_package_is_asked_for_anew(hospitals, tmp_path, monkeypatch):
    """A run names a metric of a package; a line more in it makes the approval void."""
    package = tmp_path / "ours_of_studies.py"
    package.write_text("def brier(scores, labels):\n    return 0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    hospitals.north["allow-python"] = package.stem
    config = hospitals.config(metrics=f"{package.stem}:brier")

    for version in ("first", "second"):
        sys.modules.pop(package.stem, None)  # a site answers each message in a process of its own
        with package.open("a") as code:
            code.write(f"# the {version}\n")
        assert WAITING in hospitals.refusal_when_asked(config)
        hospitals.decide(config, "north")
        assert hospitals.refusal_when_asked(config) == ""


def test_an_approval_ends_with_its_runs_and_its_days(hospitals, monkeypatch):
    """North approves one Flower run until today, then a second run; after the day it is over."""
    monkeypatch.setattr(consent, "MOST_INTRODUCTIONS", 3)
    config = hospitals.config()
    study = Study.of(config).id
    for site in NAMES:
        hospitals.ask(config, site=site)

    unknown = hospitals.site_command(f"approve {'0' * 32}", status=1)
    assert f"no such request; choose from {study}" in unknown
    hospitals.site_command(f"approve {study} --until {YESTERDAY}", status=1)

    said = hospitals.decide(config, words=f"approve --runs 1 --until {TODAY}")
    assert (
        f", until {TODAY}; 0 of 1 runs so far; in {hospitals.own_folder('north')}/studies" in said
    )

    # a run that only asks does not count
    assert hospitals.refusal_when_asked(config, run_id=1) == ""
    assert clients_of(hospitals.federate(config, run_id=2)) == set(NAMES)
    assert hospitals.refusal_when_asked(config, run_id=2) == ""

    too_many = "north has had 3 introductions of a run without a study"
    assert too_many in hospitals.refusal_when_asked(config, run_id=2)

    another_run = hospitals.refusal_when_asked(config, run_id=3)
    assert WAITING in another_run  # so the server asks again
    assert "so far (1) have begun, and resumed ones count" in another_run
    assert another_run.endswith(f"protofl site approve {study} --runs 2")

    hospitals.decide(config, "north", words="approve --runs 2")
    assert hospitals.refusal_when_asked(config, run_id=3) == ""

    request = hospitals.request(config)
    consent.write(request, replace(consent.read(request), until=YESTERDAY))

    over = hospitals.refusal_when_asked(config, run_id=2)
    assert WAITING in over  # so the server asks again
    assert f"the approval ended on {YESTERDAY}; its operator runs protofl site approve" in over


def test_an_approval_of_fewer_runs_than_have_begun_is_refused(hospitals):
    """Such an approval would cover no further run, and stop the one that is under way."""
    config = hospitals.config()
    study = Study.of(config).id
    hospitals.ask_and_decide(config, words="approve --runs 2")
    for run_id in (1, 2):
        shutil.rmtree(hospitals.federate(config, run_id=run_id).folder)

    said = hospitals.site_command(f"approve {study} --runs 1", status=1)
    assert "--runs 1: 2 runs of a run without a study" in said
    assert "give 2 for these alone, 3 for one more" in said
    assert hospitals.refusal_when_asked(config, run_id=2) == "", "the former approval is as it was"
    hospitals.site_command(f"approve {study} --runs 2")


@pytest.mark.parametrize(
    ("options", "runs"), [(" --runs 1", 1), ("", 3)], ids=["one run", "any number"]
)
def test_a_server_asks_no_more_than_it_needs(options, runs, hospitals, monkeypatch):
    """A site answers a limited number of messages of an approved run, as each costs a log line.

    Whether the server calls its messages one run's or many's makes no difference.
    """
    monkeypatch.setattr(consent, "MOST_RUNS", 3)
    exchanges = 2 * (2 + 1)  # two rounds and the final evaluation, of the run and of its baseline
    limit_of_a_run = consent.MOST_MESSAGES * exchanges
    limit = runs * limit_of_a_run
    # an honest run with all that needs messages
    config = hospitals.config(
        secagg=True, rounds=2, baselines="fedavg", keep_best=True, min_clients=3
    )
    hospitals.ask_and_decide(config, words=f"approve{options}")
    outcome = hospitals.federate(config)

    assert outcome.summary["rounds"] == 2

    to_north = [sent for sent, _ in outcome.grid.log if sent.metadata.dst_node_id == NORTH]
    request = hospitals.request(config)
    honest = consent.read(request).messages

    # the questions for an introduction, of the run and of its baseline, are counted apart
    assert len(to_north) == honest + 2
    assert honest < limit_of_a_run / 2

    last_of_kind = {sent.metadata.message_type: sent for sent in to_north}
    kinds = ("query.best", "query.advertise", MessageType.TRAIN)
    reasons = []
    for number in range(limit + 20):
        message = last_of_kind[kinds[number % 3]]
        run_id = RUN_ID
        if runs > 1:  # two messages of each run
            run_id += number // 2
        message.content.config_records["round"]["run_history"] = str(run_id)
        grid = LocalGrid(config, hospitals.nodes, run_id=run_id)
        reasons.append(reason_in(grid.ask(message)))

    study = f"a run without a study ({Study.of(config).id})"
    refusal = f"north has had {limit} messages of {study}, more than an honest"
    answered = reasons[: limit - honest]

    assert "" in answered
    assert not any(reason.startswith(refusal) for reason in answered)
    assert all(reason.startswith(refusal) for reason in reasons[len(answered) :])
    assert consent.read(request).messages == limit
    assert len(consent.read(request).run_ids) <= limit

    # a refusal that repeats is logged at its times 1, 2, 4, 8 …
    entry = f"{refusal} server needs; its operator may approve it again, times 8"
    assert entry in hospitals.site_command("audit")

    hospitals.decide(config, "north", words=f"approve{options}")
    assert not grid.ask(last_of_kind["query.best"]).has_error()


def test_an_approval_bounds_how_often_figures_are_computed(hospitals):
    """Figures that are rounded (min-class-samples) would else tell more in each evaluation.

    A run that plans more evaluations is refused before it begins.
    """
    hospitals.nodes[NORTH] |= {"min-class-samples": 2, "max-evaluations": 5}
    too_many = "evaluate-every = 1: 6 evaluations in 5 rounds; with min-class-samples this site"

    assert f"{too_many} makes at most 5" in hospitals.refusal_when_asked(hospitals.config(rounds=5))
    assert WAITING in hospitals.refusal_when_asked(hospitals.config(rounds=5, evaluate_every=2))

    config = hospitals.config(rounds=2)
    hospitals.ask_and_decide(config)
    failed = []
    for run_id in (1, 2):
        outcome = hospitals.federate(config, run_id=run_id)
        failed += [row["failed"].get("north", "") for row in outcome.rows]
        shutil.rmtree(outcome.folder)
    *first_five, sixth = failed  # each run evaluates in two rounds and at the end

    assert first_five == 5 * [""]
    assert "north has evaluated 5 times for a run without a study" in sixth
    assert consent.read(hospitals.request(config)).evaluations == 5

    hospitals.decide(config, "north")
    assert consent.read(hospitals.request(config)).evaluations == 0


def test_a_final_evaluation_alone_counts_as_a_run(hospitals):
    """A server could else ask for many, with weights of its choice, in runs that train nothing."""
    config = hospitals.config()
    hospitals.ask_and_decide(config, words="approve --runs 2")
    outcome = hospitals.federate(config)
    (final, _reply), *_to_others = outcome.exchanged(MessageType.EVALUATE)

    reasons = []
    for run_id in (RUN_ID + 1, RUN_ID + 2):
        final.content.config_records["round"]["run_history"] = str(run_id)
        reply = LocalGrid(config, hospitals.nodes, run_id=run_id).ask(final)
        reasons.append(reason_in(reply))

    of_second_run, of_third_run = reasons
    assert of_second_run == ""
    assert "all runs approved so far (2) have begun" in of_third_run


def test_no_approval_goes_beyond_the_runs_of_a_study(hospitals):
    """The study says one run, its operators approve two: the second is refused for good."""
    config = signed(hospitals.config(study_runs=1))
    hospitals.ask_and_decide(config, words="approve --runs 2")
    hospitals.federate(config, run_id=1)

    another_run = hospitals.refusal_when_asked(config, run_id=2)
    assert "north takes part in 1 runs of study " in another_run
    assert WAITING not in another_run


def test_what_holds_of_an_approval_is_said_recorded_and_listed_for_programs(hospitals):
    """The study's limits hold where the operator's are wider."""
    purpose = "which valves leak"
    limits = {"until": TOMORROW, "runs": 2}
    config = signed(hospitals.config(study_runs=2), until=TOMORROW, purpose=purpose)
    hospitals.north["min-class-samples"] = 2
    wide = "approve --runs 9 --until 2099-01-01"
    said = hospitals.ask_and_decide(config, "north", words=wide)

    assert f", until {TOMORROW}; 0 of 2 runs so far; in " in said

    *_, entry = hospitals.lines()
    assert entry.items() >= {**limits, "decision": "approved", "purpose": purpose}.items()
    assert entry["signed"] == config["study-by"]
    assert entry["demands"] == {"min-class-samples": 2}

    shown = hospitals.site_command("audit")
    assert f", code {entry['code']}, release {entry['release']}, " in shown
    assert f", signed {config['study-by']}, purpose which valves" in shown
    assert ", demands {'min-class-samples': 2}" in shown

    content = json.loads(hospitals.site_command("requests --json"))
    (row,) = content["requests"]
    decided = {"id": Study.of(config).id, "decision": "approved", "run_ids": []}

    assert row.items() >= {**limits, **decided}.items()
    assert content["unread"] == 0
    assert row["settings"]["study-purpose"] == purpose

    asks = "\n".join(row["asks"])
    assert purpose in asks
    assert "losses" not in asks
    assert "seconds" in asks


def test_a_run_with_noise_asks_for_no_losses_and_no_seconds(hospitals):
    hospitals.ask(hospitals.config(dp="sample", norm="group"))

    (private,) = json.loads(hospitals.site_command("requests --json"))["requests"]

    assert not re.search("losses|seconds", "\n".join(private["asks"]))


def test_a_study_whose_sites_have_all_answered_does_not_wait(hospitals, monkeypatch):
    """South has denied, so nobody is left to wait for in the five minutes of join-timeout."""
    pauses = []
    monkeypatch.setattr("server_app.network.membership.time.sleep", pauses.append)
    config = hospitals.study(join_timeout=300.0, num_clients=0)
    hospitals.ask_and_decide(config, "east", "north")
    hospitals.ask_and_decide(config, "south", words="deny")

    outcome = hospitals.federate(config)

    assert clients_of(outcome) == {"east", "north"}
    assert sum(pauses) < 30  # seconds, a tenth of join-timeout


def test_no_stranger_ends_the_wait_for_a_site(hospitals, monkeypatch):
    """South is away at first; four strangers say in its name that it comes not, or is there."""
    config = hospitals.study(num_clients=0)
    nodes = hospitals.nodes
    hospitals.ask_and_decide(config)
    south = nodes.pop(SOUTH)
    for stranger in (8, 9, 10, 11):
        nodes[stranger] = nodes[EAST]

    def bring_south_back(seconds):
        nodes[SOUTH] = south

    def unsigned_card(message, reply):
        card = ConfigRecord({"name": "south"})
        return Message(RecordDict({"site": card}), reply_to=message)

    unsigned = Refusal("denied at south", site="south")
    of_another_key = replace(unsigned, signature=JANE.sign(b"south").hex())
    denials = {
        9: failing(ERROR_CODE, pack_refusal(unsigned)),
        10: failing(ERROR_CODE, pack_refusal(of_another_key)),
        11: failing(ERROR_CODE, "site south: denied at south"),
    }
    monkeypatch.setattr("server_app.network.membership.time.sleep", bring_south_back)
    tamper = by({8: unsigned_card, **denials}, "query")
    outcome = hospitals.federate(config, tamper=tamper)

    assert trained_nodes(outcome) == {EAST, NORTH, SOUTH}

    said = hospitals.capsys.readouterr().out
    assert "2 clients cannot take part: site south, not signed with its key: denied at" in said
    assert "1 client cannot take part: site south: denied at south" in said


def test_an_approval_for_what_the_site_refuses_and_a_changed_file_are_none(hospitals):
    """The operator's limits hold for approved runs; a request that somebody edited is not read."""
    config = hospitals.config(baselines="local")
    hospitals.ask(config)
    hospitals.nodes[NORTH] |= {"max-rounds": 1, "allow-algorithms": "fedproto"}
    refused = "refuses a baseline: baselines = 'local': algo = 'local': not allowed"

    assert refused in hospitals.site_command("requests")
    assert "this site takes at most 1" in hospitals.refusal_when_asked(hospitals.config(rounds=2))

    hospitals.decide(config, "north")
    request = hospitals.request(config)
    content = json.loads(request.read_text())
    content["settings"]["lr"] = 1.0
    request.write_text(json.dumps(content))

    assert "this request of a run cannot be read" in hospitals.refusal_when_asked(config)

    request.unlink()
    request.mkdir()

    assert "StateError (state-dir): its state" in hospitals.refusal_when_asked(config)


def test_requests_cannot_fill_a_disk_nor_come_of_other_defaults(hospitals, monkeypatch):
    """A site keeps a limited number of requests without a signer, and as many of each signer.

    So requests of one do not keep out those of others.
    """

    def signed_by(name, seed):
        """Return a run's settings, signed under this name, or by nobody if it is ""."""
        config = hospitals.config(seed=seed)
        if not name:
            return config
        return signed(config, by=f"{name}:{key_as_text(JANE.public_key())}")

    studies = hospitals.own_folder("north") / "studies"
    assert "'8584f680', and '" in hospitals.refusal_when_asked(
        hospitals.config(), digest="8584f680"
    )
    assert not [*studies.glob("*.json")]

    large = signed(hospitals.config(), purpose="x" * 100_000)
    assert "more than 65536, for an operator to read" in hospitals.refusal_when_asked(large)
    # a signature does not cover itself
    padded = signed(hospitals.config())
    padded["study-signature"] += 100_000 * " "
    assert "study-signature: not jane:" in hospitals.refusal_when_asked(padded)
    assert not [*studies.glob("*.json")]

    monkeypatch.setattr(consent, "MOST_REQUESTS", 2)
    hospitals.ask_and_decide(signed_by("jane", seed=0), "north")
    for signer in ("", "joan", "jane"):
        for seed in (1, 2):
            assert WAITING in hospitals.refusal_when_asked(signed_by(signer, seed))
        third = hospitals.refusal_when_asked(signed_by(signer, seed=3))
        assert "2 requests of other runs wait" in third

    assert len([*studies.glob("*.json")]) == 1 + 3 * 2  # one approved, and two of each waiting


def test_a_site_with_data_of_its_own_asks_its_operator_unless_told():
    own = {"site-name": "north", "data-dir": "scans", "dataset": "image-folder"}
    share = {"site-name": "north", "partition-id": 0, "num-partitions": 3}

    assert NodeConfig.of(own).approves
    assert not NodeConfig.of(own | {"approve": False}).approves
    assert not NodeConfig.of(share).approves
    assert NodeConfig.of(share | {"approve": True}).approves
    with pytest.raises(SettingsError, match="approve = 1 must be true or false"):
        NodeConfig.of(own | {"approve": 1})


def test_nothing_hides_behind_a_long_value_and_a_new_key_is_said(hospitals, monkeypatch):
    """Line breaks in a purpose of 2,000 letters, or in a package's row, forge no line."""
    weights = Weights(meaning="little\nprotected  all")
    monkeypatch.setitem(CATALOG["lg-fedavg"].exchange.up, "weights", weights)
    config = hospitals.config(metrics="auc", baselines="lg-fedavg")
    config = signed(config, purpose="x" * 2000, sites=hospitals.keys(*NAMES))

    hospitals.ask(config)
    lines = (
        "that key is new to this site\n(.*\n)*"
        ".*: in each round little; protected  all\n(.*\n)*"
        "    setting    metrics=auc\n"
    )

    assert re.search(lines, hospitals.site_command("requests"))

    hospitals.decide(config, "north")
    hospitals.ask(hospitals.study(metrics="auc", lr=0.5))

    assert "that key has signed what was approved here" in hospitals.site_command("requests")


def test_a_bad_file_hides_no_other_request(hospitals):
    """One of two requests cannot be read; the other is shown in full, and can be denied."""
    config = hospitals.config(baselines="fedper", fedper__personal_layers=0)
    hospitals.ask(config)
    (hospitals.own_folder("north") / "studies" / "bad.json").write_text("{")

    shown = hospitals.site_command("requests")
    assert "1 files in" in shown
    assert "leaves     FedPer: in each round all weights of the model\n" in shown
    assert "    setting    fedper.personal-layers=0\n" in shown

    hospitals.decide(config, "north", words="deny")
    assert "denied at north" in hospitals.refusal_when_asked(config)


# -- a study ---------------------------------------------------------------------------------------
def test_a_study_of_two_opens_no_file_at_the_third_or_of_another_key(hospitals, tmp_path):
    """A site that the study does not name, or names with another key, takes no part."""
    config = signed(hospitals.config(num_clients=0), sites=hospitals.keys("east", "north"))
    hospitals.ask_and_decide(config, "east", "north")
    OPENED.clear()

    assert clients_of(hospitals.federate(config)) == {"east", "north"}
    assert images_opened() > 0
    assert not [path for path in OPENED if "/south/data" in path]
    assert "does not name south" in hospitals.refusal_when_asked(config, site="south")

    file = tmp_path / "heart.toml"
    file.write_text(in_lines(config))
    said = hospitals.site_command(f"approve {file}", status=1, site="south")
    assert "does not name south" in said

    souths_key_for_east = hospitals.keys("north", "south").replace("south:", "east:")
    config = signed(hospitals.config(), sites=souths_key_for_east)
    OPENED.clear()

    assert "does not name east, or names another key of it" in hospitals.refusal_when_asked(
        config, site="east"
    )
    assert_refused_before_anybody_asks(hospitals, config, "or names another key of it", "east")
    assert not [path for path in OPENED if "/east/data" in path]
    assert WAITING in hospitals.refusal_when_asked(config)


def test_a_study_ends_on_its_last_day(hospitals):
    """After it server and site refuse; on the day itself the study waits for approval."""
    config = signed(hospitals.config(), until=YESTERDAY)
    with pytest.raises(SettingsError, match="the study is over"):
        hospitals.federate(config)
    assert "ended on" in hospitals.refusal_when_asked(config)
    assert_refused_before_anybody_asks(hospitals, config, f"ended on {YESTERDAY}", "north")

    config = signed(hospitals.config(), until=str(TODAY))
    assert WAITING in hospitals.refusal_when_asked(config)


@pytest.mark.parametrize("protection", [
    {}, {"secagg": True}, {"dp": "sample", "dp_epsilon": 4.0, "norm": "group"},
], ids=["open", "secagg", "dp"])  # fmt: skip
def test_a_run_goes_on_in_an_extension_of_its_study(protection, hospitals):
    """The run is interrupted in round 3 of 4, and its study is signed again with a later day."""

    def in_study(until, runs):
        config = hospitals.config(
            rounds=4, run_name="mine", min_clients=3, study_runs=runs, **protection
        )
        return signed(config, sites=hospitals.keys(*NAMES), until=until)

    begun = in_study(str(TODAY), runs=1)
    hospitals.ask_and_decide(begun)
    with pytest.raises(KeyboardInterrupt):
        hospitals.federate(begun, tamper=when(interrupted, "train", number=3), run_id=1)

    extension = in_study(TOMORROW, runs=2)
    hospitals.ask_and_decide(extension)
    outcome = hospitals.federate(extension | {"resume": True}, run_id=2)

    # under dp the round that was begun twice has cost twice, and the last round is left out
    last = 3 if protection.get("dp") else 4
    assert outcome.per_row("round") == [*range(1, last + 1), last]
    assert all(row["valid"] == 3 and not row["failed"] for row in outcome.rows)


def assert_refused_before_anybody_asks(hospitals, config, why, site):
    """The check and the approval of a study's file, and the list of requests, say ``why``.

    The study may still be denied.
    """
    file = hospitals.folder / "refused.toml"
    file.write_text(in_lines(config))

    for command, status in (("check", 1), ("approve", 1), ("deny", 0)):
        said = hospitals.site_command(f"{command} {file}", status, site)
        assert (why in said) is (status == 1)

    assert re.search(
        f"this site refuses it: .*{why}", hospitals.site_command("requests", site=site)
    )


TWO_SIGNERS = f"jane:{'A' * 43}, mallory:{'B' * 43}"
ONE_KEY = f"east:{'A' * 43}, ost:{'A' * 42}B"
"""A key in two spellings: two bits of the last letter do not count."""


@pytest.mark.parametrize(("wrong", "text"), [
    ({"study-sites": "north:x"}, "study-sites: 'north:x' must be NAME:KEY"),
    ({"study-sites": ONE_KEY}, "study-sites: east, ost have the same key"),
    ({"study-until": "soon"}, "study-until = 'soon': must be a day"),
    ({"study": "a/b"}, "study = 'a/b': must be made of"),
    ({"study-by": "jane"}, "study-by: 'jane' must be NAME:KEY"),
    ({"study-by": TWO_SIGNERS}, "study-by: 'jane:A+, mallory:B+' must be NAME:KEY"),
    ({"study": ""}, "only with a study"),
    ({"study-signature": ""}, "not signed; protofl study sign"),
    ({"study-signature": "00" * 64}, "study-signature: not jane:"),
    ({"study-signature": "no hex"}, "study-signature: not jane:"),
    ({"lr": 0.5}, "study-signature: not jane:"),
    ({"study-runs": 9}, "study-signature: not jane:"),
])  # fmt: skip
def test_a_wrong_study_or_signature_is_refused_on_both_sides(wrong, text, hospitals):
    config = signed(hospitals.config()) | wrong

    with pytest.raises(SettingsError, match=text):
        hospitals.federate(config)
    assert re.search(text, hospitals.refusal_when_asked(config))


def test_who_calls_itself_by_the_name_of_another_site_is_not_that_site(hospitals):
    """A thief takes the name of north: our code at the thief's node refuses to run.

    With code of its own the thief sends north's introduction with another signature, and the
    server refuses that.
    """
    config = hospitals.study()
    nodes = {number: node | {"approve": False} for number, node in hospitals.nodes.items()}
    thief = {9: nodes[NORTH] | {"state-dir": str(hospitals.folder / "thief")}}

    with pytest.raises(FederationError, match="does not name north, or names another key of it"):
        run_federation(config, nodes=thief)

    cards_of_north = []  # north is asked before the thief

    def forge_card(message, reply):
        if message.metadata.message_type != MessageType.QUERY:
            return reply
        if message.metadata.dst_node_id == NORTH:
            cards_of_north.append(reply.content.config_records["site"])
        if message.metadata.dst_node_id in thief:
            false_signature = JANE.sign(b"north").hex()
            card = ConfigRecord({**cards_of_north[0], "signature": false_signature})
            return Message(RecordDict({"site": card}), reply_to=message)
        return reply

    second = config | {"run-name": "second"}
    outcome = run_federation(second, nodes=nodes | thief, tamper=forge_card)

    assert "north: not signed by a site of the study" in hospitals.capsys.readouterr().out
    assert trained_nodes(outcome) == {EAST, NORTH, SOUTH}


@pytest.mark.parametrize(("stage", "record"), [("query.advertise", SECAGG), ("train", NEXT_SUM)])
@pytest.mark.parametrize("server", ["honest", "hostile"])
def test_a_sum_is_with_no_other_than_sites_of_the_study(
    server, stage, record, hospitals, monkeypatch
):
    """A server that puts keys of its own in the place of north's gets no sum.

    This holds whether or not it checks them itself.
    """
    if server == "hostile":
        monkeypatch.setattr(server_secagg, "is_from_site", lambda *facts: True)
    config = hospitals.study(secagg=True, rounds=3, min_clients=3, run_name="false")
    hospitals.ask_and_decide(config)

    def swap_keys(message, reply):
        """Put the first of north's three public keys behind the others; then comes a signature."""
        keys = reply.content.config_records[record]
        of_north = keys["north"]
        first = of_north[:KEY]
        others = of_north[KEY:PUBLIC]
        signature = of_north[PUBLIC:]
        keys["north"] = others + first + signature
        return reply

    tamper = when(swap_keys, stage, node=NORTH)
    with pytest.raises(FederationError):
        hospitals.federate(config, tamper=tamper)

    rows = hospitals.rows("false")
    rows_with_them = rows
    if (server, stage) == ("honest", "train"):  # these keys are of the next round's sum
        rows_with_them = rows[1:]

    assert all(row["void"] for row in rows_with_them)

    if server == "hostile":
        noticed = "unmask" if stage == "train" else "share"
        lie = "keys for a sum: those of north are not signed with its key in the study"
        for site in ("east", "south"):
            assert rows[0]["failed"][site] == f"{noticed}: {lie}"
    else:
        unsigned = "its keys for a sum are not signed with its key in the study"
        assert unsigned in rows[0]["refused"]["north"]


def test_a_file_is_signed_by_ssh_key_and_shown_in_words(hospitals, tmp_path, capsys):
    """`protofl study sign` and `show`: unsigned, signed twice, changed after it, without a key."""
    key = write_ssh_key(tmp_path)
    file = tmp_path / "study.toml"
    file.write_text(
        'study = "heart"\nalgo = "fedtgp"\nrounds = 3\n'
        f'study-sites = "{hospitals.keys(*NAMES)}"\n'
        'study-purpose = "which valves leak"\nstudy-runs = 2\n'
    )

    assert "not signed" in output(capsys, "study", "show", file, status=1).err

    shown = ""
    for _ in range(2):  # the second signature takes the place of the first
        shown += output(capsys, "study", "sign", file, "--key", key, "--by", "jane").out

    assert "study heart" in shown
    assert f"signed by jane, {JANES}" in shown
    assert "which valves leak" in shown
    assert ", north:" in shown
    assert "2 runs of 3 rounds" in shown
    assert file.read_text().count("study-signature") == 1

    file.write_text(file.read_text().replace("rounds = 3", "rounds = 4"))
    assert "study-signature: not jane:" in output(capsys, "study", "show", file, status=1).err
    assert "give --key" in output(capsys, "study", "sign", file, status=1).err

    no_key = output(capsys, "study", "sign", file, "--key", file, "--by", "jane", status=1).err
    assert f"--key {file}:" in no_key


@pytest.mark.parametrize(("package", "why"), [
    (None, "for which the package bcrypt is missing; type pip install bcrypt"),
    ("bcrypt", "and nobody can type it"),
])  # fmt: skip
def test_a_passphrase_that_cannot_be_asked_for_is_one_clear_error(
    package, why, tmp_path, monkeypatch
):
    """The environment need not have bcrypt, and a container without a terminal has no input."""
    key = write_ssh_key(tmp_path)

    def is_encrypted(content, password):
        raise TypeError("Key is password-protected, but password was not provided.")

    def no_input(prompt):
        raise EOFError

    module = "protofl_common.tools.ssh_key"
    monkeypatch.setattr(f"{module}.load_ssh_private_key", is_encrypted)
    monkeypatch.setattr(f"{module}.getpass", no_input)
    monkeypatch.setattr(f"{module}.find_spec", lambda name: package)
    with pytest.raises(SettingsError, match=f"^--key {key}: has a passphrase, {why}"):
        private_key(key)

    # no terminal of docker's can help: it gives none to a command that reads a file
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(key.read_bytes())))
    with pytest.raises(SettingsError) as refused:
        private_key(Path("-"))
    assert "--tty" not in str(refused.value)


def test_a_check_takes_a_study_and_says_if_it_names_the_site(hospitals, tmp_path, capsys):
    """`protofl site check` finds no fault in a study that names the site, and peers it knows."""
    settings = 'study = "heart"\nalgo = "fedproto"\npartition = "own"\nmodels = "cnn4"\n'
    settings += "image-size = 8\nsecagg = true\n"
    file = tmp_path / "study.toml"
    for names, status in ((NAMES, 0), (("east",), 1)):
        file.write_text(f'{settings}study-sites = "{hospitals.keys(*names)}"\n')
        sign = ("sign", file, "--key", write_ssh_key(tmp_path), "--by", "jane")
        output(capsys, "study", *sign)
        shown = hospitals.site_command(f"check {file}", status=status)
        names_north = status == 0
        assert ("does not name north" in shown) is not names_north
        assert ("6 training and 2 test samples" in shown) is names_north
        assert "state-dir" in shown

    hospitals.north["peers"] = f"west:{'A' * 43}"
    file.write_text(f'{settings}study-sites = "{hospitals.keys(*NAMES)}"\n')
    output(capsys, "study", *sign)
    assert "this site knows 0 of the others" in hospitals.site_command(f"check {file}", status=1)


def test_where_a_site_names_operators_only_their_signed_decisions_count(hospitals, tmp_path):
    """North's node config names omar and jane: an approval from before no longer counts.

    Jane's does, and changes of it on the disk, or of its line in the log, are found.
    """
    key = write_ssh_key(tmp_path)
    strangers = write_ssh_key(tmp_path, Ed25519PrivateKey.generate())
    config = hospitals.config()
    study = Study.of(config).id
    hospitals.ask_and_decide(config, "north")  # before it named any

    assert hospitals.refusal_when_asked(config) == ""

    hospitals.north["operators"] = f"omar:{'A' * 43}, jane:{key_as_text(JANE.public_key())}"
    assert WAITING in hospitals.refusal_when_asked(config)
    assert "WAITS since" in hospitals.site_command("requests")

    for options, why in (
        ("", "give --key, the SSH key of one of omar, jane"),
        (f"--key {strangers}", "is of none of operators (node config)"),
    ):
        assert why in hospitals.site_command(f"approve {study} {options}", status=1)

    hospitals.decide(config, "north", words=f"approve --runs 2 --key {key}")
    assert hospitals.refusal_when_asked(config) == ""
    assert " by jane:" in hospitals.site_command("requests")
    assert ", runs 2, " in hospitals.site_command("audit")

    # whoever writes to the folder cannot widen the approval, or make it another decision
    path = hospitals.request(config)
    approved = consent.read(path)
    for forged in ({"runs": 3}, {"code": "other"}, {"by": f"omar:{'A' * 43}"}, {"signature": ""}):
        consent.write(path, replace(approved, **forged))
        assert WAITING in hospitals.refusal_when_asked(config)
    consent.write(path, approved)

    assert hospitals.refusal_when_asked(config) == ""

    log = hospitals.log()
    (last,) = [entry for entry in hospitals.lines() if entry.get("signature")]
    rewritten = json.dumps(last | {"runs": 9})
    log.write_text(rewritten + "\n")

    assert "line 1 is not what jane:" in hospitals.site_command("audit", status=1)

    hospitals.decide(config, "north", words=f"deny --key {key}")
    assert "denied at north" in hospitals.refusal_when_asked(config)


def test_a_key_that_the_sites_user_cannot_read_comes_on_standard_input(
    hospitals, tmp_path, monkeypatch
):
    """Jane types commands as the SuperNode's user, who must not have her key in a file."""
    key = write_ssh_key(tmp_path)
    content = key.read_bytes()
    config = hospitals.config()
    study = Study.of(config).id
    hospitals.north["operators"] = f"jane:{key_as_text(JANE.public_key())}"
    hospitals.ask(config)

    def unreadable(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", unreadable)
        said = hospitals.site_command(f"approve {study} --key {key}", status=1)
    assert f"--key {key}: this user cannot read it; its owner hands it over" in said

    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    hospitals.decide(config, "north", words="approve --key -")
    assert hospitals.refusal_when_asked(config) == ""
    assert f" by jane:{key_as_text(JANE.public_key())}" in hospitals.site_command("requests")


def test_what_an_operator_who_has_left_decided_is_told_to_the_others(hospitals, tmp_path):
    """Jane has denied a study; north's node config names omar alone since she has left.

    The study waits for omar. He hears of it by on-trouble, and reads that it was denied.
    """
    told = tmp_path / "told"
    config = hospitals.config()
    jane = f"jane:{key_as_text(JANE.public_key())}"
    hospitals.north["operators"] = jane
    hospitals.ask(config)
    hospitals.decide(config, "north", words=f"deny --key {write_ssh_key(tmp_path)}")

    hospitals.north["operators"] = f"omar:{'A' * 43}"
    hospitals.north["on-trouble"] = write_program(tmp_path, f'echo "$@" >> {told}')
    answer = hospitals.refusal_when_asked(config)

    assert WAITING in answer
    assert "no operator of today has signed a decision" in answer
    assert told.read_text() == "refused\n"

    shown = hospitals.site_command("requests")
    assert "WAITS since" in shown
    assert re.search(f"denied .* by {jane}, which counts no more, as it lacks the signature", shown)


def write_ssh_key(folder, key=JANE):
    """Write somebody's private key as `ssh-keygen` does, and return the file."""
    file = folder / f"{key_as_text(key.public_key())}.ssh"
    pem = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
    file.write_bytes(pem)
    return file


def test_a_signature_serves_one_study_one_run_and_one_algorithm_only(hospitals):
    """North signs keys for a sum in run 7: no other study, run, site, algorithm or sum."""
    heart = Settings.from_run_config(hospitals.study(seed=1)).study
    other = Settings.from_run_config(hospitals.study(seed=2)).study
    keys = bytes(PUBLIC)  # of a secure sum; zeros do as well
    purpose = text_to_sign("fedproto", 2, keys)

    key = consent.site_key(hospitals.own_folder("north"))
    signature = key.sign(about_site(heart, "north", 7, purpose))

    assert is_from_site(heart, "north", 7, purpose, signature)
    assert not is_from_site(other, "north", 7, purpose, signature)
    assert not is_from_site(heart, "north", 8, purpose, signature)
    assert not is_from_site(heart, "south", 7, purpose, signature)
    for algo, number in (("fedavg", 2), ("fedproto", 3)):
        assert not is_from_site(heart, "north", 7, text_to_sign(algo, number, keys), signature)


def test_half_a_key_is_damaged(hospitals):
    """A site whose key file is cut short says so, and makes no new key by itself."""
    consent.site_key(hospitals.own_folder("north"), make=True)
    (hospitals.own_folder("north") / "site.key").write_text("ab")

    damaged = "site.key is damaged; restore it, or remove it for a new key"
    assert damaged in hospitals.site_command("key", status=1)


def test_a_study_does_not_go_on_from_another_studys_model(hospitals):
    """A server may name any Flower run as this one's beginning, also one of another study.

    In round 3 run 8 claims to go on with run 7 after its round 2.
    """
    node = hospitals.nodes[EAST] | {"approve": False}
    LocalGrid(hospitals.config(), hospitals.nodes)  # Flower's messages want a run
    history = RunHistory(8, ((7, 2),))
    instructions = pack_instructions(Instructions(3, "run", history))

    def states(seed):
        """Return east's states in round 3 of a study with this seed, which makes it another."""
        config = hospitals.study(seed=seed, rounds=3)
        content = RecordDict({"round": instructions})
        message = Message(content, EAST, MessageType.TRAIN, group_id="3")
        return open_client(Context(8, EAST, node, RecordDict(), config), message).states

    earlier = states(1)
    earlier.run_history = RunHistory(7)
    earlier.save(2, "cnn4", {"weight": torch.ones(1)})

    cpu = torch.device("cpu")
    assert states(1).load(3, "cnn4", cpu) is not None
    with pytest.raises(StateError, match=r"was stored with use = .fedproto .*in the study"):
        states(2).load(3, "cnn4", cpu)


def test_a_server_that_shows_each_site_a_few_others_gets_no_sum(hospitals, monkeypatch):
    """The study has eight sites, of which six must stay to the end of a sum (secagg-threshold).

    The server names only three to each, among which three would be enough.
    """
    absent = []
    for number in range(5):
        key = key_as_text(Ed25519PrivateKey.generate().public_key())
        absent.append(f"site-{number}:{key}")
    sites = ",".join([hospitals.keys(*NAMES), *absent])
    config = hospitals.config(secagg=True, min_clients=3, join_timeout=2.0, run_name="few")
    config = signed(config, sites=sites)
    hospitals.ask_and_decide(config)

    monkeypatch.setattr(server_secagg.SecureSum, "_needed", lambda self, sites: 3)
    with pytest.raises(FederationError):
        hospitals.federate(config)

    rows = hospitals.rows("few")
    assert all(row["void"] for row in rows)
    assert "fewer than 6" in str(rows[0])


# -- the audit log ---------------------------------------------------------------------------------
def write_log(folder, lines):
    """Write an audit log of so many lines into a folder, and return the file."""
    for number in range(lines):
        audit.append(folder, study="s", kind="train", round=number, sent={"report": 8}, sha256="0")
    return folder / audit.FILE


def problems_in(path):
    return [problem for _, _, problem in audit.entries(path) if problem]


def swap_two(lines):
    return [*lines[:2], lines[3], lines[2], *lines[4:]]


def edit_one(lines):
    return [*lines[:2], lines[2].replace('"round": 2', '"round": 9'), *lines[3:]]


TAMPERINGS = {
    "a line deleted": (lambda lines: lines[:2] + lines[3:], 3),
    "two lines swapped": (swap_two, 3),
    "a line edited": (edit_one, 4),
    "the first line deleted": (lambda lines: lines[1:], 1),
    "a line that is no JSON": (lambda lines: [*lines[:2], "none\n", *lines[3:]], 3),
    "a number added": (lambda lines: [*lines, "5\n"], 7),
    "a line break added": (lambda lines: [*lines, "\n"], 7),
    "a stranger's line added": (lambda lines: [*lines, '{"time": "2026"}\n'], 7),
    "half a line added": (lambda lines: [*lines, '{"round": 1\n'], 7),
    "a signature added": (lambda lines: [*lines, '{"signature": "1"}\n'], 7),
}
"""What is done to six lines -> how, and the first line that shows it."""


@pytest.mark.parametrize("tampering", TAMPERINGS)
def test_a_log_that_somebody_changed_is_found_out(tampering, hospitals):
    """Each line has the hash of the one before it, so every change but a cut end shows."""
    log = write_log(hospitals.own_folder("north"), 6)
    hospitals.site_command("audit")
    change, line = TAMPERINGS[tampering]
    log.write_text("".join(change(log.read_text().splitlines(keepends=True))))

    for command in ("audit", "audit --json"):
        assert f"line {line} " in hospitals.site_command(command, status=1)


def test_what_was_cut_off_is_found_by_comparison_with_what_the_server_has_seen(hospitals):
    """A log without its last line looks whole; the server has kept the heads that it has seen."""
    config = hospitals.config(rounds=2)
    hospitals.ask_and_decide(config)
    outcome = hospitals.federate(config)
    heads = outcome.folder.parent / HEADS

    # two rounds and the final evaluation
    assert [set(row["heads"]) for row in heads_in(heads)] == 3 * [set(NAMES)]

    hostile = outcome.folder / "hostile.jsonl"
    hostile.write_text(
        '{"heads": {"north": "zz"}}\n'
        '{"run": "trial", "round": 1, "heads": {"north": {}}}\n'
        '{"run": "trial", "round": 1, "heads": ["north"]}\n',
        encoding="utf-8",
    )
    for other in (outcome.folder, outcome.folder / METRICS, hostile):
        nothing = hospitals.site_command(f"audit --against {other}", status=1)
        assert "nothing was compared" in nothing

    shutil.rmtree(outcome.folder)  # the witness outlives the run
    against = f"audit --against {heads}"
    shown = hospitals.site_command(against)

    assert f"and all 3 that {heads} has seen are there" in shown
    *_, trained = [line for line in shown.splitlines() if "kind train," in line]
    assert "round 2," in trained
    assert "sent {" in trained
    assert "decision approved" in shown

    log = hospitals.log()
    *all_but_last, _last = log.read_text().splitlines(keepends=True)
    log.write_text("".join(all_but_last))

    hospitals.site_command("audit")  # alone the log shows nothing wrong

    (wrong,) = json.loads(hospitals.site_command(f"{against} --json", status=1))["wrong"]
    run = outcome.folder.name

    assert wrong.startswith(f"{run}, round 2: the server has seen a line that the log lacks")


@pytest.mark.parametrize("secagg", [False, True], ids=["open", "secagg"])
def test_a_site_whose_folder_is_older_than_the_servers_memory_answers_no_round(
    secagg, hospitals, tmp_path
):
    """The folder is a copy of ``state-dir`` from before a run, or an empty one with the old key."""
    config = hospitals.study(min_clients=2, secagg=secagg)
    hospitals.ask_and_decide(config)
    before = shutil.copytree(hospitals.state("north"), tmp_path / "copy")
    for run_id in (1, 2):
        outcome = hospitals.federate(config, run_id=run_id)
        assert clients_of(outcome) == set(NAMES)
        shutil.rmtree(outcome.folder)  # what the server has seen outlives the run

    shutil.rmtree(hospitals.state("north"))
    shutil.copytree(before, hospitals.state("north"))
    lacking = "seen.north: the server has seen a line that this site's audit log lacks"

    assert lacking in failure_of_north(hospitals, config | {"run-name": "three"}, run_id=3)

    # an empty folder with the old key
    key = (hospitals.own_folder("north") / consent.KEY_FILE).read_text()
    shutil.rmtree(hospitals.state("north"))
    hospitals.own_folder("north").mkdir(parents=True)
    (hospitals.own_folder("north") / consent.KEY_FILE).write_text(key)
    hospitals.ask(config)
    hospitals.decide(config, "north")

    assert lacking in failure_of_north(hospitals, config | {"run-name": "four"}, run_id=4)
    *_, last_refusal = [entry["refused"] for entry in hospitals.lines() if "refused" in entry]
    assert last_refusal


def failure_of_north(hospitals, config, run_id):
    """Return why north fails in the first round of a run of all three, which it then removes."""
    with suppress(FederationError):  # two are too few for a secure sum
        hospitals.federate(config, run_id=run_id)
    row, *_ = hospitals.rows(config["run-name"])
    shutil.rmtree(hospitals.folder / "runs" / config["run-name"])
    assert row["valid"] == (0 if config["secagg"] else 2)
    return row["failed"]["north"]


def test_a_server_that_lies_about_a_log_stops_itself_and_nothing_else(hospitals):
    """The site refuses, reads no data, and then answers an honest server as before."""
    config = hospitals.config()
    hospitals.ask_and_decide(config)
    outcome = hospitals.federate(config, run_id=1)
    asked = [message for message, _ in outcome.exchanged(MessageType.TRAIN)]
    (message,) = [each for each in asked if each.metadata.dst_node_id == NORTH]
    message.content["round"]["run_history"] = "2"  # another Flower run sends it once more
    grid = LocalGrid(config, hospitals.nodes, run_id=2)
    files = files_in(hospitals.state("north"))
    OPENED.clear()  # of the files that are opened, only those from here on count

    false_heads = ["0" * 64, "f" * 63, "../../etc", 5, b"x", ["a"]]
    for head in false_heads:
        content = RecordDict({**message.content, SEEN: ConfigRecord({"north": head})})
        lie = Message(content, NORTH, MessageType.TRAIN)
        assert f"{SEEN}.north" in reason_in(grid.ask(lie)), head

    assert not [path for path in OPENED if str(hospitals.folder / "north" / "data") in path]
    changed = files_in(hospitals.state("north")) - files
    names = {path.name for path, _ in changed}

    assert names <= {audit.FILE, "refusals.json", hospitals.request(config).name}
    assert reason_in(grid.ask(message)) == ""


def files_in(folder):
    return {(path, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "number", ["9" * 300_000, b"bytes", -1, 2.5, [1, 2]], ids=lambda number: str(number)[:9]
)
def test_what_a_message_says_of_its_round_does_not_break_the_log(number, hospitals):
    """A round that is no number, and texts of 300,000 letters, make short lines in the log."""
    grid = LocalGrid(hospitals.config(seed=number), hospitals.nodes, run_id=5)
    content = RecordDict({"round": ConfigRecord({"round": number, "run_name": "x" * 300_000})})

    for _ in range(2):
        grid.push_messages([Message(content, NORTH, MessageType.TRAIN, group_id="1")])

    log = hospitals.log()
    assert len(log.read_bytes().splitlines()) == 2
    assert log.stat().st_size < 10_000
    assert not problems_in(log)


def test_refusals_do_not_fill_the_log_and_what_it_lacks_stays(hospitals, monkeypatch):
    """A refusal that repeats is written at its times 1, 2, 4, 8 …

    After two different ones in a day, all others are counted together, and the server is not told
    their reasons. Only that a run waits for approval is always said. A new day counts anew.
    """
    monkeypatch.setattr(audit, "MOST_REFUSALS", 2)

    def reasons_for(configs):
        return [hospitals.refusal_when_asked(config) for config in configs]

    first = hospitals.config(seed=0)
    waiting = reasons_for(11 * [first])
    too_long = reasons_for([hospitals.config(rounds=3000)])
    most = hospitals.config(rounds=5000)
    # an unknown setting cannot pass its refusal off as one that waits for approval
    unsaid = reasons_for([first | {f"{WAITING} at north": 1}, most, most])
    waiting += reasons_for([hospitals.config(seed=1), hospitals.config(seed=2)])

    assert all(f"{WAITING} at north: a run" in reason for reason in waiting)
    (reason_of_too_long,) = too_long
    assert "rounds = 3000" in reason_of_too_long
    for reason in unsaid:
        assert "more than 2 refusals today; the log of the site says more" in reason
    assert not problems_in(hospitals.log())

    lines = hospitals.lines()
    of_first = [1, 2, 4, 8]
    of_too_long = [1]
    of_unsaid = [1, 2]
    of_other_seeds = [1, 1]
    assert [entry["times"] for entry in lines] == (
        of_first + of_too_long + of_unsaid + of_other_seeds
    )
    assert {*waiting, *too_long, *unsaid} == {entry["refused"] for entry in lines}
    assert ", times 8" in hospitals.site_command("audit")

    # a day later
    monkeypatch.setattr(audit, "date", SimpleNamespace(today=lambda: TODAY + timedelta(days=1)))
    assert "rounds = 5000" in hospitals.refusal_when_asked(most)

    # the clock goes back
    monkeypatch.setattr(audit, "datetime", SimpleNamespace(now=lambda: datetime(2000, 1, 1)))
    assert "rounds = 4000" in hospitals.refusal_when_asked(hospitals.config(rounds=4000))

    since_today = hospitals.site_command(f"audit --since {TODAY}")
    since_tomorrow = hospitals.site_command(f"audit --since {TOMORROW}")

    assert "rounds = 4000" in since_today
    # a line with an earlier time than one before it is shown, whatever the day
    assert ("rounds = 4000" in since_tomorrow) == ("rounds = 5000" not in since_tomorrow)


def test_a_log_survives_a_kill_in_the_middle_of_a_line(tmp_path):
    """Half a line at the end is reported, and the next entry takes its place."""
    path = write_log(tmp_path, 3)
    path.write_text(path.read_text() + '{"time": "2026')
    cut_short = "line 4 is no whole line of the log: cut short by a full disk or a kill"

    (problem,) = problems_in(path)
    assert cut_short in problem

    audit.append(tmp_path, study="s", decision="approved")

    assert not problems_in(path)
    assert len(path.read_text().splitlines()) == 4


def test_what_cannot_be_recorded_does_not_leave(hospitals, monkeypatch):
    """Where the disk is full, so that the audit log cannot be written, no introduction is sent."""
    config = hospitals.config()
    hospitals.ask_and_decide(config, "north")

    assert hospitals.refusal_when_asked(config) == ""

    def fail_for_the_log(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(audit.FILE):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(audit.os, "fsync", fail_for_the_log)
        reason = hospitals.refusal_when_asked(config)

    assert "AuditError (state-dir): its audit log cannot be written" in reason
    assert hospitals.capsys.readouterr().err.count("sent site") == 1
    assert hospitals.refusal_when_asked(config) == ""
