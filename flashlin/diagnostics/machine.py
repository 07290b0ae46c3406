"""This machine as facts, and doctor's checks on it. Each probe is guarded: what it raises is a result and
never the end of the report.

Offline and read-only: whether a folder can be written is asked of the system, not tried.
"""
from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

import flashlin
from flashlin import policy
from flashlin.compat import releases
from flashlin.compat.target import Target, interpreting, probe, ptxas_path, triton_state
from flashlin.compat.versions import release
from flashlin.diagnostics.report import Check
from flashlin.guards import verdicts
from flashlin.testing import environments

OLDEST_TORCH = release(releases.RELEASES[0].torch[0])[:2]
# Names under which Triton's files have been published: two of them in one folder overwrite each other.
TRITON_NAMES = ("triton", "pytorch-triton", "triton-nightly", "triton-windows", "pytorch-triton-rocm",
                "pytorch-triton-xpu")
PTXAS_VARIABLES = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")


class Machine(NamedTuple):
    """torch: the module, None if unusable (torch_error says why). targets: by device name; lost: devices that
    could not be asked, and why."""
    torch: Any
    torch_error: str
    triton: str
    triton_error: str
    targets: dict[str, Target]
    lost: dict[str, str]
    policy: policy.Policy
    policy_error: str

    @property
    def on_gpu(self) -> bool:
        return any(target.backend == "cuda" for target in self.targets.values())

    @property
    def names(self) -> dict[Target, list[str]]:
        """The names of the devices that are alike: equal cards are one to the report."""
        names: dict[Target, list[str]] = {}
        for name, target in self.targets.items():
            names.setdefault(target, []).append(name)
        return names

    @property
    def cards(self) -> list[tuple[str, Target]]:
        """NVIDIA GPUs, one of those that are alike, each with its name."""
        return [(names[-1], target) for target, names in self.names.items() if target.backend == "cuda"]

    @property
    def triton_of_torch(self) -> str:
        """The Triton that this torch was made with, see ``triton_for``; ``""`` without torch."""
        return triton_for(self.torch.__version__) if self.torch is not None else ""

    @property
    def stops_everything(self) -> str:
        """Why every call of every op fails here, if it does."""
        lost = "" if self.targets else "; ".join(f"{name}: {error}" for name, error in self.lost.items())
        return f"torch: {self.torch_error}" if self.torch_error else self.policy_error or lost


def attempt(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """(value, "") or (None, what was raised)."""
    try:
        return function(*arguments), ""
    # a broken torch, Triton or driver may raise anything at all, and that is what to report
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        return None, f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def examine() -> Machine:
    """Ask this machine. Never raises."""
    torch, torch_error = attempt(_torch)
    state, error = attempt(triton_state)
    triton, triton_error = state or ("", error)
    settings, policy_error = attempt(policy.current)
    targets: dict[str, Target] = {}
    lost: dict[str, str] = {}
    if torch is not None:
        names, error = attempt(_devices, torch)
        if error:
            lost["GPUs"] = error
        for name in names or ["cpu"]:
            target, error = attempt(lambda name=name: probe(torch.device(name)))
            if target is None:
                lost[name] = error
            else:
                targets[name] = target
    return Machine(torch, torch_error, triton, triton_error, targets, lost, settings or policy.Policy(),
                   policy_error)


def _torch() -> Any:
    torch = import_module("torch")
    if release(torch.__version__)[:2] < OLDEST_TORCH:
        raise ImportError(f"torch {torch.__version__} is older than {'.'.join(map(str, OLDEST_TORCH))}")
    return torch


def _devices(torch: Any) -> list[str]:
    return [f"cuda:{index}" for index
            in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


def triton_for(torch_version: str) -> str:
    """The Triton that torch release was made with: ``3.7.1``, or ``3.8`` for any patch release of it; ``""``
    for a torch nobody has looked at."""
    numbers = release(torch_version)[:3]
    triton = next((one.version for one in releases.RELEASES if numbers in map(release, one.torch)), "")
    return triton.rpartition(".")[0] if numbers >= release(releases.MINOR_IS_ENOUGH_FROM) else triton


def is_that(triton: str, wanted: str) -> bool:
    """Whether a Triton is the one that ``triton_for`` names."""
    return bool(wanted) and release(triton)[:wanted.count(".") + 1] == release(wanted)


def pip_triton(wanted: str) -> str:
    """The command that installs the Triton that ``triton_for`` names, any if that is ``""``."""
    if not wanted:
        return "pip install triton"
    return f'pip install "triton=={wanted}"' if wanted.count(".") > 1 else f'pip install "triton~={wanted}.0"'


def check_python(machine: Machine) -> Iterator[Check]:
    yield Check(name="flashlin", status="ok",
                detail=f"{flashlin.__version__}, Python {platform.python_version()}, {platform.platform()}")


def check_torch(machine: Machine) -> Iterator[Check]:
    if machine.torch is None:
        yield Check(name="torch", status="problem", detail=f"cannot be used: {machine.torch_error}",
                    fix='pip install --force-reinstall "torch>=2.4"')
        return
    built = machine.torch.version
    kind = f"CUDA {built.cuda}" if built.cuda else f"ROCm {built.hip}" if built.hip else "CPU build"
    yield Check(name="torch", status="ok", detail=f"{machine.torch.__version__}, {kind}")
    for name, error in machine.lost.items():
        yield Check(name=name, status="problem", detail=f"cannot be used: {error}")


def check_triton(machine: Machine) -> Iterator[Check]:
    wanted = machine.triton_of_torch
    if machine.triton_error:
        missing, fix = machine.triton_error == "not installed", pip_triton(wanted)
        if not missing:
            fix = fix.replace("install", "install --force-reinstall")
        elif not machine.on_gpu:
            fix = ""
        yield Check(name="triton",
                    status="degraded" if machine.on_gpu else "ok" if missing else "worked around",
                    fix=fix, detail=f"{machine.triton_error}; without it every op runs in plain torch")
        return
    yield Check(name="triton", status="ok", detail=f"{machine.triton} from {_folder_of('triton')}")
    if not wanted:
        return
    pair = f"torch {machine.torch.__version__} was made with triton {wanted}"
    if is_that(machine.triton, wanted):
        yield Check(name="pair", status="ok", detail=pair)
    else:
        yield Check(name="pair", status="worked around", fix=pip_triton(wanted),
                    detail=f"{pair}, loaded is {machine.triton}: flashlin runs on either, torch.compile may "
                           "not")


def check_copies(machine: Machine) -> Iterator[Check]:
    """Two Tritons on the path, and a loaded one that is not the installed one."""
    copies = sorted({(name, dist.version, str(dist.locate_file(""))) for name in TRITON_NAMES
                     for dist in metadata.distributions(name=name)})
    if len(copies) > 1:
        listed = ", ".join(f"{name} {version} in {folder}" for name, version, folder in copies)
        mixed = len(copies) > len({folder for _, _, folder in copies})
        what = ("their files overwrite each other" if mixed
                else f"the first on the path wins, which is {machine.triton or 'unusable'}")
        names = " ".join(sorted({name for name, _, _ in copies}))
        yield Check(name="two Tritons", status="problem" if mixed else "worked around",
                    detail=f"{listed}: {what}",
                    fix=f"pip uninstall -y {names} && {pip_triton(machine.triton_of_torch)}")
    elif copies and machine.triton:
        [(_, version, folder)] = copies
        if release(version) != release(machine.triton):
            yield Check(name="loaded Triton", status="worked around", detail=(
                f"loaded is {machine.triton} from {_folder_of('triton')}, installed is {version} in "
                f"{folder}: "
                "another folder shadows it, or it was replaced while this process ran"))


def check_ptxas(machine: Machine) -> Iterator[Check]:
    for variable in PTXAS_VARIABLES:
        path = os.environ.get(variable)
        if path and not (Path(path).is_file() and os.access(path, os.X_OK)):
            yield Check(name="ptxas", status="problem" if machine.on_gpu else "worked around",
                        fix=f"unset {variable}",
                        detail=f"{variable}={path} cannot be executed: Triton fails on it or, from 3.4 on, "
                               "takes its own ptxas instead")
    for where, target in machine.cards:
        if target.triton:
            path = ptxas_path(target.triton, target.capability)
            source = next((f"by {variable}" for variable in PTXAS_VARIABLES
                           if os.environ.get(variable) == path), "Triton's own")
            yield Check(name="ptxas", status="ok" if target.ptxas else "could not check",
                        detail=f"{where}: {target.ptxas or 'version unknown'}, {source}, "
                               f"{path or 'not found'}")


def check_driver(machine: Machine) -> Iterator[Check]:
    program = shutil.which("nvidia-smi")
    if program is None:
        yield Check(name="driver", status="could not check" if machine.on_gpu else "ok",
                    detail="nvidia-smi is not there")
        return
    command = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    cards = [line.strip() for line in said.stdout.splitlines()
             if line.strip()] if said.returncode == 0 else []
    if not cards:
        yield Check(name="driver", status="could not check",
                    detail=f"nvidia-smi: {(said.stdout + said.stderr).strip()[:200] or 'no GPU'}")
        return
    shown = "; ".join(f"{cards.count(card)} x {card.replace(', ', ', driver ')}"
                      for card in dict.fromkeys(cards))
    # torch knows of a GPU, or says itself what is wrong
    if machine.on_gpu or machine.lost or machine.torch is None:
        yield Check(name="driver", status="ok", detail=shown)
        return
    built, hidden, fix = machine.torch.version.cuda, os.environ.get("CUDA_VISIBLE_DEVICES"), ""
    if not built:
        why, fix = "is a CPU build", "pip install --force-reinstall torch"
    elif hidden is not None:
        why = f"(CUDA {built}) is told not to see it: CUDA_VISIBLE_DEVICES={hidden}"
        fix = "unset CUDA_VISIBLE_DEVICES"
    else:
        why = (f"(CUDA {built}) finds none: the driver is too old for it, or does not let this user or "
               "container in")
    yield Check(name="driver", status="degraded", fix=fix,
                detail=f"{shown}; but torch {machine.torch.__version__} {why}: every op runs in plain torch "
                       "on the CPU")


def check_policy(machine: Machine) -> Iterator[Check]:
    if machine.policy_error:
        yield Check(name="policy", status="problem", detail=machine.policy_error,
                    fix="unset the variable it names")
        return
    values = {**machine.policy._asdict(), "ignore": ",".join(sorted(machine.policy.ignore)) or "nothing"}
    yield Check(name="policy", status="ok",
                detail=", ".join(f"{name} {value}" for name, value in values.items()))
    valid = sorted(f"FLASHLIN_{name.upper()}" for name in (*policy.Policy._fields, *policy.ELSEWHERE))
    for given in sorted(name for name in os.environ if name.startswith("FLASHLIN_") and name not in valid):
        meant = get_close_matches(given.removeprefix("FLASHLIN_"),
                                  [name.removeprefix("FLASHLIN_") for name in valid], 1)
        instead = f"FLASHLIN_{meant[0]} does" if meant else f"known are {', '.join(valid)}"
        yield Check(name="policy", status="worked around", fix=f"unset {given}",
                    detail=f"{given} means nothing; {instead}")


def check_interpreter(machine: Machine) -> Iterator[Check]:
    if interpreting():
        yield Check(name="interpreter", status="worked around", fix="unset TRITON_INTERPRET",
                    detail="TRITON_INTERPRET is set: Triton's kernels run on the CPU, thousands of times "
                           "slower")


def check_cache(machine: Machine) -> Iterator[Check]:
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache"))
    if can_write(folder):
        yield Check(name="cache", status="ok", detail=f"{folder} can be written")
    else:
        needed = machine.on_gpu and bool(machine.triton)
        yield Check(name="cache", status="problem" if needed else "worked around",
                    fix="export TRITON_CACHE_DIR=(a folder you can write)",
                    detail=f"{folder} cannot be written, " + ("and Triton compiles into it" if needed
                                                              else "which matters once Triton compiles"))


def check_folders(machine: Machine) -> Iterator[Check]:
    """Where flashlin keeps something."""
    home, why = verdicts.place(warn=False)
    cache = environments.cache_folder()
    for variable, folder, no_folder, what, without in (
            ("FLASHLIN_HOME", home, why, "what flashlin warmup and the first calls find out here",
             "each process finds it out anew"),
            ("FLASHLIN_CACHE", cache, "", "releases of Triton for the version matrix",
             "no other release can be fetched")):
        if folder is not None and can_write(folder):
            yield Check(name=variable, status="ok", detail=f"{folder} can be written: {what}")
        else:
            yield Check(name=variable, status="worked around",
                        fix=f"export {variable}=(a folder you can write)",
                        detail=f"{f'{folder} cannot be written' if folder else no_folder}: {what}; {without}")


def check_tried(machine: Machine) -> Iterator[Check]:
    """What was found out about kernels on this machine, and when."""
    for where, target in machine.cards:
        here = verdicts.local(target)
        ran = sorted(one.date for one in here.kernels.values() if one.word == "ran")
        when = f", {ran[0]} to {ran[-1]}" if ran else " in trials of this machine's own"
        yield Check(name="tried here", status="ok",
                    detail=f"{where}: {len(ran)} configurations of kernels ran{when}")
        for config, one in here.kernels.items():
            if one.word in verdicts.BAD:
                yield Check(name="tried here", status="worked around",
                            fix=f"flashlin warmup --forget --op {one.op}",
                            detail=f"{where}: {config}: {one.word} on {one.date} ({one.said or one.trial}); "
                                   "it is planned otherwise")
        for trial, one in here.trials.items():
            if one.word == "not tried":
                yield Check(name="tried here", status="could not check",
                            detail=f"{where}: {trial} could not be tried on {one.date}: {one.said}; it is "
                                   "used as planned")


def can_write(folder: Path) -> bool:
    """Whether the folder, or the nearest one above it where there is none yet, may be written."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def check_modules(machine: Machine) -> Iterator[Check]:
    """Whether everything public can be imported; without torch nothing can, which is told already."""
    if machine.torch is None:
        return
    errors: dict[str, list[str]] = {}
    for name in flashlin.__all__:
        _, error = attempt(getattr, flashlin, name)
        if error:
            errors.setdefault(error, []).append(name)
    for error, names in errors.items():
        yield Check(name="modules", status="problem",
                    detail=f"{', '.join(names)} cannot be imported: {error}",
                    fix="pip install --force-reinstall --no-deps flashlin")


CHECKS: tuple[Callable[[Machine], Iterator[Check]], ...] = (
    check_python, check_torch, check_triton, check_copies, check_ptxas, check_driver, check_policy,
    check_interpreter, check_cache, check_folders, check_tried, check_modules)


def checkup(machine: Machine, checks: Iterable[Callable[[Machine], Iterator[Check]]]) -> list[Check]:
    """What the checks say; one that fails is a line of its own."""
    said: list[Check] = []
    for check in checks:
        lines, error = attempt(lambda check=check: list(check(machine)))
        said += lines if lines is not None else [
            Check(name=check.__name__.removeprefix("check_"), status="could not check",
                  detail=f"could not check: {error}")]
    return said


def _folder_of(package: str) -> str:
    return str(Path(sys.modules[package].__file__ or "").parent) if package in sys.modules else "nowhere"
