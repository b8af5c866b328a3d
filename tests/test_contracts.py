"""What holds for the whole house: twins, import rules, one training loop, what may leave a client."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from flwr.app import MessageType
from flwr.cli.build import build_fab_from_disk

from client_app.algorithms import ALGORITHMS
from protofl_common.backbones.names import EMBEDDED
from protofl_common.catalog import CATALOG
from protofl_common.messages import Limits, unpack_payload, unpack_report
from server_app.strategies import STRATEGIES
from tests.harness import run_config, run_federation

ROOT = Path(__file__).parents[1]
FLOWER_ROOMS = {"messages", "check.py"}
"""Files of protofl_common that may import flwr; its mathematics may not."""
TOOLS = ROOT / "protofl_common" / "tools"
IMPORT_ALL = """
import importlib, pathlib
for file in pathlib.Path().rglob("*.py"):
    module = importlib.import_module(".".join(file.with_suffix("").parts).removesuffix(".__init__"))
    assert pathlib.Path(module.__file__).samefile(file), module.__file__
"""


def modules_in(path: Path) -> set[str]:
    """Every module that a file imports, and every name that it imports from one."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def imports_of(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in modules_in(path)}


def test_catalog_and_both_dictionaries_have_the_same_keys() -> None:
    assert list(CATALOG) == list(ALGORITHMS) == list(STRATEGIES)


@pytest.mark.parametrize("algo", CATALOG)
def test_twins_stand_in_files_of_the_same_name_and_point_to_each_other(algo: str) -> None:
    name = algo.replace("-", "_")
    client, server = f"client_app/algorithms/{name}.py", f"server_app/strategies/{name}.py"
    assert server in (ROOT / client).read_text(encoding="utf-8").split('"""')[1]
    assert client in (ROOT / server).read_text(encoding="utf-8").split('"""')[1]
    for path in (client, server):
        assert len((ROOT / path).read_text(encoding="utf-8").splitlines()) <= 130, f"{path} has outgrown its room"


def test_client_and_server_never_import_each_other() -> None:
    for path in (ROOT / "client_app").rglob("*.py"):
        assert "server_app" not in imports_of(path), path
    for path in (ROOT / "server_app").rglob("*.py"):
        assert "client_app" not in imports_of(path), path


def test_shared_code_imports_neither_side_and_its_mathematics_no_flower() -> None:
    for path in (ROOT / "protofl_common").rglob("*.py"):
        found = imports_of(path)
        assert not found & {"client_app", "server_app"}, path
        assert "flwr" not in found or FLOWER_ROOMS & set(path.parts), path


def test_only_tools_import_tools() -> None:
    for package in ("client_app", "server_app", "protofl_common"):
        for path in (ROOT / package).rglob("*.py"):
            if TOOLS not in path.parents:
                assert not any(name.startswith("protofl_common.tools") for name in modules_in(path)), path


def test_the_app_bundle_holds_both_apps_without_the_tools_and_they_import(tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(ROOT))) as bundle:
        names = set(bundle.namelist())
        bundle.extractall(tmp_path)
    assert {"pyproject.toml", "client_app/app.py", "server_app/app.py"} <= names
    assert {f"protofl_common/backbones/weights/{name}.json" for name in EMBEDDED} <= names
    assert not any(name.startswith(("protofl_common/tools/", "tests/", "docker/")) for name in names)
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_there_is_one_training_loop() -> None:
    loops = [path.name for path in (ROOT / "client_app").rglob("*.py") if ".backward(" in path.read_text("utf-8")]
    assert loops == ["training.py"]


@pytest.mark.parametrize("algo", CATALOG)
def test_nothing_but_the_declared_upload_and_a_report_leaves_a_client(algo: str, tmp_path: Path) -> None:
    outcome = run_federation(run_config(tmp_path, algo=algo, rounds=2), clients=3)
    row = CATALOG[algo]
    for message, reply in outcome.grid.log:
        if message.metadata.message_type == MessageType.QUERY:
            assert set(reply.content) == {"site"}
            continue
        training = message.metadata.message_type == MessageType.TRAIN
        losses = row.reported_losses if training else ()
        unpack_report(reply.content, int(message.content["round"]["round"]), losses)
        crossing = row.up if training else type(row.up)()
        sent = reply.content.array_records
        declared = {name for name in ("prototypes", "weights") if getattr(crossing, name)}
        last = message.metadata.group_id == "2"
        assert set(sent) == declared if last else set(sent) <= declared
        weights = {}
        if "weights" in sent:
            weights = {name: (array.dtype, array.shape) for name, array in sent["weights"].items()}
        unpack_payload(reply.content, crossing, Limits(10, 64, weights=weights), required=training and last)
