"""Tests of the comparison with other packages: its table, and that its checks detect wrong results."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import flashlin
from flashlin import dispatch
from flashlin.compat.subprocesses import Ended
from matrix import peer_table as table
from matrix import peers, record


def test_every_op_over_sequences_is_asked_about() -> None:
    """The comparison covers every op over sequences, apart from a few.

    Not covered are aliases (fused_chunk_), Mamba2's layer, whose scan is covered, ops with mode "auto", and
    the recurrent delta product, which fla does not have.
    """
    aside = ("fused_chunk_", "mamba_split_", "fused_recurrent_gated_delta_product")
    ops = {name for name, (_, mode) in dispatch.OPS.items() if mode in ("chunk", "fused_recurrent")
           and not name.startswith(aside)}
    assert {*ops, "selective_scan_fn"} <= {op.name for op in peers.OPS}


@pytest.mark.parametrize("name",
                         ["chunk_rwkv6", "fused_mul_recurrent_rwkv7", "chunk_kda", "fused_recurrent_hgrn",
                          "mamba_chunk_scan_combined", "selective_scan_fn", "chunk_gated_delta_product",
                          "chunk_gdn2", "fused_recurrent_comba", "mamba3_siso_combined"])
def test_the_other_reference_agrees_on_the_cpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """An op on the CPU agrees with the comparison's own reference, which detects a wrong result.

    That reference is written independently of the references of the cases.
    """
    op = next(op for op in peers.OPS if op.name == name)
    monkeypatch.setitem(peers.SIZES, "CPU", peers.Sizes(T=9, K=8, V=8))
    assert peers.answer("flashlin", op, "CPU") == "right"
    right = getattr(flashlin, name)

    def wrong(*args: Any, **options: Any) -> Any:
        returned = right(*args, **options)
        return tuple(1.1 * x for x in returned) if isinstance(returned, tuple) else 1.1 * returned
    monkeypatch.setattr(flashlin, name, wrong)
    assert peers.answer("flashlin", op, "CPU").startswith("wrong: o 0.1")


@pytest.mark.parametrize("name", ["chunk_gla", "chunk_rwkv6", "chunk_gated_delta_product",
                                  "fused_recurrent_hgrn", "mamba3_siso_combined"])
def test_the_other_reference_agrees_about_packed_sequences(monkeypatch: pytest.MonkeyPatch,
                                                           name: str) -> None:
    """An op agrees with the comparison's own reference on packed sequences, one of which has no tokens."""
    op = next(op for op in peers.OPS if op.name == name)
    monkeypatch.setitem(peers.SIZES, "CPU", peers.Sizes(1, 9, K=8, V=8, edges=(0, 4, 4, 9)))
    assert peers.answer("flashlin", op, "CPU") == "right"


@pytest.mark.parametrize("part", range(4))
def test_each_state_of_mamba3_is_looked_at(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    """The comparison names each of Mamba-3's states that the op ignores, or whose final value is wrong."""
    op = next(op for op in peers.OPS if op.name == "mamba3_siso_combined")
    monkeypatch.setitem(peers.SIZES, "CPU", peers.Sizes(T=9, K=8, V=8))
    right, name = flashlin.mamba3_siso_combined, op.initial.split()[part]

    def forgetful(*, Input_States: tuple[torch.Tensor, ...], **options: Any) -> Any:
        taken = [x * (i != part) for i, x in enumerate(Input_States)]
        return right(**options, Input_States=taken)

    def wrong(**options: Any) -> Any:
        o, *left = right(**options)
        return o, *(x + 0.1 if i == part else x for i, x in enumerate(left))
    monkeypatch.setattr(flashlin, op.name, forgetful)
    answer = peers.answer("flashlin", op, "CPU")
    assert answer.startswith("wrong: o ") and f"d{name} 1" in answer
    monkeypatch.setattr(flashlin, op.name, wrong)
    assert peers.answer("flashlin", op, "CPU").startswith(f"wrong: {name} ")


def test_packed_sequences_are_kept_apart() -> None:
    op = next(op for op in peers.OPS if op.name == "chunk_gla")
    made = peers.made(op, peers.Sizes(1, 6, 1, 4, 4, (0, 2, 6)), torch.float32,
                      torch.Generator().manual_seed(0))
    tensors = {key: x.double() for key, x in made.items() if key != "cu_seqlens"}
    found = peers.reference(op, True, cu_seqlens=made["cu_seqlens"], **tensors)
    tail = {key: x[1:] if key == "initial_state" else x[:, 2:] for key, x in tensors.items()}
    assert torch.equal(found["o"][:, 2:], peers.reference(op, True, **tail)["o"])


def test_a_process_that_ends_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = '{"starting": "forward"}\n{"forward": "right"}\n{"starting": "backward"}\n'
    said = iter([Ended(-6, lines), Ended(1)])
    monkeypatch.setattr(record, "child", lambda *arguments, **options: next(said))
    monkeypatch.setattr(peers, "ASPECTS", {"forward": "", "backward": "", "CPU": ""})
    assert peers.asked("fla", "chunk_gla", 1.0) == {"op": "chunk_gla", "side": "fla", "forward": "right",
                                                    "backward": "error: ended by SIGABRT",
                                                    "CPU": "error: ended with exit code 1"}


def test_a_record_keeps_the_ops_that_were_not_asked_again() -> None:
    def record(*rows: tuple[str, str], torch: str = "2.11.0") -> dict[str, Any]:
        return {"device": "NVIDIA H200", "triton": "3.6.0", "torch": torch, "packages": {}, "aspects": {},
                "rows": [{"op": op, "side": side, "forward": answer}
                         for op, answer in rows for side in ("fla", "flashlin")]}
    before = record(("chunk_gla", "right"), ("selective_scan_fn", "wrong"))
    assert peers.joined(before, record(("selective_scan_fn", "right"))) == record(("chunk_gla", "right"),
                                                                                  ("selective_scan_fn",
                                                                                   "right"))["rows"]
    assert peers.joined(before, record(("chunk_kda", "right")))[0]["op"] == "chunk_kda", "order as in OPS"
    assert len(peers.joined(before, record(("chunk_kda", "right"), torch="2.12.0"))) == 2
    assert peers.joined(record(("gone", "right")), record(("chunk_kda", "right"))) == record(
        ("chunk_kda", "right"))["rows"], "rows of an op that is no longer compared are dropped"
    begun = record(("selective_scan_fn", "right"))
    del begun["rows"][0]  # fla's new row is still missing, as in a record of an unfinished run
    assert [row["side"] for row in peers.joined(before, begun)] == 2 * ["fla", "flashlin"]


def test_the_table(tmp_path: Path) -> None:
    assert table.table(tmp_path) == []
    record = {"device": "NVIDIA H200", "triton": "3.6.0", "date": "2026-11-21",
              "aspects": {"forward": "outputs", "CPU": "CPU tensors"},
              "packages": {"fla-core": {"version": "0.6.0", "triton": "3.3 or newer"}},
              "rows": [{"op": "chunk_gla", "side": "fla", "forward": "wrong: o 0.3", "CPU": "error: a | b"},
                       {"op": "chunk_gla", "side": "flashlin", "forward": "right", "CPU": "right"}]}
    (tmp_path / "peers-x.json").write_text(json.dumps(record))
    text = "\n".join(table.table(tmp_path))
    assert "| `chunk_gla` | fla | wrong / yes | no / yes |" in text
    assert "| fla | CPU | error: a \\| b | `chunk_gla` |" in text and "fla-core 0.6.0 (needs Triton 3.3 or newer)" in text
