"""A limit on a page is that of the code: the comment behind a figure names the constant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.figures import COMMENT, constant, figures, problems
from tests.docs.pages import ROOT

PAGES = sorted([*ROOT.glob("*.md"), ROOT / "csrc/README.md", *(ROOT / "docs").rglob("*.md")])
YAML = "lmtrain/config/strict_yaml.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_figures_are_those_of_the_code(page: Path) -> None:
    assert not problems(page.read_text("utf-8"))


def test_many_figures_are_compared() -> None:
    assert sum(len(COMMENT.findall(page.read_text("utf-8"))) for page in PAGES) > 100


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("256 KiB and 10,000 values", [256 << 10, 10_000]),
        ("four million entries, a million pieces", [4e6, 1e6]),
        ("ten minutes, 30 s, 2 ms, once a second, 20 microseconds", [600, 30, 0.002, 1, 20e-6]),
        ("100 MB/s, 5 GB, 95%, 1e-5, a 64th", [100e6, 5e9, 0.95, 1e-5, 64]),
        ("half as long, a twentieth of it, twelve tasks, 333 and 334", [0.5, 0.05, 12, 333, 334]),
        ("a file of someone, rank_00003, step 1.", [1]),
    ],
)
def test_figures_are_read_as_they_are_written(text: str, numbers: list[float]) -> None:
    assert figures(text) == pytest.approx(numbers, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "path", "numbers"),
    [
        ("MAX_BYTES", YAML, [256 << 10]),
        ("SIDE_CHARS", "data_tools/corpus/copies/decontaminate.py", [200]),
        ("_SAMPLE_OFFSETS", "lmtrain/observe/spans/trace_span_recorder.py", [333, 334]),
        ("_STATE_MEMORY", "lmtrain/plan/run_estimates/checkpoint_size.py", [20 * (64 << 10)]),
        ("DataSettings.text_limit", "lmtrain/data/data_settings.py", [1 << 30]),
        ("_SHORT_WAIT_NS", "lmtrain/observe/spans/trace_span_recorder.py", [20e-6]),
    ],
)
def test_constants_are_read_without_imports(name: str, path: str, numbers: list[float]) -> None:
    assert constant(name, path) == pytest.approx(numbers, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"at most 1 MiB<!-- MAX_BYTES in {YAML} --> and", "has [1048576.0], and MAX_BYTES"),
        (f"256 KiB<!-- MAX_BYTES in {YAML} --> and much<!-- MAX_DEPTH in {YAML} -->", "'and much' has []"),
        (f"32 levels\n\nmore<!-- MAX_DEPTH in {YAML} -->", "'more' has []"),
        (f"32 levels<!-- MOST_LEVELS in {YAML} -->", "assigns no MOST_LEVELS"),
        ("32 levels<!-- MAX_DEPTH in lmtrain/config/yaml.py -->", "there is no lmtrain/config/yaml.py"),
        (f"32 levels\n<!-- MAX_DEPTH in {YAML} -->", "write FIGURE<!--"),
        ("32 levels<!-- MAX_DEPTH of lmtrain.config.strict_yaml -->", "write FIGURE<!--"),
    ],
)  # fmt: skip
def test_a_wrong_figure_or_comment_is_found(text: str, said: str) -> None:
    [problem] = problems(text)
    assert said in problem
