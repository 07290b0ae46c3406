"""Traits of a Triton kernel, read from its source text; known issues test them.

The code only parses the text, and runs nothing. If the text leaves it open whether a kernel has a trait, the
trait counts as present, provided that a wrong guess costs only speed.
"""
from __future__ import annotations

import ast
import copy
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple, TypeGuard

from flashlin.compat.traits import HALVES, LACKING, trait_set

DOTS = ("dot", "dot_scaled")
# Functions over the rows of a tile, and functions of two tiles.
SUMS, JOINS = ("sum", "max", "min"), ("maximum", "minimum")


class Source(NamedTuple):
    """Facts about the source of a function.

    traits: traits that the text shows; they are defined in compat/traits.py.
    half: True if the text names a 16-bit type.
    wide: True if the text names int64, which suggests that the kernel supports long tensors.
    calls: names of the functions that it calls.
    """
    traits: frozenset[str]
    half: bool
    wide: bool
    calls: frozenset[str]


class _InFull(ast.NodeTransformer):
    """Rewriter of x += y to x = x + y, so that the other functions have to support only one form."""

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.Assign:
        before = copy.copy(node.target)
        before.ctx = ast.Load()
        return ast.Assign([node.target], ast.BinOp(before, node.op, node.value))


@lru_cache(maxsize=1024)
def read(text: str) -> Source:
    """Return the facts about the source text of one function.

    Raises SyntaxError if the text is not valid Python.
    """
    tree = _InFull().visit(ast.parse(text))
    nodes, dots = list(ast.walk(tree)), _dots(tree)
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)} | _names(tree)
    loops = [node for node in nodes if isinstance(node, (ast.For, ast.While))]
    calls = frozenset(_called(node) for node in nodes if isinstance(node, ast.Call))
    found = [name for name, has_it in OF_A_LOOP.items() if any(map(has_it, loops))]
    found += ["dot"] * bool(dots) + ["any_precision"] * (not all(map(_ieee, dots)))
    return Source(trait_set(*found) | calls & LACKING, bool(names & HALVES), "int64" in names, calls)


def of(kernel: Any) -> Source:
    """Return the combined facts about the sources of a kernel and of the functions that it calls.

    Called functions are found by name in the globals and the closure of the caller. Others are ignored.
    """
    waiting, sources = [kernel.fn], dict[Any, Source]()
    while waiting:
        function = waiting.pop()
        if function in sources:
            continue
        sources[function] = read(textwrap.dedent(inspect.getsource(function)))
        known = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
        called = [getattr(known.get(name), "fn", None) for name in sources[function].calls]
        waiting += filter(inspect.isfunction, called)
    # Traits of loops are looked up in each function separately, although a helper may be called from any
    # loop.
    traits, half, wide, calls = zip(*sources.values(), strict=True)
    return Source(frozenset[str]().union(*traits), any(half), any(wide), frozenset[str]().union(*calls))


def _called(call: ast.Call) -> str:
    """Return the name of the called function, without its module, or ``""`` if it has no name."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _calls(node: ast.AST, names: tuple[str, ...]) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and _called(node) in names


def _dots(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if _calls(node, DOTS)]


def _given(call: ast.Call, places: slice, names: tuple[str, ...]) -> list[ast.expr]:
    """Return the arguments of a call that are passed at the given positions or by the given names."""
    return [*call.args[places], *(keyword.value for keyword in call.keywords if keyword.arg in names)]


def _ieee(dot: ast.Call) -> bool:
    """Return True if a dot requests products of full precision, with the arguments of any Triton release."""
    said = {keyword.arg: keyword.value.value
            for keyword in dot.keywords if isinstance(keyword.value, ast.Constant)}
    return said.get("input_precision") == "ieee" or ("input_precision" not in said
                                                     and said.get("allow_tf32") is False)


def _carries_state(loop: ast.For | ast.While) -> bool:
    """Return True if a loop carries a state, scales it, and uses it as an operand of a dot.

    The loop carries the state from one iteration to the next. The state may reach the dot through other
    names.
    """
    assigned = _assigned(loop)
    reached = _handed_on(loop) & {name for name, value in assigned
                                  if any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult)
                                         and name in _names(part) for part in ast.walk(value))}
    while further := {name for name, value in assigned if reached & _names(value)} - reached:
        reached |= further
    return any(reached & _names(operand) for dot in _dots(loop)
               for operand in _given(dot, slice(2), ("input", "lhs", "other", "rhs")))


def _sums(loop: ast.AST) -> Iterator[set[str]]:
    """Yield sets of names to which a loop adds a matrix product.

    For each sum or difference with a matrix product on one side, the set contains the names on the other
    side. For each dot with an accumulator (``acc``), it contains the names in that argument.
    """
    for node in ast.walk(loop):
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            for side, other in ((node.left, node.right), (node.right, node.left)):
                if _dots(side):
                    yield _names(other)
    for dot in _dots(loop):
        yield from map(_names, _given(dot, slice(2, 3), ("acc",)))


def _adds_to_fresh(loop: ast.For | ast.While) -> bool:
    accumulators = _accumulators(loop)
    return any(names and not names & accumulators for names in _sums(loop))


def _chains(loop: ast.For | ast.While) -> bool:
    accumulators, seen = _accumulators(loop), set[str]()
    for names in _sums(loop):
        if names & accumulators & seen:
            return True
        seen |= names
    return False


def _row_sums(loop: ast.For | ast.While) -> dict[str, ast.expr]:
    """Return the accumulators to which a loop adds sums of the rows of a loaded tile.

    Each is given by its name and the expression that the loop assigns to it. Maxima and minima count as sums.
    The statement must belong to the loop itself, not to an inner loop. Sums along axis 0 do not count,
    because they may be sums of a vector. Such a sum is a scalar, which causes no known failure.
    """
    own = [pair for node in loop.body if isinstance(node, ast.Assign) for pair in _assigned(node)]

    def named(made: Callable[[ast.expr], bool]) -> Callable[[ast.expr], bool]:
        names = {name for name, value in own if made(value)}
        return lambda node: made(node) or ast.unparse(node) in names
    is_loaded = named(lambda node: _calls(node, ("load",)))
    is_sum = named(lambda node: _along_rows(node) and any(map(is_loaded, _given(node, slice(1), ("input",)))))
    return {name: value for name, value in own if name in _accumulators(loop)
            for one, other in itertools.permutations(_joined(value), 2)
            if ast.unparse(one) == name and is_sum(other)}


def _along_rows(node: ast.expr) -> TypeGuard[ast.Call]:
    """Return True if the node is a sum, maximum or minimum along an axis that is a nonzero literal."""
    return _calls(node, SUMS) and any(ast.unparse(axis).lstrip("-0").isdigit()
                                      for axis in _given(node, slice(1, 2), ("axis",)))


def _joined(node: ast.expr) -> list[ast.expr]:
    """Return both operands of an addition, a maximum or a minimum, or nothing for other nodes."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [node.left, node.right]
    return node.args[:2] if _calls(node, JOINS) else []


def _peeks(loop: ast.For | ast.While) -> bool:
    def reads(tree: ast.AST, name: str) -> int:
        return [node.id for node in ast.walk(tree)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)].count(name)
    return any(reads(loop, name) > reads(value, name) for name, value in _row_sums(loop).items())


def _accumulators(loop: ast.For | ast.While) -> set[str]:
    """Return the names whose values a loop carries from one iteration to the next."""
    return _handed_on(loop) & {name for name, _ in _assigned(loop)}


def _assigned(loop: ast.AST) -> list[tuple[str, ast.expr]]:
    return [(name, node.value) for node in ast.walk(loop)
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None
            for target in _targets(node) for name in _names(target)]


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _handed_on(loop: ast.For | ast.While) -> set[str]:
    """Return the names that the body of a loop reads before it assigns them."""
    read, written = set[str](), set[str]()

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            if node.value is not None:  # Python reads the value before it sets the targets
                visit(node.value)
            for target in _targets(node):
                visit(target)
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                written.add(node.id)
            elif node.id not in written:
                read.add(node.id)
        else:
            for part in ast.iter_child_nodes(node):
                visit(part)

    for statement in loop.body:
        visit(statement)
    return read


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


# For each trait of loops: a function whose result is true if a loop has the trait.
OF_A_LOOP: dict[str, Callable[[ast.For | ast.While], object]] = {
    "rmw_acc": _carries_state, "fresh_acc": _adds_to_fresh, "chained_acc": _chains, "row_sums": _row_sums,
    "read_row_sums": _peeks}
