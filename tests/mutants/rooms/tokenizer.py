"""Mistakes in lmtrain/tokenizer: what decides ids, which encoder is trusted with them, and what is counted."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="last_name_of_a_role_wins",
        file="lmtrain/tokenizer/text_to_ids_and_back.py",
        function="Tokenizer.special",
        old="special[role] = ids[0]",
        new="special[role] = ids[-1]",
        breaks="Documents end with another token than the one that the model's family ends them with.",
        only_for="vocabularies with two names of one role, such as <|endoftext|> and </s>",
    ),
    Mutant(
        name="vocabulary_counted_without_gaps",
        file="lmtrain/tokenizer/vocabulary_files.py",
        function="_check_ids",
        old="return int(max(ids)) + 1",
        new="return len(ids)",
        breaks="The embedding has fewer rows than ids need, and good datasets are refused as of another tokenizer.",
        only_for="vocabularies whose ids have gaps",
    ),
]
