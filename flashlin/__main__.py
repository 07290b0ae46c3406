"""The command line: ``flashlin doctor``, ``flashlin explain`` and ``flashlin warmup``, also as ``python -m flashlin``."""
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import redirect_stdout

ABOUT = """Linear attention that runs on every Triton, GPU and dtype, and otherwise says what is wrong and what to do.

  flashlin doctor     what works on this machine, what is worked around, and the command that repairs the rest
  flashlin explain    how one call would run, and why
  flashlin warmup     compile and try what this machine will need, before the first real call does
"""
DOCTOR = """Says first whether everything works, then what this machine is, then one line per op: the plan that a call would really follow.
Offline and read-only (--run compiles kernels, and Triton caches them). Works with torch or Triton broken or missing.
Exit code: 0 if every op runs and nothing is known to be wrong, 1 if not, 2 for a mistake in the arguments.
"""
DOCTOR_EXAMPLES = """examples:
  flashlin doctor                                   this machine
  flashlin doctor --run                             also run small cases of every op against a float64 reference
  flashlin doctor --run --op chunk_simple_gla       one op
  flashlin doctor --target triton=3.2.0,sm=75       another machine: Triton 3.2.0 on a T4
  flashlin doctor --markdown                        to paste into an issue; nothing in it says whose machine it is
  flashlin doctor --json | jq .ok
"""
EXPLAIN_EXAMPLES = """examples:
  flashlin explain chunk_simple_gla                                             on this machine, training, bfloat16
  flashlin explain chunk_simple_gla --dtype float16 -B 4 -T 4096 -K 256
  flashlin explain chunk_simple_gla --target triton=3.3.1,sm=75                 on a T4 with Triton 3.3.1
  flashlin explain simple_gla -T 1 -B 64 --no-grad                              decoding: which mode?
"""
WARMUP = """Runs a small case of each op on the GPU in child processes, forward and backward, twice, and compares with float64. What is compiled
stays in Triton's cache, and planning knows from then on what holds on this machine and what does not. Useful after an update of Triton or the
driver, for a release nobody has tried yet, and before a job on many GPUs starts.
Exit code: 0 if all is right, 1 if something is not (it will be planned otherwise) or could not be tried, 2 for a mistake in the arguments.
"""
WARMUP_EXAMPLES = """examples:
  flashlin warmup                                                       every op in bfloat16, heads of 64 and 128
  flashlin warmup --op chunk_gated_delta_rule --dtype bfloat16 --dtype float32 --head-dim 256
  flashlin warmup --forget --op chunk_gated_delta_rule                  take back what was found of its kernels here
"""
TARGET = "plan for another machine: key=value pairs out of triton, sm, ptxas, shared, sms, name, torch, backend; e.g. triton=3.2.0,sm=90"


def parser() -> argparse.ArgumentParser:
    plain = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(prog="flashlin", description=ABOUT, epilog=DOCTOR_EXAMPLES + "\n" + EXPLAIN_EXAMPLES, formatter_class=plain)
    commands = top.add_subparsers(dest="command", metavar="doctor | explain | warmup", required=True)
    doctor = commands.add_parser("doctor", help="examine this machine", description=DOCTOR, epilog=DOCTOR_EXAMPLES, formatter_class=plain)
    doctor.add_argument("--run", action="store_true", help="run small cases of every op, forward and backward, in a child process")
    doctor.add_argument("--target", metavar="FACTS", help=TARGET)
    doctor.add_argument("--op", metavar="NAME", help="only this op")
    style = doctor.add_mutually_exclusive_group()
    style.add_argument("--json", action="store_true", help="JSON on stdout")
    style.add_argument("--markdown", action="store_true", help="Markdown on stdout")
    explain = commands.add_parser("explain", help="how one call would run, and why", epilog=EXPLAIN_EXAMPLES, formatter_class=plain,
                                  description="The decision trail of one call: what stands against it on a machine, and what is done about it.")
    explain.add_argument("op", help="a public op, such as chunk_simple_gla")
    explain.add_argument("--target", metavar="FACTS", help=TARGET)
    for size, default, what in (("B", 1, "batch size"), ("T", 2048, "tokens"), ("H", 16, "heads"),
                                ("K", 128, "size of a key, or of a row, or channels")):
        explain.add_argument(f"-{size}", type=int, default=default, help=f"{what} (default {default})")
    explain.add_argument("-V", type=int, help="size of a value (default 128), or taps of a convolution (default 4)")
    explain.add_argument("-N", type=int, help="packed sequences, with --varlen")
    explain.add_argument("--dtype", default="bfloat16", help="bfloat16 (default), float16, float32, float64")
    explain.add_argument("--varlen", action="store_true", help="packed sequences (cu_seqlens)")
    explain.add_argument("--no-grad", dest="needs_grad", action="store_false", help="without gradients")
    explain.add_argument("--mode", help="auto, chunk or fused_recurrent, for an op that has the choice")
    warm = commands.add_parser("warmup", help="compile and try kernels ahead", epilog=WARMUP_EXAMPLES, formatter_class=plain, description=WARMUP)
    warm.add_argument("--op", action="append", default=[], metavar="NAME", help="only this op (repeatable; default: all)")
    warm.add_argument("--dtype", action="append", default=[], help="bfloat16 (default), float16, float32 (repeatable)")
    warm.add_argument("--head-dim", action="append", default=[], type=int, help="size of a head (repeatable; default 64 and 128)")
    warm.add_argument("--device", default="cuda:0", help="default cuda:0")
    warm.add_argument("--jobs", type=int, default=0, help="children at a time (default: one per core, at most 8)")
    warm.add_argument("--limit", type=float, default=300, help="seconds for each child (default 300)")
    warm.add_argument("--forget", action="store_true", help="try nothing, and take back what was found on this machine (of --op, or of all)")
    warm.add_argument("--json", action="store_true", help="JSON on stdout")
    return top


def main(argv: list[str] | None = None) -> int:
    arguments = vars(parser().parse_args(argv))
    command = arguments.pop("command")
    try:
        with redirect_stdout(sys.stderr):  # a broken package may print when imported: stdout is the report's
            text, code = COMMANDS[command](**arguments)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"flashlin {command}: {error}", file=sys.stderr)
        return 2
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))
    return code


def doctor(run: bool, target: str | None, op: str | None, json: bool, markdown: bool) -> tuple[str, int]:
    from flashlin import diagnosis
    report = diagnosis.doctor(run=run, target=target, op=op)
    return report.model_dump_json(indent=2) if json else report.markdown() if markdown else report.text(), report.exit_code


def warmup(op: list[str], dtype: list[str], head_dim: list[int], device: str, jobs: int, limit: float, forget: bool, json: bool) -> tuple[str, int]:
    from json import dumps

    from flashlin.guards import verdicts
    from flashlin.trial import warmup as trial
    folder, why = verdicts.place()
    if forget:
        gone = trial.forget(op)
        return dumps({"forgotten": gone}) if json else f"{gone} verdicts taken back in {folder}", 0
    found = trial.warmup(op, dtype or ("bfloat16",), head_dim or trial.HEAD_DIMS, device=device, jobs=jobs, limit=limit,
                         progress=lambda one: print(f"flashlin: {one}", file=sys.stderr, flush=True))
    if json:
        text = dumps([{**one._asdict(), **one.trial._asdict(), "trial": str(one.trial)} for one in found], indent=1)
    else:
        count = {word: sum(one.verdict == word for one in found) for word in dict.fromkeys(one.verdict for one in found)}
        text = "\n".join([f"{', '.join(f'{number} {word}' for word, number in count.items())}; {f'kept in {folder}' if folder else why}",
                          *(str(one) for one in found if not one.fine)])
    return text, 0 if all(one.fine for one in found) else 1


def explain(op: str, target: str | None, B: int, T: int, H: int, K: int, V: int | None, N: int | None, dtype: str, varlen: bool, needs_grad: bool,
            mode: str | None) -> tuple[str, int]:
    from flashlin import diagnosis
    return diagnosis.explain(op, target=target, B=B, T=T, H=H, K=K, V=V, N=N, dtype=dtype, varlen=varlen, needs_grad=needs_grad, mode=mode), 0


COMMANDS: dict[str, Callable[..., tuple[str, int]]] = {"doctor": doctor, "explain": explain, "warmup": warmup}

if __name__ == "__main__":
    sys.exit(main())
