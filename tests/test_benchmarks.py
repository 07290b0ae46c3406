"""Tests of the benchmark code without a GPU: floors, inputs, timing, table, plot and the file of winners."""
from __future__ import annotations

import inspect
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner

import flashlin
from benchmarks import calls, compare, first, invariant, report, sides, timing, training
from benchmarks.calls import OPS, Shape, find
from benchmarks.winners import Winners
from flashlin import policy
from matrix import warming

EVERY = [op for ops in OPS.values() for op in ops]
RECORD: dict[str, Any] = {"device": "A card", "triton": "3.6.0", "torch": "2.11", "first": []}


# -- floors and inputs

@pytest.mark.parametrize(("op", "shape", "floors"), [
    # q, k, v, o: 4 * 4096 * 32 * 128 * 2 bytes each; g in fp32. Backward: inputs again, do, all gradients.
    ("chunk_simple_gla", Shape(4, 4096, 32, 128), (4 * 134217728 + 2097152, 11 * 134217728 + 3 * 2097152)),
    # 16 heads of q and k; 48 heads of v, o, g (fp32) and beta (bf16)
    ("chunk_gated_delta_rule", Shape(1, 8192, 16, 128, HV=48),
     (2 * 33554432 + 2 * 100663296 + 8192 * 48 * 6,
      6 * 33554432 + 5 * 100663296 + 3 * 8192 * 48 * 6)),
    # the state, 1 MiB in fp32, is read and written
    ("fused_recurrent_retention", Shape(1, 1, 16, 128), (2 * 16 * 128 * 128 * 4 + 4 * 16 * 128 * 2,)),
    # x, w -> y. Backward: x and w again, dy and the two gradients.
    ("rms_norm", Shape(1, 16384, 1, 4096), (2 * 134217728 + 8192, 5 * 134217728 + 3 * 8192)),
    ("layer_norm", Shape(1, 524288, 1, 128), (2 * 134217728 + 2 * 256, 5 * 134217728 + 6 * 256)),
    # the cache of 4 taps is also read and written
    ("causal_conv1d_update", Shape(128, 1, 1, 4096), (2 * 128 * 4096 * (1 + 1 + 4 + 4) + 4096 * 4 * 2,)),
])
def test_a_floor_is_each_tensor_once(op: str, shape: Shape, floors: tuple[int, ...]) -> None:
    assert tuple(calls.floor(find(op), shape).values()) == floors


@pytest.mark.parametrize("op", EVERY, ids=lambda op: f"{op.name}-{op.output}")
def test_inputs_are_what_the_op_takes_and_the_floor_counts(op: calls.Op) -> None:
    given = calls.inputs(op, op.small, "cpu")
    runs = calls.runs(getattr(flashlin, op.name), op, op.small, "cpu")
    o = calls.output(runs["forward"]())
    tensors = [x for x in given.values() if isinstance(x, torch.Tensor)]
    moved = sum(x.nbytes for x in (*tensors, o)) + (given["cache"].nbytes if "cache" in given else 0)
    if op.keeps:
        moved += given["initial_state"].nbytes
    assert moved == calls.floor(op, op.small)["forward"]
    assert set(given) <= set(inspect.signature(getattr(flashlin, op.name)).parameters)
    if op.gradients:
        assert [x.shape for x in runs["both"]()] == [x.shape for x in tensors]


def test_vectors_of_length_one_and_layouts() -> None:
    given = {op: calls.inputs(find(op), find(op).small, "cpu") for op in ("chunk_delta_rule", "chunk_rwkv7")}
    for x in (given["chunk_delta_rule"]["k"], given["chunk_rwkv7"]["a"]):
        assert torch.allclose(x.float().norm(dim=-1), torch.ones(1), atol=0.01)
    assert [calls.inputs(op, op.small, "cpu")["u"].stride() for op in OPS["selective_scan"]] == [
        (132, 66, 1), (132, 1, 2)]


def test_a_packed_batch_is_uneven_and_whole() -> None:
    lengths = calls.uneven(32768, 32)
    assert (len(lengths), sum(lengths)) == (32, 32768)
    assert 15 < max(lengths) / min(lengths) < 17
    small = Shape(1, 66, 2, 16, packed=3)
    given = calls.inputs(find("chunk_gla"), small, "cpu")
    assert (given["cu_seqlens"][0], given["cu_seqlens"][-1], len(given["cu_seqlens"])) == (0, 66, 4)


def test_every_case_has_a_name_of_its_own() -> None:
    for family, ops in OPS.items():
        assert len(calls.cases(family)) == sum(len(op.shapes) for op in ops)
    assert list(calls.cases("gla", shapes=["1x32768x8x128"])) == ["chunk_gla 1x32768x8x128 v"]


# -- timing, on a simulated GPU whose clock is computed

class Card:
    """A simulated host with a GPU queue.

    now: time of the host in seconds.
    done: time at which the queue is empty, in seconds.
    captured: GPU seconds of the graph that is being captured; None outside of a capture.
    debug: torch's sync debug mode; "error" makes synchronizing calls raise.
    """

    def __init__(self) -> None:
        self.now, self.done = 0.0, 0.0
        self.captured: float | None = None
        self.debug = "default"
        self.streams: list[str] = []
        self.cuda = SimpleNamespace(
            is_available=lambda: True, synchronize=self.wait, Event=lambda enable_timing: Event(self),
            Stream=object, stream=lambda stream: nullcontext(), current_stream=lambda: "first",
            set_stream=self.streams.append, CUDAGraph=lambda: Graph(self), graph=self.capturing,
            _sleep=lambda cycles: self.run(0, cycles / 2e9), memory_allocated=lambda: 2**20,
            max_memory_allocated=lambda: 4 * 2**20, reset_peak_memory_stats=lambda: None,
            set_sync_debug_mode=partial(setattr, self, "debug"))

    def wait(self) -> None:
        if self.debug == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        self.now = max(self.now, self.done)

    def run(self, host: float, card: float) -> None:
        self.now += host
        if self.captured is None:
            self.done = max(self.done, self.now) + card
        else:
            self.captured += card

    @contextmanager
    def capturing(self, graph: Graph, stream: object) -> Iterator[None]:
        self.captured = 0.0
        try:
            yield
        finally:
            graph.seconds, self.captured = self.captured, None


class Graph:
    def __init__(self, card: Card) -> None:
        self.card, self.seconds = card, 0.0

    def replay(self) -> None:
        self.card.run(5e-6, self.seconds)


class Event:
    def __init__(self, card: Card) -> None:
        self.card, self.at = card, 0.0

    def record(self) -> None:
        self.at = max(self.card.now, self.card.done)

    def query(self) -> bool:
        return self.at <= self.card.now

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card()
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=made.cuda))
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: made.now))
    monkeypatch.setattr(timing, "_bare", lambda: partial(made.run, 20e-6, 2e-6))
    timing._cycles_per_ms.cache_clear()
    return made


@pytest.mark.parametrize(("host", "device"), [(200e-6, 50e-6), (50e-6, 2000e-6)])
def test_the_card_the_host_and_the_wall_are_told_apart(card: Card, host: float, device: float) -> None:
    found = timing.compared({"call": partial(card.run, host, device)}, rounds=3)["call"]
    assert found["device_ms"]["median"] == pytest.approx(1e3 * device, rel=0.1)
    assert found["wall_ms"]["median"] == pytest.approx(1e3 * max(host, device), rel=0.3)
    assert found["host_us"]["median"] == pytest.approx(1e6 * host)
    assert found["launches"]["median"] == pytest.approx(host / 20e-6)
    assert (found["how"], found["peak_mb"]) == ("graph", 3.0)


def test_a_call_that_waits_for_the_card_is_timed_by_events_and_says_so(card: Card) -> None:
    def call() -> None:
        assert card.captured is None, "a call that waits must not run in a capture"
        card.run(10e-6, 100e-6)
        card.wait()
    found = timing.compared({"call": call, "other": partial(card.run, 1e-5, 1e-3)}, rounds=3)
    assert found["call"]["how"] == "events: RuntimeError: called a synchronizing CUDA operation"
    assert "host_us" not in found["call"] and "launches" not in found["call"]
    assert card.streams == ["first"] and card.debug == "default"
    assert found["other"]["how"] == "graph"


def test_the_spread_is_the_median_and_the_quartiles() -> None:
    assert timing.spread([5.0, 1.0, 2.0, 3.0, 4.0]) == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert timing.spread([1.23456]) == dict.fromkeys(("median", "low", "high"), 1.235)


# -- a run on this machine

@pytest.mark.parametrize(("what", "least"), [("forward", 0.05), ("both", 0.2)])
def test_the_wait_for_a_first_result_is_that_call_s(monkeypatch: pytest.MonkeyPatch, what: str,
                                                    least: float) -> None:
    calls = {"forward": partial(time.sleep, 0.05), "both": partial(time.sleep, 0.2)}
    monkeypatch.setattr(first, "runs", lambda *_: calls)
    assert least <= first.waited(find("chunk_gla"), what, Shape(1, 66, 2, 16), "cpu") < least + 0.15


def test_a_failure_is_the_row_s_result_and_the_others_are_timed() -> None:
    found = timing.compared({"good": lambda: math.sqrt(2), "bad": lambda: 1 / 0}, rounds=3)
    assert found["bad"] == {"failed": "ZeroDivisionError: division by zero"}
    assert 0 < found["good"]["wall_ms"]["median"] < 1


def test_the_command_writes_a_record_that_can_be_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    """The record keeps earlier rows that a new run does not measure."""
    monkeypatch.setattr(compare, "sides", lambda op, shape: {
        **dict.fromkeys(("fla", "flashlin"), getattr(flashlin, op.name)), "FlashQLA": "not installed"})
    monkeypatch.setattr(compare, "refuses", lambda: True)
    monkeypatch.setattr(warming, "hurry", lambda: None)
    monkeypatch.setattr(compare, "Winners", lambda *_: SimpleNamespace(write=lambda: None))
    arguments = ["compare", "--op", "simple_gla", "--device", "cpu", "--small", "--rounds", "2", "--out",
                 str(tmp_path)]
    waits = {"op": "chunk_simple_gla", "empty": {"forward": 2.22, "both": 6.0},
             "full": {"forward": "its time was up"}}
    monkeypatch.setattr(compare, "first", lambda op, device: waits)
    for more in (["--first"], ["--shape", "1x66x2x16", "--op", "retention"]):
        monkeypatch.setattr("sys.argv", arguments + more)
        compare.main()
    beside = json.loads(next(tmp_path.glob("speed-retention-*.json")).read_text())
    assert [row["op"] for row in beside["rows"]] == ["chunk_retention"]
    monkeypatch.setattr("sys.argv", [*arguments, "--op", "mamba2"])
    with pytest.raises(SystemExit):
        compare.main()
    assert "got ops of fla and mamba_ssm, need one package at a time" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", arguments)
    compare.main()
    record = json.loads(next(tmp_path.glob("speed-simple_gla-*.json")).read_text())
    assert [row["op"] for row in record["rows"]] == ["chunk_simple_gla", "fused_recurrent_simple_gla"]
    assert [row["refused"] for row in record["rows"]] == [True, False]
    assert "both" not in record["rows"][1]
    assert "FlashQLA  not installed" in capsys.readouterr().out
    assert record["rows"][0]["forward"]["fla"]["differs"] == 0
    page = "\n".join(report.pages(tmp_path).values())
    assert "| fla |" in page and "| `chunk_simple_gla` | 2.2 | 6.0 | - | - |" in page
    assert compare.kept(next(tmp_path.glob("speed-simple_gla-*.json")), {"fla": "0.0"}) == {}


# -- the packages that are compared

@pytest.fixture
def other_packages(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace fla's module that refuses a backward, FlashQLA and cuDNN by fakes, and return fla's."""
    chunk_o = SimpleNamespace(IS_NVIDIA_HOPPER=True, TRITON_ABOVE_3_4_0=True, TRITON_ABOVE_3_7_1=False)
    fakes = {"fla.ops.common.chunk_o": chunk_o,
             "flash_qla": SimpleNamespace(chunk_gated_delta_rule=lambda **given: given),
             "cudnn.linear_attention.ops": SimpleNamespace(kimi_delta_attention=lambda *given, **more: (
                 given[2].new_full(given[2].shape, len(more)), given, more))}
    real = sides.importlib.import_module
    monkeypatch.setattr(sides.importlib, "import_module", lambda name: fakes[name] if name in fakes else real(name))
    monkeypatch.setattr(sides, "module_of", lambda home: SimpleNamespace(
        **{op.name: lambda **given: (chunk_o.IS_NVIDIA_HOPPER, os.environ.get("FLA_FLASH_QLA")) for op in EVERY}))
    for switch in sides.SWITCHES:
        monkeypatch.setenv(switch, "user")  # restored by monkeypatch after the test
        monkeypatch.delenv(switch)
    return chunk_o


@pytest.mark.parametrize(("op", "layer", "names"), [
    ("chunk_gated_delta_rule", "Qwen3-Next", {"fla", "fla (Triton)", "FlashQLA"}),
    ("chunk_gated_delta_rule", "GatedDeltaNet", {"fla", "fla (Triton)", "FlashQLA"}),
    ("chunk_comba", "", {"fla", "fla (Triton)"}), ("chunk_rwkv6", "", {"fla"}),
    ("chunk_kda", "", {"fla", "fla (Triton)", "cuDNN"}),
    ("chunk_kda", "KimiDeltaAttention", {"fla", "fla (Triton)", "cuDNN", "cuDNN (own gate)"}),
    ("chunk_gla", "", {"fla"}), ("chunk_simple_gla", "", {"fla", "fla (Triton)"}),
    ("mamba_chunk_scan_combined", "Mamba2", {"mamba_ssm"})])
@pytest.mark.usefixtures("other_packages")
def test_each_op_is_compared_with_every_package_that_has_it(op: str, layer: str, names: set[str]) -> None:
    one = next(one for one in EVERY if (one.name, one.layer) == (op, layer))
    assert set(sides.sides(one, Shape(1, 64, 2, 128))) == {"flashlin", *names}


def test_fla_runs_as_installed_and_with_triton_alone(other_packages: SimpleNamespace) -> None:
    found = sides.sides(find("chunk_simple_gla"), Shape(1, 64, 2, 128))
    both, alone = found["fla"], found["fla (Triton)"]
    assert callable(both) and callable(alone)
    for _ in range(2):
        assert both() == (True, None)
        assert alone() == (False, "0")
    assert sides.refuses() is False, "the refusal stays off until fla runs as installed again"
    assert both() == (True, None) and sides.refuses() is True
    assert sides.stop_refusing() is True and other_packages.IS_NVIDIA_HOPPER is False


def detached(op: calls.Op, shape: Shape) -> dict[str, Any]:
    return {name: x.detach() if isinstance(x, torch.Tensor) else x
            for name, x in calls.inputs(op, shape, "cpu").items()}


@pytest.mark.usefixtures("other_packages")
@pytest.mark.parametrize(("side", "options"), [("cuDNN", 1), ("cuDNN (own gate)", 7)])
def test_cudnn_gets_the_gate_of_a_layer_computed_before_or_in_its_kernel(side: str, options: int) -> None:
    one = next(one for one in EVERY if one.layer == "KimiDeltaAttention")
    shape = Shape(2, 8, 2, 128)
    call = sides.sides(one, shape)[side]
    assert callable(call)
    o = call(**detached(one, shape))
    assert o.shape == (2, 8, 2, 128)
    assert o.unique().item() == options, "plan_name, and six arguments of the gate in the kernel"


@pytest.mark.usefixtures("other_packages")
def test_flashqla_gets_the_gate_of_a_layer_computed_before() -> None:
    one, plain = (next(one for one in EVERY if (one.name, one.layer) == ("chunk_gated_delta_rule", layer))
                  for layer in ("GatedDeltaNet", "Qwen3-Next"))
    shape = Shape(2, 8, 2, 128)
    call = sides.sides(one, shape)["FlashQLA"]
    assert callable(call)
    given = detached(one, shape)
    passed = call(**given)
    expected = -given["A_log"].exp() * torch.nn.functional.softplus(given["g"].float() + given["dt_bias"])
    torch.testing.assert_close(passed.pop("g"), expected)
    torch.testing.assert_close(passed.pop("beta"), given["beta"].sigmoid())
    assert passed.keys() == {"q", "k", "v", "use_qk_l2norm_in_kernel", "state_v_first", "auto_cp"}
    given = detached(plain, shape)
    passed = call(**given)
    assert passed["g"] is given["g"] and passed["beta"] is given["beta"]


def test_an_output_that_differs_is_recorded() -> None:
    rows = {name: figures(1.0) for name in ("flashlin", "fla", "cuDNN")}
    rows["FlashQLA"] = {"failed": "no"}
    one = torch.ones(4)
    compare.differences(rows, {"flashlin": lambda: one, "fla": lambda: (1.5 * one, None), "cuDNN": lambda: one,
                               "FlashQLA": lambda: 1 / 0})
    assert {name: found.get("differs") for name, found in rows.items()} == {
        "flashlin": None, "fla": 0.5, "cuDNN": 0, "FlashQLA": None}


@pytest.mark.parametrize(("which", "layers"), [
    ("layers", [True]), ("plain", [False]), ("all", [False, True])])
def test_the_command_measures_the_calls_of_layers_alone(which: str, layers: list[bool], tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "measured", lambda op, *rest: {
        "op": op.name, "layer": op.layer, "refused": False})
    monkeypatch.setattr(compare, "refuses", lambda: False)
    monkeypatch.setattr(warming, "hurry", lambda: None)
    monkeypatch.setattr(compare, "Winners", lambda *_: SimpleNamespace(write=lambda: None))
    monkeypatch.setattr("sys.argv", ["compare", "--op", "kda", "--device", "cpu", "--small", "--calls", which,
                                     "--out", str(tmp_path)])
    compare.main()
    rows = json.loads(next(tmp_path.glob("speed-kda-*.json")).read_text())["rows"]
    assert sorted({bool(one["layer"]) for one in rows}) == layers


# -- the tables and the plot

def figures(ms: float, **more: Any) -> dict[str, Any]:
    return {"how": "graph", "device_ms": {"median": ms, "low": ms, "high": ms}, "wall_ms": {"median": ms + 1},
            **more}


def row(op: str = "chunk_gla", layer: str = "", **others: Any) -> dict[str, Any]:
    return {"op": op, "layer": layer, "shape": "1x32768x8x128", "arguments": "q k v g:gk", "refused": True,
            "versions": {"fla": "0.6.0"},
            "forward": {"floor_ms": 0.25, "flashlin": figures(1.0, launches={"median": 4.04}, peak_mb=10.4),
                        **others},
            "both": {"floor_ms": 1.0, "flashlin": figures(4.0, peak_mb=30), **others}}


def rows_of(*rows: dict[str, Any]) -> list[report.Row]:
    return [report.Row({**RECORD, "date": "2026-01-01"}, one) for one in rows]


def test_a_row_names_its_best_peer() -> None:
    (one,) = rows_of(row(fla=figures(2.0, how="events: no", peak_mb=20.0), cuDNN=figures(0.5, peak_mb=5.0),
                         FlashQLA={"failed": "ImportError"}))
    assert (one.best("forward"), one.ratio("forward"), one.ratio("both")) == ("cuDNN", 2.0, 8.0)
    assert one.slower
    assert report.compared([one])[2:] == [
        "| `chunk_gla` | 1x32768x8x128 | 1 | cuDNN 0.5 | 2.00 | 4 | cuDNN 0.5 | 8.00 | 30 / 5 |"]
    assert report.everything([one])[2:] == [
        "| `chunk_gla` | 1x32768x8x128 | flashlin | 1 | 25% | 4.0 | 4 | 25% | - | 30 | - |",
        "| `chunk_gla` | 1x32768x8x128 | fla | 2° | 12% | - | 2° | 50% | - | 20 | - |",
        "| `chunk_gla` | 1x32768x8x128 | cuDNN | 0.5 | 50% | - | 0.5 | 200% | - | 5 | - |"]


def test_a_row_without_a_peer_has_no_ratio() -> None:
    (one,) = rows_of(row(fla={"failed": "ImportError: no fla"}))
    assert (one.best("forward"), one.ratio("forward"), one.slower) == (None, None, False)
    assert report.compared([one])[2] == "| `chunk_gla` | 1x32768x8x128 | 1 | - | - | 4 | - | - | 30 |"
    assert report.failures([one]) == [], "a package that is not installed is no failure of the package"


def test_a_call_that_fails_in_flashlin_is_told_and_counts_as_slower() -> None:
    failing = row(fla=figures(2.0))
    failing["both"]["flashlin"] = {"failed": "OutOfMemoryError: 90 GiB"}
    (one,) = rows_of(failing)
    assert one.slower
    assert report.failures([one]) == ["- flashlin, with backward, in 1 rows (`chunk_gla`): 90 GiB"]


def test_a_peer_that_is_installed_and_fails_everywhere_is_told() -> None:
    (one,) = rows_of(row(fla={"failed": "ValueError: no such shape"}))
    assert report.failures([one]) == ["- fla, forward, in 1 rows (`chunk_gla`): no such shape"]


def test_a_backward_that_fla_refuses_is_marked() -> None:
    (one,) = rows_of(row(**{"fla (Triton)": figures(0.5)}))
    [line] = report.compared([one])[2:]
    assert "| fla (Triton) 0.5 |" in line and "| fla (Triton) 0.5† |" in line and "†" in report.LEGEND


def test_a_refused_backward_is_reported_once() -> None:
    refusing = row(fla=figures(2.0))
    refusing["both"]["fla"] = {"failed": "RuntimeError: wrong on Hopper. Please upgrade"}
    assert report.failures(rows_of(refusing, refusing)) == [
        "- fla, with backward, in 2 rows (`chunk_gla`): wrong on Hopper"]


def test_between_events_a_card_that_waits_for_its_host_does_not_count() -> None:
    waits = figures(5.0, how="events: no") | {"wall_ms": {"median": 2.0}}
    assert rows_of(row(fla=waits))[0].ratio("forward") == 0.5
    assert rows_of(row(fla={**waits, "how": "graph"}))[0].ratio("forward") == 0.2


def test_the_overview_prefers_the_calls_of_layers_and_shows_every_slower_row() -> None:
    plain, layer = row(fla=figures(9.0)), row(layer="A layer", fla=figures(8.0))
    other, slower = row(op="chunk_kda", fla=figures(7.0)), row(fla=figures(0.5))
    decoding = {**row(op="decode", fla=figures(9.0)), "shape": "1x1x16x128"}
    shown = [one.row for one in report.overview(rows_of(plain, layer, other, slower, decoding))]
    assert shown == [slower, other, layer]


def test_the_pages_separate_rows_in_which_a_peer_is_faster(tmp_path: Path) -> None:
    facts = {**RECORD, "date": "2026-01-01", "device": "NVIDIA H200"}
    rows = [row(fla=figures(9.0)), {**row(op="chunk_kda", **{"fla (Triton)": figures(0.5)}),
                                    "versions": {"fla": "0.5.0", "TileLang": "0.1"}}]
    (tmp_path / "speed-gla-card.json").write_text(json.dumps({**facts, "rows": rows}))
    pages = report.pages(tmp_path)
    assert set(pages) == {"index.md", "h200.md", "several-gpus.md", "invariance.md", "training.md"}
    before, _, after = pages["index.md"].partition("flashlin is the fastest, 1 of 2 rows")
    assert "a peer is faster, 1 of 2 rows" in before
    assert "`chunk_kda`" in before and "`chunk_gla`" not in before
    assert "`chunk_gla`" in after and "with FlashQLA or TileLang, fla may be faster" in before
    assert "Measured 2026-01-01 with torch 2.11, fla 0.5.0 or 0.6.0, TileLang 0.1." in before
    assert all("<!-- Generated by" in page for page in pages.values())


def test_a_bar_is_as_long_as_the_ratio_and_names_the_peer() -> None:
    drawn = report.plot([{**RECORD, "rows": [row(fla=figures(2.0), cuDNN=figures(1.6)),
                                             row(fla={"failed": "<&>"})]}])
    found = list(ElementTree.fromstring(drawn).iter())
    bars = [float(bar.get("width", 0)) for bar in found if bar.get("class") in report.PASSES][2:]
    assert bars == [round(1 / 1.6 * report.UNIT, 1), 1.55 * report.UNIT]
    texts = [one.text for one in found if one.tag.endswith("text")]
    assert {"0.62 cuDNN", "2.50 cuDNN", "flashlin's time / best peer's time, lower is better"} <= set(texts)
    assert report.plot([]) == ""


def test_several_gpus_stand_beside_one(tmp_path: Path) -> None:
    def taken(ms: float) -> dict[str, Any]:
        return {"forward": {"ms": ms, "peak_mib": 900}, "both": {"ms": 4 * ms, "peak_mib": 1800}}
    rows = {"chunk_kda": {"one device": {**taken(1), "both": {"failed": "no memory"}}, "heads": taken(2.25),
                          "tokens": taken(0.5)},
            "mamba": {"one device": taken(1), "tokens": taken(3)}}
    facts = {**RECORD, "date": "today", "tokens": 4096, "heads": 16, "head_dim": 64, "dtype": "bfloat16"}
    assert report.over_ranks(tmp_path) == ""
    (tmp_path / "context-2-card.json").write_text(json.dumps({**facts, "rows": rows}))
    lines = report.over_ranks(tmp_path).splitlines()
    assert lines[0] == "4,096 tokens, 16 heads of 64, bfloat16; 2 x A card, Triton 3.6.0, torch 2.11, today:"
    assert lines[4:] == [
        "| `chunk_kda` | 1.0 | no memory | - | 0.5 | 2.0 | 1,800 | 2.2 | 9.0 | 1,800 |",
        "| `mamba` | 1.0 | 4.0 | 1,800 | 3.0 | 12.0 | 1,800 | - | - | - |"]


def test_what_invariance_costs_is_a_table(tmp_path: Path) -> None:
    assert report.of_invariance(tmp_path) == ""
    rows = [{"op": "chunk_gla", "shape": "1x64x2x64", "forward": {"default": 0.12345, "invariant": 1.5},
             "both": {"default": 0.5, "invariant": "no memory"}},
            {"op": "chunk_gla", "shape": "2x64x2x64", "forward": {"default": 2, "invariant": 2}}]
    facts = {**RECORD, "date": "today", "rows": rows}
    (tmp_path / "invariant-card.json").write_text(json.dumps(facts))
    lines = report.of_invariance(tmp_path).splitlines()
    assert "A card, Triton 3.6.0, torch 2.11, today:" in lines[0]
    assert lines[4:] == ["| `chunk_gla` | 0.123 -> 1.5 | 0.5 -> no memory | 2 -> 2 | - |"]


def test_curves_are_means_of_the_newest_record(tmp_path: Path) -> None:
    assert report.curves(tmp_path) == ""
    facts = {**RECORD, "fla": "0.6.0", "steps": 41, "refused": True}
    for date, end in (("2026-01-02", 1.0), ("2026-01-01", 9.0)):
        losses = {"flashlin": [5.0] * 21 + [end] * 20, "float32": [5.0] * 41}
        (tmp_path / f"training-{date}.json").write_text(json.dumps({**facts, "date": date, "losses": losses}))
    drawn = report.curves(tmp_path)
    lines = [line.get("points", "") for line in ElementTree.fromstring(drawn).iter()
             if line.tag.endswith("polyline")]
    assert "bf16, flashlin: 1.000 at the end" in drawn and "its refusal switched off" in drawn
    assert "bf16, fla:" not in drawn and len(lines) == 2
    bottom, top = report.HEAD + report.HIGH_UP, report.HEAD
    assert lines[1].startswith(f"50.0,{top:.1f} ") and lines[1].endswith(f",{bottom:.1f}")
    assert lines[0].endswith(f"{50 + report.WIDE:.1f},{top:.1f}")


def test_a_small_model_is_trained_from_the_same_start(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fla.layers")
    size = training.Size(2, 64, 1, 32, 2, 16)
    ours, exact = (training.trained(way, size, 3, torch.device("cpu")) for way in ("flashlin", "float32"))
    assert ours != exact and ours == pytest.approx(exact, rel=0.01)
    assert exact[-1] < exact[0]


# -- the file of the fastest configurations

@pytest.fixture
def made_anew() -> Iterator[None]:
    before = Autotuner.__init__
    yield
    Autotuner.__init__ = before


class Kernel:
    """A stub with only the attributes of a kernel that the autotuner uses."""
    arg_names = ("n", "BK")

    @staticmethod
    def fn(n: int, BK: int) -> None:
        """Stand in for the kernel's function, of which only the name is used."""

    def run(self, *args: Any, **kwargs: Any) -> None:
        pass


class Timer:
    """A fake ``do_bench`` that reports each configuration as faster than the one before."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, call: Any, quantiles: Any) -> list[float]:
        self.calls += 1
        return [1.0 / self.calls] * 3


def tuner(timer: Timer, *sizes: int) -> Any:
    """Return an autotuner with one configuration per size; a negative size also sets maxnreg=128."""
    configs = [triton.Config({"BK": abs(size)}, num_warps=2, maxnreg=128 if size < 0 else None)
               for size in sizes]
    return Autotuner(Kernel(), Kernel.arg_names, configs, ["n"], None, None, do_bench=timer)


def opened(file: Path, **made_by: str) -> Winners:
    return Winners(file, made_by, packages=())


@pytest.mark.usefixtures("made_anew")
@pytest.mark.parametrize(("sizes", "best"), [
    ((16, 32), triton.Config({"BK": 32}, num_warps=2)),
    ((16, -16), triton.Config({"BK": 16}, num_warps=2, maxnreg=128))], ids=["tiles", "registers"])
def test_what_one_process_has_tuned_the_next_one_does_not(tmp_path: Path, sizes: tuple[int, ...],
                                                          best: triton.Config) -> None:
    file, start, first = tmp_path / "w.json", Autotuner.__init__, Timer()
    found = opened(file, triton="3.6.0")
    for n in (1, 2):
        tuner(first, *sizes).run(n)
    found.write()
    assert first.calls == 4
    Autotuner.__init__ = start
    again, second = opened(file, triton="3.6.0"), Timer()
    known = tuner(second, *sizes)
    known.run(1)
    assert (second.calls, known.best_config) == (0, best)
    assert known.best_config is known.configs[1]
    known.run(3)
    assert second.calls == 2
    again.write()
    [choices] = json.loads(file.read_text())["winners"].values()
    assert sorted(key for _, keys in choices for key in keys) == [[1], [2], [3]]


@pytest.mark.usefixtures("made_anew")
@pytest.mark.parametrize(("version", "sizes"), [("3.7.1", (16, 32)), ("3.6.0", (16, 64))])
def test_winners_of_another_release_or_of_other_configurations_do_not_count(
        tmp_path: Path, version: str, sizes: tuple[int, ...]) -> None:
    start, file = Autotuner.__init__, tmp_path / "w.json"
    found = opened(file, triton="3.6.0")
    tuner(Timer(), 16, 32).run(1)
    found.write()
    Autotuner.__init__ = start
    opened(file, triton=version)
    timer = Timer()
    tuner(timer, *sizes).run(1)
    assert timer.calls == 2


def test_winners_come_before_the_package() -> None:
    with pytest.raises(RuntimeError, match="json has already made its tuners"):
        Winners(Path("none"), {}, packages=("json",))


def test_what_is_reproducible_is_timed_beside_what_is_not() -> None:
    ways = invariant.ways(lambda: policy.current().invariant)
    assert {way: call() for way, call in ways.items()} == {"default": False, "invariant": True}
