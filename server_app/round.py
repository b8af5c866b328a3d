"""One round: messages to the sites, their replies checked, the valid ones merged."""

import time
from collections.abc import Mapping

from flwr.app import MessageType

from protofl_common.basics.devices import seeded
from protofl_common.basics.seeding import derive_seed
from protofl_common.basics.text import in_order, printable
from protofl_common.privacy.release import count_noise
from protofl_common.runs.attributes import pack_attributes
from protofl_common.runs.evaluation_metrics import declared_metrics
from protofl_common.runs.folder import DROPPED
from protofl_common.wire.payloads import largest_size, pack_payload
from protofl_common.wire.schema import Limits, RefusedMessage
from server_app.network.admission import drop_outs, sample_sites
from server_app.network.exchange import MessageExchange
from server_app.network.membership import AT_ONCE, Federation
from server_app.protections.secure_sum import SecureSum
from server_app.protections.uploads import bound_samples, leave_out_farthest, refuse_outliers
from server_app.replies import Records, ReplyReader, RoundResult, Upload, VoidRound, vectors_of
from server_app.strategies.base import Strategy


def train_round(
    strategy: Strategy, number: int, exchange: MessageExchange, extra_records: Records
) -> RoundResult:
    """Let the sites of a round evaluate, train and upload, and merge what they send.

    ``extra_records``: records that go into every message beside the payload.
    """
    federation = strategy.federation
    result = _new_round(strategy, number)
    started = time.monotonic()
    channel = _channel(strategy, exchange, result)
    sent: list[Upload] = []
    merge_started: float | None = None
    try:
        sent = _uploads(strategy, exchange, result, channel, len(result.asked), extra_records)
        uploads = sent
        for protect in (
            refuse_outliers,
            bound_samples,
            check_enough_replies,
            channel.accept,
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
    result.prototypes = vectors_of(upload for upload in sent if upload.site in result.reports)
    return result


def final_evaluation(strategy: Strategy, number: int, exchange: MessageExchange) -> RoundResult:
    """Let all sites evaluate, after round ``number``, the last."""
    federation = strategy.federation
    result = RoundResult(number, final=True, asked=in_order(federation.answering(number)))
    channel = _channel(strategy, exchange, result)
    try:
        uploads = _uploads(strategy, exchange, result, channel, AT_ONCE, {})
        channel.accept(uploads, federation, result)
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


def _uploads(
    strategy: Strategy,
    exchange: MessageExchange,
    result: RoundResult,
    channel: ReplyReader,
    at_once: int,
    extra_records: Records,
) -> list[Upload]:
    """Ask the round's sites, so many ``at_once``, and read their replies.

    Their reports, and what is wrong with replies, go into the result.
    """
    cards = strategy.federation.cards
    kind = MessageType.EVALUATE if result.final else MessageType.TRAIN
    able = [site for site in result.asked if site not in result.failed]
    records_of_sites = list(channel.opened_for(able).items())
    # Late replies have to fit, too, whatever this exchange declares
    exchange.arrays = max(exchange.arrays, largest_size(channel.declared, channel.limits))

    uploads: list[Upload] = []
    for start in range(0, len(records_of_sites), at_once):
        sites = dict(records_of_sites[start : start + at_once])
        with seeded(derive_seed(strategy.seed, "payload", result.number)):
            contents = _contents(strategy, sites, extra_records, channel)
        for site, content in exchange.ask(kind, contents, result).items():
            try:
                upload = channel.read(content, cards[site])
            except RefusedMessage as refusal:
                result.refused[site] = str(refusal)
                continue
            uploads.append(upload)
            result.reports[site] = upload.report
    return uploads


def _contents(
    strategy: Strategy, sites: Mapping[str, Records], extra_records: Records, channel: ReplyReader
) -> dict[str, Records]:
    """Return the records for each of the ``sites``: payload, ``extra_records``, its channel's.

    A payload that all sites receive is packed only once.
    """
    declared = strategy.settings.exchange.down
    common_payload = strategy.payload_down()
    common = {**pack_payload(common_payload, declared), **extra_records}
    contents: dict[str, Records] = {}
    for site, records in sites.items():
        payload = strategy.payload_for(site, common_payload)
        own = common
        if payload is not common_payload:
            own = {**pack_payload(payload, declared), **extra_records}
        contents[site] = {**channel.content(site, common, own), **records}
    return contents


def check_enough_replies(
    uploads: list[Upload], federation: Federation, result: RoundResult
) -> list[Upload]:
    least = federation.least_replies
    if len(uploads) < least:
        raise VoidRound(f"{len(uploads)} valid replies, fewer than min-replies = {least}")
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


def _channel(strategy: Strategy, exchange: MessageExchange, result: RoundResult) -> ReplyReader:
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
    channel = ReplyReader(
        result.number,
        declared=settings.due_up(result.number) if is_training else {},
        limits=limits,
        losses=strategy.row.reported_losses if is_training else (),
        metrics=declared_metrics(settings.reported_metrics, strategy.num_classes),
        counts_samples=is_training,
        evaluates=result.final or settings.evaluates(result.number),
    )
    return SecureSum(exchange, result, channel) if settings.privacy.sums_only else channel
