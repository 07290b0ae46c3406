"""A public op as its cases see it."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

import flashlin
from flashlin.testing.cases.inputs import GIVEN, Maker
from flashlin.testing.compare import Case, Tensors

# Options that change no numbers of float64: they are there for compatibility, or choose what is returned and
# where. References do not take them.
WITHOUT_EFFECT = {"safe_gate", "disable_recompute", "use_graph", "return_intermediate_states", "inplace",
                  "inplace_state", "inplace_backward", "output_cache", "output_dtype", "residual_in_fp32",
                  "accumulate_grad_in_fp32", "num_chunks"}


class Op(NamedTuple):
    """Facts that the cases of one op share. Called with what is special about one case, it returns that Case.

    make: declares the tensors. reference: the op in float64,
    with the op's own names for tensors and options. tolerances: see Case. outputs: names of what both return,
    with their shapes where tests/isolation.py has no call of its own for the op ("" of what only some calls
    return). always: options of every call, without effect on the reference. call: in the place of the op,
    where there is more to do than to call it with its tensors and options. constant: tensors without
    gradients.
    """
    name: str
    make: Maker
    reference: Callable[..., Any]
    tolerances: dict[str, float]
    outputs: Iterable[str] = MappingProxyType({"o": "B T HV V", "ht": "N HV K V"})
    always: Mapping[str, Any] = MappingProxyType({"output_final_state": True})
    call: Callable[..., Any] | None = None
    constant: tuple[str, ...] = ()

    def __call__(self, id: str, options: Mapping[str, Any] | None = None, quick: bool = False,
                 allowed: Mapping[str, float] | None = None, **facts: Any) -> Case:
        """options: of the call; one that is called like a fact is also that fact. allowed: tolerances of this
        case alone."""
        options, tolerances = options or {}, {**self.tolerances, **(allowed or {})}
        facts |= {name: x for name, x in options.items() if name in {*GIVEN, *self.make.facts}}
        return Case(self.name, id, partial(self.make, **facts), partial(called, self, options),
                    partial(expected, self, options), tolerances, self.constant, quick)


def facts_of(case: Case) -> Mapping[str, Any]:
    """Return the facts with which a case makes its tensors."""
    return {**GIVEN, **op_of(case).make.facts, **getattr(case.make, "keywords", {})}


def op_of(case: Case) -> Op:
    """Return the op whose case this is."""
    op: Op = case.call.args[0]  # type: ignore[attr-defined]  # of the partial that an Op makes
    return op


def options_of(case: Case) -> Mapping[str, Any]:
    """Return the options with which a case calls its op."""
    return {**op_of(case).always, **case.call.args[1]}  # type: ignore[attr-defined]


def called(op: Op, options: Mapping[str, Any], **tensors: Tensor) -> Tensors:
    function = op.call or getattr(flashlin, op.name)
    return _by_name(op.outputs, function(**{**op.always, **options, **tensors}))


def expected(op: Op, options: Mapping[str, Any], **tensors: Tensor) -> Tensors:
    effective = {name: value for name, value in options.items() if name not in WITHOUT_EFFECT}
    return _by_name(op.outputs, op.reference(**tensors, **effective))


def _by_name(outputs: Iterable[str], returned: Any) -> Tensors:
    """Return the tensors among what was returned; None is what the call was not asked for."""
    names, values = tuple(outputs), returned if isinstance(returned, tuple) else (returned,)
    named = zip(names[:len(values)], values, strict=True)
    return {name: x for name, x in named if x is not None}
