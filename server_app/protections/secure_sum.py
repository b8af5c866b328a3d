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

from protofl_common.experiment.study import is_from_site, study_id
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
from server_app.network.exchange import BegunSum, MessageExchange
from server_app.network.membership import FederationError
from server_app.protections.enough_replies import why_too_few
from server_app.replies import Exchanged, Records, ReplyReader, Upload, VoidRound

BySite = Mapping[str, Mapping[str, bytes]]


class SecureSum(ReplyReader):
    """One sum of what is ``expected`` of each site; the result says what goes wrong."""

    def __init__(self, exchange: MessageExchange, result: Exchanged, expected: ReplyReader) -> None:
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
        """Return each site that may send, with the shares that the others have sealed for it."""
        begun = self.exchange.begun
        self.exchange.begun = None
        if begun and self._is_for(begun, sites):
            self.keys = begun.keys
            sealed = begun.sealed
            sharing = list(sites)
        else:
            sealed = self._begin(sites)
            sharing = list(self.keys)
        self.threshold = self._needed(self.keys)
        self.shared = [site for site in sharing if site in sealed]
        self._check_enough(self.shared, "shares of their keys")

        opened = {}
        for site in self.shared:
            shares = {peer: sealed[peer][site] for peer in self.shared if peer != site}
            opened[site] = pack_by_site(shares)
        return opened

    def _is_for(self, begun: BegunSum, sites: Sequence[str]) -> bool:
        """Return whether the sum that was begun is this one, and all its sites are in it."""
        return (
            begun.number == self.number
            and begun.sealed.keys() >= set(sites)
            and len(sites) >= self._needed(begun.keys)
        )

    def _begin(self, sites: Sequence[str]) -> BySite:
        """Ask for keys, and for shares of them sealed for each peer, which are returned."""
        self.threshold = self._needed(sites)
        keys = self._unpacked(self._ask("advertise", {site: {} for site in sites}), masks.SIGNED)
        self.keys = self._true_keys(keys, self.number)
        self._check_enough(self.keys, "keys")
        answers = self._ask("share", dict.fromkeys(self.keys, pack_by_site(self.keys)))
        return self._true_shares(self._unpacked(answers, masks.SEALED), self.keys)

    def content(self, site: str, common: Records, own: Records) -> Records:
        """Return what all sites receive; their masks depend on its digest.

        FederationError where a site would get another payload than the others.
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
        keys = rest.pop(NEXT_SUM, None)
        if keys:
            self.next_keys[card.name] = RecordDict({NEXT_SUM: keys})
        return super().read(rest, card)

    def accept(self, uploads: list[Upload]) -> list[Upload]:
        """Return one upload, the mean of the masked ``uploads``; the result takes their figures."""
        too_few = why_too_few(uploads, self.federation.least_replies)
        if too_few and not self.result.final:
            raise VoidRound(too_few)
        sent = {}
        for upload in uploads:
            masked = upload.payload.weights("masked") or {}
            sent[upload.site] = masked["sum"].numpy().view(np.uint64)
        self._check_enough(sent, "uploads")
        shares = self._unmask(sent)
        self._check_enough(shares, "shares to unmask the sum")

        sites = len(self.keys)
        end_of_figures = 2 * len(self.figures)
        try:
            sums = np.add.reduce(list(sent.values())) - self._masks(sent, shares)
            payload, samples = from_sums(
                sums[end_of_figures:], self.summed.declared, self.summed.limits, sites
            )
            self.result.means = means_of(from_whole(sums[:end_of_figures], sites), self.figures)
        except RefusedMessage as refusal:
            raise VoidRound(f"secure aggregation: {refusal}") from None
        return [Upload("all", payload, Report(self.result.number, samples, 0), clients=len(sent))]

    def _unmask(self, sent: Collection[str]) -> BySite:
        """Return of each site that answers its shares of the others' masks; ``sent``: who uploaded.

        The same message begins the next sum, to save two more: the sites deal shares for it, which
        are kept in ``exchange.begun``. A site that answers badly is expelled, and one that does not
        answer is missing in the result; nothing is raised.
        """
        keys = self._keys_of_next(sent)
        shares_of_all = pack_by_site(dict.fromkeys(sent, b""))  # only the names say something
        next_keys = pack_by_site(keys, NEXT_SUM)
        questions = {}
        for site in sent:
            questions[site] = {**shares_of_all, **next_keys} if site in keys else shares_of_all
        answers = self._ask("unmask", questions)

        begun = {}
        for site, content in answers.items():
            if site in keys and NEXT_SUM in content:
                begun[site] = content
        sealed = self._unpacked(begun, masks.SEALED, NEXT_SUM)
        sealed = self._true_shares(sealed, keys)
        self.exchange.begun = BegunSum(self.next_number, keys, sealed)
        return self._unpacked(answers, SHARE)

    def _keys_of_next(self, sent: Collection[str]) -> dict[str, bytes]:
        """Return the keys for the next sum that came with this one's uploads.

        None where no sum follows, or too few sites have sent any.
        """
        answers = {site: self.next_keys[site] for site in sent if site in self.next_keys}
        next_keys = self._unpacked(answers, masks.SIGNED, NEXT_SUM)
        if not self.next_number:
            return {}
        keys = self._true_keys(next_keys, self.next_number)
        return keys if len(keys) >= self._needed(keys) else {}

    def _true_keys(self, keys: BySite, number: int) -> dict[str, bytes]:
        """Return the keys for a sum that are valid, and signed where a study names their sites.

        Other sites are expelled, and so are two with the same key: that is their own doing, for
        nobody sees others' keys before.
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
        why = "keys that are none, or two sites', or not signed with the site's key"
        self._expel(keys.keys() - true.keys(), why)
        return true

    def _true_shares(self, sealed: BySite, keys: Mapping[str, bytes]) -> BySite:
        """Return the shares of sites that have sealed one for each other site of the sum.

        Those that have sealed others are expelled.
        """
        true = {site: its for site, its in sealed.items() if set(its) == keys.keys() - {site}}
        self._expel(sealed.keys() - true.keys(), "shares for other sites than the round's")
        return true

    def _needed(self, sites: Collection[str]) -> int:
        """Return how many sites must stay to the end, of all that the study names.

        Each site asks for as many.
        """
        number = max(len(sites), len(self.settings.named_sites))
        return masks.needed(number, self.settings.privacy.secagg_threshold)

    def _masks(self, sent: Collection[str], shares: BySite) -> np.ndarray:
        """Return the masks that are left in the sum of the uploads, [L] uint64.

        RefusedMessage where too many shares are wrong.
        """
        study = study_id(self.settings.given)
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
            its_shares = {}
            for peer, shares_of in shares.items():
                if owner in shares_of:
                    its_shares[points[peer]] = shares_of[owner]
            try:
                recovered = recovery.secret_of(its_shares, partial(masks.is_secret_of, public))
            except Unrecoverable as failure:
                # Who has no share of an honest site's key, though it was dealt one, lies too
                liars = failure.fewest_liars + len(shares) - len(its_shares)
                self._refuse_unrecoverable(owner, liars)
            secrets[owner] = recovered.secret
            for point in recovered.wrong:
                peer = sites[point]
                self._refuse([peer], f"a wrong share of a key of {owner}: one of the two lies")
                conflicts.setdefault(peer, set()).add(owner)
                conflicts.setdefault(owner, set()).add(peer)
        most = masks.most_liars(len(self.keys), self.threshold)
        caught = [site for site, others in conflicts.items() if len(others) > most]
        self._expel(caught, "wrong shares of keys")
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
        kind = f"query.{stage}"
        if self.result.final:
            kind += FINAL
        return self.exchange.ask(kind, records, self.result, f"{stage}: ")

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
