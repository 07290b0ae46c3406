"""``flashlin why``: which known failures print what somebody has on the screen. It reads the tables of
compat/, asks nobody and starts nothing.

Nothing here is a guess told as a fact: each answer says what of the text it rests on (``Match.because``) and
how well the failure itself is known (``Entry.known``).
"""
from __future__ import annotations

import re
import textwrap
import traceback
from difflib import SequenceMatcher
from functools import lru_cache
from typing import NamedTuple

from flashlin.compat.known_failures import KNOWN_FAILURES, Failure
from flashlin.compat.known_flaws import KNOWN_FLAWS, Flaw
from flashlin.compat.known_issues import KNOWN_ISSUES, KnownIssue
from flashlin.kernels.shield.source import LACKING
from flashlin.kernels.variants import VARIANTS

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9]{3,}|sm_?\d+|\d+ warps")
ERROR = re.compile(r"(error|exception|assert\w*|unreachable|fatal)\b", re.IGNORECASE)
# What everybody's errors are made of.
VAGUE = re.compile(r"\w*error$|(assert\w*|attribute|argument|been|cannot|cuda|defined|denied|directory|does"
                   r"|driver\w*|encountered|executed|exist|expected|failed|file|found|from|have|init|invalid"
                   r"|keyword|linearlayout|list|memory|module|must|named|nonetype|object|only|open"
                   r"|permission|range|read|requires|same|shared|should|such|support\w*|symbol|system|there"
                   r"|triton|undefined|unexpected|value|with)$")
# A name that a program gave, and so long that one of them is enough.
CODE = re.compile(r"(?=\w*([a-z][A-Z]|[a-z]_[a-z]))\w{11,}")
EXCEPTION = re.compile(r"^\w*error: ", re.IGNORECASE)
SHORTEST, MOST = 5, 12  # characters of a part that says anything; answers that anybody reads
WIDTH = 80
ENOUGH = 3  # words in common, below which a guess is none
CONFIDENCE = {"compiled": "compiled in our tests, where it fails so", "ran": "seen in our own runs",
              "thread": "from the thread; nobody here has run it", "documented": "documented"}

UNKNOWN = """Nothing that flashlin knows prints this, so it may be new. What helps:

  - the lines before it: Triton's compiler says why on stderr, and first
    (python program.py 2>&1 | flashlin why)
  - flashlin doctor, which examines this machine
  - an issue with the whole output, the call (shapes, dtypes) and what
    `flashlin doctor --markdown` prints"""


class Entry(NamedTuple):
    """A failure, whatever table it is of. symptoms, seen_in, general: as in those. where: the cards and
    releases. here: what flashlin does. otherwise: what to do without it. known: how well."""
    id: str
    effect: str
    symptoms: tuple[str, ...]
    where: str
    here: str
    otherwise: str
    known: str
    url: str
    seen_in: str = ""
    general: bool = False


class Match(NamedTuple):
    """sure: whether the text is what this failure prints, in the place where it does. because: what the match
    rests on."""
    entry: Entry
    sure: bool
    because: str

    def __str__(self) -> str:
        entry = self.entry
        rows = {"why": self.because, "where": entry.where, "flashlin": entry.here,
                "otherwise": entry.otherwise, "known": entry.known, "more": entry.url}
        lines = [f"{entry.id}: {entry.effect}",
                 *(f"  {name:<10} {text}" for name, text in rows.items() if text)]
        return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent=" " * 13, break_long_words=False,
                                       break_on_hyphens=False) for line in lines)


@lru_cache(maxsize=1)
def entries() -> tuple[Entry, ...]:
    """All that is known, narrow things first."""
    every = [*map(_of_issue, KNOWN_ISSUES), *map(_of_flaw, KNOWN_FLAWS), *map(_of_failure, KNOWN_FAILURES)]
    return tuple(sorted(every, key=lambda entry: entry.general))


def _of_issue(issue: KnownIssue) -> Entry:
    if issue.remedies and "foreign" in issue.traits:
        here = "its own kernels do without what triggers it; flashlin.shield refuses those of others"
    elif issue.remedies:
        here = "its ops run " + ", else ".join(VARIANTS[remedy].means.removeprefix("runs ")
                                               for remedy in issue.remedies)
    elif "autotuned" in issue.traits:
        here = ("its own ops are not tuned; flashlin.autotune, or flashlin.patched('triton'), takes the "
                "place of triton.autotune")
    elif issue.traits & {"foreign", *LACKING}:
        here = "its own kernels do without what triggers it; for kernels of others flashlin doctor tells it"
    elif issue.amd:
        here = "on AMD it starts kernels only where flashlin warmup has run them"
    else:
        here = "flashlin doctor tells it; no plan is changed"
    return Entry(
        issue.id, issue.effect, issue.symptoms, where=issue.where, here=here, otherwise=unaided(issue.need),
        known=CONFIDENCE[issue.confidence], url=issue.url, seen_in=issue.seen_in)


def _of_flaw(flaw: Flaw) -> Entry:
    patches = ", ".join(f'"{package}"' for package in flaw.mended_by)
    since = f", from {flaw.package} {flaw.mended_from} on" if flaw.mended_from else ""
    url = flaw.source if flaw.source.startswith("https:") else ""
    return Entry(
        flaw.id, f"{flaw.package}: {flaw.effect}", flaw.symptoms, where=flaw.where,
        here=f"flashlin.patch({patches}), or flashlin run, takes it away{since}" if patches else
        "no function can take it away; flashlin doctor tells it",
        otherwise=unaided(flaw.remedy) if patches else flaw.remedy,
        known=CONFIDENCE["thread"] if url else flaw.source, url=url)


def unaided(remedy: str) -> str:
    """The ways of a remedy that call no function of flashlin."""
    clauses = (", or ".join(way for way in clause.split(", or ") if not re.search(r"\bflashlin\.\w", way))
               for clause in remedy.split("; "))
    return "; ".join(filter(None, clauses))


def _of_failure(failure: Failure) -> Entry:
    shown = failure.source.startswith(("tests/", "matrix/"))
    known = f"shown by {failure.source}" if shown else CONFIDENCE.get(failure.source, failure.source)
    return Entry(
        failure.id, failure.effect, failure.symptoms, where=failure.where, here=failure.here,
        otherwise=failure.otherwise, known=known, url=failure.url, seen_in=failure.seen_in,
        general=failure.general)


def matches(text: str) -> list[Match]:
    """What the text may be, surest first. What only resembles it is left out where something is found that
    prints it; so is what many failures print where a narrower one does."""
    plain = " ".join(COLOURS.sub("", text).split())
    found = [match for entry in entries() if (match := _printed(entry, plain))]
    if any(match.sure and not match.entry.general for match in found):
        found = [match for match in found if match.sure]
    narrow = [match for match in found if not match.entry.general]
    found = narrow or found or _part(plain) or _piece(plain) or _words(text)
    return sorted(found, key=lambda match: not match.sure)


def _printed(entry: Entry, plain: str) -> Match | None:
    if entry.id in plain and re.search(rf"(?<![\w-]){re.escape(entry.id)}(?![\w-])", plain):
        return Match(entry, True, "the text has its name")
    for symptom in entry.symptoms:
        if _pattern(symptom).search(plain):
            if entry.seen_in and not _pattern(entry.seen_in).search(plain):
                return Match(entry, False, f"it prints {symptom!r}, and so may other programs: to be sure, "
                                           f"the traceback should have {entry.seen_in.strip()!r}")
            return Match(entry, True, f"it prints exactly this: {symptom!r}")
    return None


def _part(plain: str) -> list[Match]:
    """A word or two out of a symptom, as people search for them."""
    asked = plain.casefold()
    if len(asked) < SHORTEST:
        return []
    found = [Match(entry, False, f"the text is part of what it prints: {symptom!r}")
             for entry in entries()
             for symptom in [next((one for one in entry.symptoms if asked in one.casefold()), "")] if symptom]
    return found if len(found) <= MOST else []


def _piece(plain: str) -> list[Match]:
    """A piece of a symptom somewhere in a longer text: all but the exception's name, or words that follow
    each other and are half of what is special in it."""
    words = SequenceMatcher(autojunk=False)
    words.set_seq2([word.casefold() for word in re.findall(r"\w+", plain)])  # indexed once: logs are long
    found = []
    for entry in entries():
        pieces = [piece for symptom in entry.symptoms for piece in [_shared(symptom, plain, words)] if piece]
        if pieces:
            piece = max(pieces, key=len)
            because = f"the text has a piece of what it prints: {piece!r}"
            found.append((len(piece), Match(entry, False, because)))
    longest = max((length for length, _ in found), default=0)
    return [match for length, match in found if length == longest][:MOST]


def _shared(symptom: str, plain: str, words: SequenceMatcher[str]) -> str:
    """The piece of a symptom that the text has; ``""`` where it is none that tells."""
    rest = EXCEPTION.sub("", symptom)
    if len(rest) >= SHORTEST and rest in plain:
        return rest
    places = list(re.finditer(r"\w+", symptom))
    words.set_seq1([place[0].casefold() for place in places])
    start, _, count = words.find_longest_match()
    if not count:
        return ""
    piece = symptom[places[start].start():places[start + count - 1].end()]
    telling = _special(piece)
    enough = len(WORD.findall(piece)) >= ENOUGH or any(map(CODE.match, telling))
    return piece if telling and enough and 2 * _letters(telling) >= _letters(_special(symptom)) else ""


def _special(text: str) -> list[str]:
    return [word for word in WORD.findall(text) if not VAGUE.match(word.strip("_").casefold())]


def _letters(words: list[str]) -> int:
    return sum(map(len, words))


def _words(text: str) -> list[Match]:
    """By the words of the last line that tells an error, all of which but a third must be those of the
    failure."""
    lines = [line for line in COLOURS.sub("", text).splitlines() if line.strip()]
    line = next((line for line in reversed(lines) if ERROR.search(line)), lines[-1] if lines else "")
    asked = {word for word in WORD.findall(line.casefold()) if not VAGUE.match(word)}
    found = []
    for entry in entries():
        text = " ".join([entry.id.replace("-", " "), entry.effect, entry.where, *entry.symptoms])
        shared = sorted(asked.intersection(WORD.findall(text.casefold())))
        if len(shared) >= ENOUGH and len(shared) * 3 >= len(asked) * 2:
            found.append((len(shared), Match(entry, False, f"a guess, by the words {', '.join(shared)}")))
    best = max((count for count, _ in found), default=0)
    return [match for count, match in found if count == best][:MOST]


@lru_cache(maxsize=512)
def _pattern(symptom: str) -> re.Pattern[str]:
    return re.compile(".{0,300}?".join(re.escape(" ".join(part.split())) for part in symptom.split("...")))


def why(failure: BaseException | str) -> str:
    """Which known failures print this: what is affected, what flashlin does, what to do without it, and how
    sure that is.

    Args:
        failure: an exception, with its traceback and causes, or a text: an error's line, a whole log.

    Reads tables only: no GPU, no network, no import of torch or Triton. Raises TypeError for anything else.
    """
    if not isinstance(failure, (BaseException, str)):
        raise TypeError(f"failure: got {type(failure).__name__}, need an exception or a text")
    text = failure if isinstance(failure, str) else "".join(traceback.format_exception(failure))
    found = matches(text)
    if not found:
        return UNKNOWN
    sure = [match for match in found if match.sure]
    if not sure:
        head = "Not sure: the text alone does not tell. What it may be:"
    elif len(sure) == 1:
        head = "One known failure prints this."
    else:
        head = (f"{len(sure)} known failures print this: card and release (where) tell which\n"
                "of them it can be.")
    return "\n\n".join([head, *map(str, found)])
