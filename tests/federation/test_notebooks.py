"""The notebooks run from their first cell to their last.

``protofl run`` is a federation in this process.
"""

import json
import re
import shlex
import subprocess
import sys

import pytest

from protofl_common.experiment import catalog as plugins
from protofl_common.experiment.settings import default_run_config
from protofl_common.tools.arguments import read_assignments
from protofl_common.tools.cli import main, parsed
from tests.support import ROOT
from tests.support.harness import CACHE, run_federation

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def command(line):
    """Run a line of a cell that begins with an exclamation mark; it must succeed.

    That is ``pip install`` of a package, or a command of ``protofl``.
    """
    words = shlex.split(line)
    if words[0] == "pip":  # into a folder of the test, without the network
        where = ["--no-deps", "--no-build-isolation", "--target", "site-packages"]
        subprocess.run([sys.executable, "-m", *words, *where], check=True)
    elif words[1] == "run":
        arguments = parsed("run", words[2:])
        settings = read_assignments(arguments.settings) | {"report": False}
        config = plugins.with_hparams(default_run_config() | settings)
        outcome = run_federation(config, clients=arguments.clients)
        assert not outcome.trouble, outcome.summary["warnings"]
    else:
        assert main(words[1:]) == 0


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    """Its cells of code are run one after the other, with `command` for lines of a shell."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", CACHE["cache-dir"])
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    plugins.algorithm_named.cache_clear()
    names = {"command": command}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == []  # notebooks are stored without them
        source = "".join(cell["source"])
        exec(re.sub(r"(?m)^!(.+)$", lambda line: f"command({line[1]!r})", source), names)


def test_the_four_notebooks_are_found():
    names = {path.stem for path in NOTEBOOKS}
    assert names == {"first-run", "prototypes", "add-an-algorithm", "scaffold"}
