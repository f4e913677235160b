"""Mistakes in lmtrain/train."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="only_saves_that_were_asked_for_reset_the_clock",
        file="lmtrain/train/loop.py",
        function="train",
        old="                last_saved = save(run)\n                requests.report_done(SAVE)\n",
        new="                last_saved = save(run)\n                if requests.save:\n"
        "                    requests.report_done(SAVE)\n",
        breaks="checkpoint.interval_s counts from the last save by time and not from the newest one, so the run saves "
        "by the clock right after it has saved by steps.",
        only_for="runs with both checkpoint.interval_steps and checkpoint.interval_s",
    ),
    Mutant(
        name="losses_by_source_are_forgotten_between_rows",
        file="lmtrain/train/run_objects_and_resume.py",
        function="restore",
        old="""in state.get("source_losses", {}).items()""",
        new="in ()",
        breaks="The first row after a resume has a mean over fewer steps than that of an uninterrupted run.",
        only_for="runs on blends whose checkpoints lie between two rows",
    ),
    Mutant(
        name="validation_by_source_mixes_batches",
        file="lmtrain/train/in_loop/validate_and_evaluate.py",
        function="sums_of_samples",
        old="sample_sums.transpose(0, 1).flatten(1)",
        new="sample_sums.transpose(0, 2).flatten(1).view(2, -1)",
        breaks="The losses of a validation by source are those of other samples, though their sum is right.",
        only_for="validation on a blend with more than one batch",
    ),
    Mutant(
        name="validation_perplexity_of_all_terms",
        file="lmtrain/train/in_loop/validate_and_evaluate.py",
        function="_row_values",
        old="math.exp(min(means[0], _MAX_NATS))",
        new="math.exp(min(math.fsum(means), _MAX_NATS))",
        breaks="The perplexity of masked tokens in a validation's row has the loss of the pairs in it.",
        only_for="models with a pair head",
    ),
    Mutant(
        name="failed_saves_are_forgotten_by_the_next_step",
        file="lmtrain/train/record/metrics_writer.py",
        function="report_save",
        old=(
            "    last = run.writer.last\n"
            "    if last is None or last.step == run.reported_save:\n"
            "        return\n"
            "    run.reported_save, run.failed_saves = last.step, 0\n"
        ),
        new=(
            "    last, run.failed_saves = run.writer.last, 0\n"
            "    if last is None or last.step == run.reported_save:\n"
            "        return\n"
            "    run.reported_save = last.step\n"
        ),
        breaks="A run whose every checkpoint fails never ends with the error of three in a row: it trains on to the "
        "end with nothing saved.",
        only_for="runs of which three saves in a row fail",
    ),
    Mutant(
        name="margin_shrinks_with_the_time_left",
        file="lmtrain/train/in_loop/save_and_stop_requests.py",
        function="Deadline.requested",
        old=(
            "        if self.margin_s is None:\n"
            "            self.margin_s = max(0.0, min(_MARGIN_SHARE * seconds_left, _MAX_MARGIN_S))\n"
            "        seconds_left -= self.margin_s + (2"
        ),
        new=(
            "        margin_s = self.margin_s\n"
            "        if margin_s is None:\n"
            "            margin_s = max(0.0, min(_MARGIN_SHARE * seconds_left, _MAX_MARGIN_S))\n"
            "        seconds_left -= margin_s + (2"
        ),
        breaks="The margin for ending the processes is next to nothing once it is needed, so a run stops up to 15 s "
        "too late and its scheduler may kill it amid the last save.",
        only_for="runs with run.time_limit or in an allocation with an end",
    ),
    Mutant(
        name="tokens_are_rounded_down_to_samples",
        file="lmtrain/train/train_settings.py",
        function="count_steps",
        old="-(-train.tokens // seq_len)",
        new="train.tokens // seq_len",
        breaks="The run ends a step before it has consumed train.tokens.",
        only_for="train.tokens that is no multiple of seq_len and lies just beyond a whole number of batches",
    ),
    Mutant(
        name="peak_of_one_device_for_all",
        file="lmtrain/train/set_up_run.py",
        function="build_throughput",
        old="peak=peak_each * mesh.world.size if peak_each else None",
        new="peak=peak_each or None",
        breaks="The MFU in rows and summary is too high by the number of processes.",
        only_for="several processes with a known peak (a known GPU, or observe.peak_tflops)",
    ),
    Mutant(
        name="a_later_stage_ends_a_ramp_up",
        file="lmtrain/train/run_config.py",
        function="plan_stages",
        old='            elif "rampup" in given.train or batch != stages[-1].train.global_batch:\n',
        new="            else:\n",
        breaks="A ramp-up of the batch ends at the first border, although the next stage changes neither batch nor "
        "ramp-up.",
        only_for="a border within a ramp-up",
    ),
    Mutant(
        name="the_vocabulary_of_the_first_stage_alone",
        file="lmtrain/train/startup_checks/preflight.py",
        function="load_stages",
        old=".with_vocab(max(sizes))",
        new=".with_vocab(sizes[0])",
        breaks="A later stage whose dataset has higher ids is refused at the start, or ends the run when it is read.",
        only_for="datasets with ids beyond their tokenizer's",
    ),
    Mutant(
        name="a_schedule_taken_from_a_stage_behind_is_not_noticed",
        file="lmtrain/train/startup_checks/compare_past_stages.py",
        function="_stage_facts",
        old='return facts | {"schedule": stage.schedule.to_dict() if stage.has_own_schedule else "that of the run"}',
        new='return facts | ({"schedule": stage.schedule.to_dict()} if stage.has_own_schedule else {})',
        breaks="A stage that was trained with a schedule of its own counts as part of the run's schedule from the "
        "next start on, which moves the rates of all stages ahead.",
        only_for="resumed runs one of whose stages behind loses its schedule",
    ),
    Mutant(
        name="another_checkpoint_in_the_parents_place_is_taken",
        file="lmtrain/train/startup_checks/check_weights_to_start_from.py",
        function="recorded_parent",
        old="digest is not None and digest != parent.manifest_sha256",
        new="digest is None",
        breaks="A branch goes on, and keeps a record that names a checkpoint from which it did not begin.",
        only_for="branches whose parent has been trained anew in the same folder",
    ),
    Mutant(
        name="epochs_of_a_source_are_those_of_one_stage",
        file="lmtrain/train/layouts/run_stages_table.py",
        function="_source_rows",
        old='tokens[part.key] += facts["run_tokens"]',
        new='tokens[part.key] = facts["run_tokens"]',
        breaks="The table of stages that a dry run prints says how often a stage reads a source, and not how often the "
        "run has read it by then.",
        only_for="runs with stages that read a source again",
    ),
    Mutant(
        name="the_average_takes_the_weights_before_the_update",
        file="lmtrain/train/loop.py",
        function="train",
        old=(
            "            result = train_step("
            "run.model, run.optimizer, batches, lr, config.optim.clip_norm, run.folder)\n"
            "            loss = result.loss\n"
            "            progress.count(batches, result, run.inputs.data.parts)\n"
            "            run.average.update(progress.step)\n"
        ),
        new=(
            "            run.average.update(progress.step + 1)\n"
            "            result = train_step("
            "run.model, run.optimizer, batches, lr, config.optim.clip_norm, run.folder)\n"
            "            loss = result.loss\n"
            "            progress.count(batches, result, run.inputs.data.parts)\n"
        ),
        breaks="The average lags a step behind the weights that are saved with it, and counts the first weights twice.",
        only_for="runs with checkpoint.ema",
    ),
]
