"""The family in plain, differentiable torch: chunked matmuls, no loop over tokens. Serves CPUs and cards that
no Triton compiles for.

Chunks of 64 tokens are handled all at once, then the state is carried through them. Nothing depends on the
value of T, so torch.compile traces one graph for all lengths from 65 to 8,192 (a single chunk is another
graph); past that the sequence is walked in segments.

No matrix of zeros stands between what must not meet: 0 times NaN is NaN. So a value that is not finite
reaches no chunk before its own.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from flashlin.compat.tracing import transformed
from flashlin.kernels.sequences import chunk_length, chunks, joined, over_sequences, running_sum, widest
from flashlin.kernels.simple_gla.inputs import Inputs

SEGMENT = 8192  # tokens


def compute(x: Inputs, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [B, T, H, V], states [N, H, K, V]) in float32, or float64 for float64 tensors. h0 is [N, H, K, V].

    With bounds their values are read on the host (for tensors on a GPU that is a synchronisation).
    """
    g = x.g if x.gamma is None else x.gamma.expand(x.v.shape[:3])
    return over_sequences(_rows, (x.q, x.k, x.v, g), x.h0, x.bounds, scale)


def scores(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor | None, gamma: torch.Tensor | None,
           scale: float, summed: bool = False) -> torch.Tensor:
    """[B, H, T, T], the matrix that makes o out of v:  scale q_i . k_j e^{g_{j+1} + ... + g_i}, 0 for j > i.
    g [B, T, H] or gamma [H] or neither. In float32, or float64 for float64 tensors. summed: use sums, which a
    compiler fuses, instead of a matrix product."""
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
    """The states [B, H, C + 1, K, V] before, between and after C chunks, where added holds the first state
    and what each chunk adds to what is left of the one before it, which is that times kept [B, H, C].
    Backward needs the states and nothing else."""
    if not torch.compiler.is_compiling() and transformed():
        return _carried_one_by_one(kept, added)
    states: torch.Tensor = (_library_op if torch.compiler.is_compiling() else _Carried.apply)(kept, added)
    return states


def _carried_one_by_one(kept: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """Return the same as ``carried``, by operations that torch.func can transform; backward keeps more
    memory."""
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


# Under torch.compile a library operator: a loop that is traced would make a graph for every number of chunks.
_library_op = torch.library.custom_op("flashlin::carried", _carry, mutates_args=(),
                                      schema="(Tensor kept, Tensor added) -> Tensor")
_library_op.register_fake(lambda kept, added: added.new_empty(added.shape))
_library_op.register_autograd(lambda ctx, dstates: _differentiate(ctx, dstates, _library_op),
                              setup_context=_save)


def lower(size: int, like: torch.Tensor) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool, device=like.device).tril()


def decay_between(g: torch.Tensor) -> torch.Tensor:
    """e^{g_{j+1} + ... + g_i} for j <= i, zero above. g may be the decays of tokens or the sums of chunks.

    Each sum is added up by itself. Differences of running sums would be noise once these are large, after
    thousands of tokens or one token that forgets everything, and NaN after one of -inf. The diagonal is a
    constant: it does not decay, so it has no part in g's gradient.
    """
    below = lower(g.shape[-1], g).tril(-1)
    sums = running_sum(g[..., :, None].expand(*g.shape, g.shape[-1]).masked_fill(~below, 0), -2)
    return sums.masked_fill(~below, -torch.inf).exp() + torch.eye(g.shape[-1], dtype=g.dtype, device=g.device)


def decay_to_end(g: torch.Tensor) -> torch.Tensor:
    """e^{g_{j+1} + ... + g_L}, each sum added up by itself, as in decay_between."""
    return running_sum(F.pad(g[..., 1:], (0, 1)).flip(-1), -1).flip(-1).exp()
