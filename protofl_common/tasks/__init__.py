"""What there is to learn: a `Task` says what a label is, and all that follows from it.

Data, the card with which a client introduces itself, and a trained model's card have a task; halves
are handed it. No other room decides by labels: it asks the task, and computes with classes alone.
"""

from collections.abc import Sequence

from protofl_common.tasks.base import Task
from protofl_common.tasks.single_label import SingleLabel

__all__ = ["SingleLabel", "Task", "task_of"]


def task_of(classes: Sequence[str]) -> Task:
    """Return the task of data with these class names: so far, one label a sample."""
    return SingleLabel(tuple(classes))
