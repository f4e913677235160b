"""What other tools call the commands of lmtrain, and what is said of those that it lacks.

Called by explain_click_errors for a word that is no command.
"""

from __future__ import annotations

from lmtrain.errors import way

# command of lmtrain -> the names of it in other tools
_NAMES = {
    "pretrain": "train training fit run resume continue pretrain-gpt pretrain-bert train-gpt launch start",
    "preprocess": "tokenize prepare prepare-data preprocess-data encode build-dataset tokenize-data dataset process",
    "tokenizer train": "spm-train train-tokenizer train-bpe tokenizer-train",
    "eval": "evaluate evaluation test validate benchmark lm-eval score perplexity",
    "generate": "sample infer inference chat complete completion prompt text-generation predict",
    "export": "convert-to-hf to-hf save-pretrained convert-to-transformers export-hf",
    "import": "convert-from-hf from-hf convert-from-transformers load import-hf",
    "inspect": "info show describe view print summary summarize ls-checkpoint",
    "runs list": "ls list ps status jobs experiments history",
    "runs plot": "plot curve curves loss graph chart",
    "runs diff": "diff compare",
    "watch": "tail follow monitor log logs top tensorboard dashboard",
    "data inspect": "stats dataset-info count head",
    "data show": "decode peek look sample-data",
    "data merge": "merge-datasets concat cat join",
    "data split": "split train-test-split",
    "slurm submit": "sbatch submit srun",
    "pretrain -m": "sweep grid search hparams tune multirun",
    "reshard": "convert repartition split-checkpoint merge-tp",
    "merge": "average avg soup average-checkpoints swa",
    "branch": "fork decay cooldown anneal rewind-run",
    "plan": "estimate flops memory autotune profile-memory",
    "corpus get": "download fetch get-data",
    "corpus dedupe": "dedup deduplicate dedupe",
    "config list": "configs models presets recipes",
    "env": "doctor version versions collect-env check-env",
}
# sentence -> the names of commands that lmtrain lacks
_ABSENT = {
    "A model is not fine-tuned here. `lmtrain export RUN --to hf --output DIR` writes it for tools that do.":
        "finetune sft dpo rlhf lora peft instruct align ppo grpo",
    "Nothing is served here. `lmtrain export RUN --to hf --output DIR` writes the model for servers such as vLLM.":
        "serve server api deploy host",
    "No model is quantized here. `lmtrain export RUN --to hf --output DIR` writes it for tools that do.":
        "quantize quant gguf to-gguf convert-to-gguf ggml awq gptq",
    "Nothing is uploaded here. `lmtrain export RUN --to hf --output DIR` writes the folder that a hub takes.":
        "push upload publish push-to-hub share",
    "A run is not wound back: `lmtrain pretrain --from-run RUN/checkpoints/step_NNNNNNNN run.dir=NEW` goes on from an "
    "earlier checkpoint, and `lmtrain data show --run RUN --sample FIRST-LAST` shows what it read.":
        "rewind rollback revert undo replay",
    "A run stops by Ctrl-C, by `touch RUN/STOP`, or by scancel under Slurm.": "stop kill cancel pause end abort",
    "Runs and checkpoints are removed by `rm -r FOLDER`; `lmtrain inspect RUN --all` lists the checkpoints with their "
    "sizes.": "delete rm remove clean prune",
}  # fmt: skip


def explain_verb(word: str) -> str | None:
    """Return the marked advice for a word that is no command but that of another tool; None if it is not known."""
    name = word.lower().replace("_", "-").removesuffix(".py")
    for verb, names in _NAMES.items():
        if name in names.split():
            return f"Did you mean {way(*verb.split(), instead_of=word)}?"
    return explain_absent(name)


def explain_absent(word: str) -> str | None:
    """Return the sentence on a command that lmtrain lacks; None if the word is not known as one."""
    return next((said for said, names in _ABSENT.items() if word in names.split()), None)
