"""The kernel of flashlin.serving in Triton's interpreter.

The kernel must pass the checks of the torch path and run batches in slices. All calls of a layer must use one
compiled kernel.
"""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flashlin.compat.target import parse
from flashlin.serving import delta
from flashlin.testing.record import recording
from tests.serving import checks
from tests.serving.checks import KINDS, Layer, decoded, prefilled, same
from tests.share import share

F32, F16 = torch.float32, torch.float16
# without bfloat16, which the interpreter computes wrongly
LAYERS = [Layer(kind, *sizes, *dtypes, neg=neg) for kind, sizes, dtypes, neg in zip(
    KINDS, [(1, 1, 16, 16), (1, 2, 24, 40), (2, 2, 33, 7), (1, 3, 48, 16), (2, 2, 20, 12), (1, 2, 5, 64)],
    [(F32, F32), (F16, F16), (F16, F32), (F32, F32), (F16, F16), (F32, F32)],
    [False, False, True, False, False, True], strict=True)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def named(layer: Layer) -> str:
    return f"{layer.kind}-{layer.dtype}-{layer.state}".replace("torch.", "")


@pytest.mark.parametrize("layer", share(LAYERS, 0, 2), ids=named)
def test_decoding_and_drafts(layer: Layer, starts: list[str]) -> None:
    checks.check_decoding(layer)
    checks.check_drafts(layer, 1)
    checks.check_drafts_of_several_lengths(layer)
    assert set(starts) == {"recurrent_pool"}


@pytest.mark.parametrize("layer", share(LAYERS, 1, 2), ids=named)
def test_prompts_are_the_bits_of_decoding(layer: Layer, starts: list[str]) -> None:
    checks.check_prompts(layer, "fused_recurrent", [3, 1, 0, 3])
    assert set(starts) == {"recurrent_pool"}


def test_prompts_chunk_by_chunk() -> None:
    checks.check_prompts(Layer("heads, raw", 1, 1, 16, 16), "chunk", [2, 1, 0, 18])


def test_nothing_leaks_into_other_requests() -> None:
    checks.check_isolation(Layer("heads, raw", 1, 1, 16, 16), "fused_recurrent")


def test_rows_of_nobody_are_zero() -> None:
    checks.check_rows_of_nobody(Layer("heads"))


def test_a_batch_in_parts_is_the_whole(axis_limits: Callable[..., None]) -> None:
    layer = Layer("heads, raw", 1, 2, 16, 16)
    options, pool, tokens = layer.parameters(), layer.pool(9), layer.tokens(12)
    table = layer.integers([[0, 1, 2], [3, -1, 4], [-1, 8, 8], [6, 7, 5]])
    counts, lengths, has = layer.integers(1, 2, 3, 0), [3, 0, 5, 4], [True, True, False, False]

    def results() -> list[torch.Tensor]:
        drafted, read = pool.clone(), pool.clone()
        return [decoded(options, tokens, drafted, table, 3, num_accepted_tokens=counts), drafted,
                prefilled(options, tokens, read, table[:, 0].contiguous(), lengths, has, "fused_recurrent"),
                read]
    wanted = results()
    axis_limits(4, 1, 1)
    for got, whole in zip(results(), wanted, strict=True):
        same(got, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_one_compiled_kernel_serves_a_layer(kind: str) -> None:
    """Decoding, drafts and prompts of a layer all use the same compiled kernel.

    Their results are therefore rounded in the same way on any GPU.
    """
    layer = Layer(kind, 2, 4, 128, 128, torch.bfloat16, torch.bfloat16, neg=True)
    options, pool, tokens = layer.parameters(), layer.pool(9), layer.tokens(6)
    with recording(parse("triton=3.6.0,sm=90")) as found:
        decoded(options, tokens, pool, torch.arange(6))
        decoded(options, tokens, pool, torch.arange(6).view(2, 3), 3)
        decoded(options, tokens, pool, torch.arange(6).view(2, 3), 3,
                num_accepted_tokens=torch.tensor([1, 3]))
        prefilled(options, tokens, pool, torch.arange(2), [1, 5], [True, False], delta.MODES[1])
    assert [launch.kernel for launch in found] == ["recurrent_pool"]
