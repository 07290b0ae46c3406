"""FakeTensorMode and make_fx do not mix with the tensors that flashlin caches.

Caches get no fake tensors, and fake calls get no real tensors. Ops refuse unreadable tensors with an error
that names the argument.
"""
from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx

import flashlin
from flashlin.modules import RotaryEmbedding
from flashlin.ops._common import slopes
from tests.hostile import OPS, UNREAD, UNREAD_BY, arguments

# Every op that caches tensors between calls.
KEEPING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "retention": lambda x: flashlin.chunk_retention(x, x, x)[0],
    "lightning": lambda x: flashlin.chunk_lightning_attn(x, x, x, layer_idx=1, num_layers=4)[0],
    "token_shift": lambda x: flashlin.token_shift(x.flatten(2)),
}


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    slopes._cached.cache_clear()


def faked(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode() as mode:
        o = call(mode.from_tensor(x))
    assert isinstance(o, FakeTensor)
    return o


def traced(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return make_fx(call, tracing_mode="fake")(x)(x)


@pytest.mark.parametrize("how", [faked, traced])
@pytest.mark.parametrize("op", KEEPING)
def test_before_and_after_a_real_call(op: str, how: Callable[..., torch.Tensor]) -> None:
    call, x = KEEPING[op], torch.randn(1, 8, 2, 16, requires_grad=True)
    how(call, x)
    first = call(x)
    first.sum().backward()
    how(call, x)
    assert type(first) is torch.Tensor and torch.equal(call(x), first) and x.grad is not None


def test_the_tables_of_a_module() -> None:
    module, x = RotaryEmbedding(16), torch.randn(1, 8, 2, 16)
    wanted = RotaryEmbedding(16)(x, x)[0]
    # allowed because the frequencies of the module are real
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
        assert isinstance(module(fake, fake)[0], FakeTensor)
    assert torch.equal(module(x, x)[0], wanted)


def test_the_lengths_of_packed_sequences_need_values() -> None:
    with FakeTensorMode() as mode:
        x, edges = mode.from_tensor(torch.randn(1, 6, 2, 8)), mode.from_tensor(torch.tensor([0, 2, 6]))
        assert flashlin.chunk_linear_attn(x, x, x, normalize=False)[0].shape == x.shape
        for op in (flashlin.chunk_linear_attn, flashlin.fused_recurrent_linear_attn):
            with pytest.raises(ValueError, match="cu_seqlens: got a FakeTensor, need one with values"):
                op(x, x, x, normalize=False, cu_seqlens=edges)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("op", OPS)
def test_a_dtensor_is_refused_by_name(op: str, mesh: DeviceMesh) -> None:
    given = arguments(op)
    for name, x in given.items():
        several = isinstance(x, tuple) and isinstance(x[0], torch.Tensor)
        first = x[0] if several else x
        if isinstance(first, torch.Tensor) and name not in UNREAD and (op, name) not in UNREAD_BY:
            shard = DTensor.from_local(first, mesh)
            text = rf"{name}.*: got a DTensor, need .* pass {name}.*to_local\(\)"
            with pytest.raises(TypeError, match=text):
                getattr(flashlin, op)(**{**given, name: (shard, *x[1:]) if several else shard})


def test_an_import_inside_of_it() -> None:
    """An import inside FakeTensorMode creates real tensors; this runs in a new process."""
    script = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    import flashlin
    for name in flashlin.__all__:
        getattr(flashlin, name)
torch.compile(lambda x: (flashlin.check_tokens(x, 4), x + 1)[1], backend="aot_eager",
              fullgraph=True)(torch.arange(4))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
