"""What travels: the app bundle that every site is sent, the wheel, and the image."""

import io
import re
import shlex
import shutil
import sys
import zipfile

import pytest
from flwr.cli.build import build_fab_from_disk
from hatchling.builders.wheel import WheelBuilder

from protofl_common.config.backbones import EMBEDDED
from tests.support import ROOT
from tests.support.processes import output_of

STRAY_FILES = (
    "patients.json",
    "secrets.yaml",
    "mydata/patients.json",
    "notes.md",
    "server_app/patients.json",
    "x.py",
)


PACKAGES = ("client_app", "server_app", "protofl_common")


def code_of(*packages):
    code = set()
    for package in packages:
        code |= {str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py")}
    return code


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """The bundle that Flower makes of a checkout in which somebody keeps files of their own."""
    copy = tmp_path_factory.mktemp("checkout") / "protofl"
    for name in (*PACKAGES, "configs", "docker", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, copy)
    for name in STRAY_FILES:
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text("{}")
    return zipfile.ZipFile(io.BytesIO(build_fab_from_disk(copy)))


def test_the_bundle_holds_the_app_and_nothing_of_the_operators(bundle):
    """The three packages go to every site; the tools and stray files do not."""
    names = set(bundle.namelist())
    assert not names & set(STRAY_FILES)

    tops = {name.partition("/")[0] for name in names}
    assert tops == {*PACKAGES, "pyproject.toml", "README.md", "LICENSE", ".info"}

    code = code_of(*PACKAGES)
    tools = {name for name in code if name.startswith("protofl_common/tools/")}

    assert code - tools <= names
    assert not tools & names
    assert {f"protofl_common/backbones/weights/{name}.json" for name in EMBEDDED} <= names


def test_an_unpacked_bundle_is_the_same_app(bundle, tmp_path):
    bundle.extractall(tmp_path)
    again = zipfile.ZipFile(io.BytesIO(build_fab_from_disk(tmp_path)))
    assert again.read(".info/CONTENT") == bundle.read(".info/CONTENT")


@pytest.mark.slow
def test_every_module_loads_from_the_bundle_with_the_embedded_data(bundle, tmp_path):
    """All modules are imported in a process that starts in the unpacked bundle."""
    bundle.extractall(tmp_path)
    # Packages of methods import it.
    shutil.copytree(ROOT / "protofl_common/tools/protofl", tmp_path / "protofl")

    printed = output_of([sys.executable, "-c", IMPORT_ALL], cwd=tmp_path)

    assert printed == "(128, 128, 128)\n"


IMPORT_ALL = """
import importlib, pathlib
for file in pathlib.Path().rglob("*.py"):
    module = importlib.import_module(".".join(file.with_suffix("").parts).removesuffix(".__init__"))
    assert pathlib.Path(module.__file__).samefile(file), module.__file__
from protofl_common.backbones.features import feature_widths
from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.data.sources import SOURCES
print(feature_widths(("glyphs", "fractals", "scenes")))
for name in ("digits", "digit-domains"):
    SOURCES[name].read(Settings.from_run_config(default_run_config() | {"dataset": name}).data)
"""


def test_a_wheel_brings_no_package_of_a_general_name(tmp_path):
    """client_app and server_app lie inside protofl_common, beside what the app needs."""
    wheel = next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    names = set(zipfile.ZipFile(wheel).namelist())

    tops = {name.partition("/")[0].partition("-")[0] for name in names}
    assert tops == {"protofl_common", "protofl"}

    recipes = {f"configs/recipes/{path.name}" for path in (ROOT / "configs" / "recipes").iterdir()}
    app = recipes | code_of("client_app", "server_app")
    app |= {"pyproject.toml", "README.md", "LICENSE", "protofl_common/experiment/settings.py"}

    assert {f"protofl_common/app/{name}" for name in app} <= names
    assert {"protofl_common/py.typed", "protofl_common/tools/cli/run.py"} <= names
    assert not any("__pycache__" in name for name in names)


def copied_into_the_image(dockerfile):
    """Return what the last stage of a Dockerfile copies from the folder that is built.

    That are the sources of every COPY and ADD in it, without what comes from an earlier stage.
    """
    lines = [line for line in dockerfile.splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    last = re.split(r"(?mi)^FROM ", text)[-1]
    sources = []
    for arguments in re.findall(r"(?mi)^(?:COPY|ADD)\s+(.*)$", last):
        words = shlex.split(arguments)
        if not any(word.startswith("--from=") for word in words):
            *copied, _target = [word for word in words if not word.startswith("--")]
            sources += copied
    return sources


def test_what_the_build_alone_may_see_gets_not_into_the_image(tmp_path):
    """docker/extra may hold passwords of a package mirror."""
    docker = tmp_path / "docker"
    shutil.copytree(ROOT / "docker", docker)
    secret = (docker / "extra/pip.conf").resolve()
    secret.write_text("index-url = https://user:password@mirror/")
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()

    copied = set()
    for source in copied_into_the_image(dockerfile):
        copied.update(path.resolve() for path in tmp_path.glob(source.strip("/") or "."))

    assert secret not in copied
    assert not copied & set(secret.parents)
    for program in (*docker.glob("*.py"), *docker.glob("*.sh")):
        assert program.resolve() in copied
