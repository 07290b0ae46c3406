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
    rows = _rows(b, T, bounds, Q.device)
    decay, step, trap = (x.mT.to(wide) for x in (ADT, DT, Trap))
    share = trap.sigmoid()
    turns = (math.pi * Angles.to(wide).tanh() * step[..., None]).view(b * T, *Angles.shape[2:]).double()
    of_angle = None if states is None else states.angle.double()
    angle = rows.running_sum(turns, of_angle).remainder(TURN).to(wide)
    cos, sin = (x.view(Angles.shape) for x in (angle.cos(), angle.sin()))
    q, k = (_turned(x, bias, cos, sin).to(dtype) for x, bias in ((Q, Q_bias), (K, K_bias)))

    k_rows, v_rows = k.reshape(b * T, *k.shape[2:]), V.reshape(b * T, *V.shape[2:])
    of_k = None if states is None else states.k.to(dtype)
    of_v = None if states is None else states.v.to(V.dtype)
    k_before, v_before = rows.before(k_rows, of_k).view(k.shape), rows.before(v_rows, of_v).view(V.shape)
    own, _ = scaled(op, V, step * share, dtype)
    earlier, _ = scaled(op, v_before, step * (1 - share) * decay.exp(), dtype)
    request = chunked.Request(op, 1.0, None if states is None else states.ssm, return_final_states, bounds,
                              state_v_first=True)
    y, ssm = chunked.run(simple_gla.FAMILY, request, (q, k, own, decay, None), out_dtype=wide)
    y_before, ssm_before = chunked.run(simple_gla.FAMILY, request._replace(h0=None),
                                       (q, k_before, earlier, decay, None), out_dtype=wide)
    y = y + y_before
    y = y.to(V.dtype) if D is None and Z is None else skipped(op, y, V, D, Z, V.dtype)
    if ssm is None or ssm_before is None:
        return y
    last_angle = rows.last(angle, None if of_angle is None else of_angle.remainder(TURN).to(wide))
    return y, last_angle, ssm + ssm_before, rows.last(k_rows, of_k), rows.last(v_rows, of_v)


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


def _turned(x: Tensor, bias: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [b, T, G, N] + bias [H, N] for each head, its first pairs turned by angles [b, T, H, R]."""
    H, N = bias.shape
    G, R = x.shape[2], cos.shape[3]
    heads = (x.to(cos.dtype)[:, :, :, None] + bias.to(cos.dtype).view(G, H // max(G, 1), N)).flatten(2, 3)
    turning, rest = heads.split([2 * R, N - 2 * R], -1)
    even, odd = turning[..., ::2], turning[..., 1::2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([turned, rest], -1)


class _Rows(NamedTuple):
    """Where the rows [b T] of all sequences lie. sequence: of each row; first, end: its sequence's first row
    and the one after its last (a row of no sequence is one of its own). begins, ends: of each sequence."""
    sequence: Tensor
    first: Tensor
    end: Tensor
    begins: Tensor
    ends: Tensor

    def running_sum(self, x: Tensor, start: Tensor | None) -> Tensor:
        """Sums [b T, ...] of the rows of a sequence up to each, start [n, ...] included."""
        if start is not None and len(x):
            kept = (self.ends > self.begins).view(-1, *[1] * (start.ndim - 1))
            x = x.index_add(0, self.begins.clamp(max=len(x) - 1), torch.where(kept, start, 0))
        total: Tensor = _RunningSum.apply(x, self.first, self.end)
        return total

    def before(self, x: Tensor, start: Tensor | None) -> Tensor:
        """The row before each in its sequence; before the first start [n, ...], or zeros."""
        at = torch.arange(len(x), device=x.device)
        return self._joined(x, start).index_select(
            0, torch.where(at > self.first, len(self.begins) + at - 1, self.sequence))

    def last(self, x: Tensor, start: Tensor | None) -> Tensor:
        """The last row of each sequence; of one without rows start [n, ...], or zeros."""
        n = torch.arange(len(self.begins), device=x.device)
        return self._joined(x, start).index_select(
            0, torch.where(self.ends > self.begins, len(self.begins) + self.ends - 1, n))

    def _joined(self, x: Tensor, start: Tensor | None) -> Tensor:
        return torch.cat([x.new_zeros(len(self.begins), *x.shape[1:]) if start is None else start, x])


def _rows(b: int, T: int, bounds: Tensor | None, device: torch.device) -> _Rows:
    at = torch.arange(b * T, device=device)
    if bounds is None:
        sequence, begins = at // max(T, 1), torch.arange(b, device=device) * T
        return _Rows(sequence, sequence * T, sequence * T + T, begins, begins + T)
    edges = bounds.long()
    begins, ends = edges[:-1].contiguous(), edges[1:].contiguous()
    sequence = torch.searchsorted(ends, at, right=True).clamp(max=len(begins) - 1)
    first, end = begins[sequence], ends[sequence]
    covered = (first <= at) & (at < end)
    return _Rows(sequence, torch.where(covered, first, at), torch.where(covered, end, at + 1), begins, ends)


class _RunningSum(torch.autograd.Function):
    """Of rows x [rows, ...]: x[first[t]] + ... + x[t] for each t. What is not finite stays in its sequence,
    and so do gradients: a sum over all rows less that of the rows before a sequence would be NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, end: Tensor) -> Tensor:
        ctx.save_for_backward(first, end)
        broken = ~x.isfinite()
        row_before = (*[0] * (2 * x.ndim - 2), 1, 0)  # of zeros
        sums = F.pad(torch.where(broken, 0, x).cumsum(0), row_before)
        counts = F.pad(broken.cumsum(0, dtype=torch.int32), row_before)
        total = sums[1:] - sums.index_select(0, first)
        return torch.where(counts[1:] > counts.index_select(0, first), torch.nan, total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """The same from the end: each row is in the sums up to its sequence's end."""
        first, end = ctx.saved_tensors
        rows = len(first)
        back = _RunningSum.apply(gradient.flip(0), (rows - end).flip(0), (rows - first).flip(0))
        return back.flip(0), None, None
