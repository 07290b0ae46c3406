"""Build the documentation site: `make docs`, or `python -m tools.build_site` with the extra `docs`.

zensical builds the pages of docs/ into build/site. A broken link, a missing anchor or a name that does not
exist is an error. Without zensical, which needs Python 3.11 or newer, the command prints a message and
succeeds.
"""
from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from flashlin.compat.subprocesses import python

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("zensical", "mkdocstrings_handlers")
COLOURS = re.compile(r"\x1b\[[\d;]*m")


def missing() -> str:
    """Return why the site cannot be built here; ``""`` if it can."""
    if all(find_spec(name) for name in NEEDED):
        return ""
    if sys.version_info < (3, 11):
        return f"zensical needs Python 3.11 or newer, and this is {sys.version.split()[0]}"
    return "zensical is not installed; pip install -e '.[docs]' installs it"


def add_failures(root: Path) -> None:
    """Write the pages on known failures into docs/, where git ignores them, if docs/ has their index."""
    if (root / "docs" / "troubleshooting.md").exists():
        from tools import documents
        for name, text in documents.troubleshooting().items():
            path = root / "docs" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")


def build(root: Path) -> tuple[int, str]:
    """Build the site of a checkout from scratch, and return (exit code, messages without tracebacks)."""
    add_failures(root)
    ran = subprocess.run(python("zensical", "build", "--strict", "--clean"), cwd=root, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
                         env={**os.environ, "NO_COLOR": "1"})
    return ran.returncode, readable(COLOURS.sub("", ran.stdout))


def add_matrix(root: Path) -> None:
    """Add the page of the matrix that a reader can click through, if flashlin and torch are installed."""
    if not (find_spec("torch") and find_spec("pydantic")):
        print("build_site: without torch and pydantic, support/matrix.html is not written")
        return
    from matrix import cells, support
    support.write_page(cells.whole(), root / "docs" / "support", root / "matrix" / "results",
                       root / "build" / "site" / "support" / "matrix.html", overview="index.html")


def readable(output: str) -> str:
    """Return the output of zensical with only the last line of each traceback."""
    lines: list[str] = []
    inside = False
    for line in output.splitlines():
        if line.startswith("Traceback "):
            inside = True
        elif not inside:
            lines.append(line)
        elif re.match(r"[\w.]+: ", line):
            inside = False
            if "--strict flag" not in line:
                lines.append(line)
    return "\n".join(lines).strip()


def main() -> int:
    if why := missing():
        print(f"build_site: skipped, {why}")
        return 0
    code, messages = build(ROOT)
    print(messages)
    if code == 0:
        add_matrix(ROOT)
        print(f"build_site: {ROOT / 'build' / 'site' / 'index.html'}")
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main())
