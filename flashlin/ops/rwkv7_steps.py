"""The elementwise steps of an RWKV-7 block.

They mirror fused_addcmul, fused_k_update and gate_output_correction of ``fla.ops.rwkv7``:

    xr, xw, xk, xv, xa, xg = hidden + delta mu_r, ...        k (1 + (a - 1) ka)        (o + v sum(r k r_k)) g

Source: Peng et al. 2025 (RWKV-7).
"""
from __future__ import annotations

from torch import Tensor

from flashlin.guards.tensors import need_tensor
from flashlin.ops._common.arguments import check_parameter, check_rows
from flashlin.ops._common.entry import entry
from flashlin.ops._common.pointwise import run_pointwise

Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, "Tensor | None"]


@entry
def fused_addcmul_rwkv7(hidden_states: Tensor, delta: Tensor, xr: Tensor, xw: Tensor, xk: Tensor, xv: Tensor,
                        xa: Tensor, xg: Tensor | None = None) -> Six:
    """Compute hidden_states + delta * x for each of the vectors xr, xw, xk, xv, xa and xg.

    Drop-in for ``fla.ops.rwkv7.fused_addcmul_rwkv7``.

    Args:
        hidden_states: [B, T, D], bfloat16, float16 or float32 (float64 runs in plain torch), any strides.
        delta: [B, T, D], like hidden_states; its dtype may differ.
        xr: D elements, as [D] or [1, 1, D], any float dtype.
        xw: like xr.
        xk: like xr.
        xv: like xr.
        xa: like xr.
        xg: like xr, or None.

    Returns:
        Six tensors [B, T, D] in the dtype of hidden_states; the last is None without xg. Sums, products and
        gradients are computed in float32. Each gradient is then rounded to the dtype of its argument, and
        repeated runs give bitwise identical gradients.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    Differences from fla: the op never writes to its arguments, while the backward of fla overwrites
    hidden_states with its gradient. Arithmetic for fp16 tensors is also in float32.
    """
    check_rows("hidden_states", hidden_states, "[B, T, D]", 3)
    D = hidden_states.shape[2]
    need_tensor("delta", delta, hidden_states.shape, "hidden_states' shape", hidden_states.device,
                "hidden_states")
    for name, x in (("xr", xr), ("xw", xw), ("xk", xk), ("xv", xv), ("xa", xa), ("xg", xg)):
        if x is not None or name != "xg":
            check_parameter(name, x, D, "D", "hidden_states", hidden_states)
    r, w, k, v, a, *g = run_pointwise("fused_addcmul_rwkv7", 1, D, hidden_states.dtype, hidden_states, delta,
                            *(x.reshape(D) for x in (xr, xw, xk, xv, xa)),
                            None if xg is None else xg.reshape(D))
    return r, w, k, v, a, g[0] if g else None


@entry
def fused_k_rwkv7(k: Tensor, a: Tensor, ka: Tensor, cu_seqlens: Tensor | None = None,
                  cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """Scale the key by the in-context learning rate a: k (1 + (a - 1) ka).

    Drop-in for ``fla.ops.rwkv7.fused_k_rwkv7``. k and a are [B, T, D], and ka has D elements. cu_seqlens and
    cu_seqlens_cpu are accepted for compatibility; they have no effect, because each token is computed alone.
    The result is [B, T, D] in the dtype of k. Dtypes, gradients and errors are the same as in
    ``fused_addcmul_rwkv7``.
    """
    check_rows("k", k, "[B, T, D]", 3)
    D = k.shape[2]
    need_tensor("a", a, k.shape, "k's shape", k.device, "k")
    check_parameter("ka", ka, D, "D", "k", k)
    y, = run_pointwise("fused_k_rwkv7", 1, D, k.dtype, k, a, ka.reshape(D))
    return y


@entry
def gate_output_correction(o: Tensor, r: Tensor, k: Tensor, r_k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Add the bonus of the current token to o and apply the output gate g, for each head.

    Drop-in for ``fla.ops.rwkv7.gate_output_correction``. It computes

        (o + v * (r * k * r_k).sum(-1)) * g

    o and g are [B, T, H * D]; r, k and v are [B, T, H, D]; r_k is [H, D]. The result is [B, T, H * D] in the
    dtype of o. Dtypes, gradients and errors are the same as in ``fused_addcmul_rwkv7``.
    """
    check_rows("r", r, "[B, T, H, D]", 4, columns=2)
    B, T, H, D = r.shape
    for name, x in (("k", k), ("v", v)):
        need_tensor(name, x, (B, T, H, D), "r's shape", r.device, "r")
    for name, x in (("o", o), ("g", g)):
        need_tensor(name, x, (B, T, H * D), "[B, T, H * D]", r.device, "r")
    need_tensor("r_k", r_k, (H, D), "[H, D]", r.device, "r")
    rows = o.reshape(B, T, H, D), r, k, r_k, v, g.reshape(B, T, H, D)
    y, = run_pointwise("gate_output_correction", H, D, o.dtype, *rows)
    return y.reshape(o.shape)
