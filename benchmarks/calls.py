"""The calls that benchmarks time: ops, shapes and inputs, and the bytes that each call must move."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


class Shape(NamedTuple):
    """The sizes of one call.

    B, T: batch and tokens.
    H: heads of q and k.
    D: size of a head. For norms and convolutions, D is the size of a token. For Mamba's scan, H is the number
        of channels and D the number of state columns.
    HV: heads of v; 0 for H.
    packed: number of sequences that share the row of tokens; 0 if not packed.
    """
    B: int
    T: int
    H: int
    D: int
    HV: int = 0
    packed: int = 0

    def __str__(self) -> str:
        heads = f"{self.H}/{self.HV}" if self.HV else str(self.H)
        return f"{self.B}x{self.T}x{heads}x{self.D}" + (f" in {self.packed}" if self.packed else "")

    def size(self, dimension: str) -> int:
        """Return the size of a dimension that ROLES names."""
        if dimension.isdigit():
            return int(dimension)
        if "*" in dimension:
            return math.prod(map(self.size, dimension.split("*")))
        if dimension == "2T":  # rows of a delta product with two steps per token
            return 2 * self.T
        return self.HV or self.H if dimension == "HV" else int(getattr(self, dimension))


BF16, FP32 = torch.bfloat16, torch.float32
# Dimensions and dtype of the arguments, by role.
ROLES: dict[str, tuple[str, torch.dtype]] = {
    "q": ("B T H D", BF16), "k": ("B T H D", BF16), "v": ("B T HV D", BF16), "unit": ("B T H D", BF16),
    "a": ("B T H D", BF16), "b": ("B T H D", BF16), "g": ("B T HV", FP32), "gk": ("B T HV D", FP32),
    "decay": ("B T HV", FP32),
    "beta": ("B T HV", BF16), "bonus": ("H D", BF16), "state": ("B HV D D", FP32),
    "erase": ("B T HV D", BF16), "write": ("B T HV D", BF16),
    "units": ("B 2T H D", BF16), "values": ("B 2T HV D", BF16), "betas": ("B 2T HV", BF16),
    # Mamba2: one key and query for all heads, with the usual 128 columns of a state
    "dt": ("B T H", FP32), "pole": ("H", FP32), "shared": ("B T 1 128", BF16),
    # Mamba-3: steps and decays are [B, H, T], and 32 of the 64 pairs of columns of a state are rotated
    "steps": ("B H T", FP32), "decays": ("B H T", FP32), "traps": ("B H T", BF16), "bias": ("H 128", FP32),
    "angles": ("B T H 32", FP32),
    # Mamba: H channels with D columns of state; a linear layer returns the layout channels_last
    "channels": ("B H T", BF16), "channels_last": ("B H T", BF16), "poles": ("H D", FP32),
    "columns": ("B D T", BF16), "weights": ("H", FP32),
    # norms and the convolution
    "weight": ("D", BF16), "tokens": ("B T D", BF16), "taps": ("D 4", BF16), "cache": ("B D 4", BF16),
    # inputs as layers pass them: raw gates and logits, and the parameters of a gate
    "raw_g": ("B T HV", BF16), "raw_gk": ("B T HV D", BF16), "logits": ("B T HV", BF16),
    "A_log": ("HV", FP32), "A_log_k": ("HV", FP32), "dt_bias": ("HV", FP32), "dt_bias_k": ("HV*D", FP32),
    "rwkv7_w": ("B T HV D", BF16),
    "raw_dt": ("B T H", BF16), "skip": ("H", FP32), "dt_bias_h": ("H", FP32)}


class Op(NamedTuple):
    """One op to time, and its counterpart in another package.

    name: public name, the same in both packages.
    home: module of the counterpart in fla or mamba_ssm.
    arguments: names of the arguments; ``name:role`` if the role has another name.
    shapes: shapes to time.
    output: role of the output.
    options: keywords of every call.
    refused: fla refuses the backward on Hopper under Triton 3.4 to 3.7.0
        (https://github.com/fla-org/flash-linear-attention/issues/640).
    gradients: also time a backward.
    keeps: request the final state.
    layer: the layer or model whose arguments the call has; "" for a plain call.
    backends: other packages that fla calls by default for this op, if they are installed. Such an op is also
        compared with fla's own Triton kernels.
    small: a shape for trying the benchmark itself.
    """
    name: str
    home: str
    arguments: str
    shapes: tuple[Shape, ...]
    output: str = "v"
    options: tuple[tuple[str, Any], ...] = ()
    refused: bool = False
    gradients: bool = True
    keeps: bool = False
    layer: str = ""
    backends: str = ""
    small: Shape = Shape(1, 66, 2, 16)

    @property
    def peer(self) -> str:
        return self.home.partition(".")[0]

    @property
    def label(self) -> str:
        """The name of the op, and the layer whose call it is."""
        return self.name + (f", as {self.layer} calls it" if self.layer else "")

    @property
    def roles(self) -> dict[str, str]:
        return {name: role or name
                for name, _, role in (argument.partition(":") for argument in self.arguments.split())}


SHAPES = (Shape(4, 4096, 32, 128), Shape(1, 32768, 8, 128), Shape(1, 8192, 32, 128), Shape(1, 8192, 2, 128),
          Shape(8, 1024, 8, 64), Shape(1, 32768, 8, 128, packed=32))
DECODING = tuple(Shape(B, 1, 16, 128) for B in (1, 32, 128))
# Rows of a norm, 128 MB each.
ROWS = (Shape(1, 16384, 1, 4096), Shape(1, 8192, 1, 8192), Shape(1, 524288, 1, 128))
MAMBA3 = "mamba_ssm.ops.triton.mamba3.mamba3_siso_combined"
MAMBA, MAMBA2 = "mamba_ssm.ops.selective_scan_interface", "mamba_ssm.ops.triton.ssd_combined"


def _both(family: str, arguments: str, decoding: str = "", more: tuple[Shape, ...] = (),
          **facts: Any) -> list[Op]:
    """Return the chunk op of a family and its token-by-token op for decoding.

    decoding: arguments of the second op, if they differ.
    more: additional shapes of the first op.
    """
    home = f"fla.ops.{family}"
    return [Op(f"chunk_{family}", home, arguments, SHAPES + more, **facts),
            Op(f"fused_recurrent_{family}", home, f"{decoding or arguments} initial_state:state", DECODING,
               gradients=False, keeps=True, small=Shape(2, 1, 2, 16))]


# Heads of q and k that several heads of v share, as in Qwen3-Next and Qwen3.5.
GROUPED = (Shape(1, 8192, 16, 128, HV=32), Shape(1, 8192, 16, 128, HV=64))
LOWEST = -math.exp(-0.5)  # the lowest log decay of RWKV-7
# Ops by the name of their family, as the option --op takes it.
OPS: dict[str, list[Op]] = {
    "gated_delta_rule": [
        *_both("gated_delta_rule", "q k:unit v g beta", more=(Shape(1, 8192, 16, 128, HV=48),), refused=True,
               backends="FlashQLA, TileLang"),
        Op("chunk_gated_delta_rule", "fla.ops.gated_delta_rule", "q k v g:decay beta", SHAPES + GROUPED,
           options=(("use_qk_l2norm_in_kernel", True),), refused=True, layer="Qwen3-Next",
           backends="FlashQLA, TileLang"),
        Op("chunk_gated_delta_rule", "fla.ops.gated_delta_rule",
           "q k v g:raw_g beta:logits A_log dt_bias", SHAPES[:2],
           options=(("use_qk_l2norm_in_kernel", True), ("use_beta_sigmoid_in_kernel", True),
                    ("use_gate_in_kernel", True), ("state_v_first", True)),
           refused=True, layer="GatedDeltaNet", backends="TileLang")],
    "delta_rule": _both("delta_rule", "q k:unit v beta"),
    "simple_gla": _both("simple_gla", "q k v g", refused=True),
    "retention": _both("retention", "q k v"),
    "linear_attn": [Op("chunk_linear_attn", "fla.ops.linear_attn", "q k v", SHAPES[:2],
                       options=(("normalize", False),))],
    "lightning_attn": [Op("chunk_lightning_attn", "fla.ops.lightning_attn", "q k v", SHAPES[:2],
                          options=(("layer_idx", 4), ("num_layers", 12)))],
    "gla": _both("gla", "q k v g:gk", decoding="q k v gk"),
    "kda": [
        *_both("kda", "q k:unit v g:gk beta", backends="TileLang"),
        Op("chunk_kda", "fla.ops.kda", "q k v g:raw_gk beta:logits A_log:A_log_k dt_bias:dt_bias_k",
           (*SHAPES, Shape(8, 2048, 16, 128)),
           options=(("use_qk_l2norm_in_kernel", True), ("use_gate_in_kernel", True),
                    ("use_beta_sigmoid_in_kernel", True), ("safe_gate", True), ("lower_bound", -5.0),
                    ("state_v_first", True)),
           layer="KimiDeltaAttention", backends="TileLang")],
    "gdn2": _both("gdn2", "q k:unit v g:gk b:erase w:write"),
    "comba": _both("comba", "q k:unit v p:unit g beta", refused=True, backends="TileLang"),
    "gated_delta_product": [Op("chunk_gated_delta_product", "fla.ops.gated_delta_product",
                               "q k:units v:values g beta:betas", SHAPES, options=(("num_householder", 2),),
                               refused=True, backends="TileLang")],
    "rwkv6": _both("rwkv6", "r:q k v w:gk u:bonus"),
    "rwkv7": [
        *_both("rwkv7", "r:q w:gk k v a b", backends="TileLang"),
        Op("chunk_rwkv7", "fla.ops.rwkv7", "r:q w:rwkv7_w k v a b",
           (Shape(4, 4096, 32, 64), Shape(1, 32768, 16, 64), Shape(1, 8192, 32, 64)),
           options=(("scale", 1.0), ("safe_gate", True), ("lower_bound", LOWEST), ("chunk_size", 64)),
           layer="RWKV7Attention", backends="TileLang")],
    "mamba2": [Op("mamba_chunk_scan_combined", MAMBA2, "x:v dt A:pole B:shared C:shared",
                  (Shape(8, 2048, 80, 64),), options=(("chunk_size", 256),)),
               Op("mamba_chunk_scan_combined", MAMBA2,
                  "x:v dt:raw_dt A:pole B:shared C:shared D:skip dt_bias:dt_bias_h",
                  (Shape(8, 2048, 80, 64), Shape(1, 32768, 80, 64)),
                  options=(("chunk_size", 256), ("dt_softplus", True)), layer="Mamba2")],
    "mamba3": [Op("mamba3_siso_combined", MAMBA3,
                  "Q:shared K:shared V:v ADT:decays DT:steps Trap:traps Q_bias:bias K_bias:bias "
                  "Angles:angles D:weights Z:v", (Shape(8, 2048, 32, 64),))],
    "selective_scan": [
        Op("selective_scan_fn", MAMBA,
           f"u:{layout} delta:{layout} A:poles B:columns C:columns D:weights z:{layout} delta_bias:weights",
           (Shape(8, 2048, 4096, 16),), output=layout, options=(("delta_softplus", True),))
        for layout in ("channels", "channels_last")],
    "norm": [
        Op("rms_norm", "fla.modules.layernorm", "x:tokens weight", ROWS, output="tokens",
           options=(("bias", None),)),
        Op("layer_norm", "fla.modules.layernorm", "x:tokens weight bias:weight", ROWS, output="tokens")],
    "layer": [
        Op("rms_norm_gated", "fla.modules.fused_norm_gate", "x:v g:v weight", (Shape(4, 4096, 32, 128),),
           options=(("bias", None),)),
        Op("causal_conv1d", "fla.modules.convolution", "x:tokens weight:taps", (Shape(4, 4096, 1, 4096),),
           output="tokens", options=(("activation", "silu"),)),
        Op("causal_conv1d_update", "fla.modules.convolution", "x:tokens cache weight:taps",
           (Shape(128, 1, 1, 4096),), output="tokens", options=(("activation", "silu"),), gradients=False,
           small=Shape(2, 1, 1, 16))]}


def find(name: str) -> Op:
    """Return the op with this name; the first of several."""
    return next(op for ops in OPS.values() for op in ops if op.name == name)


def cases(family: str, small: bool = False, shapes: Sequence[str] = ()) -> dict[str, tuple[Op, Shape]]:
    """Return (op, shape) of each call of a family, by a unique name.

    small: use the small shapes only.
    shapes: use only these shapes, if given.
    """
    found = {}
    for op in OPS[family]:
        for one in (op.small,) if small else op.shapes:
            if not shapes or str(one) in shapes:
                found[f"{op.label} {one} {op.output}"] = op, one
    return found


def inputs(op: Op, shape: Shape, device: str = "cuda") -> dict[str, Any]:
    """Return the arguments of a call. They are leaves that require gradients if the op has a backward.

    Keys of the delta rules have length 1, because the state would otherwise grow.
    """
    draw = drawing(shape, device)
    key = F.normalize(draw("k").float(), dim=-1)

    def made(role: str) -> torch.Tensor:
        if role in ("unit", "a"):  # a = -key, b = rate * key
            return key if role == "unit" else -key
        if role == "units":
            return F.normalize(draw(role).float(), dim=-1)
        if role in ("erase", "write"):
            return draw(role).sigmoid()
        if role == "b":
            return key * draw("beta").float()[..., None]
        if role in ("g", "gk"):
            return F.logsigmoid(draw(role))
        if role in ("dt", "steps"):
            return F.softplus(draw(role) - 2)
        if role == "decays":  # a product of a step and a negative rate
            return -0.1 * draw(role, torch.rand)
        if role in ("pole", "poles"):
            return -draw(role, torch.rand) - 0.5
        if role == "raw_dt":  # steps of about 0.02 after softplus
            return draw(role) - 4
        if role == "rwkv7_w":
            return LOWEST * draw(role).sigmoid()
        # Parameters have the values with which training begins in the layers of fla.
        if role in ("A_log_k", "skip"):
            return torch.full_like(draw(role), role == "skip")
        if role == "A_log":
            return torch.log(16 * draw(role, torch.rand))
        if role.startswith("dt_bias"):  # inverse softplus of steps between 0.001 and 0.1
            step = torch.exp(draw(role, torch.rand) * math.log(100) + math.log(0.001))
            return step + torch.log(-torch.expm1(-step))
        if role == "decay":  # as Qwen3-Next computes it
            return -made("A_log").exp() * F.softplus(draw("raw_g").float() + made("dt_bias"))
        return draw(role)
    tensors: dict[str, Any] = {name: made(role).to(ROLES[role][1]).requires_grad_(op.gradients)
                               for name, role in op.roles.items()}
    if shape.packed:
        edges = [0]
        for length in uneven(shape.T, shape.packed):
            edges.append(edges[-1] + length)
        tensors["cu_seqlens"] = torch.tensor(edges, device=device)
    return tensors | dict(op.options) | ({"output_final_state": True} if op.keeps else {})


def drawing(shape: Shape, device: str, seed: int = 0) -> Callable[..., torch.Tensor]:
    """Return a function that draws a random tensor of a role, in its dtype.

    It has its own generator, because torch's generator is unusable in a process after a failed capture of a
    CUDA graph.
    """
    source = torch.Generator(device).manual_seed(seed)

    def draw(role: str, how: Callable[..., torch.Tensor] | None = None) -> torch.Tensor:
        dimensions, dtype = ROLES[role]
        how = how or (torch.rand if role in ("beta", "betas") else torch.randn)
        made = how([shape.size(dimension) for dimension in dimensions.split()], device=device, dtype=dtype,
                   generator=source)
        return made.mT.contiguous().mT if role == "channels_last" else made
    return draw


def uneven(total: int, count: int) -> list[int]:
    """Return `count` lengths with the sum `total`.

    Before rounding, the longest is 16 times the shortest. Neighbours differ strongly.
    """
    weights = [2 ** (4 * (7 * number % count) / max(count - 1, 1)) for number in range(count)]
    edges = [round(total * sum(weights[:number]) / sum(weights)) for number in range(count + 1)]
    return [end - begin for begin, end in pairwise(edges)]


def floor(op: Op, shape: Shape) -> dict[str, int]:
    """Return the number of bytes that a call must move if it moves each tensor once.

    forward: all inputs are read, and the output (and the final state) is written.
    both: in addition, all inputs and the output's gradient are read, and the gradient of each input is
        written.
    """
    def size(role: str) -> int:
        dimensions, dtype = ROLES[role]
        return math.prod(shape.size(dimension) for dimension in dimensions.split()) * dtype.itemsize
    given, output = sum(map(size, op.roles.values())), size(op.output)
    written = sum(size(role) for role in op.roles.values() if role == "cache")  # updated in place
    forward = given + output + written + (size("state") if op.keeps else 0)
    return {"forward": forward} | ({"both": forward + 2 * given + output} if op.gradients else {})


def output(returned: Any) -> torch.Tensor:
    """Return the output o of an op that returns it alone or together with its final state."""
    o: torch.Tensor = returned[0] if isinstance(returned, tuple) else returned
    return o


def runs(function: Callable[..., Any], op: Op, shape: Shape, device: str,
         given: dict[str, Any] | None = None) -> dict[str, Callable[[], Any]]:
    """Return the calls to time: ``forward``, and ``both``, which includes all gradients.

    given: inputs to use. Functions that are compared should share them, because their location in memory can
        change the time by 4 %.
    """
    arguments, pull = given or inputs(op, shape, device), drawing(shape, device, seed=1)(op.output)
    leaves = [x for x in arguments.values() if isinstance(x, torch.Tensor) and x.requires_grad]

    def forward() -> Any:
        with torch.no_grad():
            return function(**arguments)

    def both() -> Any:
        return torch.autograd.grad(output(function(**arguments)), leaves, pull)
    return {"forward": forward} | ({"both": both} if op.gradients else {})
