"""Protections stand between an algorithm and the wire, a file each.

No algorithm knows them, only the base of all, which is given them.

`PROTECTIONS` is their order. The last is differential privacy, which refuses what is not released
in what the others leave. Behind them stands secure aggregation, whose sum takes four messages
(`secure_sum.py`).
"""

from client_app.protections.base import Protection, Protections
from client_app.protections.differential_privacy import DifferentialPrivacy
from client_app.protections.one_reply import OneReply
from client_app.protections.uploads import PaperNoise, SmallClasses
from client_app.site.workshop import Workshop
from protofl_common.experiment.settings import Settings
from protofl_common.privacy.released import Released

PROTECTIONS: tuple[type[Protection], ...] = (
    OneReply,
    SmallClasses,
    PaperNoise,
    DifferentialPrivacy,
)


def names(settings: Settings, is_site: bool) -> str:
    """Name what acts on messages, for a site's log and its operator."""
    acting = [kind.name for kind in PROTECTIONS if kind.acts(settings, is_site)]
    if settings.privacy.sums_only:
        acting.append("secure aggregation")
    return ", ".join(acting)


def protections_of(work: Workshop) -> Protections:
    """Make the protections that act on the message of this client, in their order."""
    settings = work.settings
    released = Released(settings.run.algo) if settings.privacy.dp != "none" else None
    is_site = work.client.node.is_site
    acting = [kind for kind in PROTECTIONS if kind.acts(settings, is_site)]
    return Protections(*(kind(work, released) for kind in acting))
