"""Tests of the README's compatibility promise: public names and signatures stay as in tests/promise.txt.

After a deliberate change, update that file and review the diff:

    python -m tests.test_promise --write
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
    """Return a signature with names, order, kinds and defaults, but without types, which mypy checks."""
    known = inspect.signature(function)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in known.parameters.values()]
    text = str(known.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r"<(function \S+) at 0x\w+>", r"<\1>", text)


def public() -> Iterator[str]:
    """Yield a line for each public function, class, method and attribute that flashlin defines."""
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
    """Return True if flashlin defines this method or property, rather than torch, pydantic or NamedTuple."""
    function = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", value))
    return getattr(function, "__module__", "").startswith("flashlin")


def broken(before: list[str], after: list[str]) -> list[str]:
    """Return the old lines whose name is removed, or whose function rejects calls that were valid before."""
    now = {line.partition("(")[0]: line for line in after}
    return [line for line in before
            if line not in after and not grown(line, now.get(line.partition("(")[0], ""))]


def grown(before: str, after: str) -> bool:
    """Return True if ``after`` is the signature ``before`` plus optional parameters.

    The new parameters must be at the end or after a ``*``.
    """
    old, new = before.rstrip(")").split(", "), after.rstrip(")").split(", ")
    added = [part for part in new if part not in old]
    return [part for part in new if part in old] == old and all(
        "=" in part or part.startswith("*") for part in added) and (
        new[:len(old)] == old or any(part.startswith("*") for part in new))


def test_what_users_import_stays() -> None:
    before, after = PROMISE.read_text().splitlines(), list(public())
    assert not broken(before, after), "README, 'What stays compatible': a minor release warns first"
    assert after == before, "all changes keep the promise; run: python -m tests.test_promise --write"


def test_what_breaks_the_promise() -> None:
    before = ["f(q, k, v=None)", "g(x, *, y=1)"]
    assert not broken(before, [*before, "h()"])
    assert not broken(before, ["f(q, k, v=None, w=None)", "g(x, *, y=1, z=2)"])
    assert broken(before, ["f(q, k, v=None)"]) == ["g(x, *, y=1)"]
    assert broken(before, ["f(q, k, w, v=None)", "g(x, *, y=1)"]) == ["f(q, k, v=None)"]  # w is required
    assert broken(before, ["f(q, k, w=None, v=None)", "g(x, *, y=1)"]) == ["f(q, k, v=None)"]  # w before v
    assert broken(before, ["f(k, q, v=None)", "g(x, *, y=1)"]) == ["f(q, k, v=None)"]
    assert broken(before, ["f(q, k, v=0)", "g(x, *, y=1)"]) == ["f(q, k, v=None)"]


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    PROMISE.write_text("\n".join(public()) + "\n")
