"""Mamba-3's rotation in plain, differentiable torch, and where packed sequences lie."""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin.compat.tracing import transformed
from flashlin.kernels.rotation.inputs import Inputs, Outputs
from flashlin.kernels.sequences import running_sum, widest

TURN = 2 * math.pi
BLOCK = 64  # rows that one thread adds up


def compute(x: Inputs, dtype: torch.dtype) -> Outputs:
    """What launch_forward gives, angles and q . k in the dtype that they are computed in."""
    compute = widest(*x[:-1])
    packed = None if x.bounds is None else packed_of(x.q.shape[1], x.bounds)
    angles, step, weight = (y.to(compute) for y in (x.angles, x.step, x.weight))
    angle = angles_of(angles.tanh() * (math.pi * step)[..., None],
                      None if x.began is None else x.began.double(), packed)
    # Traced, the compiler makes one kernel of the rotation, but not of complex numbers.
    both = turned if torch.compiler.is_compiling() or transformed() else Turned.apply
    q, k = both(angle, dtype, x.q, x.q_bias, x.k, x.k_bias)
    return Outputs(after(q, packed), (k.to(compute) * weight[..., None]).to(dtype), first(q, packed),
                   last(k, packed), alike(x, compute), angle)


def alike(x: Inputs, compute: torch.dtype) -> Tensor:
    """q . k of each token, [b, T, H]: both turn together, so as if neither did."""
    (H, N), G = x.q_bias.shape, x.q.shape[2]
    q, k = x.q.to(compute), x.k.to(compute)
    of_q, of_k = (bias.to(compute).view(G, H // max(G, 1), N) for bias in (x.q_bias, x.k_bias))
    # traced under autocast, the backward of a matrix product would be rounded
    crossed = [(y[:, :, :, None] * bias).sum(-1) if torch.compiler.is_compiling()
               else torch.einsum("btgn,ghn->btgh", y, bias) for y, bias in ((q, of_k), (k, of_q))]
    products: Tensor = (q * k).sum(-1)[..., None] + crossed[0] + crossed[1] + (of_q * of_k).sum(-1)
    return products.flatten(2)


class Turned(torch.autograd.Function):
    """What turned gives, in fewer passes over memory, forward and backward, and keeping little."""

    @staticmethod
    def forward(ctx: Any, angle: Tensor, dtype: torch.dtype, *given: Tensor | None) -> tuple[Tensor, ...]:
        ctx.save_for_backward(angle, *given)
        turn, R = torch.polar(angle.new_ones(()), angle), angle.shape[3]
        turned = []
        for x, bias in _with_biases(given):
            heads = _heads(x, bias, angle).contiguous()
            torch.view_as_complex(heads[..., :2 * R].unflatten(-1, (R, 2))).mul_(turn)
            turned.append(heads.to(dtype))
        return tuple(turned)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Turned back, a gradient is that of the sum with the bias."""
        angle, *given = ctx.saved_tensors
        (b, T, H, R), of_angle, of_given = angle.shape, None, []
        back = Turned.apply(-angle, angle.dtype, *[x for dx in gradients for x in (dx, None)])
        for (x, bias), of_heads in zip(_with_biases(given), back, strict=True):
            G, N = x.shape[2:]
            of_groups = of_heads.view(b, T, G, H // max(G, 1), N)
            of_given += [of_groups.sum_to_size(b, T, G, 1, N).squeeze(3),
                         None if bias is None else of_heads.sum((0, 1))]
            of_angle = _crossed(_heads(x, bias, angle), of_heads, R, of_angle)
        return of_angle, None, *of_given


def _crossed(x: Tensor, y: Tensor, R: int, known: Tensor | None) -> Tensor:
    """The cross products [..., R] of the first pairs of both, added to what is known."""
    (even, odd), (to_even, to_odd) = ((z[..., :2 * R:2], z[..., 1:2 * R:2]) for z in (x, y))
    product = even * to_odd if known is None else torch.addcmul(known, even, to_odd)
    return torch.addcmul(product, odd, to_even, value=-1)


def turned(angle: Tensor, dtype: torch.dtype, *given: Tensor | None) -> tuple[Tensor, ...]:
    """x [b, T, G, N] + bias [H, N] for each head, its first pairs turned by angles [b, T, H, R]; given: x,
    bias, then the next x and its bias."""
    (cos, sin), R = (angle.cos(), angle.sin()), angle.shape[3]
    turned = []
    for x, bias in _with_biases(given):
        turning, rest = _heads(x, bias, angle).tensor_split([2 * R], -1)
        even, odd = turning[..., ::2], turning[..., 1::2]
        pairs = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
        turned.append(torch.cat([pairs, rest], -1).to(dtype))
    return tuple(turned)


def _with_biases(given: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(given[::2], given[1::2], strict=True)


def _heads(x: Tensor, bias: Tensor | None, angle: Tensor) -> Tensor:
    """x [b, T, G, N] + bias [H, N] for each head, in memory of its own and the dtype of angles."""
    if bias is None:  # x has a row for each head
        return x.to(angle.dtype, copy=True)
    H, N = bias.shape
    G = x.shape[2]
    return (x[:, :, :, None] + bias.to(angle.dtype).view(G, H // max(G, 1), N)).flatten(2, 3)


class Packed(NamedTuple):
    """Where sequences lie that are packed along T. sequence: of each row; first, end: its sequence's first
    row and the one after its last (a row of no sequence is one of its own). covered: whether it is of one.
    begins, ends: of each sequence."""
    sequence: Tensor
    first: Tensor
    end: Tensor
    covered: Tensor
    begins: Tensor
    ends: Tensor


def packed_of(T: int, bounds: Tensor) -> Packed:
    at, edges = torch.arange(T, device=bounds.device), bounds.long()
    begins, ends = edges[:-1].contiguous(), edges[1:].contiguous()
    sequence = torch.searchsorted(ends, at, right=True).clamp(max=len(begins) - 1)
    first, end = begins[sequence], ends[sequence]
    covered = (first <= at) & (at < end)
    return Packed(sequence, torch.where(covered, first, at), torch.where(covered, end, at + 1), covered,
                   begins, ends)


def after(x: Tensor, packed: Packed | None) -> Tensor:
    """The row of x [b, T, ...] after each in its sequence; zeros after the last."""
    if packed is None:
        return F.pad(x[:, 1:], (*[0] * (2 * x.ndim - 4), 0, min(x.shape[1], 1)))
    at = torch.arange(1, x.shape[1] + 1, device=x.device)
    inside = (at < packed.end).view(-1, *[1] * (x.ndim - 2))
    return torch.where(inside, x.index_select(1, at.clamp(max=max(x.shape[1] - 1, 0))), 0)


def first(x: Tensor, packed: Packed | None) -> Tensor:
    """The first row of each sequence of x [b, T, ...]; zeros for one without rows."""
    return _row(x, packed, True)


def last(x: Tensor, packed: Packed | None) -> Tensor:
    """The last row of each sequence of x [b, T, ...]; zeros for one without rows."""
    return _row(x, packed, False)


def _row(x: Tensor, packed: Packed | None, at_first: bool) -> Tensor:
    T = x.shape[1]
    if T == 0:
        return x.new_zeros(x.shape[0] if packed is None else len(packed.begins), *x.shape[2:])
    if packed is None:
        return x[:, 0 if at_first else -1].clone()
    at = packed.begins.clamp(max=T - 1) if at_first else (packed.ends - 1).clamp(min=0)
    rows = x[0].index_select(0, at)
    return torch.where(any_rows(packed, rows), rows, 0)


def unless_first(x: Tensor, packed: Packed | None) -> Tensor:
    """x [b, T, ...] with zeros for the first row of each sequence."""
    if packed is None:
        return F.pad(x[:, 1:], (*[0] * (2 * x.ndim - 4), min(x.shape[1], 1), 0))
    at = torch.arange(x.shape[1], device=x.device)
    return torch.where((at > packed.first).view(-1, *[1] * (x.ndim - 2)), x, 0)


def where_any(packed: Packed | None, T: int, x: Tensor, start: Tensor) -> Tensor:
    """x [n, ...] of sequences with tokens, start of those without."""
    if packed is None or T == 0:
        return x if T else start.clone()
    return torch.where(any_rows(packed, x), x, start)


def any_rows(packed: Packed, like: Tensor) -> Tensor:
    """Whether a sequence has any, [n, 1, ...]."""
    return (packed.ends > packed.begins).view(-1, *[1] * (like.ndim - 1))


def angles_of(turns: Tensor, start: Tensor | None, packed: Packed | None) -> Tensor:
    """Sums of the turns [b, T, H, R] of a sequence up to each, start [n, H, R] included, in 0 .. 2 pi."""
    if turns.shape[1] == 0:
        return turns
    where: tuple[Any, ...] = (None, None, None)
    if packed is not None:
        where = packed.begins.clamp(max=turns.shape[1] - 1), packed.first, packed.end
        start = None if start is None else torch.where(any_rows(packed, start), start, 0)
    if transformed():
        return _running_sum(turns, start, where[0], where[1])
    angle: Tensor = _RunningSum.apply(turns, start, *where, TURN)
    return angle


def _running_sum(x: Tensor, start: Tensor | None, at: Tensor | None, first: Tensor | None) -> Tensor:
    """Return the same as ``_RunningSum`` with whole turns, by operations that torch.func can transform."""
    rows = x.to(torch.float64, copy=True)
    if start is not None:
        wide = start.to(torch.float64)
        rows = (torch.cat([rows[:, :1] + wide[:, None], rows[:, 1:]], 1) if at is None else
                rows + torch.zeros_like(rows[0]).index_add(0, at, wide))
    sums = _prefix(rows) if first is None else _prefix_from(rows, first)
    return torch.remainder(sums, TURN).to(x.dtype)


class _RunningSum(torch.autograd.Function):
    """Of rows x [b, T, ...]: the sums of those of its sequence up to each in float64, rounded to x's dtype;
    with turn what is left of them beyond whole turns. start [n, ...] is added to the rows ``at``, those of a
    batch to its first; first, end: as of Packed, None for a batch. What is not finite stays in its sequence,
    and so do gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, start: Tensor | None, at: Tensor | None, first: Tensor | None,
                end: Tensor | None, turn: float | None) -> Tensor:
        ctx.save_for_backward(at, first, end)
        rows = x.to(torch.float64, copy=True)
        if start is not None:
            if at is None:
                rows[:, 0] += start
            else:
                rows[0].index_add_(0, at, start)
        sums = _prefix(rows) if first is None else _prefix_from(rows, first)
        # rounded as it is written, which saves a pass
        return sums.to(x.dtype) if turn is None else torch.remainder(sums, turn, out=x.new_empty(x.shape))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """The same from the end: each row is in the sums up to its sequence's end."""
        at, first, end = ctx.saved_tensors
        T, edges = gradient.shape[1], (None, None)
        if first is not None:
            edges = (T - end).flip(0), (T - first).flip(0)
        back = _RunningSum.apply(gradient.flip(1), None, None, *edges, None).flip(1)
        of_start = None
        if ctx.needs_input_grad[1]:
            of_start = back[:, 0] if at is None else back[0].index_select(0, at)
        return back, of_start, None, None, None, None


def _prefix(x: Tensor) -> Tensor:
    """Sums of the rows of x [b, T, ...] up to each, by blocks; x may be overwritten. On CUDA one thread walks
    all of a column unless that is the innermost dimension, and to copy x for that takes longer than to sum
    blocks. A compiler has its own scans, and one graph of those serves all lengths."""
    T = x.shape[1]
    if torch.compiler.is_compiling() or T <= BLOCK:
        return running_sum(x, 1)
    whole: Tensor = F.pad(x, (*[0] * (2 * x.ndim - 4), 0, -T % BLOCK)) if T % BLOCK else x
    blocks = whole.unflatten(1, (-1, BLOCK))
    blocks[:, 1:, 0] += _prefix(blocks.sum(2, dtype=x.dtype))[:, :-1]
    sums: Tensor = running_sum(blocks, 2)
    return sums.flatten(1, 2)[:, :T]


def _prefix_from(x: Tensor, first: Tensor) -> Tensor:
    """Those from x[0, first[t]] on. A difference of sums over all rows would be NaN after a sequence with
    something that is not finite, which is counted instead; x is overwritten."""
    row_before = (*[0] * (2 * x.ndim - 4), 1, 0)  # of zeros
    broken = ~(x.abs() < math.inf)
    sums, counts = (F.pad(_prefix(y), row_before) for y in (x.masked_fill_(broken, 0), broken.int()))
    total = sums[:, 1:] - sums.index_select(1, first)
    spoiled: Tensor = counts[:, 1:] > counts.index_select(1, first)
    return total.masked_fill_(spoiled, torch.nan)
