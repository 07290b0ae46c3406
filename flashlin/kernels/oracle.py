"""The loop over tokens that all float64 references of ops over sequences share.

A family declares one step: a function of a state and one token. This module handles packed sequences, initial
and final states, groups of heads, and the direction. All of it is in float64, differentiable, and slow on
purpose.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Step = Callable[..., tuple[Any, Tensor]]


def spans_of(B: int, T: int, bounds: Iterable[int] | None) -> list[tuple[int, int, int]]:
    """Return (batch row, first token, end token) of each sequence; the end token is exclusive.

    Without bounds, each of the B rows of T tokens is one sequence. With bounds [N + 1], a list or a tensor,
    sequence n is the tokens bounds[n] .. bounds[n + 1] of the single row.
    """
    if bounds is None:
        return [(b, 0, T) for b in range(B)]
    return [(0, first, end) for first, end in pairwise(map(int, bounds))]


def over_tokens(step: Step, *fixed: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function that runs ``step`` over all tokens of a batch, as the reference of an op.

    step(S, q, k, v, ...) -> (S, o) computes one token. It gets the states [HV, K, V] of all heads and one
    token [HV, ...] of each tensor. fixed: names of its arguments that are the same for all tokens.

    The returned function takes the tensors of ``step`` for all tokens, in the same order or by name: q, k
    [B, T, H, K], v [B, T, HV, V], and others [B, T, H or HV, ...]. HV is a multiple of H; value head j reads
    head j // (HV / H) of q and k. It starts at h0 [N, HV, K, V] or zeros, and returns the outputs times
    scale, [B, T, HV, V], and the final states [N, HV, K, V]. bounds and reverse: see ``token_by_token``.
    """
    names = list(inspect.signature(step).parameters)[1:]

    def recurrence(*tensors: Tensor | None, h0: Tensor | None = None, bounds: Tensor | None = None,
                   scale: float = 1.0, reverse: bool = False,
                   **named: Tensor | None) -> tuple[Tensor, Tensor]:
        named |= dict(zip(names, tensors, strict=False))
        given = {name: x.double() for name, x in named.items() if x is not None}
        constant = {name: given.pop(name) for name in fixed if name in given}
        K, v = given["q"].shape[3], given["v"]
        HV, V = v.shape[2], v.shape[-1]
        tokens = {name: x if x.shape[2] == HV else x.repeat_interleave(HV // max(x.shape[2], 1), 2)
                  for name, x in given.items()}
        S = before(h0, v, bounds, HV, K, V)
        o, S = token_by_token(partial(step, **constant), tokens, S, bounds, reverse)
        return scale * o, S
    return recurrence


def before(given: Tensor | None, x: Tensor, bounds: Tensor | None, *shape: int) -> Tensor:
    """Return the initial states [N, *shape] of the sequences of x, in float64: ``given``, or zeros.

    Without bounds, N is the length of x; with bounds [N + 1] it is the number of packed sequences.
    """
    N = len(x) if bounds is None else len(bounds) - 1
    return x.new_zeros(N, *shape, dtype=torch.float64) if given is None else given.double()


def token_by_token(step: Step, tokens: Mapping[str, Tensor], S: Any, bounds: Iterable[int] | None = None,
                   reverse: bool = False) -> tuple[Tensor, Any]:
    """Run step(S, **token) -> (S, o) over all tokens; return the outputs [B, T, ...] and the final states.

    tokens: the step's tensors [B, T, ...] by name.
    S: the states before the first tokens, a tensor [N, ...] or a tuple of such tensors.
    bounds: [N + 1]; sequence n is the rows bounds[n] .. bounds[n + 1] of the single batch row, cut at T. The
        outputs of other rows are zero.
    reverse: True to run from the last token of each sequence to its first.
    """
    def one(S: Any, token: dict[str, Tensor]) -> tuple[Any, Tensor]:
        return step(S, **token)
    B, T = next(iter(tokens.values())).shape[:2]
    blank = one(tree_map(lambda x: x.new_zeros(x.shape[1:]), S),
                {name: x.new_zeros(x.shape[2:]) for name, x in tokens.items()})[1].detach()
    if bounds is None and B and T:  # all sequences at once
        rows = {name: x.transpose(0, 1) for name, x in tokens.items()}
        outputs, S = _walk(torch.vmap(one), rows, S, reverse)
        return outputs.transpose(0, 1), S
    o, states = blank.new_zeros(B, T, *blank.shape), []
    for n, (row, first, last) in enumerate(spans_of(B, T, bounds)):
        after, last = tree_map(lambda x, n=n: x[n], S), min(last, T)
        if last > first:
            rows = {name: x[row, first:last] for name, x in tokens.items()}
            outputs, after = _walk(one, rows, after, reverse)
            o = o.index_put((torch.full((last - first,), row), torch.arange(first, last)), outputs)
        states.append(after)
    return o, tree_map(lambda *xs: torch.stack(xs), *states) if states else S


def _walk(step: Step, tokens: dict[str, Tensor], S: Any, reverse: bool) -> tuple[Tensor, Any]:
    """Run ``step`` over the tokens [T, ...] of one sequence; return their outputs and the final state.

    T is at least 1.
    """
    outputs = []
    # unbind once: with an index for each token, backward would be quadratic in T
    every = list(zip(*(x.unbind() for x in tokens.values()), strict=True))
    for token in reversed(every) if reverse else every:
        S, o = step(S, dict(zip(tokens, token, strict=True)))
        outputs.append(o)
    return torch.stack(outputs[::-1] if reverse else outputs), S


def decayed(S: Tensor, *logs: Tensor | None, values: Tensor | None = None) -> Tensor:
    """Return the states S [HV, K, V] after decays that are given as natural logarithms.

    logs: decays of heads [HV] or of key channels [HV, K], or None. values: decays of value channels [HV, V].
    """
    for log in logs:
        S = S if log is None else log.exp().view(*log.shape, *(1,) * (3 - log.ndim)) * S
    return S if values is None else values.exp()[:, None] * S


def read(S: Tensor, q: Tensor) -> Tensor:
    """Return S^T q of each head, [HV, V], for S [HV, K, V] and q [HV, K]."""
    return torch.einsum("hkv,hk->hv", S, q)


def written(k: Tensor, v: Tensor) -> Tensor:
    """Return the outer product k v^T of each head, [HV, K, V], for k [HV, K] and v [HV, V]."""
    return k[:, :, None] * v[:, None, :]
