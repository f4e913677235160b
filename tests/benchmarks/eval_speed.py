"""How fast evaluation scores, beside lm-evaluation-harness's `hf` model: CPU seconds and memory on the same requests.

    python -m tests.benchmarks.eval_speed --vocab gpt2/ --lambada lambada_test.jsonl --wiki wiki.test.raw

A GPT-2 of 124M random weights, its export, and two processes, each with one of them, that take turns piece by piece:
lines of LAMBADA, pages of WikiText as rolling windows, and a part of the file at stride 32, where the other is a plain
loop that keeps the logits of scored positions. It needs `pip install 'lmtrain[harness]'`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lmtrain.eval.tasks.wikitext import split_pages

LEAST = {"lambada": 1.6, "wikitext": 1.1, "stride 32": 1.3}  # times as fast
STRIDE = 32
Score = Callable[[Any], float]  # a piece to nats


class Piece(NamedTuple):
    job: str
    given: Any


class Answer(NamedTuple):
    seconds: float
    peak_gib: float
    nats: float


def pieces(given: argparse.Namespace) -> list[Piece]:
    """Few pieces: the more lines in one, the less the harness pads when it sorts them by their lengths."""
    with open(given.lambada, encoding="utf-8") as file:
        texts = [json.loads(next(file))["text"] for _ in range(given.lines)]
    pairs = [(" ".join(text.split(" ")[:-1]), " " + text.split(" ")[-1]) for text in texts]
    whole = given.wiki.read_text(encoding="utf-8")
    some, lines, half = split_pages(whole)[: given.pages], max(len(pairs) // 3, 1), max(given.pages // 2, 1)
    return [
        *(Piece("lambada", pairs[start : start + lines]) for start in range(0, len(pairs), lines)),
        *(Piece("wikitext", some[start : start + half]) for start in range(0, len(some), half)),
        *(Piece("stride 32", [whole[start : start + 200_000], given.windows]) for start in (0, 400_000)),
    ]


def ours(checkpoint: str, batch_size: int) -> dict[str, Score]:
    from lmtrain.eval.harness import LmtrainModel
    from lmtrain.eval.score_targets import Scorer
    from lmtrain.eval.windows import WindowedRequests

    model = LmtrainModel(checkpoint, device="cpu", batch_size=batch_size)

    def strided(text: str, windows: int) -> float:
        import numpy as np

        ids = np.array(model.tok_encode(text)[: model.max_length + 1 + STRIDE * (windows - 1)], np.int64)
        scorer = Scorer(model.subject.model, batch_size=batch_size)
        return -sum(float(one.nll.sum()) for one in scorer.score(WindowedRequests([ids], model.max_length, STRIDE)))

    return harness_jobs(model) | {"stride 32": lambda given: strided(*given)}


def theirs(export: str, batch_size: int) -> dict[str, Score]:
    import torch
    from lm_eval.models.huggingface import HFLM

    model = HFLM(export, device="cpu", batch_size=batch_size, dtype="float32")

    @torch.no_grad()
    def strided(text: str, windows: int) -> float:
        seq_len = model.max_length
        ids = torch.tensor(model.tok_encode(text)[: seq_len + 1 + STRIDE * (windows - 1)])
        whole, nats = ids.unfold(0, seq_len + 1, STRIDE), 0.0
        for first in range(0, len(whole), batch_size):
            some = whole[first : first + batch_size]
            logits = model.model(some[:, :-1]).logits
            for row, window in enumerate(some):
                kept = seq_len if first + row == 0 else STRIDE
                scores = logits[row, -kept:].log_softmax(-1)
                nats += float(scores.gather(-1, window[-kept:, None]).double().sum())
        return nats

    return harness_jobs(model) | {"stride 32": lambda given: strided(*given)}


def harness_jobs(model: Any) -> dict[str, Score]:
    """As the harness asks any of its models."""
    from lm_eval.api.instance import Instance

    def asked(kind: Any, arguments: list[tuple[str, ...]]) -> list[Any]:
        return [Instance(kind, {}, one, index) for index, one in enumerate(arguments)]

    def lines(pairs: list[list[str]]) -> float:
        return float(sum(one for one, _ in model.loglikelihood(asked("loglikelihood", [(a, b) for a, b in pairs]))))

    def rolling(texts: list[str]) -> float:
        return float(sum(model.loglikelihood_rolling(asked("loglikelihood_rolling", [(text,) for text in texts]))))

    return {"lambada": lines, "wikitext": rolling}


def work(who: str, folder: str, batch_size: int) -> None:
    """Answers a line of JSON with a line of JSON: CPU seconds, the peak in memory meanwhile, and nats."""
    import torch

    torch.set_num_threads(1)
    score = {"ours": ours, "theirs": theirs}[who](folder, batch_size)
    print("ready", flush=True)
    for line in sys.stdin:
        job, given = json.loads(line)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        began_s = time.process_time()
        nats = score[job](given)
        spent_s = time.process_time() - began_s
        peak = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("VmHWM"))
        print("answer", json.dumps([spent_s, int(peak.split()[1]) / 2**20, nats]), flush=True)


class Worker:
    def __init__(self, who: str, folder: Path, batch_size: int) -> None:
        command = [sys.executable, "-m", "tests.benchmarks.eval_speed", "--work", who, str(folder)]
        env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            [*command, "--batch-size", str(batch_size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=env,
        )  # fmt: skip
        self._read("ready")

    def ask(self, piece: Piece) -> Answer:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(piece) + "\n")
        self.process.stdin.flush()
        return Answer(*json.loads(self._read("answer")))

    def _read(self, word: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise SystemExit(f"a worker ended with exit code {self.process.wait()}; start it alone to see why")


def build(folder: Path, vocab: Path) -> None:
    """The checkpoint and its export."""
    import torch

    from lmtrain.exchange.huggingface.import_and_export import export_hf
    from lmtrain.exchange.stream_tensors_to_disk import save_imported
    from lmtrain.models.gpt_settings import GPTSettings
    from lmtrain.models.model_settings import unpadded_shapes
    from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer

    settings = GPTSettings(num_layers=12, width=768, num_heads=12, vocab_size=50257, seq_len=1024)
    shapes, generator = unpadded_shapes(settings), torch.Generator().manual_seed(1)

    def random(name: str) -> list[torch.Tensor]:
        norm = name.endswith("norm.weight")
        return [torch.randn(shapes[name], generator=generator) * 0.02 + (1.0 if norm else 0.0)]

    save_imported(folder / "run", settings, random, Tokenizer.load(vocab), {"format": "benchmark"})
    export_hf(next((folder / "run").glob("step_*")), folder / "hf", check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=Path, help="GPT-2's vocabulary, as for lmtrain preprocess --tokenizer")
    parser.add_argument("--lambada", type=Path, help="lambada_test.jsonl")
    parser.add_argument("--wiki", type=Path, help="wiki.test.raw or wiki.test.tokens")
    parser.add_argument("--lines", type=int, default=300)
    parser.add_argument("--pages", type=int, default=10)
    parser.add_argument("--windows", type=int, default=12, help="of each of two parts, at stride 32")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        who, source = given.work
        work(who, source, given.batch_size)
        return 0
    if not (given.vocab and given.lambada and given.wiki):
        parser.error("--vocab, --lambada and --wiki are needed")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        build(folder, given.vocab)
        two = [Worker(who, folder / kind, given.batch_size) for who, kind in (("ours", "run"), ("theirs", "hf"))]
        found: dict[str, list[list[Answer]]] = {}
        for number, piece in enumerate(pieces(given)):
            order = two if number % 2 else two[::-1]
            answers = {id(worker): worker.ask(piece) for worker in order}
            found.setdefault(piece.job, []).append([answers[id(worker)] for worker in two])
            print(piece.job, *(f"{one.seconds:.1f} s" for one in found[piece.job][-1]), flush=True)
        passed = [report(job, rows) for job, rows in found.items()]
        return int(not all(passed))


def report(job: str, rows: list[list[Answer]]) -> bool:
    mine, other = ([row[who] for row in rows] for who in (0, 1))
    mine_s, other_s = (sum(answer.seconds for answer in some) for some in (mine, other))
    mine_gib, other_gib = (max(answer.peak_gib for answer in some) for some in (mine, other))
    mine_nats, other_nats = (sum(answer.nats for answer in some) for some in (mine, other))
    ratios = [one.seconds / another.seconds for another, one in rows]
    print(
        f"{job}: lmtrain {mine_s:.1f} s of CPU, the harness's hf {other_s:.1f} s: {other_s / mine_s:.2f} times as fast "
        f"(pieces {min(ratios):.2f} to {max(ratios):.2f}); peak {mine_gib:.2f} and {other_gib:.2f} GiB; "
        f"{mine_nats:.4f} and {other_nats:.4f} nats"
    )
    return other_s >= LEAST[job] * mine_s and mine_gib <= other_gib


if __name__ == "__main__":
    raise SystemExit(main())
