"""``report.md``: a run in a few lines, to paste into an issue. Paths of the machine are not in it."""

import shlex
from typing import Any

from protofl_common.basics.text import in_markdown, printable
from protofl_common.config.sections import keys_that_change
from protofl_common.experiment.settings import default_run_config
from protofl_common.report.reading import Run
from protofl_common.runs.figures import HIDDEN, MEASURES, Table, accuracy_rows, best_text, lost_text, totals
from protofl_common.runs.metrics import best_of, human_bytes, human_seconds

PLACES = keys_that_change("name", "machine") - {"device", "threads"}  # settings that say where things lie


def as_markdown(run: Run) -> str:
    summary: dict[str, Any] = dict(run.summary or {})
    defaults = default_run_config()
    own = {key: value for key, value in run.settings.items() if key not in PLACES and defaults.get(key) != value}
    texts = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in own.items()}
    clients = [] if run.settings.get("partition") == "own" else ["--clients", str(len(run.sites))]
    versions = ", ".join(f"{name} {number}" for name, number in summary.get("versions", {}).items())
    sizes, lost, seconds = totals(run.rows)
    accuracy = {kind: run.evaluations(kind)[-1]["accuracy"][kind] for kind in run.kinds}
    best = {kind: best_text(best_round) for kind in run.kinds if (best_round := best_of(run.rows, kind))}
    heads = ("", "mean, %", *list(MEASURES.values())[1:], "best mean")
    lines = [
        f"### {in_markdown(run.title)}",
        "",
        f"- {'finished' if run.finished else 'not finished'}: {len(run.rounds)} of "
        f"{in_markdown(run.settings.get('rounds', '?'))} rounds, {len(run.sites)} clients, "
        f"{human_seconds(summary.get('seconds', seconds))}, {human_bytes(sum(sizes.values()))} on the wire",
        f"- lost replies: {lost_text(lost)}",
        f"- commit {in_markdown(summary.get('commit', 'not kept'))}; {in_markdown(versions) or 'versions not kept'}",
        f"- server: {in_markdown(summary.get('machine', 'not kept'))}",
        "",
        "Settings that are not the defaults:",
        "",
        "```sh",
        shlex.join(["protofl", "run", *clients, *(printable(f"{key}={text}") for key, text in texts.items())]),
        "```",
        "",
        *Table(heads, accuracy_rows(accuracy, best, {})).as_markdown(),
        *(["", HIDDEN] if run.hides_clients else []),
    ]
    return "\n".join(lines) + "\n"
