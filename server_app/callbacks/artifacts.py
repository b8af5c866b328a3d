"""Files for the report beside the metrics: the clients, and the prototypes that they sent.

``sites.json``                      classes, and per site its architecture, domain, samples and,
                                    where known, its training and test samples of each class
``prototypes.jsonl``                a line per round: the margin of each class, of every client's
                                    prototypes and of the global ones (FedTGP, Figure 1); null
                                    where a class has none
``client-prototypes.safetensors``   the last round's client prototypes (of many clients, while a run
                                    goes on, those of every tenth round): means [P, D], labels [P],
                                    owners [P], and in the metadata the round and, as JSON, the
                                    sites that the owners number; beside them the global ones after
                                    that round
"""

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from protofl_common.basics.tensorfile import write_tensors
from protofl_common.config.datasets import PARTITIONS
from protofl_common.config.options import SettingsError
from protofl_common.data import DataError
from protofl_common.data.clients import annotated, domain_of
from protofl_common.data.division import shares_of
from protofl_common.data.raw import Ints
from protofl_common.data.store import data_if_cached
from protofl_common.maths.prototypes import Prototypes, margins
from protofl_common.runs.folder import MARGINS, SITES, MarginRow, RoundRow, SiteFacts, Sites
from protofl_common.tasks import Task
from protofl_common.wire.records import SiteCard
from server_app.callbacks.base import ActiveRun, Callback
from server_app.run.checkpoint import CannotResume
from server_app.run.replies import RoundResult

MOST_ABSENT = 10
"""Partitions per site up to which the data are divided again: a site that claims to be one of a
million must not keep the server busy."""

# Vectors that are written after each round; more of them are after every tenth
MOST_VECTORS_EACH_ROUND = 2000
ROUNDS_BETWEEN_WRITES = 10  # Rounds from one writing of more vectors to the next


class Artifacts(Callback):
    """Writes what the page shows of clients and of their prototypes."""

    def __init__(self) -> None:
        # writes the prototypes of the last round that had any
        self._write_prototypes: Callable[[], None] = lambda: None

    def on_start(self, run: ActiveRun) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        sites = _sites(run)
        _check_same(run, sites)
        run.files.write(SITES, sites)

    def on_round(self, run: ActiveRun, row: RoundRow, result: RoundResult) -> None:
        """Add a row of margins, and write the clients' prototypes unless they are too many.

        Many vectors are written after every tenth round only, and at the end.
        """
        sent = result.prototypes
        if not sent:
            return

        merged = run.strategy.prototypes
        classes = run.strategy.num_classes
        margins_of_sites = {}
        for site, prototypes in sent.items():
            margins_of_sites[site] = _numbers(margins(prototypes, classes))
        margins_row: MarginRow = {
            "round": result.number,
            "global": None if merged is None else _numbers(margins(merged, classes)),
            "clients": margins_of_sites,
        }
        run.files.add(MARGINS, margins_row)

        path = run.folder / "client-prototypes.safetensors"
        self._write_prototypes = partial(_write_owned, path, sent, merged, result.number)
        num_vectors = sum(len(prototypes) for prototypes in sent.values())
        if num_vectors <= MOST_VECTORS_EACH_ROUND or result.number % ROUNDS_BETWEEN_WRITES == 0:
            self._write_prototypes()

    def on_end(self, run: ActiveRun, row: RoundRow, result: RoundResult) -> None:
        self._write_prototypes()
        run.files.write(SITES, _sites(run))  # with the sites that came later


def _sites(run: ActiveRun) -> Sites:
    """Return the content of ``sites.json``: who takes part, and with which data."""
    cards = run.federation.cards
    counts_by_site = _counts_by_site(run)
    sites: dict[str, SiteFacts] = {}
    for site, card in cards.items():
        sites[site] = {**_facts(card), **counts_by_site.get(site, {})}

    return {
        "algorithm": run.strategy.row.title,
        "paper": run.strategy.row.paper,
        "classes": list(run.strategy.task.class_names),
        "division": PARTITIONS[run.settings.data.partition].version,
        "sites": sites,
    }


def _check_same(run: ActiveRun, sites: Sites) -> None:
    """Raise CannotResume if a simulated client of a resumed run has other samples than before.

    All numbers of samples in the file ``sites.json`` that the run left are compared.
    """
    if not run.federation.simulated:
        return
    for site, before in run.files.sites().get("sites", {}).items():
        # what is not known now, such as counts by class without the data, counts as unchanged
        now: dict[str, object] = {**before, **sites["sites"].get(site, {})}
        for key, value in before.items():
            if key.endswith(("samples", "classes")) and now[key] != value:
                changed = f"{site} has {key} = {now[key]}, and had {value}"
                raise CannotResume(
                    "resume = true: the data are not those that the run was started with: "
                    f"{changed}"
                )


def _counts_by_site(run: ActiveRun) -> dict[str, SiteFacts]:
    """Return each site's training and test samples of each class, by site.

    The server divides the data set once more, as the sites have done. Sites that introduced
    themselves with other samples than this gives are left out. Return {} if the server does not
    have the data, or shall only learn sums over sites.
    """
    settings = run.settings
    cards = run.federation.cards
    num_partitions = run.federation.num_partitions
    is_divisible = 0 < num_partitions <= MOST_ABSENT * len(cards)
    if settings.privacy.sums_only or not is_divisible:
        return {}
    try:
        data = data_if_cached(settings.data)
        if data is None:
            return {}
        shares = shares_of(data, settings.data, settings.run.seed, num_partitions)
    except (DataError, SettingsError, OSError):  # No data here, or no module that reads them
        return {}

    counts: dict[str, SiteFacts] = {}
    for site, card in cards.items():
        if card.num_partitions != num_partitions or card.partition >= num_partitions:
            continue
        share = shares[card.partition]
        train_labels = annotated(
            data.labels[share.train], settings.data, card.partition, num_partitions
        )
        train_C = _class_counts(data.task, train_labels)
        test_C = _class_counts(data.task, data.labels[share.test])
        computed = (len(share.train), len(share.test), domain_of(data, share.train))
        introduced = (card.train_samples, card.test_samples, card.domain)
        has_classes_of_card = all(train_C[label] for label in card.present)
        if computed == introduced and has_classes_of_card:
            counts[site] = {"train-classes": train_C, "test-classes": test_C}
    return counts


def _class_counts(task: Task, labels: Ints) -> list[int]:
    """Return the number of samples of each class."""
    counts: list[int] = task.class_counts(task.tensor(labels)).tolist()
    return counts


def _facts(card: SiteCard) -> SiteFacts:
    """Return what ``sites.json`` has of a site's introduction; hidden numbers (0) are left out."""
    facts: SiteFacts = {
        "arch": card.arch,
        "domain": card.domain,
        "parameters": card.parameters,
    }
    if card.train_samples:
        facts["train-samples"] = card.train_samples
    if card.test_samples:
        facts["test-samples"] = card.test_samples
    if card.validation_samples:
        facts["validation-samples"] = card.validation_samples
    return facts


def _numbers(values: torch.Tensor) -> list[float | None]:
    """Return the values, rounded to five significant digits; None for NaN and infinity."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values.tolist()]


def _write_owned(
    path: Path, sent: Mapping[str, Prototypes], merged: Prototypes | None, number: int
) -> None:
    """Write the prototypes of all clients after a round, with the client of each, to ``path``.

    ``merged`` are the global ones after that round.
    """
    joined = Prototypes.joined(sent.values())
    sizes = torch.tensor([len(prototypes) for prototypes in sent.values()])
    arrays = {
        "means": joined.means,
        "labels": joined.labels,
        "owners": torch.repeat_interleave(sizes),  # each prototype's place in the list of sites
    }
    if merged is not None:
        arrays["global-means"] = merged.means
        arrays["global-labels"] = merged.labels
    facts = {"sites": json.dumps(list(sent), ensure_ascii=False), "round": str(number)}
    write_tensors(path, arrays, facts)
