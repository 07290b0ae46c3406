"""Adapters: flashlin's functions with the calling conventions of transformers' models.

Those models call functions of fla, mamba_ssm and causal_conv1d. flashlin's own functions are strict, and
models are not: they pass on whatever keywords they were called with, mark documents by names of their own,
and use activations that no kernel has. An adapter accepts the arguments of its function and the document
marks, and drops the other keywords of the model. ``ADAPTERS`` contains all adapters, by the name of the
kernel.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin.integrations.documents import forgetting, seq_idx_of, state_dropped, told
from flashlin.ops import causal_conv1d as conv
from flashlin.ops import gated_delta_rule as gdn
from flashlin.ops import kda, mamba_inner, norm, selective_scan, ssd, state_update

IN_KERNELS = (None, "silu", "swish")  # activations that the convolution computes itself
# Arguments of kernels that change the result and that flashlin does not support. All other keywords of a model are
# for other layers (use_cache, output_router_logits, max_length_q, position_embeddings, ...).
NOT_SERVED = {"cp_context": "only chunked ops and the convolution run over several ranks",
              "state_dtype": "states are float32"}
Own = dict[str, Any]  # arguments of flashlin's function, by name


def _of(ours: Callable[..., Any], *marks: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that makes an adapter of ``ours``.

    The adapter has the signature of ``ours``, then the keywords in ``marks``, which say where documents
    begin, and then any other keyword. The decorated function gets the given arguments of ``ours`` as a dict,
    and the marks.
    """
    own = {name: one for name, one in inspect.signature(ours).parameters.items()
           if one.kind is not one.VAR_KEYWORD}
    order, required = tuple(own), [name for name, one in own.items() if one.default is one.empty]
    refused = {name: why for name, why in NOT_SERVED.items() if name not in own}
    unmarked: list[Any] = [None] * len(marks)

    def made(adapt: Callable[..., Any]) -> Callable[..., Any]:
        def adapter(*args: Any, **options: Any) -> Any:
            for name, why in refused.items():
                if options.get(name) is not None:
                    raise NotImplementedError(f"{ours.__name__}: {name}: got {type(options[name]).__name__}, "
                                              f"need None in flashlin: {why}")
            marked = unmarked
            if not own.keys() >= options.keys():
                marked = [options.get(mark) for mark in marks]
                options = {name: value for name, value in options.items() if name in own}
            given = {**dict(zip(order, args, strict=False)), **options}
            if len(given) < len(args) + len(options) or (
                    len(args) < len(required) and any(name not in given for name in required)):
                return ours(*args, **options)  # raises the function's own TypeError
            return adapt(given, *marked)
        added = [inspect.Parameter(mark, inspect.Parameter.KEYWORD_ONLY, default=None) for mark in marks]
        rest = inspect.Parameter("of_the_model", inspect.Parameter.VAR_KEYWORD)
        adapter.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # read by inspect
            [*own.values(), *added, rest])
        adapter.__name__ = adapter.__qualname__ = ours.__name__
        return adapter
    return made


def _delta(ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return the adapter of a delta rule.

    The adapter passes cu_seq_lens_q as cu_seqlens. With a seq_idx of one or more rows, it sets the decay to
    -inf where a document begins.
    """
    @_of(ours, "cu_seq_lens_q", "seq_idx")
    def delta_rule(own: Own, cu_seq_lens_q: Tensor | None, seq_idx: Tensor | None) -> Any:
        if own.get("cu_seqlens") is None:
            own["cu_seqlens"] = cu_seq_lens_q
        if own["q"].shape[1] > 1:
            told(ours.__name__, own["cu_seqlens"] is not None or seq_idx is not None)
            if own.get("initial_state") is None:
                state_dropped(ours.__name__)
            if own["cu_seqlens"] is None and seq_idx is not None and own.get("g") is not None:
                own["g"] = forgetting(own["g"], seq_idx)
        return ours(**own)
    return delta_rule


@_of(conv.causal_conv1d_fn, "cu_seq_lens_q")
def causal_conv1d_fn(own: Own, cu_seq_lens_q: Tensor | None) -> Any:
    """Call flashlin's causal_conv1d_fn, with cu_seq_lens_q converted to a seq_idx."""
    rows, _, tokens = own["x"].shape
    own["seq_idx"] = seq_idx_of(rows, tokens, own.get("seq_idx"), cu_seq_lens_q)
    told("causal_conv1d_fn", own["seq_idx"] is not None)
    return _activated(conv.causal_conv1d_fn, own)


@_of(conv.causal_conv1d_update)
def causal_conv1d_update(own: Own) -> Any:
    """Call flashlin's causal_conv1d_update with the arguments of a call that transformers made.

    An activation that flashlin's function lacks is applied to the result.
    """
    return _activated(conv.causal_conv1d_update, own)


def _activated(ours: Callable[..., Any], own: Own) -> Any:
    """Call the convolution ``ours``, and apply an activation that it does not support to its result."""
    if (activation := own.get("activation")) in IN_KERNELS:
        return ours(**own)
    from transformers.activations import ACT2FN
    y = ours(**{**own, "activation": None})
    return (ACT2FN[activation](y[0]), y[1]) if isinstance(y, tuple) else ACT2FN[activation](y)


@_of(ssd.mamba_chunk_scan_combined, "cu_seq_lens_q")
def mamba_chunk_scan_combined(own: Own, cu_seq_lens_q: Tensor | None) -> Any:
    """Call flashlin's mamba_chunk_scan_combined, with cu_seq_lens_q converted to a seq_idx."""
    rows, tokens = own["x"].shape[:2]
    own["seq_idx"] = seq_idx_of(rows, tokens, own.get("seq_idx"), cu_seq_lens_q)
    told("mamba_chunk_scan_combined", own["seq_idx"] is not None or own.get("return_varlen_states", False))
    if own.get("initial_states") is None:
        state_dropped("mamba_chunk_scan_combined")
    return ssd.mamba_chunk_scan_combined(**own)


def unrounded_chunk_scan(x: Tensor, *arguments: Any, **options: Any) -> Any:
    """Call mamba_chunk_scan_combined and return float32, as the models' torch functions do.

    The norm that follows in the model rounds the result.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return mamba_chunk_scan_combined(x, *arguments, **options, out_dtype=wide)


@_of(ssd.mamba_split_conv1d_scan_combined, "cu_seq_lens_q")
def mamba_split_conv1d_scan_combined(own: Own, cu_seq_lens_q: Tensor | None) -> Any:
    """Call flashlin's mamba_split_conv1d_scan_combined, with cu_seq_lens_q converted to a seq_idx.

    If rmsnorm_eps is None, flashlin's default is used.
    """
    rows, tokens = own["zxbcdt"].shape[:2]
    own["seq_idx"] = seq_idx_of(rows, tokens, own.get("seq_idx"), cu_seq_lens_q)
    told("mamba_split_conv1d_scan_combined", own["seq_idx"] is not None)
    if own.get("rmsnorm_eps", 0) is None:
        del own["rmsnorm_eps"]
    return ssd.mamba_split_conv1d_scan_combined(**own)


@_of(selective_scan.selective_scan_fn)
def selective_scan_fn(own: Own) -> Any:
    """Call flashlin's selective_scan_fn, and warn if it mixes documents or drops a cached state.

    use_mambapy and use_associative_scan, which choose among torch paths, are dropped.
    """
    told("selective_scan_fn", False)
    state_dropped("selective_scan_fn")
    return selective_scan.selective_scan_fn(**own)


@_of(mamba_inner.mamba_inner_fn)
def mamba_inner_fn(own: Own) -> Any:
    """Call flashlin's mamba_inner_fn with the arguments of a call that transformers made.

    Warns if documents are packed into a row, because this function mixes them. A call with dt_rms_weight
    comes from Falcon Mamba, which applies its norms in another order. ``_of_falcon`` computes such a call.
    """
    told("mamba_inner_fn", False)
    of_falcon = own.get("dt_rms_weight") is not None and own.get("B") is None and own.get("C") is None
    return _of_falcon(own) if of_falcon else mamba_inner.mamba_inner_fn(**own)


def _of_falcon(own: Own) -> Tensor:
    """Compute Falcon Mamba's fused function in the order of the model's torch code.

    The model's fused function applies the norm of dt after the projection of dt. The model decodes with its
    torch code, which applies this norm before the projection, and without a weight. This function uses the
    order of the torch code, so that training and generation compute the same.
    """
    x, z = own["xz"].chunk(2, 1)
    u: Any = conv.causal_conv1d_fn(x, own["conv1d_weight"].squeeze(1), own["conv1d_bias"], activation="silu")
    N, R = own["A"].shape[1], own["delta_proj_weight"].shape[1]
    columns = torch.split(F.linear(u.transpose(1, 2), own["x_proj_weight"]), [R, N, N], -1)
    weights, eps = (None, own.get("b_rms_weight"), own.get("c_rms_weight")), own.get("b_c_dt_rms_eps", 1e-6)
    dt, B, C = (cast(Tensor, norm.rms_norm(one, weight, None, eps=eps))
                for one, weight in zip(columns, weights, strict=True))
    steps = F.linear(dt, own["delta_proj_weight"])
    y: Any = selective_scan.selective_scan_fn(u, steps.transpose(1, 2), own["A"], B.transpose(1, 2),
                                              C.transpose(1, 2), own.get("D"), z, own.get("delta_bias"),
                                              own.get("delta_softplus", True))
    bias = own["out_proj_bias"]
    return F.linear(y.transpose(1, 2), own["out_proj_weight"], None if bias is None else bias.to(y.dtype))


def declined(*arguments: Any, **of_the_model: Any) -> None:
    """Return None, as transformers' own torch function does if it has no fused path.

    The model then continues on its unfused path, which calls flashlin's functions.
    """


ADAPTERS: dict[str, Callable[..., Any]] = {adapter.__name__: adapter for adapter in (
    _delta(gdn.chunk_gated_delta_rule), _delta(gdn.fused_recurrent_gated_delta_rule), _delta(kda.chunk_kda),
    _delta(kda.fused_recurrent_kda), causal_conv1d_fn, causal_conv1d_update, mamba_chunk_scan_combined,
    _of(state_update.selective_state_update)(lambda own: state_update.selective_state_update(**own)),
    selective_scan_fn, mamba_split_conv1d_scan_combined, mamba_inner_fn)}
# Since transformers 5.15, a fused function may return None, and the model then uses its unfused path.
# ``declined`` does so, because flashlin's fused functions differ from the unfused path in three ways. They
# mask padding only before the convolution. They apply the norm of groups and the gate in mamba_ssm's order.
# The scan of the unfused path also passes float32 to the norm, as ``unrounded_chunk_scan`` does.
UNFUSED: dict[str, Callable[..., Any]] = {
    "mamba_split_conv1d_scan_combined": declined, "mamba_inner_fn": declined,
    "mamba_chunk_scan_combined": unrounded_chunk_scan}
