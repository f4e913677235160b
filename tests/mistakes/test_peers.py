"""What users of other tools type at a verb is answered in the verb's own words, with a line that works, or plainly."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.mistakes.peers_lines import faults, peer_options
from tests.mistakes.runner import Runner
from tests.mistakes.world import make_world

NUM_QUICK = 12  # in `make test`, in a folder without the files that the lines name


def test_some_options_of_other_tools_are_answered(tmp_path: Path) -> None:
    drawn = random.Random(3).sample([*peer_options()], NUM_QUICK)
    with Runner(tmp_path / "here") as run:
        wrong = {str(option): found for option in drawn if (found := faults(option, run))}
    assert not wrong


@pytest.mark.wide
def test_options_of_other_tools_are_answered(tmp_path: Path) -> None:
    with Runner(make_world(tmp_path / "world")) as run:
        wrong = {str(option): found for option in peer_options() if (found := faults(option, run))}
    assert not wrong
