"""Wrong settings are refused before anything starts, all at once, with the key, the rule and a way out."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from tests.cli.harness import Toy, lmtrain, on_terminal
from tests.marks import wide
from tests.mistakes.runner import Runner


def test_a_misspelt_key_is_named_with_the_nearest(toy: Toy, tmp_path: Path) -> None:
    output = lmtrain("pretrain", *toy.settings(tmp_path / "run"), "optim.lrr=1", code=2)
    assert "optim.lrr=1 is not a setting. Did you mean optim.lr=1?" in output
    assert not (tmp_path / "run").exists()


def test_every_problem_is_reported_at_once(toy: Toy, tmp_path: Path) -> None:
    output = lmtrain(
        "pretrain", *toy.settings(tmp_path / "run"), "model.num_heads=5", "train.micro_batch=3", "optim.lr=-1",
        "precision=fp16", "precision.min_scale=0", "compute.device=tpu", code=2,
    )  # fmt: skip
    for words in ("model.num_heads=5", "optim.lr=-1", "precision.min_scale=0", "compute.device=tpu",
                  "train.micro_batch=3"):  # fmt: skip
        assert words in output


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model=gtp2_small", "Did you mean gpt2_small?"),
        ("train.micro_batch=3", "train.micro_batch=3 x 1 data-parallel copies does not divide train.global_batch=4"),
        ("parallel.vp=2", "parallel.vp=2 needs a pipeline, and pp=1 has none"),
        ("train.steps=null", "Set train.steps=1000 or train.tokens=300B."),
        ("train.tokens=1B", "exactly one of them must be set"),
        *wide(("schedule.warmup_steps=100", "schedule.warmup_steps=100")),
        *wide(("train.steps=soon", "train.steps=soon is not a size")),
        *wide(("optim.kind=sgd", "optim.kind=sgd is not a kind")),
        ("run.dir=''", "run.dir= is empty"),
        *wide(("optim.lr=1,2", "Add -m to run each of them")),
        *wide(("data.path=${oc.env:HOME}", "calls a resolver")),
        *wide(("+optim._target_=os.system", "names code")),
        ("model.vocab_size=10", "smaller than the tokenizer's"),
        ("data.split=[1,0,0]", ""),
        *wide(("=3", "is not an override")),
    ],
)
def test_refused_with_a_way_out(toy: Toy, tmp_path: Path, override: str, words: str) -> None:
    code = 0 if override.startswith("data.split") else 2
    extra = ["--dry-run"] if code == 0 else []
    assert words in lmtrain("pretrain", *toy.settings(tmp_path / "run"), override, *extra, code=code)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("pretrain data.path=x optim.betas=auto", 2, "Leave it out for the default, or give a list of numbers."),
        ("pretrain data.path=x train.rampup=off", 2, "Write train.rampup=null."),
        ("pretrain data.path=x 1a=", 2, "'1a=' is not an override ('1a' is not a valid key)."),
        ("plan gpus=8 model=gpt2 hardware_power_W=3", 2, "Did you mean hardware.power_W=3?"),
        ("plan gpus=8 model=gpt2 hardware=h100 hardware_power_W=", 2, "Did you mean hardware.power_W=VALUE?"),
        ("inspect run --format json", 2, "--format json is not an option of lmtrain inspect. Use --json."),
        ("inspect docs.txt", 66, "docs.txt is neither a run folder (it has no metrics.jsonl), nor a checkpoint"),
        ("inspect docs.pdf", 66, "docs.pdf is a PDF"),
        ("reshard run dtype=", 2, "dtype= is not a file, and --dtype is no option here. Leave it out."),
        ("preprocess docs.txt --append-eods=false", 2, "--append-eods is not an option of lmtrain preprocess. Did you "
         "mean to leave it out?"),
        ("export run x.gguf", 2, "x.gguf is too much for lmtrain export, which takes CHECKPOINT alone. GGUF is not"),
        ("branch run --at 1 --decay 5", 2, "--decay=5 is not a share of the branch's run. Use 5%."),
        ("branch run --at 1 --decay 0.2", 2, "Use 20%."),
        ("eval --compare run run parallel.tp=1", 2, "error: No --task was given."),
        ("tokenizer train docs.txt --output run --vocab-size 300", 73, "run is a run or a checkpoint, whose tokenizer"),
        ("slurm", 2, "render"),
    ],
)  # fmt: skip
def test_a_line_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    for name in ("run/config.json", "docs.txt", "docs.pdf"):
        Path(name).write_text("{}")
    assert words in lmtrain(*line.split(), code=code)


def test_a_missing_dataset(toy: Toy, tmp_path: Path) -> None:
    output = lmtrain("pretrain", *toy.settings(tmp_path / "run", data__path=tmp_path / "none"), code=66)
    assert str(tmp_path / "none") in output
    assert not (tmp_path / "run").exists()


def test_on_a_terminal_a_line_comes_before_anything_is_read(toy: Toy, tmp_path: Path) -> None:
    words = toy.settings(tmp_path / "run", data__path="none")
    said = on_terminal("pretrain", *words, columns=200, code=66)
    assert said.startswith(f"{tmp_path}/run: looking at data and machine, then loading torch\nerror: none")
    assert lmtrain("pretrain", *words, code=66).startswith("error: none")


def torchrun(world_size: int, rank: int = 0, local: int = 0) -> dict[str, str]:
    local = local or world_size
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return dict(zip(names, map(str, (world_size, rank, rank % local, local)), strict=True))


@pytest.mark.parametrize(
    ("started", "settings", "words"),
    [
        (2, [], "needs 1. Set parallel.dp_shard=2, or start 1 process, or add --elastic, which takes the nearest"),
        (5, [], "Set parallel.dp_shard=5 train.global_batch=25 train.micro_batch=1, or start 1 process, or"),
        (1, ["tp=2"], "1 process was started but parallel.tp=2 needs 2. Start 2 processes with --nproc 2, or"),
        *wide((4, ["dp_shard=4", "tp=2"],
         "4 processes were started but dp_shard=4 x tp=2 needs 8. Start 8 processes, or set parallel.dp_shard=2, or")),
        (6, ["dp_replicate=2", "tp=2"],
         "6 processes were started but dp_replicate=2 x tp=2 needs 4. Set parallel.dp_replicate=3, "
         "or start 4 processes, or add"),
        (3, ["dp_shard=2", "tp=2"], "3 processes were started but dp_shard=2 x tp=2 needs 4. Start 4 processes, or add "
         "--elastic, which"),
    ],
)  # fmt: skip
def test_too_many_or_too_few_processes(toy: Toy, tmp_path: Path, started: int, settings: list[str], words: str) -> None:
    given = [*toy.settings(tmp_path / "run", train__global_batch=24), *(f"parallel.{s}" for s in settings)]
    assert words in lmtrain("pretrain", *given, code=78, env=torchrun(started) if started > 1 else {})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("word", "code", "words"),
    [
        ("train.steps=8", 78, "error: 2 processes were started but parallel.* needs 1."),
        ("optim.lrr=1", 2, "error: optim.lrr=1 is not a setting."),
    ],
)
def test_what_each_process_refuses_by_itself_waits_for_no_peer_for_long(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, code: int, words: str
) -> None:
    """Each finds it by itself, and one that the step lacks would never come to hear it."""
    waits: list[float] = []

    def nobody_comes(process: object, timeout_s: float, **_: object) -> None:
        waits.append(timeout_s)
        raise TimeoutError

    monkeypatch.setattr("lmtrain.runtime.processes.rendezvous.open_run_store", nobody_comes)
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
            "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "here"}  # fmt: skip
    said = lmtrain("pretrain", *toy.settings(tmp_path / "run"), word, code=code, env=step)
    assert said.count(words) == 1
    assert waits == [5.0]


@pytest.mark.parametrize("way", ["--dry-run", pytest.param("--nproc=2048", marks=pytest.mark.wide)])
def test_a_layout_whose_checkpoints_nobody_could_list(toy: Toy, tmp_path: Path, way: str) -> None:
    """Told before the run starts, and not at its first save."""
    sizes = {"model__num_layers": 64, "model__width": 4096, "train__global_batch": 2048, "train__micro_batch": 1}
    given = [*toy.settings(tmp_path / "run", parallel__dp_shard=2048, **sizes), way]
    said = lmtrain("pretrain", *given, code=78)
    assert re.search(r"would hold \d,\d{3},\d{3} pieces of tensors; at most 1,000,000 are allowed\. Save fewer", said)
    assert "smaller parallel.dp_shard" in said
    assert not (tmp_path / "run").exists()


def test_a_group_of_tp_across_nodes_is_warned_of(toy: Toy, tmp_path: Path) -> None:
    """Two trays of four GPUs may be joined by links as fast as those inside one."""
    given = [*toy.settings(tmp_path / "run", model__num_heads=8), "parallel.tp=8", "--dry-run", "--json"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    plan = json.loads(lmtrain("pretrain", *given, env=torchrun(8, local=4) | meeting))
    assert "parallel.tp=8 goes across nodes, as " in plan["warning"]
    assert " has 4 processes: " in plan["warning"]
    assert plan["warning"].endswith("parallel.tp=4 is faster.")
    assert "warning" not in json.loads(lmtrain("pretrain", *given, env=torchrun(8) | meeting))


def test_every_problem_of_a_layout_is_reported_at_once(toy: Toy, tmp_path: Path) -> None:
    output = lmtrain(
        "pretrain", *toy.settings(tmp_path / "run", model__num_heads=4, model__ffn_width=36, model__seq_len=33),
        "parallel.tp=8", "parallel.dp_shard=3", "recompute=full", "recompute.blocks=3", "train.micro_batch=4", code=2,
    )  # fmt: skip
    for words in ("1. parallel.tp=8 does not divide model.num_heads=4, model.ffn_width=36 or model.seq_len=33, which "
                  "parallel.sequence_parallel splits. Use 1, or parallel.tp=2 parallel.sequence_parallel=false",
                  "recompute.blocks=3 is more than model.num_layers=2",
                  "train.global_batch=4 cannot be shared by dp=3 copies of the model. Use 6,"):  # fmt: skip
        assert words in output
    output = lmtrain(
        "pretrain", *toy.settings(tmp_path / "run", train__micro_batch=4), "parallel.dp_shard=2", "parallel.tp=2",
        "compute.compile=true", "model.dropout=0.1", "parallel.sequence_parallel=false", code=2,
    )  # fmt: skip
    assert "parallel.sequence_parallel=false leaves attention's dropout" in output
    assert "train.micro_batch=4 x 2 data-parallel copies does not divide train.global_batch=4. Use 1 or 2." in output
    output = lmtrain("pretrain", *toy.settings(tmp_path / "run"), "parallel.dp_shard=2", "parallel.zero=0", code=2)
    assert "parallel.zero=0 shards nothing, but dp_shard=2 asks for 2 shards" in output


def test_too_little_text_for_a_sample(toy: Toy, tmp_path: Path) -> None:
    output = lmtrain("pretrain", *toy.settings(tmp_path / "run", model__seq_len=1_000_000), code=65)
    assert "too few tokens" in output or "0 samples" in output


def test_errors_show_no_traceback_unless_asked(toy: Toy, tmp_path: Path) -> None:
    wrong = [*toy.settings(tmp_path / "run"), "optim.lrr=1"]
    assert "Traceback" not in lmtrain("pretrain", *wrong, code=2)
    assert "Traceback" in lmtrain("pretrain", *wrong, "--debug", code=1)


def test_refusals_and_help_do_not_import_torch(toy: Toy, tmp_path: Path) -> None:
    """The reason why they take a fraction of a second."""
    given = ["pretrain", *toy.settings(tmp_path / "run")]
    with Runner() as run:
        for words, code in ((["pretrain", "--help"], 0), ([*given, "optim.lrr=1"], 2), ([*given, "--dry-run"], 0)):
            said = run(words)
            assert (said.code, said.torch) == (code, False), said.text


def test_print_config_composes_back(toy: Toy, tmp_path: Path) -> None:
    printed = lmtrain("pretrain", *toy.settings(tmp_path / "run"), "--print-config")
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "mine.yaml").write_text(printed)
    again = lmtrain("pretrain", "--config-dir", folder, "--config-name", "mine", "--print-config")
    assert again == printed


def test_a_users_group_wins_over_ours(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "adamw.yaml").write_text("kind: adamw\nlr: 0.123\n")
    settings = [s for s in toy.settings(tmp_path / "run") if not s.startswith("optim.lr")]
    printed = json.loads(lmtrain("pretrain", "--config-dir", tmp_path, *settings, "--print-config", "--json"))
    assert printed["optim"]["lr"] == 0.123
