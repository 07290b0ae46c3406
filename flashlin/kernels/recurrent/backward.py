"""Backward kernel of the generic recurrence.

One program has a [K, BV] strip of one state, and runs over segments of 64 tokens from the last to the first.
For each segment, it first recomputes the states from the state that forward kept, and writes them to scratch
memory. Then it runs backwards over the tokens. At the start of token t, dS is the gradient of S_t. P and u
are defined in inputs.py. The steps for one token:

    dS += scale q do^T     dq = scale S_t do     du = dS^T k     dk = dS u
    delta: e = v - P^T k, dbeta = du . e, dv = beta du, dk -= P dv, dS -= k dv^T          else: dv = du
    a, b:  db = dS (S_{t-1}^T a), w = dS^T b, da = S_{t-1} w
        (dS is by now the gradient of P)
    decays: dg = <dS, P>, dgk its rows, dgv its columns (P without the low-rank term)
    gradient of S_{t-1}: the decayed dS, + a w^T
    before: o reads S_{t-1}, so scale q do^T is added last instead, and the bonus adds its own terms to dq,
        dk, dv.

The kernel never divides by a decay to recover a state. Each program writes partial sums over its columns of
V, and torch adds them up. So there are no atomics, and the results are deterministic.
"""

import torch
import triton
import triton.language as tl

from flashlin.compat.launch import start
from flashlin.guards.plan_types import Plan
from flashlin.kernels.batch import Batch
from flashlin.kernels.recurrent.forward import (
    by_sequence,
    constants_of,
    decayed,
    kept_states,
    strength,
    tile_of_state,
    token_of,
    updated,
    vector,
)
from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.kernels.recurrent.recipe import SEGMENT
from flashlin.kernels.tile_ops import sequence_of

# The gradients that the kernel writes if they are needed.
GRADS = ("q", "k", "v", "beta", "g", "gk", "gv", "bonus", "a", "b")
# The most bytes of scratch memory of one launch. If all sequences need more, they run in several launches.
SCRATCH = 2**30


@triton.jit(do_not_specialize=["scale", "T", "N", "H", "HV", "R", "TS"])
def recurrent_backward(
    q, k,  # [rows, H, K]
    v,  # [rows, HV, V]
    beta,  # [rows, HV] or, with PER_CHANNEL, [rows, HV, V]
    g,  # [rows, HV]
    gamma,  # [HV]
    gk,  # [rows, HV, K]
    gv,  # [rows, HV, V]
    bonus,  # [HV, K]
    a, b,  # [rows, HV, K]
    h0,  # [N, HV, K, V] or, with V_FIRST, [N, HV, V, K]
    states,  # [kept, HV, K, V], fp32
    do,  # [rows, HV, V]
    dht,  # same shape as h0
    dq, dk,  # [NV, R, HV, K], fp32
    dv,  # [rows, HV, V]
    dbeta,  # [NV, R, HV] or, with PER_CHANNEL, [R, HV, V], fp32
    dg,  # [NV, R, HV], fp32
    dgk,  # [NV, R, HV, K], fp32
    dgv,  # [R, HV, V], fp32
    dbonus,  # [NV, N, HV, K], fp32
    da, db,  # [NV, R, HV, K], fp32
    dh0,  # same shape as h0, fp32
    scratch,  # [programs, TS, BK, BV], fp32
    bounds,  # [N + 1]
    scale,
    T, N, H, HV,
    R,  # number of rows in the batch
    TS,  # tokens of a segment
    K: tl.constexpr, V: tl.constexpr, SEGMENT: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, DELTA: tl.constexpr, EARLIER: tl.constexpr, REVERSE: tl.constexpr,
    PER_CHANNEL: tl.constexpr, V_FIRST: tl.constexpr, VARLEN: tl.constexpr,
):
    """Write the gradients of all inputs, from the kept states and the gradients of the outputs.

    Gradients with a first dimension NV are partial sums, one for each strip of V: dq, dk, dgk, da, db, dg,
    dbonus and, without PER_CHANNEL, dbeta. Gradients that are not needed are None.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    i_v = program % NV
    nh = program // NV
    i_h = nh % HV
    n = nh // HV
    i_qk = i_h // (HV // H)
    first, length = sequence_of(n, bounds, T, VARLEN)
    in_k = tl.arange(0, BK)
    in_v = i_v * BV + tl.arange(0, BV)
    inside = (in_k < K)[:, None] & (in_v < V)[None, :]
    state = nh.to(tl.int64) * (K * V) + tile_of_state(in_k, in_v, K, V, V_FIRST)
    states += ((kept_states(n, first, T, SEGMENT, VARLEN) - 1) * HV + i_h) * (K * V)
    scratch += program.to(tl.int64) * TS * (BK * BV)
    in_scratch = tl.arange(0, BK)[:, None] * BV + tl.arange(0, BV)[None, :]
    if dht is not None:
        dS = tl.load(dht + state, mask=inside, other=0.0).to(tl.float32)
    else:
        dS = tl.zeros([BK, BV], dtype=tl.float32)
    if dbonus is not None:
        sum_bonus = tl.zeros([BK], dtype=tl.float32)
    segments = (length + SEGMENT - 1) // SEGMENT
    for back in range(segments):
        i0 = (segments - 1 - back) * SEGMENT
        if i0 > 0:
            S = tl.load(states + (i0 // SEGMENT).to(tl.int64) * HV * (K * V) + in_k[:, None] * V
                        + in_v[None, :], mask=inside, other=0.0)
        elif h0 is not None:
            S = tl.load(h0 + state, mask=inside, other=0.0).to(tl.float32)
        else:
            S = tl.zeros([BK, BV], dtype=tl.float32)
        tokens = tl.minimum(SEGMENT, length - i0)
        for i in range(tokens):
            tl.store(scratch + i * (BK * BV) + in_scratch, S)
            token = first + token_of(i0 + i, length, REVERSE)
            row = token * HV + i_h
            b_k = vector(k, (token * H + i_qk) * K, in_k, K)
            b_v = vector(v, row * V, in_v, V)
            S = updated(S, b_k, b_k, b_v, beta, g, gamma, gk, gv, a=a, b=b, A_log=None, dt_bias=None, row=row,
                        i_h=i_h, in_k=in_k, in_v=in_v, K=K, V=V, DELTA=DELTA, PER_CHANNEL=PER_CHANNEL,
                        SIGMOID=0, RATE=False, BOUND=0, ERASE_RATE=False, UNDECAYED=False)
        tl.debug_barrier()  # other threads read the states that this one wrote
        for j in range(tokens):
            i = tokens - 1 - j
            token = first + token_of(i0 + i, length, REVERSE)
            row = token * HV + i_h
            part = i_v.to(tl.int64) * R * HV + row
            S = tl.load(scratch + i * (BK * BV) + in_scratch)
            b_q = vector(q, (token * H + i_qk) * K, in_k, K) * scale
            b_k = vector(k, (token * H + i_qk) * K, in_k, K)
            b_v = vector(v, row * V, in_v, V)
            b_do = vector(do, row * V, in_v, V)
            P = decayed(S, g, gamma, gk, gv, None, None, row, i_h, in_k=in_k, in_v=in_v, K=K, V=V, BOUND=0)
            u = b_v
            if DELTA:
                error = b_v - tl.sum(P * b_k[:, None], 0)
                u = error
                if beta is not None:
                    b_beta = strength(beta, row, in_v, V, PER_CHANNEL, 0)
                    u = error * b_beta
            if a is not None:
                b_a = vector(a, row * K, in_k, K)
                b_b = vector(b, row * K, in_k, K)
                read = tl.sum(S * b_a[:, None], 0)
            # backward of o
            if EARLIER:
                b_dq = tl.sum(S * b_do[None, :], 1)
            else:
                dS += b_q[:, None] * b_do[None, :]
                b_dq = tl.sum(P * b_do[None, :], 1) + b_k * tl.sum(u * b_do, 0)
                if a is not None:
                    b_dq += b_b * tl.sum(read * b_do, 0)
            # backward of S_t = P + b read^T + k u^T
            b_dv = tl.sum(dS * b_k[:, None], 0)
            b_dk = tl.sum(dS * u[None, :], 1)
            if DELTA:
                if beta is not None:
                    if dbeta is not None:
                        if PER_CHANNEL:
                            tl.store(dbeta + row * V + in_v, b_dv * error, mask=in_v < V)
                        else:
                            tl.store(dbeta + part, tl.sum(b_dv * error, 0))
                    b_dv *= b_beta
                b_dk -= tl.sum(P * b_dv[None, :], 1)
                dS -= b_k[:, None] * b_dv[None, :]
            if a is not None:
                b_w = tl.sum(dS * b_b[:, None], 0)
                tl.store(db + part * K + in_k, tl.sum(dS * read[None, :], 1), mask=in_k < K)
                tl.store(da + part * K + in_k, tl.sum(S * b_w[None, :], 1), mask=in_k < K)
            # backward of P, the decayed S_{t-1}
            if dg is not None:
                tl.store(dg + part, tl.sum(tl.sum(dS * P, 1), 0))
            if dgk is not None:
                tl.store(dgk + part * K + in_k, tl.sum(dS * P, 1), mask=in_k < K)
            if dgv is not None:
                tl.store(dgv + row * V + in_v, tl.sum(dS * P, 0), mask=in_v < V)
            dS = decayed(dS, g, gamma, gk, gv, None, None, row, i_h, in_k=in_k, in_v=in_v, K=K, V=V, BOUND=0)
            if a is not None:
                dS += b_a[:, None] * b_w[None, :]
            if EARLIER:
                dS += b_q[:, None] * b_do[None, :]
                if bonus is not None:
                    b_u = vector(bonus, i_h * K, in_k, K)
                    both = tl.sum(b_v * b_do, 0)
                    b_dq += b_u * b_k * both
                    b_dk += b_u * b_q * both
                    b_dv += tl.sum(b_u * b_q * b_k, 0) * b_do
                    if dbonus is not None:
                        sum_bonus += b_q * b_k * both
            tl.store(dq + part * K + in_k, b_dq * scale, mask=in_k < K)
            tl.store(dk + part * K + in_k, b_dk, mask=in_k < K)
            tl.store(dv + row * V + in_v, b_dv.to(dv.dtype.element_ty), mask=in_v < V)
        tl.debug_barrier()  # the states of the next segment overwrite these
    if dh0 is not None:
        tl.store(dh0 + state, dS, mask=inside)
    if dbonus is not None:
        tl.store(dbonus + ((i_v * N + n).to(tl.int64) * HV + i_h) * K + in_k, sum_bonus, mask=in_k < K)


def launch_backward(plan: Plan, x: Inputs, states: torch.Tensor, flags: tuple[str, ...], scale: float,
                    do: torch.Tensor, dht: torch.Tensor | None,
                    needed: frozenset[str]) -> dict[str, torch.Tensor]:
    """Run the backward launch; return the gradients by tensor name, each in the dtype of its tensor.

    x: the tensors of launch_forward, all contiguous.
    states: the states that launch_forward kept.
    do, dht: gradients of the outputs and of the final states (or None), contiguous.
    needed: names of the tensors whose gradients are needed. v always gets one. q and k are needed together,
        and so are a and b.
    """
    launch = plan.launch("recurrent_backward")
    BK, BV = launch.block("BK"), launch.block("BV")
    (B, T, _, K), (HV, V) = x.q.shape, x.v.shape[2:]
    NV, TS = -(-V // BV), min(T, SEGMENT)
    batch = Batch(plan, x, most=max(1, SCRATCH // max(1, 4 * HV * NV * TS * BK * BV)))
    headwise = x.beta is not None and x.beta.ndim == 4
    # shapes, sums: gradients with a partial sum for each of NV strips. own: gradients without partial sums.
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("q", "k", "gk", "a", "b"), (B, T, HV, K))
    shapes.update(g=(B, T, HV), bonus=(batch.N, HV, K))
    if not headwise:
        shapes["beta"] = B, T, HV
    # no program writes the rows outside bounds, so they must be zero
    new = torch.zeros if batch.packed or not batch.slices else torch.empty
    sums = {name: new((NV, *shape), dtype=torch.float32, device=batch.device)
            for name, shape in shapes.items() if name in needed}
    own = {"v": new(x.v.shape, dtype=x.v.dtype, device=batch.device)}
    for name in {"gv", "beta"} & needed - set(shapes):
        own[name] = new((B, T, HV, V), dtype=torch.float32, device=batch.device)
    dh0, constants = batch.initial_gradient(needed), constants_of(x, flags)
    for part in batch.parts(launch, do=do, dht=dht, dh0=dh0, states=by_sequence(states, batch), scale=scale,
                            R=B * T, TS=TS, **{f"d{name}": own.get(name) for name in GRADS}):
        # The kernel gets the N of the whole batch, because dbonus has a sum for each of its sequences. With
        # bounds, each slice of the batch gets all rows.
        n, part["N"] = part["N"], batch.N
        part.update((f"d{name}", grad if batch.packed and name != "bonus" else grad[:, part["part"]])
                    for name, grad in sums.items())
        scratch = torch.empty(n * HV * NV, TS, BK, BV, dtype=torch.float32, device=batch.device)
        start(launch, recurrent_backward, n * HV * NV, dict(constants, scratch=scratch), part)
    grads = {name: grad.sum(0) for name, grad in sums.items()} | own
    for name in ("q", "k"):
        grads[name] = batch.of_groups(grads[name])
    if "bonus" in grads:
        grads["bonus"] = grads["bonus"].sum(0)
    if dh0 is not None:
        grads["h0"] = dh0
    return {name: grad.to(getattr(x, name).dtype) for name, grad in grads.items()}
