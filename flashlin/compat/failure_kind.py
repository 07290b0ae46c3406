"""The kind of a failure: of a kernel, or of what it needs around it, such as memory, a disk, permissions, or
a card that is busy or gone. It is found by the types and texts of errors.

Only the failure of a kernel may be recorded against that kernel.
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
# What a device says of a kernel that broke it. The context is lost with it.
ILLEGAL = re.compile(r"illegal memory access|illegal address|misaligned address|illegal instruction"
                     r"|launch failure|device-side assert|invalid program counter|hardware stack error"
                     r"|invalid address space|memory access fault by GPU|memory_aperture_violation"
                     r"|hipErrorIllegalAddress", re.I)
STOPPED = re.compile(r"launch timed out", re.I)  # by the watchdog of a card that also draws a screen
# Signals that others send: the system when memory or a limit is used up, or a person; and a bus error, which
# a full disk behind a mapped file makes.
SENT = {name for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGBUS", "SIGXCPU", "SIGXFSZ",
                          "SIGPIPE") if hasattr(signal, name)}


def of_error(error: BaseException) -> Kind:
    """Return the kind of an exception that came out of compiling or starting a kernel."""
    for one in filter(None, (error, error.__cause__)):
        quotes_kernel = type(one).__name__ == "CompilationError"  # comments and all
        kind = "kernel" if quotes_kernel else of_text(f"{type(one).__name__}: {one}")
        if kind != "kernel":
            return kind
        # a library that does not load, no compiler of launchers
        if isinstance(one, (OSError, ImportError, subprocess.CalledProcessError)):
            return "surroundings"
    return "kernel"


def of_text(text: str) -> Kind:
    """Return the kind of a failure by what a compiler or a dying process has printed."""
    return "memory" if MEMORY.search(text) else "surroundings" if SURROUNDINGS.search(text) else "kernel"


def of_exit(code: int, said: str) -> Kind:
    """Return the kind of failure by which a process ended while it compiled or ran a kernel. code: its exit
    status, or minus the number of a signal."""
    if code < 0:
        name = signal_name(-code)
        if name == "SIGKILL":
            return "memory"  # nobody else ends a process so, but the system when memory is short
        if name in SENT:
            return "surroundings"
    return of_text(said)


def signal_name(number: int) -> str:
    """Return ``SIGABRT`` for 6; ``signal 40`` for one without a name."""
    return next((one.name for one in signal.Signals if one == number), f"signal {number}")
