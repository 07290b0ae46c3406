"""What is right: the answers of a model's ways compared, and what is said of each."""
from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from flashlin.testing.compare import ROW_FACTOR, judge

# RMS ratio allowed. Two layers add up float32's roundings in another order than torch does: 1e-6 to 1e-5 was
# measured where all is well. Gradients are held to what flashlin's cases are (FP32_ALLOWED).
LOGITS, GRADIENTS = 3e-5, 1e-4
# A gradient this much smaller than the model's largest is the rounding of sums that cancel; its error is told
# by the largest one's size.
VANISHING = 1e-4


class Answer(NamedTuple):
    """tensors: by name, gradients as ``d`` + parameter. wants: what the same program gives another way (the
    row without padding, the prompt at once ...); empty where only other programs can tell. raises, lacks:
    instead of tensors, the error's sentence, or why there is nothing to ask."""
    tensors: Mapping[str, torch.Tensor] = MappingProxyType({})
    wants: Mapping[str, torch.Tensor] = MappingProxyType({})
    raises: str = ""
    lacks: str = ""


class Error(NamedTuple):
    """rms: the worst tensor's RMS ratio. row: its worst row's. at: which tensor that is. tokens: the share of
    tokens that differ, as rms and row."""
    rms: float
    row: float
    at: str
    ok: bool


class Outcome(NamedTuple):
    """verdict: one of MEANS. fp32, fp64: beside the raw program. itself: beside what it gives another way.
    said: the sentence of an error, or why there is nothing to ask."""
    verdict: str
    said: str = ""
    fp32: Error | None = None
    fp64: Error | None = None
    itself: Error | None = None


MEANS = {
    "agrees": "within the bound",
    "as raw": "differs from what it gives another way, and so does the raw program, from which it does not "
              "differ",
    "differs": "beyond the bound",
    "raises": "an error",
    "reference": "what others are compared with",
    "alone": "nothing to compare with runs here",
    "not patched": "no function of flashlin ran: the model takes its own plain torch on a CPU",
    "-": "not applicable",
}


def verdict_of(answer: str) -> str:
    """The verdict at the head of a record's answer."""
    return next(one for one in sorted(MEANS, key=len, reverse=True)
                if answer == one or answer.startswith((f"{one} ", f"{one}:")))


def error(tensors: Mapping[str, torch.Tensor], wants: Mapping[str, torch.Tensor]) -> Error:
    """The worst of these tensors, by how near it is to its bound."""
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
    """Of one way's answer. fp32, fp64: the raw program's, None where ``answer`` is that itself. ran: whether
    anything was exchanged in it that should have been."""
    if answer.raises or answer.lacks:
        return Outcome("raises" if answer.raises else "-", answer.raises or answer.lacks)
    beside = [None if other is None or not other.tensors else error(answer.tensors, other.tensors)
              for other in (fp32, fp64)]
    itself = error(answer.tensors, answer.wants) if answer.wants else None
    told = beside[1] or beside[0]  # float64 where it runs
    if not ran:
        verdict = "not patched"
    elif itself:
        verdict = "agrees" if itself.ok else "as raw" if any(one.ok for one in beside if one) else "differs"
    elif told:
        verdict = "agrees" if told.ok else "differs"
    else:
        verdict = "reference" if fp32 is None else "alone"
    return Outcome(verdict, "", beside[0], beside[1], itself)
