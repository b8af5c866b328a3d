"""Secure aggregation at the server: four exchanges of a round, after which it knows the sum of the uploads and no more.

The client's half is `client_app/secagg.py`. A site that is lost on the way costs only itself, as long as the threshold
of sites stays: before its upload the sum goes on without it, and afterwards the others' shares reveal its mask.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np
from flwr.app import Message, RecordDict

from protofl_common.privacy.masks import KEY, OWN, PAIR, SEALED, are_keys, own_mask, pair_mask, part, public_of
from protofl_common.privacy.shamir import SHARE, needed, points_of, recovered
from protofl_common.privacy.sums import from_sums, length
from protofl_common.text import printable
from protofl_common.wire.limits import Limits, RefusedMessage
from protofl_common.wire.payloads import payload_bytes
from protofl_common.wire.records import Instructions, Report, pack_baseline, pack_instructions
from protofl_common.wire.schema import Declared
from protofl_common.wire.secagg import pack_by_site, unpack_by_site
from server_app.network.membership import Federation
from server_app.validation.replies import Outcome, Upload

BySite = Mapping[str, bytes]


class SecureRound:
    """One round; what goes wrong in it stands in ``outcome``, and in ``outcome.void`` why there is no sum."""

    def __init__(
        self, federation: Federation, instructions: Instructions, send: Callable[..., list[Message]], outcome: Outcome
    ) -> None:
        self.federation, self.instructions, self.send, self.outcome = federation, instructions, send, outcome
        self.settings = federation.settings
        self.keys: dict[str, bytes] = {}
        self.threshold = 0

    def share_keys(self, sites: Sequence[str]) -> dict[str, dict[str, bytes]]:
        """Each site that may train -> the shares that the others have sealed for it; {} where too few are left."""
        self.threshold = needed(len(sites), self.settings.privacy.secagg_threshold)
        given = self._exchange("advertise", {site: {} for site in sites}, 3 * KEY)
        self.keys = {site: one[site] for site, one in given.items() if set(one) == {site} and are_keys(one[site])}
        self._refuse(given.keys() - self.keys.keys(), "keys that are none")
        if self._too_few(self.keys, "keys"):
            return {}
        self.threshold = needed(len(self.keys), self.settings.privacy.secagg_threshold)
        sealed = self._exchange("share", dict.fromkeys(self.keys, self.keys), SEALED)
        shared = {site: one for site, one in sealed.items() if set(one) == self.keys.keys() - {site}}
        self._refuse(sealed.keys() - shared.keys(), "shares for other sites than the round's")
        self.shared = [] if self._too_few(shared, "shares of their keys") else list(shared)
        return {site: {peer: shared[peer][site] for peer in self.shared if peer != site} for site in self.shared}

    def unmasked(self, uploads: Sequence[Upload], declared: Declared, limits: Limits) -> list[Upload]:
        """The mean of the masked ``uploads`` as one upload; [] where it cannot be had."""
        sent = {
            upload.site: (upload.payload.weights("masked") or {})["sum"].numpy().view(np.uint64) for upload in uploads
        }
        if self._too_few(sent, "uploads"):
            return []
        shares = self._exchange("unmask", dict.fromkeys(sent, dict.fromkeys(sent, b"")), SHARE)
        if self._too_few(shares, "shares to unmask the sum"):
            return []
        try:
            sums = np.add.reduce(list(sent.values())) - self._masks(sent, shares, length(declared, limits))
            payload, samples = from_sums(sums, declared, limits, len(self.keys))
        except RefusedMessage as refusal:
            self.outcome.void = f"secure aggregation: {refusal}"
            return []
        return [Upload("all", payload, Report(self.instructions.round, samples, 0))]

    def _masks(self, sent: Collection[str], shares: Mapping[str, BySite], size: int) -> np.ndarray:
        """[L] uint64: what is in the sum beside the uploads. RefusedMessage where too many shares are wrong."""
        total, points = np.zeros(size, np.uint64), points_of(self.keys)
        for site in self.shared:
            which = OWN if site in sent else PAIR
            public = part(self.keys[site], which)
            given = {points[one]: its[site] for one, its in shares.items() if site in its}
            found = recovered(given, self.threshold, partial(_fit, public))
            if found is None:
                raise RefusedMessage(f"the shares of {site}'s keys do not give them: it, or others that hold them, lie")
            secret, wrong = found
            self._refuse([one for one in sent if points[one] in wrong], f"a wrong share of a key of {site}")
            if which == OWN:
                total += own_mask(secret, size)
            else:
                for peer in sent:
                    total -= pair_mask(secret, site, peer, self.keys[peer], size)
        return total

    def _exchange(self, stage: str, told: Mapping[str, BySite], size: int) -> dict[str, dict[str, bytes]]:
        """Tell each site something of every site; what each answers, with ``size`` bytes of every site."""
        federation, about = self.federation, self.instructions
        records = {"round": pack_instructions(about), **pack_baseline(federation.baseline)}
        messages = []
        for site, one in told.items():
            content = RecordDict({**records, **(pack_by_site(one) if one else {})})
            self.outcome.bytes_down += payload_bytes(content)
            messages.append(Message(content, federation.node_of[site], f"query.{stage}", group_id=str(about.round)))
        found = {}
        for reply in self.send(messages, self.settings.federation.round_timeout):
            site = federation.asked[reply.metadata.reply_to_message_id]
            if reply.has_error():
                self.outcome.failed[site] = f"{stage}: {printable(str(reply.error.reason))}"
                continue
            self.outcome.bytes_up += payload_bytes(reply.content)
            try:
                found[site] = unpack_by_site(reply.content, size)
            except RefusedMessage as refusal:
                self._refuse([site], str(refusal))
        return found

    def _refuse(self, sites: Collection[str], why: str) -> None:
        self.outcome.refused |= dict.fromkeys(sites, f"secure aggregation: {why}")

    def _too_few(self, left: Collection[str], sent: str) -> bool:
        """Whether fewer than the threshold have sent something, which then is why the round is void."""
        few = len(left) < self.threshold
        if few:
            told = f"{len(left)} of {len(self.outcome.asked)} sites sent {sent}, fewer than the {self.threshold} needed"
            self.outcome.void = f"secure aggregation: {told} (secagg-threshold)"
        return few


def _fit(public: bytes, secret: bytes) -> bool:
    return public_of(secret) == public
