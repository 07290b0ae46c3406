"""Time the single forward kernel of the delta rule beside the two kernels of today, and check its results.

Not finished: `python -m benchmarks.whole` runs on a Hopper GPU only.
"""
from __future__ import annotations

import json
import sys

import torch
import torch.nn.functional as F

import flashlin
from flashlin.kernels.delta.overlapping_whole import delta_whole
from flashlin.kernels.delta.reference import recurrence


def graphed(call, rounds: int = 20) -> float:
    """Return microseconds of a call in a CUDA graph."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            call()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / rounds * 1000)
    return min(times)


def run(B: int, T: int, H: int, HV: int, D: int, decay: int = 2, right: bool = False) -> dict:
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, h, D, device="cuda", dtype=torch.bfloat16) for h in (H, H, HV))
    k = F.normalize(k.float(), dim=-1).bfloat16()
    beta = torch.rand(B, T, HV, device="cuda").bfloat16()
    g = F.logsigmoid(torch.randn(B, T, HV, device="cuda") + 2)
    G = (g * 1.4426950408889634).view(B * T // 64, 64, HV).cumsum(1).view(B * T, HV).T.contiguous()
    o, h0 = torch.full_like(v, float("nan")), torch.randn(B, HV, D, D, device="cuda")
    ht = torch.full_like(h0, float("nan"))
    arguments = dict(q=q, k=k, v=v, beta=beta, G=G if decay == 2 else None, h0=h0, A=None, A_low=None, betas=None,
                     o=o, ht=ht, undivided=None,
                     scale=D ** -0.5, T=T, H=H, HV=HV, R=B * T, L=1 << 30, rows=B * T, V=D, BT=64, BK=D, BV=64,
                     GROUPS=2, STAGES=3, DECAY=decay, HAS_H0=True, HAS_HT=True, V_FIRST=False)
    values = [arguments[name] for name in delta_whole.arg_names]
    grid = (B * HV * (D // 128),)

    def whole() -> None:
        delta_whole[grid](*values, num_warps=4)
    whole()
    torch.cuda.synchronize()
    first = o.clone()
    A, betas = torch.full((B, T, HV, 64), float("nan"), device="cuda", dtype=torch.bfloat16), torch.empty_like(G)
    kept = {**arguments, "A": A, "A_low": A.clone(), "betas": betas}
    training = [kept[name] for name in delta_whole.arg_names]

    def train() -> None:
        delta_whole[grid](*training, num_warps=4)
    whole()
    torch.cuda.synchronize()
    x = dict(q=q, k=k, v=v, beta=beta, initial_state=h0, output_final_state=True)
    ours = (lambda: flashlin.chunk_gated_delta_rule(**x, g=g)) if decay == 2 else (
        lambda: flashlin.chunk_delta_rule(**x))
    with torch.no_grad():
        ro, rht = ours()
        far = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in ((o, ro), (ht, rht))]
        found = dict(shape=[B, T, H, HV, D], decay=decay, from_today=far, same=bool(torch.equal(o, first)),
                     whole_us=graphed(whole), training_us=graphed(train), finite=bool(A.isfinite().all()),
                     today_us=graphed(ours))
        if right:
            eo, eh = recurrence(*(t.double().cpu() for t in (q, k, v, beta)), g.double().cpu() if decay else None,
                                h0=h0.double().cpu(), scale=D ** -0.5)
            found["from_float64"] = [float((a.double().cpu() - b).norm() / b.norm()) for a, b in ((o, eo), (ht, eh))]
            found["today_from_float64"] = [float((a.double().cpu() - b).norm() / b.norm())
                                           for a, b in ((ro, eo), (rht, eh))]
    print(json.dumps(found), flush=True)
    return found


if __name__ == "__main__":
    for at in ((1, 256, 1, 2, 128, 2, True), (1, 640, 2, 2, 128, 0, True), (4, 4096, 32, 32, 128),
               (4, 4096, 32, 32, 128, 0), (8, 2048, 16, 16, 128), (1, 8192, 32, 32, 128), (1, 8192, 16, 64, 128)):
        run(*at)
    sys.exit(0)
