"""The elementwise steps of an RWKV-7 block; mirrors ``fla.ops.rwkv7`` (fused_addcmul, fused_k_update,
gate_output_correction).

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
    """hidden_states + delta * x, for each x. Drop-in for ``fla.ops.rwkv7.fused_addcmul_rwkv7``.

    Args:
        hidden_states, delta: [B, T, D], bfloat16, float16 or float32 (float64 runs in plain torch), any
            strides; delta may be of another dtype.
        xr, xw, xk, xv, xa, xg: D elements each, as [D] or [1, 1, D], of any float dtype; xg may be None.

    Returns:
        Six tensors [B, T, D] in hidden_states' dtype, the last None without xg. Sums and products are in
        float32, and so are the gradients of all arguments until they are rounded to the argument's dtype;
        they repeat to the bit.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. UnsupportedError: this machine cannot
            run the call.

    Differs from fla: no argument is ever written to, where fla's backward writes the gradient of
    hidden_states over hidden_states; and fp16 tensors are computed with in float32, too.
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
    """k (1 + (a - 1) ka), the key after the in-context learning rate. Drop-in for
    ``fla.ops.rwkv7.fused_k_rwkv7``.

    k, a: [B, T, D]. ka: D elements. cu_seqlens, cu_seqlens_cpu: accepted for compatibility; tokens do not see
    each other here, so they change nothing. Returns [B, T, D] in k's dtype. The rest as
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
    """(o + v * (r * k * r_k).sum(-1)) * g, head by head: the current token's bonus and the output gate.
    Drop-in for ``fla.ops.rwkv7.gate_output_correction``.

    o, g: [B, T, H * D]. r, k, v: [B, T, H, D]. r_k: [H, D]. Returns [B, T, H * D] in o's dtype. The rest as
    ``fused_addcmul_rwkv7``.
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
