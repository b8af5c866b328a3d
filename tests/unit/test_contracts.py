"""What holds for the whole house: twins, import rules, one training loop, what may leave a client."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from client_app.algorithms.base import ClientAlgorithm, client_half
from protofl_common.config.options import SettingsError
from protofl_common.experiment.catalog import CATALOG, half
from server_app.strategies.base import ServerStrategy, server_half
from tests.support import ROOT

FLOWER_ROOMS = {"wire", "check.py", "federation.py", "site"}
"""Files of protofl_common that may import flwr; its mathematics may not."""
PACKAGES = ("client_app", "server_app", "protofl_common")
COMMON = ROOT / "protofl_common"
TOOLS = COMMON / "tools"
HALVES = ("client_app/algorithms", "server_app/strategies")
GRADIENTS = re.compile(
    r"\.backward\(|\bautograd\s*\.\s*(grad|backward)\b|\bimport\s+(\w+\s*,\s*)*(grad|backward)\b"
)
"""Where a loop of training takes them."""
OWN_RULE = ("protections/private_step.py",)
"""Update rules of their own, a `Step` that asks for gradients itself: files of client_app."""


@cache
def modules_in(path: Path) -> set[str]:
    """Every module that a file imports, and every name that it imports from one."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("algo", CATALOG)
def test_a_row_names_both_halves_and_twins_point_to_each_other(algo: str) -> None:
    """A half of an algorithm stands in the file of its name; one that adds nothing is the one it inherits."""
    row, name = CATALOG[algo], algo.replace("-", "_")
    client, server = f"client_app/algorithms/{name}.py", f"server_app/strategies/{name}.py"
    assert issubclass(client_half(row), ClientAlgorithm)
    assert issubclass(server_half(row), ServerStrategy)
    for path, other, named in ((client, server, row.client), (server, client, row.server)):
        module = named.partition(":")[0].replace(".", "/") + ".py"
        assert (module == path) == (ROOT / path).exists(), (
            f"{algo} has {path}, and its row names {module}"
        )
        if not (ROOT / path).exists():
            continue
        text = (ROOT / path).read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 120, f"{path} has outgrown its room"
        if (ROOT / other).exists():
            assert other in text.split('"""')[1]


@pytest.mark.parametrize(("path", "said"), [
    ("no_such_module:Nothing", "ModuleNotFoundError"),
    ("client_app.client:Nothing", "AttributeError"),
    ("client_app.client:Client", "Client is no subclass of ClientAlgorithm"),
    ("client_app.client", "is no subclass|AttributeError|ValueError"),
])  # fmt: skip
def test_a_row_that_names_no_half_is_refused(path: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        half(path, ClientAlgorithm)


def test_every_half_is_of_an_algorithm_of_the_catalog() -> None:
    files = {path.stem for folder in HALVES for path in (ROOT / folder).glob("*.py")} - {
        "__init__",
        "base",
    }
    add_nothing = {"local", "fedbn", "fedper", "lg_fedavg", "protofed"}  # on either side
    assert files == {algo.replace("-", "_") for algo in CATALOG} - add_nothing


@pytest.mark.parametrize("package", PACKAGES)
def test_neither_side_nor_shared_code_imports_what_it_must_not(package: str) -> None:
    """And the mathematics imports no Flower."""
    for path in (ROOT / package).rglob("*.py"):
        if TOOLS in path.parents:  # they run both sides in one process
            continue
        found = {name.partition(".")[0] for name in modules_in(path)}
        assert not found & ({"client_app", "server_app"} - {package}), path
        assert not any(name.startswith("protofl_common.tools") for name in modules_in(path)), path
        assert (
            package != "protofl_common" or "flwr" not in found or FLOWER_ROOMS & set(path.parts)
        ), path


def test_no_room_of_shared_code_imports_one_that_imports_it() -> None:
    """Rooms are the folders and files of protofl_common; imports under TYPE_CHECKING count. `config` is the lowest."""
    rooms: dict[str, set[str]] = {}
    for path in COMMON.rglob("*.py"):
        names = {
            name.split(".")[1] for name in modules_in(path) if name.startswith("protofl_common.")
        }
        room = path.relative_to(COMMON).with_suffix("").parts[0]
        rooms.setdefault(room, set()).update(names - {room})
    TopologicalSorter(rooms).prepare()  # raises CycleError, which names the rooms of a circle
    assert rooms["config"] == set()


def test_no_file_imports_one_that_imports_it() -> None:
    """Imports inside functions count: a circle that works because of their order is a circle."""
    paths = {path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in paths
    }
    graph = {
        module: modules_in(path) & modules.keys() - {module} for module, path in modules.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files of a circle


HEAVY = {
    "protofl_common.config.architectures": ("torch",),
    "protofl_common.config.backbones": ("torch", "numpy"),
    "protofl_common.data": (
        "torch",
        "torchvision",
        "datasets",
        "flwr_datasets",
        "sklearn",
        "matplotlib",
        "PIL",
    ),
    "protofl_common.models.build": ("torchvision",),
}
"""Module, which a client process imports in every round -> what it must not import."""


@pytest.mark.slow
@pytest.mark.parametrize("module", HEAVY)
def test_importing_a_module_stays_cheap(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY[module]} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_no_test_imports_another_test() -> None:
    """What several tests need stands in tests/support."""
    for path in (ROOT / "tests").rglob("*.py"):
        assert not any(re.match(r"tests\..*\btest_", name) for name in modules_in(path)), path


def test_there_is_one_training_loop() -> None:
    """And another one would be found."""
    paths = (ROOT / "client_app").rglob("*.py")
    loops = {
        str(path.relative_to(ROOT / "client_app"))
        for path in paths
        if GRADIENTS.search(path.read_text("utf-8"))
    }
    assert loops == {"training.py", *OWN_RULE}
    hits = (
        "loss.backward()",
        "terms['total'].backward(retain_graph=True)",
        "torch.autograd.grad(loss, parameters)",
    )
    hits += (
        "autograd.grad(loss, parameters)",
        "torch.autograd.backward(loss)",
        "from torch.autograd import grad",
    )
    hits += ("from torch.autograd import Function, grad",)
    lines = (*hits, "with torch.no_grad():", "needs_gradients = False")
    assert [line for line in lines if GRADIENTS.search(line)] == [*hits]
