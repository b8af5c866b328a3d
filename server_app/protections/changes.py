"""Cut changes of the weights that are far longer than the other clients'."""

import math
from dataclasses import replace

from protofl_common.maths.aggregation import clip_updates, length_of_change
from protofl_common.maths.low_rank import State
from protofl_common.wire.payloads import StateDict
from protofl_common.wire.schema import weights_in
from server_app.protections.base import Accepted
from server_app.run.bounds import Bounds
from server_app.run.replies import Upload
from server_app.strategies.base import Strategy


def cut_changes(uploads: list[Upload], strategy: Strategy) -> Accepted:
    """Cut the changes of weights that are longer than ``max-update-ratio`` times the median length.

    A change is the difference from the weights that the client started from. Whole numbers, such as
    indices of positions, have no length to cut: where sites may lie, the server's own replace them.
    """
    bounds = strategy.federation.bounds
    if not bounds.liars and math.isinf(bounds.max_update_ratio):
        return Accepted(uploads)
    reduced: set[str] = set()
    for name in weights_in(strategy.settings.exchange.up):
        starts = strategy.starting_points(name, [upload.site for upload in uploads])
        if starts is not None:
            uploads = _cut(uploads, name, starts, bounds, reduced)
    return Accepted(uploads, reduced=reduced)


def _cut(
    uploads: list[Upload], name: str, starts: list[StateDict], bounds: Bounds, reduced: set[str]
) -> list[Upload]:
    """Return the uploads with the changes of the weights ``name`` cut.

    ``starts`` has the weights that each site started from. A line for each site whose change is
    cut is added to ``reduced``.
    """
    ratio = bounds.max_update_ratio
    all_sent: list[State] = [upload.weights(name) for upload in uploads]
    all_clipped = clip_updates(all_sent, starts, ratio)  # the same object where nothing is cut
    changed = []
    for upload, start, sent, clipped in zip(uploads, starts, all_sent, all_clipped, strict=True):
        weights = dict(clipped)
        fractions = dict(upload.kept_fractions)
        if clipped is not sent:
            limit = f"{ratio:g} times the median length (max-update-ratio)"
            reduced.add(f"{upload.site}: its change of the weights is cut to {limit}")
            fractions[name] = length_of_change(clipped, start) / length_of_change(sent, start)
        if bounds.liars:
            # lengths leave out whole numbers, so that no cut bounds a lie in them
            weights |= {key: value for key, value in start.items() if not value.is_floating_point()}
        changed.append(replace(upload.with_entries(**{name: weights}), kept_fractions=fractions))
    return changed
