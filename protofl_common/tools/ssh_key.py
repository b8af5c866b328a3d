"""A person's SSH key, which signs studies and decisions."""

import sys
from getpass import getpass
from importlib.util import find_spec
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from protofl_common.config.options import SettingsError

STDIN = Path("-")


def private_key(file: Path) -> Ed25519PrivateKey:
    """Read a private SSH key of type ed25519, and ask for its passphrase if it has one.

    `STDIN` stands for the standard input: a site's operator types commands as the SuperNode's user,
    who must not be able to read the operator's key.

    SettingsError for a key of another type, a file that is no key or cannot be read, and a
    passphrase that is wrong or cannot be typed or used here.
    """
    content = _content_of(file)
    passphrase = ""
    try:
        try:
            key = load_ssh_private_key(content, password=None)
        except TypeError:  # with this it says that the key is encrypted
            passphrase = _passphrase_of(file)
            key = load_ssh_private_key(content, passphrase.encode())
    except SettingsError:
        raise
    except (ValueError, UnsupportedAlgorithm) as error:
        hint = "; is the passphrase right?" if passphrase else ""
        raise SettingsError(f"--key {file}: {error}{hint}") from None
    if not isinstance(key, Ed25519PrivateKey):
        cure = "make one with ssh-keygen -t ed25519"
        raise SettingsError(f"--key {file}: not of type ed25519; {cure}")
    return key


def _content_of(file: Path) -> bytes:
    if file == STDIN:
        return sys.stdin.buffer.read()
    try:
        return file.expanduser().read_bytes()
    except PermissionError:
        cure = "its owner hands it over on standard input by --key - <FILE"
        raise SettingsError(f"--key {file}: this user cannot read it; {cure}") from None
    except OSError as error:
        raise SettingsError(f"--key {file}: {error.strerror}") from None


def _passphrase_of(file: Path) -> str:
    """Ask for a key's passphrase; SettingsError if nobody can type it, or it could not be used."""
    if find_spec("bcrypt") is None:
        raise SettingsError(
            f"--key {file}: has a passphrase, for which the package bcrypt is missing; type pip"
            " install bcrypt, or take a key without one"
        )
    try:
        return getpass(f"passphrase of {file}: ")
    except EOFError:  # there is neither a terminal nor a line on the standard input
        cure = "type the command in a terminal"
        if file != STDIN:  # docker gives a command no terminal if its standard input is a file
            cure += " (of a container: docker exec --interactive --tty)"
        raise SettingsError(
            f"--key {file}: has a passphrase, and nobody can type it; {cure}, or take a key without"
            " one"
        ) from None
