"""A study: a file of run settings that you sign, so that sites know who asks for what, with whom,
and until when.

  protofl study sign study.toml --key ~/.ssh/id_ed25519 --by jane
      write the signature into the file
  protofl study show study.toml
      what the sites' operators will read

The file is TOML with settings of a run. study = "heart-2027" gives the study a name, and
study-sites has the sites with their keys. study-until, study-runs and study-purpose set its limits.
flwr run . --run-config study.toml starts a run of the study.
"""

import re
from argparse import ArgumentParser, Namespace
from pathlib import Path

from protofl_common.basics.files import write_text
from protofl_common.config.options import SettingsError
from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.experiment.study import key_as_text, signed_part
from protofl_common.tools.arguments import add_allow_python, read_recipe
from protofl_common.tools.ssh_key import private_key

_SIGNATURE = re.compile(r"^study-(by|signature) *=.*\n?", re.MULTILINE)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("action", choices=("sign", "show"))
    parser.add_argument("file", type=Path, help="a TOML file of run settings")
    parser.add_argument("--key", type=Path, help="sign: your private SSH key, of type ed25519")
    parser.add_argument("--by", help="sign: your name")
    add_allow_python(parser, "the file")


def act(arguments: Namespace) -> None:
    """Sign the study if asked to, and print what the sites' operators will read of it."""
    if arguments.action == "sign":
        sign(arguments.file, arguments.key, arguments.by or "")
    from protofl_common.tools.site.approvals import describe_run

    recipe = read_recipe(str(arguments.file))
    settings = Settings.from_run_config(default_run_config() | recipe.settings)
    print(*describe_run(settings), sep="\n")


def sign(file: Path, key_file: Path | None, by: str) -> None:
    """Write the signer and the signature at the top of a study's file, in place of earlier ones.

    SettingsError, before anything is written, for a key or settings that are wrong.
    """
    if key_file is None or not by:
        raise SettingsError(
            "study sign: give --key, a private SSH key of type ed25519, and --by, your name"
        )
    key = private_key(key_file)
    signer = f"{by}:{key_as_text(key.public_key())}"
    unsigned = _SIGNATURE.sub("", file.read_text(encoding="utf-8"))
    recipe = read_recipe(str(file))
    settings = default_run_config() | recipe.settings | {"study-by": signer}
    signature = key.sign(signed_part(settings)).hex()  # an earlier signature is no part of it
    Settings.from_run_config(settings | {"study-signature": signature})  # for its SettingsError
    write_text(file, f'study-by = "{signer}"\nstudy-signature = "{signature}"\n{unsigned}')
