"""Layers as modules; mirrors ``fla.modules``. Names are loaded when first used, as in the package itself."""
from __future__ import annotations

from collections.abc import Mapping

from flashlin.compat.lazy import attach

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


def _where() -> Mapping[str, str]:
    return {name: module for module, names in _HOME.items() for name in names}


__getattr__, __dir__ = attach(__name__, _where)
