"""Normalise Python source, so that two texts with the same code become equal."""
from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Parameters = Mapping[str, Sequence[str]]


def normalised(source: str, parameters: Parameters | None = None) -> str:
    """Return the syntax tree of ``source`` as text, without comments, layout and docstrings.

    The spelling of literals does not matter either. The text is the same on every supported Python.
    The result of ``ast.dump`` is not the same: in newer Pythons nodes have more fields, and ``ast.dump``
    omits more of them. Raises SyntaxError.

    parameters: parameter names of functions that ``source`` calls. Their arguments are matched to parameters,
        so that a call by position equals a call by keyword in any order.
    """
    tree, known = ast.parse(source), parameters or {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
            _by_position(node, known[node.func.id])
    return " ".join(_words(tree))


def _by_position(call: ast.Call, names: Sequence[str]) -> None:
    """Make keywords positional up to the first parameter that has no argument; sort the other keywords."""
    starred = any(isinstance(one, ast.Starred) for one in call.args)
    if starred or any(keyword.arg is None for keyword in call.keywords):
        return
    given = {keyword.arg: keyword for keyword in call.keywords}
    while len(call.args) < len(names) and names[len(call.args)] in given:
        call.args.append(given.pop(names[len(call.args)]).value)
    call.keywords = sorted(given.values(), key=lambda keyword: keyword.arg or "")


def _words(node: Any) -> Iterator[str]:
    """Yield the words of a syntax tree, of a list of trees or of a plain value in a tree."""
    if isinstance(node, list):
        yield "["
        for one in node:
            if not _says_nothing(one):
                yield from _words(one)
        yield "]"
    elif isinstance(node, ast.AST) and not isinstance(node, ast.Constant):
        yield f"({type(node).__name__}"
        for name in node._fields:
            value = getattr(node, name, None)
            # ctx follows from the position of a name
            if value is None or value == [] or name in ("ctx", "type_comment"):
                continue
            yield name
            yield from _words(_operands(node) if name == "values" and isinstance(node, ast.BoolOp) else value)
        yield ")"
    else:
        yield repr(node.value if isinstance(node, ast.Constant) else node)


def _operands(chain: ast.BoolOp) -> list[ast.expr]:
    """Return the operands of a chain such as ``a and b and c``, without regard to parentheses."""
    return [one for value in chain.values
            for one in (_operands(value) if isinstance(value, ast.BoolOp) and type(value.op) is type(chain.op)
                        else [value])]


def _says_nothing(statement: Any) -> bool:
    """Return True for a docstring or another string that is a statement of its own."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
