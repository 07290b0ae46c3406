"""Linear attention: simple GLA without decay, optionally normalised; mirrors ``fla.ops.linear_attn``.

    S_t = S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t
    normalize:   z_t = z_{t-1} + k_t        o_t <- o_t / (scale q_t . z_t + 1e-10)

The ops compute the normaliser as one more value channel that is always 1. The same kernels therefore compute
it and its gradients, and its state z is the last column of the state. Source: Katharopoulos et al. 2020.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashlin.guards import scalars
from flashlin.guards.tensors import check_qkv, need_tensor
from flashlin.kernels.sequences import widest
from flashlin.ops._common.chunked import Request
from flashlin.ops._common.entry import entry
from flashlin.ops.simple_gla import run_simple_gla

State = Tensor | tuple[Tensor, Tensor]


@entry
def chunk_linear_attn(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None,
                      initial_state: State | None = None, output_final_state: bool = False,
                      normalize: bool = True, cu_seqlens: Tensor | None = None, *, cp_context: Any = None,
                      process_group: Any = None, **unknown: Any) -> tuple[Tensor, State | None]:
    """Compute linear attention chunk by chunk.

    Drop-in for ``fla.ops.linear_attn.chunk_linear_attn``. Arguments are the same as in ``chunk_simple_gla``,
    without the gates. With normalize (on by default) each initial or final state is a pair: kv [N, H, K, V]
    in float32, and z [N, 1, H, K] in the dtype of k. Without normalize it is kv alone. The final state is
    None unless output_final_state is set.
    """
    request = Request("chunk_linear_attn", scale, None, output_final_state, cu_seqlens, cp_context=cp_context,
                      process_group=process_group)
    return _attended(request, q, k, v, initial_state, normalize)


@entry
def fused_recurrent_linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: State | None = None,
    output_final_state: bool = False, reverse: bool = False, normalize: bool = False,
    cu_seqlens: Tensor | None = None, **unknown: Any) -> tuple[Tensor, State | None]:
    """Compute linear attention token by token.

    Drop-in for ``fla.ops.linear_attn.fused_recurrent_linear_attn``. As in fla, normalize is off by default.
    reverse: run each sequence from its last token to its first. All other arguments and the results are the
    same as in ``chunk_linear_attn``.
    """
    request = Request("fused_recurrent_linear_attn", scale, None, output_final_state, cu_seqlens,
                      mode="fused_recurrent", reverse=reverse)
    return _attended(request, q, k, v, initial_state, normalize)


@entry
def fused_chunk_linear_attn(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None,
                            initial_state: State | None = None, output_final_state: bool = False,
                            normalize: bool = True, cu_seqlens: Tensor | None = None,
                            **unknown: Any) -> tuple[Tensor, State | None]:
    """Compute linear attention with the kernels of ``chunk_linear_attn``, which are already fused.

    Drop-in for ``fla.ops.linear_attn.fused_chunk_linear_attn``. Arguments, defaults and results are the same
    as in ``chunk_linear_attn``.
    """
    request = Request("fused_chunk_linear_attn", scale, None, output_final_state, cu_seqlens)
    return _attended(request, q, k, v, initial_state, normalize)


@entry
def linear_attn(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None,
                initial_state: State | None = None, output_final_state: bool = False, normalize: bool = True,
                cu_seqlens: Tensor | None = None, mode: str = "auto") -> tuple[Tensor, State | None]:
    """Compute linear attention in the mode that suits the call.

    mode: the same as in ``simple_gla``. All other arguments are the same as in ``chunk_linear_attn``.
    """
    request = Request("linear_attn", scale, None, output_final_state, cu_seqlens, mode=mode)
    return _attended(request, q, k, v, initial_state, normalize)


def _attended(request: Request, q: Tensor, k: Tensor, v: Tensor, initial_state: State | None,
              normalize: bool) -> tuple[Tensor, State | None]:
    scalars.flags(normalize=normalize)
    if not normalize:
        if isinstance(initial_state, tuple):
            raise TypeError("initial_state: got a tuple with normalize=False, need a tensor [N, H, K, V]")
        return run_simple_gla(request._replace(h0=initial_state), q, k, v)
    check_qkv(q, k, v)
    H, K, V = q.shape[2], q.shape[3], v.shape[3]
    compute = widest(q, k, v)
    if isinstance(initial_state, tuple):
        kv, z = initial_state
        need_tensor("initial_state[1]", z, (None, 1, H, K), "[N, 1, H, K]", q.device)
        need_tensor("initial_state[0]", kv, (z.shape[0], H, K, V), "[N, H, K, V]", q.device)
        request = request._replace(h0=torch.cat([kv.to(compute), z.to(compute).squeeze(1).unsqueeze(3)], 3))
    elif initial_state is not None:
        raise TypeError("initial_state: got a tensor with normalize=True, need the pair (kv [N, H, K, V], z "
                        "[N, 1, H, K])")
    ones = torch.ones_like(v[..., :1])
    both, ht = run_simple_gla(request, q, k, torch.cat([v, ones], 3), out_dtype=compute)
    o = (both[..., :V] / (both[..., V:] + 1e-10)).to(v.dtype)
    return o, None if ht is None else (ht[..., :V], ht[..., V].unsqueeze(1).to(k.dtype))
