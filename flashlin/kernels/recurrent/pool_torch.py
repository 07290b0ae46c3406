"""The gated delta rule on a pool of states in plain torch, token by token.

The results of a sequence are bitwise independent of the other sequences and of how it is divided into calls.
A prompt gives the same bits in one call, in pieces, packed with others, and token by token. A product or
reduction of a library may use another algorithm for another batch size, so sums over K are made of
elementwise additions. On a CPU, torch's sigmoid, softplus and log1p round differently at the end of a tensor.
So this module computes them from exp and log, which round in the same way at every position.
"""
from __future__ import annotations

import torch
from torch import Tensor

from flashlin.kernels.recurrent.inputs import Inputs, bound_of
from flashlin.kernels.sequences import sequences_of, widest


def compute(x: Inputs, pool: Tensor, indices: Tensor, accepted: Tensor | None, flags: tuple[str, ...],
        scale: float) -> Tensor:
    """Run the gated delta rule on a pool of states [P, HV, V, K]; return o [B, T, HV, V].

    It does the same as ``recurrent_pool`` of kernels/recurrent/pool.py, and writes new states to the pool.
    o is float32, or float64 if any tensor is. The host reads the values of x.bounds, if given, and no others.
    """
    compute = widest(*x, pool)
    q, k, v, beta, g = _prepared(x, flags, scale, compute)
    N, columns = indices.shape
    indices = indices.long()
    column = torch.zeros_like(indices[:, 0]) if accepted is None else accepted.long() - 1
    slots = indices.gather(1, column.clamp(0, columns - 1)[:, None])[:, 0]
    there = (slots >= 0) & (slots < pool.shape[0])
    S = states_of(pool, slots, there & (column >= 0)).to(compute)
    first, length, most = _extents(x, N)
    o = v.new_zeros(v.shape)
    for i in range(most):
        row, active = (first + i).clamp(max=len(v) - 1), there & (i < length)
        S_new, o_new = _token(S, q[row], k[row], v[row], beta[row], None if g is None else g[row])
        S = torch.where(active[:, None, None, None], S_new.to(pool.dtype).to(compute), S)
        put(o, row, o_new, active)
        to = i - (length - columns).clamp(min=0)
        put(pool, indices.gather(1, to.clamp(0, columns - 1)[:, None])[:, 0], S, active & (to >= 0))
    return o.view(*x.v.shape)


def states_of(pool: Tensor, slots: Tensor, wanted: Tensor) -> Tensor:
    """Return copies of the states pool[slots[n]], with zeros for all n where wanted[n] is False.

    Slots of wanted states must be in the pool.
    """
    if not len(pool):
        return pool.new_zeros(len(slots), *pool.shape[1:])
    states = pool[slots.clamp(0, len(pool) - 1)]
    return torch.where(wanted.view(-1, *[1] * (pool.ndim - 1)), states, 0)


def put(pool: Tensor, slots: Tensor, states: Tensor, wanted: Tensor) -> None:
    """Store states[n] in pool[slots[n]] for all n where wanted[n] is True and the slot is in the pool.

    The host reads no values. Instead, an unwanted pair of slot and state is replaced by a copy of the first
    wanted pair. To write that pair again changes nothing. If no state must be stored, the pool's first state
    is written to itself.
    """
    if not len(pool) or not len(slots):
        return
    known = wanted & (slots >= 0) & (slots < len(pool))
    which = torch.where(known, torch.arange(len(slots), device=slots.device), known.int().argmax())
    some = known.any()
    values = torch.where(some, states.to(pool.dtype)[which], pool[:1])
    pool.index_put_((torch.where(some, slots[which], 0),), values)


def rows_of(y: Tensor, bounds: Tensor, wanted: Tensor) -> Tensor:
    """Return y [1, T, ...] with zeros in rows of unwanted sequences and in rows outside all sequences.

    wanted: [N], True for each sequence whose rows are kept. bounds: [N + 1].
    """
    number, _ = sequences_of(bounds, y.shape[1])
    mine = torch.cat([wanted, wanted.new_zeros(1)])[number]  # -1 and N take the last entry
    return torch.where(mine.view(-1, *[1] * (y.ndim - 2)), y, 0)


def _token(S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor,
           g: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute one token of each sequence; return the states [N, HV, V, K] and the outputs [N, HV, V]."""
    k = k[:, :, None]
    if g is not None:
        S = S * (g[:, :, None, None] if g.ndim == 2 else g[:, :, None]).exp()
    u = (v - summed(S * k)) * beta[:, :, None]
    S = S + k * u[..., None]
    return S, summed(S * q[:, :, None])


def summed(x: Tensor) -> Tensor:
    """Return the sum over the last dimension, by adding halves elementwise, so its order is fixed."""
    while (size := x.shape[-1]) > 1:
        half = size // 2
        rest = x[..., 2 * half:]
        x = x[..., :half] + x[..., half:2 * half]
        x = torch.cat([x, rest], -1) if size % 2 else x
    return x[..., 0]


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x), whose bits do not depend on the position in the tensor."""
    return 1 / (1 + (-x).exp())


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + e^x).

    The quotient in the code corrects the rounding error of 1 + e (Kahan's log1p).
    """
    e = (-x.abs()).exp()
    u = 1 + e
    return x.clamp(min=0) + torch.where(u == 1, e, u.log() * (e / (u - 1)))


def _prepared(x: Inputs, flags: tuple[str, ...], scale: float,
              compute: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return q, k [rows, HV, K], v [rows, HV, V], beta [rows, HV] and log decays, ready for the recurrence.

    The log decays are [rows, HV], [rows, HV, K] or None. Norms, sigmoids, gates and scale are applied.
    """
    group = x.v.shape[2] // max(x.q.shape[2], 1)
    q, k = (y.to(compute).contiguous() for y in (x.q, x.k))
    if "l2norm" in flags:
        q, k = (y * (summed(y.square()) + 1e-6).rsqrt()[..., None] for y in (q, k))
    q, k = ((y if group == 1 else y.repeat_interleave(group, 2)) for y in (q * scale, k))
    beta = (x.v.new_ones(x.v.shape[:3]) if x.beta is None else x.beta).to(compute).contiguous()
    if "sigmoid" in flags:
        beta = sigmoid(beta) * (2.0 if "neg_eigval" in flags else 1.0)
    g = x.gk if x.g is None else x.g
    g = None if g is None else g.to(compute).contiguous()
    if g is not None and x.A_log is not None:
        g = g if x.dt_bias is None else g + x.dt_bias.to(compute)
        rate = x.A_log.to(compute).exp().view(-1, *[1] * (g.ndim - 3))
        bound = bound_of(flags)
        g = bound * sigmoid(rate * g) if bound else -rate * softplus(g)
    q, k, v, beta = (y.flatten(0, 1) for y in (q, k, x.v.to(compute), beta))
    return q, k, v, beta, None if g is None else g.flatten(0, 1)


def _extents(x: Inputs, N: int) -> tuple[Tensor, Tensor, int]:
    """Return the first row and the length of each sequence, both [N], and the largest length."""
    T, device = x.q.shape[1], x.q.device
    if x.bounds is None:
        return torch.arange(N, device=device) * T, torch.full((N,), T, device=device), T
    edges = x.bounds.long()
    length = edges.diff()
    return edges[:-1], length, int(length.max()) if N else 0
