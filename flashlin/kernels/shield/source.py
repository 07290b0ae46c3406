"""What the source of a Triton kernel tells about its launches: the traits that known issues look for. Runs
nothing.

Conservative: what cannot be told from the text counts as being there, where that costs speed at most.
"""
from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

DOTS = ("dot", "dot_scaled")
HALVES = ("float16", "bfloat16")
# Functions of triton.language that some release lacks or refuses; a kernel that calls one has its name as a
# trait.
LACKING = frozenset({"atomic_add", "gather", "make_block_ptr", "make_tensor_descriptor"})


class Source(NamedTuple):
    """dot: multiplies matrices. state: inside a loop, scales a value and multiplies by it, as a recurrence
    does. any_precision: a dot may use tf32. half: names a 16-bit type itself. wide: computes some offset in
    64 bits, so its author thought of long tensors. calls: names of functions that it calls. fresh: inside a
    loop, adds a product to what the same turn has made. chained: inside a loop, adds two products to one
    accumulator."""
    dot: bool
    state: bool
    any_precision: bool
    half: bool
    wide: bool
    calls: frozenset[str]
    fresh: bool = False
    chained: bool = False


@lru_cache(maxsize=1024)
def read(text: str) -> Source:
    """From the text of one function. Raises SyntaxError where it is none."""
    tree = ast.parse(text)
    dots = [node for node in ast.walk(tree) if _called(node) in DOTS]
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    loops = [node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.While))]
    return Source(bool(dots), any(_carries_state(loop) for loop in loops),
                  any(not _ieee(dot) for dot in dots), bool(names & set(HALVES)), "int64" in names,
                  frozenset(name for node in ast.walk(tree) if (name := _called(node))),
                  any(_adds_to_fresh(loop) for loop in loops), any(_chains(loop) for loop in loops))


def of(kernel: Any) -> Source:
    """The source of a kernel and of the functions that it calls, as far as its module or closure knows them
    by name."""
    waiting, seen, found = [kernel.fn], set[Any](), list[Source]()
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        found.append(read(textwrap.dedent(inspect.getsource(function))))
        known = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
        for name in found[-1].calls:
            called = getattr(known.get(name), "fn", None)
            if inspect.isfunction(called):
                waiting.append(called)
    return merged(found)


def merged(sources: list[Source]) -> Source:
    """A kernel and the functions it calls as one. A helper that multiplies may be called from any loop; a
    state is looked for in each."""
    return Source(dot=any(source.dot for source in sources), state=any(source.state for source in sources),
                  any_precision=any(source.any_precision for source in sources),
                  half=any(source.half for source in sources), wide=any(source.wide for source in sources),
                  calls=frozenset[str]().union(*(source.calls for source in sources)),
                  fresh=any(source.fresh for source in sources),
                  chained=any(source.chained for source in sources))


def traits(source: Source, dtypes: frozenset[str], tallest: int) -> frozenset[str]:
    """dtypes: torch's names of the tensors' types; tallest: the largest tile size among the constants."""
    halves = dtypes & set(HALVES)
    found = {*(source.calls & LACKING), *(["bf16"] if "bfloat16" in dtypes else []),
             *(["both_halves"] if halves == set(HALVES) else [])}
    if source.dot:
        found |= {"dot", "half_dot" if halves or source.half else "fp32_dot"}
        if source.any_precision:
            found |= {"any_precision"} if halves or source.half else {"any_precision", "tf32_dot"}
        if source.state:
            found |= {"rmw_acc", "tall_state"} if tallest >= 256 else {"rmw_acc"}
        found |= {trait
                  for trait, there in (("fresh_acc", source.fresh), ("chained_acc", source.chained)) if there}
    return frozenset(found)


def _called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func,
                                                                                                  ast.Name) else ""


def _ieee(dot: ast.AST) -> bool:
    """Whether a dot asks for products of full precision, in the words of any release."""
    assert isinstance(dot, ast.Call)
    said = {keyword.arg: keyword.value.value
            for keyword in dot.keywords if isinstance(keyword.value, ast.Constant)}
    return said.get("input_precision") == "ieee" or ("input_precision" not in said
                                                     and said.get("allow_tf32") is False)


def _carries_state(loop: ast.For | ast.While) -> bool:
    """A value that one turn hands to the next is scaled, and reaches an operand of a dot, directly or through
    other names."""
    scaled = {name for name, value in _assigned(loop) if any(_scales(part, name) for part in ast.walk(value))}
    scaled |= {node.target.id for node in ast.walk(loop)
               if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult)
               and isinstance(node.target, ast.Name)}
    reached = scaled & _handed_on(loop)
    while True:
        further = {name for name, value in _assigned(loop) if reached & _names(value)}
        if further <= reached:
            break
        reached |= further
    operands = [part for node in ast.walk(loop) if _called(node) in DOTS and isinstance(node, ast.Call)
                for part in [*node.args[:2],
                             *(keyword.value for keyword in node.keywords
                               if keyword.arg in ("input", "lhs", "other", "rhs"))]]
    return any(reached & _names(operand) for operand in operands)


def _sums(loop: ast.AST) -> Iterator[set[str]]:
    """For each product that is added to something in a loop: the names of that something."""
    def multiplies(node: ast.AST) -> bool:
        return any(_called(part) in DOTS for part in ast.walk(node))
    for node in ast.walk(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.op,
                                                          (ast.Add, ast.Sub)) and multiplies(node.value):
            yield _names(node.target)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            yield from (_names(other)
                        for side, other in ((node.left, node.right), (node.right, node.left))
                        if multiplies(side))
        elif isinstance(node, ast.Call) and _called(node) in DOTS:
            yield from (_names(given)
                        for given in [*node.args[2:3],
                                      *(keyword.value for keyword in node.keywords if keyword.arg == "acc")])


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


def _accumulators(loop: ast.For | ast.While) -> set[str]:
    """What one turn hands to the next."""
    return _handed_on(loop) & {name for name, _ in _assigned(loop)}


def _assigned(loop: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign):
            yield from ((name, node.value) for target in node.targets for name in _names(target))
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)) and isinstance(node.target,
                                                                             ast.Name) and node.value is not None:
            yield node.target.id, node.value


def _handed_on(loop: ast.For | ast.While) -> set[str]:
    """Names that the body reads before it sets them."""
    read, written = set[str](), set[str]()

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            if isinstance(node, ast.AugAssign):
                read.update(_names(node.target) - written)
            if node.value is not None:
                visit(node.value)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
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


def _scales(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op,
                                                      ast.Mult) and (name in _names(node.left)
                                                                     or name in _names(node.right))


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
