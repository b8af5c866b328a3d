"""The options with which an operator starts a site, and its node config."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from click import ClickException

from protofl_common.basics.files import cache_folder
from protofl_common.basics.text import names_in
from protofl_common.config.options import (
    Scalar,
    SettingsError,
    folders_of_unknown_users,
    unknown_keys,
)
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.node import (
    LIMITED,
    NODE_KEYS,
    allowed_by,
    has_own_data,
    is_site,
    site_folder,
)
from protofl_common.experiment.settings import (
    Settings,
    default_run_config,
    settings_that_meet_demands,
)
from protofl_common.tools.flower import parse_config_args


def supernode_options(words: list[str]) -> argparse.Namespace:
    """Read flower-supernode's options that matter here; SettingsError for settings among them."""
    parser = argparse.ArgumentParser(prog="protofl site", allow_abbrev=False)
    parser.add_argument("--node-config", default="")
    parser.add_argument("--superlink", default="")
    parser.add_argument("--root-certificates", default="")
    parser.add_argument("--auth-supernode-private-key", default="")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", default="9094")
    parser.add_argument("--insecure", action="store_true")
    options, others = parser.parse_known_args(words)
    options.others = others
    for word in others:
        if "=" in word and not word.startswith("-"):
            raise SettingsError(f"{word}: settings of a run come before the options")
    return options


def node_config(text: str) -> dict[str, Scalar]:
    """As flower-supernode reads it; SettingsError where it cannot, or leaves a part of it out."""
    try:
        node: dict[str, Scalar] = parse_config_args([text] if text else None)
    except (ClickException, OSError, RuntimeError, ValueError) as error:
        reason = str(getattr(error, "message", error)).rstrip(".")
        cure = ""
        if reason.startswith("The value for key"):  # which is a list
            cure = '; write names as one text with commas, as in classes="a,b"'
        elif isinstance(error, ValueError) and Path(text).expanduser().read_bytes()[:1] > b"\x7f":
            cure = "; save it as UTF-8 without a byte order mark"
        raise SettingsError(f"--node-config {text!r}: {reason}{cure}") from error

    without_quoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", text)
    if not text.endswith(".toml") and without_quoted.count("=") > len(node):
        read = ", ".join(node) or "nothing"
        raise SettingsError(f"--node-config {text!r}: Flower reads only {read}; no spaces at =")
    return node


def site_settings(
    node: Mapping[str, Scalar], asked: Mapping[str, Scalar] | None = None
) -> Settings:
    """Return the settings of a run that asks for these, or of the most modest one that is accepted.

    SettingsError if the site refuses them, or would refuse any run.
    """
    site_folders(node)  # or no site
    if asked:
        return Settings.from_run_config({**default_run_config(), **asked}, node)

    refusals = []
    for algo in allowed_algorithms(node) or [""]:
        settings = least_demanding_settings(node, algo)
        if isinstance(settings, Settings):
            return settings
        refusals.append(settings)
    raise refusals[0]


def allowed_algorithms(node: Mapping[str, Scalar]) -> list[str]:
    """List the algorithms that the site allows; ``all`` are those of the catalog, and first."""
    named = list(names_in(allowed_by(node)["allow-algorithms"]))
    if "all" not in named:
        return named
    named.remove("all")
    return list(dict.fromkeys([*CATALOG, *named]))


def least_demanding_settings(node: Mapping[str, Scalar], algo: str) -> Settings | SettingsError:
    """Return the settings of the most modest run of ``algo`` that meets the site's demands.

    If it refuses even this one, return why.
    """
    config = default_run_config() | dict.fromkeys(LIMITED, 1)
    config |= {"local-steps": 0, "norm": "group", "algo": algo, "fedpcl.prototypes": "global"}
    if has_own_data(node):
        config["partition"] = "own"
    try:
        return Settings.from_run_config(config | settings_that_meet_demands(node), node)
    except SettingsError as error:
        return error


def site_folders(node: Mapping[str, Scalar]) -> tuple[Path, Path]:
    """Return the folders of a site's models (one below it per run) and of its caches.

    They depend on its node config alone; SettingsError if that is not a site's, or is wrong.
    """
    if not is_site(node):
        raise SettingsError(
            "node config without a site-name, or a file not called .toml: "
            "taken for a simulated client"
        )
    choices = f"choose from {', '.join(NODE_KEYS)}"
    problems = [f"{line}; {choices}" for line in unknown_keys(node, NODE_KEYS)]
    problems += folders_of_unknown_users(node)
    if problems:
        raise SettingsError("\n".join(f"node-config: {line}" for line in problems))
    return site_folder(node).parents[1], cache_folder(str(node.get("cache-dir", "")))
