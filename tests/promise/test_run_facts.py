"""Every place that says what a run is at a step says what it is: at six moments of a run in two stages, of a branch,
and of a merge of its checkpoints.

What it is at each moment stands in `MOMENTS`, computed by hand. A reader returns the facts that its place shows;
rounded ones are compared as the place prints them.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import lmtrain as api
from lmtrain.checkpoint.find_and_prune import latest_checkpoint
from lmtrain.units import format_count
from tests.cli.harness import Toy, lmtrain, on_terminal, start
from tests.cli.harness import toy as toy

pytestmark = [pytest.mark.wide, pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")]
Facts = dict[str, Any]
PARAMETERS, PADDED = 38_272, 39_808  # 400 and 448 rows of 32 in the table of tokens
TRUNK = {
    "stage": "trunk", "batch": 4, "seq_len": 32, "data": "toy", "parameters": PARAMETERS, "steps": 10, "borders": [6],
}  # fmt: skip
DECAY = TRUNK | {"stage": "decay", "batch": 2, "seq_len": 16, "data": "other"}
# lr 3e-3 after a warm-up of 2 steps; then 1e-3 and a line to 0 over the 4 steps of decay
MOMENTS: dict[str, Facts] = {
    "stage one runs": TRUNK | {"step": 4, "tokens": 512, "lr": 3e-3, "starts": 1, "state": "running"},
    "at the border": TRUNK | {"step": 6, "tokens": 768, "lr": 3e-3, "starts": 1, "state": "running"},
    "stage two begins": DECAY | {"step": 6, "tokens": 768, "lr": 3e-3, "starts": 1, "state": "running"},
    "stage two runs": DECAY | {"step": 8, "tokens": 832, "lr": 7.5e-4, "starts": 1, "state": "running"},
    "after a kill": DECAY | {"step": 8, "tokens": 832, "lr": 7.5e-4, "starts": 1, "state": "killed"},
    "another rate": DECAY | {"step": 9, "tokens": 864, "lr": 2e-3 / 2, "starts": 2, "state": "running"},
    "finished": DECAY | {"step": 10, "tokens": 896, "lr": 2e-3 / 4, "starts": 2, "state": "finished"},
}  # fmt: skip
# a branch of 2 steps from step 4 of the trunk, by a line from its rate to 0
BRANCH = TRUNK | {
    "stage": "decay", "steps": 6, "borders": [4], "step": 6, "tokens": 768, "lr": 1.5e-3, "starts": 1,
    "state": "finished",
}  # fmt: skip


@dataclass
class Moment:
    """The folder of a run as it is for the moment, the line that trains it, and what its terminal shows."""

    run: Path
    words: list[str]
    screen: Callable[[], str]


def the_settings(toy: Toy, other: Path, folder: Path) -> list[str]:
    words = toy.settings(folder, model__vocab_multiple=64, model__positions="rotary", checkpoint__interval_steps=2)
    return [
        *(word for word in words if not word.startswith("train.steps=")), "schedule=constant", "stages.trunk.steps=6",
        "stages.decay.steps=4", "stages.decay.train.global_batch=2", "stages.decay.model.seq_len=16",
        f"stages.decay.data.path={other}", "stages.decay.schedule=linear", "stages.decay.optim.lr=1e-3",
    ]  # fmt: skip


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, "the process did not come to where it should stop"
        time.sleep(0.005)


class OnTerminal:
    """A run on a terminal of 200 columns, which stops itself at each of the places that `fault` names."""

    def __init__(self, words: list[str], fault: str) -> None:
        self._drawn: list[bytes] = []
        self._leader, follower = os.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
        faults = {"LMTRAIN_FAULT": fault, "LMTRAIN_ALLOW_FAULTS": "1", "TERM": "xterm"}
        self.process = start("pretrain", *words, env=faults, output=follower)
        os.close(follower)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while data := os.read(self._leader, 1 << 16):
                self._drawn.append(data)
        except OSError:  # the process has ended
            pass

    def screen(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(self._drawn).decode(errors="replace"))

    def wait(self) -> None:
        """Return when the process has stopped itself."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] in "Tt")

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def other(toy: Toy) -> Path:
    """A dataset of one of the texts."""
    output = toy.data.with_name("other")
    lmtrain("preprocess", sorted(toy.text.iterdir())[0], "--tokenizer", toy.tokenizer, "--output", output)
    return output


# ---- the eight places ------------------------------------------------------------------------------------------------


def of_json(facts: Facts) -> Facts:
    assert facts["padded_parameters"] == PADDED
    return {key: Path(facts[key]).name if key == "data" else facts[key] for key in (*DECAY, *MOMENTS["finished"])}


def of_words(text: str, *, batch: str, data: str, parameters: str, stage: str, **more: str) -> Facts:
    """The facts in a text, each by its pattern."""
    found: Facts = {}
    for name, pattern in {"batch": batch, "data": data, "parameters": parameters, "stage": stage, **more}.items():
        match = re.search(pattern, text)
        assert match, f"{name} is not in:\n{text}"
        found[name] = match[1].rpartition("/")[2] if name == "data" else match[1]
        if name == "batch":
            found |= {"batch": int(match[1]), "seq_len": int(match[2])}
    assert found.pop("padded", format_count(PADDED)) == format_count(PADDED)
    return found


_COUNT = r"([\d.]+k?)"
_TEXTS = {
    "batch": r"batch\s+(\d+) samples of (\d+) tokens", "parameters": rf"gpt, {_COUNT} parameters,",
    "padded": rf"parameters, {_COUNT} with padding",
}  # fmt: skip


def panel(moment: Moment) -> Facts:
    drawn = moment.screen()
    drawn = drawn[drawn.rindex("╭") if "╭" in drawn else 0 :]
    return of_words(drawn, **_TEXTS, data=r"data (\S+),", stage=r"stage\s+(\w+) \d/2 to step", steps=r"step \d+/(\d+)")


def table(moment: Moment) -> Facts:
    """The tables of stages and of ranks in a dry run of the same line, on a copy of the folder, which may be in use."""
    copied = shutil.copytree(moment.run, moment.run.with_name("copy"))
    words = [word for word in moment.words if not word.startswith("run.dir=")]
    said = lmtrain("pretrain", *words, f"run.dir={copied}", "--dry-run", "--json")
    facts = json.loads(said[said.index("{") :])
    shutil.rmtree(copied)
    assert sum(row["parameters"] for row in facts["ranks"]) == facts["padded_parameters"] == PADDED
    stage = json.loads(lmtrain("inspect", moment.run, "--json"))["stage"]
    [row] = [row for row in facts["stages"] if row["stage"] == stage]
    return {
        "stage": row["stage"], "batch": row["batch_sizes"][-1], "seq_len": row["seq_len"], "steps": facts["steps"],
        "data": Path(row["sources"][0]["dataset"]).name, "parameters": facts["parameters"],
        "borders": [row["end_step"] for row in facts["stages"][:-1]],
    }  # fmt: skip


def inspect(moment: Moment) -> Facts:
    facts = of_json(json.loads(lmtrain("inspect", moment.run, "--json")))
    said = lmtrain("inspect", moment.run)
    shown = of_words(
        said, **_TEXTS, data=r"dataset: (\S+)", stage=r"stage\s+(\w+), \d of 2", step=r"step\s+(\d+) of",
        lr=r"learning rate (\S+),", tokens=r"tokens\s+(\S+) in", state=r"state\s+(\w+)",
    )  # fmt: skip
    assert shown == rounded(facts, shown, ".2e")
    return facts


def runs(moment: Moment) -> Facts:
    [row] = json.loads(lmtrain("runs", "list", moment.run, "--json"))
    said = lmtrain("runs", "list", moment.run).splitlines()[1].split()
    assert (row["state"], row["stage"], str(row["step"])) == (said[1], said[2], said[3])
    return of_json(row)


def python(moment: Moment) -> Facts:
    [row] = api.runs(moment.run)
    return of_json(row)


def report(moment: Moment) -> Facts:
    lmtrain("report", moment.run, "--output", page := moment.run.with_name("page.html"), "--overwrite")
    text = re.sub(r"<[^>]*>+", " ", page.read_text().partition('<div class="tools"')[0])
    starts = {"starts": r"starts\s+(\d+)"} if "starts" in text else {}
    shown = of_words(
        text, **_TEXTS, data=r"dataset: (\S+)", stage=r"stage\s+(\w+), \d of 2", step=r"step\s+(\d+) of",
        steps=r"of (\d+) \(", lr=r"learning rate\s+(\S+)", tokens=r"tokens\s+(\d+)", state=r"state\s+(\w+)", **starts,
    )  # fmt: skip
    assert len({*re.findall("start [2-9] went on", page.read_text())}) == int(shown.get("starts", 1)) - 1
    return shown


def watch(moment: Moment) -> Facts:
    drawn = on_terminal("watch", moment.run, "--once", columns=200)
    return of_words(
        drawn, **_TEXTS, data=r"dataset: (\S+)", stage=r"stage\s+(\w+) \d/2 to step", step=r"step (\d+)/",
        steps=r"step \d+/(\d+)", lr=r"learning rate\s+(\S+)", tokens=r"elapsed.*, (\d+) tokens",
    )  # fmt: skip


def card(checkpoint: Path) -> Facts:
    """The card of an export, without those facts that belong to a run and not to a checkpoint."""
    output = checkpoint.parents[1] / "exported"
    lmtrain("export", checkpoint, "--to", "hf", "--output", output, "--json")
    text = (output / "README.md").read_text()
    shutil.rmtree(output)
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE))
    stage = rows["stage"].partition(",")[0]
    assert rows["parameters with padding"] == f"{PADDED:,}"
    stages = re.findall(r"^\| (\w+) \| (\d+) to (\d+) \|", text, re.MULTILINE)
    assert stages[-1][0] == stage
    batch, seq_len = re.findall(r"\d+", rows[f"batch of the stage {stage}"])
    return {
        "stage": stage, "batch": int(batch), "seq_len": int(seq_len), "data": rows[f"data of the stage {stage}"],
        "parameters": int(rows["parameters"].replace(",", "")), "step": int(rows["steps"]),
        "steps": int(rows["steps of the run"]), "tokens": int(rows["tokens"]), "starts": int(rows["starts"]),
        "lr": rows["learning rate of the last step"],
    }  # fmt: skip


def rounded(facts: Facts, shown: Facts, rate: str) -> Facts:
    """Return the facts that a place shows, as it writes them: `rate` is its format of a learning rate."""

    def text(key: str) -> Any:
        value = facts[key]
        if key == "lr":
            return format(value, rate)
        if key in ("parameters", "tokens"):
            return format_count(value)
        return str(value) if isinstance(shown[key], str) else value

    return {key: text(key) if isinstance(shown[key], str) else facts[key] for key in shown}


def check(moment: Moment, expected: Facts, *, on_screen: bool = True) -> None:
    for place in (inspect, runs, python):
        facts = place(moment)
        assert facts == {key: pytest.approx(value) if key == "lr" else value for key, value in expected.items()}, place
    for place, rate in ((report, ".3g"), (watch, ".2e"), (panel, ".2e"), (table, ".2e")):
        if on_screen or place is not panel:
            shown = place(moment)
            assert len(shown) >= 6
            assert shown == rounded(expected, shown, rate), place
    if (newest := latest_checkpoint(moment.run / "checkpoints")) is not None:
        check_checkpoint(moment.run, newest)


def check_checkpoint(run: Path, checkpoint: Path, state: str = "checkpoint") -> Facts:
    """Compare what the card, inspect and Python say of a checkpoint with the row of its step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    loaded = of_json(api.load(checkpoint)[0].run or {})
    [*_, row] = [row for row in rows if row["event"] == "step" and row["step"] == loaded["step"]]
    assert {key: loaded[key] for key in ("lr", "tokens", "stage", "state")} == {
        "lr": pytest.approx(row["lr"]), "tokens": row["tokens"], "stage": row["stage"], "state": state,
    }  # fmt: skip
    assert of_json(json.loads(lmtrain("inspect", checkpoint, "--json"))) == loaded
    shown = card(checkpoint)
    assert shown == rounded(loaded, shown, ".6g") | {"tokens": loaded["tokens"], "parameters": PARAMETERS}
    return loaded


@pytest.fixture
def process() -> Iterator[list[OnTerminal]]:
    """The runs that a test has started; none of them outlives it."""
    started: list[OnTerminal] = []
    yield started
    for each in started:
        each.process.kill()
        each.process.wait()


def test_eight_places_say_the_same_at_six_moments(
    toy: Toy, other: Path, tmp_path: Path, process: list[OnTerminal]
) -> None:
    run = tmp_path / "run"
    words = the_settings(toy, other, run)
    places = ["step:step=4", "start.build:count=2", "step:step=6", "step:step=8"]
    first = OnTerminal(words, ",".join(f"stop:point={place}" for place in places))
    process.append(first)
    for name in list(MOMENTS)[:4]:
        first.wait()
        check(Moment(run, words, first.screen), MOMENTS[name])
        first.go_on() if name != "stage two runs" else first.process.kill()
    first.process.wait()
    check(Moment(run, words, first.screen), MOMENTS["after a kill"])
    words = [*words[:-1], "stages.decay.optim.lr=2e-3"]
    second = OnTerminal(words, "stop:point=step:step=9")
    process.append(second)
    second.wait()
    check(Moment(run, words, second.screen), MOMENTS["another rate"])
    second.go_on()
    second.process.wait()
    check(Moment(run, words, second.screen), MOMENTS["finished"], on_screen=False)
    merged = tmp_path / "merges" / "merged"
    lmtrain("merge", "--last", 2, "--of", run, "--output", merged)
    facts = check_checkpoint(run, merged, "merged")
    assert {key: facts[key] for key in DECAY} == DECAY
    said = lmtrain("report", merged, code=66)
    assert f"Use {run} for the run of the newest of them" in said


def test_eight_places_say_the_same_of_a_branch(toy: Toy, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = toy.settings(
        run, model__vocab_multiple=64, model__positions="rotary", schedule="constant", train__steps=6,
        checkpoint__interval_steps=2,
    )  # fmt: skip
    lmtrain("pretrain", *words)
    line = lmtrain("branch", run, "--at", 4, "--decay-steps", 2, "--output", tmp_path / "branches")
    [typed] = [words for words in map(shlex.split, line.splitlines()) if words[:2] == ["lmtrain", "pretrain"]]
    lmtrain(*typed[1:])
    [branch] = (tmp_path / "branches").iterdir()
    facts = python(Moment(branch, typed[2:], str))
    assert facts == BRANCH | {"lr": pytest.approx(1.5e-3), "stage": facts["stage"]}
    check(Moment(branch, typed[2:], str), facts, on_screen=False)
