"""A federation: who is online, who submitted what, what went wrong, and how stopped runs go on.

  protofl status FEDERATION     on the SuperLink's machine, in the folder that the worker was started in

FEDERATION is the SuperLink's name in Flower's config.toml, as for `flwr run`. Exit status 1 if it does not answer.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from protofl_common.basics.text import printable
from protofl_common.config.options import SettingsError
from protofl_common.experiment.settings import default_run_config
from protofl_common.tools.cli.runs import KnownRun, KnownSite, runs_in
from protofl_common.tools.federation import FEW_DAYS, Federation, ask


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("federation", metavar="FEDERATION", help="a SuperLink in Flower's config.toml")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder of results; default: runs")
    parser.add_argument("--node", metavar="NAME", help="only Flower's number of this site, to unregister it")


def act(arguments: argparse.Namespace) -> None:
    federation, runs = ask(arguments.federation), runs_in(arguments.runs)
    if arguments.node:
        print(number_of(arguments.node, federation, runs))
    else:
        print(*lines(federation, runs), sep="\n")
        if not runs:
            print(f"{arguments.runs}: no runs here, so names and replies of sites are not known; see --runs")


def number_of(name: str, federation: Federation, runs: list[KnownRun]) -> int:
    """The node of a site, that of its registration before that of a run; SettingsError if there is none, or several."""
    numbers = [node.node_id for node in federation.nodes if node.name == name]
    sites = runs[0].known_sites() if runs else {}
    numbers = numbers or [node for site, node, _ in _sites(federation, sites) if site == name]
    if len(numbers) != 1:
        names = ", ".join(sorted({node.name or str(node.node_id) for node in federation.nodes}))
        raise SettingsError(f"--node {name}: {len(numbers)} nodes have this name; choose from {names}")
    return numbers[0]


def lines(federation: Federation, runs: list[KnownRun]) -> Iterator[str]:
    sites = runs[0].known_sites() if runs else {}
    for name, node, state in _sites(federation, sites):
        site = sites.get(name)
        last = f"last reply: round {site.last} of {runs[0].path.name}" if site and site.last else "no reply yet"
        trouble = ", ".join(f"{number} {kind}" for kind, number in site.trouble.items()) if site else ""
        yield f"{name:20} {node:>20}  {state:10}  {last}" + (f"  {trouble}; {site.reason}" if site and trouble else "")
    for run in federation.submissions:
        changed = sorted(run.override_config.items() - default_run_config().items())  # resume.toml has all settings
        asked = " ".join(f"{key}={value!r}" for key, value in changed)
        state = ":".join(filter(None, (run.status.status, run.status.sub_status)))
        state += " (waits for protofl worker: is it running?)" * (state == "pending")
        what = f"by {run.account_name or '?'}  bundle {run.fab_hash[:8]}…  {state}  {printable(asked)}"
        yield f"run {run.run_id}  {run.pending_at[:19]}  {what}"
    for run_here in runs:
        if not run_here.summary() and not run_here.goes_on:
            how = f"flwr run . FEDERATION --stream --run-config {run_here.path}/resume.toml"
            yield "{}: stopped after round {} of {}; it goes on by {}".format(run_here.path, *run_here.rounds, how)
    if (days := federation.shown.days) is not None:
        yield f"certificate of the SuperLink: {days} days left" + "; renew it" * (days < FEW_DAYS)


def _sites(federation: Federation, sites: dict[str, KnownSite]) -> list[tuple[str, int, str]]:
    """(name, node, state) of each node, in order: the name that a run knows, else that of its registration."""
    names = {site.node: name for name, site in sites.items()}
    return sorted((names.get(each.node_id) or each.name or "?", each.node_id, each.status) for each in federation.nodes)
