"""Mamba on a real GPU in the shapes of real models.

Kernels are compared with the torch path. Other tests cover rows beyond 32-bit offsets, host syncs and
torch.compile.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashlin
from flashlin.testing.compare import judge

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

GPU = torch.device("cuda", torch.cuda.current_device())


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=GPU).to(dtype)


def channels(b: int, D: int, T: int) -> dict[str, torch.Tensor]:
    """Return inputs of Mamba's scan as its layers pass them.

    u and z are halves of a projection. The tokens of dt are contiguous.
    """
    torch.manual_seed(0)
    u, z = randn(b, T, 2 * D).mT.chunk(2, 1)
    B, C = randn(b, T, 32).mT.chunk(2, 1)
    return {"u": u, "delta": randn(b, D, T),
            "A": -torch.arange(1, 17, device=GPU).float().expand(D, 16).contiguous(), "B": B, "C": C / 4,
            "D": randn(D, dtype=torch.float32), "z": z, "delta_bias": randn(D, dtype=torch.float32) - 4}


def heads(b: int, T: int, H: int, norm: bool) -> dict[str, torch.Tensor]:
    """Return inputs of a Mamba2 layer with heads of 64 channels and states of 128."""
    torch.manual_seed(0)
    D, C = 64 * H, 64 * H + 256
    own = {"dt_bias": randn(H, dtype=torch.float32) - 4, "A": -1 - 15 * torch.rand(H, device=GPU),
           "D": randn(H, dtype=torch.float32)}
    return {"zxbcdt": randn(b, T, D + C + H), "conv1d_weight": randn(C, 4) / 2, "conv1d_bias": randn(C),
            **own, **({"rmsnorm_weight": randn(D)} if norm else {})}


def selective(tensors: dict[str, torch.Tensor]) -> Any:
    return flashlin.selective_scan_fn(**tensors, delta_softplus=True, return_last_state=True)


def layer(tensors: dict[str, Any]) -> Any:
    return flashlin.mamba_split_conv1d_scan_combined(**tensors, chunk_size=256, headdim=64,
                                                     return_final_states=True, rmsnorm_eps=1e-5)


def results(function: Callable[..., Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    y, last = function(leaves)
    torch.manual_seed(1)
    dy, dlast = (torch.randn(x.shape, device=GPU).bfloat16().to(x.dtype) for x in (y, last))
    return {"y": y, "last": last,
            **dict(zip(leaves, torch.autograd.grad([y, last], list(leaves.values()), [dy, dlast]),
                       strict=True))}


def named(value: Any) -> str:
    return value.__name__ if callable(value) else str(value)


CALLS = [(selective, channels, dict(b=2, D=5120, T=700)), (selective, channels, dict(b=1, D=8192, T=300)),
         (layer, heads, dict(b=1, T=700, H=80, norm=True)),
         (layer, heads, dict(b=2, T=300, H=24, norm=False))]


@pytest.mark.parametrize(("function", "made", "facts"), CALLS, ids=named)
def test_shapes_of_real_models(function: Callable[..., Any], made: Callable[..., dict[str, torch.Tensor]],
                               facts: dict[str, Any]) -> None:
    tensors = made(**facts)
    got, again = (results(function, tensors) for _ in range(2))
    assert all(torch.equal(x, again[name]) for name, x in got.items())
    with flashlin.settings(path="torch"):
        wanted = results(function, {name: x.float() for name, x in tensors.items()})
    verdicts = [judge(name, x, wanted[name], 0.02) for name, x in got.items()]
    assert all(verdict.ok for verdict in verdicts), verdicts


@pytest.mark.parametrize("together", ["tokens", "channels"])
def test_more_than_32_bits_count(together: str) -> None:
    """With offsets beyond 32 bits, the end of a row has the results of a call on its last 2,048 tokens.

    Outputs and gradients of the last 100 tokens are compared. The earlier tokens no longer influence them.
    """
    D, T, tail = 8192, 270_000, 2048
    torch.manual_seed(0)

    def new(C: int) -> torch.Tensor:
        x = torch.empty(1, C, T, device=GPU, dtype=torch.bfloat16) if together == "tokens" else torch.empty(1,
                                                                                                            T,
                                                                                                            C,
                                                                                                            device=GPU,
                                                                                                          dtype=torch.bfloat16).mT
        return x.normal_()

    def scanned(u: torch.Tensor, B: torch.Tensor) -> list[torch.Tensor]:
        leaves = [u.detach().requires_grad_(), u.detach().requires_grad_(), B.detach().requires_grad_()]
        y = flashlin.selective_scan_fn(leaves[0], leaves[1], -torch.ones(D, 16, device=GPU), leaves[2],
                                       leaves[2], z=u, delta_softplus=True)
        assert isinstance(y, torch.Tensor)
        return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y))]
    u, B = new(D), new(16)
    assert u.numel() > 2**31
    whole = scanned(u, B)
    for name, got, alone in zip(("y", "du", "ddelta", "dB"), whole,
                                scanned(u[..., T - tail:].clone(), B[..., T - tail:].clone()), strict=True):
        assert judge(name, got[..., T - 100:].float(), alone[..., tail - 100:].float(), 1e-4).ok
        # The first of the 2,048 tokens depend on earlier ones. Only du depends on later tokens instead.
        assert name == "du" or not torch.equal(got[..., T - tail:], alone)
    del whole


@pytest.mark.parametrize(("function", "made", "facts"), [(selective, channels, dict(b=70_000, D=3, T=5)),
                                                         (layer, heads, dict(b=33_000, T=5, H=2,
                                                                             norm=False))], ids=named)
def test_more_rows_than_an_axis_of_a_grid_holds(function: Callable[..., Any],
                                                made: Callable[..., dict[str, torch.Tensor]],
                                                facts: dict[str, Any]) -> None:
    tensors = made(**facts)
    of_rows = {name for name, x in tensors.items() if x.shape[0] == facts["b"]}
    whole = results(function, tensors)
    some = {name: x[-40:] if name in of_rows else x for name, x in tensors.items()}
    y, last = function(some)
    assert torch.equal(whole["y"][-40:], y) and torch.equal(whole["last"][-40:], last)
    assert all(bool(x.isfinite().all()) for x in whole.values())


@pytest.mark.parametrize(("function", "made", "facts"), CALLS[1:3], ids=named)
def test_nothing_waits_for_the_host(function: Callable[..., Any],
                                    made: Callable[..., dict[str, torch.Tensor]], facts: dict[str, Any],
                                    no_host_sync: Callable[[], None]) -> None:
    tensors = made(**facts)
    results(function, tensors)
    no_host_sync()
    results(function, tensors)


@pytest.mark.parametrize(("function", "made", "facts"),
                         [(selective, channels, dict(b=2, D=96)), (layer, heads, dict(b=2, H=4, norm=True))],
                         ids=named)
def test_compiled_calls_are_eager_ones(function: Callable[..., Any],
                                       made: Callable[..., dict[str, torch.Tensor]],
                                       facts: dict[str, Any]) -> None:
    compiled = torch.compile(function, fullgraph=True)
    for T in (50, 77, 300):
        tensors = made(T=T, **facts)
        got, wanted = results(compiled, tensors), results(function, tensors)
        verdicts = [judge(name, x, wanted[name], 0.02) for name, x in got.items()]
        assert all(verdict.ok for verdict in verdicts), verdicts
