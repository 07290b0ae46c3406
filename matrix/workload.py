"""What the matrix compiles: calls of every public op, forward and backward, as layers make them where that is
written below, else as in the op's quick cases. Tensors are on the CPU: inside ``recording`` nothing is
started, and only shapes and dtypes tell which kernels a call needs."""
from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

import flashlin
from flashlin import dispatch
from flashlin.compat.target import Target
from flashlin.guards.problem import Plan, UnsupportedError
from flashlin.kernels.families import PUBLIC
from flashlin.testing.cases import CASES
from flashlin.testing.compare import Case
from flashlin.testing.record import Recorded, recording

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Call(NamedTuple):
    """op: the public name; label: what is special about it, dtype included; run: makes the call, and backward
    where there is one."""
    op: str
    label: str
    run: Callable[[], None]

    def __str__(self) -> str:
        return f"{self.op} {self.label}"


class Seen(NamedTuple):
    """A call on a target: the plan of the op itself and of what it calls before (norms, convolutions), and
    the kernels it would start."""
    call: Call
    plans: tuple[Plan, ...]
    launches: tuple[Recorded, ...]


WITHOUT_KERNELS = {"backend", "triton"}  # reasons of a target, that hold for every kernel on it


class _NoKernels(Exception):
    """Ends a call on a target without kernels: what follows is plain torch, which takes long and starts
    nothing."""


def seen(call: Call, target: Target) -> Seen:
    """Make the call as if on ``target``. A refusal is a plan, too."""
    plans: list[Plan] = []
    original = dispatch.plan

    def noting(*args: Any) -> Plan:
        plans.append(original(*args))
        if plans[-1].asked.op == call.op and any(reason.code in WITHOUT_KERNELS
                                                 for reason, _ in plans[-1].steps):
            raise _NoKernels
        return plans[-1]
    with recording(target) as launches, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # remedies announce themselves; here they are the result
        vars(dispatch)["plan"] = noting
        try:
            call.run()
        except (UnsupportedError, _NoKernels):
            pass  # the last of plans says why
        finally:
            vars(dispatch)["plan"] = original
    return Seen(call, tuple(dict.fromkeys(plans)), tuple(launches))


def zeros(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, requires_grad=torch.is_grad_enabled())


def backward(*outputs: Any) -> None:
    """Backward of all outputs at once, if anything asks for gradients."""
    found = [x for x in outputs if isinstance(x, torch.Tensor) and x.requires_grad]
    if found:
        torch.autograd.backward(found, [torch.zeros_like(x) for x in found])


def sequences(
    op: str,
    dtype: torch.dtype,
    D: int,
    *,
    T: int = 128,
    H: int = 4,
    HV: int = 0,
    packed: bool = False,
    gates: tuple[str, ...] = (),
    state: bool = True,
    V: int = 0,
    **options: Any,
) -> None:
    """An op over q, k [2, T, H, D] and v [2, T, H, V], V = D if 0; gates: which of g, beta, gk, gv and so on
    to pass, g_vector being a g for each key channel, and which others like k: a, b, kk. The gates and states
    are float32, as layers have them."""
    HV, B = HV or H, 1 if packed else 2
    shapes = {"g": (B, T, HV), "beta": (B, T, HV), "gk": (B, T, HV, D), "gv": (B, T, HV, D),
              "beta_headwise": (B, T, HV, D), "g_vector": (B, T, HV, D), "w": (B, T, HV, D), "u": (HV, D),
              "A_log": (HV,), "dt_bias": (HV,), "dt_bias_vector": (HV * D,)}
    given: dict[str, Any] = {gate.removesuffix("_headwise").removesuffix("_vector"): zeros(*shapes[gate])
                             for gate in gates if gate in shapes}
    given.update((name, zeros(B, T, HV, D, dtype=dtype)) for name in gates if name not in shapes)
    if packed:
        given["cu_seqlens"] = torch.tensor([0, 50, T], dtype=torch.int32)
    if state:
        given["initial_state"] = zeros(2, HV, D, V or D)
    q_name = "r" if "rwkv" in op else "q"
    o, ht = getattr(flashlin, op)(**{q_name: zeros(B, T, H, D, dtype=dtype)},
                                  k=zeros(B, T, H, D, dtype=dtype), v=zeros(B, T, HV, V or D, dtype=dtype),
                                  **given, output_final_state=state, **options)
    backward(o, ht)


def scores(op: str, dtype: torch.dtype, D: int, output_attentions: bool = False) -> None:
    """A ``parallel_`` op: no states."""
    gate = (zeros(2, 128, 4),) if op.endswith("simple_gla") else ()
    backward(*getattr(flashlin, op)(*(zeros(2, 128, 4, D, dtype=dtype) for _ in range(3)), *gate,
                                    output_attentions=output_attentions))


def decoding(op: str, dtype: torch.dtype, D: int, **options: Any) -> None:
    with torch.no_grad():
        sequences(op, dtype, D, T=1, **options)


def norm(op: str, dtype: torch.dtype, D: int, gated: bool = False, **options: Any) -> None:
    x = zeros(4, 64, D, dtype=dtype)
    weights = (zeros(D, dtype=dtype), None if "rms" in op else zeros(D, dtype=dtype))
    found = flashlin.l2norm(x) if op == "l2norm" else getattr(flashlin, op)(x, *((x,) if gated else ()),
                                                                            *weights, **options)
    backward(*(found if isinstance(found, tuple) else (found,)))


def convolution(dtype: torch.dtype, W: int, packed: bool = False, state: bool = False) -> None:
    x, given = zeros(1 if packed else 2, 64, 1024, dtype=dtype), dict[str, Any]()
    if packed:
        given["cu_seqlens"] = torch.tensor([0, 30, 64], dtype=torch.int32)
    if state:
        given["initial_state"] = zeros(2, 1024, W, dtype=dtype)
    backward(*flashlin.causal_conv1d(x, zeros(1024, W, dtype=dtype), zeros(1024, dtype=dtype),
                                     activation="silu", output_final_state=state, **given))


def shifting(dtype: torch.dtype, packed: bool = False) -> None:
    given = {"cu_seqlens": torch.tensor([0, 30, 64], dtype=torch.int32),
             "cache": zeros(2, 1024, dtype=dtype)} if packed else {}
    found = flashlin.token_shift(zeros(1 if packed else 2, 64, 1024, dtype=dtype), **given,
                                 output_cache=packed)
    backward(*(found if isinstance(found, tuple) else (found,)))


def recurrence(op: str, dtype: torch.dtype, T: int = 1024, packed: bool = False) -> None:
    """HGRN's, of as few sequences as make it split them."""
    B, given = (1, {"cu_seqlens": torch.tensor([0, 50, T], dtype=torch.int32)}) if packed else (2, {})
    x = zeros(B, T, 1024, dtype=dtype)
    backward(*getattr(flashlin, op)(x, zeros(B, T, 1024, dtype=dtype), zeros(2, 1024), True, **given))


@torch.no_grad()
def recurring_once(op: str, dtype: torch.dtype) -> None:
    recurrence(op, dtype, 1)


@torch.no_grad()
def convolving_a_token(dtype: torch.dtype, W: int) -> None:
    flashlin.causal_conv1d_update(zeros(2, 1024, dtype=dtype), zeros(2, 1024, W, dtype=dtype), None,
                                  zeros(1024, W, dtype=dtype), activation="silu")


def scanning(dtype: torch.dtype, packed: bool = False, numbered: bool = False) -> None:
    """Heads of Mamba2's size; dt and what belongs to heads in float32."""
    B, H, P, N = 1 if packed else 2, 8, 64, 128
    x, groups, heads = zeros(B, 128, H, P, dtype=dtype), zeros(B, 128, 1, N, dtype=dtype), zeros(H)
    given: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 50, 128], dtype=torch.int32),
                             "return_varlen_states": True} if packed else {}
    given |= {"seq_idx": torch.zeros(B, 128, dtype=torch.int32)} if numbered else {}
    backward(*flashlin.mamba_chunk_scan_combined(x, zeros(B, 128, H), heads, B=groups, C=groups,
                                                 chunk_size=256, D=heads, z=x, dt_bias=heads,
                                                 initial_states=zeros(B, H, P, N), dt_softplus=True,
                                                 return_final_states=True, **given))


def mamba_layer(dtype: torch.dtype, numbered: bool = True) -> None:
    H, P, N = 8, 64, 128
    D, C = H * P, H * P + 2 * N
    seq_idx = torch.zeros(2, 128, dtype=torch.int32) if numbered else None
    backward(flashlin.mamba_split_conv1d_scan_combined(
        zeros(2, 128, D + C + H, dtype=dtype), zeros(C, 4, dtype=dtype), zeros(C, dtype=dtype), zeros(H),
        zeros(H), zeros(H), 256, headdim=P, seq_idx=seq_idx, rmsnorm_weight=zeros(D, dtype=dtype),
        outproj_weight=zeros(32, D, dtype=dtype), norm_before_gate=False))


@torch.no_grad()
def updating_states(dtype: torch.dtype, heads: bool = True) -> None:
    """As Mamba2 calls it, or as Mamba1 does."""
    if not heads:
        x, state, groups = zeros(2, 5120, dtype=dtype), zeros(2, 5120, 16), zeros(2, 16, dtype=dtype)
        flashlin.selective_state_update(state, x, x, A=zeros(5120, 16), B=groups, C=groups, D=zeros(5120),
                                        z=x, dt_bias=zeros(5120), dt_softplus=True)
        return
    H, P, N = 80, 64, 128
    x, state, groups = zeros(2, H, P, dtype=dtype), zeros(2, H, P, N), zeros(2, 1, N, dtype=dtype)
    dt, of_heads = zeros(2, H, 1, dtype=dtype).expand(2, H, P), zeros(H, 1).expand(H, P)
    flashlin.selective_state_update(state, x, dt, A=zeros(H, 1, 1).expand(H, P, N), B=groups, C=groups,
                                    D=of_heads, z=x, dt_bias=of_heads, dt_softplus=True)


def scanning_channels(dtype: torch.dtype, N: int = 16) -> None:
    """As Mamba1's layers call it: u and z are slices of a projection, and what belongs to channels is
    float32."""
    D = 1024
    u, z = zeros(2, 64, 2 * D, dtype=dtype).mT.chunk(2, 1)
    B, C = zeros(2, 64, 2 * N, dtype=dtype).mT.chunk(2, 1)
    backward(*flashlin.selective_scan_fn(u, zeros(2, D, 64, dtype=dtype), zeros(D, N), B=B, C=C, D=zeros(D),
                                         z=z, delta_bias=zeros(D), delta_softplus=True,
                                         return_last_state=True))


def convolving_channels_first(dtype: torch.dtype) -> None:
    x = zeros(2, 64, 1024, dtype=dtype).transpose(1, 2)
    backward(*flashlin.causal_conv1d_fn(x, zeros(1024, 4, dtype=dtype), zeros(1024, dtype=dtype),
                                        initial_states=zeros(2, 1024, 3, dtype=dtype),
                                        return_final_states=True, activation="silu"))


@torch.no_grad()
def convolving_in_place(dtype: torch.dtype, ring: bool = False) -> None:
    given = {"cache_seqlens": torch.zeros(2, dtype=torch.int32),
             "conv_state_indices": torch.arange(2, dtype=torch.int32)} if ring else {}
    flashlin.mamba_causal_conv1d_update(zeros(2, 1024, dtype=dtype), zeros(2, 1024, 4, dtype=dtype),
                                        zeros(1024, 4, dtype=dtype), zeros(1024, dtype=dtype), "silu",
                                        **given)


def mamba_norm(op: str, dtype: torch.dtype, **options: Any) -> None:
    x, weight = zeros(4, 64, 2048, dtype=dtype), zeros(2048, dtype=dtype)
    backward(getattr(flashlin, op)(x, weight, None, x, **options))


def elementwise(op: str, dtype: torch.dtype, H: int = 32, K: int = 64, **options: Any) -> None:
    """Parameters are float32 for gates, as layers have them, and of the tensors' dtype for RWKV-7."""
    rows, heads, mix = zeros(2, 64, H * K, dtype=dtype), zeros(2, 64, H, K, dtype=dtype), zeros(H * K,
                                                                                                dtype=dtype)
    tensors = {"fused_gdn_gate": (zeros(2, 64, H, dtype=dtype), zeros(H), zeros(H)),
               "fused_kda_gate": (heads, zeros(H), zeros(H * K)),
               "fused_addcmul_rwkv7": (rows, rows, *[mix] * 6), "fused_k_rwkv7": (rows, rows, mix),
               "gate_output_correction": (rows, heads, heads, zeros(H, K, dtype=dtype), heads, rows)}
    found = getattr(flashlin, op)(*tensors[op], **options)
    backward(*(found if isinstance(found, tuple) else (found,)))


def rotating(dtype: torch.dtype, D: int, R: int, packed: bool = False, **options: Any) -> None:
    table = torch.zeros(64, R, dtype=dtype)
    given: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 30, 64]),
                             "seqlen_offsets": torch.zeros(2, dtype=torch.int32)} if packed else {}
    backward(flashlin.rotary_embedding(zeros(1 if packed else 2, 64, 8, D, dtype=dtype), table, table,
                                       **options, **given))


def loss(dtype: torch.dtype, V: int, **options: Any) -> None:
    backward(flashlin.cross_entropy_loss(zeros(8, V, dtype=dtype), torch.zeros(8, dtype=torch.int64),
                                         **options)[0])


def linear_loss(dtype: torch.dtype, V: int) -> None:
    backward(flashlin.fused_linear_cross_entropy_loss(zeros(128, 64, dtype=dtype),
                                                      torch.zeros(128, dtype=torch.int64),
                                                      zeros(V, 64, dtype=dtype)))


def as_in_a_case(case: Case, dtype: torch.dtype) -> None:
    tensors = case.make(dtype, torch.Generator().manual_seed(0))
    with torch.set_grad_enabled(not PUBLIC[case.op].in_place):
        for name, x in tensors.items():
            x.requires_grad_(torch.is_grad_enabled() and x.is_floating_point() and name not in case.constant)
        backward(*case.call(**tensors).values())


# Head sizes by dtype: training in bf16 at every size, fp32 where somebody checks a model, fp16 once.
SIZES = ((BF16, 128), (BF16, 64), (BF16, 256), (FP16, 128), (FP32, 64), (FP32, 128))
DTYPES = (BF16, FP16, FP32)
# Ops over q, k and v, and what else they are always called with: by the op's name, or by that without chunk_
# and so on.
GATES = {"simple_gla": ("g",), "retention": (), "linear_attn": (), "lightning_attn": (),
         "delta_rule": ("beta",), "gated_delta_rule": ("g", "beta"), "gla": ("g_vector",),
         "fused_recurrent_gla": ("gk",), "kda": ("g_vector", "beta"), "rwkv6": ("w", "u"),
         "rwkv7": ("w", "a", "b"), "fused_mul_recurrent_rwkv7": ("w", "kk", "a"),
         "dplr_delta_rule": ("a", "b", "gk"), "iplr_delta_rule": ("a", "b")}
OPTIONS: dict[str, dict[str, Any]] = {"linear_attn": {"normalize": False},
                                      "lightning_attn": {"layer_idx": 1, "num_layers": 4}}
INSIDE: dict[str, Any] = {"gates": ("g", "beta", "A_log", "dt_bias"), "HV": 8,
                          "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
          "use_beta_sigmoid_in_kernel": True}


def calls() -> Iterator[Call]:
    """Every public op of ``dispatch.OPS`` (tests hold it to that), each option at the size most layers
    have."""
    written = set()
    for call in _written():
        written.add(call.op)
        yield call
    for op in dispatch.OPS:
        cases = [case for case in CASES if case.quick and case.op == op and op not in written]
        for case, dtype in itertools.product(cases, DTYPES):
            yield _call(op, dtype, case.id, as_in_a_case, case, dtype)


def _written() -> Iterator[Call]:
    for op, (_, mode) in dispatch.OPS.items():
        if op in GATES or _family(op) in GATES:
            yield from _over_sequences(op, mode)
    yield _sequences("chunk_linear_attn", BF16, 128, "normalised", normalize=True, state=False)
    for op in ("chunk_simple_gla", "chunk_gated_delta_rule", "chunk_gla"):
        yield _sequences(op, BF16, 64, "V=32", V=32)
    yield _sequences("chunk_gated_delta_rule", BF16, 128, "HV=8, gates in kernel", **INSIDE)
    yield _sequences("fused_recurrent_gated_delta_rule", BF16, 128, "decoding, HV=8, gates in kernel",
                     decode=True, **INSIDE)
    yield _sequences("fused_recurrent_gated_delta_rule", BF16, 128, "gk gv", gates=("gk", "gv", "beta"))
    yield _sequences("chunk_kda", BF16, 128, "HV=8, gates in kernel",
                     **{**INSIDE, "gates": ("g_vector", "beta", "A_log", "dt_bias_vector")})
    yield _sequences("fused_recurrent_kda", BF16, 128, "decoding, HV=8, gates in kernel", decode=True,
                     lower_bound=-5.0, **{**INSIDE, "gates": ("g_vector", "beta", "A_log", "dt_bias_vector")})
    yield _sequences("fused_recurrent_gla", BF16, 128, "gk gv", gates=("gk", "gv"))
    yield _sequences("fused_recurrent_delta_rule", FP32, 64, "headwise beta", gates=("beta_headwise",))
    for dtype in DTYPES:
        for op, D in (("rms_norm", 2048), ("layer_norm", 2048), ("l2norm", 128)):
            yield _call(op, dtype, f"D={D}", norm, op, dtype, D)
        for op in ("rms_norm_gated", "layer_norm_gated"):
            yield _call(op, dtype, "D=128", norm, op, dtype, 128, gated=True)
        yield _call("causal_conv1d", dtype, "W=4", convolution, dtype, 4)
        yield _call("causal_conv1d_update", dtype, "W=4", convolving_a_token, dtype, 4)
        yield _call("token_shift", dtype, "D=1024", shifting, dtype)
        yield _call("chunk_hgrn", dtype, "D=1024", recurrence, "chunk_hgrn", dtype)
        yield _call("mamba_chunk_scan_combined", dtype, "P=64 N=128", scanning, dtype)
        yield _call("selective_state_update", dtype, "P=64 N=128", updating_states, dtype)
        yield _call("selective_scan_fn", dtype, "N=16", scanning_channels, dtype)
        yield _call("causal_conv1d_fn", dtype, "W=4, states", convolving_channels_first, dtype)
        yield _call("mamba_causal_conv1d_update", dtype, "W=4", convolving_in_place, dtype)
        for op in ("fused_gdn_gate", "fused_kda_gate", "fused_addcmul_rwkv7", "fused_k_rwkv7",
                   "gate_output_correction"):
            yield _call(op, dtype, "H=32 K=64", elementwise, op, dtype)
        yield _call("rotary_embedding", dtype, "D=128", rotating, dtype, 128, 64)
        yield _call("cross_entropy_loss", dtype, "V=32000", loss, dtype, 32000)
    yield _call("rotary_embedding", BF16, "D=128 of 160, packed, interleaved", rotating, BF16, 160, 64,
                packed=True, interleaved=True)
    yield _call("cross_entropy_loss", BF16, "V=50257, all terms", loss, BF16, 50257, label_smoothing=0.1,
                lse_square_scale=1e-4, logit_softcapping=30.0)
    yield _call("fused_linear_cross_entropy_loss", BF16, "V=32000", linear_loss, BF16, 32000)
    yield _call("group_norm", BF16, "D=2048 in 8", norm, "group_norm", BF16, 2048, num_groups=8)
    yield _call("rms_norm", BF16, "D=8192 residual", norm, "rms_norm", BF16, 8192, prenorm=True,
                residual=torch.zeros(4, 64, 8192, dtype=BF16))
    yield _call("token_shift", BF16, "D=1024 packed, cache", shifting, BF16, packed=True)
    yield _call("chunk_hgrn", BF16, "D=1024 packed", recurrence, "chunk_hgrn", BF16, packed=True)
    yield _call("fused_recurrent_hgrn", BF16, "D=1024 decoding", recurring_once, "fused_recurrent_hgrn", BF16)
    yield _call("fused_kda_gate", BF16, "K=128, lower bound", elementwise, "fused_kda_gate", BF16, K=128,
                lower_bound=-5.0)
    yield _call("mamba_chunk_scan_combined", BF16, "P=64 N=128 packed", scanning, BF16, packed=True)
    yield _call("mamba_chunk_scan_combined", BF16, "P=64 N=128 numbered", scanning, BF16, numbered=True)
    yield _call("mamba_split_conv1d_scan_combined", BF16, "P=64 N=128", mamba_layer, BF16)
    yield _call("mamba_split_conv1d_scan_combined", BF16, "P=64 N=128, one sequence", mamba_layer, BF16,
                numbered=False)
    yield _call("selective_scan_fn", BF16, "N=64", scanning_channels, BF16, 64)
    yield _call("selective_state_update", BF16, "5120 channels of N=16", updating_states, BF16, heads=False)
    yield _call("mamba_causal_conv1d_update", BF16, "W=4 ring in a pool", convolving_in_place, BF16,
                ring=True)
    yield _call("rmsnorm_fn", BF16, "D=2048 in 8", mamba_norm, "rmsnorm_fn", BF16, group_size=256)
    yield _call("layernorm_fn", BF16, "D=2048, gate first", mamba_norm, "layernorm_fn", BF16,
                norm_before_gate=False)
    yield _call("causal_conv1d", BF16, "W=4 packed, states", convolution, BF16, 4, packed=True, state=True)


def _over_sequences(op: str, mode: str) -> Iterator[Call]:
    if op.startswith("parallel_"):
        yield _call(op, BF16, "D=128", scores, op, BF16, 128)
        yield _call(op, BF16, "D=128 scores", scores, op, BF16, 128, output_attentions=True)
        return
    yield _sequences(op, BF16, 128)
    if op.startswith("fused_chunk_"):  # the kernels of chunk_
        return
    if mode == "chunk":
        yield _sequences(op, BF16, 128, "packed", packed=True)
    else:
        yield _sequences(op, BF16, 128, "decoding", decode=True)
    if mode == "chunk" and GATES[_family(op)]:
        yield _sequences(op, BF16, 128, "no state", state=False)
        for dtype, D in SIZES[1:]:
            yield _sequences(op, dtype, D)


def _family(op: str) -> str:
    for prefix in ("parallel_", "fused_", "chunk_", "recurrent_"):
        op = op.removeprefix(prefix)
    return op


def _sequences(op: str, dtype: torch.dtype, D: int, special: str = "", decode: bool = False,
               **options: Any) -> Call:
    given = {"gates": GATES.get(op, GATES.get(_family(op), ())), **OPTIONS.get(_family(op), {}), **options}
    return _call(op, dtype, f"D={D} {special}", decoding if decode else sequences, op, dtype, D, **given)


def _call(op: str, dtype: torch.dtype, special: str, function: Callable[..., None], *args: Any,
          **options: Any) -> Call:
    return Call(op, f"{str(dtype).removeprefix('torch.')} {special}".strip(),
                partial(function, *args, **options))
