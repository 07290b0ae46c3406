"""Mamba-3's rotation by kernels, for values that are not finite and for rows of no sequence."""
from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flashlin.kernels.rotation import backward, torch_path
from flashlin.kernels.rotation.inputs import Inputs, Outputs
from flashlin.ops.mamba3 import turned

OP, R, H = "mamba3_siso_combined", 3, 2


def inputs(b: int, T: int, edges: tuple[int, ...] = ()) -> Inputs:
    draw = torch.Generator().manual_seed(0)
    q, k, q_bias, k_bias, angles = (torch.randn(*shape, generator=draw) for shape in
                                    ((b, T, 1, 8), (b, T, 1, 8), (H, 8), (H, 8), (b, T, H, R)))
    step, weight = (torch.rand(b, T, H, generator=draw) for _ in range(2))
    return Inputs(q, k, q_bias, k_bias, angles, step, weight, bounds=torch.tensor(edges) if edges else None)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("edges", [(), (0, 70, 70, 75, 190, 200)], ids=["dense", "packed"])
@pytest.mark.alternate
def test_a_broken_step_reaches_only_later_tokens_of_its_sequence(edges: tuple[int, ...],
                                                                 value: float) -> None:
    """A gradient of an angle that is not finite reaches only earlier tokens."""
    b, T = (1, edges[-1]) if edges else (3, 110)
    row, first, at, end = (0, 75, 150, 190) if edges else (1, 0, 70, T)
    x = inputs(b, T, edges)
    gradient = torch.randn(b, T, H, R, generator=torch.Generator().manual_seed(1))

    def run(step: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.angles.clone().requires_grad_()
        *_, angle = turned(OP, x._replace(angles=leaf, step=step), torch.float32)
        return angle.detach(), torch.autograd.grad(angle, leaf, dy)[0]
    step, dy = x.step.clone(), gradient.clone()
    step[row, at, 1], dy[row, at, 0, 1] = value, value
    whole, d_whole = run(x.step, gradient)
    (angle, _), (_, dx) = run(step, gradient), run(x.step, dy)
    spoiled, d_spoiled = torch.zeros_like(angle, dtype=torch.bool), torch.zeros_like(dx, dtype=torch.bool)
    spoiled[row, at:end, 1] = d_spoiled[row, first:at + 1, 0, 1] = True
    for found, known, where in ((angle, whole, spoiled), (dx, d_whole, d_spoiled)):
        assert not found[where].isfinite().any()
        torch.testing.assert_close(found[~where], known[~where])


def test_rows_of_no_sequence_are_zero() -> None:
    x = inputs(1, 100)
    leaves = [y.requires_grad_() for y in x[:7]]
    q, k, *_, alike, angle = turned(OP, x._replace(bounds=torch.tensor([2, 40, 40, 90])), torch.float32)
    loss = q.sin().sum() + k.sin().sum() + angle.sin().sum() + alike.sin().sum()
    dq, dk, _, _, dangles, dstep, dweight = torch.autograd.grad(loss, leaves)
    for y in (q, k, alike[..., None], angle, dq, dk, dangles, dstep[..., None], dweight[..., None]):
        assert not y[:, :2].any() and not y[:, 90:].any() and y[:, 3:39].any(-1).all()


@pytest.mark.parametrize("edges", [(), (3, 40, 40, 97)], ids=["dense", "packed"])
@pytest.mark.parametrize(("G", "heads", "channels"), [(2, 4, 8), (1, 9, 6), (1, 2, 24)])
@pytest.mark.alternate
def test_kernels_give_what_plain_torch_does(edges: tuple[int, ...], G: int, heads: int, channels: int,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels give the outputs and gradients of plain torch.

    A program adds the gradients of at most 4 heads here, and some channels are not rotated.
    """
    monkeypatch.setattr(backward, "SHARED", 4)
    draw = torch.Generator().manual_seed(0)
    shapes = ((2 - bool(edges), 100, G, channels),) * 2 + ((heads, channels),) * 2
    given = [torch.randn(*shape, generator=draw) for shape in shapes]
    of_heads = (2 - bool(edges), 100, heads)
    given.append(torch.randn(*of_heads, R, generator=draw))
    given += [torch.rand(of_heads, generator=draw) for _ in range(2)]
    N = len(edges) - 1 if edges else 2
    leaves = [y.requires_grad_() for y in (*given, torch.randn(N, heads, R, generator=draw))]
    x = Inputs(*leaves, bounds=torch.tensor(edges) if edges else None)
    found, covered = [], torch.ones(100)
    if edges:  # plain torch also rotates rows of no sequence
        covered[:edges[0]] = covered[edges[-1]:] = 0
    for y in (turned(OP, x, torch.float32), torch_path.compute(x, torch.float32)):
        y = Outputs(*(one if one is y.q_first or one is y.k_last
                      else one * covered.view(-1, *[1] * (one.ndim - 2)) for one in y))
        weights = [torch.randn(one.shape, generator=draw.manual_seed(1)) for one in y]
        loss = sum((one * weight).sum() for one, weight in zip(y, weights, strict=True))
        found.append((*y[:5], y.angle.cos(), *torch.autograd.grad(loss, leaves)))
    for ours, right in zip(*found, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-4)
