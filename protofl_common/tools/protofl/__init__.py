"""The name ``protofl`` of an installation: `protofl_common/tools/python_api.py`."""

try:
    from protofl_common.tools.python_api import (
        Run,
        SettingsError,
        Tried,
        events,
        figures,
        run,
        try_method,
    )
except ModuleNotFoundError as error:
    # under `flwr run`, whose bundle has no tools: there only `extend` is asked for
    if error.name != "protofl_common.tools":
        raise

__all__ = ["Run", "SettingsError", "Tried", "events", "figures", "run", "try_method"]
