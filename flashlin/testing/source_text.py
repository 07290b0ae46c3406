"""Normalise Python source, so that two texts with the same code become equal."""
from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
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
    words: list[str] = []
    _write(tree, words)
    return " ".join(words)


def _by_position(call: ast.Call, names: Sequence[str]) -> None:
    """Make keywords positional up to the first parameter that has no argument; sort the other keywords."""
    starred = any(isinstance(one, ast.Starred) for one in call.args)
    if starred or any(keyword.arg is None for keyword in call.keywords):
        return
    given = {keyword.arg: keyword for keyword in call.keywords}
    while len(call.args) < len(names) and names[len(call.args)] in given:
        call.args.append(given.pop(names[len(call.args)]).value)
    call.keywords = sorted(given.values(), key=lambda keyword: keyword.arg or "")


def _write(node: Any, words: list[str]) -> None:
    if isinstance(node, ast.Constant):
        words.append(repr(node.value))
    elif isinstance(node, ast.AST):
        words.append(f"({type(node).__name__}")
        for name in node._fields:
            value = getattr(node, name, None)
            # ctx follows from the position of a name
            if value is None or value == [] or name in ("ctx", "type_comment"):
                continue
            words.append(name)
            _write(_operands(node) if name == "values" and isinstance(node, ast.BoolOp) else value, words)
        words.append(")")
    elif isinstance(node, list):
        words.append("[")
        for one in node:
            if not _says_nothing(one):
                _write(one, words)
        words.append("]")
    else:
        words.append(repr(node))


def _operands(chain: ast.BoolOp) -> list[ast.expr]:
    """Return the operands of a chain such as ``a and b and c``, without regard to parentheses."""
    return [one for value in chain.values
            for one in (_operands(value) if isinstance(value, ast.BoolOp) and type(value.op) is type(chain.op)
                        else [value])]


def _says_nothing(statement: Any) -> bool:
    """Return True for a docstring or another string that is a statement of its own."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
