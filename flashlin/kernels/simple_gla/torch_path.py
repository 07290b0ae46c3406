"""The scalar-decay family in plain, differentiable torch: chunked matrix products without a loop over tokens.

It serves CPUs and GPUs for which no Triton release compiles. All chunks of 64 tokens are computed at once,
then the state is carried through them. Nothing depends on the value of T. So torch.compile traces one graph
for all lengths from 65 to 8,192 tokens, and another graph for a single chunk. Longer sequences are walked in
segments of 8,192 tokens.

The state is carried by a loop. A matrix that combines all chunks would contain zeros, and 0 times NaN is NaN.
With the loop, a value that is not finite does not affect earlier chunks.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from flashlin.compat.tracing import transformed
from flashlin.kernels.sequences import chunk_length, chunks, joined, over_sequences, running_sum, widest
from flashlin.kernels.simple_gla.inputs import Inputs

SEGMENT = 8192  # tokens that are computed at once; longer sequences are walked in such segments


def compute(x: Inputs, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o [B, T, H, V] and the final states [N, H, K, V], in float32, or float64 for float64 tensors.

    x.h0 has the layout [N, H, K, V]. If bounds are given, their values are read on the host. For tensors on a
    GPU this is a synchronisation.
    """
    g = x.g if x.gamma is None else x.gamma.expand(x.v.shape[:3])
    return over_sequences(_rows, (x.q, x.k, x.v, g), x.h0, x.bounds, scale)


def scores(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor | None, gamma: torch.Tensor | None,
           scale: float, summed: bool = False) -> torch.Tensor:
    """Return the matrix [B, H, T, T] that maps v to o, in float32, or in float64 for float64 tensors.

    For j <= i its element (i, j) is

        scale q_i . k_j e^{g_{j+1} + ... + g_i}

    and for j > i it is 0.

    g: [B, T, H] or None.
    gamma: [H] or None; at most one of g and gamma is given.
    summed: use sums, which a compiler fuses, instead of a matrix product.
    """
    compute = widest(q, k)
    T = q.shape[1]
    q, k = (q.to(compute) * scale).transpose(1, 2), k.to(compute).transpose(1, 2)
    weights = (q[:, :, :, None] * k[:, :, None]).sum(-1) if summed else q @ k.mT
    if gamma is not None:
        weights = weights * decay_between(gamma.to(compute)[:, None].expand(-1, T))
    elif g is not None:
        weights = weights * decay_between(g.to(compute).transpose(1, 2))
    return weights.tril()


def _rows(h: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
          g: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    T = q.shape[1]
    if T <= SEGMENT:
        return _segment(h, q, k, v, g)
    outputs = []
    for t in range(0, T, SEGMENT):
        at = slice(t, t + SEGMENT)
        o, h = _segment(h, q[:, at], k[:, at], v[:, at], None if g is None else g[:, at])
        outputs.append(o)
    return torch.cat(outputs, 1), h


def _segment(h: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
             g: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    T, length = q.shape[1], chunk_length(q.shape[1])
    q, k, v = (chunks(x, length) for x in (q, k, v))
    if g is None:
        inside, kept = lower(length, q).to(q.dtype), q.new_ones(q.shape[:3])
        into, onwards = q, k
    else:
        g = chunks(g, length)
        inside, kept = decay_between(g), g.sum(-1).exp()
        into, onwards = q * running_sum(g, -1).exp()[..., None], k * decay_to_end(g)[..., None]
    states = carried(kept, torch.cat([h[:, :, None], onwards.mT @ v], 2))
    return joined((q @ k.mT * inside) @ v + into @ states[:, :, :-1], T), states[:, :, -1]


def carried(kept: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """Return the states [B, H, C + 1, K, V] before, between and after C chunks.

    The state after a chunk is the state before it times ``kept``, plus what the chunk adds. The backward
    needs only kept and the states.

    kept: [B, H, C], the decay of each chunk.
    added: [B, H, C + 1, K, V], the initial state, followed by what each chunk adds.
    """
    if not torch.compiler.is_compiling() and transformed():
        return _carried_one_by_one(kept, added)
    states: torch.Tensor = (_library_op if torch.compiler.is_compiling() else _Carried.apply)(kept, added)
    return states


def _carried_one_by_one(kept: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """Return the result of ``carried`` with operations that torch.func can transform.

    Its backward keeps more memory.
    """
    first, *others = added.unbind(2)
    states = [first]
    for factor, more in zip(kept.unbind(2), others, strict=True):
        states.append(torch.addcmul(more, states[-1], factor[..., None, None]))
    return torch.stack(states, 2)


def _carry(kept: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    states = added.clone(memory_format=torch.contiguous_format)
    for c in range(kept.shape[2]):
        states[:, :, c + 1].addcmul_(states[:, :, c], kept[:, :, c, None, None])
    return states


def _save(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _differentiate(ctx: Any, dstates: torch.Tensor,
                   carry: Callable[..., torch.Tensor]) -> tuple[torch.Tensor | None, torch.Tensor]:
    kept, states = ctx.saved_tensors
    dadded = carry(kept.flip(2), dstates.flip(2)).flip(2)
    dkept = torch.linalg.vecdot(dadded[:, :, 1:].flatten(-2),
                                states[:, :, :-1].flatten(-2)) if ctx.needs_input_grad[0] else None
    return dkept, dadded


class _Carried(torch.autograd.Function):
    forward = staticmethod(_carry)
    setup_context = staticmethod(_save)

    @staticmethod
    def backward(ctx: Any, dstates: torch.Tensor) -> Any:
        return _differentiate(ctx, dstates, _Carried.apply)


# A library operator for torch.compile, because tracing the loop would make a graph for each number of chunks.
_library_op = torch.library.custom_op("flashlin::carried", _carry, mutates_args=(),
                                      schema="(Tensor kept, Tensor added) -> Tensor")
_library_op.register_fake(lambda kept, added: added.new_empty(added.shape))
_library_op.register_autograd(lambda ctx, dstates: _differentiate(ctx, dstates, _library_op),
                              setup_context=_save)


def lower(size: int, like: torch.Tensor) -> torch.Tensor:
    """Return a lower triangular mask [size, size], diagonal included, on the device of ``like``."""
    return torch.ones(size, size, dtype=torch.bool, device=like.device).tril()


def decay_between(g: torch.Tensor) -> torch.Tensor:
    """Return the decays e^{g_{j+1} + ... + g_i} for j <= i as [..., T, T], with zeros above the diagonal.

    Each sum is added separately, because a difference of running sums loses its digits if the sums are large.
    They are large after thousands of tokens, or after one token with a very strong decay. After a decay of
    -inf the difference would be NaN. The diagonal is a constant 1, so it contributes nothing to the gradient
    of g.

    g: [..., T], the decays of tokens, or the sums of chunks.
    """
    below = lower(g.shape[-1], g).tril(-1)
    sums = running_sum(g[..., :, None].expand(*g.shape, g.shape[-1]).masked_fill(~below, 0), -2)
    return sums.masked_fill(~below, -torch.inf).exp() + torch.eye(g.shape[-1], dtype=g.dtype, device=g.device)


def decay_to_end(g: torch.Tensor) -> torch.Tensor:
    """Return the decays e^{g_{j+1} + ... + g_L} from each token j to the last one, [..., L].

    Each sum is added separately, as in ``decay_between``.
    """
    return running_sum(F.pad(g[..., 1:], (0, 1)).flip(-1), -1).flip(-1).exp()
