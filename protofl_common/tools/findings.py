"""Findings about a machine, as ``protofl doctor`` and ``protofl site check`` print them."""

import os
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from protofl_common.tools.cli.arguments import print_json

WRONG, WARNING, FACT = "WRONG", "warning", ""


@dataclass(frozen=True)
class Finding:
    level: str
    topic: str
    text: str
    cure: str = ""


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: (WRONG, WARNING, FACT).index(finding.level))


def show(command: str, findings: list[Finding], as_json: bool) -> int:
    """Print the findings in their order, and return the exit status: 1 where something is wrong."""
    if as_json:
        rows = [asdict(finding) | {"level": (finding.level or "ok").lower()} for finding in findings]
        print_json(command, {"findings": rows})
    else:
        for level, topic, text, cure in map(astuple, findings):
            print(f"{level:8}{topic:14}{text}" + (f"\n{'':22}do: {cure}" if cure else ""))
    return int(any(finding.level == WRONG for finding in findings))


def existing(path: Path) -> Path:
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if os.path.exists(folder))
