"""``python -m protofl_common.tools.cli``: the command without an installation, as in the image."""

from protofl_common.tools.cli import program

program()
