"""The records beside a payload: instructions, reports, introductions, and bytes for each of several sites."""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_origin

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from protofl_common.basics.run_history import RunHistory
from protofl_common.basics.text import LONGEST_NAME, is_plain_name, is_site_name
from protofl_common.runs.evaluation_metrics import METRICS, RECALL
from protofl_common.runs.folder import KINDS, BestRound
from protofl_common.wire.schema import RefusedMessage

_MOST_CLAIMED = 10**15  # samples that a card may claim; int64 takes the sum of thousands of such claims
ROUNDING = 1e-6
_LARGEST_FIGURE = 1e30  # magnitude of a number in a report; sums over clients stay finite
_MOST_DIMENSIONS, _LARGEST_INPUT = 8, 2**24  # of a sample; a server may have to build a model for it
PHASES = ("load", "evaluate", "train", "prototypes", "save")  # what a report may tell of: phases of a client's round
COUNTS = ("round", "train_samples", "test_samples", "validation_samples")  # what every report tells
WAITING = "waiting for approval"  # begins the reason of a site whose operator has not decided about a run
LOST_STATE = 64  # the code of an error by which a simulated client ends the run; Flower's are below 10
AUDIT = "audit"  # the record with the head of a site's audit log
SECAGG = "secagg"  # the record of keys and shares in a message of secure aggregation
NEXT_SUM = "next-sum"  # the same for the sum after the one that a message is about
FINAL = "_final"  # after the name of a stage in a message about the final evaluation
MOST_SITES = 1000  # in one sum: every client sends something to every other
_Card = TypeVar("_Card", "Instructions", "SiteCard")


@dataclass(frozen=True)
class Instructions:
    round: int  # from 1; the final evaluation carries the number of the last round
    run_name: str
    run_history: RunHistory  # which states of a client count, where the run was resumed
    counted: int = 0  # the last round into whose result this client's reply went; 0: none
    part: float = 1.0  # of the change that it sent then; below 1 where the server cut it


@dataclass(frozen=True)
class Report:
    """A client's report of its round: scalars only."""

    round: int
    train_samples: int
    test_samples: int
    correct: dict[str, int] = field(default_factory=dict)  # right predictions per way to predict (`KINDS`)
    losses: dict[str, float] = field(default_factory=dict)  # mean over the samples: ``total``, and its terms
    seconds: dict[str, float] = field(default_factory=dict)  # per phase of the client's round (`PHASES`)
    metrics: dict[str, float] = field(default_factory=dict)  # ``head/auc`` …, of the setting ``metrics``
    validation_samples: int = 0
    validation: dict[str, float] = field(default_factory=dict)  # accuracy in [0, 1] per way to predict, metrics


@dataclass(frozen=True)
class SiteCard:
    """How a site introduces itself, once, before the first round."""

    name: str
    partition: int
    num_partitions: int
    domain: str
    arch: str
    input_shape: tuple[int, ...]  # as a model gets it: (channels, H, W), (features,), (channels, steps), (tokens,)
    parameters: int
    train_samples: int
    test_samples: int
    classes: tuple[str, ...]  # names of all classes of the data set, in label order
    present: tuple[int, ...]  # labels of its training samples, where its uploads will show them; elsewhere none
    weights: str  # a digest of names, types and shapes of all weights that it exchanges; "" for none
    device: str  # where it computes: ``"cpu"``, ``"cuda"``, ``"cuda:1"``
    found: int = 0  # samples that its share was taken from, used or not (`ClientData.found`)
    validation_samples: int = 0
    real: bool = True  # a machine with an operator, not a simulated client (`is_site`)
    signature: str = ""  # of a site that the study names, with its key (`experiment/study.py`)
    columns: str = ""  # of a table: 16 bits that stand for its columns in their order; they confirm a guess of all


def pack_instructions(instructions: Instructions) -> ConfigRecord:
    return ConfigRecord(vars(instructions) | {"run_history": instructions.run_history.text})


def unpack_instructions(content: RecordDict) -> Instructions:
    """The record ``round``; RefusedMessage if it is missing or malformed, or its run name would be no plain folder."""
    instructions = _from_config(Instructions, content, "round")
    if not is_plain_name(instructions.run_name):
        raise RefusedMessage(f"round.run_name is {instructions.run_name!r}, not a plain name")
    if not 0 <= instructions.part <= 1:
        raise RefusedMessage(f"round.part is {instructions.part!r}, not from 0 to 1")
    try:
        return dataclasses.replace(instructions, run_history=RunHistory.parse(str(instructions.run_history)))
    except ValueError:
        raise RefusedMessage(f"round.run_history is {instructions.run_history!r}") from None


def pack_baseline(algo: str) -> dict[str, ConfigRecord]:
    """The record that every message of a run's baseline carries; {} for the run itself (``algo`` is "")."""
    return {"baseline": ConfigRecord({"algo": algo})} if algo else {}


def unpack_baseline(content: RecordDict) -> str:
    """Return the baseline that a message is about, "" for none; RefusedMessage if the record is malformed."""
    record = content.get("baseline", ConfigRecord({"algo": ""}))
    if not isinstance(record, ConfigRecord) or len(record) != 1 or not isinstance(algo := record.get("algo"), str):
        raise RefusedMessage("baseline is no record of an algorithm's name")
    return algo


def pack_settings(digest: str) -> dict[str, ConfigRecord]:
    return {"settings": ConfigRecord({"digest": digest})}


def check_settings(content: RecordDict, digest: str) -> None:
    """RefusedMessage where the server's settings are not the client's, whose digest is given."""
    if (wanted := content.config_records.get("settings", ConfigRecord()).get("digest")) != digest:
        cure = "install the same version on both, and set with --run-config what was changed in pyproject.toml"
        raise RefusedMessage(f"settings with the digest {wanted!r}, and {digest!r} here: other defaults; {cure}")


def pack_best(best: BestRound | None, final: bool = False) -> dict[str, ConfigRecord]:
    """The record of the best round so far, or, ``final``, of the whole run; {} before there is one."""
    return {"best": ConfigRecord({"after": best["after"], "on": best["on"] if final else ""})} if best else {}


def unpack_best(content: RecordDict) -> tuple[int, str]:
    """After which round the model was the best, -1 if unknown, and, where this is final, on which data; checked."""
    record = content.config_records.get("best", {"after": -1, "on": ""})
    after, on = record.get("after"), record.get("on")
    if len(record) != 2 or type(after) is not int or on not in ("", "validation", "test"):
        raise RefusedMessage(f"best is {dict(record)!r}")
    return after, str(on)


def pack_site_card(card: SiteCard) -> ConfigRecord:
    return ConfigRecord({key: list(value) if isinstance(value, tuple) else value for key, value in vars(card).items()})


def unpack_site_card(content: RecordDict) -> SiteCard:
    """The record ``site``; RefusedMessage if it is missing or malformed, or a number or name is out of range."""
    if content.keys() - {AUDIT} != {"site"}:
        raise RefusedMessage("records other than 'site'")
    card = _from_config(SiteCard, content, "site")
    for key, value in vars(card).items():
        if isinstance(value, int) and not 0 <= value <= _MOST_CLAIMED:
            raise RefusedMessage(f"site.{key} is {value}, not from 0 to {_MOST_CLAIMED}")
        for text in value if key == "classes" else (value,):
            if isinstance(text, str) and (len(text) > LONGEST_NAME or not text.isprintable()):
                raise RefusedMessage(f"site.{key} with a name that is too long or not printable: {text!r}")
    if not is_site_name(card.name) or not all(isinstance(name, str) for name in card.classes):
        raise RefusedMessage(f"site.name is {card.name!r}, site.classes is {card.classes!r}")
    if not re.fullmatch("([0-9a-f]{128})?", card.signature):
        raise RefusedMessage("site.signature is not of 64 bytes")
    labels, shape = card.present, card.input_shape
    in_range = all(type(label) is int and 0 <= label < len(card.classes) for label in labels)
    if not in_range or labels != tuple(sorted(set(labels))):
        raise RefusedMessage(f"site.present is {list(labels)!r}")
    positive = all(type(size) is int and size > 0 for size in shape)
    if not positive or not 1 <= len(shape) <= _MOST_DIMENSIONS or math.prod(shape) > _LARGEST_INPUT:
        raise RefusedMessage(f"site.input_shape is {list(shape)!r}")
    return card


def pack_report(report: Report, losses: Collection[str], metrics: Collection[str] = ()) -> MetricRecord:
    """The record ``report`` of a reply: dictionaries become dotted names; ValueError for one that is not declared."""
    names = report_names(losses, metrics)
    for group, declared in names.items():
        if odd := sorted(getattr(report, group).keys() - set(declared)):
            raise ValueError(f"{group}.{odd[0]} is not declared; choose from {', '.join(declared)}")
    nested = {f"{group}.{key}": number for group in names for key, number in getattr(report, group).items()}
    return MetricRecord({name: getattr(report, name) for name in COUNTS} | nested)


def unpack_report(
    content: RecordDict, expected_round: int, losses: Collection[str], metrics: Collection[str] = ()
) -> Report:
    """The record ``report``; RefusedMessage for odd numbers, undeclared names, and that of another round (a replay)."""
    if set(content.metric_records) != {"report"} or content.config_records.keys() - {AUDIT}:
        raise RefusedMessage("records other than a report")
    names = report_names(losses, metrics)
    plain: dict[str, int] = {}
    nested: dict[str, dict[str, float]] = {group: {} for group in names}
    for name, value in content.metric_records["report"].items():
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= _LARGEST_FIGURE:
            raise RefusedMessage(f"a report whose {name} is not a finite number of at most {_LARGEST_FIGURE:g}")
        group, _, key = name.partition(".")
        signed = group == "losses" or (group in ("metrics", "validation") and not is_share(key))
        if group in names and key in names[group] and (signed or value >= 0):
            nested[group][key] = value
        elif name in COUNTS and isinstance(value, int) and value >= 0:
            plain[name] = value
        else:
            raise RefusedMessage(f"a report with the odd entry {name} = {value!r}")
    if len(plain) < len(COUNTS):
        raise RefusedMessage("an incomplete report")
    if plain["round"] != expected_round:
        raise RefusedMessage(f"a reply to round {plain['round']} in round {expected_round}")
    correct = {name: int(value) for name, value in nested["correct"].items()}
    if any(value > plain["test_samples"] for value in correct.values()):
        raise RefusedMessage("more correct predictions than test samples")
    validated = nested["validation"]
    if any(is_share(name) and value > 1 + ROUNDING for name, value in (nested["metrics"] | validated).items()):
        raise RefusedMessage("an accuracy, or a metric that is a share, above 1")
    if validated and not plain["validation_samples"]:
        raise RefusedMessage("figures on validation data without validation samples")
    return Report(**plain, **nested | {"correct": correct})  # type: ignore[arg-type]


def is_share(name: str) -> bool:
    """Return whether a figure of an evaluation lies in [0, 1]; of the user's own metrics that cannot be known."""
    kind, _, metric = name.partition("/")
    return kind in KINDS and (not metric or metric.partition("/")[0] in (*METRICS, RECALL))


def report_names(losses: Collection[str], metrics: Collection[str]) -> dict[str, Collection[str]]:
    """The groups of a report's numbers, and the names that they may have."""
    validation = (*KINDS, *metrics)
    return {"losses": losses, "metrics": metrics, "correct": KINDS, "seconds": PHASES, "validation": validation}


def _from_config(kind: type[_Card], content: RecordDict, name: str) -> _Card:
    record = content.get(name)
    types: dict[str, Any] = {each.name: each.type for each in dataclasses.fields(kind)}
    if not isinstance(record, ConfigRecord) or set(record) != set(types):
        raise RefusedMessage(f"no complete record {name!r}; is the other side's ProtoFL of another version?")
    for key, value in record.items():
        if type(value) is not {RunHistory: str}.get(types[key], list if get_origin(types[key]) else types[key]):
            raise RefusedMessage(f"{name}.{key} is {value!r}")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}
    return kind(**values)  # type: ignore[arg-type]


def head_of(content: RecordDict) -> str:
    """Return the head of the site's audit log in its reply, "" where there is none."""
    head = content.config_records.get(AUDIT, ConfigRecord()).get("head")
    return head if isinstance(head, str) and re.fullmatch("[0-9a-f]{64}", head) else ""


def pack_by_site(content: Mapping[str, bytes], name: str = SECAGG) -> dict[str, ConfigRecord]:
    return {name: ConfigRecord(dict(content))}


def unpack_by_site(content: RecordDict, size: int, name: str = SECAGG) -> dict[str, bytes]:
    """The record; RefusedMessage if it is missing, names no site, or has other than ``size`` bytes for one."""
    record = content.config_records.get(name, ConfigRecord())
    if not 1 <= len(record) <= MOST_SITES:
        raise RefusedMessage(f"a record {name!r} of {len(record)} sites, not from 1 to {MOST_SITES}")
    values = {}
    for site, value in record.items():
        if not is_site_name(site) or not isinstance(value, bytes) or len(value) != size:
            raise RefusedMessage(f"a record {name!r} with other than {size} bytes for {site!r}")
        values[site] = value
    return values
