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
        name="a_blend_of_one_dataset_has_the_seed_of_a_dataset",
        file="lmtrain/data/assemble_training_data.py",
        function="_continue_history",
        old="if is_blend else [seed]",
        new="if len(parts) > 1 else [seed]",
        breaks="A run on a blend of a single dataset reads another order after it was resumed.",
        only_for="data=blend with one entry",
    ),
]
