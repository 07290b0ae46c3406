"""How calls are timed: beside each other, the card's time, the host's and the wall's apart."""
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
# Calls handed to a card that is kept busy for so long; a queue takes about a thousand launches.
QUEUED, SLEEP_MS = 5, 40.0
LAUNCHES = 100
GRAPH_MS, WALL_MS = 3.0, 10.0  # what one measurement takes about


@triton.jit
def bare(a, b, c, d, e, f, g, h, N: tl.constexpr):
    """As little as a launch with eight tensors can be."""
    at = tl.arange(0, N)
    tl.store(h + at, tl.load(a + at))


def compared(calls: dict[str, Call], rounds: int) -> dict[str, dict[str, Any]]:
    """By name what each call takes: medians over rounds in which they take turns, with quartiles.

    ``device_ms``: without the host; ``how``: a replayed CUDA graph, or, where that cannot be captured, events
    around calls that wait in a full queue. ``wall_ms``: as called from Python one after another. ``host_us``:
    of Python alone, while the card is busy with something else; ``launches``: the same in bare launches
    (``bare``) of the same rounds. Neither is there if a call waits for the card. ``peak_mb``: memory that it
    takes beyond what was there. Caches are as the call before has left them.

    A call that raises has ``failed`` instead. On a machine without a GPU all is the wall's time.
    """
    found: dict[str, dict[str, Any]] = {}
    ready: dict[str, Prepared] = {}
    for name, call in calls.items():
        try:
            ready[name] = _prepared(call)
            found[name] = ready[name].facts
        except Exception as error:  # one side's failure is the row's result
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
    """Median and quartiles, four digits of each."""
    several = values if len(values) > 1 else 2 * values
    low, middle, high = statistics.quantiles(several, n=4, method="inclusive")
    return {name: float(f"{value:.4g}") for name, value in (("median", middle), ("low", low), ("high", high))}


class Prepared(NamedTuple):
    """facts: what is measured once. replay: milliseconds of the card. times: how many calls one measurement
    of the wall's time has."""
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
    except Exception as error:  # it cannot be captured
        torch.cuda.set_stream(stream)  # a capture that fails leaves its own
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
    """Raises where a call waits for the card. It could not be captured, and what it caches while that is tried
    (fla its chunk indices) would never be computed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it does not see every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _queue(call: Call) -> float:
    """Milliseconds of a call when the card never waits for the host, if the call does not wait for the
    card."""
    begin, end = _event(), _event()
    _sleep()
    begin.record()
    for _ in range(QUEUED):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / QUEUED


def wall(call: Call, times: int) -> float:
    """Milliseconds of a call, one after another."""
    _synchronize()
    began = time.perf_counter()
    for _ in range(times):
        call()
    _synchronize()
    return 1e3 * (time.perf_counter() - began) / times


def hosted(call: Call, times: int) -> float | None:
    """Microseconds that the host takes for a call while the card is busy; None if it waits for the card."""
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
    """Bytes a second that this machine copies, read and written: by the driver or, often faster, by a
    kernel."""
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
