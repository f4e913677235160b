"""The words in which pictures are drawn as SVG. Called by every picture of a page or of a paper.

Colours are classes: the page has their light and their dark values (document.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

WIDTH = 1060


def svg(height: float, parts: Iterable[str], label: str, width: float = WIDTH) -> str:
    box = f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(label, quote=True)}"'
    return f"<svg {box}>\n{chr(10).join(parts)}\n</svg>"


def text(x: float, y: float, said: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(said)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str, said: str = "", style: str = "") -> str:
    inside = f"<title>{escape(said)}</title>" if said else ""
    size = f'x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.3):.2f}" height="{height:.2f}"'
    return f'<rect {size} class="{kind}"{f" style={chr(34)}{style}{chr(34)}" if style else ""}>{inside}</rect>'


def line(x: float, y: float, to_x: float, to_y: float, kind: str, said: str = "") -> str:
    inside = f"<title>{escape(said)}</title>" if said else ""
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" class="{kind}">{inside}</line>'


def polyline(points: Iterable[tuple[float, float]], kind: str) -> str:
    return f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" class="{kind}"/>'


def legend(entries: Sequence[tuple[str, str]], left: float = 10.0) -> Iterator[str]:
    """Squares of these classes with their names, in a row at the top."""
    for kind, name in entries:
        yield rect(left, 4, 11, 11, kind)
        yield text(left + 15, 14, name, "soft small")
        left += 36 + 6.4 * len(name)
