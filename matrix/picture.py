"""Draw the picture of the support status as SVG, for README.md and docs/support.

It has one bar for each GPU and Triton release. The bar shows how many ops have each status. The picture is readable on light and dark pages.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from xml.sax.saxutils import escape

from matrix.status import STATUSES, Status
from tools import svg

# Status -> its mark in docs/support, its color on light pages, and its color on dark pages.
COLOURS: dict[Status, tuple[str, str, str]] = {
    "ran": ("ran", "#00705a", "#3fc79a"), "compiled": ("compiled", "#6cc4a8", "#1d7a66"),
    "worked around": ("worked around", "#6fa8e8", "#2f6fb5"), "slow": ("compiled, slow", "#b98ae0", "#7d4fae"),
    "compiled only": ("compiled only", "#d9a5b8", "#8a4a64"), "torch path": ("torch", "#e8cf4a", "#8a7500"),
    "not run": ("not run", "#c9ced6", "#4a525c"), "refused": ("refused", "#f2a65a", "#b86200"),
    "FAILED": ("**FAILED**", "#b3171f", "#ff6b63")}
LEFT, TOP, WIDE, HIGH, GAP = 148, 62, 58, 16, 6  # margins, width, height and distance of bars, in pixels


def picture(said: Mapping[tuple[str, str, str], str], examples: Mapping[str, str]) -> str:
    """Return the picture as SVG text.

    said: (op, Triton release, GPU) -> mark of its status, in the order of the picture.
    examples: GPU architecture -> the name of a GPU with it.
    """
    bars: dict[tuple[str, str], Counter[str]] = {}
    for (_, triton, card), mark in said.items():
        bars.setdefault((triton, card), Counter())[mark] += 1
    tritons, cards = (list(dict.fromkeys(place[axis] for place in bars)) for axis in (0, 1))
    wide, high = LEFT + len(tritons) * (WIDE + GAP) + 8, TOP + len(cards) * (HIGH + GAP) + 4
    body = [svg.text(LEFT, 16, "How many of flashlin's ops run where, and how", size=13)]
    there = [one for one in reversed(STATUSES) if any(bar[COLOURS[one][0]] for bar in bars.values())]
    for at, one in enumerate(there):
        body += [svg.rect(LEFT + 110 * at, 25, 11, 11, name(one)), svg.text(LEFT + 110 * at + 15, 35, one)]
    body += [svg.text(LEFT + at * (WIDE + GAP), TOP - 8, name) for at, name in enumerate(tritons)]
    for row, card in enumerate(cards):
        y = TOP + row * (HIGH + GAP)
        body.append(svg.text(LEFT - 8, y + HIGH - 4, f"{examples.get(card, '')}  {card}", anchor="end"))
        for column, triton in enumerate(tritons):
            counts, x = bars.get((triton, card), Counter()), float(LEFT + column * (WIDE + GAP))
            told = ", ".join(f"{counts[COLOURS[one][0]]} {one}" for one in there if counts[COLOURS[one][0]])
            body.append(f"<g><title>{escape(f'{card}, Triton {triton}: {told}')}</title>")
            for one in there:
                part = WIDE * counts[COLOURS[one][0]] / max(1, counts.total())
                body += [svg.rect(x, y, part, HIGH, name(one))] if part else []
                x += part
            body.append("</g>")
    return svg.picture(wide, high, STYLE, body)


def name(status: Status) -> str:
    """Return the CSS class of a status."""
    return status.replace(" ", "-")


def _style(at: int, back: str, fore: str) -> str:
    fills = " ".join(f".{name(one)} {{ fill: {colours[at]} }}" for one, colours in COLOURS.items())
    return f".back {{ fill: {back} }} text {{ fill: {fore} }} {fills}"


STYLE = (f"<style>{_style(1, '#fff', '#1b1f24')}\n@media (prefers-color-scheme: dark) "
         f"{{ {_style(2, '#14171b', '#e4e8ec')} }}</style>")
