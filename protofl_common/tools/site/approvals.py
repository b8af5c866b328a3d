"""What an operator decides, and what was done.

This is behind ``protofl site requests``, ``approve``, ``deny`` and ``audit``.
"""

import getpass
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
    DECIDED,
    FOLDER,
    PATCH,
    RELEASE,
    Request,
    as_it_counts,
    code_of,
    new_request,
    problem_of_study,
    public_key,
    read,
    requests,
    signed_decision,
    write,
)
from protofl_common.basics.files import locked
from protofl_common.basics.text import LONGEST_IN_LOG, in_order, is_plain_name, printable
from protofl_common.config.options import Config, SettingsError, Values
from protofl_common.config.sections import DANGER_OF_WEIGHTS, protections
from protofl_common.experiment.node import (
    ON_RECORD,
    OPERATORS,
    NodeConfig,
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
from protofl_common.wire.schema import Exchange


def describe_requests(node: Values) -> Iterator[tuple[Request, list[str]]]:
    """Yield each request of a site, and lines for people: its state, and what it asks for.

    Requests that are decided come before those that wait, and older ones before newer ones.
    """
    decided_first = sorted(
        requests(site_folder(node)), key=lambda request: (not request.decision, request.asked)
    )
    approved = [request for request in decided_first if request.decision == APPROVED]
    approved_signers = {request.study.by for request in approved}

    for stored in decided_first:
        request = as_it_counts(stored, node)  # undecided without an operator's signature
        lines = _asked_for(request, node)
        if request.study.by and not request.decision:
            is_known = request.study.by in approved_signers
            history = "has signed what was approved here" if is_known else "is new to this site"
            # below the first line, which ends in the key of whoever has signed the study (unless
            # the site refuses the study's settings)
            lines.insert(1, f"           that key {history}")
        if stored.decision and not request.decision:
            lapsed = f"{stored.decision} {stored.decided} by {stored.by}"
            why = "counts no more, as it lacks the signature of one of operators (node config)"
            lines.insert(0, f"{lapsed}, which {why}")
        first_line = f"{request.study.id}  {state_of(request)}"
        yield request, [first_line, *(f"    {line}" for line in lines)]


def _asked_for(request: Request, node: Values) -> list[str]:
    """Describe what a run asks for, and why this site would refuse it, or a baseline of it."""
    lines = [str(request.study)]  # all that can be said of wrong settings; else it is replaced
    refused = "it"
    try:
        settings = Settings.from_run_config(default_run_config() | request.settings, node)
        lines = [*describe_run(settings), *_about_sites(settings, node)]
        refused = "a baseline"  # the site still takes part in the run, but not in this baseline
        baselines_of(settings, settings.given, node)  # for its SettingsError
    except SettingsError as error:
        lines += [f"this site refuses {refused}: {line}" for line in str(error).splitlines()]
    return lines


def _about_sites(settings: Settings, node: Values) -> Iterator[str]:
    """Yield a warning of the sites of a run whose keys are not in this site's ``peers``.

    Yield another line if the site will refuse the run because of its sites or its last day.
    """
    named = settings.named_sites
    site = NodeConfig.of(node)
    strangers = named.keys() - site.known_among(named) - {site.name}
    if strangers and site.peers:
        names = ", ".join(in_order(strangers))
        yield f"NEW        not in peers, so nobody here knows these keys: {names}"
    elif strangers and settings.privacy.sums_only:
        yield "NEW        without peers this site cannot know who the others are; compare the keys"
    problem = problem_of_study(Study.of(settings.given), node, settings.given)
    if problem:
        yield f"this site refuses it: {problem}"


def state_of(request: Request) -> str:
    """Say what was decided of a request, by whom and within which limits, or that it waits."""
    if not request.decision:
        study = request.study.id
        return f"WAITS since {request.asked}: protofl site approve {study}, or deny"

    bounded = request.bounded  # with the stricter of the approval's limits and the study's
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
    """Return the fingerprint of a public ``key`` as ``ssh-keygen -l`` shows it."""
    with_padding = f"{key}="  # a study writes base64 without it
    public = Ed25519PublicKey.from_public_bytes(urlsafe_b64decode(with_padding))
    digest = b64encode(ssh_key_fingerprint(public, SHA256())).decode()
    return f"SHA256:{digest.rstrip('=')}"


def describe_run(settings: Settings) -> Iterator[str]:
    """Yield lines for an operator on a run that asks for the site's data.

    They say who asks, for what, with whom and until when, what leaves the site, how it is
    protected, and which settings are not the defaults.
    """
    study = Study.of(settings.given)
    if study.name:
        signer, _, key = study.by.rpartition(":")
        yield f"{study}, signed by {signer}, {fingerprint(key)}"
    else:
        yield f"{study}: nobody has signed it"
    yield f"purpose    {study.purpose or 'not given'}"
    sites = [f"{name}:{study.sites[name]}" for name in in_order(study.sites)]
    yield f"with       {', '.join(sites) or 'any sites'}"
    runs = f"{study.runs or 'any number of'} runs of {settings.run.rounds} rounds"
    yield f"until      {study.until or 'no end'}; {runs}"

    with_baselines = [settings, *baselines_of(settings, settings.given).values()]
    for each in with_baselines:
        sent = sent_of_model(each.exchange)
        yield printable(f"leaves     {each.row.title}: in each round {sent}", LONGEST_IN_LOG)
    for line in sent_always(settings):
        yield f"           {line}"
    yield f"           metrics: {printable(settings.run.metrics) or 'accuracy alone'}"

    unprotected = ["by nothing: the server sees this site's exact values, maybe of one sample"]
    for line in protections(to_run_config(settings)) or unprotected:
        yield f"protected  {line}"
    for each in with_baselines:
        if each.exchange.sends_weights and settings.privacy.dp == "none":
            yield printable(f"DANGER     {each.row.title}: {DANGER_OF_WEIGHTS}", LONGEST_IN_LOG)
    # whoever invents the other sites of a secure sum can subtract what they sent
    if settings.privacy.sums_only and not study.sites:
        yield "           nobody vouches for the other sites: the run names none by its key"
    yield from _changed(with_baselines)


def sent_of_model(exchange: Exchange) -> str:
    """Say what a client sends of its model in each round."""
    entries = [entry.words for entry in exchange.up.values()]
    return " and ".join(entries) or "nothing of the model"


def sent_always(settings: Settings) -> tuple[str, str]:
    """Return two texts on what a site sends in any run with these protections.

    The first is on its introduction, the second on the figures that it reports.
    """
    privacy = settings.privacy
    is_exact = privacy.dp == "none"  # the figures have no noise
    introduced = (
        "its name, model (architecture, size), inputs (shape, columns as 16 bits), device, "
        "class names"
    )
    figures = "numbers of samples and of right predictions"
    if is_exact:
        introduced += ", seconds"
        least = privacy.min_class_samples  # 1: nothing is rounded, and losses may leave, too
        figures += ", losses" if least == 1 else f", rounded to multiples of {least}"
        figures += ", metrics"
    if privacy.sums_only:
        figures += ", in the sum alone"
        if not is_exact:
            figures += "; its number of training samples, exact"
    elif is_exact:
        introduced += ", which classes it has"
    return introduced, figures


def _changed(with_baselines: list[Settings]) -> Iterator[str]:
    """Yield a line for each setting of a run, or of a baseline of it, that is not the default.

    ``with_baselines`` begins with the run. A baseline adds only the keys that the run lacks: its
    algorithm's own. For all other keys only the run's value is shown. Nothing is hidden by this:
    the site itself makes the baseline's settings from the run's (`baseline_config`), and changes
    only such as have no effect on the baseline.
    """
    values: Config = {}
    for settings in reversed(with_baselines):  # the run comes last: its values replace the others
        values |= to_run_config(settings)
    defaults = default_run_config()
    for key, value in values.items():
        is_shown_above = key.startswith("study")  # `describe_run` has said who asks, for what
        needs_approval = key not in UNSIGNED
        if needs_approval and not is_shown_above and defaults.get(key) != value:
            # in one line, and cut late, so that an operator sees all that a value has in it
            line = " ".join(f"{key}={value}".split())
            yield f"setting    {printable(line, LONGEST_IN_LOG)}"


def decide(
    node: Values,
    id_or_file: str,
    decision: str,
    key_file: Path | None,
    until: str = "",
    runs: int = 0,
    later: str = "",
) -> str:
    """Write an operator's decision on a request, also into the audit log; return what holds now.

    ``id_or_file`` is the id of a request, or a file of settings, whose request may still come;
    ``decision`` is `APPROVED` or `DENIED`. An approval holds until the day ``until`` ("": no end)
    and for so many ``runs`` (0: any number), and with ``later`` = `PATCH` for later patch releases.

    Where the site names its operators, the SSH key in ``key_file`` signs the decision.
    SettingsError for an id without a request, for a key of nobody among the operators, and for an
    approval of settings that the site would refuse all the same.
    """
    by, key = _operator(node, key_file)
    if is_past(until):
        raise SettingsError(f"--until {until}: that day is over")
    folder = site_folder(node)
    name = site_name(node)
    path, from_file = _request_for(folder, id_or_file)
    with locked(path):
        # the operator may decide about a file before any run of these settings has asked
        request = from_file if from_file and not path.exists() else read(path)
        study = request.study
        if decision == APPROVED:  # settings that the site refuses may be denied all the same
            config = default_run_config() | request.settings
            Settings.from_run_config(config, node)  # for its SettingsError
            problem = problem_of_study(study, node, config)
            if problem:
                raise SettingsError(problem)
            begun = len(request.run_ids)
            if runs and runs < begun:
                raise SettingsError(
                    f"--runs {runs}: {begun} runs of {study} have begun, and count; give {begun}"
                    f" for these alone, {begun + 1} for one more"
                )

        decided = replace(
            request,
            decision=decision,
            decided=datetime.now().astimezone().isoformat(timespec="seconds"),
            until=until,
            runs=runs,
            by=by,
            signature="",  # made below, of this decision
            code=code_of(request.settings),
            release=RELEASE,
            later=later,
            covered=("", ""),  # no later release has taken part under this decision
            # messages are counted since the decision
            introductions=0,
            messages=0,
            evaluations=0,
        )
        told = vars(decided.bounded)
        if key is not None:
            content = signed_decision(name, study.id, told)
            decided = replace(decided, signature=key.sign(content).hex())
        audit.append(
            folder,
            **{field: told[field] for field in DECIDED},
            signature=decided.signature,
            study=study.id,
            name=study.name,
            signed=study.by,
            purpose=study.purpose,
            demands={key: node[key] for key in ON_RECORD if key in node},
        )
        write(path, decided)

    return f"{name}: {decision}: {study}; {state_of(decided)}; in {path.parent.absolute()}"


def _operator(node: Values, key_file: Path | None) -> tuple[str, Ed25519PrivateKey | None]:
    """Return who decides, as ``NAME:KEY`` of an operator, and the private key that signs.

    Where the node config names no operators, return the user's name, and None for the key.
    SettingsError for a key that is missing, or that of none of the operators.
    """
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
    for name, operators_key in keys_of_sites(operators).items():
        if operators_key == public:
            return f"{name}:{public}", key
    raise SettingsError(
        f"--key {key_file}: {public} is of none of operators (node config); choose from "
        f"{operators or 'none'}"
    )


def _request_for(folder: Path, id_or_file: str) -> tuple[Path, Request | None]:
    """Return the file that keeps a request, or will keep it, in a site's ``folder``.

    For a file of settings, return also the request that a run of these settings makes; for the id
    of a request, None. SettingsError for an id without a request, and for wrong settings.
    """
    if id_or_file.endswith(".toml"):
        config = default_run_config() | read_recipe(id_or_file).settings
        request = new_request(Settings.from_run_config(config).given)
        return folder / FOLDER / f"{request.study.id}.json", request
    path = folder / FOLDER / f"{id_or_file}.json"
    if not is_plain_name(id_or_file) or not path.exists():
        ids = [request.study.id for request in requests(folder)]
        choices = ", ".join(ids) or "none: nobody has asked"
        raise SettingsError(f"{id_or_file}: no such request; choose from {choices}")
    return path, None


def log_of(node: Values, since: str) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return a site's audit log from the day ``since`` on, and what is wrong with the whole log.

    Only entries before the first one of that day are left out: one that comes later in the file,
    but has an earlier time by a wrong clock, is not. ``since`` "": the whole log. SettingsError for
    a site without a log.
    """
    path = site_folder(node) / audit.FILE
    if not path.exists():
        raise SettingsError(
            f"{path.absolute()}: no audit log; "
            "has the site answered yet, and is this its state-dir?"
        )
    lines = list(audit.entries(path))
    rows = [row for _, row, _ in lines]
    problems = [wrong for _, _, wrong in lines if wrong]
    latest = ""  # of the times so far; as ISO texts, times and days sort by time
    num_earlier = 0  # lines before the day
    for number, row in enumerate(rows, 1):
        time = str(row.get("time", ""))
        if latest <= time < since:  # a line that is dated back does not tell the day
            num_earlier = number
        latest = max(latest, time)
        signer = str(row.get("by"))  # NAME:KEY
        signed = signed_decision(site_name(node), str(row.get("study")), row)
        signature = row.get("signature")
        if signature and not is_signed(signer.rpartition(":")[2], str(signature), signed):
            problems.append(f"line {number} is not what {signer} has signed")
    return rows[num_earlier:], problems


def compare_with_server(node: Values, file: Path) -> tuple[int, list[str]]:
    """Compare this site's audit log with the heads that the server has seen of it.

    A head is the hash of the log's last line after a round; the server writes it to
    ``heads.jsonl``, which ``file`` is, or a copy of that. Return how many heads of this site are in
    the file, and a line for each that the log lacks, as the log was then changed since. If the file
    has none of this site, return 0 and a line that says so.
    """
    folder = site_folder(node)
    name = site_name(node)
    heads = {head for head, _, _ in audit.entries(folder / audit.FILE)}
    # as the server names this site: with its key where a study names that
    owners = {name, f"{name}:{public_key(folder)}"}
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
    """Return a line for people on an entry of the audit log, also on a damaged one.

    It has the entry's values by their keys, as docs/studies.md explains them, but for digests.
    """
    facts = []
    for key, value in entry.items():
        if value and key not in ("time", "sha256", "signature", "before"):
            facts.append(f"{key} {value}")
    return printable(f"{entry.get('time')}  {', '.join(facts)}")
