"""The node config: who a client is, and what the operator of its machine demands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from protofl_common.basics.text import is_site_name
from protofl_common.config.options import Scalar, SettingsError

PARTITION_KEYS = ("partition-id", "num-partitions")
"""All that the node config of a simulated client has."""
DELTA = 1e-5
"""δ of a site that demands ε alone."""
_DP = re.compile(r"epsilon<=(\d+\.?\d*)( delta<=(\d*\.?\d+(?:e-\d+)?))?")


@dataclass(frozen=True)
class NodeConfig:
    """The part of a node config that is no setting of a run and no permission."""

    name: str
    partition: int
    num_partitions: int
    domain: str
    is_site: bool
    """True on a machine with an operator, False for a simulated client."""
    has_own_data: bool
    """True where the client brings data of its own; they are then no share of a data set that several divide."""
    statistics: bool | None
    """True where statistics may leave; None where that depends on the run, which divides the data."""
    required_dp: tuple[float, float] | None
    """(ε, δ) that all runs together may spend."""

    @classmethod
    def of(cls, node: Mapping[str, Scalar]) -> NodeConfig:
        """Read and check a node config; SettingsError names the key."""
        if "site-name" not in node and "partition-id" not in node:
            raise SettingsError("node-config: give partition-id and num-partitions, or a site-name")
        if not is_site_name(name := site_name(node)):
            made_of = "ASCII letters, digits, '.', '_' and '-', and begin with a letter or digit"
            raise SettingsError(f"node-config: site-name = {name!r} must be made of at most 100 {made_of}")
        shared = "partition-id" in node and "data-dir" not in node
        statistics = node.get("statistics", None if shared else False)
        if statistics is not None and not isinstance(statistics, bool):
            raise SettingsError(f"node-config: statistics = {statistics!r} must be true or false")
        return cls(
            name=name,
            partition=_whole(node, "partition-id"),
            num_partitions=_whole(node, "num-partitions"),
            domain=str(node.get("domain", "")),
            is_site=is_site(node),
            has_own_data=has_own_data(node),
            statistics=statistics,
            required_dp=required_dp(node),
        )


def site_name(node: Mapping[str, object]) -> str:
    """Return the name of a client, which may not be valid."""
    return str(node.get("site-name", f"site-{node.get('partition-id', 0)}"))


def is_site(node: Mapping[str, object]) -> bool:
    """Return whether a node config is that of a machine with an operator, not of a simulated client."""
    return bool(node.keys() - set(PARTITION_KEYS))


def has_own_data(node: Mapping[str, object]) -> bool:
    """Return whether a site brings data of its own, not a share of a data set that several clients divide."""
    return "partition-id" not in node and bool(node.get("data-dir") or node.get("dataset"))


def required_dp(node: Mapping[str, Scalar]) -> tuple[float, float] | None:
    """(ε, δ) that this site lets all runs together spend, of ``require-dp``; None without."""
    limits = _DP.fullmatch(str(node.get("require-dp")))
    return (float(limits[1]), float(limits[3] or DELTA)) if limits else None


def _whole(node: Mapping[str, Scalar], key: str) -> int:
    value = node.get(key, 0)
    if not isinstance(value, int) or value < 0:
        raise SettingsError(f"node-config: {key} = {value!r} must be a whole number at least 0")
    return value
