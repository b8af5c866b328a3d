"""``protofl site``: whose code a site runs, and what it says a run could make it do."""

import io
import json
import os
import re
import shlex
import stat
import subprocess
import sys
import threading
import time
import tracemalloc
import zipfile
from argparse import SUPPRESS
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import psutil
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.supercore.superexec.executor import LaunchResultStatus
from flwr.supernode import start_client_internal as supernode
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode
from flwr.supernode.runtime import run_clientapp
from PIL import Image

from client_app.site.audit import append
from protofl_common.config.options import SettingsError
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import app_folder, default_run_config, digest_of
from protofl_common.privacy.plan import Mechanism, epsilon
from protofl_common.tools.cli import main
from protofl_common.tools.executor import Executor, environment_of_own_code
from protofl_common.tools.site.check import _algorithms
from protofl_common.tools.site.client_process import handle, installed_code, received
from protofl_common.tools.site.node import SUPERNODE_OPTIONS, node_config, site_settings
from protofl_common.tools.superlink import Endpoint
from protofl_common.tools.task_process import written_task
from protofl_common.wire.records import pack_settings
from protofl_common.wire.refusal import refusal_in
from tests.support import ROOT
from tests.support.fakes import task
from tests.support.harness import LocalGrid, run_config, run_federation
from tests.support.processes import output_of
from tests.support.programs import program
from tests.support.sites import NODE, findings_of_check, level_of, make_site_keys, write_images

CLIENT_PROCESS = "protofl_common.tools.site.client_process"
SITE_CHECK = "protofl_common.tools.site.check"
SUPERNODE = "protofl_common.tools.site.supernode"
IDENTITY = ("protofl/protofl", "0.1.0", "what the SuperLink says of the hash")
certificates = program("certificates")


# -- whose code -----------------------------------------------------------------------------------
@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setattr("sys.path", [*sys.path])  # Flower adds where it loads an app from
    return tmp_path


def run_site(monkeypatch, flower, node=NODE):
    """Type ``protofl site run`` with ``flower`` in the place of Flower's SuperNode.

    Return the stand-in for `subprocess.Popen`, which would start the clients.
    """
    started = MagicMock()
    started.return_value.poll.return_value = None
    exits = MagicMock()
    monkeypatch.setenv("FLWR_LOG_LEVEL", "INFO")  # the command would change the log of this process
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("subprocess.Popen", started)
    monkeypatch.setattr("flwr.supernode.cli.flower_supernode", flower)
    monkeypatch.setattr(f"{SUPERNODE}.end_supernode", exits)

    assert main(["site", "run", "--insecure", "--port", "0", "--node-config", node]) == 0

    exits.assert_called_once()  # or Flower's own thread would keep a process without a SuperLink
    return started


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("identity", [IDENTITY, ("", "", "")], ids=["named", "nameless"])
def test_the_installed_code_is_loaded_whatever_run_it_is(identity):
    assert isinstance(installed_code(str(ROOT))(*identity), ClientApp)
    assert Path(sys.modules["client_app.app"].__file__) == ROOT / "client_app" / "app.py"


def test_a_message_that_cannot_be_read_ends_its_process_at_once(monkeypatch, capfd):
    """A task that ended in order would leave the SuperNode waiting for its reply for ever.

    One message has a part that is no valid record, another more bytes than are allowed.
    """
    exits = MagicMock()
    monkeypatch.setattr("os._exit", exits)
    message = RecordDict(
        {"round": ConfigRecord({"spoilt": 1}), "zeros": ArrayRecord([np.zeros(10**6)])}
    )
    tree = get_object_tree(message)
    parts = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}

    def spoilt_part(name):
        return parts[name].replace(b"spoilt", b"\xff" * 6)

    assert received(tree, parts.__getitem__, str) == message

    received(tree, spoilt_part, str)
    monkeypatch.setattr(f"{CLIENT_PROCESS}.LARGEST", 7 * 10**6)  # the zeros have 8 million
    received(tree, parts.__getitem__, str)

    assert exits.call_count == 2

    unreadable = "protofl: a message that cannot be read:"
    expected = f"{unreadable} DecodeError: .+\n{unreadable} ValueError: .+\n"

    assert re.fullmatch(expected, capfd.readouterr().err)

    for thread in threading.enumerate():
        if thread.name.startswith("ThreadPoolExecutor"):  # Flower does not wait for its own
            thread.join()


@pytest.mark.parametrize("replies", [False, True])
def test_a_task_that_ends_without_a_reply_ends_its_process_at_once(replies, monkeypatch):
    """Whatever the reason is, the SuperNode would wait for that reply for ever."""
    exits = MagicMock()
    ends_in_order = MagicMock()

    def flower_clientapp():
        if replies:
            run_clientapp.push_message()
        run_clientapp.push_task_output()

    monkeypatch.setattr("sys.argv", [""])
    monkeypatch.setattr("os._exit", exits)
    monkeypatch.setattr(f"{CLIENT_PROCESS}.flwr_clientapp", flower_clientapp)
    monkeypatch.setattr(run_clientapp, "push_message", MagicMock())
    monkeypatch.setattr(run_clientapp, "push_task_output", ends_in_order)

    handle(str(ROOT), [])

    assert exits.called is not replies
    assert ends_in_order.called is replies


def bomb():
    """Return a bundle of a few hundred kilobytes whose pyproject.toml has 300 megabytes."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pyproject.toml", b"#" * 300_000_000)
    return packed.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("bundle", ["broken", "bomb"])
def test_a_supernode_reads_nothing_of_a_bundle(bundle, monkeypatch):
    """Flower's own function is called for a message of an unknown run, as ``site run`` patches it.

    The run's settings are the defaults that are installed, with what the run itself changes.
    """
    content = b"no zip" if bundle == "broken" else bomb()
    run = Run.create_empty(5)
    run.override_config = {"lr": 0.5, "no-such-key\n\x1b[31m": 1}
    message = MagicMock()
    message.metadata.run_id = 5
    state = MagicMock()
    state.get_run.return_value = None

    def a_supernode():
        supernode._pull_and_store_message(
            state, MagicMock(), {}, lambda: (message, MagicMock()), lambda _: run,
            lambda *_: Fab("hash", content, {}), MagicMock(), MagicMock(), None,
        )  # fmt: skip

    tracemalloc.start()
    run_site(monkeypatch, a_supernode)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak_bytes < 50e6
    assert state.store_message.called

    context = state.set_run_series_context.call_args.args[1]
    assert context.run_config == default_run_config() | run.override_config


def test_defaults_that_are_not_the_sites_are_refused_and_not_overlooked(home):
    config = run_config(home, dataset="digits", partition="iid")
    grid = LocalGrid(config, {7: {"site-name": "north"}})

    for content in ({}, pack_settings(digest_of(config | {"lr": 0.123}))):
        reply = grid.ask(Message(RecordDict({**content}), 7, MessageType.QUERY, group_id="0"))
        assert "other defaults; install the same version on both" in refusal_in(reply).text


FORKED = """
import os, sys
from protofl_common.tools.task_process import handle_tasks
handled = []
def handle(arguments):
    handled.append(arguments)  # of this child alone
    line = f"{os.getpid() != parent} {handled} {sys.stdin.buffer.raw.read()}\\n"
    print(line, end="")  # in one piece: three write
    if arguments == ["b"]:
        raise ValueError("of b alone")
    sys.exit(1)
parent = os.getpid()
handle_tasks("fork", lambda: print("ahead", flush=True), handle)
"""


@pytest.mark.slow
def test_a_task_is_handled_by_a_forked_process_that_knows_nothing_of_others():
    """Three tasks, a, b and c; b raises an error, and the others exit with 1."""
    command = [sys.executable, "-c", FORKED]
    lines = "".join(written_task([name]) + "\n" for name in "abc")
    done = subprocess.run(command, input=lines, capture_output=True, text=True)

    each_alone = [f"True [['{name}']] b''" for name in "abc"]
    assert sorted(done.stdout.splitlines()) == [*each_alone, "ahead"]
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("ValueError: of b alone") == 1
    assert done.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process of its parent's end"
)
def test_a_message_whose_site_has_ended_ends_too():
    """The process that forks is killed, and the one that it has forked must end."""
    program = """
import os, time
from protofl_common.tools.task_process import end_with_parent, handle_tasks
def handle(arguments):
    end_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(600)
handle_tasks("fork", int, handle)
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as parent:
        print(written_task([]), file=parent.stdin, flush=True)
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()

    child.wait(timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_task_that_flower_has_taken_back_is_left_and_said_to_be_slow(method):
    """Flower's own words are that a user has stopped it."""
    tasks = f"from protofl_common.tools.task_process import *; handle_tasks('{method}', int, print)"
    late = json.dumps({"launched": time.time() - 35, "arguments": ["late"]})  # 30 s are allowed
    lines = f"{late}\n{written_task(['soon'])}\n"
    command = [sys.executable, "-c", tasks]
    done = subprocess.run(command, input=lines, capture_output=True, text=True)

    assert re.search(r"this machine needed \d+ s to start .*, and Flower allows 30: ", done.stderr)
    assert done.stdout == ("['soon']\n" if method == "fork" else "")


def test_the_process_that_forks_is_started_again_when_it_has_died():
    """The process reads one task and ends; only then does ``reconcile`` start it again."""
    reads_one_line = "import sys; print(sys.stdin.readline(), file=sys.stderr)"
    executor = Executor(TaskType.CLIENT_APP, [], "fork")
    executor.command = [sys.executable, "-Sc", reads_one_line]
    started = []

    for _ in range(2):
        executor.reconcile()
        executor.reconcile()
        started.append(executor.forking)
        assert executor.launch(task(TaskType.CLIENT_APP)).status == LaunchResultStatus.ACCEPTED
        assert executor.forking.wait() == 0

    assert started[0].pid != started[1].pid


def test_a_site_asks_soon_at_first_and_as_seldom_as_flowers_own_in_the_end(monkeypatch):
    """Each wait is a tenth of the time since the last work.

    It is at least a tenth of Flower's own wait, which is 3 s for work and 0.5 s for the reply, and
    at most all of it. When Flower begins to wait for something else, the time begins anew.
    """
    now = 1000.0
    waits = []

    def sleep(seconds):
        nonlocal now
        now += seconds
        waits.append(seconds)

    def a_site():
        for _ in range(60):  # for work
            supernode.time.sleep(3)
        supernode.time.sleep(0.5)  # for the reply
        supernode.time.sleep(3)

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("time.monotonic", lambda: now)
    run_site(monkeypatch, a_site)

    assert waits[:11] == pytest.approx([0.3] * 11)  # until ten waits have taken 3 s
    assert waits[20] == pytest.approx(sum(waits[:20]) / 10)
    assert waits[59] == 3
    assert waits[60:] == pytest.approx([0.05, 0.3])


UNKNOWN_HOME = NODE.replace('"state"', '"~not-here/x"')
MISTYPED = 'site-name="north" state-dri="state"'
CLASSES_AS_A_LIST = NODE.replace('"cat,dog"', '["cat","dog"]')


@pytest.mark.parametrize(("action", "node", "reason"), [
    ("run", "partition-id=0 num-partitions=2", "node config without a site-name"),
    ("run", 'site-name="north" alow-download=true', "alow-download: unknown key"),
    ("run", 'site-name="north" data-dir = "data"',
        "Flower reads only site-name; no spaces at ="),
    ("run", 'site-name="north" allow-algorithms="fedprotto"', "'fedprotto': choose from"),
    ("key", "", "node config without a site-name"),
    ("key", UNKNOWN_HOME, "state-dir = '~not-here/x': this machine has no"),
    ("run", "marked.toml", "'marked.toml': Invalid statement (at line 1, column 1)"),
    ("run", "~not-here/north.toml",
        "'~not-here/north.toml': Could not determine home directory"),
    ("key", CLASSES_AS_A_LIST, 'as one text with commas, as in classes="a,b"'),
    ("key", "north.conf", "or a file not called .toml: taken for a simulated client"),
    ("key", 'site-name="mount sinai"', "'mount sinai' must be made of at most 100 ASCII letters"),
    ("key", MISTYPED, "state-dri: unknown key; did you mean state-dir?"),
    ("status", MISTYPED, "state-dri: unknown key"),
    ("purge", MISTYPED, "state-dri: unknown key"),
    ("status", "partition-id=0", "node config without a site-name"),
    ("purge", "partition-id=0", "node config without a site-name"),
    ("approve first.toml --runs=0", NODE, "--runs 0: must be at least 1"),
])  # fmt: skip
def test_a_site_does_nothing_by_a_wrong_node_config_or_number(action, node, reason, site, capsys):
    """The command fails with a reason, and no folder of the site is made."""
    (site / "marked.toml").write_text(NODE.replace(" ", "\n"), encoding="utf-8-sig")

    assert site_command(action, node) == 1

    assert reason in capsys.readouterr().err
    assert not [*site.rglob("sites")]


@pytest.mark.parametrize(("action", "words"), [
    ("run", "--isolation=subprocess"),
    ("run", "--allow-runtime-dependency-installation"),
    ("run", "--until 2027-01-01"),
    ("run", "partition=own"),
    ("key", "--start-method spawn"),
    ("deny", "--runs 5"),
    ("approve", "--untill=2027-01-01"),
])  # fmt: skip
def test_an_action_refuses_options_that_are_not_its_own(action, words, site, capsys):
    """The parser does not know them."""
    request = " first.toml" if action in ("approve", "deny") else ""

    with pytest.raises(SystemExit):
        site_command(f"{action}{request} {words}")

    refused = f"protofl site {action}: error: unrecognized arguments: {words}\n"
    assert capsys.readouterr().err.endswith(refused)
    assert not [*site.rglob("sites")]


REFUSED = {
    *("--isolation", "--superexec-auth-secret-file", "--allow-runtime-dependency-installation"),
    *("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certfile", "--auth-supernode-public-key"),
}


def test_each_of_flowers_options_is_taken_or_refused_on_purpose():
    """A new version of Flower may have an option that nobody has decided on."""
    flowers = set()
    for option in _parse_args_run_supernode()._actions:
        if option.help != SUPPRESS:
            flowers.add(option.option_strings[-1])
    taken = {f"--{name}" for name in SUPERNODE_OPTIONS}

    assert taken | REFUSED | {"--node-config", "--insecure", "--help", "--version"} == flowers


@pytest.mark.slow
@pytest.mark.parametrize(("given", "enabled"), [({}, "0"), ({"FLWR_TELEMETRY_ENABLED": "1"}, "1")])
def test_flowers_makers_hear_of_a_site_only_if_its_operator_says_so(given, enabled):
    """The site runs in a process of its own: Flower reads the variable when it is imported."""
    code = "import protofl_common.tools.cli.site, flwr.supercore.telemetry as telemetry\n"
    code += "print(telemetry.FLWR_TELEMETRY_ENABLED)"
    others = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_")}

    assert output_of([sys.executable, "-c", code], others | given) == f"{enabled}\n"


# -- what a run could make a site do --------------------------------------------------------------
@pytest.fixture
def site(home, monkeypatch):
    """A well-kept site: data, cache and state in the current folder, closed to other users."""
    monkeypatch.chdir(home)
    monkeypatch.setenv("FLWR_HOME", str(home / "flwr"))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr(f"{SITE_CHECK}.FEW_BYTES", 0)  # this disk may be full
    write_images(home / "data", *eight_each("cat", "dog"))
    (home / "data").chmod(0o750)
    (home / "cache").mkdir(mode=0o700)
    (home / "state").mkdir(mode=0o700)
    return home


def eight_each(*classes):
    """Yield the names of eight images of each of these classes."""
    for name in classes:
        for number in range(8):
            yield f"{name}/{number}.png"


def levels_of(node):
    return {finding.level for finding in findings_of_check(node=node)}


def test_a_well_kept_site_has_nothing_to_be_warned_of(site, monkeypatch):
    """Every finding of the check is a plain one, and nothing is written."""
    run_id = "flwr.supercore.task_identity.TaskIdentity._run_id"
    monkeypatch.setattr(run_id, None)  # as in a process of its own
    findings = findings_of_check(dataset="image-folder", partition="own", image_size=8)

    assert {finding.level for finding in findings} == {""}, findings

    text = "\n".join(f"{finding.topic} {finding.text}" for finding in findings)
    assert "data 12 training and 4 test samples, 2 classes: cat, dog" in text
    assert f"writes state-dir {site / 'state'} (mode 0700)" in text
    assert f"writes FLWR_HOME {site / 'flwr'}: will be made, for this user only" in text
    assert "sends a prototype of each class, with the number of samples behind it: fedproto" in text

    limits = (
        "max-rounds 2000, max-epochs 100, max-steps 10000, max-batch-size 1024, max-honest-sites 1"
    )

    assert f"{limits}, max-image-size 512" in text

    # a check writes nothing into the folder, its cache or its state
    left = {path.name for path in (*site.iterdir(), *site.glob("[cs]*/*"))}
    assert left == {"data", "cache", "state"}

    run_site(monkeypatch, MagicMock())
    assert stat.S_IMODE((site / "flwr").stat().st_mode) == 0o700


@pytest.mark.parametrize(("demand", "unable"), [
    ("require-secagg=true", {"fedtgp", "scaffold"}), ('require-dp="epsilon<=2"', {"mpft", "ditto"}),
])  # fmt: skip
def test_a_site_is_told_only_of_algorithms_that_meet_its_demands(demand, unable, site):
    """The findings "sends" name the algorithms in which the site could take part."""
    node = NODE.replace("fedproto", "all").replace('"state"', f'"{site / "state"}"')

    algorithms = set()
    for finding in findings_of_check(node=f"{node} {demand}"):
        if finding.topic == "sends":
            algorithms.update(finding.text.rpartition(": ")[2].split(", "))

    assert {"fedproto", "fedavg", "fedpcl"} <= algorithms  # FedPCL by some of its settings only
    assert not unable & algorithms


PEERS = f"east:{'e' * 43},south:{'s' * 43}"
LONG_PATH = "x" * 300  # pathlib's exists() raises for it
WITHOUT_DATA = NODE.partition(" data-dir")[0]


@pytest.mark.parametrize(("options", "node", "level", "text"), [
    ([], 'partition-id=0 num-partitions="2"', "WRONG", "taken for a simulated client"),
    ([], NODE + " alow-download=true", "WRONG", "alow-download: unknown key"),
    ([], NODE + " max-epochs=0", "WRONG", "max-epochs = 0 must be"),
    ([], NODE.replace('"data"', f'"{LONG_PATH}"'), "WRONG", "there is none"),
    ([], NODE + " allow-download=true", "warning", "downloads a run may"),
    ([], NODE + " approve=false", "warning", "approval none: a run takes part"),
    ([], WITHOUT_DATA, "warning", "approval none: a run takes part"),
    ([], NODE + " partition-id=0", "warning", "approval none: a run takes part"),
    ([], NODE + " require-secagg=true", "warning", "cannot know who the others are"),
    ([], f"{NODE} require-secagg=true peers={PEERS!r}", "", "peers a sum needs 2 of east, south"),
    ([], NODE + ' require-secagg=true peers="east"', "WRONG", "peers: 'east' must be NAME:KEY"),
    ([], NODE.replace("fedproto", "all"), "warning", "weights a server that chooses the weights"),
    ([], NODE + ' allow-python="mynets"', "warning", "imported and called: mynets"),
    ([], NODE.replace("fedproto", "all"), "warning", "all weights of the model: ditto, fedavg"),
    ([], NODE.replace("fedproto", "fedgen"), "warning",
        "the head weights of the model and how many samples"),
    ([], NODE.replace("fedproto", "fedbn"), "warning",
        "of the model but its normalisation layers: fedbn"),
    ([], NODE + " partition-id=0 num-partitions=2", "warning", "runs choose the test samples"),
    ([], NODE + ' on-request="/bin/tell-me"', "WRONG", "on-request /bin/tell-me: no program"),
    ([], NODE + ' on-trouble="echo disk"', "WRONG", "on-trouble echo disk: no program"),
    (["--insecure"], NODE, "warning", "anybody on the way"),
    (["--superlink", "my.host:8000"], NODE, "warning", "key none"),
    (["--auth-supernode-private-key", "absent"], NODE, "WRONG", "absent: cannot be read"),
    (["--root-certificates", "data/cat/0.png"], NODE, "WRONG", "certificates data/cat/0.png"),
])  # fmt: skip
@pytest.mark.usefixtures("site")
def test_what_is_wrong_or_worth_a_warning_comes_first(options, node, level, text):
    """``text`` is part of a finding of this level ("": a plain one)."""
    make_site_keys(north=Path("state/sites/north"))

    findings = findings_of_check(*options, node=node)

    assert level_of(findings, text) == level
    assert findings[0].level == level


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("of_a_run", [
    {},
    {"dataset": "image-folder", "partition": "own", "image_size": 8},
])  # fmt: skip
def test_a_device_that_cannot_be_used_is_wrong(of_a_run, monkeypatch):
    # A CUDA device is made to repeat exactly, for the rest of a process, before its first use.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *_, **__: None)

    findings = findings_of_check(node=NODE + ' device="cuda:77"', **of_a_run)

    assert level_of(findings, "device = 'cuda:77': not usable here") == "WRONG"


ALWAYS = "always: its name, model (architecture, size), inputs (shape, columns as 16 bits), device"
FIGURES = "numbers of samples and of right predictions"


@pytest.mark.parametrize(("demands", "more"), [
    ("", f", seconds, which classes it has; {FIGURES}, losses, metrics"),
    (" min-class-samples=5",
        f", seconds, which classes it has; {FIGURES}, rounded to multiples of 5, metrics"),
    (' require-dp="epsilon<=8"', f"; {FIGURES}"),
    (" require-secagg=true", f", seconds; {FIGURES}, losses, metrics, in the sum alone"),
    (' require-secagg=true require-dp="epsilon<=8"',
        f"; {FIGURES}, in the sum alone; its number of training samples, exact"),
])  # fmt: skip
def test_what_always_leaves_follows_from_the_demands(demands, more, site):
    node = NODE.replace('"state"', f'"{site / "state"}"')
    texts = [finding.text for finding in _algorithms(node_config(node + demands))]
    always = [text for text in texts if text.startswith("always")]
    assert always == [f"{ALWAYS}, class names{more}"]


@pytest.mark.usefixtures("site")
def test_a_strict_site_is_not_called_wrong_for_what_runs_ask_by_default():
    """Only a run that really asks for more than the site's limits is refused."""
    strict = NODE.replace("fedproto", "fedtgp") + " max-epochs=1 max-rounds=2 max-batch-size=3"
    asked = {"algo": "fedtgp", "partition": "own", "local_epochs": 1}
    asked |= {"batch_size": 3, "eval_batch_size": 3}

    assert levels_of(strict) == {""}

    refusal = (
        "rounds = 3: this site takes at most 2; its operator may raise max-rounds (node config)"
    )

    assert findings_of_check(node=strict, rounds=3, **asked)[0].text == refusal


def test_folders_that_others_may_look_into_are_warned_of(site):
    """All three have the mode 0755."""
    folders = [site / "data", site / "state", site / "cache"]
    for folder in folders:
        folder.chmod(0o755)

    findings = findings_of_check()

    for folder in folders:
        text = f"{folder}: other users of this machine may look in (mode 0755)"
        assert level_of(findings, text) == "warning"


def test_a_private_key_that_others_may_read_or_that_flower_does_not_take_is_wrong(
    site, monkeypatch
):
    """Its content is no key; later it seems to be protected by a password."""
    key = site / "key"
    key.write_text("secret")

    def level_of_key(text):
        return level_of(findings_of_check("--auth-supernode-private-key", "key"), f"key: {text}")

    key.chmod(0o640)
    assert level_of_key("other users of this machine may read it") == "WRONG"

    key.chmod(0o600)
    assert level_of_key("no private key that Flower takes") == "WRONG"

    protected = MagicMock(side_effect=TypeError("Key is password-protected"))
    monkeypatch.setattr(f"{SITE_CHECK}.load_ssh_private_key", protected)

    assert level_of_key("no private key that Flower takes") == "WRONG"


@pytest.mark.parametrize(("free_bytes", "text", "level"), [
    (10**5, "0 MB free", "WRONG"), (10**7, "10 MB free", "warning"),
])  # fmt: skip
def test_a_disk_that_is_almost_full_is_told(free_bytes, text, level, site, monkeypatch):
    """Below 1 GiB is a warning; less than 1 MB is told as 0 MB, with which no site can work."""
    monkeypatch.setattr(f"{SITE_CHECK}.FEW_BYTES", 2**30)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free_bytes))
    assert level_of(findings_of_check(), f"{site / 'state'}: {text}") == level


def test_files_of_a_site_that_others_may_read_or_it_cannot_use_are_wrong(site, monkeypatch):
    """A restore as root leaves such files.

    The site may remove a file while its folder is read, which must not stop the check.
    """
    sites = site / "state/sites"
    key = sites / "north/site.key"
    weights = site / "state/first-1/clients/north/weights"
    make_site_keys(north=sites / "north")
    key.chmod(0o644)

    assert levels_of(NODE) == {""}  # nobody may look into these folders

    for parent in key.parents[:3]:
        parent.chmod(0o755)
    weights.parent.mkdir(parents=True)
    weights.touch(mode=0o644)
    for file in (key, weights):
        text = f"{file}: other users of this machine may read it; chmod 600"
        assert level_of(findings_of_check(), text) == "WRONG"

    def walk(top):
        """List a file that is gone when it is looked at."""
        if top.name == "privacy":
            return [(str(top / "gone"), [], ["gone.tmp"])]
        return []

    monkeypatch.setattr("os.access", lambda path, mode: Path(path) not in (key, sites))
    assert level_of(findings_of_check(), f"{key}: this user cannot read or write it") == "WRONG"

    monkeypatch.setattr("os.walk", walk)
    assert level_of(findings_of_check(), f"{sites}: this user cannot read or write it") == "WRONG"


@pytest.mark.parametrize(("days", "level"), [(-0.01, "WRONG"), (29.1, "warning"), (300.1, "")])
def test_a_certificate_with_few_days_left_is_warned_of_and_one_without_any_is_wrong(
    days, level, site, monkeypatch
):
    monkeypatch.setattr(certificates, "CA_DAYS", days)
    certificates.make_ca(site)
    assert level_of(findings_of_check("--root-certificates", "ca.crt"), "certificates") == level


def site_command(words, node=NODE):
    return main(["site", *words.split(), "--node-config", node])


def test_data_and_a_study_that_a_run_cannot_use_are_wrong(site, capsys):
    """A check without a run's settings does not read the data, and finds nothing wrong."""
    (site / "data/cat/0.png").write_text("no image")
    check = "check dataset=image-folder partition=own image-size=8"
    study = f"study=s study-sites=north:{'A' * 43} study-by=jane:{'A' * 43} study-signature=ab"

    assert site_command(check) == 1

    wrong = capsys.readouterr().out.splitlines()[0]
    assert wrong.startswith("WRONG   data          ")
    assert "0.png is not a readable image" in wrong  # in full, where a server learns only the kind

    assert site_command(f"{check} {study}") == 1
    assert "WRONG   settings      study-signature: not jane:" in capsys.readouterr().out

    assert site_command("check") == 0
    assert stat.S_IMODE((site / "state").stat().st_mode) == 0o700


def test_a_check_whose_look_at_the_data_fails_shows_all_other_findings(site, capsys, monkeypatch):
    """The error is none of the data."""

    def full_memory(settings):
        raise MemoryError

    monkeypatch.setattr("protofl_common.data.store.open_data", full_memory)

    assert site_command("check dataset=image-folder partition=own image-size=8") == 1

    shown = capsys.readouterr().out
    assert "WRONG   data          MemoryError()" in shown
    assert "state-dir" in shown


def test_a_check_names_unreadable_and_odd_images(site, capsys):
    """Beside equal images stand a grey one, a wide one and one that cannot be read."""
    rng = np.random.default_rng(0)
    for number in range(4):
        pixels = rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(site / f"data/dog/other-{number}.png")
    Image.new("L", (8, 8), 7).save(site / "data/cat/plain.png")
    Image.fromarray(rng.integers(0, 255, (8, 32, 3), dtype=np.uint8)).save(site / "data/cat/b.png")
    (site / "data/cat/0.png").write_text("no image")
    # one of 22 images is broken, and a fifth of them may be
    check = "check --quality dataset=image-folder partition=own image-size=8 max-unreadable=0.2"

    assert site_command(check) == 0

    shown = capsys.readouterr().out
    assert "images cannot be read, and are left out" in shown
    assert "data/cat/0.png is not a readable image" in shown

    for odd in (
        "of one colour: ",
        "of other channels than RGB: ",
        "of sizes unlike the rest, 8×8: ",
    ):
        (line,) = [line for line in shown.splitlines() if odd in line]
        assert line.startswith("warning quality       1 images")

    assert "b.png (32×8)" in shown


def test_without_its_audit_log_a_site_approves_nothing(site, capsys):
    """A folder stands where the log would be written."""
    (site / "first.toml").write_text('partition="own"')
    folder = site / "state/sites/north"
    (folder / "audit.jsonl").mkdir(parents=True)  # as on a full disk, the log cannot be written

    assert site_command("approve first.toml") == 1
    assert "audit.jsonl cannot be written" in capsys.readouterr().err
    assert site_command("key") == 0
    assert capsys.readouterr().err == f"{folder / 'site.key'} is new\n"


@pytest.mark.parametrize("words", [
    "approve first.toml", "deny first.toml", "key", "purge first", "run",
])  # fmt: skip
def test_root_does_nothing_in_the_folder_of_another_user(words, site, monkeypatch, capsys):
    """The user seems to be root, and the folder is not root's."""
    (site / "first.toml").write_text('partition="own"')
    folder = site / "state/sites/north"
    folder.mkdir(parents=True)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    if os.getuid() == 0:  # else the folder is another user's than root's anyway
        os.chown(folder, 1, 1)

    assert site_command(words) == 1
    assert "is another user's; type it as that one: sudo -u" in capsys.readouterr().err


# -- a site with demands --------------------------------------------------------------------------

BOTH = 'require-dp="epsilon<=8 delta<=1e-6" require-secagg=true min-class-samples=5'
DEMANDS = {
    "dp": 'require-dp="epsilon<=8"',
    "dp and delta": "require-dp='epsilon<=8 delta<=1e-6'",
    "secagg": "require-secagg=true",
    "both": f"{BOTH} max-rounds=1 max-epochs=1",
}


def strict(site, demand):
    """Return the node config of a site with these demands, without a list of algorithms."""
    node = NODE.replace('allow-algorithms="fedproto"', "").replace('state-dir="state"', "")
    return f'{node} state-dir="{site / "state"}" test-from="split" {DEMANDS[demand]}'


@pytest.mark.parametrize("form", ["typed", "toml"])
@pytest.mark.parametrize("demand", DEMANDS)
def test_a_site_with_demands_starts_and_can_be_checked_and_cleared(
    demand, form, site, monkeypatch, capsys
):
    """The node config is typed, or a TOML file with a key on each line (``form``)."""
    node = strict(site, demand)
    if form == "toml":
        (site / "node.toml").write_text(re.sub(r" (?=[a-z-]+=)", "\n", node))
        node = "node.toml"
    (site / "state/first/clients/north").mkdir(parents=True)

    flower = MagicMock()
    run_site(monkeypatch, flower, node)

    flower.assert_called_once()

    unknown = "has neither a privacy ledger nor a key of north: mount its disk, or restore it"
    assert f"{unknown}; if the site is new" in capsys.readouterr().err

    assert site_command("key", node) == 0
    assert site_command("check", node) == 0

    printed = capsys.readouterr().out
    assert "WRONG" not in printed

    has_budget = "require-dp" in DEMANDS[demand]
    assert ("demands       require-dp epsilon<=8" in printed) is has_budget

    assert site_command("status", node) == 0
    assert "first" in capsys.readouterr().out
    assert site_command("purge first", node) == 0
    assert not (site / "state/first").exists()


@pytest.mark.usefixtures("site")
def test_each_wrong_setting_is_a_finding():
    findings = findings_of_check(node=f'{NODE} arch="table3" train-fraction=2.0')
    wrong = [finding.text.partition(" ")[0] for finding in findings if finding.level == "WRONG"]
    assert set(wrong) == {"arch", "train-fraction"}


ONE_ROUND = {"rounds": 1, "partition": "own"}


@pytest.mark.parametrize(("demand", "node", "run", "expected"), [
    ("both", 'allow-algorithms="fedtgp"', {}, "secagg = true: fedtgp needs single uploads"),
    ("dp", 'allow-algorithms="mpft"', {},
        "dp = 'sample': mpft sends prototypes, which it does not cover"),
    ("dp", "", ONE_ROUND,
        "part only with dp = 'sample', dp-epsilon at most 8 and dp-delta at most 1e-05"),
    ("secagg", "", ONE_ROUND, "only (node config: require-secagg); set secagg = true"),
])  # fmt: skip
def test_an_unmet_demand_says_what_would(demand, node, run, expected, site):
    """``run`` has a run's settings; {} asks which algorithms the site allows."""
    node = f"{strict(site, demand)} {node}"
    listed = findings_of_check(node=node, **run)
    (text,) = [finding.text for finding in listed if finding.topic == "settings"]

    assert expected in text

    # what else there is to know of a site that can take part in other runs
    topics = {finding.topic for finding in listed}
    assert ({"reads", "writes", "limits"} <= topics) is bool(run)


def test_the_page_names_the_algorithms_that_meet_both_demands(site):
    """A site with both demands accepts these algorithms, and no other one."""
    able = set()
    for algo in CATALOG:
        with suppress(SettingsError):
            site_settings(node_config(f'{strict(site, "both")} allow-algorithms="{algo}"'))
            able.add(algo)

    (listed,) = re.findall(r"the algorithms:\s(.*?)\.\sThe run may also use `local`", PAGE, re.S)
    assert set(re.findall(r"`([a-z-]+)`", listed)) | {"local"} == able


def test_the_check_prints_classes_and_numbers_as_the_operator_needs_them(site, capsys):
    """Classes that nobody named are told to the operator, not to the server."""
    nameless = NODE.replace('classes="cat,dog"', "")
    assert site_command("check partition=own image-size=8", nameless) == 1

    printed = capsys.readouterr()
    assert "have 2 classes that nobody named; set classes" in printed.out
    assert 'add classes="cat,dog" to its node config' in printed.err
    assert "cat" not in printed.out

    run = ONE_ROUND | {"image_size": 8, "algo": "fedproto", "norm": "group", "local_epochs": 1}
    run |= {"dp": "sample", "dp_delta": 1e-6, "secagg": True}
    findings = findings_of_check(node=strict(site, "both"), **run)

    assert level_of(findings, "data 12 training and 4 test samples, 2 classes: cat, dog") == ""


@pytest.mark.slow
def test_the_code_that_runs_is_the_checks_not_the_working_directorys(tmp_path, monkeypatch):
    """A service's working directory is its state folder, which it can write."""
    for module in ("protofl_common", "client_app", "json"):
        (tmp_path / f"{module}.py").write_text("import pathlib; pathlib.Path('was-here').touch()")
    real_popen = subprocess.Popen
    (command,), options = run_site(monkeypatch, MagicMock()).call_args

    # without its arguments the module is imported, complains and ends
    without_arguments = command[: command.index(SUPERNODE) + 1]
    pipes = {"stderr": subprocess.PIPE, "text": True}
    with real_popen(without_arguments, cwd=tmp_path, env=options["env"], **pipes) as process:
        _, errors = process.communicate(timeout=120)

    assert "ValueError: not enough values to unpack" in errors
    assert f'File "{app_folder()}/protofl_common/tools/site/supernode.py"' in errors
    assert not (tmp_path / "was-here").exists()


def test_no_proxy_stands_between_a_site_and_its_own_processes(monkeypatch):
    """A proxy cannot reach this machine's own addresses."""
    monkeypatch.setenv("NO_PROXY", "example.org")
    options = run_site(monkeypatch, MagicMock()).call_args.kwargs

    assert options["env"]["no_proxy"] == "127.0.0.1,localhost,::1,example.org"

    monkeypatch.setenv("NO_PROXY", "*")  # which no list may hide
    assert environment_of_own_code()["no_proxy"] == "*"


# -- what a site keeps ----------------------------------------------------------------------------
@pytest.fixture
def kept(home, monkeypatch):
    """The node config of a site that took part in two runs, beside the traces of others."""
    monkeypatch.setenv("HOME", str(home))
    node = {"site-name": "north", "partition-id": 0, "num-partitions": 1}
    node |= {"state-dir": "~/state", "cache-dir": str(home / "cache")}
    run = {"algo": "fedpcl", "dataset": "digits", "partition": "iid", "rounds": 1}
    for number, name in enumerate(("first", "second"), start=1):
        config = run_config(home / name, run_name=name, **run)
        run_federation(config | {"out-dir": f"~/{name}"}, nodes={7: node}, run_id=number)
    souths = "state/first-1/clients/south/x.safetensors"
    for name in (souths, "cache/letter.txt", "cache/features/notes"):
        file = home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("not north's")
    return " ".join(f"{key}={json.dumps(value)}" for key, value in node.items())


def test_purge_blanks_secrets_and_leaves_which_sums_there_were(kept, home, capsys):
    """A file that cannot be read, here one cut off in the middle, stops the purge."""
    file = home / "state" / "privacy" / "north-1-fedavg.secagg"
    secrets = {
        "secret": "ab",
        "following": "cd",
        "keys": {"south": "cd"},
        "shares": {"south": "ef"},
    }
    file.write_text(json.dumps({"run_id": 1, "sum": 4, "stage": "share"} | secrets))
    torn = file.with_name("north-2-fedavg.secagg")
    torn.write_text('{"secret": "ab')

    assert site_command("purge caches/", kept) == 1

    refusal = "north-2-fedavg.secagg .*which sum it is of .remove it if"
    assert re.search(refusal, capsys.readouterr().err)

    torn.unlink()
    assert site_command("purge caches/", kept) == 0

    blank = {"secret": "", "following": "", "keys": {}, "shares": {}}
    assert json.loads(file.read_text()) == {"run_id": 1, "sum": 4, "stage": "unmask"} | blank
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_site_says_what_it_keeps_and_removes_what_is_named(kept, home, capsys):
    """It keeps two runs, caches, a ledger and an audit log; files of others are left alone."""
    state = home / "state"
    (state / "privacy/north.answered").write_text('{"1 fedpcl": [1, 0]}')  # before the evaluation
    # each run has taken part once with the rate 1 and a noise multiplier of 4
    spent = '{"first 1": [[1.0, 4.0, "sample", 1]], "second 2": [[1.0, 4.0, "sample", 1]]}'
    (state / "privacy/0123.json").write_text(spent)
    refused = {"algo": "fedpcl", "round": 9, "refused": "so nothing was sent"}
    append(state / "sites/north", kind="train", run=1, **refused)

    assert site_command("status", f'{kept} require-dp="epsilon<=8"') == 1  # something is wrong

    lines = capsys.readouterr().out.splitlines()
    listed = ["first-1", "second-2", "caches/", "WRONG:", "privacy"]

    assert [line.split()[0] for line in lines] == listed

    on_record = "what is on record (1 fedpcl round 1, 2 fedpcl round 1); see Backup and restore"
    assert on_record in lines[3]

    budget = f"ε = {epsilon([Mechanism(1.0, 4.0, 2)], 1e-5):.3g} of 8 is spent (δ = 1e-05)"
    assert f" ledger 0123.json: {budget}" in lines[4]

    for wrong in ("third", "first-1 third", ""):
        assert site_command(f"purge {wrong}", kept) == 1
        assert "choose from first-1, second-2, caches/" in capsys.readouterr().err

    (state / "first-fedavg-1/clients/north").mkdir(parents=True)
    assert site_command("purge first second-2 second-2 caches/", kept) == 0
    assert "still here: first-fedavg-1; name each baseline" in capsys.readouterr().out

    files = [*state.rglob("*.*"), *(home / "cache").rglob("*.*")]
    assert sorted(str(file.relative_to(home)) for file in files) == [
        "cache/letter.txt",
        "state/first-1/clients/south/x.safetensors",
        "state/privacy/0123.json",
        "state/privacy/north.answered",
        "state/privacy/north.answered.lock",
        "state/sites/north/audit.jsonl",
        "state/sites/north/audit.jsonl.lock",
    ]
    assert not (state / "second-2").exists()
    assert (home / "cache/features/notes").exists()
    assert (home / "first/first").exists()  # the run's own folder of results


# -- the page docs/security.md --------------------------------------------------------------------

PAGE = (ROOT / "docs" / "security.md").read_text()


def test_the_page_shows_what_the_check_prints(site, monkeypatch, capsys):
    """The command of docs/security.md is run here, and paths are replaced by the page's."""
    write_images(site / "data/north", *eight_each("benign", "malignant"))
    (site / "data/north").chmod(0o750)
    monkeypatch.setattr(certificates, "CA_DAYS", 3600.1)
    made = [str(site / "certs"), "--server", "superlink.example.org", "--node", "north"]

    assert certificates.main(made) == 0

    capsys.readouterr()
    monkeypatch.setenv("XDG_CACHE_HOME", str(site / "home/.cache"))
    monkeypatch.setenv("FLWR_HOME", str(site / "home/.flwr"))
    answers = Endpoint(days=800, ahead=0.2)
    monkeypatch.setattr(f"{SITE_CHECK}.ask_endpoint", lambda address, certificates: answers)

    (example,) = re.findall(r"```\n\$ (protofl site check .*?)\n```", PAGE, re.S)
    command, shown = re.split(r"(?<!\\)\n", example, maxsplit=1)
    one_line = command.replace("\\\n", " ").replace("/data/", f"{site}/data/")

    _protofl, *words = shlex.split(one_line)
    assert main(words) == 0

    printed = re.sub(r"version [0-9a-f]{8}", "version 6f3a91c2", capsys.readouterr().out)
    places = [  # here, on the page
        (f"{site}/data", "/data"),
        (f"{site}/home", "/home/protofl"),
        (f"{site}", "/srv"),
        (f"{ROOT}", "/opt/protofl"),
    ]
    for here, on_the_page in places:
        printed = printed.replace(here, on_the_page)

    assert printed.splitlines() == [line.rstrip() for line in shown.splitlines()]
