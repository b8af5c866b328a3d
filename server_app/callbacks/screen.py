"""A run shows its clients, a line for each round and its tables, and draws the page at its end."""

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from protofl_common.basics.text import human_bytes, human_seconds, in_order
from protofl_common.config.options import SettingsError
from protofl_common.config.sections import protections
from protofl_common.data.store import data_if_cached
from protofl_common.experiment.settings import Settings, check_chosen, default_run_config, to_run_config
from protofl_common.maths.aggregation import FEWEST
from protofl_common.runs import figures
from protofl_common.runs.folder import DROPPED, KINDS, SITES, RoundRow, Summary, troubles
from protofl_common.runs.over_clients import doubts_of_data
from protofl_common.wire.records import SiteCard
from server_app.callbacks.base import ActiveRun, Callback
from server_app.log import say
from server_app.replies import RoundResult

MOST_NAMED = 20  # clients that are named in one line
RECENT = 3  # rounds whose mean duration tells how long the rest will take


class Screen(Callback):
    def __init__(self, run: ActiveRun) -> None:
        self.warned = {reason for row in run.rows for reason in row.get("bounded", [])}

    def on_start(self, run: ActiveRun) -> None:
        settings, federation, introduced = run.settings, run.federation, run.federation.cards
        cards = introduced.values()
        archs, devices = figures.counted(card.arch for card in cards), figures.counted(card.device for card in cards)
        if federation.baseline:
            say(f"baseline · models: {archs}")
            return
        domains = figures.counted(card.domain for card in cards if settings.data.partition.startswith("feature"))
        division = settings.data.partition + f" ({domains})" * bool(domains)
        say(f"{len(cards)} clients · {run.strategy.num_classes} classes · partition {division}")
        if not settings.privacy.sums_only:
            say(samples_line(cards, settings))
            for doubt in doubts_of_data(run.files.sites()):
                say(f"warning: {doubt}")
            without = [name for name, card in introduced.items() if not card.validation_samples]
            if without and (settings.data.validation_fraction or len(without) < len(cards)):
                why = "too small for validation samples, or without any marked, so that all stay for training"
                say(f"{why}: {_first(without)}")
        with suppress(ValueError, OSError):  # the data need not be here
            if (data := data_if_cached(settings.data)) and data.columns:
                say(f"inputs: the columns {_first(data.columns)} together")
        say(f"models: {archs} · devices: {devices}")
        if not settings.hides_samples:
            samples = {name: introduced[name].train_samples for name in in_order(introduced)}
            shares = [(name, 100 * samples[name] / max(1, sum(samples.values()))) for name in samples]
            texts = [f"{name} {share:.1f} %" for name, share in sorted(shares, key=lambda one: -one[1])]
            say(f"shares of the training samples: {_first(texts, ' with less')}")
        holders = Counter(label for card in cards for label in card.present)
        few, merging = sum(number < FEWEST for number in holders.values()), federation.bounds.prototypes[0]
        if few and merging != "mean":
            say(f"warning: fewer than {FEWEST} clients hold {few} classes, where merging = {merging!r} outvotes nobody")
        if federation.bounds.liars or not federation.simulated:
            say(f"{federation.bounds}")
        for line in protections(to_run_config(settings)):
            say(line)
        try:
            check_chosen(dict(sorted(settings.given.items() - default_run_config().items())), settings)
        except SettingsError as error:  # a recipe may have them for other runs
            say(str(error))
        say("accuracies of a round are those of what the clients received at its start, before its training")

    def on_round(self, run: ActiveRun, row: RoundRow, result: RoundResult) -> None:
        for kind, site, reason in troubles(row):
            why = f"no answer in {result.waited:.0f} s" if kind == "missing" else reason
            if why != DROPPED:  # the summary counts them
                say(f"  {kind}: {site}: {why}")
        for reason in in_order(result.bounded - self.warned):
            say(f"  warning: {reason}")
        self.warned |= result.bounded
        if result.not_merged:
            say(f"  void: {result.not_merged}; nothing was merged")
        if not result.final:
            rounds = run.settings.run.rounds
            recent = [past["seconds"]["total"] for past in run.rows[-RECENT:]]  # the clients' start-up is not in them
            rounds_left = rounds - result.number + run.runs_later * rounds
            title = f"{run.strategy.row.title}: " if run.settings.baselines or run.federation.baseline else ""
            say(title + round_line(row, rounds, sum(recent) / len(recent) * rounds_left))

    def on_end(self, run: ActiveRun, row: RoundRow, result: RoundResult) -> None:
        summary, baseline = run.files.finished_summary(), run.federation.baseline
        if not baseline:
            say(final_table(summary))
        for doubt in summary.get("warnings", []):
            say(f"warning: {f'{run.strategy.row.title}: ' if baseline else ''}{doubt}")


def _first(texts: Sequence[str], others: str = " others") -> str:
    """As many as are named in one line, and how many more there are."""
    return ", ".join(texts[:MOST_NAMED]) + (f", and {len(texts) - MOST_NAMED}{others}" if texts[MOST_NAMED:] else "")


def samples_line(cards: Collection[SiteCard], settings: Settings) -> str:
    """Say where all samples went; clients that share one data set have found the same ones, all others their own."""
    data = settings.data
    divided = [card.found for card in cards if card.num_partitions and not (card.real and data.partition == "own")]
    total = sum(card.found for card in cards) - sum(divided) + max(divided, default=0)
    train, test = sum(card.train_samples for card in cards), sum(card.test_samples for card in cards)
    validation = sum(card.validation_samples for card in cards)
    capped = f" (train-samples = {data.train_samples} a client)" if data.train_samples else ""
    between = f" · {validation:,} for validation" if validation else ""
    if (left := total - train - validation - test) > 0:
        rest = f"{left:,} left out ({', '.join(_selecting(settings)) or 'of clients that are not here'})"
    else:
        rest = "some of them used by several clients" if left else "none left out"
    return f"samples: {total:,} found · {train:,} for training{capped}{between} · {test:,} for testing · {rest}"


def _selecting(settings: Settings) -> list[str]:
    """``key = value`` of each setting that may leave samples out."""
    data, least = settings.data, settings.privacy.min_class_samples
    values: dict[str, str | int] = {"total-samples": data.total_samples, "test-samples": data.test_samples}
    values |= {"min-class-samples": least * (least > 1)}
    if data.test_from != "split":  # else what train-samples leaves over is tested on
        values |= {"train-samples": data.train_samples, "test-from": data.test_from}
    if data.partition not in ("iid", "dirichlet", "balanced-dirichlet", "label-shift", "own"):
        values |= {"partition": data.partition, "clients-per-domain": data.clients_per_domain}
    return [f"{key} = {value}" for key, value in values.items() if value]


def round_line(row: RoundRow, rounds: int, seconds_left: float) -> str:
    parts = [f"round {row['round']:>{len(str(rounds))}}/{rounds}"]
    if "total" in row["losses"]:
        parts.append(f"loss {row['losses']['total']:.3f}")
    for kind, values in row["accuracy"].items():
        worst = f" (worst {100 * values['worst-10%']:.1f}%)" if "worst-10%" in values else ""
        parts.append(f"{kind} {100 * values['mean']:.1f}%{worst}")
    validated = {kind: values for kind, values in row.get("validation", {}).items() if kind in KINDS}
    parts += [f"validation {kind} {100 * values['mean']:.1f}%" for kind, values in validated.items()]
    if "epsilon" in row:
        parts.append(f"ε ≤ {row['epsilon']:.2f}")
    parts.append(f"↑{human_bytes(row['bytes']['up'])} ↓{human_bytes(row['bytes']['down'])}")
    parts.append(f"{human_seconds(row['seconds']['total'])}, {human_seconds(seconds_left)} to go")
    return "  ".join(parts)


def final_table(summary: Summary) -> str:
    """The accuracies after the last round; below, how the best round was chosen, traffic, time and lost replies."""
    early = ", stopped early" if summary.get("stopped-early") else ""
    data = "the sites' own data" if summary["partition"] == "own" else summary["dataset"]
    best, sizes = summary["best-accuracy"], summary["bytes"]
    rows = figures.accuracy_rows(summary["accuracy"], best, summary.get("validation", {}))
    private = f"ε ≤ {summary['epsilon']:.2f} · " if "epsilon" in summary else ""
    hidden = any("std" not in values for values in summary["accuracy"].values())
    lost = ", ".join(f"{number} {kind}" for kind, number in summary["trouble"].items() if number and kind != "late")
    note = (
        f"{figures.HIDDEN + chr(10) if hidden else ''}best mean: test accuracy of the round "
        f"{figures.chosen(best.values())}\n{private}{human_bytes(sizes['up'])} up, {human_bytes(sizes['down'])} down · "
        f"{human_seconds(summary['seconds'])} · lost replies: {lost or 'none'}"
    )
    title = f"{summary['algorithm']} on {data} after {summary['rounds']} round{'s' * (summary['rounds'] > 1)}{early}"
    heads = ("accuracy of", *figures.MEASURES.values(), "best mean")
    return figures.Table(heads, [*rows, *figures.metric_rows(summary.get("metrics", {}), 3)], note, title).as_text()


def conclude(settings: Settings, folder: Path) -> None:
    """After the run and its baselines: how they compare, where the results are, and the page."""
    if len(runs := figures.compared(folder, settings.baselines)) > 1:
        say(figures.side_by_side(runs).as_text())
    if runs:
        say(f"result: {figures.sentence(runs)}")
    say(f"results: {folder}")
    draw(settings, folder)


def draw(settings: Settings, folder: Path) -> None:
    if not settings.run.report or not (folder / SITES).exists():
        return
    from protofl_common.report.page import write_report  # takes seconds: when all else is done

    try:
        say(f"report: {write_report(folder)}")
    except Exception as error:  # a page that cannot be drawn fails nothing
        say(f"report: not drawn, {type(error).__name__}: {error}")
