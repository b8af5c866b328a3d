"""HtFLlib's own loop (github.com/TsingZ0/HtFLlib), on our division and our networks.

It is run from a folder that holds it. Its servers and clients are used as they are, in a process of
their own, by their method ``train``, which evaluates, trains and merges round after round and keeps
what each took. Its ``main.py`` is not, as it has no HtCNN8. Data lie where it looks for them,
relative to the process's folder, so nothing is written into HtFLlib's.
"""

import argparse
import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from numpy.typing import ArrayLike

from protofl_common.config.architectures import architecture_of
from protofl_common.data import open_client_data
from protofl_common.data.raw import normalised
from protofl_common.experiment.settings import Settings
from protofl_common.models.bodies import CNN_PLANS
from tests.support import ROOT

SERVERS = {"fedproto": ("serverproto", "FedProto"), "fedtgp": ("servertgp", "FedTGP")}
"""Our name of an algorithm -> the module and the class of HtFLlib's server."""
DATASET = "benchmark"
OPTIONS = {"dataset": DATASET, "goal": DATASET, "eval_gap": 1}
"""Options of its command line that are not a run's settings; all others keep their defaults."""


def write_samples(
    folder: Path, part: str, client: int, inputs: ArrayLike, labels: ArrayLike
) -> None:
    """Write a client's ``train`` or ``test`` samples as HtFLlib's own scripts do, compressed."""
    path = folder / "dataset" / DATASET / part
    path.mkdir(parents=True, exist_ok=True)
    samples = {"x": np.asarray(inputs), "y": np.asarray(labels)}
    np.savez_compressed(path / f"{client}.npz", data=samples)


def write_division(folder: Path, settings: Settings, clients: int) -> None:
    """Write the samples that these clients have in our runs, normalised as ours."""
    cpu = torch.device("cpu")
    for client in range(clients):
        data = open_client_data(
            settings.data, seed=settings.run.seed, partition=client, num_partitions=clients
        )
        train = normalised(data.train_inputs, data.mean, data.std, cpu)
        test = normalised(data.test_inputs, data.mean, data.std, cpu)
        write_samples(folder, "train", client, train, data.train_labels)
        write_samples(folder, "test", client, test, data.test_labels)


def network(arch: str, channels: int = 1, side: int = 28) -> str:
    """Return HtFLlib's Python expression for one of our networks, of HtCNN8 or HtFE8.

    ``channels`` and ``side`` are those of the images; those of HtFE8 are fixed in HtFLlib.
    """
    if arch == "cnn4":
        return "FedAvgCNN(in_features=3, num_classes=args.num_classes, dim=1600)"
    if arch in CNN_PLANS:
        plan = CNN_PLANS[arch]
        layers = f"num_cov={len(plan.channels)}, hidden_dims={list(plan.hidden)}"
        return f"CNN(in_features={channels}, num_classes=args.num_classes, height={side}, {layers})"
    name = arch.removesuffix("-imagenet-stem").replace("-", "_")
    more = ", aux_logits=False, init_weights=True" if name == "googlenet" else ""
    return f"torchvision.models.{name}(num_classes=args.num_classes{more})"


def defaults(library: Path) -> dict[str, Any]:
    """Return the defaults of HtFLlib's command line.

    Of its main.py only the calls ``parser.add_argument(…)`` are run, as it does more than parse.
    """
    file = library / "system" / "main.py"
    parser = argparse.ArgumentParser()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "parser.add_argument":
            eval(compile(ast.Expression(node), file, "eval"), {"parser": parser})
    return vars(parser.parse_args([]))


def seconds(
    library: Path, folder: Path, settings: Settings, clients: int, rounds: int, **changes: Any
) -> list[float]:
    """Run HtFLlib on the samples in ``folder``; return the seconds of each round after the first.

    In the first one clients have no prototypes yet. Its process takes as many threads as PyTorch
    chooses, whatever this process is allowed. ``changes`` are of HtFLlib's options.
    """
    hparams = settings.hparams
    training = settings.training
    archs = [architecture_of(settings.model.models, client) for client in range(clients)]
    options = {
        "algorithm": settings.run.algo,
        "num_clients": clients,
        "global_rounds": rounds,
        "device": "cpu",
        "models": [network(arch) for arch in archs],
        "num_classes": 10,
        "feature_dim": settings.model.feature_dim,
        "batch_size": training.batch_size,
        "local_epochs": training.local_epochs,
        "local_learning_rate": training.lr,
        "lamda": hparams.lambda_,  # HtFLlib's own spelling, here and below
        "server_epochs": getattr(hparams, "server_epochs", 0),
        "margin_threthold": getattr(hparams, "margin_threshold", 0.0),
    }
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(library.resolve() / "system"), str(ROOT))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",  # it stores whole modules
    }
    environment.pop("OMP_NUM_THREADS", None)
    place = folder / "system"
    place.mkdir(exist_ok=True)
    text = json.dumps(defaults(library) | OPTIONS | options | changes)
    command = [sys.executable, "-m", "tests.bench.htfllib", text]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return json.loads(done.stdout.splitlines()[-1])[1:]


def run(options: dict[str, Any]) -> list[float]:
    """Be HtFLlib's process: return a run's seconds by round."""
    sys.modules["h5py"] = MagicMock()  # for its file of results, which is not needed
    module, name = SERVERS[options["algorithm"]]
    kind = getattr(importlib.import_module(f"flcore.servers.{module}"), name)
    server = kind(SimpleNamespace(**options), 0)  # 0: the number of the repetition
    server.train()
    return server.Budget


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
