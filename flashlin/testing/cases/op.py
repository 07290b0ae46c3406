"""A description of one public op, from which its cases are made."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

import flashlin
from flashlin.testing.cases.inputs import GIVEN, Maker
from flashlin.testing.compare import Case, Tensors

# Options that do not change results in float64. They exist for compatibility, or select what is returned or
# where it is written. The references do not have them.
WITHOUT_EFFECT = {"safe_gate", "disable_recompute", "use_graph", "return_intermediate_states", "inplace",
                  "inplace_state", "inplace_backward", "output_cache", "output_dtype", "residual_in_fp32",
                  "accumulate_grad_in_fp32", "num_chunks"}


class Op(NamedTuple):
    """The properties that the cases of one op share.

    An Op is callable: it takes the special settings and options of one case, and returns that Case.

    name: public name of the op.
    make: declares the tensors.
    reference: the op in float64, with the op's own names for tensors and options.
    tolerances: see Case.
    outputs: names of the outputs of op and reference. A mapping also gives the shape of each output, from
        which tests/isolation.py declares a call of the op. The shape is "" for an output that only some calls
        return.
    always: options of every call, which do not change results.
    call: called instead of the op, if a case needs more than a call with its tensors and options.
    constant: names of the tensors without gradients.
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
        """Return a case of this op.

        id: short name of the case.
        options: options of the call. An option with the name of a setting also changes that setting.
        quick: see Case.
        allowed: tolerances of this case only.
        facts: settings of the maker that differ from the defaults.
        """
        options, tolerances = options or {}, {**self.tolerances, **(allowed or {})}
        facts |= {name: x for name, x in options.items() if name in {*GIVEN, *self.make.facts}}
        return Case(self.name, id, partial(self.make, **facts), partial(called, self, options),
                    partial(expected, self, options), tolerances, self.constant, quick)


def facts_of(case: Case) -> Mapping[str, Any]:
    """Return the settings with which a case makes its tensors."""
    return {**GIVEN, **op_of(case).make.facts, **getattr(case.make, "keywords", {})}


def op_of(case: Case) -> Op:
    """Return the Op that made this case."""
    op: Op = case.call.args[0]  # type: ignore[attr-defined]  # the Op is the first argument of the partial
    return op


def options_of(case: Case) -> Mapping[str, Any]:
    """Return the options with which a case calls its op."""
    return {**op_of(case).always, **case.call.args[1]}  # type: ignore[attr-defined]


def called(op: Op, options: Mapping[str, Any], **tensors: Tensor) -> Tensors:
    """Call the op with these tensors, and return its outputs by name."""
    function = op.call or getattr(flashlin, op.name)
    return _by_name(op.outputs, function(**{**op.always, **options, **tensors}))


def expected(op: Op, options: Mapping[str, Any], **tensors: Tensor) -> Tensors:
    """Call the reference with these tensors, and return its outputs by name."""
    effective = {name: value for name, value in options.items() if name not in WITHOUT_EFFECT}
    return _by_name(op.outputs, op.reference(**tensors, **effective))


def _by_name(outputs: Iterable[str], returned: Any) -> Tensors:
    """Return the returned tensors by name. Outputs that the call does not request are None and left out."""
    names, values = tuple(outputs), returned if isinstance(returned, tuple) else (returned,)
    return {name: x for name, x in zip(names[:len(values)], values, strict=True) if x is not None}
