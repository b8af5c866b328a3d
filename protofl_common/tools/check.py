"""``python -m protofl_common.tools.check RECIPE.toml`` or ``'key=value …'``: is this run configuration right?

Flower refuses an unknown key before our code runs, with no more than "Invalid run configuration"; this names it.
Exits with 1 and one line per problem, or with 0.
"""

from __future__ import annotations

import sys

import click
from flwr.common.config import parse_config_args

from protofl_common.config.options import SettingsError
from protofl_common.datasets import DataError, check_data_settings
from protofl_common.settings import Settings, default_run_config


def check(arguments: list[str]) -> Settings:
    """The settings that ``flwr run --run-config`` would give with these arguments.

    Raises
    ------
    SettingsError, DataError
        With one line per problem.
    """
    try:
        overrides = parse_config_args(arguments)
    except (OSError, ValueError, click.ClickException) as error:
        raise SettingsError(f"{' '.join(arguments)}: {error}") from error
    settings = Settings.from_run_config(default_run_config() | overrides)
    check_data_settings(settings.data)
    return settings


def main() -> int:
    """Check the command line's configuration; the exit status."""
    try:
        settings = check([argument for argument in sys.argv[1:] if argument])
    except (SettingsError, DataError) as error:
        print(f"protofl: this configuration is not right\n{error}", file=sys.stderr)
        return 1
    print(f"{settings.row.title} on {settings.data.dataset}: all settings are right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
