"""Facts about this machine, read by probes that never raise.

An exception in a probe is reported as a fact.
"""
from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from flashlin import policy
from flashlin.compat import releases
from flashlin.compat.target import Target, bundled_ptxas, probe, shared_per_block, triton_state
from flashlin.compat.versions import release
from flashlin.diagnostics import driver as drivers
from flashlin.diagnostics.driver import Driver

OLDEST_TORCH = release(releases.RELEASES[0].torch[0])[:2]
# Names under which Triton is published. The files of two of them in one folder overwrite each other.
TRITON_NAMES = ("triton", "pytorch-triton", "triton-nightly", "triton-windows", "pytorch-triton-rocm",
                "pytorch-triton-xpu")


class Dist(NamedTuple):
    """An installed package that is torch or Triton, or that requires a version of them.

    folder: the folder that it is installed in.
    installer: the program that installed it (``pip``, ``uv``, ``conda``).
    needs: its requirements for torch and triton.
    """
    name: str
    version: str
    folder: str = ""
    installer: str = ""
    needs: tuple[str, ...] = ()


class Machine(NamedTuple):
    """The facts about one machine.

    torch: the torch module; None if it cannot be used.
    torch_error: reason that torch cannot be used, or ``""``.
    triton: the release of Triton; ``""`` if it cannot be used.
    triton_error: reason that Triton cannot be used, or ``""``.
    targets: the target of each device, by device name.
    lost: the error of each device whose properties could not be read.
    policy: the policy in force.
    policy_error: the error in its settings, or ``""``.
    driver: NVIDIA's driver and its GPUs, including GPUs that torch does not see.
    dists: torch, Triton, and the packages that require a version of them.
    python: version of this process; ``()`` for a machine that is only described.
    foreign: folder of a Triton that pip did not install, or ``""``.
    """
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
        """Return True if torch sees an NVIDIA GPU."""
        return any(target.backend == "cuda" for target in self.targets.values())

    @property
    def names(self) -> dict[Target, list[str]]:
        """Return the device names of each target. Equal GPUs have equal targets, so they share one entry."""
        return {target: [name for name, other in self.targets.items() if other == target]
                for target in self.targets.values()}

    @property
    def cards(self) -> list[tuple[str, Target]]:
        """Return one representative of each NVIDIA GPU model, with its device name."""
        return [(names[-1], target) for target, names in self.names.items() if target.backend == "cuda"]

    @property
    def known_cards(self) -> list[Target]:
        """Return the NVIDIA GPUs that torch sees, or else the GPUs that only the driver sees."""
        return [target for _, target in self.cards] or [
            Target(self.triton, bundled_ptxas(self.triton, card.capability), self.torch_version, "cuda",
                   card.capability, card.name, shared_per_block(card.capability), 132)
            for card in dict.fromkeys(self.driver.cards) if card.capability != (0, 0)]

    @property
    def card_names(self) -> str:
        """Return the names of the NVIDIA GPUs as text."""
        return " and ".join(dict.fromkeys([target.name for _, target in self.cards]
                                          or [card.name for card in self.driver.cards]))

    @property
    def triton_state(self) -> str:
        """Return the state of a Triton that cannot be used, as text; ``""`` if it can."""
        error = self.triton_error
        return "" if not error else ("Triton is not installed" if error == "not installed"
                                     else f"Triton does not import: {error.removeprefix('import fails: ')}"
                                     if error.startswith("import fails") else f"Triton {error}")

    @property
    def torch_version(self) -> str:
        """Return the version of torch, also of one that cannot be imported; ``""`` if it is not installed."""
        if self.torch is not None:
            return str(self.torch.__version__)
        return next((dist.version for dist in self.dists if dist.name == "torch"), "")

    @property
    def unseen(self) -> bool:
        """Return True if the driver has GPUs and torch sees none of them."""
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
        """Return True if the driver is older than the CUDA release of this torch requires."""
        built, has = self.torch is not None and self.torch.version.cuda, release(self.driver.version)[:1]
        return bool(built and has and has[0] < releases.oldest_driver(built))

    @property
    def uncovered(self) -> list[str]:
        """Return the GPUs that torch sees but has no code for. On them only Triton kernels run."""
        return self.without_code(target for _, target in self.cards)

    def without_code(self, targets: Iterable[Target]) -> list[str]:
        """Return the names of the GPUs that torch has no code for, including GPUs that it does not see."""
        asked = getattr(getattr(self.torch, "cuda", None), "get_arch_list", None)
        code = [divmod(int(arch[3:]), 10) for arch in (asked() if asked else [])
                if re.fullmatch(r"sm_\d+", arch)]
        return [f"{target.name} ({target.sm})" for target in targets
                if code and not any(major == target.capability[0] and (major, minor) <= target.capability
                                    for major, minor in code)]

    @property
    def old_libstdcxx(self) -> str:
        """Return the version that the loaded libstdc++ lacks, so that torch or Triton fails; else ``""``."""
        errors = self.torch_error + self.triton_error
        lacks = re.search(r"version `((GLIBCXX|CXXABI)_[\d.]+)' not found", errors)
        return lacks[1] if lacks else ""

    @property
    def numpy_on_path(self) -> str:
        """Return the folder of PYTHONPATH whose numpy makes the import of torch fail, or ``""``."""
        return next((folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)
                     if folder and "numpy" in self.torch_error and (Path(folder) / "numpy").is_dir()), "")

    @property
    def leftovers(self) -> list[Dist]:
        """Return the metadata of Tritons whose files the loaded release has replaced in the same folder."""
        tritons = [dist for dist in self.dists if dist.name in TRITON_NAMES]
        here = {(dist.name, dist.folder) for dist in tritons if dist.version == self.triton}
        return [dist for dist in tritons
                if dist.version != self.triton and (dist.name, dist.folder) in here]

    @property
    def mixed(self) -> list[str]:
        """Return the names of the Triton distributions, if several are installed into the same folder."""
        tritons = sorted({(dist.name, dist.folder) for dist in self.dists if dist.name in TRITON_NAMES})
        folders = [folder for _, folder in tritons]
        return [name for name, folder in tritons if folders.count(folder) > 1]

    @property
    def stops_everything(self) -> str:
        """Return the reason that every call of every op fails here, or ``""``."""
        lost = "" if self.targets else "; ".join(f"{name}: {error}" for name, error in self.lost.items())
        return f"torch: {self.torch_error}" if self.torch_error else self.policy_error or lost


def attempt(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """Call a function and return (its value, ``""``), or (None, the error that it raised as text)."""
    try:
        return function(*arguments), ""
    # a broken torch, Triton or driver may raise any exception, and the report shows it
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        return None, f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def examine() -> Machine:
    """Return the facts about this machine. Never raises."""
    torch, torch_error = attempt(_torch)
    state, error = attempt(triton_state)
    triton, triton_error = state or ("", error)
    settings, policy_error = attempt(policy.current)
    targets: dict[str, Target] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of GPUs and drivers that the report also covers
        names, error = attempt(_devices, torch) if torch is not None else (None, "")
        lost = {"GPUs": error} if error else {}
        for name in (names or ["cpu"]) if torch is not None else ():
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
    """Return the folder of a Triton that pip did not install there, or ``""``."""
    spec = find_spec("triton")
    folder = Path(spec.origin).parent.parent if spec is not None and spec.origin else None
    homes = [Path(one.folder).resolve() for one in dists if one.name in TRITON_NAMES]
    return str(folder) if folder is not None and folder.resolve() not in homes else ""


def distributions() -> tuple[Dist, ...]:
    """Return torch, all Tritons and the packages that require a version of them, in the order of the path."""
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


def shadowed(machine: Machine) -> bool:
    """Return True if the loaded Triton is not the one that pip would replace."""
    copies = {(one.version, one.folder) for one in machine.dists
              if one.name in TRITON_NAMES and one not in machine.leftovers}
    return not machine.mixed and bool(machine.triton) and (
        len(copies) > 1 or any(release(version) != release(machine.triton) for version, _ in copies))
