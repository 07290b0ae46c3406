"""Tests of the stored matrix results of a release, which have one line for each launch.

The same code must give the same line, and a change of code must change as few lines as possible. The tests
also limit the size of a checkout, so that it can be copied to a GPU machine.
"""
from __future__ import annotations

import difflib
import inspect
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flashlin.testing.record import Recorded, source_hash, source_of
from flashlin.testing.source_text import normalised
from matrix import cells
from matrix.__main__ import main, take
from matrix.results import (
    LAUNCHES,
    Cell,
    CellResult,
    Compiled,
    Figures,
    Matrix,
    Verdict,
    by_case,
    by_source,
    load_gpu,
    load_result,
    one_a_line,
)

ROOT = Path(__file__).resolve().parents[1]
CELL = Cell(triton="3.6.0", kind="gate")
KERNEL = '''
@triton.jit(do_not_specialize=["T"])
def scan(x, T, BT: tl.constexpr, NORM=None):
    for i in range(0, T, BT):
        if NORM is not None:
            x += tl.load(x + i, mask=i < 1e-5, other=0.0)
    tl.store(x, f"{T}-{BT!r}")
'''
SAME = '''
# what it does
@triton.jit(
    do_not_specialize=['T'],  # lengths
)
def scan(x, T, BT: tl.constexpr, NORM=None):
  """Says what it does.

  At length."""
  for i in range(0, T, BT):

      "a text that stands alone"
      if (NORM is not None):  # a norm
            x += tl.load(x + i,
                         mask=(i < 0.00001), other=0.)
  tl.store(x, f'{T}-{BT!r}')
'''


def test_comments_docstrings_and_layout_are_no_part_of_a_source() -> None:
    assert normalised(SAME) == normalised(KERNEL)
    assert normalised('class A:\n    """What."""\n    x = 1') == normalised("class A: x = 1")
    assert normalised("(a and b) and (c and d)") == normalised("a and b and c and d") != normalised("a and b or c")
    assert normalised("a and (b or c)") != normalised("a and b or c")


@pytest.mark.parametrize("old, new", [
    ("scan", "scam"), ("BT: tl.constexpr", "BT"), ("NORM=None", "NORM=0"), ("NORM=None", "*, NORM=None"),
    ("is not", "is"), ("0, T", "T, 0"), ("x += ", "x -= "), ("other=0.0", "other=0"),
    ("other=0.0", "other=-0.0"), ("1e-5", "1e-6"), ('["T"]', "[]"), ('["T"]', '("T",)'),
    ("    tl.store", "        tl.store"), ("!r}", "}"), ("x + i", "x + (i + T)"), ("mask=", ""),
    ("@triton.jit(do_not_specialize=[\"T\"])\n", "")])
def test_everything_else_is(old: str, new: str) -> None:
    assert old in KERNEL and normalised(KERNEL.replace(old, new)) != normalised(KERNEL)


CALL = "def f(x):\n    return tile(x, 1, n + 1, D=K)"


@pytest.mark.parametrize("call", [
    "tile(x, 1, n + 1, K)", "tile(x=x, first=1, rows=n + 1, D=K)",
    "tile(D=K, rows=n + 1, x=x, first=1)", "tile(x, 1, D=K, rows=n + 1)"])
def test_an_argument_counts_by_its_parameter(call: str) -> None:
    """A call has the same normal form if an argument is passed by name or by position.

    This holds only for functions whose parameters are known.
    """
    parameters = {"tile": ("x", "first", "rows", "D", "SIDE")}
    other = CALL.replace("tile(x, 1, n + 1, D=K)", call)
    assert normalised(other, parameters) == normalised(CALL, parameters)
    assert normalised(other, {"put": ("x",)}) == normalised(other) != normalised(CALL)


@pytest.mark.parametrize("call", [
    "tile(x, 1, K, n + 1)", "tile(x=x, first=1, rows=K, D=n + 1)", "tile(x=1, first=x, rows=n + 1, D=K)",
    "tile(x, 1, n + 1, SIDE=K)", "tile(x, 1, n + 1)", "tile(x, 1, n + 1, K, K)",
    "tile(x, 1, n + 1, D=K, SIDE=1)", "put(x, 1, n + 1, D=K)", "tile(*x, 1, n + 1, D=K)"])
def test_another_argument_is_another_call(call: str) -> None:
    parameters = dict.fromkeys(("tile", "put"), ("x", "first", "rows", "D", "SIDE"))
    other = CALL.replace("tile(x, 1, n + 1, D=K)", call)
    assert normalised(other, parameters) != normalised(CALL, parameters)


def test_a_default_that_is_left_out_stays_left_out() -> None:
    parameters = {"tile": ("x", "by", "SIDE", "WARM")}
    call = normalised("tile(x, WARM=1, SIDE=2)", parameters)
    assert call == normalised("tile(x=x, SIDE=2, WARM=1)", parameters)
    assert call != normalised("tile(x, 2, WARM=1)", parameters)


def test_swapped_tensors_are_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Swapping two tensors in a call inside a real kernel changes its hash; reordering keywords does not."""
    before, original = source_of("flashlin.kernels.dplr.forward", "dplr_prepare"), inspect.getsource
    for old, new, same in (("K=K, BT=BT", "BT=BT, K=K", True),
                           ("prepare_chunk(q, k,", "prepare_chunk(k, q,", False)):
        monkeypatch.setattr(
            inspect, "getsource", lambda function, old=old, new=new: original(function).replace(old, new))
        assert (source_of.__wrapped__("flashlin.kernels.dplr.forward", "dplr_prepare") == before) is same


def test_it_is_the_same_on_every_python() -> None:
    """The normal form of code is the same under every Python version, because stored hashes depend on it.

    Newer versions have type parameters and print fewer fields of a syntax tree.
    """
    assert normalised("@a\ndef f(x: int = -1, *y):\n    'text'\n    return x[1:, None] if y else {**y, 'k': "
                      "lambda: 2.50}") == (
"(Module body [ (FunctionDef name 'f' args (arguments args [ (arg arg 'x' annotation (Name id 'int' ) ) ] "
"vararg (arg arg 'y' ) defaults "
"[ (UnaryOp op (USub ) operand 1 ) ] ) body [ (Return value (IfExp test (Name id 'y' ) body (Subscript value "
"(Name id 'x' ) slice "
"(Tuple elts [ (Slice lower 1 ) None ] ) ) orelse (Dict keys [ None 'k' ] values [ (Name id 'y' ) (Lambda "
"args (arguments ) body 2.5 ) ] ) "
") ) ] decorator_list [ (Name id 'a' ) ] ) ] )")


def test_a_comment_in_a_kernel_repeats_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before, original = source_of("flashlin.kernels.tile_ops", "gate_cumsum"), inspect.getsource
    for added, same in (("    # in other words\n", True), ("    return 1\n", False)):
        monkeypatch.setattr(inspect, "getsource", lambda function, added=added: original(function) + added)
        assert (source_of.__wrapped__("flashlin.kernels.tile_ops", "gate_cumsum") == before) is same


def test_a_kernel_is_hashed_with_what_it_calls_and_the_constants_it_uses() -> None:
    source = source_of("flashlin.kernels.selective.forward", "selective_forward")
    assert "(FunctionDef name 'softplus'" in source and "LOG2_E = 1.4426950408889634" in source


def launch(kernel: str, BT: int) -> Recorded:
    module = {"gate_cumsum": "flashlin.kernels.tile_ops",
              "conv_backward_x": "flashlin.kernels.conv.backward"}[kernel]
    return Recorded(module, kernel, (), (), 4, 1, 0, (), f"{kernel} BT={BT} warps=4 stages=1")


REFUSED = Compiled(status="abort", message="SIGABRT", cause="Assertion `x' failed")


def kept(folder: Path, cell: Cell = CELL, **verdicts: Compiled) -> CellResult:
    """Save and return a cell's result with launches of two kernels.

    verdicts: compilation results of the launch of conv_backward_x, by GPU.
    """
    result = CellResult(cell=cell, date="2026-11-22", layers={"compile": 1.5},
                        verdicts=(Verdict(layer="import", name="import", ok=True),))
    result.enter(launch("gate_cumsum", 64), "gate_cumsum-b", "sm90", Compiled(shared=512))
    for card, verdict in verdicts.items():
        result.enter(launch("conv_backward_x", 16), "conv_backward_x-a", card, verdict)
    result.enter(launch("gate_cumsum", 32), "gate_cumsum-c", "gfx942", Compiled(shared=0))
    result.save(folder)
    return result


def lines(folder: Path) -> list[str]:
    return (folder / LAUNCHES).read_text().splitlines()


def known(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / LAUNCHES).read_text())["launches"])


def test_what_is_kept_comes_back_in_one_order_with_cards_by_verdict(tmp_path: Path) -> None:
    fine = Compiled(shared=2048)
    slow = Compiled(shared=2048, slow=Figures(19104, 32, 6181, 3175))
    spills = Compiled(shared=2048, slow=Figures(1001))
    verdicts = {"sm89": spills, "sm100": fine, "sm75": REFUSED, "gfx90a": fine, "sm90": fine,
                "sm80": Compiled(), "sm70": slow}
    result = kept(tmp_path, **verdicts)
    assert load_result(tmp_path, CELL) == result
    assert known(tmp_path) == {
        "conv_backward_x BT=16 warps=4 stages=1": {"a": {"3.6.0": {
            "sm70": [2048, 19104, 32, 6181, 3175],
            "sm75": {"status": "abort", "message": "SIGABRT", "cause": "Assertion `x' failed"},
            "sm80": 0, "sm89": [2048, 1001], "gfx90a 100 90": 2048}}},
        "gate_cumsum BT=32 warps=4 stages=1": {"c": {"3.6.0": {"gfx942": 0}}},
        "gate_cumsum BT=64 warps=4 stages=1": {"b": {"3.6.0": {"sm90": 512}}}}
    before = lines(tmp_path)
    kept(tmp_path, **dict(reversed(verdicts.items())))
    assert lines(tmp_path) == before, "the lines must not depend on the order of the results"


def test_a_kernel_that_changes_touches_its_own_lines(tmp_path: Path) -> None:
    kept(tmp_path, sm80=Compiled(shared=1), sm90=Compiled(shared=1))
    before = lines(tmp_path)
    kept(tmp_path, sm80=Compiled(shared=1), sm90=REFUSED)
    changed = [line for line in difflib.ndiff(before, lines(tmp_path)) if line[0] in "+-"]
    assert len(changed) == 2 and all("conv_backward_x BT=16" in line for line in changed)


def test_releases_of_which_the_same_is_known_stand_together(tmp_path: Path) -> None:
    config, verdicts = "conv_backward_x BT=16 warps=4 stages=1", {"sm80": Compiled(shared=1)}
    for triton in ("3.10.0", "3.6.0", "3.5.1"):
        other = REFUSED if triton == "3.10.0" else verdicts["sm80"]
        kept(tmp_path, Cell(triton=triton, kind="gate"), **{**verdicts, "sm90": other})
    assert known(tmp_path)[config] == {"a": {"3.5.1 3.6.0": {"sm80 90": 1}, "3.10.0": {
        "sm80": 1, "sm90": REFUSED.model_dump(exclude_defaults=True)}}}
    CellResult(cell=CELL).save(tmp_path)
    assert list(known(tmp_path)[config]["a"]) == ["3.5.1", "3.10.0"], "only the results of one cell must go"
    assert not load_result(tmp_path, CELL).launches
    assert load_result(tmp_path, Cell(triton="3.5.1", kind="gate")).launches["conv_backward_x-a"].cards == {
        "sm80": verdicts["sm80"], "sm90": verdicts["sm80"]}


def test_cells_that_are_run_side_by_side_lose_nothing(tmp_path: Path) -> None:
    every = [Cell(triton=f"3.{minor}.0", kind="gate") for minor in range(8)]
    with ThreadPoolExecutor(len(every)) as threads:
        for made in [threads.submit(kept, tmp_path, cell, sm80=REFUSED) for cell in every for _ in range(5)]:
            made.result()
    assert all(len(load_result(tmp_path, cell).launches) == 3 for cell in every)


def test_a_cell_that_was_run_elsewhere_is_taken_in(tmp_path: Path) -> None:
    here, there, other = tmp_path / "here", tmp_path / "there", Cell(triton="3.5.1", kind="gate")
    kept(here, sm80=Compiled(), sm90=Compiled())
    kept(there, sm80=Compiled(), sm90=Compiled())
    kept(there, other, sm80=REFUSED)
    (there / f"{CELL.name}.json").unlink()  # the other run has a new result for one cell only
    kept(here, sm80=REFUSED)
    both = Matrix(card=(), cell=(CELL, other))
    assert take(both, there, here) == [other] and not take(both, tmp_path, here)
    assert load_result(here, other) == load_result(there, other)
    assert load_result(here, CELL).launches["conv_backward_x-a"].cards == {"sm80": REFUSED}


@pytest.mark.parametrize("options, told", [
    (["--take", "{}"], "--take: got {}, need a folder with a cell's file, such as triton-3.6.0.json"),
    (["--take", "{}", "--check"], "argument --check: not allowed with argument --take")])
def test_what_cannot_be_taken_in_is_told_before_anything_is_planned(
        options: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["matrix", "report", *(option.format(tmp_path) for option in options)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and told.format(tmp_path) in capsys.readouterr().err


def test_verdicts_on_a_kernel_that_has_changed_are_gone_and_no_others(tmp_path: Path) -> None:
    kept(tmp_path, sm80=REFUSED)
    path = tmp_path / LAUNCHES
    path.write_text(path.read_text().replace(source_hash("flashlin.kernels.conv.backward", "conv_backward_x"),
                                             "flashlin.kernels.conv.backward:0"))
    assert set(load_result(tmp_path, CELL).launches) == {"gate_cumsum-b", "gate_cumsum-c"}


def test_the_results_are_as_they_would_be_written(tmp_path: Path) -> None:
    """The stored results have the format of a new run, so that it changes only lines with new results.

    They contain no launches of older versions of a kernel.
    """
    for cell in cells.whole().cell:
        result = load_result(ROOT / "matrix" / "results", cell)
        result.save(tmp_path)
        kept = ROOT / "matrix" / "results" / f"{cell.name}.json"
        assert kept.exists(), f"run: python -m matrix run --cell {cell.name}"
        assert (tmp_path / kept.name).read_text() == kept.read_text()
    assert (tmp_path / LAUNCHES).read_text() == (ROOT / "matrix" / "results" / LAUNCHES).read_text()
    for path in (ROOT / "matrix" / "results").glob("gpu-*.json"):
        record = load_gpu(path)
        kept = {"configs": by_source(record["configs"]), "rows": by_case(record["rows"])}
        assert one_a_line({**record, **kept}) == path.read_text()


def test_a_row_of_a_gpu_says_what_is_worth_knowing(tmp_path: Path) -> None:
    right = {"op": "a", "case": "b", "dtype": "float32", "ok": True, "bitwise": True, "worst": "dq",
             "rms": 0.0027159167, "row": 0.01, "allowed": 0.1}
    wrong = {**right, "dtype": "float16", "ok": False, "bitwise": False}
    kept = by_case([right, wrong])
    assert kept == {"a": {"b": [["float32", "dq", 0.0027, 0.01, 0.1], {**wrong, "rms": 0.0027}]}}
    (tmp_path / "gpu.json").write_text(one_a_line({"rows": kept}))
    first, second = load_gpu(tmp_path / "gpu.json")["rows"]
    assert first == {name: value for name, value in {**right, "rms": 0.0027}.items() if name != "bitwise"}
    assert second == {**wrong, "rms": 0.0027}


def test_a_checkout_is_small() -> None:
    """A checkout has at most 10.5 MB, so that it can be copied to a GPU machine together with Triton."""
    if shutil.which("git") and subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True,
                                              check=False).returncode == 0:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True,
                                check=True).stdout
        files = [ROOT / name for name in listed.split("\0") if name]
    else:  # a source distribution
        files = [path for path in ROOT.rglob("*")
                 if not any(part.startswith((".", "__pycache__")) for part in path.relative_to(ROOT).parts)]
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in files if path.is_file()}
    assert len(sizes) > 100 and sum(sizes.values()) <= 10_500_000, sorted(sizes.items(),
                                                                         key=lambda one: -one[1])[:10]
