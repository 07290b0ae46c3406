"""What the torch paths over sequences share: one dtype, packed sequences, chunks."""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from flashlin.compat.tracing import numbers
from flashlin.kernels.plain import widest

Tensors = Sequence[torch.Tensor | None]
# (h0, *tensors) -> (o, states), for sequences of one length: h0 [B, H, K, V]; q, k, v [B, T, H, D], then
# others [B, T, H] or [B, T, H, D], or None
Rows = Callable[..., tuple[torch.Tensor, torch.Tensor]]

CHUNK = 64  # tokens


def over_sequences(rows: Rows, tensors: Tensors, h0: torch.Tensor | None, bounds: torch.Tensor | None,
                   scale: float, reverse: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [B, T, HV, V], states [N, HV, K, V]) by ``rows``, in float32, or float64 for float64 tensors, with q
    times scale, and q and k of as many heads as v. tensors: as rows takes them, but q and k [B, T, H, K]; h0
    [N, HV, K, V] or None for zeros. reverse: from a sequence's last token to its first.

    With bounds [N + 1] their values are read on the host (for tensors on a GPU that is a synchronisation).
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
    if q.shape[1] == 0:  # nothing, but with gradients
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


def _packed(rows: Rows, tensors: list[torch.Tensor | None], h0: torch.Tensor, edges: list[int],
            reverse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of about the same length are padded to one batch: at most twice the work, and no loop over
    thousands of them."""
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
        # past a sequence's end all is zero: no key and no decay, so the state stands still
        padded = [None if x is None else
                  torch.where(inside.view(*inside.shape, *[1] * (x.ndim - 2)), x[0][at], 0) for x in tensors]
        which = torch.tensor(members, device=v.device)
        o_, h_ = over_sequences(rows, padded, h0[which], None, 1.0)
        o = o.index_put((torch.zeros_like(at[inside]), at[inside]), o_[inside])
        states = states.index_put((which,), h_)
    return o, states


def chunk_length(T: int) -> int:
    """Tokens of a chunk: less for short sequences, of which there may be many; a graph has one length for
    all."""
    chunk = CHUNK
    while not torch.compiler.is_compiling() and chunk // 2 >= T:
        chunk //= 2
    return chunk


def chunks(x: torch.Tensor, length: int) -> torch.Tensor:
    """[B, T, H, ...] -> [B, H, chunks, length, ...], zeros past the end."""
    padded = F.pad(x, (0, 0) * (x.ndim - 2) + (0, -x.shape[1] % length))
    split: torch.Tensor = padded.unflatten(1, (-1, length))
    return split.movedim(3, 1)


def joined(x: torch.Tensor, T: int) -> torch.Tensor:
    """[B, H, chunks, length, D] -> [B, T, H, D]."""
    return x.movedim(1, 3).flatten(1, 2)[:, :T]
