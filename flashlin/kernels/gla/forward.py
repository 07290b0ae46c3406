"""Forward kernels of gated linear attention and RWKV-6: sums of decays, scores of all chunks, then one scan.

G_i = g_1 + ... + g_i is the sum of decays inside a chunk of L tokens, a vector over K, and h is the state
that enters the chunk. Row i of a matrix is token i:

    o_i = scale (q_i e^{G_i}) h + sum_{j <= i} A_ij v_j
    A_ij = scale sum_c q_ic k_jc e^{G_ic - G_jc}
    h' = Diag(e^{G_L}) h + sum_j (k_j e^{G_L - G_j})^T v_j

The decay of a pair is a vector. So A is a product of matrices only with a token m between j and i as
reference: (q_i e^{G_i - G_m}) . (k_j e^{G_m - G_j}), where both factors are at most 1. No m is suitable for
all pairs, since for tokens j after m, e^{G_m - G_j} can overflow. Halving gives each pair its own m: the
boundary between the two halves of a block that contain i and j. Take the level with blocks of 2 s tokens. A
row of a block's second half is only ever an i, and a row of its first half is only ever a j. So one matrix X
with rows q_i e^{..} and k_j e^{..} is enough for both sides. The level's scores are X X^T, masked to the
pairs in which s is the highest bit that differs between the indices i and j in the chunk. The diagonal is
computed separately; it does not decay.

Six levels need six products and exponentials. If a chunk forgets little, one decay reference is enough for
all of its pairs (``one_reference.py``).

RWKV-6 (EARLIER) reads the state before token i decays and updates it, and reads token i itself with a bonus
u. So q_i is multiplied by e^{G_{i-1}} instead of e^{G_i}, A_ij is for j < i only, and A_ii = scale sum_c q_ic
u_c k_ic.

Halving works in the same way for RWKV-6: a row i of a second half is at least one token after the boundary m.
So G_{i-1} - G_m is still a sum of decays. The exponents are exactly 0 for the two tokens at the boundary,
i = m + 1 and j = m.

The chunked form is from Yang et al. 2023 (arXiv 2312.06635), RWKV-6 is from Peng et al. 2024 (arXiv
2404.05892). Halving is our own.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from flashlin.compat.launch import start
from flashlin.guards.plan_types import Plan
from flashlin.kernels.batch import Batch, precision
from flashlin.kernels.chunked import Scalars
from flashlin.kernels.gla.decays import bonus_of, logs, sums_at, sums_read
from flashlin.kernels.gla.inputs import Inputs
from flashlin.kernels.gla.one_reference import gla_scores_one
from flashlin.kernels.gla.parts import any_left, gla_alone, sum_of_chunk
from flashlin.kernels.sequence_split import by_decays, part_of
from flashlin.kernels.tile_ops import LOG2_E, first_slot, put, sequence_of, state_offsets, tile, zero_gaps

BUSY = 1024  # programs that keep a GPU busy
# True if every chunk is halved, whatever its decays. Tests set this; they must clear the cache of
# dispatch.plan when they do.
halving = False


@triton.jit(do_not_specialize=["T", "N", "S"])
def gla_sums(
    g, G, bounds, T, N, C, S, BT: tl.constexpr, BC: tl.constexpr, VARLEN: tl.constexpr,
):
    """Sum the decays g / ln 2 within chunks of BT tokens of each sequence, into G.

    S programs divide the chunks of a sequence. Each computes BC of the C channels of all heads. A log2 decay
    below -126, the exponent of float32's smallest normal number, is raised to -126. So differences of sums
    stay precise after a token that forgets everything, even if its decay is -inf.

    g, G: [rows, C].
    bounds: [N + 1] or None.
    C: channels of all heads.
    """
    NC = (C + BC - 1) // BC
    program = tl.program_id(0)
    columns = program % NC * BC + tl.arange(0, BC)
    share = program // NC % S
    first, length = sequence_of(program // NC // S, bounds, T, VARLEN)
    rows = tl.arange(0, BT)
    at = rows[:, None] * C + columns[None, :]
    for t0 in range(share * BT, length, S * BT):
        mask = (t0 + rows < length)[:, None] & (columns < C)[None, :]
        x = tl.load(g + (first + t0) * C + at, mask=mask, other=0.0).to(tl.float32) * LOG2_E
        tl.store(G + (first + t0) * C + at, tl.cumsum(tl.where(x < -126.0, -126.0, x), 0), mask=mask)


@triton.jit
def halves(level, BT: tl.constexpr):
    """Return the index of each row's half-block, [BT], if the chunk has blocks of 2 ** (level + 1) rows.

    Second halves of blocks have odd indices.
    """
    return tl.arange(0, BT) >> level


@triton.jit
def decay_to_meeting(
    b_G,  # [BT, BK]
    G,  # [rows, H, K], fp32: decays summed within each chunk
    half, level,  # [BT], see ``halves``; the level of the halving
    last, first, t0, i_h, H,
    K: tl.constexpr,
    k0,
    BK: tl.constexpr, EARLIER: tl.constexpr = False,
):
    """Return the decay between each row and the boundary of the two halves of its block, [BT, BK].

    All values are at most 1. This includes rows after the end of the sequence, because they have the sum G_L.
    With EARLIER (RWKV-6), second halves read one row earlier, which is never before the boundary.

    b_G: decays summed from the start of the chunk, [BT, BK].
    half, level: indices of half-blocks from ``halves``, and the level.
    last: the chunk's last row inside the sequence.
    """
    b_M = sums_at(G, tl.minimum(((half | 1) << level) - 1, last), first, t0, i_h, H, K, k0, BK)
    if EARLIER:
        b_G = sums_at(G, tl.minimum(tl.arange(0, half.shape[0]) - half % 2, last), first, t0, i_h, H, K, k0,
                      BK)
    return tl.exp2(tl.where((half % 2 == 1)[:, None], b_G - b_M, b_M - b_G))


@triton.jit
def scores_of_chunk(q, k, u, G, A, q_in, k_out, scale, first, t0, length, i_h, H, K: tl.constexpr,
                    BT: tl.constexpr, BK: tl.constexpr, EARLIER: tl.constexpr, PRECISION: tl.constexpr):
    """Compute and store the scores A [BT, BT] and the weighted q_in and k_out [BT, K] of one chunk and head.

    Scores are computed by halving, as this module describes. ``gla_scores`` describes the outputs.
    """
    LEVELS: tl.constexpr = 6 if BT == 64 else 5 if BT == 32 else 4
    rows = tl.arange(0, BT)
    last = tl.minimum(BT, length - t0) - 1
    b_A = tl.zeros([BT, BT], dtype=tl.float32)
    diagonal = tl.zeros([BT], dtype=tl.float32)
    for k0 in range(0, K, BK):
        b_q = tile(q, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
        b_k = tile(k, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
        b_G = sums_at(G, tl.minimum(rows, last), first, t0, i_h, H, K, k0, BK)
        total = sum_of_chunk(G, last, first, t0, i_h, H, K, k0, BK)
        b_R = sums_read(b_G, G, last, first, t0, i_h, H, K=K, k0=k0, BT=BT, BK=BK, EARLIER=EARLIER)
        own = b_q.to(tl.float32) * b_k.to(tl.float32)
        if EARLIER:
            own *= bonus_of(u, i_h, K, k0, BK)
        diagonal += tl.sum(own, 1)
        put(q_in, b_q * tl.exp2(b_R), first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
        put(k_out, b_k * tl.exp2(total[None, :] - b_G), first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
        for level in range(LEVELS):  # not unrolled, so that registers have the tiles of one level at a time
            half = halves(level, BT)
            second = half % 2 == 1
            decay = decay_to_meeting(b_G, G, half, level, last, first, t0, i_h, H, K=K, k0=k0, BK=BK,
                                     EARLIER=EARLIER)
            b_X = (tl.where(second[:, None], b_q, b_k) * decay).to(b_q.dtype)
            s = tl.dot(b_X, tl.trans(b_X), input_precision=PRECISION)
            b_A += tl.where(tl.where(second, half - 1, -1)[:, None] == half[None, :], s, 0.0)
    b_A = tl.where(rows[:, None] > rows[None, :], b_A, 0.0)
    b_A += tl.where(rows[:, None] == rows[None, :], diagonal[:, None], 0.0)
    put(A, b_A * scale, first, t0, length, i_h, H, D=BT, d0=0, BT=BT, BD=BT)


@triton.jit(do_not_specialize=["T", "N", "S", "scale"])
def gla_scores(
    q, k, u, G, A, q_in, k_out, bounds, scale, T, N, H, S, K: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr, EARLIER: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute the scores of each chunk, and the weighted q and k that the scans read, by halving.

    One program computes one chunk of one head. In a packed batch, S programs divide the chunks of a sequence.

    u: [H, K], the bonus of RWKV-6, with EARLIER; otherwise None.
    A: receives the scores of pairs within a chunk.
    q_in: receives q e^G, which reads the state that enters the chunk.
    k_out: receives k e^{G_L - G}, which is written to the state that leaves the chunk.

    q, k: [rows, H, K].
    u: [H, K] or None.
    G: [rows, H, K], fp32: decays summed within each chunk.
    A: [rows, H, BT].
    q_in, k_out: [rows, H, K].
    bounds: [N + 1] or None.
    """
    program = tl.program_id(0)
    i_h = program % H
    share = program // H % S
    n = program // H // S
    first, length = sequence_of(n, bounds, T, VARLEN)
    if VARLEN:
        for t0 in range(share * BT, length, S * BT):
            scores_of_chunk(q, k, u, G, A, q_in, k_out, scale, first, t0=t0, length=length, i_h=i_h, H=H, K=K,
                            BT=BT, BK=BK, EARLIER=EARLIER, PRECISION=PRECISION)
    else:  # one chunk per program; a loop that runs once would still keep every mask in registers
        scores_of_chunk(q=q, k=k, u=u, G=G, A=A, q_in=q_in, k_out=k_out, scale=scale, first=first,
                        t0=share * BT, length=length, i_h=i_h, H=H, K=K, BT=BT, BK=BK, EARLIER=EARLIER,
                        PRECISION=PRECISION)


@triton.jit(do_not_specialize=["T", "N", "shares", "scale"])
def gla_scores_rest(
    q, k, u, g, G, A, q_in, k_out, served, bounds, scale, T, N, H, shares, K: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr, EARLIER: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute the scores and the weighted q and k of the chunks that do not fit one decay reference.

    In these chunks some channel forgets more than 120 bits, so decays cannot be taken relative to a single
    point. ``gla_scores_one`` has computed all other chunks. ``gla_scores`` describes A, q_in and k_out.

    served: 1 for chunks that fit one decay reference, else 0.

    q, k: [rows, H, K].
    u: [H, K] or None.
    g: [rows, H, K], fp32.
    G: [rows, H, K], fp32: receives decays summed within each chunk.
    A: [rows, H, BT].
    q_in, k_out: [rows, H, K].
    served: [slots, H], int32.
    bounds: [N + 1] or None.
    shares: programs per sequence.
    """
    program = tl.program_id(0)
    i_h = program % H
    share = program // H % shares
    n = program // H // shares
    first, length = sequence_of(n, bounds, T, VARLEN)
    slot, end = first_slot(n, first, BT), length
    if not VARLEN:
        end = tl.where(any_left(served, slot, share, length, shares, i_h, H, BT), length, 0)
    for t0 in tl.range(share * BT, end, shares * BT, disable_licm=True):  # or masks would fill the registers
        if tl.load(served + (slot + t0 // BT) * H + i_h) == 0:
            for k0 in range(0, K, BK):
                x = logs(tile(g, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK))
                put(G, tl.cumsum(x, 0), first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
            tl.debug_barrier()  # other threads read these sums
            scores_of_chunk(q, k, u, G, A, q_in, k_out, scale, first, t0=t0, length=length, i_h=i_h, H=H, K=K,
                            BT=BT, BK=BK, EARLIER=EARLIER, PRECISION=PRECISION)


@triton.jit(do_not_specialize=["T", "N", "L", "scale"])
def gla_scan(
    q_in, k_out, v, A, G, h0, o, ht, bounds, scale, T, N, H, L, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, HAS_H0: tl.constexpr, HAS_HT: tl.constexpr,
    V_FIRST: tl.constexpr, VARLEN: tl.constexpr, GAPS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute the outputs o and the final states ht by a scan over chunks.

    One program computes BV columns of one head's state and keeps them in registers from chunk to chunk. The
    operands come from ``gla_scores``.

    h0: the states that enter the sequences or, if these are split, the segments.

    q_in, k_out: [rows, H, K].
    v: [rows, H, V].
    A: [rows, H, BT].
    G: [rows, H, K], fp32: decays summed within each chunk.
    h0: [segments, H, K, V] or, with V_FIRST, [segments, H, V, K].
    o: [rows, H, V].
    ht: [N, H, K, V] or, with V_FIRST, [N, H, V, K], fp32.
    bounds: [N + 1] or None.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    v0 = program % NV * BV
    own = program // NV
    i_h = own % H
    n, i_part, first, length, last = part_of(own // H, bounds, T, N, L, VARLEN)
    if GAPS:
        if i_part == 0:
            zero_gaps(o, bounds, n, T, N, i_h, H, D=V, d0=v0, BT=BT, BD=BV)
    if HAS_H0:
        at, inside = state_offsets(own, 0, v0, K, V, BK, BV, V_FIRST)
        h = tl.load(h0 + at, mask=inside, other=0.0).to(tl.float32)
    else:
        h = tl.zeros([BK, BV], dtype=tl.float32)
    for t0 in range(0, length, BT):
        b_q = tile(q_in, first, t0, length, i_h, H, D=K, d0=0, BT=BT, BD=BK)
        b_k = tile(k_out, first, t0, length, i_h, H, D=K, d0=0, BT=BT, BD=BK)
        b_A = tile(A, first, t0, length, i_h, H, D=BT, d0=0, BT=BT, BD=BT)
        b_v = tile(v, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV)
        total = sum_of_chunk(G, tl.minimum(BT, length - t0) - 1, first, t0, i_h, H, K, 0, BK)
        b_o = tl.dot(b_q, h.to(b_q.dtype), input_precision=PRECISION)
        b_o *= scale
        b_o += tl.dot(b_A, b_v, input_precision=PRECISION)
        h *= tl.exp2(total)[:, None]
        h += tl.dot(tl.trans(b_k), b_v, input_precision=PRECISION)
        put(o, b_o, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV)
    if HAS_HT:
        at, inside = state_offsets(n * H + i_h, 0, v0, K, V, BK, BV, V_FIRST)
        tl.store(ht + at, h, mask=inside & last)


def sums_of_chunks(plan: Plan, x: dict[str, Any]) -> torch.Tensor:
    """Start ``gla_sums`` and return the decays summed within each chunk, [B, T, HV, K] in fp32.

    x: the arguments that the launches of a batch slice share, by parameter name.
    """
    g, launch = x["g"], plan.launch("gla_sums")
    G, C = torch.empty_like(g), g.shape[2] * g.shape[3]
    if x["T"]:
        start(launch, gla_sums, x["N"] * x["S"] * -(-C // launch.block("BC")),
              dict(G=G, C=C, VARLEN=x["bounds"] is not None), x)
    return G


def prepare(plan: Plan, x: dict[str, Any]) -> None:
    """Launch the kernels that compute the operands of the scans, and put the operands into x.

    The operands are the sums of decays G, the scores A and the weighted q_in and k_out (``gla_sums``,
    ``gla_scores``). q_in and k_out are allocated unless x has them. The backward calls this again instead of
    keeping the results, because it is cheap.

    x: the arguments that the launches of a batch slice share, by parameter name.
    """
    q, launch = x["q"], plan.launch("gla_scores_one", "gla_scores")
    B, T, H, K = q.shape
    x.update({name: torch.empty_like(q) for name in ("q_in", "k_out") if name not in x})
    x["A"] = torch.empty(B, T, H, launch.block("BT"), dtype=q.dtype, device=q.device)
    # With one decay reference, the first kernel sums the decays itself.
    x["G"] = sums_of_chunks(plan, x) if launch.kernel == "gla_scores" else torch.empty_like(x["g"])
    start_chunks(plan, (gla_scores, gla_scores_one, gla_scores_rest), dict(
        K=K, EARLIER=x["u"] is not None, VARLEN=x["bounds"] is not None, PRECISION=precision(plan)), x)


def start_chunks(plan: Plan, kernels: tuple[Any, Any, Any], constants: dict[str, Any], x: dict[str, Any],
                 **last: Any) -> None:
    """Start the planned kernels of a step that has one program per chunk and head.

    The plan has either ``whole`` or both ``one`` and ``rest``. ``whole`` computes every chunk by halving.
    ``one`` computes the chunks that fit one decay reference, and ``rest`` halves the remaining chunks. The
    first step with ``one`` stores in x["served"] which chunks fit; later steps read it.

    Nothing is started if there are no tokens, since the kernels load at least a chunk's last row.

    kernels: (whole, one, rest).
    constants: constants of all three kernels.
    x: the arguments that the launches of a batch slice share, by parameter name.
    last: constants of ``whole`` and ``rest``.
    """
    whole, one, rest = kernels
    launch = plan.launch(one.fn.__name__, whole.fn.__name__)
    if not x["T"]:
        return
    if launch.kernel == whole.fn.__name__:
        start(launch, whole, x["N"] * x["S"] * x["HV"], constants | last, x)
        return
    first = {} if "served" in x else {"ONE": not halving}
    if first:
        x["served"] = torch.empty(x["slots"], x["HV"], dtype=torch.int32, device=x["q"].device)
    programs = x["N"] * x["S"] if x["bounds"] is None else x["slots"]  # see tile_ops.chunk_of
    start(launch, one, programs * x["HV"], constants | first, x)
    start_rest(plan, rest, constants | last, x)


def start_rest(plan: Plan, kernel: Any, constants: dict[str, Any], x: dict[str, Any]) -> None:
    """Start the kernel that computes the chunks that do not fit one decay reference, see ``start_chunks``."""
    # Few chunks remain for the kernel ``rest``, so each sequence gets only as many programs as keep a GPU
    # busy, and enough for ``any_left``. Packed sequences get as many programs together as there are chunks,
    # divided evenly among the sequences.
    shares = x["S"] if x["bounds"] is not None else max(
        -(-x["S"] // 64), min(x["S"], BUSY // max(1, x["N"] * x["HV"])))
    programs = x["N"] * shares * x["HV"]
    start(plan.launch(kernel.fn.__name__), kernel, programs, dict(constants, shares=shares), x)


def launch_forward(plan: Plan, x: Inputs, how: Scalars) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the plan's forward launches and return o [B, T, H, V] and the final states or None.

    The states are fp32, [N, H, K, V] or, with ``how.state_v_first``, [N, H, V, K].
    """
    batch = Batch(plan, x)
    o, ht = batch.outputs(how.out_dtype, how.has_ht, how.state_v_first)
    constants = dict(K=batch.K, V=batch.V, V_FIRST=how.state_v_first, VARLEN=batch.packed,
                     PRECISION=precision(plan))
    for part in batch.parts(plan.launch("gla_scan"), o=o, ht=ht, scale=how.scale):
        prepare(plan, part)
        by_decays(batch, part, gla_alone, constants, ("k_out", "v"), vector=True)
        batch.scan(gla_scan, dict(constants, HAS_H0=part["h0"] is not None, HAS_HT=how.has_ht,
                                  GAPS=batch.gaps), part)
    return o, ht
