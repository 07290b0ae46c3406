"""Start, watch and end child processes. No other module of flashlin does this.

``Process`` runs a command in a process group of its own, reads its output and applies a time limit.
``run_to_end`` does so in one call. ``forked`` runs functions in forks of this process. All of them return an
``Ended``, which describes each kind of failure in one sentence. ``python`` makes the command of a Python
child. Such a child sends JSON lines to its parent: ``channel`` writes them, and ``Ended.messages`` reads
them.
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
MOST = 1 << 25  # bytes of stdout and of stderr that are kept, from the end of each
GENTLE = 5.0  # seconds from SIGTERM to SIGKILL
GONE = 30.0  # seconds to wait for a killed child to end; a child that waits for a device may take longer
# Factors of a fork's time limit. BUSY: the least CPU time of a fork that counts as timed out. PATIENCE: the
# longest wait.
BUSY, PATIENCE = 0.5, 4
# Matches the lines of stderr that name an error, which say more than the last line.
TELLING = re.compile(r"rror|ssert|UNREACHABLE|terminate called")
# The command is not ``python -m``, because that searches the current directory first, which may contain an
# unrelated json.py. The option -P, which prevents this, needs Python 3.11.
_BEGIN = ("import sys; n = 2 + int(sys.argv[1]); sys.path[:] = sys.argv[2:n]; del sys.argv[1:n]; "
          "from runpy import run_module; run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)")


def python(module: str, *arguments: str, first: str = "") -> list[str]:
    """Return the command that runs a module as ``python -m`` does, but with the import path of this process.

    The command leaves out an empty entry of the import path, which means the current directory. An
    interactive Python and ``python -c`` have such an entry. If the path lacks the folder of flashlin, it is
    added at the end.

    arguments: arguments of the module.
    first: folders to search before all others, joined as in PYTHONPATH.
    """
    folders = [*filter(None, first.split(os.pathsep)), *filter(None, map(str, sys.path))]
    folders += [ROOT] if ROOT not in folders else []
    return [sys.executable, "-c", _BEGIN, str(len(folders)), *folders, module, *arguments]


def channel() -> Callable[..., None]:
    """Return a function that sends its keyword arguments to the parent process, as one JSON line on stdout.

    A child process calls this once. Afterwards, all other output to stdout goes to stderr, so that it does
    not mix with these lines.
    """
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        print(json.dumps(message), file=lines, flush=True)
    return say


class Ended(NamedTuple):
    """The description of a child process's end: its status, its output and its duration.

    code: its exit status, or minus the number of the signal that ended it. None if it did not end by itself.
    stdout, stderr: its output, at most the last MOST bytes of each.
    why: the reason why ``code`` is None.
    timed_out: True if it was ended because of its time limit.
    seconds: time from its start to its end.
    """
    code: int | None
    stdout: str = ""
    stderr: str = ""
    why: str = ""
    timed_out: bool = False
    seconds: float = 0.0

    @property
    def how(self) -> str:
        """Return the end in short, such as ``SIGABRT``, ``exit code 3`` or ``no answer in 60 s``."""
        if self.code is None:
            return self.why
        return failure_kind.signal_name(-self.code) if self.code < 0 else f"exit code {self.code}"

    @property
    def line(self) -> str:
        """Return the last line of stderr that names an error, or else the last line."""
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        telling = list(filter(TELLING.search, lines)) or lines
        return telling[-1][:300] if telling else ""

    @property
    def ending(self) -> str:
        """Return the end as a sentence without a subject: ``ended by SIGABRT: Assertion failed``."""
        if self.code is None:
            return f"gave {self.why} and was ended" if self.timed_out else self.why
        said = f"ended {'by' if self.code < 0 else 'with'} {self.how}"
        return f"{said}: {self.line}" if self.code and self.line else said

    @property
    def failure(self) -> str:
        """Return ``ending`` if the child failed, or ``""`` if its exit status is 0."""
        return "" if self.code == 0 else self.ending

    @property
    def kind(self) -> failure_kind.Kind:
        """Return the cause of the failure: the kernel, a lack of memory, or another fault of the machine."""
        if self.code is not None:
            return failure_kind.of_exit(self.code, self.stderr)
        if self.timed_out:
            return "kernel"
        return "memory" if failure_kind.MEMORY.search(self.why) else "surroundings"

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the JSON objects that the child has printed, one per line. Truncated lines are skipped."""
        found = []
        for line in self.stdout.splitlines():
            with suppress(ValueError):
                if line.startswith("{"):
                    found.append(json.loads(line))
        return found


class _Output:
    """A pipe from a child that a thread reads to its end, so that the child never blocks on a full pipe."""

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
        """Remove and return the next line; ``""`` at the end of the pipe.

        within: seconds to wait for the line; None for no limit. Raises TimeoutError if none arrives.
        """
        with self._more:
            if not self._more.wait_for(lambda: b"\n" in self._kept or not self._open, within):
                raise TimeoutError
            size = self._kept.find(b"\n") + 1 or len(self._kept)
            line = self._kept[:size].decode(errors="replace")
            del self._kept[:size]
            return line

    def text(self) -> str:
        """Return the rest of the output, after waiting up to GENTLE seconds for the end of the pipe.

        Another process may keep the pipe open.
        """
        with self._more:
            self._more.wait_for(lambda: not self._open, GENTLE)
            return self._kept.decode(errors="replace")


class Process:
    """A child process and its output.

    The child has a process group of its own. The whole group is ended with the child, at the latest at the
    end of a ``with`` block. A command that cannot be started raises no exception. ``wait`` then returns an
    ``Ended`` with the reason.

    command: the program and its arguments.
    environment: variables to add to those of this process.
    limit: seconds from start to end; None for no limit.
    interactive: True to give the child a standard input, to which ``send`` writes.
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
        """Write to the child's standard input.

        A thread writes, because a child that hangs does not read and would block the writer.

        close: True to close the input after the text.
        """
        def write(pipe: IO[bytes]) -> None:
            with suppress(OSError):  # the child has ended; the result of ``wait`` describes that
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
        """Yield the lines of the child's standard output as they arrive.

        If no line arrives for ``limit`` seconds, the child is ended as timed out.
        """
        try:
            while self._ended is None and (line := self._stdout.line(limit)):
                yield line
        except TimeoutError:
            self.end(f"no answer in {limit:g} s", timed_out=True)

    def finished(self, within: float | None = None) -> bool:
        """Wait for the child's end, at most ``within`` seconds, and return True if it has ended."""
        if self._ended is None:
            try:
                self._process.wait(within)
            except subprocess.TimeoutExpired:
                return False
        return True

    def wait(self) -> Ended:
        """Wait for the child, end it at its time limit, and return the description of its end."""
        limit = self._limit
        if limit is None:
            self.finished()
            return self.end()
        self.finished(max(0.0, self._began + limit - time.monotonic()))
        return self.end(f"no answer in {limit:g} s", timed_out=True)

    def end(self, why: str = "was ended", *, timed_out: bool = False) -> Ended:
        """End the child and its process group, and return the description of its end.

        why: the reason to report if the child still runs.
        timed_out: True if the reason is a time limit.
        """
        if self._ended is None:
            code = self._process.poll()
            if code is None:  # SIGTERM lets the child end its own children in other process groups
                self._signal("SIGTERM", GENTLE)
            self._signal("SIGKILL", GONE)
            if self._process.stdin:
                with suppress(OSError):  # closing fails if the child has not read all text
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
    """Run a command and return the description of its end.

    given: text for its standard input.
    command, environment, limit: as for ``Process``.
    """
    with Process(command, environment, limit=limit, interactive=bool(given)) as process:
        if given:
            process.send(given, close=True)
        return process.wait()


def forked(works: Sequence[Callable[[Path], str]], at_once: int,
           timeout: float) -> Iterator[tuple[int, Ended]]:
    """Call each function in a fork of this process, and yield (number, Ended) in the order of their ends.

    This process must not use a GPU. The number is the position of the function in ``works``. Each function
    gets a temporary folder of its own. The text that it returns is ``Ended.stdout``, and its output is
    ``Ended.stderr``.

    at_once: the largest number of forks at a time.
    timeout: seconds for each fork. If the CPU time of a fork is then less than half the timeout, other
        programs keep this machine busy, so the fork gets up to four times the timeout. If it still does not
        end, it is killed, but ``Ended.timed_out`` is False and ``Ended.why`` gives the reason.
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
                with suppress(OSError):  # the child makes the same call, and one success is enough
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
                           f"this machine gave it {worked:.0f} s of CPU time in {took:.0f} s")
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
    """Run the function in this fork and exit. This function never returns.

    All output goes to a file, because since Triton 3.3 only stderr names an assertion that failed. An error
    of the function, such as a full disk, is also written to that file, and the exit status is then
    EX_TEMPFAIL.
    """
    try:
        os.setpgid(0, 0)
        faulthandler.disable()  # faulthandler has kept the parent's stderr, and would report an abort there
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
    """Turn off core dumps of this process.

    An abort may be a valid result of a trial, and core dumps of gigabytes would fill the disk.
    """
    with suppress(ImportError, OSError, ValueError):
        import resource  # not on Windows
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _worked(group: int) -> float:
    """Return the CPU time of a process group in seconds; infinity if the system does not report it."""
    total, ticks = 0, os.sysconf("SC_CLK_TCK")
    if not os.path.exists("/proc/self/stat"):
        return math.inf
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended meanwhile
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) if int(fields[2]) == group else 0
    return total / ticks
