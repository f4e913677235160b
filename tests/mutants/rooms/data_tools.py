"""Mistakes in data_tools: corpus steps, preprocessing and what it resumes, reading of files, known corpora."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="batch_border_between_copies",
        file="data_tools/corpus/copies/dedupe.py",
        function="mark_exact",
        old="last = batch[-1:, :2]",
        new="last = batch[:0, :2]",
        breaks="A copy whose original ended the batch before is not recognized and stays in the corpus.",
        only_for="corpora so large that sorting their hashes spills to disk",
    ),
    Mutant(
        name="document_zero_has_no_id",
        file="data_tools/corpus/split_sample_shuffle.py",
        function="SplitStep.run",
        old="if document_id is None else",
        new="if not document_id else",
        breaks="Texts with the id 0 are split by their text, so that parts of one source come to train and to test.",
        only_for="--by id, where an id is 0 or an empty string",
    ),
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
        name="first_stream_of_an_archive",
        file="data_tools/read/compressed_and_parquet_readers.py",
        function="_decompress",
        old="data = _next_archive(decompressor.unused_data, file) if decompressor.eof else file.read(_FEED_BYTES)",
        new='data = b"" if decompressor.eof else file.read(_FEED_BYTES)',
        breaks="Reading ends after the first of the streams of which an archive is made; the rest of the text is "
        "missing, and nothing says so.",
        only_for=".bz2 and .xz files of several streams, such as pbzip2's and Wikipedia's multistream dumps",
    ),
    Mutant(
        name="longest_document_in_characters",
        file="data_tools/read/parse_chunks_and_bad_lines.py",
        function="TextList.drop_long",
        old="4 * len(text) > most and len(text.encode() if isinstance(text, str) else text) > most",
        new="len(text) > most",
        breaks="Texts of up to four times as many bytes as a document may have are taken.",
        only_for="rows of .parquet files beyond ASCII that are longer than the limit in bytes but not in characters",
    ),
    Mutant(
        name="a_dataset_of_a_text_is_made_again_after_a_kill",
        file="data_tools/preprocess/tokenizer_and_dataset_from_text.py",
        function="TextFolder._make_steps",
        old="if not self._has_dataset(tokenizer):",
        new="if True:",
        breaks="A start that is killed when all but the record is written tokenizes the whole text once more.",
        only_for="a kill in the moment between the dataset and its record",
    ),
    Mutant(
        name="a_text_of_the_same_size_counts_as_unchanged",
        file="data_tools/preprocess/tokenizer_and_dataset_from_text.py",
        function="_first_change",
        old="if was[name] != now[name]:",
        new="if was[name][0] != now[name][0]:",
        breaks="A run goes on with the old text after letters of its file were replaced by as many others.",
        only_for="a resumed run of data.text whose text has changed and kept its size",
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
