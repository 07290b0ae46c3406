"""The launch table: the evidence that kernel configurations run, by Triton release and GPU.

flashlin ships one table, which ``python -m matrix report`` generates (matrix/support.py). Results of trials
on this machine (``guards.local_results``) take precedence over it.
"""
from __future__ import annotations

import json
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flashlin.compat import releases
from flashlin.compat.target import Target
from flashlin.compat.versions import is_unreleased, release
from flashlin.guards import local_results

PROVEN = Path(__file__).parents[1] / "kernels" / "proven.json"
# The levels from best to worst. ran: results were correct on such a GPU. compiled: every use of the
# configuration compiled to machine code. failed: one use did not compile, or a trial on this machine failed.
Trust = Literal["ran", "compiled", "unknown", "failed"]
TRUST: tuple[Trust, ...] = ("ran", "compiled", "unknown", "failed")
Record = dict[str, Any]  # level -> GPUs, such as ``sm80 sm90``; and ``slow`` -> GPU -> the fields of a Slow
Table = dict[str, dict[str, Record]]  # configuration -> release
# Compiled code counts as slow if it spills more than SPILLS bytes per thread. It also counts as slow if it
# spills at all with at most GIVEN_UP registers, the number that ptxas uses when its register allocator fails.
# It counts as very slow after such a failure, or if it spills more than MANY bytes.
SPILLS, MANY, GIVEN_UP = 1000, 4000, 32


class Slow(NamedTuple):
    """Spills of a configuration that compiles to slow code, for the use of it that compiles worst.

    spills: bytes per thread that are stored to memory and loaded again, because registers are missing.
    registers: registers per thread if the register allocator of ptxas failed, else 0.
    """
    spills: int
    registers: int = 0

    @property
    def very(self) -> bool:
        """Return True if ptxas failed to allocate registers, or if code spills more than ``MANY`` bytes."""
        return self.registers > 0 or self.spills > MANY

    def __str__(self) -> str:
        given = f", given {self.registers} registers" if self.registers else ""
        return f"spills {self.spills:,} bytes a thread{given}"


def slow_of(registers: int, spills: int) -> Slow | None:
    """Return the ``Slow`` of compiled code, or None if the code is not slow.

    registers: registers per thread.
    spills: spilled bytes per thread.
    """
    given_up = registers if spills and 0 < registers <= GIVEN_UP else 0
    return Slow(spills, given_up) if spills > SPILLS or given_up else None


def knows(triton: str) -> bool:
    """Return True if flashlin has been checked with this Triton release.

    Nightly builds and releases after the newest known minor version are not checked.
    """
    return not is_unreleased(triton) and release(triton)[:2] <= release(releases.RELEASES[-1].version)[:2]


def trust(config: str, target: Target) -> Trust:
    """Return the level of trust in a configuration (``Launch.config``) on a target.

    Results of this machine come first. Otherwise the shipped table decides, for the same GPU and Triton
    release, or for releases of the same minor version if it does not list this release. For nightly builds
    only results of this machine count.
    """
    here = local_results.local(target).kernels.get(config)
    if here is None:
        return _shipped(config, target.triton, target.sm)
    return "ran" if here.word == "ran" else "failed"


def has_run(config: str, ops: Collection[str], dtype: str, target: Target) -> bool:
    """Return True if a configuration is known to run correctly on a target.

    Without a result of this machine, the shipped table must say so for the same GPU and release (or minor
    version). With a result of this machine, the configuration must have run here. A trial of one of ``ops``
    in ``dtype`` must also have run here.
    """
    here = local_results.local(target)
    if config not in here.kernels:
        return _shipped(config, target.triton, target.sm) == "ran"
    return here.kernels[config].word == "ran" and any(
        one.word == "ran" and trial.split(" ")[:2] == [op, dtype]
        for trial, one in here.trials.items() for op in ops)


def failure(config: str, target: Target) -> str:
    """Return a sentence that says where and how a configuration with the trust ``failed`` failed."""
    here = local_results.local(target).kernels.get(config)
    if here is None:
        return f"{config} does not compile on {target.sm} with triton {target.triton}"
    return (f"{config} was tried on this machine with triton {target.triton} on {here.date}: {here.word} "
            f"({here.said or here.trial}; flashlin warmup --forget removes this result)")


@lru_cache(maxsize=256)
def slow_on(card: str, triton: str, given_up: bool = False) -> dict[str, Slow]:
    """Return the configurations that are known to compile to slow code on a GPU, with their spills.

    card: the GPU, such as ``sm90``.
    triton: the release; other releases of its minor version are used if the table does not list it.
    given_up: return only configurations for which the register allocator of ptxas failed.
    """
    known = {config: [Slow(*record["slow"][card]) for record in _records(config, triton)
                      if card in record.get("slow", ())] for config in table()}
    slow = {config: max(each) for config, each in known.items() if each}
    return {config: one for config, one in slow.items() if one.registers or not given_up}


@lru_cache(maxsize=4096)
def _shipped(config: str, triton: str, card: str) -> Trust:
    levels = [level for record in _records(config, triton) for level in TRUST
              if card in record.get(level, "").split()]
    return "failed" if "failed" in levels else min(levels, key=TRUST.index, default="unknown")


def _records(config: str, triton: str) -> list[Record]:
    """Return the shipped records of a configuration for a Triton release.

    If the table does not list the release, return the records of the same minor version.
    """
    known = table().get(config, {})
    if not triton or is_unreleased(triton):
        return []
    return [known[triton]] if triton in known else [
        record for version, record in known.items() if release(version)[:2] == release(triton)[:2]]


@lru_cache(maxsize=1)
def table() -> Table:
    """Return the shipped launch table, or an empty table if its file is missing."""
    return read(PROVEN)


def read(path: Path) -> Table:
    """Read a launch table from a file.

    The file joins releases with the same record in one key, such as ``3.3.0 3.3.1``, and configurations with
    the same records, separated by ``; ``. It also joins GPUs with the same numbers in ``slow``, separated by
    spaces. The result has a key for each release, configuration and GPU.
    """
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {config: {triton: _apart(record) for together, record in releases.items()
                     for triton in together.split()}
            for configs, releases in kept.items() for config in configs.split("; ")}


def _apart(record: Record) -> Record:
    """Return a copy of a record of the file, in which each GPU has its own entry in ``slow``."""
    if "slow" not in record:
        return dict(record)
    return {**record, "slow": {card: one for cards, one in record["slow"].items() for card in cards.split()}}
