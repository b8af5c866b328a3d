"""Files for the report beside the metrics: the clients, and the prototypes that they sent.

``sites.json``                      classes, and per site its architecture, domain, samples and, where known, its
                                    training and test samples of each class
``prototypes.jsonl``                a line per round: the margin of each class, of every client's prototypes and of
                                    the global ones (FedTGP, Figure 1); null where a class has none
``client-prototypes.safetensors``   the last round's client prototypes (of many clients, while a run goes on, those
                                    of every tenth round): means [P, D], labels [P], owners [P], and in
                                    the metadata the round and, as JSON, the sites that the owners number; beside
                                    them the global ones after that round
"""

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch

from protofl_common.basics.tensorfile import write_tensors
from protofl_common.config.datasets import REDIVIDED
from protofl_common.config.options import SettingsError
from protofl_common.data import DataError
from protofl_common.data.clients import domain_of
from protofl_common.data.division import shares_of
from protofl_common.data.store import data_if_cached
from protofl_common.maths.prototypes import Prototypes, margins
from protofl_common.runs.folder import MARGINS, SITES, MarginRow, RoundRow, SiteFacts, Sites
from protofl_common.wire.records import SiteCard
from server_app.callbacks.base import ActiveRun, Callback
from server_app.replies import RoundResult

MOST_ABSENT = 10  # Partitions per site up to which the data are divided: who claims a million keeps no server at it
FEW, EVERY = 2000, 10  # up to so many vectors are written after each round, more of them after every so many rounds


class Artifacts(Callback):
    def __init__(self) -> None:
        self._write: Callable[[], None] = lambda: None  # the last round's prototypes

    def on_start(self, run: ActiveRun) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        _check_same(run, sites := _sites(run))
        run.files.write(SITES, sites)

    def on_round(self, run: ActiveRun, row: RoundRow, result: RoundResult) -> None:
        sent, classes = result.prototypes, run.strategy.num_classes
        if not sent:
            return
        owned = run.strategy.prototypes
        margins_row: MarginRow = {
            "round": result.number,
            "global": None if owned is None else _numbers(margins(owned, classes)),
            "clients": {site: _numbers(margins(prototypes, classes)) for site, prototypes in sent.items()},
        }
        run.files.add(MARGINS, margins_row)
        self._write = partial(_write_owned, run.folder / "client-prototypes.safetensors", sent, owned, result.number)
        if sum(map(len, sent.values())) <= FEW or result.number % EVERY == 0:
            self._write()

    def on_end(self, run: ActiveRun, row: RoundRow, result: RoundResult) -> None:
        self._write()
        run.files.write(SITES, _sites(run))


def _sites(run: ActiveRun) -> Sites:
    row, cards, facts = run.strategy.row, run.federation.cards, _division(run)
    sites: dict[str, SiteFacts] = {site: {**_facts(card), **facts.get(site, {})} for site, card in cards.items()}
    classes, division = list(next(iter(cards.values())).classes), REDIVIDED.get(run.settings.data.partition, 1)
    return {"algorithm": row.title, "paper": row.paper, "classes": classes, "division": division, "sites": sites}


def _check_same(run: ActiveRun, sites: Sites) -> None:
    """SettingsError where a simulated client has other samples than before the run was stopped."""
    for site, was in run.files.sites().get("sites", {}).items() if run.federation.simulated else ():
        now = {**was, **sites["sites"].get(site, {})}
        if odd := [key for key, value in was.items() if key.endswith(("samples", "classes")) and value != now[key]]:
            changed = f"{site} has {odd[0]} = {now[odd[0]]}, and had {was[odd[0]]}"  # type: ignore[literal-required]
            raise SettingsError(f"resume = true: the data are not those that the run was started with: {changed}")


def _division(run: ActiveRun) -> dict[str, SiteFacts]:
    """Each site's samples of each class, by dividing the data once more; without sites that this does not fit."""
    cards, clients, settings = run.federation.cards, run.federation.num_partitions, run.settings
    if settings.privacy.sums_only or not 0 < clients <= MOST_ABSENT * len(cards):
        return {}
    try:
        if (data := data_if_cached(settings.data)) is None:
            return {}
        shares = shares_of(data, settings.data, settings.run.seed, clients)
    except (DataError, SettingsError, OSError):  # the server need not have the data, nor a module that reads them
        return {}
    placed = {site: card for site, card in cards.items() if card.num_partitions == clients > card.partition}
    facts: dict[str, SiteFacts] = {}
    for site, card in placed.items():
        share, classes = shares[card.partition], len(data.classes)
        train, test = (np.bincount(data.labels[rows], minlength=classes) for rows in (share.train, share.test))
        samples, domain = (len(share.train), len(share.test)), domain_of(data, share.train)
        has_classes = set(card.present) <= set(train.nonzero()[0].tolist())
        if (*samples, domain) == (card.train_samples, card.test_samples, card.domain) and has_classes:
            facts[site] = {"train-classes": train.tolist(), "test-classes": test.tolist()}
    return facts


def _facts(card: SiteCard) -> SiteFacts:
    parts = ("train", "test", "validation")
    sizes = {f"{part}-samples": size for part in parts if (size := getattr(card, f"{part}_samples"))}
    return cast(SiteFacts, {"arch": card.arch, "domain": card.domain, "parameters": card.parameters, **sizes})


def _numbers(values: torch.Tensor) -> list[float | None]:
    """Five digits of each, None for what is not a number."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values.tolist()]


def _write_owned(path: Path, sent: Mapping[str, Prototypes], merged: Prototypes | None, number: int) -> None:
    every, sizes = Prototypes.joined(sent.values()), torch.tensor([len(prototypes) for prototypes in sent.values()])
    arrays = {"means": every.means, "labels": every.labels, "owners": torch.repeat_interleave(sizes)}
    arrays |= {} if merged is None else {"global-means": merged.means, "global-labels": merged.labels}
    write_tensors(path, arrays, {"sites": json.dumps(list(sent), ensure_ascii=False), "round": str(number)})
