"""Planted mistakes in lmtrain/runtime: files, launchers, signals, Slurm, devices."""

from tests.mutants.mutant import Mutant

MUTANTS = [
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
        name="words_of_forked_ranks_wait_in_a_buffer",
        file="lmtrain/runtime/processes/fork_server.py",
        function="run_request",
        old="sys.stderr = _open_stream(2, sys.stderr, line_buffering=True)",
        new="sys.stderr = _open_stream(2, sys.stderr, line_buffering=os.isatty(2))",
        breaks="Warnings of a rank come late, behind those of others, and what it said last is lost when it is killed.",
        only_for="forked ranks whose standard error is a pipe or a file, as that of all but rank 0 is",
    ),
]
