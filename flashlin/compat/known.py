"""The record of a known failure. Three tables are made of it: ``known_issues`` (Triton, ptxas and kernels),
``known_flaws`` (other packages) and ``known_failures`` (everything else). ``flashlin why``, doctor, dispatch,
docs/TROUBLESHOOTING.md and the tests read these tables.
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from flashlin.compat.target import USUAL_CARD, Target
from flashlin.compat.versions import affected, between

PRE_VOLTA, END = (0, 0), (99, 0)  # bounds of compute capabilities
FLA = "https://github.com/fla-org/flash-linear-attention/issues/"
TRITON = "https://github.com/triton-lang/triton/issues/"
EVERYWHERE = "every card, every Triton"
ILLEGAL = "an illegal memory access was encountered"
CONFIDENCE = {"compiled": "compiled in our tests, where it fails so", "ran": "seen in our own runs",
              "thread": "from the thread; nobody here has run it", "documented": "documented"}


@dataclass(frozen=True, kw_only=True)
class Known:
    """A known failure.

    effect: what the user sees or gets. symptoms: what is printed, with ``...`` for what varies; none if
    nothing is printed. seen_in: what the traceback also has, if other programs may print the same. need: what
    takes it away. proof: the test, the record or the thread behind it; confidence: how sure that makes us, a
    key of CONFIDENCE. since, fixed_in: the affected releases, from .. to (excluded); None leaves a side open.
    general: many failures print the same; it is reported only if nothing narrower is found. cards: in words,
    where the failure occurs; handled: in words, what flashlin does about it. Both are for failures that no
    code looks for; the others derive them from their fields.
    """
    id: str
    effect: str
    need: str
    proof: str
    confidence: str = ""
    symptoms: tuple[str, ...] = ()
    seen_in: str = ""
    url: str = ""
    since: str | None = None
    fixed_in: str | None = None
    general: bool = False
    cards: str = EVERYWHERE
    handled: str = ""

    @property
    def what(self) -> str:
        """Return the effect with its subject."""
        return self.effect

    @property
    def where(self) -> str:
        """Return the cards, releases and packages that have it, in words."""
        return self.cards

    @property
    def otherwise(self) -> str:
        """Return what to do without flashlin: ``need`` without the ways that call a function of flashlin."""
        clauses = (", or ".join(way for way in clause.split(", or ") if not re.search(r"\bflashlin\.\w", way))
                   for clause in self.need.split("; "))
        return "; ".join(filter(None, clauses))

    @property
    def known(self) -> str:
        """Return in words how well it is known."""
        if self.confidence or self.proof.startswith("https:"):
            return CONFIDENCE[self.confidence or "thread"]
        return f"shown by {self.proof}" if self.proof.startswith(("tests/", "matrix/")) else self.proof

    @property
    def link(self) -> str:
        return self.url or (self.proof if self.proof.startswith("https:") else "")


@dataclass(frozen=True, kw_only=True)
class KnownIssue(Known):
    """A failure of Triton, ptxas or a kernel, which planning looks for in a launch. since, fixed_in: releases
    of Triton; ptxas_since, ptxas_fixed_in: releases of ptxas, where the assembler decides. capabilities:
    half-open range of (major, minor), by default every card of NVIDIA; amd: instead of it, prefixes of AMD's
    architectures. traits: all must be on the launch; spared: none of these may be. remedies: empty if no plan
    is changed."""
    confidence: str = "thread"
    ptxas_since: str | None = None
    ptxas_fixed_in: str | None = None
    capabilities: tuple[tuple[int, int], tuple[int, int]] = (PRE_VOLTA, END)
    amd: tuple[str, ...] = ()
    traits: frozenset[str] = frozenset()
    spared: frozenset[str] = frozenset()
    min_warps: int = 1
    min_stages: int = 1
    remedies: tuple[str, ...] = ()

    def here(self, target: Target) -> bool:
        """Return whether this machine is affected, whatever is launched."""
        low, high = self.capabilities
        card = (target.arch.startswith(self.amd) if self.amd
                else target.backend == "cuda" and low <= target.capability < high)
        return (card and affected(target.triton, self.since, self.fixed_in)
                and (self.ptxas_since is self.ptxas_fixed_in is None
                     or affected(target.ptxas, self.ptxas_since, self.ptxas_fixed_in)))

    @property
    def releases(self) -> str:
        """Return the releases of Triton, in words."""
        return between("Triton", self.since, self.fixed_in)

    @property
    def where(self) -> str:
        low, high = self.capabilities
        cards = ", ".join(f"{name} (sm{major}{minor})" for (major, minor), (name, _) in USUAL_CARD.items()
                          if low <= (major, minor) < high) or f"sm{low[0]}{low[1]}"
        words = (f"AMD's {', '.join(self.amd)}" if self.amd else
                 "any NVIDIA card" if (low, high) == (PRE_VOLTA, END) else
                 "cards before sm70" if low == PRE_VOLTA else cards, self.releases,
                 self.ptxas_since is self.ptxas_fixed_in is None or between("ptxas", self.ptxas_since,
                                                                            self.ptxas_fixed_in),
                 self.min_warps > 1 and f"{self.min_warps} warps or more",
                 bool(self.amd) and self.min_stages > 1 and f"{self.min_stages} stages or more")
        return "; ".join(word for word in words if isinstance(word, str))

    def hits(self, traits: frozenset[str], num_warps: int, num_stages: int) -> bool:
        """Return whether a launch with these facts triggers it."""
        return (self.traits <= traits and not self.spared & traits
                and num_warps >= self.min_warps and num_stages >= self.min_stages)


class Stack(NamedTuple):
    """The packages that are installed, loaded and patched here. versions: of each installed package or
    distribution, ``unknown`` if it states none. broken: packages whose import fails. gpu: whether there is
    one. issues: known issues of Triton that include it. models: by the name of a loaded modeling file of
    transformers, (kernel, implementation) of every function it is bound to, possibly none. patched: packages
    that flashlin is patched into."""
    versions: Mapping[str, str]
    broken: frozenset[str] = frozenset()
    gpu: bool = False
    issues: frozenset[str] = frozenset()
    models: Mapping[str, frozenset[tuple[str, str]]] = {}
    patched: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Flaw(Known):
    """A defect of another package, which doctor looks for in a Stack. since, fixed_in: releases of the
    package.

    always: True if every program is affected; if not, the effect says which calls are.
    mended_by: the packages whose ``flashlin.patch`` removes the defect, ``()`` if no function can.
    mended_from: the first release of the package in which the patch does so.
    beside: (package, fixed_in): these must also be installed, below that release. without: none of these may
    be. broken: one of these must be installed and fail to import. card: ``gpu``, ``no gpu``, the id of a
    known issue, or ``""`` for any machine. models: a modeling file of one of these must be loaded, and be
    bound, in one of ``kernels``, to one of ``bound``, as far as those are named.
    """
    package: str
    always: bool = False
    mended_by: tuple[str, ...] = ()
    mended_from: str | None = None
    beside: tuple[tuple[str, str | None], ...] = ()
    without: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    card: str = ""
    models: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    bound: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        return f"{self.package}: {self.effect}"

    @property
    def otherwise(self) -> str:
        return super().otherwise if self.mended_by else self.need

    def here(self, stack: Stack) -> bool:
        """Return whether it concerns what is installed on this machine, whatever is loaded."""
        versions = stack.versions
        return (affected(versions.get(self.package, ""), self.since, self.fixed_in)
                and all(affected(versions.get(name, ""), None, fixed) for name, fixed in self.beside)
                and not any(name in versions for name in self.without)
                and (not self.broken or not stack.broken.isdisjoint(self.broken))
                and (not self.card or self.card in stack.issues
                     or self.card == ("gpu" if stack.gpu else "no gpu")))

    @property
    def where(self) -> str:
        cards = {"": "any machine", "gpu": "with a GPU", "no gpu": "without a GPU"}
        words = (between(self.package, self.since, self.fixed_in),
                 *(between(name, None, fixed) for name, fixed in self.beside if fixed),
                 *(f"with {name}" for name, fixed in self.beside if not fixed),
                 *(f"without {name}" for name in self.without),
                 f"one of {', '.join(self.broken)} does not import" if self.broken else "",
                 f"models: {', '.join(self.models)}" if self.models else "",
                 cards.get(self.card, f"where {self.card} is"))
        return "; ".join(filter(None, words))

    def hits(self, stack: Stack) -> tuple[str, ...]:
        """Return the loaded models that it concerns, or the package itself; ``()`` if it does not concern
        this process."""
        if not self.here(stack):
            return ()
        if not self.models:
            return (self.package,)
        return tuple(name for name in self.models if name in stack.models and (
            not (self.kernels or self.bound) or any(
                (not self.kernels or kernel in self.kernels) and (not self.bound or whose in self.bound)
                for kernel, whose in stack.models[name])))

    def mended(self, stack: Stack) -> bool:
        """Return whether a patch that is in force takes it away."""
        return (not stack.patched.isdisjoint(self.mended_by)
                and (self.mended_from is None
                     or affected(stack.versions.get(self.package, ""), self.mended_from, None)))
