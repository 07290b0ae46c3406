"""Cases of the delta product: numbers of steps, keys that resemble each other, packed sequences, no gate."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from flashlin.kernels.delta.reference import product
from flashlin.testing.cases import delta, sequences
from flashlin.testing.cases.inputs import FLOAT32, Input, Maker, Values, decays, keys, rates, unit
from flashlin.testing.cases.op import Op
from flashlin.testing.cases.sequences import L2
from flashlin.testing.compare import Case


def _of_rows(of: Values, first: Callable[[int], int]) -> Values:
    """The values of one row of each token, where k, v and beta have n."""
    return lambda draw, shape: of(draw, shape.replace("T", "T*n"))[:, first(draw["n"])::draw["n"]]


_inputs = {**delta.gated_rule.inputs, "q": Input("B T H K", _of_rows(unit, lambda n: n - 1)),
           "k": Input("B T*n H K", keys), "v": Input("B T*n HV V"), "beta": Input("B T*n HV", rates, FLOAT32),
           "g": Input("B T HV", _of_rows(decays(0.0), lambda n: 0), FLOAT32, "gate")}
_make = Maker(_inputs, {**delta.FACTS, "T": 50, "n": 2})


def _case(op: Op, id: str, options: dict[str, Any] | None = None, n: int = 2, **facts: Any) -> Case:
    return op(id, {"num_householder": n, **(options or {})}, n=n, **facts)


def _op(name: str) -> partial[Case]:
    return partial(_case, Op(name, _make, partial(sequences.outputs, product, {}),
                             delta.TOLERANCES))


_chunk = _op("chunk_gated_delta_product")
_recurrent = _op("fused_recurrent_gated_delta_product")
_small: dict[str, Any] = {"B": 1, "K": 16, "V": 24}
CASES = [
    _chunk("random", quick=True), _chunk("three", {"scale": -0.7}, n=3, T=33, K=32, V=40),
    _chunk("one", n=1, T=40, K=32, V=32), _chunk("packed", edges=(0, 1, 1, 33, 65, 75)),
    _chunk("no-gate", {"g": None}, gate="", K=32, V=32),
    _chunk("no-state", state=False, T=32, K=32, V=32),
    _chunk("grouped", H=2, HV=6, K=32, V=40, T=35), _chunk("odd", K=100, V=36, T=35),
    _chunk("alike-l2", L2, keys="alike"),
    _chunk("one-key", allowed=delta.FORGETFUL, keys="one-key", rate="1", K=32, V=32),
    _chunk("resets", gate="resets", K=32, V=40, B=1), _chunk("g=-inf", gate="-inf", T=10, K=32, V=32),
    _recurrent("random", quick=True, T=4, **_small), _recurrent("three-l2", L2, n=3, T=3, **_small),
    _recurrent("packed", T=5, edges=(0, 2, 2, 5), **_small),
    _recurrent("no-gate", {"g": None}, gate="", T=3, **_small),
    _recurrent("segments", T=33, HV=1, H=1, **_small)]
