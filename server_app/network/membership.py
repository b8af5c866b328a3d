"""Who takes part: finding the sites, letting them introduce themselves, and knowing them again when they come back."""

from __future__ import annotations

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from protofl_common.basics.run_history import RunHistory
from protofl_common.basics.text import in_order, is_site_name, printable
from protofl_common.config.architectures import ARCHITECTURES, members_of
from protofl_common.experiment.settings import Settings
from protofl_common.maths.aggregation import FEWEST
from protofl_common.wire.limits import RefusedMessage
from protofl_common.wire.records import SiteCard, pack_baseline, pack_settings, unpack_site_card
from server_app.log import say
from server_app.network.transport import pull_each, push_each
from server_app.protections.bounds import Bounds, bounds_of
from server_app.sampling import number_asked

AT_ONCE = 1000
"""Sites that are asked at a time who they are, or for the final evaluation: so many messages, and no more, are kept."""


class FederationError(RuntimeError):
    """The federation cannot work; the message says who is missing or what does not fit together."""


class Federation:
    """The sites of a run, known by their own names; Flower's node ids change at every restart."""

    def __init__(
        self, grid: Grid, settings: Settings, run_history: RunHistory, owners: Mapping[str, int], baseline: str = ""
    ) -> None:
        self.grid = grid
        self.settings = settings
        self.run_history = run_history
        self.baseline = baseline
        """The algorithm, where these rounds are of a run's baseline; "" for the run itself."""
        self.cards: dict[str, SiteCard] = {}
        self.node_of: dict[str, int] = {}
        self.owners = dict(owners)
        """Site -> the first node that was it; it remains its own, for Flower's authentication ties nodes to keys."""
        self.online: set[int] = set()
        self.problems: dict[int, str] = {}
        """Node -> why it cannot take part."""
        self._introductions: dict[int, str] = {}
        """Node -> the message that asks it who it is."""
        self._waiting: dict[str, int] = {}
        """Those that it has not answered."""
        self._silent: Counter[str] = Counter()
        self._rests_until: dict[str, int] = {}
        """Site -> the last round in which it is not asked."""
        self.expelled: set[str] = set()
        """Sites that were caught lying in secure aggregation: they take no further part in the run."""
        self._given: dict[int, SiteCard] = {}
        """Node -> how it introduced itself."""
        self._reference: SiteCard | None = None

    @property
    def reference(self) -> SiteCard:
        """The introduction from which the server builds its models: the majority's, whoever answers first.

        Where nothing must be alike, that of the most common inputs, and among these of the most common network.
        """
        return self._reference or _most_common(self.cards)

    @property
    def simulated(self) -> bool:
        """Return whether all clients are simulated: one person's own, without an operator at any site."""
        return not any(card.real for card in self.cards.values())

    @property
    def bounds(self) -> Bounds:
        """Return the bounds on what a single site may do to the aggregate."""
        return bounds_of(self.settings, self.cards.values())

    def gather(self, expected: Iterable[str] = (), divided_among: int = 0) -> None:
        """Wait until the wanted number of sites has connected and introduced itself (``num-clients``).

        ``expected`` sites, those of a run that is resumed, are waited for too, but no longer than ``join-timeout``;
        its data set must be ``divided_among`` as many clients as before (0: sites bring data of their own).

        FederationError if fewer than ``min-clients`` do so within ``join-timeout``, if those that cannot take part
        (wrong settings, missing data) leave fewer, if nobody says how many to wait for, or if the sites do not fit
        together.
        """
        deadline = time.monotonic() + self.settings.federation.join_timeout
        absent = set(expected)
        while time.monotonic() < deadline:
            self._look()
            self._resolve()
            absent -= self.cards.keys()
            wanted = self._wanted()
            if self.simulated:
                _check_division(self.settings, self.cards, divided_among)
            if self.cards and not wanted and not self._waiting:
                raise FederationError(self._too_few())
            if not self._waiting and not absent and wanted and len(self.cards) >= wanted:
                break
            problems = {node: why for node, why in self.problems.items() if node in self.online}
            all_heard = len(self.cards) < wanted <= len(self.cards) + len(problems)
            if not self._waiting and problems and (all_heard or not self.cards):
                if not 0 < self._enough() <= len(self.cards):
                    raise FederationError(_explain(problems))
                if not absent:
                    break
            time.sleep(0.1)
        wanted = self._wanted()
        if not wanted or len(self.cards) < self._enough():
            raise FederationError(self._too_few())
        self._leave_out_odd_ones(divided_among)
        if absent:
            say(f"going on without {', '.join(in_order(absent))}: not there after join-timeout")
        if self.problems:
            say(_explain(self.problems))
        _check_fit(self.settings, self.cards, divided_among)
        self._check_replies()
        self._reference = self.reference
        if len(self.cards) < wanted:
            say(f"going on with {len(self.cards)} of {wanted} clients (min-clients)")
        self.owners = self.node_of | self.owners

    def _leave_out_odd_ones(self, divided_among: int) -> None:
        """Go on with the sites that fit together, where they are more than any others and as many as suffice."""
        divided, groups = divided_among or self.num_partitions, defaultdict(list)
        for name, card in self.cards.items():
            groups[_kind(self.settings, card, divided)].append(name)
        largest, *others = sorted(groups.values(), key=len, reverse=True)
        if not others or len(largest) == len(others[0]) or len(largest) < self._enough():
            return
        usual = {name: self.cards[name] for name in largest}
        for name in in_order(self.cards.keys() - usual.keys()):
            try:
                _check_fit(self.settings, usual | {name: self.cards[name]}, divided_among)
            except FederationError as error:
                self._leave_out(name, str(error))

    def _leave_out(self, name: str, why: str) -> None:
        """Go on without a site whose introduction cannot be used."""
        del self.cards[name]
        self.problems[self.node_of.pop(name)] = f"{name}: {why}"

    def leave_out_reference(self, why: str) -> bool:
        """Go on without the sites whose introduction gives no model; False where too few others are left."""
        wrong = self.reference
        same = [name for name, card in self.cards.items() if _model_of(card) == _model_of(wrong)]
        if len(self.cards) - len(same) < max(1, self._enough()):
            return False
        for name in same:
            self._leave_out(name, why)
            say(_explain({0: f"{name}: {why}"}))
        self._reference = _most_common(self.cards)
        return True

    @property
    def num_partitions(self) -> int:
        """Among how many clients the data set is divided, as most say; 0 where sites bring data of their own."""
        claims = Counter(card.num_partitions for card in self.cards.values() if card.num_partitions)
        return max(claims, key=lambda number: (claims[number], number), default=0)

    def _check_replies(self) -> None:
        """FederationError where a round asks fewer sites than it needs replies, or than can outvote one of them."""
        federation = self.settings.federation
        asked = number_asked(len(self.cards), federation.participation)
        share = "" if federation.participation == 1 else f" (participation = {federation.participation:g})"
        if asked < federation.min_replies:
            raise FederationError(f"min-replies = {federation.min_replies}: a round asks only {asked} sites{share}")
        liars, merging = self.bounds.liars, self.settings.bounds.merging
        if asked < 2 * liars + 1:
            asks = f"liars = {liars}: a round asks only {asked} sites{share}"
            raise FederationError(f"{asks}, and {2 * liars + 1} are the fewest that can outvote {liars}")
        if asked < FEWEST and merging not in ("auto", "mean"):
            asks = f"merging = {merging!r}: a round asks only {asked} sites{share}"
            raise FederationError(f"{asks}, and {FEWEST} are the fewest that can outvote one")

    def look_around(self) -> None:
        """Between and during rounds: greet who is new, and know again who is back under another node id.

        A node that says it is a site that another node is, is that site once the other is gone. A new site takes part
        from the next round.
        """
        before = set(self.cards), set(self.problems)
        self._look()
        self._resolve()
        for name in in_order(self.cards.keys() - before[0]):
            card, node = self.cards.pop(name), self.node_of.pop(name)
            if self._admit(name, node, card):
                say(f"  new: {name}, {card.arch}, takes part from the next round on")
        for node in self.problems.keys() - before[1]:
            say(f"  {_explain({node: self.problems[node]})}")

    def await_sites(self) -> None:
        """Before a round: look around, and wait for ``min-replies`` connected sites, at most for ``join-timeout``."""
        least = min(self.settings.federation.min_replies, len(self.node_of))
        deadline = time.monotonic() + self.settings.federation.join_timeout
        self.look_around()
        if self._connected() < least:
            say(f"  waiting: {self._connected()} clients are connected, fewer than min-replies = {least}")
        while self._connected() < least and time.monotonic() < deadline:
            time.sleep(0.5)
            self.look_around()

    @property
    def greeting(self) -> bool:
        """Return whether somebody new has been asked who it is and has not answered yet."""
        return any(node in self.online for node in self._waiting.values())

    def answering(self, server_round: int) -> list[str]:
        """The sites that a round may ask: all but those that rest, unless these leave fewer than ``min-replies``."""
        taking_part = [site for site in self.node_of if site not in self.expelled]
        found = [site for site in taking_part if self._rests_until.get(site, 0) < server_round]
        return found if len(found) >= self.settings.federation.min_replies else taking_part

    def note_silence(self, server_round: int, missing: Iterable[str], heard: Iterable[str]) -> None:
        """A site that is silent ``max-silent-rounds`` times running, each for the whole timeout, rests for as many."""
        most = self.settings.federation.max_silent_rounds
        for site in heard:
            self._silent[site] = self._rests_until[site] = 0
        for site in missing:
            self._silent[site] += 1
            if most and self._silent[site] >= most:
                self._rests_until[site] = last = server_round + most
                say(f"  {site}: silent {self._silent[site]} times running; not asked until round {last + 1}")

    def _connected(self) -> int:
        return sum(node in self.online for node in self.node_of.values())

    def _look(self) -> None:
        """Ask new nodes who they are, `AT_ONCE` at a time, and take in what was answered by now."""
        self.online = set(self.grid.get_node_ids())
        free = max(0, AT_ONCE - len(self.online.intersection(self._waiting.values())))
        if new := sorted(self.online - self._introductions.keys())[:free]:
            sent = zip(new, push_each(self.grid, map(self._introduction, new)), strict=True)
            given = {node: str(message.metadata.message_id) for node, (message, taken) in sent if taken}
            self._introductions |= given
            self._waiting |= {key: node for node, key in given.items()}
        for key, reply in pull_each(self.grid, list(self._waiting)):
            node = self._waiting.pop(key)
            if isinstance(reply, str):
                self.problems[node] = printable(reply)
            elif reply.has_error():
                self.problems[node] = printable(str(reply.error.reason))
            else:
                self._take_card(node, reply.content)

    def _introduction(self, node: int) -> Message:
        content = RecordDict({**pack_baseline(self.baseline), **pack_settings(self.settings.digest)})
        return Message(content, node, MessageType.QUERY, group_id="0")

    def _resolve(self) -> None:
        """Give each name to its own node, or to the one that claims it once the other is gone.

        Of two nodes that claim a name before any has been that site, nobody knows which one is right: neither is.
        """
        claimants = defaultdict(list)
        for node, card in self._given.items():
            if node in self.online and node not in self.problems:
                claimants[card.name].append(node)
        for name, nodes in claimants.items():
            now, owner = self.node_of.get(name), self.owners.get(name)
            if owner in nodes and now != owner:
                if self._admit(name, owner, self._given[owner]):
                    if now in nodes:
                        self.problems[now] = f"{name}: its own node is back"
                    say(f"  back: {name}, on its own node")
            elif owner is None and len(nodes) > 1:
                del self.cards[name], self.node_of[name]
                numbers = " and ".join(map(str, nodes))
                why = (
                    f"two clients call themselves {name}, nodes {numbers}: give each its own site-name or partition-id"
                )
                self.problems |= dict.fromkeys(nodes, why)
            elif now not in nodes and len(nodes) == 1 and self._admit(name, nodes[0], self._given[nodes[0]]):
                say(f"  back: {name}, on another node")

    def _admit(self, name: str, node: int, card: SiteCard) -> bool:
        """Let a node be a site, unless it does not fit the majority of the others; whether it does."""
        try:
            if self._reference is not None:
                _check_fit(self.settings, self.cards | {name: card})
        except FederationError as error:
            self.problems[node] = f"{name}: {error}"
            return False
        self.cards[name], self.node_of[name] = card, node
        if self._reference is not None:
            self.owners.setdefault(name, node)
        return True

    def _take_card(self, node: int, content: RecordDict) -> None:
        try:
            card = unpack_site_card(content)
        except RefusedMessage as refusal:
            record = content.config_records.get("site")
            name = str(record.get("name")) if record else ""
            self.problems[node] = f"{f'site {name}: ' if is_site_name(name) else ''}an introduction with {refusal}"
            return
        self._given[node] = card
        if self.settings.federation.bind_sites and self.owners.get(card.name, node) != node:
            self.problems[node] = f"{card.name}: this name is another node's in this run (bind-sites)"
        elif card.name not in self.cards:
            self.cards[card.name], self.node_of[card.name] = card, node

    def _wanted(self) -> int:
        """How many sites to wait for; 0: not known yet."""
        return self.settings.federation.num_clients or self.num_partitions

    def _enough(self) -> int:
        """How many sites suffice where others cannot take part or are not there; 0: not known yet."""
        wanted, least = self._wanted(), self.settings.federation.min_clients
        if not least:
            least = wanted if self.num_partitions else max(2, wanted // 2 + 1)
        return min(least, wanted)

    def _too_few(self) -> str:
        wanted, timeout = self._wanted(), self.settings.federation.join_timeout
        if not wanted and self.cards:
            return "num-clients = 0: the clients give no num-partitions, so say here how many to wait for"
        number = wanted or "an unknown number of"
        text = f"{len(self.cards)} of {number} clients were ready after {timeout:g} s (join-timeout)"
        return f"{text}\n{_explain(self.problems)}" if self.problems else text


def _kind(settings: Settings, card: SiteCard, divided: int) -> tuple[object, ...]:
    """List what all sites must have alike; ``divided``: among how many clients they divide the data set."""
    fits = settings.data.partition == "own" or card.num_partitions in (0, divided)
    alike = _model_of(card) if settings.exchange.needs_one_architecture else (card.weights,)
    return fits, card.classes, *alike


def _model_of(card: SiteCard) -> tuple[object, ...]:
    return card.weights, card.arch, card.input_shape


def _most_common(cards: Mapping[str, SiteCard]) -> SiteCard:
    """Return the card with the most common inputs, the smallest of several, and among these the most common network."""
    shapes = Counter(card.input_shape for card in cards.values())
    models = Counter(_model_of(card) for card in cards.values())

    def votes(name: str) -> tuple[int, int, int]:
        card = cards[name]
        return shapes[card.input_shape], -math.prod(card.input_shape), models[_model_of(card)]

    return cards[max(in_order(cards), key=votes)]


def _check_fit(settings: Settings, cards: dict[str, SiteCard], divided_among: int = 0) -> None:
    """The sites must agree on the classes, on the division of common data, and on what averaged weights need."""
    one_model = settings.exchange.needs_one_architecture
    _check_division(settings, cards, divided_among)
    _must_agree(
        "classes",
        {name: ", ".join(card.classes) for name, card in cards.items()},
        "set `classes` to the class names in label order",
    )
    if one_model:
        _of_the_run(settings, cards)
        one = f"{settings.run.algo} averages weights and needs one architecture on all sites"
        _must_agree("arch", {name: card.arch for name, card in cards.items()}, one)
    if one_model or len({card.weights for card in cards.values()}) > 1:
        shapes = {name: "×".join(map(str, card.input_shape)) for name, card in cards.items()}
        _must_agree("the shape of their inputs", shapes, "bring inputs of one shape; for images set `image-size`")
        digests = {name: f"{card.weights} of {card.arch}" for name, card in cards.items()}
        _must_agree("weights", digests, f"{settings.run.algo} needs one shape of what it shares; these are digests")


def _check_division(settings: Settings, cards: dict[str, SiteCard], before: int = 0) -> None:
    """All must divide a common data set alike, and in a resumed run among as many clients as ``before`` (0: any)."""
    among = {name: str(card.num_partitions) for name, card in cards.items() if card.num_partitions}
    if settings.data.partition == "own" or not among:
        return
    _must_agree("num-partitions", among, "they divide one data set: give all the same number")
    (now,) = set(among.values())
    if before and now != str(before):
        raise FederationError(
            f"resume = true: the run's data are divided among {before} clients, not {now}; in simulation give "
            f"--federation-config 'num-supernodes={before}' (protofl run --clients {before})"
        )


def _of_the_run(settings: Settings, cards: dict[str, SiteCard]) -> None:
    """The server builds the model whose weights are averaged: only one that the run's own settings name."""
    named = {settings.model.arch, *members_of(settings.model.models)}
    for name, card in cards.items():
        if card.arch not in ARCHITECTURES and card.arch not in named:
            raise FederationError(
                f"{name} has a network of its own, {card.arch}; {settings.run.algo} averages weights: name it in the "
                "run's `models`"
            )


def _must_agree(what: str, values: dict[str, str], hint: str) -> None:
    sites_of = defaultdict(list)
    for name in in_order(values):
        sites_of[values[name]].append(name)
    if len(sites_of) > 1:
        lines = [f"  {printable(value)}: {', '.join(sites)}" for value, sites in sites_of.items()]
        raise FederationError(f"the sites differ in {what}; {hint}:\n" + "\n".join(lines))


def _explain(problems: dict[int, str]) -> str:
    """Each distinct problem once, with the sites that have it, or how many clients where these say no name."""
    whose: dict[str, list[str]] = defaultdict(list)
    for reason in problems.values():
        named = re.match(r"site ([\w.-]+): ", reason)
        whose[reason[named.end() :] if named else reason].append(named[1] if named else "")
    return "\n".join(f"{_who(names)} cannot take part: {why}" for why, names in whose.items())


def _who(names: list[str]) -> str:
    known = [name for name in names if name]
    others = len(names) - len(known)
    return ", ".join(in_order(known) + [f"{others} client{'s' * (others > 1)}"] * (others > 0))
