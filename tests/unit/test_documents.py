"""The documents: links, commands, versions, and the list of mutants."""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from protofl_common.experiment.settings import known_keys
from protofl_common.tools.cli import COMMANDS, main
from protofl_common.tools.cli.arguments import read_assignments
from tests.bench import mutants
from tests.support import ROOT

PAGES = [
    ROOT / "CONTRIBUTING.md",
    *ROOT.glob("README.md"),
    *ROOT.glob("*/README.md"),
    *ROOT.glob("docs/**/*.md"),
]
PAGES += {*ROOT.glob("docker/**/*.md")} - {*PAGES}


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "class prototypes" in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    """The site checks all links, of this page too; here they are checked without the site."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    targets = [part.partition(")")[0].partition("#")[0] for part in text.split("](")[1:]]
    assert [
        target
        for target in targets
        if not target.startswith("https:") and not (ROOT / target).exists()
    ] == []


def test_the_files_that_say_the_version_agree() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "version"
    ]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == version
    entry = f"version = {{{version}}}, year = {{{cited['date-released'].year}}}"
    assert entry in (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def lines(program: str) -> list[list[str]]:
    """The words of every command of a program that stands in a block of a page."""
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    blocks = re.findall(r"(?ms)^```\w*[^\n]*\n(.*?)^```", text)
    commands = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in commands if line.startswith(f"{program} ")]


def test_every_protofl_command_of_the_pages_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[argparse.Namespace] = []
    for command in COMMANDS:
        monkeypatch.setattr(
            f"protofl_common.tools.cli.{command}.act",
            lambda arguments: found.append(arguments) or 0,
        )
    assert [main(words[1:]) for words in lines("protofl")] == [0] * len(found)
    assert len(found) > 20
    for arguments in found:
        assert read_assignments(getattr(arguments, "settings", [])).keys() <= set(known_keys())


def test_every_file_and_every_target_of_make_that_the_pages_name_exists() -> None:
    for page in PAGES:
        named = re.findall(
            r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|toml|yaml|sh))`", page.read_text("utf-8")
        )
        assert [
            file
            for file in named
            if not any((top / file).exists() for top in (ROOT, *ROOT.iterdir()))
        ] == []
    targets = re.findall(r"(?m)^([\w-]+):(.*)", (ROOT / "Makefile").read_text("utf-8"))
    assert {words[1] for words in lines("make")} <= dict(targets).keys()
    assert [target for target, rest in targets if "  ## " not in rest] == []


def test_every_mutant_is_of_code_that_is_there() -> None:
    lost = []
    for mutant in mutants.read():
        try:
            mutant.applied_to((ROOT / mutant.file).read_text("utf-8"))
        except mutants.LostMutant as error:
            lost.append(str(error))
    assert lost == []


def test_every_mutant_names_tests_that_are_there() -> None:
    for mutant in mutants.read():
        files, _, word = mutant.tests.partition(" -k ")
        for file in files.split():
            assert (ROOT / file).exists(), f"{mutant.name}: no {file}"
        if word:
            source = (ROOT / files).read_text("utf-8")
            assert re.search(rf"def test_\w*{word}", source), f"{files} has no test of {word}"
