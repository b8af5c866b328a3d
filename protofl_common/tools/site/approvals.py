"""``protofl site requests``, ``approve``, ``deny`` and ``audit``: what an operator decides, and what was done."""

import getpass
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

from client_app import audit
from client_app.consent import APPROVED, CODE, FOLDER, Request, ask, read, requests, write
from protofl_common.basics.files import locked
from protofl_common.basics.text import in_order, printable
from protofl_common.config.options import Scalar, SettingsError
from protofl_common.config.sections import protections
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.node import site_folder, site_name
from protofl_common.experiment.settings import Settings, default_run_config, to_run_config
from protofl_common.experiment.study import SHORT, UNSIGNED, Study
from protofl_common.runs.folder import RunFolder
from protofl_common.tools.cli.arguments import read_recipe


def listed(node: Mapping[str, Scalar]) -> Iterator[str]:
    """Yield for each request of a site its state and what it asks for, those that wait last."""
    every = [request for _, request in requests(site_folder(node))]
    trusted = {request.study.by for request in every if request.decision == APPROVED and request.study.by}
    for request in sorted(every, key=lambda request: (not request.decision, request.asked)):
        yield f"{request.study.id[:SHORT]}  {state_of(request)}"
        try:
            lines = [*described(Settings.from_run_config(default_run_config() | request.settings))]
        except SettingsError as error:
            lines = [f"this version cannot run it: {line}" for line in str(error).splitlines()]
        if request.study.by and not request.decision:
            history = "has signed what was approved here" if request.study.by in trusted else "is new to this site"
            lines.insert(1, f"           that key {history}")
        yield from (f"    {line}" for line in lines)


def state_of(request: Request) -> str:
    if not request.decision:
        return f"WAITS since {request.asked}: protofl site approve {request.study.id[:SHORT]}, or deny"
    runs = f"; {len(request.run_ids)} of {request.most_runs or 'any number of'} runs so far"
    until = f", until {request.until}" if request.until else ""
    upgraded = "; the code has changed since, so it will wait again" if request.code != CODE else ""
    return f"{request.decision} {request.decided} by {request.by}{until}{runs}{upgraded}"


def described(settings: Settings) -> Iterator[str]:
    """Yield lines for people on a run's settings: who asks, for what, with whom, what leaves, and until when."""
    study, run, values = Study.of(settings.given), settings.run, to_run_config(settings)
    yield f"{study}, signed by {study.by}" if study.name else f"{study}: nobody has signed it"
    yield f"purpose    {study.purpose or 'not said'}"
    yield f"with       {', '.join(in_order(study.sites)) or 'any sites'}"
    runs = f"{study.runs} runs" if study.runs else "any number of runs"
    yield f"until      {study.until or 'no end'}; {runs} of {run.rounds} rounds"
    rows = [
        (settings.row, settings.exchange),
        *((CATALOG[algo], CATALOG[algo].exchange) for algo in settings.baselines),
    ]
    for row, exchange in rows:
        sent = " and ".join(entry.words for entry in exchange.up.values()) or "nothing of the model"
        yield f"leaves     {row.title}: in each round {sent}"
    yield f"           numbers of samples and of right predictions, {run.metrics or 'no other metrics'}"
    for line in protections(values) or ["by nothing: what leaves is exact, and of this site alone"]:
        yield f"protected  {line}"
    for key, value in values.items():  # all of them, whatever a value has: nothing may hide behind a long one
        if default_run_config().get(key) != value and key not in UNSIGNED and not key.startswith("study"):
            yield f"setting    {printable(f'{key}={value}')}"


def decide(node: Mapping[str, Scalar], digits: str, decision: str, until: str = "", runs: int = 0) -> str:
    """Approve or deny a run, by the first digits of its id or by its file of settings; return a line that says so.

    SettingsError for digits of none or of several, and for an approval of settings that the site would refuse anyway.
    """
    folder, name = site_folder(node), site_name(node)
    if digits.endswith(".toml"):
        settings = default_run_config() | read_recipe(digits).settings
        digits = Study.of(Settings.from_run_config(settings).given).id
        if not (folder / FOLDER / f"{digits}.json").exists():
            ask(folder, settings)
    named = [path for path, _ in requests(folder) if digits and path.stem.startswith(digits)]
    if len(named) != 1:
        choices = ", ".join(path.stem[:SHORT] for path, _ in requests(folder)) or "none: nobody has asked"
        raise SettingsError(f"{digits}: {'several requests' if named else 'no such request'}; choose from {choices}")
    if until and date.fromisoformat(until) < date.today():
        raise SettingsError(f"--until {until}: that day is over")
    with locked(named[0]):
        request = read(named[0])
        if decision == APPROVED:
            Settings.from_run_config(default_run_config() | request.settings, node)
        now, user = datetime.now().astimezone().isoformat(timespec="seconds"), getpass.getuser()
        audit.append(folder, decision=decision, by=user, until=until, runs=runs, code=CODE, study=request.study.id)
        decided = replace(request, decision=decision, decided=now, by=user, until=until, runs=runs, code=CODE)
        write(named[0], decided)
    return f"{name}: {decision}: {request.study}"


def log_of(node: Mapping[str, Scalar], since: str) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return the lines of a site's audit log from the day ``since`` on, and what is wrong with the log."""
    path = site_folder(node) / audit.FILE
    if not path.exists():
        raise SettingsError(f"{path.absolute()}: no audit log; has the site answered yet, and is this its state-dir?")
    wrong, shown = [], []
    for _, entry, problem in audit.entries(path):
        wrong += [problem] if problem else []
        if str(entry.get("time", "")) >= since:
            shown.append(entry)
    return shown, wrong


def compared(node: Mapping[str, Scalar], run: Path) -> Iterator[str]:
    """Yield a line for each head that the server has of this site, and that the site's log lacks."""
    heads = {head for head, _, _ in audit.entries(site_folder(node) / audit.FILE)}
    for row in RunFolder(run).each_row():
        head = row.get("audit", {}).get(site_name(node))
        if head and head not in heads:
            yield f"round {row['round']}: the server has seen a line that the log lacks: it was changed or removed"


def in_words(entry: Mapping[str, Any]) -> str:
    """Return a line for people on an entry of the audit log."""
    if "decision" in entry:
        what = f"{entry['decision']} by {entry['by']}"
    elif "refused" in entry:
        what = f"refused: {entry['refused']}"
    else:
        what = "sent " + ", ".join(f"{name} ({size:,} bytes)" for name, size in entry["sent"].items())
    about = " ".join(str(entry[key]) for key in ("name", "algo", "kind") if entry.get(key))
    number = f" round {entry['round']}" if entry.get("round") else ""
    return printable(f"{entry['time']} {str(entry['study'])[:SHORT]} {about}{number}: {what}")
