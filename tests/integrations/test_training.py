"""What training puts around a model, with flashlin in it: autocast, activation checkpointing, loss scaling,
torch.compile, several processes (DDP, FSDP2)."""
from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashlin

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that there is no GPU here
    import fla.models

VOCABULARY = 67
TOKENS = torch.arange(2 * 40).reshape(2, 40).mul(7).remainder(VOCABULARY)


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    with flashlin.patched("fla"):
        yield


def model(**more: Any) -> Any:
    torch.manual_seed(0)
    config = fla.models.GatedDeltaNetConfig(hidden_size=64, num_hidden_layers=2, num_heads=2, head_dim=16,
                                            vocab_size=VOCABULARY, **more)
    return fla.models.GatedDeltaNetForCausalLM(config).float().train()


def gradients(net: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    net.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in net.named_parameters()}


def close(ours: dict[str, torch.Tensor], right: dict[str, torch.Tensor], bound: float) -> None:
    for name, x in right.items():
        assert (ours[name] - x).norm() <= bound * x.norm() + 1e-7, name


def test_autocast() -> None:
    net = model()
    right = gradients(net, net(TOKENS, labels=TOKENS).loss)
    with torch.autocast("cpu", torch.bfloat16):
        out = net(TOKENS, labels=TOKENS)
    assert out.logits.dtype == torch.bfloat16
    close(gradients(net, out.loss), right, 0.1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    net = model()
    right = gradients(net, net(TOKENS, labels=TOKENS).loss)
    net.gradient_checkpointing_enable({"use_reentrant": reentrant})
    calls = []
    net.model.layers[0].attn.register_forward_hook(lambda *_: calls.append(1))
    ours = gradients(net, net(TOKENS, labels=TOKENS).loss)
    assert len(calls) == 2  # again in backward
    assert all(torch.equal(ours[name], x) for name, x in right.items())


def test_loss_scaling() -> None:
    net = model()
    right = gradients(net, net(TOKENS, labels=TOKENS).loss)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer.zero_grad()
    scaler.scale(net(TOKENS, labels=TOKENS).loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1024.0  # no step was left out
    close({name: before[name] - p.detach() for name, p in net.named_parameters()}, right, 1e-3)


def test_compiled_without_a_break() -> None:
    net = model(fuse_cross_entropy=False)
    right = gradients(net, net(TOKENS, labels=TOKENS).loss)
    torch._dynamo.reset()
    compiled = torch.compile(net.model, fullgraph=True, backend="aot_eager")
    hidden = compiled(TOKENS, use_cache=False).last_hidden_state
    loss = torch.nn.functional.cross_entropy(net.lm_head(hidden)[:, :-1].flatten(0, 1),
                                             TOKENS[:, 1:].flatten())
    close(gradients(net, loss), right, 1e-3)


RANKS = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
import flashlin
sys.path.insert(0, {tests!r})
from tests.integrations.test_training import TOKENS, close, gradients, model
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
with flashlin.patched("fla"):
    net = model()
    right = gradients(net, net(TOKENS, labels=TOKENS).loss)
    mine = TOKENS[rank:rank + 1]
    ddp = torch.nn.parallel.DistributedDataParallel(model())
    ddp(mine, labels=mine).loss.backward()
    close({{name: p.grad for name, p in ddp.module.named_parameters()}}, right, 1e-3)
    from torch.distributed.fsdp import fully_shard
    sharded = model()
    for layer in sharded.model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    sharded(mine, labels=mine).loss.backward()
    close({{name: p.grad.full_tensor() for name, p in sharded.named_parameters()}}, right, 1e-3)
dist.destroy_process_group()
print("rank", rank, "is right")
"""


def test_two_processes(tmp_path: Path) -> None:
    """The mean of two ranks' gradients, each of one row, is the gradient of both rows: DDP and FSDP2."""
    root = str(Path(__file__).resolve().parents[2])
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANKS.format(tests=root)))
    ranks = [subprocess.Popen([sys.executable, str(script), str(rank), str(tmp_path / "meet")],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              env={**os.environ, "OMP_NUM_THREADS": "1"}) for rank in (0, 1)]
    said = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    assert all(f"rank {at} is right" in text for at, text in enumerate(said))
