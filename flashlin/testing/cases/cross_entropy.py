"""Cases of the cross entropies: vocabularies of one block and of several, every term of the loss, ignored
rows, extreme logits."""
from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import flashlin
from flashlin.kernels.cross_entropy.reference import cross_entropy
from flashlin.testing.compare import Case, Tensors

TOLERANCES = {"*": 0.001, "d*": 0.005}
LINEAR = {"*": 0.005, "d*": 0.02}   # 16-bit logits between the products


def make(
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    N: int = 37,
    V: int = 100,
    D: int = 0,
    bias: bool = True,
    kind: str = "random",
    ignored: str = "",
    ignore_index: int = -100,
    index: str = "int64",
) -> Tensors:
    """D: of the linear layer, 0 for logits as they are. kind: ``far`` logits, ``masked`` ones, which are
    -inf, or ``peaked`` ones, which leave no doubt about the highest. ignored: ``some`` rows, or ``all``."""
    def randn(*shape: int, size: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * size).to(dtype)
    target = torch.randint(0, V, (N,), generator=generator)
    if ignored:
        target[slice(None, None, 3 if ignored == "some" else 1)] = ignore_index
    made = {"target": target.to(getattr(torch, index))}
    if D:
        made |= {"x": randn(N, D), "weight": randn(V, D, size=D**-0.5)} | ({"bias": randn(V)} if bias else {})
    else:
        made["logits"] = randn(N, V, size=50.0 if kind == "far" else 2.0)
    if kind == "peaked":
        made["bias"][7] += 20
    if kind == "masked":
        made["logits"][:, 1::2] = -torch.inf
        made["target"] -= made["target"] % 2
    return {name: x.to(device) for name, x in made.items()}


def call(extra: dict[str, Any], logits: torch.Tensor, target: torch.Tensor) -> Tensors:
    loss, z_loss = flashlin.cross_entropy_loss(logits * 1 if extra.get("inplace_backward") else logits,
                                               target, **extra)
    return {"loss": loss, "z_loss": z_loss}


def reference(extra: dict[str, Any], logits: torch.Tensor, target: torch.Tensor) -> Tensors:
    loss, z_loss = cross_entropy(logits, target,
                                 **{name: value for name, value in extra.items()
                                    if name != "inplace_backward"})
    return {"loss": loss, "z_loss": z_loss.detach()}


def linear_call(extra: dict[str, Any], **tensors: Any) -> Tensors:
    return {"loss": flashlin.fused_linear_cross_entropy_loss(**tensors, **extra)}


def linear_reference(extra: dict[str, Any], x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor,
                     bias: torch.Tensor | None = None) -> Tensors:
    given = dict(extra)
    given.pop("num_chunks", None)
    reduction, penalty = given.pop("reduction", "mean"), given.pop("l2_penalty_factor",
                                                                   1e-4) if given.pop("use_l2warp",
                                                                                      False) else 0.0
    logits = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    loss = cross_entropy(logits, target, **given)[0].sum()
    counted = int((target != given.get("ignore_index", -100)).sum())
    # of which only the gradient counts
    squares = logits.max(1).values.square().sum() * (penalty / 2 / max(len(x), 1))
    return {"loss": loss / (max(counted, 1) if reduction == "mean" else 1) + squares - squares.detach()}


def _case(name: str, extra: dict[str, Any] | None = None, quick: bool = False, **facts: Any) -> Case:
    given = extra or {}
    return Case("cross_entropy_loss", name, partial(make, **facts), partial(call, given),
                partial(reference, given), TOLERANCES, (), quick)


def _linear(name: str, extra: dict[str, Any] | None = None, quick: bool = False, **facts: Any) -> Case:
    given = extra or {}
    return Case("fused_linear_cross_entropy_loss", name, partial(make, **{"D": 24, "V": 60, **facts}),
                partial(linear_call, given), partial(linear_reference, given), LINEAR, (), quick)


ALL: dict[str, Any] = {"label_smoothing": 0.1, "logit_scale": 1.7, "lse_square_scale": 0.01,
                       "logit_softcapping": 3.0}
CASES: list[Case] = [_case("random", quick=True),
                     *(_case(_name, {_name: _value}) for _name, _value in ALL.items()),
                     _case("all-terms", ALL)]
CASES += [_case("negative-scale", {"logit_scale": -0.5}), _case("smoothing-1", {"label_smoothing": 1.0}),
          _case("V=1", V=1), _case("V=3", V=3, N=700), _case("V=1000", ALL, V=1000),
          _case("V=8192", V=8192, N=5), _case("V=8193", ALL, V=8193, N=5), _case("V=20001", V=20001, N=5),
          _case("V=256000", ALL, V=256000, N=2), _case("ignored", ALL, ignored="some"),
          _case("all-ignored", ALL, ignored="all"), _case("int32", index="int32", ignored="some"),
          _case("ignore-index-in-range", {"ignore_index": 3}, ignored="some", ignore_index=3),
          _case("one-row", N=1), _case("no-rows", N=0), _case("far", kind="far"),
          _case("far-wide", kind="far", V=9000, N=5),
          _case("far-capped", {"logit_softcapping": 30.0}, kind="far"), _case("masked", kind="masked"),
          _case("masked-wide", kind="masked", V=9000, N=5),
          _case("in-place", {**ALL, "inplace_backward": True}, V=500, ignored="some")]
CASES += [_linear("random", quick=True), _linear("sum", {"reduction": "sum"}), _linear("no-bias", bias=False),
          _linear("chunks", N=300, V=400, ignored="some"),
          _linear("few-chunks", {"num_chunks": 2}, N=150, V=200), _linear("all-ignored", ignored="all"),
          _linear("no-rows", N=0),
          _linear("terms", {"label_smoothing": 0.1, "logit_scale": 0.7, "logit_softcapping": 3.0}, N=150,
                  V=200),
          _linear("l2warp", {"use_l2warp": True, "l2_penalty_factor": 0.5}, N=150, V=200, kind="peaked",
                  ignored="some"),
          _linear("l2warp-sum", {"use_l2warp": True, "l2_penalty_factor": 0.5, "reduction": "sum"},
                  kind="peaked")]
