"""Tests of this machine's table of local results: it is stored, merged and deleted.

An unusable folder or file counts as an empty table.
"""
from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from flashlin import dispatch
from flashlin.compat import locks
from flashlin.compat.target import parse
from flashlin.guards import local_results
from flashlin.guards.local_results import BAD, Table, Verdict, Word
from flashlin.guards.plan_types import Plan, Problem

pytestmark = pytest.mark.usefixtures("home")

HOPPER = parse("triton=3.6.0,sm=90", torch_version="2.11.0")
CONFIG = "simple_gla_scan BT=64 BK=64 BV=64 warps=4 stages=2 bf16 dot half_dot rmw_acc"
NOTHING = Table({}, {})


def verdict(word: Word, op: str = "chunk_simple_gla", said: str = "") -> Verdict:
    return Verdict(word, time.time(), f"{op} bfloat16 64", said)


def keep(word: Word, config: str = CONFIG, target: Any = HOPPER, op: str = "chunk_simple_gla") -> None:
    local_results.keep(Table({config: verdict(word, op)}, {f"{op} bfloat16 64": verdict(word, op)}), target)


def planned() -> Plan:
    dispatch.plan.cache_clear()
    return dispatch.plan(Problem("chunk_simple_gla", "simple_gla", "chunk", 2, 128, 4, 64, 64, 2, "bfloat16",
                                 options=("g",)), HOPPER)


def configs() -> set[str]:
    return {launch.config for launch in planned().launches}


@pytest.mark.parametrize("word", BAD)
def test_what_did_not_hold_on_this_machine_is_planned_otherwise_there(word: Word) -> None:
    assert CONFIG in configs()
    keep(word)
    assert configs() and CONFIG not in configs()
    [(reason, _)] = planned().steps
    assert f"was tried on this machine with triton 3.6.0 on {time.strftime('%Y-%m-%d')}: {word}" in reason.got and "--forget" in reason.got
    keep("ran")
    assert CONFIG in configs()
    keep(word, target=HOPPER._replace(triton="3.6.1"))
    assert CONFIG in configs(), "results of another release do not count for this one"


def test_what_could_not_be_tried_is_kept_and_read_by_no_plan() -> None:
    local_results.keep(Table({}, {"chunk_simple_gla bfloat16 64": verdict("not tried",
                                                                     said="CUDA out of memory")}), HOPPER)
    local_results.read_again()
    assert CONFIG in configs() and not planned().steps
    assert local_results.local(HOPPER).trials["chunk_simple_gla bfloat16 64"].said == "CUDA out of memory"


def test_other_kernels_make_verdicts_void(monkeypatch: pytest.MonkeyPatch) -> None:
    keep("hang")
    local_results.read_again()
    monkeypatch.setattr(local_results, "_kernels", lambda: "other sources")
    assert local_results.local(HOPPER) == NOTHING


def entry(**changes: object) -> str:
    fields = {"word": "hang", "when": 1.0, "trial": "op", "said": ""} | changes
    return json.dumps({"kernels": {"a": list(fields.values())}, "trials": {}})


@pytest.mark.parametrize("text", [
    '{"kernels": {"a": ["ra', "[]", "", "\x00\x01", "{}", '{"kernels": [], "trials": []}',
    '{"kernels": {"a": "hang"}, "trials": {}}', "[" * 100_000, '{"kernels":' * 50_000,
    " " * (local_results.LARGEST + 1), entry(word="failed"), entry(when="now"), entry(when=1e300), entry(when=-1),
    entry(trial=3), '{"kernels": {"a": ["hang", NaN, "op", ""]}, "trials": {}}', entry(said=None),
    '{"kernels": {"a": ["hang", 1.0]}, "trials": {}}'],
    ids=lambda text: str(text[:30]))
def test_a_file_that_is_no_table_counts_as_none_and_is_replaced(text: str) -> None:
    keep("hang")
    [file] = local_results.place()[0].glob("launches-*.json")  # type: ignore[union-attr]
    file.write_text(text)
    local_results.read_again()
    assert local_results.local(HOPPER) == NOTHING and CONFIG in configs()
    keep("ran")
    assert local_results.local(HOPPER).kernels[CONFIG].word == "ran"


def test_a_link_or_a_pipe_in_its_place_is_no_table(home: Path, tmp_path: Path) -> None:
    keep("hang")
    [file] = home.glob("launches-*.json")
    moved = file.rename(tmp_path / "elsewhere")
    file.symlink_to(moved)
    local_results.read_again()
    assert local_results.local(HOPPER) == NOTHING
    file.unlink()
    os.mkfifo(file)
    assert local_results._read(file) == NOTHING  # reading a FIFO must not wait for a writer


@pytest.mark.parametrize("named", ["x" * 5000, "with a zero \0", "/dev/null/below", "/proc/1/nothing/here"],
                         ids=lambda name: name[:12])
def test_a_place_that_cannot_be_is_no_table_and_no_error_in_planning(named: str,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "FLASHLIN_HOME": named})  # os.putenv rejects NUL
    assert CONFIG in configs()
    with local_results.alone("a trial"), pytest.warns(UserWarning, match="apply in this process only"):
        keep("hang")
    assert CONFIG not in configs()


def test_no_home_at_all_is_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")
    for name in ("FLASHLIN_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert CONFIG in configs() and local_results.place() == (None,
                                                        "the cache of this user cannot be used: Could not "
                                                        "determine home directory.")


@pytest.mark.parametrize("call", ["stat", "mkdir"])
def test_an_unreadable_place_is_no_table(call: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))
    monkeypatch.setattr(Path, call, refuse)  # chmod would not work: tests may run as root
    assert CONFIG in configs()
    with pytest.warns(UserWarning, match="apply in this process only.*Permission denied"):
        keep("hang")
    assert CONFIG not in configs()


def test_a_full_disk_leaves_nothing_half_written(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep("ran")

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(json, "dump", full)
    with pytest.warns(UserWarning, match="apply in this process only.*No space left"):
        keep("hang")
    assert CONFIG not in configs() and not [path
                                            for path in home.iterdir()
                                            if path.suffix not in (".json", ".lock")]
    local_results._unwritten.clear()
    local_results.read_again()
    assert local_results.local(HOPPER).kernels[CONFIG].word == "ran"


def test_a_table_is_never_written_larger_than_it_is_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that would make the file larger than LARGEST stays in the process and is not written.

    A larger file was once read as empty, and the next result overwrote it.
    """
    monkeypatch.setattr(local_results, "LARGEST", 3000)
    for number in range(40):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            keep("hang", f"{CONFIG} {number}", op=f"op{number}")
        if told:
            break
    assert "apply in this process only" in str(told[0].message) and "warmup --forget" in str(told[0].message)
    [file] = home.glob("launches-*.json")
    assert 10 < number < 39 and file.stat().st_size <= 3000
    assert set(local_results.local(HOPPER).kernels) == {f"{CONFIG} {at}" for at in range(number + 1)}
    local_results._unwritten.clear()
    local_results.read_again()
    assert set(local_results.local(HOPPER).kernels) == {f"{CONFIG} {at}" for at in range(number)}
    assert local_results.forget(["op0"]) == 2
    keep("ran", "another")
    assert {"another", f"{CONFIG} 1"} <= set(local_results._read(file).kernels)


def test_a_table_that_an_older_flashlin_wrote_too_large_is_read_and_kept(
        home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep("hang")
    monkeypatch.setattr(local_results, "LARGEST", 100)
    with pytest.warns(UserWarning, match="apply in this process only"):
        keep("ran", "another")
    assert set(local_results.local(HOPPER).kernels) == {CONFIG, "another"}
    [file] = home.glob("launches-*.json")
    assert set(local_results._read(file).kernels) == {CONFIG}


def test_a_table_that_cannot_be_read_now_is_not_overwritten(home: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    keep("hang")
    opened = os.open

    def fails(path: Any, *rest: Any, **options: Any) -> int:
        if str(path).endswith(".json"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return opened(path, *rest, **options)
    with monkeypatch.context() as broken:
        broken.setattr(os, "open", fails)
        with pytest.warns(UserWarning, match="apply in this process only.*Input/output error"):
            keep("ran", "another")
        with pytest.raises(OSError, match="Input/output error"):
            local_results.forget()
    local_results._unwritten.clear()
    local_results.read_again()
    assert set(local_results.local(HOPPER).kernels) == {CONFIG}


def test_a_system_without_locks_has_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "fcntl", None)  # as on Windows
    with local_results.alone("a trial"), pytest.warns(UserWarning, match="no file locks on this system"):
        keep("hang")
    assert CONFIG not in configs()


def test_what_planning_imports_is_there_on_windows() -> None:
    code = ("import sys; sys.modules.update(fcntl=None, resource=None)\n"
            "import flashlin.trial.canary, flashlin.trial.warmup, flashlin.testing.compile, "
            "flashlin.testing.environments\n"
            "import torch; x = torch.ones(1, 4, 1, 8); flashlin.chunk_simple_gla(x, x, x)")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("why, mode, owner",
                         [("can be written by everyone", 0o777, None),
                          ("belongs to another user", 0o700, 12345)])
def test_a_folder_of_others_is_refused_with_a_sentence(why: str, mode: int, owner: int | None, home: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    keep("hang")
    home.chmod(mode)
    if owner is not None:
        monkeypatch.setattr(os, "geteuid", lambda: owner)
    local_results.read_again()
    with pytest.warns(UserWarning, match=f"FLASHLIN_HOME=.* {why}.*need a folder") as told:
        assert CONFIG in configs()
        assert local_results.place()[0] is None
    assert len(told) == 1, "it is told once"


def test_locks_follow_no_link_and_truncate_nothing(home: Path, tmp_path: Path) -> None:
    home.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (home / "trial-x.lock").symlink_to(victim)
    with local_results.alone("x"):
        pass
    with pytest.raises(OSError), locks.locked(home / "trial-x.lock"):
        pass
    with locks.locked(victim):
        pass
    assert victim.read_text() == "precious"


def test_a_new_folder_is_the_user_s_alone(home: Path) -> None:
    keep("ran")
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_verdicts_can_be_taken_back(home: Path) -> None:
    other = HOPPER._replace(triton="3.7.1")
    keep("hang")
    keep("wrong numbers", "another", op="chunk_gla")
    keep("hang", target=other)
    assert CONFIG not in configs()
    assert local_results.forget(["chunk_simple_gla"]) == 4, "the kernel's and the trial's, under both releases"
    assert CONFIG in configs() and set(local_results.local(HOPPER).kernels) == {"another"}
    assert len(list(home.glob("*.json"))) == 1, "an empty table goes"
    assert local_results.forget() == 2 and local_results.local(HOPPER) == NOTHING


def test_eight_processes_at_once_lose_nothing(home: Path) -> None:
    code = ("import sys; from flashlin.guards.local_results import *; from flashlin.compat.target import parse\n"
            "for n in range(5): keep(Table({f'{sys.argv[1]}-{n}': Verdict('ran', 1.0, 'op')}, {}), "
            "parse('triton=3.6.0,sm=90'))")
    running = [subprocess.Popen([sys.executable, "-c", code, str(rank)],
                                env={**os.environ, "FLASHLIN_HOME": str(home)}) for rank in range(8)]
    assert [child.wait(60) for child in running] == [0] * 8
    assert set(local_results.local(parse("triton=3.6.0,sm=90")).kernels) == {f"{rank}-{n}" for rank in range(8)
                                                                        for n in range(5)}
    assert not [path for path in home.iterdir()
                if path.suffix not in (".json", ".lock")], "nothing half written stays behind"


def test_no_table_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_results, "_kernels",
                        lambda: pytest.fail("flashlin's sources were read without any local result"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert local_results.local(HOPPER) == NOTHING
