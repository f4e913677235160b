"""Mistakes in lmtrain/checkpoint."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="peers_of_a_failure_have_another_exit_code",
        file="lmtrain/runtime/processes/succeed_on_all_ranks_or_none.py",
        function="collective_phase",
        old="raise error_from_peer(rows[rank][0], f",
        new="raise error_from_peer(LmtrainError.exit_code, f",
        breaks="A failed save that the run is to survive ends the ranks on which it did not fail, and the wrong exit "
        "code comes out.",
        only_for="several processes where one of them cannot write",
    ),
    Mutant(
        name="a_last_block_of_no_bytes",
        file="lmtrain/checkpoint/disk/block_hashed_file.py",
        function="HashedWriter.__exit__",
        old=(
            "                if rest := self._size % BLOCK_BYTES:\n"
            "                    self.digests.append("
            "self._hash_and_write(self._block[:rest], self._size - rest, self._fd))\n"
        ),
        new=(
            "                rest = self._size % BLOCK_BYTES\n"
            "                self.digests.append("
            "self._hash_and_write(self._block[:rest], self._size - rest, self._fd))\n"
        ),
        breaks="The list of blocks has one too many, so the checkpoint that was just saved is refused when it is read.",
        only_for="files whose size is a multiple of 4 MiB to the byte, and empty ones",
    ),
    Mutant(
        name="a_later_equal_takes_the_place_of_the_best",
        file="lmtrain/checkpoint/find_and_prune.py",
        function="rank_checkpoints",
        old="key=lambda step: (-scores[step], step))",
        new="key=lambda step: (scores[step], step), reverse=True)",
        breaks="Of checkpoints that are equally good the latest is kept and given out as RUN@best, and the one that "
        "was best first is removed.",
        only_for="two checkpoints with exactly the same measure, such as an accuracy",
    ),
    Mutant(
        name="a_merge_is_summed_in_fp32",
        file="lmtrain/checkpoint/merge/average_checkpoint_contents.py",
        function="MergedContents.read_bits",
        old="total, product = np.empty(values.size), np.empty(min(_CHUNK, values.size))",
        new="total, product = (np.empty(size, np.float32) for size in (values.size, min(_CHUNK, values.size)))",
        breaks="Each checkpoint more adds a rounding error, and a mean of equal checkpoints is not these checkpoints.",
        only_for="means whose shares are no powers of two; the error is in the last bits",
    ),
    Mutant(
        name="a_merge_has_the_order_of_its_arguments",
        file="lmtrain/checkpoint/merge/check_parents.py",
        function="sort_parents",
        old="return sorted(checkpoints, key=lambda c: (_number(c.manifest.state.get(\"samples\")), c.manifest.step))",
        new="return list(checkpoints)",
        breaks="The checkpoint that was named last gives the step, the moments and the data position, and the shares "
        "of a decay go to the wrong checkpoints.",
        only_for="checkpoints that are not named from the oldest to the newest",
    ),
    Mutant(
        name="the_average_of_the_newest_is_taken_for_that_of_the_merge",
        file="lmtrain/checkpoint/merge/average_checkpoint_contents.py",
        function="MergedContents.manifest",
        old="(AVERAGE_PREFIX,) if self.keeps_moments else (AVERAGE_PREFIX, OPTIMIZER_PREFIX)",
        new="() if self.keeps_moments else (OPTIMIZER_PREFIX,)",
        breaks="The merged checkpoint holds the average of its newest parent alone, and --weights ema evaluates that.",
        only_for="parents of runs with checkpoint.ema",
    ),
    Mutant(
        name="models_that_began_with_another_spread_have_one_ancestor",
        file="lmtrain/checkpoint/merge/check_parents.py",
        function="check_parents",
        old="_ancestors(parent, checked_model(parent))",
        new="_ancestors(parent, model)",
        breaks="Runs of the same seed whose first weights differ are merged without --force.",
        only_for="runs of one seed with another init_std",
    ),
    Mutant(
        name="a_copy_in_another_layout_counts_as_another_checkpoint",
        file="lmtrain/checkpoint/merge/check_parents.py",
        function="sort_parents",
        old="for identity in {contents.identity, str(original or contents.identity)}:",
        new="for identity in (contents.identity,):",
        breaks="A checkpoint and its resharded copy are merged, so that this one counts twice.",
        only_for="a checkpoint that is given once more in another layout",
    ),
    Mutant(
        name="key_of_a_merge_forgets_the_shares",
        file="lmtrain/checkpoint/merge/average_checkpoint_contents.py",
        function="MergedContents.identity",
        old="json.dumps([\"merge\", parts, self.mean, self.keeps_moments])",
        new="json.dumps([\"merge\", [identity for identity, _ in parts], self.keeps_moments])",
        breaks="The same checkpoints with another --mean pass for merged already, and a killed merge with another mean "
        "keeps the blocks of the first.",
        only_for="an output, or a work folder, that was made with another mean",
    ),
]
