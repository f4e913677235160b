"""What other tools and other verbs call the options of lmtrain: one table for all verbs, in lower case with dashes.

Called by explain_click_errors for an option that a verb does not have. A synonym counts where the verb has the option;
names of settings are in foreign_options.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence

from lmtrain.start.other_tools.options_by_verb import ABSENT, ANYWAY, WORDS

# option of lmtrain -> the names of it in Megatron-LM, Hugging Face, lm-evaluation-harness, nanoGPT, litgpt and others
OPTIONS = {
    "--output": "-o --out --output-dir --output-path --output-file --outfile --output-folder --save-dir --save "
    "--save-path --save-to --output-prefix --output-name --dest --destination --out-dir --out-file --dst --target-dir "
    "--destdir --dest-dir --work-dir --save-directory --local-dir --save-filepath",
    "--key": "--column --columns --text-column --text-field --field --fields --json-key --json-keys --keys --text-key "
    "--content-key --text-column-name --jsonl-keys --text-keys --fields.text-field-name -k",
    "--workers": "-j -w --num-workers --num-proc --processes --num-processes --nprocs --procs --threads --num-threads "
    "--jobs --n-jobs --preprocessing-num-workers --n-tasks --tasks --n-workers --local-tasks --cpu-count --num-cpus",
    "--tokenizer": "--tokenizer-model --tokenizer-path --tokenizer-name --tokenizer-file --tokenizer-dir --vocab-file "
    "--vocab --tokenizer-name-or-path --tokenizer-name-or-dir --bpe "
    "--encoding-model --model --model-name-or-path --tokenizer.name-or-path --tokenizer-id --tokenizer-dir -t",
    "--vocab-size": "--vocab --n-vocab --num-tokens --size --vocabsize",
    "--task": "--tasks --task-name --benchmark --benchmarks -t",
    "--data": "--dataset --data-path --data-file --input --text --file --valid-data --valid-data-path",
    "--batch-size": "--batch --micro-batch-size --per-device-eval-batch-size --eval-batch-size --bs --max-batch-size "
    "--eval-micro-batch-size -b",
    "--seq-len": "--seq-length --sequence-length --max-seq-len --max-seq-length --context-length --max-length "
    "--block-size --window --eval-seq-length",
    "--stride": "--overlapping-eval --window-stride",
    "--limit": "--max-samples --num-examples --max-examples --sample-limit -L",
    "--samples": "--log-samples --samples-file",
    "--nproc": "--num-gpus --gpus --devices --n-gpus --ngpu --nproc-per-node --num-processes --world-size",
    "--max-new-tokens": "--max-length --max-tokens --max-gen-len --max-gen-length --num-tokens --length "
    "--num-new-tokens --tokens-to-generate --out-seq-length --max-output-tokens --n-predict --predict "
    "--num-tokens-to-generate -n",
    "--temperature": "--temp",
    "--top-k": "--topk --k",
    "--top-p": "--topp --p --nucleus",
    "--num-samples": "--num-return-sequences --n-samples --n --samples --num --num-completions",
    "--prompt": "--start --text --prompts --input --input-text --prefix -p",
    "--seed": "--random-seed --rng-seed --data-seed --random-state --sampling-seed -s",
    "--precision": "--dtype --torch-dtype --mixed-precision --params-dtype",
    "--dtype": "--export-dtype --save-dtype --output-dtype --target-dtype --weights-dtype "
    "--precision --torch-dtype --params-dtype --outtype --target-params-dtype",
    "--device": "--accelerator --device-type",
    "--weights": "--use-weights --model-weights",
    "--number": "--num --count --num-samples --limit",
    "--count": "--num --number -n --num-samples --num-documents --n-samples --sample-size --size",
    "--fraction": "--share --ratio --rate --frac",
    "--shares": "--split --splits --ratios --weights --ratio --split-ratio",
    "--ratios": "--split --splits --shares --ratio",
    "--threshold": "--jaccard --jaccard-threshold --similarity --sim --similarity-threshold",
    "--rule": "--rules --filter --filters",
    "--against": "--eval-data --eval-files --tasks-dir --reference",
    "--split": "--split-by",
    "--overwrite": "--force -f --overwrite-output-dir --overwrite-cache --clobber --yes -y",
    "--append-eod": "--append-eos --add-eos --eod --add-eod",
    "--prepend-bos": "--add-bos --append-bos --prepend-bod",
    "--to": "--format --target --target-format --saver --model-type --export-format",
    "--from": "--source --source-format --loader --format",
    "--kind": "--type --algorithm --model-type --method",
    "--format": "--input-format --input-type --file-type --file-format --type --data-format",
    "--json": "--as-json --output-json --print-json",
    "--max-memory": "--memory --ram --max-ram",
    "--memory": "--max-memory --ram --max-ram",
    "--nodes": "--nnodes --num-nodes --n-nodes -N",
    "--run": "--run-dir --rundir",
    "--every": "--interval --refresh -n --seconds --reload-interval",
    "--where": "--filter --query",
    "--top": "--num --limit -n --count",
    "--lowercase": "--do-lower-case --do-lowercase --lower-case --lower --uncased",
    "--max-bad": "--max-errors --max-bad-lines",
    "--shard-tokens": "--shard-size --tokens-per-shard --max-shard-tokens",
    "--at": "--at-step --at-steps --step --steps --from-step --ckpt-step --branch-at",
    "--steps": "--checkpoints --checkpoint-steps",
    "--step": "--steps",
    "--decay-steps": "--anneal-steps --cooldown-steps --annealing-steps --lr-decay-steps --num-decay-steps "
    "--decay-iters --lr-decay-iters --anneal-iters",
    "--decay-tokens": "--anneal-tokens --cooldown-tokens",
    "--shape": "--decay-type --decay-shape --decay-style --lr-decay-style --schedule --lr-scheduler-type --type",
    "--partition": "--queue",
    "--account": "--project",
    "--time": "--walltime --max-time --wall-time --time-limit",
}
# argument of a verb, by its name in the program -> options that other tools have for it
ARGUMENTS = {
    "inputs": "dataset datasets dataset-path dataset-file texts train-files trainpref "
    "input input-file input-files input-path input-dir data files file source text data-path train-file "
    "corpus documents document data-folder data-files data-dir train-data-path train-data path paths",
    "checkpoint": "checkpoint model ckpt checkpoint-path ckpt-path model-path model-dir checkpoint-dir load path "
    "input model-name-or-path pretrained ckpt-dir run run-dir in-dir input-dir load-path load-dir path-to-checkpoint "
    "checkpoint-file pretrained-checkpoint pretrained-model-name-or-path",
    "checkpoints": "checkpoint checkpoints model models ckpt ckpts input inputs load",
    "source": "source input model checkpoint ckpt checkpoint-path model-path load load-dir hf-model path input-dir "
    "model-name-or-path checkpoint-dir hf-path load-path from-pretrained pretrained pretrained-model-name-or-path",
    "path": "path checkpoint model ckpt run dataset input load file tokenizer run-dir checkpoint-dir folder model-dir "
    "load-dir",
    "prefix": "prefix input dataset data data-path path data-prefix input-prefix",
    "prefixes": "prefix prefixes input inputs dataset datasets data data-path path data-prefix",
    "run": "run run-dir path out-dir output-dir checkpoint load logdir from from-run source trunk",
    "runs": "run runs run-dir path logdir",
    "folders": "folder folders run runs dir logdir path",
    "name": "name corpus dataset",
    "url": "url uri link",
    "recipe": "recipe config file config-file",
    "output": "output out output-dir",
    "text": "text prompt input",
}
# options of other tools for a size of the layout that lmtrain reshard writes -> its name in --to
SIZES = {
    name: size
    for size, names in {
        "tp": "tp tp-size tensor-parallel-size tensor-model-parallel-size target-tensor-parallel-size",
        "pp": "pp pp-size pipeline-parallel-size pipeline-model-parallel-size target-pipeline-parallel-size",
        "dp_shard": "dp-shard dp target-data-parallel-size data-parallel-size",
    }.items()
    for name in names.split()
}
# options of Megatron-LM's preprocess_data.py and its like that have no counterpart -> why
LEFT_OUT = {
    "tokenizer-type": "The tokenizer's file says of which type it is.",
    "merge-file": "The merges are read from merges.txt beside vocab.json.",
    "partitions": "All workers write one dataset together.",
    "log-interval": "The progress is always shown.",
    "dataset-impl": "There is one format of datasets.",
    "keep-newlines": "Line ends are kept.",
    "keep-sequential-samples": "The order of the documents is kept.",
    "find-optimal-num-workers": "Without --workers, every core has one.",
    "chunk-size": "The size of the pieces is chosen automatically.",
    "vocab-extra-ids": "The tokenizer's file holds all tokens.",
    "trust-remote-code": "No code of a model is ever run.",
    "apply-chat-template": "Models are evaluated as they are trained, without a chat template.",
    "verbosity": "Messages are always complete.",
    "verbose": "Messages are always complete.",
    "quiet": "Progress is shown on stderr, and results on stdout.",
    "q": "Progress is shown on stderr, and results on stdout.",
    "v": "Messages are always complete.",
    "do-sample": "--temperature 0 chooses the likeliest token, and any other temperature samples.",
    "num-nodes": "The command runs on this machine.",
}

# verbs -> options of other tools that have no counterpart: only that is said of them
NOTHING = {
    "preprocess": "adapter default-metadata id-key fields.id-field-name save-loss-metadata save-final-metadata skip "
    "save-filename repeat-sequence fast-dev-run ftfy lang language max-size tokenizer.encode-special-tokens "
    "tokenizer.segment-before-tokenization",
    "corpus dedupe": "dedupe.name dedupe.paragraphs.attribute-name dedupe.documents.attribute-name dedupe.skip-empty "
    "bloom-filter.file bloom-filter.size-in-bytes bloom-filter.desired-false-positive-rate bloom-filter.read-only "
    "min-length idx-column clean-cache",
    "corpus get": "include exclude resume-download force-download split subset repo-type",
    "corpus clean": "min-length max-length remove-urls lowercase normalize",
    "data split": "stratify stratify-by-column",
    "data merge": "multimodal",
    "data show": "skip columns",
    "tokenizer train": "accept-language normalization-rule-name normalization-rule-tsv denormalization-rule-tsv "
    "add-dummy-prefix add-prefix-space remove-extra-whitespaces split-by-unicode-script split-by-number "
    "split-by-whitespace split-digits treat-whitespace-as-suffix allow-whitespace-only-pieces required-chars "
    "hard-vocab-limit use-all-vocab unk-surface enable-differential-privacy limit-alphabet continuing-subword-prefix "
    "end-of-word-suffix max-token-length max-sentencepiece-length max-sentence-length dropout unicode-normalizer "
    "trim-offsets vocabulary-output-piece-score",
    "tokenizer show": "output-format id",
    "generate": "best-of keep max-time escape padding-text prefix-text xlm-language logit-bias grammar "
    "grammar-file json-schema in-prefix in-suffix lora task detokenize skip-special-tokens "
    "spaces-between-special-tokens clean-up-tokenization-spaces include-stop-str-in-output truncate-prompt-tokens "
    "num-tokens-to-prompt guided-decoding structured-outputs guided-json guided-regex output-attentions "
    "output-hidden-states return-dict-in-generate watermarking-config assistant-model token-healing dola-layers "
    "num-assistant-tokens prompt-lookup-num-tokens quantize quantization load-in-8bit load-in-4bit prompt-cache "
    "add-bos special",
    "eval": "force-conversion question-suffix decontamination-ngrams-path description-dict-path metadata "
    "hf-hub-log-args trackio-args wandb-config-args access-token push-to-hub quantize",
    "export": "no-safe-serialization max-shard-size num-shards exclude-frozen-parameters target-expert-parallel-size "
    "target-data-parallel-size convert-checkpoint-from-transformers-to-megatron",
    "import": "instruct special-tokens llama-version num-shards target-expert-parallel-size cache-dir",
    "reshard": "target-expert-parallel-size use-distributed-optimizer",
    "merge": "parameters",
    "inspect": "optimizer pattern grep",
    "trace": "rank ranks",
    "report": "title name open browser project entity smoothing smooth ylim xlim",
    "watch": "lines key keys metric -d differences",
    "runs list": "limit -n best project entity tag tags",
    "runs plot": "smoothing smooth ylim xlim xmin xmax ymin ymax title legend width last relative project entity "
    "style color colors",
}


def option_named(option: str, own_options: Collection[str]) -> str | None:
    """Return which of a verb's `own_options` other tools call `option`; None if there is none."""
    name = option.lower().replace("_", "-") if option.startswith("--") else option
    return next((own for own, names in OPTIONS.items() if own in own_options and name in names.split()), None)


# words that options share which have nothing in common
_PLAIN_WORDS = {
    "add", "disable", "do", "enable", "from", "is", "n", "no", "num", "of", "set", "the", "to", "use", "with",
}  # fmt: skip


def is_known(option: str) -> bool:
    """Return whether an option is one that the tables have for some verb."""
    name = option.lower().replace("_", "-")
    by_verb = [names for _, by_sentence in (*ANYWAY, *ABSENT) for names in by_sentence.values()]
    names_of_words = (names for _, names, _ in WORDS)
    tables = (*ARGUMENTS.values(), *NOTHING.values(), *by_verb, *names_of_words)
    plain = [name for names in tables for name in names.split()]
    return name.lstrip("-") in (*plain, *SIZES, *LEFT_OUT) or any(name in names.split() for names in OPTIONS.values())


def layout_named(units: Iterable[Sequence[str]]) -> dict[str, str]:
    """Return option -> size of a layout, such as "tp=2", for the units that other tools have for one."""
    words = {unit[0].partition("=")[0]: unit[0].partition("=")[2] or unit[-1] for unit in units}
    names = {option: option.lstrip("-").lower().replace("_", "-") for option in words if option.startswith("--")}
    return {option: f"{SIZES[name]}={words[option]}" for option, name in names.items() if name in SIZES}


def argument_named(option: str, arguments: Sequence[str]) -> str | None:
    """Return which of a verb's `arguments` other tools give by the option `option`; None if there is none."""
    name = option.lstrip("-").lower().replace("_", "-")
    return next((own for own in arguments if name in ARGUMENTS.get(own, "").split()), None)


def misspelt(option: str, own_options: Collection[str]) -> list[str]:
    """Return the options of which `option` can be a misspelling: most letters are the same, or all but one.

    because: a name that only looks alike, as --mem does like --time, is another thing
    """
    name = option.lstrip("-")
    found = difflib.get_close_matches(name, [own.lstrip("-") for own in own_options], cutoff=0.5)
    misspelt = []
    for own in found:
        blocks = difflib.SequenceMatcher(None, name, own).get_matching_blocks()
        num_letters, num_others = len(name) + len(own), len(name) + len(own) - 2 * sum(block.size for block in blocks)
        if num_others <= max(2, num_letters // 4):
            misspelt.append(f"--{own}")
    return misspelt


def named_alike(option: str, own_options: Iterable[str]) -> list[str]:
    """Return the options that share a word with `option`, as --min-tokens does with --min-length."""
    words = {*option.lstrip("-").split("-")} - _PLAIN_WORDS
    return [own for own in sorted(own_options) if words & {*own.lstrip("-").split("-")}]
