"""What there is to learn: a `Task` says what a label is, and all that follows from it.

Data, the card with which a client introduces itself, and a trained model's card have a task; halves
are handed it. No other room decides by labels: it asks the task, and computes with classes alone.
"""

from collections.abc import Mapping, Sequence

from protofl_common.tasks.base import UNLABELLED, Result, Task
from protofl_common.tasks.metrics import Labels
from protofl_common.tasks.multi_label import MultiLabel
from protofl_common.tasks.single_label import SingleLabel

__all__ = [
    "TASKS",
    "UNLABELLED",
    "MultiLabel",
    "Result",
    "SingleLabel",
    "Task",
    "kind_of",
    "task_of",
    "task_with",
]

TASKS: dict[str, type[Task]] = {task.kind: task for task in (SingleLabel, MultiLabel)}
"""Value of the setting ``task`` -> the class of such tasks."""


def kind_of(labels: Labels) -> str:
    """Return the kind of task that has labels of this shape."""
    return MultiLabel.kind if labels.ndim == 2 else SingleLabel.kind


def task_of(classes: Sequence[str], kind: str = SingleLabel.kind) -> Task:
    """Return the task of data with these names, of the kind that the setting ``task`` names."""
    return TASKS[kind](tuple(classes))


def task_with(settings: Mapping[str, object]) -> type[Task]:
    """Return the kind of task of a run with these settings; earlier versions had only one kind."""
    return TASKS.get(str(settings.get("task")), SingleLabel)
