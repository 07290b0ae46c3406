"""Cases of the norms that are fused with a linear layer.

The norms themselves have their own cases. These cases test the inputs, the outputs and the gradients.
"""
from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from flashlin.testing.cases import norm
from flashlin.testing.cases.inputs import Input, renamed
from flashlin.testing.cases.op import Op
from flashlin.testing.compare import Case

TOLERANCES = {"*": 0.008, "residual_out": 0.005, "d*": 0.012, "dnorm_weight": 0.02, "dnorm_bias": 0.02}


# The same settings as for the norms. E: columns of the linear layer. linear_bias: True if the layer has a
# bias.
_make = norm.make.but(
    inputs={**renamed(norm.make.inputs, norm_weight="weight", norm_bias="bias"),
            "g": Input("rows D", when="gated"),
            "linear_weight": Input("E D", lambda draw, shape: draw(shape) * draw["D"] ** -0.5),
            "linear_bias": Input("E", when="linear_bias")},
    facts={**norm.FACTS, "shape": (3, 5, 64), "E": 40, "gated": False, "linear_bias": True},
    finish=norm.of_kind)


def reference(
    linear_weight: Tensor, linear_bias: Tensor | None = None,
    norm_weight: Tensor | None = None, norm_bias: Tensor | None = None,
    prenorm: bool = False,
    **given: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Compute a norm and the linear layer after it in float64."""
    y, total = norm.reference(**given, weight=norm_weight, bias=norm_bias, prenorm=True)
    out = F.linear(y, linear_weight, linear_bias)
    return (out, total) if prenorm else out


def _op(name: str) -> Op:
    gated = name.endswith("swish_gate_linear")
    kind, eps = "rms" if name.startswith("rms") else "layer", 1e-6 if gated else 1e-5
    return Op(name, _make.having(gated=gated), partial(reference, kind=kind, eps=eps), TOLERANCES,
              ("out", "residual_out"), dict.fromkeys(("norm_weight", "norm_bias", "linear_bias")))


CASES: list[Case] = []
_layer, _rms, _group, *_gated = (_op(name + "_linear") for name in (
    "layer_norm", "rms_norm", "group_norm", "layer_norm_swish_gate", "rms_norm_swish_gate"))
for _norm in (_layer, _rms, _group, *_gated):
    _groups = {"num_groups": 4} if _norm is _group else {}
    CASES += [_norm("random", _groups), _norm("prenorm", {**_groups, "prenorm": True}, residual="float32"),
              _norm("bare", {**_groups, "eps": 0.1}, weight="", linear_bias=False)]
CASES += [_rms("D=1100", shape=(7, 1100), E=3), _rms("no-rows", shape=(0, 64)),
          _rms("residual-in-fp32", {"prenorm": True, "residual_in_fp32": True}),
          _layer("is-rms-norm", {"is_rms_norm": True, "num_groups": 2})]
