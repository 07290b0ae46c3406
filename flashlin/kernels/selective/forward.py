"""Forward kernel of Mamba's selective scan, and helpers that the backward shares.

For each channel, with a state h of N elements:

    h_t = e^{step_t A} h_{t-1} + step_t u_t B_t
    y_t = (h_t . C_t + D u_t) silu(z_t)

One program computes a strip of channels. It walks over the tokens in tiles of 8, with the states [BN, BD] in
registers, and loads the next tile while it computes. Values per token and channel, such as steps and gates,
are computed for a whole tile, each element in one thread. Then the columns of the tile move to the layout of
the states, four at a time. Nothing is divided by a decay.
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
    """Return the position of this program and the channels and states of its strip.

    The results are the index of the strip, the group, the row of the batch, the channels [BD] and their
    mask, and the states [BN] and their mask. The masks are True for channels and states that exist.
    """
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
    """Load x in fp32, with zeros where the mask ``known`` is False."""
    return tl.load(x, mask=known, other=0.0).to(tl.float32)


@triton.jit
def of_poles(A, whole):
    """Load A and return A log2(e); a step then decays the state by 2^(step A log2(e)).

    Values below -3e38 are raised to that finite number. Steps after the last token are 0, and 0 times -inf
    would be NaN.

    A: pointers to the elements.
    whole: mask of the elements that exist.
    """
    rates = loaded(A, whole) * LOG2_E
    return tl.where(rates < -3e38, -3e38, rates)


@triton.jit
def per_channel(x, d, here, BD: tl.constexpr):
    """Load the elements d of a vector x as [BD] in fp32; zeros where ``here`` is False, or if x is None."""
    values = tl.zeros([BD], dtype=tl.float32)
    if x is not None:
        values = loaded(x + d, here)
    return values


@triton.jit
def pairs(x, ROWS: tl.constexpr):
    """Return the 4 columns of x [ROWS, 4], each [ROWS]."""
    even, odd = tl.split(tl.reshape(x, [ROWS, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def columns(x, ROWS: tl.constexpr):
    """Return the 8 columns of x [ROWS, 8], each [ROWS]."""
    even, odd = tl.split(tl.reshape(x, [ROWS, 4, 2]))
    x0, x2, x4, x6 = pairs(even, ROWS)
    x1, x3, x5, x7 = pairs(odd, ROWS)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def four(x0, x1, x2, x3, ROWS: tl.constexpr):
    """Return the tile [ROWS, 4] with these columns."""
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), [ROWS, 4])


@triton.jit
def eight(x0, x1, x2, x3, x4, x5, x6, x7, ROWS: tl.constexpr):
    """Return the tile [ROWS, 8] with these columns."""
    even, odd = four(x0, x2, x4, x6, ROWS), four(x1, x3, x5, x7, ROWS)
    return tl.reshape(tl.join(even, odd), [ROWS, 8])


@triton.jit
def tile(x, t, here, T, x_t, TOGETHER: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
         TOKENS: tl.constexpr):
    """Load a tile [ROWS, TOKENS] of 4 or 8 tokens from token t, with zeros after the last token.

    x: pointers to the rows [ROWS]. The tile has their dtype.
    here: mask of the rows that exist.
    x_t: stride of the tokens.
    TOGETHER: True if x_t is 1. Then a thread loads a whole row at once. Otherwise tokens are loaded one by
        one, each from rows that are adjacent in memory. In both cases each thread has rows of its own, so
        values that depend on a row are computed once.
    WHOLE: True if T is a multiple of TOKENS.
    """
    if TOGETHER:
        values = tl.load(x[:, None] + t + tl.arange(0, TOKENS)[None, :],
                         mask=inside(t, here, T, WHOLE, TOKENS), other=0.0)
    else:
        ODD: tl.constexpr = 0 if WHOLE else 1  # if WHOLE, all masks are that of the first token
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
    """Return the mask [rows, TOKENS] of elements that exist in the tile that begins at token t.

    With WHOLE, either all tokens of a tile exist or none. The mask then depends on the row alone, so that a
    row is loaded at once.

    here: mask of the rows that exist.
    """
    known = (here & (t < T))[:, None]
    if not WHOLE:
        known = here[:, None] & (t + tl.arange(0, TOKENS) < T)[None, :]
    return known


@triton.jit
def states_tile(x, t, there, T, x_t, WHOLE: tl.constexpr, TOKENS: tl.constexpr):
    """Load a tile [BN, TOKENS] of B or C from token t, with zeros after the last token.

    x: pointers to the states [BN].
    there: mask of the states that exist.
    x_t: stride of the tokens.
    WHOLE: True if T is a multiple of TOKENS.
    """
    at = t + tl.arange(0, TOKENS)
    return tl.load(x[:, None] + at.to(tl.int64)[None, :] * x_t, mask=inside(t, there, T, WHOLE, TOKENS),
                   other=0.0)


@triton.jit
def put(x, t, values, here, T, x_t, TOGETHER: tl.constexpr, WHOLE: tl.constexpr, TOKENS: tl.constexpr):
    """Store a tile [rows, TOKENS] at token t; the inverse of ``tile``, with the same parameters."""
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
    """Return the state after one token, [BN, BD], and its product with C, summed over the states, [BD].

    h: the state before the token, [BN, BD].
    rates: A log2(e), [BN, BD].
    step, x: the step and the step times u, [BD].
    B, C: [BN].
    """
    h = tl.exp2(step[None, :] * rates) * h + x[None, :] * B[:, None]
    return h, tl.sum(h * C[:, None], 0)


@triton.jit
def steps(x, bias, t, T, SOFTPLUS: tl.constexpr, WHOLE: tl.constexpr, TOKENS: tl.constexpr):
    """Return delta plus bias and the steps, each [BD, TOKENS] in fp32.

    Steps after the last token are 0, which does not change a state.

    x: a tile of delta, [BD, TOKENS].
    bias: [BD].
    t: first token of the tile.
    SOFTPLUS: whether a step is softplus(delta + bias).
    """
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
    u_b, u_d, u_t, s_b, s_d, s_t,  # strides of u and of delta between batch rows, channels and tokens
    B_b, B_g, B_n, B_t, C_b, C_g, C_n, C_t,  # of B and of C between batch rows, groups, states and tokens
    z_b, z_d, z_t, y_b, y_d, y_t,  # of z and of y between batch rows, channels and tokens
    D: tl.constexpr, N: tl.constexpr, W: tl.constexpr, G: tl.constexpr, U_TOGETHER: tl.constexpr,
    S_TOGETHER: tl.constexpr, Z_TOGETHER: tl.constexpr, Y_TOGETHER: tl.constexpr, WHOLE: tl.constexpr,
    SEGMENT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, SOFTPLUS: tl.constexpr,
):
    """Compute y and, if requested, the states at the starts of the segments and the last state.

    One program computes a strip of BD channels of one row of the batch, with all their states. Segments are
    SEGMENT tokens long; the backward starts each segment from its state.

    W: columns of the states in memory, at least N.
    *_TOGETHER: whether the tokens of a tensor are contiguous.
    WHOLE: whether T is a multiple of 8.
    """
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
                # W may exceed N, so the padding columns are stored as well.
                tl.store(states, h, mask=(n < W)[:, None] & here[None, :])
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


def launch_forward(plan: Plan, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
                   z: Tensor | None, bias: Tensor | None,
                   softplus: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return y [b, D, T], the last state [b, D, N] in fp32, and the states that the backward needs or None.

    y has the strides of u.

    u, delta, z: [b, D, T] with any strides.
    A: [D, N], contiguous.
    B, C: [b, G, N, T] with any strides.
    D, bias: [D], contiguous.
    softplus: whether the step sizes are softplus(delta + bias).
    """
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


def arguments(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, like_y: Tensor, D: Tensor | None,
              z: Tensor | None, bias: Tensor | None, *, softplus: bool) -> dict[str, Any]:
    """Return the arguments that the forward and the backward kernel share, except for the tile.

    like_y: y or dy, from which only the strides are read.
    """
    return dict(u=u, delta=delta, A=wide(A), B=B, C=C, skip=D, z=z, bias=bias, T=u.shape[2],
                **strides(u, "u_b", "u_d", "u_t"), **strides(delta, "s_b", "s_d", "s_t"),
                **strides(B, "B_b", "B_g", "B_n", "B_t"), **strides(C, "C_b", "C_g", "C_n", "C_t"),
                **strides(z, "z_b", "z_d", "z_t"), **strides(like_y, "y_b", "y_d", "y_t"),
                U_TOGETHER=together(u), S_TOGETHER=together(delta), Z_TOGETHER=together(z),
                Y_TOGETHER=together(like_y), D=A.shape[0], N=A.shape[1], W=columns_of(A.shape[1]),
                G=B.shape[1], WHOLE=u.shape[2] % 8 == 0, SEGMENT=SEGMENT, SOFTPLUS=softplus)


def wide(x: Tensor) -> Tensor:
    """Return x [..., N] padded with zeros to the columns that states have in memory."""
    lacking = columns_of(x.shape[-1]) - x.shape[-1]
    return F.pad(x, (0, lacking)) if lacking else x


def together(x: Tensor | None) -> bool:
    """Return True if a tile of x [b, D, T] can be loaded row by row, with contiguous tokens.

    The strides between rows must be multiples of 16 elements. Only then Triton knows that each row begins at
    a multiple of 16 bytes. Otherwise a tile would be loaded by other threads than those that compute with it.
    """
    return x is not None and x.stride(2) == 1 and not (x.stride(0) % 16 or x.stride(1) % 16)
