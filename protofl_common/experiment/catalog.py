"""The catalog: one row per algorithm. Its keys are the legal values of ``algo``.

A row says what the halves of an algorithm exchange, and the wire code (`wire`) enforces it in both
directions: nothing that a row does not declare can be packed or is accepted. The server half stands
in ``server_app/strategies``, the client half in ``client_app/algorithms``, in files of the
algorithm's name, unless the row names another's. Hyper-parameters are the table
``[tool.flwr.app.config.NAME]`` of pyproject.toml.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Literal, TypeVar

from protofl_common.config.architectures import (
    ARCHITECTURES,
    GAUSSIAN_HEADS,
    OTHER_NETWORKS,
    OTHER_NETWORKS_IN_WORDS,
)
from protofl_common.config.options import SettingsError, Table, did_you_mean, option, read_pairs
from protofl_common.config.python_names import check_modules
from protofl_common.wire import schema
from protofl_common.wire.schema import (
    Counts,
    Entry,
    Exchange,
    Moments,
    Update,
    Vectors,
    VectorSets,
    Weights,
)

GROUP = "protofl.algorithms"  # of the entry points of other packages
CLUSTERINGS = ("finch", "kmeans", "average")  # of `prototypes.cluster`


@dataclass(frozen=True)
class Hparams:
    """The hyper-parameters of an algorithm; this base has none."""

    def exchange(self, declared: Exchange) -> Exchange:
        """Return the exchange under these hyper-parameters; by default all that is ``declared``."""
        return declared

    def due(self, server_round: int, rounds: int) -> bool:
        """Return whether clients send prototypes in this round of ``rounds``."""
        return True

    @property
    def needs_last_round(self) -> str:
        """Say what to set so that a run may end early; "" where it may.

        Nothing is then done in the last round only.
        """
        return ""


class OwnHparams(Hparams, Table):
    """A base for algorithms here.

    Another package writes ``@dataclass(frozen=True)`` above a class of `Hparams`.
    """


class AlignmentHparams(OwnHparams):
    """Hyper-parameters of `losses.prototype_alignment`."""

    lambda_: float = option(minimum=0)
    distance: str = option(choices=("l2", "squared-l2", "l1", "mse"))
    granularity: str = option(choices=("class", "class-mean", "sample"))


class FedProtoHparams(AlignmentHparams):
    weighting: str = option(choices=("counts", "uniform"))

    def exchange(self, declared: Exchange) -> Exchange:
        """Counts travel only where they weigh."""
        prototypes = Vectors(counts=self.weighting == "counts")
        return Exchange(down=declared.down, up={**declared.up, "prototypes": prototypes})


class ServerTrainingHparams(OwnHparams):
    """Hyper-parameters of a server that trains on the clients' vectors."""

    server_epochs: int = option(minimum=1)
    server_lr: float = option(above=0)
    server_batch_size: int = option(minimum=0)


class FedTGPHparams(ServerTrainingHparams, AlignmentHparams):
    margin: str = option(choices=("adaptive", "nearest", "fixed", "none"))
    margin_threshold: float = option(minimum=0)
    transform: bool = option()


class ProtoFedHparams(OwnHparams):
    weighting = "uniform"  # fixed: no setting
    prototypes: str = option(choices=("last-round", "every-round"))

    def due(self, server_round: int, rounds: int) -> bool:
        return server_round == rounds or self.prototypes == "every-round"

    @property
    def needs_last_round(self) -> str:
        if self.prototypes == "every-round":
            return ""
        return "protofed.prototypes = 'every-round'"


class FedPCLHparams(OwnHparams):
    temperature: float = option(above=0)
    prototypes: str = option(choices=("both", "global", "local"))
    loss: str = option(choices=("contrast", "supcon", "ce-protodist", "ce"))
    denominator: str = option(choices=("others", "all"))

    def exchange(self, declared: Exchange) -> Exchange:
        """Without the clients' own sets where no loss looks at them."""
        if self.loss == "contrast" and self.prototypes != "global":
            return declared
        return Exchange(down={"prototypes": declared.down["prototypes"]}, up=declared.up)


class MPFTHparams(ServerTrainingHparams):
    sample_ratio: float = option(above=0, maximum=1)


class GaussianHparams(OwnHparams):
    head: str = option(choices=GAUSSIAN_HEADS)
    shrinkage: float = option(minimum=-1, maximum=1)
    priors: str = option(choices=("global", "personal"))
    revocable: bool = option()
    start_from: str = option()


class FedPLVMHparams(OwnHparams):
    lambda_: float = option(minimum=0)
    alpha: float = option(above=0, maximum=1)
    temperature: float = option(above=0)
    contrast: bool = option()
    correction: str = option(choices=("sum", "mean", "centre", "none"))
    similarity_floor: float = option(above=0, maximum=1)
    local_clusters: str = option(choices=CLUSTERINGS)
    global_clusters: str = option(choices=(*CLUSTERINGS, "none"))
    kmeans_clusters: int = option(minimum=0)


class FPLHparams(OwnHparams):
    global_clusters = "finch"  # fixed, like the next one: no settings
    kmeans_clusters = 0
    lambda_: float = option(minimum=0)
    temperature: float = option(above=0)
    contrast: bool = option()
    consistency: str = option(choices=("squared-l2", "mse", "none"))


class FedNHHparams(OwnHparams):
    smoothing: float = option(minimum=0, maximum=1)
    scale: float = option(above=0)


class FedORGPHparams(ServerTrainingHparams):
    lambda_: float = option(minimum=0)
    gamma: float = option(minimum=0)


class FedSAHparams(OwnHparams):
    regularization: float = option(minimum=0)
    contrast: float = option(minimum=0)
    calibration: float = option(minimum=0)
    smoothing: float = option(minimum=0, maximum=1)


class FedProxHparams(OwnHparams):
    mu: float = option(minimum=0)


class SCAFFOLDHparams(OwnHparams):
    server_lr: float = option(above=0)


class FedPerHparams(OwnHparams):
    personal_layers: int = option(minimum=0)

    def exchange(self, declared: Exchange) -> Exchange:
        """Without the personal layers, which are the last ones."""
        shared = {"weights": Weights(without_last=self.personal_layers)}
        return Exchange(down=shared, up=shared)


class FedRepHparams(OwnHparams):
    head_epochs: int = option(minimum=0)


class FedDistillHparams(OwnHparams):
    gamma: float = option(minimum=0)
    outputs: str = option(choices=("probabilities", "logits"))

    def exchange(self, declared: Exchange) -> Exchange:
        """Logits need not be probabilities."""
        if self.outputs == "probabilities":
            return declared
        return Exchange(down=declared.down, up=declared.down)


class FMLHparams(OwnHparams):
    alpha: float = option(minimum=0, maximum=1)
    beta: float = option(minimum=0, maximum=1)
    meme: str = option(
        choices=("", *ARCHITECTURES), or_like=OTHER_NETWORKS, or_words=OTHER_NETWORKS_IN_WORDS
    )
    mutual: str = option(choices=("detached", "coupled"))


class FedGenHparams(OwnHparams):
    lambda_: float = option(minimum=0)
    noise_dim: int = option(minimum=1, maximum=4096)
    server_steps: int = option(minimum=1)
    server_lr: float = option(above=0)
    server_batch_size: int = option(minimum=2)


class FeSEMHparams(OwnHparams):
    centres: int = option(minimum=1)


class FedKDHparams(OwnHparams):
    student: str = option(
        choices=("", *ARCHITECTURES), or_like=OTHER_NETWORKS, or_words=OTHER_NETWORKS_IN_WORDS
    )
    energy_start: float = option(above=0, maximum=1)
    energy_end: float = option(above=0, maximum=1)

    def energy(self, server_round: int, rounds: int) -> float:
        """T of a round; both halves ask here."""
        growth = self.energy_end - self.energy_start
        return self.energy_start + growth * server_round / rounds


class FedFAHparams(OwnHparams):
    probability: float = option(minimum=0, maximum=1)


class PerFedAvgHparams(OwnHparams):
    alpha: float = option(minimum=0)


class DittoHparams(OwnHparams):
    lambda_: float = option(minimum=0)


class PFedMeHparams(DittoHparams):
    personal_steps: int = option(minimum=1)
    eta: float = option(above=0)
    beta: float = option(above=0)


@dataclass(frozen=True)
class Algorithm:
    """A row: an algorithm's two halves, and what a run with it may do."""

    title: str
    paper: str
    client: str = ""
    """Its client half, ``module:Class``; in the rows below, the name of the row whose half it is,
    and "" for its own."""
    server: str = ""
    """Its server half, likewise; where it adds nothing, the one that it inherits."""
    hparams: type[Hparams] = Hparams
    exchange: Exchange = field(default_factory=Exchange)
    losses: tuple[str, ...] = ("cross-entropy",)
    """Names of the loss terms that its clients report."""
    averages_prototypes: bool = False
    """The server takes a mean over the clients' prototypes of a class, which ``merging`` replaces;
    where it trains on prototypes or clusters them, ``merging`` leaves out those far from the other
    clients' (`aggregation.py`)."""
    supports: tuple[Literal["merging", "secagg"], ...] = ()
    """Settings that the server half was written for: ``merging`` acts in its `merge`; with
    ``secagg`` that takes one upload, the mean of all. Any other value of these is refused."""
    single_uploads: str = ""
    """What the server needs single uploads for, beside what `exchange` shows; "": nothing."""
    private: tuple[str, ...] = ()
    """Entries of the upload that differential privacy covers: weights that `PrivateStep` alone has
    trained, and tables of classes with noise. An algorithm that sends any other is refused under
    ``dp``."""
    one_shot: bool = False
    """A client trains nothing, so its upload is the same in every round."""
    frozen_backbones: bool = False
    """Frozen backbones are used unless the settings say otherwise."""

    def needs_single_uploads(self, exchange: Exchange) -> str:
        """Say why sums over the clients are not enough for a server that exchanges this, or ""."""
        if any(entry.shows_single_clients for entry in exchange.down.values()):
            return "its clients receive one another's prototypes"
        vectors_up = schema.vectors_in(exchange.up)
        if vectors_up and not self.averages_prototypes:
            return "its server does more with the clients' prototypes than average them"
        if any(entry.several for entry in vectors_up.values()):
            return "a sum has one vector of each class, where its clients send several"
        if self.single_uploads:
            return self.single_uploads
        if exchange.up and "secagg" not in self.supports:
            return "its row does not declare support for secagg"
        return ""

    @property
    def reported_losses(self) -> tuple[str, ...]:
        return ("total", "unlabelled", *self.losses)  # FedPU's term, of any algorithm

    @property
    def tells_classes(self) -> bool:
        """Return whether uploads tell which classes a client holds.

        It must then say so before the first round.
        """
        return any(entry.shows_classes for entry in self.exchange.up.values())


Half = TypeVar("Half")


def half(path: str, kind: type[Half]) -> type[Half]:
    """The class ``module:Class``, or the last of this ``kind`` that ``module`` defines.

    SettingsError where there is none.
    """
    module_name, _, name = path.partition(":")
    try:
        module = import_module(module_name)
        chosen = getattr(module, name) if name else _last_defined(kind, module)
    except Exception as error:  # a package's module may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise SettingsError(f"{path!r} in an algorithm's row: {reason}") from error
    if not (isinstance(chosen, type) and issubclass(chosen, kind)):
        found = f"{name or 'nothing'} is no subclass of {kind.__name__}"
        raise SettingsError(f"{path!r} in an algorithm's row: {found}")
    return chosen


def _last_defined(kind: type, module: ModuleType) -> type | None:
    for value in reversed(vars(module).values()):
        if not isinstance(value, type) or not issubclass(value, kind):
            continue
        if value.__module__ == module.__name__:
            return value
    return None


CE = "cross-entropy"

# -- what travels, in the words of the rows below
MODEL: dict[str, Entry] = {"weights": Weights()}
HEAD: dict[str, Entry] = {"weights": Weights(parts=("head.",))}
BODY: dict[str, Entry] = {"weights": Weights(parts=("body.",))}
BASE: dict[str, Entry] = {"weights": Weights(without_last=1)}
NO_NORMS: dict[str, Entry] = {"weights": Weights(normalisation=False)}
MEME: dict[str, Entry] = {
    "weights": Weights("meme", meaning="all weights of the meme, a shared model")
}
MEANS: dict[str, Entry] = {"prototypes": Vectors()}
COUNTED_MEANS: dict[str, Entry] = {"prototypes": Vectors(counts=True)}
SEVERAL: dict[str, Entry] = {"prototypes": Vectors(several=True)}

_ROWS = {
    "local": Algorithm(
        title="Local",
        paper="baseline: every client trains alone",
        client="base",
        server="base",
    ),
    "fedavg": Algorithm(
        title="FedAvg",
        paper="McMahan et al., AISTATS 2017",
        exchange=Exchange(down=MODEL, up=MODEL),
        supports=("merging", "secagg"),
        private=("weights",),
    ),
    "fedproto": Algorithm(
        title="FedProto",
        paper="Tan et al., AAAI 2022",
        hparams=FedProtoHparams,
        exchange=Exchange(down=MEANS, up=COUNTED_MEANS),
        losses=(CE, "prototype"),
        averages_prototypes=True,
        supports=("merging", "secagg"),
        private=("prototypes",),
    ),
    "fedtgp": Algorithm(
        title="FedTGP",
        paper="Zhang et al., AAAI 2024",
        client="fedproto",
        hparams=FedTGPHparams,
        exchange=Exchange(down=MEANS, up=MEANS),
        losses=(CE, "prototype"),
        supports=("merging",),
        private=("prototypes",),
    ),
    "fedpcl": Algorithm(
        title="FedPCL",
        paper="Tan et al., NeurIPS 2022",
        hparams=FedPCLHparams,
        exchange=Exchange(down=MEANS | {"local_sets": VectorSets()}, up=COUNTED_MEANS),
        losses=("contrast", "global", "local", CE, "prototype"),
        averages_prototypes=True,
        frozen_backbones=True,
        supports=("merging", "secagg"),
        private=("prototypes",),
    ),
    "mpft": Algorithm(
        title="MPFT",
        paper="Zhang et al., ICLR 2025",
        hparams=MPFTHparams,
        exchange=Exchange(down=MODEL, up={"prototypes": Vectors(width="backbones", several=True)}),
        losses=(),
        frozen_backbones=True,
        supports=("merging",),
    ),
    "gaussian": Algorithm(
        title="Gaussian head",
        paper="FedCGS, Guan et al., AAAI 2025",
        hparams=GaussianHparams,
        exchange=Exchange(
            down={"moments": Moments(), "counts": Counts()}, up={"moments": Moments()}
        ),
        losses=(),
        one_shot=True,
        frozen_backbones=True,
        supports=("secagg",),
        private=("moments",),
    ),
    "fedplvm": Algorithm(
        title="FedPLVM",
        paper="Wang et al., NeurIPS 2024",
        hparams=FedPLVMHparams,
        exchange=Exchange(down=MODEL | SEVERAL, up=MODEL | SEVERAL),
        losses=(CE, "contrast", "correction"),
        supports=("merging",),
    ),
    "fpl": Algorithm(
        title="FPL",
        paper="Huang et al., CVPR 2023",
        server="fedplvm",
        hparams=FPLHparams,
        exchange=Exchange(down=MODEL | SEVERAL, up=MODEL | MEANS),
        losses=(CE, "contrast", "consistency"),
        supports=("merging",),
        private=("weights", "prototypes"),
    ),
    "protofed": Algorithm(
        title="ProtoFed",
        paper="Qiao et al., Prototype Helps Federated Learning, 2023",
        client="fedavg",
        server="fedproto-avg",
        hparams=ProtoFedHparams,
        exchange=Exchange(down=MODEL | MEANS, up=MODEL | MEANS),
        averages_prototypes=True,
        supports=("merging", "secagg"),
        private=("weights", "prototypes"),
    ),
    "fedproto-avg": Algorithm(
        title="FedProto + averaging",
        paper="FedProto with FedAvg's model, a baseline of FedPLVM",
        hparams=FedProtoHparams,
        exchange=Exchange(down=MODEL | MEANS, up=MODEL | COUNTED_MEANS),
        losses=(CE, "prototype"),
        averages_prototypes=True,
        supports=("merging", "secagg"),
        private=("weights", "prototypes"),
    ),
    "fednh": Algorithm(
        title="FedNH",
        paper="Dai et al., AAAI 2023",
        hparams=FedNHHparams,
        exchange=Exchange(down=MODEL | MEANS, up=MODEL | COUNTED_MEANS),
        averages_prototypes=True,
        supports=("merging",),
        private=("weights", "prototypes"),
        single_uploads="its server scales every client's prototypes to length 1",
    ),
    "fedorgp": Algorithm(
        title="FedORGP",
        paper="Guo et al., 2025",
        hparams=FedORGPHparams,
        exchange=Exchange(down=MEANS, up=MEANS),
        losses=(CE, "prototype"),
        supports=("merging",),
        private=("prototypes",),
    ),
    "fedsa": Algorithm(
        title="FedSA",
        paper="Zhou et al., AAAI 2025",
        hparams=FedSAHparams,
        exchange=Exchange(down={"anchors": Vectors()} | MEANS, up=MEANS),
        losses=(CE, "regularization", "contrast", "calibration"),
        averages_prototypes=True,
        supports=("merging", "secagg"),
        private=("prototypes",),
    ),
    "fedprox": Algorithm(
        title="FedProx",
        paper="Li et al., MLSys 2020",
        server="fedavg",
        hparams=FedProxHparams,
        exchange=Exchange(down=MODEL, up=MODEL),
        losses=(CE, "proximal"),
        supports=("merging", "secagg"),
        private=("weights",),
    ),
    "scaffold": Algorithm(
        title="SCAFFOLD",
        paper="Karimireddy et al., ICML 2020",
        hparams=SCAFFOLDHparams,
        exchange=Exchange(
            down=MODEL
            | {"control": Weights("control", meaning="the mean of all control variates")},
            up=MODEL | {"control": Weights("change", meaning="the change of its control variate")},
        ),
        supports=("merging",),
        private=("weights", "control"),
        single_uploads="its server gives every client the same weight",
    ),
    "fedbn": Algorithm(
        title="FedBN",
        paper="Li et al., ICLR 2021",
        client="base",
        server="fedavg",
        exchange=Exchange(down=NO_NORMS, up=NO_NORMS),
        supports=("merging", "secagg"),
        private=("weights",),
    ),
    "fedper": Algorithm(
        title="FedPer",
        paper="Arivazhagan et al., 2019",
        client="base",
        server="fedavg",
        hparams=FedPerHparams,
        exchange=Exchange(down=BASE, up=BASE),
        supports=("merging", "secagg"),
        private=("weights",),
    ),
    "lg-fedavg": Algorithm(
        title="LG-FedAvg",
        paper="Liang et al., 2020",
        client="base",
        server="fedavg",
        exchange=Exchange(down=HEAD, up=HEAD),
        supports=("merging", "secagg"),
        private=("weights",),
    ),
    "fedrep": Algorithm(
        title="FedRep",
        paper="Collins et al., ICML 2021",
        server="fedavg",
        hparams=FedRepHparams,
        exchange=Exchange(down=BODY, up=BODY),
        supports=("merging", "secagg"),
    ),
    "feddistill": Algorithm(
        title="FedDistill",
        paper="FD; Jeong et al., 2018",
        hparams=FedDistillHparams,
        exchange=Exchange(
            down={"outputs": Vectors(width="classes")},
            up={"outputs": Vectors(width="classes", probabilities=True)},
        ),
        losses=(CE, "distillation"),
        averages_prototypes=True,
        supports=("merging",),
        single_uploads="what teaches a client is the mean of the others' outputs",
    ),
    "fml": Algorithm(
        title="FML",
        paper="Shen et al., 2020",
        server="fedavg",
        hparams=FMLHparams,
        exchange=Exchange(down=MEME, up=MEME),
        losses=(CE, "mutual", "meme-cross-entropy", "meme-mutual"),
        supports=("merging", "secagg"),
        private=("weights",),
    ),
    "fedgh": Algorithm(
        title="FedGH",
        paper="Yi et al., ACM Multimedia 2023",
        client="base",
        hparams=ServerTrainingHparams,
        exchange=Exchange(down=HEAD, up=MEANS),
        supports=("merging",),
        private=("prototypes",),
    ),
    "fedgen": Algorithm(
        title="FedGen",
        paper="Zhu et al., ICML 2021",
        hparams=FedGenHparams,
        exchange=Exchange(
            down=HEAD | {"generator": Weights(of="generator"), "label_counts": Counts()},
            up=HEAD | {"label_counts": Counts()},
        ),
        losses=(CE, "generated"),
        supports=("merging", "secagg"),
        private=("weights", "label_counts"),
    ),
    "fesem": Algorithm(
        title="FeSEM",
        paper="Xie et al., Multi-Center Federated Learning, 2020",
        client="fedavg",
        hparams=FeSEMHparams,
        exchange=Exchange(down=MODEL, up=MODEL),
        supports=("merging",),
        private=("weights",),
        single_uploads="its server groups the clients by their models",
    ),
    "fedkd": Algorithm(
        title="FedKD",
        paper="Wu et al., Nature Communications 2022",
        hparams=FedKDHparams,
        exchange=Exchange(
            down={"weights": Weights(of="student"), "update": Update(of="student")},
            up={"weights": Update(of="student")},
        ),
        losses=(
            CE,
            "mutual",
            "hidden",
            "student-cross-entropy",
            "student-mutual",
            "student-hidden",
        ),
        supports=("merging",),
        private=("weights",),
        single_uploads="its updates travel as factors, which cannot be added",
    ),
    "fedfa": Algorithm(
        title="FedFA",
        paper="Zhou & Konukoglu, ICLR 2023",
        hparams=FedFAHparams,
        exchange=Exchange(
            down=MODEL
            | {
                "coefficients": Weights(
                    "augmentation", ("coefficients.",), meaning="how much feature maps vary"
                )
            },
            up=MODEL
            | {
                "averages": Weights(
                    "augmentation", ("averages.",), meaning="means and spreads of feature maps"
                )
            },
        ),
        supports=("merging",),
        single_uploads="its server takes the variance over the clients",
    ),
    "per-fedavg": Algorithm(
        title="Per-FedAvg",
        paper="Fallah et al., NeurIPS 2020",
        server="fedavg",
        hparams=PerFedAvgHparams,
        exchange=Exchange(down=MODEL, up=MODEL),
        supports=("merging", "secagg"),
    ),
    "ditto": Algorithm(
        title="Ditto",
        paper="Li et al., ICML 2021",
        server="fedavg",
        hparams=DittoHparams,
        exchange=Exchange(down=MODEL, up=MODEL),
        losses=(CE, "global-cross-entropy"),
        supports=("merging", "secagg"),
    ),
    "pfedme": Algorithm(
        title="pFedMe",
        paper="Dinh et al., NeurIPS 2020",
        hparams=PFedMeHparams,
        exchange=Exchange(down=MODEL, up=MODEL),
        supports=("merging", "secagg"),
    ),
}


def _with_modules(name: str, row: Algorithm) -> Algorithm:
    """``row`` with the modules of its halves, in the place of names of rows."""
    client = (row.client or name).replace("-", "_")
    server = (row.server or name).replace("-", "_")
    return replace(
        row,
        client=f"client_app.algorithms.{client}",
        server=f"server_app.strategies.{server}",
    )


CATALOG: dict[str, Algorithm] = {name: _with_modules(name, row) for name, row in _ROWS.items()}


# -- algorithms of other packages: entry points, each a row; their hyper-parameters come from the
# setting ``hparams``
def installed() -> dict[str, EntryPoint]:
    """The entry points by name; those of the catalog's names are not used."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in CATALOG}


@cache
def algorithm_named(name: str) -> Algorithm:
    """The row of an algorithm: of the catalog, or of a package, which is imported now.

    SettingsError where there is none, or where nobody who may say so has named the package: the
    name may stand in a stranger's recipe or table. What is imported stays so: the row is kept.
    """
    if name in CATALOG:
        return CATALOG[name]
    packages = installed()
    if name not in packages:
        names = [*CATALOG, *packages]
        choices = f"{', '.join(names)}{did_you_mean(name, names)}; a package may bring others"
        raise SettingsError(f"algo = {name!r}: choose one of {choices}")
    point = packages[name]
    check_modules([(f"algo = {name!r}", point.module)])
    try:
        row = point.load()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise SettingsError(f"algo = {name!r}: {point.value}: {reason}") from error
    if not isinstance(row, Algorithm):
        kind = type(row).__name__
        raise SettingsError(f"algo = {name!r}: {point.value} is a {kind}, not an Algorithm")
    return row


def read_hparams(row: Algorithm, text: str) -> Hparams:
    """The hyper-parameters of a package's algorithm: its defaults, and what ``text`` changes.

    ``text`` is the setting ``hparams``, such as ``"mu=5.0, margin=none"``.
    """
    is_table = issubclass(row.hparams, Hparams) and "__dataclass_fields__" in vars(row.hparams)
    if not is_table:
        name = row.hparams.__name__
        raise SettingsError(f"hparams: write @dataclass(frozen=True) above class {name}(Hparams)")
    return read_pairs(row.hparams, "hparams", text)
