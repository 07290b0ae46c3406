"""The command line: ``flashlin doctor``, ``explain``, ``run``, ``warmup`` and ``why``, also as
``python -m flashlin``."""
from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout, suppress
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

import flashlin

ABOUT = """Linear attention that runs on every Triton, GPU and dtype, and otherwise says
what is wrong and what to do.

  flashlin doctor     what works on this machine, what is worked around, and
                      the command that repairs the rest
  flashlin explain    how one call would run, and why
  flashlin run        a program as it is, its fla, transformers or mamba_ssm
                      through flashlin
  flashlin warmup     compile and try what this machine will need, before the
                      first real call does
  flashlin why        what is known of an error that is on the screen, and what
                      to do about it
  flashlin --version  of flashlin, torch and Triton, in one line

`flashlin doctor --help` and so on have the options, examples and exit codes.
"""
DOCTOR = """Says first whether everything works, then what this machine is, what calls of
the ops take on it (the plans that calls would really follow), what is wrong,
and last the one command that repairs or improves it. Offline and read-only, but
for --run, which compiles kernels. Works with torch or Triton broken or missing.

Of fla, transformers, mamba_ssm, causal_conv1d and kernels it says what is
installed: each is imported in a child process, all at the same time, for 60
seconds at most. With --op and --target they are left out.

The first word is the verdict: ok, degraded (every op runs, but the GPU is not
used, or at a price), or broken. What is listed is

  ok               the usual way
  worked around    something stood in the way, and the way around it costs
                   nothing worth telling
  degraded         a GPU that is not used, or runs plain torch or fp32 copies,
                   and what that costs; another package that cannot be
                   imported, is slow here, or stops
  problem          does not run, or may be wrong
  could not check  nobody knows

Exit code: 0 if every op runs and nothing is known to be wrong (ok, degraded), 1
if not (broken, and with --fail-on degraded also degraded), 2 for a mistake in
the arguments or output that cannot be written.
"""
DOCTOR_EXAMPLES = """examples:
  flashlin doctor                              this machine
  flashlin doctor --run                        run small cases of every op, too
  flashlin doctor --run --op chunk_gla         one op
  flashlin doctor --verbose                    every op, check and known issue
  flashlin doctor --target T4,triton=3.2.0     another machine; or t4,torch=2.6,
                                               or sm=75,triton=3.2.0
  flashlin doctor --fail-on degraded           in a job's first line: does this
                                               machine run the kernels?
  flashlin doctor --markdown                   to paste into an issue; nothing
                                               in it says whose machine it is
  flashlin doctor --json | jq .status
"""
EXPLAIN = """The decision trail of one call: what stands against it on a machine, and what is
done about it. Sizes that are not given are those of the op's typical calls.

Exit code: 0 if there is an answer, also if it is that the call cannot run; 1 if
flashlin cannot be loaded; 2 for a mistake in the arguments or output that
cannot be written.
"""
EXPLAIN_EXAMPLES = """examples:
  flashlin explain chunk_gla                   training in bfloat16, here
  flashlin explain chunk_gla --dtype fp16 -B 4 -T 4096 -K 256
  flashlin explain chunk_gla --target T4,triton=3.3.1
  flashlin explain gdn                         what Gated DeltaNet layers call:
                                               chunk_gated_delta_rule
  flashlin explain simple_gla -T 1 -B 64 --no-grad      decoding: which mode?
"""
RUN = """Runs a program as `python program.py ...` would, with flashlin in the packages
that it imports: their functions are replaced by flashlin's before the program's
own first line, in the Python processes that it starts, too. At the end stderr
says what was replaced and which kernels ran in all these processes.

Exit code: the program's; 1 if flashlin cannot be loaded; 2 for a mistake in the
arguments.
"""
RUN_EXAMPLES = """examples:
  flashlin run train.py --lr 1e-3
  flashlin run --patch fla,transformers train.py
  FLASHLIN_PATCH=fla,transformers flashlin run train.py
  flashlin run torchrun --nproc-per-node 8 train.py
  flashlin run -m my.program --lr 1e-3
"""
WARMUP = """Runs a small case of each op on the GPU in child processes, forward and
backward, twice, and compares with float64. What is compiled stays in Triton's
cache, and planning knows from then on what holds on this machine and what does
not. Useful after an update of Triton or the driver, for a release nobody has
tried yet, and before a job on many GPUs starts.

An AMD GPU runs plain torch until this has been right there: then the ops,
dtypes and head sizes that were tried run kernels. Nobody has run them on AMD
yet, and a kernel that hangs may take the desktop with it: save your work first.
It then goes one by one, and ends at a hang.

Exit code: 0 if all is right, 1 if something is not (it will be planned
otherwise) or could not be tried, 2 for a mistake in the arguments, a device
that torch cannot use or output that cannot be written.
"""
WARMUP_EXAMPLES = """examples:
  flashlin warmup                    every op in bfloat16, heads of 64 and 128
  flashlin warmup --op chunk_gla --dtype bf16 --dtype fp32 --head-dim 256
  flashlin warmup --forget --op chunk_gla     take back what was found of it
"""
WHY = """Which known failures print this text: the cards and releases that have it, what
flashlin does, what to do without it, and how sure that is. Reads tables that
come with flashlin; asks nobody, starts nothing. Without a text it reads
standard input: a log of any size, in UTF-8 or UTF-16.

Exit code: 0 if something is known that prints it or may, 1 if nothing is, 2 for
a mistake in the arguments or output that cannot be written.
"""
WHY_EXAMPLES = """examples:
  flashlin why "IndexError: map::at"
  flashlin why reshapeOuts
  python train.py 2>&1 | flashlin why
  flashlin why < slurm-1234.out
"""
TARGET = ("plan for another machine: a card by its name or sm, and key=value pairs out of triton, torch, "
          "ptxas, shared, sms, name, backend; e.g. H100,triton=3.2.0 or t4,torch=2.6")


class Parser(argparse.ArgumentParser):
    """Says which command or option was meant."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']+)'", message)
        super().error(message + (meant(wrong[1], [*COMMANDS, "run"]) if wrong else ""))

    def parsed(self, argv: list[str] | None) -> dict[str, Any]:
        """The arguments. Where one is unknown, the error names the option of that command that was meant."""
        known, unknown = self.parse_known_args(argv)
        if unknown:
            [commands] = [one for one in self._actions if isinstance(one, argparse._SubParsersAction)]
            command = commands.choices[known.command] if known.command else self
            options = {**self._option_string_actions, **command._option_string_actions}
            command.error(f"unrecognized arguments: {' '.join(unknown)}{meant(unknown[0], options)}")
        return vars(known)


def meant(given: str, known: Iterable[str]) -> str:
    """``; did you mean --target H100?``, of what is like something known, or is a machine and --target known;
    else nothing."""
    with suppress(Unloadable):
        like = load("compat.suggestions").did_you_mean(given.partition("=")[0], known)
        machine = "--target" in known and (re.match(r"sm[_=]?\d", given)
                                           or load("compat.target").card_named(given))
        return str(like or (f"; did you mean --target {given}?" if machine else ""))
    return ""


def parser() -> Parser:
    plain = argparse.RawDescriptionHelpFormatter
    top = Parser(prog="flashlin", description=ABOUT, formatter_class=plain)
    top.add_argument("--version", action=Version, nargs=0, default=argparse.SUPPRESS,
                     help="versions of flashlin, torch and Triton")
    commands = top.add_subparsers(dest="command", metavar="doctor | explain | run | warmup | why")
    command = partial(commands.add_parser, formatter_class=plain)
    doctor = command("doctor", description=DOCTOR, epilog=DOCTOR_EXAMPLES)
    doctor.add_argument("--run", action="store_true",
                        help="run small cases of every op, forward and backward, in a child process")
    doctor.add_argument("--target", metavar="FACTS", help=TARGET)
    doctor.add_argument("--op", metavar="NAME", help="only this op")
    doctor.add_argument("--fail-on", choices=("problem", "degraded"), default="problem",
                        help="what makes the exit code 1 (default problem)")
    style = doctor.add_mutually_exclusive_group()
    style.add_argument("--verbose", action="store_true", help="every op, check and known issue")
    style.add_argument("--json", action="store_true", help="JSON on stdout")
    style.add_argument("--markdown", action="store_true", help="Markdown on stdout, folded for an issue")
    explain = command("explain", description=EXPLAIN, epilog=EXPLAIN_EXAMPLES)
    explain.add_argument("op", help="a public op, such as chunk_simple_gla, or the short name of its layer: "
                                    "gdn, kda, deltanet, gla, mamba2, retnet, rwkv7 ...")
    explain.add_argument("--target", metavar="FACTS", help=TARGET)
    explain.add_argument("-B", type=int, default=1, help="batch size (default 1)")
    for size, what in (("T", "tokens (default 2048, or 1 of an op that only decodes)"),
                       ("H", "heads (default 16 for most ops)"),
                       ("K", "size of a key (default 128 for most ops), or of a row, or channels"),
                       ("V", "size of a value (default 128 for most ops), or taps of a convolution"),
                       ("N", "packed sequences, with --varlen")):
        explain.add_argument(f"-{size}", type=int, help=what)
    explain.add_argument("--dtype", default="bfloat16",
                         help="bfloat16 (default), float16, float32, float64, or bf16, fp16, fp32")
    explain.add_argument("--varlen", action="store_true", help="packed sequences (cu_seqlens)")
    explain.add_argument("--no-grad", dest="needs_grad", action="store_false", help="without gradients")
    explain.add_argument("--ranks", type=int, default=1,
                         help="ranks that share each sequence, T tokens on each (process_group)")
    explain.add_argument("--mode", help="auto, chunk or fused_recurrent, for an op that has the choice")
    program = command("run", description=RUN, epilog=RUN_EXAMPLES)
    program.add_argument("--patch", metavar="NAMES",
                         help="packages, separated by commas (default: FLASHLIN_PATCH, else all that are installed)")
    program.add_argument("--quiet", action="store_true", help="say nothing at the end")
    program.add_argument("-m", dest="module", action="store_true", help="the program is the name of a module")
    program.add_argument("program", nargs=argparse.PARSER,
                         help="a file, a console script such as torchrun, or with -m a module; then its "
                              "arguments")
    warm = command("warmup", description=WARMUP, epilog=WARMUP_EXAMPLES)
    warm.add_argument("--op", action="append", default=[], metavar="NAME",
                      help="only this op (repeatable; default: all)")
    warm.add_argument("--dtype", action="append", default=[],
                      help="bfloat16 (default), float16, float32, or bf16, fp16, fp32 (repeatable)")
    warm.add_argument("--head-dim", action="append", default=[], type=int,
                      help="size of a head (repeatable; default 64 and 128)")
    warm.add_argument("--device", default="cuda:0", help="default cuda:0")
    warm.add_argument("--jobs", type=int, default=0,
                      help="children at a time (default: one per core, at most 8)")
    warm.add_argument("--limit", type=float, default=300, help="seconds for each child (default 300)")
    warm.add_argument("--forget", action="store_true",
                      help="try nothing, and take back what was found on this machine (of --op, or of all)")
    warm.add_argument("--json", action="store_true", help="JSON on stdout")
    ask = command("why", description=WHY, epilog=WHY_EXAMPLES)
    ask.add_argument("text", nargs="*", help="what was printed; standard input if nothing is given")
    return top


class Version(argparse.Action):
    """Prints the versions of flashlin, torch and Triton, as they are when imported, in one line."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        with redirect_stdout(sys.stderr):
            shown = ", ".join([f"flashlin {flashlin.__version__}",
                               *(f"{name} {version_of(name)}" for name in ("torch", "triton"))])
        print(shown)
        parser.exit()


def version_of(package: str) -> str:
    try:
        return str(import_module(package).__version__)
    except (Exception, SystemExit) as error:  # a broken one may raise anything
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        return ("not installed" if missing
                else f"broken ({type(error).__name__}: {' '.join(str(error).split())})")


# the last one by warmup, not by doctor and explain
NEEDED = {"packaging": "packaging>=22", "pydantic": "pydantic>=2", "torch": "torch>=2.4"}


class Unloadable(Exception):
    """Part of flashlin cannot be imported, so there is nobody to make a report."""


def load(module: str) -> Any:
    """A module of flashlin. Raises Unloadable, with the command that repairs it."""
    try:
        return import_module(f"flashlin.{module}")
    except (Exception, SystemExit) as error:
        named = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
        bad = [name for name in NEEDED if name != "torch" and not version_of(name)[:1].isdecimal()]
        broken = next((f'"{NEEDED[name]}"' for name in (named, *bad) if name in NEEDED), "--no-deps flashlin")
        raise Unloadable(
            f"flashlin cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())}   "
            f"fix: pip install --force-reinstall {broken}") from error


def main(argv: list[str] | None = None) -> int:
    try:
        try:
            arguments = parser().parsed(argv)
            command = arguments.pop("command")
            if command is None:
                parser().print_help()
                return 0
            code = report(command, arguments) if command in COMMANDS else None
        finally:
            if sys.stdout is not None:  # as after >&-
                sys.stdout.flush()
    except OSError as error:  # of stdout: what commands raise is told in ``report``
        # for what is still in the buffer when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # whoever read this has seen enough, as with any other program
            return 141
        print(f"flashlin: cannot write to standard output: {error.strerror}", file=sys.stderr)
        return 2
    return run_program(**arguments) if code is None else code  # pipes that break in there are the program's


def report(command: str, arguments: dict[str, Any]) -> int:
    try:
        with redirect_stdout(sys.stderr):  # a broken package may print when imported: stdout is the report's
            text, code = COMMANDS[command](**arguments)
    except (ValueError, RuntimeError, OSError, Unloadable) as error:
        print(f"flashlin {command}: {error}", file=sys.stderr)
        return 1 if isinstance(error, Unloadable) else 2
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))
    return code


def doctor(fail_on: Any, json: bool, markdown: bool, verbose: bool, **given: Any) -> tuple[str, int]:
    report = load("diagnostics.doctor").diagnose(None, **given, import_all=True)
    text = (report.model_dump_json(indent=2) if json else report.markdown() if markdown
            else report.text(verbose, colour=coloured(sys.__stdout__)))
    return text, int(report.fails(fail_on))


def coloured(out: Any) -> bool:
    """Whether that is a terminal whose owner has not asked for plain text (no-color.org)."""
    return (out is not None and out.isatty() and not os.environ.get("NO_COLOR")
            and os.environ.get("TERM") != "dumb")


def warmup(op: list[str], dtype: list[str], head_dim: list[int], forget: bool, json: bool,
           **given: Any) -> tuple[str, int]:
    from json import dumps

    trial, verdicts = load("trial.warmup"), load("guards.local_results")
    folder, why = verdicts.place()
    if forget:
        gone = trial.forget(op)
        return dumps({"forgotten": gone}) if json else f"{gone} verdicts taken back in {folder}", 0
    device = given["device"]
    if device.partition(":")[0] == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"device: got {device}, where nothing is compiled: need a GPU, or "
                         "TRITON_INTERPRET=1")
    trials = trial.warmup(op, dtype or ("bfloat16",), head_dim or trial.HEAD_DIMS, **given,
                          progress=lambda one: print(f"flashlin: {one}", file=sys.stderr, flush=True))
    if json:
        text = dumps([{**one._asdict(), **one.trial._asdict(), "trial": str(one.trial)} for one in trials],
                     indent=1)
    else:
        counts = ", ".join(f"{number} {word}" for word, number in
                           Counter(one.verdict for one in trials).items())
        text = "\n".join([f"{counts}; {f'kept in {folder}' if folder else why}",
                          *(str(one) for one in trials if not one.fine)])
    return text, 0 if all(one.fine for one in trials) else 1


def explain(op: str, **given: Any) -> tuple[str, int]:
    return load("diagnostics.doctor").explain(op, **given), 0


def why(text: list[str]) -> tuple[str, int]:
    known = load("diagnostics.why")
    piped = not text and sys.stdin is not None and not sys.stdin.isatty()
    reading = known.read(sys.stdin.buffer) if piped else known.read_text(" ".join(text))
    if reading.empty:
        raise ValueError('text: got nothing, need what was printed: flashlin why "IndexError: map::at", or a '
                         "log on standard input")
    found = reading.matches()
    return known.answer(found), 0 if found else 1


def run_program(patch: str | None, program: list[str], **how: Any) -> int:
    """The program has stdout for itself, and its exit ends this process."""
    try:
        with redirect_stdout(sys.stderr):
            startup = load("integrations.run_command")
        asked, by = ((patch, "--patch") if patch is not None else
                     (os.environ.get(startup.VARIABLE), startup.VARIABLE))
        names = startup.installed() if asked is None else startup.names_of(asked, by)
        # Before Python 3.13, argparse keeps a leading "--".
        name, *arguments = program[1:] if program[0] == "--" else program
        file = name if how["module"] else startup.file_of(name)
        startup.begin(names)
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, (ValueError, ImportError, Unloadable)) else f"{type(error).__name__}: "
        print(f"flashlin run: {kind}{' '.join(str(error).split())}", file=sys.stderr)
        return 1 if isinstance(error, Unloadable) else 2
    startup.run(file, arguments, names, **how)
    return 0


COMMANDS: dict[str, Callable[..., tuple[str, int]]] = {"doctor": doctor, "explain": explain, "warmup": warmup,
                                                       "why": why}

if __name__ == "__main__":
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        # python -m puts the current directory first; the command flashlin puts its script's folder first
        sys.path[0] = os.path.dirname(sys.executable)
    sys.exit(main())
