"""Cases of the delta product: numbers of steps, keys that resemble each other, packed sequences, no gate."""
from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flashlin.kernels.delta.reference import product
from flashlin.testing.cases import delta, sequences
from flashlin.testing.cases.inputs import bounds
from flashlin.testing.cases.op import Op
from flashlin.testing.cases.sequences import L2
from flashlin.testing.compare import Case, Tensors


def make(dtype: torch.dtype, generator: torch.Generator, *, n: int = 2, T: int = 50,
         edges: tuple[int, ...] = (), **facts: Any) -> Tensors:
    """The delta rule's tensors of T n rows, of which a token has n; the rest as there. Decays are those of
    each token's first row, and q that of its last."""
    made = delta.make(dtype, generator, T=T * n, edges=tuple(n * edge for edge in edges), **facts)
    made["q"] = made["q"][:, n - 1::n].contiguous()
    if "g" in made:
        made["g"] = made["g"][:, ::n].contiguous()
    return made | bounds(edges)


def _case(op: Op, id: str, options: dict[str, Any] | None = None, n: int = 2, **facts: Any) -> Case:
    return op(id, {"num_householder": n, **(options or {})}, n=n, **facts)


def _op(name: str) -> partial[Case]:
    """gate: as the delta rule's cases have it."""
    return partial(_case, Op(name, partial(make, gate="random"),
                             partial(sequences.outputs, product, {}),
                             delta.TOLERANCES))


_chunk = _op("chunk_gated_delta_product")
_recurrent = _op("fused_recurrent_gated_delta_product")
_small: dict[str, Any] = {"B": 1, "K": 16, "V": 24}
CASES = [
    _chunk("random", quick=True), _chunk("three", {"scale": -0.7}, n=3, T=33, K=32, V=40),
    _chunk("one", n=1, T=40, K=32, V=32), _chunk("packed", edges=(0, 1, 1, 33, 65, 75)),
    _chunk("no-gate", {"g": None}, gate="none", K=32, V=32),
    _chunk("no-state", state=False, T=32, K=32, V=32),
    _chunk("grouped", H=2, HV=6, K=32, V=40, T=35), _chunk("odd", K=100, V=36, T=35),
    _chunk("alike-l2", L2, keys="alike"),
    _chunk("one-key", allowed=delta.FORGETFUL, keys="one-key", rate="1", K=32, V=32),
    _chunk("resets", gate="resets", K=32, V=40, B=1), _chunk("g=-inf", gate="-inf", T=10, K=32, V=32),
    _recurrent("random", quick=True, T=4, **_small), _recurrent("three-l2", L2, n=3, T=3, **_small),
    _recurrent("packed", T=5, edges=(0, 2, 2, 5), **_small),
    _recurrent("no-gate", {"g": None}, gate="none", T=3, **_small),
    _recurrent("segments", T=33, HV=1, H=1, **_small)]
