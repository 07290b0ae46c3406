"""Child process of a trial.

The child runs a small case of one op twice, forward and backward, and compares the results with float64. It
prints JSON lines: each kernel before it is launched (``launch``) and after it has run (``landed``), and at
the end the verdict.

    python -m flashlin.trial.child --device cuda:0 --op chunk_simple_gla --dtype bfloat16 --head-dim 128
"""
from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

from flashlin.compat import failure_kind
from flashlin.compat.subprocesses import channel, no_core_dump

# The largest sizes of a case when GPU memory is full. Cases without these sizes are small already.
SMALL = {"B": 1, "T": 32}


def main(argv: list[str] | None = None) -> None:
    """Run the trial of the command line and print its verdict as a JSON line."""
    parser = argparse.ArgumentParser(prog="python -m flashlin.trial.child",
                                     description="The child process of flashlin warmup.")
    for name in ("device", "op", "dtype"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--head-dim", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="a smaller case, for a GPU whose memory is full")
    parser.add_argument("--known", action="store_true",
                        help="read verdicts that the parent could not write to a file from standard input")
    given = parser.parse_args(argv)
    say = channel()
    no_core_dump()
    struck: list[BaseException] = []
    kind = None
    try:
        verdict, detail = attempt(given, say, struck)
    except Exception as error:  # any error is a result of the trial
        kind, name = failure_kind.of_error(error), type(error).__name__
        if not struck or kind != "kernel":  # an error outside a launch says nothing about a kernel
            # Keep the first line. The others are torch's hints for debugging kernels.
            verdict, detail = "not tried", f"{name}: {error}".partition("\n")[0]
        else:
            detail = f"{name}: {' '.join(str(error).split())}"
            verdict = ("abort or illegal access" if failure_kind.ILLEGAL.search(detail) else
                       "hang" if failure_kind.STOPPED.search(detail) else "compiler error")
    say(verdict=verdict, detail=detail, memory=kind == "memory")


def attempt(given: argparse.Namespace, say: Any, struck: list[BaseException]) -> tuple[str, str]:
    """Run a trial to its end; return its verdict and a detail.

    given: the command line arguments.
    say: prints one JSON line.
    struck: a list to which an exception inside a launch is appended; the exception is raised again.
    """
    import torch

    from flashlin import policy
    from flashlin.compat import launch as door
    from flashlin.compat.target import probe
    from flashlin.guards import local_results
    from flashlin.testing.compare import check
    policy.settings(canary="trial")
    torch.set_num_threads(1)
    device, dtype = torch.device(given.device), getattr(torch, given.dtype)
    if given.known:
        local_results.know(sys.stdin.read(), probe(device))
    launched = False

    def noting(launch: Any, *rest: Any) -> None:
        nonlocal launched
        launched = True
        say(launch=launch.config)
        try:
            door._start(launch, *rest)
            if device.type == "cuda":
                # An error on the GPU is raised here, and not at a later call.
                torch.cuda.synchronize(device)
        except BaseException as error:
            struck.append(error)
            raise
        say(landed=launch.config)
    door.replace_starter(noting)
    case = small_case(given.op, given.head_dim, given.small)
    first, again = check(case, device, dtype), check(case, device, dtype)
    wrong = [f"{one.tensor} off by {one.rms:.1e}, {one.allowed:.1e} allowed" for one in first if not one.ok]
    if first != again:
        wrong.append("two runs differ")
    return "wrong numbers" if wrong else "ran" if launched else "torch path", "; ".join(wrong)


def small_case(op: str, head_dim: int, small: bool) -> Any:
    """Return the first quick case of an op or of its family, with this head dimension.

    head_dim: 0 keeps the head dimension of the case.
    small: limit the sizes to ``SMALL``.
    """
    from flashlin import dispatch
    from flashlin.testing.cases import CASES
    from flashlin.testing.cases.op import facts_of
    case = next(case for case in CASES if case.quick and case.op in (op, dispatch.OPS[op][0]))
    sizes: dict[str, Any] = {"K": head_dim, "V": head_dim} if head_dim else {}
    if small:
        usual = facts_of(case)
        sizes |= {name: min(size, usual[name]) for name, size in SMALL.items() if name in usual}
    return case._replace(make=partial(case.make, **sizes)) if sizes else case


if __name__ == "__main__":
    main()
