"""The decay gates of Gated DeltaNet and Kimi Delta Attention (KDA) as separate ops.

They mirror ``fla.ops.gated_delta_rule.gate`` and ``fla.ops.kda.gate``. The log decay is one of

    -e^{A_log} softplus(g + dt_bias)        lower_bound sigmoid(e^{A_log} (g + dt_bias))

The delta-rule ops compute the same formulas with ``use_gate_in_kernel``. Source: Gu and Dao 2023 (Mamba),
Yang et al. 2024 (Gated DeltaNet), Kimi Team 2025 (KDA).
"""
from __future__ import annotations

import math

import torch
from torch import Tensor

from flashlin.guards import scalars
from flashlin.guards.tensors import check_dtype
from flashlin.ops._common.arguments import check_parameter, check_rows
from flashlin.ops._common.entry import entry
from flashlin.ops._common.pointwise import run_pointwise


@entry
def fused_gdn_gate(g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None,
                   output_dtype: torch.dtype = torch.float32) -> Tensor:
    """Compute the log decay -exp(A_log) softplus(g + dt_bias).

    Drop-in for ``fla.ops.gated_delta_rule.gate.fused_gdn_gate``.

    Args:
        g: [..., HV], bfloat16, float16 or float32 (float64 runs in plain torch), any strides, any number of
            rows.
        A_log: HV elements in any shape, any float dtype.
        dt_bias: HV elements in any shape, any float dtype, or None.
        output_dtype: the dtype of the result. Arithmetic is in float32 (float64 for float64 tensors).

    Returns:
        [..., HV] in output_dtype. g, A_log and dt_bias get gradients in their own dtypes. Repeated runs give
        bitwise identical gradients.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    Difference from fla: softplus keeps its relative accuracy far below zero. In fla it is 0 below about -17.
    """
    check_rows("g", g, "[..., HV]")
    check_dtype("output_dtype", output_dtype)
    HV = g.shape[-1]
    A_log = parameter("A_log", A_log, (HV,), "HV", g)
    dt_bias = None if dt_bias is None else parameter("dt_bias", dt_bias, (HV,), "HV", g)
    y, = run_pointwise("fused_gdn_gate", HV, 1, output_dtype, g, A_log, dt_bias)
    return y


@entry
def fused_kda_gate(g: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
                   lower_bound: float | None = None, output_dtype: torch.dtype = torch.float32) -> Tensor:
    """Compute the log decay -exp(A_log) softplus(g + dt_bias) of each key channel.

    Drop-in for ``fla.ops.kda.gate.fused_kda_gate``.
    g: [..., H, K].
    A_log: H elements; None means a factor of 1.
    dt_bias: H * K elements, or None.
    lower_bound: a number below 0, or None. With a number the result is
    lower_bound sigmoid(exp(A_log) (g + dt_bias)).

    All other arguments, the result and the errors are the same as in ``fused_gdn_gate``.
    """
    check_rows("g", g, "[..., H, K]", columns=2)
    check_dtype("output_dtype", output_dtype)
    H, K = g.shape[-2:]
    A_log = None if A_log is None else parameter("A_log", A_log, (H, 1), "H", g)
    dt_bias = None if dt_bias is None else parameter("dt_bias", dt_bias, (H, K), "H * K", g)
    bound = checked_bound(lower_bound)
    y, = run_pointwise("fused_kda_gate", H, K, output_dtype, g, A_log, dt_bias, bound=bound)
    return y


def checked_bound(lower_bound: float | None) -> float | None:
    """Return a gate's lower bound, checked to be below 0, or None."""
    return None if lower_bound is None else scalars.number(
        "lower_bound", lower_bound, high=-scalars.ABOVE_ZERO, need="a number below 0, or None")


def parameter(name: str, x: Tensor, shape: tuple[int, ...], meaning: str, g: Tensor) -> Tensor:
    """Return a gate parameter x reshaped to ``shape``; raise an error unless it fits.

    name, meaning: the argument's name and its required number of elements, for the message. g: the input of
    the gate; x must be on its device.
    """
    check_parameter(name, x, math.prod(shape), meaning, "g", g)
    return x.reshape(shape)
