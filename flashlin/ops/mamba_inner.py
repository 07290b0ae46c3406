"""A Mamba layer between its input projection and its output, composed of its ops; mirrors
``mamba_ssm.ops.selective_scan_interface``.

    u = silu(conv(x))        dt, B, C = norm(P X_dt u), norm(X_B u), norm(X_C u)
    out = O y(u, dt, A, B, C, D, z), y as in ``selective_scan_fn``
Source: Gu and Dao 2023 (arXiv 2312.00752); the norms of dt, B and C: Zuo et al. 2024 (Falcon Mamba).
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
def mamba_inner_fn(
    xz: Tensor, conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor, delta_proj_weight: Tensor, out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None, C: Tensor | None = None, D: Tensor | None = None,
    delta_bias: Tensor | None = None, B_proj_bias: Tensor | None = None, C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None, c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Tensor:
    """Convolution with silu, projections to dt, B and C, selective scan with its gate, output projection.
    Drop-in for ``mamba_ssm.ops.selective_scan_interface.mamba_inner_fn``. Composed: ``causal_conv1d_fn``,
    ``selective_scan_fn`` and products of torch.

    Args:
        xz: [b, 2 D, T], x and then the gate z, as the input projection gives them: bfloat16, float16 or
            float32 (float64 runs in plain torch), any strides.
        conv1d_weight: [D, 1, W]; conv1d_bias: [D] or None.
        x_proj_weight: [R + 2 N, D], to the R columns of dt, then N of B and N of C; what B or C replaces may
            be left out. delta_proj_weight: [D, R].
        out_proj_weight: [out, D]; out_proj_bias: [out] or None. These three weights have xz's dtype. Under
            autocast they may have any: the three products are computed in the autocast dtype, as those of
            ``torch.nn.Linear``, and nothing else is affected.
        A: [D, N], real. D, delta_bias: [D] or None. delta_softplus: the step is softplus(dt + delta_bias).
        B, C: None, where they depend on the input; or what ``selective_scan_fn`` takes: [b, N, T], [b, G, N,
            T] or, for all tokens, [D, N]. With G > 1 groups both are given, and have the same G.
        B_proj_bias, C_proj_bias: [N] or None, added to what is projected; without a meaning beside B or C.
        checkpoint_lvl: 0 or 1, what mamba_ssm computes anew in backward; accepted, and nothing is here.
        b_rms_weight, c_rms_weight: [N], dt_rms_weight: [D]: RMS norms with these weights of B, C and dt,
            after their projections and biases and before delta_bias. b_c_dt_rms_eps is added to the mean of
            the squares.

    Returns:
        [b, T, out] in the dtype of the products. Gradients reach every tensor.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. UnsupportedError: this machine cannot
            run the call.

    Differs from mamba_ssm: the weights of the norms have gradients, where there they are left out, and
    out_proj_bias has one, an error there; complex A is an error; and as ``causal_conv1d_fn`` and
    ``selective_scan_fn``.
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
    """B or C as the scan takes it, its norm over the N states. projected: [b, T, N], if it is not given."""
    if given is None:
        projected = projected if bias is None else projected + bias.to(projected.dtype)
        return _normed(projected, weight, eps).transpose(1, 2)
    if weight is None or given.ndim == 2:
        return _normed(given, weight, eps)
    return _normed(given.transpose(-1, -2), weight, eps).transpose(-1, -2)


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else cast(Tensor, rms_norm(x, weight, None, eps=eps))
