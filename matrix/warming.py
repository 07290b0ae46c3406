"""Fill Triton's cache by many processes before one measures.

fla compiles up to 300 configurations for an op and a shape, one after the other. Here several processes make
the same calls at the same time, and of each kernel the first that comes to it claims it, with a file, and
compiles it; the others pass it by. Nothing is launched, so nothing is timed, results hold whatever the memory
held, and a configuration that faults ends nobody. Needs Triton 3.4 or newer.
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

PATIENCE = 5  # how often, and for how many seconds


class Share(NamedTuple):
    """One of ``of`` processes that fill the cache; folder: where they keep their claims."""
    folder: str
    number: int
    of: int

    def __str__(self) -> str:
        return json.dumps(self)

    @classmethod
    def parse(cls, text: str) -> Share:
        return cls(*json.loads(text))


def fill(module: str, *arguments: str, processes: int, seconds: float, **environment: str) -> str:
    """Run a module in so many processes, for so long at most, each with ``--fill`` and its Share. Returns
    what came of it, in a sentence; how far they got decides nothing but time."""
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
    """In a process that fills the cache: make the calls of every item that nobody has finished. What an item
    raises, who measures meets again, and tells; but for memory that the other processes hold it waits."""
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
    """The items that nobody has gone through to the end, each process beginning at another one. An item is
    gone through when the next one is asked for."""
    first = len(items) * share.number // share.of
    for item in (*items[first:], *items[:first]):
        mark = Path(share.folder, hashlib.sha256(item.encode()).hexdigest() + ".done")
        if not mark.exists():
            yield item
            mark.touch()


def hurry() -> None:
    """Tuners made from now on that bring no timer of their own take a quarter of the usual time, which is
    0.13 s for each of hundreds of configurations that are compiled already."""
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
    """Meanwhile every call of a kernel compiles it if nobody has claimed it, and launches nothing; tuners
    try all their configurations, take the first and write nothing down."""
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
            _ = kernel.run  # loads it, for which Triton 3.6 compiles a launcher in C
        return kernel

    def once(call: Callable[[], Any], **options: Any) -> list[float]:
        try:
            call()
        except Exception:  # whoever measures meets it again; here the other configurations still count
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
