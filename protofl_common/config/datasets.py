"""The legal values of ``dataset`` and ``partition``: a row each, with all that is known of it.

How a data set is read stands in `data/sources.py` and `data/published.py`, how a partition divides
in `data/partitions.py`. No heavy imports here.
"""

import re
from dataclasses import dataclass

from protofl_common.config.python_names import PYTHON_NAME

# what else ``dataset`` may be
OTHER_DATASETS = re.compile(rf"{PYTHON_NAME.pattern}|hf:[\w./-]+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set that ``dataset`` can name."""

    help: str
    files: str = ""
    """For people: what lies in ``data-dir``; "" where it is embedded, or of the user's own."""
    is_own: bool = False
    """Files of the user's own, whose classes and domains then have names of their own."""
    num_classes: int = 0
    """Their number where it is known without reading; 0 where the data decide."""
    has_domains: bool = False
    """The data come, or may come, in domains."""
    has_official: bool = False
    """The data come, or may come, with an official test part."""
    shares_parts: bool = False
    """Samples are made of the same things, but for those of the official test part."""
    tasks: tuple[str, ...] = ("single-label",)
    """Values of the setting ``task`` that fit: whether a sample has one label, or several."""


_ONE_OR_SEVERAL = ("single-label", "multi-label")


def _torchvision(help: str, num_classes: int = 10) -> DataSet:
    """Return the row of a data set that torchvision offers."""
    return DataSet(
        help=help,
        files="torchvision's; downloaded only with `download=true`",
        num_classes=num_classes,
        has_official=True,
    )


DATASETS: dict[str, DataSet] = {
    "digits": DataSet(
        help="scikit-learn's 1,797 handwritten digits, 8×8 grey (embedded)",
        num_classes=10,
    ),
    "digit-domains": DataSet(
        help=(
            "digits in five looks: scanned, printed, photo, inverted, coloured; 28×28 RGB"
            " (embedded)"
        ),
        num_classes=10,
        has_domains=True,
    ),
    "two-digits": DataSet(
        help=(
            "two digits on a canvas in the five looks, ten labels: which digits occur; 40×40 RGB"
            " (embedded; with task=multi-label test-from=official-own)"
        ),
        num_classes=10,
        has_domains=True,
        has_official=True,
        shares_parts=True,
        tasks=("multi-label",),
    ),
    "digit-mix": DataSet(
        help="MNIST, USPS and three embedded looks as domains; 28×28 RGB (in the place of Digit-5)",
        files="MNIST and USPS; three of the embedded looks are its other domains",
        num_classes=10,
        has_domains=True,
    ),
    "mnist": _torchvision("MNIST, 28×28 grey"),
    "fashion-mnist": _torchvision("Fashion-MNIST, 28×28 grey"),
    "usps": _torchvision("USPS digits, 16×16 grey"),
    "svhn": _torchvision("Street View House Numbers, 32×32 RGB"),
    "cifar10": _torchvision("CIFAR-10, 32×32 RGB"),
    "cifar100": _torchvision("CIFAR-100, 32×32 RGB", num_classes=100),
    "flowers102": _torchvision("Oxford Flowers-102, RGB", num_classes=102),
    "digit5": DataSet(
        help=(
            "MNIST, MNIST-M, USPS and SVHN, each a domain; those that are in the folder; 32×32 RGB"
            " (of Digit-5)"
        ),
        files=(
            "torchvision's files of MNIST, USPS and SVHN, and `mnist_m/mnist_m_train` … of"
            " MNIST-M. The fifth domain, SynthDigits, can no longer be downloaded: if you have it,"
            " use `domain-folder` with five folders"
        ),
        num_classes=10,
        has_domains=True,
        has_official=True,
    ),
    "pacs": DataSet(
        help="PACS: photographs, paintings, cartoons and sketches of 7 classes as domains",
        files="DOMAIN/CLASS/image, there or in the folder `PACS`",
        has_domains=True,
        has_official=True,
    ),
    "office10": DataSet(
        help="Office-Caltech-10: 4 domains, 10 classes",
        files="DOMAIN/CLASS/image, there or in the folder `office10`",
        has_domains=True,
        has_official=True,
    ),
    "fed-isic": DataSet(
        help="FLamby's Fed-ISIC2019: skin, 8 classes, 6 centres as clients",
        files=(
            "`ISIC_2019_Training_Input_preprocessed` and FLamby's `train_test_split`, there or in"
            " the folder `fed_isic2019`"
        ),
        has_domains=True,
        has_official=True,
    ),
    "breast-cancer": DataSet(
        help="scikit-learn's table of 569 tumours, 30 numbers each, 2 classes (embedded)",
        num_classes=2,
    ),
    "wine": DataSet(
        help="scikit-learn's table of 178 wines, 13 numbers each, 3 classes (embedded)",
        num_classes=3,
    ),
    "image-folder": DataSet(
        help="a folder of your own: CLASS/image",
        is_own=True,
    ),
    "domain-folder": DataSet(
        help="a folder of your own: DOMAIN/CLASS/image (Office-10, DomainNet)",
        is_own=True,
        has_domains=True,
    ),
    "manifest": DataSet(
        help="images of your own, listed in a CSV file: file,label,client,split",
        is_own=True,
        has_domains=True,
        has_official=True,
        tasks=_ONE_OR_SEVERAL,
    ),
    "arrays": DataSet(
        help=(
            "arrays of your own: .npz (inputs, labels, …), "
            "or CSV or Parquet of numbers with a column label"
        ),
        is_own=True,
        has_domains=True,
        has_official=True,
        tasks=_ONE_OR_SEVERAL,
    ),
    "text-csv": DataSet(
        help="texts of your own in a CSV file with a column label (AG News)",
        is_own=True,
        has_domains=True,
        has_official=True,
    ),
}
OWN_FORMATS = tuple(name for name, row in DATASETS.items() if row.is_own)
_ELSEWHERE = DataSet(
    help="a function of the user's own, or a data set of Hugging Face's",
    is_own=True,
    has_domains=True,
    has_official=True,
    tasks=_ONE_OR_SEVERAL,
)


def data_set_named(dataset: str) -> DataSet:
    """Return the row of ``dataset``; a Python name, or one of Hugging Face's, has a row too."""
    return DATASETS.get(dataset, _ELSEWHERE)


def is_own(dataset: str) -> bool:
    """Return whether ``dataset`` reads a user's own data."""
    return data_set_named(dataset).is_own


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A way to divide a data set among clients."""

    help: str
    """A client's share."""
    reads: tuple[str, ...] = ()
    """The settings that it alone reads, and others that say so."""
    needs_domains: bool = False
    """The data must come in domains: a client has samples of one."""
    shares_domains: bool = False
    """Several clients may have samples of one domain."""
    balances_classes: bool = False
    """It shapes no class proportions, so ``train-samples`` balances the classes."""
    shares_samples: bool = False
    """Clients may share samples: these are split before they are dealt."""
    leaves_out: bool = False
    """Some samples may be in no client's share."""
    version: int = 1
    """Raise it when the same seed gives other samples than before."""


PARTITIONS: dict[str, Partition] = {
    "iid": Partition(
        help="samples dealt out at random",
        balances_classes=True,
    ),
    "dirichlet": Partition(
        help=(
            "each class is divided over the clients by Dir(alpha), the practical setting of"
            " papers; a client gets at least 10 samples, or a fifth of an equal share if that is"
            " less"
        ),
        reads=("alpha",),
        version=2,
    ),
    "balanced-dirichlet": Partition(
        help=(
            "the same, but a client that already has an equal share of all samples gets no further"
            " class (the practical setting of PFLlib and HtFLlib); a client gets at least 40"
            " samples, or half an equal share if that is less"
        ),
        reads=("alpha",),
        version=2,
    ),
    "pathological": Partition(
        help="each client has classes-per-client classes, in unequal amounts",
        reads=("classes-per-client",),
        leaves_out=True,
    ),
    "pathological-in-order": Partition(
        help=(
            "the same, but neighbouring clients have the same classes, and the last client of each"
            " group has most samples, the pathological setting of PFLlib and HtFLlib"
        ),
        reads=("classes-per-client",),
        leaves_out=True,
    ),
    "n-way-k-shot": Partition(
        help=(
            "each client has ways ± ways-stdev classes, with shots ± shots-stdev training samples"
            " of each (FedProto); the deviations are uniform"
        ),
        reads=("ways", "ways-stdev", "shots", "shots-stdev"),
        shares_samples=True,
        leaves_out=True,
    ),
    "feature-shift": Partition(
        help=(
            "each client has one domain with all classes; domains are dealt out in turn, or by"
            ' clients-per-domain = "1,4,2,2,1"'
        ),
        reads=("clients-per-domain",),
        needs_domains=True,
        shares_domains=True,
        balances_classes=True,
        leaves_out=True,
    ),
    "label-shift": Partition(
        help="all domains are mixed, and each client has its own class proportions from Dir(alpha)",
        reads=("alpha",),
    ),
    "feature-label-shift": Partition(
        help="each client has one domain, and its own class proportions from Dir(alpha)",
        reads=("alpha", "clients-per-domain"),
        needs_domains=True,
        shares_domains=True,
        leaves_out=True,
    ),
    "natural": Partition(
        help="each client that the data name is a client of the run, in sorted order",
        needs_domains=True,
        leaves_out=True,
    ),
    "own": Partition(
        help="no division: all data in data-dir (or all of its domain) are this client's own",
        balances_classes=True,
        version=3,
    ),
}


def partitions_that_read(key: str) -> list[str]:
    """Return the partitions that alone read the setting ``key``; [] if it is none of theirs."""
    return [name for name, row in PARTITIONS.items() if key in row.reads]
