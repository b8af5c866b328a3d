"""Arguments that commands share: ``key=value``, ``--allow-python``, ``--json``, recipes, runs.

Flower's ``--run-config`` is TOML, so a string needs quotes inside the shell's quotes, and a wrong
type passes silently. Here the declared type of each key (`experiment/settings.py`) decides how its
value is read.
"""

import json
import re
import shlex
import tomllib
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from protofl_common.config.options import Config, SettingsError, flatten, typed
from protofl_common.data.sources import check_data_are_here, check_data_settings
from protofl_common.experiment.node import allow_named, check_named
from protofl_common.experiment.settings import (
    Settings,
    app_folder,
    baselines_of,
    check_settings_act,
    default_run_config,
)

# of --json (docs/reference/commands.schema.json): one more when an entry changes meaning, or goes
FORMAT = 1
ROOT = app_folder()
RECIPES = ROOT / "configs" / "recipes"
RUNS = Path("runs")
FIGURES_HELP = "draw the figures as SVG and PDF into this folder"
DEFAULT_FEDERATION: Config = {"num-supernodes": 10, "client-resources-num-cpus": 1}
"""Ten clients, a process of one thread per core: small models at small batches run best so."""


def add_run_settings(parser: ArgumentParser) -> None:
    """Add the settings of a run: KEY=VALUE, a recipe below them, and how many clients."""
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of the run")
    recipe = "a recipe, or a TOML file, below the settings"
    parser.add_argument("--recipe", default="", metavar="NAME", help=recipe)
    clients = (
        "number of clients (the recipe's, else 10, or as many as your data name for "
        "partition=natural)"
    )
    parser.add_argument("--clients", type=int, metavar="N", help=clients)


def add_allow_python(parser: ArgumentParser, source: str, *, backbones: bool = False) -> None:
    """Add ``--allow-python`` to a command, and with ``backbones`` also ``--allow-backbones``.

    ``source`` says in the help what may name the modules, such as "the recipe". `cli.parsed` lets
    the modules be imported that the user gives here; what the user says of backbones is left to the
    command.
    """
    if backbones:
        about = (
            f"frozen backbones, beside the embedded ones, that {source} may read or download: "
            "torchvision:, file:…"
        )
        parser.add_argument("--allow-backbones", default="", metavar="NAMES", help=about)
    about = f"Python modules, with commas, that {source} may name and that then run here"
    parser.add_argument("--allow-python", default="", metavar="NAMES", help=about)


def read_assignments(words: Iterable[str]) -> Config:
    """Read ``["algo=fedplvm", "lr=0.1"]`` as ``{"algo": "fedplvm", "lr": 0.1}``.

    SettingsError with a line for each word that is not key=value. The value of an unknown key, and
    one that does not fit the type of its key, stays text: `Settings.from_run_config` then names all
    that is wrong at once. Python modules that the values name may be imported from now on, as
    whoever types them may run code here.
    """
    defaults = default_run_config()
    values: Config = {}
    problems = []
    for word in words:
        key, equals, text = word.partition("=")
        if key == "clients":
            cure = f"say --clients {text}"
            problems.append(f"{word}: the number of simulated clients is no setting; {cure}")
        if not equals or not key:
            problems.append(f"{word}: must be key=value, such as algo=fedproto")
        # quotes that Flower's --run-config would need are no part of the value here
        is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
        if is_quoted:
            text = text[1:-1]
        values[key] = typed(text, type(defaults.get(key, "")))
    if problems:
        raise SettingsError("\n".join(problems))
    allow_named(values)
    return values


def check_settings(config: Config, chosen: Config) -> Settings:
    """Check the whole config of a run, and return its settings.

    ``chosen`` are the settings among them that the user typed: each must have an effect.

    SettingsError for a wrong setting, of a baseline too, or one without effect; DataError where the
    data are missing.
    """
    settings = Settings.from_run_config(config)
    check_settings_act(chosen, settings)
    baselines_of(settings, config)  # for its SettingsError
    check_named(config)
    check_data_settings(settings.data)
    check_data_are_here(settings.data)
    return settings


class Recipe(NamedTuple):
    settings: Config  # its keys, flat
    federation: Config  # of ``--federation-config`` in the comment that says how to run it


def read_recipe(name: str) -> Recipe:
    """Read a recipe by its name in ``configs/recipes``, or by the path of a TOML file.

    "" gives no settings and the default federation. SettingsError for a file that is missing or not
    TOML.
    """
    if not name:
        return Recipe({}, DEFAULT_FEDERATION)
    path = file_named(name) if name.endswith(".toml") else RECIPES / f"{name}.toml"
    try:
        text = path.read_text(encoding="utf-8")
        settings = flatten(tomllib.loads(text))
    except OSError:
        names = ", ".join(sorted(file.stem for file in RECIPES.glob("*.toml")))
        choices = f"choose a TOML file, or one of {names}"
        raise SettingsError(f"recipe = {name!r}: no such file; {choices}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"recipe = {name!r}: not TOML: {error}") from None
    return Recipe(settings, federation_in(text))


def federation_in(text: str) -> Config:
    """Return the federation config that a recipe's ``text`` names, such as {"num-supernodes": 20}.

    It stands in the recipe's comment ``# flwr run … --federation-config 'num-supernodes=20 …'``. A
    text without this comment has the default federation.
    """
    comment = re.search(r"^# flwr run .*--federation-config '([^']*)'", text, re.MULTILINE)
    if not comment:
        return dict(DEFAULT_FEDERATION)
    federation = {}
    for assignment in shlex.split(comment[1]):
        key, _, value = assignment.partition("=")
        federation[key] = typed(value, int if value.isdigit() else float)  # all are numbers
    return federation


def file_named(name: str) -> Path:
    """Return the path of a file in the working directory, or else below the app's folder."""
    return Path(name) if Path(name).is_file() else ROOT / name


def run_named(run: str) -> Path:
    """Return the folder of a run by its path, or by its name in ``runs/``.

    SettingsError where there is none.
    """
    for folder in (Path(run), RUNS / run):
        if folder.is_dir():
            return folder
    raise SettingsError(f"{run}: no such folder, neither here nor in {RUNS}/")


def add_runs(parser: ArgumentParser) -> None:
    results = "the folder of results; default: runs"
    parser.add_argument("--runs", type=Path, default=RUNS, help=results)


def add_json(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="the same as an object of JSON, for programs"
    )


def print_json(command: str, content: Mapping[str, Any]) -> None:
    print(json.dumps({"command": command, "format": FORMAT, **content}, indent=2))
