"""The ClientApp: unpack -> algorithm -> pack. One exchange per round carries evaluation and training.

Every handler returns a Message, whatever happens: a failure becomes an error reply with its reason, for which the
server does not wait.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from client_app.algorithms import ALGORITHMS
from client_app.algorithms.base import ClientAlgorithm
from client_app.evaluation import evaluate
from client_app.handover import hand_over
from client_app.insight import insight_of
from client_app.site import Site
from client_app.state import ClientState, StateError
from client_app.training import TrainingError, make_optimizer, train
from protofl_common.catalog import Crossing
from protofl_common.datasets import DataError
from protofl_common.messages import (
    Instructions,
    Payload,
    RefusedMessage,
    Report,
    pack_payload,
    pack_report,
    pack_site_card,
    unpack_instructions,
    unpack_payload,
)
from protofl_common.options import SettingsError
from protofl_common.prototypes import Prototypes, chosen
from protofl_common.seeding import derive_seed
from protofl_common.tensorfile import flatten_optimizer, restore_optimizer
from protofl_common.text import without_paths

app = ClientApp()

EXPECTED_ERRORS = (SettingsError, DataError, StateError, TrainingError, RefusedMessage)
ERROR_CODE = 2
"""Flower's code for "the ClientApp raised an exception"."""


@app.query()
def introduce(message: Message, context: Context) -> Message:
    """Before the first round: who this site is. Prepares the data, so that what is wrong with them shows now."""
    return _answer(message, lambda: RecordDict({"site": pack_site_card(Site(context).card())}))


@app.train()
def train_round(message: Message, context: Context) -> Message:
    """A round: evaluate what was received, train, upload."""
    return _answer(message, lambda: _train_round(message, context))


@app.evaluate()
def final_evaluation(message: Message, context: Context) -> Message:
    """After the last round: evaluate only, and tell what the report may show."""
    return _answer(message, lambda: _final_evaluation(message, context))


def _train_round(message: Message, context: Context) -> RecordDict:
    clock = Stopwatch()
    with clock("load"):
        site, instructions, algorithm, state = _open(message, context)
        _ = site.train_set, site.test_set
    correct: dict[str, int] = {}
    if instructions.evaluate:
        with clock("evaluate"):
            correct = _evaluate(site, algorithm, _predicting(site, algorithm))
    settings = site.settings.training
    with clock("train"):
        optimizer = make_optimizer(site.model, settings)
        if settings.keep_optimizer and state is not None:
            restore_optimizer(optimizer, state.optimizer)
        seed = derive_seed(site.settings.run.seed, "train", site.name, instructions.round)
        losses = train(site.model, optimizer, algorithm.training_set, algorithm.batch_loss, settings, seed)
    with clock("prototypes"):
        upload = algorithm.upload()
    with clock("save"):
        kept = flatten_optimizer(optimizer) if settings.keep_optimizer else {}
        site.states.save(ClientState(instructions.round, site.arch, site.model.state_dict(), kept))
    content = pack_payload(upload, site.settings.row.up)
    content["report"] = pack_report(
        _report(site, instructions, correct, losses, clock), site.settings.row.reported_losses
    )
    return content


def _final_evaluation(message: Message, context: Context) -> RecordDict:
    clock = Stopwatch()
    with clock("load"):
        site, instructions, algorithm, _ = _open(message, context)
        _ = site.test_set
    with clock("evaluate"):
        prototypes = _predicting(site, algorithm)
        correct = _evaluate(site, algorithm, prototypes)
    told = Payload(insight=None if site.insight == "none" else insight_of(site, algorithm))
    with clock("save"):
        hand_over(site, algorithm, prototypes, correct, instructions)
        site.states.finish(instructions.round)
    content = pack_payload(told, Crossing(insight=site.insight))
    content["report"] = pack_report(_report(site, instructions, correct, {}, clock), ())
    return content


def _open(message: Message, context: Context) -> tuple[Site, Instructions, ClientAlgorithm, ClientState | None]:
    """The site as it was before this round, or after the last one, with what the server sent taken in."""
    site = Site(context)
    instructions = unpack_instructions(message.content)
    training = message.metadata.message_type == MessageType.TRAIN
    state = site.restore(instructions.run_name, instructions.lineage, instructions.round + (not training))
    algorithm = ALGORITHMS[site.settings.run.algo](site, instructions.round)
    algorithm.receive(unpack_payload(message.content, site.settings.row.down, site.limits, required=False))
    return site, instructions, algorithm, state


def _predicting(site: Site, algorithm: ClientAlgorithm) -> Prototypes | None:
    """The prototypes to predict with: all, or with ``predict-among = "own"`` those of this site's classes."""
    prototypes = algorithm.prototypes_for_prediction()
    if prototypes is None or site.settings.training.predict_among == "all":
        return prototypes
    return chosen(prototypes, site.train_set.labels.unique())


def _evaluate(site: Site, algorithm: ClientAlgorithm, prototypes: Prototypes | None) -> dict[str, int]:
    return evaluate(
        site.model,
        site.test_set,
        site.settings.training.eval_batch_size,
        prototypes,
        similarity=algorithm.similarity,
        with_head=algorithm.predicts_with_head,
    )


def _report(
    site: Site, instructions: Instructions, correct: dict[str, int], losses: dict[str, float], clock: Stopwatch
) -> Report:
    return Report(
        round=instructions.round,
        train_samples=len(site.data.train_labels),
        test_samples=len(site.data.test_labels),
        correct=correct,
        losses=losses,
        seconds=clock.seconds,
    )


def _answer(message: Message, work: Callable[[], RecordDict]) -> Message:
    """The reply with what ``work`` returns, or an error reply with the reason it did not.

    The reason tells the server no folders of this machine; its own log has them.
    """
    try:
        return Message(work(), reply_to=message)
    except EXPECTED_ERRORS as error:
        reason = str(error)
        print(f"protofl: {reason}", file=sys.stderr, flush=True)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    return Message(Error(ERROR_CODE, without_paths(reason)), reply_to=message)


class Stopwatch:
    """Seconds per phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - start
