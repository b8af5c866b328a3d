"""The passes without gradient, against plain code."""

from pathlib import Path
from typing import Any

import pytest
import torch

from client_app.data import Samples
from client_app.evaluation import Evaluation, evaluate
from protofl_common.maths.prototypes import Prototypes
from protofl_common.models.build import build_model
from protofl_common.models.split import SplitModel
from tests.support.harness import run_config, run_federation


def setting() -> tuple[SplitModel, Samples]:
    model = build_model("mnist-cnn", input_shape=(1, 28, 28), num_classes=5, feature_dim=8, seed=1)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(57, 1, 28, 28, generator=generator)
    return model, Samples(images, torch.randint(0, 5, (57,), generator=generator))


def test_both_accuracies_equal_plain_code_at_any_batch_size() -> None:
    model, data = setting()
    known = Prototypes(torch.randn(3, 8), torch.tensor([0, 2, 4]))
    model.eval()
    with torch.no_grad():
        z = model.body(data.inputs)
        head = int((model.head(z).argmax(1) == data.labels).sum())
        nearest = int((known.labels[((z[:, None] - known.means[None]) ** 2).sum(-1).argmin(1)] == data.labels).sum())
    for batch_size in (7, 57, 500):
        assert evaluate(model, data, batch_size, known).correct == {"head": head, "prototype": nearest}
    assert evaluate(model, data, 10).correct == {"head": head}


def test_own_prototypes_are_those_of_the_training_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those without a test sample, too: which classes are tested is not known when a client predicts."""
    seen: list[tuple[Samples, Prototypes | None]] = []

    def noted(model: SplitModel, data: Samples, batch_size: int, known: Prototypes | None, *how: Any) -> Evaluation:
        seen.append((data, known))
        return evaluate(model, data, batch_size, known, *how)

    monkeypatch.setattr("client_app.app.evaluate", noted)
    few: dict[str, Any] = {"partition": "pathological", "classes_per_client": 4, "test_samples": 2,
        "models": "mnist-cnn"}  # fmt: skip
    run_federation(run_config(tmp_path, predict_among="own", **few), clients=3)
    *_, (tested, first), (_, second), (_, third) = seen  # the final evaluation of the three clients
    for known in (first, second, third):
        assert len(known.labels) == 4
    assert len(tested.labels.unique()) < 4
