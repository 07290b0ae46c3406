"""Helpers that compare calls and models over several ranks with the same computation on one device.

``run_jobs`` starts one process per rank, on the CPU, in the interpreter or on GPUs. Each job is a function
that takes a process group.
"""
from __future__ import annotations

import json
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import flashlin
from flashlin import dispatch
from flashlin.guards import checks

Job = Callable[[Any], None]
SECONDS = 60.0  # timeout of communication between ranks


class Call(NamedTuple):
    """One call of an op whose tokens are split over ranks.

    tokens: tensors [B, T, ...] whose T the ranks divide.
    shared: tensors that every rank has in full.
    options: further arguments.
    state: name of the option that returns final states; '' for none.
    """
    op: str
    tokens: dict[str, Tensor]
    shared: dict[str, Tensor]
    options: dict[str, Any]
    state: str = "output_final_state"


def made(op: str, H: int, T: int, edges: Sequence[int] | None, K: int = 8, dtype: torch.dtype = torch.float64,
         device: str = "cpu", G: int | None = None) -> Call:
    """Return a random call of an op with H value heads and G heads of q and k.

    edges: boundaries of packed sequences, which form a single row; None for two dense rows.
    """
    torch.manual_seed(H + T)
    B, G = 2 if edges is None else 1, G or H
    N = B if edges is None else len(edges) - 1

    def n(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    def decay(*shape: int) -> Tensor:
        return F.logsigmoid(n(*shape) + 3)
    q, k, v = n(B, T, G, K), F.normalize(n(B, T, G, K), dim=-1), n(B, T, H, K)
    beta, state = n(B, T, H).sigmoid(), n(N, H, K, K)
    options: dict[str, Any] = {} if edges is None else {"cu_seqlens": torch.tensor(edges, device=device)}
    shared, name = {"initial_state": state}, "output_final_state"
    tokens = {"q": q, "k": k, "v": v}
    if op == "chunk_simple_gla":
        tokens["g"] = decay(B, T, H)
    elif op == "chunk_linear_attn":
        options["normalize"] = False
    elif op == "chunk_lightning_attn":
        options.update(layer_idx=1, num_layers=4)
    elif op == "chunk_delta_rule":
        tokens["beta"] = beta
    elif op == "chunk_gated_delta_rule":
        tokens.update(g=decay(B, T, H), beta=beta)
        options["state_v_first"] = True
    elif op == "chunk_gated_delta_product":  # two rows of k, v and beta per token
        tokens = {"q": q, "k": F.normalize(n(B, 2 * T, G, K), dim=-1), "v": n(B, 2 * T, H, K),
                  "g": decay(B, T, H), "beta": n(B, 2 * T, H).sigmoid()}
        options["num_householder"] = 2
    elif op == "chunk_gla":
        tokens["g"] = decay(B, T, H, K)
    elif op == "chunk_kda":
        tokens.update(g=decay(B, T, H, K), beta=beta)
    elif op == "chunk_comba":
        tokens.update(p=F.normalize(n(B, T, G, K), dim=-1), g=decay(B, T, H), beta=beta)
    elif op == "chunk_gdn2":
        tokens.update(g=decay(B, T, H, K), b=torch.sigmoid(n(B, T, H, K)), w=torch.sigmoid(n(B, T, H, K)))
    elif op == "chunk_rwkv6":
        tokens = {"r": q, "k": k, "v": v, "w": decay(B, T, H, K)}
        shared["u"] = n(H, K)
    elif op == "chunk_rwkv7":
        tokens = {"r": q, "w": decay(B, T, H, K), "k": k, "v": v, "a": -k, "b": k * beta[..., None]}
    elif op == "chunk_dplr_delta_rule":
        tokens.update(a=-k, b=k * beta[..., None], gk=decay(B, T, H, K))
    elif op == "chunk_iplr_delta_rule":
        tokens.update(a=-k, b=k * beta[..., None])
    elif op == "mamba_chunk_scan_combined":
        tokens = {"x": v, "dt": n(B, T, H), "B": n(B, T, 1, K), "C": n(B, T, 1, K), "z": n(B, T, H, K)}
        shared = {"A": -n(H).exp(), "D": n(H), "dt_bias": n(H), "initial_states": n(B, H, K, K)}
        options.update(chunk_size=64, dt_softplus=True)
        name = "return_final_states" if edges is None else "return_varlen_states"
    elif op == "causal_conv1d":
        tokens = {"x": n(B, T, K), "residual": n(B, T, K)}
        shared = {"weight": n(K, 4), "bias": n(K), "initial_state": n(N, K, 4)}
        options["activation"] = "silu"
    elif op == "token_shift":
        tokens, shared, name = {"x": n(B, T, K)}, {"cache": n(N, K)}, "output_cache"
    return Call(op, {key: x.to(device, dtype) for key, x in tokens.items()},
                {key: x.to(device, torch.float32 if dtype != torch.float64 else dtype)
                 for key, x in shared.items()}, options, name)


def computed(call: Call, **ranks: Any) -> dict[str, Tensor]:
    """Run a call forward and backward, and return its outputs and gradients by name."""
    tokens, shared = ({key: x.detach().clone().requires_grad_() for key, x in some.items()}
                      for some in (call.tokens, call.shared))
    options = {**call.options, **({call.state: True} if call.state else {})}
    returned = getattr(flashlin, call.op)(**tokens, **shared, **options, **ranks)
    o, state = returned if isinstance(returned, tuple) else (returned, None)
    # The gradient of each element of o depends on its value and column, so that mixed-up ranks are noticed.
    pull = (torch.arange(o.shape[-1], device=o.device) + 1) * o.detach().double().sin()
    total = (o.double() * pull).sum()
    if state is not None:
        total = total + (state.double() * state.detach().double().cos()).sum()
    total.backward()
    found = {"o": o.detach(), **({} if state is None else {"state": state.detach()})}
    return found | {f"d{key}": x.grad for key, x in (tokens | shared).items() if x.grad is not None}


def of_rank(call: Call, group: Any) -> Call:
    """Return the call with only the tokens of this rank."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return call._replace(tokens={key: x.chunk(size, 1)[rank] for key, x in call.tokens.items()})


def together(found: dict[str, Tensor], call: Call, group: Any) -> dict[str, Tensor]:
    """Return the results of all ranks: concatenates tensors over tokens, and sums all others."""
    whole = {}
    for key, x in found.items():
        parts = [torch.empty_like(x.contiguous()) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        of_tokens = key == "o" or key.removeprefix("d") in call.tokens
        whole[key] = torch.cat(parts, 1) if of_tokens else torch.stack(parts).sum(0)
    return whole


def close(found: Tensor, right: Tensor, bound: float, name: str) -> None:
    """Fail if an element differs by more than bound times (its magnitude + the largest one in right)."""
    torch.testing.assert_close(found, right, rtol=bound, atol=bound * float(right.abs().max()),
                               msg=lambda text: f"{name}: {text}")


@contextmanager
def divided(way: str) -> Iterator[None]:
    """Force calls in the block to split over "heads" (where possible) or "tokens", as ``way`` says."""
    checks.forced_over = way
    dispatch.plan.cache_clear()
    try:
        yield
    finally:
        checks.forced_over = ""
        dispatch.plan.cache_clear()


def equal_one(call: Call, group: Any, **ranks: Any) -> None:
    """Fail unless a float64 call gives the same results over all ranks as on one, up to 1e-9."""
    right = computed(call)
    given = ranks or {"process_group": group}
    found = together(computed(of_rank(call, group), **given), call, group)
    assert found.keys() == right.keys(), (found.keys(), right.keys())
    for key, x in right.items():
        close(found[key], x, 1e-9, key)


def as_exact_as_one(call: Call, group: Any, allowed: float = 1.5) -> None:
    """Fail if the RMS error over several ranks is above ``allowed`` times the error on one device."""
    exact = call._replace(tokens={key: x.double() for key, x in call.tokens.items()},
                          shared={key: x.double() for key, x in call.shared.items()})
    right, one = computed(exact), computed(call)
    found = together(computed(of_rank(call, group), process_group=group), call, group)
    for key, x in right.items():
        ours, whole = ((y[key].double() - x).norm() / x.norm() for y in (found, one))
        assert ours <= allowed * whole + 3e-6, f"{key}: {ours:.2e}, on one device {whole:.2e}"


class Layer(nn.Module):
    """A token mixer with a short convolution, as in published models. kind: gdn, kda or mamba2."""

    def __init__(self, kind: str, D: int, H: int) -> None:
        super().__init__()
        self.kind, self.H, self.K = kind, H, D // H
        self.into = nn.Linear(D, 4 * D + 2 * H)
        self.out = nn.Linear(D, D)
        self.filters = nn.Parameter(torch.randn(3 * D, 4) / 2)
        self.A_log, self.dt_bias = nn.Parameter(torch.randn(H)), nn.Parameter(torch.randn(H))

    def forward(self, x: Tensor, edges: Tensor, ranks: dict[str, Any]) -> Tensor:
        D, H = x.shape[-1], self.H
        qkv, g, beta, a = self.into(x).split([3 * D, D, H, H], -1)
        qkv, _ = flashlin.causal_conv1d(qkv, self.filters, activation="silu", cu_seqlens=edges, **ranks)
        q, k, v = (y.unflatten(-1, (H, -1)) for y in qkv.chunk(3, -1))
        if self.kind == "mamba2":
            o: Any = flashlin.mamba_chunk_scan_combined(
                v, a, -self.A_log.exp(), k[:, :, :1], q[:, :, :1], 64, dt_bias=self.dt_bias, dt_softplus=True,
                cu_seqlens=edges, z=g.unflatten(-1, (H, -1)), return_varlen_states=not ranks, **ranks)
            o = o if ranks else o[0]
        else:
            gates = {"g": a, "A_log": self.A_log, "dt_bias": self.dt_bias}
            op = flashlin.chunk_gated_delta_rule
            if self.kind == "kda":
                op = flashlin.chunk_kda
                gates = {"g": g.unflatten(-1, (H, -1)), "A_log": self.A_log,
                         "dt_bias": self.dt_bias.repeat_interleave(self.K)}
            o, _ = op(q, k, v, beta=beta, **gates, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                      use_qk_l2norm_in_kernel=True, cu_seqlens=edges, **ranks)
        return x + self.out(o.flatten(2))


class Model(nn.Module):
    def __init__(self, kind: str, D: int = 12, H: int = 3, words: int = 11) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, D), nn.Linear(D, words)
        self.layers = nn.ModuleList([Layer(kind, D, H) for _ in range(2)])

    def forward(self, tokens: Tensor, targets: Tensor, edges: Tensor, **ranks: Any) -> Tensor:
        """Return the sum of the cross-entropy losses over the tokens."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, edges, ranks)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="sum")


def model_equals_one(kind: str, group: Any, H: int = 3, device: str = "cpu",
                     dtype: torch.dtype = torch.float64, bound: float = 1e-9) -> None:
    """Fail unless a two-layer model over several ranks has the loss and gradients of one device.

    The input is packed documents, some of which cross the boundary between two ranks.
    """
    torch.manual_seed(0)
    model, T = Model(kind, D=4 * H, H=H).to(device, dtype), 64
    tokens, targets = torch.randint(11, (2, 1, T), device=device)
    edges = torch.tensor([0, 7, 7, 50, T], device=device)
    loss = model(tokens, targets, edges)
    loss.backward()
    right = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    mine = [x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)] for x in (tokens, targets)]
    part = model(*mine, edges, process_group=group)
    part.backward()
    total = part.detach().clone()
    dist.all_reduce(total, group=group)
    close(total, loss.detach(), bound, "loss")
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        dist.all_reduce(p.grad, group=group)
        close(p.grad, right[name], bound, name)


def _rank(rank: int, size: int, folder: str, backend: str, patience: float,
          jobs: dict[str, tuple[int, Job]]) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    timeout = timedelta(seconds=patience)
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=size,
                            timeout=timeout)
    groups = {n: dist.new_group(list(range(n)), timeout) for n in sorted({n for n, _ in jobs.values()})}
    said = {}
    for name, (n, job) in jobs.items():
        if rank < n:
            try:
                job(groups[n])
                said[name] = ""
            except Exception:
                said[name] = traceback.format_exc()
            Path(folder, f"{rank}.json").write_text(json.dumps(said))
    os._exit(0)  # skips destroying process groups, which hangs if a job left one in a broken state


def run_jobs(jobs: dict[str, tuple[int, Job]], folder: Path, backend: str = "gloo",
             seconds: float = 300, patience: float = SECONDS) -> dict[str, list[str]]:
    """Run jobs on several ranks, and return for each job the traceback of every rank; '' for success.

    jobs: (number of ranks, function) of each job, by its name. The function, or the function in a partial,
        must be at the top level of a module.
    folder: folder for files that the ranks exchange.
    seconds: time after which a process that still runs is killed.
    patience: timeout of communication between ranks in seconds.
    """
    size = max(n for n, _ in jobs.values())
    context = multiprocessing.get_context("forkserver")  # imports torch only once
    context.set_forkserver_preload(["flashlin.ops._common.context_parallel", "tests.ranks"])
    ranks = [context.Process(target=_rank, args=(rank, size, str(folder), backend, patience, jobs))
             for rank in range(size)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(seconds)
    for one in ranks:
        if one.is_alive():
            one.kill()
    written = [folder / f"{rank}.json" for rank in range(size)]
    said = [json.loads(path.read_text()) if path.exists() else {} for path in written]
    return {name: [said[rank].get(name, "the process was gone") for rank in range(n)]
            for name, (n, _) in jobs.items()}
