"""flashlin warmup: compile what this machine will need, in parallel, and try it, before the first real call does.

Each op, dtype and head size gets a child process: it runs a small case of the op forward and backward twice on the GPU, both bitwise the same and
right against float64. What it compiled stays in Triton's cache; the verdict on each configuration goes into the launch table of this machine
(``guards.proven``), which planning and doctor read: what is right here counts as run, what is wrong, aborts or hangs is planned otherwise from
then on. A compiler that ends its process ends a child. The child says which kernel it is about to start, so the last one named is to blame.

    python -m flashlin.warming --device cuda:0 --op chunk_simple_gla --dtype bfloat16 --head-dim 128        the child
"""
from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from flashlin import dispatch, policy
from flashlin.dispatch import OPS
from flashlin.guards import proven

CHILD = (sys.executable, "-m", "flashlin.warming")
DTYPES, HEAD_DIMS = ("bfloat16", "float16", "float32"), (64, 128)
LIMIT = 300.0  # seconds for a child


class Warmed(NamedTuple):
    """status: ``ok``; ``wrong`` (numbers, or two runs differ); ``failed`` (an exception); ``abort`` (the process died); ``hang``; ``torch path``
    (nothing to compile). configs: what was launched, the one to blame last where the child did not come to its end."""
    op: str
    dtype: str
    head_dim: int
    status: str
    detail: str
    configs: tuple[str, ...]
    seconds: float

    @property
    def fine(self) -> bool:
        return self.status in ("ok", "torch path")

    def __str__(self) -> str:
        return f"{self.status:10} {self.op} {self.dtype}" + (f" D={self.head_dim}" if self.head_dim else "") + (
            f"  {self.seconds:.0f} s" if self.configs else "") + (f"  {self.detail}" if self.detail else "")


def warmup(ops: Sequence[str] = (), dtypes: Sequence[str] = ("bfloat16",), head_dims: Sequence[int] = HEAD_DIMS, *, device: str = "cuda:0",
           jobs: int = 0, limit: float = LIMIT, progress: Callable[[Warmed], None] = lambda _: None) -> tuple[Warmed, ...]:
    """Compile and try the kernels of these ops (all by default) on ``device``, and keep the verdicts for this machine.

    jobs: children at a time, 0 for up to 8. limit: seconds for each. progress is told each result as it comes. Verdicts that cannot be
    kept (a cache that cannot be written) are told with a warning and hold in this process only. Raises ValueError for an unknown op, dtype or
    head size.
    """
    for name, got, need in (("op", ops, tuple(OPS)), ("dtype", dtypes, DTYPES)):
        for one in got:
            if one not in need:
                raise ValueError(f"{name}: got {one!r}, need one of {', '.join(need)}")
    for size in head_dims:
        if not 1 <= size <= 512:
            raise ValueError(f"head_dim: got {size}, need 1 to 512")
    todo = [(op, dtype, size) for op in ops or OPS if OPS[op][1] != "auto" for dtype in dtypes for size in (head_dims if OPS[op][1] else (0,))]

    def told(one: tuple[str, str, int]) -> Warmed:
        result = _try(*one, device, limit)
        progress(result)
        return result
    with ThreadPoolExecutor(jobs or min(8, os.cpu_count() or 1)) as pool:
        found = tuple(pool.map(told, todo))
    verdicts: dict[str, proven.Trust] = {config: "ran" for child in found if child.status == "ok" for config in child.configs}
    for child in found:
        if not child.fine:
            verdicts.update(dict.fromkeys(child.configs if child.status == "wrong" else child.configs[-1:], "failed"))
    proven.keep(verdicts, _target(device))
    dispatch.plan.cache_clear()
    return found


def _target(device: str) -> Any:
    import torch

    from flashlin.compat.target import probe
    return probe(torch.device(device))


def _try(op: str, dtype: str, size: int, device: str, limit: float) -> Warmed:
    """One child, from its start to its end."""
    began = time.monotonic()
    command = [*CHILD, "--device", device, "--op", op, "--dtype", dtype, "--head-dim", str(size)]
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as grumbled:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=grumbled, start_new_session=True,
                                 env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        try:
            code: int | None = child.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # and the compilers it has started
            child.wait()
            code = None
        said.seek(0)
        grumbled.seek(0)
        lines = [line for line in said.read().splitlines() if line.startswith("{")]
        last = [line.strip() for line in grumbled.read().splitlines() if line.strip()][-1:]
    messages = [json.loads(line) for line in lines]
    configs = tuple(dict.fromkeys(message["launch"] for message in messages if "launch" in message))
    result = next((message for message in messages if "status" in message), None)
    done = partial(Warmed, op, dtype, size, configs=configs, seconds=round(time.monotonic() - began, 1))
    if result is not None:
        return done(status=result["status"], detail=result["detail"])
    at = f"at {configs[-1]}" if configs else "before any kernel"
    if code is None:
        return done(status="hang", detail=f"no answer in {limit:g} s, {at}")
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return done(status="abort" if code < 0 else "failed", detail=": ".join([f"{how}, {at}", *last])[:400])


def main(argv: list[str] | None = None) -> None:
    """The child."""
    parser = argparse.ArgumentParser(prog="python -m flashlin.warming", description="The child process of flashlin warmup.")
    for name in ("device", "op", "dtype"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--head-dim", type=int, default=0)
    given = parser.parse_args(argv)
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not end up between the JSON lines
    import torch

    from flashlin.compat import launch as door
    from flashlin.testing.cases import CASES
    from flashlin.testing.compare import check
    policy.settings(canary="off")  # this is the trial
    torch.set_num_threads(1)
    device, dtype = torch.device(given.device), getattr(torch, given.dtype)
    family = dispatch.OPS[given.op][0]
    case = next(case for case in CASES if case.quick and case.op in (given.op, family))
    if given.head_dim:
        sizes: dict[str, Any] = {"K": given.head_dim, "V": given.head_dim}
        case = case._replace(make=partial(case.make, **sizes))

    def say(**message: Any) -> None:
        print(json.dumps(message), file=channel, flush=True)
    launched = False

    def noting(launch: Any, *rest: Any) -> None:
        nonlocal launched
        launched = True
        say(launch=launch.config)
        door._start(launch, *rest)
    door.replace_starter(noting)
    try:
        first, again = check(case, device, dtype), check(case, device, dtype)
    except Exception as error:  # a failure of any kind is this child's result
        say(status="failed", detail=f"{type(error).__name__}: {str(error)[:300]}")
        return
    wrong = [f"{one.tensor} off by {one.rms:.1e}, {one.allowed:.1e} allowed" for one in first if not one.ok]
    if first != again:
        wrong.append("two runs differ")
    say(status="wrong" if wrong else "ok" if launched else "torch path", detail="; ".join(wrong))


if __name__ == "__main__":
    main()
