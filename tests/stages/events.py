"""What happens to a drawn run after its first start: other settings, other files, damage, branches, merges."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lmtrain.checkpoint.tensor_reader import CheckpointReader
from tests.cli.harness import outcome
from tests.stages.draw import change, change_rates, difference, draw_stage, is_run, shown
from tests.stages.page import Planned, Schedule, Settings, Stage, branched, decay_stage, merge_shares, plan
from tests.stages.world import stage_words, swap_files, words

if TYPE_CHECKING:
    from tests.stages.trial import Run, Saved, Trial


def resume(trial: Trial, run: Run) -> None:
    """Go on with the same settings or with others."""
    assert run.newest is not None
    settings = run.newest.settings
    changed = settings if trial.rng.random() < 0.15 else change(trial.rng, settings, trial.world.sources)
    trial.log.append(f"change {difference(settings, changed)}")
    trial.train(run, changed, kills=trial.rng.random() < 0.4)


def other_rates(trial: Trial, run: Run) -> None:
    """Go on with other rates in the stage that the run has reached, as any start may."""
    assert run.newest is not None
    settings, step = run.newest.settings, run.newest.step
    planned = plan(settings, trial.world.sources)
    at = next((number for number, stage in enumerate(planned) if step < stage.end), None)
    if at is None:
        return
    if settings.stages:
        stages = [*settings.stages]
        stages[at] = change_rates(trial.rng, stages[at])
        changed = replace(settings, stages=tuple(stages))
    else:
        changed = change_rates(trial.rng, settings)
    if is_run(changed, trial.world.sources):
        trial.log.append(f"rates {difference(settings, changed)}")
        trial.train(run, changed, kills=trial.rng.random() < 0.6)


def swap(trial: Trial, run: Run) -> None:
    """Swap the files of two datasets, and swap them back if the run does not go on."""
    assert run.newest is not None
    one, other = trial.rng.sample(sorted(trial.world.sources), 2)
    trial.log.append(f"swap {one} and {other}")
    before, trial.world = trial.world, swap_files(trial.world, one, other)
    settings = run.newest.settings
    if not is_run(settings, trial.world.sources) or not trial.train(run, settings, kills=trial.rng.random() < 0.3):
        swap_files(trial.world, one, other)
        trial.world = before


def damage(trial: Trial, run: Run) -> None:
    """Damage the newest checkpoint, or the two newest, and go on from the one before."""
    number = trial.rng.choice([1, 1, 2])
    if len(run.saved) <= number:
        return
    torn = {step: trial.rng.random() < 0.4 for step in sorted(run.saved)[-number:]}
    settings = run.saved[max(torn)].settings
    for step, is_torn in torn.items():
        damage_file(run.checkpoint(step) / ("manifest.json" if is_torn else "rank_00000.safetensors"))
        trial.log.append(f"damage {'the manifest' if is_torn else 'a tensor'} of step {step}")
    typed = ["pretrain", *words(trial.world, settings, run.folder, run.interval)]
    found, output = outcome(*typed)
    trial.expect("the exit code of a start without checkpoint.fallback", found, 65)
    typed.append("checkpoint.fallback=true")
    readable = [step for step in sorted(run.saved) if not torn.get(step)]
    for _ in range(falls_into_stages_before(plan(settings, trial.world.sources), readable, torn)):
        found, output = outcome(*typed)
        trial.expect(f"the exit code of a start that falls back into a stage before\n{output}\n", found, 75)
    for step in torn:
        del run.saved[step]
    run.damaged |= {*torn}
    if not trial.faults:
        trial.train(run, settings, typed, kills=trial.rng.random() < 0.3)


def damage_file(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(data)


def falls_into_stages_before(planned: Sequence[Planned], readable: Sequence[int], damaged: Container[int]) -> int:
    """Return how many starts end because the checkpoint that they fall back to is of a stage before: each had read the
    data of the stage of the checkpoint with which it began.
    """
    stage_of = {step: sum(stage.end <= step for stage in planned[:-1]) for step in readable}
    count, begun = 0, stage_of[readable[-1]]
    for step, before in zip(readable[::-1], readable[-2::-1], strict=False):
        if step not in damaged:
            break
        if stage_of[before] < begun:
            count, begun = count + 1, stage_of[before]
    return count


def branch(trial: Trial, run: Run) -> None:
    """Begin a branch with new stages from one of the checkpoints, and go on with it after its trunk is gone."""
    saved, step = chosen(trial, run)
    for _ in range(30):
        name = f"b{trial.rng.randrange(10**6)}"
        stages = tuple(draw_stage(trial.rng, f"{name}-{number}", 1) for number in range(trial.rng.choice([1, 1, 2])))
        settings = settings_of_branch(trial, run, saved, stages)
        if is_run(settings, trial.world.sources) and plan(settings, trial.world.sources)[-1].end <= 40:
            break
    else:
        return
    folder = run.folder.with_name(name)
    from_run = ["pretrain", "--from-run", str(run.checkpoint(step)), f"run.dir={folder}"]
    new_words = stage_words(trial.world, settings, len(settings.stages) - len(stages))
    trial.log.append(f"branch from {step} of {run.folder.name}: {shown(stages)}")
    go_on(trial, run, saved, settings, [*from_run, *new_words])


def decay(trial: Trial, run: Run) -> None:
    """Decay the run from one of its checkpoints, with the command that `lmtrain branch` prints."""
    saved, step = chosen(trial, run)
    percent, shape = trial.rng.choice([10, 20, 40]), trial.rng.choice(["linear", "sqrt", "cosine"])
    schedule = Schedule("wsd", 0, 0.0, 1.0, "sqrt") if shape == "sqrt" else Schedule(shape)
    stage = decay_stage(saved.settings, step, percent, schedule, trial.world.sources)
    settings = settings_of_branch(trial, run, saved, (stage,))
    if not is_run(settings, trial.world.sources):
        return
    trial.log.append(f"decay from {step} of {run.folder.name}: {shown(stage)}")
    folder = run.folder.with_name(f"decays{trial.rng.randrange(10**6)}")
    options = ["--at", str(step), "--decay", f"{percent}%", "--shape", shape, "--output", str(folder)]
    code, output = outcome("branch", run.folder, *options)
    trial.expect(f"the exit code of branch\n{output}\n", code, 0)
    command = next((line for line in output.splitlines() if line.startswith("lmtrain pretrain ")), "")
    if not trial.faults:
        go_on(trial, run, saved, settings, shlex.split(command)[1:], tolerance=1e-5)


def chosen(trial: Trial, run: Run) -> tuple[Saved, int]:
    """Choose one of the run's checkpoints."""
    step = trial.rng.choice(sorted(run.saved))
    return run.saved[step], step


def settings_of_branch(trial: Trial, run: Run, saved: Saved, stages: tuple[Stage, ...]) -> Settings:
    assert run.last is not None
    return branched(run.last, saved.settings, saved.step, stages, trial.world.sources)


def go_on(
    trial: Trial, run: Run, saved: Saved, settings: Settings, typed: list[str], *, tolerance: float = 1e-9
) -> None:  # fmt: skip
    """Start a branch, kill it perhaps, and start it again, perhaps without its trunk."""
    folder = next(word.partition("=")[2] for word in typed if word.startswith("run.dir=")).strip("'\"")
    new = replace(run, folder=Path(folder), parent=saved, last=None, saved={}, damaged=set())
    if not trial.train(new, settings, typed, kills=trial.rng.random() < 0.7, tolerance=tolerance):
        return
    if new.saved and trial.rng.random() < 0.4:
        what = trial.rng.choice(["its checkpoints", "all in checkpoints/", "all in the folder", "the folder"])
        trial.log.append(f"  of the trunk {what} is gone")
        shutil.rmtree(run.folder if "folder" in what else run.folder / "checkpoints")
        if what.startswith("all"):
            (run.folder / "checkpoints" if "/" in what else run.folder).mkdir()
        run.saved.clear()
        run.parent = None
        if "folder" in what:
            code, output = outcome(*typed)
            trial.expect(f"the exit code of a branch whose trunk is gone\n{output}\n", code, 66)
            typed = ["pretrain", "--from-run", folder]
    if not trial.faults:
        trial.train(new, settings, typed, kills=False, tolerance=tolerance)


def merge(trial: Trial, run: Run) -> None:
    """Merge some of the checkpoints, and begin a run from the merge."""
    if len(run.saved) < 2:
        return
    steps = sorted(trial.rng.sample(sorted(run.saved), trial.rng.randint(2, min(4, len(run.saved)))))
    mean = trial.rng.choice(["uniform", "linear", "ema:0.7", "sqrt"])
    shares, newest = merge_shares(mean, len(steps)), run.saved[steps[-1]]
    option = ["--emulate-decay", "sqrt"] if mean == "sqrt" else ["--mean", mean]
    output = run.folder.with_name(f"merged{trial.rng.randrange(10**6)}")
    trial.log.append(f"merge {steps} of {run.folder.name} by {mean}")
    code, text = outcome("merge", *map(run.checkpoint, steps), "--output", output, *option)
    trial.expect(f"the exit code of merge\n{text}\n", code, 0)
    if trial.faults:
        return
    record = CheckpointReader(output).state["merged"]["parents"]
    trial.expect("the parents", [parent["step"] for parent in record], steps)
    trial.expect("the shares", [f"{parent['weight']:.9f}" for parent in record], [f"{share:.9f}" for share in shares])
    merged = [run.saved[step].weights.weights for step in steps]
    weights = {
        name: torch.stack([share * each[name] for share, each in zip(shares, merged, strict=True)]).sum(0)
        for name in newest.weights.weights
    }
    saved = replace(newest, weights=replace(newest.weights, weights=weights, average={}))
    trial.compare_weights(output, saved)
    new = replace(run, folder=output.with_name(f"{output.name}_run"), parent=saved, last=None, saved={}, damaged=set())
    typed = ["pretrain", *words(trial.world, newest.settings, new.folder, run.interval), f"checkpoint.resume={output}"]
    if not trial.faults:
        trial.train(new, newest.settings, typed, kills=False)


EVENTS = (resume, resume, resume, resume, other_rates, other_rates, swap, damage, branch, branch, decay, decay, merge)
