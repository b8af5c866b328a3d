"""The options with which an operator starts a site, and its node config."""

import re
from argparse import ArgumentParser, Namespace
from pathlib import Path

from click import ClickException

from protofl_common.basics.files import cache_folder
from protofl_common.config.lists import names_in
from protofl_common.config.options import (
    Config,
    SettingsError,
    Values,
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


def add_node_config(parser: ArgumentParser) -> None:
    about = "a TOML file with the site's facts and rules, or these as 'key=\"text\" key=5'"
    parser.add_argument("--node-config", default="", metavar="FILE", help=about)


def add_supernode_options(parser: ArgumentParser) -> None:
    for name, (value, about) in SUPERNODE_OPTIONS.items():
        parser.add_argument(f"--{name}", default="", metavar=value, help=about)
    insecure = "without TLS: for a SuperLink on this machine"
    parser.add_argument("--insecure", action="store_true", help=insecure)
    parser.set_defaults(host="127.0.0.1", port="9094")


def supernode_words(options: Namespace) -> list[str]:
    """Return flower-supernode's arguments for those of its options that are set."""
    words = ["--insecure"] if options.insecure else []
    for name in ("node-config", *SUPERNODE_OPTIONS):
        value = getattr(options, name.replace("-", "_"))
        if value:
            words.append(f"--{name}={value}")
    return words


def node_config(text: str) -> Config:
    """Read the option --node-config as flower-supernode does.

    ``text`` is the path of a TOML file, or keys and values as in 'key="text" key=5'. SettingsError
    where Flower cannot read it, or would leave a part of it out without a word.
    """
    try:
        node: Config = parse_config_args([text] if text else None)
    except (ClickException, OSError, RuntimeError, ValueError) as error:
        reason = str(getattr(error, "message", error)).rstrip(".")
        cure = ""
        if reason.startswith("The value for key"):  # Flower's words for a value that is a list
            cure = '; write names as one text with commas, as in classes="a,b"'
        raise SettingsError(f"--node-config {text!r}: {reason}{cure}") from error

    # outside of quoted values each key has one =; if there are more, Flower has left keys out
    without_quoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", text)
    if not text.endswith(".toml") and without_quoted.count("=") > len(node):
        read = ", ".join(node) or "nothing"
        raise SettingsError(f"--node-config {text!r}: Flower reads only {read}; no spaces at =")
    return node


def site_settings(node: Values, asked: Values | None = None) -> Settings:
    """Return the settings, as this site has them, of a run that was submitted with ``asked``.

    Without ``asked``, return those of the least demanding run that the site accepts. SettingsError
    if the site refuses the run, without ``asked`` if it refuses all runs, and if the node config is
    not that of a site.
    """
    site_folders(node)  # for its SettingsError
    if asked:
        return Settings.from_run_config({**default_run_config(), **asked}, node)

    refusals = []
    for algo in allowed_algorithms(node) or [""]:  # "" is refused, with the reason
        settings = least_demanding_settings(node, algo)
        if isinstance(settings, Settings):
            return settings
        refusals.append(settings)
    raise refusals[0]


def allowed_algorithms(node: Values) -> list[str]:
    """List the algorithms that the site allows by ``allow-algorithms``.

    There "all" stands for those of the catalog, which then come first; those of other packages are
    allowed by name only.
    """
    names = list(names_in(allowed_by(node)["allow-algorithms"]))
    if "all" not in names:
        return names
    names.remove("all")
    return list(dict.fromkeys([*CATALOG, *names]))


def least_demanding_settings(node: Values, algo: str) -> Settings | SettingsError:
    """Return the settings of a run of ``algo`` that asks for as little as can be.

    It meets the site's demands, and has the least of all that a site can limit. If the site refuses
    even this run, return why.
    """
    config = default_run_config() | dict.fromkeys(LIMITED, 1)
    config["algo"] = algo
    # require-dp forbids local-steps and BatchNorm, and takes FedPCL with global prototypes alone
    config |= {"local-steps": 0, "norm": "group", "fedpcl.prototypes": "global"}
    if has_own_data(node):
        config["partition"] = "own"
    try:
        return Settings.from_run_config(config | settings_that_meet_demands(node), node)
    except SettingsError as error:
        return error


def site_folders(node: Values) -> tuple[Path, Path]:
    """Return a site's state-dir, which has a folder for each run, and its cache-dir.

    SettingsError for the node config of a simulated client, and for unknown keys and users in it.
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
    state_dir = site_folder(node).parents[1]  # STATE-DIR/sites/NAME
    return state_dir, cache_folder(str(node.get("cache-dir", "")))
