"""Layers as nn.Modules; mirrors ``fla.modules``.

Names are imported at first use, as in the package itself.
"""
from __future__ import annotations

from collections.abc import Mapping

from flashlin.compat.lazy_imports import attach, stand_in

_HOME = {
    "flashlin.modules.norm": ("LayerNorm", "RMSNorm", "GroupNorm", "FusedLayerNormGated", "FusedRMSNormGated",
                              "FusedLayerNormSwishGate", "FusedRMSNormSwishGate", "L2Norm"),
    "flashlin.modules.norm_linear": ("LayerNormLinear", "RMSNormLinear", "GroupNormLinear",
                                     "FusedLayerNormGatedLinear", "FusedRMSNormGatedLinear",
                                     "FusedLayerNormSwishGateLinear", "FusedRMSNormSwishGateLinear"),
    "flashlin.modules.norm_gated": ("RMSNormGated",),
    "flashlin.modules.conv": ("ShortConvolution",),
    "flashlin.modules.rotary": ("RotaryEmbedding",),
    "flashlin.modules.cross_entropy": ("FusedCrossEntropyLoss", "FusedLinearCrossEntropyLoss"),
}
# Modules of fla 0.4 to 0.6 that define functions which flashlin also has, but in other modules.
OF_FLA = (
    "causal_conv1d", "causal_conv1d.ops", "convolution", "conv.causal_conv1d", "conv.short_conv",
    "conv.triton", "conv.triton.kernels", "conv.triton.ops", "fused_cross_entropy",
    "fused_cross_entropy.ops", "fused_linear_cross_entropy", "fused_linear_cross_entropy.ops",
    "fused_norm_gate", "l2norm", "layernorm", "layernorm_gated", "norm.fused_norm_gate", "norm.l2norm",
    "norm.layernorm", "norm.layernorm_gated", "rotary.ops", "token_shift")
stand_in(__name__, OF_FLA)


def _where() -> Mapping[str, str]:
    return {name: module for module, names in _HOME.items() for name in names}


_SUBMODULES = tuple(sorted(module.rpartition(".")[2] for module in _HOME))
__getattr__, __dir__ = attach(__name__, _where, _SUBMODULES)
