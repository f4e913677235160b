"""Hydra's composition: groups, a user's folder, overrides and sweeps; and nothing that names code."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lmtrain.config import compose_files_with_hydra
from lmtrain.config.compose_run_settings import (
    compose,
    compose_plain,
    conf_dir,
    expand_sweep,
    group_choices,
)
from lmtrain.config.strict_yaml import YamlFile, read_yaml
from lmtrain.errors import MissingInputError, SettingsError
from lmtrain.train.run_config import RunConfig


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A user's config folder with a quote and a space in its name."""
    folder = tmp_path / "user's configs"
    for name, text in {
        "mini.yaml": "defaults: [{drink: tea}, {precision: fp32}, _self_]\ncups: 1\nsaucers: ${cups}\nrampup: null\n",
        "drink/tea.yaml": "kind: tea\nleaves: 2\n",
        "drink/coffee.yaml": "kind: coffee\n",
        "precision/own.yaml": "kind: bf16\nmine: true\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def _refused(mine: Path, *overrides: str) -> str:
    with pytest.raises(SettingsError) as caught:
        compose_plain(overrides, config_dir=mine, name="mini")
    return str(caught.value)


def test_a_users_folder_comes_before_the_packages(mine: Path) -> None:
    plain = compose_plain(["precision=own"], config_dir=mine, name="mini")
    assert plain == {
        "drink": {"kind": "tea", "leaves": 2}, "precision": {"kind": "bf16", "mine": True},
        "cups": 1, "saucers": 1, "rampup": None,
    }  # fmt: skip


def test_a_users_folder_adds_choices_to_the_packages_own_config(mine: Path) -> None:
    assert compose_plain(["precision=own"], config_dir=mine)["precision"] == {"kind": "bf16", "mine": True}
    (mine / "precision" / "bf16.yaml").write_text("kind: shadow\n", encoding="utf-8")
    assert compose_plain(["precision=bf16"], config_dir=mine)["precision"] == {"kind": "shadow"}


def test_overrides_choose_change_add_and_remove(mine: Path) -> None:
    plain = compose_plain(
        ["drink=coffee", "drink.sugar=2", "cups=4k", "rampup.start=3", "~precision"], config_dir=mine, name="mini"
    )
    assert plain == {
        "drink": {"kind": "coffee", "sugar": 2}, "cups": "4k", "saucers": "4k", "rampup": {"start": 3}
    }  # fmt: skip


def test_a_key_that_stands_twice_hides_nothing_else_that_is_wrong() -> None:
    words = ["data.path=x", "train.steps=6", "train.steps=8", "train.stepz=3"]
    with pytest.raises(SettingsError) as refused:
        compose(RunConfig, words)
    assert [said.split(" ")[0] for said in refused.value.problems] == ["train.steps=8", "train.stepz=3"]
    assert compose(RunConfig, [*words[:2], words[1]]).train.steps == 6


def test_composing_leaves_nothing_behind(mine: Path) -> None:
    first = compose_plain(["cups=2"], config_dir=mine, name="mini")
    (mine / "midi.yaml").write_text((mine / "mini.yaml").read_text().replace("cups: 1", "cups: 5"))
    assert [compose_plain([], config_dir=mine, name=name)["cups"] for name in ("mini", "midi")] == [1, 5]
    assert first["cups"] == 2


def test_files_are_joined_once_for_all_runs_that_choose_them(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compose_plain(["cups=2"], config_dir=mine, name="mini")
    first["drink"]["leaves"] = 7
    read: list[Path] = []

    def noted(path: Path) -> YamlFile:
        read.append(path)
        return read_yaml(path)

    monkeypatch.setattr(compose_files_with_hydra, "read_yaml", noted)
    assert compose_plain(["cups=3"], config_dir=mine, name="mini")["drink"]["leaves"] == 2
    assert read == []
    assert compose_plain(["drink=coffee"], config_dir=mine, name="mini")["drink"] == {"kind": "coffee"}
    assert mine / "drink" / "coffee.yaml" in read


def test_a_file_that_has_changed_or_come_is_read_in_the_next_run(mine: Path) -> None:
    def leaves() -> object:
        return compose_plain([], config_dir=mine, name="mini")["drink"]["leaves"]

    assert leaves() == 2
    (mine / "drink" / "tea.yaml").write_text("kind: tea\nleaves: 3\n")
    assert leaves() == 3
    assert compose_plain([], config_dir=mine, name="mini")["precision"]["kind"] == "fp32"
    (mine / "precision" / "fp32.yaml").write_text("kind: bf16\n")
    assert compose_plain([], config_dir=mine, name="mini")["precision"]["kind"] == "bf16"


def test_unknown_names_are_answered_with_near_ones(mine: Path) -> None:
    assert _refused(mine, "drink=coffe") == "drink=coffe is not in conf/drink/. Did you mean coffee?"
    assert _refused(mine, "model=xyz").endswith(" choices.")  # and not all their names
    assert "Write cups=." in _refused(mine, "cups==")
    assert "Add -m" in _refused(mine, "cups=1,2")
    with pytest.raises(SettingsError, match=r"--config-name=minni.*Did you mean mini\?"):
        compose_plain([], config_dir=mine, name="minni")
    with pytest.raises(MissingInputError, match="is not a folder"):
        compose_plain([], config_dir=mine / "absent")


@pytest.mark.parametrize(
    ("defaults", "word", "said"),
    [
        ("[_self_]", "~drink", "~drink removes drink, which is not chosen. Leave it out."),
        ("[_self_]", "drink=tea", "drink=tea changes drink, which no defaults list names. Write +drink=tea."),
        ("[{drink: tea}, {/drink: coffee}, _self_]", "a=1", "has chosen it. Write `- override /drink: coffee`."),
    ],
)
def test_groups_and_defaults_that_contradict_each_other(mine: Path, defaults: str, word: str, said: str) -> None:
    (mine / "mini.yaml").write_text(f"defaults: {defaults}\na: 2\n", encoding="utf-8")
    assert said in _refused(mine, word)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("drink:\n  _target_: os.getcwd\n", "drink._target_ names code"),
        ("cups:\n  - _partial_: true\n", r"cups\[0\]\._partial_ names code"),
        ("name: ${oc.env:HOME}\n", "calls a resolver"),
        ("names: ['${oc.env:HOME}']\n", r"names\[0\]=.* calls a resolver"),
        ("name: ${oc.decode:'1'}\n", "calls a resolver"),
        ("name: '${ oc.env : HOME }'\n", "calls a resolver"),
        ("name: ${absent}\n", "absent"),
    ],
)
def test_configs_are_data(mine: Path, text: str, said: str) -> None:
    (mine / "bad.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError, match=said):
        compose_plain([], config_dir=mine, name="bad")


@pytest.mark.parametrize(
    "line",
    ["- drink: ${oc.env:HOME}", "- override drink: ${oc.env:HOME}", "- ${oc.env:HOME}: tea",
     "- drink@${oc.env:HOME}: tea", "- mini@${oc.env:HOME}", "- optional drink: ['${oc.env:HOME}']"],
)  # fmt: skip
def test_a_defaults_list_calls_no_resolver(mine: Path, line: str) -> None:
    (mine / "bad.yaml").write_text(f"defaults:\n  {line}\n", encoding="utf-8")
    with pytest.raises(SettingsError, match=r"line 2 has .*: The reference .* calls a resolver"):
        compose_plain([], config_dir=mine, name="bad")


def test_lists_that_name_two_lists_each_have_an_end(mine: Path) -> None:
    (mine / "l0.yaml").write_text("cups: 1\n", encoding="utf-8")
    for number in range(1, 20):
        text = f"defaults:\n  - l{number - 1}\n  - l{number - 1}\n"
        (mine / f"l{number}.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError, match="defaults lists of l19, l18, l17 and 17 more include more than 1000 files"):
        compose_plain([], config_dir=mine, name="l19")


def test_a_sweep_of_a_billion_runs_is_refused_at_once(mine: Path) -> None:
    with pytest.raises(SettingsError, match="The values of b, c make more than 10000 runs with -m"):
        expand_sweep(["a=1", "b=range(0,1000000000)", "c=1,2"], config_dir=mine)


def test_a_config_cannot_widen_the_search(mine: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "drink"
    elsewhere.mkdir(parents=True)
    (elsewhere / "poison.yaml").write_text("kind: poison\n", encoding="utf-8")
    text = f"defaults:\n  - drink: poison\n  - _self_\nhydra:\n  searchpath: ['file://{elsewhere.parent}']\n"
    (mine / "bad.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError, match="poison"):
        compose_plain([], config_dir=mine, name="bad")


def test_a_sweep_is_every_combination_in_order(mine: Path) -> None:
    assert expand_sweep(["a=1,2", "b=x", "c=range(1,4)"]) == [
        [f"a={a}", "b=x", f"c={c}"] for a in (1, 2) for c in (1, 2, 3)
    ]  # fmt: skip
    assert expand_sweep(["drink=glob(*)"], config_dir=mine) == [["drink=coffee"], ["drink=tea"]]
    assert expand_sweep(["+a.b='x,y',z"]) == [["+a.b='x,y'"], ["+a.b=z"]]
    assert expand_sweep([]) == [[]]


@pytest.mark.parametrize(
    ("override", "said"),
    [("lr=interval(0,1)", "does not list its values"),
     ("drink=glob(z*)", "matches no choice of drink. Choices are coffee, tea"),
     ("drnk=glob(z*)", "matches no choice of drnk. Did you mean drink")],
)  # fmt: skip
def test_a_sweep_without_an_end_or_a_beginning_is_refused(mine: Path, override: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        expand_sweep([override], config_dir=mine)


def test_groups_may_lie_within_groups(mine: Path) -> None:
    (mine / "drink" / "hot").mkdir()
    (mine / "drink" / "hot" / "cocoa.yaml").write_text("milk: 3\n", encoding="utf-8")
    assert group_choices(mine)["drink/hot"] == ["cocoa"]
    drink = compose_plain(["+drink/hot=cocoa"], config_dir=mine, name="mini")["drink"]
    assert drink == {"kind": "tea", "leaves": 2, "hot": {"milk": 3}}


def test_every_shipped_choice_is_a_mapping() -> None:
    for group, names in group_choices().items():
        for name in names:
            data = OmegaConf.to_container(OmegaConf.load(conf_dir() / group / f"{name}.yaml"))
            assert isinstance(data, dict), f"{group}/{name}"

