"""Planted mistakes in lmtrain/runtime: files, launchers, signals, Slurm, devices."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="rename_synced_in_the_wrong_folder",
        file="lmtrain/runtime/files/atomic_files.py",
        function="put_in_place",
        old="    fsync_dir(path.parent)\n",
        new="    fsync_dir(path)\n",
        breaks="The rename of a finished checkpoint or dataset is not brought to disk: after a power cut it may have "
        "its temporary name again, though the run has said that it is saved.",
        only_for="a machine that loses its power soon after a folder was put in place",
    ),
    Mutant(
        name="interrupted_replacement_stays_half_done",
        file="lmtrain/runtime/files/atomic_files.py",
        function="put_in_place",
        old="    except BaseException:\n",
        new="    except Exception:\n",
        breaks="Where a stop comes between the two renames of a replacement, the old checkpoint is left aside and "
        "nothing has its name any more.",
        only_for="a folder that replaces another one, and a Ctrl-C or SIGTERM between the two renames",
    ),
    Mutant(
        name="one_read_is_taken_for_all",
        file="lmtrain/runtime/files/atomic_files.py",
        function="read_range",
        old="""    parts = []
    while size > 0:
        part = os.pread(fd, size, start)
        if not part:
            break
        parts.append(part)
        start, size = start + len(part), size - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
""",
        new="""    return os.pread(fd, size, start) if size > 0 else b""
""",
        breaks="Linux gives at most 2 GiB - 4 KiB a read, so that the end of a large tensor is missing and a "
        "whole file is refused as damaged.",
        only_for="ranges of 2 GiB or more, as embeddings of large models in Megatron's files are, and file systems "
        "that answer with less than was asked for",
    ),
    Mutant(
        name="reserved_blocks_count_as_free",
        file="lmtrain/runtime/files/atomic_files.py",
        function="free_bytes",
        old="    return shutil.disk_usage(path).free\n",
        new="    usage = shutil.disk_usage(path)\n    return usage.total - usage.used\n",
        breaks="Room that only root may fill counts as free: the check before a save passes, and the disk is full "
        "amid the checkpoint.",
        only_for="file systems with blocks reserved for root, as ext4 has by default",
    ),
    Mutant(
        name="longer_limit_is_added_at_every_look",
        file="lmtrain/train/in_loop/save_and_stop_requests.py",
        function="Allocation._set_end",
        old="""            self._deadline_s = self._clock() + seconds_left
        else:
            self._deadline_s += end_unix_s - self._reported_end
        self._reported_end = end_unix_s
""",
        new="""            self._deadline_s, self._reported_end = self._clock() + seconds_left, end_unix_s
        else:
            self._deadline_s += end_unix_s - self._reported_end
""",
        breaks="An extension is added again every five minutes, so that the run thinks it has hours left and is killed "
        "by Slurm without a last checkpoint (or, where time was taken, stops far too early).",
        only_for="jobs whose time limit is changed while they run, from the second look after the change on",
    ),
    Mutant(
        name="own_gpus_are_assumed_where_asked_for",
        file="lmtrain/runtime/machine/visible_gpus_without_torch.py",
        function="gpu_index",
        old="0 if count == process.num_own_gpus else process.local_rank",
        new="0 if process.num_own_gpus else process.local_rank",
        breaks="All ranks of a node compute on its first GPU, and the others idle.",
        only_for="srun with --gpus-per-task where the tasks see all GPUs of their node all the same",
    ),
    Mutant(
        name="world_of_the_job_and_not_of_the_step",
        file="lmtrain/runtime/processes/process_environment.py",
        function="ProcessEnv.detect",
        old='tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"',
        new='tasks = "SLURM_NTASKS" if "SLURM_NTASKS" in env else "SLURM_STEP_NUM_TASKS"',
        breaks="The world has as many processes as the job has tasks: the run is refused for its layout, or waits for "
        "ranks that nobody has started.",
        only_for="an srun step with fewer tasks than its job",
    ),
    Mutant(
        name="neighbouring_jobs_share_a_port",
        file="lmtrain/runtime/processes/process_environment.py",
        function="Rendezvous._from_srun_step",
        old="20_000 + (job * 64 + step) % 10_000",
        new="20_000 + (job + step) % 10_000",
        breaks="The second step of a job meets at the port of the first step of the next job, and one of the two is "
        "refused because its port is in use.",
        only_for="steps after a job's first, with another job of a number near by on the same first node",
    ),
    Mutant(
        name="threads_shared_with_ranks_elsewhere",
        file="lmtrain/runtime/processes/process_environment.py",
        function="ProcessEnv.shared_environment",
        old="num_usable_cpus() // self.num_ranks",
        new="num_usable_cpus() // self.world_size",
        breaks="Each rank gets the cores of its node divided by the ranks of all nodes, and most cores idle.",
        only_for="--nproc-per-node on two or more nodes",
    ),
    Mutant(
        name="each_signal_postpones_the_second_one",
        file="lmtrain/runtime/processes/stop_signals.py",
        function="StopRequest._count_if_new",
        old="""        if self._urgent_since is not None and now_s - self._urgent_since < self._repeat_after_s:
            return False
        self._urgent_since = now_s
""",
        new="""        last, self._urgent_since = self._urgent_since, now_s
        if last is not None and now_s - last < self._repeat_after_s:
            return False
""",
        breaks="Somebody who presses Ctrl-C again and again is never taken to insist, and the run goes on to the end "
        "of its step and its save.",
        only_for="three or more signals with less than a second between each and the next",
    ),
    Mutant(
        name="killed_rank_named_by_its_place_on_the_node",
        file="lmtrain/runtime/processes/local_rank_launcher.py",
        function="_Job._outcome",
        old="return Outcome(PeerLostError.exit_code, first + killed[0], ",
        new="return Outcome(PeerLostError.exit_code, killed[0], ",
        breaks="stop.json names a rank of the first node for one that stood still on another, and the batch script "
        "leaves out a healthy node.",
        only_for="nodes other than the first, under --nproc-per-node, where a rank had to be killed",
    ),
    Mutant(
        name="words_of_forked_ranks_wait_in_a_buffer",
        file="lmtrain/runtime/processes/fork_server.py",
        function="run_request",
        old="sys.stderr = _open_stream(2, sys.stderr, line_buffering=True)",
        new="sys.stderr = _open_stream(2, sys.stderr, line_buffering=os.isatty(2))",
        breaks="Warnings of a rank come late, behind those of others, and what it said last is lost when it is killed.",
        only_for="forked ranks whose standard error is a pipe or a file, as that of all but rank 0 is",
    ),
    Mutant(
        name="a_folder_in_work_is_taken_for_abandoned",
        file="lmtrain/runtime/files/atomic_files.py",
        function="_lock_if_free",
        old="fcntl.LOCK_EX | fcntl.LOCK_NB",
        new="fcntl.LOCK_SH | fcntl.LOCK_NB",
        breaks="An export removes what another one to the same folder is writing.",
        only_for="two exports to one folder at the same time",
    ),
    Mutant(
        name="overwriting_replaces_files_of_another_kind",
        file="lmtrain/runtime/files/existing_output.py",
        function="check_output",
        old="if not has_type or not (is_empty or kind.fits(path)):",
        new="if not overwrite and (not has_type or not (is_empty or kind.fits(path))):",
        breaks="--overwrite replaces a file of another kind, such as a text by a dataset.",
        only_for="--overwrite, of an output that names a file which no such command wrote",
    ),
]
