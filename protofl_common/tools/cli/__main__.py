"""``python -m protofl_common.tools.cli``: the command where the project is not installed, as in the image."""

from protofl_common.tools.cli import program

program()
