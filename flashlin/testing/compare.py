"""Comparison of an op with its float64 reference: all outputs and all gradients.

A `Case` describes the inputs, the call and the reference. `check` runs it and returns one `Verdict` per
tensor.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

Tensors = dict[str, torch.Tensor]
Maker = Callable[[torch.dtype, torch.Generator], Tensors]


class Case(NamedTuple):
    """One test case of an op: its inputs, its call and its float64 reference.

    op: public name of the op.
    id: short name for the special property of the inputs.
    make: makes the tensor arguments by name, on the CPU. Floating-point tensors get gradients unless
        `constant` names them.
    call: runs the op with these tensors as keywords and returns its outputs by name.
    reference: the same in float64, differentiable, with the same output names.
    tolerances: allowed RMS ratio of each tensor for 16-bit dtypes. Gradients are named ``d`` + name.
    constant: names of the tensors without gradients.
    quick: the case is small enough for ``doctor --run``.
    """
    op: str
    id: str
    make: Maker
    call: Callable[..., Tensors]
    reference: Callable[..., Tensors]
    tolerances: dict[str, float]
    constant: tuple[str, ...] = ()
    quick: bool = False

    def __str__(self) -> str:
        return f"{self.op}-{self.id}"


class Verdict(NamedTuple):
    """The result of the comparison of one tensor.

    rms: RMS(out - ref) / RMS(ref).
    row: RMS error of the worst row, divided by the RMS of the whole reference.
    allowed: upper bound of `rms`.
    ok: True if `rms` and `row` are within their bounds.
    """
    tensor: str
    rms: float
    row: float
    allowed: float
    ok: bool


# FP32_ALLOWED is about the error of three tf32 products. Rows differ in size, so the error of a single row
# may be ROW_FACTOR times as large as that of the whole tensor.
FP32_ALLOWED, ROW_FACTOR, NEGLIGIBLE = 1e-4, 20.0, 1e-6


def judge(name: str, out: torch.Tensor, ref: torch.Tensor, allowed: float) -> Verdict:
    """Compare a tensor with its reference and return a Verdict.

    The metric is the RMS ratio, as is usual in the field. Each row is bounded as well, because a mean hides a
    single wrong row. A tensor also passes if no element differs by more than 1e-6. NaN and infinity never
    pass.
    """
    if out.shape != ref.shape:
        return Verdict(name, math.inf, math.inf, allowed, False)
    difference = out.detach().double() - ref.detach().double()
    if difference.numel() == 0:
        return Verdict(name, 0.0, 0.0, allowed, True)
    if not bool(torch.isfinite(difference).all()):
        return Verdict(name, math.nan, math.nan, allowed, False)
    size = ref.detach().double().pow(2).mean().sqrt().item() + 1e-8
    rms = difference.pow(2).mean().sqrt().item() / size
    rows = difference.reshape(-1, difference.shape[-1] if difference.ndim else 1)
    row = rows.pow(2).mean(-1).sqrt().max().item() / size
    ok = difference.abs().max().item() <= NEGLIGIBLE or (rms < allowed and row < ROW_FACTOR * allowed)
    return Verdict(name, rms, row, allowed, ok)


def check(case: Case, device: torch.device, dtype: torch.dtype, seed: int = 0) -> list[Verdict]:
    """Run a case forward and backward, and return a Verdict for each output and gradient."""
    return [judge(name, ours, theirs, allowed(case, name, dtype))
            for name, (ours, theirs) in results(case, device, dtype, seed).items()]


def results(case: Case, device: torch.device, dtype: torch.dtype,
            seed: int = 0) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return (result of the op, result of the reference) for each output and gradient, by name.

    Gradients are taken for random output gradients and named ``d`` + name. The op's tensors are moved to the
    CPU. While the op runs, fresh memory is filled with NaN.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    inputs = case.make(dtype, generator)
    wanted = [name for name, x in inputs.items() if x.is_floating_point() and name not in case.constant]
    ours = {name: _leaf(x.to(device), name in wanted) for name, x in inputs.items()}
    theirs = {name: _leaf(x.double() if x.is_floating_point() else x, name in wanted)
              for name, x in inputs.items()}
    with poisoned():
        got = case.call(**ours)
    expected = case.reference(**theirs)
    if set(got) != set(expected):
        raise AssertionError(f"{case}: outputs {sorted(got)}, the reference has {sorted(expected)}")
    # Rounded to the dtype of the op's output, so that both sides get the same gradients.
    cotangents = {name: torch.randn(x.shape, generator=generator, dtype=torch.float64)
                  .to(got[name].dtype).double() for name, x in expected.items()}
    with poisoned():
        ours_grads = _gradients(got, {name: x.to(device) for name, x in cotangents.items()},
                                [ours[name] for name in wanted])
    their_grads = _gradients(expected, cotangents, [theirs[name] for name in wanted])
    return {name: (got[name].cpu(), expected[name]) for name in expected} | {
        "d" + name: (a.cpu(), b) for name, a, b in zip(wanted, ours_grads, their_grads, strict=True)}


def allowed(case: Case, name: str, dtype: torch.dtype) -> float:
    """Return the RMS ratio that a case allows for a tensor, in the given dtype."""
    most = case.tolerances.get(name, case.tolerances["d*" if name.startswith("d") else "*"])
    return min(most, FP32_ALLOWED) if dtype in (torch.float32, torch.float64) else most


def _leaf(x: torch.Tensor, wants_grad: bool) -> torch.Tensor:
    return x.detach().clone().requires_grad_(wants_grad)


def _gradients(outputs: Tensors, cotangents: Tensors, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    if not inputs:
        return []
    names = [name for name, x in outputs.items() if x.requires_grad]
    grads = torch.autograd.grad([outputs[name] for name in names], inputs,
                                [cotangents[name].to(outputs[name].dtype) for name in names],
                                allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, grads, strict=True)]


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill the results of ``torch.empty``, ``empty_like`` and ``new_empty`` with NaN within the block.

    An element that a kernel forgets to write then cannot pass as correct.
    """
    with ExitStack() as restoring:
        for home, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            function = getattr(home, name)
            restoring.callback(setattr, home, name, function)
            setattr(home, name, _poisoning(function))
        yield


def _poisoning(function: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        x: torch.Tensor = function(*args, **kwargs)
        if x.is_floating_point():
            # Detached because torch's checkpoint makes an empty leaf that requires a gradient.
            x.detach().fill_(math.nan)
        return x
    return made
