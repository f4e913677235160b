"""Mistakes in lmtrain/observe, lmtrain/cli/page, names of measures, times of messages: records, watch, charts."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="torn_row_cut_once",
        file="lmtrain/observe/metrics.py",
        function="MetricsLog.__init__",
        old="while torn := self._file.last_line():",
        new="if torn := self._file.last_line():",
        breaks="The beginning of a torn row stays, the next row is written behind it, and the whole file is refused as "
        "damaged.",
        only_for="a kill amid a row of which more than 64 KiB were written, as a memory row of thousands of ranks",
    ),
    Mutant(
        name="only_the_next_start_takes_rows_away",
        file="lmtrain/observe/history/read_metrics_columns.py",
        function="_Reader._events_in_force",
        old="resumed_step = min(start_steps[before:], default=row_step(row))",
        new="resumed_step = start_steps[before] if before < len(start_steps) else row_step(row)",
        breaks="Validations, evaluations and saves of steps that were undone by a later start still stand in the "
        "report beside those that replaced them.",
        only_for="runs of three or more starts of which a later one went back further than the one before it",
    ),
    Mutant(
        name="memory_told_once_all_have_grown",
        file="lmtrain/observe/measure/process_and_gpu_memory.py",
        function="Memory.grown_peaks",
        old="if not any(new > _GROWN * old for new, old in zip(self._peaks, before, strict=True)):",
        new="if not self._peaks or not all(new > _GROWN * old for new, old in zip(self._peaks, before, strict=True)):",
        breaks="No row of memory tells that one rank is filling up, and the report shows its old peak until it is "
        "killed.",
        only_for="several ranks of which some hold clearly more than before and others do not",
    ),
    Mutant(
        name="better_by_any_part_of_a_name",
        file="lmtrain/runfolder/tensorboard_metric_names.py",
        function="larger_is_better",
        old='return "accuracy" in last if first == "eval" else "accuracy" in words',
        new='return "accuracy" in name',
        breaks="A loss or perplexity counts as better the larger it is: checkpoint.keep_best keeps the worst ones and "
        "removes the best.",
        only_for="domains and evaluations whose own name has the word accuracy in it",
    ),
    Mutant(
        name="only_small_letters_end_a_script",
        file="lmtrain/cli/page/svg_line_charts.py",
        function="Charts.to_json",
        old=r""".replace("<", "\\u003c")""",
        new=r""".replace("</script", "<\\/script")""",
        breaks="A name in the data can end the page's script element: all curves are gone, and what follows it is run.",
        only_for="runs or evaluations whose names hold </SCRIPT> or an opened comment with a script in it",
    ),
    Mutant(
        name="hidden_runs_still_stretch_the_axis",
        file="lmtrain/cli/page/chart.js",
        function="",
        old="for (const curve of shown(figure))\n        for (const value of",
        new="for (const curve of figure.curves)\n        for (const value of",
        breaks="Hiding a long run leaves the short ones squeezed into a corner, since the axis still spans all.",
        only_for="reports of several runs of which some are hidden",
    ),
    Mutant(
        name="damaged_trace_is_said_to_be_wrong_throughout",
        file="lmtrain/observe/spans/span_file.py",
        function="_check_spans",
        old="{int(mask.sum())} of its {len(spans)} records",
        new="{len(spans)} of its {len(spans)} records",
        breaks="The message on a damaged trace counts all records as damaged, so that a file with one flipped bit "
        "looks lost.",
        only_for="trace files in which some records are damaged",
    ),
    Mutant(
        name="watch_forgets_what_earlier_starts_took",
        file="lmtrain/observe/hang_watch/hang_verdict.py",
        function="Limits.record_times",
        old="max(seconds, self.longest_s.get(key, 0.0), self.earlier_s.get(key, 0.0))",
        new="max(seconds, self.longest_s.get(key, 0.0))",
        breaks="A run that is going well is ended as hung, because a save or a validation takes as long as it did "
        "before the restart and not as short as in this start.",
        only_for="starts after the first, and phases that once took more than ten times what this start has seen",
    ),
]
