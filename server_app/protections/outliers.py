"""Refuse uploads that are out of all proportion to the others of the round (``max-norm-ratio``).

The measure is the largest norm of a prototype, and the norm of the model. Usual is the median over the replies, that of
an honest client while more than half of them are.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch

from protofl_common.maths.aggregation import FEWEST
from protofl_common.maths.prototypes import Prototypes
from protofl_common.wire.payloads import Payload, Value
from server_app.network.membership import Federation
from server_app.replies import Upload
from server_app.result import RoundResult


def accept(uploads: list[Upload], federation: Federation, result: RoundResult) -> list[Upload]:
    """Return the uploads without outliers, whose reports do not count either."""
    refused = outliers({upload.site: upload.payload for upload in uploads}, federation.bounds.max_norm_ratio)
    result.refused |= refused
    for site in refused:
        del result.reports[site]
    return [upload for upload in uploads if upload.site not in refused]


def outliers(payloads: Mapping[str, Payload], ratio: float) -> dict[str, str]:
    """Return why each site is refused of which an entry is more than ``ratio`` times as long as the median."""
    refused: dict[str, str] = {}
    for name in dict.fromkeys(name for payload in payloads.values() for name in payload.entries):
        norms = {site: _norm(sent.entries[name]) for site, sent in payloads.items() if name in sent.entries}
        usual = float(np.median(list(norms.values()))) if len(norms) >= FEWEST else math.inf
        above = f"above {ratio:g} times the round's median of {usual:.3g} (max-norm-ratio)"
        refused |= {site: f"{name} of norm {norm:.3g}, {above}" for site, norm in norms.items() if norm > ratio * usual}
    return refused


def _norm(value: Value) -> float:
    """The largest norm of a vector, or the norm of all weights together."""
    if isinstance(value, Prototypes):
        return float(torch.linalg.vector_norm(value.means.double(), dim=1).max())
    tensors = value.values() if isinstance(value, dict) else ()
    squares = [float(tensor.double().square().sum()) for tensor in tensors if tensor.is_floating_point()]
    return math.sqrt(sum(squares))
