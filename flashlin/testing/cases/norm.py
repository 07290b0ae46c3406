"""Cases of the norms: random, constant and zero rows, short and long rows, residuals, mixed dtypes."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import flashlin
from flashlin.kernels.norm.reference import normalise
from flashlin.testing.compare import Case, Tensors

TOLERANCES = {"*": 0.005, "d*": 0.008, "dweight": 0.02, "dbias": 0.02}
KINDS = {"layer_norm": "layer", "rms_norm": "rms", "l2norm": "l2", "group_norm": "layer",
         "layer_norm_gated": "layer", "rms_norm_gated": "rms"}
SMALL_EPS = ("l2norm", "layer_norm_gated", "rms_norm_gated")


def make(
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    shape: tuple[int, ...] = (3, 5, 256),
    kind: str = "random",
    residual: str = "",
    weight: str = "same",
    bias: str = "same",
    gate: str = "",
) -> Tensors:
    """residual, weight, bias, gate: ``""`` for none, ``same`` for x's dtype, or the name of another."""
    def randn(name: str, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes,
                           generator=generator).to(dtype if name == "same"
                                                   else getattr(torch, name)).to(device)
    made = {"x": randn("same", *shape)}
    if kind == "constant":
        made["x"] = torch.full_like(made["x"], 0.5)
    elif kind == "zero-rows":
        made["x"][::2] = 0
    elif kind == "shifted":  # a mean far from zero: E[x^2] - E[x]^2 would have no digits left
        made["x"] = (made["x"].float() + 300).to(dtype)
    elif kind == "large":  # squares of these overflow fp16
        made["x"] = made["x"] * 1000
    if residual:
        made["residual"] = randn(residual, *shape)
    for name, given in (("weight", weight), ("bias", bias)):
        if given:
            made[name] = randn(given, shape[-1])
    if gate:
        made["g"] = randn(gate, *shape) * 3
    return made


def call(op: str, extra: dict[str, Any], x: torch.Tensor, weight: torch.Tensor | None = None,
         bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
         g: torch.Tensor | None = None) -> Tensors:
    function: Callable[..., Any] = getattr(flashlin, op)
    if op == "l2norm":
        return {"y": function(x, **extra)}
    gate = {} if g is None else {"g": g}
    found = function(x, weight=weight, bias=bias, residual=residual, **gate, **extra)
    return {"y": found[0], "residual_out": found[1]} if extra.get("prenorm") else {"y": found}


def reference(op: str, extra: dict[str, Any], x: torch.Tensor, weight: torch.Tensor | None = None,
              bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
              g: torch.Tensor | None = None) -> Tensors:
    kind = "rms" if extra.get("is_rms_norm") else KINDS[op]
    y, total = normalise(kind, x, residual, weight, bias, extra.get("eps", 1e-6 if op in SMALL_EPS else 1e-5),
                         extra.get("num_groups", 1), g, extra.get("activation", "swish"))
    return {"y": y, "residual_out": total} if extra.get("prenorm") else {"y": y}


def _case(op: str, name: str, extra: dict[str, Any] | None = None, quick: bool = False, **facts: Any) -> Case:
    if op == "l2norm":
        facts = {**facts, "weight": "", "bias": ""}
    if op.endswith("gated"):
        facts = {"gate": "same", **facts}
    given = extra or {}
    return Case(op, name, partial(make, **facts), partial(call, op, given), partial(reference, op, given),
                TOLERANCES, (), quick)


CASES: list[Case] = []
for _op in ("layer_norm", "rms_norm", "l2norm"):
    CASES += [_case(_op, "random", quick=True), _case(_op, "constant", kind="constant"),
              _case(_op, "zero-rows", kind="zero-rows"), _case(_op, "large", kind="large"),
              _case(_op, "eps", {"eps": 0.1}), _case(_op, "one-row", shape=(1, 64)),
              _case(_op, "flat", shape=(96,)), _case(_op, "heads", shape=(2, 37, 3, 64)),
              _case(_op, "D=3", shape=(50, 3)), _case(_op, "D=100", shape=(40, 100)),
              _case(_op, "D=2048", shape=(70, 2048)), _case(_op, "D=3000", shape=(9, 3000)),
              _case(_op, "D=8192", shape=(5, 8192)), _case(_op, "D=16400", shape=(3, 16400)),
              _case(_op, "D=40001", shape=(2, 40001))]
# More rows than a large card has programs that share out the gradients of weight and bias.
CASES += [_case("layer_norm", "many-heads", shape=(20000, 64)),
          _case("rms_norm", "many-rows", shape=(300, 5000))]
CASES += [_case("layer_norm", "shifted", kind="shifted"),
          _case("layer_norm", "shifted-wide", kind="shifted", shape=(2, 20000)),
          _case("layer_norm", "is-rms-norm", {"is_rms_norm": True}),
          _case("l2norm", "fp32-out", {"output_dtype": torch.float32})]
for _op in ("layer_norm", "rms_norm"):
    CASES += [_case(_op, "no-weight", weight="", bias=""), _case(_op, "no-bias", bias=""),
              _case(_op, "only-bias", weight=""), _case(_op, "fp32-weight", weight="float32", bias="float32"),
              _case(_op, "D=1", shape=(5, 1)), _case(_op, "residual", residual="same"),
              _case(_op, "prenorm-no-residual", {"prenorm": True}),
              _case(_op, "prenorm", {"prenorm": True}, residual="same", bias=""),
              _case(_op, "prenorm-fp32-residual", {"prenorm": True}, residual="float32", bias=""),
              _case(_op, "residual-in-fp32", {"prenorm": True, "residual_in_fp32": True}, bias=""),
              _case(_op, "prenorm-wide", {"prenorm": True}, shape=(3, 16500), residual="float32")]

for _op in ("layer_norm_gated", "rms_norm_gated"):
    CASES += [_case(_op, "random", quick=True), _case(_op, "sigmoid", {"activation": "sigmoid"}),
              _case(_op, "heads", shape=(2, 37, 3, 64)), _case(_op, "zero-rows", kind="zero-rows"),
              _case(_op, "no-weight", weight="", bias=""), _case(_op, "no-bias", bias=""),
              _case(_op, "eps", {"eps": 0.1}), _case(_op, "D=3", shape=(50, 3)),
              _case(_op, "D=3000", shape=(9, 3000)), _case(_op, "D=8192", shape=(5, 8192)),
              _case(_op, "D=16400", shape=(3, 16400)),
              _case(_op, "fp32-gate", weight="float32", bias="", gate="float32"),
              _case(_op, "residual", residual="same"),
              _case(_op, "prenorm", {"prenorm": True, "residual_in_fp32": True}, residual="float32"),
              _case(_op, "prenorm-no-residual", {"prenorm": True, "activation": "silu"}, bias="")]
# Groups that divide the rows of a program's registers and that do not; more rows than a large card has
# programs to share them.
CASES += [_case("group_norm", "random", {"num_groups": 4}, True), _case("group_norm", "one-group"),
          _case("group_norm", "is-rms-norm", {"num_groups": 2, "is_rms_norm": True}),
          _case("group_norm", "groups-of-one", {"num_groups": 6, "is_rms_norm": True}, shape=(50, 6)),
          _case("group_norm", "odd-groups", {"num_groups": 7}, shape=(41, 7 * 96)),
          _case("group_norm", "no-weight", {"num_groups": 8}, weight="", bias=""),
          _case("group_norm", "no-bias", {"num_groups": 8}, bias=""),
          _case("group_norm", "only-bias", {"num_groups": 3}, shape=(9, 48), weight=""),
          _case("group_norm", "many-rows", {"num_groups": 12}, shape=(1500, 12 * 64)),
          _case("group_norm", "prenorm", {"num_groups": 4, "prenorm": True}, residual="float32"),
          _case("group_norm", "wide", {"num_groups": 3}, shape=(9, 3 * 9000)),
          _case("group_norm", "D=2x3000", {"num_groups": 2}, shape=(9, 6000))]
