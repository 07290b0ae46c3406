"""Forward kernels of Mamba-3's rotation: angles accumulate along a sequence and rotate pairs of channels.

For token t and channel pair i, with the raw angle a, the step dt and x one of q and k:

    theta_t = theta_{t-1} + pi tanh(a_t) dt_t
    y_2i + i y_2i+1 = (x_2i + i x_2i+1 + bias) e^{i theta_ti}

In Mamba-3, q reads the state that the previous token leaves. The scan that follows lets each q read the state
after its own row. So the rotation stores each q one row early.

Angles are summed in turns (1 turn is 2 pi) in three steps:

1. ``turn_totals`` sums the turns of each chunk of BT tokens in float64.
2. ``turn_carry`` adds the totals of all earlier chunks, also in float64.
3. ``turn`` adds the turns of the tokens within a chunk, as 32-bit fractions of a turn. Overflow drops whole
   turns.

So chunks are independent of each other, and long sequences lose no precision. ``first_slot`` gives the index
of a sequence's first chunk in the tables of steps 1 and 2.
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
def turns(angles, step, first, t0, length, i_h, H, R: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr):
    """Return two factors of each token's rotation in turns of 2 pi: tanh of the angles and half of the steps.

    The rotation is their product. The first factor is [BT, BR], the second [BT], both fp32. Rows after the
    end of the sequence are zero.

    angles: [rows, H, R].
    step: [rows, H].
    """
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
    S,  # programs per sequence and head
    R: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, VARLEN: tl.constexpr,
):
    """Store the total rotation of each chunk into ``table``, in turns of 2 pi."""
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
    """Store the rotation before each chunk, in turns of 2 pi: the initial angle plus all earlier chunks.

    With BACK the sums are over all later chunks, without an initial angle. One program computes one sequence
    and one head. Sums are never formed as differences of longer sums, because one chunk that is not finite
    would then spoil all others.

    table: the total of each chunk.
    began: the initial angles in radians, or None.
    carried: receives the sums.
    """
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
        at = s0 + tl.arange(0, BS)  # the loop visits chunks in this order: with BACK, 0 is the last chunk
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
        # Take the last row, because "sums += tl.sum(x, 0)" crashes the compiler of Triton 3.0.
        sums = tl.sum(tl.where((at == s0 + BS - 1)[:, None], until, 0.0), 0)


@triton.jit
def thetas(angles, step, carried, first, t0, length, i_h, H, R: tl.constexpr, BT: tl.constexpr,
           BR: tl.constexpr):
    """Return the accumulated angles of a chunk's tokens, [BT, BR] in fp32, within 0 .. 2 pi.

    A token with an angle that is not finite gets NaN, as do all later tokens of the chunk.

    angles, step: the raw angles and the step sizes.
    carried: the rotation before the chunk, in turns of 2 pi.
    angles: [rows, H, R].
    """
    pairs = tl.arange(0, BR)
    rows = tl.arange(0, BT)
    grown, rate = turns(angles, step, first, t0, length, i_h, H, R=R, BT=BT, BR=BR)
    part = grown * rate[:, None]
    part -= tl.floor(part + 0.5)
    broken = tl.min(tl.where(part == part, BT, rows[:, None]), 0)
    # In 32-bit integers one turn is 2**32, so overflow drops whole turns.
    sums = tl.cumsum((part * 4294967296.0).to(tl.int32), 0).to(tl.int32)
    until = tl.load(carried + pairs, mask=pairs < R, other=0.0)
    until -= tl.floor(until)
    total = until.to(tl.float32)[None, :] + sums.to(tl.float32) * 2.3283064365386963e-10
    total -= tl.floor(total)
    return tl.where(rows[:, None] < broken[None, :], total * 6.283185307179586, float("nan"))


@triton.jit
def loaded(x, first, t0, length, i_h, H, D: tl.constexpr, d0: tl.constexpr, BT: tl.constexpr,
           BD: tl.constexpr, ABOVE: tl.constexpr):
    """Load a [BT, BD] tile of head i_h of x in fp32, from column d0, with zeros outside of x.

    With ABOVE, row t of the tile is row t - 1 of the sequence, and zero for the first token.

    x: [rows, H, D].
    """
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
def stored(x, value, first, t0, length, i_h, H, D: tl.constexpr, d0: tl.constexpr, BT: tl.constexpr,
           BD: tl.constexpr):
    """Store a [BT, BD] tile into head i_h of x [rows, H, D], from column d0.

    x: [rows, H, D].
    value: [BT, BD].
    """
    rows = tl.arange(0, BT)
    cols = d0 + tl.arange(0, BD)
    mask = (t0 + rows < length)[:, None]
    if d0 + BD > D:
        mask = mask & (cols < D)[None, :]
    offsets = rows[:, None] * (H * D) + cols[None, :]
    tl.store(x + ((first + t0) * H + i_h) * D + offsets, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def line(x, d0, K: tl.constexpr, BD: tl.constexpr):
    """Load BD elements of a vector x [K] in fp32, starting at d0, with zeros outside of x."""
    channels = d0 + tl.arange(0, BD)
    return tl.load(x + channels, mask=channels < K, other=0.0).to(tl.float32)


@triton.jit
def split(x, BT: tl.constexpr, BP: tl.constexpr):
    """Split x [BT, 2 BP] into its even and its odd channels, each [BT, BP]."""
    return tl.split(tl.reshape(x, [BT, BP, 2]))


@triton.jit
def joined(even, odd, BT: tl.constexpr, BP: tl.constexpr):
    """Interleave even and odd channels, each [BT, BP], to a tile [BT, 2 BP]."""
    return tl.reshape(tl.join(even, odd), [BT, 2 * BP])


@triton.jit
def store_line(x, value, d0, K: tl.constexpr, BD: tl.constexpr):
    """Store BD values into a vector x [K], starting at d0."""
    channels = d0 + tl.arange(0, BD)
    tl.store(x + channels, value.to(x.dtype.element_ty), mask=channels < K)


@triton.jit
def put_q(q_turned, q_first, x, first, t0, length, i_h, n, H, K: tl.constexpr, d0: tl.constexpr,
          BT: tl.constexpr, BD: tl.constexpr):
    """Store the rotated q of a chunk one row early, and the q of the sequence's first token into q_first.

    One row early, the first token's q would be in the row of the previous sequence's last token. This row
    gets zeros instead.

    q_turned: [1 + rows, H, K]: row 0 is never read.
    q_first: [N, H, K].
    x: [BT, BD].
    n: the sequence.
    """
    is_first = (t0 + tl.arange(0, BT) == 0)[:, None]
    stored(q_turned, tl.where(is_first, 0.0, x), first, t0, length, i_h, H, D=K, d0=d0, BT=BT, BD=BD)
    if t0 == 0:
        store_line(q_first + (n.to(tl.int64) * H + i_h) * K, tl.sum(tl.where(is_first, x, 0.0), 0), d0, K, BD)


@triton.jit
def put_k(k_turned, k_last, x, weight, first, t0, length, i_h, n, H, K: tl.constexpr, d0: tl.constexpr,
          BT: tl.constexpr, BD: tl.constexpr):
    """Store the rotated k of a chunk times its weights, and the last k, unweighted, into k_last.

    k_turned: [rows, H, K].
    k_last: [N, H, K].
    x: [BT, BD].
    weight: [BT].
    n: the sequence.
    """
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
    G,  # number of groups
    H,
    S,  # programs per sequence and head
    K: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, BX: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """Rotate q and k of each head and store all forward outputs.

    q_turned: the rotated q, one row early.
    k_turned: the rotated k times its weight.
    q_first, k_last: the rotated q of each first token and the rotated k of each last token.
    alike: the product q . k of each token.
    angle: the angle of each channel pair.

    The first 2 BR channels are rotated; pairs from index R on have the angle 0. The other BX channels are not
    rotated.
    """
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
    """Start ``turn_carry`` and return the rotation before each chunk, given the rotation of each chunk.

    Both are in turns of 2 pi.

    table: [slots, H, R] float64, the rotation of each chunk.
    began: [N, H, R], the initial angles in radians, or None.
    back: sum over the later chunks instead of the earlier ones.
    """
    launch, carried = plan.launch("turn_carry"), torch.empty_like(table)
    _, H, R = table.shape
    start(launch, turn_carry, x.sequences * H, dict(
        table=table, began=began, carried=carried, bounds=x.bounds, T=x.q.shape[1], N=x.sequences, H=H, R=R,
        BACK=back, VARLEN=x.bounds is not None))
    return carried


def launch_forward(plan: Plan, x: Inputs, dtype: torch.dtype) -> Outputs:
    """Run the forward rotation and return its outputs.

    q, k, q_first and k_last have the given dtype, all others are float32. Rows outside packed sequences are
    zero.
    """
    (B, T, G, K), (H, R), N, device = x.q.shape, x.angles.shape[2:], x.sequences, x.q.device
    new = torch.empty if x.bounds is None else torch.zeros
    q = new(1 + B * T, H, K, dtype=dtype, device=device)  # row 0 is not returned
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
