"""Retention: simple GLA with one fixed decay per head; mirrors ``fla.ops.retention``. Source: Sun et al. 2023
(RetNet).

Head h forgets with gamma_h = log(1 - 2^(-5 - h)), natural log.
"""
from __future__ import annotations

from typing import Any

from torch import Tensor

from flashlin.ops._common.chunked import Request
from flashlin.ops._common.entry import entry
from flashlin.ops._common.slopes import retention_slopes, slopes_dtype
from flashlin.ops.simple_gla import run_parallel, run_simple_gla, v_first


@entry
def chunk_retention(
    q: Tensor, k: Tensor, v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int = 64,
    *,
    cp_context: Any = None, process_group: Any = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """Retention, chunk by chunk. Drop-in for ``fla.ops.retention.chunk_retention``; arguments as
    ``chunk_simple_gla``, without gates."""
    request = Request("chunk_retention", scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu,
                      cp_context=cp_context, process_group=process_group)
    return run_simple_gla(request, q, k, v, g_gamma=_gamma(q, k, v), finite=True, chunk_size=chunk_size)


@entry
def fused_recurrent_retention(
    q: Tensor, k: Tensor, v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    transpose_state_layout: bool | None = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """Retention, token by token. Drop-in for ``fla.ops.retention.fused_recurrent_retention``; arguments as
    ``fused_recurrent_simple_gla``."""
    op = "fused_recurrent_retention"
    request = Request(op, scale, initial_state, output_final_state, cu_seqlens, mode="fused_recurrent",
                      state_v_first=v_first(op, state_v_first, transpose_state_layout),
                      reverse=reverse)
    return run_simple_gla(request, q, k, v, g_gamma=_gamma(q, k, v), finite=True)


@entry
def fused_chunk_retention(
    q: Tensor, k: Tensor, v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """Retention by the kernels of ``chunk_retention``, which are fused already. Drop-in for
    ``fla.ops.retention.fused_chunk_retention``; arguments as ``chunk_retention``."""
    request = Request("fused_chunk_retention", scale, initial_state, output_final_state, cu_seqlens)
    return run_simple_gla(request, q, k, v, g_gamma=_gamma(q, k, v), finite=True, chunk_size=chunk_size)


@entry
def parallel_retention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None,
                       output_attentions: bool = False, cu_seqlens: Tensor | None = None,
                       **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Retention without states. Drop-in for ``fla.ops.retention.parallel_retention``; arguments, returns (o,
    and the scores [B, H, T, T] or None) and the memory that scores take as ``parallel_simple_gla``."""
    request = Request("parallel_retention", scale, None, False, cu_seqlens)
    return run_parallel(request, output_attentions, q, k, v, g_gamma=_gamma(q, k, v))


@entry
def retention(
    q: Tensor, k: Tensor, v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    mode: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Retention in the mode that suits the call; see ``simple_gla``."""
    request = Request("retention", scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu,
                      state_v_first, mode)
    return run_simple_gla(request, q, k, v, g_gamma=_gamma(q, k, v), finite=True)


def _gamma(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    if not isinstance(q, Tensor) or q.ndim != 4:
        return None  # run raises the error about q
    return retention_slopes(q.shape[2], slopes_dtype(q, k, v), q.device)
