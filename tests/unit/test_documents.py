"""The documents: links, commands, versions, and the list of mutants."""

import ast
import builtins
import os
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
import yaml

from protofl_common.experiment.settings import known_keys
from protofl_common.tools.arguments import read_assignments
from protofl_common.tools.cli import COMMANDS, main
from tests.bench import mutants
from tests.support import ROOT

PAGES = sorted(
    {
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("README.md"),
        *ROOT.glob("*/README.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("docker/**/*.md"),
    }
)


def text_of(path):
    return path.read_text()


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    """``--strict`` makes every warning of MkDocs an error."""
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    command = [*build, "--site-dir", str(tmp_path)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "class prototypes" in text_of(tmp_path / "index.html")


def test_the_readme_is_short_and_its_links_lead_somewhere():
    """Building the site checks the links of all pages, this one too; here no site is built."""
    text = text_of(ROOT / "README.md")
    assert len(text.splitlines()) <= 150

    targets = re.findall(r"\]\(([^)#]*)", text)
    files = [target for target in targets if not target.startswith("https:")]

    assert [file for file in files if not (ROOT / file).exists()] == []


def test_the_files_that_say_the_version_agree():
    """They are pyproject.toml, CITATION.cff, the entry for BibTeX in tasks.md, the changelog."""
    project = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]
    cited = yaml.safe_load(text_of(ROOT / "CITATION.cff"))
    version = project["version"]

    assert cited["version"] == version

    entry = f"version = {{{version}}}, year = {{{cited['date-released'].year}}}"
    assert entry in text_of(ROOT / "docs" / "tasks.md")
    assert f"\n## {version}" in text_of(ROOT / "CHANGELOG.md")


def commands_of(program):
    """Return the words of every command of a program that stands in a code block of a page."""
    text = "\n".join(text_of(page) for page in PAGES)
    blocks = re.findall(r"(?ms)^```\w*[^\n]*\n(.*?)^```", text)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    commands = [line for line in lines if line.startswith(f"{program} ")]
    return [shlex.split(command, comments=True) for command in commands]


def test_every_protofl_command_of_the_pages_is_one(monkeypatch):
    """The parser takes it, and knows its settings; what it would do is not done."""
    acted = []

    def act(arguments):
        acted.append(arguments)
        return 0

    for command in COMMANDS:
        monkeypatch.setattr(f"protofl_common.tools.cli.{command}.act", act)
    commands = commands_of("protofl")

    for _protofl, *words in commands:
        assert main(words) == 0, words

    assert len(acted) == len(commands) > 20  # more than 20 stand there, so they were found

    for arguments in acted:
        settings = read_assignments(getattr(arguments, "settings", []))
        # my-moon is the example of a package of somebody else's
        ours = {key for key in settings if not key.startswith("my-moon.")}
        assert ours <= set(known_keys())


def test_every_file_that_the_pages_name_exists():
    tops = (ROOT, *ROOT.iterdir())  # pages may leave out the name of the top folder
    for page in PAGES:
        files = re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|toml|yaml|sh))`", text_of(page))
        for file in files:
            assert any((top / file).exists() for top in tops), f"{page} names {file}"


def test_every_test_that_the_pages_name_exists():
    for page in PAGES:
        for file, name in re.findall(r"`((?:\w+/)+\w+\.py)::(\w+)`", text_of(page)):
            source = text_of(ROOT / "tests" / file)
            assert f"def {name}(" in source, f"{page} names {name}"


def test_every_target_of_make_is_explained_and_those_of_the_pages_exist():
    targets = dict(re.findall(r"(?m)^([\w-]+):(.*)", text_of(ROOT / "Makefile")))
    assert {words[1] for words in commands_of("make")} <= targets.keys()
    assert [target for target, rest in targets.items() if "  ## " not in rest] == []


def test_every_mutant_is_of_code_that_is_there_and_uses_names_of_its_file():
    """The code that it changes stands exactly once at its place.

    An unknown name would end every test in a NameError, so that the mutant would prove nothing.
    """
    lost = []
    unknown = []
    for mutant in mutants.read():
        try:
            changed = mutant.applied_to((ROOT / mutant.file).read_text())
        except mutants.LostMutant as error:
            lost.append(str(error))
            continue
        if mutant.file.endswith(".py"):
            unknown += [f"{mutant.name}: {name}" for name in sorted(unknown_names(changed))]
    assert lost == []
    assert unknown == []


def unknown_names(source):
    """Return the names that are used somewhere in the source, and bound nowhere in it."""
    used = set()
    bound = {*dir(builtins), "__file__"}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.ExceptHandler)):
            bound.add(str(node.name))
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    return used - bound


def test_every_mutant_names_tests_that_are_there():
    """It names files of tests, and may choose among a file's tests by a word (``-k``)."""
    for mutant in mutants.read():
        files, _, word = mutant.tests.partition(" -k ")
        for file in files.split():
            assert (ROOT / file).exists(), f"{mutant.name}: no {file}"
        if word:
            source = (ROOT / files).read_text()
            assert re.search(rf"def test_\w*{word}", source), f"{files} has no test of {word}"
