"""Who takes part: finding the sites, letting them introduce themselves, and exchanging messages with them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from protofl_common.messages import RefusedMessage, SiteCard, unpack_site_card
from protofl_common.settings import Settings
from server_app.sampling import in_order


class FederationError(RuntimeError):
    """The federation cannot work; the message says who is missing or what does not fit together."""


class Federation:
    """The sites of a run, known by their own names; Flower's node ids change at every restart."""

    def __init__(self, grid: Grid, settings: Settings) -> None:
        self.grid = grid
        self.settings = settings
        self.cards: dict[str, SiteCard] = {}
        self.node_of: dict[str, int] = {}

    @property
    def site_of(self) -> dict[int, str]:
        """Node id -> site name."""
        return {node: name for name, node in self.node_of.items()}

    def gather(self) -> None:
        """Wait until the wanted number of sites has connected and introduced itself (``num-clients``).

        Raises
        ------
        FederationError
            If too few do so within ``join-timeout``, if those that cannot take part (wrong settings, missing data)
            leave too few, or if the sites do not fit together.
        """
        deadline = time.monotonic() + self.settings.federation.join_timeout
        asked: dict[int, str] = {}
        waiting: set[str] = set()
        problems: dict[int, str] = {}
        while time.monotonic() < deadline:
            new = [node for node in self.grid.get_node_ids() if node not in asked]
            if new:
                ids = list(self.grid.push_messages([_introduction(node) for node in new]))
                asked |= dict(zip(new, ids, strict=False))
                waiting |= set(ids)
            for reply in self.grid.pull_messages(waiting) if waiting else ():
                waiting.discard(reply.metadata.reply_to_message_id)
                self._take_card(reply, problems)
            wanted = self._wanted()
            if not waiting and wanted and len(self.cards) >= wanted:
                break
            if not waiting and problems and len(self.cards) + len(problems) >= wanted:
                raise FederationError(_explain(problems))
            time.sleep(0.1)
        else:
            raise FederationError(self._too_few(problems))
        self._check_fit()

    def exchange(self, messages: Sequence[Message], timeout: float) -> list[Message]:
        """Send messages and collect the replies, in the order of the site names; late ones are left out.

        Flower's own ``send_and_receive`` looks for replies every 3 seconds; here the pause is 2 % of the time
        already waited, between 10 and 250 ms.
        """
        start = time.monotonic()
        waiting = set(self.grid.push_messages(messages))
        replies: list[Message] = []
        while waiting and (waited := time.monotonic() - start) < timeout:
            arrived = list(self.grid.pull_messages(waiting))
            waiting -= {reply.metadata.reply_to_message_id for reply in arrived}
            replies += arrived
            if waiting and not arrived:
                time.sleep(min(0.25, max(0.01, 0.02 * waited)))
        names = self.site_of
        rank = {name: index for index, name in enumerate(in_order(names.values()))}
        return sorted(
            (reply for reply in replies if reply.metadata.src_node_id in names),
            key=lambda reply: rank[names[reply.metadata.src_node_id]],
        )

    def _take_card(self, reply: Message, problems: dict[int, str]) -> None:
        node = reply.metadata.src_node_id
        if reply.has_error():
            problems[node] = str(reply.error.reason)
            return
        try:
            card = unpack_site_card(reply.content)
        except RefusedMessage as refusal:
            problems[node] = f"an introduction with {refusal}"
            return
        if card.name in self.cards:
            raise FederationError(
                f"two clients call themselves {card.name}: give each its own site-name or partition-id"
            )
        self.cards[card.name] = card
        self.node_of[card.name] = node

    def _wanted(self) -> int:
        """How many sites to wait for; 0: not known yet."""
        return self.settings.federation.num_clients or max(
            (card.num_partitions for card in self.cards.values()), default=0
        )

    def _too_few(self, problems: dict[int, str]) -> str:
        wanted, timeout = self._wanted(), self.settings.federation.join_timeout
        if not wanted and self.cards:
            return "num-clients = 0: the clients give no num-partitions, so say here how many to wait for"
        number = wanted or "an unknown number of"
        text = f"{len(self.cards)} of {number} clients were ready after {timeout:g} s (join-timeout)"
        return f"{text}\n{_explain(problems)}" if problems else text

    def _check_fit(self) -> None:
        """The sites must agree on the classes, and on the architecture where weights are averaged."""
        self._must_agree("classes", {name: ", ".join(card.classes) for name, card in self.cards.items()})
        if self.settings.row.shares_weights:
            self._must_agree("arch", {name: card.arch for name, card in self.cards.items()})
            inputs = {name: f"{c.in_channels}×{c.image_size}×{c.image_size}" for name, c in self.cards.items()}
            self._must_agree("image size", inputs)

    def _must_agree(self, what: str, values: dict[str, str]) -> None:
        sites_of = defaultdict(list)
        for name in in_order(values):
            sites_of[values[name]].append(name)
        if len(sites_of) < 2:
            return
        lines = [f"  {value}: {', '.join(sites)}" for value, sites in sites_of.items()]
        hints = {
            "classes": "set `classes` to the class names in label order",
            "arch": f"{self.settings.run.algo} averages weights and needs one architecture on all sites",
            "image size": "set `image-size`",
        }
        raise FederationError(f"the sites differ in {what}; {hints[what]}:\n" + "\n".join(lines))


def _introduction(node: int) -> Message:
    return Message(RecordDict(), node, MessageType.QUERY, group_id="0")


def _explain(problems: dict[int, str]) -> str:
    """Each distinct problem once, with how many clients have it."""
    counted: dict[str, int] = defaultdict(int)
    for reason in problems.values():
        counted[reason] += 1
    lines = [f"{number} client{'s' * (number > 1)} cannot take part: {why}" for why, number in counted.items()]
    return "\n".join(lines)
