"""What people call the ops with, and the Problem that such a call makes. Plain Python: no tensor, no torch, no triton."""
from __future__ import annotations

from flashlin.dispatch import OPS
from flashlin.guards.problem import Problem

# Public names that are planned under another op's: the same function, or a norm before a linear layer.
ALIASES = {"chunk_gdn": "chunk_gated_delta_rule", "fused_recurrent_gdn": "fused_recurrent_gated_delta_rule", "l2_norm": "l2norm",
           "rms_norm_linear": "rms_norm", "layer_norm_linear": "layer_norm", "group_norm_linear": "group_norm",
           "rms_norm_swish_gate_linear": "rms_norm_gated", "layer_norm_swish_gate_linear": "layer_norm_gated"}
Sizes = dict[str, tuple[int, int, int, int, int, int, bool]]
# Typical calls as problems: B, T, H, K, V, number of sequences, packed. Of a norm: T rows of K elements. Of a convolution: K channels
# and V taps. Of HGRN: K channels. Of an elementwise op: T rows of H heads of K columns. Of a rotary embedding: T tokens of H heads of K channels,
# V pairs of them rotated. Of a cross entropy: T rows of K logits.
CALLS: Sizes = {"training": (4, 2048, 16, 128, 128, 4, False), "packed": (1, 32768, 16, 128, 128, 16, True),
                "heads of 256": (4, 2048, 8, 256, 256, 4, False), "decoding": (64, 1, 16, 128, 128, 64, False)}
ROWS: Sizes = {"training": (1, 16384, 1, 4096, 4096, 1, False), "decoding": (1, 64, 1, 4096, 4096, 1, False)}
CHANNELS: Sizes = {"training": (4, 2048, 1, 4096, 4, 4, False), "packed": (1, 32768, 1, 4096, 4, 16, True),
                   "decoding": (64, 1, 1, 4096, 4, 64, False)}
HEADS: Sizes = {"training": (1, 16384, 64, 64, 64, 1, False), "decoding": (1, 64, 64, 64, 64, 1, False)}
RECURRENCES: Sizes = {size: (B, T, 1, D, D, N, packed) for size, (B, T, _, D, _, N, packed) in CHANNELS.items()}
TURNS: Sizes = {"training": (1, 16384, 32, 128, 64, 1, False), "packed": (1, 32768, 32, 128, 64, 1, True),
                "decoding": (1, 64, 32, 128, 64, 1, False)}
LOGITS: Sizes = {"training": (1, 16384, 1, 128256, 128256, 1, False), "decoding": (1, 64, 1, 128256, 128256, 1, False)}
# Of Mamba2's scan and state update: H heads of V, and states of K columns.
SCANS: Sizes = {"training": (4, 2048, 80, 128, 64, 4, False), "packed": (1, 32768, 80, 128, 64, 16, True)}
STATES: Sizes = {"decoding": (128, 1, 80, 128, 64, 128, False)}
# Of a selective scan: H groups, K states for each of V channels.
CHANNEL_STATES: Sizes = {"training": (4, 2048, 1, 16, 5120, 4, False)}
WINDOWS: Sizes = {"decoding": CHANNELS["decoding"]}
SIZES: dict[str, Sizes] = {
    "norm": ROWS, "hgrn": RECURRENCES, "rotary": TURNS, "cross_entropy": LOGITS, "conv": CHANNELS, "conv_update": WINDOWS, "conv_window": WINDOWS,
    "state_update": STATES, "selective": CHANNEL_STATES, "pointwise_gate": HEADS, "pointwise_correction": HEADS, "pointwise_mix": ROWS,
    "pointwise_key": ROWS}
OWN_SIZES: dict[str, Sizes] = {  # of ops that are called otherwise than the rest of their family
    "mamba_chunk_scan_combined": SCANS, "mamba_split_conv1d_scan_combined": {"training": SCANS["training"]},
    "fused_gdn_gate": {"training": (1, 16384, 32, 1, 1, 1, False), "decoding": (1, 64, 32, 1, 1, 1, False)},
    "token_shift": {size: (B, T, 1, D, 2, N, packed) for size, (B, T, _, D, _, N, packed) in CHANNELS.items()}}
# Ops that update a state in place, and what a call of them is where gradients are wanted.
IN_PLACE = {"causal_conv1d_update": "causal_conv1d of one token", "mamba_causal_conv1d_update": "causal_conv1d_fn",
            "selective_state_update": "plain torch"}
GROUPED = ("group_norm", "rmsnorm_fn", "layernorm_fn")  # norms whose H groups of K are one row of their weight
# The optional tensors and flags of a typical call, sorted; of some depends which kernels are started.
OPTIONS: dict[str, tuple[str, ...]] = {
    **{op: ("g",) for op in OPS if op.endswith("simple_gla")},
    "chunk_gated_delta_rule": ("g",), "gated_delta_rule": ("g",), "fused_recurrent_delta_rule": ("beta", "delta"),
    "fused_recurrent_gated_delta_rule": ("beta", "delta", "g"), "fused_recurrent_gla": ("gk",),
    "chunk_kda": ("beta",), "kda": ("beta",), "fused_recurrent_kda": ("beta", "delta", "gk"),
    "chunk_rwkv6": ("u",), "rwkv6": ("u",), "fused_recurrent_rwkv6": ("before", "bonus", "gk"),
    **dict.fromkeys(("chunk_rwkv7", "rwkv7", "chunk_dplr_delta_rule", "chunk_iplr_delta_rule", "fused_recurrent_iplr_delta_rule"), ("a", "b")),
    **dict.fromkeys(("fused_recurrent_rwkv7", "fused_recurrent_dplr_delta_rule"), ("a", "b", "gk")),
    "fused_mul_recurrent_rwkv7": ("a", "b", "gk", "rate"),
    "rms_norm": ("weight",), "layer_norm": ("bias", "weight"), "group_norm": ("bias", "weight"), "rms_norm_gated": ("gate", "weight"),
    "layer_norm_gated": ("bias", "gate", "weight"), "rmsnorm_fn": ("gate", "weight"), "layernorm_fn": ("gate", "weight"),
    "causal_conv1d": ("bias", "silu"), "causal_conv1d_fn": ("bias", "silu"), "causal_conv1d_update": ("silu",), "token_shift": ("fixed",),
    **dict.fromkeys(("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"), ("g", "gva", "v_first"))}


def known(op: str) -> str:
    """The op that ``op`` is planned as. Raises ValueError that lists them."""
    op = ALIASES.get(op, op)
    if op not in OPS:
        raise ValueError(f"op: got {op!r}, need one of {', '.join((*OPS, *ALIASES))}")
    return op


def sizes(op: str) -> Sizes:
    """The typical calls of an op, by what they are for."""
    return OWN_SIZES.get(op) or SIZES.get(OPS[op][0], CALLS)


def problem_of(op: str, *, B: int, T: int | None, H: int | None, K: int | None, V: int | None, N: int | None, dtype: str, varlen: bool,
               needs_grad: bool, mode: str) -> Problem:
    """The problem that a call with these sizes makes, see ``diagnosis.explain``; None is what typical calls have. What an op has no use for is left
    out, as the op itself does. Raises ValueError for a size below 1, or for packed sequences of an op that knows none."""
    family = OPS[op][0]
    _, _, usual_H, usual_K, usual_V, _, _ = next(iter(sizes(op).values()))
    T, H, K = (1 if op in IN_PLACE else 2048) if T is None else T, usual_H if H is None else H, usual_K if K is None else K
    V = (max(K // 2, 1) if family == "rotary" else usual_V) if V is None else V
    for name, size in {"B": B, "T": T, "H": H, "K": K, "V": V, "N": 1 if N is None else N}.items():
        if size < 1:
            raise ValueError(f"{name}: got {size}, need 1 or more")
    if N is not None and not varlen:
        raise ValueError(f"N: got {N} without varlen, need it for packed sequences only")
    if varlen and not any(packed for *_, packed in sizes(op).values()):
        raise ValueError(f"varlen: got True, need False: {op} takes no packed sequences")
    N = N or B
    if varlen:
        B, T = 1, B * T
    if family in ("norm", "cross_entropy"):  # know rows and their length only
        B, T, H, V, N = (1, B * T, H, K, 1) if op in GROUPED else (1, B * T * H, 1, K, 1)
    elif family in ("pointwise_mix", "pointwise_key"):  # and these columns
        B, T, H, K, V, N = 1, B * T, 1, H * K, H * K, 1
    elif family.startswith("pointwise"):
        K = 1 if op == "fused_gdn_gate" else K
        B, T, V, N = 1, B * T, K, 1
    elif family == "rotary":
        B, T, N = 1, B * T, 1
    elif family in ("conv", "conv_window"):
        H = 1
    elif family == "conv_update":
        T, H = 1, 1
    elif family == "state_update":
        T = 1
    elif family == "hgrn":
        H, V = 1, K
    return Problem(op, family, mode, B, T, H, K, V, N, dtype, varlen, needs_grad and op not in IN_PLACE, OPTIONS.get(op, ()))
