"""Rotary position embeddings; mirrors ``fla.modules.rotary``.

Each pair of channels of a head is a complex number, which is multiplied by cos + i sin of the token's
position:

    y = (x_1 cos - x_2 sin, x_1 sin + x_2 cos)

Source: Su et al. 2021 (RoFormer).
"""
from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flashlin import policy
from flashlin.guards import scalars
from flashlin.guards.plan_types import Plan, Problem
from flashlin.guards.tensors import check_apart, check_device, check_integers, shown
from flashlin.kernels.rotary import torch_path
from flashlin.kernels.rotary.recipe import FAR
from flashlin.ops._common.arguments import check_nonempty, check_packed
from flashlin.ops._common.casting import as_planned, dtypes_of, strictest, wants_grad
from flashlin.ops._common.entry import entry
from flashlin.ops._common.operator import Operator, kernels


@entry
def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False,
                     seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None,
                     chunk_indices: Any = None) -> Tensor:
    """Rotate pairs of channels by the angles of each token's position.

    Drop-in for ``fla.modules.rotary.rotary_embedding``. Row p of the tables cos and sin is for position p. A
    pair (x_1, x_2) becomes

        (x_1 cos - x_2 sin, x_1 sin + x_2 cos)

    Args:
        x: [B, T, H, D], bfloat16, float16 or float32 (float64 runs in plain torch), any D. Evenly spaced
            tokens, such as a slice of a fused projection, are read without a copy. With cu_seqlens B is 1 and
            sequences are packed along T.
        cos: [TR, R], any float dtype, for TR positions and R pairs; 2 R <= D. It gets no gradient.
        sin: [TR, R], like cos.
        interleaved: pairs are channels (2 i, 2 i + 1) instead of (i, R + i). Channels from 2 R on are copied.
        inplace: write the result to x, and return x. Backward never writes to a gradient that it receives.
        seqlen_offsets: an int, or [N] int32 or int64 for N sequences; added to the position of every token.
            Tokens with negative positions are padding: their pairs are zero, and so are their gradients.
        cu_seqlens: [N + 1] int32 or int64 on the device of x. Sequence n has the rows cu_seqlens[n] to
            cu_seqlens[n + 1] (exclusive). Empty sequences are allowed.
        chunk_indices: accepted for compatibility; flashlin needs no table of chunks.

    Returns:
        y in the shape and dtype of x, computed in float32. A position of TR or more raises ValueError if it
        is known without waiting for a GPU: for an int offset without cu_seqlens, for CPU tensors, and in
        debug mode. Otherwise the pairs of such tokens are NaN, and no memory outside the tables is read.
        cu_seqlens must cover all rows, else ValueError. On a GPU the values are checked only in debug mode,
        and in compiled code never. Without the check, rows outside all sequences and their gradients are
        zero.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    These cases work here and fail in fla: D > 256, B * H > 65,535, tables of another dtype than x, and CPU
    tensors. A position outside the tables does not break the CUDA context. inplace informs autograd, and does
    not overwrite the gradient that backward receives.
    """
    _check(x, cos, sin)
    interleaved, inplace = scalars.flag("interleaved", interleaved), scalars.flag("inplace", inplace)
    if inplace:
        of_leaf = x.is_leaf or (x._base is not None and x._base.is_leaf)
        if x.requires_grad and torch.is_grad_enabled() and of_leaf:
            raise ValueError("inplace: got True with an x that requires a gradient and is a leaf, or a view "
                             "of one; need False, or a copy of x: autograd keeps no history of a leaf that "
                             "is overwritten")
        check_apart("x", x, "inplace")
    bounds, N = check_packed(x, cu_seqlens)
    offset, offsets = _offsets(seqlen_offsets, N, x.device)
    readable = x.device.type == "cpu" or policy.current().debug
    if (readable and not torch.compiler.is_compiling()) or offsets is bounds is None:
        _check_places(x, cos.shape[0], offset, offsets, bounds)
    cos, sin = cos.detach(), sin.detach()
    y, = OPERATOR.run_planned(Tensors(x, cos, sin, offsets, bounds), Scalars(
        offset, interleaved, inplace, wants_grad(x), "rotary_embedding"))
    rotated: Tensor = y if y.dtype is x.dtype else y.to(x.dtype)
    return x.copy_(rotated) if inplace and y is not x else rotated


def _check(x: Any, cos: Any, sin: Any) -> None:
    check_nonempty("x", x, "[B, T, H, D]", (4,))
    for name, table in (("cos", cos), ("sin", sin)):
        check_nonempty(name, table, "[TR, R]", (2,), "R")
        check_device(name, table, x.device, "x")
    if 2 * cos.shape[1] > x.shape[3]:
        raise ValueError(f"cos: got R = {cos.shape[1]} pairs, need at most {x.shape[3] // 2}, half of x's D "
                         f"= {x.shape[3]}")
    if sin.shape != cos.shape:
        raise ValueError(f"sin: got shape {shown(sin.shape)}, need {shown(cos.shape)}, as cos")


def _offsets(given: Any, N: int, device: torch.device) -> tuple[int, Tensor | None]:
    """Check seqlen_offsets and return (int, None) for an int, or (0, tensor) for a tensor."""
    if not isinstance(given, Tensor):
        if isinstance(given, bool) or not isinstance(given, (int, torch.SymInt)):
            raise TypeError(f"seqlen_offsets: got {type(given).__name__}, need an int, or an int32 or int64 "
                            "tensor of shape [N]")
        if type(given) is int:
            scalars.integer("seqlen_offsets", given, need="an int", high=scalars.INT32)
        return cast(int, given), None  # a SymInt while torch.compile traces
    check_integers("seqlen_offsets", given, (N,), "[N]", device, "x")
    return 0, given.contiguous()


def _check_places(x: Tensor, TR: int, offset: int, offsets: Tensor | None, bounds: Tensor | None) -> None:
    """Raise ValueError if a position is outside the tables; this reads the values of tensors."""
    B, T, H, _ = x.shape
    if not (B and T and H):
        return
    if offsets is None and bounds is None:
        last = offset + T - 1
    else:
        places, belongs = torch_path.places_of(x, offset, offsets, bounds)
        last = int((places if belongs is None else torch.where(belongs, places, -1)).max())
    if last >= TR:
        raise ValueError(f"cos: got {TR} rows, need at least {last + 1}, because seqlen_offsets and the "
                         f"length of x reach position {last}")


def _evenly(x: Tensor) -> Tensor:
    """Return x itself if its channels are contiguous and its tokens evenly spaced, else a contiguous copy."""
    B, T, H, D = x.shape
    step = x.stride(0) if T == 1 else x.stride(1)
    even = x.stride(3) == 1 and (B == 1 or T == 1
                                 or x.stride(0) == T * step) and (H - 1) * x.stride(2) + D <= step <= FAR
    return x if even else x.contiguous()


def problem_of(x: Tensors, how: Scalars) -> Problem:
    """Return the planning problem of one rotary embedding, with the strictest dtype of x, cos and sin."""
    B, T, H, D = x.x.shape
    return Problem(how.call, "rotary", "", B=1, T=B * T, H=H, K=D, V=x.cos.shape[1], N=1,
                   dtype=strictest(dtypes_of(x[:3])), varlen=x.bounds is not None, needs_grad=how.needs_grad)


def _cast(given: Tensors, how: Scalars, dot: str) -> tuple[Tensors, Scalars]:
    x, cos, sin, offsets, bounds = given
    if dot != "native":
        x, cos, sin = as_planned((x, cos, sin), dot)
    even = _evenly(x)
    if how.in_place and even is not given.x:
        how = how._replace(in_place=False)
    return Tensors(even, cos.contiguous(), sin.contiguous(), offsets, bounds), how


class Tensors(NamedTuple):
    """The tensor arguments of one rotary embedding.

    x: [B, T, H, D].
    cos, sin: the tables, [TR, R].
    offsets: seqlen_offsets as a tensor [N], or None.
    bounds: the checked cu_seqlens, [N + 1], or None.
    """
    x: Tensor
    cos: Tensor
    sin: Tensor
    offsets: Tensor | None
    bounds: Tensor | None


class Scalars(NamedTuple):
    """The other arguments of one rotary embedding.

    offset: seqlen_offsets as an int.
    interleaved: pairs are neighbouring channels.
    in_place: write the result to x.
    needs_grad: x needs a gradient.
    call: the name of the op.
    """
    offset: int
    interleaved: bool
    in_place: bool
    needs_grad: bool
    call: str


class Outputs(NamedTuple):
    """The result of one rotary embedding, y [B, T, H, D]."""
    y: Tensor


def _rotated(plan: Plan, rows: Tensor, x: Tensors, how: Scalars, back: bool, in_place: bool) -> Any:
    """Rotate rows [B, T, H, D] by the positions of x, or in the opposite direction if ``back`` is set."""
    return kernels("rotary", "forward").launch_forward(
        plan, rows, x.cos, sin=x.sin, offset=how.offset, offsets=x.offsets, bounds=x.bounds,
        interleaved=how.interleaved, back=back, in_place=in_place)


OPERATOR = Operator(
    "rotary", Tensors, Scalars, Outputs, 1, family="rotary", problem=problem_of, cast=_cast,
    # torch.compile of torch 2.8 cannot slice a NamedTuple.
    on_torch=lambda x, how: (
        torch_path.compute(x.x, x.cos, x.sin, how.offset, x.offsets, x.bounds, how.interleaved),),
    forward=lambda plan, x, how: (_rotated(plan, x.x, x, how, False, how.in_place),),
    kept=lambda x, y, how: ((None, *x[1:]), (None,)), in_place="x",
    backward=lambda plan, x, y, grads, how, wanted: {
        "x": None if grads.y is None else _rotated(plan, _evenly(grads.y), x, how, True, False)})
