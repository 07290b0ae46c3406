"""Doctor's check of the GPU code in the compiled extensions of other packages.

An extension contains machine code (cubin) for some architectures, and may contain PTX that the driver
compiles for newer GPUs. On another GPU it can be imported, but its kernels fail with "no kernel image is
available". NVIDIA's cuobjdump lists the code without a GPU. It comes with Triton and with CUDA toolkits.
"""
from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from flashlin.compat.subprocesses import run_to_end
from flashlin.compat.target import ptxas_path
from flashlin.diagnostics.environment import with_variable
from flashlin.diagnostics.importing import EXTENSIONS
from flashlin.diagnostics.machine import Machine
from flashlin.diagnostics.report import Check, line

LIMIT = 5.0  # seconds; cuobjdump lists the code of a file of 20 MB in 0.02 s
LISTED = re.compile(r"\.sm_(\d+)(\d)([af]?)\.(cubin|ptx)$", re.MULTILINE)


class Code(NamedTuple):
    """One piece of code of an extension.

    architecture: the compute capability for which it was compiled.
    suffix: ``a`` for code of one architecture only, ``f`` for one of a family, else ``""``.
    kind: ``cubin`` or ``ptx``.
    """
    architecture: tuple[int, int]
    suffix: str
    kind: str

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Return True if the code runs on a GPU. A cubin runs on later GPUs of its major version only."""
        if self.suffix == "a":
            return self.architecture == capability
        return (self.architecture <= capability
                and (self.architecture[0] == capability[0] or (self.kind, self.suffix) == ("ptx", "")))

    def __str__(self) -> str:
        """Return the name, such as ``sm_90`` or ``compute_90``."""
        kind = "sm" if self.kind == "cubin" else "compute"
        return "{}_{}{}{}".format(kind, *self.architecture, self.suffix)


def code_in(listing: str) -> list[Code]:
    """Return the code that the output of ``cuobjdump --list-elf --list-ptx`` names, without repetitions."""
    return sorted({Code((int(major), int(minor)), suffix, kind)
                   for major, minor, suffix, kind in LISTED.findall(listing)})


def check_extensions(machine: Machine) -> Iterator[Check]:
    """Report extensions of other packages that contain no code for a GPU of this machine."""
    cards = {target.capability: target for target in machine.known_cards if target.backend == "cuda"}
    for name, package in EXTENSIONS.items():
        spec = PathFinder.find_spec(name) if cards else None
        if spec is None or not spec.origin:
            continue
        program = cuobjdump(machine.triton, next(iter(cards)))
        said = (run_to_end([program, "--list-elf", "--list-ptx", spec.origin], limit=LIMIT) if program
                else None)
        if said is None or said.code is None:
            yield line(name, "could not check", f"{program or 'cuobjdump'} "
                       f"{said.failure if said else 'not found'}: the GPUs of this extension are unknown")
            continue
        has = code_in(said.stdout)
        for capability, card in cards.items():
            if has and not any(code.runs_on(capability) for code in has):
                yield line(name, "degraded",
                           f"has no code for your {card.name} ({card.sm}), only {', '.join(map(str, has))}: "
                           f"its kernels fail with 'no kernel image is available'; build {package} again, or "
                           f'flashlin.patch("{package}")', build_again(package))


def build_again(package: str) -> str:
    """Return the command that compiles a package with an extension for this machine, fetching no wheel."""
    return with_variable(f"{package.removesuffix('_ssm').upper()}_FORCE_BUILD", "TRUE",
                         "pip install --upgrade --force-reinstall --no-cache-dir --no-deps "
                         "--no-build-isolation " + package.replace("_", "-"))


def cuobjdump(triton: str, capability: tuple[int, int]) -> str:
    """Return the path of cuobjdump, next to Triton's ptxas or on PATH; ``""`` if there is none."""
    near = Path(ptxas_path(triton, capability) or "ptxas").with_name("cuobjdump")
    return str(near) if near.is_file() else shutil.which("cuobjdump") or ""
