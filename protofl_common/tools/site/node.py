"""The options with which an operator starts a site, and its node config."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from click import ClickException

from protofl_common.basics.files import cache_folder
from protofl_common.config.lists import names_in
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

SUPERNODE_OPTIONS = {
    "superlink": ("HOST:PORT", "where the SuperLink, or its door, listens for SuperNodes"),
    "root-certificates": ("FILE", "of the authority that has signed the SuperLink's certificate"),
    "auth-supernode-private-key": ("FILE", "the key by which the SuperLink knows this site"),
    "trusted-entities": ("FILE", "YAML with the public keys of those whose bundles it takes"),
    "host": ("HOST", "where it listens for its own clients (127.0.0.1)"),
    "port": ("PORT", "the port for them (9094); each SuperNode of a machine has its own"),
    "max-retries": ("N", "it gives up after so many failed connections (never)"),
    "max-wait-time": ("SECONDS", "it gives up after so long without a connection (never)"),
    "health-server-address": ("HOST:PORT", "where it answers gRPC's question for its health"),
}
"""flower-supernode's options that go with ``protofl site run``: a value's name, and the meaning."""


def add_node_config(parser: argparse.ArgumentParser) -> None:
    about = "a TOML file with the site's facts and rules, or these as 'key=\"text\" key=5'"
    parser.add_argument("--node-config", default="", metavar="FILE", help=about)


def add_supernode_options(parser: argparse.ArgumentParser) -> None:
    for name, (value, about) in SUPERNODE_OPTIONS.items():
        parser.add_argument(f"--{name}", default="", metavar=value, help=about)
    insecure = "without TLS: for a SuperLink on this machine"
    parser.add_argument("--insecure", action="store_true", help=insecure)
    parser.set_defaults(host="127.0.0.1", port="9094")


def supernode_words(options: argparse.Namespace) -> list[str]:
    """Return the options that are given as flower-supernode takes them."""
    words = ["--insecure"] if options.insecure else []
    for name in ("node-config", *SUPERNODE_OPTIONS):
        value = getattr(options, name.replace("-", "_"))
        if value:
            words.append(f"--{name}={value}")
    return words


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
