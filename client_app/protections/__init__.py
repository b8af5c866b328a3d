"""Protections stand between an algorithm and the wire, a file each.

No algorithm knows them, only the base of all.

`PROTECTIONS` is their order. Differential privacy refuses what is not released in what the others
leave; secure aggregation hides what is left.
"""

from client_app.client import Client
from client_app.protections.base import Protection
from client_app.protections.differential_privacy import DifferentialPrivacy
from client_app.protections.one_reply import OneReply
from client_app.protections.secure_sum import SecureAggregation
from client_app.protections.uploads import PaperNoise, SmallClasses
from protofl_common.experiment.settings import Settings

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


def protections_of(client: Client) -> list[Protection]:
    """The protections that act on messages of ``client``, in their order."""
    return [kind(client) for kind in PROTECTIONS if kind.acts(client.settings, client.node.is_site)]
