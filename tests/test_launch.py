"""Tests of the function that starts all kernels: it takes arguments by name, and rejects wrong names."""
from __future__ import annotations

import ast
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

import flashlin
from flashlin.compat.launch import start
from flashlin.guards.plan_types import Launch

LAUNCH = Launch("scaled", (4,), 2, 3, (("BT", 16), ("BK", 8)), 0, 0, frozenset())


class Kernel:
    """A stub of a jitted function that stores the grid and the arguments of its last start."""

    def __init__(self) -> None:
        self.grid: tuple[int, ...] = ()
        self.given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    @staticmethod
    def fn(x: Any, o: Any, scale: Any, BT: Any, K: Any, BK: Any) -> None:
        raise AssertionError("a kernel is started, never called")

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **options: Any) -> None:
            self.grid, self.given = grid, (args, options)
        return run


def test_names_go_where_they_belong_in_any_order() -> None:
    kernel, x, o = Kernel(), torch.zeros(1), torch.ones(1)
    for arguments in (dict(x=x, o=o, scale=0.5, K=3), dict(K=3, scale=0.5, o=o, x=x)):
        start(LAUNCH, kernel, 4, arguments)
        assert kernel.grid == (4,)
        assert kernel.given == ((x, o, 0.5, 16, 3, 8), {"num_warps": 2, "num_stages": 3})


@pytest.mark.parametrize("change, says", [
    ({"scale": None}, "missing: scale"),
    ({"scales": 0.5}, "unknown: scales"),
    ({"scale": None, "o": None, "scales": 0.5}, "missing: o scale, unknown: scales"),
    ({"BT": 32}, "of the tile: BT"),
])
def test_a_wrong_name_is_an_error_that_names_it(change: dict[str, Any], says: str) -> None:
    kernel = Kernel()
    arguments = {"x": torch.zeros(1), "o": torch.ones(1), "scale": 0.5, "K": 3, **change}
    with pytest.raises(TypeError, match=f"^arguments of fn: {says}$"):
        start(LAUNCH, kernel, 4, {name: value for name, value in arguments.items() if value is not None})
    assert not kernel.grid


def test_a_kernel_gets_the_shared_values_that_it_names() -> None:
    kernel, x, o = Kernel(), torch.zeros(1), torch.ones(1)
    start(LAUNCH, kernel, 4, dict(o=o, K=3), dict(scale=0.5, other=7, x=x))
    assert kernel.given[0] == (x, o, 0.5, 16, 3, 8)


@pytest.mark.parametrize("arguments, shared, says", [
    (dict(o=1), dict(scale=0.5, K=3), "missing: x"),
    (dict(o=1, scales=0.5), dict(x=1, scale=0.5, K=3), "unknown: scales"),
    (dict(o=1, scale=0.5), dict(x=1, scale=0.5, K=3), "also shared: scale"),
    (dict(o=1, scale=0.5, K=3), dict(x=1, BT=32), "of the tile: BT"),
])
def test_shared_values_excuse_no_wrong_name(arguments: dict[str, Any], shared: dict[str, Any],
                                            says: str) -> None:
    kernel = Kernel()
    with pytest.raises(TypeError, match=f"^arguments of fn: {says}$"):
        start(LAUNCH, kernel, 4, arguments, shared)
    assert not kernel.grid


def test_none_is_an_argument_like_any_other() -> None:
    kernel, x = Kernel(), torch.zeros(1)
    start(LAUNCH, kernel, 1, dict(x=x, o=None, scale=0.5, K=3))
    assert kernel.given[0] == (x, None, 0.5, 16, 3, 8)


KERNELS = sorted((Path(flashlin.__file__).parent / "kernels").rglob("*.py"))


def plain(node: ast.expr, known: Collection[str]) -> bool:
    """Return True if an expression generates no code in Triton.

    Such an expression is a name, a number, or a binary operation of numbers and names in ``known``.
    """
    if isinstance(node, ast.BinOp):
        return all(isinstance(side, ast.Constant) or ast.unparse(side) in known
                   for side in (node.left, node.right))
    return isinstance(node.operand if isinstance(node, ast.UnaryOp) else node, (ast.Name, ast.Constant))


def compile_time(function: ast.FunctionDef) -> set[str]:
    """Return the parameters of a kernel that are annotated as tl.constexpr."""
    return {one.arg for one in function.args.args
            if one.annotation and ast.unparse(one.annotation) == "tl.constexpr"}


def jitted(path: Path) -> list[ast.FunctionDef]:
    """Return the triton.jit functions of a file.

    Gluon functions are left out, because releases with Gluon do not have the limits that are tested here.
    """
    return [one for one in ast.parse(path.read_text()).body if isinstance(one, ast.FunctionDef)
            and any(ast.unparse(decorator).startswith("triton.jit") for decorator in one.decorator_list)]


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_condition_is_a_chain_of_three(path: Path) -> None:
    """No condition in a kernel joins three operands by ``and`` or ``or`` without parentheses.

    Triton can compile such conditions only since 3.4, and the interpreter does not report the error.
    """
    inside = (node for function in jitted(path) for node in ast.walk(function))
    for node in (node for node in inside if isinstance(node, ast.BoolOp)):
        assert len(node.values) == 2, f"line {node.lineno}: put two of {ast.unparse(node)} in parentheses"


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_kernels_call_each_other_by_name(path: Path) -> None:
    for function in jitted(path):
        known = compile_time(function)
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            assert len(call.args) < 10, f"line {call.lineno}: name the arguments of {ast.unparse(call.func)}"
            # Triton evaluates keyword arguments before positional ones, so a keyword must not generate code.
            if len(call.args) > 1 and isinstance(call.func, ast.Name):
                for keyword in call.keywords:
                    assert plain(keyword.value, known), (
                        f"line {call.lineno}: {keyword.arg} moves before the other arguments")
