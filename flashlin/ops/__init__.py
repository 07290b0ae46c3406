"""The drop-in functions, one module per family, with the names of ``fla.ops``.

The package exports every public function whose name differs from all module names, and loads it on first use.
The other module paths below ``fla.ops``, such as ``fla.ops.gla.chunk``, also exist here.
"""
from __future__ import annotations

from collections.abc import Mapping

from flashlin.compat.lazy_imports import attach, stand_in
from flashlin.kernels.families import PUBLIC

# Module paths of fla 0.4 to 0.6 with a function that flashlin also has, but at another path.
OF_FLA = (
    *(f"{module}.{mode}" for mode in ("chunk", "fused_recurrent") for module in (
        "comba", "delta_rule", "gated_delta_rule", "gdn2", "generalized_delta_rule.dplr",
        "generalized_delta_rule.iplr", "gla", "hgrn", "kda", "lightning_attn", "linear_attn", "retention",
        "rwkv6", "rwkv7", "simple_gla")),
    "gated_delta_product.chunk", "gated_delta_rule.gate", "generalized_delta_rule",
    "generalized_delta_rule.dplr", "generalized_delta_rule.iplr", "kda.gate", "linear_attn.fused_chunk",
    "retention.fused_chunk", "retention.parallel", "rwkv7.fused_addcmul", "rwkv7.fused_k_update",
    "rwkv7.gate_output_correction", "simple_gla.fused_chunk", "simple_gla.parallel")
stand_in(__name__, OF_FLA)


def _where() -> Mapping[str, str]:
    return {op.name: f"flashlin.ops.{op.module}" for op in PUBLIC.values() if op.name not in _SUBMODULES}


_SUBMODULES = tuple(sorted({op.module for op in PUBLIC.values()}))
__getattr__, __dir__ = attach(__name__, _where, _SUBMODULES)
