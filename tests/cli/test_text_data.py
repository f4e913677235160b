"""`lmtrain pretrain data.text=...`: a run that makes its tokenizer and dataset of a text, as a new user types it."""

from __future__ import annotations

import gzip
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.start.settings_from_earlier_run import RunRequest
from lmtrain.start.sweep_runs import plan_runs
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from tests.cli.harness import Toy, lmtrain, on_terminal, start

ALLOW = {"LMTRAIN_ALLOW_FAULTS": "1"}


def tiny(toy: Toy, folder: Path, **overrides: object) -> list[str]:
    """The settings of a toy run without data."""
    return [word for word in toy.settings(folder, **overrides) if not word.startswith("data.path=")]


@pytest.fixture(scope="module")
def notes(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("notes") / "notes.txt"
    path.write_text("\n\n".join(page.read_text() for page in sorted(toy.text.iterdir())[:20]))
    return path


def test_a_text_file_in_one_line(toy: Toy, notes: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = lmtrain("pretrain", f"data.text={notes}", *tiny(toy, run, train__steps=3))
    assert f"data.text={notes}: 1 file, " in said
    assert "tokenizer: BPE, 512 pieces, trained on this text in " in said
    assert "dataset: 1 document, " in said
    assert f"everything is in {run}" in said
    again = lmtrain("pretrain", f"data.text={notes}", *tiny(toy, run, train__steps=4))
    assert f"data.text={notes} is unchanged: {run}/data/text was made of it at an earlier start (1 document, " in again
    assert "continuing from" in again
    assert f"{run}/data/text, made of {notes}" in lmtrain("inspect", run)


def test_a_text_that_has_changed_is_refused_until_the_run_is_another(toy: Toy, tmp_path: Path) -> None:
    text, run = tmp_path / "notes.txt", tmp_path / "run"
    text.write_text("the fox and the dog " * 400)
    words = [f"data.text={text}", *tiny(toy, run, train__steps=3)]
    lmtrain("pretrain", *words)
    text.write_text("the fox and the cat " * 400)
    said = lmtrain("pretrain", *words, code=65)
    assert "notes.txt has changed since. Give another run.dir" in said
    assert "continuing from" in lmtrain("pretrain", *words[1:], f"data.path={run}/data/text", "train.steps=4")


def test_a_large_text_is_refused_with_the_commands_to_type(toy: Toy, notes: Path, tmp_path: Path) -> None:
    said = lmtrain("pretrain", f"data.text={notes}", f"run.dir={tmp_path}/run", "data.text_limit=20KiB", code=2)
    assert f"\n  lmtrain tokenizer train {notes} --output data/notes_tokenizer --vocab-size 512\n" in said
    assert f"\n  lmtrain preprocess {notes} --tokenizer data/notes_tokenizer --output data/notes\n" in said
    assert f"\n  lmtrain pretrain data.path=data/notes run.dir={tmp_path}/run\n" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["data.path=x"], 2, "both name the data to train on. Leave data.path out"),
        (["data=blend"], 2, "data.text=notes.txt is not a setting"),
        (["data.text="], 2, "data.text= names no text"),
        (["data.text=[]"], 2, "data.text=[] names no text"),
        (["data.text=[one.txt,-]"], 2, "data.text=[one.txt,-] is a pipe"),
        (["data.text=*.md"], 66, "*.md matches no file"),
        (["data.text=[one.txt,absent.txt]"], 66, "absent.txt does not exist"),
        (["data.text=one.txt", "data.text_suffixes=[.py]"], 2, "data.text_suffixes=[.py] has no effect: no input file"),
        (["data.text=a,b"], 2, 'A list is "data.text=[a,b]"'),
        (["data.valid_text=x", "data.text=one.txt"], 2, "A text to validate on is made a dataset of first"),
        (["data.valid_paths=[x/a,b]", "data.text=one.txt"], 2, 'Write "data.valid_paths={a: x/a, b: b}".'),
        (["data.text=absent.txt"], 66, "absent.txt does not exist"),
        (["data.text=-"], 2, "data.text=- is a pipe, which cannot be read again on resume"),
        (["data.text=one.txt", "model.vocab_size=99"], 2, "model.vocab_size=99 is too small for a byte-level BPE"),
        (["data.text=one.txt", "parallel.dp_shard=2"], 78, "1 process was started but parallel.dp_shard=2 needs 2"),
        (["data.text=one.jsonl", "data.text_split=line"], 2, "data.text_split=line cuts text files into documents"),
        (["data.text=one.txt", "model=bert_tiny", "data.tokenizer=bpe"], 65, "The tokenizer has no [CLS]"),
        (["one.txt"], 2, "'one.txt' is no setting. To train on the text in it, write data.text=one.txt."),
        (["train_file=one.txt"], 2, "train_file=one.txt is not a setting. Did you mean data.text=one.txt?"),
    ],
)  # fmt: skip
def test_refusals(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bpe").symlink_to(toy.tokenizer)
    (tmp_path / "one.txt").write_text("a word and a word " * 50)
    (tmp_path / "one.jsonl").write_text('{"text": "a"}\n')
    words = words if "one." in str(words) or "data.text=" in str(words) else ["data.text=notes.txt", *words]
    assert said in lmtrain("pretrain", *words, f"run.dir={tmp_path}/run", code=code)
    assert not (tmp_path / "run").exists()


def test_a_folder_of_compressed_texts(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "texts/more").mkdir(parents=True)
    for number, page in enumerate(sorted(toy.text.iterdir())[:12]):
        place = "texts" if number % 2 else "texts/more"
        (tmp_path / place / f"{page.name}.gz").write_bytes(gzip.compress(page.read_bytes()))
    (tmp_path / "texts/README.md").write_text("not read")
    said = lmtrain("pretrain", f"data.text={tmp_path}/texts", *tiny(toy, tmp_path / "run", train__steps=3))
    assert "12 files, " in said
    assert "dataset: 12 documents, " in said
    assert "1 file left out (.md). Add data.text_suffixes=[.md] to read it as text." in said


def test_several_texts_in_one_line(
    toy: Toy, notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(notes.parent))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    for number, page in enumerate(sorted(toy.text.iterdir())[:4]):
        (tmp_path / f"src/{number}.{'py' if number else 'txt'}").write_text(page.read_text())
    text = "[~/notes.txt,src/*]"
    words = [f"data.text={text}", "data.text_suffixes=[.py]", *tiny(toy, tmp_path / "run", train__steps=3)]
    assert plan(*words)["text"].startswith(f"{text}: 5 files, ")
    assert "5 documents" in lmtrain("pretrain", *words)
    again = lmtrain("pretrain", *words, "train.steps=4")
    assert f"data.text={text} is unchanged: " in again
    assert f"made of {text}" in lmtrain("inspect", tmp_path / "run")
    config = json.loads((tmp_path / "run/config.json").read_text())["data"]
    assert (config["text"], config["text_suffixes"]) == (["~/notes.txt", "src/*"], [".py"])
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    found = json.loads(lmtrain("pretrain", "--from-run", tmp_path / "run", "--print-config", "--json"))["data"]
    assert found["text"] == ["~/notes.txt", f"{tmp_path}/src/*"]
    said = lmtrain("pretrain", "--from-run", tmp_path / "run", "train.steps=5")
    assert f"data.text=[~/notes.txt,{tmp_path}/src/*] is unchanged: " in said
    monkeypatch.chdir(tmp_path)
    said = lmtrain("pretrain", *words, "run.dir=new", "data.text_limit=1KiB", code=2)
    made = "data/texts_tokenizer"
    assert f"lmtrain tokenizer train {notes} 'src/*' --output {made} --vocab-size 512 --suffix .py\n" in said
    assert f"lmtrain preprocess {notes} 'src/*' --tokenizer {made} --output data/texts --suffix .py\n" in said


def test_a_text_that_no_run_has_begun_with_may_be_cut_otherwise(toy: Toy, notes: Path, tmp_path: Path) -> None:
    words = [word for word in tiny(toy, tmp_path / "run", train__steps=3) if "optim.lr" not in word]
    words = [f"data.text={notes}", "model=bert_tiny", *words, "train.valid_interval_steps=2", "data.split=[0.5,0.5]"]
    said = lmtrain("pretrain", *words, code=2)
    assert "Cut plain text into documents with data.text_split=blank-line, or set data.valid_path=PREFIX" in said
    said = lmtrain("pretrain", *words, "data.text_split=blank-line")
    assert "tokenizer: WordPiece, 512 pieces, trained on this text" in said
    assert "text_split was blank-line then and is file now" in lmtrain("pretrain", *words, code=65)


def test_lines_with_another_key(toy: Toy, tmp_path: Path) -> None:
    lines = [json.dumps({"content": page.read_text(), "id": 1}) for page in sorted(toy.text.iterdir())[:9]]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    words = [f"data.text={tmp_path}/lines.jsonl", *tiny(toy, tmp_path / "run", train__steps=3)]
    said = lmtrain("pretrain", *words, code=65)
    assert "(its keys: 'content', 'id'). Name the key of the text with data.text_key=KEY." in said
    assert not (tmp_path / "run").exists()
    assert "dataset: 9 documents, " in lmtrain("pretrain", *words, "data.text_key=content")


def test_another_runs_weights_and_tokenizer(toy: Toy, notes: Path, tmp_path: Path) -> None:
    first, more = tmp_path / "first", tmp_path / "more.txt"
    more.write_text(notes.read_text().upper())
    lmtrain("pretrain", *toy.settings(first, train__steps=3))
    said = lmtrain(
        "pretrain", f"checkpoint.init_from={first}", f"data.text={more}", *tiny(toy, tmp_path / "a", train__steps=3)
    )
    assert f"tokenizer: BPE, 400 pieces, read from {first}/checkpoints/step_00000003/tokenizer.json" in said
    assert f"a new run with the weights of {first}/checkpoints/step_00000003" in said
    branch = ["--from-run", first, f"data.text={more}", f"run.dir={tmp_path}/b"]
    said = lmtrain("pretrain", *branch)
    assert f"tokenizer: BPE, 400 pieces, read from {first}/checkpoints/step_00000003/tokenizer.json" in said
    assert f"a new run with the weights of {first}/checkpoints/step_00000003" in said
    assert "continuing from" in lmtrain("pretrain", *branch, "train.steps=4")  # the same line goes on
    own = {Tokenizer.load(tmp_path / name / "data/text.tokenizer.json").fingerprint for name in ("a", "b")}
    assert own == {Tokenizer.load(toy.tokenizer).fingerprint}
    # a branch without a text of its own reads the dataset of its source
    said = lmtrain("pretrain", "--from-run", tmp_path / "b", f"run.dir={tmp_path}/c", "train.steps=5")
    assert f"tokens of {tmp_path}/b/data/text" in said or f"continuing from {tmp_path}/b" in said
    assert not (tmp_path / "c/data").exists()


def plan(*words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lmtrain("pretrain", *words, "--dry-run", "--json").splitlines()[-1])
    return found


def test_a_dry_run_makes_nothing_and_says_what_a_start_would(
    toy: Toy, notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"data.text={notes}", *tiny(toy, tmp_path / "run", train__steps=3)]
    exact = plan(*words)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr("lmtrain.start.dataset_from_text._PREVIEW_BYTES", notes.stat().st_size // 3)
    limit = 0.9 * exact["epochs"]  # because: the beginning of the text alone would be read three times as often
    estimated = plan(*words, f"data.max_epochs={3 * limit}")
    assert "epochs" not in estimated.get("warning", "")
    assert "which is more than data.max_epochs=" in plan(*words, f"data.max_epochs={limit / 2}")["warning"]
    assert " about " in estimated["text"]
    assert estimated["vocabulary"] == exact["vocabulary"]
    assert abs(estimated["training_samples"] / exact["training_samples"] - 1) < 0.2
    assert abs(estimated["epochs"] / exact["epochs"] - 1) < 0.25
    lmtrain("pretrain", *words)
    made = plan(*words)
    assert "text" not in made
    assert [made[key] for key in ("training_samples", "vocabulary")] == [
        exact[key] for key in ("training_samples", "vocabulary")
    ]


def test_other_commands_take_the_text_and_make_nothing(toy: Toy, notes: Path, tmp_path: Path) -> None:
    words = [f"data.text={notes}", *tiny(toy, tmp_path / "run", train__steps=3)]
    assert f"data.text={notes}" in lmtrain("slurm", "render", *words, "--tasks-per-node", 1)
    assert "gpt, " in lmtrain("plan", f"data.text={notes}", "model=gpt_tiny", "hardware=cpu", "gpus=1")
    said = lmtrain("data", "blend", *words, code=66)
    assert f"{tmp_path}/run/data/text is not made yet: a run makes it of data.text={notes} before its" in said
    assert not (tmp_path / "run").exists()


def test_sentences_for_bert(toy: Toy, notes: Path, tmp_path: Path) -> None:
    words = [word for word in tiny(toy, tmp_path / "run", train__steps=3) if "optim.lr" not in word]
    said = lmtrain("pretrain", f"data.text={notes}", "model=bert_tiny", *words, "data.text_split=blank-line")
    assert "tokenizer: WordPiece, 512 pieces, trained on this text" in said
    dataset = IndexedDataset.open(tmp_path / "run/data/text")
    assert dataset.num_sequences > dataset.num_documents > 20


def test_at_80_columns_no_command_is_broken(notes: Path, tmp_path: Path) -> None:
    said = on_terminal("pretrain", f"data.text={notes}", f"run.dir={tmp_path}/run", "data.text_limit=20KiB", code=2)
    assert f"\n  lmtrain preprocess {notes} --tokenizer data/notes_tokenizer --output data/notes\n" in said


@pytest.mark.wide
def test_a_sweep_makes_one_dataset_for_all_its_runs(toy: Toy, notes: Path, tmp_path: Path) -> None:
    words = [f"data.text={notes}", *tiny(toy, tmp_path / "runs", train__steps=3, optim__lr="1e-3,2e-3")]
    lmtrain("pretrain", "-m", *words)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("text.idx")] == ["runs/data/text.idx"]
    assert lmtrain("pretrain", "-m", *words).count(", which is done") == 2


def test_runs_of_a_sweep_that_make_different_datasets_keep_them_apart(toy: Toy, tmp_path: Path) -> None:
    words = [f"run.dir={tmp_path}/runs", "train.steps=20"]
    shared = plan_runs(RunRequest(["data.text=a.txt", "optim.lr=1e-3,2e-3", *words]))
    assert {str(job.config.data.to_dict()["path"]) for job in shared} == {f"{tmp_path}/runs/data/text"}
    apart = plan_runs(RunRequest(["data.text=a.txt,b.txt", *words]))
    assert [job.config.data.to_dict()["path"] for job in apart] == [f"{job.folder}/data/text" for job in apart]
    [single] = plan_runs(RunRequest(["data.text=a.txt", *words]))
    assert "data.text_dir" not in str(single.overrides)


@pytest.mark.wide
@pytest.mark.parametrize("point", ["text.tokenizer", "text.dataset", "data.slice", "data.publish", "text.record"])
def test_killed_while_the_data_is_made_it_goes_on(toy: Toy, notes: Path, tmp_path: Path, point: str) -> None:
    words = ["pretrain", f"data.text={notes}", *tiny(toy, tmp_path / "run", train__steps=3)]
    process = start(*words, env=ALLOW | {"LMTRAIN_FAULT": f"kill:point={point}"})
    output, _ = process.communicate(timeout=300)
    assert process.returncode == -9, output
    lmtrain(*words)
    lmtrain("tokenizer", "train", notes, "--output", tmp_path / "tokenizer", "--vocab-size", 512)
    lmtrain("preprocess", notes, "--tokenizer", tmp_path / "tokenizer", "--output", tmp_path / "whole")
    assert (tmp_path / "run/data/text.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()


def test_stopped_while_the_data_is_made_it_says_what_is_kept(toy: Toy, notes: Path, tmp_path: Path) -> None:
    words = ["pretrain", f"data.text={notes}", *tiny(toy, tmp_path / "run", train__steps=3)]
    said = lmtrain(*words, code=75, env=ALLOW | {"LMTRAIN_FAULT": "int:point=text.dataset"})
    assert f"SIGINT: no step is saved, and {tmp_path}/run/data keeps what was made of data.text. The same com" in said


@pytest.mark.wide
def test_two_processes_of_one_launcher_share_what_it_made(toy: Toy, notes: Path, tmp_path: Path) -> None:
    settings = tiny(toy, tmp_path / "run", train__steps=3, parallel__dp_shard=2)
    process = start("pretrain", f"data.text={notes}", *settings, "--nproc", 2)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert output.count("tokenizer: BPE, 512 pieces, trained on this text") == 1


def two_ranks(words: list[str], **env: str) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of two processes that another program has started."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": "2"}
    ranks = [start("pretrain", *words, env=place | {"RANK": rank, "LOCAL_RANK": rank} | env) for rank in ("1", "0")]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    return [rank.returncode for rank in ranks], outputs


@pytest.mark.wide
def test_one_of_several_processes_makes_the_data(toy: Toy, notes: Path, tmp_path: Path) -> None:
    settings = tiny(toy, tmp_path / "run", train__steps=3, parallel__dp_shard=2)
    codes, outputs = two_ranks([f"data.text={notes}", *settings])
    assert codes == [0, 0], outputs
    assert ["trained on this text" in output for output in outputs] == [False, True]


@pytest.mark.wide
def test_processes_that_wait_for_the_data_hear_why_there_is_none(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text('{"content": "a"}\n')
    settings = tiny(toy, tmp_path / "run", parallel__dp_shard=2)
    codes, outputs = two_ranks([f"data.text={tmp_path}/lines.jsonl", *settings])
    assert codes == [65, 65], outputs
    assert "No process starts, because rank 0" in outputs[0]
    assert "no key 'text'" in outputs[0]


@pytest.mark.wide
def test_processes_that_wait_for_the_data_end_with_the_one_that_makes_it(toy: Toy, notes: Path, tmp_path: Path) -> None:
    settings = tiny(toy, tmp_path / "run", parallel__dp_shard=2, parallel__timeout_s=3)
    fault = ALLOW | {"LMTRAIN_FAULT": "kill:point=text.dataset:rank=0"}
    codes, outputs = two_ranks([f"data.text={notes}", *settings], **fault)
    assert codes == [76, -9], outputs
    assert "saw no progress for parallel.timeout_s=3" in outputs[0]
