"""The pytest plugin as a user runs it: in a separate test session, on kernels that do not use flashlin."""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from flashlin.testing import environments, plugin
from flashlin.testing.environments import NotInstallable
from flashlin.testing.plugin import TritonMatrix
from tests import foreign

ROOT = Path(__file__).resolve().parents[2]
Report = Callable[[str], tuple[str, str]]

PACKAGE = """
    import torch, triton
    import triton.language as tl

    @triton.jit
    def scale_kernel(x, o, n, by, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(o + at, tl.load(x + at, mask=at < n) * by, mask=at < n)

    def scale(x, by):
        o = torch.empty_like(x)
        scale_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, o, x.numel(), by, BLOCK=128)
        return o

    @triton.autotune([triton.Config({"BLOCK": 64}, num_warps=2), triton.Config({"BLOCK": 128})], key=["n"])   # 3.2 asks the driver here
    @triton.heuristics({"EVEN": lambda named: named["n"] % named["BLOCK"] == 0})
    @triton.jit
    def through_kernel(x, o, n, D: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        b_x = tl.load(x + at) if EVEN else tl.load(x + at, mask=at < n)
        tl.store(o + at, b_x.to(D).to(tl.float32), mask=at < n)

    def through(x, dtype):
        o = torch.empty_like(x)
        through_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, o, x.numel(), D=dtype)
        return o
"""
TESTS = """
    import foreign_kernels
    import torch
    import triton.language as tl
    from my_package import scale, through

    def right():
        x = torch.randn(4, 100)
        return scale(x, 2.0), 2 * x

    def wrong():
        return {"o": scale(torch.ones(4, 100), 2.0)}, {"o": torch.full((4, 100), 3.0)}

    def through_float16():
        x = torch.randn(4, 100)
        return through(x, tl.float16), x.half().float()

    def through_bfloat16():                 # the tensors are not bfloat16, but a value in between is
        x = torch.ones(4, 100)
        return through(x, tl.bfloat16), x

    def eight_warps():
        k, g = torch.zeros(2, 128, 64, dtype=torch.bfloat16), torch.zeros(2, 2)
        foreign_kernels.states[(2,)](k, k, k, k, g, 128, K=64, V=64, BT=64, num_warps=8, num_stages=2)

    def launches_none():
        return torch.ones(1), torch.ones(1)

    def test_right(triton_matrix):
        triton_matrix(right, triton=["3.2.0", "3.6.0"], sm=[80, 90])

    def test_tuned(triton_matrix):
        triton_matrix(through_float16, triton=["3.2.0"], sm=[90], layers=["compile", "interpret"])

    def test_wrong(triton_matrix):
        triton_matrix(wrong, triton=["3.6.0"], layers=["interpret"])

    def test_bfloat16(triton_matrix):
        triton_matrix(through_bfloat16, triton=["3.6.0"], sm=[80], layers=["compile", "interpret"])

    def test_eight_warps(triton_matrix):
        triton_matrix(eight_warps, triton=["3.2.0"], sm=[80, 90], layers=["compile"])

    def test_launches_none(triton_matrix):
        triton_matrix(launches_none, triton=["3.6.0"], sm=[80], layers=["compile"])

    def test_newer(triton_matrix):
        import newer
        triton_matrix(newer.function, triton=["3.2.0"])

    def test_misused(triton_matrix):
        triton_matrix(right, triton=["3.99"])
"""
NEWER = """
    import triton
    if triton.__version__ == "3.2.0":
        from triton import there_since_33

    def function():
        pass
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Return a function from the name of a test to its outcome and the message of the plugin.

    One session with workers runs all tests, because the summary must arrive through the workers.
    """
    folder = tmp_path_factory.mktemp("user")
    (tests := folder / "checks").mkdir()  # only pytest adds it to the path
    for name, text in {"my_package": PACKAGE, "test_kernels": TESTS, "newer": NEWER}.items():
        (tests / f"{name}.py").write_text("\n".join(line.removeprefix("    ") for line in text.splitlines()))
    (tests / "foreign_kernels.py").write_text(Path(foreign.__file__).read_text())
    environment = {**os.environ,
                   "FLASHLIN_CACHE": str(environments.cache_folder().resolve())}
    command = [sys.executable, "-m", "pytest", "-p", "no:flashlin", "-p", "flashlin.testing.plugin", "-n",
               "2", "--junitxml=found.xml", "."]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600,
                         check=False)
    assert (folder / "found.xml").exists(), ran.stdout + ran.stderr
    cases = {case.get("name"): case
             for case in ElementTree.parse(folder / "found.xml").getroot().iter("testcase")}

    def of(test: str) -> tuple[str, str]:
        case = cases[test]
        failed, skipped = case.find("failure"), case.find("skipped")
        if skipped is not None and " install: " in str(skipped.get("message")):
            pytest.skip(str(skipped.get("message")))  # in CI the plugin fails instead
        if skipped is not None:
            return "skipped", str(skipped.get("message"))
        if failed is not None:
            return "failed", str(failed.text)
        properties = [str(one.get("value"))
                      for one in case.iter("property") if one.get("name") == "triton_matrix"]
        assert properties[0] in ran.stdout, "the terminal's summary lacks it"
        assert ran.stdout.count(" Triton matrix -") == 1 and "\nall 7: " in ran.stdout
        return "passed", properties[0]
    return of


@pytest.mark.alternate
def test_a_good_kernel_passes_every_layer(report: Report) -> None:
    """The layers are import under a release, compile for two GPUs, and interpret."""
    assert report("test_right") == ("passed", "test_kernels.right: 8 passed, 0 failed, 0 skipped")


def test_every_configuration_of_a_tuned_kernel_is_compiled(report: Report) -> None:
    """The kernel has two configurations, numbers, and a dtype among its constants."""
    assert report("test_tuned") == ("passed", "test_kernels.through_float16: 3 passed, 0 failed, 0 skipped")


def test_wrong_numbers_are_told(report: Report) -> None:
    outcome, said = report("test_wrong")
    assert outcome == "failed" and "0 passed, 1 failed" in said
    assert "3.6.0 interpret: wrong: " in said and "Mismatched elements: 400 / 400" in said and "['o']" in said


def test_bfloat16_is_not_compared_and_that_is_told(report: Report) -> None:
    outcome, said = report("test_bfloat16")
    assert outcome == "passed" and "2 passed, 0 failed, 1 skipped" in said
    assert "3.6.0 interpret: skipped: Triton's interpreter computes bfloat16 wrongly" in said


def test_a_compiler_that_aborts_is_told_with_its_cause(report: Report) -> None:
    outcome, said = report("test_eight_warps")
    assert outcome == "failed" and "1 passed, 1 failed" in said
    line = next(line for line in said.splitlines() if "abort" in line)
    assert line.strip().startswith(
        "3.2.0 compile sm_90 states(") and "warps=8" in line and "SIGABRT" in line and "reshapeOuts" in line


def test_a_function_that_launches_nothing_fails(report: Report) -> None:
    outcome, said = report("test_launches_none")
    assert outcome == "failed" and "launches no Triton kernel when its tensors are on the CPU" in said


def test_a_mistake_in_a_call_is_shown_at_that_call(report: Report) -> None:
    outcome, said = report("test_misused")
    assert outcome == "failed" and "ValueError: triton: got '3.99', need one out of 3.0, 3.1, " in said
    assert "test_kernels.py" in said and "plugin.py" not in said


def test_a_module_that_does_not_import_is_told_once(report: Report) -> None:
    outcome, said = report("test_newer")
    assert outcome == "failed" and "0 passed, 1 failed" in said
    assert "3.2.0 import: exception: ImportError: cannot import name 'there_since_33'" in said and "newer.py:4" in said


# --- without children ---

def top_level() -> None:
    raise AssertionError("the function is run in children only")


def with_an_argument(x: int) -> None:
    raise AssertionError(x)


@pytest.mark.parametrize(("function", "says"), [
    (lambda: None, "need a function at the top level of a module"),
    (with_an_argument, "need one without required arguments"),
    (foreign.states, "Triton kernel .*, need a function that launches it"),
    (3, "need a function at the top level")],
    ids=["lambda", "argument", "kernel", "number"])
def test_a_function_that_children_cannot_run_is_refused(function: Any, says: str) -> None:
    with pytest.raises(TypeError, match=f"^function: got .*{says}"):
        TritonMatrix([])(function)


@pytest.mark.parametrize(("options", "says"), [
    ({"triton": "3.2.0"}, "triton: got '3.2.0', need a list"),
    ({"triton": ["3.6.0", "2.3.1"]}, "triton: got '2.3.1', need"),
    ({"triton": ["3.6", "3.10"]}, "triton: got '3.10', need one out of 3.0, 3.1, 3.2, "),
    ({"triton": ["latest"]}, "triton: got 'latest', need"),
    ({"triton": []}, "triton: got an empty list"), ({"sm": 90}, "sm: got 90, need a list"),
    ({"sm": ["90"]}, "sm: got '90', need"),
    ({"layers": ["compiling"]}, "layers: got 'compiling', need a list of any of import, compile, interpret"),
    ({"timeout": 0}, "timeout: got 0"), ({"rtol": 0.1}, "rtol, atol: got 0.1, None, need both")], ids=str)
def test_an_option_that_cannot_be_is_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{says}"):
        TritonMatrix([])(top_level, **options)


@pytest.mark.parametrize("ci", [False, True])
def test_a_release_that_cannot_be_installed_skips_and_fails_in_ci(ci: bool,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> dict[str, str]:
        raise NotInstallable("no network")
    monkeypatch.setattr(plugin, "triton_environment", refused)
    monkeypatch.setenv("CI", "1" if ci else "")
    properties: list[tuple[str, object]] = []
    with pytest.raises((pytest.fail.Exception, pytest.skip.Exception),
                       match=r"3\.2\.0 install: .*no network") as raised:
        TritonMatrix(properties)(top_level, triton=["3.2.0"])
    assert raised.type is (pytest.fail.Exception if ci else pytest.skip.Exception)
    assert properties[0][0] == "triton_matrix"


def test_a_minor_version_is_its_newest_patch_and_nothing_is_fetched_twice(
        monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refused(version: str, **_: Any) -> dict[str, str]:
        asked.append(version)
        raise NotInstallable("no network")
    monkeypatch.setattr(plugin, "triton_environment", refused)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception):
        TritonMatrix([])(top_level, triton=["3.3", "3.3.1", "3.2", "3.99.0"])
    assert sorted(asked) == ["3.2.0", "3.3.1", "3.99.0"]


def test_the_plugin_loads_without_torch_and_triton() -> None:
    """Every session of pytest loads the plugin."""
    script = "import sys; sys.modules['torch'] = sys.modules['triton'] = None; import flashlin.testing.plugin"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=60)
