"""Mamba's selective scan, forward, and what both directions share. Tensors in, tensors out.

    h_t = e^{step_t A} h_{t-1} + step_t u_t B_t        y_t = (h_t . C_t + D u_t) silu(z_t)
for each channel, h [N]. A program owns a strip of channels and walks the tokens with their states [BN, BD] in
registers, in tiles of tokens, while the next tile is being loaded. What is computed of tokens and channels
(steps, gates) is computed for a tile, each element in one thread; then the columns of the tile go to where
the states are, four by four in a thread. Nothing is divided by a decay.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from flashlin.compat.launch import start_planned
from flashlin.guards.plan_types import Plan
from flashlin.kernels.batch import strides
from flashlin.kernels.recurrent.forward import softplus
from flashlin.kernels.selective.recipe import SEGMENT, columns_of, kept
from flashlin.kernels.tile_ops import LOG2_E


@triton.jit
def place(D: tl.constexpr, N: tl.constexpr, G: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    """(strip, group, row of the batch; channels [BD], which of them exist; states [BN], which of them exist)
    of this program."""
    STRIPS: tl.constexpr = (D // G + BD - 1) // BD
    program = tl.program_id(0)
    strip = program % STRIPS
    g = program // STRIPS % G
    own = strip * BD + tl.arange(0, BD)
    n = tl.arange(0, BN)
    return strip, g, (program // STRIPS // G).to(tl.int64), (g * (D // G)
                                                             + own).to(tl.int64), own < D // G, n, n < N


@triton.jit
def loaded(x, known):
    return tl.load(x, mask=known, other=0.0).to(tl.float32)


@triton.jit
def of_poles(A, whole):
    """A log2(e), of which e^{step A} is made; -inf is a large number, since past the end steps are 0."""
    rates = loaded(A, whole) * LOG2_E
    return tl.where(rates < -3e38, -3e38, rates)


@triton.jit
def per_channel(x, d, here, BD: tl.constexpr):
    """[BD] of x in fp32, zeros where there is no x."""
    values = tl.zeros([BD], dtype=tl.float32)
    if x is not None:
        values = loaded(x + d, here)
    return values


@triton.jit
def pairs(x, ROWS: tl.constexpr):
    """The 4 columns of x [ROWS, 4]."""
    even, odd = tl.split(tl.reshape(x, [ROWS, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def columns(x, ROWS: tl.constexpr):
    """The 8 columns of x [ROWS, 8]."""
    even, odd = tl.split(tl.reshape(x, [ROWS, 4, 2]))
    x0, x2, x4, x6 = pairs(even, ROWS)
    x1, x3, x5, x7 = pairs(odd, ROWS)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def four(x0, x1, x2, x3, ROWS: tl.constexpr):
    """[ROWS, 4] of these columns."""
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), [ROWS, 4])


@triton.jit
def eight(x0, x1, x2, x3, x4, x5, x6, x7, ROWS: tl.constexpr):
    """[ROWS, 8] of these columns."""
    even, odd = four(x0, x2, x4, x6, ROWS), four(x1, x3, x5, x7, ROWS)
    return tl.reshape(tl.join(even, odd), [ROWS, 8])


@triton.jit
def tile(x, t, here, T, x_t, TOGETHER: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
         TOKENS: tl.constexpr):
    """[ROWS, TOKENS], 4 or 8, from token t on, in x's dtype; zeros past the last token. x: places of the
    rows; here: which of them there are; x_t: stride of tokens, 1 where they are TOGETHER. Then a thread loads
    a row at once; else tokens are loaded one by one, each of them from rows that lie side by side. Both
    ways a thread has rows of its own, so that what is computed of them is computed once. WHOLE: T is a
    multiple of TOKENS."""
    if TOGETHER:
        values = tl.load(x[:, None] + t + tl.arange(0, TOKENS)[None, :],
                         mask=inside(t, here, T, WHOLE, TOKENS), other=0.0)
    else:
        ODD: tl.constexpr = 0 if WHOLE else 1  # all tokens of a tile exist, or none
        step = tl.cast(x_t, tl.int64)
        x += t * step
        x0 = tl.load(x, mask=here & (t < T), other=0.0)
        x1 = tl.load(x + step, mask=here & (t + ODD < T), other=0.0)
        x2 = tl.load(x + 2 * step, mask=here & (t + 2 * ODD < T), other=0.0)
        x3 = tl.load(x + 3 * step, mask=here & (t + 3 * ODD < T), other=0.0)
        if TOKENS == 4:
            values = four(x0, x1, x2, x3, ROWS)
        else:
            x4 = tl.load(x + 4 * step, mask=here & (t + 4 * ODD < T), other=0.0)
            x5 = tl.load(x + 5 * step, mask=here & (t + 5 * ODD < T), other=0.0)
            x6 = tl.load(x + 6 * step, mask=here & (t + 6 * ODD < T), other=0.0)
            x7 = tl.load(x + 7 * step, mask=here & (t + 7 * ODD < T), other=0.0)
            values = eight(x0, x1, x2, x3, x4, x5, x6, x7, ROWS)
    return values


@triton.jit
def inside(t, here, T, WHOLE: tl.constexpr, TOKENS: tl.constexpr):
    """[rows, TOKENS]: which elements there are. Of WHOLE tiles a row is all there or not at all, so that it
    is loaded at once."""
    known = (here & (t < T))[:, None]
    if not WHOLE:
        known = here[:, None] & (t + tl.arange(0, TOKENS) < T)[None, :]
    return known


@triton.jit
def states_tile(x, t, there, T, x_t, WHOLE: tl.constexpr, TOKENS: tl.constexpr):
    """[states, TOKENS] of B or C, as tile."""
    at = t + tl.arange(0, TOKENS)
    return tl.load(x[:, None] + at.to(tl.int64)[None, :] * x_t, mask=inside(t, there, T, WHOLE, TOKENS),
                   other=0.0)


@triton.jit
def put(x, t, values, here, T, x_t, TOGETHER: tl.constexpr, WHOLE: tl.constexpr, TOKENS: tl.constexpr):
    """Store what tile would load."""
    values = values.to(x.dtype.element_ty)
    ROWS: tl.constexpr = values.shape[0]
    if TOGETHER:
        tl.store(x[:, None] + t + tl.arange(0, TOKENS)[None, :], values,
                 mask=inside(t, here, T, WHOLE, TOKENS))
    else:
        ODD: tl.constexpr = 0 if WHOLE else 1
        step = tl.cast(x_t, tl.int64)
        x += t * step
        if TOKENS == 4:
            x0, x1, x2, x3 = pairs(values, ROWS)
        else:
            x0, x1, x2, x3, x4, x5, x6, x7 = columns(values, ROWS)
        tl.store(x, x0, mask=here & (t < T))
        tl.store(x + step, x1, mask=here & (t + ODD < T))
        tl.store(x + 2 * step, x2, mask=here & (t + 2 * ODD < T))
        tl.store(x + 3 * step, x3, mask=here & (t + 3 * ODD < T))
        if TOKENS == 8:
            tl.store(x + 4 * step, x4, mask=here & (t + 4 * ODD < T))
            tl.store(x + 5 * step, x5, mask=here & (t + 5 * ODD < T))
            tl.store(x + 6 * step, x6, mask=here & (t + 6 * ODD < T))
            tl.store(x + 7 * step, x7, mask=here & (t + 7 * ODD < T))


@triton.jit
def after(h, rates, step, x, B, C):
    """(the state after a token, what C reads of it)."""
    h = tl.exp2(step[None, :] * rates) * h + x[None, :] * B[:, None]
    return h, tl.sum(h * C[:, None], 0)


@triton.jit
def steps(x, bias, t, T, SOFTPLUS: tl.constexpr, WHOLE: tl.constexpr, TOKENS: tl.constexpr):
    """(raw steps plus bias, steps), each [BD, TOKENS], of what is read from delta; past the last token steps
    are 0, which leaves a state as it is."""
    raw = x.to(tl.float32) + bias[:, None]
    step = raw
    if SOFTPLUS:
        step = softplus(raw)
    if not WHOLE:
        step = tl.where((t + tl.arange(0, TOKENS) < T)[None, :], step, 0.0)
    return raw, step


@triton.jit(do_not_specialize=["T", "u_t", "s_t", "z_t", "y_t"])
def selective_forward(
    u, delta,  # [b, D, T]
    A,  # [D, W]
    B, C,  # [b, G, N, T]
    skip,  # [D] or None
    z,  # [b, D, T] or None
    bias,  # [D] or None
    y,  # [b, D, T]
    states,  # [b, kept, D, W], fp32, or None
    last,  # [b, D, N], fp32, or None
    T,  # tokens
    u_b,  # strides of u: by row
    u_d,  # by channel
    u_t,  # by token
    s_b,  # of delta: by row
    s_d,  # by channel
    s_t,  # by token
    B_b,  # of B: by row
    B_g,  # by group
    B_n,  # by state
    B_t,  # by token
    C_b,  # of C: by row
    C_g,  # by group
    C_n,  # by state
    C_t,  # by token
    z_b,  # of z: by row
    z_d,  # by channel
    z_t,  # by token
    y_b,  # of y: by row
    y_d,  # by channel
    y_t,  # by token
    D: tl.constexpr, N: tl.constexpr, W: tl.constexpr, G: tl.constexpr, U_TOGETHER: tl.constexpr,
    S_TOGETHER: tl.constexpr, Z_TOGETHER: tl.constexpr, Y_TOGETHER: tl.constexpr, WHOLE: tl.constexpr,
    SEGMENT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, SOFTPLUS: tl.constexpr,
):
    """y, and states [b, kept, D, W] and last [b, D, N] in fp32 where they are wanted. A program: a strip of
    BD channels of a row of the batch, with all their states."""
    strip, g, b, d, here, n, there = place(D, N, G, BN, BD)
    whole = there[:, None] & here[None, :]
    state = d[None, :] * W + n[:, None]
    rates = of_poles(A + state, whole)
    b_bias = per_channel(bias, d, here, BD)
    b_skip = per_channel(skip, d, here, BD)
    u += b * u_b + d * u_d
    delta += b * s_b + d * s_d
    B += b * B_b + g.to(tl.int64) * B_g + n * B_n
    C += b * C_b + g.to(tl.int64) * C_g + n * C_n
    y += b * y_b + d * y_d
    if z is not None:
        z += b * z_b + d * z_d
    if states is not None:
        states += b * ((T - 1) // SEGMENT) * (D * W) + state
    h = tl.zeros([BN, BD], dtype=tl.float32)
    next_u = tile(u, 0, here, T, u_t, U_TOGETHER, WHOLE, BD, 8)
    next_s = tile(delta, 0, here, T, s_t, S_TOGETHER, WHOLE, BD, 8)
    next_z = next_u
    if z is not None:
        next_z = tile(z, 0, here, T, z_t, Z_TOGETHER, WHOLE, BD, 8)
    next_B, next_C = states_tile(B, 0, there, T, B_t, WHOLE, 8), states_tile(C, 0, there, T, C_t, WHOLE, 8)
    for t in range(0, T, 8):
        if states is not None:
            if (t > 0) & (t % SEGMENT == 0):
                tl.store(states, h, mask=(n < W)[:, None] & here[None, :])  # its last columns, too
                states += D * W
        b_u, b_z = next_u.to(tl.float32), next_z.to(tl.float32)
        b_B, b_C = next_B.to(tl.float32), next_C.to(tl.float32)
        _, step = steps(next_s, b_bias, t, T, SOFTPLUS, WHOLE, 8)
        next_u = tile(u, t + 8, here, T, u_t, U_TOGETHER, WHOLE, BD, 8)
        next_s = tile(delta, t + 8, here, T, s_t, S_TOGETHER, WHOLE, BD, 8)
        if z is not None:
            next_z = tile(z, t + 8, here, T, z_t, Z_TOGETHER, WHOLE, BD, 8)
        next_B = states_tile(B, t + 8, there, T, B_t, WHOLE, 8)
        next_C = states_tile(C, t + 8, there, T, C_t, WHOLE, 8)
        s0, s1, s2, s3, s4, s5, s6, s7 = columns(step, BD)
        x0, x1, x2, x3, x4, x5, x6, x7 = columns(step * b_u, BD)
        B0, B1, B2, B3, B4, B5, B6, B7 = columns(b_B, BN)
        C0, C1, C2, C3, C4, C5, C6, C7 = columns(b_C, BN)
        h, y0 = after(h, rates, s0, x0, B0, C0)
        h, y1 = after(h, rates, s1, x1, B1, C1)
        h, y2 = after(h, rates, s2, x2, B2, C2)
        h, y3 = after(h, rates, s3, x3, B3, C3)
        h, y4 = after(h, rates, s4, x4, B4, C4)
        h, y5 = after(h, rates, s5, x5, B5, C5)
        h, y6 = after(h, rates, s6, x6, B6, C6)
        h, y7 = after(h, rates, s7, x7, B7, C7)
        b_y = eight(y0, y1, y2, y3, y4, y5, y6, y7, BD) + b_skip[:, None] * b_u
        if z is not None:
            b_y *= b_z * tl.sigmoid(b_z)
        put(y, t, b_y, here, T, y_t, Y_TOGETHER, WHOLE, 8)
    if last is not None:
        tl.store(last + (b * D + d[None, :]) * N + n[:, None], h, mask=whole)


def launch_forward(
    plan: Plan,
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None, z: Tensor | None, bias: Tensor | None,
    softplus: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(y [b, D, T] like u, the last state [b, D, N] in fp32, the states that backward starts its segments
    from or None).

    u, delta, z [b, D, T] and B, C [b, G, N, T], of any strides; A [D, N], D, bias [D], contiguous. y lies as
    u does."""
    b, channels, T = u.shape
    N = A.shape[1]
    y, last = torch.empty_like(u), u.new_empty(b, channels, N, dtype=torch.float32)
    needs_grad = len(plan.launches) > 1
    states = u.new_empty(b, kept(T), channels, columns_of(N), dtype=torch.float32) if needs_grad else None
    if T == 0:
        return y, last.zero_(), states
    if last.numel():
        start_planned(plan, selective_forward, dict(
            arguments(u, delta, A, B, C, y, D, z, bias, softplus=softplus),
            y=y, states=states, last=last))
    return y, last, states


def arguments(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, like_y: Tensor,
    D: Tensor | None, z: Tensor | None, bias: Tensor | None,
    *,
    softplus: bool,
) -> dict[str, Any]:
    """What the kernels of both directions take, besides the tile. like_y: y or dy, of which only the strides
    are taken here."""
    return dict(
        u=u, delta=delta, A=wide(A), B=B, C=C, skip=D, z=z, bias=bias, T=u.shape[2],
        **strides(u, "u_b", "u_d", "u_t"), **strides(delta, "s_b", "s_d", "s_t"),
        **strides(B, "B_b", "B_g", "B_n", "B_t"), **strides(C, "C_b", "C_g", "C_n", "C_t"),
        **strides(z, "z_b", "z_d", "z_t"), **strides(like_y, "y_b", "y_d", "y_t"),
        U_TOGETHER=together(u), S_TOGETHER=together(delta), Z_TOGETHER=together(z),
        Y_TOGETHER=together(like_y), D=A.shape[0], N=A.shape[1], W=columns_of(A.shape[1]), G=B.shape[1],
        WHOLE=u.shape[2] % 8 == 0, SEGMENT=SEGMENT, SOFTPLUS=softplus)


def wide(x: Tensor) -> Tensor:
    """x [..., N] with zeros up to the columns that states have."""
    lacking = columns_of(x.shape[-1]) - x.shape[-1]
    return F.pad(x, (0, lacking)) if lacking else x


def together(x: Tensor | None) -> bool:
    """Whether tokens lie side by side in x [b, D, T], in rows that Triton sees to begin at multiples of 16
    bytes; else threads that load a tile would be given other rows than those that compute."""
    return x is not None and x.stride(2) == 1 and not (x.stride(0) % 16 or x.stride(1) % 16)
