"""The proof that no decay is too strong, for any op with a decay of its own in each key channel: long
sequences whose channels forget at random, down to e^-20 a token, beside one that keeps nothing and one that
keeps everything."""
from __future__ import annotations

from functools import partial

import torch

from flashlin.testing.cases import CASES
from flashlin.testing.compare import allowed, judge, results

OPS = ("chunk_gla", "chunk_rwkv6", "chunk_kda")


def failures(op: str, device: torch.device, dtype: torch.dtype, T: int, K: int, V: int,
             H: int = 2) -> list[str]:
    """What is wrong with outputs, states and gradients of the op's case ``strong`` made so large, beside the
    recurrence in float64. The two channels are judged by themselves, too, each against its own size: beside
    the one that keeps everything a mean would hide the other, whose gate has gradients of 1e-8."""
    strong = next(case for case in CASES if case.op == op and case.id == "strong")
    case = strong._replace(make=partial(strong.make, B=1, T=T, H=H, K=K, V=V))
    found = []
    for name, (ours, theirs) in results(case, device, dtype).items():
        most = allowed(case, name, dtype)
        found.append(judge(name, ours, theirs, most))
        if theirs.shape == (1, T, H, K) and name.startswith("d"):
            for channel in (0, 1):
                a, b = ours[..., channel].double(), theirs[..., channel]
                size = b.pow(2).mean().sqrt()
                found.append(judge(f"{name}[..., {channel}]", a / size, b / size, most))
    return [str(verdict) for verdict in found if not verdict.ok]
