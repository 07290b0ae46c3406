"""Cases of the cross-entropy losses.

They vary vocabularies of one and of several blocks, all terms of the loss, ignored rows and extreme logits.
"""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashlin
from flashlin.kernels.cross_entropy.reference import cross_entropy
from flashlin.testing.cases.inputs import Draw, Input, Maker
from flashlin.testing.cases.op import Op
from flashlin.testing.compare import Case, Tensors

TOLERANCES = {"*": 0.001, "d*": 0.005}
LINEAR = {"*": 0.005, "d*": 0.02}  # looser, because logits are rounded to 16 bits between the products


def _target(draw: Draw, shape: str) -> Tensor:
    target = draw.integers(draw["V"], shape)
    if draw["ignored"]:
        target[slice(None, None, 3 if draw["ignored"] == "some" else 1)] = draw["ignore_index"]
    return target.to(getattr(torch, draw["index"]))


def _logits(draw: Draw, shape: str) -> Tensor:
    return draw(shape) * (50.0 if draw["kind"] == "far" else 2.0)


def _special(made: Tensors, draw: Draw) -> Tensors:
    if draw["kind"] == "peaked":
        made["bias"][7] += 20
    if draw["kind"] == "masked":
        made["logits"][:, 1::2] = -torch.inf
        made["target"] -= made["target"] % 2
    return made


# N, V: rows and size of the vocabulary. kind: ``random``; ``far`` for large logits; ``masked``, where every
# other logit is -inf; or ``peaked``, where one logit is clearly the largest. ignored: "", ``some`` rows or
# ``all`` rows. index: dtype of the targets.
FACTS = {"N": 37, "V": 100, "kind": "random", "ignored": "", "ignore_index": -100, "index": "int64"}
_make = Maker({"target": Input("N", _target), "logits": Input("N V", _logits)}, FACTS, finish=_special)
_make_linear = _make.but(
    inputs={"target": Input("N", _target), "x": Input("N D"),
            "weight": Input("V D", lambda draw, shape: draw(shape) * draw["D"] ** -0.5),
            "bias": Input("V", when="given")},
    facts={**FACTS, "D": 24, "V": 60})


def call(logits: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Call cross_entropy_loss on logits that it may overwrite."""
    if options.get("inplace_backward"):
        logits = logits * 1  # the backward overwrites logits, which is not allowed for a leaf
    return flashlin.cross_entropy_loss(logits, target, **options)


def linear_reference(
    x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None = None,
    *,
    reduction: str = "mean",
    use_l2warp: bool = False, l2_penalty_factor: float = 1e-4,
    ignore_index: int = -100,
    **terms: Any) -> Tensor:
    """Compute the loss of a linear layer in float64, with the L2 penalty on the largest logits.

    The penalty changes the gradient, but not the value of the loss.
    """
    logits = F.linear(x, weight, bias)
    loss = cross_entropy(logits, target, ignore_index=ignore_index, **terms)[0].sum()
    if reduction == "mean":
        loss = loss / max(int((target != ignore_index).sum()), 1)
    # The penalty is subtracted from the value again, so that only its gradient counts.
    squares = logits.max(1).values.square().sum() * (l2_penalty_factor * use_l2warp / 2 / max(len(x), 1))
    return loss + squares - squares.detach()


_loss = Op("cross_entropy_loss", _make, cross_entropy, TOLERANCES, ("loss", "z_loss"), {}, call)
_linear = Op("fused_linear_cross_entropy_loss", _make_linear, linear_reference, LINEAR, ("loss",), {})
ALL: dict[str, Any] = {"label_smoothing": 0.1, "logit_scale": 1.7, "lse_square_scale": 0.01,
                       "logit_softcapping": 3.0}
CASES: list[Case] = [_loss("random", quick=True),
                     *(_loss(_name, {_name: _value}) for _name, _value in ALL.items()),
                     _loss("all-terms", ALL)]
CASES += [_loss("negative-scale", {"logit_scale": -0.5}), _loss("smoothing-1", {"label_smoothing": 1.0}),
          _loss("V=1", V=1), _loss("V=3", V=3, N=700), _loss("V=1000", ALL, V=1000),
          _loss("V=8192", V=8192, N=5), _loss("V=8193", ALL, V=8193, N=5), _loss("V=20001", V=20001, N=5),
          _loss("V=256000", ALL, V=256000, N=2), _loss("ignored", ALL, ignored="some"),
          _loss("all-ignored", ALL, ignored="all"), _loss("int32", index="int32", ignored="some"),
          _loss("ignore-index-in-range", {"ignore_index": 3}, ignored="some"),
          _loss("one-row", N=1), _loss("no-rows", N=0), _loss("far", kind="far"),
          _loss("far-wide", kind="far", V=9000, N=5),
          _loss("far-capped", {"logit_softcapping": 30.0}, kind="far"), _loss("masked", kind="masked"),
          _loss("masked-wide", kind="masked", V=9000, N=5),
          _loss("in-place", {**ALL, "inplace_backward": True}, V=500, ignored="some")]
CASES += [_linear("random", quick=True), _linear("sum", {"reduction": "sum"}), _linear("no-bias", given=()),
          _linear("chunks", N=300, V=400, ignored="some"),
          _linear("few-chunks", {"num_chunks": 2}, N=150, V=200), _linear("all-ignored", ignored="all"),
          _linear("no-rows", N=0),
          _linear("terms", {"label_smoothing": 0.1, "logit_scale": 0.7, "logit_softcapping": 3.0}, N=150,
                  V=200),
          _linear("l2warp", {"use_l2warp": True, "l2_penalty_factor": 0.5}, N=150, V=200, kind="peaked",
                  ignored="some"),
          _linear("l2warp-sum", {"use_l2warp": True, "l2_penalty_factor": 0.5, "reduction": "sum"},
                  kind="peaked")]
