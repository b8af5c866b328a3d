"""The pictures of the page: each function takes the run and yields its drawings.

The captions say what each shows. A t-SNE (van der Maaten and Hinton, 2008) has few enough points,
at random, that the page is drawn in seconds; all is seeded. So few points as a t-SNE says nothing
of lie by their principal components.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

import numpy as np

from protofl_common.report import drawing as plot
from protofl_common.report.reading import Floats, Ints, RecordedRun
from protofl_common.runs.figures import axis
from protofl_common.runs.folder import RoundRow
from protofl_common.runs.over_clients import factor, figures_of
from protofl_common.tasks.metrics import BY_CLASS, RECALL

Drawings = Iterator[plot.Drawing]
MEANING = {"head": "each model's classifier", "prototype": "the nearest prototype"}
CLASS_COLOURS = np.array([*plot.COLOURS[:6], "#C9B400", "#7F7F7F", "#8C510A", "#7E5BBF"])
MOST_CLIENTS = 100  # of a heat map; with more the first ones
FEW_POINTS = 50  # fewer are not worth a t-SNE, which takes a second, and two to import
MOST_POINTS = 300  # of a t-SNE, of the clients and of the server
SEED = 0


def means(run: RecordedRun) -> Drawings:
    """Draw the result over the rounds: the mean, the worst tenth, and on validation data."""
    rows = [row for row in run.rows if row["accuracy"]]
    if not rows:
        return
    first = next(iter(run.results.values()))
    # by prototypes there may be no AUC where there is one by the head; no axis has both
    shown = {kind: result for kind, result in run.results.items() if result.title == first.title}
    lines = {}
    for result in shown.values():
        name = result.name
        lines[f"{name}, mean"] = _over_rounds(rows, name)
        if not run.hides_clients:
            lines[f"{name}, worst 10 %"] = _over_rounds(rows, name, "worst-10%")
        if any(name in row.get("validation", {}) for row in rows):
            lines[f"{name}, validation"] = _over_rounds(rows, f"validation/{name}")

    kinds = " and ".join(f"“{shown[kind].name}” by {MEANING[kind]}" for kind in shown)
    worst = "" if run.hides_clients else f", and that of {run.worst_tenth}"
    caption = (
        f"Test {first.title} over {run.averaged_over}, {kinds}: the mean{worst}. Measured with "
        "what the clients received, after the round on the horizontal axis."
    )
    if not run.evaluates_same_clients:
        caption += " Points are not all of the same clients."
    if any("validation" in row for row in rows):
        caption += " Validation: the mean on their validation data."
    yield plot.line_chart(
        "accuracy-curves",
        "Mean and worst clients",
        caption,
        _rounds(rows),
        lines,
        axis(first),
    )


def _over_rounds(rows: list[RoundRow], name: str, measure: str = "mean") -> list[float]:
    """Return a figure over the clients from each row; NaN where a row lacks it.

    ``name`` is as in `figures_of`, ``measure`` such as ``mean`` or ``worst-10%``. Accuracies are in
    percent.
    """
    return [factor(name) * figures_of(row).get(name, {}).get(measure, math.nan) for row in rows]


def of_domains(run: RecordedRun) -> Drawings:
    """Draw the result of each domain's clients over the rounds, by the better way to predict.

    Nothing is drawn with fewer than two domains, before the first evaluation, and where secure
    aggregation hides the figures of single clients.
    """
    if not run.domains or not run.better_kind or run.hides_clients:
        return
    result = run.results[run.better_kind]
    rounds = []
    lines: dict[str, list[float]] = {domain: [] for domain in run.domains}
    for row in run.each_row():
        if result.name not in figures_of(row):
            continue
        rounds.append(row["evaluated-after-round"])
        for domain, sites in run.domains.items():
            mean = _mean_of_known(of_site(row, site, result.name) for site in sites)
            lines[domain].append(factor(result.name) * mean)
    yield plot.line_chart(
        "accuracy-of-domains",
        "By domain",
        f"Mean test {result.title} over the clients of each domain, by {MEANING[run.better_kind]}.",
        rounds,
        lines,
        axis(result),
    )


def of_clients(run: RecordedRun) -> Drawings:
    """Draw a map of each client's result over the rounds, one for each way to predict."""
    if run.hides_clients or not run.sites:
        return
    sites, words_on_others = _first_of(run, list(run.sites))
    for kind, result in run.results.items():
        columns = {}  # round -> the values of all sites after it
        for row in run.each_row():
            if result.name in figures_of(row):
                values = [of_site(row, site, result.name) for site in sites]
                columns[row["evaluated-after-round"]] = values
        yield plot.heat_map(
            f"accuracy-of-clients-{kind}",
            f"Every client ({kind})",
            f"Test {result.title} of each client by {MEANING[kind]}; lighter is better, on the "
            f"range of these values. Blank: not evaluated.{words_on_others}",
            factor(result.name) * np.array(list(columns.values())).T,
            sites,
            list(columns),
            axis(result),
            "after round",
        )


def _first_of(run: RecordedRun, sites: list[str]) -> tuple[list[str], str]:
    """Return as many of the ``sites`` as a map has room for, and its caption's words on the others.

    The others are all further clients of the run, also those that are not among ``sites``.
    """
    shown = sites[:MOST_CLIENTS]
    left_out = len(run.sites) - len(shown)
    return shown, f" {left_out} clients are not shown." if left_out else ""


def metrics(run: RecordedRun) -> Drawings:
    """Draw the metrics beside accuracy over the rounds.

    Those of each class or label are left out of this chart, for they would be too many lines. The
    recall of each class has a map of its own, and the AUC of each label a table.
    """
    rows = [row for row in run.rows if row.get("metrics")]
    means = [{name: value["mean"] for name, value in row["metrics"].items()} for row in rows]
    every_line = _lines(means)
    lines = {}
    for name, line in every_line.items():
        is_by_class = any(f"/{metric}/" in name for metric in BY_CLASS)
        if not is_by_class:
            lines[name] = line
    if lines:
        yield plot.line_chart(
            "metrics",
            "Other metrics",
            f"Metrics beside accuracy: means over {run.averaged_over}.",
            _rounds(rows),
            lines,
            f"mean over {run.averaged_over}",
        )

    prefix = f"{run.better_kind}/{RECALL}/"
    recalls = {name: line for name, line in every_line.items() if name.startswith(prefix)}
    if not recalls:
        return
    names = sorted(recalls, key=lambda name: (len(name), name))  # 9 before 10
    yield plot.heat_map(
        "recall",
        "Recall of each class",
        f"Recall of each class by {MEANING[run.better_kind]}: the mean over the clients with test "
        "samples of it.",
        np.array([recalls[name] for name in names]),
        [run.class_name(int(name.removeprefix(prefix))) for name in names],
        _rounds(rows),
        "recall",
        "after round",
    )


def losses(run: RecordedRun) -> Drawings:
    """Draw the training loss over the rounds with its terms, and the server's own loss."""
    rows = [row for row in run.rounds if row["losses"]]
    if not rows:
        return
    lines = _lines([row["losses"] for row in rows])
    if lines.keys() == {"total", "cross-entropy"}:  # the total of one term is that term
        del lines["total"]
    of_server = _lines([row.get("server", {}) for row in rows])
    if "server-loss" in of_server:
        lines["server's loss"] = of_server["server-loss"]
    yield plot.line_chart(
        "losses",
        "Training losses",
        "Mean training loss over the clients' samples in each round, and the terms of which it is "
        "the sum.",
        [row["round"] for row in rows],
        lines,
        "loss",
        "round",
    )


def _lines(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return a line for each figure that any row has, in the order in which they first occur.

    It is NaN where a row lacks the figure.
    """
    names = dict.fromkeys(chain(*rows))
    return {name: [row.get(name, math.nan) for row in rows] for name in names}


def samples(run: RecordedRun) -> Drawings:
    """Draw a map of how many training samples of each class each client has.

    Only clients are shown that tell the server these counts; nothing is drawn if none does.
    """
    telling = [site for site, facts in run.sites.items() if facts.get("train-classes")]
    sites, words_on_others = _first_of(run, telling)
    if not sites:
        return
    # C classes, S sites
    counts_CS = np.array([run.sites[site]["train-classes"] for site in sites], dtype=np.float64).T
    counts_CS[counts_CS == 0] = np.nan  # drawn as a blank cell
    yield plot.heat_map(
        "distribution",
        "Training samples of each class",
        "Training samples of each client and class; blank: none (FedTGP, Figures 7 to 11)."
        f"{words_on_others}",
        counts_CS,
        [run.class_name(label) for label in range(len(counts_CS))],
        sites,
        "training samples",
        "client",
    )


def margins(run: RecordedRun) -> Drawings:
    """Draw a map of the classes' margins, among the global prototypes and each client's.

    A margin is the distance to the nearest prototype of another class. FedTGP's paper normalises
    the margins of each method, to show that averaging shrinks them; here they are as measured.
    """
    last = run.margins
    if last is None:
        return
    # S sites, C classes; NaN for a class of which the site has no prototype
    clients_SC = np.array([*last["clients"].values()], dtype=np.float64)
    if not np.isfinite(clients_SC).any():
        return
    classes = clients_SC.shape[1]
    without_any = [None] * classes  # of a server that has no prototypes
    global_C = np.array(last["global"] or without_any, dtype=np.float64)
    largest_C = np.fmax.reduce(clients_SC)  # NaN where no client has the class
    caption = (
        f"After round {last['round']}: the distance from a class's prototype to the nearest of "
        "another class, among the global prototypes and each client's (FedTGP, Figure 1). The "
        "second row has each class's largest margin at any client; where the first is darker, "
        "merging has moved the classes together."
    )
    yield plot.heat_map(
        "margins-by-class",
        "Prototype margins by class",
        caption,
        np.stack([global_C, largest_C, *clients_SC[:MOST_CLIENTS]]),
        ["global", "largest", *list(last["clients"])[:MOST_CLIENTS]],
        [run.class_name(label) for label in range(classes)],
        "margin (Euclidean)",
        "class",
    )


def prototypes(run: RecordedRun) -> Drawings:
    """Draw the last prototypes of the clients and of the server as points of one map."""
    stored = run.prototypes
    if stored is None or "global-means" not in stored.arrays:
        return
    means = stored.arrays["means"]
    merged_means = stored.arrays["global-means"]
    shows_nothing = len(means) + len(merged_means) < 5
    are_of_two_spaces = means.shape[1:] != merged_means.shape[1:]  # which have no common map
    if shows_nothing or are_of_two_spaces:
        return

    of_clients = drawn_rows(stored.arrays["labels"], MOST_POINTS)
    of_server = drawn_rows(stored.arrays["global-labels"], MOST_POINTS)
    labels = stored.arrays["labels"][of_clients]
    merged_labels = stored.arrays["global-labels"][of_server]
    # all in one map: the clients' points come first, then the server's
    points = np.concatenate([means[of_clients], merged_means[of_server]]).astype(np.float64)
    places, method = places_in_map(points)
    clients, server = np.split(places, [len(labels)])

    shown = ""
    if len(labels) < len(means):
        shown = f" {len(labels)} of {len(means)} client prototypes."
    caption = (
        f"{method} of the prototypes after round {stored.round} (FedTGP, Figure 5): a circle "
        f"for each client and class, a triangle for each global prototype, coloured and named by "
        f"class.{shown}"
    )
    with plot.canvas(plot.WIDTH, 4.3) as (figure, axes):
        axes.scatter(
            *clients.T,
            s=16,
            c=CLASS_COLOURS.take(labels, mode="wrap"),
            alpha=0.75,
            linewidths=0,
            label="client prototypes",
        )
        axes.scatter(
            *server.T,
            s=60,
            c=CLASS_COLOURS.take(merged_labels, mode="wrap"),
            marker="^",
            edgecolors=plot.INK,
            linewidths=0.9,
            label="global ones",
        )
        plot.name_classes(
            axes,
            merged_labels,
            run.class_name,
            server,
            xytext=(5, 4),
            textcoords="offset points",
            fontsize=10,
        )
        figure.legend(loc="outside lower center", ncols=2)
        yield plot.Drawing(figure, "prototypes-map", "Prototypes of clients and server", caption)


def places_in_map(values_ND: Floats) -> tuple[Floats, str]:
    """Lay N vectors of D numbers out in a plane.

    Return their places [N, 2], and the name of the method: fewer than `FEW_POINTS` are laid out by
    their principal components, others by t-SNE.
    """
    if len(values_ND) < FEW_POINTS:
        centred_ND = values_ND - values_ND.mean(axis=0)
        _, _, directions_KD = np.linalg.svd(centred_ND, full_matrices=False)  # K = min(N, D)
        places = centred_ND @ directions_KD[:2].T
        missing = 2 - places.shape[1]  # 1 if there is only one direction; that axis is all 0
        return np.pad(places, ((0, 0), (0, missing))), "The first two principal components"

    from sklearn.manifold import TSNE

    method = TSNE(
        # scikit-learn looks at 3 · perplexity neighbours of a point, and there are N - 1
        perplexity=min(30.0, (len(values_ND) - 1) / 3),
        init="pca" if values_ND.shape[1] > 1 else "random",
        max_iter=500,
        random_state=SEED,
    )
    largest = float(np.abs(values_ND).max()) or 1.0  # all may be 0
    scaled_ND = (values_ND / largest).astype(np.float32)
    return np.asarray(method.fit_transform(scaled_ND)), "t-SNE"


def drawn_rows(labels: Ints, most: int) -> Ints:
    """Draw at most ``most`` rows of those with these labels; return them in ascending order.

    The seed is fixed, so that a page that is drawn again shows the same points.
    """
    count = min(most, len(labels))
    return np.sort(np.random.default_rng(SEED).choice(len(labels), count, replace=False))


def numbers(run: RecordedRun) -> Drawings:
    """Draw how many prototypes of a class a client sends, on average, over the rounds.

    There is a line for each domain, or one for all clients if there are not several domains.
    Nothing is drawn if no client reports such counts.
    """
    groups = run.domains or {"all clients": [*run.sites]}
    lines: dict[str, list[float]] = {name: [] for name in groups}
    for row in run.each_row():
        if row["kind"] == "round":
            for name, sites in groups.items():
                lines[name].append(_prototypes_per_class(row, sites))
    if np.isnan([*lines.values()]).all():
        return
    yield plot.line_chart(
        "prototype-numbers",
        "Prototypes per class over the rounds",
        "Average number of local prototypes per class that a client sends, by domain (FedPLVM, "
        "Figure 9). Clustering finds more of them where a class looks more varied.",
        [row["round"] for row in run.rounds],
        lines,
        "prototypes per class",
    )


def _prototypes_per_class(row: RoundRow, sites: Sequence[str]) -> float:
    """Return how many prototypes these clients sent of a class on average; NaN if they sent none.

    A class of which a client sent none does not count: the client may not have that class.
    """
    counts: list[int] = []
    for site in sites:
        if site in row["clients"]:
            counts += row["clients"][site].get("prototypes-of-classes", [])
    return _mean_of_known([count or math.nan for count in counts])


def _mean_of_known(values: Iterable[float]) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else math.nan


def time(run: RecordedRun) -> Drawings:
    """Draw the seconds of each round: of all of it, of merging, and of the phases at a client.

    Rounds without a valid reply are left out, as no client has reported its seconds there.
    """
    rows = [row for row in run.rounds if row["valid"]]
    if not rows:
        return
    lines = {
        "whole round": [row["seconds"]["total"] for row in rows],
        "merging": [row["seconds"].get("aggregate", math.nan) for row in rows],
    }
    # a row has the seconds of each phase summed over the clients
    for phase, sums in _lines([row["seconds"]["clients"] for row in rows]).items():
        lines[f"client: {phase}"] = [
            seconds / row["valid"] for seconds, row in zip(sums, rows, strict=True)
        ]
    yield plot.line_chart(
        "time-of-a-round",
        "Time of a round",
        "The whole round as the server sees it, in which clients on one machine may take turns; "
        "the server's own merging; and each phase of a client's work, averaged over the clients.",
        [row["round"] for row in rows],
        lines,
        "seconds",
        "round",
    )


def _rounds(rows: list[RoundRow]) -> list[int]:
    """Return the round after which each row was measured: a chart's places from left to right."""
    return [row["evaluated-after-round"] for row in rows]


def of_site(row: RoundRow, site: str, name: str) -> float:
    """Return a client's figure; NaN where the client did not tell."""
    if site not in row["clients"]:
        return math.nan
    return float(figures_of(row["clients"][site]).get(name, math.nan))
