"""Cases of Gated DeltaNet 2: Kimi Delta Attention's with rates of erasing and writing."""
from __future__ import annotations

from functools import partial
from typing import Any

from flashlin.kernels.dplr.reference import erasing
from flashlin.testing.cases import dplr, sequences
from flashlin.testing.cases.inputs import Input
from flashlin.testing.cases.op import Op
from flashlin.testing.cases.recurrent import INFERENCE
from flashlin.testing.cases.sequences import L2, V_FIRST

TOLERANCES = {**dplr.TOLERANCES, "db": 0.02, "dw": 0.02}
GATE = {**L2, "use_gate_in_kernel": True}


# rate: of b; w is random. Beta is drawn and dropped: the numbers behind it stay those that GPUs have had.
_make = dplr.kda.but(
    facts={**dplr.FACTS, "without": ("beta",)},
    inputs={**dplr.kda.inputs, "b": Input("B T HV K", lambda draw, shape: draw.rates(draw["rate"], shape)),
            "w": Input("B T HV V", lambda draw, shape: draw.rates("random", shape))})


def _op(name: str) -> Op:
    return Op(name, _make, partial(sequences.outputs, erasing, {}), TOLERANCES)


_chunk, _recurrent = _op("chunk_gdn2"), _op("fused_recurrent_gdn2")
_inference = _recurrent._replace(constant=INFERENCE)
_small: dict[str, Any] = {"K": 16, "V": 24, "T": 5}
CASES = [
    _chunk("random", quick=True, T=70), _chunk("batch", B=3, K=32, V=32),
    _chunk("no-state", {"scale": -0.7}, state=False, T=64, K=32, V=32),
    _chunk("packed", edges=(0, 1, 1, 66, 130, 150)), _chunk("odd", K=100, V=36, T=70),
    _chunk("grouped", H=2, HV=6, K=32, V=40, T=40),
    _chunk("v-first", V_FIRST, K=24, V=40, T=70),
    _chunk("strong-packed", gate="strong", edges=(0, 17, 97, 97, 130)),
    _chunk("resets", gate="resets", K=32, V=32, T=70), _chunk("g=-inf", gate="-inf", T=20, H=1),
    _chunk("one-key", allowed=dplr.FORGETFUL, keys="one-key", rate="1"),
    _chunk("gates", GATE, raw=True, keys="raw", T=70, allowed={"dg": 0.03}),
    _chunk("bounded", {**GATE, "lower_bound": -5.0}, raw=True, keys="raw", T=70, K=32, V=32),
    _chunk("in-parts", gate=sequences.SLOW, **sequences.LONG["in-parts"]),
    _recurrent("random", quick=True, **_small), _recurrent("packed", edges=(0, 0, 3, 5), **_small),
    _recurrent("grouped", H=1, HV=2, **_small),
    _recurrent("gates", {**GATE, **V_FIRST}, raw=True, keys="raw", **_small),
    _inference("decoding", T=1, K=24, V=40, B=2), _inference("decoding-wide", T=1, K=128, V=128),
    _inference("inference", {**GATE, **V_FIRST}, raw=True, keys="raw", H=1, HV=2, K=23, V=40,
               T=5),
    _inference("inference-packed", {**GATE, "lower_bound": -5.0}, raw=True, keys="raw", H=1, HV=2,
               edges=(0, 0, 3, 5), K=16, V=24)]
