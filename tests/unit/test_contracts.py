"""What holds for the whole house: twins, import rules, one training loop."""

import ast
import re
import sys
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module

import pytest

from client_app.algorithms.base import ClientAlgorithm, client_half
from protofl_common.basics.code_version import NOT_AT_A_SITE
from protofl_common.config.options import SettingsError
from protofl_common.experiment.catalog import CATALOG, half
from server_app.strategies.base import ServerStrategy, server_half
from tests.support import ROOT
from tests.support.processes import output_of

FLOWER_ROOMS = {"wire", "simulation", "flower.py"}
"""Rooms of protofl_common that may import flwr, beside its tools; its mathematics may not."""
PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp")
"""Modules of Flower that any file may import what they export from."""
MODULE_OF_FLOWER = re.compile(r"""["'](flwr\.[\w.]+)["']""")
"""A module as a text, from which `import_module` would import it."""
PACKAGES = ("client_app", "server_app", "protofl_common")
COMMON = ROOT / "protofl_common"
TOOLS = COMMON / "tools"
SIMULATION = COMMON / "simulation"
HALVES = ("client_app/algorithms", "server_app/strategies")
GRADIENTS = re.compile(
    r"\.backward\("
    r"|\bautograd\s*\.\s*(grad|backward)\b"
    r"|\bimport\s+(\w+\s*,\s*)*(grad|backward)\b"
)
"""Where a loop of training takes them."""
OWN_RULE = ("protections/private_step.py",)
"""Update rules of their own, a `Step` that asks for gradients itself: files of client_app."""


@cache
def modules_in(path):
    """Every module that a file imports, and every name that it imports from one."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def files_of(*packages):
    files = []
    for package in packages:
        files += (ROOT / package).rglob("*.py")
    return files


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def twins(algo):
    """Return the files of the client's and the server's half, whether they are there or not."""
    name = algo.replace("-", "_")
    return f"client_app/algorithms/{name}.py", f"server_app/strategies/{name}.py"


@pytest.mark.parametrize("algo", CATALOG)
def test_a_row_names_both_halves(algo):
    """A half stands in the file of its name; one that adds nothing is the one it inherits."""
    row = CATALOG[algo]
    assert issubclass(client_half(row), ClientAlgorithm)
    assert issubclass(server_half(row), ServerStrategy)

    for path, half_of_row in zip(twins(algo), (row.client, row.server), strict=True):
        module = half_of_row.partition(":")[0].replace(".", "/") + ".py"
        has_own_file = (ROOT / path).exists()
        assert (module == path) is has_own_file, f"{algo} has {path}, and its row names {module}"


@pytest.mark.parametrize("algo", CATALOG)
def test_twins_point_to_each_other_and_stay_short(algo):
    files = [path for path in twins(algo) if (ROOT / path).exists()]
    for path in files:
        text = (ROOT / path).read_text()
        docstring = text.split('"""')[1]
        assert len(text.splitlines()) <= 120, f"{path} has outgrown its room"
        assert all(other in docstring for other in files if other != path)


@pytest.mark.parametrize(("path", "reason"), [
    ("no_such_module:Nothing", "ModuleNotFoundError"),
    ("client_app.site.client:Nothing", "AttributeError"),
    ("client_app.site.client:Client", "Client is no subclass of ClientAlgorithm"),
    ("client_app.site.client", "is no subclass|AttributeError|ValueError"),
])  # fmt: skip
def test_a_row_that_names_no_half_is_refused(path, reason):
    with pytest.raises(SettingsError, match=reason):
        half(path, ClientAlgorithm)


def test_every_half_is_of_an_algorithm_of_the_catalog():
    files = {path.stem for path in files_of(*HALVES)} - {"__init__", "base"}
    add_nothing = {"local", "fedbn", "fedper", "lg_fedavg", "protofed"}  # on either side
    assert files == {algo.replace("-", "_") for algo in CATALOG} - add_nothing


@pytest.mark.parametrize("package", PACKAGES)
def test_neither_side_nor_shared_code_imports_what_it_must_not(package):
    """Client and server do not import each other, nor the tools, nor the simulation.

    Of the shared code only `FLOWER_ROOMS` import Flower; the mathematics does not.
    """
    for path in files_of(package):
        if TOOLS in path.parents:
            continue
        modules = modules_in(path)
        packages = {name.partition(".")[0] for name in modules}
        assert not any(name.startswith("protofl_common.tools") for name in modules), path
        if SIMULATION not in path.parents:  # which runs both sides in one process
            assert not packages & ({"client_app", "server_app"} - {package}), path
            assert not any(name.startswith("protofl_common.simulation") for name in modules), path
        if package == "protofl_common" and "flwr" in packages:
            assert FLOWER_ROOMS & set(path.parts), path


def test_only_two_files_import_what_flower_does_not_export():
    """Names as texts count too, from which `import_module` could import."""
    public = set(PUBLIC)
    for module in PUBLIC:
        public |= {f"{module}.{name}" for name in import_module(module).__all__}

    importing = set()
    for path in files_of(*PACKAGES):
        imported = {name for name in modules_in(path) if name.partition(".")[0] == "flwr"}
        imported |= set(MODULE_OF_FLOWER.findall(path.read_text()))
        if imported - public:
            importing.add(str(path.relative_to(ROOT)))

    assert importing == {"protofl_common/flower.py", "protofl_common/tools/flower.py"}


DECIDES_BY_LABELS = re.compile(r"\b(argmax|bincount|cross_entropy)\(")
NOT_BY_LABELS = {
    "client_app/learning/sample_use.py": "counts classes that the task has named",
    "server_app/callbacks/metrics.py": "counts prototypes",
    "protofl_common/wire/payloads.py": "counts prototypes",
    "protofl_common/maths/prototypes.py": "means of each class, or of each cluster",
    "protofl_common/maths/losses.py": "FedTGP's contrast of prototypes with prototypes (Eq. 10)",
    "protofl_common/maths/finch.py": "counts the vectors of a cluster",
    "protofl_common/maths/gaussian.py": "the largest class",
    "protofl_common/privacy/release.py": "noisy counts of classes, and the largest of them",
    "protofl_common/data/partitions.py": "the client that has most to spare",
    "protofl_common/data/division.py": "counts the task's strata",
    "protofl_common/data/raw.py": "counts the values of pixels",
    "protofl_common/data/door.py": "checks a column before it is anybody's labels",
    "protofl_common/data/table.py": "the first row that is wrong",
}
"""File with such a word -> what it does there."""


def test_tasks_alone_decide_what_a_label_means():
    """Other code asks the `Task` for a loss, for what is predicted, for the classes of samples."""
    found = set()
    for path in files_of(*PACKAGES):
        if COMMON / "tasks" in path.parents:
            continue
        if DECIDES_BY_LABELS.search(path.read_text()):
            found.add(str(path.relative_to(ROOT)))
    assert found == NOT_BY_LABELS.keys()


def graph_without_circle(part_of):
    """Return for each part of the packages the parts that its modules import.

    CycleError names a circle. Imports inside functions and under TYPE_CHECKING count: a circle that
    works because of their order is a circle. ``part_of`` maps a module to its part.
    """
    files = {module_of(path): path for path in files_of(*PACKAGES)}
    graph = {}
    for module, path in files.items():
        part = part_of(module)
        imported = {part_of(name) for name in modules_in(path) & files.keys()}
        graph.setdefault(part, set()).update(imported - {part})
    TopologicalSorter(graph).prepare()
    return graph


def test_no_file_imports_one_that_imports_it():
    graph_without_circle(str)


def test_no_room_imports_one_that_imports_it():
    """Rooms are the folders and files of each package."""
    rooms = graph_without_circle(lambda module: ".".join(module.split(".")[:2]))
    assert rooms["protofl_common.config"] == set(), "it is the lowest"


def test_no_folder_imports_one_that_imports_it():
    """A file belongs to the folder that it lies in, and the files beside folders to the package."""
    folders = {module_of(path): module_of(path.parent) for path in files_of(*PACKAGES)}
    graph = graph_without_circle(folders.__getitem__)
    for folder in ("client_app.learning", "server_app.run"):
        package = folder.partition(".")[0]
        assert not [other for other in graph[folder] if other.startswith(package)]


def test_what_no_site_runs_is_imported_by_no_client():
    """The code in `NOT_AT_A_SITE` may change without asking a site's operator again."""
    files = {module_of(path): path for path in files_of(*PACKAGES)}
    reached = set()
    to_read = {name for name, path in files.items() if path.is_relative_to(ROOT / "client_app")}
    to_read |= {name for name in files if name.startswith("protofl_common.algorithms")}
    while to_read:
        name = to_read.pop()
        reached.add(name)
        to_read |= (modules_in(files[name]) & files.keys()) - reached

    for place in NOT_AT_A_SITE:
        assert (COMMON / place).exists()
        assert not [name for name in reached if files[name].is_relative_to(COMMON / place)]


DATA_LIBRARIES = ("datasets", "flwr_datasets", "sklearn", "matplotlib", "PIL")
HEAVY = {
    "protofl_common.config.architectures": ("torch",),
    "protofl_common.config.backbones": ("torch", "numpy"),
    "protofl_common.data": ("torch", "torchvision", *DATA_LIBRARIES),
    "protofl_common.models.build": ("torchvision",),
}
"""Module, which a client process imports in every round -> what it must not import."""


@pytest.mark.slow
@pytest.mark.parametrize("module", HEAVY)
def test_importing_a_module_stays_cheap(module):
    code = f"import sys, {module}; print([name for name in {HEAVY[module]} if name in sys.modules])"
    assert output_of([sys.executable, "-c", code]) == "[]\n"


def test_no_test_imports_another_test():
    """What several tests need stands in tests/support."""
    for path in files_of("tests"):
        assert not any(re.match(r"tests\..*\btest_", name) for name in modules_in(path)), path


def test_there_is_one_training_loop():
    client_app = ROOT / "client_app"
    loops = set()
    for path in files_of("client_app"):
        if GRADIENTS.search(path.read_text()):
            loops.add(str(path.relative_to(client_app)))
    assert loops == {"learning/training.py", *OWN_RULE}
