"""Ask a site's operator about each run.

Before a run is approved, nothing of the data is read for it.
``state-dir/sites/NAME/studies/ID.json`` has a request, made by the first message of an unknown run,
and the decision. It is looked up at every message, so a denial acts at once. It holds for the
settings and the code that the operator was shown: other settings are another study, and after an
upgrade of the code (`code_of`) the site asks again, unless the approval covers it (`covers`).
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from client_app.site import audit
from client_app.site.hooks import tell_of_request
from client_app.site.record import StateError
from protofl_common.basics.code_version import code_version_at_site, is_later_patch
from protofl_common.basics.files import locked, write_text
from protofl_common.config.lists import names_in
from protofl_common.config.options import Scalar, SettingsError, Values
from protofl_common.experiment.node import (
    OPERATORS,
    REQUIRE_SECAGG,
    NodeConfig,
    own_code,
    problem_of_peers,
    site_folder,
    site_name,
)
from protofl_common.experiment.settings import release
from protofl_common.experiment.study import (
    UNSIGNED,
    Study,
    is_past,
    is_signed,
    key_as_text,
    keys_of_sites,
    signed_part,
)
from protofl_common.wire.schema import RefusedMessage

CODE = code_version_at_site()
"""Of this process: a site forks from one that has imported everything."""
RELEASE = release()
FOLDER = "studies"
KEY_FILE = "site.key"
APPROVED = "approved"
COVERED = "covered"  # in the audit log: an approval now covers a later release
PATCH = "patch"
DENIED = "denied"
MOST_BYTES = 2**16  # of the settings of a request
MOST_REQUESTS = 100
"""Requests that wait for a decision (`_check_room`): whoever submits runs could fill the disk."""
MOST_INTRODUCTIONS = 100  # of each run: more would show, day by day, which samples the site gets
MOST_MESSAGES = 10
"""For each exchange of a run; an honest server sends four in secure aggregation, repeats a few."""
MOST_RUNS = 100
"""Runs that count for both, where any number is approved: a server may call each message another
run's."""


class WaitingForApproval(RefusedMessage):
    """A site's operator has not decided about a run yet."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"waiting for approval at {name}: {why}")


class ApprovalLapsed(WaitingForApproval):
    """What a site's operator has decided counts no more; ``on-trouble`` tells, and no request.

    Its runs are used up, its last day is over, or it lacks the signature of one of today's
    operators.
    """


@dataclass(frozen=True)
class Request:
    """A run's settings, and what an operator has decided about them, as a file stores it."""

    settings: dict[str, Scalar]  # all from which the study's id is made, and the signature
    asked: str  # when, first
    code: str  # the version of the code that the operator decides about
    release: str = ""  # of that code: the version of ProtoFL
    later: str = ""  # `PATCH`: the approval covers later patch releases, too; "": this code alone
    covered: tuple[str, str] = ("", "")  # code and release of the last such that took part
    decision: str = ""  # `APPROVED`, `DENIED`, or "" while it waits
    decided: str = ""  # when
    by: str = ""  # who decided: a user of the machine or, where it is signed, NAME:KEY
    signature: str = ""  # of that key, of `signed_decision`
    until: str = ""  # the last day of the approval; "": the study's own end
    runs: int = 0  # as many runs are approved; 0: as many as the study has
    run_ids: list[int] = field(default_factory=list)  # the Flower runs so far
    introductions: int = 0  # how often, since the decision, the site was asked to introduce itself
    messages: int = 0  # and for something else
    evaluations: int = 0  # and for an evaluation whose figures `count_evaluation` bounds

    @property
    def study(self) -> Study:
        return Study.of(self.settings)

    @property
    def bounded(self) -> "Request":
        """The request with the last day and the number of runs that are in force.

        Each is the approval's or the study's, whichever is stricter.
        """
        days = [day for day in (self.until, self.study.until) if day]
        limits = [limit for limit in (self.runs, self.study.runs) if limit]
        until = min(days, key=date.fromisoformat, default="")
        return replace(self, until=until, runs=min(limits, default=0))

    def covers(self, code: str, release: str) -> bool:
        """Return whether the decision holds for this version of the code, of this ``release``.

        It holds for the code that was decided about and, with ``later``, for later patch releases.
        Such a release must also be later than the last one that took part, as other code under the
        same number is somebody's edit. The packages that settings name must be unchanged.
        """
        if code == self.code:
            return True
        # `code_of`: the project's own version, a hyphen, and the versions of packages
        _, _, packages = code.partition("-")
        _, _, decided_packages = self.code.partition("-")
        if self.later != PATCH or packages != decided_packages:
            return False
        if not is_later_patch(self.release, release):
            return False
        last_code, last_release = self.covered
        return code == last_code or is_later_patch(last_release or self.release, release)


def check_consent(
    config: Values, run_id: int, node: Values, *, approves: bool, counts: bool
) -> Study:
    """Return the study that a run belongs to, if this site may take part in it now.

    RefusedMessage where it may not. StateError where the disk lacks the site's files
    (`unknown_site`), where the decision cannot be read, or where the message cannot be counted.

    With ``approves`` the operator is asked about unknown runs; otherwise only an earlier denial is
    heeded. ``counts`` is False for an introduction, which uses up none of the approved runs.
    """
    study = Study.of(config)
    folder = site_folder(node)
    name = site_name(node)
    path = folder / FOLDER / f"{study.id}.json"
    try:
        problem = unknown_site(node)
        if problem:
            raise StateError(problem)
        refusal = problem_of_study(study, node, config)
        if refusal:
            raise RefusedMessage(refusal)
        if approves:
            if not path.exists():
                _check_room(config, study, folder)
            with locked(path):
                is_new = _ask(config, path, name)
            if is_new:  # without the lock: what it starts may be `protofl site approve`
                tell_of_request(node, study.id)
            with locked(path):
                _check_approved(config, study, run_id, path, node, counts)
        elif path.exists():
            _check_not_denied(read(path), name)
    except OSError as error:
        raise StateError(f"state-dir: {path} cannot be read or written ({error})") from error
    return study


def problem_of_study(study: Study, node: Values, config: Values) -> str:
    """Say why this site refuses a study, whatever its operator decides; "" if it does not.

    The study is over, does not name this site with its key, or names too few of its peers.
    ``config`` are all settings of the run. Nothing is written.
    """
    name = site_name(node)
    if is_past(study.until):
        return f"{study} ended on {study.until}"
    if study.sites and study.sites.get(name) != public_key(site_folder(node)):
        return (
            f"{study} does not name {name}, or names another key of it; `protofl site key` prints"
            " it"
        )
    return problem_of_peers(node, config)


def unknown_site(node: Values) -> str:
    """Return an error text if ``state-dir`` lacks both the privacy ledger and the key of a site.

    That is the case before its disk is mounted. "" if either is there, or if the node config
    requires neither ``dp`` nor secure aggregation, so that nothing depends on them.
    """
    folder = site_folder(node).absolute()
    name = site_name(node)
    state_dir = folder.parents[1]  # the folder is state-dir/sites/NAME
    key = folder / KEY_FILE
    ledger = state_dir / "privacy" / f"{name}.json"
    if key.exists() or ledger.exists():
        return ""
    if not (node.get("require-dp") or node.get(REQUIRE_SECAGG)):
        return ""
    return (
        f"state-dir: {state_dir} has neither a privacy ledger nor a key of {name}: mount its disk,"
        " or restore it; if the site is new, make its key by protofl site key"
    )


def _ask(config: Values, path: Path, name: str) -> bool:
    """Store a request if the operator has to decide, for the first time or after an upgrade.

    Return whether one was stored. WaitingForApproval where the code on the disk is no longer that
    of this process: an operator could not decide about what runs here.
    """
    run_ids: Sequence[int] = ()
    if path.exists():
        request = read(path)
        if request.decision != APPROVED or request.covers(code_of(config), RELEASE):
            return False
        if code_version_at_site.__wrapped__() != CODE:  # `__wrapped__` reads the disk, past a cache
            raise WaitingForApproval(
                name,
                "the site's code has changed since its start; its operator must stop protofl site"
                " run and start it again",
            )
        run_ids = request.run_ids
    write(path, new_request(config, run_ids))
    return True


def _check_approved(
    config: Values, study: Study, run_id: int, path: Path, node: Values, counts: bool
) -> None:
    """Check that the operator has approved a run, and count its message in the request at ``path``.

    RefusedMessage where it is not approved, or no longer, and where the run or the message is one
    too many. WaitingForApproval where it waits for the operator. With ``counts`` the run is counted
    as well; otherwise the message is an introduction.
    """
    name = site_name(node)
    stored = read(path)
    request = as_it_counts(stored, node)
    _check_not_denied(request, name)
    code = code_of(config)
    cure = f"its operator runs protofl site approve {study.id}"
    if stored.decision and not request.decision:
        raise ApprovalLapsed(name, f"{study}; no operator of today has signed a decision; {cure}")
    if not (request.decision and request.covers(code, RELEASE)):
        raise WaitingForApproval(name, f"{study}; {cure}")
    if is_past(request.until):
        ended = f"the approval ended on {request.until}"
        raise ApprovalLapsed(name, f"{study}; {ended}; {cure} --until DAY")

    all_runs = sorted({*request.run_ids, run_id})
    most_runs = request.bounded.runs
    if study.runs and len(all_runs) > study.runs:
        raise RefusedMessage(
            f"{name} takes part in {study.runs} runs of {study} (study-runs); "
            "all have begun, and resumed ones count"
        )
    if most_runs and len(all_runs) > most_runs:
        raise ApprovalLapsed(
            name,
            f"{study}; all runs approved so far ({most_runs}) have begun, and resumed ones count; "
            f"{cure} --runs {len(all_runs)}",
        )

    kind = "introductions"
    most_per_run = MOST_INTRODUCTIONS
    run_ids = request.run_ids
    if counts:
        # each round and the final evaluation, of the algorithm and of each baseline
        exchanges = (int(config["rounds"]) + 1) * (1 + len(names_in(config["baselines"])))
        kind = "messages"
        most_per_run = MOST_MESSAGES * exchanges
        run_ids = all_runs
    # a server may call each message another run's, so without a limit few runs count
    counted_runs = most_runs or min(len(all_runs), MOST_RUNS)
    limit = most_per_run * counted_runs
    number = getattr(request, kind) + 1
    if number > limit:
        raise RefusedMessage(
            f"{name} has had {limit} {kind} of {study}, more than an honest server needs; "
            "its operator may approve it again"
        )
    covered = request.covered
    covered_code, _ = covered
    if code not in (request.code, covered_code):
        covered = (code, RELEASE)
        audit.append(
            path.parents[1],  # the site's folder
            decision=COVERED,
            by=request.by,
            code=code,
            release=RELEASE,
            study=study.id,
            name=study.name,
            signed=study.by,
            purpose=study.purpose,
        )
    write(path, replace(replace(request, covered=covered), run_ids=run_ids, **{kind: number}))


def as_it_counts(request: Request, node: Values) -> Request:
    """Return the request, undecided if the decision lacks the signature that the site demands.

    A site whose node config names operators heeds only what one of them has signed.
    """
    operators = keys_of_sites(str(node.get(OPERATORS, "")))
    if not operators:
        return request
    name, _, key = request.by.partition(":")
    is_by_operator = key != "" and operators.get(name) == key
    signed = signed_decision(site_name(node), request.study.id, vars(request.bounded))
    if is_by_operator and is_signed(key, request.signature, signed):
        return request
    return replace(request, decision="")


DECIDED = ("decision", "decided", "by", "until", "runs", "code", "release", "later")
"""What an operator signs of a `Request`, and the audit log tells."""


def signed_decision(site: str, study: str, decided: Mapping[str, Any]) -> bytes:
    """Return the bytes that an operator signs: a decision, its limits, its author, the study.

    ``decided`` has the fields of the `bounded` request, or of its line in the audit log.
    """
    values = [decided.get(key) for key in DECIDED]
    return json.dumps(["protofl decision", site, study, *values]).encode()


def count_evaluation(folder: Path, study: Study, node: NodeConfig) -> None:
    """Count an evaluation in the request of a study that the operator has approved.

    RefusedMessage beyond ``max-evaluations`` of the node config. At a site where nobody approves
    runs there is no request, and nothing is counted.
    """
    path = folder / FOLDER / f"{study.id}.json"
    if not path.exists():
        return
    try:
        with locked(path):
            request = read(path)
            if request.evaluations >= node.max_evaluations:
                raise RefusedMessage(
                    f"{node.name} has evaluated {request.evaluations} times for {study}, as often "
                    "as max-evaluations (node config) lets it; its operator may approve it again"
                )
            write(path, replace(request, evaluations=request.evaluations + 1))
    except OSError as error:
        raise StateError(f"state-dir: {path} cannot be read or written ({error})") from error


def _check_not_denied(request: Request, name: str) -> None:
    if request.decision == DENIED:
        raise RefusedMessage(f"denied at {name}: {request.study}")


def _check_room(config: Values, study: Study, folder: Path) -> None:
    """Refuse a request that would help to fill the disk, or to hide others: RefusedMessage.

    At most `MOST_REQUESTS` of a group may wait. Each signer of a study that was approved here is a
    group, all other signers are one, and all studies without a signature are one: so nobody can
    use up the room of a known signer.
    """
    decisions = [(request.decision, request.study.by) for request in requests(folder)]
    approved_signers = {signer for decision, signer in decisions if decision == APPROVED}

    def group_of(signer: str) -> str:
        if signer in approved_signers:
            return f"signed by {signer}"
        return "signed" if signer else "unsigned"

    waiting = Counter(group_of(signer) for decision, signer in decisions if not decision)
    if waiting[group_of(study.by)] >= MOST_REQUESTS:
        raise RefusedMessage(f"{MOST_REQUESTS} requests of other runs wait for a decision already")
    size = len(signed_part(config))
    if size > MOST_BYTES:
        raise RefusedMessage(
            f"settings of {size} bytes, more than {MOST_BYTES}, for an operator to read"
        )


def new_request(config: Values, run_ids: Sequence[int] = ()) -> Request:
    """Return an undecided request for a run's settings and the code of this process.

    ``run_ids`` are the Flower runs that took part before an upgrade of the code.
    """
    # what may change without another approval; the signature stays, so that it can be checked again
    left_out = UNSIGNED - {"study-signature"}
    settings = {key: value for key, value in config.items() if key not in left_out}
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    return Request(settings, now, code_of(settings), RELEASE, run_ids=[*run_ids])


def code_of(settings: Values) -> str:
    """Return the version of this process's code, with that of each package that settings name."""
    return "-".join([CODE, *own_code(settings).values()])


def requests(folder: Path) -> Iterator[Request]:
    """Yield all readable requests at the site with this folder."""
    for path in (folder / FOLDER).glob("*.json"):
        with suppress(SettingsError):
            yield read(path)


def read(path: Path) -> Request:
    """Return the request that a file has.

    SettingsError where it cannot be read, or where its settings make another study's id than that
    in the file's name.
    """
    with suppress(ValueError, TypeError, KeyError):
        stored = json.loads(path.read_text(encoding="utf-8"))
        stored["covered"] = tuple(stored["covered"])  # JSON has lists
        request = Request(**stored)
        if request.study.id == path.stem:
            return request
    raise SettingsError(
        f"studies/{path.name}: this request of a run cannot be read; remove the file"
    )


def write(path: Path, request: Request) -> None:
    write_text(path, json.dumps(asdict(request), indent=1), private=True)


def site_key(folder: Path, *, make: bool = False) -> Ed25519PrivateKey:
    """Return the site's private key, or a fresh one where it has none.

    A fresh key is stored only with ``make``; otherwise no study can name it, and what it signs is
    not believed. StateError where the file is damaged.
    """
    path = folder / KEY_FILE
    with locked(path):
        if not path.exists():
            fresh = Ed25519PrivateKey.generate()
            if not make:
                return fresh
            write_text(path, fresh.private_bytes_raw().hex(), private=True)
    return _key_in(path)


def public_key(folder: Path) -> str:
    """Return the site's public key as a study names it, "" if it has none; nothing is written.

    StateError where the file is damaged.
    """
    path = folder / KEY_FILE
    return key_as_text(_key_in(path).public_key()) if path.exists() else ""


def _key_in(path: Path) -> Ed25519PrivateKey:
    with suppress(ValueError):
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(path.read_text(encoding="utf-8")))
    raise StateError(f"state-dir: {path} is damaged; restore it, or remove it for a new key")
