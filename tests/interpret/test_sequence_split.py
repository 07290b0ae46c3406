"""Kernels of split sequences are compared with float64 and with the same kernels of whole sequences."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashlin
from flashlin import dispatch
from flashlin.compat.target import parse
from flashlin.kernels import scans
from flashlin.policy import Policy
from flashlin.testing.cases import CASES
from flashlin.testing.cases.sequences import LONG
from flashlin.testing.compare import Case, check, poisoned
from tests.share import WHOLE
from tests.splitting import HARD, compare

CPU = torch.device("cpu")
Forced = Callable[[int], None]


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forced]:
    """Return a function that sets the number of segments of every sequence, for this test."""
    def force(parts: int) -> None:
        monkeypatch.setattr(scans, "forced_parts", parts)
        dispatch.plan.cache_clear()
    yield force
    monkeypatch.undo()
    dispatch.plan.cache_clear()


# The chunked ops whose kernels differ; with TEST_WHOLE=1 all chunked ops.
CHOSEN = {"chunk_simple_gla": "random packed resets-packed one-token", "chunk_retention": "packed",
          "chunk_linear_attn": "no-state", "chunk_delta_rule": "packed",
          "chunk_gated_delta_rule": "random packed grouped v-first resets-packed one-key-2",
          "chunk_gla": "v-first packed strong-packed", "chunk_rwkv6": "packed", "chunk_kda": "packed grouped",
          "chunk_dplr_delta_rule": "packed", "chunk_comba": "packed",
          "mamba_chunk_scan_combined": "packed sequences", "fused_recurrent_simple_gla": "packed"}


def cases() -> list[Any]:
    """Return the chosen cases, each with one number of segments from 2 to 5 in turn.

    With TEST_WHOLE=1, return each case with each of these numbers.
    """
    chosen = [case for case in CASES if case.id not in LONG and (
        case.op.startswith(("chunk_", "mamba_chunk", "mamba_split")) and "hgrn" not in case.op if WHOLE
        else case.id in CHOSEN.get(case.op, "").split())]
    return [pytest.param(case, parts, id=f"{case}-{parts}") for number, case in enumerate(chosen)
            for parts in (range(2, 6) if WHOLE else (2 + number % 4,))]


@pytest.mark.parametrize(("case", "parts"), cases())
@pytest.mark.alternate
def test_cases_in_parts(case: Case, parts: int, forced: Forced) -> None:
    forced(parts)
    assert [verdict for verdict in check(case, CPU, torch.float32) if not verdict.ok] == []


def test_the_chosen_cases_exist() -> None:
    assert {f"{op}-{name}" for op, names in CHOSEN.items() for name in names.split()} <= {*map(str, CASES)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", HARD)
@pytest.mark.alternate
def test_parts_are_as_exact_as_the_whole(name: str, dtype: torch.dtype, forced: Forced) -> None:
    compare(HARD[name](T=330), CPU, dtype, forced, 5)


def test_a_product_of_long_keys_is_in_no_empty_states_way(forced: Forced) -> None:
    """Each token multiplies the state along its key by -2.2.

    The product stays within float32 in a chunk, but not in the 128 tokens of a segment. The state is empty
    until the end of the last segment. Every matrix of the other head is finite.
    """
    torch.manual_seed(0)
    keys = F.normalize(torch.ones(1, 384, 2, 16), dim=-1) * torch.tensor([3.2 ** 0.5, 1.0])[:, None]
    x = {"q": torch.randn(1, 384, 2, 16), "k": keys, "v": torch.randn(1, 384, 2, 16),
         "beta": torch.ones(1, 384, 2)}
    x["v"][:, :376] = 0
    outputs = []
    for parts in (1, 3):
        forced(parts)
        with poisoned():
            outputs.append(flashlin.chunk_delta_rule(**x, output_final_state=True))
    (o, ht), (split_o, split_ht) = outputs
    assert o.isfinite().all() and bool(o.any())
    for whole, split in ((o, split_o), (ht, split_ht)):
        torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))


def test_nan_stays_in_its_sequence_and_behind_its_chunk(forced: Forced) -> None:
    torch.manual_seed(0)
    x = {name: torch.randn(1, 700, 1, 16) for name in ("q", "k", "v")}
    x |= {"g": F.logsigmoid(torch.randn(1, 700, 1) + 4), "beta": torch.rand(1, 700, 1)}
    x["k"] = F.normalize(x["k"], dim=-1)
    x["k"][0, 300, 0, 3] = torch.nan
    edges = torch.tensor([0, 10, 500, 700])
    for op in ("chunk_gated_delta_rule", "chunk_simple_gla"):
        forced(4)
        given = x if "delta" in op else {name: t for name, t in x.items() if name != "beta"}
        o, ht = getattr(flashlin, op)(**given, cu_seqlens=edges, output_final_state=True)
        assert o[:, :266].isfinite().all() and o[:, 300:500].isnan().any() and o[:, 500:].isfinite().all()
        assert ht[0].isfinite().all() and ht[1].isnan().any() and ht[2].isfinite().all()


def lengths(op: str, T: int, H: int, machine: str = "triton=3.6.0,sm=90", **more: Any) -> int:
    """Return the number of tokens in each segment of a call; 0 if sequences are not split."""
    family, mode = dispatch.OPS[op]
    facts = {"B": 1, "N": 1, **more}
    problem = flashlin.Problem(op, family, mode, T=T, H=H, K=128, V=128, dtype="bfloat16", **facts)
    return dispatch.plan(problem, parse(machine)).part


@pytest.mark.parametrize(("op", "T", "H", "parts"), [
    ("chunk_simple_gla", 32768, 8, 16), ("chunk_gated_delta_rule", 32768, 8, 16),  # two programs per SM
    ("chunk_simple_gla", 8192, 2, 32), ("chunk_gla", 1024, 2, 4),  # segments of 256 tokens
    ("chunk_simple_gla", 32768, 1, 74), ("chunk_gla", 32768, 1, 74),
    ("chunk_gated_delta_rule", 32768, 1, 16), ("chunk_kda", 8192, 2, 8),  # carrying states takes as long as the scan
    ("chunk_gla", 8192, 32, 4), ("chunk_gla", 8192, 64, 1), ("chunk_gla", 512, 2, 1),
    ("chunk_gated_delta_rule", 8192, 32, 4), ("chunk_kda", 8192, 32, 4)])
def test_parts_fill_the_card(op: str, T: int, H: int, parts: int) -> None:
    length = lengths(op, T, H)
    assert -(-T // length) == parts if parts > 1 else length == 0


def test_what_is_not_split() -> None:
    assert lengths("chunk_gla", 8192, 8) > 0
    assert lengths("chunk_gla", 8192, 8, B=8, N=8) == 0  # the GPU is full
    assert lengths("chunk_gla", 8192, 8, "triton=3.6.0,sm=90,sms=20") == 0  # a small GPU
    assert lengths("chunk_gla", 8192, 8, N=40, varlen=True) == 1024  # one of the sequences may be long
    assert lengths("chunk_gla", 8192, 8, varlen=True) == 512
    # KDA gains little in forward alone
    kda = {"options": frozenset({"beta"}), "needs_grad": False}
    assert lengths("chunk_kda", 8192, 32, **kda) == 0 < lengths("chunk_kda", 8192, 16, **kda)
    problem = flashlin.Problem("chunk_gla", "gla", "chunk", 1, 8192, 8, 128, 128, 1, "bfloat16")
    assert dispatch.plan(problem, parse("triton=3.6.0,sm=90"), Policy(invariant=True)).part == 0
