"""From a Problem to a Plan that can run: what every op does before it starts anything."""
from __future__ import annotations

import sys
import warnings
from typing import Any, TypeVar

import torch

from flashlin import dispatch, policy
from flashlin.compat.target import probe
from flashlin.guards import pending
from flashlin.guards.problem import Plan, Problem, UnsupportedError
from flashlin.kernels.variants import VARIANTS
from flashlin.trial import canary

# now: torch.compile, if it were the first to ask, could neither read os.environ nor keep what it makes
policy.current()
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
_told: set[tuple[str, str]] = set()
_suspected: set[str] = set()
_DTYPES: dict[torch.dtype, str] = {dtype: str(dtype).removeprefix("torch.") for dtype in
                                   (torch.bfloat16, torch.float16, torch.float32, torch.float64)}


def planned(problem: Problem, device: torch.device) -> Plan:
    """The plan for this call here and now. Raises UnsupportedError; warns once per op and reason where
    results or speed differ."""
    pending.poll()
    the_plan = dispatch.plan(problem, probe(device), policy.current())
    if the_plan.refused:
        raise UnsupportedError(the_plan)
    if the_plan.path == "triton" and not canary.settled(the_plan):
        the_plan = canary.tried(the_plan, device, _users_line() + 1)
    if the_plan.steps:
        _tell(the_plan)
    return the_plan


def _tell(the_plan: Plan) -> None:
    for reason, remedy in dispatch.inexact_steps(the_plan):
        if (the_plan.asked.op, reason.code) not in _told:
            _told.add((the_plan.asked.op, reason.code))
            warnings.warn(f"{the_plan.asked.op} {VARIANTS[remedy].means} here. {reason}",
                          stacklevel=_users_line())


def suspect_layout(op: str, T: int, H: int) -> None:
    """Tell, once per op, that fewer tokens than heads may be [B, H, T, D] tensors. For calls with 1 < T < H;
    a single token is decoding."""
    if op not in _suspected and not op.startswith("mamba_"):  # Mamba's tensors have never been laid out so
        _suspected.add(op)
        warnings.warn(f"{op}: got {T} tokens of {H} heads, from tensors that are [B, T, H, D] here; if yours "
                      "are [B, H, T, D], pass "
                      "x.transpose(1, 2)", stacklevel=_users_line())


def _users_line() -> int:
    """The stacklevel of the first frame outside flashlin, for a warning given by the caller of this
    function."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "flashlin":
        frame, level = frame.f_back, level + 1
    return level


def constant_while_tracing(function: Any) -> Any:
    """What torch.compiler.assume_constant_result does (run now, and take the answer as a constant of the
    graph), without its price: that one loads the whole compiler, which eager calls do not need."""
    function._dynamo_marked_constant = True
    return function


def exporting() -> bool:
    """Whether torch.export traces this call. Its lengths may have names, and a graph of plain torch would
    guard on them: chunks want to be whole."""
    return torch.compiler.is_compiling() and hasattr(torch.compiler,
                                                     "is_exporting") and torch.compiler.is_exporting()


def head_size_class(size: int) -> int:
    """A head size, which may be symbolic, as the power of two that recipes round it up to: comparisons only
    guard, and leave it symbolic."""
    for power in (16, 32, 64, 128, 256, 512):
        if size <= power:
            return power
    return 1024


X = TypeVar("X", bound=tuple[Any, ...])


def as_planned(x: X, dot: str) -> X:
    """The tensors of a tuple as a plan's kernels take their operands (``Problem.dot``): where those are fp32,
    nothing of 16 bits may reach a kernel, not even to be loaded or stored."""
    if dot != "fp32":
        return x
    make: Any = x._make if hasattr(x, "_make") else tuple
    operands: X = make([t.float() if t is not None and t.dtype in SIXTEEN_BITS else t for t in x])
    return operands


def dtype_as_planned(dtype: torch.dtype, dot: str) -> torch.dtype:
    """The dtype that a plan's kernels write where ``dtype`` is asked for."""
    return torch.float32 if dot == "fp32" and dtype in SIXTEEN_BITS else dtype


def common_dtype(first: torch.Tensor, *others: torch.Tensor | None) -> torch.dtype:
    """What torch promotes their dtypes to."""
    common = first.dtype
    for x in others:
        if x is not None and x.dtype != common:
            common = torch.promote_types(common, x.dtype)
    return common


def name_of(dtype: torch.dtype) -> str:
    """The dtype without ``torch.``, as a Problem has it."""
    return _DTYPES.get(dtype) or str(dtype).removeprefix("torch.")


def wants_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether backward may be asked of this call. Inside autograd.Function.forward it is too late to find
    out."""
    if torch.is_grad_enabled():
        for x in tensors:
            if isinstance(x, torch.Tensor) and x.requires_grad:
                return True
    return False


def under_autocast(x: torch.Tensor) -> bool:
    """Return True if autocast is on for the device of x."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def linear_dtype(x: torch.Tensor) -> torch.dtype:
    """What a linear layer computes x in: the autocast dtype where autocast is on (it leaves float64 alone),
    else x's own."""
    if x.dtype == torch.float64 or not under_autocast(x):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)
