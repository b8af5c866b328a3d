"""What somebody does first who has just cloned this: ``make run``."""

import os
import re
import sys

import pytest

from tests.support.processes import BIN, output_of

pytestmark = pytest.mark.system


def test_make_run_shows_prototypes_ahead_of_fedavg_and_of_training_alone(tmp_path, short):
    """`make run` runs the recipe first-run, whose last line and report say the result.

    The three figures are accuracies in percent, prototypes' 20 points above those alone.
    """
    env = os.environ | {"TMPDIR": short, "PATH": f"{BIN}:{os.environ['PATH']}"}
    make = ("make", "-o", f"{BIN}/.installed", "run", f"VENV={sys.prefix}")
    lines = output_of((*make, "--dry-run"), env).splitlines()  # below another make there are more
    arguments = [line.split()[1:] for line in lines]  # without the program
    assert ["run", "--recipe", "first-run"] in arguments
    said = output_of((*make, f"CONFIG=--recipe first-run out-dir={tmp_path} run-name=first"), env)

    result = (
        r"^result: alone over 3 architectures (.*) %, FedAvg (.*) %, "
        r"FedProto over 3 .* averaging ([\d.]+) %;"
    )
    found = re.search(result, said, re.M)
    assert found, said
    alone, fedavg, prototypes = map(float, found.groups())
    assert prototypes > max(alone + 20, fedavg)
    assert not re.search(r"INFO|WARNING|Traceback|pid=", said)
    samples = "samples: 2,500 found · 300 for training (train-samples = 30 a client) · "
    assert f"{samples}2,200 for testing · none" in said
    report = (tmp_path / "first" / "report.html").read_text(encoding="utf-8")
    _result, _, sentence = found[0].partition(": ")
    assert sentence in report
