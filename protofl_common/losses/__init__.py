"""Loss terms as pure functions of tensors, one file per idea; each names its equation and its shapes."""

from protofl_common.losses.alignment import prototype_alignment
from protofl_common.losses.margin import largest_distance, largest_nearest_distance, margin_contrast

__all__ = [
    "largest_distance",
    "largest_nearest_distance",
    "margin_contrast",
    "prototype_alignment",
]
