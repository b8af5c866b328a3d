"""What an operator decides, and what was done.

This is behind ``protofl site requests``, ``approve``, ``deny`` and ``audit``.
"""

import getpass
import json
from base64 import b64encode, urlsafe_b64decode
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import ssh_key_fingerprint

from client_app.site import audit
from client_app.site.consent import (
    APPROVED,
    FOLDER,
    PATCH,
    RELEASE,
    Request,
    as_it_counts,
    code_of,
    new_request,
    read,
    requests,
    signed_decision,
    site_key,
    write,
)
from protofl_common.basics.files import locked
from protofl_common.basics.text import LONGEST_IN_LOG, in_order, is_plain_name, printable
from protofl_common.config.options import Scalar, SettingsError
from protofl_common.config.sections import DANGER_OF_WEIGHTS, protections
from protofl_common.experiment.node import (
    ON_RECORD,
    OPERATORS,
    NodeConfig,
    problem_of_peers,
    site_folder,
    site_name,
)
from protofl_common.experiment.settings import (
    Settings,
    baselines_of,
    default_run_config,
    to_run_config,
)
from protofl_common.experiment.study import (
    UNSIGNED,
    Study,
    is_past,
    is_signed,
    key_as_text,
    keys_of_sites,
)
from protofl_common.runs.folder import heads_in
from protofl_common.tools.arguments import read_recipe
from protofl_common.tools.ssh_key import private_key


def describe_requests(node: Mapping[str, Scalar]) -> Iterator[tuple[Request, list[str]]]:
    """Yield each request of a site, those that wait last, with lines for people.

    The lines say its state and what it asks for.
    """
    decided_first = sorted(
        requests(site_folder(node)), key=lambda request: (not request.decision, request.asked)
    )
    trusted = set()
    for request in decided_first:
        if request.decision == APPROVED and request.study.by:
            trusted.add(request.study.by)

    for request in decided_first:
        request = as_it_counts(request, node)
        lines = _asked_for(request, node)
        if request.study.by and not request.decision:
            is_known = request.study.by in trusted
            history = "has signed what was approved here" if is_known else "is new to this site"
            lines.insert(1, f"           that key {history}")
        head = f"{request.study.id}  {state_of(request)}"
        yield request, [head, *(f"    {line}" for line in lines)]


def _asked_for(request: Request, node: Mapping[str, Scalar]) -> list[str]:
    """Describe what a run asks for; where this site would refuse it, or a baseline, say why."""
    lines = [f"{request.study}"]
    what = "it"
    try:
        settings = Settings.from_run_config(default_run_config() | request.settings, node)
        lines = [*described(settings), *_about_peers(settings, node)]
        what = "a baseline"  # and takes part in the run without it
        baselines_of(settings, settings.given, node)
    except SettingsError as error:
        lines += [f"this site refuses {what}: {line}" for line in str(error).splitlines()]
    return lines


def _about_peers(settings: Settings, node: Mapping[str, Scalar]) -> Iterator[str]:
    """Yield lines on the sites of a run that this one does not know by their keys."""
    named = settings.named_sites
    site = NodeConfig.of(node)
    strangers = named.keys() - site.known_among(named) - {site.name}
    if strangers and site.peers:
        names = ", ".join(in_order(strangers))
        yield f"NEW        not in peers, so nobody here knows these keys: {names}"
    elif strangers and settings.privacy.sums_only:
        yield "NEW        without peers this site cannot know who the others are; compare the keys"
    problem = problem_of_peers(node, settings.given)
    if problem:
        yield f"this site refuses it: {problem}"


def state_of(request: Request) -> str:
    """Say in words what was decided, by whom, within which limits."""
    if not request.decision:
        study = request.study.id
        return f"WAITS since {request.asked}: protofl site approve {study}, or deny"

    bounded = request.bounded
    state = f"{request.decision} {request.decided} by {request.by}"
    if bounded.until:
        state += f", until {bounded.until}"
    state += f"; {len(request.run_ids)} of {bounded.runs or 'any number of'} runs so far"
    if request.decision == APPROVED and not request.covers(code_of(request.settings), RELEASE):
        state += "; the code has changed since, so it will wait again"
    elif request.later == PATCH:
        state += f"; also for later patches of {request.release}"
    return state


def fingerprint(key: str) -> str:
    """Return what ``ssh-keygen -l`` shows of the person's public ``key``."""
    public = Ed25519PublicKey.from_public_bytes(urlsafe_b64decode(f"{key}="))
    return f"SHA256:{b64encode(ssh_key_fingerprint(public, SHA256())).decode().rstrip('=')}"


def described(settings: Settings) -> Iterator[str]:
    """Yield lines on a run: who asks, for what, with whom, until when, and what leaves."""
    study = Study.of(settings.given)
    yield _signed(study)
    yield f"purpose    {study.purpose or 'not given'}"
    sites = [f"{name}:{study.sites[name]}" for name in in_order(study.sites)]
    yield f"with       {', '.join(sites) or 'any sites'}"
    runs = f"{study.runs or 'any number of'} runs of {settings.run.rounds} rounds"
    yield f"until      {study.until or 'no end'}; {runs}"

    with_baselines = [settings, *baselines_of(settings, settings.given).values()]
    yield from _leaving(settings, with_baselines)

    against_all = ["by nothing: the server sees this site's exact values, maybe of one sample"]
    for line in protections(to_run_config(settings)) or against_all:
        yield f"protected  {line}"
    for each in with_baselines:
        if each.exchange.sends_weights and settings.privacy.dp == "none":
            yield printable(f"DANGER     {each.row.title}: {DANGER_OF_WEIGHTS}", LONGEST_IN_LOG)
    if settings.privacy.sums_only and not study.sites:
        yield "           nobody vouches for the other sites: the run names none by its key"
    yield from _changed(with_baselines)


def _signed(study: Study) -> str:
    if not study.name:
        return f"{study}: nobody has signed it"
    signer, _, key = study.by.rpartition(":")
    return f"{study}, signed by {signer}, {fingerprint(key)}"


def _leaving(settings: Settings, with_baselines: list[Settings]) -> Iterator[str]:
    """Yield lines on what a site sends: of the model, at its introduction, and as figures."""
    for each in with_baselines:
        entries = [entry.words for entry in each.exchange.up.values()]
        sent = " and ".join(entries) or "nothing of the model"
        yield printable(f"leaves     {each.row.title}: in each round {sent}", LONGEST_IN_LOG)

    privacy = settings.privacy
    is_exact = privacy.dp == "none"
    introduced = (
        "its name, model (architecture, size), inputs (shape, columns as 16 bits), device, "
        "class names"
    )
    if is_exact:
        introduced += ", seconds"
    yield f"           {introduced}"

    figures = "numbers of samples and of right predictions"
    if is_exact:
        least = privacy.min_class_samples
        figures += ", and losses" if least == 1 else f", rounded to multiples of {least}"
    if privacy.sums_only:
        figures += ", in the sum alone"
        if not settings.hides_sample_counts:
            figures += "; its number of training samples, exact"
    yield f"           {figures}"
    yield f"           metrics: {printable(settings.run.metrics) or 'accuracy alone'}"


def _changed(with_baselines: list[Settings]) -> Iterator[str]:
    """Yield a line for each setting of a run, or of a baseline of it, that is not the default.

    Where they differ in a setting, the run's value is shown.
    """
    values: dict[str, Scalar] = {}
    for each in reversed(with_baselines):  # the run stands first: its values replace the others
        values |= to_run_config(each)
    defaults = default_run_config()
    for key, value in values.items():
        is_shown_above = key.startswith("study")  # in `described`: who asks, for what, with whom
        is_approved = key not in UNSIGNED
        if is_approved and not is_shown_above and defaults.get(key) != value:
            # in one line, and cut late: nothing may hide behind a long value
            line = " ".join(f"{key}={value}".split())
            yield f"setting    {printable(line, LONGEST_IN_LOG)}"


def decide(
    node: Mapping[str, Scalar],
    word: str,
    decision: str,
    key_file: Path | None,
    until: str = "",
    runs: int = 0,
    later: str = "",
) -> str:
    """Approve or deny a run, by its id or its file of settings; say in a line what is valid now.

    The SSH key signs where the site names its operators. SettingsError for an id that nobody has
    asked by, for an approval of settings that the site would refuse anyway, and for another key.
    """
    by, key = _operator(node, key_file)
    if is_past(until):
        raise SettingsError(f"--until {until}: that day is over")
    folder = site_folder(node)
    name = site_name(node)
    path, typed = _asked_by(folder, word, node if decision == APPROVED else None)
    with locked(path):
        request = typed if typed and not path.exists() else read(path)
        study = request.study
        if decision == APPROVED:
            asked = default_run_config() | request.settings
            Settings.from_run_config(asked, node)
            if study.sites and name not in study.sites:
                raise SettingsError(f"{study} does not name {name}")
            unknown_peers = problem_of_peers(node, asked)
            if unknown_peers:
                raise SettingsError(unknown_peers)

        decided = replace(
            request,
            decision=decision,
            decided=datetime.now().astimezone().isoformat(timespec="seconds"),
            until=until,
            runs=runs,
            by=by,
            signature="",
            code=code_of(request.settings),
            release=RELEASE,
            later=later,
            covered=("", ""),
            introductions=0,
            messages=0,
            evaluations=0,
        )
        bounded = decided.bounded
        if key is not None:
            about = signed_decision(name, study.id, vars(bounded))
            decided = replace(decided, signature=key.sign(about).hex())
        audit.append(
            folder,
            decision=decision,
            decided=decided.decided,
            by=decided.by,
            signature=decided.signature,
            until=bounded.until,
            runs=bounded.runs,
            code=decided.code,
            release=decided.release,
            later=decided.later,
            study=study.id,
            name=study.name,
            signed=study.by,
            purpose=study.purpose,
            demands={key: node[key] for key in ON_RECORD if key in node},
        )
        write(path, decided)

    limits = ""
    if decision == APPROVED:
        if bounded.until:
            limits += f", until {bounded.until}"
        if bounded.runs:
            limits += f", {bounded.runs} runs"
        if later == PATCH:
            limits += f", also for later patches of {RELEASE}"
    return f"{name}: {decision}: {study}{limits}, in {path.parent.absolute()}"


def _operator(
    node: Mapping[str, Scalar], key_file: Path | None
) -> tuple[str, Ed25519PrivateKey | None]:
    """Return who decides: ``NAME:KEY`` and the key, or the user's name where nobody signs."""
    operators = str(node.get(OPERATORS, ""))
    if key_file is None:
        if operators:
            names = ", ".join(keys_of_sites(operators))
            raise SettingsError(
                f"operators (node config): give --key, the SSH key of one of {names}"
            )
        return getpass.getuser(), None
    key = private_key(key_file)
    public = key_as_text(key.public_key())
    for name, known in keys_of_sites(operators).items():
        if known == public:
            return f"{name}:{public}", key
    raise SettingsError(
        f"--key {key_file}: {public} is of none of operators (node config); choose from "
        f"{operators or 'none'}"
    )


def _asked_by(
    folder: Path, word: str, node: Mapping[str, Scalar] | None
) -> tuple[Path, Request | None]:
    """Return the file of the request that ``word`` stands for: an id, or a file of settings.

    Of a file of settings, return also what it asks.
    """
    if word.endswith(".toml"):
        asked = default_run_config() | read_recipe(word).settings
        typed = new_request(Settings.from_run_config(asked, node).given)
        return folder / FOLDER / f"{typed.study.id}.json", typed
    path = folder / FOLDER / f"{word}.json"
    if not is_plain_name(word) or not path.exists():
        ids = [request.study.id for request in requests(folder)]
        choices = ", ".join(ids) or "none: nobody has asked"
        raise SettingsError(f"{word}: no such request; choose from {choices}")
    return path, None


def log_of(node: Mapping[str, Scalar], since: str) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return a site's audit log from the day ``since`` on, and what is wrong with the whole of it.

    Entries that a wrong clock dated back are among them.
    """
    path = site_folder(node) / audit.FILE
    if not path.exists():
        raise SettingsError(
            f"{path.absolute()}: no audit log; "
            "has the site answered yet, and is this its state-dir?"
        )
    lines = list(audit.entries(path))
    latest = ""
    earlier = 0  # lines before the day
    for number, (_, row, _) in enumerate(lines, 1):
        latest = max(latest, str(row.get("time", "")))
        is_dated_back = latest != row.get("time")  # and its time tells nothing
        if not is_dated_back and latest < since:
            earlier = number
    rows = [row for _, row, _ in lines[earlier:]]
    problems = [wrong for _, _, wrong in lines if wrong]
    for number, (_, row, _) in enumerate(lines, 1):
        if row.get("signature") and not _is_signed_by_its_operator(row, site_name(node)):
            problems.append(f"line {number} is not what {row.get('by')} has signed")
    return rows, problems


def _is_signed_by_its_operator(row: Mapping[str, Any], site: str) -> bool:
    key = str(row.get("by")).rpartition(":")[2]
    return is_signed(key, str(row["signature"]), signed_decision(site, str(row["study"]), row))


def compare_with_server(node: Mapping[str, Scalar], file: Path) -> tuple[int, list[str]]:
    """Return how many heads of this site's log the server has, and which of them the log lacks.

    The ``file`` is the server's ``heads.jsonl``, or a copy.
    """
    folder = site_folder(node)
    name = site_name(node)
    heads = {head for head, _, _ in audit.entries(folder / audit.FILE)}
    owners = {name, f"{name}:{key_as_text(site_key(folder).public_key())}"}
    lost = "the server has seen a line that the log lacks: it was changed or removed"
    compared = 0
    wrong = []
    for row in heads_in(file):
        for owner in owners & row["heads"].keys():
            compared += 1
            if row["heads"][owner] not in heads:
                wrong.append(f"{row['run']}, round {row['round']}: {lost}")
    if not compared:
        missing = f"not the server's heads.jsonl, or {name} is not in it; nothing was compared"
        return 0, [f"{file}: {missing}"]
    return compared, wrong


def describe_entry(entry: Mapping[str, Any]) -> str:
    """Return a line for people on an entry of the audit log, whatever somebody has made of it."""
    about = [str(entry[key]) for key in ("name", "algo", "kind") if entry.get(key)]
    head = f"{entry.get('time')} {entry.get('study')} {' '.join(about)}"
    if entry.get("round"):
        head += f" round {entry['round']}"

    if "decision" in entry:
        what = f"{entry['decision']} by {entry.get('by')}"
        if entry.get("signature"):
            what += " (signed)"
        for key in ("until", "runs", "code", "release", "later", "demands"):
            if entry.get(key):
                what += f", {key} {entry[key]}"
        signer = entry.get("signed") or "nobody"
        what += f"; signed by {signer}: {entry.get('purpose') or 'no purpose'}"
    elif "refused" in entry:
        what = f"refused: {entry['refused']}"
        times = entry.get("times", 1)
        if times != 1:
            what += f" ({times} times that day)"
    else:
        what = f"sent {json.dumps(entry.get('sent'))} (bytes)"
    return printable(f"{head}: {what}")
