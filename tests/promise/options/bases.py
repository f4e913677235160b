"""A command line of every verb that succeeds in the small world; options are tried on it.

A new verb needs a line here, as no other place knows what it takes.
"""

from __future__ import annotations

from hashlib import sha256

from tests.promise.options.small_world import RECIPE, SMALL

RUN = f"{SMALL} run.dir=runs/new"
STEP = "corpus.jsonl --output out.jsonl --workers 1"

BASES = {
    "lmtrain": "config show model gpt_tiny",
    "corpus list": "",
    "corpus get": "wikitext103_raw wiki.zip --output got",
    # because: a file that is there already needs no network
    "corpus fetch": f"https://localhost:1/x --sha256 {sha256(RECIPE.encode()).hexdigest()} --output recipe.yaml",
    "corpus clean": f"{STEP} --rule none",
    "corpus rules": "",
    "corpus dedupe": STEP,
    "corpus sign": "corpus.jsonl --work work --workers 1",
    "corpus match": "--work work",
    "corpus join": "--work work",
    "corpus drop": "corpus.jsonl --work work --output out.jsonl --workers 1",
    "corpus decontaminate": f"{STEP} --against eval.jsonl",
    "corpus split": "corpus.jsonl --output split --ratios 0.6,0.2,0.2 --workers 1",
    "corpus shuffle": "corpus.jsonl --output out.jsonl",
    "corpus sample": f"{STEP} --count 9",
    "corpus merge": "out.jsonl",
    "corpus build": "recipe.yaml --workers 1",
    "tokenizer train": "corpus.jsonl --output made --vocab-size 280",
    "tokenizer show": "tokenizer",
    "preprocess": "corpus.jsonl --tokenizer tokenizer --output out --workers 1",
    "data inspect": "data/a",
    "data verify": "data/a",
    "data merge": "data/a data/b --output joined",
    "data split": "data/a --shares 50,50 --output one --output two",
    "data show": "data/a",
    "data sample": "data/a",
    "data decode": "data/a 0 1",
    "data stats": "data/a",
    "data index": SMALL,
    "data blend": SMALL,
    "config list": "optim",
    "config show": "model gpt_tiny",
    "config explain": "optim.lr model=gpt_tiny",
    "pretrain": RUN,
    "slurm render": f"{RUN} --tasks-per-node 1",
    "slurm submit": f"{RUN} --tasks-per-node 1 --dry-run",
    "inspect": "runs/a/checkpoints/step_00000004",
    "trace": "runs/a",
    "report": "runs/a",
    "runs list": "runs",
    "runs diff": "runs/a runs/b",
    "runs plot": "runs/a",
    "eval": "runs/a --task perplexity --data eval.jsonl --device cpu",
    "generate": "runs/a --prompt Hello --max-new-tokens 90 --device cpu",
    "import": "hf --output imported",
    "export": "runs/a --to megatron --output exported",
    "reshard": "runs/a --to tp=2 --output resharded --workers 1",
    "merge": "--last 2 --of runs/a --output merged --workers 1",
    "branch": "runs/a --at 2",
    "plan": "model=gpt_tiny hardware=h100 gpus=8 tokens=1B --top 2",
    "watch": "runs/a --once",
    "verify": "runs/a",
    "env": "",
    "demo": "",
}

# what has to be run first
_SIGN = "corpus sign corpus.jsonl --work work --workers 1", "corpus match --work work --exact"
BEFORE = {
    "corpus match": _SIGN,
    "corpus join": (*_SIGN, "corpus match --work work"),
    "corpus drop": (*_SIGN, "corpus match --work work", "corpus join --work work"),
    "corpus merge": tuple(f"corpus sample {STEP} --fraction 0.5 --part {part}/2" for part in (0, 1)),
}
