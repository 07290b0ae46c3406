"""Measure one long sequence over several GPUs, divided by heads or by tokens, and on one GPU.

    python -m benchmarks.context --ranks 2 --tokens 262144 --out benchmarks/results
    python -m benchmarks.context --ranks 2 --tokens 2048 --heads 4 --head-dim 32     without a GPU, by gloo

Each rank is a process. The recorded time is the slowest rank's, and the memory is the highest peak of a rank.
"heads": each rank computes some heads (an all-to-all). "tokens": each rank has some tokens and passes states
on. `flashlin.explain(op, ranks=)` says which method a call uses. README's table is made from the records
(benchmarks/report.py).
"""
from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import flashlin
from benchmarks.calls import Shape, find, runs
from flashlin import dispatch
from flashlin.guards import checks
from matrix import record

OPS = ("chunk_simple_gla", "chunk_gated_delta_rule", "chunk_kda", "mamba_chunk_scan_combined")
WARM, ROUNDS = 2, 7


def main() -> int:
    options = record.parser(__doc__)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--tokens", type=int, default=262144, help="tokens of the whole sequence")
    options.add_argument("--heads", type=int, default=16)
    options.add_argument("--head-dim", type=int, default=128)
    options.add_argument("--op", choices=OPS, help="default: all")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [multiprocessing.get_context("spawn").Process(target=rank_of, args=(rank, folder, given))
                 for rank in range(given.ranks)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
    return max(abs(one.exitcode or 0) for one in ranks)


def rank_of(rank: int, folder: str, given: Namespace) -> None:
    """Run one rank. Rank 0 prints and records the results."""
    on_gpus = torch.cuda.device_count() >= given.ranks
    device = f"cuda:{rank}" if on_gpus else "cpu"
    if on_gpus:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpus else "gloo", init_method=f"file://{folder}/meet", rank=rank,
                            world_size=given.ranks)
    flashlin.settings(canary="off")
    rows: dict[str, Any] = {}
    for name in OPS if given.op is None else (given.op,):
        rows[name] = of_op(name, given, device)
        if rank == 0:
            print(name, *(f"  {way:12}{what:16}{told}" for way, row in rows[name].items()
                          for what, told in row.items()), sep="\n", flush=True)
            if given.out and on_gpus:
                record.write(given.out, f"context-{given.ranks}", record.this_card(), tokens=given.tokens,
                             heads=given.heads, head_dim=given.head_dim, dtype="bfloat16", rows=rows)
    dist.destroy_process_group()


def of_op(name: str, given: Namespace, device: str) -> dict[str, dict[str, Any]]:
    """Measure one op with each method, forward and with all gradients ("both")."""
    op, found = find(name), {}
    one_key = "mamba" in name  # all heads share one key, so ranks cannot divide the heads
    for way in ("one device", *(() if one_key else ("heads",)), "tokens"):
        size = 1 if way == "one device" else given.ranks
        function, shape = getattr(flashlin, name), Shape(1, given.tokens // size, given.heads, given.head_dim)
        if size > 1:
            function = partial(function, process_group=dist.group.WORLD)
        checks.forced_over = way if size > 1 else ""
        dispatch.plan.cache_clear()
        calls = runs(function, op, shape, device) if size > 1 or dist.get_rank() == 0 else None
        found[way] = {what: taken(None if calls is None else calls[what], device, size == 1)
                      for what in ("forward", "both")}
        del calls
        if device != "cpu":
            torch.cuda.empty_cache()
    checks.forced_over = ""
    dispatch.plan.cache_clear()
    return found


def taken(call: Callable[[], Any] | None, device: str, alone: bool) -> dict[str, Any]:
    """Return milliseconds of the slowest rank and MiB of the fullest rank.

    A rank without a call only waits at the barriers.

    alone: the call runs on one device. If it runs out of memory, the result has only ``failed``, the error.
    """
    times, failed = [], ""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    for round_ in range(WARM + ROUNDS):
        dist.barrier()
        began = time.perf_counter()
        try:
            if call is not None and not failed:
                call()
                if device != "cpu":
                    torch.cuda.synchronize()
        except torch.OutOfMemoryError as error:
            if not alone:  # the other ranks wait for this one, so do not continue
                raise
            failed = str(error).splitlines()[0]
        if round_ >= WARM:
            times.append(1000 * (time.perf_counter() - began))
    memory = 0.0 if device == "cpu" else torch.cuda.max_memory_allocated() / 2**20
    facts = torch.tensor([statistics.median(times), memory, bool(failed)], device=device)
    dist.all_reduce(facts, dist.ReduceOp.MAX)
    ms, mib, out_of_memory = facts.tolist()
    if out_of_memory:
        return {"failed": failed or "out of memory"}
    return {"ms": round(ms, 3), "peak_mib": round(mib)}


if __name__ == "__main__":
    sys.exit(main())
