"""The method of timing: calls take turns, and GPU, host and wall time are measured separately."""
from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

Call = Callable[[], Any]
# QUEUED calls are queued on a GPU that is kept busy for SLEEP_MS. A queue takes about a thousand launches.
QUEUED, SLEEP_MS = 5, 40.0
LAUNCHES = 100
GRAPH_MS, WALL_MS = 3.0, 10.0  # approximate duration of one measurement


@triton.jit
def bare(a, b, c, d, e, f, g, h, N: tl.constexpr):
    """A minimal kernel with eight tensors."""
    at = tl.arange(0, N)
    tl.store(h + at, tl.load(a + at))


def compared(calls: dict[str, Call], rounds: int) -> dict[str, dict[str, Any]]:
    """Return medians and quartiles of the times of each call, by name. The calls take turns in each round.

    ``device_ms``: GPU time, without the host.
    ``how``: how the GPU time was measured. ``graph`` means that a CUDA graph was replayed. If the call cannot
        be captured, it is timed between events while its launches wait in a full queue. The text is then
        ``events:`` and the error of the capture.
    ``wall_ms``: time of calls from Python, one after another.
    ``host_us``: time of Python alone, while the GPU is busy with other work.
    ``launches``: `host_us` divided by the time of a bare launch (``bare``) in the same rounds. Both are
        missing if a call waits for the GPU.
    ``peak_mb``: peak memory in addition to the memory in use before the call.

    Caches are as the previous call leaves them. A call that raises has only ``failed``. Without a GPU, all
    times are wall times.
    """
    found: dict[str, dict[str, Any]] = {}
    ready: dict[str, Prepared] = {}
    for name, call in calls.items():
        try:
            ready[name] = _prepared(call)
            found[name] = ready[name].facts
        except Exception as error:  # the failure of one call is a result
            found[name] = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    taken: dict[str, dict[str, list[float]]] = {name: {"device_ms": [], "wall_ms": [], "host_us": []}
                                                for name in ready}
    launches: list[float] = []
    for _ in range(rounds):
        for name, one in ready.items():
            taken[name]["device_ms"].append(one.replay())
            taken[name]["wall_ms"].append(wall(calls[name], one.times))
            if (host := hosted(calls[name], QUEUED)) is not None:
                taken[name]["host_us"].append(host)
        if torch.cuda.is_available() and (host := hosted(_bare(), LAUNCHES)) is not None:
            launches.append(host)
    for name, figures in taken.items():
        if 2 * len(figures["host_us"]) > rounds and launches:
            unit = statistics.median(launches)
            figures["launches"] = [host / unit for host in figures["host_us"]]
        else:
            del figures["host_us"]
        found[name] |= {figure: spread(values) for figure, values in figures.items()}
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Return the median and the quartiles, rounded to four digits."""
    several = values if len(values) > 1 else 2 * values
    low, middle, high = statistics.quantiles(several, n=4, method="inclusive")
    return {name: float(f"{value:.4g}") for name, value in (("median", middle), ("low", low), ("high", high))}


class Prepared(NamedTuple):
    """A call that is ready to be timed.

    facts: results that are measured only once.
    replay: returns milliseconds of GPU time.
    times: number of calls in one measurement of wall time.
    """
    facts: dict[str, Any]
    replay: Callable[[], float]
    times: int


def _prepared(call: Call) -> Prepared:
    call()
    if not torch.cuda.is_available():
        return Prepared({"how": "no GPU: the wall's time"}, lambda: wall(call, 1), 1)
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    facts = {"peak_mb": round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)}
    times, stream = max(1, int(WALL_MS / wall(call, 3))), torch.cuda.current_stream()
    try:
        return Prepared(facts | {"how": "graph"}, _graph(call), times)
    except Exception as error:  # the call cannot be captured
        torch.cuda.set_stream(stream)  # a failed capture leaves its own stream current
        torch.cuda.synchronize()
        why = f"events: {type(error).__name__}: {' '.join(str(error).split())[:100]}"
        return Prepared(facts | {"how": why}, lambda: _queue(call), times)


def _graph(call: Call) -> Callable[[], float]:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), _not_waiting():
        call()
    torch.cuda.synchronize()
    times = max(1, min(LAUNCHES, int(GRAPH_MS / _queue(call))))
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(times):
            call()

    def replay() -> float:
        begin, end = _event(), _event()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / times
    replay()
    return replay


@contextmanager
def _not_waiting() -> Iterator[None]:
    """Raise an error if a call in the block waits for the GPU.

    Such a call cannot be captured. Values that it caches during a failed capture (such as fla's chunk
    indices) would never be computed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it does not detect every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _queue(call: Call) -> float:
    """Return milliseconds of GPU time per call while the GPU does not wait for the host.

    If the call waits for the GPU, the GPU also waits for the host.
    """
    begin, end = _event(), _event()
    _sleep()
    begin.record()
    for _ in range(QUEUED):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / QUEUED


def wall(call: Call, times: int) -> float:
    """Return milliseconds of wall time per call, with calls one after another."""
    _synchronize()
    began = time.perf_counter()
    for _ in range(times):
        call()
    _synchronize()
    return 1e3 * (time.perf_counter() - began) / times


def hosted(call: Call, times: int) -> float | None:
    """Return microseconds of host time per call while the GPU is busy; None if the call waits for the GPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    awake = _event()
    _sleep()
    awake.record()
    began = time.perf_counter()
    for _ in range(times):
        call()
    taken = time.perf_counter() - began
    asleep = not awake.query()
    torch.cuda.synchronize()
    return 1e6 * taken / times if asleep else None


def bandwidth(device: str) -> float:
    """Return the bytes per second that a copy reads and writes on this machine.

    Both a copy by the driver and a kernel are measured, and the faster one counts. It is often the kernel.
    """
    source = torch.zeros(2**28 if device == "cuda" else 2**20, device=device)
    into = torch.empty_like(source)
    ways = compared({"copy": lambda: into.copy_(source),
                     "kernel": lambda: torch.neg(source, out=into)}, rounds=5)
    least = min(figures["device_ms"]["median"] for figures in ways.values())
    return float(2 * source.nbytes / (1e-3 * least))


@cache
def _bare() -> Call:
    tensors = [torch.zeros(128, device="cuda") for _ in range(8)]
    return lambda: bare[(1,)](*tensors, N=128)


def _sleep() -> None:
    torch.cuda._sleep(int(SLEEP_MS * _cycles_per_ms()))


@cache
def _cycles_per_ms() -> float:
    cycles, begin, end = 20_000_000, _event(), _event()
    torch.cuda._sleep(cycles)
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    return cycles / float(begin.elapsed_time(end))


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
