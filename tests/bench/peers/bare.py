"""The job as a bare PyTorch loop: load the global weights, train, add them up.

What every engine adds is its cost.
"""

import copy
import random

import torch
from job import Clock, Network, arguments, train  # type: ignore[import-not-found]

job, data, _ = arguments()
network, draw, clock = Network(), random.Random(0), Clock()
weights = copy.deepcopy(network.state_dict())
for _ in range(job.rounds):
    sums = {name: torch.zeros_like(value) for name, value in weights.items()}
    for user in draw.sample(range(job.users), job.asked):
        network.load_state_dict(weights)
        train(network, *data.of(user), job)
        for name, value in network.state_dict().items():
            sums[name] += value
    weights = {name: value / job.asked for name, value in sums.items()}
    clock.tick()
network.load_state_dict(weights)
clock.report(network.accuracy(data))
