"""Results of trials of flashlin's kernels on this machine, stored in a folder of the user.

A trial runs a kernel in a child process (``flashlin.trial``). The folder contains one JSON file for each
combination of Triton, ptxas, torch, GPU and kernel sources. Planning reads these files. A missing folder or
an invalid file counts as an empty table and is never an error.
"""
from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from flashlin.compat.folders import in_cache, make, unsafe
from flashlin.compat.locks import locked
from flashlin.compat.target import Target

KERNELS = Path(__file__).parents[1] / "kernels"
# All words but the last two judge a kernel. "not tried": something else failed, so that nothing is known
# about the kernel. "torch path": no kernel was started.
Word = Literal["ran", "wrong numbers", "compiler error", "abort or illegal access", "hang", "not tried",
               "torch path"]
WORDS: tuple[Word, ...] = get_args(Word)
BAD: tuple[Word, ...] = ("wrong numbers", "compiler error", "abort or illegal access", "hang")
LARGEST = 2**22  # bytes; the largest file to write. A table of all kernels has about 200,000
READ = 16 * LARGEST  # bytes; the largest file to read. Older releases wrote without a limit
A_DAY = 86400.0


class Verdict(NamedTuple):
    """Result of one trial.

    word: the outcome, one of ``WORDS``.
    when: the time of the trial in seconds since 1970.
    trial: the trial, as ``op dtype head_dim``.
    said: the message of the trial, if there is one.
    """
    word: Word
    when: float
    trial: str
    said: str = ""

    @property
    def op(self) -> str:
        """Return the name of the op that the trial ran."""
        return self.trial.partition(" ")[0]

    @property
    def date(self) -> str:
        """Return the local date of the trial, such as ``2025-01-31``."""
        return time.strftime("%Y-%m-%d", time.localtime(self.when))


class Table(NamedTuple):
    """Verdicts of trials on this machine.

    kernels: verdicts by configuration (``Launch.config``).
    trials: verdicts by trial, named ``op dtype head_dim``. Only these may be ``not tried`` or ``torch path``.
    """
    kernels: dict[str, Verdict]
    trials: dict[str, Verdict]

    def updated(self, newer: Table) -> Table:
        """Return a table with the verdicts of both tables; those of ``newer`` override."""
        return Table({**self.kernels, **newer.kernels}, {**self.trials, **newer.trials})

    def without(self, ops: Collection[str]) -> Table:
        """Return the table without the verdicts of these ops; without ``ops``, return an empty table."""
        return Table(*({name: verdict for name, verdict in part.items() if ops and verdict.op not in ops}
                       for part in self))

    @property
    def size(self) -> int:
        """Return the number of verdicts on kernels and trials together."""
        return len(self.kernels) + len(self.trials)


NOTHING = Table({}, {})
_unwritten: dict[Target, Table] = {}  # results that could not be written; they apply in this process only


@lru_cache(maxsize=16)
def local(target: Target) -> Table:
    """Return the results of trials on this machine for a target; cached until ``read_again``."""
    folder, _ = place()
    written = NOTHING
    if folder is not None and folder.is_dir():  # _file hashes all sources, so skip it without a folder
        with suppress(OSError):
            written = _read(_file(folder, target))
    return written.updated(_unwritten.get(target, NOTHING))


def read_again() -> None:
    """Clear the cache of ``local``, because another process may have written new results."""
    local.cache_clear()


def keep(new: Table, target: Target) -> None:
    """Add new results to the table of this machine for a target.

    Several processes may do this at the same time. If the file cannot be written, the function warns, and the
    results apply in this process only.
    """
    folder, why = place()
    if folder is not None:
        try:
            make(folder)
            file = _file(folder, target)
            with locked(file.with_suffix(".lock")):
                _write(file, _read(file).updated(new))
            local.cache_clear()
            return
        except OSError as error:
            why = f"{folder} cannot be written: {error}"
    _unwritten[target] = _unwritten.get(target, NOTHING).updated(new)
    local.cache_clear()
    warnings.warn(f"flashlin: the results of kernel trials apply in this process only: {why}", stacklevel=3)


def unwritten(target: Target) -> str:
    """Return this process's unwritten results for a target as JSON, or ``""`` if there are none.

    A child process needs them to plan as this process does; see ``know``.
    """
    return json.dumps(_unwritten[target]._asdict()) if target in _unwritten else ""


def know(told: str, target: Target) -> None:
    """In a child process, take over the parent's local results that are not on disk.

    told: the text that ``unwritten`` returned in the parent.
    """
    _unwritten[target] = _table(json.loads(told))
    local.cache_clear()


def forget(ops: Collection[str] = ()) -> int:
    """Delete the results of trials of these ops from every table of this machine; return their number.

    Without ``ops`` all results are deleted. Raises OSError if a table cannot be written or no folder can be
    used.
    """
    folder, why = place()
    if folder is None:
        raise OSError(why)
    gone = 0
    for file in sorted(folder.glob("launches-*.json")):
        with locked(file.with_suffix(".lock")):
            before = _read(file)
            left = before.without(ops)
            gone += before.size - left.size
            if left.size:
                _write(file, left)
            else:
                file.unlink()
    for target, before in _unwritten.items():
        _unwritten[target] = before.without(ops)
        gone += before.size - _unwritten[target].size
    local.cache_clear()
    return gone


@contextmanager
def alone(trial: str) -> Iterator[None]:
    """Hold the lock of a trial, so that only one process of this user runs it at a time.

    If no lock is available, continue without one.
    """
    folder, _ = place()
    with ExitStack() as held:
        if folder is not None:
            with suppress(OSError):  # without a lock two processes may run the same trial, which is harmless
                make(folder)
                held.enter_context(locked(folder / f"trial-{trial.replace(' ', '-')}.lock"))
        yield


def place(warn: bool = True) -> tuple[Path | None, str]:
    """Return (folder of the results, ``""``), or (None, the reason why no folder can be used).

    The folder is ``$FLASHLIN_HOME``, or ``flashlin`` in the user's cache. It need not exist yet.
    warn: warn once if the folder is not used because other users could write to it.
    """
    named = os.environ.get("FLASHLIN_HOME")
    try:
        folder = Path(named) if named else in_cache()
        what = f"FLASHLIN_HOME={folder}" if named else str(folder)
        if folder.exists() and not folder.is_dir():
            return None, f"{what} is not a folder"
        why = unsafe(folder, what)
    # no home folder; no permission to read it; a name that is too long or contains a zero byte
    except (OSError, RuntimeError, ValueError) as error:
        return None, f"{'FLASHLIN_HOME' if named else 'the cache of this user'} cannot be used: {error}"
    if why and warn:
        _tell(why)
    return (None, why) if why else (folder, "")


@lru_cache(maxsize=8)
def _tell(why: str) -> None:
    warnings.warn(f"flashlin: no verdicts are read or kept: {why}: anyone who can write verdicts can decide "
                  "which kernels run", stacklevel=4)


def _file(folder: Path, target: Target) -> Path:
    facts = (target.triton, target.ptxas, target.torch, target.name, target.sm, _kernels())
    return folder / f"launches-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"


@lru_cache(maxsize=1)
def _kernels() -> str:
    """Return a hash of the sources of all kernels, because verdicts are valid for these sources only."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(KERNELS.rglob("*.py")))).hexdigest()


def _read(file: Path) -> Table:
    """Return the table in a file; a missing or invalid file counts as an empty table.

    A file is invalid if it is half written, a link, larger than ``READ`` bytes or nested beyond the recursion
    limit, or if it contains unknown words or dates. Raise OSError if reading fails for another reason.
    Otherwise ``keep`` would replace a valid file that it could not read.
    """
    try:
        handle = os.open(file, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as opened:
            text = opened.read(READ + 1)
        return _table(json.loads(text) if len(text) <= READ else {})
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return NOTHING
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return NOTHING


def _table(parts: dict[str, dict[str, list[object]]]) -> Table:
    return Table(*({str(name): _verdict(fields) for name, fields in parts[part].items()}
                   for part in Table._fields))


def _verdict(fields: list[object]) -> Verdict:
    word, when, trial, said = fields
    known = next((one for one in WORDS if one == word), None)
    if (known is None or not isinstance(when, (int, float)) or not 0 <= when < 2**33
        or not isinstance(trial, str) or not isinstance(said, str)):
        raise ValueError(f"got {fields}, need a word, a date, a trial and what it said")
    return Verdict(known, float(when), trial, said)


def _write(file: Path, table: Table) -> None:
    """Write a table to a file atomically. Raise OSError if the file would exceed ``LARGEST`` bytes."""
    handle, fresh = tempfile.mkstemp(dir=file.parent, prefix=file.stem)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as opened:
            json.dump(table._asdict(), opened)
            if opened.tell() > LARGEST:
                raise OSError(errno.EFBIG, f"more than {LARGEST} bytes; flashlin warmup --forget makes room",
                              str(file))
        os.replace(fresh, file)
    except OSError:
        with suppress(OSError):
            os.unlink(fresh)
        raise
