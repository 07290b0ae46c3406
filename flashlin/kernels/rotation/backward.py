"""Mamba-3's rotation, backward. Tensors in, tensors out.

Turned back, a gradient is that of the sum with the bias, so a group's q or k gets the sum over its heads, and
an angle the cross product of each pair with its gradient. As an angle goes on to all later tokens, a token's
turn gets the sum of their gradients: again of a chunk, of the chunks behind it, and then of each token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashlin.compat.launch import start
from flashlin.guards.plan_types import Plan
from flashlin.kernels.rotation.forward import carry, joined, line, loaded, split, store_line, stored, turns
from flashlin.kernels.rotation.inputs import Inputs, Outputs
from flashlin.kernels.rotation.recipe import SHARED
from flashlin.kernels.tile_ops import beta_of, first_slot, put, sequence_of, tile


@triton.jit
def turned_back(even, odd, c, s):
    return even * c + odd * s, odd * c - even * s


@triton.jit
def columns_of(even, odd, BR: tl.constexpr):
    """[2 BR]: the sums of both over rows, as channels lie."""
    return tl.reshape(tl.join(tl.sum(even, 0), tl.sum(odd, 0)), [2 * BR])


@triton.jit
def with_line(
    even, odd,  # [BT, BR]
    d,  # [N, H, K] or None
    at,  # n H + head
    row,  # the row of d, of the chunk
    c, s,  # [BT, BR]
    K: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr,
):
    """Of a turned row's gradient, turned back, added to that of the row."""
    if d is not None:
        b_d = tl.reshape(line(d + at * K, 0, K, 2 * BR)[None, :], [1, 2 * BR])
        d_even, d_odd = split(b_d, 1, BR)
        d_even, d_odd = turned_back(d_even, d_odd, c, s)
        this = (tl.arange(0, BT) == row)[:, None]
        even += tl.where(this, d_even, 0.0)
        odd += tl.where(this, d_odd, 0.0)
    return even, odd


@triton.jit
def heads_of(G, H, S, shares):
    """(the program's sequence, group, number among those of both, share, and its first head and the one after
    its last)."""
    program = tl.program_id(0)
    share = program % shares
    i_g = program // shares % G
    part = program // shares // G
    heads = H // G
    begin = i_g * heads + share * heads // shares
    return part // S, i_g, part % S, share.to(tl.int64), begin, i_g * heads + (share + 1) * heads // shares


@triton.jit(do_not_specialize=["T", "N", "G", "H", "S", "shares", "rows"])
def turn_back(
    q, k,  # [rows, G, K]
    q_bias, k_bias,  # [H, K]
    weight,  # [rows, H]
    angle,  # [rows, H, R], fp32
    dq_turned,  # [rows, H, K]: of the q of the token behind
    dk_turned,  # [rows, H, K]
    dq_first, dk_last,  # [N, H, K] or None
    dalike,  # [rows, H] or None
    dangle,  # [rows, H, R] or None
    dq, dk,  # [shares, rows, G, K], fp32
    dweight,  # [rows, H], fp32
    dtheta,  # [rows, H, R], fp32
    dq_bias, dk_bias,  # [slots, H, K], fp32
    table,  # [slots, H, R], fp64
    bounds,  # [N + 1] or None
    T, N,
    G,  # groups
    H,
    S,  # programs to a sequence, group and share
    shares,  # of a group's heads
    rows,
    K: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, VARLEN: tl.constexpr,
):
    """Of the channels that are turned: the gradients of q and k, of a chunk's biases and angles, what the
    latter add up to, and the channels' part of the weights' gradients. A program: chunks of one group, with a
    share of its heads."""
    n, i_g, part, share, begin, end = heads_of(G, H, S, shares)
    first, length = sequence_of(n, bounds, T, VARLEN)
    slot = first_slot(n, first, BT)
    dq += share * rows * G * K
    dk += share * rows * G * K
    for t0 in range(part * BT, length, S * BT):
        there = t0 + tl.arange(0, BT) < length
        b_q = loaded(q, first, t0, length, i_g, G, D=K, d0=0, BT=BT, BD=2 * BR, ABOVE=False)
        b_k = loaded(k, first, t0, length, i_g, G, D=K, d0=0, BT=BT, BD=2 * BR, ABOVE=False)
        q_even, q_odd = split(b_q, BT, BR)
        k_even, k_odd = split(b_k, BT, BR)
        sum_q_even = tl.zeros([BT, BR], dtype=tl.float32)
        sum_q_odd = tl.zeros([BT, BR], dtype=tl.float32)
        sum_k_even = tl.zeros([BT, BR], dtype=tl.float32)
        sum_k_odd = tl.zeros([BT, BR], dtype=tl.float32)
        for i_h in range(begin, end):
            place = (slot + t0 // BT) * H + i_h
            at = n.to(tl.int64) * H + i_h
            theta = tile(angle, first, t0, length, i_h, H, D=R, d0=0, BT=BT, BD=BR)
            c = tl.cos(theta)
            s = tl.sin(theta)
            b_weight = beta_of(weight, first, t0, length, i_h, H, BT=BT).to(tl.float32)[:, None]
            both = tl.zeros([BT, 1], dtype=tl.float32)
            if dalike is not None:
                both += beta_of(dalike, first, t0, length, i_h, H, BT=BT).to(tl.float32)[:, None]
            bias_even, bias_odd = split(line(q_bias + i_h * K, 0, K, 2 * BR)[None, :], 1, BR)
            x_even = q_even + bias_even
            x_odd = q_odd + bias_odd
            bias_even, bias_odd = split(line(k_bias + i_h * K, 0, K, 2 * BR)[None, :], 1, BR)
            y_even = k_even + bias_even
            y_odd = k_odd + bias_odd

            b_d = loaded(dq_turned, first, t0, length, i_h, H, D=K, d0=0, BT=BT, BD=2 * BR, ABOVE=True)
            even, odd = split(b_d, BT, BR)
            even, odd = turned_back(even, odd, c, s)
            even, odd = with_line(even, odd, dq_first, at, -t0, c, s, K=K, BT=BT, BR=BR)
            crossed = x_even * odd - x_odd * even
            even += both * y_even
            odd += both * y_odd
            sum_q_even += even
            sum_q_odd += odd
            store_line(dq_bias + place * K, columns_of(even, odd, BR), 0, K, 2 * BR)

            b_d = loaded(dk_turned, first, t0, length, i_h, H, D=K, d0=0, BT=BT, BD=2 * BR, ABOVE=False)
            even, odd = split(b_d, BT, BR)
            even, odd = turned_back(even, odd, c, s)
            # turned or not, a product of both is the same
            product = tl.sum(even * y_even + odd * y_odd, 1)
            even, odd = with_line(even * b_weight, odd * b_weight, dk_last, at, length - 1 - t0, c, s,
                                  K=K, BT=BT, BR=BR)
            crossed += y_even * odd - y_odd * even
            even += both * x_even
            odd += both * x_odd
            sum_k_even += even
            sum_k_odd += odd
            store_line(dk_bias + place * K, columns_of(even, odd, BR), 0, K, 2 * BR)
            tl.store(dweight + (first + t0 + tl.arange(0, BT)) * H + i_h, product, mask=there)
            if dangle is not None:
                crossed += tile(dangle, first, t0, length, i_h, H, D=R, d0=0, BT=BT, BD=BR).to(tl.float32)
            crossed = tl.where(there[:, None], crossed, 0.0)
            put(dtheta, crossed, first, t0, length, i_h, H, D=R, d0=0, BT=BT, BD=BR)
            store_line(table + place * R, tl.sum(crossed, 0), 0, R, BR)
        stored(dq, joined(sum_q_even, sum_q_odd, BT, BR), first, t0, length, i_g, G, D=K, d0=0, BT=BT,
               BD=2 * BR)
        stored(dk, joined(sum_k_even, sum_k_odd, BT, BR), first, t0, length, i_g, G, D=K, d0=0, BT=BT,
               BD=2 * BR)


@triton.jit
def with_rest(x, d, at, row, K: tl.constexpr, d0: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """As with_line, of channels [BT, BD] that are not turned."""
    if d is not None:
        x += tl.where((tl.arange(0, BT) == row)[:, None], line(d + at * K, d0, K, BD)[None, :], 0.0)
    return x


@triton.jit(do_not_specialize=["T", "N", "G", "H", "S", "shares", "rows"])
def turn_back_rest(
    q, k,  # [rows, G, K]
    q_bias, k_bias,  # [H, K]
    weight,  # [rows, H]
    dq_turned,  # [rows, H, K]: of the q of the token behind
    dk_turned,  # [rows, H, K]
    dq_first, dk_last,  # [N, H, K] or None
    dalike,  # [rows, H] or None
    dq, dk,  # [shares, rows, G, K], fp32
    dweight_rest,  # [rows, H], fp32
    dq_bias, dk_bias,  # [slots, H, K], fp32
    bounds,  # [N + 1] or None
    T, N,
    G,  # groups
    H,
    S,  # programs to a sequence, group and share
    shares,  # of a group's heads
    rows,
    K: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, BX: tl.constexpr, VARLEN: tl.constexpr,
):
    """As turn_back, of the channels that are not turned."""
    n, i_g, part, share, begin, end = heads_of(G, H, S, shares)
    first, length = sequence_of(n, bounds, T, VARLEN)
    slot = first_slot(n, first, BT)
    dq += share * rows * G * K
    dk += share * rows * G * K
    for t0 in range(part * BT, length, S * BT):
        there = t0 + tl.arange(0, BT) < length
        b_q = loaded(q, first, t0, length, i_g, G, D=K, d0=2 * BR, BT=BT, BD=BX, ABOVE=False)
        b_k = loaded(k, first, t0, length, i_g, G, D=K, d0=2 * BR, BT=BT, BD=BX, ABOVE=False)
        sum_q = tl.zeros([BT, BX], dtype=tl.float32)
        sum_k = tl.zeros([BT, BX], dtype=tl.float32)
        for i_h in range(begin, end):
            place = (slot + t0 // BT) * H + i_h
            at = n.to(tl.int64) * H + i_h
            b_weight = beta_of(weight, first, t0, length, i_h, H, BT=BT).to(tl.float32)[:, None]
            both = tl.zeros([BT, 1], dtype=tl.float32)
            if dalike is not None:
                both += beta_of(dalike, first, t0, length, i_h, H, BT=BT).to(tl.float32)[:, None]
            x = b_q + line(q_bias + i_h * K, 2 * BR, K, BX)[None, :]
            y = b_k + line(k_bias + i_h * K, 2 * BR, K, BX)[None, :]
            b_d = loaded(dq_turned, first, t0, length, i_h, H, D=K, d0=2 * BR, BT=BT, BD=BX, ABOVE=True)
            b_d = with_rest(b_d, dq_first, at, -t0, K=K, d0=2 * BR, BT=BT, BD=BX) + both * y
            sum_q += b_d
            store_line(dq_bias + place * K, tl.sum(b_d, 0), 2 * BR, K, BX)
            b_d = loaded(dk_turned, first, t0, length, i_h, H, D=K, d0=2 * BR, BT=BT, BD=BX, ABOVE=False)
            tl.store(dweight_rest + (first + t0 + tl.arange(0, BT)) * H + i_h, tl.sum(b_d * y, 1), mask=there)
            b_d = with_rest(b_d * b_weight, dk_last, at, length - 1 - t0, K=K, d0=2 * BR, BT=BT,
                            BD=BX) + both * x
            sum_k += b_d
            store_line(dk_bias + place * K, tl.sum(b_d, 0), 2 * BR, K, BX)
        stored(dq, sum_q, first, t0, length, i_g, G, D=K, d0=2 * BR, BT=BT, BD=BX)
        stored(dk, sum_k, first, t0, length, i_g, G, D=K, d0=2 * BR, BT=BT, BD=BX)


@triton.jit(do_not_specialize=["T", "N", "H", "S"])
def turn_finish(
    angles,  # [rows, H, R]
    step,  # [rows, H]
    dtheta,  # [rows, H, R], fp32
    carried,  # [slots, H, R], fp64
    dangles,  # [rows, H, R], fp32
    dstep,  # [rows, H], fp32
    dbegan,  # [N, H, R], fp32, or None
    bounds,  # [N + 1] or None
    T, N, H,
    S,  # programs to a sequence and head
    R: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, VARLEN: tl.constexpr,
):
    """The gradients of angles and steps, and of where sequences begin."""
    program = tl.program_id(0)
    i_h = program % H
    n = program // H // S
    first, length = sequence_of(n, bounds, T, VARLEN)
    slot = first_slot(n, first, BT)
    pairs = tl.arange(0, BR)
    rows = tl.arange(0, BT)
    for t0 in range(program // H % S * BT, length, S * BT):
        grown, rate = turns(angles, step, first, t0, length, i_h, H, R=R, BT=BT, BR=BR)
        behind = tl.load(carried + ((slot + t0 // BT) * H + i_h) * R + pairs, mask=pairs < R, other=0.0)
        x = tile(dtheta, first, t0, length, i_h, H, D=R, d0=0, BT=BT, BD=BR)
        # of an angle, which has 2 pi of a turn
        dturn = (tl.cumsum(x, 0, reverse=True) + behind.to(tl.float32)[None, :]) * 6.283185307179586
        put(dangles, dturn * rate[:, None] * (1.0 - grown * grown), first, t0, length, i_h, H,
            D=R, d0=0, BT=BT, BD=BR)
        tl.store(dstep + (first + t0 + rows) * H + i_h, 0.5 * tl.sum(dturn * grown, 1),
                 mask=t0 + rows < length)
        if dbegan is not None:
            if t0 == 0:
                whole = tl.sum(tl.where((rows == 0)[:, None], dturn, 0.0), 0) * 0.15915494309189535
                tl.store(dbegan + (n * H + i_h) * R + pairs, whole, mask=pairs < R)


def launch_backward(plan: Plan, x: Inputs, angle: Tensor, dy: Outputs) -> Inputs:
    """Gradients of all but bounds, float32. angle: what forward gave; dy: of what it gave, contiguous, of
    which those of q and k are there."""
    (B, T, G, K), (H, R), N, device = x.q.shape, x.angles.shape[2:], x.sequences, x.q.device
    new = torch.empty if x.bounds is None else torch.zeros
    (S, slots), shares = x.chunks(plan.launch("turn_back").block("BT")), -(-H // max(G * SHARED, 1))
    of_heads = [new(shares, B, T, G, K, dtype=torch.float32, device=device) for _ in range(2)]
    angles, step, weight = (new(y.shape, dtype=torch.float32, device=device)
                            for y in (x.angles, x.step, x.weight))
    biases = [torch.zeros(slots, H, K, dtype=torch.float32, device=device) for _ in range(2)]
    began = None if x.began is None else torch.zeros_like(x.began, dtype=torch.float32)
    if B * T * H * K:
        dtheta = torch.empty(B, T, H, R, dtype=torch.float32, device=device)
        table = torch.empty(slots, H, R, dtype=torch.float64, device=device)
        rest = [launch for launch in plan.launches if launch.kernel == "turn_back_rest"]
        dweight_rest = new(weight.shape if rest else (0,), dtype=torch.float32, device=device)
        shared = dict(x._asdict(), T=T, N=N, G=G, H=H, S=S, shares=shares, rows=B * T, angle=angle,
                      dq_turned=dy.q, dk_turned=dy.k, dq_first=dy.q_first, dk_last=dy.k_last, dalike=dy.alike,
                      dangle=dy.angle, dq=of_heads[0], dk=of_heads[1], dweight=weight,
                      dweight_rest=dweight_rest, dtheta=dtheta, dq_bias=biases[0], dk_bias=biases[1],
                      table=table, dangles=angles, dstep=step, dbegan=began)
        programs, varlen = N * S * G * shares, x.bounds is not None
        start(plan.launch("turn_back"), turn_back, programs, dict(K=K, R=R, VARLEN=varlen), shared)
        for launch in rest:
            start(launch, turn_back_rest, programs, dict(K=K, VARLEN=varlen), shared)
            weight += dweight_rest
        shared["carried"] = carry(plan, x, table, None, back=True)
        start(plan.launch("turn_finish"), turn_finish, N * S * H, dict(R=R, VARLEN=varlen), shared)
    dq, dk = (y[0] if shares == 1 else y.sum(0) for y in of_heads)
    return Inputs(dq, dk, biases[0].sum(0), biases[1].sum(0), angles, step, weight, began)
