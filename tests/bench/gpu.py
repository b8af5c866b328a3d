"""``make bench-gpu``: training on a GPU beside bare PyTorch, in one run.

    python -m tests.bench.gpu [--device cuda] [--steps 300] [--at-once 1 4 8]

A step is FedProto's, batch 10, SGD, on inputs of the shapes of Fashion-MNIST (HtCNN8) and CIFAR-100
(HtFE8) with random content, on which speed does not depend. Printed are steps per second: the mean
over a group's networks (the harmonic one, that is, of a round in which each takes as many steps),
each after a first round that warms up. ``bare``: the same network under autograd and
``torch.optim.SGD``, nothing else; ``ours``: as clients train. Several at once are processes of
their own. Last, a round of FedTGP's server with 100 classes.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from client_app.learning.data import Samples
from client_app.learning.training import Batch, Loss, LossTerms, Step, make_optimizer, train
from protofl_common.config.architectures import GROUPS
from protofl_common.config.sections import TrainingSettings
from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.maths.losses import prototype_alignment
from protofl_common.maths.prototypes import Prototypes
from protofl_common.models.build import build_model
from protofl_common.models.devices import open_device
from protofl_common.models.split import SplitModel
from protofl_common.wire.payloads import Payload
from protofl_common.wire.records import Report
from server_app.run.replies import Upload
from tests.bench.printing import parser_of
from tests.support.fakes import server_of

SHAPES = {"htcnn8": ((1, 28, 28), 10), "htfe8": ((3, 32, 32), 100)}
"""Group -> the shape of an input, and the number of classes."""
DIM = 512
BATCH = 10


def settings_of(device: str, **changes: object) -> Settings:
    """Return the settings of a small network on this device, with these changes."""
    small = {
        "batch-size": BATCH,
        "feature-dim": DIM,
        "momentum": 0.0,
        "local-epochs": 1,
        "device": device,
    }
    return Settings.from_run_config(default_run_config() | small | changes)  # type: ignore[arg-type]


def client(
    group: str, arch: str, device: torch.device, steps: int
) -> tuple[SplitModel, Samples, Loss]:
    """Return a network, data for so many steps, and FedProto's loss.

    There is a prototype of every class.
    """
    shape, classes = SHAPES[group]
    model = build_model(arch, input_shape=shape, num_classes=classes, feature_dim=DIM, seed=1)
    model = model.to(device)
    labels = torch.randint(0, classes, (steps * BATCH,), device=device)
    prototypes = torch.randn(classes, DIM, device=device)
    held = torch.ones(classes, dtype=torch.bool, device=device)

    def loss(batch: Batch) -> LossTerms:
        cross_entropy = functional.cross_entropy(batch.logits, batch.labels)
        features, labels = batch.features, batch.labels
        alignment = prototype_alignment(features, labels, prototypes, held, "mse", "sample")
        return {"cross-entropy": cross_entropy, "prototype": alignment}

    return model, Samples(torch.randn(len(labels), *shape, device=device), labels), loss


def bare(model: SplitModel, data: Samples, loss: Loss, settings: TrainingSettings) -> None:
    """Train an epoch as one would write it in plain PyTorch."""
    optimizer = make_optimizer((model,), settings)
    for rows in torch.randperm(len(data)).to(data.labels.device).split(BATCH):
        inputs = data.in_memory[rows]
        labels = data.labels[rows]
        features = model.body(inputs)
        terms = loss(Batch(inputs, labels, rows, features, model.head(features)))
        total = torch.stack(list(terms.values())).sum()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()


def ours(model: SplitModel, data: Samples, loss: Loss, settings: TrainingSettings) -> None:
    """Train an epoch as our clients do."""
    train(Step((model,), make_optimizer((model,), settings), loss), data, settings, seed=1)


def speed(epoch: Callable[..., None], group: str, name: str, steps: int) -> float:
    """Return the steps per second of ``epoch`` over the networks of a group, on this device."""
    settings = settings_of(name)
    seconds = []
    device = open_device(name, settings.machine.precision)
    for arch in GROUPS[group]:
        parts = client(group, arch, device, steps)
        for _ in range(2):  # the first epoch warms up, and the second counts
            wait(device)
            began = time.perf_counter()
            epoch(*parts, settings.training)
            wait(device)
        seconds.append((time.perf_counter() - began) / steps)
    return 1 / statistics.mean(seconds)


def wait(device: torch.device) -> None:
    """Wait until the device has done what it was told; a GPU works behind the program's back."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def worker(group: str, device: str, steps: int, begin: object, results: object) -> None:
    """Be one of several processes that train at once: warm up, ``begin`` with all, and report."""
    speed(ours, group, device, 20)  # imports, kernels and the device's context
    begin.wait()  # type: ignore[attr-defined]
    results.put(speed(ours, group, device, steps))  # type: ignore[attr-defined]


def at_once(group: str, device: str, steps: int, processes: int) -> float:
    """Return the sum of the steps per second of processes that share the device."""
    context = multiprocessing.get_context("spawn")
    begin = context.Barrier(processes)
    results = context.Queue()
    arguments = (group, device, steps, begin, results)
    workers = [context.Process(target=worker, args=arguments) for _ in range(processes)]
    for process in workers:
        process.start()
    total = sum(results.get() for _ in workers)
    for process in workers:
        process.join()
    return total


def server_seconds(device: str, classes: int) -> float:
    """Return the seconds of a round of FedTGP's server: 100 epochs, 20 clients.

    Each client has prototypes of all classes, as after a ReLU. The first of two rounds warms up.
    """
    labels = torch.arange(classes)
    centres_CD = torch.randn(classes, DIM)
    uploads = []
    for number in range(20):
        of_client_D = torch.randn(DIM)
        means_CD = (centres_CD + of_client_D + torch.randn(classes, DIM)).relu()
        payload = Payload(prototypes=Prototypes(means_CD, labels))
        uploads.append(Upload(f"site-{number}", payload, Report(1, 1, 0)))
    settings = {"feature_dim": DIM, "device": device, "fedtgp__server_epochs": 100}
    server = server_of("fedtgp", range(classes), **settings)
    server.merge(uploads)
    began = time.perf_counter()
    server.merge(uploads)
    return time.perf_counter() - began


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--groups", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--classes", type=int, default=100, help="of FedTGP's server")
    options = parser.parse_args()
    device = open_device(options.device, "fp32")
    print(
        torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        f"PyTorch {torch.__version__}",
    )
    for group in options.groups:
        found = {"bare": speed(bare, group, options.device, options.steps)}
        found["ours"] = speed(ours, group, options.device, options.steps)
        for processes in options.at_once:
            found[f"ours, {processes} at once"] = at_once(
                group, options.device, options.steps, processes
            )
        print(f"{group}, steps per second")
        for name, rate in found.items():
            print(f"  {name:<24} {rate:8.0f} {rate / found['bare']:6.2f} × bare", flush=True)
    for name in dict.fromkeys(("cpu", options.device)):
        seconds = server_seconds(name, options.classes)
        print(f"FedTGP's server, {options.classes} classes, {name}: {seconds:.2f} s")


if __name__ == "__main__":
    main()
