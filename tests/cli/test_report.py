"""`lmtrain report`: a page that needs no other, of whatever is left of a run; what it draws are its numbers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtrain.layout import Layout
from lmtrain.observe.history.read_metrics_columns import read_record
from lmtrain.observe.profile.kernel_times import TABLE_SUFFIX, Kernel, KernelTable, write_table
from lmtrain.observe.spans.span_file import COUNTER, COUNTER_AT, HEADER_BYTES, SPAN, Kind, span_file_name
from tests.benchmarks.report_page import write_run
from tests.cli.harness import lmtrain
from tests.marks import wide
from tests.unit.observe.timeline.made_up import Made

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
POINTS = re.compile(r'<polyline class="[^"]*" data-curve="(\d+)" data-from="(\d+)" data-kind="(\w+)" points="([^"]*)"')


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A long run in short: 8,000 rows, four restarts, and a traced step of eight ranks."""
    folder = tmp_path_factory.mktemp("reported") / "long"
    folder.mkdir()
    Made(layout=Layout(pp=2, dp_replicate=4), steps=(10, 11), slow={2: 1.4}).write(folder)
    write_run(folder, steps=80_000, every=10)
    profiled(folder, windows=1, ranks=1)
    return folder


def element(page: Path, name: str) -> dict[str, Any]:
    (data,) = re.findall(f'<script type="application/json" id="{name}">(.*?)</script>', page.read_text())
    found: dict[str, Any] = json.loads(data)
    return found


def figures(page: Path) -> dict[str, Any]:
    return element(page, "figures")


def profiled(folder: Path, windows: int, ranks: int) -> None:
    (folder / "profile").mkdir()
    for first in range(100, 100 + 100 * windows, 100):
        for rank in range(ranks):
            kernels = (Kernel("a product", "products", 0.2, 3),)
            table = KernelTable(first, first + 3, rank, "cpu", 0.5, {"products": 0.2, "copies": 0.1}, kernels)
            write_table(folder / "profile" / f"steps-{first:08d}-{first + 3:08d}.rank-{rank:05d}{TABLE_SUFFIX}", table)


def said(page: Path) -> str:
    return unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<(style|script).*?</\1>", " ", page.read_text(), flags=re.DOTALL)))


def test_a_page_that_needs_no_other_and_keeps_extremes(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.html"
    lmtrain("report", run, "--out", out, "--svg", tmp_path / "figures")
    text = out.read_text()
    assert not re.search(r"https?://|src=|@import|url\((?!#)", text)
    assert out.stat().st_size < 3_000_000
    data, record = figures(out), read_record(run / "metrics.jsonl")
    assert [figure["key"] for figure in data["figures"]] == [
        "loss", "eval/wiki/word_perplexity", "lr", "grad_norm", "tokens_per_s", "mfu", "memory_bytes", "data_wait_s",
    ]  # fmt: skip
    for figure in data["figures"]:
        curve = figure["curves"][0]
        if curve["dots"]:
            continue
        steps, values = record.column(figure["key"])
        worth = dict(zip(steps.tolist(), values.tolist(), strict=True))
        assert np.allclose(curve["value"], [worth[step] for step in curve["step"]], rtol=1e-6)
        assert np.allclose([min(curve["value"]), max(curve["value"])], [values.min(), values.max()], rtol=1e-6)
        assert len(curve["step"]) == len(curve["tokens"]) == len(curve["seconds"]) <= 3000
    assert {mark[1] for mark in data["marks"]} == {"save", "restart"}
    told = " ".join(said(out).split())
    assert re.search(r"learning rate \S+ .*model gpt.* batch [\d,]+ samples .*data .* layout .* optimizer adamw", told)
    assert "What happened" in told
    assert all(words in told for _, kind, *_, words in data["marks"] if kind == "restart")
    assert "The slowest is rank 2" in told
    assert "wikitext103" in said(out)
    drawn = {one.name: one.read_text() for one in (tmp_path / "figures").iterdir()}
    curves = {f"{figure['key'].replace('/', '_')}.svg" for figure in data["figures"]}
    assert set(drawn) == curves | {"memory.svg", "heat.svg", "timeline.svg", "layout.svg", "kernels_100-103_rank_0.svg"}
    assert len(drawn) == len(re.findall("<svg ", re.sub("<script>.*?</script>", "", text, flags=re.DOTALL)))
    for picture in drawn.values():
        assert picture.startswith('<svg xmlns="http://www.w3.org/2000/svg" ')
        assert "var(" not in picture  # because: only browsers know it


def test_every_id_of_a_page_is_one_elements(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "another one"
    Made(layout=Layout(pp=2), steps=(10, 11)).write(other)
    write_run(other, steps=2000, every=10)
    config = json.loads((other / "config.json").read_text())
    config["parallel"]["pp"] = 16
    (other / "config.json").write_text(json.dumps(config))
    profiled(other, windows=2, ranks=2)
    lmtrain("report", run, other, "--out", out := tmp_path / "ab.html")
    found = re.findall(r'<\w+ [^>]*?\bid="([^"]*)"', out.read_text())
    assert len(found) == len(set(found))
    assert {"trace-of-long", "trace-data-of-another-one", "layout-of-long", "kernels-of-another-one"} <= set(found)
    assert element(out, "trace-data-of-long")["step"] == 11


def test_memory_of_every_rank_is_drawn_where_the_rank_sits(run: Path, tmp_path: Path) -> None:
    lmtrain("report", run, "--out", out := tmp_path / "a.html")
    data, page = element(out, "memory-data"), unescape(out.read_text())
    assert data["peak_bytes"] == [(60 + rank // 64 + rank % 2) << 30 for rank in range(512)]
    assert "Rank 449 holds most, 68.0 GiB; rank 0 least, 60.0 GiB." in page
    assert len(re.findall(r"<title>rank \d+: [\d.]+ GiB, [\d.]+% of the fullest</title>", page)) == 512
    other = tmp_path / "other"  # a start that has told nothing yet, and one of another layout
    write_run(other, steps=2000, every=10)
    with open(other / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"event": "start", "step": 2000, "attempt": 9}\n')
        file.flush()
        lmtrain("report", other)
        assert "Memory of each rank" not in said(other / "report.html")
        for peaks in ([1, 2], ["a"] * 512, [0] * 512, 7):
            file.write(json.dumps({"event": "memory", "step": 2010, "attempt": 9, "peak_bytes": peaks}) + "\n")
            file.flush()
            lmtrain("report", other)
            assert "Memory of each rank" not in said(other / "report.html")


def test_what_a_page_leaves_out_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Made(layout=Layout(pp=2, dp_replicate=4), steps=(10, 11)).write(tmp_path)
    write_run(tmp_path, steps=2000, every=10)
    profiled(tmp_path, windows=2, ranks=3)
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as file:
        for task in range(13):
            row = {"event": "eval", "step": 2000, "name": f"task{task}", "headline": "accuracy"}
            file.write(json.dumps(row | {"measures": {"accuracy": 0.5}}) + "\n")
    monkeypatch.setattr("lmtrain.cli.report.rank_timeline_and_memory_sections._MAX_BARS", 20)
    monkeypatch.setattr("lmtrain.cli.report.rank_timeline_and_memory_sections._MAX_DRAWN_RANKS", 100)
    monkeypatch.setattr("lmtrain.cli.report.rank_timeline_and_memory_sections._MAX_TABLE_ROWS", 3)
    lmtrain("report", tmp_path)
    text = said(page := tmp_path / "report.html")
    bars = element(page, "trace-data")["bars"]
    assert len(bars) <= 20
    assert re.search(rf"Shown: 2 of 8 ranks and the longest {len(bars)} of their \d\d+ bars;", text)
    assert "Shown: 4 of 6 profiles" in text
    assert [*map(int, re.findall(r"Steps (\d00) to \d03, rank", text))] == [200, 200, 200, 100]
    assert [*map(int, re.findall(r"Steps \d00 to \d03, rank (\d)", text))] == [0, 1, 2, 0]
    assert "The first 12 of 14 tasks have a figure" in text
    assert sum(figure["key"].startswith("eval/") for figure in figures(page)["figures"]) == 12
    assert "Not drawn: 512 ranks are more than the 100" in text
    assert "Shown: the first 3 of 8 rows" in text


@pytest.mark.parametrize("scaled", [True, *wide(False)])
def test_overflows_of_fp16_are_skips_and_no_faults(tmp_path: Path, scaled: bool) -> None:
    write_run(tmp_path, steps=2000, every=10)
    path = tmp_path / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [row for row in rows if row["event"] == "step"]
    for number, row in enumerate(steps):
        row |= {"loss_scale": 2.0**15, "skipped": number // 100} if scaled else {}
        row["grad_norm"] = "inf" if number == 100 else row["grad_norm"]
    steps[150]["loss"] = "nan"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lmtrain("report", tmp_path)
    data = figures(tmp_path / "report.html")
    faults = [mark[5] for mark in data["marks"] if mark[1] == "fault"]
    assert faults == ["grad_norm was inf at step 1,010"] * (not scaled) + ["loss was nan at step 1,510"]
    assert ("skipped" in {figure["key"] for figure in data["figures"]}) == scaled


@pytest.mark.wide
def test_sources_of_a_blend_have_a_chart_and_a_table(tmp_path: Path) -> None:
    folder = tmp_path / "blended"
    folder.mkdir()
    rows: list[dict[str, Any]] = [
        {"event": "step", "step": step, "attempt": 1, "loss": 4.0, "tokens": 96 * step, "sources": {
            "wiki": {"loss": 5.0 - step, "labels": 64, "tokens": 64 * step, "epochs": 0.25 * step},
            "code": {"labels": 0, "tokens": 32 * step, "epochs": 0.125 * step},
        }}
        for step in (1, 2)
    ]  # fmt: skip
    rows.append({"event": "valid", "step": 2, "attempt": 1, "loss": 4.0, "domains": {"code": {"loss": 4.25}}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = tmp_path / "page.html"
    lmtrain("report", folder, "--output", page)
    (figure,) = (figure for figure in figures(page)["figures"] if figure["title"] == "Training loss by source")
    assert [(curve["name"], curve["value"]) for curve in figure["curves"]] == [("wiki", [4.0, 3.0])]
    words = said(page).split("Sources", 1)[1].split()
    start = words.index("wiki")
    assert words[start : start + 10] == ["wiki", "3.0000", "-", "128", "0.5", "code", "-", "4.2500", "64", "0.25"]
    plotted = lmtrain("runs", "plot", folder, "--key", "tokens/wiki")
    assert "tokens/wiki" in plotted


def test_two_runs_and_what_differs(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "b<script>alert(1)<"
    write_run(tmp_path / "b", steps=2000, every=10)
    (tmp_path / "b").rename(other)
    config = json.loads((other / "config.json").read_text())
    config["optim"]["lr"] = "</script><script>alert(2)</script>"
    (other / "config.json").write_text(json.dumps(config))
    lmtrain("report", run, other, "--out", out := tmp_path / "ab.html")
    assert "<script>alert" not in out.read_text()
    assert "settings differ" in said(out)
    assert "optim.lr" in said(out)
    assert "<details><summary>Time and memory of long</summary>" in out.read_text()
    data = figures(out)
    assert data["runs"] == ["long", other.name]
    assert {curve["run"] for curve in data["figures"][0]["curves"]} == {0, 1}


def test_what_is_left_of_damaged_runs(run: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    write_run(bad, steps=2000, every=10)
    (bad / "config.json").unlink()
    (bad / "environment.json").write_text('{"python": ')
    with open(bad / "metrics.jsonl", "ab") as file:
        file.write(
            b'strange\n{"event": "eval", "step": 3, "measures": 7}\n{"event": "step", "step": 4000, "loss": "nan"}\n'
        )
        file.write(b'{"event": "save", "step": 9}\n{"event": "valid", "step": 9, "domains": []}\n{"event": "step", "st')
    told = lmtrain("report", bad)
    assert "4 things are missing, and it says which" in told
    text = said(bad / "report.html")
    for words in ("config.json is not there", "environment.json cannot be read", "are no rows and are left out",
                  "its last line is incomplete"):  # fmt: skip
        assert words in text
    assert [mark[1] for mark in figures(bad / "report.html")["marks"]].count("fault") == 1
    (bad / "metrics.jsonl").unlink()
    (bad / "log.txt").touch()
    assert "neither metrics.jsonl nor config.json" in lmtrain("report", bad, code=66)
    (bad / "config.json").write_text("[]")
    lmtrain("report", bad)
    assert "No number has been recorded yet" in said(bad / "report.html")
    assert "metrics.jsonl is not there" in said(bad / "report.html")
    assert "does not exist. Create it" in lmtrain("report", run, "--out", tmp_path / "no" / "a.html", code=73)


@pytest.mark.parametrize("changed", [{"window_s": "x"}, {"first_step": None}, {"classes": []}, {"kernels": 3}])
def test_a_damaged_table_of_kernels_costs_the_page_nothing_else(changed: dict[str, Any], tmp_path: Path) -> None:
    write_run(tmp_path, steps=2000, every=10)
    profiled(tmp_path, windows=1, ranks=1)
    (table,) = (tmp_path / "profile").iterdir()
    table.write_text(json.dumps(json.loads(table.read_text()) | changed))
    lmtrain("report", tmp_path)
    assert "They cannot be read" in (text := said(tmp_path / "report.html"))
    assert "Layout" in text


def test_a_run_that_is_named_twice_is_one_run(tmp_path: Path) -> None:
    write_run(run := tmp_path / "run", steps=2000, every=10)
    (tmp_path / "link").symlink_to(run)
    lmtrain("report", run, tmp_path / "link", tmp_path / "link" / ".." / "run", "--out", out := tmp_path / "a.html")
    assert figures(out)["runs"] == ["run"]


@pytest.mark.parametrize("place", ["a file", "a file/inside"])
def test_a_folder_for_pictures_that_cannot_be_made_costs_nothing(place: str, tmp_path: Path) -> None:
    write_run(run := tmp_path / "run", steps=2000, every=10)
    (tmp_path / "a file").write_text("kept")
    told = lmtrain("report", run, "--svg", tmp_path / place, code=73)
    assert "Choose an output that you may write" in told
    assert not (run / "report.html").exists()
    assert (tmp_path / "a file").read_text() == "kept"


def test_a_traced_step_is_a_usual_one(tmp_path: Path) -> None:
    Made(layout=Layout(dp_shard=2), steps=tuple(range(10, 18)), num_microbatches=2).write(tmp_path)
    write_run(tmp_path, steps=2000, every=10)

    def measure(*steps: int) -> str:
        file = tmp_path / "trace" / span_file_name(0, 0)
        spans = np.memmap(file, SPAN, "r+", HEADER_BYTES)
        spans["kind"][(spans["kind"] == Kind.DATA) & np.isin(spans["step"], steps)] = Kind.VALIDATION
        spans.flush()
        lmtrain("report", tmp_path)
        return said(tmp_path / "report.html")

    text = measure(15, 17)
    assert "steps 12, 13, 14, 16:" in text
    assert "Steps that save or measure are left out." in text
    assert "What ran when in step 16" in text
    text = measure(*range(10, 18))  # where there is no other, they are shown
    assert "steps 14, 15, 16, 17:" in text
    assert "are left out." not in text


def test_a_rank_without_a_whole_step_costs_the_page_nothing_else(tmp_path: Path) -> None:
    Made(layout=Layout(pp=2, dp_replicate=2), steps=(10, 11)).write(tmp_path)
    write_run(tmp_path, steps=2000, every=10)
    spans = tmp_path / "trace" / "rank-00003.spans"
    data = bytearray(spans.read_bytes())
    COUNTER.pack_into(data, COUNTER_AT, 0)
    spans.write_bytes(data)
    lmtrain("report", tmp_path)
    page = tmp_path / "report.html"
    assert "rank 3 on node1: -, no whole step was recorded" in unescape(page.read_text())
    assert "What ran when in step 11" in said(page)
    heat = element(page, "trace-data")["heat"]
    assert [one[3] is None for one in heat] == [False, False, False, True]


SCRIPT = """<script>addEventListener("load", () => {
  const found = {}, svg = document.querySelector("figure[data-key=loss] svg");
  const ticks = () => [...svg.querySelectorAll(".x-tick")].map((one) => one.textContent);
  const key = (name) => document.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true }));
  const point = (kind, share) => { const box = svg.getBoundingClientRect();
    svg.dispatchEvent(new PointerEvent(kind, { clientX: box.left + box.width * share, clientY: box.top + 100,
      button: 0, pointerId: 1, bubbles: true })); };
  const look = (name) => (found[name] = { ticks: ticks(), ...svg.dataset });
  look("all");
  point("pointermove", 0.5); found.said = document.querySelector("figure[data-key=loss] .said").textContent;
  point("pointerdown", 0.5); point("pointermove", 0.6); point("pointerup", 0.6); look("dragged");
  key("ArrowRight"); look("moved"); key("+"); look("nearer"); key("0"); look("reset");
  key("x"); look("steps"); key("k"); look("log"); key("k"); key("x"); look("time"); key("t");
  found.theme = document.documentElement.dataset.theme; key("x"); key("s"); look("end");
  if (location.hash === "#zoom") { point("pointerdown", 0.3); point("pointerup", 0.31); }
  const told = { id: "found", textContent: JSON.stringify(found) };
  document.body.append(Object.assign(document.createElement("pre"), told));
});</script>"""


NO_RUN = """<script>addEventListener("load", () => {
  const key = (name) => document.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true }));
  const svg = () => document.querySelector("figure[data-key=loss] svg").outerHTML, found = {};
  found.dots = document.querySelectorAll("figure[data-key=loss] circle").length;
  key("+");
  document.querySelectorAll("#tools button[title^='show or hide']").forEach((one) => one.click());
  for (const name of "xkl+-x0k") key(name), (found[name] = svg());
  const told = { id: "found", textContent: JSON.stringify(found) };
  document.body.append(Object.assign(document.createElement("pre"), told));
});</script>"""


def browsed(page: Path, profile: Path, mark: str = "", script: str = SCRIPT) -> tuple[str, dict[str, Any]]:
    """The page's DOM after a reader has zoomed, moved and pressed keys, and what was seen on the way."""
    assert BROWSER is not None
    driven = page.with_suffix(".driven.html")
    driven.write_text(page.read_text().replace("</body>", f"{script}</body>"))
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
         "--window-size=1280,2000",
         "--virtual-time-budget=4000", "--enable-logging=stderr", "--dump-dom", f"file://{driven}{mark}"],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    errors = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not errors, "\n".join(errors)
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout)
    return done.stdout, json.loads(unescape(found))


@pytest.mark.wide
@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
@pytest.mark.parametrize("mark", ["", "#zoom"])
def test_what_a_browser_draws_are_the_numbers_of_the_page(run: Path, tmp_path: Path, mark: str) -> None:
    lmtrain("report", run, "--out", out := tmp_path / "a.html")
    dom, found = browsed(out, tmp_path / "profile", mark)
    assert found["dragged"]["ticks"] != found["all"]["ticks"] == found["reset"]["ticks"]
    width = {
        name: float(found[name]["x1"]) - float(found[name]["x0"]) for name in ("all", "dragged", "nearer", "moved")
    }
    assert width["dragged"] / width["all"] == pytest.approx(0.1, abs=0.02)
    assert width["nearer"] / width["moved"] == pytest.approx(0.5)
    assert float(found["moved"]["x0"]) > float(found["dragged"]["x0"])
    assert [found[name]["axis"] for name in ("all", "steps", "time", "end")] == ["tokens", "step", "seconds", "tokens"]
    assert (found["log"]["logx"], found["theme"]) == ("true", "dark")
    assert found["said"].startswith("training ")
    assert len(check_drawn(dom, figures(out))) == 8


@pytest.mark.wide
@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
def test_a_browser_shows_runs_of_one_step_and_none(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, steps=200, every=200)
    lmtrain("report", tmp_path / "a", tmp_path / "b", "--out", out := tmp_path / "ab.html")
    assert [len(curve["step"]) for curve in figures(out)["figures"][0]["curves"]] == [1, 1, 1, 1]
    _, found = browsed(out, tmp_path / "profile", script=NO_RUN)
    assert found.pop("dots") == 4  # because: a line of one point is not seen
    for drawn in found.values():
        assert not re.search("NaN|Infinity", drawn)


def check_drawn(dom: str, data: dict[str, Any]) -> list[str]:
    """Every line of every figure against its JSON, by the axes that the figure says it has."""
    checked = []
    for key, inside in re.findall(r'<figure [^>]*data-key="([^"]*)"[^>]*>(.*?)</figure>', dom, re.DOTALL):
        (figure,) = [one for one in data["figures"] if one["key"] == key]
        at = dict(re.findall(r'data-(\w+)="([^"]*)"', re.findall(r"<svg [^>]*>", inside)[0]))
        x0, x1, y0, y1, left, right, top, bottom = (
            float(at[name]) for name in ("x0", "x1", "y0", "y1", "left", "right", "top", "bottom")
        )
        lines = POINTS.findall(inside)
        assert {int(number) for number, *_ in lines} == set(range(len(figure["curves"])))
        for number, begin, kind, points in lines:
            if kind == "smooth":
                continue
            curve = figure["curves"][int(number)]
            drawn = np.array([[float(value) for value in point.split(",")] for point in points.split()])
            some = slice(int(begin), int(begin) + len(drawn))
            xs, ys = (np.array(curve[name][some], float) for name in (at["axis"], "value"))
            up = np.log(ys / y0) / np.log(y1 / y0) if at["logy"] == "true" else (ys - y0) / (y1 - y0)
            assert np.allclose(drawn[:, 0], left + (xs - x0) / (x1 - x0) * (right - left), atol=0.011)
            assert np.allclose(drawn[:, 1], bottom - up * (bottom - top), atol=0.011)
            inside_ = [value for value in curve[at["axis"]] if x0 <= value <= x1]
            assert len(drawn) >= len(inside_)
        checked.append(key)
    return checked
