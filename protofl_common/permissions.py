"""What the operator of a site lets a run ask for, as the site's node config says it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from protofl_common.catalog import CATALOG
from protofl_common.config.backbones import is_allowed
from protofl_common.config.options import Scalar
from protofl_common.config.python_names import is_python_name
from protofl_common.plugins import installed
from protofl_common.text import names_in

PERMISSIONS: dict[str, Scalar] = {
    "allow-download": False,
    "allow-backbones": "",
    "allow-python": "",
    "allow-algorithms": "all",
    "require-secagg": False,
}
"""With the defaults: no download, embedded backbones, no module but this app's, every algorithm of its catalog, with
secure aggregation or without."""
LIMITS: dict[str, int] = {
    "max-rounds": 2000,
    "max-epochs": 100,
    "max-steps": 10_000,
    "max-batch-size": 1024,
    "max-image-size": 512,
}
"""The largest values that a site takes from a run, with the defaults; every recipe of the project keeps them."""
LIMITED = {
    "rounds": "max-rounds",
    "local-epochs": "max-epochs",
    "local-steps": "max-steps",
    "batch-size": "max-batch-size",
    "eval-batch-size": "max-batch-size",
    "image-size": "max-image-size",
    "fedrep.head-epochs": "max-epochs",
    "pfedme.personal-steps": "max-epochs",
}
"""Settings of a run -> their limit at a site."""
DEMANDS = ("min-class-samples", "require-dp")
"""What a site wants of a run beyond what the run offers."""
_DP = re.compile(r"epsilon<=(\d+\.?\d*)( delta<=(\d*\.?\d+(?:e-\d+)?))?")
DELTA = 1e-5
"""δ of a site that demands ε alone."""
_NOT_ALLOWED = "not allowed on this site; its operator may"


def allowed_by(node: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Every permission and limit of a site: what its node config says, else the default."""
    defaults = PERMISSIONS | LIMITS
    return defaults | {key: node[key] for key in defaults if key in node}


def demanded(node: Mapping[str, Scalar], config: dict[str, Scalar]) -> list[str]:
    """Raise ``config`` to what the site demands; a line for each demand that is none, or that the run does not meet."""
    least = node.get("min-class-samples", 1)
    if type(least) is not int or least < 1:
        return [f"node-config: min-class-samples = {least!r} must be a whole number at least 1"]
    asked = config.get("min-class-samples")
    if type(asked) is int:
        config["min-class-samples"] = max(asked, least)
    return list(_dp_demanded(node, config))


def required_dp(node: Mapping[str, Scalar]) -> tuple[float, float] | None:
    """(ε, δ) that this site lets all runs together spend, of ``require-dp``; None without."""
    found = _DP.fullmatch(str(node.get("require-dp")))
    return (float(found[1]), float(found[3] or DELTA)) if found else None


def _dp_demanded(node: Mapping[str, Scalar], config: Mapping[str, Scalar]) -> Iterator[str]:
    if "require-dp" not in node:
        return
    wanted, told = required_dp(node), f"require-dp = {node['require-dp']!r}"
    if wanted is None:
        yield f"node-config: {told}: say 'epsilon<=8', or 'epsilon<=8 delta<=1e-6'"
        return
    if config.get("dp") != "sample":
        yield f"dp = {config.get('dp')!r}: this site takes part only with dp = 'sample' (node config: {told})"
    for key, most in zip(("dp-epsilon", "dp-delta"), wanted, strict=True):
        value = config.get(key)
        if isinstance(value, int | float) and value > most:
            yield f"{key} = {value}: this site takes at most {most:g} (node config: {told})"


def permission_problems(node: Mapping[str, Scalar], config: Mapping[str, Scalar]) -> list[str]:
    """A line for each value of the run's ``config`` that the site does not allow; or for permissions that are none."""
    allowed = allowed_by(node)
    if wrong := _wrong_permissions(allowed):
        return wrong
    own_choice = {key: value for key, value in config.items() if key not in node}
    return [*_beyond_limits(allowed, config), *_not_named(allowed, config, own_choice)]


def _wrong_permissions(allowed: Mapping[str, Scalar]) -> list[str]:
    """A line for each permission of the wrong type, and for an algorithm that does not exist."""
    kinds = {bool: "true or false", str: "a string of names, separated by commas", int: "a whole number at least 1"}
    problems = []
    for key, default in (PERMISSIONS | LIMITS).items():
        value = allowed[key]
        if type(value) is not type(default) or (type(value) is int and value < 1):
            problems.append(f"node-config: {key} = {value!r} must be {kinds[type(default)]}")
    known = ["all", *CATALOG, *installed()]
    for name in names_in(allowed["allow-algorithms"]):
        if not problems and name not in known:
            problems.append(f"node-config: allow-algorithms: {name!r}: choose from {', '.join(known)}")
    return problems


def _beyond_limits(allowed: Mapping[str, Scalar], config: Mapping[str, Scalar]) -> Iterator[str]:
    for key, limit in LIMITED.items():
        value, most = config.get(key), allowed[limit]
        table, dot, _ = key.rpartition(".")
        if dot and table != config.get("algo"):
            continue
        if isinstance(value, (int, float)) and isinstance(most, int) and value > most:
            yield f"{key} = {value}: this site takes at most {most}; its operator may raise {limit} (node config)"


def _not_named(
    allowed: Mapping[str, Scalar], config: Mapping[str, Scalar], own_choice: Mapping[str, Scalar]
) -> Iterator[str]:
    """Downloads, modules of ``own_choice`` (what the node config leaves to the run), backbones and algorithms."""
    if allowed["require-secagg"] and config.get("secagg") is not True:
        yield "secagg = false: this site takes part with secure aggregation only (node config: require-secagg)"
    if config.get("download") is True and not allowed["allow-download"]:
        yield f"download = true: {_NOT_ALLOWED} set allow-download=true (node config)"
    for key, module in _modules_named(own_choice):
        if not any(module == name or module.startswith(f"{name}.") for name in names_in(allowed["allow-python"])):
            yield f"{key}: {_NOT_ALLOWED} name {module} in allow-python (node config)"
    if str(config.get("dataset")).startswith("hf:") and not (config.get("data-dir") or allowed["allow-download"]):
        yield f"dataset = {config['dataset']!r}: {_NOT_ALLOWED} set data-dir, or allow-download=true"
    for name in names_in(config.get("backbones")):
        if not is_allowed(name, str(allowed["allow-backbones"])):
            yield f"backbones = {name!r}: {_NOT_ALLOWED} name it in allow-backbones (node config)"
    algorithms, algo = names_in(allowed["allow-algorithms"]), config.get("algo")
    if "all" not in algorithms and algo not in algorithms:
        yield f"algo = {algo!r}: {_NOT_ALLOWED} name it in allow-algorithms (node config)"


def _modules_named(config: Mapping[str, Scalar]) -> list[tuple[str, str]]:
    """What a run would have imported beside this app: (``key = value``, the module)."""
    points = {} if (algo := str(config.get("algo"))) in CATALOG else installed()
    found = [(f"algo = {algo!r}", points[algo].module)] if algo in points else []
    for key in ("metrics", "dataset", "arch", "models", "fml.meme", "fedkd.student"):
        names = filter(is_python_name, names_in(config.get(key)))
        found += [(f"{key} = {name!r}", name.partition(":")[0]) for name in names if not name.startswith("hf:")]
    return found
