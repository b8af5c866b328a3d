"""Figures over clients, and what looks odd in them."""

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from protofl_common.basics.text import names_in
from protofl_common.runs.folder import DROPPED, FEW_TESTED, KINDS, NEW, Best, ClientRow, RoundRow, Sites

COLLAPSE = 0.15  # an accuracy's fall from its best round to the end that is beyond the noise of some 150 test samples


def over_clients(accuracies: Sequence[float], test_samples: Sequence[int], liars: int = 0) -> dict[str, float]:
    """Return what the papers report of per-client accuracies in [0, 1], clients in any order.

    ``mean`` (as the papers average), ``weighted`` (by test samples), ``worst-10%`` (mean of the worst tenth of the
    clients, at least one), ``std`` (population). Where they outvote ``liars`` also ``trimmed``: the mean without as
    many of the largest and of the smallest, by which the best round is chosen. Empty input gives an empty dict.
    """
    if not accuracies:
        return {}
    mean, total = statistics.fmean(accuracies), sum(test_samples)
    weighted = math.fsum(a * n for a, n in zip(accuracies, test_samples, strict=True)) / total if total else mean
    spread = fairness(accuracies)
    figures = {"mean": mean, "weighted": weighted, "worst-10%": spread["worst-10%"], "std": spread["std"]}
    middle = sorted(accuracies)[liars : len(accuracies) - liars]
    return figures | {"trimmed": statistics.fmean(middle)} if liars and middle else figures


def fairness(accuracies: Sequence[float]) -> dict[str, float]:
    """How accuracies in [0, 1] spread over the clients (FedPCL, Tables 12 and 13), as a population; {} of none."""
    if not accuracies:
        return {}
    parts = {part: mean_of_part(accuracies, part) for part in ("worst-10%", "worst-20%", "worst-40%", "best-10%")}
    mean = statistics.fmean(accuracies)
    variance = statistics.fmean((a - mean) ** 2 for a in accuracies)
    return parts | {"std": math.sqrt(variance), "variance": variance}


def mean_of_part(accuracies: Sequence[float], part: str) -> float:
    """The mean over the ``worst-N%`` or ``best-N%`` of the clients, at least one."""
    end, _, percent = part.rstrip("%").partition("-")
    return statistics.fmean(sorted(accuracies, reverse=end == "best")[: max(1, len(accuracies) * int(percent) // 100)])


def of_all_sites(rows: Sequence[RoundRow]) -> list[RoundRow]:
    """The rows with as many sites asked, and as many answers, as in the last: others would tell of lucky draws.

    As many may be more or fewer as sites may lie: by silence, rest or a late arrival none of them takes a round out.
    """
    asked, least = (rows[-1]["asked"], rows[-1]["valid"]) if rows else (0, 0)
    liars = rows[-1].get("liars", 0) if rows else 0
    return [row for row in rows if abs(row["asked"] - asked) <= liars and row["valid"] >= least - liars]


def best_evaluation(rows: Sequence[RoundRow], kind: str) -> tuple[RoundRow | None, Literal["validation", "test"]]:
    """The row of the highest mean of this accuracy or metric, the first of several, among those `of_all_sites`.

    Where sites may lie, that of the highest trimmed mean: no site alone chooses the round. The mean on validation data,
    where the run has any, else on test data: which of these, too. None where there is none.
    """
    outvoting = [  # where sites may lie, the figures of enough sites to outvote them
        (name, figure.get("trimmed", figure["mean"]), row)
        for row in of_all_sites(rows)
        for name, figure in figures_of(row).items()
        if figure and ("trimmed" in figure or not row.get("liars"))
    ]
    validated = [entry for entry in outvoting if entry[0] == f"validation/{kind}"]
    candidates = validated or [entry for entry in outvoting if entry[0] == kind]
    return max(candidates, key=lambda entry: entry[1], default=("", 0, None))[2], "validation" if validated else "test"


def best_of(rows: Sequence[RoundRow], kind: str) -> Best | None:
    """The mean accuracy on test data at the best round."""
    best, on = best_evaluation(rows, kind)
    if best is None:
        return None
    return {"mean": figures_of(best)[kind]["mean"], "after-round": best["evaluated-after-round"], "chosen-on": on}


def measured(rows: Sequence[RoundRow]) -> set[str]:
    """Names of the accuracies and metrics on test data."""
    return {name for row in rows for name in (*row["accuracy"], *row.get("metrics", {}))}


def figures_of(row: RoundRow | ClientRow) -> dict[str, Any]:
    """By the names that a table gives them: ``head``, ``head/auc``, ``validation/head``."""
    validation = {f"validation/{name}": figure for name, figure in row.get("validation", {}).items()}
    return {**row["accuracy"], **row.get("metrics", {}), **validation}


def doubts_of_data(sites: Sites) -> Iterator[str]:
    """Yield a line for classes that are trained on, but tested nowhere, as far as the server can count samples."""
    counted = [counts for counts in sites.get("sites", {}).values() if "test-classes" in counts]
    columns = (zip(*(counts[part] for counts in counted), strict=True) for part in ("train-classes", "test-classes"))
    trained, tested = ([sum(column) for column in part] for part in columns)
    names = zip(sites.get("classes", []), trained, tested, strict=False)
    if nowhere := [name for name, train, test in names if train and not test]:
        yield f"trained on, but tested nowhere: {', '.join(nowhere)}"


def doubts_of_outcome(rows: Sequence[RoundRow], final: RoundRow, sites: Sites, metrics: str = "") -> Iterator[str]:
    """Yield a line for idle rounds, failed replies, missing figures, and accuracies that fell or need no model."""
    rounds = [row for row in rows if row["kind"] == "round"]
    if idle := [row for row in rounds if row["void"]]:
        last = ", the last one among them" if rounds[-1] is idle[-1] else ""
        yield f"{len(idle)} of {len(rounds)} rounds changed nothing{last}: {idle[-1].get('void-because', '')}"
    if lost := [reason for row in rows for reason in (row["failed"] | row["refused"]).values() if reason != DROPPED]:
        yield f"{len(lost)} of {sum(row['asked'] for row in rows)} replies failed or were refused, the last: {lost[-1]}"
    tested = [site for site, client in final["clients"].items() if client["accuracy"]]
    silent = [site for site, client in final["clients"].items() if not (client["accuracy"] or client.get("metrics"))]
    if silent and not final["accuracy"]:
        yield "no accuracy of any client (too few test samples)"
    elif tested and silent:
        yield f"no accuracy of {', '.join(silent)} (too few test samples): the others' alone are in the means"
    for name in names_in(metrics):
        having = {site for site in tested if any(f"/{name}" in of for of in final["clients"][site].get("metrics", {}))}
        if bare := [site for site in tested if site not in having]:
            yield f"no {name} of {', '.join(bare)} ({FEW_TESTED})"
    for kind, figures in final["accuracy"].items():
        best, at_end = best_of(rows, kind), figures["mean"]
        if best and best["mean"] - at_end >= COLLAPSE:
            fall = f"fell from {100 * best['mean']:.1f} % after round {best['after-round']} to {100 * at_end:.1f} %"
            yield f"accuracy by {kind} {fall}: try a smaller lr, fewer rounds or early-stopping"
    counts = [sites.get("sites", {}).get(site, {}).get("test-classes", []) for site in tested]
    shares = [max(of_site) / sum(of_site) for of_site in counts if any(of_site)]
    for kind, figures in final["accuracy"].items() if shares else ():
        if figures["mean"] <= (share := statistics.fmean(shares)) + 1e-9:
            naming = f"always naming each client's most frequent class is right for {100 * share:.1f} %"
            yield f"accuracy by {kind} is {100 * figures['mean']:.1f} %, no better than a guess: {naming}"


def in_percent(name: str) -> bool:
    """Return whether a figure is an accuracy, of all clients or new ones, on test or validation data."""
    return name.removeprefix("validation/").removesuffix(NEW) in KINDS
