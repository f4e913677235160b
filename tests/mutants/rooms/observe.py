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
        name="perplexity_of_the_sum_of_terms",
        file="lmtrain/observe/screen/metrics_row_text.py",
        function="valid_line",
        old="perplexity per token {format_perplexity(tokens)}",
        new="perplexity per token {format_perplexity(loss)}",
        breaks="The perplexity per token in the log is that of all terms together, which is of no token.",
        only_for="models whose loss has several terms, as BERT with its pair head",
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
        name="tensorboard_forgets_the_step_gone_on_from",
        file="lmtrain/observe/sinks/tensorboard.py",
        function="EventWriter.__init__",
        old="step=start_step + 1)",
        new="step=start_step)",
        breaks="TensorBoard drops the values of the last step before each restart, its validation among them, which is "
        "not done again.",
        only_for="continued runs",
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
        name="half_overwritten_span_is_read",
        file="lmtrain/observe/spans/span_file.py",
        function="read_spans",
        old="newest_header.num_written + 1 - header.capacity",
        new="newest_header.num_written - header.capacity",
        breaks="The oldest record of a full ring is read, which the writer may be overwriting: spans of the wrong "
        "time, or the rank's whole file is left out as damaged.",
        only_for="traces with as many records as fit, or more, above all of runs that go on",
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
        name="heat_beside_all_stages",
        file="lmtrain/observe/timeline/step_breakdown.py",
        function="rank_heat",
        old="np.median(work[has_work & (stage == pp)])",
        new="np.median(work[has_work])",
        breaks="Each rank is held against all ranks and not against those of its stage, so the stage with the head or "
        "the embedding looks hot though nothing is wrong with it.",
        only_for="pipelines whose stages have unlike work",
    ),
    Mutant(
        name="link_timed_by_some_of_its_messages",
        file="lmtrain/parallel/pipeline/stage_to_stage_messages.py",
        function="LinkTimes.pop_times",
        old="arrived if num_arrived == steps else 0",
        new="arrived if num_arrived else 0",
        breaks="Times of fewer arrivals are set against those of more departures, and a link is found to be hours "
        "slower or quicker than it is.",
        only_for="windows in which a message of some but not all steps had come before it was asked for",
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
    Mutant(
        name="time_left_counts_what_was_there_before",
        file="lmtrain/observe/screen/command_progress.py",
        function="ProgressReporter.text",
        old="left_s = seconds * (state.total - state.done) / num_new - (now - state.at_s)",
        new="left_s = seconds * (state.total - state.done) / state.done - (now - state.at_s)",
        breaks="The time left is told as a fraction of what it is, beside a speed that says otherwise.",
        only_for="work that goes on where an earlier attempt was: tokenizing, fetching, resharding",
    ),
    Mutant(
        name="curves_of_a_branch_begin_at_step_0",
        file="lmtrain/observe/history/read_metrics_columns.py",
        function="Record._start_of",
        old="return (row_step(first), value) if first and isinstance(value, int | float) else (0.0, 0.0)",
        new="return 0.0, 0.0",
        breaks="The mark at which a branch begins stands at too many or too few tokens.",
        only_for="branches with another number of tokens in a step than their trunk",
    ),
]
