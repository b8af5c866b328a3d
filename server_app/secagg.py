"""Secure aggregation at the server: four exchanges, after which it knows the sum of figures and uploads and no more.

The client's half is `client_app/protections/secure_sum.py`. A site that is lost on the way costs only itself, as long
as the threshold of sites stays: before its upload the sum goes on without it, and afterwards the others' shares reveal
its mask. A site that is caught lying is asked nothing more in the run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np
from flwr.app import Message, RecordDict

from protofl_common.basics.text import printable
from protofl_common.privacy.masks import KEY, OWN, PAIR, SEALED, are_keys, own_mask, pair_mask, part, public_of
from protofl_common.privacy.shamir import SHARE, needed, points_of, recovered
from protofl_common.privacy.sums import MASKED, figure_names, from_sums, from_whole, length, means_of, with_masked
from protofl_common.wire.limits import RefusedMessage
from protofl_common.wire.payloads import payload_bytes
from protofl_common.wire.records import Instructions, Report, pack_baseline, pack_instructions
from protofl_common.wire.secagg import FINAL, pack_by_site, unpack_by_site
from server_app.result import RoundResult
from server_app.strategies.base import Strategy
from server_app.validation.replies import Expected, Upload

BySite = Mapping[str, bytes]


class Channel:
    """The way of one exchange's uploads to the server: here each site's own, as it was sent."""

    def __init__(self, expected: Expected) -> None:
        self.expected = expected
        """The content of a valid reply."""

    def opened_for(self, sites: Sequence[str]) -> Mapping[str, BySite]:
        """Return the sites that are asked for an upload, each with what its message must hold for that."""
        return {site: {} for site in sites}

    def received(self, uploads: list[Upload]) -> list[Upload]:
        """Return the uploads as the server may read them; [] where it may not."""
        return uploads


def channel_of(
    strategy: Strategy,
    instructions: Instructions,
    send: Callable[..., list[Message]],
    expected: Expected,
    result: RoundResult,
) -> Channel:
    """The channel that the settings of the run ask for."""
    if strategy.settings.privacy.secagg:
        return SecureSum(strategy, instructions, send, expected, result)
    return Channel(expected)


class SecureSum(Channel):
    """One sum of what is ``expected`` of each site; the ``result`` says what goes wrong, or why there is none."""

    def __init__(
        self,
        strategy: Strategy,
        instructions: Instructions,
        send: Callable[..., list[Message]],
        expected: Expected,
        result: RoundResult,
    ) -> None:
        self.federation, self.settings, self.result = strategy.federation, strategy.settings, result
        self.instructions, self.send, self.summed = instructions, send, expected
        self.figures = figure_names(self.settings.row.reported_losses, expected.metrics)
        self.size = 2 * len(self.figures) + length(expected.declared, expected.limits)
        super().__init__(Expected(expected.server_round, MASKED, with_masked(expected.limits, self.size)))
        self.keys: dict[str, bytes] = {}
        self.threshold = 0

    def opened_for(self, sites: Sequence[str]) -> Mapping[str, BySite]:
        """Each site that may send -> the shares that the others have sealed for it; {} where too few are left."""
        self.threshold = needed(len(sites), self.settings.privacy.secagg_threshold)
        given = self._exchange("advertise", {site: {} for site in sites}, 3 * KEY)
        self.keys = {site: one[site] for site, one in given.items() if set(one) == {site} and are_keys(one[site])}
        self._expel(given.keys() - self.keys.keys(), "keys that are none")
        if self._too_few(self.keys, "keys"):
            return {}
        self.threshold = needed(len(self.keys), self.settings.privacy.secagg_threshold)
        sealed = self._exchange("share", dict.fromkeys(self.keys, self.keys), SEALED)
        shared = {site: one for site, one in sealed.items() if set(one) == self.keys.keys() - {site}}
        self._expel(sealed.keys() - shared.keys(), "shares for other sites than the round's")
        self.shared = [] if self._too_few(shared, "shares of their keys") else list(shared)
        return {site: {peer: shared[peer][site] for peer in self.shared if peer != site} for site in self.shared}

    def received(self, uploads: list[Upload]) -> list[Upload]:
        """The mean of the masked ``uploads`` as one upload, and of their figures; [] where it cannot be had."""
        sent = {
            upload.site: (upload.payload.weights("masked") or {})["sum"].numpy().view(np.uint64) for upload in uploads
        }
        if self._too_few(sent, "uploads"):
            return []
        shares = self._exchange("unmask", dict.fromkeys(sent, dict.fromkeys(sent, b"")), SHARE)
        if self._too_few(shares, "shares to unmask the sum"):
            return []
        try:
            sums = np.add.reduce(list(sent.values())) - self._masks(sent, shares)
            start, sites = 2 * len(self.figures), len(self.keys)
            payload, samples = from_sums(sums[start:], self.summed.declared, self.summed.limits, sites)
            self.result.means = means_of(from_whole(sums[:start], sites), self.figures)
        except RefusedMessage as refusal:
            self.result.not_merged = f"secure aggregation: {refusal}"
            return []
        return [Upload("all", payload, Report(self.instructions.round, samples, 0), clients=len(sent))]

    def _masks(self, sent: Collection[str], shares: Mapping[str, BySite]) -> np.ndarray:
        """Return the rest of the sum beside the uploads, [L] uint64. RefusedMessage where too many shares are wrong."""
        total, points = np.zeros(self.size, np.uint64), points_of(self.keys)
        conflicts: list[set[str]] = []
        for site in self.shared:
            which = OWN if site in sent else PAIR
            public = part(self.keys[site], which)
            given = {points[one]: its[site] for one, its in shares.items() if site in its}
            found = recovered(given, self.threshold, partial(_fit, public))
            if found is None:
                lie = f"the shares of {site}'s keys do not give them: it, or others that have them, lie"
                if len(shares) > self.threshold:  # then a single liar among the others could not do that
                    self._expel([site], lie)
                raise RefusedMessage(lie)
            secret, wrong = found
            liars = [one for one in sent if points[one] in wrong]
            self._refuse(liars, f"a wrong share of a key of {site}: one of the two lies")
            conflicts += [{site, one} for one in liars]
            if which == OWN:
                total += own_mask(secret, self.size)
            else:
                for peer in sent:
                    total -= pair_mask(secret, site, peer, self.keys[peer], self.size)
        if conflicts and len(in_all := set.intersection(*conflicts)) == 1:
            self._expel(in_all, "wrong shares of keys")
        return total

    def _exchange(self, stage: str, contents: Mapping[str, BySite], size: int) -> dict[str, dict[str, bytes]]:
        """Send each site its contents; return the answers, with ``size`` bytes of every site."""
        federation, about = self.federation, self.instructions
        records = {"round": pack_instructions(about), **pack_baseline(federation.baseline)}
        kind = f"query.{stage}" if self.summed.training else f"query.{stage}{FINAL}"
        messages = []
        for site, own in contents.items():
            content = RecordDict({**records, **(pack_by_site(own) if own else {})})
            self.result.bytes_down += payload_bytes(content)
            messages.append(Message(content, federation.node_of[site], kind, group_id=str(about.round)))
        answers = {}
        for reply in self.send(messages, self.settings.federation.round_timeout):
            site = federation.asked[reply.metadata.reply_to_message_id]
            if reply.has_error():
                self.result.failed[site] = f"{stage}: {printable(str(reply.error.reason))}"
                continue
            self.result.bytes_up += payload_bytes(reply.content)
            try:
                answers[site] = unpack_by_site(reply.content, size)
            except RefusedMessage as refusal:
                self._expel([site], str(refusal))
        return answers

    def _expel(self, sites: Collection[str], why: str) -> None:
        """Refuse what these sites have sent, and ask them nothing more."""
        self._refuse(sites, f"{why}; it takes no further part in this run")
        self.federation.expelled |= set(sites)

    def _refuse(self, sites: Collection[str], why: str) -> None:
        self.result.refused |= dict.fromkeys(sites, f"secure aggregation: {why}")

    def _too_few(self, left: Collection[str], sent: str) -> bool:
        """Return whether fewer than the threshold have sent something, which then is why the round is void."""
        few = len(left) < self.threshold
        if few:
            why = f"{len(left)} of {len(self.result.asked)} sites sent {sent}, fewer than the {self.threshold} needed"
            self.result.not_merged = self.result.not_merged or f"secure aggregation: {why} (secagg-threshold)"
        return few


def _fit(public: bytes, secret: bytes) -> bool:
    return public_of(secret) == public
