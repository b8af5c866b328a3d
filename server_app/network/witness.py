"""The heads of the sites' audit logs, as the server has seen them: the hash of the last line each.

A site that has lost lines of its log would spend its privacy, and the runs that were approved, once
more. So the server tells each site the last head that it has seen, and a site whose log lacks that
line answers nothing.
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
        """Read the last head of each site that earlier rounds and runs have seen.

        A site with a key in the study counts as the same only with this key, as in another study
        another site may have its name.
        """
        last_heads: dict[str, str] = {}  # NAME or NAME:KEY -> head
        for row in heads_in(out_dir / HEADS):
            last_heads.update(row["heads"])
        witness = cls(out_dir / HEADS, keys, {})
        for owner, head in last_heads.items():
            site, _, _ = owner.partition(":")
            if owner == witness.owner(site):
                witness.heads[site] = head
        return witness

    def owner(self, site: str) -> str:
        """Return ``NAME:KEY`` of a site that the study names with its key, ``NAME`` of others."""
        key = self.keys.get(site)
        return f"{site}:{key}" if key else site

    def add(self, run_name: str, number: int, heads: Mapping[str, str]) -> None:
        """Note the heads that came in a round, by site, and append them to the file."""
        if not heads:
            return
        self.heads.update(heads)
        heads_of_owners = {self.owner(site): head for site, head in heads.items()}
        row: HeadsRow = {"run": run_name, "round": number, "heads": heads_of_owners}
        with locked(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
