"""Tests of the choice of the tests that CI runs."""
from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import share

NAMES = [f"tests/test_a.py::test_{number}" for number in range(100)]


def test_the_halves_are_all_tests_and_do_not_depend_on_other_tests() -> None:
    even, odd = share.half(NAMES, 0), share.half(NAMES, 1)
    assert sorted(even + odd) == sorted(NAMES) and 30 < len(even) < 70
    assert share.half(["another", *NAMES[1:]], 0)[-10:] == even[-10:]


def test_the_commit_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = [subprocess.CompletedProcess([], *answer) for answer in (
        (0, "0000000a" + "0" * 32), (0, "0000000b" + "0" * 32), (128, ""))]
    monkeypatch.setattr(subprocess, "run", lambda *rest, **how: asked.pop(0))
    assert [share.turn() for _ in range(3)] == [0, 1, 0]

    def missing(*rest: object, **how: object) -> None:
        raise FileNotFoundError("git")
    monkeypatch.setattr(subprocess, "run", missing)
    assert share.turn() == 0
