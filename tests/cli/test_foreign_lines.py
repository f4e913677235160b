"""A line that was written for another tool is answered with what to paste, and that works."""

from __future__ import annotations

import shlex

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


@pytest.mark.parametrize(
    ("foreign", "typed", "said"),
    [
        (MEGATRON,
         ["--nproc 2", "parallel.tp=2", "train.rampup={start: 8, increment: 8, samples: 64}", "schedule.min_ratio=0.1",
          "schedule.warmup_steps=10", "optim.betas=[0.9,0.95]", "data=blend", "run.dir=ck", "model.norm=rmsnorm",
          "data.datasets=[{path: a, weight: 0.3}, {path: b, weight: 0.7}]", "train.valid_samples=32",
          "data.split=[949,50,1]", "model.tied=false"],
         ["--vocab-file: The tokenizer is stored with the dataset", "--use-flash-attn: The kernels are chosen"]),
        pytest.param(
            MEGATRON_DECODER,
            ["model.positions=rotary", "model.rotary_share=0.5", "model.rotary_scaling=llama3",
             "model.rotary_factor=4", "model.rotary_original_len=8192", "model.qk_norm=head", "model.bias=qkv",
             "model.activation=relu2", "model.norm_weight=from_zero", "model.window=32", "model.layer_pattern=wf"],
            ["--layer-types: model.layer_pattern says it with a letter for each layer"],
            marks=pytest.mark.wide,
        ),
        (NANOGPT,
         ["train.global_batch=48", "train.micro_batch=12", "train.valid_samples=240", "schedule=constant",
          "compute.compile=false", "data.path=x"],
         ["--foo has no counterpart that lmtrain knows", "config/train.py: lmtrain reads no settings from a program"]),
        (TRAINER,
         ["train.global_batch=8", "schedule.warmup_steps=10", "observe.wandb=online", "optim=adamw", "precision=bf16"],
         ["--num_train_epochs: A run counts steps or tokens"]),
        (TITAN, ["--nproc 2", "train.micro_batch=4", "optim.lr=3e-4", "observe.log_interval_steps=5"],
         ["--parallelism.context_parallel_degree: There is no context parallelism here"]),
    ],
    ids=["megatron", "megatron decoder", "nanogpt", "trainer", "titan"],
)  # fmt: skip
def test_a_whole_line_is_translated_and_works(foreign: str, typed: list[str], said: list[str]) -> None:
    text = lmtrain("pretrain", *shlex.split(foreign), code=2)
    words = shlex.split(text.partition("Type:\n")[2].replace("\\\n", ""))
    line = " ".join(words)
    assert [word for word in typed if f" {word} " not in f"{line} "] == []
    assert [note for note in said if note not in text] == []
    assert " --load" not in line
    assert "checkpoint.resume" not in line
    lmtrain(*words[1:], "--print-config")


def test_a_verb_without_processes_of_its_own_names_the_layout() -> None:
    text = lmtrain("slurm", "render", "data.path=x", "--num-gpus", "2", "--lr", "1", code=2)
    assert "2 processes follow from the layout: parallel.dp_shard=2." in text
    assert "--nproc" not in text


def test_what_is_not_here_is_said_where_it_stands_alone() -> None:
    assert "There is no mixture of experts here." in lmtrain("pretrain", "--num-experts", "8", code=2)
    assert "There is no context parallelism here" in lmtrain("pretrain", "data.path=x", "parallel.cp=2", code=2)


def test_what_cannot_be_reckoned_with_is_said_and_nothing_is_dropped() -> None:
    said = lmtrain("pretrain", "--warmup-ratio", "inf", "--train-iters", "10", code=2)
    assert "--warmup-ratio is schedule.warmup_steps here" in said
    assert "0.3 a 0.7" in lmtrain("pretrain", "--data-path", "0.3", "a", "0.7", "--train-iters", "10", code=2)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("reshard run --tp 2", "--tp is part of a layout: type --to tp=2."),
        ("reshard run --tp=2 --pipeline-parallel-size 4", "--tp is part of a layout: type --to tp=2,pp=4."),
        ("reshard run --to tp=2 --dp 4", "--dp is part of a layout: type --to tp=2,dp_shard=4."),
        ("export run --to megatron --output o --tp 2", "--tp is part of a layout: type --layout tp=2."),
        ("reshard run --dtyp fp32", "`lmtrain reshard --help` lists its options."),  # --dtype is only there to refuse
        ("verify run --tp 2", "`lmtrain verify --help` lists its options."),
        ("pretrain --nodes 3", "`lmtrain slurm render --gpus-per-node N` writes the job"),
        ("slurm render --nnodes 3", "Did you mean --nodes?"),
    ],
)
def test_axes_and_nodes_lead_to_options_that_there_are(line: str, said: str) -> None:
    assert said in lmtrain(*line.split(), code=2)
