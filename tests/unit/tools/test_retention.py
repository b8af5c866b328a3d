"""``protofl retain`` and ``protofl site retain``: what they remove, and what stays."""

import json
import os
import sqlite3
import time
from contextlib import closing

import pytest
from filelock import FileLock
from flwr.supercore.state.schema import corestate_models, linkstate_models, objectstore_models
from sqlalchemy import create_engine

from protofl_common.runs.folder import HEADS, METRICS, SETTINGS, SUMMARY
from tests.support.commands import output

DAY = 86400


def aged(path, days, text=""):
    """Write a file that was changed so many days ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (0, time.time() - days * DAY))
    return path


def run(folder, days, is_finished=True):
    """Write a run that ended, or stopped, so many days ago; return its folder."""
    aged(folder / SETTINGS, days)
    aged(folder / METRICS, days)
    if is_finished:
        aged(folder / SUMMARY, days, json.dumps({"ended": time.time() - days * DAY}))
    return folder


@pytest.fixture
def removed(capsys):
    """``removed("retain", …)``: the lines of a command that removes what is older than 90 days."""

    def lines(*words):
        printed = output(capsys, *words, "--days", "90").out
        return printed.splitlines()

    return lines


def test_old_runs_go_and_unfinished_ones_stay(tmp_path, removed):
    """A run and its baselines stay together until all are finished.

    A run at which a process is at work (its lock is taken) stays, and so does heads.jsonl, the
    witness of the sites' logs.
    """
    old = run(tmp_path / "old", 91)
    without_end = run(tmp_path / "without-end", 91)
    aged(without_end / SUMMARY, 91, json.dumps({"rounds": 1}))
    new = run(tmp_path / "new", 89)
    stopped = run(tmp_path / "stopped", 91, is_finished=False)
    with_baseline = run(tmp_path / "two", 95)
    aged(with_baseline / SETTINGS, 95, 'baselines = "fedavg,local"')
    finished_baseline = run(tmp_path / "two-fedavg", 93)
    baseline = run(tmp_path / "two-local", 91, is_finished=False)
    not_begun = run(tmp_path / "three", 95)
    aged(not_begun / SETTINGS, 95, 'baselines = "fedavg"')
    at_work = run(tmp_path / "at-work", 91)
    heads = aged(tmp_path / HEADS, 400, "{}\n")

    with FileLock(tmp_path / ".at-work.lock"):
        dry = removed("retain", "--runs", tmp_path, "--dry-run")
        assert old.exists()
        lines = removed("retain", "--runs", tmp_path)

    gone = [line for line in lines if line.startswith("removed")]
    assert set(gone) <= set(dry)
    assert sorted(line.partition(", ended ")[0] for line in gone) == [
        f"removed  {old}",
        f"removed  {without_end}",
    ]
    assert f"kept     {stopped}: not finished" in lines
    assert lines[-1] == "2 removed that are older than 90 days"
    assert not old.exists()
    assert not without_end.exists()

    stay = (new, stopped, with_baseline, finished_baseline, baseline, not_begun, at_work, heads)
    assert all(path.exists() for path in stay)


def database(path):
    """Make a SuperLink's database with runs that ended 91 and 89 days ago, and one that goes on.

    They have the numbers 1, 2 and 3. Each has a task with a line of log, a reply, and two parts of
    a message, of which one is shared by all runs.
    """
    engine = create_engine(f"sqlite:///{path}")
    for models in (corestate_models, linkstate_models, objectstore_models):
        for name, base in vars(models).items():
            if name.endswith("Base") and hasattr(base, "metadata"):
                base.metadata.create_all(engine)
    engine.dispose()

    ended = {1: time.time() - 91 * DAY, 2: time.time() - 89 * DAY, 3: None}
    with closing(sqlite3.connect(path)) as link, link:
        for number, seconds in ended.items():
            finished = seconds and time.strftime("%Y-%m-%d %H:%M:%S.5+00:00", time.gmtime(seconds))
            link.execute(
                "INSERT INTO task (task_id, type, run_id, pending_at, finished_at) "
                "VALUES (?, 'flwr-serverapp', ?, '2026-01-01', ?)",
                (10 + number, number, finished),
            )
            link.execute(
                "INSERT INTO run (run_id, primary_task_id) VALUES (?, ?)", (number, 10 + number)
            )
            link.execute("INSERT INTO task_logs VALUES (1.0, ?, 'a line')", (10 + number,))
            link.execute(
                "INSERT INTO message_res (message_id, run_id, content) VALUES (?, ?, ?)",
                (f"reply {number}", number, f"secret of {number}".encode()),
            )
            for name in (f"part {number}", "shared"):
                part = (name, f"array of {name}".encode())
                link.execute(
                    "INSERT OR IGNORE INTO objects (object_id, content) VALUES (?, ?)", part
                )
                link.execute("INSERT INTO run_objects VALUES (?, ?)", (number, name))
    return path


@pytest.mark.slow
def test_messages_of_old_runs_cannot_be_read_any_more(tmp_path, removed):
    """The messages are gone from the bytes of the file, too; what other runs use stays."""
    link = database(tmp_path / "superlink.db")
    words = ("retain", "--runs", tmp_path, "--database", link)

    removed(*words, "--dry-run")
    assert b"secret of 1" in link.read_bytes()

    lines = removed(*words)

    assert f"removed  {link}: 1 rows of message_res" in lines
    assert f"removed  {link}: 1 rows of task_logs" in lines
    assert f"removed  {link}: 1 rows of objects" in lines

    content = link.read_bytes()
    for gone in (b"secret of 1", b"array of part 1"):
        assert gone not in content
    for kept in (b"secret of 2", b"secret of 3", b"array of part 2", b"array of shared"):
        assert kept in content

    with closing(sqlite3.connect(link)) as after:
        assert after.execute("SELECT run_id FROM run").fetchall() == [(1,), (2,), (3,)]
    assert removed(*words) == ["0 removed that are older than 90 days"]


@pytest.mark.parametrize(("content", "reason"), [
    (None, "no such file; give that of the SuperLink"),
    ("", "no such table: run; is it the SuperLink's?"),
])  # fmt: skip
def test_a_file_that_is_no_superlinks_is_refused_and_what_was_removed_before_is_told(
    content, reason, tmp_path, capsys
):
    """``content`` None: there is no file. Folders of runs come before the database."""
    old = run(tmp_path / "old", 91)
    file = tmp_path / "other.db"
    if content is not None:
        file.write_text(content)
    words = ("retain", "--days", "90", "--runs", tmp_path, "--database", file)

    said = output(capsys, *words, status=1)

    assert reason in said.err
    assert f"removed  {old}, ended " in said.out
    assert not old.exists()


@pytest.mark.parametrize("days", ["-1", "1000000"])
def test_days_that_no_calendar_has_are_refused(days, tmp_path, capsys):
    link = database(tmp_path / "superlink.db")
    words = ("retain", "--days", days, "--runs", tmp_path, "--database", link)

    refusal = f"--days {days}: must be at least 0 and at most 36500"
    assert refusal in output(capsys, *words, status=1).err


def test_a_folder_that_is_not_there_is_no_empty_report(tmp_path, capsys):
    """A crontab types the commands in another folder, and reads the report that nothing is old."""
    said = output(capsys, "retain", "--days", "90", "--runs", tmp_path / "runs", status=1).err
    assert f"--runs {tmp_path}/runs: no such folder" in said

    node = f'site-name="north" state-dir="{tmp_path}/state"'
    said = output(capsys, "site", "retain", "--days", "90", "--node-config", node, status=1).err
    assert f"state-dir {tmp_path}/state: no such folder" in said


def test_a_site_removes_old_models_of_finished_runs_and_old_caches(tmp_path, removed):
    """Ledger, audit log, new files and the state of an unfinished run stay."""
    node = f'site-name="north" dataset="image-folder" data-dir="{tmp_path}" '
    node += f'state-dir="{tmp_path}/state" cache-dir="{tmp_path}/cache"'
    state = tmp_path / "state"
    old = aged(state / "first-1" / "clients" / "north" / "model.safetensors", 91)
    new = aged(state / "second-2" / "clients" / "north" / "model.safetensors", 89)
    unfinished = aged(state / "third-3" / "clients" / "north" / "2-3.safetensors", 91)
    ledger = aged(state / "privacy" / "north.json", 400, "{}")
    log = aged(state / "sites" / "north" / "audit.jsonl", 400)
    old_cache = aged(tmp_path / "cache" / "photos-0123456789abcdef.npz", 91)
    new_cache = aged(tmp_path / "cache" / "photos-fedcba9876543210.npz", 1)

    lines = removed("site", "retain", "--node-config", node)

    *of_each, total = lines
    assert [line.split()[:2] for line in of_each] == [
        ["removed", "first-1"],
        ["kept", "third-3"],
        ["removed", "caches/"],
    ]
    assert total == "2 removed that are older than 90 days"
    assert not (state / "first-1").exists()
    assert not old.exists()
    assert not old_cache.exists()
    assert all(path.exists() for path in (new, unfinished, ledger, log, new_cache))
