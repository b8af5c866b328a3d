"""``protofl site requests``, ``approve``, ``deny`` and ``audit``: what an operator decides, and what was done."""

import getpass
import json
from base64 import b64encode, urlsafe_b64decode
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import ssh_key_fingerprint

from client_app import audit
from client_app.consent import APPROVED, FOLDER, Request, code_of, new_request, read, requests, write
from protofl_common.basics.files import locked
from protofl_common.basics.text import LONGEST_IN_LOG, in_order, is_plain_name, printable
from protofl_common.config.options import Scalar, SettingsError
from protofl_common.config.sections import protections
from protofl_common.experiment.node import STRICT, site_folder, site_name
from protofl_common.experiment.settings import Settings, baselines_of, default_run_config, to_run_config
from protofl_common.experiment.study import UNSIGNED, Study, is_past
from protofl_common.runs.folder import RunFolder
from protofl_common.tools.cli.arguments import read_recipe


def listed(node: Mapping[str, Scalar]) -> Iterator[tuple[Request, list[str]]]:
    """Yield each request of a site, those that wait last, with lines for people: its state, and what it asks for."""
    every = sorted(requests(site_folder(node)), key=lambda request: (not request.decision, request.asked))
    trusted = {request.study.by for request in every if request.decision == APPROVED and request.study.by}
    for request in every:
        lines, what = [f"{request.study}"], "it"
        try:
            lines = [*described(settings := Settings.from_run_config(default_run_config() | request.settings, node))]
            what = "a baseline"  # and takes part in the run without it
            baselines_of(settings, settings.given, node)
        except SettingsError as error:
            lines += [f"this site refuses {what}: {line}" for line in str(error).splitlines()]
        if request.study.by and not request.decision:
            history = "has signed what was approved here" if request.study.by in trusted else "is new to this site"
            lines.insert(1, f"           that key {history}")
        yield request, [f"{request.study.id}  {state_of(request)}", *(f"    {line}" for line in lines)]


def state_of(request: Request) -> str:
    if not request.decision:
        return f"WAITS since {request.asked}: protofl site approve {request.study.id}, or deny"
    bounded = request.bounded
    runs = f"; {len(request.run_ids)} of {bounded.runs or 'any number of'} runs so far"
    until = f", until {bounded.until}" if bounded.until else ""
    asks_again = request.decision == APPROVED and request.code != code_of(request.settings)
    upgraded = "; the code has changed since, so it will wait again" if asks_again else ""
    return f"{request.decision} {request.decided} by {request.by}{until}{runs}{upgraded}"


def fingerprint(key: str) -> str:
    """Return what ``ssh-keygen -l`` shows of the person's public ``key``."""
    public = Ed25519PublicKey.from_public_bytes(urlsafe_b64decode(f"{key}="))
    return f"SHA256:{b64encode(ssh_key_fingerprint(public, SHA256())).decode().rstrip('=')}"


def described(settings: Settings) -> Iterator[str]:
    """Yield lines for people on a run's settings: who asks, for what, with whom, what leaves, and until when."""
    study, run, values = Study.of(settings.given), settings.run, to_run_config(settings)
    signer, _, key = study.by.rpartition(":")
    yield f"{study}, signed by {signer}, {fingerprint(key)}" if study.name else f"{study}: nobody has signed it"
    yield f"purpose    {study.purpose or 'not given'}"
    yield "with       " + (", ".join(f"{name}:{study.sites[name]}" for name in in_order(study.sites)) or "any sites")
    yield f"until      {study.until or 'no end'}; {study.runs or 'any number of'} runs of {run.rounds} rounds"
    every = [settings, *baselines_of(settings, settings.given).values()]
    for each in every:
        sent = " and ".join(entry.words for entry in each.exchange.up.values()) or "nothing of the model"
        yield printable(f"leaves     {each.row.title}: in each round {sent}", LONGEST_IN_LOG)
    exact, least = settings.privacy.dp == "none", settings.privacy.min_class_samples
    rest = ", and losses" * (exact and least == 1) + ", in the sum alone" * settings.privacy.sums_only
    introduced = "its name, model (architecture, size), inputs (shape, columns as 16 bits), device, class names"
    yield f"           {introduced}{', seconds' * exact}"
    rest += "; its number of training samples, exact" * (settings.privacy.sums_only and not settings.hides_samples)
    yield f"           numbers of samples and of right predictions{rest}"
    yield f"           metrics: {printable(run.metrics) or 'accuracy alone'}"
    for line in protections(values) or ["by nothing: the server sees this site's exact values, maybe of one sample"]:
        yield f"protected  {line}"
    if settings.privacy.sums_only and not study.sites:
        yield "           nobody vouches for the other sites: the run names none by its key"
    changed = {key: value for each in reversed(every) for key, value in to_run_config(each).items()}
    for key, value in changed.items():  # all of them, whatever a value has: nothing may hide behind a long one
        if default_run_config().get(key) != value and key not in UNSIGNED and not key.startswith("study"):
            yield f"setting    {printable(' '.join(f'{key}={value}'.split()), LONGEST_IN_LOG)}"


def decide(node: Mapping[str, Scalar], word: str, decision: str, until: str = "", runs: int = 0) -> str:
    """Approve or deny a run, by its id or by its file of settings; return a line that says what is valid now.

    SettingsError for an id that nobody has asked by, and for an approval of settings that the site would refuse anyway.
    """
    if is_past(until):
        raise SettingsError(f"--until {until}: that day is over")
    folder, name = site_folder(node), site_name(node)
    path, typed = _asked_by(folder, word, node if decision == APPROVED else None)
    with locked(path):
        request = typed if typed and not path.exists() else read(path)
        study = request.study
        if decision == APPROVED:
            Settings.from_run_config(default_run_config() | request.settings, node)
            if study.sites and name not in study.sites:
                raise SettingsError(f"{study} does not name {name}")
        now, user = datetime.now().astimezone().isoformat(timespec="seconds"), getpass.getuser()
        new: dict[str, Any] = {"by": user, "code": code_of(request.settings), "introductions": 0, "messages": 0}
        decided = replace(request, decision=decision, decided=now, until=until, runs=runs, **new)
        limits = {"until": decided.bounded.until, "runs": decided.bounded.runs}
        about = {"study": study.id, "name": study.name, "signed": study.by, "purpose": study.purpose}
        demands = {key: node[key] for key in STRICT if key in node}
        audit.append(folder, decision=decision, by=user, **limits, code=decided.code, **about, demands=demands)
        write(path, decided)
    ends = f", until {limits['until']}" * bool(limits["until"]) + f", {limits['runs']} runs" * bool(limits["runs"])
    return f"{name}: {decision}: {study}{ends * (decision == APPROVED)}, in {path.parent.absolute()}"


def _asked_by(
    folder: Path, word: str, node: Mapping[str, Scalar] | None
) -> tuple[Path, Request | None]:
    """Return the file of the request that an id or a file of settings stands for, and what the latter asks."""
    if word.endswith(".toml"):
        asked = default_run_config() | read_recipe(word).settings
        typed = new_request(Settings.from_run_config(asked, node).given)
        return folder / FOLDER / f"{typed.study.id}.json", typed
    path = folder / FOLDER / f"{word}.json"
    if not is_plain_name(word) or not path.exists():
        choices = ", ".join(request.study.id for request in requests(folder)) or "none: nobody has asked"
        raise SettingsError(f"{word}: no such request; choose from {choices}")
    return path, None


def log_of(node: Mapping[str, Scalar], since: str) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return a site's audit log from the day ``since`` on, with what a wrong clock dated back, and what is wrong."""
    if not (path := site_folder(node) / audit.FILE).exists():
        raise SettingsError(f"{path.absolute()}: no audit log; has the site answered yet, and is this its state-dir?")
    lines, latest, earlier = [*audit.entries(path)], "", 0
    for number, (_, row, _) in enumerate(lines, 1):
        latest = max(latest, str(row.get("time", "")))
        if latest == row.get("time") and latest < since:  # a time before `latest` is dated back, and tells nothing
            earlier = number
    return [row for _, row, _ in lines[earlier:]], [wrong for _, _, wrong in lines if wrong]


def compared(node: Mapping[str, Scalar], run: Path) -> tuple[int, list[str]]:
    """Return how many heads the server has of this site, and a line for each that the site's log lacks."""
    heads = {head for head, _, _ in audit.entries(site_folder(node) / audit.FILE)}
    if not (rows := [row for row in RunFolder(run).each_row() if site_name(node) in row.get("audit", {})]):
        return 0, [f"{run}: no run's folder, or {site_name(node)} has sent nothing in it; nothing was compared"]
    lacking = [row["round"] for row in rows if row["audit"][site_name(node)] not in heads]
    lost = "the server has seen a line that the log lacks: it was changed or removed"
    return len(rows), [f"round {number}: {lost}" for number in lacking]


def in_words(entry: Mapping[str, Any]) -> str:
    """Return a line for people on an entry of the audit log, whatever somebody has made of it."""
    if "decision" in entry:
        limits = "".join(f", {key} {entry[key]}" for key in ("until", "runs", "code", "demands") if entry.get(key))
        signed = f"signed by {entry.get('signed') or 'nobody'}: {entry.get('purpose') or 'no purpose'}"
        what = f"{entry['decision']} by {entry.get('by')}{limits}; {signed}"
    elif "refused" in entry:
        what = f"refused: {entry['refused']}" + f" ({entry['times']} times that day)" * (entry.get("times", 1) != 1)
    else:
        what = f"sent {json.dumps(entry.get('sent'))} (bytes)"
    about = " ".join(str(entry[key]) for key in ("name", "algo", "kind") if entry.get(key))
    number = f" round {entry['round']}" if entry.get("round") else ""
    return printable(f"{entry.get('time')} {entry.get('study')} {about}{number}: {what}")
