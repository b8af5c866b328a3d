"""Recipes: the settings in ``configs/recipes/NAME.toml``, and the simulation that its own comment asks for."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import NamedTuple

from protofl_common.config.options import Scalar, SettingsError
from protofl_common.experiment.settings import app_folder, flatten
from protofl_common.tools.cli.assignments import typed

ROOT = app_folder()
RECIPES = ROOT / "configs" / "recipes"
RUNS = Path("runs")
DEFAULT_FEDERATION: dict[str, Scalar] = {"num-supernodes": 10, "client-resources-num-cpus": 1}
"""Ten clients, one process of one thread per core: what small models at small batches run best with."""


class Recipe(NamedTuple):
    settings: dict[str, Scalar]  # its keys, flat
    federation: dict[str, Scalar]  # what ``--federation-config`` holds in the comment that says how to run it


def read_recipe(name: str) -> Recipe:
    """The recipe of that name in ``configs/recipes``, or the TOML file at that path; an empty one of no name.

    SettingsError when there is none, or it is not TOML.
    """
    if not name:
        return Recipe({}, DEFAULT_FEDERATION)
    path = found(name) if name.endswith(".toml") else RECIPES / f"{name}.toml"
    try:
        text = path.read_text(encoding="utf-8")
        settings = flatten(tomllib.loads(text))
    except OSError:
        there = ", ".join(sorted(file.stem for file in RECIPES.glob("*.toml")))
        raise SettingsError(f"recipe = {name!r}: no such file; choose a TOML file, or one of {there}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"recipe = {name!r}: not TOML: {error}") from None
    return Recipe(settings, federation_in(text))


def found(name: str) -> Path:
    """The file of that name here, else in the app's folder."""
    return Path(name) if Path(name).is_file() else ROOT / name


def run_named(run: str) -> Path:
    """The folder called ``run``, here or in ``runs/``; SettingsError where there is none."""
    for folder in (Path(run), RUNS / run):
        if folder.is_dir():
            return folder
    raise SettingsError(f"{run}: no such folder, neither here nor in {RUNS}/")


def federation_in(text: str) -> dict[str, Scalar]:
    """``{"num-supernodes": 20, …}`` from the line ``# flwr run … --federation-config '…'``; the default without it."""
    found = re.search(r"^# flwr run .*--federation-config '([^']*)'", text, re.MULTILINE)
    if not found:
        return dict(DEFAULT_FEDERATION)
    words = (word.partition("=") for word in shlex.split(found[1]))
    return {key: typed(value, int if value.isdigit() else float) for key, _, value in words}
