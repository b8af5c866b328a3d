"""One round: messages to the sites, their replies checked, the valid ones merged."""

import time
from collections.abc import Sequence

from protofl_common.basics.devices import seeded
from protofl_common.basics.seeding import derive_seed
from protofl_common.basics.text import in_order, printable
from protofl_common.privacy.release import count_noise
from protofl_common.runs.attributes import pack_attributes
from protofl_common.runs.evaluation_metrics import declared_metrics
from protofl_common.runs.folder import DROPPED
from protofl_common.wire.payloads import pack_payload
from protofl_common.wire.schema import Limits
from server_app.flow import AskForUploads, UploadRequest
from server_app.network.admission import drop_outs, sample_sites
from server_app.network.exchange import MessageExchange
from server_app.network.membership import AT_ONCE, Federation
from server_app.protections.uploads import bound_samples, leave_out_farthest, refuse_outliers
from server_app.replies import Records, ReplyReader, RoundResult, Upload, VoidRound, vectors_of
from server_app.strategies.base import Strategy


def train_round(
    strategy: Strategy,
    number: int,
    exchange: MessageExchange,
    ask_for_uploads: AskForUploads,
    extra_records: Records,
) -> RoundResult:
    """Let the sites of a round evaluate, train and upload, and merge what they send.

    ``extra_records``: records that go into every message beside the payload.
    """
    federation = strategy.federation
    result = _new_round(strategy, number)
    started = time.monotonic()
    request = _request(strategy, exchange, result, extra_records)
    sent: list[Upload] = []
    merge_started: float | None = None
    try:
        sent = exchange.run(ask_for_uploads(request), result)
        uploads = sent
        for protect in (
            refuse_outliers,
            bound_samples,
            check_enough_replies,
            leave_out_farthest,
        ):
            uploads = protect(uploads, federation, result)
        merge_started = time.monotonic()
        result.server_figures = _merge(strategy, uploads, result)
        for site in result.reports:
            federation.counted[site] = (number, strategy.used_fractions.get(site, 1.0))
    except VoidRound as reason:
        result.not_merged = str(reason)

    ended = time.monotonic()
    if merge_started is None:
        merge_started = ended
    result.seconds = {"exchange": merge_started - started, "aggregate": ended - merge_started}
    heard = {*result.reports, *result.failed, *result.refused, *result.late}
    silent = [site for site in result.missing if site not in heard]
    federation.note_silence(number, silent, heard)
    single = [upload for upload in sent if upload.clients == 1]
    result.prototypes = vectors_of(upload for upload in single if upload.site in result.reports)
    return result


def final_evaluation(
    strategy: Strategy, number: int, exchange: MessageExchange, ask_for_uploads: AskForUploads
) -> RoundResult:
    """Let all sites evaluate, after round ``number``, the last."""
    federation = strategy.federation
    result = RoundResult(number, final=True, asked=in_order(federation.answering(number)))
    request = _request(strategy, exchange, result, {})
    try:
        exchange.run(ask_for_uploads(request), result)
    except VoidRound as reason:
        result.not_merged = str(reason)
    return result


def _new_round(strategy: Strategy, number: int) -> RoundResult:
    """Draw the sites of a round, and those of them that drop out (``drop-rate``)."""
    federation = strategy.federation
    settings = strategy.settings.federation
    seed = strategy.settings.run.seed
    able = set(federation.answering(number)) - federation.new_clients
    sites = sample_sites(able, settings.participation, seed, number, federation.fewest_asked)
    dropped: dict[str, str] = {}
    if settings.drop_rate:
        dropped = dict.fromkeys(drop_outs(sites, settings.drop_rate, seed, number), DROPPED)
    return RoundResult(number, asked=sites, failed=dropped)


def _request(
    strategy: Strategy, exchange: MessageExchange, result: RoundResult, extra_records: Records
) -> UploadRequest:
    """Return what this exchange asks of its sites, and what a valid reply has."""
    federation = strategy.federation
    sites = [site for site in result.asked if site not in result.failed]
    return UploadRequest(
        result,
        sites,
        federation.cards,
        contents=lambda sites: _contents(strategy, sites, result.number, extra_records),
        about=exchange.about(result),
        reader=_reader(strategy, result),
        at_once=AT_ONCE if result.final else max(1, len(sites)),
        least_replies=0 if result.final else federation.least_replies,
    )


def _contents(
    strategy: Strategy, sites: Sequence[str], number: int, extra_records: Records
) -> dict[str, Records]:
    """Return the records for each of the ``sites``: payload and ``extra_records``.

    A payload that all sites receive is packed only once.
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


def check_enough_replies(
    uploads: list[Upload], federation: Federation, result: RoundResult
) -> list[Upload]:
    least = federation.least_replies
    valid = sum(upload.clients for upload in uploads)
    if valid < least:
        raise VoidRound(f"{valid} valid replies, fewer than min-replies = {least}")
    return uploads


def _merge(strategy: Strategy, uploads: list[Upload], result: RoundResult) -> dict[str, float]:
    """Do the server's step; return its figures.

    Where it fails or leaves NaN, the strategy gets its state back, and the round is void. Among
    simulated clients, its error ends the run.
    """
    before = pack_attributes(strategy, strategy.state)
    strategy.reductions = set()
    strategy.used_fractions = {}
    why_void = ""
    figures: dict[str, float] = {}
    try:
        with seeded(derive_seed(strategy.seed, "merge", result.number)):
            for name, figure in (strategy.merge(uploads) or {}).items():
                figures[name] = float(figure)
        result.bounded_reasons |= strategy.reductions
        for name, tensor in strategy.present_state().items():
            if not tensor.isfinite().all():
                why_void = f"{name} of the server would no longer be finite"
                break
    except (ArithmeticError, LookupError, RuntimeError, ValueError) as error:
        if strategy.federation.simulated:
            raise
        why_void = printable(f"the server's step failed: {type(error).__name__}: {error}")
    if why_void:
        strategy.restore(before)
        raise VoidRound(why_void)
    return figures


def _reader(strategy: Strategy, result: RoundResult) -> ReplyReader:
    """Return what valid replies of this exchange contain, and how they are read."""
    settings = strategy.settings
    is_training = not result.final
    plan = settings.plan(1)  # The noise of tables is the same for any number of samples
    limits = Limits(
        num_classes=strategy.num_classes,
        feature_dim=settings.model.feature_dim,
        max_norm=settings.bounds.max_prototype_norm,
        max_per_class=settings.bounds.max_prototypes_per_class,
        weights=strategy.templates(),
        frozen_dim=strategy.card.input_shape[0] if settings.backbones else 0,
        # Eight deviations, which no honest client exceeds
        moment_noise=8 * count_noise(plan.table_noise) if plan else 0.0,
        max_feature_norm=settings.privacy.dp_feature_clip,
    )
    return ReplyReader(
        result.number,
        declared=settings.due_up(result.number) if is_training else {},
        limits=limits,
        losses=strategy.row.reported_losses if is_training else (),
        metrics=declared_metrics(settings.reported_metrics, strategy.num_classes),
        counts_samples=is_training,
        evaluates=result.final or settings.evaluates(result.number),
    )
