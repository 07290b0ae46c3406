"""Split long sequences into segments that run in parallel, so that few sequences can use the whole GPU.

A scan walks its sequence in one program per head and strip of the state. Few sequences with few heads would
therefore leave most of a GPU idle. If the plan says so (``Launch.part``), a sequence is split into segments
of L tokens, in three steps:
    1. All segments in parallel: compute ``alone``, the state that each segment would end with if it started
       from zero (kernels in ``parts.py`` of each family; for gradients of delta rules, the reverse scan with
       ALONE).
    2. Segment by segment: carry the states, h' = D h + alone. D is the effect of the segment on any initial
       state. It is the decay of the segment (a number or a vector over K) or, for delta rules, a K x K
       transfer matrix: the final state for the identity as initial state and v = 0. Backward does the same
       with D^T, from the last segment to the first. Segments that forget everything before them need no D
       (``dplr/windows.py``).
    3. All segments in parallel: run the usual scan, each segment from its own initial state.
Only the memory between the steps depends on the number of segments, and no step waits for the host. The
programs of packed sequences find their segments themselves. Carried states stay in float32, and the
products that carry them are precise to at least 16 bits.
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
    """Return the position of segment i_p: sequence n, its number within n, first row, length, and ``last``.

    ``last`` is true for the last segment of its sequence. All other segments have L tokens. An empty sequence
    has one segment. The segment numbers of packed sequences have gaps; the segment of an unused number has no
    tokens and is not a last one.
    """
    if VARLEN:
        n = i_p
        i_part = i_p * 0
        if L < T:
            # The segments of sequence n are numbered from bounds[n] // L + n, so no two sequences share a number.
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
    """Return the number of the first segment of sequence n, and its number of segments."""
    first, length = sequence_of(n, bounds, T, VARLEN)
    parts = tl.maximum((length - 1) // L + 1, 1)
    if VARLEN:
        return n + (first // L).to(tl.int32), parts
    else:
        return n * parts, parts


@triton.jit(do_not_specialize=["T", "L"])
def carry_decayed(
    alone, kept, h0, bounds, T, H, L, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    VECTOR: tl.constexpr, REVERSE: tl.constexpr, V_FIRST: tl.constexpr, HAS_H0: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """Replace ``alone``, in place, by the initial state of each segment, carried from segment to segment.

    On entry, ``alone`` contains the state that each segment would end with if it started from zero. With
    REVERSE it contains gradients, and becomes the gradient of the final state of each segment. ``kept``: log2
    decay of each segment. One program computes a tile of the state of one head.

    alone: [segments, H, K, V] or, with V_FIRST, [segments, H, V, K], fp32.
    kept: [segments, H] or, with VECTOR, [segments, H, K], fp32, log2.
    h0: [N, H, K, V] or, with V_FIRST, [N, H, V, K].
    bounds: [N + 1] or None.
    """
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
        more = inside & (i < parts - 1)  # the final state of the last segment was not computed
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
    alone, transfer, undivided, windows, h0, bounds, T, H, L, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr, REVERSE: tl.constexpr, V_FIRST: tl.constexpr,
    HAS_H0: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):
    """Replace ``alone``, in place, by the initial state of each segment, carried by transfer matrices.

    It does the same as ``carry_decayed``, for ops whose segments multiply the state by a matrix. It sets
    ``undivided`` for each head with a carried state that is not finite. If the norms of keys are too large,
    transfer matrices overflow float32 even if no state does, and 0 x inf is NaN. The later scan computes such
    a head as one segment.

    windows: positive for segments that need no transfer, because decays make their initial state negligible.
        Negative if the head is not split, because it has a segment without a window.

    One program computes BV columns of the state of one head. A matrix that is too large for one step
    (BC < BK) is read in slices, and the state is then read in slices from memory.

    alone: [segments, H, K, V] or, with V_FIRST, [segments, H, V, K], fp32.
    transfer: [segments, H, K, K], fp32.
    undivided: [N, H], int32.
    windows: [segments, H], int32, or None.
    h0: [N, H, K, V] or, with V_FIRST, [N, H, V, K].
    bounds: [N + 1] or None.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    FROM: tl.constexpr = 0 if HAS_H0 else 1  # the first segment whose initial state may differ from zero
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
    step = -H if REVERSE else H
    own = (first + (parts - 1 if REVERSE else 0)) * H + i_h
    # The next segment's ``alone`` and window are loaded early, so that steps without a product do not wait.
    to, inside = state_offsets(own, 0, v0, K, V, BK, BV, V_FIRST)
    ahead = tl.load(alone + to, mask=inside & (parts > 1), other=0.0)
    window_ahead = 0
    if windows is not None:
        window_ahead = tl.load(windows + own)
    for i in range(parts):
        left, window = ahead, window_ahead
        after, fits = state_offsets(own + step, 0, v0, K, V, BK, BV, V_FIRST)
        ahead = tl.load(alone + after, mask=fits & (i + 2 < parts), other=0.0)
        if windows is not None:
            window_ahead = tl.load(windows + own + step, mask=i + 1 < parts, other=0)
        to, inside = state_offsets(own, 0, v0, K, V, BK, BV, V_FIRST)
        tl.store(alone + to, h, mask=inside)
        beyond = tl.where(tl.abs(h) < 1e30, beyond, 1)  # NaN also fails this comparison
        beyond = tl.where((i < parts - 1) & (window < 0), 1, beyond)
        asked = (i >= FROM) & (i < parts - 1) & (window == 0)
        if BC >= BK:
            through, there = state_offsets(own, 0, 0, K, K, BK, BK, False)
            D = tl.load(transfer + through, mask=there & asked, other=0.0)
            if REVERSE:
                D = tl.trans(D)
            h = left + tl.dot(D, h, input_precision=PRECISION)
        else:
            tl.debug_barrier()  # wait until all threads have stored h, which is read in another layout
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
        own += step
    if tl.max(tl.max(beyond, 1), 0) > 0:
        tl.store(undivided + nh, 1)


@triton.jit
def identity_strip(strip, NV: tl.constexpr, i_part, length, last, BK: tl.constexpr, BV: tl.constexpr,
                   HAS_H0: tl.constexpr, HAS_DHT: tl.constexpr):
    """Return the initial state and two token counts of a program of step 1 (see the module).

    Strips below NV compute ``alone``, which starts from zeros. Later strips compute the transfer matrix,
    which starts from columns of the identity. The first count is the number of tokens to compute, which is 0
    if the result is not needed. The second count is the number of tokens with v, which is 0 for the transfer.

    strip: number of the strip.
    NV: number of strips of v.
    i_part: number of the segment in its sequence.
    length: tokens of the segment.
    last: true for the last segment of the sequence.
    """
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
    """Return h + left @ right, with the matrix product in a separate accumulator.

    Tensor cores round towards zero when they add to an accumulator. These errors add up if all values are a
    little below 1, as in the transfer matrix of weak keys. The sum is written as an fma, because a
    compiler would turn a plain ``h + dot`` into a product that accumulates onto h.
    """
    return tl.fma(tl.dot(left, right, input_precision=PRECISION), tl.full(h.shape, 1.0, tl.float32), h)


@triton.jit
def own_part(i_p, i_h, undivided, bounds, T, N, H, L, VARLEN: tl.constexpr, REVERSE: tl.constexpr):
    """Return the position of segment i_p, as ``part_of``, and the number of the segment to read a state from.

    The program starts from the carried state of that segment. A head that is marked in ``undivided`` is
    computed as one segment, its first; its other segments have no tokens.

    i_p: number of the segment.
    undivided: [N, H], int32, or None.
    bounds: [N + 1] or None.
    """
    n, i_part, first, length, last = part_of(i_p, bounds, T, N, L, VARLEN)
    entered = i_p
    if undivided is not None:  # a compile-time test; "and" would emit a load from None
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
    """Compute the initial states of all segments by decays, and store them in ``part["h0"]``.

    With reverse, compute the gradients of the final states instead, and store them in ``part["dht"]``. The
    results are [segments, H, K, V] or, with the constant V_FIRST, [segments, H, V, K]. If sequences are not
    split, ``part`` keeps the states (or gradients) of the call.

    part: the arguments that launches share, see ``Batch.parts``.
    kernel: the kernel of the family that writes ``alone`` and ``kept``.
    operands: the names in ``part`` of its operands x and y.
    vector: True if decays are vectors over K.
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
    """Compute the initial states of all segments by transfer matrices, and store them in ``part["h0"]``.

    Also store ``undivided`` and ``transfer`` in part, see ``carry_transferred``. If sequences are not split,
    these are None, and ``part["h0"]`` keeps the initial states of the call.

    part: the arguments that launches share, see ``Batch.parts``.
    kernel: the kernel of the family that writes ``alone`` and ``transfer`` and clears ``undivided``.
    has_dht: True if ``back_by_transfers`` follows and the final states have gradients.
    """
    part.update(undivided=None, transfer=None)
    if not batch.split:
        _enter(part)
        return
    launch, alone = batch.plan.launch(kernel.fn.__name__), _states(batch, part, constants)
    columns = launch.block("BV") * dict(launch.tile).get("GROUPS", 1)
    part["transfer"] = torch.empty(*alone.shape[:2], batch.K, batch.K, dtype=torch.float32,
                                   device=batch.device)
    part["undivided"] = torch.empty(part["N"], batch.HV, dtype=torch.int32, device=batch.device)
    start(launch, kernel, part["parts"] * batch.HV * (-(-batch.V // columns) - (-batch.K // columns)), dict(
        constants, alone=alone, HAS_H0=part["h0"] is not None, HAS_DHT=has_dht), part)
    _enter(part)
    _carry(batch, part, constants, carry_transferred, False, alone=alone, PRECISION=_at_least_tf32x3(batch))


def back_by_transfers(batch: Batch, part: dict[str, Any], kernel: Any, constants: dict[str, Any],
                      *written: str) -> None:
    """Compute the gradients of the final states of all segments, and store them in ``part["dht"]``.

    It uses the transfer matrices of ``by_transfers``, and may mark more heads in ``undivided``. If sequences
    are not split, ``part["dht"]`` keeps the gradients of the call.

    part: the arguments that launches share, see ``Batch.parts``.
    kernel: the reverse scan of the family.
    written: names of its other outputs, which are not computed here.
    """
    if not batch.split:
        return
    alone = _states(batch, part, constants)
    batch.scan(kernel, dict(constants, HAS_DHT=False, HAS_DH0=False, ALONE=True),
               {**part, **dict.fromkeys((*written, "dht", "undivided")), "dh0": alone})
    _carry(batch, part, constants, carry_transferred, True, alone=alone, PRECISION=_at_least_tf32x3(batch))


def _enter(part: dict[str, Any], reverse: bool = False) -> None:
    """Wait for the initial states of the call, which may still be on their way from another rank.

    Launches before this point do not read h0. reverse: True for gradients, for which there is no wait.
    """
    if part["h0"] is not None and not reverse:
        enter()


def _carry(batch: Batch, part: dict[str, Any], constants: dict[str, Any], kernel: Any, reverse: bool,
           alone: torch.Tensor, **own: Any) -> None:
    """Start the kernel that carries states from segment to segment, and store the result in part.

    It starts from the states (or gradients, with reverse) of the call. own: the arguments of this kernel that
    the other carrying kernel does not have.
    """
    name = "dht" if reverse else "h0"
    launch, given = batch.plan.launch(kernel.fn.__name__), part[name]
    tiles = -(-batch.V // launch.block("BV")) * -(-batch.K // launch.block("BK"))
    start(launch, kernel, part["N"] * batch.HV * tiles, dict(
        alone=alone, K=batch.K, V=batch.V, REVERSE=reverse, V_FIRST=constants["V_FIRST"],
        HAS_H0=given is not None, VARLEN=batch.packed, **own), {
            **part, "h0": given, "H": batch.HV,
            "windows": part.get("windows_back" if reverse else "windows")})
    part[name] = alone


def _at_least_tf32x3(batch: Batch) -> str:
    """Return the precision of products of states: at least 16 bits, regardless of torch's tf32 setting."""
    return "ieee" if precision(batch.plan) == "ieee" else "tf32x3"


def _states(batch: Batch, part: dict[str, Any], constants: dict[str, Any]) -> torch.Tensor:
    """Return an uninitialized float32 buffer with one state for each segment."""
    sides = (batch.V, batch.K) if constants["V_FIRST"] else (batch.K, batch.V)
    return torch.empty(part["parts"], batch.HV, *sides, dtype=torch.float32, device=batch.device)
