"""FedTGP's server step: large batches of client prototypes against a minibatch-of-10 loop, at equal loss.

    python -m tests.bench.server_time [--clients 20 --classes 100 --dim 512 --epochs 100]

Both train the same trainable vectors and F, from the same start, on the same client prototypes: per class a centre, per
client a shift, per client and class its own deviation, all non-negative as features after a ReLU are. The loop is
written out here as one would from the paper (autograd through `torch.cdist`); ours is `FedTGP.merge`. Reported are
seconds, and the loss (Eq. 10) of all prototypes after training.
"""

import argparse
import time

import torch
from torch import Tensor, nn

from protofl_common.maths.losses.margin import margin_contrast
from protofl_common.maths.prototypes import Prototypes
from protofl_common.wire.payloads import Payload
from protofl_common.wire.records import Report
from server_app.replies import Upload
from server_app.strategies.fedtgp import FedTGP
from tests.support.fakes import server_of

LOOP_BATCH, LOOP_LR = 10, 0.01


def client_prototypes(clients: int, classes: int, dim: int) -> list[Prototypes]:
    """One set per client, every class in each."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    centres_CD = noise(classes, dim).relu()
    labels = torch.arange(classes)
    return [
        Prototypes((centres_CD + 0.5 * noise(dim) + 0.5 * noise(classes, dim)).relu(), labels) for _ in range(clients)
    ]


def strategy(options: argparse.Namespace, **fedtgp: float) -> FedTGP:
    """The server's strategy with these settings, without a federation."""
    options_of = {"feature_dim": options.dim, "device": options.device, "fedtgp__server_epochs": options.epochs}
    more = {f"fedtgp__{key}": value for key, value in fedtgp.items()}
    return server_of("fedtgp", range(options.classes), **options_of, **more)


def loop(start: FedTGP, samples_PD: Tensor, labels_P: Tensor, margin: float, epochs: int) -> FedTGP:
    """Minibatches of 10 as in the paper, written without our loss; trains ``start`` in place."""
    parameters = [start.vectors_CD, *start.transform.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=LOOP_LR)
    for _ in range(epochs):
        for rows in torch.randperm(len(labels_P)).split(LOOP_BATCH):
            logits = -torch.cdist(samples_PD[rows], start.transform(start.vectors_CD))
            apart = margin * nn.functional.one_hot(labels_P[rows], logits.shape[1])
            loss = nn.functional.cross_entropy(logits - apart, labels_P[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    options.device = "cpu"
    torch.set_num_threads(options.threads)
    sets = client_prototypes(options.clients, options.classes, options.dim)
    samples_PD, labels_P = torch.cat([one.means for one in sets]), torch.cat([one.labels for one in sets])
    uploads = [Upload(f"site-{i}", Payload(prototypes=one), Report(1, 1, 0)) for i, one in enumerate(sets)]
    margin = strategy(options).margin(samples_PD, labels_P)

    def report(name: str, trained: FedTGP, seconds: float) -> float:
        with torch.no_grad():
            targets_KD = trained.transform(trained.vectors_CD)
            loss = margin_contrast(samples_PD, labels_P, targets_KD, margin).item()
        print(f"{name:<46} {seconds:8.1f} s   loss {loss:.3f}", flush=True)
        return seconds

    print(f"{len(labels_P)} prototypes, {options.classes} classes, D = {options.dim}, {options.epochs} epochs")
    start = time.perf_counter()
    trained = loop(strategy(options), samples_PD, labels_P, margin, options.epochs)
    slow = report(f"loop, batch {LOOP_BATCH}, lr {LOOP_LR}", trained, time.perf_counter() - start)
    for batch, lr in ((LOOP_BATCH, LOOP_LR), (100, 0.03), (200, 0.05)):
        ours = strategy(options, server_batch_size=batch, server_lr=lr)
        start = time.perf_counter()
        ours.merge(uploads)
        seconds = report(f"ours, server-batch-size {batch}, server-lr {lr}", ours, time.perf_counter() - start)
        print(f"{'':46} {slow / seconds:8.1f} × as fast as the loop")


if __name__ == "__main__":
    main()
