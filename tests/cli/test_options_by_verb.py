"""What is plainly another tool's word, or another thing than a value can be, leads to a line that works."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from lmtrain.cli.settings_keys.parse_typed_line import command_of
from lmtrain.cli.subcommands import HELP
from lmtrain.start.other_tools import options_by_verb as tables
from lmtrain.start.other_tools.option_synonyms import NOTHING, misspelt
from tests.cli.harness import Toy, lmtrain, outcome
from tests.cli.test_foreign_lines import final_words

SLURM = "slurm render data.path=x --gpus-per-node 1"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a text, lines of JSON, a folder of texts and a file of settings."""
    (tmp_path / "notes.txt").write_text("One.\n\nTwo.\n")
    (tmp_path / "docs.jsonl").write_text('{"text": "One."}\n')
    (tmp_path / "more").mkdir()
    (tmp_path / "r" / "checkpoints").mkdir(parents=True)
    (tmp_path / "more" / "a.txt").write_text("One.\n")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("x = 1\n")
    (tmp_path / "run.yml").write_text("train.steps: 4\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "typed"),
    [
        ("preprocess notes.txt --tokenizer t --sample_by paragraph",
         "preprocess notes.txt --tokenizer t --split blank-line"),
        ("preprocess notes.txt --tokenizer t sample_by=paragraph",
         "preprocess notes.txt --tokenizer t --split blank-line"),
        ("preprocess input=notes.txt tokenizer=t append_eod=true", "preprocess notes.txt --tokenizer t --append-eod"),
        ("preprocess --line-by-line notes.txt --tokenizer t", "preprocess --split line notes.txt --tokenizer t"),
        ("preprocess docs.jsonl --input-type jsonl --tokenizer t", "preprocess docs.jsonl --tokenizer t"),
        ("preprocess - --input-type txt --tokenizer t --output o",
         "preprocess - --format txt --tokenizer t --output o"),
        ("preprocess --recursive more --tokenizer t", "preprocess more --tokenizer t"),
        ("preprocess notes.txt --tokenizer t --max-length 512", "preprocess notes.txt --tokenizer t"),
        ("preprocess docs.jsonl --tokenizer t cutoff_len=9", "preprocess docs.jsonl --tokenizer t"),
        ("tokenizer train notes.txt --output o --vocab-size 900 do_lower_case=true",
         "tokenizer train notes.txt --output o --vocab-size 900 --lowercase --kind wordpiece"),
        ("tokenizer train notes.txt --output o --vocab-size 900 --kind BertWordPieceTokenizer",
         "tokenizer train notes.txt --output o --vocab-size 900 --kind wordpiece"),
        ("tokenizer encode t One", "tokenizer show t One"),
        ("eval r --ppl --data notes.txt", "eval r --task perplexity --data notes.txt"),
        ("corpus clean code", "corpus clean code --output FILE --suffix .py"),
        (f"{SLURM} --job-name a --sbatch=--job-name=b", f"{SLURM} --sbatch=--job-name=b"),
        ("tokenizer train notes.txt --output o --model-type bpe --vocab_size 2k",
         "tokenizer train notes.txt --output o --kind bpe --vocab-size 2k"),
        ("data show x --count 20 --output o.txt", "data show x --document 0-19"),
        ("data show x --rows 3", "data show x --document 3"),
        ("generate x --start=FILE:p.txt --greedy", "generate x --prompt-file p.txt --temperature 0"),
        ("generate start=hello x", "generate --prompt hello x"),
        ("generate x --sample-input-file p.txt --greedy", "generate x --prompts p.txt --temperature 0"),
        ("export x --hf --output o", "export x --to hf --output o"),
        ("export r model_weights_only=true export_dtype=bfloat16 --to hf --output o",
         "export r --dtype bf16 --to hf --output o"),
        ("export r --outtype f16 --to hf --output o", "export r --dtype fp16 --to hf --output o"),
        ("corpus dedupe --data_files docs.jsonl,notes.txt --column text --output o",
         "corpus dedupe docs.jsonl notes.txt --key text --output o"),
        ("data split x --val-ratio 0.1",
         "data split x --shares 90,10 --output x_train --output x_valid"),
        ("data split x --split 90,5,5 --output x",
         "data split x --shares 90,5,5 --output x_train --output x_valid --output x_test"),
        (f"{SLURM} --signal=USR1@300 --requeue", f"{SLURM} --sbatch=--signal=USR1@300"),
        (f"{SLURM} --qos high --exclusive -t 1:00:00 --lr 1",
         f"{SLURM} --sbatch=--qos=high --sbatch=--exclusive --time 1:00:00 optim.lr=1"),
        (f"{SLURM} --foo 3 --lr 1 --time 12", f"{SLURM} optim.lr=1 --time=12:00:00"),
        (f"{SLURM} --nodes 2 --lr 1", f"{SLURM} --nodes 2 optim.lr=1 parallel.dp_shard=2"),
        ("pretrain --config run.yml data.path=x", "pretrain run.yml data.path=x"),
        ("pretrain -c run.yml data.path=x", "pretrain run.yml data.path=x"),
        ("pretrain --job.config_file run.yml --lr 1 data.path=x", "pretrain run.yml optim.lr=1 data.path=x"),
        ("pretrain @run.yml data.path=x", "pretrain run.yml data.path=x"),
        ("pretrain config=run.yml data.path=x", "pretrain run.yml data.path=x"),
        ("pretrain --config-dir run.yml data.path=x", "pretrain run.yml data.path=x"),
        ("pretrain data.path=x --adam-betas 0.8 0.99", "pretrain data.path=x optim.betas=[0.8,0.99]"),
        ("pretrain data.path=x --betas=(0.8,0.99)", "pretrain data.path=x optim.betas=[0.8,0.99]"),
        ("pretrain --load r --ckpt-step 10 --save s",
         "pretrain run.dir=s --from-run r/checkpoints/step_00000010"),
        ("pretrain --from-run r --ckpt-step 10",
         "pretrain run.dir=r-from-10 --from-run r/checkpoints/step_00000010"),
        ("pretrain --data-path notes.txt --train-iters 20", "pretrain data.text=notes.txt train.steps=20"),
        ("pretrain data.path=more", "pretrain data.text=more"),
        ("pretrain --data-path notes.txt docs.jsonl", "pretrain data.text=[notes.txt,docs.jsonl]"),
        ("plan gpus=2 --num-layers 2 --gpu-memory 24G --gpu h100",
         "plan gpus=2 model.num_layers=2 hardware.memory_GiB=24 hardware=h100"),
        ("plan gpus=2 model.num_layers=2 hardware=24G",
         "plan gpus=2 model.num_layers=2 hardware=NAME hardware.memory_GiB=24"),
        ("eval --model hf --model_args pretrained=r,dtype=float --tasks perplexity --num_fewshot 0 --data notes.txt",
         "eval r --task perplexity --data notes.txt"),
        ("eval r --eval_only=True --init_from=resume --data notes.txt", "eval r --data notes.txt --task perplexity"),
        ("preprocess --reader jsonl --dataset docs.jsonl --column text --tokenizer-name-or-path t --n-tasks 2",
         "preprocess docs.jsonl --key text --tokenizer t --workers 2"),
        ("preprocess --shuffle True docs.jsonl --tokenizer t", "preprocess docs.jsonl --tokenizer t"),
        ("data split x --val_split_fraction 10", "data split x --shares 90,10 --output x_train --output x_valid"),
        ("data split x val_split_fraction=10", "data split x --shares 90,10 --output x_train --output x_valid"),
        ("data split x", "data split x --shares 98,2 --output x_train --output x_valid"),
        ("export --loader core --saver mcore --load-dir r --save-dir o --no-checking",
         "export --to megatron r --output o"),
        ("export r --to megatron --target-tensor-parallel-size 2 --output o",
         "export r --to megatron --layout tp=2 --output o"),
        ("reshard r --to tp=1,pp=2 --output o --target-tensor-parallel-size 4", "reshard r --to tp=4,pp=2 --output o"),
        ("tokenizer train notes.txt --output o vocab_size=100",
         "tokenizer train notes.txt --output o --vocab-size=257"),
        (f"{SLURM} -o log.txt -q high -n 4", f"{SLURM} --sbatch=--output=log.txt --sbatch=--qos=high"),
        (f"{SLURM} --mem=64G --mail-type=END,FAIL", f"{SLURM} --sbatch=--mem=64G --sbatch=--mail-type=END,FAIL"),
        ("slurm render data.path=x -N 2 --gres=gpu:4 --tensor-model-parallel-size 3 model=gpt_tiny",
         "slurm render data.path=x --nodes 2 --gpus-per-node 4 parallel.tp=4 model=gpt_tiny parallel.dp_shard=2"),
        ("eval r limit=20 task=perplexity data=notes.txt parallel.tp=1",
         "eval r --limit 20 --task perplexity --data notes.txt parallel.tp=1"),
        ("runs diff a b json=", "runs diff a b --json"),
        ("preprocess --input docs.jsonl --json-keys text id --tokenizer t",
         "preprocess docs.jsonl --key text --key id --tokenizer t"),
        ("eval r --task perplexity --data notes.txt --batch_size auto", "eval r --task perplexity --data notes.txt"),
        ("generate r some words", "generate r --prompt 'some words'"),
        ("epxort r --to hf --output o", "export r --to hf --output o"),
        ("tokenizer train notes.txt --output o vocab-size==300",
         "tokenizer train notes.txt --output o --vocab-size 300"),
        ("slurm RENDER data.path=x --gpus-per-node 1", "slurm render data.path=x --gpus-per-node 1"),
        (f"{SLURM} --output=log_%j.txt", f"{SLURM} --sbatch=--output=log_%j.txt"),
        ("tokenizer show t --input notes.txt", "tokenizer show t --data notes.txt"),
        ("corpus split x --test-size 0.1 --output o", "corpus split x --ratios 0.9,0,0.1 --output o"),
        ("generate -m r --temp 0.5", "generate r --temperature 0.5"),
        ("tokenizer show t --text 'a b'", "tokenizer show t 'a b'"),
        ("corpus split x --train-size 0.9 --output o", "corpus split x --ratios 0.9,0.05,0.05 --output o"),
        ("generate --step 10 r --prompt a", "generate r/checkpoints/step_00000010 --prompt a"),
        ("reshard --load r --save s --tp 1 --step 10", "reshard r/checkpoints/step_00000010 --output s --to tp=1"),
        (f"{SLURM} --mail-type ALL", f"{SLURM} --sbatch=--mail-type=ALL"),
        ("report r --output loss.csv", "report r --output loss.html"),
        ("eval r notes.txt --task perplexity", "eval r --data notes.txt --task perplexity"),
        ("preprocess x --tokenizer t --max_train_samples 9", "preprocess x --tokenizer t --max-documents 9"),
    ],
)  # fmt: skip
def test_the_line_to_type(here: Path, line: str, typed: str) -> None:
    assert final_words(outcome(*shlex.split(line))[1]) == shlex.split(typed)


@pytest.mark.parametrize("line", ["env", "generate r", "preprocess docs.jsonl --tokenizer t", "pretrain data.path=x"])
def test_an_environment_variable_stands_before_the_command(here: Path, line: str) -> None:
    for words in ([*line.split(), "NCCL_DEBUG=INFO"], ["NCCL_DEBUG=INFO", *line.split()]):
        assert f"\n  NCCL_DEBUG=INFO lmtrain {line}\n" in outcome(*words)[1]


def test_the_name_of_a_setting_in_capitals_is_no_environment_variable() -> None:
    assert "\n  lmtrain pretrain data.path=x data.index_dir=y\n" in outcome("pretrain", "data.path=x", "INDEX_DIR=y")[1]


def test_what_is_at_a_path_says_which_setting_it_is(here: Path) -> None:
    (here / "some.idx").touch()
    (here / "notes.txt").touch()
    for typed in ("--train_file some", "--data some", "data=some", "--data-path some", "data.text=some"):
        assert final_words(outcome("pretrain", *typed.split())[1]) == ["pretrain", "data.path=some"]
    for typed in ("--train_file notes.txt", "--data notes.txt", "data=notes.txt", "--data-path notes.txt"):
        assert final_words(outcome("pretrain", *typed.split())[1]) == ["pretrain", "data.text=notes.txt"]


def test_what_a_line_without_words_lacks_is_told_with_what_is_left_out(here: Path) -> None:
    said = outcome("pretrain", "--data", "TinyStories")[1]
    assert "--data TinyStories: The data are named by data.path=PREFIX" in said
    assert "data.path is not set." in said
    assert "Type, with PREFIX filled in:\n  lmtrain pretrain data.path=PREFIX\n" in said


def test_a_checkpoint_of_another_run_brings_its_settings(here: Path) -> None:
    (here / "a" / "checkpoints" / "step_00000020").mkdir(parents=True)
    line = ["--resume_from_checkpoint", "a/checkpoint-20", "--output_dir", "b"]
    advised = ["pretrain", "run.dir=b", "--from-run", "a/checkpoints/step_00000020"]
    assert final_words(outcome("pretrain", *line)[1]) == advised
    with_data = final_words(outcome("pretrain", *line, "data.path=x")[1])
    assert "checkpoint.resume=a/checkpoint-20" in with_data


def test_files_without_a_suffix_are_named_one_by_one(here: Path) -> None:
    (here / "wiki").mkdir()
    (here / "wiki" / "wiki_00").write_text('{"text": "One."}\n')
    typed = ["preprocess", "wiki/wiki_00", "--format", "jsonl", "--tokenizer", "t", "--output", "o"]
    assert final_words(outcome("preprocess", "wiki", "--tokenizer", "t", "--output", "o")[1]) == typed


def test_the_folder_of_a_run_is_no_text(here: Path) -> None:
    for name in ("config.json", "metrics.jsonl"):
        (here / "r" / name).write_text("{}\n")
    assert "'r' is the folder of a run. Write run.dir=r to go on with it" in outcome("pretrain", "r")[1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("tokenizer train x --output o --vocab-size 9 --special-tokens a",
         "There are no special tokens of your own here."),
        ("report r --csv loss.csv", "There is no CSV export here."),
        ("runs prune r", "lmtrain runs prune is not a command. Runs and checkpoints are removed by"),
        ("freeze x", "Nothing is frozen here"), ("preprocess docs.jsonl --tokenizer t --deepspeed-ssh x", "torchrun"),
        ("tokenizer decode t 5", "`lmtrain data show PREFIX` shows a dataset's tokens as text"),
        ("eval r --task mmlu_x --data d", "python -m lmtrain.cli.harness run --model=lmtrain"),
        ("eval r --num_fewshot 5", "There are no examples in prompts here"),
        ("generate r --repetition-penalty 1.1", "There is no such rule of sampling here."),
        ("generate r --mirostat 2", "There is no such rule of sampling here."),
        ("generate r --grammar a", "lmtrain generate has nothing like it."),
        ("tokenizer train x --output o --vocab-size 900 --model_type unigram", "There is no such tokenizer here."),
        ("env --append-eod", "It is one of `lmtrain preprocess`."),
        ("merge --gpus 2 r --output o", "lmtrain merge has nothing like it."),
        ("verify r --lr 1e-3", "It is about training, which `lmtrain pretrain` does."),
        ("env --nonsense", "`lmtrain env --help` lists its options."),
        ("eval r --strict-lambada", "Give --task lambada/megatron-strict."),
        ("inspect x --step 10", "Give the checkpoint's folder, RUN/checkpoints/step_NNNNNNNN."),
        ("pretrain --config run.toml data.path=x", "Settings are read from a .yaml file that is one of the words."),
    ],
)  # fmt: skip
def test_what_is_not_here_is_said(here: Path, line: str, said: str) -> None:
    text = lmtrain(*line.split(), code=2)
    assert said in text
    assert "Type" not in text


@pytest.mark.parametrize(
    ("line", "places", "typed"),
    [
        ("preprocess --input notes.txt read.md --tokenizer t", "PREFIX",
         "preprocess notes.txt read.md --tokenizer t --output PREFIX --format txt"),
        ("tokenizer train notes.txt vocab_size=300", "DIR", "tokenizer train notes.txt --vocab-size 300 --output DIR"),
        ("tokenizer train notes.txt --output o", "N", "tokenizer train notes.txt --output o --vocab-size N"),
        ("slurm render data.path=x --mem=64G", "N",
         "slurm render data.path=x --sbatch=--mem=64G --gpus-per-node N"),
        ("eval r --tasks lambada", "PATH", "eval r --task lambada/megatron-strict --data PATH"),
        ("eval r --task perplexity --log-samples --data notes.txt", "FILE",
         "eval r --task perplexity --samples FILE --data notes.txt"),
        ("corpus sample docs.jsonl --out o", "N", "corpus sample docs.jsonl --output o --count N"),
        ("export r --save-dir o", "{hf,megatron}", "export r --output o --to {hf,megatron}"),
        ("reshard r --save o", "LAYOUT", "reshard r --output o --to LAYOUT"),
        ("merge --last-k 2 --out o", "RUN", "merge --last 2 --output o --of RUN"),
    ],
)  # fmt: skip
def test_all_that_is_missing_is_told_at_once(here: Path, line: str, places: str, typed: str) -> None:
    (here / "read.md").write_text("One.\n")
    text = lmtrain(*line.split(), code=2)
    _, found, words = text.partition(f"\nType, with {places} filled in:\n")
    assert found, text
    assert shlex.split(words.replace("\\\n", " "))[1:] == typed.split()
    assert " is refused: " not in text


@pytest.mark.parametrize(
    ("option", "own", "meant"),
    [
        ("--mem", ["--time", "--nodes"], []), ("--greedy", ["--seed"], []), ("--limit", ["--split"], []),
        ("--max-documents", ["--max-tokens"], []), ("--kye", ["--key"], ["--key"]), ("--kez", ["--key"], ["--key"]),
        ("--outptu", ["--output"], ["--output"]), ("--vocabsize", ["--vocab-size"], ["--vocab-size"]),
    ],
)  # fmt: skip
def test_only_a_misspelling_is_taken_for_another_option(option: str, own: list[str], meant: list[str]) -> None:
    assert misspelt(option, own) == meant


def test_what_has_another_form_here_is_not_left_out(here: Path) -> None:
    text = lmtrain("generate", "r", "--greedy", "--top_k", 9, "--tokenizer", "gpt2", code=2)
    assert "\nLeft out: --tokenizer gpt2.\n" in text


def test_a_text_beside_a_dataset_is_preprocessed_with_its_tokenizer(here: Path, toy: Toy) -> None:
    made = f"lmtrain preprocess notes.txt --tokenizer {toy.data}.tokenizer.json --output notes`; then give notes."
    assert made in lmtrain("pretrain", f"data.path={toy.data}", "data.valid_path=notes.txt", "--dry-run", code=2)
    blend = f"data.datasets=[{{path: notes.txt, weight: 1}}, {{path: {toy.data}, weight: 2}}]"
    assert made in lmtrain("pretrain", "data=blend", blend, "--dry-run", code=2)


def test_epochs_are_steps(toy: Toy, tmp_path: Path) -> None:
    words = toy.settings(tmp_path / "run")
    facts = json.loads(lmtrain("pretrain", *words, "--dry-run", "--json"))
    assert facts["steps_per_epoch"] == -(-facts["training_samples"] // 4)
    words = [word for word in words if not word.startswith("train.steps")]
    text = lmtrain("pretrain", *words, "--num-train-epochs", 2, code=2)
    assert f"train.steps={-(-2 * facts['training_samples'] // 4)}" in final_words(text)
    assert not list(toy.data.parent.glob("*.npy"))


def test_a_range_of_documents(toy: Toy) -> None:
    rows = json.loads(lmtrain("data", "show", toy.data, "--document", "1-2", "--document", 0, "--json"))
    assert [row["document"] for row in rows] == [1, 2, 0]
    last = json.loads(lmtrain("data", "stats", toy.data, "--json"))["documents"] - 1
    text = lmtrain("data", "show", toy.data, "--document", f"1-{last + 5}", code=2)
    assert final_words(text)[-2:] == ["--document", f"1-{last}"]
    assert "--document 0-2" in lmtrain("data", "show", toy.data, "--document", "0:3", code=2)


def _verbs(command: Any, words: list[str]) -> list[list[str]]:
    inner = getattr(command, "commands", {})
    return [each for name, one in inner.items() for each in _verbs(one, [*words, name])] if inner else [words]


def test_no_table_names_an_option_that_its_verb_has() -> None:
    from lmtrain.start.other_tools.explain_verb_options import is_among

    for words in (each for name in HELP for each in _verbs(command_of([name])[0], [name])):
        own = {name for param in command_of(words)[0].params for name in param.opts if not getattr(param, "hidden", 0)}
        tables_of_sentences = [*tables.ABSENT, *tables.ANYWAY]
        entries = [(verbs, names) for verbs, by in tables_of_sentences for names in by.values()]
        for verbs, names in (*entries, *NOTHING.items()):
            if is_among(" ".join(words), verbs):
                stale = {name if name.startswith("-") else f"--{name}" for name in names.split()} & own
                assert not stale, (words, stale)
