"""What a client may send, by algorithm: written a second time, by hand from the papers, to hold the catalog to it.

The declaration of an algorithm stands at the top of its independent script, ``tests/unit/reference/test_NAME.py``, and
is found there by its name. A row is all that the tests need to know of an algorithm.
"""

from importlib import import_module
from importlib.util import find_spec

from protofl_common.experiment.catalog import CATALOG
from tests.support.declaration import COUNTED, Declared

WITHOUT_SCRIPT = {"local": Declared(), "fedproto-avg": Declared(COUNTED, weights=True,
    losses=("cross-entropy", "prototype"), acts={"lambda": 3.0, "distance": "l1", "granularity": "class"})}  # fmt: skip


def declared_by(algo: str) -> Declared | None:
    """The declaration of an algorithm; None where it has no script, or its script declares nothing."""
    script = f"tests.unit.reference.test_{algo.replace('-', '_')}"
    return WITHOUT_SCRIPT.get(
        algo, getattr(import_module(script), "DECLARED", None) if find_spec(script) else None
    )


DECLARED = {algo: declared for algo in CATALOG if (declared := declared_by(algo))}
MINIMISED = {algo: set(one.minimised or one.losses) for algo, one in DECLARED.items()}
REPORT = ("round", "train_samples", "test_samples", "validation_samples")
INFERENCES = ("head", "prototype")
PHASES = ("load", "evaluate", "train", "prototypes", "save")
SITE = {"name": str, "partition": int, "num_partitions": int, "domain": str, "arch": str, "input_shape": list,
    "parameters": int, "train_samples": int, "test_samples": int, "classes": list, "present": list, "weights": str,
    "device": str, "found": int, "validation_samples": int, "real": bool, "signature": str,
    "columns": str}  # fmt: skip


def report_names(algo: str, training: bool, metrics: tuple[str, ...] = ()) -> set[str]:
    """The names that a report may have, in a run that asks for ``metrics``."""
    losses = ("total", "unlabelled", *DECLARED[algo].losses) if training else ()
    asked = tuple(f"{way}/{metric}" for way in INFERENCES for metric in metrics)
    groups = {"correct": INFERENCES, "seconds": PHASES, "losses": losses}
    groups |= {"validation": (*INFERENCES, *asked), "metrics": asked}
    return {*REPORT, *(f"{group}.{name}" for group, names in groups.items() for name in names)}
