"""A program that is run as it is, with flashlin in the packages that it uses: ``flashlin run``.

Packages are patched when the program imports them. Python processes that the program starts (ranks of
torchrun, workers) find ``inherited/sitecustomize.py`` on their path, which does the same there.
"""
from __future__ import annotations

import atexit
import builtins
import importlib.util
import os
import runpy
import sys
import zipfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from flashlin import dispatch
from flashlin.compat.arrivals import remove, watch
from flashlin.guards.problem import Plan
from flashlin.integrations.patching import PATCHES, Patched, _in_force, comes, patch

VARIABLE = "FLASHLIN_PATCH"
INHERITED = Path(__file__).parent / "inherited"
MAY_NOT_LOAD = ("mamba_ssm", "causal_conv1d")  # their extensions fail; the patch stands in for those
SHOWN = 4  # kernels of an op in a line of the summary
_begun: set[str] = set()


def names_of(text: str, given_by: str = VARIABLE) -> tuple[str, ...]:
    """Packages out of ``fla,transformers``. given_by: what an error calls them. Raises ValueError for one that nobody has a patch for."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        if name not in PATCHES:
            raise ValueError(f"{given_by}: got {name!r}, need some of {', '.join(PATCHES)}")
    return names


def installed() -> tuple[str, ...]:
    """The packages that flashlin has patches for and that are here."""
    return tuple(filter(comes, PATCHES))


def begin(names: Sequence[str]) -> None:
    """Patch each package as soon as it is imported; now, if it is already. Twice is once: a process may have
    inherited that, and be ``flashlin run``. Raises ImportError for one that is not installed, unless its
    patch stands in for it."""
    for name in dict.fromkeys(names):
        if name in _begun:
            continue
        if name in sys.modules:
            patch(name)
        elif name in MAY_NOT_LOAD:
            sys.meta_path.insert(0, Before(name))
        elif not comes(name):
            patch(name)  # says so
        else:
            _once(name)
        _begun.add(name)


def _once(name: str) -> None:
    def arrived(module: ModuleType) -> None:
        # The package itself, which is whole; or a part of one that was not imported, but put there
        if module.__name__ == name or not _is_being_imported(name):
            end()
            patch(name)
    end = watch([name], arrived)


def _is_being_imported(package: str) -> bool:
    return bool(getattr(getattr(sys.modules.get(package), "__spec__", None), "_initializing", False))


class Before:
    """In ``sys.meta_path``: patches a package when it is first looked for."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.package:
            return None
        remove(self)
        patch(name)
        return importlib.util.find_spec(name)


def run(program: str, arguments: Sequence[str], names: Sequence[str], *, module: bool = False,
        quiet: bool = False) -> None:
    """Run a program (a file, or with ``module`` the name of a module) as Python would, with these packages
    patched (``begin``), in the processes it starts, too. At the end stderr says what ran through flashlin.
    An error of the program is told as Python tells it, and raised on as SystemExit."""
    os.environ[VARIABLE] = ",".join(names)
    path = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep)
            if part not in ("", str(INHERITED))]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(INHERITED), *path])
    if not quiet:
        summary_at_exit(names)
    sys.argv = [program, *arguments]
    holds_main = os.path.isdir(program) or zipfile.is_zipfile(program)
    if not getattr(sys.flags, "safe_path", False):  # else Python puts no folder there
        sys.path[0] = (os.getcwd() if module else os.path.abspath(program) if holds_main
                       else str(Path(program).resolve().parent))
    # In place for good: threads and exit functions ask for it when the program's last line has run
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    try:
        if module or holds_main:  # by the function that Python does it with
            run_module = runpy._run_module_as_main  # type: ignore[attr-defined]  # in no stub
            run_module(program if module else "__main__", alter_argv=module)
        else:
            _run_file(main, os.path.abspath(program))
    except Exception as error:
        error.__traceback__ = _without_ours(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None


def _run_file(main: ModuleType, file: str) -> None:
    main.__file__, main.__loader__ = file, SourceFileLoader("__main__", file)
    with open(file, "rb") as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)
    exec(code, vars(main))


def _without_ours(frames: TracebackType | None) -> TracebackType | None:
    """A traceback from the program's first frame on."""
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        frames = frames.tb_next
    return frames


def summary_at_exit(names: Sequence[str]) -> None:
    calls = Counter[tuple[str, str, tuple[str, ...]]]()  # (op, path, kernels)

    def note(made: Plan) -> None:
        calls[made.asked.op, made.path, tuple(dict.fromkeys(launch.kernel for launch in made.launches))] += 1
    whole_program = ExitStack()
    whole_program.enter_context(dispatch.watching(note))

    def say() -> None:
        whole_program.close()
        lines = str(Patched([_in_force[name] for name in names if name in _in_force])).splitlines()
        lines += [f"{op}: {count} calls, {path_of(path, kernels)}"
                  for (op, path, kernels), count in sorted(calls.items())]
        print("\n".join(f"flashlin: {line}" for line in lines or ["nothing that it patches was imported"]),
              file=sys.stderr)
    atexit.register(say)


def path_of(path: str, kernels: Sequence[str]) -> str:
    if not kernels:
        return "plain torch" if path == "torch" else path
    return f"kernels {', '.join(kernels[:SHOWN])}" + (f" and {len(kernels) - SHOWN} more"
                                                     if len(kernels) > SHOWN else "")
