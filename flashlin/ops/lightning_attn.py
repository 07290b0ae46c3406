"""Lightning attention: simple GLA with a fixed decay per head and layer; mirrors ``fla.ops.lightning_attn``.

The natural-log decay of head h of H, in layer layer_idx of num_layers, is

    gamma_h = -(8 / H) (1 - layer_idx / num_layers) h

Source: Qin et al. 2024.
"""
from __future__ import annotations

from typing import Any

from torch import Tensor

from flashlin.guards import scalars
from flashlin.ops._common.chunked import Request
from flashlin.ops._common.entry import entry
from flashlin.ops._common.slopes import lightning_slopes, slopes_dtype
from flashlin.ops.simple_gla import run_simple_gla


@entry
def chunk_lightning_attn(
    q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, chunk_size: int = 64, *, cp_context: Any = None,
    process_group: Any = None, **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute lightning attention chunk by chunk.

    Drop-in for ``fla.ops.lightning_attn.chunk_lightning_attn``. The decay of each head follows from layer_idx
    (0 to num_layers) and num_layers. All other arguments are the same as in ``chunk_simple_gla``.
    """
    request = Request("chunk_lightning_attn", scale, initial_state, output_final_state, cu_seqlens,
                      cu_seqlens_cpu, cp_context=cp_context, process_group=process_group)
    return run_simple_gla(request, q, k, v, g_gamma=_gamma(q, k, v, layer_idx, num_layers), finite=True,
                          chunk_size=chunk_size)


@entry
def fused_recurrent_lightning_attn(
    q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False,
    cu_seqlens: Tensor | None = None, **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute lightning attention token by token, for decoding and short inputs.

    Drop-in for ``fla.ops.lightning_attn.fused_recurrent_lightning_attn``. reverse: run each sequence from its
    last token to its first. All other arguments are the same as in ``chunk_lightning_attn``.
    """
    request = Request("fused_recurrent_lightning_attn", scale, initial_state, output_final_state, cu_seqlens,
                      mode="fused_recurrent", reverse=reverse)
    return run_simple_gla(request, q, k, v, g_gamma=_gamma(q, k, v, layer_idx, num_layers), finite=True)


def _gamma(q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int) -> Tensor | None:
    layer_idx, num_layers = scalars.integer("layer_idx", layer_idx), scalars.integer("num_layers", num_layers)
    if num_layers < 1 or not 0 <= layer_idx <= num_layers:
        raise ValueError(f"layer_idx, num_layers: got {layer_idx}, {num_layers}, need 0 <= layer_idx <= "
                         "num_layers and num_layers >= 1")
    if not isinstance(q, Tensor) or q.ndim != 4:
        return None  # run_simple_gla raises the error about q
    return lightning_slopes(q.shape[2], layer_idx, num_layers, slopes_dtype(q, k, v), q.device)
