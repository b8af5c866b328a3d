"""``protofl status``: what a SuperLink and the folders of runs say, put together."""

import re
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from filelock import FileLock

from protofl_common.config.options import SettingsError
from protofl_common.tools.cli import main
from protofl_common.tools.cli.runs import runs_in
from protofl_common.tools.cli.status import lines, number_of
from protofl_common.tools.federation import Federation, Shown, ask, shown_by
from tests.support.accidents import fails, on_round
from tests.support.attacks import interrupted
from tests.support.commands import output
from tests.support.given import Patch, Printed
from tests.support.harness import run_config, run_federation
from tests.support.processes import free_port, name_superlink
from tests.support.programs import program
from tests.support.sites import Three, found, level_of


def federation(*nodes: tuple[int, str, str], **override: Any) -> Federation:
    """A SuperLink that answered so."""
    status = SimpleNamespace(status="finished", sub_status="failed", details="")
    run = SimpleNamespace(
        run_id=77, pending_at="2026-11-22T10:00:00+00:00", fab_hash="6f3a91c2" * 8
    )
    run.status, run.override_config, run.account_name = status, override, "none"
    infos = [SimpleNamespace(node_id=node, name=name, status=state) for node, name, state in nodes]
    return Federation(infos, [run], Shown(days=12, ahead=0.0))  # type: ignore[arg-type]


def test_sites_are_named_with_their_nodes_and_troubles(tmp_path: Path) -> None:
    Three(tmp_path).run(on_round(1, 3, fails), rounds=2, run_name="first")
    known = federation(
        (1, "", "online"),
        (3, "s", "offline"),
        (9, "west", "online"),
        seed=42,
        rounds=2,
        algo="fedtgp",
    )
    east, south, west, run, certificate = list(lines(known, runs_in(tmp_path / "runs")))
    assert east.split() == ["east", "1", "online", "last", "reply:", "round", "2", "of", "first"]
    assert re.match("south .*offline     last reply: round 2 of first  1 failed; round 1: ", south)
    assert west.split() == ["west", "9", "online", "no", "reply", "yet"]
    assert (
        run
        == "run 77  2026-11-22T10:00:00  by none  bundle 6f3a91c2…  finished:failed  algo='fedtgp' rounds=2"
    )
    assert certificate == "certificate of the SuperLink: 12 days left; renew it"
    known.submissions[0].status.status, known.submissions[0].status.sub_status = "pending", ""
    assert "  pending (waits for protofl worker: is it running?)  " in list(lines(known, []))[3]
    assert [number_of(name, known, runs_in(tmp_path / "runs")) for name in ("s", "east")] == [3, 1]
    with pytest.raises(
        SettingsError, match="--node nobody: 0 nodes have this name; choose from 1, s, west"
    ):
        number_of("nobody", known, [])


def test_a_run_that_was_killed_says_how_it_goes_on(tmp_path: Path) -> None:
    config, dies = (
        run_config(tmp_path, run_name="first", rounds=3, models="cnn4"),
        on_round(2, 1000, interrupted),
    )
    with pytest.raises(KeyboardInterrupt):
        run_federation(config, clients=1, tamper=dies)
    runs = tmp_path / "runs"
    how = f"it goes on by flwr run . FEDERATION --stream --run-config {runs}/first/resume.toml"
    assert f"{runs}/first: stopped after round 1 of 3; {how}" in list(
        lines(federation(), runs_in(runs))
    )
    with FileLock(runs / ".first.lock"):
        assert not any("stopped" in line for line in lines(federation(), runs_in(runs)))


@pytest.mark.usefixtures("flower_home")
def test_a_federation_that_cannot_be_asked_is_one_clear_error_and_one_without_runs_says_so(
    tmp_path: Path, monkeypatch: Patch, capsys: Printed
) -> None:
    for name, why in (("nobody", "nobody"), ("here", "here: ")):
        with pytest.raises(SettingsError, match=why):
            ask(name)
    assert "protofl: this cannot work\nhere: " in output(capsys, "status", "here", status=1).err
    monkeypatch.setattr(
        "protofl_common.tools.cli.status.ask", lambda name: federation((1, "north", "online"))
    )
    assert f"{tmp_path}: no runs here" in output(capsys, "status", "here", "--runs", tmp_path).out


@pytest.fixture
def flower_home(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    name_superlink(tmp_path, free_port())


# -- what a site sees of its SuperLink ---------------------------------------------------------------------------------
class Clock(BaseHTTPRequestHandler):
    """A door whose clock goes wrong."""

    behind = timedelta()

    def do_GET(self) -> None:
        self.send_response_only(200)
        self.send_header("Date", f"{datetime.now(UTC) - self.behind:%a, %d %b %Y %H:%M:%S} GMT")
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None: ...


@pytest.fixture
def door() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Clock)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("seconds", "level"), [(0, ""), (100, "warning"), (1000, "WRONG"), (-1000, "WRONG")]
)
def test_a_wrong_clock_is_said_before_flower_refuses_it(
    seconds: int, level: str, door: HTTPServer, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Clock, "behind", timedelta(seconds=seconds))
    said = found(
        "--superlink", f"127.0.0.1:{door.server_port}", "--insecure", node='site-name="north"'
    )
    assert level_of(said, "clock ") == level
    assert level_of(said, "answers; no certificate") == ""
    assert (
        shown_by(f"[127.0.0.1]:{door.server_port}").days is None
    )  # brackets, as around an IPv6 address


def test_a_site_that_starts_says_what_is_wrong_on_the_way(
    door: HTTPServer, tmp_path: Path, monkeypatch: Patch, capsys: Printed
) -> None:
    """Of a wrong clock Flower's own log has no word: the SuperNode is "terminated gracefully"."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Clock, "behind", timedelta(seconds=600))
    monkeypatch.setattr("subprocess.Popen", MagicMock())
    monkeypatch.setattr("protofl_common.tools.site.supernode.flower_supernode", lambda: None)
    monkeypatch.setattr("protofl_common.tools.site.supernode.flwr_exit", MagicMock())
    options = [
        "--superlink",
        f"127.0.0.1:{door.server_port}",
        "--insecure",
        "--node-config",
        'site-name="north"',
    ]
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**5))
    assert main(["site", "run", *options, "--port", "0"]) == 0
    assert re.search(
        r"protofl: WRONG clock: (599|60[01]) s ahead of the SuperLink's",
        shown := capsys.readouterr().err,
    )
    assert f"protofl: WRONG writes: state-dir {tmp_path / 'runs'}: 0 MB free" in shown
    assert main(["site", "run", *options, "--port", f"{door.server_port}"]) == 1
    assert re.search(f"--port {door.server_port}: .*ddress already in use", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("days", "host", "why"), [(0, "", "expired"), (9, "10.9.8.7", "mismatch"), (9, "", "")]
)
def test_the_superlinks_certificate_is_tried(
    days: int, host: str, why: str, door: HTTPServer, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    certificates = program("certificates")
    monkeypatch.setattr(
        certificates, "SERVER_DAYS" if why else "CA_DAYS", days
    )  # it ends with its authority
    assert certificates.main([str(tmp_path), "--server", host or "127.0.0.1"]) == 0
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    door.socket = context.wrap_socket(door.socket, server_side=True)
    address = f"127.0.0.1:{door.server_port}"
    said = found("--superlink", address, "--root-certificates", "ca.crt", node='site-name="north"')
    if why:
        assert level_of(said, why) == "WRONG"
        assert level_of(said, "its operator renews it (certificates.py --renew server)") == "WRONG"
        known = (
            f'[superlink.here]\naddress = "{address}"\nroot-certificates = "{tmp_path}/ca.crt"\n'
        )
        (tmp_path / "config.toml").write_text(known)
        monkeypatch.setenv("FLWR_HOME", str(tmp_path))
        with pytest.raises(
            SettingsError, match=f"here: the SuperLink cannot be asked .*{why}.*; renew it"
        ):
            ask("here")
    else:
        assert level_of(said, f"{address}: answers; its certificate: 8 days left") == "warning"
        assert abs(shown_by(address, "ca.crt").ahead) < 60
