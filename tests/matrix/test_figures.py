"""No main kernel grows by a tenth in registers, spilled bytes or instructions without notice.

Machine code gives these metrics for GPUs that are not available here. Each CI run compiles the kernels that
differ from the record, at most a few per GPU. TEST_WHOLE=1 compiles all.
"""
from __future__ import annotations

from pathlib import Path

import pytest

from flashlin.testing.machine_code import Loop, longest_loop, loop_of
from flashlin.testing.record import Recorded
from matrix import figures
from matrix.figures import CARDS, Figures, Measured
from tests.share import WHOLE, share

FEW = 6  # compiled per GPU, 2 s each
ACCEPT = "if that is meant: python -m matrix figures, and say in the commit what it is for"


def chosen(sm: int) -> dict[str, Recorded]:
    """Return at most FEW of the changed kernels of a GPU, or one kernel if none changed.

    GPUs start at different kernels, so together they cover more of them.
    """
    number, planned = CARDS.index(sm), figures.planned(sm)
    names = sorted(planned if WHOLE else figures.changed(sm, figures.load()))
    if not names:
        names = sorted(planned)[number::len(planned)]
    return {name: planned[name] for name in share(names, number, -(-len(names) // FEW))}


@pytest.mark.parametrize("sm", CARDS)
@pytest.mark.alternate
def test_no_main_kernel_grows(sm: int) -> None:
    pytest.importorskip("triton")
    kept = figures.load()[f"sm{sm}"]
    others = sorted(figures.planned(sm).keys() ^ kept.keys())
    assert not others, f"sm{sm}: kept or planned alone: {', '.join(others)}; run python -m matrix figures"
    wrong = [f"sm{sm} {name}: {', '.join(said)}" for name, now in figures.measure(sm, chosen(sm))
             if (said := figures.grown(kept[name].figures, now.figures))]
    assert not wrong, "\n".join([*wrong, ACCEPT])


@pytest.mark.parametrize("now, said", [
    ((1000, 128, 2000, 50), []), ((1100, 140, 2200, 58), []),
    ((1000, 141, 2000, 50), ["registers 128 -> 141"]), ((1101, 128, 2000, 50), ["spills 1000 -> 1101"]),
    ((900, 128, 2201, 59), ["instructions 2000 -> 2201", "local 50 -> 59"])])
def test_what_has_grown(now: tuple[int, int, int, int], said: list[str]) -> None:
    assert figures.grown(Figures(1000, 128, 2000, 50), Figures(*now)) == said


def test_a_little_of_nothing_has_not_grown() -> None:
    assert figures.grown(Figures(0, 24, 20, 0), Figures(64, 32, 36, 8)) == []
    assert figures.grown(Figures(0, 24, 20, 0), Figures(65, 32, 36, 8)) == ["spills 0 -> 65"]


def test_what_is_kept_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that has not changed is not compiled again."""
    launch = Recorded("flashlin.kernels.tile_ops", "gate_cumsum", (), (), 4, 1, 0, ())
    compiled = []

    def measure(sm: int, launches: dict[str, Recorded], *, jobs: int = 0) -> list[tuple[str, Measured]]:
        compiled.extend(launches)
        return [(name, Measured(figures.identity(one), Figures(0, 32, 10, 0)))
                for name, one in launches.items()]
    monkeypatch.setattr(figures, "measure", measure)
    for launches in ({"a": launch}, {"a": launch, "b": launch._replace(num_warps=8)}, {"b": launch}):
        monkeypatch.setattr(figures, "planned", lambda sm, launches=launches: launches)
        figures.write(tmp_path / "figures.json", [80])
    assert compiled == ["a", "b", "b"] and set(figures.load(tmp_path / "figures.json")["sm80"]) == {"b"}


LISTING = """
kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0020*/                   LDL.64 R2, [R1] ;
.L_x_2:
        /*0030*/               @P1 BRA `(.L_x_2) ;
        /*0040*/                   STL [R1+0x8], R2 ;
        /*0050*/              @UP2 BRA.U `(.L_x_1) ;
.L_x_0:
        /*0060*/                   STL [R1], R2 ;
        /*0070*/                   EXIT ;
.L_x_3:
        /*0080*/                   BRA `(.L_x_3);
"""


def test_the_longest_loop_of_a_listing() -> None:
    assert longest_loop(LISTING) == (4, 2)
    assert longest_loop(LISTING.replace("(.L_x_1) ;", "(.L_x_0) ;")) == (9, 3), "without a loop, everything"


@pytest.mark.parametrize("said, loop", [
    ("nvdisasm fatal : CUDA architecture \"SM70\" is deprecated. Please use CUDA toolkit 13.0", Loop()),
    ("nvdisasm fatal   : Cannot decode architecture 'SM103a'", Loop()),
    ("nvdisasm fatal : no such thing", None)])
def test_a_disassembler_that_does_not_know_the_card_says_nothing_and_other_failures_are_errors(
        said: str, loop: Loop | None, tmp_path: Path) -> None:
    program = tmp_path / "nvdisasm"
    program.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    program.chmod(0o755)
    if loop is None:
        with pytest.raises(RuntimeError, match="no such thing"):
            loop_of(b"", program, tmp_path)
    else:
        assert loop_of(b"", program, tmp_path) == loop
    with pytest.raises(OSError, match="nowhere"):
        loop_of(b"", tmp_path / "nowhere", tmp_path)
