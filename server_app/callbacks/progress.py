"""A run tells of its clients, its rounds and its result, and draws the page at its end."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from protofl_common.basics.text import in_order
from protofl_common.config.datasets import PARTITIONS, is_own
from protofl_common.config.options import SettingsError
from protofl_common.config.sections import protections
from protofl_common.data.store import data_if_cached
from protofl_common.experiment.settings import (
    Settings,
    check_settings_act,
    default_run_config,
    to_run_config,
)
from protofl_common.maths.aggregation import MIN_CLIENTS_FOR_MEDIAN
from protofl_common.runs import figures
from protofl_common.runs.events import (
    Finished,
    RoundDone,
    RoundTrouble,
    Warned,
)
from protofl_common.runs.folder import DROPPED, SITES, RoundRow, RunFolder, unused_replies
from protofl_common.runs.over_clients import data_warnings
from protofl_common.wire.records import SiteCard
from server_app.callbacks.base import ActiveRun, Callback
from server_app.network.membership import Federation
from server_app.run.log import emit, say
from server_app.run.replies import RoundResult

MOST_NAMED = 20  # Clients that are named in one line
RECENT = 3  # Rounds whose mean duration tells how long the rest will take


class Progress(Callback):
    """Emits the events of a run: who takes part, each round, and how it ended."""

    def __init__(self, run: ActiveRun) -> None:
        self.warned: set[str] = set()  # warnings that are not repeated, in a resumed run either
        for row in run.rows:
            self.warned.update(row.get("bounded", []))

    def on_start(self, run: ActiveRun) -> None:
        """Say who takes part, with which data, bounds and protections.

        A baseline has one line, as its run has said the rest.
        """
        federation = run.federation
        settings = run.settings
        cards = federation.cards.values()
        archs = figures.counted(card.arch for card in cards)
        if run.job.baseline:
            say(f"baseline · models: {archs}")
            return

        partition = settings.data.partition
        if PARTITIONS[partition].shares_domains:
            partition += f" ({figures.counted(card.domain for card in cards)})"
        say(f"{len(cards)} clients · {run.strategy.task.describe()} · partition {partition}")
        if is_own(settings.data.dataset):
            say(f"classes: {_first(next(iter(cards)).classes)}")  # all sites have the same
        if not settings.privacy.sums_only:
            _say_samples(run)
        with suppress(ValueError, OSError):  # the data need not be on the server
            data = data_if_cached(settings.data)
            if data and data.columns:
                say(f"inputs: the columns {_first(data.columns)} together")
        say(f"models: {archs} · devices: {figures.counted(card.device for card in cards)}")
        if not settings.hides_sample_counts:
            _say_shares(federation.cards)

        _say_bounds(federation)
        for line in protections(to_run_config(settings)):
            say(line)
        chosen = dict(sorted(settings.given.items() - default_run_config().items()))
        try:
            check_settings_act(chosen, settings)
        except SettingsError as error:  # a recipe may have settings that act in other runs only
            say(str(error))
        say(
            "accuracies of a round are those of what the clients received at its start, "
            "before its training"
        )

    def on_round(self, run: ActiveRun, row: RoundRow, result: RoundResult) -> None:
        """Tell of replies that were lost, late or reduced, and then of the round itself."""
        for kind, site, reason in unused_replies(row):
            if kind == "missing":
                reason = f"no answer in {result.exchanged.waited_seconds:.0f} s"
            if reason != DROPPED:  # wanted by `drop-rate`; the summary counts them
                emit(RoundTrouble(kind, f"{site}: {reason}"))
        for site, answered in result.counted_late.items():
            say(f"  late: {site}: its reply to round {answered} counts in this one")
        for reason in in_order(result.reduced - self.warned):
            emit(RoundTrouble("warning", reason))
        self.warned |= result.reduced
        if result.not_merged:
            unused = f"; heard, not used: {', '.join(result.unused)}" if result.unused else ""
            emit(RoundTrouble("void", f"{result.not_merged}; nothing was merged{unused}"))
        if result.final:
            return

        settings = run.settings
        rounds = settings.run.rounds
        rounds_left = rounds - result.number + run.job.runs_later * rounds  # with baselines
        recent = [past["seconds"]["total"] for past in run.rows[-RECENT:]]
        seconds_left = sum(recent) / len(recent) * rounds_left
        is_one_of_several = settings.baselines or run.job.baseline
        algorithm = run.strategy.row.title if is_one_of_several else ""
        emit(RoundDone(row, rounds, seconds_left, algorithm, settings.data.task))

    def on_end(self, run: ActiveRun, row: RoundRow, result: RoundResult) -> None:
        """Show the run's final figures, and warn of what makes them doubtful.

        Those of a baseline stand beside the run's later (`conclude`).
        """
        summary = run.files.finished_summary()
        prefix = f"{run.strategy.row.title}: " if run.job.baseline else ""
        if not run.job.baseline:
            classes = run.files.sites().get("classes", [])
            say(figures.final_table(summary, classes).as_text())
        for doubt in summary.get("warnings", []):
            emit(Warned(f"{prefix}{doubt}"))


def _say_samples(run: ActiveRun) -> None:
    """Say how many samples are used for what, and warn of doubtful data.

    Sites without validation samples are named where others have some or the settings ask for them.
    """
    cards = run.federation.cards
    say(samples_line(cards.values(), run.settings))
    for doubt in data_warnings(run.files.sites()):
        emit(Warned(doubt))

    sites_without = [site for site, card in cards.items() if not card.validation_samples]
    others_have_some = len(sites_without) < len(cards)
    wants_validation = run.settings.data.validation_fraction or others_have_some
    if sites_without and wants_validation:
        say(
            "too small for validation samples, or without any marked, "
            f"so that all stay for training: {_first(sites_without)}"
        )


def _say_shares(cards: Mapping[str, SiteCard]) -> None:
    """Say which percentage of all training samples each client has, the largest first."""
    total = sum(card.train_samples for card in cards.values())
    by_size = sorted(in_order(cards), key=lambda site: -cards[site].train_samples)
    shares = []
    for site in by_size:
        percent = 100 * cards[site].train_samples / max(1, total)
        shares.append(f"{site} {percent:.1f} %")
    say(f"shares of the training samples: {_first(shares, ' with less')}")


def _say_bounds(federation: Federation) -> None:
    """Say how far lying sites are bounded, and warn of classes that too few clients have.

    In such classes a trimmed mean or median of prototypes cannot outvote a liar. A simulation
    without ``liars`` has no line on bounds.
    """
    bounds = federation.bounds
    merging = bounds.prototype_aggregator.merging
    clients_with: Counter[int] = Counter()  # label -> number of clients
    for card in federation.cards.values():
        clients_with.update(card.present)
    rare_classes = sum(number < MIN_CLIENTS_FOR_MEDIAN for number in clients_with.values())
    if rare_classes and merging != "mean":
        text = f"fewer than {MIN_CLIENTS_FOR_MEDIAN} clients hold {rare_classes} classes"
        emit(Warned(f"{text}, where merging = {merging!r} outvotes nobody"))
    if bounds.liars or not federation.simulated:
        say(str(bounds))


def _first(texts: Sequence[str], others: str = " others") -> str:
    """Join the first `MOST_NAMED` texts by commas, and add how many ``others`` there are."""
    line = ", ".join(texts[:MOST_NAMED])
    if len(texts) > MOST_NAMED:
        line += f", and {len(texts) - MOST_NAMED}{others}"
    return line


def samples_line(cards: Collection[SiteCard], settings: Settings) -> str:
    """Return a line on how many samples there are, what they are used for, and what is left out.

    Clients that divide one data set have all found the same samples, which count once. Samples of
    sites with data of their own add up.
    """
    data = settings.data
    in_common = 0
    in_own_data = 0
    for card in cards:
        has_own_data = card.real and data.partition == "own"
        if card.num_partitions and not has_own_data:
            in_common = max(in_common, card.found)
        else:
            in_own_data += card.found
    found = in_own_data + in_common

    train = sum(card.train_samples for card in cards)
    validation = sum(card.validation_samples for card in cards)
    test = sum(card.test_samples for card in cards)
    left_out = found - train - validation - test
    if left_out > 0:
        causes = ", ".join(_selecting(settings)) or "of clients that are not here"
        rest = f"{left_out:,} left out ({causes})"
    elif left_out < 0:
        rest = "some of them used by several clients"
    else:
        rest = "none left out"

    training = f"{train:,} for training"
    if data.train_samples:
        training += f" (train-samples = {data.train_samples} a client)"
    parts = [f"samples: {found:,} found", training]
    if validation:
        parts.append(f"{validation:,} for validation")
    return " · ".join([*parts, f"{test:,} for testing", rest])


def _selecting(settings: Settings) -> list[str]:
    """Return ``key = value`` of each setting that is set and may leave samples out."""
    data = settings.data
    values: dict[str, str | int] = {
        "total-samples": data.total_samples,
        "test-samples": data.test_samples,
    }
    if settings.privacy.min_class_samples > 1:
        values["min-class-samples"] = settings.privacy.min_class_samples
    if data.test_from != "split":  # with "split", samples beyond train-samples are tested on
        values["train-samples"] = data.train_samples
        values["test-from"] = data.test_from
    if PARTITIONS[data.partition].leaves_out:
        values["partition"] = data.partition
        values["clients-per-domain"] = data.clients_per_domain
    return [f"{key} = {value}" for key, value in values.items() if value]


def conclude(settings: Settings, folder: Path) -> None:
    """After a run and its baselines, say how they compare, draw the page, and emit `Finished`."""
    runs = figures.compared(folder, settings.baselines)
    if len(runs) > 1:
        say(figures.side_by_side(runs).as_text())
    result = figures.sentence(runs) if runs else ""
    summary = RunFolder(folder).finished_summary()
    emit(Finished(folder, summary, result, draw_page(settings, folder)))


def draw_page(settings: Settings, folder: Path) -> str:
    """Draw the run's page, and return a line that says where it is, or why it could not be drawn.

    "" where the settings want no page, or the run ended before there was anything to show.
    """
    if not settings.run.report or not (folder / SITES).exists():
        return ""
    from protofl_common.report.page import write_report  # here, as this import takes seconds

    try:
        return f"report: {write_report(folder)}"
    except Exception as error:  # A page that cannot be drawn fails nothing
        return f"report: not drawn, {type(error).__name__}: {error}"
