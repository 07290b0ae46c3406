"""Tests of ``python -m matrix.gpu``: how GPUs share the cases, and which cases a record makes unnecessary.

The tests of the runs on a GPU are in tests/gpu.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flashlin import settings
from flashlin.compat import target
from flashlin.compat.target import parse
from flashlin.testing import cases, compare
from flashlin.testing.record import source_hash
from matrix import gpu, record
from matrix.results import RIGHT


@pytest.mark.parametrize(("shown", "names"), [(None, ["0", "2"]), ("4,5,7", ["4", "7"])])
def test_cards_like_the_first_one_share_the_cases(shown: str | None, names: list[str],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    cards = ("H200", "T4", "H200")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: cards[index])
    if shown is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert gpu.gpus() == names


HERE = parse("triton=3.6.0,sm=90,name=NVIDIA H200")


def row(case: str, ok: bool, **configs: str) -> dict[str, Any]:
    return {"op": "chunk_gla", "case": case, "dtype": "bfloat16", "ok": ok, "configs": configs}


def test_later_cases_take_the_place_of_earlier_ones_in_a_record() -> None:
    first = gpu.merged({}, [row("random", True, scan="1", sums="1"), row("wide", False, wide="1", sums="1"),
                            row("gone", True, gone="1")])
    # The configuration of the kernel ``sums`` is not recorded, because it also ran in a case that failed.
    assert (first["passed"], first["failed"], first["configs"]) == (1, 1, {"gone": "1", "scan": "1"})
    second = gpu.merged(first, [row("wide", True, wide="2", sums="2")])
    assert (second["passed"], second["failed"]) == (2, 0) and second["configs"] == {"gone": "1", "scan": "1",
                                                                                    "sums": "2", "wide": "2"}
    assert [one["case"] for one in second["rows"]] == ["random", "wide"]


def test_what_a_record_knows_to_be_right_is_not_run_again(monkeypatch: pytest.MonkeyPatch,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(target, "probe", lambda device: HERE)
    monkeypatch.setattr(gpu, "DTYPES", ("bfloat16",))
    monkeypatch.setattr(gpu, "row_of_case", lambda case, dtype: {"ran": case.id})
    monkeypatch.setattr(cases, "CASES",
                        [case for case in cases.CASES if case.op == "chunk_gla"
                         and case.id in ("random", "wide", "narrow")])
    would = {case.id: gpu.planned(case, "bfloat16") for case in cases.CASES}
    assert {config.split()[0] for config in would["random"]} == {
        "gla_scores_one", "gla_scores_rest", "gla_scan", "gla_states", "gla_reverse", "gla_grads_one",
        "gla_grads_rest"}

    def ran(known: dict[str, Any]) -> list[str]:
        with settings(canary="off"):
            gpu.work(0, 1, [], known)
        return [line["ran"] for line in map(json.loads, capsys.readouterr().out.splitlines())
                if "ran" in line]
    record: dict[str, Any] = {"rows": [row("random", True), row("wide", True), row("narrow", False)],
              "configs": would["random"] | would["wide"] | would["narrow"]}
    assert sorted(ran({})) == ["narrow", "random", "wide"] and ran(record) == ["narrow"]
    stale = {config: source if "gla_grads" not in config else "elsewhere"
             for config, source in record["configs"].items()}
    assert sorted(ran({**record, "configs": stale})) == ["narrow", "random", "wide"]


def test_a_full_card_a_killed_worker_and_the_end_of_the_time_are_no_verdicts(
        monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in cases.CASES if case.op == "rms_norm" and case.quick)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for error, name in ((RuntimeError("CUDA out of memory"), "not tried"),
                        (RuntimeError("CUDA error: an illegal memory access"), "error")):
        def failing(*args: Any, error: Exception = error) -> Any:
            raise error
        monkeypatch.setattr("flashlin.testing.compare.check", failing)
        assert str(error) in gpu.row_of_case(case, "float32")[name]
    monkeypatch.setattr(gpu, "gpus", lambda: ["0"])
    begin = "import json, os, time; print(json.dumps({'starting': ['op', 'case', 'float32']}), flush=True); "
    for how, seconds, name, why in (("time.sleep(60)", 1.0, "not tried", "no answer in 1 s, and"),
                                    ("os.kill(os.getpid(), 9)", 60.0, "not tried", "worker SIGKILL"),
                                    ("os.abort()", 60.0, "error", "worker SIGABRT")):
        monkeypatch.setattr(record, "python", lambda *arguments, how=how: [sys.executable, "-c", begin + how])
        [row] = gpu.collect(1, [], seconds)
        assert row["op"] == "op" and why in row[name] and not row["ok"]


def test_a_row_names_the_tensor_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in cases.CASES if case.op == "rms_norm" and case.quick)
    near = compare.Verdict("o", rms=0.005, row=0.01, allowed=0.006, ok=True)
    one_row = compare.Verdict("dk", rms=0.001, row=0.3, allowed=0.01, ok=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("flashlin.testing.compare.check", lambda *given: [near, one_row])
    found = gpu.row_of_case(case, "float32")
    assert not found["ok"] and (found["worst"], found["row"]) == ("dk", 0.3)


def test_a_record_of_other_versions_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known: list[Path | None] = []

    def collect(jobs: int, ops: list[str], seconds: float, earlier: Path | None) -> list[dict[str, Any]]:
        known.append(earlier)
        return [{**row("random", True), **dict.fromkeys(RIGHT, 0.0)} | row("random", True)]
    monkeypatch.setattr(gpu, "collect", collect)
    monkeypatch.setattr(record, "this_card", lambda: HERE)
    monkeypatch.setattr(sys, "argv", ["gpu", "--missing", "--out", str(tmp_path)])
    place = record.place(tmp_path, "gpu", HERE)
    for _ in range(2):  # first without a record, then with one
        assert gpu.main() == 0
    place.write_text(json.dumps({**json.loads(place.read_text()), "ptxas": "another"}))
    assert gpu.main() == 0 and known == [None, place, None]


def test_what_another_card_knows_is_of_these_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    known: list[Path | None] = []

    def collect(jobs: int, ops: list[str], seconds: float, other: Path | None) -> list[dict[str, Any]]:
        known.append(other)
        return []
    monkeypatch.setattr(gpu, "collect", collect)
    monkeypatch.setattr(record, "this_card", lambda: HERE)
    other = tmp_path / "gpu-other.json"
    monkeypatch.setattr(sys, "argv", ["gpu", "--known", str(other)])
    facts = {**record.made_by(HERE), "device": "another"}
    other.write_text(json.dumps(facts))
    assert gpu.main() == 0 and known == [other]
    for wrong in ({**facts, "triton": "3.2.0"}, {**facts, "capability": [8, 0]}, None):
        other.unlink() if wrong is None else other.write_text(json.dumps(wrong))
        with pytest.raises(SystemExit):
            gpu.main()
        assert f"--known: got {other}, need a record" in capsys.readouterr().err
    assert known == [other]


def test_configurations_of_kernels_that_have_changed_leave_a_record() -> None:
    source = source_hash("flashlin.kernels.simple_gla.forward", "simple_gla_scan")
    assert gpu.of_today({"simple_gla_scan BT=64": source, "simple_gla_scan BT=32": source[:-1] + "-",
                         "simple_gla_gone BT=64": source}) == {"simple_gla_scan BT=64": source}
