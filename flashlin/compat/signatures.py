"""Signatures of functions, also of ``apply`` of an autograd function.

``apply`` is a Python method up to torch 2.13 and a builtin from 2.14, for which ``inspect.signature`` fails.
"""
from __future__ import annotations

import inspect
from types import BuiltinMethodType, MethodType
from typing import Any

import torch


def is_apply(value: Any) -> bool:
    """Return True for ``apply`` of an autograd function, which some packages bind as a public function."""
    kind = getattr(value, "__self__", None)
    return (isinstance(value, (MethodType, BuiltinMethodType)) and isinstance(kind, type)
            and issubclass(kind, torch.autograd.Function) and value.__name__ == "apply")


def signature_of(function: Any) -> inspect.Signature:
    """Return the signature of a function; for ``apply``, that of its ``forward`` without the context.

    Raises TypeError and ValueError as ``inspect.signature`` does.
    """
    if not is_apply(function):
        return inspect.signature(function)
    kind = function.__self__
    forward = inspect.signature(kind.forward)
    has_context = kind.setup_context is torch.autograd.Function.setup_context
    return forward.replace(parameters=[*forward.parameters.values()][has_context:])
