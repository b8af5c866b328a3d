"""Lines on what looks odd in a run: in its data before the first round, in its figures at the end.

Class counts are those in ``sites.json``: of clients that divide a data set, where the server can divide it too.
"""

import statistics
from collections.abc import Iterator, Sequence

from protofl_common.runs.folder import RoundRow, SiteFacts, Sites


def doubts_of_data(sites: Sites) -> Iterator[str]:
    """Yield a line for classes that are trained on, but tested nowhere."""
    counted = [counts for counts in sites.get("sites", {}).values() if "test-classes" in counts]
    trained, tested = (_added([counts[part] for counts in counted]) for part in ("train-classes", "test-classes"))
    names = zip(sites.get("classes", []), trained, tested, strict=False)
    if nowhere := [name for name, train, test in names if train and not test]:
        yield f"trained on, but tested nowhere: {', '.join(nowhere)}"


def _added(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*counts, strict=True)]


def doubts_of_outcome(rows: Sequence[RoundRow], final: RoundRow, sites: Sites) -> Iterator[str]:
    """Yield a line for rounds that changed nothing, and for accuracies that need no model."""
    rounds = [row for row in rows if row["kind"] == "round"]
    if idle := [row for row in rounds if row["void"]]:
        last = ", the last one among them" if rounds[-1]["void"] else ""
        yield f"{len(idle)} of {len(rounds)} rounds changed nothing{last}: {idle[-1].get('void-because', '')}"
    shares = [share for site in final["clients"] if (share := majority_share(sites.get("sites", {}).get(site, {})))]
    for kind, figures in final["accuracy"].items() if shares else ():
        if figures["mean"] <= (share := statistics.fmean(shares)) + 1e-9:
            naming = f"always naming each client's most frequent class is right for {100 * share:.1f} %"
            yield f"accuracy by {kind} is {100 * figures['mean']:.1f} %, no better than a guess: {naming}"


def majority_share(facts: SiteFacts) -> float:
    """Return the share of a client's most frequent class among its test samples; 0 where it is not known."""
    counts = facts.get("test-classes", [])
    return max(counts) / sum(counts) if any(counts) else 0.0
