"""The node config: who a client is, and what the operator of its machine demands and allows."""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from protofl_common.basics.code_version import code_version
from protofl_common.basics.text import as_file_name, is_site_name, with_composed_letters
from protofl_common.config import python_names
from protofl_common.config.architectures import OTHER_NETWORKS
from protofl_common.config.backbones import is_allowed
from protofl_common.config.datasets import OWN_FORMATS, is_own
from protofl_common.config.lists import names_in
from protofl_common.config.options import (
    ANY_VALUE,
    Scalar,
    SettingsError,
    Values,
    problem_with,
)
from protofl_common.config.python_code import version_of
from protofl_common.config.sections import KEYED, PER_UNIT
from protofl_common.experiment.catalog import CATALOG, installed, options_of_a_run
from protofl_common.experiment.study import keys_of_sites, problems_of_keys, wrong_key
from protofl_common.privacy.masks import FEWEST_SUMMED

REQUIRE_SECAGG = "require-secagg"
MAX_EVALUATIONS = "max-evaluations"
ON_REQUEST = "on-request"
ON_TROUBLE = "on-trouble"
OPERATORS = "operators"
ACCEPT_WEIGHTS = "accept-weights"
FEWEST_KNOWN = FEWEST_SUMMED - 1
"""Peers of a sum that a site must know: else the server, or who signs, may have invented them."""


@dataclass(frozen=True, kw_only=True)
class NodeKey:
    """A key of a node config that is no setting of a run."""

    help: str
    default: Scalar | None = None
    """None where it has none, and another type than the other keys."""
    minimum: int = 1


NODE_ROWS: dict[str, NodeKey] = {
    "site-name": NodeKey(
        help=(
            "its name in results and logs: ASCII letters, digits, `.`, `_` and `-`. If the node"
            " config has only `partition-id` and `num-partitions`, the node counts as a simulated"
            " client, and runs choose its folders"
        ),
    ),
    "partition-id": NodeKey(
        default=0,
        minimum=0,
        help="which share of a common data set is its own, counted from 0",
    ),
    "num-partitions": NodeKey(
        default=0,
        minimum=0,
        help="how many shares that data set is divided into",
    ),
    "domain": NodeKey(
        help=(
            "one of the domains in `data-dir`, and the only one that the site's introduction"
            " names. If not set, all"
        ),
    ),
    "approve": NodeKey(
        default=False,
        help=(
            "`true`: before the site reads anything for a run, its operator must have approved the"
            " run's settings ([studies](studies.md)). If not set, it is `true` if the site has data"
            " of its own, or if it has `require-secagg` and no `peers`; otherwise it is `false`"
        ),
    ),
    OPERATORS: NodeKey(
        default="",
        help=(
            'who may decide about runs, each with the SSH key that signs: `"jane:KEY, omar:KEY"`'
            " ([signed decisions](studies.md#signed-decisions)). If set, an approval counts only"
            " with such a signature"
        ),
    ),
    ON_REQUEST: NodeKey(
        default="",
        help=(
            "a program of the operator's that the site starts for each new request, with the"
            " request's id as the only argument; it may send a mail. No shell reads this value."
            " The program has ten seconds; if it fails, the log says so, and nothing else changes"
        ),
    ),
    ON_TROUBLE: NodeKey(
        default="",
        help=(
            "a program of the operator's that the site starts when something is wrong, at most"
            " once a day for each word that it is given: `refused` (the site refused a message),"
            " `disk` (less than 1 GB is free where it writes) or `certificate` (one ends within 30"
            " days). It is started in the same way as that of `on-request`"
        ),
    ),
    "allow-download": NodeKey(
        default=False,
        help="`true`: a run may download data sets of torchvision or of a hub into `data-dir`",
    ),
    "allow-backbones": NodeKey(
        default="",
        help=(
            "frozen backbones, with commas, that a run may name besides the embedded ones: files,"
            " packages, or downloads of others; `torchvision:` or `file:small:/srv/weights/`"
            " allows all names that begin so"
        ),
    ),
    "allow-arch": NodeKey(
        default="",
        help=(
            "[networks of torchvision and timm](models.md#networks-of-torchvision-and-timm), with"
            " commas, that a run may name besides the catalog's; `torchvision:` allows all of its"
            " classifiers"
        ),
    ),
    "allow-python": NodeKey(
        default="",
        help=(
            "installed modules, with commas, whose networks, metrics or algorithms a run may name:"
            " `mynets` also allows `mynets.vision`, but nothing that these import from elsewhere"
        ),
    ),
    "allow-algorithms": NodeKey(
        default="all",
        help=(
            "algorithms of the catalog, with commas, that a run may use; those of other packages"
            " need `allow-python` too"
        ),
    ),
    REQUIRE_SECAGG: NodeKey(
        default=False,
        help=(
            "`true`: uploads and figures leave only under"
            " [secure aggregation](secure-aggregation.md), in studies that name the sites"
        ),
    ),
    "peers": NodeKey(
        default="",
        help=(
            'the other sites that this site knows, `"south:KEY,east:KEY"`, as `protofl site key`'
            " prints them there. A sum then needs [two of them](secure-aggregation.md#peers). The"
            " site's own key does not count, so all sites may have the same list"
        ),
    ),
    ACCEPT_WEIGHTS: NodeKey(
        default=True,
        help=(
            "`false`: only methods whose server sends no weights, such as FedProto"
            " ([why](data-protection.md#what-a-hostile-server-could-learn))"
        ),
    ),
    "max-rounds": NodeKey(
        default=2000,
        help="this bounds the time of a run, not the number of runs",
    ),
    "max-epochs": NodeKey(default=100, help="this bounds the time of a round"),
    "max-steps": NodeKey(default=10_000, help="this bounds the time of a round"),
    "max-batch-size": NodeKey(
        default=1024,
        help=(
            "this bounds memory, but only roughly; weights have 2 GiB at most; only the container"
            " can set a hard limit"
        ),
    ),
    "max-honest-sites": NodeKey(
        default=1,
        help=(
            "with 3, this site's privacy may rely on the noise of three sites, itself included;"
            " with 1, it relies on the site's own noise alone"
        ),
    ),
    "max-image-size": NodeKey(default=512, help="this bounds memory and time"),
    "max-text-length": NodeKey(default=4096, help="this bounds memory and time"),
    "min-class-samples": NodeKey(
        default=1,
        help=(
            "if a class or cluster has fewer training samples than this, none of its prototypes,"
            " counts and outputs leaves the site; no figure leaves that is made of fewer test"
            " samples than this, or than 20; and figures are rounded"
            " ([how](privacy.md#small-classes)). A run may ask for more, never for less"
        ),
    ),
    MAX_EVALUATIONS: NodeKey(
        default=100,
        help=(
            "where figures are rounded (`min-class-samples`, without `dp`): how often at most the"
            " site evaluates a model for the runs of one approval, and in one run"
        ),
    ),
    "require-dp": NodeKey(
        help=(
            '`"epsilon<=2"`, or `"epsilon<=2 delta<=1e-6"` (δ is 1e-5 if not set): only runs with'
            " `dp`, and all runs together cost no more than this. (A run's own default, `dp-epsilon"
            ' = 8`, is more than that.) `"epsilon<=2 per person"`: only runs with `dp = "person"`;'
            " for these the site's data need [a column `client`](privacy.md#persons). If the data"
            " have this column, ε always protects a person. `privacy/` under `state-dir` has one"
            " ledger of the site's name and one of its data (`data-dir`, `domain`,"
            " `partition-id`). So the budget is not reset if you rename the site, or if you move"
            " its data. It is reset if you do both at once, or take another `state-dir`: never do"
            " that"
        ),
    ),
}
LIMITED: dict[str, str] = {  # settings of a run -> the key that bounds them; every recipe meets it
    key: field.metadata["at_most"]
    for key, field in options_of_a_run().items()
    if field.metadata["at_most"]
}
LIMITS = [key for key in NODE_ROWS if key in LIMITED.values()]
DEMANDS = ("min-class-samples", "require-dp")  # what a site wants of a run beyond its offer
DIVISION = ("test-from", "train-fraction", "validation-fraction")
"""How a site's own data are divided: never as the run says."""
TABLE = ("columns", "drop", "one-hot")
"""Settings that say what of a table becomes inputs. A run may only repeat what the operator says:
names of columns and categories that a run tries out would tell what a site has."""
UNDIVIDED: dict[str, Scalar] = {
    "total-samples": 0,
    "train-samples": 0,
    "test-samples": 0,
    "positive-rate": 1.0,
}
"""Settings that would leave samples or labels out; at a site with data of its own they have these
values."""
SIMULATED = ("drop-rate", "slow-rate", "new-clients", "new-domain")
"""What a run does to clients that are its own."""
STRICT = (*DEMANDS, REQUIRE_SECAGG)
"""With these a site names its classes itself: a refusal would tell which it has."""
ON_RECORD = (*STRICT, "peers", ACCEPT_WEIGHTS)  # in the audit log, with each decision
NODE_OVERRIDES = [key for key, field in options_of_a_run().items() if field.metadata["site"]]
SITE_FOLDERS: dict[str, Scalar] = {
    "data-dir": "",
    "cache-dir": "",
    "state-dir": "",
    "out-dir": "runs",
}
AT_THE_SERVER = ("callback", "dataset")  # keys whose modules no site imports for a run
NETWORKS = [  # keys that name networks
    key for key, field in options_of_a_run().items() if field.metadata["or_like"] is OTHER_NETWORKS
]
_NOT_ALLOWED = "not allowed on this site; its operator may"
PARTITION_KEYS = ("partition-id", "num-partitions")
"""All that the node config of a simulated client has."""
DEFAULTS: dict[str, Scalar] = {
    key: row.default for key, row in NODE_ROWS.items() if row.default is not None
}
NODE_KEYS = (*NODE_ROWS, *NODE_OVERRIDES)
DELTA = 1e-5  # δ of a site that demands ε alone
_DP = re.compile(
    r"epsilon<=(?P<epsilon>\d+\.?\d*)"
    r"( delta<=(?P<delta>\d*\.?\d+(?:e-\d+)?))?"
    r"(?P<person> per person)?"
)


class PrivacyLimits(NamedTuple):
    """What may be spent of the privacy of each ``unit``, "sample" or "person"."""

    epsilon: float
    delta: float
    unit: str

    @property
    def per_unit(self) -> str:
        """Return the words that follow a value of ε: " per person", or "" for samples."""
        return PER_UNIT[self.unit]


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
    peers: dict[str, str]  # the sites that it knows, each with its key
    required_dp: PrivacyLimits | None  # what all runs together may spend, if limited
    max_evaluations: int  # of exact figures, for each approval

    @classmethod
    def of(cls, node: Values) -> Self:
        """Check a node config, and read what it says of the site; SettingsError names the key."""
        if "site-name" not in node and "partition-id" not in node:
            raise SettingsError("node-config: give partition-id and num-partitions, or a site-name")
        name = site_name(node)
        if not is_site_name(name):
            raise SettingsError(
                f"node-config: site-name = {name!r} must be made of at most 100 ASCII letters,"
                " digits, '.', '_' and '-', and begin with a letter or digit"
            )
        wrong = list(wrong_values(node))
        if wrong:
            raise SettingsError("\n".join(wrong))
        return cls(
            name=name,
            partition=int(node.get("partition-id", 0)),
            num_partitions=int(node.get("num-partitions", 0)),
            domain=with_composed_letters(str(node.get("domain", ""))),
            is_site=is_site(node),
            has_own_data=has_own_data(node),
            approves=asks_its_operator(node),
            peers=keys_of_sites(str(node.get("peers", ""))),
            required_dp=required_dp(node),
            max_evaluations=int(allowed_by(node)[MAX_EVALUATIONS]),
        )

    def known_among(self, sites: Mapping[str, str]) -> set[str]:
        """Return which other sites of a study its operator has listed in ``peers``.

        ``sites`` are the study's, each with its key; name and key have to be the same in both. The
        site itself does not count, though all sites may have the same list.
        """
        known = self.peers.items() & sites.items()
        return {site for site, _ in known} - {self.name}


def site_folder(node: Values) -> Path:
    """Return the folder of a site's key, approvals and audit log.

    It is named after the site, as several sites may share a ``state-dir``. Without ``state-dir`` it
    lies in ``runs``.
    """
    state_dir = str(node.get("state-dir") or SITE_FOLDERS["out-dir"])
    return Path(state_dir).expanduser() / "sites" / as_file_name(site_name(node))


def site_name(node: Mapping[str, object]) -> str:
    return str(node.get("site-name", f"site-{node.get('partition-id', 0)}"))


def is_site(node: Mapping[str, object]) -> bool:
    """True if a node config is that of a machine with an operator, not of a simulated client.

    A simulated client's has no keys but ``partition-id`` and ``num-partitions``.
    """
    return bool(node.keys() - set(PARTITION_KEYS))


def has_own_data(node: Mapping[str, object]) -> bool:
    """True if a site has data of its own, not a share of a data set that several clients divide."""
    return "partition-id" not in node and bool(node.get("data-dir") or node.get("dataset"))


def asks_its_operator(node: Values) -> bool:
    """True if no run uses a site's data before its operator has approved the run.

    The key ``approve`` says so. If it is missing, it is true at a site with data of its own, and at
    one that takes part in secure sums only and lists no ``peers``: there only the operator can
    judge who the other sites are.
    """
    return bool(node.get("approve", has_own_data(node) or _requires_secagg_without_peers(node)))


def _requires_secagg_without_peers(node: Values) -> bool:
    """True if a site requires secure aggregation, but its node config lists no ``peers``.

    It then knows the other sites of a sum only from what a run says of them.
    """
    return bool(node.get(REQUIRE_SECAGG)) and not node.get("peers")


def problem_of_peers(node: Values, config: Values) -> str:
    """Say why a site cannot know with whom a run would sum its uploads; "" if it can.

    It knows the other sites from ``peers``, its own list of names and keys, or from the run's
    ``study-sites``. A site that requires secure aggregation needs one of the two. With ``peers``,
    at least `FEWEST_KNOWN` of them must be sites of a study whose uploads are summed: the other
    sites may be inventions. ``config`` are all settings of the run.
    """
    sites_of_study = keys_of_sites(str(config["study-sites"]))
    if _requires_secagg_without_peers(node) and not sites_of_study:
        return (
            "study-sites: missing; this site takes part only in a signed study that names its"
            f" sites by their keys (node config: {REQUIRE_SECAGG})"
        )
    if node.get("peers") and config["secagg"]:
        known = NodeConfig.of(node).known_among(sites_of_study)
        if len(known) < FEWEST_KNOWN:
            return (
                f"study-sites: this site knows {len(known)} of the others by name and key, fewer"
                f" than {FEWEST_KNOWN}; its operator may add some to peers (node config)"
            )
    return ""


def required_dp(node: Values) -> PrivacyLimits | None:
    """Read ``require-dp``: the ε and δ that all runs together may spend at a site.

    Return None without that key, and for a value that is not of its form: `refusals` has an error
    for that.
    """
    limits = _DP.fullmatch(str(node.get("require-dp")))
    if limits is None:
        return None
    unit = "person" if limits["person"] else "sample"
    return PrivacyLimits(float(limits["epsilon"]), float(limits["delta"] or DELTA), unit)


def allowed_by(node: Values) -> dict[str, Scalar]:
    """Return a node config with the defaults of the keys that it lacks."""
    return {**DEFAULTS, **node}


def as_its_operator(config: Values, node: Values) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
    """Return copies of a run's settings and a node config for the operator's own checks.

    With these the site answers without an approval. It answers without secure aggregation, too,
    which would hide the site's numbers from its own operator.
    """
    return {**config, "secagg": False}, {**node, REQUIRE_SECAGG: False, "approve": False}


def own_division(node: Values, defaults: Values) -> dict[str, Scalar]:
    """Return the settings by which a site divides data of its own into parts, whatever a run says.

    They come from the node config, or else from the ``defaults`` of all settings. Return {} for a
    site without data of its own.
    """
    if not has_own_data(node):
        return {}
    division = {key: node.get(key, defaults[key]) for key in DIVISION}
    if "require-dp" in node and "test-from" not in node:
        # ε compares the data with and without a sample, so that one must not decide where others
        # go: with KEYED each sample's part depends on that sample alone
        division["test-from"] = KEYED
    return UNDIVIDED | division


def settings_of_site(node: Values, asked: Values, defaults: Values) -> dict[str, Scalar]:
    """Return the settings that a site puts in the place of those that a run has ``asked`` for.

    ``node`` is its node config. For a simulated client that is {}, and so is the result.
    """
    if not node:
        return {}
    overrides = {key: node[key] for key in NODE_OVERRIDES if key in node}
    # folders at a site are never those of the run
    settings = SITE_FOLDERS | own_division(node, defaults) | overrides

    # of the run's value and the site's the stricter one counts
    key = "min-class-samples"
    asked_for = asked.get(key)  # a run config has every key
    demanded = node.get(key, 1)  # 1 demands nothing
    if type(asked_for) is int and type(demanded) is int:  # other types are refused later
        settings[key] = max(asked_for, demanded)
    return settings


def refusals(node: Values, config: Values, asked: Values) -> list[str]:
    """Return a line for each demand of a site that a run does not meet, and each forbidden value.

    ``config`` are the run's settings as they would be at the site (`settings_of_site`), ``asked``
    as the run gave them. If the site's node config itself is wrong, only that is said.
    """
    wrong = list(wrong_values(node))
    if wrong:
        return wrong

    allowed = allowed_by(node)
    # what the operator has set in the node config needs no permission
    from_run = {key: value for key, value in config.items() if key not in node}
    about_data = _about_own_data if has_own_data(node) else _about_divided_data
    lines = [
        *_unmet_dp_demand(node, config),
        *_beyond_limits(allowed, from_run),
        *_too_many_evaluations(allowed, config),
        *about_data(node, config),
        *_not_permitted(allowed, config, from_run),
    ]
    for key in TABLE:  # a run may repeat what the operator says of a table, or leave it out
        value = asked.get(key, "")
        if value not in ("", node.get(key, "")):
            lines.append(f"{key} = {value!r}: {_NOT_ALLOWED} set it to the same (node config)")
    return lines


def _unmet_dp_demand(node: Values, config: Values) -> Iterator[str]:
    """Yield a line for each way in which a run does not meet the site's ``require-dp``."""
    if "require-dp" not in node:
        return

    demand = f"require-dp = {node['require-dp']!r}"
    limits = required_dp(node)
    if limits is None:
        choices = "'epsilon<=8', 'epsilon<=8 per person' or 'epsilon<=8 delta<=1e-6 per person'"
        yield f"node-config: {demand}: say {choices}"
        return
    state_dir = str(node.get("state-dir", ""))
    if not Path(state_dir).is_absolute():
        yield (
            f"node-config: state-dir = {node.get('state-dir', '')!r}: with require-dp it must be"
            " absolute, so that the privacy ledger is found again"
        )
    # noise that hides all samples of a person hides each of them, too
    if config.get("dp") not in (limits.unit, "person"):
        yield (
            f"dp = {config.get('dp')!r}: this site takes part only with dp = {limits.unit!r},"
            f" dp-epsilon at most {limits.epsilon:g} and dp-delta at most {limits.delta:g} (node"
            f" config: {demand})"
        )
    for key, most in (("dp-epsilon", limits.epsilon), ("dp-delta", limits.delta)):
        value = config.get(key)
        if isinstance(value, int | float) and value > most:
            yield f"{key} = {value}: this site takes at most {most:g} (node config: {demand})"


def wrong_values(node: Values) -> Iterator[str]:
    """Yield a line for each value of a node config that is wrong whatever a run asks."""
    for key, default in DEFAULTS.items():
        if key not in node:
            continue
        value = node[key]
        # only whole numbers have a minimum
        minimum = NODE_ROWS[key].minimum if type(default) is int else None
        problem = problem_with(value, type(default), {**ANY_VALUE, "minimum": minimum})
        if problem:
            yield f"node-config: {key} = {value!r} {problem}"

    yield from problems_of_keys("node-config: peers", str(node.get("peers", "")))
    if _requires_secagg_without_peers(node) and node.get("approve") is False:
        yield (
            f"node-config: approve = false: with {REQUIRE_SECAGG} and without peers only its"
            " operator can say who the others are; give peers, or leave it out"
        )

    for name in names_in(node.get("allow-algorithms")):
        if name == "all" or name in CATALOG:
            continue
        packages = installed()
        if name not in packages:
            choices = ", ".join(["all", *CATALOG, *packages])
            yield f"node-config: allow-algorithms: {name!r}: choose from {choices}"
    for entry in names_in(node.get(OPERATORS)):
        yield from wrong_key(f"node-config: {OPERATORS}", entry)


def _beyond_limits(allowed: Values, config: Values) -> Iterator[str]:
    """Yield a line for each setting of a run that is above the site's limit on it.

    ``allowed`` is the node config with its defaults. Values of a wrong type are passed over:
    `wrong_values` names those of the node config, and `Settings` those of the run.
    """
    for key, limit in LIMITED.items():
        value = config.get(key)
        most = allowed[limit]
        algo = key.rpartition(".")[0]  # "" for a setting that is no algorithm's
        if algo and algo != config.get("algo"):  # it has no effect on the run
            continue
        if isinstance(value, int | float) and isinstance(most, int) and value > most:
            yield (
                f"{key} = {value}: this site takes at most {most};"
                f" its operator may raise {limit} (node config)"
            )


def _too_many_evaluations(allowed: Values, config: Values) -> Iterator[str]:
    """Yield a line if a run has more evaluations than the site makes of rounded figures.

    The figures of many models of a server's choice can tell the values of one patient, and
    rounding alone only makes that dearer. Values of a wrong type are passed over, as in
    `_beyond_limits`.
    """
    rounds = config.get("rounds")
    every = config.get("evaluate-every")
    most = allowed[MAX_EVALUATIONS]
    if not isinstance(rounds, int) or not isinstance(every, int) or not isinstance(most, int):
        return
    # min-class-samples = 1 rounds no figure, and with dp noise protects figures instead
    are_rounded = config.get("min-class-samples") != 1 and config.get("dp") == "none"
    planned = math.ceil(rounds / max(1, every)) + 1  # 1: that of the final model
    if are_rounded and planned > most:
        yield (
            f"evaluate-every = {every}: {planned} evaluations in {rounds} rounds; with"
            f" min-class-samples this site makes at most {most}; its operator may raise"
            f" {MAX_EVALUATIONS} (node config)"
        )


def _about_own_data(node: Values, config: Values) -> Iterator[str]:
    """Yield a line for each refused setting of a run at a site that has data of its own.

    Refused is what would let the run decide how the site's files are divided, or which clients
    there are. Yield also a line for each key about data that the site's node config lacks.
    """
    if "dataset" not in node:
        formats = ", ".join(OWN_FORMATS)
        yield (
            "node-config: dataset: missing;"
            f" with data of its own a site says how they are read: {formats}"
        )
    partition = config.get("partition")
    if partition != "own":
        yield f"partition = {partition!r}: this site has data of its own; choose 'own'"
    for key in SIMULATED:
        if config.get(key):
            yield (
                f"{key} = {config[key]!r}: only for clients that divide a data set;"
                " this site has its own; leave it out"
            )
    demands = [key for key in STRICT if node.get(key)]
    is_in_own_format = "dataset" in node and is_own(str(config["dataset"]))
    if demands and is_in_own_format and "classes" not in node:
        yield (
            f"node-config: classes: missing; with {demands[0]} a site names its classes itself,"
            " in label order"
        )


def _about_divided_data(node: Values, config: Values) -> Iterator[str]:
    """Yield a line for each setting about data that is refused at a node without data of its own.

    Such a node has a share of a data set that the run divides (`has_own_data` is false). A data set
    of files of one's own (`is_own`) must stand in the node config, which must then demand nothing
    of runs. Keys of the node config that have no effect here are refused, too.
    """
    dataset = str(config["dataset"])
    demands = [key for key in STRICT if node.get(key)]
    if is_own(dataset) and "dataset" not in node:
        yield f"dataset = {dataset!r}: {_NOT_ALLOWED} name it as dataset (node config)"
    elif is_own(dataset) and demands:
        # without partition-id it would have data of its own, as it names a data set
        yield (
            f"node-config: partition-id: with {demands[0]} a site divides its data itself,"
            " not the run; leave it out"
        )
    for key in DIVISION:
        if key in node:
            yield (
                f"node-config: {key}: only at a site with data of its own:"
                " with data-dir, without partition-id"
            )


def _not_permitted(allowed: Values, config: Values, from_run: Values) -> Iterator[str]:
    """Yield a line for each thing that a run asks for and the site's operator has not permitted.

    This is about downloads, the user's modules, backbones, networks and algorithms, and about a
    run without the secure aggregation that a site requires. ``allowed`` is the node config with its
    defaults; ``from_run`` are those of the settings ``config`` that the node config does not set.
    """
    if allowed[REQUIRE_SECAGG] and config.get("secagg") is not True:
        yield (
            f"secagg = {str(config.get('secagg')).lower()}: this site takes part with secure"
            f" aggregation only (node config: {REQUIRE_SECAGG}); set secagg = true"
        )
    if config.get("download") is True and not allowed["allow-download"]:
        yield f"download = true: {_NOT_ALLOWED} set allow-download=true (node config)"
    for setting, module in _modules_named(from_run):
        if not python_names.is_inside(module, names_in(allowed["allow-python"])):
            yield f"{setting}: {_NOT_ALLOWED} name {module} in allow-python (node config)"
    for name in names_in(config.get("backbones")):
        if not is_allowed(name, str(allowed["allow-backbones"])):
            yield (f"backbones = {name!r}: {_NOT_ALLOWED} name it in allow-backbones (node config)")
    for key, name in _library_networks(from_run):
        if not is_allowed(name, str(allowed["allow-arch"])):
            yield f"{key} = {name!r}: {_NOT_ALLOWED} name it in allow-arch (node config)"
    algorithms = names_in(allowed["allow-algorithms"])
    algo = config.get("algo")
    if "all" not in algorithms and algo not in algorithms:
        yield f"algo = {algo!r}: {_NOT_ALLOWED} name it in allow-algorithms (node config)"


def _library_networks(config: Values) -> Iterator[tuple[str, str]]:
    """Yield each key of a setting that names a network of torchvision or timm, and the network."""
    for key in NETWORKS:
        for name in names_in(config.get(key)):
            if python_names.LIBRARY_NETWORK.fullmatch(name):
                yield key, name


def _modules_named(
    config: Values, without: Collection[str] = AT_THE_SERVER
) -> list[tuple[str, str]]:
    """List the modules of the user, or of another package, that settings name.

    An entry has the setting, as the text ``KEY = VALUE``, and the module. Keys in ``without`` are
    left out.
    """
    named = []
    algo = str(config.get("algo"))
    if algo not in CATALOG:
        point = installed().get(algo)
        if point is not None:
            named.append((f"algo = {algo!r}", point.module))
    for key, name in _named_in(config):
        if key not in without:
            named.append((f"{key} = {name!r}", python_names.module_of(name)))
    return named


def own_code(config: Values, without: Collection[str] = AT_THE_SERVER) -> dict[str, str]:
    """Return the code version of each module of the user, or of another package, in ``config``.

    Keys in ``without`` are left out: by default those whose modules only the server imports.
    """
    return {module: version_of(module) for _, module in _modules_named(config, without)}


def code_at_server(config: Values) -> str:
    """Return the version of all code that computes at the server: ours, and named modules'.

    A callback is left out: it changes what is shown, and no result.
    """
    return "-".join([code_version(), *own_code(config, without=("callback",)).values()])


def _named_in(config: Values) -> Iterator[tuple[str, str]]:
    """Yield each key of a setting that names something as ``module:name``, and that name."""
    for key in ("metrics", "dataset", *NETWORKS, "callback"):
        for name in names_in(config.get(key)):
            is_of_a_hub = name.startswith("hf:")  # a data set of the Hugging Face hub
            if python_names.is_python_name(name) and not is_of_a_hub:
                yield key, name


def allow_named(config: Values) -> None:
    """Allow the modules that these settings name, that of a package's algorithm included.

    Call this only with settings that somebody has typed or submitted who may run code here: naming
    a module lets it be imported. No key is left out (``without=()``), as the modules that only a
    server imports are allowed, too.
    """
    modules = [module for _, module in _modules_named(config, without=())]
    python_names.allow(modules)


def check_named(config: Values) -> None:
    """Import what settings name as ``module:name``, before a run needs it.

    SettingsError if a module may not be imported, or has no such name; also for a network of
    torchvision or timm that is not installed. A data set's function is not imported here.
    """
    python_names.check_allowed(_modules_named(config, without=()))
    for key, name in _named_in({**config, "dataset": ""}):
        python_names.load(name, key)
    for _, name in _library_networks(config):
        from protofl_common.models.build import check_library  # PyTorch, seconds

        check_library(name)
