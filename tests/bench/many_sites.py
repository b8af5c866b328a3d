"""What 10, 25 and 50 sites cost a SuperLink and its ServerApp: python -m tests.bench.many_sites [SITES ...]

Real SuperLink, real ServerApp; the sites are threads of this process, each with Flower's own connection and the pauses
of ``protofl site run``, and their messages are handled one at a time by the app's client code (FedProto, 20 digits
each). Prints CPU seconds per round, the first left out; nothing here passes or fails.
"""

import json
import os
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.start_client_internal import _init_connection

from client_app.app import app
from protofl_common.experiment.settings import default_run_config
from tests.support.processes import superlink

ROUNDS = 8
SETTINGS = {
    "dataset": "digits", "partition": "iid", "models": "cnn4", "train-samples": 20, "test-samples": 10,
    "local-epochs": 1, "rounds": ROUNDS, "report": False,
    "threads": 1, "callback": "tests.bench.many_sites:note",
}  # fmt: skip
NOTES = "PROTOFL_BENCH_NOTES"


def note(row: dict[str, Any]) -> None:
    """In the ServerApp's process, after each round: what it and the SuperLink that started it have used."""
    link = next(one for one in psutil.Process().parents() if "flower-superlink" in " ".join(one.cmdline()))
    line = {"app": time.process_time(), "link": sum(link.cpu_times()[:2]), "seconds": row["seconds"]["total"]}
    line["valid"] = row["valid"]
    with Path(os.environ[NOTES]).open("a") as file:
        file.write(json.dumps(line) + "\n")


class Site(threading.Thread):
    """A SuperNode without processes."""

    one_at_a_time = threading.Lock()

    def __init__(self, address: str, number: int, sites: int, config: dict[str, Any], ended: threading.Event) -> None:
        super().__init__(daemon=True)
        self.address, self.config, self.ended = address, config, ended
        self.node: dict[str, Any] = {"partition-id": number, "num-partitions": sites}

    def run(self) -> None:
        """Until `ended`."""
        from protofl_common.tools.site.supernode import Pauses  # not in the ServerApp's process, which has no tools

        pause = Pauses()
        with _init_connection(self.address, insecure=True) as connection:
            node, receive, send, _, _, pull, push, confirm = connection
            while not self.ended.is_set():
                if (received := receive()) is None:
                    pause(3)
                    continue
                (head, tree), run = received, received[0].metadata.run_id
                confirmed = partial(confirm, run)
                message = pull_and_inflate_object_from_tree(tree, partial(pull, run), confirmed, return_type=Message)
                message.metadata.__dict__["_message_id"] = head.metadata.message_id
                reply = self.handle(message, Context(run, node, self.node, RecordDict(), self.config))
                reply.metadata.__dict__["_message_id"] = reply.object_id
                wanted, session = send(reply, get_object_tree(reply), 1.0)
                push_objects(get_all_nested_objects(reply), partial(push, run, session), object_ids_to_push=set(wanted))
                pause(0)

    def handle(self, message: Message, context: Context) -> Message:
        """By the app, which reads Flower's identity of a process."""
        with self.one_at_a_time:
            TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, context.run_id, context.node_id
            return app(message, context)


def measured(sites: int) -> str:
    ended = threading.Event()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ[NOTES] = str(folder / "notes.jsonl")
        own = {"out-dir": str(folder / "runs"), "cache-dir": str(folder / "cache"), "num-clients": sites}
        config = SETTINGS | own
        with superlink(folder) as connection:
            arguments = default_run_config() | config
            threads = [Site(f"127.0.0.1:{connection.port}", i, sites, arguments, ended) for i in range(sites)]
            for thread in threads:
                thread.start()
            text = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
            output, status = connection.run("--run-config", text, timeout=1800)
            ended.set()
            for thread in threads:
                thread.join(10)
        assert status == "finished:completed", output
        rows = [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()][:ROUNDS]
    assert all(row["valid"] == sites for row in rows), rows
    first, last = rows[0], rows[-1]
    link, app = ((last[one] - first[one]) / (ROUNDS - 1) for one in ("link", "app"))
    seconds = sum(row["seconds"] for row in rows[1:]) / (ROUNDS - 1)
    return (
        f"| {sites} | {link:.2f} | {1000 * link / sites:.0f} | {app:.2f} | {1000 * app / sites:.0f} | {seconds:.1f} |"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| sites | SuperLink, CPU s a round | ms a site | ServerApp, CPU s a round | ms a site | a round, s |")
    print("|---|---|---|---|---|---|")
    for number in map(int, sys.argv[1:] or ("10", "25", "50")):
        with suppress(KeyboardInterrupt):
            print(measured(number), flush=True)
