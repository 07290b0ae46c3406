"""Training around a model works with flashlin.

The tests cover autocast, activation checkpointing, loss scaling, torch.compile, and several processes (DDP,
FSDP2).
"""
from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import flashlin
from flashlin import dispatch
from matrix.stacks.models import TINY, build, named

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about the missing GPU
    import fla.models

VOCABULARY = 67
TOKENS = torch.arange(2 * 40).reshape(2, 40).mul(7).remainder(TINY["vocab_size"])


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
    assert len(calls) == 2  # forward runs again in backward
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
    assert scaler.get_scale() == 1024.0  # no step was skipped
    close({name: p.grad for name, p in net.named_parameters() if p.grad is not None}, right, 1e-3)
    assert all(torch.equal(p, before[name] - p.grad)  # the gradient is unscaled, and the step used it
               for name, p in net.named_parameters() if p.grad is not None)


@pytest.mark.alternate
def test_compiled_without_a_break() -> None:
    net = model(fuse_cross_entropy=False)
    right = gradients(net, net(TOKENS, labels=TOKENS).loss)
    torch._dynamo.reset()
    compiled = torch.compile(net.model, fullgraph=True, backend="aot_eager")
    hidden = compiled(TOKENS, use_cache=False).last_hidden_state
    loss = torch.nn.functional.cross_entropy(net.lm_head(hidden)[:, :-1].flatten(0, 1),
                                             TOKENS[:, 1:].flatten())
    close(gradients(net, loss), right, 1e-3)


# The patched package, one of its models, and the op that the model must call.
RANKED: dict[str, tuple[str, Callable[[], Any], str]] = {
    "fla's GatedDeltaNet": ("fla", model, "chunk_gated_delta_rule"),
    "qwen3_next": ("transformers", lambda: build(named("qwen3_next")), "chunk_gated_delta_rule"),
    "mamba2": ("transformers", lambda: build(named("mamba2")), "mamba_chunk_scan_combined")}


def ranked(name: str, rank: int) -> None:
    """Check that the mean gradient of two ranks, with one row each, is the gradient of both rows."""
    package, made, op = RANKED[name]
    asked = set[str]()
    with flashlin.patched(package), dispatch.watching(lambda plan: asked.add(plan.asked.op)):
        net, mine = made(), TOKENS[rank:rank + 1]
        right = gradients(net, net(TOKENS, labels=TOKENS).loss)
        parallel = torch.nn.parallel.DistributedDataParallel(made())
        parallel(mine, labels=mine).loss.backward()
        close({one: p.grad for one, p in parallel.module.named_parameters()}, right, 1e-3)
        sharded = made()
        for layer in getattr(sharded, sharded.base_model_prefix).layers:
            fully_shard(layer)
        fully_shard(sharded)
        sharded(mine, labels=mine).loss.backward()
        close({one: p.grad.full_tensor() for one, p in sharded.named_parameters()}, right, 1e-3)
    assert op in asked, asked
    print(f"{name}: rank {rank} is right", flush=True)


RANK = """
import sys
import torch.distributed as dist
sys.path.insert(0, {tests!r})
from tests.integrations.test_training import RANKED, ranked
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
for name in RANKED:
    ranked(name, rank)
dist.destroy_process_group()
"""


@pytest.mark.alternate
def test_two_processes(tmp_path: Path) -> None:
    """Two processes get the gradients of one process, under DDP and under FSDP2."""
    root = str(Path(__file__).resolve().parents[2])
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(tests=root))
    ranks = [subprocess.Popen([sys.executable, "-W", "ignore", str(script), str(rank),
                               str(tmp_path / "meet")],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              env={**os.environ, "OMP_NUM_THREADS": "1"}) for rank in (0, 1)]
    said = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    assert [[name for name in RANKED if f"{name}: rank {at} is right" in text] for at, text in enumerate(said)
            ] == 2 * [[*RANKED]]
