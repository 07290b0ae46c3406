"""Tests of matrix/results/blackwell-warps-*.json.

The record names the known issues that reduce the number of warps today. A user who ignores these issues
gets the original number of warps.
"""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from matrix import cells
from matrix.blackwell_warps import COLUMNS, WARPS, limiting, started

RECORDS = sorted((Path(cells.__file__).parent / "results").glob("blackwell-warps-*.json"))
RELEASES = [(path, triton) for path in RECORDS for triton in json.loads(path.read_text())["ignore"]]


@pytest.mark.parametrize(("path", "triton"), RELEASES,
                         ids=[f"{path.stem[-5:]}-{triton}" for path, triton in RELEASES])
def test_who_ignores_what_the_record_names_has_four_warps(path: Path, triton: str) -> None:
    record = json.loads(path.read_text())
    target = next(one for one in cells.CARDS if one.name == record["card"]).target(triton, torch.__version__)
    ids = record["ignore"][triton]
    assert ids == limiting(target)
    with_issues, without = ({launch.kernel: launch.num_warps for launch in started(target, ignored)}
                            for ignored in ([], ids))
    limited = {kernel for kernel, warps in without.items() if with_issues.get(kernel, 2) < warps}
    assert max(with_issues.values()) <= 2 and {without[kernel] for kernel in limited} <= {*WARPS}
    assert {"simple_gla_scan", "delta_scan", "gla_scan", "dplr_scan"} <= limited


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem[-5:])
def test_the_record_has_four_and_eight_warps_of_each_release(path: Path) -> None:
    record = json.loads(path.read_text())
    assert record["columns"] == [*COLUMNS]
    assert {triton: {row[COLUMNS.index("warps")] for row in rows} >= {*WARPS}
            for triton, rows in record["releases"].items()} == dict.fromkeys(record["releases"], True)
