"""Tests of tools/same_code.py, which ignores changes of comments and texts but reports changes of code."""
from __future__ import annotations

from collections import Counter

import pytest

from tools.same_code import Change, compared, differences, masked, report

CODE = '''"""A module."""
LIMIT = 3  # at most


def check(x):
    """Check it."""
    if x > LIMIT:
        raise ValueError(f"x: got {x}, need at most {LIMIT}")
    return {"status": "ok"}
'''


def same(new: str) -> bool:
    return masked(CODE, Counter()) == masked(new, Counter())


@pytest.mark.parametrize(("old", "new"), [
    ('"""Check it."""', '"""Raise if x is too large.\n\n    More text.\n    """'),
    ('    """Check it."""\n', ""),
    ('"""A module."""\n', ""),
    ("# at most", "# the largest x"),
    ("x: got {x}, need at most {LIMIT}", "need at most {LIMIT}: got {x} for x"),
    ('"ok"', '"fine"'),
])
def test_text_may_change(old: str, new: str) -> None:
    assert old in CODE and same(CODE.replace(old, new))


@pytest.mark.parametrize(("old", "new"), [
    ("LIMIT = 3", "LIMIT = 4"),
    ("x > LIMIT", "x >= LIMIT"),
    ("got {x}", "got {x!r}"),
    ("got {x}", "got {LIMIT}"),
    ('{"status": "ok"}', '{"status": None}'),
    ("def check(x)", 'def check(x="")'),
])
def test_code_may_not_change(old: str, new: str) -> None:
    assert old in CODE and not same(CODE.replace(old, new))


def test_changed_constants_and_missing_files_are_listed() -> None:
    files, changes = differences({"a.py": CODE, "b.py": ""}, {"a.py": CODE.replace('"ok"', '"fine"')})
    assert files == ["b.py"]
    assert changes == [Change("a.py", "-", "ok"), Change("a.py", "+", "fine")]


def test_the_report_names_what_differs() -> None:
    found = {"files": ["a.py"], "kernels": ["k"], "kernels compared": 5, "texts": 4,
             "constants": [{"file": "a.py", "sign": "+", "text": "fine"}]}
    assert [*report(found)] == [
        "code differs: a.py", "kernel differs: k", "constant: a.py + 'fine'",
        "1 files differ in code, 1 of 5 jitted functions differ; 4 string constants changed, 1 of them short"]


@pytest.mark.alternate
def test_a_checkout_is_like_itself() -> None:
    from tools.kernel_facts import ROOT
    found = compared(ROOT, ROOT)
    assert found["kernels compared"] > 200 and not found["files"] + found["kernels"] + found["constants"]
