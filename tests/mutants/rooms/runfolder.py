"""Planted mistakes in lmtrain/runfolder: rows, reasons and states of runs."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="save_counts_at_the_step_it_was_written",
        file="lmtrain/runfolder/metrics_rows.py",
        function="rows_in_force",
        old='key = (row["event"], row_step(row), str(row.get("name")))',
        new='key = (row["event"], row["step"], str(row.get("name")))',
        breaks="The row of the very checkpoint that a run went on from is taken for work that is gone, and of two "
        "saves of one step both stand.",
        only_for="continued runs whose save ended some steps after the one that it saved, as asynchronous ones do",
    ),
    Mutant(
        name="host_known_by_the_end_of_its_name",
        file="lmtrain/runfolder/folder_reader.py",
        function="run_state",
        old='holder.endswith(f" on {socket.gethostname()}")',
        new='holder.endswith(socket.gethostname())',
        breaks="A run that goes on on another machine is called killed, and somebody may start it a second time.",
        only_for="a shared disk, looked at from a machine whose name ends that of the run's machine, as n1 does gpu-n1",
    ),
    Mutant(
        name="who_looks_first_and_writes_last_says_why",
        file="lmtrain/runfolder/stop_json_writer.py",
        function="write",
        old="(os.replace if replace else _link_if_absent)(temporary, path)",
        new="os.replace(temporary, path)",
        breaks="stop.json names a peer that was lost because of the first, and the rank that failed is not looked at.",
        only_for="several processes that fail within the moment in which the first of them writes its reason",
    ),
    Mutant(
        name="newest_by_name",
        file="lmtrain/runfolder/file_names.py",
        function="checkpoint_names",
        old="for step in sorted(step for step in steps if step is not None)",
        new="for step in sorted((step for step in steps if step is not None), key=str)",
        breaks="step_100000000 counts as older than step_99999999: the run goes on from the older one, and retention "
        "removes the newer.",
        only_for="steps of more digits than others in the folder, from 100,000,000 on",
    ),
    Mutant(
        name="queued_again_though_stopped_for_good",
        file="lmtrain/runfolder/stop_json_writer.py",
        function="write",
        old="exit_code in _REQUEUE_CODES",
        new="exit_code in (*_REQUEUE_CODES, 79)",
        breaks="stop.json says that the job is to be queued again, though somebody has asked for no more steps.",
        only_for="runs that a STOP file has ended",
    ),
]
