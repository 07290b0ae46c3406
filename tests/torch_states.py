"""Process-wide settings of torch, for tests on CPU and GPU that the results of ops do not depend on them."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from flashlin.testing.cases import CASES
from flashlin.testing.compare import Case, Verdict, check

# The first quick case of each op, and its cases of packed sequences.
CHOSEN = [*{case.op: case for case in reversed(CASES) if case.quick}.values(),
          *(case for case in CASES if case.id in ("packed", "segments") and not case.quick)]
LOOSE = 5e-3  # allowed RMS error ratio of float32 when matrix products may use TF32


@contextmanager
def deterministic() -> Iterator[None]:
    """Fill new tensors with NaN, and make operations without a deterministic implementation raise."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype, which constructors without a dtype use."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# Every one of these settings must leave all results bitwise the same.
SAME: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "deterministic": deterministic,
    "default-float64": lambda: default_dtype(torch.float64),
    "default-bfloat16": lambda: default_dtype(torch.bfloat16),
    "default-meta": lambda: torch.device("meta"),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "no-cudnn": lambda: torch.backends.cudnn.flags(enabled=False),
}


@contextmanager
def precision_of(owner: Any) -> Iterator[None]:
    """Allow TF32 through torch's new interface, ``owner.fp32_precision``.

    owner: torch.backends or torch.backends.cuda.matmul.
    """
    before = owner.fp32_precision
    owner.fp32_precision = "tf32"
    try:
        yield
    finally:
        owner.fp32_precision = before


@contextmanager
def old_switch() -> Iterator[None]:
    """Allow TF32 through torch's old interface, ``set_float32_matmul_precision``."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        if NEW_INTERFACE:
            # The call above has set "ieee", which overrides torch.backends.fp32_precision.
            torch.backends.cuda.matmul.fp32_precision = "none"


NEW_INTERFACE = hasattr(torch.backends.cuda.matmul, "fp32_precision")  # since torch 2.9
TF32: dict[str, Callable[[], AbstractContextManager[Any]]] = {"set_float32_matmul_precision": old_switch}
if NEW_INTERFACE:
    TF32["cuda.matmul"] = lambda: precision_of(torch.backends.cuda.matmul)
    TF32["backends"] = lambda: precision_of(torch.backends)


def tensors_of(case: Case, device: torch.device, dtype: torch.dtype,
               state: AbstractContextManager[Any]) -> list[torch.Tensor | None]:
    """Return the outputs and gradients of a case that runs forward and backward inside ``state``."""
    generator = torch.Generator().manual_seed(0)
    inputs = {name: x.to(device).requires_grad_(x.is_floating_point() and name not in case.constant)
              for name, x in case.make(dtype, generator).items()}
    leaves = [x for x in inputs.values() if x.requires_grad]
    shapes = case.call(**{name: x.detach() for name, x in inputs.items()})
    pulls = {name: torch.randn(x.shape, generator=generator).to(x) for name, x in shapes.items()}
    with state:
        outputs = case.call(**inputs)
        chosen = [name for name, x in outputs.items() if x.requires_grad]
        gradients = torch.autograd.grad([outputs[name] for name in chosen], leaves,
                                        [pulls[name] for name in chosen], allow_unused=True) if chosen else ()
    return [*(x.detach() for x in outputs.values()), *gradients]


def differences(case: Case, device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Yield each setting of SAME that changes a result of the case, with the number of the tensor."""
    expected = tensors_of(case, device, dtype, nullcontext())
    for name, state in SAME.items():
        for at, (x, y) in enumerate(zip(tensors_of(case, device, dtype, state()), expected, strict=True)):
            same = x is None if y is None else (
                x is not None and (x.dtype, x.device) == (y.dtype, y.device) and torch.equal(x, y))
            if not same:
                yield f"{name}: tensor {at}"


def wrong_with_tf32(case: Case, device: torch.device, dtype: torch.dtype) -> Iterator[Verdict]:
    """Yield the tensors whose error is larger than TF32 explains, for each interface that allows TF32."""
    for state in TF32.values():
        with state():
            verdicts = check(case, device, dtype)
        for verdict in verdicts:
            allowed = max(verdict.allowed, LOOSE)
            if not (verdict.ok or verdict.rms < allowed):
                yield verdict
