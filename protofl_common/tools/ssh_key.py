"""A person's SSH key, which signs studies and decisions."""

from getpass import getpass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from protofl_common.config.options import SettingsError


def private_key(file: Path) -> Ed25519PrivateKey:
    """Read a private SSH key of type ed25519, and ask for its passphrase if it has one.

    SettingsError for a key of another type, a wrong passphrase, and a file that is no key.
    """
    content = file.expanduser().read_bytes()
    try:
        try:
            key = load_ssh_private_key(content, password=None)
        except TypeError:  # with this it says that the key is encrypted
            passphrase = getpass(f"passphrase of {file}: ")
            key = load_ssh_private_key(content, passphrase.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SettingsError(f"--key {file}: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        cure = "make one with ssh-keygen -t ed25519"
        raise SettingsError(f"--key {file}: not of type ed25519; {cure}")
    return key
