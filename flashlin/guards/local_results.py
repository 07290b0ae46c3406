"""What this machine has found out about our kernels, by trying them in child processes (``flashlin.trial``):
one JSON file for each Triton, ptxas, torch, card and state of our kernels' sources, in a folder of the user's
own. No folder, or a file that is not such a table, is no table, and never an error: planning reads this."""
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
# All but the last two speak of a kernel. "not tried": something else failed, and nothing is known. "torch
# path": nothing was started.
Word = Literal["ran", "wrong numbers", "compiler error", "abort or illegal access", "hang", "not tried",
               "torch path"]
WORDS: tuple[Word, ...] = get_args(Word)
BAD: tuple[Word, ...] = ("wrong numbers", "compiler error", "abort or illegal access", "hang")
LARGEST = 2**22  # bytes; the largest file we write. A table of all our kernels has some 200,000
READ = 16 * LARGEST  # bytes; the largest file we read. Older releases wrote without a limit
A_DAY = 86400.0


class Verdict(NamedTuple):
    """word: what was found. when: in seconds since 1970. trial: the trial that found it. said: in its own
    words."""
    word: Word
    when: float
    trial: str
    said: str = ""

    @property
    def op(self) -> str:
        return self.trial.partition(" ")[0]

    @property
    def date(self) -> str:
        return time.strftime("%Y-%m-%d", time.localtime(self.when))


class Table(NamedTuple):
    """kernels: by ``Launch.config``; only words that speak of a kernel. trials: by ``op dtype head_dim``."""
    kernels: dict[str, Verdict]
    trials: dict[str, Verdict]

    def updated(self, newer: Table) -> Table:
        return Table({**self.kernels, **newer.kernels}, {**self.trials, **newer.trials})

    def without(self, ops: Collection[str]) -> Table:
        """What is left when the verdicts of these ops, or of all where none is named, are taken back."""
        return Table(*({name: verdict for name, verdict in part.items() if ops and verdict.op not in ops}
                       for part in self))

    @property
    def size(self) -> int:
        return len(self.kernels) + len(self.trials)


NOTHING = Table({}, {})
_unwritten: dict[Target, Table] = {}  # what could not be kept holds in this process


@lru_cache(maxsize=16)
def local(target: Target) -> Table:
    """What is known on this machine, as read once, until ``read_again``."""
    folder, _ = place()
    written = NOTHING
    if folder is not None and folder.is_dir():  # else nobody has tried anything, and _file reads no sources
        with suppress(OSError):
            written = _read(_file(folder, target))
    return written.updated(_unwritten.get(target, NOTHING))


def read_again() -> None:
    """Another process may have written."""
    local.cache_clear()


def keep(new: Table, target: Target) -> None:
    """Add to this machine's table. Several processes may do so at once. Where nothing can be written, a
    warning says so and what was found holds in this process."""
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
    warnings.warn(f"flashlin: what was found out about kernels holds in this process only: {why}",
                  stacklevel=3)


def unwritten(target: Target) -> str:
    """What this process alone knows, for a child that is to plan as this process does; ``""`` for nothing."""
    return json.dumps(_unwritten[target]._asdict()) if target in _unwritten else ""


def know(told: str, target: Target) -> None:
    """What the parent alone knows."""
    _unwritten[target] = _table(json.loads(told))
    local.cache_clear()


def forget(ops: Collection[str] = ()) -> int:
    """Take back what trials of these ops (all by default) have found, in every table of this machine; returns
    how many verdicts that were. Raises OSError where a table cannot be written, or there is no place for
    one."""
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
    """One process of this user at a time, where a lock can be had."""
    folder, _ = place()
    with ExitStack() as held:
        if folder is not None:
            with suppress(OSError):  # then two processes may try the same, and both be right
                make(folder)
                held.enter_context(locked(folder / f"trial-{trial.replace(' ', '-')}.lock"))
        yield


def place(warn: bool = True) -> tuple[Path | None, str]:
    """The folder, ``$FLASHLIN_HOME`` or ``flashlin`` in the user's cache, whether or not it is there yet; or
    None, and why there is none. warn: whether a folder that others could write to is told, once."""
    named = os.environ.get("FLASHLIN_HOME")
    try:
        folder = Path(named) if named else in_cache()
        what = f"FLASHLIN_HOME={folder}" if named else str(folder)
        if folder.exists() and not folder.is_dir():
            return None, f"{what} is no folder"
        why = unsafe(folder, what)
    # no home; not ours to look into; longer than names may be; a zero byte
    except (OSError, RuntimeError, ValueError) as error:
        return None, f"{'FLASHLIN_HOME' if named else 'the cache of this user'} cannot be used: {error}"
    if why and warn:
        _tell(why)
    return (None, why) if why else (folder, "")


@lru_cache(maxsize=8)
def _tell(why: str) -> None:
    warnings.warn(f"flashlin: no verdicts are read or kept: {why}: who can write verdicts decides which "
                  "kernels run", stacklevel=4)


def _file(folder: Path, target: Target) -> Path:
    facts = (target.triton, target.ptxas, target.torch, target.name, target.sm, _kernels())
    return folder / f"launches-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"


@lru_cache(maxsize=1)
def _kernels() -> str:
    """A hash of all our kernels' sources: with other kernels, verdicts mean nothing."""
    files = sorted(KERNELS.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _read(file: Path) -> Table:
    """Return the table in a file. An invalid file counts as empty: one that is missing, half written, a link,
    too large, nested too deeply, or has unknown words or dates. Raise OSError if reading fails for another
    reason, because a table that is about to be replaced must not be lost then."""
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
    """Write the file whole or not at all. Raise OSError if it would be larger than LARGEST."""
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
