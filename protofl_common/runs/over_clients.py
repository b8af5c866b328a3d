"""Figures over clients, and what looks odd in them."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from protofl_common.basics.text import first_of
from protofl_common.config.lists import names_in
from protofl_common.runs.folder import (
    DROPPED,
    FEW_TESTED,
    NEW,
    Best,
    ClientRow,
    RoundRow,
    Rows,
    Sites,
    Summary,
)
from protofl_common.tasks.metrics import KINDS

COLLAPSE = 0.15
"""A fall of accuracy, from the best round to the end, beyond the noise of 150 test samples."""


def over_clients(
    accuracies: Sequence[float], test_samples: Sequence[int], liars: int = 0
) -> dict[str, float]:
    """Return what the papers report of per-client accuracies in [0, 1], clients in any order.

    ``mean`` (as the papers average), ``weighted`` (by test samples), ``worst-10%`` (mean of the
    worst tenth of the clients, at least one), ``std`` (population). {} without any accuracy.

    If so many clients may be ``liars``, and there are more than twice as many clients, then also
    ``trimmed``: the mean without that many of the largest and of the smallest accuracies, by which
    the best round is chosen.
    """
    if not accuracies:
        return {}

    mean = statistics.fmean(accuracies)
    weighted = mean
    total_samples = sum(test_samples)
    if total_samples:
        correct = math.fsum(a * n for a, n in zip(accuracies, test_samples, strict=True))
        weighted = correct / total_samples

    figures = {
        "mean": mean,
        "weighted": weighted,
        "worst-10%": mean_of_part(accuracies, "worst-10%"),
        "std": math.sqrt(statistics.fmean((a - mean) ** 2 for a in accuracies)),
    }
    without_extremes = sorted(accuracies)[liars : len(accuracies) - liars]
    if liars and without_extremes:
        figures["trimmed"] = statistics.fmean(without_extremes)
    return figures


def mean_of_part(accuracies: Sequence[float], part: str) -> float:
    """Return the mean over a part of the clients, ``worst-N%`` or ``best-N%``, at least one."""
    end, _, percent = part.rstrip("%").partition("-")  # "worst" or "best", and N
    ordered = sorted(accuracies, reverse=end == "best")
    clients = max(1, len(accuracies) * int(percent) // 100)
    return statistics.fmean(ordered[:clients])


def comparable_rounds(rows: Rows) -> list[RoundRow]:
    """Return the rounds in which as many clients were asked as in the last one, and answered.

    Means over fewer clients are not comparable: a lucky draw of them would look like progress.
    Where ``liars`` are expected, so many sites fewer may have answered, and so many more or fewer
    may have been asked: else a liar could take rounds out by its silence or a late arrival.
    """
    if not rows:
        return []
    last = rows[-1]
    liars = last.get("liars", 0)
    comparable = []
    for row in rows:
        as_many_asked = abs(row["asked"] - last["asked"]) <= liars
        # no upper bound: a mean over more clients is no lucky draw of a few
        enough_answered = row["valid"] >= last["valid"] - liars
        if as_many_asked and enough_answered:
            comparable.append(row)
    return comparable


def best_evaluation(rows: Rows, kind: str) -> tuple[RoundRow | None, Literal["validation", "test"]]:
    """Return the row with the highest mean of an accuracy or metric, and on which data that is.

    ``kind`` names the accuracy or metric, such as ``head``. Only the `comparable_rounds` are looked
    at, and of equally good ones the first is returned. The mean on validation data decides if the
    run has any, otherwise the mean on test data. Where sites may lie, the trimmed mean is taken, so
    that no single site can choose the round. The row is None if no row has such a figure.
    """
    comparable = comparable_rounds(rows)
    validated = _rankable(comparable, f"validation/{kind}")
    candidates = validated or _rankable(comparable, kind)
    if not candidates:
        return None, "test"
    _, best = max(candidates, key=lambda candidate: candidate[0])
    return best, "validation" if validated else "test"


def _rankable(rows: Iterable[RoundRow], name: str) -> list[tuple[float, RoundRow]]:
    """List the rows that may be the best by this figure, each with the mean that it is ranked by.

    Rows without the figure are left out. Where sites may lie, so are rows whose figures come from
    too few sites to outvote the liars: these have no trimmed mean (`over_clients`).
    """
    rankable = []
    for row in rows:
        figure = figures_of(row).get(name)
        if figure and ("trimmed" in figure or not row.get("liars")):
            mean = figure.get("trimmed", figure["mean"])
            rankable.append((mean, row))
    return rankable


def best_of(rows: Rows, kind: str) -> Best | None:
    """Return the mean on test data at the best round, with the round and the data that chose it.

    ``kind`` names the accuracy or metric, as for `best_evaluation`. None if no row can be the best.
    """
    best, chosen_on = best_evaluation(rows, kind)
    if best is None:
        return None
    mean = figures_of(best)[kind]["mean"]
    return {"mean": mean, "after-round": best["evaluated-after-round"], "chosen-on": chosen_on}


def measured(rows: Rows) -> set[str]:
    """Return the names of the accuracies and metrics on test data that any of the rows has."""
    names: set[str] = set()
    for row in rows:
        names.update(row["accuracy"], row.get("metrics", {}))
    return names


def figures_of(row: RoundRow | ClientRow | Summary) -> dict[str, Any]:
    """Return all accuracies and metrics of a row, or of a run, in one dictionary.

    Its keys are such as ``head``, ``head/auc`` and ``validation/head``.
    """
    figures: dict[str, Any] = {**row["accuracy"], **row.get("metrics", {})}
    for name, figure in row.get("validation", {}).items():
        figures[f"validation/{name}"] = figure
    return figures


def evaluations(rows: Iterable[RoundRow]) -> Iterator[RoundRow]:
    """Yield the rows in which clients were evaluated.

    The final evaluation is one also if no client has answered it: no earlier one stands for it.
    """
    for row in rows:
        if figures_of(row) or row["kind"] == "final":
            yield row


def in_percent(name: str) -> bool:
    """Return whether the figure ``name`` is an accuracy, which people read in percent.

    It may be on test or validation data, and of all clients or of those that never trained.
    """
    return name.removeprefix("validation/").removesuffix(NEW) in KINDS


def factor(name: str) -> int:
    """Return by what the figure ``name`` is multiplied for people."""
    return 100 if in_percent(name) else 1


def hides_clients(row: RoundRow | Summary) -> bool:
    """Return whether secure aggregation hides single clients, whose deviation is not known then."""
    return any("std" not in figures for figures in figures_of(row).values())


def data_warnings(sites: Sites) -> Iterator[str]:
    """Yield a warning of classes that are trained on, but tested nowhere, and of untrained ones.

    Only sites that tell how many samples of each class they have are looked at. That nobody trains
    on a class is said only if all sites tell.
    """
    counted = [facts for facts in sites.get("sites", {}).values() if "test-classes" in facts]
    trained = _sums(facts["train-classes"] for facts in counted)
    tested = _sums(facts["test-classes"] for facts in counted)
    # if no site tells its numbers, ``trained`` and ``tested`` are empty, and ``classes`` is not
    classes = list(zip(sites.get("classes", []), trained, tested, strict=False))
    untested = [name for name, train, test in classes if train and not test]
    untrained = [name for name, train, _ in classes if not train]
    if untested:
        yield f"trained on, but tested nowhere: {first_of(untested)}"
    if untrained and len(counted) == len(sites["sites"]):
        yield f"no client has training samples of: {first_of(untrained)}"


def _sums(counts: Iterable[Sequence[int]]) -> list[int]:
    """Return the number of samples of each class over all sites; ``counts`` has a list per site."""
    return [sum(of_class) for of_class in zip(*counts, strict=True)]


def outcome_warnings(
    rows: Rows, final: RoundRow, sites: Sites, metrics: str = "", least: int = 1
) -> Iterator[str]:
    """Yield warnings of what makes a finished run's figures doubtful.

    ``final`` is the row of the final evaluation, ``metrics`` the run's setting, and ``least`` its
    setting ``min-class-samples``.
    """
    tested = [site for site, client in final["clients"].items() if client["accuracy"]]
    yield from _idle_rounds(rows)
    yield from _lost_replies(rows)
    yield from _missing_accuracies(final, tested)
    yield from _missing_metrics(final, tested, metrics)
    yield from _untested_labels(final, sites, metrics, least)
    yield from _collapses(rows, final)
    yield from _guesses(final, tested, sites)


def _idle_rounds(rows: Rows) -> Iterator[str]:
    """Warn of void rounds, whose replies were not merged."""
    rounds = [row for row in rows if row["kind"] == "round"]
    idle = [row for row in rounds if row["void"]]
    if idle:
        last = ", the last one among them" if rounds[-1] is idle[-1] else ""
        reason = idle[-1].get("void-because", "")
        yield f"{len(idle)} of {len(rounds)} rounds changed nothing{last}: {reason}"


def _lost_replies(rows: Rows) -> Iterator[str]:
    """Warn of replies that failed or were refused, except those that ``drop-rate`` made fail."""
    lost = []
    for row in rows:
        reasons = row["failed"] | row["refused"]
        lost += [reason for reason in reasons.values() if reason != DROPPED]
    if lost:
        asked = sum(row["asked"] for row in rows)
        yield f"{len(lost)} of {asked} replies failed or were refused, the last: {lost[-1]}"


def _missing_accuracies(final: RoundRow, tested: Sequence[str]) -> Iterator[str]:
    """Warn of clients without any figure in the final evaluation; ``tested`` have an accuracy."""
    silent = []
    for site, client in final["clients"].items():
        if not client["accuracy"] and not client.get("metrics"):
            silent.append(site)
    if not silent:
        return
    if not final["accuracy"]:
        yield "no accuracy of any client (too few test samples)"
    elif tested:
        names = ", ".join(silent)
        yield f"no accuracy of {names} (too few test samples): the others' alone are in the means"


def _missing_metrics(final: RoundRow, tested: Sequence[str], wanted: str) -> Iterator[str]:
    """Warn of clients that have an accuracy (``tested``), but lack a metric that is ``wanted``."""
    for metric in names_in(wanted):
        without = []
        for site in tested:
            metrics = final["clients"][site].get("metrics", {})
            # their names are "head/auc", or "head/label-auc/7" where each class has a figure
            if not any(f"/{metric}" in name for name in metrics):
                without.append(site)
        if without:
            yield f"no {metric} of {', '.join(without)} ({FEW_TESTED})"


def _untested_labels(final: RoundRow, sites: Sites, wanted: str, least: int) -> Iterator[str]:
    """Warn of labels without an AUC, where ``wanted`` asks for the AUC of each label.

    A label is two classes: 2 l of the samples without it and 2 l + 1 of those with it. Its AUC has
    the name of the latter, such as ``head/label-auc/7``.
    """
    if "label-auc" not in names_in(wanted):
        return
    tested = {name.rpartition("/")[2] for name in final.get("metrics", {})}
    with_label = list(enumerate(sites.get("classes", [])))[1::2]
    untested = [name for number, name in with_label if str(number) not in tested]
    if untested:
        why = "its test samples all have it, or all lack it"
        if least > 1:
            why += f", or too few of them do (min-class-samples = {least})"
        yield f"no client can test the labels {', '.join(untested)}: {why}"


def _collapses(rows: Rows, final: RoundRow) -> Iterator[str]:
    """Warn if the accuracy at the end is `COLLAPSE` or more below that of the best round."""
    for kind, figures in final["accuracy"].items():
        best = best_of(rows, kind)
        at_end = figures["mean"]
        if best and best["mean"] - at_end >= COLLAPSE:
            peak = f"{100 * best['mean']:.1f} % after round {best['after-round']}"
            yield (
                f"accuracy by {kind} fell from {peak} to {100 * at_end:.1f} %: "
                "try a smaller lr, fewer rounds or early-stopping"
            )


def _guesses(final: RoundRow, tested: Sequence[str], sites: Sites) -> Iterator[str]:
    """Warn of accuracies that one also gets by always naming each client's most frequent class.

    Tasks of several labels a sample are left out: what a guess gets there does not follow from the
    numbers of samples.
    """
    accuracies_of_guessing = []
    for site in tested:
        facts = sites.get("sites", {}).get(site, {})
        counts = facts.get("test-classes", [])
        # a sample of several labels is counted in several classes
        has_several_labels = sum(counts) > facts.get("test-samples", sum(counts))
        if any(counts) and not has_several_labels:
            accuracies_of_guessing.append(max(counts) / sum(counts))
    if not accuracies_of_guessing:
        return
    guess = statistics.fmean(accuracies_of_guessing)
    for kind, figures in final["accuracy"].items():
        if figures["mean"] <= guess + 1e-9:  # as good as a guess, up to rounding
            yield (
                f"accuracy by {kind} is {100 * figures['mean']:.1f} %, no better than a guess: "
                f"always naming each client's most frequent class is right for {100 * guess:.1f} %"
            )
