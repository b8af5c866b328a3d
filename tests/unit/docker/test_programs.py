"""The programs of docker/: keys and certificates, a container's health, a run's result and log."""

import ipaddress
import json
import os
import shutil
import ssl
import stat
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.programs import program

certificates = program("certificates")
follow = program("follow")
health = program("health")
result = program("result")


class Answers(BaseHTTPRequestHandler):
    """A server that answers every request with the status in its path, such as /503."""

    def do_GET(self):
        self.send_response(int(self.path.removeprefix("/")))
        self.end_headers()

    def log_message(self, *_): ...


@pytest.fixture(scope="module")
def address():
    """The address of a server that `Answers`."""
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("urls", "code", "expected"), [
    ("{0}/200", 0, ""),
    ("{0}/200 {0}/200", 0, ""),
    ("{0}/200 {0}/503", 1, "503"),
    ("{0}/204", 1, "204"),
    ("http://127.0.0.1:1/health", 1, "refused"),
    ("", 1, "names nothing"),
])  # fmt: skip
def test_every_address_must_answer(urls, code, expected, address, monkeypatch, capsys):
    monkeypatch.setenv("HEALTH_URLS", urls.format(address))
    assert health.main() == code
    assert expected in capsys.readouterr().out


def test_the_result_names_each_site_with_its_accuracy(tmp_path, capsys):
    summary = {
        "algorithm": "FedTGP",
        "dataset": "digit-domains",
        "rounds": 3,
        "clients": {
            "north": {"arch": "cnn4", "domain": "scanned"},
            "south": {"arch": "htcnn-3", "domain": "photo"},
        },
        "accuracy-of-clients": {"north": {"head": 0.75, "prototype": None}},
        "accuracy": {"head": {"mean": 0.75}, "prototype": None},
        "seconds-per-round": 6.04,
        "trouble": {"failed": 0},
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))

    assert result.main(tmp_path) == 0

    _empty, heading, north, _south, *of_the_run = capsys.readouterr().out.splitlines()
    assert heading == "FedTGP on digit-domains, 3 rounds"
    assert north == "  north  cnn4      scanned   head 0.750"
    assert of_the_run == [
        "mean accuracy, head: 0.750",
        "seconds per round: 6.0",
        "trouble: {'failed': 0}",
    ]


def test_a_folder_without_a_result_is_named(tmp_path, capsys):
    assert result.main(tmp_path / "nowhere") == 1
    assert "summary.json" in capsys.readouterr().out


FLWR = """#!/bin/sh
cd {folder}
echo . >>count-$1
n=$(wc -l <count-$1)
exec cat "$1-$((n + 0))"
"""


@pytest.fixture
def flwr(tmp_path, monkeypatch):
    """A folder with a script ``flwr``, whose every call prints a file of this folder.

    The n-th call of ``flwr log`` prints log-n, that of ``flwr ls`` ls-n; without it they fail.
    """
    script = tmp_path / "flwr"
    script.write_text(FLWR.format(folder=tmp_path))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(follow, "PAUSE", 0.0)
    return tmp_path


def status(text):
    return json.dumps({"success": True, "runs": [{"status": text}]})


@pytest.mark.parametrize(("end", "code"), [("completed", 0), ("failed", 1), ("stopped", 1)])
def test_following_a_run_shows_its_log_and_exits_with_how_it_ended(end, code, flwr, capsys):
    (flwr / "log-1").write_text("one\ntwo\n")
    (flwr / "ls-1").write_text(status(f"finished:{end}"))

    assert follow.main("7") == code
    assert capsys.readouterr().out == f"one\ntwo\nrun 7: finished:{end}\n"


def test_after_a_break_each_line_is_shown_once(flwr, capsys):
    """The log breaks off in the second line; the calls after it fail, and then one has it all."""
    (flwr / "log-1").write_text("one\ntw")
    (flwr / "log-3").write_text("one\ntwo\nthree\n")
    (flwr / "ls-2").write_text(json.dumps({"success": False}))
    (flwr / "ls-3").write_text(status("finished:completed"))

    assert follow.main("7") == 0
    assert capsys.readouterr().out == "one\ntwo\nthree\nrun 7: finished:completed\n"


def test_a_superlink_that_never_answers_is_given_up(flwr, monkeypatch, capsys):
    monkeypatch.setattr(follow, "SILENCE_SECONDS", 0.05)
    assert follow.main("7") == 1
    assert "no answer from the SuperLink" in capsys.readouterr().out


def make(folder, *arguments):
    """Run certificates.py for a folder; return its exit status."""
    return int(certificates.main([str(folder), *arguments]))


@pytest.fixture
def certs(tmp_path):
    """A folder with keys and certificates for a server of three addresses and the site north."""
    folder = tmp_path / "certs"
    servers = ["--server", "my.host", "--server", "10.0.0.5", "--server", "[fd00::5]"]
    assert make(folder, *servers, "--node", "north") == 0
    return folder


def contents(folder):
    """Return the content of each file below a folder, by its path there."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_everything_is_made_and_private_files_are_private(certs, tmp_path):
    private = {"ca.key", "server.key", "superexec.secret", "nodes/north"}
    assert contents(certs).keys() == private | {"ca.crt", "server.crt", "nodes/north.pub"}
    for name in contents(certs):
        mode = stat.S_IMODE((certs / name).stat().st_mode)
        assert mode == (0o600 if name in private else 0o644), name


def test_without_nodes_there_is_a_place_for_the_keys_that_sites_bring(tmp_path):
    assert make(tmp_path, "--server", "my.host") == 0
    assert (tmp_path / "nodes").is_dir()


def test_the_certificate_is_for_the_names_and_signed_by_the_authority(certs):
    """The certificate names the host and both addresses, is no authority, and TLS takes it."""
    authority = x509.load_pem_x509_certificate((certs / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((certs / "server.crt").read_bytes())
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value

    assert names.get_values_for_type(x509.DNSName) == ["my.host"]

    addresses = [ipaddress.ip_address("10.0.0.5"), ipaddress.ip_address("fd00::5")]
    assert names.get_values_for_type(x509.IPAddress) == addresses
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca

    ssl.create_default_context(cafile=str(certs / "ca.crt"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certs / "server.crt", certs / "server.key")


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl command")
def test_strict_verification_accepts_the_chain(certs):
    """Some libraries insist on every detail of RFC 5280."""
    checks = ["-x509_strict", "-purpose", "sslserver", "-verify_hostname", "my.host"]
    command = ["openssl", "verify", *checks, "-CAfile", certs / "ca.crt", certs / "server.crt"]
    done = subprocess.run(command, capture_output=True)

    assert done.returncode == 0, done.stderr


def test_a_nodes_keys_are_a_pair_in_flowers_form(certs):
    private = serialization.load_ssh_private_key((certs / "nodes/north").read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.curve.name == "secp384r1"

    public = serialization.load_ssh_public_key((certs / "nodes/north.pub").read_bytes())
    assert private.public_key() == public


def test_repeating_changes_nothing_nor_does_a_full_disk(certs, monkeypatch):
    before = contents(certs)
    monkeypatch.setattr("os.fdopen", lambda *_: os.stat("/none"))  # an error of the system

    assert make(certs, "--server", "my.host", "--node", "north") == 0
    assert make(certs, "--server", "my.host", "--renew=ca") == 1
    assert contents(certs) == before


@pytest.mark.parametrize(("what", "changed"), [
    ("server", {"server.crt", "server.key"}),
    ("ca", {"ca.crt", "ca.key", "server.crt", "server.key"}),
    ("secret", {"superexec.secret"}),
    ("north", {"nodes/north", "nodes/north.pub"}),
])  # fmt: skip
def test_renew_replaces_what_it_names(what, changed, certs):
    """Renewing the authority renews the server's certificate too, which it signs.

    Nothing else changes: not even the key of ``north.new``, whose name begins as north's.
    """
    assert make(certs, "--node", "north.new") == 0

    before = contents(certs)

    assert make(certs, "--server", "my.host", "--node", "north", "--renew", what) == 0

    after = contents(certs)
    assert {name for name in after if after[name] != before[name]} == changed
    assert after.keys() == before.keys()


@pytest.mark.parametrize(("arguments", "reason"), [
    ((), "give --server"),
    (("--server", "new.host"), "is not for new.host; --renew server"),
    (("--server", "my.host", "--renew", "south"), "--renew south: give ca, server, secret"),
    (("--node", "../north"), "must be a plain name"),
    (("--node", "north.pub"), "must be a plain name"),
    (("--server", "ü.host"), "or a file in"),
    (("--node", "north", "--renew", "ca"), "give --server"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(arguments, reason, certs, capsys):
    before = contents(certs)
    assert make(certs, *arguments) == 1
    assert reason in capsys.readouterr().err
    assert contents(certs) == before


def test_a_private_key_without_its_public_one_is_refused(certs, capsys):
    (certs / "nodes/north.pub").unlink()
    assert make(certs, "--node", "north") == 1
    assert "--renew makes both anew" in capsys.readouterr().err


def test_a_foreign_authority_is_refused(certs, tmp_path, capsys):
    """ca.crt is replaced by that of another folder, whose key is not here."""
    other = tmp_path / "other"
    assert make(other, "--server", "my.host") == 0

    (certs / "ca.crt").write_bytes((other / "ca.crt").read_bytes())

    assert make(certs, "--server", "my.host") == 1
    assert "is not signed by ca.crt" in capsys.readouterr().err
    assert make(certs, "--server", "my.host", "--renew", "server") == 1
    assert "is not the key of ca.crt" in capsys.readouterr().err

    (certs / "ca.key").unlink()
    assert make(certs, "--server", "my.host", "--renew", "server") == 1
    assert "is not here" in capsys.readouterr().err


def test_an_expired_authority_is_refused(tmp_path, monkeypatch, capsys):
    """The certificate of the authority is made to hold for no day."""
    monkeypatch.setattr(certificates, "CA_DAYS", 0)
    assert make(tmp_path / "old", "--server", "my.host") == 1

    expired = "old/ca.crt has expired; --renew ca, and bring it to all sites"
    assert expired in capsys.readouterr().err
