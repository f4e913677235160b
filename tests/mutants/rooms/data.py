"""Mistakes in lmtrain/data: order, samples, blends, the files of a dataset and what guards them."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="ranks_take_blocks_of_the_batch",
        file="lmtrain/data/loader.py",
        function="Loader.read",
        old="own_ids = ids.reshape(-1, self.dp_size, self.micro_batch)[:, self.dp_index]",
        new="own_ids = ids.reshape(self.dp_size, -1, self.micro_batch)[self.dp_index]",
        breaks="Each rank reads one long stretch of the global batch, so which samples share microbatch m (and its "
        "dropout noise) depends on the number of ranks.",
        only_for="dp > 1 with several microbatches a step; the samples of the whole step are still the right ones",
    ),
    Mutant(
        name="pairs_counted_by_microbatch",
        file="lmtrain/data/sample_dataset_interface.py",
        function="labels_per_term",
        old="(num_labels, num_samples)",
        new="(num_labels, len(example.pair_labels_B))",
        breaks="The loss of sentence pairs is divided by the samples of one microbatch and not of the global batch, so "
        "it and its gradients are too large by the number of microbatches and ranks.",
        only_for="masked data with pairs where a global batch is more than one microbatch on one rank",
    ),
    Mutant(
        name="ramp_up_divides_before_it_multiplies",
        file="lmtrain/data/batch_size_per_step.py",
        function="BatchPlan._add",
        old="rampup.samples * i // len(sizes) - position",
        new="rampup.samples // len(sizes) * i - position",
        breaks="The stages of a ramp-up end too early, so that every later step reads other positions than planned.",
        only_for="ramp-ups whose samples are no multiple of the number of stages",
    ),
    Mutant(
        name="next_epoch_is_next_seed",
        file="lmtrain/data/sample_dataset_interface.py",
        function="ShuffledOrder.ids",
        old="mix(mix(self.seed) + epoch * GOLDEN)",
        new="mix(mix(self.seed + epoch))",
        breaks="Epoch 1 of one seed is read in the order of epoch 0 of the next seed; in a blend, dataset d repeats "
        "the order that dataset d + 1 of the same size had an epoch before.",
        only_for="the second epoch and later; the first is unchanged",
    ),
    Mutant(
        name="epochs_count_documents_that_are_held_out",
        file="lmtrain/data/assemble_training_data.py",
        function="_build_blend",
        old="builder.count_tokens(indexed, documents) if part is None",
        new="indexed.num_tokens if part is None",
        breaks="A source has been read more often than its epochs say, and data.max_epochs warns too late.",
        only_for="blends of which data.split holds documents out",
    ),
    Mutant(
        name="megatron_split_counts_documents",
        file="lmtrain/data/cut_datasets_into_samples.py",
        function="DatasetBuilder.split_ranges",
        old="split_sequences(len(self.full_range(indexed)), self.split)",
        new="split_sequences(indexed.num_documents, self.split)",
        breaks="Megatron-LM's split is made of as many sequences as there are documents, so that a large part of the "
        "text is neither trained on nor validated on.",
        only_for="data.order=megatron over running text in a dataset with several sequences a document",
    ),
    Mutant(
        name="index_gets_its_name_first",
        file="lmtrain/data/store/dataset_writer.py",
        function="publish",
        old='(".bin", ".tokenizer.json", ".blocks", ".json", ".idx")',
        new='(".idx", ".bin", ".tokenizer.json", ".blocks", ".json")',
        breaks="A dataset that was killed while its files were renamed looks finished by its .idx; the next run finds "
        "nothing left to do and throws the tokens away.",
        only_for="a process that is killed in the middle of renaming",
    ),
    Mutant(
        name="unknown_bytes_added_up",
        file="lmtrain/data/store/merge_split_verify_datasets.py",
        function="merge",
        old="UNKNOWN if UNKNOWN in byte_counts else sum(byte_counts)",
        new="max(sum(byte_counts), UNKNOWN)",
        breaks="The sidecar of a merged dataset gives a number of text bytes that leaves out whole parts and is off by "
        "one, where it should say that nobody knows.",
        only_for="merging a dataset that came from `lmtrain data split` with one that was preprocessed",
    ),
    Mutant(
        name="blends_are_not_verified",
        file="conf/data/blend.yaml",
        function="",
        old="verify: read",
        new="verify: none",
        breaks="Tokens are never compared with their checksums unless the user asks for it, which the docs do not say.",
        only_for="data=blend",
    ),
    Mutant(
        name="a_stream_begins_anew_in_each_mixture",
        file="lmtrain/data/resume_position_by_source.py",
        function="DataHistory.begin",
        old="dict(self.states_at(position))",
        new="dict(self.states)",
        breaks="A later stage trains on the samples of a dataset that the run has read before, and never reaches "
        "the others.",
        only_for="stages whose mixture shares a dataset with an earlier one",
    ),
    Mutant(
        name="a_restart_is_ignored",
        file="lmtrain/data/resume_position_by_source.py",
        function="DataHistory.begin",
        old="            elif restart:\n",
        new="            elif restart and not self.streams:\n",
        breaks="restart: true of an entry is accepted and has no effect.",
        only_for="stages that restart a dataset",
    ),
    Mutant(
        name="a_blend_of_one_dataset_has_the_seed_of_a_dataset",
        file="lmtrain/data/assemble_training_data.py",
        function="_continue_history",
        old="if is_blend else [seed]",
        new="if len(parts) > 1 else [seed]",
        breaks="A run on a blend of a single dataset reads another order after it was resumed.",
        only_for="data=blend with one entry",
    ),
    Mutant(
        name="batches_of_the_stages_behind_must_fit_too",
        file="lmtrain/data/loader.py",
        function="Loader.__init__",
        old="plan.sizes_between(first_step)",
        new="plan.sizes_between(0)",
        breaks="A run ends with an error at a border, hours after its start, since the smaller batch of the stage "
        "behind does not suit the micro-batch of the next.",
        only_for="stages with larger batches and micro-batches than an earlier one",
    ),
    Mutant(
        name="damage_of_a_later_shard_is_not_seen",
        file="lmtrain/data/store/joined_dataset.py",
        function="JoinedDataset.check",
        old="for k, shard in enumerate(self.shards):",
        new="for k, shard in enumerate(self.shards[:1]):",
        breaks="A run trains on damaged tokens of every shard but the first.",
        only_for="data.path of shards that are read as one dataset, of which a later one is damaged",
    ),
]
