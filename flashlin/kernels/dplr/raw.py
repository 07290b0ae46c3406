"""Operands of the scans for one writing vector in chunks of 16 tokens, with sums of decays inside.

The tiles of such a chunk fit the registers of two warps, and its triangular system needs no products of
blocks. Nearly all chunks of 16 tokens fit one decay reference (``one_reference.py``). A lower bound of the
gate can guarantee it (LOWEST in ``inputs.py``). Without such a bound, the kernel tests BK channels of a chunk
at a time, and halves those that do not fit (``forward.py``).

For KDA as its layer calls it, this kernel also normalizes q and k and computes the gate. q is then loaded
twice, because keeping it would need more registers. The lengths of k are known only after all channels. So
products [BT, BT] are divided by them, instead of k.

This kernel takes twice the time that its bytes need. It became faster with fewer instructions. More programs
at a time gained 2 % at most (``benchmarks/results/fewer-instructions-kda-*``). So decays are relative to half
the sum of all 16 tokens. If the first token were left out, as in the other kernels, one more sum over rows
would be needed.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from flashlin.compat.descriptors import described
from flashlin.compat.launch import start
from flashlin.guards.plan_types import Plan
from flashlin.kernels.batch import precision
from flashlin.kernels.configs import FACTS
from flashlin.kernels.dplr.recipe import FEW
from flashlin.kernels.dplr.windows import find_windows, squares_of, store_facts
from flashlin.kernels.gla.decays import logs, still_served, sums_at
from flashlin.kernels.gla.forward import halves
from flashlin.kernels.gla.parts import sum_of_chunk
from flashlin.kernels.sequence_split import part_of
from flashlin.kernels.tile_ops import LOG2_E, beta_of, put, tile
from flashlin.kernels.triangular_inverse import inverse, merging, product, top_half


@triton.jit
def larger(x, y):
    """Return the maximum of x and y, or NaN if one of them is NaN."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def log_decays(b_g, A_log, dt_bias, lowest, i_h, columns, K: tl.constexpr):
    """Return the log decays of raw gates of head i_h in bits, that is log2(e) times their natural logarithms.

    These are lowest * sigmoid(exp(A_log) * (b_g + dt_bias)).

    A_log: [HV]. dt_bias: [HV, K] or None. columns: [BK], the columns of b_g [BT, BK].
    """
    rate = tl.exp2(tl.load(A_log + i_h) * LOG2_E)
    if dt_bias is not None:
        b_g += tl.load(dt_bias + i_h * K + columns, mask=columns < K, other=0.0)[None, :]
    root = tl.rsqrt(1.0 + tl.exp2(b_g * (-rate * LOG2_E)))  # its square is faster than a division
    return root * root * (lowest * LOG2_E)


@triton.jit
def add_channels(L, b_P, qk, highest, kk, ka, aa, qq, q, k, g, a, A_log, dt_bias, q_in, a_in, b_out, G, of_q,
                 b_beta, scale, lowest, first, length, i_qk, i_h, H, HV, K: tl.constexpr, k0: tl.constexpr,
                 BT: tl.constexpr, BK: tl.constexpr, NORMALIZE: tl.constexpr, BOUNDED: tl.constexpr,
                 PRECISION: tl.constexpr):
    """Add BK channels to the scores L and P and to the diagonal qk of P, and store their operands.

    L are the scores of k times its erase rates or, with one rate beta for all channels, of k itself. Also
    update the largest log2 decay of each token, and sums over channels: k^2, -k b, b^2 and q^2, where b is k
    times its erase rates, or k. Return all of these, and then b times its decay since the chunk's start,
    [BT, BK]. k is as given. The caller multiplies by beta and divides by the lengths of k.

    ``dplr_prepare_raw`` has the shapes of tensors. L and b_P are [BT, BT], and qk, highest, kk, ka, aa, qq
    and b_beta are [BT]. of_q: [BT], 1 / length of each row of q.
    """
    DTYPE: tl.constexpr = q.dtype.element_ty
    columns = k0 + tl.arange(0, BK)
    b_g = tile(g, first, 0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
    b_q = tile(q, first, 0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
    b_k = tile(k, first, 0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
    if A_log is not None:
        b_g = log_decays(b_g, A_log, dt_bias, lowest, i_h, columns, K=K)
    else:
        b_g = logs(b_g)
    if NORMALIZE:
        b_q *= of_q[:, None]
    b_G = tl.cumsum(tl.where((tl.arange(0, BT) < length)[:, None], b_g, 0.0), 0)
    total = tl.sum(tl.where((tl.arange(0, BT) == length - 1)[:, None], b_G, 0.0), 0)
    tl.store(G + ((first + length - 1) * HV + i_h) * K + columns, total, mask=columns < K)
    qk += tl.sum(b_q * b_k, 1)
    b_a = b_k
    if a is not None:
        b_a *= tile(a, first, 0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
    if K % BK != 0:
        b_g = tl.where((columns < K)[None, :], b_g, float("-inf"))
    highest = larger(highest, tl.reduce(b_g, 1, larger))
    kk += tl.sum(b_k * b_k, 1)
    ka -= tl.sum(b_k * b_a, 1)
    aa += tl.sum(b_a * b_a, 1)
    qq += tl.sum(b_q * b_q, 1)
    if BOUNDED > 0 or still_served(1, total) > 0:  # decays relative to the middle of all decays
        middle = total * 0.5
        half = tl.exp2(middle)[None, :]
        reading = tl.exp2(b_G - middle[None, :])
        b_q *= reading
        b_a *= reading
        X = b_k * tl.exp2(middle[None, :] - b_G)
        put(q_in, b_q * (half * scale), first, 0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
        put(b_out, X * half, first, 0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
        top = top_half(X) if DTYPE == tl.bfloat16 else X
        if DTYPE == tl.bfloat16:  # two products, as in ``scored``; truncation is faster than rounding
            rest = tl.trans((X - top).to(DTYPE))
            L = tl.dot(b_a.to(DTYPE), rest, L)
            b_P = tl.dot(b_q.to(DTYPE), rest, b_P)
        top = tl.trans(top.to(DTYPE))
        L += tl.dot(b_a.to(DTYPE), top, input_precision=PRECISION)
        b_P += tl.dot(b_q.to(DTYPE), top, input_precision=PRECISION)
        b_a *= half
    else:  # see prepare_chunk; elements of L and P that are not below their diagonals are invalid
        put(G, b_G, first, 0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
        tl.debug_barrier()  # other threads read these sums
        for level in range(4):
            half = halves(level, BT)
            second = (half % 2 == 1)[:, None]
            b_M = sums_at(G, tl.minimum(((half | 1) << level) - 1, length - 1), first, 0, i_h, HV, K, k0, BK)
            decay = tl.exp2(tl.where(second, b_G - b_M, b_M - b_G))
            X1 = (tl.where(second, b_q, b_k) * decay).to(DTYPE)
            X2 = (tl.where(second, b_a, b_k) * decay).to(DTYPE)
            partner = (half ^ 1)[:, None] == half[None, :]
            cross = tl.where(partner, tl.dot(X1, tl.trans(X2), input_precision=PRECISION), 0.0)
            b_P += cross
            L += tl.trans(cross)
        entered = tl.exp2(b_G)
        put(q_in, b_q * (entered * scale), first, 0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
        put(b_out, b_k * tl.exp2(total[None, :] - b_G), first, 0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
        b_a *= entered
    if a_in is not None:
        put(a_in, b_a * -b_beta[:, None], first, 0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
    return L, b_P, qk, highest, kk, ka, aa, qq, b_a


@triton.jit(do_not_specialize=["T", "lowest"])
def dplr_sums(
    g, A_log, dt_bias, G, served, lowest, T, HV, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):
    """Sum the log decays within chunks of BT tokens into G, and find which chunks fit one decay reference.

    One program computes one chunk and head. All sequences are dense and contain whole chunks.

    Log2 decays that are given count as at least -126, as in ``gla_sums``.

    A_log: if given, g contains raw gates, as in ``dplr_prepare_raw``.
    served: receives 1 for chunks that fit one decay reference, else 0, as in ``dplr_prepare_one``.

    g: [rows, HV, K].
    A_log: [HV], fp32, or None.
    dt_bias: [HV, K], fp32, or None.
    G: [rows, HV, K], fp32.
    served: [slots, HV], int32.
    lowest: lower bound of the log decays.
    T: tokens of a sequence, a multiple of BT.
    """
    program = tl.program_id(0)
    i_h = program % HV
    chunk = program // HV
    first = chunk.to(tl.int64) * BT
    for k0 in range(0, K, BK):
        b_g = tile(g, first, 0, BT, i_h, HV, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
        if A_log is not None:
            b_g = log_decays(b_g, A_log, dt_bias, lowest, i_h, k0 + tl.arange(0, BK), K=K)
        else:
            b_g = logs(b_g)
        put(G, tl.cumsum(b_g, 0), first, 0, BT, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
    tl.debug_barrier()  # other threads read these sums
    serves = 1
    for k0 in range(0, K, BK):
        begin = sum_of_chunk(G, 0, first, 0, i_h, HV, K, k0, BK)
        serves = still_served(serves, sum_of_chunk(G, BT - 1, first, 0, i_h, HV, K, k0, BK) - begin)
    tl.store(served + (chunk + chunk // (T // BT)) * HV + i_h, serves)


@described()
@triton.jit(do_not_specialize=["T", "N", "H", "HV", "scale", "lowest"])
def dplr_prepare_raw(
    q, k, g, a, beta, A_log, dt_bias, q_in, a_in, b_out, W, M, P, T_, T_low, G, v, do, facts, scratch, bounds,
    scale, lowest, T, N, H, HV, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    NORMALIZE: tl.constexpr, BOUNDED: tl.constexpr, FACTS: tl.constexpr, VARLEN: tl.constexpr,
    PRECISION: tl.constexpr, MERGE: tl.constexpr, REGISTERS: tl.constexpr,
):
    """Compute the operands of the scans for all chunks, with one program per chunk and head.

    ``dplr_prepare`` describes the operands. a_in, T_ and T_low, which only the reverse scan reads, may be
    None. K is at most 2 BK.

    a: the erase rates per channel of Gated DeltaNet 2, which has no beta.
    A_log: if given, the log decays are lowest * sigmoid(exp(A_log) * (g + dt_bias)). Otherwise g contains
        the log decays.
    NORMALIZE: first normalize q and k. Then b_out and the columns of P belong to k as given, and M and W are
        divided by the length of the row's k instead. a_in, T_ and T_low must be None.
    BOUNDED: 1 if all chunks fit one decay reference, so that they need no test, else 0.
    G: receives the sum of decays of each chunk, in the chunk's last row. Its other rows may be overwritten.
    facts: if given, receives what ``store_facts`` computes from v and, in backward, from do.

    q, k: [rows, H, K].
    g: [rows, HV, K].
    a: [rows, HV, K], or None.
    beta: [rows, HV], or None.
    A_log: [HV], fp32, or None.
    dt_bias: [HV, K], fp32, or None.
    q_in, a_in, b_out, W: [rows, HV, K].
    M, P, T_, T_low: [rows, HV, BT].
    G: [rows, HV, K], fp32.
    v, do: [rows, HV, V], or None.
    facts: [HV, FACTS, programs of a head], fp32, or None.
    scratch: [programs, BT, 16], fp32.
    bounds: [N + 1] or None.
    lowest: lower bound of the log decays.
    REGISTERS: bound on the registers per thread, see compat/descriptors.py.
    """
    program = tl.program_id(0)
    i_h = program % HV
    i_qk = i_h // (HV // H)
    n, i_c, first, length, last = part_of(program // HV, bounds, T, N, BT, VARLEN)
    if length > 0:
        rows = tl.arange(0, BT)
        below = rows[:, None] > rows[None, :]
        diagonal = rows[:, None] == rows[None, :]
        of_q = tl.zeros([BT], dtype=tl.float32)
        if NORMALIZE:
            of_q = tl.rsqrt(squares_of(q, first, length, i_qk, H, D=K, BT=BT, BD=BK) + 1e-6)
        b_beta = tl.full([BT], 1.0, tl.float32)
        if beta is not None:
            b_beta = beta_of(beta, first, 0, length, i_h, HV, BT)
        L = tl.zeros([BT, BT], dtype=tl.float32)
        b_P = tl.zeros([BT, BT], dtype=tl.float32)
        qk = tl.zeros([BT], dtype=tl.float32)
        kk, ka, aa, qq, highest, b_a = qk, qk, qk, qk, qk + float("-inf"), L
        for k0 in tl.static_range(0, K, BK):
            other_a = b_a
            L, b_P, qk, highest, kk, ka, aa, qq, b_a = add_channels(
                L, b_P, qk, highest, kk, ka, aa, qq, q, k=k, g=g, a=a, A_log=A_log, dt_bias=dt_bias,
                q_in=q_in, a_in=a_in, b_out=b_out, G=G, of_q=of_q, b_beta=b_beta, scale=scale, lowest=lowest,
                first=first, length=length, i_qk=i_qk, i_h=i_h, H=H, HV=HV, K=K, k0=k0, BT=BT, BK=BK,
                NORMALIZE=NORMALIZE, BOUNDED=BOUNDED, PRECISION=PRECISION)
        b_P = tl.where(below, b_P, tl.where(diagonal, qk[:, None], 0.0)) * scale
        put(P, b_P, first, 0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        of_k = tl.full([BT], 1.0, tl.float32)
        if NORMALIZE:
            of_k = tl.rsqrt(kk + 1e-6)
        L = tl.where(below, L * (b_beta * of_k)[:, None] * of_k[None, :], 0.0)
        X = inverse(L, scratch + program.to(tl.int64) * (BT * 16), BT, MERGE)
        b_M = X * of_k[:, None] * b_beta[None, :]
        put(M, b_M, first, 0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        if T_ is not None:
            put(T_, X, first, 0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        if T_low is not None:
            low = X - X.to(T_low.dtype.element_ty).to(tl.float32)
            put(T_low, low, first, 0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        b_M *= -of_k[None, :]
        if K > BK:
            put(W, product(b_M, other_a, MERGE), first, 0, length, i_h, HV, D=K, d0=0, BT=BT, BD=BK)
        put(x=W, value=product(b_M, b_a, MERGE), first=first, t0=0, length=length, i_h=i_h, H=HV, D=K,
            d0=(K - 1) // BK * BK, BT=BT, BD=BK)
        if facts is not None:  # here, because fewer values are in registers than before
            ww = squares_of(v, first, length, i_h, HV, D=V, BT=BT, BD=BK) * b_beta * b_beta
            oo = ww
            READS: tl.constexpr = do is not None
            if do is not None:
                oo = squares_of(do, first, length, i_h, HV, D=V, BT=BT, BD=BK)
            stride = tl.num_programs(0) // HV
            at = facts + i_h.to(tl.int64) * (FACTS * stride) + program // HV
            squares = of_k * of_k
            store_facts(at, stride, highest, kk * squares, ka * squares * b_beta, aa * squares * b_beta * b_beta,
                        ww, qq * (scale * scale), oo, length=length, BT=BT, READS=READS)


def add_operands(x: dict[str, Any], BT: int, back: bool) -> None:
    """Put memory for the operands of the scans into x, see ``dplr_prepare``. Those that the call lacks are None.

    back: whether the operands of the reverse scan are needed.
    """
    q, two, (B, T, HV, K) = x["q"], x["b"] is not None, x["g"].shape

    def new(columns: int, wanted: bool = True) -> torch.Tensor | None:
        return torch.empty(B, T, HV, columns, dtype=q.dtype, device=q.device) if wanted else None
    x.update(q_in=new(K), a_in=new(K, back), b_out=new(K), k_out=new(K, two), W=new(K), M=new(BT), P=new(BT),
             R=new(BT, two), N_=new(BT, two and back), T_=new(BT, back),
             T_low=new(BT, back and q.dtype != torch.float32), windows=None, windows_back=None)


def prepare_raw(plan: Plan, x: dict[str, Any], lowest: float, G: torch.Tensor | None = None) -> None:
    """Launch ``dplr_prepare_raw`` and put the operands of the scans into x, as ``prepare`` does.

    lowest: the lower bound of the log decays. G: in backward, memory for the sums of decays, [B, T, HV, K] in
    fp32. Then the operands of the reverse scan are also computed, and q and k are normalized already.
    """
    (B, T, HV, K), q, launch = x["g"].shape, x["q"], plan.launch("dplr_prepare_raw")
    BT, packed, back = launch.block("BT"), x["bounds"] is not None, G is not None
    add_operands(x, BT, back)
    x.update(facts=None, G=torch.empty_like(x["g"], dtype=torch.float32) if G is None else G)
    if T:
        chunks = x["N"] + (T // BT if T > BT else 0) if packed else B * -(-T // BT)
        scratch = torch.empty(chunks * HV, BT, 16, dtype=torch.float32, device=q.device)
        if plan.has("dplr_windows"):
            x["facts"] = torch.empty(HV, FACTS, chunks, dtype=torch.float32, device=q.device)
        start(launch, dplr_prepare_raw, chunks * HV, dict(
            scratch=scratch, lowest=lowest, K=K, V=x["v"].shape[3], FACTS=FACTS,
            NORMALIZE=x["A_log"] is not None and not back, VARLEN=packed, PRECISION=precision(plan),
            MERGE=merging(plan)), {"do": None, **x})
        find_windows(plan, x, FEW, back)


def sums_of_long_chunks(plan: Plan, x: dict[str, Any], lowest: float) -> None:
    """Launch ``dplr_sums`` and put its outputs G and served into x."""
    (B, T, HV, K), launch = x["g"].shape, plan.launch("dplr_sums")
    x["G"] = torch.empty_like(x["g"], dtype=torch.float32)
    x["served"] = torch.empty(x["slots"], HV, dtype=torch.int32, device=x["g"].device)
    start(launch, dplr_sums, B * (T // launch.block("BT")) * HV, dict(lowest=lowest, K=K), x)
