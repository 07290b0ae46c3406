"""List the failures that flashlin was first written to prevent, as sections of docs/support/failures.md.

Each section has the failure without flashlin, the behavior with flashlin, and the tests that show both.
"""
from __future__ import annotations

from typing import NamedTuple

from flashlin.compat.known_issues import KNOWN_ISSUES


class Seed(NamedTuple):
    """One failure that flashlin prevents, as a section of the page.

    failure: short name of the failure.
    here: behavior with flashlin.
    shown: tests and records that show both behaviors.
    issues: ids of the known issues that describe the failure without flashlin.
    raw: the failure without flashlin, if no known issue describes it.
    """
    failure: str
    here: str
    shown: tuple[str, ...]
    issues: tuple[str, ...] = ()
    raw: str = ""


SEEDS = (
    Seed("The autotuner's keys", "`flashlin.autotune` and `flashlin.patch` find keys by name on every release",
         ("tests/matrix/test_shield_releases.py",),
         ("autotune-keys-31", "autotune-unknown-keys-31", "autotune-unknown-keys-39")),
    Seed("8 and 16 warps on Hopper", "the kernels are planned with 4 warps",
         ("tests/matrix/test_hopper_warps.py", "tests/matrix/test_known_issues.py",
          "tests/gpu/test_shield.py"),
         ("mma-to-mma-31", "reshape-outs-32", "stmatrix-33")),
    Seed("Chunks of 64 in narrow tiles on Hopper", "the kernels are planned with other tiles",
         ("tests/matrix/test_known_issues.py", "matrix/results/narrow-tiles-NVIDIA-H200-triton-3.6.0.json"),
         ("narrow-state-32", "hopper-narrow-state", "hopper-narrow-scores", "hopper-narrow-grads")),
    Seed("16-bit products below sm80",
         "the kernels use fp32 copies of the tensors, or plain torch computes the call",
         ("tests/matrix/test_pre_ampere.py", "tests/matrix/test_known_issues.py"),
         ("bf16-pre-ampere-32", "half-dot-volta-32", "mma-to-mma-volta", "half-dot-33-pre-ampere",
          "half-dot-34-pre-ampere")),
    Seed("B*H > 65,535", "the kernels use only axis 0 of the grid, and "
         "`flashlin.shield` splits a launch of a user's kernel into several",
         ("tests/gpu/test_delta.py", "tests/gpu/test_shield.py",
          "matrix/results/holes-NVIDIA-H200-triton-3.6.0.json"),
         raw="On every release, the launch fails with 'invalid argument', because grid axes 1 and 2 end at "
             "65,535"),
    Seed("A token out of range", "the call raises an error that names the token, its position and the call; the "
         "CUDA context stays usable",
         ("tests/test_tokens.py", "tests/gpu/test_tokens.py"),
         raw="On every release, a device-side assert appears in an unrelated kernel"),
)


def table() -> list[str]:
    """Return a section for each of these failures as lines of markdown."""
    known = {issue.id: issue for issue in KNOWN_ISSUES}
    lines: list[str] = []
    for seed in SEEDS:
        lines += [f"## {seed.failure}", "", "Without flashlin:", "",
                  *([f"- {seed.raw}"] if seed.raw else
                    [f"- {known[name].releases}: {known[name].effect}" for name in seed.issues]),
                  "", f"With flashlin, {seed.here}.", "", "Shown by " + ", ".join(f"`{path}`" for path in seed.shown) + ".",
                  ""]
    return lines[:-1]
