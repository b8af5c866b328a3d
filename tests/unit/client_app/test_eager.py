"""Training in a fresh process leaves PyTorch's compiler alone, and nothing else changes."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys, torch
from client_app.training import COMPILER, _without_compiler

def train():
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    for kind, options in ((torch.optim.SGD, dict(momentum=0.9, weight_decay=0.1)), (torch.optim.Adam, {})):
        optimizer = kind(model.parameters(), lr=0.1, **options)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).pow(2).sum().backward()
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    return [value.tolist() for value in model.parameters()], optimizer

_without_compiler()
asked, stand_in = [], sys.modules[COMPILER]
disable = stand_in.disable
stand_in.disable = lambda *a, **k: asked.append(a) or disable(*a, **k)
lean, optimizer = train()
print(bool(asked), "torch._dynamo.eval_frame" in sys.modules)
print(torch.compiler.is_compiling(), torch._dynamo.config.verbose)
import torch._dynamo.utils
print(sys.modules[COMPILER].__file__.endswith("__init__.py"), torch._dynamo.graph_break.__module__)
optimizer.step()
print(train()[0] == lean, sys.modules[COMPILER] is not stand_in)
"""


@pytest.mark.slow
def test_optimizers_do_the_same_without_the_compiler_which_is_there_for_whoever_asks() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = ["True False", "False False", "True torch._dynamo.decorators", "True True"]
    assert done.stdout.splitlines() == lines
