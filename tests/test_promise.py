"""README's promise of what stays compatible: public names and their signatures, as tests/promise.txt has them.

    python -m tests.test_promise --write      after a deliberate change, for the diff to be read
"""
from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flashlin
import flashlin.backends
import flashlin.mamba
import flashlin.serving

PROMISE = Path(__file__).parent / "promise.txt"


def signature(function: Any) -> str:
    """Names, order, kinds and defaults; the types are the stubs' and mypy's business."""
    known = inspect.signature(function)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in known.parameters.values()]
    text = str(known.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r"<(function \S+) at 0x\w+>", r"<\1>", text)


def public() -> Iterator[str]:
    """A line for each public function, class, method and attribute of our own."""
    for package in (flashlin, flashlin.mamba, flashlin.serving, flashlin.backends):
        for name in package.__all__:
            thing, whole = getattr(package, name), f"{package.__name__}.{name}"
            if inspect.isclass(thing):
                yield whole + signature(thing)
                yield from (f"{whole}.{method}" + (signature(value) if callable(value) else "")
                            for method in dir(thing) if not method.startswith("_")
                            for value in [inspect.getattr_static(thing, method)] if ours(value))
            else:
                yield whole + (signature(thing) if callable(thing) else "")


def ours(value: Any) -> bool:
    """Whether it is a method or property of our own: torch, pydantic and NamedTuple add others."""
    function = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", value))
    return getattr(function, "__module__", "").startswith("flashlin")


def broken(before: list[str], after: list[str]) -> list[str]:
    """Names that are gone, and functions that no longer take what they took."""
    now = {line.partition("(")[0]: line for line in after}
    return [line for line in before
            if line not in after and not grown(line, now.get(line.partition("(")[0], ""))]


def grown(before: str, after: str) -> bool:
    """Whether ``after`` is the same signature with more parameters that nobody has to give, at its end or
    behind a ``*``."""
    old, new = before.rstrip(")").split(", "), after.rstrip(")").split(", ")
    added = [part for part in new if part not in old]
    return [part for part in new if part in old] == old and all(
        "=" in part or part.startswith("*") for part in added) and (
        new[:len(old)] == old or any(part.startswith("*") for part in new))


def test_what_users_import_stays() -> None:
    before, after = PROMISE.read_text().splitlines(), list(public())
    assert not broken(before, after), "README, 'What stays compatible': a minor release warns first"
    assert after == before, "grown by addition, as is promised; run: python -m tests.test_promise --write"


def test_what_breaks_the_promise() -> None:
    before = ["f(q, k, v=None)", "g(x, *, y=1)"]
    assert not broken(before, [*before, "h()"])
    assert not broken(before, ["f(q, k, v=None, w=None)", "g(x, *, y=1, z=2)"])
    assert broken(before, ["f(q, k, v=None)"]) == ["g(x, *, y=1)"]
    assert broken(before, ["f(q, k, w, v=None)", "g(x, *, y=1)"]) == ["f(q, k, v=None)"]  # without a default
    assert broken(before, ["f(q, k, w=None, v=None)", "g(x, *, y=1)"]) == ["f(q, k, v=None)"]  # in v's place
    assert broken(before, ["f(k, q, v=None)", "g(x, *, y=1)"]) == ["f(q, k, v=None)"]
    assert broken(before, ["f(q, k, v=0)", "g(x, *, y=1)"]) == ["f(q, k, v=None)"]


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    PROMISE.write_text("\n".join(public()) + "\n")
