"""Recipes of multiple choice: what a line of YAML asks of a row, and how each way to get it wrong is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmtrain.errors import DataError, MissingInputError, SettingsError, UsageError
from lmtrain.eval.task import find_task
from lmtrain.eval.task_recipes.multiple_choice_yaml import Question, Recipe
from lmtrain.eval.tasks.choice import Choice

MINE = 'question: "Q: {goal}\\nA:"\nchoices: options\nanswer: label\n'
ROW = {"goal": "to mill", "options": ["a mill", "a house"], "label": 1}


def recipe(path: Path, text: str = MINE) -> Recipe:
    path.write_text(text)
    task = find_task(str(path))
    assert isinstance(task, Choice)
    return task.choice_recipe


def asked(name: str, row: dict[str, Any]) -> list[Question]:
    task = find_task(name)
    assert isinstance(task, Choice)
    return list(task.choice_recipe.questions(row, Path("rows.jsonl"), 1))


def test_three_lines_are_a_task(tmp_path: Path) -> None:
    mine = recipe(tmp_path / "mine.yaml")
    assert (mine.id, mine.between, mine.normalisation) == ("choice/mine", " ", "characters")
    (question,) = mine.questions(ROW, Path("rows.jsonl"), 1)
    assert question == Question(text="Q: to mill\nA:", choices=["a mill", "a house"], answer=1, line=1)


def test_the_published_formats_are_asked_as_the_harness_asks_them() -> None:
    hella = {
        "activity_label": "Milling", "ctx_a": "[header] A man [step] mills.", "ctx_b": "then he", "label": "1",
        "endings": ["goes [substeps] home.", "sits  [title] down."],
    }  # fmt: skip
    (one,) = asked("choice/hellaswag", hella)
    assert one.text == "Milling: A man mills. Then he"
    assert one.choices == ["goes home.", "sits . down."]
    assert one.answer == 1
    (one,) = asked("choice/piqa", {"goal": "mill", "sol1": "a", "sol2": "b", "label": 0})
    assert (one.text, one.choices, one.answer) == ("Question: mill\nAnswer:", ["a", "b"], 0)
    hub = {"question": "why?", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "2"}
    original = {
        "question": {"stem": "why?", "choices": [{"text": "a", "label": "1"}, {"text": "b", "label": "2"}]},
        "answerKey": "2",
    }
    assert asked("choice/arc", hub) == asked("choice/arc-original", original)
    assert asked("choice/arc", hub)[0].answer == 1
    race = {
        "article": "A mill.", "questions": ["What?", "Who?"], "answers": ["B", "A"],
        "options": [["x", "y", "z", "w"], ["p", "q", "r", "s"]],
    }  # fmt: skip
    first, second = asked("choice/race", race)
    assert (first.text, first.choices[first.answer]) == ("Article: A mill.\n\nQuestion: What?\nAnswer:", "y")
    assert second.choices[second.answer] == "p"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("choices: a\nanswer: b\n", "has no `question:` line"),
        (MINE + "chioces: x\n", "line 4 has the key chioces, which no recipe has. Did you mean choices?"),
        (MINE.replace("{goal}", "{}"), "line 1 has question=Q: {}\nA:, which has {} without the name of a key"),
        (MINE.replace("{goal}", "{goal"), "without the name of a key"),
        (MINE.replace("{goal}", "{goal|upper}"), "has the unknown filter upper"),
        (MINE.replace("choices: options", 'choices: "{options}"'), "Write choices: label, without braces"),
        (MINE.replace("choices: options", "choices: [true, false]"), "is not a text or a list of texts"),
        (MINE.replace("answer: label", "answer: 3"), "line 3 has answer=3, which is not a text"),
        (MINE + "clean: soap\n", "clean=soap, which is not known"),
        (MINE + "normalisation: tokens\n", "normalisation=tokens, which is not known"),
        (MINE + "shots: -1\n", "shots=-1, which is not a whole number from 0 to 1000"),
        (MINE + "shots: 2\n", "the recipe has no `shots_file:`"),
        (MINE + "shots_seed: true\n", "shots_seed=True, which is not a whole number"),
        (MINE + "each: label\n", "each=label, which is not a list of keys"),
        (MINE + "like: [a]\n", "like=list, which is not a text"),
    ],
)
def test_a_wrong_line_is_named_with_a_way_out(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        recipe(tmp_path / "mine.yaml", text)
    assert said in str(caught.value)
    assert str(tmp_path / "mine.yaml") in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"goal": None}, "line 7 has no text under goal, and"),
        ({"options": "a mill"}, "has no list under options"),
        ({"options": ["a mill"]}, "has fewer than two choices"),
        ({"options": ["a mill", ""]}, "has an empty choice"),
        ({"options": ["a mill", 3.5]}, None),
        ({"label": 2}, "has the answer '2', but its 2 choices are called 0, 1."),
        ({"label": True}, "has the answer 'bool', but its 2 choices are called 0, 1."),
        ({"label": "0"}, None),
    ],
)
def test_a_row_that_does_not_fit_is_named_with_the_line_that_asks(
    tmp_path: Path, change: dict[str, Any], said: str | None
) -> None:
    mine, rows = recipe(tmp_path / "mine.yaml"), Path("rows.jsonl")
    if said is None:
        assert list(mine.questions(ROW | change, rows, 7))
        return
    with pytest.raises(DataError) as caught:
        list(mine.questions(ROW | change, rows, 7))
    assert said in str(caught.value)
    assert f"{tmp_path / 'mine.yaml'} line" in str(caught.value)


def test_a_key_that_a_row_lacks_and_lists_of_other_lengths(tmp_path: Path) -> None:
    mine = recipe(tmp_path / "mine.yaml")
    with pytest.raises(DataError, match=r"line 1 has no goal, and .*\(question\) needs it\. Did you mean goals\?"):
        list(mine.questions({"goals": "x", "options": ["a", "b"], "label": 0}, Path("rows.jsonl"), 1))
    with pytest.raises(DataError, match="is not a JSON object"):
        list(mine.questions([1], Path("rows.jsonl"), 1))
    with pytest.raises(DataError, match=r"different lengths \(questions 1, options 2, answers 1\)"):
        asked("choice/race", {"article": "", "questions": ["a"], "options": [[], []], "answers": ["A"]})


def test_a_recipe_may_begin_with_another(tmp_path: Path) -> None:
    (tmp_path / "shots.jsonl").write_text("")
    mine = recipe(tmp_path / "five.yaml", "like: choice/piqa\nshots: 5\nshots_file: shots.jsonl\n")
    assert (mine.id, mine.shots, mine.shots_file) == ("choice/five", 5, tmp_path / "shots.jsonl")
    assert mine.question == "Question: {goal}\nAnswer:"
    assert recipe(tmp_path / "six.yaml", "like: five.yaml\nshots: 6\n").shots_file == tmp_path / "shots.jsonl"
    files = [tmp_path / name for name in ("five.yaml", "six.yaml", "shots.jsonl")]
    assert (find_task(f"{tmp_path}/six.yaml-s512").files, find_task("choice/piqa").files) == (files, [])
    with pytest.raises(UsageError, match="like: choice/pika` does not name a multiple choice task"):
        recipe(tmp_path / "seven.yaml", "like: choice/pika\n")
    with pytest.raises(MissingInputError, match="does not exist"):
        find_task(str(tmp_path / "none.yaml"))
    with pytest.raises(SettingsError, match="refers to itself through its `like:`"):
        recipe(tmp_path / "loop.yaml", "like: loop.yaml\n")


def test_braces_are_written_twice(tmp_path: Path) -> None:
    mine = recipe(tmp_path / "mine.yaml", MINE.replace("Q: {goal}", "{{x}} {goal|lower}"))
    (question,) = mine.questions(ROW | {"goal": "THE {mill}"}, Path("rows.jsonl"), 1)
    assert question.text == "{x} the {mill}\nA:"
