"""The heads of the sites' audit logs, as the server has seen them.

A site that has lost lines of its log, or all of it, would count less than it has done: it would
spend its privacy, and the runs that were approved, once more. So the server tells each site the
last head that it has seen, and a site whose log lacks it answers nothing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from protofl_common.basics.files import locked
from protofl_common.runs.folder import HEADS, HeadsRow, heads_in


@dataclass(frozen=True)
class Witness:
    """The file ``heads.jsonl`` beside the runs' folders, which outlives them."""

    path: Path
    keys: Mapping[str, str]  # Site -> its key, where the study names one
    heads: dict[str, str]  # Site -> the last head of its log that was seen, in whatever run

    @classmethod
    def read(cls, out_dir: Path, keys: Mapping[str, str]) -> Self:
        """Read what earlier rounds and runs have seen.

        A site with a key is known by name and key: in another study another one may have its name.
        """
        seen: dict[str, str] = {}
        for row in heads_in(out_dir / HEADS):
            seen.update(row["heads"])
        witness = cls(out_dir / HEADS, keys, {})
        for owner, head in seen.items():
            site = owner.partition(":")[0]
            if owner == witness.owner(site):
                witness.heads[site] = head
        return witness

    def owner(self, site: str) -> str:
        """Return ``NAME:KEY`` of a site that the study names with its key, ``NAME`` of others."""
        key = self.keys.get(site)
        return f"{site}:{key}" if key else site

    def add(self, run_name: str, number: int, heads: Mapping[str, str]) -> None:
        """Append the heads of a round."""
        if not heads:
            return
        self.heads.update(heads)
        seen = {self.owner(site): head for site, head in heads.items()}
        row: HeadsRow = {"run": run_name, "round": number, "heads": seen}
        with locked(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
