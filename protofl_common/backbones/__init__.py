"""Frozen pre-trained backbones: images -> features, for algorithms that train only what comes after (FedPCL).

Three are embedded, so that nothing need be downloaded; see ``names`` for all. The functions load on first use, so that
importing the names loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protofl_common.lazy import from_homes

if TYPE_CHECKING:
    from protofl_common.backbones.backbone import BackboneError
    from protofl_common.backbones.cache import cached_features
    from protofl_common.backbones.extract import extract_features, feature_widths
    from protofl_common.backbones.names import parse_backbones

__all__ = ["BackboneError", "cached_features", "extract_features", "feature_widths", "parse_backbones"]

__getattr__ = from_homes(
    __name__,
    {
        "BackboneError": "protofl_common.backbones.backbone",
        "cached_features": "protofl_common.backbones.cache",
        "extract_features": "protofl_common.backbones.extract",
        "feature_widths": "protofl_common.backbones.extract",
        "parse_backbones": "protofl_common.backbones.names",
    },
)
