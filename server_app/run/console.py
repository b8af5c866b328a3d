"""What a run shows while it goes on and when it ends: plain lines, which `flwr run --stream` carries."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from protofl_common.metrics import human_bytes, human_seconds
from protofl_common.run_folder import RoundRow, Summary


def say(text: str) -> None:
    """A line, at once."""
    print(text, flush=True)


def round_line(row: RoundRow, rounds: int, seconds_left: float) -> str:
    """One round in one line, from its row in ``metrics.jsonl``."""
    parts = [f"round {row['round']:>{len(str(rounds))}}/{rounds}"]
    if "total" in row["losses"]:
        parts.append(f"loss {row['losses']['total']:.3f}")
    parts += _accuracy_texts(row)
    parts.append(f"↑{human_bytes(row['bytes']['up'])} ↓{human_bytes(row['bytes']['down'])}")
    parts.append(f"{human_seconds(row['seconds']['total'])}, {human_seconds(seconds_left)} to go")
    return "  ".join(parts)


def final_table(summary: Summary) -> str:
    """The accuracies after the last round, with traffic, time and lost replies below."""
    table = Table(title=f"{summary['algorithm']} on {summary['dataset']} after {summary['rounds']} rounds")
    table.add_column("accuracy of")
    for column in ("mean", "by samples", "worst 10 %", "std", "best mean"):
        table.add_column(column, justify="right")
    for kind, figures in summary["accuracy"].items():
        best = summary["best-accuracy"][kind]
        cells = [f"{100 * figures[name]:.2f}" for name in ("mean", "weighted", "worst-10%", "std")]
        table.add_row(kind, *cells, f"{100 * best['mean']:.2f} @{best['after-round']}")
    for name, figures in summary.get("metrics", {}).items():
        if "recall/" not in name:
            table.add_row(name, *(f"{figures[part]:.3f}" for part in ("mean", "weighted", "worst-10%", "std")))
    trouble = (
        ", ".join(f"{number} {kind}" for kind, number in summary["trouble"].items() if number and kind != "late")
        or "none"
    )
    sizes = summary["bytes"]
    table.caption = (
        f"{human_bytes(sizes['up'])} up, {human_bytes(sizes['down'])} down · "
        f"{human_seconds(summary['seconds'])} · lost replies: {trouble}"
    )
    text = io.StringIO()
    Console(file=text, width=100).print(table)
    return text.getvalue().rstrip()


def _accuracy_texts(row: RoundRow) -> list[str]:
    texts = [f"{kind} {100 * figures['mean']:.1f}%" for kind, figures in row["accuracy"].items()]
    if texts:
        first = next(iter(row["accuracy"].values()))
        texts.append(f"worst {100 * first['worst-10%']:.1f}%")
    return texts
