"""Calls that can use the overlapping kernels, for every supported kind of decay, state, head size and dtype.

``python -m tests.overlapped`` runs the given calls on a GPU and reports how far their results are from those
of the plain Triton kernels. It runs as a separate process, because a wrong barrier hangs.
"""
from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

import flashlin
from flashlin import dispatch
from flashlin.compat.subprocesses import channel
from flashlin.kernels import scans
from flashlin.kernels.delta import backward
from flashlin.kernels.delta.backward import MUCH
from flashlin.kernels.delta.reference import recurrence

decays = F.logsigmoid


def sequences(op: str, device: torch.device, *, B: int = 2, T: int = 256, H: int = 4, D: int = 128,
              gated: bool = False, state: bool = False, v_first: bool = False,
              dtype: torch.dtype = torch.bfloat16, shift: int = 0,
              gradients: bool = False) -> list[torch.Tensor]:
    """Call an op without a delta term; return o and any final state, or the gradients of the inputs.

    shift: number of elements by which q, k and v start after an aligned address. A tensor descriptor needs
    an aligned address.
    """
    torch.manual_seed(0)
    q, k, v = (torch.randn(B * T * H * D + shift, device=device, dtype=dtype)[shift:].view(B, T, H, D)
               for _ in "qkv")
    x: dict[str, Any] = {"q": q, "k": k, "v": v}
    if gated:
        x["g"] = F.logsigmoid(torch.randn(B, T, H, device=device))
    if state:
        x |= {"initial_state": torch.randn(B, H, D, D, device=device), "state_v_first": v_first}
    if op == "chunk_linear_attn":
        x["normalize"] = False

    def call() -> list[torch.Tensor]:
        return [y for y in getattr(flashlin, op)(**x, output_final_state=state) if y is not None]
    return pulled(call, [*x.values()]) if gradients else call()


def pulled(call: Callable[[], list[torch.Tensor]], given: list[Any]) -> list[torch.Tensor]:
    """Return the gradients of the given tensors, for random gradients of the outputs of the call."""
    leaves = [x.requires_grad_() for x in given if isinstance(x, torch.Tensor)]
    draw = torch.Generator().manual_seed(1)
    with torch.enable_grad():
        made = call()
        pulls = [torch.randn(y.shape, generator=draw).to(y) for y in made]
        return [*torch.autograd.grad(made, leaves, pulls)]


def mamba2(device: torch.device, gradients: bool = False, T: int = 192, H: int = 4,
           G: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(0)
    b, P, N = 2, 64, 128
    x, B, C = (torch.randn(b, T, heads, size, device=device, dtype=torch.bfloat16)
               for heads, size in ((H, P), (G, N), (G, N)))
    dt, A = torch.rand(b, T, H, device=device), -torch.rand(H, device=device)

    def call() -> list[torch.Tensor]:
        return list(flashlin.mamba_chunk_scan_combined(x, dt, A, B, C, 64, return_final_states=True))
    return pulled(call, [x, dt, A, B, C]) if gradients else call()


def delta(device: torch.device, *, B: int = 2, T: int = 256, H: int = 4, D: int = 128, V: int = 0,
          HV: int = 4, gated: bool = True, state: bool = False, v_first: bool = False,
          dtype: torch.dtype = torch.bfloat16, shift: int = 0, long_keys: bool = False, much: int = MUCH,
          gradients: bool = False, oracle: bool = False, edges: Sequence[int] = ()) -> list[torch.Tensor]:
    """Call a delta rule; return o and any final state, or the gradients of the inputs.

    much: replaces ``MUCH``, the limit in bytes above which backward computes two sections.
    shift: as in ``sequences``.
    long_keys: the first head has longer keys, all in the same direction. Each token multiplies the state in
        that direction by -2.2, so the head's sequence cannot be split into segments. Its values are zero
        except for the last 8 tokens.
    oracle: computes the results in float64 with the reference recurrence instead.
    edges: cu_seqlens of packed sequences; the last one replaces T.
    """
    B, T, N = (1, edges[-1], len(edges) - 1) if edges else (B, T, B)
    draw, V = torch.Generator().manual_seed(0), V or D

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(B, T, *sizes, generator=draw)
    x: dict[str, Any] = {"q": drawn(H, D), "k": F.normalize(drawn(H, D), dim=-1), "v": drawn(HV, V),
                         "beta": drawn(HV).sigmoid()}
    if long_keys:
        x["k"][:, :, 0], x["beta"][:, :, 0], x["v"][:, :-8, 0] = (3.2 / D) ** 0.5, 1.0, 0.0
    x = {name: tensor.to(dtype) for name, tensor in x.items()}
    if gated:
        x["g"] = decays(drawn(HV) + 2)
    if state:
        h0 = torch.randn(N, HV, D, V, generator=draw)
        x["initial_state"] = h0.mT.contiguous() if v_first else h0
    x = {name: torch.cat([tensor.new_zeros(shift), tensor.flatten()]).to(device)[shift:].view(tensor.shape)
         for name, tensor in x.items()}

    def call() -> list[torch.Tensor]:
        if oracle:
            h0 = x.get("initial_state")
            h0 = h0.mT if h0 is not None and v_first else h0
            found = []
            for n, (begin, end) in enumerate(pairwise(edges or (0, T))):
                found.append(recurrence(*(None if x.get(name) is None else x[name][:, begin:end]
                                          for name in ("q", "k", "v", "beta", "g")),
                                        h0=h0[n:n + 1] if edges and state else h0, scale=D ** -0.5))
            o, ht = torch.cat([o for o, _ in found], 1), torch.cat([ht for _, ht in found])
            return [o, ht.mT if v_first else ht] if state else [o]
        op = flashlin.chunk_gated_delta_rule if gated else flashlin.chunk_delta_rule
        facts: dict[str, Any] = {"state_v_first": True} if v_first else {}
        if edges:
            facts["cu_seqlens"] = torch.tensor(edges, device=device)
        return [y for y in op(**x, output_final_state=state, **facts) if y is not None]
    with mock.patch.object(backward, "MUCH", much):
        return pulled(call, [*x.values()]) if gradients else call()


def channels(op: str, device: torch.device, *, B: int = 2, T: int = 256, H: int = 4, D: int = 128, V: int = 0,
             HV: int = 4, layer: bool = False, state: bool = False, v_first: bool = False,
             keeping: float = 2.0, gradients: bool = False, oracle: bool = False) -> list[torch.Tensor]:
    """Call an op with a decay for each channel; return o and any final state, or the gradients of the inputs.

    keeping: log decays are the logsigmoid of random numbers with this mean.
    layer: call chunk_kda as its layer does, with a lower bound of the gate, so that kernels compute the gate.
    oracle: compute the results in float64, for which ops use plain torch.
    """
    draw, V = torch.Generator().manual_seed(0), V or D

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(B, T, *sizes, generator=draw)
    q, k, v, rate = drawn(H, D), F.normalize(drawn(H, D), dim=-1), drawn(HV, V), drawn(HV, D).sigmoid()
    g = drawn(HV, D) if layer else F.logsigmoid(drawn(HV, D) + keeping)
    x = {"chunk_kda": {"q": q, "k": k, "v": v, "g": g, "beta": rate[..., 0].contiguous()},
         "chunk_gdn2": {"q": q, "k": k, "v": v, "g": g, "b": rate, "w": v.sigmoid()},
         "chunk_rwkv7": {"r": q, "w": g, "k": k, "v": v, "a": -k, "b": k * rate[:, :, :H]}}[op]
    x, facts = {name: y.to(torch.bfloat16) for name, y in x.items()}, dict[str, Any]()
    if layer:
        x |= {"A_log": torch.rand(HV, generator=draw), "dt_bias": torch.rand(HV * D, generator=draw) - 3}
        facts = {"lower_bound": -5.0} | dict.fromkeys(
            (f"use_{name}_in_kernel" for name in ("gate", "qk_l2norm", "beta_sigmoid")), True)
    if state:
        x["initial_state"] = torch.randn(B, HV, *((V, D) if v_first else (D, V)), generator=draw)
    x = {name: y.to(device, torch.float64 if oracle else y.dtype) for name, y in x.items()}
    facts |= {"state_v_first": True} if v_first else {}

    def call() -> list[torch.Tensor]:
        return [y for y in getattr(flashlin, op)(**x, **facts, output_final_state=state) if y is not None]
    # The few gradients of A_log are left out, because the size of their error varies by chance.
    return pulled(call, [y for name, y in x.items() if name != "A_log"]) if gradients else call()


Call = Callable[[torch.device], list[torch.Tensor]]
SHARED = "sums over heads, gradients"
BY_CHANNEL = ("KDA", "GDN2", "RWKV-7")  # with these begin the names of calls with a decay for each channel
CALLS: dict[str, Callable[..., list[torch.Tensor]]] = {
    "no decay": partial(sequences, "chunk_linear_attn"),
    "a decay a head": partial(sequences, "chunk_retention"),
    "a decay a token": partial(sequences, "chunk_simple_gla", gated=True),
    "states": partial(sequences, "chunk_simple_gla", gated=True, state=True),
    "states with v first": partial(sequences, "chunk_simple_gla", gated=True, state=True, v_first=True),
    "heads of 64": partial(sequences, "chunk_simple_gla", gated=True, state=True, D=64),
    "float16": partial(sequences, "chunk_simple_gla", gated=True, dtype=torch.float16),
    "groups, in float32": mamba2}
DELTA: dict[str, Callable[..., list[torch.Tensor]]] = {
    "delta": partial(delta, gated=False),
    "delta with states": partial(delta, gated=False, state=True),
    "gated delta": delta,
    "gated delta with states": partial(delta, state=True),
    "gated delta with states, v first": partial(delta, state=True, v_first=True),
    "gated delta, heads of 64": partial(delta, state=True, D=64),
    "delta, heads of 64": partial(delta, gated=False, state=True, D=64),
    "gated delta, float16": partial(delta, state=True, dtype=torch.float16),
    "gated delta, groups": partial(delta, state=True, HV=8),
    "gated delta, 64 beside 128": partial(delta, state=True, V=64),
    "gated delta, 256 beside 64": partial(delta, state=True, D=64, V=256)}
KDA: dict[str, Callable[..., list[torch.Tensor]]] = {
    "KDA": partial(channels, "chunk_kda"),
    "KDA with states, v first": partial(channels, "chunk_kda", state=True, v_first=True),
    "KDA with states, heads of 64": partial(channels, "chunk_kda", state=True, D=64),
    "KDA, groups, 256 beside 64": partial(channels, "chunk_kda", HV=8, D=64, V=256),
    "KDA, as in its layer": partial(channels, "chunk_kda", layer=True, state=True),
    "KDA, as in its layer, heads of 64": partial(channels, "chunk_kda", layer=True, D=64),
    "GDN2 with states": partial(channels, "chunk_gdn2", state=True)}
RWKV7: dict[str, Callable[..., list[torch.Tensor]]] = {
    "RWKV-7": partial(channels, "chunk_rwkv7", D=64),
    "RWKV-7 with states": partial(channels, "chunk_rwkv7", D=64, state=True)}
BACK = {**{f"{name}, gradients": partial(call, gradients=True)
           for name, call in {**CALLS, **DELTA, **KDA}.items()},
        SHARED: partial(mamba2, gradients=True, H=20, G=1)}
ALL: dict[str, Call] = {**CALLS, **DELTA, **KDA, **RWKV7, **BACK}
# Longer and unaligned calls for some of the same kernels.
LONG: dict[str, Callable[..., list[torch.Tensor]]] = {
    "many chunks, not aligned": partial(sequences, "chunk_simple_gla", T=4096, gated=True, state=True,
                                           shift=1),
    "many chunks, not aligned, gradients": partial(sequences, "chunk_simple_gla", T=1024, gated=True,
                                                      state=True, shift=1, gradients=True),
    "gated delta, many chunks, not aligned": partial(delta, T=4096, state=True, shift=1),
    "delta, many chunks": partial(delta, T=4096, gated=False),
    "delta, a head that is not split": partial(delta, T=384, gated=False, long_keys=True),
    "delta, a head that is not split, gradients": partial(delta, T=384, gated=False, long_keys=True,
                                                          gradients=True),
    "gated delta, two sections of time, gradients": partial(delta, T=448, H=48, HV=48, D=64, state=True,
                                                            much=0, gradients=True),
    "delta, two sections of time, gradients": partial(delta, T=448, H=48, HV=48, D=64, gated=False, much=0,
                                                      gradients=True),
    "KDA, as in its layer, many chunks, gradients": partial(channels, "chunk_kda", T=1024, layer=True,
                                                            state=True, gradients=True),
    "gated delta, many chunks, not aligned, gradients": partial(delta, T=1024, state=True, shift=1,
                                                                   gradients=True)}


def kernel_of(name: str) -> str:
    """Return the name of the overlapping kernel that a call of ALL must start."""
    if name == SHARED:
        return "simple_gla_overlapped_shared"
    back = "_back" if "gradients" in name else ""
    family = "dplr" if name.startswith(BY_CHANNEL) else "delta" if "delta" in name else "simple_gla"
    return family + "_overlapped" + back


def far(ours: torch.Tensor, right: torch.Tensor) -> float:
    """Return the relative error of ours; infinite if it is not finite or the shapes differ."""
    if ours.shape != right.shape:
        return math.inf
    ours, right = ours.double().cpu(), right.double().cpu()
    found = float((ours - right).norm() / right.norm())
    return found if math.isfinite(found) else math.inf


def verdict(name: str, parts: int) -> dict[str, Any]:
    """Run a call with plain and with overlapping kernels, and return a comparison.

    parts: number of segments of each sequence; 0 means as planned.

    The result has these keys.

        planned       All runs but the first were planned with the overlapping kernel.
        same          All runs of the overlapping kernel give bitwise the same results.
        from_plain    Relative differences from the results of the plain kernel.
        from_float64  Relative errors of the overlapping and of the plain kernel, for delta rules.
    """
    call = {**ALL, **LONG}[name]
    since, found, kernels = scans.OVERLAPS, [], []
    scans.forced_parts = parts
    # First the plain kernels. Then the overlapping ones: started by Triton, started directly, and replayed.
    for never in (True, *[False] * 4):
        scans.OVERLAPS = (99, 0) if never else since
        if len(found) < 2:  # later runs keep the plan, so that they are replays
            dispatch.plan.cache_clear()
        plans: list[flashlin.Plan] = []
        with dispatch.watching(plans.append):
            found.append(call(torch.device("cuda")))
        kernels.append(any(launch.kernel == kernel_of(name) for plan in plans for launch in plan.launches))
    plain, ours, *again = found
    told: dict[str, Any] = {
        "planned": kernels == [False, True, True, True, True],
        "same": all(torch.equal(a, b) for one in again for a, b in zip(ours, one, strict=True)),
        "from_plain": [far(a, b) for a, b in zip(ours, plain, strict=True)]}
    if "delta" in name or name.startswith(BY_CHANNEL):
        right = call(torch.device("cpu"), oracle=True)
        told["from_float64"] = [[far(one, b) for one, b in zip(way, right, strict=True)]
                                for way in (ours, plain)]
    return told


def main() -> None:
    """Run the calls that the command line names as pairs (number of segments, name), and report each."""
    say, given = channel(), sys.argv[1:]
    flashlin.settings(canary="trial")  # allows kernels that have no record of a run yet
    for parts, name in zip(given[::2], given[1::2], strict=True):
        say(call=name, parts=int(parts))
        say(call=name, parts=int(parts), **verdict(name, int(parts)))


if __name__ == "__main__":
    main()
