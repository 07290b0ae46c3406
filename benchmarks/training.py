"""Record the losses of a small Gated DeltaNet language model over 1,000 steps.

    python -m benchmarks.training --out benchmarks/results
    python -m benchmarks.training --device cpu --steps 3 --small        try the script itself

It trains with flashlin in bf16, with fla in bf16, and with flashlin in fp32. The layers are fla's, and the
text is the bytes of Python's standard library. Each training begins with the same weights and sees the same
bytes.

"fla" uses the layers as they are. Where fla refuses the backward on Hopper, the refusal is switched off
(benchmarks/sides.py). "flashlin" and "float32" use ``flashlin.patched("fla")``. bf16 means autocast with
float32 weights. fla's kernels run in the first of their configurations that fits, because speed is not
measured.
"""
from __future__ import annotations

import random
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashlin
from benchmarks.sides import stop_refusing
from matrix import record
from matrix.stacks import seeds

WORDS, SEED, SHOWN = 256, 0, 100
Way = tuple[Callable[[], AbstractContextManager[Any]], bool]  # the context of the training, and True for bf16
WAYS: dict[str, Way] = {"flashlin": (partial(flashlin.patched, "fla"), True), "fla": (nullcontext, True),
                        "float32": (partial(flashlin.patched, "fla"), False)}


class Size(NamedTuple):
    """The size of the model and its batches.

    B, T: rows and tokens of one step.
    layers: number of layers.
    D: width of the model.
    H, K: number of heads and their size.
    """
    B: int = 16
    T: int = 1024
    layers: int = 4
    D: int = 512
    H: int = 4
    K: int = 64


class Model(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        import fla.layers
        self.embed, self.head = nn.Embedding(WORDS, size.D), nn.Linear(size.D, WORDS, bias=False)
        self.mixers = nn.ModuleList(fla.layers.GatedDeltaNet(
            hidden_size=size.D, num_heads=size.H, head_dim=size.K, expand_v=2, layer_idx=at)
            for at in range(size.layers))
        self.mixed = nn.ModuleList(nn.Sequential(nn.RMSNorm(size.D), nn.Linear(size.D, 3 * size.D), nn.SiLU(),
                                                 nn.Linear(3 * size.D, size.D)) for _ in range(size.layers))
        self.norms = nn.ModuleList(nn.RMSNorm(size.D) for _ in range(size.layers + 1))

    def forward(self, text: Tensor) -> Tensor:
        """Return the mean loss of the next byte."""
        x = self.embed(text[:, :-1])
        for mixer, mixed, norm in zip(self.mixers, self.mixed, self.norms, strict=False):
            x = x + mixer(norm(x))[0]
            x = x + mixed(x)
        logits = self.head(self.norms[-1](x)).float()
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def batches(size: Size, steps: int, device: torch.device) -> Iterator[Tensor]:
    """Yield batches of bytes, the same in every run."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    chance = random.Random(SEED)
    for _ in range(steps):
        begins = [chance.randrange(len(text) - size.T - 1) for _ in range(size.B)]
        yield torch.stack([text[at:at + size.T + 1] for at in begins]).long().to(device)


def trained(way: str, size: Size, steps: int, device: torch.device) -> list[float]:
    """Train the model, and return the loss of every step.

    way: a key of WAYS.
    """
    around, narrow = WAYS[way]
    torch.manual_seed(SEED)
    with around():
        model = Model(size).to(device)
        tuner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for step, text in enumerate(batches(size, steps, device)):
            for group in tuner.param_groups:
                group["lr"] = 1e-3 * min(1.0, (step + 1) / 50)
            with torch.autocast(device.type, torch.bfloat16, enabled=narrow):
                loss = model(text)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            tuner.step()
            tuner.zero_grad(set_to_none=True)
            losses.append(loss.detach())
            if sys.stderr.isatty() and step % SHOWN == 0:
                print(f"\r{way}: step {step} of {steps}", end="", file=sys.stderr)
    return [round(float(loss), 4) for loss in losses]


def main() -> None:
    options = record.parser(__doc__)
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--device", default="cuda")
    options.add_argument("--small", action="store_true", help="use small sizes, to try the script itself")
    given = options.parse_args()
    device, size = torch.device(given.device), Size(2, 64, 1, 32, 2, 16) if given.small else Size()
    torch.backends.cuda.matmul.allow_tf32 = False
    refused, losses, failed = stop_refusing(), dict[str, list[float]](), dict[str, str]()
    for way in WAYS:
        try:
            with seeds.quick():
                losses[way] = trained(way, size, given.steps, device)
        except Exception as error:  # an error of any kind is a result
            failed[way] = record.raised(error)
        print(f"{way:10}", failed.get(way) or f"{losses[way][0]:.3f} -> {losses[way][-1]:.3f}", flush=True)
        if given.out:
            record.write(given.out, "training", record.this_card(), fla=record.version("fla-core"),
                         refused=refused, steps=given.steps, **size._asdict(), failed=failed, losses=losses)


if __name__ == "__main__":
    main()
