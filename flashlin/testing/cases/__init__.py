"""The test cases of every op, which the tests, ``doctor --run`` and the GPU records use.

Each file of this folder with a list ``CASES`` contributes the cases of one family of ops.
"""
from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

import flashlin
from flashlin.testing.cases.op import WITHOUT_EFFECT, facts_of, op_of, options_of
from flashlin.testing.compare import Case


def _of_scalars(cases: list[Case]) -> Iterator[Case]:
    """Yield a case for each float option and each flag of an op that no given case sets.

    The new case is the op's first case with another value of this option: twice the default number (0.5 if
    the default is 0), or the opposite flag.
    """
    chosen: dict[str, set[str]] = {}
    for case in cases:
        chosen.setdefault(case.op, set(WITHOUT_EFFECT)).update(options_of(case))
    for case in {case.op: case for case in reversed(cases) if hasattr(flashlin, case.op)}.values():
        for name, parameter in inspect.signature(getattr(flashlin, case.op)).parameters.items():
            usual = parameter.default
            if isinstance(usual, (bool, float)) and name not in chosen[case.op]:
                options, other = options_of(case), not usual if isinstance(usual, bool) else 2 * usual or 0.5
                options = {key: x for key, x in options.items() if key not in op_of(case).always}
                yield op_of(case)(f"{name}={other}", {**options, name: other}, **facts_of(case))


_modules = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
_written = [case for module in _modules for case in getattr(module, "CASES", ())]
CASES: tuple[Case, ...] = (*_written, *_of_scalars(_written))
