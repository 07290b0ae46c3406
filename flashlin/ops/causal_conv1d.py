"""The short causal convolution with the channels-first interface of the package ``causal_conv1d``.

It runs the kernels of ``flashlin.causal_conv1d``:

    y_t = act(bias + sum_w weight[:, w] x_{t - W + 1 + w})
"""
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin import policy
from flashlin.guards import scalars
from flashlin.guards.plan_types import Plan, Problem
from flashlin.guards.tensors import check_cu_seqlens, check_integers, need_tensor
from flashlin.kernels.mamba.recipe import WINDOW
from flashlin.ops import conv
from flashlin.ops._common.arguments import check_nonempty, check_optional, check_seq_idx, check_written
from flashlin.ops._common.casting import as_planned, contiguous, dtypes_of, strictest, wants_grad
from flashlin.ops._common.entry import entry, without_autocast
from flashlin.ops._common.operator import Overwriting, kernels
from flashlin.ops._common.pipeline import TracedCall, call_of
from flashlin.ops._common.pool import put_back, taken

OP, CONVOLUTION = "mamba_causal_conv1d_update", "causal_conv1d_fn"


@entry
def causal_conv1d_fn(x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None,
                     initial_states: Tensor | None = None, return_final_states: bool = False,
                     final_states_out: Tensor | None = None,
                     activation: str | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Convolve each channel with its own causal filter.

    Drop-in for ``causal_conv1d.causal_conv1d_fn``. It computes

        y_t = act(bias + sum_w weight[:, w] x_{t - W + 1 + w})

    Args:
        x: [b, D, T], bfloat16, float16 or float32 (float64 runs in plain torch), never modified. If its
            channels are contiguous (a transposed [b, T, D] or a slice of one), it is read without a copy.
        weight: [D, W], any float dtype; gets a gradient. Its last column applies to the token itself. Kernels
            run for W up to 16; a larger W runs in plain torch.
        bias: [D], any float dtype, or None; gets a gradient.
        seq_idx: [b, T] integers. A token whose number differs from the previous token's begins a new
            sequence, which does not read earlier tokens. Tokens with negative numbers are padding: their y is
            zero.
        initial_states: [b, D, W - 1], any float dtype: the tokens before the first token, newest last. The
            first sequence of each row reads them. They get a gradient.
        return_final_states: also return the last W - 1 tokens of each row; not allowed with seq_idx.
        final_states_out: [b, D, W - 1], any strides: the output tensor for the final states. It is not
            changed without return_final_states.
        activation: ``silu`` (also called ``swish``) or None.

    Returns:
        y [b, D, T] in the dtype and memory layout of x. With return_final_states it is (y, final states),
        where the states are [b, D, W - 1] in the dtype of x, or final_states_out itself. Gradients, including
        the gradients of the final states, are computed in fp32; repeated runs give bitwise identical results.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    Differences from causal_conv1d: any D, W and strides, seq_idx and states in any layout, and CPU tensors
    work. initial_states work together with seq_idx, as in causal_conv1d since 1.7. A later sequence may reuse
    a number of seq_idx.
    """
    check_nonempty("x", x, "[b, D, T]", (3,), at=1)
    return_final_states = scalars.flag("return_final_states", return_final_states)
    b, D, T = x.shape
    conv.check_filters(x, D, weight, bias)
    silu, W = conv.is_silu(activation), weight.shape[1]
    check_optional("x", x, ((name, states, (b, D, W - 1), "[b, D, W - 1]") for name, states in (
        ("initial_states", initial_states), ("final_states_out", final_states_out))))
    if final_states_out is not None:
        check_written("final_states_out", final_states_out, CONVOLUTION, "written to")
    rows, final = x.transpose(1, 2), None
    if seq_idx is not None:
        check_seq_idx(seq_idx, b, T, x)
        if return_final_states:
            raise ValueError("return_final_states: got True with seq_idx, need one of them: a row of several "
                             "sequences has no one final state")
        y = separated(rows, weight, bias, seq_idx, initial_states, silu)
    else:
        # The states of our kernels have one more slot, which no token reads.
        state = None if initial_states is None else F.pad(initial_states, (1, 0))
        y, final = conv.convolve(CONVOLUTION, conv.Tensors(rows, weight, bias, initial_state=state), silu,
                                 return_final_states)
    y = y.transpose(1, 2)
    y = y.contiguous() if x.is_contiguous() else y
    if final is None:
        return y
    final = final[..., 1:]
    if final_states_out is None:
        return y, final
    final_states_out.copy_(final)
    return y, final_states_out


@entry
def causal_conv1d_update(x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None,
                         activation: str | None = None, cache_seqlens: Tensor | None = None,
                         conv_state_indices: Tensor | None = None) -> Tensor:
    """Convolve the next tokens of each sequence and update its state in place.

    Drop-in for ``causal_conv1d.causal_conv1d_update``. (``flashlin.causal_conv1d_update`` follows fla.)

    Args:
        x: [b, D] or [b, D, T], any strides, never modified.
        conv_state: [b, D, L], L at least W - 1, any float dtype and strides: the last L tokens, newest last.
            It is UPDATED IN PLACE, also if it is a view.
        weight: [D, W], as in ``causal_conv1d_fn``.
        bias: [D] or None, as in ``causal_conv1d_fn``.
        activation: ``silu``, ``swish`` or None.
        cache_seqlens: [b] int32 or int64: the number of earlier tokens of each sequence. With it, conv_state
            is a ring buffer: token t has slot t mod L.
        conv_state_indices: [b] int32 or int64: the row of conv_state for each sequence. With it, conv_state
            may have any number of rows. A sequence whose index is negative or past the end has no state, and
            its y is zero.

    Returns:
        y in the shape and dtype of x.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it. conv_state must not require a
            gradient, because gradients cannot pass through an in-place update. ``causal_conv1d_fn`` with
            initial_states has that gradient.
        UnsupportedError: this machine cannot run the call.

    Differences from causal_conv1d: x, weight and bias get gradients, which are silently missing there. Any D,
    W and dtypes, and CPU tensors work.
    """
    check_nonempty("x", x, "[b, D] or [b, D, T]", (2, 3), at=1)
    conv.check_filters(x, x.shape[1], weight, bias)
    silu = conv.is_silu(activation)
    rows = x if x.ndim == 3 else x.unsqueeze(-1)
    b, D, T = rows.shape
    need_tensor("conv_state", conv_state, (None if conv_state_indices is not None else b, D, None),
                "[b, D, L]", x.device, "x")
    if conv_state.shape[2] < max(weight.shape[1] - 1, 1):
        raise ValueError(f"conv_state: got {conv_state.shape[2]} slots, need at least W - 1 = "
                         f"{weight.shape[1] - 1}, and one")
    check_written("conv_state", conv_state, "causal_conv1d_update",
                  "updated in place. causal_conv1d_fn with initial_states has the gradient")
    for name, given in (("cache_seqlens", cache_seqlens), ("conv_state_indices", conv_state_indices)):
        if given is not None:
            check_integers(name, given, (b,), "[b]", x.device, "x")  # kernels skip values outside of the pool
    tensors = Tensors(rows, conv_state, weight, bias, cache_seqlens, conv_state_indices)
    how = conv.Activation(silu)
    y = _in_parts(tensors, how) if wants_grad(*tensors) else WINDOW_UPDATE.run_planned(tensors, how)
    return y if x.ndim == 3 else y.squeeze(-1)


mamba_causal_conv1d_update = causal_conv1d_update  # the name in flashlin, next to the function of fla


@entry
def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """Return the last tokens of each packed sequence, as the state for ``causal_conv1d_update``.

    Drop-in for ``causal_conv1d.causal_conv1d_varlen.causal_conv1d_varlen_states``.

    Args:
        x: [T, D], any float dtype.
        cu_seqlens: [n + 1] int32 or int64. Sequence i has the rows cu_seqlens[i] to cu_seqlens[i + 1]
            (exclusive).
        state_len: the number of last tokens to keep, from 1 to 2**31 - 1.

    Returns:
        [n, D, state_len] in the dtype of x, newest token last. The state of a shorter sequence starts with
        zeros. x gets a gradient; causal_conv1d has none.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
    """
    check_nonempty("x", x, "[T, D]", (2,))
    L = scalars.integer("state_len", state_len, 1, "an integer of at least 1", scalars.INT32)
    edges = check_cu_seqlens(cu_seqlens, None, x[None].shape, x.device, policy.current().debug, "x").long()
    rows = edges[1:, None] - torch.arange(L, 0, -1, device=x.device)
    inside = rows >= edges[:-1, None]
    padded = F.pad(x, (0, 0, 1, 0))  # row 0 (zeros) represents tokens before a sequence
    return padded[torch.where(inside, rows + 1, 0)].transpose(1, 2)


@without_autocast
def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, silu: bool) -> Tensor:
    """Return the convolution [b, T, D] of x [b, T, D]; the caller has checked all arguments."""
    if seq_idx is not None:
        return separated(x, weight, bias, seq_idx, None, silu)
    return conv.convolve(CONVOLUTION, conv.Tensors(x, weight, bias), silu)[0]


def begins(seq_idx: Tensor, first: bool) -> Tensor:
    """Return a bool mask [b, T] of the tokens whose sequence number differs from the previous token's.

    first: the value for the first token of each row.
    """
    return torch.cat([torch.full_like(seq_idx[:, :1], first, dtype=torch.bool),
                      seq_idx[:, 1:] != seq_idx[:, :-1]], 1)


def separated(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor, state: Tensor | None,
              silu: bool) -> Tensor:
    """Return the convolution [b, T, D] of x [b, T, D] when each row contains several sequences.

    The whole batch becomes one packed row. Counting its sequences would wait for the GPU, so on a GPU and in
    compiled code the table of bounds has one entry per token; unused entries are empty sequences.

    seq_idx: [b, T] sequence numbers.
    state: [b, D, W - 1], the tokens before each row, or None.
    """
    b, T, D = x.shape
    before = 0
    if state is not None and T:  # put the state before the first sequence of each row
        before = state.shape[2]
        x = torch.cat([state.transpose(1, 2).to(x.dtype), x], 1)
        seq_idx = torch.cat([seq_idx[:, :1].expand(-1, before), seq_idx], 1)
    rows = b * (before + T)
    anew = begins(seq_idx, True).flatten()
    place = torch.arange(rows, device=x.device)
    if x.device.type == "cpu" and not torch.compiler.is_compiling():  # counting needs no wait on a CPU
        bounds = F.pad(place[anew], (0, 1), value=rows)
    else:
        slot = torch.where(anew, anew.cumsum(0) - 1, rows)
        bounds = torch.full((rows + 1,), rows, device=x.device).scatter(0, slot,
                                                                        torch.where(anew, place, rows))
    y, _ = conv.convolve(CONVOLUTION, conv.Tensors(conv.evenly_spaced(x).reshape(1, rows, D), weight, bias,
                                                      bounds=bounds), silu)
    y = y.reshape(b, before + T, D)[:, before:]
    return torch.where((seq_idx < 0)[:, before:, None], 0, y)


def _in_parts(given: Tensors, how: conv.Activation) -> Tensor:
    """Compute the update in three steps: read the states from the pool, convolve, and write them back.

    It runs for calls with gradients and on the torch path.
    """
    x, pool, weight, bias, seqlens, indices = given
    (b, _, T), L, W = x.shape, pool.shape[2], weight.shape[1]
    rows = taken(pool, indices)
    # the slot of each token, oldest token first
    slots = torch.arange(L, device=x.device).expand(b, L)
    if seqlens is not None:
        slots = slots + seqlens.long()[:, None]
    slots = (slots % L)[:, None].expand(rows.states.shape)
    ordered = rows.states.gather(2, slots)
    y, _ = conv.convolve(CONVOLUTION, conv.Tensors(x.transpose(1, 2), weight, bias, initial_state=F.pad(
        ordered[..., L - W + 1:], (1, 0))), how.silu)
    states = torch.cat([ordered, x.detach().to(pool.dtype)], 2)[..., T:]
    if seqlens is not None:
        states = rows.states.scatter(2, (slots + T) % L, states)
    return put_back(rows, states, y.transpose(1, 2))


class Tensors(NamedTuple):
    """The tensor arguments of one ``causal_conv1d_update`` call, with x as [b, D, T]."""
    x: Tensor
    state: Tensor
    weight: Tensor
    bias: Tensor | None
    seqlens: Tensor | None
    indices: Tensor | None


def problem_of(given: Tensors, how: conv.Activation) -> Problem:
    """Return the problem of one ``causal_conv1d_update`` call, for planning."""
    (b, D, T), W = given.x.shape, given.weight.shape[1]
    return Problem(OP, WINDOW, "", B=b, T=T, H=1, K=D, V=W, N=b, dtype=strictest(dtypes_of(given)))


def _update(plan: Plan, given: Tensors, how: conv.Activation) -> Tensor:
    x, state, *others = as_planned(given, plan.problem.dot)
    y: Tensor = kernels("mamba", "forward").convolve(plan, x, state, *contiguous(*others), how.silu, x.dtype)
    if state is not given.state:
        given.state.copy_(state)
    return y.to(given.x.dtype)


WINDOW_UPDATE = Overwriting(
    "conv_window", Tensors, conv.Activation, "state", family=WINDOW, problem=problem_of, on_torch=_in_parts,
    while_tracing=lambda x, how: TracedCall(call_of(OP, dtypes_of(x)), V=conv.width_class(x.weight)),
    launch=_update, empty=lambda x, how: x.x.new_empty(x.x.shape))
