"""Tests of tools/carry_records.py, which transfers records to kernels that differ only in names."""
from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from matrix.results import by_source
from tools import carry_records, kernel_facts
from tools.carry_records import Compile, Difference, Kernel

ROOT = Path(__file__).resolve().parent.parent
KERNEL = '''
import triton
import triton.language as tl

BLOCK: tl.constexpr = tl.constexpr(16)
LOG2E = tl.constexpr(1.5)


@triton.jit
def scaled(x, scale, bias=0.0):
    """A helper."""
    return x * scale + bias


@triton.jit
def other(x, scale, bias=0.0):
    return x * scale + bias


@triton.jit
def twice(x):
    return x + x


@triton.jit
def square(x, up=0, down=0):
    return x * x + up - down


@triton.jit(do_not_specialize=["T", "scale"])
def main(q, k, o, T, scale, K: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < T
    a = tl.load(q + at, mask=inside)
    b = tl.load(k + at, mask=inside)
    tl.store(o + at, scaled(a - b, scale, bias=LOG2E) + other(b, scale) + twice(square(K, up=1)), mask=inside)
'''
Make = Callable[..., tuple[dict[str, kernel_facts.Function], str]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return made(module, *changes), which writes and imports a module with a kernel.

    It returns the kernel with all jitted functions that it calls, by name, and the kernel's full name.

    changes: pairs (old text, new text) that are replaced in the module's source.
    """
    def made(module: str, *changes: tuple[str, str], kernel: str = "main") -> Any:
        text = KERNEL
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / f"{module}.py").write_text(text)
        spec = importlib.util.spec_from_file_location(module, tmp_path / f"{module}.py")
        assert spec and spec.loader
        loaded = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, module, loaded)
        spec.loader.exec_module(loaded)
        return kernel_facts.functions_of(getattr(loaded, kernel)), f"{module}.{kernel}"
    return made


def compared(make: Make, *changes: tuple[str, str], kernel: str = "main") -> dict[str, str]:
    return carry_records.renamed(*make("made_before"), *make("made_after", *changes, kernel=kernel))


RENAMES = {
    "moved": (), "kernel": (("def main", "def start"),), "helper": (("scaled", "tile_scaled"),),
    "constant": (("BLOCK", "SIZE"),), "local": (("inside", "mask_of"),),
    "comment": (('"""A helper."""', "# nothing"),),
    "keyword": (("scale, bias=LOG2E)", "bias=LOG2E, scale=scale)"),),
    "decorator": (('["T", "scale"]', '["scale", "T"]'),),
    "parameter": (("(q, k, o, T, scale,", "(q, k, o, L, factor,"), ('["T", "scale"]', '["factor", "L"]'),
                  ("at < T", "at < L"), ("a - b, scale", "a - b, factor"), ("(b, scale)", "(b, factor)"))}


@pytest.mark.parametrize("name", RENAMES)
def test_names_may_change(name: str, make: Make) -> None:
    parameters = compared(make, *RENAMES[name], kernel="start" if name == "kernel" else "main")
    expected = {one: one for one in ("q", "k", "o", "T", "scale", "K")}
    assert parameters == expected | ({"T": "L", "scale": "factor"} if name == "parameter" else {})


ADDED = (("(q, k, o, T,", "(q, k, more, o, T,"),
         ("    b = tl", "    if more is not None:\n        a += tl.load(more)\n    b = tl"))


@pytest.mark.parametrize(("change", "reason"), [((), ""), (("if more is not", "if T is not"), "main"),
                                                (("a += tl.load(more)", "pass\n    a += 1"), "main")])
def test_a_new_parameter_that_is_none_changes_no_code(change: tuple[str, str], reason: str, make: Make) -> None:
    (old, key), (_, new_key) = make("made_before"), make("made_after", *ADDED, *([change] if change else []))
    before = {new_key: old[key].parameters}
    new = kernel_facts.functions_of(sys.modules["made_after"].main, before)
    if not reason:
        assert carry_records.renamed(old, key, new, new_key) == {name: name for name in old[key].parameters}
        moved = Kernel(key, "a:1", new_key, "b:2", parameters={name: name for name in old[key].parameters},
                       order=("q", "k", "more", "o", "T", "scale", "K"))
        launch = {"module": "", "arguments": {"q": "*bf16", "k": "*bf16", "o": "*bf16", "T": "i32"},
                  "constants": {"K": 64}, "config": "main K=64 warps=4 stages=1"}
        assert list(moved.launch(launch)["arguments"].items()) == [
            ("q", "*bf16"), ("k", "*bf16"), ("more", None), ("o", "*bf16"), ("T", "i32")]
        return
    with pytest.raises(Difference, match=reason):
        carry_records.renamed(old, key, new, new_key)


CHANGES = {
    "operator": ((("a - b", "a + b"),), "Sub"),
    "value of a constant": ((("constexpr(16)", "constexpr(32)"),), "args [ 0 16, now ...args [ 0 32"),
    "renamed constant of another value": ((("LOG2E = tl.constexpr(1.5)", "RATE = tl.constexpr(2.5)"),
                                           ("LOG2E", "RATE")), "scaled = 2 2.5"),
    "body of a helper": ((("return x + x", "return x - x"),), "made_before.twice"),
    "default of a helper": ((("other(x, scale, bias=0.0)", "other(x, scale, bias=1.0)"),), "other"),
    "order of arguments": ((("scaled(a - b, scale,", "scaled(scale, a - b,"),), "made_before.main"),
    "another keyword": ((("K, up=1", "K, down=1"),), "other arguments of made_before.square"),
    "another parameter": ((("bias=LOG2E", "bias=BLOCK"),), "scaled = 2 16"),
    "swapped names": ((("a - b", "b - a"),), "name a would become both a and b"),
    "swapped parameters": ((("(q, k, o,", "(k, q, o,"),), "their order has changed"),
    "swapped parameters everywhere": ((("(q, k, o,", "(k, q, o,"), ("load(q", "load(_"), ("load(k", "load(q"),
                                       ("load(_", "load(k")), "their order has changed"),
    "swapped helpers": ((("twice(square(K, up=1))", "square(twice(K), up=1)"),), "made_before.main"),
    "swapped helpers and bodies": ((("def twice", "def _"), ("def square", "def twice"),
                                    ("def _", "def square")), "made_before.twice"),
    "two helpers into one": ((("other(b", "scaled(b"),), "made_before.scaled and made_before.other would"),
    "two locals into one": ((("    b = ", "    a = "), ("a - b", "a - a"), ("other(b", "other(a")),
                            "names a and b would both become a"),
    "one local into two": ((("up=1)), mask=inside)", "up=1)), mask=outside)"), ("a = tl.load",
                               "outside = inside\n    a = tl.load")),
                           "made_before.main"),
    "no longer specialised": ((('["T", "scale"]', '["T"]'),), "made_before.main"),
    "another function of Triton": ((("tl.store", "tl.atomic_add"),), "store"),
    "more code": ((("up=1)), mask=inside)", "up=1)), mask=inside)\n    tl.store(o, 1.0)"),),
                  "made_before.main"),
    "fewer parameters": (((", bias=0.0):\n    return", "):\n    bias = 0.0\n    return"),), "parameters")}


@pytest.mark.parametrize("name", CHANGES)
def test_anything_else_may_not(name: str, make: Make) -> None:
    changes, reason = CHANGES[name]
    with pytest.raises(Difference) as told:
        compared(make, *changes)
    assert reason in str(told.value)


def facts(make: Make, source: str, module: str, *changes: tuple[str, str],
          kernel: str = "main") -> dict[str, Any]:
    functions, key = make(module, *changes, kernel=kernel)
    return {key: {"module": module, "name": kernel, "source": source, "parameters": functions[key].parameters,
                  "functions": {name: list(one) for name, one in functions.items()}}}


def test_kernels_are_found_by_their_source(make: Make) -> None:
    rename, change = ("def main", "def start"), ("a - b", "a + b")
    old = facts(make, "one:1", "one")
    sources = [("main", "one:1")]

    def decided(new: dict[str, Any], mapping: dict[str, str] | None = None) -> tuple[str, str]:
        [kernel] = carry_records.kernels(sources, old, new, mapping or {})
        return kernel.new, kernel.reason
    assert carry_records.kernels(sources, old, old, {}) == []
    moved = facts(make, "two:2", "two", rename, kernel="start")
    again = facts(make, "three:3", "three", ("def main", "def begin"), kernel="begin")
    other = facts(make, "four:4", "four", change)
    assert decided(moved) == ("two.start", "")
    assert decided({**moved, **other}) == ("two.start", "")
    assert decided({**moved, **again}) == ("", "several kernels have its source: two.start, three.begin")
    assert decided({**moved, **again}, {"one.main": "three.begin"}) == ("three.begin", "")
    assert "Sub" in decided(other)[1] and decided(other)[0] == ""
    assert decided(moved, {"one.main": "two.gone"}) == ("", "this checkout has no two.gone")
    here = facts(make, "one:2", "one", change)
    assert decided({**here, **moved})[0] == "", "the record belongs to the kernel that has its name now"
    [stale] = carry_records.kernels([("main", "one:0")], old, moved, {})
    assert (stale.new, stale.reason) == ("", carry_records.STALE)


def test_two_kernels_may_not_become_one(make: Make) -> None:
    old = facts(make, "one:1", "one") | facts(make, "two:2", "two", ("def main", "def start"), kernel="start")
    new = facts(make, "three:3", "three", ("def main", "def begin"), kernel="begin")
    found = carry_records.kernels([("main", "one:1"), ("start", "two:2")], old, new, {})
    assert [(one.new, one.reason) for one in found] == [("", "another kernel also became three.begin")] * 2


MOVED = Kernel("a.main", "a:1", "b.start", "b:2", parameters={"BT": "ROWS", "q": "query"})
CHANGED = Kernel("a.lost", "a:3", reason="Sub")
CONFIG, NEW = "main BT=64 BV=32 warps=4 stages=1 dot", "start ROWS=64 BV=32 warps=4 stages=1 dot"


def test_configurations_and_launches_get_the_new_names() -> None:
    assert MOVED.config(CONFIG) == NEW
    fields = {"module": "a", "kernel": "main", "arguments": {"q": "*bf16"}, "constants": {"BT": 64, "BV": 32},
              "num_warps": 4, "num_stages": 1, "config": CONFIG}
    assert MOVED.launch(fields) == {
        "module": "b", "kernel": "start", "arguments": {"query": "*bf16"},
        "constants": {"ROWS": 64, "BV": 32}, "num_warps": 4, "num_stages": 1, "config": NEW}


@pytest.mark.parametrize("drop", [False, True])
def test_the_ledger_has_carried_launches_under_new_names(drop: bool) -> None:
    good, slow = {"3.6.0": {"sm90": 0}}, {"3.6.0": {"sm80 sm86": [0, 5000], "sm90": 0}}
    lost, kept = "lost BT=64 warps=4 stages=1", "kept BT=64 warps=4 stages=1"
    ledger = {(CONFIG, "01"): good, (CONFIG, "02"): slow, (CONFIG, "03"): good, (lost, "04"): good,
              (kept, "05"): good}
    identities = {(CONFIG, "01"): Compile(NEW, "11"), (CONFIG, "02"): Compile(NEW, ""),
                  (CONFIG, "03"): Compile(NEW, "")}
    sources, fresh, counts = carry_records.carry_ledger(
        {"main": "a:1", "lost": "a:3", "kept": "a:4"}, ledger, [MOVED, CHANGED], identities, drop)
    assert sources == {"start": "b:2", "kept": "a:4", **({} if drop else {"lost": "a:3"})}
    assert fresh == {(NEW, "11"): good, (NEW, "02"): {"3.6.0": {"sm80 sm86": [0, 5000]}}, (kept, "05"): good,
                     **({} if drop else {(lost, "04"): good})}
    assert counts == {("a.main", "carried"): 1, ("a.main", "kept"): 1, ("a.main", "gone"): 1}


def test_a_name_that_is_taken_loses_what_it_stood_for() -> None:
    old = {"main": "a:1", "start": "a:0"}
    ledger = {(CONFIG, "01"): {"3.6.0": {"sm90": 0}}, (NEW, "07"): {"3.6.0": {"sm90": {"status": "abort"}}}}
    gone = Kernel("a.start", "a:0", reason="no new kernel has its source")
    sources, fresh, _ = carry_records.carry_ledger(old, ledger, [MOVED, gone],
                                                   {(CONFIG, "01"): Compile(NEW, "11")}, False)
    assert sources == {"start": "b:2"} and [*fresh] == [(NEW, "11")]


def test_records_of_gpus_figures_and_the_launch_table() -> None:
    record = {"device": "H100",
              "configs": by_source({CONFIG: "a:1", "lost warps=4": "a:3", "main warps=1": "a:9"})}
    found = [MOVED, CHANGED]
    fresh, counts = carry_records.carry_gpu(record, found, False)
    assert fresh == {"device": "H100",
                     "configs": by_source({NEW: "b:2", "lost warps=4": "a:3", "main warps=1": "a:9"})}
    assert counts["a.main", "carried"] == counts["a.lost", "gone"] == 1
    assert "a:3 lost" in fresh["configs"]
    taken = {"configs": by_source({CONFIG: "a:1", NEW: "a:9"})}  # an old kernel has the new name
    assert carry_records.carry_gpu(taken, found, False)[0]["configs"] == by_source({NEW: "b:2"})
    assert "a:3 lost" not in carry_records.carry_gpu(record, found, True)[0]["configs"]
    figures = {"sm90": {"op bf16 main": ["main-01", 0, 255], "op bf16 main again": ["main-02", 0, 9],
                        "op bf16 lost": ["lost-04", 1, 1]}}
    assert carry_records.carry_figures(figures, found, {"main-01": "start-11", "main-02": "start-12"})[0] == {
        "sm90": {"op bf16 start": ["start-11", 0, 255], "op bf16 start again": ["start-12", 0, 9],
                 "op bf16 lost": ["lost-04", 1, 1]}}
    assert carry_records.carry_proven({CONFIG: 1, "start old": 2, "lost warps=4": 3}, found) == {
        NEW: 1, "lost warps=4": 3}


def test_a_launch_in_another_tile_is_made_of_a_known_one() -> None:
    known = {"kernel": "main", "constants": {"BT": 16, "BV": 16, "K": 8}, "num_warps": 1, "num_stages": 1,
             "config": "main BT=16 BV=16 warps=1 stages=1"}
    [one] = carry_records.by_tile([(CONFIG, "01"), ("other BT=1 warps=1 stages=1", "02")], [known])
    assert one == {**known, "constants": {"BT": 64, "BV": 32, "K": 8}, "num_warps": 4, "config": CONFIG}


@pytest.mark.alternate
def test_help_teaches_and_a_wrong_checkout_is_one_line() -> None:
    def said(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "tools.carry_records", *arguments], cwd=ROOT, text=True,
                              capture_output=True, check=False, timeout=120)
    text = said("--help").stdout
    assert "examples:" in text and "--write" in text and "module.kernel" in text
    wrong = said("no-such-revision")
    assert wrong.returncode == 1 and wrong.stderr.startswith("got no-such-revision, need a folder")


@pytest.mark.alternate
def test_every_kernel_of_flashlin_can_be_read() -> None:
    """The comparison supports all code in flashlin's kernels, so every record can be transferred."""
    found = kernel_facts.ask(ROOT, "kernels", package="flashlin.kernels")
    unknown = [f"{name}: {token[1]}" for name, kernel in found.items()
               for _, tokens in kernel["functions"].values() for token in tokens if token[0] == "unknown"]
    assert not unknown
