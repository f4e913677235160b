"""Mistakes in lmtrain/eval."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="packed_requests_keep_counting_positions",
        file="lmtrain/eval/score_targets.py",
        function="collate",
        old="positions_BT[row, start:stop] = np.arange(stop - start)",
        new="positions_BT[row, start:stop] = np.arange(start, stop)",
        breaks="Requests behind the first of their row are scored at wrong positions, and answers depend on what they "
        "are batched with.",
        only_for="models with learned positions, where short requests share a row",
    ),
    Mutant(
        name="every_fifty_resamples_are_the_same",
        file="lmtrain/eval/statistics.py",
        function="resampled_sums",
        old=(
            "    random = np.random.default_rng(SEED)\n"
            "    for first in range(0, resamples, _RESAMPLES_AT_ONCE):\n"
            "        rows = min(_RESAMPLES_AT_ONCE, resamples - first)\n"
        ),
        new=(
            "    for first in range(0, resamples, _RESAMPLES_AT_ONCE):\n"
            "        random = np.random.default_rng(SEED)\n"
            "        rows = min(_RESAMPLES_AT_ONCE, resamples - first)\n"
        ),
        breaks="Intervals and comparisons rest on 50 resamples, each twenty times, while the result says 1000.",
    ),
    Mutant(
        name="ninety_percent_under_the_name_of_ninety_five",
        file="lmtrain/eval/statistics.py",
        function="middle_interval",
        old="edge = (1 - LEVEL) / 2",
        new="edge = 1 - LEVEL",
        breaks="What is called a 95% interval encloses 90%, so differences are called clear that may be chance.",
    ),
    Mutant(
        name="the_question_itself_is_shown_with_its_answer",
        file="lmtrain/eval/tasks/choice.py",
        function="Shots.text_before",
        old="islice((row for row in self.rows if _question_key(row) != _question_key(question)), self.count)",
        new="islice(self.rows, self.count)",
        breaks="Questions have their own right answer shown before them, and the accuracy comes out too high.",
        only_for="a shots_file that holds questions which are also asked, the first ones of it",
    ),
    Mutant(
        name="long_rows_lose_one_token_too_many",
        file="lmtrain/eval/tasks/choice.py",
        function="Choice.prepare",
        old="tokens = np.array(ids[-(options.seq_len + 1) :], np.int64)",
        new="tokens = np.array(ids[-options.seq_len :], np.int64)",
        breaks="The model is fed one token of context less than it sees, so scores differ from the protocol's.",
        only_for="rows of more than seq_len tokens",
    ),
    Mutant(
        name="wikihow_rows_keep_their_brackets",
        file="lmtrain/eval/tasks/hellaswag.yaml",
        function="",
        old="clean: wikihow\n",
        new="clean: none\n",
        breaks="Texts are scored with [header], [title] and [step] in them, so the accuracy is not lm-evaluation-"
        "harness's.",
        only_for="HellaSwag rows that came from WikiHow, about two thirds of them",
    ),
    Mutant(
        name="prompt_loses_its_last_spaces",
        file="lmtrain/eval/read_prompts.py",
        function="read_prompt",
        old='.removesuffix("\\n").removesuffix("\\r")',
        new=".rstrip()",
        breaks="The model goes on from other tokens than those that were piped in, and the same prompt by --prompt "
        "gives another text.",
        only_for="prompts from a pipe or a file that end with spaces, tabs or an empty line",
    ),
    Mutant(
        name="nucleus_before_the_top_k",
        file="lmtrain/eval/sample_text_from_prompt.py",
        function="draw_token",
        old="_keep_top_p(_keep_top_k(logits_V / sampling.temperature, sampling.top_k), sampling.top_p)",
        new="_keep_top_k(_keep_top_p(logits_V / sampling.temperature, sampling.top_p), sampling.top_k)",
        breaks="--top-p is measured on the whole vocabulary and not on what --top-k has left, so tokens are drawn that "
        "should be out.",
        only_for="generation with both --top-k and --top-p",
    ),
    Mutant(
        name="answers_of_another_precision_are_taken",
        file="lmtrain/eval/resume_journal.py",
        function="model_identity",
        old='return "\\0".join([digest.hexdigest(), *computation])',
        new="return digest.hexdigest()",
        breaks="The result mixes answers of two precisions or layouts and says that all are of the second.",
        only_for="an evaluation that was killed and is gone on with by another --precision, device or layout",
    ),
    Mutant(
        name="shared_answers_are_taken_from_the_wrong_end",
        file="lmtrain/eval/score_targets.py",
        function="SharedAnswers._find",
        old=(
            "        start = len(answer.nll) - request.num_scored\n"
            "        return TargetScores(answer.nll[start:], answer.greedy[start:])\n"
        ),
        new="        return TargetScores(answer.nll[: request.num_scored], answer.greedy[: request.num_scored])\n",
        breaks="A task gets the numbers of a word's first token where it asks for the last.",
        only_for="several tasks in one call that feed the same tokens and score fewer of them than the one before, as "
        "both LAMBADA protocols of Megatron do",
    ),
    Mutant(
        name="newlines_are_translated",
        file="lmtrain/eval/read_texts.py",
        function="read_text_file",
        old='return data.decode("utf-8"), hashlib',
        new='return source.read_text(encoding="utf-8"), hashlib',
        breaks="Carriage returns are scored as newlines: another text than the SHA-256 in the result is of, and the "
        "note on them is gone.",
        only_for="files with carriage returns",
    ),
    Mutant(
        name="blanks_at_the_ends_count_as_words",
        file="lmtrain/eval/tasks/wikitext.py",
        function="spaces_by_article",
        old="max(begin, first), min(end, stop)",
        new="begin, end",
        breaks="The loss is divided by more words than the denominator in the result says, and the perplexity is not "
        "the published one's.",
        only_for="files that begin or end in blanks, as wiki.test.tokens does",
    ),
    Mutant(
        name="four_bytes_count_as_three",
        file="lmtrain/eval/tasks/wikitext.py",
        function="_bytes_of_each_token",
        old="widths = 1 + (points > 0x7F) + (points > 0x7FF) + (points > 0xFFFF)",
        new="widths = 1 + (points > 0x7F) + (points > 0x7FF)",
        breaks="The number of bytes is too small and bits per byte are too large.",
        only_for="texts with characters beyond U+FFFF, such as emoji or Gothic letters",
    ),
    Mutant(
        name="baselines_are_divided_by_the_bytes_of_all_items",
        file="lmtrain/eval/statistics.py",
        function="_baseline_result",
        old='float(prepared.text_columns["bytes"].sum())',
        new="float(prepared.facts.num_bytes)",
        breaks="The baselines' bits per byte are far too small, so that the model seems to be worse than counting.",
        only_for="--baseline together with --limit",
    ),
    Mutant(
        name="bytes_of_a_dataset_are_those_of_its_tokens",
        file="lmtrain/eval/task_recipes/hash_and_count_texts.py",
        function="describe_dataset",
        old='{"bytes": decoded * ratio(num_bytes, decoded.sum())}',
        new='{"bytes": decoded}',
        breaks="Bits per byte are divided by another number of bytes than the result states, and the same text as a "
        "file and as a dataset gives two numbers.",
        only_for="datasets with a sidecar whose tokenizer does not give back every byte of a text",
    ),
]
