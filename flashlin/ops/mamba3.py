"""Mamba-3 with one input and one output a head (SISO), chunk by chunk; mirrors
``mamba_ssm.ops.triton.mamba3.mamba3_siso_combined``.

    theta_t = theta_{t-1} + pi tanh(Angles_t) DT_t
    q_t, k_t = Q_t + Q_bias, K_t + K_bias, turned by theta_t        r_t = sigmoid(Trap_t)
    S_t = e^{ADT_t} (S_{t-1} + (1 - r_t) DT_t v_{t-1} k_{t-1}^T) + r_t DT_t v_t k_t^T
    y_t = (S_t q_t + D v_t) silu(Z_t)
Source: Lahoti et al. 2026 (arXiv 2603.15569). Composed: two scans of simple GLA (simple_gla.py), one that
writes what a token brings and one that writes what the token before it brought, the trapezoid's two sides;
the angles' running sums and the rotation are torch, and what D and Z do is Mamba2's elementwise kernel.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin import policy
from flashlin.guards import scalars
from flashlin.guards.tensors import check_cu_seqlens, check_values, need_tensor, shown
from flashlin.ops import simple_gla
from flashlin.ops._common import chunked
from flashlin.ops._common.calls import check_optional
from flashlin.ops._common.planned import common_dtype
from flashlin.ops._common.pointwise import check_rows, scaled, skipped

TURN = 2 * math.pi
BLOCK = 64  # rows that one thread adds up


class States(NamedTuple):
    """What a sequence leaves to its next token. angle [n, H, R]; ssm [n, H, P, N]; k [n, H, N], turned and
    with its bias, and v [n, H, P] of the last token."""
    angle: Tensor
    ssm: Tensor
    k: Tensor
    v: Tensor


def mamba3_siso_combined(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    Angles: Tensor,
    D: Tensor | None = None,
    Z: Tensor | None = None,
    Input_States: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    chunk_size: int = 64,
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Mamba-3's scan. Drop-in for ``mamba_ssm.ops.triton.mamba3.mamba3_siso_combined.mamba3_siso_combined``.
    Composed: two scans of simple GLA, the trapezoid's two sides, and a rotation in torch.

    Args:
        Q, K: [b, T, G, N], N even, G a divisor of H: head h reads group h // (H / G). V: [b, T, H, P].
            bfloat16, float16, float32 (float64 runs in plain torch). Different dtypes are promoted as torch
            promotes them. With cu_seqlens b is 1 and the sequences are packed along T.
        ADT: [b, H, T] log decays A dt, normally <= 0. DT: [b, H, T], the steps, after softplus. Trap: [b, H,
            T], of whose sigmoid r a token's own side gets r and the side of the token before it 1 - r.
        Q_bias, K_bias: [H, N], added before the rotation.
        Angles: [b, T, H, R], R at most N / 2: pair (2 i, 2 i + 1) of q and k is turned by the running sum of
            pi tanh(Angles) DT; the other channels are not.
        D: [H], a skip connection. Z: [b, T, H, P], a gate: y is multiplied by silu(Z).
        Input_States: angles [n, H, R], states [n, H, P, N], the last k [n, H, N] (after bias and rotation)
            and the last v [n, H, P] of each of n sequences, as return_final_states gives them. All four get
            gradients.
        chunk_size: accepted for compatibility (at least 1); the launch table chooses the chunk, which changes
            nothing beyond rounding.
        return_final_states: also return the states after each sequence.
        cu_seqlens: [n + 1] int32 or int64 on Q's device: sequence i is rows cu_seqlens[i] .. cu_seqlens[i +
            1]. Empty ones are fine.

    Returns:
        y [b, T, H, P] in V's dtype; with return_final_states (y, angles in 0 .. 2 pi, states, k, v), angles
        and states in float32 (float64 for float64 tensors). Rows that cu_seqlens does not cover are zero, as
        are their gradients. Gradients reach every floating-point argument through each of them.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. UnsupportedError: this machine cannot
            run the call.

    Differs from mamba_ssm: float32 stays float32 (there everything becomes bfloat16), and so do Angles and
    Trap; tanh, cos and sin are exact; angles are summed in float64, so that long sequences lose no digits; N
    and P need not be powers of two, R not be even; no tensor descriptors, so cards before Hopper and Triton
    before 3.4 will do, and CPU tensors; no autotuning, and gradients repeat to the bit.
    """
    op = "mamba3_siso_combined"
    return_final_states = scalars.flag("return_final_states", return_final_states)
    scalars.integer("chunk_size", chunk_size, 1, "an integer of at least 1")
    b, T, H, _ = _check(Q, K, V, ADT, DT, Trap, Q_bias, K_bias)
    bounds = None
    if cu_seqlens is not None:
        bounds = check_cu_seqlens(cu_seqlens, None, Q.shape, Q.device, policy.current().debug, "Q")
        check_values("cu_seqlens", bounds)
        if bounds.shape[0] == 1:
            raise ValueError("cu_seqlens: got shape [1], need the edges of at least one sequence")
    n = b if bounds is None else bounds.shape[0] - 1
    states = _check_others(Q, V, Angles, D, Z, Input_States, n)

    dtype, tensors = common_dtype(Q, K, V), (Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z)
    doubles = any(x is not None and x.dtype == torch.float64 for x in tensors)
    wide = torch.float64 if doubles else torch.float32
    packed = None if bounds is None else _packed(T, bounds, Q.device)
    decay, step, trap = (x.mT.to(wide) for x in (ADT, DT, Trap))
    share = trap.sigmoid()
    of_angle, of_k, of_v = (None, None, None) if states is None else (
        states.angle.double(), states.k.to(dtype), states.v.to(V.dtype))
    angle = _angles(Angles.to(wide).tanh() * (math.pi * step)[..., None], of_angle, packed)
    # Traced, the compiler makes one kernel of the rotation, but not of complex numbers.
    turned = _turned if torch.compiler.is_compiling() else _Turned.apply
    q, k = turned(angle, dtype, Q, Q_bias, K, K_bias)

    request = chunked.Request(op, 1.0, None if states is None else states.ssm, return_final_states, bounds,
                              state_v_first=True)
    own, _ = scaled(op, V, step * share, dtype)
    y, ssm = chunked.run(simple_gla.FAMILY, request, (q, k, own, decay, None), out_dtype=wide)
    del own
    earlier, _ = scaled(op, _before(V, of_v, packed), step * (1 - share) * decay.exp(), dtype)
    y_before, ssm_before = chunked.run(simple_gla.FAMILY, request._replace(h0=None),
                                       (q, _before(k, of_k, packed), earlier, decay, None), out_dtype=wide)
    del q, earlier
    y += y_before
    del y_before
    y = y.to(V.dtype) if D is None and Z is None else skipped(op, y, V, D, Z, V.dtype)
    if ssm is None or ssm_before is None:
        return y
    last_angle = _last(angle, None if of_angle is None else of_angle.remainder(TURN).to(wide), packed)
    return y, last_angle, ssm + ssm_before, _last(k, of_k, packed), _last(V, of_v, packed)


def _check(Q: Tensor, K: Tensor, V: Tensor, ADT: Tensor, DT: Tensor, Trap: Tensor, Q_bias: Tensor,
           K_bias: Tensor) -> tuple[int, int, int, int]:
    """b, T, H and P."""
    check_rows("V", V, "[b, T, H, P]", 4)
    b, T, H, P = V.shape
    need_tensor("Q", Q, (b, T, None, None), "[b, T, G, N]", V.device, "V")
    G, N = Q.shape[2:]
    if N == 0 or N % 2 or H % max(G, 1) or bool(H) != bool(G):
        raise ValueError(f"Q: got shape {shown(Q.shape)}, need [b, T, G, N] with G a divisor of the {H} "
                         "heads of V and N even, at least 2")
    need_tensor("K", K, tuple(Q.shape), "[b, T, G, N]", V.device, "V")
    for name, x in (("ADT", ADT), ("DT", DT), ("Trap", Trap)):
        need_tensor(name, x, (b, H, T), "[b, H, T]", V.device, "V")
    for name, x in (("Q_bias", Q_bias), ("K_bias", K_bias)):
        need_tensor(name, x, (H, N), "[H, N]", V.device, "V")
    return b, T, H, P


def _check_others(Q: Tensor, V: Tensor, Angles: Tensor, D: Tensor | None, Z: Tensor | None, given: Any,
                  n: int) -> States | None:
    """Input_States, of n sequences."""
    (b, T, H, P), N = V.shape, Q.shape[3]
    need_tensor("Angles", Angles, (b, T, H, None), "[b, T, H, R]", V.device, "V")
    R = Angles.shape[3]
    if 2 * R > N:
        raise ValueError(f"Angles: got shape {shown(Angles.shape)}, need [b, T, H, R] with R at most N / 2 = "
                         f"{N // 2}")
    check_optional("V", V, (("D", D, (H,), "[H]"), ("Z", Z, (b, T, H, P), "V's shape")))
    if given is None:
        return None
    if not isinstance(given, (tuple, list)) or len(given) != 4:
        raise TypeError(f"Input_States: got {type(given).__name__}, need (angles [n, H, R], states [n, H, P, "
                        "N], k [n, H, N], v [n, H, P]) or None")
    shapes = {"angles": ((n, H, R), "[n, H, R]"), "states": ((n, H, P, N), "[n, H, P, N]"),
              "k": ((n, H, N), "[n, H, N]"), "v": ((n, H, P), "[n, H, P]")}
    for (name, (shape, meaning)), x in zip(shapes.items(), given, strict=True):
        need_tensor(f"Input_States: {name}", x, shape, meaning, V.device, "V")
    return States(*given)


class _Turned(torch.autograd.Function):
    """What _turned gives, in fewer passes over memory, forward and backward, and keeping little."""

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
        back = _Turned.apply(-angle, angle.dtype, *[x for dx in gradients for x in (dx, None)])
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


def _turned(angle: Tensor, dtype: torch.dtype, *given: Tensor | None) -> tuple[Tensor, ...]:
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


class _Packed(NamedTuple):
    """Where sequences lie that are packed along T. sequence: of each row; first, end: its sequence's first
    row and the one after its last (a row of no sequence is one of its own). begins, ends: of each
    sequence."""
    sequence: Tensor
    first: Tensor
    end: Tensor
    begins: Tensor
    ends: Tensor


def _packed(T: int, bounds: Tensor, device: torch.device) -> _Packed:
    at, edges = torch.arange(T, device=device), bounds.long()
    begins, ends = edges[:-1].contiguous(), edges[1:].contiguous()
    sequence = torch.searchsorted(ends, at, right=True).clamp(max=len(begins) - 1)
    first, end = begins[sequence], ends[sequence]
    covered = (first <= at) & (at < end)
    return _Packed(sequence, torch.where(covered, first, at), torch.where(covered, end, at + 1), begins, ends)


def _before(x: Tensor, start: Tensor | None, packed: _Packed | None) -> Tensor:
    """The row of x [b, T, ...] before each in its sequence; before the first start [n, ...], or zeros."""
    T, n = x.shape[1], x.shape[0] if packed is None else len(packed.begins)
    start = x.new_zeros(n, *x.shape[2:]) if start is None else start
    if packed is None:
        return torch.cat([start[:, None], x[:, :-1]], 1)[:, :T]
    at = torch.arange(T, device=x.device)
    return torch.cat([start, x[0]]).index_select(
        0, torch.where(at > packed.first, n + at - 1, packed.sequence))[None]


def _last(x: Tensor, start: Tensor | None, packed: _Packed | None) -> Tensor:
    """The last row of each sequence of x [b, T, ...]; of one without rows start [n, ...], or zeros."""
    n = x.shape[0] if packed is None else len(packed.begins)
    if x.shape[1] == 0:
        return x.new_zeros(n, *x.shape[2:]) if start is None else start.clone()
    if packed is None:
        return x[:, -1].clone()
    rows = x[0].index_select(0, (packed.ends - 1).clamp(min=0))
    return torch.where(_any_rows(packed, rows), rows, 0 if start is None else start)


def _any_rows(packed: _Packed, like: Tensor) -> Tensor:
    """Whether a sequence has any, [n, 1, ...]."""
    return (packed.ends > packed.begins).view(-1, *[1] * (like.ndim - 1))


def _angles(turns: Tensor, start: Tensor | None, packed: _Packed | None) -> Tensor:
    """Sums of the turns [b, T, H, R] of a sequence up to each, start [n, H, R] included, in 0 .. 2 pi."""
    if turns.shape[1] == 0:
        return turns
    where: tuple[Any, ...] = (None, None, None)
    if packed is not None:
        where = packed.begins.clamp(max=turns.shape[1] - 1), packed.first, packed.end
        start = None if start is None else torch.where(_any_rows(packed, start), start, 0)
    angle: Tensor = _RunningSum.apply(turns, start, *where, TURN)
    return angle


class _RunningSum(torch.autograd.Function):
    """Of rows x [b, T, ...]: the sums of those of its sequence up to each in float64, rounded to x's dtype;
    with turn what is left of them beyond whole turns. start [n, ...] is added to the rows ``at``, those of a
    batch to its first; first, end: as of _Packed, None for a batch. What is not finite stays in its sequence,
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
        return x.cumsum(1, dtype=x.dtype)
    whole: Tensor = F.pad(x, (*[0] * (2 * x.ndim - 4), 0, -T % BLOCK)) if T % BLOCK else x
    blocks = whole.unflatten(1, (-1, BLOCK))
    blocks[:, 1:, 0] += _prefix(blocks.sum(2, dtype=x.dtype))[:, :-1]
    sums: Tensor = blocks.cumsum(2, dtype=x.dtype)
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
