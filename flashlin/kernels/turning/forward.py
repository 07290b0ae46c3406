"""Mamba-3's rotation, forward: angles add up along a sequence, and turn pairs of channels of q and k. Tensors
in, tensors out.

    theta_t = theta_{t-1} + pi tanh(a_t) dt_t
    y_2i + i y_2i+1 = (x_2i + i x_2i+1 + bias) e^{i theta_ti}
The scan behind it reads each k one token later, so it is written there, times a weight of that token.
Sums are float64: of each chunk of BT tokens one, then what the chunks before it add up to, and only then each
token's, so that chunks are independent of each other and long sequences lose no digits. A chunk's place in a
table is first_slot's.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashlin.compat.launch import start
from flashlin.guards.problem import Plan
from flashlin.kernels.pieces import beta_of, first_slot, put, sequence_of, tile
from flashlin.kernels.turning.inputs import Inputs, Outputs


@triton.jit
def turns(
    angles,  # [rows, H, R]
    step,  # [rows, H]
    first,  # the sequence's first row
    t0,  # the chunk's first token
    length,  # the sequence's length
    i_h,  # the head
    H,  # heads
    R: tl.constexpr,
    BT: tl.constexpr,
    BR: tl.constexpr,
):
    """(tanh of the angles [BT, BR], pi times the steps [BT]), zeros past the end."""
    x = tile(angles, first, t0, length, i_h, H, D=R, d0=0, BT=BT, BD=BR).to(tl.float32)
    e = tl.exp(-2.0 * tl.abs(x))
    grown = (1.0 - e) / (1.0 + e)
    rate = beta_of(step, first, t0, length, i_h, H, BT=BT).to(tl.float32) * 3.141592653589793
    return tl.where(x < 0, -grown, grown), rate


@triton.jit(do_not_specialize=["T", "N", "H", "S"])
def turn_totals(
    angles,  # [rows, H, R]
    step,  # [rows, H]
    table,  # [slots, H, R], fp64
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
    """By how much each chunk turns."""
    program = tl.program_id(0)
    i_h = program % H
    n = program // H // S
    first, length = sequence_of(n, bounds, T, VARLEN)
    slot = first_slot(n, first, BT)
    pairs = tl.arange(0, BR)
    for t0 in range(program // H % S * BT, length, S * BT):
        grown, rate = turns(angles, step, first, t0, length, i_h, H, R=R, BT=BT, BR=BR)
        total = tl.sum((grown * rate[:, None]).to(tl.float64), 0)
        tl.store(table + ((slot + t0 // BT) * H + i_h) * R + pairs, total, mask=pairs < R)


@triton.jit(do_not_specialize=["T", "N", "H"])
def turn_carry(
    table,  # [slots, H, R], fp64
    began,  # [N, H, R] or None
    carried,  # [slots, H, R], fp64
    bounds,  # [N + 1] or None
    T,  # tokens of a sequence
    N,  # sequences
    H,  # heads
    R: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    BR: tl.constexpr,
    BACK: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """What the chunks before each add up to, began included; BACK those behind it. A program: a sequence and
    a head. Never a difference of sums, which one broken chunk would spoil for all."""
    program = tl.program_id(0)
    i_h = program % H
    n = program // H
    first, length = sequence_of(n, bounds, T, VARLEN)
    slot = first_slot(n, first, BT)
    pairs = tl.arange(0, BR)
    chunks = (length + BT - 1) // BT
    sums = tl.zeros([BR], dtype=tl.float64)
    if began is not None:
        sums += tl.load(began + program.to(tl.int64) * R + pairs, mask=pairs < R, other=0.0).to(tl.float64)
    for s0 in range(0, chunks, BS):
        at = s0 + tl.arange(0, BS)  # in the order of the walk
        if BACK:
            chunk = chunks - 1 - at
            before = chunk + 1
        else:
            chunk = at
            before = chunk - 1
        there = (at < chunks)[:, None] & (pairs < R)[None, :]
        x = tl.load(table + ((slot + before)[:, None] * H + i_h) * R + pairs[None, :],
                    mask=there & (at > 0)[:, None], other=0.0)
        until = sums[None, :] + tl.cumsum(x, 0)
        tl.store(carried + ((slot + chunk)[:, None] * H + i_h) * R + pairs[None, :], until, mask=there)
        # the last row; "sums += tl.sum(x, 0)" ends the compiler of Triton 3.0
        sums = tl.sum(tl.where((at == s0 + BS - 1)[:, None], until, 0.0), 0)


@triton.jit
def pairs_of(
    x,  # [rows, G, K]
    bias,  # [H, K] or None
    first,  # the sequence's first row
    t0,  # the chunk's first token
    length,  # the sequence's length
    i_g,  # the group
    G,  # groups
    i_h,  # the head
    K: tl.constexpr,
    BT: tl.constexpr,
    BP: tl.constexpr,
):
    """(even, odd) channels of x, [BT, BP] each in fp32, plus the bias of a head."""
    b_x = tile(x, first, t0, length, i_g, G, D=K, d0=0, BT=BT, BD=2 * BP).to(tl.float32)
    if bias is not None:
        channels = tl.arange(0, 2 * BP)
        b_x += tl.load(bias + i_h * K + channels, mask=channels < K, other=0.0).to(tl.float32)[None, :]
    return tl.split(tl.reshape(b_x, [BT, BP, 2]))


@triton.jit
def joined(even, odd, BT: tl.constexpr, BP: tl.constexpr):
    """[BT, 2 BP]: channels as they lie."""
    return tl.reshape(tl.join(even, odd), [BT, 2 * BP])


@triton.jit
def put_pairs(
    x,  # [rows, H, K]
    even,  # [BT, BP]
    odd,  # [BT, BP]
    first,  # the sequence's first row
    t0,  # the chunk's first token
    length,  # the sequence's length
    i_h,  # the head
    H,  # heads
    K: tl.constexpr,
    BT: tl.constexpr,
    BP: tl.constexpr,
):
    """Store what pairs_of loads."""
    put(x, joined(even, odd, BT=BT, BP=BP), first, t0, length, i_h, H, D=K, d0=0, BT=BT, BD=2 * BP)


@triton.jit(do_not_specialize=["T", "N", "G", "H", "S"])
def turn(
    q,  # [rows, G, K]
    k,  # [rows, G, K]
    q_bias,  # [H, K]
    k_bias,  # [H, K]
    angles,  # [rows, H, R]
    step,  # [rows, H]
    weight,  # [rows, H]
    k_before,  # [N, H, K] or None
    carried,  # [slots, H, R], fp64
    q_turned,  # [rows, H, K]
    k_later,  # [rows, H, K]
    k_last,  # [N, H, K]
    angle,  # [rows, H, R], fp32
    bounds,  # [N + 1] or None
    T,  # tokens of a sequence
    N,  # sequences
    G,  # groups
    H,  # heads
    S,  # programs to a sequence and head
    K: tl.constexpr,
    R: tl.constexpr,
    BT: tl.constexpr,
    BP: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """q of each head, turned, and by which angle, within 0 .. 2 pi; k, turned, a token later and times that
    one's weight. Pairs from R on turn by 0."""
    program = tl.program_id(0)
    i_h = program % H
    i_g = i_h // (H // G)
    n = program // H // S
    first, length = sequence_of(n, bounds, T, VARLEN)
    slot = first_slot(n, first, BT)
    pairs = tl.arange(0, BP)
    channels = tl.arange(0, 2 * BP)
    own = (n.to(tl.int64) * H + i_h) * K + channels
    for t0 in range(program // H % S * BT, length, S * BT):
        grown, rate = turns(angles, step, first, t0, length, i_h, H, R=R, BT=BT, BR=BP)
        sums = tl.cumsum((grown * rate[:, None]).to(tl.float64), 0)
        place = ((slot + t0 // BT) * H + i_h) * R
        sums += tl.load(carried + place + pairs, mask=pairs < R, other=0.0)[None, :]
        theta = (sums - 6.283185307179586 * tl.floor(sums * 0.15915494309189535)).to(tl.float32)
        put(angle, theta, first, t0, length, i_h, H, D=R, d0=0, BT=BT, BD=BP)
        c = tl.cos(theta)
        s = tl.sin(theta)
        even, odd = pairs_of(q, q_bias, first, t0, length, i_g, G, i_h, K=K, BT=BT, BP=BP)
        put_pairs(q_turned, even * c - odd * s, even * s + odd * c, first, t0, length, i_h, H,
                  K=K, BT=BT, BP=BP)
        even, odd = pairs_of(k, k_bias, first, t0, length, i_g, G, i_h, K=K, BT=BT, BP=BP)
        x = joined(even * c - odd * s, even * s + odd * c, BT=BT, BP=BP)
        later = beta_of(weight, first + 1, t0, length - 1, i_h, H, BT=BT).to(tl.float32)
        put(k_later, x * later[:, None], first + 1, t0, length - 1, i_h, H, D=K, d0=0, BT=BT, BD=2 * BP)
        if t0 + BT >= length:
            is_last = (t0 + tl.arange(0, BT) == length - 1)[:, None]
            tl.store(k_last + own, tl.sum(tl.where(is_last, x, 0.0), 0).to(k_last.dtype.element_ty),
                     mask=channels < K)
        if t0 == 0:
            b_k = tl.zeros([2 * BP], dtype=tl.float32)
            if k_before is not None:
                b_k = tl.load(k_before + own, mask=channels < K, other=0.0).to(tl.float32)
                b_k *= tl.load(weight + first * H + i_h).to(tl.float32)
            tl.store(k_later + (first * H + i_h) * K + channels, b_k.to(k_later.dtype.element_ty),
                     mask=channels < K)


class Chunks(NamedTuple):
    """How a call is cut into chunks of BT tokens: S programs to a sequence, slots of a table."""
    S: int
    slots: int


def chunks(x: Inputs, BT: int) -> Chunks:
    rows, N = x.q.shape[0] * x.q.shape[1], max(x.sequences, 1)
    return Chunks(max(1, -(-rows // (BT * N))), rows // BT + N + 1)


def carry(plan: Plan, x: Inputs, table: Tensor, began: Tensor | None, back: bool) -> Tensor:
    """What chunks begin with, from what each adds."""
    launch, carried = plan.launch("turn_carry"), torch.empty_like(table)
    _, H, R = table.shape
    start(launch, turn_carry, x.sequences * H, dict(
        table=table, began=began, carried=carried, bounds=x.bounds, T=x.q.shape[1], N=x.sequences, H=H, R=R,
        BACK=back, VARLEN=x.bounds is not None))
    return carried


def run(plan: Plan, x: Inputs, dtype: torch.dtype) -> Outputs:
    """q, k and k_last of that dtype, angles in float32. Rows outside packed sequences are zero."""
    (B, T, G, K), (H, R), N = x.q.shape, x.angles.shape[2:], x.sequences
    new = torch.empty if x.bounds is None else torch.zeros
    q, k = (new(B, T, H, K, dtype=dtype, device=x.q.device) for _ in range(2))
    angle = new(B, T, H, R, dtype=torch.float32, device=x.q.device)
    # an empty sequence leaves what it began with
    k_last = q.new_zeros(N, H, K) if x.k_before is None else x.k_before.to(dtype, copy=True)
    y = Outputs(q, k, k_last, angle)
    if not q.numel():
        return y
    cut = chunks(x, plan.launch("turn").block("BT"))
    shared = dict(x._asdict(), T=T, N=N, G=G, H=H, S=cut.S,
                  table=q.new_empty(cut.slots, H, R, dtype=torch.float64))
    programs, constants = N * cut.S * H, dict(R=R, VARLEN=x.bounds is not None)
    start(plan.launch("turn_totals"), turn_totals, programs, constants, shared)
    shared["carried"] = carry(plan, x, shared["table"], x.began, back=False)
    start(plan.launch("turn"), turn, programs, dict(constants, K=K),
          dict(shared, q_turned=q, k_later=k, k_last=k_last, angle=angle))
    return y
