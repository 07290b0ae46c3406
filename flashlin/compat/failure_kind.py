"""Distinguish failures of a kernel from failures of its surroundings, by the types and texts of errors.

The kind of a failure is "kernel", "memory" (too little memory) or "surroundings" (a full disk, missing
permissions, a GPU that is busy or lost ...). Only a failure of the kind "kernel" may be recorded against that
kernel.
"""
from __future__ import annotations

import re
import signal
import subprocess
from typing import Literal

Kind = Literal["kernel", "memory", "surroundings"]

MEMORY = re.compile(r"out of memory|cannot allocate memory|bad_alloc|MemoryError|CUBLAS_STATUS_ALLOC_FAILED"
                    r"|failed with error code -9\b", re.I)
SURROUNDINGS = re.compile(
    r"no space left on device|disk quota exceeded|read-only file system|permission denied|input/output error"
    r"|stale file handle|too many open files|resource temporarily unavailable|can't start new thread"
    r"|busy or unavailable|devices? (?:is|are) busy|device is lost|fallen off the bus"
    r"|no (?:cuda|hip) gpus are available|no (?:cuda|rocm)-capable device|cuda driver version"
    r"|found no nvidia driver|driver shutting down|system not (?:yet )?initialized|uncorrectable ecc"
    r"|0 active drivers|failed to find c compiler|cannot find ptxas|linker \S+ not found"
    r"|failed with error code -15\b|cannot open shared object file", re.I)
# Errors that a GPU reports after an illegal operation of a kernel. The CUDA context is then lost.
ILLEGAL = re.compile(r"illegal memory access|illegal address|misaligned address|illegal instruction"
                     r"|launch failure|device-side assert|invalid program counter|hardware stack error"
                     r"|invalid address space|memory access fault by GPU|memory_aperture_violation"
                     r"|hipErrorIllegalAddress", re.I)
# The driver stops a long kernel on a GPU that also drives a screen, and reports this.
STOPPED = re.compile(r"launch timed out", re.I)
# Signals that come from outside the process: from the system, when memory or a limit is exhausted, or from a
# person. A bus error also counts, because a mapped file on a full disk causes one.
SENT = {name for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGBUS", "SIGXCPU", "SIGXFSZ",
                          "SIGPIPE") if hasattr(signal, name)}


def of_error(error: BaseException) -> Kind:
    """Return the kind of failure that an exception from compiling or starting a kernel reports."""
    for one in filter(None, (error, error.__cause__)):
        # the text of a CompilationError contains the kernel's source, whose words must not be searched
        quotes_kernel = type(one).__name__ == "CompilationError"
        kind = "kernel" if quotes_kernel else of_text(f"{type(one).__name__}: {one}")
        if kind != "kernel":
            return kind
        # a library that cannot be loaded, or a missing C compiler for the launchers
        if isinstance(one, (OSError, ImportError, subprocess.CalledProcessError)):
            return "surroundings"
    return "kernel"


def of_text(text: str) -> Kind:
    """Return the kind of failure that the output of a compiler or of a dying process reports."""
    return "memory" if MEMORY.search(text) else "surroundings" if SURROUNDINGS.search(text) else "kernel"


def of_exit(code: int, said: str) -> Kind:
    """Return the kind of failure that ended a process while it compiled or ran a kernel.

    code: the exit status of the process, or minus the number of the signal that ended it.
    said: the output of the process.
    """
    if code < 0:
        name = signal_name(-code)
        if name == "SIGKILL":
            return "memory"  # the system sends SIGKILL when memory is short
        if name in SENT:
            return "surroundings"
    return of_text(said)


def signal_name(number: int) -> str:
    """Return the name of a signal: ``SIGABRT`` for 6, and ``signal 40`` for a number without a name."""
    return next((one.name for one in signal.Signals if one == number), f"signal {number}")
