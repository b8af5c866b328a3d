"""Secure aggregation at the server: four exchanges, after which it knows the sum of figures and uploads and no more.

The last of them brings the sites' keys for the next sum, too, which then takes three.

The client's half is `client_app/protections/secure_sum.py`. A site that is lost on the way costs only itself, as long
as the threshold of sites stays: before its upload the sum goes on without it, and afterwards the others' shares reveal
its mask. A site that is caught lying is asked nothing more in the run.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import numpy as np

from protofl_common.experiment.study import is_from_site
from protofl_common.privacy import masks
from protofl_common.privacy.shamir import SHARE, needed, points_of, recovered
from protofl_common.privacy.sums import (
    MASKED,
    figure_names,
    from_sums,
    from_whole,
    length,
    means_of,
    sum_after,
    with_masked,
)
from protofl_common.wire.records import FINAL, NEXT_KEYS, Report, pack_by_site, unpack_by_site
from protofl_common.wire.schema import RefusedMessage
from server_app.network.exchange import MessageExchange, Records
from server_app.network.membership import Federation
from server_app.replies import Expected, RoundResult, Upload, VoidRound

BySite = Mapping[str, Mapping[str, bytes]]
KEYS = masks.PUBLIC + masks.SIGNATURE


class Channel:
    """The way of one exchange's uploads to the server: here each site's own, as it was sent."""

    def __init__(self, expected: Expected) -> None:
        self.expected = expected

    def opened_for(self, sites: Sequence[str]) -> Mapping[str, Records]:
        """Return the sites that are asked for an upload, each with the records that its message must have for that."""
        return {site: {} for site in sites}

    def accept(self, uploads: list[Upload], federation: Federation, result: RoundResult) -> list[Upload]:
        """Return the uploads as the server may read them; VoidRound where it may not."""
        return uploads


def channel_of(exchange: MessageExchange, result: RoundResult, expected: Expected) -> Channel:
    return SecureSum(exchange, result, expected) if exchange.federation.settings.privacy.secagg else Channel(expected)


class SecureSum(Channel):
    """One sum of what is ``expected`` of each site; the result says what goes wrong."""

    def __init__(self, exchange: MessageExchange, result: RoundResult, expected: Expected) -> None:
        self.exchange, self.result, self.summed = exchange, result, expected
        self.federation, self.settings = exchange.federation, exchange.federation.settings
        self.number = 2 * result.number + result.final
        self.figures = figure_names(self.settings.row.reported_losses, expected.metrics)
        self.size = 2 * len(self.figures) + length(expected.declared, expected.limits)
        limits = with_masked(expected.limits, self.size)
        super().__init__(Expected(expected.server_round, MASKED, limits, counts_samples=False))
        self.keys: dict[str, bytes] = {}
        self.shared: list[str] = []
        self.threshold = 0

    def opened_for(self, sites: Sequence[str]) -> Mapping[str, Records]:
        """Each site that may send, with the shares that the others have sealed for it."""
        self.threshold = self._needed(sites)
        early = self.exchange.early_keys.get(self.number, {})
        asked = self._exchange("advertise", {site: {} for site in sites if site not in early}, KEYS)
        keys = {site: its for site in sites if (its := early.get(site) or asked.get(site))}
        own = {site: mine[site] for site, mine in keys.items() if set(mine) == {site}}
        self.keys = {site: public for site, public in own.items() if self._may_share(site, public)}
        self._expel(keys.keys() - self.keys.keys(), "keys that are none, or not signed with the site's key")
        self._check_enough(self.keys, "keys")
        self.threshold = self._needed(self.keys)
        sealed = self._exchange("share", dict.fromkeys(self.keys, self.keys), masks.SEALED)
        shared = {site: its for site, its in sealed.items() if set(its) == self.keys.keys() - {site}}
        self._expel(sealed.keys() - shared.keys(), "shares for other sites than the round's")
        self._check_enough(shared, "shares of their keys")
        self.shared = list(shared)
        return {site: pack_by_site({peer: shared[peer][site] for peer in shared if peer != site}) for site in shared}

    def accept(self, uploads: list[Upload], federation: Federation, result: RoundResult) -> list[Upload]:
        """The mean of the masked ``uploads`` as one upload, and of their figures."""
        masked = {upload.site: upload.payload.weights("masked") or {} for upload in uploads}
        sent = {site: arrays["sum"].numpy().view(np.uint64) for site, arrays in masked.items()}
        self._check_enough(sent, "uploads")
        shares = self._exchange("unmask", dict.fromkeys(sent, dict.fromkeys(sent, b"")), SHARE)
        self._check_enough(shares, "shares to unmask the sum")
        try:
            sums = np.add.reduce(list(sent.values())) - self._masks(sent, shares)
            start, sites = 2 * len(self.figures), len(self.keys)
            payload, samples = from_sums(sums[start:], self.summed.declared, self.summed.limits, sites)
            result.means = means_of(from_whole(sums[:start], sites), self.figures)
        except RefusedMessage as refusal:
            raise VoidRound(f"secure aggregation: {refusal}") from None
        return [Upload("all", payload, Report(result.number, samples, 0), clients=len(sent))]

    def _may_share(self, site: str, keys: bytes) -> bool:
        """Return whether one can agree on secrets by these keys, and the site has signed them if a study names it."""
        purpose, run_id = (
            masks.introducing(self.settings.run.algo, self.number, keys),
            self.federation.run_history.run_id,
        )
        return masks.are_keys(keys) and is_from_site(self.settings.study, site, run_id, purpose, keys[masks.PUBLIC :])

    def _needed(self, sites: Collection[str]) -> int:
        """Return how many must stay to the end: each site asks for its share of all that the study names."""
        return needed(max(len(sites), len(self.federation.named)), self.settings.privacy.secagg_threshold)

    def _masks(self, sent: Collection[str], shares: BySite) -> np.ndarray:
        """Return the rest of the sum beside the uploads, [L] uint64. RefusedMessage where too many shares are wrong."""
        total, points = np.zeros(self.size, np.uint64), points_of(self.keys)
        conflicts: list[set[str]] = []
        for site in self.shared:
            which = masks.OWN if site in sent else masks.PAIR
            public = masks.part(self.keys[site], which)
            its_shares = {points[peer]: its[site] for peer, its in shares.items() if site in its}
            solution = recovered(its_shares, self.threshold, partial(_fit, public))
            if solution is None:
                lie = f"the shares of {site}'s keys do not give them: it, or others that have them, lie"
                if len(shares) > self.threshold:  # then a single liar among the others could not do that
                    self._expel([site], lie)
                raise RefusedMessage(lie)
            secret, wrong = solution
            liars = [peer for peer in sent if points[peer] in wrong]
            self._refuse(liars, f"a wrong share of a key of {site}: one of the two lies")
            conflicts += [{site, liar} for liar in liars]
            if which == masks.OWN:
                total += masks.own_mask(secret, self.size)
            else:
                for peer in sent:
                    total -= masks.pair_mask(secret, site, peer, self.keys[peer], self.size)
        if conflicts and len(in_all := set.intersection(*conflicts)) == 1:
            self._expel(in_all, "wrong shares of keys")
        return total

    def _exchange(self, stage: str, contents: BySite, size: int) -> dict[str, dict[str, bytes]]:
        kind = f"query.{stage}{FINAL if self.result.final else ''}"
        records = {site: pack_by_site(own) if own else {} for site, own in contents.items()}
        answers, early = {}, dict[str, dict[str, bytes]]()
        for site, content in self.exchange.ask(kind, records, self.result, f"{stage}: ").items():
            try:
                answers[site] = unpack_by_site(content, size)
                if NEXT_KEYS in content:
                    early[site] = unpack_by_site(content, KEYS, NEXT_KEYS)
            except RefusedMessage as refusal:
                self._expel([site], str(refusal))
        self.exchange.early_keys = {sum_after(self.number, self.settings.run.rounds): early}
        return answers

    def _expel(self, sites: Collection[str], why: str) -> None:
        self._refuse(sites, f"{why}; it takes no further part in this run")
        self.federation.expelled |= set(sites)

    def _refuse(self, sites: Collection[str], why: str) -> None:
        self.result.refused |= dict.fromkeys(sites, f"secure aggregation: {why}")

    def _check_enough(self, left: Collection[str], sent: str) -> None:
        if len(left) < self.threshold:
            few = f"{len(left)} of {len(self.result.asked)} sites sent {sent}, fewer than the {self.threshold} needed"
            raise VoidRound(f"secure aggregation: {few} (secagg-threshold)")


def _fit(public: bytes, secret: bytes) -> bool:
    return masks.public_of(secret) == public
