"""flashlin.serving on a real GPU is compared with float64, and bitwise where flashlin promises equal bits.

No call synchronizes the host with the GPU, and a CUDA graph can capture a step.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashlin import serving
from flashlin.serving import delta
from tests.serving import checks
from tests.serving.checks import KINDS, Layer, decoded, same

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

F32, BF16 = torch.float32, torch.bfloat16
LAYERS = [Layer(kind, *sizes, *dtypes, neg=neg, device="cuda:0") for kind in KINDS for sizes, dtypes, neg in (
    ((2, 4, 128, 128), (BF16, F32), False), ((1, 2, 64, 128), (BF16, BF16), True),
    ((2, 2, 96, 40), (F32, F32), False))]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_decoding_drafts_and_prompts(layer: Layer) -> None:
    checks.check_decoding(layer)
    checks.check_drafts(layer)
    checks.check_drafts_of_several_lengths(layer)
    checks.check_prompts(layer, "fused_recurrent", [5, 3, 0, 12])
    checks.check_prompts(layer, "chunk", [5, 3, 0, 100])


@pytest.mark.parametrize("state", [F32, BF16], ids=str)
def test_a_long_prompt_is_the_bits_of_decoding(state: torch.dtype) -> None:
    checks.check_prompts(Layer("heads, raw", 2, 4, 128, 128, BF16, state, device="cuda:0"), "fused_recurrent",
                         [300, 2, 0, 65])


@pytest.mark.parametrize("mode", delta.MODES)
def test_nothing_leaks_into_other_requests(mode: str) -> None:
    checks.check_isolation(Layer("heads, raw", 2, 4, 64, 64, BF16, device="cuda:0"), mode)


def test_rows_of_nobody_are_zero() -> None:
    layer = Layer("heads", device="cuda:0")
    checks.check_rows_of_nobody(layer)
    tokens = {name: None if x is None else x[None] for name, x in layer.tokens(6).items()}
    for mode in delta.MODES:
        o = serving.prefill(**tokens, states=layer.pool(2), indices=layer.integers(0, 1), mode=mode,
                            cu_seqlens=layer.integers(1, 3, 5), has_initial_state=torch.ones(2).bool().cuda())
        assert not o[0, [0, 5]].any() and o[0, 1:5].any(-1).all()


@pytest.mark.parametrize("kind", ["heads, raw", "channels, raw"])
def test_nothing_waits_for_the_host(kind: str, no_host_sync: Callable[[], None]) -> None:
    layer = Layer(kind, 2, 4, 64, 64, BF16, device="cuda:0")
    options, pool, tokens = layer.parameters(), layer.pool(9), layer.tokens(6)
    apart = {name: None if x is None else x.view(2, 3, *x.shape[1:]) for name, x in tokens.items()}
    packed = {name: None if x is None else x[None] for name, x in tokens.items()}
    table, counts = layer.integers([[0, 1, 2], [3, -1, 20]]), layer.integers(1, 2)
    slots, edges, has = layer.integers(5, -1), layer.integers(0, 2, 6), torch.tensor([True, False]).cuda()
    x, conv, weight = layer.normal(1, 6, 8), layer.normal(9, 8, 3), layer.normal(8, 4)

    @torch.no_grad()
    def step() -> None:
        serving.decode(**apart, states=pool, indices=table, num_accepted_tokens=counts, **options)
        for mode in delta.MODES:
            serving.prefill(**packed, states=pool, indices=slots, cu_seqlens=edges, has_initial_state=has,
                            mode=mode, **options)
        serving.causal_conv1d_prefill(x, conv, weight, None, slots, edges, has, "silu")
        serving.causal_conv1d_update(x[0, :2], conv, weight, None, "silu", conv_state_indices=slots)
    step()
    no_host_sync()
    step()


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_step_in_a_cuda_graph(drafts: int) -> None:
    """A step is captured once, and replayed with other tokens, slots, counts and padding."""
    layer, T = Layer("heads, raw", 2, 4, 128, 128, BF16, device="cuda:0"), 1 + drafts
    options, pool = layer.parameters(), layer.pool(20)
    tokens: Any = layer.tokens(4 * T)
    table = layer.integers([[*range(n, n + T)] for n in range(0, 4 * T, T)])
    counts = layer.integers(1, 1, 1, 1)

    def step(states: torch.Tensor) -> torch.Tensor:
        return decoded(options, tokens, states, table, T, num_accepted_tokens=counts)
    step(pool)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step(pool)
    for first in (3, 7):
        for name, x in layer.tokens(4 * T).items():
            tokens[name].copy_(x)
        rows = [[*range(first + n, first + n + T)] for n in range(0, 3 * T, T)]
        table.copy_(layer.integers([*rows, [-1] * T]))
        counts.copy_(layer.integers(T, 1, 0, 1))
        eager, before = pool.clone(), pool.clone()
        graph.replay()
        same(o, step(eager))
        same(pool, eager)
        assert not o[3 * T:].any() and not torch.equal(pool, before)
