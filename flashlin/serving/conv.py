"""The short causal convolution of prompts on the pool of states that ``causal_conv1d_update`` uses."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin import policy
from flashlin.guards.tensors import check_cu_seqlens, check_floats, check_integers, need_tensor
from flashlin.kernels.recurrent.pool_torch import put, rows_of, states_of
from flashlin.ops._common.arguments import check_has, check_written
from flashlin.ops._common.casting import wants_grad
from flashlin.ops._common.entry import entry
from flashlin.ops.conv import causal_conv1d, check_filters


@entry
def causal_conv1d_prefill(x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None,
                          conv_state_indices: Tensor, cu_seqlens: Tensor, has_initial_state: Tensor,
                          activation: str | None = None, cache_seqlens: Tensor | None = None) -> Tensor:
    """Convolve prompts, or pieces of prompts, of N requests on a pool of states.

    ``causal_conv1d_update`` continues from the states that this function writes.

    Args:
        x: [1, total, D], packed; never modified.
        conv_state: [slots, D, L], the pool, with L at least W - 1, of any float dtype and strides. A slot
            contains the last L tokens of its request, the newest last. UPDATED IN PLACE.
        weight: as in ``causal_conv1d_update``.
        bias: as in ``causal_conv1d_update``.
        conv_state_indices: [N] int32 or int64: the slot of each request. An index outside the pool is
            padding.
        cu_seqlens: [N + 1] int32 or int64: request n is rows cu_seqlens[n] .. cu_seqlens[n + 1]. A request
            without tokens does not change its slot.
        has_initial_state: [N] bool: True if a request continues from its slot; otherwise it starts from
            zeros.
        activation: as in ``causal_conv1d_update``.
        cache_seqlens: [N] int32 or int64: number of earlier tokens of each request. With it conv_state is a
            ring buffer: token t has position t mod L. ``causal_conv1d_update`` then also needs cache_seqlens.
            To overwrite rejected drafts, L must be at least W - 1 + drafts, and cache_seqlens counts only
            accepted tokens.

    Returns:
        y of x's shape and dtype; rows that belong to no request are zero.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name; tensors that require gradients.
        UnsupportedError: this machine cannot run the call.
    """
    check_floats("x", x, "[1, total, D]", 3)
    D, device = x.shape[2], x.device
    W = check_filters(x, D, weight, bias).shape[1]
    need_tensor("conv_state", conv_state, (None, D, None), "[slots, D, L]", device, "x")
    slots, _, L = conv_state.shape
    if L < max(W - 1, 1):
        raise ValueError(f"conv_state: got L = {L} tokens, need at least W - 1 = {W - 1} and at least 1")
    check_written("conv_state", conv_state, "causal_conv1d_prefill", "updated in place")
    if wants_grad(x, weight, bias):
        raise ValueError("x, weight, bias: got tensors that require gradients, need torch.no_grad() or "
                         "inference_mode() around a call that overwrites states")
    bounds = check_cu_seqlens(cu_seqlens, None, x.shape, device, policy.current().debug, "x")
    N = len(bounds) - 1
    check_integers("conv_state_indices", conv_state_indices, (N,), "[N]", device, "x")
    check_has("has_initial_state", has_initial_state, N, device)
    if cache_seqlens is not None:
        check_integers("cache_seqlens", cache_seqlens, (N,), "[N]", device, "x")
    there = (conv_state_indices >= 0) & (conv_state_indices < slots)
    places = conv_state_indices.long()
    before = states_of(conv_state, places, there & has_initial_state)
    order = torch.arange(L, device=device)[None].expand(N, L)  # positions of the tokens, the oldest first
    if cache_seqlens is not None:
        order = (order + cache_seqlens.long()[:, None]) % L
        before = before.gather(2, order[:, None].expand(before.shape))
    y, _ = causal_conv1d(x, weight, bias, initial_state=F.pad(before[..., L - W + 1:], (1, 0)),
                         activation=activation, cu_seqlens=bounds)
    first, length = bounds[:-1].long(), bounds.long().diff()
    token = length[:, None] - L + torch.arange(L, device=device)  # below 0: a token of the previous state
    new = x[0][(first[:, None] + token).clamp(0, max(x.shape[1] - 1, 0))].mT if x.shape[1] else before
    old = before.gather(2, (token + L).clamp(0, L - 1)[:, None].expand(before.shape))
    states = torch.where((token >= 0)[:, None], new.to(conv_state.dtype), old)
    if cache_seqlens is not None:
        order = (order + length[:, None]) % L
        states = states.scatter(2, order[:, None].expand(states.shape), states)
    put(conv_state, places, states, there & (length > 0))
    return rows_of(y, bounds, there)
