"""Layers as modules; mirrors ``fla.modules``. Names are loaded when first used, as in the package itself."""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "flashlin.modules.norm": ("LayerNorm", "RMSNorm", "GroupNorm", "FusedLayerNormGated", "FusedRMSNormGated", "FusedLayerNormSwishGate",
                              "FusedRMSNormSwishGate", "L2Norm"),
    "flashlin.modules.norm_linear": ("LayerNormLinear", "RMSNormLinear", "GroupNormLinear", "FusedLayerNormGatedLinear", "FusedRMSNormGatedLinear",
                                     "FusedLayerNormSwishGateLinear", "FusedRMSNormSwishGateLinear"),
    "flashlin.modules.norm_gated": ("RMSNormGated",),
    "flashlin.modules.conv": ("ShortConvolution",),
    "flashlin.modules.rotary": ("RotaryEmbedding",),
    "flashlin.modules.cross_entropy": ("FusedCrossEntropyLoss", "FusedLinearCrossEntropyLoss"),
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted(_WHERE)

if TYPE_CHECKING:
    from flashlin.modules.conv import ShortConvolution as ShortConvolution
    from flashlin.modules.cross_entropy import FusedCrossEntropyLoss as FusedCrossEntropyLoss
    from flashlin.modules.cross_entropy import FusedLinearCrossEntropyLoss as FusedLinearCrossEntropyLoss
    from flashlin.modules.norm import FusedLayerNormGated as FusedLayerNormGated
    from flashlin.modules.norm import FusedLayerNormSwishGate as FusedLayerNormSwishGate
    from flashlin.modules.norm import FusedRMSNormGated as FusedRMSNormGated
    from flashlin.modules.norm import FusedRMSNormSwishGate as FusedRMSNormSwishGate
    from flashlin.modules.norm import GroupNorm as GroupNorm
    from flashlin.modules.norm import L2Norm as L2Norm
    from flashlin.modules.norm import LayerNorm as LayerNorm
    from flashlin.modules.norm import RMSNorm as RMSNorm
    from flashlin.modules.norm_gated import RMSNormGated as RMSNormGated
    from flashlin.modules.norm_linear import FusedLayerNormGatedLinear as FusedLayerNormGatedLinear
    from flashlin.modules.norm_linear import FusedLayerNormSwishGateLinear as FusedLayerNormSwishGateLinear
    from flashlin.modules.norm_linear import FusedRMSNormGatedLinear as FusedRMSNormGatedLinear
    from flashlin.modules.norm_linear import FusedRMSNormSwishGateLinear as FusedRMSNormSwishGateLinear
    from flashlin.modules.norm_linear import GroupNormLinear as GroupNormLinear
    from flashlin.modules.norm_linear import LayerNormLinear as LayerNormLinear
    from flashlin.modules.norm_linear import RMSNormLinear as RMSNormLinear
    from flashlin.modules.rotary import RotaryEmbedding as RotaryEmbedding


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'flashlin.modules' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
