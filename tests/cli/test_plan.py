"""`lmtrain plan` as a user sees it: the table, JSON, the page, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.cli.harness import lmtrain, outcome
from tests.marks import wide

SMALL = ("plan", "model=gpt2_small", "hardware=h100", "gpus=8", "train.global_batch=64", "--doublings", "0")
SHARED = (
    "hardware=h100", "gpus=16", "train.global_batch=64", "parallel.zero=3", "parallel.pp=1", "parallel.tp=1",
    "parallel.dp_replicate=1",
)  # fmt: skip
FEW = (*SMALL, "recompute=none", "parallel.balance=layers", "parallel.vp=1")


@cache
def facts_of(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lmtrain(*FEW, "--json", *words))
    return found


@pytest.mark.parametrize("width", [72, 80, pytest.param(120, marks=pytest.mark.wide)])
def test_the_table_fits_its_terminal_and_names_the_best(width: int) -> None:
    shown = lmtrain(*FEW, "tokens=10B", "--price", "2", "parallel.pp=2", env={"COLUMNS": str(width)})
    assert (" slower" in shown.partition("the best")[0]) == (width >= 80)
    table = [line for line in shown.splitlines() if re.match(r" ?\d+ +2 ", line)]
    assert len(table) == 10
    assert max(map(len, table)) <= width
    assert all(re.search(r"[0-9]m?s±\d+%|[0-9]m?s-[0-9.]+m?s", line) for line in table)
    assert "…" not in shown
    for said in ("four runs of five", "J/token", "unverified", "10B in", "$", "pipeline: ", "2 is "):
        assert said in shown
    assert ("tok/s/GPU" in shown) == (width == 120)


@pytest.mark.parametrize("width", [80, pytest.param(120, marks=pytest.mark.wide)])
def test_the_curve_fits_its_terminal_with_an_interval_for_each_time(width: int) -> None:
    shown = lmtrain(*FEW[:5], *FEW[7:], "parallel.zero=3", env={"COLUMNS": str(width)})
    lines = shown.partition("with more GPUs\n")[2].splitlines()[1:3]
    assert [line.split()[0] for line in lines] == ["8", "16"]
    assert all(re.search(r"[0-9]m?s±\d+%", line) and len(line) <= width for line in lines)


def test_layouts_are_ranked_and_each_has_its_figures() -> None:
    facts = facts_of("tokens=10B", "--top", "5")
    steps = [one["step_s"] for one in facts["best"]]
    assert len(steps) == 5
    assert steps == sorted(steps)
    assert facts["layouts"]["legal"] > facts["layouts"]["priced"] >= facts["layouts"]["fitting"] > 0
    for one in facts["best"]:
        assert 0 < one["mfu"] < 1
        assert 0 <= one["bubble"] < 1
        assert 0 <= one["exposed_communication"] < 1
        assert one["held_bytes"] <= 0.92 * one["room_bytes"]
        low, high = one["step_s_80_percent"]
        assert low < one["step_s"] < high
    first, second = facts["best"][:2]
    assert first["why_slower"] is None
    assert "s" in second["why_slower"]
    assert first["duration_s"][0] == pytest.approx(10e9 / first["tokens_per_s"])


def test_a_dollar_price_is_of_all_gpus_for_the_whole_run() -> None:
    first = facts_of("tokens=10B", "--price", "3")["best"][0]
    assert first["dollars"][0] == pytest.approx(first["duration_s"][0] / 3600 * 8 * 3)


def test_one_layout_is_priced_as_it_stands() -> None:
    facts = json.loads(
        lmtrain(*SMALL, "--layout", "tp=2,pp=2,zero=1", "recompute=full", "train.micro_batch=4", "--json")
    )
    assert [one["parallel"]["dp_shard"] for one in facts["best"]] == [2]
    assert facts["best"][0]["micro_batch"] == 4
    assert facts["best"][0]["recompute"] == "full"
    assert facts["layouts"] == {"legal": 1, "priced": 1, "fitting": 1}


def _printed(*words: str) -> tuple[str, ...]:
    line = next(line for line in lmtrain(*words).splitlines() if line.startswith("settings "))
    return tuple(line.split()[1:])


@pytest.mark.wide
def test_the_words_it_prints_make_the_run_it_priced() -> None:
    words = _printed(*FEW)
    config = json.loads(lmtrain("pretrain", "model=gpt2_small", "data.path=x", *words, "--print-config", "--json"))
    best = facts_of()["best"][0]
    assert {key: config["parallel"][key] for key in best["parallel"]} == best["parallel"]
    assert config["train"]["global_batch"] == 64


@pytest.mark.parametrize("source", ["recipe", *wide("root")])
def test_they_overrule_the_layout_that_a_config_has(tmp_path: Path, source: str) -> None:
    words = ["model=gpt2_small", "hardware=h100", "train.global_batch=64", "--config-dir", str(tmp_path)]
    layout = "parallel:\n  tp: 2\n  dp_replicate: 4\n  sequence_parallel: false\n"
    if source == "recipe":
        (tmp_path / "experiment").mkdir()
        (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{layout}", encoding="utf-8")
        words.append("experiment=mine")
    else:
        root = Path("conf/pretrain.yaml").read_text(encoding="utf-8")
        (tmp_path / "mine.yaml").write_text(f"{root}\n{layout}", encoding="utf-8")
        words += ["--config-name", "mine"]
    given = ("recompute=full", "recompute.blocks=3", "train.micro_batch=8", "--layout", "tp=1,dp_shard=8")
    said = _printed("plan", *words, "gpus=8", *given)
    config = json.loads(lmtrain("pretrain", "data.path=x", *words, *said, "--print-config", "--json"))
    sizes = {"tp": 1, "dp_replicate": 1, "dp_shard": 8, "sequence_parallel": True}
    assert {key: config["parallel"][key] for key in sizes} == sizes
    assert config["recompute"] == {"kind": "full", "blocks": 3}


@pytest.mark.parametrize(
    ("chosen", "data"),
    [("", ["data.document_mask=true"]), ("  - override /data: blend\n", ["data.datasets=[{path: a, weight: 1}]"])],
)
def test_data_is_not_asked_for_beside_a_recipe(tmp_path: Path, chosen: str, data: list[str]) -> None:
    (tmp_path / "experiment").mkdir()
    text = f"# @package _global_\ndefaults:\n  - override /model: gpt2_small\n{chosen}"
    (tmp_path / "experiment" / "mine.yaml").write_text(text, encoding="utf-8")
    words = ("experiment=mine", "hardware=h100", "gpus=8", "train.global_batch=64", "--config-dir", tmp_path)
    assert "on 8 x h100" in lmtrain("plan", *words, *data, "--layout", "dp_shard=8", "--doublings", "0")


def test_a_row_of_the_table_says_what_the_json_says() -> None:
    words = ("--layout", "dp_shard=8", "recompute=full", "recompute.blocks=3")
    (best,) = json.loads(lmtrain(*SMALL, *words, "--json"))["best"]
    assert best["recompute_blocks"] == 3
    shown = lmtrain(*SMALL, *words, env={"COLUMNS": "80"})
    step, gibibytes = rf"{1000 * best['step_s']:.3g}ms", f"{best['held_bytes'] / 2**30:.1f}"
    assert re.search(rf" full 3 +{step}\S* +{gibibytes} +{best['mfu']:.1%}", shown)


def test_larger_nodes_have_more_network_and_each_gpu_has_as_much() -> None:
    words = ("--layout", "dp_shard=32", "gpus=32", "--gpus-per-node", "16", "train.global_batch=64")
    shown = lmtrain("plan", "model=gpt2_small", "hardware=h100", *words)
    assert "2 nodes of 16, 800 GB/s of network each" in shown  # h100's own are nodes of 8 with 400 GB/s


def test_a_microbatch_that_is_given_makes_the_batch_a_multiple_of_itself() -> None:
    words = ("plan", "model=gpt2_small", "hardware=h100", "gpus=8", "--layout", "dp_shard=8", "--json")
    assert json.loads(lmtrain(*words, "train.micro_batch=48"))["global_batch"] == 11 * 8 * 48


@pytest.mark.parametrize(
    "words",
    [["model=gpt2_small", "data.document_mask=true"], ["model=bert_base", "data=masked", "data.min_sentences=3"]],
)
def test_data_says_how_it_is_read_and_needs_no_path(words: list[str]) -> None:
    facts = json.loads(lmtrain("plan", *words, "hardware=h100", "gpus=8", "--layout", "dp_shard=8", "--json"))
    assert facts["best"][0]["step_s"] > 0


def test_a_short_run_is_planned_whatever_its_schedule() -> None:
    """Nor do other batches that are only looked at have to go with what is given."""
    words = ("plan", "model=gpt2_small", "hardware=h100", "gpus=8", "--layout", "dp_shard=8", "--json")
    assert json.loads(lmtrain(*words, "tokens=100M"))["tokens"] == 100_000_000
    facts = json.loads(lmtrain(*words, "tokens=1B", "schedule.warmup_steps=100"))
    assert facts["assumed"][0]["tokens_per_s"] is not None


def test_what_is_given_is_kept() -> None:
    for one in facts_of("parallel.zero=3", "parallel.tp=2", "train.micro_batch=2")["best"]:
        assert (one["parallel"]["zero"], one["parallel"]["tp"], one["micro_batch"]) == (3, 2, 2)


def test_what_is_not_given_is_assumed_and_ranged() -> None:
    words = ["model=gpt_tiny", "hardware=a100_80gb", "gpus=2", "parallel.pp=1", "recompute=none", "--doublings", "0"]
    facts = json.loads(lmtrain("plan", *words, "--json"))
    said = {one["what"].partition(" ")[0]: one["tokens_per_s"] for one in facts["assumed"]}
    assert set(said) == {"train.global_batch", "model.vocab_size", "precision"}
    low, high = said["model.vocab_size"]
    assert low < facts["best"][0]["tokens_per_s"] < high


def test_a_peak_that_its_file_lacks_can_be_given() -> None:
    words = ("plan", "model=gpt2_small", "hardware=v100_32gb", "gpus=1", "train.global_batch=4", "precision=bf16")
    slow, fast = (
        json.loads(lmtrain(*words, f"hardware.peak_tflops.bf16={peak}", "--layout", "tp=1", "--json"))["best"][0]
        for peak in (20, 40)
    )
    assert fast["step_s"] < slow["step_s"]
    assert 0 < slow["mfu"] < 1


def test_a_cpu_has_no_communicators_and_its_own_fastest_precision() -> None:
    words = ("plan", "model=gpt_tiny", "hardware=cpu", "gpus=2", "train.global_batch=8", "--doublings", "0", "--json")
    facts = json.loads(lmtrain(*words))
    assert "precision is not given: fp32, the fastest that cpu has" in [one["what"] for one in facts["assumed"]]
    assert facts["best"][0]["precision"] == "fp32"
    assert facts["best"][0]["memory_bytes"].get("communicators", 0) == 0


@pytest.mark.wide
def test_margin_and_switch_leave_fewer_layouts() -> None:
    every = facts_of()["layouts"]["fitting"]
    assert facts_of("--margin", "0.9")["layouts"]["fitting"] < every
    facts = facts_of("--gpus-per-node", "2", "--nodes-per-switch", "2")
    assert 0 < facts["layouts"]["fitting"] < every
    assert all(one["parallel"]["dp_shard"] * one["parallel"]["tp"] <= 4 for one in facts["best"])


def test_the_largest_world_is_not_doubled() -> None:
    words = ("plan", "model=gpt2_small", "hardware=h100", "gpus=131072", "train.global_batch=131072", "--json")
    sizes = ("parallel.pp=1", "parallel.tp=1", "parallel.dp_replicate=131072", "recompute=none", "train.micro_batch=1")
    assert [point["gpus"] for point in json.loads(lmtrain(*words, *sizes))["curve"]] == [131072]


def test_parallel_auto_is_what_a_plan_does() -> None:
    assert json.loads(lmtrain(*FEW, "parallel=auto", "--json")) == facts_of()


def test_what_takes_the_least_energy_comes_first_and_goes_on_with_more_gpus(tmp_path: Path) -> None:
    words = (*FEW[:5], *FEW[7:], "--by", "joules", "--doublings", "1", "--html", tmp_path / "plan.html")
    facts = json.loads(lmtrain(*words, "--json"))
    joules = [one["joules_per_token"] for one in facts["best"]]
    assert joules == sorted(joules)
    assert next(point["best"]["joules_per_token"] for point in facts["curve"]) == joules[0]
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "least energy first" in page
    assert "more energy" in page


@pytest.mark.wide
def test_a_model_too_large_says_what_misses_by_least() -> None:
    given = ("plan", "model=gpt3_175b", "hardware=h100", "gpus=2", "train.global_batch=2", "recompute=full")
    shown = lmtrain(*given, code=78)
    assert "nothing fits" in shown
    assert "No layout on 2 x h100 fits in memory with 8% of it left free" in " ".join(shown.split())
    assert re.search(r"[GT]iB too much", shown)


@pytest.mark.wide
def test_more_gpus_bring_a_gain() -> None:
    words = (*SMALL[:5], "recompute=none", "parallel.balance=layers", "parallel.vp=1")
    facts = json.loads(lmtrain(*words, "--doublings", "2", "--grow-batch", "--json"))
    assert [point["gpus"] for point in facts["curve"]] == [8, 16, 32]
    assert all(1 < point["gain"] <= 2.01 for point in facts["curve"][1:])
    assert [point["best"]["gpus"] for point in facts["curve"]] == [8, 16, 32]


def test_saves_are_spaced_by_young_and_daly() -> None:
    low, high = facts_of("run.time_between_failures=3h")["save_every_s"]
    assert low == pytest.approx((2 * 1 * 3 * 3600) ** 0.5)
    assert high >= low
    assert facts_of()["save_every_s"] is None


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open, self.seen, self.outside = list[str](), list[str](), list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.outside += [f"{tag} {key}={value}" for key, value in attrs if key in ("src", "href", "srcset", "data")]
        if tag not in ("meta", "line", "polyline", "polygon", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in ("line", "polyline", "polygon", "circle") or self.open.pop() == tag


def test_the_page_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    lmtrain(*SMALL[:5], "parallel.pp=2", "parallel.vp=1", "recompute=none", "--doublings", "1", "--html", path)
    text = path.read_text(encoding="utf-8")
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert page.outside == []
    assert page.seen.count("svg") == 4
    assert "script" not in page.seen
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    drawn = set(re.findall(r"\.(\w+) \{[^}]*stroke: var", text))  # lines, which would cover what is written
    assert "grid" in drawn
    assert not drawn & {kind for kinds in re.findall(r'<text [^>]*class="([^"]*)"', text) for kind in kinds.split()}
    coloured = set(re.findall(r'class="([mp]-\w+)', text))
    assert len(coloured) > 8
    assert all(f".{name}" in text for name in coloured)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["hardware=h100"], 2, "Give gpus=COUNT"),
        (["hardware=h100", "gpus=8", "compute.device=cpu"], 2, "Use auto, or"),
        (["gpus=8"], 2, "Give hardware=NAME, one of a100_40gb"),
        (["hardware=h100_sxm", "gpus=8"], 2, "Did you mean h100 or h100_96gb or h100_dgx or h100_pcie?"),
        (["hardware=h100", "gpu=8"], 2, "Did you mean gpus=8?"),
        (["hardware=h100", "gpus=many"], 2, "Give a number, such as 1024"),
        (["hardware=h100", "gpus=8", "gpus=9"], 2, "Use gpus=8 or gpus=9 alone"),
        (["hardware=h100", "gpus=8", "parallel.tpp=2"], 2, "Did you mean tp?"),
        (["hardware=h100", "gpus=8", "parallel.zero=4"], 2, "Use 0, 1, 2 or 3."),
        (["hardware=h100", "gpus=8", "hardware.nic_GBps=abc"], 2, "is not a number"),
        (["hardware=v100_32gb", "gpus=8", "precision=bf16"], 2, "or give hardware.peak_tflops.bf16=TFLOPS"),
        (["hardware=h100", "gpus=8", "hardware.factors.luck=1"], 2, "has luck, which is below 0 or no factor"),
        (["hardware=h100", "gpus=8", "--layout", "tp"], 2, "Give tp=VALUE"),
        (["hardware=h100", "gpus=8", "--layout", "tp=3,sequence_parallel=false"], 2, "Use gpus=6"),
        (["hardware=h100", "gpus=8", "--layout", "tp=2", "parallel.tp=4"], 2, "tp=4 was given too"),
        (["hardware=h100", "gpus=8", "--layout", "micro_batch=2"], 2,
         "add train.micro_batch=2 as an argument of its own"),
        (["hardware=h100", "gpus=8", "--layout", "zero=0"], 2, "Use --layout=zero=1"),
        (["hardware=h100", "gpus=8", "--layout", "tp=8"], 78, "does not divide model.num_heads=12"),
        (["hardware=h100", "gpus=7", "train.global_batch=5", "parallel.pp=1"], 2, "Use train.global_batch=7"),
        (["hardware=h100", "gpus=8", "--html", "no/such/folder.html"], 73, "does not exist. Create it"),
        (["hardware=h100", "gpus=8", "train.global_batch=64", "parallel.tp=3"], 78, "gpus=8 is no multiple of tp=3"),
        (["hardware=h100", "gpus=8", "train.global_batch=64", "train.micro_batch=3"], 2, "train.micro_batch=3 x 1"),
        (["hardware=h100", "gpus=5", "train.global_batch=5", "parallel.dp_replicate=5", "parallel.zero=3"], 2,
         "Leave parallel.dp_replicate or parallel.zero out"),
        (["hardware=h100", "gpus=8", "parallel=single"], 2, "Leave it out, or give single sizes"),
        ([*SHARED, "--nodes-per-switch", "2", "--gpus-per-node", "4"], 78, "Use --nodes-per-switch 4"),
        (["hardware=h100", "gpus=8", "--price", "2"], 2, "Give tokens=N"),
        (["hardware=h100", "gpus=8", "--layout", "tp=2", "--doublings", "2"], 2,
         "--doublings has no effect with --layout"),
        (["--calibrate", "--top", "3"], 2, "--top has no effect with --calibrate"),
        (["hardware=h100", "gpus=8", "--by", "luck"], 2, "--by luck is not one of time, joules."),
        (["experiment=demo", "gpus=8", "hardware.memory_GiB=9"], 2, "hardware is not given"),
        (["experiment=megatron_2021_1t", "gpus=8", "hardware=h100", "compute.device=cpu", "train.seed=x"], 2,
         "than that of hardware=h100"),
        *wide(
            (["hardware=cpu", "gpus=8", "compute.device=cuda"], 2, "Use auto, or"),
            (["hardware=h100", "gpus=0"], 2, "Use gpus=1."),
            (["hardware=h100", "gpus=1.5"], 2, "Give a number, such as 1024"),
            (["hardware=h100", "gpus=8", "modle=x"], 2, "Did you mean model?"),
            (["hardware=h100", "gpus=8", "parallel.tp=x"], 2, "Give a whole number, such as 1."),
            (["hardware=h100", "gpus=8", "parallel.tp=0"], 2, "parallel.tp=0 must be at least 1"),
            (["hardware=h100", "gpus=8", "parallel.vp=-1"], 2, "parallel.vp=-1 must be at least 1"),
            (["hardware=h100", "gpus=8", "parallel.schedule=zb"], 2, "Did you mean zb_v?"),
            (["hardware=h100", "gpus=8", "hardware.nic_GBps=0"], 2, "must be above 0"),
            (["hardware=cpu", "gpus=1", "precision=fp16", "--layout", "tp=1"], 2, "has no figure for precision"),
            (["hardware=h100", "gpus=8", "hardware.name.x=1"], 2, "hardware.name, which is a single value"),
            (["hardware=h100", "gpus=8", "tokens=much"], 2, "is not a size"),
            (["hardware=h100", "gpus=8", "--layout", "tp=2,tp=4"], 2, "tp=2 was given too"),
            (["hardware=h100", "gpus=8", "--layout", "parallel.tp=3"], 78, "parallel.sequence_parallel=false"),
            (["hardware=h100", "gpus=8", "train.global_batch=64", "parallel.tp=5"], 78, "Use 1, 2, 3, 4, 6 or 12."),
            ([*SHARED, "--nodes-per-switch", "1"], 78, "Use --nodes-per-switch 2"),
            (["hardware=h100", "gpus=8", "tokens=1B", "--price", "inf"], 2, "Give a number such as 2.5"),
            (["hardware=h100", "gpus=8", "train.micro_batch=x"], 2, "error: train.micro_batch=x"),
            (["hardware=h100", "gpus=8", "--doublings", "0", "--grow-batch"], 2, "Leave --doublings 0 out"),
            (["--calibrate", "--html", "x.html"], 2, "--html has no effect with --calibrate"),
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused(words: list[str], code: int, said: str) -> None:
    found, output = outcome("plan", "model=gpt2_small", *words)
    assert found == code, output
    assert said in output
    assert "Traceback" not in output


@pytest.mark.wide
def test_a_machine_of_ones_own_is_read_from_a_folder(tmp_path: Path) -> None:
    text = Path("conf/hardware/h100.yaml").read_text(encoding="utf-8")
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "mine.yaml").write_text(text.replace("memory_GBps: 3352", "memory_GBps: 1000"))
    words = [*FEW[:2], "hardware=mine", *FEW[3:], "--config-dir", str(tmp_path), "--json"]
    assert json.loads(lmtrain(*words))["best"][0]["step_s"] > facts_of()["best"][0]["step_s"]
    faster = facts_of("hardware.memory_GBps=9999")["best"][0]["step_s"]
    assert faster < facts_of()["best"][0]["step_s"]


_WATCHED = """
import sys
from lmtrain.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
status = dict(line.split(":") for line in open("/proc/self/status"))  # because: resource's peak has the parent's in it
print("torch" in sys.modules, int(status["VmHWM"].split()[0]) // 1024, file=sys.stderr)
"""


@pytest.mark.wide
def test_all_layouts_of_a_large_model_are_priced_without_torch_in_little_memory() -> None:
    words = ["plan", "model=gpt3_175b", "hardware=h100", "gpus=1024", "train.global_batch=1536", "--json"]
    done = subprocess.run([sys.executable, "-c", _WATCHED, *words], capture_output=True, text=True, check=True)
    torch, megabytes = done.stderr.split()[-2:]
    assert torch == "False"
    assert int(megabytes) < 500
    assert json.loads(done.stdout)["layouts"]["legal"] > 1_000_000
