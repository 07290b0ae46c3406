"""One way to compare, for every op: outputs and all gradients against the float64 reference, on inputs a case
makes."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

Tensors = dict[str, torch.Tensor]
Maker = Callable[[torch.dtype, torch.Generator], Tensors]


class Case(NamedTuple):
    """op: public name; id: what is special about the inputs. make: the tensor arguments by name, on the CPU
    (floating-point ones get gradients unless named in constant). call and reference take them as keywords and
    give the outputs by name; the reference in float64, differentiable. tolerances: RMS ratio allowed by
    tensor (outputs by name, gradients as ``d`` + name), for 16-bit dtypes. quick: part of doctor --run.
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
    """rms: RMS(out - ref) / RMS(ref). row: the worst row's RMS error over the RMS of the whole reference. ok:
    both within bounds."""
    tensor: str
    rms: float
    row: float
    allowed: float
    ok: bool


# fp32 is held to what three tf32 products give; a row may be this much worse than the whole, since rows
# differ in size.
FP32_ALLOWED, ROW_FACTOR, NEGLIGIBLE = 1e-4, 20.0, 1e-6


def judge(name: str, out: torch.Tensor, ref: torch.Tensor, allowed: float) -> Verdict:
    """The field's metric (RMS ratio; differences up to 1e-6 pass; NaN never does) and a bound on each row,
    which a mean would hide."""
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
    """Run a case forward and backward and compare everything."""
    return [judge(name, ours, theirs, allowed(case, name, dtype))
            for name, (ours, theirs) in results(case, device, dtype, seed).items()]


def results(case: Case, device: torch.device, dtype: torch.dtype,
            seed: int = 0) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Outputs, and gradients for random output gradients, by name: the op's, on the CPU, and the reference's.
    NaN fills fresh memory meanwhile."""
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
    cotangents = {name: torch.randn(x.shape, generator=generator, dtype=torch.float64)
                  for name, x in expected.items()}
    # rounded to what ours can hold, so that both sides get the same gradients
    cotangents = {name: x.to(got[name].dtype).double() for name, x in cotangents.items()}
    with poisoned():
        ours_grads = _gradients(got, {name: x.to(device) for name, x in cotangents.items()},
                                [ours[name] for name in wanted])
    their_grads = _gradients(expected, cotangents, [theirs[name] for name in wanted])
    outputs = {name: (got[name].cpu(), expected[name]) for name in expected}
    return outputs | {"d" + name: (a.cpu(), b)
                      for name, a, b in zip(wanted, ours_grads, their_grads, strict=True)}


def allowed(case: Case, name: str, dtype: torch.dtype) -> float:
    """The RMS ratio that a case allows a tensor."""
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
    """While it lasts ``torch.empty`` and its kin hold NaN, so that an element nobody wrote cannot pass for a
    right one."""
    before = [(home, name, getattr(home, name)) for home, name in (
        (torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))]
    try:
        for home, name, function in before:
            setattr(home, name, _poisoning(function))
        yield
    finally:
        for home, name, function in before:
            setattr(home, name, function)


def _poisoning(function: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        x: torch.Tensor = function(*args, **kwargs)
        if x.is_floating_point():
            # detached: torch's own checkpoint makes an empty leaf that wants a gradient
            x.detach().fill_(math.nan)
        return x
    return made
