"""What a layer calls besides its chunk kernel, beside fla on the same work in one run: decoding, gated norms,
the short convolution.

    python benchmarks/compare_layer.py --out benchmarks/results/
Ratios are flashlin / fla; lower is better. Both get the same arguments. device_ms: without the host, from a
CUDA graph's replay; call_ms: as called one after another from Python, where the host is usually what takes
time.
"""
from __future__ import annotations

import argparse
import datetime
import importlib
import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import triton
from triton.testing import do_bench, do_bench_cudagraph

import flashlin


def decoding() -> dict[str, Any]:
    """One token of 128 sequences, 16 heads of 128: 134 MB of fp32 states to read and to write."""
    q, k, v = (torch.randn(128, 1, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return dict(q=q, k=k, v=v, beta=torch.rand(128, 1, 16, device="cuda", dtype=torch.bfloat16),
                use_qk_l2norm_in_kernel=True, initial_state=torch.randn(128, 16, 128, 128, device="cuda"),
                output_final_state=True)


def decoding_gated() -> dict[str, Any]:
    """The same with a decay."""
    return {**decoding(), "g": -torch.rand(128, 1, 16, device="cuda")}


def norm_of_heads() -> dict[str, Any]:
    """The gated norm at the end of a Gated DeltaNet layer: 4 x 4,096 tokens, 32 heads of 128."""
    x, g = (torch.randn(4, 4096, 32, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return dict(x=x, g=g, weight=torch.rand(128, device="cuda", dtype=torch.bfloat16), bias=None)


def convolving() -> dict[str, Any]:
    """4 x 4,096 tokens of 4,096 channels, width 4, with silu."""
    x, weight = torch.randn(4, 4096, 4096, device="cuda", dtype=torch.bfloat16), torch.randn(4096, 4,
                                                                                             device="cuda",
                                                                                             dtype=torch.bfloat16)
    return dict(x=x, weight=weight, activation="silu")


def convolving_a_token() -> dict[str, Any]:
    """One token of 128 sequences of 4,096 channels, width 4, with silu, and the cache shifted in place."""
    x, weight = torch.randn(128, 1, 4096, device="cuda", dtype=torch.bfloat16), torch.randn(4096, 4,
                                                                                            device="cuda",
                                                                                            dtype=torch.bfloat16)
    return dict(x=x, cache=torch.zeros(128, 4096, 4, device="cuda", dtype=torch.bfloat16), weight=weight,
                activation="silu")


# op, where fla has it, arguments, with gradients too
ROWS: tuple[tuple[str, str, Callable[[], dict[str, Any]], bool], ...] = (
    ("fused_recurrent_gated_delta_rule", "fla.ops.gated_delta_rule", decoding_gated, False),
    ("fused_recurrent_delta_rule", "fla.ops.delta_rule", decoding, False),
    ("rms_norm_gated", "fla.modules.fused_norm_gate", norm_of_heads, True),
    ("causal_conv1d", "fla.modules.convolution", convolving, True),
    ("causal_conv1d_update", "fla.modules.convolution", convolving_a_token, False))


def timed(function: Callable[..., Any], arguments: dict[str, Any], gradients: bool) -> dict[str, float]:
    with torch.no_grad():
        found = {"device_ms": do_bench_cudagraph(lambda: function(**arguments), rep=60, return_mode="median"),
                 "call_ms": do_bench(lambda: function(**arguments), warmup=10, rep=60, return_mode="median")}
    if gradients:
        leaves = {name: value.clone().requires_grad_() for name, value in arguments.items()
                  if isinstance(value, torch.Tensor) and value.is_floating_point()}

        def both() -> None:
            y = function(**{**arguments, **leaves})
            y = y[0] if isinstance(y, tuple) else y
            torch.autograd.grad(y, list(leaves.values()), dy)
        dy = torch.randn_like(arguments["x"])
        found["both_ms"] = do_bench(both, warmup=10, rep=100, return_mode="median")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    record = {"device": torch.cuda.get_device_name(), "triton": triton.__version__,
              "torch": torch.__version__, "fla": metadata.version("fla-core"),
              "date": datetime.date.today().isoformat(), "rows": rows}
    for op, home, arguments, gradients in ROWS:
        torch.manual_seed(0)
        given = arguments()
        row: dict[str, Any] = {"op": op, "work": (arguments.__doc__ or "").strip()}
        for who, where in (("flashlin", flashlin), ("fla", importlib.import_module(home))):
            try:
                row[who] = {name: round(ms, 4)
                            for name, ms in timed(getattr(where, op), given, gradients).items()}
            except Exception as error:  # one side's failure is the row's result
                row[who] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        for name in row["flashlin"]:
            if name in row["fla"] and name != "failed":
                row[f"ratio_{name.removesuffix('_ms')}"] = round(row["flashlin"][name] / row["fla"][name], 3)
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        name = (
            f"compare-layer-{torch.cuda.get_device_name().replace(' ', '-')}-triton-{triton.__version__}.json")
        (options.out / name).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
