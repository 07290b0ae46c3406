"""torch.compile of the kernels: library operators, their fake kernels and their gradients.

Run with TRITON_INTERPRET=1, see test_cases.py.
"""
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import flashlin


def leaves(B: int = 2, T: int = 20, H: int = 2, K: int = 16, V: int = 8, N: int | None = None,
           v_first: bool = False, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(T)
    state = (B if N is None else N, H, V, K) if v_first else (B if N is None else N, H, K, V)
    made = [torch.randn(*shape, generator=generator).to(dtype)
            for shape in ((B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H), state)]
    made[3] = F.logsigmoid(made[3])
    return [x.requires_grad_() for x in made]


def gated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, h0: torch.Tensor,
          **extra: Any) -> Any:
    return flashlin.chunk_simple_gla(q, k, v, g, initial_state=h0, output_final_state=True, **extra)


def assert_same(compiled: Any, eager: Any, tensors: list[torch.Tensor]) -> None:
    found = []
    for call in (compiled, eager):
        outputs = [x for x in call(*tensors) if x is not None]
        loss = sum(x.float().sin().sum() for x in outputs)
        found.append([*outputs, *torch.autograd.grad(loss, tensors)])
    for got, wanted in zip(*found, strict=True):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.alternate
def test_lengths_share_a_graph_that_starts_kernels(starts: list[str]) -> None:
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(gated, fullgraph=True, backend=graphs)
    for T in (20, 33, 7, 65):
        tensors = leaves(T=T)
        del starts[:]
        compiled(*tensors)
        assert "simple_gla_scan" in starts
        assert_same(compiled, gated, tensors)
    assert {"simple_gla_states", "simple_gla_dv", "simple_gla_grads"} <= set(starts)
    assert graphs.frame_count <= 2


@pytest.mark.alternate
def test_every_size_symbolic(starts: list[str]) -> None:
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(gated, fullgraph=True, backend=graphs, dynamic=True)
    for sizes in ((2, 20, 3, 16, 8), (3, 33, 2, 16, 16)):
        assert_same(compiled, gated, leaves(*sizes))
    assert graphs.frame_count == 1 and "simple_gla_scan" in starts
    # K determines the scale, which is a constant in the operator's call
    assert_same(compiled, gated, leaves(3, 33, 2, 8, 16))
    assert graphs.frame_count == 2
    assert_same(compiled, gated, leaves(2, 20, 3, 10, 5))  # these sizes are padded


@pytest.mark.parametrize("T", [0, 1])
def test_hardly_any_rows(T: int) -> None:
    assert_same(torch.compile(gated, fullgraph=True, backend="aot_eager"), gated, leaves(T=T))


def test_packed_sequences(starts: list[str]) -> None:
    graphs = CompileCounterWithBackend("aot_eager")

    def call(*tensors: torch.Tensor, bounds: torch.Tensor) -> Any:
        return gated(*tensors, cu_seqlens=bounds, state_v_first=True)
    compiled = torch.compile(call, fullgraph=True, backend=graphs)
    for edges in ([0, 7, 7, 20], [0, 1, 30, 33], [0, 9, 12, 40, 41]):
        bounds = torch.tensor(edges)

        def with_bounds(function: Any, bounds: torch.Tensor = bounds) -> Any:
            return lambda *tensors: function(*tensors, bounds=bounds)
        assert_same(with_bounds(compiled), with_bounds(call),
                    leaves(B=1, T=edges[-1], N=len(edges) - 1, v_first=True))
    # first the number of rows changes, then the number of sequences
    assert graphs.frame_count <= 3 and "simple_gla_scan" in starts


def test_a_compiled_table_that_is_out_of_order_cannot_reach_outside() -> None:
    """Compiled code does not read cu_seqlens on the host. Rows of no sequence are zeros, as on a GPU."""
    compiled = torch.compile(lambda *tensors: gated(*tensors, cu_seqlens=torch.tensor([3, 12, 99])),
                             fullgraph=True, backend="aot_eager")
    tensors = leaves(B=1, T=20, N=2)
    o, ht = compiled(*tensors)
    grads = torch.autograd.grad(o.sum() + ht.sum(), tensors)
    assert (o[:, :3] == 0).all() and o[:, 3:].any() and all((grad[:, :3] == 0).all() for grad in grads[:4])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore:.*fp32 copies")
def test_sixteen_bit_tensors(dtype: torch.dtype) -> None:
    tensors = leaves(dtype=dtype)
    compiled = torch.compile(gated, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(compiled(*tensors), gated(*tensors), strict=True):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", ["retention", "linear_attn", "fused_recurrent_simple_gla"])
def test_the_rest_of_the_family(name: str, starts: list[str]) -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return getattr(flashlin, name)(q, k, v)[:1]
    tensors = leaves()[:3]
    tensors = [x.detach().exp().requires_grad_() for x in tensors]
    assert_same(torch.compile(call, fullgraph=True, backend="aot_eager"), call, tensors)
    assert starts


@pytest.mark.parametrize("facts",
                         [{}, {"g": False}, {"h0": False}, {"v_first": True}, {"has_ht": False},
                          {"bounds": True}, {"mode": "fused_recurrent"}, {"needs_grad": False}], ids=str)
@pytest.mark.alternate
def test_the_library_operator(facts: dict[str, Any]) -> None:
    v_first, packed, needs_grad = facts.get("v_first", False), facts.get("bounds",
                                                                         False), facts.get("needs_grad", True)
    q, k, v, g, h0 = leaves(1 if packed else 2, 9, 2, 16, 8, 3 if packed else None, v_first)
    if not needs_grad:
        q, k, v, g, h0 = (x.detach() for x in (q, k, v, g, h0))
    bounds = torch.tensor([0, 4, 4, 9]) if packed else None
    mode = facts.get("mode", "chunk")
    arguments = (q, k, v, g if facts.get("g", True) else None, None, h0 if facts.get("h0", True) else None,
                 bounds, 0.25, facts.get("has_ht", True), v_first, torch.float32, mode, needs_grad,
                 f"{mode}_simple_gla")
    torch.library.opcheck(torch.ops.flashlin.simple_gla.default, arguments)


def test_the_library_operator_of_the_gradients() -> None:
    q, k, v, g, h0 = (x.detach() for x in leaves(2, 9))
    for gate, state in ((g, h0), (None, None)):
        for wanted in ("q k v" + " g h0" * (gate is not None), "k"):
            torch.library.opcheck(torch.ops.flashlin.simple_gla_backward.default, (
                q, k, v, gate, None, state, None, None, None, torch.ones_like(v), h0 * 2, 0.25, True, False,
                torch.float32, "chunk", True, "chunk_simple_gla", wanted))
