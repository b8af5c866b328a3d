"""A federation: who is online, who submitted what, what went wrong, and how stopped runs go on.

  protofl status FEDERATION    on the SuperLink's machine, in the folder of the worker's start

FEDERATION is the SuperLink's name in Flower's config.toml, as for `flwr run`. Exit status 1 if it
does not answer.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from protofl_common.basics.text import printable
from protofl_common.config.options import SettingsError
from protofl_common.experiment.settings import default_run_config
from protofl_common.tools.cli.runs import KnownRun, KnownSite, runs_in
from protofl_common.tools.federation import FEW_DAYS, Federation, ask
from protofl_common.tools.flower import Run


def describe(parser: argparse.ArgumentParser) -> None:
    superlink = "a SuperLink in Flower's config.toml"
    parser.add_argument("federation", metavar="FEDERATION", help=superlink)
    results = "the folder of results; default: runs"
    parser.add_argument("--runs", type=Path, default=Path("runs"), help=results)
    number = "only Flower's number of this site, to unregister it"
    parser.add_argument("--node", metavar="NAME", help=number)


def act(arguments: argparse.Namespace) -> None:
    federation = ask(arguments.federation)
    runs = runs_in(arguments.runs)
    if arguments.node:
        print(number_of(arguments.node, federation, runs))
        return
    print(*lines(federation, runs), sep="\n")
    if not runs:
        unknown = "no runs here, so names and replies of sites are not known; see --runs"
        print(f"{arguments.runs}: {unknown}")


def number_of(name: str, federation: Federation, runs: list[KnownRun]) -> int:
    """Return the node of a site, that of its registration before that of a run.

    SettingsError if there is none, or several.
    """
    numbers = [node.node_id for node in federation.nodes if node.name == name]
    sites = _sites_of_latest(runs)
    if not numbers:
        numbers = [node for site, node, _ in _sites(federation, sites) if site == name]
    if len(numbers) != 1:
        names = sorted({node.name or str(node.node_id) for node in federation.nodes})
        choices = f"choose from {', '.join(names)}"
        raise SettingsError(f"--node {name}: {len(numbers)} nodes have this name; {choices}")
    return numbers[0]


def lines(federation: Federation, runs: list[KnownRun]) -> Iterator[str]:
    """Yield a line for each site, each submission, each stopped run, and the certificate."""
    known = _sites_of_latest(runs)
    for name, node, state in _sites(federation, known):
        line = f"{name:20} {node:>20}  {state:10}  "
        site = known.get(name)
        if site and site.last:
            line += f"last reply: round {site.last} of {runs[0].path.name}"
        else:
            line += "no reply yet"
        if site and site.trouble:
            trouble = [f"{number} {kind}" for kind, number in site.trouble.items()]
            line += f"  {', '.join(trouble)}; {site.reason}"
        yield line

    for submission in federation.submissions:
        yield _submission(submission)

    for run in runs:
        if not run.summary() and not run.goes_on:
            done, wanted = run.rounds
            resume = f"flwr run . FEDERATION --stream --run-config {run.path}/resume.toml"
            yield f"{run.path}: stopped after round {done} of {wanted}; it goes on by {resume}"

    days = federation.shown.days
    if days is not None:
        line = f"certificate of the SuperLink: {days} days left"
        if days < FEW_DAYS:
            line += "; renew it"
        yield line


def _submission(run: Run) -> str:
    """Return a line on a run that was submitted: by whom, its state, the settings it changes."""
    state = ":".join(filter(None, (run.status.status, run.status.sub_status)))
    if state == "pending":
        state += " (waits for protofl worker: is it running?)"
    # A run that is resumed was submitted with resume.toml, which repeats all settings. Only those
    # that differ from the defaults are shown
    changed = sorted(run.override_config.items() - default_run_config().items())
    asked = printable(" ".join(f"{key}={value!r}" for key, value in changed))
    what = f"by {run.account_name or '?'}  bundle {run.fab_hash[:8]}…  {state}  {asked}"
    return f"run {run.run_id}  {run.pending_at[:19]}  {what}"


def _sites_of_latest(runs: list[KnownRun]) -> dict[str, KnownSite]:
    return runs[0].known_sites() if runs else {}


def _sites(federation: Federation, sites: dict[str, KnownSite]) -> list[tuple[str, int, str]]:
    """Return (name, node, state) of each node, in order.

    The name is that which a run knows, else that of its registration.
    """
    names = {site.node: name for name, site in sites.items()}
    rows = []
    for node in federation.nodes:
        name = names.get(node.node_id) or node.name or "?"
        rows.append((name, node.node_id, node.status))
    return sorted(rows)
