"""The page itself: HTML with everything inside, for a telephone's screen and a desk's, light and dark.

Names of sites, classes and domains and the reasons of failures come from clients: every text goes through `escape`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, Literal, get_args

from protofl_common.basics.files import write_text
from protofl_common.config.options import Scalar, keys_of
from protofl_common.config.sections import DataSettings, keys_that_change
from protofl_common.experiment.settings import default_run_config
from protofl_common.privacy.plan import protections
from protofl_common.report.figures import FIGURES
from protofl_common.report.figures.drawing import Drawing
from protofl_common.report.markdown import as_markdown
from protofl_common.report.reading import Run, read_run
from protofl_common.report.style import CSS, POLICY, SCRIPT
from protofl_common.runs.comparison import HEADS, note_on, sentence, table_rows
from protofl_common.runs.evaluation_metrics import RECALL
from protofl_common.runs.folder import TROUBLE
from protofl_common.runs.metrics import HIDDEN, best_of, cells, fairness, human_bytes, human_seconds, short_best


class Html(str):
    """Text that is HTML already."""


MOST_TROUBLES = 300
"""Rows of the table of lost replies; the rest is counted."""
Size = Literal["parameters", "train-samples", "validation-samples", "test-samples"]
SIZES: tuple[Size, ...] = get_args(Size)
Row = Sequence[str]
AUDIT_HEADS = (
    *("attack", "samples of a class", "classes", "advantage", "likeliest is a member"),
    "likeness of image (others)",
)


def write_report(folder: Path, against: Path | None = None) -> Path:
    """Draw ``report.html`` of the run in ``folder``, finished or not, and ``report.md`` beside it; the page's path.

    ``against``: the folder of another run, whose curve is drawn beside it. SettingsError when a folder holds no run,
    OSError when the page cannot be written.
    """
    path, run = folder / "report.html", read_run(folder, against)
    write_text(folder / "report.md", as_markdown(run))
    write_text(path, page(run))
    return path


def page(run: Run) -> str:
    """The whole page."""
    sections = [("Result", _result(run)), ("Privacy", _privacy(run))]
    for name, functions in FIGURES.items():
        drawn = [figure for function in functions for figure in _drawn(function, run)]
        if drawn:
            sections.append((name, f'<div class="figures">{"".join(drawn)}</div>'))
    sections += [("Lost replies", _troubles(run)), ("Clients", _clients(run)), ("Settings", _settings(run))]
    state = "" if run.finished else "This run is not finished: the page shows it as far as it is."
    paper = str(run.facts.get("paper", ""))
    sub = f"{run.name}{f' · {paper}' if paper else ''}"
    footer = f"{_footer(run)}<script>{SCRIPT}</script>"
    return framed(run.title, sub, [(name, body) for name, body in sections if body], state, footer, run.name)


def framed(title: str, sub: str, shown: Sequence[tuple[str, str]], note: str, footer: str = "", name: str = "") -> str:
    """A page of these sections, each a name and HTML; the other arguments are text, but for ``footer``."""
    links = "".join(f'<a href="#{_anchor(name)}">{escape(name)}</a>' for name, _ in shown)
    body = "".join(f'<section id="{_anchor(name)}"><h2>{escape(name)}</h2>{text}</section>' for name, text in shown)
    said = f'<p class="note">{escape(note)}</p>' if note else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark">{POLICY}'
        f"<title>{escape(title)}{f' – {escape(name)}' if name else ''}</title><style>{CSS}</style></head>\n<body><main>"
        f'<header><h1>{escape(title)}</h1><p class="sub">{escape(sub)}</p>{said}<nav>{links}</nav></header>\n'
        f"{body}{footer}</main></body></html>\n"
    )


def _drawn(function: Callable[[Run], list[Drawing]], run: Run) -> list[str]:
    """A function's figures; what cannot be drawn is named in its place and costs nothing else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # letters that matplotlib's own font lacks: the browser's have them
            found = function(run)
    except Exception as error:
        what = f"{function.__module__.rpartition('.')[2]}.{function.__name__}: {type(error).__name__}: {error}"
        return [f'<p class="note failed">A figure could not be drawn ({escape(what)}).</p>']
    return [
        f'<figure id="{one.name}"{" class=wide" if one.wide else ""}><h3>{escape(one.title)}</h3>'
        f'<button type="button" class="copy" aria-live="polite">Copy data</button>'
        f'<textarea aria-label="data of the figure" readonly hidden>{escape(one.data)}</textarea>'
        f'<div class="box">{one.svg}</div><figcaption>{escape(one.caption)}</figcaption></figure>'
        for one in found
    ]


def _result(run: Run) -> str:
    """The figures that count, large, and the table of the last evaluation."""
    rounds = run.rounds
    if not run.rows:
        return '<p class="note">No round has been finished yet.</p>'
    tiles = []
    for kind in run.kinds:
        figures = run.evaluations(kind)[-1]["accuracy"][kind]
        over = "mean accuracy" if "std" in figures else "accuracy over all samples"
        tiles.append((f"{100 * figures['mean']:.1f} %", f"{over}, {kind}"))
    last = run.evaluations(run.better)[-1]["accuracy"][run.better] if run.better else {}
    if "worst-10%" in last:
        tiles.append((f"{100 * last['worst-10%']:.1f} %", f"worst 10 % of clients, {run.better}"))
    planned = run.settings.get("rounds", len(rounds))
    early = bool(run.summary and run.summary.get("stopped-early"))
    whole = run.finished and not early
    tiles.append(
        (str(len(rounds)) if whole else f"{len(rounds)} of {planned}", "rounds, stopped early" if early else "rounds")
    )
    tiles.append((str(len(run.sites)), "clients"))
    up, down = (sum(row["bytes"][way] for row in run.rows) for way in ("up", "down"))
    tiles += [(human_bytes(up), "up in all"), (human_bytes(down), "down in all")]
    seconds = run.summary["seconds"] if run.summary else sum(row["seconds"]["total"] for row in run.rows)
    tiles.append((human_seconds(seconds), "time"))
    lost = sum(len(row[kind]) for row in run.rows for kind in TROUBLE if kind != "late")
    tiles.append((str(lost), "lost replies"))
    if "epsilon" in run.rows[-1]:
        tiles.append(
            (
                f"ε ≤ {run.rows[-1]['epsilon']:.2f}",
                f"privacy spent by the client that it costs most, δ = {run.settings['dp-delta']:g}",
            )
        )
    shown = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for value, name in tiles)
    return f'{_comparison(run)}{_against(run)}<div class="tiles">{shown}</div>{_accuracies(run)}{_metrics(run)}'


def _privacy(run: Run) -> str:
    """Show what protected the clients' samples, and how well."""
    lines = "".join(f"<p>{escape(line)}</p>" for line in protections(run.settings))
    if not run.audit:
        return lines
    leaks = sum(one["above_chance"] for one in run.audit)
    said = f"{leaks} of {len(run.audit)} attacks name training samples above chance." if leaks else "None above chance."
    note = (
        "Membership inference by whoever has the messages and the clients' models: 0 is guessing, 1 names all members; "
        "± three deviations of guessing. Inversion makes an image from each prototype: its correlation with training "
        "samples, and with the class's test samples. Other attacks may find more."
    )
    kind = "note leak" if leaks else "note"
    return f'{lines}<p class="{kind}">{escape(said)}</p>{table(AUDIT_HEADS, audit_rows(run.audit), note, words=True)}'


def audit_rows(findings: Sequence[dict[str, Any]]) -> list[Row]:
    """A row for each attack and size of class."""
    return [
        (
            f"{one['attack']}{' (above chance)' if one['above_chance'] else ''}",
            str(one["samples"]),
            str(one["classes"]),
            f"{one['advantage']:+.2f} ± {3 * one['error']:.2f}",
            f"{one['named']} ({one['by_chance']:.1f} by chance)",
            f"{one['similarity']:.2f} ({one['similarity_of_others']:.2f})" if "similarity" in one else "",
        )
        for one in findings
    ]


def _comparison(run: Run) -> str:
    """The run beside its baselines, where it has any."""
    if not run.compared:
        return ""
    rows = table(HEADS, table_rows(run.compared), note_on(run.compared))
    return f'<p class="note gain">{escape(sentence(run.compared))}</p>{rows}'


def _against(run: Run) -> str:
    """A sentence on the reference."""
    if run.reference is None:
        return ""
    other, kinds = run.reference, [kind for kind in run.kinds if kind in run.reference.kinds]
    found = []
    for kind in kinds:
        mine, its = (100 * one.evaluations(kind)[-1]["accuracy"][kind]["mean"] for one in (run, other))
        found.append(f"{kind} {mine:.1f} % here, {its:.1f} % there")
    data = {*keys_of(DataSettings), "seed"} - keys_that_change("machine")
    differs = [key for key in sorted(data) if run.settings.get(key) != other.settings.get(key)]
    clients = ["number of clients"] if len(run.sites) != len(other.sites) else []
    same = f"not on the same data: {', '.join([*differs, *clients])}" if differs or clients else "the same data"
    text = f"Beside {other.name} ({other.title}): {'; '.join(found) or 'no figure that both have'}; {same}."
    return f'<p class="note">{escape(text)} One run each: a difference may be chance.</p>'


def _accuracies(run: Run) -> str:
    """The last evaluation: mean, spread over the clients, and the best mean of the run."""
    rows: list[Row] = []
    chosen_on: set[str] = set()
    for kind in run.kinds:
        evaluated = run.evaluations(kind)
        last = evaluated[-1]
        shares = [client["accuracy"][kind] for client in last["clients"].values() if kind in client["accuracy"]]
        spread = last["accuracy"][kind] | fairness(shares)
        parts = cells(spread, ("mean", "weighted", "worst-10%", "worst-20%", "worst-40%", "best-10%", "std"))
        best = best_of(run.rows, kind)
        rows.append([kind, *parts, *cells(spread, ["variance"], 10_000, 1), short_best(best) if best else "–"])
        chosen_on |= {best.get("chosen-on", "test")} if best else set()
        if kind in last.get("validation", {}):
            *means, spread_of_means = cells(last["validation"][kind])
            rows.append([f"{kind}, validation", *means, "–", "–", "–", spread_of_means, "–", "–"])
    if not rows:
        return ""
    after = run.evaluations(run.kinds[0])[-1]["evaluated-after-round"]
    heads = ("", "mean", "by samples", "worst 10 %", "worst 20 %", "worst 40 %", "best 10 %", "std", "variance")
    note = (
        f"Test accuracy after round {after} in percent, over the clients (their spread as in FedPCL, Tables 12 and 13; "
        "std in points, variance in points²), and the best mean with its round, which was "
        f"{' and '.join(f'chosen on {data} data' for data in sorted(chosen_on)) or 'not found'}.{_hidden(run)}"
    )
    return table((*heads, "best mean"), rows, note)


def _hidden(run: Run) -> str:
    """A sentence on figures that no single client has told."""
    return f" {HIDDEN}" if run.hides_clients else ""


def _metrics(run: Run) -> str:
    """The last evaluation's metrics beside accuracy, over the clients; recalls of classes are a figure."""
    last = next((row["metrics"] for row in reversed(run.rows) if row.get("metrics")), {})
    rows = [[name, *cells(figures, factor=1, digits=4)] for name, figures in last.items() if f"/{RECALL}/" not in name]
    note = f"The metrics that the run asked for, at its last evaluation, over the clients that have them.{_hidden(run)}"
    return table(("", "mean", "by samples", "worst 10 %", "std"), rows, note) if rows else ""


def _troubles(run: Run) -> str:
    """Who failed, was refused, missing or late, in which round, and why."""
    found: list[Row] = []
    for row in run.rows:
        where = "final" if row["kind"] == "final" else str(row["round"])
        for kind in TROUBLE:
            entries = row[kind]
            reasons = entries if isinstance(entries, dict) else dict.fromkeys(entries, "no answer in time")
            found += [(where, kind, site, str(reason)) for site, reason in reasons.items()]
        if row["void"]:
            found.append((where, "void", "all", f"{row.get('void-because', 'not kept')}; nothing was merged"))
    if not run.rows:
        return ""
    if not found:
        return "<p>None: every reply came in time and was accepted.</p>"
    more = len(found) - MOST_TROUBLES
    rest = f" {more} more are in metrics.jsonl." if more > 0 else ""
    note = f"Replies that the server could not use, and why; the rounds went on without them.{rest}"
    return table(("round", "what", "client", "reason"), found[:MOST_TROUBLES], note, words=True)


def _clients(run: Run) -> str:
    """Who took part, with the last accuracies."""
    last = {kind: run.evaluations(kind)[-1]["clients"] for kind in run.kinds}
    sizes = [key for key in SIZES if key != "validation-samples" or any(key in one for one in run.sites.values())]
    rows: list[Row] = []
    for site, facts in run.sites.items():
        line = [site, str(facts.get("domain") or "–"), str(facts.get("arch", "–"))]
        line += [f"{facts[key]:,}" if key in facts else "–" for key in sizes]
        for kind, clients in last.items():
            share = clients[site]["accuracy"].get(kind) if site in clients else None
            line.append("–" if share is None else f"{100 * share:.1f}")
        rows.append(line)
    names = [key.replace("train-", "training-").replace("-", " ") for key in sizes]
    heads = ["client", "domain", "model", *names]
    shown = table([*heads, *(f"{kind}, %" for kind in run.kinds)], rows, _hidden(run).strip(), words=True)
    return shown if len(rows) <= 20 else f"<details><summary>{len(rows)} clients</summary>{shown}</details>"


def _settings(run: Run) -> str:
    """All of them, those that differ from the defaults first and marked."""
    defaults = default_run_config()

    def changed(key: str, value: Scalar) -> bool:
        return key in defaults and defaults[key] != value

    own = [(key, _value(value), _value(defaults[key])) for key, value in run.settings.items() if changed(key, value)]
    rest = [(key, _value(value)) for key, value in run.settings.items() if not changed(key, value)]
    first = table(("setting", "value", "default"), own, "Set for this run.", words=True) if own else ""
    others = table(("setting", "value"), rest, "", words=True)
    return f"{first}<details><summary>{len(rest)} settings at their defaults</summary>{others}</details>"


def _footer(run: Run) -> str:
    versions = run.summary.get("versions", {}) if run.summary else {}
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    hints = [] if run.rows else ["protofl report draws this page again at any time"]
    if run.settings.get("statistics", "none") == "none" and run.rows:
        hints.append('statistics = "features" lets clients tell test features, and similarities of frozen backbones')
    return f"<footer><p>{escape(' · '.join(['ProtoFL', *([packages] if packages else []), *hints]))}</p></footer>"


def table(heads: Iterable[str], rows: Iterable[Row], note: str, words: bool = False) -> str:
    """A table in a box that scrolls sideways by itself; columns of ``words`` begin at the left."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{_safe(text)}</td>" for text in row) + "</tr>" for row in rows)
    above = f'<p class="above">{escape(note)}</p>' if note else ""
    kind = ' class="words"' if words else ""
    inside = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="card">{above}<div class="box" tabindex="0"><table{kind}>{inside}</table></div></div>'


def _safe(text: str) -> str:
    return text if isinstance(text, Html) else escape(text)


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else ("“”" if value == "" else str(value))


def _anchor(name: str) -> str:
    return escape(name.lower().replace(" ", "-"))
