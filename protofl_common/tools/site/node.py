"""The options with which an operator starts a site, and its node config."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from click import ClickException
from flwr.common.config import parse_config_args

from protofl_common.config.options import Scalar, SettingsError
from protofl_common.datasets.store import cache_root
from protofl_common.permissions import LIMITED, allowed_by
from protofl_common.settings import Settings, default_run_config, is_site
from protofl_common.text import names_in


def supernode_options(words: list[str]) -> argparse.Namespace:
    """Those of flower-supernode's options that matter here; SettingsError for settings among them."""
    parser = argparse.ArgumentParser(prog="protofl site", allow_abbrev=False)
    for name in ("--node-config", "--superlink", "--root-certificates", "--auth-supernode-private-key"):
        parser.add_argument(name, default="")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", default="9094")
    parser.add_argument("--insecure", action="store_true")
    options, others = parser.parse_known_args(words)
    odd = [word for word in others if not word.startswith("-") and "=" in word]
    if odd:
        raise SettingsError(f"{odd[0]}: settings of a run come before the options")
    return options


def node_config(text: str) -> dict[str, Scalar]:
    """As flower-supernode reads it; SettingsError where it cannot, or leaves a part of it out."""
    try:
        node: dict[str, Scalar] = parse_config_args([text] if text else None)
    except (ClickException, OSError, ValueError) as error:
        raise SettingsError(f"--node-config {text!r}: {getattr(error, 'message', error)}") from error
    if not text.endswith(".toml") and text.count("=") > len(node):
        raise SettingsError(f"--node-config {text!r}: Flower reads only {', '.join(node) or 'nothing'}; no spaces at =")
    return node


def site_settings(node: Mapping[str, Scalar], asked: Mapping[str, Scalar] | None = None) -> Settings:
    """The settings of a run at this site: of one that asks for these, or for as little as possible.

    Raises
    ------
    SettingsError
        Where the site would refuse the run, or the node config is not that of a site.
    """
    if not is_site(node):
        raise SettingsError(
            "node config without a site-name: taken for a simulated client, whose folders every run chooses"
        )
    return Settings.from_run_config({**default_run_config(), **(asked or _modest(node))}, node)


def _modest(node: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Settings of a run that asks for nothing which the site's limits and algorithms leave out."""
    allowed = allowed_by(node)
    algorithms = names_in(allowed["allow-algorithms"])
    config: dict[str, Scalar] = dict.fromkeys(LIMITED, 1)
    return config if "all" in algorithms else {**config, "algo": next(iter(algorithms), "")}


def site_folders(node: Mapping[str, Scalar]) -> tuple[Path, Path]:
    """Where a site keeps its models, a folder per run, and its caches."""
    settings = site_settings(node)
    return Path(settings.machine.state_dir or settings.run.out_dir), cache_root(settings.data)
