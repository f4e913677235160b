"""A page of HTML that needs no other file, in light and in dark: its frame, looks, facts and tables; and its pictures.

Called by whoever writes a page or draws a picture. Texts come as they are and are escaped here; `parts` are HTML
already. Pictures are SVG, whose colours are classes: the page has their light and their dark values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

Cells = Mapping[str, str]


class Picture(NamedTuple):
    """A part of a page that can be a file of this name too, for a paper."""

    name: str
    drawn: str  # as SVG


Part = str | Picture

_LIGHT = {
    "ink": "#1c2430", "soft": "#5d6776", "paper": "#ffffff", "card": "#ffffff", "line": "#d9dee6", "shade": "#eef0f3",
    "fits": "#2f6fb5", "best": "#12805c", "unfit": "#eef0f3", "idle": "#eef0f3", "limit": "#c22f2f",
    "band": "#2f6fb533", "plain": "#b3650b", "c1": "#2f6fb5", "c2": "#6aa5dd", "c3": "#a9cbea", "c4": "#12805c",
    "c5": "#66b894", "c6": "#d9a514", "c7": "#8d62b8", "c8": "#8b95a3", "c9": "#c3c9d2", "c10": "#d6e6f5",
    "c11": "#c46f9f",
    "r0": "#2f6fb5", "r1": "#c05f0a", "r2": "#12805c", "r3": "#8d4fc0", "r4": "#b8325e", "r5": "#0b8599",
    "r6": "#8a6d00", "r7": "#55606f",
}  # fmt: skip
_DARK = _LIGHT | {
    "ink": "#e7ebf1", "soft": "#9aa5b5", "paper": "#14181e", "card": "#191e25", "line": "#303844", "shade": "#232a33",
    "fits": "#5b9be0", "best": "#35b98a", "unfit": "#20262e", "idle": "#20262e", "limit": "#ff7066",
    "band": "#5b9be033", "plain": "#e59a45", "c1": "#5b9be0", "c2": "#3c6ea6", "c3": "#2f5d90", "c4": "#35b98a",
    "c5": "#237a5c", "c6": "#d9b13b", "c7": "#a884d0", "c8": "#76818f", "c9": "#4a5360", "c10": "#274a70",
    "c11": "#d58ab3",
    "r0": "#6aaaf0", "r1": "#f0a04b", "r2": "#45c795", "r3": "#bb94ec", "r4": "#f07a9c", "r5": "#4cc3d6",
    "r6": "#d9b13b", "r7": "#a3afbf",
}  # fmt: skip
_LONG = 24  # characters of a cell
WIDTH = 1060  # of a picture
NUM_COLOURS = 8  # r0 to r7, to tell runs and curves apart


def style(name: str) -> str:
    """Return the text of a stylesheet or script of this folder."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _values(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


def looks() -> str:
    """Colours as the reader's system has them, or as the page's switch says, and the style of all parts."""
    dark = _values(_DARK)
    return (
        f":root {{ color-scheme: light dark; {_values(_LIGHT)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{ {dark} }} }}\n"
        f":root[data-theme=dark] {{ color-scheme: dark; {dark} }}\n:root[data-theme=light] {{ color-scheme: light; }}\n"
        f"{style('page.css')}{style('picture.css')}"
    )


def document(title: str, parts: Iterable[Part], more_style: str = "") -> str:
    # because: on a narrow screen a picture is moved within its frame: made as narrow, nobody could read it
    body = "\n".join(
        f'<div class="scroll picture">{part.drawn}</div>' if isinstance(part, Picture) else part for part in parts
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" '
        f'content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{looks()}{more_style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def for_a_paper(drawn: str) -> str:
    """Return a picture as an SVG file of its own, on white.

    because: what is no browser knows no var(), so colours stand in it themselves; nor does resvg know fonts of
    the system's choice, so two that most systems have are named
    """
    looks = re.sub(r"var\(--(\w+)\)", lambda colour: _LIGHT[colour[1]], style("picture.css"))
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
        "\n", f"\n<style>{escape(looks, quote=False)}</style>\n", 1
    )


def section(title: str, said: str = "", name: str = "") -> str:
    at = f' id="{_id(name)}"' if name else ""
    return f"<h2{at}>{escape(title)}</h2>" + (paragraph(said) if said else "")


def facts(lines: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in lines) + "</dl>"


def paragraph(said: str) -> str:
    return f'<p class="soft">{escape(said)}</p>'


def data_element(data: str, name: str) -> str:
    """Numbers for programs, as JSON in an element of this id."""
    return f'<script type="application/json" id="{_id(name)}">{data}</script>'


def _id(name: str) -> str:
    """Return a name as an HTML id, which may hold no space."""
    return escape(name.replace(" ", "-"), quote=True)


def script(name: str) -> str:
    """Return a script element with a file of this folder."""
    return f"<script>{style(name)}</script>"


def table(rows: Sequence[Cells]) -> str:
    """Return an HTML table with a column for each key; keys that begin with `<` hold words, others numbers."""
    titles = list(dict.fromkeys(title for row in rows for title in row))
    head = "".join(f"<th{_kind(title)}>{escape(title.lstrip('<'))}</th>" for title in titles)
    lines = [
        "".join(f"<td{_kind(title, said := row.get(title, ''))}>{escape(said)}</td>" for title in titles)
        for row in rows
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _kind(title: str, said: str = "") -> str:
    if not title.startswith("<"):
        return ""
    return ' class="word long"' if len(said) > _LONG else ' class="word"'


def svg(height: float, parts: Iterable[str], label: str, width: float = WIDTH) -> str:
    box = f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(label, quote=True)}"'
    return f"<svg {box}>\n{chr(10).join(parts)}\n</svg>"


def text(x: float, y: float, said: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(said)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str, said: str = "", style: str = "") -> str:
    inside = f"<title>{escape(said)}</title>" if said else ""
    size = f'x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.3):.2f}" height="{height:.2f}"'
    return f'<rect {size} class="{kind}"{f" style={chr(34)}{style}{chr(34)}" if style else ""}>{inside}</rect>'


def line(x: float, y: float, to_x: float, to_y: float, kind: str) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" class="{kind}"></line>'


def polyline(points: Iterable[tuple[float, float]], kind: str) -> str:
    return f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" class="{kind}"/>'


def legend(entries: Sequence[tuple[str, str]], left: float = 10.0) -> Iterator[str]:
    """Squares of these classes with their names, in a row at the top."""
    for kind, name in entries:
        yield rect(left, 4, 11, 11, kind)
        yield text(left + 15, 14, name, "soft small")
        left += 36 + 6.4 * len(name)
