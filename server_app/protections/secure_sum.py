"""Secure aggregation at the server: four exchanges, after which it knows a sum and no more.

The last two also begin the next sum, which then takes only two if all its sites were in this one.
The client's half is `client_app/protections/secure_sum.py`. A site that is lost on the way costs
only itself, as long as the threshold of sites stays: before its upload the sum goes on without it,
and afterwards the others' shares reveal its mask.

A site that is caught lying is asked nothing more in the run. What counts as caught: an honest one
would need more liars around it than there may be for a sum to keep its promises at all
(`masks.most_liars`). A single wrong share proves nothing, for the one that dealt it may have sealed
it so, nor do some that do not give a key together.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

import numpy as np
from flwr.app import RecordDict

from protofl_common.experiment.study import id_of, is_from_site
from protofl_common.privacy import masks
from protofl_common.privacy.shares import SHARE, Recovery, Unrecoverable
from protofl_common.privacy.sums import (
    MASKED,
    figure_names,
    from_sums,
    from_whole,
    length,
    means_of,
    sum_after,
)
from protofl_common.wire.records import (
    FINAL,
    NEXT_SUM,
    SECAGG,
    Report,
    SiteCard,
    digest_of_message,
    pack_by_site,
    unpack_by_site,
)
from protofl_common.wire.schema import RefusedMessage
from server_app.network.exchange import MessageExchange
from server_app.network.membership import Federation, FederationError
from server_app.replies import Channel, Records, RoundResult, Upload, VoidRound

BySite = Mapping[str, Mapping[str, bytes]]


class SecureSum(Channel):
    """One sum of what is ``expected`` of each site; the result says what goes wrong."""

    def __init__(self, exchange: MessageExchange, result: RoundResult, expected: Channel) -> None:
        self.exchange = exchange
        self.result = result
        self.summed = expected
        self.federation = exchange.federation
        self.settings = exchange.federation.settings
        self.number = 2 * result.number + result.final
        self.next_number = sum_after(self.number, self.settings.run.rounds)
        self.figures = figure_names(self.settings.row.reported_losses, expected.metrics)
        self.size = 2 * len(self.figures) + length(expected.declared, expected.limits)
        limits = replace(expected.limits, weights={"masked": {"sum": ("int64", (self.size,))}})
        super().__init__(expected.server_round, MASKED, limits, counts_samples=False)
        self.keys: Mapping[str, bytes] = {}
        self.shared: list[str] = []
        self.threshold = 0
        self.digest = ""  # Of what all sites are sent with their turn to send a vector
        self.next_keys: dict[str, RecordDict] = {}

    def opened_for(self, sites: Sequence[str]) -> Mapping[str, Records]:
        """Each site that may send, with the shares that the others have sealed for it."""
        number, self.keys, sealed = self.exchange.begun or (0, {}, {})
        self.exchange.begun = None
        if (
            number != self.number
            or not sealed.keys() >= set(sites)
            or len(sites) < self._needed(self.keys)
        ):
            sealed, sites = self._begin(sites), list(self.keys)
        self.threshold = self._needed(self.keys)
        shared = {site: sealed[site] for site in sites if site in sealed}
        self._check_enough(shared, "shares of their keys")
        self.shared = list(shared)
        return {
            site: pack_by_site({peer: shared[peer][site] for peer in shared if peer != site})
            for site in shared
        }

    def _begin(self, sites: Sequence[str]) -> BySite:
        """Ask for keys, and for shares of them sealed for each peer, which are returned."""
        self.threshold = self._needed(sites)
        keys = self._unpacked(self._ask("advertise", {site: {} for site in sites}), masks.SIGNED)
        self.keys = self._true_keys(keys, self.number)
        self._check_enough(self.keys, "keys")
        answers = self._ask("share", dict.fromkeys(self.keys, pack_by_site(self.keys)))
        return self._true_shares(self._unpacked(answers, masks.SEALED), self.keys)

    def content(self, site: str, common: Records, own: Records) -> Records:
        """Return what all receive, on whose digest their masks depend.

        FederationError for another payload.
        """
        if own is not common:
            title = self.settings.row.title
            raise FederationError(f"secure aggregation: {title} sends {site} a payload of its own")
        if not self.digest:
            self.digest = digest_of_message({**common, **self.exchange.about(self.result)})
        return own

    def read(self, content: RecordDict, card: SiteCard) -> Upload:
        """Take the site's keys for the next sum out of the reply, and read the rest."""
        rest = RecordDict({**content})
        if keys := rest.pop(NEXT_SUM, None):
            self.next_keys[card.name] = RecordDict({NEXT_SUM: keys})
        return super().read(rest, card)

    def accept(
        self, uploads: list[Upload], federation: Federation, result: RoundResult
    ) -> list[Upload]:
        """The mean of the masked ``uploads`` as one upload, and of their figures."""
        masked = {upload.site: upload.payload.weights("masked") or {} for upload in uploads}
        sent = {site: arrays["sum"].numpy().view(np.uint64) for site, arrays in masked.items()}
        self._check_enough(sent, "uploads")
        shares = self._unmask(sent)
        self._check_enough(shares, "shares to unmask the sum")
        try:
            sums = np.add.reduce(list(sent.values())) - self._masks(sent, shares)
            start = 2 * len(self.figures)
            sites = len(self.keys)
            payload, samples = from_sums(
                sums[start:], self.summed.declared, self.summed.limits, sites
            )
            result.means = means_of(from_whole(sums[:start], sites), self.figures)
        except RefusedMessage as refusal:
            raise VoidRound(f"secure aggregation: {refusal}") from None
        return [Upload("all", payload, Report(result.number, samples, 0), clients=len(sent))]

    def _unmask(self, sent: Collection[str]) -> BySite:
        """Ask the sites for shares of each other's masks, and to begin the next sum."""
        able = {site: self.next_keys[site] for site in sent if site in self.next_keys}
        next_keys = self._unpacked(able, masks.SIGNED, NEXT_SUM)
        keys = self._true_keys(next_keys, self.next_number) if self.next_number else {}
        keys = keys if len(keys) >= self._needed(keys) else {}
        everyone, begins = pack_by_site(dict.fromkeys(sent, b"")), pack_by_site(keys, NEXT_SUM)
        answers = self._ask(
            "unmask", {site: everyone | (begins if site in keys else {}) for site in sent}
        )
        begun = {
            site: content
            for site, content in answers.items()
            if site in keys and NEXT_SUM in content
        }
        sealed = self._unpacked(begun, masks.SEALED, NEXT_SUM)
        self.exchange.begun = self.next_number, keys, self._true_shares(sealed, keys)
        return self._unpacked(answers, SHARE)

    def _true_keys(self, keys: BySite, number: int) -> dict[str, bytes]:
        """Return the keys for a sum that are keys, and signed where a study names their sites.

        No site goes on with a key that two have: this is the two sites' own doing, for nobody sees
        others' before.
        """
        run_id = self.federation.run_history.run_id
        own = {site: its[site] for site, its in keys.items() if set(its) == {site}}
        sharing = masks.sharing_a_key(own)
        true = {}
        for site, its in own.items():
            purpose = masks.introducing(self.settings.run.algo, number, its)
            signed = is_from_site(self.settings.study, site, run_id, purpose, its[masks.PUBLIC :])
            if site not in sharing and masks.are_keys(its) and signed:
                true[site] = its
        self._expel(
            keys.keys() - true.keys(),
            "keys that are none, or two sites', or not signed with the site's key",
        )
        return true

    def _true_shares(self, sealed: BySite, keys: Mapping[str, bytes]) -> BySite:
        """Return the shares of sites that have sealed one for each other site of the sum."""
        true = {site: its for site, its in sealed.items() if set(its) == keys.keys() - {site}}
        self._expel(sealed.keys() - true.keys(), "shares for other sites than the round's")
        return true

    def _needed(self, sites: Collection[str]) -> int:
        """How many must stay to the end: each site asks so, of all that the study names."""
        return masks.needed(
            max(len(sites), len(self.settings.named_sites)), self.settings.privacy.secagg_threshold
        )

    def _masks(self, sent: Collection[str], shares: BySite) -> np.ndarray:
        """Return the rest of the sum beside the uploads, [L] uint64.

        RefusedMessage where too many shares are wrong.
        """
        study = id_of(self.settings.given)
        run_id = self.federation.run_history.run_id
        name = masks.SumName(study, run_id, self.settings.run.algo, self.number)
        received = masks.received(self.digest, self.keys, self.shared)
        total = np.zeros(self.size, np.uint64)
        for site, secret in self._secrets(sent, shares).items():
            if site in sent:
                total += masks.own_mask(name, secret, site, self.size)
                continue
            for peer in sent:
                total -= masks.pair_mask(
                    name, secret, site, peer, self.keys[peer], self.size, received
                )
        return total

    def _secrets(self, sent: Collection[str], shares: BySite) -> dict[str, bytes]:
        """Recover a key of each site: of its own mask if it has sent a vector, else of its pairs'.

        RefusedMessage where the shares of one do not give it.
        """
        points = masks.points_of(self.keys)
        sites = {point: site for site, point in points.items()}
        recovery = Recovery(self.threshold)
        secrets = {}
        conflicts: dict[str, set[str]] = {}  # Site -> others of whom one lies, or it does
        for owner in self.shared:
            public = masks.part(self.keys[owner], masks.OWN if owner in sent else masks.PAIR)
            its_shares = {points[peer]: its[owner] for peer, its in shares.items() if owner in its}
            try:
                recovered = recovery.secret_of(its_shares, partial(masks.is_secret_of, public))
            except Unrecoverable as failure:
                # Who has no share of an honest site's key, though it was dealt one, lies too
                liars = failure.fewest_liars + len(shares) - len(its_shares)
                self._refuse_unrecoverable(owner, liars)
            secrets[owner] = recovered.secret
            for point in recovered.wrong:
                self._refuse(
                    [sites[point]], f"a wrong share of a key of {owner}: one of the two lies"
                )
                conflicts.setdefault(sites[point], set()).add(owner)
                conflicts.setdefault(owner, set()).add(sites[point])
        most = masks.most_liars(len(self.keys), self.threshold)
        self._expel(
            [site for site, others in conflicts.items() if len(others) > most],
            "wrong shares of keys",
        )
        return secrets

    def _refuse_unrecoverable(self, owner: str, fewest_liars: int) -> NoReturn:
        """RefusedMessage for shares that do not give a key.

        Its owner has dealt wrong ones, or at least ``fewest_liars`` others lie. It is out only if
        so many cannot be.
        """
        lie = f"the shares of {owner}'s keys do not give them: it, or others that have them, lie"
        if fewest_liars > masks.most_liars(len(self.keys), self.threshold):
            self._expel([owner], lie)
        raise RefusedMessage(lie)

    def _ask(self, stage: str, records: Mapping[str, Records]) -> dict[str, RecordDict]:
        return self.exchange.ask(
            f"query.{stage}{FINAL * self.result.final}", records, self.result, f"{stage}: "
        )

    def _unpacked(
        self, answers: Mapping[str, RecordDict], size: int, record: str = SECAGG
    ) -> BySite:
        """Return what each site has sent for itself or others.

        One that has sent other things is expelled.
        """
        values = {}
        for site, content in answers.items():
            try:
                values[site] = unpack_by_site(content, size, record)
            except RefusedMessage as refusal:
                self._expel([site], str(refusal))
        return values

    def _expel(self, sites: Collection[str], why: str) -> None:
        self._refuse(sites, f"{why}; it takes no further part in this run")
        self.federation.expelled |= set(sites)

    def _refuse(self, sites: Collection[str], why: str) -> None:
        self.result.refused |= dict.fromkeys(sites, f"secure aggregation: {why}")

    def _check_enough(self, left: Collection[str], sent: str) -> None:
        if len(left) < self.threshold:
            few = f"{len(left)} of {len(self.result.asked)} sites sent {sent}"
            few += f", fewer than the {self.threshold} needed"
            raise VoidRound(f"secure aggregation: {few} (secagg-threshold)")
