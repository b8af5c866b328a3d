"""``report.html`` with all inside, for a telephone and a desk, light and dark.

Names and reasons of failures come from clients: every text goes through `Markup.format`, which escapes what is none.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from markupsafe import Markup

from protofl_common.basics.files import write_text
from protofl_common.basics.text import human_bytes, human_seconds
from protofl_common.config.options import Scalar
from protofl_common.config.sections import protections
from protofl_common.experiment.settings import default_run_config
from protofl_common.report import charts
from protofl_common.report.reading import RecordedRun
from protofl_common.report.style import CSS, POLICY
from protofl_common.runs import figures
from protofl_common.runs.figures import MEASURES, Table
from protofl_common.runs.folder import troubles
from protofl_common.runs.over_clients import best_of, fairness

MOST_TROUBLES = 300  # rows of the table of lost replies; the rest is counted
SIZES = ("parameters", "train-samples", "validation-samples", "test-samples")
SPREAD = {"worst-20%": "worst 20 %", "worst-40%": "worst 40 %", "best-10%": "best 10 %", "variance": "variance"}
"""Figures over the clients that stand only here, and their heads."""
FIGURES: dict[str, tuple[Callable[[RecordedRun], Iterable[Markup]], ...]] = {
    "Accuracy": (charts.means, charts.of_domains, charts.of_clients, charts.metrics, charts.losses),
    "Data": (charts.samples,),
    "Prototypes": (charts.margins, charts.prototypes, charts.numbers),
    "Privacy in figures": (charts.spent,),
    "Time": (charts.time,),
}
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">{policy}<title>{title} – {name}</title><style>{css}</style></head>
<body><main><header><h1>{title}</h1><p class="sub">{sub}</p>{state}<nav>{links}</nav></header>
{body}<footer><p>{footer}</p></footer></main></body></html>
"""


def each(template: str, rows: Iterable[Sequence[object]]) -> Markup:
    """The template filled with each row, one after another."""
    return Markup("").join(Markup(template).format(*row) for row in rows)


def write_report(folder: Path) -> Path:
    """Draw ``report.html`` and return its path; SettingsError without a run, OSError where it cannot be written."""
    path = folder / "report.html"
    write_text(path, page(RecordedRun(folder)))
    return path


def page(run: RecordedRun) -> str:
    sections = {"Result": _result(run), "Privacy": _privacy(run)}
    for name, functions in FIGURES.items():
        if drawn := Markup("").join(_drawn(function, run) for function in functions):
            sections[name] = Markup('<div class="figures">{}</div>').format(drawn)
    sections |= {"Lost replies": _troubles(run), "Clients": _clients(run), "Settings": _settings(run)}
    shown = [(name.lower().replace(" ", "-"), name, body) for name, body in sections.items() if body]
    paper, versions = run.facts.get("paper", ""), run.summary.get("versions", {}) if run.summary else {}
    footer = ["ProtoFL", ", ".join(f"{name} {number}" for name, number in versions.items())]
    footer += [] if run.rows else ["protofl report draws this page again at any time"]
    return Markup(PAGE).format(
        policy=Markup(POLICY),
        css=Markup(CSS),
        title=run.title,
        name=run.name,
        sub=f"{run.name}{f' · {paper}' if paper else ''}",
        state="" if run.summary else _note("This run is not finished: the page shows it as far as it is."),
        links=each('<a href="#{0}">{1}</a>', shown),
        body=each('<section id="{0}"><h2>{1}</h2>{2}</section>', shown),
        footer=" · ".join(filter(None, footer)),
    )


def _drawn(function: Callable[[RecordedRun], Iterable[Markup]], run: RecordedRun) -> Markup:
    """A function's figures; what cannot be drawn is named in its place and costs nothing else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # letters that matplotlib's own font lacks: the browser's have them
            return Markup("").join(function(run))
    except Exception as error:
        where = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        return _note(f"A figure could not be drawn ({where}: {type(error).__name__}: {error}).", "note failed")


def _result(run: RecordedRun) -> Markup:
    if not run.rows:
        return _note("No round has been finished yet.")
    over = "accuracy over all samples" if run.hides_clients else "mean accuracy"
    tiles = [(f"{100 * row['accuracy'][kind]['mean']:.1f} %", f"{over}, {kind}") for kind, row in run.last.items()]
    if run.better and "worst-10%" in (better := run.last[run.better]["accuracy"][run.better]):
        tiles.append((f"{100 * better['worst-10%']:.1f} %", f"worst 10 % of clients, {run.better}"))
    rounds, planned = len(run.rounds), run.settings.get("rounds", len(run.rounds))
    early = bool(run.summary and run.summary.get("stopped-early"))
    whole = run.summary and not early
    tiles.append((f"{rounds}" if whole else f"{rounds} of {planned}", "rounds, stopped early" if early else "rounds"))
    sizes, lost, seconds = figures.totals(run.rows)
    tiles.append((str(len(run.sites)), "clients"))
    tiles += [(human_bytes(sizes[way]), f"{way} in all") for way in ("up", "down")]
    tiles.append((human_seconds(run.summary["seconds"] if run.summary else seconds), "time"))
    tiles.append((str(sum(lost.values()) - lost["late"]), "lost replies"))
    if "epsilon" in run.rows[-1]:
        costs = f"privacy spent by the client that it costs most, δ = {run.settings['dp-delta']:g}"
        tiles.append((f"ε ≤ {run.rows[-1]['epsilon']:.2f}", costs))
    shown = Markup('<div class="tiles">{}</div>').format(each("<div><b>{}</b><span>{}</span></div>", tiles))
    if run.compared:
        text = figures.sentence(run.compared) + f"; baselines not found beside it: {run.absent}" * (run.absent > 0)
        shown = _note(text, "note gain") + table(figures.side_by_side(run.compared)) + shown
    return shown + _accuracies(run) + _metrics(run)


def _privacy(run: RecordedRun) -> Markup:
    lines = each("<p>{}</p>", [(line,) for line in protections(run.settings)])
    if not run.audit:
        return lines
    leaks = sum(attack["above_chance"] for attack in run.audit)
    above = f"{leaks} of {len(run.audit)} attacks name training samples above chance."
    verdict = _note(above, "note leak") if leaks else _note("None above chance.")
    return lines + verdict + table(figures.audit_table(run.audit), words=True)


def _accuracies(run: RecordedRun) -> Markup:
    if not run.last:
        return Markup("")
    accuracy = {}
    for kind, row in run.last.items():
        shares = [client["accuracy"][kind] for client in row["clients"].values() if kind in client["accuracy"]]
        accuracy[kind] = row["accuracy"][kind] | fairness(shares)
    validation = {kind: row["validation"][kind] for kind, row in run.last.items() if kind in row.get("validation", {})}
    best = {kind: one for kind in run.last if (one := best_of(run.rows, kind))}
    order = ("mean", "weighted", "worst-10%", "worst-20%", "worst-40%", "best-10%", "std", "variance")
    note = (
        f"Test accuracy after round {next(iter(run.last.values()))['evaluated-after-round']} in percent, over the "
        "clients (their spread as in FedPCL, Tables 12 and 13; std in points, variance in points²), and the best mean "
        f"with its round, which was {figures.chosen(best.values())}.{run.hidden}"
    )
    rows = figures.accuracy_rows(accuracy, best, validation, order)
    return table(Table(("", *((MEASURES | SPREAD)[name] for name in order), "best mean"), rows, note))


def _metrics(run: RecordedRun) -> Markup:
    note = f"Metrics beside accuracy at the last evaluation, over the clients that have them.{run.hidden}"
    rows = figures.metric_rows(next((row["metrics"] for row in reversed(run.rows) if row.get("metrics")), {}), 4)
    return table(Table(("", *MEASURES.values()), rows, note)) if rows else Markup("")


def _troubles(run: RecordedRun) -> Markup:
    rows: list[tuple[str, str, str, str]] = []
    for row in run.rows:
        where = "final" if row["kind"] == "final" else str(row["round"])
        rows += [(where, kind, site, reason) for kind, site, reason in troubles(row)]
        if row["void"]:
            rows.append((where, "void", "all", f"{row.get('void-because', 'not kept')}; nothing was merged"))
    if not rows:
        return Markup("<p>None: every reply came in time and was accepted.</p>" if run.rows else "")
    more = len(rows) - MOST_TROUBLES
    rest = f" {more} more are in metrics.jsonl." if more > 0 else ""
    note = f"Replies that the server could not use, and why; the rounds went on without them.{rest}"
    return table(Table(("round", "what", "client", "reason"), rows[:MOST_TROUBLES], note), words=True)


def _clients(run: RecordedRun) -> Markup:
    last = {kind: row["clients"] for kind, row in run.last.items()}
    sizes = [key for key in SIZES if key != "validation-samples" or any(key in facts for facts in run.sites.values())]
    rows = []
    for site, facts in run.sites.items():
        line = [site, str(facts.get("domain") or "–"), str(facts.get("arch", "–"))]
        line += [f"{facts.get(key):,}" if key in facts else "–" for key in sizes]
        shares = (clients[site]["accuracy"].get(kind) if site in clients else None for kind, clients in last.items())
        rows.append([*line, *("–" if share is None else f"{100 * share:.1f}" for share in shares)])
    names = [key.replace("train-", "training-").replace("-", " ") for key in sizes]
    heads = ["client", "domain", "model", *names, *(f"{kind}, %" for kind in run.last)]
    shown = table(Table(heads, rows, run.hidden), words=True)
    return shown if len(rows) <= 20 else _folded(f"{len(rows)} clients", shown)


def _settings(run: RecordedRun) -> Markup:
    defaults = default_run_config()
    changed = {key for key, value in run.settings.items() if key in defaults and defaults[key] != value}
    own = [(key, _value(run.settings[key]), _value(defaults[key])) for key in run.settings if key in changed]
    rest = [(key, _value(value)) for key, value in run.settings.items() if key not in changed]
    first = table(Table(("setting", "value", "default"), own, "Set for this run."), words=True) if own else Markup("")
    others = table(Table(("setting", "value"), rest), words=True)
    return first + _folded(f"{len(rest)} settings at their defaults", others)


def table(shown: Table, words: bool = False) -> Markup:
    """A table in a box that scrolls sideways by itself; columns of ``words`` begin at the left."""
    above = Markup('<p class="above">{}</p>').format(shown.note) if shown.note else ""
    th = Markup('<th scope="col">{}</th>')
    head = Markup("").join(th.format(text) if text else Markup("<td></td>") for text in shown.heads)
    body = each("<tr>{}</tr>", [(each("<td>{}</td>", [(text,) for text in row]),) for row in shown.rows])
    card = """<div class="card">{}<div class="box" tabindex="0"><table{}><thead><tr>{}</tr></thead>
<tbody>{}</tbody></table></div></div>"""
    return Markup(card).format(above, Markup(' class="words"' if words else ""), head, body)


def _note(text: str, kind: str = "note") -> Markup:
    return Markup('<p class="{}">{}</p>').format(kind, text)


def _folded(title: str, body: Markup) -> Markup:
    return Markup("<details><summary>{}</summary>{}</details>").format(title, body)


def _value(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else ("“”" if value == "" else str(value))
