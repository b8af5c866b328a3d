"""``protofl site``: whose code a site runs, and what it says a run could make it do."""

import io
import json
import os
import re
import shlex
import stat
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResultStatus
from flwr.supernode import start_client_internal as supernode
from flwr.supernode.runtime import run_clientapp

from client_app.audit import append
from protofl_common.config.options import SettingsError
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.node import NODE_KEYS, permission_problems
from protofl_common.experiment.settings import app_folder, default_run_config, digest_of
from protofl_common.privacy.plan import Mechanism, epsilon
from protofl_common.tools.cli import main
from protofl_common.tools.executor import Executor, own_code
from protofl_common.tools.federation import Shown
from protofl_common.tools.site.check import _algorithms
from protofl_common.tools.site.client_process import handle, installed_code, received
from protofl_common.tools.site.node import node_config, site_settings
from protofl_common.wire.records import pack_settings
from tests.support import ROOT
from tests.support.given import Patch, Printed
from tests.support.harness import LocalGrid, run_config, run_federation
from tests.support.programs import program
from tests.support.sites import NODE, found, images, level_of, named

IDENTITY = ("protofl/protofl", "0.1.0", "what the SuperLink says of the hash")
certificates = program("certificates")


# -- whose code -------------------------------------------------------------------------------------------------------
@pytest.fixture
def home(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setattr("sys.path", [*sys.path])  # Flower adds where it loads an app from
    return tmp_path


def run_site(monkeypatch: Patch, flower: Callable[[], object], node: str = NODE) -> MagicMock:
    """``protofl site run``, with a function in the place of Flower's SuperNode; what would start the clients."""
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("subprocess.Popen", started := MagicMock())
    monkeypatch.setattr("protofl_common.tools.site.supernode.flower_supernode", flower)
    monkeypatch.setattr("protofl_common.tools.site.supernode.flwr_exit", ends := MagicMock())
    assert main(["site", "run", "--insecure", "--port", "0", "--node-config", node]) == 0
    ends.assert_called_once()  # or Flower's own thread would keep a process that has lost its SuperLink
    return started


@pytest.mark.usefixtures("home")
def test_the_installed_code_is_loaded_whatever_run_it_is() -> None:
    for identity in (IDENTITY, ("", "", "")):
        assert isinstance(installed_code(str(ROOT))(*identity), ClientApp)
        assert Path(sys.modules["client_app.app"].__file__ or "") == ROOT / "client_app" / "app.py"


@patch("sys.argv", [""])
def test_a_message_that_cannot_be_read_ends_its_process_at_once(
    monkeypatch: Patch, capfd: Printed
) -> None:
    """A task that ended in order would leave the SuperNode waiting for its reply, and for nothing else, for ever."""
    monkeypatch.setattr("os._exit", ended := MagicMock())
    sent = RecordDict(
        {"round": ConfigRecord({"spoilt": 1}), "zeros": ArrayRecord([np.zeros(10**6)])}
    )
    parts = {name: part.deflate() for name, part in get_all_nested_objects(sent).items()}
    assert received(get_object_tree(sent), parts.__getitem__, str) == sent
    received(get_object_tree(sent), lambda name: parts[name].replace(b"spoilt", b"\xff" * 6), str)
    monkeypatch.setattr("protofl_common.tools.site.client_process.LARGEST", 7 * 10**6)
    received(get_object_tree(sent), parts.__getitem__, str)
    assert ended.call_count == 2
    texts = [
        f"protofl: a message that cannot be read: {kind}Error: .+\n" for kind in ("Decode", "Value")
    ]
    assert re.fullmatch("".join(texts), capfd.readouterr().err)
    for calls in (
        ["push_task_output"],
        ["push_message", "push_task_output"],
    ):  # the first, for whatever reason
        flower = MagicMock(
            side_effect=lambda calls=calls: [getattr(run_clientapp, name)() for name in calls]
        )
        monkeypatch.setattr("protofl_common.tools.site.client_process.flwr_clientapp", flower)
        with patch.multiple(
            run_clientapp, push_message=MagicMock(), push_task_output=(end := MagicMock())
        ):
            handle(str(ROOT), [])
    assert (ended.call_count, end.call_count) == (3, 1)


def bomb() -> bytes:
    """A bundle of a few hundred kilobytes whose pyproject.toml has 300 megabytes."""
    with zipfile.ZipFile(packed := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pyproject.toml", b"#" * 300_000_000)
    return packed.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("bundle", ["broken", "bomb"])
def test_a_supernode_reads_nothing_of_a_bundle(bundle: str, monkeypatch: Patch) -> None:
    """Flower's own function, which each message of an unknown run goes through, under the patch of site run."""
    content = b"no zip" if bundle == "broken" else bomb()
    run, message, state = Run.create_empty(5), MagicMock(), MagicMock()
    run.override_config = {"lr": 0.5, "no-such-key\n\x1b[31m": 1}
    message.metadata.run_id, state.get_run.return_value = 5, None

    def a_supernode() -> None:
        supernode._pull_and_store_message(
            state, MagicMock(), {}, lambda: (message, MagicMock()), lambda _: run,
            lambda *_: Fab("hash", content, {}), MagicMock(), MagicMock(), None,
        )  # fmt: skip

    tracemalloc.start()
    run_site(monkeypatch, a_supernode)
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()
    assert state.store_message.called
    assert (
        state.set_run_series_context.call_args.args[1].run_config
        == default_run_config() | run.override_config
    )


def test_defaults_that_are_not_the_sites_are_refused_and_not_overlooked(home: Path) -> None:
    grid = LocalGrid(
        run_config(home, dataset="digits", partition="iid"), {7: {"site-name": "north"}}
    )
    for content in ({}, pack_settings(digest_of(grid.run_config | {"lr": 0.123}))):
        grid.push_messages([Message(RecordDict({**content}), 7, MessageType.QUERY, group_id="0")])
        assert "other defaults; install the same version on both" in grid.log[-1][1].error.reason


def test_a_site_starts_nothing_but_client_apps() -> None:
    executor = Executor(TaskType.CLIENT_APP, ["client_process.py"])
    assert executor.get_eligible_capacity(set(TaskType), insecure=True) == (
        {TaskType.CLIENT_APP},
        set(),
    )
    for kind in set(TaskType) - {TaskType.CLIENT_APP}:
        spec = ExecutionSpec(kind, "127.0.0.1:1", "token", True, None, False, 1, False, 1)
        assert executor.launch(spec).status == LaunchResultStatus.FAILED


FORKED = """
import os, sys
from protofl_common.tools.site import client_process
handled = []
def handle(app, arguments):
    handled.append(arguments)  # of this child alone
    line = f"{os.getpid() != parent} {handled} {sys.stdin.buffer.raw.read()}\\n"  # in one piece: three write
    print(line, end="")
    if arguments == ["b"]:
        raise ValueError("of b alone")
    sys.exit(1)
parent, client_process.handle = os.getpid(), handle
client_process.installed_code = lambda app: lambda *_: print("ahead", "torch" in sys.modules, flush=True)
client_process.import_module = lambda name: sys.modules.setdefault(name, None)
client_process.fork_for_each_message(sys.argv[1])
"""


@pytest.mark.slow
def test_a_message_is_handled_by_a_copy_that_knows_nothing_of_others() -> None:
    command = [sys.executable, "-c", FORKED, str(ROOT)]
    done = subprocess.run(command, input='["a"]\n["b"]\n["c"]\n', capture_output=True, text=True)
    assert sorted(done.stdout.splitlines()) == [
        *[f"True [['{name}']] b''" for name in "abc"],
        "ahead True",
    ]
    errors = done.stderr.count("Traceback"), done.stderr.count("ValueError: of b alone")
    assert (done.returncode, *errors) == (0, 1, 1)


def test_the_process_that_forks_is_started_again_when_it_has_died() -> None:
    started: list[subprocess.Popen[str]] = []
    executor = Executor(TaskType.CLIENT_APP, [], "fork")
    executor.command = [
        sys.executable,
        "-Sc",
        "import sys; print(sys.stdin.readline(), file=sys.stderr)",
    ]
    for _ in range(2):
        executor.reconcile()
        executor.reconcile()
        started.append(executor.forking)
        spec = ExecutionSpec(
            TaskType.CLIENT_APP, "127.0.0.1:1", "token", True, None, False, 1, False, 1
        )
        assert executor.launch(spec).status == LaunchResultStatus.ACCEPTED
        assert executor.forking.wait() == 0
    assert len({one.pid for one in started}) == 2


def test_a_site_asks_soon_at_first_and_as_seldom_as_flowers_own_in_the_end(
    monkeypatch: Patch,
) -> None:
    now, waits = 1000.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        waits.append(seconds)

    def a_site() -> None:
        for _ in range(60):  # for work
            supernode.time.sleep(3)
        supernode.time.sleep(0.5)  # for the reply
        supernode.time.sleep(3)

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("time.monotonic", lambda: now)
    run_site(monkeypatch, a_site)
    assert waits[:11] == pytest.approx([0.3] * 11)
    assert waits[20] == pytest.approx(sum(waits[:20]) / 10)
    assert waits[59] == 3
    assert waits[60:] == pytest.approx([0.05, 0.3])


@pytest.mark.parametrize(("action", "node", "option", "reason"), [
    ("run", "partition-id=0 num-partitions=2", "", "node config without a site-name"),
    ("run", 'site-name="north" alow-download=true', "", "alow-download: unknown key"),
    ("run", 'site-name="north" data-dir = "data"', "", "Flower reads only site-name; no spaces at ="),
    ("run", 'site-name="north" allow-algorithms="fedprotto"', "", "'fedprotto': choose from"),
    ("run", NODE, "--isolation=subprocess", "--isolation: not together with protofl site run"),
    ("run", NODE, "--allow-runtime-dependency-installation", "-installation: not together with protofl site"),
    ("run partition=own", NODE, "", "site run: partition=own: takes options only"),
    ("key", "", "", "node config without a site-name"),
    ("key", NODE.replace('"state"', '"~not-here/x"'), "", "state-dir = '~not-here/x': this machine has no"),
    ("run", "marked.toml", "", "'marked.toml': Invalid statement (at line 1, column 1); save it as UTF-8 without a"),
    ("run", "~not-here/north.toml", "", "'~not-here/north.toml': Could not determine home directory"),
    ("key", NODE.replace('"cat,dog"', '["cat","dog"]'), "", 'as one text with commas, as in classes="a,b"'),
    ("key", "north.conf", "", "or a file not called .toml: taken for a simulated client"),
    ("key", 'site-name="north" state-dri="state"', "", "state-dri: unknown key; did you mean state-dir?"),
    ("approve first.toml", NODE, "--untill=2027-01-01", "site approve: --untill=2027-01-01: unknown option"),
    ("approve first.toml", NODE, "--runs=0", "--runs 0: must be at least 1"),
])  # fmt: skip
def test_a_site_does_nothing_by_a_wrong_node_config_or_an_option_that_is_wrong_or_would_undo_it(
    action: str, node: str, option: str, reason: str, site: Path, capsys: Printed
) -> None:
    (site / "marked.toml").write_text(NODE.replace(" ", "\n"), encoding="utf-8-sig")
    assert (
        main(["site", *action.split(), "--insecure", "--node-config", node, *option.split()]) == 1
    )
    assert reason in capsys.readouterr().err
    assert not [*site.rglob("sites")]


@pytest.mark.parametrize(("given", "enabled"), [({}, "0"), ({"FLWR_TELEMETRY_ENABLED": "1"}, "1")])
def test_flowers_makers_hear_of_a_site_only_if_its_operator_says_so(
    given: dict[str, str], enabled: str
) -> None:
    """Flower reads the variable when it is imported: a process that has imported it already shows nothing."""
    code = "import protofl_common.tools.cli.site, flwr.supercore.telemetry as t; print(t.FLWR_TELEMETRY_ENABLED)"
    others = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_")}
    shown = subprocess.run(
        [sys.executable, "-c", code], env=others | given, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == enabled


# -- what a run could make a site do ----------------------------------------------------------------------------------
@pytest.fixture
def site(home: Path, monkeypatch: Patch) -> Path:
    """A well-kept machine, as its operator's current folder."""
    monkeypatch.chdir(home)
    monkeypatch.setenv("FLWR_HOME", str(home / "flwr"))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("protofl_common.tools.site.check.FEW_BYTES", 0)  # this disk may be full
    images(home / "data", *(f"{kind}/{i}.png" for kind in ("cat", "dog") for i in range(8)))
    (home / "data").chmod(0o750)
    for name in ("cache", "state"):
        (home / name).mkdir(mode=0o700)
    return home


def test_a_well_kept_site_has_nothing_to_be_warned_of(site: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        "flwr.supercore.task_identity.TaskIdentity._run_id", None
    )  # as in a process of its own
    said = found(dataset="image-folder", partition="own", image_size=8)
    assert {one.level for one in said} == {""}, said
    text = "\n".join(f"{one.topic} {one.text}" for one in said)
    assert "data 12 training and 4 test samples, 2 classes: cat, dog" in text
    assert f"writes state-dir {site / 'state'} (mode 0700)" in text
    assert f"writes FLWR_HOME {site / 'flwr'}: will be made, for this user only" in text
    assert "sends a prototype of each class, with the number of samples behind it: fedproto" in text
    assert (
        "max-rounds 2000, max-epochs 100, max-steps 10000, max-batch-size 1024, max-image-size 512"
        in text
    )
    assert {path.name for path in (*site.iterdir(), *site.glob("[cs]*/*"))} == {
        "data",
        "cache",
        "state",
    }  # as before
    run_site(monkeypatch, MagicMock())
    assert stat.S_IMODE((site / "flwr").stat().st_mode) == 0o700


@pytest.mark.parametrize(("demand", "missing"), [
    ("require-secagg=true", {"fedtgp", "scaffold"}), ('require-dp="epsilon<=2"', {"mpft", "ditto"}),
])  # fmt: skip
def test_a_site_is_told_only_of_algorithms_that_meet_its_demands(
    demand: str, missing: set[str], site: Path
) -> None:
    node = NODE.replace("fedproto", "all").replace('"state"', f'"{site / "state"}"') + f" {demand}"
    sends = [line.text.rpartition(": ")[2] for line in found(node=node) if line.topic == "sends"]
    named = {*", ".join(sends).split(", ")}
    assert {"fedproto", "fedavg", "fedpcl"} <= named  # FedPCL by some of its settings only
    assert not missing & named


@pytest.mark.parametrize(("options", "node", "level", "text"), [
    ([], 'partition-id=0 num-partitions="2"', "WRONG", "taken for a simulated client"),
    ([], NODE + " alow-download=true", "WRONG", "alow-download: unknown key"),
    ([], NODE + " max-epochs=0", "WRONG", "max-epochs = 0 must be"),
    ([], NODE.replace('"data"', f'"{300 * "x"}"'), "WRONG", "there is none"),  # pathlib's exists() raises for it
    ([], NODE + " allow-download=true", "warning", "downloads a run may"),
    ([], NODE + " approve=false", "warning", "approval none: a run takes part"),
    ([], NODE.partition(" data-dir")[0], "warning", "approval none: a run takes part"),
    ([], NODE + " partition-id=0", "warning", "approval none: a run takes part"),
    ([], NODE + " require-secagg=true", "", "without study-sites in a run its server can invent these sites"),
    ([], NODE + ' allow-python="mynets"', "warning", "imported and called: mynets"),
    ([], NODE.replace("fedproto", "all"), "warning", "all weights of the model: fedavg, fedprox"),
    ([], NODE.replace("fedproto", "fedgen"), "warning", "the head weights of the model and how many samples"),
    ([], NODE.replace("fedproto", "fedbn"), "warning", "of the model but its normalisation layers: fedbn"),
    ([], NODE + " partition-id=0 num-partitions=2", "warning", "runs choose the test samples"),
    ([], NODE + ' device="cuda:77"', "WRONG", "device = 'cuda:77': not usable here"),
    (["--insecure"], NODE, "warning", "anybody on the way"),
    (["--superlink", "my.host:8000"], NODE, "warning", "key none"),
    (["--auth-supernode-private-key", "absent"], NODE, "WRONG", "absent: cannot be read"),
    (["--root-certificates", "data/cat/0.png"], NODE, "WRONG", "certificates data/cat/0.png"),
])  # fmt: skip
@pytest.mark.usefixtures("site")
def test_what_is_wrong_or_worth_a_warning_comes_first(
    options: list[str], node: str, level: str, text: str, monkeypatch: Patch
) -> None:
    # A CUDA device is made to repeat exactly, for the rest of a process, before its first use.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *_, **__: None)
    named(north=Path("state/sites/north"))
    said = found(*options, node=node)
    assert (level_of(said, text), said[0].level) == (level, level)


NAMED = "its name, model (architecture, size), inputs (shape, columns as 16 bits), device, the class names given"
NAMED = f"always: {NAMED}, "
FIGURES = "numbers of samples, numbers of right predictions"


@pytest.mark.parametrize(("demand", "told"), [
    ("", f"{FIGURES}, which classes it has, metrics, losses, seconds"),
    (" min-class-samples=5", f"{FIGURES}, which classes it has, metrics, seconds"),
    (' require-dp="epsilon<=8"', FIGURES),
    (" require-secagg=true", "seconds"),
    (' require-secagg=true require-dp="epsilon<=8"', "the number of training samples"),
])  # fmt: skip
def test_what_always_leaves_follows_from_the_demands(demand: str, told: str) -> None:
    said = [
        one.text for one in _algorithms(node_config(NODE + demand)) if one.text.startswith("always")
    ]
    assert said == [NAMED + told]


@pytest.mark.usefixtures("site")
def test_a_strict_site_is_not_called_wrong_for_what_runs_ask_by_default() -> None:
    strict = NODE.replace("fedproto", "fedtgp") + " max-epochs=1 max-rounds=2 max-batch-size=3"
    assert {one.level for one in found(node=strict)} == {""}
    said = found(
        node=strict,
        algo="fedtgp",
        partition="own",
        rounds=3,
        local_epochs=1,
        batch_size=3,
        eval_batch_size=3,
    )
    assert (
        said[0].text
        == "rounds = 3: this site takes at most 2; its operator may raise max-rounds (node config)"
    )
    steps = default_run_config() | {"local-steps": 51}
    too_many = "local-steps = 51: this site takes at most 50; its operator may raise max-steps (node config)"
    assert permission_problems({"max-steps": 50}, steps) == [too_many]
    assert [
        bool(permission_problems({}, steps | {"local-steps": n})) for n in (10_000, 10_001)
    ] == [False, True]


def test_folders_and_keys_that_others_may_read(site: Path, monkeypatch: Patch) -> None:
    for name in ("data", "state", "cache"):
        (site / name).chmod(0o755)
    (site / "key").write_text("secret")
    (site / "key").chmod(0o640)
    said = found("--auth-supernode-private-key", "key")
    assert level_of(said, "key: other users of this machine may read it") == "WRONG"
    (site / "key").chmod(0o600)
    with monkeypatch.context() as patch:
        for _ in range(2):
            said = found("--auth-supernode-private-key", "key")
            assert level_of(said, "key: no private key that Flower takes") == "WRONG"
            protected = MagicMock(side_effect=TypeError("Key is password-protected"))
            patch.setattr("protofl_common.tools.site.check.load_ssh_private_key", protected)
        patch.setattr("protofl_common.tools.site.check.FEW_BYTES", 2**30)
        for free, level in (10**5, "WRONG"), (10**7, "warning"):
            patch.setattr("shutil.disk_usage", lambda path, free=free: SimpleNamespace(free=free))
            assert level_of(found(), f"{site / 'state'}: {free / 1e6:.0f} MB free") == level
    for name in ("data", "state", "cache"):
        assert (
            level_of(said, f"{site / name}: other users of this machine may look in (mode 0755)")
            == "warning"
        )


def test_files_of_a_site_that_others_may_read_or_it_cannot_use(
    site: Path, monkeypatch: Patch
) -> None:
    """As after a restore as root; a site that works meanwhile removes some before they are looked at."""
    named(north=site / "state/sites/north")
    (key := site / "state/sites/north/site.key").chmod(0o644)
    assert {one.level for one in found()} == {""}  # nobody may look into these folders
    for folder in key.parents[:3]:
        folder.chmod(0o755)
    assert (
        level_of(found(), f"{key}: other users of this machine may read it; chmod 600") == "WRONG"
    )
    (weights := site / "state/first-1/clients/north/weights").parent.mkdir(parents=True)
    weights.touch(mode=0o644)
    assert (
        level_of(found(), f"{weights}: other users of this machine may read it; chmod 600")
        == "WRONG"
    )
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) not in (key, key.parents[1]))
    assert level_of(found(), f"{key}: this user cannot read or write it") == "WRONG"
    monkeypatch.setattr(
        "os.walk", lambda top: [(str(top / "gone"), [], ["gone.tmp"])] * (top.name == "privacy")
    )
    assert level_of(found(), f"{key.parents[1]}: this user cannot read or write it") == "WRONG"


@pytest.mark.parametrize(("days", "level"), [(-0.01, "WRONG"), (29.1, "warning"), (300.1, "")])
def test_days_that_a_certificate_has_left(
    days: float, level: str, site: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(certificates, "CA_DAYS", days)
    certificates.make_ca(site)
    assert level_of(found("--root-certificates", "ca.crt"), "certificates") == level


def test_data_that_a_run_cannot_use(site: Path, capsys: Printed, monkeypatch: Patch) -> None:
    (site / "data/cat/0.png").write_text("no image")
    settings = ["dataset=image-folder", "partition=own", "image-size=8"]
    assert main(["site", "check", *settings, "--node-config", NODE]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("WRONG   data          DataError: its data cannot be read")
    assert "0.png is not a readable image" in said.err
    study = [
        f"study{key}"
        for key in ("=s", f"-sites=north:{'A' * 43}", f"-by=jane:{'A' * 43}", "-signature=ab")
    ]
    assert main(["site", "check", *settings, *study, "--node-config", NODE]) == 1
    assert "WRONG   data          study-signature: not jane:" in capsys.readouterr().out
    assert main(["site", "check", "--node-config", NODE]) == 0
    assert stat.S_IMODE((site / "state").stat().st_mode) == 0o700
    (site / "first.toml").write_text('partition="own"')
    (site / "state/sites/north/audit.jsonl").mkdir(
        parents=True
    )  # as on a full disk, the log cannot be written
    assert main(["site", "approve", "first.toml", "--node-config", NODE]) == 1
    assert "audit.jsonl cannot be written" in capsys.readouterr().err
    assert main(["site", "key", "--node-config", NODE]) == 0
    assert capsys.readouterr().err == f"{site / 'state/sites/north/site.key'} is new\n"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    if os.getuid() == 0:
        os.chown(
            site / "state/sites/north", 1, 1
        )  # a folder of another user, as it is of any but root
    for words in ("approve first.toml", "deny first.toml", "key", "purge first", "run"):
        assert main(["site", *words.split(), "--node-config", NODE]) == 1
        assert "is another user's; type it as that one: sudo -u" in capsys.readouterr().err


# -- a site with demands ----------------------------------------------------------------------------------------------

DEMANDS = {
    "dp": 'require-dp="epsilon<=8"',
    "dp and delta": "require-dp='epsilon<=8 delta<=1e-6'",
    "secagg": "require-secagg=true",
    "both": 'require-dp="epsilon<=8 delta<=1e-6" require-secagg=true min-class-samples=5 max-rounds=1 max-epochs=1',
}


def strict(site: Path, demand: str) -> str:
    node = NODE.replace('allow-algorithms="fedproto"', "").replace('state-dir="state"', "")
    return f'{node} state-dir="{site / "state"}" {DEMANDS[demand]}'


@pytest.mark.parametrize("form", ["typed", "toml"])
@pytest.mark.parametrize("demand", DEMANDS)
def test_a_site_with_demands_starts_and_can_be_checked_and_cleared(
    demand: str, form: str, site: Path, monkeypatch: Patch, capsys: Printed
) -> None:
    node, flower = strict(site, demand), MagicMock()
    if form == "toml":
        (site / "node.toml").write_text(re.sub(r" (?=[a-z-]+=)", "\n", node))
        node = "node.toml"
    (site / "state/first/clients/north").mkdir(parents=True)
    run_site(monkeypatch, flower, node)
    flower.assert_called_once()
    unknown = "has neither a privacy ledger nor a key of north: mount its disk, or restore it; if the site is new"
    assert unknown in capsys.readouterr().err
    assert main(["site", "key", "--node-config", node]) == 0
    assert main(["site", "check", "--node-config", node]) == 0
    assert "WRONG" not in (said := capsys.readouterr().out)
    assert ("demands       require-dp epsilon<=8" in said) == ("dp" in DEMANDS[demand])
    assert main(["site", "status", "--node-config", node]) == 0
    assert "first" in capsys.readouterr().out
    assert main(["site", "purge", "--node-config", node, "first"]) == 0
    assert not (site / "state/first").exists()


ONE = {"rounds": 1, "partition": "own"}


@pytest.mark.usefixtures("site")
def test_each_wrong_setting_is_a_finding_and_no_folder_that_was_not_meant_is_looked_into() -> None:
    wrong = [
        one.text
        for one in found(node=f'{NODE} arch="table3" train-fraction=2.0')
        if one.level == "WRONG"
    ]
    assert {text.partition(" ")[0] for text in wrong} == {"arch", "train-fraction"}
    for action in ("status", "purge"):
        for node in ('site-name="north" state-dri="state"', "partition-id=0"):
            assert main(["site", action, "--node-config", node]) == 1


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(("demand", "node", "run", "said"), [
    ("both", 'allow-algorithms="fedtgp"', {}, "secagg = true: fedtgp needs single uploads"),
    ("dp", 'allow-algorithms="mpft"', {}, "dp = 'sample': mpft sends prototypes, which it does not cover"),
    ("dp", "", ONE, "part only with dp = 'sample', dp-epsilon at most 8 and dp-delta at most 1e-05"),
    ("secagg", "", ONE, r"only (node config: require-secagg); set secagg = true"),
])  # fmt: skip
def test_an_unmet_demand_says_what_would(
    demand: str, node: str, run: dict[str, Any], said: str, site: Path
) -> None:
    (wrong,) = [
        one for one in found(node=f"{strict(site, demand)} {node}", **run) if one.level == "WRONG"
    ]
    assert said in wrong.text


def test_the_page_names_the_algorithms_that_meet_both_demands_and_every_key_of_a_node_config(
    site: Path,
) -> None:
    able = set()
    for algo in CATALOG:
        with suppress(SettingsError):
            site_settings(node_config(f'{strict(site, "both")} allow-algorithms="{algo}"'))
            able.add(algo)
    (listed,) = re.findall(r"one of the algorithms\s(.*?) \(and\s`local`", PAGE, re.S)
    assert set(re.findall(r"`([a-z-]+)`", listed)) | {"local"} == able
    named = set(
        re.findall(
            r"`([a-z-]+)`", "".join(line for line in PAGE.splitlines() if line.startswith("| `"))
        )
    )
    assert set(NODE_KEYS) <= named


def test_the_check_prints_classes_and_numbers_as_the_operator_needs_them(
    site: Path, capsys: Printed
) -> None:
    node = NODE.replace('classes="cat,dog"', "")
    assert main(["site", "check", "partition=own", "image-size=8", "--node-config", node]) == 1
    said = capsys.readouterr()
    assert "have 2 classes that nobody named; set classes" in said.out
    assert 'add classes="cat,dog" to its node config' in said.err
    assert "cat" not in said.out
    run: dict[str, Any] = ONE | {
        "image_size": 8,
        "algo": "fedproto",
        "norm": "group",
        "local_epochs": 1,
    }
    lines = found(node=strict(site, "both"), dp="sample", dp_delta=1e-6, secagg=True, **run)
    assert level_of(lines, "data 12 training and 4 test samples, 2 classes: cat, dog") == ""


@pytest.mark.slow
def test_the_code_that_runs_is_the_checks_not_the_working_directorys(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """A service's working directory is its state folder, which it can write."""
    for module in ("protofl_common", "client_app", "json"):
        (tmp_path / f"{module}.py").write_text("import pathlib; pathlib.Path('was-here').touch()")
    popen = subprocess.Popen
    monkeypatch.setenv("NO_PROXY", "example.org")
    (command,), options = run_site(monkeypatch, MagicMock()).call_args
    asking = [*command[: command.index("protofl_common.tools.site.supernode") + 1]]
    with popen(
        asking, cwd=tmp_path, env=options["env"], stderr=subprocess.PIPE, text=True
    ) as executor:
        _, said = executor.communicate(timeout=120)
    assert (
        "ValueError: not enough values to unpack" in said
    )  # it was imported, and asks for its arguments
    assert f'File "{app_folder()}/protofl_common/tools/site/supernode.py"' in said
    assert not (tmp_path / "was-here").exists()
    assert (
        options["env"]["no_proxy"] == "127.0.0.1,localhost,::1,example.org"
    )  # a proxy cannot reach this machine's
    monkeypatch.setenv("NO_PROXY", "*")  # which no list may hide
    assert own_code()["no_proxy"] == "*"
    with patch.multiple(
        own_code.__module__, getproxies_environment=dict, getproxies=lambda: {"all": "mac"}
    ):
        assert own_code()["all_proxy"] == "mac"  # which has proxies without a variable


# -- what a site keeps ------------------------------------------------------------------------------------------------
@pytest.fixture
def kept(home: Path, monkeypatch: Patch) -> str:
    """The node config of a site that took part in two runs, beside the traces of others."""
    monkeypatch.setenv("HOME", str(home))
    node = {"site-name": "north", "partition-id": 0, "num-partitions": 1}
    node |= {"state-dir": "~/state", "cache-dir": str(home / "cache")}
    for number, name in enumerate(("first", "second"), start=1):
        config = run_config(
            home / name, run_name=name, algo="fedpcl", dataset="digits", partition="iid", rounds=1
        )
        run_federation(config | {"out-dir": f"~/{name}"}, nodes={7: node}, run_id=number)
    for other in (
        "state/first-1/clients/south/x.safetensors",
        "cache/letter.txt",
        "cache/features/notes",
    ):
        (home / other).parent.mkdir(parents=True, exist_ok=True)
        (home / other).write_text("not north's")
    return " ".join(
        f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}"
        for key, value in node.items()
    )


def test_purge_blanks_secrets_and_leaves_which_sums_there_were(
    kept: str, home: Path, capsys: Printed
) -> None:
    file = home / "state" / "privacy" / "north-1-fedavg.secagg"
    secrets = {
        "secret": "ab",
        "following": "cd",
        "keys": {"south": "cd"},
        "shares": {"south": "ef"},
    }
    (torn := file.with_name("north-2-fedavg.secagg")).write_text('{"secret": "ab')
    file.write_text(json.dumps({"run_id": 1, "sum": 4, "stage": "share"} | secrets))
    assert main(["site", "purge", "caches/", "--node-config", kept]) == 1
    assert re.search(
        "north-2-fedavg.secagg .*which sum it is of .remove it if", capsys.readouterr().err
    )
    torn.unlink()
    assert main(["site", "purge", "caches/", "--node-config", kept]) == 0
    left = json.loads(file.read_text())
    assert left == {
        "run_id": 1,
        "sum": 4,
        "stage": "unmask",
        "secret": "",
        "following": "",
        "keys": {},
        "shares": {},
    }
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_site_says_what_it_keeps_and_removes_what_is_named(
    kept: str, home: Path, capsys: Printed
) -> None:
    (home / "state/privacy/north.answered").write_text(
        '{"1 fedpcl": [1, 0]}'
    )  # before the evaluation
    (home / "state/privacy/0123.json").write_text(
        '{"first 1": [[1.0, 4.0, 1]], "second 2": [[1.0, 4.0, 1]]}'
    )
    append(
        home / "state/sites/north",
        kind="train",
        run=1,
        algo="fedpcl",
        round=9,
        refused="so nothing was sent",
    )
    assert main(["site", "status", "--node-config", f'{kept} require-dp="epsilon<=8"']) == 0
    shown = capsys.readouterr().out.splitlines()
    listed = ["first-1", "second-2", "caches/", "WRONG:", "privacy", "state-dir", "cache-dir"]
    assert [line.split()[0] for line in shown] == listed
    assert (
        f" ledger 0123.json: ε = {epsilon([Mechanism(1.0, 4.0, 2)], 1e-5):.3g} of 8 is spent (δ = 1e-05)"
        in shown[4]
    )
    assert (
        "what is on record (1 fedpcl round 1, 2 fedpcl round 1); see Backup and restore" in shown[3]
    )
    for wrong in (["third"], ["first-1", "third"], []):
        assert main(["site", "purge", *wrong, "--node-config", kept]) == 1
        assert "choose from first-1, second-2, caches/" in capsys.readouterr().err
    (home / "state/first-fedavg-1/clients/north").mkdir(parents=True)
    assert main(["site", "purge", "first", "second-2", "caches/", "--node-config", kept]) == 0
    assert "still here: first-fedavg-1; name each baseline" in capsys.readouterr().out
    left = sorted(
        str(path.relative_to(home))
        for top in ("state", "cache")
        for path in (home / top).rglob("*.*")
    )
    stay = [
        f"state/{of}{end}"
        for of in ("privacy/north.answered", "sites/north/audit.jsonl")
        for end in ("", ".lock")
    ]
    assert left == [
        "cache/letter.txt",
        "state/first-1/clients/south/x.safetensors",
        "state/privacy/0123.json",
        *stay,
    ]
    exist = [
        (home / path).exists() for path in ("state/second-2", "cache/features/notes", "first/first")
    ]
    assert exist == [False, True, True]


# -- the page docs/security.md ----------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def test_the_page_shows_what_the_check_prints(
    site: Path, monkeypatch: Patch, capsys: Printed
) -> None:
    images(
        site / "data/north",
        *(f"{kind}/{i}.png" for kind in ("benign", "malignant") for i in range(8)),
    )
    (site / "data/north").chmod(0o750)
    monkeypatch.setattr(certificates, "CA_DAYS", 3600.1)
    assert (
        certificates.main(
            [str(site / "certs"), "--server", "superlink.example.org", "--node", "north"]
        )
        == 0
    )
    capsys.readouterr()
    monkeypatch.setenv("XDG_CACHE_HOME", str(site / "home/.cache"))
    monkeypatch.setenv("FLWR_HOME", str(site / "home/.flwr"))
    monkeypatch.setattr(
        "protofl_common.tools.site.check.shown_by", lambda address, certificates: Shown(800, 0.2)
    )
    (example,) = re.findall(r"```\n\$ (protofl site check .*?)\n```", PAGE, re.S)
    command, shown = re.split(r"(?<!\\)\n", example, maxsplit=1)
    assert main(shlex.split(command.replace("/data/", f"{site}/data/"))[1:]) == 0
    printed = re.sub(r"version [0-9a-f]{8}", "version 6f3a91c2", capsys.readouterr().out)
    places = {
        f"{site}/data": "/data",
        f"{site}/home": "/home/protofl",
        f"{site}": "/srv",
        f"{ROOT}": "/opt/protofl",
    }
    for here, there in places.items():
        printed = printed.replace(here, there)
    assert printed.splitlines() == [line.rstrip() for line in shown.splitlines()]
