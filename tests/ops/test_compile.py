"""torch.compile and torch.export on the torch path: one graph, few compilations, equal results.

tests/interpret has the tests of the kernels.
"""
from __future__ import annotations

import ast
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import flashlin
from flashlin import policy

LENGTHS = (70, 100, 128, 129, 1000)
ROOT = Path(flashlin.__file__).parent


def leaves(B: int, T: int, H: int, K: int, V: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(T)
    made = [torch.randn(*shape, generator=generator)
            for shape in ((B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H), (B, H, K, V))]
    made[3] = F.logsigmoid(made[3])
    return [x.requires_grad_() for x in made]


def gated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, h0: torch.Tensor) -> Any:
    return flashlin.chunk_simple_gla(q, k, v, g, initial_state=h0, output_final_state=True)


def assert_same(compiled: Callable[..., Any], eager: Callable[..., Any], tensors: list[torch.Tensor]) -> None:
    found = []
    for call in (compiled, eager):
        outputs = [x for x in call(*tensors) if x is not None]
        loss = sum(x.sin().sum() for x in outputs)
        found.append([*outputs, *torch.autograd.grad(loss, tensors, allow_unused=True,
                                                     materialize_grads=True)])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.alternate
def test_lengths_and_one_recompilation() -> None:
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(gated, fullgraph=True, backend=graphs)
    for T in LENGTHS:
        assert_same(compiled, gated, leaves(2, T, 2, 16, 8))
    assert graphs.frame_count <= 2  # one for the first length, one for all other lengths
    for T in (33, 64, 5):
        assert_same(compiled, gated, leaves(2, T, 2, 16, 8))
    assert graphs.frame_count <= 3  # one more for lengths within a single chunk


@pytest.mark.alternate
def test_batches_and_lengths_together() -> None:
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(gated, fullgraph=True, backend=graphs)
    for B, T in ((2, 70), (3, 100), (5, 65), (4, 130)):
        assert_same(compiled, gated, leaves(B, T, 2, 16, 8))
    assert graphs.frame_count <= 2


@pytest.mark.alternate
def test_every_size_symbolic() -> None:
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(gated, fullgraph=True, backend=graphs, dynamic=True)
    for sizes in ((2, 70, 3, 12, 16), (3, 133, 2, 10, 9)):
        assert_same(compiled, gated, leaves(*sizes))
    assert graphs.frame_count == 1


def test_the_default_backend() -> None:
    assert_same(torch.compile(gated, fullgraph=True), gated, leaves(2, 70, 2, 16, 8))


# two ops that choose the mode, one recurrent op and one chunked op
@pytest.mark.parametrize("name",
                         ["retention", "fused_recurrent_linear_attn", "chunk_lightning_attn", "simple_gla"])
@pytest.mark.alternate
def test_others_of_the_family(name: str) -> None:
    extra = {"layer_idx": 1,
             "num_layers": 4} if "lightning" in name else {"normalize": False} if "linear" in name else {}

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return getattr(flashlin, name)(q, k, v, output_final_state=True, **extra)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=graphs)
    for T in (40, 50, 60):
        assert_same(compiled, call, leaves(2, T, 2, 16, 8)[:3])
    assert graphs.frame_count <= 2


def test_normalised_linear_attention_and_reverse() -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        o, states = flashlin.fused_recurrent_linear_attn(q.exp(), k.exp(), v, output_final_state=True,
                                                         reverse=True, normalize=True)
        return o, *states
    assert_same(torch.compile(call, fullgraph=True, backend="aot_eager"), call, leaves(2, 40, 2, 16, 8)[:3])


def test_errors_are_the_same() -> None:
    compiled = torch.compile(gated, backend="eager")
    q, k, v, g, h0 = leaves(2, 12, 2, 16, 8)
    with pytest.raises(ValueError, match="initial_state: got shape"):
        compiled(q, k, v, g, h0.mT)


def test_settings_are_read_where_they_are_traced() -> None:
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda x: x + 1 if policy.current().debug else x - 1, fullgraph=True,
                             backend=graphs)
    x = torch.zeros(3)
    assert compiled(x)[0] == -1
    with flashlin.settings(debug=True):
        assert compiled(x)[0] == 1
        with ThreadPoolExecutor(1) as other:
            assert other.submit(lambda: compiled(x)[0]).result() == -1
    assert compiled(x)[0] == -1 and graphs.frame_count <= 3
    flashlin.settings(debug=True)
    assert compiled(x)[0] == 1 and graphs.frame_count <= 4


def kda(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, h0: torch.Tensor) -> Any:
    return flashlin.fused_recurrent_kda(q, F.normalize(k, dim=-1), v, -q.abs(), g.exp(), initial_state=h0,
                                        output_final_state=True)


def rwkv7(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, h0: torch.Tensor) -> Any:
    k = F.normalize(k, dim=-1)
    return flashlin.fused_recurrent_rwkv7(q, -q.abs(), k, v, -k, k * g.exp()[..., None], initial_state=h0,
                                          output_final_state=True)


def chunk_delta(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, h0: torch.Tensor) -> Any:
    return flashlin.chunk_gated_delta_rule(q, F.normalize(k, dim=-1), v, g, g.exp(), initial_state=h0,
                                           output_final_state=True)


@pytest.mark.parametrize("call", [kda, rwkv7, chunk_delta])
@pytest.mark.alternate
def test_no_loop_is_unrolled(call: Callable[..., Any]) -> None:
    """The graph does not grow with the number of tokens or chunks, so compile time does not either."""
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=graphs)
    for T in (40, 100, 7):
        assert_same(compiled, call, leaves(1, T, 2, 16, 8))
    # one graph each for the first length, for all lengths, and for lengths whose backward keeps no states
    assert graphs.frame_count <= 3 and graphs.op_count < 60


def test_packed_sequences_in_one_graph() -> None:
    bounds = torch.tensor([0, 3, 3, 12])

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> Any:
        chunked, _ = flashlin.chunk_simple_gla(q, k, v, g, cu_seqlens=bounds)
        recurrent, _ = flashlin.fused_recurrent_gla(q, k, v, -q.abs(), cu_seqlens=bounds)
        return chunked, recurrent
    assert_same(torch.compile(call, fullgraph=True, backend="aot_eager"), call, leaves(1, 12, 2, 16, 8)[:4])


@pytest.mark.parametrize("call", [gated, chunk_delta, kda])
def test_an_exported_length_has_a_name(call: Callable[..., Any]) -> None:
    class Model(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> Any:
            return call(*tensors)
    T = torch.export.Dim("T", min=2, max=4096)
    shapes = {"tensors": (*({1: T} for _ in range(4)), None)}
    exported = torch.export.export(Model(), tuple(x.detach() for x in leaves(1, 70, 2, 16, 8)),
                                   dynamic_shapes=shapes, strict=False).module()
    for length in (70, 300, 5):
        tensors = [x.detach() for x in leaves(1, length, 2, 16, 8)]
        torch.testing.assert_close(exported(*tensors), call(*tensors), rtol=1e-4, atol=1e-4)

def changed_tuples(source: str) -> list[str]:
    """Return the lists from a starred assignment (``*these, last = x``) that the source changes later.

    A change is an assignment to an index or a call of append. The compiler of torch 2.11 treats such lists
    as tuples. CI has another torch release, so this test reads the source.
    """
    changed = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            nodes = list(ast.walk(function))
            made = {node.value.id for node in nodes if isinstance(node, ast.Starred)
                    and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name)}
            changed += [f"{function.name}: {node.value.id}" for node in nodes
                        if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.value, ast.Name)
                        and node.value.id in made and (isinstance(node.ctx, ast.Store)
                                                       or getattr(node, "attr", "") == "append")]
    return changed


def test_no_starred_list_is_changed() -> None:
    assert changed_tuples("def f(x):\n *a, b = x\n a[0] = b\n *c, d = x\n c.append(d)\n return c[0]") == [
        "f: a", "f: c"]
    sources = [path for room in ("ops", "modules", "kernels") for path in (ROOT / room).rglob("*.py")]
    assert len(sources) > 50
    assert [f"{path.name}: {name}" for path in sources for name in changed_tuples(path.read_text())] == []
