"""Cases of the norms with a linear layer behind them. The norms themselves have their own; here is what goes
in and out, and its gradients."""
from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import flashlin
from flashlin.kernels.norm.reference import normalise
from flashlin.testing.cases import norm
from flashlin.testing.compare import Case, Tensors

TOLERANCES = {"*": 0.008, "residual_out": 0.005, "d*": 0.012, "dnorm_weight": 0.02, "dnorm_bias": 0.02}
GATED = ("layer_norm_swish_gate_linear", "rms_norm_swish_gate_linear")


def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator, *, E: int = 40,
         shape: tuple[int, ...] = (3, 5, 64), bias: bool = True, gated: bool = False,
         **facts: Any) -> Tensors:
    """As the norms' make; E: columns of the linear layer, which has a bias or not."""
    made = norm.make(device, dtype, generator, shape=shape, **facts)
    made = {name if name not in ("weight", "bias") else "norm_" + name: x for name, x in made.items()}
    if gated:
        made["g"] = torch.randn(*shape, generator=generator).to(dtype).to(device)
    made["linear_weight"] = (torch.randn(E, shape[-1],
                                         generator=generator) * shape[-1]**-0.5).to(dtype).to(device)
    return made | ({"linear_bias": torch.randn(E, generator=generator).to(dtype).to(device)} if bias else {})


def call(op: str, extra: dict[str, Any], **tensors: torch.Tensor) -> Tensors:
    found = getattr(flashlin, op)(**{"norm_weight": None, "norm_bias": None, "linear_bias": None, **tensors},
                                  **extra)
    return {"out": found[0], "residual_out": found[1]} if extra.get("prenorm") else {"out": found}


def reference(
    op: str,
    extra: dict[str, Any],
    x: torch.Tensor,
    linear_weight: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    linear_bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    g: torch.Tensor | None = None,
) -> Tensors:
    kind = "rms" if op.startswith("rms") or extra.get("is_rms_norm") else "layer"
    y, total = normalise(kind, x, residual, norm_weight, norm_bias,
                         extra.get("eps", 1e-6 if op in GATED else 1e-5), extra.get("num_groups", 1), g)
    out = F.linear(y, linear_weight.double(), None if linear_bias is None else linear_bias.double())
    return {"out": out, "residual_out": total} if extra.get("prenorm") else {"out": out}


def _case(op: str, name: str, extra: dict[str, Any] | None = None, **facts: Any) -> Case:
    return Case(op, name, partial(make, gated=op in GATED, **facts), partial(call, op, extra or {}),
                partial(reference, op, extra or {}), TOLERANCES)


CASES: list[Case] = []
for _op in ("layer_norm_linear", "rms_norm_linear", "group_norm_linear", *GATED):
    _groups = {"num_groups": 4} if _op == "group_norm_linear" else {}
    CASES += [_case(_op, "random", _groups),
              _case(_op, "prenorm", {**_groups, "prenorm": True}, residual="float32"),
              _case(_op, "bare", {**_groups, "eps": 0.1}, weight="", bias=False)]
CASES += [_case("rms_norm_linear", "D=1100", shape=(7, 1100), E=3),
          _case("rms_norm_linear", "no-rows", shape=(0, 64)),
          _case("rms_norm_linear", "residual-in-fp32", {"prenorm": True, "residual_in_fp32": True}),
          _case("layer_norm_linear", "is-rms-norm", {"is_rms_norm": True, "num_groups": 2})]
