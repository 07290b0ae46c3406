"""Mamba-3's rotation, forward: angles add up along a sequence, and turn pairs of channels of q and k. Tensors
in, tensors out.

    theta_t = theta_{t-1} + pi tanh(a_t) dt_t
    y_2i + i y_2i+1 = (x_2i + i x_2i+1 + bias) e^{i theta_ti}
The scan behind it gives each q what its token finds, which is what the token before left: so q goes a token
earlier. Angles are summed in turns: of each chunk of BT tokens one sum in float64, then what the chunks
before it add up to, so that chunks are independent of each other and long sequences lose no digits, and only
then each token's, in 32 bits of a turn, which lose whole turns by themselves. A chunk's place in a table is
first_slot's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashlin.compat.launch import start
from flashlin.guards.plan_types import Plan
from flashlin.kernels.rotation.inputs import Inputs, Outputs
from flashlin.kernels.tile_ops import beta_of, first_slot, put, sequence_of, tile


@triton.jit
def turns(
    angles,  # [rows, H, R]
    step,  # [rows, H]
    first, t0, length, i_h, H,
    R: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr,
):
    """(tanh of the angles [BT, BR], half of the steps [BT]), whose product is in turns; zeros past the
    end."""
    x = tile(angles, first, t0, length, i_h, H, D=R, d0=0, BT=BT, BD=BR).to(tl.float32)
    e = tl.exp(-2.0 * tl.abs(x))
    grown = (1.0 - e) / (1.0 + e)
    rate = beta_of(step, first, t0, length, i_h, H, BT=BT).to(tl.float32) * 0.5
    return tl.where(x < 0, -grown, grown), rate


@triton.jit(do_not_specialize=["T", "N", "H", "S"])
def turn_totals(
    angles,  # [rows, H, R]
    step,  # [rows, H]
    table,  # [slots, H, R], fp64
    bounds,  # [N + 1] or None
    T, N, H,
    S,  # programs to a sequence and head
    R: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, VARLEN: tl.constexpr,
):
    """By how many turns each chunk turns."""
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
    T, N, H,
    R: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr, BACK: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """What the chunks before each add up to, began, in radians, included; BACK those behind it. A program: a
    sequence and a head. Never a difference of sums, which one broken chunk would spoil for all."""
    program = tl.program_id(0)
    i_h = program % H
    n = program // H
    first, length = sequence_of(n, bounds, T, VARLEN)
    slot = first_slot(n, first, BT)
    pairs = tl.arange(0, BR)
    chunks = (length + BT - 1) // BT
    sums = tl.zeros([BR], dtype=tl.float64)
    if began is not None:
        angle = tl.load(began + program.to(tl.int64) * R + pairs, mask=pairs < R, other=0.0).to(tl.float64)
        sums += angle * 0.15915494309189535
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
def thetas(
    angles,  # [rows, H, R]
    step,  # [rows, H]
    carried,  # [R]: turns up to the chunk
    first, t0, length, i_h, H,
    R: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr,
):
    """[BT, BR] angles in 0 .. 2 pi; NaN from where one is not finite."""
    pairs = tl.arange(0, BR)
    rows = tl.arange(0, BT)
    grown, rate = turns(angles, step, first, t0, length, i_h, H, R=R, BT=BT, BR=BR)
    part = grown * rate[:, None]
    part -= tl.floor(part + 0.5)
    broken = tl.min(tl.where(part == part, BT, rows[:, None]), 0)
    # numbers of 32 bits that run over
    sums = tl.cumsum((part * 4294967296.0).to(tl.int32), 0).to(tl.int32)
    until = tl.load(carried + pairs, mask=pairs < R, other=0.0)
    until -= tl.floor(until)
    total = until.to(tl.float32)[None, :] + sums.to(tl.float32) * 2.3283064365386963e-10
    total -= tl.floor(total)
    return tl.where(rows[:, None] < broken[None, :], total * 6.283185307179586, float("nan"))


@triton.jit
def loaded(
    x,  # [rows, H, D]
    first, t0, length, i_h, H,
    D: tl.constexpr, d0: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, ABOVE: tl.constexpr,
):
    """[BT, BD] in fp32, from column d0 on, zeros outside; ABOVE of the row before each, zeros for the
    first."""
    rows = tl.arange(0, BT)
    cols = d0 + tl.arange(0, BD)
    mask = (t0 + rows < length)[:, None]
    if ABOVE:
        mask = mask & (t0 + rows > 0)[:, None]
        x -= H * D
    if d0 + BD > D:
        mask = mask & (cols < D)[None, :]
    offsets = rows[:, None] * (H * D) + cols[None, :]
    return tl.load(x + ((first + t0) * H + i_h) * D + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def stored(
    x,  # [rows, H, D]
    value,  # [BT, BD]
    first, t0, length, i_h, H,
    D: tl.constexpr, d0: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):
    """Store [BT, BD] into a [rows, H, D] tensor, from column d0 on."""
    rows = tl.arange(0, BT)
    cols = d0 + tl.arange(0, BD)
    mask = (t0 + rows < length)[:, None]
    if d0 + BD > D:
        mask = mask & (cols < D)[None, :]
    offsets = rows[:, None] * (H * D) + cols[None, :]
    tl.store(x + ((first + t0) * H + i_h) * D + offsets, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def line(x, d0, K: tl.constexpr, BD: tl.constexpr):
    """[BD] of x [K] in fp32."""
    channels = d0 + tl.arange(0, BD)
    return tl.load(x + channels, mask=channels < K, other=0.0).to(tl.float32)


@triton.jit
def split(x, BT: tl.constexpr, BP: tl.constexpr):
    """(even, odd) channels [BT, BP] of x [BT, 2 BP]."""
    return tl.split(tl.reshape(x, [BT, BP, 2]))


@triton.jit
def joined(even, odd, BT: tl.constexpr, BP: tl.constexpr):
    """[BT, 2 BP]: channels as they lie."""
    return tl.reshape(tl.join(even, odd), [BT, 2 * BP])


@triton.jit
def store_line(x, value, d0, K: tl.constexpr, BD: tl.constexpr):
    """Store [BD] into x [K]."""
    channels = d0 + tl.arange(0, BD)
    tl.store(x + channels, value.to(x.dtype.element_ty), mask=channels < K)


@triton.jit
def put_q(
    q_turned,  # [1 + rows, H, K]: the row before all is read by nobody
    q_first,  # [N, H, K]
    x,  # [BT, BD]
    first, t0, length, i_h,
    n,  # the sequence
    H,
    K: tl.constexpr, d0: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):
    """Store the q of tokens a row earlier, and a zero for the last of the sequence before."""
    is_first = (t0 + tl.arange(0, BT) == 0)[:, None]
    stored(q_turned, tl.where(is_first, 0.0, x), first, t0, length, i_h, H, D=K, d0=d0, BT=BT, BD=BD)
    if t0 == 0:
        store_line(q_first + (n.to(tl.int64) * H + i_h) * K, tl.sum(tl.where(is_first, x, 0.0), 0), d0, K, BD)


@triton.jit
def put_k(
    k_turned,  # [rows, H, K]
    k_last,  # [N, H, K]
    x,  # [BT, BD]
    weight,  # [BT]
    first, t0, length, i_h,
    n,  # the sequence
    H,
    K: tl.constexpr, d0: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):
    """Store the k of tokens times their weights, and the sequence's last without."""
    stored(k_turned, x * weight[:, None], first, t0, length, i_h, H, D=K, d0=d0, BT=BT, BD=BD)
    if t0 + BT >= length:
        is_last = (t0 + tl.arange(0, BT) == length - 1)[:, None]
        store_line(k_last + (n.to(tl.int64) * H + i_h) * K, tl.sum(tl.where(is_last, x, 0.0), 0), d0, K, BD)


@triton.jit(do_not_specialize=["T", "N", "G", "H", "S"])
def turn(
    q, k,  # [rows, G, K]
    q_bias, k_bias,  # [H, K]
    angles,  # [rows, H, R]
    step, weight,  # [rows, H]
    carried,  # [slots, H, R], fp64
    q_turned,  # [1 + rows, H, K]
    k_turned,  # [rows, H, K]
    q_first, k_last,  # [N, H, K]
    alike,  # [rows, H], fp32
    angle,  # [rows, H, R], fp32
    bounds,  # [N + 1] or None
    T, N,
    G,  # groups
    H,
    S,  # programs to a sequence and head
    K: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, BX: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """q of each head, turned, a token earlier; k, turned, times its weight; q . k; and the angle. The first 2
    BR channels are turned (by 0 from R on), BX others are not."""
    program = tl.program_id(0)
    i_h = program % H
    i_g = i_h // (H // G)
    n = program // H // S
    first, length = sequence_of(n, bounds, T, VARLEN)
    slot = first_slot(n, first, BT)
    rows = tl.arange(0, BT)
    q_bias += i_h * K
    k_bias += i_h * K
    for t0 in range(program // H % S * BT, length, S * BT):
        theta = thetas(angles, step, carried + ((slot + t0 // BT) * H + i_h) * R, first, t0, length, i_h, H,
                       R=R, BT=BT, BR=BR)
        put(angle, theta, first, t0, length, i_h, H, D=R, d0=0, BT=BT, BD=BR)
        c = tl.cos(theta)
        s = tl.sin(theta)
        b_weight = beta_of(weight, first, t0, length, i_h, H, BT=BT).to(tl.float32)
        b_q = loaded(q, first, t0, length, i_g, G, D=K, d0=0, BT=BT, BD=2 * BR, ABOVE=False)
        b_k = loaded(k, first, t0, length, i_g, G, D=K, d0=0, BT=BT, BD=2 * BR, ABOVE=False)
        b_q += line(q_bias, 0, K, 2 * BR)[None, :]
        b_k += line(k_bias, 0, K, 2 * BR)[None, :]
        product = tl.sum(b_q * b_k, 1)
        even, odd = split(b_q, BT, BR)
        put_q(q_turned, q_first, joined(even * c - odd * s, even * s + odd * c, BT, BR), first, t0, length,
              i_h, n, H, K=K, d0=0, BT=BT, BD=2 * BR)
        even, odd = split(b_k, BT, BR)
        put_k(k_turned, k_last, joined(even * c - odd * s, even * s + odd * c, BT, BR), b_weight, first, t0,
              length, i_h, n, H=H, K=K, d0=0, BT=BT, BD=2 * BR)
        if BX > 0:
            b_q = loaded(q, first, t0, length, i_g, G, D=K, d0=2 * BR, BT=BT, BD=BX, ABOVE=False)
            b_k = loaded(k, first, t0, length, i_g, G, D=K, d0=2 * BR, BT=BT, BD=BX, ABOVE=False)
            b_q += line(q_bias, 2 * BR, K, BX)[None, :]
            b_k += line(k_bias, 2 * BR, K, BX)[None, :]
            product += tl.sum(b_q * b_k, 1)
            put_q(q_turned, q_first, b_q, first, t0, length, i_h, n, H, K=K, d0=2 * BR, BT=BT, BD=BX)
            put_k(k_turned, k_last, b_k, b_weight, first, t0, length, i_h, n, H=H, K=K, d0=2 * BR, BT=BT,
                  BD=BX)
        tl.store(alike + (first + t0 + rows) * H + i_h, product, mask=t0 + rows < length)


def carry(plan: Plan, x: Inputs, table: Tensor, began: Tensor | None, back: bool) -> Tensor:
    """What chunks begin with, from what each adds."""
    launch, carried = plan.launch("turn_carry"), torch.empty_like(table)
    _, H, R = table.shape
    start(launch, turn_carry, x.sequences * H, dict(
        table=table, began=began, carried=carried, bounds=x.bounds, T=x.q.shape[1], N=x.sequences, H=H, R=R,
        BACK=back, VARLEN=x.bounds is not None))
    return carried


def launch_forward(plan: Plan, x: Inputs, dtype: torch.dtype) -> Outputs:
    """q, k, q_first and k_last of that dtype, the others in float32. Rows outside packed sequences are
    zero."""
    (B, T, G, K), (H, R), N, device = x.q.shape, x.angles.shape[2:], x.sequences, x.q.device
    new = torch.empty if x.bounds is None else torch.zeros
    q = new(1 + B * T, H, K, dtype=dtype, device=device)  # the first of which is not given
    q[-1:] = 0
    k = new(B, T, H, K, dtype=dtype, device=device)
    alike, angle = (new(B, T, H, *more, dtype=torch.float32, device=device) for more in ((), (R,)))
    q_first, k_last = (torch.zeros(N, H, K, dtype=dtype, device=device) for _ in range(2))
    y = Outputs(q[1:].view(k.shape), k, q_first, k_last, alike, angle)
    if not k.numel():
        return y
    S, slots = x.chunks(plan.launch("turn").block("BT"))
    shared = dict(x._asdict(), T=T, N=N, G=G, H=H, S=S, table=q.new_empty(slots, H, R, dtype=torch.float64))
    programs, constants = N * S * H, dict(R=R, VARLEN=x.bounds is not None)
    start(plan.launch("turn_totals"), turn_totals, programs, constants, shared)
    shared["carried"] = carry(plan, x, shared["table"], x.began, back=False)
    start(plan.launch("turn"), turn, programs, dict(constants, K=K),
          dict(shared, q_turned=q, k_turned=k, q_first=q_first, k_last=k_last, alike=alike, angle=angle))
    return y
