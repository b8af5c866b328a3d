"""The package in ``tests/support/outside`` as pip would leave it, without network or build."""

import shutil
import tomllib
from pathlib import Path
from typing import Any

OUTSIDE = Path(__file__).parent / "outside"


def pyproject() -> dict[str, Any]:
    """What the package says of itself."""
    return tomllib.loads((OUTSIDE / "pyproject.toml").read_text(encoding="utf-8"))


def install_into(folder: Path) -> Path:
    """Install the package into ``folder``, as into a site-packages, and return the folder.

    That is its modules, and the ``dist-info`` that its wheel would have.
    """
    content = pyproject()
    without_caches = shutil.ignore_patterns("__pycache__")
    for package in content["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        shutil.copytree(OUTSIDE / package, folder / package, ignore=without_caches)

    name = content["project"]["name"]
    version = content["project"]["version"]
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    with (info / "entry_points.txt").open("w", encoding="utf-8") as file:
        for group, points in content["project"]["entry-points"].items():
            file.write(f"[{group}]\n")
            for key, value in points.items():
                file.write(f"{key} = {value}\n")
    return folder
