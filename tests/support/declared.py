"""What a client may send, by algorithm: written a second time, by hand, to hold the catalog to it.

The declaration of an algorithm stands at the top of its independent script,
``tests/unit/reference/test_NAME.py``, and is found there by its name. A row is all that the tests
need to know of an algorithm.
"""

from importlib import import_module
from importlib.util import find_spec

from protofl_common.experiment.catalog import CATALOG
from tests.support.declaration import COUNTED, Declared

FEDPROTO_AVG = Declared(
    COUNTED,
    weights=True,
    losses=("cross-entropy", "prototype"),
    acts={"lambda": 3.0, "distance": "l1", "granularity": "class"},
)
WITHOUT_SCRIPT = {"local": Declared(), "fedproto-avg": FEDPROTO_AVG}


def declared_by(algo: str) -> Declared | None:
    """The declaration of an algorithm; None where it has no script, or its script has none."""
    if algo in WITHOUT_SCRIPT:
        return WITHOUT_SCRIPT[algo]
    script = f"tests.unit.reference.test_{algo.replace('-', '_')}"
    if find_spec(script) is None:
        return None
    return getattr(import_module(script), "DECLARED", None)


DECLARED: dict[str, Declared] = {}
MINIMISED: dict[str, set[str]] = {}
for _algo in CATALOG:
    _declared = declared_by(_algo)
    if _declared:
        DECLARED[_algo] = _declared
        MINIMISED[_algo] = set(_declared.minimised or _declared.losses)

REPORT = ("round", "train_samples", "test_samples", "validation_samples")
EPSILON = "epsilon"  # of the client's ledger; under differential privacy alone
INFERENCES = ("head", "prototype")
PHASES = ("load", "evaluate", "train", "prototypes", "save")
SITE = {
    "name": str,
    "partition": int,
    "num_partitions": int,
    "domain": str,
    "arch": str,
    "input_shape": list,
    "parameters": int,
    "train_samples": int,
    "test_samples": int,
    "classes": list,
    "present": list,
    "weights": str,
    "device": str,
    "found": int,
    "validation_samples": int,
    "real": bool,
    "signature": str,
    "columns": str,
    "task_kind": str,
}
"""The fields of a client's introduction, in order, and their types."""


def report_names(algo: str, training: bool, metrics: tuple[str, ...] = ()) -> set[str]:
    """Return the names that a report may have, in a run that asks for ``metrics``.

    With ``training`` it is the report after training, which also has the losses.
    """
    asked: list[str] = []
    for inference in INFERENCES:
        asked += [f"{inference}/{metric}" for metric in metrics]
    groups = {
        "correct": INFERENCES,
        "seconds": PHASES,
        "metrics": asked,
        "validation": [*INFERENCES, *asked],
    }
    if training:
        groups["losses"] = ["total", "unlabelled", *DECLARED[algo].losses]

    names = {*REPORT, EPSILON}
    for group, members in groups.items():
        names |= {f"{group}.{name}" for name in members}
    return names
