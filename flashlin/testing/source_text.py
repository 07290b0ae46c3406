"""Python source without what changes nothing: two texts with the same code in them are one."""
from __future__ import annotations

import ast
from typing import Any


def normalised(source: str) -> str:
    """The syntax tree of ``source`` in words, without comments, layout, docstrings, spelling of literals. The same on every Python that we support,
    which ``ast.dump`` is not: newer ones have more fields, and print fewer. Raises SyntaxError."""
    words: list[str] = []
    _write(ast.parse(source), words)
    return " ".join(words)


def _write(node: Any, words: list[str]) -> None:
    if isinstance(node, ast.Constant):
        words.append(repr(node.value))
    elif isinstance(node, ast.AST):
        words.append(f"({type(node).__name__}")
        for name in node._fields:
            value = getattr(node, name, None)
            if value is None or value == [] or name in ("ctx", "type_comment"):  # ctx follows from where a name stands
                continue
            words.append(name)
            _write(value, words)
        words.append(")")
    elif isinstance(node, list):
        words.append("[")
        for one in node:
            if not _says_nothing(one):
                _write(one, words)
        words.append("]")
    else:
        words.append(repr(node))


def _says_nothing(statement: Any) -> bool:
    """A docstring, or a text that stands alone elsewhere."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)
