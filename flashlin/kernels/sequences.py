"""Helpers for the torch paths of families: dtypes, running sums, packed sequences, and chunks."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin.compat.releases import DETERMINISTIC_CUMSUM_FROM
from flashlin.compat.tracing import numbers
from flashlin.compat.versions import release

Tensors = Sequence[Tensor | None]
# A function (h0, *tensors) -> (o, states) for sequences of the same length. h0 is [B, H, K, V]; q, k, v are
# [B, T, H, D]; further tensors are [B, T, H], [B, T, H, D] or None.
Rows = Callable[..., tuple[Tensor, Tensor]]

CHUNK = 64  # tokens
_CUMSUM_MAY_RAISE = release(torch.__version__) < release(DETERMINISTIC_CUMSUM_FROM)


def widest(*tensors: Tensor | None) -> torch.dtype:
    """Return the dtype that a torch path computes in: float64 if any tensor has it, else float32."""
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in tensors) else torch.float32


def wide(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Return the tensors cast to the dtype of ``widest``; None stays None."""
    compute = widest(*tensors)
    return tuple(None if x is None else x.to(compute) for x in tensors)


def running_sum(x: Tensor, dim: int) -> Tensor:
    """Return the sums of x along ``dim`` up to each element, in x's dtype.

    Before torch 2.6, ``cumsum`` and its gradient raise an error on a GPU under
    ``torch.use_deterministic_algorithms(True)``. In that case ``sum_of_masked`` computes the sums.
    """
    if not (_CUMSUM_MAY_RAISE and x.device.type != "cpu" and torch.are_deterministic_algorithms_enabled()):
        return x.cumsum(dim, dtype=x.dtype)
    return sum_of_masked(x, dim)


def sum_of_masked(x: Tensor, dim: int) -> Tensor:
    """Return the running sums of x along ``dim``, without ``cumsum``.

    Each sum is over a masked copy of x, so memory grows with the square of the dimension's length.
    """
    rows = torch.arange(x.shape[dim], device=x.device)
    copies = x.movedim(dim, -1)[..., None, :].masked_fill(rows[:, None] < rows, 0)
    return copies.sum(-1, dtype=x.dtype).movedim(-1, dim)


def sequences_of(bounds: Tensor, T: int) -> tuple[Tensor, Tensor]:
    """Return, for each of T packed rows, the number of its sequence and True if it belongs to one.

    Both results are [T]. The number is -1 before the first sequence and N after the last. The host reads no
    values.
    """
    rows = torch.arange(T, dtype=bounds.dtype, device=bounds.device)
    n = torch.searchsorted(bounds, rows, right=True) - 1
    return n, (n >= 0) & (n < bounds.shape[0] - 1)


def over_sequences(rows: Rows, tensors: Tensors, h0: Tensor | None, bounds: Tensor | None,
                   scale: float, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """Run ``rows`` over a batch; return the outputs [B, T, HV, V] and the final states [N, HV, K, V].

    It computes in float64 if q, k or v is float64, else in float32. ``rows`` gets q times scale, and q and k
    with HV heads.

    rows: computes sequences of the same length, see ``Rows``.
    tensors: the tensors of ``rows``, with q and k [B, T, H, K].
    h0: [N, HV, K, V], or None for zeros.
    bounds: [N + 1] for packed sequences. The host reads its values, which synchronizes with a GPU.
    reverse: True to run from the last token of a sequence to its first.
    """
    q, k, v = tensors[:3]
    assert q is not None and k is not None and v is not None
    compute = widest(q, k, v)
    q, k = q.to(compute) * scale, k.to(compute)
    group = v.shape[2] // max(q.shape[2], 1)
    if group > 1:
        q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    wide = [q, k, *[None if x is None else x.to(compute) for x in tensors[2:]]]
    N = q.shape[0] if bounds is None else bounds.shape[0] - 1
    h = q.new_zeros(N, v.shape[2], q.shape[3], v.shape[3]) if h0 is None else h0.to(compute)
    if q.shape[1] == 0:  # no tokens, but o keeps its graph, so that gradients exist
        o = v.to(compute)
        for x in wide:
            o = o if x is None else o * (x if x.ndim == 4 else x[..., None]).sum(-1, keepdim=True)
        return o, h.clone()
    if bounds is not None:
        return _packed(rows, wide, h, numbers(bounds), reverse)
    if not reverse:
        return rows(h, *wide)
    o, states = rows(h, *[None if x is None else x.flip(1) for x in wide])
    return o.flip(1), states


def _packed(rows: Rows, tensors: list[Tensor | None], h0: Tensor, edges: list[int],
            reverse: bool) -> tuple[Tensor, Tensor]:
    """Run ``rows`` over packed sequences.

    Sequences of similar length are padded to one batch. This costs at most twice the work, and avoids a loop
    over thousands of sequences.
    """
    groups: dict[int, list[int]] = {}
    for n in range(len(edges) - 1):
        groups.setdefault((edges[n + 1] - edges[n] - 1).bit_length(), []).append(n)
    v = tensors[2]
    assert v is not None
    o, states = torch.zeros_like(v), torch.zeros_like(h0)
    for members in groups.values():
        first, last = (torch.tensor([edges[n + end] for n in members], device=v.device) for end in (0, 1))
        steps = torch.arange(max(edges[n + 1] - edges[n] for n in members), device=v.device)
        inside = steps < (last - first)[:, None]
        at = torch.where(inside, last[:, None] - 1 - steps if reverse else first[:, None] + steps, 0)
        # all tensors are zero after a sequence's end: no key and no decay, so the state does not change
        padded = [None if x is None else
                  torch.where(inside.view(*inside.shape, *[1] * (x.ndim - 2)), x[0][at], 0) for x in tensors]
        which = torch.tensor(members, device=v.device)
        o_, h_ = over_sequences(rows, padded, h0[which], None, 1.0)
        o = o.index_put((torch.zeros_like(at[inside]), at[inside]), o_[inside])
        states = states.index_put((which,), h_)
    return o, states


def chunk_length(T: int) -> int:
    """Return the number of tokens in a chunk: 64, or less for short sequences.

    Shorter chunks save work for batches of many short sequences. While torch.compile traces, it is always 64.
    """
    chunk = CHUNK
    while not torch.compiler.is_compiling() and chunk // 2 >= T:
        chunk //= 2
    return chunk


def chunks(x: Tensor, length: int) -> Tensor:
    """Split x [B, T, H, ...] into chunks [B, H, chunks, length, ...], with zeros after the end."""
    padded = F.pad(x, (0, 0) * (x.ndim - 2) + (0, -x.shape[1] % length))
    split: Tensor = padded.unflatten(1, (-1, length))
    return split.movedim(3, 1)


def joined(x: Tensor, T: int) -> Tensor:
    """Join chunks [B, H, chunks, length, D] to a sequence [B, T, H, D]."""
    return x.movedim(1, 3).flatten(1, 2)[:, :T]
