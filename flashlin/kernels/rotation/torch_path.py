"""Mamba-3's rotation in plain, differentiable torch, and helpers for packed sequences."""
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
BLOCK = 64  # rows that one thread adds


def compute(x: Inputs, dtype: torch.dtype) -> Outputs:
    """Return the outputs of the rotation; ``angle`` and ``alike`` have the dtype of the computation.

    dtype: dtype of q, k, q_first and k_last. The computation uses the widest dtype of the inputs.
    """
    compute = widest(*x[:-1])
    packed = None if x.bounds is None else packed_of(x.q.shape[1], x.bounds)
    angles, step, weight = (y.to(compute) for y in (x.angles, x.step, x.weight))
    angle = angles_of(angles.tanh() * (math.pi * step)[..., None],
                      None if x.began is None else x.began.double(), packed)
    # torch.compile fuses the real rotation into one kernel, but not the complex one of Turned.
    both = turned if torch.compiler.is_compiling() or transformed() else Turned.apply
    q, k = both(angle, dtype, x.q, x.q_bias, x.k, x.k_bias)
    return Outputs(after(q, packed), (k.to(compute) * weight[..., None]).to(dtype), first(q, packed),
                   last(k, packed), alike(x, compute), angle)


def alike(x: Inputs, compute: torch.dtype) -> Tensor:
    """Return the product q . k of each token and head with biases, [B, T, H].

    The rotation turns both by the same angle and does not change the product, so it is left out.
    """
    (H, N), G = x.q_bias.shape, x.q.shape[2]
    q, k = x.q.to(compute), x.k.to(compute)
    of_q, of_k = (bias.to(compute).view(G, H // max(G, 1), N) for bias in (x.q_bias, x.k_bias))
    # torch.compile under autocast would round the backward of a matrix product to the dtype of autocast.
    crossed = [(y[:, :, :, None] * bias).sum(-1) if torch.compiler.is_compiling()
               else torch.einsum("btgn,ghn->btgh", y, bias) for y, bias in ((q, of_k), (k, of_q))]
    products: Tensor = (q * k).sum(-1)[..., None] + crossed[0] + crossed[1] + (of_q * of_k).sum(-1)
    return products.flatten(2)


class Turned(torch.autograd.Function):
    """Autograd function that adds biases and rotates channel pairs, with few passes over memory.

    It gives the results of ``turned`` and saves only its inputs for the backward.
    """

    @staticmethod
    def forward(ctx: Any, angle: Tensor, dtype: torch.dtype, *given: Tensor | None) -> tuple[Tensor, ...]:
        """Return each x plus its bias, with the first channel pairs rotated, in the given dtype.

        The parameters are the same as for ``turned``.
        """
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
        """Return the gradients of the angles, and of each x and bias.

        A gradient that is rotated back is the gradient of the sum of x and bias.
        """
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
    """Return ``known`` plus the cross products of the first R channel pairs of x and y, [..., R].

    known: a tensor [..., R], or None for zeros.
    """
    (even, odd), (to_even, to_odd) = ((z[..., :2 * R:2], z[..., 1:2 * R:2]) for z in (x, y))
    product = even * to_odd if known is None else torch.addcmul(known, even, to_odd)
    return torch.addcmul(product, odd, to_even, value=-1)


def turned(angle: Tensor, dtype: torch.dtype, *given: Tensor | None) -> tuple[Tensor, ...]:
    """Return each x plus its bias for every head, with the first R channel pairs rotated.

    angle: [B, T, H, R], the angles.
    dtype: the dtype of the results.
    given: x [B, T, G, N] and bias [H, N], alternating. Each pair of them gives one result [B, T, H, N].
    """
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
    """Return x plus bias for each head, [B, T, H, N], as a new tensor with the dtype of the angles.

    x: [B, T, G, N], where each of G groups serves H / G heads, or [B, T, H, N] without a bias.
    bias: [H, N] or None.
    """
    if bias is None:  # x has a row for each head
        return x.to(angle.dtype, copy=True)
    H, N = bias.shape
    G = x.shape[2]
    return (x[:, :, :, None] + bias.to(angle.dtype).view(G, H // max(G, 1), N)).flatten(2, 3)


class Packed(NamedTuple):
    """Positions of sequences that are packed along T, as tensors of row indices.

    sequence: [T], the index of each row's sequence.
    first, end: [T], the first row of that sequence, and the row after its last one. A row outside of all
        sequences counts as a sequence of one row.
    covered: [T], True for rows inside a sequence.
    begins, ends: [N], the first row of each sequence, and the row after its last one.
    """
    sequence: Tensor
    first: Tensor
    end: Tensor
    covered: Tensor
    begins: Tensor
    ends: Tensor


def packed_of(T: int, bounds: Tensor) -> Packed:
    """Return the positions of the sequences with these bounds [N + 1] in a batch row of T tokens."""
    at, edges = torch.arange(T, device=bounds.device), bounds.long()
    begins, ends = edges[:-1].contiguous(), edges[1:].contiguous()
    sequence = torch.searchsorted(ends, at, right=True).clamp(max=len(begins) - 1)
    first, end = begins[sequence], ends[sequence]
    covered = (first <= at) & (at < end)
    return Packed(sequence, torch.where(covered, first, at), torch.where(covered, end, at + 1), covered,
                   begins, ends)


def after(x: Tensor, packed: Packed | None) -> Tensor:
    """Return for each row of x [B, T, ...] the next row of its sequence, and zeros for the last one."""
    if packed is None:
        return F.pad(x[:, 1:], (*[0] * (2 * x.ndim - 4), 0, min(x.shape[1], 1)))
    at = torch.arange(1, x.shape[1] + 1, device=x.device)
    inside = (at < packed.end).view(-1, *[1] * (x.ndim - 2))
    return torch.where(inside, x.index_select(1, at.clamp(max=max(x.shape[1] - 1, 0))), 0)


def first(x: Tensor, packed: Packed | None) -> Tensor:
    """Return the first row of each sequence of x [B, T, ...], and zeros for a sequence without rows."""
    return _row(x, packed, True)


def last(x: Tensor, packed: Packed | None) -> Tensor:
    """Return the last row of each sequence of x [B, T, ...], and zeros for a sequence without rows."""
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
    """Return x [B, T, ...] with zeros in the first row of each sequence."""
    if packed is None:
        return F.pad(x[:, 1:], (*[0] * (2 * x.ndim - 4), min(x.shape[1], 1), 0))
    at = torch.arange(x.shape[1], device=x.device)
    return torch.where((at > packed.first).view(-1, *[1] * (x.ndim - 2)), x, 0)


def where_any(packed: Packed | None, T: int, x: Tensor, start: Tensor) -> Tensor:
    """Return x [n, ...] for sequences with tokens, and ``start`` for sequences without tokens."""
    if packed is None or T == 0:
        return x if T else start.clone()
    return torch.where(any_rows(packed, x), x, start)


def any_rows(packed: Packed, like: Tensor) -> Tensor:
    """Return a mask of the sequences that have rows, [n, 1, ...] with as many dimensions as ``like``."""
    return (packed.ends > packed.begins).view(-1, *[1] * (like.ndim - 1))


def angles_of(turns: Tensor, start: Tensor | None, packed: Packed | None) -> Tensor:
    """Return the angles, within 0 .. 2 pi: the sums of a sequence's turns up to each row, [B, T, H, R].

    turns: [B, T, H, R], the change of the angle at each row, in radians.
    start: [n, H, R], the initial angle of each sequence, or None for zeros.
    packed: positions of packed sequences, or None for a dense batch.
    """
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
    """Return the result of ``_RunningSum`` modulo 2 pi, with operations that torch.func can transform."""
    rows = x.to(torch.float64, copy=True)
    if start is not None:
        wide = start.to(torch.float64)
        rows = (torch.cat([rows[:, :1] + wide[:, None], rows[:, 1:]], 1) if at is None else
                rows + torch.zeros_like(rows[0]).index_add(0, at, wide))
    sums = _prefix(rows) if first is None else _prefix_from(rows, first)
    return torch.remainder(sums, TURN).to(x.dtype)


class _RunningSum(torch.autograd.Function):
    """Autograd function that sums the rows of each sequence up to each row, in float64.

    x: [B, T, ...], the rows. The sums are rounded to its dtype.
    start: [n, ...] or None, added to the rows ``at``. In a dense batch it is added to the first row.
    at: rows to which start is added, or None for a dense batch.
    first, end: [T], the first row of each row's sequence and the row after its last, or None for a dense
        batch.
    turn: if given, the sums are taken modulo this number.

    A value or a gradient that is not finite affects only its own sequence.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, start: Tensor | None, at: Tensor | None, first: Tensor | None,
                end: Tensor | None, turn: float | None) -> Tensor:
        """Return the running sums of each sequence."""
        ctx.save_for_backward(at, first, end)
        rows = x.to(torch.float64, copy=True)
        if start is not None:
            if at is None:
                rows[:, 0] += start
            else:
                rows[0].index_add_(0, at, start)
        sums = _prefix(rows) if first is None else _prefix_from(rows, first)
        # Rounding on write saves a pass over memory.
        return sums.to(x.dtype) if turn is None else torch.remainder(sums, turn, out=x.new_empty(x.shape))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradients of x and start: running sums of the gradient from each sequence's end.

        Each row contributes to the sums of all rows from itself to the end of its sequence.
        """
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
    """Return the sums of the rows of x [B, T, ...] up to each row; x may be overwritten.

    Sums are computed in blocks of 64 rows. On CUDA a cumulative sum runs one thread per column unless the
    summed dimension is the innermost. A transposed copy of x would take longer than the sums by blocks.
    torch.compile generates its own scans. It needs only one graph for all lengths if there are no blocks.
    """
    T = x.shape[1]
    if torch.compiler.is_compiling() or T <= BLOCK:
        return running_sum(x, 1)
    whole: Tensor = F.pad(x, (*[0] * (2 * x.ndim - 4), 0, -T % BLOCK)) if T % BLOCK else x
    blocks = whole.unflatten(1, (-1, BLOCK))
    blocks[:, 1:, 0] += _prefix(blocks.sum(2, dtype=x.dtype))[:, :-1]
    sums: Tensor = running_sum(blocks, 2)
    return sums.flatten(1, 2)[:, :T]


def _prefix_from(x: Tensor, first: Tensor) -> Tensor:
    """Return the sums of the rows of x [B, T, ...] from row first[t] to each row t; x is overwritten.

    The result is a difference of sums over all rows. Values that are not finite would turn all later
    differences to NaN. So they are replaced by zeros and counted, and only sums with such a value become NaN.
    """
    row_before = (*[0] * (2 * x.ndim - 4), 1, 0)  # padding with one row of zeros in front
    broken = ~(x.abs() < math.inf)
    sums, counts = (F.pad(_prefix(y), row_before) for y in (x.masked_fill_(broken, 0), broken.int()))
    total = sums[:, 1:] - sums.index_select(1, first)
    spoiled: Tensor = counts[:, 1:] > counts.index_select(1, first)
    return total.masked_fill_(spoiled, torch.nan)
