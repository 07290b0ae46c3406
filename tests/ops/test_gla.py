"""Tests of gated linear attention on the torch path, in addition to its cases.

They cover errors that name the argument, strong decays, gradients by finite differences, modes and
torch.compile.
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
from flashlin.ops import gla
from flashlin.ops._common import recurrent
from flashlin.testing.compare import Tensors, judge
from tests.naive import recurrence as recurrence_of_others

META = torch.device("meta")


def inputs(B: int = 2, T: int = 12, H: int = 3, K: int = 8, V: int = 5, dtype: torch.dtype = torch.float64,
           seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    q, k, v, g = (torch.randn(B, T, H, D, generator=generator, dtype=torch.float64) for D in (K, K, V, K))
    return {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "g": F.logsigmoid(g).to(dtype)}


def t(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k": t(2, 12, 3, 4)}, ValueError, "k: got shape [2, 12, 3, 4], need [B, T, H, K] = [2, 12, 3, 8]"),
    ({"v": t(2, 12, 6, 5)}, ValueError, "v: got shape [2, 12, 6, 5], need [B, T, H, V] = [2, 12, 3, any]"),
    ({"g": t(2, 12, 3)}, ValueError, "g: got shape [2, 12, 3], need [B, T, H, K] = [2, 12, 3, 8]"),
    ({"g": t(2, 12, 3, 5)}, ValueError, "g: got shape [2, 12, 3, 5], need [B, T, H, K] = [2, 12, 3, 8]"),
    ({"g": None}, TypeError, "g: got NoneType, need a tensor of shape [B, T, H, K]"),
    ({"g": t(2, 12, 3, 8, dtype=torch.int32)}, TypeError, "g: got dtype torch.int32, need bfloat16"),
    ({"g": t(2, 12, 3, 8, device=META)}, ValueError, "g: got device meta, need cpu, where q is"),
    ({"initial_state": t(2, 3, 5, 8)}, ValueError,
     "initial_state: got shape [2, 3, 5, 8], need [N, H, K, V] = [2, 3, 8, 5]"),
    ({"initial_state": t(2, 3, 8, 5), "state_v_first": True}, ValueError,
     "initial_state: got shape [2, 3, 8, 5], need [N, H, V, K] = [2, 3, 5, 8]"),
    ({"cu_seqlens": torch.tensor([0, 12])}, ValueError,
     "q: The batch size is expected to be 1 rather than 2 when using `cu_seqlens`")]


@pytest.mark.parametrize("op", ["chunk_gla", "gla"])
@pytest.mark.parametrize(("changes", "error", "text"), WRONG, ids=[text for _, _, text in WRONG])
def test_wrong_arguments(op: str, changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        getattr(flashlin, op)(**{**inputs(dtype=torch.float32), **changes})
    assert str(raised.value).startswith(text)


def test_what_one_of_the_ops_refuses() -> None:
    given = inputs()
    g = given.pop("g")
    # fla accepts g here and computes without a gate
    with pytest.raises(TypeError,
                       match=r"fused_recurrent_gla: got unexpected keyword g; did you mean gv or gk\?$"):
        flashlin.fused_recurrent_gla(**given, g=g)
    with pytest.raises(ValueError,
                       match=r"gk: got shape \[2, 12, 3\], need \[B, T, HV, K\] = \[2, 12, 3, 8\]"):
        flashlin.fused_recurrent_gla(**given, gk=g[..., 0])
    with pytest.raises(ValueError,
                       match=r"gv: got shape \[2, 12, 3, 8\], need \[B, T, HV, V\] = \[2, 12, 3, 5\]"):
        flashlin.fused_recurrent_gla(**given, gv=g)
    with pytest.raises(ValueError, match="cu_seqlens_cpu: got a tensor without cu_seqlens, need both"):
        flashlin.chunk_gla(**given, g=g, cu_seqlens_cpu=torch.tensor([0, 12]))
    with pytest.raises(ValueError, match="mode: got 'fast', need one of auto, chunk, fused_recurrent"):
        flashlin.gla(**given, g=g, mode="fast")
    for op, gate in (("chunk_gla", {"g": g}), ("fused_recurrent_gla", {"gk": g})):
        with pytest.raises(ValueError, match=f"{op}: got both state_v_first and transpose_state_layout"):
            getattr(flashlin, op)(**given, **gate, state_v_first=True, transpose_state_layout=True)


def run_both(given: Tensors, h0: torch.Tensor, scale: float,
             bounds: torch.Tensor | None = None) -> tuple[list[Any], list[Any]]:
    """Return outputs, final states and all gradients of chunk_gla and of the float64 reference."""
    found = []
    for call, dtype in ((flashlin.chunk_gla, given["q"].dtype), (None, torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (*given.values(), h0)]
        q, k, v, g, state = leaves
        o, ht = (recurrence(q, k, v, g, h0=state, bounds=bounds, scale=scale) if call is None
                 else call(q, k, v, g, scale, state, True, False, bounds))
        weights = (torch.sin(torch.arange(x.numel(), dtype=torch.float64)).view(x.shape).to(x.dtype)
                   for x in (o, ht))
        found.append([o, ht, *torch.autograd.grad([o, ht], leaves, list(weights))])
    return found[0], found[1]


NAMES = ("o", "ht", "dq", "dk", "dv", "dg", "dh0")


@pytest.mark.parametrize("seed", range(6))
def test_random_shapes_and_strong_decays(seed: int) -> None:
    """Random shapes with strong decays give results within 2e-6 of the reference.

    g is uniform in -20 .. 0. One channel is always -20, and the next one is always 0.
    """
    size = torch.randint(1, 150, (6,), generator=torch.Generator().manual_seed(seed)).tolist()
    B, T, H, K, V = 1 + size[0] % 3, size[1], 1 + size[2] % 3, 2 + size[3] % 40, 1 + size[4] % 40
    given = inputs(B, T, H, K, V, dtype=torch.float32, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    g = -20 * torch.rand(B, T, H, K, generator=generator)
    g[..., 0], g[..., 1] = -20, 0
    ours, theirs = run_both({**given, "g": g}, torch.randn(B, H, K, V, generator=generator), 0.3)
    assert [verdict
            for name, x, y in zip(NAMES, ours, theirs, strict=True)
            if not (verdict := judge(name, x, y, 2e-6)).ok] == []


def test_a_channel_with_strong_decays_has_a_right_gradient_of_its_own() -> None:
    """The gradient of each channel is accurate by itself.

    A mean over channels would hide an error next to a channel that keeps everything.
    """
    given = inputs(1, 100, 1, 4, 8, dtype=torch.float32)
    given["g"][..., 0], given["g"][..., 1] = -8, 0
    ours, theirs = run_both(given, torch.randn(1, 1, 4, 8), 1.0)
    for channel in range(4):
        verdict = judge("dg", ours[5][..., channel], theirs[5][..., channel], 1e-5)
        assert verdict.ok and verdict.rms < 1e-5, (channel, verdict)


def test_forgetting_everything() -> None:
    """A token with g = -inf starts a new sequence, and no gradient is NaN."""
    given = inputs(1, 100, 2, 4, 3)
    g = given["g"].clone()
    g[:, 40] = -torch.inf
    leaves = {name: x.clone().requires_grad_() for name, x in {**given, "g": g}.items()}
    o, ht = flashlin.chunk_gla(**leaves, output_final_state=True)
    alone, state = flashlin.chunk_gla(*(x[:, 40:] for x in given.values()), output_final_state=True)
    torch.testing.assert_close(o[:, 40:], alone)
    torch.testing.assert_close(ht, state)
    for grad in torch.autograd.grad(o.sum() + ht.sum(), list(leaves.values())):
        assert grad.isfinite().all()


def test_two_references_agree() -> None:
    given = inputs(2, 9, 2, 4, 3)
    h0 = torch.randn(2, 2, 4, 3, dtype=torch.float64)
    others = recurrence_of_others(given["q"], given["k"], given["v"], gk=given["g"], h0=h0, scale=0.5)
    for x, y in zip(recurrence(**given, h0=h0, scale=0.5), others, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("reverse", [False, True])
def test_two_references_agree_about_all_decays_of_packed_sequences(reverse: bool) -> None:
    given, bounds = inputs(1, 9, 4, 4, 3), torch.tensor([1, 4, 4, 8])
    q, k, v, gk = given["q"][:, :, :2], given["k"][:, :, :2], given["v"], given["g"]
    decays = {"g": gk[..., 0], "gamma": gk[0, 0, :, 1], "gk": gk, "gv": -v.abs()}
    rest = {"h0": torch.randn(3, 4, 4, 3, dtype=torch.float64), "bounds": bounds, "scale": 0.5,
            "reverse": reverse}
    for bonus in (None, torch.randn(4, 4, dtype=torch.float64)):
        others = recurrence_of_others(q, k, v, **decays, bonus=bonus, before=bonus is not None, **rest)
        for x, y in zip(recurrence(q, k, v, **decays, u=bonus, **rest), others, strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_by_differences(packed: bool) -> None:
    given = inputs(B=1, T=70, H=1, K=3, V=2)
    state = torch.randn(3 if packed else 1, 1, 3, 2, dtype=torch.float64)
    bounds = torch.tensor([0, 3, 3, 70]) if packed else None

    def call(q: Any, k: Any, v: Any, g: Any, h0: Any) -> Any:
        return flashlin.chunk_gla(q, k, v, g, initial_state=h0, output_final_state=True, cu_seqlens=bounds)
    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in (*given.values(), state)],
                                    fast_mode=True)


@pytest.mark.parametrize("T", [5, 80])
@pytest.mark.parametrize("edges", [None, (0, 3, 3, 5)], ids=["dense", "packed"])
def test_both_modes_and_both_layouts_of_states(T: int, edges: tuple[int, ...] | None) -> None:
    bounds = None if edges is None else torch.tensor([*edges[:-1], T])
    given = inputs(1 if edges else 2, T)
    h0 = torch.randn(3 if edges else 2, 3, 8, 5, dtype=torch.float64)
    wanted = recurrence(**given, h0=h0, bounds=bounds, scale=8 ** -0.5)
    for mode in ("auto", "chunk", "fused_recurrent"):
        for v_first in (False, True):
            o, ht = flashlin.gla(**given, initial_state=h0.mT if v_first else h0, output_final_state=True,
                                 state_v_first=v_first, cu_seqlens=bounds, mode=mode)
            for x, y in zip((o, ht.mT if v_first else ht), wanted, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


def test_auto_takes_few_tokens_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    for mode in ("chunk", "fused_recurrent"):
        def noting(*arguments: Any, _mode: str = mode, _real: Any = getattr(gla, f"{mode}_gla"),
                   **named: Any) -> Any:
            seen.append(_mode)
            return _real(*arguments, **named)
        monkeypatch.setattr(gla, f"{mode}_gla", noting)
    for T, grad in ((FEW_TOKENS, False), (FEW_TOKENS, True), (FEW_TOKENS + 1, False)):
        gla.gla(**{name: x.requires_grad_(grad) for name, x in inputs(T=T).items()})
    assert seen == ["fused_recurrent", "chunk", "chunk"]


def test_long_inputs_go_chunk_by_chunk_only_where_that_is_the_same_function(
        monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = torch_path.compute

    def noting(*arguments: Any) -> Any:
        seen.append(arguments[0].q.shape[1])
        return real(*arguments)
    monkeypatch.setattr(recurrent.chunked_gla, "compute", noting)
    given = inputs(T=recurrent.LONG + 9)
    q, k, v, g = given.values()
    h0, gv = torch.randn(2, 3, 8, 5, dtype=torch.float64), F.logsigmoid(v)
    for gates, reverse, chunked in (({"gk": g}, False, True), ({"gk": g, "gv": gv}, False, False),
                                    ({"gk": g}, True, False), ({}, False, False)):
        o, ht = flashlin.fused_recurrent_gla(q, k, v, **gates, initial_state=h0, output_final_state=True,
                                             reverse=reverse)
        wanted = recurrence_of_others(q, k, v, **gates, h0=h0, scale=8 ** -0.5, reverse=reverse)
        for x, y in zip((o, ht), wanted, strict=True):
            torch.testing.assert_close(x, y)
        assert bool(seen) == chunked
        seen.clear()


def test_nothing_to_do() -> None:
    for facts in ({"T": 0}, {"B": 0}, {"H": 0}):
        given = {name: x.requires_grad_() for name, x in inputs(**facts).items()}
        B, T, H, V = given["v"].shape
        h0 = torch.randn(B, H, 8, V, dtype=torch.float64).requires_grad_()
        o, ht = flashlin.chunk_gla(**given, initial_state=h0, output_final_state=True)
        assert o.shape == (B, T, H, V) and torch.equal(ht, h0)
        grads = torch.autograd.grad(o.sum() + ht.sum(), [*given.values(), h0], allow_unused=True,
                                    materialize_grads=True)
        assert torch.equal(grads[-1], torch.ones_like(h0)) and not any(grad.any() for grad in grads[:-1])


def test_dtypes_in_and_out() -> None:
    given = inputs(dtype=torch.bfloat16)
    h0 = torch.randn(2, 3, 8, 5).half().requires_grad_()
    g = given["g"].float().requires_grad_()
    o, ht = flashlin.chunk_gla(given["q"].float(), given["k"], given["v"], g, initial_state=h0,
                               output_final_state=True)
    assert (o.dtype, ht.dtype) == (torch.bfloat16, torch.float32)
    dg, dh0 = torch.autograd.grad(o.float().sum() + ht.sum(), [g, h0])
    assert (dg.dtype, dh0.dtype) == (torch.float32, torch.float16)
    assert flashlin.chunk_gla(**inputs())[0].dtype == torch.float64 and flashlin.chunk_gla(
        **inputs())[1] is None


def test_the_torch_path_compiles() -> None:
    def call(q: Any, k: Any, v: Any, g: Any) -> Any:
        return flashlin.gla(q, k, v, g)[0]
    tensors = [x.requires_grad_() for x in inputs(T=70, dtype=torch.float32).values()]
    results = []
    for function in (torch.compile(call, fullgraph=True, backend="aot_eager"), call):
        o = function(*tensors)
        results.append([o, *torch.autograd.grad(o.sin().sum(), tensors)])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
