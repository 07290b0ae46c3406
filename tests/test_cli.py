"""Tests of the command line: output and exit codes in pipes, without a GPU and with broken dependencies."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flashlin
from flashlin.__main__ import main
from flashlin.diagnostics.report import Report
from flashlin.trial import run as trials
from flashlin.trial import warmup
from tests.machines import BROKEN, CLEAN, H200, NO_TORCH, ROOT, package, run

# --- pipes ---

@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"], ["explain", "chunk_gla"]],
                         ids=" ".join)
def test_a_pipe_that_nobody_reads_ends_it_quietly(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([sys.executable, "-m", "flashlin", *arguments, "--target", H200],
                              stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120,
                              env={**CLEAN, "PYTHONPATH": str(ROOT)}, cwd=ROOT, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(("arguments", "unbuffered"), [
    (["doctor", "--target", H200], ""), (["why", "reshapeOuts"], "1"), (["--help"], "")])
def test_a_full_disk_is_one_line(arguments: list[str], unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "flashlin", *arguments], stdout=full,
                              stderr=subprocess.PIPE, text=True, timeout=120, cwd=ROOT, check=False,
                              env={**CLEAN, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered})
    assert (done.returncode, done.stderr) == (
        2, "flashlin: cannot write to standard output: No space left on device\n")


def test_no_standard_output_at_all_leaves_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; print('lost'); sys.exit(7)")
    for arguments, code in ((["why", "reshapeOuts"], 0), (["run", "--quiet", f"{tmp_path}/program.py"], 7)):
        command = [sys.executable, "-m", "flashlin", *arguments]
        done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command],
                              stderr=subprocess.PIPE, text=True, timeout=120, cwd=ROOT, check=False,
                              env={**CLEAN, "PYTHONPATH": str(ROOT)})
        assert (done.returncode, done.stderr) == (code, "")


# --- versions ---

def test_the_version_is_one_line(tmp_path: Path) -> None:
    for name, version in (("torch", "2.99.0+cu999"), ("triton", "3.99.0")):
        package(tmp_path, name, f"print('noise on stdout')\n__version__ = {version!r}")
    done = run("--version", path=(tmp_path,))
    assert (done.returncode, done.stdout) == (0,
                                              f"flashlin {flashlin.__version__}, torch 2.99.0+cu999, triton "
                                              "3.99.0\n")


def test_the_version_is_told_however_broken_the_rest_is(tmp_path: Path) -> None:
    package(tmp_path, "torch", BROKEN)
    package(tmp_path, "triton", "raise SystemExit(3)")
    done = run("--version", path=(tmp_path,), before="import sys; sys.modules['pydantic'] = None")
    assert done.returncode == 0 and done.stdout == (
        f"flashlin {flashlin.__version__}, torch broken (OSError: libcudart.so.12: cannot open shared object "
        "file), triton broken (SystemExit: 3)\n")
    missing = run("--version",
                  before="import sys; sys.path[:] = [folder for folder in sys.path if 'site-packages' not in "
                         "folder]")
    assert missing.stdout == f"flashlin {flashlin.__version__}, torch not installed, triton not installed\n"


# --- dependencies that cannot be imported ---

@pytest.mark.parametrize(("missing", "fix", "command"), [
    ("pydantic", '"pydantic>=2"', "doctor --json"), ("packaging", '"packaging>=22"', "doctor"),
    ("pydantic_core", '"pydantic>=2"', "doctor"),
    ("flashlin.kernels.conv.recipe", "--no-deps flashlin", "doctor"),
    ("flashlin.diagnostics.typical_plans", "--no-deps flashlin", "explain chunk_gla"),
    ("flashlin.trial.warmup", "--no-deps flashlin", "warmup")])
def test_a_flashlin_that_cannot_be_loaded_is_one_line(missing: str, fix: str, command: str) -> None:
    done = run(*command.split(), before=f"import sys; sys.modules[{missing!r}] = None")
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"flashlin {command.split()[0]}: flashlin cannot be loaded: ") and missing in line
    assert line.endswith(f"fix: pip install --force-reinstall {fix}")


@pytest.mark.parametrize("text", [BROKEN, "raise SystemExit(3)", "__version__ = '1.10'"],
                         ids=["raising", "exiting", "old"])
def test_a_broken_dependency_is_named(text: str, tmp_path: Path) -> None:
    done = run("doctor", path=(package(tmp_path, "pydantic", text),))
    assert done.returncode == 1 and not done.stdout and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith('fix: pip install --force-reinstall "pydantic>=2"')


# --- the sub-commands ---

@pytest.mark.parametrize("command", ["", "doctor", "explain", "run", "warmup", "why"])
def test_help_fits_a_terminal(command: str, capsys: pytest.CaptureFixture[str],
                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*filter(None, [command]), "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize("command", ["doctor", "explain", "warmup", "why"])
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert f"examples: flashlin {command}" in said
    codes = said.partition("Exit code: ")[2]
    assert codes.startswith("0 if") and all(f" {code} " in f" {codes} " for code in (1, 2))


@pytest.mark.usefixtures("proven")
@pytest.mark.parametrize(("target", "fail_on", "code"), [
    ("triton=3.6.0,sm=90", (), 0), ("triton=3.6.0,sm=90", ("--fail-on", "degraded"), 0),
    ("triton=3.2.0,sm=75", (), 0), ("triton=3.2.0,sm=75", ("--fail-on", "problem"), 0),
    ("triton=3.2.0,sm=75", ("--fail-on", "degraded"), 1),
    ("triton=3.7.1,sm=100", ("--fail-on", "degraded"), 0),
    ("triton=3.6.0,backend=cpu", ("--fail-on", "degraded"), 0)])
def test_degraded_fails_where_it_is_asked_to(target: str, fail_on: tuple[str, ...], code: int,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--target", target, "--op", "chunk_gla", *fail_on]) == code
    text = capsys.readouterr().out
    found = Report.model_validate_json(text)
    assert json.loads(text)["status"] == found.status and (found.status == "degraded") == ("sm=75" in target)
    assert found.ok and found.exit_code == 0 and found.fails("degraded") == (found.status == "degraded")


def test_warmup_without_a_gpu_is_one_line_and_starts_nothing(monkeypatch: pytest.MonkeyPatch, home: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(trials, "CHILD", lambda *arguments: pytest.fail("a child was started"))
    assert main(["warmup", "--op", "l2norm", "--device", "cuda:99"]) == 2  # no machine has so many GPUs
    shown = capsys.readouterr()
    assert not shown.out and len(shown.err.splitlines()) == 1
    assert shown.err.startswith("flashlin warmup: device: got cuda:99, need a GPU that torch can use (")
    assert not home.exists()


def test_warmup_with_a_torch_that_is_missing_is_one_line() -> None:
    done = run("warmup", before=NO_TORCH)
    assert done.returncode == 1 and not done.stdout and len(done.stderr.splitlines()) == 1
    assert done.stderr.endswith('fix: pip install --force-reinstall "torch>=2.4"\n')


def test_short_names_of_dtypes_reach_every_command(monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "chunk_gla", "--target", H200, "--dtype", "fp16"]) == 0
    assert " float16 " in capsys.readouterr().out
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    asked = []
    monkeypatch.setattr(warmup, "run",
                        lambda todo, *rest, **more: asked.extend(one.dtype for one in todo) or [])
    assert main(["warmup", "--op", "rms_norm", "--device", "cpu", "--dtype", "bf16", "--dtype",
                 "half"]) == 0 and asked == ["bfloat16", "float16"]
    for command in (["explain", "chunk_gla", "--target", H200], ["warmup", "--device", "cpu"]):
        assert main([*command, "--dtype", "banana"]) == 2
        assert "dtype: got 'banana', need one of bfloat16, " in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "meant"), [
    (["docter"], "doctor"), (["warm-up"], "warmup"), (["doctor", "--markdwn"], "--markdown"),
    (["explain", "chunk_gla", "--varln"], "--varlen"), (["doctor", "H100"], "--target H100"),
    (["doctor", "--verbose", "t4,triton=3.2.0"], "--target t4,triton=3.2.0"),
    (["explain", "chunk_gla", "sm90"], "--target sm90")])
def test_what_was_meant_is_named(arguments: list[str], meant: str,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and capsys.readouterr().err.endswith(f"; did you mean {meant}?\n")


def test_without_arguments_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("usage: flashlin ") and "flashlin explain " in shown.out and not shown.err
    done = run()
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: flashlin ")


def test_an_unknown_option_without_a_command_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--versoin"])
    assert ended.value.code == 2
    said = "error: unrecognized arguments: --versoin; did you mean --version?\n"
    assert capsys.readouterr().err.endswith(said)


def test_an_unknown_option_shows_how_its_command_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "chunk_gla", "--tokens", "3"])
    shown = capsys.readouterr().err
    assert shown.startswith("usage: flashlin explain ") and "flashlin explain: error: unrecognized" in shown


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_warmup_of_a_cpu_is_one_line_and_starts_nothing(device: str, monkeypatch: pytest.MonkeyPatch,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(trials, "CHILD", lambda *arguments: pytest.fail("a child was started"))
    assert main(["warmup", "--op", "l2norm", "--device", device]) == 2
    assert capsys.readouterr() == ("", f"flashlin warmup: device: got {device}, where nothing is compiled: need "
                                   "a GPU, or TRITON_INTERPRET=1\n")


@pytest.mark.parametrize("arguments", ["xyzzy", "doctor xyzzy", "warmup H100"])
def test_what_is_like_nothing_of_a_command_names_nothing(arguments: str,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert "did you mean" not in capsys.readouterr().err
