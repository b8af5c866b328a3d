"""Remove what the server keeps of runs that ended long ago, and say what was removed.

  protofl retain --days 90 --database superlink.db

It removes the folders of finished runs, and their messages and logs in the SuperLink's database.
Unfinished runs stay, and so does heads.jsonl, by which the sites' logs are checked. At a site, use
`protofl site retain`.
"""

import sqlite3
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from protofl_common.basics.files import remove
from protofl_common.basics.text import human_bytes
from protofl_common.config.options import SettingsError
from protofl_common.tools.arguments import add_runs
from protofl_common.tools.known_runs import SECONDS_PER_DAY, KnownRun, main_run, runs_in

MOST_DAYS = 36500  # a century
LOCK_SECONDS = 30.0  # for which the SuperLink may keep the database locked
WITH_RUN = ("message_ins", "message_res", "message", "task_message", "task_event")
"""Tables of the SuperLink whose rows have a ``run_id``."""
OLD = "SELECT run_id FROM old_runs"
_REMOVALS = {
    **{table: f"DELETE FROM {table} WHERE run_id IN ({OLD})" for table in WITH_RUN},
    "task_logs": (
        f"DELETE FROM task_logs WHERE task_id IN (SELECT task_id FROM task WHERE run_id IN ({OLD}))"
    ),
    "objects": (
        "DELETE FROM objects WHERE object_id IN "
        f"(SELECT object_id FROM run_objects WHERE run_id IN ({OLD})) AND object_id NOT IN "
        f"(SELECT object_id FROM run_objects WHERE run_id NOT IN ({OLD}))"
    ),
    # after the objects, which are found by these rows
    "run_objects": f"DELETE FROM run_objects WHERE run_id IN ({OLD})",
}
"""Table -> how its rows of old runs are removed.

An object goes unless a run that stays has it, too; rows of other tables that belong to it go by
themselves.
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_days(parser)
    add_runs(parser)
    database = "of the SuperLink, as its --database; without it messages stay"
    parser.add_argument("--database", type=Path, metavar="FILE", help=database)


def act(arguments: Namespace) -> None:
    """Remove old runs, and with --database their messages, and print what was removed."""
    before = days_ago(arguments.days)
    lines: Iterable[str] = retain_runs(arguments.runs, before, arguments.dry_run)
    if arguments.database:
        messages = retain_messages(arguments.database, before, arguments.dry_run)
        lines = chain(lines, messages)
    show(lines, arguments)


def add_days(parser: ArgumentParser) -> None:
    days = "what ended, or was last changed, more than so many days ago is removed"
    parser.add_argument("--days", type=int, required=True, metavar="N", help=days)
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def show(lines: Iterable[str], options: Namespace) -> None:
    """Print what was removed and what was kept, and a line that sums it up.

    Each line is printed as soon as it comes: what was removed before an error is told, too.
    """
    number = 0
    for line in lines:
        print(line)
        number += line.startswith("removed")
    summary = f"{number} removed that are older than {options.days} days"
    if options.dry_run:
        summary = f"--dry-run: nothing was removed; {number} are older than {options.days} days"
    print(summary)


def days_ago(days: int) -> float:
    """Return the time so many days ago, in seconds since 1970.

    SettingsError for fewer than 0, or more than `MOST_DAYS`.
    """
    if not 0 <= days <= MOST_DAYS:
        raise SettingsError(f"--days {days}: must be at least 0 and at most {MOST_DAYS}")
    return time.time() - days * SECONDS_PER_DAY


def retain_runs(folder: Path, before: float, dry_run: bool) -> Iterator[str]:
    """Remove the folders of finished runs that ended ``before``, and yield a line for each.

    ``before`` is in seconds since 1970. An unfinished run stays, and has a line if it was last
    changed before then. With ``dry_run`` nothing is removed. SettingsError without such a folder.
    """
    if not folder.is_dir():
        where = "give that of the worker (--out-dir)"
        raise SettingsError(f"--runs {folder.absolute()}: no such folder; {where}")
    runs = runs_in(folder)
    longest_age = time.time() - before
    for run in runs:
        if not _is_finished(run, runs):
            if run.age > longest_age:
                yield f"kept     {run.path}: not finished"
            continue
        # a summary without this hides no other run
        ended = run.finished_summary().get("ended", time.time() - run.age)
        if ended < before:
            day = f"{datetime.fromtimestamp(ended):%Y-%m-%d}"
            text = f"removed  {run.path}, ended {day}, {human_bytes(run.bytes)}"
            if not dry_run:
                remove(run.path)
            yield text


def _is_finished(run: KnownRun, runs: list[KnownRun]) -> bool:
    """Return whether a run is finished, and so are its main run and all baselines of that.

    The main run's resume.toml resumes them together: until all are finished, each is needed.
    """
    main = main_run(run, runs)
    folders = [main.path, *main.baselines]
    return all(each.summary() and not each.is_under_way for each in map(KnownRun, folders))


def retain_messages(database: Path, before: float, dry_run: bool) -> Iterator[str]:
    """Remove the messages and logs of Flower runs that ended ``before`` from the ``database``.

    ``before`` is in seconds since 1970. Yield a line for each table that had some; with ``dry_run``
    nothing is removed. What was removed is overwritten in the file, too. SettingsError for a file
    that is no SuperLink's database, and if the SuperLink keeps it locked for `LOCK_SECONDS`.
    """
    if not database.is_file():
        raise SettingsError(f"--database {database}: no such file; give that of the SuperLink")
    try:
        # isolation_level None: `_remove_old` begins and ends the transaction itself
        with closing(sqlite3.connect(database, LOCK_SECONDS, isolation_level=None)) as link:
            # overwrite what is removed; remove what refers to it; write temporary tables to no disk
            for pragma in ("secure_delete = ON", "foreign_keys = ON", "temp_store = MEMORY"):
                link.execute(f"PRAGMA {pragma}")
            numbers = _remove_old(link, before, dry_run)
            for table, number in numbers.items():
                if number:
                    yield f"removed  {database}: {number} rows of {table}"
            if not dry_run:
                # the SuperLink itself has removed fetched messages, without overwriting them
                link.execute("VACUUM")
                # the log of changes beside the file has copies: empty it, too
                is_busy, _, _ = link.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                if is_busy:
                    raise sqlite3.OperationalError("database is locked")
    except sqlite3.Error as error:
        cure = "is it the SuperLink's? If it is locked, stop the SuperLink meanwhile"
        raise SettingsError(f"--database {database}: {error}; {cure}") from error


def _remove_old(link: sqlite3.Connection, before: float, dry_run: bool) -> dict[str, int]:
    """Remove the rows of Flower runs that ended ``before``; return the number of each table.

    With ``dry_run`` the numbers are the same, and all is undone.
    """
    day = f"{datetime.fromtimestamp(before, UTC):%Y-%m-%d %H:%M:%S}"  # as Flower writes it
    link.execute("BEGIN IMMEDIATE")
    link.execute(
        "CREATE TEMP TABLE old_runs AS SELECT run.run_id FROM run "
        "JOIN task ON task.task_id = run.primary_task_id WHERE task.finished_at < ?",
        (day,),
    )
    numbers = {}
    for table, statement in _REMOVALS.items():
        numbers[table] = link.execute(statement).rowcount
    link.execute("ROLLBACK" if dry_run else "COMMIT")
    return numbers
