"""What each op does in flash-linear-attention, in mamba_ssm and here, tried on a GPU against float64.
SUPPORT.md shows it as a table.

    python matrix/peers.py --out matrix/results/        needs an NVIDIA GPU; fla-core and mamba_ssm's Python files for their columns

Every op of every package goes through the same questions (``ASPECTS``), in a process of its own that starts
anew after an answer that ends it. An answer is ``right``, ``wrong: ...`` or ``error: ...``. Tuners of the
others are held to one configuration, with 4 warps if there is one, or a first call would take minutes;
whatever only another configuration would do is not seen.
"""
from __future__ import annotations

import argparse
import datetime
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from matrix.peer_table import module_of

# What a row of the table asks: sizes, dtype, and what is looked at.
ASPECTS: dict[str, str] = {
    "forward": "outputs and final state, bf16", "backward": "gradients through the outputs",
    "states": "gradients of the initial state and through the final one",
    "packed": "cu_seqlens with an empty sequence, with gradients", "CPU": "CPU tensors, with gradients",
    "B*H > 65,535": "10,923 sequences of 6 heads, with gradients", "K > 256": "K = 512, with gradients",
    "fp32": "float32 within 1e-4, with gradients"}
# RMS ratio in 16 bits: twice what the field allows itself, since this tells right from wrong, not good from
# better
ALLOWED = 0.02


class Op(NamedTuple):
    """arguments: public name, or public:role where they differ, in any order; roles as in
    kernels/recurrent/inputs.py. delta: the prediction is subtracted (kda, the delta rules). before: the state
    is read before the update (rwkv6). home: module in fla or mamba_ssm. options: keywords it is always called
    with. initial, last: the arguments that bring a state and ask for the last one, empty where there is none.
    packed: whose ops take cu_seqlens, or what else there is to say of it."""
    name: str
    home: str
    arguments: str
    delta: bool = False
    before: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    initial: str = "initial_state"
    last: str = "output_final_state"
    packed: str = "both"


def _both(family: str, arguments: str, **facts: Any) -> list[Op]:
    return [Op(f"{mode}_{family}", f"fla.ops.{family}", arguments, **facts)
            for mode in ("chunk", "fused_recurrent")]


OPS: list[Op] = [
    *_both("simple_gla", "q k v g"),
    Op("parallel_simple_gla", "fla.ops.simple_gla", "q k v g", initial="", last=""),
    *_both("retention", "q k v"), Op("parallel_retention", "fla.ops.retention", "q k v", initial="", last=""),
    *_both("linear_attn", "q k v", options=(("normalize", False),)),
    *_both("lightning_attn", "q k v", options=(("layer_idx", 1), ("num_layers", 4))),
    *_both("delta_rule", "q k v beta", delta=True), *_both("gated_delta_rule", "q k v g beta", delta=True),
    *_both("kda", "q k v g:gk beta", delta=True),
    Op("chunk_gla", "fla.ops.gla", "q k v g:gk"), Op("fused_recurrent_gla", "fla.ops.gla", "q k v gk"),
    *_both("rwkv6", "r:q k v w:gk u:bonus", before=True), *_both("rwkv7", "r:q w:gk k v a b"),
    Op("fused_mul_recurrent_rwkv7", "fla.ops.rwkv7", "r:q w:gk k v kk a:rate"),
    *[op._replace(home="fla.ops.generalized_delta_rule")
      for op in (*_both("dplr_delta_rule", "q k v a b gk"), *_both("iplr_delta_rule", "q k v a b"))],
    Op("chunk_hgrn", "fla.ops.hgrn", "x:v g:gv", packed="flashlin"),
    Op("fused_recurrent_hgrn", "fla.ops.hgrn", "x:v g:gv"),
    Op("mamba_chunk_scan_combined", "mamba_ssm.ops.triton.ssd_combined", "x:v dt A B:k C:q",
       options=(("chunk_size", 64),), initial="initial_states", last="return_final_states",
       packed="see cu_seqlens and seq_idx in the op's own cases"),
    Op("selective_scan_fn", "mamba_ssm.ops.selective_scan_interface", "u:v delta A B:k C:q", initial="",
       last="return_last_state", packed="none")]


class Sizes(NamedTuple):
    B: int = 2
    T: int = 130
    H: int = 2
    K: int = 64
    V: int = 64
    edges: tuple[int, ...] = ()


SIZES = {"packed": Sizes(1, 130, edges=(0, 50, 50, 130)), "B*H > 65,535": Sizes(10923, 4, 6, 16, 16),
         "K > 256": Sizes(T=70, K=512)}


def function_of(side: str, op: Op) -> Callable[..., Any]:
    found: Callable[..., Any]
    if side == "flashlin":
        found = getattr(importlib.import_module("flashlin"), op.name)
        return found
    import triton.runtime.autotuner as tuner
    before = tuner.Autotuner.__init__

    def one_configuration(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        self.configs = [next((config for config in self.configs if config.num_warps == 4), self.configs[0])]
    tuner.Autotuner.__init__ = one_configuration
    found = getattr(module_of(op.home), op.name)
    return found


def made(op: Op, sizes: Sizes, dtype: Any, generator: Any) -> dict[str, Any]:
    """The op's tensors by public name. Keys and the low-rank vectors have length 1, or the delta rules
    diverge."""
    import torch
    import torch.nn.functional as F
    B, T, H, K, V, edges = sizes
    state: tuple[int, ...] = (len(edges) - 1 if edges else B, H, K, V)

    def randn(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator)
    if "hgrn" in op.name:
        given = {"x": randn(B, T, H * V).to(dtype), "g": F.logsigmoid(randn(B, T, H * V)).to(dtype)}
        state = (state[0], H * V)
    elif op.name.startswith("mamba"):
        given = {"x": randn(B, T, H, V).to(dtype), "dt": F.softplus(randn(B, T, H) - 2),
                 "A": -torch.rand(H, generator=generator) - 0.5, "B": randn(B, T, H, K).to(dtype),
                 "C": randn(B, T, H, K).to(dtype)}
        state = (B, H, V, K)
    elif op.name == "selective_scan_fn":  # a head is so many channels with states of their own
        given = {"u": randn(B, H * V, T).to(dtype), "delta": F.softplus(randn(B, H * V, T) - 2).to(dtype),
                 "A": -torch.rand(H * V, K, generator=generator) - 0.5, "B": randn(B, K, T).to(dtype),
                 "C": randn(B, K, T).to(dtype)}
    else:
        unit = F.normalize(randn(B, T, H, K), dim=-1)
        every = {"q": randn(B, T, H, K).to(dtype),
                 "k": (F.normalize(randn(B, T, H, K), dim=-1) if op.delta else randn(B, T, H, K)).to(dtype),
                 "v": randn(B, T, H, V).to(dtype), "g": F.logsigmoid(randn(B, T, H)),
                 "gk": F.logsigmoid(randn(B, T, H, K) + 2), "beta": randn(B, T, H).sigmoid().to(dtype),
                 "bonus": randn(H, K), "a": -unit.to(dtype),
                 "b": (unit * randn(B, T, H, K).sigmoid()).to(dtype), "kk": unit.to(dtype),
                 "rate": randn(B, T, H, K).sigmoid().to(dtype)}
        given = {name: every[role] for name, role in _roles(op).items()}
    if op.initial:
        given[op.initial] = randn(*state)
    if edges:
        given["cu_seqlens"] = torch.tensor(edges, dtype=torch.int64)
    return given


def _roles(op: Op) -> dict[str, str]:
    pairs = [argument.partition(":") for argument in op.arguments.split()]
    return {name: role or name for name, _, role in pairs}


def called(function: Callable[..., Any], op: Op, with_state: bool, **tensors: Any) -> dict[str, Any]:
    options = dict(op.options)
    if op.last:
        options[op.last] = True
    o, ht = function(**tensors, **options)
    return {"o": o, "ht": ht} if op.last and with_state else {"o": o}


def reference(op: Op, with_state: bool, cu_seqlens: Any = None, **tensors: Any) -> dict[str, Any]:
    """The recurrence in float64, all sequences and heads at once, token by token."""
    import torch
    if cu_seqlens is not None:
        parts = []
        names = ("o", "ht") if op.last else ("o",)
        for n, (first, end) in enumerate(zip(cu_seqlens.tolist()[:-1], cu_seqlens.tolist()[1:], strict=True)):
            own = {name: x[n:n + 1] if name == "initial_state" else x if name == "u" else x[:, first:end]
                   for name, x in tensors.items()}
            parts.append(reference(op, True, **own))
        found = {name: torch.cat([part[name] for part in parts], 1 if name == "o" else 0) for name in names}
        return found if with_state and op.last else {"o": found["o"]}
    if "hgrn" in op.name:
        S, outputs = tensors["initial_state"], []
        for t in range(tensors["x"].shape[1]):
            S = tensors["g"][:, t].exp() * S + tensors["x"][:, t]
            outputs.append(S)
        o = torch.stack(outputs, 1) if outputs else tensors["x"]
        return {"o": o, "ht": S} if with_state else {"o": o}
    if op.name == "selective_scan_fn":
        S, outputs = torch.zeros_like(tensors["A"]), []
        for t in range(tensors["u"].shape[2]):
            step = tensors["delta"][:, :, t, None]
            S = (step * tensors["A"]).exp() * S + step * tensors["u"][:, :, t, None] * tensors["B"][:, None,
                                                                                                    :, t]
            outputs.append((S * tensors["C"][:, None, :, t]).sum(-1))
        o = torch.stack(outputs, 2)
        return {"o": o, "ht": S} if with_state else {"o": o}
    if op.name.startswith("mamba"):
        dt = tensors["dt"]
        x: dict[str, Any] = {"q": tensors["C"], "k": tensors["B"], "v": tensors["x"] * dt[..., None],
                             "g": dt * tensors["A"]}
        S, scale = tensors["initial_states"].mT, 1.0
    else:
        x = {role: tensors[name] for name, role in _roles(op).items()}
        K = x["q"].shape[-1]
        S = tensors.get("initial_state",
                        x["q"].new_zeros(x["q"].shape[0], x["q"].shape[2], K, x["v"].shape[-1]))
        scale = 1.0 if op.name in ("chunk_rwkv7", "fused_mul_recurrent_rwkv7") else K ** -0.5
        heads = torch.arange(x["q"].shape[2], dtype=torch.float64)
        if "retention" in op.name:
            x["gamma"] = torch.log1p(-torch.exp2(-5 - heads))
        if "lightning" in op.name:
            x["gamma"] = -(8 / len(heads)) * (1 - 1 / 4) * heads
        if "kk" in x:
            x["a"], x["b"] = -x["kk"], x["kk"] * x["rate"]
    outputs = []
    for t in range(x["v"].shape[1]):
        q, k, v = x["q"][:, t], x["k"][:, t], x["v"][:, t]
        old = S
        if "g" in x:
            S = x["g"][:, t, :, None, None].exp() * S
        if "gamma" in x:
            S = x["gamma"][None, :, None, None].exp() * S
        if "gk" in x:
            S = x["gk"][:, t, :, :, None].exp() * S
        if "a" in x:
            S = S + x["b"][:, t, :, :, None] * torch.einsum("bhkv,bhk->bhv", old, x["a"][:, t])[:, :, None, :]
        if op.delta:
            v = x["beta"][:, t, :, None] * (v - torch.einsum("bhkv,bhk->bhv", S, k))
        S = S + k[..., None] * v[:, :, None, :]
        read = old + (x["bonus"][None] * k)[..., None] * v[:, :, None, :] if op.before else S
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", read, q))
    o = torch.stack(outputs, 1) if outputs else x["v"]
    S = S.mT if op.name.startswith("mamba") else S
    return {"o": o, "ht": S} if op.last and with_state else {"o": o}


def answer(side: str, op: Op, aspect: str) -> str:
    import torch

    from flashlin.testing.compare import Case, check
    function = function_of(side, op)
    if aspect == "packed" and op.packed not in ("both", "flashlin"):
        return op.packed
    device = torch.device("cpu" if aspect == "CPU" else "cuda")
    dtype = torch.float32 if aspect in ("CPU", "fp32") else torch.bfloat16
    with_state = aspect != "backward"
    case = Case(op.name, aspect, partial(made, op, SIZES.get(aspect, Sizes())),
                partial(called, function, op, with_state), partial(reference, op, with_state),
                {"*": ALLOWED, "d*": ALLOWED})
    if aspect == "forward":
        case = case._replace(constant=(*_roles(op), op.initial))
    if aspect == "backward":
        case = case._replace(constant=(op.initial,))
    if not op.last and aspect == "states":
        return "none"
    if op.packed == "flashlin" and aspect == "packed" and side != "flashlin":
        return "error: no cu_seqlens"
    bad = [verdict for verdict in check(case, device, dtype) if not verdict.ok]
    return "right" if not bad else "wrong: " + ", ".join(f"{verdict.tensor} {verdict.rms:.2g}"
                                                         for verdict in bad)


def one(side: str, name: str, aspects: list[str]) -> None:
    """In a child: a line for each aspect, until something ends the process."""
    op = next(op for op in OPS if op.name == name)
    for aspect in aspects:
        print(json.dumps({"starting": aspect}), flush=True)
        try:
            found = answer(side, op, aspect)
        except Exception as error:  # whatever is raised is the answer
            found = f"error: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
        print(json.dumps({aspect: found}), flush=True)
        if "CUDA" in found and found.startswith("error") and "invalid argument" not in found:
            return  # the context may be gone


def asked(side: str, name: str, seconds: float) -> dict[str, Any]:
    answers: dict[str, str] = {}
    while missing := [aspect for aspect in ASPECTS if aspect not in answers]:
        command = [sys.executable, __file__, "--one", name, "--side", side, *missing]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
            text, code = ran.stdout, f"process ended with {ran.returncode}"
        except subprocess.TimeoutExpired as late:
            text, code = (late.stdout or b"").decode() if isinstance(late.stdout,
                                                                     bytes) else late.stdout or "", f"no answer in {seconds:.0f} s"
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        for line in lines:
            answers.update({aspect: found for aspect, found in line.items() if aspect != "starting"})
        last = lines[-1].get("starting") if lines else missing[0]
        if last is not None:
            answers[last] = f"error: {code}"
    return {"op": name, "side": side, **answers}


def joined(before: dict[str, Any], record: dict[str, Any]) -> list[dict[str, Any]]:
    """The record's rows, and those of other ops from the one before, if that asked the same of the same
    versions."""
    rows: list[dict[str, Any]] = record["rows"]
    if any(before[key] != record[key] for key in ("device", "triton", "torch", "packages", "aspects")):
        return rows
    names, new = [op.name for op in OPS], {row["op"] for row in rows}
    return sorted([*(row for row in before["rows"] if row["op"] not in new), *rows],
                  key=lambda row: names.index(row["op"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for peers-<card>-triton-<version>.json")
    parser.add_argument("--jobs", type=int, default=8, help="processes at once (default 8)")
    parser.add_argument("--seconds", type=float, default=240, help="time limit of a process (default 240)")
    parser.add_argument("--op", action="append", default=[],
                        help="only this op (repeatable); the record in --out keeps the others")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("aspects", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments.side, arguments.one, arguments.aspects)
        return 0
    import torch
    import triton
    from tqdm import tqdm
    names = [op for op in OPS if not arguments.op or op.name in arguments.op]
    work = [(side, op.name) for op in names for side in (op.home.partition(".")[0], "flashlin")]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        rows = list(tqdm(pool.map(lambda pair: asked(pair[0], pair[1], arguments.seconds), work),
                         total=len(work)))
    record = {"device": torch.cuda.get_device_name(), "triton": triton.__version__,
              "torch": torch.__version__, "date": datetime.date.today().isoformat(),
              "packages": {package: _package(package) for package in ("fla-core", "mamba_ssm")},
              "aspects": ASPECTS, "rows": rows}
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        place = (arguments.out
                 / f"peers-{torch.cuda.get_device_name().replace(' ', '-')}-triton-{triton.__version__}.json")
        if arguments.op and place.exists():
            record["rows"] = joined(json.loads(place.read_text()), record)
        place.write_text(json.dumps(record, indent=1) + "\n")
    for row in rows:
        print(" ".join(f"{str(row[key])[:40]!s:<14}" for key in ("op", "side", *ASPECTS)))
    return 0


def _package(name: str) -> dict[str, str]:
    from importlib import metadata
    try:
        asks = [line for line in metadata.requires(name) or [] if line.startswith("triton>")]
        return {"version": metadata.version(name),
                "triton": asks[0].partition(";")[0].removeprefix("triton>=") + " or newer" if asks else "any"}
    except metadata.PackageNotFoundError:
        return {"version": "none", "triton": "any"}


if __name__ == "__main__":
    sys.exit(main())
