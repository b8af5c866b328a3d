"""Local: what it exchanges."""

from protofl_common.algorithms.base import Algorithm

ALGORITHM = Algorithm(
    title="Local",
    paper="baseline: every client trains alone",
    client="client_app.algorithms.base",
    server="server_app.strategies.base",
    tasks=("single-label", "multi-label"),
)
