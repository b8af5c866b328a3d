"""Which sites fit together, whether they are enough, and which of them a round asks.

All errors say in words who cannot take part, and why.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from protofl_common.basics.seeding import derive_seed
from protofl_common.basics.text import in_order, printable
from protofl_common.config.architectures import ARCHITECTURES, members_of
from protofl_common.experiment.settings import Settings
from protofl_common.maths.aggregation import MIN_CLIENTS_FOR_MEDIAN
from protofl_common.privacy.masks import FEWEST_SUMMED
from protofl_common.wire.records import MOST_SITES, SiteCard
from server_app.run.bounds import number_asked

Cards = Mapping[str, SiteCard]


class FederationError(RuntimeError):
    """The federation cannot work; the message says who is missing or what does not fit together."""


@dataclass(frozen=True)
class Problem:
    """Why a node cannot take part."""

    text: str  # One line for people
    site: str = ""  # The site that has it; "" where the node may not be the site that it names
    waits: bool = False  # The site waits for its operator's decision, and is asked again


# -- whether sites fit together
def check_fit(settings: Settings, cards: Cards, divided_among: int = 0) -> None:
    """Raise FederationError unless the sites agree on all that their algorithm needs.

    They must agree on the task, the classes and the division of common data (`check_division`), and
    where weights are averaged, on the network, the shape of inputs and the columns of a table.
    ``divided_among`` is the number of clients of a run that is resumed, 0 for any.
    """
    check_division(settings, cards, divided_among)
    task = settings.data.task
    for name, card in cards.items():
        if card.task_kind != task:
            has = f"{name} has read its data with task = {card.task_kind!r}"
            raise FederationError(f"{has}, and the run has {task!r}")
    hint = "set `classes` to the class names in label order"
    must_agree("classes", cards, lambda card: ", ".join(card.classes), hint)

    needs_one_network = settings.exchange.needs_one_architecture
    if needs_one_network:
        _check_networks(settings, cards)
    # Digests of the names, types and shapes of what each site shares. Where they differ, the shape
    # of the inputs is the likelier cause, and is looked at first
    weights = {card.weights for card in cards.values()}
    if needs_one_network or len(weights) > 1:
        hint = "bring inputs of one shape; for images set `image-size`"
        must_agree("the shape of their inputs", cards, _shape_of, hint)
        hint = f"{settings.run.algo} needs one shape of what it shares; these are digests"
        must_agree("weights", cards, lambda card: f"{card.weights} of {card.arch}", hint)


def _check_networks(settings: Settings, cards: Cards) -> None:
    """Raise FederationError unless all sites have one network, of a name that the run knows.

    Those with tables must also have the same columns in the same order.
    """
    algo = settings.run.algo
    known = {*ARCHITECTURES, settings.model.arch, *members_of(settings.model.models)}
    for name, card in cards.items():
        if card.arch not in known:
            network = f"{name} has a network of its own, {card.arch}; {algo} averages weights"
            raise FederationError(f"{network}: name it in the run's `models`")
    hint = f"{algo} averages weights and needs one architecture on all sites"
    must_agree("arch", cards, lambda card: card.arch, hint)

    tables = {name: card for name, card in cards.items() if card.columns}
    hint = (
        "rename or reorder them (`columns` in a node config); these are digests, each site's log "
        "has the names"
    )
    must_agree("the names or the order of columns", tables, lambda card: card.columns, hint)


def _shape_of(card: SiteCard) -> str:
    return "×".join(map(str, card.input_shape))


def check_division(settings: Settings, cards: Cards, before: int = 0) -> None:
    """Raise FederationError unless the sites that divide a common data set divide it alike.

    All must divide it among the same number of clients: in a resumed run among ``before``, where
    that is not 0.
    """
    dividing = {name: card for name, card in cards.items() if card.num_partitions}
    if settings.data.partition == "own" or not dividing:
        return
    hint = "they divide one data set: give all the same number"
    must_agree("num-partitions", dividing, lambda card: str(card.num_partitions), hint)
    number = next(iter(dividing.values())).num_partitions
    if before and number != before:
        how = (
            f"in simulation give --federation-config 'num-supernodes={before}' "
            f"(protofl run --clients {before})"
        )
        raise FederationError(
            f"resume = true: the run's data are divided among {before} clients, not {number}; {how}"
        )


def must_agree(
    what: str, cards: Mapping[str, Any], value_of: Callable[[Any], str], hint: str
) -> None:
    """Raise FederationError, which lists the sites that have each value, if the values differ.

    ``value_of`` gives a site's value. ``what`` names the values in the error's text, and ``hint``
    says what to do.
    """
    sites_of = defaultdict(list)
    for name in in_order(cards):
        sites_of[value_of(cards[name])].append(name)
    if len(sites_of) > 1:
        lines = [f"  {printable(value)}: {', '.join(sites)}" for value, sites in sites_of.items()]
        raise FederationError(f"the sites differ in {what}; {hint}:\n" + "\n".join(lines))


def incompatible_sites(
    settings: Settings, cards: Cards, divided_among: int, enough: int
) -> dict[str, str]:
    """Return why sites do not fit the largest group of compatible sites, by site.

    It is empty if all fit, and if no group shall win: two are equally large, or the largest has
    fewer than ``enough`` sites. ``divided_among`` is as in `check_fit`.
    """
    division = divided_among or division_of(cards)
    groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name, card in cards.items():
        # 0: the site has data of its own
        divides_alike = settings.data.partition == "own" or card.num_partitions in (0, division)
        needed_alike: tuple[object, ...] = (card.weights,)
        if settings.exchange.needs_one_architecture:
            needed_alike = (*model_of(card), card.columns)
        groups[divides_alike, card.task_kind, card.classes, *needed_alike].append(name)

    largest, *others = sorted(groups.values(), key=len, reverse=True)
    if not others or len(largest) == len(others[0]) or len(largest) < enough:
        return {}

    compatible = {name: cards[name] for name in largest}
    reasons: dict[str, str] = {}
    for name in in_order(cards.keys() - compatible.keys()):
        try:
            check_fit(settings, {**compatible, name: cards[name]}, divided_among)
        except FederationError as error:
            reasons[name] = str(error)
    return reasons


def division_of(cards: Cards) -> int:
    """Return among how many clients the data set is divided; 0 where sites bring their own data.

    It is the number that most sites give. Between equally frequent ones 0 wins, then the largest.
    """
    votes = Counter(card.num_partitions for card in cards.values())
    return max(votes, key=lambda number: (votes[number], number == 0, number), default=0)


def model_of(card: SiteCard) -> tuple[object, ...]:
    return card.weights, card.arch, card.input_shape


def most_common(cards: Cards) -> SiteCard:
    """Return the card of a site with the most common shape of inputs.

    Of equally common shapes the smallest is taken, and of the sites with that shape one of the most
    common network.
    """
    shapes = Counter(card.input_shape for card in cards.values())
    models = Counter(map(model_of, cards.values()))

    def votes(name: str) -> tuple[int, int, int]:
        shape = cards[name].input_shape
        return shapes[shape], -math.prod(shape), models[model_of(cards[name])]

    return cards[max(in_order(cards), key=votes)]


# -- whether sites are enough
def check_new(settings: Settings, cards: Cards, new: Collection[str]) -> None:
    """Raise FederationError if no client is of ``new-domain``, or none is left to train.

    ``new`` are the clients that never train.
    """
    domain = settings.federation.new_domain
    domains = {card.domain for card in cards.values()}
    if domain and domain not in domains:
        choices = ", ".join(sorted(domains))
        raise FederationError(
            f"new-domain = {domain!r}: no client is of it; choose one of {choices}"
        )
    if len(new) == len(cards):
        number = settings.federation.new_clients
        raise FederationError(f"new-clients = {number}: no client is left to train")


def check_number(settings: Settings, sites: int, liars: int, fewest: int) -> None:
    """Raise FederationError if a round asks fewer of the ``sites`` than it needs.

    It needs enough for ``min-replies``, to outvote ``liars``, and to hide a single site in a secure
    sum. ``fewest`` is how many a round asks at least. A secure sum may also have too many.
    """
    federation = settings.federation
    asked = number_asked(sites, federation.participation, fewest)
    share = ""
    if federation.participation != 1:
        share = f" (participation = {federation.participation:g})"
    asks = f"a round asks only {asked} sites{share}"
    if asked < federation.min_replies:
        raise FederationError(f"min-replies = {federation.min_replies}: {asks}")

    majority = 2 * liars + 1
    if asked < majority:
        raise FederationError(
            f"liars = {liars}: {asks}, and {majority} are the fewest that can outvote {liars}"
        )
    merging = settings.bounds.merging
    if asked < MIN_CLIENTS_FOR_MEDIAN and merging not in ("auto", "mean"):
        raise FederationError(
            f"merging = {merging!r}: {asks}, and {MIN_CLIENTS_FOR_MEDIAN} are the fewest "
            "that can outvote one"
        )
    if settings.privacy.sums_only and not FEWEST_SUMMED <= asked <= MOST_SITES:
        why = f"{FEWEST_SUMMED} are the fewest whose sum hides one from the others"
        why += f", {MOST_SITES} the most"
        raise FederationError(f"secure aggregation: a round asks {asked} sites{share}; {why}")


# -- whom a round asks
def sample_sites(
    sites: Iterable[str], participation: float, seed: int, server_round: int, fewest: int = 1
) -> list[str]:
    """Draw as many of the sites as `number_asked` says, and return them in natural order.

    The draw depends on the seed, the round and the sites' names, not on Flower's node ids, which
    are random.
    """
    names = in_order(sites)
    number = number_asked(len(names), participation, fewest)
    if number == len(names):
        return names
    generator = np.random.default_rng(derive_seed(seed, "sampling", server_round))
    drawn = generator.choice(len(names), size=number, replace=False)
    return [names[index] for index in sorted(drawn)]


def draw_drop_outs(sites: Iterable[str], rate: float, seed: int, server_round: int) -> list[str]:
    """Draw the sites that do not answer in a round (``drop-rate``).

    Each site has a generator of its own for each round, so that no draw depends on other sites.
    """

    def draw(site: str) -> float:
        return np.random.default_rng(derive_seed(seed, "drop", site, server_round)).random()

    return [site for site in sites if draw(site) < rate]


def slow_clients(sites: Iterable[str], rate: float, seed: int) -> set[str]:
    """Draw the clients that are slow for the whole run (``slow-rate``): at least one, and not all.

    The same seed and names give the same clients. Without ``slow-rate`` there are none.
    """
    if not rate:
        return set()
    names = in_order(sites)
    number = min(len(names) - 1, max(1, round(rate * len(names))))
    generator = np.random.default_rng(derive_seed(seed, "slow"))
    return {str(name) for name in generator.choice(names, size=number, replace=False)}


# -- words for who cannot take part
def describe_problems(problems: Iterable[Problem]) -> str:
    """Return a line for each distinct problem, with the sites that have it.

    Clients without a known site are counted instead.
    """
    sites_of: dict[str, list[str]] = defaultdict(list)
    for problem in problems:
        sites_of[problem.text].append(problem.site)
    lines = [f"{_who(names)} cannot take part: {why}" for why, names in sites_of.items()]
    return "\n".join(lines)


def _who(names: list[str]) -> str:
    """List the sites' names; "" stands for a client without one."""
    listed = in_order(filter(None, names))
    nameless = names.count("")
    if nameless == 1:
        listed.append("1 client")
    elif nameless:
        listed.append(f"{nameless} clients")
    return ", ".join(listed)
