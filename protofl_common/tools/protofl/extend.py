"""The name ``protofl.extend`` of an installation: `protofl_common/tools/extending.py`."""

from protofl_common.tools.extending import *  # noqa: F403
from protofl_common.tools.extending import __all__ as __all__
