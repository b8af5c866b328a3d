"""``report.md``: a run in a few lines, to paste into an issue. Paths of the machine are not in it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

from protofl_common.basics.text import in_markdown, printable
from protofl_common.config.options import Scalar
from protofl_common.config.sections import keys_that_change
from protofl_common.experiment.settings import default_run_config
from protofl_common.report.reading import Run
from protofl_common.runs.folder import TROUBLE
from protofl_common.runs.metrics import HIDDEN, best_of, best_text, cells, human_bytes, human_seconds

PLACES = keys_that_change("name", "machine") - {"device", "threads"}
"""Settings that say where things lie."""
HEADS = ("", "mean, %", "by samples", "worst 10 %", "std", "best mean")


def as_markdown(run: Run) -> str:
    """The short report: the run, its machine, its settings and its results."""
    told: dict[str, Any] = dict(run.summary or {})
    defaults = default_run_config()
    own = {key: value for key, value in run.settings.items() if key not in PLACES and defaults.get(key) != value}
    lost = {kind: sum(len(row[kind]) for row in run.rows) for kind in TROUBLE}
    seconds = told.get("seconds", sum(row["seconds"]["total"] for row in run.rows))
    sent = sum(sum(row["bytes"].values()) for row in run.rows)
    clients = [] if run.settings.get("partition") == "own" else ["--clients", str(len(run.sites))]
    versions = ", ".join(f"{name} {number}" for name, number in told.get("versions", {}).items())
    wanted = in_markdown(run.settings.get("rounds", "?"))
    lines = [
        f"### {in_markdown(run.title)}",
        "",
        f"- {'finished' if run.finished else 'not finished'}: {len(run.rounds)} of {wanted} rounds, "
        f"{len(run.sites)} clients, {human_seconds(seconds)}, {human_bytes(sent)} on the wire",
        f"- lost replies: {', '.join(f'{number} {kind}' for kind, number in lost.items() if number) or 'none'}",
        f"- commit {in_markdown(told.get('commit', 'not kept'))}; {in_markdown(versions) or 'versions not kept'}",
        f"- server: {in_markdown(told.get('machine', 'not kept'))}",
        "",
        "Settings that are not the defaults:",
        "",
        "```sh",
        shlex.join(["protofl", "run", *clients, *(printable(f"{key}={_value(value)}") for key, value in own.items())]),
        "```",
        "",
        *_line(HEADS),
        "|---" + "|---:" * (len(HEADS) - 1) + "|",
    ]
    hidden = ["", HIDDEN] if run.hides_clients else []
    return "\n".join([*lines, *(line for kind in run.kinds for line in _accuracy(run, kind)), *hidden]) + "\n"


def _accuracy(run: Run, kind: str) -> Iterable[str]:
    figures, best = run.evaluations(kind)[-1]["accuracy"][kind], best_of(run.rows, kind)
    return _line([kind, *cells(figures), best_text(best) if best else "–"])


def _line(cells: Iterable[str]) -> list[str]:
    return [f"| {' | '.join(map(in_markdown, cells))} |"]


def _value(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
