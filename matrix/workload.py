"""List the calls that the matrix plans and compiles: every public op, forward and backward.

For most ops, this module writes down calls with the arguments and sizes that layers use. The other ops are
called as in their quick cases. All tensors are on the CPU. Inside ``recording`` no kernel is launched,
because shapes and dtypes are enough to plan the launches of a call.
"""
from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

import flashlin
from flashlin import dispatch, serving
from flashlin.compat.known_issues import KNOWN_ISSUES
from flashlin.compat.target import Target
from flashlin.guards.plan_types import Plan, UnsupportedError
from flashlin.kernels.families import PUBLIC
from flashlin.testing.cases import CASES
from flashlin.testing.compare import Case
from flashlin.testing.record import Recorded, recording

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Own = Callable[..., torch.Tensor]  # makes zeros of a shape in the dtype of the call
Arguments = Callable[[Own], dict[str, Any]]


class Call(NamedTuple):
    """One call of a public op, with its backward pass if it has one.

    op: public name of the op.
    label: dtype, sizes and options of the call, such as ``bfloat16 D=128 packed``.
    run: makes the call.
    """
    op: str
    label: str
    run: Callable[[], None]

    def __str__(self) -> str:
        return f"{self.op} {self.label}"


class Seen(NamedTuple):
    """The plans and the launches of one call on a target.

    plans: the plan of the op, and those of the ops that it calls first, such as norms and convolutions.
    launches: the launches that the call would make.
    """
    plans: tuple[Plan, ...]
    launches: tuple[Recorded, ...]


# The ops of each chunked family that most models train with, and the labels of their main calls in 16 bits.
MAIN = {"chunk_simple_gla", "chunk_gated_delta_rule", "chunk_gla", "chunk_rwkv6", "chunk_kda", "chunk_rwkv7",
        "mamba_chunk_scan_combined", "selective_scan_fn"}
MAIN_SHAPES = re.compile(r"(bfloat16|float16) (D=(64|128|256)|P=64 N=128|N=16)")


def is_main(op: str, label: str) -> bool:
    return op in MAIN and MAIN_SHAPES.fullmatch(label) is not None


# Codes of the reasons why no kernel at all can run on a target.
WITHOUT_KERNELS = {"backend", "triton", *(issue.id for issue in KNOWN_ISSUES if issue.remedies == ("torch_path",)
                                          and not issue.traits and issue.min_warps == issue.min_stages == 1)}


class _NoKernels(Exception):
    """An exception that ends a call early on a target without kernels.

    The rest of such a call would be plain torch, which takes long and launches no kernel.
    """


def seen(call: Call, target: Target) -> Seen:
    """Make a call as if on ``target``, and return its plans and launches without launching a kernel.

    A refusal also returns a plan. Its reasons say why the call is refused.
    """
    plans: list[Plan] = []

    def note(plan: Plan) -> None:
        plans.append(plan)
        if plan.asked.op == call.op and any(reason.code in WITHOUT_KERNELS for reason, _ in plan.steps):
            raise _NoKernels
    with recording(target) as launches, warnings.catch_warnings(), dispatch.watching(note):
        warnings.simplefilter("ignore")  # the plans contain the remedies, so no warnings are needed
        with suppress(UnsupportedError, _NoKernels):  # the last plan contains the reason
            call.run()
    return Seen(tuple(dict.fromkeys(plans)), tuple(launches))


def zeros(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, requires_grad=torch.is_grad_enabled())


def edges(*tokens: int) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int32)


def made(op: str, dtype: torch.dtype, arguments: Arguments) -> None:
    """Call an op with the given arguments, and run backward unless the op works in place.

    arguments: a function that returns the keyword arguments of the call. It gets a function that makes zeros
        in ``dtype``.
    """
    with torch.set_grad_enabled(not PUBLIC[op].in_place):
        outputs = getattr(flashlin, op)(**arguments(partial(zeros, dtype=dtype)))
        backward(*(outputs if isinstance(outputs, tuple) else (outputs,)))


def as_in_a_case(case: Case, dtype: torch.dtype, gradients: bool) -> None:
    """Make the call of a case in a dtype, and run backward if ``gradients`` is True."""
    tensors = case.make(dtype, torch.Generator().manual_seed(0))
    with torch.set_grad_enabled(gradients):
        for name, x in tensors.items():
            x.requires_grad_(gradients and x.is_floating_point() and name not in case.constant)
        backward(*case.call(**tensors).values())


def backward(*outputs: Any) -> None:
    """Run backward of all outputs that require gradients in one call, with zeros as their gradients."""
    wanted = [x for x in outputs if isinstance(x, torch.Tensor) and x.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [torch.zeros_like(x) for x in wanted])


def sequences(
    own: Own,
    op: str,
    D: int,
    *,
    T: int = 128,
    HV: int = 4,
    V: int = 0,
    packed: bool = False,
    gates: tuple[str, ...] = (),
    state: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Return the arguments of an op with q and k [B, T, 4, D] and v [B, T, HV, V].

    V: value size of a head. 0 means D.
    packed: pass two sequences as one row with ``cu_seqlens``. Otherwise B is 2.
    own: makes zeros of a shape in the dtype of the call.
    gates: names of the other tensors to pass. ``g_vector`` is a g with one value for each key channel, and
        ``beta_headwise`` is a beta of that shape. The vectors a, b, kk and p have the shape [B, T, HV, D].
    state: pass an initial state and request the final state.
    options: other keywords of the op.

    Gates and states are float32, as in layers. The other tensors have the dtype of the call.
    """
    B, V = 1 if packed else 2, V or D
    rows = T * options.get("num_householder", 1)  # the rows of k, v and beta in a delta product
    shapes = {"g": (B, T, HV), "beta": (B, rows, HV), "gk": (B, T, HV, D), "gv": (B, T, HV, D),
              "beta_headwise": (B, T, HV, D), "g_vector": (B, T, HV, D), "w": (B, T, HV, D), "u": (HV, D),
              "A_log": (HV,), "dt_bias": (HV,), "dt_bias_vector": (HV * D,)}
    given = {"r" if "rwkv" in op else "q": own(B, T, 4, D), "k": own(B, rows, 4, D),
             "v": own(B, rows, HV, V)}
    for gate in gates:
        name = gate.removesuffix("_headwise").removesuffix("_vector")
        given[name] = zeros(*shapes[gate]) if gate in shapes else own(B, T, HV, D)
    if packed:
        given["cu_seqlens"] = edges(0, 50, T)
    if op.startswith("parallel_"):
        return {**given, **options}
    if state:
        given["initial_state"] = zeros(2, HV, D, V)
    return {**given, "output_final_state": state, **options}


# Dtypes and head sizes: 16-bit dtypes at every size, as in training, and fp32 at sizes for checks of a model.
SIZES = ((BF16, 128), (BF16, 64), (BF16, 256), (FP16, 128), (FP16, 64), (FP16, 256), (FP32, 64), (FP32, 128))
DTYPES = (BF16, FP16, FP32)
# Ops with q, k and v -> the other tensors of every call. A key is the name of the op, or its name without
# prefixes such as chunk_.
GATES = {"simple_gla": ("g",), "retention": (), "linear_attn": (), "lightning_attn": (),
         "delta_rule": ("beta",), "gated_delta_rule": ("g", "beta"), "gla": ("g_vector",),
         "fused_recurrent_gla": ("gk",), "kda": ("g_vector", "beta"), "rwkv6": ("w", "u"),
         "rwkv7": ("w", "a", "b"), "fused_mul_recurrent_rwkv7": ("w", "kk", "a"),
         "dplr_delta_rule": ("a", "b", "gk"), "iplr_delta_rule": ("a", "b"),
         "gated_delta_product": ("g", "beta"), "gdn2": ("g_vector", "b", "w"), "comba": ("p", "g", "beta")}
OPTIONS: dict[str, dict[str, Any]] = {"gated_delta_product": {"num_householder": 2},
                                      "linear_attn": {"normalize": False},
                                      "lightning_attn": {"layer_idx": 1, "num_layers": 4}}
INSIDE: dict[str, Any] = {"gates": ("g", "beta", "A_log", "dt_bias"), "HV": 8,
                          "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
                          "use_beta_sigmoid_in_kernel": True}
INSIDE_KDA = {**INSIDE, "gates": ("g_vector", "beta", "A_log", "dt_bias_vector")}


def selective_scan(own: Own, N: int, T: int = 64, together: bool = False) -> dict[str, Any]:
    """Return the arguments of ``selective_scan_fn`` as the layers of Mamba1 pass them.

    u and z are slices of one projection, and the parameters of channels are float32.

    N: size of a state.
    together: the tokens of a channel are contiguous in memory, as in the layers of mamba_ssm.
    """
    D = 1024
    (u, z), (B, C) = [(own(2, wide, T) if together else own(2, T, wide).mT).chunk(2, 1)
                      for wide in (2 * D, 2 * N)]
    return dict(u=u, delta=own(2, D, T), A=zeros(D, N), B=B, C=C, D=zeros(D), z=z, delta_bias=zeros(D),
                delta_softplus=True, return_last_state=True)


def state_update_of_mamba2(own: Own) -> dict[str, Any]:
    H, P, N = 80, 64, 128
    return dict(state=zeros(2, H, P, N), x=own(2, H, P), dt=own(2, H, 1).expand(2, H, P),
                A=zeros(H, 1, 1).expand(H, P, N), B=own(2, 1, N), C=own(2, 1, N),
                D=zeros(H, 1).expand(H, P), z=own(2, H, P), dt_bias=zeros(H, 1).expand(H, P),
                dt_softplus=True)


def state_update_of_mamba1(own: Own) -> dict[str, Any]:
    D, N = 5120, 16
    return dict(state=zeros(2, D, N), x=own(2, D), dt=own(2, D), A=zeros(D, N), B=own(2, N), C=own(2, N),
                D=zeros(D), z=own(2, D), dt_bias=zeros(D), dt_softplus=True)


def scan_of_mamba2(own: Own, B: int = 2, **special: Any) -> dict[str, Any]:
    """Return the arguments of ``mamba_chunk_scan_combined``, with dt and head parameters in float32."""
    H, P, N = 8, 64, 128
    return dict(x=own(B, 128, H, P), dt=zeros(B, 128, H), A=zeros(H), B=own(B, 128, 1, N),
                C=own(B, 128, 1, N), chunk_size=256, D=zeros(H), z=own(B, 128, H, P), dt_bias=zeros(H),
                initial_states=zeros(B, H, P, N), dt_softplus=True, return_final_states=True, **special)


def scan_of_mamba3(own: Own, B: int = 2, **special: Any) -> dict[str, Any]:
    """Return the arguments of ``mamba3_siso_combined`` as its layer passes them.

    The tensors that a model in 16 bits computes in float32 are float32 here.
    """
    H, P, N, R = 8, 64, 128, 32
    return dict(Q=own(B, 128, 1, N), K=own(B, 128, 1, N), V=own(B, 128, H, P), ADT=zeros(B, H, 128),
                DT=zeros(B, H, 128), Trap=own(B, H, 128), Q_bias=zeros(H, N), K_bias=zeros(H, N),
                Angles=zeros(B, 128, H, R), D=zeros(H), Z=own(B, 128, H, P), return_final_states=True,
                **special)


def layer_of_mamba2(own: Own, **special: Any) -> dict[str, Any]:
    H, P, N = 8, 64, 128
    D, C = H * P, H * P + 2 * N
    return dict(zxbcdt=own(2, 128, D + C + H), conv1d_weight=own(C, 4), conv1d_bias=own(C), dt_bias=zeros(H),
                A=zeros(H), D=zeros(H), chunk_size=256, headdim=P, rmsnorm_weight=own(D),
                outproj_weight=own(32, D), norm_before_gate=False, **special)


def hgrn(own: Own, B: int, T: int, **special: Any) -> dict[str, Any]:
    """Return the arguments of an HGRN op with 1,024 channels and B rows of T tokens.

    With the small B of these calls, the chunked op splits long sequences into segments.
    """
    return dict(x=own(B, T, 1024), g=own(B, T, 1024), initial_state=zeros(2, 1024), output_final_state=True,
                **special)


def convolution(own: Own, *rows: int, **special: Any) -> dict[str, Any]:
    return dict(x=own(*rows, 1024), weight=own(1024, 4), bias=own(1024), activation="silu", **special)


def convolution_of_a_token(own: Own, **special: Any) -> dict[str, Any]:
    return convolution(own, 2, conv_state=own(2, 1024, 4), **special)


def on_a_pool(own: Own, **gate: torch.Tensor) -> dict[str, Any]:
    """Return the arguments of ``serving.decode`` for two requests with one draft token each.

    gate: the tensors g, A_log and dt_bias. The last two are float32.
    """
    return dict(q=own(2, 2, 4, 128), k=own(2, 2, 4, 128), v=own(2, 2, 8, 128), beta=own(2, 2, 8),
                states=zeros(9, 8, 128, 128), indices=edges(0, 1, 2, 3).view(2, 2),
                num_accepted_tokens=edges(1, 2), use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True, **gate)


@torch.no_grad()
def served() -> Iterator[Call]:
    """Yield calls of ``flashlin.serving.decode`` on a pool of states.

    A call has the name of the op that computes the same function, because it is planned as that op.
    """
    def own(*shape: int) -> torch.Tensor:
        return zeros(*shape, dtype=BF16)
    for op, g, biases in (("fused_recurrent_gated_delta_rule", own(2, 2, 8), 8),
                          ("fused_recurrent_kda", own(2, 2, 8, 128), 8 * 128)):
        arguments = on_a_pool(own, g=g, A_log=zeros(8), dt_bias=zeros(biases))
        yield _call(op, BF16, "D=128 on a pool, HV=8, gates in kernel", partial(called, arguments))


def called(arguments: dict[str, Any]) -> None:
    serving.decode(**arguments)


def rotary(own: Own, B: int, D: int, **special: Any) -> dict[str, Any]:
    return dict(x=own(B, 64, 8, D), cos=own(64, 64).detach(), sin=own(64, 64).detach(), **special)


def norm(own: Own, D: int = 2048, bias: bool = False, **special: Any) -> dict[str, Any]:
    return dict(x=own(4, 64, D), weight=own(D), bias=own(D) if bias else None, **special)


def targets(rows: int) -> torch.Tensor:
    return torch.zeros(rows, dtype=torch.int64)


# Calls of the other ops: op, label and arguments. Parameters of gates are float32, as in layers; those of
# RWKV-7 have the dtype of the tensors.
IN_EVERY_DTYPE: tuple[tuple[str, str, Arguments], ...] = (
    ("rms_norm", "D=2048", norm), ("layer_norm", "D=2048", partial(norm, bias=True)),
    ("l2norm", "D=128", lambda own: dict(x=own(4, 64, 128))),
    ("rms_norm_gated", "D=128", lambda own: norm(own, 128, g=own(4, 64, 128))),
    ("layer_norm_gated", "D=128", lambda own: norm(own, 128, True, g=own(4, 64, 128))),
    ("causal_conv1d", "W=4", lambda own: convolution(own, 2, 64)),
    ("causal_conv1d_update", "W=4",
     lambda own: dict(x=own(2, 1024), cache=own(2, 1024, 4), weight=own(1024, 4), activation="silu")),
    ("token_shift", "D=1024", lambda own: dict(x=own(2, 64, 1024))),
    ("chunk_hgrn", "D=1024", lambda own: hgrn(own, 2, 1024)),
    ("mamba_chunk_scan_combined", "P=64 N=128", scan_of_mamba2),
    ("mamba3_siso_combined", "P=64 N=128", scan_of_mamba3),
    ("selective_state_update", "P=64 N=128", state_update_of_mamba2),
    ("selective_scan_fn", "N=16", lambda own: selective_scan(own, 16)),
    ("causal_conv1d_fn", "W=4, states",
     lambda own: dict(x=own(2, 64, 1024).mT, weight=own(1024, 4), bias=own(1024),
                      initial_states=own(2, 1024, 3), return_final_states=True, activation="silu")),
    ("mamba_causal_conv1d_update", "W=4", convolution_of_a_token),
    ("fused_gdn_gate", "H=32 K=64", lambda own: dict(g=own(2, 64, 32), A_log=zeros(32), dt_bias=zeros(32))),
    ("fused_kda_gate", "H=32 K=64",
     lambda own: dict(g=own(2, 64, 32, 64), A_log=zeros(32), dt_bias=zeros(2048))),
    ("fused_addcmul_rwkv7", "H=32 K=64",
     lambda own: dict(hidden_states=own(2, 64, 2048), delta=own(2, 64, 2048),
                      **{name: own(2048) for name in ("xr", "xw", "xk", "xv", "xa", "xg")})),
    ("fused_k_rwkv7", "H=32 K=64", lambda own: dict(k=own(2, 64, 2048), a=own(2, 64, 2048), ka=own(2048))),
    ("gate_output_correction", "H=32 K=64",
     lambda own: dict(o=own(2, 64, 2048), r=own(2, 64, 32, 64), k=own(2, 64, 32, 64), r_k=own(32, 64),
                      v=own(2, 64, 32, 64), g=own(2, 64, 2048))),
    ("rotary_embedding", "D=128", lambda own: rotary(own, 2, 128)),
    ("cross_entropy_loss", "V=32000", lambda own: dict(logits=own(8, 32000), target=targets(8))))
IN_BFLOAT16: tuple[tuple[str, str, Arguments], ...] = (
    ("rotary_embedding", "D=128 of 160, packed, interleaved",
     lambda own: rotary(own, 1, 160, interleaved=True, cu_seqlens=edges(0, 30, 64).long(),
                        seqlen_offsets=edges(0, 0))),
    ("cross_entropy_loss", "V=50257, all terms",
     lambda own: dict(logits=own(8, 50257), target=targets(8), label_smoothing=0.1, lse_square_scale=1e-4,
                      logit_softcapping=30.0)),
    ("fused_linear_cross_entropy_loss", "V=32000",
     lambda own: dict(x=own(128, 64), target=targets(128), weight=own(32000, 64))),
    ("group_norm", "D=2048 in 8", partial(norm, bias=True, num_groups=8)),
    ("rms_norm", "D=8192 residual",
     lambda own: norm(own, 8192, prenorm=True, residual=own(4, 64, 8192).detach())),
    ("token_shift", "D=1024 packed, cache",
     lambda own: dict(x=own(1, 64, 1024), cu_seqlens=edges(0, 30, 64), cache=own(2, 1024),
                      output_cache=True)),
    ("chunk_hgrn", "D=1024 packed", lambda own: hgrn(own, 1, 1024, cu_seqlens=edges(0, 50, 1024))),
    ("fused_recurrent_hgrn", "D=1024 decoding", torch.no_grad()(lambda own: hgrn(own, 2, 1))),
    ("fused_kda_gate", "K=128, lower bound",
     lambda own: dict(g=own(2, 64, 32, 128), A_log=zeros(32), dt_bias=zeros(4096), lower_bound=-5.0)),
    ("mamba_chunk_scan_combined", "P=64 N=128 packed",
     lambda own: scan_of_mamba2(own, 1, cu_seqlens=edges(0, 50, 128), return_varlen_states=True)),
    ("mamba_chunk_scan_combined", "P=64 N=128 numbered",
     lambda own: scan_of_mamba2(own, seq_idx=zeros(2, 128).int())),
    ("mamba3_siso_combined", "P=64 N=128 packed",
     lambda own: scan_of_mamba3(own, 1, cu_seqlens=edges(0, 50, 128))),
    ("mamba_split_conv1d_scan_combined", "P=64 N=128",
     lambda own: layer_of_mamba2(own, seq_idx=zeros(2, 128).int())),
    ("mamba_split_conv1d_scan_combined", "P=64 N=128, one sequence", layer_of_mamba2),
    ("selective_scan_fn", "N=64", lambda own: selective_scan(own, 64)),
    ("selective_scan_fn", "N=16, tokens together", lambda own: selective_scan(own, 16, together=True)),
    ("selective_scan_fn", "N=16, 61 tokens", lambda own: selective_scan(own, 16, 61)),
    ("selective_state_update", "5120 channels of N=16", state_update_of_mamba1),
    ("mamba_causal_conv1d_update", "W=4 ring in a pool",
     lambda own: convolution_of_a_token(own, cache_seqlens=edges(0, 0), conv_state_indices=edges(0, 1))),
    ("rmsnorm_fn", "D=2048 in 8", lambda own: norm(own, z=own(4, 64, 2048), group_size=256)),
    ("layernorm_fn", "D=2048, gate first",
     lambda own: norm(own, z=own(4, 64, 2048), norm_before_gate=False)),
    ("causal_conv1d", "W=4 packed, states",
     lambda own: convolution(own, 1, 64, cu_seqlens=edges(0, 30, 64), initial_state=own(2, 1024, 4),
                             output_final_state=True)))


def calls() -> Iterator[Call]:
    """Yield calls of every public op in ``dispatch.OPS``.

    Each option is called at the size that most layers have. A test checks that no op is missing.
    """
    written = set()
    for call in _written():
        written.add(call.op)
        yield call
    for op in dispatch.OPS:
        cases = [case for case in CASES if case.quick and case.op == op and op not in written]
        for case, dtype in itertools.product(cases, DTYPES):
            yield _call(op, dtype, case.id, partial(as_in_a_case, case, dtype, not PUBLIC[op].in_place))


def _written() -> Iterator[Call]:
    for op, (_, mode) in dispatch.OPS.items():
        if op in GATES or _family(op) in GATES:
            yield from _over_sequences(op, mode)
    yield _sequences("chunk_linear_attn", BF16, 128, "normalised", normalize=True, state=False)
    for op in ("chunk_simple_gla", "chunk_gated_delta_rule", "chunk_gla"):
        yield _sequences(op, BF16, 64, "V=32", V=32)
    yield _sequences("chunk_gated_delta_rule", BF16, 128, "HV=8, gates in kernel", **INSIDE)
    yield _sequences("fused_recurrent_gated_delta_rule", BF16, 128, "decoding, HV=8, gates in kernel", T=1,
                     **INSIDE)
    yield _sequences("fused_recurrent_gated_delta_rule", BF16, 128, "gk gv", gates=("gk", "gv", "beta"))
    yield _sequences("chunk_kda", BF16, 128, "HV=8, gates in kernel", **INSIDE_KDA)
    yield _sequences("fused_recurrent_kda", BF16, 128, "decoding, HV=8, gates in kernel", T=1,
                     lower_bound=-5.0, **INSIDE_KDA)
    yield _sequences("fused_recurrent_gdn2", BF16, 128, "decoding, HV=8, gates in kernel", T=1, HV=8,
                     gates=("g_vector", "b", "w", "A_log", "dt_bias_vector"), use_qk_l2norm_in_kernel=True,
                     use_gate_in_kernel=True)
    yield from served()
    yield _sequences("fused_recurrent_gla", BF16, 128, "gk gv", gates=("gk", "gv"))
    yield _sequences("fused_recurrent_delta_rule", FP32, 64, "headwise beta", gates=("beta_headwise",))
    for dtype, others in (*((dtype, IN_EVERY_DTYPE) for dtype in DTYPES), (BF16, IN_BFLOAT16)):
        for op, special, arguments in others:
            yield _call(op, dtype, special, partial(made, op, dtype, arguments))


def _over_sequences(op: str, mode: str) -> Iterator[Call]:
    yield _sequences(op, BF16, 128)
    if op.startswith("parallel_"):
        yield _sequences(op, BF16, 128, "scores", output_attentions=True)
    elif op.startswith("fused_chunk_"):  # the same kernels as chunk_
        return
    elif mode == "chunk":
        yield _sequences(op, BF16, 128, "packed", packed=True)
        if GATES[_family(op)]:
            yield _sequences(op, BF16, 128, "no state", state=False)
            for dtype, D in SIZES[1:]:
                yield _sequences(op, dtype, D)
        for dtype, D in ((BF16, 128), (FP16, 128), (FP32, 64)):  # long enough to be split into segments
            yield _sequences(op, dtype, D, "in parts", T=1600, state=False)
        yield _sequences(op, BF16, 128, "in parts, packed", T=1600, packed=True)
    else:
        yield _sequences(op, BF16, 128, "decoding", T=1)


def _family(op: str) -> str:
    for prefix in ("parallel_", "fused_", "chunk_", "recurrent_"):
        op = op.removeprefix(prefix)
    return op


def _sequences(op: str, dtype: torch.dtype, D: int, special: str = "", **options: Any) -> Call:
    """Return a call of an op with q, k and v in a dtype, with heads of size D.

    special: the rest of its label.
    options: arguments of ``sequences``. A call with T=1 is a decoding step, without gradients.
    """
    given = {"gates": GATES.get(op, GATES.get(_family(op), ())), **OPTIONS.get(_family(op), {}), **options}
    arguments: Arguments = partial(sequences, op=op, D=D, **given)
    if given.get("T") == 1:
        arguments = torch.no_grad()(arguments)
    return _call(op, dtype, f"D={D} {special}", partial(made, op, dtype, arguments))


def _call(op: str, dtype: torch.dtype, special: str, run: Callable[[], None]) -> Call:
    return Call(op, f"{str(dtype).removeprefix('torch.')} {special}".strip(), run)
