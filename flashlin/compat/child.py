"""Child processes of flashlin's own: they import what their parent would import, from where it would, and are
ended with all they have started."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[2])  # the folder that holds flashlin
# ``python -m`` would look into the current directory first, where a json.py may lie that has nothing to do
# with us. (-P is new in Python 3.11.)
_BEGIN = ("import sys; n = 2 + int(sys.argv[1]); sys.path[:] = sys.argv[2:n]; del sys.argv[1:n]; "
          "from runpy import run_module; run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)")


def python(module: str, *arguments: str, first: str = "") -> list[str]:
    """The command that runs ``module`` as ``python -m`` does, but with this process's import path and nothing
    else. An empty entry of that path, which is the current directory, is left out: an interactive Python and
    ``python -c`` have one. The folder of flashlin comes last if it is not there.

    first: folders to look into before, joined as in PYTHONPATH.
    """
    folders = [*filter(None, first.split(os.pathsep)), *filter(None, map(str, sys.path))]
    folders += [ROOT] if ROOT not in folders else []
    return [sys.executable, "-c", _BEGIN, str(len(folders)), *folders, module, *arguments]


def channel() -> Callable[..., None]:
    """In a child: what it tells its parent, keywords that become one JSON line on stdout. What a library
    prints goes to stderr from now on, so that it does not end up between these lines."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        print(json.dumps(message), file=lines, flush=True)
    return say


def messages(said: str) -> list[dict[str, Any]]:
    """The JSON objects that a child has printed, one a line; its end may have come in the middle of one."""
    told = []
    with suppress(ValueError):
        for line in said.splitlines():
            if line.startswith("{"):
                told.append(json.loads(line))
    return told


def end(process: subprocess.Popen[Any]) -> None:
    """End a process that was started with ``start_new_session=True``, and the compilers that it has
    started."""
    with suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
