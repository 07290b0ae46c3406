"""The decorators of public functions: each call and its backward run through them.

A decorated function has the following properties, whatever its path:

- Autocast changes nothing. The op and its backward compute the same values in the same dtypes inside and
  outside of autocast.
- Lazily negated or conjugated tensors (``z.conj().imag``) are copied first, because kernels read memory. The
  same holds for incoming gradients.
- Inside a transform of torch.func and in forward-mode AD an op runs in plain torch, because kernels compute
  no tangents and no batches of vmap. Some code of the torch path cannot be transformed by torch and has
  another form for such calls (``compat.tracing.transformed``).
- An unknown keyword is an error. This includes functions with ``**unknown`` in their signature, which mirrors
  a function of fla that accepts and ignores any keyword.

Every public function must have the decorator ``@entry``. ``tests/ops/test_entry.py`` finds a public function
without it.

A function that ends in a linear layer computes that product in the autocast dtype, as ``torch.nn.Linear``
does. Its decorator is ``linear_entry``: autocast stays on until the function has read ``linear_dtype``, and
the functions it then calls are decorated with ``without_autocast``.

Backward: autograd runs each node with the autocast state of the thread that calls ``backward()``. Therefore
the node of each output gets a hook; for a view, this is the node of its base. If autocast is on when backward
reaches that node, the hook turns it off for the node and for all other nodes that the op made. torch restores
the autocast state after each node.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import CO_VARKEYWORDS
from types import NoneType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from flashlin import policy
from flashlin.compat.launch_cache import TENSORS
from flashlin.compat.suggestions import keywords_of
from flashlin.compat.tracing import transformed
from flashlin.guards.tensors import no_unknown, resolved
from flashlin.ops._common import numerics

P = ParamSpec("P")
R = TypeVar("R")
MARK = "__flashlin_entry__"
FIRST = "flashlin_first_node"  # attribute of our own autograd nodes: the number of the op's first node

any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
_tracing = torch.compiler.is_compiling
# The number of this thread's next autograd node. Numbers rise with each node.
_next_node: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
_TENSORS, _PLAIN = frozenset(TENSORS), frozenset({NoneType, bool, int, float, str, torch.dtype})

# Types of autograd nodes whose backward is decorated with ``gradients.once``, which reads FIRST.
own_nodes: set[type] = set()


class _Outside:
    """The autocast state around a traced call.

    autocast: True if autocast is on outside the call that torch.compile traces.
    """
    autocast = False


outside = _Outside()


def entry(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function so that it and its backward run without autocast and on non-lazy tensors.

    Signature, docstring and name do not change; ``__wrapped__`` is the undecorated function.
    """
    return _entered(function, _without_autocast)


def linear_entry(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function that computes a linear layer's product in the autocast dtype.

    Autocast stays on in the function itself, so all functions that compute must be decorated with
    ``without_autocast``. Otherwise it does the same as ``entry``.
    """
    return _entered(function, lambda function, args, kwargs: function(*args, **kwargs))


def is_entry(function: Any) -> bool:
    """Return True for a function decorated with ``entry`` or ``linear_entry``."""
    return getattr(function, MARK, False) is True


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a private function so that it runs without autocast."""
    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if any_autocast():
            return _without_autocast(function, args, kwargs)
        return function(*args, **kwargs)
    return run


def _entered(function: Callable[P, R], under_autocast: Callable[..., Any]) -> Callable[P, R]:
    """Return the function wrapped by the code that ``entry`` and ``linear_entry`` share.

    under_autocast: called with (function, args, kwargs) to run the function if autocast is on.
    """
    named, any_other = keywords_of(function), bool(function.__code__.co_flags & CO_VARKEYWORDS)
    among = frozenset(named).issuperset

    @wraps(function)
    def entered(*args: P.args, **kwargs: P.kwargs) -> R:
        if _tracing():  # traced operators get no lazy tensors, and AOTAutograd makes the backward
            for name in kwargs:
                if any_other and name not in named:
                    no_unknown(function.__name__, named, kwargs)
            return under_autocast(function, args, kwargs) if any_autocast() else function(*args, **kwargs)
        if transformed() and policy.current().path != "torch":
            with policy.settings(path="torch"):
                return entered(*args, **kwargs)
        if policy.current().debug and not numerics.own.busy:
            return numerics.watched(function, entered, args, kwargs)
        if any_other and not among(kwargs):
            no_unknown(function.__name__, named, kwargs)
        first = _next_node()
        made: R
        x: Any
        for x in (*args, *kwargs.values()) if kwargs else args:  # this loop must be fast: every call runs it
            kind = type(x)
            if x.is_neg() if kind in _TENSORS else kind not in _PLAIN and _is_lazy(x):
                made = _on_copies(function, under_autocast, args, kwargs)
                break
        else:
            made = under_autocast(function, args, kwargs) if any_autocast() else function(*args, **kwargs)
        if _next_node() != first:
            _hook_outputs(made, first)
        return made
    setattr(entered, MARK, True)
    return entered


def _is_lazy(x: Any) -> bool:
    """Return True for a lazily negated tensor, and for a tuple or list that contains one.

    Only complex tensors can be lazily conjugated, and every op rejects complex tensors.
    """
    return any(map(_is_lazy, x)) if isinstance(x, (tuple, list)) else isinstance(x, Tensor) and x.is_neg()


def _on_copies(function: Callable[..., R], under_autocast: Callable[..., Any], args: Sequence[Any],
               kwargs: Mapping[str, Any]) -> R:
    """Call the function with copies of lazily negated or conjugated tensors.

    under_autocast: called with (function, args, kwargs) to run the function if autocast is on.
    """
    given, named = [resolved(x) for x in args], {name: resolved(x) for name, x in kwargs.items()}
    made: R = under_autocast(function, given, named) if any_autocast() else function(*given, **named)
    return made


def _without_autocast(function: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]) -> R:
    """Call ``function(*args, **kwargs)`` with autocast turned off; the caller has checked that it is on."""
    if not _tracing():
        with torch._C._DisableAutocast():  # for all device types
            return function(*args, **kwargs)
    kinds = [x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    kind = kinds[0] if kinds else "meta"
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return function(*args, **kwargs)
    outside.autocast = True
    try:
        with torch.autocast(kind, enabled=False):
            return function(*args, **kwargs)
    finally:
        outside.autocast = False


# --- backward ---

def _hook_outputs(outputs: Any, first: int) -> None:
    """Hook the autograd nodes of an op's outputs, so that the op's backward runs without autocast.

    first: number of the op's first node. The op made this node and all later ones.
    """
    before = None
    for y in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
        node = y.grad_fn if isinstance(y, Tensor) else None
        if node is not None and y._is_view() and (base := y._base.grad_fn) is not None:
            # A write to a view replaces its nodes, and the graph continues at the node of its base.
            _hook_nodes(((node, 0),), first, base)
            node = base
        if node is None or node is before:
            continue
        before = node
        if type(node) in own_nodes:  # an attribute costs less than a hook
            setattr(node, FIRST, first)
        elif node._sequence_nr() >= first:  # otherwise the op returned an input unchanged
            # A hook that refers to its own node would be a cycle that Python cannot collect.
            _Hooks(node, node.next_functions, first, last=True)


class _Hooks:
    """The hooks of one autograd node of an op.

    behind: the node's ``next_functions``.
    first: the number of the op's first node.
    last: True if the node makes an output and its next nodes have no hooks yet.

    Why ``behind`` is stored: it keeps the destruction of a long graph from overflowing the stack. If Python
    code has read a node, newer torch (2.13 and 2.15, but not 2.9) frees it within the destructor of the node
    before it. So freeing a long graph would recurse deeply. With ``behind``, Python objects own the next
    nodes, and Python bounds the depth of the recursion in which it frees its own objects.
    """

    def __init__(self, node: Any, behind: Sequence[tuple[Any, int]], first: int, last: bool = False) -> None:
        self.behind, self.first, self.last, self.made = behind, first, last, 0
        node.register_prehook(self.before)
        node.register_hook(self.after)

    def before(self, gradients: Sequence[Tensor | None]) -> None:
        """Before the node runs in backward, turn autocast off.

        The node of an output also hooks the nodes of the op that run after it.
        """
        if _tracing() or not (any_autocast() or torch.is_grad_enabled()):
            return
        for x in gradients if any_autocast() else ():
            if x is not None and x.device.type != "meta":
                torch.set_autocast_enabled(x.device.type, False)  # torch restores it after the node
                break
        if self.last:
            _hook_nodes(self.behind, self.first)
        self.last = False  # the next nodes keep their hooks for a second backward of the same graph
        self.made = _next_node()

    def after(self, made: Sequence[Tensor | None], _: Any) -> None:
        """Hook the autograd nodes that an op's backward made under create_graph; they also belong to the op.

        made: the gradients that the backward of one node of the op returned.
        """
        if torch.is_grad_enabled() and not _tracing():
            _hook_outputs(made, self.made)


def without_autocast_behind(node: Any) -> None:
    """Keep autocast off in all nodes that follow ``node`` in backward and that the same op made.

    node: an autograd node whose type is in ``own_nodes``.
    """
    if (first := getattr(node, FIRST, None)) is not None:
        _hook_nodes(node.next_functions, first)
        setattr(node, FIRST, None)


def _hook_nodes(behind: Sequence[tuple[Any, int]], first: int, end: Any = None) -> None:
    """Hook the nodes ``behind`` and all nodes reachable from them that the op made.

    end: a node at which the search stops.
    """
    seen, left = {end}, [*behind]
    while left:
        node, _ = left.pop()
        # The node of a leaf has the highest number and belongs to no op.
        if node is None or node in seen or not node.next_functions or node._sequence_nr() < first:
            continue
        seen.add(node)
        _Hooks(node, node.next_functions, first)
        left += node.next_functions
