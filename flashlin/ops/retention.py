"""Retention: simple GLA with one fixed decay per head; mirrors ``fla.ops.retention``.

The natural-log decay of head h is

    gamma_h = log(1 - 2^(-5 - h))

Source: Sun et al. 2023 (RetNet).
"""
from __future__ import annotations

from typing import Any

from torch import Tensor

from flashlin.ops._common.chunked import Request
from flashlin.ops._common.entry import entry
from flashlin.ops._common.slopes import retention_slopes, slopes_dtype
from flashlin.ops.simple_gla import run_parallel, run_simple_gla, v_first


@entry
def chunk_retention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None,
                    initial_state: Tensor | None = None, output_final_state: bool = False,
                    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
                    chunk_size: int = 64, *, cp_context: Any = None, process_group: Any = None,
                    **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute retention chunk by chunk.

    Drop-in for ``fla.ops.retention.chunk_retention``. Arguments are the same as in ``chunk_simple_gla``,
    without the gates.
    """
    request = Request("chunk_retention", scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu,
                      cp_context=cp_context, process_group=process_group)
    return run_simple_gla(request, q, k, v, g_gamma=_gamma(q, k, v), finite=True, chunk_size=chunk_size)


@entry
def fused_recurrent_retention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None,
                              initial_state: Tensor | None = None, output_final_state: bool = False,
                              reverse: bool = False, state_v_first: bool = False,
                              cu_seqlens: Tensor | None = None, transpose_state_layout: bool | None = None,
                              **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute retention token by token, for decoding and short inputs.

    Drop-in for ``fla.ops.retention.fused_recurrent_retention``. Arguments are the same as in
    ``fused_recurrent_simple_gla``, without the gates.
    """
    op = "fused_recurrent_retention"
    request = Request(op, scale, initial_state, output_final_state, cu_seqlens, mode="fused_recurrent",
                      state_v_first=v_first(op, state_v_first, transpose_state_layout), reverse=reverse)
    return run_simple_gla(request, q, k, v, g_gamma=_gamma(q, k, v), finite=True)


@entry
def fused_chunk_retention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None,
                          initial_state: Tensor | None = None, output_final_state: bool = False,
                          cu_seqlens: Tensor | None = None, chunk_size: int = 64,
                          **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute retention with the kernels of ``chunk_retention``, which are already fused.

    Drop-in for ``fla.ops.retention.fused_chunk_retention``. Arguments are the same as in ``chunk_retention``.
    """
    request = Request("fused_chunk_retention", scale, initial_state, output_final_state, cu_seqlens)
    return run_simple_gla(request, q, k, v, g_gamma=_gamma(q, k, v), finite=True, chunk_size=chunk_size)


@entry
def parallel_retention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None,
                       output_attentions: bool = False, cu_seqlens: Tensor | None = None,
                       **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute retention without initial or final states, and return the scores on request.

    Drop-in for ``fla.ops.retention.parallel_retention``. It returns o, and the scores [B, H, T, T] or None.
    Arguments and memory use are the same as in ``parallel_simple_gla``.
    """
    request = Request("parallel_retention", scale, None, False, cu_seqlens)
    return run_parallel(request, output_attentions, q, k, v, g_gamma=_gamma(q, k, v))


@entry
def retention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None,
              initial_state: Tensor | None = None, output_final_state: bool = False,
              state_v_first: bool = False, cu_seqlens: Tensor | None = None,
              cu_seqlens_cpu: Tensor | None = None, mode: str = "auto") -> tuple[Tensor, Tensor | None]:
    """Compute retention in the mode that suits the call.

    Arguments are the same as in ``simple_gla``, without the gates.
    """
    request = Request("retention", scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu,
                      state_v_first, mode)
    return run_simple_gla(request, q, k, v, g_gamma=_gamma(q, k, v), finite=True)


def _gamma(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    if not isinstance(q, Tensor) or q.ndim != 4:
        return None  # run_simple_gla raises the error about q
    return retention_slopes(q.shape[2], slopes_dtype(q, k, v), q.device)
