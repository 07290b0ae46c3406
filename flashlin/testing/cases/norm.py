"""Cases of the norms: random, constant and zero rows, short and long rows, residuals, mixed dtypes."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashlin.kernels.norm.reference import normalise
from flashlin.testing.cases.inputs import Draw, Input, Maker, every_other
from flashlin.testing.cases.op import Op
from flashlin.testing.compare import Case, Tensors

TOLERANCES = {"*": 0.005, "d*": 0.008, "dweight": 0.02, "dbias": 0.02}


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda x: x,
    "constant": lambda x: torch.full_like(x, 0.5),
    "zero-rows": every_other(0, dim=0),
    # The mean is far from zero, so E[x^2] - E[x]^2 would have no correct digits.
    "shifted": lambda x: (x.float() + 300).to(x.dtype),
    "large": lambda x: x * 1000}  # the squares overflow fp16


def of_kind(made: Tensors, draw: Draw) -> Tensors:
    """Return the tensors with x changed to the kind in the case's setting ``kind``, such as zero rows."""
    return {**made, "x": KINDS[draw["kind"]](made["x"])}


def _opened(made: Tensors, draw: Draw) -> Tensors:
    """Scale the gates by 3, so that some are far from 0, and change x to the setting ``kind``."""
    return of_kind({**made, **({"g": 3 * made["g"]} if "g" in made else {})}, draw)


# kind: one of KINDS. residual, weight, bias, gate_dtype: ``""`` for no such tensor, ``same`` for the dtype of
# x, or a dtype.
FACTS = {"shape": (3, 5, 256), "kind": "random", "residual": "", "weight": "same", "bias": "same",
         "gate_dtype": ""}
make = Maker({"x": Input("rows D"), "residual": Input("rows D", dtype="residual", when="residual"),
              "weight": Input("D", dtype="weight", when="weight"),
              "bias": Input("D", dtype="bias", when="bias"),
              "g": Input("rows D", dtype="gate_dtype", when="gate_dtype")}, FACTS,
             lambda facts: {"rows": facts["shape"][:-1], "D": facts["shape"][-1]}, _opened)


def reference(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None,
    residual: Tensor | None = None, g: Tensor | None = None,
    *,
    kind: str, eps: float,
    num_groups: int = 1, activation: str = "swish", is_rms_norm: bool = False,
    prenorm: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Compute a norm in float64; with ``prenorm``, also return the sum of x and the residual.

    kind: ``layer``, ``rms`` or ``l2``, the kind of the op.
    eps: default eps of the op.
    """
    y, total = normalise("rms" if is_rms_norm else kind, x, residual, weight, bias, eps, num_groups, g,
                         activation)
    return (y, total) if prenorm else y


def _op(name: str, kind: str, eps: float, **facts: Any) -> Op:
    return Op(name, make.having(**facts), partial(reference, kind=kind, eps=eps), TOLERANCES,
              {"y": "rows D", "residual_out": ""}, {} if name == "l2norm" else {"weight": None, "bias": None})


_layer, _rms = _op("layer_norm", "layer", 1e-5), _op("rms_norm", "rms", 1e-5)
_group, _l2 = _op("group_norm", "layer", 1e-5), _op("l2norm", "l2", 1e-6, weight="", bias="")
_layer_gated = _op("layer_norm_gated", "layer", 1e-6, gate_dtype="same")
_rms_gated = _op("rms_norm_gated", "rms", 1e-6, gate_dtype="same")
# Numbers of rows, by number of columns.
ROWS = {3: 50, 100: 40, 2048: 70, 3000: 9, 8192: 5, 16400: 3, 40001: 2}
CASES: list[Case] = []
for _norm in (_layer, _rms, _l2):
    CASES += [_norm("random", quick=True), _norm("constant", kind="constant"),
              _norm("zero-rows", kind="zero-rows"), _norm("large", kind="large"),
              _norm("eps", {"eps": 0.1}), _norm("one-row", shape=(1, 64)),
              _norm("flat", shape=(96,)), _norm("heads", shape=(2, 37, 3, 64)),
              *(_norm(f"D={_D}", shape=(_rows_of, _D)) for _D, _rows_of in ROWS.items())]
# These cases have more rows than a large GPU runs programs at once. So each program sums the weight gradients
# of several rows.
CASES += [_layer("many-heads", shape=(20000, 64)), _rms("many-rows", shape=(300, 5000))]
CASES += [_layer("shifted", kind="shifted"),
          _layer("shifted-wide", kind="shifted", shape=(2, 20000)),
          _layer("is-rms-norm", {"is_rms_norm": True}), _l2("fp32-out", {"output_dtype": torch.float32})]
for _norm in (_layer, _rms):
    CASES += [_norm("no-weight", weight="", bias=""), _norm("no-bias", bias=""),
              _norm("only-bias", weight=""), _norm("fp32-weight", weight="float32", bias="float32"),
              _norm("D=1", shape=(5, 1)), _norm("residual", residual="same"),
              _norm("prenorm-no-residual", {"prenorm": True}),
              _norm("prenorm", {"prenorm": True}, residual="same", bias=""),
              _norm("prenorm-fp32-residual", {"prenorm": True}, residual="float32", bias=""),
              _norm("residual-in-fp32", {"prenorm": True, "residual_in_fp32": True}, bias=""),
              _norm("prenorm-wide", {"prenorm": True}, shape=(3, 16500), residual="float32")]

for _norm in (_layer_gated, _rms_gated):
    CASES += [_norm("random", quick=True), _norm("sigmoid", {"activation": "sigmoid"}),
              _norm("heads", shape=(2, 37, 3, 64)), _norm("zero-rows", kind="zero-rows"),
              _norm("no-weight", weight="", bias=""), _norm("no-bias", bias=""),
              _norm("eps", {"eps": 0.1}),
              *(_norm(f"D={_D}", shape=(ROWS[_D], _D)) for _D in (3, 3000, 8192, 16400)),
              _norm("fp32-gate", weight="float32", bias="", gate_dtype="float32"),
              _norm("residual", residual="same"),
              _norm("prenorm", {"prenorm": True, "residual_in_fp32": True}, residual="float32"),
              _norm("prenorm-no-residual", {"prenorm": True, "activation": "silu"}, bias="")]
# Some cases have group sizes that divide a program's tile of columns, and others do not. The case many-rows
# has more rows than a large GPU runs programs at once.
CASES += [_group("random", {"num_groups": 4}, True), _group("one-group"),
          _group("is-rms-norm", {"num_groups": 2, "is_rms_norm": True}),
          _group("groups-of-one", {"num_groups": 6, "is_rms_norm": True}, shape=(50, 6)),
          _group("odd-groups", {"num_groups": 7}, shape=(41, 7 * 96)),
          _group("no-weight", {"num_groups": 8}, weight="", bias=""),
          _group("no-bias", {"num_groups": 8}, bias=""),
          _group("only-bias", {"num_groups": 3}, shape=(9, 48), weight=""),
          _group("many-rows", {"num_groups": 12}, shape=(1500, 12 * 64)),
          _group("prenorm", {"num_groups": 4, "prenorm": True}, residual="float32"),
          _group("wide", {"num_groups": 3}, shape=(9, 3 * 9000)),
          _group("D=2x3000", {"num_groups": 2}, shape=(9, 6000))]
