"""List the failures that flashlin was first written to prevent, as a table of docs/support/failures.md.

Each row has the failure without flashlin, the behavior with flashlin, and the tests that show both.
"""
from __future__ import annotations

from typing import NamedTuple

from flashlin.compat.known_issues import KNOWN_ISSUES
from matrix import markdown


class Seed(NamedTuple):
    """One failure that flashlin prevents, as a row of the table.

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
    Seed("the autotuner's keys", "keys by name on every release (`flashlin.autotune`, `flashlin.patch`)",
         ("tests/matrix/test_shield_releases.py",),
         ("autotune-keys-31", "autotune-unknown-keys-31", "autotune-unknown-keys-39")),
    Seed("8 and 16 warps on Hopper", "planned with 4",
         ("tests/matrix/test_hopper_warps.py", "tests/matrix/test_known_issues.py",
          "tests/gpu/test_shield.py"),
         ("mma-to-mma-31", "reshape-outs-32", "stmatrix-33")),
    Seed("chunks of 64 in narrow tiles on Hopper", "planned with other tiles",
         ("tests/matrix/test_known_issues.py", "matrix/results/narrow-tiles-NVIDIA-H200-triton-3.6.0.json"),
         ("narrow-state-32", "hopper-narrow-state", "hopper-narrow-scores", "hopper-narrow-grads")),
    Seed("16-bit products below sm80", "fp32 copies, or the torch path",
         ("tests/matrix/test_pre_ampere.py", "tests/matrix/test_known_issues.py"),
         ("bf16-pre-ampere-32", "half-dot-volta-32", "mma-to-mma-volta", "half-dot-33-pre-ampere",
          "half-dot-34-pre-ampere")),
    Seed("B*H > 65,535", "flat grids; `shield` launches a user's kernel in parts",
         ("tests/gpu/test_delta.py", "tests/gpu/test_shield.py",
          "matrix/results/holes-NVIDIA-H200-triton-3.6.0.json"),
         raw="invalid argument: grid axes 1 and 2 end at 65,535, on every release"),
    Seed("a token out of range", "an error that names token, position and call; the context lives",
         ("tests/test_tokens.py", "tests/gpu/test_tokens.py"),
         raw="a device-side assert in an innocent kernel, on every release"),
)


def table() -> list[str]:
    """Return the table of these failures as lines of markdown."""
    known = {issue.id: issue for issue in KNOWN_ISSUES}
    rows = [(seed.failure, seed.raw or "; ".join(f"{known[name].effect} ({known[name].releases})"
                                                 for name in seed.issues),
             seed.here, ", ".join(f"`{path}`" for path in seed.shown)) for seed in SEEDS]
    return markdown.table(("failure", "without flashlin", "with flashlin", "shown by"), rows)
