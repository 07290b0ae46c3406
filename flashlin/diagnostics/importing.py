"""Whether packages can be imported, found out in child processes: an import takes seconds and memory, may end
the process, and may hang.

    python -m flashlin.diagnostics.importing fla.ops.gated_delta_rule

The child prints one JSON line: what was raised, ``""`` if nothing, and how long it took.
"""
from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import NamedTuple

from flashlin.compat.child import channel, end, messages, python
from flashlin.diagnostics.machine import attempt

CHILD = partial(python, "flashlin.diagnostics.importing")
LIMIT = 60.0  # seconds for all of them, which run at the same time


class Tried(NamedTuple):
    """error: what was raised, ``""`` if nothing. known: False where the child gave no answer in time."""
    error: str
    seconds: float
    known: bool = True


def tried(modules: Mapping[str, str], limit: float = LIMIT) -> dict[str, Tried]:
    """Import the module of each name, each in a child of its own."""
    children = {name: subprocess.Popen(CHILD(module), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                       stdin=subprocess.DEVNULL, text=True, errors="replace",
                                       start_new_session=True)
                for name, module in modules.items()}
    with ThreadPoolExecutor(len(children) or 1) as pool:  # one that hangs keeps no other from being read
        try:
            return dict(zip(children, pool.map(partial(_outcome, limit=limit), children.values()),
                            strict=True))
        finally:  # so that nobody waits for them after Ctrl-C
            for child in children.values():
                if child.poll() is None:
                    end(child)


def _outcome(child: subprocess.Popen[str], limit: float) -> Tried:
    since = time.monotonic()
    try:
        said, grumbled = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        end(child)
        child.communicate()
        return Tried(f"its import gave no answer for {limit:.0f} s and was ended", limit, known=False)
    for message in messages(said):
        return Tried(str(message["error"]), float(message["seconds"]))
    how = f"by signal {-child.returncode}" if child.returncode < 0 else f"with exit code {child.returncode}"
    last = next((line for line in reversed(grumbled.splitlines()) if line.strip()), "")
    return Tried(f"its import ends the process {how}" + (f": {last.strip()[:300]}" if last else ""),
                 time.monotonic() - since)


def main() -> None:
    say, since = channel(), time.monotonic()
    _, error = attempt(import_module, sys.argv[1])
    say(error=error, seconds=round(time.monotonic() - since, 1))


if __name__ == "__main__":
    main()
