"""Fill the cache of Triton with several processes before one process measures.

fla compiles up to 300 configurations for an op and a shape, one after the other. Here, several processes make
the same calls at the same time. The first process that reaches a kernel claims it with a file and compiles it,
and the others skip it. No kernel is launched, so nothing is timed, results are uninitialized memory, and a
faulty configuration cannot end a process. Needs Triton 3.4 or newer.
"""
from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from flashlin.compat import launch as door
from flashlin.compat.subprocesses import Ended
from matrix import record

PATIENCE = 5  # number of attempts, and seconds between two attempts


class Share(NamedTuple):
    """One of several processes that fill the cache.

    folder: folder of the files with which processes claim kernels.
    number: index of this process, from 0.
    of: number of processes.
    """
    folder: str
    number: int
    of: int

    def __str__(self) -> str:
        return json.dumps(self)

    @classmethod
    def parse(cls, text: str) -> Share:
        return cls(*json.loads(text))


def fill(module: str, *arguments: str, processes: int, seconds: float, **environment: str) -> str:
    """Run a module in several processes that fill the cache, and return a summary in one sentence.

    Each process gets ``--fill`` and its Share, and runs for at most `seconds`. Kernels that they do not compile
    in that time only cost time later.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        def filled(number: int) -> Ended:
            return record.child(module, *arguments, "--fill", str(Share(folder, number, processes)),
                                seconds=seconds, OMP_NUM_THREADS="1", **environment)
        with ThreadPoolExecutor(processes) as pool:
            children = list(pool.map(filled, range(processes)))
        claimed = sum(1 for path in Path(folder).iterdir() if path.suffix == ".kernel")
    early = [child.failure for child in children if child.failure]
    return "; ".join([f"{processes} processes compiled {claimed} kernels in {time.monotonic() - began:.0f} s",
                      *dict.fromkeys(early)])


def walk(items: Sequence[str], share: Share, go: Callable[[str], Any]) -> None:
    """Call `go` for every unfinished item, in a process that fills the cache.

    Errors are ignored, because the process that measures meets and reports them again. If memory runs out, wait
    for the other processes and try again.
    """
    import torch
    for item in unfinished(items, share):
        for _ in range(PATIENCE):
            try:
                with claiming(share):
                    found = str(go(item))
            except Exception as error:
                found = record.raised(error)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if "OutOfMemoryError" not in found:
                break
            time.sleep(PATIENCE)


def unfinished(items: Sequence[str], share: Share) -> Iterator[str]:
    """Yield the items that no process has finished, starting at a different item in each process.

    An item is marked as finished when the next item is requested.
    """
    first = len(items) * share.number // share.of
    for item in (*items[first:], *items[:first]):
        mark = Path(share.folder, hashlib.sha256(item.encode()).hexdigest() + ".done")
        if not mark.exists():
            yield item
            mark.touch()


def hurry() -> None:
    """Make new autotuners without their own timer measure for a quarter of the usual time.

    The usual time is 0.13 s for each of hundreds of compiled configurations.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench
    before = Autotuner.__init__

    def timed(call: Callable[[], Any], quantiles: Any) -> Any:
        return do_bench(call, warmup=5, rep=25, quantiles=quantiles)

    def made(tuner: Any, *args: Any, **kwargs: Any) -> None:
        before(tuner, *args, **{**kwargs, "do_bench": kwargs.get("do_bench") or timed})
    Autotuner.__init__ = made


@contextmanager
def claiming(share: Share) -> Iterator[None]:
    """Within this context, make kernel calls compile unclaimed kernels and launch nothing.

    Autotuners try all configurations, choose the first and write nothing to disk.
    """
    from triton import knobs
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction
    run, bench = JITFunction.run, Autotuner.__dict__["do_bench"]
    look_up, hook = Autotuner.check_disk_cache, knobs.runtime.jit_cache_hook

    def taken(*, fn: Any, key: str, **rest: Any) -> bool:
        name = hashlib.sha256(f"{fn.jit_function.cache_key} {key}".encode()).hexdigest()
        try:
            Path(share.folder, name + ".kernel").touch(exist_ok=False)
        except FileExistsError:
            return True
        return False

    def compiled(jitted: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(jitted, *args, grid=grid, warmup=True, **kwargs)
        if kernel is not None and not warmup:
            _ = kernel.run  # load the kernel; Triton 3.6 compiles a C launcher for it
        return kernel

    def once(call: Callable[[], Any], **options: Any) -> list[float]:
        try:
            call()
        except Exception:  # The process that measures meets this error again.
            return [float("inf")] * 3
        return [0.0] * 3

    def start(launch: Any, kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
        kernel[(programs,)](*door.in_order(launch, kernel, arguments), num_warps=launch.num_warps,
                            num_stages=launch.num_stages)
    JITFunction.run = compiled
    knobs.runtime.jit_cache_hook = taken
    Autotuner.do_bench = property(lambda tuner: once)
    Autotuner.check_disk_cache = lambda tuner, key, configs, measure: measure()
    door.replace_starter(start)
    try:
        yield
    finally:
        JITFunction.run, knobs.runtime.jit_cache_hook = run, hook
        Autotuner.do_bench, Autotuner.check_disk_cache = bench, look_up
        door.replace_starter(None)
