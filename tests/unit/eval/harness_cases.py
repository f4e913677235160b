"""What is compared with lm-evaluation-harness: three models, real texts in the form of the harness's tasks, and how.

Used by test_harness.py, which demands it, and by tests/benchmarks/harness_agreement.py, which prints the figures.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmtrain.eval.load_model import load_for_eval
from lmtrain.eval.run_task import run
from lmtrain.eval.sample_text_from_prompt import generate
from lmtrain.eval.sampling_and_precision_settings import Sampling
from lmtrain.eval.score_targets import SharedAnswers, Subject
from lmtrain.eval.task import find_task
from lmtrain.eval.tasks.wikitext import split_pages
from lmtrain.exchange.huggingface.import_and_export import export_hf
from lmtrain.exchange.stream_tensors_to_disk import save_imported
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.tokenizer.train import train_bpe
from tests.unit.eval.harness_run import run_harness
from tests.unit.exchange.models import gpt2, llama, random_weights

MODELS = ["gpt2-vocabulary", "llama", "small"]
NUM_LINES = 500
SHOTS_YAML = "like: choice/piqa\nshots: 3\nshots_file: shots.jsonl\n"


@dataclass(frozen=True)
class Twin:
    """A task of `lmtrain eval` and the harness's, with our name and its name of each figure that both give."""

    ours: str
    theirs: str
    figures: dict[str, str]


_WIKI = {name: name for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")}
_LAMBADA = {"whole_word_accuracy": "acc", "last_word_perplexity": "perplexity"}
_CHOICE = {"accuracy": "acc", "per_character_accuracy": "acc_norm"}
TWINS = [
    Twin("wikitext2/lmeval-2.0", "wikitext", _WIKI),
    Twin("wikitext103/lmeval-2.0", "wikitext", _WIKI),
    Twin("lambada/lmeval-openai-1.0", "lambada_openai", _LAMBADA),
    Twin("lambada/lmeval-standard-1.0", "lambada_standard", _LAMBADA),
    Twin("choice/hellaswag", "hellaswag", _CHOICE),
    Twin("choice/piqa", "piqa", _CHOICE),
    Twin("choice/arc", "arc_easy", _CHOICE),
    Twin("three_shots.yaml", "piqa_3shot", _CHOICE),
    Twin("choice/race", "race_by_question", _CHOICE),
]


def write_tasks(folder: Path, data: Path, subject: Subject, num_lines: int) -> dict[str, Path]:
    """The rows of each of the harness's tasks: real texts, and questions made of neighbouring sentences.

    `by_article.jsonl` has RACE's rows as they were published, which ours reads, and the harness question by question.
    """
    articles = split_pages((data / "wiki.test.raw").read_text(encoding="utf-8"))
    lines = [json.loads(line)["text"] for line in _lines(data / "lambada_test.jsonl", num_lines)]
    plain = _lines(data / "lambada_test_plain_text.txt", num_lines)
    said = [sentence.strip()[:60] for sentence in articles[0].split(" . ") if len(sentence) > 30][:42]
    asked = [(said[i], said[i + 1], said[(7 * i + 3) % len(said)], i % 2) for i in range(len(said) - 2)]
    piqa = [{"goal": a, "sol1": b, "sol2": c, "label": g} for a, b, c, g in asked]
    hella = [
        {"activity_label": "Reading", "ctx_a": a, "ctx_b": "then", "endings": [b, c, "[title] he left"], "label": g}
        for a, b, c, g in asked
    ]
    arc = [
        {"question": a, "choices": {"text": [b, c, "five"], "label": ["A", "B", "C"]}, "answerKey": "AB"[g]}
        for a, b, c, g in asked
    ]
    race = [_race(articles[1][300 * i : 300 * (i + 1)], asked[2 * i : 2 * i + 2]) for i in range(len(asked) // 2)]
    problems = [[dict(zip(("question", "options", "answer"), one, strict=True)) for one in _problems(r)] for r in race]
    flat = [{"article": row["article"], **one} for row, some in zip(race, problems, strict=True) for one in some]
    own = [{"article": row["article"], "problems": str(some)} for row, some in zip(race, problems, strict=True)]
    (folder / "three_shots.yaml").write_text(SHOTS_YAML)
    for name, some in (("shots", piqa[-5:]), ("by_article", race)):
        _write(folder / f"{name}.jsonl", some)
    rows: dict[str, list[dict[str, Any]]] = {
        "wikitext": [{"page": page} for page in articles],
        "lambada_openai": [{"text": line} for line in _with_guesses(lines, subject)],
        "lambada_standard": [{"text": line} for line in _with_guesses(plain, subject)],
        "hellaswag": hella,
        "piqa": piqa,
        "arc_easy": arc,
        "piqa_3shot": piqa[:-5],
        "race": own,
        "race_by_question": flat,
        "writes": [{"text": sentence} for sentence in said[:10]],
    }
    return {name: _write(folder / f"{name}.jsonl", some) for name, some in rows.items()}


def _lines(file: Path, count: int) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()[:count]


def _with_guesses(lines: list[str], subject: Subject) -> list[str]:
    """Behind them some with the word at their end that the model thinks of first, so that not all answers are wrong."""
    found = []
    for line in lines[:200]:
        context = line.rpartition(" ")[0]
        guess = generate(subject.model, subject.tokenizer, context, 1, Sampling(temperature=0), subject.seq_len).text
        if guess[:1] == " " and guess[1:].isalpha():
            found.append(context + guess)
    return lines + found


def _race(article: str, asked: list[tuple[str, str, str, int]]) -> dict[str, Any]:
    options = [[b, c, "nobody", "five"] for _, b, c, _ in asked]
    return {
        "article": article, "questions": [a for a, *_ in asked], "options": options,
        "answers": ["AB"[g] for *_, g in asked],
    }  # fmt: skip


def _problems(row: dict[str, Any]) -> list[tuple[str, list[str], str]]:
    return list(zip(row["questions"], row["options"], row["answers"], strict=True))


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def build(name: str, data: Path) -> tuple[GPTSettings, Tokenizer]:
    if name == "gpt2-vocabulary":
        return gpt2(vocab_size=50257, seq_len=256), Tokenizer.load(data / "gpt2-vocab.json")
    text = (data / "wt2.valid.txt").read_text(encoding="utf-8")[:200_000]
    if name == "llama":
        return llama(vocab_size=2111, seq_len=128, num_layers=3, width=64), train_bpe([text], 2048)
    return gpt2(vocab_size=600, seq_len=64, width=32, num_layers=4), train_bpe([text], 600)


def save(name: str, data: Path, folder: Path) -> Path:
    """A checkpoint of random weights, and beside it as `hf` its export."""
    settings, tokenizer = build(name, data)
    weights = {key: value * 0.5 for key, value in random_weights(settings).items()}
    facts = save_imported(folder / "run", settings, lambda key: [weights[key]], tokenizer, {"format": "test"}, step=7)
    checkpoint = Path(facts["checkpoint"])
    export_hf(checkpoint, folder / "hf", check=False)
    return checkpoint


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Of each example its nats by ours and by the harness's `hf`, and whether each target was the most likely token;
    how many targets it has; and the figures of both."""

    ours: list[float]
    theirs: list[float]
    greedy: tuple[list[bool], list[bool]]  # empty where the harness does not say
    targets: list[int]
    figures: dict[str, tuple[float, float]]

    @property
    def apart(self) -> float:
        """The two sums, in nats per 1,000 tokens: of a thousand at least, as fp32 has no more digits."""
        return abs(math.fsum(self.ours) - math.fsum(self.theirs)) / max(sum(self.targets), 1000) * 1000

    @property
    def worst(self) -> float:
        """The same of the example that is furthest apart."""
        rows = zip(self.ours, self.theirs, self.targets, strict=True)
        return max(abs(one - other) / max(count, 1000) * 1000 for one, other, count in rows)

    @property
    def accuracies(self) -> list[tuple[float, float]]:
        return [both for name, both in self.figures.items() if "acc" in name]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the harness says of a checkpoint by its `hf` model of the export, beside what ours say."""

    through: dict[str, Compared]  # its own tasks by its `lmtrain` model
    own: dict[str, Compared]  # the tasks of `lmtrain eval`
    written: tuple[Any, Any]  # what both models wrote on


def compare(name: str, data: Path, folder: Path, num_lines: int = NUM_LINES, softmax: str = "float64") -> Found:
    checkpoint = save(name, data, folder)
    subject, passes = load_for_eval(checkpoint, torch.device("cpu"), "fp32").subject, SharedAnswers()
    tasks = write_tasks(folder, data, subject, num_lines)
    exact = {"pretrained": str(folder / "hf"), "dtype": "float32", "softmax_dtype": softmax}
    models = {"ours": ("lmtrain", {"pretrained": str(checkpoint)}), "theirs": ("hf", exact)}
    found = run_harness(folder, models, tasks)
    ours, theirs = found["ours"], found["theirs"]
    assert ours.keys() == theirs.keys() == tasks.keys()
    written = ours.pop("writes")["responses"], theirs.pop("writes")["responses"]
    own = {twin.ours: beside(twin, subject, passes, tasks[twin.theirs], theirs[twin.theirs]) for twin in TWINS}
    targets = {twin.theirs: own[twin.ours].targets for twin in TWINS}
    return Found(
        own=own,
        written=written,
        through={task: through(ours[task], theirs[task], targets.get(task)) for task in theirs},
    )


def beside(twin: Twin, subject: Subject, passes: SharedAnswers, rows: Path, theirs: dict[str, Any]) -> Compared:
    """`lmtrain eval`'s task and the harness's `hf`, example by example: a page, a line, an answer."""
    name = str(rows.parent / twin.ours) if twin.ours.endswith(".yaml") else twin.ours
    source = rows.with_name("by_article.jsonl") if twin.theirs == "race_by_question" else rows
    found = run(find_task(name), subject, source, shared_answers=passes)
    measures, columns = found.result.measures, found.columns
    nats, targets = columns["nll"].tolist(), columns["targets"].astype(int).tolist()
    greedy = columns["items_greedy"].astype(bool).tolist() if twin.figures is _LAMBADA else []
    if twin.figures is _CHOICE:  # because: its columns have the chosen answer's alone
        requests = list(found.prepared.requests)
        answers = list(passes.score(requests, lambda new: ()))
        nats, greedy = [float(one.nll.sum()) for one in answers], [bool(one.greedy.all()) for one in answers]
        targets = [request.num_scored for request in requests]
    their_nats, their_greedy = responses(theirs)
    return Compared(
        ours=nats,
        theirs=[-one for one in their_nats],
        greedy=(greedy, their_greedy),
        targets=targets,
        figures={ours: (measures[ours], theirs["results"][f"{key},none"]) for ours, key in twin.figures.items()},
    )


def through(ours: dict[str, Any], theirs: dict[str, Any], targets: list[int] | None) -> Compared:
    """The harness's `lmtrain` model and its `hf`; of a task that we have not, nobody counts the targets."""
    (left, left_greedy), (right, right_greedy) = responses(ours), responses(theirs)
    return Compared(
        ours=left,
        theirs=right,
        greedy=(left_greedy, right_greedy),
        targets=targets or [1] * len(right),
        figures={name: (ours["results"][name], value) for name, value in theirs["results"].items()},
    )


def responses(answers: dict[str, Any]) -> tuple[list[float], list[bool]]:
    """Of all documents the log-likelihoods, and whether they are greedy: a rolling one comes as a bare number."""
    flat = [one for document in answers["responses"] for one in document]
    if isinstance(flat[0], float):
        return flat, []
    return [nats for nats, _ in flat], [greedy for _, greedy in flat]
