"""What a site keeps of runs and of its data, and how it is removed.

This is behind ``protofl site status`` and ``purge``.
"""

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from protofl_common.basics.files import remove
from protofl_common.basics.text import in_order, with_run_id
from protofl_common.config.options import SettingsError, Values
from protofl_common.config.sections import PER_UNIT
from protofl_common.experiment.node import DELTA, required_dp, site_name
from protofl_common.runs.folder import WEIGHTS
from protofl_common.tools.findings import WRONG
from protofl_common.tools.site.node import site_folders

CACHES = "caches/"  # stands for decoded data and features; names of runs have no slash
# of a file in a cache folder; whatever else lies there is not ours to remove
_CACHE_ENTRY = re.compile(r".+-[0-9a-f]{16}(\.\w+)*")


class Stored(NamedTuple):
    """What a site keeps under one name: its model of a run, or its caches."""

    name: str  # the run's folder, or `CACHES`
    paths: tuple[Path, ...]  # files, and folders with all that is in them

    @property
    def files(self) -> list[Path]:
        files = []
        for path in self.paths:
            files += [file for file in (path, *path.rglob("*")) if file.is_file()]
        return files

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    @property
    def changed(self) -> float:
        """When the newest file was changed, in seconds since 1970; 0 without any."""
        return max((file.stat().st_mtime for file in self.files), default=0.0)

    def remove(self) -> None:
        """Remove the files, and a run's folder unless another site has a model in it."""
        for path in self.paths:
            remove(path)
            if self.name != CACHES:
                for folder in path.parents[:2]:  # RUN/clients, RUN
                    if not any(folder.iterdir()):
                        folder.rmdir()

    def __str__(self) -> str:
        when = "-"
        if self.changed:
            when = f"{datetime.fromtimestamp(self.changed):%Y-%m-%d %H:%M}"
        return f"{self.name:40} {self.bytes / 1e6:10.1f} MB  {when}"


def stored_at(node: Values) -> list[Stored]:
    """Return an entry for each run of which this site keeps a model, and a last one: its caches."""
    states, cache = site_folders(node)

    models = {}
    for folder in states.glob("*/clients/*"):
        if folder.name == site_name(node):  # other sites may use this state-dir, too
            run = folder.parents[1].name  # of RUN/clients/SITE
            models[run] = folder

    caches: list[Path] = []
    for pattern in ("*", "features/*"):  # decoded data, and features of frozen backbones
        entries = sorted(cache.glob(pattern))
        caches += [path for path in entries if _CACHE_ENTRY.fullmatch(path.name)]

    runs = [Stored(name, (models[name],)) for name in in_order(models)]
    return [*runs, Stored(CACHES, tuple(caches))]


def lost_records(node: Values) -> str:
    """Say what ``privacy/`` lacks that is on record elsewhere; "" if it lacks nothing."""
    from client_app.site.consent import unknown_site
    from client_app.site.ledger_audit import missing_records

    states, _ = site_folders(node)
    return missing_records(states, site_name(node)) or unknown_site(node)


def ledgers_at(node: Values) -> Iterator[str]:
    """Yield what is wrong with ``privacy/``, and what each ledger has spent of ``require-dp``.

    A site without ``require-dp`` has no limit of ε, and its ε is told at the default δ.
    """
    from client_app.site.privacy_ledger import epsilon_of, read_ledger, total, unit_of

    lost = lost_records(node)
    if lost:
        yield f"{WRONG}: {lost}"
    states, _ = site_folders(node)
    limits = required_dp(node)
    delta = limits.delta if limits else DELTA
    limit = f" of {limits.epsilon:g}{limits.per_unit}" if limits else ""
    for file in sorted((states / "privacy").glob("*.json")):
        spent = total(read_ledger(file))
        epsilon = f"ε = {epsilon_of(spent, delta):.3g}{PER_UNIT[unit_of(spent)]}"
        yield f"privacy ledger {file.name}: {epsilon}{limit} is spent (δ = {delta:g})"


def purge(node: Values, names: list[str]) -> Iterator[str]:
    """Remove what this site keeps under these ``names``, and yield a line for each.

    A name is that of a run whose model goes, or `CACHES`. The number of the Flower run at its end
    may be left out where only one run can be meant. Secrets that broken-off secure sums have left
    are blanked, too. SettingsError, before anything is removed, if there is no name, or one that is
    unknown or stands for several runs.
    """
    from client_app.protections.secure_sum import blank_secrets

    stored = {entry.name: entry for entry in stored_at(node)}
    chosen = []
    for name in names:
        folders = with_run_id(name, stored)
        lacks_number = name not in stored and len(folders) == 1
        chosen.append(folders[0] if lacks_number else name)
    unknown = [name for name in chosen if name not in stored]
    if unknown or not chosen:
        what = f"{unknown[0]}: nothing of that name" if unknown else "purge: nothing is named"
        raise SettingsError(f"{what}; choose from {', '.join(stored)}")

    blank_secrets(site_folders(node)[0] / "privacy")
    for name in dict.fromkeys(chosen):  # each once
        text = f"removed {stored[name]}"
        stored[name].remove()
        yield text

    # the names of a run's baselines, and of other Flower runs of that name, begin as its own does
    beginnings = tuple(re.sub(r"\d+$", "", name) for name in chosen)  # without its number
    left = [name for name in stored if name not in chosen and name.startswith(beginnings)]
    if left:
        cure = "name each baseline, or other run of a like name, to remove it too"
        yield f"still here: {', '.join(left)}; {cure}"


def retain_at_site(node: Values, before: float, dry_run: bool) -> Iterator[str]:
    """Remove models of finished runs, and caches, that were last changed ``before`` a time.

    The time is in seconds since 1970. Yield a line for each run that is removed, one for the
    caches, and one for each unfinished run of that age, which stays. So do privacy ledgers,
    approvals and the audit log. With ``dry_run`` nothing is removed. SettingsError without a
    state-dir.
    """
    states, _ = site_folders(node)
    if not states.is_dir():
        where = "if it is relative, type the command in the folder where the SuperNode runs"
        raise SettingsError(f"state-dir {states.absolute()}: no such folder; {where}")
    *runs, caches = stored_at(node)
    old = [run for run in runs if run.changed < before]
    old_caches = [path for path in caches.paths if Stored(CACHES, (path,)).changed < before]
    if old_caches:
        old.append(Stored(CACHES, tuple(old_caches)))
    for entry in old:
        # a client writes its weights when the run ends
        is_finished = entry.name == CACHES or (entry.paths[0] / WEIGHTS).exists()
        if not is_finished:
            yield f"kept     {entry}: not finished; protofl site purge {entry.name} removes it"
            continue
        text = f"removed  {entry}"
        if not dry_run:
            entry.remove()
        yield text
