"""The programs whose failures flashlin began with, in the layers and functions of the real fla: what each does
raw, and patched. Without a GPU raw ones raise; on a card (where this file can be run, too) they fail in ways
of their own or are compared."""
from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import flashlin
from flashlin.compat.target import parse
from flashlin.testing.compile import Job, Result
from flashlin.testing.record import recording

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that there is no GPU here
    import fla.layers
    import fla.modules
    import fla.ops.simple_gla
    from fla.models.utils import Cache

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE = torch.bfloat16 if GPU else torch.float32
NO_GPU = r"active drivers|Pointer argument|cuda|CUDA|Triton"
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "DeltaNet": lambda: fla.layers.DeltaNet(hidden_size=64, num_heads=2, layer_idx=0),
    "GatedDeltaNet": lambda: fla.layers.GatedDeltaNet(hidden_size=64, num_heads=2, head_dim=32, layer_idx=0),
    "MultiScaleRetention": lambda: fla.layers.MultiScaleRetention(hidden_size=64, num_heads=2, layer_idx=0),
    "RWKV6Attention": lambda: fla.layers.RWKV6Attention(hidden_size=64, num_heads=2, layer_idx=0),
}


@pytest.fixture(autouse=True)
def no_compiler() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def made(name: str) -> Any:
    torch.manual_seed(0)
    return LAYERS[name]().to(DEVICE, DTYPE)


def forward(layer: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
    o: torch.Tensor = layer(x, **options)[0]
    return o


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    bound = 2e-2 if GPU else 1e-4
    torch.testing.assert_close(a.float(), b.float(), rtol=bound, atol=bound * float(b.detach().abs().max()))


@pytest.mark.skipif(GPU, reason="raw layers run on a GPU")
@pytest.mark.parametrize("name", LAYERS)
def test_raw_layers_raise_without_a_gpu(name: str) -> None:
    with pytest.raises(Exception, match=NO_GPU):
        forward(made(name), torch.randn(1, 80, 64))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_train_and_go_on_from_a_cache(name: str) -> None:
    layer, x = made(name), torch.randn(2, 70, 64, device=DEVICE, dtype=DTYPE, requires_grad=True)
    with flashlin.patched("fla"):
        forward(layer, x).square().mean().backward()
        assert x.grad is not None and x.grad.isfinite().all() and bool(x.grad.any())
        layer.eval()
        with torch.no_grad():
            whole, cache = forward(layer, x), Cache()
            steps = [forward(layer, x[:, at:to], past_key_values=cache, use_cache=True)
                     for at, to in ((0, 61), *((at, at + 1) for at in range(61, 70)))]
        close(torch.cat(steps, 1), whole)


def test_a_batch_of_65538_rows() -> None:
    """GatedDeltaNet at B = 10923 with 6 heads: a grid axis holds 65,535. Rows are compared with a batch of
    those rows alone."""
    torch.manual_seed(0)
    layer = fla.layers.GatedDeltaNet(hidden_size=48, num_heads=6, head_dim=8, expand_v=1, layer_idx=0)
    layer, rows = layer.to(DEVICE, DTYPE), [0, 1, 5461, 10921, 10922]
    x = torch.randn(10923, 4, 48, device=DEVICE, dtype=DTYPE)
    with flashlin.patched("fla"):
        few, many = x[rows].clone().requires_grad_(), x.clone().requires_grad_()
        o, right = forward(layer, many), forward(layer, few)
        o.float().square().sum().backward()
        right.float().square().sum().backward()
        assert many.grad is not None and few.grad is not None
        close(o[rows], right)
        close(many.grad[rows], few.grad)


@pytest.mark.skipif(not GPU, reason="gigabytes")
def test_one_long_row_of_36_heads_of_256() -> None:
    q, k, v = (torch.randn(1, 8192, 36, 256, device=DEVICE, dtype=DTYPE, requires_grad=True) for _ in "qkv")
    g = torch.nn.functional.logsigmoid(torch.randn(1, 8192, 36, device=DEVICE))
    with flashlin.patched("fla"):
        o, _ = fla.ops.simple_gla.chunk_simple_gla(q, k, v, g)
        o.sum().backward()
    heads = slice(35, 36)
    with flashlin.settings(path="torch"):
        right, _ = flashlin.chunk_simple_gla(*(x[:, :, heads].float() for x in (q, k, v)), g[:, :, heads])
    close(o[:, :, heads], right)
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))


def test_the_long_row_is_planned_for_the_cards_of_the_field() -> None:
    problem = flashlin.Problem("chunk_simple_gla", "simple_gla", "chunk", B=1, T=8192, H=36, K=256, V=256,
                               N=1, dtype="bfloat16", varlen=False, needs_grad=True)
    for machine in ("triton=3.2.0,sm=80", "triton=3.6.0,sm=90", "triton=3.7.1,sm=100"):
        assert flashlin.plan(problem, parse(machine)).path == "triton", machine


def test_tokens_up_to_three_times_the_vocabulary() -> None:
    """An RMSNorm after an embedding. Raw it is an IndexError without a place, and on a GPU the context dies
    in an innocent kernel, so that is not tried there. Guarded, one sentence names the token."""
    vocabulary = 50
    model = torch.nn.Sequential(torch.nn.Embedding(vocabulary, 32), fla.modules.RMSNorm(32)).to(DEVICE)
    tokens = torch.randint(0, vocabulary, (2, 16), device=DEVICE)
    tokens[1, 3] = 3 * vocabulary - 1
    with flashlin.patched("fla"), flashlin.settings(tokens="sync"):
        if not GPU:
            with pytest.raises(IndexError, match="index out of range in self"):
                model(tokens)
        flashlin.guard_embeddings(model)
        with pytest.raises(ValueError, match=r"149.*\b50\b|\b50\b.*149"):
            model(tokens)
        tokens[1, 3] = 0
        assert model(tokens).isfinite().all()


@pytest.mark.skipif(GPU, reason="compiled under another Triton, which needs no GPU")
def test_bf16_retention_on_a_t4(compiled: Callable[[str, list[Job]], list[Result]]) -> None:
    """fla's layer in bf16, as it would be started on a T4 under Triton 3.2: no kernel sees bf16, and each
    compiles for sm75."""
    layer = fla.layers.MultiScaleRetention(hidden_size=128, num_heads=2, layer_idx=0).bfloat16()
    x = torch.randn(1, 64, 128, dtype=torch.bfloat16, requires_grad=True)
    with warnings.catch_warnings(), flashlin.patched("fla"), recording(parse("triton=3.2.0,sm=75")) as started:
        warnings.simplefilter("ignore")  # of the copies
        layer(x)[0].sum().backward()
    scans = [launch for launch in started if launch.kernel.startswith("simple_gla")]
    assert scans
    assert not [launch for launch in started if "bf16" in str(launch.arguments)
                and "dot" in launch.traits]
    results = compiled("3.2.0", [Job(75, scans[0])])  # the rest: tests/matrix
    assert [result for result in results if result.status != "ok"] == []
