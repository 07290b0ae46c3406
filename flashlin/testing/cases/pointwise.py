"""Cases of the elementwise ops.

They vary the numbers of rows and columns, also odd ones, the dtypes of parameters, and gates far from zero on
both sides.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any

from torch import Tensor

from flashlin.kernels.pointwise import reference
from flashlin.testing.cases.inputs import Draw, Input, Maker, Values, times
from flashlin.testing.cases.op import Op
from flashlin.testing.compare import Case

MIXES = ("xr", "xw", "xk", "xv", "xa", "xg")
PARAMETERS = (*MIXES, "A_log", "dt_bias", "ka", "r_k")
TOLERANCES = {"*": 0.005, "d*": 0.008, **{"d" + name: 0.02 for name in PARAMETERS}}


# B, T, one: None for tensors without that dimension. parameters: dtype of the parameters. far: factor of the
# raw gates.
FACTS = {"B": 2, "T": 35, "H": 3, "K": 20, "D": 48, "one": 1, "parameters": "same", "far": 1.0}
VALUES: dict[str, Values] = {"g": lambda draw, shape: draw(shape) * draw["far"], "A_log": times(0.5)}


def mix_reference(hidden_states: Tensor, delta: Tensor, **xs: Tensor) -> tuple[Tensor, ...]:
    """Compute fused_addcmul_rwkv7 in float64: one output for each tensor of mixing factors."""
    return reference.mix(hidden_states, delta, *xs.values())


def _op(name: str, expected: Callable[..., Any], tensors: dict[str, str],
        outputs: Iterable[str] = MappingProxyType({"y": "B T H"}), **sizes: Any) -> Op:
    inputs = {name: Input(shape, VALUES.get(name, Draw.__call__),
                          "parameters" if name in PARAMETERS else "same") for name, shape in tensors.items()}
    return Op(name, Maker(inputs, {**FACTS, **sizes}), expected, TOLERANCES, outputs, {})


_gdn = _op("fused_gdn_gate", reference.gate_of_heads, {"g": "B T H", "A_log": "H", "dt_bias": "H"}, H=6)
_kda = _op("fused_kda_gate", reference.gate, {"g": "B T H K", "A_log": "H", "dt_bias": "H*K"},
           {"y": "B T H K"})
_mix = _op("fused_addcmul_rwkv7", mix_reference,
           {"hidden_states": "B T D", "delta": "B T D", **dict.fromkeys(MIXES, "one one D")},
           {f"y{n}": "B T D" for n in range(len(MIXES))})
_key = _op("fused_k_rwkv7", reference.key, {"k": "B T D", "a": "B T D", "ka": "D"}, {"y": "B T D"})
_correction = _op("gate_output_correction", reference.correction,
                  {"o": "B T H*K", **dict.fromkeys(("r", "k", "v"), "B T H K"), "g": "B T H*K", "r_k": "H K"},
                  {"y": "B T H*K"})
OPS = (_gdn, _kda, _mix, _key, _correction)
BOUND = {"lower_bound": -5.0}
CASES: list[Case] = [_any("random", quick=True) for _any in OPS]
CASES += [_any("fp32-parameters", parameters="float32") for _any in OPS]
CASES += [_gdn("no-bias", without=("dt_bias",)), _gdn("far", far=10.0),
          _gdn("flat", B=None, T=None), _gdn("one-head", H=1, B=None, T=300),
          _gdn("many-heads", H=2100, B=None, T=5), _gdn("many-rows", H=32, T=1500)]
CASES += [_kda("bounded", BOUND),
          _kda("bounded-far", {"lower_bound": -0.5}, far=10.0),
          _kda("bare", without=("A_log", "dt_bias")),
          _kda("no-A", without=("A_log",)),
          _kda("bounded-no-A", BOUND, without=("A_log",)),
          _kda("no-bias", without=("dt_bias",)), _kda("far", far=10.0),
          _kda("wide", H=8, K=128, B=1, T=40), _kda("strips", H=3, K=700, B=None, T=7)]
CASES += [_mix("five", without=("xg",)),
          _mix("flat-parameters", one=None), _mix("D=1", D=1),
          _mix("D=2500", D=2500, T=3), _mix("one-token", B=3, T=1)]
CASES += [_key("D=1", D=1), _key("D=2500", D=2500, T=3),
          _key("one-token", B=3, T=1), _key("many-rows", B=1, T=1500, D=32)]
CASES += [_correction(f"D={D}", K=D, T=9) for D in (1, 64, 100, 300, 2100)]
CASES += [_correction("one-head", H=1),
          _correction("many-heads", H=40, K=8, T=5),
          _correction("one-token", B=3, T=1), _correction("many-rows", B=1, T=1200, H=2, K=8)]
