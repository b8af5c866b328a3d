"""Secure aggregation at the client: a sum in four stages, each a message (Bonawitz et al., 2017).

    advertise   a secret for this sum is drawn; its public keys go to the server
    share       everybody's keys come; shares of the secret go, sealed, to every peer
    mask        with a round's training, or the final evaluation: the peers' shares come; the masked
                vector of figures and upload goes, and the secret is forgotten
    unmask      the sites that have sent one come; of each peer one share goes: of its own mask, or
                of a lost one's key

The next sum begins meanwhile: its keys go with `mask`, its shares with `unmask`, if the same sites
are in it. Between them the secret lies in the site's own folder, for its user alone. Every stage is
passed once in a sum, and no sum follows a later one of the same Flower run: two vectors under one
secret, or both shares of one peer, would reveal what they hide. Two sums over different sites show
by their difference what differs; only noise (`dp`) hides that. The symbols, and what is added:
`privacy/masks.py`.

At the server the four are one generator. Here they are methods of `SecureSum`, in their order, each
of which says after which it comes: the process that answers a message may end before the next one,
and what a generator would hold meanwhile must not outlive it, if it is a secret that has been used.

A site whose figures or upload have NaN or infinity sends no vector, so that it counts as lost. Did
it send zeros, a sum of three sites could be one site's upload: a server can choose what it sends so
that the training of some diverges.
"""

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from flwr.app import ConfigRecord, Context, Message, RecordDict
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter, ValidationError

from client_app.protections.base import Protection, Query, Reply
from client_app.site.client import Client, open_client
from client_app.site.log import UntoldError
from client_app.site.record import record_in
from protofl_common.basics.files import locked, write_text
from protofl_common.config.options import SettingsError
from protofl_common.experiment.node import FEWEST_KNOWN
from protofl_common.experiment.settings import Settings
from protofl_common.experiment.study import is_from_site, study_id
from protofl_common.privacy import masks, shares, sums
from protofl_common.privacy.release import finest_unit_of_moments
from protofl_common.wire.payloads import MAX_ADDEND, MAX_WEIGHT, Payload
from protofl_common.wire.records import (
    FINAL,
    NEXT_SUM,
    SECAGG,
    digest_of_message,
    pack_by_site,
    unpack_by_site,
)
from protofl_common.wire.schema import RefusedMessage

LARGEST_SHARED_CLIP = math.sqrt(MAX_ADDEND) / 4
"""``dp-feature-clip`` where noise is shared: moments are up to its square, and need room for it."""


@dataclass(frozen=True)
class _Progress:
    """How far this site is in a sum, as the file stores it."""

    __pydantic_config__ = ConfigDict(ser_json_bytes="hex", val_json_bytes="hex")

    run_id: int
    sum: int  # 2 r for the training of round r, and 2 r + 1 for the final evaluation after it
    sent: int  # The last sum for which an upload was sent, or that this site has left; -1 for none
    stage: str  # The last stage passed, or "left"
    run_history: str = ""  # As the server told it; one Flower run has one
    secret: bytes = b""
    keys: dict[str, bytes] = field(default_factory=dict)  # The public keys of all sites
    shares: dict[str, bytes] = field(default_factory=dict)
    """Site -> this site's shares of its PAIR and of its OWN key, one after the other."""
    following: bytes = b""
    """The secret of the next sum, once its keys have gone with the upload of this one."""


_STORED = TypeAdapter(_Progress)


class SecureSum:
    """A site's part in one sum: its stages, in the order in which the server must ask for them.

    Each raises RefusedMessage out of turn, and for a message that would reveal an upload.
    """

    def __init__(self, client: Client, final: bool) -> None:
        self.client = client
        self.name = client.name
        self.run_id = client.run_id
        self.algo = client.settings.run.algo
        self.sum_number = 2 * client.instructions.round + final
        self.next_sum = sums.sum_after(self.sum_number, client.settings.run.rounds)
        self.path = client.own_file(client.instructions.run_name, "secagg.json")
        if client.node.is_site:  # whatever the server calls the run
            self.path = client.root / "privacy" / f"{self.name}-{self.run_id}-{self.algo}.secagg"

    def alone(self) -> AbstractContextManager[None]:
        """Return a lock, so that a message that comes twice at the same time passes a stage once.

        Simulated clients need none.
        """
        return locked(self.path) if self.client.node.is_site else nullcontext()

    # -- the stages
    def advertise(self) -> dict[str, ConfigRecord]:
        """Begin a sum with a fresh secret, and return this site's public keys.

        A sum may begin anew. RefusedMessage where this site has sent an upload for it or for a
        later one, or has left it.
        """
        last = self._last()
        sent = last.sent if last else -1
        if sent >= self.sum_number:
            raise RefusedMessage(
                f"keys asked for {_called(self.sum_number)}, after the upload of {_called(sent)}"
            )
        secret = masks.new_secret()
        self._write(self._begun(self.sum_number, sent, secret))
        return self._keys(secret, self.sum_number)

    def share(self) -> dict[str, ConfigRecord]:
        """Return for each other site its shares of this site's secret, sealed for that site."""
        return self._deal_shares(self._passed("advertise"), SECAGG)

    def open_shares(self) -> None:
        """Open the shares that other sites have sealed for this one, before it trains or evaluates.

        The sum will have masks for just the sites that have shared. A share that cannot be opened
        is kept as b"", so that it is never revealed. RefusedMessage where too few sites shared, or
        an unknown one.
        """
        progress = self._passed("share")
        sealed = unpack_by_site(self.client.content, masks.SEALED)
        sites = {self.name, *sealed}
        fewest = self._threshold(progress.keys)
        if len(sites) < fewest or not sites <= progress.keys.keys():
            raise RefusedMessage(
                f"shares of {len(sites)} sites, fewer than {fewest}, or of unknown ones"
            )
        self._check_known(sites)

        opened = dict(progress.shares)
        name = self._name_of(progress.sum)
        for peer, text in sealed.items():
            peer_keys = progress.keys[peer]
            try:
                opened[peer] = masks.unseal(name, progress.secret, peer_keys, peer, self.name, text)
            except InvalidTag:
                opened[peer] = b""
        self._opened = replace(progress, shares=opened)

    @property
    def num_sites(self) -> int:
        """The number of sites that advertised keys, known after `open_shares`."""
        return len(self._opened.keys)

    @property
    def fewest_known(self) -> int:
        """The least number of sites in the finished sum that this one knows, itself included.

        It is known after `open_shares`. As many sites may be lost as the threshold allows, and they
        may all be known ones.
        """
        keys = self._opened.keys
        return self._threshold(keys) - len(self._strangers(keys))

    def mask(self, vector: NDArray[np.uint64]) -> tuple[Payload, dict[str, ConfigRecord]]:
        """Return the vector [L] with masks, and this site's public keys for the next sum.

        Forgets the secret of this sum. There are no keys if no sum follows.
        """
        progress = self._opened
        peers = {site: keys for site, keys in progress.keys.items() if site in progress.shares}
        received = masks.digest_of_received(
            digest_of_message(self.client.content), progress.keys, peers
        )
        name = self._name_of(self.sum_number)
        masked = masks.masked(name, vector, progress.secret, self.name, peers, received)

        following = b""
        next_keys: dict[str, ConfigRecord] = {}
        if self.next_sum:
            following = masks.new_secret()
            next_keys = self._keys(following, self.next_sum, NEXT_SUM)
        with self.alone():
            self._passed("share")  # still: the same message may have been answered meanwhile
            progress = replace(progress, stage="mask", secret=b"", following=following)
            self._write(replace(progress, sent=self.sum_number))
        return Payload(masked={"sum": torch.from_numpy(masked.view(np.int64))}), next_keys

    def leave(self) -> None:
        """Leave this sum, and forget its secret, so that this site can never send its vector.

        The other sites will reveal what removes its masks, so a vector would not be hidden.
        """
        with self.alone():
            self._passed("share")
            self._write(self._over("left"))

    def unmask(self) -> dict[str, ConfigRecord]:
        """Reveal one share for each site of the sum, and begin the next sum if one follows.

        If the site sent a vector, the share is of its OWN key, else of its PAIR key; both together
        would reveal its vector. RefusedMessage where the sites that sent one lack this site, are
        too few, or are not all in the sum.
        """
        progress = self._passed("mask")
        sent = unpack_by_site(self.client.content, 0).keys()  # 0 bytes each: names alone
        has_this_one = {self.name} <= sent <= progress.shares.keys()
        if not has_this_one or len(sent) < self._threshold(progress.keys):
            raise RefusedMessage(
                f"an unmasking for {len(sent)} sites: not this one, too few, or not all of the sum"
            )
        self._check_known(sent)

        revealed = {}
        for site, both in progress.shares.items():
            if not both:  # could not be opened
                continue
            pair_share = both[: shares.SHARE]
            own_share = both[shares.SHARE :]
            revealed[site] = own_share if site in sent else pair_share
        answer = pack_by_site(revealed)

        if self.next_sum:
            begun = self._begun(self.next_sum, self.sum_number, progress.following)
            self._write(begun)
            if NEXT_SUM in self.client.content:  # the keys of the next sum, so it goes on at once
                answer |= self._deal_shares(begun, NEXT_SUM)
            return answer
        self._write(self._over("unmask"))
        if not self.client.node.is_site:  # a site must know that sum, lest it be asked for it again
            self.path.unlink()
        return answer

    # -- what they are made of
    def _keys(
        self, secret: bytes, sum_number: int, record: str = SECAGG
    ) -> dict[str, ConfigRecord]:
        """Return the public keys of a secret, with this site's signature, as a record of a reply.

        The signature is zeros where the study names no sites.
        """
        public = masks.public_of(secret)
        signature = self.client.signature(masks.text_to_sign(self.algo, sum_number, public))
        if not signature:
            signature = bytes(masks.SIGNATURE)
        return pack_by_site({self.name: public + signature}, record)

    def _deal_shares(self, progress: _Progress, record_name: str) -> dict[str, ConfigRecord]:
        """Store that the stage ``share`` of a sum is passed, and return its shares for each peer.

        They are shares of the secret of ``progress``, each sealed for its peer. The message has the
        public keys of all sites in the record of this name, and the reply has the shares there.
        RefusedMessage for keys that the sites themselves have not sent (`_check_keys`).
        """
        keys = unpack_by_site(self.client.content, masks.SIGNED, record_name)
        self._check_keys(keys, progress)
        secret = progress.secret
        threshold = self._threshold(keys)
        points = masks.points_of(keys)
        pair_shares = shares.split(masks.key_of(secret, masks.PAIR), threshold, points.values())
        own_shares = shares.split(masks.key_of(secret, masks.OWN), threshold, points.values())
        shares_of_site = {}
        for site, point in points.items():
            shares_of_site[site] = pair_shares[point] + own_shares[point]  # bytes, concatenated
        kept = {self.name: shares_of_site.pop(self.name)}
        self._write(replace(progress, stage="share", keys=keys, shares=kept))

        name = self._name_of(progress.sum)
        sealed = {}
        for peer, text in shares_of_site.items():
            sealed[peer] = masks.seal(name, secret, keys[peer], self.name, peer, text)
        return pack_by_site(sealed, record_name)

    def _check_keys(self, keys: Mapping[str, bytes], progress: _Progress) -> None:
        """Raise RefusedMessage unless ``keys`` are valid keys of enough different sites.

        This site's must be those that it sent, no key may occur twice, and where the study names
        the sites each must have signed its own. Otherwise a server could stand in for a peer, and
        take away the masks.
        """
        study = self.client.settings.study
        own_keys = keys.get(self.name, b"")[: masks.PUBLIC]
        if own_keys != masks.public_of(progress.secret):
            raise RefusedMessage("keys for a sum: those of this site are not the ones it sent")
        if masks.sites_sharing_a_key(keys):
            raise RefusedMessage("keys for a sum: one of them occurs twice")
        for site, signed_keys in keys.items():
            if not masks.are_valid_keys(signed_keys):
                raise RefusedMessage(f"keys for a sum: those of {site} are not valid X25519 keys")
            purpose = masks.text_to_sign(self.algo, progress.sum, signed_keys)
            signature = signed_keys[masks.PUBLIC :]
            if not is_from_site(study, site, self.run_id, purpose, signature):
                raise RefusedMessage(
                    f"keys for a sum: those of {site} are not signed with its key in the study"
                )
        if len(keys) < masks.FEWEST_SUMMED:
            raise RefusedMessage(
                f"keys for a sum of {len(keys)} sites, fewer than {masks.FEWEST_SUMMED}"
            )
        self._check_known(keys)

    def _check_known(self, sites: Collection[str]) -> None:
        """Raise RefusedMessage where this site knows too few ``sites`` of a sum by their keys.

        The server may have invented the others, so they count as its helpers. A sum is safe with c
        of them among n sites and a threshold t if n + c < 2t. Without ``peers`` in the node config
        a site knows nobody by key, and nothing is checked: its operator has approved the run.
        """
        if not self.client.node.peers:
            return
        strangers = len(self._strangers(sites))
        known = len(sites) - 1 - strangers  # beside this site itself
        if known < FEWEST_KNOWN:
            raise RefusedMessage(
                f"a sum with {known} sites that {self.name} knows, fewer than {FEWEST_KNOWN}"
            )
        if len(sites) + strangers >= 2 * self._threshold(sites):
            raise RefusedMessage(
                f"a sum with {strangers} sites that {self.name} does not know, of {len(sites)}"
            )

    def _strangers(self, sites: Collection[str]) -> set[str]:
        """Return those of ``sites`` that this one does not know by their keys (``peers``).

        Without ``peers`` in the node config there are none.
        """
        node = self.client.node
        if not node.peers:
            return set()
        return {*sites} - node.known_among(self.client.settings.named_sites) - {self.name}

    def _threshold(self, keys: Collection[str]) -> int:
        """Return how many sites a sum needs to the end (``secagg-threshold`` of all).

        All are those that the study names, even if the server shows fewer ``keys``.
        """
        named = len(self.client.settings.named_sites)
        return masks.threshold_of(
            max(len(keys), named), self.client.settings.privacy.secagg_threshold
        )

    # -- the file
    def _passed(self, stage: str) -> _Progress:
        """Return the stored progress; RefusedMessage unless ``stage`` of this sum came last."""
        progress = self._last()
        if progress is None or (progress.sum, progress.stage) != (self.sum_number, stage):
            last = f"{stage!r} of {_called(self.sum_number)}"
            raise RefusedMessage(f"a stage of secure aggregation that does not follow {last}")
        return progress

    def _last(self) -> _Progress | None:
        """Return how far this site is in this Flower run, None if it has begun no sum.

        RefusedMessage if the server now tells another history of the run. A history says which
        states of a private model count, so with another one a site could send the sum of another
        model.
        """
        progress = self._read()
        if progress is None or progress.run_id != self.run_id:
            return None
        told = self._run_history
        if progress.run_history not in ("", told):
            raise RefusedMessage(
                f"round.run_history is {told!r} in the Flower run {self.run_id}, which had"
                f" {progress.run_history!r}"
            )
        return progress

    @property
    def _run_history(self) -> str:
        return self.client.instructions.run_history.text

    def _begun(self, sum_number: int, sent: int, secret: bytes) -> _Progress:
        return _Progress(self.run_id, sum_number, sent, "advertise", self._run_history, secret)

    def _over(self, stage: str) -> _Progress:
        """Return progress without a secret, so that no stage of this sum can follow."""
        return _Progress(self.run_id, self.sum_number, self.sum_number, stage, self._run_history)

    def _read(self) -> _Progress | None:
        """Return what the file stores, None without one; ValueError where it is damaged."""
        if not self.path.exists():
            return None
        try:
            return _STORED.validate_json(self.path.read_bytes())
        except ValidationError as error:  # its own text would quote secrets
            message = error.errors(include_input=False)[0]["msg"]
            raise ValueError(f"{self.path}: {message}") from None

    def _write(self, progress: _Progress) -> None:
        write_text(self.path, _STORED.dump_json(progress).decode(), private=True)

    def _name_of(self, sum_number: int) -> masks.SumName:
        return masks.SumName(
            study_id(self.client.settings.given), self.run_id, self.algo, sum_number
        )


def _called(sum_number: int) -> str:
    """Return the words for a sum in an error: 2 r is round r, 2 r + 1 the evaluation after it."""
    round_number, is_final = divmod(sum_number, 2)
    if is_final:
        return f"the final evaluation after round {round_number}"
    return f"round {round_number}"


def _answer(
    stage: Callable[[SecureSum], dict[str, ConfigRecord]],
    final: bool,
    message: Message,
    context: Context,
) -> RecordDict:
    """Answer a query that asks for a stage of a sum, of a round or of the final evaluation.

    RefusedMessage in a run without secure aggregation.
    """
    client = open_client(context, message)
    if not client.settings.privacy.secagg:
        raise RefusedMessage(
            "a stage of secure aggregation, which the run's settings do not ask for"
        )
    secure_sum = SecureSum(client, final)
    with secure_sum.alone():
        return RecordDict({**stage(secure_sum)})


_QUERIES: dict[str, Query] = {}
for _name, _stage in {
    "advertise": SecureSum.advertise,
    "share": SecureSum.share,
    "unmask": SecureSum.unmask,
}.items():
    _QUERIES[_name] = partial(_answer, _stage, False)
    _QUERIES[_name + FINAL] = partial(_answer, _stage, True)


class SecureAggregation(Protection):
    """Secure aggregation: upload and figures of an answer leave only as masked parts of a sum.

    Its other stages are queries.
    """

    name = "secure aggregation"
    queries = _QUERIES

    @staticmethod
    def acts(settings: Settings, is_site: bool) -> bool:
        return settings.privacy.secagg

    def receive(self) -> None:
        """Open the shares of this answer's sum, and refuse one that noise would not protect."""
        self.sum = SecureSum(self.client, final=not self.client.trains_now)
        self.sum.open_shares()
        self._check_shared_noise()

    def _check_shared_noise(self) -> None:
        """Raise SettingsError where the noise that sites share would be too small in this sum.

        With ``dp-honest-sites`` = k each site adds a part of the noise, and k honest sites together
        add all of it.
        """
        privacy = self.client.settings.privacy
        honest_sites = privacy.dp_honest_sites
        if honest_sites == 1:
            return
        shared = f"dp-honest-sites = {honest_sites}"
        # sites that this one does not know (`peers`) do not count: they may be the server's own
        fewest = self.sum.fewest_known
        if fewest < honest_sites:
            known = " that this one knows (node config: peers)" if self.client.node.peers else ""
            raise SettingsError(
                f"{shared}: with secagg-threshold = {privacy.secagg_threshold:g} a sum may have"
                f" {fewest} sites{known}; raise that, or choose {fewest} at most"
            )
        clip = privacy.dp_feature_clip
        # numbers that sites round to coarser steps than the noise's would not add up to its sum
        steps_of_sum_in_one_of_noise = finest_unit_of_moments(clip) * sums.scale(self.sum.num_sites)
        if steps_of_sum_in_one_of_noise < 1:
            raise SettingsError(
                f"{shared}: the sum of {self.sum.num_sites} sites is too coarse for the noise of"
                f" dp-feature-clip = {clip:g}; choose a larger one"
            )
        # a site with a number too large for a sum drops out of it, which tells of this number, and
        # that has only a part of the noise
        if clip > LARGEST_SHARED_CLIP:
            raise SettingsError(
                f"{shared}: class moments of features as long as dp-feature-clip = {clip:g} may be"
                f" too large for a sum; choose {LARGEST_SHARED_CLIP:g} at most"
            )
        # beyond the samples that a sum counts, a site's noise counts for as much less
        data = self.work.data
        largest = max(map(len, (data.train_labels, data.test_labels, data.validation_labels)))
        if largest > MAX_WEIGHT:
            raise SettingsError(
                f"{shared}: a site weighs at most {MAX_WEIGHT:g} samples in a sum, and this one has"
                " more, so that its part of the noise would be too small; choose 1"
            )

    def reply(self, reply: Reply) -> Reply:
        """Return the reply with one masked vector of upload and figures in the upload's place.

        The report loses the figures; keys for the next sum travel beside it. If a number is not
        finite, this site leaves the sum and raises UntoldError.
        """
        try:
            vector = self._vector(reply)
        except sums.NotFinite as error:
            self.sum.leave()
            number = _called(self.sum.sum_number)
            raise UntoldError(f"{error}: this site has left the sum of {number}") from error
        masked, next_keys = self.sum.mask(vector)
        report = sums.without_figures(reply.report)
        return replace(reply, upload=masked, declared=sums.MASKED, report=report, beside=next_keys)

    def _vector(self, reply: Reply) -> NDArray[np.uint64]:
        """Return the report's figures and then the upload as whole numbers [L], without masks.

        NotFinite for NaN or infinity. ValueError where the upload does not have just the entries
        that this round declares, as then the vectors of sites would not fit together.
        """
        client = self.client
        settings = client.settings
        upload = reply.upload
        declared = settings.due_up(client.instructions.round) if client.trains_now else {}
        if upload.entries.keys() != declared.keys():
            uploaded = ", ".join(upload.entries)
            raise ValueError(f"uploaded: {uploaded}; declared for this sum: {', '.join(declared)}")

        samples = self.work.counted_samples
        sites = self.sum.num_sites
        names = sums.figure_names(settings.row.reported_losses, self.work.metrics)
        figures = sums.to_whole(sums.weighted_figures(reply.report, samples, names), sites)
        # a server cannot check the length of a single site's prototypes in a sum, so the site does
        limits = self.work.limits(reply.templates(declared))
        limits = replace(limits, max_norm=settings.bounds.max_prototype_norm)
        step = 0.0
        if settings.privacy.dp_honest_sites > 1:
            step = finest_unit_of_moments(settings.privacy.dp_feature_clip)
        uploaded_sums = sums.to_sums(upload, declared, limits, samples, sites, step)
        return np.concatenate([figures, uploaded_sums])


def blank_secrets(folder: Path) -> None:
    """Remove the secrets of unfinished sums from the files of a site's ``privacy/`` folder.

    The files stay, with the numbers of the sums that it has sent, so that it never sends one again.
    """
    for file in folder.glob("*.secagg"):
        with record_in(file, "which sum it is of (remove it if its run is over)") as rows:
            # after "unmask" no other stage of that sum can follow
            rows |= {"stage": "unmask", "secret": "", "following": "", "keys": {}, "shares": {}}
