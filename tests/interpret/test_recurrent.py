"""The host code of the token-by-token kernels. test_cases.py has the cases.

Run with TRITON_INTERPRET=1.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import flashlin
from flashlin.compat import launch as door
from flashlin.guards import tensors
from flashlin.kernels.delta.reference import recurrence
from flashlin.kernels.recurrent import backward, forward, recipe
from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.ops._common import arguments, recurrent
from flashlin.testing.cases import CASES as EVERY_CASE
from flashlin.testing.cases.recurrent import CASES
from flashlin.testing.compare import Case, Tensors, check, judge, poisoned

CPU = torch.device("cpu")


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record every start of a kernel: launch, kernel, programs and arguments."""
    seen: list[tuple[Any, ...]] = []

    def noting(*arguments: Any) -> None:
        seen.append(arguments)
        door._start(*arguments)
    monkeypatch.setattr(door, "_starter", noting)
    return seen


class Call:
    """A call of the gated delta rule with initial and final states, and gradients of all tensors."""

    def __init__(self, *, B: int = 1, T: int = 6, H: int = 1, HV: int = 2, K: int = 16, V: int = 24,
                 N: int | None = None) -> None:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)
        states = B if N is None else N
        self.inputs = {"q": randn(B, T, H, K), "k": F.normalize(randn(B, T, H, K), dim=-1),
                       "v": randn(B, T, HV, V), "g": F.logsigmoid(randn(B, T, HV)),
                       "beta": randn(B, T, HV).sigmoid(), "initial_state": randn(states, HV, K, V)}
        self.cotangents = [randn(B, T, HV, V), randn(states, HV, K, V)]

    def run(self, cu_seqlens: torch.Tensor | None = None) -> Tensors:
        leaves = {name: x.clone().requires_grad_() for name, x in self.inputs.items()}
        with poisoned():
            o, ht = flashlin.fused_recurrent_gated_delta_rule(**leaves, output_final_state=True,
                                                              cu_seqlens=cu_seqlens)
            assert ht is not None
            grads = torch.autograd.grad([o, ht], list(leaves.values()), self.cotangents)
        return {"o": o.detach(), "ht": ht.detach(),
                **{"d" + name: grad for name, grad in zip(leaves, grads, strict=True)}}

    def expected(self, bounds: torch.Tensor | None = None) -> Tensors:
        leaves = {name: x.double().requires_grad_() for name, x in self.inputs.items()}
        o, ht = recurrence(*(leaves[name] for name in ("q", "k", "v", "beta", "g")),
                           h0=leaves["initial_state"], bounds=bounds, scale=leaves["q"].shape[3] ** -0.5)
        # Without rows the reference depends on no tensor. A zero term lets torch compute gradients anyway.
        nothing = sum((x.sum() * 0 for x in leaves.values()), torch.zeros(()))
        grads = torch.autograd.grad([o + nothing, ht + nothing], list(leaves.values()),
                                    [x.double() for x in self.cotangents])
        return {"o": o.detach(), "ht": ht.detach(),
                **{"d" + name: grad for name, grad in zip(leaves, grads, strict=True)}}


def assert_right(got: Tensors, expected: Tensors) -> None:
    assert [verdict for name in expected
            if not (verdict := judge(name, got[name], expected[name], 1e-4)).ok] == []


def assert_equal(got: Tensors, wanted: Tensors) -> None:
    for name, x in wanted.items():
        torch.testing.assert_close(got[name], x, rtol=0, atol=0)


@pytest.mark.parametrize("case", [case for case in CASES if str(case) in (
    "fused_recurrent_gated_delta_rule-packed", "fused_recurrent_rwkv6-reverse",
    "fused_recurrent_dplr_delta_rule-reverse-packed")], ids=str)
def test_segments_of_two_tokens(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of two tokens behave as segments of 64 do in long sequences."""
    for module in (recipe, forward, backward):
        monkeypatch.setattr(module, "SEGMENT", 2)
    assert not [verdict for verdict in check(case, CPU, torch.float32) if not verdict.ok]


@pytest.mark.parametrize("edges", [None, [0, 2, 2, 5, 6, 6]], ids=["dense", "packed"])
def test_a_batch_in_parts_equals_the_whole(edges: list[int] | None, starts: list[Any],
                                           monkeypatch: pytest.MonkeyPatch,
                                           axis_limits: Callable[..., None]) -> None:
    """A batch that runs in slices gives the results of one launch, to the bit.

    First the scratch memory of backward has space for two sequences only. Then the grid is also limited to 4
    programs.
    """
    for module in (recipe, forward, backward):
        monkeypatch.setattr(module, "SEGMENT", 2)
    call = Call(B=5, T=3) if edges is None else Call(T=6, N=5)
    bounds = None if edges is None else torch.tensor(edges)
    whole = call.run(bounds)
    assert_right(whole, call.expected(bounds))
    assert len(starts) == 2
    # bytes of two sequences: fp32, heads, tokens, K, the padded V
    monkeypatch.setattr(backward, "SCRATCH", 2 * 4 * 2 * 2 * 16 * 32)
    assert_equal(call.run(bounds), whole)
    assert len(starts) == 2 + 1 + 3
    axis_limits(4, 1, 1)
    assert_equal(call.run(bounds), whole)
    assert len(starts) == 2 + 1 + 3 + 3 + 3


class AsOnAGpu:
    """A fake device of type cuda. The host does not read the values of tensors there, since it would wait."""
    type = "cuda"

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(("edges", "effective"),
                         [([2, 4, 5], [2, 4, 5]), ([-7, 3, 99], [0, 3, 6]), ([0, 5, 3, 6], [0, 5, 5, 6]),
                          ([9, 9], [6, 6])],
                         ids=str)
def test_rows_of_no_sequence_are_exact_zeros(edges: list[int], effective: list[int],
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    check_cu_seqlens = tensors.check_cu_seqlens
    monkeypatch.setattr(arguments, "check_cu_seqlens",
                        lambda bounds, on_host, rows, device, debug, name: check_cu_seqlens(bounds, on_host,
                                                                                            rows, AsOnAGpu(),
                                                                                            debug))  # type: ignore[arg-type]
    call = Call(N=len(edges) - 1)
    got = call.run(torch.tensor(edges))
    assert_right(got, call.expected(torch.tensor(effective)))
    covered = torch.zeros(6, dtype=torch.bool)
    covered[effective[0]:effective[-1]] = True
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert (got[name][:, ~covered] == 0).all(), name


@pytest.mark.parametrize(("facts", "edges"),
                         [({"B": 2, "T": 0}, None), ({"B": 0}, None), ({"T": 0, "N": 0}, [0]),
                          ({"T": 0, "N": 3}, [0, 0, 0, 0])], ids=str)
def test_nothing_to_do(facts: dict[str, int], edges: list[int] | None) -> None:
    call, bounds = Call(**facts), None if edges is None else torch.tensor(edges)
    got = call.run(bounds)
    assert_right(got, call.expected(bounds))
    if facts.get("T") == 0:
        assert_equal(got, {"ht": call.inputs["initial_state"], "dinitial_state": call.cotangents[1]})


def test_gradients_of_the_final_state_alone_and_of_the_output_alone() -> None:
    call = Call()
    expected = call.expected()
    both = {name: torch.zeros_like(x) for name, x in expected.items()}
    for which in (0, 1):
        leaves = {name: x.clone().requires_grad_() for name, x in call.inputs.items()}
        with poisoned():
            outputs = flashlin.fused_recurrent_gdn(**leaves, output_final_state=True)
            grads = torch.autograd.grad(outputs[which], list(leaves.values()), call.cotangents[which],
                                        allow_unused=True)
        for name, grad in zip(leaves, grads, strict=True):
            both["d" + name] += 0 if grad is None else grad
    assert_right(both, {name: x for name, x in expected.items() if name not in ("o", "ht")})


def test_only_the_gradients_asked_for(starts: list[Any]) -> None:
    call = Call()
    v = call.inputs["v"].clone().requires_grad_()
    o, _ = flashlin.fused_recurrent_gdn(**{**call.inputs, "v": v})
    grad, = torch.autograd.grad(o, v, call.cotangents[0])
    arguments = starts[-1][3]
    assert grad.any() and arguments["dg"] is None and arguments["dbeta"] is None and arguments[
        "dh0"] is None and arguments["dq"] is not None


@pytest.mark.parametrize("T", [1, 3])
def test_slices_of_a_projection_are_read_where_they_lie(T: int, starts: list[Any]) -> None:
    """The call makes one launch, and no copy before it."""
    call = Call(B=2, T=T)
    q, k, v = (call.inputs[name] for name in "qkv")
    fused = torch.cat([x.flatten(2) for x in (q, k, v)], 2)
    parts = [x.unflatten(2, y.shape[2:])
             for x, y in zip(fused.split([16, 16, 48], 2), (q, k, v), strict=True)]
    assert not parts[0].is_contiguous()
    plain = flashlin.fused_recurrent_gdn(**call.inputs, output_final_state=True)
    found = flashlin.fused_recurrent_gdn(**{**call.inputs, **dict(zip("qkv", parts, strict=True))},
                                         output_final_state=True)
    assert torch.equal(found[0], plain[0]) and torch.equal(found[1], plain[1])
    started = starts[1][3]
    assert [started[name].data_ptr() for name in "qkv"] == [x.data_ptr() for x in parts] and len(starts) == 2


@pytest.mark.parametrize("strides",
                         ["transposed heads", "every second head", "every second channel",
                          "some of the time"])
def test_strides_that_no_kernel_knows_are_copied(strides: str) -> None:
    call = Call(H=2, B=2)
    k = call.inputs["k"]
    given = {"transposed heads": k.transpose(1, 2).contiguous().transpose(1, 2),
             "every second head": k.repeat_interleave(2, 2)[:, :, ::2],
             "every second channel": k.repeat_interleave(2, 3)[..., ::2],
             "some of the time": F.pad(k, (0, 0, 0, 0, 1, 2))[:, 1:-2]}[strides]
    assert not given.is_contiguous()
    plain = flashlin.fused_recurrent_gdn(**call.inputs)
    assert torch.equal(flashlin.fused_recurrent_gdn(**{**call.inputs, "k": given})[0], plain[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("v_first", [False, True], ids=["kv", "vk"])
def test_a_pool_of_pages(dtype: torch.dtype, v_first: bool, starts: list[Any],
                         monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool may have unused memory between its states, also in 16 bits.

    Indices outside of the pool change nothing.
    """
    # as on a GPU, where the host does not read the values of state_indices
    monkeypatch.setattr(recurrent, "check_indices", lambda *arguments: None)
    call = Call(B=4, T=2)
    given = {name: x.to(dtype) if name in "qkv" else x
             for name, x in call.inputs.items() if name != "initial_state"}
    room = torch.full((5, 1000), 7.0, dtype=dtype)
    pool = room[:, 100:868].unflatten(1, (2, 24, 16) if v_first else (2, 16, 24))
    pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(1)))
    before = room.clone()
    where = torch.tensor([3, -1, 5, 0], dtype=torch.int32)
    o, same = flashlin.fused_recurrent_gdn(**given, initial_state=pool, state_indices=where,
                                           output_final_state=True, state_v_first=v_first)
    assert same is pool and len(starts) == 1
    for n, at in ((0, 3), (3, 0)):
        alone = {name: x[n:n + 1] for name, x in given.items()}
        page = before[at:at + 1, 100:868].unflatten(1, pool.shape[1:])
        wanted, state = flashlin.fused_recurrent_gdn(**alone, initial_state=page, output_final_state=True,
                                                     state_v_first=v_first)
        assert torch.equal(o[n:n + 1], wanted) and torch.equal(pool[at:at + 1], state.to(dtype))
    assert (o[1:3] == 0).all()
    assert torch.equal(room[[1, 2, 4]],
                       before[[1, 2, 4]]) and (room[:, :100] == 7).all() and (room[:, 868:] == 7).all()


@pytest.mark.filterwarnings("ignore:.*fp32 copies")
def test_a_pool_that_no_kernel_can_have() -> None:
    """A pool in a dtype that no kernel can read is updated correctly.

    In the interpreter this dtype is bfloat16. On some GPUs it is any 16-bit dtype.
    """
    call = Call(B=3, T=2)
    given = {name: x.bfloat16() for name, x in call.inputs.items() if name != "initial_state"}
    pool = call.inputs["initial_state"].bfloat16()
    before = pool.clone()
    o, _ = flashlin.fused_recurrent_gdn(**given, initial_state=pool, state_indices=torch.tensor([2, -1, 0]))
    wanted, states = flashlin.fused_recurrent_gdn(**given, initial_state=before[[2, 1, 0]],
                                                  output_final_state=True)
    assert torch.equal(o[[0, 2]], wanted[[0, 2]]) and not o[1].any()
    assert torch.equal(pool[[2, 0]], states[[0, 2]].bfloat16()) and torch.equal(pool[1], before[1])


def test_no_heads() -> None:
    call = Call(H=0, HV=0)
    assert all(x.numel() == 0 for x in call.run().values())


def test_gates_far_below_zero_keep_their_digits() -> None:
    """A large A_log makes up for a small softplus.

    Computed directly, log(1 + e^x) would be 0 below -16 and would have few digits below -5.
    """
    x = torch.tensor([-80.0, -40, -17, -9, -5, -4.17, -4.15, -1, 0, 1, 20, 80])
    nothing = torch.zeros(1, 1, len(x), 16)
    _, ht = flashlin.fused_recurrent_gdn(nothing, nothing, nothing, x.reshape(1, 1, -1),
                                         initial_state=torch.ones(1, len(x), 16, 16), output_final_state=True,
                                         use_gate_in_kernel=True, A_log=-F.softplus(x.double()).log().float())
    # A_log is float32 with values up to 80, so its rounding error limits the result
    torch.testing.assert_close(ht, torch.full_like(ht, -1).exp(), rtol=2e-5, atol=0)


def test_everything_else_is_float32_or_of_the_plans_dtype() -> None:
    """Plans look at one dtype to decide which dtypes a GPU can load, so no other dtype may reach a kernel."""
    call = Call(T=2)
    x = Inputs(*(call.inputs[name].half() for name in "qkv"), beta=call.inputs["beta"].bfloat16(),
               g=call.inputs["g"].double())
    found = recurrent.loadable(x, "native", False)
    assert [y.dtype for y in found if y is not None] == [torch.float16] * 3 + [torch.float32] * 2
    assert {y.dtype for y in recurrent.loadable(x, "fp32", False) if y is not None} == {torch.float32}


# torch.compile: the library operators, their fake kernels and their gradients.

def leaves(**facts: int) -> list[torch.Tensor]:
    call = Call(**facts)
    return [call.inputs[name].requires_grad_() for name in ("q", "k", "v", "g", "beta", "initial_state")]


def gated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
          h0: torch.Tensor, **extra: Any) -> Any:
    return flashlin.fused_recurrent_gdn(q, k, v, g, beta=beta, initial_state=h0, output_final_state=True,
                                        use_qk_l2norm_in_kernel=True, **extra)


def assert_same(compiled: Any, eager: Any, tensors: list[torch.Tensor]) -> None:
    found = []
    for call in (compiled, eager):
        outputs = call(*tensors)
        found.append([*outputs, *torch.autograd.grad(sum(x.sin().sum() for x in outputs), tensors)])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_lengths_share_a_graph_that_starts_kernels(starts: list[Any]) -> None:
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(gated, fullgraph=True, backend=graphs)
    for T in (3, 5, 2):
        assert_same(compiled, gated, leaves(T=T, V=8))
    assert graphs.frame_count <= 2  # one graph for the first length, one for all others
    assert {start[0].kernel for start in starts} == {"recurrent_forward", "recurrent_backward"}


def test_packed_sequences_in_a_graph() -> None:
    def call(*tensors: torch.Tensor) -> Any:
        return gated(*tensors, cu_seqlens=torch.tensor([0, 2, 2, 4]))
    assert_same(torch.compile(call, fullgraph=True, backend="aot_eager"), call, leaves(T=4, V=8, N=3))


@pytest.mark.parametrize("T", [1, 0])
def test_decoding_from_a_pool_in_a_graph(T: int, starts: list[Any]) -> None:
    def step(pool: torch.Tensor, where: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        o: torch.Tensor = flashlin.fused_recurrent_gdn(*tensors[:4], beta=tensors[4], initial_state=pool,
                                                       state_indices=where)[0]
        return o * 2
    *tensors, pool = (x.detach() for x in leaves(B=2, T=T, V=8, N=4))
    other, where = pool.clone(), torch.tensor([2, -1])
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(pool, where, *tensors)
    assert torch.equal(got, step(other, where, *tensors)) and torch.equal(pool, other)


DECODING = [case for case in EVERY_CASE if str(case) in (
    "fused_recurrent_kda-inference", "fused_recurrent_kda-pool", "fused_mul_recurrent_rwkv7-inference",
    "fused_recurrent_rwkv6-decoding", "fused_recurrent_gdn2-inference",
    "fused_recurrent_gdn2-inference-packed", "fused_recurrent_comba-inference",
    "fused_recurrent_comba-inference-bare")]


@pytest.mark.parametrize("case", DECODING, ids=str)
@pytest.mark.alternate
def test_gates_and_rates_are_inside_the_one_launch(case: Case, starts: list[Any]) -> None:
    """Decoding makes a single launch, in eager mode and under torch.compile.

    Under torch.compile, the library operator must also pass on the bound of a gate.
    """
    def again() -> Tensors:
        return case.make(torch.float32, torch.Generator().manual_seed(0))
    eager = case.call(**again())
    assert len(starts) == 1 and len(DECODING) == 8
    compiled = torch.compile(case.call, fullgraph=True, backend="aot_eager")(**again())
    assert len(starts) == 2
    assert_equal(compiled, eager)


@pytest.mark.parametrize("facts",
                         [{"flags": "delta v_first"}, {"needs_grad": False, "has_ht": False, "packed": True}],
                         ids=str)
def test_the_library_operators(facts: dict[str, Any]) -> None:
    needs_grad, packed = facts.get("needs_grad", True), facts.get("packed", False)
    q, k, v, g, beta, h0 = (x if needs_grad else x.detach() for x in leaves(T=3, V=8, N=2 if packed else 1))
    flags = facts.get("flags", "delta")
    h0 = h0.detach().mT.contiguous() if "v_first" in flags else h0
    given = Inputs(q, k, v, beta, g, h0=h0, bounds=torch.tensor([0, 1, 3]) if packed else None)
    op = "fused_recurrent_gated_delta_rule"
    how = (0.25, facts.get("has_ht", True), torch.float32, flags, needs_grad, op)
    torch.library.opcheck(torch.ops.flashlin.recurrent.default, (*given, *how))
    plain = given._replace(**{name: x.detach() for name, x in given._asdict().items() if x is not None})
    kept = (*plain, None, None, torch.zeros(0, 2, 16, 8))
    if needs_grad:
        for wanted in ("q k v beta g h0", "v"):
            torch.library.opcheck(torch.ops.flashlin.recurrent_backward.default,
                                  (*kept, torch.ones(1, 3, 2, 8), None, *how, wanted))
    if not packed:
        pool = (plain.h0, torch.tensor([0]))
        torch.library.opcheck(torch.ops.flashlin.recurrent_in_place.default,
                              (*plain._replace(h0=None), *pool, 0.25, torch.float32, flags, op))
