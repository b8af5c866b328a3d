"""The README of separate machines, executed: its blocks are run with other ports and folders.

Then what must be refused: unknown keys, no key, a certificate of another authority, and anything
but SuperNode traffic at the door.
"""

import json
import re
import shutil
import sqlite3
import ssl
import stat
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

import psutil
import pytest

from tests.support import ROOT
from tests.support.machines import HAPROXY, README, SITES, Machines, blocks_of, copy_checkout
from tests.support.processes import free_port, wait_until, without_colours
from tests.support.strangers import strangers_at

pytestmark = pytest.mark.system
OPERATIONS = ROOT / "docs" / "operations.md"


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Do what the README says up to its chapter "A run"; yield the machines."""
    with ExitStack() as running:
        machines = Machines(tmp_path_factory.mktemp("machines"), running)
        machines.set_up()
        yield machines


def test_the_readme_says_who_runs_each_block():
    num_blocks = 11  # to be changed with the page
    assert len(blocks_of(README)) == num_blocks
    assert README.read_text(encoding="utf-8").count("```sh") == num_blocks
    assert {block.machine for block in blocks_of(README)} == {"preamble", "superlink", "north"}


def test_private_files_are_private(federation):
    """Keys, the secret and the database are for their owner alone; no site has another's key."""
    certs = federation.checkout("superlink") / "certs"
    private = [certs / name for name in ("ca.key", "server.key", "superexec.secret")]
    private.append(federation.checkout("superlink") / "superlink.db")
    for site in SITES:
        certs = federation.checkout(site) / "certs"
        private.append(certs / "nodes" / site)
        files = sorted(path.name for path in certs.rglob("*") if path.is_file())
        assert files == ["ca.crt", site, f"{site}.pub"]
    for file in private:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


@pytest.fixture(scope="module")
def output_of_the_run(federation):
    """Make the run of the README's last block, while strangers knock; return what it prints."""
    *_, run = blocks_of(README)
    with strangers_refused_at(federation):
        done = federation.run("superlink", run.text, timeout=240)
    return without_colours(done.stdout + done.stderr)


def test_two_registered_sites_complete_a_run_with_strangers_at_the_door(
    federation, output_of_the_run
):
    """The run loses no reply."""
    newest, *_ = federation.runs()
    assert newest["status"] == "finished:completed", output_of_the_run + federation.logs()
    folder = federation.checkout("superlink") / "runs" / "first"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["algorithm"] == "FedTGP"
    assert {site: client["arch"] for site, client in summary["clients"].items()} == SITES
    assert sum(summary["trouble"].values()) == 0
    accuracies = [client["head"] for client in summary["accuracy-of-clients"].values()]
    assert min(accuracies) > 0.3  # by chance 0.1
    for site in SITES:
        files = federation.checkout(site).glob(f"state/first-*/clients/{site}/*")
        names = [path.name for path in files]
        assert len(names) == 2  # the state, and the model for `protofl export`
        assert "model.safetensors" in names
    if HAPROXY.exists():
        answered = requests_in_log(federation)
        assert ("200", "/v1/fleet/activate-node") in answered
        assert not {("200", f"/v1/fleet/{request}") for request in OF_EVERY_ROUND} & answered


OF_EVERY_ROUND = (
    "pull-messages",
    "send-node-heartbeat",
    "pull-object",
    "push-object",
    "confirm-message-received",
)
"""Requests that the door does not log where they are answered."""


def requests_in_log(machines):
    """Return (status, path) of each request in the door's log."""
    line = r' (\d{3}) \d+ [^"]*"[A-Z]+ (\S+) HTTP/1.1"'
    requests = set()
    for log in machines.folder.glob("superlink-*.log"):
        requests.update(re.findall(line, log.read_text()))
    return requests


@contextmanager
def strangers_refused_at(machines):
    """Let strangers knock at the door during the block, if there is a door.

    They are refused with the right status, and neither the door nor the SuperLink has had 400 MB.
    """
    if not HAPROXY.exists():
        yield
        return
    authority = machines.checkout("superlink") / "certs" / "ca.crt"
    with strangers_at(machines.door, authority) as answers:
        yield
        memory = {name: peak_memory(name) for name in ("haproxy", "flower-superlink")}
    print(answers, memory)
    # slow requests take too long (408), large ones are too large (413)
    refused = {("head", "408"), ("body", "408"), ("length", "413"), ("chunks", "413")}
    # the door closes idle connections after 30 s, and slow uploads after 5 minutes
    after_a_while = {("idle", ""), ("upload", "504")}
    assert refused <= set(answers) <= refused | after_a_while
    assert max(memory.values()) < 400, memory


def peak_memory(program):
    """Return the most MB that a program, which this process has started, has had so far."""
    pids = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if program in [Path(word).name for word in process.cmdline()[:2]]:
                pids.append(process.pid)
    (pid,) = pids
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(kilobytes) / 1000


REFUSED = {  # 2004 and 2001 are Flower's numbers
    "unregistered key": ("certs/ca.crt", "stranger/nodes/stranger", "2004"),
    "no key": ("certs/ca.crt", "", "2001"),
    "another authority": ("stranger/ca.crt", "certs/nodes/north", "CERTIFICATE_VERIFY_FAILED"),
}
"""What is wrong with a SuperNode -> its authority's certificate, its key, what it is told."""


@pytest.mark.parametrize(("authority", "key", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_supernode_without_the_right_key_or_authority_is_refused(
    authority, key, reason, federation, tmp_path
):
    """It ends with the reason, and is not listed as a node."""
    stranger = "python docker/certificates.py stranger --node stranger --server localhost"
    federation.step("north", stranger)

    command = "exec flower-supernode --superlink localhost:8000"
    command += f" --root-certificates {authority} --port {free_port()}"
    if key:
        command += f" --auth-supernode-private-key {key}"
    status, output = federation.run_until_it_ends("north", command, tmp_path / "log")

    assert status != 0, output
    assert reason in output
    listed = federation.run("superlink", "flwr supernode list federation --format json")
    statuses = [node["status"] for node in json.loads(listed.stdout)["nodes"]]
    # north's old key may be listed, if the operators' page has given it a new one by now
    assert len(statuses) - statuses.count("unregistered") == len(SITES)


@pytest.mark.skipif(
    not HAPROXY.exists(), reason=f"the door needs {HAPROXY} (apt-get install haproxy)"
)
def test_the_door_is_for_supernodes_only(federation):
    """It answers 404 to all but health and the paths of SuperNodes, whatever their spelling.

    The SuperLink itself, which only its own machine can reach, knows the other paths. What the door
    passes on and the SuperLink refuses is in the door's log.
    """
    assert ask(federation, federation.door, "/health") == 200
    for path in (
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/runtime/acquire-task",
        "/docs",
        "/health?x=1",
        "/v1/fleet/../control/list-runs",
        "/v1/fleet/%2e%2e/control/list-runs",
        "/v1/fleet//x",
    ):
        assert ask(federation, federation.door, path, b"") == 404, path
    assert ask(federation, federation.superlink, "/v1/control/list-runs", b"") != 404
    refused = ask(federation, federation.door, "/v1/fleet/pull-object", b"")
    assert refused != 200
    line = (str(refused), "/v1/fleet/pull-object")
    wait_until(lambda: line in requests_in_log(federation), federation.logs, timeout=30)


def test_the_superlink_itself_listens_for_its_own_machine_alone(federation):
    listening = [link.laddr for link in psutil.net_connections() if link.status == "LISTEN"]
    assert {ip for ip, port in listening if port == federation.superlink} == {"127.0.0.1"}


def ask(machines, port, path, data=None):
    """Return the status with which a port of the SuperLink's machine answers a request.

    It is a POST with ``data``, or a GET.
    """
    authority = machines.checkout("superlink") / "certs" / "ca.crt"
    context = ssl.create_default_context(cafile=str(authority))
    opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))
    try:
        with opener.open(Request(f"https://127.0.0.1:{port}{path}", data), timeout=5) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def test_a_worker_without_the_secret_gets_nothing(federation, tmp_path):
    command = "exec protofl worker --runtime-api-address 127.0.0.1:8001"
    command += " --root-certificates certs/ca.crt"
    # it says nothing itself
    federation.run_until_it_ends("superlink", command, tmp_path / "log")
    assert '"POST /v1/runtime/acquire-task HTTP/1.1" 401' in federation.logs()


# -- docs/operations.md, on what stands ------------------------------------------------------------
def nodes(machines):
    """Return site -> (node, state), as `protofl status` shows them."""
    shown = machines.run("superlink", "protofl status federation", timeout=240)
    assert shown.returncode in (0, 3), shown.stderr  # 3: a site is offline, or the last run failed
    found = {}
    for line in shown.stdout.splitlines():
        name, node, state = line.split()[:3]
        if state in ("online", "offline", "registered"):
            found[name] = (node, state)
    return found


def wait_for_nodes(machines, wanted):
    """Wait until `nodes` are as ``wanted`` says, and return them."""

    def found():
        shown = nodes(machines)
        return shown if wanted(shown) else {}

    return wait_until(found, machines.logs, timeout=120)


def is_online(found, site):
    """True if a site is online, by what `nodes` returns."""
    _node, state = found[site]
    return state == "online"


@pytest.mark.usefixtures("output_of_the_run")  # before it, a site has no models to retain
def test_the_operators_page(federation):
    """The page's blocks run in order. North gets a new key at the end, and nobody else notices."""
    before = wait_for_nodes(federation, lambda found: all(is_online(found, site) for site in SITES))

    for block in blocks_of(OPERATIONS):
        done = federation.run(block.machine, block.text, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr + federation.logs()
        if block.machine == "north":
            federation.carry("north", "superlink", "nodes/north.pub")

    backup = federation.checkout("superlink") / "backup" / "superlink.db"
    with sqlite3.connect(backup) as copy:
        assert copy.execute("PRAGMA integrity_check").fetchone() == ("ok",)

    def north_is_back(found):
        return found["north"] != before["north"] and is_online(found, "north")

    now = wait_for_nodes(federation, north_is_back)
    node_before, _state = before["north"]
    node_now, _state = now["north"]
    assert node_now != node_before
    assert now["south"] == before["south"]


def chapter(title, kind="sh superlink"):
    """Return the blocks of a kind in a chapter of the operators' page."""
    page = OPERATIONS.read_text(encoding="utf-8")
    (text,) = re.findall(rf"(?ms)^## {title}\n(.*?)(?=^## |\Z)", page)
    return re.findall(rf"(?ms)^```{kind}\n(.*?)^```", text)


def start_run_to_stop(machines):
    """Start the README's run with eight rounds; return its number once it is in its second.

    The test then stops it.
    """
    *_, run = blocks_of(README)
    folder = machines.checkout("superlink") / "runs" / "first"
    shutil.rmtree(folder, ignore_errors=True)
    command = next(line for line in re.split(r"(?<!\\)\n", run.text) if line.startswith("flwr run"))
    machines.step("superlink", command.replace("--stream", "").replace("rounds=2", "rounds=8"))
    wait_until(lambda: list(folder.glob("checkpoints/000001*")), machines.logs)

    newest, *_ = [run for run in machines.runs() if not run["status"].startswith("finished")]
    return str(newest["run-id"])


def upgrade(machines):
    """Give all machines newer code, which makes the file ``newer`` where a client runs it."""
    for machine in machines.services:
        copy_checkout(machines.checkout(machine))
        with (machines.checkout(machine) / "client_app" / "app.py").open("a") as code:
            code.write("\nimport pathlib; pathlib.Path('newer').touch()\n")


@pytest.mark.long
def test_what_else_the_operators_page_says(federation):
    """The chapters on stopping, backup, certificates, upgrade and erasure, in one story.

    A run is stopped; the SuperLink loses its database and gets the backup's, in which a guest is
    not registered; all get newer code; the run goes on. Then north erases what it keeps, and
    south's key is revoked for good.
    """
    (stopping,) = chapter("Stop and resume", kind="sh superlink stopping")
    stop, resume = stopping.splitlines()
    renew, rotate = chapter("Certificates and keys")
    number = start_run_to_stop(federation)
    federation.step("superlink", f"RUN={number}\n{stop}")

    federation.step("superlink", *chapter("Backup and restore"))
    register_guest = "flwr supernode register certs/nodes/guest.pub federation --name guest"
    federation.step("superlink", "python docker/certificates.py certs --node guest")
    federation.step("superlink", register_guest)
    assert "guest" in nodes(federation)

    def meanwhile():
        federation.step("superlink", *chapter("Backup and restore", kind="sh superlink restoring"))
        federation.step("superlink", renew)
        upgrade(federation)

    federation.restart(meanwhile)
    checkout = federation.checkout("superlink")
    shown = ssl.get_server_certificate(("127.0.0.1", federation.door))
    assert (checkout / "certs" / "server.crt").read_text().startswith(shown.strip())
    assert set(nodes(federation)) == set(SITES)
    federation.step("north", *chapter("Upgrade", kind="sh north upgrading"))

    done = federation.run("superlink", resume, timeout=400)
    summary = json.loads((checkout / "runs" / "first" / "summary.json").read_text())
    assert summary["rounds"] == 8, done.stdout + done.stderr
    assert len(summary["resumed-after-rounds"]) == 1, done.stdout + done.stderr
    assert sum(summary["trouble"].values()) == 0
    assert "no model of an earlier round" not in federation.logs()
    assert "resuming with other code" in done.stdout
    for site in SITES:
        assert (federation.checkout(site) / "newer").exists()
    assert "round 1/8" in federation.run("superlink", f"flwr log {number} federation --show").stdout

    federation.step("north", *chapter("Retention and erasure", kind="sh north purging"))
    assert list((federation.checkout("south") / "state").rglob("*.safetensors"))
    assert not list((federation.checkout("north") / "state").rglob("*.safetensors"))

    revoke, register = rotate.replace("north", "south").splitlines()
    federation.step("superlink", revoke)
    wait_for_nodes(federation, lambda found: set(found) == {"north"})
    again = federation.run("superlink", register)
    assert "Public key already in use" in again.stdout + again.stderr
