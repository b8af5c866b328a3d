"""The name ``protofl`` of an installation: `protofl_common/tools/python_api.py`."""

from protofl_common.tools.python_api import Run, SettingsError, Tried, run, try_method

__all__ = ["Run", "SettingsError", "Tried", "run", "try_method"]
