"""The records beside a payload: instructions, reports, introductions, and bytes by site."""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard, TypeVar, get_origin

from flwr.app import Array, ConfigRecord, MetricRecord, RecordDict

from protofl_common.basics.run_history import RunHistory
from protofl_common.basics.text import is_plain_name, is_short_and_printable, is_site_name
from protofl_common.runs.folder import BestRound
from protofl_common.tasks import TASKS, Task, task_of
from protofl_common.tasks.metrics import KINDS
from protofl_common.wire.schema import RefusedMessage

_MOST_CLAIMED = 10**15  # samples on a card; int64 takes the sum of thousands of such claims
ROUNDING = 1e-6
_LARGEST_FIGURE = 1e30  # magnitude of a number in a report; sums over clients stay finite
# Of a sample; a server may have to build a model for it.
_MOST_DIMENSIONS = 8
_LARGEST_INPUT = 2**24
PHASES = ("load", "evaluate", "train", "prototypes", "save")  # of a client's round, in a report
COUNTS = ("round", "train_samples", "test_samples", "validation_samples")  # in every report
AUDIT = "audit"  # the record with the head of a site's audit log
SECAGG = "secagg"  # the record of keys and shares in a message of secure aggregation
NEXT_SUM = "next-sum"  # keys and shares for the sum after the one that a message is about
COUNTED = "counted"  # the record of `pack_counted`
SEEN = "seen"  # the record of `pack_heads`
FINAL = "_final"  # after the name of a stage in a message about the final evaluation
MOST_SITES = 1000  # in one sum: every client sends something to every other
_Card = TypeVar("_Card", "Instructions", "SiteCard")


@dataclass(frozen=True)
class Instructions:
    """What a server tells a client with the payload of a round."""

    round: int  # from 1; the final evaluation carries the number of the last round
    run_name: str
    run_history: RunHistory  # which states of a client count, where the run was resumed
    # the last round into whose result this client's reply went; 0: none, and always with secagg,
    # where all sites are sent the same (`pack_counted`)
    counted: int = 0
    part: float = 1.0  # of the change that it sent then; below 1 where the server cut it


@dataclass(frozen=True)
class Report:
    """A client's report of its round: scalars only."""

    round: int
    train_samples: int
    test_samples: int
    correct: dict[str, int] = field(default_factory=dict)  # right predictions by kind (`KINDS`)
    losses: dict[str, float] = field(default_factory=dict)  # means: ``total``, and its terms
    seconds: dict[str, float] = field(default_factory=dict)  # per phase of the round (`PHASES`)
    metrics: dict[str, float] = field(default_factory=dict)  # ``head/auc`` …, as set in ``metrics``
    validation_samples: int = 0
    validation: dict[str, float] = field(default_factory=dict)  # accuracies in [0, 1], metrics
    epsilon: float | None = None  # that its ledger counts for this run; None where it does not tell


@dataclass(frozen=True)
class SiteCard:
    """How a site introduces itself, once, before the first round."""

    name: str
    partition: int
    num_partitions: int
    domain: str
    arch: str
    # As a model gets it: (channels, H, W), (features,), (channels, steps), (tokens,).
    input_shape: tuple[int, ...]
    parameters: int
    train_samples: int
    test_samples: int
    classes: tuple[str, ...]  # names of all classes of the data set, in label order
    present: tuple[int, ...]  # labels of its training samples; none where no upload shows them
    weights: str  # a digest of names, types and shapes of all weights that it exchanges; or ""
    device: str  # where it computes: ``"cpu"``, ``"cuda"``, ``"cuda:1"``
    found: int = 0  # samples that its share was taken from, used or not (`ClientData.found`)
    validation_samples: int = 0
    real: bool = True  # a machine with an operator, not a simulated client (`is_site`)
    signature: str = ""  # of a site that the study names, with its key (`experiment/study.py`)
    # Of a table: 16 bits that stand for its columns in their order; they confirm a guess of all.
    columns: str = ""
    task_kind: str = "single-label"  # the setting ``task`` by which it has read its data

    @property
    def task(self) -> Task:
        return task_of(self.classes, self.task_kind)


def pack_instructions(instructions: Instructions) -> ConfigRecord:
    return ConfigRecord(vars(instructions) | {"run_history": instructions.run_history.text})


def unpack_instructions(content: RecordDict) -> Instructions:
    """Read the record ``round``; RefusedMessage if it is missing or malformed.

    The run's name must be fit for a folder.
    """
    instructions = _from_config(Instructions, content, "round")
    if not is_plain_name(instructions.run_name):
        raise RefusedMessage(f"round.run_name is {instructions.run_name!r}, not a plain name")
    if not 0 <= instructions.part <= 1:
        raise RefusedMessage(f"round.part is {instructions.part!r}, not from 0 to 1")
    try:
        # so far it is a text, as it travels
        run_history = RunHistory.parse(str(instructions.run_history))
    except ValueError:
        raise RefusedMessage(
            f"round.run_history is {instructions.run_history!r}, not a list of Flower runs"
        ) from None
    return dataclasses.replace(instructions, run_history=run_history)


def pack_counted(rounds: Mapping[str, int]) -> dict[str, ConfigRecord]:
    """Return the record that tells all sites of a secure sum about the last reply of each.

    ``rounds``: site -> the last round whose result includes its reply.
    """
    return {COUNTED: ConfigRecord(dict(rounds))}


def unpack_counted(content: RecordDict, site: str) -> int:
    """Return the last round into whose result a site's reply went, 0 for none.

    RefusedMessage if the record of `pack_counted` is malformed.
    """
    number = content.config_records.get(COUNTED, ConfigRecord()).get(site, 0)
    if type(number) is not int:
        raise RefusedMessage(f"{COUNTED}.{site} is {number!r}, not the number of a round")
    return number


def pack_heads(heads: Mapping[str, str]) -> dict[str, ConfigRecord]:
    """Return the record that tells each site which head of its audit log the server saw last.

    A head is the digest of a log's last line. Return {} if the server has seen none.
    """
    return {SEEN: ConfigRecord(dict(heads))} if heads else {}


def unpack_head(content: RecordDict, site: str) -> str:
    """Return the head of a site's audit log that the server saw last, "" for none.

    A head is the digest of the log's last line. RefusedMessage if it is no SHA-256 digest in
    hexadecimal.
    """
    head = content.config_records.get(SEEN, ConfigRecord()).get(site, "")
    if isinstance(head, str) and re.fullmatch("([0-9a-f]{64})?", head):
        return head
    raise RefusedMessage(f"{SEEN}.{site} is no head of an audit log")


def digest_of_message(content: Mapping[str, Any]) -> str:
    """Return a digest of the message that asks a site for its vector in a secure sum.

    Masks depend on it, so that those of sites that were sent different messages do not cancel. The
    record `SECAGG` is left out: its shares are for one site alone, and all else is for all.
    """
    return _digest({name: record for name, record in content.items() if name != SECAGG})


def summary_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the size in bytes of each record of a message, and a SHA-256 digest of all of it.

    Arrays count as they travel, other values as their text. A site's audit log has the result.
    """
    sizes = {}
    for name, record in content.items():
        sizes[name] = sum(len(_data_of(value)) for value in record.values())
    return {"sent": sizes, "sha256": _digest(content)}


def _digest(content: Mapping[str, Any]) -> str:
    """Return a digest of all records and the kinds of their values, whatever their order."""
    digest = hashlib.sha256()
    for name, record in sorted(content.items()):
        digest.update(json.dumps([name, type(record).__name__, len(record)]).encode())
        for key, value in sorted(record.items()):
            kind: list[Any] = [type(value).__name__]
            if isinstance(value, Array):
                kind = [value.stype, value.dtype, *value.shape]
            data = _data_of(value)
            digest.update(json.dumps([key, kind, len(data)]).encode())
            digest.update(data)
    return digest.hexdigest()


def _data_of(value: object) -> bytes:
    return value.data if isinstance(value, Array) else repr(value).encode()


def pack_baseline(algo: str) -> dict[str, ConfigRecord]:
    """Return the record by which every message of a baseline names its algorithm.

    Messages of the run itself, whose ``algo`` is "" here, have none.
    """
    return {"baseline": ConfigRecord({"algo": algo})} if algo else {}


def unpack_baseline(content: RecordDict) -> str:
    """Return the baseline that a message is about, "" for none; RefusedMessage if malformed."""
    record = content.get("baseline")
    if record is None:
        return ""
    if isinstance(record, ConfigRecord) and len(record) == 1:
        algo = record.get("algo")
        if isinstance(algo, str):
            return algo
    raise RefusedMessage(
        "the record 'baseline' must have the name of an algorithm as algo, and nothing else"
    )


def pack_settings(digest: str) -> dict[str, ConfigRecord]:
    return {"settings": ConfigRecord({"digest": digest})}


def check_settings(content: RecordDict, digest: str) -> None:
    """Refuse a message of a server whose settings are not the client's, which have this digest."""
    servers_digest = content.config_records.get("settings", ConfigRecord()).get("digest")
    if servers_digest != digest:
        raise RefusedMessage(
            f"settings with the digest {servers_digest!r}, and {digest!r} here: other defaults; "
            "install the same version on both, and set with --run-config what was changed in "
            "pyproject.toml"
        )


def pack_best(best: BestRound | None, final: bool = False) -> dict[str, ConfigRecord]:
    """Return the record of the best round so far, {} before there is one.

    Its ``after`` is the round after which the model was the best. Its ``on`` says which data chose
    that round: "" while a better round may follow, which it cannot in the ``final`` evaluation.
    """
    if not best:
        return {}
    return {"best": ConfigRecord({"after": best["after"], "on": best["on"] if final else ""})}


def unpack_best(content: RecordDict) -> tuple[int, str]:
    """Return the round after which the model was the best, and the data that chose it.

    The round is -1 before there is a best one, the data are "" while a better one may follow.
    RefusedMessage if the record is malformed.
    """
    record = content.config_records.get("best", {"after": -1, "on": ""})
    after = record.get("after")
    on = record.get("on")
    if len(record) != 2 or type(after) is not int or on not in ("", "validation", "test"):
        raise RefusedMessage(f"best is {dict(record)!r}, not a round and the data that chose it")
    return after, str(on)


def pack_site_card(card: SiteCard) -> ConfigRecord:
    values = {}
    for key, value in vars(card).items():
        values[key] = list(value) if isinstance(value, tuple) else value
    return ConfigRecord(values)


def unpack_site_card(content: RecordDict) -> SiteCard:
    """Read the record ``site``; RefusedMessage if it is missing, malformed or out of range.

    Beside it may be the head of the site's audit log.
    """
    if content.keys() - {AUDIT} != {"site"}:
        raise RefusedMessage("an introduction must have the record 'site' and no other")
    card = _from_config(SiteCard, content, "site")
    for key, value in vars(card).items():
        if isinstance(value, int) and not 0 <= value <= _MOST_CLAIMED:
            raise RefusedMessage(f"site.{key} is {value}, not from 0 to {_MOST_CLAIMED}")
        texts = value if key == "classes" else (value,)  # each class has a name
        for text in texts:
            if isinstance(text, str) and not is_short_and_printable(text):
                # The error does not show the text: it may be rows of patients, as where a CSV file
                # has a quote without its pair
                raise RefusedMessage(
                    f"site.{key} with a name that is too long or not printable"
                    f" ({len(text)} characters)"
                )

    if not is_site_name(card.name):
        raise RefusedMessage(
            f"site.name is {card.name!r}, not a name of ASCII letters, digits, '.', '_' and '-'"
        )
    if not all(isinstance(name, str) for name in card.classes):
        raise RefusedMessage(f"site.classes is {list(card.classes)!r}, not a list of names")
    if not re.fullmatch("([0-9a-f]{128})?", card.signature):  # two digits a byte; "": not signed
        raise RefusedMessage("site.signature is not of 64 bytes")
    if card.task_kind not in TASKS:
        raise RefusedMessage(f"site.task_kind is {card.task_kind!r}, none of {', '.join(TASKS)}")
    if not _are_labels(card.present, card.task.num_classes):
        raise RefusedMessage(
            f"site.present is {list(card.present)!r}, not labels of its classes in ascending order"
        )
    if not _is_shape(card.input_shape):
        raise RefusedMessage(
            f"site.input_shape is {list(card.input_shape)!r}, not the shape of a sample"
        )
    return card


def _are_labels(labels: tuple[Any, ...], classes: int) -> bool:
    """Return whether these are different labels of so many classes, in ascending order."""
    in_range = all(type(label) is int and 0 <= label < classes for label in labels)
    return in_range and labels == tuple(sorted(set(labels)))


def _is_shape(sizes: tuple[Any, ...]) -> bool:
    """Return whether a sample may have these sizes; no model is built for others."""
    if not all(type(size) is int and size > 0 for size in sizes):
        return False
    return 1 <= len(sizes) <= _MOST_DIMENSIONS and math.prod(sizes) <= _LARGEST_INPUT


def pack_report(
    report: Report, losses: Collection[str], metrics: Collection[str] = ()
) -> MetricRecord:
    """Return the record ``report`` of a reply: numbers by name, such as ``losses.total``.

    ``losses`` and ``metrics`` are the names that the algorithm and the settings declare. ValueError
    for a number with another name.
    """
    names = report_names(losses, metrics)
    for group, declared in names.items():
        undeclared = sorted(getattr(report, group).keys() - set(declared))
        if undeclared:
            known = ", ".join(declared)
            raise ValueError(f"{group}.{undeclared[0]} is not declared; choose from {known}")

    record = {name: getattr(report, name) for name in COUNTS}
    for group in names:
        for key, number in getattr(report, group).items():
            record[f"{group}.{key}"] = number
    if report.epsilon is not None:
        record["epsilon"] = report.epsilon
    return MetricRecord(record)


def unpack_report(
    content: RecordDict,
    expected_round: int,
    losses: Collection[str],
    metrics: Collection[str] = (),
) -> Report:
    """Read the record ``report`` of a reply, whose numbers have names such as ``losses.total``.

    ``losses`` and ``metrics`` are the names that the algorithm and the settings declare.
    RefusedMessage for other names, for numbers that no client can have, and for the report of
    another round, as in a replay.
    """
    if set(content.metric_records) != {"report"} or content.config_records.keys() - {AUDIT}:
        raise RefusedMessage(
            "a reply must have the record 'report' beside its arrays, and no other"
        )
    names = report_names(losses, metrics)
    counts: dict[str, int] = {}
    groups: dict[str, dict[str, float]] = {group: {} for group in names}
    epsilon = None
    for name, value in content.metric_records["report"].items():
        if not _is_figure(value):
            raise RefusedMessage(
                f"a report whose {name} is not a finite number of at most {_LARGEST_FIGURE:g}"
            )
        group, _, key = name.partition(".")
        is_of_group = group in names and key in names[group]
        in_range = value >= 0 or _may_be_negative(group, key)
        if is_of_group and in_range:
            groups[group][key] = value
        elif name in COUNTS and isinstance(value, int) and value >= 0:
            counts[name] = value
        elif name == "epsilon" and value >= 0:
            epsilon = float(value)
        else:
            raise RefusedMessage(
                f"report.{name} is {value!r}: the name is not declared, or the value out of range"
            )

    if len(counts) < len(COUNTS):
        raise RefusedMessage(f"a report without {', '.join(sorted(set(COUNTS) - counts.keys()))}")
    if counts["round"] != expected_round:
        raise RefusedMessage(f"a reply to round {counts['round']} in round {expected_round}")
    correct = {kind: int(value) for kind, value in groups.pop("correct").items()}
    report = Report(**counts, correct=correct, **groups, epsilon=epsilon)  # type: ignore[arg-type]
    _check_figures(report)
    return report


def _is_figure(value: object) -> TypeGuard[int | float]:
    """Return whether this is a number, not NaN, and so small that sums over clients are finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= _LARGEST_FIGURE


def _may_be_negative(group: str, key: str) -> bool:
    """Return whether the figure ``key`` may be below 0 in this group of a report's numbers."""
    if group in ("metrics", "validation"):
        return not is_share(key)
    return group == "losses"


def _check_figures(report: Report) -> None:
    """Refuse figures that contradict the numbers of samples, and shares above 1."""
    if any(number > report.test_samples for number in report.correct.values()):
        raise RefusedMessage("more correct predictions than test samples")
    for name, value in (*report.metrics.items(), *report.validation.items()):
        if is_share(name) and value > 1 + ROUNDING:  # `unpack_report` has refused shares below 0
            raise RefusedMessage("an accuracy, or a metric that is a share, above 1")
    if report.validation and not report.validation_samples:
        raise RefusedMessage("figures on validation data without validation samples")


def is_share(name: str) -> bool:
    """Return whether the figure ``name`` must lie in [0, 1].

    ``head``, one of `KINDS`, names an accuracy; ``head/auc`` a metric; ``head/recall/3`` a metric
    of one class. Accuracies and all built-in metrics are shares. The range of users' own metrics is
    not known, so these give False.
    """
    kind, _, metric_and_class = name.partition("/")
    if kind not in KINDS:
        return False
    metric = metric_and_class.partition("/")[0]
    is_built_in = any(metric in task.metric_choices() for task in TASKS.values())
    return not metric_and_class or is_built_in


def report_names(losses: Collection[str], metrics: Collection[str]) -> dict[str, Collection[str]]:
    """Return the groups of a report's numbers, and the names that numbers of a group may have."""
    return {
        "losses": losses,
        "metrics": metrics,
        "correct": KINDS,
        "seconds": PHASES,
        "validation": (*KINDS, *metrics),
    }


def _from_config(kind: type[_Card], content: RecordDict, name: str) -> _Card:
    """Read the record ``name`` as an object of the class ``kind``.

    RefusedMessage unless it has exactly the fields of that class, each of its type; a tuple travels
    as a list.
    """
    record = content.get(name)
    types: dict[str, Any] = {each.name: each.type for each in dataclasses.fields(kind)}
    if not isinstance(record, ConfigRecord) or set(record) != set(types):
        raise RefusedMessage(
            f"no complete record {name!r}; is the other side's ProtoFL of another version?"
        )
    values = {}
    for key, value in record.items():
        if type(value) is not _type_on_the_wire(types[key]):  # a bool is no int here
            raise RefusedMessage(f"{name}.{key} is {value!r}, a value of another type")
        values[key] = tuple(value) if isinstance(value, list) else value
    return kind(**values)  # type: ignore[arg-type]


def _type_on_the_wire(field_type: Any) -> type:
    """Return the type in which a field travels: a history as its text, a tuple as a list."""
    if field_type is RunHistory:
        return str
    if get_origin(field_type):  # only tuples, such as tuple[int, ...], have one
        return list
    return field_type  # type: ignore[no-any-return]


def head_of(content: RecordDict) -> str:
    """Return the head of the site's audit log in its reply, "" if there is none or it is malformed.

    A head is the digest of the log's last line.
    """
    head = content.config_records.get(AUDIT, ConfigRecord()).get("head")
    if isinstance(head, str) and re.fullmatch("[0-9a-f]{64}", head):
        return head
    return ""


def pack_by_site(content: Mapping[str, bytes], name: str = SECAGG) -> dict[str, ConfigRecord]:
    return {name: ConfigRecord(dict(content))}


def unpack_by_site(content: RecordDict, size: int, name: str = SECAGG) -> dict[str, bytes]:
    """Read the record ``name``, which must have exactly ``size`` bytes for each of its sites.

    RefusedMessage for any other record.
    """
    record = content.config_records.get(name, ConfigRecord())
    if not 1 <= len(record) <= MOST_SITES:
        raise RefusedMessage(
            f"a record {name!r} of {len(record)} sites, not from 1 to {MOST_SITES}"
        )
    values = {}
    for site, value in record.items():
        if not is_site_name(site) or not isinstance(value, bytes) or len(value) != size:
            raise RefusedMessage(f"a record {name!r} with other than {size} bytes for {site!r}")
        values[site] = value
    return values
