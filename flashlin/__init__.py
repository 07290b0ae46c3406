"""flashlin: linear attention that runs, is right, is fast, and otherwise says in one sentence what is wrong and what to do.

Names are loaded when first used, so ``import flashlin`` imports neither torch nor Triton, touches no GPU and prints nothing; and
``flashlin.doctor()`` still answers when one of them is broken.
"""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "flashlin.ops.simple_gla": ("chunk_simple_gla", "fused_chunk_simple_gla", "fused_recurrent_simple_gla", "parallel_simple_gla", "simple_gla"),
    "flashlin.ops.retention": ("chunk_retention", "fused_chunk_retention", "fused_recurrent_retention", "parallel_retention", "retention"),
    "flashlin.ops.linear_attn": ("chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn", "linear_attn"),
    "flashlin.ops.lightning_attn": ("chunk_lightning_attn", "fused_recurrent_lightning_attn"),
    "flashlin.ops.delta_rule": ("chunk_delta_rule", "fused_recurrent_delta_rule", "delta_rule"),
    "flashlin.ops.gated_delta_rule": ("chunk_gated_delta_rule", "chunk_gdn", "fused_recurrent_gated_delta_rule", "fused_recurrent_gdn",
                                      "gated_delta_rule"),
    "flashlin.ops.kda": ("chunk_kda", "fused_recurrent_kda", "kda"),
    "flashlin.ops.rwkv6": ("chunk_rwkv6", "fused_recurrent_rwkv6", "rwkv6"),
    "flashlin.ops.rwkv7": ("chunk_rwkv7", "fused_recurrent_rwkv7", "fused_mul_recurrent_rwkv7", "rwkv7"),
    "flashlin.ops.dplr_delta_rule": ("chunk_dplr_delta_rule", "fused_recurrent_dplr_delta_rule"),
    "flashlin.ops.iplr_delta_rule": ("chunk_iplr_delta_rule", "fused_recurrent_iplr_delta_rule"),
    "flashlin.ops.gla": ("chunk_gla", "fused_recurrent_gla", "gla"),
    "flashlin.ops.rotary": ("rotary_embedding",),
    "flashlin.ops.cross_entropy": ("cross_entropy_loss", "fused_linear_cross_entropy_loss"),
    "flashlin.ops.norm_linear": ("layer_norm_linear", "rms_norm_linear", "group_norm_linear", "layer_norm_swish_gate_linear",
                                 "rms_norm_swish_gate_linear"),
    "flashlin.ops.hgrn": ("chunk_hgrn", "fused_recurrent_hgrn"),
    "flashlin.ops.norm": ("layer_norm", "rms_norm", "group_norm", "layer_norm_gated", "rms_norm_gated", "l2norm", "l2_norm", "rmsnorm_fn",
                          "layernorm_fn"),
    "flashlin.ops.conv": ("causal_conv1d", "causal_conv1d_update"),
    "flashlin.ops.ssd": ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"),
    "flashlin.ops.state_update": ("selective_state_update",),
    "flashlin.ops.selective_scan": ("selective_scan_fn",),
    "flashlin.ops.causal_conv1d": ("causal_conv1d_fn", "mamba_causal_conv1d_update"),
    "flashlin.ops.gates": ("fused_gdn_gate", "fused_kda_gate"),
    "flashlin.ops.rwkv7_steps": ("fused_addcmul_rwkv7", "fused_k_rwkv7", "gate_output_correction"),
    "flashlin.ops.token_shift": ("token_shift",),
    "flashlin.modules.norm": ("LayerNorm", "RMSNorm", "GroupNorm", "FusedLayerNormGated", "FusedRMSNormGated", "FusedLayerNormSwishGate",
                              "FusedRMSNormSwishGate", "L2Norm"),
    "flashlin.modules.norm_linear": ("LayerNormLinear", "RMSNormLinear", "GroupNormLinear", "FusedLayerNormGatedLinear", "FusedRMSNormGatedLinear",
                                     "FusedLayerNormSwishGateLinear", "FusedRMSNormSwishGateLinear"),
    "flashlin.modules.rotary": ("RotaryEmbedding",),
    "flashlin.modules.cross_entropy": ("FusedCrossEntropyLoss", "FusedLinearCrossEntropyLoss"),
    "flashlin.modules.norm_gated": ("RMSNormGated",),
    "flashlin.modules.conv": ("ShortConvolution",),
    "flashlin.diagnostics.doctor": ("doctor", "explain"),
    "flashlin.dispatch": ("plan",),
    "flashlin.policy": ("settings", "Policy"),
    "flashlin.compat.target": ("Target",),
    "flashlin.guards.problem": ("Problem", "UnsupportedError"),
    "flashlin.diagnostics.report": ("Report",),
    "flashlin.shielding.launcher": ("shield",),
    "flashlin.shielding.autotune": ("autotune",),
    "flashlin.integrations.patching": ("patch", "patched", "unpatch"),
    "flashlin.trial.warmup": ("warmup",),
    "flashlin.tokens": ("check_tokens", "embedding", "guard_embeddings", "synchronize"),
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted([*_WHERE, "__version__"])

if TYPE_CHECKING:
    from flashlin.compat.target import Target as Target
    from flashlin.diagnostics.doctor import doctor as doctor
    from flashlin.diagnostics.doctor import explain as explain
    from flashlin.diagnostics.report import Report as Report
    from flashlin.dispatch import plan as plan
    from flashlin.guards.problem import Problem as Problem
    from flashlin.guards.problem import UnsupportedError as UnsupportedError
    from flashlin.integrations.patching import patch as patch
    from flashlin.integrations.patching import patched as patched
    from flashlin.integrations.patching import unpatch as unpatch
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
    from flashlin.ops.causal_conv1d import causal_conv1d_fn as causal_conv1d_fn
    from flashlin.ops.causal_conv1d import mamba_causal_conv1d_update as mamba_causal_conv1d_update
    from flashlin.ops.conv import causal_conv1d as causal_conv1d
    from flashlin.ops.conv import causal_conv1d_update as causal_conv1d_update
    from flashlin.ops.cross_entropy import cross_entropy_loss as cross_entropy_loss
    from flashlin.ops.cross_entropy import fused_linear_cross_entropy_loss as fused_linear_cross_entropy_loss
    from flashlin.ops.delta_rule import chunk_delta_rule as chunk_delta_rule
    from flashlin.ops.delta_rule import delta_rule as delta_rule
    from flashlin.ops.delta_rule import fused_recurrent_delta_rule as fused_recurrent_delta_rule
    from flashlin.ops.dplr_delta_rule import chunk_dplr_delta_rule as chunk_dplr_delta_rule
    from flashlin.ops.dplr_delta_rule import fused_recurrent_dplr_delta_rule as fused_recurrent_dplr_delta_rule
    from flashlin.ops.gated_delta_rule import chunk_gated_delta_rule as chunk_gated_delta_rule
    from flashlin.ops.gated_delta_rule import chunk_gdn as chunk_gdn
    from flashlin.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as fused_recurrent_gated_delta_rule
    from flashlin.ops.gated_delta_rule import fused_recurrent_gdn as fused_recurrent_gdn
    from flashlin.ops.gated_delta_rule import gated_delta_rule as gated_delta_rule
    from flashlin.ops.gates import fused_gdn_gate as fused_gdn_gate
    from flashlin.ops.gates import fused_kda_gate as fused_kda_gate
    from flashlin.ops.gla import chunk_gla as chunk_gla
    from flashlin.ops.gla import fused_recurrent_gla as fused_recurrent_gla
    from flashlin.ops.gla import gla as gla
    from flashlin.ops.hgrn import chunk_hgrn as chunk_hgrn
    from flashlin.ops.hgrn import fused_recurrent_hgrn as fused_recurrent_hgrn
    from flashlin.ops.iplr_delta_rule import chunk_iplr_delta_rule as chunk_iplr_delta_rule
    from flashlin.ops.iplr_delta_rule import fused_recurrent_iplr_delta_rule as fused_recurrent_iplr_delta_rule
    from flashlin.ops.kda import chunk_kda as chunk_kda
    from flashlin.ops.kda import fused_recurrent_kda as fused_recurrent_kda
    from flashlin.ops.kda import kda as kda
    from flashlin.ops.lightning_attn import chunk_lightning_attn as chunk_lightning_attn
    from flashlin.ops.lightning_attn import fused_recurrent_lightning_attn as fused_recurrent_lightning_attn
    from flashlin.ops.linear_attn import chunk_linear_attn as chunk_linear_attn
    from flashlin.ops.linear_attn import fused_chunk_linear_attn as fused_chunk_linear_attn
    from flashlin.ops.linear_attn import fused_recurrent_linear_attn as fused_recurrent_linear_attn
    from flashlin.ops.linear_attn import linear_attn as linear_attn
    from flashlin.ops.norm import group_norm as group_norm
    from flashlin.ops.norm import l2_norm as l2_norm
    from flashlin.ops.norm import l2norm as l2norm
    from flashlin.ops.norm import layer_norm as layer_norm
    from flashlin.ops.norm import layer_norm_gated as layer_norm_gated
    from flashlin.ops.norm import layernorm_fn as layernorm_fn
    from flashlin.ops.norm import rms_norm as rms_norm
    from flashlin.ops.norm import rms_norm_gated as rms_norm_gated
    from flashlin.ops.norm import rmsnorm_fn as rmsnorm_fn
    from flashlin.ops.norm_linear import group_norm_linear as group_norm_linear
    from flashlin.ops.norm_linear import layer_norm_linear as layer_norm_linear
    from flashlin.ops.norm_linear import layer_norm_swish_gate_linear as layer_norm_swish_gate_linear
    from flashlin.ops.norm_linear import rms_norm_linear as rms_norm_linear
    from flashlin.ops.norm_linear import rms_norm_swish_gate_linear as rms_norm_swish_gate_linear
    from flashlin.ops.retention import chunk_retention as chunk_retention
    from flashlin.ops.retention import fused_chunk_retention as fused_chunk_retention
    from flashlin.ops.retention import fused_recurrent_retention as fused_recurrent_retention
    from flashlin.ops.retention import parallel_retention as parallel_retention
    from flashlin.ops.retention import retention as retention
    from flashlin.ops.rotary import rotary_embedding as rotary_embedding
    from flashlin.ops.rwkv6 import chunk_rwkv6 as chunk_rwkv6
    from flashlin.ops.rwkv6 import fused_recurrent_rwkv6 as fused_recurrent_rwkv6
    from flashlin.ops.rwkv6 import rwkv6 as rwkv6
    from flashlin.ops.rwkv7 import chunk_rwkv7 as chunk_rwkv7
    from flashlin.ops.rwkv7 import fused_mul_recurrent_rwkv7 as fused_mul_recurrent_rwkv7
    from flashlin.ops.rwkv7 import fused_recurrent_rwkv7 as fused_recurrent_rwkv7
    from flashlin.ops.rwkv7 import rwkv7 as rwkv7
    from flashlin.ops.rwkv7_steps import fused_addcmul_rwkv7 as fused_addcmul_rwkv7
    from flashlin.ops.rwkv7_steps import fused_k_rwkv7 as fused_k_rwkv7
    from flashlin.ops.rwkv7_steps import gate_output_correction as gate_output_correction
    from flashlin.ops.selective_scan import selective_scan_fn as selective_scan_fn
    from flashlin.ops.simple_gla import chunk_simple_gla as chunk_simple_gla
    from flashlin.ops.simple_gla import fused_chunk_simple_gla as fused_chunk_simple_gla
    from flashlin.ops.simple_gla import fused_recurrent_simple_gla as fused_recurrent_simple_gla
    from flashlin.ops.simple_gla import parallel_simple_gla as parallel_simple_gla
    from flashlin.ops.simple_gla import simple_gla as simple_gla
    from flashlin.ops.ssd import mamba_chunk_scan_combined as mamba_chunk_scan_combined
    from flashlin.ops.ssd import mamba_split_conv1d_scan_combined as mamba_split_conv1d_scan_combined
    from flashlin.ops.state_update import selective_state_update as selective_state_update
    from flashlin.ops.token_shift import token_shift as token_shift
    from flashlin.policy import Policy as Policy
    from flashlin.policy import settings as settings
    from flashlin.shielding.autotune import autotune as autotune
    from flashlin.shielding.launcher import shield as shield
    from flashlin.tokens import check_tokens as check_tokens
    from flashlin.tokens import embedding as embedding
    from flashlin.tokens import guard_embeddings as guard_embeddings
    from flashlin.tokens import synchronize as synchronize
    from flashlin.trial.warmup import warmup as warmup


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'flashlin' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
