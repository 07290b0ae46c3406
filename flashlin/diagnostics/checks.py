"""The checks of ``doctor``: each yields lines of the report about one part of this machine.

The checks work offline and write nothing: they ask the system whether a folder can be written. An exception
in a check becomes a line of the report. A new check is a function listed in ``CHECKS``, or in ``ENVIRONMENT``
of ``environment.py`` if it concerns what Triton needs to compile.
"""
from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path

import flashlin
from flashlin import policy
from flashlin.compat import releases
from flashlin.compat.installed_triton import interpreting
from flashlin.compat.suggestions import either, need_one_of, similar
from flashlin.compat.target import overriding, ptxas_path, ptxas_variable
from flashlin.compat.versions import release
from flashlin.diagnostics.environment import ENVIRONMENT, can_write, unset
from flashlin.diagnostics.extension_code import check_extensions
from flashlin.diagnostics.machine import TRITON_NAMES, Machine, attempt, shadowed
from flashlin.diagnostics.report import Check, line
from flashlin.diagnostics.requirements import check_requirements
from flashlin.guards import local_results
from flashlin.testing import environments

PTXAS_VARIABLES = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
# The first CUDA release whose ptxas knows a compute capability. Known issues cover sm103, sm110 and sm121.
FIRST_CUDA = {(8, 0): "11.0", (8, 6): "11.1", (8, 7): "11.4", (8, 9): "11.8", (10, 0): "12.8"}


def check_python(machine: Machine) -> Iterator[Check]:
    """Report the versions of flashlin and Python, and the platform."""
    yield line("flashlin", "ok",
               f"{flashlin.__version__}, Python {platform.python_version()}, {platform.platform()}")


def check_torch(machine: Machine) -> Iterator[Check]:
    """Report torch, the GPUs that it has no code for, and the devices that could not be read."""
    if machine.torch is None:
        folder = machine.numpy_on_path
        where = f"; numpy comes from {folder}, by PYTHONPATH, and is not for this Python" if folder else ""
        yield line("torch", "problem", f"cannot be used: {machine.torch_error}{where}",
                   unset("PYTHONPATH") if folder else "")
        return
    yield line("torch", "ok", f"{machine.torch.__version__}, {machine.build}")
    if machine.uncovered:
        cards = ", ".join(machine.uncovered)
        yield line("torch", "problem", f"has no code for {cards}: everything except Triton kernels fails")
    for name, error in machine.lost.items():
        yield line(name, "problem", f"cannot be used: {error}")


def check_triton(machine: Machine) -> Iterator[Check]:
    """Report Triton, and whether torch was built with the same release."""
    if machine.triton_error:
        gpu, missing = bool(machine.known_cards), machine.triton_error == "not installed"
        where = f"no kernels run on your {machine.card_names}: " if gpu else ""
        yield line("triton", "degraded" if gpu or not missing else "ok", f"{where}{machine.triton_state}")
        return
    yield line("triton", "ok", f"{machine.triton} from {_folder_of('triton')}")
    wanted = releases.triton_for(machine.torch.__version__) if machine.torch is not None else ""
    pair = f"torch {machine.torch_version} was made with triton {wanted}"
    if wanted and releases.is_that(machine.triton, wanted):
        yield line("pair", "ok", pair)
    elif wanted:
        yield line("pair", "worked around",
                   f"{pair}, but {machine.triton} is loaded: flashlin runs on both, torch.compile may not")
    if machine.known_cards:
        direct = releases.nearest(machine.triton).direct
        yield line("starts", "ok", "compiled kernels are started directly" if direct else
                   "kernels start through Triton's own launch, which takes the host longer: direct starts "
                   f"have not been compared on triton {machine.triton}")


def check_copies(machine: Machine) -> Iterator[Check]:
    """Report several Tritons on the path, or a loaded Triton that is not the installed one."""
    copies = sorted({(one.name, one.version, one.folder) for one in machine.dists
                     if one.name in TRITON_NAMES and one not in machine.leftovers})
    for one in machine.leftovers:
        info = shlex.quote(str(Path(one.folder) / f"{one.name}-{one.version}.dist-info"))
        yield line("leftover", "degraded", f"{info} describes a Triton that is no longer there",
                   f"Remove-Item -Recurse {info}" if os.name == "nt" else f"rm -r {info}")
    if len(copies) > 1:
        listed = ", ".join(f"{name} {version} in {folder}" for name, version, folder in copies)
        what = ("their files overwrite each other" if machine.mixed
                else f"the first on the path wins, which is {machine.triton or 'unusable'}")
        yield line("two Tritons", "problem" if machine.mixed else "worked around", f"{listed}: {what}")
    elif shadowed(machine):
        [(_, version, folder)] = copies
        yield line("loaded Triton", "worked around",
                   f"{machine.triton} is loaded from {_folder_of('triton')}, but {version} is installed in "
                   f"{folder}: another folder shadows it (PYTHONPATH?), or it was replaced while this "
                   "process ran")


def check_here(machine: Machine) -> Iterator[Check]:
    """Report files in the current folder that programs import in place of an installed package.

    ``flashlin doctor`` takes the current folder off the search path, and ``python train.py`` does not.
    """
    for name in ("triton", "torch", "numpy", "fla", "transformers", "mamba_ssm", "causal_conv1d"):
        shadow = next((path for path in (Path(name), Path(f"{name}.py"))
                       if (path / "__init__.py").is_file() or path.is_file()), None)
        spec = PathFinder.find_spec(name) if shadow is not None else None
        if spec is not None and spec.origin and not Path(spec.origin).is_relative_to(Path.cwd()):
            yield line("this folder", "degraded", f"programs that start here import ./{shadow} in place of "
                       f"the installed {name}", f"mv {shadow} my_{shadow}")


def check_ptxas(machine: Machine) -> Iterator[Check]:
    """Report the ptxas of each GPU, and ptxas variables that have no effect or name no program."""
    cards = machine.known_cards
    asked = {ptxas_variable(target.triton, target.capability) for target in cards}
    for variable in filter(os.environ.get, PTXAS_VARIABLES):
        path = os.environ[variable]
        if not (Path(path).is_file() and os.access(path, os.X_OK)):
            yield line("ptxas", "problem" if variable in asked else "worked around",
                       f"{variable}={path} cannot be executed: Triton fails, or since 3.4 uses its own ptxas "
                       "instead", unset(variable))
        if cards and variable not in asked:
            yield line("ptxas", "worked around",
                       f"{variable} has no effect on {machine.card_names} under triton "
                       f"{machine.triton or 'none'}",
                       unset(variable))
    for where, target in machine.cards:
        if target.triton:
            path = ptxas_path(target.triton, target.capability)
            variable = overriding(target.triton, target.capability)
            source = f"by {variable}" if variable else "Triton's own"
            first = max((cuda for capability, cuda in FIRST_CUDA.items() if capability <= target.capability),
                        key=release, default="")
            said = f"{where}: {target.ptxas or 'version unknown'}, {source}, {path or 'not found'}"
            if path and not variable and not os.access(path, os.X_OK):
                yield line("ptxas", "problem", f"{said}: it cannot be executed, so every kernel fails",
                           f"chmod +x {shlex.quote(path)}")
            elif variable and target.ptxas and release(target.ptxas) < release(first):
                yield line("ptxas", "problem", f"{said}: {target.sm} needs {first} or newer, so every kernel "
                           "fails", unset(variable))
            else:
                yield line("ptxas", "ok" if target.ptxas else "could not check", said)


def check_driver(machine: Machine) -> Iterator[Check]:
    """Report the driver, and why torch does not see a GPU that the driver has."""
    driver = machine.driver
    updated = "version mismatch" in driver.failed
    if not driver.cards:
        yield line("driver", "degraded" if updated else "could not check" if machine.on_gpu else "ok",
                   driver.failed or "no NVIDIA driver", "sudo reboot" if updated else "")
        return
    built = str(machine.torch.version.cuda or "") if machine.torch is not None else ""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if machine.torch is None and hidden is not None and not re.match(r"\s*(\d|GPU|MIG)", hidden):
        yield line("driver", "degraded", f"{driver}, hidden by CUDA_VISIBLE_DEVICES={hidden!r}",
                   unset("CUDA_VISIBLE_DEVICES"))
        return
    if not machine.unseen:
        old = (f"; CUDA {built} needs {releases.oldest_driver(built)} or newer" if machine.driver_too_old
               else "")
        yield line("driver", "could not check" if old else "ok", f"{driver}{old}")
        return
    why = (f"is a {machine.build.removesuffix(' build')} build" if not built
           else f"(CUDA {built}) does not see it: CUDA_VISIBLE_DEVICES={hidden!r}" if hidden is not None
           else f"(CUDA {built}) needs driver {releases.oldest_driver(built)} or newer"
           if machine.driver_too_old
           else f"(CUDA {built}) finds no GPU: the running driver and its library are of different "
                "versions, as after an update" if updated
           else f"(CUDA {built}) finds no GPU: " + (
               driver.failed if driver.failed.startswith("nvidia-smi:")
               else "the driver gives this user or container no access"))
    yield line("driver", "degraded",
               f"your {machine.card_names} (driver {driver.version or 'unknown'}) is not used: torch "
               f"{machine.torch.__version__} {why}",
               unset("CUDA_VISIBLE_DEVICES") if hidden is not None else "sudo reboot" if updated else "")


def check_policy(machine: Machine) -> Iterator[Check]:
    """Report the settings in force, and FLASHLIN_ variables that do not exist."""
    if machine.policy_error:
        named = re.search(r"FLASHLIN_[A-Z]+", machine.policy_error)
        yield line("policy", "problem", machine.policy_error, unset(named[0]) if named else "")
        return
    values = {**machine.policy._asdict(), "ignore": ",".join(sorted(machine.policy.ignore)) or "nothing"}
    yield line("policy", "ok", ", ".join(f"{name} {value}" for name, value in values.items()))
    prefix = "FLASHLIN_"
    known = sorted(name.upper() for name in (*policy.Policy._fields, *policy.ELSEWHERE))
    valid = {name: f"{prefix}{name}" for name in known}
    for given in sorted(name for name in os.environ if name.startswith(prefix)):
        bare = given.removeprefix(prefix)
        if bare in valid:
            continue
        close = [valid[name] for name in similar(bare, valid)]
        instead = f"{either(close)} is" if close else need_one_of(bare, valid.values())
        yield line("policy", "worked around", f"{given} is not a setting; {instead}", unset(given))


def check_interpreter(machine: Machine) -> Iterator[Check]:
    """Report that kernels run in Triton's interpreter."""
    if interpreting():
        yield line("interpreter", "degraded" if machine.known_cards else "worked around",
                   "TRITON_INTERPRET is set: Triton's kernels run on the CPU, thousands of times slower",
                   unset("TRITON_INTERPRET"))


def check_folders(machine: Machine) -> Iterator[Check]:
    """Report whether each folder for flashlin's own files can be written."""
    home, why = local_results.place(warn=False)
    cache, unsafe = environments.place()
    for variable, folder, no_folder, what, without in (
            ("FLASHLIN_HOME", home, why, "the results of flashlin warmup and of first calls",
             "each process repeats their trials"),
            ("FLASHLIN_CACHE", cache, unsafe, "releases of Triton for the version matrix",
             "no other release can be fetched")):
        if folder is not None and can_write(folder):
            yield line(variable, "ok", f"{folder} can be written: {what}")
        else:
            yield line(variable, "worked around",
                       f"{f'{folder} cannot be written' if folder else no_folder}: {what}; {without}",
                       f"set {variable} to a folder that you can write to")


def check_tried(machine: Machine) -> Iterator[Check]:
    """Report the results of kernel trials on this machine, with their dates."""
    for target, names in machine.names.items():
        if target.backend not in ("cuda", "hip"):
            continue
        where, here = names[-1], local_results.local(target)
        ran = sorted(one.date for one in here.kernels.values() if one.word == "ran")
        when = f", {ran[0]} to {ran[-1]}" if ran else " in trials on this machine"
        yield line("tried here", "ok", f"{where}: {len(ran)} configurations of kernels ran{when}")
        for config, one in here.kernels.items():
            if one.word in local_results.BAD:
                yield line("tried here", "worked around",
                           f"{where}: {config}: {one.word} on {one.date} ({one.said or one.trial}); another "
                           "configuration is planned", f"flashlin warmup --forget --op {one.op}")
        for trial, one in here.trials.items():
            if one.word == "not tried":
                yield line("tried here", "could not check",
                           f"{where}: {trial} could not be tried on {one.date}: {one.said}; it is used as planned")


def check_modules(machine: Machine) -> Iterator[Check]:
    """Report public names that cannot be imported.

    Without torch no name can be imported. Then ``check_torch`` reports that, and this check reports nothing.
    """
    if machine.torch is None:
        return
    errors: dict[str, list[str]] = {}
    for name in flashlin.__all__:
        _, error = attempt(getattr, flashlin, name)
        if error and error != machine.policy_error:  # ``check_policy`` reports that one
            errors.setdefault(error, []).append(name)
    for error, names in errors.items():
        yield line("modules", "problem", f"{', '.join(names)} cannot be imported: {error}",
                   "pip install --force-reinstall --no-deps flashlin")


CHECKS: tuple[Callable[[Machine], Iterator[Check]], ...] = (
    check_python, check_torch, check_triton, check_copies, check_here, check_ptxas, check_driver,
    check_policy, check_interpreter, *ENVIRONMENT, check_extensions, check_requirements, check_folders,
    check_tried, check_modules)


def checkup(machine: Machine, checks: Iterable[Callable[[Machine], Iterator[Check]]]) -> list[Check]:
    """Run the checks and return their lines. A check that raises gives a line ``could not check``."""
    said: list[Check] = []
    for check in checks:
        lines, error = attempt(lambda check=check: list(check(machine)))
        said += lines if lines is not None else [unchecked(check.__name__.removeprefix("check_"), error)]
    return said


def unchecked(name: str, error: str) -> Check:
    """Return the line for a check that raised an error."""
    return line(name, "could not check", f"could not check: {error}")


def _folder_of(package: str) -> str:
    return str(Path(sys.modules[package].__file__ or "").parent) if package in sys.modules else "nowhere"
