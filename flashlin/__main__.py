"""The command line: ``flashlin doctor``, ``explain``, ``run``, ``warmup`` and ``why``.

``python -m flashlin`` is the same. The docstring of the function that runs a command is its help text. Such a
function returns the report and the exit code.
"""
from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout, suppress
from importlib import import_module
from typing import Any, NoReturn

import flashlin

ABOUT = """Linear-attention kernels that run on every Triton, GPU and dtype, or say why not
and what to do.

  flashlin doctor     show what works on this machine, what is worked around,
                      and the command that repairs the rest
  flashlin explain    show how one call would run, and why
  flashlin run        run a program unchanged, with flashlin in the fla,
                      transformers or mamba_ssm that it uses
  flashlin warmup     compile and test the kernels that this machine needs,
                      before the first real call
  flashlin why        show what is known about an error, and what to do
  flashlin --version  show the versions of flashlin, torch and Triton

For options, examples and exit codes, see `flashlin doctor --help` and so on.
"""
DOCTOR_EXAMPLES = """examples:
  flashlin doctor                              this machine
  flashlin doctor --run                        also run small cases of every op
  flashlin doctor --run --op chunk_gla         one op
  flashlin doctor --verbose                    every op, check and known issue
  flashlin doctor --target T4,triton=3.2.0     another machine; or t4,torch=2.6,
                                               or sm=75,triton=3.2.0
  flashlin doctor --fail-on degraded           at the start of a job: fail if
                                               this GPU runs no kernels
  flashlin doctor --markdown                   to paste into an issue; without
                                               user names, tokens or UUIDs
  flashlin doctor --json | jq .status
"""
EXPLAIN_EXAMPLES = """examples:
  flashlin explain chunk_gla                   training in bfloat16, here
  flashlin explain chunk_gla --dtype fp16 -B 4 -T 4096 -K 256
  flashlin explain chunk_gla --target T4,triton=3.3.1 --json
  flashlin explain gdn                         the op of Gated DeltaNet layers,
                                               chunk_gated_delta_rule
  flashlin explain simple_gla -T 1 -B 64 --no-grad      decoding: which mode?
"""
RUN_EXAMPLES = """examples:
  flashlin run train.py --lr 1e-3
  flashlin run --patch fla,transformers train.py
  FLASHLIN_PATCH=fla,transformers flashlin run train.py
  flashlin run torchrun --nproc-per-node 8 train.py
  flashlin run -m my.program --lr 1e-3
"""
WARMUP_EXAMPLES = """examples:
  flashlin warmup                    every op in bfloat16, heads of 64 and 128
  flashlin warmup --op chunk_gla --dtype bf16 --dtype fp32 --head-dim 256
  flashlin warmup --forget --op chunk_gla     delete the stored results
"""
WHY_EXAMPLES = """examples:
  flashlin why "IndexError: map::at"
  flashlin why slow first step
  flashlin why "IndexError: map::at" --target T4,triton=3.2
  python train.py 2>&1 | flashlin why
  flashlin why < slurm-1234.out
  flashlin why --json < slurm-1234.out
"""
TARGET = ("plan for another machine: a GPU by its name or sm, and key=value pairs of triton, torch, "
          "ptxas, shared, sms, name, backend; e.g. H100,triton=3.2.0 or t4,torch=2.6")


class Parser(argparse.ArgumentParser):
    """The parser of the command line, whose errors suggest the command or option that was meant."""

    def error(self, message: str) -> NoReturn:
        """Print the error with a suggestion, and exit."""
        wrong = re.search(r"invalid choice: '([^']+)'", message)
        super().error(message + (meant(wrong[1], [*COMMANDS, "run"]) if wrong else ""))

    def parsed(self, argv: list[str] | None) -> dict[str, Any]:
        """Return the arguments. An error for an unknown argument suggests a similar option of the command."""
        known, unknown = self.parse_known_args(argv)
        if unknown:
            [commands] = [one for one in self._actions if isinstance(one, argparse._SubParsersAction)]
            command = commands.choices[known.command] if known.command else self
            options = {**self._option_string_actions, **command._option_string_actions}
            command.error(f"unrecognized arguments: {' '.join(unknown)}{meant(unknown[0], options)}")
        return vars(known)


def meant(given: str, known: Iterable[str]) -> str:
    """Return a suggestion such as ``; did you mean --target H100?``, or ``""``.

    known: the valid commands or options. The suggestion is the most similar of them, or --target if the text
        looks like a machine and --target is valid.
    """
    with suppress(Unloadable):
        like = load("compat.suggestions").did_you_mean(given.partition("=")[0], known)
        machine = "--target" in known and (re.match(r"sm[_=]?\d", given)
                                           or load("compat.target").card_named(given))
        return str(like or (f"; did you mean --target {given}?" if machine else ""))
    return ""


def parser() -> Parser:
    """Return the parser with all commands and options."""
    plain = argparse.RawDescriptionHelpFormatter
    top = Parser(prog="flashlin", description=ABOUT, formatter_class=plain)
    top.add_argument("--version", action=Version, nargs=0, default=argparse.SUPPRESS,
                     help="versions of flashlin, torch and Triton")
    commands = top.add_subparsers(dest="command", metavar="doctor | explain | run | warmup | why")

    def command(name: str, examples: str) -> Any:
        about = inspect.getdoc({**COMMANDS, "run": run_program}[name])
        return commands.add_parser(name, description=about, epilog=examples, formatter_class=plain)
    doctor = command("doctor", DOCTOR_EXAMPLES)
    doctor.add_argument("--run", action="store_true",
                        help="run small cases of every op, forward and backward, in a child process")
    doctor.add_argument("--target", metavar="FACTS", help=TARGET)
    doctor.add_argument("--op", metavar="NAME", help="only this op")
    doctor.add_argument("--fail-on", choices=("problem", "degraded"), default="problem",
                        help="the status that makes the exit code 1 (default problem)")
    doctor.add_argument("--imports", type=float, default=3.5, metavar="SECONDS",
                        help="how long to wait for imports of other packages (default 3.5)")
    style = doctor.add_mutually_exclusive_group()
    style.add_argument("--verbose", action="store_true", help="show every op, check and known issue")
    style.add_argument("--json", action="store_true", help="JSON on stdout")
    style.add_argument("--markdown", action="store_true", help="Markdown on stdout, folded for an issue")
    explain = command("explain", EXPLAIN_EXAMPLES)
    explain.add_argument("op", help="a public op, such as chunk_simple_gla, or the short name of its layer: "
                                    "gdn, kda, deltanet, gla, mamba2, retnet, rwkv7 ...")
    explain.add_argument("--target", metavar="FACTS", help=TARGET)
    explain.add_argument("-B", type=int, default=1, help="batch size (default 1)")
    for size, what in (("T", "tokens (default 2048, or 1 for an op that only decodes)"),
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
    explain.add_argument("--mode", help="auto, chunk or fused_recurrent, for an op that has a choice")
    program = command("run", RUN_EXAMPLES)
    program.add_argument("--patch", metavar="NAMES",
                         help="packages, separated by commas (default: FLASHLIN_PATCH, else all installed ones)")
    program.add_argument("--quiet", action="store_true", help="print no summary at the end")
    program.add_argument("-m", dest="module", action="store_true", help="the program is the name of a module")
    program.add_argument("program", nargs=argparse.PARSER,
                         help="a file, a console script such as torchrun, or with -m a module; then its "
                              "arguments")
    warm = command("warmup", WARMUP_EXAMPLES)
    warm.add_argument("--op", action="append", default=[], metavar="NAME",
                      help="only this op (repeatable; default: all)")
    warm.add_argument("--dtype", action="append", default=[],
                      help="bfloat16 (default), float16, float32, or bf16, fp16, fp32 (repeatable)")
    warm.add_argument("--head-dim", action="append", default=[], type=int,
                      help="size of a head (repeatable; default 64 and 128)")
    warm.add_argument("--device", default="cuda:0", help="default cuda:0")
    warm.add_argument("--jobs", type=int, default=0,
                      help="child processes at a time (default: one per core, at most 8)")
    warm.add_argument("--limit", type=float, default=300, help="seconds for each child (default 300)")
    warm.add_argument("--forget", action="store_true",
                      help="run nothing, and delete the results of this machine (for --op, or all)")
    ask = command("why", WHY_EXAMPLES)
    ask.add_argument("text", nargs="*", help="the printed text, or a question in plain words; standard input "
                                             "if none is given")
    ask.add_argument("--target", metavar="FACTS", help="the GPU and the Triton of the failure, such as "
                                                       "T4,triton=3.2; default: those that the text names")
    for one in (explain, warm, ask):
        one.add_argument("--json", action="store_true", help="JSON on stdout")
    return top


class Version(argparse.Action):
    """Print the versions of flashlin, torch and Triton in one line; each is the package's ``__version__``."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        """Print the line and exit."""
        with redirect_stdout(sys.stderr):
            torch, triton = version_of("torch"), version_of("triton")
        print(f"flashlin {flashlin.__version__}, torch {torch}, triton {triton}")
        parser.exit()


def version_of(package: str) -> str:
    """Return the version of a package, or the reason that it cannot be imported."""
    try:
        return str(import_module(package).__version__)
    except (Exception, SystemExit) as error:  # a broken package may raise any exception
        return ("not installed" if isinstance(error, ModuleNotFoundError) and error.name == package
                else f"broken ({type(error).__name__}: {' '.join(str(error).split())})")


# packages that flashlin requires; only warmup requires torch, doctor and explain do not
NEEDED = {"packaging": "packaging>=22", "pydantic": "pydantic>=2", "torch": "torch>=2.4"}


class Unloadable(Exception):
    """Raised if a module of flashlin cannot be imported, so that the command cannot run."""


def load(module: str) -> Any:
    """Return a module of flashlin. Raises Unloadable, with the command that repairs it."""
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
    """Run the command line and return the exit code."""
    try:
        try:
            arguments = parser().parsed(argv)
            command = arguments.pop("command")
            if command is None:
                parser().print_help()
                return 0
            code = report(command, arguments) if command in COMMANDS else None
        finally:
            if sys.stdout is not None:  # None if a shell closed it by >&-
                sys.stdout.flush()
    except OSError as error:  # from writing to stdout; ``report`` catches every OSError of a command
        # text that is still in the buffer must not raise again when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader closed the pipe, which is no error
            return 141
        print(f"flashlin: cannot write to standard output: {error.strerror}", file=sys.stderr)
        return 2
    return run_program(**arguments) if code is None else code  # outside try: not our error


def report(command: str, arguments: dict[str, Any]) -> int:
    """Run a command that prints a report, and return the exit code."""
    try:
        with redirect_stdout(sys.stderr):  # a broken package may print when imported; stdout has the report only
            text, code = COMMANDS[command](**arguments)
    except (ValueError, RuntimeError, OSError, Unloadable) as error:
        print(f"flashlin {command}: {error}", file=sys.stderr)
        return 1 if isinstance(error, Unloadable) else 2
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))
    return code


def doctor(fail_on: Any, imports: float, json: bool, markdown: bool, verbose: bool,
           **given: Any) -> tuple[str, int]:
    """Show what works on this machine, and the one command that repairs the rest.

    The report has the verdict, the devices of this machine, how calls of the ops
    run on it (by the plans that real calls follow), problems, and the command. It
    works offline and read-only, except with --run, which compiles kernels. It
    works if torch or Triton is broken or missing.

    Doctor also reports if fla, transformers, mamba_ssm, causal_conv1d and kernels
    are installed. It imports each in a child process, all at the same time. An
    import that takes longer than --imports seconds is not judged. With --op and
    --target it leaves them out.

    The first word is the verdict: ok, degraded (every op runs, but the GPU is not
    used, or is used at a cost), or broken. The lines have one of these states:

      ok               runs in the usual way
      worked around    a problem is avoided at no significant cost
      degraded         a GPU that is not used, runs plain torch or fp32 copies, or
                       runs kernels that were never tested on such a GPU or spill
                       registers, with the cost; or another package that cannot
                       be imported, is slow here, or fails
      problem          does not run, or may be wrong
      could not check  unknown

    Exit code: 0 if every op runs and nothing is known to be wrong (ok, degraded), 1
    if not (broken, and with --fail-on degraded also degraded), 2 for a mistake in
    the arguments or output that cannot be written.
    """
    if not imports >= 0:
        raise ValueError(f"--imports: got {imports:g}, need 0 or more seconds")
    packages, importing = load("diagnostics.packages"), load("diagnostics.importing")
    modules = {} if given["target"] or given["op"] else packages.to_import()
    if modules and sys.stderr.isatty():
        print(f"flashlin doctor: imports {', '.join(modules)}, for {imports:g} s at most", file=sys.stderr)
    with importing.begun(modules, imports) as children:
        report = load("diagnostics.doctor").diagnose(None, **given, children=children)
    text = (report.model_dump_json(indent=2) if json else report.markdown() if markdown
            else report.text(verbose, colour=coloured(sys.__stdout__)))
    return text, int(report.fails(fail_on))


def coloured(out: Any) -> bool:
    """Return True if ``out`` is a terminal whose user has not disabled colours (no-color.org)."""
    return (out is not None and out.isatty() and not os.environ.get("NO_COLOR")
            and os.environ.get("TERM") != "dumb")


def warmup(op: list[str], dtype: list[str], head_dim: list[int], forget: bool, json: bool,
           **given: Any) -> tuple[str, int]:
    """Run a small case of each op on the GPU, and compare it with float64.

    Each case runs forward and backward, twice, in a child process. The compiled
    kernels stay in Triton's cache, and planning uses the results from then on.
    This is useful after an update of Triton or the driver, for a release that
    has not been tested yet, and before a job on many GPUs starts.

    An AMD GPU runs plain torch until the results of warmup are right there. After
    that, the tested ops, dtypes and head sizes run kernels. These kernels have not
    been run on AMD yet, and a kernel that hangs may freeze the desktop: save your
    work first. On AMD the cases run one at a time, and the command ends at a hang.

    Exit code: 0 if all results are right; 1 if one is wrong (planning then avoids
    it) or could not be tested; 2 for a mistake in the arguments, a device that
    torch cannot use or output that cannot be written.
    """
    from json import dumps

    trial, verdicts = load("trial.warmup"), load("guards.local_results")
    folder, why = verdicts.place()
    if forget:
        gone = trial.forget(op)
        return dumps({"forgotten": gone}) if json else f"{gone} results deleted in {folder}", 0
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


def explain(op: str, json: bool, **given: Any) -> tuple[str, int]:
    """Show how one call runs, and why.

    The answer has the problems that the call has on a machine, and how flashlin
    avoids each of them. A size that is not given is the size of the op's
    typical calls.

    Exit code: 0 if there is an answer, even if the call cannot run; 1 if flashlin
    cannot be loaded; 2 for a mistake in the arguments or output that cannot be
    written.
    """
    doctor = load("diagnostics.doctor")
    return (doctor.explain_as_json if json else doctor.explain)(op, **given), 0


def why(text: list[str], json: bool, target: str | None) -> tuple[str, int]:
    """Show at most three known failures that print this text.

    The most likely one comes first, with its cause, the fix, what flashlin does,
    where it occurs, and how certain it is. The command works offline and
    launches nothing: it reads tables that are part of flashlin. Without a text
    it reads standard input: a log of any size, in UTF-8 or UTF-16. It also
    answers short questions in plain words, such as: why nan.

    Exit code: 0 if a known failure prints it or may print it, 1 if none does, 2 for
    a mistake in the arguments or output that cannot be written.
    """
    known = load("diagnostics.why")
    piped = not text and sys.stdin is not None and not sys.stdin.isatty()
    reading = known.read(sys.stdin.buffer) if piped else known.read_text(" ".join(text))
    if reading.empty:
        raise ValueError('text: got nothing, need the printed text: flashlin why "IndexError: map::at", or a '
                         "log on standard input")
    found = (reading.on(target) if target else reading).matches()
    return (known.as_json if json else known.answer)(found), 0 if found else 1


def run_program(patch: str | None, program: list[str], **how: Any) -> int:
    """Run a program with flashlin in the packages that it imports.

    The program runs as with `python program.py ...`. flashlin's functions replace
    theirs, also in the Python processes that the program starts. At the end, a
    summary on stderr lists the replaced functions and the kernels that ran in
    all these processes.

    Exit code: the program's; 1 if flashlin cannot be loaded; 2 for a mistake in the
    arguments.
    """
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
