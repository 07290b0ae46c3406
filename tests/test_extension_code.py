"""Doctor's check of the GPU code in compiled extensions."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest
from machines import H200, made

import flashlin
from flashlin.diagnostics import doctor as diagnosis
from flashlin.diagnostics import environment, extension_code
from flashlin.diagnostics.extension_code import Code, check_extensions, code_in, cuobjdump

# the output of cuobjdump of CUDA 12.8 for an extension, with other names
LISTED = """\
ELF file    1: selective_scan_cuda.1.sm_75.cubin
ELF file    2: selective_scan_cuda.2.sm_80.cubin
ELF file    3: selective_scan_cuda.3.sm_80.cubin
"""
PTX = "PTX file    1: selective_scan_cuda.1.sm_80.ptx\n"
BUILD = ("MAMBA_FORCE_BUILD=TRUE pip install --upgrade --force-reinstall --no-cache-dir --no-deps "
         "--no-build-isolation mamba-ssm")


@pytest.fixture
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put an extension and a program in place of cuobjdump on the paths, and return the program."""
    (tmp_path / "selective_scan_cuda.so").write_bytes(b"\x7fELF")
    monkeypatch.syspath_prepend(str(tmp_path))
    program = tmp_path / "cuobjdump"
    monkeypatch.setattr(extension_code, "cuobjdump", lambda triton, capability: str(program))
    monkeypatch.setattr(environment, "shell", lambda: "bash")
    return program


def lists(program: Path, text: str) -> None:
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\n")
    program.chmod(0o755)


@pytest.mark.parametrize(("text", "card", "has"), [
    (LISTED, "triton=3.6.0,sm=80", True), (LISTED, "triton=3.6.0,sm=86", True), (LISTED, H200, False),
    (LISTED, "triton=3.6.0,sm=70", False), (LISTED + PTX, H200, True),
    (LISTED + PTX, "triton=3.6.0,sm=70", False),
    ("cuobjdump info    : File 'x' does not contain device code\n", H200, True)])
def test_an_extension_without_code_for_the_gpu_is_reported(extension: Path, text: str, card: str,
                                                           has: bool) -> None:
    lists(extension, text)
    found = list(check_extensions(made(card)))
    assert [(one.name, one.status) for one in found] == ([] if has else [("selective_scan_cuda", "degraded")])
    if not has:
        assert "only sm_75, sm_80" in found[0].detail and 'flashlin.patch("mamba_ssm")' in found[0].detail
        assert found[0].fix == BUILD


def test_the_advice_builds_the_extension_again(extension: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lists(extension, LISTED)
    monkeypatch.setattr(diagnosis, "examine", lambda: made(H200))
    advised = flashlin.doctor(op="chunk_gla").advice
    assert advised is not None and BUILD in advised.command


@pytest.mark.parametrize("shell", ["fish", "pwsh"])
def test_the_command_is_one_of_the_shell(extension: Path, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    lists(extension, LISTED)
    monkeypatch.setattr(environment, "shell", lambda: shell)
    [found] = check_extensions(made(H200))
    assert found.fix.startswith({"fish": "env MAMBA_FORCE_BUILD=TRUE pip",
                                 "pwsh": "$env:MAMBA_FORCE_BUILD='TRUE'; pip"}[shell])


@pytest.mark.parametrize(("program", "why"), [("#!/bin/sh\nsleep 60\n", "gave no answer in 0.2 s"), (None, "")])
def test_a_program_that_fails_gives_no_verdict(extension: Path, monkeypatch: pytest.MonkeyPatch,
                                               program: str | None, why: str) -> None:
    monkeypatch.setattr(extension_code, "LIMIT", 0.2)
    if program is not None:
        extension.write_text(program)
        extension.chmod(0o755)
    [found] = check_extensions(made(H200))
    assert found.status == "could not check" and why in found.detail and not found.fix
    monkeypatch.setattr(extension_code, "cuobjdump", lambda triton, capability: "")
    [found] = check_extensions(made(H200))
    assert found.detail.startswith("cuobjdump not found")


def test_without_a_gpu_nothing_is_looked_for(extension: Path) -> None:
    assert not list(check_extensions(made("sm=90,backend=cpu")))


@pytest.mark.parametrize(("code", "capability", "runs"), [
    (Code((9, 0), "a", "cubin"), (9, 0), True), (Code((9, 0), "a", "ptx"), (10, 0), False),
    (Code((10, 0), "f", "cubin"), (10, 3), True), (Code((10, 0), "f", "ptx"), (12, 0), False),
    (Code((8, 6), "", "cubin"), (8, 0), False), (Code((8, 6), "", "cubin"), (8, 9), True),
    (Code((8, 6), "", "ptx"), (12, 1), True)])
def test_code_runs_where_cuda_says(code: Code, capability: tuple[int, int], runs: bool) -> None:
    assert code.runs_on(capability) == runs


def test_names_of_code() -> None:
    found = code_in("ELF file 1: x.1.sm_100f.cubin\nELF file 2: x.2.sm_90a.cubin\n"
                    "PTX file 1: x.1.sm_120.ptx\n")
    assert [str(one) for one in found] == ["sm_90a", "sm_100f", "compute_120"]


def test_the_cuobjdump_of_triton_reads_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    program = cuobjdump("3.6.0", (9, 0))
    if not program:
        pytest.skip("this Triton has no cuobjdump")
    done = extension_code.run_to_end([program, "--list-elf", "--list-ptx", sys.executable], limit=20.0)
    assert done.code is not None and not code_in(done.stdout)
    assert "device code" in done.stdout + done.stderr
