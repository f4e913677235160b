"""Mistakes in lmtrain/train."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="what_was_owed_is_not_saved",
        file="lmtrain/train/loop.py",
        function="train",
        old=(
            "            valid_loss = measure_pending(run, requests, evaluation)\n"
            "            last_saved = last_saved if progress.pending else None"
            "  # because: the checkpoint lists it as pending\n"
        ),
        new="            valid_loss = measure_pending(run, requests, evaluation)\n",
        breaks="Each further start measures the same validation again and writes its row once more, since the "
        "checkpoint on disk goes on saying that it is owed.",
        only_for="a run whose measurement at its very last step was cut off by a stop, and that is started again",
    ),
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
        name="terms_of_the_loss_are_taken_along_the_wrong_axis",
        file="lmtrain/train/step.py",
        function="_parts_of_loss",
        old="math.fsum(numbers[i::width])",
        new="math.fsum(numbers[i * (len(numbers) // width) : (i + 1) * (len(numbers) // width)])",
        breaks="loss/mlm and loss/pair in the rows of metrics are mixtures of both terms of some of the microbatches.",
        only_for="models with two terms (a pair head) and more than one microbatch a step",
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
        name="updates_are_counted_as_steps",
        file="lmtrain/train/run_objects_and_resume.py",
        function="checkpoint_state",
        old='"num_updates": num_updates(optimizer)',
        new='"num_updates": progress.step',
        breaks="After a resume the optimizer's bias correction counts steps that were skipped as updates, so the run "
        "does not go on as it would have without the stop.",
        only_for="fp16 runs in which a step overflowed before the checkpoint",
    ),
    Mutant(
        name="filling_batches_of_validation_keep_their_labels",
        file="lmtrain/train/in_loop/validate_and_evaluate.py",
        function="valid_batches",
        old="yield dataset.batch(sample_ids[first : first + batch_size]).without_labels().map(torch.from_numpy)",
        new="yield dataset.batch(sample_ids[first : first + batch_size]).map(torch.from_numpy)",
        breaks="The last round's first batch is scored several times while it is counted once, so the validation loss "
        "comes out too high, and depends on the layout.",
        only_for="several data-parallel copies whose number does not divide the number of validation batches",
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
        name="votes_are_added_up",
        file="lmtrain/train/in_loop/save_and_stop_requests.py",
        function="Vote.finish",
        old="self._rows[:, : self._num_reduced].max(0)]",
        new="self._rows[:, : self._num_reduced].sum(0)]",
        breaks="A signal that two ranks have got counts as another wish than a stop, so the run goes on, and the "
        "memory in the rows is the sum over ranks under the name of one.",
        only_for="several processes; the stop is missed where more than one of them gets the signal",
    ),
    Mutant(
        name="lost_starts_count_whatever_has_changed_since",
        file="lmtrain/train/in_loop/failed_start_counter.py",
        function="LostStarts.load",
        old='(record.get("step"), record.get("of")) == (self.step, self.digest)',
        new='record.get("step") == self.step',
        breaks="A run that was lost three times is refused although its settings or its code have been mended, which "
        "the message itself tells the user to do.",
        only_for="runs that were lost at a step and are started again with other settings, code or libraries",
    ),
    Mutant(
        name="digest_of_weights_counts_copies",
        file="lmtrain/train/record/metrics_writer.py",
        function="weights_digest",
        old="for piece in model.owned_pieces(model.pieces()):",
        new="for piece in model.pieces():",
        breaks="The same first weights have another weights_digest at another layout, so two runs that are alike look "
        "different.",
        only_for="layouts in which ranks hold the same numbers: dp_replicate, norms under tp, tied weights under pp",
    ),
    Mutant(
        name="last_page_of_a_dataset_is_not_compared",
        file="lmtrain/data/store/indexed_dataset.py",
        function="content_digest_of_pages",
        old="for i in range(_NUM_PAGES + 1):",
        new="for i in range(_NUM_PAGES):",
        breaks="Ranks whose copies of a dataset differ at its end (a copy that was cut off and zero-filled) train "
        "together without a word.",
        only_for="several nodes with their own copies of a dataset that has no sidecar",
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
        name="old_checkpoints_are_taken_for_room",
        file="lmtrain/train/startup_checks/preflight.py",
        function="check_run_folder",
        old="max(1, count - num_existing) for count",
        new="count - num_existing for count",
        breaks="A run on a full disk is not refused before it starts; its first save fails instead.",
        only_for="runs that go on with two or more checkpoints in their folder and save on the way",
    ),
    Mutant(
        name="step_time_of_earlier_attempts_is_that_of_a_row",
        file="lmtrain/train/step_and_save_durations.py",
        function="_durations_from_rows",
        old="durations[_STEP].append((elapsed - last[2]) / (step - last[1]))",
        new="durations[_STEP].append(elapsed - last[2])",
        breaks="A resumed run believes a step to take as long as all those between two rows, and stops that much too "
        "early before its time limit.",
        only_for="runs with a time limit that are resumed with observe.log_interval_steps above 1, the default",
    ),
    Mutant(
        name="first_weights_of_other_angles_are_taken",
        file="lmtrain/models/model_settings.py",
        function="differing_keys",
        old='facts[key].get("affects") == "training"',
        new='facts[key].get("affects") == "training" or "per_stage" in facts[key]',
        breaks="A new run begins from weights that were trained with another rotary_base, and starts at a far higher "
        "loss without a word.",
        only_for="checkpoint.init_from a rotary model with another rotary_base than model.rotary_base",
    ),
    Mutant(
        name="a_named_checkpoint_wins_over_the_runs_own",
        file="lmtrain/train/startup_checks/preflight.py",
        function="find_resume_checkpoint",
        old="newest is not None:\n        return newest",
        new="newest is not None:\n        return parent",
        breaks="A run that is started again goes back to the checkpoint that it began from, and all steps since then "
        "are done and saved anew.",
        only_for="restarts of a run that was begun with checkpoint.resume naming another run's checkpoint",
    ),
    Mutant(
        name="layout_is_said_to_need_the_processes_it_has",
        file="lmtrain/train/startup_checks/check_machine_and_processes.py",
        function="process_problems",
        old="{required} needs {layout.world_size}. {_sentence(ways)}",
        new="{required} needs {env.world_size}. {_sentence(ways)}",
        breaks="The message on a wrong number of processes names the number that was started as the one needed.",
        only_for="starts with another number of processes than the layout has",
    ),
    Mutant(
        name="best_checkpoints_of_earlier_attempts_are_forgotten",
        file="lmtrain/train/set_up_run.py",
        function="open_run",
        old="scores_before_resume(folder, config, progress.step) if is_rank_0 else {}",
        new="scores_before_resume(folder, config, progress.step) if is_rank_0 and inputs.resume_from is None else {}",
        breaks="After a resume the best checkpoint so far is removed by the next saves, as only measurements of this "
        "attempt count.",
        only_for="runs with checkpoint.keep_best that are resumed",
    ),
    Mutant(
        name="files_of_an_import_end_with_its_first_checkpoint",
        file="lmtrain/train/run_objects_and_resume.py",
        function="resume",
        old="return with_extra_files(inputs, reader, peers), progress",
        new="return inputs, progress",
        breaks="The export of a run that was resumed lacks the chat template and the lists of special ids of the model "
        "that it began from.",
        only_for="resumed runs that began from imported weights",
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
        name="two_stages_look_for_their_link_in_the_wrong_columns",
        file="lmtrain/train/straggler_watch.py",
        function="_round_trip_s",
        old="second_end = _ENDS if layout.pp == 2 else _ENDS + 2",
        new="second_end = _ENDS + 2",
        breaks="A slow link between the two stages is never named, since its times come out as not a number.",
        only_for="pipelines of exactly two ranks",
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
        name="a_ramp_up_is_done_again_where_the_batch_changes",
        file="lmtrain/train/run_config.py",
        function="_stage_tree",
        old='tree["train"]["rampup"] if is_first else given.train.get("rampup")',
        new='tree["train"]["rampup"]',
        breaks="A stage with another batch begins with the small batches of the run's ramp-up again.",
        only_for="runs with a ramp-up whose later stages have another batch",
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
        name="branch_without_a_checkpoint_begins_at_the_newest",
        file="lmtrain/train/startup_checks/preflight.py",
        function="find_resume_checkpoint",
        old="parent if parent is not None else Path(settings.resume)",
        new="Path(settings.resume)",
        breaks="A branch that was stopped before its first checkpoint begins again from a later step of the trunk.",
        only_for="--from-run RUN of a trunk that still trains",
    ),
    Mutant(
        name="a_run_that_has_saved_needs_its_parent",
        file="lmtrain/train/startup_checks/preflight.py",
        function="find_resume_checkpoint",
        old="if parent is not None and newest is not None:",
        new="if False:",
        breaks="A branch cannot go on once the trunk has removed the checkpoint from which it began.",
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
        name="warm_up_is_compared_with_all_stages",
        file="lmtrain/train/run_config.py",
        function="_adjust_warm_up_of_stages",
        old='typed_values, span.num_steps, f"{steps} together"',
        new='typed_values, config.total_steps, f"{steps} together"',
        breaks="A default warm-up is kept although the stages that follow the run's schedule are shorter, and the run "
        "is refused.",
        only_for="runs in which a stage has a schedule of its own",
    ),
    Mutant(
        name="seconds_begin_anew_at_a_border",
        file="lmtrain/train/loop.py",
        function="train",
        old="time.monotonic() - (before.seconds if before else 0.0)",
        new="time.monotonic()",
        breaks="elapsed_s falls back to 0 where a stage begins, so the time trained in reports is that of one stage.",
        only_for="runs with stages",
    ),
    Mutant(
        name="memory_of_other_stages_is_not_counted",
        file="lmtrain/train/layouts/choose_parallel_layout.py",
        function="_choose_for_stages",
        old="if all(_count_bytes(each, vocab_size) <= ranked.usable_bytes for each in chosen.stage_configs):",
        new="if chosen:",
        breaks="parallel=auto chooses a layout with which the stage that needs most memory does not fit.",
        only_for="runs whose stages differ much in length",
    ),
    Mutant(
        name="what_was_owed_at_a_border_is_measured_by_the_next_stage",
        file="lmtrain/train/startup_checks/preflight.py",
        function="load_stages",
        old="first = config.stage_at(step - 1)",
        new="first = config.stage_at(step)",
        breaks="A validation that a stop cut off at a border is made with the data and length of the next stage, and "
        "its row stands beside those of other data.",
        only_for="runs stopped in the measurement at the end of a stage",
    ),
    Mutant(
        name="z_loss_is_the_loss_of_the_first_sample",
        file="lmtrain/train/step.py",
        function="_parts_of_loss",
        old="for i in range(num_sums, len(numbers), width) for loss in numbers[i : i + width - num_sums]",
        new="for i in range(num_terms, len(numbers), width) for loss in numbers[i : i + width - num_sums]",
        breaks="Each sample's loss is counted for the source of the sample after it, and the z-loss for that of the "
        "first.",
        only_for="model.z_loss on a blend",
    ),
    Mutant(
        name="a_stage_may_not_scale_angles",
        file="lmtrain/models/rotary_settings.py",
        function="RotarySettings",
        old="rotary_factor: float = _angle(1.0)",
        new="rotary_factor: float = 1.0",
        breaks="A stage of longer texts cannot scale its rotary angles, as most published models do.",
        only_for="stages.NAME.model.rotary_scaling",
    ),
    Mutant(
        name="a_merge_without_moments_is_taken_for_an_import",
        file="lmtrain/train/startup_checks/resume_checks.py",
        function="check_same_run",
        old='if "merged" in state and "data" in state and "optimizer" not in state:',
        new='if "merged" in state and "data" not in state:',
        breaks="Who resumes from a merge without moments is told that it comes from another program, and not that a "
        "warm-up is needed or that the moments can be kept.",
        only_for="checkpoint.resume of a checkpoint that was merged with --moments none",
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
    Mutant(
        name="the_average_begins_anew_at_each_start",
        file="lmtrain/train/run_objects_and_resume.py",
        function="restore",
        old="""        average.since_step = saved["since_step"] if saved else None\n""",
        new="        average.since_step = None\n",
        breaks="Each start begins the average again as a copy of the weights: it covers that start alone.",
        only_for="runs with checkpoint.ema that were stopped and go on",
    ),
    Mutant(
        name="the_average_that_a_checkpoint_has_is_not_read",
        file="lmtrain/train/run_objects_and_resume.py",
        function="restore",
        old="(average_pieces(model, average) if saved else [])",
        new="[]",
        breaks="A run that goes on averages from the first weights of its seed on, which it left behind.",
        only_for="runs with checkpoint.ema that were stopped and go on",
    ),
    Mutant(
        name="evaluations_of_the_average_score_the_weights",
        file="lmtrain/train/in_loop/validate_and_evaluate.py",
        function="_evaluation_results",
        old="    with run.average.in_place_of_weights():\n",
        new="    with nullcontext():\n",
        breaks="The measures of the average in an evaluation row are those of the weights again.",
        only_for="runs with checkpoint.ema and eval.tasks",
    ),
    Mutant(
        name="the_disk_has_room_for_all_but_the_average",
        file="lmtrain/train/startup_checks/preflight.py",
        function="check_checkpoint_size",
        old="keeps_average=config.checkpoint.ema.is_on",
        new="keeps_average=False",
        breaks="A run begins on a disk on which its first checkpoint does not fit.",
        only_for="runs with checkpoint.ema on a disk that is nearly full",
    ),
]
