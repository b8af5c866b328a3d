"""Which sites take part in a run: finding them, and recognising them when they come back."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from protofl_common.basics.text import in_order, is_site_name
from protofl_common.experiment.settings import Settings, digest_of
from protofl_common.experiment.study import is_from_site
from protofl_common.flower import ErrorCode
from protofl_common.runs.events import RoundTrouble
from protofl_common.wire.records import (
    SiteCard,
    pack_baseline,
    pack_settings,
    unpack_site_card,
)
from protofl_common.wire.refusal import Refusal, refusal_in
from protofl_common.wire.schema import RefusedMessage
from server_app.network import admission
from server_app.network.admission import FederationError as FederationError
from server_app.network.admission import Problem
from server_app.network.flower_compat import id_of, pull_each, push_each
from server_app.run.bounds import Bounds, bounds_of
from server_app.run.checkpoint import Checkpoint
from server_app.run.log import emit, say

APPROVAL_POLL_SECONDS = 5.0
"""Seconds after which a site that waits for its operator's approval is asked again."""
SITES_AT_ONCE = 1000
"""The most sites asked at a time who they are, or for the final evaluation, to spare memory."""


class Federation:
    """The sites of a run, or of its ``baseline``, known by their own names.

    Flower's node ids change at every restart. A name may be

    - *present*: in ``cards`` and ``node_of``, with its introduction and its current node;
    - *owned*, from the first round on: in ``owners``, with its first node, whose it remains. While
      that node is gone another one may be its current node;
    - *contested*: two nodes began with it, so that neither they nor any other gets it.

    A node that cannot take part is in ``problems``, with the reason.
    """

    def __init__(self, grid: Grid, settings: Settings, start: Checkpoint, baseline: str) -> None:
        self.grid = grid
        self.settings = settings
        self.start = start
        self.baseline = baseline
        self.run_history = start.run_history
        self.cards: dict[str, SiteCard] = {}
        self.node_of: dict[str, int] = {}
        self.counted = dict(start.counted)
        self.owners = dict(start.owners)  # Site -> its first node: keys tie nodes to sites
        self.online: set[int] = set()
        self.problems: dict[int, Problem] = {}  # Node -> why it cannot take part
        self.expelled: set[str] = set()
        """Sites that were caught lying: they take no further part in the run."""
        self._contested: set[str] = set()
        self._warned_of: set[int] = set()  # Nodes that came under the name of a site that is there
        self._ask_at: dict[int, float] = {}
        """Node that was asked who it is -> when it is asked again; infinity: never."""
        self._questions: dict[str, Message] = {}  # Message id -> "who are you?", not yet answered
        self._card_of: dict[int, SiteCard] = {}  # Node -> its introduction
        self._silent_rounds: Counter[str] = Counter()  # Site -> rounds without a reply, in a row
        self._rests_until: dict[str, int] = {}  # Site -> the last round in which it is not asked
        self._reference: SiteCard | None = None  # None until all have gathered

    @property
    def reference(self) -> SiteCard:
        """The site's introduction whose network and inputs the server's own models have.

        It is one of the most common kind (`admission.most_common`).
        """
        return self._reference or admission.most_common(self.cards)

    @property
    def simulated(self) -> bool:
        return not any(card.real for card in self.cards.values())

    @property
    def fewest_asked(self) -> int:
        """The least number of sites that a round asks.

        It is two for sites with operators, as the mean of one site is just its upload.
        """
        return 1 if self.simulated else min(2, len(self.cards))

    @property
    def fewest_replies(self) -> int:
        """The least number of replies that are merged: ``min-replies`` or `fewest_asked`."""
        return max(self.settings.federation.min_replies, self.fewest_asked)

    @property
    def bounds(self) -> Bounds:
        return bounds_of(self.settings, self.cards.values())

    @property
    def num_partitions(self) -> int:
        return admission.division_of(self.cards)

    @property
    def new_clients(self) -> set[str]:
        """The simulated clients that never train, and are only evaluated at the end.

        The settings ``new-clients`` and ``new-domain`` choose them.
        """
        drawn_partitions = self.settings.new_clients(self.num_partitions)
        new_domain = self.settings.federation.new_domain  # "": there is none
        new = set()
        for name, card in self.cards.items():
            if not card.num_partitions:  # it has data of its own
                continue
            is_of_new_domain = bool(new_domain) and card.domain == new_domain
            if card.partition in drawn_partitions or is_of_new_domain:
                new.add(name)
        return new

    # -- before the first round
    def gather(self) -> None:
        """Wait until enough sites have introduced themselves, and decide which take part.

        From then on names are bound to nodes. Raises FederationError where too few sites come or
        fit together, or a resumed run's data set is divided among another number of clients.
        """
        absent = self._await_introductions()
        wanted = self._wanted()
        enough = self._enough()
        if not wanted or len(self.cards) < enough:
            raise FederationError(self._too_few())

        divided_among = self.start.num_partitions
        reasons = admission.incompatible_sites(self.settings, self.cards, divided_among, enough)
        for name, why in reasons.items():
            self._leave_out(name, why)
        if absent:
            say(f"going on without {', '.join(in_order(absent))}: not there after join-timeout")
        if self.problems:
            say(admission.describe_problems(self.problems.values()))

        admission.check_fit(self.settings, self.cards, divided_among)
        new_clients = self.new_clients
        admission.check_new(self.settings, self.cards, new_clients)
        training = len(self.cards) - len(new_clients)
        admission.check_number(self.settings, training, self.bounds.liars, self.fewest_asked)
        self._reference = self.reference  # stays, whoever joins or leaves
        if len(self.cards) < wanted:
            say(f"going on with {len(self.cards)} of {wanted} clients (min-clients)")
        self.owners = {**self.node_of, **self.owners}  # a resumed run has owners already

    def _await_introductions(self) -> set[str]:
        """Look for sites until no further one is awaited, at most for ``join-timeout``.

        All sites that a resumed run had are awaited, unless they refuse. Return those of them that
        have not come.
        """
        deadline = time.monotonic() + self.settings.federation.join_timeout
        absent = set(self.start.sites)
        while time.monotonic() < deadline:
            self._look()
            absent = {name for name in absent - self.cards.keys() if self._may_yet_come(name)}
            if self.simulated:
                divided_among = self.start.num_partitions
                admission.check_division(self.settings, self.cards, divided_among)
            if self._all_heard() and not absent:
                break
            time.sleep(0.1)
        return absent

    def _may_yet_come(self, name: str) -> bool:
        """Return whether a site of the resumed run may still introduce itself.

        It may unless its node has refused for good.
        """
        problem = self.problems.get(self.owners.get(name, 0))  # 0 is no node's id
        return problem is None or problem.waits

    def _all_heard(self) -> bool:
        """Return whether no further site is awaited: `gather` goes on with those that are there.

        Raises FederationError if these do not suffice, and waiting longer would not help.
        """
        if self._questions:
            return False
        ready = len(self.cards)
        wanted = self._wanted()
        # 0: the clients are there, but neither they nor the settings say how many there shall be
        if ready and not wanted:
            raise FederationError(self._too_few())
        # All have come
        if wanted and ready >= wanted:
            return True

        # Of the sites that the study names, some may yet come, whoever else cannot take part
        problems = [problem for node, problem in self.problems.items() if node in self.online]
        refused = {problem.site for problem in problems}
        for name in self.settings.named_sites:
            if name not in self.cards and name not in refused:
                return False
        # An operator may yet say yes
        if any(problem.waits for problem in problems):
            return False
        # Nobody has refused, so those that are missing may just be late
        if not problems:
            return False
        # Some of the number wanted have neither come nor refused: they may yet come. Where all that
        # came have refused, the run ends at once
        if ready and ready + len(problems) < wanted:
            return False
        # All have answered. Do those that can take part suffice?
        enough = self._enough()  # 0: not known
        if not enough or ready < enough:
            raise FederationError(admission.describe_problems(problems))
        return True

    def _wanted(self) -> int:
        """Return how many sites to wait for; 0 while that is not known."""
        named = len(self.settings.named_sites)
        return self.settings.federation.num_clients or named or self.num_partitions

    def _enough(self) -> int:
        """Return how many sites suffice where others are missing; 0 while that is not known.

        It is ``min-clients``. By default it is all clients that divide a data set, or more than
        half of the sites with data of their own, and two of these at least.
        """
        wanted = self._wanted()
        default = wanted if self.num_partitions else max(2, wanted // 2 + 1)
        return min(self.settings.federation.min_clients or default, wanted)

    def _too_few(self) -> str:
        """Return the text of the error for too few sites."""
        wanted = self._wanted()
        if not wanted and self.cards:
            return (
                "num-clients = 0: the clients give no num-partitions, so say here how many to "
                "wait for"
            )
        number = wanted or "an unknown number of"
        timeout = self.settings.federation.join_timeout
        text = (
            f"{len(self.cards)} of {number} clients were ready after {timeout:g} s (join-timeout)"
        )
        if self.problems:
            text += f"\n{admission.describe_problems(self.problems.values())}"
        return text

    def _leave_out(self, name: str, why: str) -> None:
        del self.cards[name]
        node = self.node_of.pop(name)
        self.problems[node] = Problem(f"{name}: {why}")

    def leave_out_reference(self, why: str) -> bool:
        """Leave out the `reference` site and all of the same network, as no model can be built.

        ``why`` is the reason that they are given. Another reference is chosen. Return False, and
        change nothing, if too few sites would be left.
        """
        model = admission.model_of(self.reference)
        unfit = [name for name, card in self.cards.items() if admission.model_of(card) == model]
        if len(self.cards) - len(unfit) < max(1, self._enough()):
            return False
        for name in unfit:
            self._leave_out(name, why)
            say(admission.describe_problems([Problem(f"{name}: {why}")]))
        self._reference = admission.most_common(self.cards)
        return True

    # -- between and during rounds
    def look_around(self) -> None:
        """Let new sites take part from the next round on, and recognise those that are back.

        A site may be back under another node id.
        """
        known_sites = set(self.cards)
        known_problems = set(self.problems)
        self._look()
        for name in in_order(self.cards.keys() - known_sites):
            self.owners.setdefault(name, self.node_of[name])
            say(f"  new: {name}, {self.cards[name].arch}, takes part from the next round on")
        for node in self.problems.keys() - known_problems:
            say(f"  {admission.describe_problems([self.problems[node]])}")

    def await_sites(self) -> None:
        """Before a round, wait until enough sites for `fewest_replies` are connected.

        Waits at most for ``join-timeout``, and then lets the round go on.
        """
        needed = min(self.fewest_replies, len(self.node_of))
        deadline = time.monotonic() + self.settings.federation.join_timeout
        self.look_around()
        connected = self._connected()
        if connected < needed:
            text = f"{connected} clients are connected, fewer than min-replies = {needed}"
            emit(RoundTrouble("waiting", text))
        while self._connected() < needed and time.monotonic() < deadline:
            time.sleep(0.5)
            self.look_around()

    def _connected(self) -> int:
        return sum(node in self.online for node in self.node_of.values())

    @property
    def greeting(self) -> bool:
        """Whether a node that is connected has not said yet who it is."""
        questions = self._questions.values()
        return any(question.metadata.dst_node_id in self.online for question in questions)

    def sites_to_ask(self, server_round: int) -> list[str]:
        """Return the sites that a round may ask.

        Sites that rest (`note_silence`) are left out, unless too few others are there for
        `fewest_replies`.
        """
        taking_part = [site for site in self.node_of if site not in self.expelled]
        awake = [site for site in taking_part if self._rests_until.get(site, 0) < server_round]
        return awake if len(awake) >= self.fewest_replies else taking_part

    def note_silence(self, server_round: int, missing: Iterable[str], heard: Iterable[str]) -> None:
        """Note which sites were silent in a round, ``missing``, and let some rest.

        A site that is silent for ``max-silent-rounds`` in a row is not asked for as many rounds, as
        each would wait for it until the timeout. 0 lets none rest.
        """
        most = self.settings.federation.max_silent_rounds
        for site in heard:
            self._silent_rounds[site] = 0
            self._rests_until[site] = 0
        for site in missing:
            self._silent_rounds[site] += 1
            silent = self._silent_rounds[site]
            if most and silent >= most:
                last_rest = server_round + most
                self._rests_until[site] = last_rest
                next_asked = last_rest + 1
                say(f"  {site}: silent {silent} times running; not asked until round {next_asked}")

    # -- introductions
    def _look(self) -> None:
        """Ask new nodes which site they are, take in their answers, and settle the names."""
        self._ask_who_is_there()
        for question, reply in pull_each(self.grid, list(self._questions.values())):
            del self._questions[id_of(question)]
            node = question.metadata.dst_node_id
            if not reply.has_error():
                self._take_card(node, reply.content)
            elif reply.error.code in (
                ErrorCode.NODE_UNAVAILABLE,
                ErrorCode.MESSAGE_UNAVAILABLE,
            ):
                # It died over the question, or its answer broke off: it is asked again
                del self._ask_at[node]  # as if it were new
            else:
                self._take_refusal(node, refusal_in(reply))
        self._settle_names()

    def _ask_who_is_there(self) -> None:
        """Ask nodes that are new, or due to be asked again, which site they are.

        At most `SITES_AT_ONCE` questions are open at a time.
        """
        self.online = set(self.grid.get_node_ids())
        now = time.monotonic()
        due = sorted(node for node in self.online if self._ask_at.get(node, 0.0) < now)
        being_asked = {message.metadata.dst_node_id for message in self._questions.values()}
        free = max(0, SITES_AT_ONCE - len(self.online & being_asked))
        nodes = due[:free]
        if not nodes:
            return

        digest = pack_settings(digest_of(self.settings.given))  # sites compare it with their own
        content = RecordDict({**pack_baseline(self.baseline), **digest})
        questions = [Message(content, node, MessageType.QUERY, group_id="0") for node in nodes]
        for question, is_taken in push_each(self.grid, questions):
            if is_taken:
                self._ask_at[question.metadata.dst_node_id] = math.inf
                self._questions[id_of(question)] = question

    def _take_refusal(self, node: int, refusal: Refusal) -> None:
        """Note why a node does not take part, and ask it again later if it waits for approval."""
        problem = self._problem(refusal)
        is_first = node not in self.problems
        self.problems[node] = problem
        if problem.waits:
            self._ask_at[node] = time.monotonic() + APPROVAL_POLL_SECONDS
            if is_first:
                say(f"  {problem.text}; asked again every {APPROVAL_POLL_SECONDS:g} s")

    def _problem(self, refusal: Refusal) -> Problem:
        """Return the problem of a node that refuses to take part.

        It counts as its site's, unless the study names sites and the site's key has not signed the
        refusal: otherwise anybody could refuse in a site's name. A site may also refuse only until
        its operator has decided.
        """
        name = refusal.site
        waits = refusal.kind == "waiting"  # for its operator
        signature = bytes.fromhex(refusal.signature)
        run_id = self.run_history.run_id
        if name and not is_from_site(self.settings.study, name, run_id, "refusal", signature):
            return Problem(f"site {name}, not signed with its key: {refusal.text}", waits=waits)
        return Problem(refusal.text, name, waits)

    def _take_card(self, node: int, content: RecordDict) -> None:
        """Let a node be the site that its introduction names, if that is valid and the name free.

        Otherwise its problem is noted.
        """
        try:
            card = unpack_site_card(content)
        except RefusedMessage as refusal:
            name = str(content.config_records.get("site", ConfigRecord()).get("name", ""))
            # where sites sign, an invalid introduction proves no name
            has_name = is_site_name(name) and not self.settings.named_sites
            why = f"its introduction is not valid: {refusal}"
            self.problems[node] = Problem(why, name if has_name else "")
            return

        name = card.name
        self._card_of[node] = card
        self.problems.pop(node, None)  # It may have waited for approval
        signature = bytes.fromhex(card.signature)
        run_id = self.run_history.run_id
        # true of any site in a run without a study that names its sites
        if not is_from_site(self.settings.study, name, run_id, "introduction", signature):
            self.problems[node] = Problem(f"{name}: not signed by a site of the study")
            return
        if name in self._contested:
            self.problems[node] = Problem(
                f"{name}: two clients began with this name, so it is nobody's until you end one "
                "of them, stop the run and resume it"
            )
            return
        if name not in self.cards:
            self._admit(name, node, card)

    def _settle_names(self) -> None:
        """Decide for each name that nodes claim which of them is the site."""
        claimants = defaultdict(list)
        for node, card in self._card_of.items():
            if node in self.online and node not in self.problems:
                claimants[card.name].append(node)
        for name, nodes in claimants.items():
            self._settle(name, nodes)

    def _settle(self, name: str, claimants: list[int]) -> None:
        """Decide which of the connected nodes that claim a site's name is the site.

        It is the node that had the name first, or another one once that is gone. If two nodes
        claim a name that nobody had before, no node gets it.
        """
        current = self.node_of.get(name)
        owner = self.owners.get(name)
        # the first owner is back while another node had the name
        if owner in claimants and owner != current:
            if self._admit(name, owner, self._card_of[owner]):
                if current in claimants:
                    self.problems[current] = Problem(f"{name}: its own node is back")
                say(f"  back: {name}, on its own node")
            return

        if owner is None and len(claimants) > 1:
            del self.cards[name]
            del self.node_of[name]
            self._contested.add(name)
            both = f"two clients call themselves {name}, nodes {' and '.join(map(str, claimants))}"
            why = f"{both}: give each its own site-name or partition-id"
            self.problems |= dict.fromkeys(claimants, Problem(why))
            return

        if current in claimants:  # the site stays on its node
            rivals = set(claimants) - {current} - self._warned_of
            if rivals:
                self._warned_of |= rivals
                text = f"another client calls itself {name}; it waits until the first is gone"
                emit(RoundTrouble("warning", f"{text}, or is renamed"))
            return

        if len(claimants) == 1:
            (node,) = claimants
            if self._admit(name, node, self._card_of[node]):
                say(f"  back: {name}, on another node")

    def _admit(self, name: str, node: int, card: SiteCard) -> bool:
        """Let a node be a site if it fits the others; return whether it does.

        Before all have gathered, any node may.
        """
        if self._reference is not None:
            try:
                admission.check_fit(self.settings, {**self.cards, name: card})
            except FederationError as error:
                self.problems[node] = Problem(f"{name}: {error}")
                return False
        self.cards[name] = card
        self.node_of[name] = node
        return True
