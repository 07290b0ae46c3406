"""What the chunked delta ops share. The public functions are in delta_rule.py, gated_delta_rule.py and
comba.py."""
from __future__ import annotations

import torch
from torch import Tensor

from flashlin.guards import scalars
from flashlin.guards.tensors import check_qkv
from flashlin.kernels.configs import BLOCK
from flashlin.kernels.delta import inputs, torch_path
from flashlin.ops._common.chunked import QKV, Argument, Chunked, Request, run_chunked
from flashlin.ops._common.context_parallel import run_over_ranks
from flashlin.ops._common.preprocess import exact
from flashlin.ops.norm import l2norm


def _room(needs_grad: bool, q: Tensor, k: Tensor, v: Tensor, beta: Tensor,
          g: Tensor | None, p: Tensor | None) -> tuple[Tensor | None, ...]:
    """The inverses, what their rounding to 16 bits lost, and the lines of beta and summed g; see
    kernels/delta/forward.py."""
    B, T, HV = beta.shape
    A = q.new_empty(B, T, HV, BLOCK)
    lost = torch.empty_like(A) if needs_grad and q.dtype != torch.float32 else None
    return A, lost, q.new_empty(2, HV, B * T, dtype=torch.float32)


FAMILY = Chunked("delta", inputs.Inputs, {
    **QKV, "beta": Argument(("B", "T", "HV"), wide=True,
                            hint=" (a beta per value channel needs fused_recurrent)"),
    "g": Argument(("B", "T", "HV"), wide=True, optional=True),
    "p": Argument(("B", "T", "H", "K"), optional=True)},
    torch_path.compute, kept=("A", "A_low", "lines"), room=_room, over_ranks=run_over_ranks)


def run_delta(request: Request, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None = None, *,
        l2: bool) -> tuple[Tensor, Tensor | None]:
    """The chunked ops in which k both reads and writes. beta and g are what the recurrence uses, after any
    sigmoid or gate."""
    scalars.flags(use_qk_l2norm_in_kernel=l2)
    if l2:
        check_qkv(q, k, v, grouped=True)
        q, k = l2norm(exact(q, k, v)), l2norm(exact(k, q, v))
    return run_chunked(FAMILY, request, (q, k, v, beta, g, None), grouped=True)
