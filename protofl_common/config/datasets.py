"""The legal values of ``dataset`` and ``partition``, each with a line that explains it.

No heavy imports here.
"""

import re

from protofl_common.config.python_names import PYTHON_NAME

# what else ``dataset`` may be
OTHER_DATASETS = re.compile(rf"{PYTHON_NAME.pattern}|hf:[\w./-]+", re.ASCII)
DATASETS: dict[str, str] = {
    "digits": "scikit-learn's 1,797 handwritten digits, 8×8 grey (embedded)",
    "digit-domains": (
        "digits in five looks: scanned, printed, photo, inverted, coloured; 28×28 RGB (embedded)"
    ),
    "digit-mix": (
        "MNIST, USPS and three embedded looks as domains; 28×28 RGB (in the place of Digit-5)"
    ),
    "mnist": "MNIST, 28×28 grey",
    "fashion-mnist": "Fashion-MNIST, 28×28 grey",
    "kmnist": "Kuzushiji-MNIST, 28×28 grey",
    "emnist": "EMNIST balanced, 28×28 grey, 47 classes",
    "usps": "USPS digits, 16×16 grey",
    "svhn": "Street View House Numbers, 32×32 RGB",
    "cifar10": "CIFAR-10, 32×32 RGB",
    "cifar100": "CIFAR-100, 32×32 RGB",
    "flowers102": "Oxford Flowers-102, RGB",
    "digit5": (
        "MNIST, MNIST-M, USPS and SVHN as domains, those that are there; 32×32 RGB (of Digit-5)"
    ),
    "pacs": "PACS: photographs, paintings, cartoons and sketches of 7 classes as domains",
    "office10": "Office-Caltech-10: 4 domains, 10 classes",
    "tiny-imagenet": "Tiny-ImageNet, 64×64 RGB, 200 classes",
    "fed-isic": "FLamby's Fed-ISIC2019: skin, 8 classes, 6 centres as clients",
    "fed-heart": "FLamby's Fed-Heart-Disease: tables of 4 hospitals as clients, 2 classes",
    "har": "UCI HAR: nine signals of 30 people as clients, 6 activities",
    "breast-cancer": "scikit-learn's table of 569 tumours, 30 numbers each, 2 classes (embedded)",
    "wine": "scikit-learn's table of 178 wines, 13 numbers each, 3 classes (embedded)",
    "image-folder": "a folder of your own: CLASS/image",
    "domain-folder": "a folder of your own: DOMAIN/CLASS/image (Office-10, DomainNet)",
    "manifest": "images of your own, listed in a CSV file: file,label,client,split",
    "arrays": (
        "arrays of your own: .npz (inputs, labels, …), "
        "or CSV or Parquet of numbers with a column label"
    ),
    "text-csv": "texts of your own in a CSV file with a column label (AG News)",
}
# files of the user's own
OWN_FORMATS = ("image-folder", "domain-folder", "manifest", "arrays", "text-csv")


def is_own(dataset: str) -> bool:
    """Return whether ``dataset`` reads a user's own data.

    Their classes and domains then have names of their own.
    """
    return dataset in OWN_FORMATS or dataset not in DATASETS


PARTITIONS: dict[str, str] = {
    "iid": "samples dealt out at random",
    "dirichlet": "each class divided over the clients by Dir(alpha): the papers' practical setting",
    "balanced-dirichlet": (
        "the same, with nothing more for a client of an equal share: PFLlib's practical setting"
    ),
    "pathological": "classes-per-client classes each, in unequal amounts",
    "n-way-k-shot": "about ways classes with about shots samples each (FedProto)",
    "feature-shift": "one domain per client, all classes",
    "label-shift": "all domains mixed, each client its own class proportions from Dir(alpha)",
    "feature-label-shift": "one domain per client, and its own class proportions from Dir(alpha)",
    "natural": "the clients that the data name, one for each",
    "own": "no division: all data in data-dir (or all of its domain) are this client's own",
}
# versions of those that once gave other samples
PARTITION_VERSIONS = {"dirichlet": 2, "balanced-dirichlet": 2, "own": 3}
