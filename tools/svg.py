"""Write SVG pictures that need few bytes and are readable on light and dark pages."""
from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

SIZE = 11  # font size of texts without another one, in pixels


def number(x: float) -> str:
    """Return a coordinate, rounded to a tenth of a pixel."""
    return f"{round(x, 1):g}"


def text(x: float, y: float, words: str, anchor: str = "start", size: int = SIZE) -> str:
    """Return a text element. anchor: SVG's ``text-anchor``."""
    where = f' text-anchor="{anchor}"' if anchor != "start" else ""
    where += f' font-size="{size}"' if size != SIZE else ""
    return f'<text x="{number(x)}" y="{number(y)}"{where}>{escape(words)}</text>'


def rect(x: float, y: float, wide: float, high: float, name: str) -> str:
    """Return a rectangle. name: its CSS class."""
    return (f'<rect x="{number(x)}" y="{number(y)}" width="{number(wide)}" height="{number(high)}" '
            f'class="{name}"/>')


def picture(wide: float, high: float, style: str, body: Sequence[str]) -> str:
    """Return a whole picture. style: a ``<style>`` element, which gives the class ``back`` a colour."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{number(wide)}" height="{number(high)}" '
        f'viewBox="0 0 {number(wide)} {number(high)}" font-family="sans-serif" font-size="{SIZE}">',
        style, f'<rect width="{number(wide)}" height="{number(high)}" class="back"/>', *body, "</svg>", ""])
