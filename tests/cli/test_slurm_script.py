"""The sbatch file of a run: what it asks of Slurm, what is refused, and its body, run beside programs of Slurm's names.

Those programs say and answer what Slurm 22.05 does; tests/cli/test_slurm.py runs the same file under a real one.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from lmtrain.errors import LayoutError, UsageError
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.start.slurm_job.sbatch_file import SbatchJob, job_script
from lmtrain.start.slurm_job.sbatch_options import SlurmOptions, TaskOptions
from tests.cli.harness import Toy, lmtrain
from tests.marks import wide

EIGHT = ("parallel.tp=2", "parallel.pp=2", "parallel.dp_shard=2", "model.num_heads=2")
TWO = ("parallel.dp_shard=2",)
MORE_REFUSALS: list[tuple[tuple[object, ...], int, str]] = [
    (("optim.lr=-1",), 2, "optim.lr=-1"),
    (("data.path=nowhere", *TWO), 66, "nowhere"),
    (("--sbatch=--nodes=4",), 2, "--sbatch=--nodes=4 would contradict the sbatch file"),
    (("--sbatch=mem",), 2, "--sbatch=mem is not an option of sbatch"),
    (("--srun=-K0",), 2, "--srun=-K0 would contradict"),
    (("--sbatch=-c four", *TWO), 2, "--sbatch=-c four is not a number of CPUs"),
    (("--srun=--gpu-bind=single:1", *TWO), 2, "--srun=--gpu-bind=single:1 applies to each Slurm task"),
    (("--srun=--cpu-bind=verbose,map_cpu:0,1", *TWO), 2, "map_cpu:0,1 applies to each Slurm task"),
    (("--env", "A B=3"), 2, "--env=A B=3 is not of the form NAME=VALUE"),
    (("--container-image", "a", "--container-command", "b"), 2, "both start a container"),
    (("--array-tasks", "%2"), 2, "--array-tasks=%2 is for an array of jobs. Add --array."),
    (("--array", "--array-tasks", "3-1"), 2, "--array-tasks=3-1 does not name tasks as sbatch's --array does"),
    (("--array", "--array-tasks", "0-3%0"), 2, "--array-tasks=0-3%0 does not name tasks"),
    (("--array", "optim.lr=1,2", "--array-tasks", "0-3%2"), 2, "which are the tasks 0 to 1. Use 0-1%2."),
    (("--array=0-3%2",), 2, "--array is a switch. Use --array --array-tasks 0-3%2."),
    (("--sbatch=--array=0-3%2",), 2, "which are the runs of a sweep. Use --array --array-tasks 0-3%2."),
    (("--sbatch=-a%2",), 2, "Use --array --array-tasks %2."),
    (("--array", "parallel.dp_shard=1,2"), 78, "runs of this array take 1 to 2 processes"),
]
ENDED_BY_SRUN = "srun: launch/slurm: _step_signal: Terminating StepId=7.0\\nsrun: error: n1: tasks 0-1: Terminated"


def job(folder: Path, *, spare_nodes: int = 0, tasks_per_node: int = 2) -> SbatchJob:
    return SbatchJob(
        about="a run", nodes=2, ranks_per_node=2, tasks_per_node=tasks_per_node,
        options=SlurmOptions(spare_nodes=spare_nodes), tasks=TaskOptions([], [], takes_all_cpus=tasks_per_node == 1),
        folder=folder, cwd=folder,
        runs=[(folder, ["run.dir=it's $HOME", 'a="b c"'])],
    )  # fmt: skip


@dataclass
class Slurm:
    """A folder of programs that stand in for Slurm's, and what they were asked."""

    folder: Path
    starts: list[str] = field(default_factory=list)  # what srun does each time it is started
    id: str = "7"  # what means this job, and no others beside it
    env: dict[str, str] = field(default_factory=dict)
    ends: str = "N/A"  # when squeue says that the job ends
    requeues: str = ""  # what scontrol does then
    tasks_per_node: int = 2

    def begin(self, state: str = "RUNNING None", spare_nodes: int = 0) -> subprocess.Popen[bytes]:
        bin_ = self.folder / "bin"
        bin_.mkdir()
        for number, lines in enumerate(self.starts):
            (self.folder / f"start{number}").write_text(lines)
        self._program(
            "srun", f'number=$(wc -l < {self.asked}); echo "srun $*" >> {self.asked}; . {self.folder}/start$number'
        )
        names = 'if [ "$1" = show ]; then printf "%s\\n" n1 n2 n3 n4; exit; fi'
        self._program("scontrol", f'{names}; echo "scontrol $*" >> {self.asked}; {self.requeues}')
        answers = f'*" --jobs={self.id} "*%e) echo {self.ends} ;; *" --jobs={self.id} "*) echo "7 {state}" ;;'
        self._program("squeue", f'case "$*" in {answers} *) exit 1 ;; esac')
        self.asked.touch()
        file = self.folder / "job.sbatch"
        file.write_text(job_script(job(self.folder, spare_nodes=spare_nodes, tasks_per_node=self.tasks_per_node)))
        env = {"PATH": f"{bin_}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]"}
        with self.log.open("w") as log:
            return subprocess.Popen(["bash", str(file)], stdout=log, stderr=log, env=env | self.env)

    def end(self, state: str = "RUNNING None", spare_nodes: int = 0) -> int:
        return self.begin(state, spare_nodes).wait(60)

    def _program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    @property
    def asked(self) -> Path:
        return self.folder / "asked"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def num_starts(self) -> int:
        return self.asked.read_text().count("srun ")

    @property
    def was_queued(self) -> bool:
        return f"scontrol requeue {self.id}\n" in self.asked.read_text()


def says(*lines: str, code: int) -> str:
    return "".join(f"printf '%b\\n' 'srun: error: {line}' >&2\n" for line in lines) + f"exit {code}\n"


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path)


def test_the_words_of_the_run_arrive_as_they_were_typed(slurm: Slurm) -> None:
    slurm.starts = [f'printf "%s\\n" "${{@: -2}}" > {slurm.folder}/words; exit 0']
    assert slurm.end() == 0
    assert (slurm.folder / "words").read_text() == 'run.dir=it\'s $HOME\na="b c"\n'
    asked = slurm.asked.read_text()
    assert (
        "srun --nodes=2 --ntasks=4 --kill-on-bad-exit=1 env --block-signal=INT,TERM,USR1,USR2 lmtrain pretrain "
        in asked
    )


@pytest.mark.parametrize(
    ("lines", "code", "ends"),
    [
        (["n1: tasks 0-3: Exited with exit code 93"], 93, 93),
        (["n2: task 2: Exited with exit code 70", ENDED_BY_SRUN], 143, 70),
        (["n1: task 0: Exited with exit code 76", "n2: task 2: Exited with exit code 74"], 143, 74),
        (["n1: tasks 0-3: Exited with exit code 2"], 2, 2),
        (["Unable to create step for job 7: Invalid node name specified"], 1, 1),
    ],
    ids=["no progress", "hidden by srun", "behind a loss", "refused", "srun itself"],
)  # fmt: skip
def test_what_is_not_tried_again(slurm: Slurm, lines: list[str], code: int, ends: int) -> None:
    slurm.starts = [says(*lines, code=code)]
    assert slurm.end() == ends
    assert (slurm.num_starts, slurm.was_queued) == (1, False)
    assert f"exit code {ends}: neither started nor queued again" in slurm.log.read_text()


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (["n2: task 3: Killed", ENDED_BY_SRUN], 143),
        *wide((["n2: task 3: Segmentation fault (core dumped)", ENDED_BY_SRUN], 143)),
        (["n2: task 3: Killed", "n1: tasks 0-1: Exited with exit code 1"], 137),
        *wide((["n1: tasks 0-1: Exited with exit code 76", "n2: tasks 2-3: Exited with exit code 76"], 76)),
        (["n1: task 0: Exited with exit code 76", "n2: task 2: Exited with exit code 75"], 76),
        (["Node failure on n2"], 0),
        ([], 137),
    ],
    ids=["killed", "crashed", "killed and then odd", "lost", "lost and asked", "node", "srun itself"],
)  # fmt: skip
def test_what_starts_again_at_once(slurm: Slurm, lines: list[str], code: int) -> None:
    slurm.starts = [says(*lines, code=code), "exit 0"]
    assert slurm.end() == 0
    assert (slurm.num_starts, slurm.was_queued) == (2, False)
    assert "--exclude" not in slurm.asked.read_text()


@pytest.mark.parametrize(
    ("line", "state", "is_queued"),
    [
        ("Exited with exit code 75", "RUNNING None", True), ("User defined signal 1", "COMPLETING None", False),
        ("Terminated", "COMPLETING TimeLimit", True),
    ],
)  # fmt: skip
def test_a_stop_is_queued_again_unless_slurm_ends_the_job(slurm: Slurm, line: str, state: str, is_queued: bool) -> None:
    slurm.starts = [says(f"n1: tasks 0-3: {line}", code=143)]
    assert slurm.end(state) == 75
    assert (slurm.num_starts, slurm.was_queued) == (1, is_queued)


def test_a_task_of_an_array_speaks_of_itself_alone(slurm: Slurm) -> None:
    """One of them has the array's own number, by which Slurm takes all."""
    slurm.id = "7_2"
    slurm.env = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    slurm.ends = "2026-11-22T20:02:00Z"
    slurm.starts = [f"echo $SLURM_JOB_END_TIME > {slurm.folder}/ends\nexit 75"]
    assert slurm.end() == 75
    assert slurm.was_queued
    assert (slurm.folder / "ends").read_text() == "1795377720\n"
    assert "job 7_2: queued again" in slurm.log.read_text()


@pytest.mark.parametrize(
    ("tasks_per_node", "given", "cpus"), [(1, {}, "16"), (2, {}, "none"), (2, {"SLURM_CPUS_PER_TASK": "3"}, "3")]
)
def test_one_task_of_a_node_has_all_cpus_of_the_job_there(
    slurm: Slurm, tasks_per_node: int, given: dict[str, str], cpus: str
) -> None:
    slurm.tasks_per_node = tasks_per_node
    slurm.env = {"SLURM_JOB_CPUS_PER_NODE": "128(x2),16,32(x10)"} | given
    slurm.starts = [f'echo "${{SRUN_CPUS_PER_TASK:-none}} $*" > {slurm.folder}/seen; exit 0']
    assert slurm.end() == 0
    assert (slurm.folder / "seen").read_text().startswith(f"{cpus} --nodes=2 --ntasks={2 * tasks_per_node} ")


def test_a_job_that_slurm_does_not_queue_again_says_so(slurm: Slurm) -> None:
    slurm.requeues = 'echo "scontrol: error: Requested operation is presently disabled"; exit 1'
    slurm.starts = ["exit 75"]
    assert slurm.end() == 75
    assert slurm.log.read_text().endswith(
        "job 7: could not be queued again: scontrol: error: Requested operation is presently disabled\n"
    )


SAVES = "mkdir -p {0}/checkpoints/step_0000000$number\n"
KILLED = says("n1: task 0: Killed", code=137)


def test_a_run_that_gets_nowhere_is_given_up(slurm: Slurm) -> None:
    """What the run itself has not counted, as where the loss of one in its start-up ends all."""
    slurm.starts = [KILLED] * 9
    assert slurm.end() == 93
    assert (slurm.num_starts, slurm.was_queued) == (4, False)
    assert "lost a task in 4 starts (exit code 137), and no checkpoint in between" in slurm.log.read_text()


def test_one_that_gets_on_is_not(slurm: Slurm) -> None:
    slurm.starts = [*[KILLED] * 3, SAVES.format(slurm.folder) + KILLED, *[KILLED] * 2, "exit 0"]
    assert slurm.end() == 0
    assert slurm.num_starts == 7


TIME, SIGNAL = "the end of the allocation", "SIGUSR1"


@pytest.mark.parametrize(
    ("cause", "state", "restarts", "saves", "ends"),
    [
        (TIME, "RUNNING None", 2, "", 93),
        ("run.time_limit=2m00s", "RUNNING None", 5, "", 93),
        (SIGNAL, "COMPLETING TimeLimit", 2, "", 93),
        (TIME, "RUNNING None", 1, "", 75),
        (TIME, "RUNNING None", 2, SAVES, 75),
        (SIGNAL, "RUNNING None", 2, "", 75),
    ],
)  # fmt: skip
def test_a_job_that_has_no_time_to_save_is_given_up(
    slurm: Slurm, cause: str, state: str, restarts: int, saves: str, ends: int
) -> None:
    """After three starts, of which people have not ended this one."""
    slurm.env = {"SLURM_RESTART_COUNT": str(restarts)}
    stop = f"""echo '{{\n  "cause": "{cause}",\n  "exit_code": 75\n}}' > {slurm.folder}/stop.json\n"""
    slurm.starts = [saves.format(slurm.folder) + stop + says("n1: tasks 0-3: Exited with exit code 75", code=143)]
    assert slurm.end(state) == ends
    assert slurm.was_queued is (ends == 75)
    said = f"out of time in start {restarts + 1}, and no start has saved anything: not queued again"
    assert (said in slurm.log.read_text()) is (ends == 93)


@pytest.mark.parametrize("tasks_per_node", [1, 2])
def test_nodes_that_fail_are_left_out_while_there_are_spare_ones(slurm: Slurm, tasks_per_node: int) -> None:
    """A task that starts all ranks of its node ends with the exit code of the rank that was killed."""
    slurm.tasks_per_node = tasks_per_node
    killed = "n2: task 3: Killed" if tasks_per_node == 2 else "n2: task 1: Exited with exit code 137"
    lost = f"""echo '{{
 "exit_code": 76,
 "rank": 2,
 "lost": 2
}}' > {slurm.folder}/stop.json\n"""
    slurm.starts = [
        says(killed, ENDED_BY_SRUN, code=143),
        lost + says("n1: task 0: Exited with exit code 76", code=76),
        says("n1: task 0: Exited with exit code 76", code=76),  # the stop.json that is there is no news
        SAVES.format(slurm.folder) + says("n4: task 1: Bus error", code=143),
        says("n1: task 0: Killed", code=143),  # no spare node is left
        "exit 0",
    ]
    assert slurm.end(spare_nodes=3) == 0
    found = [re.search(r"--exclude=(\S+)", line) for line in slurm.asked.read_text().splitlines()]
    assert [one and one[1] for one in found] == [None, "n2", "n2,n3", "n2,n3", "n2,n3,n4", "n2,n3,n4"]
    assert "lost a task (exit code 137 on n2), starts again without n2" in slurm.log.read_text()


@pytest.mark.parametrize("hears", [True, False], ids=["srun passes it on", "srun is not ready to"])
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_stop_that_reaches_the_script_reaches_the_tasks(slurm: Slurm, hears: bool, number: signal.Signals) -> None:
    """Before srun has its handlers, SIGUSR1 ends it."""
    trap = "trap 'echo heard; echo \"srun: error: n1: task 0: Exited with exit code 75\" >&2; exit 75' USR1"
    os.mkfifo(slurm.folder / "ready")
    slurm.starts = [f"{trap if hears else ''}\necho > {slurm.folder}/ready\nwhile :; do sleep 0.05; done"]
    script = slurm.begin()
    (slurm.folder / "ready").read_text()
    script.send_signal(number)
    assert script.wait(60) == 75
    assert slurm.was_queued
    assert slurm.num_starts == 1
    assert ("heard" in slurm.log.read_text()) == hears


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say(tmp_path: Path) -> None:
    file = tmp_path / "job.sbatch"
    file.write_text(job_script(replace(job(tmp_path), runs=[(tmp_path, ["a=b c"])])))
    done = subprocess.run(["shellcheck", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("tasks", ["node", "rank"])
def test_what_slurm_is_asked_for(toy: Toy, tmp_path: Path, tasks: str) -> None:
    folder = tmp_path / "a run at 50%"
    words = ["slurm", "render", *toy.settings(folder), *EIGHT, "--gpus-per-node", 4, "--spare-nodes", 1]
    words += ["--tasks", tasks] * (tasks == "rank")
    shape = {"node": ["#SBATCH --ntasks-per-node=1", "#SBATCH --gpus-per-node=4", "#SBATCH --cpus-per-task=4"],
             "rank": ["#SBATCH --ntasks-per-node=4", "#SBATCH --gpus-per-node=4"]}  # fmt: skip
    words += ["--time", "2:00", "--partition", "big", "--account", "us", "--sbatch=--mem=0", "--srun=--cpu-bind=cores"]
    words += ["--env", "NCCL_DEBUG=WARN, please", "--setup", "module load cuda", "--container-image", "lm+24"]
    lines = lmtrain(*words).splitlines()
    assert [line for line in lines if line.startswith("#SBATCH")] == [
        '#SBATCH --job-name="a run at 50%"', "#SBATCH --nodes=3", *shape[tasks], f"#SBATCH --chdir={Path.cwd()}",
        f'#SBATCH --output="{tmp_path}/a run at 50%%/slurm-%j.out"', "#SBATCH --open-mode=append",
        "#SBATCH --requeue", "#SBATCH --no-kill", "#SBATCH --time=2:00", "#SBATCH --partition=big",
        "#SBATCH --account=us", "#SBATCH --mem=0",
    ]  # fmt: skip
    assert 'export NCCL_DEBUG="WARN, please"' in lines
    assert "module load cuda" in lines
    assert ("  --nproc-per-node=4" in lines) == (tasks == "node")
    assert f"nodes=2 tasks={2 if tasks == 'node' else 8} ranks=8 spare_nodes=1" in "\n".join(lines)
    assert "of_srun=(--container-image=lm+24 --cpu-bind=cores)" in lines
    assert "lmtrain=(lmtrain)" in lines
    assert not folder.exists()


@pytest.mark.parametrize(
    ("words", "shape"),
    [
        (["--tasks-per-node", 4, *EIGHT], "--nodes=2 --ntasks-per-node=1 --cpus-per-task=4"),
        (["--tasks-per-node", 4, *EIGHT, "--tasks=rank"], "--nodes=2 --ntasks-per-node=4"),
        *wide((["--tasks-per-node", 8, *EIGHT], "--nodes=1 --ntasks-per-node=1 --cpus-per-task=8")),
        (["--gpus-per-node", 1, "--sbatch=-c 3"], "--nodes=1 --ntasks-per-node=1 --gpus-per-node=1"),
    ],
)
def test_nodes_and_tasks_follow_from_the_layout(toy: Toy, tmp_path: Path, words: list[object], shape: str) -> None:
    output = lmtrain("slurm", "submit", "--dry-run", *toy.settings(tmp_path / "run"), *words)
    asked = [line.removeprefix("#SBATCH ") for line in output.splitlines() if line.startswith("#SBATCH ")]
    assert " ".join(asked).startswith(f"--job-name=run {shape} --chdir")


@pytest.mark.parametrize(
    ("words", "of_job", "of_step", "all_cpus"),
    [
        (["--sbatch=--cpus-per-task=3"], ["--cpus-per-task=12"], "", "''"),
        (["--sbatch=-c 3", "--srun=--cpus-per-task=2"], ["--cpus-per-task=12"], "--cpus-per-task=8", "''"),
        *wide((["--sbatch=--cpus-per-gpu=3"], ["--cpus-per-gpu=3"], "", "''")),
        (["--sbatch=--exclusive"], ["--cpus-per-task=4", "--exclusive"], "", "yes"),
        *wide((["--srun=--gpu-bind=none"], ["--cpus-per-task=4"], "--gpu-bind=none", "yes")),
    ],
)  # fmt: skip
def test_cpus_are_those_of_a_rank(
    toy: Toy, tmp_path: Path, words: list[str], of_job: list[str], of_step: str, all_cpus: str
) -> None:
    output = lmtrain("slurm", "render", *toy.settings(tmp_path / "run"), *EIGHT, "--gpus-per-node", 4, *words)
    asked = [line.removeprefix("#SBATCH ") for line in output.splitlines() if line.startswith("#SBATCH ")]
    assert [one for one in asked if one.startswith(("--cpus", "-c", "--excl"))] == of_job
    assert f"of_srun=({of_step})\n" in output
    assert f"all_cpus={all_cpus}\n" in output


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ((), 2, "by exactly one option. Give --gpus-per-node N, or --tasks-per-node N"),
        (("--gpus-per-node", 2, "--tasks-per-node", 2), 2, "--gpus-per-node=2 and --tasks-per-node=2 are both given"),
        (("--tasks-per-node", 3, *EIGHT), 78, "--tasks-per-node=3 does not divide the 8 processes of pp 2 x dp_shard "
         "2 x tp 2, zero 1, but all nodes get the same number. Use --tasks-per-node=2 on 4 nodes"),
        (("--gpus-per-node", 8), 78, "--gpus-per-node=8 is more than the 1 that the layout takes: one process. Use "
         "parallel.dp_shard=8, or --gpus-per-node=1."),
        (("--gpus-per-node", 1, "--nodes", 3), 78, "--nodes=3 does not fit the layout (one process), which takes 1 "
         "node with --gpus-per-node=1. Use parallel.dp_shard=3, or --nodes=1."),
        (("--gpus-per-node", 2, "--sbatch=--gpus-per-task=1", *TWO), 2, "--gpus-per-task=1 applies to each Slurm task, "
         "and one task starts all 2 ranks of its node. Add --tasks rank"),
        *((("--gpus-per-node", 2, "--time", said), 2,
           f"--time={said} is not a time limit that Slurm accepts. Use {meant}.")
          for said, meant in (("4h", "4:00:00"), ("2d", "2-00"), ("90m", "01:30:00"))),
        (("--gpus-per-node", 2, "--time", "12"), 2,
         "--time=12 does not say whether it is hours or minutes. Use 12:00:00 for hours or 00:12:00 for minutes."),
        (("--gpus-per-node", 2, "parallel.tp=3"), 78, "parallel.tp=3 does not divide model.num_heads=2"),
        *(pytest.param(("--gpus-per-node", 2, *one), *rest, marks=pytest.mark.wide) for one, *rest in MORE_REFUSALS),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(toy: Toy, tmp_path: Path, words: tuple[object, ...], code: int, says: str) -> None:
    said = lmtrain("slurm", "submit", *toy.settings(tmp_path / "run"), *words, code=code)
    assert says in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("layout", "options", "shape"),
    [
        ({"tp": 2, "dp_shard": 4}, {"gpus_per_node": 4, "nodes": 2}, (2, 4)),
        ({"tp": 2}, {"gpus_per_node": 8}, "Use parallel.dp_shard=4, or --gpus-per-node=2."),
        ({"tp": 2}, {"gpus_per_node": 8, "nodes": 2}, "Use parallel.dp_shard=8, or --gpus-per-node=2."),
        ({"tp": 2, "zero": 0}, {"tasks_per_node": 8}, "Use parallel.dp_replicate=4, or --tasks-per-node=2."),
        ({"pp": 3}, {"gpus_per_node": 8}, "Use --gpus-per-node=3."),  # no number of copies makes 8 of 3
        ({"tp": 4}, {"gpus_per_node": 2, "nodes": 4}, "Use parallel.dp_shard=2, or --nodes=2."),
    ],
)  # fmt: skip
def test_nodes_are_filled_or_the_layout_that_fills_them_is_named(
    layout: dict[str, Any], options: dict[str, Any], shape: tuple[int, int] | str
) -> None:
    parallel = ParallelSettings(**layout)
    if isinstance(shape, tuple):
        assert SlurmOptions(**options).shape(parallel) == shape
        return
    with pytest.raises(LayoutError, match=re.escape(shape)):
        SlurmOptions(**options).shape(parallel)


def test_an_array_has_the_runs_of_a_sweep(toy: Toy, tmp_path: Path) -> None:
    words = [*toy.settings(tmp_path / "sweep", optim__lr="1e-3,2e-3"), "train.seed=1,2"]
    output = lmtrain("slurm", "render", *words, "--tasks-per-node", 1, "--array", "--output", tmp_path / "file")
    assert f"file is written. Start it with: mkdir -p {tmp_path}/sweep && sbatch {tmp_path}/file\n" in output
    lines = (tmp_path / "file").read_text().splitlines()
    assert "#SBATCH --array=0-3" in lines
    assert f"#SBATCH --output={tmp_path}/sweep/slurm-%A_%a.out" in lines
    folders = [line.partition("run=")[2] for line in lines if line.startswith("    run=")]
    rates, seeds = ("0.001", "0.002"), (1, 2)
    assert folders == [f"{tmp_path}/sweep/optim.lr_{rate}__train.seed_{seed}" for rate in rates for seed in seeds]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--job-name=a", "--job-name=b"], "--job-name"), (["-J a", "--job-name=b"], "--job-name"),
        (["-c4", "--cpus-per-task=2"], "--cpus-per-task"), (["--mem=0", "--qos=a", "--mem=0"], None),
    ],
)  # fmt: skip
def test_an_option_of_slurm_has_one_value(words: list[str], name: str | None) -> None:
    refused = pytest.raises(UsageError, match=f"Slurm's {name} has one value, and is given two by --sbatch")
    with refused if name else nullcontext():
        SlurmOptions(gpus_per_node=1, sbatch=words).check()


@pytest.mark.parametrize(
    ("typed", "shown"),
    [("0-3%2", "0-3%2"), ("%2", "0-3%2"), ("1,3", "1,3"), ("0-3:2", "0-3:2"), ("2", "2"), (None, "0-3")],
)
def test_some_tasks_of_an_array_and_few_at_a_time(tmp_path: Path, typed: str | None, shown: str) -> None:
    made = replace(
        job(tmp_path), options=SlurmOptions(array=True, array_tasks=typed), runs=[(tmp_path, [])] * 4
    )
    assert f"#SBATCH --array={shown}" in job_script(made).splitlines()


def test_submit_keeps_the_file_and_prints_the_job(toy: Toy, tmp_path: Path) -> None:
    sbatch = tmp_path / "bin" / "sbatch"
    words = ["slurm", "submit", *toy.settings(tmp_path / "run"), "--tasks-per-node", 1]
    said = lmtrain(*words, code=66, env={"PATH": str(sbatch.parent)})
    assert "sbatch is not on the PATH of this machine" in said
    sbatch.parent.mkdir()
    sbatch.write_text(
        '#!/bin/bash\n[ -z "$REFUSES" ] || { echo "sbatch: error: $REFUSES" >&2; exit 1; }\necho "12;local"\n'
    )
    sbatch.chmod(0o755)
    env = {"PATH": f"{sbatch.parent}:{os.environ['PATH']}"}
    said = lmtrain(*words, env=env)
    assert said.startswith("12\n")
    assert (tmp_path / "run" / "job.sbatch").read_text().startswith("#!/bin/bash\n# run: one process on 1 node.")
    said = lmtrain(*words, code=2, env=env | {"REFUSES": "invalid partition specified: big"})
    assert "job.sbatch: invalid partition specified: big. Change" in said
