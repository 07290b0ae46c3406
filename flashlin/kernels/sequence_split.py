"""Long sequences in parts: what lets one sequence fill a card.

A scan walks its sequence alone, so few sequences with few heads leave most of a card idle. Where the plan
says so (``Launch.part``), a sequence is cut into parts of L tokens, which all scans walk side by side:
    1. The state that each part would leave if it began with zeros (``parts.py`` of each family; of a delta
       rule's gradients its reverse scan, ALONE).
    2. Those carried on from part to part: h' = D h + alone, where D is what the part does to any state that
       enters it: the part's decay, a number or a vector over K, or of delta rules a K x K matrix, which is
       what the part leaves of the identity if nothing is written. Backward the same with D^T, from the last
       part.
    3. The scan as ever, each part from the state that enters it.
Nothing here depends on how many parts there are but the memory between the steps, and nothing waits for the
host: which parts packed sequences have, programs find out by themselves. What is carried stays float32, and
its products have at least 16 bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from flashlin.compat.launch import enter, start
from flashlin.kernels.batch import Batch, precision
from flashlin.kernels.tile_ops import sequence_of, state_offsets


@triton.jit
def part_of(i_p, bounds, T, N, L, VARLEN: tl.constexpr):
    """Which part of which sequence i_p is: n, the number of the part in it, its first row and its length, and
    whether it is the sequence's last. All parts of a sequence but the last have L tokens; one of no tokens
    has one. Packed sequences leave numbers without a part between them: those have no tokens, and are
    nobody's last."""
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
    T, H, L,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, VECTOR: tl.constexpr,
    REVERSE: tl.constexpr, V_FIRST: tl.constexpr, HAS_H0: tl.constexpr, VARLEN: tl.constexpr,
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
    T, H, L,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
    REVERSE: tl.constexpr, V_FIRST: tl.constexpr, HAS_H0: tl.constexpr, VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """carry_decayed where a part does more to a state than let it decay. undivided is set for heads whose
    states are not finite then, be it only on the way: products of keys that are too long leave float32's
    range though no state need be in their way, and 0 x inf is NaN. Such a head is walked as one part. A
    program: BV columns of one head's state. A matrix that is too large to be taken at once (BC < BK) is taken
    in slices, and so is the state, from where it was stored."""
    NV: tl.constexpr = (V + BV - 1) // BV
    FROM: tl.constexpr = 0 if HAS_H0 else 1  # the first part to be entered by more than zeros
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
    beyond = tl.zeros([BK, BV], dtype=tl.int32)
    for i in range(parts):
        if REVERSE:
            own = (first + parts - 1 - i) * H + i_h
        else:
            own = (first + i) * H + i_h
        to, inside = state_offsets(own, 0, v0, K, V, BK, BV, V_FIRST)
        left = tl.load(alone + to, mask=inside & (i < parts - 1), other=0.0)
        tl.store(alone + to, h, mask=inside)
        beyond = tl.where(tl.abs(h) < 1e30, beyond, 1)  # NaN is not below, either
        asked = (i >= FROM) & (i < parts - 1)
        if BC >= BK:
            through, there = state_offsets(own, 0, 0, K, K, BK, BK, False)
            D = tl.load(transfer + through, mask=there & asked, other=0.0)
            if REVERSE:
                D = tl.trans(D)
            h = left + tl.dot(D, h, input_precision=PRECISION)
        else:
            tl.debug_barrier()  # all threads have stored what is read in another layout now
            for c0 in range(0, tl.where(asked, K, 0), BC):
                if REVERSE:
                    through, there = state_offsets(own, c0, 0, K, K, BC, BK, False)
                    D = tl.trans(tl.load(transfer + through, mask=there, other=0.0))
                else:
                    through, there = state_offsets(own, 0, c0, K, K, BK, BC, False)
                    D = tl.load(transfer + through, mask=there, other=0.0)
                strip, there = state_offsets(own, c0, v0, K, V, BC, BV, V_FIRST)
                left += tl.dot(D, tl.load(alone + strip, mask=there, other=0.0), input_precision=PRECISION)
            h = left
    if tl.max(tl.max(beyond, 1), 0) > 0:
        tl.store(undivided + nh, 1)


@triton.jit
def identity_strip(
    strip,  # number of the strip
    NV: tl.constexpr,  # strips of v
    i_part,  # the part's number in its sequence
    length,  # its tokens
    last,  # whether it is the sequence's last
    BK: tl.constexpr, BV: tl.constexpr, HAS_H0: tl.constexpr, HAS_DHT: tl.constexpr,
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
def added(h, left, right, PRECISION: tl.constexpr):
    """h + left right, the product summed up apart. Tensor cores round what they add to an accumulator towards
    zero, which adds up where all of it is a little less than 1, as in a transfer of weak keys. An fma, since
    a compiler makes one operation of a product and a plain sum."""
    return tl.fma(tl.dot(left, right, input_precision=PRECISION), tl.full(h.shape, 1.0, tl.float32), h)


@triton.jit
def own_part(
    i_p,  # number of the part
    i_h,
    undivided,  # [N, H], int32, or None
    bounds,  # [N + 1] or None
    T, N, H, L,
    VARLEN: tl.constexpr, REVERSE: tl.constexpr,
):
    """As part_of, and the number of the part whose entering state is this program's. A head that is undivided
    is one part, its first; the others have no tokens then."""
    n, i_part, first, length, last = part_of(i_p, bounds, T, N, L, VARLEN)
    entered = i_p
    if undivided is not None:  # known when compiling: "and" would load from nothing
        if tl.load(undivided + n * H + i_h) != 0:
            begin, whole = sequence_of(n, bounds, T, VARLEN)
            if REVERSE:
                entered = tl.where(i_part == 0, i_p + tl.maximum((whole - 1) // L, 0), i_p)
            first = begin
            length = tl.where(i_part == 0, whole, 0)
            last = i_part == 0
    return n, i_part, first, length, last, entered


def by_decays(batch: Batch, part: dict[str, Any], kernel: Any, constants: dict[str, Any],
              operands: tuple[str, str], reverse: bool = False, vector: bool = False) -> None:
    """Put into part the states that enter the parts of split sequences, as h0; with reverse put the gradients
    of those that leave them, as dht. Of whole sequences those that the call has stay.

    They are [parts, H, K, V] or, as the constant V_FIRST says, [parts, H, V, K]. part: what launches share.
    kernel: the family's, which writes ``alone`` and ``kept`` for its operands x and y, named as in part.
    vector: whether decays are vectors over K.
    """
    if not batch.split:
        _enter(part, reverse)
        return
    (x, y), alone = operands, _states(batch, part, constants)
    kept = torch.empty(*alone.shape[:2], *([batch.K] if vector else ()), dtype=torch.float32,
                       device=batch.device)
    batch.scan(kernel, dict(constants, x=part[x], y=part[y], alone=alone, kept=kept, REVERSE=reverse), part)
    _enter(part, reverse)
    _carry(batch, part, constants, carry_decayed, reverse, alone=alone, kept=kept, VECTOR=vector)


def by_transfers(batch: Batch, part: dict[str, Any], kernel: Any, constants: dict[str, Any],
                 has_dht: bool = False) -> None:
    """Put into part, what launches share, as h0 the states that enter the parts of split sequences (of whole
    ones those that the call has stay), and ``undivided`` and ``transfer``, see carry_transferred.

    kernel: the family's, which writes ``alone`` and ``transfer`` and clears ``undivided``. has_dht: whether
    ``back_by_transfers`` follows, and gradients enter the last parts, too.
    """
    part.update(undivided=None, transfer=None)
    if not batch.split:
        _enter(part)
        return
    launch, alone = batch.plan.launch(kernel.fn.__name__), _states(batch, part, constants)
    BV = launch.block("BV")
    part["transfer"] = torch.empty(*alone.shape[:2], batch.K, batch.K, dtype=torch.float32,
                                   device=batch.device)
    part["undivided"] = torch.empty(part["N"], batch.HV, dtype=torch.int32, device=batch.device)
    start(launch, kernel, part["parts"] * batch.HV * (-(-batch.V // BV) - (-batch.K // BV)), dict(
        constants, alone=alone, HAS_H0=part["h0"] is not None, HAS_DHT=has_dht), part)
    _enter(part)
    _carry(batch, part, constants, carry_transferred, False, alone=alone, PRECISION=_at_least_tf32x3(batch))


def back_by_transfers(batch: Batch, part: dict[str, Any], kernel: Any, constants: dict[str, Any],
                      *written: str) -> None:
    """Put into part as dht the gradients of the states that leave the parts of split sequences (of whole ones
    those that the call has stay), and more heads into ``undivided``. kernel: the family's reverse scan;
    written: what it writes besides."""
    if not batch.split:
        return
    alone = _states(batch, part, constants)
    batch.scan(kernel, dict(constants, HAS_DHT=False, HAS_DH0=False, ALONE=True),
               {**part, **dict.fromkeys((*written, "dht", "undivided")), "dh0": alone})
    _carry(batch, part, constants, carry_transferred, True, alone=alone, PRECISION=_at_least_tf32x3(batch))


def _enter(part: dict[str, Any], reverse: bool = False) -> None:
    """From here on kernels read the states that the call has; all those before do without."""
    if part["h0"] is not None and not reverse:
        enter()


def _carry(batch: Batch, part: dict[str, Any], constants: dict[str, Any], kernel: Any, reverse: bool,
           alone: torch.Tensor, **own: Any) -> None:
    """Carry states from part to part, from those of whole sequences on, and put them into the part. own: what
    the kernel takes that the other one does not."""
    name = "dht" if reverse else "h0"
    launch, given = batch.plan.launch(kernel.fn.__name__), part[name]
    tiles = -(-batch.V // launch.block("BV")) * -(-batch.K // launch.block("BK"))
    start(launch, kernel, part["N"] * batch.HV * tiles, dict(
        alone=alone, K=batch.K, V=batch.V, REVERSE=reverse, V_FIRST=constants["V_FIRST"],
        HAS_H0=given is not None, VARLEN=batch.packed, **own), {**part, "h0": given, "H": batch.HV})
    part[name] = alone


def _at_least_tf32x3(batch: Batch) -> str:
    """Return the precision of products of states: 16 bits at least, whatever torch allows."""
    return "ieee" if precision(batch.plan) == "ieee" else "tf32x3"


def _states(batch: Batch, part: dict[str, Any], constants: dict[str, Any]) -> torch.Tensor:
    """A state for each part, to be written."""
    sides = (batch.V, batch.K) if constants["V_FIRST"] else (batch.K, batch.V)
    return torch.empty(part["parts"], batch.HV, *sides, dtype=torch.float32, device=batch.device)
