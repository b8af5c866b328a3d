"""One round: messages to the sites, their replies checked, the valid ones merged."""

import time
from collections.abc import Sequence, Set
from dataclasses import replace

from protofl_common.basics.seeding import derive_seed
from protofl_common.basics.text import in_order, printable
from protofl_common.models.devices import seeded
from protofl_common.privacy.release import count_noise
from protofl_common.runs.attributes import pack_attributes
from protofl_common.runs.folder import DROPPED, Seconds
from protofl_common.wire.payloads import pack_payload, payload_bytes
from protofl_common.wire.records import head_of
from protofl_common.wire.schema import Limits, RefusedMessage
from server_app.callbacks.base import ActiveRun
from server_app.network.admission import draw_drop_outs, sample_sites
from server_app.network.membership import SITES_AT_ONCE
from server_app.protections import PROTECTIONS
from server_app.protections.base import Accepted
from server_app.run.flow import UploadRequest
from server_app.run.replies import (
    Exchanged,
    Records,
    ReplyReader,
    RoundResult,
    VoidRound,
    vectors_of,
)
from server_app.strategies.base import Strategy


def train_round(run: ActiveRun, number: int, extra_records: Records) -> RoundResult:
    """Let the sites of a round evaluate, train and upload, and merge the uploads.

    Every message has the ``extra_records`` beside the payload.
    """
    strategy = run.strategy
    started_at = time.monotonic()
    exchanged = choose_sites(strategy, number, run.exchange.at_work())
    received = _received(run, exchanged, extra_records)
    received = _with_late(run, received, exchanged)
    answered_at = time.monotonic()
    accepted = received
    for protection in PROTECTIONS:
        accepted = accepted.then(protection, strategy)
    figures, why_void = _merge(strategy, accepted, number)
    seconds: Seconds = {
        "exchange": answered_at - started_at,
        "aggregate": time.monotonic() - answered_at,
    }
    accepted = replace(accepted, why_void=why_void)
    result = _result(exchanged, received, accepted, figures, seconds)
    note_who_answered(strategy, accepted, result)
    return result


def final_evaluation(run: ActiveRun, number: int) -> RoundResult:
    """Let all sites evaluate after the last round, which is ``number``."""
    asked = in_order(run.federation.sites_to_ask(number))
    exchanged = Exchanged(number, final=True, asked=asked)
    received = _received(run, exchanged, {})
    # the replies have figures only: there is nothing to protect or to merge
    return _result(exchanged, received, received, {}, {})


def choose_sites(strategy: Strategy, number: int, at_work: Set[str]) -> Exchanged:
    """Draw the sites of a round, and those of them that drop out (``drop-rate``).

    Sites that are still ``at_work`` on an earlier round are not asked, nor are clients that never
    train. Those that drop out are noted as failed, and get no message.
    """
    federation = strategy.federation
    settings = strategy.settings.federation
    seed = strategy.settings.run.seed
    available = set(federation.sites_to_ask(number)) - federation.new_clients - at_work
    if not available:
        return Exchanged(number)
    sites = sample_sites(available, settings.participation, seed, number, federation.fewest_asked)
    dropped: dict[str, str] = {}
    if settings.drop_rate:
        dropped = dict.fromkeys(draw_drop_outs(sites, settings.drop_rate, seed, number), DROPPED)
    return Exchanged(number, asked=sites, failed=dropped)


def _received(run: ActiveRun, exchanged: Exchanged, extra_records: Records) -> Accepted:
    """Ask the sites of this exchange for uploads, and return them; if it is void, why it is."""
    federation = run.federation
    sites = [site for site in exchanged.asked if site not in exchanged.failed]
    request = UploadRequest(
        exchanged,
        sites,
        federation.cards,
        contents=lambda sites: _contents(run.strategy, sites, exchanged.number, extra_records),
        about=run.exchange.about(exchanged),
        reader=_reader(run.strategy, exchanged),
        # all sites train at the same time; at least 1, as it is the step of a range
        at_once=SITES_AT_ONCE if exchanged.final else max(1, len(sites)),
    )
    try:
        return Accepted(run.exchange.run(run.ask_for_uploads(request), exchanged))
    except VoidRound as reason:  # only a secure sum raises it, and without a sum no reply counts
        exchanged.reports.clear()
        return Accepted([], why_void=str(reason))


def _contents(
    strategy: Strategy, sites: Sequence[str], number: int, extra_records: Records
) -> dict[str, Records]:
    """Return the records for each of the ``sites``: payload and ``extra_records``.

    Sites that receive the common payload have the same object, which is packed once. Draws of the
    algorithm are seeded by the round.
    """
    declared = strategy.settings.exchange.down
    contents: dict[str, Records] = {}
    with seeded(derive_seed(strategy.seed, "payload", number)):
        common_payload = strategy.payload_down()
        common = {**pack_payload(common_payload, declared), **extra_records}
        for site in sites:
            contents[site] = common
            payload = strategy.payload_for(site, common_payload)
            if payload is not common_payload:
                contents[site] = {**pack_payload(payload, declared), **extra_records}
    return contents


def _reader(strategy: Strategy, exchanged: Exchanged) -> ReplyReader:
    """Return what reads the replies of this exchange, with all limits on a valid one."""
    settings = strategy.settings
    is_training = not exchanged.final
    plan = settings.plan(1)  # the noise of tables is the same for any number of samples
    has_features = bool(settings.backbones) or settings.takes_vectors
    limits = Limits(
        num_classes=strategy.num_classes,
        feature_dim=settings.model.feature_dim,
        max_norm=settings.bounds.max_prototype_norm,
        max_per_class=settings.bounds.max_prototypes_per_class,
        classes_of_a_sample=strategy.task.classes_of_a_sample,
        weights=strategy.templates(),
        frozen_dim=strategy.card.input_shape[0] if has_features else 0,
        # eight standard deviations, which the noise of an honest client does not exceed
        moment_noise=8 * count_noise(plan.table_noise) if plan else 0.0,
        max_feature_norm=settings.privacy.dp_feature_clip,
    )
    return ReplyReader(
        exchanged.number,
        declared=settings.due_up(exchanged.number) if is_training else {},
        limits=limits,
        losses=strategy.row.reported_losses if is_training else (),
        metrics=strategy.task.figure_names(settings.reported_metrics),
        counts_samples=is_training,
        evaluates=exchanged.final or settings.evaluates(exchanged.number),
    )


def _with_late(run: ActiveRun, received: Accepted, exchanged: Exchanged) -> Accepted:
    """Return the uploads together with late ones of earlier rounds that count (``late``).

    A late reply counts if it is newer than the last upload of its site that was merged, and if the
    site has not answered this round as well. It brings no figures: those of its evaluation are of
    an older model than the others'. Its weight shrinks with its age (``staleness``).
    """
    federation = run.federation
    settings = run.settings.federation
    uploads = {upload.site: upload for upload in received.kept}
    for site, late in run.exchange.late.take(exchanged.number).items():
        exchanged.late[site] = f"its reply to round {late.round}"  # whether it counts or not
        last_merged, _ = federation.counted.get(site, (0, 1.0))  # 0: no round yet
        has_answered_this_round = site in exchanged.reports
        is_newest = late.round > last_merged and not has_answered_this_round
        if not settings.late_replies_count or not is_newest or site in federation.expelled:
            continue
        exchanged.bytes_up += payload_bytes(late.content)
        head = head_of(late.content)
        if head:
            run.exchange.witness.add(run.folder.name, exchanged.number, {site: head})
        reader = _reader(run.strategy, Exchanged(late.round))  # accepts what was due in that round
        try:
            upload = reader.read(late.content, federation.cards[site])
        except RefusedMessage as refusal:
            exchanged.refused[site] = f"its reply to round {late.round}: {refusal}"
            continue
        age = exchanged.number - late.round
        uploads[site] = replace(upload, age=age, age_factor=(1 + age) ** -settings.staleness)
    return replace(received, kept=[uploads[site] for site in in_order(uploads)])


def _merge(strategy: Strategy, accepted: Accepted, number: int) -> tuple[dict[str, float], str]:
    """Merge the accepted uploads by the algorithm's server step.

    Return the step's figures, and why the round is void, "" if it is not. It is if the step fails,
    or leaves NaN or infinity in the strategy's state: then the former state is restored. With
    simulated clients the error of the step is raised instead.
    """
    if accepted.why_void:
        return {}, accepted.why_void
    state_before = pack_attributes(strategy, strategy.state)
    why_void = ""
    figures: dict[str, float] = {}
    try:
        with seeded(derive_seed(strategy.seed, "merge", number)):
            for name, figure in (strategy.merge(accepted.kept) or {}).items():
                figures[name] = float(figure)
        for name, tensor in strategy.present_state().items():
            if not tensor.isfinite().all():
                why_void = f"{name} of the server would no longer be finite"
                break
    except (ArithmeticError, LookupError, RuntimeError, ValueError) as error:
        if strategy.federation.simulated:
            raise
        why_void = printable(f"the server's step failed: {type(error).__name__}: {error}")
    if why_void:
        strategy.restore(state_before)
        return {}, why_void
    return figures, ""


def _result(
    exchanged: Exchanged,
    received: Accepted,
    accepted: Accepted,
    figures: dict[str, float],
    seconds: Seconds,
) -> RoundResult:
    """Return the result of an exchange, from the uploads as received and as accepted.

    Prototypes are those that sites sent, before any protection changed them.
    """
    refused = accepted.refused
    reports = {site: sent for site, sent in exchanged.reports.items() if site not in refused}
    counted_late = {}
    if not accepted.why_void:
        for upload in accepted.kept:
            if upload.age:
                counted_late[upload.site] = exchanged.number - upload.age
    # a secure sum is one upload, the mean of many clients, and shows nobody's prototypes
    single = [upload for upload in received.kept if upload.clients == 1]
    return RoundResult(
        exchanged=exchanged,
        reports=reports,
        refused={**exchanged.refused, **refused},
        prototypes=vectors_of(upload for upload in single if upload.site in reports),
        reduced=accepted.reduced,
        server_figures=figures,
        not_merged=accepted.why_void,
        counted_late=counted_late,
        seconds=seconds,
    )


def note_who_answered(strategy: Strategy, accepted: Accepted, result: RoundResult) -> None:
    """Note in the federation whose uploads were merged, and which sites were silent.

    The next message tells each site the last round that was merged of it, and the fraction of its
    change that was used. In a secure sum, single uploads are not seen, and the fraction is 1.
    """
    federation = strategy.federation
    number = result.number
    if not result.not_merged:
        fractions = {upload.site: strategy.used_fraction(upload) for upload in accepted.kept}
        for site in result.reports:
            federation.counted[site] = (number, fractions.get(site, 1.0))
        # a late upload that counts is among those that were kept, so it has a fraction
        for site, late_round in result.counted_late.items():
            federation.counted[site] = (late_round, fractions[site])
    exchanged = result.exchanged
    # a site whose reply to an earlier round came now has no reply to this one, but is not silent
    silent = [site for site in exchanged.missing if site not in exchanged.late]
    answered = {*exchanged.asked, *exchanged.late} - set(silent)
    federation.note_silence(number, silent, answered)
