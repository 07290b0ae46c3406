"""Mamba's selective scan, backward. Program: a strip of channels, walking segments of tokens from the last to
the first.

Of each segment the states are computed anew from the one that forward kept, and written to scratch memory;
then the tokens are walked backwards. With p = dy silu(z), dh the gradient of h_t on entering token t, and w =
dh e^{step A} h_{t-1}:
    dz = dy (h . C + D u) silu'(z)    dC = h p        dh += C p         dD = u p
    du = D p + step (dh . B)          dB = step u dh
    dstep = u (dh . B) + w . A        dA = step w     gradient of h_{t-1}: e^{step A} dh
Sums over channels are partial sums of a strip, added up by torch: deterministic, no atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashlin.compat.launch import start
from flashlin.guards.problem import Plan
from flashlin.kernels.pieces import strides
from flashlin.kernels.selective.forward import (
    LOG2_E,
    arguments,
    loaded,
    per_channel,
    place,
    step_size,
    token,
)
from flashlin.kernels.selective.recipe import SEGMENT


@triton.jit(do_not_specialize=["T", "b_count", "u_b", "u_t", "s_b", "s_t", "B_b", "B_g", "B_t", "C_b", "C_g",
                               "C_t", "z_b", "z_t", "y_b", "y_t", "o_b", "o_t"])
def selective_backward(
    dy,  # [b, D, T]
    u,  # [b, D, T]
    delta,  # [b, D, T]
    A,  # [D, N]
    B,  # [b, G, N, T]
    C,  # [b, G, N, T]
    skip,  # [D] or None
    z,  # [b, D, T] or None
    bias,  # [D] or None
    states,  # [b, kept, N, D], fp32
    dlast,  # [b, D, N], fp32, or None
    du,  # [b, D, T]
    ddelta,  # [b, D, T]
    dz,  # [b, D, T]
    dA,  # [b, D, N], fp32
    dB,  # [strips, b, G, T, N], fp32
    dC,  # [strips, b, G, T, N], fp32
    dskip,  # [b, D], fp32
    dbias,  # [b, D], fp32
    scratch,  # [programs, SEGMENT, BN, BD], fp32
    T,  # tokens
    b_count,  # rows of the batch
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
    y_b,  # of dy: by row
    y_d,  # by channel
    y_t,  # by token
    o_b,  # of du, ddelta and dz: by row
    o_d,  # by channel
    o_t,  # by token
    D: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    SEGMENT: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    SOFTPLUS: tl.constexpr,
):
    """du, ddelta, dz [b, D, T]; for each row of the batch dA [b, D, N], dskip and dbias [b, D]; for each
    strip of a group dB and dC [strips, b, G, T, N]; sums in fp32. Strides y_* are dy's, and o_* those of du,
    ddelta and dz. scratch: [programs, SEGMENT, BN, BD] fp32."""
    strip, g, b, d, here, n, there = place(D, N, G, BN, BD)
    whole = there[:, None] & here[None, :]
    state = d[None, :] * N + n[:, None]
    rates = loaded(A + state, whole) * LOG2_E
    b_bias = per_channel(bias, d, here, BD)
    b_skip = per_channel(skip, d, here, BD)
    u += b * u_b + d * u_d
    delta += b * s_b + d * s_d
    B += b * B_b + g.to(tl.int64) * B_g + n * B_n
    C += b * C_b + g.to(tl.int64) * C_g + n * C_n
    dy += b * y_b + d * y_d
    outputs = b * o_b + d * o_d
    if z is not None:
        z += b * z_b + d * z_d
    partial = ((strip * b_count + b) * G + g) * T * N + n
    states += (b * ((T - 1) // SEGMENT) - 1) * (N * D) + n[:, None] * D + d[None, :]
    scratch += tl.program_id(0).to(tl.int64) * (SEGMENT * BN * BD) + tl.arange(0,
                                                                               BN)[:, None] * BD + tl.arange(
                                                                                   0, BD)[None, :]
    dh = tl.zeros([BN, BD], dtype=tl.float32)
    if dlast is not None:
        dh = loaded(dlast + b * (D * N) + state, whole)
    of_A = tl.zeros([BN, BD], dtype=tl.float32)
    of_skip = tl.zeros([BD], dtype=tl.float32)
    of_bias = tl.zeros([BD], dtype=tl.float32)
    segments = (T + SEGMENT - 1) // SEGMENT
    for back in range(segments):
        i0 = (segments - 1 - back) * SEGMENT
        tokens = tl.minimum(SEGMENT, T - i0)
        h = tl.zeros([BN, BD], dtype=tl.float32)
        if i0 > 0:
            h = loaded(states + (i0 // SEGMENT).to(tl.int64) * (N * D), whole)
        u1, raw1, B1, _, _ = token(
            u=u, delta=delta, B=B, C=B, z=None, t=i0, T=T, u_t=u_t,
            s_t=s_t, B_t=B_t, C_t=B_t, z_t=0, here=here, there=there)
        u2, raw2, B2, _, _ = token(
            u=u, delta=delta, B=B, C=B, z=None, t=i0 + 1, T=T, u_t=u_t,
            s_t=s_t, B_t=B_t, C_t=B_t, z_t=0, here=here, there=there)
        for i in range(tokens):
            b_u, raw, b_B = u1, raw1, B1
            u1, raw1, B1 = u2, raw2, B2
            u2, raw2, B2, _, _ = token(
                u=u, delta=delta, B=B, C=B, z=None, t=i0 + i + 2, T=T, u_t=u_t,
                s_t=s_t, B_t=B_t, C_t=B_t, z_t=0, here=here, there=there)
            tl.store(scratch + i * (BN * BD), h)
            _, step = step_size(raw, b_bias, SOFTPLUS)
            h = tl.exp2(step[None, :] * rates) * h + (step * b_u)[None, :] * b_B[:, None]
        tl.debug_barrier()  # other threads may read what this one wrote
        final = i0 + tokens - 1
        u1, raw1, B1, C1, z1 = token(
            u=u, delta=delta, B=B, C=C, z=z, t=final, T=T, u_t=u_t,
            s_t=s_t, B_t=B_t, C_t=C_t, z_t=z_t, here=here, there=there)
        dy1 = loaded(dy + final.to(tl.int64) * y_t, here)
        for j in range(tokens):
            i = tokens - 1 - j
            t = (i0 + i).to(tl.int64)
            b_u, raw, b_B, b_C, b_z, p = u1, raw1, B1, C1, z1, dy1
            u1, raw1, B1, C1, z1 = token(
                u=u, delta=delta, B=B, C=C, z=z, t=tl.maximum(i0 + i - 1, 0), T=T,
                u_t=u_t, s_t=s_t, B_t=B_t, C_t=C_t, z_t=z_t, here=here, there=there)
            dy1 = loaded(dy + tl.maximum(t - 1, 0) * y_t, here)
            before = tl.load(scratch + i * (BN * BD))
            raw, step = step_size(raw, b_bias, SOFTPLUS)
            a = tl.exp2(step[None, :] * rates)
            decayed = a * before
            h = decayed + (step * b_u)[None, :] * b_B[:, None]
            if z is not None:
                on = tl.sigmoid(b_z)
                b_dz = p * (tl.sum(h * b_C[:, None], 0) + b_skip * b_u) * on * (1 + b_z * (1 - on))
                tl.store(dz + outputs + t * o_t, b_dz.to(dz.dtype.element_ty), mask=here)
                p *= b_z * on
            tl.store(dC + partial + t * N, tl.sum(h * p[None, :], 1), mask=there)
            dh += b_C[:, None] * p[None, :]
            of_skip += p * b_u
            along_B = tl.sum(dh * b_B[:, None], 0)
            tl.store(du + outputs + t * o_t, (b_skip * p + step * along_B).to(du.dtype.element_ty), mask=here)
            tl.store(dB + partial + t * N, tl.sum(dh * (step * b_u)[None, :], 1), mask=there)
            w = dh * decayed
            of_A += w * step[None, :]
            b_ds = b_u * along_B + tl.sum(w * rates, 0) * (1 / LOG2_E)
            if SOFTPLUS:
                b_ds *= tl.sigmoid(raw)
            of_bias += b_ds
            tl.store(ddelta + outputs + t * o_t, b_ds.to(ddelta.dtype.element_ty), mask=here)
            dh *= a
        tl.debug_barrier()  # before the next segment's states take the place of these
    tl.store(dA + b * (D * N) + state, of_A, mask=whole)
    tl.store(dskip + b * D + d, of_skip, mask=here)
    tl.store(dbias + b * D + d, of_bias, mask=here)


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
    states: Tensor,
    softplus: bool,
    dy: Tensor,
    dlast: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of u, delta, A, B, C, D, z and bias, in their dtypes. Tensors as forward.run's; dy of any
    strides, dlast contiguous."""
    b, channels, T = u.shape
    G, N = B.shape[1:3]
    launch = plan.launch("selective_backward")
    du, ddelta = torch.empty_like(u), torch.empty_like(u, dtype=delta.dtype)
    dz = None if z is None else torch.empty_like(u, dtype=z.dtype)
    new = u.new_empty if u.numel() else u.new_zeros
    dA = new((b, channels, N), dtype=torch.float32)
    dB, dC = new((2, launch.grid[0] // max(b * G, 1), b, G, T, N), dtype=torch.float32)
    dskip, dbias = new((2, b, channels), dtype=torch.float32)
    if u.numel():
        scratch = u.new_empty((launch.grid[0], SEGMENT, launch.block("BN"), launch.block("BD")),
                              dtype=torch.float32)
        start(launch, selective_backward, launch.grid[0], dict(
            arguments(u, delta, A, B, C, D, z=z, bias=bias, softplus=softplus, like_y=dy),
            dy=dy, states=states, dlast=dlast, du=du, ddelta=ddelta, dz=dz, dA=dA, dB=dB, dC=dC,
            dskip=dskip, dbias=dbias, scratch=scratch, b_count=b, **strides(du, "o_b", "o_d", "o_t")))
    return (du, ddelta, dA.sum(0), dB.sum(0).mT.to(B.dtype), dC.sum(0).mT.to(C.dtype),
            None if D is None else dskip.sum(0), dz, None if bias is None else dbias.sum(0))
