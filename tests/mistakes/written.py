"""Mistakes written by hand: YAML's faults, hostile names, wrong verbs and options, files that are something else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.mistakes.mistake import Mistake

SHOW = ("pretrain", "--print-config", "data.path=x")
OURS = ("pretrain", "--config-dir", "{here}", "--print-config", "data.path=x", "schedule.warmup_steps=0")

GLOBAL = "# @package _global_\n"
GOOD = f"{GLOBAL}train:\n  steps: 7\n"
LAUGH = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{c}: &{c} [*{b}, *{b}, *{b}, *{b}, *{b}, *{b}, *{b}, *{b}, *{b}]\n"
    for b, c in zip("abcdefgh", "bcdefghi", strict=True)
)


def show(name: str, word: str, *says: str, before: tuple[str, ...] = (), **kwargs: Any) -> Mistake:
    others = [one for one in SHOW if one.partition("=")[0] != word.partition("=")[0]]
    return Mistake(name, (*others, *before, word), says, **kwargs)


def written() -> list[Mistake]:
    return [*yaml_files(), *configs(), *names(), *words(), *layouts(), *verbs(), *inputs()]


def experiment(name: str, text: str | bytes, *says: str, good: str | bytes = GOOD, says_file: bool = True) -> Mistake:
    """A fault in a file; what is wrong only when all files are joined names its key."""
    return Mistake(
        f"yaml {name}", (*OURS, "experiment=mine"), ("mine.yaml", *says) if says_file else says,
        files={"experiment/mine.yaml": text}, mended={"experiment/mine.yaml": good},
    )  # fmt: skip


def yaml_files() -> Iterator[Mistake]:
    """One for each way in which a file can be no YAML, or not such YAML as we take."""
    g = GLOBAL
    yield experiment("too deep", f"{g}train:\n  steps: 7\n   seed: 3\n", "line 4", "indented")
    yield experiment("not deep enough", f"{g}train:\n    steps: 7\n  seed: 3\n", "line 4", "indented")
    yield experiment("tab", f"{g}train:\n\tsteps: 7\n", "line 3", "tab")
    yield experiment("twice", f"{g}train:\n  steps: 7\n  seed: 1\n  steps: 8\n", "line 5", "steps", "line 3")
    yield experiment("twice on one line", f"{g}train: {{steps: 7, steps: 8}}\n", "line 2", "steps")
    yield experiment("latin 1", f"{g}# größe\ntrain:\n  steps: 7\n".encode("latin-1"), "line 2", "UTF-8")
    yield experiment("utf 16", GOOD.encode("utf-16"), "UTF-8")
    yield experiment("zero byte", GOOD.encode() + b"\0", "U+0000")
    yield experiment("empty", "", "is empty")
    yield experiment("comments", f"{g}# later\n", "is empty")
    yield experiment("list", f"{g}- train.steps=7\n", "line 2", "list")
    yield experiment("one word", f"{g}train\n", "line 2", "single value")
    yield experiment("no colon", f"{g}train:\n  steps 7\n  seed: 3\n", "line 3", "colon")
    yield experiment("no space", f"{g}train:\n  steps:7\n  seed: 3\n", "line 3", "colon")
    yield experiment("colon inside", f"{g}run:\n  dir: a: b\n", "line 3", "colon", good=f"{g}run:\n  dir: 'a: b'\n")
    yield experiment("open quote", f"{g}run:\n  dir: 'here\ntrain:\n  steps: 7\n", "line 3", "quote")
    yield experiment("open bracket", f"{g}data:\n  split: [1, 0\ntrain:\n  steps: 7\n", "line 3", "[")
    yield experiment("open brace", f"{g}train: {{steps: 7\nmodel:\n  width: 64\n", "line 2", "{")
    yield experiment(
        "backslash", f'{g}run:\n  dir: "C:\\data"\n', "line 3", "backslash", good=f"{g}run:\n  dir: 'C:\\d'\n"
    )
    yield experiment("percent", f"{g}run:\n  dir: %here\n", "line 3", "%", good=f"{g}run:\n  dir: '%here'\n")
    yield experiment("at", f"{g}run:\n  dir: @here\n", "line 3", "@", good=f"{g}run:\n  dir: '@here'\n")
    yield experiment("star", f"{g}run:\n  dir: *here\n", "line 3", "*", good=f"{g}run:\n  dir: '*here'\n")
    yield experiment("two documents", f"{GOOD}---\nmodel:\n  width: 64\n", "second document")
    yield experiment("a tag", f"{g}run:\n  dir: !!python/name:os.system\n", "line 3", "tag")
    yield experiment("laugh", g + LAUGH, "values")
    yield experiment("deep", f"{g}a: {'[' * 60}{']' * 60}\n", "line 2", "deeper")
    yield experiment("itself", f"{g}train: &t\n  steps: *t\n", "line 3")
    yield experiment("huge", g + "# long\n" * 160_000, "bytes")
    yield experiment("number as key", f"{g}train:\n  7: steps\n", "line 3", "7")
    yield experiment("yes as key", f"{g}train:\n  yes: 7\n", "line 3", "yes")
    yield experiment("sixty", f"{g}run:\n  dir: !!int abc\n", "line 3", "tag")


def configs() -> Iterator[Mistake]:
    """Right YAML that is no config."""
    yield experiment("no package", "train:\n  steps: 7\n", "# @package _global_", good=GOOD)
    yield experiment("wrong package", "# @package train\nsteps: 7\n", "# @package _global_")
    yield experiment("header that is none", "# @packages _global_\ntrain:\n  steps: 7\n", "@packages _global_")
    good = f"{GLOBAL}defaults:\n  - override /optim: lamb\n"
    yield experiment(
        "no override", f"{GLOBAL}defaults:\n  - /optim: lamb\n", "line 3", "`- override /optim: lamb`", good=good
    )
    yield experiment(
        "no slash", f"{GLOBAL}defaults:\n  - optim: lamb\n", "line 3", "`- override /optim: lamb`", good=good
    )
    yield experiment("overide", f"{GLOBAL}defaults:\n  - overide /optim: lamb\n", "line 3", "override", good=good)
    yield experiment(
        "a choice that is none", f"{GLOBAL}defaults:\n  - override /optim: lambb\n", "line 3", "lamb?", good=good
    )
    yield experiment(
        "a group that is none", f"{GLOBAL}defaults:\n  - override /optimm: lamb\n", "line 3", "optim?", good=good
    )
    yield experiment("a mapping", f"{GLOBAL}defaults:\n  optim: lamb\n", "line 2", "list", good=good)
    yield experiment("a number", f"{GLOBAL}defaults:\n  - override /optim: 3\n", "line 3", "3", good=good)
    yield experiment("order", f"{GLOBAL}defaults:\n  - override /optim: lamb\n  - mine2\n", "line 4", good=good)
    yield experiment("no such file", f"{GLOBAL}defaults:\n  - other\n", "line 3", "other", good=GOOD)
    yield experiment("itself again", f"{GLOBAL}defaults:\n  - mine\n", "mine", good=GOOD)
    yield experiment(
        "self twice", f"{GLOBAL}defaults:\n  - _self_\n  - _self_\ntrain:\n  steps: 7\n", "_self_", good=GOOD
    )
    yield experiment("hydra", f"{GOOD}hydra:\n  run:\n    dir: here\n", "line 4", "hydra")
    yield experiment("nowhere", f"{GLOBAL}train:\n  steps: ${{train.stepps}}\n", "train.stepps", says_file=False)
    yield experiment(
        "circle", f"{GLOBAL}train:\n  steps: ${{train.seed}}\n  seed: ${{train.steps}}\n", "train.seed", says_file=False
    )
    yield experiment("resolver", f"{GLOBAL}run:\n  dir: ${{oc.env:HOME}}\n", "line 3", "resolver")
    yield experiment("open reference", f"{GLOBAL}run:\n  dir: ${{train.seed\n", "line 3", "${")
    yield experiment("code", f"{GLOBAL}optim:\n  _target_: os.system\n", "optim._target_", says_file=False)
    yield experiment("a level too many", f"{GLOBAL}optim:\n  optim:\n    lr: 0.1\n", "optim.optim", says_file=False)
    yield experiment("a value for a group", f"{GLOBAL}optim: 0.1\n", "optim", says_file=False)
    yield Mistake("no root config", (*SHOW, "--config-name", "pretrian"), ("pretrian", "Did"), code_after=None)
    root = {"mine.yml": "defaults: [pretrain, _self_]\n"}
    yield Mistake("yml", (*OURS, "--config-name", "mine"), ("mine.yml", "mine.yaml"), files=root,
                  mended={"mine.yaml": root["mine.yml"]})  # fmt: skip
    yield Mistake("a folder as config", (*OURS, "experiment=mine"), ("mine.yaml", "folder"), code=66,
                  files={"experiment/mine.yaml/x": ""}, instead=(*OURS,))  # fmt: skip


def names() -> Iterator[Mistake]:
    """Folders that a shell or a grammar reads as something else."""
    for name in (
        "runs/a=b,c",
        "a,b",
        "it's",
        'a"b',
        "(x)",
        "[x]",
        "{x}",
        "x]",
        "runs/[1",
        "f(x)",
        "a'b,c",
        "${x}",
        "${",
    ):
        kept = {"instead": (*SHOW, "run.dir=plain")} if "$" in name else {}
        kept = {"instead": (*SHOW, f"run.dir='{name}'")} if name == "a,b" else kept
        for key in ("run.dir", "data.path") if len(name) < 5 else ("run.dir",):
            yield show(f"folder {key}={name}", f"{key}={name}", f"{key}={name}", **kept)
    yield Mistake("a space", (*SHOW, "run.dir=my", "runs"), ("runs", "run.dir='my runs'"))
    yield Mistake(
        "spaces around =", (*SHOW, "optim.lr", "=", "0.1"), ("optim.lr=0.1",), instead=(*SHOW, "optim.lr=0.1")
    )
    yield Mistake("a space before =", (*SHOW, "optim.lr", "=0.1"), ("optim.lr=0.1",), instead=(*SHOW, "optim.lr=0.1"))


def words() -> Iterator[Mistake]:
    """Command lines of pretrain."""
    yield show("lr", "lr=1e-3", "lr=1e-3", "optim.lr=1e-3")
    yield show("steps", "steps=500", "steps=500", "train.steps=500")
    yield show("device", "device=gpu", "device=gpu", "compute.device=cuda")
    yield show("gpu", "compute.device=gpu", "compute.device=gpu", "cuda")
    yield show("fp16", "precision=fp16_mixed", "precision=fp16_mixed", "fp16")
    yield show("batch", "batch_size=32", "batch_size=32", "train.global_batch=32")
    yield show("tokens", "train.tokens=2B", "train.tokens=2000000000", "train.steps=null", before=("train.steps=9",))
    yield show("no steps", "train.steps=null", "train.steps=null", "train.steps=1000")
    yield show("null group", "model=null", "model", instead=(*SHOW, "model=gpt_tiny"))
    yield show("several", "optim.lr=1,2", "optim.lr=1,2", "-m", code_after=None)
    yield show("no value", "optim.lr", "optim.lr", code_after=None)
    yield show("choice alone", "gpt2_small", "gpt2_small", "model=gpt2_small")
    yield Mistake("a file", (*SHOW, "mine.yaml"), ("mine.yaml",), code=66, instead=SHOW)
    yield show("no key", "=3", "=3", instead=SHOW)
    yield show("twice =", "optim.lr==3", "optim.lr==3", "optim.lr=3")
    yield show("below a value", "optim.lr.x=1", "optim.lr.x=1", "optim.lr", code_after=None)
    yield show("into a list", "data.split[0]=1", "data.split[0]=1", instead=(*SHOW, "data.split=[1,0]"))
    yield show("take away nothing", "~optim.nothing", "~optim.nothing", instead=SHOW)
    yield show("take away what must be", "~optim.lr", "optim.lr", instead=(*SHOW, "optim.lr=0.1"))
    yield show("at", "optim@x=adamw", "optim@x", instead=(*SHOW, "optim=adamw"))
    yield show(
        "twice chosen", "model=gpt2_small", "model", before=("model=gpt_tiny",), instead=(*SHOW, "model=gpt_tiny")
    )
    yield show("deep word", f"data.split={'[' * 40}{']' * 40}", "data.split", instead=SHOW)
    yield show("resolver", "run.dir=${oc.env:HOME}", "run.dir", "resolver", instead=(*SHOW, "run.dir=x"))
    for word, way in (("hydra.run.dir=x", "run.dir="), ("hydra.sweep.dir=x", "-m"), ("hydra/launcher=joblib", "-m"),
                      ("+hydra.verbose=true", "Leave it out"), ("hydra.searchpath=[x]", "--config-dir")):  # fmt: skip
        yield show(f"hydra {word}", word, word, way, instead=SHOW)
    for option, value, key in (
        ("--lr", "1e-3", "optim.lr=1e-3"), ("--micro-batch-size", "4", "train.micro_batch=4"),
        ("--tensor-model-parallel-size", "2", "parallel.tp=2"), ("--train-iters", "50", "train.steps=50"),
        ("--fp16", "", "precision=fp16"), ("--seed", "3", "train.seed=3"), ("--num-gpus", "2", "--nproc"),
    ):  # fmt: skip
        given = (option, value) if value else (option,)
        yield Mistake(f"option {option}", (*SHOW, *given), (option, key), instead=(*SHOW, key) if "=" in key else SHOW,
                      code_after=None)  # fmt: skip


def layouts() -> Iterator[Mistake]:
    for word, says in {
        "parallel.tp=3": "parallel.tp=3", "parallel.pp=9": "parallel.pp=9", "parallel.tp=64": "parallel.tp=64",
        "model.num_layers=1": "parallel.pp=2",
    }.items():  # fmt: skip
        before = ("parallel.pp=2", "train.global_batch=96") if word.startswith("model") else ("train.global_batch=96",)
        yield show(f"layout {word}", word, says, before=before, code=78, code_after=None)
    yield show("layout and setting", "parallel.tp=3", "parallel.tp=3", "optim.lr=-1.0", before=("optim.lr=-1",),
               instead=(*SHOW, "parallel.tp=1"), code=2)  # fmt: skip
    for word in ("parallel.zero=4", "parallel.zero=3", "parallel.schedule=1f2b", "parallel.tp=0"):
        yield show(f"parallel {word}", word, word, code_after=None)


def verbs() -> Iterator[Mistake]:
    """Other commands: names, options, arguments."""
    for verb, near in {"pretrian": "pretrain", "train-tokenizer": "tokenizer", "evaluate": "eval"}.items():
        yield Mistake(f"verb {verb}", (verb,), (verb, near), code_after=None, instead=(near, "--help"))
    yield Mistake("data verb", ("data", "inspekt"), ("data inspekt", "inspect"), instead=("data", "inspect", "--help"))
    yield Mistake("eval device", ("eval", "x", "--device", "gpu"), ("gpu", "cuda"), instead=("eval", "--help"))
    yield Mistake("eval option", ("eval", "x", "--taks", "lambada"), ("--taks", "--task"), instead=("eval", "--help"))
    yield Mistake("no argument", ("inspect",), ("lmtrain inspect", "Give PATH"), instead=("inspect", "--help"))
    yield Mistake("too many", ("env", "more"), ("more", "lmtrain env"), instead=("env", "--help"))
    yield Mistake(
        "no number", ("pretrain", "--nproc"), ("--nproc", "Give --nproc N"), instead=("pretrain", "--help")
    )
    yield Mistake("not a number", ("pretrain", "--nproc", "two"), ("two", "--nproc"), instead=("pretrain", "--help"))
    yield Mistake("none", ("pretrain", "--nproc", "0"), ("--nproc", "0"), instead=("pretrain", "--help"))
    yield Mistake("dry_run", (*SHOW, "--dry_run"), ("--dry_run", "--dry-run"))
    yield Mistake("half an option", (*SHOW, "--print"), ("--print", "Did you mean --print-config?"))
    yield Mistake("a plugin", ("pretrain", "--plugin", "no_such_package"), ("no_such_package",), instead=SHOW)


def inputs() -> Iterator[Mistake]:
    """Files and folders that are missing, or are not what they should be."""
    text = {"a.txt": "some text\n", "folder/x.txt": "more\n"}
    out = ("--output", "{here}/out")
    for command in (
        ("preprocess", "{here}/none.txt", "--tokenizer", "{here}/none", *out), ("pretrain", "data.path={here}/none"),
        ("tokenizer", "train", "{here}/none.txt", *out, "--vocab-size", "300"), ("verify", "{here}/none"),
        ("data", "inspect", "{here}/none"), ("data", "verify", "{here}/none"), ("inspect", "{here}/none"),
        ("reshard", "{here}/none", *out, "--to", "tp=1"),
        ("tokenizer", "show", "{here}/none"), ("pretrain", "data.path=x", "--config-dir", "{here}/none"),
        ("eval", "{here}/none", "--task", "perplexity", "--data", "{here}/a.txt"), ("generate", "{here}/none"),
    ):  # fmt: skip
        yield Mistake(f"missing {' '.join(command[:2])}", command, ("{here}/none",), code=66, files=text,
                      instead=("--version",))  # fmt: skip
    yield Mistake("a file as config dir", ("pretrain", "data.path=x", "--config-dir", "{here}/a.txt"), ("a.txt",),
                  code=66, files=text, instead=("--version",))  # fmt: skip
    yield Mistake("a long name", (*SHOW[:1], f"data.path={'x' * 300}"), ("x" * 50,), instead=("--version",))
    yield Mistake("through a file", ("pretrain", "data.path={here}/a.txt/x"), ("a.txt/x",), code=66, files=text,
                  instead=("--version",))  # fmt: skip
    yield Mistake("a text as dataset", ("pretrain", "data.path={here}/a.txt"), ("a.txt",), files=text,
                  code_after=None)  # fmt: skip
