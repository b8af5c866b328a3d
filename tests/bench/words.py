"""Fails where packages and documents use words that a reader of the field would not: `make lint` runs it.

docs/glossary.md has the words of the field. The limits are what is left, and only ever go down.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("client_app", "server_app", "protofl_common")
WORD = re.compile(
    r"\b(told|said|kept|keeps|insight|held|holds|lineage|void|apart|mended|bears|learnt|outgoing|handover|settle)\b"
)
RELATIVE = re.compile(r"(Of|Those|What|Whether|Where|That|Which|Whom|Whose|Else)\b")
BARE = ("one", "found", "said", "told", "known", "given", "there")
DOCUMENTS = ("README.md", "docs/*.md", "docs/algorithms/*.md")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LIMITS = {"documents": 3, "names": 0, "prose": 55, "docstrings": 0, "variables": 17}


def main() -> None:
    """Print every place of each kind that has more of them than its limit; exit status 1 if there is one."""
    places: dict[str, list[str]] = {kind: [] for kind in LIMITS}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for kind, line, word in odd_words(path.read_text(encoding="utf-8")):
                places[kind].append(f"{path.relative_to(ROOT)}:{line}: {word}")
    for path in (path for pattern in DOCUMENTS for path in sorted(ROOT.glob(pattern))):
        text = CODE.sub(lambda code: "\n" * code[0].count("\n"), path.read_text(encoding="utf-8"))
        for number, line in enumerate(text.splitlines(), 1):
            places["documents"] += [
                f"{path.relative_to(ROOT)}:{number}: {word}" for word in WORD.findall(line)
            ]
    too_many = {kind: where for kind, where in places.items() if len(where) > LIMITS[kind]}
    for kind, where in too_many.items():
        print(f"{len(where)} {kind}, above {LIMITS[kind]}:", *where, sep="\n  ")
    print(*(f"{kind} {len(where)} of {LIMITS[kind]}" for kind, where in places.items()), sep=", ")
    sys.exit(bool(too_many))


def odd_words(source: str) -> Iterator[tuple[str, int, str]]:
    """Yield (kind, line, word) for each name, word of prose, first line of a docstring and variable to replace."""
    tree = ast.parse(source)
    names: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in BARE:
            yield "variables", node.lineno, node.id
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node) or ""
            if RELATIVE.match(text):
                yield "docstrings", getattr(node, "lineno", 1), text.splitlines()[0]
        for name in defined(node):
            names[name] += 1
            if WORD.search(name.lower().replace("_", " ")) and name not in BARE:
                yield "names", getattr(node, "lineno", 1), name
    for number, line in enumerate(source.splitlines(), 1):
        for word in WORD.findall(line):
            if word not in names:
                yield "prose", number, word


def defined(node: ast.AST) -> list[str]:
    """Names that a node gives to a function, class, argument or variable."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.arg():
            return [node.arg]
        case ast.Name(ctx=ast.Store()):
            return [node.id]
        case ast.Attribute(ctx=ast.Store()):
            return [node.attr]
    return []


if __name__ == "__main__":
    main()
