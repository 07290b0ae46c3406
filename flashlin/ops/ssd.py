"""The state space duality (SSD) of Mamba2, chunk by chunk; mirrors ``mamba_ssm.ops.triton.ssd_combined``.

    h_t = e^{dt_t A} h_{t-1} + dt_t x_t B_t^T        y_t = (h_t C_t + D x_t) silu(z_t)

Source: Dao and Gu 2024. It is simple GLA with q = C, k = B, v = dt x and g = dt A, so it runs the kernels of
simple GLA. Elementwise kernels compute dt x, and apply D and z.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin import policy
from flashlin.guards import scalars
from flashlin.guards.tensors import check_cu_seqlens, check_floats, need_tensor, shareable, shown
from flashlin.kernels.norm.recipe import RMS
from flashlin.kernels.pointwise.nonfinite import contained, released, spread
from flashlin.kernels.sequences import widest
from flashlin.ops import simple_gla
from flashlin.ops._common.arguments import check_linear, check_optional, check_rows, check_seq_idx, linear
from flashlin.ops._common.casting import common_dtype, linear_dtype
from flashlin.ops._common.chunked import Request, run_chunked
from flashlin.ops._common.entry import entry, linear_entry, without_autocast
from flashlin.ops._common.pointwise import scaled, skipped
from flashlin.ops.causal_conv1d import begins, convolved
from flashlin.ops.conv import check_filters, is_silu
from flashlin.ops.norm import mamba_norm


@entry
def mamba_chunk_scan_combined(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: Sequence[float] = (0.0, math.inf), return_final_states: bool = False,
    return_varlen_states: bool = False, out_dtype: torch.dtype | None = None, *, cp_context: Any = None,
    process_group: Any = None) -> Tensor | tuple[Tensor, ...]:
    """Compute the scan of Mamba2 chunk by chunk.

    Drop-in for ``mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined``. The recurrence is

        h_t = e^{dt_t A} h_{t-1} + dt_t x_t B_t^T        y_t = (h_t C_t + D x_t) silu(z_t)

    Args:
        x: [b, T, H, P], bfloat16, float16 or float32 (float64 runs in plain torch), any strides, never
            modified. Mixed dtypes of x, B and C follow torch's promotion.
        dt: [b, T, H], any float dtype: the step before bias, softplus and limits.
        A: [H], normally negative.
        B: [b, T, G, N], G a divisor of H. Head h reads group h // (H / G).
        C: [b, T, G, N], like B.
        chunk_size: at least 1, accepted for compatibility. The launch table chooses the chunk size, which
            changes the result only by rounding.
        D: [H] or [H, P], a skip connection, or None.
        z: [b, T, H, P], a gate, or None: y is multiplied by silu(z).
        dt_bias: [H], added to dt, or None.
        initial_states: [b, H, P, N], any float dtype: the state before the first sequence of each row.
        seq_idx: [b, T] integers. A token whose number differs from the previous token's begins a new
            sequence, with a state of zero. After a value that is not finite, y is NaN to the end of its
            sequence, and all gradients of that sequence are NaN. Other sequences stay finite, unless sums of
            finite values overflow float32 in the scan. With cu_seqlens they stay finite even then.
        cu_seqlens: [n + 1] int32 or int64, for b = 1. Sequence i has the rows cu_seqlens[i] to cu_seqlens[i +
            1] (exclusive). As in mamba_ssm, it has an effect only with return_varlen_states. The initial
            state belongs to sequence 0.
        dt_softplus: apply softplus to dt + dt_bias.
        dt_limit: (lowest, highest): the step is clamped to this range after dt_bias and dt_softplus.
        return_final_states: also return the state after each row.
        return_varlen_states: also return the state after each sequence of cu_seqlens.
        out_dtype: torch.float32 returns y before it is rounded to the dtype of x, for a norm that follows.
            That saves one rounding in y and one in its gradient. (mamba_ssm has no such argument.)
        cp_context: the ranks that share the sequences, as in ``chunk_gated_delta_rule``. With ranks,
            cu_seqlens always has an effect. Then seq_idx is an error, and return_final_states is an error
            together with cu_seqlens.
        process_group: the group of these ranks, as in ``chunk_gated_delta_rule``.

    Returns:
        y [b, T, H, P] in the dtype of x or in out_dtype. With return_final_states, return_varlen_states or
        both it is (y, final states), (y, states of sequences) or (y, final states, states of sequences). The
        final states are [b, H, P, N] in float32 (float64 for float64 tensors), and the states of sequences
        are [n, H, P, N] in the dtype of C. Every float argument gets gradients through each result.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    Differences from mamba_ssm: there is no autotuning, and repeated runs give bitwise identical gradients.
    return_varlen_states has gradients, which are an error in mamba_ssm. With return_varlen_states, cu_seqlens
    separates sequences even without seq_idx, while mamba_ssm mixes them. The state of the first sequence then
    includes the initial state even if that sequence is short. seq_idx may start with any number, while
    mamba_ssm uses the initial state only for the number 0. A later sequence may reuse a number.
    """
    scalars.flags(dt_softplus=dt_softplus, return_final_states=return_final_states,
                  return_varlen_states=return_varlen_states)
    given = Scan(x, dt, A, B, C, D, z, dt_bias, initial_states=initial_states, seq_idx=seq_idx)
    limits = _check(given, dt_limit, chunk_size)
    rounded = out_dtype is None or out_dtype is x.dtype
    if not rounded and (out_dtype is not torch.float32 or x.dtype is torch.float64):
        others = "" if x.dtype is torch.float64 else " or torch.float32"
        raise ValueError(f"out_dtype: got {out_dtype!r}, need None, x's {x.dtype}{others}")
    bounds = None
    if cp_context is not None or process_group is not None:
        from flashlin.ops._common import ranks
        ranks.check_ranks(cp_context, process_group)
        _check_over_ranks(seq_idx, cu_seqlens, return_final_states, return_varlen_states)
        bounds = cu_seqlens
    elif return_varlen_states:
        if cu_seqlens is None:
            raise ValueError("cu_seqlens: got None with return_varlen_states, need the edges of the "
                             "sequences, [n + 1]")
        bounds = check_cu_seqlens(cu_seqlens, None, x.shape, x.device, policy.current().debug, "x")
        if bounds.shape[0] == 1:
            raise ValueError("cu_seqlens: got shape [1], need the edges of at least one sequence")
    if bounds is not None and initial_states is not None:
        behind = bounds.shape[0] - 2
        given = given._replace(initial_states=F.pad(initial_states, (0, 0, 0, 0, 0, 0, 0, behind)))
    y, states = _scan("mamba_chunk_scan_combined", given, limits, dt_softplus,
                      return_final_states or return_varlen_states, bounds, rounded, cp_context, process_group)
    if states is None:
        return y
    if bounds is None:
        return y, states
    of_sequences = states.to(C.dtype)
    if not return_final_states:
        return y, of_sequences
    n = bounds.shape[0] - 1
    last = (torch.arange(n, device=x.device) * (bounds.diff() > 0)).max()  # the last sequence with a token
    return y, states.index_select(0, last[None]), of_sequences


def _check_over_ranks(seq_idx: Tensor | None, cu_seqlens: Tensor | None, final: bool, varlen: bool) -> None:
    """Raise ValueError if ranks share the sequences and the call has options that ranks do not support."""
    if seq_idx is not None:
        raise ValueError("seq_idx: got a tensor where ranks share the sequences, need cu_seqlens with the "
                         "bounds of all sequences")
    if (varlen and cu_seqlens is None) or (final and cu_seqlens is not None):
        name = "return_varlen_states" if varlen else "return_final_states"
        raise ValueError(f"{name}: got True where ranks share the sequences, need return_varlen_states with "
                         "cu_seqlens, and return_final_states without cu_seqlens")


@linear_entry
def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor, conv1d_weight: Tensor, conv1d_bias: Tensor | None, dt_bias: Tensor, A: Tensor, D: Tensor,
    chunk_size: int, initial_states: Tensor | None = None, seq_idx: Tensor | None = None,
    dt_limit: Sequence[float] = (0.0, math.inf), return_final_states: bool = False,
    activation: str | None = "silu", rmsnorm_weight: Tensor | None = None, rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None, outproj_bias: Tensor | None = None, headdim: int | None = None,
    ngroups: int = 1, norm_before_gate: bool = True) -> Tensor | tuple[Tensor, Tensor]:
    """Compute a Mamba2 layer after its input projection: convolution, scan, gated norm and output projection.

    Drop-in for ``mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined``.
    ``mamba_chunk_scan_combined`` documents the scan.

    Args:
        zxbcdt: [b, T, 2 M + 2 H P + 2 G N + H], bfloat16, float16 or float32 (float64 runs in plain torch):
            the result of the input projection. The columns are the input of a parallel MLP, then z, x, B, C
            and dt. M follows from the number of columns and is usually 0 (no MLP).
        conv1d_weight: [H P + 2 G N, W], for the convolution of x, B and C.
        conv1d_bias: [H P + 2 G N] or None.
        dt_bias: [H]. The step is always softplus(dt + dt_bias).
        A: [H].
        D: [H, P], or [H] with headdim = P.
        chunk_size: as in ``mamba_chunk_scan_combined``.
        initial_states: [b, H, P, N] or None, as in ``mamba_chunk_scan_combined``.
        seq_idx: [b, T] integers, as in ``mamba_chunk_scan_combined``. The convolution also separates the
            sequences, and returns zeros for tokens with negative numbers.
        dt_limit: as in ``mamba_chunk_scan_combined``.
        return_final_states: as in ``mamba_chunk_scan_combined``.
        activation: the activation of the convolution: ``silu``, ``swish`` or None.
        rmsnorm_weight: [H P], or None for y = scan * silu(z). With it, each of G slices is normalized
            separately: norm(scan) * silu(z) with norm_before_gate, else norm(scan * silu(z)).
        rmsnorm_eps: added to the mean of the squares.
        outproj_weight: [out, M + H P], or None for no output projection. outproj_weight and outproj_bias must
            have the dtype of zxbcdt. Under autocast they may have any dtype: the product runs in the autocast
            dtype, as in ``torch.nn.Linear``, and nothing else changes.
        outproj_bias: [out] or None.
        headdim: P, required if D is [H].
        ngroups: G.
        norm_before_gate: apply the norm before the gate; see rmsnorm_weight.

    Returns:
        [b, T, M + H P], or [b, T, out] with outproj_weight. With return_final_states also the final states
        [b, H, P, N] in float32 (float64 for float64 tensors). If zxbcdt has 2 M columns of an MLP, M columns
        come before those of the scan: silu(first M columns of zxbcdt) * its next M columns.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    The differences from mamba_ssm are the same as in ``mamba_chunk_scan_combined``. Also, any number of
    channels works, and kernels run for W up to 16.
    """
    y, final = _mixed(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size=chunk_size,
                      initial_states=initial_states, seq_idx=seq_idx, dt_limit=dt_limit,
                      return_final_states=return_final_states, activation=activation,
                      rmsnorm_weight=rmsnorm_weight, rmsnorm_eps=rmsnorm_eps, headdim=headdim,
                      ngroups=ngroups, norm_before_gate=norm_before_gate)
    if outproj_weight is not None:
        need_tensor("outproj_weight", outproj_weight, (None, y.shape[2]), "[out, M + H P]", y.device,
                    "zxbcdt")
        check_optional("zxbcdt", y, [("outproj_bias", outproj_bias, outproj_weight.shape[:1], "[out]")])
        check_linear("zxbcdt", y, outproj_weight=outproj_weight, outproj_bias=outproj_bias)
        y = linear(y, outproj_weight, outproj_bias, linear_dtype(y))
    elif outproj_bias is not None:
        raise ValueError("outproj_bias: got a tensor without outproj_weight, need both")
    return y if final is None else (y, final)


@without_autocast
def _mixed(zxbcdt: Tensor, conv1d_weight: Tensor, conv1d_bias: Tensor | None, dt_bias: Tensor, A: Tensor,
           D: Tensor, chunk_size: int, initial_states: Tensor | None, seq_idx: Tensor | None,
           dt_limit: Sequence[float], return_final_states: bool, activation: str | None,
           rmsnorm_weight: Tensor | None, rmsnorm_eps: float, headdim: int | None, ngroups: int,
           norm_before_gate: bool) -> tuple[Tensor, Tensor | None]:
    """Return the input of the output projection, [b, T, M + H P], and the final states or None."""
    op = "mamba_split_conv1d_scan_combined"
    scalars.flags(return_final_states=return_final_states, norm_before_gate=norm_before_gate)
    rmsnorm_eps = scalars.number("rmsnorm_eps", rmsnorm_eps, 0.0, need="a number of at least 0")
    H, P, N, M = _layout(zxbcdt, conv1d_weight, D, headdim, ngroups)
    dim = H * P
    mlp, z, xBC, dt = zxbcdt.split([2 * M, dim, dim + 2 * ngroups * N, H], -1)
    check_filters(zxbcdt, xBC.shape[2], conv1d_weight, conv1d_bias,
                  ("conv1d_weight", "conv1d_bias", "zxbcdt"))
    silu = is_silu(activation)
    if seq_idx is not None:
        check_seq_idx(seq_idx, zxbcdt.shape[0], zxbcdt.shape[1], zxbcdt)
    xBC = convolved(xBC, conv1d_weight, conv1d_bias, seq_idx, silu)
    x, B, C = xBC.split([dim, ngroups * N, ngroups * N], -1)
    x, z = x.unflatten(-1, (H, P)), z.unflatten(-1, (H, P))
    B, C = B.unflatten(-1, (ngroups, N)), C.unflatten(-1, (ngroups, N))
    given = Scan(x, dt, A, B, C, D, z, dt_bias, initial_states=initial_states, seq_idx=seq_idx)
    limits = _check(given, dt_limit, chunk_size)
    if rmsnorm_weight is None:
        y, final = _scan(op, given, limits, True, return_final_states)
        y = y.flatten(2)
    else:
        need_tensor("rmsnorm_weight", rmsnorm_weight, (dim,), "[H P]", x.device, "zxbcdt")
        # The norm reads the result of the scan in float32, which saves one rounding. In rows with small
        # values the norm would enlarge that rounding error in the gradients.
        y, final = _scan(op, given._replace(z=None), limits, True, return_final_states, rounded=False)
        y = mamba_norm("rmsnorm_fn", RMS, y.flatten(2), weight=rmsnorm_weight, bias=None, z=z.flatten(2),
                       eps=rmsnorm_eps, group_size=dim // ngroups, norm_before_gate=norm_before_gate,
                       dtype=x.dtype)
    if M:
        gate, value = (half if half.dtype == torch.float64 else half.float() for half in mlp.chunk(2, -1))
        y = torch.cat([(F.silu(gate) * value).to(y.dtype), y], -1)
    return y, final


class Scan(NamedTuple):
    """The tensor arguments of one scan, with names and shapes as in ``mamba_chunk_scan_combined``."""
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    initial_states: Tensor | None
    seq_idx: Tensor | None


def _check(given: Scan, limit: Any, chunk_size: int) -> tuple[float, float]:
    """Check the arguments of a scan and return dt_limit as (lowest, highest)."""
    x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx = given
    check_rows("x", x, "[b, T, H, P]", 4)
    b, T, H, P = x.shape
    need_tensor("B", B, (b, T, None, None), "[b, T, G, N]", x.device, "x")
    G, N = B.shape[2:]
    if N == 0 or not shareable(H, G):
        raise ValueError(f"B: got shape {shown(B.shape)}, need [b, T, G, N] with G a divisor of the {H} "
                         "heads of x and N of at least 1")
    for name, tensor, shape, meaning in (("dt", dt, (b, T, H), "[b, T, H]"), ("A", A, (H,), "[H]"),
                                         ("C", C, B.shape, "B's shape")):
        need_tensor(name, tensor, shape, meaning, x.device, "x")
    check_optional("x", x, (
        ("D", D, (H, P) if isinstance(D, Tensor) and D.ndim == 2 else (H,), "[H, P] or [H]"),
        ("z", z, (b, T, H, P), "x's shape"), ("dt_bias", dt_bias, (H,), "[H]"),
        ("initial_states", initial_states, (b, H, P, N), "[b, H, P, N]")))
    if seq_idx is not None:
        check_seq_idx(seq_idx, b, T, x)
    scalars.integer("chunk_size", chunk_size, 1, "an integer of at least 1")
    if not isinstance(limit, Sequence) or isinstance(limit, str) or len(limit) != 2:
        raise ValueError(f"dt_limit: got {type(limit).__name__}, need (lowest, highest)")
    lowest, highest = (scalars.number("dt_limit", limit[at], -math.inf, math.inf, "(lowest, highest)")
                       for at in (0, 1))
    if lowest > highest:
        raise ValueError(f"dt_limit: got {limit}, need (lowest, highest)")
    return lowest, highest


def _scan(op: str, given: Scan, limits: tuple[float, float], softplus: bool, has_ht: bool,
          bounds: Tensor | None = None, rounded: bool = True, cp_context: Any = None,
          process_group: Any = None) -> tuple[Tensor, Tensor | None]:
    """Run the scan on checked arguments and return y and the states, or None without has_ht.

    limits: the limits of the step.
    softplus: apply softplus to the step.
    has_ht: return the states after each row, or with bounds after each sequence.
    bounds: the checked cu_seqlens. initial_states then has one state for each sequence.
    rounded: return y in the dtype of x, else in the dtype of the arithmetic.
    cp_context, process_group: the ranks that share the sequences (ops/_common/ranks.py).
    """
    x, dt, A, B, C, D, z, dt_bias, h0, seq_idx = given
    compute, dtype = widest(*given), common_dtype(x, B, C)
    step = dt.to(compute)
    step = step if dt_bias is None else step + dt_bias.to(compute)
    step = F.softplus(step) if softplus else step
    lowest, highest = limits
    if highest != math.inf or not (softplus and lowest <= 0):
        step = step.clamp(lowest, highest)
    decay = step * A.to(compute)
    out_dtype = x.dtype if rounded else compute
    marks = anew = None
    if seq_idx is not None and x.shape[1] > 1:
        anew = begins(seq_idx, False)
        B, C, decay, h0, marks = _contained(B, C, decay, h0, bounds)
        decay = torch.where(anew[..., None], -math.inf, decay)
    v, marks = scaled(op, x, step, dtype, marks)
    plain = D is None and z is None and marks is None
    request = Request(op, 1.0, h0, has_ht, bounds, state_v_first=True, cp_context=cp_context,
                      process_group=process_group)
    y, ht = run_chunked(simple_gla.FAMILY, request, (C, B, v, decay, None),
                        out_dtype=out_dtype if plain else compute, grouped=True)
    if marks is not None and anew is not None:
        marks, ht = _released(marks, anew, ht, bounds)
    return y if plain else skipped(op, y, x, D, z, out_dtype, marks), ht


def _contained(B: Tensor, C: Tensor, decay: Tensor, h0: Tensor | None,
               bounds: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Replace values that are not finite, so that sequences of seq_idx that share a scan stay independent.

    Return B, C, the decays, the initial states, and marks [b, T] of the replaced values
    (kernels/pointwise/nonfinite.py). With bounds, only the initial state of the first sequence has an effect.
    A sequence without tokens keeps its own initial state.
    """
    (decay, B, C), marks = contained((decay, B, C), endless=True)
    if h0 is not None:
        (state,), of_h0 = contained((h0,), 1)
        if bounds is not None:
            state, of_h0 = torch.where(bounds[1] > 0, state, h0), torch.where(bounds[1] > 0, of_h0[:1], 0)
        h0, marks = state, marks + F.pad(of_h0[:, None], (0, marks.shape[1] - 1))
    return B, C, decay, h0, marks


def _released(marks: Tensor, anew: Tensor, ht: Tensor | None,
              bounds: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the marks of y [b, T], and the final states with the marks of their sequences added.

    marks: 0 or NaN for each input token. After a NaN, all later results of the sequence are NaN.
    anew: True for tokens that begin a new sequence of seq_idx.
    """
    if bounds is not None:
        anew = F.pad(anew, (0, 1)).index_fill(1, bounds.long(), True)[:, :-1]
    up_to = spread(marks, anew)
    if ht is None:
        return up_to, None
    if bounds is None:
        return up_to, released(ht, up_to[:, -1])
    last = up_to[0, (bounds[1:] - 1).clamp(min=0)]
    return up_to, torch.where((bounds.diff() == 0)[:, None, None, None], ht, released(ht, last))


def _layout(zxbcdt: Any, weight: Any, D: Any, headdim: int | None, ngroups: int) -> tuple[int, int, int, int]:
    """Check the shapes of the layer's tensors and return H, P, N and M."""
    check_rows("zxbcdt", zxbcdt, "[b, T, 2 M + 2 H P + 2 G N + H]", 3)
    check_floats("D", D, "[H, P] or [H]")
    if D.ndim not in (1, 2):
        raise ValueError(f"D: got shape {shown(D.shape)}, need [H, P] or [H]")
    if D.ndim == 1 and headdim is None:
        raise ValueError("headdim: got None with D of shape [H], need P")
    H, P = D.shape[0], D.shape[1] if D.ndim == 2 else scalars.integer("headdim", headdim, 1,
                                                                      "P, an integer of at least 1")
    ngroups = scalars.integer("ngroups", ngroups, 1, f"a divisor of the {H} heads of D")
    if H < 1 or P < 1 or H % ngroups:
        raise ValueError(f"ngroups: got {ngroups}, need a divisor of the {H} heads of D, of P = {P} each")
    need_tensor("conv1d_weight", weight, (None, None), "[H P + 2 G N, W]", zxbcdt.device, "zxbcdt")
    N, rest = _divided(weight.shape[0] - H * P, 2 * ngroups)
    if N < 1 or rest:
        raise ValueError(f"conv1d_weight: got {weight.shape[0]} channels, need H P + 2 G N = {H * P} + "
                         f"{2 * ngroups} N")
    M, rest = _divided(zxbcdt.shape[2] - 2 * H * P - 2 * ngroups * N - H, 2)
    if M < 0 or rest:
        raise ValueError(f"zxbcdt: got {zxbcdt.shape[2]} columns, need 2 H P + 2 G N + H = "
                         f"{2 * H * P + 2 * ngroups * N + H}, plus 2 M columns of an MLP")
    return H, P, N, M


def _divided(size: int, by: int) -> tuple[int, int]:
    """Return quotient and remainder; torch.compile does not support divmod of symbolic sizes."""
    return size // by, size % by
