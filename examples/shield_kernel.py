"""A Triton kernel of one's own, launched through flashlin.shield and tuned by flashlin.autotune.

    python examples/shield_kernel.py             some seconds; without a GPU in Triton's interpreter

What it shows. The kernel is the recurrence h[t] = exp(g[t]) h[t - 1] + x[t] of [B, H, T, D], a program for
each sequence, head and block of channels, so the second axis of its grid is B * H long. Raw, it ends with
"invalid argument" above 65,535, and with a compiler's error in bf16 on a T4. Three things are flashlin's:

    @flashlin.autotune          in place of triton.autotune: keys by name, configurations that fail are left
                                out
    flashlin.shield(...)        says what the batch is and what is written, so that a launch can be split, or
                                run on fp32 copies, where it has to be
    test_under_every_triton     compiles the kernel under two releases for two cards, without a GPU:
                                pytest examples/shield_kernel.py

Exit code: 0 if every result agrees with float64, 1 if not.
"""
from __future__ import annotations

import os
import sys
from typing import Any

import torch

GPU = torch.cuda.is_available()
if not GPU:  # Triton reads the one when it is imported; in its interpreter nothing can be timed
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("FLASHLIN_AUTOTUNE", "first")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

import flashlin  # noqa: E402


@flashlin.autotune([triton.Config({"BD": 32}), triton.Config({"BD": 64})], key=["D"])
@triton.jit
def recurrence(x, g, o, B, H: tl.constexpr, T, D, BD: tl.constexpr):
    """x, o: [B, H, T, D]; g: [B, H, T]. Program (block of channels, batch * H + head)."""
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
    """x: [B, H, T, D]; g: [B, H, T] -> [B, H, T, D], as x."""
    B, H, T, D = x.shape
    o = torch.empty_like(x)
    shielded[lambda meta: (triton.cdiv(D, meta["BD"]), B * H)](x, g, o, B, H, T, D)
    return o


def right(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """The same in float64."""
    h, out = torch.zeros_like(x[:, :, 0], dtype=torch.float64), []
    for t in range(x.shape[2]):
        h = h * g[:, :, t, None].double().exp() + x[:, :, t].double()
        out.append(h)
    return torch.stack(out, 2)


def example() -> tuple[torch.Tensor, torch.Tensor]:
    """What came out and what is right, for the pytest fixture: small, and on the CPU."""
    torch.manual_seed(0)
    x, g = torch.randn(2, 3, 5, 40), -torch.rand(2, 3, 5)
    return scan(x, g), right(x, g).float()


def test_under_every_triton(triton_matrix: Any) -> None:
    triton_matrix(example, triton=["3.2", "3.6"], sm=[75, 90])


def main() -> int:
    device = torch.device("cuda" if GPU else "cpu")
    sizes = [(2, 3, 20, 40, torch.float32), (2, 3, 20, 40, torch.float16)]
    if GPU:
        # the latter has 65,538 sequences and heads
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
