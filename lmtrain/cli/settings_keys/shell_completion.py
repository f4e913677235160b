"""Shell completion of overrides (groups, choices, keys and values) and of the ids of evaluation tasks.

typer calls it in a new process at every TAB, so it must be quick. bash splits words at `=` and asks for the rest of a
word; zsh and fish ask for the whole word.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from lmtrain.start.complete_settings import SettingsCompleter


def complete_override(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return completions of an override KEY=VALUE for typer; `incomplete` is what the user has typed of it."""
    *overrides, word = _rejoin_words([*(ctx.params.get("overrides") or ()), incomplete])
    completer = _completer(ctx, overrides)
    # because: bash asks only for the part of the word after `=`
    already_typed = len(word) - len(incomplete) if word.endswith(incomplete) else 0
    completions = _with_prefix(word, completer.completions(word))
    return [(completed[already_typed:], help_text) for completed, help_text in completions]


def complete_group(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the names of config groups that begin with `incomplete`, for typer."""
    return _with_prefix(incomplete, _completer(ctx).group_completions())


def complete_choice(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the choices, of the config group typed before, that begin with `incomplete`, for typer."""
    completer = _completer(ctx)
    return _with_prefix(incomplete, completer.choice_completions(str(ctx.params.get("group") or "")))


def complete_key(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the names of settings (without values) that begin with `incomplete`, for typer."""
    completions = dict(_completer(ctx).name_completions(incomplete))
    # because: some groups, such as experiment, are not sections of the settings
    names = [name for name in completions if "." in name or f"{name[:-1]}." in completions]
    return _with_prefix(incomplete, [(name.removesuffix("="), completions[name]) for name in names])


def complete_task(incomplete: str) -> list[tuple[str, str]]:
    """Return the ids of evaluation tasks that begin with `incomplete`, for typer."""
    from lmtrain.eval.task import all_tasks

    return _with_prefix(incomplete, [(name, f"needs {task.data}") for name, task in all_tasks().items()])


def _completer(ctx: typer.Context, overrides: Iterable[str] = ()) -> SettingsCompleter:
    """Return what completes a word that is typed behind these overrides."""
    # because: only a TAB needs it
    from lmtrain.start.complete_settings import SettingsCompleter

    return SettingsCompleter(overrides, ctx.params.get("config_dir"))


def _with_prefix(prefix: str, completions: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the completions whose text begins with `prefix`."""
    return [completion for completion in completions if completion[0].startswith(prefix)]


def _rejoin_words(words: list[str]) -> list[str]:
    """Return a command line's words with every KEY=VALUE as one word. Bash passes `model=gpt_tiny` to a completion
    function as three words, and typer drops the `=` of a last word that has no value yet.
    """
    joined: list[str] = []
    for number, word in enumerate(words):
        last = number == len(words) - 1
        if word == "=" and joined:
            joined[-1] += "="
        elif joined and joined[-1].endswith("="):
            joined[-1] += word
        elif last and not word and joined and "=" not in joined[-1]:
            joined[-1] += "="  # because: typer removes the `=` of a word without a value
        else:
            joined.append(word)
    return joined
