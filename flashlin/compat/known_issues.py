"""The table of known issues, KNOWN_ISSUES: failures of Triton, ptxas and kernels.

The file ``issues.cfg`` contains the table. A section describes one issue; its name is the id. Dispatch,
doctor, ``flashlin why``, docs/troubleshooting and the tests read the table. A section has these fields, of
which *cause*, *fix* and *proof* are required (``known.KnownIssue`` explains their meaning):

- since, fixed in: releases of Triton; *ptxas since*, *ptxas fixed in*: releases of ptxas
- capability: a range of NVIDIA's compute capabilities, such as ``7.0 before 8.0``. Each end may be left out
- amd: prefixes of AMD architectures, for issues on AMD
- traits, spared: names of traits (traits.py)
- warps, stages: the smallest numbers with which a launch fails
- prints: the texts that the issue prints, one in each line, with ``...`` for parts that vary
- seen in: a text that the traceback must also contain
- cause, fix: in words. Alternatives of a fix are separated by ", or "
- remedies: names of remedies, in the order in which planning tries them
- page: a page about the issue
- proof: the test, record or thread that shows the issue
- confidence: how well the proof shows it; a key of ``known.CONFIDENCE``

An issue is matched with the traits, warps and stages of a launch, and with the GPU, Triton and ptxas of its
target. It is never matched with the name of an op. An issue without remedies is reported by doctor and
changes no plan. An issue with a trait of TILE_FACTS rejects one tile of several. Its first remedy is then
``other_tile``, for which planning prints no message. Tuning comes before the launch, so no launch has the
trait ``autotuned``, and issues with it change no plan.
"""
from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from flashlin.compat.entries import Entry, entries
from flashlin.compat.known import END, PRE_VOLTA, KnownIssue
from flashlin.compat.target import Target
from flashlin.compat.traits import trait_set

REQUIRED = {"cause", "fix", "proof"}
OPTIONAL = {"since", "fixed in", "ptxas since", "ptxas fixed in", "capability", "amd", "traits", "spared",
            "warps", "stages", "prints", "seen in", "remedies", "page", "confidence"}


def _capability(text: str, other: tuple[int, int]) -> tuple[int, int]:
    major, _, minor = text.strip().partition(".")
    return (int(major), int(minor)) if major else other


def _issue(one: Entry) -> KnownIssue:
    low, _, high = one.said("capability").partition("before")
    return KnownIssue(
        id=one.id, effect=one.said("cause"), need=one.said("fix"), proof=one.said("proof"),
        confidence=one.said("confidence", "thread"), symptoms=one.lines("prints"), seen_in=one.said("seen in"),
        url=one.said("page"), since=one.of.get("since"), fixed_in=one.of.get("fixed in"),
        ptxas_since=one.of.get("ptxas since"), ptxas_fixed_in=one.of.get("ptxas fixed in"),
        capabilities=(_capability(low, PRE_VOLTA), _capability(high, END)), amd=one.names("amd"),
        traits=trait_set(*one.names("traits")), spared=trait_set(*one.names("spared")),
        min_warps=int(one.said("warps", "1")), min_stages=int(one.said("stages", "1")),
        remedies=one.names("remedies"))


KNOWN_ISSUES: tuple[KnownIssue, ...] = tuple(
    map(_issue, entries([Path(__file__).with_name("issues.cfg")], REQUIRED, OPTIONAL)))


@lru_cache(maxsize=64)
def issues_here(target: Target) -> tuple[KnownIssue, ...]:
    """Return the known issues that affect a target, in the order of the table."""
    return tuple(issue for issue in KNOWN_ISSUES if issue.here(target))
