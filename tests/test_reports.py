"""Tests of the answers of ``flashlin why`` to failure reports from public issue trackers."""
from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from flashlin.compat import known_failures
from flashlin.compat.known_failures import KNOWN_FAILURES
from flashlin.diagnostics import why
from tests.report_scores import BOUNDS, LONGEST, Report, Score, has, is_enough, load, main, score, summary


@pytest.mark.parametrize("name", BOUNDS)
def test_enough_reports_are_answered_and_hardly_any_wrongly(name: str) -> None:
    scores = [score(one) for one in load(name)]
    assert is_enough(name, scores), summary(load(name), scores)


def test_too_few_answers_or_a_wrong_one_are_noticed(monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    good, missing, wrong = Score([], 1, False), Score([["a"]], 1, False), Score([["a"]], 1, True)
    assert is_enough("corpus", [good] * 19 + [missing]) and not is_enough("corpus", [good] * 18 + [missing])
    assert not is_enough("corpus", [good] * 19 + [wrong])
    monkeypatch.setattr(sys, "argv", ["report_scores", "--failed", "corpus"])
    monkeypatch.setattr(why, "matches", lambda text: [])
    assert main() == 1
    said = capsys.readouterr().out
    assert "corpus: 0 of" in said and "\n  lacks  [[" in said


def test_reports_have_names_of_their_own_and_no_names_of_people() -> None:
    reports = [one for name in BOUNDS for one in load(name)]
    assert len({one.id for one in reports}) == len(reports)
    held = {one.url for one in load("held_out")}
    assert not held & {one.url for one in load("corpus")}
    for one in reports:
        assert len(one.text) <= 2000 and one.url.startswith("https://") and one.words, one.id
        assert not re.search(r"/(?:home|Users)/(?!user\b|\.\.\.|\[)[^/\s]+", one.text), one.id


def test_a_score_can_be_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report("x", "https://x", "x", "numbers", "RuntimeError: mlir::LinearLayout::reshapeOuts",
                    "cause", "fix", True, [["at  most 4 WARPS", "nothing"]])
    assert score(report) == Score([], score(report).longest, False) and score(report).answered
    other = report._replace(words=[["at most 4 warps"], ["a word that is missing"]])
    assert score(other).missing == [["a word that is missing"]] and not score(other).answered
    assert score(report._replace(words=[["a word that is missing"]])).wrong
    assert not score(report._replace(text="KeyError: 'loss'")).answered
    assert not Score([], LONGEST + 1, False).answered
    assert "0 of 1 reports are answered (0%), 1 are confidently wrong" in summary(
        [report], [Score([["a"]], 1, True)])
    assert has("a\n  B", ["x", "A b"]) and not has("ab", ["a b"])


def test_every_answer_is_short_and_says_what_to_do() -> None:
    for known in KNOWN_FAILURES:
        longest = max((*known.symptoms, *known.asked), key=len)
        match = why.Match(known, True, f"it prints exactly this: {longest!r}")
        assert len(str(match).split()) <= (160 if known.asked else LONGEST), known.id
        assert known.effect and known.need and known.proof, known.id


@pytest.mark.parametrize(("text", "why"), [
    ("[a]\nprints = x\ncause = y\nproof = z\n", "fix"), ("[a]\ncause = y\nfix = x\nproof = z\n", "asked"),
    ("[a]\nprint = x\nprints = x\ncause = y\nfix = z\nproof = z\n", "print'")])
def test_a_section_with_a_wrong_or_missing_field_is_an_error(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="got no"):
        known_failures.load(tmp_path)
    (tmp_path / "a.cfg").write_text(text)
    with pytest.raises(ValueError, match=rf"a: got the fields .*check .*{why}"):
        known_failures.load(tmp_path)


def test_no_symptom_is_a_single_common_word() -> None:
    for known in KNOWN_FAILURES:
        for symptom in known.symptoms:
            assert len(symptom) >= 10 or not re.fullmatch(r"[a-z]+", symptom), (known.id, symptom)


def test_no_pattern_takes_long() -> None:
    """Each pattern takes at most 50 ms on 100 KB of text."""
    line = load("corpus")[0].text + "\n" + load("corpus")[-1].text + "\n"
    plain = " ".join((line * (100_000 // len(line) + 1)).split())
    words = set(re.findall(r"\w+", plain.casefold()))
    for sought in why._all_sought():
        began = time.process_time()
        sought.last(plain, words | sought.words)
        assert time.process_time() - began < 0.05, sought
