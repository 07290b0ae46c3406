"""Mamba, Mamba2 and Mamba-3 under the names of mamba_ssm and causal_conv1d.

Example: ``from flashlin.mamba import causal_conv1d_update, selective_state_update``.

``causal_conv1d_update``, ``RMSNorm`` and ``LayerNorm`` have the signatures of mamba_ssm and causal_conv1d. In
the package ``flashlin`` itself these names have the signatures of fla. ``mamba_inner_fn``, ``layer_norm_fn``,
``rms_norm_fn`` and ``causal_conv1d_varlen_states`` are composed of other ops, each planned separately. Names
are imported at first use, as in the package.
"""
from __future__ import annotations

from collections.abc import Mapping

from flashlin.compat.lazy_imports import attach

_WHERE = {"mamba_chunk_scan_combined": "flashlin.ops.ssd",
          "mamba_split_conv1d_scan_combined": "flashlin.ops.ssd",
          "mamba3_siso_combined": "flashlin.ops.mamba3",
          "selective_state_update": "flashlin.ops.state_update",
          "selective_scan_fn": "flashlin.ops.selective_scan",
          "causal_conv1d_fn": "flashlin.ops.causal_conv1d",
          "mamba_inner_fn": "flashlin.ops.mamba_inner",
          "layer_norm_fn": "flashlin.ops.add_norm", "rms_norm_fn": "flashlin.ops.add_norm",
          "causal_conv1d_varlen_states": "flashlin.ops.causal_conv1d",
          "causal_conv1d_update": "flashlin.ops.causal_conv1d", "rmsnorm_fn": "flashlin.ops.norm",
          "layernorm_fn": "flashlin.ops.norm", "RMSNorm": "flashlin.modules.norm_gated",
          "LayerNorm": "flashlin.modules.norm_gated",
          "RMSNormGated": "flashlin.modules.norm_gated:RMSNorm"}  # as mamba_ssm.modules.mamba2 imports it


def _where() -> Mapping[str, str]:
    return _WHERE


__getattr__, __dir__ = attach(__name__, _where)
