"""Prove that two checkouts differ only in text that people read.

Usage:
    python -m tools.same_code OLD [--json]
"""
from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tools.kernel_facts import ROOT, ask, checkout_of

ABOUT = """Compares every Python file of this checkout with that of OLD, a folder or a git revision.

Comments and layout are ignored. Docstrings are removed, and every other string constant is masked. What is left
of the syntax trees must be equal. The normalised source of each jitted function must be equal as well
(`source_hash` in flashlin/testing/record.py). String constants that changed are counted; those with fewer than
three words are listed, because they may be names or keys that a program reads. Exits with 1 if code differs.
"""
EXAMPLES = """examples:
  python -m tools.same_code HEAD~1
  python -m tools.same_code 945423dd --json | jq .constants
"""
FOLDERS = ("flashlin", "matrix", "benchmarks", "examples", "tests", "tools")
WORDS_OF_A_TEXT = 3


class Change(NamedTuple):
    """A string constant that occurs in a file more often in one checkout than in the other.

    sign: ``-`` if it occurs more often in the old checkout, ``+`` if in the new one.
    """
    file: str
    sign: str
    text: str


def masked(source: str, constants: Counter[str]) -> str:
    """Return the syntax tree of a file without its text, and count its string constants."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not is_text(one)]  # type: ignore[attr-defined]
    return ast.dump(Masked(constants).visit(tree))


def is_text(statement: ast.stmt) -> bool:
    """Return True for a docstring, or a string that stands as a statement of its own."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


class Masked(ast.NodeTransformer):
    """Replace strings by a mask. An f-string keeps its expressions, in alphabetical order."""

    def __init__(self, constants: Counter[str]) -> None:
        self.constants = constants

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if not isinstance(node.value, str):
            return node
        self.constants[node.value] += 1
        return ast.Constant("...")

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        values = [self.visit(one) for one in node.values]
        inner = [one for one in values if not isinstance(one, ast.Constant)]
        return ast.JoinedStr(sorted(inner, key=ast.dump)) if inner else ast.Constant("...")


def sources(root: Path) -> dict[str, str]:
    """Return the Python files of a checkout, by name."""
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
            for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))}


def differences(old: dict[str, str], new: dict[str, str]) -> tuple[list[str], list[Change]]:
    """Return the files whose code differs, and the string constants that changed."""
    files, changes = [], list[Change]()
    for name in sorted({*old, *new}):
        before, after = Counter[str](), Counter[str]()
        if name not in old or name not in new or masked(old[name], before) != masked(new[name], after):
            files.append(name)
        changes += [Change(name, "-", text) for text in (before - after).elements()]
        changes += [Change(name, "+", text) for text in (after - before).elements()]
    return files, changes


def compared(old: Path, new: Path) -> dict[str, Any]:
    """Compare two checkouts: files and kernels that differ, and constants that changed."""
    files, changes = differences(sources(old), sources(new))
    before, after = (ask(place, "kernels", package="flashlin.kernels") for place in (old, new))
    kernels = sorted(name for name in {*before, *after}
                     if before.get(name, {}).get("source") != after.get(name, {}).get("source"))
    return {"files": files, "kernels": kernels, "kernels compared": len(after), "texts": len(changes),
            "constants": [one._asdict() for one in changes if len(one.text.split()) < WORDS_OF_A_TEXT]}


def report(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that a person reads."""
    for name in found["files"]:
        yield f"code differs: {name}"
    for name in found["kernels"]:
        yield f"kernel differs: {name}"
    for one in found["constants"]:
        yield f"constant: {one['file']} {one['sign']} {one['text']!r}"
    yield (f"{len(found['files'])} files differ in code, {len(found['kernels'])} of {found['kernels compared']} "
           f"jitted functions differ; {found['texts']} string constants changed, {len(found['constants'])} of "
           "them short")


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.same_code", description=ABOUT, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD", help="a folder with flashlin/ in it, or a git revision")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args(arguments)
    with checkout_of(options.old) as old:
        found = compared(old, ROOT)
    print(json.dumps(found, indent=1) if options.json else "\n".join(report(found)))
    return int(bool(found["files"] or found["kernels"]))


if __name__ == "__main__":
    sys.exit(main())
