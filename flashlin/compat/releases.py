"""The table of Triton releases, RELEASES. A new release is one entry here.

Everything else derives from the table: the ptxas of a target that is given by name, doctor's pairs of torch
and Triton and its advice, the cells of the matrix, and the workflow that runs them. Other modules read
``releases.RELEASES`` at each use and keep no copy, so that they see a changed table.
"""
from __future__ import annotations

from typing import NamedTuple

from flashlin.compat.versions import affected, release


class Release(NamedTuple):
    """A release of Triton.

    ptxas: version of ptxas, the assembler, in its wheel.
    python: the Python versions for which it has wheels.
    blackwell: version of the second ptxas in its wheel; ``""`` if the wheel has only one, or two of the same
        version.
    blackwell_from: lowest compute capability that uses the second ptxas.
    blackwell_path: environment variable that replaces the second ptxas; ``""`` if none does.
    torch: the torch releases that require it (Requires-Dist of their wheels on PyPI).
    numpy: version bound of numpy for its interpreter; ``""`` if none is needed. With numpy 2, the
        interpreters of Triton 3.0 and 3.1 lose writes silently.
    direct: True if compiled kernels are started directly, without ``JITFunction.run``
        (compat/launch_cache.py). It is True only for releases on which both kinds of starts were compared.
    gate: True if it has a cell of the matrix in which no compilation may fail. A release that was soon
        followed by a patch release has no such cell. It is in the table because people have it installed.
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


# Oldest first. On a Triton older than the first entry, every op runs in plain torch.
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
# Since this torch, the wheels of torch require a minor version of Triton, with any patch release.
MINOR_IS_ENOUGH_FROM = "2.14.0"
# Since this torch, cumsum of floats on a GPU can be deterministic (pytorch/pytorch#136224).
DETERMINISTIC_CUMSUM_FROM = "2.6.0"


class Wheels(NamedTuple):
    """Build facts of torch's wheels for Linux on PyPI, for a range of torch releases.

    torch: the first release of the range.
    cuda: the CUDA version that the wheels are built with (Requires-Dist).
    oldest, newest: lowest and highest compute capability with compiled code. A GPU also runs code for an
        earlier GPU of the same generation.
    """
    torch: str
    cuda: str
    oldest: tuple[int, int]
    newest: tuple[int, int]


# Source of the capabilities: TORCH_CUDA_ARCH_LIST in pytorch's .ci/manywheel/build_cuda.sh, and
# torch.cuda.get_arch_list().
WHEELS: tuple[Wheels, ...] = (
    Wheels("2.4.0", "12.1", (5, 0), (9, 0)), Wheels("2.5.0", "12.4", (5, 0), (9, 0)),
    Wheels("2.7.0", "12.6", (5, 0), (9, 0)), Wheels("2.8.0", "12.8", (7, 0), (12, 1)),
    Wheels("2.11.0", "13.0", (7, 5), (12, 1)), Wheels("2.15.0", "13.2", (7, 5), (12, 1)))
# The oldest driver for each major version of CUDA. Source: docs.nvidia.com/deploy/cuda-compatibility, section
# on minor version compatibility.
DRIVERS = {13: 580, 12: 525, 11: 450}


class Pair(NamedTuple):
    """A torch release and the Triton release that it requires."""
    torch: str
    triton: str


def pairs() -> tuple[Pair, ...]:
    """Return all pairs of a torch release and its Triton, oldest torch first."""
    return tuple(Pair(torch, one.version) for one in RELEASES for torch in one.torch)


def triton_for(torch: str) -> str:
    """Return the Triton that a torch release requires; ``""`` for a torch that is not in the table.

    The result is a release, such as ``3.7.1``, or a minor version, such as ``3.8``, which means any patch
    release of it.
    """
    numbers = (*release(torch), 0)[:3]
    triton = next((pair.triton for pair in pairs() if release(pair.torch) == numbers), "")
    return triton.rpartition(".")[0] if numbers >= release(MINOR_IS_ENOUGH_FROM) else triton


def is_that(triton: str, wanted: str) -> bool:
    """Return True if a Triton version satisfies ``wanted``, a result of ``triton_for``."""
    return bool(wanted) and release(triton)[:wanted.count(".") + 1] == release(wanted)


def wheels(torch: str) -> Wheels:
    """Return the build facts of the wheel of a torch release."""
    return next((one for one in reversed(WHEELS) if release(one.torch) <= release(torch)), WHEELS[0])


def oldest_driver(cuda: str) -> int:
    """Return the major version of the oldest NVIDIA driver for a CUDA version; 0 if it is not known."""
    return DRIVERS.get((*release(cuda), 0)[0], 0)


def nearest(triton: str) -> Release:
    """Return the table entry of a Triton version, or else the newest entry of an older release.

    A version that is older than all entries gets the first entry.
    """
    return next((one for one in reversed(RELEASES) if affected(triton, one.version, None)), RELEASES[0])


def planned_as(triton: str) -> str:
    """Return the release in the table whose plans are used for a Triton release that is not in the table.

    Returns ``""`` for a release that is in the table, and for one that is too old for plans.
    """
    numbers, known = (*release(triton), 0, 0)[:3], nearest(triton).version
    return "" if numbers < release(RELEASES[0].version) or numbers == release(known) else known


def in_full(version: str) -> str:
    """Return a version of three numbers: ``"3.3"`` gives its newest patch release, ``"3.3.1"``.

    A version of three numbers is returned unchanged, even if the table has no such release. Raises
    ValueError, with the known versions, for anything else.
    """
    if len(release(version)) == 3 and release(version)[:2] >= release(RELEASES[0].version)[:2]:
        return version
    patches = [one.version for one in RELEASES if one.version.rpartition(".")[0] == version]
    if not patches:
        minors = dict.fromkeys(one.version.rpartition(".")[0] for one in RELEASES)
        raise ValueError(f"got {version!r}, need one out of {', '.join(minors)}, or all three numbers of a "
                         f"release, {RELEASES[0].version} or newer")
    return patches[-1]


def supported() -> tuple[str, ...]:
    """Return the Triton versions that flashlin supports, oldest first: those with a cell of the matrix."""
    return tuple(one.version for one in RELEASES if one.gate)
