"""``README.md`` beside an exported model: what it is for, what it learnt from, and what chose it."""

import math
from collections.abc import Iterator, Mapping

from protofl_common.config.sections import keys_that_change
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import default_run_config
from protofl_common.models.trained import ModelCard, TrainedModel
from protofl_common.runs.figures import Table
from protofl_common.runs.folder import Summary

NAME = "README.md"


def model_card(trained: TrainedModel, unknown_above: float, summary: Summary | None) -> str:
    """The text; ``summary``: of the run that the model is of, where it is at hand."""
    card, row = trained.card, CATALOG.get(trained.card.algorithm)
    facts = {
        "network": card.arch + (f", behind the frozen backbones {', '.join(card.backbones)}" if card.backbones else ""),
        "method": f"{row.title} ({row.paper})" if row else card.algorithm,
        "run": f"{card.run}, after round {card.round}" + (f", Flower run {card.flower_run}" if card.flower_run else ""),
        "trained at": card.site + (f", of the domain {card.domain}" if card.domain else ""),
        "inputs": f"{card.input_type} {list(card.input_shape)}",
        "classes": f"{len(card.classes)}: {', '.join(card.classes)}",
        **(_of_run(summary) if summary else {}),
    }
    head = [f"# A model of {card.site}", "", *_table(facts), ""]
    return "\n".join([*head, *_use(card, unknown_above), *_figures(card, unknown_above)])


def _of_run(summary: Summary) -> dict[str, str]:
    defaults, elsewhere = default_run_config(), keys_that_change("name", "machine", "waiting", "display")
    settings = {key: value for key, value in summary["settings"].items() if key not in elsewhere}
    changed = {key: value for key, value in settings.items() if value != defaults.get(key)}
    return {
        "data": f"{summary['dataset']}, partition {summary['partition']}, {len(summary['clients'])} clients",
        "settings that are not the defaults": ", ".join(f"{key} = {value}" for key, value in changed.items()) or "none",
        "versions": ", ".join(f"{name} {number}" for name, number in summary.get("versions", {}).items()),
    }


def _use(card: ModelCard, unknown_above: float) -> Iterator[str]:
    yield from ("## Intended use", "")
    yield f"Inputs like those of {card.site}, of the classes above; every input is given one of them."
    if math.isfinite(unknown_above):
        yield f"An input farther than {unknown_above:.4g} from every prototype is called unknown."
    yield "Nothing has been measured of inputs from elsewhere, of other groups of people or devices, or of later times."
    yield "Measure on samples of your own before anything depends on it; it is no substitute for a person's judgement."
    yield from ("", "`protofl predict FOLDER FILE…` predicts with it.", "")


def _figures(card: ModelCard, unknown_above: float) -> Iterator[str]:
    when = f"the best round, chosen on {card.chosen_on} data" if card.chosen_on else "the last round"
    yield from ("## Figures", "", f"On {card.test_samples} test samples of {card.site}, after {when}:", "")
    yield from _table({f"right by {way}": f"{100 * share:.2f} %" for way, share in card.accuracy.items()})
    yield ""
    where = "the site's validation samples" if card.calibrated_on == "validation" else "these same test samples"
    limit = ", and the limit above which an input is unknown" if math.isfinite(unknown_above) else ""
    yield f"Chosen on {where}: that it predicts by {card.inference}, the scale of"
    yield f"probabilities by prototype{limit}."
    if "test" in (card.calibrated_on, card.chosen_on):
        yield "What was chosen on test data makes these figures a little too high."
    yield ""


def _table(facts: Mapping[str, str]) -> Iterator[str]:
    return Table(("", ""), list(facts.items()), words=(0, 1)).as_markdown()
