"""The kernels of the elementwise ops, beyond their cases.

Run with TRITON_INTERPRET=1, see test_cases.py.
"""
from __future__ import annotations

from typing import Any

import pytest
import torch

import flashlin
from flashlin import dispatch
from flashlin.compat.target import probe
from flashlin.kernels.pointwise import reference
from flashlin.kernels.pointwise.forward import FARTHEST, rows_of
from flashlin.kernels.pointwise.recipe import GATE
from flashlin.ops._common import pipeline, pointwise
from flashlin.ops._common.pipeline import planned
from flashlin.testing.cases.pointwise import CASES
from flashlin.testing.compare import check, judge, poisoned

CPU = torch.device("cpu")


@pytest.fixture
def one_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend one multiprocessor, so that each program has several blocks of rows."""
    def on_a_small_card(problem: Any, device: torch.device) -> Any:
        planned(problem, device)
        return dispatch.plan(problem, probe(device)._replace(sms=1))
    monkeypatch.setattr(pipeline, "planned", on_a_small_card)


@pytest.mark.usefixtures("one_multiprocessor")
@pytest.mark.parametrize("name",
                         ["fused_gdn_gate-many-rows", "fused_kda_gate-wide", "fused_kda_gate-bounded",
                          "fused_addcmul_rwkv7-random", "fused_addcmul_rwkv7-five", "fused_k_rwkv7-many-rows",
                          "gate_output_correction-many-rows", "gate_output_correction-D=300"])
def test_programs_that_share_out_many_rows(name: str) -> None:
    case = next(case for case in CASES if str(case) == name)
    assert [verdict for verdict in check(case, CPU, torch.float32) if not verdict.ok] == []


def test_each_programs_rows_are_many_on_one_multiprocessor(one_multiprocessor: None) -> None:
    """Check that the tests above cover programs with several blocks."""
    x = torch.zeros(3000, 32)
    launch = pipeline.planned(pointwise.problem_of((x.requires_grad_(),), pointwise.Scalars(
        GATE, 32, 1, x.dtype, None, "fused_gdn_gate")), CPU).launches[-1]
    assert launch.grid[0] * launch.block("BT") < 3000


@pytest.mark.parametrize("at", [-80.0, -30.0, -17.0, -9.0, -5.0, 0.0, 5.0, 25.0, 90.0])
def test_a_gate_keeps_its_digits_far_from_zero(at: float) -> None:
    g = torch.linspace(at - 1, at + 1, 40).reshape(10, 4).requires_grad_()
    A_log = torch.zeros(4, requires_grad=True)
    y = flashlin.fused_gdn_gate(g, A_log)
    expected = reference.gate(g[..., None], A_log)[..., 0]
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=0)
    for got, wanted in zip(torch.autograd.grad(y.sum(), (g, A_log)),
                           torch.autograd.grad(expected.sum(), (g, A_log)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=0)


def test_gradients_of_some_outputs_and_for_some_tensors() -> None:
    """Gradients are right if the loss uses two of the outputs and not all inputs require a gradient.

    The inputs keep their values. The backward of fla writes to them.
    """
    generator = torch.Generator().manual_seed(0)
    h, delta = (torch.randn(2, 7, 12, generator=generator) for _ in range(2))
    xs = [torch.randn(12, generator=generator) for _ in range(6)]
    for wanted in ([0, 1], [2, 7], [1, 3, 4], list(range(8))):
        leaves = [x.clone().requires_grad_(at in wanted) for at, x in enumerate((h, delta, *xs))]
        with poisoned():
            found = flashlin.fused_addcmul_rwkv7(*leaves)
            loss = found[0].square().sum() + found[5].sin().sum()  # type: ignore[union-attr]
            got = torch.autograd.grad(loss, [leaves[at] for at in wanted], allow_unused=True,
                                      materialize_grads=True)
        assert all(map(torch.equal, leaves, (h, delta, *xs)))
        doubles = [x.detach().double().requires_grad_() for x in leaves]
        y = reference.mix(*doubles)
        expected = torch.autograd.grad(y[0].square().sum() + y[5].sin().sum(), [doubles[at] for at in wanted],
                                       allow_unused=True, materialize_grads=True)
        assert all(judge(str(at), a, b, 1e-5).ok for at, a, b in zip(wanted, got, expected, strict=True))


@pytest.mark.parametrize("rows", [(0, 4), (3, 0)], ids=str)
def test_rows_may_be_none_at_all(rows: tuple[int, int]) -> None:
    x, mu, heads, u = (torch.randn(*shape, requires_grad=True)
                       for shape in ((*rows, 6), (6,), (*rows, 2, 3), (2, 3)))
    with poisoned():
        found = [flashlin.fused_gdn_gate(x, mu), flashlin.fused_kda_gate(heads, mu[:2], mu),
                 *flashlin.fused_addcmul_rwkv7(x, x, mu, mu, mu, mu, mu), flashlin.fused_k_rwkv7(x, x, mu),
                 flashlin.gate_output_correction(x, heads, heads, u, heads, x)]
        sum(y.sum() for y in found if y is not None).backward()
    for leaf in (x, mu, heads, u):
        assert leaf.grad is not None and leaf.grad.shape == leaf.shape and not leaf.grad.any()


def test_strided_tensors_and_gradients() -> None:
    fused = torch.randn(2, 5, 24, requires_grad=True)
    mu = torch.randn(24)[::2]
    y = flashlin.fused_k_rwkv7(*fused.split(12, 2), mu)
    dy = torch.randn(12, 5, 2).transpose(0, 2)
    got, = torch.autograd.grad(y, fused, dy)
    expected = reference.key(*fused.double().split(12, 2), mu)
    wanted, = torch.autograd.grad(expected, fused, dy.double())
    assert judge("y", y, expected, 1e-6).ok and judge("dfused", got, wanted, 1e-6).ok


def test_output_dtypes_of_gates() -> None:
    g = torch.randn(4, 6)
    for dtype in (torch.float16, torch.float32):
        y = flashlin.fused_gdn_gate(g.half(), torch.zeros(6), output_dtype=dtype)
        assert y.dtype == dtype and judge("y", y, reference.gate(g.half()[..., None])[..., 0], 1e-3).ok


SLICES = {"whole": lambda x: x[..., :12].contiguous(), "slice": lambda x: x[..., 3:15],
          "every other": lambda x: x[..., ::2],
          "tokens first": lambda x: x[..., :12].transpose(0, 1).contiguous().transpose(0, 1),
          "one for all": lambda x: x[:, :1, :12].expand(2, 7, 12)}


@pytest.mark.parametrize("lies", SLICES)
@pytest.mark.parametrize("given", ["D", "D of columns", "z", "D z", "D z marks"])
def test_parts_of_a_scan_take_rows_as_they_lie(lies: str, given: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, z = (SLICES[lies](torch.randn(2, 7, 24, generator=generator)).unflatten(2, (3, 4)).requires_grad_()
            for _ in range(2))
    step, o = (torch.randn(2, 7, 3, *size, generator=generator).requires_grad_() for size in ((), (4,)))
    D = torch.randn(3, *[4] * ("columns" in given), generator=generator).requires_grad_()
    marks = torch.zeros(2, 7) if "marks" in given else None
    with poisoned():
        y, marks = pointwise.scaled("mamba_chunk_scan_combined", x, step, torch.float32, marks)
        out = pointwise.skipped("mamba_chunk_scan_combined", o, x, D if "D" in given else None,
                                z if "z" in given else None, torch.float32, marks)
        dy, dout = (torch.randn(2, 7, 3, 4, generator=generator) for _ in range(2))
        leaves = [x, step, o, *[D] * ("D" in given), *[z] * ("z" in given)]
        got = torch.autograd.grad((y * dy + out * dout).sum(), leaves)
    wide_x, wide_step, wide_o, wide_D, wide_z = doubles = [t.detach().double().requires_grad_()
                                                           for t in (x, step, o, D, z)]
    wanted_y = torch.einsum("bthp,bth->bthp", wide_x, wide_step)
    wanted = wide_o + ((wide_D if "columns" in given else wide_D[:, None]) * wide_x if "D" in given else 0)
    wanted = wanted * (wide_z / (1 + (-wide_z).exp()) if "z" in given else 1)
    chosen = [*doubles[:3], *[wide_D] * ("D" in given), *[wide_z] * ("z" in given)]
    expected = torch.autograd.grad((wanted_y * dy + wanted * dout).sum(), chosen)
    assert judge("y", y, wanted_y, 1e-6).ok and judge("out", out, wanted, 1e-6).ok
    for grad, right in zip(got, expected, strict=True):
        assert grad.shape == right.shape and judge("gradient", grad, right, 2e-6).ok


@pytest.mark.parametrize("given", ["", "D", "z", "D z"])
@pytest.mark.parametrize("columns", [4, 37, 1100])
def test_parts_of_a_scan_mark_what_is_not_finite(given: str, columns: int) -> None:
    """The kernels mark values that are not finite as the torch path does.

    With some widths, the edge of a strip lies within a head.
    """
    generator = torch.Generator().manual_seed(0)
    x, z, o, dy, dout = (torch.randn(2, 7, 3, columns, generator=generator) for _ in range(5))
    step, D, marks = torch.randn(2, 7, 3, generator=generator), torch.randn(3,
                                                                            generator=generator), torch.zeros(
                                                                                2, 7)
    x[0, 1, 2, 3], step[1, 3, 0], marks[0, 5], dout[1, 6, 1, -1] = torch.inf, torch.nan, torch.nan, -torch.inf

    def run() -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_()
                  for t in (x, step, o, *[D] * ("D" in given), *[z] * ("z" in given))]
        wide, gate = leaves[3] if "D" in given else None, leaves[-1] if "z" in given else None
        y, marked = pointwise.scaled("mamba_chunk_scan_combined", leaves[0], leaves[1], torch.float32, marks)
        assert marked is not None
        out = pointwise.skipped("mamba_chunk_scan_combined", leaves[2], leaves[0], wide, gate, torch.float32,
                                marked)
        return [y, marked, out, *torch.autograd.grad([y, out], leaves, [dy, dout])]
    with poisoned():
        found = run()
    with flashlin.settings(path="torch"):
        wanted = run()
    assert found[0].isfinite().all() and found[5].isfinite().all()  # the inputs of the scan: dt x and do
    assert found[1].isnan().sum() == 3
    for got, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_only_rows_that_no_offset_reaches_are_copied() -> None:
    x = torch.empty(2, 7, 24)
    rows, apart = rows_of(x[..., 3:15].unflatten(2, (3, 4)), 12)
    assert rows is not None and apart == 24 and rows.data_ptr() == x[..., 3:].data_ptr()
    far = torch.empty(4, FARTHEST + 1, device="meta")[:, :12]
    for copied in (x[..., ::2], x.transpose(0, 1)[..., :12], far):
        rows, apart = rows_of(copied, 12)
        assert rows is not None and apart == 12 and rows.is_contiguous()
