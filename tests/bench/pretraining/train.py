"""Training of the embedded backbones: ``python -m tests.bench.pretraining.train NAME``.

Supervised classification of the corpus NAME under strong augmentation; a linear layer per label sits on the features
and is thrown away. One thread, about ten minutes; the same seed on the same machine gives the same weights.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofl_common.backbones.load import WEIGHTS, WIDTH, SmallResNet
from protofl_common.config.backbones import EMBEDDED
from protofl_common.data.raw import statistics
from tests.bench.pretraining.augment import augmented
from tests.bench.pretraining.corpus import Corpus, drawn
from tests.bench.pretraining.weights import StoredWeights, write_weights

BATCH, STEPS = 64, 6000
MOMENTUM, WEIGHT_DECAY, SMOOTHING = 0.9, 5e-4, 0.1
HELD_OUT = 4
"""Images of each class, drawn anew, that are not trained on."""


@dataclass(frozen=True)
class Trained:
    """Weights, the loss of every step, and the accuracy on images held out, for each label."""

    weights: StoredWeights
    losses: list[float]
    accuracy: tuple[float, ...]


def train(corpus: Corpus, *, steps: int, seed: int, per_class: int = 0, verbose: bool = False) -> Trained:
    """Train a `SmallResNet` on ``corpus``; torch's global generator is left as it was."""
    images, labels = drawn(corpus, per_class or corpus.per_class, seed, part=0)
    mean, std = statistics(images)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = SmallResNet().to(memory_format=torch.channels_last)
        heads = nn.ModuleList([nn.Linear(WIDTH, classes) for classes in corpus.classes])
    model = _Classifier(network, heads, mean, std)
    losses = list(_steps(model, corpus, torch.from_numpy(images), torch.from_numpy(labels), steps, seed, verbose))
    held_images, held_labels = drawn(corpus, HELD_OUT, seed, part=1)
    accuracy = _accuracy(model, torch.from_numpy(held_images), torch.from_numpy(held_labels))
    return Trained(StoredWeights(network.state_dict(), mean, std), losses, accuracy)


class _Classifier(nn.Module):
    """x [B, 3, H, W] in [0, 1] -> logits of every label."""

    def __init__(
        self, network: SmallResNet, heads: nn.ModuleList, mean: tuple[float, ...], std: tuple[float, ...]
    ) -> None:
        super().__init__()
        self.network, self.heads = network, heads
        self.mean, self.std = torch.tensor(mean).view(3, 1, 1), torch.tensor(std).view(3, 1, 1)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = ((x - self.mean) / self.std).contiguous(memory_format=torch.channels_last)
        features = self.network(x)
        return [head(features) for head in self.heads]


def _steps(
    model: _Classifier, corpus: Corpus, images: Tensor, labels: Tensor, steps: int, seed: int, verbose: bool
) -> Iterator[float]:
    """Train, yielding the loss of every step; the learning rate rises and falls once."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(
        model.parameters(), corpus.lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, corpus.lr, total_steps=steps, pct_start=0.15)
    model.train()
    order: list[int] = []
    start = time.monotonic()
    for step in range(steps):
        if len(order) < BATCH:
            order = torch.randperm(len(images), generator=generator).tolist()
        rows, order = order[:BATCH], order[BATCH:]
        batch = images[rows].float() / 255
        logits = model(augmented(batch, flips=corpus.flips, strength=corpus.strength, generator=generator))
        loss = torch.stack(
            [F.cross_entropy(z, y, label_smoothing=SMOOTHING) for z, y in zip(logits, labels[rows].T, strict=True)]
        ).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if verbose and step % 250 == 0:
            print(f"step {step:5d}  loss {loss.item():.3f}  {time.monotonic() - start:.0f} s", flush=True)
        yield loss.item()


@torch.inference_mode()
def _accuracy(model: _Classifier, images: Tensor, labels: Tensor) -> tuple[float, ...]:
    """Of each label, on the images as drawn, without augmentation."""
    model.eval()
    hits = [
        torch.stack([z.argmax(1) == y for z, y in zip(model(part.float() / 255), wanted.T, strict=True)])
        for part, wanted in zip(images.split(500), labels.split(500), strict=True)
    ]
    return tuple(torch.cat(hits, dim=1).float().mean(dim=1).tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an embedded backbone and write its weights.")
    parser.add_argument("name", choices=EMBEDDED)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, help="file of the weights; default: where the package reads them")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    corpus: Corpus = import_module(f"tests.bench.pretraining.{arguments.name}").corpus()
    trained = train(corpus, steps=arguments.steps, seed=arguments.seed, verbose=True)
    made = {
        "corpus": EMBEDDED[arguments.name],
        "classes": corpus.classes,
        "seed": arguments.seed,
        "steps": arguments.steps,
        "held-out accuracy": [round(value, 4) for value in trained.accuracy],
        "loss of the last 100 steps": round(float(np.mean(trained.losses[-100:])), 4),
    }
    weights = StoredWeights(trained.weights.state, trained.weights.mean, trained.weights.std, made=made)
    write_weights(arguments.out or WEIGHTS / f"{arguments.name}.json", weights)
    print(f"{arguments.name}: {made}, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
