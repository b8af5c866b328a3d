"""``report.html`` with all inside, for a telephone and a desk, light and dark.

Names and reasons of failures come from clients: every text goes through `Markup.format`, which
escapes whatever is not markup itself.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path

from markupsafe import Markup

from protofl_common.basics.files import write_text
from protofl_common.basics.text import human_bytes, human_seconds
from protofl_common.config.sections import protections
from protofl_common.experiment.settings import default_run_config
from protofl_common.report import charts, paper
from protofl_common.report.reading import RecordedRun
from protofl_common.report.style import CSS, POLICY
from protofl_common.runs import figures
from protofl_common.runs.figures import Table, in_reading_order
from protofl_common.runs.folder import Accuracies, RoundRow, unused_replies
from protofl_common.runs.over_clients import best_of, figures_of, mean_of_part
from protofl_common.tasks.metrics import BY_CLASS, KINDS, LABEL_AUC, LABEL_AUC_ERROR

MOST_LOST_REPLIES = 300  # rows of the table of lost replies; the rest is counted
MOST_CLIENTS_UNFOLDED = 20  # a longer table of clients is shown only when it is opened
SIZES = ("parameters", "train-samples", "validation-samples", "test-samples")
HEADS = {
    "mean": "mean",
    "weighted": "by samples",
    "worst-10%": "worst 10 %",
    "worst-20%": "worst 20 %",
    "worst-40%": "worst 40 %",
    "best-10%": "best 10 %",
    "std": "std",
    "variance": "variance",
}
"""Figures over the clients, and their heads; some stand only here."""
Draw = Callable[[RecordedRun], charts.Drawings]
FIGURES: dict[str, tuple[Draw, ...]] = {
    "Accuracy": (
        paper.of_methods,
        charts.means,
        charts.of_domains,
        charts.of_clients,
        charts.metrics,
        charts.losses,
    ),
    "Data": (charts.samples,),
    "Prototypes": (charts.margins, charts.prototypes, charts.numbers),
    "Time": (charts.time,),
}
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">\
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">{policy}\
<title>{title} – {name}</title><style>{css}</style></head>
<body><main><header><h1>{title}</h1><p class="sub">{sub}</p>{state}<nav>{links}</nav></header>
{body}<footer><p>{footer}</p></footer></main></body></html>
"""
CARD = """<div class="card">{}<div class="box" tabindex="0"><table{}><thead><tr>{}</tr></thead>
<tbody>{}</tbody></table></div></div>"""


def each(template: str, rows: Iterable[Sequence[object]]) -> Markup:
    """Fill the template once with each row, and return the results one after another."""
    return Markup("").join(Markup(template).format(*row) for row in rows)


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into a run's folder, and return its path.

    SettingsError for a folder without a run, OSError where the page cannot be written.
    """
    path = folder / "report.html"
    write_text(path, page(RecordedRun(folder)))
    return path


def save_figures(folder: Path, into: Path) -> list[Path]:
    """Write each figure of a run's page as SVG and PDF, and return the files."""
    run = RecordedRun(folder)
    files = []
    for function in chain(*FIGURES.values()):
        for drawing in function(run):
            files += drawing.save(into)
    return files


def page(run: RecordedRun) -> str:
    """Return the whole page as HTML; sections for which the run has nothing are left out."""
    sections = {"Result": _result(run), "Privacy": _privacy(run)}
    for name, functions in FIGURES.items():
        drawn = Markup("").join(_drawn(function, run) for function in functions)
        if drawn:
            sections[name] = Markup('<div class="figures">{}</div>').format(drawn)

    sections["Lost replies"] = _lost_replies(run)
    sections["Clients"] = _clients(run)
    sections["Settings"] = _settings(run)
    # anchor, heading and content of each section
    shown = [
        (name.lower().replace(" ", "-"), name, body) for name, body in sections.items() if body
    ]

    state = Markup("")
    if not run.summary:
        state = _note("This run is not finished: the page shows it as far as it is.")
    paper = run.facts.get("paper", "")
    versions = run.summary["versions"] if run.summary else {}
    numbers = ", ".join(f"{name} {number}" for name, number in versions.items())
    return Markup(PAGE).format(
        policy=Markup(POLICY),
        css=Markup(CSS),
        title=run.title,
        name=run.name,
        sub=f"{run.name} · {paper}" if paper else run.name,
        state=state,
        links=each('<a href="#{0}">{1}</a>', shown),
        body=each('<section id="{0}"><h2>{1}</h2>{2}</section>', shown),
        footer=f"ProtoFL {numbers} · protofl report {run.name} --figures DIR draws all again, "
        "figures as SVG and PDF too",
    )


def _drawn(function: Draw, run: RecordedRun) -> Markup:
    """Return all figures that a function draws; if it fails, a note with its name and the error."""
    try:
        return Markup("").join(drawing.as_html() for drawing in function(run))
    except Exception as error:  # whatever it is: the rest of the page must be written
        where = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        reason = f"{type(error).__name__}: {error}"
        return _note(f"A figure could not be drawn ({where}: {reason}).", "note failed")


def _result(run: RecordedRun) -> Markup:
    """Return the first section: the comparison with baselines, tiles, and tables of figures."""
    if not run.rows:
        return _note("No round has been finished yet.")
    shown = Markup('<div class="tiles">{}</div>').format(
        each("<div><b>{}</b><span>{}</span></div>", _tiles(run))
    )
    shown += Markup('<p class="sub">{}</p>').format(
        f"One run with one seed (seed = {run.settings.get('seed', '')}): a small difference from "
        "another run may be chance. Repeat it with other seeds; protofl compare shows means with "
        "intervals."
    )

    if run.compared:
        text = figures.sentence(run.compared)
        if run.missing_baselines > 0:
            text += f"; baselines not found beside it: {run.missing_baselines}"
        shown = _note(text, "note gain") + table(figures.side_by_side(run.compared)) + shown
    return shown + _figures(run) + _auc_of_labels(run)


def _tiles(run: RecordedRun) -> list[tuple[str, str]]:
    """Return the figures at the top of the page as texts, each with the words below it."""
    tiles = []
    for kind, result in run.results.items():
        over_clients = run.last_result(kind)
        name = f"mean {result.title}"
        if run.hides_clients:
            name = f"{result.title} over all samples"
        words = f"{name} by {charts.MEANING[kind]} (“{result.name}”)"
        tiles.append((figures.value_text(result, over_clients["mean"]), words))
        if "worst-10%" in over_clients:
            worst = figures.value_text(result, over_clients["worst-10%"])
            tiles.append((worst, f"{run.worst_tenth}, {result.name}"))

    sizes, lost, seconds = figures.totals(run.rows)
    stopped = ""
    if run.summary:
        seconds = run.summary["seconds"]  # the whole time, also that between the rounds
        stopped = ", stopped early" if run.summary["stopped-early"] else ""
    tiles += [
        (f"{len(run.rounds)} of {run.settings.get('rounds', '?')}", f"rounds{stopped}"),
        (str(len(run.sites)), "clients"),
        (human_bytes(sizes["up"]), "up in all"),
        (human_bytes(sizes["down"]), "down in all"),
        (human_seconds(seconds), "time"),
        # a late reply was counted as missing before, in the round that waited for it
        (str(sum(lost.values()) - lost["late"]), "lost replies"),
    ]
    counted_late = sum(len(row.get("counted-late", {})) for row in run.rows)
    if counted_late:
        tiles.append((str(counted_late), "replies that counted in a later round"))

    last = run.last_row
    if last and "epsilon" in last:
        of_ledgers = figures.epsilon_of_ledgers(last)
        epsilon = figures.describe_epsilon(last["epsilon"], of_ledgers, last["epsilon-of"])
        delta = f"{run.settings['dp-delta']:g}"
        tiles.append((epsilon, f"of the client that the run costs most, δ = {delta}"))
    return tiles


def _privacy(run: RecordedRun) -> Markup:
    """Return which protections the run had, and what `protofl audit` found if it was run."""
    lines = each("<p>{}</p>", [(line,) for line in protections(run.settings)])
    if not run.audit:
        return lines
    leaks = sum(attack["above_chance"] for attack in run.audit)
    text = f"{leaks} of {len(run.audit)} attacks name training samples above chance."
    verdict = _note(text, "note leak" if leaks else "note")
    return lines + verdict + table(figures.audit_table(run.audit), words=True)


def _figures(run: RecordedRun) -> Markup:
    """Return the table of the last accuracies and metrics; the run's results stand first."""
    shown: Accuracies = {}
    best = {}
    rounds = set()
    for name in in_reading_order(run.results.values(), run.last_rows):
        if any(f"/{metric}/" in name for metric in BY_CLASS):  # they are shown elsewhere
            continue
        row = run.last_rows[name]
        rounds.add(row["evaluated-after-round"])
        shown[name] = dict(figures_of(row)[name])
        figures_of_clients = [figures_of(client) for client in row["clients"].values()]
        values = [told[name] for told in figures_of_clients if name in told]
        if values and "std" in shown[name]:  # else secure aggregation hides the clients
            for part in ("worst-20%", "worst-40%", "best-10%"):
                shown[name][part] = mean_of_part(values, part)
            shown[name]["variance"] = shown[name]["std"] ** 2
        best_round = best_of(run.rows, name) if name in KINDS else None
        if best_round:
            best[name] = best_round
    if not shown:
        return Markup("")
    round_numbers = " and ".join(str(number) for number in sorted(rounds))
    how_chosen = figures.chosen(best.values())
    note = (
        f"Test {run.task.says_right} in percent, and metrics as they are, after round "
        f"{round_numbers}, over the clients that have them (their spread as in FedPCL, Tables 12 "
        "and 13; std in points, variance in points²), and the best mean with its round, which was "
        f"{how_chosen}.{run.note_on_hidden}"
    )
    heads = ("", *HEADS.values(), "best mean")
    says_right = run.task.says_right
    rows = figures.figure_rows(shown, best, measures=HEADS, says_right=says_right)
    return table(Table(heads, rows, note))


def _auc_of_labels(run: RecordedRun) -> Markup:
    """Return the table of each label's AUC, by the better way to predict.

    The AUCs are those of the last evaluation that has any.
    """
    prefix = f"{run.better_kind}/{LABEL_AUC}/"
    last = run.last_measured
    if last is None or not any(name.startswith(prefix) for name in last["metrics"]):
        return Markup("")
    rows = []
    # label l has two classes: 2 l of the samples without it, and 2 l + 1 of those with it; its
    # figures are named by the second
    for class_with_label in range(1, len(run.facts.get("classes", [])), 2):
        name = f"{prefix}{class_with_label}"
        error = f"{run.better_kind}/{LABEL_AUC_ERROR}/{class_with_label}"
        rows.append([run.class_name(class_with_label), *_auc_cells(last, name, error)])
    note = (
        f"AUC of each label by {charts.MEANING[run.better_kind]}: the mean over the clients that "
        f"test it, and the 95 % interval of this mean if metrics names {LABEL_AUC_ERROR} (DeLong; "
        "of chance in the test samples alone)."
    )
    return table(Table(("AUC of each label", "mean", "95 % interval", "clients"), rows, note))


def _auc_cells(row: RoundRow, name: str, name_of_error: str) -> tuple[str, str, str]:
    """Return a label's mean AUC, its 95 % interval, and how many clients test it, as texts.

    ``name`` and ``name_of_error`` are the metrics with its AUC and the standard error of that.
    """
    if name not in row["metrics"]:
        return "–", "–", "nobody"
    errors = []  # of the clients that test the label; NaN of a client that reports none
    for client in row["clients"].values():
        metrics = client.get("metrics", {})
        if name in metrics:
            errors.append(metrics.get(name_of_error, math.nan))
    mean = row["metrics"][name]["mean"]
    interval = "–"
    # of the mean of n independent figures: the root of the sum of their squared errors, over n
    error_of_mean = math.hypot(*errors) / max(1, len(errors))
    half = 1.96 * error_of_mean  # 95 % of a normal distribution lie within 1.96 deviations
    # Without an interval: it is 0 if no client is known, NaN if one of them reports no error, and
    # above 1 it would cover every AUC there is.
    if 0 < half < 1:
        interval = f"{max(0, mean - half):.3f} … {min(1, mean + half):.3f}"
    number = str(len(errors) or "–")  # none is known where secure aggregation hides clients
    return f"{mean:.3f}", interval, number


def _lost_replies(run: RecordedRun) -> Markup:
    """Return the table of replies that were not used and of void rounds.

    Return "" if no round has been finished.
    """
    if not run.rows:
        return Markup("")
    rows: list[tuple[str, ...]] = []
    for row in run.rows:
        where = "final" if row["kind"] == "final" else str(row["round"])
        rows += [(where, *unused) for unused in unused_replies(row)]
        if row["void"]:
            reason = f"{row.get('void-because', 'not kept')}; nothing was merged"
            rows.append((where, "void", "all", reason))
    if not rows:
        return Markup("<p>None: every reply came in time and was accepted.</p>")
    note = "Replies that the server could not use, and why; the rounds went on without them."
    if len(rows) > MOST_LOST_REPLIES:
        note += f" {len(rows) - MOST_LOST_REPLIES} more are in metrics.jsonl."
    heads = ("round", "what", "client", "reason")
    return table(Table(heads, rows[:MOST_LOST_REPLIES], note), words=True)


def _clients(run: RecordedRun) -> Markup:
    """Return the table of clients: what they said of themselves, and their last results."""
    sizes = [size for size in SIZES if any(size in facts for facts in run.sites.values())]
    names = [size.replace("train-", "training-").replace("-", " ") for size in sizes]
    results = run.results.values()
    heads = ["client", "domain", "model", *names, *(result.name for result in results)]
    rows = []
    for site, facts in run.sites.items():
        texts = [site, str(facts.get("domain") or "–"), str(facts.get("arch", "–"))]
        for size in sizes:
            texts.append(f"{facts.get(size):,}" if size in facts else "–")
        for result in results:
            value = charts.of_site(run.last_rows[result.name], site, result.name)
            texts.append("–" if math.isnan(value) else figures.value_text(result, value))
        rows.append(texts)

    shown = table(Table(heads, rows, run.note_on_hidden), words=True)
    if len(rows) > MOST_CLIENTS_UNFOLDED:
        return _folded(f"{len(rows)} clients", shown)
    return shown


def _settings(run: RecordedRun) -> Markup:
    """Return a table of the settings that the run changed, and a folded one of all others."""
    changed: list[list[str]] = []
    rest: list[list[str]] = []
    defaults = default_run_config()
    for key, value in run.settings.items():
        default = defaults.get(key, "none here")  # another version's run may have other settings
        rows = rest if default == value else changed
        text = json.dumps(value, ensure_ascii=False)
        rows.append([key, text, json.dumps(default, ensure_ascii=False)])
    heads = ("setting", "value", "default")
    others = table(Table(heads, rest), words=True)
    folded = _folded(f"{len(rest)} settings at their defaults", others)
    return table(Table(heads, changed, "Set for this run."), words=True) + folded


def table(shown: Table, words: bool = False) -> Markup:
    """Return a table in a box that scrolls sideways by itself, with its note above.

    With ``words`` its columns are aligned to the left, as texts are, else to the right, as numbers.
    """
    above = Markup("")
    if shown.note:
        above = Markup('<p class="above">{}</p>').format(shown.note)

    head = Markup("")
    for text in shown.heads:
        head += Markup('<th scope="col">{}</th>').format(text) if text else Markup("<td></td>")
    body = Markup("")
    for row in shown.rows:
        cells = each("<td>{}</td>", [(text,) for text in row])
        body += Markup("<tr>{}</tr>").format(cells)
    kind = Markup(' class="words"') if words else ""
    return Markup(CARD).format(above, kind, head, body)


def _note(text: str, kind: str = "note") -> Markup:
    return Markup('<p class="{}">{}</p>').format(kind, text)


def _folded(title: str, body: Markup) -> Markup:
    return Markup("<details><summary>{}</summary>{}</details>").format(title, body)
