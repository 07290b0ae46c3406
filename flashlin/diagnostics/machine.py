"""This machine as facts. Each probe is guarded: an exception in it is one more fact and ends no report."""
from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from flashlin import policy
from flashlin.compat import releases
from flashlin.compat.target import (
    Target,
    bundled_ptxas,
    probe,
    ptxas_variable,
    shared_per_block,
    triton_state,
)
from flashlin.compat.versions import release
from flashlin.diagnostics import driver as drivers
from flashlin.diagnostics.driver import Driver

OLDEST_TORCH = release(releases.RELEASES[0].torch[0])[:2]
# Names under which Triton's files have been published: two of them in one folder overwrite each other.
TRITON_NAMES = ("triton", "pytorch-triton", "triton-nightly", "triton-windows", "pytorch-triton-rocm",
                "pytorch-triton-xpu")


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


def shadowed(machine: Machine) -> bool:
    """Whether the Triton that is loaded is not the one that pip would replace."""
    copies = {(one.version, one.folder) for one in machine.dists if one.name in TRITON_NAMES}
    return not machine.mixed and bool(machine.triton) and (
        len(copies) > 1 or any(release(version) != release(machine.triton) for version, _ in copies))


def overriding(triton: str, capability: tuple[int, int]) -> str:
    """The variable by which the environment names the assembler for a card, ``""`` if it does not."""
    variable = ptxas_variable(triton, capability)
    return variable if os.environ.get(variable) else ""
