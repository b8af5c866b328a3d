"""Findings about a machine, as ``protofl doctor`` and ``protofl site check`` print them."""

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from protofl_common.tools.arguments import print_json

WRONG = "WRONG"
WARNING = "warning"
FACT = ""
LEVELS = (WRONG, WARNING, FACT)  # the worst first


@dataclass(frozen=True)
class Finding:
    level: str  # one of LEVELS
    topic: str
    text: str
    cure: str = ""

    def __str__(self) -> str:
        line = f"{self.level:8}{self.topic:14}{self.text}"
        if self.cure:
            line += f"\n{'':22}do: {self.cure}"  # below the text: 8 + 14 columns stand before it
        return line


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def show(command: str, findings: list[Finding], as_json: bool) -> int:
    """Print the findings in their order, and return the exit status: 1 where something is wrong."""
    if as_json:
        rows = []
        for finding in findings:
            level = finding.level.lower() or "ok"  # a `FACT` has no word on the terminal
            rows.append({**asdict(finding), "level": level})
        print_json(command, {"findings": rows})
    else:
        for finding in findings:
            print(finding)
    return int(any(finding.level == WRONG for finding in findings))


def nearest_existing(path: Path) -> Path:
    """Return ``path``, or the nearest folder above it that exists."""
    nearest = path.absolute()
    while not os.path.exists(nearest):
        nearest = nearest.parent
    return nearest
