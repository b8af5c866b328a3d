"""The units for systemd: that it reads them, and that they are as tight as the page says."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

UNITS = sorted((ROOT / "docker" / "systemd").glob("*.service"))
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


@pytest.fixture
def here(tmp_path: Path) -> list[str]:
    for unit in UNITS:
        text = unit.read_text(encoding="utf-8").replace("/opt/protofl/.venv/bin", str(Path(sys.executable).parent))
        text = text.replace("/usr/sbin/haproxy", sys.executable)  # which need not be here
        (tmp_path / unit.name).write_text(text.replace("/opt/protofl", str(ROOT)))
    return [str(tmp_path / unit.name) for unit in UNITS]


def test_every_service_of_the_page_has_a_unit_that_starts_it_as_the_page_does() -> None:
    readme = (ROOT / "docker" / "README.md").read_text(encoding="utf-8")
    started = " ".join(" ".join(unit.read_text(encoding="utf-8").replace("\\\n", " ").split()) for unit in UNITS)
    assert {unit.stem for unit in UNITS} == set(re.findall(r"protofl-\w+", PAGE)) - {"protofl-"}
    for service in re.findall(r"(?ms)^```sh superlink service\n(.*?)^```", readme):
        words = service.replace("\\\n", " ").split()
        program = next(word for word in words if not re.match(r"[A-Z]+=", word))
        assert f"/{Path(program).name} " in started
        assert {word for word in words if word.startswith("--")} <= set(started.split())


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_systemd_reads_the_units(here: list[str]) -> None:
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", *here], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_the_page_says_how_exposed_a_site_is(here: list[str]) -> None:
    (site,) = [unit for unit in here if "site" in unit]
    done = subprocess.run(["systemd-analyze", "security", "--offline=yes", site], capture_output=True, text=True)
    (level,) = re.findall(r"exposure level for protofl-site\.service: ([\d.]+)", done.stdout)
    assert float(level) < 2.5  # versions of systemd differ
    assert "exposure 1.8 of 10" in PAGE
