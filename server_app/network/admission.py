"""Who of the sites fits the others, whether they are enough, whom a round asks, and words for who cannot take part."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from protofl_common.basics.seeding import derive_seed
from protofl_common.basics.text import in_order, printable
from protofl_common.config.architectures import ARCHITECTURES, members_of
from protofl_common.experiment.settings import Settings
from protofl_common.maths.aggregation import FEWEST
from protofl_common.privacy.masks import FEWEST_SUMMED
from protofl_common.wire.records import MOST_SITES, SiteCard

Cards = Mapping[str, SiteCard]


class FederationError(RuntimeError):
    """The federation cannot work; the message says who is missing or what does not fit together."""


def check_fit(settings: Settings, cards: Cards, divided_among: int = 0) -> None:
    """The sites must agree on the classes, on the division of common data, and on what averaged weights need."""
    one_model, algo = settings.exchange.needs_one_architecture, settings.run.algo
    check_division(settings, cards, divided_among)
    classes = "set `classes` to the class names in label order"
    must_agree("classes", cards, lambda card: ", ".join(card.classes), classes)
    if one_model:
        named = {*ARCHITECTURES, settings.model.arch, *members_of(settings.model.models)}
        if own := next((name for name, card in cards.items() if card.arch not in named), ""):
            network = f"{own} has a network of its own, {cards[own].arch}; {algo} averages weights"
            raise FederationError(f"{network}: name it in the run's `models`")
        hint = f"{algo} averages weights and needs one architecture on all sites"
        must_agree("arch", cards, lambda card: card.arch, hint)
        tables = {name: card for name, card in cards.items() if card.columns}
        hint = "rename or reorder them (`columns` in a node config); these are digests, each site's log has the names"
        must_agree("the names or the order of columns", tables, lambda card: card.columns, hint)
    if one_model or len({card.weights for card in cards.values()}) > 1:
        hint = "bring inputs of one shape; for images set `image-size`"
        must_agree("the shape of their inputs", cards, lambda card: "×".join(map(str, card.input_shape)), hint)
        hint = f"{algo} needs one shape of what it shares; these are digests"
        must_agree("weights", cards, lambda card: f"{card.weights} of {card.arch}", hint)


def check_division(settings: Settings, cards: Cards, before: int = 0) -> None:
    """All must divide a common data set alike, and in a resumed run among as many clients as ``before`` (0: any)."""
    dividing = {name: card for name, card in cards.items() if card.num_partitions}
    if settings.data.partition == "own" or not dividing:
        return
    hint = "they divide one data set: give all the same number"
    must_agree("num-partitions", dividing, lambda card: str(card.num_partitions), hint)
    now = next(iter(dividing.values())).num_partitions
    if before and now != before:
        how = f"in simulation give --federation-config 'num-supernodes={before}' (protofl run --clients {before})"
        raise FederationError(f"resume = true: the run's data are divided among {before} clients, not {now}; {how}")


def must_agree(what: str, cards: Mapping[str, Any], value_of: Callable[[Any], str], hint: str) -> None:
    """FederationError where the sites' values differ: each value, with the sites that have it."""
    sites_of = defaultdict(list)
    for name in in_order(cards):
        sites_of[value_of(cards[name])].append(name)
    if len(sites_of) > 1:
        lines = [f"  {printable(value)}: {', '.join(sites)}" for value, sites in sites_of.items()]
        raise FederationError(f"the sites differ in {what}; {hint}:\n" + "\n".join(lines))


def check_new(settings: Settings, cards: Cards, new: Collection[str]) -> None:
    """FederationError where no client is of ``new-domain``, or none is left to train."""
    domain, domains = settings.federation.new_domain, {card.domain for card in cards.values()}
    if domain and domain not in domains:
        choices = ", ".join(sorted(domains))
        raise FederationError(f"new-domain = {domain!r}: no client is of it; choose one of {choices}")
    if len(new) == len(cards):
        raise FederationError(f"new-clients = {settings.federation.new_clients}: no client is left to train")


def check_number(settings: Settings, sites: int, liars: int, fewest: int) -> None:
    """FederationError where a round asks fewer sites than it needs: for replies, against liars, or for a secure sum."""
    federation, merging = settings.federation, settings.bounds.merging
    asked = number_asked(sites, federation.participation, fewest)
    share = "" if federation.participation == 1 else f" (participation = {federation.participation:g})"
    asks = f"a round asks only {asked} sites{share}"
    if asked < federation.min_replies:
        raise FederationError(f"min-replies = {federation.min_replies}: {asks}")
    if asked < 2 * liars + 1:
        raise FederationError(f"liars = {liars}: {asks}, and {2 * liars + 1} are the fewest that can outvote {liars}")
    if asked < FEWEST and merging not in ("auto", "mean"):
        raise FederationError(f"merging = {merging!r}: {asks}, and {FEWEST} are the fewest that can outvote one")
    if settings.privacy.sums_only and not FEWEST_SUMMED <= asked <= MOST_SITES:
        why = f"{FEWEST_SUMMED} are the fewest whose sum hides one from the others, {MOST_SITES} the most"
        raise FederationError(f"secure aggregation: a round asks {asked} sites{share}; {why}")


def number_asked(sites: int, participation: float, fewest: int = 1) -> int:
    """How many of ``sites`` take part in a round: ``participation`` of them, rounded, at least ``fewest`` or all."""
    return max(1, min(fewest, sites), round(participation * sites))


def sample_sites(sites: Iterable[str], participation: float, seed: int, server_round: int, least: int = 1) -> list[str]:
    """`number_asked` of the sites, in natural order; seeded, by their names: Flower's node ids are random."""
    ordered = in_order(sites)
    if (number := number_asked(len(ordered), participation, least)) == len(ordered):
        return ordered
    generator = np.random.default_rng(derive_seed(seed, "sampling", server_round))
    return [ordered[index] for index in sorted(generator.choice(len(ordered), size=number, replace=False))]


def drop_outs(sites: Iterable[str], rate: float, seed: int, server_round: int) -> list[str]:
    """Return the sites that do not answer in a round (``drop-rate``): each draws a lot of its own, in every round."""
    lots = {site: np.random.default_rng(derive_seed(seed, "drop", site, server_round)).random() for site in sites}
    return [site for site, lot in lots.items() if lot < rate]


def odd_ones(settings: Settings, cards: Cards, divided_among: int, least: int) -> dict[str, str]:
    """Why sites do not fit the others, where those are more than any that agree otherwise, and at least so many."""
    divided, groups = divided_among or division_of(cards), defaultdict(list)
    for name, card in cards.items():
        fits = settings.data.partition == "own" or card.num_partitions in (0, divided)
        alike = (*model_of(card), card.columns) if settings.exchange.needs_one_architecture else (card.weights,)
        groups[fits, card.classes, *alike].append(name)
    largest, *others = sorted(groups.values(), key=len, reverse=True)
    if not others or len(largest) == len(others[0]) or len(largest) < least:
        return {}
    usual, odd = {name: cards[name] for name in largest}, dict[str, str]()
    for name in in_order(cards.keys() - usual.keys()):
        try:
            check_fit(settings, usual | {name: cards[name]}, divided_among)
        except FederationError as error:
            odd[name] = str(error)
    return odd


def division_of(cards: Cards) -> int:
    """Among how many clients the data set is divided, as most say; 0 where sites bring data of their own."""
    claims = Counter(card.num_partitions for card in cards.values())
    return max(claims, key=lambda number: (claims[number], not number, number), default=0)


def model_of(card: SiteCard) -> tuple[object, ...]:
    return card.weights, card.arch, card.input_shape


def most_common(cards: Cards) -> SiteCard:
    """Return the card with the most common inputs, the smallest of several, and among these the most common network."""
    shapes = Counter(card.input_shape for card in cards.values())
    models = Counter(map(model_of, cards.values()))

    def votes(name: str) -> tuple[int, int, int]:
        shape = cards[name].input_shape
        return shapes[shape], -math.prod(shape), models[model_of(cards[name])]

    return cards[max(in_order(cards), key=votes)]


def explained(problems: Mapping[int, str]) -> str:
    """Each distinct problem once, with the sites that have it, or how many clients where these say no name."""
    whose: dict[str, list[str]] = defaultdict(list)
    for reason in problems.values():
        named = re.match(r"site ([\w.-]+): ", reason)
        whose[reason[named.end() :] if named else reason].append(named[1] if named else "")
    return "\n".join(f"{_who(names)} cannot take part: {why}" for why, names in whose.items())


def _who(names: list[str]) -> str:
    others = names.count("")
    return ", ".join(in_order(filter(None, names)) + [f"{others} client{'s' * (others > 1)}"] * (others > 0))
