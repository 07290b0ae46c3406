"""Policy: what flashlin may do on its own. Read once from the environment, changed with
``flashlin.settings(...)``."""
from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

from flashlin.compat.locks import ThreadLock

CHOICES = {"policy": ("auto", "strict", "off"), "path": ("auto", "triton", "torch"),
           "tokens": ("async", "sync", "off"), "canary": ("auto", "off", "trial"), "debug": ("0", "1"),
           "autotune": ("timed", "first", "rank0"), "invariant": ("0", "1")}
SWITCHES = ("debug", "invariant")  # True or False
# Read by guards.local_results, testing.environments, integrations.run_command and integrations.summary.
ELSEWHERE = ("home", "cache", "patch", "summary")


class Policy(NamedTuple):
    """policy: ``auto`` takes any remedy, ``strict`` only exact ones, ``off`` skips the known-issue checks.
    path: ``auto``, or insist on ``triton`` or ``torch``. ignore: ids of known issues to disregard.
    tokens: how out-of-range tokens on a GPU are reported (``async``, ``sync``, ``off``); ranks whose calls
    differ are reported as with ``async`` or ``sync``. canary: whether
    kernels that nobody has run on such a card under such a Triton are tried in a child process before their
    first use; ``trial`` in that child itself, which starts such kernels on AMD, too. debug: also check
    values, at the price of a sync. autotune: how a configuration of a tuned kernel is found
    (``flashlin.autotune``: ``timed``, ``first``, ``rank0``). invariant: no choice depends on how many
    sequences a call has or on how long they are, so that what a row gives does not, either, to the bit; few
    long sequences then leave most of a card idle.
    """
    policy: str = "auto"
    path: str = "auto"
    ignore: frozenset[str] = frozenset()
    tokens: str = "async"
    canary: str = "auto"
    debug: bool = False
    autotune: str = "timed"
    invariant: bool = False


class _Own:
    """What is a thread's alone. blocks: the ``with`` blocks that it is in, oldest first. policy: the
    process's, ``base``, as they change it. called: the changes of the ``settings`` that it has called last
    and may yet enter."""

    def __init__(self) -> None:
        self.blocks: list[settings] = []
        self.base: Policy | None = None
        self.policy = Policy()
        self.called: dict[str, Any] | None = None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.own = _Own()


_current: Policy | None = None  # the process's
_thread = _Thread()
_changing = ThreadLock()


def current() -> Policy:
    """The policy in force in this thread; the environment (FLASHLIN_POLICY and its like) is read at the first
    call."""
    own = _thread.own
    if own.called is not None:
        _settle(own)
    base = _current or _of_process()
    if not own.blocks:
        return base
    if own.base is not base:
        own.base = own.policy = base
        for block in own.blocks:
            own.policy = own.policy._replace(**block.changes)
    return own.policy


def _of_process() -> Policy:
    global _current
    if _current is None:
        _current = from_environment(os.environ)
    return _current


def _settle(own: _Own) -> None:
    """What this thread has called and not entered holds for the process."""
    global _current
    changes, own.called = own.called, None
    with _changing:
        _current = _of_process()._replace(**changes or {})


def from_environment(environment: Any) -> Policy:
    """Policy out of ``FLASHLIN_*``. Raises ValueError that names the variable and lists what it may be."""
    given = {name: environment[f"FLASHLIN_{name.upper()}"]
             for name in (*CHOICES, "ignore") if f"FLASHLIN_{name.upper()}" in environment}
    return Policy(**_checked(given, prefix="FLASHLIN_"))


def _checked(given: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Fields of a Policy out of what was given for them."""
    unknown = set(given) - set(Policy._fields)
    if unknown:
        from flashlin.compat.suggestions import need_one_of  # only for errors, as below
        raise ValueError(f"settings: got {', '.join(sorted(unknown))}, "
                         f"{need_one_of(min(unknown), Policy._fields)}")
    fields: dict[str, Any] = {}
    for name, value in given.items():
        shown = prefix + (name.upper() if prefix else name)
        if name == "ignore":
            fields[name] = _known(shown, value.split(",") if isinstance(value, str) else value)
            continue
        text = {True: "1", False: "0"}.get(value, value) if name in SWITCHES else value
        if text not in CHOICES[name]:
            raise ValueError(f"{shown}: got {value!r}, need one of {', '.join(CHOICES[name])}")
        fields[name] = text == "1" if name in SWITCHES else text
    return fields


def _known(shown: str, given: Iterable[str]) -> frozenset[str]:
    ids = frozenset(part.strip() for part in given if part.strip())
    if ids:
        from flashlin.compat.known_issues import KNOWN_ISSUES  # only now: few ask for it
        valid = [issue.id for issue in KNOWN_ISSUES]
        unknown = sorted(ids.difference(valid))
        if unknown:
            from flashlin.compat.suggestions import need_one_of
            raise ValueError(f"{shown}: got {', '.join(map(repr, unknown))} as ids of known issues, "
                             f"{need_one_of(unknown[0], valid)}")
    return ids


class settings:
    """Change the policy: ``flashlin.settings(path="torch")`` for good,
    ``with flashlin.settings(policy="strict"):`` for a while.

    Called alone, it is for the whole process. A ``with`` block is its thread's alone: no other thread sees
    anything of it, threads that are started inside begin with the process's policy. Blocks may end in any
    order: the policy is always the process's, changed by the blocks that this thread is in, later ones last.

    Python does not tell a call whether ``with`` follows. So the thread that calls obeys at once, and others
    do as soon as it is clear that nothing enters the object: it is dropped (at once, unless it is kept in a
    variable), or its thread goes on to anything else of flashlin.

    Takes the fields of ``Policy``. Raises ValueError that lists the valid values.
    """
    _own: _Own | None = None  # of the thread that called, then of the one that entered

    def __init__(self, **changes: Any) -> None:
        current()  # settles what was called before
        self.changes, self._own = _checked(changes), _thread.own
        self._own.called = self.changes

    def __enter__(self) -> Policy:
        if self._own is not None and self._own.called is self.changes:
            self._own.called = None
        self._own = _thread.own
        self._own.blocks.append(self)
        self._own.base = None
        return current()

    def __exit__(self, *error: object) -> None:
        # a generator may be closed by another thread
        own = _thread.own if self in _thread.own.blocks else self._own
        if own is not None and self in own.blocks:
            own.blocks.remove(self)
            own.base = None

    def __del__(self) -> None:
        if self._own is not None and self._own.called is self.changes:
            _settle(self._own)
