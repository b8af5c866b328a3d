"""Lines and tables that a run shows while it goes on and when it ends."""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table

from protofl_common.basics.text import in_order
from protofl_common.config.sections import DataSettings
from protofl_common.runs.comparison import HEADS, Compared, note_on, table_rows
from protofl_common.runs.folder import KINDS, RoundRow, Sites, Summary
from protofl_common.runs.metrics import HIDDEN, cells, human_bytes, human_seconds
from protofl_common.wire.records import SiteCard

BARS = " ▁▂▃▄▅▆▇█"
MOST_LINES, MOST_CLASSES = 20, 60
"""Of clients and classes that are shown before the first round."""


def comparison_table(runs: Sequence[Compared]) -> str:
    """The run beside its baselines."""
    table = Table(title="side by side", caption=note_on(runs))
    for number, name in enumerate(HEADS):
        table.add_column(name, justify="right" if 0 < number < len(HEADS) - 1 else "left")
    for row in table_rows(runs):
        table.add_row(*row)
    return _rendered(table)


def class_strip(sites: Sites) -> str:
    """A line per client with a bar per class, its training samples; "" for many clients, or classes not known here."""
    known = {site: facts for site, facts in sites.get("sites", {}).items() if "train-classes" in facts}
    if not known or len(known) > MOST_LINES or len(sites["classes"]) > MOST_CLASSES:
        return ""
    most, wide = max(max(facts["train-classes"]) for facts in known.values()), max(map(len, known))
    lines = [
        f"  {site:<{wide}}  {_bars(known[site]['train-classes'], most)}  {known[site]['domain']}".rstrip()
        for site in in_order(known)
    ]
    return "\n".join([f"training samples of each class, █ = {most}", *lines])


def _bars(counts: list[int], most: int) -> str:
    return "".join(BARS[-(-count * (len(BARS) - 1) // max(1, most))] for count in counts)


def samples_line(cards: Collection[SiteCard], data: DataSettings) -> str:
    """Say where all samples went, and which settings left some out.

    Sites that divide one data set have found the same samples, all others samples of their own.
    """
    divided = [card.found for card in cards if card.num_partitions and data.partition != "own"]
    found = sum(card.found for card in cards) - sum(divided) + max(divided, default=0)
    train, test = sum(card.train_samples for card in cards), sum(card.test_samples for card in cards)
    validation = sum(card.validation_samples for card in cards)
    capped = f" (train-samples = {data.train_samples} a client)" if data.train_samples else ""
    between = f" · {validation:,} for validation" if validation else ""
    left = found - train - validation - test
    if left > 0:
        rest = f"{left:,} left out ({', '.join(_selecting(data)) or 'of clients that are not here'})"
    else:
        rest = "some of them used by several clients" if left else "none left out"
    return f"samples: {found:,} found · {train:,} for training{capped}{between} · {test:,} for testing · {rest}"


def least_line(cards: Collection[SiteCard], data: DataSettings) -> str:
    """How many clients have the fewest samples that a Dirichlet partition leaves any; "" for one, or other partitions.

    With a cap on their samples, or test samples in common, the cards do not tell.
    """
    sizes = [card.train_samples + card.test_samples for card in cards]
    if "dirichlet" not in data.partition or data.test_from != "split" or data.test_samples:
        return ""
    number, least = sizes.count(min(sizes)), min(sizes)
    why = f"filled up where Dir({data.alpha:g}) gave them less"
    return f"{number} clients have the fewest samples, {least}: {why}" if number > 1 else ""


def _selecting(data: DataSettings) -> list[str]:
    """``key = value`` of each setting that may leave samples out."""
    values: dict[str, str | int] = {"total-samples": data.total_samples, "test-samples": data.test_samples}
    if data.test_from != "split":  # else what train-samples leaves over is tested on
        values |= {"train-samples": data.train_samples, "test-from": data.test_from}
    if data.partition not in ("iid", "dirichlet", "balanced-dirichlet", "label-shift", "own"):
        values |= {"partition": data.partition, "clients-per-domain": data.clients_per_domain}
    return [f"{key} = {value}" for key, value in values.items() if value]


def round_line(row: RoundRow, rounds: int, seconds_left: float) -> str:
    """One round in one line, from its row in ``metrics.jsonl``."""
    parts = [f"round {row['round']:>{len(str(rounds))}}/{rounds}"]
    if "total" in row["losses"]:
        parts.append(f"loss {row['losses']['total']:.3f}")
    parts += _accuracy_texts(row)
    if "epsilon" in row:
        parts.append(f"ε ≤ {row['epsilon']:.2f}")
    parts.append(f"↑{human_bytes(row['bytes']['up'])} ↓{human_bytes(row['bytes']['down'])}")
    parts.append(f"{human_seconds(row['seconds']['total'])}, {human_seconds(seconds_left)} to go")
    return "  ".join(parts)


def final_table(summary: Summary) -> str:
    """The accuracies after the last round; below, how the best round was chosen, traffic, time and lost replies."""
    early = ", stopped early" if summary.get("stopped-early") else ""
    data = "the sites' own data" if summary["partition"] == "own" else summary["dataset"]
    table = Table(title=f"{summary['algorithm']} on {data} after {summary['rounds']} rounds{early}")
    table.add_column("accuracy of")
    for column in ("mean", "by samples", "worst 10 %", "std", "best mean"):
        table.add_column(column, justify="right")
    for kind, figures in summary["accuracy"].items():
        best = summary["best-accuracy"][kind]
        table.add_row(kind, *cells(figures), f"{100 * best['mean']:.2f} @{best['after-round']}")
    for kind, figures in summary.get("validation", {}).items():
        if kind in KINDS:
            table.add_row(f"{kind}, validation", *cells(figures))
    for name, figures in summary.get("metrics", {}).items():
        if "recall/" not in name:
            table.add_row(name, *cells(figures, factor=1, digits=3))
    trouble = (
        ", ".join(f"{number} {kind}" for kind, number in summary["trouble"].items() if number and kind != "late")
        or "none"
    )
    sizes, private = summary["bytes"], f"ε ≤ {summary['epsilon']:.2f} · " if "epsilon" in summary else ""
    chosen = " and ".join(sorted({best.get("chosen-on", "test") for best in summary["best-accuracy"].values()}))
    hidden = f"{HIDDEN}\n" if summary["settings"].get("secagg") else ""
    table.caption = (
        f"{hidden}best mean: test accuracy of the round chosen on {chosen} data\n"
        f"{private}{human_bytes(sizes['up'])} up, {human_bytes(sizes['down'])} down · "
        f"{human_seconds(summary['seconds'])} · lost replies: {trouble}"
    )
    return _rendered(table)


def _rendered(table: Table) -> str:
    text = io.StringIO()
    Console(file=text, width=100).print(table)
    return text.getvalue().rstrip()


def _accuracy_texts(row: RoundRow) -> list[str]:
    texts = [f"{kind} {100 * figures['mean']:.1f}%" for kind, figures in row["accuracy"].items()]
    validated = {kind: figures for kind, figures in row.get("validation", {}).items() if kind in KINDS}
    texts += [f"validation {kind} {100 * figures['mean']:.1f}%" for kind, figures in validated.items()]
    first = next(iter(row["accuracy"].values()), {})
    return [*texts, f"worst {100 * first['worst-10%']:.1f}%"] if "worst-10%" in first else texts
