"""Protections stand between the replies of a round and the algorithm that merges them.

No algorithm knows them. They act in the order of `PROTECTIONS`: a site that is refused has no
influence on what follows, and the samples of a site are bounded before its vectors, whose number
depends on them. Each single reply has been checked before (`server_app/run/replies.py`), and secure
aggregation has made one sum of all (`secure_sum.py`).
"""

from server_app.protections.base import Protection
from server_app.protections.changes import cut_changes
from server_app.protections.enough_replies import enough_replies
from server_app.protections.outliers import leave_out_farthest, refuse_outliers
from server_app.protections.samples import bound_samples, bound_vectors

PROTECTIONS: tuple[Protection, ...] = (
    refuse_outliers,
    bound_samples,
    enough_replies,
    leave_out_farthest,
    bound_vectors,
    cut_changes,
)
