"""Kernels for the decoding steps of a Mamba layer. States have any strides and are updated in place.

The state update, for each sequence and head with state h [P, N]:

    h = e^{dt A} h + dt x B^T
    y = (h C + D x) silu(z)

The convolution, for each sequence and channel, where the state contains x before t = 0:

    y_t = act(b + sum_w W_w x_{t - W + 1 + w})

The time of a state update is the time to read and write the state once. A program has BP rows of the state,
so other tensors are read at most P / BP times.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashlin.compat.launch import start_planned
from flashlin.guards.plan_types import Plan
from flashlin.kernels.batch import strides
from flashlin.kernels.recurrent.forward import softplus


@triton.jit
def spread(t, BD: tl.constexpr):
    """Return the scalar t as an int32 vector [BD].

    A comparison of this vector with a scalar gives a mask. In the interpreter of Triton 3.9, a comparison of
    two scalars gives none.
    """
    return tl.zeros([BD], dtype=tl.int32) + t


@triton.jit(do_not_specialize=["pool"])
def state_update(
    state,  # [pool, H, P, N]
    x, dt,  # [n, H, P]
    dt_bias,  # [H, P] or None
    A,  # [H, P, N]
    B, C,  # [n, H // heads, N]
    D,  # [H, P] or None
    z,  # [n, H, P] or None
    y,  # [n, H, P]
    indices,  # [n] or None
    pool,  # number of states
    H,
    heads,  # heads in a group that shares B and C
    state_n, state_h, state_p, state_s,  # strides between states, heads, rows and columns
    x_n,  # stride between sequences of x
    dt_n, dt_h, dt_p,  # strides of dt between sequences, heads and rows
    bias_h, bias_p,  # strides of dt_bias between heads and rows
    A_h, A_p, A_s,  # strides of A between heads, rows and columns
    B_n, C_n,  # strides between sequences of B and of C
    D_h, D_p,  # strides of D between heads and rows
    z_n,  # stride between sequences of z
    P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, SOFTPLUS: tl.constexpr,
    TIED: tl.constexpr,
):
    """Update the states by one token, in place, and write y [n, H, P].

    TIED: each head has a single dt and A. indices: [n], the state of each sequence. A sequence whose index is
    outside the pool is skipped, and its y is zero. One program computes BP rows of the state of one head.
    """
    STRIPS: tl.constexpr = (P + BP - 1) // BP
    program = tl.program_id(0)
    n = (program // STRIPS // H).to(tl.int64)
    i_h = program // STRIPS % H
    rows = program % STRIPS * BP + tl.arange(0, BP)
    columns = tl.arange(0, BN)
    inside = rows < P
    there = columns < N
    slot = n
    known = inside
    if indices is not None:
        slot = tl.load(indices + n).to(tl.int64)
        known = inside & (spread(slot, BP) >= 0) & (spread(slot, BP) < pool)
    whole = known[:, None] & there[None, :]
    places = state + slot * state_n + i_h.to(tl.int64) * state_h + (rows.to(tl.int64)[:, None] * state_p
                                                                    + columns.to(tl.int64)[None, :] * state_s)
    h = tl.load(places, mask=whole, other=0.0).to(tl.float32)
    b_x = tl.load(x + n * x_n + (i_h * P + rows), mask=inside, other=0.0).to(tl.float32)
    group = i_h // heads * N
    b_B = tl.load(B + n * B_n + (group + columns), mask=there, other=0.0).to(tl.float32)
    b_C = tl.load(C + n * C_n + (group + columns), mask=there, other=0.0).to(tl.float32)
    if TIED:
        rate = tl.load(dt + n * dt_n + i_h * dt_h).to(tl.float32)
        if dt_bias is not None:
            rate += tl.load(dt_bias + i_h * bias_h).to(tl.float32)
        if SOFTPLUS:
            rate = softplus(rate)
        h *= tl.exp(rate * tl.load(A + i_h * A_h).to(tl.float32))
    else:
        rate = tl.load(dt + n * dt_n + (i_h * dt_h + rows * dt_p), mask=inside, other=0.0).to(tl.float32)
        if dt_bias is not None:
            rate += tl.load(dt_bias + (i_h * bias_h + rows * bias_p), mask=inside, other=0.0).to(tl.float32)
        if SOFTPLUS:
            rate = softplus(rate)
        b_A = tl.load(A + (i_h * A_h + rows[:, None] * A_p + columns[None, :] * A_s),
                      mask=inside[:, None] & there[None, :], other=0.0)
        h *= tl.exp(rate[:, None] * b_A.to(tl.float32))
    h += (rate * b_x)[:, None] * b_B[None, :]
    tl.store(places, h.to(state.dtype.element_ty), mask=whole)
    b_y = tl.sum(h * b_C[None, :], 1)
    if D is not None:
        b_y += b_x * tl.load(D + (i_h * D_h + rows * D_p), mask=inside, other=0.0).to(tl.float32)
    if z is not None:
        b_z = tl.load(z + n * z_n + (i_h * P + rows), mask=inside, other=0.0).to(tl.float32)
        b_y *= b_z * tl.sigmoid(b_z)
    if indices is not None:
        b_y = tl.where(known, b_y, 0.0)
    tl.store(y + n * (H * P) + (i_h * P + rows), b_y.to(y.dtype.element_ty), mask=inside)


@triton.jit
def column_of(x, channels, known, along_d, along_t, t, BD: tl.constexpr):
    """Load element t of each channel as [BD] in float32, with zeros where ``known`` is false."""
    return tl.load(x + t * along_t + channels * along_d, mask=known, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["T", "pool"])
def conv_window(
    x,  # [n, D, T]
    weight,  # [D, W]
    bias,  # [D] or None
    state,  # [pool, D, L]
    y,  # [n, D, T]
    seqlens, indices,  # [n] or None
    T,  # tokens of each sequence
    pool,  # number of states
    x_n, x_d, x_t,  # strides of x between sequences, channels and tokens
    state_n, state_d, state_l,  # strides between states, and of a state between channels and tokens
    D: tl.constexpr, W: tl.constexpr, L: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr,
):
    """Convolve T new tokens, write y [n, D, T], and update the windows in state [pool, D, L] in place.

    A window has the last L tokens of a sequence, with the newest one last. With seqlens [n] it is a ring
    buffer, and new token t goes to position (seqlens + t) mod L. One program computes BD channels of one
    sequence.
    """
    STRIPS: tl.constexpr = (D + BD - 1) // BD
    n = (tl.program_id(0) // STRIPS).to(tl.int64)
    channels = (tl.program_id(0) % STRIPS * BD + tl.arange(0, BD)).to(tl.int64)
    inside = channels < D
    slot = n
    known = inside
    if indices is not None:
        slot = tl.load(indices + n).to(tl.int64)
        known = inside & (spread(slot, BD) >= 0) & (spread(slot, BD) < pool)
    x += n * x_n
    y += n * T * D
    state += slot * state_n
    oldest = 0  # position in the window of the token that is L tokens before the first new one
    if seqlens is not None:
        oldest = (tl.load(seqlens + n) % L).to(tl.int32)
        oldest = (oldest + L) % L
    for t in range(T):
        value = tl.zeros([BD], dtype=tl.float32)
        if bias is not None:
            value += tl.load(bias + channels, mask=inside, other=0.0).to(tl.float32)
        for w in tl.static_range(W):
            at = t - (W - 1 - w)
            past = (oldest + L + at) % L
            seen = column_of(x, channels, known & (spread(at, BD) >= 0), x_d, x_t, at, BD)
            seen += column_of(state, channels, known & (spread(at, BD) < 0), state_d, state_l, past, BD)
            value += seen * tl.load(weight + channels * W + w, mask=inside, other=0.0).to(tl.float32)
        if SILU:
            value *= tl.sigmoid(value)
        tl.store(y + channels * T + t, tl.where(known, value, 0.0).to(y.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # other threads may still read values that the next loop overwrites
    if seqlens is not None:
        for t in range(tl.maximum(T - L, 0), T):
            kept = column_of(x, channels, known, x_d, x_t, t, BD)
            tl.store(state + (oldest + t) % L * state_l + channels * state_d, kept.to(state.dtype.element_ty),
                     mask=known)
    else:
        # each thread has its own channels, and writes positions before the ones that it still reads
        for to in range(L):
            at = to + T - L
            kept = column_of(x, channels, known & (spread(at, BD) >= 0), x_d, x_t, at, BD)
            kept += column_of(state, channels, known & (spread(at, BD) < 0), state_d, state_l, to + T, BD)
            tl.store(state + to * state_l + channels * state_d, kept.to(state.dtype.element_ty), mask=known)


def update(plan: Plan, state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
           D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None, indices: Tensor | None, softplus: bool,
           dtype: torch.dtype) -> Tensor:
    """Update state [S, H, P, N] by one token, in place; return y [n, H, P] in ``dtype``.

    x, z: [n, H, P]. B, C: [n, G, N]. These four are contiguous except for the stride of the first dimension.
    dt: [n, H, P]. A: [H, P, N]. D, dt_bias: [H, P]. These may have any strides, including 0. indices: [n],
    the state of each sequence; None for the first n states. All tensors may have any dtype.
    """
    n, H, P = x.shape
    y = torch.empty((n, H, P), dtype=dtype, device=x.device)
    if y.numel():
        tied = 0 == A.stride(1) == A.stride(2) == dt.stride(2) and (dt_bias is None or dt_bias.stride(1) == 0)
        start_planned(plan, state_update, dict(
            state=state, x=x, dt=dt, dt_bias=dt_bias, A=A, B=B, C=C, D=D, z=z, y=y, indices=indices,
            pool=state.shape[0], H=H, heads=H // B.shape[1],
            **strides(state, "state_n", "state_h", "state_p", "state_s"), **strides(x, "x_n"),
            **strides(dt, "dt_n", "dt_h", "dt_p"), **strides(dt_bias, "bias_h", "bias_p"),
            **strides(A, "A_h", "A_p", "A_s"), **strides(B, "B_n"), **strides(C, "C_n"),
            **strides(D, "D_h", "D_p"), **strides(z, "z_n"),
            P=P, N=A.shape[2], SOFTPLUS=softplus, TIED=tied))
    return y


def convolve(plan: Plan, x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None,
             seqlens: Tensor | None, indices: Tensor | None, silu: bool, dtype: torch.dtype) -> Tensor:
    """Convolve x [n, D, T] with the windows in state [S, D, L]; return y [n, D, T] in ``dtype``.

    It updates state in place with the new tokens. x and state may have any strides; the other tensors are
    contiguous: weight [D, W], bias [D], seqlens and indices [n].
    """
    n, D, T = x.shape
    y = torch.empty((n, D, T), dtype=dtype, device=x.device)
    if y.numel():
        start_planned(plan, conv_window, dict(
            x=x, weight=weight, bias=bias, state=state, y=y, seqlens=seqlens, indices=indices,
            T=T, pool=state.shape[0],
            **strides(x, "x_n", "x_d", "x_t"), **strides(state, "state_n", "state_d", "state_l"),
            D=D, W=weight.shape[1], L=state.shape[2], SILU=silu))
    return y
