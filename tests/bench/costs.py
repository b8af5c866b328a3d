"""FedTGP's Tables 5, 8 and 12: numbers on the wire and floating-point operations, from real messages and models.

    python -m tests.bench.costs

Tables 5 and 12 are of Cifar100's practical setting: 20 clients, D = 512, HtFE8. What crosses the wire depends on the
labels alone, so clients here hold Cifar100's labels (100 classes × 600) and images of a few black pixels.
"""

import statistics
import tempfile
from pathlib import Path

from protofl_common.config.architectures import GROUPS, architecture_of
from protofl_common.models.build import build_model
from tests.support.communication import CIFAR100, CLIENTS, DIM, numbers_per_round
from tests.support.flops import forward_flops

PAPER_FORWARD = {"cnn4": 0.013, "googlenet": 1.530, "mobilenet-v2": 0.314, "resnet18-imagenet-stem": 0.117,
    "resnet34-imagenet-stem": 0.218, "resnet50-imagenet-stem": 1.305, "resnet101-imagenet-stem": 2.532,
    "resnet152-imagenet-stem": 5.330}  # fmt: skip
"""Table 8, 10⁹ operations, collected from other papers."""
PAPER_ROUND = 98.77
"""Table 12, FedProto and FedTGP."""
PAPER_NUMBERS = 1.48e6
"""Table 5, FedProto and FedTGP."""
SEEDS = (1, 2, 3)


def main() -> None:
    print("| Table 8: forward, one Cifar100 image | parameters | ours | the paper |\n|---|---|---|---|")
    forward = {}
    for arch in GROUPS["htfe8"]:
        model = build_model(arch, input_shape=(3, 32, 32), num_classes=CIFAR100, feature_dim=DIM, seed=0)
        forward[arch] = forward_flops(model, (3, 32, 32)) / 1e9
        size = sum(parameter.numel() for parameter in model.parameters())
        print(f"| {arch} | {size / 1e6:.2f} M | {forward[arch]:.3f} B | {PAPER_FORWARD[arch]:.3f} B |")
    ours = sum(3 * forward[architecture_of("htfe8", client)] for client in range(CLIENTS))
    theirs = sum(3 * PAPER_FORWARD[architecture_of("htfe8", client)] for client in range(CLIENTS))
    print("\n| Table 12: 3 × forward, 20 clients | ours | the paper | from its own Table 8 |\n|---|---|---|---|")
    print(f"| FedProto, FedTGP | {ours:.2f} B | {PAPER_ROUND} B | {theirs:.2f} B |")
    print("\n| Table 5: numbers on the wire in a round | ours | the paper |\n|---|---|---|")
    for algo in ("fedproto", "fedtgp"):
        found = []
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as folder:
                found.append(numbers_per_round(Path(folder), algo, seed).on_the_wire)
        mean, deviation = statistics.mean(found) / 1e6, statistics.stdev(found) / 1e6
        print(f"| {algo} | {mean:.3f} ± {deviation:.3f} M | {PAPER_NUMBERS / 1e6} M |")


if __name__ == "__main__":
    main()
