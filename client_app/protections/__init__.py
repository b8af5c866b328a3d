"""Protections stand between an algorithm and the wire, a file each.

No algorithm knows them, only the base of all, which is given them.

They act in the order of `PROTECTIONS`. Differential privacy comes after those that change an
upload, as it refuses arrays that are not released; secure aggregation masks the result.
"""

from client_app.protections.base import Protection, Protections
from client_app.protections.differential_privacy import DifferentialPrivacy
from client_app.protections.one_reply import OneReply
from client_app.protections.secure_sum import SecureAggregation
from client_app.protections.uploads import PaperNoise, SmallClasses
from client_app.site.workshop import Workshop
from protofl_common.experiment.settings import Settings
from protofl_common.privacy.released import Released

PROTECTIONS: tuple[type[Protection], ...] = (
    OneReply,
    SmallClasses,
    PaperNoise,
    DifferentialPrivacy,
    SecureAggregation,
)


def names(settings: Settings, is_site: bool) -> str:
    """Return the names of the protections that act in a run, for a site's log and its operator."""
    return ", ".join(kind.name for kind in PROTECTIONS if kind.acts(settings, is_site))


def protections_of(work: Workshop) -> Protections:
    """Return the protections that act on the message that this client answers, in their order."""
    settings = work.settings
    dp = settings.privacy.dp
    released = Released(settings.run.algo, dp) if dp != "none" else None
    is_site = work.client.node.is_site
    kinds = [kind for kind in PROTECTIONS if kind.acts(settings, is_site)]
    return Protections(*(kind(work, released) for kind in kinds))
