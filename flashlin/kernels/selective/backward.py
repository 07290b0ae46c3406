"""Backward kernel of Mamba's selective scan.

One program computes a strip of channels and walks over segments of tokens from the last to the first. For
each segment it recomputes the states from the state that the forward kept. It writes every second state to
scratch memory, because writing all of them would take as long as the arithmetic. Then it walks backwards over
the tokens.

Let p = dy silu(z) and w = dh e^{step A} h_{t-1}. Here dh is the gradient of h_t. It begins as the gradient
from the later tokens, and the third line adds the gradient from y_t before the other lines use it:

    dz = dy (h . C + D u) silu'(z)
    dC = h p
    dh += C p
    dD = u p
    du = D p + step (dh . B)
    dB = step u dh
    dstep = u (dh . B) + w . A
    dA = step w
    gradient of h_{t-1}: e^{step A} dh

A program sums over the channels of its strip, and torch adds the sums of all strips. So the results are
deterministic, and the kernel uses no atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashlin.compat.launch import start
from flashlin.guards.plan_types import Plan
from flashlin.kernels.batch import strides
from flashlin.kernels.selective.forward import (
    arguments,
    columns,
    four,
    inside,
    loaded,
    of_poles,
    pairs,
    per_channel,
    place,
    put,
    states_tile,
    steps,
    tile,
    together,
    wide,
)
from flashlin.kernels.selective.recipe import SEGMENT, columns_of
from flashlin.kernels.tile_ops import LOG2_E


@triton.jit
def advanced(h, rates, step, x, B):
    """Return the state after one token: e^{step A} h + x B, [BN, BD].

    h, rates: the state before the token and A log2(e), [BN, BD].
    step, x: the step and the step times u, [BD].
    B: [BN].
    """
    return tl.exp2(step[None, :] * rates) * h + x[None, :] * B[:, None]


@triton.jit
def walked(dh, of_A, before, rates, step, x, p, B, C, h, real, WHOLE: tl.constexpr):
    """Return the gradient of the state before one token, given the gradient of the state after the token.

    Returns seven tensors: the gradient of the state before the token and the running sum of dA, both [BN,
    BD]; the sums h . C, dh . B and w . A log2(e) over the states, each [BD]; and the strip's part of dB and
    dC, each [BN]. Here w is the gradient of the state before the token, times that state.

    dh: gradient of the state after the token, without the token's own output, [BN, BD].
    of_A: running sum of dA, [BN, BD].
    before, h: the states before and after the token, [BN, BD].
    step, x, p: the step, the step times u, and dy silu(z), [BD].
    B, C: [BN].
    real: whether the token exists; it may be after the end of the sequence.
    """
    y = tl.sum(h * C[:, None], 0)
    of_C = tl.sum(h * p[None, :], 1)
    dh += C[:, None] * p[None, :]
    along_B = tl.sum(dh * B[:, None], 0)
    of_B = tl.sum(dh * x[None, :], 1)
    dh *= tl.exp2(step[None, :] * rates)
    if not WHOLE:  # steps after the last token are 0, and 0 times a state that is not finite would be NaN
        before = tl.where(real, before, 0.0)
    w = dh * before
    of_A += w * step[None, :]
    return dh, of_A, y, along_B, tl.sum(w * rates, 0), of_B, of_C


@triton.jit(do_not_specialize=["T", "b_count", "u_t", "s_t", "z_t", "y_t", "o_t"])
def selective_backward(
    dy, u, delta,  # [b, D, T]
    A,  # [D, W]
    B, C,  # [b, G, N, T]
    skip,  # [D] or None
    z,  # [b, D, T] or None
    bias,  # [D] or None
    states,  # [b, kept, D, W], fp32
    dlast,  # [b, D, W], fp32, or None
    du, ddelta, dz,  # [b, D, T]
    dA,  # [b, D, W], fp32
    dB, dC,  # [strips, b, G, T, N], fp32
    dskip, dbias,  # [b, D], fp32
    scratch,  # [programs, SEGMENT / 2, BD, BN], fp32
    T,  # tokens
    b_count,  # rows of the batch
    u_b, u_d, u_t, s_b, s_d, s_t,  # strides of u and of delta between batch rows, channels and tokens
    B_b, B_g, B_n, B_t, C_b, C_g, C_n, C_t,  # of B and of C between batch rows, groups, states and tokens
    z_b, z_d, z_t, y_b, y_d, y_t,  # of z and of dy between batch rows, channels and tokens
    o_b, o_d, o_t,  # of du, ddelta and dz between batch rows, channels and tokens
    D: tl.constexpr, N: tl.constexpr, W: tl.constexpr, G: tl.constexpr, U_TOGETHER: tl.constexpr,
    S_TOGETHER: tl.constexpr, Z_TOGETHER: tl.constexpr, Y_TOGETHER: tl.constexpr, O_TOGETHER: tl.constexpr,
    WHOLE: tl.constexpr, SEGMENT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, SOFTPLUS: tl.constexpr,
):
    """Compute the gradients of all inputs of the selective scan for one strip of channels.

    Sums are in fp32.

    du, ddelta, dz: [b, D, T].
    dA, dskip, dbias: one entry per row of the batch, [b, D, W] and [b, D].
    dB, dC: one entry per strip of a group, [strips, b, G, T, N].
    states: the states at the starts of the segments, from the forward.
    scratch: [programs, SEGMENT / 2, BD, BN], every second state of a segment.
    y_*: strides of dy.
    o_*: strides of du, ddelta and dz.
    *_TOGETHER: whether the tokens of a tensor are contiguous.
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
    dy += b * y_b + d * y_d
    outputs = b * o_b + d * o_d
    if z is not None:
        z += b * z_b + d * z_d
    partial = ((strip * b_count + b) * G + g) * T * N + n
    states += (b * ((T - 1) // SEGMENT) - 1) * (D * W) + state
    scratch += tl.program_id(0).to(tl.int64) * (SEGMENT // 2 * BN * BD) + tl.arange(
        0, BD)[None, :] * BN + tl.arange(0, BN)[:, None]
    dh = tl.zeros([BN, BD], dtype=tl.float32)
    if dlast is not None:
        dh = loaded(dlast + b * (D * W) + state, whole)
    of_A = tl.zeros([BN, BD], dtype=tl.float32)
    of_skip = tl.zeros([BD], dtype=tl.float32)
    of_bias = tl.zeros([BD], dtype=tl.float32)
    segments = (T + SEGMENT - 1) // SEGMENT
    for back in range(segments):
        i0 = (segments - 1 - back) * SEGMENT
        tokens = tl.minimum(SEGMENT, T - i0)
        h = tl.zeros([BN, BD], dtype=tl.float32)
        if i0 > 0:
            h = loaded(states + (i0 // SEGMENT).to(tl.int64) * (D * W), whole)
        next_u = tile(u, i0, here, T, u_t, U_TOGETHER, WHOLE, BD, 8)
        next_s = tile(delta, i0, here, T, s_t, S_TOGETHER, WHOLE, BD, 8)
        next_B = states_tile(B, i0, there, T, B_t, WHOLE, 8)
        for i in range(0, tokens, 8):
            t = i0 + i
            b_u, b_B = next_u.to(tl.float32), next_B.to(tl.float32)
            _, step = steps(next_s, b_bias, t, T, SOFTPLUS, WHOLE, 8)
            next_u = tile(u, t + 8, here, T, u_t, U_TOGETHER, WHOLE, BD, 8)
            next_s = tile(delta, t + 8, here, T, s_t, S_TOGETHER, WHOLE, BD, 8)
            next_B = states_tile(B, t + 8, there, T, B_t, WHOLE, 8)
            s0, s1, s2, s3, s4, s5, s6, s7 = columns(step, BD)
            x0, x1, x2, x3, x4, x5, x6, x7 = columns(step * b_u, BD)
            B0, B1, B2, B3, B4, B5, B6, B7 = columns(b_B, BN)
            to = scratch + i // 2 * (BN * BD)
            tl.store(to, h)
            h = advanced(h, rates, s0, x0, B0)
            h = advanced(h, rates, s1, x1, B1)
            tl.store(to + BN * BD, h)
            h = advanced(h, rates, s2, x2, B2)
            h = advanced(h, rates, s3, x3, B3)
            tl.store(to + 2 * (BN * BD), h)
            h = advanced(h, rates, s4, x4, B4)
            h = advanced(h, rates, s5, x5, B5)
            tl.store(to + 3 * (BN * BD), h)
            h = advanced(h, rates, s6, x6, B6)
            h = advanced(h, rates, s7, x7, B7)
        tl.debug_barrier()  # other threads may read the scratch memory that this thread wrote
        # The walk backwards takes 4 tokens at a time, because more would not fit into registers. States are
        # loaded before values per channel, because an operation on two layouts gets the layout of the later
        # load. In the layout of the states, each row is in four threads, which would all compute the same
        # values. The next tile is loaded at the point where most registers are free.
        final = (tokens - 1) // 4 * 4
        latest = tl.load(scratch + (final // 2 + 1) * (BN * BD))
        next_u = tile(u, i0 + final, here, T, u_t, U_TOGETHER, WHOLE, BD, 4)
        next_s = tile(delta, i0 + final, here, T, s_t, S_TOGETHER, WHOLE, BD, 4)
        next_p = tile(dy, i0 + final, here, T, y_t, Y_TOGETHER, WHOLE, BD, 4)
        next_z = next_p
        if z is not None:
            next_z = tile(z, i0 + final, here, T, z_t, Z_TOGETHER, WHOLE, BD, 4)
        next_B = states_tile(B, i0 + final, there, T, B_t, WHOLE, 4)
        next_C = states_tile(C, i0 + final, there, T, C_t, WHOLE, 4)
        for j in range(0, tokens, 4):
            i = final - j
            t = i0 + i
            of = scratch + i // 2 * (BN * BD)
            h2, h0 = latest, tl.load(of)
            b_u, p, b_z = next_u.to(tl.float32), next_p.to(tl.float32), next_z.to(tl.float32)
            b_B, b_C = next_B.to(tl.float32), next_C.to(tl.float32)
            raw, step = steps(next_s, b_bias, t, T, SOFTPLUS, WHOLE, 4)
            slope = p
            if z is not None:
                on = tl.sigmoid(b_z)
                slope = p * on * (1 + b_z * (1 - on))
                p *= b_z * on
            s0, s1, s2, s3 = pairs(step, BD)
            x0, x1, x2, x3 = pairs(step * b_u, BD)
            p0, p1, p2, p3 = pairs(p, BD)
            B0, B1, B2, B3 = pairs(b_B, BN)
            C0, C1, C2, C3 = pairs(b_C, BN)
            h3 = advanced(h2, rates, s2, x2, B2)
            real = t + 3 < T
            dh, of_A, y3, b3, w3, dB3, dC3 = walked(
                dh, of_A, h3, rates, s3, x=x3, p=p3, B=B3, C=C3, h=h, real=real, WHOLE=WHOLE)
            real = t + 2 < T
            dh, of_A, y2, b2, w2, dB2, dC2 = walked(
                dh, of_A, h2, rates, s2, x=x2, p=p2, B=B2, C=C2, h=h3, real=real, WHOLE=WHOLE)
            h1 = advanced(h0, rates, s0, x0, B0)
            real = t + 1 < T
            dh, of_A, y1, b1, w1, dB1, dC1 = walked(
                dh, of_A, h1, rates, s1, x=x1, p=p1, B=B1, C=C1, h=h2, real=real, WHOLE=WHOLE)
            latest = tl.load(of - BN * BD, mask=i > 0)
            more, further = here & (i > 0), there & (i > 0)
            next_u = tile(u, t - 4, more, T, u_t, U_TOGETHER, WHOLE, BD, 4)
            next_s = tile(delta, t - 4, more, T, s_t, S_TOGETHER, WHOLE, BD, 4)
            next_p = tile(dy, t - 4, more, T, y_t, Y_TOGETHER, WHOLE, BD, 4)
            if z is not None:
                next_z = tile(z, t - 4, more, T, z_t, Z_TOGETHER, WHOLE, BD, 4)
            next_B = states_tile(B, t - 4, further, T, B_t, WHOLE, 4)
            next_C = states_tile(C, t - 4, further, T, C_t, WHOLE, 4)
            real = t < T
            dh, of_A, y0, b0, w0, dB0, dC0 = walked(
                dh, of_A, h0, rates, s0, x=x0, p=p0, B=B0, C=C0, h=h1, real=real, WHOLE=WHOLE)
            h = h0
            at = t + tl.arange(0, 4)
            to = partial[:, None] + at.to(tl.int64)[None, :] * N
            known = inside(t, there, T, WHOLE, 4)
            tl.store(dB + to, four(dB0, dB1, dB2, dB3, BN), mask=known)
            tl.store(dC + to, four(dC0, dC1, dC2, dC3, BN), mask=known)
            if z is not None:
                b_dz = (four(y0, y1, y2, y3, BD) + b_skip[:, None] * b_u) * slope
                put(dz + outputs, t, b_dz, here, T, o_t, O_TOGETHER, WHOLE, 4)
            along_B = four(b0, b1, b2, b3, BD)
            put(du + outputs, t, b_skip[:, None] * p + step * along_B, here, T, o_t, O_TOGETHER, WHOLE, 4)
            b_ds = b_u * along_B + four(w0, w1, w2, w3, BD) * (1 / LOG2_E)
            if SOFTPLUS:
                b_ds *= tl.sigmoid(raw)
            put(ddelta + outputs, t, b_ds, here, T, o_t, O_TOGETHER, WHOLE, 4)
            of_skip += tl.sum(p * b_u, 1)
            of_bias += tl.sum(tl.where(inside(t, here, T, WHOLE, 4), b_ds, 0.0), 1)
        tl.debug_barrier()  # the states of the next segment overwrite the scratch memory
    tl.store(dA + b * (D * W) + state, of_A, mask=whole)
    tl.store(dskip + b * D + d, of_skip, mask=here)
    tl.store(dbias + b * D + d, of_bias, mask=here)


def launch_backward(plan: Plan, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
                    z: Tensor | None, bias: Tensor | None, states: Tensor, softplus: bool, dy: Tensor,
                    dlast: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of u, delta, A, B, C, D, z and bias, in their dtypes.

    The inputs must meet the requirements of ``launch_forward``.

    states: the states that ``launch_forward`` returned.
    dy: gradient of y, with any strides.
    dlast: gradient of the last state, contiguous, or None.
    """
    b, channels, T = u.shape
    G, N = B.shape[1:3]
    launch = plan.launch("selective_backward")
    du, ddelta = torch.empty_like(u), torch.empty_like(u, dtype=delta.dtype)
    dz = None if z is None else torch.empty_like(u, dtype=z.dtype)
    new = u.new_empty if u.numel() else u.new_zeros
    dA = new((b, channels, columns_of(N)), dtype=torch.float32)
    dB, dC = new((2, launch.grid[0] // max(b * G, 1), b, G, T, N), dtype=torch.float32)
    dskip, dbias = new((2, b, channels), dtype=torch.float32)
    if u.numel():
        scratch = u.new_empty((launch.grid[0], SEGMENT // 2, launch.block("BN"), launch.block("BD")),
                              dtype=torch.float32)
        start(launch, selective_backward, launch.grid[0], dict(
            arguments(u, delta, A, B, C, dy, D, z, bias, softplus=softplus),
            dy=dy, states=states, dlast=None if dlast is None else wide(dlast), du=du, ddelta=ddelta, dz=dz,
            dA=dA, dB=dB, dC=dC, dskip=dskip, dbias=dbias, scratch=scratch, b_count=b,
            O_TOGETHER=together(du), **strides(du, "o_b", "o_d", "o_t")))
    return (du, ddelta, dA.sum(0)[:, :N], dB.sum(0).mT.to(B.dtype), dC.sum(0).mT.to(C.dtype),
            None if D is None else dskip.sum(0), dz, None if bias is None else dbias.sum(0))
