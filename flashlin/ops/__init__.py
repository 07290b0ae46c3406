"""The drop-in functions, one module per family, named as in ``fla.ops``. Here is each of them whose name is
not that of a module, loaded when first used; and what fla has elsewhere below ``fla.ops`` is there, too."""
from __future__ import annotations

from collections.abc import Mapping

from flashlin.compat.lazy_imports import attach, stand_in
from flashlin.kernels.families import PUBLIC

# Modules of fla 0.4 to 0.6 that have a name of ours and are no module here.
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
