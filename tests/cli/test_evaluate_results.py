"""What `lmtrain eval` leaves and shows: samples, parts, several tasks, comparisons, steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.harness import Toy, lmtrain

pytestmark = pytest.mark.wide
ENV = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def run(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    lmtrain("pretrain", *toy.settings(folder, train__steps=30, checkpoint__interval_steps=10, checkpoint__keep_last=9))
    return folder


@pytest.fixture(scope="module")
def held_out(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty documents: the first lines of the corpus's files."""
    path = tmp_path_factory.mktemp("texts") / "held.jsonl"
    texts = [file.read_text().splitlines()[0] for file in sorted(toy.text.iterdir())]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts if text)[:6000].rpartition("\n")[0])
    return path


def call(*arguments: object, code: int = 0) -> str:
    return lmtrain("eval", *arguments, code=code, env=ENV)


def asked(task: str, data: Path) -> tuple[object, ...]:
    return ("--task", task, "--data", data)


def document(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_samples_and_the_recipe_of_several_tasks(run: Path, held_out: Path, tmp_path: Path) -> None:
    output, samples = tmp_path / "r.json", tmp_path / "rows" / "s.jsonl"
    tasks = asked("perplexity", held_out) + asked("lambada/megatron-strict", held_out)
    shown = call(run, *tasks, "--output", output, "--samples", samples)
    found = document(output)
    assert found["complete"] is True
    assert found["samples"]["file"] == "rows/s.jsonl"
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    for number, result in enumerate(found["results"]):
        own = [row for row in rows if row["result"] == number]
        assert len(own) == result["num_items"]
        assert sum(row["nll"] for row in own) == pytest.approx(result["nll_sum_nats"])
        assert result["intervals"][result["headline"]]
        assert result["headline"] in shown
    assert shown.count("also ") == 2
    assert not list(tmp_path.glob("*.journal"))


def test_tasks_that_feed_the_same_share_the_work(run: Path, held_out: Path) -> None:
    lambada = asked("lambada/megatron-strict", held_out) + asked("lambada/megatron-token", held_out)
    tasks = (*asked("perplexity", held_out), *lambada, *asked("perplexity", held_out))
    first, _words, last, again = json.loads(call(run, *tasks, "--json"))["results"]
    assert again["tokens_per_s"] == 0 < first["tokens_per_s"], "the second time nothing was fed"
    for key in ("nll_sum_nats", "measures", "intervals", "loss_by_position"):
        assert again[key] == first[key]
    assert 0 <= first["padding_share"] <= 0.05
    (alone,) = json.loads(call(run, *asked("lambada/megatron-token", held_out), "--json"))["results"]
    assert last["nll_sum_nats"] == pytest.approx(alone["nll_sum_nats"], rel=1e-6)


def test_a_part_is_marked_in_the_id_the_table_and_the_json(run: Path, held_out: Path) -> None:
    assert "perplexity-first3  PARTIAL: the first 3 items" in call(run, *asked("perplexity", held_out), "--limit", 3)
    (result,) = json.loads(call(run, *asked("perplexity", held_out), "--limit", 3, "--json"))["results"]
    assert (result["protocol"], result["limit"], result["num_items"]) == ("perplexity-first3", 3, 3)


def test_full_shows_the_loss_by_position(run: Path, held_out: Path) -> None:
    shown = call(run, *asked("perplexity", held_out), "--full")
    assert "tokens before" in shown
    assert "8 to 15" in shown


def test_what_was_finished_stays_when_a_later_task_fails(run: Path, held_out: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    (tmp_path / "bad.jsonl").write_text('{"no": "text"}\n')
    tasks = asked("perplexity", held_out) + asked("lambada/megatron-strict", tmp_path / "bad.jsonl")
    shown = call(run, *tasks, "--output", output, code=65)
    assert "token_perplexity" in shown
    found = document(output)
    assert found["complete"] is False
    assert [result["task"] for result in found["results"]] == ["perplexity"]
    assert json.loads(call(run, *tasks, "--json", code=65).partition("\nerror")[0])["results"]
    (tmp_path / "bad.jsonl").write_text(held_out.read_text())
    assert "not scored again" in call(run, *tasks, "--output", output)
    assert document(output)["complete"] is True


def test_results_are_kept_until_others_are_complete(run: Path, held_out: Path, tmp_path: Path) -> None:
    output, journal = tmp_path / "r.json", tmp_path / "r.json.journal"
    whole = (run, *asked("perplexity", held_out), "--output", output)
    call(*whole)
    before = output.read_bytes()
    assert "is already there" in call(*whole)
    assert json.loads(call(*whole, "--json")) == document(output)
    for other in (("--limit", 3), ("--precision", "bf16"), ("--samples", tmp_path / "s.jsonl")):
        assert "--overwrite" in call(*whole, *other, code=73)
    (tmp_path / "bad.jsonl").write_text('{"no": "text"}\n')
    more = asked("lambada/megatron-strict", tmp_path / "bad.jsonl")
    call(*whole, *more, "--overwrite", code=65)
    assert output.read_bytes() == before
    answers = journal.read_bytes()
    output.rename(tmp_path / "kept.json")
    assert "r.json.journal is there already" in call(*whole, code=73)
    assert journal.read_bytes() == answers
    (tmp_path / "kept.json").rename(output)
    (tmp_path / "bad.jsonl").write_text(held_out.read_text())
    assert "not scored again" in call(*whole, *more, "--overwrite")
    assert document(output)["complete"] is True
    assert not journal.exists()


def test_two_results_files_are_compared_and_two_checkpoints_give_the_same(
    run: Path, held_out: Path, tmp_path: Path
) -> None:
    checkpoints = [run / "checkpoints" / name for name in ("step_00000010", "step_00000030")]
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for checkpoint, file in zip(checkpoints, files, strict=True):
        samples = ("--samples", file.with_suffix(".jsonl"))
        call(checkpoint, *asked("perplexity", held_out), "--output", file, *samples)
    shown = call("--compare", *files)
    assert "B - A" in shown
    assert f"A  {files[0]}" in shown
    written = json.loads(call("--compare", *files, "--json"))["comparisons"]
    scored = json.loads(call("--compare", *checkpoints, *asked("perplexity", held_out), "--json"))["comparisons"]
    assert written == scored
    (one,) = written
    found = one["differences"]["bits_per_byte"]
    assert found["interval"][0] < found["difference"] < found["interval"][1] < 0  # twenty more steps have helped
    assert found["beyond_chance"] is True


def test_other_questions_are_not_compared(run: Path, held_out: Path, tmp_path: Path) -> None:
    whole, part, bare = (tmp_path / name for name in ("a.json", "b.json", "c.json"))
    call(run, *asked("perplexity", held_out), "--output", whole, "--samples", tmp_path / "a.jsonl")
    call(run, *asked("perplexity", held_out), "--limit", 5, "--output", part, "--samples", tmp_path / "b.jsonl")
    call(run, *asked("perplexity", held_out), "--output", bare)
    assert "protocol perplexity and perplexity-first5" in call("--compare", whole, part, code=65)
    assert "without --samples" in call("--compare", whole, bare, code=2)
    both, output = tmp_path / "d.json", tmp_path / "compared.json"
    tasks = asked("perplexity", held_out) + asked("lambada/megatron-strict", held_out)
    call(run, *tasks, "--output", both, "--samples", tmp_path / "d.jsonl")
    left_out = document(both)["results"][1]["protocol"] + f" only in {both}"
    assert f"left out: {left_out}" in call("--compare", both, whole, "--output", output)
    assert document(output)["left_out"] == [left_out]
    for key, value, said in (("num_items", 3, "must have one value for each item of the results"),
                             ("task", "x", f"have no task in common: perplexity only in {whole}")):  # fmt: skip
        found = document(bare) | {"samples": document(whole)["samples"]}
        found["results"][0][key] = value
        part.write_text(json.dumps(found))
        assert said in call("--compare", whole, part, code=65)
    (tmp_path / "a.jsonl").write_text("{}\n")
    assert "was changed after it was written" in call("--compare", whole, part, code=65)
    whole.write_text('{"format": "other"}')
    assert "is not a results file of `lmtrain eval --output`" in call("--compare", whole, part, code=65)


def test_a_run_over_its_steps(run: Path, held_out: Path, tmp_path: Path) -> None:
    shown = call(run, *asked("perplexity", held_out), "--steps", "all", "--output", tmp_path / "s.json")
    rows = [line for line in shown.splitlines() if line.startswith("step ")]
    assert [row.split()[1] for row in rows] == ["10", "20", "30"]
    found = document(tmp_path / "s.json")
    values = [one["results"][0]["measures"]["token_perplexity"] for one in found["steps"]]
    assert [one["model"]["step"] for one in found["steps"]] == [10, 20, 30]
    assert values[0] > values[2]
    assert f"best   {min(values):.2f}" in shown
    some = json.loads(call(run, *asked("perplexity", held_out), "--steps", "30,10", "--json"))
    assert [one["results"][0]["measures"]["token_perplexity"] for one in some["steps"]] == [values[0], values[2]]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("{run}", "--steps", "all", "--samples", "s"), 2, "--samples has no effect with --steps"),
        (("{run}", "--compare", "{run}", "{run}"), 2, "CHECKPOINT has no effect with --compare of two checkpoints"),
        (("--compare", "{held}", "{held}", "--batch-size", "2"), 2, "--batch-size has no effect with --compare"),
        (("--compare", "{held}", "{run}"), 2, "mixes a file and a folder"),
        (("{run}", "--steps", "10,x"), 2, "--steps=10,x is not a list of steps"),
        (("{run}", "--steps", "11"), 66, "It has checkpoints of steps 10, 20, 30"),
        (("{held}", "--steps", "all"), 66, "holds none. Give a run's folder."),
        (("{run}", "--output", "{run}"), 73, "is a folder"),
        (("{run}", "--samples", "{held}/s.jsonl"), 73, "cannot be a folder"),
        (("{run}", "--samples", "{run}/s", "--output", "{run}/s"), 2, "Give two different files"),
    ],
)
def test_what_does_not_go_together_is_refused_at_once(
    run: Path, held_out: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    filled = [one.format(run=run, held=held_out) for one in arguments]
    tasks = () if "--batch-size" in filled else asked("perplexity", held_out)
    assert words in " ".join(call(*filled, *tasks, code=code).split())
