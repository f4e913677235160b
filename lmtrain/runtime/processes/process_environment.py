"""The process's place among its peers (rank, launcher, Slurm job, rendezvous), read from the environment. Torch-free.

The only reader of environment variables, with compiled_helpers.py. Called by set-up, faults and the bug report; it
reads named variables only, so that no secret of the environment can reach a log or a checkpoint.
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

from lmtrain.errors import UsageError, leave_out

_COMMIT = re.compile(r"[0-9a-f]{40}")
# because: Slurm numbers the steps that srun did not start (batch script, interactive shell) from the top of 32 bits
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
# set by our own launcher for its ranks: its kind, the descriptor of rank 0's listening socket, the number of restarts
_LAUNCHER_VARIABLE, STORE_FD_VARIABLE = "LMTRAIN_LAUNCHER", "LMTRAIN_STORE_FD"
_RESTARTS_VARIABLE = "LMTRAIN_RESTART_COUNT"
_RESTARTS_VARIABLES = {"lmtrain": _RESTARTS_VARIABLE, "slurm": "SLURM_RESTART_COUNT"}
# set for a rank that was forked together with its companion: the descriptor of their socket and the process id
COMPANION_VARIABLE = "LMTRAIN_COMPANION"
_RUN_ID_VARIABLE = "LMTRAIN_RUN_TOKEN"  # set by our own launcher, or by whoever starts processes in another way
DRY_RUN_LAUNCHER = "elsewhere"  # the launcher of ranks that a dry run only computes with
START_TIME_VARIABLE = "LMTRAIN_BEGAN_S"  # set by our own launcher: when it was started
COMMAND_VARIABLE = "LMTRAIN_COMMAND"  # set by our own launcher: the identity of its process, which may restart ranks
_PACKAGES = ("lmtrain", "torch", "numpy", "tokenizers", "safetensors", "hydra-core", "typer", "rich")
_MAX_SPANS = 6  # how many ranges of ranks a message names
RUN_TOKEN = re.compile(r"[0-9a-f]{32}")  # 128 bits


def git_commit(root: Path) -> str | None:
    """Return the hash of the commit that is checked out in the git repository `root`, read from git's files; None if
    there is no repository or no commit.
    """
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
    commits = [line.split()[0] for line in lines if line.endswith(f" {ref}")]
    return commits[0] if commits and _COMMIT.fullmatch(commits[0]) else None


@dataclass(frozen=True)
class ProcessEnv:
    """The place of this process in its run (rank, sizes, host), as its launcher has set it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    launcher: str = "single"  # lmtrain (our own), torchrun, slurm or single
    host: str = ""
    job_id: str | None = None
    num_restarts: int = 0  # how often the launcher has started this job again
    local_world_size: int = 0  # processes on this node; 0 if the launcher does not give it
    num_own_gpus: int = 0  # GPUs that the launcher shows to this process only; 0 if it sees those of its node
    is_child: bool = False  # whether our own launcher started it
    num_ranks: int = 1  # ranks that this process represents, from `rank` on: all of its node if it is their launcher

    @property
    def command(self) -> str | None:
        """The identity of the command's process: of our own launcher if it has started this process, else of this one.
        """
        launcher = os.environ.get(COMMAND_VARIABLE) if self.is_child else None
        return launcher or process_identity(os.getpid())

    @property
    def takes_nproc(self) -> bool:
        """True if the option --nproc says how many processes there are, and not a launcher such as torchrun."""
        return self.launcher in ("single", "lmtrain", DRY_RUN_LAUNCHER)

    def as_launcher(self, num_processes: int, flag: str = "--nproc") -> ProcessEnv:
        """Return the environment of this process if it launches `num_processes` ranks on its node: its rank is that of
        the first of them. `flag` is the command-line flag that gave the number, for messages. Raise UsageError if this
        process was itself started by a launcher; srun is allowed if it has started only this task on the node.
        """
        is_task_of_node = self.launcher == "slurm" and flag == "--nproc-per-node" and not self.is_child
        if self.launcher != "single" and not is_task_of_node:
            launcher = "lmtrain" if self.is_child else self.launcher
            way_out = leave_out(flag, shown=f"Leave out {flag}")
            if launcher == "slurm":
                way_out += ", or give --nproc-per-node where srun starts one task on each node"
            elif not self.is_child:
                way_out += f", or {launcher}"
            raise UsageError(
                f"{flag}={num_processes} would start {num_processes} processes from each process that {launcher} has "
                f"started. {way_out}."
            )
        if is_task_of_node and self.local_world_size > 1:
            raise UsageError(
                f"srun has started {self.local_world_size} tasks on {self.host}, but --nproc-per-node={num_processes} "
                f"would start {num_processes} processes from each task. Use srun --ntasks-per-node=1, or "
                f"{leave_out('--nproc-per-node', shown='leave out --nproc-per-node')}."
            )
        if num_processes == 1:
            return self
        return replace(
            self, rank=self.rank * num_processes, world_size=self.world_size * num_processes,
            local_world_size=num_processes, launcher="slurm" if is_task_of_node else "lmtrain", num_own_gpus=0,
            num_ranks=num_processes,
        )  # fmt: skip

    @property
    def label(self) -> str:
        """The name of this process in messages: its rank and host, or its node."""
        return f"rank {self.rank} on {self.host}" if self.num_ranks == 1 else f"node {self.host}"

    @property
    def has_peers(self) -> bool:
        """True if ranks that this process does not start would wait for it."""
        return self.world_size > self.num_ranks

    def name_ranks(self, ranks: Sequence[int]) -> str:
        """Return how a message names some ranks of this node, given in rising order: with the node if the run may have
        several.
        """
        return f"{ranks_text(ranks)} {f'on {self.host}' if self.launcher == 'slurm' else f'of {self.world_size}'}"

    def shared_environment(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the environment variables of all ranks that this process starts: those of `environ`, and defaults for
        thread counts and for gloo's network interface.
        """
        env = dict(environ)
        env.setdefault("OMP_NUM_THREADS", str(max(1, num_usable_cpus() // self.num_ranks)))
        # because: numpy's products are small here, and threads that it starts at import would make a fork unsafe
        env.setdefault("OPENBLAS_NUM_THREADS", "1")
        if self.launcher != "slurm":
            # because: gloo would listen on the address of the machine's name, and all peers are on this node
            env.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        env.pop(STORE_FD_VARIABLE, None)
        return env

    def rank_environment(self, local_rank: int, port: int, token: str, *, num_restarts: int = 0) -> dict[str, str]:
        """Return the environment variables of a single rank: its rank, local rank and the world sizes. If lmtrain
        starts all ranks of the run, also the rendezvous `port`, the run's `token` and the number of restarts.
        """
        env = {
            "RANK": str(self.rank + local_rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.num_ranks),
        }  # fmt: skip
        if self.launcher == "slurm":
            return env | {_LAUNCHER_VARIABLE: "slurm"}
        return env | {
            _LAUNCHER_VARIABLE: "lmtrain", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            _RUN_ID_VARIABLE: token, _RESTARTS_VARIABLE: str(num_restarts),
        }  # fmt: skip

    @classmethod
    def detect(cls, env: Mapping[str, str] = os.environ) -> ProcessEnv:
        """Return this process's place in its run from the variables of our launcher, torchrun or srun; a single process
        if there are none. Raise UsageError if the variables are malformed or contradict each other.
        """
        step = env.get("SLURM_STEP_ID", "")
        if "RANK" in env or "WORLD_SIZE" in env:
            launcher, local_size = env.get(_LAUNCHER_VARIABLE, "torchrun"), _read_number(env, "LOCAL_WORLD_SIZE", 0)
            restarts = _RESTARTS_VARIABLES.get(launcher, "TORCHELASTIC_RESTART_COUNT")
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", restarts)
        # because: a batch script or an allocation's shell has some of the variables of a process that srun started, too
        elif "SLURM_PROCID" in env and step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP:
            # because: inside an allocation SLURM_NTASKS may be the job's; SLURM_STEP_NUM_TASKS is always the step's
            tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
            names = ("SLURM_PROCID", tasks, "SLURM_LOCALID", "SLURM_RESTART_COUNT")
            launcher, local_size = "slurm", _tasks_on_this_node(env)
        else:
            return cls(host=socket.gethostname(), job_id=env.get("SLURM_JOB_ID"))
        rank, world_size = _read_number(env, names[0]), _read_number(env, names[1])
        local_rank, num_restarts = _read_number(env, names[2], 0), _read_number(env, names[3], 0)
        if not (rank < world_size and local_rank < world_size):
            raise UsageError(
                f"{names[0]}={rank} and {names[2]}={local_rank} do not fit {names[1]}={world_size}; both must be less. "
                "Start processes with torchrun or srun, or unset these variables for a single process."
            )
        _read_port(env, 1)  # because: a wrong one is refused before anything is read or built; 1 stands for none given
        is_child = _LAUNCHER_VARIABLE in env
        return cls(
            rank, world_size, local_rank, launcher,
            # because: two nodes of a Slurm on one machine have one host name
            host=(launcher == "slurm" and env.get("SLURMD_NODENAME")) or socket.gethostname(),
            job_id=env.get("SLURM_JOB_ID") or env.get("TORCHELASTIC_RUN_ID"),
            num_restarts=num_restarts, local_world_size=local_size,
            num_own_gpus=_gpus_per_task(env) if launcher == "slurm" and not is_child else 0, is_child=is_child,
        )  # fmt: skip


@dataclass(frozen=True)
class Rendezvous:
    """The address at which the ranks of a run find each other: rank 0 listens there, the others connect."""

    host: str
    port: int
    name: str  # prefix of the run's entries, to separate runs and attempts at the same address
    listen_fd: int | None = None  # a socket that already listens, opened by our own launcher for rank 0
    stays_on_node: bool = False  # whether all ranks are on this node
    held_by_launcher: bool = False  # whether torchrun's agent listens, and rank 0 connects like the others
    token: str | None = field(default=None, repr=False)  # the run's token (RUN_TOKEN), if it was started with one

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def detect(cls, process: ProcessEnv, env: Mapping[str, str] = os.environ) -> Rendezvous:
        """Return the address at which the ranks meet, from the launcher's variables. Raise UsageError if they give no
        address.
        """
        if process.launcher == "slurm":
            return cls._from_srun_step(env)
        if not env.get("MASTER_ADDR"):
            raise UsageError(
                "MASTER_ADDR is not set, but RANK is, so this process should have peers. Start it with torchrun, srun "
                "or --nproc, or set MASTER_ADDR and MASTER_PORT to the address of rank 0."
            )
        host = env["MASTER_ADDR"]
        return cls(
            host, _read_port(env),
            # because: the agent's store outlives its workers, and the addresses of dead ones would be called again
            name=f"attempt {process.num_restarts}",
            listen_fd=_read_number(env, STORE_FD_VARIABLE) if STORE_FD_VARIABLE in env else None,
            stays_on_node=host in ("127.0.0.1", "localhost"),
            held_by_launcher=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True", token=_read_token(env),
        )  # fmt: skip

    @classmethod
    def _from_srun_step(cls, env: Mapping[str, str]) -> Rendezvous:
        """Return the address at which the tasks of an srun step meet: the step's first node, and a port that all tasks
        derive from the ids of job and step. MASTER_ADDR and MASTER_PORT override host and port.
        """
        job, step = _read_number(env, "SLURM_JOB_ID"), _read_number(env, "SLURM_STEP_ID")
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "localhost"
        is_one_node = "," not in nodes and "[" not in nodes
        # because: below the ports that Linux assigns by itself (from 32768) and above those of common services
        port = _read_port(env, 20_000 + (job * 64 + step) % 10_000)
        name = f"{job}.{step}.{env.get('SLURM_RESTART_COUNT', '0')}"
        host = env.get("MASTER_ADDR") or ("127.0.0.1" if is_one_node else first_host(nodes))
        return cls(host, port, name, None, is_one_node, token=_read_token(env))


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks, which come in rising order, as a text for messages: "rank 3", "ranks 0, 2 and 8-15"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = [f"{first}" if first == last else f"{first}-{last}" for first, last in spans]
    if len(words) > _MAX_SPANS:
        return f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"
    listed = " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's node list: "n[03-07,12],login" -> "n03"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else nodes


def _tasks_on_this_node(env: Mapping[str, str]) -> int:
    """Return how many tasks the srun step of this process has on this node; 0 if unknown.

    Slurm's "4(x2),3" means four tasks each on nodes 0 and 1, and three on node 2.
    """
    text, node = env.get("SLURM_STEP_TASKS_PER_NODE", ""), _read_number(env, "SLURM_NODEID", 0)
    for size, repeat in re.findall(r"([0-9]+)(?:\(x([0-9]+)\))?", text):
        node -= int(repeat or 1)
        if node < 0:
            return int(size)
    return 0


def _gpus_per_task(env: Mapping[str, str]) -> int:
    """Return how many GPUs Slurm shows to this task only; 0 if the task sees all GPUs of its node.

    --gpus-per-task is "2" or "a100:2", --tres-per-task "cpu=4,gres/gpu=2".
    """
    requested = env.get("SLURM_GPUS_PER_TASK") or env.get("SLURM_TRES_PER_TASK", "")
    if match := re.search(r"(?:^(?:\w+:)?|\bgpu(?::\w+)?[:=])([0-9]+)(?:,|$)", requested):
        return int(match[1])
    # because: an option of srun itself is in neither variable, but it shortens the list of the step's GPUs for a task
    step_gpus, on_node = env.get("SLURM_STEP_GPUS", "").split(","), _read_number(env, "SLURM_GPUS_ON_NODE", 0)
    return len(step_gpus) if step_gpus[0] and len(step_gpus) < on_node else 0


def may_fork_ranks() -> bool:
    """Return whether ranks may be forked from one process; LMTRAIN_FORK=0 starts each separately."""
    return os.environ.get("LMTRAIN_FORK", "1") != "0"


def take_companion() -> tuple[int, int] | None:
    """Return the socket descriptor and process id of the companion that was forked with this process, or None.

    The variable that holds them is removed.
    """
    match = re.fullmatch(r"([0-9]+):([0-9]+)", os.environ.pop(COMPANION_VARIABLE, ""))
    return (int(match[1]), int(match[2])) if match else None


def _read_number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the environment variable `name` as a whole number, or `default` if it is not set. Raise UsageError if it
    is not a number, or if it is not set and there is no default.
    """
    text = env.get(name, None if default is None else str(default))
    if text is None or not re.fullmatch(r"[0-9]{1,9}", text):
        raise UsageError(
            f"{name} {'is not set' if text is None else f'is {text}, which is not a whole number'}, but other "
            "variables say that this process is one of several. Start it with torchrun or srun."
        )
    return int(text)


def _read_port(env: Mapping[str, str], default: int | None = None) -> int:
    """Return MASTER_PORT, or `default` if it is not set. Raise UsageError if it is not a port number, or if it is not
    set and there is no default.
    """
    port = _read_number(env, "MASTER_PORT", default)
    if not 0 < port < 1 << 16:
        raise UsageError(f"MASTER_PORT={port} is not a port. Set it to a free port from 1024 to 65535.")
    return port


def _read_token(env: Mapping[str, str]) -> str | None:
    """Return the run's token from its environment variable, or None if it is not set. Raise UsageError if it is not 32
    hexadecimal digits.
    """
    token = env.get(_RUN_ID_VARIABLE) or None
    if token is not None and not RUN_TOKEN.fullmatch(token):
        raise UsageError(
            f"{_RUN_ID_VARIABLE} must have 32 lower-case hexadecimal digits. Set it to the output of "
            "`openssl rand -hex 16`, the same for all processes of a run, or unset it."
        )
    return token


@dataclass(frozen=True)
class SlurmJob:
    """The Slurm job of this process, and its start and end in seconds since 1970 if Slurm gives them."""

    number: str
    began: float | None = None
    ends: float | None = None

    @classmethod
    def detect(cls, env: Mapping[str, str] = os.environ) -> SlurmJob | None:
        """Return the Slurm job of this process from Slurm's variables, or None outside of a job."""
        number, *texts = (env.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME"))
        times = [float(text) if re.fullmatch(r"[0-9]{1,12}", text) else None for text in texts]
        return cls(number, *times) if re.fullmatch(r"[0-9]{1,12}", number) else None


def command_start_s(own_s: float) -> float:
    """Return when the command began, in seconds of the monotonic clock: the start of its launcher if an environment
    variable gives it, else `own_s`, the start of this process.
    """
    with suppress(ValueError):
        return min(float(os.environ.get(START_TIME_VARIABLE, own_s)), own_s)
    return own_s


def fault_request(env: Mapping[str, str] = os.environ) -> tuple[str | None, bool]:
    """Return the text of LMTRAIN_FAULT, None if it is not set, and whether faults are allowed."""
    return env.get("LMTRAIN_FAULT") or None, env.get("LMTRAIN_ALLOW_FAULTS") == "1"


def set_variables(variables: Mapping[str, str]) -> None:
    """Set environment variables of this process, which was forked from another."""
    os.environ.update(variables)


def drop_variable(name: str) -> bool:
    """Remove an environment variable; return whether it was set."""
    return os.environ.pop(name, None) is not None


def process_identity(pid: int) -> str | None:
    """Return the number and the start time of a running process of this machine as "PID.TICKS", which no later process
    has; None if it has ended.
    """
    try:
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if words[0] == b"Z" else f"{pid}.{int(words[19])}"


def set_env_default(name: str, value: str) -> None:
    """Set an environment variable, which a library reads, unless the user has set it."""
    os.environ.setdefault(name, value)


def end_now(code: int) -> NoReturn:
    """Flush standard output and error, and end the process with the exit code `code`, without Python's clean-up."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def set_library_defaults() -> None:
    """Set the environment variables of OpenMP and of torch's GPU allocator that lmtrain needs, unless the user has set
    them. Call it before torch is imported, since both are read once.

    because: OpenMP's threads spin by default for milliseconds while they wait for each other, in which the thread that
    they wait for may get no core. Beside one busy process a small model trained 20 times slower by it; with this count
    4 times, and no slower when alone. Parts of fixed segments stay unusable when the GPU's memory is nearly full.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def num_usable_cpus() -> int:
    """Return how many CPUs this process may use, which on a shared node is fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_compiled_helpers() -> bool:
    """Return whether the compiled helpers of csrc/ are installed, rather than only their fallbacks in Python."""
    from lmtrain.runtime.compiled_helpers import lib  # because: most processes do not need it

    return lib is not None


def environment_report() -> dict[str, Any]:
    """Return facts for a bug report by name, such as "python" or "launcher": versions, machine and launcher of this
    process, but no environment variables.
    """
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
    """Return the version of an installed package without importing it; None if it is not installed."""
    # because: importing torch only for its version takes seconds
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def listen(host: str, port: int) -> int:
    """Listen on a TCP port and return the socket's descriptor; an empty `host` means every interface. Raise UsageError
    if the port cannot be opened.
    """
    family = socket.AF_INET if host or not socket.has_dualstack_ipv6() else socket.AF_INET6
    try:
        return socket.create_server(
            (host, port), family=family, backlog=1024, dualstack_ipv6=family == socket.AF_INET6
        ).detach()
    except OSError as error:
        cause = "it is in use by another program" if error.errno == errno.EADDRINUSE else error.strerror
        raise UsageError(f"Port {port} cannot be opened: {cause}. Set MASTER_PORT to a free port.") from error
