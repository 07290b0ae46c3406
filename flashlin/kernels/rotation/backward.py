"""Backward kernels of Mamba-3's rotation.

Let x be a row of q or k, b its bias, and y the rotated x + b. The gradient of x + b is the gradient of y,
rotated back. The q or k of a group gets the sum of these gradients over the group's heads. The gradient of an
angle is the cross product of each channel pair with its gradient. An angle affects all later tokens. So the
gradient of a token's own turn is the sum of the angles' gradients from that token to the end of the sequence.
As in the forward, this sum is computed per chunk, over the later chunks, and then for each token.
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
    """Rotate the channel pairs (even, odd) back by an angle with cosine c and sine s."""
    return even * c + odd * s, odd * c - even * s


@triton.jit
def columns_of(even, odd, BR: tl.constexpr):
    """Return the column sums of two tiles [BT, BR], interleaved in channel order: [2 BR]."""
    return tl.reshape(tl.join(tl.sum(even, 0), tl.sum(odd, 0)), [2 * BR])


@triton.jit
def with_line(even, odd, d, at, row, c, s, K: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr):
    """Rotate back the gradient of one row and add it to that row of the tiles even and odd, each [BT, BR].

    d: gradient of q_first or k_last, [N, H, K], or None.
    at: index of the sequence and head in d, that is n H + head.
    row: index of the row in the chunk. If it is outside of the chunk, nothing is added.
    c, s: cosine and sine of the angles, [BT, BR].
    even, odd: [BT, BR].
    """
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
    """Return the sequence, group, first chunk, slice of heads, first head and end head of this program.

    The H / G heads of a group are divided into ``shares`` slices. The heads of a slice run from the first
    head to the end head, which is excluded. S programs divide the chunks of a sequence, group and slice.
    Program i of them computes the chunks i, i + S, i + 2 S and so on.
    """
    program = tl.program_id(0)
    share = program % shares
    i_g = program // shares % G
    part = program // shares // G
    heads = H // G
    begin = i_g * heads + share * heads // shares
    return part // S, i_g, part % S, share.to(tl.int64), begin, i_g * heads + (share + 1) * heads // shares


@triton.jit(do_not_specialize=["T", "N", "G", "H", "S", "shares", "rows"])
def turn_back(
    q, k, q_bias, k_bias, weight, angle, dq_turned, dk_turned, dq_first, dk_last, dalike, dangle, dq, dk,
    dweight, dtheta, dq_bias, dk_bias, table, bounds, T, N, G, H, S, shares, rows, K: tl.constexpr,
    R: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, VARLEN: tl.constexpr,
):
    """Compute the gradients that pass through the rotated channels.

    One program computes chunks of one group, with one slice of its heads. It stores:

    dq, dk: gradients of q and k, summed over its heads.
    dweight: the rotated channels' part of the gradients of the weights.
    dtheta: gradients of the accumulated angles.
    dq_bias, dk_bias: gradients of the biases, one entry per chunk.
    table: the sum of dtheta over each chunk.

    q, k: [rows, G, K].
    q_bias, k_bias: [H, K].
    weight: [rows, H].
    angle: [rows, H, R], fp32.
    dq_turned: [rows, H, K]: row t is for the q of token t + 1.
    dk_turned: [rows, H, K].
    dq_first, dk_last: [N, H, K] or None.
    dalike: [rows, H] or None.
    dangle: [rows, H, R] or None.
    dq, dk: [shares, rows, G, K], fp32.
    dweight: [rows, H], fp32.
    dtheta: [rows, H, R], fp32.
    dq_bias, dk_bias: [slots, H, K], fp32.
    table: [slots, H, R], fp64.
    bounds: [N + 1] or None.
    G: number of groups.
    S: programs per sequence, group and slice of heads.
    shares: slices of a group's heads.
    """
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
            # A product of two rows is the same before and after both are rotated.
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
    """Add the gradient of one row to that row of x [BT, BD], for channels that are not rotated.

    d: gradient of q_first or k_last, [N, H, K], or None.
    at: index of the sequence and head in d.
    row: index of the row in the chunk. If it is outside of the chunk, nothing is added.
    d0: first channel.
    """
    if d is not None:
        x += tl.where((tl.arange(0, BT) == row)[:, None], line(d + at * K, d0, K, BD)[None, :], 0.0)
    return x


@triton.jit(do_not_specialize=["T", "N", "G", "H", "S", "shares", "rows"])
def turn_back_rest(
    q, k, q_bias, k_bias, weight, dq_turned, dk_turned, dq_first, dk_last, dalike, dq, dk, dweight_rest,
    dq_bias, dk_bias, bounds, T, N, G, H, S, shares, rows, K: tl.constexpr, BT: tl.constexpr,
    BR: tl.constexpr, BX: tl.constexpr, VARLEN: tl.constexpr,
):
    """Compute the gradients that pass through the channels that are not rotated.

    It stores the same gradients as ``turn_back``, except for those of the angles. The gradients of the
    weights go to ``dweight_rest`` and are added later.

    q, k: [rows, G, K].
    q_bias, k_bias: [H, K].
    weight: [rows, H].
    dq_turned: [rows, H, K]: row t is for the q of token t + 1.
    dk_turned: [rows, H, K].
    dq_first, dk_last: [N, H, K] or None.
    dalike: [rows, H] or None.
    dq, dk: [shares, rows, G, K], fp32.
    dweight_rest: [rows, H], fp32.
    dq_bias, dk_bias: [slots, H, K], fp32.
    bounds: [N + 1] or None.
    G: number of groups.
    S: programs per sequence, group and slice of heads.
    shares: slices of a group's heads.
    """
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
    angles, step, dtheta, carried, dangles, dstep, dbegan, bounds, T, N, H, S, R: tl.constexpr,
    BT: tl.constexpr, BR: tl.constexpr, VARLEN: tl.constexpr,
):
    """Compute the gradients of the raw angles, the steps and the initial angles from ``dtheta``.

    dtheta: gradients of the accumulated angles.
    carried: sum of dtheta over all later chunks, for each chunk.
    dangles, dstep, dbegan: receive the gradients.

    angles: [rows, H, R].
    step: [rows, H].
    dtheta: [rows, H, R], fp32.
    carried: [slots, H, R], fp64.
    dangles: [rows, H, R], fp32.
    dstep: [rows, H], fp32.
    dbegan: [N, H, R], fp32, or None.
    bounds: [N + 1] or None.
    S: programs per sequence and head.
    """
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
        # The factor is 2 pi: an angle is 2 pi times its turns.
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
    """Run the backward rotation and return the gradients of all inputs except bounds, in float32.

    angle: the angles that the forward returned.
    dy: contiguous gradients of the forward's outputs. Those of q and k must be tensors; others may be None.
    """
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
