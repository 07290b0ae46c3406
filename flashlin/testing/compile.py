"""Compile recorded launches to machine code for any card, with whatever Triton is importable, without a GPU.

    python -m flashlin.testing.compile --sm 90 < launches.jsonl > results.jsonl

Triton's own JIT does the work, as for a call: it is handed arguments of the recorded types and a driver that
only knows the target, so nothing here depends on how a release spells its compile function. One child process
per kernel, forked from a warm parent: an MLIR assertion kills only the child, and some releases (3.2, 3.3)
generate other code for the second kernel of a process than for the first.
"""
from __future__ import annotations

import argparse
import faulthandler
import importlib
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flashlin.compat import blame
from flashlin.compat.child import python
from flashlin.compat.target import SHARED_ON_AMD, lanes, shared_per_block
from flashlin.guards import proven
from flashlin.testing.machine_code import loop_of
from flashlin.testing.record import TYPES, Recorded

DTYPES = {name: dtype for dtype, name in TYPES.items()}
NUMBERS: dict[str, Any] = {"i32": 3, "i32:1": 1, "i32:16": 16, "i64": 2**40 + 3, "i64:16": 2**40,
                           "u64": 2**63 + 3, "u64:16": 2**63, "fp32": 0.5, "i1": True}
TELLING = re.compile(r"Assertion|LLVM ERROR|UNREACHABLE|error:|terminate called|Unsupported")
MATRIX_INSTRUCTIONS = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")
NOT_TRIED = "not tried"
BUSY, PATIENCE = 0.5, 4  # of a time limit: what must be worked for a verdict, and how long that is waited for


class Result(NamedTuple):
    """status: ``ok``, ``exception``, ``abort`` (the compiler killed its process), ``ptxas`` (the assembler
    refused), ``shared`` (compiles, but one block may not have that much shared memory), ``timeout``, or
    ``not tried``: the machine failed (no room, no memory, a program that is not there, a child that was
    killed), which says nothing of the kernel. message: of the exception; cause: the line of stderr that says
    why. shared, registers, spills: bytes of shared memory, registers a thread, bytes of spill stores and
    loads. instructions, local: of the longest loop, see ``testing.machine_code``, where asked for or where
    the kernel is very slow (``proven.Slow``). matrix: tensor-core instructions. triton: the release that
    ran.
    """
    status: str
    message: str = ""
    cause: str = ""
    shared: int = 0
    registers: int = 0
    spills: int = 0
    instructions: int = 0
    local: int = 0
    matrix: tuple[str, ...] = ()
    seconds: float = 0.0
    triton: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Result:
        """As JSON gives them back, other fields beside them."""
        own = {name: fields[name] for name in cls._fields}
        return cls(**{**own, "matrix": tuple(fields["matrix"])})


class Job(NamedTuple):
    """sm: compute capability as ptxas writes it: 90, 103; or an AMD architecture: ``gfx942``. loop: whether
    to count the longest loop of whatever it is, which takes half a second."""
    sm: int | str
    launch: Recorded
    loop: bool = False


class Compiler:
    """A process that has imported Triton and compiles what it is handed, batch after batch: only its start
    takes time, about two seconds.

    environment: on top of this process's, as ``triton_environment`` answers. at_once: children at a time, 0
    for one per core. timeout: seconds for each.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, *, at_once: int = 0,
                 timeout: float = 180) -> None:
        self._told = tempfile.TemporaryFile("w+")  # noqa: SIM115  as long as the process
        environment = {**(environment or {}), "TRITON_INTERPRET": "0"}
        command = python("flashlin.testing.compile", "--at-once", str(at_once), "--timeout", str(timeout),
                         first=environment.get("PYTHONPATH", ""))
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=self._told, text=True, env=os.environ | environment)

    def compiling(self, jobs: Sequence[Job]) -> Iterator[tuple[int, Result]]:
        """(number, result) as they finish. To be read to its end before the next batch. Raises RuntimeError
        if the process itself cannot run."""
        assert self._process.stdout
        lines = (json.dumps({**job._asdict(), "launch": job.launch.fields()}) for job in jobs)
        with suppress(BrokenPipeError):  # why it has ended it tells below
            print(*lines, "", sep="\n", file=self._process.stdin, flush=True)
        for _ in jobs:
            line = self._process.stdout.readline()
            if not line:
                self._process.wait()
                self._told.seek(0)
                raise RuntimeError(f"the compiling process ended with {self._process.returncode}: "
                                   f"{self._told.read().strip()[-2000:]}")
            fields = json.loads(line)
            yield fields["job"], Result.from_fields(fields)

    def compile(self, jobs: Sequence[Job]) -> list[Result]:
        """Results in the jobs' order."""
        return [result for _, result in sorted(self.compiling(jobs))]

    def close(self) -> None:
        self._process.terminate()  # it then ends the compilers it has started
        self._process.communicate()
        self._told.close()


def compile_launches(jobs: Sequence[Job], environment: Mapping[str, str] | None = None, *, at_once: int = 0,
                     timeout: float = 180) -> list[Result]:
    """Compile each job in a process that sees ``environment`` on top of this one's (see environments.py);
    results in the jobs' order.

    at_once: children at a time, 0 for one per core. timeout: seconds for each. Raises RuntimeError if that
    process itself cannot run.
    """
    with closing(Compiler(environment, at_once=at_once, timeout=timeout)) as compiler:
        return compiler.compile(jobs)


def compiling(jobs: Sequence[Job], environment: Mapping[str, str] | None = None, *, at_once: int = 0,
              timeout: float = 180) -> Iterator[tuple[int, Result]]:
    """compile_launches, but (number, result) as they finish. Closing the iterator ends the children."""
    with closing(Compiler(environment, at_once=at_once, timeout=timeout)) as compiler:
        yield from compiler.compiling(jobs)


class _Pointer:
    """A tensor as far as the JIT looks: a dtype and an address."""

    def __init__(self, dtype: torch.dtype, address: int) -> None:
        self.dtype, self.address = dtype, address

    def data_ptr(self) -> int:
        return self.address


class Driver:
    """As much of a driver as the JIT asks before it launches: a current device, and what to compile for."""

    def __init__(self, sm: int | str) -> None:
        self.sm = sm

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget
        if isinstance(self.sm, int):
            return GPUTarget("cuda", self.sm, 32)
        return GPUTarget("hip", self.sm, lanes(self.sm))


def argument(kind: str | None) -> Any:
    """A value that the JIT gives the type ``kind``."""
    if kind is None:
        return None
    if not kind.startswith("*"):
        return NUMBERS[kind]
    name, _, divisible = kind[1:].partition(":")
    return _Pointer(DTYPES[name], 0 if divisible else 4)


def _compile(job: Job, folder: Path) -> Result:
    """In the child: hand the launch to the JIT."""
    launch = job.launch
    kernel = getattr(importlib.import_module(launch.module), launch.kernel)
    return compiled_by(partial(kernel.warmup, *(argument(kind) for _, kind in launch.arguments), grid=(1,),
                               **dict(launch.constants), num_warps=launch.num_warps,
                               num_stages=launch.num_stages), job.sm, folder, job.loop)


def compiled_by(warmup: Callable[[], Any], sm: int | str, folder: Path, loop: bool = False) -> Result:
    """In the child: what comes out where ``warmup`` has the JIT compile a kernel for ``sm``. loop: as of a
    Job."""
    from triton.runtime import driver
    os.environ["TRITON_CACHE_DIR"] = str(folder / "cache")
    driver.set_active(Driver(sm))
    log = _keep_ptxas_report()
    try:
        compiled = warmup()
        code = str(compiled.asm["ptx" if isinstance(sm, int) else "amdgcn"])
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if blame.of_error(error) != "kernel":
            return Result(NOT_TRIED, text.partition("\n")[0][:300])
        if error.__cause__ is not None:
            text += f" <- {type(error.__cause__).__name__}: {error.__cause__}"
        refusals = [line for line in str(error).splitlines() if line.startswith("ptxas ") and "error" in line]
        return Result("ptxas" if "ptxas" in str(error) else "exception", [*refusals, text][0][:2000])
    if isinstance(sm, int):
        report, limit = "\n".join(log), shared_per_block((sm // 10, sm % 10))
        registers = re.search(r"Used (\d+) registers", report)
        spills = [int(count) for count in re.findall(r"\b(\d+) bytes spill (?:stores|loads)", report)]
    else:  # the assembler writes its figures into the code; spills are counted in registers of 4 bytes
        limit = SHARED_ON_AMD
        registers = re.search(r"\.vgpr_count:\s+(\d+)", code)
        spills = [4 * int(count) for count in re.findall(r"\.vgpr_spill_count:\s+(\d+)", code)]
    shared = int(compiled.metadata.shared)
    result = Result("ok", shared=shared, registers=int(registers[1]) if registers else 0, spills=sum(spills),
                    matrix=tuple(sorted(set(MATRIX_INSTRUCTIONS.findall(code)))))
    slow = proven.slow_of(result.registers, result.spills)
    if isinstance(sm, int) and (loop or (slow and slow.very)):
        result = result._replace(**loop_of(compiled.asm["cubin"], disassembler(), folder)._asdict())
    return result if shared <= limit else result._replace(
        status="shared", message=f"{shared} bytes of shared memory, {limit} on {sm}")


def disassembler() -> Path:
    """The one in the wheel of the Triton that is imported; every release has one."""
    import triton.backends
    return Path(triton.backends.__path__[0]) / "nvidia" / "bin" / "nvdisasm"


def _keep_ptxas_report() -> list[str]:
    """ptxas -v writes registers and spills to a file that Triton deletes; this keeps its text, whichever way
    a release starts ptxas."""
    log: list[str] = []
    run = subprocess.run

    def watched(command: Any, *args: Any, **options: Any) -> Any:
        text = command if isinstance(command, str) else " ".join(command)
        to_file = re.search(r"2> (\S+)", text)
        name = to_file[1] if to_file else getattr(options.get("stderr"), "name", None)
        try:
            return run(command, *args, **options)
        finally:
            if "ptxas" in text and isinstance(name, str) and os.path.exists(name):
                log.append(Path(name).read_text(errors="replace"))
    subprocess.run = watched  # type: ignore[assignment]  # run has overloads, which a wrapper has not
    return log


def _child(work: Callable[[Path], Result], folder: Path) -> None:
    """Never returns. Output goes to a file, because from Triton 3.3 on only stderr says which assertion
    failed. An error that no work has caught (no room for the result, say) is told there, too, and by the exit
    status."""
    import resource  # like fork, not on Windows
    try:
        os.setpgid(0, 0)
        faulthandler.disable()  # what it would say of an abort goes to the parent's stderr, which it has kept
        output = os.open(folder / "stderr", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        tempfile.tempdir = str(folder)
        (folder / "result").write_text(json.dumps(work(folder)._asdict()))
        os._exit(0)
    except BaseException as error:
        with suppress(OSError):
            os.write(2, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(os.EX_TEMPFAIL)


def _verdict(folder: Path, status: int | None) -> Result:
    """What became of a child, from what it left behind; status None: it took too long."""
    stderr = (folder / "stderr").read_text(errors="replace") if (folder / "stderr").exists() else ""
    lines = [line for line in stderr.splitlines() if TELLING.search(line)]
    # an assertion says more than the messages that follow from it
    lines.sort(key=lambda line: not re.search(r"Assertion|LLVM ERROR|UNREACHABLE", line))
    cause = lines[0].strip()[:500] if lines else ""
    if status is None:
        return Result("timeout", cause=cause)
    if os.WIFSIGNALED(status):
        ended = signal.Signals(os.WTERMSIG(status))
        said = cause or stderr.strip()[-500:]
        if blame.of_exit(-ended, stderr) != "kernel":
            end = f"the compiler was ended by {ended.name}"
            return Result(NOT_TRIED, f"{end}: {said}"[:300] if said else end)
        return Result("abort", ended.name, said)
    if os.waitstatus_to_exitcode(status) == os.EX_TEMPFAIL:
        return Result(NOT_TRIED, stderr.strip()[-300:])
    if not (folder / "result").exists():
        return Result("exception", f"the child ended with {os.waitstatus_to_exitcode(status)}",
                      cause or stderr.strip()[-500:])
    result = Result.from_fields(json.loads((folder / "result").read_text()))
    return result if result.ok else result._replace(cause=cause)


def _worked(group: int) -> float:
    """The seconds that a core has worked for a group of processes; infinitely many where nobody counts."""
    total, ticks = 0, os.sysconf("SC_CLK_TCK")
    if not os.path.exists("/proc/self/stat"):
        return math.inf
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) if int(fields[2]) == group else 0
    return total / ticks


def forked(works: Sequence[Callable[[Path], Result]], at_once: int,
           timeout: float) -> Iterator[tuple[int, Result]]:
    """(number, result) as they finish, each in a child forked from this process, which must not use a GPU: a
    compiler that aborts ends the child. A work is handed a folder of its own. timeout: seconds for each; of
    one that has not come to work for half of them, because others keep this machine busy, nothing is said."""
    import triton
    room = Path(tempfile.mkdtemp(prefix="flashlin-compile-"))
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
                    _child(work, folder)
                with suppress(OSError):  # the child does it too: whoever comes first
                    os.setpgid(child, child)
                running[child] = (number, folder, time.monotonic(), timeout)
            for child, (number, folder, began, limit) in list(running.items()):
                took = time.monotonic() - began
                done, status = os.waitpid(child, os.WNOHANG)
                result: Result | None = None
                if not done and took > limit:
                    worked = _worked(child)
                    if worked < timeout * BUSY and took < timeout * PATIENCE:
                        running[child] = (number, folder, began, limit + timeout / 4)
                        continue
                    with suppress(ProcessLookupError):
                        os.killpg(child, signal.SIGKILL)
                    done, _ = os.waitpid(child, 0)
                    result = _verdict(folder, None) if worked >= timeout * BUSY else Result(
                        NOT_TRIED, f"this machine had {worked:.0f} s of work for it in {took:.0f} s")
                if done:
                    del running[child]
                    result = result or _verdict(folder, status)
                    yield number, result._replace(seconds=round(took, 2), triton=triton.__version__)
                    shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.005)
    finally:
        for child in running:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        shutil.rmtree(room, ignore_errors=True)


def warm() -> None:
    """What every child would otherwise do again: import what Triton's JIT imports at a first launch (from 3.4
    on), and hash Triton's library."""
    with suppress(ImportError):
        importlib.import_module("triton.experimental.gluon")
    for home in ("triton.runtime.cache", "triton.compiler.compiler"):
        with suppress(ImportError, AttributeError):
            importlib.import_module(home).triton_key()
            return


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m flashlin.testing.compile",
                                     description="launches as JSON lines in, results as JSON lines out; an "
                                                 "empty line: what came so far is compiled before more is read")
    parser.add_argument("--sm", type=int,
                        help="compute capability, 90 for instance, where a line does not say")
    parser.add_argument("--at-once", type=int, default=0,
                        help="kernels compiled at a time, 0 for one per core")
    parser.add_argument("--timeout", type=float, default=180, help="seconds for each")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the children are ended, too
    at_once = given.at_once or os.cpu_count() or 1
    for lines in batches(sys.stdin):
        jobs = []
        for fields in map(json.loads, lines):
            sm, loop = fields.pop("sm", given.sm), fields.pop("loop", False)
            if sm is None:
                parser.error("--sm is needed where a line does not say")
            jobs.append(Job(sm, Recorded.from_fields(fields.get("launch", fields)), loop))
        for module in {job.launch.module for job in jobs}:
            importlib.import_module(module)  # once, before the children
        warm()
        for number, result in forked([partial(_compile, job) for job in jobs], at_once, given.timeout):
            print(json.dumps({"job": number, "kernel": jobs[number].launch.kernel, "sm": jobs[number].sm,
                              **result._asdict()}), flush=True)


def batches(lines: Iterable[str]) -> Iterator[list[str]]:
    """The lines up to an empty one, or to the end."""
    return (list(batch) for filled, batch in groupby(map(str.strip, lines), bool) if filled)


if __name__ == "__main__":
    main()
