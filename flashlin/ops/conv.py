"""The short causal convolution, with one filter per channel; mirrors ``fla.modules.convolution``.

    y_t = act(bias + sum_w weight[:, w] x_{t - W + 1 + w}) + residual_t

``causal_conv1d`` computes whole sequences. ``causal_conv1d_update`` computes one token of each sequence.
Source: the depthwise convolution before linear attention since H3 (Fu et al. 2023) and Mamba (Gu and Dao
2023).
"""
from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flashlin.guards import scalars
from flashlin.guards.plan_types import Plan, Problem
from flashlin.guards.tensors import check_floats, need_tensor, shown
from flashlin.kernels.conv import torch_path
from flashlin.kernels.conv.recipe import FAR, MAX_WIDTH
from flashlin.ops._common.arguments import check_nonempty, check_optional, check_packed, check_written
from flashlin.ops._common.casting import as_planned, contiguous, count_of, dense, dtypes_of, wants_grad
from flashlin.ops._common.entry import entry
from flashlin.ops._common.operator import Gradients, Operator, Overwriting, kernels
from flashlin.ops._common.pipeline import TracedCall, call_of, parsed

ACTIVATIONS = (None, "silu", "swish")
BACKENDS = ("triton", "mix", "cuda")


@entry
def causal_conv1d(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, activation: str | None = None,
    backend: str | None = "triton", cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None, cp_context: Any = None, *, process_group: Any = None,
    **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Convolve each channel with its own causal filter.

    Drop-in for ``fla.modules.convolution.causal_conv1d``. It computes

        y_t = act(bias + sum_w weight[:, w] x_{t - W + 1 + w}) + residual_t

    Args:
        x: [B, T, D], bfloat16, float16 or float32 (float64 runs in plain torch), never modified. Evenly
            spaced rows, such as a slice of a fused projection, are read without a copy. With cu_seqlens B is
            1 and sequences are packed along T.
        weight: [D, W], any float dtype; gets a gradient. Its last column applies to the token itself. Kernels
            run for W up to 16; a larger W runs in plain torch.
        bias: [D], any float dtype, or None; gets a gradient.
        residual: [B, T, D], any float dtype, or None; added after the activation. It gets a gradient.
        initial_state: [N, D, W] for N sequences, any float dtype; gets a gradient. Slot w contains the token
            W - w positions before the first one. Slot 0 matters only for an empty sequence, which returns it.
        output_final_state: also return the state after each sequence, which can be the initial_state of the
            next call.
        activation: ``silu`` (also called ``swish``) or None.
        backend: accepted for compatibility; the plan chooses the kernels.
        cu_seqlens: [N + 1] int32 or int64 on the device of x. Sequence n has the rows cu_seqlens[n] to
            cu_seqlens[n + 1] (exclusive). Empty sequences are allowed.
        cu_seqlens_cpu: a copy of cu_seqlens on the host, which is checked without waiting for the GPU.
        chunk_indices: accepted for compatibility; flashlin needs no table of chunks.
        cp_context: the ranks that share the sequences, as in ``chunk_gated_delta_rule``. Each rank needs at
            least W - 1 tokens.
        process_group: the group of these ranks, as in ``chunk_gated_delta_rule``.
        **unknown: raises an error that names the unknown keyword.

    Returns:
        y [B, T, D] and the final state [N, D, W] or None, both in the dtype of x. Gradients, including the
        gradient of the final state, are computed in fp32; repeated runs give bitwise identical results.
        cu_seqlens must cover all rows, else ValueError. On a GPU the values are checked only in debug mode,
        and in compiled code never. Without the check, rows outside all sequences contain the residual or
        zeros, and pass no gradient to x.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    These cases work here and fail in fla: checked cu_seqlens, any B and T (the grid does not limit them),
    tensors of different dtypes, and CPU tensors. A call with another B or T never tunes or compiles again.
    """
    if backend is not None:
        scalars.choice("backend", backend, BACKENDS)
    output_final_state = scalars.flag("output_final_state", output_final_state)
    silu = is_silu(activation)
    check_nonempty("x", x, "[B, T, D]", (3,))
    weight = check_filters(x, x.shape[2], weight, bias)
    check_optional("x", x, [("residual", residual, x.shape, "x's shape")])
    shard = None
    if cp_context is not None or process_group is not None:
        from flashlin.ops._common import ranks
        shard = ranks.shard_of("causal_conv1d", x, weight.shape, cp_context, process_group, cu_seqlens,
                               cu_seqlens_cpu, initial_state=initial_state is not None,
                               output_final_state=output_final_state)
        bounds, N = shard.bounds, shard.total
    else:
        bounds, N = check_packed(x, cu_seqlens, cu_seqlens_cpu)
    if initial_state is not None:
        need_tensor("initial_state", initial_state, (N, *weight.shape), "[N, D, W]", x.device, "x")
    if shard is not None:
        x, residual = shard.there(x), shard.there(residual)
        initial_state = shard.window(x, weight.shape[1], initial_state)
    y, state = convolve("causal_conv1d", Tensors(x, weight, bias, residual, initial_state, bounds), silu,
                           output_final_state)
    if shard is not None:
        y, state = shard.back(y), None if state is None else shard.share(state, x.shape[0])
    return y, state


@entry
def causal_conv1d_update(x: Tensor, cache: Tensor, residual: Tensor | None = None,
                         weight: Tensor | None = None, bias: Tensor | None = None,
                         activation: str | None = None) -> tuple[Tensor, Tensor]:
    """Convolve the next token of each sequence and update its state in place.

    Drop-in for ``fla.modules.convolution.causal_conv1d_update``.

    Args:
        x: [N, D], [N, 1, D] or [1, N, D], never modified.
        cache: [N, D, W], any strides and any float dtype: the states, as ``causal_conv1d`` returns them. It
            is UPDATED IN PLACE: shifted by one slot, with x in the last slot.
        residual: shape of x, or None; added after the activation.
        weight: [D, W], as in ``causal_conv1d``.
        bias: [D] or None, as in ``causal_conv1d``.
        activation: ``silu``, ``swish`` or None.

    Returns:
        y in the shape and dtype of x, and cache itself.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it. cache must not require a
            gradient, because gradients cannot pass through an in-place update. ``causal_conv1d`` with an
            initial_state has that gradient.
        UnsupportedError: this machine cannot run the call.

    Difference from fla: x, weight, bias and residual get gradients, which are silently missing there.
    """
    silu = is_silu(activation)
    check_floats("x", x, "[N, D], [N, 1, D] or [1, N, D]")
    if x.ndim not in (2, 3) or x.shape[-1] == 0 or (x.ndim == 3 and 1 not in x.shape[:2] and x.numel()):
        raise ValueError(f"x: got shape {shown(x.shape)}, need [N, D], [N, 1, D] or [1, N, D] with D of at "
                         "least 1")
    D = x.shape[-1]
    weight = check_filters(x, D, weight, bias)
    check_optional("x", x, [("residual", residual, x.shape, "x's shape")])
    N = x.numel() // D
    need_tensor("cache", cache, (N, *weight.shape), "[N, D, W]", x.device, "x")
    check_written("cache", cache, "causal_conv1d_update",
                  "updated in place. causal_conv1d with initial_state=cache has the gradient")
    given = Token(x.reshape(N, D), weight, bias, None if residual is None else residual.reshape(N, D), cache)
    if wants_grad(*given):
        y, state = convolve("causal_conv1d", _of_one_token(given, cache.clone()), silu, True)
        cache.copy_(cast(Tensor, state).detach())
    else:
        y = UPDATE.run_planned(given, Activation(silu))
    return y.reshape(x.shape), cache


def is_silu(activation: str | None) -> bool:
    """Return True for ``silu`` or ``swish`` and False for None; raise an error for any other activation."""
    scalars.choice("activation", activation, ACTIVATIONS, "None, 'silu' or 'swish'")
    return activation is not None


def check_filters(x: Tensor, D: int, weight: Any, bias: Any,
                  names: tuple[str, str, str] = ("weight", "bias", "x")) -> Tensor:
    """Return weight; raise an error unless weight is [D, W] and bias is [D] or None, both on the device of x.

    names: the names of weight, bias and x in error messages.
    """
    need_tensor(names[0], weight, (D, None), "[D, W]", x.device, names[2])
    if weight.shape[1] == 0:
        raise ValueError(f"{names[0]}: got shape {shown(weight.shape)}, need [D, W] with W of at least 1")
    if bias is not None:
        need_tensor(names[1], bias, (D,), "[D]", x.device, names[2])
    return cast(Tensor, weight)


def convolve(op: str, given: Tensors, silu: bool, has_ht: bool = False) -> tuple[Tensor, Tensor | None]:
    """Run a convolution on checked tensors and return y and the final state, both in the dtype of x.

    op: the name of the calling op, for planning and messages.
    silu: apply SiLU to the sum, before the residual.
    has_ht: compute the final state [N, D, W]; without it, None is returned.
    """
    dtype = given.x.dtype
    y, ht = OPERATOR.run_planned(given, Scalars(silu, has_ht, wants_grad(*given),
                                                _call_of(op, given, silu, has_ht)))
    return y.to(dtype), ht.to(dtype) if has_ht else None


def _cast(given: Tensors, how: Scalars, dot: str) -> tuple[Tensors, Scalars]:
    x, *others = as_planned(given, dot)
    return Tensors(x if torch.compiler.is_compiling() else evenly_spaced(x), *contiguous(*others)), how


def _of_one_token(given: Token, state: Tensor) -> Tensors:
    """Return one update as the arguments of a convolution of N sequences with one token each.

    state: [N, D, W], the initial states of these sequences.
    """
    x, weight, bias, residual, _ = given
    return Tensors(x[:, None], weight, bias, None if residual is None else residual[:, None], state)


def _update_on_torch(given: Token, how: Activation) -> Tensor:
    of_token, state = torch_path.compute(*_of_one_token(given, given.cache), how.silu)
    given.cache.copy_(state)
    return of_token[:, 0].to(given.x.dtype)


def _update(plan: Plan, given: Token, how: Activation) -> Tensor:
    x, weight, bias, residual, cache = as_planned(given, plan.problem.dot)
    tensors = contiguous(x, weight, bias, residual)
    y: Tensor = kernels("conv", "forward").update(plan, *tensors, cache, how.silu, x.dtype)
    if cache is not given.cache:
        given.cache.copy_(cache)
    return y.to(given.x.dtype)


def _call_of_update(given: Token, how: Activation) -> str:
    return _call_of("causal_conv1d_update", given, how.silu, False)


def _problem_of_update(given: Token, how: Activation) -> Problem:
    (op, dtype, options), (N, D) = parsed(_call_of_update(given, how)), given.x.shape
    return Problem(op, "conv_update", "", B=N, T=1, H=1, K=D, V=given.weight.shape[1], N=N, dtype=dtype,
                   options=options)


def evenly_spaced(x: Tensor) -> Tensor:
    """Return x [B, T, D] itself if the kernels can read it without a copy, else a contiguous copy.

    They can if the channels are contiguous and one distance separates all rows of the whole batch.
    """
    if x.is_contiguous():
        return x
    B, T, _ = x.shape
    stride = x.stride(0) if T == 1 else x.stride(1)
    even = B == 1 or T == 1 or x.stride(0) == T * stride
    return x if x.stride(2) == 1 and even and stride <= FAR else x.contiguous()


def _call_of(op: str, given: Tensors | Token, silu: bool, has_ht: bool) -> str:
    options = [name for name in ("bias", "residual", "initial_state")
               if getattr(given, name, None) is not None]
    return call_of(op, dtypes_of(given), [
        *options, *["silu"] * silu, *["final_state"] * has_ht, *["fixed"] * (op == "token_shift")])


def width_class(weight: Tensor) -> int:
    """Return 1 if kernels support the width W, else 17.

    torch.compile plans with it instead of W, so that it does not compile again for each W.
    """
    return MAX_WIDTH + 1 if weight.shape[1] > MAX_WIDTH else 1


class Tensors(NamedTuple):
    """The tensor arguments of one convolution; all after weight may be None.

    x: [B, T, D].
    weight: [D, W].
    bias: [D].
    residual: [B, T, D].
    initial_state: [N, D, W] for N sequences.
    bounds: the checked cu_seqlens, [N + 1].
    """
    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    initial_state: Tensor | None = None
    bounds: Tensor | None = None


class Scalars(NamedTuple):
    """The other arguments of one convolution.

    silu: apply SiLU.
    has_ht: return the final state.
    needs_grad: some tensor needs a gradient.
    call: the call string (op, dtype and options).
    """
    silu: bool
    has_ht: bool
    needs_grad: bool
    call: str


class Outputs(NamedTuple):
    """The results of one convolution: y [B, T, D], and the final state ht [N, D, W] or None."""
    y: Tensor
    ht: Tensor | None


class Token(NamedTuple):
    """The tensor arguments of one update, with N sequences as N rows.

    x: [N, D].
    weight: [D, W].
    bias: [D] or None.
    residual: [N, D] or None.
    cache: [N, D, W], updated in place.
    """
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    cache: Tensor


class Activation(NamedTuple):
    """The only option of an update: apply SiLU or not."""
    silu: bool


def problem_of(x: Tensors, how: Scalars) -> Problem:
    """Return the problem of one convolution for planning, with D as K and W as V."""
    (op, dtype, options), (B, T, D) = parsed(how.call), x.x.shape
    return Problem(op, "conv", "", B=B, T=T, H=1, K=D, V=x.weight.shape[1], N=count_of(x.x, x.bounds),
                   dtype=dtype, varlen=x.bounds is not None, needs_grad=how.needs_grad, options=options)


def _backward(plan: Plan, x: Tensors, y: Outputs, grads: Outputs, how: Scalars,
              wanted: frozenset[str]) -> Gradients:
    dx, dweight, dbias, dh0 = kernels("conv", "backward").launch_backward(
        plan, evenly_spaced(x.x), x.weight, bias=x.bias, h0=x.initial_state, bounds=x.bounds,
        dy=dense(grads.y, x.x), dht=contiguous(grads.ht)[0], silu=how.silu, needs_dx="x" in wanted,
        needs_dweight="weight" in wanted, needs_dbias="bias" in wanted, needs_dh0="initial_state" in wanted)
    return {"x": dx, "weight": None if dweight is None else dweight.to(x.weight.dtype).contiguous(),
            "bias": dbias, "initial_state": dh0}


OPERATOR = Operator(
    "conv", Tensors, Scalars, Outputs, 2, family="conv", problem=problem_of,
    on_torch=lambda x, how: torch_path.compute(*x, how.silu), cast=_cast,
    while_tracing=lambda x, how: TracedCall(how.call, V=width_class(x.weight)),
    forward=lambda plan, x, how: kernels("conv", "forward").launch_forward(
        plan, evenly_spaced(x.x), *x[1:], how.silu, how.has_ht, x.x.dtype),
    kept=lambda x, y, how: (x._replace(residual=None), (None, None)), backward=_backward,
    empty=lambda x, how: (
        x.x.new_empty(x.x.shape),
        x.x.new_empty((count_of(x.x, x.bounds), *x.weight.shape)) if how.has_ht else None),
    same=lambda how: {"residual": "y"})
UPDATE = Overwriting(
    "conv_update", Token, Activation, "cache", family="conv_update", problem=_problem_of_update,
    on_torch=_update_on_torch, launch=_update,
    while_tracing=lambda x, how: TracedCall(_call_of_update(x, how), V=width_class(x.weight)),
    empty=lambda x, how: x.x.new_empty(x.x.shape))
