"""Tests of ``flashlin why``: it finds each known failure by its symptoms, inside any log that users paste.

It must not confuse failures, and it reports an unknown failure as unknown.
"""
from __future__ import annotations

import codecs
import io
import json
import os
import re
import subprocess
import sys
import time
import tracemalloc
from types import ModuleType

import pytest

import flashlin
from flashlin.__main__ import main
from flashlin.compat import failure_kind
from flashlin.compat.known import Known, KnownIssue
from flashlin.compat.known_failures import KNOWN_FAILURES
from flashlin.compat.known_flaws import KNOWN_FLAWS
from flashlin.compat.known_issues import KNOWN_ISSUES
from flashlin.compat.target import parse
from flashlin.diagnostics import report, why
from flashlin.diagnostics.why import failures, matches, rows
from tests import report_scores
from tests.machines import ROOT, run

EVERY = {known.id: known for known in failures()}
PRINTED = [(known, symptom) for known in EVERY.values() for symptom in known.symptoms]
SILENT = re.compile(r"silently|sporadic|vary|differ|values off|no tensor cores|one configuration")
# A log of torchrun and pytest: with rank prefixes and colours, and the cause long before the exception.
LOG = """W1123 09:00:01.1 torch/distributed/run.py:793] Setting OMP_NUM_THREADS environment variable to be 1
\x1b[31m[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/me/train.py", line 88, in <module>
[rank0]:     loss = model(tokens).loss
[rank0]:   File "/opt/conda/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1775, in _call_impl
[rank0]:     return forward_call(*args, **kwargs)
[rank0]:            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
[rank0]:   File "/opt/conda/lib/python3.11/site-packages/fla/ops/simple_gla/chunk.py", line 301, in forward
[rank0]:     o = chunk_fwd_o(q=q, k=k, v=v, g=g, h=h, scale=scale)
[rank0]:   File "/opt/conda/lib/python3.11/site-packages/triton/runtime/jit.py", line 623, in run
[rank0]:     kernel = self.compile(src, target=target, options=options.__dict__)
{place}[rank0]: {symptom} and more of it\x1b[0m
E1123 09:00:09.7 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 0
"""


def log(symptom: str, seen_in: str = "") -> str:
    varying = symptom.replace("...", "STAGE" if "'..." in symptom else
                              " at 3:4 x::y(int, long)\n[rank0]: /project/lib/")
    place = f'[rank0]:   File "/opt/conda/lib/python3.11/site-packages/{seen_in}\n'.replace("...", "152")
    return LOG.format(symptom=varying, place=place if seen_in else "")


def words_of(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.casefold()))


def ids(found: list[why.Match]) -> set[str]:
    return {match.failure.id for match in found}


@pytest.mark.parametrize(("known", "symptom"), PRINTED, ids=lambda one: getattr(one, "id", None))
def test_a_failure_is_found_by_what_it_prints_and_by_nothing_elses(known: Known, symptom: str) -> None:
    text = log(symptom, known.seen_in)
    found, plain, words = matches(text), " ".join(text.split()), words_of(text)
    printed = [one for one, other in PRINTED if one.seen_in in ("", known.seen_in)
               and why._sought(other).last(plain, words) >= 0]
    for less in ("noise", "general"):
        printed = [one for one in printed if not getattr(one, less)] or printed
    assert ids(found) == {one.id for one in printed} and all(match.sure for match in found)
    assert known.id in ids(found) or known.general or known.noise


def test_every_table_is_asked_and_every_name_means_one_failure() -> None:
    every = [one.id for table in (KNOWN_ISSUES, KNOWN_FLAWS, KNOWN_FAILURES) for one in table]
    assert len(every) == len(set(every)) == len(EVERY) and set(every) == set(EVERY)
    assert len(set(PRINTED)) == len(PRINTED)


@pytest.mark.parametrize("issue", [one for one in KNOWN_ISSUES if not one.symptoms], ids=lambda one: one.id)
def test_what_prints_nothing_says_so_and_is_found_by_its_words(issue: KnownIssue) -> None:
    assert SILENT.search(issue.effect)
    assert issue.id in ids(matches(f"RuntimeError: {issue.effect}")) and issue.id in ids(matches(issue.id))


def test_what_many_print_is_told_only_where_nothing_narrower_is_found() -> None:
    general = {one.id for one in KNOWN_FAILURES if one.general}
    assert ids(matches("RuntimeError: PassManager::run failed")) == {"compiler-pass-failed"} <= general
    both = "LLVM ERROR: Unsupported rounding mode for conversion.\nRuntimeError: PassManager::run failed"
    assert ids(matches(both)) == {"half-dot-33-pre-ampere"}


def test_a_text_that_others_print_too_is_sure_only_in_its_place() -> None:
    [elsewhere] = matches("Traceback (most recent call last):\n  File \"a.py\", line 1\n"
                          "IndexError: list index out of range")
    assert elsewhere.failure.id == "autotune-keys-31" and not elsewhere.sure
    assert "triton/runtime/autotuner.py" in elsewhere.because
    [there] = matches(log("IndexError: list index out of range", EVERY["autotune-keys-31"].seen_in))
    assert there.sure
    # A file name without the error is not a symptom.
    assert not matches(log("KeyError: 'loss'", EVERY["autotune-keys-31"].seen_in))


@pytest.mark.parametrize(("asked", "expected"), [
    ("reshapeOuts", "reshape-outs-32"), ("map::at", "tf32-dot-turing-32"),
    ("invalid argument", "grid-axis-65535"), ("device-side assert", "token-out-of-range"),
    ("list index out of range", "autotune-keys-31"), ("Unsupported conversion", "half-dot-33-pre-ampere"),
    ("LINEARLAYOUT::RESHAPEOUTS", "reshape-outs-32"), ("libcuda.so.1", "no-libcuda"),
    ("selective_scan_cuda", "mamba-extension-missing"), ("illegal memory access", "hopper-narrow-state")])
def test_what_people_search_for_is_found_and_called_a_part(asked: str, expected: str) -> None:
    found = matches(asked)
    assert expected in ids(found) and not any(match.sure for match in found)
    assert all("part of what it prints" in match.because or match.failure.asked for match in found)


# --- part of a symptom inside a longer line ---

@pytest.mark.parametrize(("text", "expected"), [
    ("E   RuntimeError: Failed to emit transfer from register, says my colleague", "narrow-state-32"),
    ("[rank3]: mlir::triton::reshapeOuts(...) in ttgir, see my gist", "reshape-outs-32"),
    ("W1123 09:00 RuntimeError: map::at while we compile the model", "bf16-pre-ampere-32"),
    ("loc(\"a.py\":3:1): error: conversion from bf16 to f16 unsupported", "half-dot-33-pre-ampere"),
    ("ImportError: undefined symbol in selective_scan_cuda.cpython-311.so", "mamba-extension-missing"),
    ("jobs/12: Assertion srcIndex < srcSelectDimSize does not hold", "token-out-of-range"),
    ("compiling: Python.h: No such file, says gcc", "no-python-headers")])
def test_a_telling_piece_is_found_inside_a_longer_line_and_called_a_piece(text: str, expected: str) -> None:
    found = matches(text)
    assert expected in ids(found) and not any(match.sure for match in found)
    assert all(match.because.startswith("the text has a piece of what it prints: ") for match in found)
    assert flashlin.why(text).startswith("Not certain")


@pytest.mark.parametrize("text", [
    "ModuleNotFoundError: No module named 'selective'",
    "AttributeError: 'C' object has no attribute 'hook'",
    "PermissionError: [Errno 13] Permission denied: '/data/model'",
    "OSError: [Errno 30] Read-only file system: '/data/model'", "IndexError: tuple index out of range",
    "TypeError: 'NoneType' object is not subscriptable", "ValueError: 3 is not in list",
    "fatal error: zlib.h: No such file or directory", "AssertionError: Assertion failed",
    "RuntimeError: the shapes of both must be the same", "libcuda.so.1 is in /usr/lib/x86_64-linux-gnu",
    "-- The C compiler identification is GNU 12.2.0",
    "DeprecationWarning: these functions have been removed", "tl.atomic_add(o, x)\nKeyError: 'x'",
    "NotImplementedError: this op does not support float64"])
def test_words_of_every_day_are_no_piece(text: str) -> None:
    assert not matches(text)

def test_words_are_told_as_a_guess() -> None:
    said = flashlin.why("AssertionError: gradients of the delta rule are wrong on Hopper")
    assert said.startswith("Not certain") and "a guess, by the words" in said
    assert "\nhopper-wy-backward-984\n" in said


@pytest.mark.parametrize("text", [
    "ValueError: could not broadcast input array from shape (3,) into shape (4,)", "KeyError: 'loss'",
    "ModuleNotFoundError: No module named 'flashlin'", "error", "", "\x1b[31m\n", "AssertionError",
    "the loss is 3.2", "RuntimeError: Triton Error", "sm_80 or higher is what I have"])
def test_what_nobody_knows_is_said_to_be_unknown_with_what_to_send(text: str) -> None:
    assert not matches(text)
    assert flashlin.why(text) == why.unknown() and "doctor --markdown" in why.unknown()


def test_the_failure_that_ended_the_program_comes_first() -> None:
    first = "RuntimeError: mlir::triton::LinearLayout::reshapeOuts\n"
    last = "ImportError: selective_scan_cuda.so: undefined symbol: _ZN3c10\n"
    for text in (first + last, last + first, "warm up\n" + first + "x\n" * 5000 + last):
        ended = "reshape-outs-32" if text.endswith(first) else "mamba-extension-of-another-torch"
        found = matches(text)
        assert found[0].failure.id == ended and len(found) > 1


def test_a_warning_loses_against_the_failure_that_ended_the_program() -> None:
    warning = "The fast path is not available because one of (selective_state_update, ...) is None"
    assert all(match.failure.noise for match in matches(warning))
    assert ids(matches(f"{warning}\nRuntimeError: mlir::LinearLayout::reshapeOuts")) == {"reshape-outs-32"}


def test_what_many_failures_print_is_never_certain() -> None:
    """An illegal access has many causes. Those that users can check in their call come first."""
    found = matches("RuntimeError: CUDA error: an illegal memory access was encountered")
    assert not any(match.certain for match in found)
    assert {match.failure.id for match in found[:2]} == {"offsets-beyond-32-bits", "empty-sequences"}
    said = flashlin.why("CUDA error: an illegal memory access was encountered")
    assert said.count("\n  cause ") == why.SHOWN and "\n\nLess likely: " in said
    [alone] = matches("RuntimeError: mlir::LinearLayout::reshapeOuts")
    assert alone.certain


def test_issues_of_other_cards_and_releases_are_left_out() -> None:
    text = "an illegal memory access was encountered"
    everywhere = ids(matches(text + " in a kernel, says the driver of this machine"))
    assert {"hopper-narrow-state", "blackwell-backward-913"} <= everywhere
    for named, gone in (("NVIDIA A100-SXM4-80GB", {"hopper-narrow-state", "blackwell-backward-913"}),
                        ("NVIDIA B200", {"hopper-narrow-state"}),
                        ("triton==3.1.0", {"blackwell-backward-913"}), ("A100 and B200", set()),
                        ("sold by A2", set())):
        left = ids(matches(f"{named}\n{text}"))
        assert "offsets-beyond-32-bits" in left and everywhere - left >= gone
        assert bool(everywhere - left) == bool(gone), named
    # A name that the text gives is always answered.
    assert "hopper-narrow-state" in ids(matches("NVIDIA A100: hopper-narrow-state"))


def test_an_exception_is_read_with_its_causes() -> None:
    try:
        try:
            raise IndexError("map::at")
        except IndexError as error:
            raise RuntimeError("compiling failed") from error
    except RuntimeError as error:
        said = flashlin.why(error)
    assert said.startswith("2 known failures print this") and "V100 (sm70), T4 (sm75)" in said
    with pytest.raises(TypeError, match="failure: got int, need an exception or a text"):
        flashlin.why(3)  # type: ignore[arg-type]


def test_an_answer_has_all_that_is_asked_for() -> None:
    said = " ".join(flashlin.why("IndexError: map::at").split())
    for text in ("where T4 (sm75); Triton before 3.3.0",
                 "in flashlin its ops run on fp32 copies, else in plain torch",
                 "fix no bf16 tensor in a kernel, or upgrade to Triton 3.4", "source compiled in our tests",
                 "confidence likely: it prints exactly this: 'IndexError: map::at'",
                 "https://github.com/fla-org/flash-linear-attention/issues/75"):
        assert text in said
    wide = [line for text in ("illegal memory access", "KeyError: 'loss'")
            for line in flashlin.why(text).splitlines() if len(line) > 80]
    assert all(line.startswith("              https://") for line in wide)


def test_our_own_refusals_are_known_by_the_names_in_them() -> None:
    asked = flashlin.Problem("chunk_gla", "gla", "chunk", 1, 64, 1, 64, 64, 1, "bfloat16")
    refused = flashlin.plan(asked, parse("triton=3.2.0,sm=75"), flashlin.Policy(policy="strict"))
    assert "bf16-pre-ampere-32" in ids(matches(str(flashlin.UnsupportedError(refused))))


# --- the command line ---

def test_the_command_answers_and_its_code_says_whether_anything_is_known(
        capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "IndexError:", "map::at"]) == 0
    assert capsys.readouterr().out.startswith("2 known failures print this")
    assert main(["why", "--json", "IndexError:", "map::at"]) == 0
    answers = json.loads(capsys.readouterr().out)
    assert [*answers[0]] == ["id", "cause", "fix", "in flashlin", "where", "confidence", "source"]
    assert answers[0]["id"] == "bf16-pre-ampere-32" and len(answers) == 2
    assert main(["why", "--json", "KeyError: 'loss'"]) == 1 and capsys.readouterr().out == "[]\n"
    assert main(["why", "KeyError: 'loss'"]) == 1
    assert capsys.readouterr().out == why.unknown() + "\n"


def test_a_log_comes_by_standard_input_and_nothing_is_one_line() -> None:
    command = [sys.executable, "-m", "flashlin", "why"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    piped = subprocess.run(command, input=log("mlir::triton::LinearLayout::reshapeOuts"), text=True, cwd=ROOT,
                           capture_output=True, timeout=60, env=environment, check=False)
    assert piped.returncode == 0
    assert piped.stdout.startswith("One known failure prints this.\n\nreshape-outs-32\n")
    nothing = subprocess.run(command, stdin=subprocess.DEVNULL, text=True, cwd=ROOT, capture_output=True,
                             timeout=60, env=environment, check=False)
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert nothing.stderr.startswith("flashlin why: text: got nothing, need the printed text")


def test_it_works_without_torch_and_triton() -> None:
    done = run("why", "IndexError: map::at",
               before="import sys; sys.modules['torch'] = sys.modules['triton'] = None")
    assert done.returncode == 0 and "bf16-pre-ampere-32" in done.stdout


def test_what_helps_without_flashlin_does_not_name_its_functions() -> None:
    assert not [id for id, one in EVERY.items()
                if "flashlin." in rows(one).get("in flashlin", "") and "flashlin." in one.otherwise]
    those = {id: known.otherwise for id, known in EVERY.items()}
    assert (those["autotune-keys-31"], those["autotune-driver-33"]) == ("Triton 3.2", "Triton 3.4")
    assert (those["fla-without-gpu"], those["split-left-padding"]) == ("", "padding on the right")
    handled = rows(EVERY["split-left-padding"])["in flashlin"]
    assert handled.endswith("repairs it, since transformers 5.15.0")
    # A note after the fix is kept.
    assert those["hopper-wy-backward-984"] == "2 warps for that kernel; 3.8 and 3.9 have not been tried"


# --- logs of any size and kind ---

UNITS = ("1", " ", ".", "[(", "a", "_1", "\x1b[", "\x1b]", "\0", "\r\n", "token", "assert", "8 warps ",
         "reshapeOuts ", "selective_scan_cuda", "UNREACHABLE executed at ", "Permission denied: '.../",
         "\u2028", "\ud800")


@pytest.mark.parametrize("unit", UNITS, ids=ascii)
def test_any_text_takes_linear_time(unit: str) -> None:
    """Reading 100,000 characters of any repeated text takes less than 3 s of CPU time.

    An algorithm of quadratic time would take 20 s for so many digits.
    """
    text = unit * (100_000 // len(unit)) + "!"
    for read in (matches, failure_kind.of_text, report.scrub):
        began = time.process_time()
        read(text)
        assert time.process_time() - began < 3, read


class Log(io.RawIOBase):
    """A log that is generated while it is read.

    most: the largest number of bytes that one read has requested.
    """

    def __init__(self, size: int, line: bytes, last: bytes) -> None:
        self.left, self.line, self.last, self.most = size, line, last, 0

    def read(self, size: int = -1) -> bytes:
        self.most = max(self.most, size)
        if self.left <= 0:
            last, self.last = self.last, b""
            return last
        self.left -= size
        return (self.line * (size // len(self.line) + 1))[:size]


@pytest.mark.parametrize("line", [b"[rank0]: step 12 loss 3.2 lr 1e-3 reshape\n", b"x"], ids=["lines", "one"])
def test_a_log_takes_the_memory_of_a_block(line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(why, "BLOCK", 1 << 14)
    log = Log(800_000, line, b"\nmlir::triton::LinearLayout::reshapeOuts\n")
    failures()
    tracemalloc.start()
    try:
        found = why.read(log).matches()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert ids(found) == {"reshape-outs-32"} and found[0].sure
    assert most < 600_000 and log.most == why.BLOCK


@pytest.mark.parametrize("block", [7, 64, 1000])
def test_where_a_block_ends_makes_no_difference(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = log("IndexError: list index out of range", EVERY["autotune-keys-31"].seen_in)
    texts = [tuner.replace("\n", "\r\n"), log("selective_scan_cuda...undefined symbol"), "map::at",
             "device-side\nassert",
             "jobs/12: Assertion srcIndex\n< srcSelectDimSize does not hold\nthe end\n",
             "AssertionError: gradients of the delta rule are wrong on Hopper\nthe end\n\n"]
    whole = [matches(text) for text in texts]
    assert all(whole)
    monkeypatch.setattr(why, "BLOCK", block)
    assert [matches(text) for text in texts] == whole
    assert [why.read(io.BytesIO(text.encode())).matches() for text in texts] == whole


def test_no_symptom_is_longer_than_what_two_blocks_share() -> None:
    longest = max(len(symptom) + 300 * symptom.count("...") for known in EVERY.values()
                  for symptom in (known.id, known.seen_in, *known.symptoms))
    assert 4 * longest < why.OVERLAP < why.BLOCK  # 4: allows for white space and colour codes


@pytest.mark.parametrize("given", [
    "{}\r\n", "50%|###   | 1/2\r{}\r 51%|###", "\x1b[1;31m{}\x1b[0m",
    "\x1b]8;;file:///a\x1b\\{}\x1b]8;;\x07\x1b[2K\x1b(B", "\0\0{}\0"], ids=ascii)
def test_what_terminals_add_does_not_matter(given: str) -> None:
    words = "LLVM ERROR: Unsupported rounding\x1b[K mode for conversion."
    found = matches("first line\n" + given.format(words))
    assert ids(found) == {"half-dot-33-pre-ampere"} and found[0].sure


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-16-le", "utf-32"])
def test_a_file_of_windows_is_read(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""  # utf-16-le has no byte order mark here
    text = "naïve ✓ 😀\r\n" * 30 + "IndexError: map::at\r\n"
    monkeypatch.setattr(why, "BLOCK", 64)
    found = why.read(io.BytesIO(mark + text.encode(encoding))).matches()
    assert ids(found) == ids(matches("IndexError: map::at"))


def test_bytes_that_are_no_text_do_not_matter() -> None:
    command = [sys.executable, "-m", "flashlin", "why"]
    noise = bytes(range(256)) + b"\xed\xa0\x80 \xff\xfe\n"
    text = noise + b"RuntimeError: mlir::LinearLayout::reshapeOuts \xe2\x82\n" + noise
    done = subprocess.run(command, input=text, capture_output=True, timeout=60, cwd=ROOT, check=False,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8:strict"})
    assert done.returncode == 0 and b"reshape-outs-32" in done.stdout, done.stderr


def test_an_exception_may_have_a_huge_message() -> None:
    began = time.process_time()
    assert flashlin.why(RuntimeError("7" * 100_000 + " is too much")) == why.unknown()
    assert "reshape-outs-32" in flashlin.why(RuntimeError("7" * 3_000_000 + " LinearLayout::reshapeOuts"))
    assert time.process_time() - began < 3


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_is_shown_how_far_it_is(terminal: bool, tmp_path: os.PathLike[str],
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Bar:
        def __init__(self, *, total: int, **rest: object) -> None:
            seen.append(total)
            self.update = seen.append

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *error: object) -> None:
            seen.append(-1)
    fake = ModuleType("tqdm")
    vars(fake)["tqdm"] = Bar
    monkeypatch.setitem(sys.modules, "tqdm", fake)
    monkeypatch.setattr(why, "BLOCK", 10)
    monkeypatch.setattr(sys, "stderr", Terminal() if terminal else io.StringIO())
    with open(os.path.join(tmp_path, "log"), "w+b") as file:
        file.write(b"x" * 25)
        file.seek(0)
        why.read(file)
        monkeypatch.setitem(sys.modules, "tqdm", None)  # as if tqdm were not installed
        file.seek(0)
        assert not why.read(file).empty
    assert seen == ([25, 10, 10, 5, -1] if terminal else [])


# --- questions in plain words, and targets ---

@pytest.mark.parametrize(("question", "id", "has"), [
    ("nan", "question-nan", "FLASHLIN_DEBUG=1"), ("Why is my loss NaN?", "question-nan", "bf16"),
    ("why slow first step", "question-slow-first-step", "warmup"), ("slow", "question-slow", "doctor"),
    ("loss is nan", "question-nan", "beta is above 2"), ("NaN loss", "question-nan", "not normalized"),
    ("my training loss becomes nan after 1000 steps", "question-nan", "log decays are positive"),
    ("why out of memory", "question-memory", "smaller batch"), ("hang", "question-hang", "NCCL_DEBUG"),
    ("my training hangs", "question-hang", "py-spy"), ("RECOMPILES", "question-recompiles", "(3) "),
    ("it recompiles", "question-recompiles", "TORCH_LOGS"),
    ("import error", "question-import", "pip install"),
    ("flashlin isn't used", "question-flashlin-not-used", "--patch"),
    ("illegal memory access", "question-illegal-access", "cu_seqlens"),
    ("not installed", "question-import", "doctor"),
    ("wrong results", "question-wrong-results", "FLASHLIN_PATH=torch"),
    ("undefined symbol", "question-undefined-symbol", "reinstall"),
    ("why is flashlin not used", "question-flashlin-not-used", "flashlin run")])
def test_a_question_in_plain_words_is_answered(question: str, id: str, has: str) -> None:
    found = why.matches(question)
    assert found[0].failure.id == id and not found[0].certain
    said = why.why(question)
    assert said.startswith("This answers the question.") and has in said


@pytest.mark.parametrize("name", ["corpus", "held_out"])
def test_no_report_is_taken_as_a_question(name: str) -> None:
    for one in report_scores.load(name):
        assert not any(match.failure.asked for match in why.matches(one.text)), one.id


@pytest.mark.parametrize(("known", "symptom"), PRINTED, ids=lambda one: getattr(one, "id", None))
def test_what_a_failure_prints_is_no_question(known: Known, symptom: str) -> None:
    text = symptom.replace("...", " x.py:3 ")
    asked = [match for match in matches(text) if match.failure.asked]
    also_asked = ("loss is nan", "loss is inf")
    assert not asked or text.casefold() in also_asked, "people also ask this with the words of a program"


@pytest.mark.parametrize("text", [
    "nan: 3", "loss=nan", "[rank0] hang", "slow\nfirst\nstep: 4", "E   undefined symbol: foo",
    "the log of a training that is slow has many more words in each of its lines than any question of a person"])
def test_a_text_with_other_signs_or_too_many_words_is_no_question(text: str) -> None:
    assert not any(match.failure.asked for match in matches(text))


def test_a_question_that_is_also_printed_has_both_answers() -> None:
    question, printed = matches("loss is nan")
    assert question.failure.id == "question-nan" and printed.failure.id == "loss-not-finite" and printed.sure


def test_an_answer_to_a_question_has_causes_in_order_and_how_to_tell_them_apart() -> None:
    for known in (one for one in EVERY.values() if one.asked):
        said = why.Match(known, False, why.ASKED).fields()
        assert [*said] == ["cause", "tell apart", "fix", "in flashlin", "confidence", "source"], known.id
        assert said["fix"] == known.need and not known.symptoms
        for name in ("cause", "tell apart", "fix"):
            assert re.findall(r"\((\d)\)", said[name]) == ["1", "2", "3"], (known.id, name)
        assert all(len(one.split()) <= 40 for one in why.CAUSES.split(said["cause"])), known.id
    shown = why.why("nan").splitlines()
    assert [line[:18] for line in shown if "cause" in line or line.startswith(" " * 14 + "(")][:3] == [
        "  cause       (1) ", " " * 14 + "(2) ", " " * 14 + "(3) "]


def test_a_target_replaces_what_the_text_names() -> None:
    text = "on a Tesla T4 with triton==3.2.0: IndexError: map::at"
    ids = {match.failure.id for match in why.matches(text)}
    assert "bf16-pre-ampere-32" in ids
    assert "bf16-pre-ampere-32" not in why.why(text, target="H100,triton=3.6.0")
    assert "bf16-pre-ampere-32" in why.why("IndexError: map::at", target="T4,triton=3.2.0")
    with pytest.raises(ValueError, match="target"):
        why.why(text, target="no GPU")


def on(text: str, target: str) -> dict[str, why.Match]:
    return {match.failure.id: match for match in why.read_text(text).on(target).matches()}


def test_a_target_without_a_triton_keeps_that_of_the_text() -> None:
    for text in ("IndexError: map::at", "triton==3.2.0: IndexError: map::at"):
        assert "bf16-pre-ampere-32" in on(text, "T4") and "bf16-pre-ampere-32" not in on(text, "A100")
    assert "bf16-pre-ampere-32" not in on("triton==3.6.0: IndexError: map::at", "T4")
    assert "bf16-pre-ampere-32" not in on("IndexError: map::at", "T4,torch=2.11")


@pytest.mark.parametrize("target", ["cpu,triton=3.2.0", "MI300X,triton=3.2.0", "sm=80,triton=3.2.0",
                                    "T4,triton=none"])
def test_any_target_leaves_out_the_issues_of_others(target: str) -> None:
    assert {"bf16-pre-ampere-32", "tf32-dot-turing-32"} & set(on("IndexError: map::at", target)) == set()


def test_sm_72_has_the_issues_of_its_neighbours() -> None:
    assert "bf16-pre-ampere-32" in on("IndexError: map::at", "sm=72,triton=3.2.0")


@pytest.mark.parametrize("text", ["reshapeOuts", "E   mlir::triton::reshapeOuts(...) in ttgir, see my gist",
                                  "RuntimeError: mlir::LinearLayout::reshapeOuts"])
def test_what_cannot_occur_on_the_target_is_said_to_be_doubtful(text: str) -> None:
    found = on(text, "T4,triton=3.6.0")["reshape-outs-32"]
    assert found.because.endswith(why.ELSEWHERE) and not (found.sure or found.certain)
    assert why.ELSEWHERE not in on(text, "H100,triton=3.2.0")["reshape-outs-32"].because


def test_a_guess_that_cannot_occur_on_the_target_is_left_out() -> None:
    assert "hopper-narrow-state" in on("illegal memory access", "H100")
    assert "hopper-narrow-state" not in on("illegal memory access", "A100")


def test_the_command_takes_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "IndexError: map::at", "--target", "T4,triton=3.2.0", "--json"]) == 0
    assert "bf16-pre-ampere-32" in capsys.readouterr().out
