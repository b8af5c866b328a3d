"""A machine with data of its own: run its SuperNode with code that its operator chose.

  protofl site run --superlink my.host:8000 --node-config '…' …
      the SuperNode; options as of flower-supernode
  protofl site check [KEY=VALUE …] --node-config '…' …
      what runs could make this machine do; 1 if wrong
  protofl site status --node-config '…'
      what it keeps of runs and data, with sizes
  protofl site purge RUN … --node-config '…'
      remove what it keeps of runs, or caches/
  protofl site key --node-config '…'
      NAME:KEY, by which a study names this site
  protofl site requests --node-config '…'
      which runs ask for this site's data, and what for
  protofl site approve ID|FILE.toml --node-config '…' [--until DAY] [--runs N]
      let runs of these settings take part
  protofl site deny ID|FILE.toml --node-config '…'
      refuse them, from the next message on
  protofl site audit --node-config '…' [--since DAY] [--against RUN]
      what was answered, checked line by line

Whatever a run brings, the code is that which is installed here; flower-supernode alone executes the
run's.
"""

import argparse
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import date
from pathlib import Path

from client_app.site.audit import AuditError
from client_app.site.consent import APPROVED, DENIED, FOLDER, KEY_FILE, site_key
from client_app.site.state import LedgerError, StateError
from protofl_common.config.options import Scalar, SettingsError
from protofl_common.experiment.node import site_folder, site_name
from protofl_common.experiment.study import key_as_text
from protofl_common.tools.cli.arguments import add_json, print_json, read_assignments
from protofl_common.tools.findings import WRONG, nearest_existing, show
from protofl_common.tools.site import approvals, stored
from protofl_common.tools.site.node import (
    node_config,
    site_folders,
    site_settings,
    supernode_options,
)

OURS = (
    "--isolation",
    "--superexec-auth-secret-file",
    "--ssl-certfile",
    "--allow-runtime-dependency-installation",
)
"""Options of flower-supernode that `run` sets, or that it does not go together with."""
READ_ONLY = ("check", "status", "requests", "audit")
TAKE_WORDS = ("check", "purge", "approve", "deny")


def describe(parser: argparse.ArgumentParser) -> None:
    """The arguments; those it does not know are flower-supernode's."""
    parser.add_argument("action", choices=ACTIONS, help=", ".join(ACTIONS))
    words = "settings of a run, runs, an id or a file, as above"
    parser.add_argument("words", nargs="*", help=words)
    until = "approve: the last day, as 2027-06-30"
    parser.add_argument("--until", type=day, metavar="DAY", help=until)
    parser.add_argument(
        "--runs", type=int, metavar="N", help="approve: that many runs (the study's)"
    )
    since = "audit: only the lines behind those of earlier days"
    parser.add_argument("--since", type=day, metavar="DAY", help=since)
    against = "audit: a run's folder, as the server has it"
    parser.add_argument("--against", type=Path, metavar="RUN", help=against)
    can_fork = sys.platform == "linux" and not Path("/dev/nvidiactl").exists()
    methods = ("fork", "spawn")
    default = "fork" if can_fork else "spawn"
    parser.add_argument("--start-method", choices=methods, default=default, help=_START)
    add_json(parser)


_START = (
    "run: what each message starts; fork: a copy of a process that has imported everything; "
    "spawn: a fresh process (default with an NVIDIA GPU, and elsewhere than on Linux)"
)


def day(text: str) -> date:  # by whose name an error calls what is none
    return date.fromisoformat(text)


def act(arguments: argparse.Namespace) -> int | None:
    action = arguments.action
    arguments.options = supernode_options(arguments.flowers)
    arguments.node = node_config(arguments.options.node_config)
    if action not in ("run", "check"):  # whose other options are Flower's
        for word in arguments.options.others:
            if word.startswith("-"):
                raise SettingsError(f"site {action}: {word}: unknown option")
        arguments.words += arguments.options.others

    # SettingsError for a node config that is no site's
    if action == "run":
        site_settings(arguments.node)
    elif action != "check":
        site_folders(arguments.node)
    if action not in READ_ONLY:
        _check_owner(action, arguments.node)
    if arguments.words and action not in TAKE_WORDS:
        raise SettingsError(f"site {action}: {arguments.words[0]}: takes options only")

    try:
        return ACTIONS[action](arguments)
    except (AuditError, LedgerError, StateError) as error:
        raise SettingsError(str(error)) from error


def _check_owner(action: str, node: Mapping[str, Scalar]) -> None:
    """SettingsError for root in another user's folder, who could not read what root writes."""
    folder = nearest_existing(site_folder(node))
    owner = folder.stat().st_uid
    if os.geteuid() == 0 and owner != 0:
        how = f"sudo -u '#{owner}' …, in a container exec --user {owner}"
        raise SettingsError(
            f"site {action}: {folder} is another user's; type it as that one: {how}"
        )


def run(arguments: argparse.Namespace) -> None:
    from protofl_common.tools.site.check import folders, network
    from protofl_common.tools.site.supernode import start

    for option in OURS:
        if any(word.partition("=")[0] == option for word in arguments.flowers):
            raise SettingsError(f"{option}: not together with protofl site run")

    host = arguments.options.host
    port = arguments.options.port
    try:
        # Flower's error is a traceback, and comes late
        socket.create_server((host, int(port))).close()
    except (OSError, ValueError, OverflowError) as error:
        raise SettingsError(f"--host {host} --port {port}: {error}; give another") from error

    for finding in (*network(arguments.options), *folders(arguments.node)):
        if finding.level == WRONG:  # of which Flower says little or nothing
            line = f"protofl: {finding.level} {finding.topic}: {finding.text}"
            print(line, file=sys.stderr, flush=True)
    start(arguments.flowers, f"{host}:{port}", arguments.start_method)


def check(arguments: argparse.Namespace) -> int:
    from protofl_common.tools.site.check import findings

    listed = findings(arguments.options, arguments.node, read_assignments(arguments.words))
    return show("site check", listed, arguments.json)


def status(arguments: argparse.Namespace) -> None:
    node = arguments.node
    kept = stored.stored_at(node)
    if arguments.json:
        rows = []
        for part in kept:
            paths = [str(path) for path in part.paths]
            rows.append({"name": part.name, "bytes": part.bytes, "paths": paths})
        print_json("site status", {"kept": rows})
    else:
        print(*kept, *stored.ledgers_at(node), *stored.free_space(node), sep="\n")


def purge(arguments: argparse.Namespace) -> None:
    print(*stored.purge(arguments.node, arguments.words), sep="\n")


def key(arguments: argparse.Namespace) -> None:
    folder = site_folder(arguments.node).absolute()
    path = folder / KEY_FILE
    is_new = not path.exists()
    public = key_as_text(site_key(folder, make=True).public_key())
    print(f"{path} is new" if is_new else path, file=sys.stderr)
    print(f"{site_name(arguments.node)}:{public}")


def requests(arguments: argparse.Namespace) -> None:
    folder = site_folder(arguments.node).absolute()
    asked = list(approvals.describe_requests(arguments.node))
    files = list((folder / FOLDER).glob("*.json"))
    unread = len(files) - len(asked)
    if arguments.json:
        rows = []
        for request, lines in asked:
            rows.append({"id": request.study.id, **asdict(request.bounded), "asks": lines})
        print_json("site requests", {"requests": rows, "unread": unread})
        return

    if unread:
        print(f"{unread} files in {folder / FOLDER} cannot be read; remove them")
    shown = []
    for _, lines in asked:
        shown += lines
    if not shown:
        shown = ["nobody has asked"]
    print(*shown, f"in {folder}", *stored.ledgers_at(arguments.node), sep="\n")


def decide(arguments: argparse.Namespace) -> None:
    action = arguments.action
    runs = arguments.runs
    if len(arguments.words) != 1:
        raise SettingsError(
            f"site {action}: give one id of protofl site requests, or one file of settings"
        )
    if runs is not None and runs < 1:
        raise SettingsError(f"--runs {runs}: must be at least 1; any number of runs without it")
    decision = APPROVED if action == "approve" else DENIED
    until = str(arguments.until or "")
    print(approvals.decide(arguments.node, arguments.words[0], decision, until, runs or 0))


def audit(arguments: argparse.Namespace) -> int:
    entries, wrong = approvals.log_of(arguments.node, str(arguments.since or ""))
    verdict = "each follows the one before it"
    if arguments.against:
        seen, lacking = approvals.compare_with_server(arguments.node, arguments.against)
        wrong = [*wrong, *lacking]
        verdict += f", and all {seen} that {arguments.against} has seen are there"

    if arguments.json:
        print_json("site audit", {"entries": entries, "wrong": wrong})
    else:
        if wrong:
            verdict = f"{len(wrong)} things are wrong"
        lines = [approvals.describe_entry(entry) for entry in entries]
        print(*lines, *(f"WRONG {line}" for line in wrong), sep="\n")
        print(f"{len(entries)} lines; {verdict}")
    return int(bool(wrong))


ACTIONS = {action.__name__: action for action in (run, check, status, purge, key, requests, audit)}
ACTIONS["approve"] = decide
ACTIONS["deny"] = decide
