"""Complete arguments for a call of every op, and wrong values that users may pass instead."""
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
from flashlin.testing.cases.mamba3 import STATES
from flashlin.testing.cases.op import facts_of, options_of
from flashlin.testing.compare import Case

OPS = sorted(PUBLIC)
COMPOSED = sorted(set(flashlin.mamba.__all__) - set(OPS) - {"causal_conv1d_update"}
                  - {name for name in flashlin.mamba.__all__ if name[0].isupper()})  # only in flashlin.mamba
T, H, D, W, N = 6, 2, 8, 4, 2  # N sequences are packed in a batch of one
EDGES = (0, 4, T)
SIZES = {"B": 2, "T": T, "H": H, "HV": H, "G": 1, "K": D, "V": D, "D": D, "P": D, "W": W, "L": W, "N": 5,
         "E": 5, "R": 3, "TR": 9, "num_householder": 1, "out": 5, "shape": (T, D), "rows": (T,)}
# Facts with which a case creates every optional tensor that can be combined with the others.
ALL = {"raw": True, "residual": "same", "gate_dtype": "same", "g": "random", "gk": "random", "gv": "random",
       "gate": "random", "gated": True, "values": True, "tied": False, "of_D": None,
       "given": None, "without": ()}


def function(op: str) -> Any:
    return getattr(flashlin.mamba if op in COMPOSED else flashlin, op)


def parameters(op: str) -> list[str]:
    found = inspect.signature(function(op)).parameters.values()
    return [parameter.name for parameter in found if parameter.kind is not parameter.VAR_KEYWORD]


def arguments(op: str) -> dict[str, Any]:
    """Return all arguments of a valid call of the op; only arguments that contradict others are None."""
    names = parameters(op)
    given = OPTIONS if op in COMPOSED else {**options(op), **OPTIONS, **tensors(op, names)}
    given = {**given, **_special(op, given)}
    unknown = [name for name in names if name not in given]
    assert not unknown, f"{op}: need a value for {', '.join(unknown)} in OPTIONS or _special of {__name__}"
    return {name: given[name] for name in names}


def case_of(op: str) -> Case:
    """Return the first case of an op, or of the op that it is an alias or another mode of."""
    names = (op, f"chunk_{op}", PUBLIC[op].planned_as)
    return next(case for name in names for case in CASES if case.op == name)


def options(op: str) -> dict[str, Any]:
    """Return the options that the op's cases choose."""
    chosen = [options_of(case) for case in CASES if case.op == case_of(op).op]
    return {name: x for options in chosen for name, x in options.items()}


def tensors(op: str, names: list[str]) -> dict[str, Any]:
    """Return small float32 tensors for every tensor argument that the cases of the op declare."""
    case = case_of(op)
    facts = {name: x for name, x in {**SIZES, **ALL}.items() if name in facts_of(case)}
    edges = EDGES if "cu_seqlens" in names else ()
    made = case.make(torch.float32, torch.Generator().manual_seed(0), **facts, edges=edges)
    return {name: x for name, x in made.items() if name != "cu_seqlens"}


OPTIONS: dict[str, Any] = {
    "scale": 0.5, "output_final_state": True, "mode": "auto", "chunk_size": 64, "lower_bound": -5.0,
    "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True,
    "use_qk_l2norm_in_kernel": True, "state_v_first": False, "transpose_state_layout": None,
    "safe_gate": True, "disable_recompute": False, "cp_context": None, "chunk_indices": None,
    "return_intermediate_states": False, "normalize": True, "output_attentions": False, "use_graph": False,
    "max_num_seqs": None, "state_indices": None, "inplace_state": False, "cu_seqlens": torch.tensor(EDGES),
    "cu_seqlens_cpu": torch.tensor(EDGES), "activation": "silu", "backend": "triton", "eps": 1e-6,
    "prenorm": True, "residual_in_fp32": True, "is_rms_norm": True, "num_groups": 2, "group_size": 4,
    "norm_before_gate": True, "output_dtype": torch.float32, "process_group": None, "num_householder": 1,
    "g_gamma": torch.tensor([-0.1, -0.5]), "output_cache": True, "ignore_index": -100,
    "accumulate_grad_in_fp32": True, "out_dtype": torch.float32, "dt_limit": (0.0, 1.0),
    "state_batch_indices": torch.arange(2), "conv_state_indices": torch.arange(2),
    "cache_seqlens": torch.zeros(2, dtype=torch.int32), "final_states_out": torch.zeros(2, D, W - 1),
    "seqlen_offsets": torch.zeros(2, dtype=torch.int32)}


def _special(op: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that differ from the cases of the op, or that no case declares."""
    if "linear_attn" in op:
        return {"initial_state": (given["initial_state"], randn(N, 1, H, D))}
    if op == "mamba_inner_fn":
        R = 2
        return {"xz": randn(2, 2 * D, T), "conv1d_weight": randn(D, 1, W), "conv1d_bias": randn(D),
                "x_proj_weight": randn(R + 2 * N, D), "delta_proj_weight": randn(D, R), "A": -rand(D, N),
                "B": randn(2, N, T), "C": randn(2, N, T), "D": randn(D), "delta_bias": randn(D),
                "out_proj_weight": randn(5, D), "out_proj_bias": randn(5), "B_proj_bias": randn(N),
                "C_proj_bias": randn(N), "b_rms_weight": randn(N), "c_rms_weight": randn(N),
                "dt_rms_weight": randn(D), "delta_softplus": True, "checkpoint_lvl": 1,
                "b_c_dt_rms_eps": 1e-6}
    if op in ("layer_norm_fn", "rms_norm_fn"):
        return {**{name: randn(T, D) for name in ("x", "residual", "x1")}, "dropout_p": 0.5, "rowscale": None,
                **{name: randn(D) for name in ("weight", "bias", "weight1", "bias1")},
                "return_dropout_mask": True, "zero_centered_weight": True}
    calls: dict[str, dict[str, Any]] = {
        "fused_chunk_simple_gla": {"g_gamma": None},  # it excludes g
        "mamba_chunk_scan_combined": {"seq_idx": torch.zeros(1, T, dtype=torch.int32)},
        "mamba_split_conv1d_scan_combined": {"seq_idx": torch.zeros(2, T, dtype=torch.int32), "headdim": D,
                                             "ngroups": 1},
        "causal_conv1d_fn": {"seq_idx": None},
        "mamba3_siso_combined": {"Input_States": tuple([given.get(name) for name in STATES])},
        "causal_conv1d_varlen_states": {"x": randn(T, D), "state_len": 3}}
    return calls.get(op, {})


# Arguments that exist only for compatibility. All ops ignore those of UNREAD; UNREAD_BY has (op, argument).
UNREAD = {"chunk_indices", "disable_recompute", "use_graph", "max_num_seqs"}
UNREAD_BY = {("chunk_dplr_delta_rule", "safe_gate"), ("chunk_rwkv7", "safe_gate"),
             ("fused_k_rwkv7", "cu_seqlens"),
             # These run token by token here, so they do not need the host copy of cu_seqlens.
             ("fused_k_rwkv7", "cu_seqlens_cpu"),
             *((op, "cu_seqlens_cpu") for op in ("delta_rule", "gated_delta_rule", "gla", "kda", "rwkv6",
                                                 "rwkv7"))}


def impossible(x: Any) -> dict[str, Any]:
    """Return values that are invalid for every argument, by name, as replacements of the argument x."""
    floats = x.float() if isinstance(x, Tensor) and x.ndim else torch.zeros(3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that nested and quantized tensors are prototypes
        return {"text": "abc", "sparse": floats.to_sparse(), "complex": floats.to(torch.complex64),
                "nested": torch.nested.nested_tensor([torch.zeros(2, 2), torch.zeros(3, 2)]),
                "jagged": torch.nested.nested_tensor([torch.zeros(2, 2), torch.zeros(3, 2)],
                                                     layout=torch.jagged),
                "quantized": torch.quantize_per_tensor(floats, 0.1, 0, torch.qint8),
                "mkldnn": floats.to_mkldnn()}


def doubtful(x: Any) -> dict[str, Any]:
    """Return values that are valid for some arguments only, by name, as replacements of the argument x."""
    tensor = x if isinstance(x, Tensor) else torch.zeros(3)
    return {"None": None, "3.5": 3.5, "-1": -1, "True": True, "NaN": math.nan, "list": [1.0, 2.0],
            "0-d": torch.tensor(1.0), "two": torch.ones(2), "meta": tensor.to("meta"), "int": tensor.int(),
            "int64": 2**63, "float64": 10**400}  # too large for int64; too large for float64
