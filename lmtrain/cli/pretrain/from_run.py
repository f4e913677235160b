"""`--from-run`: the settled settings of a run in place of conf/pretrain.yaml, to go on with it or to branch off.

Called by pretrain and by its sweeps; torch-free. A run's config.json becomes a folder of configs, a file for each
group, so that overrides and groups (`optim=lamb`) mean there what they mean everywhere.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.disk.format import MANIFEST
from lmtrain.checkpoint.store import latest
from lmtrain.config.build import build_settings
from lmtrain.config.compose import compose, group_choices
from lmtrain.config.yaml_file import MAX_BYTES
from lmtrain.errors import DataError, MissingInputError, SettingsError, UsageError
from lmtrain.runfolder.names import CHECKPOINTS, CONFIG
from lmtrain.runtime.files.files import parse_json, read_bytes
from lmtrain.train.config import RunConfig, seen_from_here

_CHOICE, _ROOT = "as_in_that_run", "from_run"  # names of the files that a run becomes


@dataclass(frozen=True)
class Source:
    """A run, or a checkpoint of one, and its settings."""

    path: Path  # as the user gave it
    run: Path
    settings: dict[str, Any]

    @classmethod
    def find(cls, path: Path) -> Source:
        if not path.is_dir():
            state = "is not a folder" if path.exists() else "does not exist"
            raise MissingInputError(f"--from-run={path} {state}. Give the folder of a run, or a checkpoint in it.")
        run = next((one for one in (path, path.parent, path.parent.parent) if (one / CONFIG).is_file()), None)
        if run is None or (run != path and not (path / MANIFEST).is_file()):
            raise MissingInputError(
                f"--from-run={path} is not a run: it holds no {CONFIG}, which every run writes when it begins. "
                "Give the folder that was its run.dir, or a checkpoint in it."
            )
        settings = parse_json(read_bytes(run / CONFIG, MAX_BYTES), run / CONFIG)
        if not isinstance(settings, dict) or not isinstance(settings.get("model"), dict):
            raise DataError(f"{run / CONFIG} does not hold the settings of a run. Give another run to --from-run.")
        if wrong := next(_no_settings(settings), None):
            raise DataError(f"{run / CONFIG} {wrong}, which no run writes. It is damaged; give another to --from-run.")
        return cls(path, run, seen_from_here(settings, run))

    def base(self, overrides: Sequence[str], *, branches: bool) -> dict[str, Any]:
        """Return the run's settings with the checkpoint to begin from: its own newest, or the one that was given."""
        theirs = self.settings.get("checkpoint")
        checkpoint = dict(theirs) if isinstance(theirs, dict) else {}
        begins_elsewhere = any(text.lstrip("+").startswith("checkpoint.init_from=") for text in overrides)
        if (branches and not begins_elsewhere) or (not branches and self.path != self.run):
            checkpoint |= {"resume": str(self.path), "init_from": None}
        # because: a run that was begun with `none` meant to begin with nothing there, and now something is
        elif branches or checkpoint.get("resume") == "none":
            checkpoint |= {"resume": "auto"}
        return self.settings | {"run": {"dir": str(self.run)}, "checkpoint": checkpoint}


def _no_settings(tree: dict[str, Any]) -> Iterator[str]:
    """Yield what makes JSON no settings of a run: keys that choose files, and characters that no text file can hold."""
    for group in (tree, *(inner for inner in tree.values() if isinstance(inner, dict))):
        yield from (f"has the key {word}" for word in ("defaults", "hydra") if word in group)
    if half := re.search("[\ud800-\udfff]", json.dumps(tree, ensure_ascii=False)):
        yield f"holds half a character (U+{ord(half[0]):04X})"


_composed_by_launcher: RunConfig | None = None


def prepare(tokenizer: str, settings: dict[str, Any] | None) -> None:
    """Fill what the ranks of a run would each fill anew, in the process that forks them; called there by its name.

    The verb is built, the tokenizer and the code's digests are read. `settings` are what the launcher has composed of
    the run's words, if the ranks are to have the same.
    """
    from lmtrain.cli.verbs import build_verb
    from lmtrain.tokenizer.base import Tokenizer
    from lmtrain.train.ranks.run_facts import PACKAGE, code_digests

    global _composed_by_launcher
    build_verb("pretrain")
    if settings is not None:
        _composed_by_launcher = build_settings(RunConfig, settings)
    code_digests(PACKAGE)
    assert Tokenizer.load(Path(tokenizer)).fingerprint


def compose_run(
    overrides: Sequence[str], *, from_run: Path | None, config_dir: Path | None, name: str,
    say: Callable[[str], None] | None = None,
) -> RunConfig:  # fmt: skip
    """Compose the settings of a run from conf/NAME.yaml or from another run; with another run.dir, that is a branch."""
    if from_run is None:
        return _composed_by_launcher or compose(RunConfig, overrides, config_dir=config_dir, name=name, report=say)
    if name != "pretrain":
        raise UsageError(f"--from-run={from_run} takes the place of --config-name={name}. Leave one of them out.")
    source = Source.find(from_run)
    branches = any(text.lstrip("+").startswith("run.dir=") for text in overrides)
    said = list[str]()
    config = _composed(source.base(overrides, branches=branches), overrides, config_dir, said.append)
    another = Path(config.run.dir).resolve() != source.run.resolve()
    if another != branches:  # because: a recipe can name a folder too, and an override the run's own
        said = []
        config = _composed(source.base(overrides, branches=another), overrides, config_dir, said.append)
    if another and config.checkpoint.resume == str(source.run) and latest(source.run / CHECKPOINTS) is None:
        raise MissingInputError(
            f"--from-run={from_run} has saved no checkpoint that run.dir={config.run.dir} could branch off from. "
            "Add checkpoint.resume=none to begin anew with its settings."
        )
    if say is not None:
        for line in said:
            say(line)
    return config


def _composed(
    settings: dict[str, Any], overrides: Sequence[str], config_dir: Path | None, say: Callable[[str], None]
) -> RunConfig:
    with _as_configs(settings, config_dir) as folder:
        try:
            return compose(RunConfig, overrides, config_dir=folder, name=_ROOT, report=say)
        except SettingsError as error:  # because: the folder is gone when the message is read
            run = str(Path(settings["run"]["dir"]) / CONFIG)
            ours = re.compile(rf"{re.escape(str(folder.resolve()))}/(\w+/{_CHOICE}|{_ROOT})\.yaml( line \d+)?")
            raise SettingsError([ours.sub(lambda _: run, problem) for problem in error.problems]) from error


@contextmanager
def _as_configs(settings: dict[str, Any], config_dir: Path | None) -> Iterator[Path]:
    """Yield a folder of configs that compose to these settings; the user's own configs are linked into it."""
    groups = [group for group in group_choices() if "/" not in group]
    with tempfile.TemporaryDirectory(prefix="lmtrain-") as name:
        folder = Path(name)
        for file in config_dir.rglob("*.yaml") if config_dir else ():
            link = folder / file.relative_to(config_dir)  # type: ignore[arg-type]
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file.resolve())
        chosen = [group for group in groups if isinstance(settings.get(group), dict)]
        for group in chosen:
            _write(folder / group / f"{_CHOICE}.yaml", settings[group])
        picks = {group: _CHOICE if group in chosen else None for group in groups if group != "experiment"}
        defaults = [*({group: choice} for group, choice in picks.items()), "_self_", {"experiment": None}]
        rest = {key: value for key, value in settings.items() if key not in groups}
        _write(folder / f"{_ROOT}.yaml", {"defaults": defaults} | rest)
        yield folder


def _write(path: Path, tree: dict[str, Any]) -> None:
    """JSON is YAML. A `$` in a value is no reference to another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree, ensure_ascii=False).replace("${", "\\\\${"), encoding="utf-8")
