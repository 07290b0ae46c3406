"""The class Target, which describes a machine by plain facts, and functions that make targets.

``probe`` describes the device of a tensor. ``parse`` reads a target from a text such as
``H100,triton=3.2.0``.
"""
from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flashlin.compat.installed_triton import expect_kernels, interpreting
from flashlin.compat.releases import RELEASES, nearest, planned_as, triton_for
from flashlin.compat.releases import pairs as torch_pairs
from flashlin.compat.subprocesses import run_to_end
from flashlin.compat.suggestions import MOST, did_you_mean, need_one_of
from flashlin.compat.versions import release

if TYPE_CHECKING:
    import torch

# Largest shared memory of a thread block, in bytes, by compute capability. Source: CUDA C++ programming
# guide, technical specifications.
SHARED_PER_BLOCK = {(7, 0): 98304, (7, 2): 98304, (7, 5): 65536, (8, 0): 166912, (8, 6): 101376,
                    (8, 7): 166912, (8, 9): 101376, (9, 0): 232448, (10, 0): 232448, (10, 3): 232448,
                    (11, 0): 232448, (12, 0): 101376, (12, 1): 101376}
# The most common GPU of each compute capability, with its multiprocessors, for targets that are given by
# name.
USUAL_CARD = {(7, 0): ("V100", 80), (7, 5): ("T4", 40), (8, 0): ("A100", 108), (8, 6): ("RTX 3090", 82),
              (8, 7): ("Orin", 16), (8, 9): ("RTX 4090", 128), (9, 0): ("H100", 132),
              (10, 0): ("B200", 148), (10, 3): ("B300", 148), (11, 0): ("Thor", 20),
              (12, 0): ("RTX 5090", 170), (12, 1): ("GB10", 48)}
# The most common AMD GPU of each architecture, with its compute units.
USUAL_AMD = {"gfx90a": ("MI250", 104), "gfx942": ("MI300X", 304), "gfx950": ("MI355X", 256),
             "gfx1100": ("RX 7900", 96), "gfx1201": ("RX 9070", 64)}
# Two limits that we use for all AMD architectures: the shared memory of a thread block in bytes, and the
# stages of a loop. CDNA 4 (gfx950) has more shared memory. With more stages, compilers fail (amd-stages-36).
SHARED_ON_AMD, STAGES_ON_AMD = 65536, 2


class Card(NamedTuple):
    """A GPU model.

    capability: compute capability (major, minor) of an NVIDIA GPU; (0, 0) for others.
    sms: number of multiprocessors, or of compute units on AMD.
    backend: one of BACKENDS.
    arch: architecture of an AMD GPU, such as ``gfx942``; ``""`` for others.
    """
    capability: tuple[int, int]
    sms: int
    backend: str = "cuda"
    arch: str = ""


# Other GPUs, by the names that people type, each with its multiprocessors or compute units. The keys are
# compute capabilities, or AMD architectures. Source: NVIDIA's list of CUDA GPUs and data sheets.
OTHERS = {
    (6, 0): "P100 56", (6, 1): "P40 30, P4 20, GTX 1080 20, GTX 1080 Ti 28", (7, 0): "Titan V 80",
    (7, 5): "RTX 2060 30, RTX 2070 36, RTX 2080 46, RTX 2080 Ti 68, Titan RTX 72, Quadro RTX 5000 48, "
            "Quadro RTX 6000 72, Quadro RTX 8000 72",
    (8, 0): "A30 56, A800 108",
    (8, 6): "A2 10, A10 72, A10G 80, A16 10, A40 84, RTX A4000 48, RTX A5000 64, RTX A6000 84, RTX 3050 20, "
            "RTX 3060 28, RTX 3060 Ti 38, RTX 3070 46, RTX 3070 Ti 48, RTX 3080 68, RTX 3080 Ti 80, "
            "RTX 3090 Ti 84",
    (8, 9): "L4 58, L20 92, L40 142, L40S 142, RTX 4000 Ada 48, RTX 5000 Ada 100, RTX 6000 Ada 142, "
            "RTX 4060 24, RTX 4060 Ti 34, RTX 4070 46, RTX 4070 Super 56, RTX 4070 Ti 60, "
            "RTX 4070 Ti Super 66, RTX 4080 76, RTX 4080 Super 80",
    (9, 0): "H100 PCIe 114, H200 132, H20 78, H800 132, GH200 132",
    (10, 0): "GB200 148", (10, 3): "GB300 148",
    (12, 0): "RTX 5050 20, RTX 5060 30, RTX 5060 Ti 36, RTX 5070 48, RTX 5070 Ti 70, RTX 5080 84, "
             "RTX PRO 4000 70, RTX PRO 4500 82, RTX PRO 5000 110, RTX PRO 6000 188",
    (12, 1): "DGX Spark 48"}
OTHERS_OF_AMD = {"gfx90a": "MI210 104", "gfx942": "MI300 304, MI325X 304", "gfx950": "MI350X 256"}
_named = re.compile(r"(.+?) (\d+)(?:, |$)").findall
CARDS: dict[str, Card] = {
    **{name: Card(capability, sms) for capability, (name, sms) in USUAL_CARD.items()},
    **{name: Card(capability, int(sms)) for capability, names in OTHERS.items()
       for name, sms in _named(names)},
    **{name: Card((0, 0), units, "hip", arch) for arch, (name, units) in USUAL_AMD.items()},
    **{name: Card((0, 0), int(units), "hip", arch) for arch, names in OTHERS_OF_AMD.items()
       for name, units in _named(names)}}
# The backends that are a GPU. On the last two, every op runs in plain torch.
GPUS = {"cuda": "an NVIDIA GPU", "hip": "an AMD GPU", "xpu": "an Intel GPU", "mps": "an Apple GPU"}
BACKENDS = (*GPUS, "interpreter", "cpu")
# The backend for which a torch is built, with its name, by the prefix of torch's local version
# (2.13.0+cu130).
BUILDS = {"cpu": ("cpu", "CPUs"), "cu": ("cuda", "NVIDIA GPUs"), "rocm": ("hip", "AMD GPUs"),
          "xpu": ("xpu", "Intel GPUs")}
BEFORE_VOLTA = ((5, 0), (5, 2), (6, 0), (6, 1))  # Triton does not support these compute capabilities
OLDEST_TRITON = release(RELEASES[0].version)[:2]


class Target(NamedTuple):
    """A machine as plain, hashable facts: its GPU and its releases of Triton, ptxas and torch.

    A target can also describe a machine that is not present.

    triton, ptxas, torch: versions; ``""`` for a program that is not installed or cannot be used.
    backend: one of BACKENDS; ``interpreter`` is Triton's interpreter on the CPU.
    capability: compute capability (major, minor) of an NVIDIA GPU; (0, 0) for others.
    name: name of the GPU.
    shared: largest shared memory of a thread block, in bytes.
    sms: number of multiprocessors, or of compute units on AMD.
    arch: architecture of an AMD GPU, such as ``gfx942``; ``""`` for others.
    """
    triton: str
    ptxas: str
    torch: str
    backend: str
    capability: tuple[int, int]
    name: str
    shared: int
    sms: int
    arch: str = ""

    @property
    def sm(self) -> str:
        """Return the architecture in short: ``sm90``, ``gfx942``, or the backend of other machines."""
        return (f"sm{self.capability[0]}{self.capability[1]}" if self.backend == "cuda"
                else self.arch or self.backend)

    @property
    def other_build(self) -> str:
        """Return the machines that this torch is built for, such as ``AMD GPUs``, if it cannot use this GPU.

        Return ``""`` if it can use the GPU, or if its version has no local part (``2.13.0``).
        """
        local = re.match(r"cpu|cu(?=\d)|rocm|xpu", self.torch.partition("+")[2].lower())
        backend, what = BUILDS[local[0]] if local else (self.backend, "")
        return what if self.backend in GPUS and self.backend != backend else ""

    @property
    def stages(self) -> int:
        """Return the largest number of stages of a loop that a recipe may use on this machine."""
        return STAGES_ON_AMD if self.backend == "hip" else 3

    def __str__(self) -> str:
        card = f"{self.name} {self.sm}" if self.backend in GPUS else self.name
        ptxas = f", ptxas {self.ptxas}" if self.ptxas else ""
        torch = f", torch {self.torch}" if self.torch else ""
        other = planned_as(self.triton)
        unknown = f" (not known here: planned as {other})" if other else ""
        return f"{card}, triton {self.triton or 'none'}{unknown}{ptxas}{torch}"


@lru_cache(maxsize=1)
def triton_state() -> tuple[str, str]:
    """Return (version, fault) of the installed Triton.

    The fault is ``""`` if Triton works. A missing Triton gives ``("", "not installed")``.
    """
    try:
        import triton
        import triton.language
        version = str(triton.__version__)
    except ModuleNotFoundError as error:
        return "", "not installed" if error.name == "triton" else f"import fails: {error}"
    # a broken build of Triton may raise anything; that is reported, and must not end this process
    except (Exception, SystemExit) as error:
        return "", f"import fails: {type(error).__name__}: {error}"
    if release(version)[:2] < OLDEST_TRITON:
        return version, f"{version} is older than {'.'.join(map(str, OLDEST_TRITON))}"
    return version, ""


def ptxas_variable(triton: str, capability: tuple[int, int]) -> str:
    """Return the environment variable that selects the ptxas which Triton runs for a GPU.

    Some releases have two ptxas, each with a variable of its own. Returns ``""`` if no variable selects it.
    """
    known = nearest(triton)
    second = bool(known.blackwell) and capability >= known.blackwell_from
    return known.blackwell_path if second else "TRITON_PTXAS_PATH"


def overriding(triton: str, capability: tuple[int, int]) -> str:
    """Return the environment variable that sets the ptxas for a GPU, or ``""`` if it is not set."""
    variable = ptxas_variable(triton, capability)
    return variable if os.environ.get(variable) else ""


def ptxas_path(triton: str, capability: tuple[int, int]) -> str:
    """Return the path of the ptxas that Triton will run for a GPU; ``""`` if there is no such file.

    The environment variable of ``ptxas_variable`` wins over the ptxas in Triton's wheel.
    """
    if named := os.environ.get(ptxas_variable(triton, capability)):
        return named
    try:
        import triton as module
    except (Exception, SystemExit):  # triton_state reports the reason; without Triton there is no ptxas
        return ""
    folder = Path(module.__file__ or "").parent / "backends" / "nvidia" / "bin"
    names = ("ptxas-blackwell", "ptxas") if capability >= nearest(triton).blackwell_from else ("ptxas",)
    return next((str(folder / name) for name in names if (folder / name).exists()), "")


@lru_cache(maxsize=16)
def ptxas_version(path: str) -> str:
    """Return the version that a ptxas prints, such as ``12.8.93``; ``""`` if it cannot be run.

    The binary is run because environment variables and vendor builds may replace the one in Triton's wheel.
    """
    if not path:
        return ""
    text = run_to_end([path, "--version"], limit=20).stdout
    return next((word.strip("V,") for line in text.splitlines() if "release" in line
                 for word in line.split() if word.startswith("V")), "")


def bundled_ptxas(triton: str, capability: tuple[int, int]) -> str:
    """Return the version of ptxas in a Triton release's wheel for a GPU; ``""`` for an unknown release."""
    known = nearest(triton)
    if release(known.version)[:2] != release(triton)[:2]:
        return ""
    return known.blackwell if known.blackwell and capability >= known.blackwell_from else known.ptxas


def lanes(arch: str) -> int:
    """Return the number of threads of a warp: 64 on AMD CDNA (gfx9), 32 on AMD RDNA and on NVIDIA."""
    return 64 if arch.startswith("gfx9") else 32


def shared_per_block(capability: tuple[int, int]) -> int:
    """Return the largest shared memory of a thread block, in bytes.

    An unknown capability gets the smallest value that is known for its major version, or else 48 KB.
    """
    known = [size for (major, _), size in SHARED_PER_BLOCK.items() if major == capability[0]]
    return SHARED_PER_BLOCK.get(capability, min(known, default=49152))


class _Probed(dict["torch.device", Target]):
    """The targets of devices. A device is queried once, at the first look-up of its target."""

    def __missing__(self, device: torch.device) -> Target:
        target = self[device] = _ask(device) if _pretended is None else _pretended
        return target


_probed = _Probed()
_pretended: Target | None = None
# Returns the Target of a tensor's device. It queries only that device, never device 0 instead, and queries no
# device at import.
probe: Callable[[torch.device], Target] = _probed.__getitem__


def pretend(target: Target | None) -> None:
    """Plan every call as if it ran on ``target``; None ends this.

    It serves to record launches on a machine without that GPU.
    """
    global _pretended
    _probed.clear()
    _pretended = target


def pretending() -> bool:
    """Return True if ``pretend`` has set a target."""
    return _pretended is not None


def _ask(device: torch.device) -> Target:
    import torch
    triton, _ = triton_state()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip is not None:
            arch = str(getattr(properties, "gcnArchName", "")).partition(":")[0]  # of gfx942:sramecc+:xnack-
            return Target(triton, "", torch.__version__, "hip", (0, 0), properties.name, SHARED_ON_AMD,
                          properties.multi_processor_count, arch)
        capability = (int(properties.major), int(properties.minor))
        shared = int(getattr(properties, "shared_memory_per_block_optin", 0)) or shared_per_block(capability)
        ptxas = ""
        if triton:
            expect_kernels()
            ptxas = ptxas_version(ptxas_path(triton, capability))
        return Target(triton, ptxas, torch.__version__, "cuda", capability, properties.name, shared,
                      properties.multi_processor_count)
    if device.type in GPUS:
        name = torch.xpu.get_device_properties(device).name if device.type == "xpu" else "Apple GPU"
        return Target(triton, "", torch.__version__, device.type, (0, 0), name, 1 << 30, 1)
    backend = "interpreter" if device.type == "cpu" and interpreting() and triton else "cpu"
    return Target(triton, "", torch.__version__, backend, (0, 0), device.type, 1 << 30, os.cpu_count() or 1)


def parse(text: str, *, torch_version: str = "") -> Target:
    """Return the Target that a text describes, such as ``H100``, ``t4,torch=2.6`` or ``triton=3.2.0,sm=90``.

    The text needs a GPU: a name of CARDS, a compute capability (``sm=90``), an AMD architecture (``gfx942``)
    or a backend. Other keys are triton, torch, ptxas, shared (bytes), sms and name.

    A triton of two numbers means the newest patch release of it. Without triton, the target has the Triton
    that its torch requires, or else the Triton of this machine. A torch whose local version names another
    kind of machine (``2.13.0+cpu`` with an A100) cannot use the GPU: see ``other_build``.

    torch_version: torch of the target, if the text has none.

    Raises ValueError with the wrong part of the text, and with a suggestion.
    """
    pairs: dict[str, str] = {}
    # people also type spaces instead of commas, and "==" as for pip
    for part in filter(None, (one.strip() for one in re.split(r",|(?<!\s)\s+(?=\w+\s*=)", text))):
        key, is_pair, value = part.partition("=")
        key, value = (key.strip().lower(), value.strip("= ")) if is_pair else ("card", part)
        if key == "card" and (bare := re.search(r"(?<![\w.])v?(\d+(?:\.\d+)+)", value)):
            raise ValueError(f"target: got the version {bare[1]} without a name, need triton={bare[1]} or "
                             f"torch={bare[1]}; for example H100,triton=3.2.0")
        if key not in KEYS or not value:
            raise ValueError(f"target: got {part!r}, need key=value pairs out of {', '.join(KEYS)}, or the "
                             f"name of a card; for example H100,triton=3.2.0{did_you_mean(key, KEYS)}")
        if key in pairs:
            raise ValueError(f"target: got {key} twice, {pairs[key]} and {value}, need it once")
        pairs[key] = value
    if not pairs.keys() & {"card", "sm", "backend"}:
        raise ValueError(f"target: got {text!r}, need a card: its name, or sm=90; for example "
                         "H100,triton=3.2.0")
    for key in ("triton", "torch", "ptxas"):
        if pairs.get(key, "none") != "none" and not release(pairs[key]):
            raise ValueError(f"target: got {key}={pairs[key]}, need a version such as "
                             f"{RELEASES[-1].torch[-1] if key == 'torch' else RELEASES[-1].version}")
    for key in ("shared", "sms"):
        # not str.isdigit, which is true of characters that int() refuses
        if not re.fullmatch("[0-9]{1,12}", pairs.get(key, "1")) or not int(pairs.get(key, "1")):
            raise ValueError(f"target: got {key}={pairs[key]}, need a whole number above 0")
    name, card = _card(pairs)
    torch = pairs.get("torch", torch_version)
    said = pairs.get("triton") or triton_for(torch)
    if "torch" in pairs and not said:
        first, *_, last = torch_pairs()
        raise ValueError(f"target: got torch={torch}, whose Triton is not known here, need also triton=...; "
                         f"known are torch {first.torch} to {last.torch}")
    newest = nearest(f"{said}.99").version  # the last patch release of a minor version
    triton = newest if newest.startswith(f"{said}.") else said or triton_state()[0]
    triton = "" if triton == "none" else triton
    ptxas = pairs.get("ptxas", bundled_ptxas(triton, card.capability) if card.backend == "cuda" else "")
    shared = {"cuda": shared_per_block(card.capability), "hip": SHARED_ON_AMD}.get(card.backend, 1 << 30)
    return Target(triton, ptxas, torch, card.backend, card.capability, pairs.get("name", name),
                  int(pairs.get("shared", shared)), int(pairs.get("sms", card.sms)), card.arch)


KEYS = ("card", "sm", "triton", "torch", "ptxas", "shared", "sms", "name", "backend")


def card_named(name: str) -> tuple[str, Card] | None:
    """Return (name, card) of the GPU that a text names; None if it names no known GPU.

    The text may be as people and drivers write it: ``h100``, ``NVIDIA H100 80GB HBM3`` or ``4090``.
    """
    said = name.lower()
    # the prefix GTX or RTX may be missing, and a space or hyphen may stand before digits
    written = {card: re.sub(r" |(?<=[a-z])(?=\d)", "[ _-]*", re.sub("^[gr]tx ", "([gr]tx )?", card.lower()))
               for card in CARDS}
    known = [card for card in CARDS if re.search(rf"(?<![a-z0-9]){written[card]}(?!\d)", said)]
    longest = max(known, key=len, default="")
    return (longest, CARDS[longest]) if longest else None


def _card(pairs: Mapping[str, str]) -> tuple[str, Card]:
    """Return (name, card) of the GPU that the values of the keys card, sm and backend describe.

    Raises ValueError if they describe no GPU, or contradict each other.
    """
    backend, digits = pairs.get("backend", ""), pairs.get("sm", "").removeprefix("sm").strip("_")
    given = pairs.get("card", "")
    if re.fullmatch(r"sm_?[0-9]+", given.lower()) and not digits:
        given, digits = "", given.lower().removeprefix("sm").strip("_")
    if backend and backend not in BACKENDS:
        raise ValueError(f"target: got backend={backend}, {need_one_of(backend, BACKENDS)}")
    if given.lower() == "cpu":
        given, backend = "", backend or "cpu"
    if re.fullmatch(r"gfx[0-9]+[0-9a-f]{2}", given.lower()):
        name, units = USUAL_AMD.get(given.lower(), ("AMD GPU", 64))
        return name, Card((0, 0), units, "hip", given.lower())
    known = {f"{major}{minor}": (major, minor) for major, minor in (*BEFORE_VOLTA, *SHARED_PER_BLOCK)}
    if given:
        named = card_named(given)
        if named is None:
            meant = f"; did you mean sm={given}?" if given in known else did_you_mean(given, CARDS, 0.5)
            usual = [name for name, _ in USUAL_CARD.values()][:MOST]
            raise ValueError(f"target: got the card {given!r}, need one of {', '.join(usual)} or "
                             f"{len(CARDS) - len(usual)} others, or another by its architecture, as gfx942 "
                             f"or as sm=90{meant}")
        its_digits = "{}{}".format(*named[1].capability)
        if digits and its_digits != digits:
            means = f"sm={its_digits}" if named[1].backend == "cuda" else f"{named[1].arch} of AMD"
            raise ValueError(f"target: got {given} and sm={digits}, need one of them: {named[0]} is {means}")
        return named[0], named[1]._replace(backend=backend or named[1].backend)
    if digits and digits != "0" and digits not in known and (
            backend in ("", "cuda") or not re.fullmatch("[0-9]{1,4}", digits)):
        raise ValueError(f"target: got sm={pairs.get('sm', digits)}, need the compute capability of an "
                         f"NVIDIA card, such as 75, 80 or 90{did_you_mean(digits, known, 0.3, most=1)}")
    capability = divmod(int(digits), 10) if digits and backend != "hip" else (0, 0)
    card, sms = USUAL_CARD.get(capability, ("GPU" if digits or backend in GPUS else "cpu", 64))
    return card, Card(capability, sms, backend or "cuda")
