"""Protections stand between an algorithm and the wire, a file each; no algorithm knows them, only the base of all.

`PROTECTIONS` is their order. Behind them stands secure aggregation, whose sum takes four messages (`secure_sum.py`).
"""

from client_app.client import Client
from client_app.protections.base import Protection
from client_app.protections.differential_privacy import DifferentialPrivacy
from client_app.protections.one_reply import OneReply
from client_app.protections.uploads import PaperNoise, SmallClasses
from protofl_common.experiment.settings import Settings

PROTECTIONS: tuple[type[Protection], ...] = (OneReply, SmallClasses, PaperNoise, DifferentialPrivacy)


def names(settings: Settings, is_site: bool) -> str:
    """Name what acts on messages, for a site's log and its operator."""
    acting = [kind.name for kind in PROTECTIONS if kind.acts(settings, is_site)]
    return ", ".join([*acting, "secure aggregation"] if settings.privacy.sums_only else acting)


def protections_of(client: Client) -> list[Protection]:
    return [kind(client) for kind in PROTECTIONS if kind.acts(client.settings, client.node.is_site)]
