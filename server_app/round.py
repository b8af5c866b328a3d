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
from server_app.replies import Channel, Records, RoundResult, Upload, VoidRound, vectors_of
from server_app.strategies.base import Strategy


def train_round(strategy: Strategy, number: int, exchange: MessageExchange, more: Records) -> RoundResult:
    """The sites of the round evaluate, train and upload; the server merges; ``more``: records beside the payload."""
    federation, settings = strategy.federation, strategy.settings.federation
    seed, able = strategy.settings.run.seed, set(federation.answering(number)) - federation.new_clients
    sites = sample_sites(able, settings.participation, seed, number, federation.fewest_asked)
    dropped = dict.fromkeys(drop_outs(sites, settings.drop_rate, seed, number), DROPPED) if settings.drop_rate else {}
    result, start = RoundResult(number, asked=sites, failed=dropped), time.monotonic()
    channel = _channel(strategy, exchange, result)
    sent, merging = list[Upload](), 0.0
    try:
        sent = uploads = _uploads(strategy, exchange, result, channel, len(sites), more)
        for protection in (refuse_outliers, bound_samples, _enough, channel.accept, leave_out_farthest):
            uploads = protection(uploads, federation, result)
        merging = time.monotonic()
        result.server_figures = _merge(strategy, uploads, result)
        federation.counted |= {site: (number, strategy.parts.get(site, 1.0)) for site in result.reports}
    except VoidRound as reason:
        result.not_merged = str(reason)
    end = time.monotonic()
    result.seconds = {"exchange": (merging or end) - start, "aggregate": end - (merging or end)}
    heard = {*result.reports, *result.failed, *result.refused, *result.late}
    federation.note_silence(number, [site for site in result.missing if site not in heard], heard)
    result.prototypes = vectors_of(upload for upload in sent if upload.site in result.reports)
    return result


def final_evaluation(strategy: Strategy, number: int, exchange: MessageExchange) -> RoundResult:
    """After round ``number``, the last: all sites evaluate."""
    federation = strategy.federation
    result = RoundResult(number, final=True, asked=in_order(federation.answering(number)))
    channel = _channel(strategy, exchange, result)
    try:
        channel.accept(_uploads(strategy, exchange, result, channel, AT_ONCE, {}), federation, result)
    except VoidRound as reason:
        result.not_merged = str(reason)
    return result


def _uploads(
    strategy: Strategy, exchange: MessageExchange, result: RoundResult, channel: Channel, at_once: int, more: Records
) -> list[Upload]:
    """Ask the round's sites, so many ``at_once``; their reports, and what is wrong with replies, go into the result."""
    cards, kind = strategy.federation.cards, MessageType.EVALUATE if result.final else MessageType.TRAIN
    able, uploads = [site for site in result.asked if site not in result.failed], list[Upload]()
    opened = list(channel.opened_for(able).items())
    exchange.arrays = max(exchange.arrays, largest_size(channel.declared, channel.limits))  # of late replies too
    for start in range(0, len(opened), at_once):
        with seeded(derive_seed(strategy.seed, "payload", result.number)):
            contents = _contents(strategy, dict(opened[start : start + at_once]), more, channel)
        for site, content in exchange.ask(kind, contents, result).items():
            try:
                uploads.append(channel.read(content, cards[site]))
                result.reports[site] = uploads[-1].report
            except RefusedMessage as refusal:
                result.refused[site] = str(refusal)
    return uploads


def _contents(strategy: Strategy, sites: Mapping[str, Records], more: Records, channel: Channel) -> dict[str, Records]:
    """The records for each of the ``sites``: its channel's, and the payload, which is packed once for all."""
    down = strategy.settings.exchange.down
    common_payload = strategy.payload_down()
    common = {**pack_payload(common_payload, down), **more}
    contents = dict[str, Records]()
    for site, records in sites.items():
        payload = strategy.payload_for(site, common_payload)
        own = common if payload is common_payload else {**pack_payload(payload, down), **more}
        contents[site] = {**channel.content(site, common, own), **records}
    return contents


def _enough(uploads: list[Upload], federation: Federation, result: RoundResult) -> list[Upload]:
    if len(uploads) < (least := federation.least_replies):
        raise VoidRound(f"{len(uploads)} valid replies, fewer than min-replies = {least}")
    return uploads


def _merge(strategy: Strategy, uploads: list[Upload], result: RoundResult) -> dict[str, float]:
    """The server's step; VoidRound where it fails or leaves NaN; among simulated clients its error ends the run."""
    before, strategy.reduced, strategy.parts = pack_attributes(strategy, strategy.state), set(), {}
    try:
        with seeded(derive_seed(strategy.seed, "merge", result.number)):
            metrics = {name: float(value) for name, value in (strategy.merge(uploads) or {}).items()}
        result.bounded |= strategy.reduced
        odd = [name for name, value in strategy.present_state().items() if not value.isfinite().all()]
        why = f"{odd[0]} of the server would no longer be finite" if odd else ""
    except (ArithmeticError, LookupError, RuntimeError, ValueError) as error:
        if strategy.federation.simulated:
            raise
        why = printable(f"the server's step failed: {type(error).__name__}: {error}")
    if why:
        strategy.restore(before)
        raise VoidRound(why)
    return metrics


def _channel(strategy: Strategy, exchange: MessageExchange, result: RoundResult) -> Channel:
    settings, number, training = strategy.settings, result.number, not result.final
    plan = settings.plan(1)  # the noise of tables is the same for any number of samples
    limits = Limits(
        num_classes=strategy.num_classes,
        feature_dim=settings.model.feature_dim,
        max_norm=settings.bounds.max_prototype_norm,
        max_per_class=settings.bounds.max_prototypes_per_class,
        weights=strategy.templates(),
        frozen_dim=strategy.card.input_shape[0] if settings.backbones else 0,
        noise=8 * count_noise(plan.table_noise) if plan else 0.0,  # deviations, which no honest client exceeds
        longest=settings.privacy.dp_feature_clip,
    )
    declared, losses = (settings.due_up(number), strategy.row.reported_losses) if training else ({}, ())
    metrics = declared_metrics(settings.reported_metrics, strategy.num_classes)
    evaluates = not training or settings.evaluates(number)
    channel = Channel(number, declared, limits, losses, metrics, counts_samples=training, evaluates=evaluates)
    return SecureSum(exchange, result, channel) if settings.privacy.sums_only else channel
