"""The node config: who a client is, and what the operator of its machine demands and allows."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from protofl_common.basics.code_version import version_of
from protofl_common.basics.text import as_file_name, composed, is_site_name, names_in
from protofl_common.config import python_names
from protofl_common.config.backbones import is_allowed
from protofl_common.config.datasets import OWN_FORMATS, is_own
from protofl_common.config.options import Scalar, SettingsError, Values
from protofl_common.experiment.catalog import CATALOG, installed

REQUIRE_SECAGG = "require-secagg"
PERMISSIONS: dict[str, Scalar] = {  # what an operator may allow or demand, with the defaults
    "allow-download": False,
    "allow-backbones": "",
    "allow-arch": "",
    "allow-python": "",
    "allow-algorithms": "all",
    REQUIRE_SECAGG: False,
}
_BOUNDS: dict[str, tuple[int, tuple[str, ...]]] = {  # limit -> its default, which every recipe meets; what it bounds
    "max-rounds": (2000, ("rounds",)),
    "max-epochs": (100, ("local-epochs", "new-client-epochs", "fedrep.head-epochs", "pfedme.personal-steps")),
    "max-steps": (10_000, ("local-steps",)),
    "max-batch-size": (1024, ("batch-size", "eval-batch-size")),
    "max-image-size": (512, ("image-size",)),
    "max-text-length": (4096, ("text-length",)),
}
LIMITS = {limit: most for limit, (most, _) in _BOUNDS.items()}  # what a site takes of a run at most, by default
LIMITED = {key: limit for limit, (_, keys) in _BOUNDS.items() for key in keys}  # settings of a run -> their limit
DEMANDS = ("min-class-samples", "require-dp")  # what a site wants of a run beyond what the run offers
DIVISION = ("test-from", "train-fraction", "validation-fraction")  # of a site's own data: never the run's
TABLE = ("columns", "drop", "one-hot")
"""Settings that say what of a table becomes inputs. A run may only repeat what the operator says: names of columns and
categories that a run tries out would tell what a site has."""
UNDIVIDED: dict[str, Scalar] = {"total-samples": 0, "train-samples": 0, "test-samples": 0, "positive-rate": 1.0}
"""Settings that would leave samples or labels out; at a site with data of its own they have these values."""
SIMULATED = ("drop-rate", "new-clients", "new-domain")  # what a run does to clients that are its own
STRICT = (*DEMANDS, REQUIRE_SECAGG)  # with these a site names its classes itself: a refusal would tell which it has
READING = ("dataset", "classes", "image-size", "text-length", *TABLE, "impute", "standardise")  # how files are read
NODE_OVERRIDES = ("data-dir", *READING, *DIVISION, "arch", "device", "state-dir", "cache-dir")
SITE_FOLDERS: dict[str, Scalar] = {"data-dir": "", "cache-dir": "", "state-dir": "", "out-dir": "runs"}
AT_THE_SERVER = ("callback", "dataset")  # keys whose modules no site imports for a run
NETWORKS = ("arch", "models", "fml.meme", "fedkd.student")  # keys that name networks
_NOT_ALLOWED = "not allowed on this site; its operator may"
PARTITION_KEYS = ("partition-id", "num-partitions")  # all that the node config of a simulated client has
DEFAULTS = dict.fromkeys(PARTITION_KEYS, 0) | {"approve": False, "min-class-samples": 1} | PERMISSIONS | LIMITS
NODE_KEYS = ("site-name", *DEFAULTS, "domain", "require-dp", *NODE_OVERRIDES)
DELTA = 1e-5  # δ of a site that demands ε alone
_DP = re.compile(r"epsilon<=(\d+\.?\d*)( delta<=(\d*\.?\d+(?:e-\d+)?))?")


@dataclass(frozen=True)
class NodeConfig:
    """The part of a node config that is no setting of a run and no permission."""

    name: str
    partition: int
    num_partitions: int
    domain: str
    is_site: bool  # True on a machine with an operator, False for a simulated client
    has_own_data: bool  # they are then no share of a data set that several divide
    approves: bool  # its operator approves each run before anything is read for it
    required_dp: tuple[float, float] | None  # (ε, δ) that all runs together may spend

    @classmethod
    def of(cls, node: Values) -> Self:
        """Read and check a node config; SettingsError names the key."""
        if "site-name" not in node and "partition-id" not in node:
            raise SettingsError("node-config: give partition-id and num-partitions, or a site-name")
        if not is_site_name(name := site_name(node)):
            made_of = "ASCII letters, digits, '.', '_' and '-', and begin with a letter or digit"
            raise SettingsError(f"node-config: site-name = {name!r} must be made of at most 100 {made_of}")
        if wrong := [*wrong_values(node)]:
            raise SettingsError("\n".join(wrong))
        return cls(
            name=name,
            partition=int(node.get("partition-id", 0)),
            num_partitions=int(node.get("num-partitions", 0)),
            domain=composed(str(node.get("domain", ""))),
            is_site=is_site(node),
            has_own_data=has_own_data(node),
            approves=bool(node.get("approve", has_own_data(node))),
            required_dp=required_dp(node),
        )


def site_folder(node: Values) -> Path:
    """Return the folder of a site's key, approvals and audit log; several sites may share a ``state-dir``."""
    state_dir = Path(str(node.get("state-dir") or SITE_FOLDERS["out-dir"])).expanduser()
    return state_dir / "sites" / as_file_name(site_name(node))


def site_name(node: Mapping[str, object]) -> str:
    return str(node.get("site-name", f"site-{node.get('partition-id', 0)}"))


def is_site(node: Mapping[str, object]) -> bool:
    """Return whether a node config is that of a machine with an operator, not of a simulated client."""
    return bool(node.keys() - set(PARTITION_KEYS))


def has_own_data(node: Mapping[str, object]) -> bool:
    """Return whether a site brings data of its own, not a share of a data set that several clients divide."""
    return "partition-id" not in node and bool(node.get("data-dir") or node.get("dataset"))


def required_dp(node: Values) -> tuple[float, float] | None:
    """(ε, δ) that this site lets all runs together spend, of ``require-dp``; None without."""
    limits = _DP.fullmatch(str(node.get("require-dp")))
    return (float(limits[1]), float(limits[3] or DELTA)) if limits else None


def allowed_by(node: Values) -> dict[str, Scalar]:
    """Return what a node config says, with the defaults of what it does not say."""
    return {**DEFAULTS, **node}


def openly(config: Values, node: Values) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
    """Return both as the site's operator asks: approved, and without secure aggregation, which would hide numbers."""
    return {**config, "secagg": False}, {**node, REQUIRE_SECAGG: False, "approve": False}


def own_division(node: Values, defaults: Values) -> dict[str, Scalar]:
    """Return the settings by which a site with data of its own divides them, whatever the run says; else none."""
    return UNDIVIDED | {key: node.get(key, defaults[key]) for key in DIVISION} if has_own_data(node) else {}


def instead(node: Values, defaults: Values) -> dict[str, Scalar]:
    """Return the settings that a site, {} for a simulated client, puts in the place of a run's."""
    own = {key: node[key] for key in NODE_OVERRIDES if key in node}
    return (SITE_FOLDERS if node else {}) | own_division(node, defaults) | own


def refusals(node: Values, config: dict[str, Scalar], asked: Values) -> list[str]:
    """Raise ``config`` to what a site demands; a line for each unmet demand and forbidden value."""
    if wrong := [*wrong_values(node)]:
        return wrong
    beyond = [key for key in TABLE if asked.get(key, "") not in ("", node.get(key, ""))]
    about_table = [f"{key} = {asked[key]!r}: {_NOT_ALLOWED} set it to the same (node config)" for key in beyond]
    return [*_demanded(node, config), *permission_problems(node, config), *about_table]


def _demanded(node: Values, config: dict[str, Scalar]) -> Iterator[str]:
    if type(asked := config.get("min-class-samples")) is int:
        config["min-class-samples"] = max(asked, int(node.get("min-class-samples", 1)))
    if "require-dp" not in node:
        return
    wanted, demand = required_dp(node), f"require-dp = {node['require-dp']!r}"
    if wanted is None:
        yield f"node-config: {demand}: say 'epsilon<=8', or 'epsilon<=8 delta<=1e-6'"
        return
    if not Path(str(node.get("state-dir", ""))).is_absolute():
        place = "with require-dp it must be absolute, so that the privacy ledger is found again"
        yield f"node-config: state-dir = {node.get('state-dir', '')!r}: {place}"
    if config.get("dp") != "sample":
        limits = f"dp = 'sample', dp-epsilon at most {wanted[0]:g} and dp-delta at most {wanted[1]:g}"
        yield f"dp = {config.get('dp')!r}: this site takes part only with {limits} (node config: {demand})"
    for key, most in zip(("dp-epsilon", "dp-delta"), wanted, strict=True):
        value = config.get(key)
        if isinstance(value, int | float) and value > most:
            yield f"{key} = {value}: this site takes at most {most:g} (node config: {demand})"


def permission_problems(node: Values, config: Values) -> list[str]:
    """A line for each value of the run's ``config`` that the site does not allow."""
    allowed = allowed_by(node)
    own_choice = {key: value for key, value in config.items() if key not in node}
    return [*_beyond_limits(allowed, own_choice), *_about_data(node, config), *_not_named(allowed, config, own_choice)]


def wrong_values(node: Values) -> Iterator[str]:
    """A line for each value of a node config that nobody could mean, whatever a run asks."""
    kinds = {bool: "true or false", str: "a string of names, separated by commas"}
    for key, default in DEFAULTS.items():
        value, least = node.get(key, default), int(key not in PARTITION_KEYS)
        if type(value) is not type(default) or (type(value) is int and value < least):
            wanted = kinds.get(type(default), f"a whole number at least {least}")
            yield f"node-config: {key} = {value!r} must be {wanted}"
    for name in names_in(node.get("allow-algorithms")):
        if name not in ("all", *CATALOG) and name not in (others := installed()):
            yield f"node-config: allow-algorithms: {name!r}: choose from {', '.join(['all', *CATALOG, *others])}"


def _beyond_limits(allowed: Values, config: Values) -> Iterator[str]:
    for key, limit in LIMITED.items():
        value, most, table = config.get(key), allowed[limit], key.rpartition(".")[0]
        chosen = table in ("", config.get("algo"))
        if chosen and isinstance(value, (int, float)) and isinstance(most, int) and value > most:
            yield f"{key} = {value}: this site takes at most {most}; its operator may raise {limit} (node config)"


def _about_data(node: Values, config: Values) -> Iterator[str]:
    """A line for each way in which the run, not the operator, would decide how a site's own files are read."""
    dataset, own = str(config["dataset"]), has_own_data(node)
    if own and "dataset" not in node:
        formats = ", ".join(OWN_FORMATS)
        yield f"node-config: dataset: missing; with data of its own a site says how they are read: {formats}"
    elif not own and is_own(dataset) and "dataset" not in node:
        yield f"dataset = {dataset!r}: {_NOT_ALLOWED} name it as dataset (node config)"
    if own and config.get("partition") != "own":
        yield f"partition = {config.get('partition')!r}: this site has data of its own; choose 'own'"
    for key in filter(config.get, SIMULATED if own else ()):
        yield f"{key} = {config[key]!r}: only for clients that divide a data set; this site has its own; leave it out"
    if is_own(dataset) and "dataset" in node and (strict := next((key for key in STRICT if node.get(key)), "")):
        if not own:
            yield f"node-config: partition-id: with {strict} a site divides its data itself, not the run; leave it out"
        elif "classes" not in node:
            yield f"node-config: classes: missing; with {strict} a site names its classes itself, in label order"
    for key in DIVISION:
        if key in node and not own:
            yield f"node-config: {key}: only at a site with data of its own: with data-dir, without partition-id"


def _not_named(allowed: Values, config: Values, own_choice: Values) -> Iterator[str]:
    """Downloads, modules of ``own_choice`` (what the node config leaves to the run), backbones and algorithms."""
    if allowed[REQUIRE_SECAGG] and config.get("secagg") is not True:
        only = f"this site takes part with secure aggregation only (node config: {REQUIRE_SECAGG}); set secagg = true"
        yield f"secagg = {str(config.get('secagg')).lower()}: {only}"
    if config.get("download") is True and not allowed["allow-download"]:
        yield f"download = true: {_NOT_ALLOWED} set allow-download=true (node config)"
    for key, module in _modules_named(own_choice):
        if not python_names.is_inside(module, names_in(allowed["allow-python"])):
            yield f"{key}: {_NOT_ALLOWED} name {module} in allow-python (node config)"
    for name in names_in(config.get("backbones")):
        if not is_allowed(name, str(allowed["allow-backbones"])):
            yield f"backbones = {name!r}: {_NOT_ALLOWED} name it in allow-backbones (node config)"
    for key, name in ((at, name) for at in NETWORKS for name in names_in(own_choice.get(at))):
        if python_names.LIBRARY_NETWORK.fullmatch(name) and not is_allowed(name, str(allowed["allow-arch"])):
            yield f"{key} = {name!r}: {_NOT_ALLOWED} name it in allow-arch (node config)"
    algorithms, algo = names_in(allowed["allow-algorithms"]), config.get("algo")
    if "all" not in algorithms and algo not in algorithms:
        yield f"algo = {algo!r}: {_NOT_ALLOWED} name it in allow-algorithms (node config)"


def _modules_named(config: Values, without: Collection[str] = AT_THE_SERVER) -> list[tuple[str, str]]:
    points = {} if (algo := str(config.get("algo"))) in CATALOG else installed()
    named = [(f"algo = {algo!r}", points[algo].module)] if algo in points else []
    names = [(key, name) for key, name in _named_in(config) if key not in without]
    return named + [(f"{key} = {name!r}", python_names.module_of(name)) for key, name in names]


def own_code(config: Values, without: Collection[str] = AT_THE_SERVER) -> dict[str, str]:
    """Return the versions of other packages' modules that these settings name, but for the keys ``without``."""
    return {module: version_of(module) for _, module in _modules_named(config, without)}


def _named_in(config: Values) -> Iterator[tuple[str, str]]:
    """The values ``module:name`` of a run's settings, each with its key."""
    for key in ("metrics", "dataset", *NETWORKS, "callback"):
        for name in filter(python_names.is_python_name, names_in(config.get(key))):
            if not name.startswith("hf:"):
                yield key, name


def allow_named(config: Values) -> None:
    """Allow the modules that these settings name: a person who may say so has typed or submitted them."""
    python_names.allow([python_names.module_of(name) for _, name in _named_in(config)])


def check_named(config: Values) -> None:
    """SettingsError where these settings name a module that is not allowed, or something that it lacks."""
    python_names.check_allowed(*_named_in(config))
    for key, name in _named_in({**config, "dataset": ""}):
        python_names.load(name, key)
    for name in (name for key in NETWORKS for name in names_in(config.get(key))):
        if python_names.LIBRARY_NETWORK.fullmatch(name):
            from protofl_common.models.build import check_library  # PyTorch, seconds

            check_library(name)
