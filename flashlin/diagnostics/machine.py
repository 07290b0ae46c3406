"""This machine as facts, and doctor's checks on it. Each probe is guarded: what it raises is a result and
never the end of the report.

Offline and read-only: whether a folder can be written is asked of the system, not tried. A new check is a
function that is named in ``CHECKS``, or with what Triton needs around it in ``surroundings.py``.
"""
from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import flashlin
from flashlin import policy
from flashlin.compat import releases
from flashlin.compat.releases import is_that, triton_for
from flashlin.compat.target import (
    Target,
    bundled_ptxas,
    interpreting,
    probe,
    ptxas_path,
    ptxas_variable,
    shared_per_block,
    triton_state,
)
from flashlin.compat.versions import release
from flashlin.diagnostics import driver as drivers
from flashlin.diagnostics.driver import Driver
from flashlin.diagnostics.report import Check
from flashlin.diagnostics.surroundings import SURROUNDINGS, can_write, unset
from flashlin.guards import verdicts
from flashlin.testing import environments

OLDEST_TORCH = release(releases.RELEASES[0].torch[0])[:2]
# Names under which Triton's files have been published: two of them in one folder overwrite each other.
TRITON_NAMES = ("triton", "pytorch-triton", "triton-nightly", "triton-windows", "pytorch-triton-rocm",
                "pytorch-triton-xpu")
PTXAS_VARIABLES = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")


class Dist(NamedTuple):
    """What pip knows of an installed package that is torch or Triton, or asks for them. installer: who put it
    there (``pip``, ``uv``, ``conda``). needs: what it asks of torch and triton."""
    name: str
    version: str
    folder: str = ""
    installer: str = ""
    needs: tuple[str, ...] = ()


class Machine(NamedTuple):
    """torch: the module, None if unusable (torch_error says why). targets: by device name; lost: devices that
    could not be asked, and why. driver: what NVIDIA's says, whatever torch sees. dists: torch, Triton, and
    who asks for them. python: of this process, ``()`` for a machine that is not asked. foreign: the folder
    that Triton comes from, where pip has installed none there."""
    torch: Any
    torch_error: str
    triton: str
    triton_error: str
    targets: dict[str, Target]
    lost: dict[str, str]
    policy: policy.Policy
    policy_error: str
    driver: Driver = Driver()
    dists: tuple[Dist, ...] = ()
    python: tuple[int, ...] = ()
    foreign: str = ""

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
    def known_cards(self) -> list[Target]:
        """NVIDIA cards: those of torch, else those that only the driver sees."""
        return [target for _, target in self.cards] or [
            Target(self.triton, bundled_ptxas(self.triton, card.capability), self.torch_version, "cuda",
                   card.capability, card.name, shared_per_block(card.capability), 132)
            for card in dict.fromkeys(self.driver.cards) if card.capability != (0, 0)]

    @property
    def card_names(self) -> str:
        return " and ".join(dict.fromkeys([target.name for _, target in self.cards]
                                          or [card.name for card in self.driver.cards]))

    @property
    def triton_state(self) -> str:
        """What is wrong with Triton, in words."""
        error = self.triton_error
        return "" if not error else ("Triton is not installed" if error == "not installed"
                                     else f"Triton does not import: {error.removeprefix('import fails: ')}"
                                     if error.startswith("import fails") else f"Triton {error}")

    @property
    def torch_version(self) -> str:
        """Of a torch that cannot be imported what pip says, ``""`` where there is none."""
        if self.torch is not None:
            return str(self.torch.__version__)
        return next((dist.version for dist in self.dists if dist.name == "torch"), "")

    @property
    def triton_of_torch(self) -> str:
        """The Triton that this torch was made with, see ``triton_for``; ``""`` without torch."""
        return triton_for(self.torch.__version__) if self.torch is not None else ""

    @property
    def unseen(self) -> bool:
        """Whether the driver has cards of which torch sees none."""
        return bool(self.driver.cards and self.torch is not None and not self.on_gpu and not self.lost)

    @property
    def other_build(self) -> bool:
        """Return True if torch is built without CUDA and there are NVIDIA cards."""
        return self.torch is not None and not self.torch.version.cuda and bool(self.cards or self.unseen)

    @property
    def build(self) -> str:
        """Return what torch is built with, such as ``CUDA 13.0`` or ``CPU build``."""
        built = self.torch.version
        xpu = getattr(built, "xpu", None)
        return (f"CUDA {built.cuda}" if built.cuda else f"ROCm {built.hip}" if built.hip
                else f"XPU {xpu}" if xpu else "CPU build")

    @property
    def driver_too_old(self) -> bool:
        """Whether the driver is older than this torch's CUDA asks for."""
        built, has = self.torch is not None and self.torch.version.cuda, release(self.driver.version)[:1]
        return bool(built and has and has[0] < releases.oldest_driver(built))

    @property
    def uncovered(self) -> list[str]:
        """Cards that torch sees and has no code for: what is not Triton's fails on them."""
        return self.without_code(target for _, target in self.cards)

    def without_code(self, targets: Iterable[Target]) -> list[str]:
        """Those of these cards that torch has no code for, whether it sees them or not."""
        asked = getattr(getattr(self.torch, "cuda", None), "get_arch_list", None)
        code = [divmod(int(arch[3:]), 10) for arch in (asked() if asked else [])
                if re.fullmatch(r"sm_\d+", arch)]
        return [f"{target.name} ({target.sm})" for target in targets
                if code and not any(major == target.capability[0] and (major, minor) <= target.capability
                                    for major, minor in code)]

    @property
    def mixed(self) -> list[str]:
        """Tritons that pip has put into one folder."""
        tritons = sorted({(dist.name, dist.folder) for dist in self.dists if dist.name in TRITON_NAMES})
        folders = [folder for _, folder in tritons]
        return [name for name, folder in tritons if folders.count(folder) > 1]

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
    driver, failed = attempt(drivers.ask)
    dists, _ = attempt(distributions)
    return Machine(torch, torch_error, triton, triton_error, targets, lost, settings or policy.Policy(),
                   policy_error, driver=driver or Driver(failed=failed), dists=dists or (),
                   python=sys.version_info[:2], foreign=attempt(_foreign, dists or ())[0] or "")


def _foreign(dists: tuple[Dist, ...]) -> str:
    spec = find_spec("triton")
    folder = Path(spec.origin).parent.parent if spec is not None and spec.origin else None
    homes = [Path(one.folder).resolve() for one in dists if one.name in TRITON_NAMES]
    return str(folder) if folder is not None and folder.resolve() not in homes else ""


def distributions() -> tuple[Dist, ...]:
    """torch, the Tritons, and packages that ask for a version of one of them, in the order of the path."""
    found = dict[Dist, None]()
    for dist in metadata.distributions():
        name = str(dist.metadata["Name"] or "").lower()
        needs = tuple(need for need in dist.requires or ()
                      if re.match(r"(torch|triton)\b(?![-.\w])", need) and re.search(r"[=<>~]", need))
        if needs or name in ("torch", *TRITON_NAMES):
            by = (dist.read_text("INSTALLER") or "").strip()
            found[Dist(name, dist.version, str(dist.locate_file("")), by, needs)] = None
    return tuple(found)


def _torch() -> Any:
    torch = import_module("torch")
    if release(torch.__version__)[:2] < OLDEST_TORCH:
        raise ImportError(f"torch {torch.__version__} is older than {'.'.join(map(str, OLDEST_TORCH))}")
    return torch


def _devices(torch: Any) -> list[str]:
    kinds = {"cuda": torch.cuda, "xpu": getattr(torch, "xpu", None), "mps": getattr(torch, "mps", None)}
    return [f"{kind}:{index}" for kind, module in kinds.items() if module is not None
            and (torch.backends.mps if kind == "mps" else module).is_available()
            for index in range(module.device_count())]


def check_python(machine: Machine) -> Iterator[Check]:
    yield Check(name="flashlin", status="ok",
                detail=f"{flashlin.__version__}, Python {platform.python_version()}, {platform.platform()}")


def check_torch(machine: Machine) -> Iterator[Check]:
    if machine.torch is None:
        yield Check(name="torch", status="problem", detail=f"cannot be used: {machine.torch_error}")
        return
    yield Check(name="torch", status="ok", detail=f"{machine.torch.__version__}, {machine.build}")
    if machine.uncovered:
        yield Check(name="torch", status="problem",
                    detail=f"has no code for {', '.join(machine.uncovered)}: all but Triton's kernels fails")
    for name, error in machine.lost.items():
        yield Check(name=name, status="problem", detail=f"cannot be used: {error}")


def check_triton(machine: Machine) -> Iterator[Check]:
    wanted = machine.triton_of_torch
    if machine.triton_error:
        gpu, missing = bool(machine.known_cards), machine.triton_error == "not installed"
        where = f"not by kernels on your {machine.card_names}: " if gpu else ""
        yield Check(name="triton", status="degraded" if gpu or not missing else "ok",
                    detail=f"{where}{machine.triton_state}")
        return
    yield Check(name="triton", status="ok", detail=f"{machine.triton} from {_folder_of('triton')}")
    if not wanted:
        return
    pair = f"torch {machine.torch.__version__} was made with triton {wanted}"
    if is_that(machine.triton, wanted):
        yield Check(name="pair", status="ok", detail=pair)
    else:
        yield Check(name="pair", status="worked around",
                    detail=f"{pair}, loaded is {machine.triton}: flashlin runs on either, torch.compile may "
                           "not")


def check_copies(machine: Machine) -> Iterator[Check]:
    """Two Tritons on the path, and a loaded one that is not the installed one."""
    copies = sorted({(one.name, one.version, one.folder) for one in machine.dists
                     if one.name in TRITON_NAMES})
    if len(copies) > 1:
        listed = ", ".join(f"{name} {version} in {folder}" for name, version, folder in copies)
        what = ("their files overwrite each other" if machine.mixed
                else f"the first on the path wins, which is {machine.triton or 'unusable'}")
        yield Check(name="two Tritons", status="problem" if machine.mixed else "worked around",
                    detail=f"{listed}: {what}")
    elif shadowed(machine):
        [(_, version, folder)] = copies
        yield Check(name="loaded Triton", status="worked around", detail=(
            f"loaded is {machine.triton} from {_folder_of('triton')}, installed is {version} in {folder}: "
            "another folder shadows it (PYTHONPATH?), or it was replaced while this process ran"))


def shadowed(machine: Machine) -> bool:
    """Whether the Triton that is loaded is not the one that pip would replace."""
    copies = {(one.version, one.folder) for one in machine.dists if one.name in TRITON_NAMES}
    return not machine.mixed and bool(machine.triton) and (
        len(copies) > 1 or any(release(version) != release(machine.triton) for version, _ in copies))


def overriding(triton: str, capability: tuple[int, int]) -> str:
    """The variable by which the environment names the assembler for a card, ``""`` if it does not."""
    variable = ptxas_variable(triton, capability)
    return variable if os.environ.get(variable) else ""


def check_ptxas(machine: Machine) -> Iterator[Check]:
    cards = machine.known_cards
    asked = {ptxas_variable(target.triton, target.capability) for target in cards}
    for variable in filter(os.environ.get, PTXAS_VARIABLES):
        path = os.environ[variable]
        if not (Path(path).is_file() and os.access(path, os.X_OK)):
            needed = variable in asked
            yield Check(name="ptxas", status="problem" if needed else "worked around",
                        fix=unset(variable),
                        detail=f"{variable}={path} cannot be executed: Triton fails on it or, from 3.4 on, "
                               "takes its own ptxas instead")
        if cards and variable not in asked:
            yield Check(name="ptxas", status="worked around", fix=unset(variable),
                        detail=f"{variable} has no effect on {machine.card_names} "
                               f"under triton {machine.triton or 'none'}")
    for where, target in machine.cards:
        if target.triton:
            path = ptxas_path(target.triton, target.capability)
            variable = overriding(target.triton, target.capability)
            source = f"by {variable}" if variable else "Triton's own"
            yield Check(name="ptxas", status="ok" if target.ptxas else "could not check",
                        detail=f"{where}: {target.ptxas or 'version unknown'}, "
                               f"{source}, "
                               f"{path or 'not found'}")


def check_driver(machine: Machine) -> Iterator[Check]:
    """A card that torch does not see is found by its driver."""
    driver = machine.driver
    if not driver.cards:
        yield Check(name="driver", status="could not check" if machine.on_gpu else "ok",
                    detail=driver.failed or "no NVIDIA driver")
        return
    built = str(machine.torch.version.cuda or "") if machine.torch is not None else ""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if machine.torch is None and hidden is not None and not re.match(r"\s*(\d|GPU|MIG)", hidden):
        yield Check(name="driver", status="degraded", fix=unset("CUDA_VISIBLE_DEVICES"),
                    detail=f"{driver}, hidden by CUDA_VISIBLE_DEVICES={hidden!r}")
        return
    if not machine.unseen:
        old = machine.driver_too_old
        yield Check(name="driver", status="could not check" if old else "ok",
                    detail=f"{driver}" + (f"; CUDA {built} asks for {releases.oldest_driver(built)} or newer"
                                          if old else ""))
        return
    why = (f"is a {machine.build.removesuffix(' build')} build" if not built
           else f"(CUDA {built}) is told not to see it: CUDA_VISIBLE_DEVICES={hidden!r}" if hidden is not None
           else f"(CUDA {built}) needs driver {releases.oldest_driver(built)} or newer"
           if machine.driver_too_old
           else f"(CUDA {built}) finds none: the driver does not let this user or container in")
    yield Check(name="driver", status="degraded", fix="" if hidden is None else unset("CUDA_VISIBLE_DEVICES"),
                detail=f"not on your {machine.card_names} (driver {driver.version or 'unknown'}): torch "
                       f"{machine.torch.__version__} {why}")


def check_policy(machine: Machine) -> Iterator[Check]:
    if machine.policy_error:
        named = re.search(r"FLASHLIN_[A-Z]+", machine.policy_error)
        yield Check(name="policy", status="problem", detail=machine.policy_error,
                    fix=unset(named[0]) if named else "")
        return
    values = {**machine.policy._asdict(), "ignore": ",".join(sorted(machine.policy.ignore)) or "nothing"}
    yield Check(name="policy", status="ok",
                detail=", ".join(f"{name} {value}" for name, value in values.items()))
    valid = sorted(f"FLASHLIN_{name.upper()}" for name in (*policy.Policy._fields, *policy.ELSEWHERE))
    for given in sorted(name for name in os.environ if name.startswith("FLASHLIN_") and name not in valid):
        meant = get_close_matches(given.removeprefix("FLASHLIN_"),
                                  [name.removeprefix("FLASHLIN_") for name in valid], 1)
        instead = f"FLASHLIN_{meant[0]} does" if meant else f"known are {', '.join(valid)}"
        yield Check(name="policy", status="worked around", fix=unset(given),
                    detail=f"{given} means nothing; {instead}")


def check_interpreter(machine: Machine) -> Iterator[Check]:
    if interpreting():
        yield Check(name="interpreter", status="worked around", fix=unset("TRITON_INTERPRET"),
                    detail="TRITON_INTERPRET is set: Triton's kernels run on the CPU, thousands of times "
                           "slower")


def check_folders(machine: Machine) -> Iterator[Check]:
    """Where flashlin keeps something."""
    home, why = verdicts.place(warn=False)
    cache, unsafe = environments.place()
    for variable, folder, no_folder, what, without in (
            ("FLASHLIN_HOME", home, why, "what flashlin warmup and the first calls find out here",
             "each process finds it out anew"),
            ("FLASHLIN_CACHE", cache, unsafe, "releases of Triton for the version matrix",
             "no other release can be fetched")):
        if folder is not None and can_write(folder):
            yield Check(name=variable, status="ok", detail=f"{folder} can be written: {what}")
        else:
            yield Check(name=variable, status="worked around",
                        fix=f"set {variable} to a folder that you can write",
                        detail=f"{f'{folder} cannot be written' if folder else no_folder}: {what}; {without}")


def check_tried(machine: Machine) -> Iterator[Check]:
    """What was found out about kernels on this machine, and when."""
    for target, names in machine.names.items():
        if target.backend not in ("cuda", "hip"):
            continue
        where, here = names[-1], verdicts.local(target)
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


def check_modules(machine: Machine) -> Iterator[Check]:
    """Whether everything public can be imported; without torch nothing can, which is told already."""
    if machine.torch is None:
        return
    errors: dict[str, list[str]] = {}
    for name in flashlin.__all__:
        _, error = attempt(getattr, flashlin, name)
        if error and error != machine.policy_error:  # which is told already
            errors.setdefault(error, []).append(name)
    for error, names in errors.items():
        yield Check(name="modules", status="problem",
                    detail=f"{', '.join(names)} cannot be imported: {error}",
                    fix="pip install --force-reinstall --no-deps flashlin")


CHECKS: tuple[Callable[[Machine], Iterator[Check]], ...] = (
    check_python, check_torch, check_triton, check_copies, check_ptxas, check_driver, check_policy,
    check_interpreter, *SURROUNDINGS, check_folders, check_tried, check_modules)


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
