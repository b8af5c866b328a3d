"""``protofl site check``: what whoever submits runs could make this machine do, and what is wrong with it."""

import argparse
import os
import re
import shutil
import ssl
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from cryptography.x509 import load_pem_x509_certificates
from flwr.app import Message, MessageType, RecordDict
from flwr.common.constant import TIMESTAMP_TOLERANCE as MOST_SECONDS  # that a clock may be wrong
from flwr.supercore.utils import get_flwr_home

from client_app import protections
from protofl_common.basics.code_version import code_version
from protofl_common.basics.devices import open_device
from protofl_common.basics.text import names_in
from protofl_common.config.options import Scalar, SettingsError
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.node import DEMANDS, LIMITS, REQUIRE_SECAGG, allowed_by, has_own_data, openly
from protofl_common.experiment.settings import Settings, app_folder, default_run_config, digest_of
from protofl_common.tools.federation import FEW_DAYS, shown_by
from protofl_common.tools.findings import FACT, WARNING, WRONG, Finding, existing, worst_first
from protofl_common.tools.local import LocalGrid
from protofl_common.tools.site.node import allowed_algorithms, modest, site_folders, site_settings
from protofl_common.tools.site.stored import ledgers_at, stored_at
from protofl_common.wire.records import pack_settings, unpack_site_card

FEW_BYTES, FULL = 2**30, 10**6  # free on a disk: less is a warning, or wrong


def findings(options: argparse.Namespace, node: Mapping[str, Scalar], asked: Mapping[str, Scalar]) -> list[Finding]:
    """List the findings, data read as a run with settings ``asked`` would have it; nothing is written."""
    listed = [*_code_and_user(), *network(options)]
    try:
        settings = site_settings(node, asked)
    except SettingsError as error:
        listed += [Finding(WRONG, "settings", line) for line in str(error).splitlines()]
    else:
        listed += [*folders(node), *_permissions(node), *_algorithms(node), *_device(node), *_data(node, asked)]
        listed.append(Finding(FACT, "protections", protections.names(settings, is_site=True)))
    return worst_first(listed)


def _code_and_user() -> Iterator[Finding]:
    own = f"that of {app_folder()} (version {code_version()}), whatever a run brings"
    yield Finding(FACT, "code", f"{own}; with `protofl site run`")
    root = "root: give the SuperNode a user of its own, who may do nothing else here"
    yield Finding(FACT, "user", f"uid {os.geteuid()}") if os.geteuid() else Finding(WARNING, "user", root)


def network(options: argparse.Namespace) -> Iterator[Finding]:
    if options.insecure:
        yield Finding(WARNING, "network", "--insecure: anybody on the way reads and changes what goes to and fro")
    elif options.root_certificates:
        yield _certificates(Path(os.path.expanduser(options.root_certificates)))
    if options.auth_supernode_private_key:
        yield _key(Path(os.path.expanduser(options.auth_supernode_private_key)))
    elif options.superlink:
        yield Finding(WARNING, "key", "none: the SuperLink cannot tell this site from another")
    if options.superlink:
        yield from _superlink(options.superlink, options.root_certificates)


def _superlink(address: str, root_certificates: str) -> Iterator[Finding]:
    try:
        shown = shown_by(address, os.path.expanduser(root_certificates))
    except ssl.SSLCertVerificationError as error:
        cure = "its operator renews it (certificates.py --renew server), brings its authority's, or this clock is wrong"
        yield Finding(WRONG, "superlink", f"{address}: {error.verify_message}: {cure}")
    except (OSError, ValueError) as error:
        yield Finding(WARNING, "superlink", f"{address}: cannot be reached from here ({error})")
    else:
        days = "no certificate" if shown.days is None else f"its certificate: {shown.days} days left"
        few = shown.days is not None and shown.days < FEW_DAYS
        yield Finding(WARNING if few else FACT, "superlink", f"{address}: answers; {days}")
        level = WRONG if abs(shown.ahead) > MOST_SECONDS else WARNING if abs(shown.ahead) > MOST_SECONDS / 10 else FACT
        off = f"{abs(shown.ahead):.0f} s {'ahead of' if shown.ahead > 0 else 'behind'} the SuperLink's"
        cure = f"; above {MOST_SECONDS} s Flower refuses the site: set both by NTP" if level else ""
        yield Finding(level, "clock", off + cure)


def _certificates(path: Path) -> Finding:
    try:
        ends = min(certificate.not_valid_after_utc for certificate in load_pem_x509_certificates(path.read_bytes()))
    except (OSError, ValueError) as error:
        return Finding(WRONG, "certificates", f"{path}: {error}")
    days = (ends - datetime.now(UTC)).days
    level = WRONG if days < 0 else WARNING if days < FEW_DAYS else FACT
    return Finding(level, "certificates", f"{path}: {days} days left" if days >= 0 else f"{path}: expired {ends:%F}")


def _key(path: Path) -> Finding:
    if not os.access(path, os.R_OK):
        return Finding(WRONG, "key", f"{path}: cannot be read")
    if path.stat().st_mode & 0o077:
        return Finding(WRONG, "key", f"{path}: other users of this machine may read it; chmod 600")
    try:
        if not isinstance(load_ssh_private_key(path.read_bytes(), None), EllipticCurvePrivateKey):
            raise ValueError("a key of another type")
    except (OSError, TypeError, ValueError, UnsupportedAlgorithm) as error:
        made = "certificates.py --node NAME makes one"
        return Finding(WRONG, "key", f"{path}: no private key that Flower takes ({error}); {made}")
    return Finding(FACT, "key", str(path))


def folders(node: Mapping[str, Scalar]) -> Iterator[Finding]:
    if data := str(node.get("data-dir", "")):
        yield from _folder("reads", "data-dir", Path(data).expanduser(), others=0o007)
        if "partition-id" in node:
            shared = "data-dir is a share of a common data set, and runs choose the test samples; leave it out if not"
            yield Finding(WARNING, "reads", f"partition-id: {shared}")
    else:
        yield Finding(FACT, "reads", "no data-dir: only data sets that are embedded in ProtoFL")
    with suppress(OSError, RuntimeError):  # of a state-dir or a ledger that cannot be read: no message passes it
        yield from [Finding(WRONG, "state", line[7:]) for line in ledgers_at(node) if line.startswith(f"{WRONG}: ")]
    for key, path in zip(("state-dir", "cache-dir", "FLWR_HOME"), (*site_folders(node), get_flwr_home()), strict=True):
        yield from _folder("writes", key, path, others=0o077)
    yield from _files(node)


def _files(node: Mapping[str, Scalar]) -> Iterator[Finding]:
    """Yield the files that this user cannot use, as after a restore as root, and those that others may read."""
    root = site_folders(node)[0].absolute()
    tops = root / "sites", root / "privacy", *(path.absolute() for run in stored_at(node)[:-1] for path in run.paths)
    inside = (Path(at, name) for top in tops for at, folders, files in os.walk(top) for name in (*folders, *files))
    for path in (*tops, *inside):  # os.walk passes over a folder that it cannot list
        with suppress(OSError):  # a site that works replaces its files
            seen = path.stat().st_mode & 0o044  # by whom, if they may pass all folders above it
            for folder in path.parents[: len(path.relative_to(root).parts)]:
                seen &= folder.stat().st_mode << 2
            if not os.access(path, os.R_OK | os.W_OK | os.X_OK * path.is_dir()) and path.exists():
                yield Finding(WRONG, "writes", f"{path}: this user cannot read or write it")
            elif path.is_file() and seen and path.suffix != ".lock":
                yield Finding(WRONG, "writes", f"{path}: other users of this machine may read it; chmod 600")


def _folder(topic: str, key: str, folder: Path, others: int) -> Iterator[Finding]:
    nearest, name, writes = existing(folder), f"{key} {folder.absolute()}", topic == "writes"
    mode = stat.S_IMODE(nearest.stat().st_mode)
    if not os.access(nearest, (os.W_OK if writes else os.R_OK) | (os.X_OK if nearest.is_dir() else 0)):
        yield Finding(WRONG, topic, f"{name}: cannot be {'written' if writes else 'read'}")
    elif not writes and nearest != folder.absolute():
        yield Finding(WRONG, topic, f"{name}: there is none")
    elif nearest != folder.absolute():
        yield Finding(FACT, topic, f"{name}: will be made, for this user only")
    else:
        seen = ": other users of this machine may look in" * bool(mode & others)
        yield Finding(WARNING if seen else FACT, topic, f"{name}{seen} (mode {mode:04o})")
    if writes and (free := shutil.disk_usage(nearest).free) < FEW_BYTES:
        yield Finding(WRONG if free < FULL else WARNING, topic, f"{name}: {free / 1e6:.0f} MB free")


def _permissions(node: Mapping[str, Scalar]) -> Iterator[Finding]:
    allowed = allowed_by(node)
    if allowed["allow-download"]:
        yield Finding(WARNING, "downloads", "a run may have data sets downloaded (allow-download)")
    if modules := names_in(allowed["allow-python"]):
        yield Finding(WARNING, "modules", f"a run may have these imported and called: {', '.join(modules)}")
    if not node.get("approve", has_own_data(node)):
        yield Finding(WARNING, "approval", "none: a run takes part before its operator has seen it; set approve = true")
    yield Finding(FACT, "backbones", ", ".join(["the embedded ones", *names_in(allowed["allow-backbones"])]))
    yield from (Finding(FACT, "demands", f"{key} {node[key]}") for key in DEMANDS if key in node)
    yield Finding(FACT, "limits", ", ".join(f"{key} {allowed[key]}" for key in LIMITS))


def _algorithms(node: Mapping[str, Scalar]) -> Iterator[Finding]:
    names, by_upload = allowed_algorithms(node), dict[str, list[str]]()
    for name in names:
        if name in CATALOG and isinstance(modest(node, name), Settings):  # the others miss a demand, whatever they ask
            sent = " and ".join(entry.words for entry in CATALOG[name].exchange.up.values()) or "nothing of the model"
            by_upload.setdefault(sent, []).append(name)
    for sent, those in by_upload.items():
        yield Finding(WARNING if "weights" in sent else FACT, "sends", f"{sent}: {', '.join(those)}")
    if others := [name for name in names if name not in CATALOG]:
        yield Finding(WARNING, "sends", f"whatever packages of others declare: {', '.join(others)}")
    private, always = "require-dp" in node, ["numbers of samples", "numbers of right predictions"]
    if not private:
        always += ["which classes it has", "metrics", *["losses"] * (node.get("min-class-samples", 1) == 1), "seconds"]
    if allowed_by(node)[REQUIRE_SECAGG]:
        masks = f"all this, and all figures, under masks that cancel in the sum of several sites ({REQUIRE_SECAGG})"
        yield Finding(FACT, "sends", f"{masks}; without study-sites in a run its server can invent these sites")
        always = ["the number of training samples" if private else "seconds"]
    named = "its name, model (architecture, size), inputs (shape, columns as 16 bits), device, the class names given"
    yield Finding(FACT, "sends", f"always: {', '.join([named, *always])}")


def _device(node: Mapping[str, Scalar]) -> Iterator[Finding]:
    if name := str(node.get("device", "")):
        try:
            open_device(name, "fp32")
        except SettingsError as error:
            yield Finding(WRONG, "device", str(error))


def _data(node: Mapping[str, Scalar], asked: Mapping[str, Scalar]) -> Iterator[Finding]:
    """Ask this checkout's own ClientApp to introduce itself, hiding no numbers, with folders that are thrown away."""
    if not asked:
        yield Finding(FACT, "data", "not read; give settings of a run, such as partition=own")
        return
    with tempfile.TemporaryDirectory() as cache:
        config, open_node = openly({**default_run_config(), **asked}, {**node, "cache-dir": cache, "state-dir": cache})
        open_node.pop("require-dp", None)  # which the settings meet: no ledger is charged
        grid = LocalGrid(config, {1: open_node}, run_id=1)  # first: a message asks Flower which run it is of
        message = Message(RecordDict({**pack_settings(digest_of(config))}), 1, MessageType.QUERY)
        (reply,) = grid.send_and_receive([message])
    if reply.has_error():
        yield Finding(WRONG, "data", re.sub(r"^site [\w.-]+( signed \w+)?: ", "", str(reply.error.reason)))
        return
    card = unpack_site_card(reply.content)
    classes = f"{len(card.classes)} classes: {', '.join(card.classes)}"
    more = f", {card.validation_samples} validation" if card.validation_samples else ""
    yield Finding(FACT, "data", f"{card.train_samples} training{more} and {card.test_samples} test samples, {classes}")
    yield Finding(FACT, "model", f"{card.arch}, {card.parameters} parameters, on {card.device}")
