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
from flashlin.guards.problem import Plan
from flashlin.kernels.pieces import beta_of, first_slot, put, sequence_of, tile
from flashlin.kernels.turning.forward import carry, chunks, pairs_of, put_pairs, turns
from flashlin.kernels.turning.inputs import Inputs


@triton.jit
def turned_back(even, odd, c, s):
    return even * c + odd * s, odd * c - even * s


@triton.jit
def columns_of(even, odd, BP: tl.constexpr):
    """[2 BP]: the sums of both over rows, as channels lie."""
    return tl.reshape(tl.join(tl.sum(even, 0), tl.sum(odd, 0)), [2 * BP])


@triton.jit
def pairs_of_line(x, K: tl.constexpr, BP: tl.constexpr):
    """(even, odd) channels of x [K], [BP] each in fp32."""
    channels = tl.arange(0, 2 * BP)
    b_x = tl.load(x + channels, mask=channels < K, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(b_x, [BP, 2]))


@triton.jit(do_not_specialize=["T", "N", "G", "H", "S"])
def turn_back(
    q,  # [rows, G, K]
    k,  # [rows, G, K]
    q_bias,  # [H, K]
    k_bias,  # [H, K]
    weight,  # [rows, H]
    k_before,  # [N, H, K] or None
    angle,  # [rows, H, R], fp32
    dq_turned,  # [rows, H, K]
    dk_later,  # [rows, H, K]
    dk_last,  # [N, H, K] or None
    dangle,  # [rows, H, R] or None
    dq,  # [rows, G, K], fp32
    dk,  # [rows, G, K], fp32
    dweight,  # [rows, H], fp32
    dk_before,  # [N, H, K], fp32, or None
    dtheta,  # [rows, H, R], fp32
    dq_bias,  # [slots, H, K], fp32
    dk_bias,  # [slots, H, K], fp32
    table,  # [slots, H, R], fp64
    bounds,  # [N + 1] or None
    T,  # tokens of a sequence
    N,  # sequences
    G,  # groups
    H,  # heads
    S,  # programs to a sequence and group
    K: tl.constexpr,
    R: tl.constexpr,
    BT: tl.constexpr,
    BP: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """The gradients of q and k, of weights, of a chunk's biases and angles, and what the latter add up to. A
    program: chunks of one group, with all heads that share it."""
    program = tl.program_id(0)
    i_g = program % G
    n = program // G // S
    first, length = sequence_of(n, bounds, T, VARLEN)
    slot = first_slot(n, first, BT)
    pairs = tl.arange(0, BP)
    channels = tl.arange(0, 2 * BP)
    rows = tl.arange(0, BT)
    for t0 in range(program // G % S * BT, length, S * BT):
        q_even, q_odd = pairs_of(q, None, first, t0, length, i_g, G, 0, K=K, BT=BT, BP=BP)
        k_even, k_odd = pairs_of(k, None, first, t0, length, i_g, G, 0, K=K, BT=BT, BP=BP)
        inside = (t0 + rows < length)[:, None]
        sum_q_even = tl.zeros([BT, BP], dtype=tl.float32)
        sum_q_odd = tl.zeros([BT, BP], dtype=tl.float32)
        sum_k_even = tl.zeros([BT, BP], dtype=tl.float32)
        sum_k_odd = tl.zeros([BT, BP], dtype=tl.float32)
        for i_h in range(i_g * (H // G), (i_g + 1) * (H // G)):
            place = (slot + t0 // BT) * H + i_h
            theta = tile(angle, first, t0, length, i_h, H, D=R, d0=0, BT=BT, BD=BP)
            c = tl.cos(theta)
            s = tl.sin(theta)
            even, odd = pairs_of(dq_turned, None, first, t0, length, i_h, H, 0, K=K, BT=BT, BP=BP)
            even, odd = turned_back(even, odd, c, s)
            sum_q_even += even
            sum_q_odd += odd
            tl.store(dq_bias + place * K + channels, columns_of(even, odd, BP), mask=channels < K)
            b_even, b_odd = pairs_of_line(q_bias + i_h * K, K, BP)
            crossed = (q_even + b_even[None, :]) * odd - (q_odd + b_odd[None, :]) * even
            even, odd = pairs_of(dk_later, None, first + 1, t0, length - 1, i_h, H, 0, K=K, BT=BT, BP=BP)
            even, odd = turned_back(even, odd, c, s)
            b_even, b_odd = pairs_of_line(k_bias + i_h * K, K, BP)
            x_even = k_even + b_even[None, :]
            x_odd = k_odd + b_odd[None, :]
            # turned or not, a product of both is the same
            tl.store(dweight + (first + 1 + t0 + rows) * H + i_h, tl.sum(even * x_even + odd * x_odd, 1),
                     mask=t0 + rows < length - 1)
            later = beta_of(weight, first + 1, t0, length - 1, i_h, H, BT=BT).to(tl.float32)[:, None]
            even *= later
            odd *= later
            if dk_last is not None:
                l_even, l_odd = pairs_of_line(dk_last + (n.to(tl.int64) * H + i_h) * K, K, BP)
                l_even, l_odd = turned_back(l_even[None, :], l_odd[None, :], c, s)
                is_last = (t0 + rows == length - 1)[:, None]
                even += tl.where(is_last, l_even, 0.0)
                odd += tl.where(is_last, l_odd, 0.0)
            sum_k_even += even
            sum_k_odd += odd
            tl.store(dk_bias + place * K + channels, columns_of(even, odd, BP), mask=channels < K)
            crossed += x_even * odd - x_odd * even
            if dangle is not None:
                crossed += tile(dangle, first, t0, length, i_h, H, D=R, d0=0, BT=BT, BD=BP).to(tl.float32)
            crossed = tl.where(inside, crossed, 0.0)
            put(dtheta, crossed, first, t0, length, i_h, H, D=R, d0=0, BT=BT, BD=BP)
            tl.store(table + place * R + pairs, tl.sum(crossed.to(tl.float64), 0), mask=pairs < R)
            if t0 == 0:
                product = 0.0
                if k_before is not None:
                    own = (n.to(tl.int64) * H + i_h) * K + channels
                    b_dk = tl.load(dk_later + (first * H + i_h) * K + channels, mask=channels < K,
                                   other=0.0).to(tl.float32)
                    b_k = tl.load(k_before + own, mask=channels < K, other=0.0).to(tl.float32)
                    product = tl.sum(b_dk * b_k, 0)
                    tl.store(dk_before + own, b_dk * tl.load(weight + first * H + i_h).to(tl.float32),
                             mask=channels < K)
                tl.store(dweight + first * H + i_h, product)
        put_pairs(dq, sum_q_even, sum_q_odd, first, t0, length, i_g, G, K=K, BT=BT, BP=BP)
        put_pairs(dk, sum_k_even, sum_k_odd, first, t0, length, i_g, G, K=K, BT=BT, BP=BP)


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
    T,  # tokens of a sequence
    N,  # sequences
    H,  # heads
    S,  # programs to a sequence and head
    R: tl.constexpr,
    BT: tl.constexpr,
    BR: tl.constexpr,
    VARLEN: tl.constexpr,
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
        sums = tl.cumsum(x.to(tl.float64), 0, reverse=True) + behind[None, :]
        dturn = sums.to(tl.float32)
        put(dangles, dturn * rate[:, None] * (1.0 - grown * grown), first, t0, length, i_h, H,
            D=R, d0=0, BT=BT, BD=BR)
        tl.store(dstep + (first + t0 + rows) * H + i_h, 3.141592653589793 * tl.sum(dturn * grown, 1),
                 mask=t0 + rows < length)
        if dbegan is not None:
            if t0 == 0:
                whole = tl.sum(tl.where((rows == 0)[:, None], dturn, 0.0), 0)
                tl.store(dbegan + (n * H + i_h) * R + pairs, whole, mask=pairs < R)


def run(plan: Plan, x: Inputs, angle: Tensor, dq: Tensor, dk: Tensor, dk_last: Tensor | None,
        dangle: Tensor | None) -> Inputs:
    """Gradients of all but bounds, float32. angle: what forward gave; dq, dk [B, T, H, K], dk_last [N, H, K]
    and dangle [B, T, H, R] or None: of what it gave, contiguous."""
    (B, T, G, K), (H, R), N, device = x.q.shape, x.angles.shape[2:], x.sequences, dq.device
    new = torch.empty if x.bounds is None else torch.zeros
    of_rows = (new(y.shape, dtype=torch.float32, device=device) for y in x[:7])
    of_states = (None if y is None else torch.zeros_like(y, dtype=torch.float32)
                 for y in (x.k_before, x.began))
    found = Inputs(*of_rows, *of_states)
    if x.k_before is not None and dk_last is not None:  # an empty sequence leaves what it began with
        found = found._replace(k_before=dk_last.to(torch.float32, copy=True))
    if not dq.numel():
        return found._replace(q_bias=torch.zeros_like(x.q_bias), k_bias=torch.zeros_like(x.k_bias))
    cut = chunks(x, plan.launch("turn_back").block("BT"))
    biases = [torch.zeros(cut.slots, H, K, dtype=torch.float32, device=device) for _ in range(2)]
    dtheta = torch.empty(B, T, H, R, dtype=torch.float32, device=device)
    table = torch.empty(cut.slots, H, R, dtype=torch.float64, device=device)
    shared = dict(x._asdict(), T=T, N=N, G=G, H=H, S=cut.S, dtheta=dtheta)
    constants = dict(R=R, VARLEN=x.bounds is not None)
    start(plan.launch("turn_back"), turn_back, N * cut.S * G, dict(constants, K=K), dict(
        shared, angle=angle, dq_turned=dq, dk_later=dk, dk_last=dk_last, dangle=dangle,
        dq=found.q, dk=found.k, dweight=found.weight, dk_before=found.k_before,
        dq_bias=biases[0], dk_bias=biases[1], table=table))
    start(plan.launch("turn_finish"), turn_finish, N * cut.S * H, constants, dict(
        shared, carried=carry(plan, x, table, None, back=True), dangles=found.angles, dstep=found.step,
        dbegan=found.began))
    return found._replace(q_bias=biases[0].sum(0), k_bias=biases[1].sum(0))
