"""A server's training: on how many threads. What it computes is in tests/unit/reference."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from protofl_common.experiment.catalog import ServerTrainingHparams
from server_app.training import train


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("dim", "batch", "passed", "threads"),
    [(512, 10, 10, 1), (512, 10, 100, 4), (512, 10, 0, 1), (512, 0, 0, 4), (8, 0, 0, 1)],
    ids=["ten classes", "a hundred classes", "the minibatch itself", "all at once", "all at once, narrow"],
)
def test_a_small_step_takes_one_thread(dim: int, batch: int, passed: int, threads: int) -> None:
    layer, seen = nn.Linear(dim, dim), set()

    def loss(rows: Tensor) -> Tensor:
        seen.add(torch.get_num_threads())
        return layer(rows).square().mean()

    hparams = ServerTrainingHparams(server_epochs=1, server_lr=0.1, server_batch_size=batch)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    train(loss, [torch.randn(100, dim)], optimizer, hparams, torch.Generator(), passed=passed)
    assert seen == {threads}
    assert torch.get_num_threads() == 4
