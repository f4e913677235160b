"""Who this process is among its peers, and what is reported about its surroundings. Torch-free.

The only reader of environment variables (with native.py). Called by set-up, faults and the bug report; it reads named
facts only, so that no secret of the environment can reach a log or a checkpoint.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from lmtrain.errors import UsageError

_COMMIT = re.compile(r"[0-9a-f]{40}")
# because: Slurm numbers the steps that srun did not start (batch script, interactive shell) from the top of 32 bits
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
# set by our own launcher for its processes
_LAUNCHER, STORE_FD, _RESTARTS = "LMTRAIN_LAUNCHER", "LMTRAIN_STORE_FD", "LMTRAIN_RESTART_COUNT"
_RESTARTS_BY = {"lmtrain": _RESTARTS, "slurm": "SLURM_RESTART_COUNT"}
COMPANION = "LMTRAIN_COMPANION"  # set for a rank that was forked with its companion: a descriptor and a process id
_NAMED_BY = "LMTRAIN_RUN_TOKEN"  # set by our own launcher, or by whoever starts processes in another way
ELSEWHERE = "elsewhere"  # of processes that a dry run only reckons with
BEGAN = "LMTRAIN_BEGAN_S"  # set by our own launcher: when it was started
_PACKAGES = ("lmtrain", "torch", "numpy", "tokenizers", "safetensors", "hydra-core", "typer", "rich")
_NUM_SPANS = 6  # of ranks, that a message names
RUN_TOKEN = re.compile(r"[0-9a-f]{32}")  # 128 bits


def git_commit(root: Path) -> str | None:
    """Return the commit of a checkout, read from its files; None if there is no checkout."""
    git = root / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head if _COMMIT.fullmatch(head) else None
        ref = head.removeprefix("ref: ")
        if (git / ref).is_file():
            lines = [f"{(git / ref).read_text().strip()} {ref}"]
        else:
            lines = (git / "packed-refs").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    found = [line.split()[0] for line in lines if line.endswith(f" {ref}")]
    return found[0] if found and _COMMIT.fullmatch(found[0]) else None


@dataclass(frozen=True)
class ProcessEnv:
    """One process of a run, as its launcher started it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    launcher: str = "single"  # lmtrain (our own), torchrun, slurm or single
    host: str = ""
    job_id: str | None = None
    num_restarts: int = 0  # how often the launcher has started this job again
    local_world_size: int = 0  # processes on this node; 0 where the launcher does not say
    num_own_gpus: int = 0  # that its launcher shows to it alone; 0 where it sees those of its node
    is_child: bool = False  # of a launcher of ours
    num_ranks: int = 1  # that this process stands for: more than its own where it is the launcher of a node

    def as_launcher(self, num_processes: int, option: str = "--nproc") -> ProcessEnv:
        """Return the first of the `num_processes` processes that this one is about to start on this node."""
        if self.launcher == "slurm" and option == "--nproc-per-node" and not self.is_child:
            return self._as_node_launcher(num_processes)
        if self.launcher != "single":
            started, way_out = f"that {self.launcher} has started", f"Leave out {option}, or {self.launcher}."
            if self.is_child:
                started, way_out = "that lmtrain has started", f"Leave out {option}."
            elif self.launcher == "slurm":
                way_out = f"Leave out {option}, or give --nproc-per-node where srun starts one task on each node."
            raise UsageError(f"{option}={num_processes} would start processes of processes {started}. {way_out}")
        if num_processes == 1:
            return self
        return replace(
            self, world_size=num_processes, local_world_size=num_processes, launcher="lmtrain", num_ranks=num_processes
        )

    def _as_node_launcher(self, num_processes: int) -> ProcessEnv:
        """Do the same for a task of srun that is alone on its node."""
        if self.local_world_size > 1:
            raise UsageError(
                f"srun has started {self.local_world_size} tasks on {self.host}, and --nproc-per-node={num_processes} "
                f"would start {num_processes} processes of each. Use srun --ntasks-per-node=1, or leave out "
                "--nproc-per-node."
            )
        if num_processes == 1:
            return self
        return replace(
            self, rank=self.rank * num_processes, world_size=self.world_size * num_processes,
            local_world_size=num_processes, num_own_gpus=0, num_ranks=num_processes,
        )  # fmt: skip

    @property
    def who(self) -> str:
        """The name of this process in messages: its rank and host, or its node."""
        return f"rank {self.rank} on {self.host}" if self.num_ranks == 1 else f"node {self.host}"

    @property
    def has_peers(self) -> bool:
        """True if ranks that this process does not start would wait for it."""
        return self.world_size > self.num_ranks

    @classmethod
    def detect(cls, environ: Mapping[str, str] | None = None) -> ProcessEnv:
        env = os.environ if environ is None else environ
        step = env.get("SLURM_STEP_ID", "")
        if "RANK" in env or "WORLD_SIZE" in env:
            launcher, local_size = env.get(_LAUNCHER, "torchrun"), _number(env, "LOCAL_WORLD_SIZE", 0)
            restarts = _RESTARTS_BY.get(launcher, "TORCHELASTIC_RESTART_COUNT")
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", restarts)
        # because: a batch script or an allocation's shell has some of the variables of a process that srun started, too
        elif "SLURM_PROCID" in env and step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP:
            # because: inside an allocation SLURM_NTASKS may be the job's; SLURM_STEP_NUM_TASKS is always the step's
            tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
            names = ("SLURM_PROCID", tasks, "SLURM_LOCALID", "SLURM_RESTART_COUNT")
            launcher, local_size = "slurm", _tasks_on_this_node(env)
        else:
            return cls(host=socket.gethostname(), job_id=env.get("SLURM_JOB_ID"))
        rank, world_size = _number(env, names[0]), _number(env, names[1])
        local_rank, num_restarts = _number(env, names[2], 0), _number(env, names[3], 0)
        if not (rank < world_size and local_rank < world_size):
            raise UsageError(
                f"{names[0]}={rank} and {names[2]}={local_rank} do not fit {names[1]}={world_size}. "
                "Start processes with torchrun or srun, or unset these variables for a single process."
            )
        _port(env, 1)  # because: a wrong one is refused before anything is read or built; 1 stands for none given
        is_child = _LAUNCHER in env
        return cls(
            rank, world_size, local_rank, launcher,
            # because: two nodes of a Slurm on one machine have one host name
            host=(launcher == "slurm" and env.get("SLURMD_NODENAME")) or socket.gethostname(),
            job_id=env.get("SLURM_JOB_ID") or env.get("TORCHELASTIC_RUN_ID"),
            num_restarts=num_restarts, local_world_size=local_size,
            num_own_gpus=_gpus_of_task(env) if launcher == "slurm" and not is_child else 0, is_child=is_child,
        )  # fmt: skip


@dataclass(frozen=True)
class Rendezvous:
    """Where the processes of a run first meet: rank 0 listens at this address, the others call there."""

    host: str
    port: int
    name: str  # apart from other runs that meet at the same address by mistake
    listen_fd: int | None = None  # a socket that already listens, made by our own launcher for rank 0
    stays_on_node: bool = False  # nobody calls from another machine
    held_by_launcher: bool = False  # torchrun's agent listens itself, and rank 0 calls like the others
    token: str | None = field(default=None, repr=False)  # RUN_TOKEN, where all processes were started with one

    @property
    def where(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def detect(cls, process: ProcessEnv, environ: Mapping[str, str] | None = None) -> Rendezvous:
        env = os.environ if environ is None else environ
        if process.launcher == "slurm":
            return cls._of_srun_step(env)
        if not env.get("MASTER_ADDR"):
            raise UsageError(
                "MASTER_ADDR is not set, and RANK says that this process has peers. Start it with torchrun, srun or "
                "--nproc, or set MASTER_ADDR and MASTER_PORT to where rank 0 runs."
            )
        host = env["MASTER_ADDR"]
        return cls(
            host, _port(env),
            # because: the agent's store outlives its workers, and the addresses of dead ones would be called again
            name=f"attempt {process.num_restarts}",
            listen_fd=_number(env, STORE_FD) if STORE_FD in env else None,
            stays_on_node=host in ("127.0.0.1", "localhost"),
            held_by_launcher=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True", token=_token(env),
        )  # fmt: skip

    @classmethod
    def _of_srun_step(cls, env: Mapping[str, str]) -> Rendezvous:
        """Return a meeting place on the step's first node; every process derives the same port by itself."""
        job, step = _number(env, "SLURM_JOB_ID"), _number(env, "SLURM_STEP_ID")
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "localhost"
        alone = "," not in nodes and "[" not in nodes
        # because: below the ports that Linux gives out by itself (32768 on) and above those of common services
        port = _port(env, 20_000 + (job * 64 + step) % 10_000)
        name = f"{job}.{step}.{env.get('SLURM_RESTART_COUNT', '0')}"
        host = env.get("MASTER_ADDR") or ("127.0.0.1" if alone else first_host(nodes))
        return cls(host, port, name, None, alone, token=_token(env))


def ranks_text(ranks: Sequence[int]) -> str:
    """Rising ranks as a message names them: "rank 3", "ranks 0, 2 and 8-15"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = [f"{first}" if first == last else f"{first}-{last}" for first, last in spans]
    if len(words) > _NUM_SPANS:
        return f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"
    listed = " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's node list: "n[03-07,12],login" -> "n03"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else nodes


def _tasks_on_this_node(env: Mapping[str, str]) -> int:
    """Slurm's "4(x2),3" says that nodes 0 and 1 have four tasks each and node 2 has three."""
    text, node = env.get("SLURM_STEP_TASKS_PER_NODE", ""), _number(env, "SLURM_NODEID", 0)
    for size, repeat in re.findall(r"([0-9]+)(?:\(x([0-9]+)\))?", text):
        node -= int(repeat or 1)
        if node < 0:
            return int(size)
    return 0


def _gpus_of_task(env: Mapping[str, str]) -> int:
    """Return how many GPUs Slurm gives this task alone.

    --gpus-per-task says "2" or "a100:2", --tres-per-task "cpu=4,gres/gpu=2".
    """
    asked = env.get("SLURM_GPUS_PER_TASK") or env.get("SLURM_TRES_PER_TASK", "")
    if found := re.search(r"(?:^(?:\w+:)?|\bgpu(?::\w+)?[:=])([0-9]+)(?:,|$)", asked):
        return int(found[1])
    # because: an option of srun itself is in neither; but it narrows what each task has of the step's GPUs
    seen, on_node = env.get("SLURM_STEP_GPUS", "").split(","), _number(env, "SLURM_GPUS_ON_NODE", 0)
    return len(seen) if seen[0] and len(seen) < on_node else 0


@dataclass(frozen=True)
class NodeRanks:
    """The ranks that a launcher of ours starts on its node: `count` from rank `first` on, of `world_size` in all."""

    count: int
    first: int = 0
    world_size: int = 0  # 0 where there are no others
    launcher: str = "lmtrain"  # or slurm, where srun has started such a launcher on each node
    host: str = ""

    @property
    def num_all(self) -> int:
        return self.world_size or self.count

    def name(self, ranks: Sequence[int]) -> str:
        """Return how a message names some of these ranks, rising: by their node where there may be several."""
        return f"{ranks_text(ranks)} {f'on {self.host}' if self.launcher == 'slurm' else f'of {self.num_all}'}"

    def shared_environment(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the variables that all these processes have; what the user has set for their libraries stays."""
        env = dict(os.environ if environ is None else environ)
        env.setdefault("OMP_NUM_THREADS", str(max(1, num_usable_cpus() // self.count)))
        # because: numpy's products are small here, and threads that it starts when it is imported forbid a fork
        env.setdefault("OPENBLAS_NUM_THREADS", "1")
        if self.launcher == "lmtrain":
            # because: gloo would listen on the address of the machine's name, and all of these peers are here
            env.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        env.pop(STORE_FD, None)
        return env

    def environment(self, local_rank: int, port: int, token: str, *, num_restarts: int = 0) -> dict[str, str]:
        """Return the variables of one of them: who it is and, where all ranks are here, where they meet."""
        env = {"RANK": str(self.first + local_rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(self.num_all)}
        env |= {"LOCAL_WORLD_SIZE": str(self.count), _LAUNCHER: self.launcher}
        if self.launcher == "lmtrain":
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            env |= {_NAMED_BY: token, _RESTARTS: str(num_restarts)}
        return env


def forks_wanted() -> bool:
    """Return whether ranks may be forked from one process; LMTRAIN_FORK=0 starts each separately."""
    return os.environ.get("LMTRAIN_FORK", "1") != "0"


def waiting_companion() -> tuple[int, int] | None:
    """Take the companion that was forked with this process: the descriptor of its socket, and its process id."""
    found = re.fullmatch(r"([0-9]+):([0-9]+)", os.environ.pop(COMPANION, ""))
    return (int(found[1]), int(found[2])) if found else None


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, None if default is None else str(default))
    if text is None or not re.fullmatch(r"[0-9]{1,9}", text):
        found = "is not set" if text is None else f"is {text}, which is not a whole number"
        raise UsageError(f"{name} {found}, and this process looks like one of several. Start it with torchrun or srun.")
    return int(text)


def _port(env: Mapping[str, str], default: int | None = None) -> int:
    port = _number(env, "MASTER_PORT", default)
    if not 0 < port < 1 << 16:
        raise UsageError(f"MASTER_PORT={port} is not a port. Set it to a free one between 1024 and 65535.")
    return port


def _token(env: Mapping[str, str]) -> str | None:
    token = env.get(_NAMED_BY) or None
    if token is not None and not RUN_TOKEN.fullmatch(token):
        raise UsageError(
            f"{_NAMED_BY} is not 32 hexadecimal digits in small letters. Set it to what `openssl rand -hex 16` prints, "
            "the same for all processes of a run, or unset it."
        )
    return token


@dataclass(frozen=True)
class SlurmJob:
    """The job that this process is in, and its times in seconds since 1970 where Slurm says them."""

    number: str
    began: float | None = None
    ends: float | None = None

    @classmethod
    def detect(cls, environ: Mapping[str, str] | None = None) -> SlurmJob | None:
        env = os.environ if environ is None else environ
        began, ends = (env.get(f"SLURM_JOB_{name}_TIME", "") for name in ("START", "END"))
        number = env.get("SLURM_JOB_ID", "")
        times = [float(text) if re.fullmatch(r"[0-9]{1,12}", text) else None for text in (began, ends)]
        return cls(number, *times) if re.fullmatch(r"[0-9]{1,12}", number) else None


def began_at(own_s: float) -> float:
    """When the command began: this process, or the launcher that says so, by the machine's clock that nobody sets."""
    with suppress(ValueError):
        return min(float(os.environ.get(BEGAN, own_s)), own_s)
    return own_s


def fault_request(environ: Mapping[str, str] | None = None) -> tuple[str | None, bool]:
    """Return the fault that LMTRAIN_FAULT names, and whether faults are allowed."""
    env = os.environ if environ is None else environ
    return env.get("LMTRAIN_FAULT") or None, env.get("LMTRAIN_ALLOW_FAULTS") == "1"


def set_variables(variables: Mapping[str, str]) -> None:
    """Give this process, which was forked from another, variables of its own."""
    os.environ.update(variables)


def drop_variable(name: str) -> bool:
    """Remove a variable; return whether it was set."""
    return os.environ.pop(name, None) is not None


def set_env_default(name: str, value: str) -> None:
    """Set a library's variable unless the user has."""
    os.environ.setdefault(name, value)


def end_now(code: int) -> NoReturn:
    """Flush the standard streams and end the process without cleaning up."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def share_cores() -> None:
    """Threads of one product that wait for each other soon yield their cores. Call it before torch is imported.

    because: by default they spin for milliseconds, in which the very thread that is waited for may get no core. Beside
    one busy process a small model trained 20 times slower by it; with this count 4 times, and no slower when alone.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def grow_segments() -> None:
    """Let torch's GPU allocator grow its segments, unless the user has configured it. Call it before CUDA starts.

    because: parts of fixed segments stay unusable near full memory, and torch reads this variable once
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def num_usable_cpus() -> int:
    """Return how many CPUs this process may use, which on a shared node is fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_compiled_helpers() -> bool:
    """Return whether what csrc/ compiles is there, and not its twins in Python alone."""
    from lmtrain.native import lib  # because: most processes do not ask

    return lib is not None


def environment_report() -> dict[str, Any]:
    """Return versions and facts of the machine for a bug report; environment variables are never part of it."""
    process = ProcessEnv.detect()
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "num_cpus": os.cpu_count() or 1,
        "num_usable_cpus": num_usable_cpus(),
        "host": process.host,
        "launcher": process.launcher,
        "world_size": process.world_size,
        "commit": git_commit(Path(__file__).resolve().parents[3]),
        "packages": {name: version_of(name) for name in _PACKAGES},
        "prefix": sys.prefix,
    }


def version_of(package: str) -> str | None:
    # because: importing torch only to ask its version takes seconds
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def listen(host: str, port: int) -> int:
    """Listen on a port and return the descriptor; without a host, on every interface."""
    family = socket.AF_INET if host or not socket.has_dualstack_ipv6() else socket.AF_INET6
    try:
        return socket.create_server(
            (host, port), family=family, backlog=1024, dualstack_ipv6=family == socket.AF_INET6
        ).detach()
    except OSError as error:
        what = (
            "is in use by another program" if error.errno == errno.EADDRINUSE
            else f"cannot be opened: {error.strerror}"
        )  # fmt: skip
        raise UsageError(f"Port {port} {what}. Set MASTER_PORT to a free one.") from error
