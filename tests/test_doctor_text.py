"""Tests of doctor's short text: it equals the files in tests/texts, fits a terminal and is complete.

After a deliberate change, run ``python -m tests.test_doctor_text --write`` and review the diff.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from flashlin.__main__ import coloured
from flashlin.diagnostics import checks, environment
from flashlin.diagnostics import doctor as diagnosis
from flashlin.diagnostics.report import Flaw, Ran, Report
from tests.simulated import World

pytestmark = pytest.mark.usefixtures("default_settings", "home")
FOLDER = Path(__file__).parent / "texts"
MACHINES = {
    "laptop": World(torch="2.13.0+cpu", triton="3.7.1", driver=""),
    "t4-3.2.0": World(("T4",), "2.6.0", "3.2.0", driver="550.54"),
    "h100-3.2.0": World(("H100",), "2.6.0", "3.2.0", driver="550.54"),
    "h200-3.6.0": World(("H200",), "2.11.0", "3.6.0"),
    "h100-and-t4": World(("H100", "T4"), "2.6.0", "3.2.0", driver="550.54"),
    "mi300": World(("MI300",), "2.11.0", "3.6.0"),
    "h100-broken": World(
        ("H100",),
        "2.10.0",
        "3.6.0",
        triton_error="import fails: ImportError: libz3.so",
        mode="Exclusive_Process",
    ),
}
# The checks that depend only on the simulated machine.
CHECKS = (
    checks.check_torch,
    checks.check_triton,
    checks.check_copies,
    checks.check_driver,
    environment.check_card,
)


def report(name: str, monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.setattr(diagnosis, "CHECKS", CHECKS)
    return MACHINES[name].doctor(monkeypatch)


@pytest.mark.parametrize("name", MACHINES)
def test_the_text_is_the_one_that_was_looked_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = report(name, monkeypatch).text()
    assert text == (FOLDER / f"{name}.txt").read_text(), "run: python -m tests.test_doctor_text --write"
    lines = text.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    "world",
    [
        World(("H100", "T4"), "2.7.0", "3.3.0"),
        World(("B200", "V100"), "2.6.0", "3.2.0"),
        World(("H100", "T4", "A100", "V100"), "2.6.0", "3.2.0", mode="Exclusive_Process"),
        World(("H100", "T4") * 4, "2.6.0", "3.2.0", triton_error="import fails: libz3", mode="Prohibited"),
    ],
)
@pytest.mark.alternate
def test_several_cards_fit_a_terminal_and_each_way_says_on_which(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "CHECKS", CHECKS)
    found = world.doctor(monkeypatch)
    lines = found.text().splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    ways = [line for line in lines if re.match(r"  \d+  ", line)]
    alike = len({plan.way for plan in found.plans}) == 1
    assert alike or all(re.search(r" on cuda:\d", line) for line in ways)


@pytest.mark.parametrize("name", MACHINES)
def test_nothing_is_said_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = report(name, monkeypatch)
    text = " ".join(found.text().split())
    assert all(text.count(check.detail) == 1 for check in found.checks if check.status != "ok")
    assert text.count("libz3.so") == (name == "h100-broken")
    assert found.verdict.count("AMD GPU on which") == (name == "mi300")


def test_what_a_package_does_is_said_once_with_what_takes_it_away(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Flaw(
        id="slow",
        where="fla 0.6.0",
        status="degraded",
        effect="its kernels are slow without a word " + "and so on " * 20,
        remedy='flashlin.patch("fla")',
        source="read",
    )
    found = report("laptop", monkeypatch).model_copy(update={"flaws": (known,)})
    assert found.verdict == (
        "degraded. Every op runs, but calls of other packages may run slowly or fail: fla 0.6.0."
    )
    text = found.text()
    assert text.count("without a word") == 1 and '    fix: flashlin.patch("fla")' in text.splitlines()


def test_what_ran_is_told_where_all_of_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = Ran(case="chunk_gla random", where="cpu", dtype="float32", status="ok", detail="", seconds=0.1)
    found = report("laptop", monkeypatch)
    assert "Ran" not in found.text()
    assert "Ran, against the float64 reference (2 ok)" in found.model_copy(update={"ran": (ran, ran)}).text()


def test_each_text_is_of_a_machine() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == set(MACHINES)


def test_colour_is_all_that_a_terminal_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    found = report("h100-broken", monkeypatch)
    painted = found.text(colour=True)
    assert re.sub(r"\x1b\[\d+m", "", painted) == found.text() != painted
    assert "\x1b[33mdegraded\x1b[0m. Every op" in painted


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("out", "variables", "colour"),
    [
        (Terminal(), {}, True),
        (io.StringIO(), {}, False),
        (None, {}, False),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Terminal(), {"TERM": "dumb"}, False),
    ],
)
def test_colour_is_for_terminals_whose_owner_wants_it(
    out: io.StringIO | None, variables: dict[str, str], colour: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert coloured(out) == colour


def write() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in MACHINES:
            (FOLDER / f"{name}.txt").write_text(report(name, patch).text())


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(__doc__)
    write()
