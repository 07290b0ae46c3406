"""Mamba and Mamba2 under the names of mamba_ssm and causal_conv1d: ``from flashlin.mamba import causal_conv1d_update, selective_state_update, ...``.

``causal_conv1d_update``, ``RMSNorm`` and ``LayerNorm`` are theirs, unlike what the package itself has under these names from fla. Names are loaded
when first used, as in the package.
"""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_WHERE = {"mamba_chunk_scan_combined": "flashlin.ops.ssd", "mamba_split_conv1d_scan_combined": "flashlin.ops.ssd",
          "selective_state_update": "flashlin.ops.state_update", "selective_scan_fn": "flashlin.ops.selective_scan",
          "causal_conv1d_fn": "flashlin.ops.causal_conv1d", "causal_conv1d_update": "flashlin.ops.causal_conv1d",
          "rmsnorm_fn": "flashlin.ops.norm", "layernorm_fn": "flashlin.ops.norm",
          "RMSNorm": "flashlin.modules.norm_gated", "LayerNorm": "flashlin.modules.norm_gated", "RMSNormGated": "flashlin.modules.norm_gated"}
_CALLED = {"RMSNormGated": "RMSNorm"}  # as mamba_ssm.modules.mamba2 imports it
__all__ = sorted(_WHERE)

if TYPE_CHECKING:
    from flashlin.modules.norm_gated import LayerNorm as LayerNorm
    from flashlin.modules.norm_gated import RMSNorm as RMSNorm
    from flashlin.modules.norm_gated import RMSNorm as RMSNormGated  # noqa: F401
    from flashlin.ops.causal_conv1d import causal_conv1d_fn as causal_conv1d_fn
    from flashlin.ops.causal_conv1d import causal_conv1d_update as causal_conv1d_update
    from flashlin.ops.norm import layernorm_fn as layernorm_fn
    from flashlin.ops.norm import rmsnorm_fn as rmsnorm_fn
    from flashlin.ops.selective_scan import selective_scan_fn as selective_scan_fn
    from flashlin.ops.ssd import mamba_chunk_scan_combined as mamba_chunk_scan_combined
    from flashlin.ops.ssd import mamba_split_conv1d_scan_combined as mamba_split_conv1d_scan_combined
    from flashlin.ops.state_update import selective_state_update as selective_state_update


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'flashlin.mamba' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), _CALLED.get(name, name))


def __dir__() -> list[str]:
    return __all__
