"""Metrics of how well the code of one checkout is organised.

It uses the standard library only. It imports and runs nothing of the checkout, except in the child process of
``--steps``.
"""
from __future__ import annotations

import argparse
import ast
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ABOUT = """Counts the features of a checkout that make a project of this kind hard to learn and to change:
hand-written copies, calls with many positional arguments, long lines, and the number of files that an
addition touches. Smaller is better. tests/test_house.py sets upper bounds. To compare an old commit with
this checkout:

  git archive COMMIT | tar x -C FOLDER
  python tools/house.py FOLDER
  python tools/house.py

A walk is a row of the table "Where a new thing goes" in ARCHITECTURE.md. It counts the files and folders in
the second column, which are edited by hand. Each is a path in backticks, relative to the root of the checkout
or to flashlin/, and must exist. The third column lists commands to run afterwards and is not counted.

--steps runs one call of chunk_simple_gla in a child process that imports the checkout. It lists the functions
of flashlin/ from the op to its first kernel. The call is planned for an H100 and launches no kernel. It needs
torch. A step is one function, however often it runs. Comprehensions and generators do not count. The path
begins with the op and ends with `start` of compat/launch.py; both count. Backward has its own row, and its
path begins where autograd enters flashlin/. Two earlier calls, which differ only in `scale`, warm up imports,
plans and caches. As `scale` differs, the counted call cannot replay them.
"""
EXAMPLES = """examples:
  python tools/house.py                        this checkout
  python tools/house.py --where positional     the counted calls, each with its line
  python tools/house.py --json | jq .figures   for a script
  python tools/house.py --steps FOLDER         the steps of a call in another checkout
  python tools/house.py --steps --json | jq -r '.forward.path[]'
"""
ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("flashlin", "matrix", "benchmarks", "examples", "tests", "tools")
# For --steps: TARGET is the machine for which the call is planned; EXPRESSIONS are names of code that is not
# a function.
TARGET = "H100,triton=3.6.0"
EXPRESSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<module>")
WIDTH, POSITIONAL, LINES_OF_A_KERNEL = 110, 10, 15
# For the metrics of prose. Documents with the word "generated" in their first lines are not counted, because
# a program writes them.
QUESTION = re.compile(r"(What|Whether|Who|Whose|Which|How|Where|Why|Those|Of|So)\b")
PRIVATE = re.compile(r"\b(what|whose|nobody|somebody|told|beside|stands?|leaves alone)\b|, too\b")
DOCUMENTS = ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "examples/*.md", "matrix/*.md")
LONG = 30
RELEASE = re.compile(r"[23]\.\d+(\.\d+)?")
# Files that may name releases: the table of releases, and the known issues with their proofs.
RELEASE_TABLES = ("flashlin/compat/releases.py", "flashlin/compat/known_issues.py",
                  "matrix/proofs/proof_table.py")
TABLE = "## Where a new thing goes\n"


class Source(NamedTuple):
    """One Python file of the checkout.

    name: path relative to the root of the checkout.
    lines: lines of text.
    nodes: all nodes of the syntax tree.
    """
    name: str
    lines: list[str]
    nodes: list[ast.AST]

    @property
    def module(self) -> str:
        return self.name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    def at(self, node: ast.AST) -> str:
        return f"{self.name}:{getattr(node, 'lineno', 1)}"


class Walk(NamedTuple):
    """One kind of addition to the project, with the files to edit by hand.

    thing: name of the addition.
    places: paths of the files and folders to edit.
    missing: the paths that do not exist.
    """
    thing: str
    places: list[str]
    missing: list[str]


class House:
    """A checkout whose metrics are counted. The docstring of a metric's method is its printed description."""
    def __init__(self, root: Path) -> None:
        if not (root / "flashlin").is_dir():
            raise SystemExit(f"house: got {root}, need a checkout, with a folder flashlin")
        self.root = root
        self.sources = []
        for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            name = path.relative_to(root).as_posix()
            self.sources.append(Source(name, text.splitlines(), list(ast.walk(ast.parse(text)))))

    def nodes(self, *folders: str) -> Iterator[tuple[Source, ast.AST]]:
        for source in self.sources:
            if source.name.startswith(tuple(f"{folder}/" for folder in folders)):
                yield from ((source, node) for node in source.nodes)

    # --- metrics that count places ---

    def root_files(self) -> list[str]:
        """Python files in the folder flashlin/ itself."""
        return sorted(f"flashlin/{path.name}" for path in (self.root / "flashlin").glob("*.py"))

    def custom_ops(self) -> list[str]:
        """Calls of custom_op of torch.library in flashlin/ops."""
        return [source.at(node) for source, node in self.nodes("flashlin/ops")
                if isinstance(node, ast.Call) and not isinstance(node.func, ast.Call)
                and last_name(node.func) == "custom_op"]

    def positional(self) -> list[str]:
        """Calls with ten or more positional arguments in flashlin/ and matrix/."""
        return [f"{source.at(node)} {last_name(node.func)}({len(node.args)})"
                for source, node in self.nodes("flashlin", "matrix")
                if isinstance(node, ast.Call) and len(node.args) >= POSITIONAL]

    def wide(self) -> list[str]:
        """Lines over 110 columns in all Python files."""
        return [f"{source.name}:{number}" for source in self.sources
                for number, line in enumerate(source.lines, 1) if len(line) > WIDTH]

    def undocumented(self) -> list[str]:
        """Jitted functions of over 15 lines without a docstring in flashlin/ and matrix/."""
        return [f"{source.at(node)} {node.name}" for source, node in self.nodes("flashlin", "matrix")
                if isinstance(node, ast.FunctionDef) and not ast.get_docstring(node)
                and any(last_name(by) == "jit" for by in node.decorator_list)
                and (node.end_lineno or node.lineno) - node.lineno + 1 > LINES_OF_A_KERNEL]

    def fp32(self) -> list[str]:
        """Files of flashlin/ that compare a call's `dot` with "fp32" and so depend on a remedy's effect."""
        return sorted({source.name for source, node in self.nodes("flashlin")
                       if isinstance(node, ast.Compare) and last_name(node.left) == "dot"
                       and any(value(side) == "fp32" for side in node.comparators)})

    def releases(self) -> list[str]:
        """Releases of Triton or torch outside their tables: "3.6.0", or compared as (3, 6)."""
        found = []
        for source, node in self.nodes("flashlin", "matrix", "tools"):
            if source.name in RELEASE_TABLES:
                continue
            if isinstance(node, ast.Constant):
                if isinstance(node.value, str) and RELEASE.fullmatch(node.value):
                    found.append(f"{source.at(node)} {node.value}")
            elif isinstance(node, ast.Compare):
                sides = [value(side) for side in (node.left, *node.comparators)]
                found += [f"{source.at(node)} {side}" for side in sides if isinstance(side, tuple)
                          and side[:1] in ((2,), (3,)) and "release" in ast.unparse(node)]
        return found

    def run_files(self) -> list[str]:
        """Files of flashlin/ with a top-level function named run."""
        return [source.name for source, node in self.nodes("flashlin") if isinstance(node, ast.Module)
                and any(isinstance(one, ast.FunctionDef) and one.name == "run" for one in node.body)]

    def import_cycles(self) -> list[str]:
        """Groups of modules of flashlin/ that import each other, including late and type-only imports."""
        graph = {source.module: set[str]() for source in self.sources if source.name.startswith("flashlin/")}
        for source, node in self.nodes("flashlin"):
            names = [one.name for one in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            for name in names:
                whole = f"{node.module}.{name}" if isinstance(node, ast.ImportFrom) else name
                imported = whole if whole in graph else whole.rpartition(".")[0]
                graph[source.module] |= {imported} & graph.keys()
        groups = {frozenset(there for there in reached(graph, module) if module in reached(graph, there))
                  for module in graph}
        return sorted(" ".join(sorted(group)) for group in groups if len(group) > 1)

    # --- metrics of prose ---

    def docstrings(self) -> Iterator[tuple[str, str]]:
        """Yield the place and the text of each docstring in flashlin/."""
        for source, node in self.nodes("flashlin"):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (
                    text := ast.get_docstring(node)):
                yield source.at(node), text

    def questions(self) -> list[str]:
        """Docstrings of flashlin/ that start with a question word, or with Of, Those or So."""
        return [f"{place} {text.splitlines()[0]}" for place, text in self.docstrings() if QUESTION.match(text)]

    def private(self) -> list[str]:
        """Docstrings of flashlin/ with words that readers do not expect, such as `beside` or `nobody`."""
        return [f"{place} {found.group()!r}" for place, text in self.docstrings()
                if (found := PRIVATE.search(text))]

    def sentences(self) -> Iterator[tuple[str, str]]:
        """Yield the file and the text of each sentence in documents that people write, without tables."""
        paths = [path for pattern in DOCUMENTS for path in sorted(self.root.glob(pattern))]
        for path in paths:
            text = path.read_text(encoding="utf-8")
            if path.name == "SUPPORT.md" or "generated" in text[:400].lower():
                continue
            text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
            text = "\n".join(line for line in text.splitlines() if not line.startswith(("|", "<", "!", "#")))
            for sentence in re.split(r"(?<=[.!?:])\s+", re.sub(r"\s+", " ", text)):
                if len(sentence.split()) > 2:
                    yield path.relative_to(self.root).as_posix(), sentence

    def long_sentences(self) -> list[str]:
        """Sentences of over 30 words in documents that people write."""
        return [f"{name}: {text}" for name, text in self.sentences() if len(text.split()) > LONG]

    def private_share(self) -> float:
        """Percentage of the docstrings of flashlin/ with words that readers do not expect."""
        return round(100 * len(self.private()) / max(1, len([*self.docstrings()])), 1)

    def words(self) -> float:
        """Mean number of words of a sentence in documents that people write."""
        lengths = [len(text.split()) for _, text in self.sentences()]
        return round(sum(lengths) / max(1, len(lengths)), 1)

    # --- other metrics ---

    def code_lines(self) -> int:
        """Lines of flashlin/ without docstrings and comment lines. Blank lines count."""
        dropped = set[tuple[str, int]]()
        for source, node in self.nodes("flashlin"):
            if (isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
                    and ast.get_docstring(node, clean=False) is not None):
                first = node.body[0]
                dropped |= {(source.name, at) for at in range(first.lineno, (first.end_lineno or 0) + 1)}
        ours = [source for source in self.sources if source.name.startswith("flashlin/")]
        dropped |= {(source.name, at) for source in ours for at, line in enumerate(source.lines, 1)
                    if line.lstrip().startswith("#")}
        return sum(len(source.lines) for source in ours) - len(dropped)

    def width(self) -> float:
        """Percentage of all Python lines that are over 110 columns."""
        return round(100 * len(self.wide()) / sum(len(source.lines) for source in self.sources), 2)

    def walks(self) -> list[Walk]:
        _, found, rest = (self.root / "ARCHITECTURE.md").read_text(encoding="utf-8").partition(TABLE)
        if not found:
            raise SystemExit(f"house: ARCHITECTURE.md has no section {TABLE.strip()!r}")
        rows = [line.strip("| ").split(" | ") for line in rest.partition("\n\n")[0].splitlines()[2:]]
        return [self.walk(thing, text) for thing, text, *_ in rows]

    def walk(self, thing: str, text: str) -> Walk:
        named = [name for name in dict.fromkeys(re.findall(r"`([\w./*-]+)`", text))
                 if name.endswith("/") or Path(name).suffix in (".py", ".toml", ".json", ".md", ".yml")]
        bases = (self.root, self.root / "flashlin")
        missing = [name for name in named if not any(any(base.glob(name.rstrip("/"))) for base in bases)]
        return Walk(thing, named, missing)


def reached(graph: dict[str, set[str]], module: str) -> set[str]:
    """Return the modules that a module reaches through one or more imports.

    graph: the imported modules of each module.
    """
    found, waiting = set[str](), [*graph[module]]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += graph[one]
    return found


def last_name(node: ast.AST) -> str:
    """Return ``c`` for ``a.b.c``, also if it is called."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def value(node: ast.expr) -> object:
    """Return the value of a literal, or None for any other expression."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


PLACES = {"root files": House.root_files, "custom ops": House.custom_ops, "positional": House.positional,
          "undocumented": House.undocumented, "fp32": House.fp32, "releases": House.releases,
          "wide": House.wide, "run files": House.run_files, "import cycles": House.import_cycles,
          "questions": House.questions, "private": House.private, "long sentences": House.long_sentences}
NUMBERS: dict[str, Callable[[House], float]] = {
    "width": House.width, "code lines": House.code_lines, "private share": House.private_share,
    "words": House.words}


def figures(house: House) -> dict[str, float]:
    counts = {name: len(found(house)) for name, found in PLACES.items()}
    return {**counts, **{name: found(house) for name, found in NUMBERS.items()}}


def text(house: House) -> str:
    about = {name: function.__doc__ for name, function in {**PLACES, **NUMBERS}.items()}
    lines = [f"{number:>10}  {name:<14} {about[name]}" for name, number in figures(house).items()]
    lines += ["", "walks: the files and folders that an addition touches"]
    for walk in house.walks():
        lines.append(f"{len(walk.places):>10}  {walk.thing}: {', '.join(walk.places)}")
        lines += [f"{'':>12}missing: {name}" for name in walk.missing]
    return "\n".join(lines)


# --- the steps of a call ---


class Frame(NamedTuple):
    """One call of a function.

    file: path relative to flashlin/.
    function: name of the function.
    line: first line of the function.
    """
    file: str
    function: str
    line: int


def steps(checkout: Path) -> dict[str, dict[str, Any]]:
    """Count the steps of a chunked call in a child process. ``ABOUT`` explains the counts."""
    # An empty home has no local results of this machine and no compiled kernels.
    with tempfile.TemporaryDirectory() as home:
        variables = {"TRITON_INTERPRET": "0", "FLASHLIN_HOME": home, "TRITON_CACHE_DIR": home}
        done = subprocess.run([sys.executable, __file__, "--watch", str(checkout)], text=True, check=False,
                              capture_output=True, cwd=checkout, env={**os.environ, **variables})
    if done.returncode:
        raise SystemExit(f"house: the call in {checkout} failed: {done.stderr.strip()[-2000:]}")
    paths = json.loads(done.stdout.splitlines()[-1])
    return {row: counted([Frame(*one) for one in path]) for row, path in paths.items()}


def counted(path: list[Frame]) -> dict[str, Any]:
    files = {frame.file for frame in path}
    return {"steps": len(set(path)), "calls": len(path), "files": len(files),
            "folders": len({Path(file).parent for file in files}),
            "path": [f"flashlin/{file}:{line} {function}" for file, function, line in dict.fromkeys(path)]}


def watch(checkout: Path) -> dict[str, list[Frame]]:
    """Run the calls of ``--steps`` and return the function calls of each path, in order.

    Runs in the child process.
    """
    sys.path[0] = str(checkout)
    import torch

    import flashlin
    from flashlin.compat.target import parse
    from flashlin.testing.record import recording
    home = os.path.join(os.path.dirname(os.path.realpath(str(flashlin.__file__))), "")
    if Path(home).parent != checkout:
        raise SystemExit(f"imported {home}, need {checkout}")
    frames: list[Frame] = []

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        file = os.path.realpath(code.co_filename)
        if event == "call" and file.startswith(home) and code.co_name not in EXPRESSIONS:
            frames.append(Frame(Path(file).relative_to(home).as_posix(), code.co_name, code.co_firstlineno))

    def to_start(function: Callable[[], Any]) -> tuple[Any, list[Frame]]:
        frames.clear()
        sys.setprofile(note)
        try:
            result = function()
        finally:
            sys.setprofile(None)
        ends = [at for at, frame in enumerate(frames) if frame[:2] == ("compat/launch.py", "start")]
        if not ends:
            raise SystemExit("no function `start` of compat/launch.py was called")
        return result, frames[:ends[0] + 1]

    def call(scale: float, gradients: bool) -> Any:
        q, k, v = (torch.zeros(2, 256, 4, 128, dtype=torch.bfloat16, requires_grad=gradients) for _ in "qkv")
        g = torch.zeros(2, 256, 4, requires_grad=gradients)
        return flashlin.chunk_simple_gla(q, k, v, g, scale=scale)[0]

    paths = {}
    with recording(parse(TARGET)):
        for gradients in (False, True):
            for scale in (0.25, 0.5):
                o = call(scale, gradients)
                if gradients:
                    o.sum().backward()
            o, path = to_start(partial(call, 0.75, gradients))
            paths["forward with gradients" if gradients else "forward"] = path
        total = o.sum()
        _, paths["backward"] = to_start(total.backward)
    return paths


def table_of_steps(rows: dict[str, dict[str, Any]]) -> str:
    names = ("steps", "calls", "files", "folders")
    lines = ["".join(f"{name:>8}" for name in names) + "  from the op, or backward, to the first kernel"]
    return "\n".join([*lines, *("".join(f"{row[name]:>8}" for name in names) + f"  {about}"
                                for about, row in rows.items())])


def main() -> None:
    parser = argparse.ArgumentParser(prog="house.py", description=ABOUT, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, default=ROOT,
                        help="a folder that contains flashlin/ (default: this checkout)")
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--json", action="store_true", help="print metrics and walks as JSON")
    style.add_argument("--where", choices=sorted(PLACES), metavar="FIGURE",
                       help=f"list the counted places of one metric: {', '.join(PLACES)}")
    parser.add_argument("--steps", action="store_true", help="count the steps of a call instead")
    parser.add_argument("--watch", action="store_true", help=argparse.SUPPRESS)  # the child of --steps
    given = parser.parse_args()
    if given.watch:
        print(json.dumps(watch(given.checkout)))
        return
    house = House(given.checkout.resolve())
    if given.steps:
        rows = steps(house.root)
        print(json.dumps(rows, indent=2) if given.json else table_of_steps(rows))
    elif given.where:
        print(*PLACES[given.where](house), sep="\n")
    elif given.json:
        walks = {walk.thing: {"places": walk.places, "missing": walk.missing} for walk in house.walks()}
        print(json.dumps({"figures": figures(house), "walks": walks}, indent=2))
    else:
        print(text(house))


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # end quietly if the reader of a pipe stops, such as `| head`
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()
