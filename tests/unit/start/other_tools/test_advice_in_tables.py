"""Every KEY=VALUE in the sentences about other tools' names is a setting that a run takes."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from lmtrain.config import foreign_names, ideas_without_counterpart, names_without_counterpart
from lmtrain.config.compose_run_settings import compose
from lmtrain.errors import LmtrainError
from lmtrain.start.other_tools import foreign_options, options_by_verb
from lmtrain.train.run_config import RunConfig

# places to fill in, and what stands there in the test
_FILLED_IN = {"FIRST": "1", "LAST": "2", "N": "2", "PREFIX": "p", "FILE": "f.txt", "FOLDER": "d", "PATH": "t.json"}
_STAGE = "stages.a."  # before settings that only a stage has
_WITH = {  # what a setting needs beside it, which its sentence need not say
    "model.rotary_scaling=yarn": ["model.rotary_factor=8", "model.rotary_original_len=64"],
    "parallel.sequence_parallel=true": ["parallel.tp=2"], "parallel.dp_shard=2": ["train.global_batch=8"],
    "model.rotary_scaling=llama3": ["model.positions=rotary"], "parallel.schedule=gpipe": ["parallel.pp=2"],
    "parallel.zero=2": ["parallel.dp_shard=2"], "parallel.zero=3": ["parallel.dp_shard=2"],
    "data=blend": ["data.datasets=[{path: p, weight: 1}]"],
    "stages.a.steps=2": [], "stages.a.stop_after=true": ["stages.a.steps=2"],
    "data.tokenizer=t.json": ["data.text=f.txt"], "model.layer_pattern=F": ["model.positions=rotary"],
}  # fmt: skip


def _sentences() -> Iterator[str]:
    yield from foreign_names.UNSUPPORTED_SETTINGS.values()
    yield from names_without_counterpart.SENTENCES.values()
    yield from ideas_without_counterpart.IDEAS
    yield from foreign_options.OTHER_VERBS.values()
    yield from foreign_options.MEANS_MORE.values()
    for notes in foreign_options.VALUE_NOTES.values():
        yield from notes.values()
    for _, by_sentence in (*options_by_verb.ANYWAY, *options_by_verb.ABSENT):
        yield from by_sentence


def _overrides() -> Iterator[str]:
    yield from foreign_options.SWITCHES.values()
    yield from foreign_options.OFF_SWITCHES.values()
    for by_value in foreign_options.VALUES.values():
        yield from by_value.values()


def _words_in(sentence: str) -> list[str]:
    """The words KEY=VALUE of a sentence, with their places filled in."""
    words = re.findall(r"(?<![\w.=-])([a-z_]+(?:\.(?:NAME|[a-z_]+))*=(?:\[[^\]]*\]|[^\s,;:`)]+))", sentence)
    filled = [re.sub("[A-Z]{2,}|N", lambda place: _FILLED_IN.get(place[0], place[0]), word.rstrip("."))
              for word in (word.replace("stages.NAME.", _STAGE) for word in words)]  # fmt: skip
    return [f"{_STAGE}{word}" if word.startswith(("steps=", "stop_after=")) else word for word in filled]


CASES = sorted(
    {(word,) for sentence in _sentences() for word in _words_in(sentence)} | {tuple(o.split()) for o in _overrides()}
)


def test_the_words_of_a_sentence_are_found() -> None:
    assert _words_in("Give optim.lr=1, a=[1,LAST]; or `b.c=N`.") == ["optim.lr=1", "a=[1,2]", "b.c=2"]
    assert ("checkpoint.keep_best=1",) in CASES
    assert len(CASES) > 50


@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_a_setting_in_a_sentence_is_accepted(words: tuple[str, ...]) -> None:
    beside = [word for typed in words for word in _WITH.get(typed, [])]
    source = [] if any(word.startswith(("data.", "data=")) for word in (*words, *beside)) else ["data.path=p"]
    problems: tuple[str, ...] = ()
    try:
        compose(RunConfig, ["model=gpt_tiny", *source, *beside, *words])
    except LmtrainError as error:
        problems = getattr(error, "problems", (str(error),))
    keys = tuple(word.partition("=")[0] for word in words)
    assert [text for text in problems if text.startswith(keys)] == []
