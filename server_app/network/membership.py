"""Who takes part: finding the sites, letting them introduce themselves, and knowing them again when they come back."""

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from protofl_common.basics.text import in_order, is_site_name, printable
from protofl_common.experiment.settings import Settings, digest_of
from protofl_common.experiment.study import is_from_site
from protofl_common.wire.records import WAITING, SiteCard, pack_baseline, pack_settings, unpack_site_card
from protofl_common.wire.schema import RefusedMessage
from server_app.checkpoint import Checkpoint
from server_app.log import say
from server_app.network import admission
from server_app.network.admission import FederationError as FederationError
from server_app.network.flower_compat import ErrorCode, id_of, pull_each, push_each
from server_app.protections.bounds import Bounds, bounds_of

APPROVAL_EVERY = 5.0  # Seconds after which a site that waits for its operator's approval is asked again
AT_ONCE = 1000  # Sites asked at a time who they are, or for the final evaluation: no more messages in memory


class Federation:
    """The sites of a run, or its ``baseline``, known by their own names; Flower's node ids change at every restart."""

    def __init__(self, grid: Grid, settings: Settings, start: Checkpoint, baseline: str) -> None:
        self.grid, self.settings, self.start, self.baseline = grid, settings, start, baseline
        self.run_history = start.run_history
        self.cards: dict[str, SiteCard] = {}
        self.node_of: dict[str, int] = {}
        self.counted = dict(start.counted)
        self.owners = dict(start.owners)  # Site -> its first node, whose it remains: keys tie nodes to sites
        self.online: set[int] = set()
        self.problems: dict[int, str] = {}  # Node -> why it cannot take part
        self._contested: set[str] = set()  # Names with which two nodes began: they are nobody's, nor a third's
        self._late: set[int] = set()  # Nodes that came under the name of a site that is there
        self.expelled: set[str] = set()  # Sites that were caught lying: they take no further part in the run
        self._ask_at: dict[int, float] = {}  # Node that was asked who it is -> when it is asked again; infinity: never
        self._waiting: dict[str, Message] = {}
        self._card_of: dict[int, SiteCard] = {}
        self._silent: Counter[str] = Counter()
        self._rests_until: dict[str, int] = {}  # Site -> the last round in which it is not asked
        self._reference: SiteCard | None = None

    @property
    def reference(self) -> SiteCard:
        """The introduction from which the server builds its models: the majority's, or of the most common inputs."""
        return self._reference or admission.most_common(self.cards)

    @property
    def simulated(self) -> bool:
        return not any(card.real for card in self.cards.values())

    @property
    def fewest_asked(self) -> int:
        """Two of sites with operators, where there are several: what is merged of one is its own upload."""
        return 1 if self.simulated else min(2, len(self.cards))

    @property
    def least_replies(self) -> int:
        """``min-replies``, or as many as are asked at least."""
        return max(self.settings.federation.min_replies, self.fewest_asked)

    @property
    def bounds(self) -> Bounds:
        return bounds_of(self.settings, self.cards.values())

    @property
    def num_partitions(self) -> int:
        return admission.division_of(self.cards)

    @property
    def new_clients(self) -> set[str]:
        """The clients that never train, and are evaluated at the end (``new-clients``, ``new-domain``)."""
        new, domain = self.settings.new_clients(self.num_partitions), self.settings.federation.new_domain or None
        divided = {name: card for name, card in self.cards.items() if card.num_partitions}
        return {name for name, card in divided.items() if card.partition in new or card.domain == domain}

    # -- before the first round ----------------------------------------------------------------------------------
    def gather(self) -> None:
        """Wait until enough sites have introduced themselves; FederationError where too few do, or do not fit.

        The sites of a run that is resumed are waited for too, until they refuse, but no longer than ``join-timeout``;
        its data set must be divided among as many clients as before (0: sites bring data of their own).
        """
        deadline, absent = time.monotonic() + self.settings.federation.join_timeout, set(self.start.sites)
        divided_among = self.start.num_partitions
        while time.monotonic() < deadline:
            self._look()
            reasons = {name: self.problems.get(self.owners.get(name, 0), "") for name in absent - self.cards.keys()}
            absent = {name for name, why in reasons.items() if not why or _waits(why)}
            if self.simulated:
                admission.check_division(self.settings, self.cards, divided_among)
            if self._all_heard() and not absent:
                break
            time.sleep(0.1)
        wanted, least = self._wanted(), self._least()
        if not wanted or len(self.cards) < least:
            raise FederationError(self._too_few())
        for name, why in admission.odd_ones(self.settings, self.cards, divided_among, least).items():
            self._leave_out(name, why)
        if absent:
            say(f"going on without {', '.join(in_order(absent))}: not there after join-timeout")
        if self.problems:
            say(admission.explained(self.problems))
        admission.check_fit(self.settings, self.cards, divided_among)
        admission.check_new(self.settings, self.cards, self.new_clients)
        number = len(self.cards) - len(self.new_clients)
        admission.check_number(self.settings, number, self.bounds.liars, self.fewest_asked)
        self._reference = self.reference
        if len(self.cards) < wanted:
            say(f"going on with {len(self.cards)} of {wanted} clients (min-clients)")
        self.owners = self.node_of | self.owners

    def _all_heard(self) -> bool:
        """Return whether no further site is awaited; FederationError where those that are there do not suffice."""
        if self._waiting:
            return False
        ready, wanted = len(self.cards), self._wanted()
        if ready and not wanted:
            raise FederationError(self._too_few())
        problems = {node: why for node, why in self.problems.items() if node in self.online}
        if wanted and ready >= wanted:
            return True
        heard = {why.partition(": ")[0] for why in problems.values()}
        unheard = [name for name in self.settings.named_sites if name not in self.cards and f"site {name}" not in heard]
        if unheard or any(_waits(why) for why in problems.values()):
            return False  # of the sites that the study names, some may yet come, whoever else cannot take part
        if not problems or (ready and ready + len(problems) < wanted):
            return False
        if not 0 < self._least() <= ready:
            raise FederationError(admission.explained(problems))
        return True

    def _wanted(self) -> int:
        """How many sites to wait for; 0: not known yet."""
        return self.settings.federation.num_clients or len(self.settings.named_sites) or self.num_partitions

    def _least(self) -> int:
        """How many sites suffice where others cannot take part or are not there; 0: not known yet."""
        wanted = self._wanted()
        usual = wanted if self.num_partitions else max(2, wanted // 2 + 1)
        return min(self.settings.federation.min_clients or usual, wanted)

    def _too_few(self) -> str:
        wanted, timeout = self._wanted(), self.settings.federation.join_timeout
        if not wanted and self.cards:
            return "num-clients = 0: the clients give no num-partitions, so say here how many to wait for"
        number = wanted or "an unknown number of"
        text = f"{len(self.cards)} of {number} clients were ready after {timeout:g} s (join-timeout)"
        return f"{text}\n{admission.explained(self.problems)}" if self.problems else text

    def _leave_out(self, name: str, why: str) -> None:
        del self.cards[name]
        self.problems[self.node_of.pop(name)] = f"{name}: {why}"

    def leave_out_reference(self, why: str) -> bool:
        """Go on without the sites whose introduction gives no model; False where too few others are left."""
        wrong = admission.model_of(self.reference)
        same = [name for name, card in self.cards.items() if admission.model_of(card) == wrong]
        if len(self.cards) - len(same) < max(1, self._least()):
            return False
        for name in same:
            self._leave_out(name, why)
            say(admission.explained({0: f"{name}: {why}"}))
        self._reference = admission.most_common(self.cards)
        return True

    # -- between and during rounds -------------------------------------------------------------------------------
    def look_around(self) -> None:
        """Greet who is new, for the next round, and know again who is back, under whatever node id."""
        cards, problems = set(self.cards), set(self.problems)
        self._look()
        for name in in_order(self.cards.keys() - cards):
            card, node = self.cards.pop(name), self.node_of.pop(name)
            if self._admit(name, node, card):
                say(f"  new: {name}, {card.arch}, takes part from the next round on")
        for node in self.problems.keys() - problems:
            say(f"  {admission.explained({node: self.problems[node]})}")

    def await_sites(self) -> None:
        """Before a round: look around, and wait for ``min-replies`` connected sites, at most for ``join-timeout``."""
        least = min(self.least_replies, len(self.node_of))
        deadline = time.monotonic() + self.settings.federation.join_timeout
        self.look_around()
        if self._connected() < least:
            say(f"  waiting: {self._connected()} clients are connected, fewer than min-replies = {least}")
        while self._connected() < least and time.monotonic() < deadline:
            time.sleep(0.5)
            self.look_around()

    def _connected(self) -> int:
        return sum(node in self.online for node in self.node_of.values())

    @property
    def greeting(self) -> bool:
        return any(message.metadata.dst_node_id in self.online for message in self._waiting.values())

    def answering(self, server_round: int) -> list[str]:
        """The sites that a round may ask: all but those that rest, unless these leave fewer than ``min-replies``."""
        taking_part = [site for site in self.node_of if site not in self.expelled]
        awake = [site for site in taking_part if self._rests_until.get(site, 0) < server_round]
        return awake if len(awake) >= self.least_replies else taking_part

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

    # -- introductions -------------------------------------------------------------------------------------------
    def _look(self) -> None:
        """Ask new nodes who they are, `AT_ONCE` at a time, take in what was answered by now, and settle the names."""
        self.online, now = set(self.grid.get_node_ids()), time.monotonic()
        waiting = {message.metadata.dst_node_id for message in self._waiting.values()}
        due = sorted(node for node in self.online if self._ask_at.get(node, 0.0) < now)
        if new := due[: max(0, AT_ONCE - len(self.online & waiting))]:
            content = RecordDict({**pack_baseline(self.baseline), **pack_settings(digest_of(self.settings.given))})
            questions = [Message(content, node, MessageType.QUERY, group_id="0") for node in new]
            sent = [message for message, taken in push_each(self.grid, questions) if taken]
            self._ask_at |= {message.metadata.dst_node_id: math.inf for message in sent}
            self._waiting |= {id_of(message): message for message in sent}
        for message, reply in pull_each(self.grid, list(self._waiting.values())):
            node = self._waiting.pop(id_of(message)).metadata.dst_node_id
            if reply.has_error() and reply.error.code in (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE):
                del self._ask_at[node]  # it died over the question, or its answer broke off: it is asked again
            elif reply.has_error():
                why, before = self._reason(str(reply.error.reason)), self.problems.get(node)
                self.problems[node] = why
                if _waits(why):
                    self._ask_at[node] = time.monotonic() + APPROVAL_EVERY
                    if before is None:
                        say(f"  {why}; asked again every {APPROVAL_EVERY:g} s")
            else:
                self._take_card(node, reply.content)
        self._resolve()

    def _reason(self, text: str) -> str:
        """Return why a site refuses, without its signature; without one of the study's key, it says so."""
        if not (claim := re.match(r"site (\S+?)(?: signed ([0-9a-f]{128}))?: ", text)):
            return printable(text)
        name, run_id, signature = claim[1], self.run_history.run_id, bytes.fromhex(claim[2] or "")
        own = is_from_site(self.settings.study, name, run_id, "refusal", signature)
        return printable(f"site {name}{'' if own else ', not signed with its key'}: {text[claim.end() :]}")

    def _take_card(self, node: int, content: RecordDict) -> None:
        try:
            card = unpack_site_card(content)
        except RefusedMessage as refusal:
            name = str(content.config_records.get("site", ConfigRecord()).get("name", ""))
            who = f"site {name}: " if is_site_name(name) and not self.settings.named_sites else ""
            self.problems[node] = f"{who}an introduction with {refusal}"
            return
        self._card_of[node] = card
        self.problems.pop(node, None)  # it may have waited for approval
        signature, run_id = bytes.fromhex(card.signature), self.run_history.run_id
        if not is_from_site(self.settings.study, card.name, run_id, "introduction", signature):
            self.problems[node] = f"{card.name}: not signed by a site of the study"
        elif card.name in self._contested:
            free = "end one of them, stop the run and resume it"
            self.problems[node] = f"{card.name}: two clients began with this name, so it is nobody's until you {free}"
        elif card.name not in self.cards:
            self.cards[card.name], self.node_of[card.name] = card, node

    def _resolve(self) -> None:
        """A name is the node's that had it first, another's once that is gone, and nobody's if two begin with it."""
        claimants = defaultdict(list)
        for node, card in self._card_of.items():
            if node in self.online and node not in self.problems:
                claimants[card.name].append(node)
        for name, nodes in claimants.items():
            now, owner = self.node_of.get(name), self.owners.get(name)
            if owner in nodes and now != owner:
                if self._admit(name, owner, self._card_of[owner]):
                    if now in nodes:
                        self.problems[now] = f"{name}: its own node is back"
                    say(f"  back: {name}, on its own node")
            elif owner is None and len(nodes) > 1:
                del self.cards[name], self.node_of[name]
                self._contested.add(name)
                both = f"two clients call themselves {name}, nodes {' and '.join(map(str, nodes))}"
                self.problems |= dict.fromkeys(nodes, f"{both}: give each its own site-name or partition-id")
            elif now not in nodes and len(nodes) == 1 and self._admit(name, nodes[0], self._card_of[nodes[0]]):
                say(f"  back: {name}, on another node")
            elif now in nodes and (late := {*nodes} - {now} - self._late):
                self._late |= late
                say(f"  warning: another client calls itself {name}; it waits until the first is gone, or is renamed")

    def _admit(self, name: str, node: int, card: SiteCard) -> bool:
        """Let a node be a site, unless it does not fit the majority of the others; whether it does."""
        try:
            if self._reference is not None:
                admission.check_fit(self.settings, self.cards | {name: card})
        except FederationError as error:
            self.problems[node] = f"{name}: {error}"
            return False
        self.cards[name], self.node_of[name] = card, node
        if self._reference is not None:
            self.owners.setdefault(name, node)
        return True


def _waits(why: str) -> bool:
    """Return whether a site's reason is that its operator has not decided; it is asked again."""
    return why.partition(": ")[2].startswith(WAITING)
