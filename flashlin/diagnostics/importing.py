"""Imports of other packages in child processes, to find out if they work.

An import may need seconds and much memory, may end the process, and may hang. So each one runs in a child:

    python -m flashlin.diagnostics.importing fla.ops.gated_delta_rule

The child prints one JSON line with the error (``""`` if there is none) and the seconds that the import took.
"""
from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from flashlin.compat.subprocesses import Process, channel, python
from flashlin.diagnostics.machine import attempt

LOWER = 10  # added to the nice value of a child
AUTOGROUP = Path("/proc/self/autogroup")
# Extension -> its package. The modules in ``packages.PACKAGES`` cannot be imported without their extension.
EXTENSIONS = {"selective_scan_cuda": "mamba_ssm", "causal_conv1d_cuda": "causal_conv1d"}
CHILD = partial(python, "flashlin.diagnostics.importing")
LIMIT = 60.0  # seconds for all children, which run at the same time


class Tried(NamedTuple):
    """The result of one import in a child process.

    error: the error that the import raised, or ``""``.
    seconds: duration of the import.
    known: False if the child gave no result in time.
    """
    error: str
    seconds: float
    known: bool = True


def tried(modules: Mapping[str, str], limit: float = LIMIT) -> dict[str, Tried]:
    """Import the module of each name, each in its own child process, and return the results by name.

    The children run at the same time.
    """
    with begun(modules, limit) as children:
        return outcomes(children)


@contextmanager
def begun(modules: Mapping[str, str], limit: float) -> Iterator[dict[str, Process]]:
    """Import the module of each name in a child process of its own, and give the processes by name.

    limit: seconds from now until the children are ended.
    """
    with ExitStack() as stack:
        yield {name: stack.enter_context(Process(CHILD(module), limit=limit))
               for name, module in modules.items()}


def outcomes(children: Mapping[str, Process]) -> dict[str, Tried]:
    """Wait for the children, and return the results of their imports by name."""
    ended = {name: child.wait() for name, child in children.items()}
    return {name: next((Tried(str(message["error"]), float(message["seconds"])) for message in one.messages),
                       Tried(f"its import {one.ending}", one.seconds, known=one.code is not None))
            for name, one in ended.items()}


def step_back() -> None:
    """Lower the priority of this process, so that its parent goes first if there are few cores."""
    with suppress(AttributeError, OSError):  # Windows lacks it, and a sandbox may refuse it
        os.nice(LOWER)
    # With autogroup, Linux first shares the CPU between sessions. Then nice has an effect only within a
    # session (sched(7)). The value belongs to the whole session, so only the leader of a session changes
    # it. Linux accepts one change in 0.1 s on the whole machine, except from root.
    for _ in range(10 if hasattr(os, "getsid") and os.getsid(0) == os.getpid() else 0):
        try:
            AUTOGROUP.write_text(str(LOWER))
            break
        except BlockingIOError:
            time.sleep(random.uniform(0.1, 0.2))
        except OSError:  # no /proc, or a kernel without autogroup
            break


def import_extension(package: str) -> None:
    """Import the compiled extension of a package, if the package has one."""
    for name, of in EXTENSIONS.items():
        if of == package and find_spec(name):
            import_module("torch")  # the extension needs its libraries
            import_module(name)


def main() -> None:
    """Import the module that the command line names, and print the result.

    The extension of its package is imported first, at normal priority. So the error of a broken extension
    arrives before the time limit, even on few cores.
    """
    say, since = channel(), time.monotonic()
    module = sys.argv[1]
    _, error = attempt(import_extension, module.partition(".")[0])
    if not error:
        step_back()
        _, error = attempt(import_module, module)
    say(error=error, seconds=round(time.monotonic() - since, 1))


if __name__ == "__main__":
    main()
