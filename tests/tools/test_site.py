"""``protofl site``: whose code a site runs, and what it says a run could make it do."""

from __future__ import annotations

import hashlib
import re
import shlex
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResultStatus
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal as supernode

from protofl_common.config.options import SettingsError
from protofl_common.permissions import permission_problems
from protofl_common.settings import NODE_KEYS
from protofl_common.tools.app_files import copy_app
from protofl_common.tools.cli import main
from protofl_common.tools.site.bundle import allowed_code
from protofl_common.tools.site.check import Finding, findings
from protofl_common.tools.site.client_process import INSTALLED, AllowedCode, Refusal
from protofl_common.tools.site.executor import Executor
from protofl_common.tools.superlink_tls import Shown
from tests.harness import run_config, run_federation
from tests.test_sites import images

ROOT = Path(__file__).parents[2]
IDENTITY = ("protofl/protofl", "0.1.0", "what the SuperLink says of the hash")


# -- whose code -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """This checkout's."""
    return build_fab_from_disk(copy_app(ROOT, tmp_path_factory.mktemp("app")))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Flower unpacks bundles."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setattr("sys.path", [*sys.path])  # Flower adds where it loads an app from
    return tmp_path


def test_a_bundle_that_is_not_allowed_is_answered_and_stays_packed(
    bundle: bytes, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    allowed, changed = hashlib.sha256(bundle).hexdigest(), bundle + b"\n"
    code = AllowedCode(str(ROOT), f"{'0' * 64},{allowed}")
    code.install(changed, skip_prompt=True)
    handler = code.loader(default_app_ref="", app_path=None, multi_app=True)(*IDENTITY[:2], allowed)
    assert isinstance(handler, Refusal)
    assert not list(home.iterdir())
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    context = Context(1, 1, {"site-name": "north"}, RecordDict(), {})
    reason = handler(Message(RecordDict(), 1, MessageType.TRAIN), context).error.reason
    assert reason.startswith(f"north: refused the run's code, bundle {hashlib.sha256(changed).hexdigest()}; ")
    assert reason.endswith(f"its operator allows {'0' * 64},{allowed}")
    assert reason in capsys.readouterr().err


def test_an_allowed_bundle_is_unpacked_under_its_whole_hash(bundle: bytes, home: Path) -> None:
    allowed = hashlib.sha256(bundle).hexdigest()
    code = AllowedCode(str(ROOT), allowed)
    code.install(bundle)
    assert not isinstance(code.load(*IDENTITY), Refusal)
    (app,) = (home / "allowed" / allowed / "apps").iterdir()
    assert (app / "client_app" / "app.py").read_bytes() == (ROOT / "client_app" / "app.py").read_bytes()


def test_the_installed_code_needs_nothing_of_the_bundle(home: Path) -> None:
    code = AllowedCode(str(ROOT), INSTALLED)
    code.install(b"no bundle at all")
    assert not isinstance(code.load(*IDENTITY), Refusal)
    assert not list(home.iterdir())


def test_a_site_starts_nothing_but_client_apps() -> None:
    executor = Executor(INSTALLED, "spawn")
    assert executor.get_eligible_capacity(set(TaskType), insecure=True) == ({TaskType.CLIENT_APP}, set())
    for kind in set(TaskType) - {TaskType.CLIENT_APP}:
        spec = ExecutionSpec(kind, "127.0.0.1:1", "token", True, None, False, 1, False, 1)
        assert executor.launch(spec).status == LaunchResultStatus.FAILED


FORKED = """
import os, sys
from protofl_common.tools.site import client_process
handled = []
def handle(code, arguments):
    handled.append(arguments)  # of this child alone
    line = f"{os.getpid() != parent} {handled} {sys.stdin.buffer.raw.read()}\\n"  # in one piece: three write
    print(line, end="", flush=True)
    if arguments == ["b"]:
        os.abort()
parent, client_process.handle = os.getpid(), handle
client_process.AllowedCode.load = lambda code, *identity: print("ahead", "torch" in sys.modules, flush=True)
client_process.import_module = lambda name: sys.modules.setdefault(name, None)
client_process.main()
"""


@pytest.mark.parametrize(("allow", "ahead"), [(INSTALLED, ["ahead True"]), ("0" * 64, [])])
def test_a_message_is_handled_by_a_copy_that_knows_nothing_of_others(allow: str, ahead: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(ROOT), allow], input='["a"]\n["b"]\n["c"]\n', capture_output=True, text=True
    )
    handled = [f"True [['{name}']] b''" for name in "abc"]
    assert sorted(done.stdout.splitlines()) == handled + ahead
    assert done.returncode == 0


def test_the_process_that_forks_is_started_again_when_it_has_died() -> None:
    started: list[subprocess.Popen[str]] = []
    executor = Executor(INSTALLED, "fork")
    executor.command = [sys.executable, "-Sc", "import sys; print(sys.stdin.readline(), file=sys.stderr)"]
    for _ in range(2):
        executor.reconcile()
        executor.reconcile()
        assert executor.forking is not None
        started.append(executor.forking)
        spec = ExecutionSpec(TaskType.CLIENT_APP, "127.0.0.1:1", "token", True, None, False, 1, False, 1)
        assert executor.launch(spec).status == LaunchResultStatus.ACCEPTED
        assert executor.forking.wait() == 0
    assert len({one.pid for one in started}) == 2


def test_what_may_be_allowed() -> None:
    assert allowed_code(f" {'A' * 64}, {'0' * 64}") == f"{'a' * 64},{'0' * 64}"
    assert allowed_code("installed") == INSTALLED
    for wrong in ("", "any", "abc", f"installed,{'0' * 64}", "0" * 63):
        with pytest.raises(SettingsError, match=r"--allow-code .*: must be installed, or SHA-256 hashes"):
            allowed_code(wrong)


@pytest.mark.parametrize("option", ["--isolation=subprocess", "--allow-runtime-dependency-installation"])
def test_site_run_takes_no_option_that_would_undo_it(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["site", "run", "--insecure", "--node-config", NODE, option]) == 1
    assert f"{option.partition('=')[0]}: not together with protofl site run" in capsys.readouterr().err


def test_a_site_asks_soon_at_first_and_as_seldom_as_flowers_own_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
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

    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr("subprocess.Popen", MagicMock())
    monkeypatch.setattr("protofl_common.tools.site.supernode.flower_supernode", a_site)
    assert main(["site", "run", "--insecure", "--node-config", NODE]) == 0
    assert waits[:11] == pytest.approx([0.3] * 11)
    assert waits[20] == pytest.approx(sum(waits[:20]) / 10)
    assert waits[59] == 3
    assert waits[60:] == pytest.approx([0.05, 0.3])


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ("partition-id=0 num-partitions=2", "node config without a site-name"),
        ('site-name="north" alow-download=true', "alow-download: unknown key"),
        ('site-name="north" allow-algorithms="fedprotto"', "allow-algorithms: 'fedprotto': choose from"),
    ],
)
def test_site_run_does_not_start_with_a_wrong_node_config(
    node: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["site", "run", "--insecure", "--node-config", node]) == 1
    assert reason in capsys.readouterr().err


def test_the_hash_is_that_of_flowers_bundle(bundle: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "protofl.fab").write_bytes(bundle)
    assert main(["site", "hash", str(ROOT), str(file)]) == 0
    assert capsys.readouterr().out.split() == [hashlib.sha256(bundle).hexdigest()] * 2
    assert main(["site", "hash", str(tmp_path / "none")]) == 1


# -- what a run could make a site do ----------------------------------------------------------------------------------


@pytest.fixture
def site(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


NODE = 'site-name="north" data-dir="data" cache-dir="cache" state-dir="state" allow-algorithms="fedproto"'


def found(*options: str, node: str = NODE, allow: str = INSTALLED, **asked: str | int) -> list[Finding]:
    return findings(allow, ["--node-config", node, *options], {key.replace("_", "-"): asked[key] for key in asked})


def level_of(said: list[Finding], text: str) -> str:
    (level,) = [one.level for one in said if text in f"{one.topic} {one.text}"]
    return level


def test_a_well_kept_site_has_nothing_to_be_warned_of(site: Path) -> None:
    said = found(dataset="image-folder", partition="own", image_size=8)
    assert {one.level for one in said} == {""}, said
    text = "\n".join(f"{one.topic} {one.text}" for one in said)
    assert "data 12 training and 4 test samples, 2 classes: cat, dog" in text
    assert f"writes state-dir {site / 'state'} (mode 0700)" in text
    assert f"writes FLWR_HOME {site / 'flwr'}: will be made, for this user only" in text
    assert "sends a prototype of each class, with the number of samples behind it: fedproto" in text
    assert "max-rounds 2000, max-epochs 100, max-steps 10000, max-batch-size 1024, max-image-size 512" in text
    assert not list((site / "cache").iterdir())


@pytest.mark.parametrize(
    ("options", "node", "level", "text"),
    [
        ([], 'partition-id=0 num-partitions="2"', "WRONG", "taken for a simulated client"),
        ([], NODE + " alow-download=true", "WRONG", "alow-download: unknown key"),
        ([], NODE + " max-epochs=0", "WRONG", "max-epochs = 0 must be"),
        ([], NODE.replace('"data"', '"nothing"'), "WRONG", "there is none"),
        ([], NODE + " allow-download=true", "warning", "downloads a run may"),
        ([], NODE + ' allow-python="mynets"', "warning", "imported and called: mynets"),
        ([], NODE + " insight=true", "warning", "200 test features"),
        ([], NODE.replace("fedproto", "all"), "warning", "all weights of the model: fedavg, fedprox"),
        ([], NODE.replace("fedproto", "fedgen"), "warning", "the head weights of the model and how many samples"),
        ([], NODE + ' device="cuda:77"', "WRONG", "device = 'cuda:77': PyTorch cannot use it"),
        (["--insecure"], NODE, "warning", "anybody on the way"),
        (["--superlink", "my.host:8000"], NODE, "warning", "key none"),
        (["--auth-supernode-private-key", "absent"], NODE, "WRONG", "absent: cannot be read"),
        (["--root-certificates", "data/cat/0.png"], NODE, "WRONG", "certificates data/cat/0.png"),
    ],
)
@pytest.mark.usefixtures("site")
def test_what_is_wrong_or_worth_a_warning_comes_first(options: list[str], node: str, level: str, text: str) -> None:
    said = found(*options, node=node)
    assert level_of(said, text) == level
    assert said[0].level == level


@pytest.mark.usefixtures("site")
def test_a_strict_site_is_not_called_wrong_for_what_runs_ask_by_default() -> None:
    strict = NODE.replace("fedproto", "fedtgp") + " max-epochs=1 max-rounds=2 max-batch-size=3"
    assert {one.level for one in found(node=strict)} == {""}
    said = found(node=strict, algo="fedtgp", rounds=3, local_epochs=1, batch_size=3, eval_batch_size=3)
    assert said[0].text == "rounds = 3: this site takes at most 2; its operator may raise max-rounds (node config)"


def test_the_steps_of_a_round_are_limited_as_its_epochs_are() -> None:
    said = permission_problems({"max-steps": 50}, {"local-steps": 51})
    assert said == ["local-steps = 51: this site takes at most 50; its operator may raise max-steps (node config)"]
    assert not permission_problems({}, {"local-steps": 10_000})
    assert permission_problems({}, {"local-steps": 10_001})


def test_folders_and_keys_that_others_may_read(site: Path) -> None:
    for name in ("data", "state", "cache"):
        (site / name).chmod(0o755)
    (site / "key").write_text("secret")
    (site / "key").chmod(0o640)
    said = found("--auth-supernode-private-key", "key")
    assert level_of(said, "key: other users of this machine may read it") == "WRONG"
    for name in ("data", "state", "cache"):
        assert level_of(said, f"{site / name}: other users of this machine may look in (mode 0755)") == "warning"


def write_certificate(path: Path, days: int) -> None:
    """One that is valid for that many days more."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now - timedelta(days=9))
    made = builder.not_valid_after(now + timedelta(days=days, hours=1)).sign(key, hashes.SHA256())
    path.write_bytes(made.public_bytes(Encoding.PEM))


@pytest.mark.parametrize(("days", "level"), [(-1, "WRONG"), (29, "warning"), (300, "")])
def test_days_that_a_certificate_has_left(days: int, level: str, site: Path) -> None:
    write_certificate(site / "ca.crt", days)
    assert level_of(found("--root-certificates", "ca.crt"), "certificates") == level


def test_code_of_whoever_submits_is_the_first_warning(site: Path) -> None:
    (site / "state").chmod(0o755)
    said = found(allow="any")
    assert said[0].topic == "code"
    assert "whoever may submit runs has code of their own run here" in said[0].text
    assert level_of(found(allow="0" * 64), "bundles 00000000…") == ""


def test_data_that_a_run_cannot_use(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "data/cat/0.png").write_text("no image")
    settings = ["dataset=image-folder", "partition=own", "image-size=8"]
    assert main(["site", "check", *settings, "--node-config", NODE]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("WRONG   data          DataError: its data cannot be read")
    assert "0.png is not a readable image" in said.err
    assert main(["site", "check", "--node-config", NODE]) == 0
    assert stat.S_IMODE((site / "state").stat().st_mode) == 0o700


@pytest.mark.usefixtures("site")
def test_a_node_config_that_flower_would_read_in_part_is_refused() -> None:
    with pytest.raises(SettingsError, match="Flower reads only site-name; no spaces at ="):
        found(node='site-name="north" data-dir = "data"')


# -- what a site keeps ------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(home: Path) -> str:
    """The node config of a site that took part in two runs, beside the traces of others."""
    node = {"site-name": "north", "partition-id": 0, "num-partitions": 1}
    node |= {"state-dir": str(home / "state"), "cache-dir": str(home / "cache")}
    for name in ("first", "second"):
        config = run_config(home / name, run_name=name, algo="fedpcl", dataset="digits", partition="iid", rounds=1)
        run_federation(config, nodes={7: node})
    for other in ("state/first/clients/south/x.safetensors", "cache/letter.txt", "cache/features/notes"):
        (home / other).parent.mkdir(parents=True, exist_ok=True)
        (home / other).write_text("not north's")
    return " ".join(f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in node.items())


def test_a_site_says_what_it_keeps_and_removes_what_is_named(
    kept: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["site", "status", "--node-config", kept]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["first", "second", "caches/", "state-dir", "cache-dir"]
    for wrong in (["third"], ["first", "third"], []):
        assert main(["site", "purge", *wrong, "--node-config", kept]) == 1
        assert "choose from first, second, caches/" in capsys.readouterr().err
    assert main(["site", "purge", "first", "second", "caches/", "--node-config", kept]) == 0
    left = sorted(str(path.relative_to(home)) for top in ("state", "cache") for path in (home / top).rglob("*.*"))
    assert left == ["cache/letter.txt", "state/first/clients/south/x.safetensors"]
    assert not (home / "state/second").exists()
    assert (home / "cache/features/notes").exists()


# -- the page docs/security.md ----------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def test_the_page_shows_what_the_check_prints(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    images(site / "data/north", *(f"{kind}/{i}.png" for kind in ("benign", "malignant") for i in range(8)))
    (site / "data/north").chmod(0o750)
    (site / "certs/nodes").mkdir(parents=True)
    write_certificate(site / "certs/ca.crt", 300)
    (site / "certs/nodes/north").touch(0o600)
    monkeypatch.setenv("XDG_CACHE_HOME", str(site / "home/.cache"))
    monkeypatch.setenv("FLWR_HOME", str(site / "home/.flwr"))
    monkeypatch.setattr("protofl_common.tools.site.check.shown_by", lambda address, certificates: Shown(800, 0.2))
    (example,) = re.findall(r"```\n\$ (protofl site check .*?)\n```", PAGE, re.S)
    command, shown = re.split(r"(?<!\\)\n", example, maxsplit=1)
    words = shlex.split(command.replace("/data/", f"{site}/data/"))
    assert main(words[1:]) == 0
    printed = re.sub(r"version [0-9a-f]{8}", "version 6f3a91c2", capsys.readouterr().out)
    places = {f"{site}/data": "/data", f"{site}/home": "/home/protofl", f"{site}": "/srv", f"{ROOT}": "/opt/protofl"}
    for here, there in places.items():
        printed = printed.replace(here, there)
    assert printed.splitlines() == [line.rstrip() for line in shown.splitlines()]


def test_the_page_names_every_key_of_a_node_config() -> None:
    named = set(re.findall(r"`([a-z-]+)`", "".join(line for line in PAGE.splitlines() if line.startswith("| `"))))
    assert set(NODE_KEYS) <= named
