"""Client models: a body x -> z in R^D and a head z -> logits. See ``groups`` for the architectures.

``build_model`` and ``SplitModel`` load on first use, so that importing the names in ``groups`` loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protofl_common.lazy import from_homes

if TYPE_CHECKING:
    from protofl_common.models.build import build_model
    from protofl_common.models.initial import initial_model
    from protofl_common.models.split import SplitModel

__all__ = ["SplitModel", "build_model", "initial_model"]

__getattr__ = from_homes(
    __name__,
    {
        "SplitModel": "protofl_common.models.split",
        "build_model": "protofl_common.models.build",
        "initial_model": "protofl_common.models.initial",
    },
)
