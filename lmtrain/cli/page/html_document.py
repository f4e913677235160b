"""HTML pages that need no other file, in light and dark colours: frame, style, facts, tables, and SVG pictures.

Functions escape the texts that they are given; `parts` are HTML already. Pictures are SVG whose colours are CSS
classes: the page defines the light and the dark values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from lmtrain.runtime.files.existing_output import Kind, begins_with, holds

Cells = Mapping[str, str]


class Picture(NamedTuple):
    """An SVG picture of a page, which can also be written to a file with this name."""

    name: str
    svg: str


Part = str | Picture

_GENERATOR = '<meta name="generator" content="lmtrain">'
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
_LONG_CELL_CHARS = 24  # a cell with more characters gets the class "long"
WIDTH = 1060  # of a picture, in pixels
NUM_COLOURS = 8  # r0 to r7, to tell runs and curves apart


def read_asset(name: str) -> str:
    """Return the text of a stylesheet or script of this folder."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _css_variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


def page_style() -> str:
    """Return the CSS text of an HTML page, for a light and a dark mode: the reader's browser decides, or a switch in
    the page (data-theme).
    """
    dark = _css_variables(_DARK)
    return (
        f":root {{ color-scheme: light dark; {_css_variables(_LIGHT)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{ {dark} }} }}\n"
        f":root[data-theme=dark] {{ color-scheme: dark; {dark} }}\n:root[data-theme=light] {{ color-scheme: light; }}\n"
        f"{read_asset('page.css')}{read_asset('picture.css')}"
    )


def build_page(title: str, parts: Iterable[Part], more_style: str = "") -> str:
    """Return a complete HTML document as text. `parts`, texts of HTML or Pictures, are its body in this order;
    `more_style` is CSS text added to that of `page_style`.
    """
    # because: on a narrow screen a picture scrolls within its frame, since shrunk to fit nobody could read it
    body = "\n".join(
        f'<div class="scroll picture">{part.svg}</div>' if isinstance(part, Picture) else part for part in parts
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{_GENERATOR}\n<meta name="viewport" '
        f'content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{page_style()}{more_style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


PAGE_FILE = Kind("a page that lmtrain wrote", holds(_GENERATOR))
SVG_FILE = Kind("an SVG picture", begins_with(b"<svg ", b"<?xml "))


def standalone_svg(svg: str) -> str:
    """Convert an SVG element made for an HTML page to the text of an SVG file that other programs can show: with its
    own style sheet, in the light colors.

    because: programs other than browsers do not support var(), so colours are written out; resvg does not resolve the
    system's default fonts, so two common fonts are named
    """
    style = re.sub(r"var\(--(\w+)\)", lambda colour: _LIGHT[colour[1]], read_asset("picture.css"))
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
        "\n", f"\n<style>{escape(style, quote=False)}</style>\n", 1
    )


def section_heading(title: str, introduction: str = "", anchor: str = "") -> str:
    id_attribute = f' id="{_html_id(anchor)}"' if anchor else ""
    return f"<h2{id_attribute}>{escape(title)}</h2>" + (soft_paragraph(introduction) if introduction else "")


def fact_list(lines: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in lines) + "</dl>"


def soft_paragraph(text: str) -> str:
    return f'<p class="soft">{escape(text)}</p>'


def json_element(data: str, name: str) -> str:
    """Return a script element that holds JSON `data` for programs; `name` becomes its HTML id."""
    return f'<script type="application/json" id="{_html_id(name)}">{data}</script>'


def _html_id(name: str) -> str:
    """Return a name as an HTML id, which may hold no space."""
    return escape(name.replace(" ", "-"), quote=True)


def script_element(name: str) -> str:
    """Return a script element with the content of a JavaScript file of this folder."""
    return f"<script>{read_asset(name)}</script>"


def html_table(rows: Sequence[Cells]) -> str:
    """Return an HTML table as text. Each row maps a column's title to the text of its cell; there is a column for each
    title that occurs in `rows`.

    A key that begins with `<` marks a column of left-aligned words, any other key a column of numbers.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    head = "".join(f"<th{_cell_class(column)}>{escape(column.lstrip('<'))}</th>" for column in columns)
    lines = [
        "".join(f"<td{_cell_class(column, cell := row.get(column, ''))}>{escape(cell)}</td>" for column in columns)
        for row in rows
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _cell_class(title: str, cell: str = "") -> str:
    if not title.startswith("<"):
        return ""
    return ' class="word long"' if len(cell) > _LONG_CELL_CHARS else ' class="word"'


def svg_element(height: float, parts: Iterable[str], label: str, width: float = WIDTH) -> str:
    box = f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(label, quote=True)}"'
    return f"<svg {box}>\n{chr(10).join(parts)}\n</svg>"


def svg_text(x: float, y: float, content: str, css_class: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css_class}" text-anchor="{anchor}">{escape(content)}</text>'


def svg_rect(
    x: float, y: float, width: float, height: float, css_class: str, tooltip: str = "", style: str = ""
) -> str:
    title = f"<title>{escape(tooltip)}</title>" if tooltip else ""
    size = f'x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.3):.2f}" height="{height:.2f}"'
    return f'<rect {size} class="{css_class}"{f" style={chr(34)}{style}{chr(34)}" if style else ""}>{title}</rect>'


def svg_line(x: float, y: float, to_x: float, to_y: float, css_class: str) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" class="{css_class}"></line>'


def svg_polyline(points: Iterable[tuple[float, float]], css_class: str) -> str:
    return f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" class="{css_class}"/>'


def svg_legend(entries: Sequence[tuple[str, str]], x: float = 10.0) -> Iterator[str]:
    """Yield SVG elements of a legend in one row at the top of a picture: a square and a name for each of `entries`,
    which are (CSS class of the square, name). `x` is the left edge in pixels.
    """
    for css_class, name in entries:
        yield svg_rect(x, 4, 11, 11, css_class)
        yield svg_text(x + 15, 14, name, "soft small")
        x += 36 + 6.4 * len(name)
