"""Long sequences in parts: what lets one sequence fill a card.

A scan walks its sequence alone, so few sequences with few heads leave most of a card idle. Where the plan
says so (``Launch.part``), a sequence is cut into parts of L tokens, which all scans walk side by side:
    1. The state that each part would leave if it began with zeros (a family's states kernel, ALONE).
    2. Those carried on from part to part: h' = D h + alone, where D is what the part does to any state that
       enters it: the part's decay, a number or a vector over K, or of delta rules a K x K matrix, which is what
       the part leaves of the identity if nothing is written. Backward the same with D^T, from the last part.
    3. The scan as ever, each part from the state that enters it.
Nothing here depends on how many parts there are but the memory between the steps, and nothing waits for the
host: which parts packed sequences have, programs find out by themselves. What is carried stays float32, and
its products have at least 16 bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from flashlin.compat.launch import start
from flashlin.guards.problem import Plan
from flashlin.kernels.pieces import Batch, sequence_of, state_offsets


@triton.jit
def part_of(i_p, bounds, T, N, L, VARLEN: tl.constexpr):
    """Which part of which sequence i_p is: n, the number of the part in it, its first row and its length, and
    whether it is the sequence's last. All parts of a sequence but the last have L tokens; one of no tokens
    has one. Packed sequences leave numbers without a part between them: those have no tokens, and are nobody's
    last."""
    if VARLEN:
        n = i_p
        i_part = i_p * 0
        if L < T:  # the first of sequence n is part number bounds[n] // L + n: they never overlap
            n = i_p * 0
            high = tl.minimum(i_p, N - 1)
            while n < high:
                middle = (n + high + 1) // 2
                before = (tl.load(bounds + middle) // L).to(tl.int32) + middle <= i_p
                n = tl.where(before, middle, n)
                high = tl.where(before, high, middle - 1)
            i_part = i_p - n - (tl.load(bounds + n) // L).to(tl.int32)
    else:
        parts = tl.maximum((T - 1) // L + 1, 1)
        n = i_p // parts
        i_part = i_p % parts
    first, length = sequence_of(n, bounds, T, VARLEN)
    begin = i_part * L
    own = tl.maximum(tl.minimum(length - begin, L), 0)
    last = (begin + own == length) & ((own > 0) | (i_part == 0))
    return n, i_part, first + begin, own, last


@triton.jit
def parts_of(n, bounds, T, L, VARLEN: tl.constexpr):
    """The number of sequence n's first part, and how many it has."""
    first, length = sequence_of(n, bounds, T, VARLEN)
    parts = tl.maximum((length - 1) // L + 1, 1)
    if VARLEN:
        return n + (first // L).to(tl.int32), parts
    else:
        return n * parts, parts


@triton.jit(do_not_specialize=["T", "L"])
def carry_decayed(
    alone,  # [parts, H, K, V] or, with V_FIRST, [parts, H, V, K], fp32
    kept,  # [parts, H] or, with VECTOR, [parts, H, K], fp32, to base 2
    h0,  # [N, H, K, V] or, with V_FIRST, [N, H, V, K]
    bounds,  # [N + 1] or None
    T,  # tokens of a sequence
    H,  # heads
    L,  # tokens of a part
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    VECTOR: tl.constexpr,
    REVERSE: tl.constexpr,
    V_FIRST: tl.constexpr,
    HAS_H0: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """In place: what each part leaves alone becomes the state that enters it or, with REVERSE, the gradient
    of the state that leaves it. A program: a tile of one head's state."""
    NV: tl.constexpr = (V + BV - 1) // BV
    NK: tl.constexpr = (K + BK - 1) // BK
    program = tl.program_id(0)
    v0 = program % NV * BV
    k0 = program // NV % NK * BK
    nh = program // NV // NK
    i_h = nh % H
    first, parts = parts_of(nh // H, bounds, T, L, VARLEN)
    at, inside = state_offsets(nh, k0, v0, K, V, BK, BV, V_FIRST)
    if HAS_H0:
        h = tl.load(h0 + at, mask=inside, other=0.0).to(tl.float32)
    else:
        h = tl.zeros([BK, BV], dtype=tl.float32)
    for i in range(parts):
        if REVERSE:
            own = (first + parts - 1 - i) * H + i_h
        else:
            own = (first + i) * H + i_h
        to, inside = state_offsets(own, k0, v0, K, V, BK, BV, V_FIRST)
        more = inside & (i < parts - 1)  # of the last nobody has asked what it leaves
        left = tl.load(alone + to, mask=more, other=0.0)
        tl.store(alone + to, h, mask=inside)
        if VECTOR:
            columns = k0 + tl.arange(0, BK)
            decay = tl.load(kept + own.to(tl.int64) * K + columns, mask=(columns < K) & (i < parts - 1),
                            other=0.0)
            h = h * tl.exp2(decay)[:, None] + left
        else:
            h = h * tl.exp2(tl.load(kept + own, mask=i < parts - 1, other=0.0)) + left


@triton.jit(do_not_specialize=["T", "L"])
def carry_transferred(
    alone,  # [parts, H, K, V] or, with V_FIRST, [parts, H, V, K], fp32
    transfer,  # [parts, H, K, K], fp32
    undivided,  # [N, H], int32
    h0,  # [N, H, K, V] or, with V_FIRST, [N, H, V, K]
    bounds,  # [N + 1] or None
    T,  # tokens of a sequence
    H,  # heads
    L,  # tokens of a part
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BC: tl.constexpr,
    REVERSE: tl.constexpr,
    V_FIRST: tl.constexpr,
    HAS_H0: tl.constexpr,
    VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """carry_decayed where a part does more to a state than let it decay. undivided: heads of which a matrix
    leaves float32's range, as products of keys that are too long do, though no state need be in their way:
    those are walked as one part. A program: BV columns of one head's state."""
    NV: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    v0 = program % NV * BV
    nh = program // NV
    i_h = nh % H
    first, parts = parts_of(nh // H, bounds, T, L, VARLEN)
    at, inside = state_offsets(nh, 0, v0, K, V, BK, BV, V_FIRST)
    if HAS_H0:
        h = tl.load(h0 + at, mask=inside, other=0.0).to(tl.float32)
    else:
        h = tl.zeros([BK, BV], dtype=tl.float32)
    FROM: tl.constexpr = 0 if HAS_H0 else 1  # the first part to be entered by more than zeros
    largest = 0.0
    for i in range(parts):
        if REVERSE:
            own = (first + parts - 1 - i) * H + i_h
        else:
            own = (first + i) * H + i_h
        to, inside = state_offsets(own, 0, v0, K, V, BK, BV, V_FIRST)
        left = tl.load(alone + to, mask=inside & (i < parts - 1), other=0.0)
        tl.store(alone + to, h, mask=inside)
        tl.debug_barrier()  # what all threads have stored is read in another layout, and in slices
        if (i >= FROM) & (i < parts - 1):
            for c0 in range(0, K, BC):
                if REVERSE:
                    through, there = state_offsets(own, c0, 0, K, K, BC, BK, False)
                    D = tl.trans(tl.load(transfer + through, mask=there, other=0.0))
                else:
                    through, there = state_offsets(own, 0, c0, K, K, BK, BC, False)
                    D = tl.load(transfer + through, mask=there, other=0.0)
                to, inside = state_offsets(own, c0, v0, K, V, BC, BV, V_FIRST)
                left += tl.dot(D, tl.load(alone + to, mask=inside, other=0.0), input_precision=PRECISION)
                magnitude = tl.where(tl.abs(D) < 1e30, tl.abs(D), 1e30)  # of NaN, too
                largest = tl.maximum(largest, tl.max(tl.max(magnitude, 1), 0))
        h = left
    if v0 == 0:
        tl.store(undivided + nh, (largest >= 1e30).to(tl.int32))


@triton.jit
def identity_strip(
    strip,  # number of the strip
    NV: tl.constexpr,  # strips of v
    i_part,  # the part's number in its sequence
    length,  # its tokens
    last,  # whether it is the sequence's last
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_H0: tl.constexpr,
    HAS_DHT: tl.constexpr,
):
    """What a program begins with that computes what a part leaves alone or, past the strips of v, its
    transfer: zeros or columns of the identity; how many tokens it walks, none where nobody will ask for the
    result; and how many of v, none for the transfer."""
    columns = (strip - NV) * BV + tl.arange(0, BV)
    h = tl.where(tl.arange(0, BK)[:, None] == columns[None, :], 1.0, 0.0)
    left = tl.where(last, 0, length)
    through = length
    if not HAS_DHT:
        through = left
    if not HAS_H0:
        through = tl.where(i_part > 0, through, 0)
    return h, tl.where(strip < NV, left, through), tl.where(strip < NV, left, 0)


@triton.jit
def own_part(i_p, i_h, undivided, bounds, T, N, H, L, VARLEN: tl.constexpr, REVERSE: tl.constexpr):
    """As part_of, and the number of the part whose entering state is this program's. A head that is undivided
    is one part, its first; the others have no tokens then."""
    n, i_part, first, length, last = part_of(i_p, bounds, T, N, L, VARLEN)
    entered = i_p
    if undivided is not None:
        if tl.load(undivided + n * H + i_h) != 0:
            begin, whole = sequence_of(n, bounds, T, VARLEN)
            if REVERSE:
                entered = tl.where(i_part == 0, i_p + tl.maximum((whole - 1) // L, 0), i_p)
            first = begin
            length = tl.where(i_part == 0, whole, 0)
            last = i_part == 0
    return n, i_part, first, length, last, entered


def carried(
    plan: Plan,
    batch: Batch,
    part: dict[str, Any],
    alone: torch.Tensor,
    h0: torch.Tensor | None,
    reverse: bool,
    v_first: bool,
    *,
    kept: torch.Tensor | None = None,
    transfer: torch.Tensor | None = None,
    undivided: torch.Tensor | None = None,
) -> torch.Tensor:
    """The states [parts, H, K, V] that enter each part or, reverse, the gradients of those that leave it, in
    the place of ``alone``. h0: that of whole sequences. kept or transfer: what parts do to a state. undivided
    [N, H] int32, to write."""
    shared = dict(alone=alone, h0=h0, bounds=part["bounds"], T=part["T"], H=batch.HV, L=part["L"], K=batch.K,
                  V=batch.V, REVERSE=reverse, V_FIRST=v_first, HAS_H0=h0 is not None, VARLEN=batch.packed)
    if kept is not None:
        launch = plan.launch("carry_decayed")
        tiles = -(-batch.V // launch.block("BV")) * -(-batch.K // launch.block("BK"))
        start(launch, carry_decayed, part["N"] * batch.HV * tiles,
              dict(shared, kept=kept, VECTOR=kept.ndim == 3))
    else:
        launch = plan.launch("carry_transferred")
        start(launch, carry_transferred, part["N"] * batch.HV * -(-batch.V // launch.block("BV")),
              dict(shared, transfer=transfer, undivided=undivided, PRECISION=exact(plan)))
    return alone


def exact(plan: Plan) -> str:
    """How what is carried is multiplied: with 16 bits at least, whatever torch allows."""
    ampere = plan.target.backend == "cuda" and plan.target.capability >= (8, 0)
    return "tf32x3" if ampere else "ieee"
