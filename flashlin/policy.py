"""Policy: what flashlin may do on its own. Read once from the environment, changed with ``flashlin.settings(...)``."""
from __future__ import annotations

import os
from types import TracebackType
from typing import Any, NamedTuple

CHOICES = {"policy": ("auto", "strict", "off"), "path": ("auto", "triton", "torch"), "tokens": ("async", "sync", "off"),
           "canary": ("auto", "off"), "debug": ("0", "1")}
FOLDERS = ("home", "cache")  # FLASHLIN_HOME and FLASHLIN_CACHE: see guards.proven and testing.environments


class Policy(NamedTuple):
    """policy: ``auto`` takes any remedy, ``strict`` only exact ones, ``off`` skips the known-issue checks.
    path: ``auto``, or insist on ``triton`` or ``torch``. ignore: ids of known issues to disregard.
    tokens: how out-of-range tokens on a GPU are reported (``async``, ``sync``, ``off``). canary: whether kernels that nobody has run on
    such a card under such a Triton are tried in a child process before their first use. debug: also check values, at the price of a sync.
    """
    policy: str = "auto"
    path: str = "auto"
    ignore: frozenset[str] = frozenset()
    tokens: str = "async"
    canary: str = "auto"
    debug: bool = False


_current: Policy | None = None


def current() -> Policy:
    """The policy in force; the environment (FLASHLIN_POLICY, _PATH, _IGNORE, _TOKENS, _CANARY, _DEBUG) is read at the first call."""
    global _current
    if _current is None:
        _current = from_environment(os.environ)
    return _current


def from_environment(environment: Any) -> Policy:
    """Policy out of ``FLASHLIN_*``. Raises ValueError that names the variable and lists what it may be."""
    given = {name: environment[f"FLASHLIN_{name.upper()}"] for name in (*CHOICES, "ignore") if f"FLASHLIN_{name.upper()}" in environment}
    return _changed(Policy(), given, prefix="FLASHLIN_")


def _changed(policy: Policy, given: dict[str, Any], prefix: str = "") -> Policy:
    unknown = set(given) - set(Policy._fields)
    if unknown:
        raise ValueError(f"settings: got {', '.join(sorted(unknown))}, need some of {', '.join(Policy._fields)}")
    for name, value in given.items():
        if name == "ignore":
            ids = value.split(",") if isinstance(value, str) else value
            policy = policy._replace(ignore=frozenset(part.strip() for part in ids if part.strip()))
            continue
        text = {True: "1", False: "0"}.get(value, value) if name == "debug" else value
        if text not in CHOICES[name]:
            shown = prefix + (name.upper() if prefix else name)
            raise ValueError(f"{shown}: got {value!r}, need one of {', '.join(CHOICES[name])}")
        policy = policy._replace(**{name: text == "1" if name == "debug" else text})
    return policy


class settings:
    """Change the policy: ``flashlin.settings(path="torch")`` for good, ``with flashlin.settings(policy="strict"):`` for a while.

    Takes the fields of ``Policy``. Raises ValueError that lists the valid values.
    """

    def __init__(self, **changes: Any) -> None:
        global _current
        self._before = current()
        _current = _changed(self._before, changes)

    def __enter__(self) -> Policy:
        return current()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        global _current
        _current = self._before
