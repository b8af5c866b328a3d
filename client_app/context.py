"""The context that the simulation's own process stores for each client, with the run's settings in it."""

from __future__ import annotations

import json
from functools import lru_cache

from protofl_common.config.options import Scalar


class CommonSettings(dict[str, Scalar]):
    """A run's settings, which a process keeps once; plain dictionaries would take 17 kB more for each client."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return _once, (json.dumps(self),)


@lru_cache(maxsize=1)
def _once(text: str) -> CommonSettings:
    return CommonSettings(json.loads(text))
