"""Tests of tools/same_ptx.py: its choice of launches, and its comparison of PTX."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools import same_ptx
from tools.carry_records import Kernel

PTX = """// Generated
.visible .entry main(
\t.param .u64 main_param_0
)
{
\tld.param.u64 %rd1, [main_param_0]; // 8 bytes
\tcall (%r1), helper, (%r2);
}
.func  (.param .b32 func_retval0) helper(
\t.param .b32 helper_param_0
)
"""


def test_names_and_comments_are_masked_and_nothing_else() -> None:
    renamed = PTX.replace("main", "start_of").replace("helper", "other").replace("// Generated", "\n// by\n")
    assert same_ptx.masked(PTX) == same_ptx.masked(renamed)
    assert "function0_param_0" in same_ptx.masked(PTX) and "call (%r1), function1" in same_ptx.masked(PTX)
    for old, new in (("u64 %rd1", "u32 %rd1"), ("%r2", "%r3"), ("main_param_0]", "main_param_1]"),
                     ("helper, (", "main, (")):
        assert same_ptx.masked(PTX) != same_ptx.masked(PTX.replace(old, new))


def launch(kernel: str, size: int) -> dict[str, Any]:
    return {"module": "a", "kernel": kernel, "arguments": {}, "constants": {"BT": size},
            "config": f"{kernel} BT={size} warps=4 stages=1"}


def test_a_seed_chooses_of_each_kernel_about_as_many() -> None:
    found = [(("3.6.0", "sm90"), launch(name, size)) for name, of in (("one", 9), ("two", 2), ("kept", 4))
             for size in range(of)]
    partners = {f"a.{name}": Kernel(f"a.{name}", "", f"b.new_{name}") for name in ("one", "two")}
    sample = same_ptx.chosen(found, partners, 1, 6)
    assert sample == same_ptx.chosen(found[::-1], partners, 1, 6) != same_ptx.chosen(found, partners, 2, 6)
    kernels = sorted(one.old["kernel"] for one in sample)
    assert kernels == ["one"] * 4 + ["two"] * 2 and len({str(one) for one in sample}) == 6
    assert {(one.sm, one.new["module"], one.new["kernel"]) for one in sample} == {
        (90, "b", "new_one"), (90, "b", "new_two")}
    assert len(same_ptx.chosen(found, partners, 1, 60)) == 11


@pytest.mark.parametrize(("was", "now", "status"), [
    (("ok", "", PTX), ("ok", "", PTX.replace("main", "start")), "same"),
    (("ok", "", PTX), ("ok", "", PTX.replace("%r2", "%r3")), "differs"),
    (("ok", "", PTX), ("abort", "SIGABRT", ""), "differs"),
    (("abort", "SIGABRT", ""), ("abort", "SIGABRT", ""), "not compiled"),
    (("abort", "SIGABRT", ""), ("ptxas", "error", ""), "differs")])
def test_a_row_says_what_differs(was: tuple[str, str, str], now: tuple[str, str, str], status: str,
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"old": was, "new": now}

    def ask(checkout: Path, question: str, *, environment: Any, folder: str, **given: Any) -> list[list[str]]:
        assert environment["TRITON_DISABLE_LINE_INFO"] == "1" and question == "compiled"
        *said, text = answers[checkout.name]
        if text:
            Path(folder, "0.ptx").write_text(text)
        return [said]
    monkeypatch.setattr(same_ptx, "ask", ask)
    monkeypatch.setattr(same_ptx, "triton_environment", lambda triton: {})
    sample = [same_ptx.Chosen("sm90", launch("main", 1), launch("start", 1))]
    [row] = same_ptx.compared(sample, "3.6.0", Path("old"), Path("new"), 1, 1)
    assert row["status"] == status
    assert bool(row["first"]) == (status == "differs" and was[2] != now[2])
