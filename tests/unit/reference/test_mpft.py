"""MPFT: centres of frozen features go up once.

AdamW by hand trains adapter and classifier on them for everybody.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protofl_common.basics.seeding import derive_seed
from protofl_common.experiment.settings import Settings
from tests.support import plain
from tests.support.attacks import values_of
from tests.support.declaration import PLAIN, Declared
from tests.support.harness import Outcome, run_config, run_federation
from tests.support.plain_fedpcl import FedPCLClient

ACTS = {"server-epochs": 3, "server-lr": 0.1, "server-batch-size": 4}
DECLARED = Declared(PLAIN, several=True, frozen=True, losses=(), acts=ACTS)

# The server's training:
EPOCHS = 2
RATE = 0.01
SIZE = 10


def adamw(
    model: torch.nn.Module, batches: Iterable[list[int]], x: torch.Tensor, y: list[int]
) -> plain.State:
    """Train a model on features x by AdamW, with a decay of 0.01."""
    model.train()
    optimizer = plain.Adam(RATE, decay=0.01)
    for batch in batches:
        weights = dict(model.named_parameters())
        loss = plain.cross_entropy(model(x[batch]), [y[i] for i in batch])
        gradients = torch.autograd.grad(loss, list(weights.values()))
        with torch.no_grad():
            after = optimizer.step(weights, dict(zip(weights, gradients, strict=True)))
            model.load_state_dict(after, strict=False)  # which has no buffers
    return plain.copied(model)


def federation(folder: Path, **settings: Any) -> tuple[Outcome, dict[str, Any]]:
    """Run three clients; return the outcome and the config."""
    server = {
        "mpft__server_epochs": EPOCHS,
        "mpft__server_lr": RATE,
        "mpft__server_batch_size": SIZE,
    }
    config = run_config(folder, algo="mpft", feature_dim=16, test_samples=20, **server, **settings)
    return run_federation(config, plain.CLIENTS), config


def sent_centres(outcome: Outcome) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the centres [K, F] that each client has sent, and their labels [K]."""
    centres = []
    for _, reply in outcome.exchanged():
        record = reply.content["prototypes"]
        centres.append((values_of(record["means"]), values_of(record["labels"])))
    return centres


def features_of_class(client: FedPCLClient, label: int) -> np.ndarray:
    """Return the frozen features [N, F] of a client's training samples of a class, in float64."""
    return np.stack([client.r[i].double().numpy() for i, y in enumerate(client.y) if y == label])


def test_a_round_equals_an_independent_script(tmp_path):
    """Each client sends one centre a class, the mean of three samples; the server trains on them.

    A sample ratio of 0.3 is one centre of three samples, and there are thirty of ten classes.
    """
    outcome, config = federation(tmp_path, rounds=1, mpft__sample_ratio=0.3)
    clients = []
    for index in range(plain.CLIENTS):
        clients.append(FedPCLClient(Settings.from_run_config(config), index))

    x = []
    y = []
    for client, (centres, labels) in zip(clients, sent_centres(outcome), strict=True):
        for label in range(10):
            rows = features_of_class(client, label)
            assert len(rows) == 3
            np.testing.assert_allclose(
                centres[labels == label], [rows.mean(axis=0)], rtol=1e-5, atol=1e-6
            )
        x.append(torch.from_numpy(centres.copy()))
        y += labels.tolist()

    shuffle = torch.Generator().manual_seed(derive_seed(clients[0].seed, "mpft"))
    batches = plain.minibatches(len(y), SIZE, EPOCHS, shuffle)
    first = plain.copied(clients[0].model_of("global"))
    wanted = adamw(clients[0].model_of("global"), batches, torch.cat(x), y)
    found = plain.weights_left(outcome)

    assert found.keys() == wanted.keys()
    # the weights have moved by far more than the tolerance below
    assert max(float((wanted[name] - first[name]).abs().max()) for name in wanted) > 0.02

    # What BatchNorm takes away again, the bias of a unit that is always on, has no gradient but
    # its rounding, of which AdamW makes steps; they differ from one processor to the next, the
    # rest does not.
    idle = (found["body.1.bias"] - wanted["body.1.bias"]).abs() > 1e-5
    assert int(idle.sum()) <= 2
    for name, value in wanted.items():
        kept = ~idle if name in ("body.1.bias", "body.3.running_mean") else ...
        torch.testing.assert_close(found[name][kept], value[kept], rtol=0, atol=1e-4, msg=name)

    for client in clients:
        plain.assert_close(plain.model_left(outcome.folder, client.name), found)


def test_centres_are_those_of_clusters_whose_samples_lie_nearest(tmp_path):
    """A class of seven samples has ⌈0.5 · 7⌉ centres, each the mean of its nearest samples."""
    outcome, config = federation(tmp_path, rounds=1, mpft__sample_ratio=0.5, train_samples=70)
    client = FedPCLClient(Settings.from_run_config(config), 0)

    all_centres, labels = sent_centres(outcome)[0]

    for label in range(10):
        rows = features_of_class(client, label)
        centres = all_centres[labels == label]
        assert len(rows) == 7
        assert len(centres) == math.ceil(0.5 * len(rows))

        distances = np.linalg.norm(rows[:, None] - centres[None], axis=2)
        nearest = distances.argmin(axis=1)
        for k, centre in enumerate(centres):
            mean = rows[nearest == k].mean(axis=0)
            np.testing.assert_allclose(centre, mean, rtol=1e-4, atol=1e-5)


def test_the_centres_of_a_client_that_is_away_later_are_kept(tmp_path):
    """The server keeps the ten centres of each client that was ever asked.

    One of three clients is asked in each of four rounds.
    """
    outcome, _ = federation(tmp_path, rounds=4, participation=0.34, mpft__sample_ratio=0.1)

    ever_asked = set()
    centres = []
    *rounds, _final = outcome.rows
    for row in rounds:
        ever_asked |= set(row["clients"])
        assert row["server"]["centres"] == 10.0 * len(ever_asked)
        centres.append(row["server"]["centres"])
    assert len(centres) == 4
    assert centres[-1] > centres[0]
