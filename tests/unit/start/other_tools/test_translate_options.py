"""What single options of other tools become, and what is said of those whose values cannot be translated."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from lmtrain.start.other_tools.foreign_files import file_words
from lmtrain.start.other_tools.foreign_translation import Translation
from lmtrain.start.other_tools.translate_foreign_flags import translate_options


def translated(line: str, typed: Sequence[str] = (), from_run: str | None = "") -> Translation:
    """The translation of a line of options, whose values stand behind them, beside typed settings."""
    units = [shlex.split(text) for text in f" {line}".split(" --")[1:]]
    return translate_options([(f"--{name}", *values) for name, *values in units], typed, "", from_run,
                             has_option=lambda option: False)  # fmt: skip


@pytest.mark.parametrize(
    ("line", "settings", "said"),
    [
        ("--seq-length 64 --n_positions 64", "model.seq_len=64", "--n_positions 64: It is model.seq_len=64."),
        ("--num-layers 3 --pp 2 --num-layers-per-virtual-stage 2", "model.num_layers=3 parallel.pp=2",
         "--num-layers-per-virtual-stage 2: It is parallel.vp here: model.num_layers / parallel.pp / the layers of"),
        ("--vp-size 1", "", "--vp-size 1: parallel.vp is 1 by default."),
        ("--vp-size x", "", "--vp-size x: It is parallel.vp here"),
        ("--profile-step-start 3 --profile-step-end x", "",
         "--profile-step-end x: It is observe.profile_steps=[FIRST,LAST] here."),
        ("--finetune false", "", "--finetune false: It is off here as well."),
        ("--target-loss off", "", "--target-loss off: It is off here as well."),
        ("--train-iters x --exit-interval 5", "train.steps=x", "--exit-interval 5: A run stops at run.time_limit"),
        ("--save-strategy epoch", "", "--save-strategy epoch: Saving, validating and logging count steps"),
        ("--max-duration 3ep", "", "--max-duration 3ep: epochs=3 in its place is translated to the steps of"),
        ("--max-duration 30ba", "train.steps=30", "--max-duration 30ba is train.steps=30 here."),
        ("--max-duration 1e6tok", "train.tokens=1e6", "--max-duration 1e6tok is train.tokens=1e6 here."),
        ("--no-rope-freq 4", "model.layer_pattern=fffF", ""), ("--no-warmup-steps 3", "", "unknown"),
        ("--data-path 1.0 a", "data.path=a", "--data-path 1.0 a is data.path=a here."),
        ("--valid-data-path x/a b", "data.valid_paths={a: x/a, b: b}", ""),
        ("--init_from .", "checkpoint.init_from=.", ""),
    ],
)  # fmt: skip
def test_an_option_becomes_settings_or_a_reason(line: str, settings: str, said: str) -> None:
    result = translated(line)
    assert " ".join(f"{key}={value}" for key, value in result.settings.items()) == settings
    assert said in "\n".join([*result.changed, *result.left_out, *("unknown" for _ in result.unknown)])


def test_the_intervals_of_epochs_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Some words of a text, again and again.\n" * 400)
    typed = [f"data.text={tmp_path / 'a.txt'}", f"run.dir={tmp_path / 'run'}", "model.seq_len=32", "model=gpt_tiny"]
    typed += ["train.global_batch=1", "train.micro_batch=1"]
    [epoch] = translated("--save-strategy epoch", typed).settings.values()
    half = translated("--saves-per-epoch 2", typed)
    assert half.settings == {"checkpoint.interval_steps": str(-(-int(epoch) // 2))}
    assert half.changed[0].endswith(", the steps of 0.5 epochs.")
    third = translated("--eval-every-n-epochs 3", typed)
    assert third.settings == {"train.valid_interval_steps": str(3 * int(epoch))}
    assert translated("--save-every-epoch", typed).settings == {"checkpoint.interval_steps": epoch}
    for more in (["+stages.a.steps=5"], ["data=blend"]):  # whose epochs are not those of one dataset
        assert translated("--save-every-epoch", [*typed[1:], "data.path=x", *more]).settings == {}


def test_a_dataset_with_a_very_large_index_is_not_read(tmp_path: Path) -> None:
    for suffix, size in ((".idx", (64 << 20) + 1), (".bin", 1)):
        with (tmp_path / f"d{suffix}").open("wb") as file:
            file.truncate(size)
    assert translated("--save-every-epoch", [f"data.path={tmp_path / 'd'}", "model=gpt_tiny"]).settings == {}


def test_a_run_to_load_brings_its_settings(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = translated(f"--load {tmp_path}")
    assert (result.options, result.settings) == (["--from-run", str(tmp_path)], {})
    assert f"is --from-run {tmp_path} here, with the settings of {tmp_path}." in result.changed[0]
    assert translated(f"--load {tmp_path}", from_run=None).settings == {"checkpoint.resume": str(tmp_path)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"lr": 1e-3, "depth": null, "optim": {"betas": [0.9, 0.98]}}', ["lr=0.001", "optim.betas=[0.9,0.98]"]),
        ("[1]", []), ("{", None), ('{"lr": 1}' + " " * (1 << 18), None),
    ],
)  # fmt: skip
def test_a_file_of_json_is_its_settings(tmp_path: Path, text: str, words: list[str] | None) -> None:
    (tmp_path / "a.json").write_text(text)
    assert file_words(str(tmp_path / "a.json")) == words
