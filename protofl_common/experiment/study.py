"""A study: a run's settings, signed, with the sites that may take part, an end and a purpose.

It is a TOML file of settings, which ``flwr run . --run-config study.toml`` takes as it is. Its id
is a digest of all settings, defaults included, but for `UNSIGNED` (name and folder of a run,
``resume``). Whoever changes one setting asks for another study. A run that names no study has an
id, too, so that a site's operator can approve it.

Keys are Ed25519, written as base64url: a person's is the SSH key that signs, a site's lies in its
``state-dir``.
"""

import hashlib
import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator, Set
from dataclasses import dataclass
from datetime import date

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from protofl_common.basics.text import is_site_name, printable
from protofl_common.config.lists import names_in
from protofl_common.config.options import SettingsError, Values, key_of
from protofl_common.config.sections import StudySettings, keys_that_change

UNSIGNED = keys_that_change("name") | {"study-signature"}
EXTENSION = frozenset({"study-until", "study-runs"})
"""Settings that an extension changes: it may go on with a run, and with the sites' models of it."""
_KEY = re.compile(r"[A-Za-z0-9_-]{43}")  # 32 bytes as base64url, without padding
_SIGNATURE = re.compile(r"[0-9a-f]{128}")  # 64 bytes; `bytes.fromhex` would take blanks, too


@dataclass(frozen=True)
class Study:
    """The study that a run belongs to; a run without a study has an ``id``, and no ``name``."""

    id: str  # 32 hexadecimal digits
    name: str  # "" for a run without a study
    by: str  # who signed: ``NAME:KEY``
    sites: dict[str, str]  # site -> its public key; {} if any site may take part
    until: str  # its last day, ``2027-06-30``, or ""
    runs: int  # how many Flower runs it may have; 0: any number
    purpose: str

    @classmethod
    def of(cls, config: Values) -> "Study":
        """Read the study that a run's settings name; ``config`` has all of them, also defaults.

        SettingsError if ``study-signature`` does not fit these settings.
        """
        name = str(config["study"])
        by = str(config["study-by"])
        key = by.rpartition(":")[2]
        if name and not is_signed(key, str(config["study-signature"]), signed_part(config)):
            raise SettingsError(
                f"study-signature: not {by}'s signature of these settings; sign the study again"
            )
        purpose = " ".join(str(config["study-purpose"]).split())  # on one line
        return cls(
            id=study_id(config),
            name=name,
            by=by,
            sites=keys_of_sites(str(config["study-sites"])),
            until=str(config["study-until"]),
            runs=int(config["study-runs"]),
            purpose=printable(purpose),
        )

    def __str__(self) -> str:
        if not self.name:
            return f"a run without a study ({self.id})"
        return f"study {self.name} ({self.id})"


def is_past(day: str) -> bool:
    """True if the last ``day`` of a study, such as ``2027-06-30``, is over; "" never is."""
    return bool(day) and date.today() > date.fromisoformat(day)


def signed_part(config: Values, left_out: Set[str] = frozenset()) -> bytes:
    """Return the settings that a study's signature covers, as bytes, without those ``left_out``."""
    signed = {key: config[key] for key in sorted(config.keys() - UNSIGNED - left_out)}
    return json.dumps(signed, default=repr).encode()


def study_id(config: Values, left_out: Set[str] = frozenset()) -> str:
    """Return the id of a study, or of a run without one, which all signed settings decide.

    Without those that are ``left_out``; without `EXTENSION` a study and its extensions have one id.
    """
    return hashlib.sha256(signed_part(config, left_out)).hexdigest()[:32]


def keys_of_sites(text: str) -> dict[str, str]:
    """Read a list such as ``"north:KEY, south:KEY"``; return each site's or person's public key."""
    keys = {}
    for entry in names_in(text):
        name, _, key = entry.partition(":")
        keys[name] = key
    return keys


def key_as_text(key: Ed25519PublicKey) -> str:
    return urlsafe_b64encode(key.public_bytes_raw()).decode().rstrip("=")


def is_signed(key: str, signature: str, about: bytes) -> bool:
    """True if the owner of the public ``key`` has signed the bytes ``about``.

    The ``key`` is base64url without its padding (`key_as_text`), the ``signature`` hexadecimal, in
    the one spelling that `bytes.hex` gives it. It does not cover itself: in another spelling, such
    as one with a million blanks, it would fill the disk of a site that keeps it.
    """
    if not _SIGNATURE.fullmatch(signature):
        return False
    try:
        key_bytes = urlsafe_b64decode(f"{key}=")  # with the padding that 32 bytes need
        public_key = Ed25519PublicKey.from_public_bytes(key_bytes)
        public_key.verify(bytes.fromhex(signature), about)
    except (InvalidSignature, ValueError):
        return False
    return True


def about_site(study: StudySettings, name: str, run_id: int, purpose: str) -> bytes:
    """Return the bytes that a site signs to prove who it is, in one study and Flower run.

    ``purpose`` says for what, so that the signature proves nothing else: for its introduction, for
    a refusal, or for its keys of a secure sum.
    """
    return f"protofl {purpose} of {name} in run {run_id} of study {study.study_signature}".encode()


def is_from_site(
    study: StudySettings, name: str, run_id: int, purpose: str, signature: bytes
) -> bool:
    """True if ``signature`` of `about_site` was made with the key that the study has of the site.

    Always True if the study names no sites: then there is no key to check with.
    """
    sites = keys_of_sites(study.study_sites)
    if not sites:
        return True
    about = about_site(study, name, run_id, purpose)
    key = sites.get(name, "")  # "" fits no signature
    return is_signed(key, signature.hex(), about)


def problems(study: StudySettings) -> Iterator[str]:
    """Yield a line for each invalid setting of a study."""
    if not study.study:
        for name in ("study_sites", "study_until", "study_by", "study_signature"):
            value = getattr(study, name)
            if value:
                key = key_of(name)
                yield f"{key} = {value!r}: only with a study; name it with the setting study"
        return
    if not is_site_name(study.study):
        yield f"study = {study.study!r}: must be made of ASCII letters, digits, '.', '_' and '-'"
    if not study.study_by or not study.study_signature:
        yield (
            f"study = {study.study!r}: not signed; protofl study sign FILE --key ~/.ssh/id_ed25519"
        )
    yield from problems_of_keys("study-sites", study.study_sites)
    yield from wrong_key("study-by", study.study_by)
    if study.study_until:
        try:
            date.fromisoformat(study.study_until)
        except ValueError:
            yield f"study-until = {study.study_until!r}: must be a day, such as 2027-06-30"


def problems_of_keys(setting: str, text: str) -> Iterator[str]:
    """Yield a line for each entry of the list ``text`` that is not written ``NAME:KEY``.

    Yield one more if several entries name the same site, and if sites have the same key: its owner
    could stand in for all of them, so that a sum of three would be one of fewer.
    """
    entries = names_in(text)
    malformed: list[str] = []
    for entry in entries:
        malformed += wrong_key(setting, entry)
    yield from malformed
    keys = keys_of_sites(text)
    if len(entries) > len(keys):  # the dictionary has each name once
        yield f"{setting}: names a site twice"
    if malformed:
        return
    sites_of_key: dict[bytes, list[str]] = {}
    for site, key in keys.items():
        # as bytes: two bits of the last letter do not count
        sites_of_key.setdefault(urlsafe_b64decode(f"{key}="), []).append(site)
    for sites in sites_of_key.values():
        if len(sites) > 1:
            yield f"{setting}: {', '.join(sites)} have the same key; `protofl site key` prints each"


def wrong_key(setting: str, entry: str) -> Iterator[str]:
    """Yield a line if the ``entry`` of a setting is not a name and a public key: ``NAME:KEY``."""
    name, _, key = entry.partition(":")
    if not is_site_name(name) or not _KEY.fullmatch(key):
        shown = printable(repr(entry))
        yield (
            f"{setting}: {shown} must be NAME:KEY; `protofl site key` prints a site's, and "
            "`protofl study sign` a person's"
        )
