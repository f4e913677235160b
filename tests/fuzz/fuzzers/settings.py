"""Settings: words of the command line, a folder of configs, config.json of a run. The environment stays unseen."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from lmtrain.config.compose_run_settings import conf_dir
from lmtrain.config.name_suggestions import types_by_key
from lmtrain.train.run_config import RunConfig
from tests.fuzz.fuzzer import Case, Ran, Runner, honest
from tests.fuzz.mutate import EDGES, HOSTILE, as_json, change_any, some_bytes, some_json

SECRETS = {"WANDB_API_KEY": "canary-7731-wandb", "HF_TOKEN": "canary-7731-hf", "SECRET": "canary-7731"}
REFERENCES = (
    "${oc.env:SECRET}", "${${run.dir}:SECRET}", "${${run.dir}}", "${oc.decode:${oc.env:SECRET}}", "${run.dir}",
    "${.dir}", "${oc.create:{a:1}}", "${oc.select:SECRET}", "${oc.deprecated:run.dir}", "${oc.dict.keys:run}",
    "${hydra:runtime.cwd}", "${now:%Y}", "\\${oc.env:SECRET}", "\\\\${oc.env:SECRET}", "$${run.dir}", "oc.env",
    "oc.env:SECRET", "{oc.env:SECRET}", "${run.dir", "${", "${}", "${train}", "${data.path}${data.path}", "???",
    "${ oc.env : SECRET }", "$SECRET",
)  # fmt: skip
WORDS = (
    "9" * 5000, "1e15", "1e400", "-1e18", "1_0", "0x10", "1e-400", "[1,", "{a:1}", "[]", "null", "a,b", "range(1,9)",
    "true", "'", '"', "\\", "[[[[[[[[[[]]]]]]]]]]", "x" * 300, "/dev/null", "/dev/zero", "..", "[/b]", "\x1b[2J",
    "\u202e", "a\nb", " ", "{_target_: os.system}", "1T", "1e308T", ":59" * 99,
)  # fmt: skip
BOMB = "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefgh"))
YAML = (
    f"a: &a [1,1,1,1,1,1,1,1,1]\n{BOMB}",
    "run: &r {x: *r}\n", "run: !!python/object/apply:os.system ['true']\n", "run: {<<: 1}\n",
    "run: {dir: a, dir: b}\n", "run:\n\tdir: a\n", "defaults:\n  - e\n", "defaults:\n  - /experiment/e\n",
    "defaults:\n  - override /model: ${oc.env:SECRET}\n", "defaults: 1\n", "defaults: [{a: b, c: d}]\n",
    "hydra: {run: {dir: x}}\n", "hydra: {searchpath: ['file:///etc']}\n", "run: {dir: \"\\x00\"}\n",
    "run: {dir: \"\\ud800\"}\n", "run: {dir: \"\\UFFFFFFFF\"}\n", "? [a]\n: 1\n", "---\na: 1\n---\n",
    "%YAML 9.9\n---\na: 1\n", "train: {steps: 0b" + "1" * 9999 + "}\n", "a: " + "[" * 9999, "a: " + "{a: " * 999,
    "-\n" * 999, "run: {dir: '???'}\n", "run: {_target_: os.system}\n",
    "train: {steps: ${train.seed}, seed: ${train.steps}}\n",
)  # fmt: skip
HEADER = "# @package _global_\n"
SIGNS = ("", "", "", "", "+", "~")
PRINT, TRY, EXPLAIN = ("--print-config", "--json"), ("--dry-run", "--json"), ("config", "explain", "run.dir")
VERBS = (("pretrain", *PRINT), ("pretrain", *TRY), EXPLAIN)
GROUPS = {"model": "gpt_tiny", "optim": "adamw", "schedule": "cosine", "precision": "fp32", "data": "dataset"}
ROWS = [
    {"event": "start", "attempt": 1, "step": 0, "time": "2026-01-01T00:00:00+00:00"},
    {"event": "step", "attempt": 1, "step": 1, "loss": 5.5, "lr": 0.001, "grad_norm": 1.5, "tokens": 128, "samples": 4,
     "tokens_per_s": 900.0, "elapsed_s": 1.5, "eta_s": 1.0, "skipped": 0, "time": "2026-01-01T00:00:01+00:00"},
    {"event": "valid", "attempt": 1, "step": 1, "loss": 5.25, "ppl": 190.5, "time": "2026-01-01T00:00:02+00:00"},
    {"event": "save", "attempt": 1, "step": 1, "saved_step": 1, "bytes": 1000, "write_s": 0.25},
]  # fmt: skip
Change = Callable[[random.Random, Path], tuple[str, tuple[object, ...]]]


class Fuzz:
    def __init__(self, folder: Path, run: Runner) -> None:
        text, self.data = folder / "text.txt", folder / "data"
        text.write_text("".join(f"{number} is a number, and {number + 1} is the next.\n\n" for number in range(500)))
        honest(run, "tokenizer", "train", text, "--output", folder / "tok", "--vocab-size", 300, folder=folder)
        honest(run, "preprocess", text, "--tokenizer", folder / "tok", "--output", self.data, folder=folder,
               writes=(folder.parent,))  # fmt: skip
        self.words = (f"data.path={self.data}", "model.seq_len=32", "train.valid_interval_steps=0", "run.dir=run")
        self.honest = honest(run, *VERBS[1], *self.words, folder=folder)
        settings = honest(run, *VERBS[0], *self.words, folder=folder)
        self.config = json.loads(settings.output)
        self.keys = [*types_by_key(RunConfig), *(f"train.rampup.{key}" for key in ("start", "increment", "samples"))]

    def case(self, rng: random.Random, folder: Path) -> Case:
        changes: tuple[Change, ...] = (
            self.override, self.override, self.group, self.experiment, self.run, self.records,
        )  # fmt: skip
        what, words = rng.choice(changes)(rng, folder)
        verb = rng.choice(VERBS)
        if words[0] == "inspect":
            return Case(what, words, self.honest, env=SECRETS)
        if verb[0] == "config":
            words = tuple(word for word in words if not str(word).startswith("--from-run"))
        wrong = _is_plain if "--json" in verb else lambda ran: ""
        return Case(what, (*verb, *words), self.honest, wrong=wrong, env=SECRETS | {"TMPDIR": str(folder)})

    def override(self, rng: random.Random, folder: Path) -> tuple[str, tuple[object, ...]]:
        """Words of the command line, which can hold everything but a zero byte."""
        count = rng.choice((1, 1, 2, 3))
        words = [f"{rng.choice(SIGNS)}{rng.choice(self.keys)}={self._value(rng)}" for _ in range(count)]
        if rng.random() < 0.2:
            words.append("".join(rng.choice("a.=[]{}'\"\\$@,:~+ \t0") for _ in range(rng.randrange(1, 20))))
        words = [word.replace("\0", "") for word in words if not word.startswith("-")]
        return f"words {words!a:.200}", (*self.words, *words)

    def _value(self, rng: random.Random) -> str:
        reference = rng.choice(REFERENCES)
        return rng.choice((
            reference, f"'{reference}'", f'"{reference}"', rng.choice(WORDS), rng.choice(WORDS), str(rng.choice(EDGES)),
            str(rng.choice(HOSTILE))[:3000], "".join(rng.choice(string.printable) for _ in range(rng.randrange(12))),
        ))  # fmt: skip

    def group(self, rng: random.Random, folder: Path) -> tuple[str, tuple[object, ...]]:
        """A choice of a group, changed in its bytes or in one of its values."""
        group, name = rng.choice([*GROUPS.items()])
        file = folder / "conf" / group / "mine.yaml"
        file.parent.mkdir(parents=True)
        what = self._write(rng, file, (conf_dir() / group / f"{name}.yaml").read_bytes(), self.config[group])
        return f"{group}/{what}", (*self.words, "--config-dir", folder / "conf", f"{group}=mine")

    def experiment(self, rng: random.Random, folder: Path) -> tuple[str, tuple[object, ...]]:
        """A recipe, or a root config, that a stranger has written."""
        is_root = rng.random() < 0.3
        file = folder / "conf" / ("mine.yaml" if is_root else "experiment/e.yaml")
        file.parent.mkdir(parents=True)
        header = "defaults: [pretrain, _self_]\n" if is_root else HEADER
        reference, key = rng.choice(REFERENCES), rng.choice(self.keys)
        group, _, rest = key.partition(".")
        value = json.dumps({rest: rng.choice((reference, rng.choice(WORDS), [reference], {reference: reference}))})
        text = header + rng.choice((rng.choice(YAML), f"{group}: {value}\n", f"x: {value}\n"))
        if rng.random() < 0.5:
            what = self._write(rng, file, text.encode(), None)
        else:
            what = ascii(text)[:80]
            file.write_bytes(text.encode())
        words = ("--config-name", "mine") if is_root else ("experiment=e",)
        return f"{file.name}: {what}", (*self.words, "--config-dir", folder / "conf", *words)

    def _write(self, rng: random.Random, file: Path, data: bytes, tree: Any) -> str:
        """JSON is YAML."""
        file.write_bytes(data)
        if rng.random() < 0.3:
            return change_any(file, rng)
        if tree is None or rng.random() < 0.4:
            what, data = some_bytes(data, rng)
        else:
            what, value = some_json(tree, rng)
            data = as_json(value)
        file.write_bytes(data)
        return f"{file.name}: {what}"

    def run(self, rng: random.Random, folder: Path) -> tuple[str, tuple[object, ...]]:
        """The folder of a run from somewhere else."""
        file = folder / "run" / "config.json"
        file.parent.mkdir()
        tree = json.loads(json.dumps(self.config))
        if rng.random() < 0.4:
            group = rng.choice(sorted(tree))
            tree[group][rng.choice(sorted(tree[group]) or ["x"])] = rng.choice((*REFERENCES, *WORDS))
        file.write_bytes(as_json(tree))
        what = change_any(file, rng) if rng.random() < 0.7 else f"{file.name}: a reference"
        return what, ("--from-run", file.parent, *rng.choice(((), ("run.dir=other", "checkpoint.resume=none"))))

    def records(self, rng: random.Random, folder: Path) -> tuple[str, tuple[object, ...]]:
        """What the run of a stranger tells of itself."""
        stop = {"cause": "done", "step": 2, "exit_code": 0, "requeue": False}
        run, name, what, rows = folder / "run", rng.choice(("config.json", "stop.json", "metrics.jsonl")), "", ROWS
        if name == "metrics.jsonl":
            what, value = some_json(ROWS, rng)
            rows = value if isinstance(value, list) else [value]
        run.mkdir()
        (run / "config.json").write_bytes(as_json(self.config))
        (run / "stop.json").write_bytes(as_json(stop))
        (run / "metrics.jsonl").write_bytes(b"".join(as_json(row).replace(b"\n", b"") + b"\n" for row in rows))
        if not what or rng.random() < 0.2:
            what += change_any(run / name, rng)
        return f"{name}: {what}", ("inspect", run, *rng.choice(((), ("--all",), ("--json",))))


def _is_plain(ran: Ran) -> str:
    """What is shown or begun are plain numbers and words."""
    try:
        json.loads(ran.output, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError) as error:
        return f"no JSON: {error}"
    return ""
