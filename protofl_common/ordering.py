"""The order of names that people expect."""

from __future__ import annotations

import re
from collections.abc import Iterable


def in_order(sites: Iterable[str]) -> list[str]:
    """Sites in natural order: ``site-2`` before ``site-10``."""
    return sorted(sites, key=lambda name: re.sub(r"\d+", lambda number: number.group().zfill(12), name))
