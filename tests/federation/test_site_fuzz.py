"""Rubbish from a server: whatever it says, a site keeps to its own folders.

``make fuzz`` runs 10,000 cases of each test. An audit hook sees what Python opens, lists, writes,
removes, starts, imports and connects to; files with known texts and numbers, inside the site's
folders and outside, show what leaves.
"""

import dataclasses
import json
import os
import re
import sys
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.common.serde import recorddict_to_proto
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from PIL import Image

import client_app.app
from client_app import answers
from client_app.answers import OPEN_ERRORS, reason_of
from client_app.site.state import StateFolder
from protofl_common.basics.run_history import RunHistory
from protofl_common.config.options import keys_of
from protofl_common.config.sections import SECTIONS
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import app_folder, default_run_config, digest_of
from protofl_common.wire.records import pack_settings
from protofl_common.wire.refusal import Refusal, pack_refusal
from tests.support.attacks import raw
from tests.support.hangs import computes_at_most
from tests.support.harness import RUN_ID, instructions
from tests.support.rubbish import TEXTS, VALUES, arrays, floats

SECRET = "Jane-Doe-1961-02-03"
WEIGHT = 0.12345678
MODULE = "canary_module"
HANG = 120
"""Seconds of computing, on however busy a machine, after which a case never ends."""

ONE_PATH = """
open os.listdir os.scandir os.mkdir os.rmdir os.remove os.truncate os.chmod os.chown shutil.rmtree
sqlite3.connect os.chdir
"""
TWO_PATHS = "os.rename os.link os.symlink"
PATHS_OF = dict.fromkeys(ONE_PATH.split(), (0,)) | dict.fromkeys(TWO_PATHS.split(), (0, 1))
"""Audit events that name paths -> which of their arguments these are."""
NEVER = """
subprocess.Popen os.system os.exec os.posix_spawn os.fork pickle.find_class
socket.connect socket.bind socket.sendto socket.getaddrinfo socket.gethostbyname
"""
CODE = (
    *(path for path in sys.path if path),
    *(sys.prefix, sys.base_prefix),
    str(app_folder()),
    *("/dev", "/proc", "/sys", "/usr"),
)
"""Where Python, its packages and the site's code lie: read, never written."""
ODD_MODULES = ("this", "antigravity", "turtledemo", "idlelib", MODULE)
"""Modules that no site needs, which settings may name."""


class Watch:
    """While it is called as a context, it notes in ``odd`` what happens that is not allowed."""

    def __init__(self):
        self.on = False
        self.reads = ()  # folders that may be read
        self.writes = ()  # folders that may be read and written
        self.odd = []
        sys.addaudithook(self._heard)  # for the life of the process; there is no way to remove one

    def _heard(self, name, arguments):
        """Judge an audit event of Python."""
        if not self.on:
            return
        imports = name == "import" and str(arguments[0]).partition(".")[0] in ODD_MODULES
        if imports or name in NEVER.split():
            self.odd.append(f"{name} {arguments[:2]}")
        for index in PATHS_OF.get(name, ()):
            path = arguments[index]
            if isinstance(path, (str, bytes, os.PathLike)):
                self._touched(name, self._absolute(os.fsdecode(path), arguments), arguments)

    @staticmethod
    def _absolute(path, arguments):
        """Return the absolute path of an event.

        It may be relative to an open folder, whose descriptor is the event's last argument then.
        """
        base = os.getcwd()
        folder = arguments[-1]
        # 0 to 2 are standard streams; larger numbers may be flags
        is_descriptor = isinstance(folder, int) and 2 < folder < 1000
        if is_descriptor and not os.path.isabs(path):
            base = os.readlink(f"/proc/self/fd/{folder}")
        return os.path.normpath(os.path.join(base, path))

    def _touched(self, name, path, arguments):
        """Note an event about a path that may not be read or written."""
        mode = ""
        flags = 0
        if name == "open":
            mode = str(arguments[1] or "")
            if len(arguments) > 2 and isinstance(arguments[2], int):
                flags = arguments[2]
        may_write = set(mode) & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if name == "os.listdir" and path == sys.path[0]:  # where Python looks for modules
            return
        if name == "open" and not may_write and not os.path.exists(path):
            return  # also a name below a folder that shutil has open

        reads = name in ("os.listdir", "os.scandir") or (name == "open" and not may_write)
        allowed = (*self.reads, *self.writes, *CODE) if reads else (*self.writes, "/dev/null")
        is_allowed = any(path == place or path.startswith(f"{place}/") for place in allowed)
        if not is_allowed:
            self.odd.append(f"{name} {path} {mode or flags}")

    @contextmanager
    def __call__(self):
        self.odd = []
        self.on = True
        try:
            yield self.odd
        finally:
            self.on = False


class SiteOnDisk:
    """Folders of a site, and all else that lies on its machine."""

    def __init__(self, root, watch):
        self.root = root
        self.watch = watch
        self.data = root / "site" / "data"
        self.state = root / "site" / "state"
        self.cache = root / "site" / "cache"
        self.work = root / "work"
        self.outside = root / "outside"
        for folder in (self.work, self.outside / "home", self.outside / "packages", self.cache):
            folder.mkdir(parents=True)

        self._write_data(self.data)
        self._write_data(self.outside / "data")
        (self.data / "sick" / f"{SECRET}.txt").write_text(SECRET)
        for suffix in ("json", "csv", "npz", "pth", "safetensors"):
            (self.outside / f"x.{suffix}").write_text(f"{SECRET}\n{{}}")
        for name in (f"packages/{MODULE}.py", "home/.netrc"):
            (self.outside / name).write_text(f"{SECRET}\n{{}}")
        self.model = self._write_model()

        self.pixels = []
        for file in sorted(self.data.rglob("*.png")):
            image = np.asarray(Image.open(file)).transpose(2, 0, 1)
            # four rows: one is not enough, two might be alike
            self.pixels.append(image.tobytes()[:32])

    @staticmethod
    def _write_data(folder):
        """Write 16 images of two classes, whose names have the secret."""
        for index in range(16):
            path = folder / ("sick", "well")[index % 2] / f"{SECRET}-{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            rng = np.random.default_rng(index)
            pixels = rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)

    def _write_model(self):
        """Write the state and the model of an earlier run, which no server may read, nor destroy.

        Return file -> its content.
        """
        folder = self.state / "earlier-12" / "clients"
        states = StateFolder(folder, "north", RunHistory(12), use="fedproto (x)")
        states.save(1, "cnn4", {"w": torch.full((64,), WEIGHT)})
        (states.folder / "model.safetensors").write_text(SECRET)
        return {path: path.read_bytes() for path in states.folder.iterdir()}

    @property
    def node(self):
        return {
            "site-name": "north",
            "arch": "cnn4",
            "dataset": "image-folder",
            "classes": "sick,well",
            "data-dir": str(self.data),
            "state-dir": str(self.state),
            "cache-dir": str(self.cache),
        }

    def answer(self, config, content, kind):
        """Answer a message in the site's process, watched; the site has answered none before."""
        if kind == MessageType.QUERY:
            content = RecordDict({**pack_settings(digest_of(config)), **content})
        (self.state / "privacy" / "north.answered").unlink(missing_ok=True)
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN_ID, 1
        message = Message(content, 7, kind, group_id="1")
        message.metadata.__dict__["_message_id"] = "m"
        context = Context(RUN_ID, 7, self.node, RecordDict(), config)
        with self.watch() as odd, computes_at_most(HANG, "a site that never answers"):
            reply = client_app.app.app(message, context)
        assert not odd, odd[:5]
        return reply

    def assert_nothing_leaves(self, reply, errors):
        """A reply has neither names nor content of files, neither in an error nor in its records.

        The text of an error is one that may leave as it is, or only names a kind of error.
        ``errors`` are those that the site has answered with, the last one to this message.
        """
        if reply.has_error():
            reason = str(reply.error.reason)
            refusal = Refusal(**json.loads(reason))
            assert reply.error.code == answers.ERROR_CODE
            assert reason == pack_refusal(refusal)
            assert reason.isprintable()
            assert len(refusal.text) <= 600
            if not isinstance(errors[-1], OPEN_ERRORS):
                wanted = r"\w+( \([a-z-]+\))?: [^:]+; the log of the site says more"
                assert re.fullmatch(wanted, refusal.text)
            sent = reason.encode()
        else:
            sent = recorddict_to_proto(reply.content).SerializeToString(deterministic=True)
        assert SECRET.encode() not in sent
        assert np.full(2, WEIGHT, np.float32).tobytes() not in sent
        for pixels in self.pixels:
            scaled = np.frombuffer(pixels, np.uint8) / np.float32(255)
            assert pixels not in sent
            assert scaled.astype(np.float32).tobytes() not in sent

    def assert_untouched(self):
        """All that the earlier run left is there, perhaps under another name."""
        folder = next(iter(self.model)).parent
        there = [path.read_bytes() for path in folder.iterdir()]
        assert [path for path, content in self.model.items() if content not in there] == []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Make a site for all cases, in a process whose folders and home are those of an operator.

    It answers one message of each algorithm first, so that all is imported that it needs.
    """
    watch = Watch()
    with pytest.MonkeyPatch.context() as patch:
        found = SiteOnDisk(tmp_path_factory.mktemp("site"), watch)
        watch.reads = (str(found.data),)
        watch.writes = (str(found.state), str(found.cache))
        patch.chdir(found.work)
        patch.setenv("HOME", str(found.outside / "home"))
        patch.delenv("XDG_CACHE_HOME", raising=False)
        patch.syspath_prepend(str(found.outside / "packages"))
        patch.setattr(sys, "dont_write_bytecode", True)
        for place in RUST:
            patch.setattr(place, audited(resolve_name(place), "w" if "save" in place else "r"))
        with suppress(ImportError):
            import_module("datasets")  # which tries what kinds of sockets there are
        # what is imported when it is first needed
        for algo in CATALOG:
            found.answer(base(algo=algo), instructions(run_name=f"first-{algo}"), MessageType.TRAIN)
        for kind in (MessageType.QUERY, MessageType.EVALUATE):
            found.answer(base(), instructions(run_name="first"), kind)
        yield found
        found.assert_untouched()


RUST = (  # functions that open files in Rust
    "protofl_common.basics.tensorfile.safe_open",
    "protofl_common.basics.tensorfile.save_file",
    "protofl_common.backbones.features.load_file",
    "protofl_common.backbones.features.save_file",
    "safetensors.torch.load_file",
)


def audited(function, mode):
    """Return the function, which raises an event of Python for the file that it opens.

    A file that Rust opens raises none.
    """

    def say_what_is_opened(*arguments, **named):
        path = next(argument for argument in arguments if isinstance(argument, (str, Path)))
        sys.audit("open", str(path), mode, 0)
        return function(*arguments, **named)

    return say_what_is_opened


@pytest.fixture
def errors(monkeypatch):
    """Return the list of errors that a site has answered with, which grows during a test."""
    found = []

    def noted(error, *about):
        found.append(error)
        return reason_of(error, *about)

    monkeypatch.setattr(answers, "reason_of", noted)
    return found


def base(**changes):
    """Return the settings of an honest run on this site's images, as small as can be."""
    return default_run_config() | {
        "dataset": "image-folder",
        "partition": "own",
        "image-size": 8,
        "rounds": 3,
        "num-clients": 1,
        "threads": 1,
        **changes,
    }


HUGE = (2**63 - 1, 10**12, 10**6)
PLACES = (
    *("{root}/outside", "{root}/outside/x.json", "../outside", "~"),
    *("/etc/passwd", "file:///etc/passwd", "a\0b"),
)
NAMES = [
    *("file:small:{root}/outside/x.json", "file:resnet18:{root}/outside/x.pth"),
    *("file:resnet18:{root}/outside/x.safetensors", "torchvision:resnet18"),
    *("timm:hf-hub:any/repo", "hf:any/repo", "hf:..", "hf:sick", "hf:{root}/outside/data"),
    *(f"{MODULE}:x", "this:s", "os:system", "antigravity:x", "subprocess:run"),
    *(f"glyphs,{MODULE}:x", "mnist", "cifar10", "manifest", "arrays", "text-csv"),
    *("domain-folder", "digits", "breast-cancer", "auc", "none", "", "natural", "iid"),
]
DEFAULTS = default_run_config()
WORDS = st.one_of(st.sampled_from([*PLACES, *NAMES, *CATALOG, "sick,well", "well"]), TEXTS)


def choices_of(section, prefix=""):
    """Return key -> its choices, for the keys of a section that have choices."""
    found = {}
    fields = dataclasses.fields(section)
    for key, field in zip(keys_of(section, prefix), fields, strict=True):
        if field.metadata["choices"]:
            found[key] = field.metadata["choices"]
    return found


CHOICES = {}


@st.composite
def changes(draw):
    """Draw some settings that differ from an honest run's: mostly few, and mostly known keys."""
    found = {"algo": draw(st.sampled_from(sorted(CATALOG)))}
    number = draw(st.sampled_from([0, 0, 1, 1, 2, 4]))
    for _ in range(number):
        known = st.sampled_from(sorted(DEFAULTS))
        key = draw(st.one_of(known, known, known, TEXTS))
        found[key] = draw(value_like(key))
    return found


def value_like(key):
    """Draw a value for a setting, mostly of the type that it must have, and often legal."""
    numbers = st.one_of(st.integers(1, 9), st.integers(-1, 20), st.sampled_from(HUGE))
    likely = {
        bool: st.booleans(),
        int: numbers,
        float: st.one_of(st.floats(0, 2), st.floats()),
        str: st.one_of(st.sampled_from(CHOICES.get(key, ("",))), WORDS),
    }
    wanted = likely[type(DEFAULTS.get(key, ""))]
    return st.one_of(wanted, wanted, wanted, wanted, numbers, WORDS)


for _section in SECTIONS.values():
    CHOICES |= choices_of(_section)


for _name, _row in CATALOG.items():
    CHOICES |= choices_of(_row.hparams, f"{_name}.")


@st.composite
def messages(draw):
    """Draw a round's instructions, changed in some places, with records that a server may send.

    Run 12 is the earlier run on the site's disk.
    """
    known_names = ["earlier", "first-fedproto", "../../outside", "{root}/outside", "mine"]
    run_histories = [str(RUN_ID), f"12:1,{RUN_ID}", f"12:5,{RUN_ID}", "12", f"{RUN_ID}:1,12"]
    rounds = st.integers(-1, 5)
    likely = {
        "round": rounds,
        "run_name": st.one_of(TEXTS, st.sampled_from(known_names)),
        "run_history": st.sampled_from(run_histories),
        "counted": rounds,
        "part": VALUES,
    }
    changed = {}
    for key in draw(st.lists(st.sampled_from(sorted(likely)), max_size=2)):
        changed[key] = draw(st.one_of(likely[key], likely[key], VALUES))
    content = instructions(**changed)
    if draw(st.booleans()):
        return content

    records = st.sampled_from(["prototypes", "weights", "local_sets", "outputs", "generator"])
    for name in draw(st.lists(records, max_size=2)):
        sent = {"means": raw(floats(draw, (2, 64))), "labels": raw(np.array([0, 1], np.int64))}
        if draw(st.integers(0, 2)) == 0:
            sent[draw(st.sampled_from([*sent, "counts", "owners"]))] = draw(arrays())
        content[name] = ArrayRecord(sent)
    if draw(st.integers(0, 3)) == 0:
        content["baseline"] = ConfigRecord({"algo": draw(WORDS)})
    if draw(st.integers(0, 9)) == 0:
        content[draw(TEXTS)] = ConfigRecord({draw(TEXTS): draw(VALUES)})
    if draw(st.integers(0, 9)) == 0:
        del content["round"]
    return content


KINDS = st.sampled_from(
    [MessageType.QUERY, MessageType.TRAIN, MessageType.TRAIN, MessageType.EVALUATE]
)


def filled(value, root):
    """Return a text with ``{root}`` replaced by the folder of all files of this machine.

    A server might know it.
    """
    if isinstance(value, str):
        return value.replace("{root}", str(root))
    return value


FEDPROTO = {"algo": "fedproto"}
EARLIER = instructions(run_name="earlier")
GOES_ON = instructions(run_name="earlier", run_history=f"12:1,{RUN_ID}")  # from the earlier run
FILE = {"backbones": "file:small:{root}/outside/x.json"}
LARGE = 10**12


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@example(FEDPROTO, EARLIER, MessageType.EVALUATE)
@example(FEDPROTO, GOES_ON, MessageType.TRAIN)
@example(FEDPROTO | FILE, instructions(), MessageType.QUERY)
@example(FEDPROTO | {"data-dir": "{root}/outside/data"}, instructions(), MessageType.TRAIN)
@example(FEDPROTO | {"dataset": f"{MODULE}:x"}, instructions(), MessageType.QUERY)
@example(FEDPROTO | {"dataset": "hf:sick"}, instructions(), MessageType.QUERY)
@example(FEDPROTO, instructions(run_name="../../../outside"), MessageType.TRAIN)
@example({"algo": "fedrep", "fedrep.head-epochs": LARGE}, instructions(), MessageType.TRAIN)
@example({"algo": "pfedme", "pfedme.personal-steps": LARGE}, instructions(), MessageType.TRAIN)
@example({"algo": "fedgen", "fedgen.noise-dim": 10**9}, instructions(), MessageType.TRAIN)
@given(changes(), messages(), KINDS)
def test_a_site_keeps_to_its_folders(site, errors, odd, content, kind):
    """Whatever settings (``odd``) and message a server sends, nothing forbidden happens."""
    config = base(**{key: filled(value, site.root) for key, value in odd.items()})
    for record in content.config_records.values():
        for key, value in record.items():
            record[key] = filled(value, site.root)

    reply = site.answer(config, content, kind)

    event("refused" if reply.has_error() else "accepted")
    site.assert_nothing_leaves(reply, errors)
