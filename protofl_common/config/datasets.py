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
_OF_TORCHVISION = "torchvision's; downloaded only with `download=true`"
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
    "mnist": DataSet(
        help="MNIST, 28×28 grey",
        files=_OF_TORCHVISION,
        num_classes=10,
        has_official=True,
    ),
    "fashion-mnist": DataSet(
        help="Fashion-MNIST, 28×28 grey",
        files=_OF_TORCHVISION,
        num_classes=10,
        has_official=True,
    ),
    "usps": DataSet(
        help="USPS digits, 16×16 grey",
        files=_OF_TORCHVISION,
        num_classes=10,
        has_official=True,
    ),
    "svhn": DataSet(
        help="Street View House Numbers, 32×32 RGB",
        files=_OF_TORCHVISION,
        num_classes=10,
        has_official=True,
    ),
    "cifar10": DataSet(
        help="CIFAR-10, 32×32 RGB",
        files=_OF_TORCHVISION,
        num_classes=10,
        has_official=True,
    ),
    "cifar100": DataSet(
        help="CIFAR-100, 32×32 RGB",
        files=_OF_TORCHVISION,
        num_classes=100,
        has_official=True,
    ),
    "flowers102": DataSet(
        help="Oxford Flowers-102, RGB",
        files=_OF_TORCHVISION,
        num_classes=102,
        has_official=True,
    ),
    "digit5": DataSet(
        help=(
            "MNIST, MNIST-M, USPS and SVHN as domains, those that are there; 32×32 RGB (of Digit-5)"
        ),
        files=(
            "torchvision's of MNIST, USPS and SVHN, and `mnist_m/mnist_m_train` … of MNIST-M; for"
            " SynthDigits, no longer offered, bring five folders as a `domain-folder`"
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
_OF_HUGGING_FACE = DataSet(
    help="a data set of Hugging Face's",
    is_own=True,
    has_domains=True,
    has_official=True,
    tasks=_ONE_OR_SEVERAL,
)
_NAMED = DataSet(
    help="a function of the user's own",
    is_own=True,
    has_domains=True,
    has_official=True,
    tasks=_ONE_OR_SEVERAL,
)


def data_set_named(dataset: str) -> DataSet:
    """Return the row of ``dataset``; a Python name, or one of Hugging Face's, has a row too."""
    if dataset.startswith("hf:"):
        return _OF_HUGGING_FACE
    return DATASETS.get(dataset, _NAMED)


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
            "each class divided over the clients by Dir(alpha): the papers' practical setting; at"
            " least 10 samples each, or a fifth of an equal share"
        ),
        reads=("alpha",),
        version=2,
    ),
    "balanced-dirichlet": Partition(
        help=(
            "the same, but a client with an equal share gets no further class: PFLlib's and"
            " HtFLlib's practical setting; at least 40 samples each, or half an equal share"
        ),
        reads=("alpha",),
        version=2,
    ),
    "pathological": Partition(
        help="classes-per-client classes each, in unequal amounts",
        reads=("classes-per-client",),
        leaves_out=True,
    ),
    "pathological-in-order": Partition(
        help=(
            "the same, but neighbouring clients have the same classes, and the last of each group"
            " most samples: PFLlib's and HtFLlib's pathological setting"
        ),
        reads=("classes-per-client",),
        leaves_out=True,
    ),
    "n-way-k-shot": Partition(
        help=(
            "ways ± ways-stdev classes with shots ± shots-stdev training samples each (FedProto);"
            " uniform noise"
        ),
        reads=("ways", "ways-stdev", "shots", "shots-stdev"),
        shares_samples=True,
        leaves_out=True,
    ),
    "feature-shift": Partition(
        help=(
            "one domain per client, all classes; dealt out in turn, or by"
            ' clients-per-domain = "1,4,2,2,1"'
        ),
        reads=("clients-per-domain",),
        needs_domains=True,
        shares_domains=True,
        balances_classes=True,
        leaves_out=True,
    ),
    "label-shift": Partition(
        help="all domains mixed, each client its own class proportions from Dir(alpha)",
        reads=("alpha",),
    ),
    "feature-label-shift": Partition(
        help="one domain per client, and its own class proportions from Dir(alpha)",
        reads=("alpha", "clients-per-domain"),
        needs_domains=True,
        shares_domains=True,
        leaves_out=True,
    ),
    "natural": Partition(
        help="the clients that the data name, one for each, in sorted order",
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
