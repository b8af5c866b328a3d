"""``protofl site check``: what runs could make this machine do, and what is wrong with it.

A SuperNode looks at its network and folders at its start, so PyTorch is imported later, where it is
needed.
"""

import argparse
import os
import shutil
import ssl
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from cryptography.x509 import load_pem_x509_certificates

from client_app.site.hooks import CERTIFICATE, DISK
from protofl_common.basics.code_version import code_version_at_site
from protofl_common.config.lists import names_in
from protofl_common.config.options import Scalar, SettingsError
from protofl_common.config.sections import DANGER_OF_WEIGHTS, PROMISE_OF_SUMS, DataSettings
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.node import (
    ACCEPT_WEIGHTS,
    DEMANDS,
    FEWEST_KNOWN,
    LIMITS,
    REQUIRE_SECAGG,
    NodeConfig,
    allowed_by,
    as_its_operator,
    asks_its_operator,
    site_name,
)
from protofl_common.experiment.settings import Settings, app_folder, default_run_config
from protofl_common.experiment.study import Study
from protofl_common.tools.federation import FEW_DAYS, ask_endpoint
from protofl_common.tools.findings import (
    FACT,
    WARNING,
    WRONG,
    Finding,
    nearest_existing,
    worst_first,
)
from protofl_common.tools.flower import TIMESTAMP_TOLERANCE, get_flwr_home
from protofl_common.tools.site.node import (
    allowed_algorithms,
    least_demanding_settings,
    site_folders,
    site_settings,
)
from protofl_common.tools.site.stored import lost_records, stored_at

CERTIFICATES = "certificates"  # topics, with the word by which an operator hears of each
FREE_SPACE = "disk"
TOLD = {CERTIFICATES: CERTIFICATE, FREE_SPACE: DISK}
FEW_BYTES = 2**30  # free on a disk: less is a warning
FULL_BYTES = 10**6  # less is wrong


def findings(
    options: argparse.Namespace, node: Mapping[str, Scalar], asked: Mapping[str, Scalar]
) -> list[Finding]:
    """List the findings; nothing is written.

    Data are read as a run with the settings ``asked`` would have it.
    """
    listed = [*_code_and_user(), *network(options)]
    refused = [*_refused(node, asked)]
    listed += refused
    is_usable = not refused or (bool(asked) and not [*_refused(node, {})])
    if is_usable:  # whatever is wrong with the run
        listed += folders(node)
        listed += _permissions(node)
        listed += _algorithms(node)
        listed += _device(node)
    if not refused:
        listed += _data(node, asked, options.quality)
        from client_app import protections

        acting = protections.names(site_settings(node, asked), is_site=True)
        listed.append(Finding(FACT, "protections", acting))
    return worst_first(listed)


def troubles(options: argparse.Namespace, node: Mapping[str, Scalar]) -> list[str]:
    """Return the words for what will stop the site if its operator does nothing."""
    topics = set()
    for finding in (*network(options), *folders(node)):
        if finding.level != FACT:
            topics.add(finding.topic)
    return [word for topic, word in TOLD.items() if topic in topics]


def _refused(node: Mapping[str, Scalar], asked: Mapping[str, Scalar]) -> Iterator[Finding]:
    """Say why the site refuses a run with the settings ``asked``; without them, any run."""
    try:
        settings = site_settings(node, asked)
        study = Study.of(settings.given)
    except SettingsError as error:
        yield from [Finding(WRONG, "settings", line) for line in str(error).splitlines()]
        return
    if study.sites and site_name(node) not in study.sites:
        yield Finding(WRONG, "settings", f"study-sites: {study} does not name {site_name(node)}")


def _code_and_user() -> Iterator[Finding]:
    version = code_version_at_site()
    own = f"that of {app_folder()} (version {version}), whatever a run brings"
    yield Finding(FACT, "code", f"{own}; with `protofl site run`")
    if os.geteuid():
        yield Finding(FACT, "user", f"uid {os.geteuid()}")
    else:
        root = "root: give the SuperNode a user of its own, who may do nothing else here"
        yield Finding(WARNING, "user", root)


def network(options: argparse.Namespace) -> Iterator[Finding]:
    if options.insecure:
        insecure = "--insecure: anybody on the way reads and changes what goes to and fro"
        yield Finding(WARNING, "network", insecure)
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
        shown = ask_endpoint(address, os.path.expanduser(root_certificates))
    except ssl.SSLCertVerificationError as error:
        cure = (
            "its operator renews it (certificates.py --renew server), brings its authority's, "
            "or this clock is wrong"
        )
        yield Finding(WRONG, CERTIFICATES, f"{address}: {error.verify_message}: {cure}")
        return
    except (OSError, ValueError) as error:
        unreachable = f"{address}: cannot be reached from here ({error})"
        yield Finding(WARNING, "superlink", unreachable)
        return

    if shown.days is None:
        yield Finding(FACT, "superlink", f"{address}: answers; no certificate")
    else:
        answers = f"{address}: answers; its certificate: {shown.days} days left"
        if shown.days < FEW_DAYS:
            yield Finding(WARNING, CERTIFICATES, answers)
        else:
            yield Finding(FACT, "superlink", answers)

    seconds_apart = abs(shown.ahead)
    direction = "ahead of" if shown.ahead > 0 else "behind"
    text = f"{seconds_apart:.0f} s {direction} the SuperLink's"
    level = FACT
    if seconds_apart > TIMESTAMP_TOLERANCE / 10:
        level = WRONG if seconds_apart > TIMESTAMP_TOLERANCE else WARNING
        text += f"; above {TIMESTAMP_TOLERANCE} s Flower refuses the site: set both by NTP"
    yield Finding(level, "clock", text)


def _certificates(path: Path) -> Finding:
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
    if not os.access(path, os.R_OK):
        return Finding(WRONG, "key", f"{path}: cannot be read")
    if path.stat().st_mode & 0o077:
        open_to_others = f"{path}: other users of this machine may read it; chmod 600"
        return Finding(WRONG, "key", open_to_others)
    try:
        if not isinstance(load_ssh_private_key(path.read_bytes(), None), EllipticCurvePrivateKey):
            raise ValueError("a key of another type")
    except (OSError, TypeError, ValueError, UnsupportedAlgorithm) as error:
        cure = "certificates.py --node NAME makes one"
        return Finding(WRONG, "key", f"{path}: no private key that Flower takes ({error}); {cure}")
    return Finding(FACT, "key", str(path))


def folders(node: Mapping[str, Scalar]) -> Iterator[Finding]:
    """Say which folders the site reads and writes, whether it can, and who else may look in."""
    data = str(node.get("data-dir", ""))
    if data:
        yield from _read_folder("data-dir", Path(data).expanduser())
        if "partition-id" in node:
            shared = (
                "data-dir is a share of a common data set, and runs choose the test samples; "
                "leave it out if not"
            )
            yield Finding(WARNING, "reads", f"partition-id: {shared}")
    else:
        none = "no data-dir: only data sets that are embedded in ProtoFL"
        yield Finding(FACT, "reads", none)

    # a state-dir or a ledger that cannot be read: no message passes it
    with suppress(OSError, RuntimeError):
        lost = lost_records(node)
        if lost:
            yield Finding(WRONG, "state", lost)

    state_dir, cache_dir = site_folders(node)
    yield from _written_folder("state-dir", state_dir)
    yield from _written_folder("cache-dir", cache_dir)
    yield from _written_folder("FLWR_HOME", get_flwr_home())
    yield from _files(node)


def _files(node: Mapping[str, Scalar]) -> Iterator[Finding]:
    """Yield the files that this user cannot use, and those that others may read.

    The first are left by a restore as root.
    """
    root = site_folders(node)[0].absolute()
    tops = [root / "sites", root / "privacy"]
    for run in stored_at(node)[:-1]:  # the last are the caches
        tops += [path.absolute() for path in run.paths]

    for path in (*tops, *_inside(tops)):
        with suppress(OSError):  # a site that works replaces its files
            yield from _file(path, root)


def _inside(tops: Iterable[Path]) -> Iterator[Path]:
    """Yield files and folders below ``tops``; os.walk passes over a folder that it cannot list."""
    for top in tops:
        for folder, subfolders, files in os.walk(top):
            for name in (*subfolders, *files):
                yield Path(folder, name)


def _file(path: Path, root: Path) -> Iterator[Finding]:
    """Yield what is wrong with the access to one file or folder below ``root``."""
    readable_by_others = path.stat().st_mode & 0o044
    for folder in path.parents[: len(path.relative_to(root).parts)]:
        passable_by_others = folder.stat().st_mode << 2  # the bits of x in the place of those of r
        readable_by_others &= passable_by_others

    if not _has_access(path, os.R_OK | os.W_OK) and path.exists():
        yield Finding(WRONG, "writes", f"{path}: this user cannot read or write it")
    elif path.is_file() and readable_by_others and path.suffix != ".lock":
        open_to_others = f"{path}: other users of this machine may read it; chmod 600"
        yield Finding(WRONG, "writes", open_to_others)


def _read_folder(key: str, folder: Path) -> Iterator[Finding]:
    nearest = nearest_existing(folder)
    name = f"{key} {folder.absolute()}"
    if not _has_access(nearest, os.R_OK):
        yield Finding(WRONG, "reads", f"{name}: cannot be read")
    elif nearest != folder.absolute():
        yield Finding(WRONG, "reads", f"{name}: there is none")
    else:
        yield _seen("reads", name, nearest, by=0o007)


def _written_folder(key: str, folder: Path) -> Iterator[Finding]:
    nearest = nearest_existing(folder)
    name = f"{key} {folder.absolute()}"
    if not _has_access(nearest, os.W_OK):
        yield Finding(WRONG, "writes", f"{name}: cannot be written")
    elif nearest != folder.absolute():
        yield Finding(FACT, "writes", f"{name}: will be made, for this user only")
    else:
        yield _seen("writes", name, nearest, by=0o077)

    free = shutil.disk_usage(nearest).free
    if free < FEW_BYTES:
        level = WRONG if free < FULL_BYTES else WARNING
        yield Finding(level, FREE_SPACE, f"{name}: {free / 1e6:.0f} MB free")


def _has_access(path: Path, mode: int) -> bool:
    """True if this user may access the file so, or use the folder so."""
    if path.is_dir():
        mode |= os.X_OK
    return os.access(path, mode)


def _seen(topic: str, name: str, folder: Path, by: int) -> Finding:
    """Warn if the users of the bits ``by`` may look into the folder."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & by:
        seen = f"{name}: other users of this machine may look in (mode {mode:04o})"
        return Finding(WARNING, topic, seen)
    return Finding(FACT, topic, f"{name} (mode {mode:04o})")


def _permissions(node: Mapping[str, Scalar]) -> Iterator[Finding]:
    allowed = allowed_by(node)
    if allowed["allow-download"]:
        download = "a run may have data sets downloaded (allow-download)"
        yield Finding(WARNING, "downloads", download)
    modules = names_in(allowed["allow-python"])
    if modules:
        imported = f"a run may have these imported and called: {', '.join(modules)}"
        yield Finding(WARNING, "modules", imported)
    if not asks_its_operator(node):
        unseen = "none: a run takes part before its operator has seen it; set approve = true"
        yield Finding(WARNING, "approval", unseen)
    backbones = ["the embedded ones", *names_in(allowed["allow-backbones"])]
    yield Finding(FACT, "backbones", ", ".join(backbones))
    for key in DEMANDS:
        if key in node:
            yield Finding(FACT, "demands", f"{key} {node[key]}")
    yield Finding(FACT, "limits", ", ".join(f"{key} {allowed[key]}" for key in LIMITS))


def _algorithms(node: Mapping[str, Scalar]) -> Iterator[Finding]:
    """Say what leaves the site: for each kind of upload with which algorithms, and what always."""
    by_upload: dict[str, list[str]] = {}
    of_packages = []
    with_weights = []
    for name in allowed_algorithms(node):
        if name not in CATALOG:
            of_packages.append(name)
        elif isinstance(least_demanding_settings(node, name), Settings):
            # others miss a demand, whatever they ask
            exchange = CATALOG[name].exchange
            entries = [entry.words for entry in exchange.up.values()]
            sent = " and ".join(entries) or "nothing of the model"
            by_upload.setdefault(sent, []).append(name)
            if exchange.sends_weights:
                with_weights.append(name)

    for sent, names in by_upload.items():
        level = WARNING if "weights" in sent else FACT
        yield Finding(level, "sends", f"{sent}: {', '.join(names)}")
    if of_packages:
        declared = f"whatever packages of others declare: {', '.join(of_packages)}"
        yield Finding(WARNING, "sends", declared)

    is_private = "require-dp" in node
    if with_weights and not is_private:
        cure = f"refuse them by {ACCEPT_WEIGHTS} = false, or set require-dp"
        danger = f"{DANGER_OF_WEIGHTS}; {cure}: {', '.join(with_weights)}"
        yield Finding(WARNING, "weights", danger)
    if allowed_by(node)[REQUIRE_SECAGG]:
        masks = (
            "all this, and all figures, under masks that cancel in the sum of several sites "
            f"({REQUIRE_SECAGG}); {PROMISE_OF_SUMS}"
        )
        yield Finding(FACT, "sends", masks)
        if node.get("peers"):
            peers = f"a sum needs {FEWEST_KNOWN} of {', '.join(NodeConfig.of(node).peers)}"
            yield Finding(FACT, "peers", peers)
        else:
            unknown = "none: the site cannot know who the others are; compare the keys of a study"
            yield Finding(WARNING, "peers", f"{unknown} by phone, and name them in peers")
        always = ["the number of training samples" if is_private else "seconds"]
    else:
        always = ["numbers of samples", "numbers of right predictions"]
        if not is_private:
            always += ["which classes it has", "metrics"]
            if node.get("min-class-samples", 1) == 1:
                always.append("losses")
            always.append("seconds")
    introduced = (
        "its name, model (architecture, size), inputs (shape, columns as 16 bits), device, "
        "the class names given"
    )
    yield Finding(FACT, "sends", f"always: {', '.join([introduced, *always])}")


def _device(node: Mapping[str, Scalar]) -> Iterator[Finding]:
    name = str(node.get("device", ""))
    if not name:
        return
    from protofl_common.models.devices import open_device

    try:
        open_device(name, "fp32")
    except SettingsError as error:
        yield Finding(WRONG, "device", str(error))


def _data(
    node: Mapping[str, Scalar], asked: Mapping[str, Scalar], quality: bool
) -> Iterator[Finding]:
    """Ask this checkout's own ClientApp to introduce itself.

    It hides no numbers, and has folders that are thrown away.
    """
    from protofl_common.simulation.grid import introduced

    if not asked:
        yield Finding(FACT, "data", "not read; give settings of a run, such as partition=own")
        return

    with tempfile.TemporaryDirectory() as folder:
        defaults = default_run_config()
        settings = {**defaults, **asked}
        for key in settings:
            if key.startswith("study"):  # nobody has signed what is asked here
                settings[key] = defaults[key]
        config, open_node = as_its_operator(
            settings, {**node, "cache-dir": folder, "state-dir": folder}
        )
        open_node.pop("require-dp", None)  # which the settings meet: no ledger is charged
        try:
            card = introduced(config, open_node)
        except SettingsError as error:
            yield Finding(WRONG, "data", str(error))
            return
        yield from _samples(Settings.from_run_config(config, open_node).data, quality)
    samples = f"{card.train_samples} training"
    if card.validation_samples:
        samples += f", {card.validation_samples} validation"
    samples += f" and {card.test_samples} test samples"
    classes = f"{card.task.describe()}: {', '.join(card.classes)}"
    yield Finding(FACT, "data", f"{samples}, {classes}")
    model = f"{card.arch}, {card.parameters} parameters, on {card.device}"
    yield Finding(FACT, "model", model)


def _samples(settings: DataSettings, quality: bool) -> Iterator[Finding]:
    """Say what was read and left out of the data, and with ``quality`` what is odd about them."""
    from protofl_common.data.quality import label_rates, oddities
    from protofl_common.data.store import open_data

    data = open_data(settings)
    for note in data.notes:
        yield Finding(FACT, "data", note)
    if quality:
        for line in oddities(data, settings):
            yield Finding(WARNING, "quality", line)
        for line in label_rates(data):
            yield Finding(FACT, "quality", line)
