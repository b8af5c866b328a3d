"""A federation: who is online, who submitted what, what went wrong, and how stopped runs go on.

  protofl status FEDERATION    on the SuperLink's machine, in the folder of the worker's start

FEDERATION is the SuperLink's name in Flower's config.toml, as for `flwr run`. The exit status is 1
if the SuperLink does not answer, or the runs cannot be read. It is 3 if somebody is needed: a site
is offline, the latest run failed or no worker takes it, a run stopped, or the certificate has few
days left.
"""

import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from typing import Any, NamedTuple

from protofl_common.basics.text import printable
from protofl_common.config.options import SettingsError
from protofl_common.experiment.settings import default_run_config
from protofl_common.runs.events import Waiting
from protofl_common.tools.arguments import add_json, add_runs, print_json
from protofl_common.tools.flower import Run
from protofl_common.tools.known_runs import (
    KnownRun,
    KnownSite,
    main_run,
    runs_in,
    stopped_runs,
)
from protofl_common.tools.superlink import FEW_DAYS, Federation, ask

SOMEBODY_IS_NEEDED = 3  # exit status
LONGEST_PENDING_SECONDS = 300.0  # in which a worker takes a run, also after a cold start


def add_arguments(parser: ArgumentParser) -> None:
    superlink = "a SuperLink in Flower's config.toml"
    parser.add_argument("federation", metavar="FEDERATION", help=superlink)
    add_runs(parser)
    number = "only Flower's number of this site, to unregister it"
    parser.add_argument("--node", metavar="NAME", help=number)
    add_json(parser)
    figures = "figures for Prometheus, in its text format"
    parser.add_argument("--prometheus", action="store_true", help=figures)


def act(arguments: Namespace) -> int:
    """Print the status of the federation; return `SOMEBODY_IS_NEEDED` if somebody is, else 0.

    With --node print only that site's number in Flower.
    """
    federation = ask(arguments.federation)
    if arguments.node:
        # a stolen key must not wait for who may read the runs, if the site is registered by name
        is_registered = any(node.name == arguments.node for node in federation.nodes)
        runs = [] if is_registered else runs_in(arguments.runs)
        print(number_of(arguments.node, federation, runs))
        return 0

    runs = runs_in(arguments.runs)
    problems = list(needs(federation, runs))
    if arguments.json:
        print_json("status", _as_dict(federation, runs, problems))
    elif arguments.prometheus:
        print(*prometheus(_as_dict(federation, runs, problems)), sep="\n")
    else:
        print(*status_lines(federation, runs), sep="\n")
    if not runs:
        unknown = "no runs here, so names and replies of sites are not known; see --runs"
        print(f"{arguments.runs}: {unknown}", file=sys.stderr)
    return SOMEBODY_IS_NEEDED if problems else 0


def needs(federation: Federation, runs: list[KnownRun]) -> Iterator[str]:
    """Yield a line for each thing that somebody should look after.

    Of the submissions only the latest counts: what failed before it may have been mended.
    """
    for site in _sites(federation, runs):
        if site.state != "online":
            yield f"{site.name} ({site.node}) is {site.state}"
    for submission in federation.submissions[:1]:  # none, or the latest
        if submission.status.sub_status == "failed":
            yield f"run {submission.run_id} failed"
        submitted = datetime.fromisoformat(submission.pending_at).timestamp()
        has_waited = time.time() - submitted > LONGEST_PENDING_SECONDS
        if submission.status.status == "pending" and has_waited:
            yield f"run {submission.run_id} is pending: does protofl worker run?"
    for run in stopped_runs(runs):
        yield f"{run.path} stopped"
    days = federation.endpoint.days
    if days is not None and days < FEW_DAYS:
        yield f"the certificate has {days} days left"


def prometheus(status: dict[str, Any]) -> Iterator[str]:
    """Yield the figures of a status (`_as_dict`), each a line of Prometheus's text format.

    The lines of a figure follow each other, as the format demands.
    """
    for site in status["sites"]:
        is_online = int(site["state"] == "online")
        labels = f'site="{_escaped(site["name"])}",node="{site["node"]}"'
        yield f"protofl_site_online{{{labels}}} {is_online}"
    for waiting in status["waiting"]:
        run = f'run="{_escaped(waiting["run"])}"'
        for site in waiting["sites"]:
            labels = f'{run},site="{_escaped(site)}"'
            yield f"protofl_awaited_seconds{{{labels}}} {waiting['seconds']:.0f}"
    for waiting in status["waiting"]:
        run = f'run="{_escaped(waiting["run"])}"'
        yield f"protofl_round_closes_seconds{{{run}}} {waiting['seconds-left']:.0f}"
    yield f"protofl_stopped_runs {len(status['stopped'])}"
    if status["certificate-days"] is not None:
        yield f"protofl_certificate_days {status['certificate-days']}"
    yield f"protofl_needs {len(status['needs'])}"


def _escaped(label: object) -> str:
    """Return the value of a label as Prometheus's text format has it inside quotes."""
    text = str(label).replace("\\", "\\\\").replace('"', '\\"')
    return text.replace("\n", "\\n")


def _as_dict(federation: Federation, runs: list[KnownRun], problems: list[str]) -> dict[str, Any]:
    """Return the status for JSON; ``problems`` are the lines of `needs`."""
    sites = []
    for site in _sites(federation, runs):
        in_runs = {name: asdict(known) for name, known in site.runs.items()}
        sites.append({**site._asdict(), "node": str(site.node), "runs": in_runs})
    waiting = []
    for run, event in _waiting(runs):
        fields = event.for_programs()
        del fields["event"]  # the kind of event, which is the same for all
        waiting.append({"run": run.path.name, **fields})
    submissions = []
    for submission in federation.submissions:
        submissions.append({"run": str(submission.run_id), "state": _state(submission)})
    return {
        "needs": problems,
        "sites": sites,
        "submissions": submissions,
        "waiting": waiting,
        "stopped": [str(run.path) for run in stopped_runs(runs)],
        "certificate-days": federation.endpoint.days,
    }


def number_of(name: str, federation: Federation, runs: list[KnownRun]) -> int:
    """Return Flower's number of the site ``name``.

    The name is that of its registration or, if no node is registered by it, its name in a run.
    SettingsError if no node has the name, or several have it.
    """
    numbers = [node.node_id for node in federation.nodes if node.name == name]
    if not numbers:
        numbers = [site.node for site in _sites(federation, runs) if site.name == name]
    if len(numbers) != 1:
        names = sorted({node.name or str(node.node_id) for node in federation.nodes})
        choices = f"choose from {', '.join(names)}"
        raise SettingsError(f"--node {name}: {len(numbers)} nodes have this name; {choices}")
    return numbers[0]


def status_lines(federation: Federation, runs: list[KnownRun]) -> Iterator[str]:
    """Yield a line for each site, submission, waiting run, stopped run, and for the certificate."""
    for site in _sites(federation, runs):
        replies = []
        for run_name, known in site.runs.items():
            last = f"last reply: round {known.last} of" if known.last else "no reply yet in"
            reply = f"{last} {run_name}"
            if known.trouble:
                numbers = [f"{number} {kind}" for kind, number in known.trouble.items()]
                reply += f"  {', '.join(numbers)}; {known.reason}"  # of the latest trouble
            replies.append(reply)
        text = "; ".join(replies) or "no reply yet"
        yield f"{site.name:20} {site.node:>20}  {site.state:10}  {text}"

    for submission in federation.submissions:
        yield _submission_line(submission)

    for run, event in _waiting(runs):
        yield f"{run.path}: {str(event).strip()}"

    for run in stopped_runs(runs):
        done, wanted = run.rounds
        # sites know a baseline as a part of its run: by its own file it would be another run
        file = main_run(run, runs).path / "resume.toml"
        resume = f"flwr run . FEDERATION --stream --run-config {file}"
        yield f"{run.path}: stopped after round {done} of {wanted}; it goes on by {resume}"

    days = federation.endpoint.days
    if days is not None:
        line = f"certificate of the SuperLink: {days} days left"
        if days < FEW_DAYS:
            line += "; renew it"
        yield line


def _waiting(runs: list[KnownRun]) -> Iterator[tuple[KnownRun, Waiting]]:
    """Yield each run under way that waits for sites, with the sites and the seconds as an event.

    The seconds are those since it began to wait, and those until it goes on without them.
    """
    now = time.time()
    for run in runs:
        awaited = run.awaited()
        if awaited and run.is_under_way:
            seconds = now - awaited["since"]
            left = awaited["until"] - now
            yield run, Waiting(awaited["round"], seconds, left, awaited["sites"])


def _submission_line(run: Run) -> str:
    """Return a line on a run that was submitted: by whom, its state, the settings it changes."""
    state = _state(run)
    if state == "pending":
        state += " (waits for protofl worker: is it running?)"
    # without those that are as by default: a run that is resumed was submitted with resume.toml,
    # which repeats all settings
    changed = sorted(run.override_config.items() - default_run_config().items())
    settings = printable(" ".join(f"{key}={value!r}" for key, value in changed))
    when = run.pending_at[:19]  # to the second
    what = f"by {run.account_name or '?'}  bundle {run.fab_hash[:8]}…  {state}  {settings}"
    return f"run {run.run_id}  {when}  {what}"


def _state(run: Run) -> str:
    """Return Flower's status of a run, such as "running" or "finished:failed"."""
    return ":".join(filter(None, (run.status.status, run.status.sub_status)))


class Site(NamedTuple):
    name: str  # by which a run knows it, else that of its registration, or "?"
    node: int  # Flower's number
    state: str
    runs: dict[str, KnownSite]  # name of a run -> what the run knows of the site


def _sites(federation: Federation, runs: list[KnownRun]) -> list[Site]:
    """Return the registered sites, sorted by name, with what runs know of them.

    These are the runs under way or, if there are none, the first of ``runs``, which is the latest.
    """
    chosen = [run for run in runs if run.is_under_way] or runs[:1]
    known = {run.path.name: run.known_sites() for run in chosen}
    names_in_runs = {}
    for sites in known.values():
        for name, site in sites.items():
            names_in_runs[site.node] = name
    rows = []
    for node in federation.nodes:
        name = names_in_runs.get(node.node_id) or node.name or "?"
        in_runs = {run: sites[name] for run, sites in known.items() if name in sites}
        rows.append(Site(name, node.node_id, node.status, in_runs))
    return sorted(rows, key=lambda site: (site.name, site.node))
