"""A call of every op with all of its arguments, and what users pass in their places."""
from __future__ import annotations

import inspect
import math
import warnings
from typing import Any

import torch
from torch import Tensor, rand, randn

import flashlin
import flashlin.mamba
from flashlin.kernels.families import PUBLIC
from flashlin.testing.cases import CASES

OPS = sorted(PUBLIC)
COMPOSED = sorted(set(flashlin.mamba.__all__) - set(OPS) - {"causal_conv1d_update"}
                  - {name for name in flashlin.mamba.__all__ if name[0].isupper()})  # of flashlin.mamba alone
B, T, H, K, D, W, N = 1, 6, 2, 8, 8, 4, 2  # two sequences are packed in a batch of one; K is V
EDGES = torch.tensor([0, 4, T])
HEADS, VECTORS, ROWS = (B, T, H), (B, T, H, K), (B, T, D)


def function(op: str) -> Any:
    return getattr(flashlin.mamba if op in COMPOSED else flashlin, op)


def parameters(op: str) -> list[str]:
    found = inspect.signature(function(op)).parameters.values()
    return [parameter.name for parameter in found if parameter.kind is not parameter.VAR_KEYWORD]


def arguments(op: str) -> dict[str, Any]:
    """Of a call that runs. Only those that contradict others are None."""
    if "norm" in op:
        tensors = _special(op) or _of_norms(op)
    else:
        tensors = _of_tokens(op) if _over_tokens(op) else _special(op) or _of_a_case(op)
    given = {**OPTIONS, **tensors}
    unknown = [name for name in parameters(op) if name not in given]
    assert not unknown, f"{op}: need a value for {', '.join(unknown)} in OPTIONS or _special of {__name__}"
    return {name: given[name] for name in parameters(op)}


def _over_tokens(op: str) -> bool:
    return {"q", "k", "v"} <= set(parameters(op)) or {"r", "k", "v", "w"} <= set(parameters(op))


OPTIONS: dict[str, Any] = {
    "scale": 0.5, "output_final_state": True, "layer_idx": 1, "num_layers": 4, "mode": "auto",
    "chunk_size": 64, "lower_bound": -5.0, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
    "allow_neg_eigval": True, "use_qk_l2norm_in_kernel": True, "state_v_first": False,
    "transpose_state_layout": None, "reverse": True, "safe_gate": True, "disable_recompute": False,
    "cp_context": None, "chunk_indices": None, "return_intermediate_states": False, "normalize": True,
    "output_attentions": False, "use_graph": False, "max_num_seqs": None, "state_indices": None,
    "inplace_state": False, "cu_seqlens": EDGES, "cu_seqlens_cpu": EDGES, "activation": "silu",
    "backend": "triton", "eps": 1e-6, "prenorm": True, "residual_in_fp32": True, "is_rms_norm": True,
    "num_groups": 2, "group_size": 4, "norm_before_gate": True, "output_dtype": torch.float32,
    "process_group": None, "num_householder": 1}


def _of_tokens(op: str) -> dict[str, Any]:
    vectors = "kda" in op or "gdn2" in op or op in ("chunk_gla", "gla")
    state = randn(2, H, K, K)
    return {**{name: randn(VECTORS) for name in ("q", "r", "k", "v", "a", "b", "kk", "p")},
            **{name: -rand(VECTORS) for name in ("gk", "gv", "w")}, "g": -rand(VECTORS if vectors else HEADS),
            "g_gamma": None if op == "fused_chunk_simple_gla" else -rand(H), "beta": rand(HEADS),
            "u": randn(H, K), "A_log": randn(H), "dt_bias": randn(H * K if vectors else H),
            "initial_state": (state, randn(2, 1, H, K)) if "linear_attn" in op else state}


def _of_norms(op: str) -> dict[str, Any]:
    return {**{name: randn(T, D) for name in ("x", "g", "z", "residual")}, "linear_weight": randn(5, D),
            "linear_bias": randn(5),
            **{name: randn(D) for name in ("weight", "bias", "norm_weight", "norm_bias")}}


def _of_a_case(op: str) -> dict[str, Any]:
    case = next(case for case in CASES if case.quick and case.op == op)
    return dict(case.make(torch.float32, torch.Generator().manual_seed(0)))


def _special(op: str) -> dict[str, Any]:
    scan = {"A": -rand(H), "D": randn(H), "dt_bias": randn(H), "initial_states": randn(B, H, K, N),
            "dt_limit": (0.0, 1.0), "return_final_states": True,
            "seq_idx": torch.zeros(B, T, dtype=torch.int32)}
    loss = {"target": torch.zeros(T, dtype=torch.int64), "label_smoothing": 0.1, "logit_scale": 1.0,
            "logit_softcapping": 3.0, "ignore_index": -100}
    calls: dict[str, dict[str, Any]] = {
        "mamba_chunk_scan_combined": {**scan, "x": randn(VECTORS), "dt": randn(HEADS), "B": randn(B, T, 1, N),
                                      "C": randn(B, T, 1, N), "z": randn(VECTORS), "dt_softplus": True,
                                      "return_varlen_states": True, "out_dtype": torch.float32},
        "mamba_split_conv1d_scan_combined": {
            **scan, "zxbcdt": randn(B, T, 2 * H * K + 2 * N + H), "conv1d_weight": randn(H * K + 2 * N, W),
            "conv1d_bias": randn(H * K + 2 * N), "rmsnorm_weight": randn(H * K), "rmsnorm_eps": 1e-6,
            "outproj_weight": randn(5, H * K), "outproj_bias": randn(5), "headdim": K, "ngroups": 1},
        "mamba3_siso_combined": {
            **{name: randn(VECTORS) for name in "QKVZ"}, "ADT": -rand(B, H, T), "DT": rand(B, H, T),
            "Trap": randn(B, H, T), "Q_bias": randn(H, K), "K_bias": randn(H, K), "Angles": randn(B, T, H, 3),
            "D": randn(H), "return_final_states": True,
            "Input_States": (randn(2, H, 3), randn(2, H, K, K), randn(2, H, K), randn(2, H, K))},
        "selective_state_update": {
            "state": randn(2, H, K, N), "x": randn(2, H, K), "dt": randn(2, H, K), "A": -rand(H, K, N),
            "B": randn(2, 1, N), "C": randn(2, 1, N), "D": randn(H, K), "z": randn(2, H, K),
            "dt_bias": randn(H, K), "dt_softplus": True, "state_batch_indices": torch.arange(2)},
        "selective_scan_fn": {
            "u": randn(2, D, T), "delta": randn(2, D, T), "A": -rand(D, N), "B": randn(2, N, T),
            "C": randn(2, N, T), "D": randn(D), "z": randn(2, D, T), "delta_bias": randn(D),
            "delta_softplus": True, "return_last_state": True},
        "causal_conv1d_fn": {"x": randn(2, D, T), "weight": randn(D, W), "bias": randn(D), "seq_idx": None,
                             "initial_states": randn(2, D, W - 1), "return_final_states": True,
                             "final_states_out": randn(2, D, W - 1)},
        "mamba_causal_conv1d_update": {"x": randn(2, D), "conv_state": randn(2, D, W), "weight": randn(D, W),
                                       "bias": randn(D), "cache_seqlens": torch.zeros(2, dtype=torch.int32),
                                       "conv_state_indices": torch.arange(2)},
        "causal_conv1d": {"x": randn(ROWS), "weight": randn(D, W), "bias": randn(D), "residual": randn(ROWS),
                          "initial_state": randn(2, D, W)},
        "causal_conv1d_update": {"x": randn(2, D), "cache": randn(2, D, W), "residual": randn(2, D),
                                 "weight": randn(D, W), "bias": randn(D)},
        "token_shift": {"x": randn(ROWS), "cache": randn(2, D), "output_cache": True},
        "chunk_hgrn": {"x": randn(ROWS), "g": -rand(ROWS), "initial_state": randn(2, D)},
        "rotary_embedding": {"x": randn(B, T, H, D), "cos": randn(9, D // 2), "sin": randn(9, D // 2),
                             "interleaved": True, "inplace": True,
                             "seqlen_offsets": torch.zeros(2, dtype=torch.int32)},
        "cross_entropy_loss": {**loss, "logits": randn(T, 9), "lse_square_scale": 0.1,
                               "inplace_backward": True},
        "fused_linear_cross_entropy_loss": {**loss, "x": randn(T, D), "weight": randn(9, D), "bias": randn(9),
                                            "num_chunks": 2, "reduction": "mean", "use_l2warp": True,
                                            "l2_penalty_factor": 1e-4, "accumulate_grad_in_fp32": True},
        "fused_gdn_gate": {"g": randn(HEADS), "A_log": randn(H), "dt_bias": randn(H)},
        "fused_kda_gate": {"g": randn(VECTORS), "A_log": randn(H), "dt_bias": randn(H * K)},
        "fused_addcmul_rwkv7": {**{name: randn(ROWS) for name in ("hidden_states", "delta")},
                                **{"x" + name: randn(D) for name in "rwkvag"}},
        "fused_k_rwkv7": {"k": randn(ROWS), "a": randn(ROWS), "ka": randn(D)},
        "gate_output_correction": {**{name: randn(VECTORS) for name in "rkv"},
                                   **{name: randn(B, T, H * K) for name in "og"}, "r_k": randn(H, K)}}
    return calls.get("chunk_hgrn" if op.endswith("hgrn") else op, {}) or _of_mamba(op)


def _of_mamba(op: str) -> dict[str, Any]:
    if op == "mamba_inner_fn":
        R = 2
        return {"xz": randn(2, 2 * D, T), "conv1d_weight": randn(D, 1, W), "conv1d_bias": randn(D),
                "x_proj_weight": randn(R + 2 * N, D), "delta_proj_weight": randn(D, R), "A": -rand(D, N),
                "B": randn(2, N, T), "C": randn(2, N, T), "D": randn(D), "delta_bias": randn(D),
                "out_proj_weight": randn(5, D), "out_proj_bias": randn(5), "B_proj_bias": randn(N),
                "C_proj_bias": randn(N), "b_rms_weight": randn(N), "c_rms_weight": randn(N),
                "dt_rms_weight": randn(D), "delta_softplus": True, "checkpoint_lvl": 1,
                "b_c_dt_rms_eps": 1e-6}
    if op == "causal_conv1d_varlen_states":
        return {"x": randn(T, D), "state_len": 3}
    if op in ("layer_norm_fn", "rms_norm_fn"):
        return {**_of_norms(op), "x1": randn(T, D), "weight1": randn(D), "bias1": randn(D), "dropout_p": 0.5,
                "rowscale": None, "return_dropout_mask": True, "zero_centered_weight": True}
    return {}


# Arguments for compatibility, which nobody reads, and those that only some ops or modes read.
UNREAD = {"chunk_indices", "disable_recompute", "use_graph", "max_num_seqs"}
UNREAD_BY = {("chunk_dplr_delta_rule", "safe_gate"), ("chunk_rwkv7", "safe_gate"),
             ("fused_k_rwkv7", "cu_seqlens"),
             # and of those that go token by token here, which read no copy:
             ("fused_k_rwkv7", "cu_seqlens_cpu"),
             *((op, "cu_seqlens_cpu") for op in ("delta_rule", "gated_delta_rule", "gla", "kda", "rwkv6",
                                                 "rwkv7"))}


def impossible(x: Any) -> dict[str, Any]:
    """What no argument can be, in the place of one that is x."""
    floats = x.float() if isinstance(x, Tensor) and x.ndim else torch.zeros(3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's prototypes
        return {"text": "abc", "sparse": floats.to_sparse(), "complex": floats.to(torch.complex64),
                "nested": torch.nested.nested_tensor([torch.zeros(2, 2), torch.zeros(3, 2)]),
                "jagged": torch.nested.nested_tensor([torch.zeros(2, 2), torch.zeros(3, 2)],
                                                     layout=torch.jagged),
                "quantized": torch.quantize_per_tensor(floats, 0.1, 0, torch.qint8),
                "mkldnn": floats.to_mkldnn()}


def doubtful(x: Any) -> dict[str, Any]:
    """What some arguments can be, and others not."""
    tensor = x if isinstance(x, Tensor) else torch.zeros(3)
    return {"None": None, "3.5": 3.5, "-1": -1, "True": True, "NaN": math.nan, "list": [1.0, 2.0],
            "0-d": torch.tensor(1.0), "two": torch.ones(2), "meta": tensor.to("meta"), "int": tensor.int(),
            "int64": 2**63, "float64": 10**400}  # too large for int64, and far too large for float64
