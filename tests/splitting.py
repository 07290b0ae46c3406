"""Inputs that are hard on sequences in parts, for the interpreter and for a GPU: what carries states from part
to part must lose no more than a scan of the whole."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flashlin.kernels.delta.reference import recurrence
from flashlin.testing.cases import delta, dplr, sequences
from flashlin.testing.cases.op import Op
from flashlin.testing.compare import Case, Tensors, judge, results

ALLOWED, SEEDS = 1.25, 4  # times the error of the whole
NEGLIGIBLE = 3e-6  # an error that float32 has anyway


def weak_keys(dtype: torch.dtype, generator: torch.Generator, **facts: Any) -> Tensors:
    """A large state, and keys that hardly touch it."""
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
    """The RMS ratio of every output and gradient."""
    pairs = results(of, device, dtype, seed).items()
    return {name: judge(name, ours, right, 1).rms for name, (ours, right) in pairs}


def compare(of: Case, device: torch.device, dtype: torch.dtype, forced: Callable[[int], None],
            parts: int) -> None:
    """Fails where parts lose more than the whole may, or are not finite where that is. The gradients of gates
    are a number a token, so few that one seed's error is luck: where it is beyond, that of SEEDS together
    counts."""
    squares: dict[str, list[float]] = {}
    for seed in range(SEEDS):
        forced(1)
        whole = errors(of, device, dtype, seed)
        forced(parts)
        split = errors(of, device, dtype, seed)
        for name, error in whole.items():
            if error == error:  # the whole is finite
                sums = squares.setdefault(name, [0.0, 0.0])
                sums[0], sums[1] = sums[0] + split[name] ** 2, sums[1] + error ** 2
        beyond = {name: (ours, right) for name, (ours, right) in squares.items()
                  if not ours ** 0.5 <= max(ALLOWED * right ** 0.5, NEGLIGIBLE * (seed + 1) ** 0.5)}
        if not beyond.keys() <= {"dg", "dbeta"} or not beyond:
            break
    assert not beyond, beyond
