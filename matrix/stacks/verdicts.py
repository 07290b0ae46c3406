"""Compare the results of a model with those of the raw program, and give each a verdict."""
from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from flashlin.testing.compare import ROW_FACTOR, judge

# Allowed RMS ratios. Two layers round float32 sums in another order than torch: correct programs were measured
# at 1e-6 to 1e-5. Gradients have the same bound as the cases of flashlin (FP32_ALLOWED).
LOGITS, GRADIENTS = 3e-5, 1e-4
# A gradient smaller than this fraction of the largest is rounding noise of sums that cancel. Its error is
# measured relative to this fraction of the largest gradient.
VANISHING = 1e-4


class Answer(NamedTuple):
    """The result of one quantity of a model, or the reason why there is none.

    tensors: results by name; a gradient is named ``d`` + parameter.
    wants: expected results, computed by the same program in another way, such as a row without padding or a
        prompt in one call. Empty if only another program can give expected results.
    raises: message of the error, if the program raised one.
    lacks: reason why the quantity does not apply.
    """
    tensors: Mapping[str, torch.Tensor] = MappingProxyType({})
    wants: Mapping[str, torch.Tensor] = MappingProxyType({})
    raises: str = ""
    lacks: str = ""


class Error(NamedTuple):
    """The error of the worst tensor of a result.

    rms: RMS ratio of the tensor; for tokens, the fraction that differs.
    row: RMS ratio of its worst row; for tokens, the fraction that differs.
    at: name of the tensor.
    ok: True if the error is within the bound.
    """
    rms: float
    row: float
    at: str
    ok: bool


class Outcome(NamedTuple):
    """The verdict on one result, with its errors.

    verdict: a key of MEANS.
    said: message of an error, or the reason why the quantity does not apply.
    fp32: error compared with the raw program in float32, or None.
    fp64: error compared with the raw program in float64, or None.
    itself: error compared with the same program run in another way, or None.
    """
    verdict: str
    said: str = ""
    fp32: Error | None = None
    fp64: Error | None = None
    itself: Error | None = None


MEANS = {
    "agrees": "the error is within the bound",
    "as raw": "the patched program agrees with the raw program, but both differ from the same program run in "
              "another way, such as without padding or without a cache",
    "differs": "the error exceeds the bound",
    "raises": "the program raises an error",
    "reference": "the result that others are compared with",
    "alone": "it runs, but there is no result to compare with",
    "not patched": "no function of flashlin ran, because the model uses its own plain torch on a CPU",
    "-": "not applicable",
}


def verdict_of(answer: str) -> str:
    """Return the verdict with which an answer of a record begins."""
    return next(one for one in sorted(MEANS, key=len, reverse=True)
                if answer == one or answer.startswith((f"{one} ", f"{one}:")))


def error(tensors: Mapping[str, torch.Tensor], wants: Mapping[str, torch.Tensor]) -> Error:
    """Return the error of the tensor with the largest error relative to its bound."""
    if set(tensors) != set(wants):
        return Error(math.inf, math.inf, " ".join(sorted(set(tensors) ^ set(wants)))[:80], False)
    gradients = [x for name, x in wants.items() if name.startswith("d")]
    floor = VANISHING * max((_size(x) for x in gradients), default=0.0)
    errors = [_error(name, x, wants[name], floor if name.startswith("d") else 0.0)
              for name, x in tensors.items()]
    return max(errors, key=lambda one: (not one.ok,
                                        math.inf if math.isnan(one.rms) else one.rms / allowed(one.at)))


def allowed(name: str) -> float:
    return GRADIENTS if name.startswith("d") else LOGITS


def _size(x: torch.Tensor) -> float:
    return float(x.detach().double().pow(2).mean().sqrt()) if x.numel() else 0.0


def _error(name: str, out: torch.Tensor, want: torch.Tensor, floor: float) -> Error:
    if not out.is_floating_point():
        off = 1.0 if out.shape != want.shape else float((out != want).double().mean())
        return Error(off, off, name, off == 0)
    found, size = judge(name, out, want, allowed(name)), _size(want)
    if not math.isfinite(found.rms):
        return Error(found.rms, found.row, name, False)
    scale = size / max(size, floor, 1e-30)
    rms, row = found.rms * scale, found.row * scale
    ok = found.ok or (rms < allowed(name) and row < ROW_FACTOR * allowed(name))
    return Error(rms, row, name, ok)


def outcome(answer: Answer, fp32: Answer | None, fp64: Answer | None, ran: bool = True) -> Outcome:
    """Return the verdict on an answer.

    answer: the answer to judge.
    fp32, fp64: answers of the raw program, or None if `answer` is itself that answer.
    ran: True if a function of flashlin ran in the program, as intended.
    """
    if answer.raises or answer.lacks:
        return Outcome("raises" if answer.raises else "-", answer.raises or answer.lacks)
    beside = [None if other is None or not other.tensors else error(answer.tensors, other.tensors)
              for other in (fp32, fp64)]
    itself = error(answer.tensors, answer.wants) if answer.wants else None
    told = beside[1] or beside[0]  # prefer float64
    if not ran:
        verdict = "not patched"
    elif itself:
        verdict = "agrees" if itself.ok else "as raw" if any(one.ok for one in beside if one) else "differs"
    elif told:
        verdict = "agrees" if told.ok else "differs"
    else:
        verdict = "reference" if fp32 is None else "alone"
    return Outcome(verdict, "", beside[0], beside[1], itself)
