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


def write_division(folder: Path, settings: Settings, clients: int) -> None:
    """Write the samples that these clients have in our runs, normalised as ours.

    They are compressed as HtFLlib's own scripts do it.
    """
    cpu = torch.device("cpu")
    for client in range(clients):
        data = open_client_data(
            settings.data, seed=settings.run.seed, partition=client, num_partitions=clients
        )
        for part in ("train", "test"):
            inputs = getattr(data, f"{part}_inputs")
            samples = {
                "x": np.asarray(normalised(inputs, data.mean, data.std, cpu)),
                "y": getattr(data, f"{part}_labels"),
            }
            path = folder / "dataset" / DATASET / part
            path.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(path / f"{client}.npz", data=samples)


def network(arch: str) -> str:
    """Return HtFLlib's Python expression for one of HtCNN8's networks, on images of 1×28×28."""
    plan = CNN_PLANS[arch]
    layers = f"num_cov={len(plan.channels)}, hidden_dims={list(plan.hidden)}"
    return f"CNN(in_features=1, num_classes=args.num_classes, height=28, {layers})"


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
    library: Path, folder: Path, settings: Settings, clients: int, rounds: int
) -> list[float]:
    """Run HtFLlib on the samples in ``folder``; return the seconds of each round after the first.

    In the first one clients have no prototypes yet. Its process takes as many threads as PyTorch
    chooses, whatever this process is allowed.
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
    text = json.dumps(defaults(library) | OPTIONS | options)
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
