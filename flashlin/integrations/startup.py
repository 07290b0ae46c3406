"""A program that is run as it is, with flashlin in the packages that it uses: ``flashlin run``.

Packages are patched when the program imports them. Python processes that the program starts (ranks of
torchrun, workers) find ``inherited/sitecustomize.py`` on their path, which does the same there.
"""
from __future__ import annotations

import atexit
import functools
import importlib.abc
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from flashlin import dispatch
from flashlin.guards.problem import Plan
from flashlin.integrations.arrivals import remove, watch
from flashlin.integrations.patching import PATCHES, Patched, patch

VARIABLE = "FLASHLIN_PATCH"
INHERITED = Path(__file__).parent / "inherited"
MAY_NOT_LOAD = ("mamba_ssm", "causal_conv1d")  # their extensions fail; the patch stands in for those
SHOWN = 4  # kernels of an op in a line of the summary


def names_of(text: str) -> tuple[str, ...]:
    """Packages out of ``fla,transformers``. Raises ValueError for one that nobody has a patch for."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        if name not in PATCHES:
            raise ValueError(f"{VARIABLE}: got {name!r}, need some of {', '.join(PATCHES)}")
    return names


def installed() -> tuple[str, ...]:
    """The packages that flashlin has patches for and that are here."""
    return tuple(name for name in PATCHES if importlib.util.find_spec(name) is not None)


def begin(names: Sequence[str]) -> None:
    """Patch each package as soon as it is imported; now, if it is already, or if it is not here at all: then
    the patch stands in for it, or says why it cannot."""
    def once(name: str) -> None:
        end: list[Callable[[], None]] = []

        def arrived(module: ModuleType) -> None:
            if module.__name__ == name:  # the package itself: it is whole
                end.pop()()
                patch(name)
        end.append(watch([name], arrived))
    for name in names:
        if name in sys.modules or importlib.util.find_spec(name) is None:
            patch(name)
        elif name in MAY_NOT_LOAD:
            sys.meta_path.insert(0, Before(name))
        else:
            once(name)


class Before(importlib.abc.MetaPathFinder):
    """Patches a package when it is first looked for."""

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
    patched, in the processes it starts, too. At the end stderr says what ran through flashlin."""
    os.environ[VARIABLE] = ",".join(names)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(INHERITED), os.environ.get("PYTHONPATH")]))
    begin(names)
    if not quiet:
        summary_at_exit(names)
    sys.argv = [program, *arguments]
    if module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(program).resolve().parent))
        runpy.run_path(program, run_name="__main__")


def summary_at_exit(names: Sequence[str]) -> None:
    calls: dict[Any, int] = {}  # (op, path, kernels) -> calls
    plan = dispatch.plan

    @functools.wraps(plan)
    def noting(*given: Any) -> Plan:
        made = plan(*given)
        key = made.asked.op, made.path, tuple(dict.fromkeys(launch.kernel for launch in made.launches))
        calls[key] = calls.get(key, 0) + 1
        return made
    vars(noting).update({name: getattr(plan, name) for name in ("cache_clear", "cache_info")})
    setattr(dispatch, "plan", noting)  # noqa: B010  mypy knows it as a function that stays

    def say() -> None:
        from flashlin.integrations.patching import _in_force
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
