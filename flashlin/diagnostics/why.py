"""Search for the known failures that print a given text, for ``flashlin why``.

Only the tables of compat/ are read. Everything works offline and launches nothing. Each answer says which
part of the text matched (``Match.because``) and how well the failure itself is known (``Known.known``).
The failure that the text prints last comes first, because the exception that ended a program is at its end.

A ``Reading`` takes the text in blocks, in linear time and with the memory of one block, because logs can be
gigabytes long. Each block is split into words once. A symptom is searched for only in blocks that contain all
its words.
"""
from __future__ import annotations

import codecs
import json
import os
import re
import stat
import sys
import textwrap
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, BinaryIO, NamedTuple

from flashlin.compat.known import EVERYWHERE, Flaw, Known, KnownIssue
from flashlin.compat.known_failures import KNOWN_FAILURES
from flashlin.compat.known_flaws import KNOWN_FLAWS
from flashlin.compat.known_issues import KNOWN_ISSUES
from flashlin.compat.target import CARDS, Card, Target, parse
from flashlin.compat.traits import LACKING
from flashlin.compat.versions import affected
from flashlin.kernels.remedies import REMEDIES

BLOCK = 1 << 20  # characters or bytes that are read at once
OVERLAP = 8192  # characters of a block that are searched again with the next block; longer than any symptom
# Terminal escape sequences (ECMA-48): colours, links and cursor moves.
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]+[0-~]|[@-Z\\-_])")
# Byte order marks. UTF-32 comes first, because its mark begins with that of UTF-16.
MARKS = ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16"),
         (codecs.BOM_UTF16_BE, "utf-16"), (codecs.BOM_UTF8, "utf-8-sig"))
WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9]{3,}|sm_?\d+|(?<!\d)\d+ warps")
ERROR = re.compile(r"(error|exception|assert\w*|unreachable|fatal)\b", re.IGNORECASE)
ERRORS = ("error", "exception", "assert", "unreachable", "fatal")  # each match of ERROR contains one
# Words that are common in error messages and identify none.
VAGUE = re.compile(r"\w*error$|(assert\w*|attribute|argument|been|cannot|cuda|defined|denied|directory|does"
                   r"|driver\w*|encountered|executed|exist|expected|failed|file|found|from|have|init|invalid"
                   r"|keyword|linearlayout|list|memory|module|must|named|nonetype|object|only|open"
                   r"|permission|range|read|requires|same|shared|should|such|support\w*|symbol|system|there"
                   r"|torch|triton|undefined|unexpected|value|with)$")
# A name from source code that is long enough to identify a failure alone.
CODE = re.compile(r"(?=\w*([a-z][A-Z]|[a-z]_[a-z]))\w{11,}")
EXCEPTION = re.compile(r"^\w*error: ", re.IGNORECASE)
SHORTEST, MOST = 5, 12  # minimum number of characters to search for; maximum number of matches by a part
SHOWN = 3  # maximum number of failures that an answer describes
# Names of GPUs and a release of Triton. Issues of other GPUs and releases are left out. A short name such as
# T4 counts only after its maker.
_NAMES = sorted(CARDS, key=len, reverse=True)
GPU = re.compile(rf"(?<![\w-])(?:(?:NVIDIA|Tesla|GeForce|AMD) ({'|'.join(_NAMES)})"
                 rf"|({'|'.join(name for name in _NAMES if len(name) > 3)}))(?!\w)")
RELEASE = re.compile(r"triton(?:==|-| version:? | )v?(3\.\d+(?:\.\d+)?)\b", re.IGNORECASE)
# The line of an exception, which may have a prefix such as a rank, a date or the name of a process.
RAISED = re.compile(r"(?:^|[\s\]:)|])(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Timeout)(?::|$)")
WIDTH = 80
NEWER = re.compile(r"(^|, or )Triton (\d[.\d]*$)")  # in the fix of a known issue
ENOUGH = 3  # fewest words in common for a guess
ELSEWHERE = "; but it is not known on the GPU and the Triton that the text or the target names"
ASKED = "the answer to a question, not to the output of a program"
QUESTION = re.compile(r"[A-Za-z0-9 ,'?!.-]+")  # output of programs has other characters
CAUSES = re.compile(r"(?<!^) (?=\([1-3]\) )")  # before the number of a cause
LONGEST_QUESTION = 10  # most words of a question, without these
FILLERS = frozenset((
    "a", "an", "the", "is", "are", "my", "i", "get", "why", "do", "does", "how", "to", "in", "of", "on",
    "with", "at", "so", "it", "has", "have", "when"))

UNKNOWN = """No known failure prints this, so it may be new. What helps:

  - the whole log, with the lines before the error, where compilers print the
    cause (python program.py 2>&1 | flashlin why)
  - flashlin doctor, which examines this machine
  - an issue with the whole output, the call (shapes, dtypes) and the output
    of `flashlin doctor --markdown`"""


class Match(NamedTuple):
    """A known failure that may have printed the text.

    sure: True if the text contains exactly what this failure prints, at the place where it prints it.
    because: the part of the text that matched.
    certain: True if the text also proves that this failure is the cause.
    """
    failure: Known
    sure: bool
    because: str
    certain: bool = False

    def fields(self) -> dict[str, str]:
        """Return the fields of an answer, as {label: text}."""
        level = ("certain" if self.certain else
                 "likely" if self.sure and not self.failure.general else "possible")
        said = rows(self.failure)
        said.pop("in the traceback", None)
        source = said.pop("source")
        return {"cause": self.failure.what, **said, "confidence": f"{level}: {self.because}", "source": source}

    def __str__(self) -> str:
        lines = [self.failure.id, *(
            f"  {name if part is parts[0] else '':<11} {part}" for name, text in self.fields().items()
            for parts in [CAUSES.split(text) if self.failure.asked else [text]] for part in parts)]
        return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent=" " * 14, break_long_words=False,
                                       break_on_hyphens=False) for line in lines)


def unknown() -> str:
    """Return the answer to a text of which no failure is known."""
    topics = ", ".join(known.asked[0] for known in failures() if known.asked)
    return "\n".join([UNKNOWN, *textwrap.wrap(f"- a question in a few words, about: {topics}", WIDTH,
                                              initial_indent="  ", subsequent_indent="    ")])


@lru_cache(maxsize=1)
def failures() -> tuple[Known, ...]:
    """Return all known failures, narrow failures before general ones."""
    return tuple(sorted((*KNOWN_ISSUES, *KNOWN_FLAWS, *KNOWN_FAILURES), key=lambda known: known.general))


def rows(known: Known) -> dict[str, str]:
    """Return the lines that ``flashlin why`` prints about a known failure, as {label: text}."""
    said = {"tell apart": known.apart,
            "fix": known.need if known.asked else NEWER.sub(r"\1upgrade to Triton \2", known.otherwise),
            "in flashlin": _handled(known),
            "where": "" if known.where == EVERYWHERE else known.where,
            "in the traceback": known.seen_in.strip(),
            "source": "; ".join(filter(None, (known.known, known.link)))}
    return {name: text for name, text in said.items() if text}


def _handled(known: Known) -> str:
    """Return a sentence that says what flashlin does about a failure."""
    if isinstance(known, Flaw):
        patches = ", ".join(f'"{package}"' for package in known.mended_by)
        since = f", since {known.package} {known.mended_from}" if known.mended_from else ""
        return (f"flashlin.patch({patches}), or flashlin run, repairs it{since}" if patches else
                "no patch can repair it; flashlin doctor reports it")
    if not isinstance(known, KnownIssue):
        return known.handled
    if known.remedies and "foreign" in known.traits:
        return "its own kernels avoid the cause; flashlin.shield refuses other kernels that have it"
    if known.remedies:
        return "its ops run " + ", else ".join(REMEDIES[remedy].means.removeprefix("runs ")
                                               for remedy in known.remedies)
    if "autotuned" in known.traits:
        return ("its own ops are not tuned; flashlin.autotune, or flashlin.patched('triton'), replaces "
                "triton.autotune")
    if known.traits & {"foreign", *LACKING}:
        return "its own kernels avoid the cause; for other kernels flashlin doctor reports it"
    if known.amd:
        return "on AMD it launches only kernels that flashlin warmup has run"
    return "flashlin doctor reports it; no plan is changed"


class Sought(NamedTuple):
    """A text to search for.

    pattern: matches the text in a log whose white space is normalized.
    parts: literal parts of the text, which are searched for first because that is faster.
    words: whole words of the text, casefolded; every match contains all of them.
    """
    pattern: re.Pattern[str]
    parts: tuple[str, ...]
    words: frozenset[str]

    def last(self, plain: str, words: set[str]) -> int:
        """Return where a log contains the text, the last place if its first part is last there; -1 if nowhere.

        words: the words of the log, casefolded.
        """
        if not (self.words <= words and all(part in plain for part in self.parts)):
            return -1
        last = plain.rfind(self.parts[0])
        found = self.pattern.match(plain, last) or self.pattern.search(plain)
        return found.start() if found else -1


@cache
def _sought(text: str) -> Sought:
    """Return the pattern of a symptom; ``...`` in it matches up to 300 characters."""
    parts = tuple(" ".join(part.split()) for part in text.split("..."))
    # a word at the edge of a part may be a piece of a longer one
    inner = [word[0].casefold() for part in parts for word in re.finditer(r"\w+", part)
             if word.start() and word.end() < len(part)]
    return Sought(re.compile(".{0,300}?".join(map(re.escape, parts))), parts, frozenset(inner))


@cache
def _sought_name(id: str) -> Sought:
    pattern = re.compile(rf"(?<![\w-]){re.escape(id)}(?![\w-])")
    return Sought(pattern, (id,), frozenset(re.findall(r"\w+", id)))


def _rest(symptom: str) -> str:
    """Return a symptom without the name of its exception; ``""`` if too little is left."""
    rest = EXCEPTION.sub("", symptom)
    return rest if len(rest) >= SHORTEST else ""


@lru_cache(maxsize=1)
def _all_sought() -> tuple[Sought, ...]:
    """Return all patterns that are searched for in every block."""
    every = failures()
    texts = [text for known in every for symptom in (known.seen_in, *known.symptoms)
             for text in (symptom, _rest(symptom)) if text]
    return tuple(dict.fromkeys([*(_sought_name(known.id) for known in every), *map(_sought, texts)]))


@lru_cache(maxsize=1)
def _telling() -> dict[str, list[tuple[str, int]]]:
    """Return the distinctive words of all symptoms, casefolded.

    Each word has the symptoms that contain it, with its position in them.
    """
    found: dict[str, list[tuple[str, int]]] = {}
    for symptom in dict.fromkeys(one for known in failures() for one in known.symptoms):
        special = [word.span() for word in WORD.finditer(symptom) if _is_special(word[0])]
        for place, word in enumerate(re.finditer(r"\w+", symptom)):
            if any(word.start() < end and start < word.end() for start, end in special):
                found.setdefault(word[0].casefold(), []).append((symptom, place))
    return found


@lru_cache(maxsize=1)
def _shared() -> frozenset[str]:
    """Return the symptoms of several failures. They prove none of them."""
    every = Counter(symptom for known in failures() for symptom in known.symptoms)
    return frozenset(symptom for symptom, count in every.items() if count > 1)


@cache
def _words_of(symptom: str) -> list[str]:
    return [word.casefold() for word in re.findall(r"\w+", symptom)]


class Reading:
    """A search in one text for what known failures print.

    ``add`` takes the text in blocks of any size. A block ends where a line ends, unless the line is longer
    than a block. ``empty`` is True as long as the text has only white space.
    """

    def __init__(self) -> None:
        self.empty = True
        self._found: dict[Sought, int] = {}  # the place of the last match
        self._end, self._raised = 0, -1  # number of characters so far; the place of the last exception
        self._runs: set[tuple[str, int, int]] = set()  # a symptom, and its first and last matched word
        self._size, self._short = 0, ""  # the whole text, while it is short enough to be part of a symptom
        self._error = self._last = ""  # the last line with an error, and the last line
        self._tail = ""
        self._cards: set[Card] = set()  # the GPUs and the releases of Triton that the text or a target names
        self._tritons: set[str] = set()

    def add(self, text: str) -> None:
        """Search the next block of the text."""
        text = text.replace("\0", "")  # UTF-16 without a byte order mark has zero bytes
        before = self._tail
        both = ESCAPES.sub("", before + text)
        plain = " ".join(both.split())
        self._tail = both[-OVERLAP:]
        if not plain:
            return
        self.empty = False
        self._size += len(text)
        self._short = plain if self._size <= OVERLAP else ""
        self._cards.update(CARDS[name[0] or name[1]] for name in GPU.findall(plain))
        self._tritons.update(RELEASE.findall(plain))
        folded = plain.casefold()
        words = re.findall(r"\w+", folded)
        distinct = set(words)
        begin = self._end - len(" ".join(before.split()))
        self._found.update({sought: begin + place for sought in _all_sought()
                            if (place := sought.last(plain, distinct)) >= 0})
        self._end = begin + len(plain)
        if not _telling().keys().isdisjoint(words):
            self._find_runs(words)
        self._find_lines(both, any(error in folded for error in ERRORS), begin)

    def _find_runs(self, words: list[str]) -> None:
        """Store for each distinctive word the longest run of words around it that a symptom contains."""
        telling, last = _telling(), len(words) - 1
        for at, word in enumerate(words):
            for symptom, place in telling.get(word, ()):
                theirs = _words_of(symptom)
                before = after = 0
                while min(place, at) > before and theirs[place - before - 1] == words[at - before - 1]:
                    before += 1
                while (min(len(theirs) - 1 - place, last - at) > after
                       and theirs[place + after + 1] == words[at + after + 1]):
                    after += 1
                self._runs.add((symptom, place - before, place + after))

    def _find_lines(self, text: str, errors: bool, begin: int) -> None:
        """Find the last line with an error, and the place of the last exception.

        begin: the place of the text.
        """
        lines = [line for line in text.splitlines() if line.strip()]
        self._last = lines[-1] if lines else self._last
        if errors:
            self._error = next((line for line in reversed(lines) if ERROR.search(line)), self._error)
            place = begin
            for line in lines:
                if RAISED.search(line):
                    self._raised = place
                place += len(" ".join(line.split())) + 1

    def on(self, target: str | Target) -> Reading:
        """Leave out what cannot occur on a target, instead of what the text names, and return this object.

        A target without torch and Triton gives only the GPU, so the Triton that the text names still counts.
        """
        only_gpu = isinstance(target, str) and not re.search("triton|torch", target, re.IGNORECASE)
        named = parse(f"{target},triton=none" if only_gpu else target) if isinstance(target, str) else target
        self._cards = {Card(named.capability, named.sms, named.backend, named.arch)}
        self._tritons = self._tritons if only_gpu else {named.triton}
        return self

    def matches(self) -> list[Match]:
        """Return the failures that may have printed the text, the most likely ones first.

        A failure that only resembles the text is left out if another one prints it exactly. A general failure
        is left out if a narrower one is found, and so is a warning if there is any other failure.
        """
        found = [match for known in failures()
                 if (match := self._printed(known)) and not self._elsewhere(known)]
        if any(match.sure and not match.failure.general and not match.failure.noise for match in found):
            found = [match for match in found if match.sure]
        for less in ("noise", "general"):
            found = [match for match in found if not getattr(match.failure, less)] or found
        asked = _asked(self._short, exactly=bool(found))
        found = [*asked, *(found or _part(self._short))] or self._piece() or _words(self._error or self._last)
        here = [match for match in found if not self._elsewhere(match.failure)]
        return sorted(here or [match._replace(because=match.because + ELSEWHERE) for match in found],
                      key=self._unlikely)

    def _unlikely(self, match: Match) -> tuple[bool, bool, bool, bool, bool, int]:
        """Return a sort key: the answer to a question comes first, then the failure of the last exception.

        Of failures that print the same, those of arguments come before those of compilers.
        """
        printed = [symptom for symptom in match.failure.symptoms if _sought(symptom) in self._found]
        at_end = any(self._found[_sought(symptom)] >= self._raised for symptom in printed)
        return (not match.failure.asked, not match.sure, not at_end, not match.certain,
                isinstance(match.failure, KnownIssue),
                -max(map(len, printed), default=0))

    def _elsewhere(self, known: Known) -> bool:
        """Return True if an issue cannot occur on the GPU, or with the Triton, that the text or target names.

        A text that names several of them excludes none.
        """
        if not isinstance(known, KnownIssue) or _sought_name(known.id) in self._found:
            return False
        low, high = known.capabilities
        return ((len({card.capability for card in self._cards}) == 1 and not any(
                    card.arch.startswith(known.amd) if known.amd
                    else card.backend == "cuda" and low <= card.capability < high for card in self._cards))
                or (len(self._tritons) == 1 and not affected(*self._tritons, known.since, known.fixed_in)))

    def _printed(self, known: Known) -> Match | None:
        if _sought_name(known.id) in self._found:
            return Match(known, True, "the text has its name", True)
        for symptom in known.symptoms:
            if _sought(symptom) in self._found:
                if known.seen_in and _sought(known.seen_in) not in self._found:
                    return Match(known, False, f"it prints {symptom!r}, and so may other programs: to be "
                                               f"sure, the traceback should have {known.seen_in.strip()!r}")
                shared = known.general or known.noise or symptom in _shared()
                because = f"it prints exactly this: {symptom!r}"
                return Match(known, True, because, known.certain and not shared)
        return None

    def _piece(self) -> list[Match]:
        """Return matches for a piece of a symptom in a longer text.

        A piece is all of a symptom but its exception's name, or consecutive words with half of its
        distinctive words.
        """
        pieces: dict[str, str] = {}
        for symptom, first, last in sorted(self._runs):
            piece = _piece_of(symptom, first, last)
            pieces[symptom] = max(pieces.get(symptom, ""), piece, key=len)
        found = []
        for known in failures():
            if known.general or known.noise:
                continue
            mine = [rest if (rest := _rest(symptom)) and _sought(rest) in self._found
                    else pieces.get(symptom, "") for symptom in known.symptoms]
            if piece := max(mine, key=len, default=""):
                because = f"the text has a piece of what it prints: {piece!r}"
                found.append((len(piece), Match(known, False, because)))
        longest = max((length for length, _ in found), default=0)
        return [match for length, match in found if length == longest][:MOST]


def matches(text: str) -> list[Match]:
    """Return the failures that may have printed the text, see ``Reading.matches``."""
    return read_text(text).matches()


def read_text(text: str) -> Reading:
    """Search a text and return the finished Reading."""
    return _read(text[start:start + BLOCK] for start in range(0, len(text), BLOCK))


def read(stream: BinaryIO) -> Reading:
    """Read a log to its end, in UTF-8, or in UTF-16 or UTF-32 with a byte order mark.

    Invalid bytes are replaced. A progress bar is shown if stderr is a terminal and tqdm is installed.
    """
    with _progress(stream) as read_on:
        return _read(_decoded(stream, read_on))


def _read(texts: Iterator[str]) -> Reading:
    reading, line = Reading(), ""
    for text in texts:
        line += text
        end = max(line.rfind("\n"), line.rfind("\r")) + 1 or (len(line) if len(line) >= BLOCK else 0)
        if end:
            reading.add(line[:end])
            line = line[end:]
    reading.add(line)
    return reading


def _decoded(stream: BinaryIO, read_on: Callable[[int], object]) -> Iterator[str]:
    block = stream.read(BLOCK)
    encoding = next((name for mark, name in MARKS if block.startswith(mark)), "utf-8")
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    while block:
        yield decoder.decode(block)
        read_on(len(block))
        block = stream.read(BLOCK)
    yield decoder.decode(b"", final=True)


@contextmanager
def _progress(stream: BinaryIO) -> Iterator[Callable[[int], object]]:
    """Yield the function to call with the number of bytes of each block."""
    bars: Any = None
    if sys.stderr is not None and sys.stderr.isatty():
        with suppress(ImportError):
            bars = import_module("tqdm")
    if bars is None:
        yield lambda size: None
        return
    file = os.fstat(stream.fileno())
    with bars.tqdm(total=file.st_size if stat.S_ISREG(file.st_mode) else None, desc="flashlin why", unit="B",
                   unit_scale=True, delay=1, leave=False) as bar:
        yield bar.update


def _asked(plain: str, exactly: bool) -> list[Match]:
    """Return the answers to a question in plain words, those that have most of its words.

    exactly: the question may have no further words, because a known failure also prints the text.
    """
    words = [word for word in re.findall(r"\w+", plain.casefold()) if word not in FILLERS]
    if len(words) > LONGEST_QUESTION or not QUESTION.fullmatch(plain):
        return []
    found = [(len(wanted), known) for known in failures() for question in known.asked
             if (wanted := set(question.split())) == set(words) or (wanted < set(words) and not exactly)]
    most = max((count for count, _ in found), default=0)
    return [Match(known, False, ASKED)
            for known in dict.fromkeys(known for count, known in found if count == most)]


def _part(plain: str) -> list[Match]:
    """Return matches for a short text that is contained in a symptom, such as a word or two."""
    asked = plain.casefold()
    if len(asked) < SHORTEST:
        return []
    found = [Match(known, False, f"the text is part of what it prints: {symptom!r}")
             for known in failures()
             for symptom in [next((one for one in known.symptoms if asked in one.casefold()), "")] if symptom]
    return found if len(found) <= MOST else []


def _piece_of(symptom: str, first: int, last: int) -> str:
    """Return these words of a symptom, from the first to the last.

    Return ``""`` if they are too few to identify the symptom.
    """
    places = [word.span() for word in re.finditer(r"\w+", symptom)]
    piece = symptom[places[first][0]:places[last][1]]
    telling = _special(piece)
    enough = len(WORD.findall(piece)) >= ENOUGH or any(map(CODE.match, telling))
    return piece if telling and enough and 2 * len("".join(telling)) >= len("".join(_special(symptom))) else ""


def _special(text: str) -> list[str]:
    return list(filter(_is_special, WORD.findall(text)))


def _is_special(word: str) -> bool:
    return not VAGUE.match(word.strip("_").casefold())


def _words(line: str) -> list[Match]:
    """Guess failures by the words of a line with an error.

    At least two thirds of its distinctive words must belong to the failure.
    """
    asked = {word for word in WORD.findall(line.casefold()) if not VAGUE.match(word)}
    found = []
    for known in failures():
        text = " ".join([known.id.replace("-", " "), known.what, known.where, *known.symptoms])
        shared = sorted(asked.intersection(WORD.findall(text.casefold())))
        if len(shared) >= ENOUGH and len(shared) * 3 >= len(asked) * 2:
            found.append((len(shared), Match(known, False, f"a guess, by the words {', '.join(shared)}")))
    best = max((count for count, _ in found), default=0)
    return [match for count, match in found if count == best][:MOST]


def why(failure: BaseException | str, target: str | Target | None = None) -> str:
    """Return the known failures that print this text, as text.

    For each failure it says what is affected, what flashlin does, what to do without flashlin, and how
    certain the failure and the match are.

    Args:
        failure: an exception, with its traceback and causes, or a text, such as one line, a whole log, or a
            question in plain words (``"why nan"``).
        target: the GPU and the Triton of the failure, as for ``doctor``: ``"T4,triton=3.2"``. None reads them
            from the text, and so does a target without Triton and torch for the Triton.

    Reads tables only: no GPU, no network, no import of torch or Triton. Raises TypeError for any other
        failure, and ValueError for an unknown target.
    """
    if not isinstance(failure, (BaseException, str)):
        raise TypeError(f"failure: got {type(failure).__name__}, need an exception or a text")
    reading = read_text(failure if isinstance(failure, str) else "".join(traceback.format_exception(failure)))
    return answer((reading if target is None else reading.on(target)).matches())


def as_json(found: list[Match]) -> str:
    """Return the matches that an answer describes as JSON: a list of objects with the fields of the text."""
    return json.dumps([{"id": match.failure.id, **match.fields()} for match in found[:SHOWN]], indent=1)


def answer(found: list[Match]) -> str:
    """Return the matches as text."""
    if not found:
        return unknown()
    sure = [match for match in found if match.sure]
    if found[0].because == ASKED:
        head = "This answers the question. A log of the program gives a more exact answer."
    elif not sure:
        head = "Not certain: the text alone does not identify it. Possible failures:"
    elif len(sure) == 1:
        head = "One known failure prints this."
    else:
        head = (f"{len(sure)} known failures print this, the most likely first. The GPU and the\n"
                "releases (where) decide which of them it can be.")
    rest = ", ".join(match.failure.id for match in found[SHOWN:])
    more = textwrap.fill(f"Less likely: {rest}", WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n\n".join([head, *map(str, found[:SHOWN]), *([more] if rest else [])])
