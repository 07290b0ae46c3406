"""Tests of RWKV-6 on the torch path, in addition to its cases.

They cover errors that name the argument, gradients by finite differences, tokens that forget the whole state
and torch.compile.
"""
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashlin
from flashlin.guards.checks import FEW_TOKENS
from flashlin.kernels.gla import torch_path
from flashlin.kernels.gla.reference import recurrence
from flashlin.ops import rwkv6
from flashlin.ops._common import recurrent
from flashlin.testing.compare import Tensors
from tests.naive import recurrence as recurrence_of_others

META = torch.device("meta")


def inputs(B: int = 2, T: int = 12, H: int = 3, K: int = 8, V: int = 5,
           dtype: torch.dtype = torch.float64) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    r, k, v, w, u = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in (
        (B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H, K), (H, K)))
    return {"r": r.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "w": F.logsigmoid(w).to(dtype),
            "u": u.to(dtype)}


def t(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"r": None}, TypeError, "r: got NoneType, need a tensor of shape [B, T, H, K]"),
    ({"r": t(2, 12, 3)}, ValueError, "r: got shape [2, 12, 3], need [B, T, H, K]"),
    # fla fails only in backward
    ({"k": t(2, 12, 1, 8)}, ValueError, "k: got shape [2, 12, 1, 8], need [B, T, H, K] = [2, 12, 3, 8]"),
    ({"v": t(2, 12, 6, 5)}, ValueError, "v: got shape [2, 12, 6, 5], need [B, T, H, V] = [2, 12, 3, any]"),
    ({"w": t(2, 12, 3)}, ValueError, "w: got shape [2, 12, 3], need [B, T, H, K] = [2, 12, 3, 8]"),
    ({"w": None}, TypeError, "w: got NoneType, need a tensor of shape [B, T, H, K]"),
    ({"w": t(2, 12, 3, 8, device=META)}, ValueError, "w: got device meta, need cpu, where r is"),
    ({"u": t(3, 5)}, ValueError, "u: got shape [3, 5], need [H, K] = [3, 8]"),
    ({"u": None}, TypeError, "u: got NoneType, need a tensor of shape [H, K]"),
    ({"u": t(3, 8, dtype=torch.int64)}, TypeError, "u: got dtype torch.int64, need bfloat16"),
    ({"initial_state": t(2, 3, 5, 8)}, ValueError,
     "initial_state: got shape [2, 3, 5, 8], need [N, H, K, V] = [2, 3, 8, 5]"),
    ({"cu_seqlens": torch.tensor([0, 12])}, ValueError,
     "r: The batch size is expected to be 1 rather than 2 when using `cu_seqlens`")]


@pytest.mark.parametrize("op", ["chunk_rwkv6", "rwkv6"])
@pytest.mark.parametrize(("changes", "error", "text"), WRONG, ids=[text for _, _, text in WRONG])
def test_wrong_arguments(op: str, changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        getattr(flashlin, op)(**{**inputs(dtype=torch.float32), **changes})
    assert str(raised.value).startswith(text)


def test_what_the_chunked_op_refuses() -> None:
    for size in (0, 8, 48, 32.0):
        with pytest.raises(ValueError, match=f"chunk_size: got {size}, need a power of two of at least 16"):
            flashlin.chunk_rwkv6(**inputs(), chunk_size=size)
    assert torch.equal(flashlin.chunk_rwkv6(**inputs(), chunk_size=32)[0],
                       flashlin.chunk_rwkv6(**inputs())[0])
    with pytest.raises(ValueError, match="cu_seqlens_cpu: got a tensor without cu_seqlens, need both"):
        flashlin.chunk_rwkv6(**inputs(), cu_seqlens_cpu=torch.tensor([0, 12]))


def test_two_references_agree() -> None:
    given = inputs(2, 9, 2, 4, 3)
    r, k, v, w, u = given.values()
    h0 = torch.randn(2, 2, 4, 3, dtype=torch.float64)
    others = recurrence_of_others(r, k, v, gk=w, bonus=u, before=True, h0=h0, scale=0.5)
    for x, y in zip(recurrence(r, k, v, w, u=u, h0=h0, scale=0.5), others, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("T", [5, 80])
@pytest.mark.parametrize("edges", [None, (0, 3, 3, 5)], ids=["dense", "packed"])
def test_modes_agree(T: int, edges: tuple[int, ...] | None) -> None:
    bounds = None if edges is None else torch.tensor([*edges[:-1], T])
    given = inputs(1 if edges else 2, T)
    r, k, v, w, u = given.values()
    h0 = torch.randn(3 if edges else 2, 3, 8, 5, dtype=torch.float64)
    wanted = recurrence(r, k, v, w, u=u, h0=h0, bounds=bounds, scale=8 ** -0.5)
    for mode in ("auto", "chunk", "fused_recurrent"):
        found = flashlin.rwkv6(**given, initial_state=h0, output_final_state=True, cu_seqlens=bounds,
                               mode=mode)
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)
    with pytest.raises(ValueError, match="mode: got 'fast', need one of auto, chunk, fused_recurrent"):
        flashlin.rwkv6(**given, mode="fast")


def test_auto_takes_few_tokens_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    for mode in ("chunk", "fused_recurrent"):
        def noting(*arguments: Any, _mode: str = mode, _real: Any = getattr(rwkv6, f"{mode}_rwkv6"),
                   **named: Any) -> Any:
            seen.append(_mode)
            return _real(*arguments, **named)
        monkeypatch.setattr(rwkv6, f"{mode}_rwkv6", noting)
    for T, grad in ((FEW_TOKENS, False), (FEW_TOKENS, True), (FEW_TOKENS + 1, False)):
        rwkv6.rwkv6(**{name: x.requires_grad_(grad) for name, x in inputs(T=T).items()})
    assert seen == ["fused_recurrent", "chunk", "chunk"]


def test_long_inputs_go_chunk_by_chunk_only_where_that_is_the_same_function(
        monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = torch_path.compute

    def noting(*arguments: Any) -> Any:
        seen.append(arguments[0].q.shape[1])
        return real(*arguments)
    monkeypatch.setattr(recurrent.chunked_gla, "compute", noting)
    r, k, v, w, u = inputs(T=recurrent.LONG + 9).values()
    h0 = torch.randn(2, 3, 8, 5, dtype=torch.float64)
    for reverse in (False, True):
        found = flashlin.fused_recurrent_rwkv6(r, k, v, w, u, None, h0, True, reverse)
        wanted = recurrence_of_others(r, k, v, gk=w, bonus=u, before=True, h0=h0, scale=8 ** -0.5,
                                      reverse=reverse)
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y)
    assert len(seen) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_by_differences(packed: bool) -> None:
    given = inputs(B=1, T=70, H=1, K=3, V=2)
    state = torch.randn(3 if packed else 1, 1, 3, 2, dtype=torch.float64)
    bounds = torch.tensor([0, 3, 3, 70]) if packed else None

    def call(r: Any, k: Any, v: Any, w: Any, u: Any, h0: Any) -> Any:
        return flashlin.chunk_rwkv6(r, k, v, w, u, None, h0, True, bounds)
    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in (*given.values(), state)],
                                    fast_mode=True)


def test_forgetting_everything() -> None:
    """A token with w = -inf ends a sequence, and no gradient is NaN.

    The token itself still reads the earlier state. The next token reads only this token.
    """
    given = inputs(1, 100, 2, 4, 3)
    given["w"][:, 40] = -torch.inf
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    o, ht = flashlin.chunk_rwkv6(**leaves, output_final_state=True)
    for rows in (slice(0, 41), slice(40, 100)):
        part = {name: x if name == "u" else x[:, rows] for name, x in given.items()}
        alone, state = flashlin.chunk_rwkv6(**part, output_final_state=True)
        torch.testing.assert_close(o[:, rows][:, -40:], alone[:, -40:])
    torch.testing.assert_close(ht, state)
    for grad in torch.autograd.grad(o.sum() + ht.sum(), list(leaves.values())):
        assert grad.isfinite().all()


def test_nothing_to_do() -> None:
    for facts in ({"T": 0}, {"B": 0}, {"H": 0}):
        given = {name: x.requires_grad_() for name, x in inputs(**facts).items()}
        B, T, H, V = given["v"].shape
        h0 = torch.randn(B, H, 8, V, dtype=torch.float64).requires_grad_()
        o, ht = flashlin.chunk_rwkv6(**given, initial_state=h0, output_final_state=True)
        assert o.shape == (B, T, H, V) and torch.equal(ht, h0)
        grads = torch.autograd.grad(o.sum() + ht.sum(), [*given.values(), h0])
        assert torch.equal(grads[-1], torch.ones_like(h0)) and not any(grad.any() for grad in grads[:-1])


def test_dtypes_in_and_out() -> None:
    given = inputs(dtype=torch.bfloat16)
    leaves = {"r": given["r"].float(), "w": given["w"].float(), "u": given["u"].half(),
              "initial_state": torch.randn(2, 3, 8, 5).half()}
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    o, ht = flashlin.chunk_rwkv6(**{**given, **leaves}, output_final_state=True)
    assert (o.dtype, ht.dtype) == (torch.bfloat16, torch.float32)
    grads = torch.autograd.grad(o.float().sum() + ht.sum(), list(leaves.values()))
    assert [grad.dtype for grad in grads] == [x.dtype for x in leaves.values()]
    o, ht = flashlin.chunk_rwkv6(**inputs())
    assert o.dtype == torch.float64 and ht is None


def test_the_torch_path_compiles() -> None:
    def call(r: Any, k: Any, v: Any, w: Any, u: Any) -> Any:
        return flashlin.chunk_rwkv6(r, k, v, w, u)[0]
    tensors = [x.requires_grad_() for x in inputs(T=70, dtype=torch.float32).values()]
    results = []
    for function in (torch.compile(call, fullgraph=True, backend="aot_eager"), call):
        o = function(*tensors)
        results.append([o, *torch.autograd.grad(o.sin().sum(), tensors)])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
