"""Operands of the scans for KDA with a bounded gate, in chunks of 16 tokens, with sums of decays inside.

The lower bound of the gate guarantees that each chunk of 16 tokens fits one decay reference
(``one_reference.py``). The tiles of such a chunk fit the registers of two warps, and its triangular system
needs no products of blocks. In forward, this kernel also normalizes q and k and computes the gate. In
backward, it gets normalized q and k, and the log decays.

q and k are loaded twice if they have to be normalized, because keeping them would need more registers.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from flashlin.compat.descriptors import described
from flashlin.compat.launch import start
from flashlin.guards.plan_types import Plan
from flashlin.kernels.batch import precision
from flashlin.kernels.gla.decays import decays_from, scored
from flashlin.kernels.sequence_split import part_of
from flashlin.kernels.tile_ops import LOG2_E, beta_of, put, tile
from flashlin.kernels.triangular_inverse import inverse, merging, product


@triton.jit
def row_of(
    x,  # [BT, BK]
    row,
    BT: tl.constexpr,
):
    """Return a row of a tile, [BK]."""
    return tl.sum(tl.where((tl.arange(0, BT) == row)[:, None], x, 0.0), 0)


@triton.jit
def add_channels(
    L, b_P,  # [BT, BT]
    qk,  # [BT]
    q, k,  # [rows, H, K]
    g,  # [rows, HV, K]
    dt_bias,  # [HV, K], fp32, or None
    q_in, a_in, b_out,  # [rows, HV, K]
    G,  # [rows, HV, K], fp32
    of_q, of_k,  # [BT]: 1 / length of each row
    b_beta,  # [BT]
    rate, scale, lowest,
    first, length, i_qk, i_h, H, HV,
    K: tl.constexpr, k0: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, RAW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add BK channels to the scores L and P and to the diagonal qk of P, and store their operands.

    Return L, P, qk, and a times its decay from the chunk's start until it reads the state, [BT, BK].
    """
    columns = k0 + tl.arange(0, BK)
    b_g = tile(g, first, 0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
    b_q = tile(q, first, 0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK)
    b_k = tile(k, first, 0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK)
    if RAW:
        if dt_bias is not None:
            b_g += tl.load(dt_bias + i_h * K + columns, mask=columns < K, other=0.0)[None, :]
        b_g = lowest / (1.0 + tl.exp2(-rate * b_g * LOG2_E))
        b_q = (b_q.to(tl.float32) * of_q[:, None]).to(b_q.dtype)
        b_k = (b_k.to(tl.float32) * of_k[:, None]).to(b_k.dtype)
    b_q = b_q.to(tl.float32)
    b_k = b_k.to(tl.float32)
    b_G = tl.cumsum(tl.where((tl.arange(0, BT) < length)[:, None], b_g * LOG2_E, 0.0), 0)
    total = row_of(b_G, length - 1, BT)
    tl.store(G + ((first + length - 1) * HV + i_h) * K + columns, total, mask=columns < K)
    reading, written, entered, left, kept = decays_from(b_G, b_G, row_of(b_G, 0, BT), total, BT, False)
    qk += tl.sum(b_q * b_k, 1)
    X = b_k * written
    put(q_in, b_q * (entered * scale), first, 0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
    put(b_out, X * left[None, :], first, 0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
    b_a = b_k * -b_beta[:, None]
    L = scored(L, b_a * reading, X, q.dtype.element_ty, PRECISION)
    b_P = scored(b_P, b_q * reading, X, q.dtype.element_ty, PRECISION)
    b_a *= entered
    if a_in is not None:
        put(a_in, b_a, first, 0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
    return L, b_P, qk, b_a


@described()
@triton.jit(do_not_specialize=["T", "N", "scale", "lowest"])
def dplr_prepare_raw(
    q, k,  # [rows, H, K]
    g,  # [rows, HV, K]
    beta,  # [rows, HV]
    A_log,  # [HV], fp32, or None
    dt_bias,  # [HV, K], fp32, or None
    q_in, a_in, b_out, W,  # [rows, HV, K]
    M, P, T_, T_low,  # [rows, HV, BT]
    G,  # [rows, HV, K], fp32
    scratch,  # [programs, BT, 16], fp32
    bounds,  # [N + 1] or None
    scale,
    lowest,  # lower bound of the log decays
    T, N, H, HV,
    K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
    MERGE: tl.constexpr,
    REGISTERS: tl.constexpr,  # bound on the registers per thread, see compat/descriptors.py
):
    """Compute the operands of the scans for all chunks of KDA, with one program per chunk and head.

    ``dplr_prepare`` describes the operands. a_in, T_ and T_low, which only the reverse scan reads, may be
    None. K is at most 2 BK.

    A_log: if given, q and k are normalized first, and the log decays are lowest * sigmoid(exp(A_log) * (g +
        dt_bias)). Otherwise g contains the log decays.
    G: receives the sum of decays of each chunk, in the chunk's last row. The other rows are not written.
    """
    RAW: tl.constexpr = A_log is not None
    program = tl.program_id(0)
    i_h = program % HV
    i_qk = i_h // (HV // H)
    n, i_c, first, length, last = part_of(program // HV, bounds, T, N, BT, VARLEN)
    if length > 0:
        rows = tl.arange(0, BT)
        below = rows[:, None] > rows[None, :]
        diagonal = rows[:, None] == rows[None, :]
        of_q = tl.zeros([BT], dtype=tl.float32)
        of_k = tl.zeros([BT], dtype=tl.float32)
        rate = 1.0
        if RAW:
            rate = tl.exp2(tl.load(A_log + i_h) * LOG2_E)
            for k0 in range(0, K, BK):
                b_q = tile(q, first, 0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
                b_k = tile(k, first, 0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
                of_q += tl.sum(b_q * b_q, 1)
                of_k += tl.sum(b_k * b_k, 1)
            of_q = tl.rsqrt(of_q + 1e-6)
            of_k = tl.rsqrt(of_k + 1e-6)
        b_beta = beta_of(beta, first, 0, length, i_h, HV, BT)
        L = tl.zeros([BT, BT], dtype=tl.float32)
        b_P = tl.zeros([BT, BT], dtype=tl.float32)
        qk = tl.zeros([BT], dtype=tl.float32)
        L, b_P, qk, b_a = add_channels(L, b_P, qk, q, k, g, dt_bias, q_in, a_in, b_out=b_out, G=G, of_q=of_q,
                                       of_k=of_k, b_beta=b_beta, rate=rate, scale=scale, lowest=lowest,
                                       first=first, length=length, i_qk=i_qk, i_h=i_h, H=H, HV=HV, K=K, k0=0,
                                       BT=BT, BK=BK, RAW=RAW, PRECISION=PRECISION)
        if K > BK:
            L, b_P, qk, other_a = add_channels(
                L, b_P, qk, q, k, g, dt_bias, q_in, a_in, b_out=b_out, G=G, of_q=of_q, of_k=of_k,
                b_beta=b_beta, rate=rate, scale=scale, lowest=lowest, first=first, length=length, i_qk=i_qk,
                i_h=i_h, H=H, HV=HV, K=K, k0=BK, BT=BT, BK=BK, RAW=RAW, PRECISION=PRECISION)
        b_P = tl.where(below, b_P, tl.where(diagonal, qk[:, None], 0.0)) * scale
        put(P, b_P, first, 0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        X = inverse(tl.where(below, -L, 0.0), scratch + program.to(tl.int64) * (BT * 16), BT, MERGE)
        put(M, X * b_beta[None, :], first, 0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        if T_ is not None:
            put(T_, X, first, 0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        if T_low is not None:
            low = X - X.to(T_low.dtype.element_ty).to(tl.float32)
            put(T_low, low, first, 0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        put(W, product(X, b_a, MERGE), first, 0, length, i_h, HV, D=K, d0=0, BT=BT, BD=BK)
        if K > BK:
            put(W, product(X, other_a, MERGE), first, 0, length, i_h, HV, D=K, d0=BK, BT=BT, BD=BK)


def prepare_raw(plan: Plan, x: dict[str, Any], lowest: float, G: torch.Tensor | None = None) -> None:
    """Launch ``dplr_prepare_raw`` and put the operands of the scans into x, as ``prepare`` does.

    lowest: the lower bound of the log decays. G: memory for the sums of decays, [B, T, HV, K] in fp32. If it
    is given, the operands of the reverse scan are also computed.
    """
    q, launch, back = x["q"], plan.launch("dplr_prepare_raw"), G is not None
    B, T, HV, K = x["g"].shape
    BT, packed = launch.block("BT"), x["bounds"] is not None

    def new(columns: int, wanted: bool = True) -> torch.Tensor | None:
        return torch.empty(B, T, HV, columns, dtype=q.dtype, device=q.device) if wanted else None
    x.update(q_in=new(K), a_in=new(K, back), b_out=new(K), k_out=None, W=new(K), M=new(BT), P=new(BT), R=None,
             N_=None, T_=new(BT, back), T_low=new(BT, back and q.dtype != torch.float32),
             G=torch.empty(B, T, HV, K, dtype=torch.float32, device=q.device) if G is None else G)
    if T:
        chunks = x["N"] + (T // BT if T > BT else 0) if packed else B * -(-T // BT)
        scratch = torch.empty(chunks * HV, BT, 16, dtype=torch.float32, device=q.device)
        start(launch, dplr_prepare_raw, chunks * HV, dict(
            scratch=scratch, lowest=lowest, K=K, VARLEN=packed, PRECISION=precision(plan),
            MERGE=merging(plan)), x)
