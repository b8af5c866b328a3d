"""The wheel and Flower's bundle, each alone.

They run in an empty folder, by a Python that has only what they depend on.
"""

import json
import os
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tests.support import ROOT
from tests.support.machines import copy_checkout
from tests.support.processes import output_of, superlink

pytestmark = pytest.mark.system
SCRIPT = "#!{python}\nimport sys\nfrom {module} import {attr}\nsys.exit({attr}())\n"


class Clean:
    """An environment with the dependencies alone, and an empty folder in which commands run."""

    def __init__(self, folder, temporary):
        """Make the environment; its dependencies are those that this process has installed."""
        self.folder = folder / "empty"
        self.bin = folder / "env" / "bin"
        self.folder.mkdir()
        venv.create(folder / "env", with_pip=False)
        (packages,) = (folder / "env").glob("lib/*/site-packages")
        elsewhere = [path for path in sys.path if path.endswith("site-packages")]
        # their own .pth files, of which one leads to this checkout, are not read from there
        (packages / "dependencies.pth").write_text("\n".join(elsewhere))
        for point in distribution("flwr").entry_points.select(group="console_scripts"):
            script = self.bin / point.name
            python = self.bin / "python"
            script.write_text(SCRIPT.format(python=python, module=point.module, attr=point.attr))
            script.chmod(0o755)
        self.environment = os.environ | {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "TMPDIR": temporary,
            "FLWR_HOME": f"{temporary}/flwr",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "PYTHONPATH": "",
            "RAY_ADDRESS": "local",
        }

    def run(self, *words):
        return output_of(words, self.environment, self.folder)

    def finds(self, module):
        """True if the environment's Python can import a module."""
        code = f"import importlib.util; print(importlib.util.find_spec({module!r}) is not None)"
        return self.run("python", "-c", code).strip() == "True"


@pytest.fixture
def clean(tmp_path, short):
    return Clean(tmp_path, short)


def test_the_wheel_runs_exports_and_predicts(clean, tmp_path):
    """The wheel has one top-level package, protofl_common, in which the two apps are.

    The project makes a run by a recipe's name, and plans a table of the project's.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    python = str(clean.bin / "python")
    install = [*pip, "--python", python, "install", "--no-deps", str(wheel)]
    subprocess.run(install, check=True)
    assert clean.finds("protofl_common")
    assert not clean.finds("client_app")
    assert not clean.finds("server_app")

    tiny = ("rounds=1", "local-epochs=1", "run-name=first", "--clients", "2")
    clean.run("protofl", "run", "--recipe", "digit-domains", *tiny)
    clean.run("protofl", "export", "runs/first", "--site", "site-0", "--out", "model")
    seven = (load_digits().images[7] * 15.9).astype(np.uint8)  # 0 to 16 becomes 0 to 254
    Image.fromarray(seven).save(clean.folder / "seven.png")
    predicted = clean.run("protofl", "predict", "model", "seven.png", "--json")
    assert json.loads(predicted)["name"] in "0123456789"
    table = clean.run("protofl", "table", "configs/tables/side-by-side.yaml", "--dry-run")
    assert "FedTGP" in table


def test_the_bundle_runs(clean, tmp_path):
    """What `flwr build` packs is unpacked in an empty folder, and `flwr run` simulates it."""
    copy_checkout(tmp_path / "protofl")
    clean.run("flwr", "build", "--app", str(tmp_path / "protofl"))
    (bundle,) = clean.folder.glob("*.fab")
    zipfile.ZipFile(bundle).extractall(clean.folder / "protofl")
    Path(clean.environment["FLWR_HOME"]).mkdir()
    with superlink(tmp_path, "--simulation", env=clean.environment, cwd=clean.folder):
        settings = 'dataset="digits" partition="iid" rounds=1 local-epochs=1 run-name="first"'
        federation = "num-supernodes=2 client-resources-num-cpus=1"
        options = ("--stream", "--run-config", settings, "--federation-config", federation)
        output = clean.run("flwr", "run", "protofl", "here", *options)
        assert (clean.folder / "runs" / "first" / "summary.json").exists(), output
