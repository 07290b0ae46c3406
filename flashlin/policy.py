"""The policy: the settings that control the behaviour of flashlin.

It is read once from the environment, and ``flashlin.settings(...)`` changes it.
"""
from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

from flashlin.compat.locks import ThreadLock

CHOICES = {"policy": ("auto", "strict", "off"), "path": ("auto", "triton", "torch"),
           "tokens": ("async", "sync", "off"), "canary": ("auto", "off", "trial"), "debug": ("0", "1"),
           "autotune": ("timed", "first", "rank0"), "invariant": ("0", "1"), "portable": ("0", "1")}
SWITCHES = ("debug", "invariant", "portable")  # these accept True or False
# Variables FLASHLIN_* without a field in Policy. Their readers are guards.local_results,
# testing.environments, integrations.run_command and integrations.summary.
ELSEWHERE = ("home", "cache", "patch", "summary")


class Policy(NamedTuple):
    """The settings of the process or of a ``with`` block.

    policy: ``auto`` allows any remedy, ``strict`` only exact ones, ``off`` skips the known-issue checks.
    path: ``auto``, or require ``triton`` or ``torch``.
    ignore: ids of known issues to ignore.
    tokens: how out-of-range tokens on a GPU are reported: ``async``, ``sync`` or ``off``. Calls that differ
        between ranks are reported in the same manner; ``off`` reports them as ``async``.
    canary: ``auto`` tries kernels without a recorded run on this GPU and Triton in a child process before
        their first use, ``off`` does not. The child process itself runs with ``trial``, which starts untested
        kernels, also on AMD.
    debug: also check the values of tensors: cu_seqlens and indices on the GPU, inputs, outputs and gradients
        that are not finite, and inputs with which a state grows. Each check waits for the GPU.
    autotune: how ``flashlin.autotune`` chooses a configuration. ``timed`` measures all, ``first`` takes the
        first that works, and ``rank0`` takes the one that rank 0 measured.
    invariant: no choice depends on the number or length of the sequences of a call, so the result of a row is
        bitwise independent of them. Calls with few long sequences then leave most of a GPU idle.
    portable: do not use kernels in Gluon, nor the kernel that computes KDA's gate. Plain Triton kernels
        replace them. Use this to find out whether such a kernel causes a problem, or to avoid it.
    """
    policy: str = "auto"
    path: str = "auto"
    ignore: frozenset[str] = frozenset()
    tokens: str = "async"
    canary: str = "auto"
    debug: bool = False
    autotune: str = "timed"
    invariant: bool = False
    portable: bool = False


class _Own:
    """The policy state of one thread.

    blocks: the ``with`` blocks that the thread is in, oldest first.
    base: the process's policy from which ``policy`` was computed.
    policy: the process's policy with the changes of the blocks.
    called: changes of the last ``settings`` call, which may still become a ``with`` block.
    """

    def __init__(self) -> None:
        self.blocks: list[settings] = []
        self.base: Policy | None = None
        self.policy = Policy()
        self.called: dict[str, Any] | None = None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.own = _Own()


_current: Policy | None = None  # the policy of the process
_thread = _Thread()
_changing = ThreadLock()


def current() -> Policy:
    """Return the policy in force in this thread.

    The environment variables FLASHLIN_POLICY, FLASHLIN_PATH and so on are read at the first call.
    """
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
    """Apply the thread's last ``settings`` call to the whole process, because no ``with`` block used it."""
    global _current
    changes, own.called = own.called, None
    with _changing:
        _current = _of_process()._replace(**changes or {})


def from_environment(environment: Any) -> Policy:
    """Return the policy that the variables ``FLASHLIN_*`` set.

    Raises a ValueError that names the variable and lists its valid values.
    """
    given = {name: environment[f"FLASHLIN_{name.upper()}"]
             for name in (*CHOICES, "ignore") if f"FLASHLIN_{name.upper()}" in environment}
    return Policy(**_checked(given, prefix="FLASHLIN_"))


def _checked(given: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the checked fields of a Policy.

    prefix: prefix of the names in errors.
    """
    if unknown := set(given) - set(Policy._fields):
        from flashlin.compat.suggestions import need_one_of  # imported only for errors
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
        from flashlin.compat.known_issues import KNOWN_ISSUES  # imported late, because few calls need it
        valid = [issue.id for issue in KNOWN_ISSUES]
        if unknown := sorted(ids.difference(valid)):
            from flashlin.compat.suggestions import need_one_of
            raise ValueError(f"{shown}: got {', '.join(map(repr, unknown))} as ids of known issues, "
                             f"{need_one_of(unknown[0], valid)}")
    return ids


class settings:
    """Change the policy of the process, or of the current thread within a ``with`` block.

        flashlin.settings(path="torch")               # permanently
        with flashlin.settings(policy="strict"):      # temporarily

    A call without ``with`` changes the policy of the whole process. A ``with`` block affects only its own
    thread. Threads that start inside the block begin with the process's policy. Blocks may end in any order.
    The policy of a thread is always the process's policy, changed by the blocks that the thread is in, later
    blocks last.

    A call cannot see whether ``with`` follows. Therefore it takes effect in the calling thread at once, and
    in other threads as soon as no ``with`` block can use the object any more. That is the case when the
    object is deleted (at once, unless a variable refers to it), or when its thread makes another call of
    flashlin.

    The keywords are the fields of ``Policy``. Raises a ValueError that lists the valid values.
    """
    # state of the thread that made this object, and then of the thread that entered its ``with`` block
    _own: _Own | None = None

    def __init__(self, **changes: Any) -> None:
        current()  # applies an earlier ``settings`` call that was made without ``with``
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
        # A generator that contains the block may be closed by a thread that did not enter the block.
        own = _thread.own if self in _thread.own.blocks else self._own
        if own is not None and self in own.blocks:
            own.blocks.remove(self)
            own.base = None

    def __del__(self) -> None:
        if self._own is not None and self._own.called is self.changes:
            _settle(self._own)
