"""Would a test notice? One change of the code at a time, in a copy.

    python -m tests.bench.mutants [NAME …]

`mutants.yaml` lists the changes. An entry names a function, and an expression or a statement in it,
so that it outlives every edit that keeps the meaning of the line. `tests/unit/test_documents.py`
says which entries have lost theirs. A mutant that no test notices survives, and is named.
"""

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.bench.printing import parser_of

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_suffix(".yaml")


class LostMutant(ValueError):
    """The code that a mutant changes is not there, or stands there more than once."""


@dataclass(frozen=True)
class Mutant:
    """What is made wrong, and which tests should fail."""

    name: str
    place: str
    """A path, or "path::function" or "path::Class.method"."""
    right: str
    """An expression, a keyword argument or statements; in a file that is no Python: a text."""
    wrong: str
    tests: str
    """Arguments of pytest."""

    @property
    def file(self) -> str:
        return self.place.partition("::")[0]

    def applied_to(self, source: str) -> str:
        """Return ``source`` with the wrong code in the place of the right one.

        LostMutant if the right one is not in it exactly once.
        """
        if not self.file.endswith(".py"):
            return self._replaced_once(source)
        tree = ast.parse(source)
        scope = self._scope(tree)
        found = spans_of(self.right, scope)
        if len(found) != 1:
            raise LostMutant(
                f"{self.name}: {self.place} has {self.right!r} {len(found)} times, not once"
            )
        return with_span_replaced(source, found[0], self.wrong)

    def _replaced_once(self, text: str) -> str:
        if text.count(self.right) != 1:
            raise LostMutant(f"{self.name}: {self.place} has no {self.right!r}, or more than one")
        return text.replace(self.right, self.wrong)

    def _scope(self, tree: ast.Module) -> ast.AST:
        """Return the node of what `place` names: a function, method or class, or all the module."""
        scope: ast.AST = tree
        _, _, path = self.place.partition("::")
        for name in filter(None, path.split(".")):
            inside = [each for each in ast.walk(scope) if getattr(each, "name", None) == name]
            if not inside:
                raise LostMutant(f"{self.name}: {self.file} has no {path}")
            scope = inside[0]
        return scope


@dataclass(frozen=True)
class Span:
    """Where code stands: lines from 1, columns in bytes, as `ast` counts them."""

    line: int
    column: int
    end_line: int
    end_column: int


def spans_of(code: str, scope: ast.AST) -> list[Span]:
    """Return every place in ``scope`` where this code stands, however it is laid out."""
    wanted = parsed(code)
    shapes = [ast.dump(node) for node in wanted]
    found = []
    for siblings in runs_of_siblings(scope, len(wanted)):
        if [ast.dump(node) for node in siblings] == shapes:
            first, last = siblings[0], siblings[-1]
            found.append(Span(first.lineno, first.col_offset, last.end_lineno, last.end_col_offset))
    return found


def parsed(code: str) -> list[ast.AST]:
    """Return the nodes of an expression, of a keyword argument, or of one or more statements."""
    try:
        statements = ast.parse(textwrap.dedent(code)).body
    except SyntaxError:  # a keyword argument stands only in a call
        (call,) = ast.parse(f"f({code})").body
        (keyword,) = call.value.keywords
        return [keyword]
    if len(statements) == 1 and isinstance(statements[0], ast.Expr):
        return [statements[0].value]
    return list(statements)


def runs_of_siblings(scope: ast.AST, length: int) -> list[list[ast.AST]]:
    """Return each run of so many statements that follow one another in a block of ``scope``.

    For a ``length`` of 1 return each node that has a place, expressions too.
    """
    nodes = [node for node in ast.walk(scope) if hasattr(node, "lineno")]
    if length == 1:
        return [[node] for node in nodes]
    runs = []
    for node in ast.walk(scope):
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(node, block, None)
            if isinstance(statements, list):
                runs += [statements[i : i + length] for i in range(len(statements) - length + 1)]
    return runs


def with_span_replaced(source: str, span: Span, code: str) -> str:
    """Return ``source`` with ``code`` in the place of the span, indented as its first line is."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    before = b"".join(lines[: span.line - 1]) + lines[span.line - 1][: span.column]
    after = lines[span.end_line - 1][span.end_column :] + b"".join(lines[span.end_line :])
    first, *rest = textwrap.dedent(code).strip("\n").splitlines()
    indented = [f"{' ' * span.column}{line}" if line else line for line in rest]
    return before.decode() + "\n".join([first, *indented]) + after.decode()


def read() -> list[Mutant]:
    """Return the mutants of `mutants.yaml`."""
    return [Mutant(**entry) for entry in yaml.safe_load(FILE.read_text(encoding="utf-8"))]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", help="parts of names; none: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    chosen = read()
    if options.names:
        chosen = [mutant for mutant in chosen if any(part in mutant.name for part in options.names)]

    start = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        noticed = list(pool.map(is_noticed, chosen))
    survivors = [mutant.name for mutant, found in zip(chosen, noticed, strict=True) if not found]
    print(f"{sum(noticed)} of {len(chosen)} killed in {time.monotonic() - start:.0f} s")
    print(f"survive: {'; '.join(survivors) or 'none'}")
    return int(bool(survivors))


def is_noticed(mutant: Mutant) -> bool:
    """Return whether a test fails for the mutant, in a copy of all tracked files.

    SystemExit if pytest could not run them.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_tracked_files(copy)
        file = copy / mutant.file
        file.write_text(mutant.applied_to(file.read_text(encoding="utf-8")), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
        environment = os.environ | {"PYTHONPATH": str(copy)}
        done = subprocess.run(
            [*command, *mutant.tests.split()],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode not in (0, 1):  # 0: all passed, 1: some failed
        output = done.stdout[-2000:] + done.stderr
        raise SystemExit(f"{mutant.name}: pytest ended with {done.returncode}\n{output}")
    print(f"{'killed  ' if done.returncode else 'SURVIVES'}  {mutant.name}", flush=True)
    return done.returncode == 1


def copy_tracked_files(target: Path) -> None:
    """Copy what Git tracks, as it is in the working tree."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, tracked.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


if __name__ == "__main__":
    sys.exit(main())
