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

# Times the error of the whole. The gradients of gates are a number a token, so few that their error is mostly
# luck: over seeds it is the same, too.
ALLOWED, OF_GATES = 1.25, 2.0
NEGLIGIBLE = 3e-6  # an error that float32 has anyway


def weak_keys(dtype: torch.dtype, generator: torch.Generator, **facts: Any) -> Tensors:
    """A large state, and keys that hardly touch it."""
    made = delta.make(dtype, generator, **facts)
    return {**made, "k": made["k"] / 50, "initial_state": made["initial_state"] * 1000}


def case(make: Callable[..., Tensors], name: str, gate: str = "none", **facts: Any) -> Callable[..., Case]:
    op = "chunk_delta_rule" if gate == "none" else "chunk_gated_delta_rule"
    return partial(Op(op, make, partial(sequences.outputs, recurrence, {"cu_seqlens": "cu_seqlens"}),
                      delta.TOLERANCES), name, B=1, H=1, HV=1, K=32, V=32, gate=gate, **facts)


def kda(name: str, **facts: Any) -> Callable[..., Case]:
    found = next(one for one in dplr.CASES if one.op == "chunk_kda" and one.id == "random")
    op: Op = found.call.args[0]  # type: ignore[attr-defined]  # a partial
    return partial(op, name, H=1, K=32, V=32, **facts)


HARD: dict[str, Callable[..., Case]] = {
    "weak keys beside a large state": case(weak_keys, "weak"),
    "keys alike, beta 1.9": case(delta.make, "alike-1.9", keys="alike", rate="1.9"),
    "keys alike, beta 2, slow decays": case(delta.make, "alike-2", keys="alike", rate="2", gate="-0.01"),
    "one key, beta 1": case(delta.make, "one-key", keys="one-key", rate="1"),
    "raw keys, strong decays": case(delta.make, "raw", keys="raw", gate="-6"),
    "KDA, keys alike": kda("alike", keys="alike", rate="1", gate="-0.01")}


def errors(of: Case, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """The RMS ratio of every output and gradient."""
    pairs = results(of, device, dtype).items()
    return {name: judge(name, ours, right, 1).rms for name, (ours, right) in pairs}


def worse(split: dict[str, float], whole: dict[str, float]) -> None:
    """Fails where parts lose more than the whole may, or are not finite where that is."""
    beyond = {name: (split[name], error) for name, error in whole.items()
              if not split[name] <= max((OF_GATES if name in ("dg", "dbeta") else ALLOWED) * error, NEGLIGIBLE)
              and error == error}
    assert not beyond, beyond
