"""Layers as modules; mirrors ``fla.modules``. Names are loaded when first used, as in the package itself."""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_WHERE = dict.fromkeys(("LayerNorm", "RMSNorm", "GroupNorm", "FusedLayerNormGated", "FusedRMSNormGated", "L2Norm"), "flashlin.modules.norm")
_WHERE["RMSNormGated"] = "flashlin.modules.norm_gated"
_WHERE["ShortConvolution"] = "flashlin.modules.conv"
__all__ = sorted(_WHERE)

if TYPE_CHECKING:
    from flashlin.modules.conv import ShortConvolution as ShortConvolution
    from flashlin.modules.norm import FusedLayerNormGated as FusedLayerNormGated
    from flashlin.modules.norm import FusedRMSNormGated as FusedRMSNormGated
    from flashlin.modules.norm import GroupNorm as GroupNorm
    from flashlin.modules.norm import L2Norm as L2Norm
    from flashlin.modules.norm import LayerNorm as LayerNorm
    from flashlin.modules.norm import RMSNorm as RMSNorm
    from flashlin.modules.norm_gated import RMSNormGated as RMSNormGated


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'flashlin.modules' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
