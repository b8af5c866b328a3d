"""``protofl status``: what a SuperLink and the folders of runs say, put together."""

import json
import re
import ssl
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from unittest.mock import MagicMock

import jsonschema
import pytest
from filelock import FileLock

from protofl_common.config.options import SettingsError
from protofl_common.runs.folder import METRICS, SETTINGS, SUMMARY, WAITING
from protofl_common.tools.cli import main
from protofl_common.tools.cli.status import (
    SOMEBODY_IS_NEEDED,
    needs,
    number_of,
    prometheus,
    status_lines,
)
from protofl_common.tools.known_runs import runs_in
from protofl_common.tools.superlink import Endpoint, Federation, ask, ask_endpoint
from tests.support.accidents import fails, on_round
from tests.support.attacks import interrupted
from tests.support.commands import SCHEMA, json_printed, output
from tests.support.fakes import submission
from tests.support.harness import run_config, run_federation
from tests.support.processes import free_port, name_superlink, wait_until
from tests.support.programs import program
from tests.support.sites import Three, findings_of_check, level_of


def federation(*nodes, **override):
    """Return what a SuperLink may answer: ``nodes`` have a number, a name and a state.

    Run 77 has failed, and the certificate ends in twelve days.
    """
    infos = [SimpleNamespace(node_id=node, name=name, status=state) for node, name, state in nodes]
    run = submission(77, **override)
    return Federation(infos, [run], Endpoint(days=12, ahead=0.0))


def test_sites_are_named_with_their_nodes_and_troubles(tmp_path):
    """The sites east, north and south are nodes 1, 2 and 3 of a run; south fails in round 1.

    The SuperLink has the names of two others, "s" and "west", and calls south's node "s".
    """
    Three(tmp_path).run(on_round(1, 3, fails), rounds=2, run_name="first")
    runs = runs_in(tmp_path / "runs")
    nodes = [(1, "", "online"), (3, "s", "offline"), (9, "west", "online")]
    superlink = federation(*nodes, seed=42, rounds=2, algo="fedtgp")

    east, south, west, run, certificate = status_lines(superlink, runs)
    assert " ".join(east.split()) == "east 1 online last reply: round 2 of first"
    assert re.match("south .*offline     last reply: round 2 of first  1 failed; round 1: ", south)
    assert " ".join(west.split()) == "west 9 online no reply yet"

    facts = ["run 77", "2026-11-22T10:01:17", "by none", "bundle 6f3a91c2…", "finished:failed"]
    assert run == "  ".join([*facts, "algo='fedtgp' rounds=2"])
    assert certificate == "certificate of the SuperLink: 12 days left; renew it"

    assert number_of("s", superlink, runs) == 3
    assert number_of("east", superlink, runs) == 1

    refusal = "--node nobody: 0 nodes have this name; choose from 1, s, west"
    with pytest.raises(SettingsError, match=refusal):
        number_of("nobody", superlink, [])


def test_a_run_that_waits_asks_for_its_worker():
    superlink = federation()
    superlink.submissions[0].status = SimpleNamespace(status="pending", sub_status="", details="")
    run, _ = status_lines(superlink, [])

    assert "  pending (waits for protofl worker: is it running?)  " in run


def test_a_run_that_was_killed_says_how_it_goes_on(tmp_path):
    """The run is interrupted in round 2 of 3; while a process works on it, nothing is said."""
    config = run_config(tmp_path, run_name="first", rounds=3, models="cnn4")
    with pytest.raises(KeyboardInterrupt):
        run_federation(config, clients=1, tamper=on_round(2, 1000, interrupted))

    runs = tmp_path / "runs"
    command = f"flwr run . FEDERATION --stream --run-config {runs}/first/resume.toml"
    stopped = f"{runs}/first: stopped after round 1 of 3; it goes on by {command}"

    assert stopped in list(status_lines(federation(), runs_in(runs)))

    with FileLock(runs / ".first.lock"):  # a process is at work on it
        assert not any("stopped" in line for line in status_lines(federation(), runs_in(runs)))


def test_a_baseline_that_was_killed_goes_on_by_its_run(tmp_path):
    """With the baseline's own settings all operators would be asked again, as for another run."""
    runs = tmp_path / "runs"
    for name in ("first", "first-local"):
        (runs / name).mkdir(parents=True)
        (runs / name / METRICS).touch()
    (runs / "first" / SETTINGS).write_text('baselines = "local"\nrounds = 3\n')
    (runs / "first" / SUMMARY).write_text('{"rounds": 3}')
    (runs / "first-local" / SETTINGS).write_text("rounds = 3\n")

    (line,) = [line for line in status_lines(federation(), runs_in(runs)) if "stopped" in line]
    assert line.startswith(f"{runs}/first-local: stopped after round 0 of 3; ")
    assert line.endswith(f"--run-config {runs}/first/resume.toml")


@pytest.mark.usefixtures("flower_home")
def test_a_federation_that_cannot_be_asked_is_one_clear_error(capsys):
    with pytest.raises(SettingsError, match="nobody"):
        ask("nobody")
    with pytest.raises(SettingsError, match="here: "):
        ask("here")
    assert "protofl: this cannot work\nhere: " in output(capsys, "status", "here", status=1).err


def test_a_federation_without_runs_says_so(tmp_path, monkeypatch, capsys):
    """Run 77 of the SuperLink has no folder here."""
    superlink = federation((1, "north", "online"))
    monkeypatch.setattr("protofl_common.tools.cli.status.ask", lambda name: superlink)
    command = ("status", "here", "--runs", tmp_path)
    for words in ((), ("--json",), ("--prometheus",)):
        said = output(capsys, *command, *words, status=SOMEBODY_IS_NEEDED).err
        assert f"{tmp_path}: no runs here" in said


def test_a_folder_of_runs_that_cannot_be_read_is_no_empty_one(tmp_path, monkeypatch, capsys):
    """A monitor's own user would else never hear of a run that stopped."""
    superlink = federation((1, "north", "online"))
    monkeypatch.setattr("protofl_common.tools.cli.status.ask", lambda name: superlink)
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)

    command = ("status", "here", "--runs", tmp_path)
    said = output(capsys, *command, status=1).err
    assert f"{tmp_path}: this user cannot read the runs in it" in said

    # but a site whose key was stolen can be unregistered
    assert output(capsys, *command, "--node", "north").out == "1\n"


@pytest.mark.parametrize(("age", "is_needed"), [(200, False), (400, True)])
def test_somebody_is_needed_if_no_worker_takes_a_run(age, is_needed):
    """Run 77 is pending for ``age`` seconds; a worker takes it within five minutes."""
    superlink = federation()._replace(endpoint=Endpoint(days=90, ahead=0.0))
    (run,) = superlink.submissions
    run.status = SimpleNamespace(status="pending", sub_status="", details="")
    run.pending_at = str(datetime.now(UTC) - timedelta(seconds=age))

    said = "run 77 is pending: does protofl worker run?"
    assert (list(needs(superlink, [])) == [said]) is is_needed


def test_figures_for_prometheus_are_in_groups_and_names_in_one_line():
    """Two runs wait for sites; an operator has registered a site with an odd name."""
    waiting = {"sites": {"south": 0.0}, "seconds": 40.0, "seconds-left": 80.0}
    status = {
        "sites": [{"name": 'a "b" \\ \nc', "node": "1", "state": "online"}],
        "waiting": [{"run": "first", **waiting}, {"run": "second", **waiting}],
        "stopped": [],
        "certificate-days": None,
        "needs": [],
    }

    lines = list(prometheus(status))

    assert lines[0] == 'protofl_site_online{site="a \\"b\\" \\\\ \\nc",node="1"} 1'
    figures = [re.split("[{ ]", line)[0] for line in lines]
    assert figures == sorted(figures, key=figures.index), "the lines of a figure are together"
    assert len(lines) == 7


def test_who_is_needed_is_told_to_programs(tmp_path, monkeypatch, capsys):
    """South is offline, run 77 has failed, and the certificate ends in twelve days.

    They are told in JSON, for Prometheus, and by the exit status, until all is well.
    """
    Three(tmp_path).run(on_round(1, 3, fails), rounds=2, run_name="first")
    superlink = federation((1, "", "online"), (3, "s", "offline"))
    monkeypatch.setattr("protofl_common.tools.cli.status.ask", lambda name: superlink)
    command = ["status", "here", "--runs", str(tmp_path / "runs")]
    capsys.readouterr()

    assert main([*command, "--json"]) == SOMEBODY_IS_NEEDED

    content = json.loads(capsys.readouterr().out)
    jsonschema.validate(content, SCHEMA)
    needed = ["south (3) is offline", "run 77 failed", "the certificate has 12 days left"]

    assert content["needs"] == needed
    assert content["sites"][1]["runs"]["first"]["trouble"] == {"failed": 1}

    assert main([*command, "--prometheus"]) == SOMEBODY_IS_NEEDED
    assert capsys.readouterr().out.splitlines() == [
        'protofl_site_online{site="east",node="1"} 1',
        'protofl_site_online{site="south",node="3"} 0',
        "protofl_stopped_runs 0",
        "protofl_certificate_days 12",
        "protofl_needs 3",
    ]

    superlink.nodes.pop()
    superlink.submissions.clear()
    well = superlink._replace(endpoint=Endpoint(days=90, ahead=0.0))
    monkeypatch.setattr("protofl_common.tools.cli.status.ask", lambda name: well)

    assert main(command) == 0


def test_for_whom_a_round_waits_is_told(tmp_path, monkeypatch, capsys):
    """Round 2 has waited 40 s for two sites, and closes in 80 s.

    It is told only while a process works on the run (its lock is taken).
    """
    Three(tmp_path).run(rounds=1, run_name="first")
    run = tmp_path / "runs" / "first"
    now = 1_000_000.0
    monkeypatch.setattr("protofl_common.tools.cli.status.time.time", lambda: now)
    sites = {"south": 95.0, "west": 0.0}
    (run / WAITING).write_text(
        json.dumps({"round": 2, "since": now - 40, "until": now + 80, "sites": sites})
    )
    superlink = federation()._replace(submissions=[])
    monkeypatch.setattr("protofl_common.tools.cli.status.ask", lambda name: superlink)
    command = ["status", "here", "--runs", str(run.parent)]
    text = f"{run}: round 2: waiting for south (took up to 1m35s before), west (no reply before) "
    text += "for 40s; closes without them in 1m20s\n"

    assert text not in output(capsys, *command, status=SOMEBODY_IS_NEEDED).out

    with FileLock(run.parent / ".first.lock"):  # a process is at work on the run
        assert text in output(capsys, *command, status=SOMEBODY_IS_NEEDED).out
        figures = output(capsys, *command, "--prometheus", status=SOMEBODY_IS_NEEDED).out
        waiting = json_printed(capsys, *command)["waiting"]

    assert 'protofl_awaited_seconds{run="first",site="south"} 40\n' in figures
    assert 'protofl_round_closes_seconds{run="first"} 80\n' in figures
    assert waiting == [
        {"run": "first", "round": 2, "seconds": 40, "seconds-left": 80, "sites": sites}
    ]


@pytest.fixture
def flower_home(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    name_superlink(tmp_path, free_port())


# -- what a site sees of its SuperLink -------------------------------------------------------------
class Clock(BaseHTTPRequestHandler):
    """A SuperLink's address that answers with the time of a clock that is wrong."""

    behind = timedelta()

    def do_GET(self):
        self.send_response_only(200)
        self.send_header("Date", f"{datetime.now(UTC) - self.behind:%a, %d %b %Y %H:%M:%S} GMT")
        self.end_headers()

    def log_message(self, format, *arguments): ...


@pytest.fixture
def door(tmp_path, monkeypatch):
    """A server on this machine, which a site without any data may ask in the current folder."""
    monkeypatch.chdir(tmp_path)
    server = HTTPServer(("127.0.0.1", 0), Clock)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


NODE = 'site-name="north"'


def address_of(door):
    return f"127.0.0.1:{door.server_port}"


@pytest.mark.parametrize(("seconds", "level"), [
    (0, ""), (3, "warning"), (100, "WRONG"), (-100, "warning"), (-1000, "WRONG"),
])  # fmt: skip
def test_a_wrong_clock_is_said_before_flower_refuses_it(seconds, level, door, monkeypatch):
    """Flower refuses a site that is more than 5 s ahead, or more than 300 s behind.

    ``seconds``: how far the SuperLink is behind the site.
    """
    monkeypatch.setattr(Clock, "behind", timedelta(seconds=seconds))
    findings = findings_of_check("--superlink", address_of(door), "--insecure", node=NODE)

    assert level_of(findings, "clock ") == level
    assert level_of(findings, "answers; no certificate") == ""


def test_an_ipv6_address_may_have_brackets(door):
    assert ask_endpoint(f"[127.0.0.1]:{door.server_port}").days is None


def test_a_site_that_starts_says_what_is_wrong_on_the_way(door, tmp_path, monkeypatch, capsys):
    """Flower's own log does not mention a wrong clock: the SuperNode is "terminated gracefully"."""
    monkeypatch.setattr(Clock, "behind", timedelta(seconds=600))
    monkeypatch.setenv("FLWR_LOG_LEVEL", "INFO")  # the command would change the log of this process
    monkeypatch.setattr("subprocess.Popen", MagicMock())
    monkeypatch.setattr("flwr.supernode.cli.flower_supernode", lambda: None)
    monkeypatch.setattr("protofl_common.tools.site.supernode.end_supernode", MagicMock())
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**5))
    options = ["--superlink", address_of(door), "--insecure", "--node-config", NODE]

    printed = output(capsys, "site", "run", *options, "--port", "0").err
    clock = r"protofl: WRONG clock: (599|60[01]) s ahead of the SuperLink's"

    assert re.search(clock, printed)
    assert f"protofl: WRONG disk: state-dir {tmp_path / 'runs'}: 0 MB free" in printed

    taken = str(door.server_port)
    printed = output(capsys, "site", "run", *options, "--port", taken, status=1).err

    assert re.search(f"--port {taken}: .*ddress already in use", printed)


def serve_tls(door, folder, host, **days):
    """Give the server a certificate for ``host``.

    ``days``: CA_DAYS, SERVER_DAYS: how long the authority's and the server's certificate hold.
    """
    certificates = program("certificates")
    vars(certificates).update(days)
    assert certificates.main([str(folder), "--server", host]) == 0
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    door.socket = context.wrap_socket(door.socket, server_side=True)


def test_days_that_the_superlinks_certificate_has_left_are_told(door, tmp_path):
    """The clock of the server is this machine's."""
    serve_tls(door, tmp_path, "127.0.0.1", CA_DAYS=9)  # the server's ends with its authority's
    address = address_of(door)
    findings = findings_of_check("--superlink", address, "--root-certificates", "ca.crt", node=NODE)
    answers = f"{address}: answers; its certificate: 8 days left"

    assert level_of(findings, answers) == "warning"
    assert abs(ask_endpoint(address, "ca.crt").ahead) < 60


def test_a_site_that_runs_tells_its_operator_of_a_full_disk_and_of_a_certificate_that_ends(
    door, tmp_path, monkeypatch
):
    """The node config names a program to call, ``on-trouble``, which notes its words."""
    serve_tls(door, tmp_path, "127.0.0.1", CA_DAYS=9)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**7))
    told = tmp_path / "told"
    tell = tmp_path / "tell"
    tell.write_text(f'#!/bin/sh\necho "$@" >> {told}\n')
    tell.chmod(0o700)
    words = []

    def supernode(*_):
        """Run until the operator has been told of both."""
        wait_until(lambda: told.exists() and len(told.read_text().split()) == 2, timeout=60)
        words.extend(told.read_text().split())

    monkeypatch.setattr("protofl_common.tools.site.supernode.start", supernode)
    options = ["--superlink", address_of(door), "--root-certificates", "ca.crt", "--port", "0"]
    node = f'{NODE} state-dir="state" on-trouble="{tell}"'

    assert main(["site", "run", *options, "--node-config", node]) == 0

    assert sorted(words) == ["certificate", "disk"]
    assert json.loads((tmp_path / "state/sites/north/told.json").read_text()).keys() == {*words}


@pytest.mark.parametrize(("days", "host", "reason"), [
    (0, "127.0.0.1", "expired"), (9, "10.9.8.7", "mismatch"),
])  # fmt: skip
def test_a_certificate_of_the_superlink_that_does_not_hold_is_wrong(
    days, host, reason, door, tmp_path, monkeypatch
):
    """The certificate has expired, or is for another host: the check and the status say so."""
    serve_tls(door, tmp_path, host, SERVER_DAYS=days)
    address = address_of(door)
    findings = findings_of_check("--superlink", address, "--root-certificates", "ca.crt", node=NODE)

    assert level_of(findings, reason) == "WRONG"

    cure = "its operator renews it (certificates.py --renew server)"
    assert level_of(findings, cure) == "WRONG"

    config = f'[superlink.here]\naddress = "{address}"\nroot-certificates = "{tmp_path}/ca.crt"\n'
    (tmp_path / "config.toml").write_text(config)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    refusal = f"here: the SuperLink cannot be asked .*{reason}.*; renew it"

    with pytest.raises(SettingsError, match=refusal):
        ask("here")
