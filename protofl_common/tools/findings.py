"""Findings about a machine, as ``protofl doctor`` and ``protofl site check`` print them."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from protofl_common.tools.cli.arguments import print_json

WRONG, WARNING, FACT = "WRONG", "warning", ""
LEVELS = (WRONG, WARNING, FACT)


@dataclass(frozen=True)
class Finding:
    level: str
    topic: str
    text: str
    cure: str = ""


def worst_first(found: Iterable[Finding]) -> list[Finding]:
    return sorted(found, key=lambda one: LEVELS.index(one.level))


def show(command: str, found: Iterable[Finding], as_json: bool) -> int:
    """Print the findings, worst first, and return the exit status: 1 where something is wrong."""
    found = worst_first(found)
    if as_json:
        rows = [asdict(one) | {"level": (one.level or "ok").lower()} for one in found]
        print_json(command, {"findings": rows})
    else:
        for one in found:
            print(f"{one.level:8}{one.topic:14}{one.text}" + (f"\n{'':22}do: {one.cure}" if one.cure else ""))
    return int(any(one.level == WRONG for one in found))


def existing(path: Path) -> Path:
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
