"""Pictures of a report that are looked at: what is written in them can be read, in light and in dark."""

from __future__ import annotations

import re

import numpy as np
import pytest
from numpy.typing import NDArray

from lmtrain.cli.page.html_document import _DARK, _LIGHT
from lmtrain.cli.report.rank_timeline_and_memory_sections import Square, draw_squares
from lmtrain.layout import Coordinate


@pytest.mark.parametrize("colours", [_LIGHT, _DARK])
@pytest.mark.parametrize("kind", ["c1", "limit"])
def test_the_number_in_the_darkest_square_can_be_read(kind: str, colours: dict[str, str]) -> None:
    def shades(name: str) -> NDArray[np.float64]:
        return np.array([int(colours[name][at : at + 2], 16) for at in (1, 3, 5)]) / 255

    def bright(shade: NDArray[np.float64]) -> float:
        linear = np.where(shade <= 0.04045, shade / 12.92, ((shade + 0.055) / 1.055) ** 2.4)
        return float(linear @ (0.2126, 0.7152, 0.0722))

    ((_, share),) = re.findall(
        'class="(heat|heat hot)" style="fill-opacity:([^"]*)"',
        draw_squares([Square(Coordinate(0, 0, 0, 0), 1.0, kind == "limit", "1", "")], "x"),
    )
    square = float(share) * shades(kind) + (1 - float(share)) * shades("card")
    light, dark = sorted((bright(square), bright(shades("ink"))), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5  # what WCAG asks for text
