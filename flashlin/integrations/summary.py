"""The summary of ``flashlin run``: what was patched, and which kernels ran.

It covers the program and the processes that it started (ranks of torchrun, workers). The process of
``flashlin run`` prints the summary when it ends. It makes a temporary folder that only this user can read,
and sets the environment variable ``VARIABLE`` to its process number and the folder. A program that replaces
the process by exec has the same number, and prints the summary instead.

Every other process writes its counts to a file in the folder when it ends, and each time that a count reaches
a power of two. A killed process or a forked worker ends without calling exit functions, but its file then has
at least half of its calls.
"""
from __future__ import annotations

import atexit
import json
import os
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from shutil import rmtree
from typing import NamedTuple

from flashlin import dispatch
from flashlin.guards.plan_types import Plan
from flashlin.integrations.patching import Patched, _in_force, some

VARIABLE = "FLASHLIN_SUMMARY"
SHOWN = 4  # the most kernels of an op in a line


class Ran(NamedTuple):
    """Calls of an op with the same path and kernels."""
    op: str
    path: str
    kernels: tuple[str, ...]

    def told(self, count: int, cut: bool = False) -> str:
        """Return the line of the summary. cut: the count may be too low, since a process ended early."""
        plain = "plain torch" if self.path == "torch" else self.path
        how = f"kernels {some(self.kernels, SHOWN)}" if self.kernels else plain
        return f"{self.op}: {'at least ' if cut else ''}{count} calls, {how}"


class Summary:
    """The summary of this process.

    folder: the folder in which other processes leave their summaries.
    prints: True if this process prints.
    """

    def __init__(self, folder: Path, prints: bool) -> None:
        self.folder, self.prints = folder, prints
        self.calls = Counter[Ran]()
        self._file = secrets.token_hex(8)
        self._watching = ExitStack()
        self._watching.enter_context(dispatch.watching(self._note))
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)
        atexit.register(self._end)

    def _note(self, made: Plan) -> None:
        ran = Ran(made.asked.op, made.path, tuple(dict.fromkeys(launch.kernel for launch in made.launches)))
        self.calls[ran] += 1
        if not self.prints and self.calls[ran].bit_count() == 1:  # a power of two
            self._leave(ended=False)

    def _forked(self) -> None:
        self.prints, self._file = False, secrets.token_hex(8)
        self.calls.clear()

    def _end(self) -> None:
        self._watching.close()
        if self.prints:
            self._print()
        elif self.calls or _patched():
            self._leave(ended=True)

    def _leave(self, ended: bool) -> None:
        text = json.dumps({"ended": ended, "patched": _patched(), "calls": list(self.calls.items())})
        part = self.folder / f"{self._file}.part"
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(part.with_suffix(".json"))
        except FileNotFoundError:
            pass  # the process that prints has ended and removed the folder
        except OSError as error:
            tell(f"the summary lacks process {os.getpid()} ({error})")

    def _print(self) -> None:
        left = [json.loads(file.read_text(encoding="utf-8")) for file in self.folder.glob("*.json")]
        rmtree(self.folder, ignore_errors=True)
        lines = _patched() + _lines(self.calls)
        if left:
            calls, cut = Counter[Ran](), set[Ran]()
            for one in left:
                for (op, path, kernels), count in one["calls"]:
                    ran = Ran(op, path, tuple(kernels))
                    calls[ran] += count
                    if not one["ended"]:
                        cut.add(ran)
            patched = sorted(dict.fromkeys("\n".join(one["patched"]) for one in left if one["patched"]))
            count = "a process" if len(left) == 1 else f"{len(left)} processes"
            lines.append(f"in {count} that the program started:")
            lines += [f"  {line}" for text in patched for line in text.splitlines()]
            lines += [f"  {line}" for line in _lines(calls, cut)]
        tell(*lines or ["none of the packages to patch was imported"])


_of_this_process: list[Summary] = []


def begin(prints: bool = False) -> None:
    """Start the summary of this process.

    prints: print it here, unless another process already prints. Raises OSError if no temporary folder can be
        made.
    """
    process, _, folder = os.environ.get(VARIABLE, "").partition(" ")
    there = bool(folder) and os.path.isdir(folder)
    if _of_this_process or not (there or prints):
        return
    own = str(os.getpid())
    if not there:
        process, folder = own, tempfile.mkdtemp(prefix="flashlin-run-")
        os.environ[VARIABLE] = f"{process} {folder}"
    _of_this_process.append(Summary(Path(folder), prints=process == own))


def _patched() -> list[str]:
    return str(Patched(list(_in_force.values()))).splitlines()


def _lines(calls: Counter[Ran], cut: Collection[Ran] = ()) -> list[str]:
    return [ran.told(count, ran in cut) for ran, count in sorted(calls.items())]


def tell(*lines: str) -> None:
    """Print lines to stderr, unless the program has closed it."""
    if sys.stderr is not None and not getattr(sys.stderr, "closed", False):
        print("\n".join(f"flashlin: {line}" for line in lines), file=sys.stderr)
