"""The kernels of HGRN, beyond their cases: segments, batches in slices, rows of no sequence, torch.compile.

Run with TRITON_INTERPRET=1, see test_cases.py.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import flashlin
from flashlin.guards import tensors
from flashlin.kernels.hgrn import recipe
from flashlin.kernels.hgrn.reference import recurrence
from flashlin.ops._common import arguments
from flashlin.testing.compare import Tensors, judge, poisoned


class Call:
    """One call with initial and final states, and gradients of all tensors."""

    def __init__(self, *, B: int = 1, T: int = 40, D: int = 20, N: int | None = None,
                 forgets: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)
        states = B if N is None else N
        self.inputs = {"x": randn(B, T, D), "g": F.logsigmoid(randn(B, T, D) + 2),
                       "initial_state": randn(states, D)}
        if forgets:
            self.inputs["g"][:, 5::13] = float("-inf")
        self.cotangents = [randn(B, T, D), randn(states, D)]

    def run(self, cu_seqlens: torch.Tensor | None = None) -> Tensors:
        leaves = {name: x.clone().requires_grad_() for name, x in self.inputs.items()}
        with poisoned():
            o, ht = flashlin.chunk_hgrn(**leaves, output_final_state=True, cu_seqlens=cu_seqlens)
            assert ht is not None
            grads = torch.autograd.grad([o, ht], list(leaves.values()), self.cotangents)
        return {"o": o.detach(), "ht": ht.detach(),
                **{"d" + name: grad for name, grad in zip(leaves, grads, strict=True)}}

    def expected(self, cu_seqlens: torch.Tensor | None = None) -> Tensors:
        leaves = {name: x.double().requires_grad_() for name, x in self.inputs.items()}
        o, ht = recurrence(*leaves.values(), cu_seqlens)
        # Without rows the reference depends on no tensor. A zero term lets torch compute gradients anyway.
        nothing = sum((x.nan_to_num().sum() * 0 for x in leaves.values()), torch.zeros(()))
        grads = torch.autograd.grad([o + nothing, ht + nothing], list(leaves.values()),
                                    [x.double() for x in self.cotangents])
        return {"o": o.detach(), "ht": ht.detach(),
                **{"d" + name: grad for name, grad in zip(leaves, grads, strict=True)}}


def assert_right(got: Tensors, expected: Tensors) -> None:
    assert [verdict for name in expected
            if not (verdict := judge(name, got[name], expected[name], 1e-4)).ok] == []


EDGES = pytest.mark.parametrize("edges", [None, [0, 0, 3, 38, 38]], ids=["dense", "packed"])


@EDGES
@pytest.mark.parametrize("shortest", [19, 2])
@pytest.mark.alternate
def test_segments(edges: list[int] | None, shortest: int, starts: list[str],
                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are right for 2 segments and for 19 segments of each sequence.

    19 transfers of segments do not fit into one block. Most of these segments are empty.
    """
    for name, value in (("ENOUGH", 10**6), ("WANTED", 10**6), ("SHORTEST", shortest)):
        monkeypatch.setattr(recipe, name, value)
    call = Call(B=2, T=38, D=6, forgets=True) if edges is None else Call(T=38, D=6, N=4, forgets=True)
    bounds = None if edges is None else torch.tensor(edges)
    assert_right(call.run(bounds), call.expected(bounds))
    assert starts == ["hgrn_ends", "hgrn_forward", "hgrn_ends", "hgrn_backward"]


@EDGES
def test_a_batch_in_parts_equals_the_whole(edges: list[int] | None, starts: list[str],
                                           axis_limits: Callable[..., None]) -> None:
    call = Call(B=6, T=5) if edges is None else Call(T=38, N=4)
    bounds = None if edges is None else torch.tensor(edges, dtype=torch.int32)
    whole = call.run(bounds)
    assert_right(whole, call.expected(bounds))
    assert len(starts) == 2
    axis_limits(2, 1, 1)
    split = call.run(bounds)
    assert len(starts) > 4
    for name, x in whole.items():
        torch.testing.assert_close(split[name], x, rtol=0, atol=0)


class AsOnAGpu:
    """A fake device of type cuda. The host does not read the values of tensors there, since it would wait."""
    type = "cuda"

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("programs", [2**31 - 1, 1], ids=["whole", "in parts"])
@pytest.mark.parametrize(("edges", "effective"),
                         [([5, 12, 30], [5, 12, 30]), ([-7, 12, 99], [0, 12, 40]),
                          ([0, 30, 12, 35], [0, 30, 30, 35]), ([50, 60], [40, 40])], ids=str)
def test_rows_of_no_sequence_are_exact_zeros(edges: list[int], effective: list[int], programs: int,
                                                monkeypatch: pytest.MonkeyPatch,
                                                axis_limits: Callable[..., None]) -> None:
    check_cu_seqlens = tensors.check_cu_seqlens
    axis_limits(programs, 1, 1)
    monkeypatch.setattr(arguments, "check_cu_seqlens", lambda bounds, on_host, rows, device, debug, name:
                        check_cu_seqlens(bounds, on_host, rows, AsOnAGpu(), debug, name))  # type: ignore[arg-type]
    call = Call(N=len(edges) - 1)
    call.inputs["x"][:, :effective[0]] = call.inputs["g"][:, effective[-1]:] = float("nan")
    got = call.run(torch.tensor(edges))
    call.inputs = {name: x.nan_to_num() for name, x in call.inputs.items()}
    assert_right(got, call.expected(torch.tensor(effective)))
    covered = torch.zeros(40, dtype=torch.bool)
    covered[effective[0]:effective[-1]] = True
    for name in ("o", "dx", "dg"):
        assert (got[name][:, ~covered] == 0).all(), name


@pytest.mark.parametrize(("facts", "edges"),
                         [({"B": 2, "T": 0}, None), ({"B": 0}, None), ({"T": 0, "N": 0}, [0]),
                          ({"T": 0, "N": 3}, [0, 0, 0, 0])], ids=str)
def test_nothing_to_do(facts: dict[str, int], edges: list[int] | None) -> None:
    call, bounds = Call(**facts), None if edges is None else torch.tensor(edges)
    got = call.run(bounds)
    assert_right(got, call.expected(bounds))
    if facts.get("T") == 0:
        assert torch.equal(got["ht"], call.inputs["initial_state"]) and torch.equal(got["dinitial_state"],
                                                                                    call.cotangents[1])


def test_gradients_of_the_final_state_alone_and_of_the_output_alone() -> None:
    call = Call(T=20)
    expected = call.expected()
    both = {name: torch.zeros_like(x) for name, x in expected.items()}
    for which in (0, 1):
        leaves = {name: x.clone().requires_grad_() for name, x in call.inputs.items()}
        with poisoned():
            outputs = flashlin.fused_recurrent_hgrn(**leaves, output_final_state=True)
            grads = torch.autograd.grad(outputs[which], list(leaves.values()), call.cotangents[which])
        for name, grad in zip(leaves, grads, strict=True):
            both["d" + name] += grad
    assert_right(both, {name: x for name, x in expected.items() if name not in ("o", "ht")})


def test_decoding_is_one_launch_and_goes_on_where_a_longer_call_ended(starts: list[str]) -> None:
    call = Call(B=3, T=6)
    o, ht = flashlin.chunk_hgrn(**call.inputs, output_final_state=True)
    state = call.inputs["initial_state"]
    for t in range(6):
        row, state = flashlin.fused_recurrent_hgrn(*(call.inputs[name][:, t:t + 1] for name in "xg"), state,
                                                   True)  # type: ignore[assignment]
        torch.testing.assert_close(row, o[:, t:t + 1])
    torch.testing.assert_close(state, ht)
    assert starts == ["hgrn_forward"] * 7


def test_any_strides_and_dtypes() -> None:
    call = Call(B=2, T=20)
    plain = call.run()
    fused = torch.cat([call.inputs["x"], call.inputs["g"]], 2).requires_grad_()
    x, g = fused.split(20, 2)
    state = call.inputs["initial_state"].mT.contiguous().requires_grad_()
    o, ht = flashlin.chunk_hgrn(x, g, state.mT, True)
    dfused, dstate = torch.autograd.grad([o, ht], [fused, state], call.cotangents)
    for got, wanted in ((o, plain["o"]), (dfused, torch.cat([plain["dx"], plain["dg"]], 2)),
                        (dstate.mT, plain["dinitial_state"])):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    half = {"x": x.detach().half(), "g": g.detach().bfloat16(),
            "initial_state": call.inputs["initial_state"].double()}
    o, ht = flashlin.chunk_hgrn(**half, output_final_state=True)
    assert ht is not None and o.dtype == torch.float16 and ht.dtype == torch.float32
    assert judge("o", o, recurrence(*half.values())[0], 1e-3).ok


@EDGES
def test_lengths_share_a_graph_that_starts_kernels(edges: list[int] | None, starts: list[str]) -> None:
    def call(*given: torch.Tensor) -> Any:
        return flashlin.chunk_hgrn(*given, True,
                                   cu_seqlens=None if edges is None
                                   else torch.tensor([0, 3, given[0].shape[1]]))
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=graphs)
    for T in (5, 7, 4):
        found, leaves = [], [x.requires_grad_()
                             for x in Call(B=2 if edges is None else 1, T=T, N=2).inputs.values()]
        for function in (compiled, call):
            outputs = function(*leaves)
            found.append([*outputs, *torch.autograd.grad(sum(x.sin().sum() for x in outputs), leaves)])
        for got, wanted in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert graphs.frame_count <= (2 if edges is None else 3) and set(starts) == {"hgrn_forward",
                                                                                 "hgrn_backward"}


@pytest.mark.parametrize("packed", [False, True])
def test_the_library_operators(packed: bool) -> None:
    call = Call(T=3, N=2 if packed else 1)
    x, g, h0 = (x.requires_grad_() for x in call.inputs.values())
    bounds = torch.tensor([0, 1, 3]) if packed else None
    operator, back = torch.ops.flashlin.hgrn.default, torch.ops.flashlin.hgrn_backward.default
    torch.library.opcheck(operator, (x, g, h0, bounds, True, True, "chunk_hgrn"))
    torch.library.opcheck(operator,
                          (x.detach(), g.detach(), None, bounds, False, False, "fused_recurrent_hgrn"))
    kept = (x.detach(), g.detach(), h0.detach(), bounds, None, None)
    for wanted in ("x g h0", "g"):
        torch.library.opcheck(back, (*kept, torch.ones(1, 3, 20), None, True, True, "chunk_hgrn", wanted))
