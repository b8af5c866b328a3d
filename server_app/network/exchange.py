"""Messages to the sites: what all of a round carry, what came in time, what came late, and whom to ask again."""

import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from flwr.app import ConfigRecord, Error, Message, RecordDict

from protofl_common.basics.text import in_order, printable
from protofl_common.wire.payloads import payload_bytes
from protofl_common.wire.records import (
    LOST_STATE,
    Instructions,
    head_of,
    pack_baseline,
    pack_instructions,
)
from server_app.log import tell_silence
from server_app.network.flower_compat import (
    TRIES,
    ErrorCode,
    copy_for,
    id_of,
    is_simulated,
    pull_each,
    push_each,
)
from server_app.network.membership import Federation, FederationError
from server_app.replies import Records, RoundResult

LOOK_EVERY = 3.0  # Seconds between two looks around for sites that are new or back, while a round waits
PATIENCE = 30.0  # Seconds in which a node that died over its message may return; Flower takes 60 to notice
LEAST_GRACE = 120.0  # Seconds that a round waits at least: Flower takes 60 to notice a death, then `PATIENCE`
WORKER_DIED = re.compile(r"<class 'ray\.exceptions\.(\w*(?:Died|Unavailable|Crashed|OutOfMemory)\w*)'>")
"""How the error of a simulated client begins whose process is no more."""
UNREACHABLE = Error(int(ErrorCode.NODE_UNAVAILABLE), "Flower has no node of this site any more")


class MessageExchange:
    """Sends messages, and collects replies; a site that died over one, and is back in time, is asked again."""

    def __init__(self, federation: Federation, run_name: str) -> None:
        self.federation, self.grid, self.run_name = federation, federation.grid, run_name
        self.arrays = 0  # how many bytes the arrays of a valid reply have at most
        self._longest: dict[str, float] = {}  # Site -> its slowest reply so far, in seconds
        self._overdue: dict[str, Message] = {}  # Site -> the last message that it has not answered in time
        # the next sum of secure aggregation: its number, its sites' keys, and the shares of them that each has sealed
        self.begun: tuple[int, Mapping[str, bytes], Mapping[str, Mapping[str, bytes]]] | None = None
        self._pending: dict[str, Message] = {}
        # site whose node died -> what it was asked, the error that says so, and until when it may come back
        self._away: dict[str, tuple[Message, Message, float]] = {}
        self._replies: dict[str, Message] = {}

    def ask(
        self, kind: str, contents: Mapping[str, Records], result: RoundResult, stage: str = ""
    ) -> dict[str, RecordDict]:
        """Ask sites in a round or the final evaluation; its ``result`` takes the bytes, and who could not answer."""
        federation = self.federation
        messages, answers = dict[str, Message](), dict[str, RecordDict]()
        for site, records in contents.items():
            content = RecordDict({**records, **self.about(result, site)})
            result.bytes_down += payload_bytes(content)
            messages[site] = Message(content, federation.node_of[site], kind, group_id=str(result.number))
        for site, reply in self._replies_to(messages, result).items():
            if reply.has_error():
                result.failed[site] = stage + printable(str(reply.error.reason))
            else:
                if head := head_of(reply.content):
                    result.heads[site] = head
                result.bytes_up += payload_bytes(reply.content)
                answers[site] = reply.content
        return answers

    def about(self, result: RoundResult, site: str = "") -> dict[str, ConfigRecord]:
        """Return the records that say what a message is about: of a secure sum, whose uploads have no author, to all.

        Otherwise a ``site`` also learns whether its last upload counted.
        """
        federation = self.federation
        instructions = Instructions(result.number, self.run_name, federation.run_history)
        if site in federation.counted and not federation.settings.privacy.sums_only:
            counted, part = federation.counted[site]
            instructions = replace(instructions, counted=counted, part=part)
        return {"round": pack_instructions(instructions), **pack_baseline(federation.baseline)}

    def _replies_to(self, messages: Mapping[str, Message], result: RoundResult) -> dict[str, Message]:
        """Send, and return the replies by site, in order; after ``round-timeout``, or `_patience`, without the late."""
        start = looked = now = time.monotonic()
        alive = {site for site, node in self.federation.node_of.items() if node in self.federation.online}
        self._replies, self._away, self._pending, self._deaths = {}, {}, {}, Counter[str]()
        took, timeout = dict[str, float](), self.federation.settings.federation.round_timeout
        # not in the first exchange, which knows nobody, nor where clients divide a data set: simulated ones wait for a
        # processor, and results must not depend on it
        hurried = self.federation.settings.federation.grace and self._longest and not self.federation.num_partitions
        self._push(messages)
        while self._pending or self._away:
            arrived = self._pull(alive, result.late)
            now = time.monotonic()
            took |= dict.fromkeys(self._replies.keys() - took.keys(), now - start)
            if now > start + (min(timeout, self._patience(took)) if hurried else timeout):
                break
            if now > looked + LOOK_EVERY:
                looked = now
                self.federation.look_around()
                tell_silence(now)
                self._ask_again(now)
            elif (self._pending and not arrived) or self._away:
                time.sleep(min(0.25, max(0.01, 0.02 * (now - start))))
        result.waited, self._overdue = max(result.waited, now - start), self._overdue | self._pending
        self._longest |= {site: max(took[site], self._longest.get(site, 0)) for site in took}
        self._replies |= {site: error for site, (_, error, _) in self._away.items()}
        self._check_workers()
        self._check_states()
        replies, self._replies = self._replies, {}  # they are the caller's alone: ten thousand must not stay
        return {site: replies[site] for site in in_order(replies)}

    def _check_workers(self) -> None:
        """FederationError where a process that simulates clients has died: Flower would go on giving it clients."""
        errors = {site: str(reply.error.reason) for site, reply in self._replies.items() if reply.has_error()}
        lost = {site: died[1] for site, reason in errors.items() if (died := WORKER_DIED.match(reason))}
        if lost and is_simulated(self.grid):
            end = f"a process that simulates clients has died ({next(iter(lost.values()))})"
            cure = "Most often memory has run out: let fewer clients work at once (--cpus)"
            then = "This round does not count; resume.toml in the run's folder lets it go on"
            raise FederationError(f"{end}, so that {', '.join(in_order(lost))} did not answer. {cure}. {then}")

    def _check_states(self) -> None:
        """FederationError where a simulated client has lost its state.

        Without it, or with an older one, the figures would be others.
        """
        if not self.federation.simulated:
            return  # sites with an operator go on, and cannot end a run by an error
        for site in in_order(self._replies):
            reply = self._replies[site]
            if reply.has_error() and reply.error.code == LOST_STATE:
                reason = printable(str(reply.error.reason))
                raise FederationError(f"{reason}. This round does not count")

    def _patience(self, took: dict[str, float]) -> float:
        """Seconds to wait: all until ``min-replies``, then ``grace`` times the median, or a missing site's slowest."""
        if len(took) < self.federation.least_replies:
            return math.inf
        usual = [statistics.median(took.values()), *(self._longest.get(site, 0) for site in self._pending)]
        return max(LEAST_GRACE, self.federation.settings.federation.grace * max(usual))

    def _push(self, messages: Mapping[str, Message]) -> None:
        """Send; what Flower does not take is as good as answered with an error."""
        for site, (message, taken) in zip(messages, push_each(self.grid, messages.values()), strict=True):
            if taken:
                self._pending[site] = message
            else:
                self._replies[site] = Message(UNREACHABLE, reply_to=message)

    def _pull(self, alive: set[str], late: dict[str, str]) -> bool:
        """Take in what was answered, to this exchange or ``late`` to one before; whether anything was."""
        site_of = {id_of(message): site for asked in (self._pending, self._overdue) for site, message in asked.items()}
        answered = pull_each(self.grid, [*self._pending.values(), *self._overdue.values()], self.arrays)
        for message, reply in answered:
            site = site_of[id_of(message)]
            if self._pending.get(site) is not message:
                del self._overdue[site]
                if not reply.has_error():
                    late[site] = f"its reply to round {message.metadata.group_id}"
                continue
            del self._pending[site]
            died = reply.has_error() and reply.error.code == ErrorCode.NODE_UNAVAILABLE  # or only says so
            self._deaths[site] += died
            if died and self._deaths[site] < TRIES and self._may_return(site, alive):
                self._away[site] = message, reply, time.monotonic() + PATIENCE
            else:
                self._replies[site] = reply
        return bool(answered)

    def _may_return(self, site: str, alive: set[str]) -> bool:
        """Return whether a dead node may return: not if it was dead before the round, and nobody comes instead."""
        self.federation.look_around()
        return site in alive or self.federation.greeting or self.federation.node_of[site] in self.federation.online

    def _ask_again(self, now: float) -> None:
        """Ask sites that are back; no longer wait for those that were away too long."""
        node_of, pending = self.federation.node_of, self._pending.items()
        moved = {site: message for site, message in pending if message.metadata.dst_node_id != node_of[site]}
        away, online = self._away.items(), self.federation.online
        back = {site: message for site, (message, _, _) in away if node_of[site] in online}
        self._push({site: copy_for(message, node_of[site]) for site, message in (moved | back).items()})
        gone = {site: error for site, (_, error, until) in away if site not in back and now > until}
        self._replies |= gone
        for site in back.keys() | gone.keys():
            del self._away[site]
