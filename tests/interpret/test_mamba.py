"""Kernels of Mamba and Mamba2 in Triton's interpreter, beyond their cases.

The tests cover batches in slices, groups, strides, and the library operators.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashlin
from flashlin.kernels.mamba import reference
from flashlin.ops import selective_scan
from flashlin.testing.cases.mamba import make_scan, make_selective, make_step, make_window
from flashlin.testing.compare import poisoned

Tensors = dict[str, torch.Tensor]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def results(given: Tensors) -> list[torch.Tensor]:
    leaves = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in given.items()}
    with poisoned():
        found = flashlin.mamba_chunk_scan_combined(**leaves, chunk_size=64, dt_softplus=True,
                                                   return_final_states=True,
                                                   return_varlen_states="cu_seqlens" in given)
        loss = torch.stack([x.sin().sum() for x in found]).sum()
        return [*found, *torch.autograd.grad(loss, [x for x in leaves.values() if x.requires_grad])]


@pytest.mark.parametrize("edges", [(), (0, 20, 20, 37)], ids=["dense", "packed"])
def test_a_batch_in_parts_equals_the_whole(edges: tuple[int, ...], axis_limits: Callable[..., None]) -> None:
    given = make_scan(torch.float32, generator(), B=3, T=20, H=4, G=2, V=16, K=16, edges=edges)
    whole = results(given)
    axis_limits(8, 1, 1)
    for got, wanted in zip(results(given), whole, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("nothing", [{"B": 0}, {"T": 0}, {"H": 0, "G": 0}], ids=str)
def test_nothing_to_do(nothing: dict[str, int]) -> None:
    given = make_scan(torch.float32, generator(),
                      **{"B": 2, "T": 5, "H": 4, "G": 2, "V": 16, "K": 16, **nothing})
    assert all(not x.isnan().any() for x in results(given))


def test_public_simple_gla_refuses_groups() -> None:
    q, v = torch.zeros(1, 5, 2, 16), torch.zeros(1, 5, 4, 16)
    with pytest.raises(ValueError, match="v: got shape"):
        flashlin.chunk_simple_gla(q, q, v)


def test_a_state_of_any_strides_is_updated_where_it_lies() -> None:
    given = make_step(torch.float32, generator(), tied=False)
    given.pop("state")
    for behind in (torch.randn(3, 4, 24, 20).mT, torch.randn(20, 3, 24, 4).permute(1, 3, 0, 2),
                   torch.randn(3, 8, 20, 48)[:, ::2, :, ::2]):
        wanted, after = reference.step(behind.double(), **{name: x.double() for name, x in given.items()},
                                       softplus=True)
        y = flashlin.selective_state_update(behind, **given, dt_softplus=True)
        torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(behind.double(), after, rtol=1e-5, atol=1e-5)


def test_strided_inputs_of_a_step() -> None:
    """A step reads strided inputs: x, B, C and dt are slices of one projection, and dt is expanded."""
    H, P, N = 4, 16, 8
    rows = torch.randn(3, H * P + 2 * N + H)
    x, B, C, dt = rows.split([H * P, N, N, H], 1)
    A, state = -torch.rand(H), torch.randn(3, H, P, N)
    args = (x.view(3, H, P), dt[..., None].expand(3, H, P), A[:, None, None].expand(H, P, N), B[:, None],
            C[:, None])
    wanted, after = reference.step(state.double(), *(t.double() for t in args), softplus=True)
    y = flashlin.selective_state_update(state, *args, dt_softplus=True)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.double(), after, rtol=1e-5, atol=1e-5)


def test_an_index_past_the_end_touches_nothing() -> None:
    given = make_step(torch.float32, generator(), tied=False, pool=7)
    state = given.pop("state")
    given["state_batch_indices"] = torch.tensor([6, 7, 2**40])
    before = state.clone()
    y = flashlin.selective_state_update(state, **given)
    assert y[0].any() and not y[1:].any() and torch.equal(state[:6], before[:6]) and not torch.equal(state[6],
                                                                                                     before[
                                                                                                         6])


@torch.no_grad()
def test_the_library_operators_write_in_place() -> None:
    given = make_step(torch.float32, generator(), tied=False)
    args = [given.get(name) for name in ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias")]
    torch.library.opcheck(torch.ops.flashlin.selective_state_update.default, (*args, None, True))
    given = make_window(torch.float32, generator(), pool=7, ring=True)
    torch.library.opcheck(torch.ops.flashlin.conv_window.default, (*(given[name] for name in (
        "x", "conv_state", "weight", "bias", "cache_seqlens", "conv_state_indices")), True))


@pytest.mark.parametrize("nothing", [{"B": 0}, {"T": 0}], ids=str)
def test_a_selective_scan_of_nothing(nothing: dict[str, int]) -> None:
    leaves = {name: x.requires_grad_()
              for name, x in make_selective(torch.float32, generator(),
                                            **{"B": 2, "T": 5, **nothing}).items()}
    with poisoned():
        y, last = flashlin.selective_scan_fn(**leaves, return_last_state=True)
        assert y.shape == leaves["u"].shape and not last.any()
        assert not any(grad.any()
                       for grad in torch.autograd.grad(y.sum() + last.sum(), list(leaves.values())))


@pytest.mark.parametrize("given", [("D", "z", "delta_bias"), ()], ids=["all", "bare"])
@pytest.mark.alternate
def test_a_compiled_selective_scan(given: tuple[str, ...]) -> None:
    tensors = make_selective(torch.float32, generator(), T=40, D=5, N=3, given=given)
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    arguments = [leaves.get(name) for name in ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")]
    arguments[3:5] = [x.unsqueeze(1) for x in arguments[3:5] if x is not None]
    torch.library.opcheck(torch.ops.flashlin.selective_scan.default,
                          (*arguments, True, True, f"{selective_scan.OP} float32"))

    def scan() -> list[torch.Tensor]:
        y, last = flashlin.selective_scan_fn(**leaves, delta_softplus=True, return_last_state=True)
        return [y, last, *torch.autograd.grad(y.sin().sum() + last.sum(), list(leaves.values()))]

    compiled = torch.compile(lambda **x: flashlin.selective_scan_fn(**x, delta_softplus=True,
                                                                    return_last_state=True), fullgraph=True,
                             backend="aot_eager")
    y, last = compiled(**leaves)
    found = [y, last, *torch.autograd.grad(y.sin().sum() + last.sum(), list(leaves.values()))]
    for got, wanted in zip(found, scan(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_more_states_than_kernels_take_are_left_to_torch_when_compiled_too() -> None:
    tensors = make_selective(torch.float32, generator(), B=1, T=3, D=2, N=260, given=())
    compiled = torch.compile(lambda **x: flashlin.selective_scan_fn(**x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**tensors), flashlin.selective_scan_fn(**tensors))


@pytest.mark.parametrize("T", [37, 48])
@pytest.mark.alternate
def test_a_selective_scan_reads_what_lies_anywhere(T: int) -> None:
    """Strided inputs give the outputs and gradients of contiguous inputs, to the bit.

    The inputs are slices of a projection, with contiguous tokens or channels. The gradient of y is expanded.
    48 tokens are whole tiles, and their rows begin at multiples of 16 bytes.
    """
    tensors = make_selective(torch.float32, generator(), T=T, D=6, N=5, G=2)
    apart = {**tensors, "u": torch.cat([tensors["u"].mT, tensors["z"].mT], 2).mT[:, :6],
             "z": tensors["z"].mT.contiguous().mT,
             "B": tensors["B"].permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
             "A": tensors["A"].mT.contiguous().mT}
    found = []
    for given in (tensors, apart):
        leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
        with poisoned():
            y = flashlin.selective_scan_fn(**leaves, delta_softplus=True)
            assert isinstance(y, torch.Tensor)
            found.append([y, *torch.autograd.grad(y.sum(), list(leaves.values()))])
    for got, wanted in zip(*found, strict=True):
        assert torch.equal(got, wanted)
    assert found[1][0].stride() == (6 * T, 1, 6)  # the layout of u, without the other columns of the projection


@pytest.mark.parametrize("last", [False, True], ids=["tokens", "channels"])
@pytest.mark.parametrize("given", [("D", "z", "delta_bias"), ()], ids=["all", "bare"])
@pytest.mark.parametrize(("T", "N"), [(3, 4), (13, 1), (33, 64), (64, 3), (64, 16)], ids=str)
@pytest.mark.alternate
def test_tiles_of_a_selective_scan_that_are_whole_or_not(T: int, N: int, given: tuple[str, ...],
                                                         last: bool) -> None:
    tensors = make_selective(torch.float32, generator(), B=1, T=T, D=34, N=N, given=given, last=last)
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    wide = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    with poisoned():
        y, state = flashlin.selective_scan_fn(**leaves, delta_softplus=True, return_last_state=True)
        found = [y, state, *torch.autograd.grad(y.sin().sum() + state.sum(), list(leaves.values()))]
    y, state = reference.selective(**wide, delta_softplus=True)
    wanted = [y, state, *torch.autograd.grad(y.sin().sum() + state.sum(), list(wide.values()))]
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-4, atol=2e-5)


def test_what_is_not_finite_at_the_end_counts_for_no_token_after_it() -> None:
    """A NaN in the last token changes neither earlier outputs nor their gradient of A.

    In one channel A is -inf, so the channel forgets its state at every token.
    """
    tensors = make_selective(torch.float32, generator(), B=1, T=13, D=3, N=4, given=("D",))
    tensors["A"][0] = -torch.inf
    tensors["u"][:, 1, 12] = torch.nan
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    y, state = flashlin.selective_scan_fn(**leaves, delta_softplus=True, return_last_state=True)
    assert state[:, [0, 2]].isfinite().all() and state[:, 1].isnan().all()
    assert y.isfinite().sum() == y.numel() - 1
    before = {name: x[..., :12] if name in ("u", "delta", "B", "C") else x for name, x in leaves.items()}
    short = flashlin.selective_scan_fn(**before, delta_softplus=True)
    assert isinstance(short, torch.Tensor) and torch.equal(short, y[..., :12])
    dA, = torch.autograd.grad(y[..., :12].sum(), leaves["A"])
    wanted, = torch.autograd.grad(short.sum(), leaves["A"])
    assert dA[1:].isfinite().all()
    torch.testing.assert_close(dA[1:], wanted[1:])


@torch.no_grad()
def test_a_compiled_step_of_a_layer() -> None:
    H, P, N = 2, 16, 16

    def layer(rows: torch.Tensor, window: torch.Tensor, state: torch.Tensor, weight: torch.Tensor,
              A: torch.Tensor) -> torch.Tensor:
        x, B, C, dt = flashlin.mamba_causal_conv1d_update(rows, window, weight, None,
                                                          "silu").split([H * P, N, N, H], 1)
        return flashlin.selective_state_update(state, x.view(-1, H, P), dt[..., None].expand(-1, H, P),
                                               A[:, None, None].expand(H, P, N), B[:, None], C[:, None],
                                               dt_softplus=True)
    columns = H * P + 2 * N + H
    given: list[Any] = [torch.randn(3, columns), torch.randn(3, columns, 4), torch.randn(3, H, P, N),
                        torch.randn(columns, 4), -torch.rand(H)]
    theirs = [x.clone() for x in given]
    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(*given)
    torch.testing.assert_close(y, layer(*theirs))
    for got, wanted in zip(given, theirs, strict=True):
        torch.testing.assert_close(got, wanted)
