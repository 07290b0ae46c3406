"""Facts about the kernels of one checkout, for tools that compare two checkouts.

As a program it imports flashlin and matrix from its current folder. It reads a request as JSON from stdin and
writes the answer as JSON to stdout. ``ask`` starts it.
"""
from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import io
import json
import os
import pkgutil
import subprocess
import sys
import tarfile
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
NOT_SPECIALISED = ("do_not_specialize", "do_not_specialize_on_alignment")
# A piece of source. Its first entry is the kind of the rest:
# ``text``: text to compare as it is.
# ``local``: a name.
# ``function``: the key of a function, which is also read.
# ``constant``: a name and its value.
# ``parameter``: the key of a function and the position of a parameter.
# ``host``: the name of a decorator, which is not code of the kernel.
# ``unknown``: code that this module does not read.
Token = tuple[Any, ...]


class Function(NamedTuple):
    """The source of a jitted function, or of a function that its decorator calls.

    parameters: names of the parameters.
    tokens: the source in pieces.
    """
    parameters: list[str]
    tokens: list[Token]


def plain(function: Any) -> Any:
    return function.fn if is_jitted(function) else function


def key_of(function: Any) -> str:
    return f"{plain(function).__module__}.{plain(function).__qualname__}"


def is_jitted(value: Any) -> bool:
    return inspect.isfunction(getattr(value, "fn", None))


def functions_of(kernel: Any, before: Mapping[str, list[str]] | None = None) -> dict[str, Function]:
    """Return the kernel and every jitted function that it calls, by key (``module.name``).

    before: names of the parameters that a kernel had before, by key, see ``Writer``.
    """
    known, waiting = dict[str, Function](), [kernel]
    while waiting:
        one = waiting.pop()
        if key_of(one) not in known:
            writer = Writer(one, (before or {}).get(key_of(one)) if one is kernel else None)
            known[key_of(one)] = Function(writer.parameters, writer.tokens)
            waiting += writer.called
    return known


class Writer:
    """Translates the source of a jitted function to tokens, with each name resolved.

    Comments, docstrings and layout are left out, as ``flashlin.testing.source_text`` does.

    before: names of the parameters of an earlier version. If this version only has more of them, the new ones
        count as None: they are left out, and so are the statements under ``if NAME is not None``.
    """

    def __init__(self, jitted: Any, before: list[str] | None = None) -> None:
        self.key, self.globals = key_of(jitted), plain(jitted).__globals__
        self.home = plain(jitted).__module__
        self.parameters, self.added = parameters_of(jitted), set[str]()
        if before is not None and [name for name in self.parameters if name in before] == before:
            self.added, self.parameters = set(self.parameters).difference(before), before
        self.tokens, self.called = list[Token](), list[Any]()
        tree = ast.parse(textwrap.dedent(inspect.getsource(plain(jitted))))
        self.locals = {*self.parameters, *(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)
                                           and not isinstance(node.ctx, ast.Load))}
        self.decorating = [keyword for one in getattr(tree.body[0], "decorator_list", ())
                           for keyword in getattr(one, "keywords", ())]
        self.write(tree.body[0])

    def text(self, word: Any) -> None:
        self.tokens.append(("text", str(word)))

    def write(self, node: Any) -> None:
        if isinstance(node, ast.Constant):
            self.text(repr(node.value))
        elif isinstance(node, ast.Name):
            self.tokens.append(("local", node.id) if node.id in self.locals else self.resolved(node.id))
        elif isinstance(node, list):
            self.text("[")
            self.each(node)
            self.text("]")
        elif isinstance(node, ast.AST):
            self.text(f"({type(node).__name__}")
            jitted = self.globals.get(node.func.id) if isinstance(node, ast.Call) and isinstance(
                node.func, ast.Name) and node.func.id not in self.locals else None
            if isinstance(node, ast.Call) and is_jitted(jitted):
                self.call(node, jitted)
            elif isinstance(node, ast.keyword) and node.arg in NOT_SPECIALISED:
                self.not_specialised(node)
            elif isinstance(node, ast.keyword) and node.arg in self.parameters and node in self.decorating:
                self.tokens.append(("parameter", self.key, self.parameters.index(str(node.arg))))
                self.write(node.value)
            else:
                self.fields(node)
            self.text(")")
        else:
            self.text(repr(node))

    def each(self, nodes: list[Any]) -> None:
        given = [f"{name} is not None" for name in self.added]
        for one in nodes:
            if isinstance(one, ast.If) and ast.unparse(one.test) in given:
                self.each(one.orelse)
            elif not is_docstring(one) and not (isinstance(one, ast.arg) and one.arg in self.added):
                self.write(one)

    def fields(self, node: ast.AST) -> None:
        for name in node._fields:
            value = getattr(node, name, None)
            if value is None or value == [] or name in ("ctx", "type_comment"):
                continue
            self.text(name)
            if isinstance(node, ast.FunctionDef) and name == "name":
                self.tokens.append(("function", self.key))
            elif isinstance(node, ast.arg) and name == "arg":
                self.tokens.append(("local", value))
            else:
                self.write(operands(node) if isinstance(node, ast.BoolOp) and name == "values" else value)

    def call(self, node: ast.Call, jitted: Any) -> None:
        """Write a call with each argument at its parameter's position, whether passed by position or name."""
        self.tokens.append(self.resolved(node.func.id))  # type: ignore[attr-defined]  # a Name, see write
        names = parameters_of(jitted)
        if any(isinstance(one, ast.Starred) for one in node.args) or any(
                one.arg not in names for one in node.keywords):
            self.tokens.append(("unknown", f"a call of {key_of(jitted)} with * or **"))
            return
        by_name = {names.index(one.arg or ""): one.value for one in node.keywords}
        given = {**dict(enumerate(node.args)), **by_name}
        for at, argument in sorted(given.items()):
            self.tokens.append(("parameter", key_of(jitted), at))
            self.write(argument)

    def not_specialised(self, node: ast.keyword) -> None:
        """Write the parameters that a decorator names as sorted positions, so that their order is ignored."""
        self.text(node.arg)
        names = ast.literal_eval(node.value)
        places = {self.parameters.index(one) if isinstance(one, str) else one for one in names}
        self.tokens += [("parameter", self.key, at) for at in sorted(places)]

    def resolved(self, name: str) -> Token:
        if name not in self.globals:
            return "text", f"{name} of builtins" if hasattr(builtins, name) else f"{name} of nothing"
        value = self.globals[name]
        if is_jitted(value) or (getattr(value, "__module__", "") == self.home and inspect.isfunction(value)):
            self.called.append(value)
            return "function", key_of(value)
        if type(value).__name__ == "constexpr":
            number = type(value.value) in (int, float)  # compiles to the same code as the literal
            return ("text", repr(value.value)) if number else ("constant", name, repr(value.value))
        if value is None or isinstance(value, (bool, int, float, str, tuple)):
            return "constant", name, repr(value)
        home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
        if not isinstance(value, ModuleType) and home.startswith("flashlin.compat."):
            return "host", name
        if not home or home.split(".")[0] in ("flashlin", self.key.split(".")[0]):
            return "unknown", f"{name} of {home or self.key}"
        if isinstance(value, ModuleType):
            return "text", home
        return "text", f"{home}.{getattr(value, '__qualname__', name)}"


def parameters_of(jitted: Any) -> list[str]:
    return list(inspect.signature(plain(jitted)).parameters)


def operands(chain: ast.BoolOp) -> list[ast.expr]:
    """Return the operands of a chain such as ``a and b and c``, without regard to parentheses."""
    return [one for value in chain.values
            for one in (operands(value) if isinstance(value, ast.BoolOp) and type(value.op) is type(chain.op)
                        else [value])]


def is_docstring(statement: Any) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


# --- the requests that the program answers ---


def kernels(package: str, before: Mapping[str, list[str]] | None = None) -> dict[str, Any]:
    """Return module, name, parameters, ``source_hash`` and functions of every jitted function in a package.

    before: see ``functions_of``.
    """
    from flashlin.testing.record import source_hash
    home, found = importlib.import_module(package), dict[str, Any]()
    for one in pkgutil.walk_packages(home.__path__, f"{package}."):
        module = importlib.import_module(one.name)
        for name, value in vars(module).items():
            if is_jitted(value) and value.fn.__module__ == one.name and value.fn.__name__ == name:
                found[f"{one.name}.{name}"] = {"module": one.name, "name": name,
                                               "source": source_hash(one.name, name),
                                               "parameters": parameters_of(value),
                                               "functions": functions_of(value, before)}
    return found


def canonical(launch: Mapping[str, Any]) -> str:
    """Return the facts for which a launch is compiled, as text.

    The order in which host code passes constants does not matter.
    """
    return json.dumps([launch["module"], launch["kernel"], launch["arguments"],
                       dict(sorted(launch["constants"].items())), launch["num_warps"], launch["num_stages"]])


def planned(names: list[str], wanted: list[str], places: list[tuple[str, str]]) -> Iterator[Any]:
    """Plan the calls of the matrix for each (release, GPU), and yield the launches of some kernels.

    names: the kernels.
    wanted: ids of launches; planning stops when all are found. Empty: plan everything.
    places: pairs of release and GPU.

    Yields ((release, GPU), id, fields of the launch).
    """
    from matrix.cells import CARDS, whole
    from matrix.run import plans
    cells = {cell.triton: cell for cell in whole().tritons}
    cards = {card.name: card for card in CARDS}
    missing, ops = set(wanted), set[str]()
    for number, (triton, card) in enumerate(places):
        if triton not in cells or card not in cards:
            continue
        # The plans of the first two places show which ops launch these kernels; later places plan only those
        # ops.
        chosen = plans(cells[triton], [cards[card]],
                       wanted=(lambda op, label: True) if number < 2 else (lambda op, label: op in ops))
        for outcome in chosen.outcomes:
            if any(launch.rpartition("-")[0] in names for launch in outcome.launches):
                ops.add(outcome.op)
        for (name, _), launch in chosen.places.items():
            if launch.kernel in names:
                yield (triton, card), name, launch.fields()
                missing.discard(name)
        print(f"{triton} {card}: {len(missing)} launches to find", file=sys.stderr, flush=True)
        if wanted and not missing:
            return


def identities(launches: list[dict[str, Any]]) -> list[str]:
    from flashlin.testing.record import Recorded
    from matrix.run import identity
    return [identity(Recorded.from_fields(one)) for one in launches]


def compiled(jobs: list[dict[str, Any]], folder: str, at_once: int, timeout: float) -> list[list[str]]:
    """Compile launches with the imported Triton, and return (status, error message) of each.

    The PTX of job n is written to ``folder/n.ptx``. See same_ptx.py.
    """
    from functools import partial

    from flashlin.testing import compile as compiler
    from flashlin.testing.record import Recorded

    def work(number: int, sm: int, launch: Recorded, room: Path) -> Any:
        kernel = getattr(importlib.import_module(launch.module), launch.kernel)

        def warmup() -> Any:
            made = kernel.warmup(*(compiler.argument(kind) for _, kind in launch.arguments), grid=(1,),
                                 **dict(launch.constants), num_warps=launch.num_warps,
                                 num_stages=launch.num_stages)
            Path(folder, f"{number}.ptx").write_text(str(made.asm["ptx"]), encoding="utf-8")
            return made
        return compiler.compiled_by(warmup, sm, room)
    launches = [Recorded.from_fields(job["launch"]) for job in jobs]
    for module in {launch.module for launch in launches}:
        importlib.import_module(module)  # import it here once, not in every child
    compiler.warm()
    works = [partial(work, number, job["sm"], launch)
             for number, (job, launch) in enumerate(zip(jobs, launches, strict=True))]
    # Older checkouts call this function `forked`.
    in_forks: Any = getattr(compiler, "compiled_in_forks", None) or vars(compiler)["forked"]
    answers = dict(in_forks(works, at_once, timeout))
    return [[answers[number].status, answers[number].message] for number in range(len(jobs))]


ANSWERS: dict[str, Any] = {"kernels": kernels, "planned": lambda **given: list(planned(**given)),
                           "identities": identities, "compiled": compiled}


def ask(checkout: Path, question: str, *, environment: Mapping[str, str] | None = None, **given: Any) -> Any:
    """Send a request to a process that imports ``checkout``, and return its answer.

    question: a key of ANSWERS.
    given: arguments of the request.

    The process shares stderr with this one. Raises RuntimeError if it fails.
    """
    variables = {"TRITON_INTERPRET": "0", "PYTHONDONTWRITEBYTECODE": "1", **(environment or {})}
    done = subprocess.run([sys.executable, __file__, "--answer"], cwd=checkout, text=True, check=False,
                          input=json.dumps([question, given]), stdout=subprocess.PIPE,
                          env={**os.environ, **variables})
    if done.returncode:
        raise RuntimeError(f"{question} of {checkout}: the process ended with {done.returncode}; "
                           "see stderr for the reason")
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def checkout_of(place: str) -> Iterator[Path]:
    """Yield the folder of a checkout: ``place`` itself, or a temporary copy of a git revision.

    The copy is unpacked from ``git archive``. Raises SystemExit if ``place`` is neither.
    """
    if (Path(place) / "flashlin").is_dir():
        yield Path(place).resolve()
        return
    done = subprocess.run(["git", "archive", place], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"got {place}, need a folder that contains flashlin/, or a git revision: "
                         f"{done.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory(prefix="flashlin-old-") as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(folder)
        yield Path(folder).resolve()


def main() -> None:
    sys.path[0] = os.getcwd()
    question, given = json.load(sys.stdin)
    answer = ANSWERS[question](**given)
    import flashlin
    if Path(str(flashlin.__file__)).resolve().parents[1] != Path.cwd().resolve():
        raise SystemExit(f"imported {flashlin.__file__}, need the one of {Path.cwd()}")
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
