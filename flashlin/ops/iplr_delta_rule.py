"""The generalised delta rule with an identity-plus-low-rank transition (IPLR).

It mirrors ``fla.ops.generalized_delta_rule.iplr``. The recurrence is

    S_t = S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T        o_t = scale S_t^T q_t

The delta rule is the case a = -k and b = beta k, with beta v in place of v. Source: Yang et al. 2024 (arXiv
2406.06484).
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashlin.guards import scalars
from flashlin.guards.tensors import check_qkv
from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.ops._common.chunked import CHUNK_SIZES, Request, run_chunked
from flashlin.ops._common.entry import entry
from flashlin.ops._common.recurrent import run_recurrent
from flashlin.ops.dplr_delta_rule import FAMILY, NOT_KDA

CALLED = {"a": "a", "b": "b"}


@entry
def chunk_iplr_delta_rule(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, scale: float | None = None,
                          initial_state: Tensor | None = None, output_final_state: bool = False,
                          cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, *,
                          chunk_size: int | None = None, cp_context: Any = None, process_group: Any = None,
                          **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute the IPLR delta rule chunk by chunk.

    Drop-in for ``fla.ops.generalized_delta_rule.chunk_iplr_delta_rule``. It is ``chunk_dplr_delta_rule``
    without decays, and has the same arguments, results and errors. scale may
    also be 0 or negative.

    These cases work here and fail in fla: the backward (fla raises an error), any K, checked shapes and
    cu_seqlens, and CPU tensors.
    """
    check_qkv(q, k, v)
    scalars.choice("chunk_size", chunk_size, (None, *CHUNK_SIZES))
    g = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    request = Request("chunk_iplr_delta_rule", scale, initial_state, output_final_state, cu_seqlens,
                      cu_seqlens_cpu, cp_context=cp_context, process_group=process_group)
    return run_chunked(FAMILY, request, (q, k, v, g, a, b, *NOT_KDA), called=CALLED)


@entry
def fused_recurrent_iplr_delta_rule(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
                                    scale: float | None = None, initial_state: Tensor | None = None,
                                    output_final_state: bool = False, cu_seqlens: Tensor | None = None,
                                    **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute the IPLR delta rule token by token, for decoding and short inputs.

    Drop-in for ``fla.ops.generalized_delta_rule.fused_recurrent_iplr_delta_rule``. Arguments, results and
    errors are the same as in ``fused_recurrent_dplr_delta_rule``, without the decays and ``reverse``. scale
    may also be 0 or negative; fla requires a positive one.

    Differences from fla: a strided initial_state keeps its gradient. The gradients of strips (ranges of state
    columns) are added up in float32. Shapes and cu_seqlens are checked, and CPU tensors work.
    """
    op = "fused_recurrent_iplr_delta_rule"
    return run_recurrent(op, Inputs(q, k, v, a=a, b=b, h0=initial_state, bounds=cu_seqlens), (), scale,
                         output_final_state, called=CALLED)
