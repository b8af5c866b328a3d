"""What a wheel has beside `protofl_common`: the name `protofl`, and the Flower app.

The app is data in protofl_common/app. A Flower app names its parts ``server_app`` and
``client_app``: as packages of a wheel they would meet those of others.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

APP = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "client_app",
    "server_app",
    "protofl_common",
    "configs",
)
PUBLIC = ("__init__.py", "extend.py")
"""What `import protofl` finds."""


class AppAsData(BuildHookInterface):
    """Adds `protofl`, and the app to a wheel; an editable install has the app beside it already."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds."""
        names = {
            f"{self.root}/protofl_common/tools/protofl/{name}": f"protofl/{name}" for name in PUBLIC
        }
        build_data["force_include_editable"] |= names
        build_data["force_include"] |= names
        if version == "standard":
            build_data["force_include"] |= {
                f"{self.root}/{name}": f"protofl_common/app/{name}" for name in APP
            }
