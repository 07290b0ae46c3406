"""Forward kernels of the delta families with a decay for each key channel.

``dplr_prepare`` computes the operands of all chunks at once. ``dplr_scan`` is one scan of plain matrix
products.

G_i = g_1 + ... + g_i is the sum of decays inside a chunk of L tokens, a vector over K, and h is the state
that enters the chunk. Row i of a matrix is token i. Token i reads x_i = a_i S_{i-1}. The rows x_i of a chunk
solve a triangular system:

    X = T (a' h + N V)
    T = (I - L)^-1
    a'_i = a_i e^{G_{i-1}}
    L_ij = sum_c a_ic b_jc e^{G_{i-1,c} - G_jc} for j < i
    o = scale (q' h + P X + R V)
    h' = Diag(e^{G_L}) h + b'^T X + k'^T V
    q'_i = q_i e^{G_i}
    b'_j = b_j e^{G_L - G_j}

k' is defined like b'. N is L with k in the place of b. P and R are the scores of q with b and with k for j <=
i, which decay by e^{G_i - G_j}.

The families differ as follows:

1. DPLR (TWO_WRITES) has two writing vectors, b and k, as above.
2. KDA has a_i = -beta_i k_i, which reads the state after its decay (G_i instead of G_{i-1}), b = k and N =
   Diag(beta). There is no second writing vector, so no R and no k'.
3. Gated DeltaNet 2 (ERASE_RATE) is KDA with a rate per channel, a_i = -rate_i k_i. Its v is already
   multiplied by the write rates, so N is the identity.

Scores are computed by halving (``kernels/gla``) or with one decay reference (``one_reference.py``). In a
level of halving, each row either reads (q, a) or writes (k, b). Let X1 have the rows q or k, and X2 the
rows a or b. Then X1 X2^T has P below and N^T above the diagonal, X1 X1^T has R, and X2 X2^T has L. If b = k,
the first product has P and L^T, and is the only one needed.

The scan gets W = T a' and M = T N instead of T, so each step has a chain of only two products. Both are
computed from the inverse in float32. If keys are similar, rows of W and M are small differences of large
terms, which an inverse in bf16 would lose.

The chunked delta rule is from Yang et al. 2024 (arXiv 2406.06484), DPLR from Peng et al. 2025 (arXiv
2503.14456) and KDA from Kimi 2025 (arXiv 2510.26692). Halving and W are our own.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from flashlin.compat.traits import OVERLAPPED
from flashlin.guards.plan_types import Plan
from flashlin.kernels.batch import Batch, precision
from flashlin.kernels.dplr.inputs import Inputs, Scalars
from flashlin.kernels.dplr.one_reference import dplr_prepare_one
from flashlin.kernels.dplr.parts import dplr_alone
from flashlin.kernels.dplr.raw import add_operands, prepare_raw
from flashlin.kernels.gla.decays import sums_at, sums_read
from flashlin.kernels.gla.forward import halves, start_chunks, sums_of_chunks
from flashlin.kernels.gla.parts import any_left, sum_of_chunk
from flashlin.kernels.sequence_split import by_transfers, own_part
from flashlin.kernels.tile_ops import beta_of, first_slot, put, sequence_of, state_offsets, tile, zero_gaps
from flashlin.kernels.triangular_inverse import inverse, merging, product


@triton.jit
def prepare_chunk(q, k, a, b, beta, G, q_in, a_in, b_out, k_out, W, M, P, R, N_, T_, T_low, scratch, scale, n,
                  first, t0, length, i_h, H, HV, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                  TWO_WRITES: tl.constexpr, ERASE_RATE: tl.constexpr, BACKWARD: tl.constexpr,
                  HAS_LOW: tl.constexpr, PRECISION: tl.constexpr, MERGE: tl.constexpr):
    """Compute and store the operands of the scans for one chunk and head, by halving.

    They are matrices [BT, K] and [BT, BT]; ``dplr_prepare`` describes them.
    """
    LEVELS: tl.constexpr = 6 if BT == 64 else 5 if BT == 32 else 4
    i_qk = i_h // (HV // H)
    rows = tl.arange(0, BT)
    last = tl.minimum(BT, length - t0) - 1
    below = rows[:, None] > rows[None, :]
    equal = rows[:, None] == rows[None, :]
    if not TWO_WRITES and not ERASE_RATE:
        b_beta = beta_of(beta, first, t0, length, i_h, HV, BT)
    own = tl.zeros([BT, BT], dtype=tl.float32)
    cross = tl.zeros([BT, BT], dtype=tl.float32)
    qk = tl.zeros([BT], dtype=tl.float32)
    qb = tl.zeros([BT], dtype=tl.float32)
    for k0 in range(0, K, BK):
        b_q = tile(q, first, t0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK)
        b_k = tile(k, first, t0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK)
        b_G = sums_at(G, tl.minimum(rows, last), first, t0, i_h, HV, K, k0, BK)
        b_B = sums_read(b_G, G, last, first, t0, i_h, HV, K=K, k0=k0, BT=BT, BK=BK, EARLIER=TWO_WRITES)
        if TWO_WRITES:
            b_a = tile(a, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            b_b = tile(b, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            qb += tl.sum(b_q.to(tl.float32) * b_b.to(tl.float32), 1)
        else:
            b_b = b_k.to(tl.float32)
            if ERASE_RATE:
                rate = tile(a, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
            else:
                rate = b_beta[:, None]
            b_a = -rate * b_b
        qk += tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), 1)
        left = tl.exp2(sum_of_chunk(G, last, first, t0, i_h, HV, K, k0, BK)[None, :] - b_G)
        put(q_in, b_q * scale * tl.exp2(b_G), first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
        put(b_out, b_b * left, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
        if TWO_WRITES:
            put(k_out, b_k * left, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
        if BACKWARD:
            put(a_in, b_a * tl.exp2(b_B), first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
        for level in range(LEVELS):  # not unrolled, so that registers hold the tiles of one level only
            half = halves(level, BT)
            second = (half % 2 == 1)[:, None]
            partner = (half ^ 1)[:, None] == half[None, :]
            b_M = sums_at(G, tl.minimum(((half | 1) << level) - 1, last), first, t0, i_h, HV, K, k0, BK)
            decay = tl.exp2(tl.where(second, b_G - b_M, b_M - b_G))
            X1 = (tl.where(second, b_q, b_k) * decay).to(b_q.dtype)
            if TWO_WRITES:
                decay = tl.exp2(tl.where(second, b_B - b_M, b_M - b_G))
            X2 = (tl.where(second, b_a, b_b) * decay).to(b_q.dtype)
            cross += tl.where(partner, tl.dot(X1, tl.trans(X2), input_precision=PRECISION), 0.0)
            if TWO_WRITES:
                s1 = tl.dot(X1, tl.trans(X1), input_precision=PRECISION)
                s2 = tl.dot(X2, tl.trans(X2), input_precision=PRECISION)
                own += tl.where(partner, tl.where(below, s1, s2), 0.0)
    if TWO_WRITES:
        put(R, tl.where(below, own, tl.where(equal, qk[:, None], 0.0)) * scale, first, t0, length, i_h, HV,
            D=BT, d0=0, BT=BT, BD=BT)
        put(P, tl.where(below, cross, tl.where(equal, qb[:, None], 0.0)) * scale, first, t0, length, i_h, HV,
            D=BT, d0=0, BT=BT, BD=BT)
        L = tl.where(below, tl.trans(own), 0.0)
        b_N = tl.where(below, tl.trans(cross), 0.0)
        if BACKWARD:
            put(N_, b_N, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
    else:
        put(P, tl.where(below, cross, tl.where(equal, qk[:, None], 0.0)) * scale, first, t0, length, i_h, HV,
            D=BT, d0=0, BT=BT, BD=BT)
        L = tl.where(below, tl.trans(cross), 0.0)
    slot = (first_slot(n, first, BT) + t0 // BT) * HV + i_h
    X = inverse(-L, scratch + slot.to(tl.int64) * (BT * 16), BT, MERGE)
    if TWO_WRITES:
        put(M, product(X, b_N, MERGE), first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
    elif ERASE_RATE:
        put(M, X, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
    else:
        put(M, X * b_beta[None, :], first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
    if BACKWARD:
        put(T_, X, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        if HAS_LOW:
            put(T_low, X - X.to(T_.dtype.element_ty).to(tl.float32), first, t0, length, i_h, HV, D=BT, d0=0,
                BT=BT, BD=BT)
    for k0 in range(0, K, BK):
        if TWO_WRITES:
            b_a = tile(a, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
        else:
            if ERASE_RATE:
                rate = tile(a, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
            else:
                rate = b_beta[:, None]
            b_a = -rate * tile(k, first, t0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
        b_G = sums_at(G, tl.minimum(rows, last), first, t0, i_h, HV, K, k0, BK)
        b_B = sums_read(b_G, G, last, first, t0, i_h, HV, K=K, k0=k0, BT=BT, BK=BK, EARLIER=TWO_WRITES)
        put(W, product(X, b_a * tl.exp2(b_B), MERGE), first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)


@triton.jit(do_not_specialize=["T", "N", "S", "scale"])
def dplr_prepare(
    q, k, a, b, beta, G, q_in, a_in, b_out, k_out, W, M, P, R, N_, T_, T_low, scratch, bounds, scale, T, N, H,
    HV, S, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, TWO_WRITES: tl.constexpr,
    ERASE_RATE: tl.constexpr, BACKWARD: tl.constexpr, HAS_LOW: tl.constexpr, VARLEN: tl.constexpr,
    PRECISION: tl.constexpr, MERGE: tl.constexpr,
):
    """Compute the operands of the scans for all chunks, with one program per chunk and head.

    The chunks of a packed sequence are divided among S programs. All decays are those within one chunk. The
    operands are:

    q_in: q times its decay since the chunk's start, times scale; it reads the entering state.
    a_in: a times its decay from the chunk's start until it reads the entering state.
    b_out, k_out: b and k times their decay until the chunk's end.
    W: T a_in, where T is the inverse of I - L, and L are the scores of a with b.
    M: T N, where N are the scores of a with k.
    P, R: the scores of q with b and with k, times scale.
    N_, T_: N and T.
    T_low: with HAS_LOW, what T lost when it was rounded to 16 bits.

    The first five are [rows, HV, K], the others [rows, HV, BT]. With BACKWARD, the operands that only the
    reverse scan reads are stored as well: a_in, N_, T_ and T_low. Operands that the call lacks are None.

    TWO_WRITES: DPLR, with two writing vectors b and k. Otherwise b is k, and a is -beta k or, with
        ERASE_RATE, minus a rate per channel times k.
    scratch: [slots, HV, BT, 16], memory for the triangular inverse.

    q, k: [rows, H, K].
    a, b: [rows, HV, K].
    beta: [rows, HV].
    G: [rows, HV, K], fp32: decays summed within each chunk.
    q_in, a_in, b_out, k_out, W: [rows, HV, K].
    M, P, R, N_, T_, T_low: [rows, HV, BT].
    scratch: [slots, HV, BT, 16], fp32.
    bounds: [N + 1] or None.
    """
    program = tl.program_id(0)
    i_h = program % HV
    share = program // HV % S
    n = program // HV // S
    first, length = sequence_of(n, bounds, T, VARLEN)
    if VARLEN:
        for t0 in range(share * BT, length, S * BT):
            prepare_chunk(q, k, a, b, beta, G, q_in, a_in, b_out, k_out=k_out, W=W, M=M, P=P, R=R, N_=N_,
                          T_=T_, T_low=T_low, scratch=scratch, scale=scale, n=n, first=first, t0=t0,
                          length=length, i_h=i_h, H=H, HV=HV, K=K, BT=BT, BK=BK, TWO_WRITES=TWO_WRITES,
                          ERASE_RATE=ERASE_RATE, BACKWARD=BACKWARD, HAS_LOW=HAS_LOW, PRECISION=PRECISION,
                          MERGE=MERGE)
    else:  # one chunk per program; a loop that runs once would still keep every mask in registers
        prepare_chunk(q=q, k=k, a=a, b=b, beta=beta, G=G, q_in=q_in, a_in=a_in, b_out=b_out, k_out=k_out, W=W,
                      M=M, P=P, R=R, N_=N_, T_=T_, T_low=T_low, scratch=scratch, scale=scale, n=n,
                      first=first, t0=share * BT, length=length, i_h=i_h, H=H, HV=HV, K=K, BT=BT, BK=BK,
                      TWO_WRITES=TWO_WRITES, ERASE_RATE=ERASE_RATE, BACKWARD=BACKWARD, HAS_LOW=HAS_LOW,
                      PRECISION=PRECISION, MERGE=MERGE)


@triton.jit(do_not_specialize=["T", "N", "shares", "scale"])
def dplr_prepare_rest(
    q, k, a, b, beta, G, q_in, a_in, b_out, k_out, W, M, P, R, N_, T_, T_low, scratch, served, bounds, scale,
    T, N, H, HV, shares, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, TWO_WRITES: tl.constexpr,
    ERASE_RATE: tl.constexpr, BACKWARD: tl.constexpr, HAS_LOW: tl.constexpr, VARLEN: tl.constexpr,
    PRECISION: tl.constexpr, MERGE: tl.constexpr,
):
    """Compute the operands of the scans for the chunks that do not fit one decay reference, by halving.

    In these chunks some channel forgets more than 120 bits, so decays cannot be taken relative to a single
    point. ``dplr_prepare_one`` has computed all other chunks. ``dplr_prepare`` describes the operands.

    served: 1 for chunks that fit one decay reference, else 0.

    q, k: [rows, H, K].
    a, b: [rows, HV, K].
    beta: [rows, HV].
    G: [rows, HV, K], fp32: decays summed within each chunk.
    q_in, a_in, b_out, k_out, W: [rows, HV, K].
    M, P, R, N_, T_, T_low: [rows, HV, BT].
    scratch: [slots, HV, BT, 16], fp32.
    served: [slots, HV], int32.
    bounds: [N + 1] or None.
    shares: programs per sequence.
    """
    program = tl.program_id(0)
    i_h = program % HV
    share = program // HV % shares
    n = program // HV // shares
    first, length = sequence_of(n, bounds, T, VARLEN)
    slot, end = first_slot(n, first, BT), length
    if not VARLEN:
        end = tl.where(any_left(served, slot, share, length, shares, i_h, HV, BT), length, 0)
    for t0 in tl.range(share * BT, end, shares * BT, disable_licm=True):  # or masks would fill the registers
        if tl.load(served + (slot + t0 // BT) * HV + i_h) == 0:
            prepare_chunk(q, k, a, b, beta, G, q_in, a_in, b_out, k_out=k_out, W=W, M=M, P=P, R=R, N_=N_,
                          T_=T_, T_low=T_low, scratch=scratch, scale=scale, n=n, first=first, t0=t0,
                          length=length, i_h=i_h, H=H, HV=HV, K=K, BT=BT, BK=BK, TWO_WRITES=TWO_WRITES,
                          ERASE_RATE=ERASE_RATE, BACKWARD=BACKWARD, HAS_LOW=HAS_LOW, PRECISION=PRECISION,
                          MERGE=MERGE)


@triton.jit(do_not_specialize=["T", "N", "L"])
def dplr_scan(
    q_in, b_out, k_out, W, M, P, R, v, G, h0, o, ht, undivided, bounds, T, N, HV, L, K: tl.constexpr,
    V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TWO_WRITES: tl.constexpr,
    ERASE_RATE: tl.constexpr, HAS_H0: tl.constexpr, HAS_HT: tl.constexpr, V_FIRST: tl.constexpr,
    VARLEN: tl.constexpr, GAPS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute the outputs o and the final states ht by a scan over chunks.

    One program computes BV columns of one head's state and keeps them in registers from chunk to chunk. The
    operands come from ``dplr_prepare``.

    h0: the states that enter the sequences or, if these are split, the segments.
    undivided: 1 for heads whose sequences are not split after all, or None.

    q_in, b_out, k_out, W: [rows, HV, K].
    M, P, R: [rows, HV, BT].
    v: [rows, HV, V].
    G: [rows, HV, K], fp32: decays summed within each chunk.
    h0: [segments, HV, K, V] or, with V_FIRST, [segments, HV, V, K].
    o: [rows, HV, V].
    ht: [N, HV, K, V] or, with V_FIRST, [N, HV, V, K], fp32.
    undivided: [N, HV], int32, or None.
    bounds: [N + 1] or None.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    v0 = program % NV * BV
    own = program // NV
    i_h = own % HV
    n, i_part, first, length, last, entered = own_part(own // HV, i_h, undivided, bounds, T, N, HV, L,
                                                       VARLEN=VARLEN, REVERSE=False)
    if GAPS:
        if i_part == 0:
            zero_gaps(o, bounds, n, T, N, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
    if HAS_H0:
        at, inside = state_offsets(entered * HV + i_h, 0, v0, K, V, BK, BV, V_FIRST)
        h = tl.load(h0 + at, mask=inside, other=0.0).to(tl.float32)
    else:
        h = tl.zeros([BK, BV], dtype=tl.float32)
    for t0 in range(0, length, BT):
        b_W = tile(W, first, t0, length, i_h, HV, D=K, d0=0, BT=BT, BD=BK)
        b_M = tile(M, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        b_v = tile(v, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
        b_b = tile(b_out, first, t0, length, i_h, HV, D=K, d0=0, BT=BT, BD=BK)
        b_q = tile(q_in, first, t0, length, i_h, HV, D=K, d0=0, BT=BT, BD=BK)
        b_P = tile(P, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        total = sum_of_chunk(G, tl.minimum(BT, length - t0) - 1, first, t0, i_h, HV, K, 0, BK)
        b_h = h.to(b_W.dtype)
        x = tl.dot(b_M, b_v, input_precision=PRECISION)
        x += tl.dot(b_W, b_h, input_precision=PRECISION)
        b_o = tl.dot(b_q, b_h, input_precision=PRECISION)
        h *= tl.exp2(total)[:, None]
        if TWO_WRITES:
            b_R = tile(R, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
            b_k = tile(k_out, first, t0, length, i_h, HV, D=K, d0=0, BT=BT, BD=BK)
            b_o += tl.dot(b_R, b_v, input_precision=PRECISION)
            h += tl.dot(tl.trans(b_k), b_v, input_precision=PRECISION)
        b_x = x.to(b_W.dtype)
        h += tl.dot(tl.trans(b_b), b_x, input_precision=PRECISION)
        # The weighted v is rounded before this kernel. If keys are similar, the update of h is a small
        # difference of large terms. So the product with the rounding error of X is also added to h.
        if ERASE_RATE and b_x.dtype != tl.float32:
            h += tl.dot(tl.trans(b_b), (x - b_x).to(b_W.dtype))
        b_o += tl.dot(b_P, b_x, input_precision=PRECISION)
        put(o, b_o, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
    if HAS_HT:
        at, inside = state_offsets(n * HV + i_h, 0, v0, K, V, BK, BV, V_FIRST)
        tl.store(ht + at, h, mask=inside & last)


def prepare(plan: Plan, x: dict[str, Any], backward: bool = False) -> None:
    """Launch the kernels that compute the operands of the scans, and put the operands into x.

    ``dplr_prepare`` describes the operands; those that the call lacks are None. The backward calls this again
    instead of keeping the results.

    x: the arguments that all launches for one slice of the batch have in common, by parameter name.
    backward: whether the operands of the reverse scan are needed.
    """
    (_, _, HV, K), BT = x["g"].shape, plan.launch("dplr_prepare_one", "dplr_prepare").block("BT")
    add_operands(x, BT, backward)
    x["G"] = sums_of_chunks(plan, x)
    scratch = torch.empty(x["slots"], HV, BT, 16, dtype=torch.float32, device=x["q"].device)
    start_chunks(plan, (dplr_prepare, dplr_prepare_one, dplr_prepare_rest), dict(
        scratch=scratch, K=K, TWO_WRITES=x["b"] is not None, ERASE_RATE=erases(x["a"], x["b"]),
        BACKWARD=backward, HAS_LOW=x["T_low"] is not None, VARLEN=x["bounds"] is not None,
        PRECISION=precision(plan), MERGE=merging(plan)), x)


def erases(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Return True if a is given without b; a is then the erase rate per channel of Gated DeltaNet 2."""
    return a is not None and b is None


def launch_forward(plan: Plan, x: Inputs, how: Scalars) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the plan's forward launches and return o [B, T, HV, V] and the final states or None.

    The states are fp32, [N, HV, K, V] or, with ``how.state_v_first``, [N, HV, V, K].
    """
    batch = Batch(plan, x)
    o, ht = batch.outputs(how.out_dtype, how.has_ht, how.state_v_first)
    constants = dict(K=batch.K, V=batch.V, TWO_WRITES=x.b is not None, V_FIRST=how.state_v_first,
                     VARLEN=batch.packed, PRECISION=precision(plan))
    scanning = plan.launch("dplr_overlapped", "dplr_scan")
    for part in batch.parts(scanning, o=o, ht=ht, scale=how.scale):
        if plan.has("dplr_prepare_raw"):
            prepare_raw(plan, part, how.lowest)
        else:
            prepare(plan, part)
        by_transfers(batch, part, dplr_alone, constants)
        ends = dict(ERASE_RATE=erases(x.a, x.b), HAS_H0=part["h0"] is not None, HAS_HT=how.has_ht)
        if OVERLAPPED in scanning.traits:
            scan_overlapped(batch, dict(ends, states=None, V_FIRST=how.state_v_first), part)
        else:
            batch.scan(dplr_scan, dict(constants, **ends, GAPS=batch.gaps), part)
    return o, ht


def scan_overlapped(batch: Batch, arguments: dict[str, Any], part: dict[str, Any]) -> None:
    """Start the scan in Gluon. Its arguments TWO_WRITES and V follow from the batch."""
    from flashlin.kernels.dplr.overlapping import dplr_overlapped
    batch.scan(dplr_overlapped, dict(arguments, V=batch.V, TWO_WRITES=batch.x.b is not None), part)
