"""Operators of sites who approve what waits, and studies that somebody signs, by the commands that people type."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.processes import BIN, environment, output_of

PROTOFL = str(BIN / "protofl")


@contextmanager
def operators(folder: Path, nodes: dict[str, str]) -> Iterator[None]:
    """Each site's operator, who looks at what waits and approves it, until the end."""
    ended = threading.Event()

    def approve(node: str) -> None:
        while not ended.wait(1.0):
            for line in done(folder, "requests", "--node-config", node).splitlines():
                if "  WAITS since " in line:
                    done(folder, "approve", line.split()[0], "--node-config", node)

    threads = [threading.Thread(target=approve, args=(node,)) for node in nodes.values()]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def study(folder: Path, name: str, sites: Mapping[str, str], more: str) -> Path:
    """A study that Jane has signed, and the run ``name`` of it."""
    settings = f'''study = "{name}"
study-sites = "{",".join(sites.values())}"
study-purpose = "who is sick"
run-name = "{name}"
out-dir = "{folder / "runs"}"
algo = "fedproto"
partition = "own"
models = "mlp-1"
rounds = 1
local-epochs = 1
batch-size = 16
eval-batch-size = 64
threads = 1
norm = "group"
seed = 9
{more}
'''
    if not (key := folder / "jane").exists():
        output_of(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], environment(folder / "home"))
    (file := folder / f"{name}.toml").write_text(settings)
    command = [PROTOFL, "study", "sign", str(file), "--key", str(key), "--by", "jane"]
    assert "signed by jane" in output_of(command, environment(folder / "home"))
    return file


def done(folder: Path, *words: str) -> str:
    """The output of ``protofl site`` with these words."""
    return output_of([PROTOFL, "site", *words], environment(folder / "home"), folder)
