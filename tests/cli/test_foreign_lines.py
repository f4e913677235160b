"""A line that was written for another tool is answered with what to paste, and that works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.harness import lmtrain

MEGATRON = (
    "--tensor-model-parallel-size 2 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 "
    "--micro-batch-size 4 --global-batch-size 16 --rampup-batch-size 8 8 64 --train-iters 1000 --lr 6e-4 "
    "--lr-decay-style cosine --min-lr 6e-5 --lr-warmup-fraction .01 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 "
    "--bf16 --data-path 0.3 a 0.7 b --vocab-file v.json --split 949,50,1 --save ck --load ck --swiglu --use-flash-attn "
    "--normalization RMSNorm --untie-embeddings-and-output-weights --eval-iters 2 --num-gpus 2"
)
MEGATRON_DECODER = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --train-iters 10 --data-path a "
    "--position-embedding-type rope --rotary-percent 0.5 --rope-scaling-factor 4 --use-rope-scaling --qk-layernorm "
    "--add-qkv-bias --disable-bias-linear --squared-relu --apply-layernorm-1p --window-size 31,0 "
    "--window-attn-skip-freq 2 --layer-types x"
)
NANOGPT = (
    "--batch_size=12 --n_layer=6 --n_embd=192 --n_head=6 --block_size=64 --learning_rate=6e-4 --min_lr=6e-5 "
    "config/train.py --eval_iters=20 --max_iters=50 --compile=False --decay_lr=False --dtype=float16 "
    "--gradient_accumulation_steps=4 --foo=1 "
    "data.path=x"
)
TRAINER = (
    "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --warmup_ratio 0.1 --max_steps 100 --seed 3 "
    "--output_dir o --bf16 True --fp16 False --report_to wandb --num_train_epochs 3 --optim adamw_torch data.path=x"
)
TITAN = (
    "--training.local_batch_size 4 --parallelism.tensor_parallel_degree 2 --optimizer.lr 3e-4 --training.steps 100 "
    "--parallelism.context_parallel_degree 2 --metrics.log_freq 5 data.path=x"
)


def final_words(text: str) -> list[str]:
    """The words after `lmtrain` of the command that an error message ends with, but for a place to fill in."""
    words = shlex.split(re.split(r"\nType[^\n]*:\n", text)[-1].replace("\\\n", ""))
    words = words[words.index("lmtrain") + 1 :]  # because: environment variables stand before it
    return [word for word in words if word != "data.path=PREFIX"]


@pytest.mark.parametrize(
    ("foreign", "typed", "said"),
    [
        (MEGATRON,
         ["--nproc 2", "parallel.tp=2", "train.rampup={start: 8, increment: 8, samples: 64}", "schedule.min_ratio=0.1",
          "schedule.warmup_steps=10", "optim.betas=[0.9,0.95]", "data=blend", "run.dir=ck", "model.norm=rmsnorm",
          "data.datasets=[{path: a, weight: 0.3}, {path: b, weight: 0.7}]", "train.valid_samples=32",
          "data.split=[949,50,1]", "model.tied=false"],
         ["--vocab-file v.json: The tokenizer is stored with the dataset", "--use-flash-attn: The kernels are chosen",
          "--eval-iters 2 is train.valid_samples=32 here, 2 x train.global_batch."]),
        pytest.param(
            MEGATRON_DECODER,
            ["model.positions=rotary", "model.rotary_share=0.5", "model.rotary_scaling=llama3",
             "model.rotary_factor=4", "model.rotary_original_len=8192", "model.qk_norm=head", "model.bias=qkv",
             "model.activation=relu2", "model.norm_weight=from_zero", "model.window=32", "model.layer_pattern=wf"],
            ["--layer-types x: model.layer_pattern says it with a letter for each layer"],
            marks=pytest.mark.wide,
        ),
        (NANOGPT,
         ["train.global_batch=48", "train.micro_batch=12", "train.valid_samples=240", "schedule=constant",
          "compute.compile=false", "data.path=x"],
         ["--foo=1 has no counterpart that lmtrain knows", "config/train.py: lmtrain reads no settings from"]),
        (TRAINER,
         ["train.global_batch=8", "schedule.warmup_steps=10", "observe.wandb=online", "optim=adamw", "precision=bf16"],
         ["--num_train_epochs 3: train.steps is given."]),
        (TITAN, ["--nproc 2", "train.micro_batch=4", "optim.lr=3e-4", "observe.log_interval_steps=5"],
         ["--parallelism.context_parallel_degree 2: There is no context parallelism here"]),
    ],
    ids=["megatron", "megatron decoder", "nanogpt", "trainer", "titan"],
)  # fmt: skip
def test_a_whole_line_is_translated_and_works(foreign: str, typed: list[str], said: list[str]) -> None:
    text = lmtrain("pretrain", *shlex.split(foreign), code=2)
    words = final_words(text)
    line = " ".join(words) + " "
    assert [word for word in typed if f" {word} " not in line] == []
    assert [note for note in said if note not in text] == []
    assert " --load" not in line
    assert "checkpoint.resume" not in line
    lmtrain(*words, "--print-config")


@pytest.mark.parametrize(
    ("foreign", "typed", "said"),
    [
        ("--grad_clip=0.0", "optim.clip_norm=null", "--grad_clip=0.0 is optim.clip_norm=null here."),
        ("--wandb_log=True --wandb_project=p", "observe.wandb=online observe.wandb_project=p", ""),
        ("--wandb_log=False", "", "--wandb_log=False: It is off here as well."),
        ("--beta2=0.99", "optim.betas=[0.9,0.99]", ""),
        ("--exit-interval 7", "stages.first.steps=7 stages.first.stop_after=true stages.rest.steps=993",
         "is a stop between two stages here, of train.steps=1000 together"),
        ("--exit-interval 2000", "", "--exit-interval 2000: The run ends at train.steps=1000."),
        ("--cutoff_len 64", "model.seq_len=64", "Documents are cut to samples of model.seq_len tokens"),
        ("lr_schedule=none", "schedule=constant", "lr_schedule=none is schedule=constant here."),
        ("--freeze_layers 2 --lr-find", "", "--freeze_layers 2: Nothing is frozen here"),
        ("--cpu", "compute.device=cpu", ""),
        ("--seq-length 32 --max-position-embeddings 64", "model.seq_len=32 model.num_positions=64", ""),
        ("--seq-length 32 --max-position-embeddings 64 --position-embedding-type rope",
         "model.seq_len=32 model.positions=rotary", "--max-position-embeddings 64: Rotary positions"),
        ("--num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
         "model.num_layers=8 parallel.pp=2 parallel.vp=2 parallel.schedule=interleaved --nproc 2", ""),
        ("--init_from=gpt2 --eval_only=False --compile --device=mps", "compute.compile=true compute.device=cpu",
         "--init_from=gpt2: checkpoint.init_from=FOLDER"),
        ("--per_device_train_batch_size 8 --fp16 --logging_steps 5 --warmup_ratio 0.05 --gradient_checkpointing",
         "train.micro_batch=8 precision=fp16 observe.log_interval_steps=5 recompute=full train.global_batch=8 "
         "schedule.warmup_steps=50", ""),
        ("--model.flavor 8B --optimizer.name AdamW --metrics.enable_wandb",
         "optim=adamw observe.wandb=online model=llama3_8b", ""),
        ("--train.max_tokens 1000000 --precision bf16-mixed --devices 2 --data TextFiles --eval.max_iters 4",
         "train.tokens=1000000 precision=bf16 parallel.dp_shard=2 train.valid_samples=32 --nproc 2",
         "--data TextFiles: The data are named by data.path=PREFIX"),
        ("--load_best_model_at_end True --save_steps 5 --eval_steps 5",
         "checkpoint.keep_best=1 checkpoint.interval_steps=5 train.valid_interval_steps=5", ""),
        ("--rampup-batch-size '[2, 2, 40]' --global-batch-size 8 --micro-batch-size 2 --train-iters 40",
         "'train.rampup={start: 2, increment: 2, samples: 40}' train.global_batch=8 train.micro_batch=2 "
         "train.steps=40", ""),
        ("--split '[98, 2, 0]' --window-size '(128, 0)'", "data.split=[98,2,0] model.window=129", ""),
        ("--adam-betas '[0.9, 0.99]'", "optim.betas=[0.9,0.99]", ""),
        *((f"{name} {word}", "", f"{name} {word}: A run resumes from its own run.dir by itself.")
          for name, word in (("--resume_from_checkpoint", "True"), ("--resume_from_checkpoint", "auto"),
                             ("--load", "latest"), ("--resume", "last"))),
        ("--eval-iters 0 --fp16 --bf16 True", "train.valid_interval_steps=0 precision=bf16",
         "--fp16: --bf16 True sets precision too."),
    ],
)  # fmt: skip
def test_an_option_whose_value_changes_is_translated_and_named(foreign: str, typed: str, said: str) -> None:
    text = lmtrain("pretrain", "data.path=x", *shlex.split(foreign), code=2)
    assert final_words(text) == ["pretrain", "data.path=x", *shlex.split(typed)]
    assert said in text
    lmtrain(*final_words(text), "--print-config")


@pytest.mark.parametrize(
    ("typed", "first", "second"),
    [
        ("--data-path a b", "epochs: 1", "epochs: 1"), ("--data-path 0.3 a 0.7 b", "weight: 0.3", "weight: 0.7"),
        ("data_path=a,b", "epochs: 1", "epochs: 1"), ("data_path=[a,b]", "epochs: 1", "epochs: 1"),
        ("data_path='a,b'", "epochs: 1", "epochs: 1"), ("data.path=a,b", "epochs: 1", "epochs: 1"),
    ],
)  # fmt: skip
def test_datasets_are_blended_by_weight_or_size(typed: str, first: str, second: str) -> None:
    words = final_words(lmtrain("pretrain", *typed.split(" "), code=2))
    assert words == ["pretrain", "data=blend", f"data.datasets=[{{path: a, {first}}}, {{path: b, {second}}}]"]
    lmtrain(*words, "--print-config")


@pytest.mark.parametrize(
    ("foreign", "typed"),
    [
        ("per_device_train_batch_size=8 max_steps=60 warmup_steps=0.1",
         "train.micro_batch=8 train.global_batch=8 train.steps=60 schedule.warmup_steps=6"),
        ("beta2=0.99 grad_clip=0.0 use_flash_attn=True", "optim.betas=[0.9,0.99] optim.clip_norm=null"),
        ("lr=1e-4 min_lr=0 lr_decay_style=WSD lr_wsd_decay_iters=100",
         "optim.lr=1e-4 schedule.min_ratio=0 schedule.decay_fraction=0.1 schedule=wsd"),
        ("eval_strategy=no save_steps=0.5 optim=adamw_torch",
         "train.valid_interval_steps=0 checkpoint.interval_steps=500 optim=adamw"),
        ("moe_layer_freq=2 wandb_log=False max_iters=9", "train.steps=9"),
        ("-m learning_rate=1e-3,3e-4 seed=1,2", "-m optim.lr=1e-3,3e-4 train.seed=1,2"),
        ("-m warmup_ratio=0.1,0.2 per_device_train_batch_size=2,4",
         "-m schedule.warmup_steps=100,200 train.micro_batch=2,4 train.global_batch=${train.micro_batch}"),
        ("learning_rate=1e-3,3e-4", "optim.lr=1e-3,3e-4 -m"),
        ("optimizer=sgd", "optim=NAME"), ("optim=sgd", "optim=NAME"), ("callbacks=x hooks=y", ""),
        ("checkpoint.resume=latest", ""), ("resume=latest NCCL_DEBUG=WARN CUDA_VISIBLE_DEVICES=0,1", ""),
        ("recompute=true parallel.zero=false eval.tasks=none model.qk_norm=false",
         "recompute=full parallel.zero=0 eval.tasks=[] model.qk_norm=none"),
        ("-m seed=1 data_seed=1,2,3", "-m train.seed=1,2,3"), ("MAX_STEPS=9", "train.steps=9"),
        ("checkpoint.keep_best=false train.valid_interval_steps=null", "checkpoint.keep_best=0 "
         "train.valid_interval_steps=0"), ("checkpoint.keep_best=true train.valid_interval_steps=500",
         "checkpoint.keep_best=1 train.valid_interval_steps=500"), ("mixed_precision=no", "precision=fp32"),
        ("use_flash_atn=true warmup_rato=0.1 val_split_fraction=10",
         "schedule.warmup_steps=100 data.split=[90,10,0]"),
        ("chekcpoint.init_from=gpt2 INDEX_DIR=x", "checkpoint.init_from=gpt2 data.index_dir=x"),
        ("schedule=wsd schedule_decay=linear", "schedule=wsd schedule.decay=linear"),
        ("-m parallel=single parallel.dp_shard=100_000 gbs=6,8",
         "-m parallel=single parallel.dp_shard=1 train.global_batch=6,8"),
        ("parallel.dp_shard=3 --nproc 3 gbs=6", "parallel.dp_shard=3 --nproc 3 train.global_batch=6"),
        ("-m --nproc 6 parallel.dp_shard=6 gbs=4,8,16", "-m --nproc 6 parallel.dp_shard=6 train.global_batch=6,12,18"),
    ],
)  # fmt: skip
def test_a_name_without_dashes_keeps_its_meaning(foreign: str, typed: str) -> None:
    words = final_words(lmtrain("pretrain", "data.path=x", *foreign.split(), code=2))
    assert sorted(words) == sorted(["pretrain", "data.path=x", *typed.split()])


def test_each_option_of_a_sweep_keeps_its_runs_if_another_depends_on_it() -> None:
    text = lmtrain("pretrain", "data.path=x", "-m", "learning_rate=1e-3,3e-4", "min_lr=1e-5", code=2)
    assert "learning_rate=1e-3,3e-4: schedule.min_ratio would be 0.01, 0.0333333 with it" in text
    assert final_words(text) == ["pretrain", "data.path=x", "-m", "optim.lr=1e-3,3e-4"]


def test_a_name_that_another_one_replaces_is_named() -> None:
    text = lmtrain("pretrain", "data.path=x", "-m", "seed=1", "data_seed=1,2,3", code=2)
    assert "seed=1: data_seed=1,2,3 sets train.seed too." in text
    assert "data_seed=1,2,3: It is train.seed here: one seed decides the first weights" in text
    text = lmtrain("pretrain", "data.path=x", "rampup_batch_size: [2, 2, 40]", code=2)
    assert final_words(text) == ["pretrain", "data.path=x", "train.rampup={start: 2, increment: 2, samples: 40}"]


def test_an_environment_variable_is_set_in_a_job() -> None:
    text = lmtrain("slurm", "render", "data.path=x", "NCCL_DEBUG=WARN", code=2)
    assert "--env NCCL_DEBUG=WARN sets it in the job." in text
    assert final_words(text)[:5] == ["slurm", "render", "data.path=x", "--env", "NCCL_DEBUG=WARN"]


TOML = """[training]
steps = 200
local_batch_size = 4
seq_len = 64
[optimizer]
lr = 3e-4
[lr_scheduler]
warmup_steps = 5
decay_ratio = 0.2
[float8]
enable_float8_linear = false
"""
NEOX = """{"data_path": "a,b", "train_iters": 20, "zero_optimization": {"stage": 1}, "warmup": 0.1,
"optimizer": {"type": "Adam", "params": {"lr": 0.0006, "betas": [0.9, 0.95]}}}
"""


@pytest.mark.parametrize(
    ("file", "text", "line", "typed"),
    [
        ("train.toml", TOML, "train.toml --training.steps 20 data.path=x",
         "train.steps=20 train.micro_batch=4 train.global_batch=4 model.seq_len=64 optim.lr=0.0003 "
         "schedule.warmup_steps=5 schedule.decay_fraction=0.2 schedule=wsd data.path=x"),
        ("train.toml", TOML, "--job.config_file train.toml data.path=x train.steps=9",
         "train.steps=9 train.micro_batch=4 train.global_batch=4 model.seq_len=64 optim.lr=0.0003 "
         "schedule.warmup_steps=5 schedule.decay_fraction=0.2 schedule=wsd data.path=x"),
        ("neox.yml", NEOX, "neox.yml",
         "data=blend data.datasets=[{path:a,epochs:1},{path:b,epochs:1}] train.steps=20 parallel.zero=1 "
         "schedule.warmup_steps=2 optim=adamw optim.lr=0.0006 optim.betas=[0.9,0.95]"),
    ],
)  # fmt: skip
def test_a_file_of_another_tool_is_read_for_the_line(
    file: str, text: str, line: str, typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(file).write_text(text)
    words = final_words(lmtrain("pretrain", *line.split(), code=2))
    assert sorted(word.replace(" ", "") for word in words) == sorted(["pretrain", *typed.split()])


def test_a_file_that_is_not_there_or_of_another_kind_is_left_out() -> None:
    text = lmtrain("pretrain", "none.toml", "data.path=x", code=2)
    assert "'none.toml' is not read: a file of settings has the suffix .yaml. Leave it out" in text
    assert final_words(text) == ["pretrain", "data.path=x"]


def test_the_epochs_of_a_text_are_counted(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("Some words of a text, again and again.\n" * 400)
    settings = [f"data.text={text}", f"run.dir={tmp_path / 'run'}", "model.seq_len=32", "per_device_train_batch_size=4"]
    words = final_words(lmtrain("pretrain", *settings, "num_train_epochs=2", code=2))
    steps = int(next(word for word in words if word.startswith("train.steps=")).partition("=")[2])
    epoch = int(next(word for word in final_words(lmtrain(
        "pretrain", *settings, "num_train_epochs=1", code=2
    )) if word.startswith("train.steps=")).partition("=")[2])  # fmt: skip
    assert 0 <= 2 * epoch - steps <= 1 < steps
    words = final_words(lmtrain("pretrain", *settings, "num_train_epochs=2", "save_strategy=epoch", code=2))
    assert f"checkpoint.interval_steps={epoch}" in words
    assert not (tmp_path / "run").exists()


def test_everything_that_a_plan_lacks_is_told_at_once() -> None:
    text = lmtrain("plan", "n_layer=6", "n_head=6", "n_embd=384", code=2)
    assert "gpus is not given" in text
    assert "hardware is not given" in text
    assert final_words(text)[1:] == [
        "model.num_layers=6", "model.num_heads=6", "model.width=384", "gpus=COUNT", "hardware=NAME"
    ]  # fmt: skip


def test_one_dataset_is_no_blend() -> None:
    assert final_words(lmtrain("pretrain", "--data-path", "a", code=2)) == ["pretrain", "data.path=a"]


def test_a_loaded_model_is_resumed_or_begins_a_run() -> None:
    assert final_words(lmtrain("pretrain", "--load", "c", code=2)) == ["pretrain", "checkpoint.resume=c"]
    words = final_words(lmtrain("pretrain", "--load", "c", "--finetune", code=2))
    assert words == ["pretrain", "checkpoint.init_from=c"]


def test_what_a_training_run_cannot_do_is_not_left_out() -> None:
    text = lmtrain("pretrain", "data.path=x", "--eval_only", "--max_iters=3", code=2)
    assert "Start `lmtrain eval RUN --steps all --task perplexity --data FILE`" in text
    assert "Type:" not in text
    assert "Give optim.lr=VALUE." in lmtrain("pretrain", "data.path=x", "--lr", code=2)
    assert "Give train.global_batch=VALUE." in lmtrain("pretrain", "data.path=x", "batch_size=", code=2)


def test_everything_wrong_in_a_line_is_told_together() -> None:
    wrong = ["--dry-rnu", "optim.lrr=1", "--grad_clip=0.5", "train.stepz=4", "--foo", "3"]
    text = lmtrain("pretrain", "data.path=x", *wrong, code=2)
    assert text.startswith("error: 4 things are wrong:\n  1. --dry-rnu is not an option of lmtrain pretrain.")
    assert "--foo 3 has no counterpart" in text
    assert final_words(text) == [
        "pretrain", "data.path=x", "--dry-run", "optim.lr=1", "optim.clip_norm=0.5", "train.steps=4"
    ]  # fmt: skip


def test_options_of_megatrons_preprocessing() -> None:
    foreign = (
        "--input a.jsonl --json-keys text --output-prefix p --vocab-file v --merge-file m --tokenizer-type T "
        "--append-eod --workers 4 --partitions 2 --log-interval 10 --dataset-impl mmap"
    )
    text = lmtrain("preprocess", *foreign.split(), code=2)
    typed = "preprocess a.jsonl --key text --output p --tokenizer v --append-eod --workers 4"
    assert final_words(text) == typed.split()
    assert "--merge-file m is not an option of lmtrain preprocess. The merges are read from merges.txt" in text


def test_a_verb_without_processes_of_its_own_names_the_layout() -> None:
    text = lmtrain("slurm", "render", "data.path=x", "--num-gpus", "2", "--lr", "1", code=2)
    assert "--num-gpus 2 is parallel.dp_shard=2 here." in text
    assert "--nproc" not in text
    text = lmtrain("slurm", "render", "data.path=x", "parallel.dp_shard=2", "--num-gpus", "2", "--lr", "1", code=2)
    assert "--num-gpus 2: The number of processes follows from the layout." in text
    planned = lmtrain("plan", "hardware=h100", "model=gpt2", "--num-gpus", "2", code=2)
    assert final_words(planned) == ["plan", "hardware=h100", "model=gpt2", "gpus=2"]


def test_what_is_not_here_is_said_where_it_stands_alone() -> None:
    assert "There is no mixture of experts here." in lmtrain("pretrain", "--num-experts", "8", code=2)
    assert "There is no context parallelism here" in lmtrain("pretrain", "data.path=x", "parallel.cp=2", code=2)


def test_what_cannot_be_reckoned_with_is_said_and_nothing_is_dropped() -> None:
    said = lmtrain("pretrain", "--warmup-ratio", "inf", "--train-iters", "10", code=2)
    assert "--warmup-ratio inf: It is schedule.warmup_steps here" in said
    said = lmtrain("pretrain", "--data-path", "0.3", "a", "0.7", code=2)
    assert "{path: 0.3, epochs: 1}, {path: a, epochs: 1}, {path: 0.7, epochs: 1}" in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("reshard run --tp 2", "--to tp=2"),
        ("reshard run --tp=2 --pipeline-parallel-size 4", "--to tp=2,pp=4"),
        ("reshard run --to tp=2 --dp 4", "--to tp=2,dp_shard=4"),
        ("export run --to megatron --output o --tp 2", "--layout tp=2"),
        ("reshard run --dtyp fp32", "`lmtrain reshard --help` lists its options."),  # --dtype is only there to refuse
        ("verify run --tp 2", "lmtrain verify has nothing like it."),
        ("pretrain --nodes 3", "`lmtrain slurm render --gpus-per-node N` writes the job"),
        ("slurm render --nnodes 3", "--nodes 3"),
    ],
)
def test_axes_and_nodes_lead_to_options_that_there_are(line: str, said: str) -> None:
    assert said in lmtrain(*line.split(), code=2)
