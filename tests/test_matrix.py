"""Tests of the matrix runner with a fake compiler: its jobs, its stored results, and the support tables.

Each run must use the results of earlier runs, and each table must be complete. tests/matrix uses the real
compiler.
"""
from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from flashlin import dispatch
from flashlin.compat.releases import supported
from flashlin.compat.target import parse
from flashlin.guards import launch_table
from flashlin.testing import environments
from flashlin.testing.compile import NOT_TRIED, Job, Result
from flashlin.testing.record import Recorded
from matrix import cells, peer_table, picture, results, seeds, spilling, support, workload
from matrix import environments as others
from matrix import run as matrix
from matrix.results import Card, Cell, CellResult, Compiled, Figures, Matrix, Tried, load_result
from matrix.status import STATUSES, CellState, Outcome, Planned, Square, gpu_records, squares
from tests.share import WHOLE as ALL
from tests.share import share

ROOT = Path(__file__).resolve().parents[1]
WHOLE = cells.whole()
CARD = Card(name="sm90", example="H100", kind="gate")
CELL = Cell(triton="3.6.0", kind="gate", layers=("plan", "compile"))
SMALL = Matrix(card=(CARD,), cell=(CELL,))
Compiler = Callable[..., Iterator[tuple[int, Result]]]


@pytest.fixture
def one_call(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[workload.Call]]:
    """Limit a matrix run to one call, and yield a list with it.

    The launch table is restored afterwards, so that results of the run do not affect plans of other tests.
    """
    found = [call for call in workload.calls() if str(call) == "chunk_simple_gla bfloat16 D=128"]
    monkeypatch.setattr(workload, "calls", lambda: iter(found))
    monkeypatch.setattr(matrix, "triton_environment", lambda version: {})
    shipped = launch_table.table  # a test may replace it
    yield found
    shipped.cache_clear()


def compiler(verdict: Callable[[Job], Result], seen: list[Job], stop_after: int = 10**6) -> Compiler:
    def compiling(jobs: Sequence[Job], environment: dict[str, str],
                  **options: Any) -> Iterator[tuple[int, Result]]:
        for number, job in enumerate(jobs):
            if len(seen) == stop_after:
                raise KeyboardInterrupt
            seen.append(job)
            yield number, verdict(job)
    return compiling


def fine(job: Job) -> Result:
    return Result("ok", shared=job.launch.shared, registers=100)


def test_every_op_is_called_and_every_release_is_a_cell() -> None:
    calls = list(workload.calls())
    assert {call.op for call in calls} == set(dispatch.OPS)
    assert len({str(call) for call in calls}) == len(calls)
    assert set(supported()) < {cell.triton for cell in WHOLE.cell}
    assert {cell.triton for cell in WHOLE.cell if cell.kind == "gate"} == set(supported())
    names = [cell.name for cell in WHOLE.cell]
    assert names[:4] == ["triton-2.3.1", "triton-3.0.0", "triton-3.0.0-torch-2.4.1", "triton-3.1.0"]


def test_a_cell_says_which_python_its_release_needs() -> None:
    cell = Cell(triton="3.6.0", python="3.9 to 3.13", kind="gate")
    assert [minor for minor in range(7, 16) if cell.runs_on((3, minor))] == [9, 10, 11, 12, 13]
    assert all(cell.python for cell in WHOLE.cell)
    assert [cell.triton for cell in WHOLE.cell if not cell.runs_on((3, 10))][:1] == ["3.9.0"]


def test_a_call_is_seen_forward_and_backward_and_a_refusal_is_a_plan(one_call: list[workload.Call],
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    found = workload.seen(one_call[0], parse("triton=3.6.0,sm=90"))
    assert {"simple_gla_scan", "simple_gla_states", "simple_gla_dv",
            "simple_gla_grads"} <= {launch.kernel for launch in found.launches}
    assert all(plan.path == "triton" for plan in found.plans)
    assert [plan.path for plan in workload.seen(one_call[0], parse("triton=3.0.0,sm=100")).plans] == ["torch"]
    monkeypatch.setenv("FLASHLIN_PATH", "triton")
    from flashlin import policy
    policy._current = None
    refused = workload.seen(one_call[0], parse("triton=3.0.0,sm=100"))
    assert refused.plans[-1].refused and not refused.launches


def test_identity_is_what_is_compiled(one_call: list[workload.Call], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = workload.seen(one_call[0], parse("triton=3.6.0,sm=90")).launches[:2]
    assert matrix.identity(first) == matrix.identity(first._replace(shared=1, traits=()))
    others = [second, first._replace(num_warps=8), first._replace(constants=(*first.constants, ("X", 1)))]
    assert len({matrix.identity(one) for one in (first, *others)}) == 4
    known = matrix.identity(first)
    source = matrix.source_of(first.module, first.kernel)
    assert "name 'gate_cumsum'" in source and "name 'sequence_of'" in source, "functions that the kernel calls are part of it"
    monkeypatch.setattr(matrix, "source_of", lambda module, kernel: source + "# changed")
    assert matrix.identity(first) != known


AMPERE = Card(name="sm80", example="A100", kind="gate")


def test_what_compiles_to_slow_code_is_planned_otherwise_in_the_same_run(
        one_call: list[workload.Call], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run re-plans launches that compile to slow code, and stores that they are slow.

    Without the stored result, the next plan would choose the slow launch again.
    """
    def verdict(job: Job) -> Result:
        if job.launch.kernel == "simple_gla_states" and job.launch.num_stages == 2:
            return Result("ok", shared=1, registers=32, spills=19104, instructions=6181, local=3175)
        return Result("ok", shared=1, registers=255, spills=1000, instructions=900, local=9)
    seen, table = list[Job](), launch_table.Table()
    monkeypatch.setattr(launch_table, "table", lambda: table)
    monkeypatch.setattr(matrix, "compiling", compiler(verdict, seen))
    found = matrix.run(CELL, (AMPERE,), tmp_path)
    states = [job.launch for job in seen if job.launch.kernel == "simple_gla_states"]
    assert [(launch.num_warps, launch.num_stages) for launch in states] == [(4, 2), (8, 2), (8, 1)]
    assert len(seen) == len(found.result.launches)
    slow = {tried.config: tried.cards["sm80"].slow for tried in found.result.launches.values()
            if tried.cards["sm80"].slow}
    assert slow == dict.fromkeys([states[0].config, states[1].config], (19104, 32, 6181, 3175))
    assert load_result(tmp_path, CELL) == found.result
    planned = {launch for launch, _ in found.planned.started}
    assert [matrix.identity(launch) in planned for launch in states] == [False, False, True]
    assert table[states[0].config]["3.6.0"]["slow"] == {"sm80": [19104, 32]}
    square, = squares([found], {})
    assert square.status == "compiled"
    [line] = spilling.lines([found])
    assert matrix.plain(found.result, (AMPERE,)) == found.plain
    assert line == f"| 3.6.0 | sm80 | {len(planned)} | 1 → 0 | 1 → 0 | 1 → 0 |"
    matrix.run(CELL, (AMPERE,), tmp_path)
    assert len(seen) == len(found.result.launches), "nothing is compiled again"


def test_a_run_that_is_killed_goes_on_where_it_was(one_call: list[workload.Call],
                                                   monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Job] = []
    monkeypatch.setattr(matrix, "compiling", compiler(fine, seen, stop_after=2))
    with pytest.raises(KeyboardInterrupt):
        matrix.run(CELL, (CARD,), tmp_path)
    kept = load_result(tmp_path, CELL)
    assert len(kept.launches) == 2 and squares([CellState(kept, matrix.plans(CELL, [CARD]))],
                                               {})[0].status == "not run"
    monkeypatch.setattr(matrix, "compiling", compiler(fine, seen))
    found = matrix.run(CELL, (CARD,), tmp_path)
    assert len(seen) == len(found.result.launches) == len(found.planned.places), "nothing was compiled twice"
    assert squares([found], {})[0].status == "compiled" and load_result(tmp_path, CELL) == found.result
    before = (tmp_path / "triton-3.6.0.json").read_text().partition('"kernels"')[2]
    matrix.run(CELL, (CARD,), tmp_path)
    assert len(seen) == len(found.result.launches), "a run of what is known compiles nothing"
    assert (tmp_path / "triton-3.6.0.json").read_text().partition(
        '"kernels"')[2] == before, "such a run must not change the results"


def test_a_kernel_that_took_too_long_is_tried_again(one_call: list[workload.Call],
                                                    monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Job] = []
    monkeypatch.setattr(matrix, "compiling", compiler(lambda job: Result("timeout"), seen))
    assert support.failures(SMALL, matrix.run(CELL, (CARD,), tmp_path))
    monkeypatch.setattr(matrix, "compiling", compiler(fine, seen))
    assert not support.failures(SMALL, matrix.run(CELL, (CARD,), tmp_path)) and len(seen) % 2 == 0


@pytest.mark.parametrize("bad, says",
                         [(Result("abort", "SIGABRT", "reshapeOuts"), "abort: SIGABRT reshapeOuts"),
                          (Result("ok", shared=10**6), "1000000 bytes of shared memory, planned")],
                         ids=["abort", "shared"])
def test_a_broken_kernel_is_a_failure_that_names_its_place(one_call: list[workload.Call],
                                                           monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                           bad: Result, says: str) -> None:
    monkeypatch.setattr(matrix, "compiling",
                        compiler(lambda job: bad if job.launch.kernel == "simple_gla_states" else fine(job), []))
    found = matrix.run(CELL, (CARD,), tmp_path)
    [line] = support.failures(SMALL, found)
    assert line.startswith(
        "chunk_simple_gla sm90 triton 3.6.0: bfloat16 D=128: simple_gla_states(") and says in line
    report = Matrix(card=(CARD.model_copy(update={"kind": "report"}),), cell=(CELL,))
    assert support.failures(report, found) == [], "a GPU that is only reported causes no failure"


def test_what_was_refused_is_remembered_though_it_is_planned_no_more(one_call: list[workload.Call],
                                                                     monkeypatch: pytest.MonkeyPatch,
                                                                     tmp_path: Path) -> None:
    monkeypatch.setattr(matrix, "compiling",
                        compiler(lambda job: Result("abort") if job.launch.kernel == "simple_gla_states"
                                 else fine(job), []))
    [refused] = [name for name in matrix.run(CELL, (CARD,), tmp_path).result.launches
                 if name.startswith("simple_gla_states")]
    monkeypatch.setattr(workload, "calls", lambda: iter(()))
    again = matrix.run(CELL, (CARD,), tmp_path)
    assert {name: list(one.cards) for name, one in again.result.launches.items()} == {refused: ["sm90"]}
    config = again.result.launches[refused].config
    assert json.loads(support.launch_table([again], tmp_path)) == {config: {"3.6.0": {"failed": "sm90"}}}
    assert "| 0 of 0 | 0 | 1 |" in support.pages(SMALL, [again], [], tmp_path)["runs.md"]
    monkeypatch.setattr(results, "is_current", lambda source, kernel: False)
    assert not matrix.run(CELL, (CARD,), tmp_path).result.launches, "results of an older source"


def test_an_estimate_that_is_too_low_fails_a_square_and_blames_no_configuration(one_call: list[workload.Call],
                                                                                monkeypatch: pytest.MonkeyPatch,
                                                                                tmp_path: Path) -> None:
    monkeypatch.setattr(matrix, "compiling", compiler(lambda job: Result("ok", shared=10**6), []))
    found = matrix.run(CELL, (CARD,), tmp_path)
    assert support.failures(SMALL, found) and support.launch_table([found], tmp_path) == "{\n\n}\n"


@pytest.mark.parametrize("kind", ["gate", "report"])
def test_what_could_not_be_tried_is_told_once_and_not_kept(one_call: list[workload.Call],
                                                           monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                           kind: Any) -> None:
    """If the first compilation for a GPU cannot be tried, the others for this GPU are skipped.

    The reason is reported once and not stored, so that the next run tries again. Examples are a missing
    linker or a full disk. Compilations for other GPUs continue.
    """
    seen: list[Job] = []
    monkeypatch.setattr(matrix, "compiling",
                        compiler(lambda job: Result(NOT_TRIED, "no room") if job.sm == 90 else fine(job),
                                 seen))
    card, other = CARD.model_copy(update={"kind": kind}), Card(name="sm80", example="A100", kind="gate")
    found = matrix.run(CELL, (card, other), tmp_path)
    every = re.fullmatch(r"(\d+) of \1 kernels not tried: no room", found.untried["sm90"])
    assert every and [*found.untried] == ["sm90"] and [job.sm for job in seen].count(90) == 1
    assert {name for one in load_result(tmp_path, CELL).launches.values() for name in one.cards} == {"sm80"}
    both = Matrix(card=(card, other), cell=(CELL,))
    told = [f"sm90 triton 3.6.0: {every[0]}"] if kind == "gate" else []
    assert support.failures(both,
                            found) == told and [one.status for one in squares([found], {})] == ["not run",
                                                                                                "compiled"]
    monkeypatch.setattr(matrix, "compiling", compiler(fine, seen))
    assert not matrix.run(CELL, (card, other),
                          tmp_path).untried and [job.sm
                                                 for job
                                                 in seen].count(90) == 1 + int(every[1]), "not tried again"
    matrix.run(CELL, (other,), tmp_path)
    assert {name for one in load_result(tmp_path, CELL).launches.values() for name in one.cards} == {"sm80",
                                                                                                     "sm90"}, "must stay"


def test_one_that_could_not_be_tried_holds_no_others_up(one_call: list[workload.Call],
                                                        monkeypatch: pytest.MonkeyPatch,
                                                        tmp_path: Path) -> None:
    seen: list[Job] = []
    monkeypatch.setattr(matrix, "compiling", compiler(
        lambda job: Result(NOT_TRIED, "SIGKILL") if job.launch.kernel == "simple_gla_states" else fine(job),
        seen))
    found = matrix.run(CELL, (CARD,), tmp_path)
    every = len(found.result.launches) + 1
    assert found.untried == {"sm90": f"1 of {every} kernels not tried: SIGKILL"} and len(seen) == every


def test_on_amd_the_torch_path_is_taken_and_the_kernels_are_compiled_nevertheless(
        one_call: list[workload.Call], monkeypatch: pytest.MonkeyPatch,
                                                                                   tmp_path: Path) -> None:
    seen: list[Job] = []
    monkeypatch.setattr(matrix, "compiling", compiler(fine, seen))
    card = Card(name="gfx942", example="MI300", kind="report")
    found = matrix.run(CELL, (card,), tmp_path)
    assert {job.sm for job in seen} == {"gfx942"} and {job.launch.kernel
                                                       for job in seen} >= {"simple_gla_scan",
                                                                            "simple_gla_states"}
    [square] = squares([found], {})
    assert square.status == "compiled only"
    assert square.evidence == f"{len(seen)} of {len(seen)} kernels compiled"
    assert support.launch_table([found], tmp_path) == "{\n\n}\n", "planning must ignore such results"


def test_another_torch_is_a_cell_without_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    [cell] = [cell for cell in WHOLE.cell if cell.torch]
    assert cell.name == "triton-3.0.0-torch-2.4.1" and cell.kind == "gate" and not {"plan",
                                                                                    "compile"} & set(
                                                                                        cell.layers)
    assert cell not in WHOLE.tritons and len(WHOLE.tritons) == len(WHOLE.cell) - 1
    for module in (environments, others):
        monkeypatch.setattr(module, "installed",
                            lambda requirements, name, *rest, **options: Path(f"/{name}"))
    assert matrix.environment(cell)["PYTHONPATH"].split(":")[:2] == ["/torch-2.4.1", "/triton-3.0.0"]


LAUNCH = Recorded("module", "kernel", (), (), 4, 2, 0, ())


def outcome(path: str = "triton", remedies: tuple[str, ...] = (), launches: tuple[str, ...] = ("a",),
            failed: str = "") -> Outcome:
    return Outcome(op="op", call="call", card="sm90", path=path, remedies=remedies,
                   because=("issue: got",) if remedies else (), launches=launches, failed=failed)


@pytest.mark.parametrize("outcomes, record, status", [
    ([outcome()], "", "compiled"), ([outcome()], "a record", "ran"),
    ([outcome(remedies=("limit_num_warps",))], "", "worked around"),
    ([outcome(remedies=("limit_num_warps",))], "a record", "worked around"),
    ([outcome("torch", ("torch_path",), ())], "a record", "torch path"),
    ([outcome("refused", (), ())], "", "refused"), ([outcome(launches=("a", "b"))], "", "not run"),
    # on AMD, where kernels compile but have not been run
    ([outcome("torch", ("torch_path",))], "", "compiled only"),
    ([outcome("torch", ("torch_path",)), outcome()], "", "compiled only"),
    ([outcome("torch", ("torch_path",)), outcome("torch", ("torch_path",), ())], "", "torch path"),
    ([outcome("torch", ("torch_path",), ("a", "b"))], "", "torch path"),
    ([outcome("torch", ("torch_path",), ("a", "c"))], "", "torch path"),
    ([outcome(launches=("a", "b"))], "a record", "not run"), ([outcome(failed="TypeError")], "", "FAILED"),
    ([outcome(), outcome("torch", ("torch_path",), ())], "", "torch path"),
    ([outcome(launches=("c",)), outcome()], "", "FAILED"),
    ([outcome(launches=("s",)), outcome()], "", "slow"), ([outcome(launches=("s",))], "a record", "ran"),
    ([outcome(remedies=("limit_num_warps",), launches=("s",))], "", "slow")])
def test_a_square_is_the_worst_of_its_calls(outcomes: list[Outcome], record: str, status: str) -> None:
    tried = {"a": Tried(config="", cards={"sm90": Compiled()}),
             "s": Tried(config="", cards={"sm90": Compiled(slow=Figures(8, 32, 9, 2))}),
             "c": Tried(config="", cards={"sm90": Compiled(status="exception", message="no")})}
    planned = Planned(tuple(outcomes), {(name, "sm90"): LAUNCH for name in "abcs"})
    found = CellState(CellResult(cell=CELL, launches=tried), planned)
    [square] = squares([found], {("op", "sm90", "3.6.0"): record} if record else {})
    assert square.status == status and square.status in STATUSES and square.calls == len(outcomes)


def test_what_ran_before_its_kernel_changed_says_nothing_of_it_now() -> None:
    """A record of a run does not count for a kernel that has changed since; its new id has no results."""
    result = CellResult(cell=CELL, launches={"a": Tried(config="", cards={"sm90": Compiled()})})
    ran = {("op", "sm90", "3.6.0"): "a record"}
    then, now = (squares([CellState(result, Planned((outcome(launches=(name,)),), {(name, "sm90"): LAUNCH}))],
                         ran)[0] for name in "ab")
    assert (now.status, now.evidence, then.status, then.evidence) == ("not run", "", "ran", "a record")


def test_a_gpu_record_counts_only_where_all_of_an_op_is_right(tmp_path: Path) -> None:
    (tmp_path / "gpu-x.json").write_text(
        '{"capability": [9, 0], "triton": "3.6.0", "device": "x", "date": "d", "rows": '
        '{"a": {"": [{"op": "a", "ok": true}]}, '
        '"b": {"": [{"op": "b", "ok": true}, {"op": "b", "ok": false}]}}}')
    assert set(gpu_records(tmp_path)) == {("a", "sm90", "3.6.0")}
    (tmp_path / "gpu-w.json").write_text(
        '{"capability": [9, 0], "triton": "3.6.0", "device": "w", "date": "d", "rows": '
        '{"a": {"": [{"op": "a", "ok": true}, {"op": "a", "ok": true}]}, '
        '"b": {"": [{"op": "b", "ok": true}]}}}')
    assert gpu_records(tmp_path) == {("a", "sm90", "3.6.0"): "2 cases right on w, d (gpu-w.json)"}
    (tmp_path / "gpu-w.json").unlink()
    (tmp_path / "gpu-x.json").write_text(
        '{"arch": "gfx942", "capability": [0, 0], "triton": "3.6.0", "device": "x", "date": "d", '
        '"rows": {"a": {"": [{"op": "a", "ok": true}]}}}')
    assert set(gpu_records(tmp_path)) == {("a", "gfx942", "3.6.0")}


NOWHERE = Path("nowhere")


def a_table(squared: list[Square]) -> str:
    states = [CellState(CellResult(cell=cell), Planned()) for cell in WHOLE.cell]
    return "\n".join(support.pages(WHOLE, states, squared, NOWHERE).values())


def every_square(*ops: str) -> list[Square]:
    return [Square(op=op, card=card.name, triton=cell.triton, status="compiled", calls=1)
            for op in ops for cell in WHOLE.tritons for card in WHOLE.card]


def test_the_table_leaves_nothing_blank() -> None:
    lost = [one for one in every_square("a") if one.triton != "3.6.0"]
    for text in (a_table([]), a_table(lost)):
        rows = [line for line in text.splitlines()
                if line.startswith(tuple(f"| {cell.triton}" for cell in WHOLE.cell))]
        assert rows and all("|  |" not in row for row in rows)
        assert "not run" in next(row for row in rows if row.startswith("| 3.6.0 |"))


def test_ops_of_which_the_same_is_known_share_a_table() -> None:
    squared = every_square("a", "b", "c")
    at = next(n for n, one in enumerate(squared) if (one.op, one.card, one.triton) == ("b", "sm90", "3.6.0"))
    squared[at] = squared[at]._replace(status="ran")
    text = a_table(squared)
    headings = re.findall(r"^## (.*)", text, re.MULTILINE)
    at = headings.index("Number of ops with each status")
    assert headings[at + 1:at + 3] == ["a and 1 more", "b"]
    assert "Ops: `a`, `c`\n" in text and "Ops: `b`\n" in text
    said = support.marks_of(text)
    assert {place: mark for place, mark in said.items() if mark != "compiled"} == {("b", "3.6.0", "sm90"): "ran"}
    assert len(said) == len(squared)
    [row] = [line for line in text.partition("## Number of ops")[2].partition("## a")[0].splitlines()
             if line.startswith("| 3.6.0 |")]
    at = 1 + [card.name for card in WHOLE.card].index("sm90")
    assert row.split(" | ")[at] == "1 ran, 2 compiled" and row.count("3 compiled") == len(WHOLE.card) - 1
    [row] = [line for line in text.splitlines() if line.startswith("| sm90 ") and "Triton" not in line]
    assert row.count("3 compiled") == len(WHOLE.tritons) - 1 and "| 2 compiled |" in row


def test_equal_rows_and_columns_are_merged() -> None:
    squared = every_square("a")
    at = next(n for n, one in enumerate(squared) if (one.card, one.triton) == ("sm90", "3.6.0"))
    squared[at] = squared[at]._replace(status="ran")
    table = a_table(squared).partition("Ops: `a`\n\n")[2].partition("\n\n")[0].splitlines()
    others = ", ".join(card.name for card in WHOLE.card if card.name != "sm90")
    assert len(table) == 4 and set(table[0].strip("| ").split(" | ")) == {"Triton", others, "sm90"}
    assert table[3].startswith("| 3.6.0 | compiled | ran") or table[3].startswith("| 3.6.0 | ran | compiled")


def test_no_page_has_two_headings_of_one_name() -> None:
    for path in PAGES.glob("*.md"):
        headings = re.findall(r"^#+ (.*)", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(headings) == len(set(headings)), path.name
        assert "<!-- Generated by python -m matrix report" in path.read_text(encoding="utf-8")[:400]


def test_pages_are_short() -> None:
    sizes = {path.name: path.stat().st_size for path in PAGES.glob("*.md")}
    assert max(sizes.values()) <= 100_000 and sum(sizes.values()) <= 240_000, sizes
    assert (ROOT / "SUPPORT.md").stat().st_size <= 3_000
    assert all(f"docs/support/{name}" in (ROOT / "SUPPORT.md").read_text(encoding="utf-8") for name in sizes)


def test_the_page_is_made_from_the_tables_without_planning(tmp_path: Path) -> None:
    html = tmp_path / "build" / "support.html"
    assert support.write_page(WHOLE, PAGES, RESULTS, html) == 0
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', html.read_text(encoding="utf-8"))
    assert embedded
    data = json.loads(embedded[1])
    counts = Counter(support.MARKS[STATUSES[status]] for status, *_ in data["squares"])
    assert counts == Counter(support.marks_of((PAGES / "ops.md").read_text(encoding="utf-8")).values())
    assert any(" cases right on NVIDIA H200" in text for text in data["texts"]) and data["date"]


def test_a_reason_is_one_row_with_all_its_statuses() -> None:
    squared = [one._replace(status=status, why=("a call: backend: the rest",))
               for one, status in zip(every_square("a"), ("torch path", "torch path", "compiled only"), strict=False)]
    [row] = [line for line in support._reasons(squared) if line.startswith("| backend ")]
    assert row.endswith("| 2 torch; 1 compiled only |")


def test_answers_are_short_phrases() -> None:
    for answer, said in {
            "error: ValueError: Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)":
                "error: no kernels for CPU tensors",
            "wrong: o 0.0036, ht nan, dq 0.1, dk 0.2": "wrong: o, ht, dq and 1 more; largest error NaN",
            "wrong: dq 1, dk 0.52": "wrong: dq, dk; largest error 1",
            "error: KeyError: new": "error: KeyError: new"}.items():
        assert peer_table.in_words(answer) == said


def test_the_picture_shows_each_square_as_a_part_of_its_bar() -> None:
    said = {("a", "3.6.0", "sm90"): "ran", ("b", "3.6.0", "sm90"): "compiled", ("a", "3.6.0", "sm75"): "worked around",
            ("b", "3.6.0", "sm75"): "worked around"}
    drawn = ElementTree.fromstring(picture.picture(said, {"sm90": "H100", "sm75": "<T4>"}))
    titles = [one.text for one in drawn.iter() if one.tag.endswith("title")]
    assert titles == ["sm90, Triton 3.6.0: 1 ran, 1 compiled", "sm75, Triton 3.6.0: 2 worked around"]
    bars = [(one.get("class"), float(one.get("width", 0))) for group in drawn.iter() if group.tag.endswith("}g")
            for one in group if one.tag.endswith("rect")]
    assert bars == [("ran", picture.WIDE / 2), ("compiled", picture.WIDE / 2), ("worked-around", picture.WIDE)]
    assert set(picture.COLOURS) == set(STATUSES)
    assert {one: colours[0] for one, colours in picture.COLOURS.items()} == support.MARKS
    assert "prefers-color-scheme: dark" in picture.STYLE


def test_the_picture_is_that_of_the_table() -> None:
    said = support.marks_of(support.text_of(PAGES))
    assert {card for _, _, card in said} == {card.name for card in WHOLE.card}
    drawn = picture.picture(said, support.examples(WHOLE))
    assert (PAGES.parent / support.PICTURE).read_text(encoding="utf-8") == drawn, "run: python -m matrix report"


def test_the_failures_it_began_with_are_sections_whose_evidence_is_there() -> None:
    lines = seeds.table()
    assert [line[3:] for line in lines if line.startswith("## ")] == [seed.failure for seed in seeds.SEEDS]
    assert len(seeds.SEEDS) == 6 and sum(line.startswith("Shown by `") for line in lines) == 6
    for seed in seeds.SEEDS:
        assert bool(seed.raw) != bool(seed.issues) and seed.shown
        assert all((ROOT / path).exists() for path in seed.shown), seed
    assert ("- Triton 3.2.0 and newer, before 3.3.0: the process aborts: assertion in LinearLayout::reshapeOuts"
            in lines)
    assert [line.partition(":")[0] for line in lines if line.startswith("- ")][:3] == [
        "- Triton before 3.2.0", "- Triton before 3.2.0", "- Triton 3.9.0 and newer"]


RESULTS, PAGES = ROOT / "matrix" / "results", ROOT / "docs" / "support"


@pytest.fixture(scope="module")
def some() -> list[CellState]:
    """Return the stored results and the plans of every release, each for a different share of the GPUs.

    With TEST_WHOLE=1, every release covers all GPUs.
    """
    def state(n: int, cell: Cell) -> CellState:
        result, cards = load_result(RESULTS, cell), share(WHOLE.card, n, len(WHOLE.card))
        if "plan" not in cell.layers:
            return CellState(result, Planned())
        return CellState(result, matrix.plans(cell, cards), plain=matrix.plain(result, cards))
    return [state(n, cell) for n, cell in enumerate(WHOLE.cell)]


@pytest.mark.alternate
def test_the_support_table_is_current(some: list[CellState], tmp_path: Path) -> None:
    assert support.stale(some, RESULTS, PAGES) == [], "run: python -m matrix report"
    if ALL:
        assert support.write(WHOLE, some, RESULTS, PAGES, tmp_path / "support.html",
                             check=True) == 0, "run: python -m matrix report"


def test_no_call_fails_on_any_card() -> None:
    """The support table has no failed square.

    A failure shows an error in a recipe, for example too low an estimate of shared memory.
    """
    marks = support.marks_of(support.text_of(PAGES))
    assert len(marks) > 10_000 and support.MARKS["FAILED"] not in marks.values()


@pytest.mark.parametrize("file, old, new, says", [
    ("ops.md", "| compiled |", "| ran |", " ran, now compiled"),
    ("ops.md", "3.9.0 |", "3.9.9 |", ": None, now "),
    ("reasons.md", "| backend |", "| end |", "reason: backend"),
    ("reasons.md", " torch", " ran", "reason: backend"),
    ("failures.md", "- Triton before", "- Triton until", "Triton before 3.2.0"),
    ("gpu-models.md", "| RWKV7 |", "| RWKV8 |", "| RWKV7 |"),
    ("packages.md", "## NVIDIA H200", "## A card", "## NVIDIA H200"),
    ("proven.json", '"compiled":"sm70 sm75"', '"failed":"sm70","compiled":"sm75"', " 3.0.0 failed sm70"),
    ("proven.json", "sm75 ", "", " 3.0.0 compiled sm75"), ("proven.json", ",32]", ",31]", ", now {'sm"),
    ("proven.json", '"ran":"sm90"', '"ran":""', " 3.6.0 ran sm90")])
def test_what_is_not_current_is_noticed(file: str, old: str, new: str, says: str, some: list[CellState],
                                        tmp_path: Path) -> None:
    for path in (*PAGES.glob("*.md"), support.PROVEN):
        text = path.read_text(encoding="utf-8")
        (tmp_path / path.name).write_text(text.replace(old, new) if path.name == file else text, encoding="utf-8")
    told = support.stale(some, RESULTS, tmp_path, tmp_path / support.PROVEN.name)
    assert any(says in line for line in told), told[:5]
