"""Training in a fresh process leaves PyTorch's compiler alone, and nothing else changes."""

from __future__ import annotations

import subprocess
import sys

TRAIN = """
import sys, torch
from client_app.eager import without_compiler
if {lean}:
    without_compiler()
torch.manual_seed(1)
model = torch.nn.Linear(3, 2)
for kind, options in ((torch.optim.SGD, dict(momentum=0.9, weight_decay=0.1)), (torch.optim.Adam, {{}})):
    optimizer = kind(model.parameters(), lr=0.1, **options)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).pow(2).sum().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
print([value.tolist() for value in model.parameters()])
"""
IS_LEAN = "print('torch._dynamo.eval_frame' in sys.modules)\n"
ASK_FOR_MORE = """
print(torch.compiler.is_compiling(), torch._dynamo.config.verbose)
import torch._dynamo.utils
print(sys.modules["torch._dynamo"].__file__.endswith("__init__.py"), torch._dynamo.graph_break.__module__)
optimizer.step()
"""


def output(script: str) -> list[str]:
    """What a process prints, by line."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_optimizers_do_the_same_without_the_compiler_which_is_there_for_whoever_asks() -> None:
    lean, stock = output(TRAIN.format(lean=True) + IS_LEAN + ASK_FOR_MORE), output(TRAIN.format(lean=False) + IS_LEAN)
    assert lean[0] == stock[0]
    assert (lean[1], stock[1]) == ("False", "True")
    assert lean[2:] == ["False False", "True torch._dynamo.decorators"]
