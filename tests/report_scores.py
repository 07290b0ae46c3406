"""Failure reports from public issue trackers, and a score of the answers that ``flashlin why`` gives to them.

    python -m tests.report_scores                    the share of answered reports, by group
    python -m tests.report_scores --failed           also the reports that are not answered
    python -m tests.report_scores corpus held_out    both files

The exit status is 1 if a share is beyond its bound in BOUNDS. ``make test`` runs the last command.

``tests/reports/*.jsonl`` has one report in each line:

- id, url, package, group: its name, its address, the project whose users reported it, the kind of failure
- text: the program output, with names and paths of users replaced
- cause, fix: the cause and the fix, in our words
- certain: True if the text alone proves the cause
- words: lists of alternatives. A good answer contains one alternative of each list

``corpus.jsonl`` was read while the tables were written. ``held_out.jsonl`` was collected by people who had not
seen the tables, and it was committed before they were written.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from flashlin.diagnostics import why

FOLDER = Path(__file__).parent / "reports"
LONGEST = 120  # most words of one cause
# File -> the least share of answered reports, and the largest share of confidently wrong ones.
BOUNDS = {"corpus": (0.95, 0.0), "held_out": (0.7, 0.03)}


class Report(NamedTuple):
    id: str
    url: str
    package: str
    group: str
    text: str
    cause: str
    fix: str
    certain: bool
    words: list[list[str]]


class Score(NamedTuple):
    """The score of an answer.

    missing: the lists of words of which the answer contains no alternative.
    longest: the number of words of the longest cause.
    wrong: True if the first cause is rated certain, but none of the lists of words occurs in it.
    """
    missing: list[list[str]]
    longest: int
    wrong: bool

    @property
    def answered(self) -> bool:
        return not self.missing and self.longest <= LONGEST


def load(name: str) -> list[Report]:
    """Return the reports of ``tests/reports/<name>.jsonl``."""
    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [Report(**json.loads(line)) for line in lines]


def has(text: str, alternatives: list[str]) -> bool:
    """Return True if the text contains one of the alternatives, in any case and with any white space."""
    plain = " ".join(text.split()).casefold()
    return any(" ".join(one.split()).casefold() in plain for one in alternatives)


def score(report: Report) -> Score:
    """Score the answer to the text of a report."""
    found = why.matches(report.text)[:why.SHOWN]
    causes = [str(match) for match in found]
    whole = "\n".join(causes)
    longest = max((len(cause.split()) for cause in causes), default=0)
    wrong = bool(found) and found[0].certain and not any(has(causes[0], words) for words in report.words)
    return Score([words for words in report.words if not has(whole, words)], longest, wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--failed", action="store_true", help="also print the reports that are not answered")
    parser.add_argument("--group", help="only reports of this group")
    parser.add_argument("names", nargs="*", default=["corpus"], help="names of files (default: corpus)")
    given = parser.parse_args()
    enough = True
    for name in given.names:
        reports = [one for one in load(name) if given.group in (None, one.group)]
        scores = [score(one) for one in reports]
        for one, got in zip(reports, scores, strict=True):
            if given.failed and (got.wrong or not got.answered):
                first = next(iter(why.matches(one.text)), None)
                print(f"{one.id} {one.url}\n  cause  {one.cause}\n  fix    {one.fix}\n"
                      f"  lacks  {got.missing}\n"
                      f"  first  {first and first.failure.id}{' WRONG' * got.wrong}\n"
                      + "\n".join(f"  | {line}" for line in one.text.splitlines()[-12:]))
        print(f"{name}: {summary(reports, scores)}")
        enough = enough and (given.group is not None or is_enough(name, scores))
    return 0 if enough else 1


def is_enough(name: str, scores: list[Score]) -> bool:
    """Return True if enough reports of a file are answered, and few enough confidently wrong."""
    least, most = BOUNDS[name]
    return (sum(one.answered for one in scores) >= least * len(scores)
            and sum(one.wrong for one in scores) <= most * len(scores))


def summary(reports: list[Report], scores: list[Score]) -> str:
    """Return the share of reports that are answered, and of those that are confidently wrong."""
    groups = Counter(one.group for one in reports)
    right = Counter(one.group for one, got in zip(reports, scores, strict=True) if got.answered)
    lines = [f"  {group:<12} {right[group]:>3} of {count:>3}" for group, count in sorted(groups.items())]
    answered, wrong = sum(one.answered for one in scores), sum(one.wrong for one in scores)
    return "\n".join([f"{answered} of {len(scores)} reports are answered ({answered / len(scores):.0%}), "
                      f"{wrong} are confidently wrong", *lines])


if __name__ == "__main__":
    sys.exit(main())
