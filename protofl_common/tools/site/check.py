"""``protofl site check``: what runs could make this machine do, and what is wrong with it.

A SuperNode looks at its network and folders at its start, so PyTorch is imported later, where it is
needed.
"""

import os
import shutil
import ssl
import stat
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from cryptography.x509 import load_pem_x509_certificates

from client_app.site.consent import problem_of_study
from client_app.site.hooks import CERTIFICATE, DISK, tell_of_trouble
from client_app.site.log import log
from client_app.site.record import StateError
from protofl_common.basics.code_version import code_version_at_site
from protofl_common.basics.text import first_of
from protofl_common.config.lists import names_in
from protofl_common.config.options import SettingsError, Values
from protofl_common.config.python_names import allowing
from protofl_common.config.sections import DANGER_OF_WEIGHTS, PROMISE_OF_SUMS, DataSettings
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.node import (
    ACCEPT_WEIGHTS,
    DEMANDS,
    FEWEST_KNOWN,
    LIMITS,
    ON_REQUEST,
    ON_TROUBLE,
    REQUIRE_SECAGG,
    NodeConfig,
    allowed_by,
    as_its_operator,
    asks_its_operator,
)
from protofl_common.experiment.settings import Settings, app_folder, default_run_config
from protofl_common.experiment.study import Study
from protofl_common.tools.findings import (
    FACT,
    WARNING,
    WRONG,
    Finding,
    nearest_existing,
    worst_first,
)
from protofl_common.tools.flower import (
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_TOLERANCE,
    get_flwr_home,
)
from protofl_common.tools.site.approvals import sent_always, sent_of_model
from protofl_common.tools.site.node import (
    allowed_algorithms,
    least_demanding_settings,
    site_folders,
    site_settings,
)
from protofl_common.tools.site.stored import lost_records, stored_at
from protofl_common.tools.superlink import FEW_DAYS, ask_endpoint

CERTIFICATES = "certificates"
FREE_SPACE = "disk"
TROUBLES = {CERTIFICATES: CERTIFICATE, FREE_SPACE: DISK}
"""Topic of findings -> the word with which the operator's ``on-trouble`` command is called."""
FEW_BYTES = 2**30  # free on a disk: less is a warning
FULL_BYTES = 10**6  # less is wrong
LOOK_SECONDS = 3600.0  # between two looks for troubles while a site runs


def findings(options: Namespace, node: Values, asked: Values) -> list[Finding]:
    """Return what is found about a site, the worst first; nothing is written.

    ``asked`` are the settings of a run: the data are read as it would have them. {}: no run is
    asked about, and no data are read.
    """
    listed = [*_code_and_user(), *network(options)]
    refused = [*_refused(node, asked)]
    listed += refused
    is_node_config_right = not refused or not list(_refused(node, {}))
    if is_node_config_right:
        listed += folders(node)
        listed += programs(node)
        listed += _permissions(node)
        listed += _algorithms(node)
        if not asked:  # an introduction in a run tries the device, too
            listed += _device(node)
    if not refused:
        listed += _data(node, asked, options.quality)
        from client_app import protections

        active = protections.names(site_settings(node, asked), is_site=True)
        listed.append(Finding(FACT, "protections", active))
    return worst_first(listed)


def troubles(options: Namespace, node: Values) -> list[str]:
    """Return a word of `TROUBLES` for each thing that will stop the site unless somebody acts."""
    topics = set()
    for finding in (*network(options), *folders(node)):
        if finding.level != FACT:
            topics.add(finding.topic)
    return [word for topic, word in TROUBLES.items() if topic in topics]


def watch(options: Namespace) -> None:
    """Call the operator's command, once an hour, for each thing that will stop the site.

    ``options`` are those of ``protofl site run``, with the ``node`` config. This never returns; an
    error is logged, and ends nothing.
    """
    while True:
        try:
            for word in troubles(options, options.node):
                tell_of_trouble(options.node, word)
        except Exception as error:  # the site must go on
            log("ERROR", f"on-trouble: {error}")
        time.sleep(LOOK_SECONDS)


def _refused(node: Values, asked: Values) -> Iterator[Finding]:
    """Say why the site refuses a run with the settings ``asked``; for {}, why it refuses all."""
    try:
        settings = site_settings(node, asked)
        problem = ""
        if asked.get("study"):  # other settings may be checked before a study is made of them
            problem = problem_of_study(Study.of(settings.given), node, settings.given)
    except OSError:
        return  # the state-dir cannot be read, as `folders` says
    except (SettingsError, StateError) as error:
        yield from [Finding(WRONG, "settings", line) for line in str(error).splitlines()]
        return
    if problem:
        yield Finding(WRONG, "settings", problem)


def _code_and_user() -> Iterator[Finding]:
    """Say which code handles messages here, and as which user; warn if that is root."""
    version = code_version_at_site()
    installed = f"that of {app_folder()} (version {version}), whatever a run brings"
    yield Finding(FACT, "code", f"{installed}; with `protofl site run`")
    if os.geteuid():
        yield Finding(FACT, "user", f"uid {os.geteuid()}")
    else:
        yield Finding(
            WARNING,
            "user",
            "root: give the SuperNode a user of its own, who may do nothing else here",
        )


def network(options: Namespace) -> Iterator[Finding]:
    """Check the certificates, the site's key and the SuperLink that the ``options`` name."""
    if options.insecure:
        yield Finding(
            WARNING,
            "network",
            "--insecure: anybody on the way reads and changes what goes to and fro",
        )
    elif options.root_certificates:
        yield _certificates(Path(os.path.expanduser(options.root_certificates)))
    if options.auth_supernode_private_key:
        yield _key(Path(os.path.expanduser(options.auth_supernode_private_key)))
    elif options.superlink:
        yield Finding(WARNING, "key", "none: the SuperLink cannot tell this site from another")
    if options.superlink:
        yield from _superlink(options.superlink, options.root_certificates)


def _superlink(address: str, root_certificates: str) -> Iterator[Finding]:
    """Say whether the SuperLink answers, how long its certificate lasts, and if clocks differ."""
    try:
        endpoint = ask_endpoint(address, os.path.expanduser(root_certificates))
    except ssl.SSLCertVerificationError as error:
        cure = (
            "its operator renews it (certificates.py --renew server), brings its authority's, "
            "or this clock is wrong"
        )
        yield Finding(WRONG, CERTIFICATES, f"{address}: {error.verify_message}: {cure}")
        return
    except (OSError, ValueError) as error:
        yield Finding(WARNING, "superlink", f"{address}: cannot be reached from here ({error})")
        return

    if endpoint.days is None:
        yield Finding(FACT, "superlink", f"{address}: answers; no certificate")
    else:
        answers = f"{address}: answers; its certificate: {endpoint.days} days left"
        if endpoint.days < FEW_DAYS:
            yield Finding(WARNING, CERTIFICATES, answers)
        else:
            yield Finding(FACT, "superlink", answers)

    yield _clock(endpoint.ahead)


def _clock(ahead: float) -> Finding:
    """Say how many seconds this clock is ``ahead`` of the SuperLink's, and if Flower refuses that.

    The SuperLink tells its time in whole seconds, so a clock that seems 1 s ahead may be right.
    """
    seconds_apart = abs(ahead)
    direction = "ahead of" if ahead > 0 else "behind"
    text = f"{seconds_apart:.0f} s {direction} the SuperLink's"
    tolerance = SYSTEM_TIME_TOLERANCE if ahead > 0 else TIMESTAMP_TOLERANCE
    worth_a_warning = 2 if ahead > 0 else TIMESTAMP_TOLERANCE / 10  # early enough to mend it
    if seconds_apart <= worth_a_warning:
        return Finding(FACT, "clock", text)
    level = WRONG if seconds_apart > tolerance else WARNING
    refused = f"Flower refuses a site that is more than {tolerance} s {direction} it"
    return Finding(level, "clock", f"{text}; {refused}: set both by NTP")


def _certificates(path: Path) -> Finding:
    """Say how many days are left until the first of the certificates in a PEM file ends."""
    try:
        certificates = load_pem_x509_certificates(path.read_bytes())
        ends = min(certificate.not_valid_after_utc for certificate in certificates)
    except (OSError, ValueError) as error:
        return Finding(WRONG, CERTIFICATES, f"{path}: {error}")
    days = (ends - datetime.now(UTC)).days
    if days < 0:
        return Finding(WRONG, CERTIFICATES, f"{path}: expired {ends:%F}")
    level = WARNING if days < FEW_DAYS else FACT
    return Finding(level, CERTIFICATES, f"{path}: {days} days left")


def _key(path: Path) -> Finding:
    """Say whether a file has a private key that Flower takes, and only this user can read it."""
    if not os.access(path, os.R_OK):
        return Finding(WRONG, "key", f"{path}: cannot be read")
    if path.stat().st_mode & 0o077:  # any right of the group or of others
        readable = f"{path}: other users of this machine may read it; chmod 600"
        return Finding(WRONG, "key", readable)
    try:
        if not isinstance(load_ssh_private_key(path.read_bytes(), None), EllipticCurvePrivateKey):
            raise ValueError("a key of another type")
    except (OSError, TypeError, ValueError, UnsupportedAlgorithm) as error:
        cure = "certificates.py --node NAME makes one"
        return Finding(WRONG, "key", f"{path}: no private key that Flower takes ({error}); {cure}")
    return Finding(FACT, "key", str(path))


def folders(node: Values) -> Iterator[Finding]:
    """Say which folders the site reads and writes, whether it can, and who else may look in.

    Also which privacy records are lost, and where there is little free space.
    """
    data = str(node.get("data-dir", ""))
    if data:
        yield _folder("reads", "data-dir", Path(data).expanduser())
        if "partition-id" in node:
            shared = (
                "data-dir is a share of a common data set, and runs choose the test samples; "
                "leave it out if not"
            )
            yield Finding(WARNING, "reads", f"partition-id: {shared}")
    else:
        yield Finding(FACT, "reads", "no data-dir: only data sets that are embedded in ProtoFL")

    # if its state-dir or a ledger cannot be read, a site refuses every message and says why
    with suppress(OSError, RuntimeError):
        lost = lost_records(node)
        if lost:
            yield Finding(WRONG, "state", lost)

    state_dir, cache_dir = site_folders(node)
    written = {"state-dir": state_dir, "cache-dir": cache_dir, "FLWR_HOME": get_flwr_home()}
    for key, folder in written.items():
        yield _folder("writes", key, folder)
        free = shutil.disk_usage(nearest_existing(folder)).free
        if free < FEW_BYTES:
            level = WRONG if free < FULL_BYTES else WARNING
            yield Finding(level, FREE_SPACE, f"{key} {folder.absolute()}: {free / 1e6:.0f} MB free")
    yield from _files(node)


def programs(node: Values) -> Iterator[Finding]:
    """Say which of the operator's own programs cannot be started: nobody would hear of a request.

    They are started without a shell, so that a command with arguments names no program.
    """
    for key in (ON_REQUEST, ON_TROUBLE):
        program = str(node.get(key, ""))
        if program and not shutil.which(program):
            missing = "no program that this user can start; give one file, without arguments"
            yield Finding(WRONG, "programs", f"{key} {program}: {missing}")


def _files(node: Values) -> Iterator[Finding]:
    """Yield the files in the state-dir that this user cannot use, and those that others may read.

    A backup that root has restored, for example, leaves files that this user cannot use.
    """
    relative_state_dir, _ = site_folders(node)
    state_dir = relative_state_dir.absolute()
    tops = [state_dir / "sites", state_dir / "privacy"]
    *runs, _ = stored_at(node)  # the last are the caches
    for run in runs:
        tops += [path.absolute() for path in run.paths]

    paths = list(tops)
    for top in tops:
        for folder, subfolders, files in os.walk(top):  # passes over folders it may not list
            paths += [Path(folder, name) for name in (*subfolders, *files)]
    for path in paths:
        with suppress(OSError):  # a site at work replaces its files meanwhile
            yield from _file_access(path, state_dir)


def _file_access(path: Path, state_dir: Path) -> Iterator[Finding]:
    """Yield what is wrong with the access to one file or folder in the ``state_dir``.

    OSError if it is gone. A lock, which is empty, may be readable by all.
    """
    # as bits of the file's mode: r of the group, and r of others
    readable_by_others = path.stat().st_mode & 0o044
    for folder in path.parents[: len(path.relative_to(state_dir).parts)]:  # up to state_dir
        passable_by_others = folder.stat().st_mode << 2  # moves the bits of x to those of r
        readable_by_others &= passable_by_others

    if not _has_access(path, os.R_OK | os.W_OK) and path.exists():  # it may be gone by now
        yield Finding(WRONG, "writes", f"{path}: this user cannot read or write it")
    elif path.is_file() and readable_by_others and path.suffix != ".lock":
        yield Finding(
            WRONG, "writes", f"{path}: other users of this machine may read it; chmod 600"
        )


def _folder(topic: str, key: str, folder: Path) -> Finding:
    """Say whether a folder that the site "reads" or "writes" can be used, and who else may look in.

    ``key`` is the setting that names it. The group may look into what the site reads.
    """
    is_read = topic == "reads"
    nearest = nearest_existing(folder)
    name = f"{key} {folder.absolute()}"
    if not _has_access(nearest, os.R_OK if is_read else os.W_OK):
        return Finding(WRONG, topic, f"{name}: cannot be {'read' if is_read else 'written'}")
    if nearest != folder.absolute():
        if is_read:
            return Finding(WRONG, topic, f"{name}: there is none")
        return Finding(FACT, topic, f"{name}: will be made, for this user only")
    mode = stat.S_IMODE(nearest.stat().st_mode)
    forbidden = 0o007 if is_read else 0o077  # to others, and where the site writes to the group
    if mode & forbidden:
        readable = f"{name}: other users of this machine may look in (mode {mode:04o})"
        return Finding(WARNING, topic, readable)
    return Finding(FACT, topic, f"{name} (mode {mode:04o})")


def _has_access(path: Path, mode: int) -> bool:
    """Return whether this user may read or write a file or folder, as ``mode`` (os.R_OK) says."""
    if path.is_dir():
        mode |= os.X_OK  # without it nothing in a folder can be reached
    return os.access(path, mode)


def _permissions(node: Values) -> Iterator[Finding]:
    """Say what the node config lets a run do here, what it demands of a run, and its limits."""
    allowed = allowed_by(node)
    if allowed["allow-download"]:
        yield Finding(WARNING, "downloads", "a run may have data sets downloaded (allow-download)")
    modules = names_in(allowed["allow-python"])
    if modules:
        yield Finding(
            WARNING, "modules", f"a run may have these imported and called: {', '.join(modules)}"
        )
    if not asks_its_operator(node):
        yield Finding(
            WARNING,
            "approval",
            "none: a run takes part before its operator has seen it; set approve = true",
        )
    backbones = ["the embedded ones", *names_in(allowed["allow-backbones"])]
    yield Finding(FACT, "backbones", ", ".join(backbones))
    for key in DEMANDS:
        if key in node:
            yield Finding(FACT, "demands", f"{key} {node[key]}")
    yield Finding(FACT, "limits", ", ".join(f"{key} {allowed[key]}" for key in LIMITS))


def _algorithms(node: Values) -> Iterator[Finding]:
    """Say what leaves the site: each kind of upload, with the algorithms that send it.

    Also what leaves in any run, and what hides it.
    """
    by_upload: dict[str, list[str]] = {}
    of_packages = []
    with_weights = []
    for name in allowed_algorithms(node):
        if name not in CATALOG:
            of_packages.append(name)
        elif isinstance(least_demanding_settings(node, name), Settings):
            # the site refuses any run of the others, as they cannot meet its demands
            exchange = CATALOG[name].exchange
            by_upload.setdefault(sent_of_model(exchange), []).append(name)
            if exchange.sends_weights:
                with_weights.append(name)

    for sent, names in by_upload.items():
        level = WARNING if "weights" in sent else FACT
        yield Finding(level, "sends", f"{sent}: {', '.join(names)}")
    if of_packages:
        yield Finding(
            WARNING, "sends", f"whatever packages of others declare: {', '.join(of_packages)}"
        )

    if with_weights and "require-dp" not in node:
        cure = f"refuse them by {ACCEPT_WEIGHTS} = false, or set require-dp"
        yield Finding(WARNING, "weights", f"{DANGER_OF_WEIGHTS}; {cure}: {', '.join(with_weights)}")
    if allowed_by(node)[REQUIRE_SECAGG]:
        yield Finding(
            FACT,
            "sends",
            "all this, and all figures, under masks that cancel in the sum of several sites "
            f"({REQUIRE_SECAGG}); {PROMISE_OF_SUMS}",
        )
        if node.get("peers"):
            yield Finding(
                FACT,
                "peers",
                f"a sum needs {FEWEST_KNOWN} of {', '.join(NodeConfig.of(node).peers)}",
            )
        else:
            unknown = "none: the site cannot know who the others are; compare the keys of a study"
            yield Finding(WARNING, "peers", f"{unknown} by phone, and name them in peers")
    always = "; ".join(sent_always(site_settings(node)))
    yield Finding(FACT, "sends", f"always: {always}")


def _device(node: Values) -> Iterator[Finding]:
    """Say why the node config's ``device`` cannot be used; nothing if it can, or names none."""
    name = str(node.get("device", ""))
    if not name:
        return
    from protofl_common.models.devices import open_device

    try:
        open_device(name, "fp32")
    except SettingsError as error:
        yield Finding(WRONG, "device", str(error))


def _data(node: Values, asked: Values, quality: bool) -> Iterator[Finding]:
    """Have the installed ClientApp introduce itself as in a run of these settings.

    Say what samples, classes and model it has then. It asks nobody's approval, hides no numbers,
    charges no privacy ledger, and writes only to a temporary folder. Without settings (``asked``
    {}) the data are not read.
    """
    if not asked:
        yield Finding(FACT, "data", "not read; give settings of a run, such as partition=own")
        return
    from protofl_common.data.store import open_data
    from protofl_common.simulation.grid import introduced

    with tempfile.TemporaryDirectory() as folder:
        defaults = default_run_config()
        settings = {**defaults, **asked}
        for key in settings:
            if key.startswith("study"):  # nobody has signed what is asked here
                settings[key] = defaults[key]
        config, test_node = as_its_operator(
            settings, {**node, "cache-dir": folder, "state-dir": folder}
        )
        # so that no ledger is charged; `findings` has seen that the settings meet it
        test_node.pop("require-dp", None)
        try:
            # first, as an introduction tells no more of wrong data than the kind of error
            with allowing(names_in(node.get("allow-python"))):
                settings_of_data = Settings.from_run_config(config, test_node).data
                open_data(settings_of_data)
            card = introduced(config, test_node)
        except Exception as error:  # also of the site's own code: all other findings are shown
            is_expected = isinstance(error, ValueError | OSError)
            yield Finding(WRONG, "data", str(error) if is_expected else repr(error))
            return
        yield from _samples(settings_of_data, quality)
    samples = f"{card.train_samples} training"
    if card.validation_samples:
        samples += f", {card.validation_samples} validation"
    samples += f" and {card.test_samples} test samples"
    classes = f"{card.task.describe()}: {', '.join(card.classes)}"
    yield Finding(FACT, "data", f"{samples}, {classes}")
    yield Finding(FACT, "model", f"{card.arch}, {card.parameters} parameters, on {card.device}")


def _samples(settings: DataSettings, quality: bool) -> Iterator[Finding]:
    """Say what was read of the data and left out, and with ``quality`` which samples are odd."""
    from protofl_common.data.quality import label_rates, oddities
    from protofl_common.data.store import open_data

    data = open_data(settings)
    for note in data.notes:
        yield Finding(FACT, "data", note)
    if data.columns:
        yield Finding(FACT, "data", f"inputs: the columns {first_of(data.columns)}")
    if quality:
        for line in oddities(data, settings):
            yield Finding(WARNING, "quality", line)
        for line in label_rates(data):
            yield Finding(FACT, "quality", line)
