"""Code that server and clients share: settings, wire, mathematics, models, data and metrics."""

import os

# PyTorch's OpenMP threads, which read this when they begin, would spin for milliseconds while they
# wait for one another, and on a busy machine so keep each other from the processor (docs/speed.md)
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
