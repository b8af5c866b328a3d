"""Protections stand between the replies of a round and the algorithm that merges them.

No algorithm knows them. They act in the order of `PROTECTIONS`: a site that is refused has no
influence on what follows, and the samples of a site are bounded before its vectors, whose number
depends on them. Each single reply has been checked before (`server_app/run/replies.py`), and secure
aggregation has made one sum of all (`secure_sum.py`).
"""

from server_app.protections.base import Protection, View
from server_app.protections.changes import CutChanges
from server_app.protections.enough_replies import EnoughReplies
from server_app.protections.outliers import LeaveOutFarthest, RefuseOutliers
from server_app.protections.samples import BoundSamples, BoundVectors

PROTECTIONS: tuple[Protection, ...] = (
    RefuseOutliers(),
    BoundSamples(),
    EnoughReplies(),
    LeaveOutFarthest(),
    BoundVectors(),
    CutChanges(),
)


def protections_of(view: View) -> list[Protection]:
    """Return the protections that act in this round, in their order."""
    return [protection for protection in PROTECTIONS if protection.acts(view)]
