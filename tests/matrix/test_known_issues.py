"""Every known issue that a compiler can decide is tested in both directions.

Its launch in matrix/proofs fails at both ends of the issue's range. It does not fail in the next releases,
on the next GPU, or with the change that the issue requires. If another issue applies to a launch as well,
the launch may fail there with the message of that issue.
"""
from __future__ import annotations

import fcntl
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flashlin.compat.known import KnownIssue
from flashlin.compat.known_issues import KNOWN_ISSUES
from flashlin.compat.releases import supported
from flashlin.compat.target import USUAL_AMD, Target, parse, ptxas_version
from flashlin.diagnostics import why
from flashlin.testing.compile import Job, Result, compile_launches
from flashlin.testing.environments import NotInstallable, triton_environment, triton_home
from flashlin.testing.record import Recorded

FOLDER = Path(__file__).resolve().parents[2] / "matrix" / "proofs"
sys.path.insert(0, str(FOLDER))
table: Any = importlib.import_module("proof_table")
RELEASES = supported()
ISSUES = {issue.id: issue for issue in KNOWN_ISSUES}


class Cell(NamedTuple):
    """A launch on a GPU under a release, possibly with the assembler of another release."""
    triton: str
    sm: int
    launch: Recorded
    ptxas_of: str = ""


Measure = Callable[[Cell], Result]


def assembler(version: str) -> str:
    return str(triton_home(version) / "triton" / "backends" / "nvidia" / "bin" / "ptxas-blackwell")


def target(cell: Cell) -> Target:
    ptxas = f",ptxas={ptxas_version(assembler(cell.ptxas_of))}" if cell.ptxas_of else ""
    return parse(f"triton={cell.triton},sm={cell.sm}{ptxas}")


def hits(issue: KnownIssue, cell: Cell) -> bool:
    launch = cell.launch
    return issue.here(target(cell)) and issue.hits(frozenset(launch.traits), launch.num_warps,
                                                   launch.num_stages)


def cells(proof: Any) -> Iterator[Cell]:
    """Return the cells of an issue.

    These are the first and the last release of the range and the releases next to it. The last release also
    has the launches that must not fail: the cured one, and the one on a GPU that is spared.
    """
    def inside(ptxas_of: str) -> list[str]:
        return [version for version in RELEASES
                if hits(ISSUES[proof.issue], Cell(version, proof.sm, proof.launch, ptxas_of))]
    # If the assembler cures the issue, the range is empty. Then test the last release that fails without it.
    found = inside(proof.ptxas_of) or inside("")[-1:]
    assert found, (f"{proof.issue}: no release has it on sm_{proof.sm}, or the launch lacks a trait: got "
                   f"{sorted(proof.launch.traits)} (from kernels/shield/source.py), need "
                   f"{sorted(ISSUES[proof.issue].traits)}")
    first, last = RELEASES.index(found[0]), RELEASES.index(found[-1])
    ends = {first, last} if proof.ptxas_of and not inside(proof.ptxas_of) else {max(first - 1, 0), first,
                                                                                last,
                                                                                min(last + 1, len(RELEASES)
                                                                                    - 1)}
    yield from (Cell(RELEASES[at], proof.sm, proof.launch, proof.ptxas_of) for at in sorted(ends))
    if proof.cured:
        yield Cell(RELEASES[last], proof.sm, proof.cured, proof.ptxas_of)
    if proof.spared:
        yield Cell(RELEASES[last], proof.spared, proof.launch, proof.ptxas_of)


@pytest.fixture(scope="session")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """Return the result of a cell.

    A release compiles all of its cells at once. All workers of a run share the results through a folder.
    """
    base = tmp_path_factory.getbasetemp()
    room = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "proofs"
    room.mkdir(exist_ok=True)
    every = list(dict.fromkeys(cell for proof in table.PROOFS for cell in cells(proof)))
    known: dict[Cell, Result] = {}

    def measured(cell: Cell) -> Result:
        if cell not in known:
            batch = [one for one in every if (one.triton, one.ptxas_of) == (cell.triton, cell.ptxas_of)]
            file = room / f"{cell.triton}-{cell.ptxas_of}.json"
            with file.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not file.exists():
                    file.write_text(json.dumps(compiled(batch)))
            known.update(zip(batch, (Result(*fields) for fields in json.loads(file.read_text())),
                             strict=True))
        return known[cell]
    return measured


def surroundings(version: str, ptxas_of: str = "") -> dict[str, str]:
    try:
        environment = triton_environment(version)
        if ptxas_of:
            environment |= {"TRITON_PTXAS_PATH": assembler(ptxas_of),
                            "TRITON_PTXAS_BLACKWELL_PATH": assembler(ptxas_of)}
    except NotInstallable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    return environment


def compiled(batch: list[Cell]) -> list[Result]:
    version, ptxas_of = batch[0].triton, batch[0].ptxas_of
    environment = surroundings(version, ptxas_of)
    environment["PYTHONPATH"] = os.pathsep.join([str(FOLDER), environment["PYTHONPATH"]])
    results = compile_launches([Job(cell.sm, cell.launch) for cell in batch], environment)
    assert {result.triton for result in results} == {version}
    return results


def what_is_wrong(proof: Any, cell: Cell, result: Result) -> str:
    """Return the reason if the result of a cell differs from the table of issues."""
    said = f"{result.message} {result.cause}"
    speaks = not proof.says or any(text in said for text in proof.says)
    if hits(ISSUES[proof.issue], cell):
        return "" if proof.fails(result) and speaks else "it is said to fail"
    others = {one.issue for one in table.PROOFS if one.issue != proof.issue and hits(ISSUES[one.issue], cell)}
    explained = any(text in said for one in table.PROOFS if one.issue in others for text in one.says)
    return "" if explained or (result.ok and not proof.fails(result)) else "it is said not to fail"


OTHER_LINE = {"latencies-35-tf32"}  # a Result contains one line of stderr, but the symptom is in the next one
PROVEN = [issue for issue in KNOWN_ISSUES if issue.id in {proof.issue for proof in table.PROOFS}]


@pytest.mark.parametrize("issue", PROVEN, ids=lambda issue: issue.id)
@pytest.mark.alternate
def test_an_issue_is_there_where_it_is_said_to_be_and_nowhere_else(issue: KnownIssue,
                                                                   measure: Measure) -> None:
    wrong = []
    for proof in table.PROOFS:
        if proof.issue == issue.id:
            for cell in cells(proof):
                why = what_is_wrong(proof, cell, measure(cell))
                wrong += [f"triton {cell.triton} {cell.ptxas_of} sm_{cell.sm} {cell.launch}: {why}, got "
                          f"{measure(cell)}"] if why else []
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("issue", [issue for issue in PROVEN if issue.symptoms], ids=lambda issue: issue.id)
def test_what_is_printed_is_among_the_symptoms(issue: KnownIssue, measure: Measure) -> None:
    """The text is a symptom of this issue, or of another issue that applies to the launch.

    A process that a signal ends may have printed nothing.
    """
    said = {f"{result.message} {result.cause}".strip() for proof in table.PROOFS if proof.issue == issue.id
            for cell in cells(proof) for result in [measure(cell)]
            if proof.fails(result) and not result.ok and hits(issue, cell)} - {"SIGSEGV"}
    assert said
    assert issue.id in {match.failure.id for text in said for match in why.matches(text)} | OTHER_LINE
    unknown = [text for text in said if not any(match.sure for match in why.matches(text))]
    assert not unknown, "flashlin why does not know what is printed"


# amd-loop-counts: the compiler removes a branch that is needed. Before 3.5 Triton has no linker for AMD.
DECIDED = {"3.5.1": "four_times_4", "3.6.0": "four_times_4", "3.8.0": "up_to_8", "3.9.0": ""}


@pytest.mark.parametrize("version", DECIDED)
@pytest.mark.alternate
def test_a_branch_on_what_a_loop_has_counted_on_amd(version: str, tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, str(Path(__file__).with_name("counting.py")), str(tmp_path),
                          *USUAL_AMD], env={**os.environ, **surroundings(version)}, capture_output=True,
                         text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert set(found) == set(USUAL_AMD)
    for arch, stores in found.items():
        assert {name for name, count in stores.items() if count == 1} == {DECIDED[version]} - {""}, arch
        assert set(stores.values()) <= {1, 2}
        assert ISSUES["amd-loop-counts"].here(parse(f"{arch},triton={version}")) == bool(DECIDED[version])


def test_what_is_said_to_be_compiled_has_a_proof_that_fails_somewhere() -> None:
    for issue in KNOWN_ISSUES:
        inside = [cell for proof in table.PROOFS if proof.issue == issue.id
                  for cell in cells(proof) if hits(issue, cell)]
        assert inside or issue.confidence != "compiled", (
            f"{issue.id}: 'compiled' needs a Proof in matrix/proofs/proof_table.py")
    assert {proof.issue for proof in table.PROOFS} <= set(ISSUES)


def test_what_is_proven_elsewhere_names_a_test_that_exists() -> None:
    for issue in KNOWN_ISSUES:
        assert issue.proof and issue.confidence in ("compiled", "ran", "thread", "documented"), issue.id
        for word in issue.proof.replace(",", " ").replace(";", " ").split():
            assert not word.startswith("tests/") or (FOLDER.parents[1] / word).exists(), f"{issue.id}: {word}"


def test_a_cure_and_a_card_beside_it_are_outside_the_issue() -> None:
    for proof in table.PROOFS:
        first, *_, = cells(proof)
        for version in RELEASES:
            for launch, sm in ((proof.cured, proof.sm), (proof.spared and proof.launch, proof.spared)):
                assert not launch or not hits(ISSUES[proof.issue], Cell(version, sm, launch)), (proof.issue,
                                                                                                launch, sm)
        assert first.launch is proof.launch
