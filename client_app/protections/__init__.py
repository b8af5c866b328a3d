"""Protections stand between an algorithm and the wire, a file each.

No algorithm knows them, only the base of all, which is given them.

`PROTECTIONS` is their order. Differential privacy refuses what is not released in what the others
leave; secure aggregation hides what is left.
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
    """Name what acts on messages, for a site's log and its operator."""
    return ", ".join(kind.name for kind in PROTECTIONS if kind.acts(settings, is_site))


def protections_of(work: Workshop) -> Protections:
    """Make the protections that act on the message of this client, in their order."""
    settings = work.settings
    dp = settings.privacy.dp
    released = Released(settings.run.algo, dp) if dp != "none" else None
    is_site = work.client.node.is_site
    acting = [kind for kind in PROTECTIONS if kind.acts(settings, is_site)]
    return Protections(*(kind(work, released) for kind in acting))
