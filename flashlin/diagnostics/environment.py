"""Doctor's checks of what Triton needs to compile and run kernels.

They cover a C compiler, Python's headers, libcuda, the cache, environment variables and free GPU memory.
Triton's needs are taken from its ``runtime/build.py`` and ``backends/nvidia/driver.py``. A check that cannot
be made says so (``checks.checkup``): a tool that is missing, forbidden or slow gives no verdict.
"""
from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from flashlin.compat.subprocesses import run_to_end
from flashlin.diagnostics.machine import Machine
from flashlin.diagnostics.report import Check, Status, line

LDCONFIG = "/sbin/ldconfig"  # Triton calls it by this path only
LIMIT = 10.0
LIBSTDCXX = tuple(f"{folder}/libstdc++.so.6" for folder in (
    "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"))
# Folders in which installations put libcuda, for a system where ldconfig does not list it.
LIBCUDA = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib/wsl/lib",
           "/usr/local/nvidia/lib64", "/run/opengl-driver/lib", "/usr/local/cuda/compat")
MOUNTS = Path("/proc/mounts")
# File systems that several machines share. Renaming and locking files there is slow, and can fail.
NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "cifs", "smb", "ceph", "fuse.", "9p", "afs", "pvfs", "wekafs")
ROOM = 200  # MiB that kernels of one model may need in the cache
# Commands of package managers that install a compiler, and Python's headers.
_PYTHON = "python{}.{}".format(*sys.version_info)
MANAGERS = {"apt-get": ("apt-get install -y gcc libc6-dev", f"apt-get install -y {_PYTHON}-dev"),
            "dnf": ("dnf install -y gcc", f"dnf install -y {_PYTHON}-devel"),
            "apk": ("apk add gcc musl-dev", "apk add python3-dev")}

# Commands of shells that unset a variable.
UNSET = {**dict.fromkeys(("sh", "bash", "dash", "zsh", "ksh"), "unset {}"), "fish": "set -e {}",
         **dict.fromkeys(("csh", "tcsh"), "unsetenv {}"),
         **dict.fromkeys(("pwsh", "powershell"), "Remove-Item Env:{}")}


class Variable(NamedTuple):
    """The effect of an environment variable that is set.

    effect: the text for the report.
    status: the status of the line in the report.
    unless: values that have no effect.
    """
    effect: str
    status: Status = "worked around"
    unless: tuple[str, ...] = ("", "0", "false", "off")


VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": Variable("each launch waits for the one before"),
    "TRITON_ALWAYS_COMPILE": Variable("every process compiles every kernel again"),
    "TRITON_KERNEL_OVERRIDE": Variable("files from a folder replace the compiled kernels",
                                       "could not check"),
    "TRITON_DEBUG": Variable("kernels check their assertions, which is slower"),
    "TRITON_DEFAULT_FP_FUSION": Variable("multiply-adds are not fused: slower, and rounded differently",
                                         unless=("", "1", "true", "on")),
    "DISABLE_PTXAS_OPT": Variable("ptxas does not optimise: kernels are many times slower", "degraded"),
    "TORCHDYNAMO_DISABLE": Variable("torch.compile is switched off"),
    "TORCH_COMPILE_DISABLE": Variable("torch.compile is switched off"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": Variable("the driver allocates each tensor, and waits for the GPU"),
    "PYTORCH_JIT": Variable("torch.jit is switched off", "ok", unless=("", "1")),
    "CUDA_VISIBLE_DEVICES": Variable("torch and Triton see only these GPUs", "ok", unless=())}
SHOWN = ("TRITON_", "PYTORCH_", "TORCHDYNAMO_", "TORCH_COMPILE_", "CUDA_", "NVIDIA_VISIBLE_DEVICES",
         "DISABLE_PTXAS_OPT")


def _gravity(machine: Machine) -> Status:
    """Return the status to report if a tool or a file is missing that Triton needs to compile kernels.

    Without an NVIDIA GPU it is ``ok``, since nothing is compiled here.
    """
    return "problem" if machine.known_cards else "ok"


def shell() -> str:
    """Return the name of the user's shell: the parent process if it is a shell, else the login shell."""
    starter = Path(f"/proc/{os.getppid()}/comm")
    names = (starter.read_text().strip() if starter.is_file() else "", Path(os.environ.get("SHELL", "")).name)
    return next((name for name in names if name in UNSET), "pwsh" if os.name == "nt" else "sh")


def unset(variable: str) -> str:
    """Return the command that unsets a variable in the user's shell."""
    return UNSET[shell()].format(variable)


def with_variable(variable: str, value: str, command: str) -> str:
    """Return the command line that runs a command with a variable, in the user's shell."""
    if shell() in ("pwsh", "powershell"):
        return f"$env:{variable}='{value}'; {command}"
    return f"{'' if shell() in ('sh', 'bash', 'dash', 'zsh', 'ksh') else 'env '}{variable}={value} {command}"


def check_compiler(machine: Machine) -> Iterator[Check]:
    """Check for a C compiler, with which Triton compiles a launcher for each kernel."""
    named = os.environ.get("CC")
    found = shutil.which(shlex.split(named)[0]) if named else shutil.which("gcc") or shutil.which("clang")
    if found:
        yield line("C compiler", "ok", f"{found}{', by CC' if named else ''}")
    elif named:
        yield line("C compiler", _gravity(machine),
                   f"CC={named} does not exist, and Triton calls no other compiler", unset("CC"))
    else:
        yield line("C compiler", _gravity(machine),
                   "neither gcc nor clang is on PATH; without CC Triton cannot compile", _install(0))


def check_headers(machine: Machine) -> Iterator[Check]:
    """Check for Python.h, which the launchers of kernels include."""
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"
    if header.is_file():
        yield line("Python.h", "ok", str(header))
    else:
        fix = _headers(header)
        tool = "" if fix else "; the tool that installed this Python also has its headers"
        yield line("Python.h", _gravity(machine),
                   f"{header} does not exist, and the launchers of kernels include it{tool}", fix)


def _headers(header: Path) -> str:
    """Return the command that installs Python's headers, or ``""`` if it is unknown what installed Python."""
    version = "{}.{}.{}".format(*sys.version_info)
    tools = {"/usr/include": _install(1),
             os.environ.get("CONDA_PREFIX"): f"conda install -y --force-reinstall python={version}"}
    owner = next((fix for folder, fix in tools.items() if folder and header.is_relative_to(folder)), "")
    return owner or (f"pyenv install --force {version}" if ".pyenv" in header.parts
                     else f"uv python install --reinstall {version}" if "uv" in header.parts else "")


def _install(which: int) -> str:
    """Return the install command of this system's package manager, or ``""`` if it is not a known one.

    which: 0 for a compiler, 1 for Python's headers.
    """
    first = next((commands[which] for name, commands in MANAGERS.items() if shutil.which(name)), "")
    return f"sudo {first}" if first and os.geteuid() else first


def check_libcuda(machine: Machine) -> Iterator[Check]:
    """Check for libcuda, the driver's library.

    Triton asks ldconfig for its folder, and links launchers with it.
    """
    if not machine.known_cards or sys.platform != "linux":
        return
    if named := os.environ.get("TRITON_LIBCUDA_PATH"):
        there = (Path(named) / "libcuda.so.1").exists() or (Path(named) / "libcuda.so").exists()
        yield (line("libcuda", "ok", f"{named}, by TRITON_LIBCUDA_PATH") if there else
               line("libcuda", "problem", f"{named}, by TRITON_LIBCUDA_PATH: it has no libcuda.so.1",
                    unset("TRITON_LIBCUDA_PATH")))
        return
    said = run_to_end([LDCONFIG, "-p"], limit=LIMIT)
    if said.code is None:
        yield line("libcuda", "could not check", f"{LDCONFIG} {said.failure}")
        return
    found = [line.split()[-1] for line in said.stdout.splitlines() if "libcuda.so.1" in line]
    folders = [str(Path(one).parent) for one in found] or [
        folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":")
        if folder and (Path(folder) / "libcuda.so.1").exists()]
    real = [folder for folder in folders if "stubs" not in Path(folder).parts
            and (Path(folder) / "libcuda.so.1").exists()]
    if folders and real == folders:
        yield line("libcuda", "ok", f"libcuda.so.1 in {real[0]}")
        return
    where = next((folder for folder in [*real, *LIBCUDA] if (Path(folder) / "libcuda.so.1").exists()), "")
    container = ("" if where else
                 ": a container needs --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility")
    why = (f"neither ldconfig nor LD_LIBRARY_PATH has libcuda.so.1{container}" if not folders
           else f"{', '.join(folders)}: a stub, which is for linking only" if any(
               "stubs" in Path(folder).parts for folder in folders)
           else f"{', '.join(folders)}: ldconfig names a file that does not exist")
    yield line("libcuda", "problem", f"{why}{f'; the library is in {where}' if where else ''}",
               f"export TRITON_LIBCUDA_PATH={shlex.quote(where)}" if where else "")


def check_cache(machine: Machine) -> Iterator[Check]:
    """Check the folder in which Triton stores compiled kernels, and from which it loads libraries."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache"))
    near = existing(folder)
    free = shutil.disk_usage(near).free >> 20
    wrong = ("cannot be written" if not can_write(folder)
             else f"has {free} MiB left" if free < ROOM
             else "does not let libraries be loaded (mounted noexec)"
             if hasattr(os, "statvfs") and os.statvfs(near).f_flag & getattr(os, "ST_NOEXEC", 0) else "")
    shared = "" if wrong else network(near)
    if shared:
        yield line("cache", "degraded" if machine.known_cards else "worked around",
                   f"{folder} is on a network file system ({shared}): processes that compile at the same "
                   "time may fail with 'Stale file handle', and compiling is slow", elsewhere())
    elif not wrong:
        yield line("cache", "ok", f"{folder} can be written")
    elif machine.known_cards:
        yield line("cache", "problem", f"{folder} {wrong}, and Triton stores kernels in it", elsewhere())
    else:
        yield line("cache", "worked around", f"{folder} {wrong}, which matters once Triton compiles", elsewhere())


def network(folder: Path) -> str:
    """Return the type of the network file system that an existing folder is on, or ``""``."""
    if not MOUNTS.is_file():
        return ""
    mounts = [entry.split(" ")[1:3] for entry in MOUNTS.read_text(errors="replace").splitlines()]
    within = [(len(place), kind) for place, kind in mounts if folder.resolve().is_relative_to(place)]
    kind = max(within, default=(0, ""))[1]
    return kind if kind.startswith(NETWORK) else ""


def check_libstdcxx(machine: Machine) -> Iterator[Check]:
    """Check whether torch or Triton fails because another, older libstdc++ is loaded."""
    if needed := machine.old_libstdcxx:
        system = next((path for path in LIBSTDCXX if Path(path).is_file()), "")
        yield line("libstdc++", _gravity(machine) if machine.torch is not None else "problem",
                   f"the libstdc++ that is loaded has no {needed}: it is too old for this Triton or torch",
                   'conda install -y -c conda-forge "libstdcxx-ng>=13"' if os.environ.get("CONDA_PREFIX") else
                   f"export LD_PRELOAD={system}" if system else "")


def elsewhere() -> str:
    """Return the command that gives Triton a new cache, for any shell (also fish), without a user name in it.

    The folder's name is new each time. Triton loads libraries from the folder, and another user could create
    a folder with a known name first.
    """
    return 'export TRITON_CACHE_DIR="$(mktemp -d)"'


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest existing folder above it."""
    return next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))


def can_write(folder: Path) -> bool:
    """Return True if the folder can be written, or can be created."""
    near = existing(folder)
    return near.is_dir() and os.access(near, os.W_OK | os.X_OK)


def check_variables(machine: Machine) -> Iterator[Check]:
    """Check the environment variables that torch, CUDA and Triton read."""
    there = sorted(name for name in os.environ if name.startswith(SHOWN))
    yield line("variables", "ok", f"set: {', '.join(there)}" if there else
               "no variable of Triton, torch or CUDA is set")
    for name, one in VARIABLES.items():
        value = os.environ.get(name)
        matters = one.status == "ok" or machine.known_cards
        if value is not None and value.lower() not in one.unless and matters:
            yield line("variables", one.status, f"{name}={value}: {one.effect}",
                       "" if one.status == "ok" else unset(name))


def check_card(machine: Machine) -> Iterator[Check]:
    """Check the free memory of each GPU, and whether its compute mode lets a second process use it."""
    cards = machine.driver.cards
    for index, card in enumerate(cards):
        if 0 <= card.free < max(1024, card.total // 50):
            yield line("memory", "could not check",
                       f"GPU {index} ({card.name}) has {card.free} of {card.total} MiB free: trials of kernels "
                       "may fail because of that")
    for mode in dict.fromkeys(card.mode for card in cards):
        those = [index for index, card in enumerate(cards) if card.mode == mode]
        which = f"{mode} on {', '.join(f'GPU {index} ({cards[index].name})' for index in those)}"
        if mode == "Prohibited":
            only = [f" -i {index}" for index in those] if len(those) < len(cards) else [""]
            yield line("compute mode", "problem", f"{which}: no program can use it",
                       " && ".join(f"sudo nvidia-smi{one} -c DEFAULT" for one in only))
        elif mode.startswith("Exclusive"):
            yield line("compute mode", "could not check",
                       f"{which}: one process at a time, but flashlin warmup and doctor --run start others")


ENVIRONMENT = (check_compiler, check_headers, check_libcuda, check_libstdcxx, check_cache, check_variables,
               check_card)
