"""The table of options that cannot be tried with a derived value in the base command of their verb."""

from __future__ import annotations

from typing import Final

from tests.promise.options.bases import RUN, STEP
from tests.promise.options.command_tree import Option
from tests.promise.options.proofs import Row
from tests.promise.options.small_world import PLUGIN, SMALL

_UNKNOWN_SUFFIX = ("corpus.jsonl", "corpus.unknown")
_BAD_LINE = ("corpus.jsonl", "bad.jsonl")
_ERROR: Final = "in an error"
_TEXT = ("corpus.jsonl", "notes.txt")

SHARED = [
    Row("*", "--plugin", (PLUGIN,)),
    Row("*", "--config-dir", ("conf",)),
    Row("*", "--config-name", ("other",), plus="--config-dir conf"),
    Row("*", "--weights", ("ema",)),
    Row("*", "--format", ("txt", "jsonl"), swap=_UNKNOWN_SUFFIX, without=_ERROR),
    Row("*", "--suffix", (".unknown",), swap=_UNKNOWN_SUFFIX, without=_ERROR),
    Row("*", "--device", ("cuda",), ends=_ERROR),  # because: most machines that run this have no GPU
]
CORPUS = [
    Row("tokenizer show", "--data", ("notes.txt",)),
    Row("tokenizer show", "--key", ("other",), plus="--data corpus.jsonl"),
    Row("tokenizer show", "--split", plus="--data notes.txt"),
    Row("tokenizer show", "--format", ("txt", "jsonl"), plus="--data corpus.unknown", without=_ERROR),
    Row("corpus dedupe", "--threshold", ("1.0",)),
    Row("corpus dedupe", "--threshold", base=f"{STEP} --exact-only", ends="refused"),
    Row("corpus dedupe", "--keep", ("longest",)),
    Row("corpus dedupe", "--keep", ("longest",), base=f"{STEP} --exact-only", ends="refused"),
    Row("corpus match", "--threshold", ("1.0",)),
    Row("corpus match", "--threshold", base="--work work --exact", ends="refused"),
    Row("corpus match", "--part", ("1/2",)),
    Row("corpus match", "--part", ("1/2",), base="--work work --exact", ends="refused"),
    Row("corpus drop", "--suffix", (".unknown",), ends=_ERROR),
    Row("corpus *", "--key", ("other",)),
    Row("corpus *", "--on-error", ("skip",), swap=_BAD_LINE, without=_ERROR),
    Row("corpus *", "--part", ("1/2",)),
    Row("corpus *", "--keep", ("longest",)),
    *(
        Row(f"corpus {verb}", "--overwrite", before=(line,), without=_ERROR)
        for verb, line in {
            "get": "corpus shuffle corpus.jsonl --output got/train.jsonl",
            "split": "corpus split corpus.jsonl --output split --seed 1 --workers 1",
            "merge": "corpus shuffle corpus.jsonl --output out.jsonl",
            "*": "corpus shuffle corpus.jsonl --output out.jsonl --seed 7",
        }.items()
    ),
    Row("corpus sign", "--overwrite", before=("corpus sign corpus.jsonl --exact-only --work work --workers 1",),
        without=_ERROR),
    Row("corpus build", "--overwrite", before=("corpus shuffle corpus.jsonl --output built/documents.jsonl --seed 7",),
        without=_ERROR),
    Row("corpus fetch", "--sha256", ("1" * 64,), ends=_ERROR),
    Row("corpus fetch", "--output", ends=_ERROR),
    Row("corpus clean", "--rule", ("min_words=40",)),
    Row("corpus clean", "--script", ("latin",)),
    Row("corpus clean", "--min-script-share", ("0.01",), plus="--script latin"),
    Row("corpus sign", "--work", ("other",)),
    Row("corpus match", "--work", ("other",), ends=_ERROR),
    Row("corpus join", "--work", ("other",), ends=_ERROR),
    Row("corpus drop", "--work", ("other",), ends=_ERROR),
    Row("corpus join", "--parts", ends=_ERROR),
    Row("corpus drop", "--key", ("other",), ends=_ERROR),
    Row("corpus drop", "--on-error", ("skip",), swap=_BAD_LINE, before=(
        "corpus sign bad.jsonl --work work --on-error skip --overwrite", "corpus match --work work --exact",
        "corpus match --work work", "corpus join --work work",
    ), without=_ERROR),
    Row("corpus drop", "--format", ("txt",), swap=_UNKNOWN_SUFFIX, without=_ERROR, ends=_ERROR),
    Row("corpus decontaminate", "--against", ("notes.txt",)),
    Row("corpus decontaminate", "--action", ("drop",)),
    Row("corpus split", "--ratios", ("0.2,0.2,0.6",)),
    Row("corpus split", "--by", ("id",)),
    Row("corpus sample", "--fraction", ("0.5",), base="corpus.jsonl --output out.jsonl --workers 1", without=_ERROR),
    Row("corpus sample", "--part", ("1/2",), base="corpus.jsonl --output out.jsonl --workers 1 --fraction 0.5"),
]
DATA = [
    Row("tokenizer train", "--vocab-size", ("290",)),
    Row("tokenizer train", "--pattern", ("cl100k", "qwen2"), swap=("corpus.jsonl", "digits.jsonl")),
    Row("tokenizer train", "--lowercase", plus="--kind wordpiece"),
    Row("tokenizer train", "--split", base="notes.txt --output made --vocab-size 500"),
    Row("*", "--key", ("other",)),
    Row("tokenizer train", "--overwrite", before=("tokenizer train corpus.jsonl --output made --vocab-size 290",),
        without=_ERROR),
    Row("preprocess", "--tokenizer", ("bpe310",)),
    Row("preprocess", "--append-eod", swap=("--tokenizer tokenizer", "--tokenizer wordpiece"), ends="refused"),
    Row("preprocess", "--no-append-eod"),
    Row("preprocess", "--prepend-bos", swap=("--tokenizer tokenizer", "--tokenizer with_bos")),
    Row("preprocess", "--split", ("line", "blank-line"), swap=_TEXT),
    Row("preprocess", "--lines-end-sentences", swap=_TEXT, plus="--split-sentences"),
    Row("preprocess", "--shard-tokens", ("200",)),
    Row("preprocess", "--overwrite", before=("preprocess corpus.jsonl --tokenizer bpe310 --output out",),
        without=_ERROR),
    Row("preprocess", "--on-error", swap=_BAD_LINE, without=_ERROR),
    Row("preprocess", "--max-bad", ("0",), swap=_BAD_LINE, plus="--on-error skip", ends=_ERROR),
    Row("preprocess", "--max-doc-bytes", ("500",), plus="--on-error skip"),
    Row("preprocess", "--min-chars", ("300",)),
    Row("preprocess", "--max-chars", ("300",)),
    Row("preprocess", "--min-tokens", ("100",)),
    Row("preprocess", "--max-tokens", ("100",)),
    Row("preprocess", "--max-documents", ("3",)),
    Row("preprocess", "--script", ("latin:0.9",)),
    Row("preprocess", "--filter", ("some",), ends="refused"),
    Row("data split", "--shares", ("20,80",)),
    Row("data split", "--output", ("one --output two",), base="data/a --shares 50,50", without=_ERROR),
    Row("data *", "--overwrite", without=_ERROR, before=(
        "data merge data/b data/b --output joined", "data split data/b --shares 50,50 --output one --output two",
    )),
    Row("data show", "--sample", ("3",), base=f"data/a {SMALL}", without=_ERROR),
    Row("data show", "--document", ("5",)),
    Row("data show", "--tokenizer", ("tokenizer",), base="data/foreign", without=_ERROR),
    Row("data show", "--tokenizer", ("tokenizer",), base="data/foreign --ids", ends="refused"),
    Row("data show", "--random", ("2",)),
    Row("data show", "--seed", ("7",), plus="--random 2"),
    Row("data show", "--run", ("runs/a",), plus="--sample 3", base="", without=_ERROR),
    Row("data show", "--stage", ("first", "last"), plus="--run runs/staged --sample 3", base="", without=_ERROR),
    Row("data *", "--most", ("4",)),
    Row("data *", "--tokenizer", ("tokenizer",), swap=("data/a", "data/foreign"), without=_ERROR),
    Row("data show", "--config-dir", ("conf",), base="data/a " + SMALL + " --sample 3"),
]
_SWEEP = RUN.replace("optim.lr=0.01", "optim.lr=0.01,0.02")
_ON_GPU = RUN.replace("compute.device=cpu", "compute.device=cuda")
_SRUN = (("SLURM_JOB_ID", "1"), ("SLURM_NTASKS", "1"), ("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0"))
RUNS = [
    Row("config list", "--config-dir", ("conf",), base=""),
    Row("config explain", "--run", ("runs/b",), base="optim.lr"),
    Row("config explain", "--from-run", ("runs/b",), base="optim.lr"),
    Row("config explain", "--config-name", ("other",), plus="--config-dir conf", base="train.seed"),
    Row("eval", "--format", ("txt", "jsonl"), base="runs/a --task perplexity --data corpus.unknown", without=_ERROR),
    Row("pretrain", "--config-dir", ("conf",), plus="--dry-run", alone="it is slower without"),
    Row("pretrain", "--from-run", ("runs/a",), base="run.dir=runs/new train.steps=5", without=_ERROR),
    Row("pretrain", "--multirun", base=_SWEEP, without=_ERROR),
    Row("pretrain", "--print-config"),
    Row("pretrain", "--from-beginning", base="--from-run runs/a run.dir=runs/new --dry-run", without=_ERROR),
    Row("pretrain", "--from-beginning", ends="refused"),
    Row("pretrain", "--nproc", ("2",), plus="parallel.dp_shard=2", without=_ERROR, has_own_process=True),
    Row("pretrain", "--nproc-per-node", ("2",), plus="parallel.dp_shard=2", env=_SRUN, without=_ERROR,
        has_own_process=True),
    Row("pretrain", "--elastic", plus="--dry-run --nproc 2", without=_ERROR, alone="one process needs no other layout"),
    Row("pretrain", "--max-restarts", ("1",), base=f"{SMALL} run.dir=runs/new parallel.dp_shard=2 --nproc 2",
        env=(("LMTRAIN_ALLOW_FAULTS", "1"), ("LMTRAIN_FAULT", "kill:point=step:step=1:rank=1:restart=0")),
        without=_ERROR, has_own_process=True),
    *(row for verb, more in (("slurm render", ""), ("slurm submit", " --dry-run")) for row in (
        Row(verb, "--from-run", ("runs/a",), base=f"run.dir=runs/new train.steps=5 --tasks-per-node 1{more}",
            without=_ERROR),
        Row(verb, "--from-beginning", base=f"--from-run runs/a run.dir=runs/new --tasks-per-node 1{more}",
            without=_ERROR),
        Row(verb, "--from-beginning", ends="refused"),
        Row(verb, "--gpus-per-node", ("1", "2"), base=f"{_ON_GPU} parallel.dp_shard=2{more}", without=_ERROR),
        Row(verb, "--gpus-per-node", ("4",), base=f"{_ON_GPU} parallel.dp_shard=2{more}", without=_ERROR,
            ends="refused"),
        Row(verb, "--tasks-per-node", ("1", "2"), base=f"{RUN} parallel.dp_shard=2{more}", without=_ERROR),
        Row(verb, "--tasks-per-node", ("4",), base=f"{RUN} parallel.dp_shard=2{more}", without=_ERROR,
            ends="refused"),
        # because: the number that fits the layout is also that which is taken without it
        Row(verb, "--nodes", ("1", "3"), base=f"{RUN} parallel.dp_shard=2 --tasks-per-node 1{more}", ends="refused"),
        Row(verb, "--array", base=f"{_SWEEP} --tasks-per-node 1{more}", without=_ERROR),
        Row(verb, "--array-tasks", ("0-1%1", "%1"), base=f"{_SWEEP} --array --tasks-per-node 1{more}"),
        Row(verb, "--array-tasks", ("%1",), base=f"{RUN} --tasks-per-node 1{more}", ends="refused"),
        Row(verb, "--tasks", base=f"{RUN} parallel.dp_shard=2 --tasks-per-node 2{more}"),
    )),
    Row("slurm *", "--time", ("4:00:00",)),
    Row("slurm *", "--partition", ("some",)),
    Row("slurm *", "--account", ("some",)),
    Row("slurm *", "--sbatch", ("--mem=0",)),
    Row("slurm *", "--srun", ("--cpu-bind=cores",)),
    Row("slurm *", "--env", ("A=1",)),
    Row("slurm *", "--setup", ("'module load cuda'",)),
    Row("slurm *", "--container-image", ("image",)),
    Row("slurm *", "--container-command", ("'apptainer exec image.sif'",)),
    # because: where there is no sbatch, all is done but the last
    Row("slurm submit", "--dry-run", base=f"{RUN} --tasks-per-node 1", env=(("PATH", ""),), without=_ERROR),
    Row("inspect", "--diff", ("runs/b",)),
    Row("trace", "--start", ("2",), ends=_ERROR),
    Row("trace", "--step", ("3",), base="runs/a --step 2"),
    Row("report", "--svg", ("pictures",)),
    Row("runs list", "--state", ("killed",)),
    Row("runs list", "--where", ("optim.lr=0.02",)),
    Row("runs plot", "--key", ("grad_norm",)),
    Row("runs plot", "--by", ("tokens", "seconds")),
]
_GENERATE = "runs/a --prompt Hello --device cpu"
MODELS = [
    Row("eval", "--task", ("perplexity --task perplexity --data notes.txt",)),
    Row("eval", "--data", ("notes.txt",)),
    Row("eval", "--key", ("other",)),
    Row("eval", "--key", ("other",), base="runs/a --task perplexity --data data/a --limit 1", ends="refused"),
    Row("eval", "--suffix", (".unknown",), base="runs/a --task perplexity --data corpus.unknown", without=_ERROR),
    Row("eval", "--suffix", (".unknown",), base="runs/a --task perplexity --data data/a --limit 1", ends="refused"),
    Row("eval", "--list", base="", without=_ERROR),
    Row("eval", "--limit", ("2",)),
    Row("eval", "--limit", ("2",), base="--list", ends="refused"),
    Row("eval", "--baseline", ("data/a",)),
    Row("eval", "--stride", ("4",)),
    Row("eval", "--seq-len", ("8",)),
    Row("eval", "--steps", ("all", "2")),
    Row("eval", "--compare", ("runs/a runs/b",), base="--task perplexity --data eval.jsonl", without=_ERROR),
    Row("eval", "--output", ("result.json",)),
    Row("eval", "--samples", ("samples.jsonl",)),
    Row("eval", "--overwrite", plus="--output new.json", without=_ERROR, before=(
        "eval runs/a --task perplexity --data eval.jsonl --device cpu --limit 1 --output new.json",
    )),
    Row("eval", "--nproc", ("2",), has_own_process=True),
    Row("eval", "--nproc-per-node", ("2",), env=_SRUN, has_own_process=True),
    Row("generate", "--prompt", ("Bado",)),
    # because: without either option, standard input is read
    Row("generate", "--prompt-file", ("notes.txt",), base="runs/a --prompt-file eval.jsonl --device cpu"),
    Row("generate", "--prompt-file", ("notes.txt",), ends="refused"),
    Row("generate", "--prompts", ("notes.txt",), base="runs/a --prompts eval.jsonl --device cpu --max-new-tokens 3"),
    Row("generate", "--prompts", ("notes.txt",), ends="refused"),
    Row("generate", "--output", ("out.jsonl",)),
    Row("generate", "--max-new-tokens", ("5",)),
    Row("generate", "--precision", ("bf16",), base=f"{_GENERATE} --temperature 2 --num-samples 8 --max-new-tokens 200"),
    Row("generate", "--top-k", ("3",)),
    Row("generate", "--top-p", ("0.1",)),
    Row("export", "--as-iteration"),
    Row("export", "--as-iteration", base="runs/a --to hf --output exported", ends="refused"),
    Row("import", "--tokenizer", ("bpe310",), ends=_ERROR),
    Row("import", "--set", ("dropout=0.3",)),
    Row("import", "--format", ("megatron",), ends=_ERROR),
    Row("export", "--layout", ("tp=2",)),
    Row("export", "--dtype", ("bf16", "fp16")),
    Row("reshard", "--to", ("pp=2",)),
    *(Row("reshard", option, ("some",), ends=_ERROR) for option in ("--from", "--tokenizer", "--set", "--dtype")),
    *(Row(verb, "--max-memory", ("1MiB",), ends=_ERROR) for verb in ("reshard", "merge")),
    Row("trace", "--overwrite", plus="--output new.json", before=("trace runs/a --output new.json",), without=_ERROR),
    Row("report", "--overwrite", plus="--output new.html", before=("report runs/a --output new.html",), without=_ERROR),
    Row("generate", "--overwrite", plus="--output new.jsonl", without=_ERROR, before=(
        "generate runs/a --prompt Goodbye --max-new-tokens 3 --device cpu --output new.jsonl",
    )),
    Row("plan", "--overwrite", plus="--html new.html", without=_ERROR, before=(
        "plan model=gpt_tiny hardware=h100 gpus=16 tokens=1B --top 2 --html new.html",
    )),
    Row("slurm render", "--overwrite", plus="--output new.sbatch", without=_ERROR, before=(
        f"slurm render {RUN} --tasks-per-node 1 --time 1:00:00 --output new.sbatch",
    )),
    Row("import", "--overwrite", before=("import hf --set dropout=0.5 --output imported",), without=_ERROR),
    Row("export", "--overwrite", without=_ERROR, before=(
        "export runs/a --to megatron --layout tp=2 --output exported",
    )),
    Row("reshard", "--overwrite", before=("reshard runs/a --to pp=2 --output resharded",), without=_ERROR),
    Row("merge", "--last", ("1",)),
    Row("merge", "--of", ("runs/staged",)),
    Row("merge", "--mean", ("linear", "ema:0.9")),
    Row("merge", "--emulate-decay"),
    Row("merge", "--moments", ("none",)),
    Row("merge", "--force", base="runs/a runs/alone --output merged", without=_ERROR),
    Row("merge", "--overwrite", before=("merge --last 2 --of runs/a --mean linear --output merged",), without=_ERROR),
    Row("branch", "--at", ("4", "2,4")),
    Row("branch", "--decay", ("50%",)),
    Row("branch", "--slurm", ("'--tasks-per-node 1'",)),
    Row("branch", "--output", ("elsewhere",)),
    Row("plan", "--config-dir", ("conf",)),
    Row("plan", "--config-name", ("other",), plus="--config-dir conf", swap=("model=gpt_tiny ", "")),
    Row("plan", "--layout", ("tp=2",), plus="--doublings 0"),
    Row("plan", "--gpus-per-node", ("4",)),
    Row("plan", "--nodes-per-switch", ("1",), swap=("gpus=8", "gpus=64")),
    Row("plan", "--price", ("2",)),
    Row("plan", "--html", ("page.html",)),
    Row("plan", "--every", swap=("--top 2", "--top 99"), alone="the two best are the same"),
    Row("plan", "--calibrate", base="runs/long runs/longer hardware=cpu", without=_ERROR),
    Row("plan", "--output", ("some/hardware/mine.yaml",), base="runs/long runs/longer hardware=cpu --calibrate"),
    Row("demo", "--output", ("notes.txt",), base="train.steps=some --output eval.jsonl", without=_ERROR, ends=_ERROR),
    # because: they end well only if a shell has started the tests, whose home is not to be written to
    *(Row("lmtrain", f"--{word}-completion", env=(("HOME", "home"),), ends=_ERROR) for word in ("install", "show")),
    Row("lmtrain", "--debug", base="inspect nothing", without=_ERROR, ends=_ERROR),
]
ROWS = [*CORPUS, *DATA, *RUNS, *MODELS, *SHARED]

# options whose effect is not to be seen here, and why
UNSEEN: dict[tuple[str, str], str] = {
    ("corpus get", "--offline"): "the network is asked without it; tests/unit/data_tools/corpora tries both",
    ("corpus shuffle", "--memory"): "the same documents, by way of more files",
    ("eval", "--batch-size"): "the same numbers, by way of more batches",
    ("watch", "--every"): "how often a run that goes on is looked at; tests/cli/test_watch.py watches one",
    ("watch", "--once"): "the same of a run that has ended; tests/cli/test_watch.py watches one that has not",
}


def rows_of(option: Option) -> list[Row]:
    """Return the rows of an option, or one that says nothing, with which all is derived."""
    rows = [row for row in ROWS if row.fits(option)]
    own = [row for row in rows if row.verbs == option.verb]
    return own or rows[:1] or [Row(option.verb, option.name)]
