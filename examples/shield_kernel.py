"""Launch your own Triton kernel through flashlin.shield, and tune it with flashlin.autotune.

    python examples/shield_kernel.py             some seconds; without a GPU in Triton's interpreter

The kernel computes the recurrence h[t] = exp(g[t]) h[t - 1] + x[t] of [B, H, T, D]. One program computes a
block of channels of one sequence and head, so the second axis of the grid has B * H programs. Without
flashlin, the launch fails with "invalid argument" above 65,535, and with a compiler error in bf16 on a T4.
The example uses three features of flashlin:

    @flashlin.autotune          replaces triton.autotune: keys by name, and failing configurations are
                                skipped
    flashlin.shield(...)        declares the batch and the outputs, so that a launch can be split, or run
                                on fp32 copies, if necessary
    test_under_every_triton     compiles the kernel under two releases for two GPUs, without a GPU:
                                pytest examples/shield_kernel.py

Exit code: 0 if every result agrees with float64, 1 if not.
"""
from __future__ import annotations

import os
import sys
from typing import Any

import torch

GPU = torch.cuda.is_available()
# Triton reads TRITON_INTERPRET when it is imported. Kernels cannot be timed in its interpreter, so autotune
# takes the first configuration.
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("FLASHLIN_AUTOTUNE", "first")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

import flashlin  # noqa: E402


@flashlin.autotune([triton.Config({"BD": 32}), triton.Config({"BD": 64})], key=["D"])
@triton.jit
def recurrence(x, g, o, B, H: tl.constexpr, T, D, BD: tl.constexpr):
    """Compute the recurrence for one block of channels of one sequence and head.

    x, o: [B, H, T, D].
    g: log decays, [B, H, T].

    The grid is (blocks of channels, B * H).
    """
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BD + tl.arange(0, BD)
    at, there = row * T * D + channel, channel < D
    h = tl.zeros([BD], tl.float32)
    for t in range(T):
        decay = tl.exp(tl.load(g + row * T + t).to(tl.float32))
        h = h * decay + tl.load(x + at + t * D, mask=there, other=0).to(tl.float32)
        tl.store(o + at + t * D, h.to(o.dtype.element_ty), mask=there)


shielded = flashlin.shield(recurrence, batch={"x": 0, "g": 0, "o": 0}, batch_axis=1, batch_size="B",
                           outputs=["o"])


def scan(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Return the recurrence of x [B, H, T, D] with log decays g [B, H, T], in the dtype of x."""
    B, H, T, D = x.shape
    o = torch.empty_like(x)
    shielded[lambda meta: (triton.cdiv(D, meta["BD"]), B * H)](x, g, o, B, H, T, D)
    return o


def right(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Compute the recurrence in float64, in plain torch."""
    h, out = torch.zeros_like(x[:, :, 0], dtype=torch.float64), []
    for t in range(x.shape[2]):
        h = h * g[:, :, t, None].double().exp() + x[:, :, t].double()
        out.append(h)
    return torch.stack(out, 2)


def example() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a small result on the CPU and the correct result, for the pytest fixture."""
    torch.manual_seed(0)
    x, g = torch.randn(2, 3, 5, 40), -torch.rand(2, 3, 5)
    return scan(x, g), right(x, g).float()


def test_under_every_triton(triton_matrix: Any) -> None:
    triton_matrix(example, triton=["3.2", "3.6"], sm=[75, 90])


def main() -> int:
    device = torch.device("cuda" if GPU else "cpu")
    sizes = [(2, 3, 20, 40, torch.float32), (2, 3, 20, 40, torch.float16)]
    if GPU:
        # The second size has 65,538 sequences and heads, more than an axis of a grid may have.
        sizes += [(2, 16, 512, 128, torch.bfloat16), (10923, 6, 4, 64, torch.float32)]
    wrong = 0
    for B, H, T, D, dtype in sizes:
        x = torch.randn(B, H, T, D, device=device).to(dtype)
        g = -torch.rand(B, H, T, device=device)
        error = ((scan(x, g).double() - right(x, g)).norm() / right(x, g).norm()).item()
        wrong += error > (1e-5 if dtype == torch.float32 else 1e-2)
        print(f"B={B} H={H} T={T} D={D} {dtype}: off by {error:.1e}")
    print("every result agrees with float64" if not wrong else f"{wrong} results are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
