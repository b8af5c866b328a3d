"""Keys and certificates of a federation: who may be the SuperLink, and who may be a SuperNode.

    python docker/certificates.py certs --server superlink.example.org --server 10.0.0.5
    python docker/certificates.py certs --node north

The first makes, in the folder ``certs``,
    ``ca.crt``, ``ca.key``           an authority of your own; only the certificate goes to others
    ``server.crt``, ``server.key``   the SuperLink's certificate, for every ``--server`` (name or
                                     address), and its key
    ``superexec.secret``             what the SuperLink and its worker share
and the second a SuperNode's pair of keys, ``nodes/north`` and ``nodes/north.pub``. Made on the
SuperNode's machine, the private key never travels: only the ``.pub`` goes to the SuperLink's
operator, who registers it.

What exists stays as it is, so the command may be repeated. It is an error if what exists does not
fit what is asked for; ``--renew server`` (or ``ca``, ``secret``, or a node's name) replaces it.
Private files are readable by their owner only.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
import secrets
import sys
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_DAYS = 3650
SERVER_DAYS = 825
"""Longer is refused by some TLS libraries."""


class CertificateError(Exception):
    """What exists does not fit what is asked for; the message says how to go on."""


def main(arguments: list[str] | None = None) -> int:
    """The command; 0 when everything asked for exists and fits."""
    options = _options(arguments)
    umask_before = os.umask(0o077)  # what is made here is for this user alone
    try:
        make_what_is_asked(options)
    except (CertificateError, OSError) as error:
        print(f"certificates: {error}", file=sys.stderr)
        return 1
    except (
        TypeError,
        ValueError,
    ) as error:  # the library's, which names no file; TypeError: the key has a password
        print(
            f"certificates: a name of --server, or a file in {options.folder}, is damaged: {error}",
            file=sys.stderr,
        )
        return 1
    finally:
        os.umask(umask_before)
    return 0


def make_what_is_asked(options: argparse.Namespace) -> None:
    """Make what is missing: the authority, the SuperLink's certificate, the secret, nodes' keys."""
    folder = _open_folder(options.folder)
    renew = set(options.renew)
    unknown = renew - {"ca", "server", "secret", *options.node}
    if unknown:
        raise CertificateError(
            f"--renew {min(unknown)}: give ca, server, secret, or a name that --node names"
        )
    renews_of_server = renew & {"ca", "server", "secret"}
    if (renews_of_server or not options.node) and not options.server:
        raise CertificateError(
            "give --server (the SuperLink's names and addresses), --node, or both"
        )

    if options.server:
        make_ca(folder, renew="ca" in renew)
        make_server(folder, options.server, renew=bool(renew & {"ca", "server"}))
        make_secret(folder, renew="secret" in renew)
        _open_folder(folder / "nodes")
    for name in options.node:
        make_node(folder, name, renew=name in renew)


def make_ca(folder: Path, *, renew: bool = False) -> None:
    """The authority that signs the SuperLink's certificate, and that all others trust."""
    if _kept((folder / "ca.crt",), renew):
        return
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ProtoFL federation")])
    usage = x509.KeyUsage(
        key_cert_sign=True,
        crl_sign=True,
        **dict.fromkeys((*_OTHER_USES, "digital_signature"), False),
    )
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        _builder(name, name, key.public_key(), CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA384())
    )
    _write(
        {folder / "ca.key": _pem(key)},
        {folder / "ca.crt": certificate.public_bytes(serialization.Encoding.PEM)},
    )


def make_server(folder: Path, names: Iterable[str], *, renew: bool = False) -> None:
    """The SuperLink's certificate, for all of ``names``; it ends with the authority at the latest.

    Raises
    ------
    CertificateError
        If there is one for other names, from another authority, or expired; or if the authority
        has expired.
    """
    wanted = [_alternative_name(name) for name in names]
    if _kept((folder / "server.crt", folder / "server.key"), renew):
        _check_server(folder, wanted)
        return
    if not (folder / "ca.key").exists():
        raise CertificateError(f"{folder / 'ca.key'}, which signs a new server.crt, is not here")
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    signer = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    if (
        not isinstance(signer, ec.EllipticCurvePrivateKey)
        or signer.public_key() != authority.public_key()
    ):
        raise CertificateError(f"{folder / 'ca.key'} is not the key of ca.crt")
    left = (
        authority.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    ) / datetime.timedelta(days=1)
    if left < 0:
        raise CertificateError(
            f"{folder / 'ca.crt'} has expired; --renew ca, and bring it to all sites"
        )
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ProtoFL SuperLink")])
    usage = x509.KeyUsage(
        digital_signature=True, **dict.fromkeys((*_OTHER_USES, "key_cert_sign", "crl_sign"), False)
    )
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    certificate = (
        _builder(subject, authority.subject, key.public_key(), min(SERVER_DAYS, left))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(wanted), critical=False)
        .add_extension(identifier, critical=False)
        .sign(signer, hashes.SHA384())
    )
    made = certificate.public_bytes(serialization.Encoding.PEM)
    _write({folder / "server.key": _pem(key)}, {folder / "server.crt": made})


def make_secret(folder: Path, *, renew: bool = False) -> None:
    """What proves to the SuperLink that a worker may take its tasks."""
    if not _kept((folder / "superexec.secret",), renew):
        _write({folder / "superexec.secret": secrets.token_bytes(48)})


def make_node(folder: Path, name: str, *, renew: bool = False) -> None:
    """A SuperNode's keys, in the form Flower reads (OpenSSH, NIST P-384)."""
    if Path(name).name != name or name.startswith(".") or name.endswith(".pub"):
        raise CertificateError(f"--node {name!r}: must be a plain name")
    private = folder / "nodes" / name
    private.parent.mkdir(exist_ok=True)
    if _kept((private, private.with_name(f"{name}.pub")), renew):
        return
    key = ec.generate_private_key(ec.SECP384R1())
    nothing = serialization.NoEncryption()
    openssh = serialization.Encoding.OpenSSH
    public = key.public_key().public_bytes(openssh, serialization.PublicFormat.OpenSSH)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, nothing
    )
    _write({private: secret}, {private.with_name(f"{name}.pub"): public + f" {name}\n".encode()})


_OTHER_USES = (
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "encipher_only",
    "decipher_only",
)
"""Of a key, as X.509 knows them; none is needed here."""


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Keys and certificates of a federation.")
    parser.add_argument("folder", type=Path, help="where they are kept")
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="NAME",
        help="a name or address of the SuperLink",
    )
    parser.add_argument(
        "--node", action="append", default=[], metavar="NAME", help="a SuperNode that needs keys"
    )
    parser.add_argument(
        "--renew",
        action="append",
        default=[],
        metavar="WHAT",
        help="replace ca, server, secret or a node",
    )
    return parser.parse_args(arguments)


def _open_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _kept(files: tuple[Path, ...], renew: bool) -> bool:
    """Whether all ``files`` exist already and stay; an error if only some of them do."""
    present = [file for file in files if file.exists()]
    if renew or not present:
        return False
    if missing := [str(file) for file in files if file not in present]:
        raise CertificateError(
            f"{present[0]} is here, but {missing[0]} is not; --renew makes both anew"
        )
    print(f"kept  {', '.join(map(str, files))}")
    return True


def _check_server(folder: Path, wanted: list[x509.GeneralName]) -> None:
    certificate = x509.load_pem_x509_certificate((folder / "server.crt").read_bytes())
    extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    if missing := [str(name.value) for name in wanted if name not in extension.value]:
        raise CertificateError(
            f"{folder / 'server.crt'} is not for {', '.join(missing)}; --renew server"
        )
    if certificate.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
        raise CertificateError(f"{folder / 'server.crt'} has expired; --renew server")
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    try:
        certificate.verify_directly_issued_by(authority)
    except Exception as error:
        raise CertificateError(
            f"{folder / 'server.crt'} is not signed by ca.crt; --renew server"
        ) from error


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _alternative_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(private: dict[Path, bytes], public: dict[Path, bytes] | None = None) -> None:
    """Replace files once all of them are on the disk: a full disk leaves a pair as it was.

    ``private`` ones are readable by the owner only, from their first moment. No node has a name
    that begins with a dot.
    """
    contents = private | (public or {})
    beside = {path: path.with_name(f".{path.name}.new") for path in contents}
    try:
        for path, content in contents.items():
            beside[path].unlink(missing_ok=True)
            with os.fdopen(
                os.open(beside[path], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
            ) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            beside[path].chmod(0o600 if path in private else 0o644)
        for path, new in beside.items():
            os.replace(new, path)
            print(f"made  {path}")
    finally:
        for new in beside.values():
            new.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
