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
        name="newest_by_name",
        file="lmtrain/runfolder/file_names.py",
        function="checkpoint_names",
        old="for step in sorted(step for step in steps if step is not None)",
        new="for step in sorted((step for step in steps if step is not None), key=str)",
        breaks="step_100000000 counts as older than step_99999999: the run goes on from the older one, and retention "
        "removes the newer.",
        only_for="steps of more digits than others in the folder, from 100,000,000 on",
    ),
]
