"""One round: messages to the sites, their replies checked, the valid ones merged."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from flwr.app import Message, MessageType, RecordDict
from torch import Tensor

from protofl_common.basics.text import in_order, printable
from protofl_common.runs.attributes import restore_attributes
from protofl_common.runs.evaluation_metrics import declared_metrics
from protofl_common.runs.folder import BestRound
from protofl_common.wire.limits import Limits
from protofl_common.wire.payloads import pack_payload, payload_bytes
from protofl_common.wire.records import Instructions, pack_baseline, pack_best, pack_instructions
from protofl_common.wire.schema import statistics_declared
from protofl_common.wire.secagg import pack_by_site
from server_app.network.membership import AT_ONCE
from server_app.result import RoundResult
from server_app.sampling import sample_sites
from server_app.secagg import BySite, channel_of
from server_app.strategies.base import Strategy
from server_app.validation.replies import Expected, Upload, bounded, in_proportion, take, vectors_of, voted

Send = Callable[[Sequence[Message], float], list[Message]]
"""(messages, timeout in seconds) -> the replies that came."""


def train_round(
    strategy: Strategy, run_name: str, number: int, send: Send, best: BestRound | None = None
) -> RoundResult:
    """The sites of this round's sample evaluate what they receive, train and upload; the server merges.

    ``best``: the round whose model sites keep, with ``keep-best``.
    """
    federation, settings = strategy.federation, strategy.settings.federation
    sites = sample_sites(federation.answering(number), settings.participation, strategy.settings.run.seed, number)
    evaluate = (number - 1) % settings.evaluate_every == 0
    instructions = Instructions(number, run_name, evaluate, federation.run_history)
    result = RoundResult(number, asked=sites)
    start = time.monotonic()
    losses = strategy.row.reported_losses
    expected = Expected(number, strategy.expected_up(number), _limits(strategy), losses, _metrics(strategy))
    channel = channel_of(strategy, instructions, send, expected, result)
    messages = _messages(strategy, result, MessageType.TRAIN, instructions, channel.opened_for(sites), best)
    replies = send(messages, settings.round_timeout)
    arrived = time.monotonic()
    uploads = take(replies, channel.expected, federation, result)
    federation.note_silence(number, result.missing, {*result.reports, *result.failed, *result.refused})
    uploads = bounded(in_proportion(uploads, federation.bounds.max_norm_ratio, result), federation, result)
    result.prototypes = vectors_of(uploads)
    if len(uploads) < settings.min_replies:
        few = f"{len(uploads)} valid replies, fewer than min-replies = {settings.min_replies}"
        result.not_merged = result.not_merged or few
    else:
        uploads = channel.received(uploads)
        arrived = time.monotonic()
        if uploads:
            _merge(strategy, voted(uploads, federation), result)
    result.seconds = {"exchange": arrived - start, "aggregate": time.monotonic() - arrived}
    return result


def _merge(strategy: Strategy, uploads: list[Upload], result: RoundResult) -> None:
    """The server's step; where it fails, or would leave NaN or infinity, the state from before the round stays.

    An error among simulated clients is the algorithm's own, and ends the run.
    """
    before = strategy.packed_state()
    try:
        strategy.reduced = set()
        result.metrics = strategy.merge(uploads)
        result.bounded |= strategy.reduced
        if odd := [name for name, value in strategy.present_state().items() if not _is_finite(value)]:
            result.not_merged = f"{odd[0]} of the server would no longer be finite"
    except (ArithmeticError, LookupError, RuntimeError, ValueError) as error:
        if strategy.federation.simulated:
            raise
        result.not_merged = printable(f"the server's step failed: {type(error).__name__}: {error}")
    if result.not_merged:
        result.metrics = {}
        restore_attributes(strategy, strategy.state, before)


def _is_finite(value: Tensor) -> bool:
    """Without NaN and infinity: both show in the smallest or the largest number."""
    return not value.numel() or bool(torch.stack(value.aminmax()).isfinite().all())


def final_evaluation(strategy: Strategy, run_name: str, number: int, send: Send) -> RoundResult:
    """After round ``number``, the last: all sites evaluate, and say what the report may show."""
    federation, settings = strategy.federation, strategy.settings
    instructions = Instructions(number, run_name, True, federation.run_history)
    result = RoundResult(number, final=True, asked=in_order(federation.answering(number)))
    declared = statistics_declared(settings.run.statistics)
    expected = Expected(number, declared, _limits(strategy), metrics=_metrics(strategy), training=False)
    channel = channel_of(strategy, instructions, send, expected, result)
    sites, uploads = list(channel.opened_for(result.asked).items()), list[Upload]()
    for start in range(0, len(sites), AT_ONCE):
        some = dict(sites[start : start + AT_ONCE])
        messages = _messages(strategy, result, MessageType.EVALUATE, instructions, some)
        replies = send(messages, settings.federation.round_timeout)
        uploads += take(replies, channel.expected, federation, result)
    uploads = channel.received(uploads)
    if declared:
        sent = {upload.site: upload.payload.statistics() for upload in uploads}
        result.statistics = {site: shown for site, shown in sent.items() if shown is not None}
    return result


def tell_best(strategy: Strategy, run_name: str, number: int, send: Send, best: BestRound) -> None:
    """When all is evaluated: which of the models that sites have kept is the best, and on which data it was chosen."""
    federation, instructions = (
        strategy.federation,
        Instructions(number, run_name, False, strategy.federation.run_history),
    )
    records = {"round": pack_instructions(instructions), **pack_baseline(federation.baseline), **pack_best(best, True)}
    send(
        [
            Message(RecordDict(dict(records)), federation.node_of[site], MessageType.EVALUATE, group_id=str(number))
            for site in in_order(federation.answering(number))
        ],
        strategy.settings.federation.round_timeout,
    )


def _messages(
    strategy: Strategy,
    result: RoundResult,
    kind: str,
    instructions: Instructions,
    sites: Mapping[str, BySite],
    best: BestRound | None = None,
) -> list[Message]:
    """A message to each of the ``sites``, with what its channel has for it; the payload of all is packed once."""
    down, common = strategy.settings.exchange.down, strategy.payload_down()
    shared, baseline = pack_payload(common, down), strategy.federation.baseline
    records = {"round": pack_instructions(instructions), **pack_baseline(baseline), **pack_best(best)}
    messages = []
    for site, shares in sites.items():
        own = strategy.payload_for(site, common)
        packed = shared if own is common else pack_payload(own, down)
        content = RecordDict({**packed, **records, **(pack_by_site(shares) if shares else {})})
        result.bytes_down += payload_bytes(content)
        messages.append(Message(content, strategy.federation.node_of[site], kind, group_id=str(instructions.round)))
    return messages


def _metrics(strategy: Strategy) -> set[str]:
    """Names of the metrics that a report may hold."""
    return declared_metrics(strategy.settings.metrics, strategy.num_classes)


def _limits(strategy: Strategy) -> Limits:
    """Limits and checks of replies from clients."""
    settings = strategy.settings
    return Limits(
        num_classes=strategy.num_classes,
        feature_dim=settings.model.feature_dim,
        max_norm=settings.bounds.max_prototype_norm,
        max_per_class=settings.bounds.max_prototypes_per_class,
        weights=strategy.templates(),
        backbones=len(settings.backbones),
        frozen_dim=strategy.card.input_shape[0] if settings.backbones else 0,
    )
