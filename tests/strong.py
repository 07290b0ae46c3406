"""Check of ops with one decay per key channel on long sequences with very strong decays.

The channels decay at random, down to e^-20 per token. In addition, one channel forgets everything at each
token and one channel never decays.
"""
from __future__ import annotations

from functools import partial

import torch

from flashlin.testing.cases import CASES
from flashlin.testing.compare import allowed, judge, results

OPS = ("chunk_gla", "chunk_rwkv6", "chunk_kda")


def failures(op: str, device: torch.device, dtype: torch.dtype, T: int, K: int, V: int,
             H: int = 2) -> list[str]:
    """Describe errors in outputs, states and gradients of the op's case ``strong`` at the given sizes.

    The results are compared with the recurrence in float64. The two special channels are also compared on
    their own, relative to their own size. A mean over all channels would hide errors of the channel that
    forgets everything, because the gradients of its gate are only 1e-8.
    """
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
