"""A Mamba layer from the output of its input projection to its own output; mirrors mamba_ssm.

The mirrored module is ``mamba_ssm.ops.selective_scan_interface``. The layer is composed of other ops. P,
X_dt, X_B and X_C are projections, O is the output projection, and y is the scan of ``selective_scan_fn``:

    u = silu(conv(x))        dt, B, C = norm(P X_dt u), norm(X_B u), norm(X_C u)
    out = O y(u, dt, A, B, C, D, z)

Source: Gu and Dao 2023 (arXiv 2312.00752); Zuo et al. 2024 (Falcon Mamba) for the norms of dt, B and C.
"""
from __future__ import annotations

from typing import cast

from torch import Tensor

from flashlin.guards import scalars
from flashlin.guards.tensors import need_tensor, shown
from flashlin.ops._common.arguments import check_linear, check_optional, check_rows, linear
from flashlin.ops._common.casting import linear_dtype
from flashlin.ops._common.entry import linear_entry
from flashlin.ops.causal_conv1d import convolved
from flashlin.ops.conv import check_filters
from flashlin.ops.norm import rms_norm
from flashlin.ops.selective_scan import selective_scan_fn, with_groups


@linear_entry
def mamba_inner_fn(xz: Tensor, conv1d_weight: Tensor, conv1d_bias: Tensor | None, x_proj_weight: Tensor,
                   delta_proj_weight: Tensor, out_proj_weight: Tensor, out_proj_bias: Tensor | None,
                   A: Tensor, B: Tensor | None = None, C: Tensor | None = None, D: Tensor | None = None,
                   delta_bias: Tensor | None = None, B_proj_bias: Tensor | None = None,
                   C_proj_bias: Tensor | None = None, delta_softplus: bool = True, checkpoint_lvl: int = 1,
                   b_rms_weight: Tensor | None = None, c_rms_weight: Tensor | None = None,
                   dt_rms_weight: Tensor | None = None, b_c_dt_rms_eps: float = 1e-6) -> Tensor:
    """Compute a Mamba layer after its input projection: convolution, selective scan and output projection.

    Drop-in for ``mamba_ssm.ops.selective_scan_interface.mamba_inner_fn``. Composed: it
    calls ``causal_conv1d_fn``, ``selective_scan_fn`` and matrix products of torch. P, X_dt, X_B and X_C are
    projections, O is the output projection, y is the scan, and norm applies only if its weight is passed:

        u = silu(conv(x))        dt, B, C = norm(P X_dt u), norm(X_B u), norm(X_C u)
        out = O y(u, dt, A, B, C, D, z)

    Args:
        xz: [b, 2 D, T], bfloat16, float16 or float32 (float64 runs in plain torch), any strides: the result
            of the input projection, x and then the gate z.
        conv1d_weight: [D, 1, W].
        conv1d_bias: [D] or None.
        x_proj_weight: [R + 2 N, D]: R rows for dt, then N for B and N for C. The rows for B or C may be
            omitted if that tensor is passed.
        delta_proj_weight: [D, R], the projection of dt from R columns to D channels.
        out_proj_weight: [out, D]. x_proj_weight, delta_proj_weight and out_proj_weight must have the dtype of
            xz. Under autocast they may have any dtype: the three products run in the autocast dtype, as in
            ``torch.nn.Linear``, and nothing else changes.
        out_proj_bias: [out] or None.
        A: [D, N], real.
        B: None if B depends on the input. Else [b, N, T], [b, G, N, T], or [D, N] for a B that is the same
            for all tokens, as in ``selective_scan_fn``.
        C: like B. To use G > 1 groups, pass both B and C with the same G.
        D: [D] or None.
        delta_bias: [D] or None, added to dt.
        B_proj_bias: [N] or None, added to the projected B; no effect if B is passed.
        C_proj_bias: [N] or None, added to the projected C; no effect if C is passed.
        delta_softplus: the step is softplus(dt + delta_bias).
        checkpoint_lvl: 0 or 1, accepted for compatibility. In mamba_ssm it selects the tensors that backward
            computes again.
        b_rms_weight: [N] or None: the weight of an RMS norm of B, after its projection and bias.
        c_rms_weight: [N] or None: the weight of an RMS norm of C, after its projection and bias.
        dt_rms_weight: [D] or None: the weight of an RMS norm of dt, after its projection and before
            delta_bias.
        b_c_dt_rms_eps: added to the mean of the squares in these norms.

    Returns:
        [b, T, out] in the dtype of the products. Gradients reach every tensor.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    Differences from mamba_ssm: the weights of the norms get gradients, which are missing there. out_proj_bias
    gets a gradient, which is an error there. Complex A is an error. All other differences are the same as in
    ``causal_conv1d_fn`` and ``selective_scan_fn``.
    """
    scalars.flags(delta_softplus=delta_softplus)
    scalars.choice("checkpoint_lvl", checkpoint_lvl, (0, 1))
    eps = scalars.number("b_c_dt_rms_eps", b_c_dt_rms_eps, 0.0, need="a number of at least 0")
    check_rows("xz", xz, "[b, 2 D, T]", 3, columns=0)
    channels = xz.shape[1] // 2
    if xz.shape[1] % 2 or not channels:
        raise ValueError(f"xz: got shape {shown(xz.shape)}, need [b, 2 D, T] with D of at least 1")
    need_tensor("A", A, (channels, None), "[D, N]", xz.device, "xz")
    need_tensor("delta_proj_weight", delta_proj_weight, (channels, None), "[D, R]", xz.device, "xz")
    need_tensor("conv1d_weight", conv1d_weight, (channels, 1, None), "[D, 1, W]", xz.device, "xz")
    N, R = A.shape[1], delta_proj_weight.shape[1]
    need_tensor("x_proj_weight", x_proj_weight, (None, channels), "[R + 2 N, D]", xz.device, "xz")
    columns, wanted = x_proj_weight.shape[0], R + N * ((B is None) + (C is None))
    if columns < wanted or (columns > wanted and B is None and C is None):
        raise ValueError(f"x_proj_weight: got {columns} rows, need {wanted}: R = {R} of delta_proj_weight, "
                         f"and N = {N} of A for B and for C where they are None")
    need_tensor("out_proj_weight", out_proj_weight, (None, channels), "[out, D]", xz.device, "xz")
    weight = conv1d_weight.squeeze(1)
    check_filters(xz, channels, weight, conv1d_bias, ("conv1d_weight", "conv1d_bias", "xz"))
    check_optional("xz", xz, (
        ("out_proj_bias", out_proj_bias, out_proj_weight.shape[:1], "[out]"),
        ("B_proj_bias", B_proj_bias, (N,), "[N]"), ("C_proj_bias", C_proj_bias, (N,), "[N]"),
        ("b_rms_weight", b_rms_weight, (N,), "[N]"), ("c_rms_weight", c_rms_weight, (N,), "[N]"),
        ("dt_rms_weight", dt_rms_weight, (channels,), "[D]")))
    B, C = (None if x is None else with_groups(name, x, xz.shape[0], channels, N, xz.shape[2], xz, "xz")
            for name, x in (("B", B), ("C", C)))
    check_linear("xz", xz, x_proj_weight=x_proj_weight, delta_proj_weight=delta_proj_weight,
                 out_proj_weight=out_proj_weight)
    dtype = linear_dtype(xz)
    x, z = xz.chunk(2, 1)
    u = convolved(x.transpose(1, 2), weight, conv1d_bias, None, True)
    projected = linear(u, x_proj_weight, None, dtype)
    dt = _normed(linear(projected[..., :R], delta_proj_weight, None, dtype), dt_rms_weight, eps)
    B = _states(B, projected[..., R:R + N], B_proj_bias, b_rms_weight, eps)
    C = _states(C, projected[..., columns - N:], C_proj_bias, c_rms_weight, eps)
    y = cast(Tensor, selective_scan_fn(u.transpose(1, 2), dt.transpose(1, 2), A, B, C, D, z, delta_bias,
                                       delta_softplus)).transpose(1, 2)
    return linear(y, out_proj_weight, out_proj_bias, dtype)


def _states(given: Tensor | None, projected: Tensor, bias: Tensor | None, weight: Tensor | None,
            eps: float) -> Tensor:
    """Return B or C in the layout of the scan, normalized over its N states if weight is not None.

    given: the tensor that the caller passed, or None.
    projected: [b, T, N], used if given is None.
    """
    if given is None:
        projected = projected if bias is None else projected + bias.to(projected.dtype)
        return _normed(projected, weight, eps).transpose(1, 2)
    if weight is None or given.ndim == 2:
        return _normed(given, weight, eps)
    return _normed(given.transpose(-1, -2), weight, eps).transpose(-1, -2)


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else cast(Tensor, rms_norm(x, weight, None, eps=eps))
