"""The corpora and the training that made the embedded weights."""

import json
import unicodedata
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from protofl_common.backbones import load
from protofl_common.backbones.load import WEIGHTS
from protofl_common.config.backbones import EMBEDDED
from tests.bench.pretraining import glyphs, train
from tests.bench.pretraining.augment import augmented
from tests.bench.pretraining.corpus import Corpus, drawn


def corpus_of(name: str) -> Corpus:
    corpus: Corpus = import_module(f"tests.bench.pretraining.{name}").corpus()
    return corpus


def few_classes(name: str, classes: int = 5) -> Corpus:
    corpus = corpus_of(name)
    return Corpus(corpus.draw, (classes, *corpus.classes[1:]), per_class=6, flips=corpus.flips)


@pytest.mark.slow
@pytest.mark.parametrize("name", tuple(EMBEDDED))
def test_images_follow_from_seed_and_part(name: str) -> None:
    corpus = few_classes(name)
    images, labels = drawn(corpus, 2, seed=1, part=0)
    assert (images.dtype, images.shape) == (np.uint8, (10, 3, 64, 64))
    assert labels[:, 0].tolist() == [0, 1, 2, 3, 4] * 2
    assert (labels < corpus.classes).all()
    assert all(image.std() > 2 for image in images)
    again, same_labels = drawn(corpus, 2, seed=1, part=0)
    assert np.array_equal(images, again)
    assert np.array_equal(labels, same_labels)
    for seed, part in ((2, 0), (1, 1)):
        assert not np.array_equal(images, drawn(corpus, 2, seed, part)[0])


@pytest.mark.parametrize("name", tuple(EMBEDDED))
def test_shipped_weights_know_these_classes(name: str) -> None:
    made = json.loads((WEIGHTS / f"{name}.json").read_text())["made"]
    assert tuple(made["classes"]) == corpus_of(name).classes


def test_glyphs_hold_no_digit() -> None:
    characters = glyphs.characters()
    assert set("ABCabd") <= set(characters)
    assert not set("0123456789²½①ⅧOƼ") & set(characters)
    assert all(unicodedata.numeric(character, None) is None for character in characters)


def test_augmentation_keeps_shape_and_range_and_follows_its_generator() -> None:
    images = torch.rand(12, 3, 32, 48)
    before = images.clone()
    first, again, other = (
        augmented(images, flips=True, strength=1.0, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert first.shape == images.shape
    assert first.min() >= 0
    assert first.max() <= 1
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(images, before)


@pytest.mark.slow
def test_a_few_steps_lower_the_loss_the_same_way_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "BATCH", 20)
    state = torch.get_rng_state()
    first, again = (train.train(few_classes("glyphs"), steps=30, seed=3) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert np.mean(first.losses[-5:]) < np.mean(first.losses[:5]) - 0.1
    assert first.losses == again.losses
    assert all(torch.equal(value, again.weights.state[name]) for name, value in first.weights.state.items())


def test_command_line_writes_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = few_classes("scenes")
    monkeypatch.setattr("tests.bench.pretraining.scenes.corpus", lambda: corpus)
    out = tmp_path / "glyphs.json"
    monkeypatch.setattr("sys.argv", ["pretrain", "scenes", "--steps", "2", "--seed", "5", "--out", str(out)])
    train.main()
    made = json.loads(out.read_text())["made"]
    assert (made["steps"], made["seed"], made["classes"]) == (2, 5, [5, 11])
    assert len(made["held-out accuracy"]) == 2
    assert "held-out accuracy" in capsys.readouterr().out
    monkeypatch.setattr(load, "WEIGHTS", tmp_path)
    load.load_backbone.cache_clear()
    assert load.load_backbone("glyphs", torch.device("cpu")).width == load.WIDTH
    load.load_backbone.cache_clear()
