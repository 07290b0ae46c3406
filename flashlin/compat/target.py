"""Target: the machine a call would run on, as facts. ``probe`` asks per tensor's device; ``parse`` builds one
by hand."""
from __future__ import annotations

import os
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flashlin.compat.releases import RELEASES, nearest
from flashlin.compat.versions import release

if TYPE_CHECKING:
    import torch

# Shared memory one block can have, in bytes, by compute capability (CUDA C++ programming guide, technical
# specifications).
SHARED_PER_BLOCK = {(7, 0): 98304, (7, 2): 98304, (7, 5): 65536, (8, 0): 166912, (8, 6): 101376,
                    (8, 7): 166912, (8, 9): 101376, (9, 0): 232448, (10, 0): 232448, (10, 3): 232448,
                    (11, 0): 232448, (12, 0): 101376, (12, 1): 101376}
# Multiprocessors of the card most people mean by a capability, for targets that are named rather than probed.
USUAL_CARD = {(7, 0): ("V100", 80), (7, 5): ("T4", 40), (8, 0): ("A100", 108), (8, 6): ("RTX 3090", 82),
              (8, 9): ("RTX 4090", 128), (9, 0): ("H100", 132), (10, 0): ("B200", 148),
              (10, 3): ("B300", 148), (12, 0): ("RTX 5090", 170)}
OLDEST_TRITON = release(RELEASES[0].version)[:2]


class Target(NamedTuple):
    """A machine. Hashable, and buildable by hand for a machine one does not own.

    triton, ptxas, torch: versions, ``""`` where not installed or not usable. backend: ``cuda``, ``hip``,
    ``interpreter`` (Triton's interpreter on the CPU) or ``cpu``. capability: (major, minor). shared: bytes of
    shared memory per block. sms: multiprocessors.
    """
    triton: str
    ptxas: str
    torch: str
    backend: str
    capability: tuple[int, int]
    name: str
    shared: int
    sms: int

    @property
    def sm(self) -> str:
        return f"sm{self.capability[0]}{self.capability[1]}" if self.backend == "cuda" else self.backend

    def __str__(self) -> str:
        card = f"{self.name} {self.sm}" if self.backend in ("cuda", "hip") else self.name
        ptxas = f", ptxas {self.ptxas}" if self.ptxas else ""
        return f"{card}, triton {self.triton or 'none'}{ptxas}, torch {self.torch or 'none'}"


@lru_cache(maxsize=1)
def triton_state() -> tuple[str, str]:
    """(version, what is wrong). Either may be empty: no Triton at all is ``("", "not installed")``."""
    try:
        import triton
        import triton.language
        version = str(triton.__version__)
    except ModuleNotFoundError as error:
        return "", "not installed" if error.name == "triton" else f"import fails: {error}"
    # whatever a broken build raises is a fact to report, not a reason to fail
    except (Exception, SystemExit) as error:
        return "", f"import fails: {type(error).__name__}: {error}"
    if release(version)[:2] < OLDEST_TRITON:
        return version, f"{version} is older than {'.'.join(map(str, OLDEST_TRITON))}"
    return version, ""


def ptxas_path(triton: str, capability: tuple[int, int]) -> str:
    """The assembler Triton will call: the environment's, or the one in the wheel. ``""`` where there is
    none."""
    modern = capability >= nearest(triton).blackwell_from
    named = os.environ.get("TRITON_PTXAS_BLACKWELL_PATH") if modern else None
    named = named or os.environ.get("TRITON_PTXAS_PATH")
    if named:
        return named
    try:
        import triton as module
    except (Exception, SystemExit):  # triton_state says why; here there is just no assembler
        return ""
    folder = Path(module.__file__ or "").parent / "backends" / "nvidia" / "bin"
    names = ("ptxas-blackwell", "ptxas") if modern else ("ptxas",)
    return next((str(folder / name) for name in names if (folder / name).exists()), "")


@lru_cache(maxsize=16)
def ptxas_version(path: str) -> str:
    """``12.8.93`` read from the binary itself (environment variables and vendor builds replace it); ``""`` if
    it cannot be run."""
    if not path:
        return ""
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20,
                              check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next((word.strip("V,") for line in text.splitlines() if "release" in line
                 for word in line.split() if word.startswith("V")), "")


def bundled_ptxas(triton: str, capability: tuple[int, int]) -> str:
    """What the wheel of that release carries for that card; ``""`` for releases nobody has looked at."""
    known = nearest(triton)
    if release(known.version)[:2] != release(triton)[:2]:
        return ""
    return known.blackwell if known.blackwell and capability >= known.blackwell_from else known.ptxas


def interpreting() -> bool:
    """Whether Triton was told to run kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


SHARED_ON_AMD = 65536


def shared_per_block(capability: tuple[int, int]) -> int:
    """Bytes; an unknown card gets the smallest amount known for its generation."""
    known = [size for (major, _), size in SHARED_PER_BLOCK.items() if major == capability[0]]
    return SHARED_PER_BLOCK.get(capability, min(known, default=49152))


_probed: dict[torch.device, Target] = {}
_pretended: Target | None = None


def probe(device: torch.device) -> Target:
    """The Target of a tensor's device. Asked once per device, never of device 0 on behalf of another, never
    at import."""
    if _pretended is not None:
        return _pretended
    target = _probed.get(device)
    if target is None:
        target = _probed[device] = _ask(device)
    return target


def pretend(target: Target | None) -> None:
    """Plan every call as if it ran on ``target`` (for recording launches without the card); None ends it."""
    global _pretended
    _pretended = target


def pretending() -> bool:
    return _pretended is not None


def _ask(device: torch.device) -> Target:
    import torch
    triton, _ = triton_state()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = (int(properties.major), int(properties.minor))
        if torch.version.hip is not None:
            return Target(triton, "", torch.__version__, "hip", capability, properties.name, SHARED_ON_AMD,
                          properties.multi_processor_count)
        shared = int(getattr(properties, "shared_memory_per_block_optin", 0)) or shared_per_block(capability)
        ptxas = ptxas_version(ptxas_path(triton, capability)) if triton else ""
        return Target(triton, ptxas, torch.__version__, "cuda", capability, properties.name, shared,
                      properties.multi_processor_count)
    backend = "interpreter" if device.type == "cpu" and interpreting() and triton else "cpu"
    return Target(triton, "", torch.__version__, backend, (0, 0), device.type, 1 << 30, os.cpu_count() or 1)


def parse(text: str, *, torch_version: str = "") -> Target:
    """``"triton=3.2.0,sm=90"`` -> Target. Keys: triton, sm (75, 90, 103 ...), ptxas, shared (bytes), sms,
    name, torch, backend.

    Raises ValueError that lists the keys.
    """
    pairs = {part.partition("=")[0]: part.partition("=")[2] for part in text.split(",") if part}
    keys = {"triton", "sm", "ptxas", "shared", "sms", "name", "torch", "backend"}
    if set(pairs) - keys or not all(pairs.values()):
        raise ValueError(f"target: got {text!r}, need key=value pairs out of {', '.join(sorted(keys))}, for "
                         "example triton=3.2.0,sm=90")
    backend = pairs.get("backend", "cuda" if "sm" in pairs else "cpu")
    if backend not in ("cuda", "hip", "interpreter", "cpu"):
        raise ValueError(f"target: got backend={backend}, need cuda, hip, interpreter or cpu")
    digits = pairs.get("sm", "0").removeprefix("sm").strip("_")
    if not digits.isdigit():
        raise ValueError(f"target: got sm={pairs['sm']}, need a compute capability such as 90 or 103")
    for key in ("shared", "sms"):
        if not pairs.get(key, "1").isdigit():
            raise ValueError(f"target: got {key}={pairs[key]}, need a whole number")
    capability = divmod(int(digits), 10)
    triton = pairs.get("triton", "") or triton_state()[0]
    card, sms = USUAL_CARD.get(capability, ("GPU" if "sm" in pairs else "cpu", 64))
    ptxas = pairs.get("ptxas", bundled_ptxas(triton, capability) if backend == "cuda" else "")
    shared = {"cuda": shared_per_block(capability), "hip": SHARED_ON_AMD}.get(backend, 1 << 30)
    return Target(triton, ptxas, pairs.get("torch", torch_version), backend, capability,
                  pairs.get("name", card), int(pairs.get("shared", shared)), int(pairs.get("sms", sms)))
