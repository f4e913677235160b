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
]
