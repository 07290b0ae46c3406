"""What the references of the families over sequences share: the walk over tokens, in float64."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat

import torch

from flashlin.kernels.spans import spans_of


def token_by_token(
    step: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    tensors: Sequence[torch.Tensor | None],
    h0: torch.Tensor | None,
    bounds: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [B, T, HV, V], states [N, HV, K, V]), float64 and differentiable, by step(S_{t-1}, *token) -> (S_t,
    o_t) for the tokens of each sequence, from S_0 = h0[n] or zeros.

    tensors: q, k [B, T, H, K], v [B, T, HV, V], HV a multiple of H: value head j reads q and k of head j //
    (HV / H); then others [B, T, HV, ...], or None. step gets one token of each, [HV, ...]. With bounds [N +
    1] the rows bounds[n] .. bounds[n + 1] of the single batch row are sequence n; rows outside are zero.
    """
    q, k, v, *others = (None if x is None else x.double() for x in tensors)
    assert q is not None and k is not None and v is not None
    B, T, HV, V = v.shape
    q, k = (x.repeat_interleave(HV // max(x.shape[2], 1), 2) for x in (q, k))
    K = q.shape[3]
    if bounds is None and B:  # all sequences at once
        tokens = [None if x is None else x.transpose(0, 1) for x in (q, k, v, *others)]
        at_once = torch.vmap(step, in_dims=(0, *(None if x is None else 0 for x in tokens)))
        o, S = _walk(at_once, tokens, q.new_zeros(B, HV, K, V) if h0 is None else h0)
        return o.transpose(0, 1), S
    o, states = torch.zeros_like(v), []
    for n, (row, first, last) in enumerate(spans_of(B, T, bounds)):
        S = q.new_zeros(HV, K, V) if h0 is None else h0[n]
        outputs, S = _walk(step, [None if x is None else x[row, first:last] for x in (q, k, v, *others)], S)
        o = o.index_put((torch.full((last - first,), row), torch.arange(first, last)), outputs)
        states.append(S)
    return o, torch.stack(states) if states else q.new_zeros(0, HV, K, V)


def _walk(step: Callable[..., tuple[torch.Tensor, torch.Tensor]], tensors: Sequence[torch.Tensor | None],
          S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs, the state after the last token) of q, k, v and others [T, ...], from S on."""
    q, _, v, *_ = tensors
    assert q is not None and v is not None
    S, outputs = S.double(), []
    # unbound at once: an index for each token would make backward quadratic in their number
    for token in zip(*(repeat(None, len(q)) if x is None else x.unbind() for x in tensors), strict=True):
        S, o = step(S, *token)
        outputs.append(o)
    return torch.stack(outputs) if outputs else torch.zeros_like(v), S


def read(S: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """S^T q of each head: [HV, V]."""
    return torch.einsum("hkv,hk->hv", S, q)


def written(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """k v^T of each head: [HV, K, V]."""
    return k[:, :, None] * v[:, None, :]
