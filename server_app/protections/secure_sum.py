"""Secure aggregation at the server: it learns a sum and no more (Bonawitz et al., 2017).

`SecureSum.flow` is the protocol: four questions to the sites, under the paper's names. The last
two also begin the next sum, which then takes only two if all its sites were in this one. A site
that is lost on the way costs only itself, as long as the threshold of sites stays: before its
upload the sum goes on without it, and afterwards the others' shares reveal its mask. The client's
half is `client_app/protections/secure_sum.py`.

A site that is caught lying is asked nothing more in the run. Each commits itself to the shares that
it deals, so another share than it was dealt is a lie of who gives it, and shares that were dealt so
and do not give the key are the dealer's (`privacy/shares.py`). A site that gives no share of one
key says that it was dealt a wrong one: the dealer is out where more say so than there may be liars
for a sum to keep its promises at all (`masks.most_liars`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from protofl_common.config.options import SettingsError
from protofl_common.experiment.study import is_from_site, study_id
from protofl_common.privacy import masks
from protofl_common.privacy.shares import SHARE, secret_of
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
    digest_of_message,
    pack_by_site,
    unpack_by_site,
)
from protofl_common.wire.schema import RefusedMessage
from server_app.network.membership import Federation
from server_app.run.flow import Flow, Question, Replies, UploadRequest
from server_app.run.replies import Records, ReplyReader, Upload, VoidRound

BySite = Mapping[str, Mapping[str, bytes]]


@dataclass(frozen=True)
class BegunSum:
    """A sum whose sites have advertised keys and dealt shares of them."""

    number: int
    keys: Mapping[str, bytes]  # Site -> its public keys
    sealed: BySite  # Site -> peer -> the share that it has sealed for it

    def shares_for(self, site: str, dealers: Sequence[str]) -> Records:
        """Return the record with the shares that the other dealers have sealed for a site."""
        shares = {dealer: self.sealed[dealer][site] for dealer in dealers if dealer != site}
        return pack_by_site(shares)


@dataclass
class SecureSums:
    """The secure sums of a run, one for each round, and what one leaves to the next."""

    federation: Federation
    begun: BegunSum | None = None

    def flow(self, request: UploadRequest) -> Flow:
        """Return the flow that asks the sites of one sum (`SecureSum.flow`)."""
        return SecureSum(self, request).flow()


class SecureSum:
    """The sum of one round's uploads, or of the final evaluation's figures.

    The request's `exchanged` notes the sites that fail or are refused.
    """

    def __init__(self, sums: SecureSums, request: UploadRequest) -> None:
        self.sums = sums
        self.federation = sums.federation
        self.settings = sums.federation.settings
        self.run_id = sums.federation.run_history.run_id
        self.request = request
        self.exchanged = request.exchanged
        self.summed = request.reader  # Describes one site's upload as it is before it is masked
        self.number = 2 * self.exchanged.number + self.exchanged.final  # As `sum_after` says
        self.next_number = sum_after(self.number, self.settings.run.rounds)
        self.figures = figure_names(self.settings.row.reported_losses, self.summed.metrics)
        # each figure is a sum and the weight behind it
        self.size = 2 * len(self.figures) + length(self.summed.declared, self.summed.limits)
        # the numbers mod 2^64 travel as int64 of the same bits
        weights = {"masked": {"sum": ("int64", (self.size,))}}
        limits = replace(self.summed.limits, weights=weights)
        self.reader = ReplyReader(self.exchanged.number, MASKED, limits, counts_samples=False)

    def flow(self) -> Flow:
        """Ask the sites step by step, and return one upload, the mean of all.

        The names of the steps are those of Bonawitz et al. Raises VoidRound where too few sites are
        left after a step, or where honest sites cannot have the sum.
        """
        sites = self.request.sites
        begun = self._take_begun()
        if begun is None:
            # AdvertiseKeys: each site draws a secret for this sum
            answers = yield self._query("advertise", {site: {} for site in sites})
            advertised = self._true_keys(answers, self.number)
            self._check_enough(advertised, self._needed(sites), "keys")

            # ShareKeys: each deals shares of its secret, sealed, to every other site
            all_keys = pack_by_site(advertised)
            answers = yield self._query("share", dict.fromkeys(advertised, all_keys))
            begun = BegunSum(self.number, advertised, self._true_shares(answers, advertised))

        # MaskedInputCollection: each site trains or evaluates, and sends its vector under masks
        keys = begun.keys
        needed = self._needed(keys)
        shared = [site for site in sites if site in begun.sealed]
        self._check_enough(shared, needed, "shares of their keys")
        common = self._common_content(shared)
        contents = {site: {**common, **begun.shares_for(site, shared)} for site in shared}
        answers = yield self.request.question(contents, self.reader)
        masked, answers_with_keys = self._read(answers)
        self._check_enough(masked, needed, "uploads")
        if not self.exchanged.final:  # which merges nothing
            self._check_enough(masked, self.federation.fewest_replies, "uploads", "min-replies")

        # Unmasking: each gives its shares of the keys of masks that do not cancel. Where uploads
        # came with keys for the next sum, the same step deals its shares
        keys_of_next = self._keys_of_next(answers_with_keys)
        answers = yield self._query("unmask", _to_unmask(masked, keys_of_next))
        self.sums.begun = self._next_begun(answers, keys_of_next)
        shares = self._unpacked(answers, SHARE)
        self._check_enough(shares, needed, "shares to unmask the sum")
        digest = digest_of_message({**common, **self.request.about})
        received = masks.digest_of_received(digest, keys, shared)
        secrets = self._secrets(begun, shared, masked, shares)
        masks_left = self._masks(begun, secrets, masked, received)
        return [self._mean(masked, masks_left, len(keys))]

    def _take_begun(self) -> BegunSum | None:
        """Return this sum's keys and shares if the sum before has collected them, else None.

        All sites of this round must have dealt shares, and be enough for the threshold among those
        that sent keys. What was collected for another sum is forgotten.
        """
        begun = self.sums.begun
        self.sums.begun = None
        sites = self.request.sites
        if begun is None or begun.number != self.number:
            return None
        if not begun.sealed.keys() >= set(sites) or len(sites) < self._needed(begun.keys):
            return None
        return begun

    def _common_content(self, sites: Sequence[str]) -> Records:
        """Return the records that all sites receive alike, on which their masks depend.

        Raises SettingsError if the algorithm would send a site other records than the others.
        """
        common, *others = self.request.contents(sites).values()
        if any(other is not common for other in others):  # equal ones are the same object
            title = self.settings.row.title
            raise SettingsError(
                f"secagg = true: {title} sends sites payloads of their own; its row must say why "
                "it needs `single_uploads`"
            )
        return common

    def _read(self, answers: Replies) -> tuple[dict[str, NDArray[np.uint64]], Replies]:
        """Return the masked vector [L] of each valid reply, and its keys for the next sum.

        Both are by site, the keys as a record. A site that is refused has neither.
        """
        uploads = {}
        next_keys = {}
        for site, content in answers.items():
            records = dict(content)
            if self.next_number and NEXT_SUM in records:  # 0: there is no next sum
                # beside the upload the reader below accepts only the head of the audit log
                next_keys[site] = RecordDict({NEXT_SUM: records.pop(NEXT_SUM)})
            uploads[site] = RecordDict(records)

        masked = {}
        for upload in self.request.read(uploads, self.reader):
            masked[upload.site] = upload.weights("masked")["sum"].numpy().view(np.uint64)
        return masked, {site: keys for site, keys in next_keys.items() if site in masked}

    def _keys_of_next(self, answers: Replies) -> dict[str, bytes]:
        """Return the valid keys for the next sum that came with this one's uploads, by site.

        Return {} if too few sites have sent any; none do when no sum follows.
        """
        keys = self._true_keys(answers, self.next_number, NEXT_SUM)
        return keys if len(keys) >= self._needed(keys) else {}

    def _next_begun(self, answers: Replies, keys: Mapping[str, bytes]) -> BegunSum:
        """Return the next sum as begun, with the shares that came in the answers to unmasking."""
        dealt = {
            site: content
            for site, content in answers.items()
            if site in keys and NEXT_SUM in content
        }
        return BegunSum(self.next_number, keys, self._true_shares(dealt, keys, NEXT_SUM))

    def _true_keys(self, answers: Replies, number: int, record: str = SECAGG) -> dict[str, bytes]:
        """Return the keys for a sum that are valid, and signed where a study names their sites.

        Sites that send other keys are expelled. So are two sites with the same key: no site sees
        another's keys before it sends its own, so this is no accident.
        """
        keys = self._unpacked(answers, masks.SIGNED, record)
        # a site's record must have one entry, under its own name
        own_keys = {site: sent[site] for site, sent in keys.items() if set(sent) == {site}}
        self._expel(keys.keys() - own_keys.keys(), "it sent keys for a sum that are not its own")
        sharing = masks.sites_sharing_a_key(own_keys)
        valid = {}
        for site, signed_keys in own_keys.items():
            purpose = masks.text_to_sign(self.settings.run.algo, number, signed_keys)
            signature = signed_keys[masks.PUBLIC :]  # follows the public keys
            if site in sharing:
                self._expel([site], "one of its keys for a sum occurs twice")
            elif not masks.are_valid_keys(signed_keys):
                self._expel([site], "its keys for a sum are not valid X25519 keys")
            elif not is_from_site(self.settings.study, site, self.run_id, purpose, signature):
                self._expel([site], "its keys for a sum are not signed with its key in the study")
            else:
                valid[site] = signed_keys
        return valid

    def _true_shares(
        self, answers: Replies, keys: Mapping[str, bytes], record: str = SECAGG
    ) -> BySite:
        """Return the sealed shares of the sites that have one for each other site of the sum.

        The sites are those of ``keys``. A site whose shares are not for exactly these is expelled.
        """
        sealed = self._unpacked(answers, masks.SEALED, record)
        valid = {
            site: share_for
            for site, share_for in sealed.items()
            if set(share_for) == keys.keys() - {site}
        }
        self._expel(sealed.keys() - valid.keys(), "shares for other sites than the round's")
        return valid

    def _mean(
        self,
        masked: Mapping[str, NDArray[np.uint64]],
        masks_left: NDArray[np.uint64],
        sites: int,
    ) -> Upload:
        """Return the mean upload of all sites; the mean figures go to `exchanged`.

        ``masks_left`` [L] are the masks that do not cancel out in the sum of the vectors, and
        ``sites`` is how many advertised keys, which sets the scale of the whole numbers. Raises
        VoidRound for a sum that honest sites cannot have.
        """
        sums = np.add.reduce(list(masked.values())) - masks_left  # mod 2^64
        end_of_figures = 2 * len(self.figures)
        try:
            payload, samples = from_sums(
                sums[end_of_figures:], self.summed.declared, self.summed.limits, sites
            )
            figures = from_whole(sums[:end_of_figures], sites)
            shares_noise = self.settings.privacy.dp_honest_sites > 1
            self.exchanged.means = means_of(figures, self.figures, noisy=shares_noise)
        except RefusedMessage as refusal:
            raise VoidRound(f"secure aggregation: {refusal}") from None
        report = Report(self.exchanged.number, samples, 0)  # The figures are in `means`
        return Upload("all", payload, report, clients=len(masked))

    def _needed(self, sites: Collection[str]) -> int:
        """Return how many sites a sum needs to the end; each site demands the same number.

        It is the fraction ``secagg-threshold`` of ``sites``, or of all sites that the study names
        if these are more.
        """
        number = max(len(sites), len(self.settings.named_sites))
        return masks.threshold_of(number, self.settings.privacy.secagg_threshold)

    def _masks(
        self,
        begun: BegunSum,
        secrets: Mapping[str, bytes],
        sent: Collection[str],
        received: str,
    ) -> NDArray[np.uint64]:
        """Return the masks [L] uint64 that do not cancel out in the sum of the vectors.

        These are the own mask of each site that ``sent`` a vector, and the pair masks that those
        sites share with a lost one. ``received`` is the digest of what all were sent, on which pair
        masks depend.
        """
        study = study_id(self.settings.given)
        name = masks.SumName(study, self.run_id, self.settings.run.algo, self.number)
        total = np.zeros(self.size, np.uint64)
        for site, secret in secrets.items():
            if site in sent:
                total += masks.own_mask(name, secret, site, self.size)
                continue
            # these are what the lost site would have added; its peers added the negatives
            for peer in sent:
                total -= masks.pair_mask(
                    name, secret, site, peer, begun.keys[peer], self.size, received
                )
        return total

    def _secrets(
        self,
        begun: BegunSum,
        shared: Collection[str],
        sent: Collection[str],
        shares: BySite,
    ) -> dict[str, bytes]:
        """Return one private key of each site that dealt shares (``shared``), by site.

        It is the OWN key of a site that ``sent`` a vector, else its PAIR key. Those that sent one
        reveal the ``shares`` from which it is recovered. Raises VoidRound where the shares of a key
        do not give it. Sites that give or have dealt wrong shares are expelled.
        """
        threshold = self._needed(begun.keys)
        points = masks.points_of(begun.keys)
        secrets = {}
        for owner in shared:
            which = masks.OWN if owner in sent else masks.PAIR
            # site -> the share that it gives of this owner's key
            given = {site: gives[owner] for site, gives in shares.items() if owner in gives}
            shares_of_key = {}  # Point -> share, of those that are right
            for site, share in given.items():
                # a site's share of its own key comes with no digest: it speaks for itself
                if site == owner or masks.is_as_dealt(share, which, begun.sealed[owner][site]):
                    shares_of_key[points[site]] = share
                else:
                    gave = f"it gave another share of a key of {owner} than it was dealt"
                    self._expel([site], gave)

            if len(shares_of_key) < threshold:
                few = f"{len(shares_of_key)} right shares of a key of {owner}"
                lacks = f"{few}, fewer than the {threshold} needed"
                # a site that gives none says that it was dealt a wrong one
                if len(shares) - len(given) > masks.most_liars(len(begun.keys), threshold):
                    self._expel([owner], lacks)
                raise VoidRound(f"secure aggregation: {lacks}")
            secrets[owner] = secret_of(shares_of_key, threshold)
            if not masks.is_secret_of(masks.key_of(begun.keys[owner], which), secrets[owner]):
                lie = f"the shares that {owner} has dealt of its keys do not give them"
                self._expel([owner], lie)
                raise VoidRound(f"secure aggregation: {lie}")
        return secrets

    def _query(self, stage: str, contents: Mapping[str, Records]) -> Question:
        kind = f"query.{stage}"
        if self.exchanged.final:
            kind += FINAL
        return Question(kind, contents, stage)

    def _unpacked(self, answers: Replies, size: int, record: str = SECAGG) -> BySite:
        """Return what each site's answer has in ``record``: ``size`` bytes for each of some sites.

        A site whose record has anything else is expelled.
        """
        values = {}
        for site, content in answers.items():
            try:
                values[site] = unpack_by_site(content, size, record)
            except RefusedMessage as refusal:
                self._expel([site], str(refusal))
        return values

    def _expel(self, sites: Collection[str], why: str) -> None:
        """Refuse the sites in this round, and ask them nothing more in the run."""
        refusal = f"secure aggregation: {why}; it takes no further part in this run"
        self.exchanged.refused |= dict.fromkeys(sites, refusal)
        self.federation.expelled.update(sites)

    def _check_enough(
        self, left: Collection[str], needed: int, sent: str, setting: str = "secagg-threshold"
    ) -> None:
        """Raise VoidRound, which names the ``setting``, if fewer sites than ``needed`` are left."""
        if len(left) < needed:
            few = f"{len(left)} of {len(self.exchanged.asked)} sites sent {sent}"
            few += f", fewer than the {needed} needed"
            raise VoidRound(f"secure aggregation: {few} ({setting})")


def _to_unmask(senders: Collection[str], keys_of_next: Mapping[str, bytes]) -> dict[str, Records]:
    """Return the question for shares to each site of ``senders``, which have sent their vectors.

    Every question names all senders. The question to a site that has sent its key for the next sum
    also holds ``keys_of_next``, the keys of all sites that have; {} where none begins.
    """
    names = pack_by_site(dict.fromkeys(senders, b""))  # no bytes for them
    names_and_keys = {**names, **pack_by_site(keys_of_next, NEXT_SUM)}
    return {site: names_and_keys if site in keys_of_next else names for site in senders}
