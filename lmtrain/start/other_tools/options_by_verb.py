"""What other tools call things that a single verb does otherwise, does anyway, or does not do: tables by verb.

Called by explain_verb_options, before the synonyms that hold for all verbs (option_synonyms.py). Names are in lower
case with dashes, short options with a dash of their own; they count for the verbs they stand beside and their
subcommands.
"""

from __future__ import annotations

from collections.abc import Mapping

_READERS = "preprocess, tokenizer, eval"
_TEXTS = "corpus, preprocess, tokenizer train"
_FIRST = (
    "first head num-docs max-docs max-documents limit count -n n num max-samples num-samples num-documents documents"
)
# verbs that take a file of settings as an argument
FILE_VERBS = "pretrain, slurm, plan, branch, data index, data blend, data show, config explain"
# verbs that read a checkpoint, and what other tools call an option for its step
CHECKPOINT_VERBS = "generate, eval, inspect, export, verify, reshard"
STEP_NAMES = "step ckpt-step iteration global-step load-step checkpoint-step iter"
# options of the tables without a value: a word that follows is not theirs
SWITCHES = (
    "verbose -v quiet -q recursive -r streaming shuffle packing pack batched keep-in-memory skip-empty "
    "show-progress progress decode as- text all full deep quick fast compile no-grad inference-mode "
    "stream do-sample safe-serialization safetensors average uniform summary info list -l follow -f tail live "
    "requeue parsable test-only no-checking sizes -a shuffle-documents shuffle-files skip-completed doc-progress "
    "file-progress split-digits byte-fallback train-extremely-large-corpus shuffle-input-sentence recompute color "
    "ignore-eos mlock no-mmap simple-io log-disable include-prompt return-full-text enforce-eager jit keep-last "
    "no-load-optim no-load-rng no-cache check-integrity write-out predict-only quiet sequential"
)
_TO_LINE_END = "It is printed: > FILE at the end of the line sends it to a file."


def _switch(words: str) -> dict[str, str]:
    """Return the values of a switch that is on, each with `words`."""
    return dict.fromkeys(("", "true", "1", "yes"), words)


# option -> another tool's name of a program -> words
_PROGRAMS = {
    option: {
        **dict.fromkeys(("core", "mcore", "megatron", "megatron-mcore", "legacy", "mg"), f"{option} megatron"),
        **dict.fromkeys(("hf", "llama-mistral", "llama2-hf", "llama-hf", "hf-moe", "mixtral-hf"), f"{option} hf"),
    } for option in ("--format", "--to")
}  # fmt: skip
# (verbs, names, value -> words of lmtrain): "*" is any value, "" none. {value} stands for the value, {last} for the
# number before it, {shares} for the two shares of which it is the second, {number} for the last number in it, {suffix}
# for it with a leading dot, {module} for a line of bash that loads it,
# {file} for a file in it, as in FILE:prompt.txt, {path} for a file or folder that exists, {pretrained} for that of
# pretrained=FOLDER, {train} as {shares}; {part} for the share, {kept} for what it leaves, {thirds} for three shares
WORDS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    (
        _READERS, "sample-by split-by split-on document-separator doc-separator separator documents delimiter",
        {
            **dict.fromkeys(("paragraph", "paragraphs", "blank-line", "\\n\\n", "\n\n"), "--split blank-line"),
            **dict.fromkeys(("line", "lines", "newline", "\\n", "\n"), "--split line"),
            **dict.fromkeys(("document", "file", "whole"), "--split file"),
        },
    ),
    (_READERS, "line-by-line one-per-line split-by-line one-doc-per-line", _switch("--split line")),
    (_READERS, "per-paragraph split-by-paragraph split-by-blank-line by-paragraph", _switch("--split blank-line")),
    (_READERS, "whole-file whole-text-as-example keep-whole", _switch("--split file")),
    (_TEXTS, "extension extensions ext file-extension", {"*": "--suffix {suffix}"}),
    ("preprocess", "max-tokens-per-file", {"*": "--shard-tokens {value}"}),
    ("data show", _FIRST, {"*": "--document 0-{last}"}),
    ("data show", "docs doc index idx row id doc-id document-id range rows indices", {"*": "--document {value}"}),
    ("data show", "random-samples sample-size draw", {"*": "--random {value}"}),
    ("data show", "max-tokens max-length max-len truncate", {"*": "--most {value}"}),
    ("data show", "token-ids tokens raw no-decode show-ids", _switch("--ids")),
    ("corpus sample", _FIRST, {"*": "--count {value}"}),
    (
        "preprocess",
        "limit max-samples max-docs num-docs num-documents first head -n num-samples max-train-samples",
        {"*": "--max-documents {value}"},
    ),
    ("data split", "val-size valid-size test-size val-ratio validation-split val-fraction dev-size test-ratio "
     "eval-size validation-fraction valid-ratio val-split-fraction validation-split-percentage train-test-split "
     "val-split valid-split test-split valid-fraction test-fraction", {"*": "--shares {shares}"}),
    ("inspect", "checkpoints list-checkpoints config settings verbose -v shapes keys tensors "
     "print-checkpoint-structure", _switch("--all")),
    ("inspect", "compare against other", {"*": "--diff {value}"}),
    ("inspect", "check checksum checksums hashes deep", _switch("--verify")),
    ("generate", "start text input input-text", {"*": "--prompt-file {file}"}),
    ("generate", "out-dir", {"*": "{path}"}),
    ("generate", "file -f", {"*": "--prompt-file {value}"}),
    ("generate, eval, import, export", "-m model model-name-or-path", {"*": "{path}"}),
    ("generate", "sample-input-file prompts-file input-file", {"*": "--prompts {value}"}),
    ("generate", "out -o output-file save-to genfile sample-output-file", {"*": "--output {value}"}),
    ("generate", "greedy no-sample no-do-sample", _switch("--temperature 0")),
    ("generate", "do-sample sample", {"false": "--temperature 0"}),
    ("generate", "sampling decoding strategy decoding-strategy", {"greedy": "--temperature 0"}),
    ("report", "html page", {"*": "--output {value}"}),
    ("generate, eval, export, inspect", "ema use-ema load-ema use-ema-weights", _switch("--weights ema")),
    ("generate, eval", "cpu no-cuda use-cpu", _switch("--device cpu")),
    ("generate, eval", "bf16 bfloat16", _switch("--precision bf16")),
    ("generate, eval", "fp16 half float16", _switch("--precision fp16")),
    ("generate, eval", "fp32 float32", _switch("--precision fp32")),
    ("export", "export-dtype save-dtype save-torch-dtype outtype", {
        **dict.fromkeys(("bfloat16", "bf16", "torch.bfloat16"), "--dtype bf16"),
        **dict.fromkeys(("float16", "fp16", "f16", "half", "torch.float16"), "--dtype fp16"),
        **dict.fromkeys(("float32", "fp32", "f32", "float", "torch.float32"), "--dtype fp32"),
    }),
    ("export", "bf16 bfloat16", _switch("--dtype bf16")),
    ("export", "fp16 half float16", _switch("--dtype fp16")),
    ("export", "fp32 float32", _switch("--dtype fp32")),
    ("export", "hf huggingface transformers", _switch("--to hf")),
    ("export", "megatron mcore", _switch("--to megatron")),
    ("import", "hf huggingface transformers", _switch("--format hf")),
    ("import", "megatron mcore convert-checkpoint-from-megatron-to-transformers", _switch("--format megatron")),
    ("import", "loader checkpoint-type load-model-type", _PROGRAMS["--format"]),
    ("export", "saver save-model-type", _PROGRAMS["--to"]),
    ("export", "convert-checkpoint-from-megatron-to-transformers", _switch("--to hf")),
    ("merge", "last-n num-checkpoints num-update-checkpoints num-epoch-checkpoints last-k -n n k",
     {"*": "--last {value}"}),
    ("tokenizer show", "input file input-file", {"*": "--data {path}"}),
    ("tokenizer show", "text prompt string input", {"*": "{value}"}),
    ("eval", "model-args -a", {"*": "{pretrained}"}),
    ("corpus clean", "min-words min-doc-words min-num-words", {"*": "--rule min_words={value}"}),
    ("corpus clean", "max-words max-doc-words max-num-words", {"*": "--rule max_words={value}"}),
    ("corpus split", "train-size train-ratio train-fraction", {"*": "--ratios {thirds}"}),
    ("corpus split", "val-size valid-size val-ratio valid-ratio", {"*": "--ratios {kept},{part},0"}),
    ("corpus split", "test-size test-ratio", {"*": "--ratios {kept},0,{part}"}),
    ("data split", "train-size train-ratio train-fraction train-split", {"*": "--shares {train}"}),
    ("watch", "no-follow one-shot", _switch("--once")),
    ("config", "search find grep query lookup about describe list show get key", {"*": "explain {value}"}),
    ("trace", "attempt start-number", {"*": "--start {value}"}),
    ("tokenizer train", "bpe byte-level byte-level-bpe bbpe", _switch("--kind bpe")),
    ("tokenizer train", "wordpiece", _switch("--kind wordpiece")),
    ("tokenizer train", "model-prefix prefix", {"*": "--output {value}"}),
    ("tokenizer train", "pre-tokenizer pretokenizer regex pre-tokenizer-pattern split-pattern",
     {"*": "--pattern {value}"}),
    ("runs plot", "x x-axis xaxis", {"*": "--by {value}"}),
    ("runs plot", "y metric metrics name tag tags column", {"*": "--key {value}"}),
    ("runs plot", "log-scale logy log-y", _switch("--log")),
    ("eval", "ppl perplexity word-perplexity token-perplexity", _switch("--task perplexity")),
    ("eval", "bits-per-byte bpb bits-per-character bpc byte-perplexity all-metrics details", _switch("--full")),
    ("slurm", "gres", {"*": "--gpus-per-node {number}"}),
    ("slurm", "container-mounts", {"*": "--srun=--container-mounts={value}"}),
    ("slurm", "container-workdir", {"*": "--srun=--container-workdir={value}"}),
    ("slurm", "container-name", {"*": "--srun=--container-name={value}"}),
    ("slurm", "cpu-bind", {"*": "--srun=--cpu-bind={value}"}),
    ("slurm", "mpi", {"*": "--srun=--mpi={value}"}),
    ("slurm", "image container docker", {"*": "--container-image {value}"}),
    ("slurm", "module modules", {"*": "--setup={module}"}),
    ("slurm", "email mail", {"*": "--sbatch=--mail-user={value} --sbatch=--mail-type=END,FAIL"}),
    ("plan", "top-k num-results", {"*": "--top {value}"}),
    ("plan, pretrain, slurm", "gpu-memory gpu-mem gpu-memory-gb gpu-memory-gib gpu-ram vram device-memory hbm",
     {"*": "hardware.memory_GiB={number}"}),
    ("plan", "memory mem ram", {"*": "hardware.memory_GiB={number}"}),
    ("plan", "gpu gpu-type gpu-name machine hw device accelerator", {"*": "hardware={value}"}),
)  # fmt: skip
# verbs -> why an option can be left out -> its names
FORMATS = "input-type input-format file-type file-format data-format"  # needed for files whose suffix is unknown
ANYWAY: tuple[tuple[str, Mapping[str, str]], ...] = (
    (_TEXTS, {
        "The suffix of each file says its format.":
            f"{FORMATS} reader hf-format loader",
        "The suffix of each file says how it is compressed.": "compression decompress",
        "Texts are read as UTF-8; `iconv -f CP1252 -t UTF-8 OLD > NEW` makes UTF-8 of a file in another encoding.":
            "encoding file-encoding input-encoding charset",
        "Folders are read with all that is below them.": "recursive -r",
        "Texts are streamed, and nothing is cached.":
            "streaming cache-dir load-from-cache-file keep-in-memory batched map-batch-size writer-batch-size "
            "buffer-size batch-size work-dir.input work-dir.output local-working-dir",
        "The progress is always shown.": "show-progress progress doc-progress file-progress log-interval",
        "Messages are printed; 2> FILE at the end of the line sends them to a file.": "logging-dir performance-dir",
        "The same command, started again, goes on where it was.": "skip-completed",
    }),
    ("preprocess", {
        "A run draws its samples in a random order; a dataset keeps the order of the texts, which `lmtrain corpus "
        "shuffle` writes in another.":
            "shuffle shuffle-documents shuffle-files shuffle-chunk-size seed random-seed",
        "The texts are shared among the --workers automatically.":
            "workers-to-check files-per-process paths-per-worker ring-size sample-ring-prop local-rank-offset "
            "randomize-start-duration start-method upload-block-size",
        "The tokenizer's file holds all of it.":
            "vocab-size padded-vocab-size make-vocab-size-divisible-by tokenizer-metadata tokenizer-special-tokens "
            "tokenizer-hf-use-fast tokenizer-hf-include-special-tokens tiktoken-pattern tiktoken-num-special-tokens "
            "tiktoken-special-tokens use-fast",
        "Documents are stored whole, and a run cuts them to its model.seq_len.":
            "max-length max-len block-size seq-length seq-len max-seq-len max-seq-length context-length "
            "sequence-length truncation truncate packing pack group-texts stride cutoff-len "
            "sequence-len sample-packing",
        "The tokenizer's file says which token it is.":
            "eos eos-token eod-token eod-id eos-id eos-token-id bos-token bos-token-id tokenizer.bos-token-id "
            "tokenizer.eos-token-id tokenizer.pad-token-id",
        "Numbers are stored as narrow as the vocabulary allows.": "dtype datatype token-dtype",
        "A dataset always has them.": "sidecar checksum checksums",
    }),
    ("corpus dedupe", {"The hashes are chosen for --threshold.":
                       "num-perm num-hashes num-bands bands rows ngram ngram-size num-rows n-grams num-buckets "
                       "hashes-per-bucket hash-func hash-bits b r seed"}),
    ("corpus get", {
        "A corpus is always fetched in the version that its checksums are of.": "revision",
        "No account is needed.": "token use-auth-token",
        "Files are fetched one after another.": "max-workers num-proc",
    }),
    ("corpus", {"It needs no account.": "use-auth-token"}),
    ("corpus shuffle", {"--memory SIZE says how much is sorted at once.": "buffer-size"}),
    ("corpus shuffle, tokenizer train, tokenizer show, data verify, data inspect, verify, corpus get", {
        "Its work is not shared among processes.": "num-proc num-workers workers jobs -j",
    }),
    ("corpus split", {"Documents are assigned by a hash of their text, so their order does not matter.": "shuffle"}),
    ("data inspect", {"All facts of a dataset are shown.": "verbose -v"}),
    ("data stats", {"It is drawn.": "histogram hist plot"}),
    ("branch", {"It only prints the commands.": "dry-run dryrun simulate print-only -n"}),
    ("tokenizer train", {
        "Reading and learning need no such number.":
            "workers num-workers num-proc threads num-threads jobs -j self-test-sample-size seed-sentencepiece-size "
            "shrinking-factor num-sub-iterations train-extremely-large-corpus",
        "Nothing is drawn at random.": "seed random-seed shuffle-input-sentence",
        "Every text can be written with the pieces of bpe, which has all bytes.":
            "initial-alphabet byte-fallback character-coverage alphabet",
        "The tokens that lmtrain itself needs are always there.":
            "eos-token eod-token pad-token unk-token bos-token mask-token cls-token sep-token unk-id bos-id eos-id "
            "pad-id "
            "unk-piece bos-piece eos-piece pad-piece",
    }),
    ("data show", {"Documents are shown as text.": "decode text as-text"}),
    ("data show, data inspect, data stats, data decode, data sample, data verify, data index, data blend, corpus list, "
     "corpus rules, tokenizer show, inspect, runs list, runs diff, verify, env, config",
     {_TO_LINE_END: "output out -o output-file save to outfile output-dir output-path save-dir"}),
    ("data verify, verify", {"Every byte is always read.": "all full deep checksum checksums hashes quick fast"}),
    ("data merge", {"All documents are joined; data=blend of a run gives datasets shares.": "weights"}),
    ("eval", {
        "The folder says which model it is.": "model-type model -m",
        "It only measures, and --steps all measures every checkpoint of a run.":
            "eval-only skip-train do-eval-only test-only do-eval epochs no-train",
        "The checkpoint is only read.":
            "init-from resume finetune no-load-optim no-load-rng keep-last train-data checkpoint-activations "
            "recompute-activations do-train",
        "Nothing is drawn at random.": "seed random-seed -s",
        "lmtrain eval has no such switch.":
            "wandb-args use-cache cache-requests gen-kwargs predict-only show-config include-path write-out "
            "fewshot-as-multiturn system-instruction -c -w -x -v -s no-cache check-integrity confirm-run-unsafe-code "
            "log-interval",
    }),
    ("eval, generate", {
        "The checkpoint has its tokenizer with it.":
            "tokenizer tokenizer-path tokenizer-model tokenizer-name tokenizer-type vocab-file merge-file",
        "The checkpoint has its settings with it.": "config config-file config-path",
        "The fastest way is chosen automatically.": "compile use-cache kv-cache flash-attn no-grad inference-mode jit "
            "enforce-eager attn-implementation cache-implementation recompute disable-compile",
    }),
    ("generate", {
        "Any --temperature above 0 draws at random.": "do-sample",
        "Text is shown as it is made.": "stream streaming",
        "The prompt is printed before its continuation.": "include-prompt return-full-text echo",
        "The folder says which model it is.": "model-type model-name load-format",
        "The model says how many tokens it sees.": "seq-length ctx-size -c max-model-len context-length rope-scaling "
            "rope-freq-base",
        "It runs in one process on one device, and continuations are made one after another.":
            "batch-size -b micro-batch-size max-batch-size max-num-seqs inference-max-requests threads gpu-layers "
            "n-gpu-layers tensor-parallel-size pipeline-parallel-size tensor-model-parallel-size "
            "pipeline-model-parallel-size gpu-memory-utilization device-map swap-space low-memory mlock no-mmap",
        "The text is printed and nothing else.":
            "color simple-io log-disable verbose-prompt single-turn no-conversation perf interactive-first",
        "Nothing is downloaded.": "download-dir cache-dir",
        "There is no beam search here; each text is drawn token by token.":
            "num-beams beam beams beam-size num-beam-groups early-stopping length-penalty",
    }),
    ("import, export", {
        "Weights are always written as safetensors.": "safe-serialization safetensors save-safetensors",
        "The files say which model and tokenizer it is.":
            "tokenizer-type model-type arch architecture model-size model-name config-file position-embedding-type "
            "true-vocab-size make-vocab-size-divisible-by model-type-hf",
        "It needs no other program.":
            "megatron-path loader-transformer-impl saver-transformer-impl max-queue-size no-checking use-temp-file",
    }),
    ("export", {"Weights are always written alone, without the optimizer's state.":
                "model-weights-only weights-only model-only save-weights-only no-optimizer strip-optimizer"}),
    ("export", {"It reads checkpoints of lmtrain.": "loader loader-type load-model-type"}),
    ("export, reshard", {
        "The checkpoint has its tokenizer with it.":
            "tokenizer tokenizer-path tokenizer-model tokenizer-name vocab-file merge-file no-save-tokenizer "
            "vocab-is-hf "
            "skip-tokenizer-conversion",
    }),
    ("import", {"It writes a checkpoint of lmtrain.": "saver save-model-type"}),
    ("reshard, merge", {
        "Checkpoints of lmtrain are read and written.": "loader saver model-type loader-type checkpoint-type",
        "lmtrain has no such switch.":
            "megatron-path max-queue-size no-checking loader-transformer-impl saver-transformer-impl",
        "The checkpoint says which model it is.":
            "position-embedding-type true-vocab-size make-vocab-size-divisible-by model-size",
    }),
    ("merge", {"The weights of each checkpoint count alike unless --mean says otherwise.":
               "average mean-weights uniform method"}),
    ("inspect, data inspect", {"It is shown.": "summary info list -l"}),
    ("inspect", {"--all lists the checkpoints with their sizes.": "sizes size",
                 "It is shown.": "num-params num-parameters params parameters count-parameters non-embedding "
                 "exclude-embeddings total-params model-size"}),
    ("trace", {"A trace is JSON that Perfetto and chrome://tracing open.":
               "format type chrome perfetto chrome-trace export-chrome-trace json-trace"}),
    ("pretrain, slurm, plan", {"Messages are always complete.": "verbose -v quiet -q"}),
    ("runs list", {"All runs below a folder are listed.": "recursive -r all -a"}),
    ("report", {"A report is an HTML file, and a browser prints it as PDF.": "format html type",
                "Keys in the page smooth the curves: s and S.": "smooth smoothing ema",
                "It is a file, and needs no server.": "port host bind-all reload-interval"}),
    ("runs plot", {"It draws in the terminal, once, and needs no server.":
                   "port host bind-all reload-interval samples-per-plugin window-title"}),
    ("watch", {"It goes on until Ctrl-C or the end of the run.": "follow -f tail live"}),
    ("slurm", {
        "The file has --requeue already, and the job goes on where it stopped.": "requeue",
        "The file says already how the log is written.": "open-mode",
        "The job starts in the folder in which the file is made.": "chdir",
        "The file says already what happens when a process is lost.": "no-kill kill-on-bad-exit",
        "The processes follow from the layout and from --gpus-per-node or --tasks-per-node.":
            "ntasks ntasks-per-node ntasks-per-gpu ntasks-per-core ntasks-per-socket gpus gpus-per-task tres-per-task",
        "`lmtrain slurm render` only prints the file.": "parsable wrap test-only",
    }),
)  # fmt: skip
# verbs -> what there is in place of an option that is not here -> its names
ABSENT: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("plan, branch, data, config, import", {
        "It is about one run, with one value of each setting. `lmtrain pretrain -m` and `lmtrain slurm` run several.":
            "-m multirun sweep",
    }),
    ("tokenizer train", {
        "There are no special tokens of your own here. `lmtrain preprocess --tokenizer FOLDER` takes a tokenizer of "
        "transformers that has them.":
            "special-tokens special-token special added-tokens add-tokens additional-special-tokens "
            "user-defined-symbols control-symbols extra-special-tokens special-tokens-file",
        "There is no least frequency to choose here; --vocab-size decides.": "min-frequency min-freq min-count",
        "There is no such tokenizer here. Give --kind bpe or --kind wordpiece.":
            "unigram sentencepiece model-type=unigram model-type=word model-type=char type=unigram algorithm=unigram",
        "There is no option for a part of the texts here. `lmtrain corpus sample` draws one, to give as INPUT.":
            "limit max-samples max-docs sample input-sentence-size max-bytes num-docs sample-size",
    }),
    ("preprocess", {
        "There is no part for validation here. Give data.split=[98,2] to the run, or type `lmtrain data split PREFIX "
        "--shares 98,2` afterwards.":
            "val-ratio valid-ratio val-size validation-split val-split test-size eval-size train-ratio train-split "
            "valid-split validation-fraction val-fraction num-val val-data-path valid-data val-split-fraction",
        "It runs on this machine. `sbatch --wrap 'lmtrain preprocess ...'` runs the whole line on a node.":
            "slurm partition qos time email cpus-per-task mail-user mem-per-cpu account",
        "There is no such check here. `lmtrain data verify PREFIX` reads what was written.":
            "validate sanity-check safe-mode verify",
        "There is no dry run here.": "dryrun dry-run",
        "There is no search for copies here. `lmtrain corpus dedupe` does it before.": "dedup deduplicate dedupe",
        "There is no lower case here but a tokenizer's own. `lmtrain tokenizer train --kind wordpiece --lowercase` "
        "makes one that has it.": "lowercase do-lower-case lower uncased",
        "There are no special tokens of your own here. Give --tokenizer a folder of transformers that has them.":
            "special-tokens add-special-tokens added-tokens",
    }),
    (_TEXTS, {
        "There is no option for it here. A glob is given as INPUT, in quotes.":
            "glob file-pattern glob-pattern",
        "There is no download of datasets here. Give files, such as the Parquet files of a dataset; `lmtrain corpus "
        "list` shows what `lmtrain corpus get` fetches.":
            "dataset-name dataset-config hf-dataset subset repo-id dataset-split hub-dataset hf-repo",
        "There is no file of settings here. Give the options one by one; `lmtrain corpus build FILE` runs the steps "
        "of a recipe.": "config config-file -c",
    }),
    ("report, runs, watch, inspect", {
        "There is no CSV export here. `lmtrain.metrics(RUN)` gives the numbers in Python, and RUN/metrics.jsonl holds "
        "them, one JSON object a line.": "csv to-csv export-csv tsv excel csv-file export",
        "There is no such view here. observe.tensorboard=true and observe.wandb=online of a run write for them.":
            "tensorboard wandb",
    }),
    ("runs", {
        "There are no columns to choose here. `lmtrain.metrics(RUN)` gives the numbers in Python, and "
        "RUN/metrics.jsonl holds them, one JSON object a line.": "metrics metric keys columns fields",
    }),
    ("merge", {
        "There are no weights of your own here. --mean linear gives a checkpoint the more the newer it is, and --mean "
        "uniform all the same.": "weights coefficients alphas alpha ratios densities merge-method merge-type "
        "interpolation slerp ties dare",
    }),
    ("report", {"There is no such format here. --svg DIR writes each picture as SVG.": "pdf png jpg"}),
    ("runs plot", {
        "There are no files of pictures here: it draws in the terminal. `lmtrain report RUN` writes a page, with --svg "
        "DIR its pictures too.": "output out -o save png svg pdf html",
    }),
    ("eval", {
        "The strict protocol of LAMBADA is a task here. Give --task lambada/megatron-strict.": "strict-lambada",
        "There are no examples in prompts here but those of a task. `lmtrain eval --list` shows the tasks and their "
        "protocols.": "num-fewshot fewshot n-shot num-few-shot shots shot k-shot -f",
    }),
    ("generate", {
        "There is no such rule of sampling here. Choose from --temperature, --top-k and --top-p.":
            "repetition-penalty frequency-penalty presence-penalty no-repeat-ngram-size min-p typical-p typical tfs "
            "top-h "
            "repeat-penalty repeat-last-n mirostat mirostat-lr mirostat-ent samplers sampling-seq dynatemp-range "
            "xtc-probability dry-multiplier top-nsigma eta-cutoff epsilon-cutoff encoder-repetition-penalty "
            "encoder-no-repeat-ngram-size diversity-penalty penalty-alpha guidance-scale bad-words bad-words-ids "
            "suppress-tokens begin-suppress-tokens force-words-ids forced-bos-token-id forced-eos-token-id "
            "allowed-token-ids logits-processors sequence-bias constraints exponential-decay-length-penalty "
            "remove-invalid-values renormalize-logits",
        "There is no stop word here. A text ends at the end-of-document token or after --max-new-tokens N.":
            "stop stop-token stop-sequences stop-strings stop-string eos-token-id eos stop-words min-new-tokens "
            "min-length ignore-eos min-tokens stop-token-ids eos-id reverse-prompt bos-token-id pad-token-id "
            "decoder-start-token-id stop-sequence stop-seq stop-text stop-at stop-words-list end-token stop-id",
        "There is no chat here. Give --prompt TEXT.":
            "chat interactive -i conversation -cnv chat-template sys-prompt system-prompt",
        "There are no probabilities in what is printed. `lmtrain.load(RUN)` gives logits in Python.":
            "logprobs prompt-logprobs return-log-probs top-n-logprobs output-logits output-scores n-probs",
        "It means the temperature in some tools, and threads in others. Give --temperature NUMBER; the variable "
        "OMP_NUM_THREADS is for threads.": "-t",
        "The prompt is always printed. --json keeps it apart from the continuation.": "no-display-prompt",
    }),
    ("runs list", {"There is no order to choose here. --json prints what another program can sort.":
                   "sort sort-by order reverse"}),
    (CHECKPOINT_VERBS, {
        "There is no option for the step here. Give the checkpoint's folder, RUN/checkpoints/step_NNNNNNNN.":
            f"{STEP_NAMES} tag -t",
    }),
    ("export", {
        "There is no upload here. `hf upload NAME DIR` takes the folder of --output to a hub.":
            "push-to-hub hub-model-id repo-id upload private",
        "It is shown elsewhere: `lmtrain inspect CHECKPOINT --all`.": "print-checkpoint-structure",
        "There is no such format here. `--to hf` writes a folder, of which llama.cpp's convert_hf_to_gguf.py makes "
        "GGUF, and other tools make other formats.":
            "gguf onnx awq gptq quantize quantization int8 int4 load-in-8bit outfile vocab-only bigendian",
    }),
    ("import", {
        "There is no download here. Give a folder that was downloaded.":
            "push-to-hub revision token hub use-auth-token access-token",
        "There is no layout to choose here. `lmtrain reshard` writes a checkpoint for any.":
            "target-tensor-parallel-size target-pipeline-parallel-size target-tensor-model-parallel-size "
            "target-pipeline-model-parallel-size target-data-parallel-size use-distributed-optimizer",
        "It is shown elsewhere: `lmtrain inspect CHECKPOINT --all`.": "print-checkpoint-structure",
        "There is no number format to choose here: a run keeps its weights in fp32.": "dtype torch-dtype precision",
    }),
    ("data split", {"There is no switch for it here. --seed N draws the documents at random.": "shuffle random"}),
    ("reshard", {"Numbers keep their format here. `lmtrain export --dtype bf16` writes weights in another.":
                 "bf16 fp16 target-params-dtype dtype params-dtype"}),
    ("corpus clean", {"There is no detection of languages here. Give --script latin, or another of its names, to keep "
                      "the texts of a script.": "lang language languages"}),
    ("data show", {
        "Step N of a run reads the samples from (N - 1) x train.global_batch to N x train.global_batch - 1. Give them "
        "as --sample FIRST-LAST, with --run RUN.": "step steps at-step iteration iter batch global-step",
    }),
    ("data show", {"A part of a dataset is written by `lmtrain data split PREFIX --shares 50,50 --seed N`.":
                   "fraction share ratio frac proportion"}),
    ("data show", {"A dataset has no splits. Give the PREFIX of the part.": "split"}),
    ("data show", {"There is no search here. Send what is printed to grep.": "grep search contains filter find"}),
    ("data merge", {"There are no shares here. data=blend of a run mixes datasets.":
                    "ratio proportion mixture blend-weights"}),
    ("slurm", {"There is no file without --requeue here. A file STOP in run.dir ends a job for good.": "no-requeue"}),
    ("data, corpus, runs, report, inspect, verify, trace, watch, env", {
        "There is no dry run here.": "dry-run simulate",
    }),
)  # fmt: skip
