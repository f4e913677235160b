"""Each machine's file is read, and names the sources of its figures."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.plan.cases import CONF
from tests.unit.plan.machines import read_hardware

FILES = sorted(CONF.glob("*.yaml"))
COUNTS = {"one": 1, "two": 2, "four": 4, "six": 6, "eight": 8, "twelve": 12, "eighteen": 18, "72": 72}
# a figure and the parts that its source counts: "450  # eighteen NVLink 4 of 25 GB/s", "25  # one 200 Gb/s adapter"
PARTS = re.compile(r"_GBps: (\S+)  # .*\b(\w+) (?:NVLink \d|adapters|Omni-Path) of (\d+) G(.)/s")
ADAPTERS = re.compile(r"_GBps: (\S+)  # .*\b(\w+) (\d+) G(.)/s adapters?")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_machine_is_whole(path: Path) -> None:
    machine = read_hardware(path)
    assert max(machine.peak_tflops.values()) > 0
    assert machine.link_GBps * machine.gpus_per_node >= machine.nic_GBps or machine.unchecked
    for line in path.read_text().splitlines()[1:]:
        key = line.split(":")[0]
        nameless = key.startswith(" ") or key in ("generation", "unchecked", "network")
        assert nameless or "#" in line, f"{path.name}: {key} names no source"


def test_links_and_adapters_add_up_to_the_figure_beside_them() -> None:
    """Bytes and not bits, and one way of a link, as its source counts them."""
    lines = [line for path in FILES for line in path.read_text().splitlines()]
    found = [match.groups() for line in lines if (match := PARTS.search(line) or ADAPTERS.search(line))]
    assert len(found) > 20
    for figure, count, each, unit in found:
        assert float(figure) == COUNTS[count] * float(each) / (8 if unit == "b" else 1), (count, each)


def test_a_dgx_is_the_h100_that_stands_in_it() -> None:
    assert replace(read_hardware(CONF / "h100_dgx.yaml"), name="h100") == read_hardware(CONF / "h100.yaml")


def test_what_nobody_measured_is_marked() -> None:
    unchecked = {path.stem for path in FILES if read_hardware(path).unchecked}
    assert {"l40s", "h100_pcie"} <= unchecked


def test_an_unknown_fact_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text((CONF / "h100.yaml").read_text() + "colour: green\n")
    with pytest.raises(ValueError, match="colour"):
        read_hardware(path)
