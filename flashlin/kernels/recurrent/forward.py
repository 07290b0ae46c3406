"""Forward kernel of the generic recurrence, whose formula is in inputs.py.

One program has a [K, BV] tile of one state, and runs over the tokens of the sequence. The tile stays in
registers, so a token costs the loads of its vectors and two sums over K. Missing tensors are None, and each
combination of tensors compiles to another kernel. The kernels never divide by a decay.
"""

import torch
import triton
import triton.language as tl

from flashlin.compat.launch import start
from flashlin.guards.plan_types import Plan
from flashlin.kernels.batch import Batch, row_stride, with_rows
from flashlin.kernels.recurrent.inputs import Inputs, bound_of
from flashlin.kernels.recurrent.recipe import SEGMENT, kept
from flashlin.kernels.tile_ops import sequence_of, zero_gaps, zero_rows


@triton.jit
def vector(x, offset, at, D: tl.constexpr):
    """Load the vector x[offset + at] in float32, with zeros where the index ``at`` is D or more."""
    return tl.load(x + offset + at, mask=at < D, other=0.0).to(tl.float32)


@triton.jit
def of_unit_length(x):
    """Return the vector x divided by its length; an epsilon of 1e-6 is added to the squared length."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def softplus(x):
    """Return log(1 + e^x), precise also for very negative x.

    If e^x is small compared with 1, log(1 + e^x) would lose most of its digits, so a series is used.
    """
    e = tl.exp(-tl.abs(x))
    return tl.maximum(x, 0.0) + tl.where(e < 0.015625, e * (1.0 - e * (0.5 - e * (0.33333333 - e * 0.25))),
                                         tl.log(1.0 + e))


@triton.jit
def gated(x, A_log, i_h, BOUND: tl.constexpr):
    """Return the log decay of a raw gate x.

    It is -e^{A_log} softplus(x) or, with a nonzero BOUND, BOUND * sigmoid(e^{A_log} x).
    """
    rate = tl.exp(tl.load(A_log + i_h).to(tl.float32))
    if BOUND != 0:
        return BOUND / (1.0 + tl.exp(-rate * x))
    else:
        return -rate * softplus(x)


@triton.jit
def decayed(S, g, gamma, gk, gv, A_log, dt_bias, row, i_h, in_k, in_v, K: tl.constexpr, V: tl.constexpr,
            BOUND: tl.constexpr):
    """Return the state S after the decays of one token: g, gamma, gk and gv, each of which may be None.

    ``recurrent_forward`` has the shapes of tensors, and ``updated`` explains the other parameters.
    """
    if g is not None:
        rate = tl.load(g + row).to(tl.float32)
        if A_log is not None:
            if dt_bias is not None:
                rate += tl.load(dt_bias + i_h).to(tl.float32)
            rate = gated(rate, A_log, i_h, 0)
        S = S * tl.exp(rate)
    if gamma is not None:
        S = S * tl.exp(tl.load(gamma + i_h).to(tl.float32))
    if gk is not None:
        rates = vector(gk, row * K, in_k, K)
        if g is None:
            if A_log is not None:
                if dt_bias is not None:
                    rates += vector(dt_bias, i_h * K, in_k, K)
                rates = gated(rates, A_log, i_h, BOUND)
        S = S * tl.exp(rates)[:, None]
    if gv is not None:
        S = S * tl.exp(vector(gv, row * V, in_v, V))[None, :]
    return S


@triton.jit
def strength(beta, row, in_v, V: tl.constexpr, PER_CHANNEL: tl.constexpr, SIGMOID: tl.constexpr):
    """Load beta of one token: a scalar or, with PER_CHANNEL, [BV].

    SIGMOID: 0, or a factor. With a factor, return SIGMOID * sigmoid(beta).
    """
    if PER_CHANNEL:
        x = vector(beta, row * V, in_v, V)
    else:
        x = tl.load(beta + row).to(tl.float32)
    if SIGMOID != 0:
        x = SIGMOID / (1.0 + tl.exp(-x))
    return x


@triton.jit
def updated(S, b_k, b_p, b_v, beta, g, gamma, gk, gv, a, b, A_log, dt_bias, row, i_h, in_k, in_v,
            K: tl.constexpr, V: tl.constexpr, DELTA: tl.constexpr, PER_CHANNEL: tl.constexpr,
            SIGMOID: tl.constexpr, RATE: tl.constexpr, BOUND: tl.constexpr, ERASE_RATE: tl.constexpr,
            UNDECAYED: tl.constexpr):
    """Return the state after one token, see the formula in inputs.py.

    b_p: the vector with which the prediction of DELTA reads the state. UNDECAYED: it reads the state before
    the decay. RATE: use -a b instead of b. ERASE_RATE: beta multiplies only v, and not the prediction.

    S: [BK, BV]. b_k, b_p: [BK]. b_v: [BV]. ``recurrent_forward`` has the shapes of the other tensors.
    row: index of the token and value head, token * HV + i_h.
    in_k, in_v: [BK] and [BV], indices of key and value channels.
    """
    if DELTA:
        if beta is not None:  # load before the reductions, in which warps wait for each other
            b_beta = strength(beta, row, in_v, V, PER_CHANNEL, SIGMOID)
    if b is not None:
        b_a = vector(a, row * K, in_k, K)
        read = tl.sum(S * b_a[:, None], 0)
    if UNDECAYED:
        predicted = tl.sum(S * b_p[:, None], 0)
    S = decayed(S, g, gamma, gk, gv, A_log, dt_bias, row, i_h, in_k=in_k, in_v=in_v, K=K, V=V, BOUND=BOUND)
    if b is not None:
        b_b = vector(b, row * K, in_k, K)
        if RATE:
            b_b *= -b_a
        S += b_b[:, None] * read[None, :]
    u = b_v
    if DELTA:
        if not UNDECAYED:
            predicted = tl.sum(S * b_p[:, None], 0)
        if ERASE_RATE:
            u = b_v * b_beta - predicted
        else:
            u = b_v - predicted
            if beta is not None:
                u *= b_beta
    return S + b_k[:, None] * u[None, :]


@triton.jit
def token_of(i, length, REVERSE: tl.constexpr):
    """Return the position of the token that step i processes: i, or length - 1 - i with REVERSE."""
    if REVERSE:
        return length - 1 - i
    else:
        return i


@triton.jit
def kept_states(n, first, T, SEGMENT: tl.constexpr, VARLEN: tl.constexpr):
    """Return the index of the first kept state of sequence n.

    Each sequence keeps one state for each full segment before its last token, so the ranges of different
    sequences do not overlap.
    """
    if VARLEN:
        return first // SEGMENT
    else:
        return n.to(tl.int64) * ((T - 1) // SEGMENT)


@triton.jit
def tile_of_state(in_k, in_v, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """Return the offsets of a [BK, BV] tile within a state stored [K, V] or, with V_FIRST, [V, K]."""
    if V_FIRST:
        return in_k[:, None] + in_v[None, :] * K
    else:
        return in_k[:, None] * V + in_v[None, :]


@triton.jit(do_not_specialize=["scale", "T", "N", "H", "HV", "P", "q_row", "k_row", "v_row"])
def recurrent_forward(
    q, k,  # [rows, H, K]
    v,  # [rows, HV, V]
    beta,  # [rows, HV] or, with PER_CHANNEL, [rows, HV, V]
    g,  # [rows, HV]
    gamma,  # [HV]
    gk,  # [rows, HV, K]
    gv,  # [rows, HV, V]
    bonus,  # [HV, K]
    a,  # [rows, HV, K] or, with UNDECAYED, [rows, H, K]
    b,  # [rows, HV, K]
    A_log,  # [HV]
    dt_bias,  # [HV] or, for gk, [HV, K]
    h0,  # [N or P, HV, K, V] or, with V_FIRST, [N or P, HV, V, K]
    o,  # [rows, HV, V]
    ht,  # same shape as h0
    states,  # [kept, HV, K, V], fp32
    indices,  # [N]
    bounds,  # [N + 1]
    scale,
    T, N, H, HV,
    P,  # number of states in the pool
    q_row, k_row, v_row,  # elements from one token to the next
    state_row,  # elements from one state of h0 and ht to the next
    K: tl.constexpr, V: tl.constexpr, SEGMENT: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, DELTA: tl.constexpr, EARLIER: tl.constexpr, REVERSE: tl.constexpr, L2NORM: tl.constexpr,
    PER_CHANNEL: tl.constexpr, SIGMOID: tl.constexpr, RATE: tl.constexpr, BOUND: tl.constexpr,
    V_FIRST: tl.constexpr, VARLEN: tl.constexpr, GAPS: tl.constexpr, ERASE_RATE: tl.constexpr,
    UNDECAYED: tl.constexpr,
):
    """Run the recurrence over the tokens; write the outputs o, the final states ht and the kept states.

    Missing tensors are None. With indices, h0 and ht are the same pool of P states, and sequence n uses state
    indices[n]. If this index is outside the pool, the outputs of the sequence are zero, and the pool does not
    change.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    v0 = program % NV * BV
    nh = program // NV
    i_h = nh % HV
    n = nh // HV
    i_qk = i_h // (HV // H)
    first, length = sequence_of(n, bounds, T, VARLEN)
    if GAPS:
        zero_gaps(o, bounds, n, T, N, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
    in_k = tl.arange(0, BK)
    in_v = v0 + tl.arange(0, BV)
    inside = (in_k < K)[:, None] & (in_v < V)[None, :]
    tile = tile_of_state(in_k, in_v, K, V, V_FIRST)
    here = inside
    slot = n.to(tl.int64)
    if indices is not None:
        slot = tl.load(indices + n).to(tl.int64)
        mine = (slot >= 0) & (slot < P)
        zero_rows(o, first, tl.where(mine, 0, length), i_h, HV, V, v0, BT, BV)
        length = tl.where(mine, length, 0)
        # not "& mine": in the interpreter of Triton 3.9, two scalars do not make a mask
        here = inside & (in_v < tl.where(mine, V, 0))[None, :]
    at = slot * state_row + i_h.to(tl.int64) * (K * V)
    if h0 is not None:
        S = tl.load(h0 + at + tile, mask=here, other=0.0).to(tl.float32)
    else:
        S = tl.zeros([BK, BV], dtype=tl.float32)
    for i in range(length):
        if states is not None:
            if (i > 0) & (i % SEGMENT == 0):
                keep = (kept_states(n, first, T, SEGMENT, VARLEN) + i // SEGMENT - 1) * HV + i_h
                tl.store(states + keep * (K * V) + in_k[:, None] * V + in_v[None, :], S, mask=inside)
        token = first + token_of(i, length, REVERSE)
        row = token * HV + i_h
        b_q = vector(q, token * q_row + i_qk * K, in_k, K)
        b_k = vector(k, token * k_row + i_qk * K, in_k, K)
        b_v = vector(v, token * v_row + i_h * V, in_v, V)
        if L2NORM:
            b_q = of_unit_length(b_q)
            b_k = of_unit_length(b_k)
        b_p = b_k
        if ERASE_RATE:
            b_p = vector(a, row * K, in_k, K) * b_k
        if UNDECAYED:
            if a is not None:
                b_p = vector(a, (token * H + i_qk) * K, in_k, K)
                if L2NORM:
                    b_p = of_unit_length(b_p)
        b_q *= scale
        if EARLIER:
            b_o = tl.sum(S * b_q[:, None], 0)
            if bonus is not None:
                b_o += tl.sum(vector(bonus, i_h * K, in_k, K) * b_q * b_k, 0) * b_v
        S = updated(S, b_k, b_p, b_v, beta, g, gamma, gk, gv, a=a, b=b, A_log=A_log, dt_bias=dt_bias, row=row,
                    i_h=i_h, in_k=in_k, in_v=in_v, K=K, V=V, DELTA=DELTA, PER_CHANNEL=PER_CHANNEL,
                    SIGMOID=SIGMOID, RATE=RATE, BOUND=BOUND, ERASE_RATE=ERASE_RATE, UNDECAYED=UNDECAYED)
        if not EARLIER:
            b_o = tl.sum(S * b_q[:, None], 0)
        tl.store(o + row * V + in_v, b_o.to(o.dtype.element_ty), mask=in_v < V)
    if ht is not None:
        tl.store(ht + at + tile, S.to(ht.dtype.element_ty), mask=here)


def launch_forward(plan: Plan, x: Inputs, flags: tuple[str, ...], scale: float, has_ht: bool,
                   out_dtype: torch.dtype, in_place: bool = False, indices: torch.Tensor | None = None,
                   ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Run the forward launch; return o [B, T, HV, V], the final states or None, and the kept states or None.

    Backward starts its segments from the kept states.

    x: its tensors are contiguous, except that q, k and v may have any stride between tokens, and a pool any
        stride between states.
    flags: see FLAGS in inputs.py.
    in_place: True to write the final states to x.h0, which may have any float dtype.
    indices: [N]; if given, x.h0 is a pool of states, and these are the states to use.
    """
    x = x._replace(q=with_rows(x.q), k=with_rows(x.k), v=with_rows(x.v))
    batch, launch = Batch(plan, x), plan.launch("recurrent_forward")
    HV, K, V = batch.HV, batch.K, batch.V
    o, ht = batch.outputs(out_dtype, has_ht and not in_place, "v_first" in flags)
    ht, states = x.h0 if in_place else ht, None
    if any(launch.kernel == "recurrent_backward" for launch in plan.launches):
        states = torch.empty(kept(batch.T, batch.N, batch.packed), HV, K, V, dtype=torch.float32,
                             device=batch.device)
    state_row = HV * K * V if x.h0 is None or x.h0.shape[0] <= 1 else x.h0.stride(0)
    sigmoid = (2.0 if "neg_eigval" in flags else 1.0) if "sigmoid" in flags else 0.0
    constants = dict(constants_of(x, flags), L2NORM="l2norm" in flags, SIGMOID=sigmoid, RATE="rate" in flags,
                     BOUND=bound_of(flags), GAPS=batch.gaps, ERASE_RATE="erase" in flags,
                     UNDECAYED="undecayed" in flags)
    strips = -(-V // launch.block("BV"))
    for part in batch.parts(launch, o=o, ht=ht, states=by_sequence(states, batch), indices=indices,
                            scale=scale, q_row=row_stride(x.q), k_row=row_stride(x.k), v_row=row_stride(x.v),
                            state_row=state_row):
        if indices is not None:  # each slice of the batch gets the whole pool
            part.update(h0=x.h0, ht=ht)
        h0 = part["h0"]
        start(launch, recurrent_forward, part["N"] * HV * strips,
              dict(constants, P=0 if h0 is None else h0.shape[0]), part)
    return o, ht, states


def by_sequence(states: torch.Tensor | None, batch: Batch) -> torch.Tensor | None:
    """Return the kept states as a view [N, kept, HV, K, V].

    For packed sequences return them unchanged, because the number of kept states differs between sequences.
    """
    if states is None or batch.packed:
        return states
    return states.view(batch.N, -1, *states.shape[1:]) if len(states) else states


def constants_of(x: Inputs, flags: tuple[str, ...]) -> dict[str, object]:
    """Return the constexpr arguments that forward and backward share, except the tile sizes."""
    return dict(K=x.q.shape[3], V=x.v.shape[3], SEGMENT=SEGMENT, DELTA="delta" in flags,
                EARLIER="before" in flags, REVERSE="reverse" in flags,
                PER_CHANNEL=x.beta is not None and x.beta.ndim == 4, V_FIRST="v_first" in flags,
                VARLEN=x.bounds is not None)
