"""Compile recorded launches to machine code for any GPU, with the importable Triton and without a GPU.

    python -m flashlin.testing.compile --sm 90 < launches.jsonl > results.jsonl

Triton's own JIT compiles, as it does for a call. It gets arguments of the recorded types, and a driver that
only knows the target. So this module does not depend on the compile function of a release.

Each kernel compiles in its own child process, which is forked from a warm parent. An MLIR assertion then ends
only that child. Also, some releases (3.2, 3.3) generate different code for the second kernel of a process
than for the first.
"""
from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flashlin.compat import failure_kind
from flashlin.compat.subprocesses import Ended, Process, forked, python
from flashlin.compat.target import SHARED_ON_AMD, lanes, shared_per_block
from flashlin.guards import launch_table
from flashlin.testing.machine_code import loop_of
from flashlin.testing.record import TYPES, Recorded

DTYPES = {name: dtype for dtype, name in TYPES.items()}
NUMBERS: dict[str, Any] = {"i32": 3, "i32:1": 1, "i32:16": 16, "i64": 2**40 + 3, "i64:16": 2**40,
                           "u64": 2**63 + 3, "u64:16": 2**63, "fp32": 0.5, "i1": True}
TELLING = re.compile(r"Assertion|LLVM ERROR|UNREACHABLE|error:|terminate called|Unsupported")
MATRIX_INSTRUCTIONS = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")
NOT_TRIED = "not tried"


class Result(NamedTuple):
    """The result of one compilation.

    status: one of

    - ``ok``.
    - ``exception``: the compiler raised an exception.
    - ``abort``: the compiler killed its process.
    - ``ptxas``: the assembler rejected the code.
    - ``shared``: the kernel compiles, but needs more shared memory than one block may have.
    - ``timeout``.
    - ``not tried``: the machine failed (full disk, no memory, a missing program, a killed child), which says
      nothing about the kernel.

    message: text of the exception.
    cause: the line of stderr that explains the failure.
    shared: bytes of shared memory.
    registers: registers per thread.
    spills: bytes of spill stores and loads.
    instructions, local: size of the longest loop and its local-memory accesses, see ``testing.machine_code``.
        Set if the Job requests them or the kernel is very slow (``launch_table.Slow``).
    matrix: names of the tensor-core instructions in the code.
    seconds: duration of the compilation.
    triton: the release that compiled.
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
        """Return True if the kernel compiles and fits."""
        return self.status == "ok"

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Result:
        """Return the result with these fields, as read from JSON. Other fields are ignored."""
        return cls(**{name: fields[name] for name in cls._fields})._replace(matrix=tuple(fields["matrix"]))


class Job(NamedTuple):
    """One launch to compile for one target.

    sm: compute capability as ptxas writes it (90, 103), or an AMD architecture (``gfx942``).
    loop: always measure the longest loop, which takes half a second.
    """
    sm: int | str
    launch: Recorded
    loop: bool = False


class Compiler:
    """A process that has imported Triton and compiles batches of jobs.

    Only its start takes time, about two seconds.

    environment: variables to add to this process's environment, as returned by ``triton_environment``.
    at_once: number of children at a time, 0 for one per core.
    timeout: seconds for each kernel.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, *, at_once: int = 0,
                 timeout: float = 180) -> None:
        environment = {**(environment or {}), "TRITON_INTERPRET": "0"}
        command = python("flashlin.testing.compile", "--at-once", str(at_once), "--timeout", str(timeout),
                         first=environment.get("PYTHONPATH", ""))
        self._process = Process(command, environment, interactive=True)

    def compiling(self, jobs: Sequence[Job]) -> Iterator[tuple[int, Result]]:
        """Compile the jobs and yield (job number, result) as they finish.

        The caller must read all results before it sends the next batch. Raises RuntimeError if the process
        itself cannot run.
        """
        lines = (json.dumps({**job._asdict(), "launch": job.launch.fields()}) for job in jobs)
        self._process.send("\n".join([*lines, "", ""]))
        answers = self._process.lines()
        for _ in jobs:
            line = next(answers, "")
            if not line:
                ended = self._process.wait()
                raise RuntimeError(f"the compiling process: {ended.how}: {ended.stderr.strip()[-2000:]}")
            fields = json.loads(line)
            yield fields["job"], Result.from_fields(fields)

    def close(self) -> None:
        """End the process and its children."""
        self._process.end()


def compiling(jobs: Sequence[Job], environment: Mapping[str, str] | None = None, *, at_once: int = 0,
              timeout: float = 180) -> Iterator[tuple[int, Result]]:
    """Compile the jobs in a new process, and yield (job number, result) as they finish.

    Closing the iterator ends the children.

    environment: variables to add to this process's environment, see environments.py.
    at_once: number of children at a time, 0 for one per core.
    timeout: seconds for each kernel.

    Raises RuntimeError if the process itself cannot run.
    """
    with closing(Compiler(environment, at_once=at_once, timeout=timeout)) as compiler:
        yield from compiler.compiling(jobs)


def compile_launches(jobs: Sequence[Job], environment: Mapping[str, str] | None = None, *, at_once: int = 0,
                     timeout: float = 180) -> list[Result]:
    """Compile the jobs in a new process and return their results in the order of the jobs.

    The parameters are explained in ``compiling``.
    """
    return [result for _, result in sorted(compiling(jobs, environment, at_once=at_once, timeout=timeout))]


class _Pointer:
    """A stand-in for a tensor with the two properties that the JIT reads: dtype and address."""

    def __init__(self, dtype: torch.dtype, address: int) -> None:
        self.dtype, self.address = dtype, address

    def data_ptr(self) -> int:
        return self.address


class Driver:
    """A minimal Triton driver: it reports a current device and the target to compile for.

    sm: compute capability (90), or an AMD architecture (``gfx942``).
    """

    def __init__(self, sm: int | str) -> None:
        self.sm = sm

    def get_current_device(self) -> int:
        """Return device 0."""
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        """Return stream 0."""
        return 0

    def get_current_target(self) -> Any:
        """Return Triton's description of the target, with the size of a warp."""
        from triton.backends.compiler import GPUTarget
        if isinstance(self.sm, int):
            return GPUTarget("cuda", self.sm, 32)
        return GPUTarget("hip", self.sm, lanes(self.sm))


def argument(kind: str | None) -> Any:
    """Return a value to which the JIT gives the type ``kind``, such as ``*bf16:16`` or ``i32``."""
    if kind is None:
        return None
    if not kind.startswith("*"):
        return NUMBERS[kind]
    name, _, divisible = kind[1:].partition(":")
    return _Pointer(DTYPES[name], 0 if divisible else 4)


def _compile(job: Job, folder: Path) -> Result:
    """Let the JIT compile the launch of a job. Runs in the child process."""
    launch = job.launch
    kernel = getattr(importlib.import_module(launch.module), launch.kernel)
    # The child inherits code that its parent compiled, perhaps for another GPU. Up to Triton 3.2 it is in
    # ``cache``, later in ``device_caches``.
    for name in ("cache", "device_caches"):
        getattr(kernel, name, {}).clear()
    return compiled_by(partial(kernel.warmup, *(argument(kind) for _, kind in launch.arguments), grid=(1,),
                               **dict(launch.constants), num_warps=launch.num_warps,
                               num_stages=launch.num_stages), job.sm, folder, job.loop)


def compiled_by(warmup: Callable[[], Any], sm: int | str, folder: Path, loop: bool = False) -> Result:
    """Call ``warmup``, through which the JIT compiles a kernel for ``sm``, and return the Result.

    Runs in the child process.

    folder: receives Triton's cache and temporary files.
    loop: see Job.
    """
    from triton.runtime import driver
    os.environ["TRITON_CACHE_DIR"] = str(folder / "cache")
    driver.set_active(Driver(sm))
    log = _keep_ptxas_report()
    try:
        compiled = warmup()
        code = str(compiled.asm["ptx" if isinstance(sm, int) else "amdgcn"])
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if failure_kind.of_error(error) != "kernel":
            return Result(NOT_TRIED, text.partition("\n")[0][:300])
        if error.__cause__ is not None:
            text += f" <- {type(error.__cause__).__name__}: {error.__cause__}"
        refusals = [line for line in str(error).splitlines() if line.startswith("ptxas ") and "error" in line]
        return Result("ptxas" if "ptxas" in str(error) else "exception", [*refusals, text][0][:2000])
    if isinstance(sm, int):
        report, limit = "\n".join(log), shared_per_block((sm // 10, sm % 10))
        registers = re.search(r"Used (\d+) registers", report)
        spills = [int(count) for count in re.findall(r"\b(\d+) bytes spill (?:stores|loads)", report)]
    else:
        # The AMD assembler writes its metrics into the code. It counts spills in registers of 4 bytes.
        limit = SHARED_ON_AMD
        registers = re.search(r"\.vgpr_count:\s+(\d+)", code)
        spills = [4 * int(count) for count in re.findall(r"\.vgpr_spill_count:\s+(\d+)", code)]
    shared = int(compiled.metadata.shared)
    result = Result("ok", shared=shared, registers=int(registers[1]) if registers else 0, spills=sum(spills),
                    matrix=tuple(sorted(set(MATRIX_INSTRUCTIONS.findall(code)))))
    slow = launch_table.slow_of(result.registers, result.spills)
    if isinstance(sm, int) and (loop or (slow and slow.very)):
        result = result._replace(**loop_of(compiled.asm["cubin"], disassembler(), folder)._asdict())
    return result if shared <= limit else result._replace(
        status="shared", message=f"{shared} bytes of shared memory, {limit} on {sm}")


def disassembler() -> Path:
    """Return the path of nvdisasm in the imported Triton's wheel; every release has one."""
    import triton.backends
    return Path(triton.backends.__path__[0]) / "nvidia" / "bin" / "nvdisasm"


def _keep_ptxas_report() -> list[str]:
    """Return a list that receives the report of each later run of ``ptxas -v``.

    The report contains registers and spills. Triton writes it to a file and deletes the file. Releases start
    ptxas in different ways, so this function wraps ``subprocess.run``.
    """
    log: list[str] = []
    run = subprocess.run

    def watched(command: Any, *args: Any, **options: Any) -> Any:
        text = command if isinstance(command, str) else " ".join(map(str, command))
        to_file = re.search(r"2> (\S+)", text)
        name = to_file[1] if to_file else getattr(options.get("stderr"), "name", None)
        try:
            return run(command, *args, **options)
        finally:
            if "ptxas" in text and isinstance(name, str) and os.path.exists(name):
                log.append(Path(name).read_text(errors="replace"))
    subprocess.run = watched  # type: ignore[assignment]  # run has overloads, a wrapper has none
    return log


def compiled_in_forks(works: Sequence[Callable[[Path], Result]], at_once: int,
                      timeout: float) -> Iterator[tuple[int, Result]]:
    """Call each function in a fork of this process, and yield (number, result) as they end.

    A compiler that aborts ends only its fork. See ``forked``.

    at_once: number of forks at a time.
    timeout: seconds for each fork.
    """
    import triton
    for number, ended in forked([partial(_in_words, work) for work in works], at_once, timeout):
        yield number, _verdict(ended)._replace(seconds=round(ended.seconds, 2), triton=triton.__version__)


def _in_words(work: Callable[[Path], Result], folder: Path) -> str:
    return json.dumps(work(folder)._asdict())


def _verdict(ended: Ended) -> Result:
    """Return the Result of a fork that has ended."""
    lines = [line for line in ended.stderr.splitlines() if TELLING.search(line)]
    # An assertion explains more than the messages that follow from it.
    lines.sort(key=lambda line: not re.search(r"Assertion|LLVM ERROR|UNREACHABLE", line))
    cause = lines[0].strip()[:500] if lines else ""
    said = cause or ended.stderr.strip()[-500:]
    if ended.timed_out:
        return Result("timeout", cause=cause)
    if ended.code is None:
        return Result(NOT_TRIED, ended.why)
    if ended.code < 0 and ended.kind != "kernel":
        end = f"the compiler was ended by {ended.how}"
        return Result(NOT_TRIED, f"{end}: {said}"[:300] if said else end)
    if ended.code < 0:
        return Result("abort", ended.how, said)
    if not ended.stdout:
        return Result("exception", f"the child ended with {ended.how}", said)
    result = Result.from_fields(json.loads(ended.stdout))
    return result if result.ok else result._replace(cause=cause)


def warm() -> None:
    """Do the slow imports of Triton now, so that the forked children need not repeat them.

    Import the modules that the JIT imports at a first launch (since Triton 3.4), and hash Triton's library.
    """
    with suppress(ImportError):
        importlib.import_module("triton.experimental.gluon")
    for home in ("triton.runtime.cache", "triton.compiler.compiler"):
        with suppress(ImportError, AttributeError):
            importlib.import_module(home).triton_key()
            return


def main(arguments: list[str] | None = None) -> None:
    """Read launches as JSON lines from stdin and print one result per launch as a JSON line."""
    parser = argparse.ArgumentParser(prog="python -m flashlin.testing.compile",
                                     description="Read launches as JSON lines, print results as JSON lines. "
                                                 "At an empty line, compile the launches read so far.")
    parser.add_argument("--sm", type=int,
                        help="compute capability, such as 90, of lines without the field sm")
    parser.add_argument("--at-once", type=int, default=0,
                        help="number of kernels to compile at a time, 0 for one per core")
    parser.add_argument("--timeout", type=float, default=180, help="seconds for each kernel")
    given = parser.parse_args(arguments)
    # Exit normally, so that the children are also ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    at_once = given.at_once or os.cpu_count() or 1
    for lines in batches(sys.stdin):
        jobs = []
        for fields in map(json.loads, lines):
            sm, loop = fields.pop("sm", given.sm), fields.pop("loop", False)
            if sm is None:
                parser.error("--sm is required if a line has no field sm")
            jobs.append(Job(sm, Recorded.from_fields(fields.get("launch", fields)), loop))
        for module in {job.launch.module for job in jobs}:
            importlib.import_module(module)  # Import it here once, not in every child.
        warm()
        works = [partial(_compile, job) for job in jobs]
        for number, result in compiled_in_forks(works, at_once, given.timeout):
            print(json.dumps({"job": number, "kernel": jobs[number].launch.kernel, "sm": jobs[number].sm,
                              **result._asdict()}), flush=True)


def batches(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield the groups of lines that are separated by empty lines."""
    return (list(batch) for filled, batch in groupby(map(str.strip, lines), bool) if filled)


if __name__ == "__main__":
    main()
