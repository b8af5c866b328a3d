"""The package in ``tests/support/outside`` as pip would leave it, without the network and without its build tool."""

import shutil
import tomllib
from pathlib import Path
from typing import Any

OUTSIDE = Path(__file__).parent / "outside"


def pyproject() -> dict[str, Any]:
    """What the package says of itself."""
    return tomllib.loads((OUTSIDE / "pyproject.toml").read_text(encoding="utf-8"))


def install_into(folder: Path) -> Path:
    """Make ``folder`` a site-packages that holds it: its modules, and the ``dist-info`` that its wheel would have."""
    project = pyproject()["project"]
    for package in pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        shutil.copytree(
            OUTSIDE / package, folder / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    name, version = project["name"], project["version"]
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n", encoding="utf-8"
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder
