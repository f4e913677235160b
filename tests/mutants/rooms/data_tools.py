"""Mistakes in data_tools: corpus steps, preprocessing and what it resumes, reading of files, known corpora."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="parts_removed_before_the_whole_stands",
        file="data_tools/corpus/flow/run_one_corpus_step_in_workers.py",
        function="merge_parts",
        old="""shutil.copyfileobj(source, target, 1 << 20)
    for path in parts:
        path.unlink()""",
        new="""shutil.copyfileobj(source, target, 1 << 20)
            path.unlink()""",
        breaks="Each part is removed when it is copied and not when the whole file has its name: what was merged so "
        "far is lost, and its parts with it.",
        only_for="a merge that is killed, or for which the disk is too small",
    ),
    Mutant(
        name="group_overrides_a_limit",
        file="data_tools/corpus/clean.py",
        function="build_clean",
        old="{rule: RULES[rule].limit for rule in GROUPS[name] if rule not in rules}",
        new="{rule: RULES[rule].limit for rule in GROUPS[name]}",
        breaks="A limit that the user set is silently put back to its default by the group that holds the rule.",
        only_for="a limit that stands before its group, as in --rule min_words=20 --rule gopher",
    ),
    Mutant(
        name="overlapping_runs_counted_often",
        file="data_tools/corpus/clean.py",
        function="_repeated_runs_share",
        old="properties.word_chars[np.cumsum(starts[:-1]) > 0].sum()",
        new="(properties.word_chars * np.cumsum(starts[:-1])).sum()",
        breaks="A word counts once for each repeated run that it lies in, so that the share is up to ten times too "
        "large and good documents are left out.",
        only_for="texts whose repeated passages are longer than the run that is looked for",
    ),
    Mutant(
        name="bytes_of_the_shard_before",
        file="data_tools/preprocess/resumable_dataset_writer.py",
        function="Outputs._next_shard",
        old="self.totals.shard_text_bytes = [0] * len(self.names.keys)",
        new="self.totals.shard_text_bytes[0] = 0",
        breaks="The sidecars of a later shard give the text bytes of all shards up to it.",
        only_for="the second key and those behind it, with several keys and several shards",
    ),
    Mutant(
        name="lines_counted_from_the_resume",
        file="data_tools/preprocess/preprocess_pipeline.py",
        function="_tokenize_portions",
        old="BadLines(options.on_error, options.max_bad, totals.bad, totals.line, options.names)",
        new="BadLines(options.on_error, options.max_bad, totals.bad, names=options.names)",
        breaks="Errors and the rejects file name lines that are too small by all that was read before the kill.",
        only_for="bad lines or rows of a compressed or .parquet file in whose middle a resumed run went on",
    ),
    Mutant(
        name="bad_lines_are_named_unsynced",
        file="data_tools/preprocess/resumable_dataset_writer.py",
        function="Outputs.finish",
        old="os.fsync(self._rejects.fileno())",
        new="self._rejects.flush()",
        breaks="The dataset is finished and its P.rejects.jsonl can be empty.",
        only_for="a machine that loses its power soon after `lmtrain preprocess --on-error quarantine`",
    ),
]
