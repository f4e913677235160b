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
        file="lmtrain/data/dataset.py",
        function="labels_per_term",
        old="(num_labels, num_samples)",
        new="(num_labels, len(example.pair_labels_B))",
        breaks="The loss of sentence pairs is divided by the samples of one microbatch and not of the global batch, so "
        "it and its gradients are too large by the number of microbatches and ranks.",
        only_for="masked data with pairs where a global batch is more than one microbatch on one rank",
    ),
    Mutant(
        name="ramp_up_divides_before_it_multiplies",
        file="lmtrain/data/batch_plan.py",
        function="BatchPlan._add",
        old="rampup.samples * i // len(sizes) - position",
        new="rampup.samples // len(sizes) * i - position",
        breaks="The stages of a ramp-up end too early, so that every later step reads other positions than planned.",
        only_for="ramp-ups whose samples are no multiple of the number of stages",
    ),
    Mutant(
        name="next_epoch_is_next_seed",
        file="lmtrain/data/dataset.py",
        function="ShuffledOrder.ids",
        old="mix(mix(self.seed) + epoch * _GOLDEN)",
        new="mix(mix(self.seed + epoch))",
        breaks="Epoch 1 of one seed is read in the order of epoch 0 of the next seed; in a blend, dataset d repeats "
        "the order that dataset d + 1 of the same size had an epoch before.",
        only_for="the second epoch and later; the first is unchanged",
    ),
    Mutant(
        name="blend_identity_without_shares",
        file="lmtrain/data/assemble_training_data.py",
        function="_sample_identity",
        old="""part.indexed.num_tokens,
             str(part.share), part.indexed""",
        new="""part.indexed.num_tokens,
             part.indexed""",
        breaks="A blend that is resumed with other weights is taken for the same data: nothing is said, and samples "
        "are repeated and skipped.",
        only_for="a blend that goes on with changed weights, tokens or epochs",
    ),
    Mutant(
        name="blend_validates_until_the_last_runs_out",
        file="lmtrain/data/assemble_training_data.py",
        function="_build_valid_blend",
        old="num_samples = min(dataset.num_samples",
        new="num_samples = max(dataset.num_samples",
        breaks="Validation goes on when the first dataset of the blend has run out and reads that one's samples again "
        "and again, so that it weighs more than its data.",
        only_for="blends with uneven validation parts and train.valid_samples beyond the end of the smallest",
    ),
    Mutant(
        name="megatron_split_counts_documents",
        file="lmtrain/data/assemble_training_data.py",
        function="_DatasetBuilder.split_ranges",
        old="split_sequences(len(self.full_range(indexed)), self.split)",
        new="split_sequences(indexed.num_documents, self.split)",
        breaks="Megatron-LM's split is made of as many sequences as there are documents, so that a large part of the "
        "text is neither trained on nor validated on.",
        only_for="data.order=megatron over running text in a dataset with several sequences a document",
    ),
    Mutant(
        name="border_behind_the_share",
        file="lmtrain/data/store/document_boundaries.py",
        function="split_tokens",
        old="bound = after if map_.start(after) - target <= target - map_.start(after - 1) else after - 1",
        new="bound = after - 1",
        breaks="A long last document goes to validation whole, which then takes a quarter of the text and not 2%.",
        only_for="datasets whose last document is long",
    ),
    Mutant(
        name="checksums_of_another_part",
        file="lmtrain/data/samples/causal.py",
        function="CausalDataset.batch",
        old="self._indexed.check(sample_ids, self._sizes, self.seq_len, self.index.first_token)",
        new="self._indexed.check(sample_ids, self._sizes, self.seq_len)",
        breaks="The blocks that are compared with their checksums are those at the front of the file and not those "
        "that were read: damaged tokens are used without a word.",
        only_for="samples of documents that do not begin the dataset, such as data.split's validation part",
    ),
    Mutant(
        name="second_window_counts_rows",
        file="lmtrain/data/samples/packing.py",
        function="_pack",
        old="num_stretches += len(sizes)",
        new="num_stretches += len(counts)",
        breaks="From the second million documents on a row points to other stretches: some documents are read twice "
        "and the last ones never.",
        only_for="packing=best_fit with more than 2**20 documents",
    ),
    Mutant(
        name="packing_kept_for_any_seq_len",
        file="lmtrain/data/samples/packing.py",
        function="Packing.of",
        old='"seq_len": seq_len, "window": WINDOW',
        new='"window": WINDOW',
        breaks="A packing that was kept for a shorter sequence is used for a longer one, whose rows are then mostly "
        "padding; nothing says so.",
        only_for="datasets of four million documents or more that are packed for a second, larger seq_len",
    ),
    Mutant(
        name="a_token_too_many_before_the_last_epoch",
        file="lmtrain/data/samples/megatron_sample_order.py",
        function="Epochs.before_last",
        old="((self.num_epochs - 1) * self.tokens - 1) // self.seq_len",
        new="(self.num_epochs - 1) * self.tokens // self.seq_len",
        breaks="One sample of the last epoch is shuffled among those before it: the order is not Megatron-LM's.",
        only_for="several epochs whose tokens are a whole multiple of seq_len",
    ),
    Mutant(
        name="short_ratio_rounded_down",
        file="lmtrain/data/samples/sentence_pairs.py",
        function="build_megatron_map",
        old="int(1 / short_share + 0.5)",
        new="int(1 / short_share)",
        breaks="One sample in six is short where Megatron-LM makes one in seven, and all samples are other ones.",
        only_for="order=megatron with a short_share such as 0.15, whose inverse is nearer to the next whole number",
    ),
    Mutant(
        name="a_batch_is_of_one_epoch",
        file="lmtrain/data/samples/masked_language_samples.py",
        function="ContinuingOrder.ids",
        old="epochs = np.arange(first, first + count) // self.num_samples",
        new="epochs = first // self.num_samples",
        breaks="The first samples of a new epoch keep the numbers of the old one, so that they are masked once more as "
        "they were before and not anew.",
        only_for="masked data, in a global batch that crosses from one epoch into the next",
    ),
    Mutant(
        name="lengths_and_masks_share_a_seed",
        file="lmtrain/data/samples/masked_language_samples.py",
        function="MaskedDataset._get_sample_map",
        old='derive_seed(seed, "sentence pairs")',
        new='derive_seed(seed, "masks")',
        breaks="The length of the sample that begins at sentence n and the masks of sample n come from the same "
        "random numbers; all samples of a seed are other ones, so a run that is resumed goes on with other data.",
    ),
    Mutant(
        name="one_good_portion_is_enough",
        file="lmtrain/data/store/document_boundaries.py",
        function="_check_index",
        old="order = min(threads.map",
        new="order = max(threads.map",
        breaks="An .idx with wrong entries passes if any 65,536 documents of it are right, and samples are cut at "
        "wrong places.",
        only_for="datasets of more than 65,536 documents",
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
        name="on_disk_after_it_is_named",
        file="lmtrain/data/store/dataset_writer.py",
        function="DatasetWriter.__exit__",
        old="""self._spool.sync()
                publish(self._spool.folder, self._spool.name, self.prefix)""",
        new="""publish(self._spool.folder, self._spool.name, self.prefix)
                self._spool.sync()""",
        breaks="Files get their names before they are on disk, and afterwards none is found where they were: after a "
        "loss of power a dataset with all its names is empty or half written.",
        only_for="a machine that stops soon after `lmtrain data merge` or `split`",
    ),
    Mutant(
        name="document_index_begins_anew",
        file="lmtrain/data/store/dataset_writer.py",
        function="DatasetSpool._write_index",
        old='ends = at + np.cumsum(np.frombuffer(data, "<i8"))',
        new='ends = np.cumsum(np.frombuffer(data, "<i8"))',
        breaks="Behind the first 524,288 documents the document index begins at 0 again, and the finished dataset "
        "cannot be opened.",
        only_for="datasets of more than 524,288 documents",
    ),
    Mutant(
        name="checksum_of_the_last_stretch",
        file="lmtrain/data/store/index_cache.py",
        function="_crc_of",
        old="crc32c(file.bytes[first : first + _CRC_BYTES], crc)",
        new="crc32c(file.bytes[first : first + _CRC_BYTES])",
        breaks="Only the last 256 MiB of a kept index are covered by its checksum; damage before that is not noticed.",
        only_for="kept indexes whose arrays are larger than 256 MiB",
    ),
    Mutant(
        name="unknown_bytes_added_up",
        file="lmtrain/data/store/dataset_operations.py",
        function="merge",
        old="UNKNOWN if UNKNOWN in byte_counts else sum(byte_counts)",
        new="max(sum(byte_counts), UNKNOWN)",
        breaks="The sidecar of a merged dataset gives a number of text bytes that leaves out whole parts and is off by "
        "one, where it should say that nobody knows.",
        only_for="merging a dataset that came from `lmtrain data split` with one that was preprocessed",
    ),
    Mutant(
        name="nothing_is_recorded",
        file="lmtrain/data/store/block_checksums.py",
        function="TokenBlocks.from_record",
        old=".astype(np.uint8), record)",
        new=".astype(np.uint8))",
        breaks="What was first read of a dataset is noted nowhere, so that a later run takes damaged tokens as good.",
        only_for="datasets of other tools, which came without checksums",
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
        name="negative_id_named_as_the_highest",
        file="lmtrain/data/samples/causal.py",
        function="check_ids",
        old="{low if low < 0 else high}",
        new="{high}",
        breaks="The message about a negative id names another id of the batch, which is in the vocabulary.",
        only_for="damaged datasets of signed ids",
    ),
]
