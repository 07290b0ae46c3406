"""What the chunked delta ops share. The public functions are in delta_rule.py and gated_delta_rule.py."""
from __future__ import annotations

import torch
from torch import Tensor

from flashlin.guards import scalars
from flashlin.guards.tensors import check_qkv
from flashlin.kernels.configs import BLOCK
from flashlin.kernels.delta import inputs, torch_path
from flashlin.ops._common import chunked
from flashlin.ops._common.chunked import QKV, Argument
from flashlin.ops.norm import l2norm

CHUNK_SIZES = (16, 32, 64)


def _room(needs_grad: bool, q: Tensor, k: Tensor, v: Tensor, beta: Tensor,
          g: Tensor | None) -> tuple[Tensor | None, ...]:
    """The inverses, what their rounding to 16 bits lost, and the lines of beta and summed g; see
    kernels/delta/forward.py."""
    B, T, HV = beta.shape
    A = q.new_empty(B, T, HV, BLOCK)
    return A, torch.empty_like(A) if needs_grad and q.dtype != torch.float32 else None, q.new_empty(2, HV,
                                                                                                    B * T,
                                                                                                    dtype=torch.float32)


FAMILY = chunked.family_of("delta", inputs.Inputs, {
    **QKV, "beta": Argument(("B", "T", "HV"), wide=True,
                            hint=" (a beta per value channel needs fused_recurrent)"),
    "g": Argument(("B", "T", "HV"), wide=True, optional=True)}, torch_path.run, ("A", "A_low", "lines"),
                           _room)


def chosen_mode(op: str, mode: str, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, needs_grad: bool) -> str:
    """As ``chunked.chosen_mode``; a beta per value channel runs token by token."""
    if mode == "auto":
        check_qkv(q, k, v, grouped=True)
        if isinstance(beta, Tensor) and beta.ndim == 4:
            return "fused_recurrent"
    return chunked.chosen_mode(FAMILY, op, mode, q, v, needs_grad, ("g",) if "gated" in op else ())


def run(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    scale: float | None,
    h0: Tensor | None,
    has_ht: bool,
    l2: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Both chunked ops. beta and g are what the recurrence uses, after any sigmoid or gate."""
    check_qkv(q, k, v, grouped=True)
    scalars.choice("chunk_size", chunk_size, CHUNK_SIZES)
    scalars.flags(use_qk_l2norm_in_kernel=l2)
    if l2:
        q, k = l2norm(q), l2norm(k)
    return chunked.run(FAMILY, op, (q, k, v, beta, g), scale, h0, has_ht, state_v_first, cu_seqlens,
                       cu_seqlens_cpu, grouped=True)
