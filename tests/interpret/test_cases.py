"""Every case on the Triton kernels in Triton's interpreter, with tests of the host code that launches them.

Run ``TRITON_INTERPRET=1 pytest tests/interpret``. The interpreter must be selected before Triton is
imported, so without the variable all tests fail.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashlin
from flashlin.guards import tensors
from flashlin.guards.plan_types import Plan
from flashlin.kernels.gla.reference import recurrence
from flashlin.ops._common import arguments
from flashlin.ops._common.pipeline import planned
from flashlin.testing.cases import CASES
from flashlin.testing.cases.sequences import LONG
from flashlin.testing.compare import Case, check, judge, poisoned
from tests.share import WHOLE

CPU = torch.device("cpu")
Plans = list[Plan]


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plans]:
    """Record the plans of calls, and check after each test that all of them ran kernels in the interpreter."""
    made: Plans = []

    def noting(*arguments: Any) -> Plan:
        made.append(planned(*arguments))
        return made[-1]
    for name in flashlin.__all__:  # load all ops
        getattr(flashlin, name)
    for module in [x
                   for name, x in sys.modules.items() if name.startswith("flashlin.ops.")
                   and vars(x).get("planned") is planned]:
        monkeypatch.setattr(module, "planned", noting)
    yield made
    assert made, "no op was called"
    assert {plan.path for plan in made} == {"triton"} and {plan.target.backend
                                                           for plan in made} == {"interpreter"}


def failed(case: Case, dtype: torch.dtype) -> list[Any]:
    return [verdict for verdict in check(case, CPU, dtype) if not verdict.ok]


# float16 only changes loads, stores and operands of dots. So one case of each of these ops is enough.
HALF = {f"{op}-random" for op in ("chunk_simple_gla", "chunk_gated_delta_rule", "chunk_gla", "chunk_kda",
                                  "chunk_gdn2", "chunk_comba", "fused_recurrent_gated_delta_rule", "rms_norm",
                                  "causal_conv1d")}
# The selected cases of ops whose cases take many seconds here.
ONLY = {
    # The next two ops run the kernels of the gated delta rule.
    "chunk_delta_rule": "random packed one-key", "fused_recurrent_delta_rule": "random packed headwise",
    "chunk_gated_delta_rule": "random packed grouped one-key-2 zero-keys every-other gates-resets",
    "chunk_gla": "random packed resets strong-packed odd v-first one-token",
    "chunk_rwkv6": "random strong-packed one-token",
    "chunk_kda": "random strong-packed gates-resets grouped v-first one-token bounded bounded-strongest "
                 "bounded-inference-packed bounded-inference-wide",
    "chunk_dplr_delta_rule": "random strong-packed", "chunk_rwkv7": "random",
    "chunk_iplr_delta_rule": "random", "chunk_gdn2": "grouped resets strong-packed",
    "chunk_comba": "packed grouped p=None strong",
    "chunk_gated_delta_product": "three", "fused_recurrent_gated_delta_product": "packed",
    "fused_recurrent_gdn2": "packed decoding inference inference-packed",
    "fused_recurrent_kda": "random resets layer bounded inference pool",
    "fused_recurrent_simple_gla": "random packed reverse odd one-token",
    # The next four ops run the kernels of simple GLA.
    "fused_recurrent_retention": "random", "fused_recurrent_lightning_attn": "",
    "chunk_lightning_attn": "random", "fused_recurrent_linear_attn": "reverse normalized",
    "selective_scan_fn": "odd-states bare", "mamba_chunk_scan_combined": "forgetting packed",
    "mamba_split_conv1d_scan_combined": "random", "mamba3_siso_combined": "odd packed"}
# Other cases that take many seconds: sizes of real models, more rows than a GPU has programs for (test_conv.py
# pretends a GPU with one multiprocessor), and segments of the usual length (test_hgrn.py has short ones).
SLOW = ("causal_conv1d-many-blocks", "group_norm-many-rows", "chunk_simple_gla-K=256,V=256",
        "chunk_simple_gla-wide", "chunk_retention-wide", "chunk_linear_attn-wide", "chunk_hgrn-segments",
        "chunk_hgrn-segments-packed", "selective_state_update-real", "selective_state_update-real-one-group")


def worth_it(case: Case, dtype: torch.dtype) -> bool:
    """Return True for a case that every CI run has time for.

    TEST_WHOLE=1 runs every case here. tests/ops runs every case in torch, and matrix.gpu runs every case on a
    GPU.
    """
    if WHOLE:
        return True
    if dtype == torch.float16:
        return str(case) in HALF
    if case.id in LONG:  # test_sequence_split.py has shorter ones
        return False
    return case.id in ONLY[case.op].split() if case.op in ONLY else str(case) not in SLOW


@pytest.mark.parametrize(("case", "dtype"), [pytest.param(case, dtype, id=f"{case}-{dtype}") for case in CASES
                                             for dtype in (torch.float32, torch.float16)
                                             if worth_it(case, dtype)])
@pytest.mark.alternate
def test_case(case: Case, dtype: torch.dtype) -> None:
    assert not failed(case, dtype)


def test_the_chosen_cases_exist(plans: Plans) -> None:
    chosen = HALF | {f"{op}-{name}" for op, names in ONLY.items() for name in names.split()}
    assert chosen | set(SLOW) <= {str(case) for case in CASES}
    flashlin.l2norm(torch.ones(2, 8))  # because every test here must call an op


# Plans cast bfloat16 to fp32. These cases only show that the cast happens and that results are bfloat16 again.
# Ops over sequences share the code of the casts, so one case of each is enough.
CASTING = ("chunk_simple_gla", "chunk_gated_delta_rule", "chunk_hgrn", "fused_recurrent_retention")
SEQUENCES = ("chunk_", "fused_chunk_", "fused_recurrent_", "fused_mul_", "parallel_", "mamba_")


@pytest.mark.filterwarnings("ignore:.*fp32 copies")
@pytest.mark.parametrize("case",
                         [case for case in CASES if case.quick
                          and (WHOLE or case.op in CASTING or not case.op.startswith(SEQUENCES))],
                         ids=str)
@pytest.mark.alternate
def test_bfloat16_runs_on_fp32_copies(case: Case, plans: Plans) -> None:
    assert not failed(case, torch.bfloat16)
    assert {plan.problem.dot for plan in plans} == {"fp32"}
    assert {reason.code for plan in plans for reason, _ in plan.steps} == {"interpreter-bf16"}


class Call:
    """One call with gate, initial and final states, and gradients of all of them."""

    def __init__(
        self,
        *,
        B: int = 1,
        T: int = 40,
        H: int = 2,
        K: int = 16,
        V: int = 24,
        N: int | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)
        states = B if N is None else N
        self.inputs = {"q": randn(B, T, H, K), "k": randn(B, T, H, K), "v": randn(B, T, H, V),
                       "g": F.logsigmoid(randn(B, T, H)), "initial_state": randn(states, H, K, V)}
        self.cotangents = [randn(B, T, H, V), randn(states, H, K, V)]

    def run(self, op: str = "chunk_simple_gla", cu_seqlens: torch.Tensor | None = None,
            **extra: Any) -> dict[str, torch.Tensor]:
        leaves = {name: x.clone().requires_grad_() for name, x in self.inputs.items()}
        with poisoned():
            o, ht = getattr(flashlin, op)(**leaves, output_final_state=True, cu_seqlens=cu_seqlens, **extra)
            grads = torch.autograd.grad([o, ht], list(leaves.values()), self.cotangents)
        return {"o": o.detach(), "ht": ht.detach(),
                **{"d" + name: grad for name, grad in zip(leaves, grads, strict=True)}}

    def expected(self, cu_seqlens: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        leaves = {name: x.double().requires_grad_() for name, x in self.inputs.items()}
        o, ht = recurrence(*(leaves[name] for name in "qkvg"), h0=leaves["initial_state"], bounds=cu_seqlens,
                           scale=leaves["q"].shape[3] ** -0.5)
        # Without rows the reference depends on no tensor. A zero term lets torch compute gradients anyway.
        nothing = sum((x.sum() * 0 for x in leaves.values()), torch.zeros(()))
        grads = torch.autograd.grad([o + nothing, ht + nothing], list(leaves.values()),
                                    [x.double() for x in self.cotangents])
        return {"o": o.detach(), "ht": ht.detach(),
                **{"d" + name: grad for name, grad in zip(leaves, grads, strict=True)}}


def assert_right(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert [verdict for name in expected
            if not (verdict := judge(name, got[name], expected[name], 1e-4)).ok] == []


MODES = pytest.mark.parametrize("op", ["chunk_simple_gla", "fused_recurrent_simple_gla"])


@MODES
@pytest.mark.parametrize("edges", [None, [0, 7, 7, 40, 41, 64]], ids=["dense", "packed"])
@pytest.mark.parametrize("programs", [4, 8])
@pytest.mark.alternate
def test_a_batch_in_parts_equals_the_whole(op: str, edges: list[int] | None, programs: int, plans: Plans,
                                           axis_limits: Callable[..., None]) -> None:
    """A batch that runs in several slices gives the results of one launch, to the bit.

    5 sequences of 2 heads need at least 10 programs. A limit of 8 programs allows at most 3 sequences per
    slice. A limit of 4 programs allows at most 2.
    """
    call = Call(B=5, T=9) if edges is None else Call(T=64, N=5)
    bounds = None if edges is None else torch.tensor(edges, dtype=torch.int32)
    whole = call.run(op, bounds)
    assert {plan.problem.batch_part for plan in plans} == {0}
    del plans[:]
    axis_limits(programs, 1, 1)
    split = call.run(op, bounds)
    assert {plan.problem.batch_part for plan in plans} <= {1, 2, 3}
    for name, x in whole.items():
        torch.testing.assert_close(split[name], x, rtol=0, atol=0)
    assert_right(whole, call.expected(bounds))


class AsOnAGpu:
    """A fake device of type cuda. The host does not read the values of tensors there, since it would wait."""
    type = "cuda"

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat cu_seqlens as on a GPU: the host does not read them, and the device puts them in order."""
    check_cu_seqlens = tensors.check_cu_seqlens

    def without_reading(cu_seqlens: torch.Tensor, on_host: torch.Tensor | None, rows: torch.Size,
                        device: torch.device, *rest: Any) -> torch.Tensor:
        return check_cu_seqlens(cu_seqlens, on_host, rows, AsOnAGpu(), *rest)  # type: ignore[arg-type]
    monkeypatch.setattr(arguments, "check_cu_seqlens", without_reading)


@MODES
@pytest.mark.parametrize(("edges", "effective"), [
    ([5, 12, 30], [5, 12, 30]), ([0, 12, 30], [0, 12, 30]), ([3, 12, 40], [3, 12, 40]),
    ([0, 30, 12, 35], [0, 30, 30, 35]), ([-7, 12, 99], [0, 12, 40]), ([20, 20, 20], [20, 20, 20]),
    ([50, 60], [40, 40]), ([0, 0], [0, 0]), ([40, 0], [40, 40]), ([9], [9]), ([0, 100, 400], [0, 40, 40]),
], ids=str)
def test_rows_of_no_sequence_are_exact_zeros(op: str, edges: list[int], effective: list[int],
                                             unread: None) -> None:
    call = Call(N=len(edges) - 1)
    got, expected = call.run(op, torch.tensor(edges)), call.expected(torch.tensor(effective))
    assert_right(got, expected)
    covered = torch.zeros(40, dtype=torch.bool)
    covered[effective[0]:effective[-1]] = True
    for name in ("o", "dq", "dk", "dv", "dg"):
        assert (got[name][:, ~covered] == 0).all(), name


def test_rows_of_no_sequence_are_exact_zeros_in_parts(unread: None, axis_limits: Callable[..., None],
                                                      plans: Plans) -> None:
    call, bounds = Call(N=3), torch.tensor([5, 12, 20, 30])
    axis_limits(4, 1, 1)
    got = call.run("chunk_simple_gla", bounds)
    assert {plan.problem.batch_part for plan in plans} <= {1, 2}
    assert_right(got, call.expected(bounds))
    for name in ("o", "dq", "dk", "dv", "dg"):
        assert (got[name][:, :5] == 0).all() and (got[name][:, 30:] == 0).all(), name


def test_the_tables_of_reversed_sequences_are_brought_into_order_too(unread: None) -> None:
    call = Call(N=2)
    got = call.run("fused_recurrent_simple_gla", torch.tensor([5, 12, 30]), reverse=True)
    for name in ("o", "dq", "dk", "dv", "dg"):
        assert (got[name][:, :5] == 0).all() and (got[name][:, 30:] == 0).all(), name


@MODES
@pytest.mark.parametrize("facts", [{"T": 0}, {"B": 0}, {"H": 0}, {"B": 0, "T": 0}], ids=str)
def test_nothing_to_do_dense(op: str, facts: dict[str, int]) -> None:
    call = Call(**{"B": 2, **facts})
    got = call.run(op)
    assert_right(got, call.expected())
    if facts == {"T": 0}:
        torch.testing.assert_close(got["ht"], call.inputs["initial_state"], rtol=0, atol=0)
        torch.testing.assert_close(got["dinitial_state"], call.cotangents[1], rtol=0, atol=0)


@MODES
@pytest.mark.parametrize("edges", [[0], [0, 0], [0, 0, 0, 0]], ids=str)
def test_nothing_to_do_packed(op: str, edges: list[int]) -> None:
    call = Call(T=0, N=len(edges) - 1)
    got = call.run(op, torch.tensor(edges))
    assert_right(got, call.expected(torch.tensor(edges)))
    torch.testing.assert_close(got["ht"], call.inputs["initial_state"], rtol=0, atol=0)


@MODES
@pytest.mark.parametrize("edges", [None, [0, 0, 1, 64, 65, 129, 130, 130]], ids=["dense", "packed"])
@pytest.mark.parametrize("state_v_first", [False, True], ids=["kv", "vk"])
def test_state_layouts_and_sequences_around_the_chunk(op: str, edges: list[int] | None,
                                                      state_v_first: bool) -> None:
    call = Call(B=2, T=65, K=10, V=20) if edges is None else Call(T=130, N=7, K=10, V=20)
    bounds = None if edges is None else torch.tensor(edges, dtype=torch.int64)
    expected = call.expected(bounds)
    if state_v_first:
        call.inputs["initial_state"] = call.inputs["initial_state"].mT.contiguous()
        call.cotangents[1] = call.cotangents[1].mT  # gradients may be strided
    got = call.run(op, bounds, state_v_first=state_v_first)
    for name in ("ht", "dinitial_state"):
        got[name] = got[name].mT if state_v_first else got[name]
    assert_right(got, expected)


@MODES
def test_strided_tensors_are_read_where_they_lie(op: str) -> None:
    """Strided inputs give the results of contiguous inputs, to the bit.

    The inputs are slices of a projection, a transposed gate, every second entry of a table of sequence
    boundaries, and a transposed state.
    """
    call = Call(T=30, K=16, V=16, N=2)
    plain = call.run(op, torch.tensor([0, 11, 30]))
    fused = torch.cat([call.inputs[name] for name in ("q", "k", "v")], 3).requires_grad_()
    q, k, v = fused.split(16, 3)
    assert not q.is_contiguous()
    state = call.inputs["initial_state"].mT.contiguous().mT.requires_grad_()
    table = torch.tensor([0, 99, 11, 99, 30, 99])[::2]
    g = call.inputs["g"].mT.contiguous().mT.requires_grad_()
    o, ht = getattr(flashlin, op)(q, k, v, g, initial_state=state, output_final_state=True, cu_seqlens=table)
    dfused, dg, dstate = torch.autograd.grad([o, ht], [fused, g, state], call.cotangents)
    for got, name in ((o, "o"), (ht, "ht"), (dg, "dg"), (dstate, "dinitial_state")):
        torch.testing.assert_close(got.detach(), plain[name], rtol=0, atol=0)
    torch.testing.assert_close(dfused, torch.cat([plain["dq"], plain["dk"], plain["dv"]], 3), rtol=0, atol=0)


@MODES
def test_gradients_of_the_final_state_alone_and_of_the_output_alone(op: str) -> None:
    call = Call(T=20)
    expected = call.expected()
    both = {name: torch.zeros_like(x) for name, x in expected.items()}
    for which in (0, 1):
        leaves = {name: x.clone().requires_grad_() for name, x in call.inputs.items()}
        with poisoned():
            outputs = getattr(flashlin, op)(**leaves, output_final_state=True)
            grads = torch.autograd.grad(outputs[which], list(leaves.values()), call.cotangents[which],
                                        allow_unused=True)
        for name, grad in zip(leaves, grads, strict=True):
            both["d" + name] += 0 if grad is None else grad
    assert_right(both, {name: x for name, x in expected.items() if name not in ("o", "ht")})


def test_slopes_made_for_inference_serve_training() -> None:
    for call in (flashlin.chunk_retention,
                 partial(flashlin.chunk_lightning_attn, layer_idx=5, num_layers=77)):
        q = torch.randn(1, 4, 37, 16)  # no other test uses this number of heads, so no cache has its slopes
        with torch.inference_mode():
            call(q, q, q)
        q.requires_grad_()
        call(q, q, q)[0].sum().backward()  # saves the slopes for backward
        assert q.grad is not None and q.grad.any()


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
@MODES
def test_any_scale(op: str, scale: float) -> None:
    call = Call(T=20)
    leaves = [call.inputs[name].double() for name in ("q", "k", "v", "g")]
    o, _ = getattr(flashlin, op)(**call.inputs, scale=scale)
    expected, _ = recurrence(*leaves, h0=call.inputs["initial_state"], scale=scale)
    assert judge("o", o, expected, 1e-4).ok


def test_mixed_dtypes_take_the_widest_and_answer_in_vs() -> None:
    call = Call(T=20)
    q, k, v = call.inputs["q"].half(), call.inputs["k"], call.inputs["v"].half()
    o, ht = flashlin.chunk_simple_gla(q, k, v, call.inputs["g"].half(), output_final_state=True)
    assert ht is not None and o.dtype == torch.float16 and ht.dtype == torch.float32
    expected, state = recurrence(q, k, v, call.inputs["g"].half(), scale=0.25)
    assert judge("o", o, expected, 1e-3).ok and judge("ht", ht, state, 1e-4).ok
