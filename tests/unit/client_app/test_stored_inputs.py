"""Training on more than fits into memory: the inputs stay on the disk."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = """
import re, resource, sys
from pathlib import Path
import torch
from client_app.data import to_device
from client_app.training import Step, make_optimizer, train
from protofl_common.data import clients, open_client_data
from protofl_common.models.split import SplitModel
from protofl_common.experiment.settings import Settings, default_run_config

folder, limit = sys.argv[1], int(sys.argv[2])
given = {"dataset": "arrays", "partition": "own", "data-dir": folder, "cache-dir": folder + "/cache"}
settings = Settings.from_run_config(default_run_config() | given | {"local-epochs": 1, "batch-size": 256})

def loss(batch):
    return {"ce": torch.nn.functional.cross_entropy(batch.logits, batch.labels)}

def epoch():
    torch.manual_seed(0)
    model = SplitModel(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 4)), torch.nn.Linear(4, 2))
    step = Step([model], make_optimizer([model], settings.training), loss)
    data = open_client_data(settings.data, seed=0, partition=0, num_partitions=1)
    samples = to_device(data.train_inputs, data.train_labels, data, torch.device("cpu"))
    print(type(samples.inputs).__name__, len(samples), train(step, samples, settings.training, seed=1))

epoch()
used = 1024 * int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
resource.setrlimit(resource.RLIMIT_DATA, (used + limit, used + limit))
try:
    epoch()
except (MemoryError, RuntimeError):
    print("too much")
clients.MOST_IN_MEMORY = limit
epoch()
"""


@pytest.mark.slow
def test_an_epoch_over_twice_the_memory_is_the_same_as_with_enough(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (16000, 3, 32, 32), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", inputs=images, labels=np.arange(len(images)) % 2)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(images.nbytes // 2)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ample, without, short = done.stdout.splitlines()
    assert without == "too much"
    assert short == re.sub("^Tensor ", "StoredInputs ", ample)
