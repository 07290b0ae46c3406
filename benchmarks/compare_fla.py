"""flashlin beside fla, and the scans of Mamba and Mamba2 beside mamba_ssm, on the same work in one run:
forward, forward plus backward, peak memory, host time, first call.

    python benchmarks/compare_fla.py --out benchmarks/results/
Ratios: flashlin / theirs. fla refuses the backward of chunk_simple_gla and chunk_gated_delta_rule on Hopper
with Triton 3.4 to 3.7.0 (fla-org/flash-linear-attention#640); its refusal is switched off in this process
only, and the row is marked.
"""
from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FIRST_CALL = """
import time, torch, json
import torch.nn.functional as F
torch.zeros(1, device="cuda")
q, k, v = (torch.randn(2, 1024, 8, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
g = F.logsigmoid(torch.randn(2, 1024, 8, device="cuda")).requires_grad_()
torch.cuda.synchronize(); start = time.perf_counter()
import flashlin
o, _ = flashlin.chunk_simple_gla(q, k, v, g); torch.cuda.synchronize(); forward = time.perf_counter() - start
o.sum().backward(); torch.cuda.synchronize()
print(json.dumps({"forward_s": forward, "forward_backward_s": time.perf_counter() - start}))
"""


def inputs(B: int, T: int, H: int, D: int, arguments: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of an op, by name: ``name`` or ``name:role``, as in OPS. Keys of the delta rules have
    length 1, or the state would grow. Mamba's scan has H channels of D states."""
    torch.manual_seed(0)
    roles = {name: role or name
             for name, _, role in (argument.partition(":") for argument in arguments.split())}

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda")

    def made(role: str) -> torch.Tensor:
        if role == "k" and "beta" in roles:
            role = "unit"
        if role in ("unit", "a", "b"):  # a = -key, b = its rate times key
            key = torch.nn.functional.normalize(randn(B, T, H, D), dim=-1)
            return {"unit": key, "a": -key, "b": key * torch.rand(B, T, H, 1, device="cuda")}[role].to(dtype)
        if role == "dt":
            return torch.nn.functional.softplus(randn(B, T, H) - 2)
        if role == "pole":
            return -torch.rand(H, device="cuda") - 0.5
        if role == "shared":  # one key and query for all heads, of Mamba2's usual 128
            return randn(B, T, 1, 128).to(dtype)
        if role == "channels":
            return randn(B, H, T).to(dtype)
        if role == "channels_last":  # as a linear layer leaves them
            return randn(B, T, H).to(dtype).mT
        if role == "poles":
            return -torch.rand(H, D, device="cuda") - 0.5
        if role == "columns":
            return randn(B, D, T).to(dtype)
        if role == "weights":
            return randn(H)
        if role in ("g", "gk"):
            return torch.nn.functional.logsigmoid(randn(B, T, H, *((D,) if role == "gk" else ())))
        if role == "beta":
            return torch.rand(B, T, H, device="cuda").to(dtype)
        return randn(H, D).to(dtype) if role == "bonus" else randn(B, T, H, D).to(dtype)
    return {name: made(role).requires_grad_() for name, role in roles.items()}


def output(returned: Any) -> torch.Tensor:
    """o, of an op that returns it alone or with its final state."""
    o: torch.Tensor = returned[0] if isinstance(returned, tuple) else returned
    return o


def timed(function: Callable[..., Any], tensors: dict[str, torch.Tensor],
          extra: dict[str, Any]) -> dict[str, float]:
    from triton.testing import do_bench

    def forward() -> Any:
        with torch.no_grad():
            return function(**tensors, **extra)
    do = torch.randn_like(output(forward()))

    def both() -> None:
        output(function(**tensors, **extra)).backward(do)
        for x in tensors.values():
            x.grad = None
    both()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both()
    peak = torch.cuda.max_memory_allocated() - before
    return {"forward_ms": do_bench(forward, warmup=20, rep=150, return_mode="median"),
            "both_ms": do_bench(both, warmup=20, rep=150, return_mode="median"), "peak_mb": peak / 2**20}


def host(function: Callable[..., Any], D: int, arguments: str, extra: dict[str, Any]) -> dict[str, float]:
    """Microseconds of host time a call takes on a shape the card finishes at once, forward and forward plus
    backward."""
    tensors = inputs(1, 64, 2, D, arguments, torch.bfloat16)
    do = torch.randn_like(output(function(**tensors, **extra)))
    found = {}
    for name, grad in (("host_forward_us", False), ("host_both_us", True)):
        best = 1e9
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(50):
                with torch.set_grad_enabled(grad):
                    o = function(**tensors, **extra)
                if grad:
                    output(o).backward(do)
            best = min(best, (time.perf_counter() - start) / 50)
            torch.cuda.synchronize()
        found[name] = best * 1e6
    return found


def peer_op(family: str, name: str) -> tuple[Callable[..., Any] | None, str]:
    """fla's op with its Hopper refusal off, or mamba_ssm's without that package's __init__, which wants more
    packages; or why there is none."""
    from matrix.peer_table import module_of
    try:
        if family.startswith("mamba_ssm."):
            return getattr(module_of(family), name), ""
        module: Any = importlib.import_module("fla.ops.common.chunk_o")
        if hasattr(module, "IS_NVIDIA_HOPPER"):
            module.IS_NVIDIA_HOPPER = False
        return getattr(module_of(f"fla.ops.{family}"), name), ""
    except Exception as error:  # the other package not installed or broken here: its column says so
        return None, f"{type(error).__name__}: {error}"


MAMBA, MAMBA2 = "mamba_ssm.ops.selective_scan_interface", "mamba_ssm.ops.triton.ssd_combined"
SHAPES = ((4, 4096, 32, 128), (1, 8192, 32, 128), (8, 1024, 8, 64), (2, 4096, 16, 256))
SHAPES_OF = {MAMBA: ((8, 2048, 4096, 16),), MAMBA2: ((8, 2048, 80, 64),), "simple_gla": SHAPES,
             "retention": SHAPES}
# fla.ops.<home> or the module's whole name, the op, its arguments with their roles, and whether fla refuses
# its backward on Hopper.
OPS: tuple[tuple[str, str, str, bool, dict[str, Any]], ...] = (
    ("simple_gla", "chunk_simple_gla", "q k v g", True, {}),
    ("retention", "chunk_retention", "q k v", False, {}),
    ("linear_attn", "chunk_linear_attn", "q k v", False, {"normalize": False}),
    ("lightning_attn", "chunk_lightning_attn", "q k v", False, {"layer_idx": 2, "num_layers": 12}),
    ("gated_delta_rule", "chunk_gated_delta_rule", "q k v g beta", True, {}),
    ("delta_rule", "chunk_delta_rule", "q k v beta", False, {}),
    ("gla", "chunk_gla", "q k v g:gk", False, {}),
    ("rwkv6", "chunk_rwkv6", "r:q k v w:gk u:bonus", False, {}),
    ("kda", "chunk_kda", "q k v g:gk beta", False, {}),
    ("rwkv7", "chunk_rwkv7", "r:q w:gk k v a b", False, {}),
    (MAMBA2, "mamba_chunk_scan_combined", "x dt A:pole B:shared C:shared", False, {"chunk_size": 256}),
    *((MAMBA, "selective_scan_fn",
       f"u:{layout} delta:{layout} A:poles B:columns C:columns D:weights z:{layout} delta_bias:weights",
       False, {"delta_softplus": True}) for layout in ("channels", "channels_last")))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--op", action="append", default=[], help="only this op (repeatable)")
    parser.add_argument("--quick", action="store_true", help="only the first shape of each op")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as empty:
        first = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True,
                               check=False, env={**os.environ, "TRITON_CACHE_DIR": empty})
    first_call = json.loads(first.stdout) if first.returncode == 0 else {"failed": first.stderr[-500:]}
    print("first call from empty caches:", first_call, flush=True)
    import triton

    import flashlin
    from matrix.record import version
    rows: list[dict[str, Any]] = []
    record = {"device": torch.cuda.get_device_name(), "triton": triton.__version__,
              "torch": torch.__version__, "fla": version("fla-core"), "mamba_ssm": version("mamba_ssm"),
              "date": datetime.date.today().isoformat(), "first_call": first_call, "rows": rows}
    for family, name, arguments, refused, extra in OPS:
        if options.op and name not in options.op:
            continue
        theirs, why = peer_op(family, name)
        peer = "mamba_ssm" if family.startswith("mamba_ssm.") else "fla"
        shapes = SHAPES_OF.get(family, SHAPES[:1])
        for shape in shapes[:1] if options.quick else shapes:
            B, T, H, D = shape
            row: dict[str, Any] = {"op": name, "B": B, "T": T, "H": H, "D": D, "dtype": "bfloat16",
                                   "arguments": arguments}
            tensors = inputs(B, T, H, D, arguments, torch.bfloat16)
            for who, function in (("flashlin", getattr(flashlin, name)), (peer, theirs)):
                if function is None:
                    row[who] = {"failed": why}
                    continue
                try:
                    row[who] = timed(function, tensors, extra) | host(function, D, arguments, extra)
                except Exception as error:  # one side's failure is the row's result
                    row[who] = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
            if "both_ms" in row["flashlin"] and "both_ms" in row[peer]:
                row["ratio_forward"] = row["flashlin"]["forward_ms"] / row[peer]["forward_ms"]
                row["ratio_both"] = row["flashlin"]["both_ms"] / row[peer]["both_ms"]
            row["guard_off"] = refused
            rows.append(row)
            print(json.dumps({key: value if not isinstance(value, dict)
                              else {k: round(v, 3) if isinstance(v, float) else v for k, v in value.items()}
                              for key, value in row.items()}), flush=True)
            # after each row: fla's tuning takes minutes, and what is measured should not be lost
            if options.out:
                options.out.mkdir(parents=True, exist_ok=True)
                chosen = "-".join(["compare-fla", *options.op])
                name_of_file = (
                    f"{chosen}-{torch.cuda.get_device_name().replace(' ', '-')}-triton-{triton.__version__}.json")
                (options.out / name_of_file).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
