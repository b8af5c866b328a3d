"""A machine with data of its own: run its SuperNode with code that its operator chose.

Whatever a run brings, the site executes the code that is installed on it; flower-supernode alone
would execute the run's code. protofl site ACTION --help says more of each action.
"""

import os
import socket
import sys
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path

from client_app.site.audit import AuditError
from client_app.site.consent import APPROVED, DENIED, FOLDER, KEY_FILE, PATCH, site_key
from client_app.site.record import LedgerError, StateError
from protofl_common.config.options import Config, SettingsError, Values
from protofl_common.experiment.node import ON_TROUBLE, NodeConfig, site_folder, site_name
from protofl_common.experiment.study import key_as_text
from protofl_common.tools.arguments import (
    add_allow_python,
    add_json,
    print_json,
    read_assignments,
    read_recipe,
)
from protofl_common.tools.cli.retain import add_days, days_ago
from protofl_common.tools.cli.retain import show as show_removed
from protofl_common.tools.executor import START_METHOD
from protofl_common.tools.findings import WRONG, nearest_existing, show
from protofl_common.tools.site import approvals, stored
from protofl_common.tools.site.node import (
    add_node_config,
    add_supernode_options,
    node_config,
    site_folders,
    site_settings,
    supernode_words,
)

Action = Callable[[Namespace], int | None]
READ_ONLY = ("check", "status", "requests", "audit")  # actions that write nothing


def add_arguments(parser: ArgumentParser) -> None:
    """Add a subparser for each action; the functions below have the actions' names."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def add(function: Action, summary: str) -> ArgumentParser:
        """Add the action that ``function`` does, with --node-config, and return its parser."""
        action = actions.add_parser(function.__name__, help=summary, description=summary)
        action.set_defaults(function=function, parser=action)
        add_node_config(action)
        return action

    running = add(run, "the SuperNode; options of flower-supernode, and --start-method")
    add_supernode_options(running)
    start_method = (
        "what each message starts; fork: a copy of a process that has imported everything; "
        "spawn: a fresh process (default with an NVIDIA GPU, and elsewhere than on Linux)"
    )
    running.add_argument(
        "--start-method",
        choices=("fork", "spawn"),
        default=START_METHOD,
        help=start_method,
    )

    checking = add(check, "what runs could make this machine do; status 1 if something is wrong")
    settings = (
        "settings of a run, such as partition=own, or a file of them, such as a study; the data "
        "are read as a run with these settings would read them"
    )
    checking.add_argument("settings", nargs="*", metavar="KEY=VALUE|FILE.toml", help=settings)
    quality = "also look for odd samples: images unlike the rest, or of one colour, and label rates"
    checking.add_argument("--quality", action="store_true", help=quality)
    add_supernode_options(checking)
    add_json(checking)

    add_json(add(status, "what it keeps of runs and data; status 1 if something is wrong"))

    purging = add(purge, "remove what it keeps of runs, or caches/")
    name = "a name that `status` shows"
    purging.add_argument("runs", nargs="*", metavar="RUN", help=name)

    add_days(add(retain, "remove models of finished runs, and caches, that are old"))

    add(key, "NAME:KEY, by which a study names this site")
    add_json(add(requests, "which runs ask for this site's data, and what for"))

    id_or_file = "an id that `requests` shows, or a file of settings"
    approving = add(approve, "let runs of these settings take part")
    approving.add_argument("request", metavar="ID|FILE.toml", help=id_or_file)
    approving.add_argument("--until", type=day, metavar="DAY", help="the last day, as 2027-06-30")
    runs = "at most so many runs (default: as many as the study has)"
    approving.add_argument("--runs", type=int, metavar="N", help=runs)

    covers = (
        "which code the approval covers; exact: today's; patch: later patch releases, too, such as "
        "0.1.4 after 0.1.3"
    )
    approving.add_argument("--code", choices=("exact", PATCH), default="exact", help=covers)
    sign = (
        "your private SSH key, of type ed25519, where the node config names operators; -: it comes "
        "on standard input"
    )
    approving.add_argument("--key", type=Path, metavar="FILE", help=sign)

    denying = add(deny, "refuse runs of these settings, from the next message on")
    denying.add_argument("request", metavar="ID|FILE.toml", help=id_or_file)
    denying.add_argument("--key", type=Path, metavar="FILE", help=sign)
    add_allow_python(denying, "the file")

    auditing = add(audit, "what was answered, checked line by line; status 1 if something is wrong")
    since = "leave out the lines before this day"
    auditing.add_argument("--since", type=day, metavar="DAY", help=since)
    against = "heads.jsonl, as the server has it beside its runs' folders"
    auditing.add_argument("--against", type=Path, metavar="FILE", help=against)
    add_json(auditing)


def day(text: str) -> date:
    """Read a date; argparse takes this function's name for its error, "invalid day value"."""
    return date.fromisoformat(text)


def act(arguments: Namespace) -> int | None:
    """Check the node config, and do the action; return its exit status, None for 0.

    Every action finds the node config in ``arguments.node``.
    """
    action = arguments.action
    arguments.node = node_config(arguments.node_config)
    # These two are called for their SettingsError: a SuperNode that would refuse all runs does not
    # start, other actions need no more than the folders of a site, and check finds all itself
    if action == "run":
        site_settings(arguments.node)
    elif action != "check":
        site_folders(arguments.node)
    if action not in READ_ONLY:
        _check_owner(action, arguments.node)

    function: Action = arguments.function
    try:
        return function(arguments)
    except (AuditError, LedgerError, StateError) as error:
        raise SettingsError(str(error)) from error


def _check_owner(action: str, node: Values) -> None:
    """Raise SettingsError if root would write into another user's folder.

    The SuperNode of that user could not read what root had written there.
    """
    folder = nearest_existing(site_folder(node))
    owner = folder.stat().st_uid
    if os.geteuid() == 0 and owner != 0:
        how = f"sudo -u '#{owner}' …, in a container exec --user {owner}"
        raise SettingsError(
            f"site {action}: {folder} is another user's; type it as that one: {how}"
        )


def run(arguments: Namespace) -> None:
    """Check port, network, folders and programs, and be the SuperNode until it ends.

    SettingsError where the port cannot be opened. All else that is wrong is only printed.
    """
    from protofl_common.tools.site.check import folders, network, programs, watch
    from protofl_common.tools.site.supernode import start

    host = arguments.host
    port = arguments.port
    try:
        # opened and closed again, as Flower's error would be a traceback, and come late
        socket.create_server((host, int(port))).close()
    except (OSError, ValueError, OverflowError) as error:
        raise SettingsError(f"--host {host} --port {port}: {error}; give another") from error

    node = arguments.node
    for finding in (*network(arguments), *folders(node), *programs(node)):
        if finding.level == WRONG:
            line = f"protofl: {finding.level} {finding.topic}: {finding.text}"
            print(line, file=sys.stderr, flush=True)
    if ON_TROUBLE in node:
        threading.Thread(target=watch, args=[arguments], daemon=True).start()
    start(supernode_words(arguments), f"{host}:{port}", arguments.start_method)


def check(arguments: Namespace) -> int:
    """Print the findings on this machine for a run of these settings; return 1 if one is wrong."""
    from protofl_common.tools.site.check import findings

    run_settings: Config = {}
    assignments = []
    for word in arguments.settings:
        is_assignment = "=" in word  # whose value may be a file, too
        if word.endswith(".toml") and not is_assignment:
            run_settings |= read_recipe(word).settings
        else:
            assignments.append(word)
    run_settings |= read_assignments(assignments)
    listed = findings(arguments, arguments.node, run_settings)
    return show("site check", listed, arguments.json)


def status(arguments: Namespace) -> int:
    """Print what the site keeps and what its ledgers have spent; return 1 if one is wrong."""
    node = arguments.node
    kept = stored.stored_at(node)
    ledgers = list(stored.ledgers_at(node))
    wrong = [line for line in ledgers if line.startswith(WRONG)]
    if arguments.json:
        rows = []
        for entry in kept:
            paths = [str(path) for path in entry.paths]
            rows.append({"name": entry.name, "bytes": entry.bytes, "paths": paths})
        spent = [line for line in ledgers if line not in wrong]
        print_json("site status", {"kept": rows, "ledgers": spent, "wrong": wrong})
    else:
        print(*kept, *ledgers, sep="\n")
    return int(bool(wrong))


def purge(arguments: Namespace) -> None:
    for line in stored.purge(arguments.node, arguments.runs):
        print(line)


def retain(arguments: Namespace) -> None:
    before = days_ago(arguments.days)
    lines = stored.retain_at_site(arguments.node, before, arguments.dry_run)
    show_removed(lines, arguments)


def key(arguments: Namespace) -> None:
    """Print the site's name and public key; make a key if there is none yet."""
    NodeConfig.of(arguments.node)  # for its SettingsError: no study takes a key of a wrong name
    folder = site_folder(arguments.node).absolute()
    path = folder / KEY_FILE
    is_new = not path.exists()
    public = key_as_text(site_key(folder, make=True).public_key())
    print(f"{path} is new" if is_new else path, file=sys.stderr)
    print(f"{site_name(arguments.node)}:{public}")


def requests(arguments: Namespace) -> None:
    """Print what runs have asked of this site, and how many files of requests cannot be read."""
    folder = site_folder(arguments.node).absolute()
    # those that cannot be read are left out
    described = list(approvals.describe_requests(arguments.node))
    files = list((folder / FOLDER).glob("*.json"))
    unread = len(files) - len(described)
    if arguments.json:
        rows = []
        for request, lines in described:
            rows.append({"id": request.study.id, **asdict(request.bounded), "asks": lines})
        print_json("site requests", {"requests": rows, "unread": unread})
        return

    if unread:
        print(f"{unread} files in {folder / FOLDER} cannot be read; remove them")
    shown = []
    for _, lines in described:
        shown += lines
    if not shown:
        shown = ["nobody has asked"]
    print(*shown, f"in {folder}", *stored.ledgers_at(arguments.node), sep="\n")


def approve(arguments: Namespace) -> None:
    """Approve a request within the limits of the command line, and print what is valid now."""
    runs = arguments.runs
    if runs is not None and runs < 1:
        raise SettingsError(f"--runs {runs}: must be at least 1; any number of runs without it")
    verdict = approvals.decide(
        arguments.node,
        arguments.request,
        APPROVED,
        arguments.key,
        until=str(arguments.until or ""),
        runs=runs or 0,  # 0: the study alone limits them
        # with ``--code patch`` the approval is valid for later patch releases, too
        later=PATCH if arguments.code == PATCH else "",
    )
    print(verdict)


def deny(arguments: Namespace) -> None:
    print(approvals.decide(arguments.node, arguments.request, DENIED, arguments.key))


def audit(arguments: Namespace) -> int:
    """Print the audit log and what is wrong with it; return 1 if something is.

    With --against, each line must be there of which the server has seen the hash.
    """
    entries, wrong = approvals.log_of(arguments.node, str(arguments.since or ""))
    verdict = "each follows the one before it"
    if arguments.against:
        compared, missing = approvals.compare_with_server(arguments.node, arguments.against)
        wrong = [*wrong, *missing]
        verdict += f", and all {compared} that {arguments.against} has seen are there"

    if arguments.json:
        print_json("site audit", {"entries": entries, "wrong": wrong})
    else:
        if wrong:
            verdict = f"{len(wrong)} things are wrong"
        lines = [approvals.describe_entry(entry) for entry in entries]
        print(*lines, *(f"WRONG {line}" for line in wrong), sep="\n")
        print(f"{len(entries)} lines; {verdict}")
    return int(bool(wrong))
