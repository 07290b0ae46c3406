"""Child processes: the only place where flashlin starts, watches and ends other programs.

``Process`` runs a command in a process group of its own, reads its output and applies a time limit.
``run_to_end`` does so in one call. ``forked`` runs functions in forks of this process. All of them answer
with ``Ended``, which has one sentence for each way in which a child can fail. ``python`` makes the command of
a Python child, which answers in JSON lines: ``channel`` writes them, ``Ended.messages`` reads them.
"""
from __future__ import annotations

import faulthandler
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread
from typing import IO, Any, NamedTuple

from flashlin.compat import failure_kind

ROOT = str(Path(__file__).resolve().parents[2])  # the folder that holds flashlin
MOST = 1 << 25  # bytes of each output that are kept: the last ones
GENTLE = 5.0  # seconds between asking a child to end and killing it
GONE = 30.0  # seconds for a killed child to be gone; one that waits for a device may stay longer
BUSY, PATIENCE = 0.5, 4  # of a fork's time limit: the work that makes it a timeout, and the longest wait
# A line of stderr that tells more than the last one.
TELLING = re.compile(r"rror|ssert|UNREACHABLE|terminate called")
# ``python -m`` would look into the current directory first, where a json.py may lie that has nothing to do
# with us. (-P is new in Python 3.11.)
_BEGIN = ("import sys; n = 2 + int(sys.argv[1]); sys.path[:] = sys.argv[2:n]; del sys.argv[1:n]; "
          "from runpy import run_module; run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)")


def python(module: str, *arguments: str, first: str = "") -> list[str]:
    """Return the command that runs ``module`` as ``python -m`` does, but with the import path of this
    process. An empty entry of that path, which means the current directory, is left out: an interactive
    Python and ``python -c`` have one. The folder of flashlin comes last if it is not there.

    first: folders to search before, joined as in PYTHONPATH.
    """
    folders = [*filter(None, first.split(os.pathsep)), *filter(None, map(str, sys.path))]
    folders += [ROOT] if ROOT not in folders else []
    return [sys.executable, "-c", _BEGIN, str(len(folders)), *folders, module, *arguments]


def channel() -> Callable[..., None]:
    """In a child: return a function that sends its keywords to the parent, as one JSON line on stdout. From
    now on, everything else that is printed to stdout goes to stderr, so that it does not mix with these
    lines."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        print(json.dumps(message), file=lines, flush=True)
    return say


class Ended(NamedTuple):
    """The end of a child process.

    code: its exit status, minus the number of the signal that ended it, or None if it did not end by itself.
    stdout, stderr: its output, at most the last MOST bytes of each.
    why: where code is None, what happened instead.
    timed_out: True if it was ended because its time was up.
    seconds: from its start to its end.
    """
    code: int | None
    stdout: str = ""
    stderr: str = ""
    why: str = ""
    timed_out: bool = False
    seconds: float = 0.0

    @property
    def how(self) -> str:
        """``SIGABRT``, ``exit code 3``, ``no answer in 60 s``, ``cannot be started: ...``"""
        if self.code is None:
            return self.why
        return failure_kind.signal_name(-self.code) if self.code < 0 else f"exit code {self.code}"

    @property
    def line(self) -> str:
        """The line of stderr that says most: the last one that names an error, or else the last one."""
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        telling = list(filter(TELLING.search, lines)) or lines
        return telling[-1][:300] if telling else ""

    @property
    def ending(self) -> str:
        """The end as a sentence without its subject: ``ended by SIGABRT: Assertion failed``."""
        if self.code is None:
            return f"gave {self.why} and was ended" if self.timed_out else self.why
        said = f"ended {'by' if self.code < 0 else 'with'} {self.how}"
        return f"{said}: {self.line}" if self.code and self.line else said

    @property
    def failure(self) -> str:
        """``ending``, or ``""`` if the child ended as it should."""
        return "" if self.code == 0 else self.ending

    @property
    def kind(self) -> failure_kind.Kind:
        """The cause of the failure: the kernel that ran, a lack of memory, or another lack of the machine."""
        if self.code is not None:
            return failure_kind.of_exit(self.code, self.stderr)
        if self.timed_out:
            return "kernel"
        return "memory" if failure_kind.MEMORY.search(self.why) else "surroundings"

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The JSON objects that the child has printed, one a line. Lines that were cut off are skipped."""
        found = []
        for line in self.stdout.splitlines():
            with suppress(ValueError):
                if line.startswith("{"):
                    found.append(json.loads(line))
        return found


class _Output:
    """A pipe that a thread reads to its end, so that the child never waits for its reader."""

    def __init__(self, pipe: IO[bytes] | None) -> None:
        assert pipe
        self._pipe, self._kept, self._open, self._more = pipe, bytearray(), False, Condition()

    def start(self) -> None:
        with self._more:
            Thread(target=self._read, daemon=True).start()
            self._open = True

    def _read(self) -> None:
        with self._pipe:
            while chunk := os.read(self._pipe.fileno(), 1 << 16):
                with self._more:
                    self._kept += chunk
                    del self._kept[:-MOST]
                    self._more.notify_all()
        with self._more:
            self._open = False
            self._more.notify_all()

    def line(self, within: float | None) -> str:
        """Take the next line; ``""`` at the end. Raises TimeoutError if none comes in that time."""
        with self._more:
            if not self._more.wait_for(lambda: b"\n" in self._kept or not self._open, within):
                raise TimeoutError
            size = self._kept.find(b"\n") + 1 or len(self._kept)
            line = self._kept[:size].decode(errors="replace")
            del self._kept[:size]
            return line

    def text(self) -> str:
        """Wait a little for the end of the pipe, which another process may hold open, and return the rest."""
        with self._more:
            self._more.wait_for(lambda: not self._open, GENTLE)
            return self._kept.decode(errors="replace")


class Process:
    """A child process and its output. It has a process group of its own, which is ended with it, at the
    latest at the end of a ``with`` block. A command that cannot be started raises nothing: ``wait`` says so.

    environment: variables to add to those of this process. limit: seconds from start to end. interactive:
    there is a standard input, to which ``send`` writes.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None, *,
                 limit: float | None = None, interactive: bool = False) -> None:
        self._began, self._limit = time.monotonic(), limit
        self._ended: Ended | None = None
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE if interactive else subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, start_new_session=True, env={**os.environ, **(environment or {})})
        except OSError as error:
            self._ended = Ended(None, why=f"cannot be started: {error}")
            return
        self._stdout, self._stderr = _Output(self._process.stdout), _Output(self._process.stderr)
        try:
            self._stdout.start()
            self._stderr.start()
        except RuntimeError as error:  # no thread can be started
            self.end(f"cannot be started: {error}")

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def send(self, text: str, *, close: bool = False) -> None:
        """Write to the child's standard input, from a thread, since a child that hangs does not read."""
        def write(pipe: IO[bytes]) -> None:
            with suppress(OSError):  # the child has ended; ``wait`` says how
                pipe.write(text.encode())
                pipe.flush()
                if close:
                    pipe.close()
        if self._ended is None:
            try:
                Thread(target=write, args=(self._process.stdin,), daemon=True).start()
            except RuntimeError as error:  # no thread can be started
                self.end(f"got no input: {error}")

    def lines(self, limit: float | None = None) -> Iterator[str]:
        """Yield the lines of standard output as they come. The child has timed out if none comes for
        ``limit`` seconds."""
        try:
            while self._ended is None and (line := self._stdout.line(limit)):
                yield line
        except TimeoutError:
            self.end(f"no answer in {limit:g} s", timed_out=True)

    def finished(self, within: float | None = None) -> bool:
        """Wait until the child has ended, and return whether it has."""
        if self._ended is None:
            try:
                self._process.wait(within)
            except subprocess.TimeoutExpired:
                return False
        return True

    def wait(self) -> Ended:
        """Wait for the child, end it when its time is up, and return how it ended."""
        limit = self._limit
        if limit is None:
            self.finished()
            return self.end()
        self.finished(max(0.0, self._began + limit - time.monotonic()))
        return self.end(f"no answer in {limit:g} s", timed_out=True)

    def end(self, why: str = "was ended", *, timed_out: bool = False) -> Ended:
        """End the child if it still runs, for this reason, and all that is left of its process group."""
        if self._ended is None:
            code = self._process.poll()
            if code is None:  # it may have put processes into other groups, which only it can end
                self._signal("SIGTERM", GENTLE)
            self._signal("SIGKILL", GONE)
            if self._process.stdin:
                with suppress(OSError):  # text that the child has not read
                    self._process.stdin.close()
            running = code is None
            self._ended = Ended(code, self._stdout.text(), self._stderr.text(), why if running else "",
                                running and timed_out, time.monotonic() - self._began)
        return self._ended

    def _signal(self, name: str, within: float) -> None:
        with suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, getattr(signal, name))
            else:
                self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within)


def run_to_end(command: Sequence[str], environment: Mapping[str, str] | None = None, *,
               limit: float | None = None, given: str = "") -> Ended:
    """Run a command to its end. given: its standard input. See ``Process`` for the rest."""
    with Process(command, environment, limit=limit, interactive=bool(given)) as process:
        if given:
            process.send(given, close=True)
        return process.wait()


def forked(works: Sequence[Callable[[Path], str]], at_once: int,
           timeout: float) -> Iterator[tuple[int, Ended]]:
    """Call each function in a fork of this process, which must not use a GPU, and yield (number, end) in the
    order in which they end. The function gets a folder of its own; the text it returns is the ``stdout`` of
    its end, and what it prints is the ``stderr``.

    timeout: seconds for each. A fork that has worked for less than half of them, because others keep this
    machine busy, gets more time, and at last ``why`` says so.
    """
    room = Path(tempfile.mkdtemp(prefix="flashlin-forked-"))
    waiting = list(enumerate(works))[::-1]
    running: dict[int, tuple[int, Path, float, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                number, work = waiting.pop()
                folder = room / str(number)
                folder.mkdir()
                child = os.fork()
                if child == 0:
                    _in_fork(work, folder)
                with suppress(OSError):  # the child does it too: whoever comes first
                    os.setpgid(child, child)
                running[child] = (number, folder, time.monotonic(), timeout)
            for child, (number, folder, began, limit) in list(running.items()):
                took = time.monotonic() - began
                done, status = os.waitpid(child, os.WNOHANG)
                if not done and took <= limit:
                    continue
                code, why, timed_out = os.waitstatus_to_exitcode(status) if done else None, "", False
                if not done:
                    worked = _worked(child)
                    if worked < timeout * BUSY and took < timeout * PATIENCE:
                        running[child] = (number, folder, began, limit + timeout / 4)
                        continue
                    _kill_fork(child)
                    os.waitpid(child, 0)
                    timed_out = worked >= timeout * BUSY
                    why = (f"no answer in {timeout:g} s" if timed_out else
                           f"this machine had {worked:.0f} s of work for it in {took:.0f} s")
                del running[child]
                stdout, stderr = (path.read_text(errors="replace") if (path := folder / name).exists() else ""
                                  for name in ("result", "stderr"))
                if code == os.EX_TEMPFAIL:
                    code, why = None, stderr.strip()[-300:]
                yield number, Ended(code, stdout, stderr, why, timed_out, took)
                shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.005)
    finally:
        for child in running:
            _kill_fork(child)
        shutil.rmtree(room, ignore_errors=True)


def _kill_fork(child: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def _in_fork(work: Callable[[Path], str], folder: Path) -> None:
    """Never returns. Output goes to a file, because from Triton 3.3 on only stderr says which assertion
    failed. An error of the work (no room for its result, say) also goes there, with an exit status of its
    own."""
    try:
        os.setpgid(0, 0)
        faulthandler.disable()  # it would report an abort to the stderr of the parent, which it has kept
        output = os.open(folder / "stderr", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        no_core_dump()
        tempfile.tempdir = str(folder)
        (folder / "result").write_text(work(folder))
        os._exit(0)
    except BaseException as error:
        with suppress(OSError):
            os.write(2, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(os.EX_TEMPFAIL)


def no_core_dump() -> None:
    """Let this process write no core dump: an abort may be a result, and gigabytes of dumps fill the disk."""
    with suppress(ImportError, OSError, ValueError):
        import resource  # not on Windows
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _worked(group: int) -> float:
    """Return the seconds that a core has worked for a process group; infinity if the system counts none."""
    total, ticks = 0, os.sysconf("SC_CLK_TCK")
    if not os.path.exists("/proc/self/stat"):
        return math.inf
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) if int(fields[2]) == group else 0
    return total / ticks
