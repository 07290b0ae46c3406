"""Inputs that are numerically hard for sequences in segments, for the interpreter and for a GPU.

The computation that carries states between segments must be no less accurate than a scan of the sequence.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flashlin.kernels.delta.reference import recurrence
from flashlin.testing.cases import delta, dplr, sequences
from flashlin.testing.cases.op import Op
from flashlin.testing.compare import Case, Tensors, judge, results

ALLOWED, SEEDS = 1.25, 4  # allowed error, as a multiple of the unsplit scan's error; number of random seeds
NEGLIGIBLE = 3e-6  # RMS error that is always allowed: float32 rounding causes it


def weak_keys(dtype: torch.dtype, generator: torch.Generator, **facts: Any) -> Tensors:
    """Return inputs with a large initial state and keys so small that they hardly change it."""
    made = delta.rule(dtype, generator, **facts)
    return {**made, "k": made["k"] / 50, "initial_state": made["initial_state"] * 1000}


def case(make: Callable[..., Tensors], name: str, **facts: Any) -> Callable[..., Case]:
    op = "chunk_gated_delta_rule" if "gate" in facts else "chunk_delta_rule"
    return partial(Op(op, make, partial(sequences.outputs, recurrence, {}),
                      delta.TOLERANCES), name, B=1, H=1, HV=1, K=32, V=32, **facts)


def kda(name: str, **facts: Any) -> Callable[..., Case]:
    found = next(one for one in dplr.CASES if one.op == "chunk_kda" and one.id == "random")
    op: Op = found.call.args[0]  # type: ignore[attr-defined]  # a partial
    return partial(op, name, H=1, K=32, V=32, **facts)


HARD: dict[str, Callable[..., Case]] = {
    "weak keys beside a large state": case(weak_keys, "weak"),
    "keys alike, beta 1.9": case(delta.rule, "alike-1.9", keys="alike", rate="1.9"),
    "keys alike, beta 2, slow decays": case(delta.gated_rule, "alike-2", keys="alike", rate="2",
                                            gate="-0.01"),
    "one key, beta 1": case(delta.rule, "one-key", keys="one-key", rate="1"),
    "raw keys, strong decays": case(delta.gated_rule, "raw", keys="raw", gate="-6"),
    "KDA, keys alike": kda("alike", keys="alike", rate="1", gate="-0.01")}


def errors(of: Case, device: torch.device, dtype: torch.dtype, seed: int = 0) -> dict[str, float]:
    """Return the RMS error ratio of every output and gradient of a case, by name."""
    pairs = results(of, device, dtype, seed).items()
    return {name: judge(name, ours, right, 1).rms for name, (ours, right) in pairs}


def compare(of: Case, device: torch.device, dtype: torch.dtype, forced: Callable[[int], None],
            parts: int) -> None:
    """Fail if a split sequence is less accurate than ALLOWED times the unsplit scan, or not finite.

    The gradients dg and dbeta have only one number per token, so the error of a single seed varies by chance.
    If only they exceed the bound, the errors of all SEEDS together count.

    forced: sets the number of segments.
    """
    squares: dict[str, list[float]] = {}
    for seed in range(SEEDS):
        forced(1)
        whole = errors(of, device, dtype, seed)
        forced(parts)
        split = errors(of, device, dtype, seed)
        for name, error in whole.items():
            if error == error:  # not NaN: the unsplit result is finite
                sums = squares.setdefault(name, [0.0, 0.0])
                sums[0], sums[1] = sums[0] + split[name] ** 2, sums[1] + error ** 2
        beyond = {name: (ours, right) for name, (ours, right) in squares.items()
                  if not ours ** 0.5 <= max(ALLOWED * right ** 0.5, NEGLIGIBLE * (seed + 1) ** 0.5)}
        if not beyond.keys() <= {"dg", "dbeta"} or not beyond:
            break
    assert not beyond, beyond
