"""The job in Flower's simulation, with its FedAvg and a small client: one Ray actor, one thread."""

import sys
from collections.abc import Callable

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from job import Clock, Network, arguments, opened, train  # type: ignore[import-not-found]

job, data, _ = arguments()
clock, client, server = Clock(), ClientApp(), ServerApp()
FILE = sys.argv[2]
ask = {"num_cpus": 1, "num_gpus": 0.0}


@client.train()
def fit(message: Message, context: Context) -> Message:
    """Train the user's network and return its weights; every user counts alike."""
    torch.set_num_threads(1)
    network = Network()
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())  # type: ignore[union-attr]
    train(network, *opened(FILE).of(int(context.node_config["partition-id"])), job)
    arrays = ArrayRecord(network.state_dict())
    return Message(
        RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}),
        reply_to=message,
    )


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Average the users' weights for all rounds, and report the times and the accuracy."""
    network = Network()
    evaluate: Callable[..., MetricRecord] = lambda *_: clock.tick() or MetricRecord()  # noqa: E731
    strategy = FedAvg(
        fraction_train=job.asked / job.users, fraction_evaluate=0.0, min_available_nodes=job.users
    )
    result = strategy.start(
        grid, ArrayRecord(network.state_dict()), num_rounds=job.rounds, evaluate_fn=evaluate
    )
    network.load_state_dict(result.arrays.to_torch_state_dict())
    clock.times = clock.times[1:]  # the first tick is before round 1
    clock.report(network.accuracy(data))


run_simulation(
    server,
    client,
    job.users,
    backend_config={"client_resources": ask, "init_args": {"num_cpus": 1}},
)
