"""The drop-in functions, one module per family, named as in ``fla.ops``. Here is each of them whose name is
not that of a module, loaded when first used; and what fla has elsewhere below ``fla.ops`` is there, too."""
from __future__ import annotations

from collections.abc import Mapping

from flashlin.compat.lazy_imports import attach, stand_in
from flashlin.kernels.families import PUBLIC

# Modules of fla 0.4 to 0.6 that have a name of ours and are no module here.
OF_FLA = (
    "comba.chunk", "comba.fused_recurrent", "delta_rule.chunk", "delta_rule.fused_recurrent",
    "gated_delta_product.chunk", "gated_delta_rule.chunk",
    "gated_delta_rule.fused_recurrent", "gated_delta_rule.gate", "gdn2.chunk", "gdn2.fused_recurrent",
    "generalized_delta_rule",
    "generalized_delta_rule.dplr", "generalized_delta_rule.dplr.chunk",
    "generalized_delta_rule.dplr.fused_recurrent", "generalized_delta_rule.iplr",
    "generalized_delta_rule.iplr.chunk", "generalized_delta_rule.iplr.fused_recurrent", "gla.chunk",
    "gla.fused_recurrent", "hgrn.chunk", "hgrn.fused_recurrent", "kda.chunk", "kda.fused_recurrent",
    "kda.gate", "lightning_attn.chunk", "lightning_attn.fused_recurrent", "linear_attn.chunk",
    "linear_attn.fused_chunk", "linear_attn.fused_recurrent", "retention.chunk", "retention.fused_chunk",
    "retention.fused_recurrent", "retention.parallel", "rwkv6.chunk", "rwkv6.fused_recurrent",
    "rwkv7.chunk", "rwkv7.fused_addcmul", "rwkv7.fused_k_update", "rwkv7.fused_recurrent",
    "rwkv7.gate_output_correction", "simple_gla.chunk", "simple_gla.fused_chunk",
    "simple_gla.fused_recurrent", "simple_gla.parallel")
stand_in(__name__, OF_FLA)


def _where() -> Mapping[str, str]:
    return {op.name: f"flashlin.ops.{op.module}" for op in PUBLIC.values() if op.name not in _SUBMODULES}


_SUBMODULES = tuple(sorted({op.module for op in PUBLIC.values()}))
__getattr__, __dir__ = attach(__name__, _where, _SUBMODULES)
