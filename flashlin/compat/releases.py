"""The one table of Triton's releases. A new release is one line here; everything that knows releases derives from it:
doctor's pairs and its advice, the assembler a named target has, the cells of the matrix and the workflow that runs them.

Who asks reads ``releases.RELEASES`` when asked, never a copy made at import, so that a test can add a release.
"""
from __future__ import annotations

from typing import NamedTuple

from flashlin.compat.versions import affected


class Release(NamedTuple):
    """A release of Triton.

    ptxas: version of the assembler in its wheel. blackwell: of the second one, for cards from ``blackwell_from`` on; ``""``
    if it has none, or the same. torch: the torch releases made with this Triton (Requires-Dist of their wheels on PyPI).
    python: the versions it has wheels for. numpy: the bound that its interpreter needs, if any: with numpy 2, 3.0 and 3.1
    lose writes silently. gate: whether the matrix has a cell of it, in which nothing may fail; a release that a patch
    release followed at once has none, and is known for the sake of who has it installed.
    """
    version: str
    ptxas: str
    blackwell: str = ""
    blackwell_from: tuple[int, int] = (10, 0)
    torch: tuple[str, ...] = ()
    python: str = ""
    numpy: str = ""
    gate: bool = True


# Oldest first. What comes before the first is too old: the torch path serves.
RELEASES: tuple[Release, ...] = (
    Release("3.0.0", "12.4.99", torch=("2.4.0", "2.4.1"), python="3.8 to 3.12", numpy="<2"),
    Release("3.1.0", "12.4.99", torch=("2.5.0", "2.5.1"), python="3.8 to 3.12", numpy="<2"),
    Release("3.2.0", "12.4.99", torch=("2.6.0",), python="3.9 to 3.13", numpy="<2.3"),
    Release("3.3.0", "12.4.99", "12.8.61", torch=("2.7.0",), python="3.9 to 3.13", numpy="<2.3"),
    Release("3.3.1", "12.4.99", "12.8.61", torch=("2.7.1",), python="3.9 to 3.13", numpy="<2.3"),
    Release("3.4.0", "12.8.93", torch=("2.8.0",), python="3.9 to 3.13", numpy="<2.3"),
    Release("3.5.0", "12.8.93", torch=("2.9.0",), python="3.10 to 3.14", numpy="<2.3", gate=False),
    Release("3.5.1", "12.8.93", torch=("2.9.1",), python="3.10 to 3.14", numpy="<2.3"),
    Release("3.6.0", "12.8.93", "12.9.86", torch=("2.10.0", "2.11.0"), python="3.10 to 3.14", numpy="<2.3"),
    Release("3.7.0", "12.8.93", "13.1.80", torch=("2.12.0",), python="3.10 to 3.14", gate=False),
    Release("3.7.1", "12.8.93", "13.1.80", torch=("2.12.1", "2.13.0"), python="3.10 to 3.14"),
    Release("3.8.0", "12.9.86", "13.3.33", torch=("2.14.0", "2.14.1"), python="3.10 to 3.14"),
    Release("3.9.0", "12.9.86", "13.4.59", (9, 0), torch=("2.15.0",), python="3.11 to 3.15"),
)
# From this torch on its wheels ask for a minor version of Triton, any patch release of it.
MINOR_IS_ENOUGH_FROM = "2.14.0"


def nearest(triton: str) -> Release:
    """That release, else the newest one before it; the first one for what is older than all."""
    return next((one for one in reversed(RELEASES) if affected(triton, one.version, None)), RELEASES[0])


def supported() -> tuple[str, ...]:
    """The versions that flashlin answers for, oldest first."""
    return tuple(one.version for one in RELEASES if one.gate)
