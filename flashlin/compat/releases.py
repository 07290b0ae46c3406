"""The one table of Triton's releases. A new release is one entry here; everything else derives from it:
the assembler of a named target, doctor's pairs and advice, the matrix's cells, the workflow that runs them.

Whoever needs the newest ones reads ``releases.RELEASES`` when asked, not a copy made at import.
"""
from __future__ import annotations

from typing import NamedTuple

from flashlin.compat.versions import affected, release


class Release(NamedTuple):
    """A release of Triton.

    ptxas: version of the assembler in its wheel.
    python: the versions of Python that it has wheels for.
    blackwell: version of the second assembler in its wheel; ``""`` if it has none, or the same.
    blackwell_from: the first card, by compute capability, that gets the second one.
    blackwell_path: the variable that names another second one; ``""`` where a shell can set none.
    torch: the torch releases made with it (Requires-Dist of their wheels on PyPI).
    numpy: the bound that its interpreter needs, if any: with numpy 2, 3.0 and 3.1 lose writes silently.
    direct: whether compiled kernels are started as its launch would start them, but without it
        (compat/launch_cache.py): only where both ways have been compared.
    gate: whether it has a cell of the matrix, in which nothing may fail. A release that a patch release soon
        followed has none; it is here because people have it installed.
    """
    version: str
    ptxas: str
    python: str
    blackwell: str = ""
    blackwell_from: tuple[int, int] = (10, 0)
    blackwell_path: str = "TRITON_PTXAS_BLACKWELL_PATH"
    torch: tuple[str, ...] = ()
    numpy: str = ""
    direct: bool = False
    gate: bool = True


# Oldest first. What comes before the first is too old: the torch path serves.
RELEASES: tuple[Release, ...] = (
    Release("3.0.0", "12.4.99", "3.8 to 3.12", torch=("2.4.0", "2.4.1"), numpy="<2"),
    Release("3.1.0", "12.4.99", "3.8 to 3.12", torch=("2.5.0", "2.5.1"), numpy="<2"),
    Release("3.2.0", "12.4.99", "3.9 to 3.13", torch=("2.6.0",), numpy="<2.3"),
    Release("3.3.0", "12.4.99", "3.9 to 3.13", blackwell="12.8.61", blackwell_path="",
            torch=("2.7.0",), numpy="<2.3"),
    Release("3.3.1", "12.4.99", "3.9 to 3.13", blackwell="12.8.61", blackwell_path="",
            torch=("2.7.1",), numpy="<2.3"),
    Release("3.4.0", "12.8.93", "3.9 to 3.13", torch=("2.8.0",), numpy="<2.3"),
    Release("3.5.0", "12.8.93", "3.10 to 3.14", torch=("2.9.0",), numpy="<2.3", gate=False),
    Release("3.5.1", "12.8.93", "3.10 to 3.14", torch=("2.9.1",), numpy="<2.3"),
    Release("3.6.0", "12.8.93", "3.10 to 3.14", blackwell="12.9.86",
            torch=("2.10.0", "2.11.0"), numpy="<2.3", direct=True),
    Release("3.7.0", "12.8.93", "3.10 to 3.14", blackwell="13.1.80", torch=("2.12.0",),
            direct=True, gate=False),
    Release("3.7.1", "12.8.93", "3.10 to 3.14", blackwell="13.1.80", torch=("2.12.1", "2.13.0"),
            direct=True),
    Release("3.8.0", "12.9.86", "3.10 to 3.14", blackwell="13.3.33", torch=("2.14.0", "2.14.1")),
    Release("3.9.0", "12.9.86", "3.11 to 3.15", blackwell="13.4.59", blackwell_from=(9, 0),
            torch=("2.15.0",)),
)
# From this torch on its wheels ask for a minor version of Triton, any patch release of it.
MINOR_IS_ENOUGH_FROM = "2.14.0"
# From this torch on, cumsum of floats on a GPU can be deterministic (pytorch/pytorch#136224).
DETERMINISTIC_CUMSUM_FROM = "2.6.0"


class Wheels(NamedTuple):
    """torch's wheels for Linux on PyPI. torch: the first release that is made so. cuda: what it is built
    with (Requires-Dist). oldest, newest: the cards that it has code for, by compute capability; a card also
    runs what was compiled for an earlier one of its generation."""
    torch: str
    cuda: str
    oldest: tuple[int, int]
    newest: tuple[int, int]


# Cards: TORCH_CUDA_ARCH_LIST of pytorch's .ci/manywheel/build_cuda.sh, and torch.cuda.get_arch_list().
WHEELS: tuple[Wheels, ...] = (
    Wheels("2.4.0", "12.1", (5, 0), (9, 0)), Wheels("2.5.0", "12.4", (5, 0), (9, 0)),
    Wheels("2.7.0", "12.6", (5, 0), (9, 0)), Wheels("2.8.0", "12.8", (7, 0), (12, 1)),
    Wheels("2.11.0", "13.0", (7, 5), (12, 1)), Wheels("2.15.0", "13.2", (7, 5), (12, 1)))
# The oldest driver for each CUDA: docs.nvidia.com/deploy/cuda-compatibility, minor version compatibility.
DRIVERS = {13: 580, 12: 525, 11: 450}


class Pair(NamedTuple):
    """A torch and the Triton that it was made with."""
    torch: str
    triton: str


def pairs() -> tuple[Pair, ...]:
    """Oldest torch first."""
    return tuple(Pair(torch, one.version) for one in RELEASES for torch in one.torch)


def triton_for(torch: str) -> str:
    """The Triton that a torch was made with: ``3.7.1``, or ``3.8`` for any patch release of it; ``""`` for a
    torch nobody has looked at."""
    numbers = (*release(torch), 0)[:3]
    triton = next((pair.triton for pair in pairs() if release(pair.torch) == numbers), "")
    return triton.rpartition(".")[0] if numbers >= release(MINOR_IS_ENOUGH_FROM) else triton


def is_that(triton: str, wanted: str) -> bool:
    """Whether a Triton is the one that ``triton_for`` names."""
    return bool(wanted) and release(triton)[:wanted.count(".") + 1] == release(wanted)


def wheels(torch: str) -> Wheels:
    """How the wheel of a torch is made."""
    return next((one for one in reversed(WHEELS) if release(one.torch) <= release(torch)), WHEELS[0])


def oldest_driver(cuda: str) -> int:
    """The first number of the oldest NVIDIA driver for a CUDA; 0 where nobody has looked."""
    return DRIVERS.get((*release(cuda), 0)[0], 0)


def nearest(triton: str) -> Release:
    """That release, else the newest one before it; the first one for what is older than all."""
    return next((one for one in reversed(RELEASES) if affected(triton, one.version, None)), RELEASES[0])


def planned_as(triton: str) -> str:
    """The release whose plans one has that is not in the table, as of a patch or a minor release to come;
    ``""`` for what is in it, and for what is too old for plans."""
    numbers, known = (*release(triton), 0, 0)[:3], nearest(triton).version
    return "" if numbers < release(RELEASES[0].version) or numbers == release(known) else known


def in_full(version: str) -> str:
    """``"3.3"`` -> ``"3.3.1"``, its newest patch; three numbers as they are, also of a release that is not in
    the table. Raises ValueError, with what there is, for anything else."""
    if len(release(version)) == 3 and release(version)[:2] >= release(RELEASES[0].version)[:2]:
        return version
    patches = [one.version for one in RELEASES if one.version.rpartition(".")[0] == version]
    if not patches:
        minors = dict.fromkeys(one.version.rpartition(".")[0] for one in RELEASES)
        raise ValueError(f"got {version!r}, need one out of {', '.join(minors)}, or all three numbers of a "
                         f"release from {RELEASES[0].version} on")
    return patches[-1]


def supported() -> tuple[str, ...]:
    """The versions that flashlin answers for, oldest first."""
    return tuple(one.version for one in RELEASES if one.gate)
