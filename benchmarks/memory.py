"""List the memory that a forward with backward needs, buffer by buffer, without a GPU.

    python -m benchmarks.memory [--op chunk_gla] [--shape 4x4096x32x128] [--whole]

An H200 is simulated (benchmarks/pretended.py), so torch's CPU allocator allocates what it would allocate on a
GPU. torch's profiler records each allocation. The first run is an ordinary one. The third is a replay
(ops/_common/replay.py), which is what ``timing`` measures on a GPU. A GPU rounds sizes to 512 bytes or to 2
MiB. --whole: do not split sequences into segments.
"""
from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton

import flashlin
from benchmarks import calls
from benchmarks.calls import Op, Shape, find
from benchmarks.host import Idle
from benchmarks.pretended import pretended
from flashlin.compat import target as machine
from flashlin.kernels import scans

OPS = ("chunk_delta_rule", "chunk_gated_delta_rule", "chunk_gla", "chunk_simple_gla", "chunk_retention",
       "chunk_kda", "chunk_rwkv6", "chunk_rwkv7", "mamba_chunk_scan_combined")
SHAPES = (Shape(4, 4096, 32, 128), Shape(1, 32768, 8, 128))
RUNS = 3


class Peak(NamedTuple):
    """The largest memory use of a call.

    size: bytes in addition to the memory in use before the call.
    buffers: sizes of the buffers that are alive at that moment, in the order of their allocation.
    """
    size: int
    buffers: tuple[int, ...]


def peak(call: Callable[[], Any]) -> Peak:
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        made = call()
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    del made
    alive, most = list[int](), Peak(0, ())
    for event in sorted(events, key=lambda event: event.start_ns()):
        size = event.nbytes()
        if size > 0:
            alive.append(size)
        elif -size in alive:  # otherwise it was allocated before the call
            alive.remove(-size)
        if sum(alive) > most.size:
            most = Peak(sum(alive), tuple(alive))
    return most


def peaks(op: Op, shape: Shape) -> list[Peak]:
    """Return the peaks of an op's first RUNS runs, forward with backward.

    The op must not have run before in this process.
    """
    home = flashlin if hasattr(flashlin, op.name) else importlib.import_module("flashlin.mamba")
    with mock.patch.object(calls, "drawing", _zeros):
        both = calls.runs(getattr(home, op.name), op, shape, "cpu")["both"]
    return [peak(both) for _ in range(RUNS)]


def _zeros(shape: Shape, device: str, seed: int = 0) -> Callable[..., torch.Tensor]:
    """Replace ``calls.drawing``: return zeros, because nothing is computed."""
    def draw(role: str, how: Any = None) -> torch.Tensor:
        dimensions, dtype = calls.ROLES[role]
        return torch.zeros([shape.size(dimension) for dimension in dimensions.split()], dtype=dtype)
    return draw


@contextmanager
def card() -> Iterator[None]:
    """Simulate an H200 within the block."""
    machine.pretend(machine.parse(f"triton={triton.__version__},sm=90,sms=132"))
    try:
        with pretended(Idle()), flashlin.settings(canary="off"):
            yield
    finally:
        machine.pretend(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", choices=OPS)
    parser.add_argument("--shape", action="append")
    parser.add_argument("--whole", action="store_true")
    chosen = parser.parse_args()
    scans.forced_parts = int(chosen.whole)
    torch.set_num_threads(1)
    shapes = [Shape(*map(int, one.split("x"))) for one in chosen.shape or ()]
    with card():
        for op in map(find, chosen.op or OPS):
            for shape in shapes or (op.shapes if op.name not in OPS[:-1] else SHAPES):
                for number, found in enumerate(peaks(op, shape), 1):
                    if number != 2:
                        buffers = " ".join(f"{size / 2**20:.4g}" for size in found.buffers if size > 2**18)
                        print(f"{op.name} {shape}, run {number}: {found.size / 2**20:.1f} MiB: {buffers}")


if __name__ == "__main__":
    main()
