"""Define the cells (Triton releases) and the GPUs of the support matrix.

All cells but two come from the table of releases, `flashlin.compat.releases`. The GPUs are listed here.
"""
from __future__ import annotations

from flashlin.compat import releases
from flashlin.compat.versions import release
from matrix.results import Card, Cell, Matrix

# gate: no compilation may fail. report: failures are reported, but allowed.
CARDS = (
    Card(name="sm70", example="V100", kind="gate"),
    Card(name="sm75", example="T4", kind="gate"),
    Card(name="sm80", example="A100", kind="gate"),
    Card(name="sm86", example="RTX 3090", kind="gate"),
    Card(name="sm87", example="Orin", kind="gate"),
    Card(name="sm89", example="RTX 4090", kind="gate"),
    Card(name="sm90", example="H100, H200", kind="gate"),
    Card(name="sm100", example="B200", kind="gate"),
    Card(name="sm103", example="B300", kind="gate"),
    Card(name="sm110", example="Thor", kind="gate"),
    Card(name="sm120", example="RTX 5090", kind="gate"),
    Card(name="sm121", example="GB10", kind="gate"),
    Card(name="gfx90a", example="MI250", kind="report"),
    Card(name="gfx942", example="MI300", kind="report"),
    Card(name="gfx1100", example="RX 7900", kind="report"),
    Card(name="gfx1201", example="RX 9070", kind="report"),
)


def whole() -> Matrix:
    """Return the matrix with all cells, oldest release first, and all GPUs."""
    oldest = releases.RELEASES[0]
    cells = [
        # This release is too old for the kernels, so every op must run on the torch path.
        Cell(triton="2.3.1", python="3.7 to 3.12", kind="report", layers=("import", "plan", "torch")),
        # The oldest supported torch pins this Triton. Its launches are not compiled again, because they are
        # the same as in the cell of this release with the installed torch.
        Cell(triton=oldest.version, python=oldest.python, torch=oldest.torch[-1], kind="gate",
             layers=("import", "interpret", "torch")),
        *(Cell(triton=one.version, python=one.python, kind="gate") for one in releases.RELEASES if one.gate),
    ]
    return Matrix(card=CARDS, cell=tuple(sorted(cells, key=lambda cell: (release(cell.triton), cell.torch))))
