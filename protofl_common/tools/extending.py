"""The names of `protofl/extend.py`, where an installation of an earlier version looks for them."""

from protofl_common.tools.protofl.extend import *  # noqa: F403
from protofl_common.tools.protofl.extend import __all__ as __all__
