"""Messages to the sites, and their replies.

What all messages of a round carry, which replies come in time, which come late, and which sites are
asked again.
"""

import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict

from protofl_common.basics.text import in_order
from protofl_common.flower import ErrorCode
from protofl_common.wire.payloads import payload_bytes
from protofl_common.wire.records import (
    Instructions,
    head_of,
    pack_baseline,
    pack_counted,
    pack_heads,
    pack_instructions,
)
from protofl_common.wire.refusal import refusal_in
from server_app.network.flower_compat import (
    TRIES,
    copy_for,
    id_of,
    is_simulated,
    pull_each,
    push_each,
)
from server_app.network.late import LateReplies
from server_app.network.membership import Federation, FederationError
from server_app.network.patience import ReplyTimes
from server_app.network.waiting import Waits
from server_app.network.witness import Witness
from server_app.run.flow import Flow, Question
from server_app.run.log import tell_silence
from server_app.run.replies import Exchanged, Upload

LOOK_AROUND_SECONDS = 3.0
"""Seconds between two looks around for sites that are new or back, while a round waits."""
RETURN_SECONDS = 30.0
"""Seconds in which a node that died over its message may return; Flower takes 60 to notice."""
MOST_OVERDUE = 4
"""Overdue messages of a site, the last ones, whose replies are still looked for."""
WORKER_DIED = re.compile(
    r"<class 'ray\.exceptions\.(\w*(?:Died|Unavailable|Crashed|OutOfMemory)\w*)'>"
)
"""How the error of a simulated client begins whose process is no more."""
FROM_SUPERLINK = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
)
"""Errors that stand for a reply that will not come: nothing was heard of the site itself."""
UNREACHABLE = Error(int(ErrorCode.NODE_UNAVAILABLE), "Flower has no node of this site any more")


@dataclass(frozen=True)
class _AwaySite:
    """A site whose node died over a message, and that may come back."""

    message: Message
    error: Message  # The reply of Flower's that says so
    until: float  # When it is given up, on the monotonic clock


@dataclass(frozen=True)
class _Overdue:
    """A message that was not answered in time; its reply may still come."""

    site: str
    message: Message
    asked: float  # When, on the monotonic clock


class MessageExchange:
    """Sends messages to sites and collects their replies.

    A site whose node dies over a message, and that is back in time, is asked again.
    """

    def __init__(self, federation: Federation, run_folder: Path) -> None:
        self.federation = federation
        self.grid = federation.grid
        self.run_name = run_folder.name
        self.witness = Witness.read(run_folder.parent, federation.settings.named_sites)
        self.late = LateReplies(federation)
        self._largest = 0
        """The most bytes in the arrays of a valid reply to any question so far, for late ones, too.
        """
        self.times = ReplyTimes()
        self.waits = Waits(run_folder, self.times)
        self._overdue: dict[str, _Overdue] = {}  # Message id -> it, in the order of asking
        # of the exchange under way: each site that was asked is in one of the next three
        self._pending: dict[str, Message] = {}
        self._away: dict[str, _AwaySite] = {}
        self._replies: dict[str, Message] = {}
        self._deaths: Counter[str] = Counter()  # Site -> how often it died in this exchange

    def run(self, flow: Flow, exchanged: Exchanged) -> list[Upload]:
        """Ask the questions that a flow yields, send it the answers, and return what it returns.

        The heads of audit logs that have come are written even if the flow fails.
        """
        try:
            question = next(flow)
            while True:
                question = flow.send(self.ask(question, exchanged))
        except StopIteration as end:
            return cast(list[Upload], end.value)
        finally:
            self.witness.add(self.run_name, exchanged.number, exchanged.audit_heads)

    def ask(self, question: Question, exchanged: Exchanged) -> dict[str, RecordDict]:
        """Ask the sites of a question, and return the content of each answer, by site.

        Bytes, failures, silent sites and heads of audit logs are noted in ``exchanged``.
        """
        self._largest = max(self._largest, question.largest)
        messages = {}
        for site, records in question.contents.items():
            content = RecordDict({**records, **self.about(exchanged, site)})
            exchanged.bytes_down += payload_bytes(content)
            node = self.federation.node_of[site]
            messages[site] = Message(content, node, question.kind, group_id=str(exchanged.number))

        reason_prefix = f"{question.stage}: " if question.stage else ""
        answers = {}
        replies = self._replies_to(messages, question.kind, exchanged)
        if question.kind == MessageType.TRAIN:
            in_time = self.late.hold_back(exchanged.number, replies)
            exchanged.silent |= replies.keys() - in_time.keys()  # slow simulated clients
            replies = in_time
        for site, reply in replies.items():
            if reply.has_error():
                exchanged.failed[site] = reason_prefix + refusal_in(reply).text
                continue
            head = head_of(reply.content)
            if head:
                exchanged.audit_heads[site] = head
            exchanged.bytes_up += payload_bytes(reply.content)
            answers[site] = reply.content
        return answers

    def at_work(self) -> set[str]:
        """Return the sites that a round does not ask, because they work on an earlier one.

        Late replies that have come are taken in first. With ``late = "discard"`` only slow
        simulated clients are returned. A site that has come back on another node is not at work:
        its message is lost.
        """
        working = set(self.late.held)
        if not self.federation.settings.federation.late_replies_count:
            return working
        self._pull(set(), {})  # no message of this round is pending: only late replies can come
        for overdue in self._overdue.values():
            node = self.federation.node_of.get(overdue.site)
            if overdue.message.metadata.dst_node_id == node:
                working.add(overdue.site)
        return working

    def about(self, exchanged: Exchanged, site: str = "") -> dict[str, ConfigRecord]:
        """Return the records that every message to a ``site`` has, whatever it asks.

        They name the round and the run, the last round in which the site's upload was merged, and
        the last head of its audit log that the server has seen. The masks of a secure sum depend on
        these records, so that there all sites get the same, with the facts of all that are asked,
        and ``site`` does not matter.
        """
        federation = self.federation
        sums_only = federation.settings.privacy.sums_only
        heads = self.witness.heads
        instructions = Instructions(exchanged.number, self.run_name, federation.run_history)
        rounds_of_all = {}
        if sums_only:
            rounds = {}
            for asked in exchanged.asked:
                if asked in federation.counted:
                    rounds[asked], _ = federation.counted[asked]
            rounds_of_all = pack_counted(rounds)
        elif site in federation.counted:
            counted, part = federation.counted[site]
            instructions = replace(instructions, counted=counted, part=part)
        told_of = exchanged.asked if sums_only else [site]
        return {
            "round": pack_instructions(instructions),
            **pack_baseline(federation.baseline),
            **rounds_of_all,
            **pack_heads({name: heads[name] for name in told_of if name in heads}),
        }

    def _replies_to(
        self, messages: Mapping[str, Message], kind: str, exchanged: Exchanged
    ) -> dict[str, Message]:
        """Send messages of one ``kind``, wait, and return the replies by site, in natural order.

        Waits at most for ``round-timeout``, or with ``grace`` as long as `ReplyTimes.patience`
        says; late sites are noted as silent. A site that Flower cannot reach has an error for a
        reply. Raises FederationError where a simulation cannot go on.
        """
        federation = self.federation
        settings = federation.settings.federation
        # not where clients divide a data set: simulated ones wait for a processor, and results must
        # not depend on that
        grace_applies = bool(settings.grace) and not federation.num_partitions
        if settings.late_replies_count:
            # a late reply counts in the next round, but none follows the final evaluation
            grace_applies = grace_applies and not exchanged.final
        else:
            # before the first reply of a kind nothing is known of how long sites take
            grace_applies = grace_applies and self.times.has(kind)
        alive = {site for site, node in federation.node_of.items() if node in federation.online}
        seconds: dict[str, float] = {}  # Site -> how long its reply took
        self._replies = {}
        self._away = {}
        self._pending = {}
        self._deaths = Counter()

        start = now = last_look = time.monotonic()
        self._push(messages)
        while self._pending or self._away or self._awaits_late(exchanged):
            has_answers = self._pull(alive, exchanged.late)
            now = time.monotonic()
            just_come = self._replies.keys() - seconds.keys()
            seconds |= dict.fromkeys(just_come, now - start)
            longest = settings.round_timeout
            replies_so_far = len(seconds) + len(self.late.arrived)
            may_close_early = grace_applies and bool(seconds)
            if may_close_early and replies_so_far >= federation.fewest_replies:
                # where late replies count, a slow site need not be waited for
                awaited = () if settings.late_replies_count else self._pending
                patience = self.times.patience(
                    kind, seconds.values(), awaited, settings.grace, settings.min_wait
                )
                longest = min(longest, patience)
            if now > start + longest:
                break
            if now > last_look + LOOK_AROUND_SECONDS:
                last_look = now
                federation.look_around()
                tell_silence(now)
                self._ask_again(now)
                silent = {*self._pending, *self._away}
                if self._awaits_late(exchanged):
                    silent |= {overdue.site for overdue in self._overdue.values()}
                if silent and not federation.simulated:
                    self.waits.tell(exchanged.number, kind, silent, now - start, longest)
            elif self._away or not has_answers:
                # ever longer, so that a long round does not keep the SuperLink busy
                time.sleep(min(0.25, max(0.01, 0.02 * (now - start))))

        self.waits.end()
        exchanged.waited_seconds = max(exchanged.waited_seconds, now - start)
        self._keep_overdue(start)
        exchanged.silent |= self._pending.keys()
        for site, took in seconds.items():
            if not self._replies[site].has_error():
                self.times.note(kind, site, start, start + took)
        for site, away in self._away.items():  # not back in time
            self._replies[site] = away.error
        self._check_simulation()

        replies = {site: self._replies[site] for site in in_order(self._replies)}
        self._replies = {}  # lest ten thousand replies stay in memory
        return replies

    def _check_simulation(self) -> None:
        """Raise FederationError if a simulated client's process has died, or its state is lost.

        Flower would keep giving clients to the dead process. Going on without a client's state, or
        with an older one, would change the figures.
        """
        if not self.federation.simulated:
            return  # sites with an operator go on, and cannot end a run by an error
        for site in in_order(self._replies):
            reply = self._replies[site]
            if not reply.has_error():
                continue
            died = WORKER_DIED.match(str(reply.error.reason))
            if died and is_simulated(self.grid):  # on a network a site could send this itself
                raise FederationError(
                    f"a process that simulates clients has died ({died[1]}), so that {site} did "
                    "not answer. Most often memory has run out: let fewer clients work at once "
                    "(--cpus). This round does not count; resume.toml in the run's folder lets it "
                    "go on"
                )
            refusal = refusal_in(reply)
            if refusal.kind == "lost-state":
                raise FederationError(f"{refusal.text}. This round does not count")

    def _awaits_late(self, exchanged: Exchanged) -> bool:
        """Return whether a round waits for replies to earlier rounds, as it has too few of its own.

        It does so only if late replies count (``late``), and never in the final evaluation.
        """
        if exchanged.final or not self.federation.settings.federation.late_replies_count:
            return False
        replies = len(self._replies) + len(self.late.arrived)
        return bool(self._overdue) and replies < self.federation.fewest_replies

    def _keep_overdue(self, asked: float) -> None:
        """Add the pending messages, sent at ``asked``, to those whose replies may still come late.

        Of each site only the last `MOST_OVERDUE` are kept.
        """
        for site, message in self._pending.items():
            self._overdue[id_of(message)] = _Overdue(site, message, asked)
        ids_of: dict[str, list[str]] = defaultdict(list)  # Site -> the ids of its messages
        for message_id, overdue in self._overdue.items():  # oldest first
            ids_of[overdue.site].append(message_id)
        for message_ids in ids_of.values():
            for message_id in message_ids[:-MOST_OVERDUE]:
                del self._overdue[message_id]

    def _push(self, messages: Mapping[str, Message]) -> None:
        """Send a message to each site; one that Flower does not take gets an error for a reply."""
        pushed = push_each(self.grid, messages.values())
        for site, (message, is_taken) in zip(messages, pushed, strict=True):
            if is_taken:
                self._pending[site] = message
            else:
                self._replies[site] = Message(UNREACHABLE, reply_to=message)

    def _pull(self, alive: set[str], late: dict[str, str]) -> bool:
        """Take in the replies that have come, and return whether there were any.

        A reply that says that its site's node died is kept apart if the site may come back:
        ``alive`` are the sites that were connected when this exchange began. A line for each late
        reply to an earlier round is put into ``late``, by site.
        """
        site_of = {id_of(message): site for site, message in self._pending.items()}
        messages = list(self._pending.values())
        messages += [overdue.message for overdue in self._overdue.values()]
        answered = pull_each(self.grid, messages, self._largest)
        for message, reply in answered:
            overdue = self._overdue.pop(id_of(message), None)
            if overdue:
                what = f"its reply to round {message.metadata.group_id}"
                if not reply.has_error():
                    kind = message.metadata.message_type
                    self.times.note(kind, overdue.site, overdue.asked, time.monotonic())
                    late[overdue.site] = what
                    self.late.note(overdue.site, message, reply)
                elif reply.error.code not in FROM_SUPERLINK:
                    late[overdue.site] = f"{what} failed: {refusal_in(reply).text}"
                continue
            site = site_of[id_of(message)]
            del self._pending[site]
            # a site may also send this error itself, so that deaths are counted and limited
            has_died = reply.has_error() and reply.error.code == ErrorCode.NODE_UNAVAILABLE
            if has_died:
                self._deaths[site] += 1
            if has_died and self._deaths[site] < TRIES and self._may_return(site, alive):
                self._away[site] = _AwaySite(message, reply, time.monotonic() + RETURN_SECONDS)
            else:
                self._replies[site] = reply
        return bool(answered)

    def _may_return(self, site: str, alive: set[str]) -> bool:
        """Look around for nodes, and return whether a site whose node died may come back.

        A site that was dead before the round (not in ``alive``) may only if another node is there
        for it, or if a node has not said yet which site it is.
        """
        federation = self.federation
        federation.look_around()
        if site in alive or federation.greeting:
            return True
        return federation.node_of[site] in federation.online

    def _ask_again(self, now: float) -> None:
        """Ask sites that are back once more, and give up those that were away too long."""
        node_of = self.federation.node_of
        copies = {}
        for site, message in self._pending.items():
            if message.metadata.dst_node_id != node_of[site]:  # it is on another node now
                copies[site] = copy_for(message, node_of[site])
        for site, away in list(self._away.items()):
            if node_of[site] in self.federation.online:
                copies[site] = copy_for(away.message, node_of[site])
                del self._away[site]
            elif now > away.until:
                self._replies[site] = away.error
                del self._away[site]
        self._push(copies)
