"""Mamba's selective scan, forward, and what both directions share. Tensors in, tensors out.

    h_t = e^{step_t A} h_{t-1} + step_t u_t B_t        y_t = (h_t . C_t + D u_t) silu(z_t)
for each channel, h [N]. A program owns a strip of channels and walks the tokens with their states [BN, BD] in
registers, while the next three tokens are being loaded. Nothing is divided by a decay.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashlin.compat.launch import start
from flashlin.guards.problem import Plan
from flashlin.kernels.pieces import strides
from flashlin.kernels.recurrent.forward import softplus
from flashlin.kernels.selective.recipe import SEGMENT, kept

LOG2_E = tl.constexpr(1.4426950408889634)


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
def per_channel(x, d, here, BD: tl.constexpr):
    """[BD] of x in fp32, zeros where there is no x."""
    values = tl.zeros([BD], dtype=tl.float32)
    if x is not None:
        values = loaded(x + d, here)
    return values


@triton.jit
def token(
    u,  # places of the channels, [BD]
    delta,  # of the channels, [BD]
    B,  # of the states, [BN]
    C,  # of the states, [BN]
    z,  # of the channels, [BD], or None
    t,  # this token
    T,  # how many there are
    u_t,  # strides of tokens: u
    s_t,  # delta
    B_t,  # B
    C_t,  # C
    z_t,  # z
    here,  # [BD]: which channels there are
    there,  # [BN]: which states there are
):
    """(u, delta, B, C, z) in fp32 of token t, or past the end of the last token. Without z zeros stand for
    it, which nobody reads."""
    t = tl.minimum(t, T - 1).to(tl.int64)
    b_u = loaded(u + t * u_t, here)
    b_z = b_u * 0
    if z is not None:
        b_z = loaded(z + t * z_t, here)
    return b_u, loaded(delta + t * s_t, here), loaded(B + t * B_t, there), loaded(C + t * C_t, there), b_z


@triton.jit
def step_size(raw, bias, SOFTPLUS: tl.constexpr):
    """(raw steps plus bias, steps), each [BD]."""
    raw += bias
    step = raw
    if SOFTPLUS:
        step = softplus(raw)
    return raw, step


@triton.jit(do_not_specialize=["T", "u_b", "u_t", "s_b", "s_t", "B_b", "B_g", "B_t", "C_b", "C_g", "C_t",
                               "z_b", "z_t", "y_b", "y_t"])
def selective_forward(
    u,  # [b, D, T]
    delta,  # [b, D, T]
    A,  # [D, N]
    B,  # [b, G, N, T]
    C,  # [b, G, N, T]
    skip,  # [D] or None
    z,  # [b, D, T] or None
    bias,  # [D] or None
    y,  # [b, D, T]
    states,  # [b, kept, N, D], fp32, or None
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
    D: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    SEGMENT: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    SOFTPLUS: tl.constexpr,
):
    """y, and states [b, kept, N, D] and last [b, D, N] in fp32 where they are wanted. A program: a strip of
    BD channels of a row of the batch, with all their states."""
    strip, g, b, d, here, n, there = place(D, N, G, BN, BD)
    whole = there[:, None] & here[None, :]
    rates = loaded(A + d[None, :] * N + n[:, None], whole) * LOG2_E
    b_bias = per_channel(bias, d, here, BD)
    b_skip = per_channel(skip, d, here, BD)
    u += b * u_b + d * u_d
    delta += b * s_b + d * s_d
    B += b * B_b + g.to(tl.int64) * B_g + n * B_n
    C += b * C_b + g.to(tl.int64) * C_g + n * C_n
    y += b * y_b + d * y_d
    if z is not None:
        z += b * z_b + d * z_d
    u1, raw1, B1, C1, z1 = token(
        u=u, delta=delta, B=B, C=C, z=z, t=0, T=T, u_t=u_t,
        s_t=s_t, B_t=B_t, C_t=C_t, z_t=z_t, here=here, there=there)
    u2, raw2, B2, C2, z2 = token(
        u=u, delta=delta, B=B, C=C, z=z, t=1, T=T, u_t=u_t,
        s_t=s_t, B_t=B_t, C_t=C_t, z_t=z_t, here=here, there=there)
    u3, raw3, B3, C3, z3 = token(
        u=u, delta=delta, B=B, C=C, z=z, t=2, T=T, u_t=u_t,
        s_t=s_t, B_t=B_t, C_t=C_t, z_t=z_t, here=here, there=there)
    if states is not None:
        states += b * ((T - 1) // SEGMENT) * (N * D) + n[:, None] * D + d[None, :]
    h = tl.zeros([BN, BD], dtype=tl.float32)
    for t in range(T):
        if states is not None:
            if (t > 0) & (t % SEGMENT == 0):
                tl.store(states, h, mask=whole)
                states += N * D
        b_u, raw, b_B, b_C, b_z = u1, raw1, B1, C1, z1
        u1, raw1, B1, C1, z1 = u2, raw2, B2, C2, z2
        u2, raw2, B2, C2, z2 = u3, raw3, B3, C3, z3
        u3, raw3, B3, C3, z3 = token(
            u=u, delta=delta, B=B, C=C, z=z, t=t + 3, T=T, u_t=u_t,
            s_t=s_t, B_t=B_t, C_t=C_t, z_t=z_t, here=here, there=there)
        _, step = step_size(raw, b_bias, SOFTPLUS)
        h = tl.exp2(step[None, :] * rates) * h + (step * b_u)[None, :] * b_B[:, None]
        b_y = tl.sum(h * b_C[:, None], 0) + b_skip * b_u
        if z is not None:
            b_y *= b_z * tl.sigmoid(b_z)
        tl.store(y, b_y.to(y.dtype.element_ty), mask=here)
        y += y_t
    if last is not None:
        tl.store(last + (b * D + d[None, :]) * N + n[:, None], h, mask=whole)


def run(
    plan: Plan,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
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
    states = u.new_empty(b, kept(T), N, channels, dtype=torch.float32) if needs_grad else None
    if T == 0:
        return y, last.zero_(), states
    if last.numel():
        launch = plan.launch("selective_forward")
        start(launch, selective_forward, launch.grid[0], dict(
            arguments(u, delta, A, B, C, D, z=z, bias=bias, softplus=softplus, like_y=y),
            y=y, states=states, last=last))
    return y, last, states


def arguments(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    *,
    z: Tensor | None,
    bias: Tensor | None,
    softplus: bool,
    like_y: Tensor,
) -> dict[str, Any]:
    """What the kernels of both directions take, besides the tile. like_y: y or dy, of which only the strides
    are taken here."""
    return dict(
        u=u, delta=delta, A=A, B=B, C=C, skip=D, z=z, bias=bias, T=u.shape[2],
        **strides(u, "u_b", "u_d", "u_t"), **strides(delta, "s_b", "s_d", "s_t"),
        **strides(B, "B_b", "B_g", "B_n", "B_t"), **strides(C, "C_b", "C_g", "C_n", "C_t"),
        **strides(z, "z_b", "z_d", "z_t"), **strides(like_y, "y_b", "y_d", "y_t"),
        D=A.shape[0], N=A.shape[1], G=B.shape[1], SEGMENT=SEGMENT, SOFTPLUS=softplus)
