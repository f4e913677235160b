"""What other tools call the commands of lmtrain, and what is said of those that it lacks.

Called by explain_click_errors for a word that is no command.
"""

from __future__ import annotations

from collections.abc import Mapping

from lmtrain.config.ideas_without_counterpart import idea_of
from lmtrain.errors import way

# command of lmtrain -> the names of it in other tools
_NAMES = {
    "pretrain": "train training fit run resume continue restart pretrain-gpt pretrain-bert train-gpt launch start",
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
# group of commands -> its command -> the names of it in other tools
_SUBCOMMANDS = {
    "tokenizer": {"show": "encode info inspect test view print stats vocab size count tokenize",
                  "train": "build learn create make new fit"},
    "data": {"show": "decode peek look head sample print view cat document documents",
             "inspect": "info describe header", "stats": "histogram lengths count length",
             "merge": "join concat cat concatenate combine",
             "verify": "check validate fsck", "blend": "mix mixture weights", "split": "train-test-split cut"},
    "corpus": {"get": "download", "dedupe": "dedup deduplicate duplicates minhash near-dedup exact-dedup",
               "clean": "filter normalize quality fix repair clear", "sample": "subsample subset head draw",
               "list": "ls datasets available", "shuffle": "randomize", "decontaminate": "decontam contamination",
               "build": "run pipeline make", "merge": "concat cat combine", "split": "train-test-split"},
    "runs": {"list": "ls all show status", "plot": "curve curves graph chart", "diff": "compare cmp"},
    "config": {"list": "ls presets models choices", "explain": "show help describe docs get what"},
    "slurm": {"submit": "sbatch run start launch",
              "render": "show print write script generate make create pretrain train"},
}
# group of commands -> sentence -> the names of commands that it lacks
_NO_SUBCOMMANDS = {
    "tokenizer": {
        "No token is added to a tokenizer here: add them with transformers' `tokenizer.add_tokens` and "
        "`save_pretrained`, and give the folder as --tokenizer.": "extend add add-tokens add-special-tokens expand",
        "Tokenizers of other programs are read as they are: tokenizer.json, vocab.json with merges.txt, vocab.txt.":
            "convert import from-hf load from-tiktoken from-sentencepiece",
        "`lmtrain data show PREFIX` shows a dataset's tokens as text; in Python, "
        "`lmtrain.Tokenizer.load(PATH).decode(IDS)` does it for any ids.": "decode detokenize",
        "A tokenizer is not fetched here: `hf download NAME --local-dir DIR` does, and DIR is given as --tokenizer.":
            "download get fetch",
        "`lmtrain tokenizer show A --data FILES` and the same for B count the tokens of each.": "compare diff",
    },
    "data": {
        "`lmtrain preprocess FILES --tokenizer PATH` makes a dataset of texts.":
            "preprocess tokenize prepare import create build make add convert",
        "The order of a dataset is that of its texts: `lmtrain corpus shuffle` before, and a run draws at random.":
            "shuffle",
        "`lmtrain corpus dedupe` works on texts, before `lmtrain preprocess`.": "dedupe dedup deduplicate filter clean",
        "`lmtrain corpus list` shows what can be fetched.": "list ls download get fetch",
        "`lmtrain data show PREFIX > FILE` prints its texts.": "export to-text to-jsonl untokenize",
    },
    "corpus": {
        "`lmtrain preprocess FILES --tokenizer PATH` makes a dataset of texts.": "tokenize preprocess prepare",
        "`lmtrain tokenizer show TOKENIZER --data FILES` counts documents, characters, bytes and tokens.":
            "count stats info inspect",
        "There is no search for personal data here: mask it before, as datatrove's formatter for it does.":
            "pii anonymize redact mask scrub",
    },
    "runs": {
        "A run is started again by `lmtrain pretrain --from-run RUN`.": "resume continue start restart",
        "`lmtrain inspect RUN` shows a run, and `lmtrain report RUN` writes a page.": "info inspect report page",
        "RUN/metrics.jsonl holds the numbers of a run, one JSON object a line, and `lmtrain.metrics(RUN)` gives them "
        "in Python.": "export csv metrics to-csv download dump history",
        "`lmtrain watch RUN` follows a run.": "watch tail follow log logs monitor",
    },
    "config": {
        "`lmtrain pretrain ... --print-config` prints the settings of a run; > FILE keeps them.":
            "print dump export save init new create edit set generate",
        "`lmtrain pretrain ... --dry-run` checks the settings of a run.": "check validate verify lint",
        "`lmtrain runs diff A B` compares the settings of two runs.": "diff compare",
    },
    "slurm": {
        "`squeue` and `scancel` of Slurm show and end jobs; a file STOP in run.dir ends a run for good.":
            "cancel stop kill status list ls queue squeue",
        "A job starts itself again, and `lmtrain slurm submit` with the same words goes on.": "resume requeue restart",
    },
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
    return _meant(_NAMES, name, word) or explain_absent(name) or idea_of(name)


def explain_subcommand(verb: str, word: str) -> str | None:
    """Return the marked advice for a word that is no command of the group `verb`, such as "tokenizer", but one of other
    tools; None if it is not known.
    """
    name = word.lower().replace("_", "-")
    absent = _named(_NO_SUBCOMMANDS.get(verb, {}), name) or explain_absent(name)
    return _meant(_SUBCOMMANDS.get(verb, {}), name, word) or absent or idea_of(name)


def explain_absent(word: str) -> str | None:
    """Return the sentence on a command that lmtrain lacks; None if the word is not known as one."""
    return _named(_ABSENT, word)


def _meant(names_by_command: Mapping[str, str], name: str, word: str) -> str | None:
    """Return the marked advice to type the command that other tools call `name` in place of `word`; None if no command
    has this name.
    """
    command = _named(names_by_command, name)
    return command and f"Did you mean {way(*command.split(), instead_of=word)}?"


def _named(table: Mapping[str, str], name: str) -> str | None:
    """Return the key of a table among whose names `name` is; None if it is among none."""
    return next((key for key, names in table.items() if name in names.split()), None)
