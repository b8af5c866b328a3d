"""``report.html`` with all inside, for a telephone and a desk, light and dark.

Names and reasons of failures come from clients: every text goes through `Markup.format`, which
escapes whatever is not markup itself.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from protofl_common.basics.files import write_text
from protofl_common.basics.text import human_bytes, human_seconds
from protofl_common.config.options import Scalar
from protofl_common.config.sections import PER_UNIT, protections
from protofl_common.experiment.settings import default_run_config
from protofl_common.report import charts
from protofl_common.report.reading import RecordedRun
from protofl_common.report.style import CSS, POLICY
from protofl_common.runs import figures
from protofl_common.runs.figures import MEASURES, Table
from protofl_common.runs.folder import Accuracies, unused_replies
from protofl_common.runs.over_clients import best_of, fairness

MOST_TROUBLES = 300  # rows of the table of lost replies; the rest is counted
SIZES = ("parameters", "train-samples", "validation-samples", "test-samples")
ACCURACY_HEADS = {
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
NO_REPLY: Any = {"accuracy": {}}
"""The figures of a client that is not in a row."""
FIGURES: dict[str, tuple[Callable[[RecordedRun], Iterable[Markup]], ...]] = {
    "Accuracy": (
        charts.means,
        charts.of_domains,
        charts.of_clients,
        charts.metrics,
        charts.losses,
    ),
    "Data": (charts.samples,),
    "Prototypes": (charts.margins, charts.prototypes, charts.numbers),
    "Privacy in figures": (charts.spent,),
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
    """Fill the template with each row, one after another."""
    return Markup("").join(Markup(template).format(*row) for row in rows)


def write_report(folder: Path) -> Path:
    """Draw ``report.html`` and return its path.

    SettingsError without a run, OSError where it cannot be written.
    """
    path = folder / "report.html"
    write_text(path, page(RecordedRun(folder)))
    return path


def page(run: RecordedRun) -> str:
    """Return the whole page, with the sections for which the run has something to show."""
    sections = {"Result": _result(run), "Privacy": _privacy(run)}
    for name, functions in FIGURES.items():
        drawn = Markup("").join(_drawn(function, run) for function in functions)
        if drawn:
            sections[name] = Markup('<div class="figures">{}</div>').format(drawn)
    sections["Lost replies"] = _troubles(run)
    sections["Clients"] = _clients(run)
    sections["Settings"] = _settings(run)
    shown = [
        (name.lower().replace(" ", "-"), name, body) for name, body in sections.items() if body
    ]
    state = Markup("")
    if not run.summary:
        state = _note("This run is not finished: the page shows it as far as it is.")
    paper = run.facts.get("paper", "")
    return Markup(PAGE).format(
        policy=Markup(POLICY),
        css=Markup(CSS),
        title=run.title,
        name=run.name,
        sub=f"{run.name} · {paper}" if paper else run.name,
        state=state,
        links=each('<a href="#{0}">{1}</a>', shown),
        body=each('<section id="{0}"><h2>{1}</h2>{2}</section>', shown),
        footer=_footer(run),
    )


def _footer(run: RecordedRun) -> str:
    parts = ["ProtoFL"]
    versions = run.summary.get("versions", {}) if run.summary else {}
    if versions:
        parts.append(", ".join(f"{name} {number}" for name, number in versions.items()))
    if not run.rows:
        parts.append("protofl report draws this page again at any time")
    return " · ".join(parts)


def _drawn(function: Callable[[RecordedRun], Iterable[Markup]], run: RecordedRun) -> Markup:
    """Draw a function's figures; what cannot be drawn is named in its place and costs no more."""
    try:
        with warnings.catch_warnings():
            # letters that matplotlib's own font lacks: the browser's have them
            warnings.simplefilter("ignore")
            return Markup("").join(function(run))
    except Exception as error:
        where = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        reason = f"{type(error).__name__}: {error}"
        return _note(f"A figure could not be drawn ({where}: {reason}).", "note failed")


def _result(run: RecordedRun) -> Markup:
    if not run.rows:
        return _note("No round has been finished yet.")
    shown = Markup('<div class="tiles">{}</div>').format(
        each("<div><b>{}</b><span>{}</span></div>", _tiles(run))
    )
    if run.compared:
        text = figures.sentence(run.compared)
        if run.absent > 0:
            text += f"; baselines not found beside it: {run.absent}"
        shown = _note(text, "note gain") + table(figures.side_by_side(run.compared)) + shown
    return shown + _accuracies(run) + _metrics(run)


def _tiles(run: RecordedRun) -> list[tuple[str, str]]:
    """Return the few figures at the top of the page, each with what it is."""
    tiles = []
    over = "accuracy over all samples" if run.hides_clients else "mean accuracy"
    for kind, row in run.last.items():
        tiles.append((f"{100 * row['accuracy'][kind]['mean']:.1f} %", f"{over}, {kind}"))
    if run.better:
        accuracy = run.last[run.better]["accuracy"][run.better]
        if "worst-10%" in accuracy:
            worst = f"{100 * accuracy['worst-10%']:.1f} %"
            tiles.append((worst, f"worst 10 % of clients, {run.better}"))

    rounds = len(run.rounds)
    planned = run.settings.get("rounds", rounds)
    if run.summary and run.summary.get("stopped-early"):
        tiles.append((f"{rounds} of {planned}", "rounds, stopped early"))
    elif run.summary:
        tiles.append((f"{rounds}", "rounds"))
    else:
        tiles.append((f"{rounds} of {planned}", "rounds"))

    sizes, lost, seconds = figures.totals(run.rows)
    if run.summary:
        seconds = run.summary["seconds"]
    tiles.append((str(len(run.sites)), "clients"))
    tiles.append((human_bytes(sizes["up"]), "up in all"))
    tiles.append((human_bytes(sizes["down"]), "down in all"))
    tiles.append((human_seconds(seconds), "time"))
    tiles.append((str(sum(lost.values()) - lost["late"]), "lost replies"))
    counted_late = sum(len(row.get("counted-late", {})) for row in run.rows)
    if counted_late:
        tiles.append((str(counted_late), "replies that counted in a later round"))
    per_unit = PER_UNIT.get(str(run.settings.get("dp")), "")
    if "epsilon" in run.rows[-1]:
        delta = f"{run.settings['dp-delta']:g}"
        planned = f"planned for the client that the run costs most, δ = {delta}"
        tiles.append((f"ε ≤ {run.rows[-1]['epsilon']:.2f}{per_unit}", planned))
    told = figures.epsilon_of_ledgers(run.rows[-1])
    if told is not None:
        counted = "the most that a client's own ledger counts for this run"
        tiles.append((f"ε = {told:.2f}{per_unit}", counted))
    return tiles


def _privacy(run: RecordedRun) -> Markup:
    lines = each("<p>{}</p>", [(line,) for line in protections(run.settings)])
    if not run.audit:
        return lines
    leaks = sum(attack["above_chance"] for attack in run.audit)
    verdict = _note("None above chance.")
    if leaks:
        text = f"{leaks} of {len(run.audit)} attacks name training samples above chance."
        verdict = _note(text, "note leak")
    return lines + verdict + table(figures.audit_table(run.audit), words=True)


def _accuracies(run: RecordedRun) -> Markup:
    if not run.last:
        return Markup("")
    accuracy = {}
    validation = {}
    best = {}
    for kind, row in run.last.items():
        each_client = [client["accuracy"] for client in row["clients"].values()]
        shares = [of_client[kind] for of_client in each_client if kind in of_client]
        accuracy[kind] = row["accuracy"][kind] | fairness(shares)
        if kind in row.get("validation", {}):
            validation[kind] = row["validation"][kind]
        best_round = best_of(run.rows, kind)
        if best_round:
            best[kind] = best_round

    after = next(iter(run.last.values()))["evaluated-after-round"]
    note = (
        f"Test accuracy after round {after} in percent, over the clients (their spread as in "
        "FedPCL, Tables 12 and 13; std in points, variance in points²), and the best mean with its "
        f"round, which was {figures.chosen(best.values())}.{run.hidden}"
    )
    heads = ("", *ACCURACY_HEADS.values(), "best mean")
    return table(
        Table(heads, figures.accuracy_rows(accuracy, best, validation, ACCURACY_HEADS), note)
    )


def _metrics(run: RecordedRun) -> Markup:
    last: Accuracies = {}
    for row in run.rows:
        last = row.get("metrics") or last
    rows = figures.metric_rows(last, 4)
    if not rows:
        return Markup("")
    note = (
        "Metrics beside accuracy at the last evaluation, over the clients that have them."
        f"{run.hidden}"
    )
    return table(Table(("", *MEASURES.values()), rows, note))


def _troubles(run: RecordedRun) -> Markup:
    rows: list[tuple[str, str, str, str]] = []
    for row in run.rows:
        where = "final" if row["kind"] == "final" else str(row["round"])
        for kind, site, reason in unused_replies(row):
            rows.append((where, kind, site, reason))
        if row["void"]:
            reason = row.get("void-because", "not kept")
            rows.append((where, "void", "all", f"{reason}; nothing was merged"))
    if not run.rows:
        return Markup("")
    if not rows:
        return Markup("<p>None: every reply came in time and was accepted.</p>")

    note = "Replies that the server could not use, and why; the rounds went on without them."
    if len(rows) > MOST_TROUBLES:
        note += f" {len(rows) - MOST_TROUBLES} more are in metrics.jsonl."
    heads = ("round", "what", "client", "reason")
    return table(Table(heads, rows[:MOST_TROUBLES], note), words=True)


def _clients(run: RecordedRun) -> Markup:
    sizes = list(SIZES)
    if not any("validation-samples" in facts for facts in run.sites.values()):
        sizes.remove("validation-samples")
    names = [size.replace("train-", "training-").replace("-", " ") for size in sizes]
    heads = ["client", "domain", "model", *names, *(f"{kind}, %" for kind in run.last)]

    rows = []
    for site, facts in run.sites.items():
        texts = [site, str(facts.get("domain") or "–"), str(facts.get("arch", "–"))]
        for size in sizes:
            texts.append(f"{facts.get(size):,}" if size in facts else "–")
        for kind, row in run.last.items():
            share = row["clients"].get(site, NO_REPLY)["accuracy"].get(kind)
            texts.append("–" if share is None else f"{100 * share:.1f}")
        rows.append(texts)

    shown = table(Table(heads, rows, run.hidden), words=True)
    return shown if len(rows) <= 20 else _folded(f"{len(rows)} clients", shown)


def _settings(run: RecordedRun) -> Markup:
    """Show the settings of this run first; the others are folded."""
    defaults = default_run_config()
    own = []
    rest = []
    for key, value in run.settings.items():
        if key in defaults and defaults[key] != value:
            own.append((key, _value(value), _value(defaults[key])))
        else:  # at its default; or without one, in the folder of another version's run
            rest.append((key, _value(value)))
    shown = Markup("")
    if own:
        shown += table(Table(("setting", "value", "default"), own, "Set for this run."), words=True)
    others = table(Table(("setting", "value"), rest), words=True)
    return shown + _folded(f"{len(rest)} settings at their defaults", others)


def table(shown: Table, words: bool = False) -> Markup:
    """Show a table in a box that scrolls sideways by itself; ``words`` begin at the left."""
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


def _value(value: Scalar) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "“”" if value == "" else str(value)
