"""Training in a fresh process leaves PyTorch's compiler alone, and nothing else changes."""

from __future__ import annotations

import subprocess
import sys

TRAIN = """
import os, sys, torch
from client_app.eager import without_compiler
lean = os.fork() == 0
if lean:
    without_compiler()
else:
    assert os.wait()[1] == 0
torch.manual_seed(1)
model = torch.nn.Linear(3, 2)
for kind, options in ((torch.optim.SGD, dict(momentum=0.9, weight_decay=0.1)), (torch.optim.Adam, {})):
    optimizer = kind(model.parameters(), lr=0.1, **options)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).pow(2).sum().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
print([value.tolist() for value in model.parameters()])
print('torch._dynamo.eval_frame' in sys.modules)
if not lean:
    sys.exit()
"""
ASK_FOR_MORE = """
print(torch.compiler.is_compiling(), torch._dynamo.config.verbose)
import torch._dynamo.utils
print(sys.modules["torch._dynamo"].__file__.endswith("__init__.py"), torch._dynamo.graph_break.__module__)
optimizer.step()
"""


def test_optimizers_do_the_same_without_the_compiler_which_is_there_for_whoever_asks() -> None:
    done = subprocess.run([sys.executable, "-c", TRAIN + ASK_FOR_MORE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lean, (values, compiler) = done.stdout.splitlines()[:-2], done.stdout.splitlines()[-2:]
    assert lean == [values, "False", "False False", "True torch._dynamo.decorators"]
    assert compiler == "True"
