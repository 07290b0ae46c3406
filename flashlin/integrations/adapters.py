"""What stands in transformers' models for the functions of fla, mamba_ssm and causal_conv1d: flashlin's,
called as those models call them.

flashlin's own functions are strict. Models hand a kernel whatever keywords they were called with, say where
documents begin under names of their own, and know activations that no kernel has. An adapter takes its
function's arguments and those; ``ADAPTERS`` is the list, with the reason for each.
"""
from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin.integrations.documents import forgetting, seq_idx_of, state_dropped, told
from flashlin.ops import causal_conv1d as conv
from flashlin.ops import gated_delta_rule as gdn
from flashlin.ops import kda, norm, selective_scan, ssd, state_update

IN_KERNELS = (None, "silu", "swish")  # activations that the convolution has itself
# Arguments of kernels that change the result and that flashlin has not. All else that a model passes along
# speaks to other parts of it (use_cache, output_router_logits, max_length_q, position_embeddings, ...).
NOT_SERVED = {"cp_context": "there is no context parallelism",
              "state_dtype": "states are float32"}


def _check(function: str, of_the_model: dict[str, Any]) -> None:
    for name, why in NOT_SERVED.items():
        if of_the_model.get(name) is not None:
            raise NotImplementedError(f"{function}: {name}: got {type(of_the_model[name]).__name__}, need "
                                      f"None in flashlin: {why}")


def _delta(ours: Callable[..., Any]) -> Callable[..., Any]:
    """A delta rule under the signature of ``ours``, with cu_seq_lens_q for cu_seqlens, and seq_idx."""
    name = ours.__name__
    own = {one: is_ for one, is_ in inspect.signature(ours).parameters.items()
           if is_.kind is not is_.VAR_KEYWORD}
    order = tuple(own)

    def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, *more: Any,
                   cu_seqlens: Tensor | None = None, cu_seq_lens_q: Tensor | None = None,
                   seq_idx: Tensor | None = None, **options: Any) -> Any:
        _check(name, options)
        options = {one: value for one, value in options.items() if one in own}
        options.update(zip(order[4:], more, strict=False))
        cu_seqlens = options.pop("cu_seqlens", cu_seqlens)
        if cu_seqlens is None:
            cu_seqlens = cu_seq_lens_q
        if q.shape[1] > 1:
            told(name, cu_seqlens is not None or seq_idx is not None)
            if cu_seqlens is None and seq_idx is not None and g is not None:
                g = forgetting(g, seq_idx)
        return ours(q, k, v, g, cu_seqlens=cu_seqlens, **options)

    marks = [inspect.Parameter(one, inspect.Parameter.KEYWORD_ONLY, default=None)
             for one in ("cu_seq_lens_q", "seq_idx")]
    of_the_model = inspect.Parameter("of_the_model", inspect.Parameter.VAR_KEYWORD)
    delta_rule.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # which inspect asks for
        [*own.values(), *marks, of_the_model])
    delta_rule.__name__ = delta_rule.__qualname__ = name
    return delta_rule


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    **of_the_model: Any,
) -> Any:
    seq_idx = seq_idx_of(x.shape[0], x.shape[2], seq_idx, cu_seq_lens_q)
    told("causal_conv1d_fn", seq_idx is not None)
    y = conv.causal_conv1d_fn(x, weight, bias, seq_idx, initial_states, return_final_states,
                              final_states_out, activation if activation in IN_KERNELS else None)
    if activation in IN_KERNELS:
        return y
    return (_activated(y[0], activation), y[1]) if isinstance(y, tuple) else _activated(y, activation)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    **of_the_model: Any,
) -> Tensor:
    y = conv.causal_conv1d_update(x, conv_state, weight, bias,
                                  activation if activation in IN_KERNELS else None, cache_seqlens,
                                  conv_state_indices)
    return y if activation in IN_KERNELS else _activated(y, activation)


def _activated(y: Tensor, activation: str | None) -> Tensor:
    from transformers.activations import ACT2FN
    acted: Tensor = ACT2FN[activation](y)
    return acted


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Sequence[float] = (0.0, math.inf),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    *,
    cu_seq_lens_q: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **of_the_model: Any,
) -> Any:
    _check("mamba_chunk_scan_combined", of_the_model)
    seq_idx = seq_idx_of(x.shape[0], x.shape[1], seq_idx, cu_seq_lens_q)
    told("mamba_chunk_scan_combined", seq_idx is not None or return_varlen_states)
    return ssd.mamba_chunk_scan_combined(
        x, dt, A, B, C, chunk_size, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states,
        seq_idx=seq_idx, cu_seqlens=cu_seqlens, dt_softplus=dt_softplus, dt_limit=dt_limit,
        return_final_states=return_final_states, return_varlen_states=return_varlen_states,
        out_dtype=out_dtype)


def unrounded_chunk_scan(x: Tensor, *arguments: Any, **options: Any) -> Any:
    """As the models' torch functions, whose result is float32: a norm comes next, and rounds."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return mamba_chunk_scan_combined(x, *arguments, **options, out_dtype=wide)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: Sequence[float] = (0.0, math.inf),
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float | None = None,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    *,
    cu_seq_lens_q: Tensor | None = None,
    **of_the_model: Any,
) -> Any:
    _check("mamba_split_conv1d_scan_combined", of_the_model)
    seq_idx = seq_idx_of(zxbcdt.shape[0], zxbcdt.shape[1], seq_idx, cu_seq_lens_q)
    told("mamba_split_conv1d_scan_combined", seq_idx is not None)
    return ssd.mamba_split_conv1d_scan_combined(
        zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size=chunk_size,
        initial_states=initial_states, seq_idx=seq_idx, dt_limit=dt_limit,
        return_final_states=return_final_states, activation=activation, rmsnorm_weight=rmsnorm_weight,
        rmsnorm_eps=1e-6 if rmsnorm_eps is None else rmsnorm_eps, outproj_weight=outproj_weight,
        outproj_bias=outproj_bias, headdim=headdim, ngroups=ngroups, norm_before_gate=norm_before_gate)


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    **of_the_model: Any,
) -> Tensor:
    return state_update.selective_state_update(
        state, x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus,
        state_batch_indices=state_batch_indices)


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **of_the_model: Any,
) -> Any:
    told("selective_scan_fn", False)
    state_dropped("selective_scan_fn")
    return selective_scan.selective_scan_fn(
        u, delta, A, B, C, D, z=z, delta_bias=delta_bias, delta_softplus=delta_softplus,
        return_last_state=return_last_state)


def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
    **of_the_model: Any,
) -> Any:
    from flashlin import mamba
    told("mamba_inner_fn", False)
    if dt_rms_weight is not None and B is None and C is None:  # Falcon Mamba
        # The fused function norms dt behind its projection, the model's torch code, which decodes, before
        # it, without a weight. The model's counts: training must be what it is in generation.
        x, z = xz.chunk(2, 1)
        u: Any = mamba.causal_conv1d_fn(x, conv1d_weight.squeeze(1), conv1d_bias, activation="silu")
        N, R = A.shape[1], delta_proj_weight.shape[1]
        columns = torch.split(F.linear(u.transpose(1, 2), x_proj_weight), [R, N, N], -1)
        dt, *states = (norm.rms_norm(one, weight, None, eps=b_c_dt_rms_eps)
                       for one, weight in zip(columns, (None, b_rms_weight, c_rms_weight), strict=True))
        steps: Any = F.linear(cast(Tensor, dt), delta_proj_weight)
        B, C = (cast(Tensor, one).transpose(1, 2) for one in states)
        y: Any = mamba.selective_scan_fn(u, steps.transpose(1, 2), A, B, C, D, z, delta_bias, delta_softplus)
        return F.linear(y.transpose(1, 2), out_proj_weight,
                        None if out_proj_bias is None else out_proj_bias.to(y.dtype))
    return mamba.mamba_inner_fn(
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A,
        B=B, C=C, D=D, delta_bias=delta_bias, B_proj_bias=B_proj_bias, C_proj_bias=C_proj_bias,
        delta_softplus=delta_softplus, checkpoint_lvl=checkpoint_lvl, b_rms_weight=b_rms_weight,
        c_rms_weight=c_rms_weight, dt_rms_weight=dt_rms_weight, b_c_dt_rms_eps=b_c_dt_rms_eps)


def declined(*arguments: Any, **of_the_model: Any) -> None:
    """The answer of transformers' own torch function where it has no fused path: the model goes on in its
    unfused way, of flashlin's functions."""


class Adapter(NamedTuple):
    """why: what it does beyond flashlin's function of this name."""
    function: Callable[..., Any]
    why: str


_OF_A_DELTA_RULE = ("cu_seq_lens_q is its cu_seqlens; seq_idx, also of several rows, sets the decay to -inf "
                    "where a document begins")
ADAPTERS = {
    "chunk_gated_delta_rule": Adapter(_delta(gdn.chunk_gated_delta_rule), _OF_A_DELTA_RULE),
    "fused_recurrent_gated_delta_rule": Adapter(_delta(gdn.fused_recurrent_gated_delta_rule),
                                                _OF_A_DELTA_RULE),
    "chunk_kda": Adapter(_delta(kda.chunk_kda), _OF_A_DELTA_RULE),
    "fused_recurrent_kda": Adapter(_delta(kda.fused_recurrent_kda), _OF_A_DELTA_RULE),
    "causal_conv1d_fn": Adapter(causal_conv1d_fn, "cu_seq_lens_q is a seq_idx; activations that are not silu "
                                                  "are transformers'"),
    "causal_conv1d_update": Adapter(causal_conv1d_update, "activations that are not silu are transformers'"),
    "mamba_chunk_scan_combined": Adapter(mamba_chunk_scan_combined, "cu_seq_lens_q is a seq_idx"),
    "selective_state_update": Adapter(selective_state_update, "keywords of the model are dropped"),
    "selective_scan_fn": Adapter(selective_scan_fn, "use_mambapy and use_associative_scan choose among torch "
                                                    "paths; it warns where documents or states are lost"),
    "mamba_split_conv1d_scan_combined": Adapter(mamba_split_conv1d_scan_combined,
                                                "cu_seq_lens_q is a seq_idx; rmsnorm_eps may be None"),
    "mamba_inner_fn": Adapter(mamba_inner_fn, "keywords of the model are dropped; Falcon Mamba's dt is "
                                              "normed before its projection, as in the model's torch code"),
}
# Since transformers 5.15 models take None for an answer. Then the fused functions are declined, because they are
# not what the model computes without them: padding is masked only before their convolution, and their norm is
# one of groups, before or after the gate as mamba_ssm fixes it. And the scan hands its norm float32.
UNFUSED: dict[str, Callable[..., Any]] = {
    "mamba_split_conv1d_scan_combined": declined, "mamba_inner_fn": declined,
    "mamba_chunk_scan_combined": unrounded_chunk_scan}
