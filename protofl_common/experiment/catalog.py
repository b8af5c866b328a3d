"""The catalog: one row per algorithm. Its keys are the legal values of ``algo``.

A row says what the halves of an algorithm exchange, and the wire code (`wire`) enforces it in both directions:
nothing that a row does not declare can be packed or is accepted. The server half stands in ``server_app/strategies``,
the client half in ``client_app/algorithms``, in files of the algorithm's name, unless the row names another's.
Hyper-parameters are the table ``[tool.flwr.app.config.NAME]`` of pyproject.toml.
"""

from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Literal, TypeVar

from protofl_common.config.architectures import ARCHITECTURES, GAUSSIAN_HEADS, OR_ANOTHER
from protofl_common.config.options import SettingsError, Table, did_you_mean, option, read_pairs
from protofl_common.config.python_names import at_worker, check_allowed
from protofl_common.wire import schema
from protofl_common.wire.schema import Counts, Entry, Exchange, Moments, Update, Vectors, VectorSets, Weights

GROUP = "protofl.algorithms"  # of the entry points of other packages
CLUSTERINGS = ("finch", "kmeans", "average")  # of `prototypes.cluster`


@dataclass(frozen=True)
class Hparams:
    """The hyper-parameters of an algorithm; this base has none."""

    def exchange(self, declared: Exchange) -> Exchange:
        """Return the exchange under these hyper-parameters; the default: all that the row declares."""
        return declared

    def due(self, server_round: int, rounds: int) -> bool:
        """Return whether clients send prototypes in this round of ``rounds``."""
        return True

    @property
    def needs_last_round(self) -> str:
        """Say what to set so that a run may end early; "" where nothing is done in the last round only."""
        return ""


class OwnHparams(Hparams, Table):
    """A base for algorithms here; another package writes ``@dataclass(frozen=True)`` above a class of `Hparams`."""


class AlignmentHparams(OwnHparams):
    """Hyper-parameters of `losses.prototype_alignment`."""

    lambda_: float = option(minimum=0)
    distance: str = option(choices=("l2", "squared-l2", "l1", "mse"))
    granularity: str = option(choices=("class", "class-mean", "sample"))


class FedProtoHparams(AlignmentHparams):
    weighting: str = option(choices=("counts", "uniform"))

    def exchange(self, declared: Exchange) -> Exchange:
        """Counts travel only where they weigh."""
        counted = Vectors(counts=self.weighting == "counts")
        return Exchange(down=declared.down, up={**declared.up, "prototypes": counted})


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
        return "" if self.prototypes == "every-round" else "protofed.prototypes = 'every-round'"


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
    global_clusters, kmeans_clusters = "finch", 0  # fixed: no settings
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
        return declared if self.outputs == "probabilities" else Exchange(down=declared.down, up=declared.down)


class FMLHparams(OwnHparams):
    alpha: float = option(minimum=0, maximum=1)
    beta: float = option(minimum=0, maximum=1)
    meme: str = option(choices=("", *ARCHITECTURES), **OR_ANOTHER)
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
    student: str = option(choices=("", *ARCHITECTURES), **OR_ANOTHER)
    energy_start: float = option(above=0, maximum=1)
    energy_end: float = option(above=0, maximum=1)

    def energy(self, server_round: int, rounds: int) -> float:
        """T of a round; both halves ask here."""
        return self.energy_start + (self.energy_end - self.energy_start) * server_round / rounds


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
    title: str
    paper: str
    client: str = ""  # its client half, ``module:Class``; of a row here whose half it is, "" for its own
    server: str = ""  # its server half; where it adds nothing, the one that it inherits
    hparams: type[Hparams] = Hparams
    exchange: Exchange = field(default_factory=Exchange)
    losses: tuple[str, ...] = ("cross-entropy",)  # names of the loss terms that its clients report
    averages_prototypes: bool = False
    """The server takes a mean over the clients' prototypes of a class, which ``merging`` replaces; where it trains on
    prototypes or clusters them, ``merging`` leaves out those far from the other clients' (`aggregation.py`)."""
    supports: tuple[Literal["merging", "secagg"], ...] = ()
    """Settings that the server half was written for: ``merging`` acts in its `merge`; with ``secagg`` that takes one
    upload, the mean of all. Any other value of these is refused."""
    single_uploads: str = ""  # what the server needs them for, beside what `exchange` shows; "": nothing
    private: tuple[str, ...] = ()
    """Entries of the upload that differential privacy covers: weights that `PrivateStep` alone has trained, and tables
    of classes with noise. An algorithm that sends any other is refused under ``dp``."""
    one_shot: bool = False  # a client trains nothing, so its upload is the same in every round
    frozen_backbones: bool = False  # used unless the settings say otherwise

    def needs_single_uploads(self, exchange: Exchange) -> str:
        """Why sums over the clients are not enough for the server, where it exchanges this; "" if they are."""
        if any(entry.of_each_client for entry in exchange.down.values()):
            return "its clients receive one another's prototypes"
        if not self.averages_prototypes and schema.vectors_in(exchange.up):
            return "its server does more with the clients' prototypes than average them"
        if any(entry.several for entry in schema.vectors_in(exchange.up).values()):
            return "a sum has one vector of each class, where its clients send several"
        if self.single_uploads or not exchange.up or "secagg" in self.supports:
            return self.single_uploads
        return "its row does not declare support for secagg"

    @property
    def reported_losses(self) -> tuple[str, ...]:
        return ("total", "unlabelled", *self.losses)  # FedPU's term, of any algorithm

    @property
    def tells_classes(self) -> bool:
        """Return whether uploads tell which classes a client holds, which it must then say before the first round."""
        return any(entry.of_classes for entry in self.exchange.up.values())


Half = TypeVar("Half")


def half(path: str, kind: type[Half]) -> type[Half]:
    """The class ``module:Class``, or the last of this ``kind`` that ``module`` defines; SettingsError without one."""
    module, _, name = path.partition(":")
    try:
        loaded = import_module(module)
        own = (each for each in reversed(vars(loaded).values()) if getattr(each, "__module__", "") == module)
        fitting = (each for each in own if isinstance(each, type) and issubclass(each, kind))
        chosen = getattr(loaded, name) if name else next(fitting, None)
    except Exception as error:  # a package's module may raise anything
        raise SettingsError(f"{path!r} in an algorithm's row: {type(error).__name__}: {error}") from error
    if not (isinstance(chosen, type) and issubclass(chosen, kind)):
        raise SettingsError(f"{path!r} in an algorithm's row: {name or 'nothing'} is no subclass of {kind.__name__}")
    return chosen


MODEL: dict[str, Entry] = {"weights": Weights()}
HEAD: dict[str, Entry] = {"weights": Weights(parts=("head.",))}
MEANS: dict[str, Entry] = {"prototypes": Vectors()}
COUNTED: dict[str, Entry] = {"prototypes": Vectors(counts=True)}
SEVERAL: dict[str, Entry] = {"prototypes": Vectors(several=True)}
BODY: dict[str, Entry] = {"weights": Weights(parts=("body.",))}
BASE: dict[str, Entry] = {"weights": Weights(without_last=1)}
NO_NORMS: dict[str, Entry] = {"weights": Weights(normalisation=False)}
OUTPUTS = Vectors(width="classes")
CE = "cross-entropy"
of_models = partial(Algorithm, exchange=Exchange(MODEL, MODEL), supports=("merging", "secagg"))
of_private_models = partial(of_models, private=("weights",))
of_clients = partial(of_models, server="fedavg")  # what is new is the clients' half
of_private_clients = partial(of_clients, private=("weights",))
of_parts = partial(of_private_clients, client="base")  # clients train alone, and share a part
of_merging = partial(Algorithm, supports=("merging",))
of_prototypes = partial(of_merging, exchange=Exchange(MEANS, MEANS), losses=(CE, "prototype"), private=("prototypes",))
of_means = partial(of_prototypes, averages_prototypes=True, supports=("merging", "secagg"))
of_both = partial(of_means, exchange=Exchange(MODEL | MEANS, MODEL | MEANS), private=("weights", "prototypes"))
of_frozen = partial(Algorithm, losses=(), frozen_backbones=True)
_ROWS = {
    "local": Algorithm("Local", "baseline: every client trains alone", client="base", server="base"),
    "fedavg": of_private_models("FedAvg", "McMahan et al., AISTATS 2017"),
    "fedproto": of_means(
        "FedProto", "Tan et al., AAAI 2022", hparams=FedProtoHparams, exchange=Exchange(MEANS, COUNTED)
    ),
    "fedtgp": of_prototypes("FedTGP", "Zhang et al., AAAI 2024", client="fedproto", hparams=FedTGPHparams),
    "fedpcl": of_means(
        "FedPCL",
        "Tan et al., NeurIPS 2022",
        hparams=FedPCLHparams,
        exchange=Exchange({**MEANS, "local_sets": VectorSets()}, COUNTED),
        losses=("contrast", "global", "local", CE, "prototype"),
        frozen_backbones=True,
    ),
    "mpft": of_frozen(
        "MPFT",
        "Zhang et al., ICLR 2025",
        hparams=MPFTHparams,
        exchange=Exchange(MODEL, {"prototypes": Vectors(width="backbones", several=True)}),
        supports=("merging",),
    ),
    "gaussian": of_frozen(
        "Gaussian head",
        "FedCGS, Guan et al., AAAI 2025",
        hparams=GaussianHparams,
        exchange=Exchange({"moments": Moments(), "counts": Counts()}, {"moments": Moments()}),
        private=("moments",),
        one_shot=True,
        supports=("secagg",),
    ),
    "fedplvm": of_merging(
        "FedPLVM",
        "Wang et al., NeurIPS 2024",
        hparams=FedPLVMHparams,
        exchange=Exchange(MODEL | SEVERAL, MODEL | SEVERAL),
        losses=(CE, "contrast", "correction"),
    ),
    "fpl": of_merging(
        "FPL",
        "Huang et al., CVPR 2023",
        server="fedplvm",
        hparams=FPLHparams,
        exchange=Exchange(MODEL | SEVERAL, MODEL | MEANS),
        losses=(CE, "contrast", "consistency"),
        private=("weights", "prototypes"),
    ),
    "protofed": of_both(
        "ProtoFed",
        "Qiao et al., Prototype Helps Federated Learning, 2023",
        client="fedavg",
        server="fedproto-avg",
        hparams=ProtoFedHparams,
        losses=(CE,),
    ),
    "fedproto-avg": of_both(
        "FedProto + averaging",
        "FedProto with FedAvg's model, a baseline of FedPLVM",
        hparams=FedProtoHparams,
        exchange=Exchange(MODEL | MEANS, MODEL | COUNTED),
    ),
    "fednh": of_both(
        "FedNH",
        "Dai et al., AAAI 2023",
        hparams=FedNHHparams,
        exchange=Exchange(MODEL | MEANS, MODEL | COUNTED),
        losses=(CE,),
        single_uploads="its server scales every client's prototypes to length 1",
        supports=("merging",),
    ),
    "fedorgp": of_prototypes("FedORGP", "Guo et al., 2025", hparams=FedORGPHparams),
    "fedsa": of_means(
        "FedSA",
        "Zhou et al., AAAI 2025",
        hparams=FedSAHparams,
        exchange=Exchange({"anchors": Vectors()} | MEANS, MEANS),
        losses=(CE, "regularization", "contrast", "calibration"),
    ),
    "fedprox": of_private_clients("FedProx", "Li et al., MLSys 2020", hparams=FedProxHparams, losses=(CE, "proximal")),
    "scaffold": of_merging(
        "SCAFFOLD",
        "Karimireddy et al., ICML 2020",
        hparams=SCAFFOLDHparams,
        exchange=Exchange(
            MODEL | {"control": Weights("control", meaning="the mean of all control variates")},
            MODEL | {"control": Weights("change", meaning="the change of its control variate")},
        ),
        single_uploads="its server gives every client the same weight",
        private=("weights", "control"),
    ),
    "fedbn": of_parts("FedBN", "Li et al., ICLR 2021", exchange=Exchange(NO_NORMS, NO_NORMS)),
    "fedper": of_parts("FedPer", "Arivazhagan et al., 2019", hparams=FedPerHparams, exchange=Exchange(BASE, BASE)),
    "lg-fedavg": of_parts("LG-FedAvg", "Liang et al., 2020", exchange=Exchange(HEAD, HEAD)),
    "fedrep": of_clients("FedRep", "Collins et al., ICML 2021", hparams=FedRepHparams, exchange=Exchange(BODY, BODY)),
    "feddistill": of_merging(
        "FedDistill",
        "FD; Jeong et al., 2018",
        hparams=FedDistillHparams,
        exchange=Exchange({"outputs": OUTPUTS}, {"outputs": replace(OUTPUTS, probabilities=True)}),
        losses=(CE, "distillation"),
        averages_prototypes=True,
        single_uploads="what teaches a client is the mean of the others' outputs",
    ),
    "fml": of_private_clients(
        "FML",
        "Shen et al., 2020",
        hparams=FMLHparams,
        exchange=Exchange(*[{"weights": Weights("meme", meaning="all weights of the meme, a shared model")}] * 2),
        losses=(CE, "mutual", "meme-cross-entropy", "meme-mutual"),
    ),
    "fedgh": of_prototypes(
        "FedGH",
        "Yi et al., ACM Multimedia 2023",
        client="base",
        hparams=ServerTrainingHparams,
        exchange=Exchange(HEAD, MEANS),
        losses=(CE,),
    ),
    "fedgen": Algorithm(
        "FedGen",
        "Zhu et al., ICML 2021",
        hparams=FedGenHparams,
        exchange=Exchange(
            HEAD | {"generator": Weights(of="generator"), "label_counts": Counts()}, HEAD | {"label_counts": Counts()}
        ),
        losses=(CE, "generated"),
        private=("weights", "label_counts"),
        supports=("merging", "secagg"),
    ),
    "fesem": of_private_models(
        "FeSEM",
        "Xie et al., Multi-Center Federated Learning, 2020",
        client="fedavg",
        hparams=FeSEMHparams,
        single_uploads="its server groups the clients by their models",
        supports=("merging",),
    ),
    "fedkd": of_merging(
        "FedKD",
        "Wu et al., Nature Communications 2022",
        hparams=FedKDHparams,
        exchange=Exchange(
            {"weights": Weights(of="student"), "update": Update(of="student")}, {"weights": Update(of="student")}
        ),
        losses=(CE, "mutual", "hidden", "student-cross-entropy", "student-mutual", "student-hidden"),
        single_uploads="its updates travel as factors, which cannot be added",
        private=("weights",),
    ),
    "fedfa": of_merging(
        "FedFA",
        "Zhou & Konukoglu, ICLR 2023",
        hparams=FedFAHparams,
        exchange=Exchange(
            MODEL | {"coefficients": Weights("augmentation", ("coefficients.",), meaning="how much feature maps vary")},
            MODEL | {"averages": Weights("augmentation", ("averages.",), meaning="means and spreads of feature maps")},
        ),
        single_uploads="its server takes the variance over the clients",
    ),
    "per-fedavg": of_clients("Per-FedAvg", "Fallah et al., NeurIPS 2020", hparams=PerFedAvgHparams),
    "ditto": of_clients("Ditto", "Li et al., ICML 2021", hparams=DittoHparams, losses=(CE, "global-cross-entropy")),
    "pfedme": of_models("pFedMe", "Dinh et al., NeurIPS 2020", hparams=PFedMeHparams),
}
CATALOG: dict[str, Algorithm] = {
    name: replace(
        row,
        client=f"client_app.algorithms.{(row.client or name).replace('-', '_')}",
        server=f"server_app.strategies.{(row.server or name).replace('-', '_')}",
    )
    for name, row in _ROWS.items()
}


# -- algorithms of other packages: entry points, each a row; their hyper-parameters come from the setting ``hparams``
def installed() -> dict[str, EntryPoint]:
    """The entry points by name; those of the catalog's names are not used."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in CATALOG}


@cache
def algorithm_named(name: str) -> Algorithm:
    """The row of an algorithm: of the catalog, or of a package, which is imported now; SettingsError without any."""
    if name in CATALOG:
        return CATALOG[name]
    if name not in (packages := installed()):
        names = [*CATALOG, *packages]
        choices = f"{', '.join(names)}{did_you_mean(name, names)}; a package may bring others"
        raise SettingsError(f"algo = {name!r}: choose one of {choices}")
    if at_worker():
        check_allowed(("algo", packages[name].value))
    try:
        row = packages[name].load()
    except Exception as error:
        raise SettingsError(f"algo = {name!r}: {packages[name].value}: {type(error).__name__}: {error}") from error
    if not isinstance(row, Algorithm):
        raise SettingsError(f"algo = {name!r}: {packages[name].value} is a {type(row).__name__}, not an Algorithm")
    return row


def read_hparams(row: Algorithm, text: str) -> Hparams:
    """The hyper-parameters of a package's algorithm: its defaults, and ``hparams`` (``"mu=5.0, margin=none"``)."""
    if not (issubclass(row.hparams, Hparams) and "__dataclass_fields__" in vars(row.hparams)):
        raise SettingsError(f"hparams: write @dataclass(frozen=True) above class {row.hparams.__name__}(Hparams)")
    return read_pairs(row.hparams, "hparams", text)
