"""Tests that fork a process while another of its threads holds a lock of flashlin.

The child has only the thread that forked, so it must not wait for the lock.
"""
from __future__ import annotations

import ast
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import flashlin
from flashlin import policy
from flashlin.compat import locks
from flashlin.integrations import patching
from flashlin.integrations.patching import Patch
from flashlin.shielding import autotune, function

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")
ROOT = Path(__file__).resolve().parents[1]
SECONDS = 20  # SIGALRM ends a child that still waits after this time


def child(work: Callable[[], bool]) -> int:
    """Fork a child that calls ``work``, and return its exit code: 0 if ``work`` returns True."""
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS)
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def beside(work: Callable[[Callable[[], None]], None]) -> Iterator[threading.Event]:
    """Run ``work`` in another thread until it calls its argument, and yield an event.

    The thread waits inside that call until the event is set.
    """
    inside, go_on = threading.Event(), threading.Event()

    def stop() -> None:
        inside.set()
        assert go_on.wait(SECONDS)
    thread = threading.Thread(target=work, args=(stop,))
    thread.start()
    assert inside.wait(SECONDS)
    try:
        yield go_on
    finally:
        go_on.set()
        thread.join()


class Slow(Patch):
    package = "slow"
    stop: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self) -> None:
        super().__init__()
        self.whole = False

    def begin(self) -> None:
        type(self).stop()
        self.whole = True


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> type[Slow]:
    monkeypatch.setitem(patching.PATCHES, "slow", Slow)
    monkeypatch.setattr(Slow, "stop", staticmethod(lambda: None))
    return Slow


def patches_and_sets() -> bool:
    flashlin.patch("slow")
    flashlin.unpatch("slow")
    flashlin.settings(path="torch")
    return policy.current().path == "torch"


def test_a_fork_while_another_thread_is_inside_patch(slow: type[Slow],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching._changing, "wait", 0.1)

    def patch(stop: Callable[[], None]) -> None:
        slow.stop = staticmethod(stop)
        flashlin.patch("slow")
    try:
        with beside(patch):
            slow.stop = staticmethod(lambda: None)
            assert child(patches_and_sets) == 0
    finally:
        flashlin.unpatch("slow")
    assert child(patches_and_sets) == 0


def test_a_fork_waits_for_a_patch_that_another_thread_is_at(slow: type[Slow]) -> None:
    """A fork waits until another thread has finished a patch.

    Otherwise the child would inherit half a patch, and the import locks that the other thread holds.
    """
    def patch(stop: Callable[[], None]) -> None:
        slow.stop = staticmethod(stop)
        flashlin.patch("slow")
    with beside(patch) as go_on:
        threading.Timer(0.2, go_on.set).start()
        assert child(lambda: patching._in_force["slow"].whole) == 0
    flashlin.unpatch("slow")


def test_a_fork_inside_ones_own_patch(slow: type[Slow]) -> None:
    codes: list[int] = []
    slow.stop = staticmethod(lambda: codes.append(child(patches_and_sets)))
    with flashlin.patched("slow"):
        pass
    assert codes == [0]


def test_a_fork_while_another_thread_is_inside_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    original, caller = policy._of_process, threading.get_ident()
    stops: list[Callable[[], None]] = []

    def of_process() -> policy.Policy:
        if threading.get_ident() != caller and not policy._thread.own.blocks and stops:
            stops.pop()()
        return original()
    monkeypatch.setattr(policy, "_of_process", of_process)

    def change(stop: Callable[[], None]) -> None:
        made = flashlin.settings(debug=False)
        stops.append(stop)
        del made

    def sets() -> bool:
        flashlin.settings(path="torch")
        return policy.current().path == "torch"
    with beside(change):
        assert child(sets) == 0


def test_every_other_lock_of_threads_is_free_in_a_child() -> None:
    tuned = autotune.Tuned({}, locks.ThreadLock())
    there = [patching._changing, policy._changing, autotune._hooking, function._lock, tuned.lock]

    def hold(stop: Callable[[], None]) -> None:
        for lock in there[1:]:
            lock.__enter__()
        stop()
        for lock in there[1:]:
            lock.__exit__()

    def takes_them_all() -> bool:
        for lock in there:
            with lock:
                pass
        return True
    with beside(hold):
        assert child(takes_them_all) == 0


def test_there_are_no_locks_of_another_kind() -> None:
    """Only three modules of flashlin create locks, and these locks are safe after a fork.

    ``guards.deferred_checks`` replaces its lock in the child together with its other state. The lock of
    ``subprocesses`` belongs to a thread that waits for a child; a fork does not copy that thread.
    """
    found = [f"{path.stem}: {ast.unparse(node)}" for path in sorted((ROOT / "flashlin").rglob("*.py"))
             for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
             and ast.unparse(node.func).rpartition(".")[2] in ("Lock", "RLock", "Condition", "Barrier")]
    assert found == [*["locks: threading.RLock()"] * 2, "subprocesses: Condition()",
                     *["deferred_checks: Lock()"] * 2]


def test_a_file_is_free_once_its_holder_is_done_whoever_was_forked_meanwhile(tmp_path: Path) -> None:
    """A process that is forked while a file is locked does not keep the lock.

    A worker forked during the write of a result once blocked all other processes until it ended.
    """
    done, began = os.pipe()
    with locks.locked(tmp_path / "lock"):
        pid = os.fork()
        if pid == 0:
            signal.alarm(SECONDS)
            os.read(done, 1)
            os._exit(0)
    try:
        def takes_it() -> bool:
            with locks.locked(tmp_path / "lock"):
                return True
        assert child(takes_it) == 0
    finally:
        os.write(began, b"1")
        os.waitpid(pid, 0)
        os.close(done)
        os.close(began)
